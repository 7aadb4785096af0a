"""Tiny Shakespeare in GPT-2's tokens: 32,768 for validation, 305,260 for training, as in llm.c.

Writes to --out: tokenizer.tiktoken (GPT-2's ranks), tokenizer.json and tokenizer_config.json (the same for
transformers), val_000.bin, train_000.bin. The ranks come through tiktoken, which downloads them once
(TIKTOKEN_CACHE_DIR says where they stay).
"""

import argparse
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from llamac import tokenizer
from llamac.data import write_shards
from llamac.errors import InputError, run

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
VAL_TOKENS = 32768


def paragraphs(text: str) -> list[str]:
    """The text cut behind each blank line."""
    parts = text.split("\n\n")
    return [part + "\n\n" for part in parts[:-1]] + parts[-1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--input", type=Path, metavar="FILE", help="the text, instead of downloading it")
    parser.add_argument("--out", type=Path, default=Path("data/tinyshakespeare"), metavar="DIR")
    parser.add_argument("--val-tokens", type=int, default=VAL_TOKENS, metavar="N")
    arguments = parser.parse_args()
    if arguments.input:
        content = arguments.input.read_bytes()
    else:
        with urllib.request.urlopen(URL, timeout=60) as answer:
            content = answer.read()
    out = arguments.out
    ranks = tokenizer.gpt2_ranks()  # before the folder is made: there may be none
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(out / "tokenizer.tiktoken", ranks)
    gpt2 = tokenizer.load(out / "tokenizer.tiktoken")
    tokenizer.export(out, gpt2)
    try:
        tokens = gpt2.encode_documents(paragraphs(content.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        raise InputError(f"{arguments.input or URL}: expected UTF-8: {error}") from None
    if len(tokens) <= arguments.val_tokens:
        raise InputError(f"expected more than {arguments.val_tokens} tokens, found {len(tokens)}")
    for split, part in (("val", tokens[: arguments.val_tokens]), ("train", tokens[arguments.val_tokens :])):
        write_shards(out, split, part, gpt2.vocab_size, gpt2.hash)
        print(f"{out / split}_000.bin: {len(part):,} tokens")


if __name__ == "__main__":
    run(main)
