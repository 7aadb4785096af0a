"""Files of a model that training does not change, in addition to its weights: those of a tokenizer, and the
settings for generation. Checkpoints contain copies, by the rule of the C program (train/carried_files.h;
tests/test_program.py compares checkpoints).
"""

from pathlib import Path

from llamac.files import read_bytes

TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
GENERATION = ("generation_config.json",)


def read_carried_files(model: str | Path, rank_file: str | Path | None) -> dict[str, bytes]:
    """{name: content} of those of the model's directory; where that has no tokenizer, or is none, of the
    tokenizer's that lies beside the rank file, if there is one. A generation_config.json beside the rank file
    precedes the model's: packed conversations have their own.
    """
    beside = Path(rank_file).parent if rank_file else None
    found = _contents(Path(model), TOKENIZER)
    if not found and beside:
        found = _contents(beside, TOKENIZER)
    own = _contents(beside, GENERATION) if beside else {}
    return found | (own or _contents(Path(model), GENERATION))


def _contents(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: read_bytes(folder / name) for name in names if (folder / name).exists()}
