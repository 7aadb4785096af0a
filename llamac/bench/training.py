"""Training by several programs in turn, each run a process of its own: what dev/bench_train.py and `llamac
bench --hf` share. Needs no torch.

A process of its own, because two programs do not fit into one GPU's memory; PyTorch's second start finds its
compiled graphs in its cache. A run's figures are medians of its steps after the warm-up, out of its log.
"""

import argparse
import itertools
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from llamac.base.errors import InputError
from llamac.base.log import read_log
from llamac.base.version import FOLDER, provenance
from llamac.bench import harness
from llamac.bench.harness import NO_MEMORY, STOPPED, say
from llamac.data import write_bin
from llamac.model.config import load_config

SEED = 42  # of the order of the data, and of the weights
NOT_INSTALLED = "not installed"


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
    flags: tuple[str, ...] = ()  # more, of llamac, or of the peers without it
    devices: int = 1
    zero: int = 1  # of llamac, on several devices
    tp: int = 1  # devices that divide the model


PEERS: dict[str, tuple[str, ...]] = {  # the modules that they need beside torch
    "script": (),
    "torchao": ("torchao",),
    "transformers": ("transformers",),
    "liger": ("transformers", "liger_kernel"),
    "compiled": ("transformers",),
    "hf": ("transformers", "liger_kernel"),
    "patched": ("transformers",),
    "dtensor": (),
}
PEER = [sys.executable, "-c", "from llamac.bench import peers; peers.main()"]
PROGRAMS = ("llamac", "other", "ops", "compile", "eager", *PEERS)


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
    first_loss: float | None = None
    loss: float | None = None  # of the last step: they all train the same
    device: str = ""
    failure: str = ""

    @property
    def excused(self) -> bool:
        """Whether another program lacks memory or a package."""
        return self.program != "llamac" and self.failure.startswith((NO_MEMORY, NOT_INSTALLED))


def recomputed(w: Workload, program: str) -> str:
    return w.recompute if program in ("llamac", "other") else w.torch_recompute


def command(o: argparse.Namespace, w: Workload, program: str, folder: Path) -> list[str]:
    """The command line of a run that writes into folder."""
    states = "f32" if w.exact else w.dtype
    flags = {
        **{"model": w.model, "batch-size": w.B, "seq-len": w.T, "steps": o.warm_up + o.steps},
        **{"train-data": o.data, "tokenizer": "none", "recompute": recomputed(w, program)},
        **{"dtype": w.dtype, "grad-dtype": w.dtype, "lr": 1e-5, "warmup-steps": 0, "schedule": "constant"},
        **{"seed": SEED, "init": "random"},
        **{"master-weights": "on" if w.exact else "off", "optimizer-state": states},
    }
    ours = program in ("llamac", "other")
    alone: dict = {"log": folder / "log.jsonl"}
    if ours:
        alone = {"val-data": "", "sample-every": 0, "checkpoint-every": -1, "out": folder}
    words = [word for name, value in (flags | alone).items() for word in (f"--{name}", str(value))]
    if ours:
        several = ["--devices", str(w.devices), "--zero", str(w.zero)] if w.devices > 1 else []
        several += ["--tp", str(w.tp)] if w.tp > 1 else []
        more = shlex.split(o.llamac_flags) if program == "llamac" else []
        return [str(o.llamac if program == "llamac" else o.other), *words, *several, *w.flags, *more]
    line = []
    if w.devices > 1:
        line += [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        line += ["--no-python", "--nproc-per-node", str(w.devices)]
        line += ["--"]  # else --log would be a beginning of its --log-dir
    if program in PEERS:
        return [*line, *PEER, program, *words, *(() if "llamac" in w.programs else w.flags)]
    line += [sys.executable, str(FOLDER / "train_llama3.py"), "--train", *words]
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
    run.first_loss, run.loss = events[0]["loss"], timed[-1]["loss"]
    if None in (run.first_loss, run.loss):
        run.failure = "its loss is no number"
    named = re.search(r"computes on +(.+?)(?:  |$)|^(PyTorch .+), \S+: ", finished.text, re.MULTILINE)
    run.device = named[1] or named[2] if named else ""


def measure(o: argparse.Namespace, name: str, program: str, number: int, seconds: float) -> Run:
    """One run, stopped after `seconds`."""
    run, w = Run(name, program, number), o.workloads[name]
    if missing := [module for module in PEERS.get(program, ()) if not find_spec(module)]:
        run.failure = f"{NOT_INSTALLED}: {', '.join(missing)}"
        return run
    environment: dict[str, Any] = {"OMP_NUM_THREADS": str(o.threads)} if o.threads else {}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if name == "cpu" else {}
    with tempfile.TemporaryDirectory() as folder:
        line = command(o, w, program, Path(folder))
        finished = harness.execute(line, seconds, FOLDER, **environment)
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


@dataclass
class Figures:
    """Of the runs of one program that did not fail, which are at least one."""

    runs: list[Run]

    def __post_init__(self) -> None:
        speeds = [run.tokens_per_s for run in self.runs]
        self.speed = statistics.median(speeds)
        self.spread = 100 * (max(speeds) - min(speeds)) / self.speed
        self.tflops = statistics.median(run.tflops for run in self.runs)
        self.peak_gib = max(run.gpu_mem_gib for run in self.runs)
        self.first_loss, self.loss = self.runs[-1].first_loss, self.runs[-1].loss


Report = Callable[[list[Run], list[str], dict[str, str]], str]


def bench(o: argparse.Namespace, report: Report) -> list[Run]:
    """All runs that the time allows. report: the markdown of the runs so far, what was left out, when."""
    when = provenance()
    end = time.monotonic() + o.seconds
    runs: list[Run] = []
    left_out: list[str] = []
    took: dict[tuple[str, str], float] = {}

    def write() -> str:
        text = report(runs, left_out, when)
        content = when | {"warm_up": o.warm_up, "runs": [asdict(r) for r in runs], "left_out": left_out}
        harness.write(o.out, content, text)
        return text

    for number, (name, w), program in itertools.product(range(o.rounds), o.workloads.items(), o.only):
        absent = any(one.program == program and one.failure.startswith(NOT_INSTALLED) for one in runs)
        if program not in w.programs or absent:
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


def write_tokens(o: argparse.Namespace, path: Path) -> None:
    """Random tokens for the longest run, below the smallest vocabulary."""
    V = min(load_config(w.model).vocab_size for w in o.workloads.values())
    n = max(w.B * w.T * w.devices for w in o.workloads.values()) * (o.warm_up + o.steps) + 1
    write_bin(path, np.random.default_rng(0).integers(V, size=n, dtype=np.uint32), V)
