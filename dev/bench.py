#!/usr/bin/env python3
"""All microbenchmarks beside PyTorch, as one table per preset.

Runs the programs of dev/hip in the build folder, then, where torch sees a GPU, times PyTorch eager and
torch.compile on the same calls (dev/baselines.py). Prints markdown tables, writes them to bench.md beside
--out, which gets every number as JSON: both after each step, so that an interrupted run keeps what it has.
What is missing, and why, goes to stderr.

Exit code: 1 where a program or one of its checks failed, 2 for bad arguments.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llamac.base import errors
from llamac.base.errors import InputError
from llamac.base.version import provenance, provenance_text
from llamac.bench import harness
from llamac.bench.harness import say
from llamac.bench.report import markdown

ROOT = Path(__file__).resolve().parents[1]
SHARED = {"benchmark"}  # sources of dev/hip that are no program
COMPUTE_BOUND = ("attention_forward", "attention_backward", "matmul")
PRESETS = ("8b", "small", "tiny")
MODES = {"none": [], "eager": ["eager"], "compile": ["eager", "compile"]}
HEAD = (
    *("operation", "types", "shape", "naive ms", "llamac ms", "variant, block", "rate", "% of limit"),
    *("eager ms", "compile ms", "compile / llamac"),
)


def run_program(program: Path, preset: str, flags: list[str], seconds: float) -> tuple[list[dict], str]:
    """The JSON lines that a program printed, and why it failed ("": it did not)."""
    command = [program.resolve(), "--json", "--preset", preset, *flags]
    finished = harness.execute(command, seconds)
    texts = finished.text.splitlines()
    lines = [json.loads(text) for text in texts if text.startswith("{")]
    wrong = [f"{line['operation']} ({line['dtype']})" for line in lines if not line["check"]["passed"]]
    if wrong:
        said = [text for text in texts if not text.startswith("{")]
        return lines, ": ".join(["check failed", ", ".join(wrong), *said[-1:]])
    return lines, finished.failure or ("" if lines else "it printed nothing")


def choose_programs(sources: Path, wanted: list[str]) -> list[str]:
    """Programs by name; an operation is chosen by its own name or its beginning: rmsnorm, rope_forward."""
    names = sorted(path.stem for path in sources.glob("*.cpp") if path.stem not in SHARED)
    for name in wanted:
        if not any(n == name or n.startswith(f"{name}_") for n in names):
            raise InputError(f"--operation {name}: expected one of {', '.join(names)}, or their beginning")
    return [n for n in names if not wanted or any(n == w or n.startswith(f"{w}_") for w in wanted)]


def default_presets(programs: list[Path], flags: list[str], seconds: float) -> list[str]:
    """8b and small on a GPU, tiny where the first program that runs says it is emulated."""
    for program in programs:
        lines, _ = run_program(program, "tiny", flags, seconds)
        if lines:
            return ["tiny"] if lines[0]["emulated"] else ["8b", "small"]
    return ["tiny"]


def fastest(line: dict, naive: bool) -> dict | None:
    """The fastest run of the naive variant, or of all others."""
    runs = [run for run in line["runs"] if (run["variant"] == "naive") == naive and run["ms"]]
    return min(runs, key=lambda run: run["ms"], default=None)


def row(line: dict) -> list[str]:
    naive, best = fastest(line, naive=True), fastest(line, naive=False)
    chosen = best or naive
    baselines = line.get("baselines", {})
    theirs = [
        f"{baselines[mode]['ms']:.4f} {baselines[mode]['method']}" if mode in baselines else "-"
        for mode in MODES["compile"]
    ]
    shape = " ".join(f"{letter}={size}" for letter, size in line["shape"].items())
    cells = [line["operation"], line["dtype"] or "f32", shape, f"{naive['ms']:.4f}" if naive else "-"]
    if not chosen:
        return [*cells, "-", "-", "-", "-", *theirs, "-"]
    computes = line["operation"].startswith(COMPUTE_BOUND)
    rate = f"{chosen['tflops']:.1f} TFLOP/s" if computes else f"{chosen['gbps']:.0f} GB/s"
    percent = "-" if computes or chosen["percent"] is None else f"{chosen['percent']:.1f}"
    ratio = f"{baselines['compile']['ms'] / chosen['ms']:.2f}" if "compile" in baselines else "-"
    if not line["check"]["passed"]:
        ratio += " CHECK FAILED"
    cells += [f"{best['ms']:.4f}" if best else "-", f"{chosen['variant']}, {chosen['block'] or 'own'}"]
    return [*cells, rate, percent, *theirs, ratio]


def report(results: dict) -> str:
    """The markdown: what was measured where, a table per preset, what failed."""
    parts = []
    for preset in dict.fromkeys(line["preset"] for line in results["results"]):
        lines = [line for line in results["results"] if line["preset"] == preset]
        limits = sorted(line["limit"]["gbps"] for line in lines)
        copies = " or ".join(sorted({line["limit"]["by"] for line in lines}))
        head = f"## {preset}: {lines[0]['device']}, {results['torch']}, {provenance_text(results)}\n\n"
        if lines[0]["emulated"]:
            head += "Emulated on the CPU: checked and not timed.\n\n"
        else:
            head += (
                f"Limit: {limits[0]:.0f} to {limits[-1]:.0f} GB/s by {copies}, at each operation's bytes.\n\n"
            )
        parts.append(
            head + markdown(HEAD, ["---"] * 3 + ["---:"] * 2 + ["---"] + ["---:"] * 5, map(row, lines))
        )
    if results["failures"]:
        failed = (f"- {f['program']} --preset {f['preset']}: {f['reason']}" for f in results["failures"])
        parts.append("Failed:\n\n" + "\n".join(failed))
    return "\n\n".join(parts) + "\n"


def add_baselines(results: dict, modes: list[str], seconds: float, save) -> None:
    """PyTorch's times, until `seconds` are over; nothing where torch or its GPU is missing."""
    if not modes or all(line["emulated"] for line in results["results"]):
        return
    try:
        import torch
    except ImportError:
        return say("no PyTorch times: torch is not installed")
    if not torch.cuda.is_available():
        return say("no PyTorch times: torch sees no GPU")
    import baselines

    results["torch"] = f"PyTorch {torch.__version__} ({baselines.COMPILE})"
    start = time.monotonic()
    for line in results["results"]:
        label = f"PyTorch {line['operation']} ({line['dtype']}) {line['preset']}"
        spent = time.monotonic() - start
        if spent > seconds:
            say(f"{label}: left out, {seconds:.0f} s are over")
            continue
        line["baselines"], line["baseline_failures"] = baselines.measure(line, modes)
        for failure in line["baseline_failures"]:
            say(f"PyTorch {failure}")
        say(f"{label}: {time.monotonic() - start - spent:.1f} s")
        save()


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--build", type=Path, required=True, help="folder of the built programs")
    add("--sources", type=Path, default=ROOT / "dev/hip", help="their sources: which there are")
    add("--preset", nargs="+", choices=PRESETS, help="8b small on a GPU, tiny where emulated")
    add("--operation", nargs="+", default=[], help="only these: rmsnorm, rope_forward")
    add("--dtype", choices=("bf16", "f32"), help="storage, as the programs take it")
    add("--baselines", choices=MODES, default="compile", help="compile: eager too")
    add("--baseline-seconds", type=float, default=360, help="no PyTorch call is begun after these")
    add("--program-seconds", type=float, default=120, help="a program is stopped after these")
    add("--out", type=Path, help="JSON of everything (default: BUILD/bench.json)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if not options.build.is_dir():
        raise InputError(f"--build {options.build}: expected the folder of a build, found none")
    programs = [options.build / name for name in choose_programs(options.sources, options.operation)]
    flags = ["--dtype", options.dtype] if options.dtype else []
    results: dict = provenance() | {"torch": "no PyTorch times", "results": [], "failures": []}

    def save() -> None:
        harness.write(options.out or options.build / "bench.json", results, report(results))

    for preset in options.preset or default_presets(programs, flags, options.program_seconds):
        for program in programs:
            start = time.monotonic()
            lines, wrong = run_program(program, preset, flags, options.program_seconds)
            results["results"] += [line | {"preset": preset} for line in lines]
            if wrong:
                results["failures"].append({"program": program.name, "preset": preset, "reason": wrong})
            said = f"FAILED: {wrong}" if wrong else f"{time.monotonic() - start:.1f} s"
            say(f"{program.name} --preset {preset}: {said}")
            save()
    add_baselines(results, MODES[options.baselines], options.baseline_seconds, save)
    save()
    print(report(results), end="")
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    errors.run(lambda: sys.exit(main()))
