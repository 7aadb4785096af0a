"""Training with the reference model (train_llama3.py): rounding, runs. AdamW: test_reference_model.py."""

import json
import math
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from run import ROOT, refuses
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

import train_llama3 as ref
from llamac.base.log import read_log
from llamac.data import Loader, write_bin
from llamac.model.config import load_config
from llamac.training import run as training
from llamac.training.options import Options, parse
from llamac.training.rounding import hashed_bits, moment_bits, stochastic_round
from llamac.training.weights import Part, fuse_products, init_weights, parts

pytestmark = pytest.mark.usefixtures("one_thread")


def gradients(shapes: list[torch.Size], step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def whole(weights: list[torch.nn.Parameter]) -> list[Part]:
    return [Part(f"{k}", k, tuple(p.shape), 0, p, slice(None)) for k, p in enumerate(weights)]


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
        rounded = (stochastic_round(x, torch.tensor(w).expand(1 << 16)) for w in words.view(np.int32))
        ups = sum((each > 1).int() for each in rounded)
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


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])  # by a C++ compiler
def test_hashed_words_are_murmurs(compiled):
    """MurmurHash3's fmix32 in wrapping unsigned arithmetic."""
    seed, n = -5, 1000
    with np.errstate(over="ignore"):
        x = np.arange(n, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(seed & 0xFFFFFFFF)
        x = (x ^ x >> 16) * np.uint32(0x85EBCA6B)
        x = (x ^ x >> 13) * np.uint32(0xC2B2AE35)
    expected = (x ^ x >> 16).view(np.int32).tolist()
    function = torch.compile(hashed_bits) if compiled else hashed_bits
    assert function(torch.tensor(seed, dtype=torch.int32), n).tolist() == expected


GPT2 = json.loads((ROOT / "tests/models/gpt2.json").read_text())


@pytest.mark.parametrize("rate", [0.2, None, "absent"])
def test_dropout_is_not_applied(tmp_path, rate):
    """One line says so; transformers' default is 0.1."""
    values = {key: x for key, x in (GPT2 | {"attn_pdrop": rate}).items() if x != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.warns(UserWarning) as said:
        run_training(tmp_path, "a", "--model", str(tmp_path / "config.json"), "--steps", "1")
    lines = [line for each in said if "dropout" in (line := str(each.message))]
    applied = f"attn_pdrop {rate if rate == 0.2 else 0.1}"
    assert lines == [f"{tmp_path}/config.json: dropout is not applied, found {applied}"]


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


def run_training(folder: Path, out: str, *flags: str) -> list[dict]:
    """A short run on random tokens; returns the events of its log. Its weights are in OUT/model."""
    write_bin(folder / "train.bin", np.random.default_rng(0).integers(97, size=1000), 97)
    base = f"--model {ROOT}/tests/models/tied-gqa.json --train-data {folder}/train.bin --seq-len 16"
    base += " --batch-size 4 --steps 4 --warmup-steps 2 --min-lr-frac 0.1"
    base += f" --log {folder}/{out}/log.jsonl --save {folder}/{out}/model"
    ref.train(parse([*base.split(), *flags]))
    return read_log(folder / out / "log.jsonl")


def values(events: list[dict], field: str) -> list:
    """One field of all steps."""
    return [e[field] for e in events if e["event"] == "step"]


def test_training_run(tmp_path, capsys):
    """The log, the console, and the weights, with which transformers and another run begin."""
    events = run_training(tmp_path, "a")
    keys = ["event", "step", "loss", "grad_norm", "lr", "ms", "tokens_per_s", "gpu_mem_gib"]
    assert [list(e) for e in events] == [keys] * 4
    assert values(events, "lr") == pytest.approx([0.0015, 0.003, 0.00165, 0.0003])
    assert all(e["tokens_per_s"] * e["ms"] == pytest.approx(1e3 * 4 * 16) for e in events)
    printed = re.findall(r"^ +(\d)/4 +([\d.]+) ", capsys.readouterr().out, re.MULTILINE)
    assert printed == [(f"{e['step']}", f"{e['loss']:.4f}") for e in events]
    assert values(run_training(tmp_path, "b"), "loss") == values(events, "loss")
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["log.jsonl", "model"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a/model")
    saved = load_file(tmp_path / "a/model/model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in model.named_parameters())
    loaded = run_training(tmp_path, "c", "--model", str(tmp_path / "a/model"))
    tokens, targets = map(
        torch.from_numpy, Loader(str(tmp_path / "train.bin"), 16, 97, 4, seed=42).micro_batch(0, 0)
    )
    with torch.no_grad():
        expected = ref.cross_entropy(model(tokens.long()).logits, targets.long()).mean()
    assert values(loaded, "loss")[0] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("model", ["tied-gqa", "gpt2"])
@pytest.mark.parametrize(
    "flags", [("--batch-size", "2", "--total-batch-size", "64"), ("--recompute", "block:2")]
)
def test_same_training_by_other_means(tmp_path, flags, model):
    """Micro-batchs and recomputed blocks change rounding at most."""
    flags = *flags, "--model", f"{ROOT}/tests/models/{model}.json"
    expected, found = (run_training(tmp_path, *each) for each in (("a", *flags[-2:]), ("b", *flags)))
    assert values(found, "loss") == pytest.approx(values(expected, "loss"), rel=1e-6)


@pytest.mark.slow  # test_training_llamac.py compiles the model with our operations
@pytest.mark.parametrize(
    "flags",
    [
        ("--recompute", "block:2"),
        ("--dtype", "bf16", "--total-batch-size", "128"),
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
    assert values(found, "loss") == pytest.approx(values(expected, "loss"), rel=1e-3)
    config = load_config(ROOT / "tests" / "models" / "tied-gqa.json")
    sizes = {math.prod(shape) for _, shape in config.parameters()}
    assert counters["stats"]["unique_graphs"] == 1 + len(sizes)
    assert not counters["graph_break"]


def test_results_are_read_late(tmp_path, monkeypatch):
    """On a GPU a step is logged when the next one has been queued; its time is the device's, from the end
    of the one before. A loss that is not finite is null.
    """

    class Event:
        def __init__(self, ms):
            self.ms = ms

        def synchronize(self):
            waited.append(self.ms)

        def elapsed_time(self, end):
            return end.ms - self.ms

    waited, ends = [], [600, 800, 1100]
    moments = iter([Event(100), *map(Event, ends)])
    monkeypatch.setattr(training, "moment", lambda device: next(moments))
    options = Options(model="tiny", steps=3, log=str(tmp_path / "log.jsonl"))
    log = training.Log(options, load_config("tiny"), "cpu", tokens=1000)
    log.late = 1
    for step in (1, 2, 3):
        with log.step(step, lr=0.1 * step) as u:
            u.result = torch.tensor([math.nan if step == 2 else 1.0 * step, 2.0])
        assert waited == ends[: step - 1]
    log.close()
    events = read_log(tmp_path / "log.jsonl")
    assert waited == ends and values(events, "ms") == [500, 200, 300]
    assert values(events, "loss") == [1.0, None, 3.0] and values(events, "tokens_per_s")[0] == 2000


@pytest.mark.parametrize(
    "flags",
    [
        ("bf16",),
        ("bf16", "--grad-dtype", "bf16"),
        ("bf16", "--master-weights", "off", "--optimizer-state", "bf16"),
        ("fp16",),
    ],
)
def test_narrow_training_follows_f32(tmp_path, flags):
    expected, found = run_training(tmp_path, "a"), run_training(tmp_path, "b", "--dtype", *flags)
    assert values(found, "loss") == pytest.approx(values(expected, "loss"), rel=1e-2)
    assert values(found, "loss") != values(expected, "loss")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kernel", "swiglu_forward=naive"], "--kernel: only ./train_llama3 and llamac.Trainer have it"),
        (["--resume=auto"], "--resume: only ./train_llama3 and llamac.Trainer have it"),
        (["--step", "3"], "--step: no such flag; --help lists them"),
        (["--recompute", "norm"], "--recompute: expected none, block or block:K, found 'norm'"),
        (["--recompute", "block:0"], "--recompute: expected none, block or block:K"),
        (["--steps", "-1"], "--steps: expected a number from 0"),
        (["--lr", "nan"], "--lr: expected a number from 0"),
        (["--beta1", "1"], "--beta1: expected a number from 0 to below 1, found 1.0"),
        (["--dtype", "f16"], "--dtype: expected f32 or bf16 or fp16, found f16"),
        (["--dtype", "fp16", "--loss-scale", "3"], "--loss-scale 3: expected a power of two"),
        (["--dtype", "fp16", "--loss-scale", "16777216"], "step 1: fp16 overflows at a loss scale of"),
        (["--dtype", "f32", "--grad-dtype", "bf16"], "--grad-dtype bf16: expected f32"),
        (["--profile", "2", "--log", ""], "--profile: expected --log FILE"),
        (["--init", "load"], "--init load"),
        (["--seq-len", "65"], "--seq-len: expected at most 64, the model's longest sequence, found 65"),
        (["--model", f"{ROOT}/tests/models/gpt2.json", "--seq-len", "65"], "--seq-len: .* 64, .*, found 65"),
        (["--total-batch-size", "65"], "--total-batch-size"),
    ],
)
def test_refuses(tmp_path, flags, message):
    refuses(message, run_training, tmp_path, "a", *flags)


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
