#!/usr/bin/env python3
"""Training beside other programs on this machine's device, with the same model, batch and precision:

llamac   BUILD/train_llama3
other    the train_llama3 of another build (--other), such as that of an earlier commit
compile  train_llama3.py --train, PyTorch, by torch.compile; eager: without it
ops      the same on llamac's operations
script, torchao, hf, transformers, patched
         llamac/bench/peers.py: a plain PyTorch script, the same with torchao's float8, transformers with
         Liger's loss under torch.compile, as it is, and under llamac.patch
dtensor  the plain script on several devices, by PyTorch's tensor parallelism

Tokens are random. The programs take turns: each round runs each of them once on each workload.

Prints a markdown table, writes it to bench_train.md beside --out, which gets every number as JSON: both after
each run, so that an interrupted benchmark keeps what it has. What is missing, and why, is said.

Exit code: 1 where a run failed (another program may run out of memory or be missing), 2 for bad arguments.
"""

import argparse
import signal
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llamac.base import errors
from llamac.base.arguments import check_least, split_list
from llamac.base.errors import InputError
from llamac.base.version import provenance_text
from llamac.bench import harness
from llamac.bench.harness import STOPPED
from llamac.bench.report import markdown
from llamac.bench.training import PROGRAMS, Figures, Run, Workload, bench, by_round, recomputed, write_tokens

ROOT = Path(__file__).resolve().parents[1]


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
    "8b-b1-t8192-tp2": Workload("llama3.1-8b", 1, 8192, programs=("llamac", "dtensor"), devices=2, tp=2),
    "8b-b1-t8192-zero1": Workload("llama3.1-8b", 1, 8192, programs=("llamac",), devices=2),
    "1b-b4-t8192-zero1": Workload("llama3.2-1b", 4, 8192, programs=AGAINST_FSDP, devices=8),
    # What one device does of the same, to compare N of them with. The states of 8B in f32 do not fit one.
    "8b-b2-t8192": Workload("llama3.1-8b", 2, 8192, "block", programs=("llamac",)),
    "8b-b2-t8192-zero1-bf16": Workload("llama3.1-8b", 2, 8192, "block", programs=("llamac",), devices=8),
}
COMPILED = ("llamac", "compile", "script", "compiled")
MODELS = {
    "gpt2-1.5b-b8-t1024": Workload("gpt2-1.5b", 8, 1024, programs=COMPILED),
    "gpt2-125m-b32-t1024": Workload("gpt2-125m", 32, 1024, programs=COMPILED),
    "gpt2-1.5b-b8-t1024-zero1": Workload(
        "gpt2-1.5b", 8, 1024, programs=("llamac", "compile", "script"), devices=2
    ),
    "qwen3-8b-b1-t8192": Workload("qwen3-8b", 1, 8192, "norm,swiglu", programs=COMPILED),
    "qwen3-8b-b1-t8192-fp8": Workload(
        "qwen3-8b", 1, 8192, "norm,swiglu", programs=("llamac", "torchao"), flags=FP8
    ),
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
KNOWN = WORKLOADS | SHARDED | MODELS | TRANSFORMERS | SMALL
HEAD = (
    *("workload", "program", "recomputed", "tokens/s", "TFLOP/s", "peak GiB", "spread %", "runs", "loss"),
    "llamac / it",
)
NOTES = """\
Tokens/s and TFLOP/s: median over runs of the median step. Spread: largest less smallest run, of the median.
Peak: allocated on the device; on a CPU, resident. Loss: of the last step, on the same tokens; script and
torchao begin with other weights.
Llamac / it: median over rounds of the ratio of tokens/s; where llamac is no program, that of ops or patched.
ops: train_llama3.py --ops llamac --compile. On several devices: tokens/s and TFLOP/s of all of them, peak of
one.
compile, eager: train_llama3.py, attention by cuDNN where it can, q/k/v and gate/up as one product each, AdamW
compiled (also for eager). They and llamac round bf16 weights and moments stochastically; the others to
nearest.
"""


def row(runs: list[Run], first: dict[int, float], w: Workload) -> list[str]:
    """The table's row of one program on one workload; first: tokens/s of the first program in each round."""
    program = runs[0].program
    cells = [runs[0].workload, program, recomputed(w, program)]
    good = [run for run in runs if not run.failure]
    if not good:
        return [*cells, "-", "-", "-", "-", f"0/{len(runs)}", "-", runs[0].failure[:60].replace("|", "/")]
    f = Figures(good)
    ratio = harness.ratio(first, by_round(good, program)) if program != w.programs[0] else None
    cells += [f"{f.speed:.0f}", f"{f.tflops:.3g}", f"{f.peak_gib:.3g}" if f.peak_gib else "-"]
    loss = "-" if f.loss is None else f"{f.loss:.3f}"
    cells += [f"{f.spread:.1f}", f"{len(good)}/{len(runs)}", loss]
    return [*cells, "-" if ratio is None else f"{ratio:.3f}"]


def report(workloads: dict[str, Workload], runs: list[Run], left_out: list[str], when: dict[str, str]) -> str:
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
    add("--seconds", type=float, default=7200, help="total time limit; runs beyond it are skipped and named")
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
    o.llamac = (o.build / "train_llama3").resolve()
    o.other = o.other and (o.other / "train_llama3").resolve()
    return o


def check(o: argparse.Namespace) -> None:
    """Raises InputError for arguments that cannot be run."""
    if unknown := set(o.only) - set(PROGRAMS):
        raise InputError(f"--only: expected some of {', '.join(PROGRAMS)}, found {min(unknown)}")
    needed = "llamac" in o.only and any("llamac" in w.programs for w in o.workloads.values())
    if needed and not o.llamac.is_file():
        raise InputError(f"--build {o.build}: expected train_llama3 in it, found none")
    if o.other and not o.other.is_file():
        raise InputError(f"--other: expected a folder with train_llama3 in it, found {o.other.parent}")
    check_least(o, devices=2, rounds=1, steps=1, warm_up=0)


def main(arguments: list[str] | None = None) -> int:
    o = parse_arguments(arguments)
    check(o)
    with tempfile.TemporaryDirectory() as folder:
        o.data = Path(folder) / "tokens.bin"
        write_tokens(o, o.data)
        runs = bench(o, partial(report, o.workloads))
    return int(any(run.failure and not run.excused for run in runs))


if __name__ == "__main__":
    # Ended from outside, it ends the run that is under way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    errors.run(lambda: sys.exit(main()))
