"""Address arithmetic of the optimized kernels on tensors of more than 2^31 elements, on the emulated MI300X.

Only the last blocks of a grid (and the first) run; the last elements are compared with float64. A tensor
reserves up to 20 GB of address space and takes memory where it is touched.
"""

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np
from device import Device, bf16_bits, device_of_arguments, from_bf16, storage_of
from fp8 import decode, encode
from output import dtype_name

sys.path.append(str(Path(__file__).resolve().parents[3]))
from llamac.base.tolerance import floor_of

F = np.float32
PAGE, MAP_NORESERVE = 4096, 0x4000
LIBC = ctypes.CDLL(None)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Sparse:
    """A tensor of zeros that takes memory where it is touched, between inaccessible pages."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = tuple(shape), dtype
        item = storage_of(dtype)
        bytes_ = int(np.prod(shape)) * item.itemsize
        self.whole = (bytes_ + PAGE - 1) // PAGE * PAGE + 2 * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self.base = LIBC.mmap(None, self.whole, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert self.base != ctypes.c_void_p(-1).value, f"cannot reserve {self.whole} bytes"
        LIBC.mprotect(self.base, PAGE, 0)
        LIBC.mprotect(self.base + self.whole - PAGE, PAGE, 0)
        self.at = self.base + self.whole - PAGE - (bytes_ + 15) // 16 * 16
        memory = (ctypes.c_char * bytes_).from_address(self.at)
        self.data = np.frombuffer(memory, item).reshape(shape)

    def __del__(self):
        LIBC.munmap(self.base, self.whole)


class Large:
    """The device, random numbers, and the count of failures."""

    def __init__(self, device: Device):
        self.device, self.random, self.failed = device, np.random.default_rng(0), 0
        self.last_blocks(16)

    def last_blocks(self, count: int) -> None:
        self.device.machine.some = lambda n: [0, *range(n - count, n)] if n > count + 1 else range(n)

    def bits(self, *shape, scale=1.0):
        return bf16_bits(self.random.standard_normal(shape) * scale)

    def call(self, operation, tensors, scalars, compare) -> None:
        """Every optimized variant that takes the call. compare: () -> (name, found, expected, dtype) each."""
        taken = 0
        for variant in self.device.optimized(operation):
            try:
                self.device.call(operation, variant.name, tensors, scalars)
            except RuntimeError as error:
                if "does not take these" not in str(error):
                    raise
                continue
            taken += 1
            for name, found, expected, dtype in compare():
                error = np.abs(found - expected).max()
                allowed = floor_of(expected, dtype_name(dtype)).largest
                right = bool(error <= allowed)
                self.failed += not right
                print(
                    f"{'right' if right else 'WRONG'}  {operation} {variant.name} {name}: "
                    f"{error / allowed:.2f} of the tolerance",
                    flush=True,
                )
        if not taken:
            self.failed += 1
            print(f"WRONG  {operation}: no variant takes this call")


def numbers(bits) -> np.ndarray:
    return from_bf16(bits).astype(np.float64)


def swiglu(t: Large) -> None:
    N, W = 160001, 14336
    gate_up, out = Sparse((N, 2 * W), "bf16"), Sparse((N, W), "bf16")
    gate_up.data[-1] = t.bits(2 * W)
    gate, up = numbers(gate_up.data[-1, W - 1024 : W]), numbers(gate_up.data[-1, -1024:])
    sigmoid = 1 / (1 + np.exp(-gate))
    expected = gate * sigmoid * up
    t.call(
        "swiglu_forward",
        [out, gate_up],
        [],
        lambda: [(f"{N}x{W}", numbers(out.data[-1, -1024:]), expected, "bf16")],
    )
    dout, dgate_up = Sparse((N, W), "bf16"), Sparse((N, 2 * W), "bf16")
    dout.data[-1] = t.bits(W)
    dup = numbers(dout.data[-1, -1024:]) * gate * sigmoid
    t.call(
        "swiglu_backward",
        [dgate_up, None, dout, gate_up],
        [],
        lambda: [(f"{N}x{W}", numbers(dgate_up.data[-1, -1024:]), dup, "bf16")],
    )


def rmsnorm(t: Large) -> None:
    N, C = 300001, 8192
    x, out, rstd, weight = (
        Sparse((N, C), "bf16"),
        Sparse((N, C), "bf16"),
        Sparse((N,), F),
        Sparse((C,), "bf16"),
    )
    x.data[-1], weight.data[:] = t.bits(C), t.bits(C)
    X = numbers(x.data[-1])
    expected = X / np.sqrt((X * X).mean() + 1e-5) * numbers(weight.data)
    t.call(
        "rmsnorm_forward",
        [out, rstd, x, weight],
        [1e-5],
        lambda: [(f"{N}x{C}", numbers(out.data[-1]), expected, "bf16")],
    )


def cross_entropy(t: Large) -> None:
    for V, N in ((128256, 20001), (89999, 25001)):
        logits, dlogits = Sparse((N, V), "bf16"), Sparse((N, V), "bf16")
        losses, targets = Sparse((N,), F), Sparse((N,), np.int32)
        # The block that computes the last row: of a grid with a block per row, or of a smaller one in turns.
        t.device.machine.some = lambda n, N=N: [(N - 1) % n]
        logits.data[-1], targets.data[-1] = t.bits(V, scale=4), 77
        X = numbers(logits.data[-1])
        lse = X.max() + np.log(np.exp(X - X.max()).sum())
        gradient = np.exp(X - lse)
        gradient[77] -= 1
        t.call(
            "cross_entropy",
            [losses, dlogits, None, None, logits, targets, None],
            [1.0, -100],
            lambda found=dlogits, losses=losses, lse=lse, X=X, gradient=gradient, N=N, V=V: [
                (f"{N}x{V} gradient", numbers(found.data[-1]), gradient, "bf16"),
                (f"{N}x{V} loss", losses.data[-1:].astype(np.float64), np.array([lse - X[77]]), F),
            ],
        )
    t.last_blocks(16)


def adamw(t: Large) -> None:
    P, last = (1 << 31) + 5000003, 600
    weight, m, v, gradient = (Sparse((P,), "bf16") for _ in range(4))
    for tensor, scale in ((weight, 0.1), (m, 0.01), (v, 1e-4), (gradient, 0.01)):
        tensor.data[-last:] = bf16_bits(np.abs(t.random.standard_normal(last)) * scale + scale)
    old = [tensor.data[-last:].copy() for tensor in (weight, m, v)]
    expected = 0.9 * numbers(m.data[-last:]) + 0.1 * numbers(gradient.data[-last:])
    squares, lr, step = Sparse((1,), np.float64), Sparse((1,), F), Sparse((1,), np.int32)
    squares.data[0], lr.data[0], step.data[0] = 1, 1e-3, 3

    def compare():
        found = numbers(m.data[-last:])
        for tensor, bits in zip((weight, m, v), old):
            tensor.data[-last:] = bits  # for the next variant
        return [(f"P={P} m", found, expected, "bf16")]

    operands = [weight, None, m, v, gradient, squares, lr, step, None]
    t.call("adamw", operands, [0.9, 0.95, 1e-8, 0.1, 0.0, 1, 0], compare)


def quantize(t: Large) -> None:
    N, C, form = 300032, 8192, "e4m3fnuz"
    x, out, turned = Sparse((N, C), "bf16"), Sparse((N, C), form), Sparse((C, N), form)
    scale = Sparse((1,), F)
    x.data[-16:], scale.data[0] = t.bits(16, C), 60.0
    expected = decode(encode(numbers(x.data[-16:]) * 60, form), form)
    t.call(
        "quantize",
        [out, turned, None, None, x, scale],
        [],
        lambda: [
            (f"{N}x{C}", decode(out.data[-16:, -128:], form), expected[:, -128:], F),
            (f"{N}x{C} transposed", decode(turned.data[-128:, -16:], form), expected[:, -128:].T, F),
        ],
    )


def heads(t: Large) -> None:
    N, V, C = 300001, 300007, 8192
    weight, out, tokens = Sparse((V, C), "bf16"), Sparse((N, C), "bf16"), Sparse((N,), np.int32)
    weight.data[-1], tokens.data[-2:] = t.bits(C), V - 1
    row = numbers(weight.data[-1])
    t.call(
        "embedding_forward",
        [out, tokens, weight],
        [],
        lambda: [(f"{N}x{C} of {V}", numbers(out.data[-1]), row, "bf16")],
    )
    B, T, NH, NKV, HD = 9001, 64, 32, 8, 128
    x, out = Sparse((B, T, NKV, HD), "bf16"), Sparse((B, T, NH, HD), "bf16")
    x.data[-1, -1] = t.bits(NKV, HD)
    last = numbers(x.data[-1, -1, [-1, -1]])
    t.call(
        "repeat_kv_forward",
        [out, x],
        [],
        lambda: [(f"B={B}", numbers(out.data[-1, -1, -2:]), last, "bf16")],
    )
    cis, x, out = Sparse((T, HD // 2, 2), F), Sparse((B, T, NH, HD), "bf16"), Sparse((B, T, NH, HD), "bf16")
    cis.data[..., 0] = 1  # no rotation
    x.data[-1, -1] = t.bits(NH, HD)
    same = numbers(x.data[-1, -1])
    t.call(
        "rope_forward",
        [out, x, cis],
        [0],
        lambda: [(f"B={B}", numbers(out.data[-1, -1]), same, "bf16")],
    )


def matmul(t: Large) -> None:
    N, C, K = 20000, 64, 128256
    x, w, out = Sparse((N, C), "bf16"), Sparse((K, C), "bf16"), Sparse((N, K), "bf16")
    x.data[:], w.data[:] = t.bits(N, C), t.bits(K, C)
    expected = numbers(x.data[-32:]) @ numbers(w.data[-128:]).T
    t.call(
        "matmul_forward",
        [out, x, w, None],
        [],
        lambda: [(f"{N}x{C} {K}", numbers(out.data[-32:, -128:]), expected, "bf16")],
    )
    N, C, K = 300000, 8192, 64
    w, dout, dx = Sparse((K, C), "bf16"), Sparse((N, K), "bf16"), Sparse((N, C), "bf16")
    w.data[:], dout.data[-256:] = t.bits(K, C), t.bits(256, K)
    expected_dx = numbers(dout.data[-32:]) @ numbers(w.data[:, -128:])
    t.call(
        "matmul_backward_input",
        [dx, dout, w],
        [],
        lambda: [(f"{N}x{C} {K}", numbers(dx.data[-32:, -128:]), expected_dx, "bf16")],
    )
    N, C, K = 64, 16384, 140000
    x, dout, dw = Sparse((N, C), "bf16"), Sparse((N, K), "bf16"), Sparse((K, C), "bf16")
    x.data[:], dout.data[:] = t.bits(N, C), t.bits(N, K)
    expected_dw = numbers(dout.data[:, -32:]).T @ numbers(x.data[:, -128:])
    t.call(
        "matmul_backward_weight",
        [dw, dout, x],
        [0],
        lambda: [(f"{K}x{C}", numbers(dw.data[-32:, -128:]), expected_dw, "bf16")],
    )


def attention(t: Large) -> None:
    for window in (64, 40):  # all keys; the kernels with masks
        attention_of(t, window)


def attention_of(t: Large, window: int) -> None:
    B, T, NH, NKV, HD = 9001, 64, 32, 8, 128
    scale = HD**-0.5
    q, out, dout, dq = (Sparse((B, T, NH, HD), "bf16") for _ in range(4))
    k, v, dk, dv = (Sparse((B, T, NKV, HD), "bf16") for _ in range(4))
    lse = Sparse((B, NH, T), F)
    for tensor in (q, k, v):
        tensor.data[-1] = t.bits(*tensor.shape[1:])
    Q, K, V = (numbers(tensor.data[-1, :, -1]) for tensor in (q, k, v))
    ones = np.ones((T, T), bool)
    s = np.where(np.tril(ones) & ~np.tril(ones, -window), Q @ K.T * scale, -np.inf)
    p = np.exp(s - s.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    name = f"B={B} T={T} NH={NH} window={window}"
    t.last_blocks(160)
    t.call(
        "attention_forward",
        [out, lse, q, k, v, None],
        [scale, 1, window],
        lambda: [(name, numbers(out.data[-1, :, -1]), p @ V, "bf16")],
    )
    dout.data[-1] = t.bits(T, NH, HD)
    DO = numbers(dout.data[-1, :, -1])
    ds = p * (DO @ V.T - (DO * numbers(out.data[-1, :, -1])).sum(1, keepdims=True))
    t.call(
        "attention_backward",
        [dq, dk, dv, dout, out, lse, q, k, v, None],
        [scale, 1, window],
        lambda: [(f"{name} dq", numbers(dq.data[-1, :, -1]), ds @ K * scale, "bf16")],
    )
    t.last_blocks(16)


def main() -> int:
    t = Large(device_of_arguments(__doc__))
    for check in (swiglu, rmsnorm, cross_entropy, adamw, quantize, heads, matmul, attention):
        check(t)
    print(f"{t.failed} failed")
    return t.failed > 0


if __name__ == "__main__":
    sys.exit(main())
