"""Small runs of the program: their flags, and what they leave behind."""

import fcntl
import hashlib
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors import safe_open

from llamac.base.errors import InputError
from llamac.data import write_bin
from llamac.data.tokens import BEGINS_DOCUMENT, NO_TARGET

ROOT = Path(__file__).resolve().parents[1]
MODEL = str(ROOT / "tests/models/tied-gqa.json")
V, T = 97, 16
# Of events in log.jsonl.
RUN_KEYS = ["event", "time", "host", "device", "version", "commit", "origin", "from", "parameters",
            "ranks", "tokens_per_step", "tokens_per_epoch"]  # fmt: skip
STEP_KEYS = ["event", "time", "step", "loss", "grad_norm", "lr", "ms", "tokens_per_s", "tflops", "mfu",
             "gpu_mem_gib", "gpu_percent", "rss_gib", "system_mem_gib", "cpu_percent"]  # fmt: skip

WITHOUT_MASTER = {"master_weights": "off"}
PRECISIONS = {
    "f32": {},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "bf16-throughout": {"dtype": "bf16", "grad_dtype": "bf16", "optimizer_state": "bf16"} | WITHOUT_MASTER,
    "f32-small-moments": {"optimizer_state": "bf16"},
}

# Without validation and checkpoints, but that of the last step.
SHORT = {"val_every": 0, "val_data": "none", "checkpoint_every": 0}


def flags(data: Path, out: Path, **extra) -> list[str]:
    """A small run on the shards in `data`; extra flags with underscores."""
    values = {"model": MODEL, "train-data": f"{data}/train_*.bin", "val-data": f"{data}/val_*.bin",
              "tokenizer": "none", "gemm-cache": data / "gemm.json", "out": out, "steps": 8, "batch-size": 4,
              "seq-len": T, "warmup-steps": 2, "val-every": 4, "val-steps": 2, "sample-every": 0,
              "checkpoint-every": 4}  # fmt: skip
    values |= {key.replace("_", "-"): value for key, value in extra.items()}
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def write_model(folder: Path, name: str, **changes) -> dict:
    """The flag of a model of tests/models with changes, whose configuration it writes."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(json.loads((ROOT / f"tests/models/{name}.json").read_text()) | changes))
    return {"model": path}


def write_packed(path: Path, sequences: int, share: float) -> None:
    """Sequences of packed documents of any length, of whose targets the share counts."""
    rng, n = np.random.default_rng(2), sequences * T + 1
    words = (np.cumsum(rng.choice([1, 2, 5], n)) % V).astype(np.uint32)
    words[rng.random(n) >= share] |= NO_TARGET
    words[rng.random(n) < 0.2] |= NO_TARGET | BEGINS_DOCUMENT
    write_bin(path, words, V, packed=T)


FLAGS = {row["name"]: row for row in tomllib.loads((ROOT / "configs/tables/flags.toml").read_text())["flag"]}


def reference_flags(data: Path, out: Path, **extra) -> list[str]:
    """The same run by train_llama3.py: without the flags that it lacks, its log and weights in `out`."""
    words = [*flags(data, out, **extra), "--log", str(out / "log.jsonl"), "--save", str(out / "model")]
    pairs = zip(words[::2], words[1::2], strict=True)
    return [word for pair in pairs if FLAGS[pair[0][2:]].get("only") != "c" for word in pair]


def trainer_flags(data: Path, out: Path, **extra) -> dict:
    """The same run by llamac.Trainer."""
    words, kinds = flags(data, out, **extra), {"integer": int, "number": float, "text": str}
    pairs = [(name[2:], value) for name, value in zip(words[::2], words[1::2], strict=True)]
    return {name.replace("-", "_"): kinds[FLAGS[name]["type"]](value) for name, value in pairs}


def timeless(event: dict) -> dict:
    """What two runs have in common: the event without its time, which it must have."""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["time"])
    return {key: value for key, value in event.items() if key != "time"}


def timed_events(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().split("\n")[:-1]]


def events(out: Path, kind: str) -> list[dict]:
    return [timeless(e) for e in timed_events(out) if e["event"] == kind]


def losses(out: Path) -> list[float]:
    return [e["loss"] for e in timed_events(out) if e["event"] == "step"]


def numbers(out: Path) -> list[tuple]:
    return [(e["step"], e["loss"], e["grad_norm"], e["lr"]) for e in events(out, "step")]


def bits(out: Path) -> dict[str, list | str]:
    """Alike for runs of the same bits: each step's numbers, hashes of the newest checkpoint's tensors."""
    newest = max(out.glob("step_*"))
    numbers = [[e[key] for key in ("step", "loss", "grad_norm", "lr")] for e in events(out, "step")]
    files = ("model.safetensors", "optimizer.safetensors")
    hashes = {file: hashlib.sha256((newest / file).read_bytes()).hexdigest() for file in files}
    return {"steps": numbers, **hashes}


class Foreign:
    """An array of a library that only speaks DLPack, as it was before version 1."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, stream=None):
        assert stream is None  # as the protocol wants it of host memory
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.device


def run_llamac(*words: object, code: int = 0, **keywords) -> subprocess.CompletedProcess:
    """A command of the package, which must end with exit status `code`."""
    command = [sys.executable, "-m", "llamac", *map(str, words)]
    keywords = {"cwd": ROOT, "timeout": 300} | keywords
    done = subprocess.run(command, capture_output=True, text=True, **keywords)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def on_a_terminal(columns: int, *command: object, **keywords) -> str:
    """What a command shows on a terminal of so many columns, with \n as the ends of lines."""
    terminal, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    words = list(map(str, command))
    process = subprocess.Popen(words, stdout=other, stderr=other, env=environment, **keywords)
    os.close(other)
    shown = b""
    with suppress(OSError):  # no process has the terminal any more
        while part := os.read(terminal, 1 << 16):
            shown += part
    os.close(terminal)
    assert process.wait(60) == 0, shown.decode()
    return shown.decode().replace("\r\n", "\n")


def until(condition: Callable[[], object], process: subprocess.Popen) -> None:
    """Waits for what the process does."""
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "did not happen"
        time.sleep(0.02)


def until_logged(out: Path, kind: str, process: subprocess.Popen) -> None:
    """Waits for an event of the run in the folder."""
    until(lambda: (out / "log.jsonl").exists() and events(out, kind), process)


def end(process: subprocess.Popen, code: int) -> subprocess.CompletedProcess:
    """What the process, which must end with this exit code, has printed."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, (process.returncode, out[-1000:], err)
    return subprocess.CompletedProcess(process.args, code, out, err)


def refused(call: Callable, *arguments, **keywords) -> str:
    """The one line of the InputError that bad input gets."""
    with pytest.raises(InputError) as error:
        call(*arguments, **keywords)
    assert "\n" not in str(error.value)
    return str(error.value)


def refuses(pattern: str, call: Callable, *arguments, **keywords) -> None:
    """The call is bad input, and its line has what the pattern finds."""
    assert re.search(pattern, found := refused(call, *arguments, **keywords)), found


def one_line(result: subprocess.CompletedProcess | str) -> str:
    """The line that the program refuses bad input with."""
    said = result if isinstance(result, str) else result.stderr
    lines = said.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("train_llama3: "), said
    return lines[0]


def tensors(checkpoint: Path, stem: str) -> dict[str, np.ndarray]:
    """What the ranks' files of a checkpoint hold together, in f32, which holds bf16 exactly."""
    parts: dict[str, list[np.ndarray]] = {}
    for path in sorted(checkpoint.glob(f"{stem}*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                parts.setdefault(name, []).append(file.get_tensor(name).float().numpy())
    return {name: np.concatenate(rows) for name, rows in parts.items()}


def write_manifest(path: Path, fields: dict) -> None:
    """With the checksum that closes it."""
    text = json.dumps({key: value for key, value in fields.items() if key != "xxh3"}, indent=1)[:-2]
    path.write_text(f'{text},\n "xxh3": "{xxhash.xxh3_64_hexdigest(text.encode())}"\n}}\n')


def assert_same_state(a: Path, b: Path) -> None:
    """Checkpoints with the same bits of the weights, or of the adapters, and of the optimizer."""
    for stem in ("model", "adapter_model", "optimizer"):
        left, right = tensors(a, stem), tensors(b, stem)
        assert left.keys() == right.keys()
        for name in left:
            np.testing.assert_array_equal(left[name], right[name], err_msg=name)
