"""Tables and charts of measurements. Needs no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from llamac.bench.harness import say
from llamac.report.plot import COLORS, WIDTH, drawing

_BLUE, _ORANGE, _GRAY, _SKY, _YELLOW, _WINE, _PINK = COLORS
# What is compared: its words in a picture, and the color that it has in all of them.
PROGRAMS = {
    "llamac": ("llamac", _BLUE),
    "eager": ("PyTorch eager", _GRAY),
    "compile": ("torch.compile", _ORANGE),
    "script": ("plain script, torch.compile", _SKY),
    "ops": ("llamac.ops, torch.compile", _WINE),
    "other": ("llamac, another build", _YELLOW),
    "liger": ("Liger", _SKY),
    "sdpa flash": ("FlashAttention-2", _YELLOW),
    "sdpa cudnn": ("cuDNN", _WINE),
    "storage": ("F.linear", _PINK),
    "torchao": ("torchao's float8", _YELLOW),
    "transformers": ("Hugging Face", _GRAY),
    "compiled": ("Hugging Face, torch.compile", _ORANGE),
    "hf": ("Hugging Face, Liger's loss, torch.compile", _PINK),
    "patched": ("Hugging Face, llamac.patch", _WINE),
}


def markdown(head: Sequence[str], rule: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; rule: "---" for a column on the left, "---:" on the right."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def can_draw() -> bool:
    """Whether matplotlib is installed; says so if it is not."""
    if not find_spec("matplotlib"):
        say("no charts: matplotlib is not installed")
    return bool(find_spec("matplotlib"))


@dataclass
class Bar:
    """What a program reached: a length, and what stands behind it."""

    value: float
    label: str


Groups = Mapping[str, Mapping[str, Bar]]  # by group, by a name of PROGRAMS


def bars(
    panels: Mapping[str, Groups], title: str, path: Path, longest: float = math.inf, mark: float | None = None
) -> None:
    """A PNG of horizontal bars: a panel for each unit, with an axis of its own, and in it one group below
    another. A program that a group lacks has no bar there. Bars end at `longest`, so that one of them does
    not make all others short; their labels say how long they are. mark: where a line says "equal".
    """
    found = {name for groups in panels.values() for group in groups.values() for name in group}
    names = [name for name in PROGRAMS if name in found]
    heights = [_height(groups) for groups in panels.values()]
    below = 0.4 * math.ceil(len(names) / 3) if len(names) > 1 else 0.0
    size = (WIDTH, 0.2 + 0.2 * (1 + title.count("\n")) + 0.55 * len(panels) + sum(heights) + below)
    with drawing(path, size, heights) as (figure, all_axes):
        for axes, (unit, groups) in zip(all_axes, panels.items()):
            _panel(axes, groups, names, longest)
            axes.set_xlabel(unit)
            if mark is not None:
                axes.axvline(mark, color=_GRAY, linewidth=1, zorder=0.9)
        figure.suptitle(title, x=0.01, ha="left", parse_math=False)
        handles = {h.get_label(): h for axes in all_axes for h in axes.containers}
        if len(handles) > 1:
            figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(3, len(handles)))


def _height(groups: Groups) -> float:
    """Inches of a panel: lines of type behind its bars and, on the left, of its groups' names."""
    most = max((len(group) for group in groups.values()), default=1)
    lines = max((1 + name.count("\n") for name in groups), default=1)
    return len(groups) * max(0.21 * most + 0.1, 0.19 * lines + 0.08)


def _panel(axes, groups: Groups, names: Sequence[str], longest: float) -> None:
    """The groups of one unit, each with its bars together."""
    height = 0.8 / max((len(group) for group in groups.values()), default=1)
    end = min(longest, max((bar.value for group in groups.values() for bar in group.values()), default=1.0))
    for name in names:
        places, lengths, labels = [], [], []
        for row, group in enumerate(groups.values()):
            if name not in group:
                continue
            order = [known for known in names if known in group]
            places.append(row + (order.index(name) - (len(group) - 1) / 2) * height)
            lengths.append(min(group[name].value, end))
            labels.append(("… " if group[name].value > end else "") + group[name].label)
        if not places:
            continue
        words, color = PROGRAMS[name]
        drawn = axes.barh(places, lengths, height, label=words, color=color, edgecolor="white", linewidth=0.5)
        # On white, which keeps the line of the mark out of the type.
        on = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.bar_label(drawn, labels, padding=3, fontsize=10, bbox=on)
    axes.set_yticks(range(len(groups)), groups)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * end or 1)  # room for the labels
    axes.grid(axis="y", visible=False)
