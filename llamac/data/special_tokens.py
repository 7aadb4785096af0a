"""The special tokens of a model's directory, by transformers' rules; test_tokenizer_json.py compares them.

tokenizer_config.json names them. Only where it has no added_tokens_decoder, special_tokens_map.json precedes
it, and added_tokens.json adds tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamac.base.errors import InputError
from llamac.base.files import excerpt, expect, read_json

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
Token = dict[str, Any]  # content, and those of _FLAGS that the directory sets


@dataclass(frozen=True)
class SpecialTokens:
    """names: text by role, of ROLES and of the model's own, as chat templates see them. listed: tokens whose
    flags replace tokenizer.json's, by id. others: tokens that are added unless the tokenizer has them. split:
    whether the name of a special token in a text is ordinary text."""

    names: dict[str, str]
    listed: list[Token]
    others: list[Token]
    split: bool


def read(directory: str | Path, own: Mapping[str, Any] | None = None) -> SpecialTokens:
    """Of a directory. own: the content of its tokenizer.json. Raises InputError."""
    own = own or {}
    config, special_map, added = (Path(directory) / name for name in FILES)
    settings = _object(config)
    legacy = "added_tokens_decoder" not in settings
    overrides = _object(special_map) if legacy else {}
    found: dict[str, Token] = {}  # by role
    own_roles: dict[str, Token] = {}
    extra: list[Token] = []
    plain: set[str] = set()
    padding = own.get("padding")
    if padding and "pad_token" not in settings:
        found["pad_token"] = {"content": padding["pad_token"], "special": True}
    for path, values in ((config, settings), (special_map, overrides)):
        more = values.get("extra_special_tokens")
        more = more or (not extra and values.get("additional_special_tokens")) or []
        if isinstance(more, dict):  # the model's own roles
            own_roles |= {role: _token(path, role, value) for role, value in more.items()}
        else:
            tokens = [
                _token(path, "extra_special_tokens", value) for value in expect(more, [object], str(path))
            ]
            extra += [token for token in tokens if token not in extra]
            plain |= {token["content"] for value, token in zip(more, tokens) if not _is_typed(value)}
        for role, value in values.items():
            if value is None or value == "":
                found.pop(role, None)
            elif role in ROLES or (role.endswith("_token") and isinstance(value, (str, dict))):
                found[role] = _token(path, role, value)
    listed: dict[int, Token] = {}
    if legacy:
        # Here transformers knows neither objects with a __type nor tokenizer.json's padding.
        given = {role: value for role, value in (settings | overrides).items() if role in ROLES and value}
        plain |= {found[role]["content"] for role, value in given.items() if not _is_typed(value)}
        for name, id in _object(added).items():
            is_special = name in plain
            listed[_id(added, id)] = {"content": name, "normalized": not is_special, "special": is_special}
        listed |= {token["id"]: _token(added, "", token) for token in own.get("added_tokens") or []}
    else:
        for id, value in expect(settings["added_tokens_decoder"] or {}, {}, str(config)).items():
            listed[_id(config, id)] = _token(config, f"added_tokens_decoder.{id}", value)
    roles = {role: found[role] for role in (*ROLES, *found) if role in found} | own_roles
    names = {role: token["content"] for role, token in roles.items()}
    special = set(names.values())
    return SpecialTokens(
        names,
        [_with_special(listed[id], special) for id in sorted(listed)],
        [_with_special(token, special) for token in (*roles.values(), *extra)],
        settings.get("split_special_tokens") is True,
    )


def _is_typed(value: Any) -> bool:
    return isinstance(value, dict) and "__type" in value


def _with_special(token: Token, names: set[str]) -> Token:
    return {**token, "special": True} if token["content"] in names else token


def _object(path: Path) -> dict[str, Any]:
    """The content of a file of settings; {} where there is none."""
    return read_json(path, {}) if path.exists() else {}


def _id(path: Path, value: Any) -> int:
    if not str(value).isdecimal():
        raise InputError(f"{path}: expected the id of a token, found {excerpt(value)}")
    return int(value)


def _token(path: Path, field: str, value: Any) -> Token:
    """Of a text, or of an object with its content and flags."""
    token = value if isinstance(value, dict) else {"content": value, "special": True}
    if not isinstance(token.get("content"), str):
        raise InputError(f"{path}: {field}: expected the text of a token, found {excerpt(value)}")
    is_special = {"special": True} if path.name == FILES[1] else {}
    return {"content": token["content"]} | {f: bool(token[f]) for f in _FLAGS if f in token} | is_special
