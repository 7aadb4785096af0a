"""llamac.patch on transformers' models: losses and gradients within the tolerance, beside the unpatched
model's; that our operations run; and that what they do not take is left to the model's own code.
"""

import copy
import functools
import inspect
import pickle
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
import transformers
from patched import (
    ALL,
    BOTH,
    DTYPES,
    INPUTS,
    LAYERS,
    LENGTHS,
    MODELS,
    NORMS,
    OFFSET,
    PADDED,
    SIZES,
    B,
    Called,
    T,
    V,
    build,
    call,
    counted,
    in_double,
    mismatches,
    tokens,
    truth,
    without,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.loss.loss_utils import ForCausalLMLoss

import llamac
from llamac.base import extension
from llamac.base.tolerance import FORWARD, violation
from llamac.ops.transformers_patch import report

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICES = ["cpu"] + [device for device in [extension.device()] if device != "cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, "bf16") for name in MODELS),
        *(pytest.param(name, "f32", marks=pytest.mark.more) for name in list(MODELS)[::2]),
    ],
)
def test_agreement(name, dtype, device):
    model = build(name, DTYPES[dtype]).to(device)
    theirs = [call(model, inputs) for inputs in INPUTS.values()]
    ours = [call(llamac.patch(model), inputs) for inputs in INPUTS.values()]
    assert mismatches(ours, theirs, [truth(name, inputs) for inputs in INPUTS], dtype) == []


RUNS = [(name, inputs) for name in ("llama", "mistral", "qwen2", "qwen3") for inputs in INPUTS]
RUNS += [(f"{name}-window", x) for name in ("mistral", "qwen2") for x in ("plain", "padded", "packed")]


@pytest.mark.parametrize("name, inputs", RUNS)
def test_our_operations_run(name, inputs):
    expected = without("attention") if inputs == "holes" else ALL
    if name == "qwen3":
        expected = {n.replace("rope", "qk_norm_rope"): count for n, count in expected.items()}
    assert counted(llamac.patch(build(name)), INPUTS[inputs]) == expected


def inside(mask: torch.Tensor) -> torch.Tensor:
    """Labels of the tokens behind others that the mask does not hide: what padding predicts is the model's
    own affair."""
    return tokens().masked_fill(F.pad(mask[:, :-1] * mask[:, 1:], (1, 0)) == 0, -100)


# One row of three documents, as its positions say and as flash attention's arguments do.
ONE_ROW = {"input_ids": tokens(3)[:1], "labels": tokens()[:1], "use_cache": False}
RESTARTS = {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS.diff().tolist()])[None]}
FLAT = {"cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS.clone(), "max_length_q": 10, "max_length_k": 10}
# How the model's own code is called, and ours.
EAGER = [
    (INPUTS["packed"], INPUTS["packed"]),
    (ONE_ROW | RESTARTS, ONE_ROW | FLAT),
    (ONE_ROW | RESTARTS, ONE_ROW | RESTARTS | FLAT),
]
for k, mask in enumerate((PADDED, PADDED.flip(1), BOTH)):
    some = {"input_ids": tokens(4 + k), "attention_mask": mask, "labels": inside(mask)}
    EAGER.append((some, some))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_masks_agree_with_eager_attention(name, dtype):
    """Which writes all scores and adds the mask that the model makes."""
    model, exact = (build(name, d, attn_implementation="eager") for d in (DTYPES[dtype], torch.float64))
    patched = llamac.patch(build(name, DTYPES[dtype]))
    theirs, ours = [call(model, a) for a, _ in EAGER], [call(patched, b) for _, b in EAGER]
    assert mismatches(ours, theirs, [in_double(exact, a) for a, _ in EAGER], dtype) == []
    assert all(counted(patched, b) == ALL for _, b in EAGER)


@pytest.mark.parametrize("dtype", DTYPES)
def test_documents_alone(dtype):
    """A packed row has the loss and the gradients of its documents in rows of their own, which begin at
    position 0: RoPE is relative."""
    ids, count = ONE_ROW["input_ids"], {"num_items_in_batch": T, "use_cache": False}
    labels = ids.masked_fill(RESTARTS["position_ids"] == 0, -100)
    rows = [{"input_ids": x, "labels": x} | count for x in ids.split(LENGTHS.diff().tolist(), 1)]

    def alone(model, called):
        losses, gradients = zip(*(called(model, row) for row in rows))
        return sum(losses), {name: sum(g[name] for g in gradients) for name in gradients[0]}

    model, exact = (build("mistral-window", d) for d in (DTYPES[dtype], torch.float64))
    theirs = alone(model, call)
    ours = call(llamac.patch(model), {"input_ids": ids, "labels": labels} | FLAT | count)
    assert mismatches([ours], [theirs], [alone(exact, in_double)], dtype) == []


LEFT = {
    "a mask of four dimensions": {"attention_mask": torch.ones(1, 1, T, T, dtype=torch.bool).tril()},
    "several rows": FLAT | {"input_ids": tokens(), "labels": tokens()},
    "other keys": FLAT | {"cu_seq_lens_k": LENGTHS[[0, 3]]},
    "queries alone": {"cu_seq_lens_q": LENGTHS},
    "lengths and a mask": FLAT | {"attention_mask": torch.ones(1, T)},
}


@pytest.mark.parametrize("case", LEFT)
def test_masks_that_are_left_to_the_model(case):
    model, inputs = build("mistral-window"), ONE_ROW | LEFT[case]
    expected = call(model, inputs)
    assert counted(llamac.patch(model), inputs) == without("attention")
    torch.testing.assert_close(call(model, inputs), expected, rtol=1e-4, atol=1e-5)


def test_a_forward_wrapped_after_the_patch():
    """As accelerate's mixed precision does: without the patch the wrapper would call what is no more."""
    model = llamac.patch(build())
    model.forward = functools.partial(model.forward)
    with pytest.raises(TypeError, match="the forward of the model was replaced after"):
        llamac.unpatch(model)
    del model.forward
    assert type(llamac.unpatch(model)) is transformers.LlamaForCausalLM


@pytest.mark.parametrize("after", [False, True])
def test_an_attention_put_in_place_of_the_models(after):
    """As adapters put theirs: it gets what transformers' layers give, cos and sin."""

    class Other(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden_states, position_embeddings, **kwargs):
            cos, sin = position_embeddings
            assert cos.shape == sin.shape
            return self.inner(hidden_states, position_embeddings=(cos, sin), **kwargs)

    model, plain = build(), build()
    if after:
        llamac.patch(model)
    for some in (model, plain):
        some.model.layers[0].self_attn = Other(some.model.layers[0].self_attn)
    found = call(llamac.patch(model), INPUTS["plain"])
    torch.testing.assert_close(found, call(plain, INPUTS["plain"]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_unpatch_restores(name):
    model = build(name)
    classes = [type(m) for m in model.modules()]
    attributes = [{n: id(x) for n, x in vars(m).items()} for m in model.modules()]
    config, signature = model.config.to_dict(), inspect.signature(model.forward)
    before = call(model, INPUTS["plain"])
    assert llamac.patch(model) is model and llamac.patch(model) is model
    assert inspect.signature(model.forward) == signature and isinstance(model, classes[0])
    assert [{n: id(x) for n, x in vars(m).items()} for m in model.modules()] == attributes
    assert llamac.unpatch(model) is model and llamac.unpatch(model) is model
    assert [type(m) for m in model.modules()] == classes
    assert [{n: id(x) for n, x in vars(m).items()} for m in model.modules()] == attributes
    assert model.config.to_dict() == config
    torch.testing.assert_close(call(model, INPUTS["plain"]), before, rtol=0, atol=0)


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_our_operations_run_on_a_gpu():
    """Attention where its fast kernels take it: bfloat16 and heads of 64."""
    for name, dtype in (("llama-flash", "bf16"), ("llama-flash", "f32"), ("llama", "bf16")):
        model = llamac.patch(build(name, DTYPES[dtype])).cuda()
        expected = ALL if (name, dtype) == ("llama-flash", "bf16") else without("attention")
        assert counted(model, INPUTS["plain"]) == expected


def test_unknown_models_are_refused():
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=V)
    with pytest.raises(TypeError, match=r"GPT2LMHeadModel, expected .* Llama, Mistral, Qwen2, Qwen3$"):
        llamac.patch(transformers.GPT2LMHeadModel(config))
    with pytest.raises(TypeError, match=r"Sequential, expected .*; its part 1 is one$"):
        llamac.patch(nn.Sequential(nn.Identity(), build()))


def noise(*shape: int) -> torch.Tensor:
    """The same for every type: what bfloat16 holds."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.2).bfloat16()


class Adapter(nn.Module):
    """A frozen layer and a low-rank product beside it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(noise(3, base.in_features).to(base.weight.dtype))
        self.up = nn.Parameter(noise(base.out_features, 3).to(base.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def adapt(model: nn.Module) -> None:
    model.lm_head = Adapter(model.lm_head)
    for layer in model.model.layers:
        layer.self_attn.k_proj = Adapter(layer.self_attn.k_proj)
        layer.mlp.gate_proj = Adapter(layer.mlp.gate_proj)


def freeze(model: nn.Module) -> None:
    """Only the second layer learns, and not all of its feed-forward network."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("model.layers.1") and "up_proj" not in name)


def hook(model: nn.Module) -> None:
    layer = model.model.layers[0]
    for module in (layer.mlp.gate_proj, layer.post_attention_layernorm, model.model.norm, model.lm_head):
        module.register_forward_hook(lambda module, inputs, out: out * 2)
    layer.self_attn.register_forward_hook(lambda module, inputs, out: (out[0] * 2, out[1]))
    layer.mlp.up_proj.register_forward_pre_hook(lambda module, inputs: inputs[0] * 2)


def replace_forward(model: nn.Module) -> None:
    """As those do it who load a weight when it is needed."""
    layer = model.model.layers[0]
    for module in (layer.mlp.up_proj, layer.post_attention_layernorm, layer.self_attn, model.lm_head):
        module.forward = functools.partial(module.forward)


def new_head(model: nn.Module) -> None:
    model.resize_token_embeddings(V + 9, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(noise(V + 9, SIZES["hidden_size"]))


def no_causality(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


def own_loss(model: nn.Module) -> None:
    model.loss_function = lambda *arguments, **others: 2 * ForCausalLMLoss(*arguments, **others)


# name: what is done to a Llama after it is built, configuration, our operations
CHANGES = {
    "adapters": (adapt, {}, without("linear_cross_entropy")),
    "frozen": (freeze, {}, {}),
    "hooks": (hook, {}, without("linear_cross_entropy")),
    "own forward": (replace_forward, {}, {}),
    "own loss": (own_loss, {}, without("linear_cross_entropy")),
    "new head": (new_head, {}, ALL),
    "not causal": (no_causality, {}, without("attention")),
    "gelu": (None, {"hidden_act": "gelu"}, without("swiglu")),
    "eager": (None, {"attn_implementation": "eager"}, without("attention", "rope")),
    "odd heads": (None, {"head_dim": 10, "num_key_value_heads": 1}, ALL),
}


@pytest.mark.parametrize(
    "dtype", [pytest.param(name, marks=() if name == "bf16" else pytest.mark.more) for name in DTYPES]
)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_models_agree(change, dtype):
    function, config, operations = CHANGES[change]

    def make(dtype):
        model = build("llama", dtype, **config)
        if function:
            function(model)
        return model

    inputs = [INPUTS[name] for name in ("plain", "ignored", "items", "padded right")]
    exact = [in_double(make(torch.float64), x) for x in inputs]
    model = make(DTYPES[dtype])
    theirs = [call(model, x) for x in inputs]
    ours = [call(llamac.patch(model), x) for x in inputs]
    assert mismatches(ours, theirs, exact, dtype) == []
    if operations:
        found = counted(model, INPUTS["plain"])
        assert found.keys() == operations.keys()


def test_a_new_head_after_the_patch():
    model = llamac.patch(build())
    new_head(model)
    assert counted(model, INPUTS["plain"]) == ALL


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama-tied", "mistral-window", "qwen2"])
def test_eval_and_outputs(name, dtype):
    """Logits where they are the result, in the order and form of the unpatched model."""
    model = build(name, DTYPES[dtype]).eval()
    exact = build(name, torch.float64).eval()
    plain, padded = INPUTS["plain"], INPUTS["padded right"]
    unlabelled = {"input_ids": plain["input_ids"]}
    special = ({}, {"logits_to_keep": 3}, {"position_ids": OFFSET})
    calls = (plain, padded, *(unlabelled | more for more in special))

    def results(model):
        outs = [model(**inputs, output_hidden_states=True) for inputs in calls]
        results = [[out.logits, *out.hidden_states] for out in outs]
        results[1] = [x[padded["attention_mask"] != 0] for x in results[1]]  # of what is no padding
        return [x for states in results for x in states]

    with torch.no_grad():
        columns = results(model), results(llamac.patch(model)), results(exact)
        theirs, ours, exact = ([x.double().numpy() for x in column] for column in columns)
        assert [len(x) for x in (theirs, exact)] == [len(ours)] * 2 == [5 + 5 * (LAYERS + 1)] * 2
        for a, b, c in zip(ours, theirs, exact):
            assert violation(a, b, c, dtype, FORWARD) == ""
        assert model(**plain).loss is not None and model(**unlabelled).loss is None
        assert isinstance(model(**plain, return_dict=False), tuple)
    model.train()
    loss, *rest = model(plain["input_ids"], labels=plain["labels"], use_cache=False, return_dict=False)
    assert loss.dim() == 0 and rest == []
    assert model(**plain).logits is None and model(plain["input_ids"]).logits.shape == (B, T, V)
    positional = model(plain["input_ids"], None, None, None, None, plain["labels"])
    assert positional.logits is not None and positional.loss is not None
    assert llamac.patch(llamac.unpatch(model), logits=True)(**plain).logits is not None


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window"])
@pytest.mark.parametrize("cache", [{}, {"use_cache": False}, {"cache_implementation": "static"}])
def test_generates_the_same_tokens(name, cache):
    model = build(name).eval()
    inputs = {"input_ids": tokens(), "attention_mask": INPUTS["padded left"]["attention_mask"]}
    settings = {"max_new_tokens": 9, "do_sample": False, "disable_compile": True} | cache
    before = model.generate(**inputs, **settings)
    with Called() as called:
        after = llamac.patch(model).generate(**inputs, **settings)
    assert torch.equal(before, after)
    assert called.counts.keys() >= {"rmsnorm_forward", "residual_rmsnorm_forward", "rope_forward"}


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_autocast(name):
    """Parameters in float32, products in bfloat16."""
    inputs = [INPUTS["plain"], INPUTS["padded right"], INPUTS["items"]]
    exact = [in_double(build(name, torch.float64), x) for x in inputs]
    model = build(name)

    def calls():
        with torch.autocast("cpu", torch.bfloat16):
            return [call(model, x) for x in inputs]

    theirs = calls()
    llamac.patch(model)
    assert mismatches(calls(), theirs, exact, "bf16") == []
    with torch.autocast("cpu", torch.bfloat16):
        assert counted(model, inputs[0]) == ALL
    with torch.autocast("cpu", torch.float16):
        assert counted(model, inputs[0]).keys() == NORMS.keys()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(reentrant):
    model = llamac.patch(build())
    expected = call(model, INPUTS["no cache"])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    torch.testing.assert_close(call(model, INPUTS["no cache"]), expected, rtol=0, atol=0)
    assert counted(model, INPUTS["no cache"])["attention_forward"] == 2 * LAYERS


def test_dropout_of_attention():
    model = build(attention_dropout=0.5)
    results = []
    for function in (lambda model: None, llamac.patch):
        function(model)
        torch.manual_seed(5)
        results.append(call(model, INPUTS["plain"]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert "attention_forward" not in counted(model, INPUTS["plain"])
    model.eval()
    with Called() as called:
        model(tokens())
    assert called.counts["attention_forward"] == LAYERS


def test_float16_is_left_alone():
    model = build(dtype=torch.float16)
    before = call(model, INPUTS["plain"])
    torch.testing.assert_close(call(llamac.patch(model), INPUTS["plain"]), before, rtol=0, atol=0)
    assert counted(model, INPUTS["plain"]) == {}


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification", "ForTokenClassification"])
def test_other_heads(kind):
    model = build("qwen2", kind=kind).eval()
    results = [model(tokens())[0], llamac.patch(model)(tokens())[0]]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    with Called() as called:
        model(tokens())
    assert called.counts["attention_forward"] == LAYERS


def test_copied_pickled_and_saved(tmp_path):
    """What is saved says nothing of the patch; a copy is patched too."""
    model = llamac.patch(build())
    expected = call(model, INPUTS["plain"])
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again) is type(model) and again.lm_head.weight is not model.lm_head.weight
        torch.testing.assert_close(call(again, INPUTS["plain"]), expected, rtol=0, atol=0)
        assert type(llamac.unpatch(again)) is transformers.LlamaForCausalLM
    model.save_pretrained(tmp_path)
    assert model.state_dict().keys() == build().state_dict().keys()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    torch.testing.assert_close(call(llamac.patch(loaded), INPUTS["plain"]), expected, rtol=0, atol=0)


@pytest.mark.more
def test_compiled_without_a_break():
    """Without the mask that the model makes when it is compiled."""
    operations = Counter()

    def backend(graph, examples):
        called = (node for node in graph.graph.nodes if node.op == "call_function")
        operations.update(str(node.target).removesuffix(".default") for node in called)
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    torch.compiler.reset()
    model = llamac.patch(build("qwen2-window"))
    expected = call(model, INPUTS["no cache"])
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    model.zero_grad()
    loss = compiled(**INPUTS["no cache"]).loss
    loss.backward()
    found = loss.detach(), {n: p.grad for n, p in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert operations["llamac.attention_forward"] == LAYERS
    assert operations["llamac.residual_rmsnorm_forward"] == operations["llamac.swiglu_forward"] == LAYERS


def test_report():
    model = build(hidden_act="gelu", attn_implementation="eager")
    adapt(model)
    replace_forward(model)
    assert report(llamac.patch(model)) == [
        "RMSNorm: 4 of 5",
        "RMSNorm: 1 of 5: its forward was replaced",
        "RotaryEmbedding: 0 of 1",
        "RotaryEmbedding: 1 of 1: an attention of the model is left",
        "Attention: 1 of 2",
        "Attention: 1 of 2: its forward was replaced",
        "Attention: 1 of 2: left while the attention's implementation is eager, not sdpa",
        "MLP: 0 of 2",
        "MLP: 2 of 2: its activation is GELUActivation, not SiLU",
        "DecoderLayer: 2 of 2",
        "Model: 1 of 1",
        "ForCausalLM: 1 of 1",
        "ForCausalLM: 1 of 1: loss left: lm_head is more than a product with a weight",
    ]


def test_sharded():
    """In mixed precision, which casts whatever is floating in a layer's arguments; one process."""
    model = llamac.patch(build())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.model.layers, model):
            fully_shard(module, mp_policy=policy, mesh=init_device_mesh("cpu", (1,)))
        with Called() as called:
            loss = model(**INPUTS["no cache"]).loss
            loss.backward()
        assert {n for n in called.counts if n != "cross_entropy"} == ALL.keys() and loss.isfinite()
        with pytest.raises(TypeError, match="the model became FSDPLlamaForCausalLM"):
            llamac.unpatch(model)
    finally:
        torch.distributed.destroy_process_group()


def test_products_in_fp8():
    """The blocks' linear layers alone, and their own classes again after unpatch(); files do not change."""
    model, plain = build(), build()
    names = {name for name, _ in model.named_parameters()}
    llamac.patch(model, fp8=True)
    with Called() as called:
        loss = model(**INPUTS["no cache"]).loss
        loss.backward()
    assert called.counts["scaled_matmul"] == 3 * 7 * LAYERS  # three products of seven layers
    assert loss.item() == pytest.approx(plain(**INPUTS["no cache"]).loss.item(), rel=0.02)
    assert loss.item() != llamac.patch(plain)(**INPUTS["no cache"]).loss.item()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == names
    assert report(model)[-1] == f"Linear in fp8: {7 * LAYERS} of {7 * LAYERS}"
    assert {name: x.dtype for name, x in model.state_dict().items()} == {
        name: x.dtype for name, x in build().state_dict().items()
    }
    assert type(model.lm_head) is nn.Linear
    llamac.patch(model, fp8=True)  # a second time
    copied = pickle.loads(pickle.dumps(model))
    assert report(copied) == report(model)
    llamac.unpatch(model)
    assert {type(m) for m in model.modules()} == {type(m) for m in build().modules()}


def test_products_in_fp8_with_biases_and_adapters():
    model = llamac.patch(build("llama-biased"), fp8=True)
    plain = build("llama-biased")
    expected = plain(**INPUTS["no cache"]).loss.item()
    assert model(**INPUTS["no cache"]).loss.item() == pytest.approx(expected, rel=0.02)
    assert model.generate(tokens(), max_new_tokens=3, do_sample=False).shape == (B, T + 3)
    model = build()
    model.model.layers[0].self_attn.q_proj = Sub(64, 64, bias=False)
    assert f"Linear in fp8: 1 of {7 * LAYERS}: it is a Sub" in report(llamac.patch(model, fp8=True))


class Sub(nn.Linear):
    pass


def test_products_in_fp8_are_refused():
    model = build().half()
    with pytest.raises(ValueError, match=r"fp8: model\.layers\.0\.self_attn\.q_proj: x is torch\.float16"):
        llamac.patch(model, fp8=True)
    assert report(model)[0] == "RMSNorm: 0 of 5"
