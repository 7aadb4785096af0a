"""Cases of the operations that end as codes of fp8: quantize, quantize_rows, and those of swiglu and rope.

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
    """Runs the device's own operation without codes, by the variant that takes any shape."""
    h.device.machine.order = h.orders[0]
    h.device.call(operation, h.device.optimized(operation)[-1].name, tensors, scalars)


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


def rope_backward_quantize(h: Harness) -> None:
    """Two of three heads are turned."""
    for N, HD, dt, scale, codes, text in calls(h, parts=3):
        half, time = HD // 2, N if N % 2 else N // 2
        angles = h.random.uniform(0, 2 * np.pi, (time, half))
        cis = h.tensor((time, half, 2), F, np.stack([np.cos(angles), np.sin(angles)], -1))
        dout = h.tensor((N, 3, HD), dt, spread(h, N, 3, HD))
        first = h.tensor((N // time, time, 2, HD), dt, dout.get()[:, :2].reshape(N // time, time, 2, HD))
        stored = h.tensor((N // time, time, 2, HD), dt)
        stored_by(h, "rope_backward", [stored, first, cis], [0])
        a, b = first.get()[..., :half], first.get()[..., half:]
        c, s = (cis.get()[None, :, None, :, k] for k in (0, 1))
        truth = np.concatenate([a * c + b * s, b * c - a * s], -1)
        turned = stored.get().reshape(N, 2, HD)
        values = np.concatenate([turned, dout.get()[:, 2:]], 1).reshape(N, 3 * HD)
        for tensor, shape in zip(codes.tensors, ((N, 3, HD), (3, HD, N))):
            if tensor is not None:
                tensor.shape, tensor.data = shape, tensor.data.reshape(shape)
        h.case(
            "rope_backward_quantize",
            text,
            [*codes.tensors, dout, cis, scale],
            [2],
            codes.outputs(values, scale),
            check=Output(stored, truth, 2, 2, 2.0**-22, name="stored").judge,
        )


def scale_of(largest: np.ndarray, limit: float) -> np.ndarray:
    """The largest power of two with which the values stay within the limit; 1 where all are 0."""
    (m_limit, e_limit), (m, e) = np.frexp(limit), np.frexp(largest)
    return np.where(largest > 0, np.ldexp(1.0, e_limit - e - (m > m_limit)), 1.0)


def quantize_rows(h: Harness) -> None:
    for form in FORMS:
        limit = largest_of(form)
        for N, C, dt in ((160, 144, "bf16"), (144, 272, F), (16, 16, "bf16")):
            x = h.tensor((N, C), dt, spread(h, N, C))
            X = x.get()
            by_row, by_column = scale_of(np.abs(X).max(1), limit), scale_of(np.abs(X).max(0), limit)
            out, transposed = h.tensor((N, C), form), h.tensor((C, N), form)
            inverse, inverse_transposed = h.tensor((N,), F), h.tensor((C,), F)
            saturated = h.tensor((1,), np.int32, [3])
            h.case(
                "quantize_rows",
                f"N={N} C={C} T={dtype_name(dt)} Q={form}",
                [out, transposed, inverse, inverse_transposed, saturated, x],
                [limit],
                [
                    Output(out, encode(X * by_row[:, None], form), exact=True, name="out"),
                    Output(transposed, encode((X * by_column).T, form), exact=True, name="transposed"),
                    Output(inverse, 1 / by_row, exact=True, name="inverse"),
                    Output(inverse_transposed, 1 / by_column, exact=True, name="inverse_transposed"),
                    Output(saturated, np.array([3]), exact=True, name="saturated"),
                ],
            )
