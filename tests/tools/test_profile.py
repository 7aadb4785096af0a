"""--profile as a user meets it: the program's files, and the report that llamac.profile makes of them; the
ranges that a profiler sees.
"""

import json
import os
import subprocess
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from run import ROOT, flags, one_line, refused, run_llamac

from llamac.base.registry import kernels
from llamac.profile import peak, profile
from llamac.profile.profile import Profile, Row

STEPS = 3


# Ranges

# Stands in for roctx: a line per range that begins, an empty one where it ends.
RECORDER = """
#include <stdio.h>
#include <stdlib.h>
static int note(const char* text) {
    FILE* file = fopen(getenv("RANGES"), "a");
    fprintf(file, "%s\\n", text);
    return fclose(file);
}
int roctxRangePushA(const char* name) { return note(name); }
int roctxRangePop(void) { return note(""); }
"""


def nested(text: str) -> set[str]:
    """Every range with those around it: "step 1/backward/rope_backward"."""
    open_ranges, found = [], set()
    for line in text.splitlines():
        if line:
            open_ranges.append(line)
            found.add("/".join(open_ranges))
        else:
            open_ranges.pop()
    assert not open_ranges
    return found


@pytest.mark.program
def test_phases_and_calls_are_ranges(train, data, tmp_path):
    source, library, written = (tmp_path / name for name in ("recorder.c", "librecorder.so", "ranges"))
    source.write_text(RECORDER)
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    run = {"steps": 2, "total_batch_size": 128, "val_every": 1, "sample_every": 2, "sample_tokens": 2}
    environment = os.environ | {"LLAMAC_RANGES": str(library), "RANGES": str(written)}
    train(*flags(data, tmp_path / "out", graphs="off", **run), env=environment)
    found = nested(written.read_text())
    assert {
        "validation/forward/rmsnorm_forward",
        "step 1/micro-batch 0/copy",
        "step 2/micro-batch 1/forward/attention_forward",
        "step 2/micro-batch 1/head/cross_entropy",
        "step 2/micro-batch 1/backward/embedding_backward",
        "step 2/optimizer/adamw",
        "sample/forward/matmul_forward",
        "checkpoint",
    } <= found
    assert not any(name.startswith(("step 3", "step 1/validation")) for name in found)


@pytest.mark.program
@pytest.mark.parametrize("library", ["/nowhere/libroctx.so", "libm.so.6"])
def test_a_library_without_ranges_is_refused(train, data, tmp_path, library):
    environment = os.environ | {"LLAMAC_RANGES": library}
    result = train(*flags(data, tmp_path / "out"), env=environment, code=2)
    expected = "LLAMAC_RANGES: expected a library with roctxRangePushA and roctxRangePop, found"
    assert f"{expected} {library}" in one_line(result)


# The program's files


@pytest.fixture(scope="module")
def out(train, data, tmp_path_factory) -> Path:
    """A run of six steps, validation between them, that profiles three: the second to the fourth."""
    out = tmp_path_factory.mktemp("profile") / "out"
    more = {"batch_size": 2, "total_batch_size": 64, "val_every": 1, "checkpoint_every": 0, "profile": STEPS}
    said = train(*flags(data, out, steps=6, **more)).stdout
    assert "matmul_backward_weight" in said and "\nidle " in said
    return out


def layers() -> int:
    return json.loads((ROOT / "tests/models/tied-gqa.json").read_text())["num_hidden_layers"]


def trace(out: Path) -> tuple[list[dict], list[dict], dict]:
    """The events of the steps, all others, and the tracks' names."""
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert all(e["ph"] in "XM" for e in events)
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    complete = [e for e in events if e["ph"] == "X"]
    steps = [e for e in complete if e["cat"] == "step"]
    return steps, [e for e in complete if e["cat"] != "step"], tracks


@pytest.mark.program
def test_trace(out):
    steps, events, tracks = trace(out)
    assert [s["name"] for s in steps] == ["step 2", "step 3", "step 4"]
    assert all(tracks[s["pid"], s["tid"]] == "steps" for s in steps)
    main = next(track for track, name in tracks.items() if name == "operations")
    beside = [e for e in events if (e["pid"], e["tid"]) != main]
    assert all(e["name"] == "copy" for e in beside), "a GPU copies on a stream of its own"
    inside = 0.0
    for step in steps:
        end = step["ts"] + step["dur"]
        own = [e for e in events if step["ts"] - 1 <= e["ts"] and e["ts"] + e["dur"] <= end + 1]
        in_order = [e for e in own if (e["pid"], e["tid"]) == main]
        for before, after in pairwise(in_order):
            assert before["ts"] + before["dur"] <= after["ts"] + 1, "events of one stream overlap"
        calls = Counter(e["name"] for e in own)
        assert calls["attention_forward"] == calls["attention_backward"] == 2 * layers()  # two micro-batches
        assert calls["copy"] > 0, "tokens in, losses out"
        assert 0 < sum(e["dur"] for e in in_order) <= step["dur"] + 1
        inside += len(in_order)
    assert inside == len(events) - len(beside), "validation between the steps is no part of them"
    product = next(e for e in events if e["name"] == "matmul_forward")
    assert set(product["args"]) == {"variant", "shape", "TFLOP/s", "GB/s"}
    assert "N=32" in product["args"]["shape"]


@pytest.mark.program
def test_profile_json_adds_up(out, gpu):
    values = json.loads((out / "profile.json").read_text())
    steps, events, tracks = trace(out)
    assert values["steps"] == STEPS
    assert values["seconds"] == pytest.approx(1e-6 * sum(s["dur"] for s in steps), rel=1e-6)
    busy = sum(row["seconds"] for row in values["operations"])
    beside = sum(1e-6 * e["dur"] for e in events if tracks[e["pid"], e["tid"]] != "operations")
    known = busy + values["idle_seconds"]  # what runs beside something else is in it twice
    assert 0.999 * (known - beside) <= values["seconds"] <= 1.001 * known
    for row in values["operations"]:
        own = [e for e in events if e["name"] == row["operation"]]
        assert row["calls"] == len(own) == sum(s["calls"] for s in row["shapes"])
        assert row["seconds"] == pytest.approx(1e-6 * sum(e["dur"] for e in own), rel=1e-3)
        for key in ("seconds", "flops", "bytes"):
            assert row[key] == pytest.approx(sum(s[key] for s in row["shapes"]))
        others = next((o["variants"] for o in kernels() if o["name"] == row["operation"]), [])
        others = {v["name"] for v in others if v["where"] == ("device" if gpu else "host")}
        assert set(row.get("others", [])) <= others - {row["variant"]}
        if row["operation"] == "rmsnorm_forward":  # each variant of the host takes every call
            assert gpu or set(row["others"]) == others - {row["variant"]} != set()
    seconds = [row["seconds"] for row in values["operations"]]
    assert seconds == sorted(seconds, reverse=True)
    assert values["device"]["copy_gbps"] > 0 and values["device"]["peak_tflops"] > 0


@pytest.mark.program
def test_the_command(out):
    done = run_llamac("profile", out)
    assert not done.stderr
    for word in ("GEMM", "attention", "norm", "RoPE", "SwiGLU", "loss", "optimizer", "embedding", "idle"):
        assert any(line.startswith(word) for line in done.stdout.splitlines()), word
    assert "What to do next\n1. " in done.stdout
    done = run_llamac("profile", out / "none", code=2)
    assert done.stdout == "" and len(done.stderr.strip().splitlines()) == 1
    assert "profile.json: cannot open: No such file" in done.stderr


# The report, of a made-up device: 100 TFLOP/s, 1000 GB/s; a step of 100 ms


def row(operation: str, ms: float, tflop: float = 0.0, gb: float = 0.0, shapes=()) -> Row:
    """Of two steps: ms, 10^12 FLOP and 10^9 bytes a step."""
    return Row(operation, "2", 4, 2e-3 * ms, 2e12 * tflop, 2e9 * gb, shapes=shapes)


def made_up(*rows: Row, idle_ms: float = 0.0, **changes) -> Profile:
    seconds = sum(r.seconds for r in rows) + 2e-3 * idle_ms
    return replace(Profile("Abacus", True, 100.0, 1000.0, 2, seconds, 2e-3 * idle_ms, rows), **changes)


def cells(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def test_shares_and_limits():
    p = made_up(
        row("matmul_forward", 40, tflop=3.2, gb=1),
        row("matmul_backward_weight", 20, tflop=1.8),
        row("rmsnorm_forward", 10, gb=9),
        row("new_thing", 10, gb=5),
        row("copy", 5, gb=1),
        idle_ms=15,
    )
    seconds = profile.shares(p)
    assert list(seconds) == ["GEMM", "norm", "other", "copy", "idle"]
    assert [round(1e3 * s / 2) for s in seconds.values()] == [60, 10, 10, 5, 15]
    assert profile.limit(p, p.rows[0]) == (pytest.approx(2 * 0.032), "compute")
    assert profile.limit(p, p.rows[2]) == (pytest.approx(2 * 0.009), "memory")
    assert profile.limit(p, p.rows[4]) is None
    text = profile.report(p)
    assert cells(text, "GEMM") == ["GEMM", "60.000", "60.0%", "50.000", "83%"]
    assert cells(text, "norm") == ["norm", "10.000", "10.0%", "9.000", "90%"]
    assert cells(text, "copy") == ["copy", "5.000", "5.0%", "-", "-"]
    assert cells(text, "idle") == ["idle", "15.000", "15.0%", "-", "-"]
    line = cells(text, "matmul_forward")
    assert line == ["matmul_forward", "2", "2", "40.000", "40.0%", "80", "25", "32.000", "compute", "80%"]
    assert text.splitlines()[0] == "Abacus, 100 TFLOP/s, copies 1,000 GB/s; 2 steps of 100.000 ms"


def test_every_operation_has_a_category():
    """Those that training runs; what is new is "other" until somebody says where it belongs."""
    found = {
        path.stem: profile.category(path.stem)
        for path in (ROOT / "dev/hip").glob("*.cpp")
        if path.stem != "benchmark"
    }
    assert len(found) > 15 and profile.OTHER not in found.values(), found
    assert profile.category("something") == profile.OTHER


def test_advice_names_the_largest_gain_first():
    shapes = (row("matmul_forward", 5, tflop=0.4), row("matmul_forward", 55, tflop=0.6))
    shapes = tuple(replace(s, shape=name) for s, name in zip(shapes, ("N=1", "N=2")))
    p = made_up(
        row("matmul_forward", 60, tflop=1, shapes=shapes),
        row("adamw", 20, gb=9),
        row("swiglu_forward", 10, gb=9.5),
        idle_ms=10,
    )
    lines = profile.advice(p)
    assert [line.split()[0] for line in lines] == ["matmul_forward", "adamw", "idle:"]
    assert "17% of its compute limit" in lines[0] and "47.500 ms (47.5% of the step)" in lines[0]
    assert "N=2" in lines[0] and "matrix cores" in lines[0]
    assert "10.000 ms (10.0% of the step)" in lines[1] and "fuse" in lines[1]
    assert "10.0% of the step nothing runs" in lines[2] and "graph" in lines[2] and "--batch-size" in lines[2]


@pytest.mark.parametrize(
    "others, said",
    [
        (("tiled", "naive", "flash"), "Next: try --kernel adamw=tiled or --kernel adamw=flash, or fuse"),
        (
            ("reference",),
            "Next: no other fast variant takes these calls (./train_llama3 --list-kernels adamw",
        ),
        (
            None,
            "try its other variants (./train_llama3 --list-kernels adamw names them; --kernel adamw=NAME)",
        ),
    ],
)
def test_advice_names_the_variants(others, said):
    (line,) = profile.advice(made_up(replace(row("adamw", 20, gb=9), others=others)))
    assert said in line


@pytest.mark.parametrize("idle_ms, said", [(4.9, False), (5.4, True)])
def test_idle_is_said_from_5_percent_on(idle_ms, said):
    p = made_up(row("swiglu_forward", 95, gb=90), idle_ms=idle_ms)
    assert any(line.startswith("idle") for line in profile.advice(p)) == said
    if not said:
        assert "as near to its limit as its kind gets" in profile.advice(p)[0]


def test_exposed_communication_is_said():
    p = made_up(row("reduce_scatter", 20, gb=2), row("matmul_forward", 80, tflop=8))
    assert not any("communication" in line for line in profile.advice(p))
    lines = profile.advice(replace(p, exposed_seconds=0.01))
    assert [line for line in lines if line.startswith("communication: 5.0% of the step")]


def test_advice_about_copies_and_unknown_limits():
    lines = profile.advice(made_up(row("swiglu_forward", 90, gb=80), row("copy", 10, gb=1)))
    assert lines[0].startswith("copy: 10.0% of the step") and "Pin" in lines[0]
    p = made_up(row("matmul_forward", 90, tflop=1), peak_tflops=None, copy_gbps=None)
    assert [line for line in profile.advice(p) if "not known" in line] != []
    text = profile.report(p)
    assert "peak not known, copy rate not known" in text and cells(text, "GEMM")[-2:] == ["-", "-"]
    assert "graph" not in profile.advice(made_up(row("x", 1), idle_ms=1, gpu=False))[0]


def test_advice_about_unknown_work():
    assert not any(
        "other" in line for line in profile.advice(made_up(row("new", 4), row("adamw", 96, gb=90)))
    )
    (line,) = profile.advice(made_up(row("new", 10), row("adamw", 90, gb=85)))
    assert line.startswith("other: 10.0%") and "trace.json" in line


GOOD = {
    "device": {"name": "Abacus", "gpu": True, "peak_tflops": None, "copy_gbps": 3},
    "steps": 2,
    "seconds": 1.5,
    "idle_seconds": 0,
    "operations": [{"operation": "x", "variant": "", "calls": 1, "seconds": 1, "flops": 0, "bytes": 0}],
}


def test_read(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(GOOD))
    p = profile.read(path)
    assert (p.device, p.peak_tflops, p.copy_gbps, p.rows) == ("Abacus", None, 3, (Row("x", "", 1, 1, 0, 0),))


@pytest.mark.parametrize(
    "change, message",
    [
        ("[", "expected JSON"),
        ("3", "expected an object, found 3"),
        ({"device": 3}, "device: expected an object, found 3"),
        ({"device": GOOD["device"] | {"gpu": 1}}, "device.gpu: expected true or false, found 1"),
        ({"device": GOOD["device"] | {"peak_tflops": 0}}, "device.peak_tflops: expected a number above 0"),
        ({"steps": 0}, "steps: expected a number above 0, found 0"),
        ({"seconds": "1"}, 'seconds: expected a number above 0, found "1"'),
        ({"idle_seconds": -1}, "idle_seconds: expected a number of at least 0, found -1"),
        ({"operations": {}}, "operations: expected a list, found {}"),
        ({"operations": [3]}, "operations[0]: expected an object, found 3"),
        ({"operations": [{"operation": "x"}]}, "operations[0].variant: expected a string, found nothing"),
        (
            {"operations": [GOOD["operations"][0] | {"shapes": [{"shape": "N=1", "calls": None}]}]},
            "operations[0].shapes[0].calls: expected a number of at least 0, found null",
        ),
    ],
)
def test_bad_profiles(tmp_path, change, message):
    path = tmp_path / "profile.json"
    path.write_text(change if isinstance(change, str) else json.dumps(GOOD | change))
    assert refused(profile.read, path).startswith(f"{path}: {message}")


# Rates


def test_published_rates(monkeypatch):
    """tests/train/check_profile.cpp asks the C program for the same."""

    def tflops(name: str, units: int, dtype: str) -> float | None:
        device = SimpleNamespace(name=name, multi_processor_count=units)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
        return peak.published_rates("cuda").get(dtype)

    assert tflops("NVIDIA H200", 132, "bf16") == 989.4
    assert tflops("NVIDIA H200", 132, "f32") == 66.9
    assert tflops("AMD Instinct MI300X VF", 38, "bf16") == pytest.approx(1307.4 / 8)
    assert tflops("AMD Radeon RX 7900 XTX", 96, "bf16") == 122.8
    assert tflops("NVIDIA GeForce RTX 4090 D", 114, "bf16") is None


def test_every_device_has_a_source():
    rows = list(peak.published().values())
    assert len(rows) == sum(len(row["names"]) for row in {id(row): row for row in rows}.values()) > 15
    for row in rows:
        assert (
            set(row) - {"gbps", "gib"} == {"names", "multiprocessors", "tflops", "source"} and row["source"]
        )
        assert row["multiprocessors"] > 0 and 0 < row["tflops"]["f32"] < row["tflops"]["bf16"]
        assert set(row["tflops"]) - {"fp8"} == {"f32", "bf16"} and row.get("gbps", 900) >= 900


def test_measured_rates():
    assert peak.copy_gbps("cpu") > 0.1
