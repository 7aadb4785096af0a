"""Cases of the matrix-core kernels: matmul, attention."""

import numpy as np
from device import bf16_bits, from_bf16
from harness import Harness
from output import Output, dtype_name, label

F = np.float32


def matmul(h: Harness) -> None:
    for N, C, K, residual in (
        (100, 72, 136, 1),
        (257, 40, 24, 0),
        (300, 200, 264, 1),
        (8, 8, 8, 0),
        (2100, 40, 264, 0),
    ):
        x, w = h.tensor((N, C), "bf16", h.normal(N, C)), h.tensor((K, C), "bf16", h.normal(K, C))
        r, out = h.tensor((N, K), "bf16", h.normal(N, K)) if residual else None, h.tensor((N, K), "bf16")
        text = f"N={N} C={C} K={K}"
        h.case(
            "matmul_forward",
            label(text, residual=residual),
            [out, x, w, r],
            [],
            [Output(out, x.get() @ w.get().T + (r.get() if residual else 0), 2, 2, 2.0**-19, name="out")],
        )
        dout, dx = h.tensor((N, K), "bf16", h.normal(N, K)), h.tensor((N, C), "bf16")
        h.case(
            "matmul_backward_input",
            text,
            [dx, dout, w],
            [],
            [Output(dx, dout.get() @ w.get(), 2, 2, 2.0**-19, name="dx")],
        )
        for g, accumulate in (("bf16", 0), (F, 1)):
            dw = h.tensor((K, C), g, h.normal(K, C))
            want = dout.get().T @ x.get() + (dw.get() if accumulate else 0)
            h.case(
                "matmul_backward_weight",
                text + f" G={dtype_name(g)}{' accumulate' if accumulate else ''}",
                [dw, dout, x],
                [accumulate],
                [
                    Output(
                        dw, want, 2 if g == "bf16" else 64, 2 if g == "bf16" else 64, 2.0**-19, name="dweight"
                    )
                ],
            )


def rounded(x: np.ndarray) -> np.ndarray:
    return from_bf16(bf16_bits(x)).astype(np.float64)


def attention_forward_truth(q, k, v, scale, round_p=False) -> tuple[np.ndarray, np.ndarray]:
    """out and lse in float64. round_p: exp(s - max) passes through bf16, as in every bf16 attention."""
    group, tokens = q.shape[2] // k.shape[2], q.shape[1]
    K, V = np.repeat(k, group, 2), np.repeat(v, group, 2)
    s = np.einsum("bthd,bshd->bhts", q, K) * scale
    s = np.where(np.tril(np.ones((tokens, tokens), bool)), s, -np.inf)
    top = s.max(-1, keepdims=True)
    e = np.exp(s - top)
    total = e.sum(-1)
    out = np.einsum("bhts,bshd->bthd", rounded(e) if round_p else e, V) / total.transpose(0, 2, 1)[..., None]
    return out, top[..., 0] + np.log(total)


def attention_backward_truth(q, k, v, dout, scale, out, lse, round_p=False) -> tuple[np.ndarray, ...]:
    """dq, dk and dv in float64. round_p: p and ds pass through bf16, as in every bf16 attention."""
    B, tokens, _, HD = q.shape
    NKV = k.shape[2]
    group = q.shape[2] // NKV
    K, V = np.repeat(k, group, 2), np.repeat(v, group, 2)
    s = np.einsum("bthd,bshd->bhts", q, K) * scale
    p = np.where(np.tril(np.ones((tokens, tokens), bool)), np.exp(s - lse[..., None]), 0)
    delta = (dout * out).sum(-1).transpose(0, 2, 1)[..., None]
    ds = p * (np.einsum("bthd,bshd->bhts", dout, V) - delta)
    if round_p:
        p, ds = rounded(p), rounded(ds)

    def sum_of_groups(x):
        return x.reshape(B, tokens, NKV, group, HD).sum(3)

    dq = scale * np.einsum("bhts,bshd->bthd", ds, K)
    dk = sum_of_groups(scale * np.einsum("bhts,bthd->bshd", ds, q))
    dv = sum_of_groups(np.einsum("bhts,bthd->bshd", p, dout))
    return dq, dk, dv


def attention(h: Harness) -> None:
    of_64 = (1, 37, 2, 1), (1, 130, 2, 2), (2, 70, 4, 2), (1, 257, 1, 1), (2, 33, 8, 4)
    of_128 = (1, 37, 2, 1), (1, 150, 3, 1)
    for B, Tn, NH, NKV, HD in (*((*s, 64) for s in of_64), *((*s, 128) for s in of_128)):
        scale = HD**-0.5
        q, k, v = (h.tensor((B, Tn, n, HD), "bf16", h.normal(B, Tn, n, HD)) for n in (NH, NKV, NKV))
        operands = q.get(), k.get(), v.get()
        out, lse = h.tensor((B, Tn, NH, HD), "bf16"), h.tensor((B, NH, Tn), F)
        true_out, true_lse = attention_forward_truth(*operands, scale)
        baseline, _ = attention_forward_truth(*operands, scale, round_p=True)
        text = f"B={B} T={Tn} NH={NH} NKV={NKV} HD={HD}"
        outputs = [
            Output(out, true_out, name="out", baseline=rounded(baseline)),
            Output(lse, true_lse, 32, 64, 2.0**-20, name="lse"),
        ]
        h.case("attention_forward", text, [out, lse, q, k, v, None], [scale], outputs)
        dout = h.tensor((B, Tn, NH, HD), "bf16", h.normal(B, Tn, NH, HD))
        saved_out, saved_lse = h.tensor((B, Tn, NH, HD), "bf16", true_out), h.tensor((B, NH, Tn), F, true_lse)
        saved = dout.get(), scale, saved_out.get(), saved_lse.get()
        truth = attention_backward_truth(*operands, *saved)
        baselines = attention_backward_truth(*operands, *saved, round_p=True)
        grads = [h.tensor((B, Tn, n, HD), "bf16") for n in (NH, NKV, NKV)]
        h.case(
            "attention_backward",
            text,
            [*grads, dout, saved_out, saved_lse, q, k, v, None],
            [scale],
            [
                Output(grad, true, name=name, baseline=rounded(baseline))
                for grad, true, name, baseline in zip(grads, truth, ("dq", "dk", "dv"), baselines)
            ],
        )
