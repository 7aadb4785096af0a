"""`python -m llamac.plot OUT` draws OUT/loss.png from OUT/log.jsonl."""

import argparse
import json
import math
from pathlib import Path

from llamac.errors import InputError, run

_BLUE, _ORANGE, _GREY = "#4c78a8", "#f58518", "#6b7280"
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
}


def read_log(path: Path) -> list[dict]:
    """The events of a log.jsonl. A last line cut short by a run that still writes, or died, is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    events = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            event = None
        if isinstance(event, dict):
            events.append(event)
        elif number < len(lines):
            raise InputError(f"{path}: line {number}: expected a JSON object, found {line[:60]!r}")
    return events


def series(events: list[dict], event: str, field: str) -> tuple[list[int], list[float]]:
    """Steps and values of one field, by step."""
    by_step = {e["step"]: e[field] for e in events if e.get("event") == event and field in e}
    steps = sorted(by_step)
    return steps, [math.nan if by_step[step] is None else by_step[step] for step in steps]


def smooth(values: list[float]) -> list[float]:
    """Mean over a window of 3% of the run around each point, cut at the run's ends."""
    half = len(values) * 3 // 200
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [math.fsum(window) / len(window) for window in windows]


def draw(events: list[dict], path: Path) -> None:
    """Training and validation loss over a narrow panel of the learning rate, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(8, 5.4), sharex=True, height_ratios=(4, 1), layout="constrained"
        )
        steps, losses = series(events, "step", "loss")
        top.plot(steps, losses, color=_BLUE, alpha=0.3, linewidth=0.8)
        top.plot(steps, smooth(losses), color=_BLUE, linewidth=1.8, label="training")
        val_steps, val_losses = series(events, "val", "loss")
        if val_steps:
            top.plot(
                val_steps, val_losses, "o-", color=_ORANGE, markersize=4.5, linewidth=1.2, label="validation"
            )
            top.annotate(f"{val_losses[-1]:.3f}", (val_steps[-1], val_losses[-1]), (0, 7), color=_ORANGE,
                         textcoords="offset points", ha="right", weight="bold")  # fmt: skip
        top.set_ylabel("loss (nats a token)")
        top.set_title(_title(events), loc="left", fontsize=11)
        top.legend()
        bottom.plot(*series(events, "step", "lr"), color=_GREY, linewidth=1.4)
        bottom.set_ylabel("learning rate")
        bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        bottom.set_ylim(bottom=0)
        bottom.set_xlabel("step")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _title(events: list[dict]) -> str:
    model = next((e["model"] for e in reversed(events) if e.get("event") == "start" and "model" in e), "")
    speeds = sorted(value for value in series(events, "step", "tokens_per_s")[1] if math.isfinite(value))
    return f"{Path(model).name}   {speeds[len(speeds) // 2]:,.0f} tokens/s" if speeds else Path(model).name


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw OUT/loss.png from OUT/log.jsonl.")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of a run")
    out = parser.parse_args().out
    events = read_log(out / "log.jsonl")
    if not any(e.get("event") == "step" for e in events):
        raise InputError(f"{out / 'log.jsonl'}: expected at least one step, found none")
    draw(events, out / "loss.png")
    print(out / "loss.png")


if __name__ == "__main__":
    run(main)
