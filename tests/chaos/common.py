"""What the harnesses share: a run of milliseconds, what an uninterrupted one leaves, and the checks.

Each harness is a script: `python tests/chaos/NAME.py --count N --seed S`. It prints one line of totals.
A case that fails prints its seed and keeps its folder; `--case I` repeats it. The program is that of
LLAMAC_BUILD (build/auto).
"""

import argparse
import array
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count as numbers
from pathlib import Path

import xxhash
from faults_library import FaultsLibrary

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("LLAMAC_BUILD", "build/auto") / "train_llama3"
# One thread: the bits may depend on their number, and so small a model is no work for two. No plot is drawn.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "LLAMAC_PYTHON": "false", "PYTHONDONTWRITEBYTECODE": "1"}
MODEL = {
    "model_type": "llama",
    "vocab_size": 17,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
}
MODEL |= {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
}
MODEL |= {"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "float32"}
SECONDS = 60  # after which a process hangs


class Failure(Exception):
    """A promise of docs/reliability.md that was not kept."""


def expect(holds: bool, *what: object) -> None:
    if not holds:
        raise Failure(" ".join(map(str, what)))


# Checkpoints and logs, read without the program's help ======================================================


def is_good(checkpoint: Path) -> bool:
    """Whether the manifest has its seal, and every file its bytes."""
    try:
        text = (checkpoint / "manifest.json").read_bytes()
        body = text[: text.rfind(b",\n")]
        seal = f',\n "xxh3": "{xxhash.xxh3_64_hexdigest(body)}"\n}}\n'
        return text == body + seal.encode() and all(
            xxhash.xxh3_64_hexdigest((checkpoint / file["name"]).read_bytes()) == file["xxh3"]
            for file in json.loads(text)["files"]
        )
    except (OSError, ValueError):
        return False


def checkpoints(out: Path) -> dict[int, Path]:
    """Those whose names say that they are complete, oldest first."""
    return {int(path.name[5:]): path for path in sorted(out.glob("step_*"))}


def newest(out: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    return max(checkpoints(out), default=0)


def events(out: Path) -> list[dict]:
    """The log's lines; the last one may be cut short by what ended the run."""
    path = out / "log.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def last_step(out: Path) -> int:
    return max((e["step"] for e in events(out) if e["event"] == "step"), default=0)


def history(out: Path, last_start: bool = False) -> list[list]:
    """Every number and text that the seed decides, in the order of the log; of the last start alone."""
    kept = {"step": ("loss", "grad_norm", "lr"), "val": ("loss",), "sample": ("text",)}
    own = events(out)
    if last_start:
        own = own[max(i for i, e in enumerate(own) if e.get("event") == "start") :]
    return [[e["event"], e["step"], *(e[key] for key in kept[e["event"]])] for e in own if e["event"] in kept]


def tensors(checkpoint: Path) -> list[bytes]:
    """Of all ranks."""
    files = (sorted(checkpoint.glob(f"{name}*.safetensors")) for name in ("model", "optimizer"))
    return [file.read_bytes() for kind in files for file in kind]


# A run ======================================================================================================


class Run:
    """A folder with data, a model and the output of one run, which is started as often as a case wants."""

    def __init__(self, folder: Path, **flags: object):
        self.folder, self.out = folder, folder / "out"
        values = {
            "model": folder / "model",
            "train-data": folder / "train_*.bin",
            "val-data": folder / "val_*.bin",
        }
        values |= {"tokenizer": "none", "gemm-cache": folder / "gemm.json", "out": self.out, "seq-len": 4}
        values |= {
            "batch-size": 1,
            "steps": 24,
            "warmup-steps": 4,
            "checkpoint-every": 2,
            "keep-checkpoints": 2,
        }
        values |= {"val-every": 6, "val-steps": 2, "sample-every": 0, "sample-tokens": 4}
        values |= {name.replace("_", "-"): value for name, value in flags.items()}
        self.every, self.keep, self.steps = (
            int(values[k]) for k in ("checkpoint-every", "keep-checkpoints", "steps")
        )
        self.flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]

    def start(self, *flags: str, environment: dict | None = None, label: str = "") -> subprocess.Popen:
        """Output goes to files beside the run's, for whoever looks at a failed case."""
        output, errors = (self.folder / f"{name}{label}" for name in ("stdout", "stderr"))
        with open(output, "w") as out, open(errors, "w") as err:
            command = [PROGRAM, *self.flags, *flags]
            return subprocess.Popen(
                command, env=ENVIRONMENT | (environment or {}), stdout=out, stderr=err, cwd=ROOT
            )

    def wait(self, process: subprocess.Popen) -> int:
        try:
            return process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise Failure(f"the process did not end within {SECONDS} s") from None

    def run(self, *flags: str, environment: dict | None = None) -> int:
        return self.wait(self.start(*flags, environment=environment))

    def said(self, label: str = "") -> str:
        return (self.folder / f"stdout{label}").read_text(errors="replace")

    def errors(self, label: str = "") -> list[str]:
        return (self.folder / f"stderr{label}").read_text(errors="replace").splitlines()

    def expect_one_line(self, code: int) -> None:
        """That the program refused, or gave up, as it must: exit code 2, and one line that is its own."""
        errors = self.errors()
        expect(code == 2, "expected exit code 2, found", code, errors[-3:])
        expect(
            len(errors) == 1 and errors[0].startswith("train_llama3: "),
            "expected one line, found",
            errors[:5],
        )

    def expect_all_good(self) -> None:
        """That what is named like a complete checkpoint is one."""
        for path in checkpoints(self.out).values():
            expect(is_good(path), path.name, "is not what its manifest says")


class Reference:
    """What an uninterrupted run leaves; every case's run must end with the same."""

    def __init__(self, folder: Path, changes: dict | None = None, **flags: object):
        """changes: of MODEL."""
        self.flags = flags
        self.template = folder / "template"
        make_input(self.template, MODEL | (changes or {}))
        shutil.copytree(self.template, folder / "reference")
        run = Run(folder / "reference", **flags)
        begin = time.monotonic()
        expect(run.run() == 0, "the uninterrupted run failed:", run.errors())
        self.seconds = time.monotonic() - begin
        self.history, self.tensors = history(run.out), tensors(run.out / f"step_{run.steps:06d}")
        self.names = sorted(path.name for path in run.out.iterdir())

    def copy(self, folder: Path) -> Run:
        """A run that is not begun."""
        shutil.copytree(self.template, folder, dirs_exist_ok=True)
        return Run(folder, **self.flags)

    def expect_same(self, run: Run, unpruned: bool = False) -> None:
        """The history and the last checkpoint bit by bit, complete checkpoints, nothing left over."""
        ours, theirs = history(run.out), self.history
        differ = next((pair for pair in zip(ours, theirs) if pair[0] != pair[1]), None)
        expect(not differ, "the log differs from an uninterrupted run's:", differ)
        expect(len(ours) == len(theirs), "the log has", len(ours), "of", len(theirs), "entries")
        expect(tensors(run.out / f"step_{run.steps:06d}") == self.tensors, "the last checkpoint differs")
        run.expect_all_good()
        # What an earlier start had to move away stays for its owner.
        names = sorted(p.name for p in run.out.iterdir() if not p.name.startswith(("previous_", "damaged_")))
        if unpruned and len(checkpoints(run.out)) == run.keep + 1:
            names.remove(min(checkpoints(run.out).values()).name)
        # A signal's checkpoint is of any step, so that of the older ones only the number is known.
        last = f"step_{run.steps:06d}"
        ours, theirs = ([n if n == last else n.rstrip("0123456789") for n in x] for x in (names, self.names))
        expect(ours == theirs, "expected", self.names, "in --out, found", names)

    def count_calls(self, run: Run, library: FaultsLibrary) -> dict[str, int]:
        """Calls of each kind that a run makes from where it stands to its end."""
        counts = {"CHAOS_COUNTS": str(run.folder / "calls")}
        code = run.run("--resume", "auto", environment=library.environment(run.folder, "", 0, "0") | counts)
        expect(code == 0, "the run whose calls are counted failed:", run.errors())
        self.expect_same(run)
        lines = (run.folder / "calls").read_text().splitlines()
        return {kind: int(number) for kind, number in map(str.split, lines) if int(number)}

    def finish(self, run: Run) -> None:
        """Restart what a fault ended, without one, to the end."""
        # The last save may have ended before it removed the oldest checkpoint, and no other one follows.
        unpruned = newest(run.out) == run.steps
        code = run.run("--resume", "auto")
        expect(code == 0, "blocked restart: exit code", code, run.errors()[-3:])
        self.expect_same(run, unpruned)


def make_input(folder: Path, model: dict) -> None:
    """Data and a model with weights, which are those of a first run's start."""
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text(json.dumps(model, indent=1))
    words = random.Random(1)
    for name, count in (("train_000", 301), ("train_001", 200), ("val_000", 60)):
        header = array.array("I", [20240520, 1, count, model["vocab_size"]] + [0] * 252)
        tokens = array.array("H", [words.randrange(17) for _ in range(count)])
        (folder / f"{name}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    first = Run(folder, steps=1, checkpoint_every=0, val_every=0)
    expect(first.run("--seed", "7") == 0, "the first run failed:", first.errors())
    shutil.copy(first.out / "step_000001/model.safetensors", folder / "model")
    shutil.rmtree(first.out)


# A harness ==================================================================================================


class Totals(Counter):
    """Counts of all cases; cases run side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def count(self, name: str, number: int = 1) -> None:
        with self.lock:
            self[name] += number


Case = Callable[[Path, random.Random, Totals], None]
Kill = Callable[[Run, str, int], bool]


def kill_histories(
    reference: Reference, own: Path, rng: random.Random, totals: Totals, kills: int, kill: Kill
) -> None:
    """Histories of one run after another, until so many kills ended one, each compared with the reference.

    kill(run, saves, before): starts the run, behind the checkpoint of step `before`, with saves in the
    background ("on") or not, kills it, checks what is left, and returns whether the kill ended it.
    """
    runs = (reference.copy(own / f"history_{i}") for i in numbers())
    run, saves, done = next(runs), rng.choice(["on", "off"]), 0
    while done < kills:
        before = newest(run.out)
        if kill(run, saves, before):
            done += 1
            totals.count("kills")
            continue
        # It had ended before: another history begins.
        reference.expect_same(run, unpruned=before == run.steps)
        totals.count("histories")
        run, saves = next(runs), rng.choice(["on", "off"])
    reference.finish(run)
    totals.count("histories")


def one_case(name: str, case: Case, folder: Path, seed: int, index: int, totals: Totals) -> bool:
    """Whether the case went well; its folder is then removed."""
    own = folder / f"case_{index}"
    own.mkdir()
    try:
        case(own, random.Random(f"{seed} {index}"), totals)
    except Exception as error:
        totals.count("failures")
        reason = str(error) if isinstance(error, Failure) else repr(error)
        again = f"python tests/chaos/{name}.py --seed {seed} --case {index}"
        print(f"{name}: {own}: {reason}; again: {again}", file=sys.stderr, flush=True)
        return False
    shutil.rmtree(own)
    return True


def main(prepare: Callable[[Path], Case], unit: str, per_case: int = 1) -> None:
    """The command line of a harness: `prepare` makes what its cases share; a case counts `per_case` units."""
    name = Path(sys.argv[0]).stem
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument(
        "--count", type=int, default=20, choices=range(1, 10**9), metavar="N", help=f"{unit} (20)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first case; each has its own (1)")
    parser.add_argument("--case", type=int, help="this case alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at a time (one per core)")
    parser.add_argument("--folder", type=Path, help="where the runs write (a temporary folder)")
    o = parser.parse_args()
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"llamac-{name}-", dir=o.folder))
    totals = Totals()
    case = prepare(folder)
    indices = [o.case] if o.case is not None else list(range(-(-o.count // per_case)))
    with ThreadPoolExecutor(o.jobs) as pool:
        good = list(pool.map(lambda i: one_case(name, case, folder, o.seed, i, totals), indices))
    found = ", ".join(f"{number} {what}" for what, number in sorted(totals.items()) if what != "failures")
    print(f"{name}: {found}; {totals['failures']} failures; seed {o.seed}, {time.monotonic() - begin:.0f} s")
    if all(good):
        shutil.rmtree(folder)
    sys.exit(0 if all(good) else 1)


def poll(until: float, pause: float = 2e-4) -> Iterator[None]:
    """Turns of a loop that waits for something, until the given time.monotonic()."""
    while time.monotonic() < until:
        yield
        time.sleep(pause)
