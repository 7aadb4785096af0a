"""PyTorch's time for what a microbenchmark measures: the same operation, shape, types and optional operands,
eager and by torch.compile. dev/bench.py puts it beside llamac's.

Inputs are normal; llamac/bench/timing.py says how calls are timed. A backward is timed as autograd runs it,
with the forward done before, and where the formula is simple also as a function of its own; the fastest
method counts.
"""

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch._functorch.config
from torch.nn.attention import SDPBackend, sdpa_kernel

from llamac.bench import torch_operations as ops
from llamac.bench.functions import arguments_of, with_leaves
from llamac.bench.timing import Call, make_sets, medians_ms, reason
from llamac.bench.torch_operations import Case, Inputs

MODES = ("eager", "compile")
COMPILE = "torch.compile(dynamic=False), default mode"

Function = Callable[..., object]


class Unsupported(Exception):
    """PyTorch has no such call; its text says why."""


# How an operation is called: bind(function, arguments, inputs) -> the call to time. bind itself is not timed.


def plain(function: Function, arguments: list[torch.Tensor], inputs: Inputs) -> Call:
    return torch.no_grad()(lambda: function(*arguments))


def gradient(function: Function, arguments: list[torch.Tensor], inputs: Inputs) -> Call:
    out = function(*arguments)
    leaves = [a for a in arguments if a.requires_grad]
    if "dresidual" not in inputs:
        return lambda: torch.autograd.grad(out, leaves, inputs["dout"], retain_graph=True)

    def with_residual():
        dx, *rest = torch.autograd.grad(out, leaves, inputs["dout"], retain_graph=True)
        return dx + inputs["dresidual"], *rest

    return with_residual


def forward_and_gradient(function: Function, arguments: list[torch.Tensor], inputs: Inputs) -> Call:
    leaves = [a for a in arguments if a.requires_grad]

    def call():
        losses = function(*arguments)
        return losses.detach(), *torch.autograd.grad(losses, leaves, inputs["dlosses"])

    return call


def within(backend: SDPBackend, bind: Callable[..., Call]) -> Callable[..., Call]:
    """The same with attention's backend; autograd remembers the forward's."""
    return lambda function, arguments, inputs: bind(sdpa_kernel(backend)(function), arguments, inputs)


def fused_adamw(function: Function, arguments: list[torch.Tensor], inputs: Inputs) -> Call:
    if "master" in inputs or len({inputs[name].dtype for name in ("weight", "m", "grad")}) > 1:
        raise Unsupported("torch.optim.AdamW has one type for weights, gradients and moments, and no master")
    weight = torch.nn.Parameter(inputs["weight"])
    weight.grad = inputs["grad"]
    optimizer = torch.optim.AdamW([weight], fused=True, **ops.ADAMW)
    step = torch.full((), ops.STEP - 1.0, device=weight.device)
    optimizer.state[weight] = {"step": step, "exp_avg": inputs["m"], "exp_avg_sq": inputs["v"]}

    def call():
        optimizer.step()
        return weight.detach(), inputs["m"], inputs["v"]

    return call


@dataclass(frozen=True)
class Method:
    name: str
    function: Function
    bind: Callable[[Function, list[torch.Tensor], Inputs], Call] = plain
    leaves: tuple[str, ...] = ()  # differentiated by
    modes: tuple[str, ...] = MODES


@dataclass(frozen=True)
class Baseline:
    outputs: tuple[str, ...]
    inputs: Callable[[Case], Inputs]
    methods: tuple[Method, ...]


def forward(outputs: str, inputs: Callable[[Case], Inputs], function: Function, modes=MODES) -> Baseline:
    return Baseline(tuple(outputs.split()), inputs, (Method("function", function, modes=modes),))


def backward(inputs, function, leaves: tuple[str, ...], formula: Function | None = None) -> Baseline:
    methods = (Method("autograd", function, gradient, leaves),)
    methods += (Method("formula", formula, modes=("compile",)),) if formula else ()
    return Baseline(tuple(f"d{leaf}" for leaf in leaves), inputs, methods)


def attention(outputs: str, bind: Callable[..., Call], leaves: tuple[str, ...]) -> Baseline:
    binds = {"default": bind} | {name: within(backend, bind) for name, backend in ops.SDPA.items()}
    methods = (Method(name, ops.attention, b, leaves, ("eager",)) for name, b in binds.items())
    return Baseline(tuple(outputs.split()), ops.attention_inputs, tuple(methods))


# Products and attention are library calls, which the compiler leaves as they are.
product = partial(forward, inputs=ops.matmul_inputs, modes=("eager",))
BASELINES = {
    "embedding_forward": forward("out", ops.embedding_inputs, ops.embedding),
    "embedding_backward": backward(ops.embedding_backward_inputs, ops.embedding_as, ("weight",)),
    "rmsnorm_forward": forward("out", ops.rmsnorm_inputs, ops.rmsnorm),
    "residual_rmsnorm_forward": forward("sum out", ops.residual_rmsnorm_inputs, ops.residual_rmsnorm),
    "rmsnorm_backward": backward(
        ops.rmsnorm_backward_inputs, ops.rmsnorm, ("x", "weight"), ops.rmsnorm_backward
    ),
    "precompute_cis": forward("cis", ops.precompute_cis_inputs, ops.precompute_cis),
    "rope_forward": forward("out", ops.rope_inputs, ops.rope),
    "rope_backward": backward(ops.rope_inputs, ops.rope, ("x",), ops.rope_backward),
    "repeat_kv_forward": forward("out", ops.repeat_kv_inputs, ops.repeat_kv),
    "repeat_kv_backward": backward(ops.repeat_kv_inputs, ops.repeat_kv, ("x",), ops.repeat_kv_backward),
    "attention_forward": attention("out", plain, ()),
    "attention_backward": attention("dq dk dv", gradient, ("q", "k", "v")),
    "attention_decode": forward("out keys values", ops.attention_decode_inputs, ops.attention_decode),
    "argmax": forward("out", ops.argmax_inputs, ops.argmax),
    "swiglu_forward": forward("out", ops.swiglu_inputs, ops.swiglu),
    "swiglu_backward": backward(ops.swiglu_inputs, ops.swiglu, ("gate_up",), ops.swiglu_backward),
    "matmul_forward": product("out", function=ops.matmul),
    "matmul_backward_input": product("dx", function=ops.matmul_backward_input),
    "matmul_backward_weight": product("dweight", function=ops.matmul_backward_weight),
    "cross_entropy": Baseline(
        ("losses", "dlogits"),
        ops.cross_entropy_inputs,
        (
            Method("autograd", ops.cross_entropy_losses, forward_and_gradient, ("logits",)),
            Method("formula", ops.cross_entropy, modes=("compile",)),
        ),
    ),
    "mean_loss": forward("mean num_valid", ops.mean_loss_inputs, ops.mean_loss),
    "global_norm": forward("squares", ops.global_norm_inputs, ops.global_norm),
    "convert": forward("out", ops.convert_inputs, ops.convert),
    "hash": forward("sum", ops.hash_inputs, ops.hash_bits),
    "adamw": Baseline(
        ("weight", "m", "v"),
        ops.adamw_inputs,
        (
            Method("fused", ops.adamw, fused_adamw, modes=("eager",)),
            Method("formula", ops.adamw, modes=("compile",)),
        ),
    ),
}


def calls_of(method: Method, mode: str, sets: list[Inputs], backend: str = "inductor") -> list[Call]:
    """A call for each set of inputs."""
    function = method.function
    if mode == "compile":
        torch.compiler.reset()  # else shapes and operations before this one count towards the recompile limit
        torch._functorch.config.donated_buffer = False  # a donated buffer cannot serve a second backward
        function = torch.compile(function, dynamic=False, backend=backend)
    calls = []
    for inputs in sets:
        named = with_leaves(inputs, method.leaves)
        calls.append(method.bind(function, arguments_of(method.function, named), named))
    return calls


def measure(
    line: dict, modes: list[str], device: str = "cuda", seconds: float = 0.3, backend: str = "inductor"
) -> tuple[dict[str, dict], list[str]]:
    """Times PyTorch on what a microbenchmark's JSON line describes.

    Returns by mode ("eager", "compile") {"ms", "method", "methods"} of the fastest method, without the modes
    that have none, and a line for every method that failed.
    """
    found: dict[str, dict] = {}
    failures: list[str] = []
    name = line["operation"]
    if name not in BASELINES:
        return found, [f"{name}: no baseline"]
    try:
        baseline, case = BASELINES[name], Case.of(line, device)
        sets = make_sets(lambda: baseline.inputs(case), line["bytes"])
    except Exception as error:
        return found, [f"{name}: no inputs: {reason(error)}"]
    for mode, method in itertools.product(modes, baseline.methods):
        if mode not in method.modes:
            continue
        start = time.perf_counter()
        try:
            calls = calls_of(method, mode, sets, backend)
            ms = medians_ms({method.name: calls}, device, seconds)[method.name]
        except Exception as error:
            failures.append(f"{name} {mode} {method.name}: {reason(error)}")
            continue
        best = found.setdefault(mode, {"ms": ms, "method": method.name, "methods": {}})
        best["methods"][method.name] = {
            "ms": ms,
            "seconds": round(time.perf_counter() - start, 2),
        }
        if ms < best["ms"]:
            best |= {"ms": ms, "method": method.name}
    sets.clear()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    return found, failures
