"""`llamac plot OUT` draws the losses of a run: OUT/loss.png, or the file of --to."""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np

from llamac.base.arguments import Parser
from llamac.base.errors import InputError
from llamac.base.log import read_log
from llamac.report.reduce import smooth

# The palette of every picture and of the page of llamac.report. Any two differ for the color-blind, too:
# test_plot.py. The first is llamac's.
COLORS = ("#0072b2", "#d55e00", "#6b7280", "#56b4e9", "#ccbb44", "#7a1f2b", "#f4a6c0")
_BLUE, _ORANGE, _GRAY = COLORS[:3]
# Of the curves of a panel: no two look the same.
_LOOKS = [{"linestyle": dash, "color": color} for dash, color in product(("-", "--", ":"), COLORS)]
WIDTH = 7.0  # inches. With this size of type, a picture at half its width can still be read.
STYLE = {
    "font.size": 11,
    "axes.titlesize": 11,
    "figure.titlesize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "savefig.dpi": 150,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GRAY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
}


def series(events: list[dict], event: str, field: str) -> tuple[list[int], list[float]]:
    """Steps and values of one field, by step."""
    by_step = {e["step"]: e[field] for e in events if e.get("event") == event and field in e}
    steps = sorted(by_step)
    return steps, [math.nan if by_step[step] is None else by_step[step] for step in steps]


def draw(events: list[dict], path: Path) -> None:
    """Losses over the learning rate as a PNG; with panels of saturated fp8 values and evaluations, if any."""
    shares = series(events, "saturated", "share")
    tasks = sorted({e.get("task") or "" for e in events if e.get("event") == "evaluation"})
    panels = 2 + bool(shares[0]) + bool(tasks)
    size = WIDTH, 2.9 + 1.1 * panels
    with drawing(path, size, (3.4, 1, 1, 1)[:panels], sharex=True) as (figure, (top, bottom, *more)):
        steps, losses = series(events, "step", "loss")
        top.plot(steps, losses, color=_BLUE, alpha=0.3, linewidth=0.8)
        top.plot(steps, smooth(np.array(losses)), color=_BLUE, linewidth=1.8, label="training")
        val_steps, val_losses = series(events, "val", "loss")
        if val_steps:
            top.plot(
                val_steps, val_losses, "o-", color=_ORANGE, markersize=4.5, linewidth=1.2, label="validation"
            )
            # Right of all curves, where there is nothing to hide.
            top.annotate(f"{val_losses[-1]:.3f}", (val_steps[-1], val_losses[-1]), (7, 0), color=_ORANGE,
                         textcoords="offset points", ha="left", va="center", weight="bold",
                         annotation_clip=False)  # fmt: skip
        top.set_ylabel("loss (nats per token)")
        top.set_title(_title(events), loc="left", parse_math=False)
        top.legend()
        bottom.plot(*series(events, "step", "lr"), color=_GRAY, linewidth=1.4)
        bottom.set_ylabel("learning\nrate")
        bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        bottom.set_ylim(bottom=0)
        if shares[0]:
            more[0].plot(*shares, ".", color=_GRAY, markersize=3)
            more[0].set_ylabel("saturated\nshare")
            more[0].set_yscale("log")
        for task, look in zip(tasks, cycle(_LOOKS)):
            of = [e for e in events if e.get("event") == "evaluation" and (e.get("task") or "") == task]
            accuracies = series(of, "evaluation", "accuracy")
            more[-1].plot(*accuracies, marker="o", markersize=3, label=task, **look)
            more[-1].set_ylabel("accuracy")
            # Above the panel, which is too low to have room beside its curves.
            more[-1].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderpad=0)
        (more or [bottom])[-1].set_xlabel("step")
        bottom.locator_params("x", steps=[1, 2, 5, 10], integer=True)
        figure.align_ylabels()


@contextmanager
def drawing(
    path: Path, size: tuple[float, float], heights: Sequence[float], **how: Any
) -> Iterator[tuple[Any, list]]:
    """A matplotlib figure, of so many inches, and its panels of these relative heights. At the end a PNG in
    64 colors, a third of the size of all of them.
    """
    import matplotlib
    from PIL import Image  # matplotlib needs it, too

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        how |= {"height_ratios": heights, "squeeze": False, "layout": "constrained"}
        figure, panels = plt.subplots(len(heights), figsize=size, **how)
        yield figure, list(panels[:, 0])
        content = io.BytesIO()
        figure.savefig(content, format="png")
        plt.close(figure)
    Image.open(content).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def short(number: float) -> str:
    """1.24B, 2.4M, 8.19K: at most three digits."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _title(events: list[dict]) -> str:
    """Model, parameters and tokens, below them device and median speed: what the log has of them."""
    start: dict = {}
    run: dict = {}
    for event in events:
        start = event if event.get("event") == "start" else start
        run = event if event.get("event") == "run" else run
    steps = series(events, "step", "tokens_per_s")
    speeds = sorted(value for value in steps[1] if math.isfinite(value))
    parts = [Path(start.get("model") or "").name]
    if run.get("parameters") is not None:
        parts.append(f"{short(run['parameters'])} parameters")
    if steps[0] and run.get("tokens_per_step") is not None:
        parts.append(f"{short(steps[0][-1] * run['tokens_per_step'])} tokens")
    below = [run.get("device") or ""]
    if speeds:
        below.append(f"{speeds[len(speeds) // 2]:,.0f} tokens/s")
    lines = (" · ".join(filter(None, line)) for line in (parts, below))
    return "\n".join(filter(None, lines))


def labels(outs: Sequence[str | Path]) -> list[str]:
    """The shortest distinct ends of the paths; where the same one is named twice, with a number."""
    paths = [Path(out).resolve() for out in outs]
    parts = [[part for part in path.parts if part not in ("/", "log.jsonl")] or ["run"] for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part)} ({k})" for k, part in enumerate(parts, 1)]


def _steps_of(out: Path) -> list[dict]:
    events = read_log(out / "log.jsonl")
    if not any(e.get("event") == "step" for e in events):
        raise InputError(f"{out / 'log.jsonl'}: expected at least one step, found none")
    return events


def main() -> None:
    parser = Parser("plot", "Draw a run: training and validation loss, and the learning rate.")
    parser.add_argument("out", type=Path, nargs="+", metavar="OUT", help="directory of a run")
    parser.path("--to", "file to write (OUT/loss.png)", "PNG")
    options = parser.parse_args()
    out, *others = options.out
    if others:
        raise InputError(f"OUT: expected one run, found {1 + len(others)}; `llamac report` compares runs")
    options.to = options.to or out / "loss.png"
    draw(_steps_of(out), options.to)
    print(options.to)
