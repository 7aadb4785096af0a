"""Random calls of every operation, through llamac.run and torch.ops: a call that fits gives what the
reference variant gives, one that does not is refused in one line, and only outputs are written.

LLAMAC_CALLS=50000 says how many, over all operations. They are the same in every run, unless that is given.
"""

import os

import numpy as np
import op_cases
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from random_calls import NUMPY, TORCH, Call, calls

import llamac
from llamac import ops  # noqa: F401  (registers torch.ops.llamac)
from llamac.base.tolerance import BACKWARD, FORWARD, Error, error_of, violation_of

OPERATIONS = {op["name"]: op for op in llamac.kernels()}
WAYS = ["run", "torch", "out"]
CALLS = int(os.environ.get("LLAMAC_CALLS", 500))
HAS_OUT = {name for name in OPERATIONS if hasattr(getattr(torch.ops.llamac, name), "out")}
# An operation whose outputs may all be null, or without inputs, gives torch.ops no results.
GIVES = {
    name
    for name, op in OPERATIONS.items()
    if name != "scale_rows"  # whose result's type does not follow from its inputs
    and any(not o["nullable"] for o in op["operands"] if o["output"])
    and any(not o["output"] or o["in_place"] for o in op["operands"])
}
CASES = [
    (name, way)
    for name in OPERATIONS
    for way in WAYS
    if name in {"run": OPERATIONS, "torch": GIVES, "out": HAS_OUT}[way]
]


# ---- a call


def as_given(call: Call, name: str):
    """An operand as it is passed: torch's or numpy's, by its place."""
    if name in call.given:
        return call.given[name]
    p = call.operands[name]
    if p is None:
        return None
    if call.way == "run" and p.dtype in NUMPY and (call.seed + len(name)) % 2:
        return p.numpy()
    return p.torch()


def run(call: Call) -> dict[str, torch.Tensor] | None:
    """Results that are no arguments, by name."""
    name = call.op["name"]
    if call.way == "run":
        arrays = [as_given(call, o["name"]) for o in call.op["operands"]]
        split = sum(o["output"] for o in call.op["operands"])
        scalars = [] if call.surplus is None else [*call.scalars.values(), *call.surplus]
        llamac.run(name, arrays[:split], arrays[split:], scalars, call.variant)
        return None
    function = getattr(getattr(torch.ops.llamac, name), "out" if call.way == "out" else "default")
    arguments, keywords = [], {}
    for a in function._schema.arguments:
        if a.name in call.operands:
            value = as_given(call, a.name)
        elif a.name in call.scalars:
            value = call.scalars[a.name]
        elif a.name in call.sizes:
            value = call.sizes[a.name]
        else:
            value = {"dtype": TORCH[call.types[call.op["operands"][0]["name"]]], "device": "cpu"}[a.name]
        if a.kwarg_only:
            keywords[a.name] = value
        else:
            arguments.append(value)
    results = function(*arguments, **keywords)
    names = [r.name for r in function._schema.returns]
    if call.way == "out" or not names:
        return None
    return dict(zip(names, results if isinstance(results, tuple) else (results,)))


# ---- what it should give


def computed(call: Call, values: dict[str, torch.Tensor | None], types: dict[str, str]) -> dict:
    """By the reference variant, in contiguous memory of these types; None where it has no such types."""
    variant = next(v for v in call.op["variants"] if v["name"] == "reference")
    if [types[o["name"]] for o in call.op["operands"]] not in variant["types"]:
        return {}
    arrays: dict[str, torch.Tensor | None] = {}
    for name, value in values.items():
        arrays[name] = None if value is None else value.to(TORCH[types[name]]).clone()
    outputs = [name for name, o in call.described.items() if o["output"]]
    inputs = [arrays[name] for name in arrays if name not in outputs]
    scalars = list(call.scalars.values())
    llamac.run(call.op["name"], [arrays[name] for name in outputs], inputs, scalars, "reference")
    return {name: arrays[name].double() for name in outputs if arrays[name] is not None}


def wide(call: Call) -> dict[str, str]:
    """The operation's types where it computes in float64; fixed types stay."""
    letters = call.op["types"]
    return {n: "f64" if o["type"] in letters else call.types[n] for n, o in call.described.items()}


def stored(call: Call, name: str, dtype: str) -> str:
    """What an output's error is counted in: an f64 one of f32 arithmetic is no more precise than f32."""
    letter = next(iter(call.op["types"]), None)
    if letter is None:
        return dtype
    storage = next(call.types[n] for n, o in call.described.items() if o["type"] == letter)
    return "f32" if dtype == "f64" and storage != "f64" else dtype


def exact(call: Call, values: dict) -> dict:
    """The values, and saved results of the forward pass as they are before rounding: a variant may read them
    or compute them again, and neither changes the truth.
    """
    if 0 in call.sizes.values():
        return values
    return values | op_cases.saved_results(call.op["name"], values)


def baseline(call: Call, values: dict, truth: dict, name: str, dtype: str) -> Error:
    """The reference variant's error in the call's types; without it, that of rounding the truth."""
    same = computed(call, values, call.types)
    found = same[name] if name in same else truth[name].to(TORCH[dtype]).double()
    return error_of(found.numpy(), truth[name].numpy())


def sensitivity(call: Call, values: dict, truth: dict, name: str) -> Error:
    """What rounding can do to these inputs, by the rule of dev/hip/operation_check.h: how far the truth moves
    where every input moves by up to two rounding errors of f32, in the worst of 20 trials: of one result and
    two inputs, three trials miss the worst case by a factor of six. No algorithm in f32 can be blamed for as
    much. The roundings of an element are a factor of 4, a sum of n terms is sqrt(n).
    """
    moves = []
    for trial in range(20):
        generator = torch.Generator().manual_seed(call.seed + trial)
        moved = {
            n: x * (1 + 2.0**-23 * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1))
            if x is not None and x.is_floating_point() and not call.described[n]["output"]
            else x
            for n, x in values.items()
        }
        moves.append(error_of(computed(call, moved, wide(call))[name].numpy(), truth[name].numpy()))
    factor = 4 * max(1, *call.sizes.values()) ** 0.5
    return Error(factor * max(m.relative_l2 for m in moves), factor * max(m.largest for m in moves))


def check_results(call: Call, values: dict, results: dict[str, torch.Tensor] | None) -> None:
    if not call.sane:
        return
    given = {n: p for n, p in call.present().items() if call.described[n]["output"]}
    if not given:  # all outputs may be null: nothing was asked for
        return
    truth = computed(call, exact(call, values), wide(call))
    assert truth
    if call.way == "torch":  # the others are no arguments
        given = {n: p for n, p in given.items() if call.described[n]["in_place"]}
    found = results or {n: p.values() for n, p in given.items()}
    names = {value: key for key, value in TORCH.items()}
    for name, value in found.items():
        dtype, expected = stored(call, name, names[value.dtype]), truth[name]
        assert value.shape == expected.shape, name
        if not expected.isfinite().all():
            continue
        ours = value.double().numpy()
        if dtype == "f64":
            off = np.abs(ours - expected.numpy()).max(initial=0.0)
            assert off <= 1e-13 * max(1.0, np.abs(expected.numpy()).max(initial=0.0)), (name, off)
            continue
        factor = BACKWARD if "backward" in call.op["name"] or call.described[name]["adds_if"] else FORWARD
        allowed = baseline(call, values, truth, name, dtype)
        if violation_of(ours, allowed, expected.numpy(), dtype, factor):
            allowed = sensitivity(call, exact(call, values), truth, name)
            message = violation_of(ours, allowed, expected.numpy(), dtype, 1)
            assert not message, f"{name}: {message}"


# ---- the properties


def attempt(call: Call) -> tuple[dict[str, torch.Tensor] | None, str]:
    """run()'s results; or what refuses it, which has to be one line of the operation's."""
    try:
        return run(call), ""
    except ValueError as error:
        message = str(error)
        assert call.way != "run" or isinstance(error, llamac.Error)
        assert message.startswith(f"{call.op['name']}: ") and "\n" not in message, message
        return None, message


def written(call: Call) -> dict[int, np.ndarray]:
    """By memory: where the bytes of outputs are that the call was given."""
    masks = {id(m): np.zeros_like(m) for m in call.memories()}
    for name, p in call.present().items():
        if call.described[name]["output"] and (call.way != "torch" or call.described[name]["in_place"]):
            p.bits(masks[id(p.memory)])[...] = -1
    return masks


def check(call: Call) -> None:
    values: dict[str, torch.Tensor | None] = {
        name: None if p is None else p.values() for name, p in call.operands.items()
    }
    before = {id(m): m.copy() for m in call.memories()}
    results, refusal = attempt(call)
    beyond_limits = bool(call.variant) and "does not take these shapes" in refusal  # a variant's own
    assert bool(refusal) == bool(call.fault) or beyond_limits, f"{call.fault}: {refusal or 'not refused'}"
    masks = written(call)
    for m in call.memories():
        same = m == before[id(m)]
        assert (same if refusal else same | (masks[id(m)] != 0)).all(), "written where nothing may be"
    if not refusal:
        check_results(call, values, results)


@pytest.mark.parametrize("name, way", CASES, ids="-".join)
def test_random_calls(name, way):
    @settings(
        max_examples=max(1, round(CALLS / len(CASES))),
        deadline=None,
        database=None,
        derandomize="LLAMAC_CALLS" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls(OPERATIONS[name], way))
    def hold(call: Call) -> None:
        check(call)

    hold()
