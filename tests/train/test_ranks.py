"""train_llama3.py on several processes: torchrun, gloo, two ranks on this machine's CPU."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from run import ROOT, reference_flags

import train_llama3 as ref
from llamac.base import random
from llamac.base.log import read_log
from llamac.model import hf
from llamac.model.config import load_config
from llamac.training.options import parse
from llamac.training.weights import Part

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks want two GPUs"),
]
UNTIED = str(ROOT / "tests/models/untied-mha.json")
SMALL = {"dtype": "bf16", "grad_dtype": "bf16", "master_weights": "off", "optimizer_state": "bf16"}


def torchrun_command(script: Path, *arguments: str) -> list[str]:
    # The agent's own address by number: where the host's name does not resolve, it waits for ever.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [*command, "--nproc-per-node", "2", "--", str(script), *arguments]


def torchrun(script: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = torchrun_command(script, *arguments)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def run_flags(data: Path, out: Path, **extra) -> list[str]:
    """Steps of 2·2·2 sequences: on one process twice the micro-batches."""
    size = {"steps": 4, "batch_size": 2, "total_batch_size": 2 * 2 * 2 * 16, "model": UNTIED}
    return reference_flags(data, out, **size | extra)


def compare(data: Path, folder: Path, extra: dict, rel: float) -> None:
    """The run at folder/ranks, of two processes, and the same on one with twice the accumulation."""
    one, two = folder / "one", folder / "ranks"
    ref.train(parse(run_flags(data, one, **extra)))
    found, expected = map(read_log, (two / "log.jsonl", one / "log.jsonl"))
    assert [e["step"] for e in found] == [e["step"] for e in expected]
    for key, bound in (("loss", rel), ("grad_norm", 10 * rel)):
        assert [e[key] for e in found] == pytest.approx([e[key] for e in expected], rel=bound)
    shapes = dict(load_config(one / "model").parameters())
    weights = [dict(hf.read_weights(x / "model", shapes)) for x in (two, one)]
    assert weights[0].keys() == weights[1].keys()
    for name, w in weights[1].items():
        other = weights[0][name]
        assert (other.dtype, other.shape) == (w.dtype, w.shape)
        assert (other.double() - w.double()).norm() <= 10 * rel * w.double().norm(), name
    assert (two / "model/config.json").read_text() == (one / "model/config.json").read_text()


@pytest.mark.more
def test_two_processes_are_one_with_twice_the_accumulation(data, tmp_path):
    """In f32 to the order of sums."""
    line = run_flags(data, tmp_path / "ranks", profile=2)
    done = torchrun(ROOT / "train_llama3.py", "--train", *line)
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "ranks/trace.json").read_text())["traceEvents"]
    names = Counter(event["name"] for event in events if event.get("ph") == "X")
    assert names["ProfilerStep#1"] == names["ProfilerStep#2"] == 1 and not names["ProfilerStep#3"]
    # Gradients are reduced once per step, not once per micro-batch: three blocks, the embedding, the head.
    assert names["c10d::_reduce_scatter_base_"] == 2 * 5
    assert "Self CPU time total" in done.stdout
    assert done.stdout.count(" parameters\n") == 1
    compare(data, tmp_path, {}, 2e-6)


DRIVER = """
import sys
from functools import partial
from pathlib import Path
import torch
from torch._dynamo.utils import counters
import train_llama3 as ref
from llamac.training.options import parse
from llamac.training.ranks import leave, rank
torch.compile = partial(torch.compile, backend="aot_eager")
optimizers = []
class AdamW(ref.AdamW):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        optimizers.append(self)
ref.AdamW = AdamW
ref.train(parse(sys.argv[1:]))
parts = optimizers[0].parts
assert not counters["graph_break"], counters["graph_break"]
sizes = {(part.weight().numel(), part.weight().dim()) for part in parts}
held = sum(part.weight().numel() for part in parts)
found = counters["stats"]["unique_graphs"] - len(sizes), held
Path(__file__).with_name(f"found{rank()}").write_text("%d %d" % found)
leave()
"""


@pytest.mark.slow
def test_compiled_on_our_operations(data, tmp_path):
    """bf16 throughout, blocks recomputed: one graph for all blocks, one for the loss, the optimizer's."""
    (tmp_path / "driver.py").write_text(DRIVER)
    extra = SMALL | {"recompute": "block:2"}
    line = [*run_flags(data, tmp_path / "ranks", **extra), "--ops", "llamac", "--compile"]
    done = torchrun(tmp_path / "driver.py", *line)
    assert done.returncode == 0, done.stderr
    # A file from each rank: what two processes print into one pipe can share a line.
    found = [map(int, (tmp_path / f"found{rank}").read_text().split()) for rank in range(2)]
    graphs, held = zip(*found, strict=True)
    assert graphs == (2, 2)
    whole = load_config(UNTIED).num_parameters()
    assert sum(held) == whole and max(held) < 0.51 * whole
    compare(data, tmp_path, extra, 2**-8)


FAILING = """
import os, sys
import train_llama3 as ref
from llamac.training.ranks import rank
calls = []
def train_step(*arguments):
    calls.append(arguments)
    if len(calls) == 2 and rank() == 1:
        raise OSError("this rank's disk is full")
    return TRAIN_STEP(*arguments)
TRAIN_STEP, ref.train_step = ref.train_step, train_step
sys.argv[1:] = ["--train", *sys.argv[1:]]
ref.run(ref.main)
"""


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others(data, tmp_path):
    (tmp_path / "driver.py").write_text(FAILING)
    begin = time.monotonic()
    done = torchrun(tmp_path / "driver.py", *run_flags(data, tmp_path / "out"))
    assert done.returncode != 0 and time.monotonic() - begin < 60
    assert "driver.py: this rank's disk is full" in done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_bad_input_is_one_line(data, tmp_path, monkeypatch, capsys, rank):
    """Rank 0's; the other one waits for torchrun to end it."""
    line = run_flags(data, tmp_path / "out", total_batch_size=96)
    waited: list[float] = []
    for name, value in (("RANK", str(rank)), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr("sys.argv", ["train_llama3.py", "--train", *line])
    with pytest.raises(SystemExit) as end:
        ref.run(ref.main)
    said = capsys.readouterr().err
    assert end.value.code == 2 and waited == [60] * rank
    assert said == "" if rank else said.endswith("found 96\n") and "devices = 64 tokens" in said
    assert said.count("\n") == 1 - rank


# Without processes: what a rank draws, rounds and starts from is its part of the whole


@pytest.mark.parametrize("start", [0, 1, 2, 5, 7, 4 * random._CHUNK - 3])
def test_random_numbers_from_the_middle(start):
    n = 4 * random._CHUNK + 9 - start
    whole = random.normal(3, 1, 8, start + n)
    assert np.array_equal(random.normal(3, 1, 8, n, start), whole[start:])
    on_device = random.normal_on("cpu", 3, 1, 8, n, start, chunk=1 << 12)
    assert np.array_equal(on_device.numpy(), whole[start:])


@pytest.mark.parametrize("hashed", [False, True])
def test_rounding_does_not_depend_on_who_holds_an_element(hashed):
    start = torch.randn(30, 7, generator=torch.Generator().manual_seed(1)).bfloat16()
    ends = []
    for cuts in ([0, 30], [0, 11, 12, 30]):
        weight = torch.nn.Parameter(start.clone())
        parts = [Part("w", 3, (30, 7), a, weight, slice(a, b)) for a, b in pairwise(cuts)]
        optimizer = ref.AdamW(parts, 0.9, 0.95, 0.1, master_weights=False, state_dtype=torch.bfloat16, seed=2)
        optimizer.hashed = hashed
        g = torch.randn(30, 7, generator=torch.Generator().manual_seed(2))
        for _ in range(2):
            optimizer.step([part.of(g) for part in parts], 1e-3)
        ends.append([weight.detach(), torch.cat(optimizer.m), torch.cat(optimizer.v)])
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b) and a.dtype == torch.bfloat16
