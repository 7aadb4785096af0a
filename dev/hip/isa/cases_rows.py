"""Cases of the operations on rows and heads: rmsnorm, swiglu, rope, precompute_cis, repeat_kv, argmax."""

import numpy as np
from device import bf16_bits, from_bf16
from harness import Harness
from output import Output, dtype_name, label

F = np.float32


def rmsnorm(h: Harness) -> None:
    for N, C, dt, threads in (
        *((n, c, "bf16", 0) for n, c in ((5, 1000), (3, 123), (2, 4096), (2, 16384), (3, 8), (1, 7001))),
        *((n, c, F, 0) for n, c in ((3, 260), (2, 4096), (2, 8192), (3, 261))),
        (3, 2048, "bf16", 512),
        (3, 5121, F, 128),
    ):
        x, w = h.tensor((N, C), dt, h.normal(N, C)), h.tensor((C,), dt, h.normal(C))
        out, rstd = h.tensor((N, C), dt), h.tensor((N,), F)
        X = x.get()
        r = 1 / np.sqrt((X * X).mean(1) + 1e-5)
        text = f"N={N} C={C} {dtype_name(dt)}"
        each = 2 if dt == "bf16" else 8
        h.case(
            "rmsnorm_forward",
            text,
            [out, rstd, x, w],
            [1e-5],
            [
                Output(out, X * r[:, None] * w.get(), each, each, name="out"),
                Output(rstd, r, 8, 8, name="rstd"),
            ],
            threads,
        )
        residual, total = h.tensor((N, C), dt, h.normal(N, C)), h.tensor((N, C), dt)
        S = X + residual.get()
        S = from_bf16(bf16_bits(S)).astype(np.float64) if dt == "bf16" else S.astype(F).astype(np.float64)
        rs = 1 / np.sqrt((S * S).mean(1) + 1e-5)
        h.case(
            "residual_rmsnorm_forward",
            text,
            [total, out, rstd, x, residual, w],
            [1e-5],
            [
                Output(total, S, exact=True, name="sum"),
                Output(out, S * rs[:, None] * w.get(), each, each, name="out"),
                Output(rstd, rs, 8, 8, name="rstd"),
            ],
            threads,
        )
    for N, C, dt, g, with_out, with_past, accumulate in (
        (7, 1000, "bf16", "bf16", 1, 1, 0),
        (5, 123, "bf16", F, 1, 1, 1),
        (9, 4096, "bf16", F, 0, 1, 0),
        (3, 8192, "bf16", "bf16", 0, 0, 1),
        (70, 64, "bf16", F, 1, 0, 0),
        (11, 264, F, F, 1, 1, 1),
        (5, 5003, "bf16", F, 0, 1, 0),
        (5, 123, F, F, 1, 0, 0),
    ):
        x, w, dout = (
            h.tensor((N, C), dt, h.normal(N, C)),
            h.tensor((C,), dt, h.normal(C)),
            h.tensor((N, C), dt, h.normal(N, C)),
        )
        X, W, DO = x.get(), w.get(), dout.get()
        rstd = h.tensor((N,), F, 1 / np.sqrt((X * X).mean(1) + 1e-5))
        R = rstd.get()[:, None]
        past = h.tensor((N, C), dt, h.normal(N, C)) if with_past else None
        out = h.tensor((N, C), dt) if with_out else None
        old = h.normal(C)
        dw = h.tensor((C,), g, old)
        OLD = dw.get() if accumulate else 0
        gw, xh = DO * W, X * R
        DX = R * (gw - xh * (gw * xh).mean(1, keepdims=True)) + (past.get() if past is not None else 0)
        DW = (DO * xh).sum(0) + OLD
        dx = h.tensor((N, C), dt)
        each = 2 if dt == "bf16" else 16
        outs = [
            Output(dx, DX, each, each, 2.0**-18, name="dx"),
            Output(dw, DW, 2 if g == "bf16" else 16, 2 if g == "bf16" else 32, 2.0**-19, name="dweight"),
        ]
        if out is not None:
            outs.append(Output(out, xh * W, each, each, name="out"))
        h.case(
            "rmsnorm_backward",
            label(
                f"N={N} C={C} T={dtype_name(dt)} G={dtype_name(g)}",
                out=with_out,
                dresidual=with_past,
                accumulate=accumulate,
            ),
            [dx, dw, out, dout, x, w, rstd, past],
            [accumulate],
            outs,
        )


def swiglu(h: Harness) -> None:
    for N, Fw, dt, shift in (
        (5, 1000, "bf16", 0),
        (3, 123, "bf16", 0),
        (7, 72, "bf16", 0),
        (2, 14336, "bf16", 0),
        (3, 516, F, 0),
        (3, 64, "bf16", 2),
        (1, 5001, F, 0),
    ):
        gu = h.tensor((N, 2 * Fw), dt, h.normal(N, 2 * Fw, scale=3), shift)
        gu.data[0, :4] = (
            bf16_bits(np.array([-100.0, 100.0, -88.0, 0.0]))
            if dt == "bf16"
            else np.array([-100.0, 100.0, -88.0, 0.0], F)
        )
        g, u = gu.get()[:, :Fw], gu.get()[:, Fw:]
        s = 1 / (1 + np.exp(-g))
        out, dout, dgu = (
            h.tensor((N, Fw), dt, None, shift),
            h.tensor((N, Fw), dt, h.normal(N, Fw), shift),
            h.tensor((N, 2 * Fw), dt, None, shift),
        )
        do = dout.get()
        each, slack = (2, 2.0**-40) if dt == "bf16" else (16, 2.0**-22)
        text = f"N={N} F={Fw} {dtype_name(dt)}{' shifted' if shift else ''}"
        h.case(
            "swiglu_forward",
            text,
            [out, gu],
            [],
            [Output(out, g * s * u, each, each, slack, name="out")],
        )
        DG = np.concatenate([do * u * s * (1 + g * (1 - s)), do * g * s], 1)
        for with_out in (1, 0):
            outs = [Output(dgu, DG, each, each, 2.0**-16 if dt == "bf16" else slack, name="dgate_up")]
            if with_out:
                outs.append(Output(out, g * s * u, each, each, slack, name="out"))
            h.case(
                "swiglu_backward",
                label(text, out=with_out),
                [dgu, out if with_out else None, dout, gu],
                [],
                outs,
            )


def frequencies_of(HD, theta=500000.0) -> np.ndarray:
    return theta ** (-np.arange(HD // 2) / (HD // 2))


def cis_table(Tn, HD, frequency=None, factor=1.0) -> np.ndarray:
    a = np.arange(Tn)[:, None] * (frequencies_of(HD) if frequency is None else frequency)
    return factor * np.stack([np.cos(a), np.sin(a)], -1)


def rope(h: Harness) -> None:
    for B, Tn, NH, HD, dt in (
        (2, 5, 3, 64, "bf16"),
        (1, 7, 6, 128, "bf16"),
        (2, 3, 5, 16, "bf16"),
        (1, 3, 2, 512, "bf16"),
        (2, 3, 5, 36, "bf16"),
        (1, 4, 3, 80, "bf16"),
        (2, 3, 5, 32, F),
        (1, 3, 4, 6, F),
    ):
        C = h.tensor((Tn, HD // 2, 2), F, cis_table(Tn, HD))
        c = C.get()[None, :, None]
        x = h.tensor((B, Tn, NH, HD), dt, h.normal(B, Tn, NH, HD))
        for direction, op in ((1, "rope_forward"), (-1, "rope_backward")):
            for inter in (0, 1):
                X = x.get()
                a, b = (X[..., 0::2], X[..., 1::2]) if inter else (X[..., : HD // 2], X[..., HD // 2 :])
                cs, sn = c[..., 0], direction * c[..., 1]
                p, q = a * cs - b * sn, b * cs + a * sn
                Y = np.stack([p, q], -1).reshape(X.shape) if inter else np.concatenate([p, q], -1)
                out = h.tensor((B, Tn, NH, HD), dt)
                h.case(
                    op,
                    f"B={B} T={Tn} NH={NH} HD={HD} {dtype_name(dt)}{' interleaved' if inter else ''}",
                    [out, x, C],
                    [inter],
                    [Output(out, Y, 2, 2, 2.0**-22, name="out")],
                )
    rope_of_fused_rows(h)


def rope_of_fused_rows(h: Harness) -> None:
    """Strided input: the query heads of a fused QKV row."""
    B, Tn, NH, HD, width = 2, 5, 3, 64, 3 * 64 + 2 * 64
    x = h.tensor((B, Tn, width), "bf16", h.normal(B, Tn, width))
    C = h.tensor((Tn, HD // 2, 2), F, cis_table(Tn, HD))
    X = x.get()[:, :, : NH * HD].reshape(B, Tn, NH, HD)
    x.shape = (B, Tn, NH, HD)
    out = h.tensor((B, Tn, NH, HD), "bf16")
    c = C.get()[None, :, None]
    a, b = X[..., : HD // 2], X[..., HD // 2 :]
    Y = np.concatenate([a * c[..., 0] - b * c[..., 1], b * c[..., 0] + a * c[..., 1]], -1)
    h.case(
        "rope_forward",
        "B=2 T=5 NH=3 HD=64 of fused rows",
        [out, x, C],
        [0],
        [Output(out, Y, 2, 2, 2.0**-22, name="out")],
        strides={1: (Tn * width, width, HD, 1)},
    )


def precompute_cis(h: Harness) -> None:
    for Tn, HD, slowed, factor in (
        (9, 64, 1.0, 1.0),
        (300, 128, 8.0, 1.25),
        (5, 6, 1.0, 1.0),
        (33, 80, 32.0, 1.0),
        (3000, 64, 8.0, 1.0),
    ):
        frequency = h.tensor((HD // 2,), np.float64, frequencies_of(HD) / slowed)
        cis = h.tensor((Tn, HD // 2, 2), F)
        h.case(
            "precompute_cis",
            f"T={Tn} HD={HD} slowed={slowed} attention_factor={factor}",
            [cis, frequency],
            [factor],
            [Output(cis, cis_table(Tn, HD, frequency.get(), factor), 2, 4, 2.0**-23, name="cis")],
        )


def repeat_kv(h: Harness) -> None:
    for B, Tn, NH, NKV, HD, dt in (
        (2, 5, 6, 2, 64, "bf16"),
        (1, 7, 8, 8, 128, "bf16"),
        (2, 3, 9, 3, 20, "bf16"),
        (1, 3, 32, 4, 7, "bf16"),
        (2, 3, 6, 1, 36, F),
        (1, 5, 6, 2, 7, F),
    ):
        x, out = h.tensor((B, Tn, NKV, HD), dt, h.normal(B, Tn, NKV, HD)), h.tensor((B, Tn, NH, HD), dt)
        text = f"B={B} T={Tn} NH={NH} NKV={NKV} HD={HD} {dtype_name(dt)}"
        h.case(
            "repeat_kv_forward",
            text,
            [out, x],
            [],
            [Output(out, np.repeat(x.get(), NH // NKV, 2), exact=True, name="out")],
        )
        dout, dx = h.tensor((B, Tn, NH, HD), dt, h.normal(B, Tn, NH, HD)), h.tensor((B, Tn, NKV, HD), dt)
        h.case(
            "repeat_kv_backward",
            text,
            [dx, dout],
            [],
            [Output(dx, dout.get().reshape(B, Tn, NKV, NH // NKV, HD).sum(3), 2, 2, 2.0**-21, name="dx")],
        )


def argmax(h: Harness) -> None:
    """Rows with equal largest elements and NaN. Behind the first row are larger elements than in it."""
    for N, V, dt, threads in (
        (3, 1000, "bf16", 0),
        (3, 1003, "bf16", 0),
        (2, 40000, "bf16", 0),
        (2, 40001, "bf16", 256),
        (1, 1, "bf16", 0),
        (3, 516, F, 0),
        (3, 517, F, 512),
        (2, 20000, F, 256),
    ):
        values = h.normal(N, V)
        values[0, [V // 2, V - 1]] = 50.0
        values[1:2, 0] = 70.0
        values[2:, : V // 3] = np.nan
        x, out = h.tensor((N, V), dt, values), h.tensor((N,), np.int32)
        if N > 2:
            x.data[2, :] = np.where(
                np.arange(V) < V // 3, x.data[2], x.data[2, V - 1]
            )  # all others are equal
        found = np.nan_to_num(x.get(), nan=-np.inf).argmax(1)
        text = f"N={N} V={V} {dtype_name(dt)}"
        h.case("argmax", text, [out, x], [], [Output(out, found, exact=True, name="out")], threads)
