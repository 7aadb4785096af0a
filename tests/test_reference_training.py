"""Training with the reference model (train_llama3.py): AdamW against torch's, sampling, whole runs."""

import json
import math
import re
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import train_llama3 as ref
from llamac import random
from llamac.config import load_config
from llamac.data import write_bin
from llamac.errors import InputError
from llamac.options import Options, parse
from llamac.plot import read_log
from llamac.spikes import SpikeDetector
from llamac.training.rounding import hashed_bits, moment_bits, stochastic_round
from llamac.training.run import Step, check_supported, finish
from llamac.training.sampling import sample_token
from llamac.training.weights import Part, fuse_products, init_weights, parts

ROOT = Path(__file__).resolve().parents[1]


pytestmark = pytest.mark.usefixtures("one_thread")


def gradients(shapes: list[torch.Size], step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def whole(weights: list[torch.nn.Parameter]) -> list[Part]:
    return [Part(f"{k}", k, tuple(p.shape), 0, p, slice(None)) for k, p in enumerate(weights)]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adamw_is_torchs(compiled):
    """Ten steps with a learning rate that changes, which compiled code must not take for a constant."""
    torch.manual_seed(3)
    ours = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((7, 5), (11,))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    groups = [{"params": [p], "weight_decay": 0.1 if p.dim() == 2 else 0.0} for p in theirs]
    expected = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    optimizer = ref.AdamW(whole(ours), 0.9, 0.95, 0.1, state_dtype=torch.float64, compiled=compiled)
    for step in range(1, 11):
        grads = gradients([p.shape for p in ours], step)
        for p, g, group in zip(theirs, grads, expected.param_groups, strict=True):
            p.grad, group["lr"] = g, 0.01 * step
        expected.step()
        optimizer.step(grads, 0.01 * step)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hashed", [False, True])
def test_bf16_weights_follow_fp32_ones(hashed):
    """Updates below half a bf16 ulp: the master copy is the fp32 run's weight; without one the mean
    follows it.
    """
    runs = {}
    for name, dtype, master in (
        ("fp32", torch.float32, True),
        ("master", torch.bfloat16, True),
        ("none", torch.bfloat16, False),
    ):
        weight = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
        optimizer = ref.AdamW(whole([weight]), 0.9, 0.95, 0.0, master_weights=master, seed=9)
        optimizer.hashed = hashed  # as on a GPU
        for step in range(1, 21):
            optimizer.step([0.3 + gradients([weight.shape], step)[0].float()], 1e-3)
        runs[name] = weight.detach(), optimizer.master[0]
    exact = runs["fp32"][0]
    assert torch.equal(runs["master"][1], exact)
    assert torch.equal(runs["master"][0], exact.bfloat16())
    moved = (1 - exact).mean()
    assert moved > 2**-8  # rounding to nearest would leave nearly every weight at 1
    assert (1 - runs["none"][0].float()).mean() == pytest.approx(moved.item(), rel=0.1)


def test_stochastic_rounding():
    x = torch.tensor([1.0, 1 + 2**-9, -1 - 3 * 2**-9, 0.0, 3e-40]).repeat_interleave(1 << 16)
    words = (torch.arange(1 << 16, dtype=torch.int32) << 16).repeat(5)  # every value of the upper half once
    rounded = stochastic_round(x, words).float().view(5, -1)
    torch.testing.assert_close(rounded.double().mean(1), x.view(5, -1)[:, 0].double(), rtol=0, atol=1e-45)
    assert [len(row.unique()) for row in rounded] == [1, 2, 2, 1, 2]


def test_a_byte_rounds_a_moment():
    """For every cut-off part, over all bytes: right to 2^-9 of a step, without a bias over all parts; m, v
    and the weight have bits of their own.
    """
    tails = torch.arange(1 << 16, dtype=torch.int32)
    x = (tails + 0x3F80_0000).view(torch.float32)
    word = np.arange(256, dtype=np.uint32)
    m, v = moment_bits(word << 8 | 0xAB00_0000)[0], moment_bits(word | 0xAB00_FF00)[1]
    for words in (m, v):
        assert len(np.unique(words)) == 256
        ups = sum(
            (stochastic_round(x, torch.tensor(w).expand(1 << 16)) > 1).int() for w in words.view(np.int32)
        )
        error = ups.double() / 256 - tails.double() / 65536
        assert error.abs().max() <= 2**-9 and abs(error.mean()) < 1e-5
    unmoved = moment_bits(word << 16)
    assert all(len(np.unique(w)) == 1 for w in unmoved)


def test_stochastic_rounding_by_a_hash():
    """The share that is rounded up within five standard errors, in every stretch and for every seed; what two
    seeds round up is independent.
    """
    n, share = 1 << 20, 0.3
    x = torch.full((n,), 1 + share * 2**-7)
    ups = [stochastic_round(x, torch.tensor(seed, dtype=torch.int32)) > 1 for seed in (0, 1, -(2**31))]
    error = math.sqrt(share * (1 - share) / n)
    for up in ups:
        assert abs(up.double().mean() - share) < 5 * error
        assert ((up.double().view(64, -1).mean(1) - share).abs() < 5 * error * 8).all()
    for a, b in ((ups[0], ups[1]), (ups[0], ups[2]), (ups[0][1:], ups[0][:-1])):
        both = share * share
        assert abs((a & b).double().mean() - both) < 5 * math.sqrt(both * (1 - both) / n)


def test_hashed_words_are_murmurs():
    """Also compiled: MurmurHash3's fmix32 in wrapping unsigned arithmetic."""
    seed, n = -5, 1000
    with np.errstate(over="ignore"):
        x = np.arange(n, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(seed & 0xFFFFFFFF)
        x = (x ^ x >> 16) * np.uint32(0x85EBCA6B)
        x = (x ^ x >> 13) * np.uint32(0xC2B2AE35)
    expected = (x ^ x >> 16).view(np.int32).tolist()
    for function in (hashed_bits, torch.compile(hashed_bits)):
        assert function(torch.tensor(seed, dtype=torch.int32), n).tolist() == expected


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("name", ["tied-gqa", "wide-heads"])
def test_fused_products_change_nothing(name, biases):
    """Names, weights, logits and the gradients of two backward passes, in double."""
    config = load_config(ROOT / "tests" / "models" / f"{name}.json")
    config = replace(config, attention_bias=biases, mlp_bias=biases)
    tokens, targets = torch.from_numpy(np.random.default_rng(7).integers(config.vocab_size, size=(2, 2, 17)))
    cis, results = ref.precompute_cis(config, 17, dtype=torch.float64), []
    for fused in (False, True):
        model = ref.empty_model(config, torch.float64)
        if fused:
            fuse_products(model)
            # qkv, o, gate_up, down, perhaps their biases, and two norms
            assert len(list(model.model.layers[1].parameters())) == 6 + 4 * biases
        init_weights(model, 5)
        found_parts = parts(model)
        assert [(part.name, part.shape) for part in found_parts] == config.parameters()
        found = {part.name: part.weight().clone() for part in found_parts}
        for _ in range(2):
            model(tokens, cis, targets).backward()
        found |= {f"grad {part.name}": part.of(part.parameter.grad) for part in found_parts}
        results.append(found)
    for tensor, expected in results[0].items():
        torch.testing.assert_close(results[1][tensor], expected, rtol=1e-10, atol=1e-14)


def test_sample_token():
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, -math.inf])
    assert sample_token(logits, 0.0, 0, 0.99) == 1
    assert sample_token(logits, 1.0, 1, 0.99) == 1
    assert [sample_token(logits, 1.0, 2, u) for u in (0.01, 0.49, 0.51, 0.99)] == [1, 1, 3, 3]
    drawn = [sample_token(logits, 0.7, 0, (i + 0.5) / 20000) for i in range(20000)]
    shares = torch.bincount(torch.tensor(drawn), minlength=5) / 20000
    torch.testing.assert_close(shares, (logits / 0.7).softmax(0), rtol=0, atol=1e-4)


def run_training(folder: Path, out: str, *flags: str) -> list[dict]:
    """A short run on random tokens; returns the events of its log."""
    write_bin(folder / "train.bin", np.random.default_rng(0).integers(97, size=1000), 97)
    data = folder / "train.bin"
    base = f"--model {ROOT}/tests/models/tied-gqa.json --train-data {data} --val-data {data}"
    base += " --seq-len 16 --batch-size 4 --steps 4 --warmup-steps 2 --min-lr-frac 0.1"
    base += (
        f" --sample-every 2 --sample-tokens 5 --checkpoint-every 1 --keep-checkpoints 2 --out {folder}/{out}"
    )
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    ref.train(parse([*base.split(), *flags]))
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers
    return read_log(folder / out / "log.jsonl")


def values(events: list[dict], event: str, field: str) -> list:
    """One field of all events of a kind."""
    return [e[field] for e in events if e["event"] == event]


@torch.no_grad()
def generated(model: LlamaForCausalLM, step: int) -> str:
    """Five tokens by transformers' model, with the random numbers that the sample at this step has."""
    tokens = [model.config.bos_token_id]
    for u in random.uniform(42, step, 0xFFFFFFFF, 5):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(sample_token(logits, 0.8, 50, u))
    return " ".join(map(str, tokens[1:]))


def test_training_run(tmp_path):
    events = run_training(tmp_path, "a")
    kinds = [e["event"] for e in events]
    assert (kinds[:3], kinds.count("step"), kinds.count("sample")) == (["run", "start", "val"], 4, 2)
    assert values(events, "val", "step") == [0, 4]
    assert values(events, "step", "lr") == pytest.approx([0.0015, 0.003, 0.00165, 0.0003])
    assert sorted(p.name for p in (tmp_path / "a").glob("step_*")) == ["step_000003", "step_000004"]
    assert (tmp_path / "a" / "loss.png").exists()
    again = run_training(tmp_path, "b")
    assert values(again, "step", "loss") == values(events, "step", "loss")
    assert values(again, "sample", "text") == values(events, "sample", "text")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "step_000004")
    assert generated(model, step=4) == values(events, "sample", "text")[-1]
    last = load_file(tmp_path / "a" / "step_000004" / "model.safetensors")
    assert all(torch.equal(last[name], p) for name, p in model.named_parameters())
    loaded = run_training(tmp_path, "c", "--model", str(tmp_path / "a" / "step_000004"), "--init", "load")
    assert values(loaded, "val", "loss")[0] == values(events, "val", "loss")[-1]


@pytest.mark.parametrize(
    "flags", [("--batch-size", "2", "--total-batch-size", "64"), ("--recompute", "block:2")]
)
def test_same_training_by_other_means(tmp_path, flags):
    """Micro-batchs and recomputed blocks change rounding at most."""
    expected, found = run_training(tmp_path, "a"), run_training(tmp_path, "b", *flags)
    assert values(found, "step", "loss") == pytest.approx(values(expected, "step", "loss"), rel=1e-6)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--recompute", "block:2"), marks=pytest.mark.slow),
        pytest.param(("--dtype", "bf16", "--total-batch-size", "128"), marks=pytest.mark.slow),
        ("--dtype", "bf16", "--grad-dtype", "bf16", "--master-weights", "off", "--optimizer-state", "bf16"),
    ],
)
def test_compiled_training_has_no_breaks(tmp_path, monkeypatch, flags):
    """The losses of the eager run; nothing that the compiler cannot follow, and no graph made a second time:
    one of the model, one of the optimizer a size of parameter (and what reads its results).
    """
    expected = run_training(tmp_path, "a", *flags)
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    found = run_training(tmp_path, "b", *flags, "--compile")
    assert values(found, "step", "loss") == pytest.approx(values(expected, "step", "loss"), rel=1e-3)
    config = load_config(ROOT / "tests" / "models" / "tied-gqa.json")
    sizes = {math.prod(shape) for _, shape in config.parameters()}
    assert counters["stats"]["unique_graphs"] == 1 + len(sizes)
    assert not counters["graph_break"]


def test_results_are_read_late():
    """On a GPU a step is logged when the next one has been queued; its time is the device's, from the end
    of the one before.
    """

    class Event:
        def __init__(self, ms):
            self.ms = ms

        def synchronize(self):
            waited.append(self.ms)

        def elapsed_time(self, end):
            return end.ms - self.ms

    waited, logged = [], []
    log = SimpleNamespace(step=lambda step, loss, norm, lr, ms: logged.append((step, loss, norm, lr, ms)))
    r = SimpleNamespace(running=[], log=log, device="cpu", begun=Event(100), spikes=SpikeDetector())
    ends = [600, 800, 1100]
    for step, end in enumerate(ends, 1):
        u = Step(step, lr=0.1 * step, done=Event(end))
        u.result = torch.tensor([1.0 * step, 2.0])
        r.running.append(u)
        finish(r, late=1)
        assert waited == ends[: step - 1]
    finish(r)
    assert waited == ends and r.running == []
    assert logged == [(s, float(s), 2.0, 0.1 * s, ms) for s, ms in ((1, 500), (2, 200), (3, 300))]


def test_no_checkpoints(tmp_path, capsys):
    """Also what the last lines say of memory and CPU."""
    events = run_training(tmp_path, "a", "--checkpoint-every", "-1")
    assert len(values(events, "step", "loss")) == 4
    assert list((tmp_path / "a").glob("step_*")) == [] and values(events, "checkpoint", "path") == []
    printed = capsys.readouterr().out
    assert "done: no model, log" in printed
    process, busy = (
        re.search(rf"^used: .*{x}", printed, re.MULTILINE) for x in (r"process ([\d.]+)", r"CPU (\d+)%")
    )
    assert float(process[1]) == pytest.approx(max(values(events, "step", "rss_gib")), abs=0.06)
    shares, ms = (values(events, "step", key) for key in ("cpu_percent", "ms"))
    assert float(busy[1]) == pytest.approx(np.average(shares, weights=ms), abs=0.6)
    assert all(x > 0 for x in values(events, "step", "mfu"))


def test_a_run_that_diverges_stops(tmp_path):
    flags = ["--lr", "1e18", "--grad-clip", "0", "--steps", "40", "--checkpoint-every", "1"]
    with pytest.raises(InputError, match=r"step \d+: expected a finite loss .* checkpoint is .*step_"):
        run_training(tmp_path, "a", *flags)
    last = max((tmp_path / "a").glob("step_*"))
    assert all(w.isfinite().all() for w in load_file(last / "model.safetensors").values())


def test_a_second_run_keeps_the_first(tmp_path):
    first = run_training(tmp_path, "a")
    weights = next((tmp_path / "a").glob("step_*/model.safetensors"))
    kept = tmp_path / "a/previous_1" / weights.relative_to(tmp_path / "a")
    bytes_of_first = weights.read_bytes()
    second = run_training(tmp_path, "a", "--seed", "7", "--val-data", "none")
    assert values(second, "val", "loss") == [] and values(first, "val", "loss") != []
    assert kept.read_bytes() == bytes_of_first != weights.read_bytes()
    lines = (tmp_path / "a/previous_1/log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == first
    run_training(tmp_path, "a")
    assert (tmp_path / "a/previous_2/log.jsonl").exists()


def test_a_first_token_beyond_the_vocabulary(tmp_path):
    config = json.loads((ROOT / "tests/models/tied-gqa.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"bos_token_id": config["vocab_size"]}))
    run_training(tmp_path, "a", "--model", str(tmp_path), "--sample-every", "0")
    with pytest.raises(InputError, match="begins a sample: expected one below the vocabulary's"):
        run_training(tmp_path, "b", "--model", str(tmp_path), "--sample-every", "1")


@pytest.mark.parametrize(
    "flags", [(), ("--grad-dtype", "bf16"), ("--master-weights", "off", "--optimizer-state", "bf16")]
)
def test_bf16_training_follows_f32(tmp_path, flags):
    expected, found = run_training(tmp_path, "a"), run_training(tmp_path, "b", "--dtype", "bf16", *flags)
    assert values(found, "step", "loss") == pytest.approx(values(expected, "step", "loss"), rel=1e-2)
    assert values(found, "step", "loss") != values(expected, "step", "loss")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kernel", "swiglu_forward=naive"], "--kernel"),
        (["--resume", "no/such"], "no/such: expected a checkpoint's directory, found nothing"),
        (["--recompute", "norm"], "--recompute"),
        (["--init", "load"], "--init load"),
        (["--seq-len", "65"], "--seq-len: .* 64, found 65"),
        (["--total-batch-size", "65"], "--total-batch-size"),
        (["--train-data", "none"], "--train-data: expected a pattern"),
    ],
)
def test_refuses(tmp_path, flags, message):
    with pytest.raises(InputError, match=message):
        run_training(tmp_path, "a", *flags)


def test_validation_by_another_tokenizer(tmp_path):
    for name, made in (("a.bin", 1), ("b.bin", 2)):
        write_bin(tmp_path / name, np.arange(500, dtype=np.uint32) % 97, 97, made)
    files = ["--train-data", str(tmp_path / "a.bin"), "--val-data", str(tmp_path / "b.bin")]
    with pytest.raises(InputError, match=r"b.bin: expected tokens of the tokenizer that made .*a.bin"):
        run_training(tmp_path, "a", *files)


@pytest.mark.parametrize(
    "arguments", [["--train", "--verify-every", "2"], ["--trian"], ["--train", "--steps", "x"]]
)
def test_bad_flags_end_with_one_line_and_2(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["train_llama3.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        ref.run(ref.main)
    stderr = capsys.readouterr().err
    assert stop.value.code == 2
    assert stderr.startswith("train_llama3.py: ") and stderr.count("\n") == 1


@pytest.mark.parametrize("changed", [{"zero": 0}, {"zero": 2}, {"shard_group": 2}, {"verify_every": 3}])
def test_flags_of_the_program_alone(changed):
    flag = next(iter(changed)).replace("_", "-")
    with pytest.raises(InputError, match=f"^--{flag}: only the C program has it$"):
        check_supported(Options(train_data="train_*.bin", **changed))
    check_supported(Options(train_data="train_*.bin", zero=3))
