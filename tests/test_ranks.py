"""train_llama3.py on several processes: torchrun, gloo, two ranks on this machine's CPU."""

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from run import ROOT, assert_same_state, events, flags, losses, one_line

import llamac
import train_llama3 as ref
from llamac import hf, manifest, random
from llamac.config import load_config
from llamac.errors import InputError
from llamac.options import parse
from llamac.training import run as training
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
    return [*command, "--nproc-per-node", "2", str(script), *arguments]


def torchrun(script: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = torchrun_command(script, *arguments)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def size(**extra) -> dict:
    """Steps of 2·2·2 sequences: on one process twice the micro-batches."""
    base = {
        "steps": 4,
        "batch_size": 2,
        "total_batch_size": 2 * 2 * 2 * 16,
        "val_steps": 5,
        "sample_every": 2,
    }
    return base | {"sample_tokens": 5, "checkpoint_every": 2, "model": UNTIED} | extra


def compare(data: Path, folder: Path, extra: dict, rel: float) -> None:
    """The run at folder/ranks, of two processes, and the same on one with twice the accumulation."""
    one, two = folder / "one", folder / "ranks"
    ref.train(parse(flags(data, one, **size(**extra))))
    assert losses(two) == pytest.approx(losses(one), rel=rel)
    for kind in ("step", "val", "sample", "checkpoint"):
        assert [e["step"] for e in events(two, kind)] == [e["step"] for e in events(one, kind)]
    found, expected = ([e["loss"] for e in events(x, "val")] for x in (two, one))
    assert found == pytest.approx(expected, rel=rel)
    found, expected = ([e["grad_norm"] for e in events(x, "step")] for x in (two, one))
    assert found == pytest.approx(expected, rel=10 * rel)
    shapes = dict(load_config(one / "step_000004").parameters())
    weights = [dict(hf.read_weights(x / "step_000004", shapes)) for x in (two, one)]
    assert weights[0].keys() == weights[1].keys()
    for name, w in weights[1].items():
        other = weights[0][name]
        assert (other.dtype, other.shape) == (w.dtype, w.shape)
        assert (other.double() - w.double()).norm() <= 10 * rel * w.double().norm(), name
    assert (two / "step_000004" / "config.json").read_text() == (
        one / "step_000004" / "config.json"
    ).read_text()


def test_two_processes_are_one_with_twice_the_accumulation(data, tmp_path):
    """In f32 to the order of sums. Five validation batches: the last turn is one rank's alone."""
    line = flags(data, tmp_path / "ranks", **size(profile=2))
    done = torchrun(ROOT / "train_llama3.py", "--train", *line)
    assert done.returncode == 0, done.stderr
    profile = json.loads((tmp_path / "ranks/profile.json").read_text())
    calls = {row["variant"]: row["calls"] for row in profile["operations"]}
    # Gradients are reduced once per step, not once per micro-batch: three blocks, the embedding, the head.
    assert calls["c10d::_reduce_scatter_base_"] == 2 * 5
    assert done.stdout.count("done: ") == 1 and "2 devices x 2 x 2 x 16" in done.stdout
    compare(data, tmp_path, {}, 2e-6)
    samples = [[e["text"] for e in events(tmp_path / x, "sample")] for x in ("ranks", "one")]
    assert samples[0] == samples[1]


DRIVER = """
import sys
from functools import partial
from pathlib import Path
import torch
from torch._dynamo.utils import counters
import train_llama3 as ref
from llamac.options import parse
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
    extra = SMALL | {"recompute": "block:2", "sample_tokens": 12}
    line = [*flags(data, tmp_path / "ranks", **size(**extra)), "--ops", "llamac", "--compile"]
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
    done = torchrun(tmp_path / "driver.py", *flags(data, tmp_path / "out", **size()))
    assert done.returncode != 0 and time.monotonic() - begin < 60
    assert "driver.py: rank 1: this rank's disk is full" in done.stderr


def test_bad_input_is_one_line(data, tmp_path):
    line = flags(data, tmp_path / "out", **size(total_batch_size=96))
    done = torchrun(ROOT / "train_llama3.py", "--train", *line)
    said = [text for text in done.stderr.splitlines() if text.startswith("train_llama3.py: ")]
    assert done.returncode != 0 and len(said) == 1 and "devices = 64 tokens, found 96" in said[0]
    # What torchrun says at last, behind a page of its own, is the same.
    root_cause = done.stderr.partition("Root Cause")[2]
    assert f"traceback : {said[0].removeprefix('train_llama3.py: ')}\n" in root_cause, done.stderr


# Checkpoints


def save_again(line: list[str]) -> None:
    """Resume, and save what was read, without a step."""
    r = ref.start(parse(line))
    training.save_checkpoint(r, r.finished)
    training.end(r)


RUNS = f"""
import json, sys
import torch.distributed as dist
import train_llama3 as ref
from llamac.options import parse
from llamac.training import run as training
from llamac.training.ranks import leave
# The runs follow one another in the same processes, which meet once.
join_ranks, dist.destroy_process_group = training.join_ranks, lambda: None
training.join_ranks = lambda device: dist.is_initialized() or join_ranks(device)
{inspect.getsource(save_again)}
for argument in sys.argv[1:]:
    how, *line = json.loads(argument)
    save_again(line) if how == "again" else ref.train(parse(line))
leave()
"""
MASTER = {"dtype": "bf16", "sample_every": 0}
STEP = "step_000002"


@pytest.fixture(scope="module")
def written(train, data, tmp_path_factory):
    """Checkpoints: step 2 of 4 by one process of Python and of C, and what two processes make of them; and
    of a run of two processes, whole and resumed. In bf16, with master weights or rounded stochastically.
    """
    folder = tmp_path_factory.mktemp("written")
    alone = size(batch_size=4) | MASTER | {"steps": 2}
    ref.train(parse(flags(data, folder / "python", **alone)))
    train(*flags(data, folder / "c", **alone), "--schedule", "constant")
    runs = [["train", *flags(data, folder / "whole", **size(**SMALL))]]
    resumed = {"resume": folder / "whole" / STEP}
    runs.append(["train", *flags(data, folder / "resumed", **size(**SMALL, **resumed))])
    for name in ("python", "c"):
        more = size() | MASTER | {"resume": folder / name / STEP}
        runs.append(["again", *flags(data, folder / f"{name}-by-two", **more)])
    (folder / "driver.py").write_text(RUNS)
    done = torchrun(folder / "driver.py", *(json.dumps(list(map(str, line))) for line in runs))
    assert done.returncode == 0, done.stderr
    changed = '--steps was 2, is 4, --schedule was "constant", is "cosine", --batch-size was 4, is 2'
    assert f"{folder}/c/{STEP}: continues with other settings: {changed}\nresuming from" in done.stdout
    return folder


@pytest.mark.program
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(written):
    whole, resumed = written / "whole", written / "resumed"
    numbers = [[(e["step"], e["loss"], e["grad_norm"]) for e in events(x, "step")] for x in (whole, resumed)]
    assert numbers[1] == numbers[0][2:] and len(numbers[1]) == 2
    for kind in ("val", "sample"):
        assert events(resumed, kind) == [e for e in events(whole, kind) if e["step"] > 2]
    names = {f"{stem}-0000{r}-of-00002.safetensors" for stem in ("model", "optimizer") for r in (1, 2)}
    names |= {"config.json", "model.safetensors.index.json", "manifest.json"}
    last = resumed / "step_000004"
    assert {file.name for file in last.iterdir()} == names
    for name in names - {"manifest.json"}:
        assert (last / name).read_bytes() == (whole / "step_000004" / name).read_bytes(), name
    run = events(resumed, "run")[0]
    assert (run["origin"], run["from"]) == ("resumed", str(whole / STEP))


@pytest.mark.program
@pytest.mark.parametrize("name", ["python", "c"])
def test_two_ranks_read_the_checkpoint_of_one(written, name):
    assert_same_state(written / f"{name}-by-two" / STEP, written / name / STEP)


@pytest.mark.program
def test_one_rank_reads_the_checkpoint_of_two(written, train, data, tmp_path):
    """Of Python and of C, and both go on: like each other, as far as sums in another order let them."""
    checkpoint = written / "python-by-two" / STEP
    line = [*flags(data, tmp_path / "python", **size() | MASTER), "--resume", str(checkpoint)]
    save_again(line)
    assert_same_state(tmp_path / "python" / STEP, checkpoint)
    trainer = llamac.Trainer(checkpoint, val_data="none", batch_size=1)
    trainer.save(tmp_path / "c")
    assert_same_state(tmp_path / "c", checkpoint)
    ref.train(parse([*line, "--out", str(tmp_path / "goes-on")]))
    train(*line, "--out", tmp_path / "goes-on-in-c")
    found = [losses(tmp_path / x) for x in ("goes-on", "goes-on-in-c")]
    assert len(found[0]) == 2 and found[0] == pytest.approx(found[1], rel=2e-3)


@pytest.mark.program
def test_manifests_of_both_are_alike(written):
    python, c = (json.loads((written / x / STEP / "manifest.json").read_text()) for x in ("python", "c"))
    assert list(python) == list(c)
    for key in python.keys() - {"kernels", "config", "files", "xxh3"}:
        assert python[key] == c[key], key
    changed = {key for key in c["config"] if python["config"][key] != c["config"][key]}
    assert python["config"].keys() == c["config"].keys() and changed == {"out", "schedule"}
    roles = [[(file["name"], file["role"], file["rank"]) for file in x["files"]] for x in (python, c)]
    assert roles[0] == roles[1]


def with_manifest(checkpoint: Path, folder: Path, change: Callable[[dict], None]) -> Path:
    """A copy of the checkpoint whose manifest is changed, with the right checksum."""
    shutil.copytree(checkpoint, folder)
    fields = json.loads((folder / "manifest.json").read_text())
    del fields["xxh3"]
    change(fields)
    text = json.dumps(fields, indent=1).removesuffix("\n}").encode()
    (folder / "manifest.json").write_bytes(text + manifest._seal(text))
    return folder


MANIFESTS: dict[str, Callable[[dict], object]] = {
    "format": lambda m: m.update(format="llamac checkpoint 3"),
    "unknown": lambda m: m.update(extra=1),
    "integer": lambda m: m.update(seq_len=0),
    "type": lambda m: m.update(step="2"),
    "missing": lambda m: m.pop("dtype"),
    "choice": lambda m: m.update(master_weights="maybe"),
    "path": lambda m: m["files"][0].update(name="../config.json"),
    "twice": lambda m: m["files"].append(m["files"][0]),
    "hash": lambda m: m["files"][0].update(xxh3="0"),
    "rank": lambda m: m["files"][0].update(rank=1),
    "role": lambda m: m["files"][2].update(role="state"),
    "bytes": lambda m: m["files"][1].update(bytes=7),
    "sum": lambda m: m["files"][1].update(xxh3="0123456789abcdef"),
    "position": lambda m: m.update(data_position=1),
    "another seed": lambda m: m.update(seed=7),
    "another batch": lambda m: m.update(total_batch_size=256),
    "later": lambda m: m.update(step=9, data_position=72),
    "another step": lambda m: m.update(step=1, data_position=8),
}


@pytest.mark.program
@pytest.mark.parametrize("change", MANIFESTS)
def test_both_refuse_in_the_same_words(written, train, data, tmp_path, change):
    name = "step_000009" if change == "later" else STEP
    checkpoint = with_manifest(written / "c" / STEP, tmp_path / name, MANIFESTS[change])
    line = [*flags(data, tmp_path / "out", **size() | MASTER), "--resume", str(checkpoint)]
    with pytest.raises(InputError) as error:
        ref.train(parse(line))
    assert one_line(train(*line, code=2)) == f"train_llama3: {error.value}"
    assert not (tmp_path / "out").exists()


def test_a_signal_ends_all_ranks_after_the_same_step(data, tmp_path):
    """With a checkpoint, from which one process goes on in the same folder."""
    out = tmp_path / "out"
    line = flags(data, out, **size(steps=100000, val_every=0, checkpoint_every=0, schedule="constant"))
    agent = subprocess.Popen(
        torchrun_command(ROOT / "train_llama3.py", "--train", *line),
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (out / "log.jsonl").exists() or not events(out, "step"):
            assert agent.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        second = [w for w in workers if b"\0RANK=1\0" in Path(f"/proc/{w}/environ").read_bytes()]
        os.kill(int(second[0]), signal.SIGUSR1)
        said, errors = agent.communicate(timeout=60)
    finally:
        agent.kill()
    assert said.count("interrupted by SIGUSR1: model ") == 1, errors
    # torchrun may end a process that is about to leave when it sees that the other one has left.
    codes = re.findall(r"exitcode *: *(-?\d+) \(pid", errors)
    assert len(codes) == 2 and "138" in codes and set(codes) <= {"138", "-15"}, errors
    last = events(out, "step")[-1]["step"]
    assert [path.name for path in out.glob("step_*")] == [f"step_{last:06d}"]
    more = size(steps=last + 1, val_every=0, checkpoint_every=0, schedule="constant", sample_every=0)
    ref.train(parse(flags(data, out, **more, resume="auto")))
    assert [e["step"] for e in events(out, "step")] == list(range(1, last + 2))


# Without processes: what a rank draws, rounds and starts from is its part of the whole


@pytest.mark.parametrize("start", [0, 1, 2, 5, 7, 4 * random._CHUNK - 3])
def test_random_numbers_from_the_middle(start):
    n = 4 * random._CHUNK + 9 - start
    whole = random.normal(3, 1, 8, start + n)
    assert np.array_equal(random.normal(3, 1, 8, n, start), whole[start:])
    on_device = random.normal_on("cpu", 3, 1, 8, n, start, chunk=1 << 12)
    np.testing.assert_allclose(on_device.numpy(), whole[start:], rtol=1e-6, atol=1e-7)


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
