"""Frozen weights (--freeze) and adapters (--lora) of the program and of llamac.Trainer."""

import json
import shutil
import warnings
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch
from debug_states import first_difference, run_model
from launch import mesh_flags, needs
from run import (
    ROOT,
    T,
    V,
    assert_same_state,
    events,
    flags,
    losses,
    numbers,
    one_line,
    refused,
    run_llamac,
    tensors,
    trainer_flags,
)
from safetensors.torch import load_file, save_file

import llamac
from llamac.inference.export_hf import write_merged
from train_llama3 import DTYPES

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("one_thread")]
FROZEN = "model.embed_tokens.weight,model.layers.0.*,*norm.weight"
SHORT = {"val_every": 0, "val_data": "none"}
E4M3 = {"frozen_dtype": "fp8"}
FP8 = {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_weights": "stored"}
FP16 = {"dtype": "fp16", "recompute": "norm", "verify_every": 3}
AGAIN = {"dtype": "bf16", "recompute": "norm,swiglu,qkv", "verify_every": 3}


MODULES = {name: f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
SETTINGS = {
    "lr": "1e-2",
    "beta1": "0.9",
    "beta2": "0.95",
    "eps": "1e-8",
    "weight_decay": "0.1",
    "grad_clip": "1",
}


def adapted(folder: Path, model: str, targets: str, dtype: torch.dtype = torch.float64):
    """A model in the folder, and PEFT's model of it with adapters of rank 4, which are there, too."""
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ROOT / f"tests/models/{model}.json"))
    base.save_pretrained(folder)
    modules = [MODULES[target] for target in targets.split(",")]
    wanted = peft.LoraConfig(r=4, lora_alpha=6, target_modules=modules, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, at what peft calls
        found = peft.get_peft_model(base, wanted)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    found.save_pretrained(folder)
    return found.to(dtype)


def of_peft(model, batch: dict, scale: float = 1) -> dict[str, np.ndarray]:
    """The loss and the gradients, a call per document; scale: of the loss in the backward pass."""
    tokens, targets, first = (batch[name].long() for name in ("tokens", "targets", "first"))
    losses = []
    for row in range(2):
        for begin in first[row].unique():
            own = first[row] == begin
            logits = model(input_ids=tokens[row, own][None]).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits, targets[row, own], reduction="none"))
    loss = torch.cat(losses).mean()
    (loss * scale).backward()
    found = {"loss": loss.detach().double().numpy().ravel()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if "lora_B" in name and not any(each in name for each in ("gate_proj", "up_proj")):
            gradient = gradient.T  # as they lie in memory
        found["grad." + name.replace(".default", "")] = gradient.double().numpy().ravel() / scale
    return found


def a_batch(folder: Path, documents: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(V, (2, T + 1), generator=generator, dtype=torch.int32)
    begins = torch.rand(2, T, generator=generator) < (0.3 if documents else 0)
    first = (begins * torch.arange(T)).cummax(1).values.int()
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    save_file(batch | ({"first": first} if documents else {}), folder / "debug_state.safetensors", SETTINGS)
    return batch | {"first": first}


@pytest.mark.parametrize(
    "model, targets, recompute, chunk, documents",
    [
        *(("tied-gqa", each, "none", "0", False) for each in (*MODULES, "q,v", "k,v,up", ",".join(MODULES))),
        ("qwen2", "q,k,v,o,down", "norm,swiglu,qkv,attention", "0", True),
        ("qwen3", "q,k,gate,up,down", "block", "0", False),
        ("olmo2", "q,v,o,gate,down", "block:2", "0", True),
        ("qwen3", "q,k,gate,up,down", "block:2", "10000", True),
    ],
)
def test_gradients_of_peft(build, tmp_path, model, targets, recompute, chunk, documents):
    expected = of_peft(adapted(tmp_path, model, targets), a_batch(tmp_path, documents))
    found = run_model(build, tmp_path, tmp_path / "out", "f32", recompute, chunk, f"lora=4,6,{targets}")
    assert found["loss"] == pytest.approx(expected.pop("loss"), rel=1e-6)
    assert expected.keys() == {name for name in found if name.startswith("grad.")}
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=2e-6 * abs(x).max(), err_msg=name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_gradients_of_peft(build, tmp_path, dtype):
    """With documents, as far from float64 as PEFT in the same type."""
    scale = 65536 if dtype == "fp16" else 1
    lora, batch = ("qwen3", ",".join(MODULES)), a_batch(tmp_path, True)
    theirs, truth = (
        of_peft(adapted(tmp_path, *lora, type_), batch, scale) for type_ in (DTYPES[dtype], torch.float64)
    )
    found = run_model(build, tmp_path, tmp_path / "out", dtype, "norm", "0", f"lora=4,6,{lora[1]}")
    if dtype == "fp16":
        found |= {name: x / scale for name, x in found.items() if name.startswith("grad.")}
    found = {name: x for name, x in found.items() if name in truth}
    assert first_difference(found, theirs, truth, dtype, {}) == ""


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_codes_are_the_rounded_weights(build, tmp_path, dtype):
    """Frozen weights in fp8 have the bits of a model whose matrices are the codes' values."""
    rounded = tmp_path / "rounded"
    for folder in (tmp_path, rounded):
        adapted(folder, "qwen3", "q,v,gate,down")
        batch = {name: torch.arange(2 * T, dtype=torch.int32).reshape(2, T) for name in ("tokens", "targets")}
        save_file(
            batch, folder / "debug_state.safetensors", {key: str(value) for key, value in SETTINGS.items()}
        )
    weights = load_file(rounded / "model.safetensors")
    for name, weight in weights.items():
        if name.startswith("model.layers.") and weight.dim() == 2:
            weight = weight.to({"f32": torch.float32, "bf16": torch.bfloat16}[dtype]).float()
            scale = 2 ** torch.floor(torch.log2(448 / weight.abs().amax(1, keepdim=True)))
            weights[name] = (weight * scale).to(torch.float8_e4m3fn).float() / scale
    save_file(weights, rounded / "model.safetensors", {"format": "pt"})
    lora = ("none", "0", "lora=4,6,q,v,gate,down")
    found = run_model(build, tmp_path, tmp_path / "out", dtype, *lora, "frozen=fp8")
    expected = run_model(build, rounded, tmp_path / "out", dtype, *lora)
    assert found.keys() == expected.keys()
    assert [name for name in found if not np.array_equal(found[name], expected[name])] == []


@pytest.mark.parametrize("extra", [{}, AGAIN, FP8, E4M3, FP16])
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


@pytest.mark.parametrize(
    "extra, words",
    [
        ({"freeze": "lm_heads.*"}, "--freeze lm_heads.* matches none model.layers.0.input_layernorm.weight"),
        ({"freeze": "*"}, "--freeze train match all"),
        ({"freeze": "*.q_proj.*"}, "q_proj k_proj one matrix frozen"),
        ({"lora": 4, "lora_targets": "q,gates"}, "--lora-targets q,gates up"),
        (E4M3, "--frozen-dtype fp8 --lora --freeze"),
        ({"lora": 4, "dtype": "fp16", **E4M3}, "--frozen-dtype fp8 --dtype bf16 found fp16"),
        ({"lora": 4, "lora_targets": "q,q"}, "--lora-targets once q,q"),
        ({"lora": 4, "lora_targets": ""}, "--lora-targets none"),
        ({"lora": 4, "freeze": "*norm*"}, "--freeze *norm* --lora"),
        ({"lora": 4, "dtype": "bf16", "matmul_dtype": "fp8"}, "--matmul-dtype fp8 --lora"),
        ({"lora": 4, "model": ROOT / "tests/models/gpt2.json"}, "--lora olmo2 gpt2"),
        ({"lora": 4, "model": ROOT / "tests/models/phi3.json"}, "--lora olmo2 phi3"),
    ],
)
def test_bad_input(train, data, tmp_path, extra, words):
    line = one_line(train(*flags(data, tmp_path / "out", **extra), code=2))
    assert all(word in line for word in words.split()), line
    assert not (tmp_path / "out").exists()


ADAPTERS = {"lora": 4, "lora_alpha": 6, "lr": 0.01, **SHORT}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    adapted(folder, "tied-gqa", "q")
    for path in folder.glob("adapter*"):
        path.unlink()
    return folder


@pytest.mark.parametrize("extra", [{"sample_every": 4, "sample_tokens": 3}, AGAIN, AGAIN | E4M3, FP16])
def test_a_run_with_adapters(train, data, tmp_path, base, extra):
    """PEFT opens its checkpoints, and computes the program's loss; resuming has the run's bits."""
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    from transformers import AutoModelForCausalLM

    run = ADAPTERS | {"model": base, "val_every": 4, "val_steps": 1, "val_data": f"{data}/val_*.bin"} | extra
    train(*flags(data, tmp_path / "one", **run))
    train(*flags(data, tmp_path / "two", resume=tmp_path / "one/step_000004", **run))
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")[4:]
    checkpoint = tmp_path / "one/step_000008"
    for path in checkpoint.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "two/step_000008" / path.name).read_bytes()
    assert not list(checkpoint.glob("model*"))
    saved = tensors(checkpoint, "adapter_model")
    shown = llamac.Trainer(
        **trainer_flags(data, tmp_path / "three", resume=str(checkpoint), **run)
    ).parameters()
    assert all(np.array_equal(shown[name], value) for name, value in saved.items())
    found = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), checkpoint).double()
    tokens = torch.from_numpy(
        np.fromfile(data / "val_000.bin", np.uint16, 4 * T + 1, offset=1024).astype(int)
    )
    logits = found(input_ids=tokens[:-1].reshape(4, T)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:]).item()
    narrow = "dtype" in extra
    if "frozen_dtype" in extra:
        return
    assert events(tmp_path / "one", "val")[-1]["loss"] == pytest.approx(loss, rel=5e-3 if narrow else 1e-6)
    if narrow:
        return
    run_llamac("export", "merge", tmp_path / "one", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, expected in found.float().merge_and_unload().state_dict().items():
        np.testing.assert_allclose(merged[name], expected, rtol=1e-6, atol=1e-7, err_msg=name)
    assert "export merge" in run_llamac("generate", checkpoint, "--prompt-ids", "1", code=2).stderr
    assert "export merge" in one_line(train(*flags(data, tmp_path / "no", model=checkpoint), code=2))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"r": 5}, "lora_A.weight expected [5, 48] found F32 [4, 48]"),
        ({"use_dora": True}, "plain LoRA use_dora"),
        (
            {"base_model_name_or_path": "owner/model"},
            "base_model_name_or_path weights owner/model hf download",
        ),
        ({"lora_alpha": "8"}, "lora_alpha a number"),
    ],
)
def test_adapters_that_cannot_be_merged(tmp_path, change, words):
    adapted(tmp_path / "model", "tied-gqa", "q")
    config = tmp_path / "model/adapter_config.json"
    fields = json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path / "model")}
    config.write_text(json.dumps(fields | change))
    said = refused(write_merged, tmp_path / "model", tmp_path / "out")
    assert all(word in said for word in words.split()), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("extra", [{}, E4M3])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_adapters_of_another_model(train, data, tmp_path, base, name, extra):
    run = ADAPTERS | extra
    train(*flags(data, tmp_path / "one", model=base, **run))
    other = shutil.copytree(base, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights[name][-1] *= -1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    run |= {"model": other, "resume": tmp_path / "one/step_000004"}
    line = one_line(train(*flags(data, tmp_path / "two", **run), code=2))
    assert str(other) in line and "found others" in line


def test_accumulation(train, data, tmp_path):
    for batch_size in (4, 1):
        run = {"batch_size": batch_size, "total_batch_size": 4 * T, **ADAPTERS}
        train(*flags(data, tmp_path / f"{batch_size}", **run))
    np.testing.assert_allclose(losses(tmp_path / "1"), losses(tmp_path / "4"), rtol=2e-6)


@pytest.mark.parametrize("level", [0, 3])
def test_ranks_read_frozen_codes(build, train, data, tmp_path, base, level):
    """One of the ranks reads a frozen weight and encodes it; the others receive codes and scales."""
    needs(build, "GLOO", 2)
    run = {**ADAPTERS, **E4M3, "model": base, "total_batch_size": 4 * T}
    train(*flags(data, tmp_path / "one", batch_size=2, **run))
    train(*flags(data, tmp_path / "two", **run, **mesh_flags("dp 2"), zero=level))
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=2e-6)


@pytest.mark.parametrize(
    "mesh, trained",
    [
        pytest.param("dp 2", ADAPTERS, marks=pytest.mark.more),
        ("dp 4 shard_group 2", {"freeze": FROZEN, **SHORT}),
    ],
)
def test_levels_have_the_same_bits(build, train, data, tmp_path, mesh, trained):
    needs(build, "GLOO", devices=1)
    run = {"steps": 4, "dtype": "bf16", **mesh_flags(mesh), **trained}
    for level in range(4):
        train(*flags(data, tmp_path / f"{level}", zero=level, **run))
        assert numbers(tmp_path / f"{level}") == numbers(tmp_path / "0")
        assert_same_state(tmp_path / f"{level}/step_000004", tmp_path / "0/step_000004")
