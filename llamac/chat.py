"""Chat templates: convert a conversation to a model's text format, with the template of its directory."""

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamac import limited, special_tokens
from llamac.errors import InputError
from llamac.files import check_text, read_json, read_text

# What stands around the text of a {% generation %} block while it is rendered: characters that no text has.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_KIND = {"chat_template": (str, [{"name": str, "template": str}], None)}


@dataclass(frozen=True)
class Template:
    """path: of the file that it stands in. source: Jinja, as transformers takes it. tokens: texts of special
    tokens by their roles."""

    path: Path
    source: str
    tokens: dict[str, str]

    def render(
        self, messages: Sequence[dict[str, Any]], tokenizer: Any = None, answer_begins: bool = True
    ) -> str:
        """The text of messages, {"role": ..., "content": ...} each; answer_begins: with what stands before
        the assistant's next one. tokenizer: names the tokens that the directory does not. As
        `apply_chat_template` of transformers renders it. Raises InputError."""
        return self.render_answers(messages, tokenizer, answer_begins)[0]

    def render_answers(
        self, messages: Sequence[dict[str, Any]], tokenizer: Any = None, answer_begins: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """(the text as render() has it, where in it the answers begin and end, in characters). Answers are
        what {% generation %} blocks of the template write; most templates have none."""
        names = {} if tokenizer is None else tokenizer.names
        arguments = list(messages), names | self.tokens, answer_begins
        return _without_marks(limited.call(f"{self.path}: chat template", self._rendered, *arguments))

    def _rendered(self, messages: list[dict[str, Any]], tokens: dict[str, str], answer_begins: bool) -> str:
        """With marks."""
        try:
            from jinja2.exceptions import TemplateRuntimeError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise InputError(
                "chat templates: expected the package jinja2, found none: pip install jinja2"
            ) from None

        def refuse(message: str) -> None:
            raise TemplateRuntimeError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            template = environment.from_string(self.source)
            return template.render(
                messages=messages,
                add_generation_prompt=answer_begins,
                tools=None,
                documents=None,
                **tokens,
            )
        except Exception as error:  # whatever its expressions raise
            raise InputError(f"{self.path}: chat template: {str(error) or type(error).__name__}") from None


def load(directory: str | Path) -> Template:
    """Of chat_template.jinja, or the field chat_template of tokenizer_config.json or chat_template.json.
    Raises InputError where there is none."""
    folder = Path(directory)
    settings = folder / "tokenizer_config.json"
    root = read_json(settings, _KIND) if settings.exists() else {}
    tokens = special_tokens.read(folder).names
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        return Template(jinja, read_text(jinja), tokens)
    other = folder / "chat_template.json"
    for path, found in ((settings, root), (other, read_json(other, _KIND) if other.exists() else {})):
        source = found.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = next((each["template"] for each in source if each["name"] == "default"), None)
        if isinstance(source, str):
            return Template(path, source, tokens)
    raise InputError(
        f"{folder}: expected a chat template, chat_template.jinja or chat_template in tokenizer_config.json, "
        "found none"
    )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a rendered text: names of special tokens are these tokens, and none is added."""
    check_text(text, "conversation")
    if hasattr(tokenizer, "backend"):
        return encode_with_places(tokenizer, text)[0]
    return tokenizer.encode_with_special_tokens(text)


def encode_with_places(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """encode() of a JsonTokenizer, and where in the text each token begins and ends, in characters."""
    own = tokenizer.backend
    before, own.encode_special_tokens = own.encode_special_tokens, False
    try:
        found = own.encode(text, add_special_tokens=False)
        return found.ids, found.offsets
    finally:
        own.encode_special_tokens = before


def _generation_tag() -> type:
    """{% generation %} ... {% endgeneration %}, transformers' extension of Jinja: what is between, marked."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_BEGIN, _END))
            return [begin, *body, end]

    return GenerationTag


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """(the text, the stretches that were between marks)."""
    first, *marked = text.split(_BEGIN)
    plain, stretches = [first], []
    at = len(first)
    for part in marked:
        answer, _, rest = part.partition(_END)
        stretches.append((at, at + len(answer)))
        plain += [answer, rest]
        at += len(answer) + len(rest)
    return "".join(plain), stretches


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """As transformers: text as it is, not escaped for HTML."""
    how: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)
