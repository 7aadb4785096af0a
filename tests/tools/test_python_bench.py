"""llamac.bench on the CPU: its rows for injected results, its amounts against the formulas, its files."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from run import refused

from llamac.base import extension, registry
from llamac.base.version import provenance
from llamac.bench import command as bench
from llamac.bench import measure, timing
from llamac.bench import torch_operations as torch_ops
from llamac.bench.functions import FUNCTIONS, call_of, differences, sizes
from llamac.bench.torch_operations import Case
from llamac.report import plot

SIZE = sizes("tiny", 1, 8)
DEVICE = extension.device()
KEYS = {"device", "torch", "preset", "operation", "direction", "dtype", "baseline"}
MEASURED = {"ms", "rate", "unit", "limit", "percent", "peak_bytes", "extra_bytes", "ratio"}


@pytest.fixture(autouse=True)
def quick(monkeypatch, one_thread):
    """Few rounds and sets; the compiler's graph runs as eager code."""
    right = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **k: right(f, **{**k, "mode": None}, backend="eager"))
    monkeypatch.setattr(timing, "ROUNDS", (3, 3))
    monkeypatch.setattr(timing, "SETS", 2)
    monkeypatch.setattr(extension, "device", lambda: "cpu")
    monkeypatch.setattr(extension, "without_gpu", lambda: "")


# ---- the functions


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_agree_with_pytorch(name, dtype):
    assert differences(FUNCTIONS[name], Case(SIZE, dtype, "cpu")) == []


def test_a_wrong_gradient_is_a_difference():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dout):
            return dout * 1.1

    right = FUNCTIONS["swiglu"]

    def wrong(gate_up):
        return right.ours(Wrong.apply(gate_up))

    injected = replace(right, ours=wrong)
    (message,) = differences(injected, Case(SIZE, "f32", "cpu"))[:1]
    assert message.startswith("gradient 0: ")


def test_the_call_returns_results_and_gradients():
    inputs = FUNCTIONS["rmsnorm"].inputs(Case(SIZE, "f32", "cpu"))
    out, dx, dweight = call_of(torch_ops.rmsnorm, inputs, ("x", "weight"))()
    assert out.shape == dx.shape == inputs["x"].shape and dweight.shape == inputs["weight"].shape
    assert not any(t.requires_grad for t in (out, dx, dweight, *inputs.values()))
    assert not call_of(torch_ops.rmsnorm, inputs, ())().requires_grad


# ---- bytes and FLOPs


def test_what_a_call_must_move_and_compute():
    """With bf16, of one function each: sums of operations, one in the forward's place, FLOPs."""
    case = Case(SIZE, "bf16", "cpu")
    n, c, v, t = (SIZE[d] for d in "NCVT")

    def work(name: str) -> list[tuple[float, float]]:
        return [FUNCTIONS[name].work(case, backward) for backward in (False, True)]

    forward = 2 * (2 * n * c + c) + 4 * n
    assert [moved for moved, _ in work("rmsnorm")] == [forward, forward + 2 * (3 * n * c + 2 * c) + 4 * n]
    assert [moved for moved, _ in work("cross_entropy")] == [2 * n * v + 8 * n, 4 * n * v + 8 * n]
    (_, forward), (_, both) = work("attention")
    assert forward == pytest.approx(2 * SIZE["B"] * SIZE["NH"] * t * (t + 1) * SIZE["HD"], rel=1 / t)
    assert both == 3.5 * forward and FUNCTIONS["attention"].computes


def test_bad_calls_of_least_work():
    with pytest.raises(ValueError, match="no operation is called new"):
        registry.least_work("new", SIZE, "bf16")
    with pytest.raises(ValueError, match="dtype f8: expected"):
        registry.least_work("swiglu_forward", SIZE, "f8")
    with pytest.raises(ValueError, match="swiglu_forward: expected the size F, found none"):
        registry.least_work("swiglu_forward", {"N": 1}, "bf16")


# ---- measuring


def test_rows_follow_from_the_times(monkeypatch):
    injected = {"llamac": 2.0, "eager": 6.0, "compile": 3.0, "memcpy": 1.5, "copy": 1.0}
    monkeypatch.setattr(
        measure, "medians_ms", lambda calls, device, seconds: {name: injected[name] for name in calls}
    )
    function, case = FUNCTIONS["swiglu"], Case(SIZE, "bf16", "cpu")
    rows = {r["baseline"]: r for r in measure.measure("swiglu", function, case, True, "default", 0)}
    moved = function.work(case, True)[0]
    limit = 8 * (int(moved) // 8) / 1e-3
    assert rows.keys() == {"llamac", "eager", "compile"}
    for baseline, row in rows.items():
        rate = moved / injected[baseline] * 1e3
        assert row["rate"] == pytest.approx(rate) and row["limit"] == pytest.approx(limit)
        assert row["percent"] == pytest.approx(100 * rate / limit) and row["unit"] == "GB/s"
        assert row["ratio"] == injected[baseline] / 2.0
        assert row["peak_bytes"] is None and row["extra_bytes"] is None  # nobody counts them here


def test_products_are_the_limit_of_what_computes(monkeypatch):
    monkeypatch.setattr(measure, "medians_ms", lambda calls, device, seconds: dict.fromkeys(calls, 4.0))
    function, case = FUNCTIONS["attention"], Case(SIZE, "bf16", "cpu")
    rows = {r["baseline"]: r for r in measure.measure("attention", function, case, False, "default", 0)}
    assert {"llamac", "eager", "compile", "sdpa flash", "sdpa cudnn"} == rows.keys()
    assert rows["llamac"]["unit"] == "TFLOP/s" and rows["llamac"]["limit"] == 2 * 256**3 / 4e-3
    assert "ms" in rows["sdpa flash"] and "RuntimeError" in rows["sdpa cudnn"]["error"]


def test_a_failing_baseline_leaves_the_others(monkeypatch):
    right = FUNCTIONS["swiglu"]

    def broken(gate_up):
        raise RuntimeError("out of memory\nby far")

    for field, failing in ((broken, {"llamac"}), (right.ours, set())):
        injected = replace(right, ours=field)
        rows = measure.measure("swiglu", injected, Case(SIZE, "f32", "cpu"), True, "default", 0)
        assert {r["baseline"] for r in rows if "error" in r} == failing
        assert all(r["error"] == "RuntimeError: out of memory" for r in rows if "error" in r)
        assert all((r["ratio"] is None) == bool(failing) for r in rows if "ms" in r)


def test_peers_that_do_not_fit_together_are_timed_alone(monkeypatch):
    """Two at once are too many, and eager is too large by itself."""

    def medians(calls, device, seconds):
        if len(calls) > 2 or "eager" in calls:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return dict.fromkeys(calls, 2.0)

    monkeypatch.setattr(measure, "medians_ms", medians)
    function, case = FUNCTIONS["swiglu"], Case(SIZE, "bf16", "cpu")
    rows = {r["baseline"]: r for r in measure.measure("swiglu", function, case, False, "default", 0)}
    assert rows["llamac"]["ms"] == rows["compile"]["ms"] == 2.0 and "ms" not in rows["eager"]
    assert "out of memory" in rows["eager"]["error"]


def test_memory_beyond_inputs_and_results(monkeypatch):
    """A counter that says 100 bytes before the call, 300 at most in it, 190 after it."""
    allocated = []
    cuda = SimpleNamespace(
        synchronize=lambda: None,
        reset_peak_memory_stats=lambda: None,
        memory_allocated=lambda: allocated.pop(0),
        max_memory_allocated=lambda: 300,
    )
    monkeypatch.setattr(measure.torch, "cuda", cuda)
    result = torch.zeros(10)
    for results, after, extra in (
        ((result, result[:5], torch.zeros(5)), 190, 140),
        (result, 190, 160),
        (result, 100, 200),  # the input's memory
    ):
        allocated[:] = [100, after]
        assert measure.memory_of(lambda results=results: results, "cuda") == (200, extra)


# ---- the command


def run(tmp_path, *arguments: str) -> tuple[int, list[dict]]:
    code = bench.main(["--out", str(tmp_path), "--seconds", "0", *arguments])
    return code, json.loads((tmp_path / "bench.json").read_text())


def test_the_chart(tmp_path, figures):
    """Copies and products have an axis each; a call that the caches serve hides no other; llamac is in the
    blue of loss.png, and behind the others stands how many times as fast it is.
    """
    known = {"preset": "8b", "device": "Abacus", "torch": "2", "dtype": "bf16"} | provenance()
    kinds = {"rmsnorm": ("GB/s", 90), "precompute_cis": ("GB/s", 900), "attention": ("TFLOP/s", 70)}
    rows = [
        known | {"operation": name, "direction": "forward", "baseline": baseline, "unit": unit} | value
        for name, (unit, percent) in kinds.items()
        for baseline, value in (
            ("llamac", {"percent": percent, "ratio": None}),
            ("eager", {"percent": percent / 2, "ratio": 2.0}),
        )
    ]
    bench.chart(rows, tmp_path / "chart.png")
    copies, products = figures[0].axes
    blue = [int(plot.COLORS[0][k : k + 2], 16) / 255 for k in (1, 3, 5)] + [1]
    assert "copy" in copies.get_xlabel() and "product" in products.get_xlabel()
    assert copies.get_xlim()[1] < 200 and products.get_xlim()[1] < 100
    assert [bar.get_width() for bar in copies.patches] == [90, 120, 45, 120]
    assert [text.get_text() for text in copies.texts] == ["90%", "… 900%", "45%   2.00x", "… 450%   2.00x"]
    assert products.patches[0].get_facecolor() == pytest.approx(blue)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.more
def test_the_whole_command(tmp_path, capsys):
    code, rows = run(tmp_path)
    text = capsys.readouterr().out
    assert code == 0 and (tmp_path / "bench.md").read_text() == text
    assert text.startswith(f"## tiny: CPU, 1 threads, PyTorch {torch.__version__}, bf16, llamac ")
    assert (tmp_path / "bench-tiny.png").read_bytes().startswith(b"\x89PNG")
    found = {(r["operation"], r["direction"], r["baseline"]) for r in rows}
    for name, function in FUNCTIONS.items():
        for direction in ("forward", "forward+backward") if function.leaves else ("forward",):
            assert {(name, direction, baseline) for baseline in ("llamac", "eager", "compile")} <= found
    for row in rows:
        assert row.keys() >= KEYS
        if "error" not in row:
            assert row.keys() >= MEASURED and row["ms"] > 0 and row["percent"] > 0 and row["rate"] > 0
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == len(rows) + 2 and all(len(line.split("|")) == 11 for line in lines)


def test_a_wrong_function_is_the_exit_code(tmp_path, capsys, monkeypatch):
    right = FUNCTIONS["swiglu"]

    def wrong(gate_up):
        return right.ours(gate_up) * 1.05

    injected = replace(right, ours=wrong)
    monkeypatch.setitem(FUNCTIONS, "swiglu", injected)
    code, rows = run(tmp_path, "--operation", "swiglu")
    streams = capsys.readouterr()
    assert code == 1 and streams.out.count("CHECK FAILED") == 2 and "output 0: " in streams.err
    assert [bool(r.get("wrong")) for r in rows if r["baseline"] == "llamac"] == [True, True]


def test_f32_and_one_operation(tmp_path):
    code, rows = run(tmp_path, "--operation", "rope", "--dtype", "f32", "--preset", "tiny")
    assert code == 0 and {(r["operation"], r["dtype"]) for r in rows} == {("rope", "f32")}


def test_shapes(tmp_path):
    shapes = ("--shape", "1x8", "2x16")
    code, rows = run(tmp_path, "--operation", "attention", "--preset", "tiny", *shapes)
    found = {(r["preset"], r["shape"]["B"], r["shape"]["T"]) for r in rows}
    assert code == 0 and found == {("tiny-1x8", 1, 8), ("tiny-2x16", 2, 16)}
    assert (tmp_path / "bench-tiny-1x8.png").exists()


@pytest.mark.parametrize("text", ("8", "8x", "x8", "0x8", "8x-1"))
def test_bad_shapes(tmp_path, capsys, text):
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, "--shape", text)
    assert (
        stopped.value.code == 2 and f"{text}: expected sequences x tokens in each" in capsys.readouterr().err
    )


def test_bad_arguments(tmp_path, monkeypatch, capsys):
    assert "--operation new: expected one of rmsnorm" in refused(run, tmp_path, "--operation", "new")
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, "--preset", "9b")
    assert stopped.value.code == 2
    monkeypatch.setitem(sys.modules, "llamac.bench.measure", None)
    monkeypatch.delattr("llamac.bench.measure")
    assert "llamac doctor says more" in refused(run, tmp_path)


def test_a_gpu_without_kernels_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(extension, "without_gpu", lambda: "no CUDA compiler was found: do this")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "the GPU cannot be measured: no CUDA compiler was found: do this" in refused(run, tmp_path)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_the_whole_command_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(extension, "device", lambda: DEVICE)
    code, rows = run(tmp_path, "--preset", "tiny")
    assert code == 0
    for row in rows:
        if "error" not in row:
            assert row["ms"] > 0 and row["percent"] > 0 and 0 <= row["extra_bytes"] <= row["peak_bytes"]


def test_the_device_is_timed_without_the_host(monkeypatch):
    """Events and the sleep are a device's that takes 2 ms a call and runs behind the host."""
    clock = {"ms": 0.0}

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = clock["ms"]

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.ms - self.ms

    def sleep(cycles):
        clock["ms"] += cycles / 1e6

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timing.sleep_rate.cache_clear()
    made = []
    calls = [lambda k=k: made.append(k) or sleep(2_000_000) for k in range(3)]
    other = [lambda: made.append(9) or sleep(5_000_000)]
    assert timing.medians_ms({"a": calls, "b": other}, "cuda", 0.01) == pytest.approx({"a": 2.0, "b": 5.0})
    assert timing.sleep_rate() == pytest.approx(1e9)
    assert made[:4] == [0, 1, 2, 0] and made[10:20] == [9] * 10
    rounds = [made[k : k + 16].count(9) for k in range(20, len(made) - 15, 16)]  # in a new order each
    assert set(rounds) == {0, 16}
    timing.sleep_rate.cache_clear()


def test_sets_of_inputs_fill_the_rotation_and_no_more(monkeypatch):
    monkeypatch.setattr(timing, "SETS", 256)

    def inputs():
        return FUNCTIONS["rmsnorm"].inputs(Case(SIZE, "bf16", "cpu"))

    sets = timing.make_sets(inputs, timing.ROTATED / 8)
    assert len(sets) == 8 and len({s["x"].data_ptr() for s in sets}) == 8
    assert len(timing.make_sets(inputs, 1)) == timing.SETS
    monkeypatch.setattr(timing, "LARGEST", 1)
    assert len(timing.make_sets(inputs, 1)) == 1
