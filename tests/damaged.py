"""Random damage of files: of one value of their JSON, or of their bytes."""

import json
import random
from collections.abc import Iterator
from typing import Any

VALUES = [None, True, -1, 0, 1.5, 2**31, 2**32 - 1, 2**64, 1e308, 10**400, [], {}, [[]], [None], {"": {}}]
VALUES += ["", "x", "\ud800", "a\0b", "\x1b[2J\u009b", "x" * 6000, "2", "../x", "/x"]
VALUES += [{"content": 5}, {"content": "x"}]
BYTES = [b"\xff", b"\0", b"\xef\xbb\xbf", b"\r", b"\n", b'"', b"{", b"[" * 50, b"\x1b", b"9" * 400]
BYTES += [b"-1", b"{%"]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of each value within."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _other_json(rng: random.Random, content: bytes) -> bytes | None:
    """With one value of another type, none, or under another name; None: it is no JSON."""
    lines = content.split(b"\n")
    are_rows = content[:1] == b"{" and b"}\n{" in content
    number = rng.randrange(len(lines)) if are_rows else None
    try:
        value = json.loads(content if number is None else lines[number])
    except ValueError:
        return None
    places = list(_places(value))
    if not places or rng.random() < 0.03:
        value = rng.choice(VALUES)
    else:
        holder, key = rng.choice(places)
        how = rng.randrange(8)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, dict):
            holder[rng.choice(["", "x", "\x9b", "-1", "99999999999"])] = holder.pop(key)
        elif how == 2:
            holder[key] = json.loads(json.dumps(rng.choice(places)[0]))
        else:
            holder[key] = rng.choice(VALUES)
    changed = json.dumps(value).encode()
    if number is None:
        return changed
    lines[number] = changed
    return b"\n".join(lines)


def damaged(rng: random.Random, content: bytes) -> bytes:
    """The content with one or several changes."""
    if rng.random() < 0.7 and (other := _other_json(rng, content)) is not None:
        return other
    raw = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(raw) + 1)
        end = min(len(raw), at + rng.choice([1, 1, 4, 30, 1000]))
        how = rng.randrange(9)
        if how == 0:
            del raw[at:]
        elif how == 6:
            raw[at:end] = bytes(end - at)  # a block that a power cut left
        elif how == 7:
            raw += rng.choice(BYTES)
        elif how == 8:  # two ranges change places
            middle = (at + end) // 2
            raw[at:end] = raw[middle:end] + raw[at:middle]
        elif how == 1:
            del raw[at:end]
        elif how == 2:
            raw[at:at] = rng.choice(BYTES)
        elif how == 3:
            raw[at:at] = raw[at:end]
        elif at < len(raw):
            raw[at] = rng.randrange(256) if how == 4 else raw[at] ^ 1 << rng.randrange(8)
    return bytes(raw)
