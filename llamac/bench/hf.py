"""`llamac bench --hf` trains one model by Hugging Face's transformers and by llamac, and compares speed and
memory.

transformers  Hugging Face's LlamaForCausalLM as it is, the baseline
liger         with all kernels of Liger (pip install liger-kernel)
compiled      under torch.compile
hf            with Liger's fused linear and cross-entropy, the rest under torch.compile
patched       under llamac.patch
llamac        the program train_llama3, of the working folder or PATH (--program)

All train the same batches from the same weights with the same AdamW, in --dtype throughout. They take turns:
each round runs each of them once, in a process of its own. A run's figure is the median of its steps after
the warm-up; a step is timed from one synchronization of the device to the next. --model is a preset or a
directory with a config.json, of which only the sizes count: weights are random.

The first losses have to agree within 2^-8 of their value in bf16, its rounding error, and within 1e-5 in f32.
Writes bench-hf.json, bench-hf.md and the chart bench-hf.png to --out. What is not installed is left out, and
named. The exit code is 1 if a run failed or losses differ, and 2 for bad arguments.
"""

import argparse
import math
import tempfile
from functools import partial
from pathlib import Path

from llamac.base.arguments import Parser, check_least, split_list
from llamac.base.errors import InputError, requires
from llamac.base.version import provenance_text
from llamac.bench import harness
from llamac.bench.harness import STOPPED
from llamac.bench.report import PROGRAMS, Bar, bars, can_draw, markdown
from llamac.bench.training import PEERS, Figures, Run, Workload, bench, by_round, write_tokens
from llamac.model.config import load_config
from llamac.training import program

PLAIN = "transformers"
COMPARED = (PLAIN, "liger", "compiled", "hf", "patched", "llamac")
LIGER = [name for name in COMPARED if "liger_kernel" in PEERS.get(name, ())]
TOLERANCE = {"bf16": 2.0**-8, "f32": 1e-5}  # of first losses, relative
DEFAULTS = {"cuda": ("llama3.2-1b", 4, 4096, "bf16"), "cpu": ("tiny", 2, 256, "f32")}
HEAD = ("name", "program", "tokens/s", "ratio", "peak GiB", "spread %", "runs", "first loss", "last loss")
NOTES = """\
Tokens/s: median over runs of the median step. Ratio: to Hugging Face's, median over rounds. Peak: allocated
on the device; on a CPU, resident. Spread: largest less smallest run, of the median. llamac rounds bf16
weights stochastically, the others to nearest.
"""


def good_runs(runs: list[Run]) -> dict[str, list[Run]]:
    """By program; each has some."""
    found = {name: [r for r in runs if r.program == name and not r.failure] for name in COMPARED}
    return {name: mine for name, mine in found.items() if mine}


def ratios(runs: list[Run]) -> dict[str, float | None]:
    """Each program's tokens/s divided by Hugging Face's."""
    plain = by_round(runs, PLAIN)
    return {name: harness.ratio(by_round(runs, name), plain) for name in COMPARED}


def differences(runs: list[Run], dtype: str) -> list[str]:
    """Why runs cannot be compared: another first loss, or another kind of device, than the first has."""
    said, good = [], [run for mine in good_runs(runs).values() for run in mine]
    for run in good:
        base, loss, wanted = good[0], *(r.first_loss or math.nan for r in (run, good[0]))
        if not abs(loss - wanted) <= TOLERANCE[dtype] * wanted:
            said.append(f"{run.program}: first loss {loss:.6f}, that of {base.program} is {wanted:.6f}")
        if ("CPU" in run.device) != ("CPU" in base.device):
            said.append(f"{run.program}: computes on {run.device}, {base.program} on {base.device}")
    return list(dict.fromkeys(said))


def report(o: argparse.Namespace, runs: list[Run], left_out: list[str], when: dict[str, str]) -> str:
    """The markdown: what and where, the table, its notes."""
    ratio, good, rows = ratios(runs), good_runs(runs), []
    for name in COMPARED:
        mine = [run for run in runs if run.program == name]
        if not mine:
            continue
        cells = [name, PROGRAMS[name][0]]
        if name not in good:
            rows.append(
                [*cells, "-", "-", "-", "-", f"0/{len(mine)}", "-", mine[0].failure.replace("|", "/")]
            )
            continue
        f = Figures(good[name])
        cells += [f"{f.speed:,.0f}", f"{ratio[name]:.2f}" if ratio[name] else "-", f"{f.peak_gib:.3g}"]
        losses = [f"{f.first_loss:.4f}", f"{f.loss:.4f}"]
        rows.append([*cells, f"{f.spread:.1f}", f"{len(good[name])}/{len(mine)}", *losses])
    devices = " · ".join(dict.fromkeys(run.device for run in runs if run.device))
    table = markdown(HEAD, ["---"] * 2 + ["---:"] * 7, rows)
    text = f"## {o.label}: {devices}, {provenance_text(when)}\n\n{table}\n\n{NOTES}"
    wrong = differences(runs, o.dtype)
    text += f"NOT COMPARABLE: {'; '.join(wrong)}.\n" if wrong else ""
    return text + (f"Left out, {STOPPED}: {'; '.join(left_out)}.\n" if left_out else "")


def chart(runs: list[Run], title: str, path: Path) -> None:
    """Tokens/s with their ratios to Hugging Face's, and memory, of what did not fail."""
    ratio, speeds, memory = ratios(runs), {}, {}
    for name, mine in good_runs(runs).items():
        f = Figures(mine)
        times = f"   {ratio[name]:.2f}x" if ratio[name] and name != PLAIN else ""
        speeds[name] = Bar(f.speed, f"{f.speed:,.0f}{times}")
        memory[name] = Bar(f.peak_gib, f"{f.peak_gib:.3g}")
    bars({"tokens per second": {"": speeds}, "peak memory, GiB": {"": memory}}, title, path)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("bench --hf", __doc__)
    add, integer = parser.add_argument, parser.integer
    add("--model", help="preset, or directory with a config.json [GPU: llama3.2-1b, CPU: tiny]")
    integer("--batch-size", "sequences per step [GPU: 4, CPU: 2]")
    integer("--seq-len", "tokens per sequence [GPU: 4096, CPU: 256]")
    add("--dtype", choices=TOLERANCE, help="type of weights, gradients and moments [GPU: bf16, CPU: f32]")
    add("--recompute", choices=("none", "block"), default="none", help="recompute blocks in backward [none]")
    add("--only", default="", metavar="LIST", help=f"programs of {','.join(COMPARED)} [all]")
    add("--program", metavar="FILE", help="the program train_llama3 [of the working folder, or PATH]")
    integer("--rounds", "runs of each program [3]", 3)
    integer("--warm-up", "steps before the timed ones [3]", 3)
    integer("--steps", "timed steps of a run [8]", 8)
    integer("--threads", "of each program on a CPU [their own choice]")
    parser.number("--seconds", "total time limit; runs beyond it are skipped and named [7200]", 7200.0)
    add("--out", type=Path, default=Path("out/bench"), help="folder for the results [out/bench]")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    o = parse_arguments(arguments)
    check_least(o, batch_size=1, seq_len=2, rounds=1, steps=1, warm_up=0, threads=1)
    on_gpu = requires("torch", "llamac bench").cuda.is_available()
    if not (on_gpu or o.only):
        harness.say(f"left out: {', '.join(LIGER)}; Liger's kernels need a GPU")
    o.only = split_list("--only", o.only) or [name for name in COMPARED if on_gpu or name not in LIGER]
    if unknown := set(o.only) - set(COMPARED):
        raise InputError(f"--only: expected some of {', '.join(COMPARED)}, found {min(unknown)}")
    model, batch_size, seq_len, dtype = DEFAULTS["cuda" if on_gpu else "cpu"]
    o.dtype = o.dtype or dtype
    if o.model and Path(o.model).exists():  # programs have another working folder
        o.model = str(Path(o.model).resolve())
    w = Workload(
        *(o.model or model, o.batch_size or batch_size, o.seq_len or seq_len, o.recompute, o.recompute),
        programs=COMPARED,
        dtype=o.dtype,
    )
    if (longest := load_config(w.model).max_position_embeddings) < w.T:
        raise InputError(f"--seq-len: expected at most {longest}, the model's longest sequence, found {w.T}")
    o.label = f"{w.model}, B={w.B} T={w.T}, {w.dtype}"
    o.workloads, o.folder, o.out = {o.label: w}, o.out, o.out / "bench-hf.json"
    if "llamac" in o.only:
        o.llamac = Path(o.program or program.find()).resolve()
        if not o.llamac.is_file():
            raise InputError(f"--program {o.program}: expected the program train_llama3, found no file")
    o.llamac_flags = ""
    with tempfile.TemporaryDirectory() as folder:
        o.data = Path(folder) / "tokens.bin"
        write_tokens(o, o.data)
        runs = bench(o, partial(report, o))
    if good_runs(runs) and can_draw():
        device = next(run.device for run in runs if run.device)
        chart(runs, f"Training {o.label}\n{device}", o.folder / "bench-hf.png")
    failed = any(run.failure and not run.excused for run in runs)
    return int(failed or bool(differences(runs, o.dtype)))
