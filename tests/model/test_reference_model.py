"""The reference model (train_llama3.py) against transformers' LlamaForCausalLM, and the reference tensors."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from debug_states import load, statistics_of
from hf_dirs import WINDOWS, YARN
from hf_float64 import compute_in_double
from run import refused
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    modeling_rope_utils,
)
from transformers.models.bert import modeling_bert
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.ministral import modeling_ministral
from transformers.models.mistral import modeling_mistral
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

import train_llama3 as ref
from llamac.base.errors import InputError
from llamac.base.tolerance import BACKWARD, FORWARD, violation
from llamac.model import hf
from llamac.model.config import RopeScaling, load_config
from llamac.training.options import Options
from llamac.training.weights import load_weights, parts, save_model

MODELS = ["tied-gqa", "untied-mha", "scaled8", "scaled32", "wide-heads"]
MODELS += ["qwen2", "qwen3", "phi3", "olmo2", "gpt2", "bert"]
DIFFERENT = ("tied-gqa", "scaled32", "qwen3", "phi3", "olmo2", "gpt2", "bert")  # one of each kind
B, T = 2, 33
Tensors = dict[str, torch.Tensor]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("reference")
    ref.write_references(Options(), root)
    torch.use_deterministic_algorithms(False)
    return root


def batch(vocab_size: int, seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = torch.from_numpy(np.random.default_rng(seed).integers(vocab_size, size=(2, B, T)))
    targets[:, 3::4] = ref.IGNORED
    return tokens, targets


def of_batches(model: torch.nn.Module, results: Callable[[torch.Tensor, torch.Tensor], Tensors]) -> Tensors:
    """Of three: a loss, or the largest of few gradients, can be right by luck."""
    each = []
    for seed in (7, 8, 9):
        model.zero_grad()
        each.append(results(*batch(model.config.vocab_size, seed)))
    return {name: torch.stack([one[name].detach() for one in each]) for name in each[0]}


def our_results(directory: Path, dtype: torch.dtype) -> Tensors:
    """Logits, loss and gradients of every parameter, by our model loaded from a directory."""
    model = ref.empty_model(load_config(directory), dtype)
    load_weights(model, directory)
    turned, found = model.config.is_turned, parts(model)

    def results(tokens, targets):
        logits = model(tokens, ref.precompute_cis(model.config, T, dtype=dtype))
        loss, _ = ref.mean_loss(ref.cross_entropy(logits, targets), targets)
        loss.backward()
        grads = {p.name: p.parameter.grad.T if turned(p.name) else p.parameter.grad for p in found}
        return {"logits": logits, "loss": loss, **grads}

    return of_batches(model, results)


def their_results(directory: Path, dtype: torch.dtype) -> Tensors:
    """The same by transformers."""
    is_encoder = load_config(directory).is_encoder
    kind = AutoModelForMaskedLM if is_encoder else AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=dtype, attn_implementation="eager")

    def results(tokens, targets):
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        return {"logits": logits, "loss": loss, **{name: p.grad for name, p in model.named_parameters()}}

    return of_batches(model, results)


def true_results(directory: Path, monkeypatch) -> Tensors:
    """The truth: transformers in float64 throughout. It shares no code with ours."""
    with monkeypatch.context() as patch:
        modules = modeling_llama, modeling_mistral, modeling_ministral, modeling_qwen2, modeling_qwen3
        modules += (modeling_phi3, modeling_olmo2, modeling_gpt2, modeling_bert, modeling_rope_utils)
        compute_in_double(patch, *modules)
        return their_results(directory, torch.float64)


def mismatches(ours: Tensors, baseline: Tensors, truth: Tensors) -> list[str]:
    """The tensors of ours outside the tolerance, and how; forward first."""
    assert ours.keys() == baseline.keys() == truth.keys()
    wrong = []
    for name, exact in truth.items():
        factor = FORWARD if name in ("logits", "loss") else BACKWARD
        if message := violation(ours[name].numpy(), baseline[name].numpy(), exact.numpy(), "f32", factor):
            wrong.append(f"{name}: {message}")
    return wrong


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DIFFERENT else pytest.mark.more) for name in MODELS]
)
def test_agrees_with_transformers(references, monkeypatch, name):
    directory = references / name / "f32"
    truth = true_results(directory, monkeypatch)
    baseline = their_results(directory, torch.float32)
    assert mismatches(our_results(directory, torch.float32), baseline, truth) == []
    ours = our_results(directory, torch.float64)  # in double both are right to its rounding
    for tensor, exact in truth.items():
        torch.testing.assert_close(ours[tensor], exact, rtol=0, atol=1e-12)


SLIDING, FULL = "sliding_attention", "full_attention"
BEYOND = {"factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    "changes",
    [
        WINDOWS,
        WINDOWS | {"layer_types": [SLIDING, FULL, SLIDING]},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn"} | BEYOND},
        {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False}},
    ],
    ids=["window", "windows", "linear", "yarn", "mscale"],
)
def test_changes_agree_with_transformers(references, monkeypatch, tmp_path, changes):
    """Llama's weights, of which each token sees the last 7, or at positions beyond the original context."""
    source = references / "untied-mha" / "f32"
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    truth = true_results(tmp_path, monkeypatch)
    ours = our_results(tmp_path, torch.float32)
    assert mismatches(ours, their_results(tmp_path, torch.float32), truth) == []
    assert mismatches(our_results(source, torch.float32), ours, truth) != []


@pytest.mark.parametrize("factor", [None, 8.0, 32.0])
def test_reads_what_transformers_writes(tmp_path, factor):
    scaling = RopeScaling(factor, 1.0, 4.0, 32) if factor else None
    rope = {"rope_type": "default", "rope_theta": 1e5}
    if factor:
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 32
    shape = {"vocab_size": 89, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2,
             "head_dim": 12}  # fmt: skip
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    theirs = LlamaConfig(**shape, rope_parameters=rope, tie_word_embeddings=factor == 8.0)
    torch.manual_seed(1)
    model = LlamaForCausalLM(theirs)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(hf.weight_files(tmp_path)) > 1
    config = load_config(tmp_path)
    assert (config.rope_theta, config.rope_scaling, config.head_dim) == (1e5, scaling, 12)
    assert config.tie_word_embeddings == (factor == 8.0)
    ours = ref.empty_model(config, torch.float32)
    load_weights(ours, tmp_path)
    state = model.state_dict()
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in config.parameters()]
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, state[name])


def test_reads_and_writes_gpt2(tmp_path):
    """Files of the whole model in shards, and of the base model with the mask that old files have; what is
    written is transformers' again.
    """
    shape = {"vocab_size": 89, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
    theirs = GPT2LMHeadModel(GPT2Config(**shape, activation_function="gelu", layer_norm_epsilon=1e-3))
    theirs.save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    base = {name: x.contiguous() for name, x in theirs.transformer.state_dict().items()}
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text((tmp_path / "whole/config.json").read_text())
    save_file(base | {"h.0.attn.bias": torch.ones(1, 1, 48, 48)}, tmp_path / "base/model.safetensors")
    for name in ("whole", "base"):
        config = hf.load_config_of_weights(tmp_path / name)
        assert (config.hidden_size, config.intermediate_size, config.head_dim) == (32, 128, 8)
        assert (config.max_position_embeddings, config.rms_norm_eps, config.hidden_act) == (48, 1e-3, "gelu")
        ours = ref.empty_model(config, torch.float32)
        load_weights(ours, tmp_path / name)
        save_model(ours, tmp_path / "out", torch.float32)
        state = GPT2LMHeadModel.from_pretrained(tmp_path / "out").state_dict()
        assert all(torch.equal(x, state[name]) for name, x in theirs.state_dict().items())


def test_reads_and_writes_bert(tmp_path):
    """Files with a pooler and a next-sentence head, and old ones, whose norms have gamma and beta; what is
    written is transformers' again."""
    shape = {"vocab_size": 89, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs = BertForPreTraining(BertConfig(**shape, intermediate_size=48, max_position_embeddings=40))
    for parameter in theirs.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "new")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.json").write_text((tmp_path / "new/config.json").read_text())
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, x in load_file(tmp_path / "new/model.safetensors").items():
        end = ".".join(name.split(".")[-2:])
        old[name.removesuffix(end) + names.get(end, end)] = x
    save_file(old, tmp_path / "old/model.safetensors")
    for name in ("new", "old"):
        config = hf.load_config_of_weights(tmp_path / name)
        assert (config.rms_norm_eps, config.pad_token_id, config.type_vocab_size) == (1e-12, 0, 2)
        ours = ref.empty_model(config, torch.float32)
        load_weights(ours, tmp_path / name)
        save_model(ours, tmp_path / "out", torch.float32)
        again = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
        state = theirs.state_dict()
        assert all(torch.equal(x, state[name]) for name, x in again.state_dict().items())


def test_positions_count_within_documents(references):
    """In double: GPT-2's logits of two documents in a row are transformers' of each alone."""
    directory, at = references / "gpt2" / "f32", 12
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    ours = ref.empty_model(load_config(directory), torch.float64)
    load_weights(ours, directory)
    tokens, _ = batch(ours.config.vocab_size)
    first = (torch.arange(T) >= at).int().mul(at).expand(B, T)
    with torch.no_grad():
        found = ours(tokens, ref.precompute_cis(ours.config, T, dtype=torch.float64), first=first)
        each = [theirs(part).logits for part in (tokens[:, :at], tokens[:, at:])]
    torch.testing.assert_close(found, torch.cat(each, 1), rtol=0, atol=1e-12)


def test_refuses_directories_that_do_not_fit(tmp_path, references):
    config = load_config(references / "tied-gqa" / "f32")
    model = ref.empty_model(load_config(references / "untied-mha" / "f32"), torch.float32)
    with pytest.raises(
        InputError, match=r"model\.safetensors: model\.embed_tokens\.weight: expected shape \[101, 64\]"
    ):
        load_weights(model, references / "tied-gqa" / "f32")
    assert "model.safetensors" in refused(load_weights, model, tmp_path)
    save_file({"model.embed_tokens.weight": torch.zeros(97, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"expected a tensor model\.layers\.0\..*, found none"):
        load_weights(ref.empty_model(config, torch.float32), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "model.safetensors" in refused(load_weights, model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    assert 'index.json: "a": expected the name' in refused(load_weights, model, tmp_path)


STATISTICS = ("_mean", "_rstd", "_lse")


def documented_names(layers: int, parameters: list[str], model_type: str) -> list[str]:
    inputs, post, activation = ["input_rstd"], ["post_rstd"], "swiglu"
    if model_type in ("gpt2", "bert"):
        inputs, post, activation = [*inputs, "input_mean"], [*post, "post_mean"], "gelu"
    norms_to_mlp = ["residual_mid", "post_norm", *post, "gate_up", activation, "residual_out"]
    layer = ["input_norm", *inputs, "q", "k", "v", "attention", "attention_lse", *norms_to_mlp]
    if model_type == "olmo2":
        layer = ["attention_input", *layer[2:7], "attention_out", "residual_mid", "attention_out_rstd"]
        layer += ["mlp_input", "gate_up", "swiglu", "mlp_out", "residual_out", "mlp_out_rstd"]
    inner = [f"{i}.{name}" for i in range(layers) for name in layer]
    differentiable = [name for name in inner if not name.endswith(STATISTICS)]
    head = ["final_norm"]
    head += ["transform", "transform_gelu", "transform_norm"] if model_type == "bert" else []
    forward = [f"act.{name}" for name in ("embedding", *inner, *head)] + ["logits", "losses", "loss"]
    dact = ["embedding", *differentiable, *head, "logits"]
    backward = [f"grad.{name}" for name in parameters] + [f"dact.{name}" for name in dact]
    return ["tokens", "targets", *forward, *reversed(backward), "train.losses", "train.grad_norms"]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_debug_state(references, name, dtype):
    config = load_config(references / name / dtype)
    storage = ref.DTYPES[dtype]
    for file, wide in (("debug_state", torch.float32), ("truth", torch.float64)):
        path = references / name / dtype / f"{file}.safetensors"
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        assert float(header.pop("__metadata__")["lr"]) == ref.LR
        parameters = [n for n, _ in config.parameters()]
        wanted = documented_names(config.num_hidden_layers, parameters, config.model_type)
        assert list(header) == wanted
        ends = [entry["data_offsets"] for entry in header.values()]
        assert [end for _, end in ends[:-1]] == [begin for begin, _ in ends[1:]]
        state = load_file(path)
        for vector in (x for x in load_file(path.with_name("model.safetensors")).values() if x.dim() == 1):
            assert vector.float().std() > 0.1  # ones, or zeros, would not show that it is forgotten
        assert all(torch.isfinite(x.double()).all() for x in state.values())
        narrow = storage if file == "debug_state" else wide
        fp32 = ("grad.", "train.", "loss", "losses")
        for tensor, x in state.items():
            kind = wide if tensor.startswith(fp32) or tensor.endswith(STATISTICS) else narrow
            assert x.dtype == (torch.int32 if tensor in ("tokens", "targets") else kind), tensor
        NH, NKV, HD = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        assert state["act.1.q"].shape == state["dact.1.q"].shape == (B, T, NH, HD)
        assert state["act.1.k"].shape == (B, T, NKV, HD)
        assert state["act.0.attention_lse"].shape == (B, NH, T)
        width = config.intermediate_size * (1 if config.model_type in ("gpt2", "bert") else 2)
        assert state["act.0.gate_up"].shape == (B, T, width)
        assert state["loss"].shape == (1,) and state["train.losses"].shape == (10,)
        # An encoder's step has the mean over all tokens times the tokens per target.
        rounding = 2**-22 if config.is_encoder else 0
        torch.testing.assert_close(state["train.losses"][0], state["loss"][0], rtol=rounding, atol=0)
        # Those of the C model are compared with their own rows (first_difference), not with these.
        values = load(path)
        for tensor in (each for each in values if each.endswith(("_rstd", "_mean"))):
            rtol = 1e-10 if file == "truth" else 1e-5
            expected = statistics_of(tensor, values)
            np.testing.assert_allclose(values[tensor], expected, rtol=rtol, atol=rtol, err_msg=tensor)


@pytest.mark.parametrize("name", MODELS)
def test_ten_updates_are_torchs(references, name):
    """In double, from the reference's weights, with torch's optimizer and torch's clipping."""
    directory = references / name / "f32"
    state = load_file(directory / "truth.safetensors")
    model = ref.empty_model(load_config(directory), torch.float64)
    load_weights(model, directory)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.001, betas=(0.9, 0.95), eps=1e-8)
    cis = ref.precompute_cis(model.config, T, dtype=torch.float64)
    for loss, grad_norm in zip(state["train.losses"], state["train.grad_norms"], strict=True):
        optimizer.zero_grad()
        logits, targets = model(state["tokens"].long(), cis), state["targets"].long()
        found, _ = ref.mean_loss(ref.cross_entropy(logits, targets), targets)
        found.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch.testing.assert_close(
            torch.stack([found.detach(), norm]), torch.stack([loss, grad_norm]), rtol=1e-11, atol=0
        )


def test_clipping_never_enlarges(references):
    """A limit above the norm changes nothing: not even a bit."""
    config, results = load_config(references / "tied-gqa" / "f32"), []
    for grad_clip in (0.0, 100.0):
        model = ref.empty_model(config, torch.float32)
        load_weights(model, references / "tied-gqa" / "f32")
        optimizer = ref.AdamW(parts(model), 0.9, 0.95, 0.1)
        data = [batch(config.vocab_size)]
        ref.train_step(model, data, ref.precompute_cis(config, T), optimizer, 0.01, grad_clip, torch.float32)
        results.append(optimizer.m)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
