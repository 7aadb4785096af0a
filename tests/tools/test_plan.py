"""Plans of runs without data and devices: --dry-run of one configuration, `llamac plan`, which searches, and
the estimate behind both.
"""

import itertools
import json
import re
import time
import tomllib

import pytest
from run import run_llamac

from llamac.base import registry
from llamac.base.errors import InputError
from llamac.base.folders import CONFIGS
from llamac.base.native import native
from llamac.training import plan

BF16 = {"dtype": "bf16", "grad-dtype": "bf16", "master-weights": "off", "optimizer-state": "bf16"}
EIGHT = ("--model", "llama3.1-8b", "--devices", "8", "--device-memory", "192GiB")


def first_plan(said: str) -> dict[str, str]:
    """The first row of the table of meshes."""
    lines = said.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("plan "))
    names, values = (re.split(r" {2,}", line.strip()) for line in lines[heading : heading + 2])
    return dict(zip(names, values, strict=True))


def estimate(devices: int = 1, device: str = "h200", **values) -> dict:
    flags = {"sample-every": 0} | {name.replace("_", "-"): value for name, value in values.items()}
    return native.plan([("", json.dumps(flags))], devices, device, "")


EIGHT_B = {"model": "llama3.1-8b", "seq-len": 8192, "batch-size": 1, "recompute": "norm,swiglu"}


@pytest.mark.parametrize(
    "devices, tokens_per_second, values",
    [
        (1, 11_247, BF16 | EIGHT_B),
        (1, 74_278, BF16 | {"model": "llama3.2-1b", "seq-len": 2048}),
        (1, 59_292, BF16 | {"model": "llama3.2-1b", "seq-len": 8192, "batch-size": 4}),
        (1, 52_300, BF16 | {"model": "llama3.1-70b-proxy", "seq-len": 4096, "batch-size": 2}),
        (1, 15_938, BF16 | EIGHT_B | {"matmul-dtype": "fp8"}),
        (1, 9_667, EIGHT_B | {"recompute": "norm,swiglu,block:2", "dtype": "bf16"}),
        (4, 36_369, EIGHT_B | {"recompute": "block", "batch-size": 2, "zero": 3, "dtype": "bf16"}),
        (2, 21_909, BF16 | EIGHT_B | {"recompute": "none", "zero": 1}),
        (2, 19_651, BF16 | EIGHT_B | {"recompute": "none", "tp": 2}),
        (2, 22_245, BF16 | EIGHT_B | {"seq-len": 4096, "pp": 2, "total-batch-size": 32768}),
    ],
)
def test_estimates_beside_measured_runs(devices, tokens_per_second, values):
    """On H200s (docs/benchmarks/nvidia-h200.md, docs/fp8.md). docs/training.md has the errors."""
    found = estimate(devices, **values)
    assert found["tokens_per_step"] / found["seconds"] == pytest.approx(tokens_per_second, rel=0.1)


def test_rates_that_a_device_reaches():
    """Attention takes its own rate: what one sequence of 16384 tokens takes longer than two of 8192. Rates of
    the table are of operations that there are, and below the published ones."""
    table = tomllib.loads((CONFIGS / "tables/devices.toml").read_text(encoding="utf-8"))
    kernels = {kernel["name"]: str(kernel) for kernel in registry.kernels()}
    for row in table["reached"]:
        device = next(d for d in table["device"] if d["names"] == row["names"])
        assert row["gbps"] < device["gbps"]
        assert all(rate < device["tflops"][dtype] for dtype, rate in row["products"].items())
        for known in row["operation"]:
            assert known.keys() - {"name", "tflops"} == {"HD"} and "HD" in kernels[known["name"]]
    rate = {o["name"]: 1e12 * o["tflops"] for o in table["reached"][0]["operation"] if o["HD"] == 128}
    shape = BF16 | {"model": "llama3.1-8b", "batch-size": 1, "total-batch-size": 16384}
    once, twice = (estimate(device="mi300x", **shape, seq_len=T)["seconds"] for T in (16384, 8192))
    flops = 32 * 2 * 4096 * (16384**2 - 2 * 8192**2)  # 32 layers, two products, half of them masked
    expected = flops / rate["attention_forward"] + 2.5 * flops / rate["attention_backward"]
    assert once - twice == pytest.approx(expected, rel=0.05)
    found = estimate(device="mi300x", **EIGHT_B)["assumptions"]
    assert "708 in bf16, 1273 in fp8" in found and "up to 11%" in found and "4085 GB/s" in found
    assert "65% of its published" in estimate(device="mi325x", **EIGHT_B)["assumptions"]


def test_what_is_counted():
    """FLOPs of training: 6 per weight and token; attention's backward recomputes one of five products."""
    shape = {"model": "llama3.2-1b", "seq-len": 2048, "batch-size": 2}
    useful = native.model("llama3.2-1b", 2048)[1] * 2 * 2048
    whole = estimate(**shape)
    assert useful < whole["flops"] < 1.05 * useful
    again, twice = estimate(**shape, recompute="block"), estimate(**shape, total_batch_size=8192)
    assert 1.15 * whole["flops"] < again["flops"] < 4 / 3 * whole["flops"]  # of all but the head
    assert again["memory"] < whole["memory"] and again["seconds"] > whole["seconds"]
    assert twice["flops"] == pytest.approx(2 * whole["flops"], rel=1e-3)
    assert twice["moved"] < 1.9 * whole["moved"]  # one optimizer step
    levels = [estimate(8, **shape, dtype="bf16", zero=zero, total_batch_size=8 * 8192) for zero in range(4)]
    weights = 2 * native.model("llama3.2-1b", 1)[0]
    # f32 gradients are summed once or per micro-batch, and they or bf16 weights gathered: 7 of 8 parts.
    parts = [found["exchanged"] / (7 / 8 * weights) for found in levels]
    assert parts == pytest.approx([2 + 2, 2 + 1, 2 * 2 + 1, 2 * 2 + 2 * 2])
    assert [found["memory"] for found in levels] == sorted((f["memory"] for f in levels), reverse=True)


def test_rates_of_links():
    """A ring within a machine takes as many links as it has other devices, or a switch. A stage of another
    machine is reached through the network."""
    shape = BF16 | {"model": "llama3.1-8b", "batch-size": 8, "seq-len": 8192, "recompute": "none"}

    def waited(device, **flags):
        return estimate(8, device, **shape, total_batch_size=64 * 8192, **flags)["waited"]

    stream = 8 * 8192 * 4096 * 2  # bytes of a micro-batch

    def expected(tp, rate):
        micro = 64 // (8 * (8 // tp))
        exchange = 8.4e-6 + (tp - 1) * 3.4e-6 + (tp - 1) / tp * stream / (0.7 * rate)
        return 32 * 8 * micro * exchange

    for tp, rate in ((2, 64e9), (4, 3 * 64e9), (8, 7 * 64e9)):
        assert waited("mi300x", tp=tp) == pytest.approx(expected(tp, rate), rel=0.1)
    for tp in (2, 4, 8):
        assert waited("h200", tp=tp) == pytest.approx(expected(tp, 450e9), rel=0.1)
    # Of two stages on two machines and on one.
    pair = BF16 | {"model": "llama3.1-8b", "batch-size": 1, "seq-len": 8192, "total-batch-size": 8 * 8192}
    layers = [("", json.dumps({"sample-every": 0, "pp": 2} | pair))]
    near, far = (native.plan(layers, 2, "h200", "", each)["waited"] for each in (8, 1))
    bytes_sent = 2 * 8 * 8192 * 4096 * 2
    assert far - near == pytest.approx(
        bytes_sent / 0.7 * (1 / 50e9 - 1 / 450e9) + 16 * (9.6e-6 - 3.4e-6), rel=0.01
    )


def test_time_of_a_pipeline():
    """Each stage of so many computes M micro-batches, and waits for the others once."""
    shape = BF16 | {"model": "llama3.1-8b", "batch-size": 1, "seq-len": 4096, "recompute": "none"}
    found = {M: estimate(4, **shape, pp=4, total_batch_size=M * 4096) for M in (8, 16, 32)}
    each = (found[32]["seconds"] - found[16]["seconds"]) / 16
    assert (found[16]["seconds"] - found[8]["seconds"]) / 8 == pytest.approx(each, rel=0.01)
    assert 2.5 * each < found[8]["idle"] <= 3 * each
    assert found[8]["idle"] == pytest.approx(found[32]["idle"], rel=0.02)
    chunks = estimate(4, **shape, pp=4, pp_chunks=2, total_batch_size=8 * 4096)
    assert chunks["idle"] == pytest.approx(found[8]["idle"] / 2, rel=0.15)


def test_exchanges_that_a_step_waits_for():
    """Level 2 sums after each micro-batch, level 1 after the last one. At level 3 on 512 devices, a small
    model waits less for groups of a machine than for one of all, whose rings have more steps."""
    shape = {"model": "llama3.1-8b", "seq-len": 8192, "batch-size": 1, "dtype": "bf16", "recompute": "block"}
    total = {"total-batch-size": 2 * 64 * 8192}
    waited = [estimate(64, "mi300x", **shape, **total, zero=zero)["waited"] for zero in (1, 2)]
    assert 0 < waited[0] < waited[1]
    small = shape | {"model": "llama3.2-1b", "seq-len": 1024, "total-batch-size": 512 * 1024}
    whole, group = (estimate(512, "mi300x", **small, zero=3, shard_group=g)["waited"] for g in (512, 8))
    assert 0 < group < whole


@pytest.mark.program
def test_a_plan_is_a_configuration(train, tmp_path):
    """For eight devices, without data; --dry-run finds the same figures of it."""
    config = tmp_path / "plan.toml"
    said = run_llamac("plan", *EIGHT, "--tokens", "100B", "--out", config).stdout
    first = first_plan(said)
    assert "estimated for AMD Instinct MI300X, not measured" in said and "100,000" in said
    values = tomllib.loads(config.read_text())
    assert values["devices"] == 8 and values["steps"] * values["total-batch-size"] >= 100e9
    found = train("--config", config, "--dry-run", "--device", "mi300x", "--device-memory", "192GiB").stdout
    names = {
        "batch-size": "batch",
        "GiB per device": "GiB",
        "micro-batches per step": "micro-batches",
        "seconds per step": "s/step",
        "tokens/s": "tokens/s",
        "% of one device's, per device": "% of one",
        "days": "days",
    }
    same = {name: first[column] for name, column in names.items()}
    same |= {"computes on": "8 x AMD Instinct MI300X of 192 GiB"}
    assert "optimizer-state" not in values and "estimated, with f32 weights, gradients, moments" in said
    for name, value in same.items():
        assert re.search(rf"  {re.escape(name)} +{re.escape(value)}(  |$)", found, re.MULTILINE), (
            name,
            found,
        )
    assert "train_*.bin: no such file; planned without it" in found and "CPU" not in found
    assert found.splitlines()[-1].startswith("dry run: the run fits with these flags")


@pytest.mark.program
def test_a_dry_run_needs_no_files(train, tmp_path):
    """Of the data; a run does, and a device that is planned for is none of its own."""
    missing = {"train-data": "gone_*.bin", "val-data": "gone.bin", "tokenizer": "gone.json",
               "eval-tasks": "a.questions,b.questions", "document-mask": "on"}  # fmt: skip
    flags = [word for name, value in missing.items() for word in (f"--{name}", value)]
    found = train(*flags, "--dry-run", "--out", tmp_path / "out").stdout
    for text in (
        "train-data gone_*.bin",
        "val-data gone.bin",
        "tokenizer gone.json",
        "eval-tasks b.questions",
    ):
        assert f"--{text}: no such file; planned without it\n" in found
    assert "estimate" not in found and not (tmp_path / "out").exists()
    assert "gone_*.bin: no such file" in train(*flags, "--out", tmp_path / "out", code=2).stderr
    assert "--device: expected only with --dry-run" in train("--device", "h200", code=2).stderr


def test_a_smaller_device_recomputes_or_shards_more():
    """The flags that fit take more time, never less memory than there is; no faster flags fit."""
    search = plan.Search(plan.base_values(plan.arguments(["--model", "llama3.1-8b"])), "h200", "80GiB")
    best = search.plans(8, "f32 weights, gradients, moments")[0]
    assert best.fits and best.flags["zero"] > 1
    for zero in (1, 2, 3):
        for recompute in plan.RECOMPUTE:
            other = search.plan(8, best.states, batch_size=1, recompute=recompute, zero=zero)
            assert not other.fits or other.estimate["seconds"] >= best.estimate["seconds"] / plan.ALIKE


@pytest.mark.parametrize("model, devices, seq_len", [("llama3.1-70b", 16, 8192), ("llama3.1-8b", 8, 131072)])
def test_meshes_that_fit(model, devices, seq_len):
    """The listed meshes are in order, fit, and no other mesh is faster."""
    arguments = ["--model", model, "--devices", str(devices), "--seq-len", str(seq_len)]
    arguments += ["--total-batch-size", str(devices * seq_len)]
    search = plan.Search(plan.base_values(plan.arguments(arguments)), "mi300x", "")
    states = next(iter(plan.STATES))
    listed = search.plans(devices, states)
    assert all(found.fits for found in listed)
    seconds = [found.seconds for found in listed]
    assert all(a <= plan.ALIKE * b for a, b in itertools.pairwise(seconds))
    meshes = search.meshes(devices)
    assert {mesh.tp for mesh in meshes} >= {1, 2, 4, 8} and {mesh.pp for mesh in meshes} >= {1, 2, 4, 8}
    assert {mesh.cp for mesh in meshes} == ({1, 2, 4, 8} if seq_len > 8192 else {1})
    for mesh in meshes:
        for zero in (1, 3):
            try:
                other = search.plan(devices, states, mesh, batch_size=1, recompute="norm,swiglu", zero=zero)
            except InputError:
                continue
            assert not other.fits or other.seconds >= seconds[0] / plan.ALIKE


def test_a_search_is_quick():
    """Of the largest model and the most devices, in seconds of one core."""
    begin = time.process_time()
    search = plan.Search(
        plan.base_values(plan.arguments(["--model", "llama3.1-405b", "--devices", "512"])), "mi300x", ""
    )
    assert search.plans(512, next(iter(plan.STATES)))
    assert time.process_time() - begin < 10


def test_a_model_that_does_not_fit_says_where_it_does():
    said = run_llamac("plan", "--model", "llama3.1-70b", code=2).stderr
    needed = r"needs at least [\d.]+ GiB per device on 1 x .*MI300X of 191 GiB; it fits on 4 devices.*\n"
    assert re.fullmatch(f"llamac plan: memory: llama3.1-70b {needed}", said), said
    assert "--zero 3" in run_llamac("plan", "--model", "llama3.1-70b", "--devices", "4").stdout


@pytest.mark.parametrize("devices, memory", [(8, "1GiB"), (4096, "256MiB")])
def test_a_model_that_fits_nowhere(devices, memory):
    """Its heads do not divide by eight: such a mesh is passed over. No number of devices is refused."""
    flags = ["--model", "gpt2-125m", "--devices", str(devices), "--device-memory", memory]
    said = run_llamac("plan", *flags, code=2).stderr
    needed = rf"needs at least [\d.]+ GiB per device on {devices} x .* GiB; it does not fit on 4096 devices"
    assert re.fullmatch(f"llamac plan: memory: gpt2-125m {needed} either\n", said), said


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            ["--device", "mi3000"],
            "--device mi3000: expected a part of one of the names AMD Instinct MI300X, ",
        ),
        (["--device", "a100"], "--device a100: configs/tables/devices.toml has no gbps of NVIDIA A100"),
        (["--tokens", "many"], "--tokens: expected a number such as 300M, 100B or 15T, found 'many'"),
        (["--devices", "0"], "--devices: expected 1 to 4096, found 0"),
        (["--device-memory", "192"], "--device-memory: expected a size in MiB or GiB"),
        (["--devices-per-node", "0"], "--devices-per-node: expected at least 1, found 0"),
        (["--devices", "7", "--total-batch-size", "24576"], "no mesh of 7 devices divides 3 sequences"),
        (["--seq-len", "1000000"], "--seq-len 1000000: the model's longest sequence"),
        (["--out", "/none/plan.toml"], "/none/plan.toml: cannot write: No such file"),
    ],
)
def test_bad_arguments(arguments, expected):
    said = run_llamac("plan", "--model", "llama3.2-1b", *arguments, code=2).stderr
    assert expected in said and said.count("\n") == 1


@pytest.mark.program
@pytest.mark.parametrize("config", ["llama3.1-8b-8gpus.toml", "llama3.1-70b.toml"])
def test_configurations_for_eight_devices(train, config):
    said = train("--config", config, "--dry-run", "--device-memory", "191GiB").stdout
    assert "8 x a device of 191 GiB" in said and "the run fits" in said and "estimate" not in said
