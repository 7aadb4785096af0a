"""Cases of the loss, the optimizer, the hash, conversion and the embedding."""

import numpy as np
from device import from_bf16
from harness import Harness
from output import Output, dtype_name, label

from llamac.hashing import hash_halves
from llamac.tolerance import ulp

F = np.float32


def cross_entropy(h: Harness) -> None:
    for N, V, dt, threads, with_d, with_grad, with_mean in (
        (5, 1000, "bf16", 0, 1, 1, 1),
        (3, 1003, "bf16", 0, 0, 1, 1),
        (4, 32001, "bf16", 0, 1, 1, 0),
        (3, 89999, "bf16", 0, 0, 1, 1),
        (3, 128256, "bf16", 0, 0, 1, 0),
        (3, 517, F, 0, 1, 1, 1),
        (5, 1000, "bf16", 128, 0, 1, 1),
        (3, 1003, "bf16", 64, 1, 0, 1),
        (3, 40961, F, 0, 0, 1, 1),
        (2, 17, "bf16", 0, 0, 1, 1),
        (3, 40000, "bf16", 0, 0, 1, 1),
        (3, 20001, F, 0, 1, 1, 0),
    ):
        logits = h.tensor((N, V), dt, h.normal(N, V, scale=4))
        targets = h.random.integers(0, V, N).astype(np.int32)
        targets[1] = -100
        t = h.tensor((N,), np.int32, targets)
        dl = h.tensor((N,), F, h.normal(N)) if with_d else None
        L = logits.get()
        top = L.max(1, keepdims=True)
        lse = (top + np.log(np.exp(L - top).sum(1, keepdims=True)))[:, 0]
        counts = targets != -100
        loss = np.where(counts, lse - L[np.arange(N), np.maximum(targets, 0)], 0)
        G = np.exp(L - lse[:, None])
        G[np.arange(N), np.maximum(targets, 0)] -= 1
        G *= (0.37 * (dl.get() if dl is not None else np.ones(N)) * counts)[:, None]
        lo, dlog = h.tensor((N,), F), h.tensor((N, V), dt) if with_grad else None
        mean, num_valid = (h.tensor((), F), h.tensor((), F)) if with_mean else (None, None)
        outs = [Output(lo, loss, 32, 64, 2.0**-21, name="losses")]
        if with_grad:
            outs.append(Output(dlog, G, 2, 2, 2.0**-16 if dt == "bf16" else 2.0**-20, name="dlogits"))
            if dt != "bf16":
                outs[-1].largest = 32
        if with_mean:
            outs += [
                Output(mean, loss.sum() / counts.sum(), 16, 16, name="mean"),
                Output(num_valid, counts.sum(), exact=True, name="num_valid"),
            ]
        h.case(
            "cross_entropy",
            label(f"N={N} V={V} {dtype_name(dt)}", dlosses=with_d, dlogits=with_grad, mean=with_mean),
            [lo, dlog, mean, num_valid, logits, t, dl],
            [0.37, -100],
            outs,
            threads,
        )


def mean_loss(h: Harness) -> None:
    for N, ignored in ((1, 0), (3, 2), (1000, 17), (5003, 5000), (16384, 1)):
        losses, targets = (
            h.tensor((N,), F, np.abs(h.normal(N))),
            h.tensor((N,), np.int32, h.random.integers(0, 9, N)),
        )
        targets.data[:ignored] = -100
        mean, num_valid = h.tensor((), F), h.tensor((), F)
        outputs = [
            Output(mean, losses.get()[ignored:].mean(), 16, 16, name="mean"),
            Output(num_valid, N - ignored, exact=True, name="num_valid"),
        ]
        h.case("mean_loss", f"N={N} ignored={ignored}", [mean, num_valid, losses, targets], [-100], outputs)


def philox_words(seed: int, step: int, stream: int, count: int) -> np.ndarray:
    """Random bits of elements 0 to count-1: Philox 4x32-10 keyed by the seed."""
    M = np.uint64(0xFFFFFFFF)
    block = np.arange((count + 3) // 4, dtype=np.uint64)
    c = [block & M, block >> np.uint64(32), np.full_like(block, stream), np.full_like(block, step)]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
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


def judge_rounding(rounded) -> tuple[float, str]:
    """Nearly all values are rounded to the expected neighbour (they may be 1e-6 off), without bias."""
    texts, worst = [], 0.0
    for tensor, expected, exact, name in rounded:
        found = tensor.get()
        others = np.count_nonzero(found != expected)
        sigma = np.sqrt(1 / 6 / found.size)
        bias = ((found - exact) / ulp(exact, "bf16")).mean() / sigma
        texts.append(f"{name}: {others} of {found.size} another neighbour, bias {bias:.1f} sigma")
        worst = max(worst, others / (0.002 * found.size + 3), abs(bias) / 5)
    return worst, "; ".join(texts) or "no stochastic outputs"


def adamw(h: Harness) -> None:
    for P, dt, g, m_dt, with_master, clip, threads, shift in (
        (3000, "bf16", "bf16", "bf16", 0, 1.0, 0, 0),
        (2051, "bf16", F, "bf16", 0, 0.0, 0, 0),
        (2048, "bf16", "bf16", "bf16", 1, 1.0, 0, 0),
        (1029, "bf16", F, F, 0, 1.0, 0, 0),
        (1501, F, F, F, 0, 1.0, 256, 0),
        (2500, "bf16", F, F, 1, 1.0, 256, 0),
        (1030, "bf16", "bf16", "bf16", 0, 1.0, 0, 2),
        (2049, F, F, "bf16", 0, 1.0, 0, 0),
        *(
            (1100, t, g, m, master, 1.0, 0, shift)
            for t, g, m in (
                (F, F, F),
                (F, F, "bf16"),
                ("bf16", F, F),
                ("bf16", F, "bf16"),
                ("bf16", "bf16", F),
                ("bf16", "bf16", "bf16"),
            )
            for master in (0, 1)
            for shift in (0, 4)
        ),
    ):
        w0, g0 = h.normal(P, scale=0.02), h.normal(P, scale=0.01)
        weight, grad = h.tensor((P,), dt, w0, shift), h.tensor((P,), g, g0, shift)
        master = h.tensor((P,), F, w0) if with_master else None
        m, v = (
            h.tensor((P,), m_dt, h.normal(P, scale=0.003), shift),
            h.tensor((P,), m_dt, np.abs(h.normal(P, scale=1e-5)) + 1e-7, shift),
        )
        squares, lr = h.tensor((1,), np.float64, [2.5**2]), h.tensor((1,), F, [3e-3])
        step = h.tensor((1,), np.int32, [17])
        b1, b2, eps, wd, seed, stream = 0.9, 0.95, 1e-8, 0.1, 1234567890123, 8
        offset = 4 * P if shift else 0
        factor = min(1.0, clip / (2.5 + 1e-6)) if clip > 0 else 1.0
        G, W = grad.get() * factor, (weight if master is None else master).get()
        Mn, Vn = b1 * m.get() + (1 - b1) * G, b2 * v.get() + (1 - b2) * G * G
        LR = float(np.float32(3e-3))
        Wn = W - LR * (Mn / (1 - b1**17) / (np.sqrt(Vn / (1 - b2**17)) + eps) + wd * W)
        words = philox_words(seed, 17, stream, offset + P)[offset:]

        outs = []
        parts = [
            (weight, Wn, words >> 16, not with_master and dt == "bf16", "weight"),
            (m, Mn, (words & 0xFF00) | 0x80, m_dt == "bf16", "m"),
            (v, Vn, (words << 8 & 0xFF00) | 0x80, m_dt == "bf16", "v"),
        ]
        rounded = []
        for t, truth, random, is_stochastic, name in parts:
            if is_stochastic:
                outs.append(Output(t, truth, 1.001, 1.01, 2.0**-20, name=name))
                rounded.append((t, stochastic(truth, random), truth, name))
            elif t.dtype == "bf16":
                outs.append(Output(t, truth, 1, 0.6, 2.0**-20, name=name))
            else:
                outs.append(Output(t, truth, 8, 16, 2.0**-22, name=name))
        if master is not None:
            outs.append(Output(master, Wn, 8, 16, 2.0**-22, name="master"))

        h.case(
            "adamw",
            label(
                f"P={P} T={dtype_name(dt)} G={dtype_name(g)} M={dtype_name(m_dt)} clip={clip}",
                master=with_master,
                shifted=shift,
            ),
            [weight, master, m, v, grad, squares, lr, step, None],
            [b1, b2, eps, wd, clip, seed, stream, offset],
            outs,
            threads,
            check=lambda rounded=rounded: judge_rounding(rounded),
        )


def global_norm(h: Harness) -> None:
    for P, dt, accumulate, shift, threads in (
        (100003, "bf16", 0, 0, 0),
        (70001, F, 1, 0, 0),
        (5, "bf16", 0, 0, 0),
        (9001, "bf16", 1, 2, 0),
        (200000, "bf16", 0, 0, 1024),
        (9001, F, 0, 4, 0),
    ):
        x = h.tensor((P,), dt, h.normal(P), shift)
        old = h.tensor((1,), np.float64, [9.0])
        want = (x.get() ** 2).sum() + (9 if accumulate else 0)
        units = 8 * 2.0**29  # 8 of f32, in which partial sums are stored
        h.case(
            "global_norm",
            label(f"P={P} {dtype_name(dt)}", accumulate=accumulate, shifted=shift),
            [old, x],
            [accumulate],
            [Output(old, want, units, units, name="squares")],
            threads,
        )


def hash_bits(h: Harness) -> None:
    for P, shift, threads in ((100003, 0, 0), (70001, 0, 1024), (5, 0, 0), (9001, 2, 0), (9002, 4, 256)):
        x, total = h.tensor((P,), "bf16", h.normal(P), shift), h.tensor((2,), np.float64)
        h.case(
            "hash",
            f"P={P}{' shifted' if shift else ''}",
            [total, x],
            [],
            [Output(total, hash_halves(x.data), exact=True, name="sum")],
            threads,
        )


def convert(h: Harness) -> None:
    for P, dt, g, accumulate, shift, threads in (
        (100003, "bf16", F, 0, 0, 0),
        (70001, F, "bf16", 1, 0, 128),
        (5, "bf16", "bf16", 1, 0, 0),
        (9008, F, F, 1, 0, 0),
        (9008, "bf16", F, 1, 0, 0),
        (9008, F, "bf16", 0, 0, 0),
        (9008, "bf16", "bf16", 0, 0, 0),
        (9001, F, F, 0, 4, 0),
    ):
        out, x = h.tensor((P,), dt, h.normal(P), shift), h.tensor((P,), g, h.normal(P), shift)
        want = x.get() + (out.get() if accumulate else 0)
        narrow = dt == "bf16"
        h.case(
            "convert",
            label(f"P={P} T={dtype_name(dt)} G={dtype_name(g)}", accumulate=accumulate, shifted=shift),
            [out, x],
            [accumulate],
            [Output(out, want, 1, 0.6, 2.0**-20 if narrow else 2.0**-22, name="out")],
            threads,
        )


def embedding(h: Harness) -> None:
    for N, V, C, dt, g, accumulate in (
        (9, 50, 264, "bf16", "bf16", 0),
        (30, 1100, 123, "bf16", F, 1),
        (17, 5000, 64, "bf16", F, 0),
        (200, 7, 40, "bf16", "bf16", 1),
        (5, 33, 260, F, F, 0),
        (9, 40, 61, F, F, 1),
        (9, 40, 61, "bf16", "bf16", 0),
    ):
        w, tok = h.tensor((V, C), dt, h.normal(V, C)), h.tensor((N,), np.int32, h.random.integers(0, V, N))
        tok.data[: N // 2] = tok.data[0]
        out = h.tensor((N, C), dt)
        h.case(
            "embedding_forward",
            f"N={N} V={V} C={C} {dtype_name(dt)}",
            [out, tok, w],
            [],
            [Output(out, w.get()[tok.data], exact=True, name="out")],
        )
        dout, dw = h.tensor((N, C), dt, h.normal(N, C)), h.tensor((V, C), g, h.normal(V, C))
        want = dw.get() if accumulate else np.zeros((V, C))
        np.add.at(want, tok.data, dout.get())
        h.case(
            "embedding_backward",
            f"N={N} V={V} C={C} T={dtype_name(dt)} G={dtype_name(g)}{' accumulate' if accumulate else ''}",
            [dw, dout, tok],
            [accumulate],
            [Output(dw, want, 2 if g == "bf16" else 8, 2 if g == "bf16" else 16, 2.0**-20, name="dweight")],
        )
