"""Host time per call of llamac's and PyTorch's operations on tiny tensors: the cost of a call besides its
kernel.

On a GPU, calls are queued without waiting, so the time includes the launch but not the device's work. On a
CPU, it includes the kernel's own time, some microseconds at these shapes.
"""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from llamac.bench.functions import (
    FUNCTIONS,
    Function,
    arguments_of,
    output_gradients,
    outputs_of,
    sizes,
    with_leaves,
)
from llamac.bench.harness import take_turns
from llamac.bench.timing import Call, host_ms, reason
from llamac.bench.torch_operations import Case

CALLS = {"cuda": 50, "cpu": 5}  # a round: the device's queue takes as many without holding up the host
ROUNDS = 40
KINDS = ("no gradient", "forward", "forward+backward")


def _call(kind: str, function: Function, formula: Callable, case: Case) -> Call:
    """Nothing but the call: what surrounds it would count."""
    leaves = () if kind == "no gradient" else function.leaves
    given = with_leaves(function.inputs(case), leaves)
    arguments, wanted = arguments_of(formula, given), [given[leaf] for leaf in leaves]
    if kind != "forward+backward":
        return lambda: formula(*arguments)
    douts = output_gradients(outputs_of(formula(*arguments)))
    return lambda: torch.autograd.grad(formula(*arguments), wanted, douts)


def _repeat(call: Call) -> Callable[[int], None]:
    def make(count: int) -> None:
        for _ in range(count):
            call()

    return make


def host_medians_us(calls: Mapping[str, Call], device: str, rounds: int = ROUNDS) -> dict[str, float]:
    """Microseconds of the host a call, medians; calls take turns round by round."""

    def timed(call: Call) -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return 1e3 * host_ms(_repeat(call), CALLS[device])

    ways = {name: partial(timed, call) for name, call in calls.items()}
    return {name: statistics.median(us) for name, us in take_turns(ways, rounds, warm_up=3).items()}


def measure(name: str, dtype: str, device: str, rounds: int = ROUNDS) -> list[dict]:
    """A row for llamac and for eager: microseconds by kind of call, "forward us"."""
    function, case = FUNCTIONS[name], Case(sizes("tiny", 1, 8), dtype, device)
    formulas = {"llamac": function.ours, "eager": function.torch}
    rows: dict[str, dict[str, Any]] = {
        baseline: {"operation": name, "dtype": dtype, "baseline": baseline} for baseline in formulas
    }
    for kind in KINDS if function.leaves else KINDS[:1]:
        calls = {}
        for baseline, formula in formulas.items():
            try:
                calls[baseline] = _call(kind, function, formula, case)
                calls[baseline]()
            except Exception as error:
                rows[baseline]["error"] = reason(error)
                calls.pop(baseline, None)
        with torch.set_grad_enabled(kind != "no gradient"):
            times = host_medians_us(calls, device, rounds)
        for baseline, us in times.items():
            rows[baseline][f"{kind} us"] = us
    return list(rows.values())
