#!/usr/bin/env python3
"""Final validation losses of the recipes of fp8 beside products in bf16: the tiny preset on the default text,
some seeds of each, with BUILD/train_llama3. On a CPU with few steps, on a GPU with 2,000:

    python dev/fp8_losses.py --steps 2000 --seeds 3 --out out/fp8_losses

Losses of seeds differ by far more than those of recipes: the standard error of a difference says how many
seeds are enough. Prints a markdown table, and writes it to OUT/table.md after each run. A run whose log is
complete is not done again. Words after -- are flags of every run. Exit code: 1 where a run failed, 2 for bad
arguments.
"""

import argparse
import math
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llamac.base.version import provenance, provenance_text
from llamac.bench import harness
from llamac.bench.report import markdown
from llamac.report.plot import read_log

ROOT = Path(__file__).resolve().parents[1]
BASELINE = "bf16"
RECIPES = {BASELINE: ["--matmul-dtype", "storage"]}
RECIPES |= {name: ["--matmul-dtype", "fp8", "--fp8-recipe", name] for name in ("tensor", "delayed", "row")}
HEAD = (
    *("recipe", "seeds", "final validation loss", "standard deviation", "least", "largest"),
    *("to bf16, %", "standard error of it"),
)


def validation_loss(log: Path, steps: int) -> float | None:
    """Of the last step; None where the run has not come so far."""
    events = read_log(log) if log.exists() else []
    return next((e["loss"] for e in events[::-1] if e["event"] == "val" and e["step"] == steps), None)


def run(o: argparse.Namespace, recipe: str, seed: int) -> float | None:
    """The run's final validation loss; None, and a line on stderr, where it failed."""
    out = o.out / f"{recipe}-{seed}"
    if (loss := validation_loss(out / "log.jsonl", o.steps)) is not None:
        return loss
    ours = {"steps": o.steps, "seed": seed, "dtype": "bf16", "val-every": o.steps, "sample-every": 0}
    ours |= {"val-steps": o.val_steps, "checkpoint-every": -1, "out": out}
    words = [word for name, value in ours.items() for word in (f"--{name}", str(value))]
    command = [o.build / "train_llama3", "--config", "tiny.toml", *words, *RECIPES[recipe], *o.flags]
    if failure := harness.execute(command, folder=ROOT).failure:
        return harness.say(f"{recipe}, seed {seed}: {failure}")
    return validation_loss(out / "log.jsonl", o.steps)


def change(found: list[float], losses: dict[str, list[float]]) -> tuple[str, str]:
    """Of the mean loss to the baseline's, in percent, and the standard error of that."""
    baseline = losses.get(BASELINE, [])
    if not baseline or found is baseline:
        return "", ""
    mean = statistics.mean(baseline)
    relative = f"{100 * (statistics.mean(found) / mean - 1):+.2f}"
    if len(found) < 2 or len(baseline) < 2:
        return relative, ""
    error = math.sqrt(sum(statistics.variance(x) / len(x) for x in (found, baseline))) / mean
    return relative, f"{100 * error:.2f}"


def table(losses: dict[str, list[float]]) -> str:
    rows = []
    for recipe, found in losses.items():
        mean = statistics.mean(found)
        spread = f"{statistics.stdev(found):.4f}" if len(found) > 1 else ""
        numbers = f"{mean:.4f}", spread, f"{min(found):.4f}", f"{max(found):.4f}", *change(found, losses)
        rows.append((recipe, str(len(found)), *numbers))
    return markdown(HEAD, ["---", *["---:"] * (len(HEAD) - 1)], rows)


def arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build/auto")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--val-steps", type=int, default=64)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--out", type=Path, default=ROOT / "out/fp8_losses")
    parser.add_argument("flags", nargs="*", help="of train_llama3, after --")
    o = parser.parse_args()
    if min(o.steps, o.seeds, o.jobs) < 1:
        parser.error(f"--steps {o.steps} --seeds {o.seeds} --jobs {o.jobs}: expected at least 1 of each")
    o.build, o.out = o.build.resolve(), o.out.resolve()
    return o


def main() -> int:
    o = arguments()
    losses: dict[str, list[float]] = {}
    failed = False
    # A table after the first runs is of all recipes.
    runs = [(recipe, seed) for seed in range(1, o.seeds + 1) for recipe in o.recipes]
    with ThreadPoolExecutor(o.jobs) as pool:
        for (recipe, seed), loss in zip(runs, pool.map(lambda of: run(o, *of), runs), strict=True):
            failed |= loss is None
            if loss is None:
                continue
            losses.setdefault(recipe, []).append(loss)
            text = f"{o.steps} optimizer steps, {provenance_text(provenance())}\n\n{table(losses)}\n"
            (o.out / "table.md").write_text(text)
            print(f"{recipe}, seed {seed}: {loss:.4f}", flush=True)
    if losses:
        print("\n" + (o.out / "table.md").read_text(), end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
