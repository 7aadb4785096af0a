"""NaN, infinities and denormals in the optimized kernels on the emulated MI300X."""

import sys

import numpy as np
from device import Device, device_of_arguments, from_bf16
from fp8 import FORMS, encode, largest_of

F = np.float32
EVERY_BF16 = np.arange(65536, dtype=np.uint16)


class Special:
    """The checks' device and random numbers, and the count of failures."""

    def __init__(self, device: Device):
        self.device, self.random, self.failed = device, np.random.default_rng(0), 0

    def normal(self, shape):
        return self.device.tensor(shape, "bf16", self.random.standard_normal(shape))

    def of_bits(self, bits):
        tensor = self.device.tensor(bits.shape, "bf16")
        tensor.data[...] = bits
        return tensor

    def check(self, good, what: str) -> None:
        self.failed += not good
        print(f"{'right' if good else 'WRONG'}  {what}", flush=True)


def rounding(s: Special) -> None:
    """repeat_kv_backward with one head per group: bf16 to f32 and back. -0 becomes 0: it is added to 0."""
    dout = s.of_bits(EVERY_BF16.reshape(1, 64, 8, 128))
    expected = np.where(EVERY_BF16 == 0x8000, 0, EVERY_BF16)
    is_nan = (EVERY_BF16 & 0x7FFF) > 0x7F80
    for variant in s.device.optimized("repeat_kv_backward"):
        dx = s.device.tensor((1, 64, 8, 128), "bf16")
        s.device.call("repeat_kv_backward", variant, [dx, dout])
        found = dx.data.reshape(-1)
        s.check((found == expected)[~is_nan].all(), f"repeat_kv_backward {variant}: every number is kept")
        s.check(((found[is_nan] & 0x7FFF) > 0x7F80).all(), f"repeat_kv_backward {variant}: NaN stays NaN")


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
    for variant in s.device.optimized("swiglu_forward"):
        out = s.device.tensor((8, 8192), "bf16")
        s.device.call("swiglu_forward", variant, [out, gate_up])
        found = out.get().reshape(-1)
        name = f"swiglu_forward {variant}"
        s.check((np.abs(found[finite] - expected[finite]) <= allowed).all(), f"{name}: every finite gate")
        s.check(found[EVERY_BF16 == 0x7F80] == np.inf, f"{name}: infinity stays")
        s.check(np.isnan(found[np.isnan(expected)]).all(), f"{name}: NaN stays NaN, -infinity becomes NaN")


def cross_entropy(s: Special) -> None:
    """NaN and infinity spoil their own row alone; -infinity, a masked logit, spoils none."""
    for variant in s.device.optimized("cross_entropy"):
        for bits, spoils in ((0x7FC0, True), (0x7F80, True), (0xFF80, False)):
            logits = s.normal((3, 1003))
            logits.data[1, 500] = bits
            targets = s.device.tensor((3,), np.int32, [5, 6, 7])
            losses, dlogits = s.device.tensor((3,), F), s.device.tensor((3, 1003), "bf16")
            operands = [losses, dlogits, None, None, logits, targets, None]
            s.device.call("cross_entropy", variant, operands, [1.0, -100])
            expected = [False, spoils, False]
            gradient = np.isnan(dlogits.get())
            rows = (
                np.isnan(losses.data).tolist()
                == gradient.any(1).tolist()
                == gradient.all(1).tolist()
                == expected
            )
            s.check(rows, f"cross_entropy {variant}: a logit of {from_bf16(np.array([bits]))[0]}")


def attention(s: Special) -> None:
    """NaN in row 20 of q spoils that row of one head; NaN in k and v spoils the rows from 20 on."""
    tokens, at = 70, 20
    for variant in s.device.optimized("attention_forward"):
        for where in "qkv":
            q, k, v = (s.normal((1, tokens, heads, 64)) for heads in (2, 1, 1))
            {"q": q, "k": k, "v": v}[where].data[0, at, 0, 3] = 0x7FC0
            out, lse = s.device.tensor((1, tokens, 2, 64), "bf16"), s.device.tensor((1, 2, tokens), F)
            s.device.call("attention_forward", variant, [out, lse, q, k, v, None], [0.125])
            spoilt = np.isnan(out.get()[0]).any(-1)  # [row, head]
            after = np.arange(tokens) >= at
            expected = (
                np.stack([np.arange(tokens) == at, np.zeros(tokens, bool)], 1)
                if where == "q"
                else after[:, None]
            )
            right = (spoilt == expected).all() if where != "v" else spoilt[after].all()
            if where == "v":  # 0 times NaN is NaN: rows before it are spoilt in that column alone
                right &= not np.isnan(np.delete(out.get()[0, :at], 3, -1)).any()
            s.check(right, f"attention_forward {variant}: a NaN in {where}")


def adamw(s: Special) -> None:
    """A gradient that is not finite spoils its own weight alone."""
    for variant in s.device.optimized("adamw"):
        for bits in (0x7FC0, 0xFFFF, 0x7F80):
            tensors = [s.device.tensor((1024,), "bf16", np.full(1024, x)) for x in (0.1, 0.0, 0.0, 0.01)]
            weight, m, v, gradient = tensors
            gradient.data[7] = bits
            squares, lr = s.device.tensor((1,), np.float64, [1.0]), s.device.tensor((1,), F, [1e-3])
            step = s.device.tensor((1,), np.int32, [1])
            scalars = [0.9, 0.95, 1e-8, 0.1, 0.0, 1, 0]
            operands = [weight, None, m, v, gradient, squares, lr, step, None]
            s.device.call("adamw", variant, operands, scalars)
            finite = np.isfinite(weight.get())
            right = not finite[7] and np.delete(finite, 7).all()
            s.check(right, f"adamw {variant}: a gradient of {from_bf16(np.array([bits]))[0]}")


def quantize(s: Special) -> None:
    """Every bf16 with each form of fp8. NaN alone makes the largest value NaN."""
    one = s.device.tensor((1,), F, [1.0])
    is_nan = np.isnan(from_bf16(EVERY_BF16))
    for variant in s.device.optimized("quantize"):
        for form in FORMS:
            for bits in (EVERY_BF16, np.where(is_nan, 0x7F80, EVERY_BF16)):
                x = s.of_bits(bits.reshape(256, 256))
                out, turned = (s.device.tensor((256, 256), form) for _ in range(2))
                amax, saturated = s.device.tensor((1,), F, [0.0]), s.device.tensor((1,), np.int32, [0])
                s.device.call("quantize", variant, [out, turned, amax, saturated, x, one])
                with np.errstate(invalid="ignore"):  # signalling NaN
                    numbers = x.get()
                expected = encode(numbers, form)
                right = (out.data == expected).all() and (turned.data == expected.T).all()
                name = f"quantize {variant} {form}"
                s.check(right, f"{name}: the codes of every bf16")
                largest = np.abs(numbers).max()
                s.check(
                    np.array_equal(amax.get()[0], largest, equal_nan=True)
                    and saturated.data[0] == np.count_nonzero(np.abs(numbers) > largest_of(form)),
                    f"{name}: largest value {largest}, and how many are too large",
                )


def main() -> int:
    s = Special(device_of_arguments(__doc__))
    for check in (rounding, swiglu, cross_entropy, attention, adamw, quantize):
        check(s)
    print(f"{s.failed} failed")
    return s.failed > 0


if __name__ == "__main__":
    sys.exit(main())
