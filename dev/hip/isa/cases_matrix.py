"""Cases of products and attention: matmul, scaled_matmul, attention, attention_next."""

import numpy as np
from cases_rows import cis_table
from device import Tensor, bf16_bits, from_bf16
from fp8 import decode, encode
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


def matmul_of_one_row(h: Harness) -> None:
    for C, K, dt, residual in (
        (72, 136, "bf16", 1),
        (8, 3, "bf16", 0),
        (4104, 37, "bf16", 1),
        (16384, 9, "bf16", 0),
        (1000, 21, F, 1),
        (2060, 5, F, 0),
    ):
        x, w = h.tensor((1, C), dt, h.normal(1, C)), h.tensor((K, C), dt, h.normal(K, C))
        r, out = h.tensor((1, K), dt, h.normal(1, K)) if residual else None, h.tensor((1, K), dt)
        each = 2 if dt == "bf16" else 64
        h.case(
            "matmul_forward",
            label(f"N=1 C={C} K={K} {dtype_name(dt)}", residual=residual),
            [out, x, w, r],
            [],
            [Output(out, x.get() @ w.get().T + (r.get() if r else 0), each, each, 2.0**-19, name="out")],
        )


def scaled_matmul(h: Harness) -> None:
    forms = ("e4m3fnuz", "e4m3fnuz"), ("e5m2fnuz", "e4m3fnuz")  # gfx942 multiplies no others
    for (N, C, K), added in (
        ((100, 80, 144), "residual"),
        ((300, 208, 272), "accumulate"),
        ((257, 48, 32), ""),
        ((8, 16, 16), "residual"),
        ((1, 272, 400), ""),
    ):
        for form_a, form_b in forms:
            for dt in ("bf16", F):
                a = h.tensor((N, C), form_a, encode(h.normal(N, C, scale=30), form_a))
                b = h.tensor((K, C), form_b, encode(h.normal(K, C, scale=30), form_b))
                a_scale, b_scale = h.tensor((1,), F, [0.037]), h.tensor((1,), F, [0.021])
                by_row = [h.tensor((n,), F, np.exp2(h.random.integers(-4, 4, n))) for n in (N, K)]
                residual = h.tensor((N, K), dt, h.normal(N, K)) if added == "residual" else None
                out = h.tensor((N, K), dt, h.normal(N, K))
                product = decode(a.data, form_a) @ decode(b.data, form_b).T
                before = out.get() if added == "accumulate" else 0 if residual is None else residual.get()
                each = 2 if dt == "bf16" else 64
                for operation, scales, factor in (
                    ("scaled_matmul", [a_scale, b_scale], a_scale.get() * b_scale.get()),
                    ("scaled_matmul_rows", by_row, np.outer(*(scale.get() for scale in by_row))),
                ):
                    out = h.tensor((N, K), dt, before if added == "accumulate" else h.normal(N, K))
                    h.case(
                        operation,
                        f"N={N} C={C} K={K} T={dtype_name(dt)} P={form_a} Q={form_b} {added}".rstrip(),
                        [out, a, b, *scales, residual],
                        [added == "accumulate", 0],
                        [Output(out, product * factor + before, each, each, 2.0**-19, name="out")],
                    )


def rounded(x: np.ndarray) -> np.ndarray:
    return from_bf16(bf16_bits(x)).astype(np.float64)


def seen_keys(tokens: int, keys: int, first=None, causal=True, window=0) -> np.ndarray:
    """[B or 1,1,T,S]: whether a query sees a key. first: [B,T], or None."""
    own, s = keys - tokens + np.arange(tokens)[:, None], np.arange(keys)
    seen = (s <= own) | np.array(not causal)
    if window:
        seen &= s > own - window
    return (seen if first is None else seen & (s >= first[..., None]))[..., None, :, :].reshape(
        -1, 1, tokens, keys
    )


def attention_forward_truth(q, k, v, scale, seen, round_p=False) -> tuple[np.ndarray, np.ndarray]:
    """out and lse in float64. round_p: exp(s - max) passes through bf16, as in every bf16 attention."""
    group = q.shape[2] // k.shape[2]
    K, V = np.repeat(k, group, 2), np.repeat(v, group, 2)
    s = np.where(seen, np.einsum("bthd,bshd->bhts", q, K) * scale, -np.inf)
    top = s.max(-1, keepdims=True)
    e = np.exp(s - top)
    total = e.sum(-1)
    out = np.einsum("bhts,bshd->bthd", rounded(e) if round_p else e, V) / total.transpose(0, 2, 1)[..., None]
    return out, top[..., 0] + np.log(total)


def attention_backward_truth(q, k, v, dout, scale, seen, out, lse, round_p=False) -> tuple[np.ndarray, ...]:
    """dq, dk and dv in float64. round_p: p and ds pass through bf16, as in every bf16 attention."""
    B, keys, NKV, HD = k.shape
    group = q.shape[2] // NKV
    K, V = np.repeat(k, group, 2), np.repeat(v, group, 2)
    s = np.einsum("bthd,bshd->bhts", q, K) * scale
    p = np.exp(np.where(seen, s - lse[..., None], -np.inf))
    delta = (dout * out).sum(-1).transpose(0, 2, 1)[..., None]
    ds = p * (np.einsum("bthd,bshd->bhts", dout, V) - delta)
    if round_p:
        p, ds = rounded(p), rounded(ds)

    def sum_of_groups(x):
        return x.reshape(B, keys, NKV, group, HD).sum(3)

    dq = scale * np.einsum("bhts,bshd->bthd", ds, K)
    dk = sum_of_groups(scale * np.einsum("bhts,bthd->bshd", ds, q))
    dv = sum_of_groups(np.einsum("bhts,bthd->bshd", p, dout))
    return dq, dk, dv


def attention(h: Harness) -> None:
    of_64 = (1, 37, 2, 1), (1, 130, 2, 2), (2, 70, 4, 2), (1, 257, 1, 1), (2, 33, 8, 4)
    of_128 = (1, 37, 2, 1), (1, 150, 3, 1)
    for B, T, NH, NKV, HD in (*((*s, 64) for s in of_64), *((*s, 128) for s in of_128)):
        attention_case(h, B, T, T, NH, NKV, HD)
    attention_case(h, 2, 70, 70, 2, 1, 64, fused=True)
    attention_case(h, 2, 70, 70, 4, 2, 128, window=40, fused=True)
    for B, T, S, NH, NKV, HD, documents, causal, window in (
        (2, 150, 150, 2, 1, 64, 3, 1, 0),
        (1, 150, 150, 2, 1, 128, 4, 1, 0),
        (1, 200, 200, 2, 2, 64, 0, 1, 37),
        (1, 140, 140, 1, 1, 128, 0, 1, 64),
        (2, 150, 150, 1, 1, 64, 2, 1, 5),
        (1, 40, 170, 4, 2, 64, 0, 1, 0),
        (2, 1, 100, 2, 1, 128, 0, 1, 0),
        (1, 65, 200, 2, 1, 128, 3, 1, 70),
        (1, 70, 70, 2, 1, 64, 0, 0, 0),
        (1, 140, 67, 2, 2, 64, 0, 0, 0),
        (1, 100, 131, 2, 1, 128, 0, 0, 64),
        (2, 70, 70, 2, 1, 128, 2, 0, 0),
        (1, 70, 70, 2, 1, 40, 0, 1, 0),
        (1, 130, 130, 1, 1, 96, 2, 1, 33),
        (1, 33, 33, 2, 2, 8, 0, 0, 0),
    ):
        attention_case(h, B, T, S, NH, NKV, HD, documents, causal, window)


def heads(h: Harness, B: int, T: int, n: int, HD: int, width: int) -> tuple[Tensor, np.ndarray]:
    """Heads in rows of so many numbers, of which they are the first; the rest is NaN. And their numbers."""
    x = h.tensor((B, T, width), "bf16")
    x.data[..., : n * HD] = bf16_bits(h.normal(B, T, n * HD))
    numbers = x.get()[..., : n * HD].reshape(B, T, n, HD)
    x.shape = B, T, n, HD
    return x, numbers


def attention_case(h: Harness, B, T, S, NH, NKV, HD, documents=0, causal=1, window=0, fused=False) -> None:
    """Forward and backward. documents: how many a sequence has; 0: no operand `first`. fused: rows of QKV."""
    scale = HD**-0.5
    widths = [(NH + 2 * NKV) * HD] * 3 if fused else [NH * HD, NKV * HD, NKV * HD]
    (q, k, v), operands = zip(
        *(heads(h, B, of, n, HD, width) for of, n, width in zip((T, S, S), (NH, NKV, NKV), widths))
    )
    strides = {at: (of * width, width, HD, 1) for at, of, width in zip((0, 1, 2), (T, S, S), widths)}
    first = None
    if documents:
        begins = np.sort(h.random.integers(1, S, (B, documents - 1)), 1)
        own = S - T + np.arange(T)
        at = [np.concatenate([[0], of])[np.searchsorted(of, own, "right")] for of in begins]
        first = h.tensor((B, T), np.int32, np.array(at))
    seen = seen_keys(T, S, None if first is None else first.data, causal, window)
    out, lse = h.tensor((B, T, NH, HD), "bf16"), h.tensor((B, NH, T), F)
    true_out, true_lse = attention_forward_truth(*operands, scale, seen)
    baseline, _ = attention_forward_truth(*operands, scale, seen, round_p=True)
    text = label(
        f"B={B} T={T} S={S} NH={NH} NKV={NKV} HD={HD}",
        **{f"documents={documents}": documents, "all": not causal, "fused": fused},
    )
    text += f" window={window}" if window else ""
    outputs = [
        Output(out, true_out, name="out", baseline=rounded(baseline)),
        Output(lse, true_lse, 32, 64, 2.0**-20, name="lse"),
    ]
    scalars = [scale, causal, window]
    of_forward = {2 + at: stride for at, stride in strides.items()}
    h.case("attention_forward", text, [out, lse, q, k, v, first], scalars, outputs, strides=of_forward)
    dout = h.tensor((B, T, NH, HD), "bf16", h.normal(B, T, NH, HD))
    saved_out, saved_lse = h.tensor((B, T, NH, HD), "bf16", true_out), h.tensor((B, NH, T), F, true_lse)
    saved = dout.get(), scale, seen, saved_out.get(), saved_lse.get()
    truth = attention_backward_truth(*operands, *saved)
    baselines = attention_backward_truth(*operands, *saved, round_p=True)
    grads = [h.tensor(of.shape, "bf16") for of in (q, k, v)]
    h.case(
        "attention_backward",
        text,
        [*grads, dout, saved_out, saved_lse, q, k, v, first],
        scalars,
        [
            Output(grad, true, name=name, baseline=rounded(baseline))
            for grad, true, name, baseline in zip(grads, truth, ("dq", "dk", "dv"), baselines)
        ],
        strides={6 + at: stride for at, stride in strides.items()},
    )


def turned(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Heads [...,HD] by the angles [HD/2,2], half split."""
    a, b = np.split(x, 2, -1)
    cos, sin = angle[:, 0], angle[:, 1]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention_next(h: Harness) -> None:
    for B, M, NH, NKV, HD, dt, begins, end, window in (
        (1, 1, 4, 1, 64, "bf16", [0], 0, 0),
        (2, 100, 4, 1, 64, "bf16", [0, 37], 98, 0),
        (1, 131, 3, 3, 128, "bf16", [5], 130, 0),
        (2, 90, 6, 3, 32, "bf16", [0, 80], 77, 13),
        (1, 300, 2, 1, 512, "bf16", [3], 290, 0),
        (2, 70, 6, 2, 16, "bf16", [0, 11], 69, 1),
        (1, 75, 4, 1, 8, F, [2], 60, 0),
        (2, 150, 2, 1, 64, F, [0, 100], 140, 64),
        (1, 45, 3, 3, 256, F, [0], 44, 0),
    ):
        attention_next_case(h, B, M, NH, NKV, HD, dt, begins, end, window)


def attention_next_case(h: Harness, B, M, NH, NKV, HD, dt, begins, end, window) -> None:
    """q, k and v are of fused rows. Positions that are not seen have values of another size."""
    width, scale = (NH + 2 * NKV) * HD, HD**-0.5
    new = []
    for n in (NH, NKV, NKV):
        values = h.normal(B, width)
        values[:, n * HD :] = np.nan
        x = h.tensor((B, width), dt, values)
        numbers = x.get()[:, : n * HD].reshape(B, n, HD)
        x.shape = B, n, HD
        new.append((x, numbers))
    (q, Q), (k, K), (v, V) = new
    cis = h.tensor((M, HD // 2, 2), F, cis_table(M, HD))
    size = np.full((B, M), 8.0)
    first = [max(min(begin, end), end - window + 1 if window else 0) for begin in begins]
    for b, at in enumerate(first):
        size[b, at:end] = 1
    keys, values = (
        h.tensor((B, M, NKV, HD), dt, h.normal(B, M, NKV, HD) * size[..., None, None]) for _ in range(2)
    )
    new_keys, new_values, true = keys.get(), values.get(), np.empty((B, NH, HD))
    for b, at in enumerate(first):
        angle = cis.get()[end - min(begins[b], end)]
        new_keys[b, end] = turned(K[b], angle)
        if dt == "bf16":
            new_keys[b, end] = rounded(new_keys[b, end])
        new_values[b, end] = V[b]
        seen_k, seen_v = (np.repeat(x[b, at : end + 1], NH // NKV, 1) for x in (new_keys, new_values))
        s = np.einsum("hd,shd->hs", turned(Q[b], angle), seen_k) * scale
        p = np.exp(s - s.max(1, keepdims=True))
        true[b] = np.einsum("hs,shd->hd", p / p.sum(1, keepdims=True), seen_v)
    out = h.tensor((B, NH, HD), dt)
    begin, last = h.tensor((B,), np.int32, begins), h.tensor((1,), np.int32, [end])
    narrow = dt == "bf16"
    each = 1 if narrow else 16
    text = f"B={B} M={M} NH={NH} NKV={NKV} HD={HD} {dtype_name(dt)} begin={begins} end={end}"
    h.case(
        "attention_next",
        f"{text} window={window}" if window else text,
        [out, keys, values, q, k, v, cis, begin, last],
        [scale, window],
        [
            Output(out, true, each, each, 2.0**-10 if narrow else 2.0**-20, name="out"),
            Output(keys, new_keys, 1, 1 if narrow else 4, 2.0**-22, name="keys"),
            Output(values, new_values, exact=True, name="values"),
        ],
        strides={3 + at: (width, HD, 1) for at in range(3)},
    )
