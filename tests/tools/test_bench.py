"""dev/bench.py on programs that are scripts; dev/baselines.py against formulas in float64."""

import json
import re
import sys
from pathlib import Path

import op_cases as formulas
import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "dev"))
import baselines
import bench

from llamac.base.errors import InputError
from llamac.base.version import commit, provenance_text
from llamac.bench import timing, torch_operations
from llamac.bench.torch_operations import Case

LINE = {
    "operation": "rmsnorm_forward",
    "dtype": "bf16",
    "preset": "tiny",
    "shape": {"N": 16, "C": 64},
    "bytes": 4224,
    "flops": 4096,
    "device": "Some GPU",
    "emulated": False,
    "limit": {"gbps": 4000.0, "by": "memcpy"},
    "check": {"shape": {"N": 16, "C": 64}, "passed": True},
    "runs": [
        dict(zip(("variant", "block", "ms", "gbps", "tflops", "percent", "error"), values))
        for values in (
            ("vectorized", 256, 0.5, 3000.4, 7.0, 75.01, 0.3),
            ("vectorized", 128, 0.4, 3600.4, 8.0, 90.01, 0.3),
            ("naive", 256, 2.0, 700.0, 1.0, 17.5, 0.2),
            ("naive", 64, 3.0, 500.0, 1.0, 12.5, 0.2),
        )
    ],
}
FAILED = LINE | {"operation": "swiglu_forward", "check": LINE["check"] | {"passed": False}}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """fake(name, lines, body): a program that prints lines and goes on with body -> its folders as flags.
    PyTorch times nothing beside it.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sources, build = tmp_path / "sources", tmp_path / "build"
    sources.mkdir()
    build.mkdir()
    (sources / "benchmark.cpp").touch()

    def make(name: str, lines: list[dict] = (), body: str = "") -> list[str]:
        (sources / f"{name}.cpp").touch()
        program = build / name
        text = "\n".join(json.dumps(line) for line in lines)
        program.write_text(
            f"#!{sys.executable}\nimport sys\nopen({str(build / 'calls')!r}, 'a').write("
            f"' '.join([{name!r}, *sys.argv[1:]]) + '\\n')\nprint({text!r}, flush=True)\n{body}\n"
            if lines
            else f"#!{sys.executable}\nimport sys\n{body}\n"
        )
        program.chmod(0o755)
        return ["--build", str(build), "--sources", str(sources)]

    return make


def cells(markdown: str) -> list[list[str]]:
    rows = [line.strip("| ").split(" | ") for line in markdown.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0] not in ("operation", "---")]


def calls(arguments: list[str]) -> list[str]:
    return (Path(arguments[1]) / "calls").read_text().splitlines()


def test_the_fastest_block_of_each_kind_stands_in_the_table(fake, capsys):
    arguments = fake("rmsnorm_forward", [LINE])
    assert bench.main([*arguments, "--preset", "8b", "--dtype", "bf16"]) == 0
    markdown = capsys.readouterr().out
    found = "rmsnorm_forward|bf16|N=16 C=64|2.0000|0.4000|vectorized, 128|3600 GB/s|90.0|-|-|-"
    assert cells(markdown) == [found.split("|")]
    build = Path(arguments[1])
    assert (build / "bench.md").read_text() == markdown
    content = json.loads((build / "bench.json").read_text())
    assert provenance_text(content) in markdown and content["commit"] == commit()
    (line,) = content["results"]
    assert line == LINE | {"preset": "8b"}
    assert calls(arguments) == ["rmsnorm_forward --json --preset 8b --dtype bf16"]


def test_ratio_and_ways():
    found = {
        "eager": {"ms": 1.6, "method": "autograd"},
        "compile": {"ms": 0.8, "method": "formula"},
    }
    assert bench.row(LINE | {"baselines": found})[-3:] == ["1.6000 autograd", "0.8000 formula", "2.00"]
    assert bench.row(LINE | {"baselines": {"eager": found["eager"]}})[-3:] == ["1.6000 autograd", "-", "-"]


def test_products_are_given_in_tflops_and_only_naive_ones_are_ours():
    line = LINE | {
        "operation": "matmul_forward",
        "runs": LINE["runs"][2:],
        "baselines": {"compile": {"ms": 1.0, "method": "x"}},
    }
    assert bench.row(line)[3:8] == ["2.0000", "-", "naive, 256", "1.0 TFLOP/s", "-"]
    assert bench.row(line)[-1] == "0.50"


def test_runs_without_a_time_are_passed_over():
    wrong = [run | {"ms": None} for run in LINE["runs"]]
    assert bench.row(LINE | {"runs": wrong})[3:8] == ["-"] * 5
    assert bench.row(LINE | {"runs": []})[3:8] == ["-"] * 5


FAULTS = {
    "exit": ("print('first\\nno device', file=sys.stderr); sys.exit(2)", "exit code 2: no device"),
    "signal": ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
    "slow": ("sys.stdout.flush(); import time; time.sleep(60)", "the time was over"),
}


@pytest.mark.parametrize("body, reason", FAULTS.values(), ids=FAULTS.keys())
def test_a_failing_program_is_named_and_the_rest_goes_on(fake, capsys, body, reason):
    fake("repeat_kv_forward", [LINE | {"operation": "repeat_kv_forward"}], body)
    arguments = [*fake("rmsnorm_forward", [LINE]), "--preset", "small", "--program-seconds", "2"]
    assert bench.main(arguments) == 1
    streams = capsys.readouterr()
    assert [row[0] for row in cells(streams.out)] == ["repeat_kv_forward", "rmsnorm_forward"]
    assert f"- repeat_kv_forward --preset small: {reason}" in streams.out
    assert f"repeat_kv_forward --preset small: FAILED: {reason}" in streams.err
    (failure,) = json.loads((Path(arguments[1]) / "bench.json").read_text())["failures"]
    assert failure["program"] == "repeat_kv_forward" and failure["reason"].startswith(reason)


def test_a_missing_and_a_silent_program_fail(fake, capsys):
    (Path(fake("a", [LINE])[1]) / "a").unlink()
    assert bench.main([*fake("b"), "--preset", "tiny"]) == 1
    errors = capsys.readouterr().err
    assert re.search("a --preset tiny: FAILED: .*/a: No such file", errors)
    assert "b --preset tiny: FAILED: it printed nothing" in errors


@pytest.mark.parametrize(
    "body", ["", "print('variant vectorized: 9.1 times the bound', file=sys.stderr); sys.exit(1)"]
)
def test_a_failed_check_fails_all(fake, capsys, body):
    fake("rmsnorm_forward", [LINE])
    assert bench.main([*fake("swiglu_forward", [FAILED], body), "--preset", "8b"]) == 1
    out = capsys.readouterr().out
    assert "check failed: swiglu_forward (bf16)" in out and ("9.1 times" in out) == bool(body)
    assert [row[-1] for row in cells(out)] == ["-", "- CHECK FAILED"]


def test_presets_follow_the_device(fake, capsys):
    fake("a", [], "sys.exit(3)")
    arguments = fake("b", [LINE])
    assert bench.main(arguments) == 1
    assert calls(arguments) == [f"b --json --preset {preset}" for preset in ("tiny", "8b", "small")]
    assert "## 8b: Some GPU" in capsys.readouterr().out
    fake("b", [LINE | {"emulated": True}])
    assert bench.main(arguments) == 1
    assert calls(arguments)[3:] == ["b --json --preset tiny"] * 2
    said = capsys.readouterr().out
    assert "Emulated on the CPU: checked and not timed." in said and "Limit:" not in said


def test_operations_are_chosen_by_name_or_beginning(fake):
    for name in ("rmsnorm_forward", "rmsnorm_backward", "rope_forward"):
        arguments = fake(name, [LINE | {"operation": name}])
    assert bench.main([*arguments, "--preset", "8b", "--operation", "rmsnorm", "rope_forward"]) == 0
    assert [call.split()[0] for call in calls(arguments)] == [
        "rmsnorm_backward",
        "rmsnorm_forward",
        "rope_forward",
    ]
    with pytest.raises(InputError, match="--operation rms: expected one of rmsnorm_backward, rmsnorm_forw"):
        bench.main([*arguments, "--operation", "rms"])


def test_a_bad_folder(tmp_path):
    with pytest.raises(InputError, match="expected the folder of a build"):
        bench.main(["--build", str(tmp_path / "none")])


def test_programs_of_the_repository_have_baselines():
    names = bench.choose_programs(ROOT / "dev/hip", [])
    assert "rmsnorm_forward" in names and "benchmark" not in names
    in_fp8 = {name for name in names if "quantize" in name or name.startswith(("scaled_", "update_scales"))}
    assert set(names) - in_fp8 == set(baselines.BASELINES)
    assert baselines.measure({"operation": "quantize"}, ["eager"]) == ({}, ["quantize: no baseline"])
    assert set(baselines.BASELINES) <= set(formulas.CASES)


def test_baselines_are_timed_until_the_time_is_over(fake, capsys, monkeypatch):
    arguments = fake("rmsnorm_forward", [LINE])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        baselines,
        "measure",
        lambda line, modes: ({m: {"ms": 0.8, "method": "w"} for m in modes}, ["why"]),
    )
    assert bench.main([*arguments, "--preset", "8b"]) == 0
    streams = capsys.readouterr()
    assert cells(streams.out)[0][-3:] == ["0.8000 w", "0.8000 w", "2.00"]
    assert (
        f"PyTorch {torch.__version__} (torch.compile(dynamic=False)" in streams.out and "why" in streams.err
    )
    (line,) = json.loads((Path(arguments[1]) / "bench.json").read_text())["results"]
    assert line["baseline_failures"] == ["why"] and set(line["baselines"]) == {"eager", "compile"}
    assert bench.main([*arguments, "--preset", "8b", "--baselines", "eager"]) == 0
    assert cells(capsys.readouterr().out)[0][-3:] == ["0.8000 w", "-", "-"]
    assert bench.main([*arguments, "--preset", "8b", "--baseline-seconds", "-1"]) == 0
    streams = capsys.readouterr()
    assert cells(streams.out)[0][-3:] == ["-", "-", "-"] and "left out" in streams.err


# ---- PyTorch's side

SIZES = {"B": 2, "T": 7, "NH": 6, "NKV": 2, "HD": 8, "N": 14, "C": 24, "K": 20, "F": 12, "V": 33}
SIZES |= {"P": 101, "M": 9}
LABELS = {
    "rmsnorm_backward": ["f32", "f32, no dresidual", "T=bf16 G=f32, no dresidual"],
    "adamw": ["f32, no master", "T=bf16 G=bf16 M=f32", "T=bf16 G=f32 M=bf16, no master", "bf16, no master"],
    "matmul_forward": ["f32", "f32, no residual", "bf16, no residual"],
    "embedding_backward": ["f32", "T=bf16 G=f32", "bf16"],
    "precompute_cis": [""],
    "mean_loss": [""],
    "convert": ["T=bf16 G=f32", "T=f32 G=bf16"],
    "hash": [""],
}
CALLS = [
    pytest.param(name, label, method, mode, id=f"{name}-{label}-{method.name}-{mode}")
    for name, baseline in baselines.BASELINES.items()
    for label in LABELS.get(name, ["f32", "bf16"])
    for method in baseline.methods
    for mode in method.modes
    if method.name not in ("cudnn", "fused" if "M=" in label or "master" not in label else "")
]


def line_of(operation: str, label: str) -> dict:
    return LINE | {"operation": operation, "dtype": label, "shape": SIZES}


def truth_of(operation: str, label: str, inputs: dict, monkeypatch) -> dict[str, torch.Tensor]:
    """The tests' formula in float64, with PyTorch's defaults for scalars that the baselines leave out."""
    scale = 1.0 if operation == "cross_entropy" else SIZES["HD"] ** -0.5
    monkeypatch.setattr(formulas, "SCALE", scale)
    adamw = torch_operations.ADAMW | {"step": torch_operations.STEP, "norm": 0.5, "clip": 1.0}
    monkeypatch.setattr(formulas, "ADAMW", adamw)
    monkeypatch.setattr(torch_operations, "THETA", 10000.0)
    without = {} if "master" in inputs else {"master": None}
    without |= {} if "dresidual" in inputs else {"dresidual": torch.zeros(())}
    without |= {} if "residual" in inputs else {"residual": torch.zeros(())}
    wide = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    return formulas.CASES[operation].torch(SIZES | {"stat": torch.float64} | without | wide)


@pytest.mark.parametrize("operation, label, method, mode", CALLS)
def test_baselines_compute_the_operation(operation, label, method, mode, monkeypatch):
    torch.manual_seed(1)
    baseline = baselines.BASELINES[operation]
    case = Case.of(line_of(operation, label), "cpu")
    inputs = baseline.inputs(case)
    truth = truth_of(operation, label, {n: t.clone() for n, t in inputs.items()}, monkeypatch)
    (call,) = baselines.calls_of(method, mode, [inputs], backend="aot_eager")
    if operation != "adamw":  # in place: each call is a step
        call()
    results = call()
    results = results if isinstance(results, (tuple, list)) else (results,)
    found = dict(zip(baseline.outputs, results, strict=True))
    found |= {"master": inputs["master"]} if "master" in inputs else {}
    letters = {"dweight": "G", "m": "M", "v": "M"}
    for name, value in found.items():
        dtype = case.type_of(letters.get(name, "T"))
        if name in ("losses", "mean", "num_valid", "squares", "cis", "master"):
            dtype = torch.float32
        elif name == "sum" and operation == "hash":
            dtype = torch.float64
        elif operation == "argmax":
            dtype = torch.int64
        elif method.name == "autograd" and name[1:] in method.leaves:
            dtype = inputs[name[1:]].dtype
        assert value.dtype == dtype and not value.requires_grad, name
        # bf16: autograd rounds what lies between two of its operations, four of them at most.
        unit = 4 * 2.0**-8 if torch.bfloat16 in case.dtype.values() else 2.0**-20
        expected = truth[name]
        assert value.shape == expected.shape, name
        assert ((value.double() - expected).abs() <= unit * expected.abs().max()).all(), name


def test_a_wrong_baseline_would_be_seen(monkeypatch):
    method = baselines.Method("wrong", lambda dout, cos, sin: torch_operations.rope(dout, cos, sin))
    with pytest.raises(AssertionError):
        test_baselines_compute_the_operation("rope_backward", "f32", method, "eager", monkeypatch)


@pytest.mark.parametrize("operation", ["rmsnorm_backward", "cross_entropy", "adamw"])
def test_measure_takes_the_fastest_way_and_says_what_failed(operation, monkeypatch):
    monkeypatch.setattr(timing, "SETS", 2)
    line = line_of(operation, "T=bf16 G=bf16 M=f32" if operation == "adamw" else "f32")
    found, failures = baselines.measure(line, ["eager", "compile"], "cpu", 0.0, "aot_eager")
    assert set(found) == ({"compile"} if operation == "adamw" else {"eager", "compile"})
    assert len(failures) == (operation == "adamw")
    for mode in found.values():
        fastest = min(mode["methods"].items(), key=lambda item: item[1]["ms"])
        assert (mode["method"], mode["ms"]) == (fastest[0], fastest[1]["ms"]) and mode["ms"] > 0


def test_measure_survives_what_it_does_not_know():
    for change in ({"dtype": "f8"}, {"dtype": "bf16 f32"}, {"shape": {}}):
        found, (failure,) = baselines.measure(LINE | change, ["eager"], "cpu")
        assert found == {} and "no inputs" in failure


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
    case, baseline = Case.of(LINE, "cpu"), baselines.BASELINES["rmsnorm_forward"]

    def inputs():
        return baseline.inputs(case)

    sets = timing.make_sets(inputs, timing.ROTATED / 8)
    assert len(sets) == 8 and len({s["x"].data_ptr() for s in sets}) == 8
    assert len(timing.make_sets(inputs, 1)) == timing.SETS
    monkeypatch.setattr(timing, "LARGEST", 1)
    assert len(timing.make_sets(inputs, 1)) == 1
