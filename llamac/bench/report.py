"""Tables and charts of what was measured. Needs no torch."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from llamac.plot import STYLE


def markdown(head: Sequence[str], rule: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; rule: "---" for a column on the left, "---:" on the right."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def bars(groups: Mapping[str, Mapping[str, float]], title: str, unit: str, path: Path) -> None:
    """A PNG of horizontal bars, one group below another; a series that a group lacks has no bar there.

    groups: value by series, by group. unit: what the values are.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    series = list(dict.fromkeys(name for group in groups.values() for name in group))
    height = 0.8 / max(1, len(series))
    with plt.rc_context(STYLE | {"font.size": 9}):
        size = (9, 1 + 0.17 * len(groups) * (len(series) + 1))
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        for index, name in enumerate(series):
            places = [row for row, group in enumerate(groups.values()) if name in group]
            values = [group[name] for group in groups.values() if name in group]
            drawn = axes.barh(
                [row + (index + 0.5) * height - 0.4 for row in places], values, height, label=name
            )
            axes.bar_label(drawn, fmt="%.3g", padding=2, fontsize=7)
        axes.set_yticks(range(len(groups)), groups)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(unit)
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(loc="lower right", ncols=min(4, len(series)))
        figure.savefig(path, dpi=150)
        plt.close(figure)
