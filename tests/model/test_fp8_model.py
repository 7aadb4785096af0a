"""The C model with products in fp8 against the reference model: every activation, every gradient, ten steps.

A code of fp8 that is rounded the other way moves a result by far more than arithmetic does, and all that
follows with it. Each tensor is therefore compared with what the reference makes of the C model's own: the
inputs of every operation, and the gradient of its output, are C's. Both then quantise the same numbers, and
the tolerance is that of any operation: PyTorch's error in the same type against float64 of the same codes.
"""

import re
import shutil
import subprocess
import sys
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from debug_states import MODELS, first_difference, load, run_model
from library_product import library_products
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import train_llama3 as ref
from llamac.base.tolerance import Error, error_of
from llamac.model.block import ACTIVATIONS, BLOCK
from llamac.model.config import Config, load_config
from llamac.training import fp8, fp8_reference
from llamac.training.fp8_reference import power_of_two
from llamac.training.options import Options
from llamac.training.references import suffix
from llamac.training.trace import explicit_attention
from llamac.training.weights import fuse_products, parts

pytestmark = pytest.mark.program
RECIPES = ["tensor", "delayed", "row"]
GRADIENTS = "e5m2"


def flags(recipe: str, gradients: str = GRADIENTS, head: str = "off") -> Options:
    return Options(matmul_dtype="fp8", fp8_recipe=recipe, fp8_gradients=gradients, fp8_head=head)


class Forced(torch.autograd.Function):
    """C's tensor in the place of x, C's gradient in the place of x's; `found` gets both of x. Where C does
    not show one, x's own.
    """

    @staticmethod
    def forward(ctx, x, name: str, ours: dict, found: dict):
        value, gradient = (name, f"dact.{name}") if name == "logits" else (f"act.{name}", f"dact.{name}")
        ctx.keep = lambda d: chosen(d, gradient)

        def chosen(x, key):
            found[key] = x.detach()
            return torch.from_numpy(ours[key]).view(x.shape).to(x.dtype) if key in ours else x.clone()

        return chosen(x, value)

    @staticmethod
    def backward(ctx, d):
        return ctx.keep(d), None, None, None


def forced_operations(config: Config, ours: dict, found: dict, force) -> SimpleNamespace:
    """The reference's operations, whose tensors become C's."""
    norms, middles, attentions, activations = (count() for _ in range(4))
    kind, activation = config.normalization_function, ACTIVATIONS[config.hidden_act]
    plain_norm, plain_activation = getattr(ref, kind), getattr(ref, activation)

    def show_statistics(name: str, x: torch.Tensor, eps: float) -> None:
        own = ref.rstd_mean(x, eps) if kind == "layernorm" else (ref.rstd(x, eps),)
        found.update(zip((f"act.{name}_rstd", f"act.{name}_mean"), own))

    def norm(x, *weights_and_eps):
        i = next(norms)
        if config.is_encoder and i == 1:  # of the head
            return force(plain_norm(x, *weights_and_eps), "transform_norm")
        return input_norm(i, x, *weights_and_eps)

    def input_norm(i, x, *weights_and_eps):
        last = f"act.{i}.input_norm" not in ours
        if not last:
            show_statistics(f"{i}.input", x, weights_and_eps[-1])
        return force(plain_norm(x, *weights_and_eps), "final_norm" if last else f"{i}.input_norm")

    def residual_norm(x, residual, *weights_and_eps):
        i, is_last = divmod(next(middles), 2) if config.is_encoder else (next(middles), False)
        if is_last:
            x = force(residual + x, f"{i}.residual_out")
            return x, input_norm(i + 1, x, *weights_and_eps)
        x = force(residual + x, f"{i}.residual_mid")
        show_statistics(f"{i}.post", x, weights_and_eps[-1])
        return x, force(plain_norm(x, *weights_and_eps), f"{i}.post_norm")

    def added_norm(x, residual, *weights_and_eps):
        i, is_last = divmod(next(middles), 2)
        name = f"{i}.mlp_out" if is_last else f"{i}.attention_out"
        x = force(x, name)
        show_statistics(name, x, weights_and_eps[-1])
        x = residual + plain_norm(x, *weights_and_eps)
        return x if is_last else force(force(x, f"{i}.residual_mid"), f"{i}.mlp_input")

    def attention(q, k, v, **mask):
        i = next(attentions)
        q, k, v = (force(x, f"{i}.{name}") for x, name in ((q, "q"), (k, "k"), (v, "v")))
        seen = ref.seen(q.shape[1], mask.get("first"), mask.get("window"), mask.get("causal", True), q.device)
        found[f"act.{i}.attention_lse"] = explicit_attention(q, k, v, seen)[1]
        return force(ref.attention(q, k, v, **mask), f"{i}.attention")

    def activated(gate_up):
        i = next(activations)
        if i == config.num_hidden_layers:  # of the head
            return force(plain_activation(force(gate_up, "transform")), "transform_gelu")
        return force(plain_activation(force(gate_up, f"{i}.gate_up")), f"{i}.{config.block[3].x.name}")

    given = {kind: norm, f"residual_{kind}": residual_norm, f"added_{kind}": added_norm}
    given |= {"attention": attention, activation: activated}
    return SimpleNamespace(**vars(ref.TORCH) | given)


def forced_model(folder: Path, dtype: torch.dtype, ours: dict, found: dict, o: Options, force) -> ref.Llama:
    """With C's weights, where it shows them, and its scales where a step has set them."""
    config = load_config(folder)
    model = ref.empty_model(config, dtype, ops=forced_operations(config, ours, found, force))
    ref.references.load_weights(model, folder)
    for part in parts(model):
        if (values := ours.get(f"weight.{part.name}")) is not None:
            part.parameter.data = torch.from_numpy(values).view(part.shape).to(dtype)
    fuse_products(model)
    fp8.use_products(model, o)
    if any(name.startswith("weight.") for name in ours) and o.fp8_recipe == "delayed":
        model.fp8.scales.scale.copy_(torch.from_numpy(ours["fp8.scale"]).float())
        model.fp8.scales.calibrated = True
    first = model.model.embed_norm if config.is_encoder else model.model.layers[0]
    first.register_forward_pre_hook(lambda m, x: (force(x[0], "embedding"), *x[1:]))
    for i, block in enumerate(model.model.layers):
        if not config.is_encoder:
            block.register_forward_hook(lambda m, x, out, i=i: force(out, f"{i}.residual_out"))
        if config.output_norm:
            block.register_forward_pre_hook(lambda m, x, i=i: (force(x[0], f"{i}.attention_input"), *x[1:]))
        (qkv,) = map(block.self_attn.get_submodule, block.self_attn.modules_of["qkv"])
        qkv.register_forward_hook(lambda m, x, out, i=i: force(out, f"{i}.qkv"))
    return model


def forced_state(
    folder: Path, dtype: torch.dtype, ours: dict, o: Options, gpu: bool = False
) -> tuple[dict, fp8.Products]:
    """What the reference makes of C's tensors, by the names of the debug state; the products, with scales.
    gpu: with a GPU's products.
    """
    found: dict[str, torch.Tensor] = {}
    force = lambda x, name: Forced.apply(x, name, ours, found)  # noqa: E731
    model = forced_model(folder, dtype, ours, found, o, force)
    batch = load_file(folder / "debug_state.safetensors")
    tokens, targets = batch["tokens"].long(), batch["targets"].long()
    cis = ref.precompute_cis(model.config, tokens.shape[1], dtype=torch.promote_types(dtype, torch.float32))
    with library_products(gpu, fast=True):
        losses = ref.cross_entropy(force(model(tokens, cis), "logits"), targets)
    with library_products(gpu, fast=False):
        (losses.sum() / (targets >= 0).sum()).backward()
    found["losses"] = losses
    found |= {f"grad.{part.name}": part.of(part.parameter.grad) for part in parts(model)}
    return {name: x.detach().double().numpy().ravel() for name, x in found.items()}, model.fp8


@pytest.fixture(scope="module")
def c_states(build, reference, gpu, tmp_path_factory):
    """(folder of the model, C's tensors after a number of steps), computed once. A GPU takes multiples of 16
    alone: there the batch is a column shorter.
    """
    root, cache = tmp_path_factory.mktemp("fp8"), {}

    def batch_of(model: str, dtype: str) -> Path:
        folder = root / model / dtype
        if gpu and model != "sixteens":
            pytest.skip("a GPU's products in fp8 take multiples of 16")
        if not folder.exists():
            shutil.copytree(
                reference / model / dtype, folder, ignore=shutil.ignore_patterns("debug_state*", "truth*")
            )
            with safe_open(reference / model / dtype / "debug_state.safetensors", "pt") as file:
                T = 32 if gpu else file.get_slice("tokens").get_shape()[1]
                batch = {n: file.get_tensor(n)[:, :T].contiguous() for n in ("tokens", "targets")}
                save_file(batch, folder / "debug_state.safetensors", file.metadata())
        return folder

    def get(model: str, dtype: str, recipe: str, gradients: str = GRADIENTS, steps: int = 0, *more: str):
        key = model, dtype, recipe, gradients, steps, more
        if key not in cache:
            folder = batch_of(model, dtype)
            words = "none", "1000000", f"fp8={recipe},{gradients}", f"steps={steps}", *more
            cache[key] = folder, run_model(build, folder, root / "state", dtype, *words)
        return cache[key]

    return get


def errors_by_kind(torchs: dict, truth: dict) -> dict[str, Error]:
    """PyTorch's error of each tensor, relative to the largest: the most over the blocks, as a tensor of a few
    dozen numbers is one draw.
    """
    kind = lambda name: re.sub(r"\.\d+\.", ".*.", name)  # noqa: E731
    most: dict[str, Error] = {}
    for name, x in truth.items():
        error, before = error_of(torchs[name], x), most.get(kind(name), Error(0.0, 0.0))
        largest = error.largest / (np.abs(x).max() or 1.0)
        most[kind(name)] = Error(max(error.relative_l2, before.relative_l2), max(largest, before.largest))
    return {name: most[kind(name)] for name in truth}


@pytest.fixture(scope="module")
def difference(gpu):
    """The first tensor of C's that is outside the tolerance, or whose scale is not the reference's."""

    def first(folder: Path, ours: dict, dtype: str, o: Options) -> str:
        torchs, products = forced_state(folder, ref.DTYPES[dtype], ours, o, gpu)
        truth, _ = forced_state(folder, torch.float64, ours, o)
        compared = {name: x for name, x in ours.items() if name in truth}
        shown = [name for name in ours if name.startswith(("act.", "dact.", "grad.", "logits", "losses"))]
        assert list(compared) == shown
        if wrong := first_difference(compared, torchs, truth, dtype, errors_by_kind(torchs, truth)):
            return wrong
        return scales_difference(ours, products.scales)

    return first


def scales_difference(ours: dict, theirs: fp8_reference.Scales) -> str:
    """The first slot whose scales are not the reference's."""
    if theirs.recipe == "row":
        found = {name for name in ours if name.startswith("fp8.inverse.")}
        names = [f"fp8.inverse.{n}.{kind}" for n in theirs.slots for kind in ("rows", "transposed")]
        assert found == set(names)
        scales = [x.flatten() for slot in theirs.slots for x in theirs.inverses[slot]]
        equal = (np.array_equal(ours[n], x.numpy()) for n, x in zip(names, scales, strict=True))
    else:
        names = [f"fp8.scale of {slot}" for slot in theirs.slots]
        equal = (a == b for a, b in zip(torch.from_numpy(ours["fp8.scale"]).float(), theirs.scale))
    return next((name for name, same in zip(names, equal, strict=True) if not same), "")


@pytest.mark.parametrize(
    "recipe, dtype",
    [*((recipe, "bf16") for recipe in RECIPES), pytest.param("delayed", "f32", marks=pytest.mark.more)],
)
@pytest.mark.parametrize("model", MODELS)
def test_debug_state(c_states, difference, model, recipe, dtype):
    """Of the first step, whose scales are the tensors' own with either recipe; delayed also of the second."""
    for steps in range(2 if recipe == "delayed" else 1):
        folder, ours = c_states(model, dtype, recipe, steps=steps)
        assert difference(folder, ours, dtype, flags(recipe)) == ""


@pytest.mark.parametrize("dtype", [pytest.param("f32", marks=pytest.mark.more), "bf16"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", ["sixteens", "tied-gqa"])  # a head of its own, and the embedding
def test_head(c_states, difference, model, recipe, dtype):
    for steps in range(2 if recipe == "delayed" else 1):
        folder, ours = c_states(model, dtype, recipe, f"{GRADIENTS},head", steps)
        assert difference(folder, ours, dtype, flags(recipe, head="on")) == ""
        if steps == 0:
            assert difference(folder, ours, dtype, flags(recipe)).startswith("logits")  # of another product


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_in_e4m3(c_states, difference, recipe):
    folder, ours = c_states("sixteens", "bf16", recipe, "e4m3")
    assert difference(folder, ours, "bf16", flags(recipe, "e4m3")) == ""
    assert "dact" in difference(folder, ours, "bf16", flags(recipe))  # another type is noticed


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_delayed_scales_are_of_the_step_before(c_states, dtype):
    """Of the second step, from the largest values of the first."""
    (folder, first), (_, second) = (c_states("sixteens", dtype, "delayed", steps=n) for n in (0, 1))
    _, products = forced_state(folder, ref.DTYPES[dtype], first, flags("delayed"))
    assert torch.equal(products.scales.scale, torch.from_numpy(first["fp8.scale"]).float())
    products.update()
    assert torch.equal(products.scales.scale, torch.from_numpy(second["fp8.scale"]).float())
    limits = torch.tensor([torch.finfo(products.scales.dtype(slot)).max for slot in products.scales.slots])
    own = [power_of_two(a, limit, a) for a, limit in zip(largest_of(second, products), limits, strict=True)]
    assert (torch.stack(own) != products.scales.scale).any()  # the second's own are others


def largest_of(ours: dict, products: fp8.Products) -> list[torch.Tensor]:
    """Of C's tensors, by slot."""
    names: dict[str, list[str]] = {}
    for row, i in product(BLOCK, {slot.split(".")[0] for slot in products.scales.slots}):
        x, weight, gradient = row.slots(i)
        out = ["qkv"] if row.name == "qkv" else row.out  # before RoPE
        names[x] = [f"act.{x}"]
        names[weight] = [f"weight.model.layers.{i}.{row.half}.{module}.weight" for module in row.weights]
        names[gradient] = [f"dact.{i}.{name}" for name in out]
    found = []
    for slot in products.scales.slots:
        largest = max(np.abs(ours[name]).max() for name in names[slot])
        found.append(torch.tensor(largest, dtype=torch.float32))
    return found


@pytest.mark.parametrize(
    "kind, recipe",
    [
        pytest.param("reference", "tensor", marks=pytest.mark.more),
        pytest.param("naive", "row", marks=pytest.mark.more),
        pytest.param("kernels", "tensor", marks=pytest.mark.more),
        ("kernels", "row"),
    ],
)
def test_variants(c_states, difference, chosen, kind, recipe):
    folder, ours = c_states("sixteens", "bf16", recipe, GRADIENTS, 0, *chosen(kind))
    assert difference(folder, ours, "bf16", flags(recipe)) == ""


@pytest.mark.parametrize(
    "recipe, name, spoil",
    [
        ("tensor", "act.0.q", lambda x: x * (1 + 2**-10)),
        ("tensor", "act.1.residual_mid", lambda x: np.roll(x, 1)),
        ("tensor", "act.1.post_rstd", lambda x: x * (1 + 1e-5)),
        ("tensor", "dact.1.swiglu", np.zeros_like),
        ("tensor", "grad.model.layers.0.self_attn.v_proj.weight", lambda x: x * (1 + 2**-10)),
        ("tensor", "fp8.scale", lambda x: np.where(np.arange(x.size) == 5, 2 * x, x)),
        ("row", "fp8.inverse.0.d.o.transposed", lambda x: np.where(np.arange(x.size) == 5, 2 * x, x)),
    ],
)
def test_a_fault_is_caught_and_named(c_states, difference, recipe, name, spoil):
    folder, ours = c_states("untied-mha", "f32", recipe)
    assert difference(folder, ours | {name: spoil(ours[name])}, "f32", flags(recipe)).startswith(name)


@pytest.fixture(scope="module")
def ten_steps(reference):
    """(PyTorch's, float64's) losses and gradient norms of the ten steps."""
    cache: dict = {}

    def get(model: str, dtype: str, recipe: str):
        folder = reference / model / (dtype + suffix(flags(recipe)))
        if not (folder / "truth.safetensors").exists():
            command = [sys.executable, "train_llama3.py", "--matmul-dtype", "fp8", "--fp8-recipe", recipe]
            subprocess.run(command, cwd=ref.ROOT, check=True)
        key = model, dtype, recipe
        if key not in cache:
            files = (folder / f"{kind}.safetensors" for kind in ("debug_state", "truth"))
            cache[key] = [{n: x for n, x in load(f).items() if n.startswith("train.")} for f in files]
        return cache[key]

    return get


@pytest.mark.slow  # test_fp8_training.py compares shorter runs
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("recipe", ["tensor", "delayed"])
def test_losses_of_ten_updates(c_states, ten_steps, gpu, recipe, dtype):
    """Trajectories part at the first code that is rounded the other way: C's from float64's as PyTorch's do.
    Ten numbers that follow from each other are one draw: the baseline is at least the root mean square over
    the models, as in test_model.py.
    """
    if gpu:
        pytest.skip("the reference's batch is no multiple of 16")
    numbers = {model: ten_steps(model, dtype, recipe) for model in MODELS}
    series = {}
    for name in ("train.losses", "train.grad_norms"):
        # bert's steps are steadier; in f32 no code of phi3's and olmo2's may differ, which is no draw.
        drawn = [states for model, states in numbers.items() if model not in ("bert", "olmo2", "phi3")]
        errors = [error_of(torchs[name], truth[name]) for torchs, truth in drawn]
        largest = [np.abs(truth[name]).max() for _, truth in drawn]
        each = [(e.relative_l2, e.largest / most) for e, most in zip(errors, largest, strict=True)]
        series[name] = Error(*np.sqrt(np.mean(np.square(each), 0)))
    for model, (torchs, truth) in numbers.items():
        _, ours = c_states(model, dtype, recipe)
        ours = {name: ours[name] for name in series}
        assert first_difference(ours, torchs, truth, dtype, series) == "", model
        if dtype == "f32":  # before any code differs
            assert ours["train.losses"][0] == pytest.approx(truth["train.losses"][0], rel=1e-6)
