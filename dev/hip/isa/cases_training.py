"""Cases of the loss, the norm, the hash, conversion and the embedding."""

import numpy as np
from harness import Harness
from output import Output, dtype_name, label

from llamac.base.hashing import hash_halves

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
        (3, 50000, F, 0, 0, 1, 1),
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
