"""Cases of the optimizer step: adamw, and adamw_quantize, which gives the codes of the new weight."""

import copy

import numpy as np
from cases_quantize import Codes, stored_by
from device import Tensor, from_bf16
from harness import Harness
from output import Output, dtype_name, label

from llamac.base.tolerance import ulp

F = np.float32
STEP, NORM, LEARNING_RATE = 17, 2.5, 3e-3
BETA1, BETA2, EPS, DECAY, SEED, STREAM = 0.9, 0.95, 1e-8, 0.1, 1234567890123, 8
NAMES = "weight", "master", "m", "v"  # of what is written
# Of weight, gradient and moments.
TYPES = (
    (F, F, F),
    (F, F, "bf16"),
    ("bf16", F, F),
    ("bf16", F, "bf16"),
    ("bf16", "bf16", F),
    ("bf16", "bf16", "bf16"),
)


def philox_words(first: int, count: int) -> np.ndarray:
    """Random bits of the elements from a multiple of 4 on: Philox 4x32-10 keyed by the seed."""
    M = np.uint64(0xFFFFFFFF)
    block = np.arange(first // 4, (first + count + 3) // 4, dtype=np.uint64)
    c = [block & M, block >> np.uint64(32), np.full_like(block, STREAM), np.full_like(block, STEP)]
    k0, k1 = SEED & 0xFFFFFFFF, SEED >> 32 & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            p1 >> np.uint64(32) ^ c[1] ^ np.uint64(k0),
            p1 & M,
            p0 >> np.uint64(32) ^ c[3] ^ np.uint64(k1),
            p0 & M,
        ]
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return np.stack(c, 1).reshape(-1)[:count].astype(np.uint32)


def stochastic(x: np.ndarray, random: np.ndarray) -> np.ndarray:
    """The bf16 that x is rounded to with these random bits, which are added below its mantissa."""
    bits = x.astype(F).view(np.uint32)
    return from_bf16(((bits.astype(np.uint64) + random) >> 16).astype(np.uint16)).astype(np.float64)


def types_text(weight, gradient, moments) -> str:
    return f"T={dtype_name(weight)} G={dtype_name(gradient)} M={dtype_name(moments)}"


class Step:
    """Operands of a step of P elements, and what is expected of it. guard: of the losses; inf skips it."""

    def __init__(self, h: Harness, P: int, dt, g, m_dt, with_master, clip=1.0, shift=0, offset=0, guard=None):
        w0, g0 = h.normal(P, scale=0.02), h.normal(P, scale=0.01)
        self.weight, grad = h.tensor((P,), dt, w0, shift), h.tensor((P,), g, g0, shift)
        self.master = h.tensor((P,), F, w0) if with_master else None
        self.m = h.tensor((P,), m_dt, h.normal(P, scale=0.003), shift)
        self.v = h.tensor((P,), m_dt, np.abs(h.normal(P, scale=1e-5)) + 1e-7, shift)
        squares, lr = h.tensor((1,), np.float64, [NORM**2]), h.tensor((1,), F, [LEARNING_RATE])
        self.written = [self.weight, self.master, self.m, self.v]
        self.read = [grad, squares, lr, h.tensor((1,), np.int32, [STEP])]
        self.guard = None if guard is None else h.tensor((1,), np.float64, [guard])
        self.scalars = [BETA1, BETA2, EPS, DECAY, clip, SEED, STREAM, offset]
        self.rounded: list[tuple[Tensor, np.ndarray, np.ndarray, str]] = []
        self.outputs = self.kept() if guard == np.inf else self.updated(grad.get(), clip, offset)

    def kept(self) -> list[Output]:
        named = zip(NAMES, self.written)
        return [Output(t, t.get(), exact=True, name=name) for name, t in named if t is not None]

    def updated(self, grad: np.ndarray, clip: float, offset: int) -> list[Output]:
        factor = min(1.0, clip / (NORM + 1e-6)) if clip > 0 else 1.0
        G, W = grad * factor, (self.weight if self.master is None else self.master).get()
        M, V = BETA1 * self.m.get() + (1 - BETA1) * G, BETA2 * self.v.get() + (1 - BETA2) * G * G
        direction = M / (1 - BETA1**STEP) / (np.sqrt(V / (1 - BETA2**STEP)) + EPS)
        W = W - float(F(LEARNING_RATE)) * (direction + DECAY * W)
        words = philox_words(offset, len(W))
        outputs = []
        for t, truth, random, name in (
            (self.weight, W, words >> 16, "weight"),
            (self.m, M, (words & 0xFF00) | 0x80, "m"),
            (self.v, V, (words << 8 & 0xFF00) | 0x80, "v"),
        ):
            if t.dtype != "bf16":
                outputs.append(Output(t, truth, 8, 16, 2.0**-22, name=name))
            elif t is self.weight and self.master is not None:
                outputs.append(Output(t, truth, 1, 0.6, 2.0**-20, name=name))
            else:
                outputs.append(Output(t, truth, 1.001, 1.01, 2.0**-20, name=name))
                self.rounded.append((t, stochastic(truth, random), truth, name))
        if self.master is not None:
            outputs.append(Output(self.master, W, 8, 16, 2.0**-22, name="master"))
        return outputs

    def judge_rounding(self) -> tuple[float, str]:
        """Nearly all values are rounded to the expected neighbour (they may be 1e-6 off), without bias."""
        texts, worst = [], 0.0
        for tensor, expected, exact, name in self.rounded:
            found = tensor.get()
            others = np.count_nonzero(found != expected)
            sigma = np.sqrt(1 / 6 / found.size)
            bias = ((found - exact) / ulp(exact, "bf16")).mean() / sigma
            texts.append(f"{name}: {others} of {found.size} another neighbour, bias {bias:.1f} sigma")
            worst = max(worst, others / (0.002 * found.size + 3), abs(bias) / 5)
        return worst, "; ".join(texts) or "no stochastic outputs"

    def judge(self) -> tuple[float, str]:
        """All outputs and their rounding."""
        results = [*(output.judge() for output in self.outputs), self.judge_rounding()]
        return max(share for share, _ in results), ", ".join(text for _, text in results)


def adamw(h: Harness) -> None:
    above = 1 << 34  # the element where the number of a Philox block passes 2^32
    for P, dt, g, m_dt, with_master, clip, threads, shift, offset, guard in (
        (3000, "bf16", "bf16", "bf16", 0, 1.0, 0, 0, 0, None),
        (2051, "bf16", F, "bf16", 0, 0.0, 0, 0, 0, None),
        (2048, "bf16", "bf16", "bf16", 1, 1.0, 0, 0, 0, None),
        (1029, "bf16", F, F, 0, 1.0, 0, 0, 0, None),
        (1501, F, F, F, 0, 1.0, 256, 0, 0, None),
        (2500, "bf16", F, F, 1, 1.0, 256, 0, 0, None),
        (1030, "bf16", "bf16", "bf16", 0, 1.0, 0, 2, 4120, None),
        (2049, F, F, "bf16", 0, 1.0, 0, 0, 0, None),
        (2100, "bf16", "bf16", "bf16", 0, 1.0, 0, 0, above - 2048, None),
        (2100, "bf16", F, "bf16", 1, 1.0, 256, 0, above - 2048, None),
        (1030, "bf16", F, F, 0, 1.0, 0, 0, above + 12, None),
        (1030, "bf16", "bf16", "bf16", 0, 1.0, 0, 0, 8, 6.0),
        (1030, "bf16", "bf16", "bf16", 0, 1.0, 0, 0, 8, np.inf),
        (1030, "bf16", F, F, 1, 1.0, 0, 0, 8, np.inf),
        *(
            (1100, *types, master, 1.0, 0, shift, 1100 * shift, None)
            for types in TYPES
            for master in (0, 1)
            for shift in (0, 4)
        ),
    ):
        step = Step(h, P, dt, g, m_dt, with_master, clip, shift, offset, guard)
        text = f"P={P} {types_text(dt, g, m_dt)} clip={clip} offset={offset}"
        h.case(
            "adamw",
            label(text, master=with_master, shifted=shift, guarded=guard, skipped=guard == np.inf),
            [*step.written, *step.read, step.guard],
            step.scalars,
            step.outputs,
            threads,
            check=step.judge_rounding,
        )


def adamw_quantize(h: Harness) -> None:
    for K, C, types, form, master, wanted, offset, guard in (
        (144, 160, ("bf16", "bf16", "bf16"), "e4m3fnuz", 0, ("out", "transposed"), (1 << 34) - 2048, None),
        (160, 144, (F, F, F), "e4m3fnuz", 0, ("transposed",), 8, None),
        (133, 48, ("bf16", F, F), "e4m3fnuz", 1, ("out",), 0, 6.0),
        (32, 48, ("bf16", "bf16", "bf16"), "e4m3fnuz", 0, ("out", "transposed"), 8, np.inf),
        (32, 48, ("bf16", F, "bf16"), "e4m3fnuz", 1, ("out", "transposed"), 8, np.inf),
        (144, 48, ("bf16", "bf16", "bf16"), "e4m3fnuz", 0, ("out", "columns"), 0, None),
        *(
            (48, 32, types, form, master, ("out", "transposed"), 16, None)
            for types in TYPES
            for form in ("e4m3", "e4m3fnuz")
            for master in (0, 1)
        ),
    ):
        text = f"K={K} C={C} {types_text(*types)} Q={form} offset={offset}"
        text = label(text, master=master, **dict.fromkeys(wanted, 1), skipped=guard == np.inf)
        step = Step(h, K * C, *types, master, 1.0, 0, offset, guard)
        adamw_quantize_case(h, step, K, C, form, wanted, text)


def adamw_quantize_case(h: Harness, step: Step, K: int, C: int, form: str, wanted, text: str) -> None:
    """Weight and moments are those of the device's own adamw, bit by bit; the codes are those of this weight.

    columns: transposed is half the columns of a wider matrix, whose others stay.
    """

    def matrix(of: Tensor) -> Tensor:
        copied = h.tensor((K, C), of.dtype)
        copied.raw[:] = of.raw
        return copied

    written = [None if t is None else matrix(t) for t in step.written]
    grad = matrix(step.read[0])
    stored_by(h, "adamw", [*step.written, *step.read, step.guard], step.scalars)
    scale = h.tensor((1,), F, [3000.0])
    codes = Codes(h, form, K, C, ("out" in wanted, "out" not in wanted or len(wanted) > 1, 1, 1))
    outputs, strides = codes.outputs(step.weight.get().reshape(K, C), scale), {}
    if "columns" in wanted:
        wide = h.tensor((C, 2 * K), form)
        expected = np.concatenate([outputs[1].expected, wide.get()[:, K:]], 1)
        outputs[1] = Output(wide, expected, exact=True, name="transposed")
        codes.tensors[1], strides = copy.copy(wide), {1: (2 * K, 1)}
        codes.tensors[1].shape = C, K
    outputs += [
        Output(t, of_adamw.get(), exact=True, name=name)
        for t, of_adamw, name in zip(written, step.written, NAMES)
        if t is not None and of_adamw is not None
    ]
    h.case(
        "adamw_quantize",
        text,
        [*codes.tensors, *written, grad, *step.read[1:], scale, step.guard],
        step.scalars,
        outputs,
        strides=strides,
        check=step.judge,
    )
