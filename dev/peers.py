"""PyTorch's time for what a microbenchmark measures: the same operation, shape, types and optional operands,
eager and by torch.compile. dev/bench.py puts it beside ours.

Inputs are normal and rotate, and so do outputs, which a call allocates as PyTorch does: none is found in the
cache. The device is kept busy while calls are queued, so that a small operation's time is the device's, not
the host's, as that of our kernels is. A backward is timed as autograd runs it, with the forward done before,
and where the formula is simple also as a function of its own; the fastest way counts.
"""

import functools
import gc
import inspect
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._functorch.config
import torch_operations as ops
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_operations import Case, Inputs

ROTATED = 1 << 30  # bytes moved before a set comes again: four times the largest cache (MI300X: 256 MB)
LARGEST = 4 << 30  # bytes of all sets of inputs
SETS = 256
ROUNDS = (20, 100)  # timed: at least, at most
MODES = ("eager", "compile")
COMPILE = "torch.compile(dynamic=False), default mode"

Function = Callable[..., object]
Call = Callable[[], object]


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
class Way:
    name: str
    function: Function
    bind: Callable[[Function, list[torch.Tensor], Inputs], Call] = plain
    leaves: tuple[str, ...] = ()  # differentiated by
    modes: tuple[str, ...] = MODES


@dataclass(frozen=True)
class Peer:
    outputs: tuple[str, ...]
    inputs: Callable[[Case], Inputs]
    ways: tuple[Way, ...]


def forward_peer(output: str, inputs: Callable[[Case], Inputs], function: Function, modes=MODES) -> Peer:
    return Peer((output,), inputs, (Way("function", function, modes=modes),))


def backward_peer(inputs, function, leaves: tuple[str, ...], formula: Function | None = None) -> Peer:
    ways = (Way("autograd", function, gradient, leaves),)
    ways += (Way("formula", formula, modes=("compile",)),) if formula else ()
    return Peer(tuple(f"d{leaf}" for leaf in leaves), inputs, ways)


def attention_peer(outputs: tuple[str, ...], bind: Callable[..., Call], leaves: tuple[str, ...]) -> Peer:
    binds = {
        "default": bind,
        "flash": within(SDPBackend.FLASH_ATTENTION, bind),
        "cudnn": within(SDPBackend.CUDNN_ATTENTION, bind),
    }
    ways = (Way(name, ops.attention, b, leaves, ("eager",)) for name, b in binds.items())
    return Peer(outputs, ops.attention_inputs, tuple(ways))


PEERS = {
    "embedding_forward": forward_peer("out", ops.embedding_inputs, ops.embedding),
    "embedding_backward": backward_peer(ops.embedding_backward_inputs, ops.embedding_as, ("weight",)),
    "rmsnorm_forward": forward_peer("out", ops.rmsnorm_inputs, ops.rmsnorm),
    "residual_rmsnorm_forward": Peer(
        ("sum", "out"), ops.residual_rmsnorm_inputs, (Way("function", ops.residual_rmsnorm),)
    ),
    "rmsnorm_backward": backward_peer(
        ops.rmsnorm_backward_inputs, ops.rmsnorm, ("x", "weight"), ops.rmsnorm_backward
    ),
    "precompute_cis": forward_peer("cis", ops.precompute_cis_inputs, ops.precompute_cis),
    "rope_forward": forward_peer("out", ops.rope_inputs, ops.rope),
    "rope_backward": backward_peer(ops.rope_inputs, ops.rope, ("x",), ops.rope_backward),
    "repeat_kv_forward": forward_peer("out", ops.repeat_kv_inputs, ops.repeat_kv),
    "repeat_kv_backward": backward_peer(ops.repeat_kv_inputs, ops.repeat_kv, ("x",), ops.repeat_kv_backward),
    "attention_forward": attention_peer(("out",), plain, ()),
    "attention_backward": attention_peer(("dq", "dk", "dv"), gradient, ("q", "k", "v")),
    "swiglu_forward": forward_peer("out", ops.swiglu_inputs, ops.swiglu),
    "swiglu_backward": backward_peer(ops.swiglu_inputs, ops.swiglu, ("gate_up",), ops.swiglu_backward),
    # Products and attention are library calls, which the compiler leaves as they are.
    "matmul_forward": forward_peer("out", ops.matmul_inputs, ops.matmul, ("eager",)),
    "matmul_backward_input": forward_peer("dx", ops.matmul_inputs, ops.matmul_backward_input, ("eager",)),
    "matmul_backward_weight": forward_peer(
        "dweight", ops.matmul_inputs, ops.matmul_backward_weight, ("eager",)
    ),
    "cross_entropy": Peer(
        ("losses", "dlogits"),
        ops.cross_entropy_inputs,
        (
            Way("autograd", ops.cross_entropy_losses, forward_and_gradient, ("logits",)),
            Way("formula", ops.cross_entropy, modes=("compile",)),
        ),
    ),
    "global_norm": forward_peer("norm", ops.global_norm_inputs, ops.global_norm),
    "adamw": Peer(
        ("weight", "m", "v"),
        ops.adamw_inputs,
        (
            Way("fused", ops.adamw, fused_adamw, modes=("eager",)),
            Way("formula", ops.adamw, modes=("compile",)),
        ),
    ),
}


def calls_of(way: Way, mode: str, sets: list[Inputs], backend: str = "inductor") -> list[Call]:
    """A call for each set of inputs."""
    function = way.function
    if mode == "compile":
        torch.compiler.reset()  # else shapes and operations before this one count towards the recompile limit
        torch._functorch.config.donated_buffer = False  # a donated buffer cannot serve a second backward
        function = torch.compile(function, dynamic=False, backend=backend)
    calls = []
    for inputs in sets:
        named = inputs | {leaf: inputs[leaf].detach().requires_grad_() for leaf in way.leaves}
        names = [name for name in inspect.signature(way.function).parameters if name in named]
        calls.append(way.bind(function, [named[name] for name in names], named))
    return calls


def make_sets(peer: Peer, case: Case, moved: int) -> list[Inputs]:
    """Sets of inputs; moved: bytes that a call must move."""
    first = peer.inputs(case)
    size = sum(t.numel() * t.element_size() for t in first.values())
    count = min(-(-ROTATED // moved), LARGEST // max(1, size), SETS)
    return [first, *(peer.inputs(case) for _ in range(count - 1))]


@functools.cache
def sleep_rate() -> float:
    """Cycles of torch.cuda._sleep a second."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 5_000_000
    for _ in range(2):  # the first loads the kernel
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
    return cycles / start.elapsed_time(end) * 1e3


def median_ms(calls: list[Call], device: str, seconds: float) -> float:
    """Median time of a call, in ms; calls take turns, results are kept until their turn comes again."""
    kept: list[object] = [None] * len(calls)
    turns = itertools.cycle(range(len(calls)))

    def make(count: int) -> None:
        for turn in itertools.islice(turns, count):
            kept[turn] = None
            kept[turn] = calls[turn]()

    make(max(5, len(calls)))
    if device == "cpu":
        return statistics.median(host_ms(make, 1) for _ in range(ROUNDS[0]))
    torch.cuda.synchronize()
    start = time.perf_counter()
    make(5)
    queued = (time.perf_counter() - start) / 5
    torch.cuda.synchronize()
    done = (time.perf_counter() - start) / 5
    # Calls between two events: a short one alone would be timed with the event.
    together = min(max(1, round(1e-3 / done)), 16)
    rounds = min(max(ROUNDS[0], int(seconds / done / together)), ROUNDS[1])
    wait = min(1.5 * queued * together, 0.05)
    return statistics.median(device_ms(make, together, wait) for _ in range(rounds))


def host_ms(make: Callable[[int], None], count: int) -> float:
    start = time.perf_counter()
    make(count)
    return (time.perf_counter() - start) / count * 1e3


def device_ms(make: Callable[[int], None], count: int, wait: float) -> float:
    """ms a call on the device, which first sleeps `wait` seconds, until the host has queued all of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(wait * sleep_rate()))
    start.record()
    make(count)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def measure(
    line: dict, modes: list[str], device: str = "cuda", seconds: float = 0.3, backend: str = "inductor"
) -> tuple[dict[str, dict], list[str]]:
    """Times PyTorch on what a microbenchmark's JSON line describes.

    Returns by mode ("eager", "compile") {"ms", "way", "ways"} of the fastest way, without the modes that have
    none, and a line for every way that failed.
    """
    found: dict[str, dict] = {}
    failures: list[str] = []
    name = line["operation"]
    try:
        peer, case = PEERS[name], Case.of(line, device)
        sets = make_sets(peer, case, int(line["bytes"]))
    except Exception as error:
        return found, [f"{name}: no inputs: {reason(error)}"]
    for mode, way in itertools.product(modes, peer.ways):
        if mode not in way.modes:
            continue
        start = time.perf_counter()
        try:
            ms = median_ms(calls_of(way, mode, sets, backend), device, seconds)
        except Exception as error:
            failures.append(f"{name} {mode} {way.name}: {reason(error)}")
            continue
        best = found.setdefault(mode, {"ms": ms, "way": way.name, "ways": {}})
        best["ways"][way.name] = {"ms": ms, "seconds": round(time.perf_counter() - start, 2)}
        if ms < best["ms"]:
            best |= {"ms": ms, "way": way.name}
    sets.clear()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    return found, failures


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
