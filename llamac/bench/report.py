"""Tables and charts of what was measured. Needs no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamac.plot import COLORS, STYLE

LONGEST = 120.0  # percent: one call that the caches serve would make all other bars short


def markdown(head: Sequence[str], rule: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; rule: "---" for a column on the left, "---:" on the right."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


@dataclass
class Bar:
    """What a baseline reached: a length, and what stands behind it."""

    value: float
    label: str


Groups = Mapping[str, Mapping[str, Bar]]  # by group, by baseline


def bars(panels: Mapping[str, Groups], title: str, path: Path) -> None:
    """A PNG of horizontal bars: a panel for each unit, with an axis of its own, and in it one group below
    another. A baseline that a group lacks has no bar there. Bars end at LONGEST; their labels say how long
    they are.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    baselines = list(
        dict.fromkeys(name for groups in panels.values() for group in groups.values() for name in group)
    )
    # A group's height is its largest's of the panel.
    rows = [len(groups) * (1 + max(map(len, groups.values()))) for groups in panels.values()]
    with plt.rc_context(STYLE | {"font.size": 9}):
        size = (9, 1 + 0.6 * len(panels) + 0.17 * sum(rows))
        figure, all_axes = plt.subplots(
            len(panels), 1, figsize=size, layout="constrained", height_ratios=rows, squeeze=False
        )
        for axes, (unit, groups) in zip(all_axes[:, 0], panels.items()):
            _panel(axes, groups, baselines)
            axes.set_xlabel(unit)
        handles = {h.get_label(): h for axes in all_axes[:, 0] for h in axes.containers}
        known = [name for name in baselines if name in handles]
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        place = {"loc": "outside lower center", "ncols": min(6, max(1, len(known)))}
        figure.legend([handles[name] for name in known], known, **place)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _panel(axes, groups: Groups, baselines: Sequence[str]) -> None:
    """The groups of one unit, each with its bars together."""
    height = 0.8 / max((len(group) for group in groups.values()), default=1)
    longest = max((bar.value for group in groups.values() for bar in group.values()), default=0.0)
    end = min(longest, LONGEST)
    for name in baselines:
        places, lengths, labels = [], [], []
        for row, group in enumerate(groups.values()):
            if name not in group:
                continue
            order = sorted(group, key=baselines.index)
            places.append(row + (order.index(name) - (len(group) - 1) / 2) * height)
            lengths.append(min(group[name].value, end))
            labels.append(("… " if group[name].value > end else "") + group[name].label)
        if not places:
            continue
        color = COLORS[baselines.index(name) % len(COLORS)]
        drawn = axes.barh(places, lengths, height, label=name, color=color)
        axes.bar_label(drawn, labels, padding=2, fontsize=7)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * end or 1)  # room for the labels
    axes.grid(axis="y", visible=False)
