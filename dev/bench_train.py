#!/usr/bin/env python3
"""Training beside other programs on this machine's device, with the same model, batch and precision:

llamac   BUILD/train_llama3
other    the train_llama3 of another build (--other), such as that of an earlier commit
compile  train_llama3.py --train, PyTorch, by torch.compile; eager: without it
ops      the same on llamac's operations
script, torchao, hf, transformers, patched
         dev/peers.py: a plain PyTorch script, the same with torchao's float8, transformers with Liger's loss,
         as it is, and under llamac.patch

Tokens are random. The programs take turns: each round runs each of them once on each workload. A run is a
process of its own, because two of them do not fit into one GPU's memory; PyTorch's second start finds its
compiled graphs in its cache. A run's figures are medians of its steps after the warm-up, out of its log.

Prints a markdown table, writes it to bench_train.md beside --out, which gets every number as JSON: both after
each run, so that an interrupted benchmark keeps what it has. What is missing, and why, is said.

Exit code: 1 where a run failed (another program may run out of memory or be missing), 2 for bad arguments.
"""

import argparse
import itertools
import re
import shlex
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np

from llamac.base import errors
from llamac.base.arguments import split_list
from llamac.base.errors import InputError
from llamac.base.log import read_log
from llamac.base.version import provenance, provenance_text
from llamac.bench import harness
from llamac.bench.harness import NO_MEMORY, STOPPED, say
from llamac.bench.report import markdown
from llamac.data import write_bin
from llamac.model.config import load_config

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Workload:
    """What is trained: B sequences of T tokens per device and step, and what each side computes again."""

    model: str
    B: int
    T: int
    recompute: str = "none"  # of llamac
    torch_recompute: str = "none"
    programs: tuple[str, ...] = ("llamac", "compile", "eager", "script")  # compared with the first
    exact: bool = False  # fp32 master weights and moments; else bf16 weights and moments only
    dtype: str = "bf16"
    flags: tuple[str, ...] = ()  # more, of llamac, or of the programs of dev/peers.py without it
    devices: int = 1
    zero: int = 1  # of llamac, on several devices


FP8 = ("--matmul-dtype", "fp8")
WORKLOADS = {
    "70b-proxy-b2-t4096": Workload("llama3.1-70b-proxy", 2, 4096),
    "8b-b1-t8192": Workload(
        "llama3.1-8b", 1, 8192, "norm,swiglu", programs=("llamac", "compile", "eager", "script", "hf")
    ),
    "8b-b1-t8192-fp8": Workload(
        "llama3.1-8b", 1, 8192, "norm,swiglu", programs=("llamac", "torchao"), flags=FP8
    ),
    "8b-b4-t8192": Workload("llama3.1-8b", 4, 8192, "block", "block"),
    "1b-b4-t8192": Workload("llama3.2-1b", 4, 8192),
    "1b-b8-t2048": Workload("llama3.2-1b", 8, 2048),
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
            "llama3.1-8b", 2, 8192, "block", "block", AGAINST_FSDP, exact=True, devices=8, zero=zero
        )
        for zero in (1, 2, 3)
    },
    "1b-b4-t8192-zero1": Workload("llama3.2-1b", 4, 8192, programs=AGAINST_FSDP, devices=8),
    # What one device does of the same, to compare N of them with. The states of 8B in f32 do not fit one.
    "8b-b2-t8192": Workload("llama3.1-8b", 2, 8192, "block", programs=("llamac",)),
    "8b-b2-t8192-zero1-bf16": Workload("llama3.1-8b", 2, 8192, "block", programs=("llamac",), devices=8),
}
PATCHED, LORA = ("patched", "transformers"), ("--lora", "16")
TRANSFORMERS = {
    "1b-b4-t4096-patch": Workload("llama3.2-1b", 4, 4096, programs=PATCHED),
    "1b-b4-t4096-lora": Workload("llama3.2-1b", 4, 4096, programs=PATCHED, flags=LORA),
    "8b-b1-t4096-lora": Workload("llama3.1-8b", 1, 4096, programs=PATCHED, flags=LORA),
}
# Not in the table: for a CPU, and so small that they try the benchmark itself.
SMALL = {
    "cpu": Workload("tiny", 8, 256, dtype="f32", programs=("llamac", "compile", "eager")),
    "tiny": Workload("tiny", 2, 64, programs=("llamac", "compile", "eager", "script", "torchao", "hf")),
    "tiny-x2": Workload("tiny", 2, 64, exact=True, programs=("llamac", *OPS), devices=2, zero=3),
}
KNOWN = WORKLOADS | SHARDED | TRANSFORMERS | SMALL
PEERS: dict[str, tuple[str, ...]] = {  # the modules that they need beside torch
    "script": (),
    "torchao": ("torchao",),
    "hf": ("transformers", "liger_kernel"),
    "transformers": ("transformers",),
    "patched": ("transformers",),
}
PROGRAMS = ("llamac", "other", "ops", "compile", "eager", *PEERS)
HEAD = (
    *("workload", "program", "recomputed", "tokens/s", "TFLOP/s", "peak GiB", "spread %", "runs", "loss"),
    "llamac / it",
)
NOTES = """\
Tokens/s and TFLOP/s: median over runs of the median step. Spread: largest less smallest run, of the median.
Peak: allocated on the device; on a CPU, resident. Loss: after the last optimizer step, on the same tokens
for all but those of dev/peers.py.
Llamac / it: median over rounds of the ratio of tokens/s; where llamac is no program, that of ops or patched.
ops: train_llama3.py --ops llamac --compile. On several devices: tokens/s and TFLOP/s of all of them, peak of
one.
compile, eager: train_llama3.py, attention by cuDNN where it can, q/k/v and gate/up as one product each, AdamW
compiled (also for eager). They and llamac round bf16 weights and moments stochastically; the others to
nearest.
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
    gpu_mem_gib: float = 0.0  # on a CPU, the process's
    loss: float | None = None  # of the last step: they all train the same
    device: str = ""
    failure: str = ""

    @property
    def excused(self) -> bool:
        """Whether another program lacks memory or a package."""
        return self.program != "llamac" and self.failure.startswith((NO_MEMORY, "not installed"))


def recomputed(w: Workload, program: str) -> str:
    return w.recompute if program in ("llamac", "other") else w.torch_recompute


def command(o: argparse.Namespace, w: Workload, program: str, folder: Path) -> list[str]:
    """The command line of a run that writes into folder."""
    states = "f32" if w.exact else w.dtype
    flags = {
        **{"model": w.model, "batch-size": w.B, "seq-len": w.T, "steps": o.warm_up + o.steps},
        **{"train-data": o.data, "tokenizer": "none", "recompute": recomputed(w, program)},
        **{"dtype": w.dtype, "grad-dtype": w.dtype, "lr": 1e-5, "warmup-steps": 0, "schedule": "constant"},
        **{"master-weights": "on" if w.exact else "off", "optimizer-state": states},
    }
    ours = program in ("llamac", "other")
    alone: dict = {"log": folder / "log.jsonl"}
    if ours:
        alone = {"val-data": "", "sample-every": 0, "checkpoint-every": -1, "out": folder}
    words = [word for name, value in (flags | alone).items() for word in (f"--{name}", str(value))]
    if ours:
        build = o.build if program == "llamac" else o.other
        several = ["--devices", str(w.devices), "--zero", str(w.zero)] if w.devices > 1 else []
        more = shlex.split(o.llamac_flags) if program == "llamac" else []
        return [str((build / "train_llama3").resolve()), *words, *several, *w.flags, *more]
    if program in PEERS:
        more = () if "llamac" in w.programs else w.flags
        return [sys.executable, str(ROOT / "dev/peers.py"), program, *words, *more]
    line = [sys.executable]
    if w.devices > 1:
        line += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        line += ["--nproc-per-node", str(w.devices), "--"]  # else --log would be a beginning of its --log-dir
    line += [str(ROOT / "train_llama3.py"), "--train", *words]
    if program == "ops":
        line += ["--ops", "llamac"]
    return line if program == "eager" else [*line, "--compile"]


def read_steps(run: Run, log: Path, warm_up: int, finished: harness.Finished, flops_per_token: float) -> None:
    """What the log says of the steps after the warm-up."""
    events = [e for e in read_log(log) if e.get("event") == "step"]
    timed = [e for e in events if e["step"] > warm_up]
    if not timed:
        run.failure = f"its log has {len(events)} steps, expected more than {warm_up}"
        return
    run.ms = [e["ms"] for e in timed]
    run.tokens_per_s = statistics.median(e["tokens_per_s"] for e in timed)
    run.tflops = run.tokens_per_s * flops_per_token / 1e12
    run.gpu_mem_gib = max(e["gpu_mem_gib"] or 0.0 for e in events) or finished.peak_gib
    run.loss = timed[-1]["loss"]
    if run.loss is None:
        run.failure = "its loss is no number"
    named = re.search(r"computes on +(.+?)(?:  |$)|^(PyTorch .+), \S+: ", finished.text, re.MULTILINE)
    run.device = named[1] or named[2] if named else ""


def measure(o: argparse.Namespace, name: str, program: str, number: int, seconds: float) -> Run:
    """One run, stopped after `seconds`."""
    run, w = Run(name, program, number), o.workloads[name]
    if missing := [module for module in PEERS.get(program, ()) if not find_spec(module)]:
        run.failure = f"not installed: {', '.join(missing)}"
        return run
    environment = {"OMP_NUM_THREADS": str(o.threads)} if o.threads else {}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if name == "cpu" else {}
    with tempfile.TemporaryDirectory() as folder:
        line = command(o, w, program, Path(folder))
        finished = harness.execute(line, seconds, ROOT, **environment)
        run.failure, run.seconds = finished.failure, finished.seconds
        if not run.failure:
            try:
                work = load_config(w.model).flops_per_token(w.T)
                read_steps(run, Path(folder) / "log.jsonl", o.warm_up, finished, work)
            except (InputError, KeyError) as error:
                run.failure = f"its log: {error}"
    return run


def by_round(runs: list[Run], program: str) -> dict[int, float]:
    """Tokens/s of a program in each round; a run that failed has none."""
    return {run.round: run.tokens_per_s for run in runs if run.program == program and not run.failure}


def row(runs: list[Run], first: dict[int, float], w: Workload) -> list[str]:
    """The table's row of one program on one workload; first: tokens/s of the first program in each round."""
    program = runs[0].program
    cells = [runs[0].workload, program, recomputed(w, program)]
    good = [run for run in runs if not run.failure]
    if not good:
        return [*cells, "-", "-", "-", "-", f"0/{len(runs)}", "-", runs[0].failure[:60].replace("|", "/")]
    speeds = [run.tokens_per_s for run in good]
    speed, peak = statistics.median(speeds), max(run.gpu_mem_gib for run in good)
    ratio = harness.ratio(first, by_round(good, program)) if program != w.programs[0] else None
    cells += [f"{speed:.0f}", f"{statistics.median(run.tflops for run in good):.3g}"]
    cells += [f"{peak:.3g}" if peak else "-", f"{100 * (max(speeds) - min(speeds)) / speed:.1f}"]
    loss = "-" if good[-1].loss is None else f"{good[-1].loss:.3f}"
    return [*cells, f"{len(good)}/{len(runs)}", loss, "-" if ratio is None else f"{ratio:.3f}"]


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
    ratios = [f"{cells[0]}: {cells[1]}, ratio {cells[-1]}\n" for cells in rows if cells[-1][0].isdigit()]
    text = f"## Training: {devices}, {provenance_text(when)}\n\n{table}\n\n{NOTES}\n{''.join(ratios)}"
    return text + (f"Left out, {STOPPED}: {'; '.join(left_out)}.\n" if left_out else "")


def bench(o: argparse.Namespace, when: dict[str, str]) -> list[Run]:
    """All runs that the time allows."""
    end = time.monotonic() + o.seconds
    runs: list[Run] = []
    left_out: list[str] = []
    took: dict[tuple[str, str], float] = {}

    def write() -> str:
        text = report(runs, o.workloads, left_out, when)
        content = when | {"warm_up": o.warm_up, "runs": [asdict(r) for r in runs], "left_out": left_out}
        harness.write(o.out, content, text)
        return text

    for number, (name, w), program in itertools.product(range(o.rounds), o.workloads.items(), o.only):
        if program not in w.programs:
            continue
        left, label = end - time.monotonic(), f"{name} {program}, round {number + 1}"
        if left <= took.get((name, program), 0) / 2:  # a second start compiles nothing
            left_out.append(label)
            continue
        run = measure(o, name, program, number + 1, left)
        took[name, program] = run.seconds
        say(f"{label}: {run.failure or f'{run.tokens_per_s:.0f} tokens/s'} ({run.seconds:.0f} s)")
        if run.failure == STOPPED:
            left_out.append(label)
        else:
            runs.append(run)
        write()
    print(write(), end="")
    return runs


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    names = f"of {', '.join(KNOWN)} (default: the first {len(WORKLOADS)})"
    add("--build", type=Path, default=ROOT / "build/auto", help="folder of train_llama3")
    add("--other", type=Path, help="folder of another build, whose train_llama3 takes its turns as other")
    add("--workload", nargs="+", choices=KNOWN, default=list(WORKLOADS), metavar="NAME", help=names)
    add("--only", default="", help=f"programs of {','.join(PROGRAMS)} (default: all but script)")
    add("--rounds", type=int, default=2, help="runs of each program on each workload")
    add("--warm-up", type=int, default=3, help="steps before the timed ones")
    add("--steps", type=int, default=8, help="timed steps of a run")
    add("--seconds", type=float, default=7200, help="in all; what does not fit is left out, and said")
    add(
        "--llamac-flags", default="", help='more flags for llamac\'s program: "--kernel matmul_forward=tiled"'
    )
    add("--threads", type=int, help="of each program on the CPU (default: their own choice)")
    add("--devices", type=int, help="of a workload on several (default: 8, tiny-x2: 2)")
    add("--out", type=Path, help="JSON of everything (default: BUILD/bench_train.json)")
    o = parser.parse_args(arguments)
    o.workloads = {name: KNOWN[name] for name in o.workload}
    for name, w in o.workloads.items():
        if w.devices > 1 and o.devices:
            o.workloads[name] = replace(w, devices=o.devices)
        if o.other and "llamac" in w.programs:
            o.workloads[name] = replace(w, programs=(*w.programs, "other"))
    o.only = split_list("--only", o.only) or [program for program in PROGRAMS if program != "script"]
    o.out = o.out or o.build / "bench_train.json"
    return o


def check(o: argparse.Namespace) -> None:
    """Raises InputError for arguments that cannot be run."""
    if unknown := set(o.only) - set(PROGRAMS):
        raise InputError(f"--only: expected some of {', '.join(PROGRAMS)}, found {min(unknown)}")
    needed = "llamac" in o.only and any("llamac" in w.programs for w in o.workloads.values())
    if needed and not (o.build / "train_llama3").is_file():
        raise InputError(f"--build {o.build}: expected train_llama3 in it, found none")
    if o.other and not (o.other / "train_llama3").is_file():
        raise InputError(f"--other: expected a folder with train_llama3 in it, found {o.other}")
    if o.devices is not None and o.devices < 2:
        raise InputError(f"--devices: expected at least 2, found {o.devices}")
    if min(o.rounds, o.steps, o.warm_up + 1) < 1:
        raise InputError("--rounds, --steps: expected at least 1, --warm-up: at least 0")


def write_tokens(o: argparse.Namespace, path: Path) -> None:
    """Random tokens for the longest run, below the smallest vocabulary."""
    V = min(load_config(w.model).vocab_size for w in o.workloads.values())
    n = max(w.B * w.T * w.devices for w in o.workloads.values()) * (o.warm_up + o.steps) + 1
    write_bin(path, np.random.default_rng(0).integers(V, size=n, dtype=np.uint32), V)


def main(arguments: list[str] | None = None) -> int:
    o = parse_arguments(arguments)
    check(o)
    with tempfile.TemporaryDirectory() as folder:
        o.data = Path(folder) / "tokens.bin"
        write_tokens(o, o.data)
        runs = bench(o, provenance())
    return int(any(run.failure and not run.excused for run in runs))


if __name__ == "__main__":
    # Ended from outside, it ends the run that is under way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    errors.run(lambda: sys.exit(main()))
