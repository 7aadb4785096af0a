"""Frozen weights (--freeze) and adapters (--lora) of the program and of llamac.Trainer."""

from fnmatch import fnmatch

import numpy as np
import pytest
from run import assert_same_state, flags, numbers, one_line, tensors

pytestmark = pytest.mark.program
FROZEN = "model.embed_tokens.weight,model.layers.0.*,*norm.weight"
SHORT = {"val_every": 0, "val_data": "none"}
FP8 = {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_weights": "stored"}
AGAIN = {"dtype": "bf16", "recompute": "norm,swiglu,qkv", "verify_every": 3}
RANKS = {"2": {"devices": 2, "batch_size": 2}, "2 groups": {"devices": 4, "batch_size": 1, "shard_group": 2}}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("extra", [{}, AGAIN, FP8])
def test_frozen_weights_stay(train, data, tmp_path, extra):
    """A resumed run has the bits of one that ran through; only what trains changes and has moments."""
    run = {"freeze": FROZEN, **SHORT, **extra}
    train(*flags(data, tmp_path / "one", **run))
    train(*flags(data, tmp_path / "two", resume=tmp_path / "one/step_000004", **run))
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")[4:]
    assert_same_state(tmp_path / "two/step_000008", tmp_path / "one/step_000008")
    before, after = (tensors(tmp_path / "one" / step, "model") for step in ("step_000004", "step_000008"))
    moved = {name for name in after if not np.array_equal(before[name], after[name])}
    assert moved == {name for name in after if not any(fnmatch(name, each) for each in FROZEN.split(","))}
    state = tensors(tmp_path / "one/step_000008", "optimizer")
    assert {name.removeprefix("m.") for name in state if name.startswith("m.")} == moved


@pytest.mark.parametrize("ranks", RANKS)
def test_frozen_weights_of_ranks(train, data, tmp_path, ranks):
    run = {"steps": 4, "freeze": FROZEN, "dtype": "bf16", **RANKS[ranks], **SHORT}
    for level in range(4):
        train(*flags(data, tmp_path / f"{level}", zero=level, **run))
        assert numbers(tmp_path / f"{level}") == numbers(tmp_path / "0")
        assert_same_state(tmp_path / f"{level}/step_000004", tmp_path / "0/step_000004")


@pytest.mark.parametrize(
    "extra, words",
    [
        ({"freeze": "lm_heads.*"}, "--freeze lm_heads.* matches none model.layers.0.input_layernorm.weight"),
        ({"freeze": "*"}, "--freeze train match all"),
        ({"freeze": "*.q_proj.*"}, "q_proj k_proj one matrix frozen"),
    ],
)
def test_bad_input(train, data, tmp_path, extra, words):
    line = one_line(train(*flags(data, tmp_path / "out", **extra), code=2))
    assert all(word in line for word in words.split()), line
    assert not (tmp_path / "out").exists()
