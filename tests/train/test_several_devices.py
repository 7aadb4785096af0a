"""Runs of several processes: what ranks share, launchers, checkpoints, signals, lost ranks, bad input."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from launch import as_ranks, needs, start_ranks, still_run, still_runs
from run import (
    MODEL,
    PRECISIONS,
    ROOT,
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

pytestmark = pytest.mark.program
SHORT = {"val_every": 0, "val_data": "none", "checkpoint_every": 0}


@pytest.fixture(autouse=True, scope="module")
def _gloo(build):
    needs(build, "GLOO", devices=1)  # plans need none
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def alone(train, data, tmp_path_factory):
    """8 steps of one rank."""
    out = tmp_path_factory.mktemp("alone") / "out"
    train(*flags(data, out, steps=8, batch_size=4, **SHORT))
    return out


GROUPED = {"devices": 4, "shard_group": 2, "batch_size": 1}
RANKS = {"2": {"devices": 2, "batch_size": 2}, "2 groups of 2": GROUPED}


@pytest.mark.parametrize("ranks", ["2", pytest.param("2 groups of 2", marks=pytest.mark.more)])
def test_the_losses_of_one_rank(train, data, tmp_path, alone, ranks):
    """In f32, at every level; levels have the same bits, down to the optimizer's state."""
    for level in range(4):
        out = tmp_path / f"zero{level}"
        train(*flags(data, out, steps=8, zero=level, **RANKS[ranks], **SHORT))
        np.testing.assert_allclose(losses(out), losses(alone), rtol=2e-6)
        assert numbers(out) == numbers(tmp_path / "zero0")
        assert_same_state(out / "step_000008", tmp_path / "zero0/step_000008")


@pytest.mark.parametrize(
    "precision, model, ranks, levels",
    [
        ("bf16", "tied-gqa", "2", (0, 1, 2, 3, 3)),
        pytest.param("fp16", "tied-gqa", "2", (0, 3), marks=pytest.mark.more),
        pytest.param("bf16", "tied-gqa", "2 groups of 2", (0, 2), marks=pytest.mark.more),
        pytest.param("bf16-throughout", "qwen2", "2 groups of 2", (0, 3), marks=pytest.mark.more),
        pytest.param("bf16-throughout", "qwen3", "2", (0, 2), marks=pytest.mark.more),
        pytest.param("bf16-throughout", "phi3", "2", (0, 3), marks=pytest.mark.more),
        pytest.param("bf16-throughout", "olmo2", "2", (0, 1, 2, 3), marks=pytest.mark.more),
        ("bf16-throughout", "gpt2", "2 groups of 2", (1, 3)),
        pytest.param("bf16-throughout", "bert", "2 groups of 2", (0, 3), marks=pytest.mark.more),
    ],
)
def test_levels_have_the_same_bits(train, data, tmp_path, precision, model, ranks, levels):
    """In 16 bits, bf16 rounded at random, with recomputation and verified steps; a level twice: again."""
    more = {"recompute": "block", "verify_every": 2, "model": ROOT / f"tests/models/{model}.json"}
    more |= PRECISIONS[precision] | RANKS[ranks] | SHORT
    more |= {"mask_token": 4} if model == "bert" else {}
    for number, level in enumerate(levels):
        out = tmp_path / str(number)
        train(*flags(data, out, steps=4, zero=level, **more))
        assert numbers(out) == numbers(tmp_path / "0")
        assert_same_state(out / "step_000004", tmp_path / "0/step_000004")


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
        train(*flags(data, out, steps=4, **GROUPED, **more))
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
        train(*flags(data, out, steps=4, **GROUPED, **more))
        rows = json.loads((out / "profile.json").read_text())["operations"]
        found[micro] = {row["operation"]: (row["calls"], row["bytes"]) for row in rows}
    assert found[1]["all_reduce"] == found[3]["all_reduce"]
    assert found[3]["reduce_scatter"] == tuple(3 * each for each in found[1]["reduce_scatter"])
    train(*flags(data, tmp_path / "zero0", steps=4, **GROUPED, **more | {"zero": 0}))
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


def test_validation_is_that_of_one_rank(train, data, tmp_path):
    """Three batches on two ranks, and samples."""
    more = {"steps": 2, "batch_size": 2, "total_batch_size": 2 * 2 * T, "val_steps": 3, "sample_every": 2}
    for devices in (1, 2):
        for level in (1, 3):
            out = tmp_path / f"{devices}-{level}"
            train(*flags(data, out, devices=devices, zero=level, **more))
            first = tmp_path / "1-1"
            found, expected = events(out, "val"), events(first, "val")
            assert found[0] == expected[0] and len(found) == len(expected) == 2
            assert [e["text"] for e in events(out, "sample")] == [e["text"] for e in events(first, "sample")]


def test_resume_with_the_same_ranks(train, data, tmp_path):
    """The bits of a run that was not interrupted."""
    more = {"devices": 2, "zero": 2, "batch_size": 2, "dtype": "bf16"}
    train(*flags(data, tmp_path / "whole", **more))
    train(*flags(data, tmp_path / "parts", **more | {"steps": 4, "schedule": "cosine"}))
    shutil.rmtree(tmp_path / "parts")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts/step_000008")
    train(*flags(data, tmp_path / "parts", resume="auto", **more))
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert_same_state(tmp_path / "parts/step_000008", tmp_path / "whole/step_000008")


SAVE_AGAIN = """
import sys, llamac
trainer = llamac.Trainer(sys.argv[1], zero=int(sys.argv[2]), shard_group=int(sys.argv[3]), batch_size=1)
trainer.save(sys.argv[4])
"""


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


RESHARDED = [
    pytest.param((4, 3, 0), (2, 1, 0), marks=pytest.mark.more),
    pytest.param((2, 2, 0), (2, 3, 0), marks=pytest.mark.more),
    ((1, 0, 0), (4, 3, 2)),
    ((4, 1, 2), (1, 0, 0)),
]


@pytest.mark.parametrize(("before", "after"), RESHARDED)
def test_resume_with_other_ranks(train, data, tmp_path, before, after):
    """Ranks, level, group: the state has the same bits, resharded, and the run goes on."""
    more = {"total_batch_size": 4 * T, "batch_size": 1, "dtype": "bf16", "val_steps": 4}
    first = {"devices": before[0], "zero": before[1], "shard_group": before[2]}
    train(*flags(data, tmp_path / "a", **more, **first))
    checkpoint = tmp_path / "a/step_000004"
    command = [sys.executable, "-c", SAVE_AGAIN, checkpoint, str(after[1]), str(after[2]), tmp_path / "again"]
    for code, text in as_ranks(command, after[0]):
        assert code == 0, text
    assert_same_state(tmp_path / "again", checkpoint)
    again = {"devices": after[0], "zero": after[1], "shard_group": after[2], "resume": checkpoint}
    train(*flags(data, tmp_path / "b", **more, **again))
    np.testing.assert_allclose(losses(tmp_path / "b"), losses(tmp_path / "a")[4:], rtol=2e-3)
    assert len(losses(tmp_path / "b")) == 4


def test_ranks_write_a_block_at_the_same_time(train, data, tmp_path):
    """At level 3 all gather block after block: each writes some of its tensors, and as many bytes."""
    train(*flags(data, tmp_path, devices=2, batch_size=2, zero=3, steps=4))
    folder = tmp_path / "step_000004"
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for layer in range(2):
        assert len({file for name, file in files.items() if f".layers.{layer}." in name}) == 2
    small, large = sorted((folder / file).stat().st_size for file in set(files.values()))
    assert large < 1.2 * small


def test_transformers_opens_the_checkpoint(train, data, tmp_path):
    transformers = pytest.importorskip("transformers")
    train(*flags(data, tmp_path, devices=2, batch_size=2, zero=3, steps=4))
    checkpoint = tmp_path / "step_000004"
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    state = model.state_dict()
    for name, weight in tensors(checkpoint, "model").items():
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


ENDLESS = {"steps": 1000000, "schedule": "constant", "batch_size": 2, "val_every": 0}


ASYNC = {"checkpoint_async": "on", "checkpoint_every": 1}


@pytest.mark.parametrize(
    "number, to_rank, saves",
    [
        (signal.SIGTERM, None, {}),
        pytest.param(signal.SIGUSR1, 1, {}, marks=pytest.mark.more),
        (signal.SIGTERM, 1, ASYNC),
        pytest.param(signal.SIGUSR1, None, ASYNC, marks=pytest.mark.more),
    ],
)
def test_a_signal(build, data, tmp_path, number, to_rank, saves):
    """To the process that started the ranks, or to one: all end, with a checkpoint of the last step."""
    process, ranks = start_ranks(build, data, tmp_path, **ENDLESS | saves, devices=2)
    os.kill(process.pid if to_rank is None else ranks[to_rank], number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number and said == ""
    last = events(tmp_path, "step")[-1]["step"]
    assert events(tmp_path, "checkpoint")[-1]["step"] == last
    assert not still_run(ranks)


@pytest.mark.parametrize(
    "rank, saves",
    [
        (0, "on"),
        pytest.param(1, "off", marks=pytest.mark.more),
        pytest.param(2, "on", marks=pytest.mark.more),
    ],
)
def test_a_lost_rank(build, train, data, gpu, tmp_path, rank, saves):
    """The others end with a line that names it, and no process is left; the newest checkpoint resumes."""
    devices = 2 if gpu else 3
    if rank == devices:
        pytest.skip("two GPUs suffice")
    endless = ENDLESS | {"devices": devices, "checkpoint_every": 2, "checkpoint_async": saves}
    process, ranks = start_ranks(build, data, tmp_path, "checkpoint", **endless, collective_timeout=10)
    os.kill(ranks[rank], signal.SIGKILL)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL
    first, *lines = said.splitlines()
    assert first == f"train_llama3: rank {rank} was ended by signal 9 (Killed)"
    assert len(lines) == devices - 1, said
    for line in lines:
        assert line.startswith(f"train_llama3: rank {rank} has ended or cannot be reached, as rank "), said
        # On a GPU its heartbeat ends a rank that waits in a collective, without a word of the run.
        assert gpu or "; the last checkpoint is " in line
    assert not still_run(ranks)
    newest = int(max(tmp_path.glob("step_*")).name[5:])
    again = endless | {"steps": newest + 2, "resume": "auto"}
    train(*flags(data, tmp_path, **again))
    assert [e["step"] for e in events(tmp_path, "step")] == list(range(1, newest + 3))


def test_a_rank_that_is_killed_at_once(build, data, tmp_path):
    """Before the ranks have met: the flags' limit holds already."""
    command = [build / "train_llama3", *flags(data, tmp_path / "out", devices=2, collective_timeout=2)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 30
    while not (ranks := children.read_text().split()):
        assert time.monotonic() < deadline
    os.kill(int(ranks[0]), signal.SIGKILL)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL
    assert said.startswith("train_llama3: rank 0 was ended by signal 9 (Killed)\n")


NO_SECOND_RANK = """
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
int execv(const char* path, char* const* arguments) {
    const char* rank = getenv("RANK");
    if (!rank || *rank != '1') return execve(path, arguments, environ);
    errno = ENOMEM;
    return -1;
}
"""


def test_a_rank_whose_program_cannot_start(train, data, tmp_path):
    """The process is there, but execve fails: the only line that names the cause is its own."""
    (tmp_path / "no.c").write_text(NO_SECOND_RANK)
    subprocess.run(
        ["cc", "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", tmp_path / "no.so", tmp_path / "no.c"], check=True
    )
    options = flags(data, tmp_path / "out", devices=2, collective_timeout=1)
    done = train(*options, code=2, env=os.environ | {"LD_PRELOAD": str(tmp_path / "no.so")})
    expected = "rank 1: cannot start the program again: Cannot allocate memory"
    assert done.stderr.startswith(f"train_llama3: {expected}\n")


# A rank, the kind of a call that is slow on it, the files that it concerns, and --checkpoint-async.
SLOW = [
    pytest.param(0, "fsync", "out", "off", marks=pytest.mark.more),
    (1, "fsync", "out", "on"),
    pytest.param(1, "read", "data", "off", marks=pytest.mark.more),
    pytest.param(0, "write", "out/log", "on", marks=pytest.mark.more),
]


@pytest.mark.parametrize(("rank", "call", "below", "saves"), SLOW)
def test_a_slow_rank_is_waited_for(build, data, tmp_path, fault, rank, call, below, saves):
    """Files that take longer than --collective-timeout, of one rank alone."""
    shutil.copytree(data, tmp_path / "data")
    more = {"steps": 3, "batch_size": 2, "checkpoint_every": 2, "collective_timeout": 1, "zero": 3}
    command = [build / "train_llama3"]
    command += flags(tmp_path / "data", tmp_path / "out", checkpoint_async=saves, **more)
    assert as_ranks(command, 2, {rank: fault(tmp_path / below, call, 4, "sleep:3")}) == [(0, ""), (0, "")]
    assert [e["step"] for e in events(tmp_path / "out", "step")] == [1, 2, 3]


def test_the_watchdog_limits_the_wait(build, data, tmp_path, fault):
    shutil.copytree(data, tmp_path / "data")
    more = {"batch_size": 2, "collective_timeout": 1, "watchdog": 2}
    command = [build / "train_llama3", *flags(tmp_path / "data", tmp_path / "out", **more)]
    began = time.monotonic()
    ended = as_ranks(command, 2, {1: fault(tmp_path / "data", "open", 2, "sleep:6")})
    assert ended[0][0] == 2 and "rank 1 did not answer in time, as rank 0 found" in ended[0][1]
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.more)])
def test_an_own_error_wins(build, data, tmp_path, fault, rank):
    """One rank cannot read, while the other one still reads, or does not answer any more."""
    shutil.copytree(data, tmp_path / "data")
    for slow in ("sleep:3", "kill"):
        command = [build / "train_llama3"]
        command += flags(tmp_path / "data", tmp_path / slow, batch_size=2, collective_timeout=1)
        own = {
            rank: fault(tmp_path / "data", "read", 2, "5"),
            1 - rank: fault(tmp_path / "data", "read", 2, slow),
        }
        ended = as_ranks(command, 2, own)
        assert ended[rank][0] == 2 and "cannot read: Input/output error" in one_line(ended[rank][1])
        assert slow == "kill" or ended[1 - rank] == (2, "")


@pytest.mark.parametrize(("rank", "call", "number"), [(0, "rename", 1), (1, "open", 3)])
def test_a_checkpoint_that_one_rank_cannot_write(build, data, tmp_path, fault, rank, call, number):
    """Shared weights: the others gather them at that time, and do not wait for the one that fails."""
    command = [build / "train_llama3"]
    command += flags(data, tmp_path / "out", batch_size=2, checkpoint_every=2, zero=3, checkpoint_async="off")
    began = time.monotonic()
    ended = as_ranks(command, 2, {rank: fault(tmp_path / "out", call, number, "28")})
    assert ended[rank][0] == 2 and "No space left" in one_line(ended[rank][1])
    assert ended[1 - rank] == (2, "") and time.monotonic() - began < 20


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.more), 3])
def test_validation_that_one_rank_cannot_read(build, data, tmp_path, zero):
    """A token beyond the vocabulary in the batch of rank 1: one line, in time, with all finished steps."""
    shutil.copy(data / "val_000.bin", tmp_path / "val.bin")
    out = tmp_path / "out"
    more = ENDLESS | {"val_data": tmp_path / "val.bin", "val_every": 20, "checkpoint_every": 0, "zero": zero}
    process, ranks = start_ranks(build, data, out, **more, devices=2, collective_timeout=60)
    with open(tmp_path / "val.bin", "r+b") as file:
        file.seek(1024 + 2 * (2 * T + 5))
        file.write(b"\xff\xff")
    began = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and time.monotonic() - began < 20
    last = events(out, "step")[-1]["step"]
    assert f"rank 1: {tmp_path / 'val.bin'}: " in one_line(said) and f"step_{last:06d}" in said
    assert all(0 < e["loss"] < 10 for e in events(out, "val"))
    assert events(out, "checkpoint")[-1]["step"] == last and not still_run(ranks)


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


@pytest.mark.parametrize("saves", [{}, {"checkpoint_async": "on", "checkpoint_every": 2}])
def test_a_thread_that_cannot_start(train, data, tmp_path, fault, saves):
    """One line, and the steps that are finished: 2 of them, where it is the thread that would save them."""
    number = {"OPENBLAS_NUM_THREADS": "1"} | fault(tmp_path, "thread", 2 if saves else 1, "11")
    done = train(*flags(data, tmp_path / "out", **saves), code=2, env=os.environ | number)
    line = one_line(done)
    assert "cannot start a thread: Resource temporarily unavailable" in line
    assert ("step_000002" in line) == bool(saves)
    assert (tmp_path / "out/step_000002/manifest.json").exists() == bool(saves)


def test_a_rank_that_hangs(build, data, tmp_path):
    """The others end when --collective-timeout is over, and --devices ends the one that hangs."""
    process, ranks = start_ranks(build, data, tmp_path, **ENDLESS, devices=3, collective_timeout=3)
    os.kill(ranks[1], signal.SIGSTOP)
    began = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and time.monotonic() - began < 3 + 2 + 5 + 5
    assert (
        len(said.splitlines()) == 2 and said.count("train_llama3: rank 1 did not answer in time, as ") == 2
    ), said
    assert not still_run(ranks)


def test_a_signal_while_a_rank_hangs(build, data, tmp_path):
    """The ranks cannot agree on a step: they end within seconds, as launchers expect it, and save nothing."""
    more = ENDLESS | {"devices": 2, "checkpoint_every": -1}
    process, ranks = start_ranks(build, data, tmp_path, **more)
    os.kill(ranks[1], signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(ranks[0], signal.SIGTERM)
    deadline = time.monotonic() + 10
    while still_runs(ranks[0]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(ranks[1], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert (
        said == "train_llama3: SIGTERM: the other ranks do not answer: ended at once, without a checkpoint\n"
    )


def test_data_that_one_rank_cannot_read(build, data, tmp_path):
    """All ranks end at the same step, with its checkpoint and one line that names it, not the one before."""
    shard = tmp_path / "train.bin"
    shutil.copy(data / "train_000.bin", shard)
    out = tmp_path / "out"
    more = ENDLESS | {"train_data": str(shard), "devices": 2, "collective_timeout": 10}
    more["checkpoint_every"] = 20
    process, ranks = start_ranks(build, data, out, "checkpoint", **more)
    os.truncate(shard, 1024)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and len(said.splitlines()) == 1, said
    last = events(out, "step")[-1]["step"]
    assert str(shard) in said and f"step_{last:06d}" in said
    assert not still_run(ranks)


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
    train(*flags(data, tmp_path / "whole", **more))
    train(*flags(data, tmp_path / "out", **more, steps=4))
    said = train("--resume", "auto", "--out", tmp_path / "out", "--steps", "8").stdout
    assert "settings: --steps was 4, is 8\n" in said
    assert [event["ranks"] for event in events(tmp_path / "out", "run")] == [2, 2]
    assert numbers(tmp_path / "out") == numbers(tmp_path / "whole")
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
