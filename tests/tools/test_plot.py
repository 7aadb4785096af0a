"""The palette of all pictures, and dev/chart.py: pictures from pages and from result files."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from run import ROOT, refused, run_llamac

sys.path.insert(0, str(ROOT / "dev"))
import chart

from llamac.base.version import provenance
from llamac.bench.report import PROGRAMS
from llamac.bench.training import Run
from llamac.report import plot

# Linear RGB as the color-blind see it: Machado, Oliveira and Fernandes (2009), severity 1.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                   [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(color: str, sight) -> np.ndarray:
    """CIELAB of "#0072b2"."""
    rgb = np.array([int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    linear = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    xyz = XYZ @ np.clip(np.array(sight) @ linear, 0, 1) / XYZ.sum(1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def nearest(colors, sight) -> float:
    """The least distance of two colors; 2.3 can just be told apart."""
    pairs = itertools.combinations([lab(color, sight) for color in colors], 2)
    return min(float(np.linalg.norm(a - b)) for a, b in pairs)


@pytest.mark.parametrize("sight", SIGHT.values(), ids=SIGHT)
def test_the_color_blind_tell_the_palette_apart(sight):
    assert nearest(plot.COLORS, sight) > 18
    assert nearest(("#b279a2", "#9d755d"), SIGHT["tritanopia"]) < 10, "an injected fault: too near"


def test_the_page_of_reports_has_the_palette():
    style = (ROOT / "llamac/report/page/page.css").read_text()
    assert f"--accent: {plot.COLORS[0]};" in style and f"background: {plot.COLORS[1]};" in style
    assert {color for _, color in PROGRAMS.values()} <= set(plot.COLORS)


# Pages and result files

PAGE = """\
# Some GPU

`command`, 2026-11-20, commit abcdef0:

| workload | llamac tokens/s | file tokens/s | ratio | script tokens/s | ratio | torchao tokens/s | ratio | commit |
|---|---:|---:|---:|---:|---:|---:|---:|---|
| tiny, B=2 T=64 | 11,000 | 10,000 | 1.1 | 8,000 | 1.375 | | | abcdef0 |
| small, B=1 T=8 | 500 | 400 | 1.25 | | | 250 | 2.0 | 1234567 |
"""  # noqa: E501


@pytest.fixture
def drawn(tmp_path, monkeypatch, figures):
    """drawn(content, name): the figure that dev/chart.py draws of a file."""

    def make(content: str, name: str = "page.md"):
        (tmp_path / name).write_text(content)
        arguments = ["chart.py", str(tmp_path / name), "--to", str(tmp_path / "chart.png")]
        monkeypatch.setattr("sys.argv", arguments)
        chart.main()
        picture = (tmp_path / "chart.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) < 100_000
        return figures[-1]

    return make


def title(figure) -> str:
    return figure.get_suptitle()


def labels(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def runs(**speeds: float) -> str:
    found = []
    for program, speed in speeds.items():
        for number in (1, 2):
            one = Run("tiny", program, number, tokens_per_s=speed * number, device="Some GPU")
            found.append(vars(one))
    found.append(vars(Run("tiny", "eager", 1, failure="out of memory")))
    return json.dumps(provenance() | {"runs": found})


def test_training_of_a_page(drawn):
    figure = drawn(PAGE)
    (axes,) = figure.axes
    assert "Some GPU, 2026-11-20, commit abcdef0, 1234567" in title(figure)
    assert [t.get_text() for t in axes.get_yticklabels()] == ["tiny\nB=2 T=64", "small\nB=1 T=8"]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([100, 100, 1000 / 11, 80, 800 / 11, 50])
    assert labels(axes) == ["11,000", "500", "10,000   1.10x", "400   1.25x", "8,000   1.38x", "250   2.00x"]
    legend = [t.get_text() for t in figure.legends[0].get_texts()]
    assert legend == ["llamac", "torch.compile", "plain script, torch.compile", "torchao's float8"]
    assert len({bar.get_facecolor() for bar in axes.patches}) == 4


def test_training_of_results(drawn):
    """A failed run has no bar."""
    figure = drawn(runs(llamac=100, compile=50, script=80), "bench_train.json")
    assert labels(figure.axes[0]) == ["150", "75   2.00x", "120   1.25x"]
    assert f"Some GPU, llamac {provenance()['version']}, commit {provenance()['commit']}" in title(figure)
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["tiny\nB=2 T=64"]


REFUSED = {
    "no table": ("# GPU\n", "a.md", "expected a table with the columns workload, "),
    "no commit": (
        PAGE.replace("commit abc", ""),
        "a.md",
        "expected `DATE, commit HASH` above it",
    ),
    "cells": (PAGE.replace("| 1.25 |", "| 1.25 | 1 |"), "a.md", "expected 9 cells, found 10"),
    "number": (PAGE.replace("11,000", "fast"), "a.md", "expected a number, found 'fast'"),
    "nothing": (PAGE[: PAGE.index("| tiny")], "a.md", "expected measurements to draw, found none"),
    "no JSON": ("{", "a.json", "expected JSON"),
    "keys": ('{"runs": []}', "a.json", "not the JSON of a benchmark: KeyError('version')"),
    "fields": ('{"runs": [{"a": 1}]}', "a.json", "not the JSON of a benchmark: TypeError"),
    "list": ("[1]", "a.json", "not the JSON of a benchmark"),
    "program": (runs(llamac=1, new=2), "a.json", "expected programs of llamac, eager"),
}


@pytest.mark.parametrize("content, name, message", REFUSED.values(), ids=REFUSED)
def test_refused(drawn, tmp_path, content, name, message):
    said = refused(drawn, content, name)
    assert message in said and str(tmp_path / name) in said
    assert not (tmp_path / "chart.png").exists()


def test_the_command_says_one_line(tmp_path):
    command = [sys.executable, ROOT / "dev/chart.py", tmp_path / "none.md", "--to",
               tmp_path / "a"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"chart.py: {tmp_path / 'none.md'}: cannot open: No such file or directory\n"


def test_the_picture_of_the_documentation(drawn):
    """The page still has the table, and the picture with its command."""
    page = ROOT / "docs/benchmarks/nvidia-h200.md"
    text = page.read_text()
    drawn(text)
    command = "dev/chart.py docs/benchmarks/nvidia-h200.md --to docs/images/training.png"
    assert "](../images/training.png)" in text and command in text


def looks(lines) -> set[tuple]:
    return {(line.get_color(), line.get_linestyle()) for line in lines}


def test_several_runs_are_a_report():
    said = run_llamac("plot", "a", "b", code=2).stderr
    assert said == "llamac plot: OUT: expected one run, found 2; `llamac report` compares runs\n"


def test_ten_tasks_look_different(tmp_path, figures):
    events = [{"event": "evaluation", "step": 1, "task": f"task{k}", "accuracy": 0.1 * k} for k in range(10)]
    plot.draw([{"event": "step", "step": 1, "loss": 2.0, "lr": 1e-3}, *events], tmp_path / "loss.png")
    assert len(looks(figures[0].axes[-1].lines)) == 10
