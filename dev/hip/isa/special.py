"""NaN, infinities and denormals in the optimized kernels on the emulated MI300X."""

import sys

import numpy as np
from device import Device, device_of_arguments, from_bf16
from fp8 import FORMS, encode, largest_of

F = np.float32
EVERY_BF16 = np.arange(65536, dtype=np.uint16)


class Special:
    """One variant on the device, random numbers, and the count of failures."""

    def __init__(self, device: Device):
        self.device, self.random, self.failed = device, np.random.default_rng(0), 0
        self.tensor = device.tensor
        self.operation = self.variant = ""

    def normal(self, shape):
        return self.tensor(shape, "bf16", self.random.standard_normal(shape))

    def of_bits(self, bits):
        tensor = self.tensor(bits.shape, "bf16")
        tensor.data[...] = bits
        return tensor

    def call(self, tensors, scalars=()) -> None:
        self.device.call(self.operation, self.variant, tensors, scalars)

    def check(self, good, what: str) -> None:
        self.failed += not good
        print(f"{'right' if good else 'WRONG'}  {self.operation} {self.variant}: {what}", flush=True)


def rounding(s: Special) -> None:
    """With one head per group: bf16 to f32 and back. -0 becomes 0: it is added to 0."""
    dout, dx = s.of_bits(EVERY_BF16.reshape(1, 64, 8, 128)), s.tensor((1, 64, 8, 128), "bf16")
    expected = np.where(EVERY_BF16 == 0x8000, 0, EVERY_BF16)
    is_nan = (EVERY_BF16 & 0x7FFF) > 0x7F80
    s.call([dx, dout])
    found = dx.data.reshape(-1)
    s.check((found == expected)[~is_nan].all(), "every number is kept")
    s.check(((found[is_nan] & 0x7FFF) > 0x7F80).all(), "NaN stays NaN")


def swiglu(s: Special) -> None:
    """Every bf16 as a gate. The baseline is the same formula in f32: exp overflows below -88."""
    gate_up = s.of_bits(np.concatenate([EVERY_BF16.reshape(8, -1), np.full((8, 8192), 0x3F80, np.uint16)], 1))
    with np.errstate(all="ignore"):
        gate = from_bf16(EVERY_BF16).astype(np.float64)
        expected = gate / (1 + np.exp(-gate))
        baseline = gate.astype(F) / (F(1) + np.exp(-gate.astype(F)))
    finite = np.isfinite(expected)
    ulp = np.maximum(np.abs(expected[finite]) * 2.0**-8, 2.0**-133)
    allowed = np.maximum(2 * np.abs(baseline[finite] - expected[finite]), ulp) + ulp
    out = s.tensor((8, 8192), "bf16")
    s.call([out, gate_up])
    found = out.get().reshape(-1)
    s.check((np.abs(found[finite] - expected[finite]) <= allowed).all(), "every finite gate")
    s.check(found[EVERY_BF16 == 0x7F80] == np.inf, "infinity stays")
    s.check(np.isnan(found[np.isnan(expected)]).all(), "NaN stays NaN, -infinity becomes NaN")


def cross_entropy(s: Special) -> None:
    """NaN and infinity spoil their own row alone; -infinity, a masked logit, spoils none."""
    for bits, spoils in ((0x7FC0, True), (0x7F80, True), (0xFF80, False)):
        logits, targets = s.normal((3, 1003)), s.tensor((3,), np.int32, [5, 6, 7])
        logits.data[1, 500] = bits
        losses, dlogits = s.tensor((3,), F), s.tensor((3, 1003), "bf16")
        s.call([losses, dlogits, None, None, logits, targets, None], [1.0, -100])
        gradient = np.isnan(dlogits.get())
        of_rows = np.isnan(losses.data), gradient.any(1), gradient.all(1)
        right = all(row.tolist() == [False, spoils, False] for row in of_rows)
        s.check(right, f"a logit of {from_bf16(np.array([bits]))[0]}")


def attention(s: Special) -> None:
    """NaN in row 20 of q spoils that row of one head; NaN in k and v spoils the rows from 20 on."""
    tokens, at = 70, 20
    row = np.arange(tokens)
    for where in "qkv":
        q, k, v = (s.normal((1, tokens, heads, 64)) for heads in (2, 1, 1))
        {"q": q, "k": k, "v": v}[where].data[0, at, 0, 3] = 0x7FC0
        out, lse = s.tensor((1, tokens, 2, 64), "bf16"), s.tensor((1, 2, tokens), F)
        s.call([out, lse, q, k, v, None, None], [0.125])
        spoilt = np.isnan(out.get()[0]).any(-1)  # [row, head]
        if where == "v":  # 0 times NaN is NaN: rows before it are spoilt in that column alone
            right = spoilt[at:].all() and not np.isnan(np.delete(out.get()[0, :at], 3, -1)).any()
        else:
            own = np.stack([row == at, np.zeros(tokens, bool)], 1)
            right = (spoilt == (own if where == "q" else (row >= at)[:, None])).all()
        s.check(right, f"a NaN in {where}")


def adamw(s: Special) -> None:
    """A gradient that is not finite spoils its own weight alone."""
    for bits in (0x7FC0, 0xFFFF, 0x7F80):
        weight, m, v, gradient = (s.tensor((1024,), "bf16", np.full(1024, x)) for x in (0.1, 0.0, 0.0, 0.01))
        gradient.data[7] = bits
        squares, lr = s.tensor((1,), np.float64, [1.0]), s.tensor((1,), F, [1e-3])
        step = s.tensor((1,), np.int32, [1])
        operands = [weight, None, m, v, gradient, squares, lr, step, None, None]
        s.call(operands, [0.9, 0.95, 1e-8, 0.1, 0.0, 1, 0])
        finite = np.isfinite(weight.get())
        right = not finite[7] and np.delete(finite, 7).all()
        s.check(right, f"a gradient of {from_bf16(np.array([bits]))[0]}")


def quantize(s: Special) -> None:
    """Every bf16 with each form of fp8. NaN alone makes the largest value NaN."""
    one = s.tensor((1,), F, [1.0])
    is_nan = np.isnan(from_bf16(EVERY_BF16))
    for form in FORMS:
        for bits in (EVERY_BF16, np.where(is_nan, 0x7F80, EVERY_BF16)):
            x = s.of_bits(bits.reshape(256, 256))
            out, turned = (s.tensor((256, 256), form) for _ in range(2))
            amax, saturated = s.tensor((1,), F, [0.0]), s.tensor((1,), np.int32, [0])
            s.call([out, turned, amax, saturated, x, one])
            with np.errstate(invalid="ignore"):  # signaling NaN
                numbers = x.get()
            expected = encode(numbers, form)
            right = (out.data == expected).all() and (turned.data == expected.T).all()
            s.check(right, f"{form}: the codes of every bf16")
            largest = np.abs(numbers).max()
            right = np.array_equal(amax.get()[0], largest, equal_nan=True)
            right &= saturated.data[0] == np.count_nonzero(np.abs(numbers) > largest_of(form))
            s.check(right, f"{form}: largest value {largest}, and how many are too large")


CHECKS = {
    "repeat_kv_backward": rounding,
    "swiglu_forward": swiglu,
    "cross_entropy": cross_entropy,
    "attention_forward": attention,
    "adamw": adamw,
    "quantize": quantize,
}


def main() -> int:
    s = Special(device_of_arguments(__doc__))
    for operation, check in CHECKS.items():
        for variant in s.device.optimized(operation):
            s.operation, s.variant = operation, variant
            check(s)
    print(f"{s.failed} failed")
    return s.failed > 0


if __name__ == "__main__":
    sys.exit(main())
