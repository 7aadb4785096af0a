"""Each operation against float64 PyTorch within the tolerance: every variant, every type, odd shapes, outputs
that are NaN at first. Operands and variants come from the registry, PyTorch's side from op_cases.py.
Guard bytes around operands: check_operations.cpp, test_properties.py.
"""

import inspect
import math
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import lru_cache, partial
from itertools import combinations, product

import numpy as np
import pytest
import torch
from library_product import scaled_mm
from op_cases import (
    ADAMW,
    ADAMW_SCALARS,
    CACHED,
    CASES,
    DTYPES,
    EPS,
    HEADS,
    OPERATIONS,
    SCALE,
    Case,
    adamw,
    as_type,
    attention_backward,
    attention_forward,
    gelu_backward,
    gelu_forward,
    hash_halves,
    make_inputs,
    qk_norm_rope_backward,
    qk_norm_rope_forward,
    rope_backward,
    rope_forward,
    shape_of,
)

from llamac.base import extension, random, registry
from llamac.base.dtypes import fp8_of
from llamac.base.errors import InputError
from llamac.base.tolerance import BACKWARD, FORWARD, Error, beyond, error_of, floor_of, ulp
from llamac.doctor.installation import architecture_of

DRAWS, ENOUGH = 8, 8192  # elements


def variants() -> list:
    """(operation, variant, types of its operands) of everything that is registered, in the order of types."""
    return [
        pytest.param(name, v["name"], types, id=f"{name}-{v['name']}-{'-'.join(dict.fromkeys(types))}")
        for name, op in OPERATIONS.items()
        for types in dict.fromkeys(tuple(types) for v in op["variants"] for types in v["types"])
        for v in op["variants"]
        if list(types) in v["types"]
    ]


EXACT = ("embedding_forward", "repeat_kv_forward", "hash", "convert", "quantize", "quantize_rows")
EXACT += ("update_scales", "argmax", "vocabulary_ids", "fill_normal")
SCALED = ("scaled_matmul", "scaled_matmul_rows")


def unset(dtype: torch.dtype) -> float:
    """What an output holds before the call: no result."""
    return torch.nan if dtype.is_floating_point else -1


def run_variant(op, variant, types, sizes, values, scalars) -> dict[str, torch.Tensor]:
    """The outputs that one variant writes over NaN, or updates."""
    outputs, inputs = {}, []
    for operand, dtype in zip(op["operands"], types):
        name = operand["name"]
        if not operand["output"]:
            inputs.append(values[name])
        elif name not in values:
            outputs[name] = torch.full(shape_of(operand, sizes), unset(DTYPES[dtype]), dtype=DTYPES[dtype])
        else:
            outputs[name] = None if values[name] is None else values[name].clone()
    registry.run(op["name"], list(outputs.values()), inputs, scalars, variant)
    return {name: value for name, value in outputs.items() if value is not None}


def storage_of(op: dict, types: list[str]) -> str:
    return next(t for o, t in zip(op["operands"], types) if o["type"] == "T")


def arithmetic_of(op: dict, types: list[str]) -> str:
    """What an operation computes in: an f64 output of f32 arithmetic is no more precise than f32."""
    return "f64" if ("T", "f64") in {(o["type"], t) for o, t in zip(op["operands"], types)} else "f32"


def library_product(i: dict) -> dict:
    """Of scaled products, on the GPU: its matrix units sum fp8 in less than f32, in PyTorch, too."""
    inverse = i["a_scale"][:, None] * i["b_scale"]
    return {"out": scaled_mm(i["a"], i["b"].T, inverse, i["residual"].dtype, i["residual"])}


def fp8_of_the_device() -> set[str]:
    """Types of fp8 that its matrix units multiply; the emulated device's have all."""
    if extension.device() == "cpu":
        return {"e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"}
    return set(fp8_of(architecture_of(torch, 0)))


@lru_cache(100)
def known(
    operation: str, types: tuple[str, ...], sizes: tuple, case: Case, seed: int
) -> tuple[dict, dict, dict]:
    """What all variants share: random inputs, their outputs in float64, and those of PyTorch."""
    values = make_inputs(OPERATIONS[operation], types, dict(sizes), seed, case.absent, **case.mask)
    context = dict(sizes) | {"stat": torch.float64 if "f64" in types else torch.float32}
    truth = case.torch(as_type(values, torch.float64) | context | {"stat": torch.float64})
    return values, truth, case.torch(as_type(values, None) | context)


def draw(op, variant, types, sizes, case, seed, spoil) -> tuple[dict, int]:
    """Our error on random inputs, PyTorch's, and the floor, by output; and the number of elements that count.
    Outputs of f64, and those that must not be rounded, are compared here.
    """
    values, truth, theirs = known(op["name"], tuple(types), tuple(sizes.items()), case, seed)
    ours = run_variant(op, variant, types, sizes, values, case.scalars)
    if op["name"] in SCALED and variant == "library":
        theirs = library_product(as_type(values, None))
    spoil(ours)
    drawn = {}
    for name, found in ours.items():
        operand, dtype = next((o, t) for o, t in zip(op["operands"], types) if o["name"] == name)
        if operand["rounded"]:
            dtype = storage_of(op, types)
        if dtype == "f64" and arithmetic_of(op, types) == "f32":
            dtype = "f32"
        if op["name"] in EXACT:
            assert torch.equal(found.double(), truth[name].to(found.dtype).double()), (
                f"{sizes} {name}: is rounded"
            )
        if dtype == "f64":  # the oracle itself
            off = (found - truth[name]).abs().max().item() / truth[name].abs().max().clamp(min=1e-300).item()
            assert off <= 1e-13, f"{sizes} {name}: off by {off:.1e}"
            continue
        arrays = [x.double().numpy() for x in (found, theirs[name], truth[name])]
        errors = [error_of(each, arrays[2]) for each in arrays[:2]]
        drawn[name] = (*errors, floor_of(arrays[2], dtype))
    counts = [x.numel() for x in ours.values()]
    return drawn, min(counts[0], 8 * min(counts))


def mean_error(errors: tuple[Error, ...]) -> Error:
    """The root mean square."""
    return Error(*(math.hypot(*values) / len(errors) ** 0.5 for values in zip(*map(astuple, errors))))


def check(op, variant, types, sizes, case, seed=0, spoil=lambda outputs: None) -> None:
    """The root mean square of our errors on a few inputs, beside that of PyTorch's, whose largest error of a
    few hundred elements is luck: between inputs it differs by a factor of five. Large outputs need one.
    """
    draws, elements = [], 0
    while len(draws) < DRAWS and elements < ENOUGH:
        drawn, size = draw(op, variant, types, sizes, case, seed + len(draws), spoil)
        draws.append(drawn)
        elements += size
    for name in draws[0]:
        error, theirs, floor = map(mean_error, zip(*(each[name] for each in draws)))
        wrong = beyond(error, theirs, floor, BACKWARD if case.backward else FORWARD)
        assert not wrong, f"{op['name']} {variant} {types} {sizes} {name}: {wrong}"


def check_shapes(op, variant, types, case):
    """Every shape of the case that the variant takes: it need not take all, but must take one."""
    ran = 0
    for i, sizes in enumerate(case.shapes):
        try:
            check(op, variant, types, sizes, case, DRAWS * i)
            ran += 1
        except InputError as error:
            if "does not take these shapes" not in str(error):
                raise
    assert ran


def test_every_operation_has_a_case():
    assert set(CASES) == set(OPERATIONS)


@pytest.mark.parametrize("operation, variant, types", variants())
def test_operation(operation, variant, types):
    op, case = OPERATIONS[operation], CASES[operation]
    if operation.startswith("adamw") and "bf16" in (
        t for o, t in zip(op["operands"], types) if o["name"] in ("m", "v")
    ):
        pytest.skip("bf16 moments are rounded stochastically: test_stochastic_rounding")
    codes = {t for t in types if DTYPES[t].itemsize == 1}
    if operation in SCALED and variant in ("library", "tiled") and not codes <= fp8_of_the_device():
        assert extension.device() != "cpu"  # whose emulated device has all
        pytest.skip("the device does not multiply these types of fp8")
    check_shapes(op, variant, types, case)


def test_what_the_hash_sees():
    """Each flipped bit; words that change places; the same bit of two words, whose terms might cancel, as
    random numbers would. Every variant has this hash: test_operation."""
    x = (np.arange(68, dtype=np.uint32) ** 2 * 40503).astype(np.uint16)
    before = hash_halves(x).tolist()
    for bit in range(16 * x.size):
        x[bit // 16] ^= 1 << bit % 16
        assert hash_halves(x).tolist() != before, bit
        x[bit // 16] ^= 1 << bit % 16
    assert hash_halves(np.roll(x, 4)).tolist() != before != hash_halves(x[:-1]).tolist()
    for content in (0, 0x3F80, 0xFFFF):
        words = np.full(64, content, np.uint16).view(np.uint64)
        before, lower = hash_halves(words), []
        for bit, pair in product(range(64), combinations(range(len(words)), 2)):
            words[list(pair)] ^= np.uint64(1 << bit)
            after = hash_halves(words)
            assert (after != before).any(), (bit, pair)
            lower.append(after[0] - before[0])
            words[list(pair)] ^= np.uint64(1 << bit)
        # Of 7680 pairs 7.5, were the differences random numbers.
        assert sum(each % 1024 == 0 for each in lower) < 30


@pytest.mark.parametrize(
    "mask, absent",
    [
        pytest.param((True, 0), (), marks=pytest.mark.more),
        ((True, 19), ("first", "end")),
        pytest.param((False, 0), ("first", "end"), marks=pytest.mark.more),
        ((False, 5), ()),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [attention_forward, attention_backward])
def test_masked_attention(function, absent, mask):
    """With one query, and every other shape: check_operations compares all of them with the reference, which
    is among the variants."""
    op, known = OPERATIONS[function.__name__], dict(zip(("causal", "window"), mask))
    backward, shapes = function is attention_backward, CACHED[:1] + CACHED[1 + (mask[1] > 0) :: 2]
    case = Case(partial(function, **known), shapes, (SCALE, *mask), backward, absent, known)
    for v in op["variants"]:
        for types in v["types"]:
            if not v["chip"]:
                check_shapes(op, v["name"], types, case)


@pytest.mark.parametrize("fault", ["nan", "zero", "swapped", "scaled"])
def test_faults_are_caught(fault):
    def spoil(outputs):
        x = outputs["out"]
        x.view(-1)[-1] = {"nan": torch.nan, "zero": 0.0}.get(fault, x.view(-1)[-1])
        if fault == "swapped":
            x[[0, 1]] = x[[1, 0]]
        if fault == "scaled":
            x.mul_(1 + 1e-5)

    op = OPERATIONS["rmsnorm_forward"]
    arguments = op, "reference", ["f32"] * 4, {"N": 33, "C": 129}, CASES["rmsnorm_forward"]
    check(*arguments)
    with pytest.raises(AssertionError, match=r"error .*, allowed"):
        check(*arguments, spoil=spoil)


def test_the_checks_of_all_operations_see_every_fault(build):
    """check_operations with a wrong variant in the place of all others must fail, for each kind of fault: as
    `make test` runs it, with the fewest cases.
    """

    def run(fault):
        command = [build / "check_operations", "--brief", "--every", "3", "--fault", fault]
        return subprocess.run(command, capture_output=True, text=True)

    faults = run("none").stderr.split("NAME one of ")[1].split()
    assert len(faults) > 5
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        codes = pool.map(lambda fault: run(fault).returncode, faults)
        assert dict(zip(faults, codes, strict=True)) == dict.fromkeys(faults, 1)


@pytest.mark.parametrize("function", [rope_forward, rope_backward, gelu_forward, gelu_backward])
def test_the_other_form(function):
    """Interleaved rope, gelu by tanh."""
    op, (flag,) = OPERATIONS[function.__name__], inspect.signature(function).parameters.keys() - {"i"}
    backward = function.__name__.endswith("backward")
    case = Case(partial(function, **{flag: True}), CASES[function.__name__].shapes, (True,), backward)
    for v in op["variants"]:
        for types in v["types"]:
            check_shapes(op, v["name"], types, case)


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("variant", [v["name"] for v in OPERATIONS["gelu_forward"]["variants"]])
def test_gelu_far_from_0(variant, tanh):
    """There v^2 and v^3 are infinite, and P'(v) is 0: no NaN, and NaN stays."""
    x = torch.tensor([[3e38, -3e38, 1e15, -1e15, torch.nan, 40, -40]])
    out, dx, again = torch.empty(3, *x.shape)
    registry.run("gelu_forward", [out], [x, None], (tanh,), variant)
    registry.run("gelu_backward", [dx, again], [torch.ones_like(x), x, None], (tanh,), variant)
    torch.testing.assert_close(out, x.relu(), equal_nan=True)
    torch.testing.assert_close(dx, torch.where(x.isnan(), x, (x > 0).float()), equal_nan=True)
    torch.testing.assert_close(again, out, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("C", [64, 131])
@pytest.mark.parametrize("variant", [v["name"] for v in OPERATIONS["layernorm_forward"]["variants"]])
def test_layernorm_again(variant, C):
    """The backward computes the bits of the forward, for recomputed activations."""
    x, weight, bias = torch.randn(7, C) + 3, torch.randn(C), torch.randn(C)
    (out, dx, again), (mean, rstd), sums = torch.empty(3, 7, C), torch.empty(2, 7), torch.empty(2, C)
    registry.run("layernorm_forward", [out, mean, rstd], [x, weight, bias], (EPS,), variant)
    given = [torch.ones(7, C), x, weight, bias, mean, rstd, None]
    registry.run("layernorm_backward", [dx, *sums, again], given, (False,), variant)
    assert torch.equal(again, out)


@pytest.mark.parametrize("function", [qk_norm_rope_forward, qk_norm_rope_backward])
def test_qk_norm_without_rope(function):
    """Also heads of an odd size."""
    op, backward = OPERATIONS[function.__name__], function is qk_norm_rope_backward
    shapes = [*HEADS, {"B": 2, "T": 3, "NH": 3, "HD": 7}]
    case = Case(function, shapes, (False if backward else EPS,), backward, ("cis",))
    for v in op["variants"]:
        for types in v["types"]:
            check_shapes(op, v["name"], types, case)


@pytest.mark.parametrize("variant", [v["name"] for v in OPERATIONS["adamw"]["variants"]])
def test_adamw_in_two_pieces(variant):
    """Pieces with their offsets get the random bits of the whole; without the offset, others."""
    n = 5000
    sizes, types = {"P": n}, ["bf16", "f32", "bf16", "bf16", "bf16", "f64", "f32", "i32"]
    values = make_inputs(OPERATIONS["adamw"], types, sizes, 0) | {"master": None}
    state = [values[name] for name in ("weight", "m", "v")]
    extra = [*(values[name] for name in ("squares", "lr", "step")), None, None]

    def updated(first: int, last: int, *offset: int) -> list[torch.Tensor]:
        weight, m, v = (x[first:last].clone() for x in state)
        inputs = [values["grad"][first:last].clone(), *extra]
        registry.run("adamw", [weight, None, m, v], inputs, (*ADAMW_SCALARS[:-1], *offset), variant)
        return [weight, m, v]

    whole = updated(0, n)
    for cut in (1028, 2048):
        for piece, offset in ((updated(0, cut), 0), (updated(cut, n, cut), cut)):
            for found, expected in zip(piece, whole, strict=True):
                assert torch.equal(found, expected[offset : offset + len(found)]), (cut, offset)
    for found, expected in zip(updated(1028, n), whole, strict=True):
        assert not torch.equal(found, expected[1028:])
    if variant == "vectorized":
        return
    # Columns 7 to 9 of rows of 20: runs of 3.
    columns = torch.arange(n).reshape(-1, 20)[:, 7:10].flatten()
    state, values["grad"] = [x[columns] for x in state], values["grad"][columns]
    for found, expected in zip(updated(30, len(columns), 30, 3, 20, 7), whole, strict=True):
        assert torch.equal(found, expected[columns[30:]])


@pytest.mark.parametrize("variant", [v["name"] for v in OPERATIONS["fill_normal"]["variants"]])
def test_fill_normal_draws_its_part(variant):
    """Ranks that share a weight draw the bits that one rank draws, and that Python draws."""
    whole = torch.from_numpy(np.float32(0.02) * random.normal(7, 0, 8, 2000))
    for start in (0, 4, 1028) if variant == "vectorized" else (0, 1, 6, 1027):
        part = torch.empty(2000 - start)
        registry.run("fill_normal", [part], [], (0.02, 7, 8, start), variant)
        assert torch.equal(part, whole[start:]), start


def test_stochastic_rounding():
    """AdamW into bf16 without master: each result is a bf16 neighbour of the exact one, right on average."""
    n = 1 << 16
    exact_inputs = {"weight": torch.full((n,), 0.7), "master": None, "m": torch.full((n,), 0.01),
                    "v": torch.full((n,), 0.02), "grad": torch.full((n,), 0.3)}  # fmt: skip
    exact = adamw(as_type(exact_inputs | {"weight": torch.full((n,), 0.7).bfloat16()}, torch.float64))
    state = {name: None if x is None else x.bfloat16() for name, x in exact_inputs.items()}
    exact = adamw(as_type(state, torch.float64))
    given = ((ADAMW["norm"] ** 2, torch.float64), (ADAMW["lr"], torch.float32), (ADAMW["step"], torch.int32))
    extra = [*(torch.tensor([x], dtype=dtype) for x, dtype in given), None, None]
    for variant in OPERATIONS["adamw"]["variants"]:
        out = {name: x.clone() for name, x in state.items() if name not in ("grad", "master")}
        outputs = [out["weight"], None, out["m"], out["v"]]
        registry.run("adamw", outputs, [state["grad"], *extra], ADAMW_SCALARS, variant["name"])
        for name, found in out.items():
            truth = exact[name].double()
            unit = torch.from_numpy(ulp(truth.numpy(), "bf16"))
            assert ((found.double() - truth).abs() <= unit).all(), name
            # The mean of n independent roundings: six standard deviations of at most half an ulp each.
            assert (
                found.double().mean() - truth.mean()
            ).abs() <= 6 * 0.5 * unit.max() / n**0.5 + 1e-6 * truth.abs().max(), name
            assert found.unique().numel() == 2, name
