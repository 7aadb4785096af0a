"""What only a GPU can show: the same bits however a step is launched, tuned or resumed; the CPU's losses; the
memory that was promised; the time of a step. `make test` on a machine with a GPU runs it. The debug states
are compared there by tests/model/test_model.py, all else by tests/train/test_program.py.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from run import PRECISIONS, ROOT, bits, events, flags, losses

from llamac.data import write_bin

# Heads of 64 channels: in bf16, attention and products on matrix cores.
SHAPE = {"model": ROOT / "tests/models/wide-heads.json", "seq_len": 64, "total_batch_size": 8 * 64}

pytestmark = pytest.mark.program


@pytest.fixture(autouse=True, scope="module")
def on_a_gpu(gpu):
    if not gpu:
        pytest.skip("this build computes on the CPU: LLAMAC_BUILD names one for a GPU")


@pytest.fixture(scope="module")
def library(build):
    listing = subprocess.run([build / "train_llama3", "--list-kernels"], capture_output=True, text=True)
    if not re.search("^[ *] library ", listing.stdout, re.MULTILINE):
        pytest.skip("this build is without the vendor's library")


@pytest.fixture
def run(train, data, tmp_path):
    """A run of SHAPE in tmp_path/name; returns its bits. The timings are kept in tmp_path/gemm.json."""

    def go(name: str, **extra) -> dict:
        extra = SHAPE | {"gemm_cache": tmp_path / "gemm.json"} | extra
        train(*flags(data, tmp_path / name, **extra))
        return bits(tmp_path / name)

    return go


# The same bits


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_seed_gives_the_same_bits(run, precision):
    """The first run times the library's candidates, the others find its choices; one is without graphs."""
    first = run("first", **PRECISIONS[precision])
    assert run("again", **PRECISIONS[precision]) == first
    assert run("launched", graphs="off", **PRECISIONS[precision]) == first
    assert run("other", seed=7, **PRECISIONS[precision])["steps"] != first["steps"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_verified_run_has_the_same_bits(run, precision):
    """Every step, replayed from graphs and launched one by one; a step in flight is verified, too."""
    first = run("first", **PRECISIONS[precision])
    assert run("verified", verify_every=1, **PRECISIONS[precision]) == first
    assert run("launched", verify_every=2, graphs="off", **PRECISIONS[precision]) == first
    assert run("guarded", verify_every=3, skip_nonfinite=1, **PRECISIONS[precision]) == first


def test_the_driver_says_how_the_device_is(run, tmp_path):
    """Power and temperature of any GPU that trains; counts of errors where its memory has ECC."""
    run("out")
    device = events(tmp_path / "out", "step")[-1].get("device")
    if device is None:
        pytest.skip("the vendor's library is missing")
    assert 10 < device["watts"] < 2000 and 10 < device["celsius"] < 120 and device["clock_mhz"] > 100
    assert device.get("ecc_uncorrected", 0) >= 0


@pytest.mark.parametrize("precision", ["f32", "bf16-throughout"])
def test_the_librarys_guesses_give_the_same_bits(run, tmp_path, precision):
    """Without timings and their file nothing is left to chance either."""
    untuned = {"tune": "off", "gemm_cache": "none", **PRECISIONS[precision]}
    first = run("first", **untuned)
    assert run("again", **untuned) == first
    assert run("launched", graphs="off", **untuned) == first
    assert not (tmp_path / "gemm.json").exists()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_checkpoint_knows_its_products(run, tmp_path, precision):
    """2N steps are N, a resume, and N more, where the manifest alone says which candidates were chosen."""
    alone = {"gemm_cache": "none", **PRECISIONS[precision]}
    whole = run("out", **alone)
    (tmp_path / "out/step_000008").rename(tmp_path / "set-aside")
    assert run("out", resume="auto", **alone) == whole
    assert [e["step"] for e in events(tmp_path / "out", "step")] == list(range(1, 9))


def choices(file: Path) -> dict:
    return json.loads(file.read_text())["choices"]


def test_timings_are_kept(library, run, tmp_path):
    """A product is timed in one run, the first that meets it."""
    cache = tmp_path / "gemm.json"
    run("guessed", tune="off")
    assert not cache.exists(), "a guess is not a timing"
    run("a")
    kept = choices(cache)
    assert kept and all(c["tried"] > 1 and c["ms"] > 0 for c in kept.values())
    before = cache.read_bytes()
    run("b")
    assert cache.read_bytes() == before
    run("c", batch_size=2)
    assert kept.items() < choices(cache).items(), "another run's products join"
    manifest = json.loads((tmp_path / "a/step_000008/manifest.json").read_text())
    assert kept.items() <= manifest["gemms"]["choices"].items()


def test_another_devices_timings_are_replaced(library, run, train, data, tmp_path):
    cache = tmp_path / "gemm.json"
    run("a")
    own = json.loads(cache.read_text())
    cache.write_text(json.dumps(own | {"device": "another"}))
    result = train(*flags(data, tmp_path / "b", **SHAPE, gemm_cache=cache))
    assert "gemm.json: the matrix products' choices are of another with " in result.stdout
    assert json.loads(cache.read_text())["device"] == own["device"]
    cache.write_text(
        json.dumps(own | {"choices": {name: c | {"algorithm": "00"} for name, c in own["choices"].items()}})
    )
    result = train(*flags(data, tmp_path / "c", **SHAPE, gemm_cache=cache))
    assert len(result.stderr.splitlines()) == len(own["choices"]), result.stderr
    assert all("does not take the algorithm that was kept" in line for line in result.stderr.splitlines())
    result = train(*flags(data, tmp_path / "d", **SHAPE, gemm_cache=cache))
    assert result.stderr == "", "what was refused has been replaced"


# The CPU's losses


@pytest.fixture(scope="module")
def cpu_program() -> Path:
    folder = ROOT / os.environ.get("LLAMAC_CPU_BUILD", "build/cpu")
    if not (folder / "train_llama3").exists():
        pytest.skip(f"no {folder}/train_llama3 to compare with: LLAMAC_CPU_BUILD names a build for the CPU")
    return folder / "train_llama3"


def test_the_losses_of_the_cpu(train, cpu_program, tmp_path):
    """200 steps of the tiny model in f32, on the GPU and on the CPU.

    Sums in another order differ by roundings, and training makes any small difference grow alike. How much,
    the CPU's run says beside itself with each step in two micro-batches: up to 1e-5 of the loss. Other
    orders there (plain loops for attention, another BLAS, eight micro-batches) gave 0.25 to 2 times that. On
    the GPU every operation rounds in its own way: 16 times are allowed, and at the first steps, where
    nothing has grown yet, what the mean of a few ulps a row can be. A learning rate that is off by 0.03% is
    seen.
    """
    rng = np.random.default_rng(1)
    walk = np.cumsum(rng.choice([1, 2, 5], 100_000)) % 4096
    write_bin(tmp_path / "train_000.bin", walk.astype(np.uint32), 4096)
    sizes = {"model": "tiny", "seq_len": 128, "batch_size": 8, "steps": 200, "warmup_steps": 20}
    rest = {"val_data": "", "checkpoint_every": -1, "lr": 0.003}
    in_parts = {"batch_size": 4, "total_batch_size": 8 * 128}
    train(*flags(tmp_path, tmp_path / "gpu", **sizes, **rest))
    train(*flags(tmp_path, tmp_path / "cpu", **sizes, **rest), program=cpu_program)
    train(*flags(tmp_path, tmp_path / "parts", **(sizes | rest | in_parts)), program=cpu_program)
    gpu, cpu, parts = (np.array(losses(tmp_path / name)) for name in ("gpu", "cpu", "parts"))
    assert len(cpu) == 200 and cpu[-1] < cpu[0] / 2
    bound = 16 * np.maximum.accumulate(np.abs(parts - cpu)) + 2.0**-21 * cpu
    differs = np.abs(gpu - cpu)
    worst = int(np.argmax(differs / bound))
    found = f"step {worst + 1}: {gpu[worst]}, on the CPU {cpu[worst]}, may differ by {bound[worst]:.1e}"
    assert np.all(differs <= bound), found
    print(f"{found}; largest difference {np.max(differs / cpu):.1e} of the loss")


# Memory


def table(stdout: str) -> dict[str, float]:
    """MiB by tensor group, from the table before the first step."""
    lines = iter(stdout.splitlines())
    next(line for line in lines if line.split()[:2] == ["memory", "tensors"])
    rows = {}
    for line in lines:
        group, _, mib = line.rsplit(maxsplit=2)
        rows[group.strip()] = float(mib)
        if group.strip() == "total":
            return rows
    raise AssertionError("no total")


@pytest.mark.parametrize("precision, batch", [("f32", 256), ("bf16-throughout", 512)])
def test_the_memory_is_what_the_table_said(train, data, tmp_path, precision, batch):
    """To 2%, of 14 GiB: what kernels take as they are loaded is small beside it."""
    large = {"model": "tiny", "seq_len": 1024, "batch_size": batch, "steps": 3, "checkpoint_every": -1}
    extra = large | {"val_data": "", "total_batch_size": 2 * batch * 1024} | PRECISIONS[precision]
    result = train(*flags(data, tmp_path / "out", **extra))
    rows = table(result.stdout)
    assert rows["activations"] > 10 * 1024
    assert sum(rows.values()) == pytest.approx(2 * rows["total"], abs=1)
    used = events(tmp_path / "out", "step")[-1]["gpu_mem_gib"] * 1024
    assert used == pytest.approx(rows["total"], rel=0.02)


# Time


def test_every_update_takes_its_time(train, data, tmp_path):
    """The last one, too: in the middle of it the host had waited for room among CUDA's 1,024 launches."""
    long = {"model": "tiny", "batch_size": 64, "seq_len": 1024, "total_batch_size": 32 * 64 * 1024,
            "steps": 6}  # fmt: skip
    rest = {"graphs": "off", "tune": "off", "val_data": "", "checkpoint_every": -1}
    train(*flags(data, tmp_path / "out", **long, **rest, **PRECISIONS["bf16-throughout"]))
    times = [e["ms"] for e in events(tmp_path / "out", "step")][1:]  # the first one loads the kernels
    assert min(times) > 0.8 * float(np.median(times)), times
