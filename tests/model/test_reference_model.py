"""The reference model (train_llama3.py) against transformers' LlamaForCausalLM, and the reference tensors."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
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


def batch(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = torch.from_numpy(np.random.default_rng(7).integers(vocab_size, size=(2, B, T)))
    targets[:, 3::4] = ref.IGNORED
    return tokens, targets


def our_results(directory: Path, dtype: torch.dtype) -> Tensors:
    """Logits, loss and gradients of every parameter, by our model loaded from a directory."""
    model = ref.empty_model(load_config(directory), dtype)
    load_weights(model, directory)
    tokens, targets = batch(model.config.vocab_size)
    logits = model(tokens, ref.precompute_cis(model.config, T, dtype=dtype))
    loss, _ = ref.mean_loss(ref.cross_entropy(logits, targets), targets)
    loss.backward()
    turned, found = model.config.is_turned, parts(model)
    grads = {p.name: p.parameter.grad.T if turned(p.name) else p.parameter.grad for p in found}
    return {"logits": logits.detach(), "loss": loss.detach(), **grads}


def their_results(directory: Path, dtype: torch.dtype) -> Tensors:
    """The same by transformers."""
    is_encoder = load_config(directory).is_encoder
    kind = AutoModelForMaskedLM if is_encoder else AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    tokens, targets = batch(model.config.vocab_size)
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"logits": logits.detach(), "loss": loss.detach(), **grads}


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


def interleaved_rope(x, cis):
    cos, sin = cis
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def unscaled(config, *args, **kwargs):
    return PRECOMPUTE_CIS(replace(config, rope_scaling=None), *args, **kwargs)


def heads_in_turn(q, k, v, **mask):  # query head h reads key head h % NKV instead of h // (NH/NKV)
    k, v = (x.repeat(1, 1, q.shape[2] // x.shape[2], 1) for x in (k, v))
    return ref.attention(q, k, v, **mask)


PRECOMPUTE_CIS, RMSNORM = ref.precompute_cis, ref.rmsnorm
FAULTS = {
    "interleaved": ("tied-gqa", ref.TORCH, "rope", interleaved_rope),
    "unscaled8": ("scaled8", ref, "precompute_cis", unscaled),
    "unscaled32": ("scaled32", ref, "precompute_cis", unscaled),
    "heads": ("tied-gqa", ref.TORCH, "attention", heads_in_turn),
    "norm": ("untied-mha", ref.TORCH, "rmsnorm", lambda x, weight, eps: RMSNORM(x, weight, eps) / weight),
    "nan": ("untied-mha", ref, "cross_entropy", lambda logits, targets: logits.sum() * math.nan),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_catches_a_fault(references, monkeypatch, fault):
    name, where, what, wrong = FAULTS[fault]
    directory = references / name / "f32"
    truth, baseline = true_results(directory, monkeypatch), their_results(directory, torch.float32)
    monkeypatch.setattr(where, what, wrong)
    ours = our_results(directory, torch.float32)
    unused = {name: torch.zeros_like(truth[name]) for name, x in ours.items() if x is None}
    assert mismatches(ours | unused, baseline, truth) != []


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


@pytest.mark.parametrize("name", MODELS[:-1])
def test_activations_and_gradients_fit_together(references, name):
    """In double: a weight's gradient is the product of the tensors that the state names as its input and its
    output's gradient, and the norms' and attention's statistics give their outputs.
    """
    config = load_config(references / name / "f32")
    files = (references / name / f"f32/{file}.safetensors" for file in ("truth", "model"))
    state, weights = map(load_file, files)

    def product(dout: str, x: str) -> torch.Tensor:
        return state[dout].flatten(2).flatten(0, 1).T @ state[x].flatten(0, 1)

    def close(a: torch.Tensor, b: torch.Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)

    head = product("dact.logits", "act.final_norm")
    if not config.tie_word_embeddings:
        close(head, state["grad.lm_head.weight"])
    x = state["act.embedding"]
    for i, window in enumerate(config.windows()):
        a, d = f"act.{i}.", f"dact.{i}."
        is_gpt2 = config.model_type == "gpt2"
        prefix, half, (o, down) = f"model.layers.{i}.", "self_attn", ("self_attn.o_proj", "mlp.down_proj")
        (*_, last), _, up, _ = (tuple(row.weights) for row in config.block)
        norms, activation = ("input_layernorm", "post_attention_layernorm"), "swiglu"
        if is_gpt2:
            prefix, half, (o, down) = f"transformer.h.{i}.", "attn", ("attn.c_proj", "mlp.c_proj")
            last, norms, up, activation = "c_attn", ("ln_1", "ln_2"), ("c_fc",), "gelu"

        def gradient(*modules: str, prefix: str = prefix) -> torch.Tensor:
            return torch.cat([state[f"grad.{prefix}{module}.weight"] for module in modules])

        mlp, added, inputs = (
            state[a + "residual_mid"],
            ("residual_mid", "residual_out"),
            ("input_norm", "post_norm"),
        )
        normed = {"input": (x, state.get(a + inputs[0])), "post": (mlp, state.get(a + inputs[1]))}
        if config.output_norm:
            norms, inputs = (
                ("post_attention_layernorm", "post_feedforward_layernorm"),
                ("attention_input", "mlp_input"),
            )
            for name, residual in zip(inputs, (x, mlp)):
                close(state[a + name], residual)
            sums = mlp - x, state[a + "residual_out"] - mlp
            added = ("attention_out", "mlp_out")
            normed = {name: (state[a + name], change) for name, change in zip(added, sums)}
        close(product(d + "v", a + inputs[0]), gradient(f"{half}.{last}")[-config.kv_size :])
        close(product(d + added[0], a + "attention"), gradient(o))
        close(product(d + "gate_up", a + inputs[1]), gradient(*(f"mlp.{each}" for each in up)))
        close(product(d + added[1], a + activation), gradient(down))
        gate, *rest = state[a + "gate_up"].chunk(1 if is_gpt2 else 2, -1)
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        made = gate * (1 + inner.tanh()) / 2 if is_gpt2 else gate * gate.sigmoid() * rest[0]
        close(made, state[a + activation])
        for module, (norm, (source, result)) in zip(norms, normed.items()):
            scale = weights[f"{prefix}{module}.weight"].double()
            mean, shift = state.get(f"{a}{norm}_mean"), weights.get(f"{prefix}{module}.bias")
            centered = source if mean is None else source - mean[..., None]
            wanted = centered * state[f"{a}{norm}_rstd"][..., None] * scale
            close(wanted if shift is None else wanted + shift.double(), result)
        q, k, v = state[a + "q"], state[a + "k"], state[a + "v"]
        group = q.shape[2] // k.shape[2]
        scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(group, 2)) / math.sqrt(
            config.head_dim
        )
        probabilities = (scores - state[a + "attention_lse"][..., None]).exp().tril()
        probabilities = probabilities.triu(1 - (window or T))
        close(probabilities.sum(-1), torch.ones(B, q.shape[2], T, dtype=torch.float64))
        attention = torch.einsum("bhts,bshd->bthd", probabilities, v.repeat_interleave(group, 2))
        close(attention.flatten(2), state[a + "attention"])
        x = state[a + "residual_out"]


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
