"""Training beside PyTorch on this machine's device: BUILD/train_llama3 and train_llama3.py --train, eager and
by torch.compile, with the same model, batch, precision and random tokens. --other adds the train_llama3 of
another build, such as that of an earlier commit. On several devices (not by default: --workload, --devices)
train_llama3 at a level of ZeRO, and train_llama3.py on llamac's operations (ops) and PyTorch's (compile),
both sharded by torchrun (FSDP2).

The programs take turns: each round runs each of them once on each workload. A run is a process of its own,
because two of them do not fit into one GPU's memory; PyTorch's second start finds its compiled graphs in its
cache. A run's figures are medians of its steps after the warm-up, out of its log.

Prints a markdown table, writes it to bench_train.md beside --out, which gets every number as JSON: both after
each run, so that an interrupted benchmark keeps what it has. What is missing, and why, is said.

Exit code: 1 where a run failed (PyTorch may run out of memory), 2 for bad arguments.
"""

import argparse
import itertools
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from bench import last_line, markdown

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llamac.base.errors import InputError
from llamac.base.log import read_log
from llamac.base.version import provenance, provenance_text
from llamac.data import write_bin
from llamac.model.config import load_config

ROOT = Path(__file__).resolve().parents[1]
STOPPED, NO_MEMORY = "the time was over", "out of memory"


@dataclass(frozen=True)
class Workload:
    """What is trained: B sequences of T tokens per device and step, and what each side computes again."""

    model: str
    B: int
    T: int
    recompute: str = "none"  # of llamac
    torch_recompute: str = "none"
    baseline: str = ""  # the model's name in --baseline's script
    exact: bool = False  # fp32 master weights and moments; else bf16 weights and moments only
    programs: tuple[str, ...] = (
        "llamac",
        "compile",
        "eager",
        "baseline",
    )  # the others are compared with the first
    devices: int = 1
    zero: int = 1  # of llamac, on several devices


WORKLOADS = {
    "70b-proxy-b2-t4096": Workload("llama3.1-70b-proxy", 2, 4096, baseline="proxy70b"),
    "8b-b1-t8192": Workload("llama3.1-8b", 1, 8192, "norm,swiglu", baseline="8b"),
    "8b-b4-t8192": Workload("llama3.1-8b", 4, 8192, "block", "block", baseline="8b"),
    "1b-b4-t8192": Workload("llama3.2-1b", 4, 8192, baseline="1b"),
    "1b-b8-t2048": Workload("llama3.2-1b", 8, 2048, baseline="1b"),
    "8b-b1-t8192-fp32": Workload("llama3.1-8b", 1, 8192, "block", exact=True, programs=("llamac",)),
}
OPS, AGAINST_FSDP = ("ops", "compile"), ("llamac", "compile")
SHARDED = {
    "8b-b2-t8192-fsdp": Workload("llama3.1-8b", 2, 8192, exact=True, programs=OPS, devices=8),
    "8b-b2-t8192-fsdp-recompute": Workload(
        "llama3.1-8b", 2, 8192, torch_recompute="block", exact=True, programs=OPS, devices=8
    ),
    "1b-b4-t8192-ops": Workload("llama3.2-1b", 4, 8192, programs=OPS),
    **{
        f"8b-b2-t8192-zero{zero}": Workload(
            "llama3.1-8b", 2, 8192, "block", "block", exact=True, programs=AGAINST_FSDP, devices=8, zero=zero
        )
        for zero in (1, 2, 3)
    },
    "1b-b4-t8192-zero1": Workload("llama3.2-1b", 4, 8192, programs=AGAINST_FSDP, devices=8),
    # What one device does of the same, to compare N of them with. The states of 8B in f32 do not fit one.
    "8b-b2-t8192": Workload("llama3.1-8b", 2, 8192, "block", programs=("llamac",)),
    "8b-b2-t8192-zero1-bf16": Workload("llama3.1-8b", 2, 8192, "block", programs=("llamac",), devices=8),
}
# Not in the table: small enough for a CPU, to try the benchmark itself.
TRIAL = {
    "tiny-x2": Workload("tiny", 2, 64, exact=True, programs=("llamac", *OPS), devices=2, zero=3),
    "tiny": Workload("tiny", 2, 64, programs=("llamac", "compile", "eager")),
}
PROGRAMS = ("llamac", "other", "ops", "compile", "eager", "baseline")
HEAD = (
    *("workload", "program", "recomputed", "tokens/s", "TFLOP/s", "peak GiB", "spread %", "runs", "loss"),
    "llamac / it",
)
NOTES = """\
Tokens/s and TFLOP/s: median over runs of the median step. Spread: largest less smallest run, of the median.
Peak: allocated on the device. Loss: after the last optimizer step, on the same tokens for all but baseline.
Llamac / it: median over rounds of the ratio of tokens/s; where llamac is no program, that of ops.
ops: train_llama3.py --ops llamac --compile. On several devices: tokens/s and TFLOP/s of all of them, peak of
one.
compile, eager: train_llama3.py, attention by cuDNN where it can, q/k/v and gate/up as one product each, AdamW
compiled (also for eager). They and llamac round bf16 weights and moments stochastically; baseline to nearest.
"""


@dataclass
class Run:
    """One process: what it was and what it came to."""

    workload: str
    program: str
    round: int
    seconds: float = 0.0
    ms: list[float] = field(default_factory=list)  # of each step after the warm-up
    tokens_per_s: float = 0.0
    tflops: float = 0.0
    gpu_mem_gib: float = 0.0
    loss: float | None = None  # of the last step: they all train the same
    device: str = ""
    failure: str = ""


def say(text: str) -> None:
    print(f"bench_train: {text}", file=sys.stderr, flush=True)


def recomputed(w: Workload, program: str) -> str:
    return w.recompute if program in ("llamac", "other") else w.torch_recompute


def command(o: argparse.Namespace, w: Workload, program: str, folder: Path) -> list[str]:
    """The command line of a run that writes into folder."""
    if program == "baseline":
        line = [
            sys.executable,
            str(o.baseline.resolve()),
            "--model",
            w.baseline,
            "--batch",
            str(w.B),
            "--seq",
            str(w.T),
        ]
        line += ["--steps", str(o.steps), "--backend", "cudnn"]
        return line + (["--ac"] if w.torch_recompute != "none" else [])
    flags = {
        **{"model": w.model, "batch-size": w.B, "seq-len": w.T, "steps": o.warm_up + o.steps},
        **{"train-data": o.data, "tokenizer": "none", "recompute": recomputed(w, program)},
        **{"dtype": "bf16", "grad-dtype": "bf16", "lr": 1e-5, "warmup-steps": 0, "schedule": "constant"},
        **{"master-weights": "on" if w.exact else "off", "optimizer-state": "f32" if w.exact else "bf16"},
    }
    alone: dict = {"log": folder / "log.jsonl"}
    if program in ("llamac", "other"):
        alone = {"val-data": "", "sample-every": 0, "checkpoint-every": -1, "out": folder}
    words = [word for name, value in (flags | alone).items() for word in (f"--{name}", str(value))]
    several = ["--devices", str(w.devices), "--zero", str(w.zero)] if w.devices > 1 else []
    if program == "llamac":
        return [str((o.build / "train_llama3").resolve()), *words, *several, *shlex.split(o.llamac_flags)]
    if program == "other":
        return [str((o.other / "train_llama3").resolve()), *words, *several]
    line = [sys.executable]
    if w.devices > 1:
        line += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        line += ["--nproc-per-node", str(w.devices), "--"]  # else --log would be a beginning of its --log-dir
    line += [str(ROOT / "train_llama3.py"), "--train", *words]
    if program == "ops":
        line += ["--ops", "llamac"]
    return line if program == "eager" else [*line, "--compile"]


def execute(line: list[str], console: Path, seconds: float) -> str:
    """Run it, its output into console; why it failed ("": it did not). Its children end with it."""
    with open(console, "wb") as output:
        try:
            process = subprocess.Popen(line, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        except OSError as error:
            return f"{line[0]}: {error.strerror}"
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code is None:
        return STOPPED
    text = console.read_text(errors="replace")
    if code and re.search(r"out of memory|OutOfMemoryError", text):
        return NO_MEMORY
    return f"exit code {code}: {last_line(text)}" if code else ""


def read_baseline(run: Run, console: str) -> None:
    """What the baseline's JSON line says."""
    try:
        line = json.loads(last_line(console))
        if "error" in line:
            run.failure = NO_MEMORY if line["error"] == "OOM" else str(line["error"])
            return
        run.ms, run.tokens_per_s, run.tflops = [line["ms"]], line["tok_s"], line["tflops"]
        run.gpu_mem_gib, run.loss = line["peak_gib"], line.get("loss")
    except (ValueError, KeyError, TypeError):
        run.failure = (
            f"expected a JSON line with ms, tok_s, tflops, peak_gib, found {last_line(console)[:80]}"
        )


def read_steps(run: Run, folder: Path, warm_up: int, console: str, flops_per_token: float) -> None:
    """What the log says of the steps after the warm-up."""
    events = [e for e in read_log(folder / "log.jsonl") if e.get("event") == "step"]
    timed = [e for e in events if e["step"] > warm_up]
    if not timed:
        run.failure = f"its log has {len(events)} steps, expected more than {warm_up}"
        return
    run.ms = [e["ms"] for e in timed]
    run.tokens_per_s = statistics.median(e["tokens_per_s"] for e in timed)
    run.tflops = run.tokens_per_s * flops_per_token / 1e12
    run.gpu_mem_gib, run.loss = max(e["gpu_mem_gib"] or 0.0 for e in events), timed[-1]["loss"]
    if run.loss is None:
        run.failure = "its loss is no number"
    named = re.search(r"computes on +(.+?)(?:  |$)|^(PyTorch .+), \S+: ", console, re.MULTILINE)
    run.device = named[1] or named[2] if named else ""


def measure(o: argparse.Namespace, name: str, program: str, number: int, seconds: float) -> Run:
    """One run, stopped after `seconds`."""
    run, w = Run(name, program, number), o.workloads[name]
    with tempfile.TemporaryDirectory() as folder:
        begin, console = time.monotonic(), Path(folder) / "console"
        run.failure = execute(command(o, w, program, Path(folder)), console, seconds)
        run.seconds = time.monotonic() - begin
        if not run.failure:
            text = console.read_text(errors="replace")
            try:
                if program == "baseline":
                    read_baseline(run, text)
                else:
                    work = load_config(w.model).flops_per_token(w.T)
                    read_steps(run, Path(folder), o.warm_up, text, work)
            except (InputError, KeyError) as error:
                run.failure = f"its log: {error}"
    return run


def by_round(runs: list[Run], program: str) -> dict[int, float]:
    """Tokens/s of a program in each round; a run that failed has none."""
    return {run.round: run.tokens_per_s for run in runs if run.program == program and not run.failure}


def ratio_of(first: dict[int, float], other: dict[int, float]) -> float | None:
    """How many times as fast the first is: median over the rounds that both have; None: they have none."""
    ratios = [first[number] / speed for number, speed in other.items() if number in first]
    return statistics.median(ratios) if ratios else None


def row(runs: list[Run], first: dict[int, float], w: Workload) -> list[str]:
    """The table's row of one program on one workload; first: tokens/s of the first program in each round."""
    cells = [runs[0].workload, runs[0].program, recomputed(w, runs[0].program)]
    good = [run for run in runs if not run.failure]
    if not good:
        return [*cells, "-", "-", "-", "-", f"0/{len(runs)}", "-", runs[0].failure[:60].replace("|", "/")]
    speeds = [run.tokens_per_s for run in good]
    speed, peak = statistics.median(speeds), max(run.gpu_mem_gib for run in good)
    ratio = ratio_of(first, by_round(good, runs[0].program))
    cells += [f"{speed:.0f}", f"{statistics.median(run.tflops for run in good):.1f}"]
    cells += [
        f"{peak:.1f}" if peak else "-",
        f"{100 * (max(speeds) - min(speeds)) / speed:.1f}",
    ]
    loss = "-" if good[-1].loss is None else f"{good[-1].loss:.3f}"
    compared = ratio is not None and runs[0].program != w.programs[0]
    return [*cells, f"{len(good)}/{len(runs)}", loss, f"{ratio:.3f}" if compared else "-"]


def report(runs: list[Run], workloads: dict[str, Workload], left_out: list[str], when: dict[str, str]) -> str:
    """The markdown: where, the table, its notes, what was left out."""
    rows = []
    for name, w in workloads.items():
        here = [run for run in runs if run.workload == name]
        first = by_round(here, w.programs[0])
        for program in PROGRAMS:
            if mine := [run for run in here if run.program == program]:
                rows.append(row(mine, first, w))
    devices = " · ".join(dict.fromkeys(run.device for run in runs if run.device))
    table = markdown(HEAD, ["---"] * 3 + ["---:"] * 7, rows)
    text = f"## Training: {devices}, {provenance_text(when)}\n\n{table}\n\n{NOTES}"
    return text + (f"\nLeft out, {STOPPED}: {'; '.join(left_out)}.\n" if left_out else "")


def write(runs: list[Run], left_out: list[str], o: argparse.Namespace, when: dict[str, str]) -> str:
    """Both files; returns the markdown."""
    content = when | {"warm_up": o.warm_up, "runs": [asdict(r) for r in runs], "left_out": left_out}
    o.out.write_text(json.dumps(content, indent=1) + "\n")
    text = report(runs, o.workloads, left_out, when)
    o.out.with_name("bench_train.md").write_text(text)
    return text


def bench(o: argparse.Namespace, when: dict[str, str]) -> list[Run]:
    """All runs that the time allows."""
    end = time.monotonic() + o.seconds
    runs: list[Run] = []
    left_out: list[str] = []
    took: dict[tuple[str, str], float] = {}
    turns = itertools.product(range(1, o.rounds + 1), o.workloads.items(), o.only)
    for number, (name, w), program in turns:
        if program not in w.programs:
            continue
        left, label = end - time.monotonic(), f"{name} {program}, round {number}"
        if left <= took.get((name, program), 0) / 2:  # a second start compiles nothing
            left_out.append(label)
            continue
        run = measure(o, name, program, number, left)
        took[name, program] = run.seconds
        say(f"{label}: {run.failure or f'{run.tokens_per_s:.0f} tokens/s'} ({run.seconds:.0f} s)")
        if run.failure == STOPPED:
            left_out.append(label)
        else:
            runs.append(run)
        write(runs, left_out, o, when)
    print(write(runs, left_out, o, when), end="")
    return runs


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known, add = WORKLOADS | SHARDED | TRIAL, parser.add_argument
    names = f"of {', '.join(known)} (default: the first {len(WORKLOADS)})"
    baseline = (
        "a script to time as well: it takes --model --batch --seq --steps --backend --ac, and prints a line "
    )
    baseline += "of JSON with ms, tok_s, tflops, peak_gib"
    add("--build", type=Path, default=ROOT / "build/auto", help="folder of train_llama3")
    add("--other", type=Path, help="folder of another build, whose train_llama3 takes its turns as other")
    add("--workload", nargs="+", choices=known, default=list(WORKLOADS), metavar="NAME", help=names)
    add("--only", default="", help=f"programs, comma-separated: {','.join(PROGRAMS)}")
    add("--rounds", type=int, default=2, help="runs of each program on each workload")
    add("--warm-up", type=int, default=3, help="steps before the timed ones")
    add("--steps", type=int, default=8, help="timed steps of a run")
    add("--seconds", type=float, default=7200, help="in all; what does not fit is left out, and said")
    add(
        "--llamac-flags", default="", help='more flags for llamac\'s program: "--kernel matmul_forward=tiled"'
    )
    add("--baseline", type=Path, help=baseline)
    add("--devices", type=int, help="of a workload on several (default: 8, tiny-x2: 2)")
    add("--out", type=Path, help="JSON of everything (default: BUILD/bench_train.json)")
    o = parser.parse_args(arguments)
    o.workloads = {name: known[name] for name in o.workload}
    for name, w in o.workloads.items():
        if w.devices > 1 and o.devices:
            o.workloads[name] = replace(w, devices=o.devices)
        if o.other and "llamac" in w.programs:
            o.workloads[name] = replace(w, programs=(*w.programs, "other"))
    missing = {name for name in ("baseline", "other") if not getattr(o, name)}
    o.only = o.only.split(",") if o.only else [p for p in PROGRAMS if p not in missing]
    o.out = o.out or o.build / "bench_train.json"
    return o


def check(o: argparse.Namespace) -> None:
    """Raises ValueError for arguments that cannot be run."""
    if unknown := set(o.only) - set(PROGRAMS):
        raise ValueError(f"--only: expected some of {', '.join(PROGRAMS)}, found {min(unknown)}")
    needed = "llamac" in o.only and any("llamac" in w.programs for w in o.workloads.values())
    if needed and not (o.build / "train_llama3").is_file():
        raise ValueError(f"--build {o.build}: expected train_llama3 in it, found none")
    if "other" in o.only and not (o.other and (o.other / "train_llama3").is_file()):
        raise ValueError(f"--other: expected a folder with train_llama3 in it, found {o.other}")
    if "baseline" in o.only and not (o.baseline and o.baseline.is_file()):
        raise ValueError(f"--baseline: expected a script, found {o.baseline}")
    if o.devices is not None and o.devices < 2:
        raise ValueError(f"--devices: expected at least 2, found {o.devices}")
    if min(o.rounds, o.steps, o.warm_up + 1) < 1:
        raise ValueError("--rounds, --steps: expected at least 1, --warm-up: at least 0")
    o.out.parent.mkdir(parents=True, exist_ok=True)


def write_tokens(o: argparse.Namespace, path: Path) -> None:
    """Random tokens for the longest run, below the smallest vocabulary."""
    V = min(load_config(w.model).vocab_size for w in o.workloads.values())
    n = max(w.B * w.T * w.devices for w in o.workloads.values()) * (o.warm_up + o.steps) + 1
    write_bin(path, np.random.default_rng(0).integers(V, size=n, dtype=np.uint32), V)


def main(arguments: list[str] | None = None) -> int:
    o = parse_arguments(arguments)
    try:
        check(o)
        with tempfile.TemporaryDirectory() as folder:
            o.data = Path(folder) / "tokens.bin"
            write_tokens(o, o.data)
            runs = bench(o, provenance())
    except (ValueError, OSError) as error:
        say(str(error))
        return 2
    return int(any(run.failure and (run.failure != NO_MEMORY or run.program == "llamac") for run in runs))


if __name__ == "__main__":
    # Ended from outside, it ends the run that is under way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
