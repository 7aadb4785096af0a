"""The shared parts of byte-level BPE tokenizers: split patterns, the letters of bytes, the file of ranks."""

import base64

import numpy as np
import tiktoken
import xxhash

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level BPE: itself where printable, else U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def encode_fast(encoding: tiktoken.Encoding, text: str) -> np.ndarray | None:
    """uint32 [n] without a list; no special tokens. None where tiktoken's regular expressions give up, as
    on a megabyte of spaces.
    """
    try:
        return encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
    except ValueError:
        return None


def rank_file(ranks: dict[bytes, int]) -> bytes:
    """The content of the file that tokenizer.save() writes."""
    by_rank = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in by_rank)


def rank_hash(ranks: dict[bytes, int]) -> int:
    """XXH3_64 of the rank file that tokenizer.save() writes."""
    return xxhash.xxh3_64_intdigest(rank_file(ranks))
