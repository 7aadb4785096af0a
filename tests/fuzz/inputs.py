"""What the readers are tried with, by their names (readers.cpp): seeds, regressions, dictionaries.

The regressions are inputs that once ended a reader in anything but its one line, or that C and Python read
differently; they are seeds as well.
"""

import json
import struct
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = sorted((ROOT / "tests/models").glob("*.json"))


def safetensors(header: dict | str, data: bytes) -> bytes:
    text = header if isinstance(header, str) else json.dumps(header)
    return struct.pack("<Q", len(text)) + text.encode() + data


def tensor(dtype: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def shard(magic: int, version: int, words: dict, tokens: bytes) -> bytes:
    header = [magic, version] + [0] * 254
    for word, value in words.items():
        header[word] = value
    return struct.pack("<256I", *header) + tokens


def vocabulary(tokens: list[bytes], words: dict | None = None, ends: list[int] | None = None) -> bytes:
    """With a place for the checksum, which the reader's harness puts right."""
    lengths = [sum(map(len, tokens[: i + 1])) for i in range(len(tokens))]
    header = [20241124, 1, len(tokens), 0, 2**32 - 1, 2] + [0] * 10
    for word, value in (words or {}).items():
        header[word] = value
    table = ends if ends is not None else lengths
    return struct.pack(f"<16I{len(table)}I", *header, *table) + b"".join(tokens)


def questions(every: list, choices: list, ids: list, words: dict | None = None) -> bytes:
    """With a place for the checksum, which the reader's harness puts right."""
    header = [20261125, 1, 300, len(every), len(choices), len(ids)] + [0] * 10
    for word, value in (words or {}).items():
        header[word] = value
    payload = [number for row in (*every, *choices) for number in row] + ids
    return struct.pack(f"<{16 + len(payload)}I", *header, *payload)


def manifest(text: str) -> bytes:
    """With a place for the checksum, which the reader's harness puts right."""
    return f'{text.rstrip().removesuffix("}").rstrip()},\n "xxh3": "0000000000000000"\n}}\n'.encode()


_ONE = tensor("F32", [1], 0, 4)
LLAMA = ROOT / "tests/models/tied-gqa.json"
_CONFIG = json.loads(LLAMA.read_text())
_FLAGS = tomllib.loads((ROOT / "configs/tables/flags.toml").read_text())["flag"]
_DEEP = b"[" * 100000
_OLD = json.loads((ROOT / "tests/data/resume_9252fa4/step_000006/manifest.json").read_text())
_RECORD = {"name": "config.json", "bytes": 1, "xxh3": "0123456789abcdef", "role": "config", "rank": None}
_NEW = {key: value for key, value in _OLD.items() if key != "xxh3"} | {
    "format": "llamac checkpoint 2",
    "files": [
        _RECORD,
        _RECORD | {"name": "model.safetensors", "role": "weights", "rank": 0},
        _RECORD | {"name": "optimizer.safetensors", "role": "optimizer"},
    ],
}
_GEMM = {"ms": 0.25, "tried": 8, "algorithm": "00ff"}
_GEMMS = {"device": "d", "library": "l", "choices": {"nt 8x6x4 bf16 bf16": _GEMM}}
_OVERFLOWING = _GEMMS | {"choices": {"x": _GEMM | {"tried": 1e300}}}
_STEP = {"event": "step", "step": 1, "loss": 2.5, "lr": 1e-3, "tokens_per_s": 9.5}
_TOTALS = {"calls": 4, "seconds": 0.25, "flops": 1e9, "bytes": 1e6}
_PROFILE = {
    "device": {"name": "CPU", "gpu": False, "peak_tflops": None, "copy_gbps": 20.5},
    "steps": 2,
    "seconds": 0.5,
    "idle_seconds": 0.1,
    "operations": [
        {"operation": "matmul_forward", "variant": "cpu", "shapes": [_TOTALS | {"shape": "8x8x8"}]} | _TOTALS
    ],
}  # fmt: skip


def lines(*events: dict) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def dumped(value, **changes) -> bytes:
    return json.dumps(value | changes).encode()


SEEDS: dict[str, dict[str, bytes]] = {
    "safetensors": {
        "types": safetensors(
            {
                "__metadata__": {"format": "pt"},
                "a": tensor("F32", [2], 0, 8),
                "b": tensor("BF16", [1, 2], 8, 12),
                "c": tensor("I32", [], 12, 16),
                "d": tensor("F16", [0, 3], 16, 16),
                "e": tensor("F64", [1], 16, 24),
            },
            bytes(24),
        ),
        "empty": safetensors("{}", b""),
    },
    "index": {
        "two shards": b'{"metadata":{},"weight_map":{"b":"two.safetensors","a":"one.safetensors"}}',
        "one shard": b'{"weight_map":{"a":"one.safetensors"}}',
    },
    "config": {path.stem: path.read_bytes() for path in MODELS}
    | {
        "rope_parameters": dumped(_CONFIG, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "tokens": dumped(_CONFIG, bos_token_id=None, eos_token_id=[2, 3], pad_token_id=0, head_dim=None),
    },
    "toml": {path.stem: path.read_bytes() for path in sorted((ROOT / "configs").glob("*.toml"))}
    | {
        "numbers": b'lr = 1 # c\r\nsteps=1_000\n"seq-len" = +16\n',
        "strings": b"'out' = 'C:\\#'\nmodel = \"a\\tb\\u00e9\"\n",
        "list": b"kernel = [ # list\n \"a=1\",\n 'b=2',\n]\nrecompute = \"norm,block:2\"\n",
        "table": b"[a.b]\nc = {d = 1, e = [1979-05-27T07:32:00Z, 0x1f, inf]}\n[[f]]\n",
        "text": b"out = '''\na''b'''\nmodel = \"\"\"a\\\n  b\"\"\"\n",
    },
    "flags": {
        "some": b"--steps\n5\n--lr=1e-3\n--kernel\na=1\n--dry-run\n--val-data=",
        "lists": b"--recompute\nnorm,block:2\n--sample-prompt-ids=17,4\n--total-batch-size\n4096",
    },
    "tokens": {
        "narrow": shard(20240520, 1, {2: 6, 3: 300, 6: 1}, struct.pack("<6H", *range(6))),
        "wide": shard(20240801, 7, {2: 9}, struct.pack("<9I", *range(290, 299))),
        "empty": shard(20240520, 1, {}, b""),
    },
    "vocabulary": {
        "three": vocabulary([b"<s>", b"ab", b" c"]),
        "empty ones": vocabulary([b"", b"", b"a", b""], {10: 1, 3: 2**32 - 1, 5: 3}),
    },
    "questions": {
        "two": questions([[2, 1], [1, 0]], [[1, 2, 0], [2, 1, 0], [1, 1, 0]], list(range(8))),
        "with lengths": questions([[1, 0]], [[1, 1, 7]], [4, 299], {10: 1}),
    },
    "tokenizer": {"bytes": b"+", "tokens": b"+YWI= 256\r\n\nYWJj 257\n"},
    "manifest": {"format 1": manifest(json.dumps({k: v for k, v in _OLD.items() if k != "xxh3"}, indent=1)),
                 "format 2": manifest(json.dumps(_NEW, indent=1))},
    "log": {
        "run": lines(
            {"event": "run", "device": "CPU", "parameters": 1000, "tokens_per_step": 64},
            {"event": "start", "model": "tiny"},
            {"event": "val", "step": 0, "loss": 3.0},
            *(_STEP | {"step": step} for step in range(1, 6)),
        ),
        "cut": lines(_STEP) + b'{"event": "st',
    },
    "gemms": {"one": json.dumps(_GEMMS).encode()},
    "profile": {"one": json.dumps(_PROFILE).encode()},
}  # fmt: skip

REGRESSIONS: dict[str, dict[str, bytes]] = {
    "safetensors": {
        "deep": safetensors(_DEEP.decode(), b""),
        "NUL behind the header": safetensors("{}\0x", b""),
        "a type of the format's own library": safetensors({"a": tensor("I64", [1], 0, 8)}, bytes(8)),
        "five dimensions": safetensors({"a": tensor("F32", [1] * 5, 0, 4)}, bytes(4)),
        "another field": safetensors({"a": _ONE | {"x": 1}}, bytes(4)),
        "name twice": safetensors('{"a":%s,"a":%s}' % (2 * (json.dumps(_ONE),)), bytes(4)),
        "more than 2^63 bytes": safetensors({"a": tensor("F32", [0, 2**62, 4], 0, 0)}, b""),
    },
    "index": {
        "NUL in a name": b'{"weight_map":{"a":"one.safetensors\\u0000"}}',
        "line feed in a name": b'{"weight_map":{"a":"one\\nsafetensors"}}',
        "endless name": b'{"weight_map":{"a":"' + b"x" * 10000 + b'"}}',
        "long name": b'{"weight_map":{"a":"' + b"x" * 6000 + b'"}}',
        "another shard's tensor": b'{"weight_map":{"a":"two.safetensors"}}',
        "deep": _DEEP,
        "list of names": b'{"weight_map":{"a":["one.safetensors"]}}',
    },
    "config": {
        "deep": _DEEP,
        "endless integer": dumped(_CONFIG).replace(b"{", b'{"x": ' + b"9" * 5000 + b", ", 1),
        "integer past a double": dumped(_CONFIG, rms_norm_eps=10**400),
        "NaN": dumped(_CONFIG, rms_norm_eps=float("nan")),
        "NUL behind": dumped(_CONFIG) + b"\0",
        "byte-order mark": b"\xef\xbb\xbf" + dumped(_CONFIG),
        "key twice": b'{"model_type":"llama",' + dumped(_CONFIG)[1:],
        "line feed in a word": dumped(_CONFIG, hidden_act="si\nlu"),
        "NUL in a word": dumped(_CONFIG, hidden_act="silu\0"),
        "endless word": dumped(_CONFIG, hidden_act="x" * 10000),
        "half of a pair": dumped(_CONFIG, architectures="\ud800"),
        "list of a beginning": dumped(_CONFIG, bos_token_id=[1]),
        "type beside rope_type": dumped(_CONFIG, rope_scaling={"type": 5, "rope_type": "default"}),
        "padding past 63 bits": dumped(_CONFIG, pad_token_id=2**64 - 1),
    },
    "toml": {
        "assertion in a table": b"[#",
        "assertion in a table's list": b"steps = 3\n\n[[ #",
        "assertion at a comma": b"[,]",
        "unreachable": "lr = null \u03a0".encode(),
        "unreachable white space": "\ufebfstep=% 0".encode(),
        "NUL": b'out = "a\\u0000b"',
        "endless key": b"x" * 1000000 + b" = 1",
        "endless integer": b"steps = " + b"9" * 5000,
        "deep": b"steps = " + _DEEP,
        "dotted deep": b"steps" + b".a" * 20000 + b" = 1",
        "table deep": b"[a" + b".a" * 20000 + b"]",
        "beyond 2^63": b"lr = 1e30",
        "leading zeros": b'recompute = "block:01"\nsample-prompt-ids = "00000000000017"',
        "minus zero": b'sample-prompt-ids = "-0"',
        "large block": b'recompute = "block:1000000000"',
        "byte-order mark": b"\xef\xbb\xbfsteps = 1",
    },
    "flags": {
        "line feed": b"--st\reps",
        "endless": b"--" + b"x" * 10000,
        "switch": b"--dry-run=" + b"\\" * 4000,
        "path": b"--config\n" + b"\x07" * 2000,
    },
    "tokens": {"size past 64 bits": shard(20240801, 7, {2: 2**32 - 1, 5: 2**32 - 1}, b"")},
    "vocabulary": {
        "no tokens": vocabulary([], {5: 2**32 - 1, 3: 2**32 - 1}),
        "more tokens than bytes": vocabulary([b"a"], {2: 2**22, 5: 2**32 - 1}),
        "tokens past memory": vocabulary([b"a"], {2: 2**32 - 1}),
        "ends go back": vocabulary([b"a", b"b", b"c"], ends=[2, 1, 3]),
        "an end past the file": vocabulary([b"a", b"b", b"c"], ends=[1, 2, 2**32 - 1]),
        "trailing byte": vocabulary([b"a", b"b", b"c"]) + b"d",
        "bos past the vocabulary": vocabulary([b"a", b"b", b"c"], {3: 3}),
        "unknown flag": vocabulary([b"a", b"b", b"c"], {10: 3}),
        "word 15": vocabulary([b"a", b"b", b"c"], {15: 1}),
        "version 2": vocabulary([b"a", b"b", b"c"], {1: 2}),
        "cut header": vocabulary([b"a", b"b", b"c"])[:63],
        "cut table": vocabulary([b"a", b"b", b"c"])[:70],
    },
    "questions": {
        "none": questions([], [], []),
        "right choice is none": questions([[1, 1]], [[1, 1, 0]], [4, 5]),
        "a question without choices": questions([[0, 0]], [], []),
        "choices of nobody": questions([[1, 0]], [[1, 1, 0]] * 2, [4, 5, 6, 7]),
        "choices past the file": questions([[2**32 - 1, 0]], [[1, 1, 0]], [4, 5]),
        "no context": questions([[1, 0]], [[0, 2, 0]], [4, 5]),
        "no continuation": questions([[1, 0]], [[2, 0, 0]], [4, 5]),
        "ids past the file": questions([[1, 0]], [[2**32 - 1, 2**32 - 1, 0]], [4, 5]),
        "ids of nobody": questions([[1, 0]], [[1, 1, 0]], [4, 5, 6]),
        "an id past the vocabulary": questions([[1, 0]], [[1, 1, 0]], [4, 300]),
        "an id past 31 bits": questions([[1, 0]], [[1, 1, 0]], [4, 2**32 - 1], {2: 2**31 - 1}),
        "no vocabulary": questions([[1, 0]], [[1, 1, 0]], [4, 5], {2: 0}),
        "a vocabulary past 31 bits": questions([[1, 0]], [[1, 1, 0]], [4, 5], {2: 2**31}),
        "a length without the flag": questions([[1, 0]], [[1, 1, 7]], [4, 5]),
        "the flag without a length": questions([[1, 0]], [[1, 1, 0]], [4, 5], {10: 1}),
        "more questions than bytes": questions([[1, 0]], [[1, 1, 0]], [4, 5], {3: 2**32 - 1}),
        "more ids than bytes": questions([[1, 0]], [[1, 1, 0]], [4, 5], {5: 2**32 - 1}),
        "unknown flag": questions([[1, 0]], [[1, 1, 0]], [4, 5], {10: 2}),
        "word 15": questions([[1, 0]], [[1, 1, 0]], [4, 5], {15: 1}),
        "version 2": questions([[1, 0]], [[1, 1, 0]], [4, 5], {1: 2}),
        "cut header": questions([[1, 0]], [[1, 1, 0]], [4, 5])[:63],
        "trailing byte": questions([[1, 0]], [[1, 1, 0]], [4, 5]) + b"d",
    },
    "tokenizer": {"carriage return alone": b"+YWI= 256\rYWJj 257\n", "two of them": b"+YWI= 256\r\r\n"},
    "manifest": {"deep": manifest(_DEEP.decode()),
                 "tried overflows": manifest(json.dumps(_NEW | {"gemms": _OVERFLOWING}, indent=1))},
    "log": {
        "no step": b'{"event": "step", "loss": 1}\n{}\n',
        "a list for a step": b'{"event": "step", "step": [1], "loss": 1}\n{}\n',
        "text for a loss": lines(_STEP | {"loss": "x"}, {}),
        "huge losses": lines(*(_STEP | {"step": step, "loss": 1e308} for step in range(99))),
        "endless integer": b'{"event": "step", "step": ' + b"9" * 5000 + b"}\n{}\n",
        "deep": _DEEP + b"\n{}\n",
        "many keys": b"{" + b",".join(b'"%d":0' % key for key in range(30000)) + b"}\n",
        "event of no kind": b'{"event": []}\n',
    },
    "gemms": {
        "tried overflows": dumped(_OVERFLOWING),
        "tried is a fraction": dumped(_GEMMS, choices={"x": _GEMM | {"tried": 1.5}}),
        "tried past 32 bits": dumped(_GEMMS, choices={"x": _GEMM | {"tried": 2**40}}),
        "choices in a list": dumped(_GEMMS, choices=[_GEMM]),
    },
    "profile": {
        "deep": _DEEP,
        "integer past a double": dumped(_PROFILE, seconds=10**400),
    },
}  # fmt: skip


def inputs() -> list[tuple[str, str, bytes]]:
    """(reader, name, bytes) of all of them."""
    return [(reader, name, content) for table in (SEEDS, REGRESSIONS) for reader, found in table.items()
            for name, content in found.items()]  # fmt: skip


def words() -> dict[str, set[str]]:
    """What libFuzzer puts into the inputs of each reader."""
    found: dict[str, set[str]] = {reader: set() for reader in SEEDS}
    json_words = {'"', ":", ",", "{", "}", "[", "]", "null", "true", "1e308", "-1"}
    json_words |= {'"\\u0000"', "18446744073709551615"}
    for reader in ("safetensors", "index", "config", "manifest", "log", "gemms"):
        values = [
            json.loads(text) for text in SEEDS[reader].values() if text[:1] == b"{" and b"\n" not in text
        ]
        keys = {f'"{key}"' for value in values if isinstance(value, dict) for key in value}
        found[reader] = json_words | keys
    found["safetensors"] |= {f'"{word}"' for word in ("dtype", "shape", "data_offsets", "__metadata__")}
    found["safetensors"] |= {'"F32"', '"BF16"', '"I32"'}
    found["config"] |= {'"rope_scaling"', '"llama3"', '"factor"', '"low_freq_factor"', '"high_freq_factor"'}
    found["manifest"] |= {f'"{key}"' for key in _NEW} | {'"role"', '"weights"', ",\n"}
    found["toml"] = {row["name"] for row in _FLAGS}
    found["toml"] |= {"[[", "]]", '"""', "'''", "0x", "inf", "1979-05-27", "\\u0000"}
    found["flags"] = {f"--{row['name']}" for row in _FLAGS}
    found["flags"] |= {"\n", "=", "auto", "none", "block:", "-1", "1e9"}
    for reader in ("tokens", "vocabulary", "questions"):
        found[reader] = {"\x00\x01", "\xff\xff\xff\xff"}
    found["tokenizer"] = {"+", "= 256\n", "== 257\n", "\r\n"}
    return found


def _quoted(word: str) -> str:
    return '"' + "".join(c if c.isascii() and c.isalnum() else f"\\x{ord(c):02x}" for c in word) + '"'


def write(folder: Path) -> None:
    """For libFuzzer: folder/seeds/READER/NUMBER and folder/READER.dict."""
    for reader, _, content in inputs():
        (folder / "seeds" / reader).mkdir(parents=True, exist_ok=True)
        number = len(list((folder / "seeds" / reader).iterdir()))
        (folder / "seeds" / reader / f"{number:03d}").write_bytes(content)
    for reader, found in words().items():
        (folder / f"{reader}.dict").write_text("".join(f"{_quoted(word)}\n" for word in sorted(found)))
