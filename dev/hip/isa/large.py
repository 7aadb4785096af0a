"""Address arithmetic of the optimized kernels on tensors of more than 2^31 elements, on the emulated MI300X.

Only the last blocks of a grid (and the first) run; the last elements are compared with float64. A tensor
reserves up to 20 GB of address space and takes memory where it is touched.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np
from device import Device, bf16_bits, device_of_arguments, from_bf16, storage_of
from fp8 import decode, encode
from lds import reserved

sys.path.append(str(Path(__file__).resolve().parents[3]))
from llamac.base.tolerance import floor_of

F = np.float32
CODES = "e4m3fnuz"
PAGE = 4096
LIBC = ctypes.CDLL(None)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Sparse:
    """A tensor of zeros that takes memory where it is touched, between inaccessible pages."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = tuple(shape), dtype
        item = storage_of(dtype)
        bytes_ = int(np.prod(shape)) * item.itemsize
        whole = (bytes_ + PAGE - 1) // PAGE * PAGE + 2 * PAGE
        memory = reserved(whole)
        for page in (memory.ctypes.data, memory.ctypes.data + whole - PAGE):
            assert LIBC.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) == 0, "mprotect"
        begin = whole - PAGE - (bytes_ + 15) // 16 * 16
        self.data = memory[begin : begin + bytes_].view(item).reshape(shape)
        self.at = self.data.ctypes.data


def bf16(*shapes: tuple[int, ...]) -> list[Sparse]:
    return [Sparse(shape, "bf16") for shape in shapes]


class Large:
    """The device, random numbers, and the count of failures."""

    def __init__(self, device: Device):
        self.device, self.random, self.failed = device, np.random.default_rng(0), 0
        self.last_blocks(16)

    def last_blocks(self, count: int) -> None:
        self.device.machine.some = lambda n: [0, *range(n - count, n)] if n > count + 1 else range(n)

    def bits(self, *shape, scale=1.0):
        return bf16_bits(self.random.standard_normal(shape) * scale)

    def call(self, operation: str, name: str, tensors, scalars, *results) -> None:
        """Every optimized variant that takes the call. results: parts of tensors with what is expected."""
        before = [found.copy() for found, _ in results]
        taken = 0
        for variant in self.device.optimized(operation):
            for (found, _), old in zip(results, before):
                found[...] = old
            try:
                self.device.call(operation, variant, tensors, scalars)
            except RuntimeError as error:
                if "does not take these" not in str(error):
                    raise
                continue
            taken += 1
            for found, expected in results:
                error = np.abs(numbers(found) - expected).max()
                allowed = floor_of(expected, "bf16" if found.dtype == np.uint16 else "f32").largest
                right = bool(error <= allowed)
                self.failed += not right
                share = f"{error / allowed:.2f} of the tolerance"
                print(f"{'right' if right else 'WRONG'}  {operation} {variant} {name}: {share}", flush=True)
        if not taken:
            self.failed += 1
            print(f"WRONG  {operation}: no variant takes this call")


def numbers(data: np.ndarray) -> np.ndarray:
    """float64 of bits of bf16, of codes of e4m3fnuz, or of f32."""
    if data.dtype == np.uint8:
        return decode(data, CODES)
    return (from_bf16(data) if data.dtype == np.uint16 else data).astype(np.float64)


def swiglu(t: Large) -> None:
    N, W = 160001, 14336
    gate_up, dgate_up, out, dout = bf16((N, 2 * W), (N, 2 * W), (N, W), (N, W))
    gate_up.data[-1], dout.data[-1] = t.bits(2 * W), t.bits(W)
    gate, up = numbers(gate_up.data[-1, W - 1024 : W]), numbers(gate_up.data[-1, -1024:])
    silu = gate / (1 + np.exp(-gate))
    dup = numbers(dout.data[-1, -1024:]) * silu
    t.call("swiglu_forward", f"{N}x{W}", [out, gate_up], [], (out.data[-1, -1024:], silu * up))
    operands = [dgate_up, None, dout, gate_up]
    t.call("swiglu_backward", f"{N}x{W}", operands, [], (dgate_up.data[-1, -1024:], dup))


def rmsnorm(t: Large) -> None:
    N, C = 300001, 8192
    x, out, weight = bf16((N, C), (N, C), (C,))
    x.data[-1], weight.data[:] = t.bits(C), t.bits(C)
    X = numbers(x.data[-1])
    expected = X / np.sqrt((X * X).mean() + 1e-5) * numbers(weight.data)
    operands = [out, Sparse((N,), F), x, weight]
    t.call("rmsnorm_forward", f"{N}x{C}", operands, [1e-5], (out.data[-1], expected))


def cross_entropy(t: Large) -> None:
    for V, N in ((128256, 20001), (89999, 25001)):
        logits, dlogits = bf16((N, V), (N, V))
        losses, targets = Sparse((N,), F), Sparse((N,), np.int32)
        # The block that computes the last row: of a grid with a block per row, or of a smaller one in turns.
        t.device.machine.some = lambda n, N=N: [(N - 1) % n]
        logits.data[-1], targets.data[-1] = t.bits(V, scale=4), 77
        X = numbers(logits.data[-1])
        lse = X.max() + np.log(np.exp(X - X.max()).sum())
        gradient = np.exp(X - lse)
        gradient[77] -= 1
        results = (dlogits.data[-1], gradient), (losses.data[-1:], np.array([lse - X[77]]))
        operands = [losses, dlogits, None, None, logits, targets, None]
        t.call("cross_entropy", f"{N}x{V}, gradient and loss", operands, [1.0, -100], *results)
    t.last_blocks(16)


def adamw(t: Large) -> None:
    P, last = (1 << 31) + 5000003, 600
    weight, m, v, gradient = bf16((P,), (P,), (P,), (P,))
    for tensor, scale in ((weight, 0.1), (m, 0.01), (v, 1e-4), (gradient, 0.01)):
        tensor.data[-last:] = bf16_bits(np.abs(t.random.standard_normal(last)) * scale + scale)
    expected = 0.9 * numbers(m.data[-last:]) + 0.1 * numbers(gradient.data[-last:])
    squares, lr, step = Sparse((1,), np.float64), Sparse((1,), F), Sparse((1,), np.int32)
    squares.data[0], lr.data[0], step.data[0] = 1, 1e-3, 3
    operands = [weight, None, m, v, gradient, squares, lr, step, None]
    t.call("adamw", f"P={P} m", operands, [0.9, 0.95, 1e-8, 0.1, 0.0, 1, 0], (m.data[-last:], expected))


def quantize(t: Large) -> None:
    N, C = 300032, 8192
    (x,), out, turned, scale = bf16((N, C)), Sparse((N, C), CODES), Sparse((C, N), CODES), Sparse((1,), F)
    x.data[-16:], scale.data[0] = t.bits(16, C), 60.0
    expected = decode(encode(numbers(x.data[-16:, -128:]) * 60, CODES), CODES)
    results = (out.data[-16:, -128:], expected), (turned.data[-128:, -16:], expected.T)
    t.call("quantize", f"{N}x{C}, and transposed", [out, turned, None, None, x, scale], [], *results)


def heads(t: Large) -> None:
    N, V, C = 300001, 300007, 8192
    (weight, out), tokens = bf16((V, C), (N, C)), Sparse((N,), np.int32)
    weight.data[-1], tokens.data[-2:] = t.bits(C), V - 1
    row = numbers(weight.data[-1])
    operands = [out, tokens, weight, None, None]
    t.call("embedding_forward", f"{N}x{C} of {V}", operands, [], (out.data[-1], row))
    B, T, NH, NKV, HD = 9001, 64, 32, 8, 128
    x, out = bf16((B, T, NKV, HD), (B, T, NH, HD))
    x.data[-1, -1] = t.bits(NKV, HD)
    last = numbers(x.data[-1, -1, [-1, -1]])
    t.call("repeat_kv_forward", f"B={B}", [out, x], [], (out.data[-1, -1, -2:], last))
    (x, out), cis = bf16((B, T, NH, HD), (B, T, NH, HD)), Sparse((T, HD // 2, 2), F)
    cis.data[..., 0] = 1  # no rotation
    x.data[-1, -1] = t.bits(NH, HD)
    t.call("rope_forward", f"B={B}", [out, x, cis], [0], (out.data[-1, -1], numbers(x.data[-1, -1])))


def matmul(t: Large) -> None:
    N, C, K = 20000, 64, 128256
    x, w, out = bf16((N, C), (K, C), (N, K))
    x.data[:], w.data[:] = t.bits(N, C), t.bits(K, C)
    expected = numbers(x.data[-32:]) @ numbers(w.data[-128:]).T
    t.call("matmul_forward", f"{N}x{C} {K}", [out, x, w, None, None], [], (out.data[-32:, -128:], expected))
    N, C, K = 300000, 8192, 64
    w, dout, dx = bf16((K, C), (N, K), (N, C))
    w.data[:], dout.data[-256:] = t.bits(K, C), t.bits(256, K)
    expected = numbers(dout.data[-32:]) @ numbers(w.data[:, -128:])
    t.call("matmul_backward_input", f"{N}x{C} {K}", [dx, dout, w], [], (dx.data[-32:, -128:], expected))
    N, C, K = 64, 16384, 140000
    x, dout, dw = bf16((N, C), (N, K), (K, C))
    x.data[:], dout.data[:] = t.bits(N, C), t.bits(N, K)
    expected = numbers(dout.data[:, -32:]).T @ numbers(x.data[:, -128:])
    t.call("matmul_backward_weight", f"{K}x{C}", [dw, dout, x], [0], (dw.data[-32:, -128:], expected))


def attention(t: Large) -> None:
    B, T, NH, NKV, HD = 9001, 64, 32, 8, 128
    scale = HD**-0.5
    q, out, dout, dq = bf16(*[(B, T, NH, HD)] * 4)
    k, v, dk, dv = bf16(*[(B, T, NKV, HD)] * 4)
    lse = Sparse((B, NH, T), F)
    t.last_blocks(160)
    for window in (64, 40):  # all keys; the kernels with masks
        for tensor in (q, k, v, dout):
            tensor.data[-1] = t.bits(*tensor.shape[1:])
        Q, K, V, DO = (numbers(tensor.data[-1, :, -1]) for tensor in (q, k, v, dout))
        ones = np.ones((T, T), bool)
        s = np.where(np.tril(ones) & ~np.tril(ones, -window), Q @ K.T * scale, -np.inf)
        p = np.exp(s - s.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        name, scalars = f"B={B} T={T} NH={NH} window={window}", [scale, 1, window]
        forward = [out, lse, q, k, v, None, None]
        t.call("attention_forward", name, forward, scalars, (out.data[-1, :, -1], p @ V))
        ds = p * (DO @ V.T - (DO * numbers(out.data[-1, :, -1])).sum(1, keepdims=True))
        backward = [dq, dk, dv, dout, *forward]
        t.call("attention_backward", f"{name} dq", backward, scalars, (dq.data[-1, :, -1], ds @ K * scale))
    t.last_blocks(16)


def main() -> int:
    t = Large(device_of_arguments(__doc__))
    for check in (swiglu, rmsnorm, cross_entropy, adamw, quantize, heads, matmul, attention):
        check(t)
    print(f"{t.failed} failed")
    return t.failed > 0


if __name__ == "__main__":
    sys.exit(main())
