"""Runs of several processes: what ranks share, launchers, checkpoints, signals, lost ranks, bad input."""

import json
import os
import re
import sys
import warnings

import numpy as np
import pytest
from launch import as_ranks, mesh_flags
from run import (
    MODEL,
    SHORT,
    T,
    assert_same_state,
    events,
    flags,
    losses,
    numbers,
    one_line,
    tensors,
)

import llamac
from llamac.data import write_bin

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("ranks_over_gloo")]


GROUPED = "dp 4 shard_group 2"


def test_the_order_of_the_exchanges(build):
    """Done as late as the waits of a step allow: check_zero.cpp."""
    for code, text in as_ranks([build / "check_zero"], pipe="stdout"):
        assert code == 0 and " 0 failed" in text, text


def test_a_group_of_one_is_level_0(train, data, tmp_path):
    """Nothing is shared: the sums of two ranks have one order."""
    for name, more in (("a", {"zero": 3, "shard_group": 1}), ("b", {"zero": 0})):
        train(*flags(data, tmp_path / name, steps=4, devices=2, batch_size=2, **more, **SHORT))
    np.testing.assert_array_equal(losses(tmp_path / "a"), losses(tmp_path / "b"))
    assert_same_state(tmp_path / "a/step_000004", tmp_path / "b/step_000004")


def test_accumulation(train, data, tmp_path):
    """Micro-batches of the same step: where gradients are shared they are summed in another order."""
    for level in range(4):
        out = tmp_path / f"zero{level}"
        more = {"zero": level, "total_batch_size": 4 * T * 4} | SHORT
        train(*flags(data, out, steps=4, **mesh_flags(GROUPED), **more))
        np.testing.assert_allclose(losses(out), losses(tmp_path / "zero0"), rtol=2e-6)
    for a, b in ((0, 1), (2, 3)):
        assert numbers(tmp_path / f"zero{a}") == numbers(tmp_path / f"zero{b}")


@pytest.mark.parametrize(
    ("zero", "types"),
    [
        pytest.param(2, {}, marks=pytest.mark.more),
        (3, {"dtype": "bf16", "grad_dtype": "bf16", "reduce_dtype": "f32"}),
    ],
)
def test_groups_are_summed_once_per_step(train, data, tmp_path, zero, types):
    """Whatever the number of micro-batches, whose shards are summed within the group."""
    found = {}
    for micro in (1, 3):
        out = tmp_path / str(micro)
        more = {"zero": zero, "total_batch_size": micro * 4 * T, "profile": 2} | types | SHORT
        train(*flags(data, out, steps=4, **mesh_flags(GROUPED), **more))
        rows = json.loads((out / "profile.json").read_text())["operations"]
        found[micro] = {row["operation"]: (row["calls"], row["bytes"]) for row in rows}
    assert found[1]["all_reduce"] == found[3]["all_reduce"]
    assert found[3]["reduce_scatter"] == tuple(3 * each for each in found[1]["reduce_scatter"])
    train(*flags(data, tmp_path / "zero0", steps=4, **mesh_flags(GROUPED), **more | {"zero": 0}))
    np.testing.assert_allclose(losses(out), losses(tmp_path / "zero0"), rtol=2e-3 if types else 2e-6)


@pytest.mark.parametrize(("grad_dtype", "reduce_dtype"), [("f32", "bf16"), ("bf16", "f32")])
@pytest.mark.parametrize("group", [pytest.param(0, marks=pytest.mark.more), 2])
def test_the_type_of_the_sums(train, data, tmp_path, grad_dtype, reduce_dtype, group):
    """Levels have the same bits, near to those of sums in the gradients' own type."""
    more = {"dtype": "bf16", "grad_dtype": grad_dtype, "shard_group": group, "batch_size": 1, "steps": 4}
    more |= SHORT | {"devices": 4 if group else 2}
    train(*flags(data, tmp_path / "own", **more))
    for level in (0, 2 if group else 3):
        out = tmp_path / f"zero{level}"
        train(*flags(data, out, zero=level, reduce_dtype=reduce_dtype, **more))
        assert numbers(out) == numbers(tmp_path / "zero0")
        assert_same_state(out / "step_000004", tmp_path / "zero0/step_000004")
    # The host sums bf16 in f32 and rounds once: only a second sum, over groups, makes a difference.
    assert (numbers(out) == numbers(tmp_path / "own")) == (reduce_dtype == "f32" and group == 0)
    np.testing.assert_allclose(losses(out), losses(tmp_path / "own"), rtol=2e-3)


STEPS_OF_OWN_TOKENS = """
import json, os, sys
import numpy as np
import llamac
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
trainer = llamac.Trainer(sys.argv[1], steps=4, seq_len=16, batch_size=2 // ranks, total_batch_size=4 * 16)
tokens, targets = np.random.default_rng(1).integers(0, 97, (2, 4, 16))
targets[2, 3:] = -100
# Micro-batch after micro-batch: with two ranks, each has one row of either.
rows = slice(None) if ranks == 1 else slice(rank, None, 2)
numbers = [trainer.step(tokens[rows], targets[rows], counted) for counted in (False, True, False, True)]
if rank == 0:
    open(sys.argv[2], "w").write(json.dumps(numbers))
"""


@pytest.mark.usefixtures("one_thread")
def test_python_steps_on_tokens_of_each_rank(build, tmp_path):
    """The losses of one process, which has the rows of both; one rank has all targets that do not count."""
    made = []
    for ranks in (1, 2):
        command = [sys.executable, "-c", STEPS_OF_OWN_TOKENS, MODEL, tmp_path / f"{ranks}.json"]
        assert [code for code, _ in as_ranks(command, ranks)] == [0] * ranks
        made.append(json.loads((tmp_path / f"{ranks}.json").read_text()))
    np.testing.assert_allclose(made[1], made[0], rtol=2e-6)


def test_ranks_write_a_block_at_the_same_time(train, data, tmp_path):
    """At level 3 all gather block after block: each writes some of its tensors, and as many bytes;
    transformers opens the checkpoint.
    """
    train(*flags(data, tmp_path, devices=2, batch_size=2, zero=3, steps=4))
    folder = tmp_path / "step_000004"
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for layer in range(2):
        assert len({file for name, file in files.items() if f".layers.{layer}." in name}) == 2
    small, large = sorted((folder / file).stat().st_size for file in set(files.values()))
    assert large < 1.2 * small
    transformers = pytest.importorskip("transformers")
    state = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, weight in tensors(folder, "model").items():
        np.testing.assert_array_equal(state[name].float().numpy(), weight)


def test_the_program_among_torchruns_processes(build, train, data, tmp_path):
    command = [build / "train_llama3", *flags(data, tmp_path / "a", steps=4, batch_size=2)]
    assert as_ranks(command, 2) == [(0, ""), (0, "")]
    train(*flags(data, tmp_path / "b", steps=4, batch_size=2, devices=2))
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")


def test_ranks_with_other_caches_of_algorithms(build, train, data, gpu, tmp_path):
    """Rank 1 has timed the matrix products before, rank 0 has not: they time them together."""
    if not gpu:
        pytest.skip("a CPU build times no algorithms")
    more = {"steps": 3, "batch_size": 2, "dtype": "bf16", "gemm_cache": "auto"} | SHORT
    train(
        *flags(data, tmp_path / "alone", **more),
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache1")},
    )
    assert list((tmp_path / "cache1").rglob("*.json"))
    own = {rank: {"XDG_CACHE_HOME": str(tmp_path / f"cache{rank}")} for rank in range(2)}
    ended = as_ranks([build / "train_llama3", *flags(data, tmp_path / "both", **more)], own=own)
    assert [code for code, _ in ended] == [0, 0], ended
    assert len(numbers(tmp_path / "both")) == 3


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.more), 1, 3])
def test_a_profile(train, data, gpu, tmp_path, zero):
    """Of rank 0: the collectives of a step, with the bytes that move, and the time that they alone take. A
    GPU computes meanwhile.
    """
    train(*flags(data, tmp_path, steps=4, batch_size=2, devices=2, zero=zero, profile=2))
    values = json.loads((tmp_path / "profile.json").read_text())
    found = {row["operation"]: row for row in values["operations"]}
    reduced, gathered = found["reduce_scatter"], found["all_gather"]
    assert "matmul_forward" in found and "all_reduce" in found
    # Gathered are the updated weights, each once: embedding, two blocks, last norm. At level 3 all are
    # gathered in the forward pass, and the first block again in the backward pass: the second took its place.
    again = gathered["bytes"] - reduced["bytes"]
    assert (reduced["calls"], gathered["calls"]) == (2 * 4, 2 * (5 if zero == 3 else 4))
    if zero == 3:
        rest = reduced["bytes"] - 2 * again  # the embedding and the norm, in whole units of a shard
        assert 4 * 98 * 48 <= rest <= 4 * 130 * 48
    else:
        assert again == 0
    seconds = sum(row["seconds"] for row in found.values()) + values["idle_seconds"]
    own = sum(found[name]["seconds"] for name in ("reduce_scatter", "all_gather", "all_reduce"))
    hidden = own - values["exposed_communication_seconds"]
    assert seconds - hidden == pytest.approx(values["seconds"], rel=1e-3)
    assert 0 <= hidden < own if gpu else hidden == pytest.approx(0, abs=1e-3 * own)


def test_ranks_share_the_reading_of_a_checkpoint(build, train, data, tmp_path, fault):
    """Damage that one of them finds, all know. The index is loaded by both, and checked by one."""
    out, more = tmp_path / "out", {"batch_size": 2, "zero": 3, "resume": "auto"}
    train(*flags(data, out, devices=2, steps=8, **more | {"resume": "none"}))
    shard = out / "step_000008/model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    train(*flags(data, out, devices=2, **more))
    assert (out / "damaged_step_000008").exists() and (out / "step_000008").exists()
    files = [tmp_path / f"counts{rank}" for rank in range(2)]
    index = fault(out / "step_000008/model.safetensors.index.json", "none", 0, "0")
    command = [build / "train_llama3", *flags(data, out, **more)]
    own = {rank: index | {"CHAOS_COUNTS": str(file)} for rank, file in enumerate(files)}
    assert as_ranks(command, 2, own) == [(0, ""), (0, "")]
    assert sum(int(re.search(r"^read (\d+)$", file.read_text(), re.MULTILINE)[1]) for file in files) == 3


@pytest.mark.parametrize(
    ("zero", "group"),
    [pytest.param(0, 0, marks=pytest.mark.more), pytest.param(1, 0, marks=pytest.mark.more), (3, 2)],
)
def test_ranks_read_a_checkpoint_once(build, train, data, tmp_path, fault, zero, group):
    """Each of its bytes twice, to check and to load it, by one of four ranks, which read about as many."""
    out, more = tmp_path / "out", {"batch_size": 1, "steps": 4, "dtype": "bf16", "total_batch_size": 4 * T}
    train(*flags(data, out, devices=4, **more | SHORT))
    folder, counts = out / "step_000004", [tmp_path / f"bytes{rank}" for rank in range(4)]
    below = fault(folder, "none", 0, "0")
    own = {rank: below | {"CHAOS_BYTES": str(file)} for rank, file in enumerate(counts)}
    more |= SHORT | {"zero": zero, "shard_group": group, "resume": "auto"}
    assert as_ranks([build / "train_llama3", *flags(data, out, **more)], 4, own) == [(0, "")] * 4
    read, size = [int(file.read_text()) for file in counts], sum(f.stat().st_size for f in folder.iterdir())
    small = 4 * 48 << 10  # the manifest, the configuration and headers, by each
    assert 1.5 * size < sum(read) < 2 * size + small < 3 * size, (read, size)
    assert max(read) < 1.5 * sum(read) / 4, read


BAD = {
    "batch": ({"devices": 2, "total_batch_size": 4 * T}, "devices = 4 * 16 * 2 = 128"),
    "level": ({"devices": 2, "zero": 4}, "--zero: expected an integer from 0 to 3, found 4"),
    "data": ({"devices": 2, "train_data": "nowhere_*.bin"}, "nowhere_*.bin"),
    "type": ({"devices": 2, "reduce_dtype": "f64"}, "--reduce-dtype: expected"),
    "a sample": ({"sample_tokens": 1 << 40}, "--sample-tokens: expected an integer from 1 to 16777216"),
    "no devices": ({"devices": 0}, "--devices: expected an integer"),
    "groups": ({"devices": 4, "shard_group": 3}, "--shard-group: expected a divisor of the number of ranks"),
    "a large group": ({"devices": 2, "shard_group": 4}, "ranks, 2, or 0 for all of them, found 4"),
    "a group alone": ({"shard_group": 2}, "ranks, 1, or 0 for all of them, found 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(train, data, tmp_path, case):
    """One line from one rank."""
    more, expected = BAD[case]
    assert expected in one_line(train(*flags(data, tmp_path / "out", **more), code=2))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name, values",
    [
        ("--lr", ("0.001", "0.002")),
        ("--checkpoint-async", ("on", "off")),
        ("--tp", ("1", "2")),
        ("--cp", ("1", "2")),
        ("--pp", ("2", "1")),
        ("--tp", ("2", "2", "2", "4")),
    ],
    ids=str,
)
def test_ranks_that_disagree(build, data, tmp_path, name, values):
    line = [build / "train_llama3", *flags(data, tmp_path / "out", batch_size=2)]
    ended = as_ranks([[*line, name, value] for value in values], len(values))
    rank = len(values) - 1
    said = f"train_llama3: rank {rank}: {name}: expected {values[0]}, as rank 0 has it, found {values[-1]}\n"
    assert ended == [(2, said), *[(2, "")] * rank]


WRONG_VARIABLES = {
    "no port": ({"MASTER_PORT": ""}, "environment: MASTER_PORT: expected it from torchrun, found none"),
    "no number": ({"WORLD_SIZE": "two"}, "environment: WORLD_SIZE: expected an integer"),
}


@pytest.mark.parametrize("case", WRONG_VARIABLES)
def test_variables_that_are_wrong_for_all(build, case):
    """One line, though the ranks cannot find one another."""
    wrong, expected = WRONG_VARIABLES[case]
    (code, said), other = as_ranks([build / "train_llama3"], own=dict.fromkeys(range(2), wrong))
    assert expected in one_line(said) and (code, other) == (2, (2, ""))


def test_an_interface_that_is_not_there(train, data, tmp_path):
    more = {"devices": 2, "batch_size": 2}
    done = train(
        *flags(data, tmp_path / "out", **more), code=2, env=os.environ | {"GLOO_SOCKET_IFNAME": "none0"}
    )
    assert 'GLOO_SOCKET_IFNAME: expected a network interface of this host, found "none0"' in one_line(done)
    assert not (tmp_path / "out").exists()


def test_a_run_knows_its_number_of_devices(train, data, tmp_path):
    more = {"devices": 2, "batch_size": 2, "total_batch_size": 4 * T, "schedule": "constant"}
    more |= {"zero": 2, "dtype": "bf16"}
    train(*flags(data, tmp_path / "whole", **more))
    train(*flags(data, tmp_path / "out", **more, steps=4))
    said = train("--resume", "auto", "--out", tmp_path / "out", "--steps", "8").stdout
    assert "settings: --steps was 4, is 8\n" in said
    assert [event["ranks"] for event in events(tmp_path / "out", "run")] == [2, 2]
    assert numbers(tmp_path / "out") == numbers(tmp_path / "whole")
    assert_same_state(tmp_path / "out/step_000008", tmp_path / "whole/step_000008")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said to differ: a script starts no processes
        by_folder = llamac.Trainer(resume="auto", out=tmp_path / "out")
        assert by_folder.steps_done == llamac.Trainer(tmp_path / "out/step_000008").steps_done == 8


def test_a_missing_shard(train, data, tmp_path):
    train(*flags(data, tmp_path, devices=2, batch_size=2, steps=4))
    (tmp_path / "step_000004/optimizer-00002-of-00002.safetensors").unlink()
    again = flags(data, tmp_path, devices=2, batch_size=2, resume=tmp_path / "step_000004")
    line = one_line(train(*again, code=2))
    assert "optimizer-00002-of-00002.safetensors" in line


def test_the_plan_of_many(train, data, tmp_path):
    """Without any of the devices: less of everything that is shared."""

    def planned(**more) -> float:
        more |= {"batch_size": 1, "model": "llama3.2-1b"}
        out = train(*flags(data, tmp_path / "out", **more), "--dry-run").stdout
        sizes = re.findall(r"^  (\w.*?) +\d+ +(\d+\.\d)$", out.split("\n  total ")[0], re.MULTILINE)
        return sum(float(size) for name, size in sizes if name != "runtime, other programs")

    found = [planned(devices=8, zero=level) for level in range(4)]
    assert found[0] > found[1] > found[2] > found[3]
    assert planned(devices=8, zero=3, shard_group=4) == planned(devices=4, zero=3) > found[3]
    assert planned(devices=8, zero=3, reduce_dtype="bf16") > found[3]
    assert planned(devices=8, zero=3, reduce_dtype="f32") == found[3]
    assert not (tmp_path / "out").exists()


def test_the_plan_reserves_memory_for_communicators(train, data, tmp_path):
    """One of all ranks, or three with groups: 192 MiB each, beside 512 MiB for the runtime."""
    for devices, group, communicators in ((1, 0, 0), (2, 0, 1), (4, 4, 1), (4, 2, 3)):
        more = {"devices": devices, "shard_group": group, "batch_size": 1}
        plan = [*flags(data, tmp_path / "out", **more), "--dry-run", "--device-memory"]
        reserved = 512 + 192 * communicators
        assert f"needs {reserved / 1024:.2f} GiB" in one_line(train(*plan, f"{reserved}MiB", code=2))
        train(*plan, f"{reserved + 4}MiB")


@pytest.mark.parametrize(("zero", "master", "kept"), [(2, "on", True), (3, "off", True), (3, "on", False)])
def test_shared_weights_beside_a_master_are_not_kept(train, data, tmp_path, zero, master, kept):
    more = {"devices": 2, "dtype": "bf16", "zero": zero, "master_weights": master}
    out = train(*flags(data, tmp_path / "out", **more), "--dry-run").stdout
    assert any(line.startswith("  weights ") for line in out.splitlines()) == kept


def test_a_plan_for_another_machine(train, tmp_path):
    """70B on eight devices: accepted for 192 GiB each; for 139 GiB, with the flags that the refusal names."""
    write_bin(tmp_path / "train.bin", np.zeros(9000, np.uint32), 128256)
    values = {
        "config": "configs/llama3.1-70b.toml",
        "train-data": tmp_path / "train.bin",
        "tokenizer": "none",
    }
    values |= {"val-data": "none", "out": tmp_path / "out", "devices": 8}
    plan = [*(f"--{name}={value}" for name, value in values.items()), "--dry-run", "--device-memory"]
    assert "dry run: the run fits" in train(*plan, "192GiB").stdout
    line = one_line(train(*plan, "139GiB", code=2))
    assert "of 139.00 GiB; it fits with " in line
    more = line.split("; it fits with ")[1].split()
    assert more == ["--optimizer-state", "bf16"]
    assert "dry run: the run fits" in train(*plan, "139GiB", *more).stdout
    for wrong in ("139", "0GiB", "many GiB", "1e30GiB"):
        assert "--device-memory: expected a size" in one_line(train(*plan, wrong, code=2))
    assert "--dry-run" in one_line(train("--device-memory", "1GiB", code=2))
