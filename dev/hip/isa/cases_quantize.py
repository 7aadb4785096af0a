"""Cases of the operations that end as codes of fp8: quantize and those of swiglu.

Codes, maximum and count are compared exactly. Where an operation makes the values, they are those that the
device's own operation without codes stores, which are compared with float64.
"""

import numpy as np
from device import Tensor
from fp8 import FORMS, encode, largest_of
from harness import Harness
from output import Output, dtype_name, label

F = np.float32
# Rows, columns, type of the values, and the outputs that the call has: out, transposed, amax, saturated.
TOLERANCE = {"bf16": (2, 2, 2.0**-16), F: (16, 16, 2.0**-22)}  # as of swiglu, cases_rows.py
ALL, CODES, ROWS, COUNT, MAXIMUM = (1, 1, 1, 1), (1, 1, 0, 0), (1, 0, 1, 0), (0, 1, 0, 1), (0, 0, 1, 0)
SHAPES = (
    (160, 144, "bf16", ALL),
    (144, 272, F, ALL),
    (16, 16, "bf16", CODES),
    (131, 48, "bf16", ROWS),
    (48, 32, F, COUNT),
    (37, 144, F, MAXIMUM),
)


class Codes:
    """The outputs of a call that ends as codes: their tensors, and what is expected of them."""

    def __init__(self, h: Harness, form: str, N: int, C: int, wanted: tuple[int, int, int, int]):
        self.form = form
        shapes = ((N, C), form, None), ((C, N), form, None), ((1,), F, [0.5]), ((1,), np.int32, [3])
        self.tensors = [h.tensor(*of) if given else None for of, given in zip(shapes, wanted)]

    def outputs(self, values: np.ndarray, scale: Tensor) -> list[Output]:
        """Of the values as they are stored. Their products with the scale are rounded to f32 first."""
        scaled = (values.astype(F) * scale.data[0]).astype(np.float64)
        codes = encode(scaled, self.form)
        beyond = np.count_nonzero(np.abs(scaled) > largest_of(self.form))
        expected = codes, codes.T, max(0.5, np.abs(values).max()), 3 + beyond
        names = "out", "transposed", "amax", "saturated"
        return [
            Output(tensor, value, exact=True, name=name)
            for tensor, value, name in zip(self.tensors, expected, names)
            if tensor is not None
        ]


def calls(h: Harness, parts: int = 1):
    """Shapes with each form of fp8, and a scale by which values are beyond the largest number, and are small.

    parts: how often a row of the codes has the columns.
    """
    first = next(iter(FORMS))
    for form in FORMS:
        for N, C, dt, wanted in SHAPES:
            if wanted == MAXIMUM and form != first:
                continue  # no operand says which form it is
            scale = h.tensor((1,), F, [largest_of(form) / 3])
            text = f"N={N} C={C} T={dtype_name(dt)} Q={form}"
            given = zip(("out", "transposed", "amax", "saturated"), wanted)
            yield N, C, dt, scale, Codes(h, form, N, parts * C, wanted), label(text, **dict(given))


def spread(h: Harness, *shape: int) -> np.ndarray:
    """Numbers of many sizes, zeros of both signs among them."""
    x = h.normal(*shape) * np.exp2(-h.random.integers(0, 24, shape))
    x.flat[:2] = 0.0, -0.0
    return np.where(h.random.random(shape) < 0.5, x, h.normal(*shape))


def quantize(h: Harness) -> None:
    for N, C, dt, scale, codes, text in calls(h):
        x = h.tensor((N, C), dt, spread(h, N, C))
        h.case("quantize", text, [*codes.tensors, x, scale], [], codes.outputs(x.get(), scale))


def stored_by(h: Harness, operation: str, tensors: list[Tensor | None], scalars=()) -> None:
    """Runs the device's own operation without codes."""
    h.device.machine.order = h.orders[0]
    h.device.call(operation, h.device.optimized(operation)[0].name, tensors, scalars)


def swiglu_forward_quantize(h: Harness) -> None:
    for N, C, dt, scale, codes, text in calls(h):
        gate_up = h.tensor((N, 2 * C), dt, np.concatenate([h.normal(N, C, scale=3), spread(h, N, C)], 1))
        gate, up = gate_up.get()[:, :C], gate_up.get()[:, C:]
        out = h.tensor((N, C), dt)
        stored_by(h, "swiglu_forward", [out, gate_up])
        stored = Output(out, gate / (1 + np.exp(-gate)) * up, *TOLERANCE[dt], name="stored")
        h.case(
            "swiglu_forward_quantize",
            text,
            [*codes.tensors, gate_up, scale],
            [],
            codes.outputs(out.get(), scale),
            check=stored.judge,
        )


def swiglu_backward_quantize(h: Harness) -> None:
    for N, C, dt, scale, codes, text in calls(h, parts=2):
        gate_up = h.tensor((N, 2 * C), dt, h.normal(N, 2 * C, scale=3))
        dout, stored = h.tensor((N, C), dt, spread(h, N, C)), h.tensor((N, 2 * C), dt)
        gate, up, d = gate_up.get()[:, :C], gate_up.get()[:, C:], dout.get()
        s = 1 / (1 + np.exp(-gate))
        stored_by(h, "swiglu_backward", [stored, None, dout, gate_up])
        truth = np.concatenate([d * up * s * (1 + gate * (1 - s)), d * gate * s], 1)
        h.case(
            "swiglu_backward_quantize",
            text,
            [*codes.tensors, dout, gate_up, scale],
            [],
            codes.outputs(stored.get(), scale),
            check=Output(stored, truth, *TOLERANCE[dt], name="stored").judge,
        )
