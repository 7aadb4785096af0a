"""Random calls of an operation for hypothesis, made from its description: calls that fit, and calls with one
fault each. Every operand lies in memory with guard bytes before and behind it and in the gaps of its strides.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import op_cases
import torch
from hypothesis import strategies as st

GUARD, GUARD_BYTE = 64, 0xA5
INTEGERS = {
    1: np.int8,
    2: np.int16,
    4: np.int32,
    8: np.int64,
}  # by size: how any element's bits are read and written
TORCH = op_cases.DTYPES
NUMPY = {"f32": np.float32, "f64": np.float64, "i32": np.int32}


# Inputs that are results of other inputs, with op_cases.py's scalars.
TOGETHER = {"attention_backward": {"scale": op_cases.SCALE, "causal": True, "window": 0}}


def size_of(dtype: str) -> int:
    return TORCH[dtype].itemsize


def memory_of(size: int) -> np.ndarray:
    """size bytes between guards, the first at a multiple of GUARD; the caller's are [GUARD, GUARD + size)."""
    whole = np.full(size + 3 * GUARD, GUARD_BYTE, np.uint8)
    begin = -whole.ctypes.data % GUARD
    return whole[begin : begin + size + 2 * GUARD]


@dataclass
class Placed:
    """An operand in memory. strides in elements, offset in bytes."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    memory: np.ndarray
    offset: int = GUARD

    def bits(self, memory: np.ndarray | None = None) -> np.ndarray:
        """The elements as integers."""
        size = size_of(self.dtype)
        return np.ndarray(
            self.shape,
            INTEGERS[size],
            self.memory if memory is None else memory,
            self.offset,
            [s * size for s in self.strides],
        )

    def write(self, value: torch.Tensor) -> None:
        value = value.to(TORCH[self.dtype]).contiguous().view(self.shape)
        same_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size_of(self.dtype)]
        self.bits()[...] = value.view(same_size).numpy()

    def values(self) -> torch.Tensor:
        """A contiguous copy."""
        return torch.from_numpy(self.bits().copy()).view(TORCH[self.dtype])

    def torch(self) -> torch.Tensor:
        flat = torch.from_numpy(self.memory[self.offset :][: (len(self.memory) - self.offset) // 8 * 8])
        return flat.view(TORCH[self.dtype]).as_strided(self.shape, self.strides)

    def numpy(self) -> np.ndarray:
        size = size_of(self.dtype)
        return np.ndarray(
            self.shape, NUMPY[self.dtype], self.memory, self.offset, [s * size for s in self.strides]
        )


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def place(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Placed:
    """In memory of its own."""
    strides = contiguous(shape) if strides is None else strides
    last = sum((n - 1) * s for n, s in zip(shape, strides)) if 0 not in shape else -1
    return Placed(dtype, shape, strides, memory_of((last + 1) * size_of(dtype)))


@dataclass
class Call:
    """One call. operands: by name, None where left out; way: "run", llamac.run; "torch", torch.ops' results;
    "out", torch.ops into what is given; fault: what is wrong, "" for nothing."""

    op: dict
    variant: str
    types: dict[str, str]
    sizes: dict[str, int]
    operands: dict[str, Placed | None]
    scalars: dict[str, Any]
    seed: int
    way: str
    sane: bool = True  # scalars that have a result to compare
    fault: str = ""
    given: dict[str, Any] = field(default_factory=dict)  # arguments in place of operands
    surplus: list | None = field(default_factory=list)  # behind the described scalars; None: none is given

    @property
    def described(self) -> dict[str, dict]:
        return {o["name"]: o for o in self.op["operands"]}

    def present(self) -> dict[str, Placed]:
        return {name: p for name, p in self.operands.items() if p is not None}

    def adds(self, name: str) -> bool:
        flag = self.described[name]["adds_if"]
        return bool(flag and self.scalars.get(flag, False))

    def memories(self) -> list[np.ndarray]:
        return list({id(p.memory): p.memory for p in self.present().values()}.values())


# ---- what fits


def shape_of(operand: dict, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(op_cases.shape_of(operand, sizes))


def draw_sizes(draw, op: dict) -> dict[str, int]:
    sizes: dict[str, int] = {}
    limits = {d["at_most"]: d["name"] for d in op["dimensions"] if d["at_most"]}
    for d in sorted(op["dimensions"], key=lambda d: bool(d["multiple_of"]) + (d["name"] in limits)):
        parts = [div for o in op["operands"] for letter, _, div in o["shape"] if letter == d["name"]]
        unit = math.lcm(*parts) * (sizes[d["multiple_of"]] if d["multiple_of"] else 1)
        count = draw(st.sampled_from((1, 2, 3) if d["multiple_of"] else (1, 2, 3, 5, 8, 17)))
        empty = d["may_be_zero"] and draw(st.integers(0, 15)) == 0
        sizes[d["name"]] = 0 if empty else count * unit
        if d["name"] in limits:  # no less than what it limits, and the same as often as not
            least = sizes[limits[d["name"]]]
            sizes[d["name"]] = least + (count if least and draw(st.booleans()) else 0)
    return sizes


def draw_variant(draw, op: dict, way: str) -> tuple[str, dict[str, str]]:
    """Its name, "" for the default one, and the types of its operands."""
    host = [v for v in op["variants"] if v["where"] == "host"]
    default = next(v for v in op["variants"] if v["name"] == op["default"])["where"] == "host"
    names = ["", *(v["name"] for v in op["variants"] if not v["chip"])]
    chosen = draw(st.sampled_from(names)) if way == "run" else ""
    if way == "run" and chosen == "" and not default:
        chosen = host[0]["name"]
    rows = [row for v in op["variants"] for row in v["types"] if v["name"] == chosen]
    rows = rows or [row for v in host for row in v["types"]]
    row = draw(st.sampled_from(rows))
    return chosen, dict(zip((o["name"] for o in op["operands"]), row))


def draw_strided(draw, dtype: str, shape: tuple[int, ...], apart: bool) -> Placed:
    """With gaps, or, where elements need not be apart, with one for a whole dimension."""
    kind = draw(st.sampled_from(["plain", "gaps", "steps"] + ["broadcast"] * (not apart)))
    if kind == "plain" or not shape:
        return place(dtype, shape)
    parent = list(shape)
    if kind == "gaps":
        parent = [n + draw(st.integers(0, 3)) for n in shape]
    strides = list(contiguous(tuple(parent)))
    d = draw(st.integers(0, max(0, len(shape) - 2)))
    if kind == "steps":
        strides = [s * (2 if k <= d else 1) for k, s in enumerate(strides)]
    if kind == "broadcast":
        strides[d] = 0 if len(shape) == 1 or d < len(shape) - 1 else strides[d]
    return place(dtype, shape, tuple(strides))


def place_fused(operands: dict[str, Placed | None], names: list[str]) -> None:
    """Lays heads [B,T,heads,HD] of several operands of equal B and T behind one another in each row."""
    first = operands[names[0]]
    assert first is not None
    B, T, _, HD = first.shape
    heads = sum(operands[name].shape[2] for name in names)  # type: ignore[union-attr]
    whole = place(first.dtype, (B, T, heads, HD))
    begin = 0
    for name in names:
        p = operands[name]
        assert p is not None
        offset = GUARD + begin * HD * size_of(first.dtype)
        operands[name] = Placed(first.dtype, p.shape, whole.strides, whole.memory, offset)
        begin += p.shape[2]


def draw_operands(
    draw, op: dict, types: dict[str, str], sizes: dict[str, int], way: str
) -> dict[str, Placed | None]:
    operands: dict[str, Placed | None] = {}
    for o in op["operands"]:
        shape = shape_of(o, sizes)
        is_result = way == "torch" and o["output"] and not o["in_place"]
        # AdamW always has master weights beside fp16 ones.
        needed = is_result or (o["name"] == "master" and types["weight"] == "fp16")
        if operands[o["with"]] is None if o["with"] else o["nullable"] and not needed and draw(st.booleans()):
            operands[o["name"]] = None
        elif o["strided"]:
            apart = o["output"] or op["name"] in TOGETHER
            operands[o["name"]] = draw_strided(draw, types[o["name"]], shape, apart)
        else:
            operands[o["name"]] = place(types[o["name"]], shape)
    heads = [o["name"] for o in op["operands"] if o["strided"] and len(o["shape"]) == 4]
    if (
        0 not in sizes.values()
        and len(heads) > 1
        and len({types[name] for name in heads}) == 1
        and len({operands[name].shape[:2] for name in heads}) == 1  # type: ignore[union-attr]
        and draw(st.booleans())
    ):
        place_fused(operands, heads)
    taken: set[str] = set()
    for o in op["operands"]:
        for other in o["may_share"]:
            a, b = operands[o["name"]], operands[other]
            if a is None or b is None or other in taken or not draw(st.booleans()):
                continue
            if (a.dtype, a.shape) == (b.dtype, b.shape) and 0 not in b.strides:
                operands[o["name"]] = b
                taken.add(other)
                break
    return operands


ODD = {"f": (math.nan, math.inf, -1.0, 0.0, 1e300), "i": (0, -1, 2**31 - 1, -(2**31)), "b": (False, True)}


def draw_scalars(draw, op: dict) -> tuple[dict[str, Any], bool]:
    sane = draw(st.integers(0, 9)) > 0
    scalars: dict[str, Any] = {}
    for name, kind in op["scalars"]:
        if kind == "b" or not sane:
            odd = [x for x in ODD[kind] if name not in op["not_negative"] or x >= 0]
            scalars[name] = draw(st.sampled_from(odd))
        else:
            value = draw(st.sampled_from(op["values"][name] or [1]))
            scalars[name] = int(value) if kind == "i" else value
    return scalars, sane


def indices(rng: np.random.Generator, call: Call, o: dict, shape: tuple[int, ...]) -> np.ndarray:
    """In bounds, some of them the exception."""
    below = call.sizes[o["bound"]] if o["bound"] else 10
    ids = rng.integers(0, max(below, 1), shape)
    if o["except"]:
        ids[rng.random(shape) < 0.25] = call.scalars[o["except"]]
    return ids


def fill(call: Call, seed: int) -> None:
    """Values that belong together (op_cases.py) where there are any; noise in outputs that are added to, NaN
    in the others."""
    names = [o["name"] for o in call.op["operands"]]
    rng = np.random.default_rng(seed)
    types = [call.types[name] for name in names]
    absent = tuple(
        name
        for name, p in call.operands.items()
        if (p is None and call.described[name]["begins"]) or call.described[name]["ends"]
    )
    empty = 0 in call.sizes.values()
    known = {} if empty else op_cases.make_inputs(call.op, types, call.sizes, seed, absent)
    for name, o in call.described.items():
        p = call.operands[name]
        if p is None or (o["output"] and not o["in_place"]):
            continue
        value = known.get(name)
        if o["bound"] or o["except"]:
            value = torch.from_numpy(indices(rng, call, o, p.shape))
        elif o["ends"]:  # behind all keys, which is as none
            value = torch.full(p.shape, call.sizes[o["ends"]])
        elif value is None:  # none belongs to it, or there are no rows
            value = torch.from_numpy(np.abs(rng.standard_normal(p.shape)) + 0.1)
        p.write(value)
    for name, o in call.described.items():
        p = call.operands[name]
        if p is None or not o["output"] or o["in_place"]:
            continue
        if call.adds(name):
            p.write(torch.from_numpy(rng.standard_normal(p.shape)))
        elif not any(p is call.operands[other] for other in o["may_share"]):
            p.write(torch.full(p.shape, torch.nan))


# ---- what does not

WRONG_TYPES = (torch.int16, torch.uint8, torch.bool, torch.complex64, torch.int64)


def arguments_of(call: Call) -> dict[str, Placed]:
    """The operands that are arguments of the call."""
    outputs_given = call.way != "torch"
    return {
        name: p
        for name, p in call.present().items()
        if outputs_given or not call.described[name]["output"] or call.described[name]["in_place"]
    }


def begins_with_rows(call: Call, o: dict) -> bool:
    rows = {d["name"] for d in call.op["dimensions"] if d["rows"]}
    return bool(o["shape"]) and o["shape"][0][0] in rows


def fault_shape(draw, call: Call) -> bool:
    """A size that contradicts another operand's, or the description."""
    given, places = arguments_of(call), []
    for name in given:
        for d, (letter, _, _) in enumerate(call.described[name]["shape"]):
            others = {n for n in given if n != name for x, _, _ in call.described[n]["shape"] if x == letter}
            if not letter or others:
                places.append((name, d))
    if not places:
        return False
    name, d = draw(st.sampled_from(places))
    shape = list(given[name].shape)
    shape[d] = draw(st.sampled_from([shape[d] + 1, shape[d] + 7, 2**40] + [0] * (shape[d] > 0)))
    if shape[d] == 2**40:
        one = torch.zeros(1, dtype=TORCH[given[name].dtype])
        call.given[name] = one.as_strided(shape, [0] * len(shape))
    else:
        call.given[name] = place(given[name].dtype, tuple(shape)).torch()
    return True


def fault_rank(draw, call: Call) -> bool:
    names = [
        n for n in arguments_of(call) if call.way == "run" or not begins_with_rows(call, call.described[n])
    ]
    if not names:
        return False
    p = arguments_of(call)[name := draw(st.sampled_from(names))]
    shape = (1, *p.shape) if len(p.shape) < 2 or draw(st.booleans()) else (math.prod(p.shape),)
    call.given[name] = place(p.dtype, shape).torch()
    return True


def fault_dtype(draw, call: Call) -> bool:
    if not arguments_of(call):
        return False
    name = draw(st.sampled_from(list(arguments_of(call))))
    p, o = arguments_of(call)[name], call.described[name]
    other = torch.float32 if p.dtype == "i32" else torch.int32
    wrong = [t for t in (*WRONG_TYPES, other) if call.way == "run" or t != torch.int64 or not o["strided"]]
    call.given[name] = torch.zeros(p.shape, dtype=draw(st.sampled_from(wrong)))
    return True


def fault_endian(draw, call: Call) -> bool:
    names = [n for n, p in call.present().items() if p.dtype in NUMPY]
    if call.way != "run" or not names:
        return False
    p = call.present()[name := draw(st.sampled_from(names))]
    call.given[name] = p.numpy().astype(np.dtype(NUMPY[p.dtype]).newbyteorder())
    return True


def fault_missing(draw, call: Call) -> bool:
    if call.way != "run":
        return False
    call.given[draw(st.sampled_from([n for n, o in call.described.items() if not o["nullable"]]))] = None
    return True


def fault_no_array(draw, call: Call) -> bool:
    if call.way != "run":
        return False
    name = draw(st.sampled_from(list(call.operands)))
    call.given[name] = draw(st.sampled_from([[1.0], "x", 1.0, object(), np.zeros(3, "V0"), np.array("text")]))
    return True


def fault_scalar(draw, call: Call) -> bool:
    if call.way != "run" or not call.scalars:
        return False
    name, kind = draw(st.sampled_from(call.op["scalars"]))
    wrong = ["1", None, [1], 1j, object(), np.zeros(2), 10**400]
    if kind != "f":
        wrong += [0.5, math.nan, np.float32(1.0), 2**63, torch.tensor(0.5)]
    call.scalars[name] = draw(st.sampled_from(wrong))
    return True


def fault_scalar_count(draw, call: Call) -> bool:
    if call.way != "run":
        return False
    call.surplus = draw(st.sampled_from([[1], None] if call.scalars else [[1]]))
    return True


def fault_exception(draw, call: Call) -> bool:
    names = [o["except"] for o in call.op["operands"] if o["except"]]
    if not names:
        return False
    call.scalars[names[0]] = draw(st.sampled_from([2**31, 2**32 - 100, -(2**31) - 1, 2**63 - 1]))
    return True


def fault_index(draw, call: Call) -> bool:
    places = [(n, o) for n, o in call.described.items() if o["bound"] and 0 not in call.present()[n].shape]
    if not places:
        return False
    name, o = draw(st.sampled_from(places))
    p, below = call.present()[name], call.sizes[o["bound"]]
    bad = [-1, below, below + 1, 10**9, -(2**31), 2**31 - 1]
    if o["except"]:
        bad = [value for value in bad if value != call.scalars[o["except"]]]
    at = tuple(draw(st.integers(0, n - 1)) for n in p.shape)
    p.bits()[at] = draw(st.sampled_from(bad))
    return True


def fault_begins(draw, call: Call) -> bool:
    """A first position behind its row's own, before 0, or before that of the row before it."""
    places = [n for n, o in call.described.items() if o["begins"] and call.operands[n] is not None]
    if not places or 0 in call.sizes.values():
        return False
    bits, keys = call.present()[places[0]].bits(), call.sizes[call.described[places[0]]["begins"]]
    b, t = (draw(st.integers(0, n - 1)) for n in bits.shape)
    own = keys - bits.shape[1] + t
    falls = [int(bits[b, t - 1]) - 1] if t else []
    bits[b, t] = draw(st.sampled_from([-1, own + 1, 10**9, -(2**31), *falls]))
    return True


def fault_negative(draw, call: Call) -> bool:
    if not call.op["not_negative"]:
        return False
    call.scalars[call.op["not_negative"][0]] = draw(st.sampled_from([-1, -(2**31), -(2**63)]))
    return True


def place_again(call: Call) -> bool:
    """Operands of the sizes that a fault has changed, indices 0."""
    for name, p in call.present().items():
        call.operands[name] = place(p.dtype, shape_of(call.described[name], call.sizes))
        if p.dtype == "i32":
            call.operands[name].bits()[...] = 0  # type: ignore[union-attr]
    return True


def fault_limit(draw, call: Call) -> bool:
    """More of one size than of another that it may not exceed, the same everywhere."""
    limits = [d for d in call.op["dimensions"] if d["at_most"]]
    if not limits or not call.scalars.get("causal", True) or 0 in call.sizes.values():
        return False
    call.sizes[limits[0]["at_most"]] = call.sizes[limits[0]["name"]]
    call.sizes[limits[0]["name"]] += draw(st.integers(1, 9))
    return place_again(call)


def fault_overlap(draw, call: Call) -> bool:
    """Two contiguous operands that have bytes in common, other than one that may share exactly."""
    given = {n: p for n, p in arguments_of(call).items() if 0 not in p.shape}
    outputs = [n for n in given if call.described[n]["output"]]
    if not outputs or len(given) < 2:
        return False
    output = draw(st.sampled_from(outputs))
    other = draw(st.sampled_from([n for n in given if n != output]))
    a, b = given[output], given[other]
    bytes_a, bytes_b = (math.prod(p.shape) * size_of(p.dtype) for p in (a, b))
    shifts = [s for s in range(-bytes_a // 8 * 8, bytes_b, 8) if s > -bytes_a]
    if other in call.described[output]["may_share"] and (a.dtype, a.shape) == (b.dtype, b.shape):
        shifts = [s for s in shifts if s]
    if not shifts:
        return False
    shift = draw(st.sampled_from(shifts))
    memory = memory_of(bytes_a + bytes_b + abs(shift) + 16)
    begin = GUARD + max(0, -shift)
    for name, p, offset in ((output, a, begin + shift), (other, b, begin)):
        moved = Placed(p.dtype, p.shape, contiguous(p.shape), memory, offset)
        moved.write(p.values())
        call.operands[name] = moved
    return True


def strided_outputs(call: Call) -> list[str]:
    return [
        n
        for n, p in arguments_of(call).items()
        if call.described[n]["output"] and call.described[n]["strided"] and 0 not in p.shape
    ]


def fault_self_overlap(draw, call: Call) -> bool:
    places = [
        (n, d)
        for n in strided_outputs(call)
        for d, size in enumerate(call.present()[n].shape[:-1])
        if size > 1
    ]
    if not places:
        return False
    name, d = draw(st.sampled_from(places))
    p = call.present()[name]
    strides = list(contiguous(p.shape))
    strides[d] = draw(st.integers(0, strides[d] - 1))
    call.operands[name] = place(p.dtype, p.shape, tuple(strides))
    return True


def fault_gap(draw, call: Call) -> bool:
    """Every second element of the last dimension; PyTorch's inputs are copied."""
    names = [
        n
        for n, p in arguments_of(call).items()
        if p.shape
        and p.shape[-1] > 1
        and 0 not in p.shape
        and (call.way == "run" or call.described[n]["output"])
        and not (call.described[n]["strided"] and len(p.shape) == 1)
    ]
    if not names:
        return False
    p = call.present()[name := draw(st.sampled_from(names))]
    gaps = place(p.dtype, p.shape, tuple(2 * s for s in contiguous(p.shape)))
    gaps.write(p.values())
    call.operands[name] = gaps
    return True


def fault_read_only(draw, call: Call) -> bool:
    names = [n for n, p in call.present().items() if call.described[n]["output"] and p.dtype in NUMPY]
    if call.way != "run" or not names:
        return False
    name = draw(st.sampled_from(names))
    call.given[name] = call.present()[name].numpy()
    call.given[name].flags.writeable = False
    return True


def fault_misaligned(draw, call: Call) -> bool:
    names = [n for n, p in call.present().items() if p.dtype in NUMPY and 0 not in p.shape]
    if call.way != "run" or not names:
        return False
    name = draw(st.sampled_from(names))
    p = place(call.present()[name].dtype, call.present()[name].shape)
    p.memory = memory_of(len(p.memory) - 2 * GUARD + 8)
    p.offset += draw(st.integers(1, size_of(p.dtype) - 1))
    call.operands[name] = p
    call.given[name] = p.numpy()
    return True


def fault_negative_stride(draw, call: Call) -> bool:
    places = [
        (n, d)
        for n, p in call.present().items()
        if p.dtype in NUMPY
        for d, size in enumerate(p.shape)
        if size > 1 and 0 not in p.shape and p.numpy().strides[d] > 0
    ]
    if call.way != "run" or not places:
        return False
    name, d = draw(st.sampled_from(places))
    call.given[name] = np.flip(call.present()[name].numpy(), d)
    return True


def fault_zero(draw, call: Call) -> bool:
    """A size that is not allowed to be none, the same everywhere."""
    names = [d["name"] for d in call.op["dimensions"] if not d["may_be_zero"]]
    if not names:
        return False
    call.sizes[draw(st.sampled_from(names))] = 0
    return place_again(call)


def fault_variant(draw, call: Call) -> bool:
    if call.way != "run" or 0 in call.sizes.values():
        return False
    call.variant = draw(st.sampled_from(["magic", "default", "Reference"]))
    return True


def fault_device(draw, call: Call) -> bool:
    names = list(arguments_of(call))
    if call.way == "run" or len(names) < 2:
        return False
    name = draw(st.sampled_from(names))
    call.given[name] = call.present()[name].torch().to("meta")
    return True


FAULTS = {name[6:]: f for name, f in list(globals().items()) if name.startswith("fault_")}


@st.composite
def calls(draw, op: dict, way: str) -> Call:
    sizes = draw_sizes(draw, op)
    variant, types = draw_variant(draw, op, way)
    scalars, sane = draw_scalars(draw, op)
    if sane:
        scalars |= TOGETHER.get(op["name"], {})
    if way == "torch":
        scalars |= {o["adds_if"]: False for o in op["operands"] if o["adds_if"]}
    operands = draw_operands(draw, op, types, sizes, way)
    call = Call(op, variant, types, sizes, operands, scalars, draw(st.integers(0, 2**16)), way, sane)
    fill(call, call.seed)
    fault = draw(st.sampled_from(["", *FAULTS])) if draw(st.booleans()) else ""
    if fault and FAULTS[fault](draw, call):
        call.fault = fault
    return call
