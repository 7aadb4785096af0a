"""All microbenchmarks beside PyTorch, as one table a preset.

Runs the programs of dev/hip in the build folder, then, where torch sees a GPU, times PyTorch eager and
torch.compile on the same calls (dev/baselines.py). Prints markdown tables, writes them to bench.md beside
--out, which gets every number as JSON: both after each step, so that an interrupted run keeps what it has.
What is missing, and why, goes to stderr.

Exit code: 1 where a program or one of its checks failed, 2 for bad arguments.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llamac.base.version import provenance, provenance_text
from llamac.bench.report import markdown

ROOT = Path(__file__).resolve().parents[1]
SHARED = {"benchmark"}  # sources of dev/hip that are no program
COMPUTE_BOUND = ("attention_forward", "attention_backward", "matmul")
PRESETS = ("8b", "small", "tiny")
MODES = {"none": [], "eager": ["eager"], "compile": ["eager", "compile"]}
KEYS = {"operation", "dtype", "shape", "bytes", "device", "emulated", "limit", "check", "runs"}
HEAD = (
    *("operation", "types", "shape", "naive ms", "llamac ms", "variant, block", "rate", "% of limit"),
    *("eager ms", "compile ms", "compile / llamac"),
)


@dataclass
class Results:
    """What was measured: lines are the programs' JSON lines, with PyTorch's "baselines" added."""

    lines: list[dict] = field(default_factory=list)
    failures: list[dict] = field(default_factory=list)
    torch: str = "no PyTorch times"

    def fail(self, program: str, preset: str, reason: str) -> None:
        self.failures.append({"program": program, "preset": preset, "reason": reason})
        say(f"{program} --preset {preset}: FAILED: {reason}")


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def last_line(text: str | bytes | None) -> str:
    text = text.decode(errors="replace") if isinstance(text, bytes) else text or ""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def parse(output: str | bytes | None) -> tuple[list[dict], str]:
    """The JSON lines of a program's output, and what is wrong with it ("": nothing)."""
    output = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    lines = []
    for number, text in enumerate(output.splitlines(), 1):
        try:
            line = json.loads(text)
            missing = KEYS - line.keys()
        except (ValueError, AttributeError):
            return lines, f"line {number} of its output is no JSON object: {text[:80]}"
        if missing:
            return lines, f"line {number} of its output lacks {', '.join(sorted(missing))}"
        lines.append(line)
    return lines, ""


def run_program(program: Path, preset: str, flags: list[str], seconds: float) -> tuple[list[dict], str]:
    """The lines that a program printed, and why it failed ("": it did not)."""
    command = [str(program.resolve()), "--json", "--preset", preset, *flags]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds)
    except OSError as error:
        return [], f"{program}: {error.strerror}"
    except subprocess.TimeoutExpired as stopped:
        return parse(stopped.stdout)[0], f"stopped after {seconds:.0f} s"
    lines, wrong = parse(done.stdout)
    wrong_checks = [f"{line['operation']} ({line['dtype']})" for line in lines if not line["check"]["passed"]]
    if done.returncode < 0:
        wrong = f"killed by signal {-done.returncode}"
    elif wrong_checks:
        wrong = f"check failed: {', '.join(wrong_checks)}"
    elif done.returncode:
        wrong = f"exit code {done.returncode}"
    elif not wrong and not lines:
        wrong = "it printed nothing"
    detail = last_line(done.stderr)
    return lines, f"{wrong}: {detail}" if wrong and detail else wrong


def choose_programs(sources: Path, wanted: list[str]) -> list[str]:
    """Programs by name; an operation is chosen by its own name or its beginning: rmsnorm, rope_forward."""
    names = sorted(path.stem for path in sources.glob("*.cpp") if path.stem not in SHARED)
    if not names:
        raise ValueError(f"{sources}: no sources of microbenchmarks")
    for name in wanted:
        if not any(n == name or n.startswith(f"{name}_") for n in names):
            raise ValueError(f"--operation {name}: expected one of {', '.join(names)}, or their beginning")
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
    cells += [
        f"{best['ms']:.4f}" if best else "-",
        f"{chosen['variant']}, {chosen['block'] or 'own'}",
        rate,
        percent,
    ]
    return [*cells, *theirs, ratio]


def table(lines: list[dict]) -> str:
    rule = ["---"] * 3 + ["---:"] * 2 + ["---"] + ["---:"] * 5
    return markdown(HEAD, rule, map(row, lines))


def report(results: Results, when: dict[str, str]) -> str:
    """The markdown: what was measured where, a table a preset, what failed."""
    parts = []
    for preset in dict.fromkeys(line["preset"] for line in results.lines):
        lines = [line for line in results.lines if line["preset"] == preset]
        limits = sorted(line["limit"]["gbps"] for line in lines)
        copies = " or ".join(sorted({line["limit"]["by"] for line in lines}))
        head = f"## {preset}: {lines[0]['device']}, {results.torch}, {provenance_text(when)}\n\n"
        if lines[0]["emulated"]:
            head += "Emulated on the CPU: these times say nothing about a GPU.\n\n"
        head += f"Limit: {limits[0]:.0f} to {limits[-1]:.0f} GB/s by {copies}, at each operation's bytes.\n\n"
        parts.append(head + table(lines))
    if results.failures:
        failed = (f"- {f['program']} --preset {f['preset']}: {f['reason']}" for f in results.failures)
        parts.append("Failed:\n\n" + "\n".join(failed))
    return "\n\n".join(parts) + "\n"


def write(results: Results, out: Path, when: dict[str, str]) -> None:
    content = when | {"torch": results.torch, "results": results.lines, "failures": results.failures}
    out.write_text(json.dumps(content, indent=1) + "\n")
    out.with_name("bench.md").write_text(report(results, when))


def add_baselines(results: Results, modes: list[str], seconds: float, save) -> None:
    """PyTorch's times, until `seconds` are over; nothing where torch or its GPU is missing."""
    if not modes or all(line["emulated"] for line in results.lines):
        return
    try:
        import torch
    except ImportError:
        return say("no PyTorch times: torch is not installed")
    if not torch.cuda.is_available():
        return say("no PyTorch times: torch sees no GPU")
    import baselines

    results.torch = f"PyTorch {torch.__version__} ({baselines.COMPILE})"
    start = time.monotonic()
    for line in results.lines:
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, required=True, help="folder of the built programs")
    parser.add_argument(
        "--sources", type=Path, default=ROOT / "dev/hip", help="their sources: which there are"
    )
    parser.add_argument("--preset", nargs="+", choices=PRESETS, help="8b small on a GPU, tiny where emulated")
    parser.add_argument("--operation", nargs="+", default=[], help="only these: rmsnorm, rope_forward")
    parser.add_argument("--dtype", choices=("bf16", "f32"), help="storage, as the programs take it")
    parser.add_argument("--baselines", choices=MODES, default="compile", help="compile: eager too")
    parser.add_argument(
        "--baseline-seconds", type=float, default=360, help="no PyTorch call is begun after these"
    )
    parser.add_argument("--program-seconds", type=float, default=120, help="a program is stopped after these")
    parser.add_argument("--out", type=Path, help="JSON of everything (default: BUILD/bench.json)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        if not options.build.is_dir():
            raise ValueError(f"--build {options.build}: expected the folder of a build, found none")
        names = choose_programs(options.sources, options.operation)
        out = options.out or options.build / "bench.json"
        out.parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        say(str(error))
        return 2
    programs = [options.build / name for name in names]
    flags = ["--dtype", options.dtype] if options.dtype else []
    results = Results()
    when = provenance()
    for preset in options.preset or default_presets(programs, flags, options.program_seconds):
        for program in programs:
            start = time.monotonic()
            lines, wrong = run_program(program, preset, flags, options.program_seconds)
            results.lines += [line | {"preset": preset} for line in lines]
            if wrong:
                results.fail(program.name, preset, wrong)
            say(f"{program.name} {preset}: {time.monotonic() - start:.1f} s")
            write(results, out, when)
    add_baselines(
        results, MODES[options.baselines], options.baseline_seconds, lambda: write(results, out, when)
    )
    write(results, out, when)
    print(report(results, when), end="")
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
