"""Each operation against float64 PyTorch by the rule: every variant, every type, odd shapes, outputs that are
NaN at first, guard bytes around every operand. Operands and variants come from the registry, PyTorch's side
stands here.
"""

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llamac import registry
from llamac.errors import InputError
from llamac.rule import BACKWARD, FORWARD, violation

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64, "i32": torch.int32}
OPERATIONS = {op["name"]: op for op in registry.kernels()}
GUARD, GUARD_BYTE = 64, 0x5A
SCALE, EPS = 0.3, 1e-5
ADAMW = {
    "lr": 1e-2,
    "step": 3,
    "norm": 5.0,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "clip": 1.0,
}


@dataclass
class Case:
    """One operation as PyTorch does it: inputs by operand name -> outputs by operand name, in their type."""

    torch: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    shapes: list[dict[str, int]]
    scalars: tuple = ()
    backward: bool = False


def stat(x: torch.Tensor) -> torch.dtype:
    """The type in which statistics are kept beside x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def gradients(function: Callable, inputs: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(function(*leaves), leaves, dout))


# PyTorch's side: a function an operation, from inputs by name to outputs by name.


def embedding_forward(i):
    return {"out": F.embedding(i["tokens"].long(), i["weight"])}


def embedding_backward(i):
    dout = i["dout"]
    dweight = torch.zeros(i["V"], dout.shape[1], dtype=dout.dtype)
    return {"dweight": dweight.index_add(0, i["tokens"].long(), dout)}


def rmsnorm_forward(i):
    x = i["x"]
    rstd = torch.rsqrt(x.to(stat(x)).pow(2).mean(-1) + EPS)
    return {"out": F.rms_norm(x, (x.shape[-1],), i["weight"], EPS), "rstd": rstd}


def residual_rmsnorm_forward(i):
    total = i["x"] + i["residual"]
    return {"sum": total} | rmsnorm_forward({"x": total, "weight": i["weight"]})


def rmsnorm_backward(i):
    def norm(x, weight):
        return rmsnorm_forward({"x": x, "weight": weight})["out"]

    dx, dweight = gradients(norm, [i["x"], i["weight"]], i["dout"])
    return {"dx": dx + i["dresidual"], "dweight": dweight, "out": norm(i["x"], i["weight"])}


def precompute_cis(i):
    frequencies = 1 / 10000.0 ** (torch.arange(0, i["HD"], 2).to(i["stat"]) / i["HD"])
    angle = torch.outer(torch.arange(i["T"]).to(i["stat"]), frequencies)
    return {"cis": torch.stack((angle.cos(), angle.sin()), -1)}


def rope(x, cis):
    x1, x2 = x.chunk(2, -1)
    cos, sin = (cis[None, :, None, :, part] for part in (0, 1))
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(x.dtype)


def interleaved_rope(x, cis):
    x1, x2 = x[..., 0::2], x[..., 1::2]
    cos, sin = (cis[None, :, None, :, part] for part in (0, 1))
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2).to(x.dtype)


def rope_forward(i, function=rope):
    return {"out": function(i["x"], i["cis"])}


def rope_backward(i, function=rope):
    (dx,) = gradients(lambda x: function(x, i["cis"]), [torch.zeros_like(i["dout"])], i["dout"])
    return {"dx": dx}


def repeat_kv_forward(i):
    return {"out": i["x"].repeat_interleave(i["NH"] // i["NKV"], 2)}


def repeat_kv_backward(i):
    dout = i["dout"]
    x = torch.zeros(*dout.shape[:2], i["NKV"], dout.shape[3], dtype=dout.dtype)
    (dx,) = gradients(lambda x: repeat_kv_forward(i | {"x": x})["out"], [x], dout)
    return {"dx": dx}


def attention(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    return out.transpose(1, 2)


def log_sum_exp(q, k):
    q, k = q.to(stat(q)).transpose(1, 2), k.to(stat(k)).transpose(1, 2)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * SCALE
    future = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
    return scores.masked_fill(future, -torch.inf).logsumexp(-1)


def attention_forward(i):
    return {"out": attention(i["q"], i["k"], i["v"]), "lse": log_sum_exp(i["q"], i["k"])}


def attention_backward(i):
    return dict(zip(("dq", "dk", "dv"), gradients(attention, [i["q"], i["k"], i["v"]], i["dout"])))


def swiglu(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_forward(i):
    return {"out": swiglu(i["gate_up"])}


def swiglu_backward(i):
    (dgate_up,) = gradients(swiglu, [i["gate_up"]], i["dout"])
    return {"dgate_up": dgate_up, "out": swiglu(i["gate_up"])}


def matmul_forward(i):
    return {"out": i["x"] @ i["weight"].T + i["residual"]}


def matmul_backward_input(i):
    return {"dx": i["dout"] @ i["weight"]}


def matmul_backward_weight(i):
    return {"dweight": i["dout"].T @ i["x"]}


def cross_entropy(i):
    logits, targets = i["logits"].detach().clone().requires_grad_(), i["targets"].long()
    losses = F.cross_entropy(logits.to(stat(logits)), targets, reduction="none", ignore_index=-100)
    (dlogits,) = torch.autograd.grad((losses * i["dlosses"]).sum() * SCALE, logits)
    mean = mean_loss({"losses": losses.detach(), "targets": i["targets"]})
    return {"losses": losses.detach(), "dlogits": dlogits} | mean


def mean_loss(i):
    counted = i["losses"].to(stat(i["losses"]))[i["targets"] != -100]
    return {"mean": counted.mean(), "counted": torch.full_like(counted.sum(), counted.numel())}


def global_norm(i):
    return {"norm": torch.linalg.vector_norm(i["x"].to(stat(i["x"]))).reshape(1)}


def adamw(i):
    """torch's own AdamW, started in the middle of a run."""
    weight = torch.nn.Parameter((i["weight"] if i["master"] is None else i["master"]).clone())
    a = ADAMW
    optimizer = torch.optim.AdamW([weight], a["lr"], a["betas"], a["eps"], a["weight_decay"])
    optimizer.state[weight] = {
        "step": torch.tensor(a["step"] - 1.0),
        "exp_avg": i["m"].to(weight.dtype).clone(),
        "exp_avg_sq": i["v"].to(weight.dtype).clone(),
    }
    weight.grad = i["grad"].to(weight.dtype) * min(1.0, a["clip"] / (a["norm"] + 1e-6))
    optimizer.step()
    state = optimizer.state[weight]
    out = {"weight": weight.detach().to(i["weight"].dtype), "m": state["exp_avg"], "v": state["exp_avg_sq"]}
    return out | ({} if i["master"] is None else {"master": weight.detach()})


ROWS = [{"N": n, "C": c} for n, c in ((1, 1), (7, 63), (3, 64), (2, 65), (33, 129), (1, 1031), (5, 4096))]
HEADS = [
    {"B": b, "T": t, "NH": h, "NKV": kv, "HD": d}
    for b, t, h, kv, d in (
        (1, 1, 1, 1, 2),
        (2, 7, 3, 1, 8),
        (1, 63, 4, 2, 16),
        (1, 64, 2, 2, 64),
        (2, 65, 8, 1, 20),
        (1, 129, 4, 4, 128),
        (1, 300, 3, 3, 32),
    )
]
FEED = [{"N": n, "F": f} for n, f in ((1, 1), (7, 63), (3, 64), (2, 65), (5, 1031))]
# A long sum has many results: few of them PyTorch (MKL) computes by dot products on some processors, whose
# errors are half of its matrix products'.
PRODUCTS = [
    {"N": n, "C": c, "K": k}
    for n, c, k in ((1, 1, 1), (7, 63, 65), (64, 64, 64), (33, 129, 31), (66, 1031, 67), (257, 96, 320))
]
CLASSES = [
    {"N": n, "V": v} for n, v in ((1, 1), (7, 2), (3, 63), (2, 65), (5, 4096), (3, 50257), (2, 128256))
]
ANGLES = [{"T": t, "HD": d} for t, d in ((1, 2), (7, 6), (65, 64), (1031, 128))]
ELEMENTS = [{"P": p} for p in (1, 7, 63, 64, 65, 1031, 100003)]
WORDS = [{"N": n, "C": c, "V": v} for n, c, v in ((1, 1, 1), (7, 63, 5), (65, 64, 1031), (130, 33, 2))]

ADAMW_SCALARS = (*ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"], ADAMW["clip"], 42, 0)
CASES = {
    "embedding_forward": Case(embedding_forward, WORDS),
    "embedding_backward": Case(embedding_backward, WORDS, (False,), backward=True),
    "rmsnorm_forward": Case(rmsnorm_forward, ROWS, (EPS,)),
    "residual_rmsnorm_forward": Case(residual_rmsnorm_forward, ROWS, (EPS,)),
    "rmsnorm_backward": Case(rmsnorm_backward, ROWS, (False,), backward=True),
    "precompute_cis": Case(precompute_cis, ANGLES, (10000.0, 1.0, 1.0, 4.0, 8192.0)),
    "rope_forward": Case(rope_forward, HEADS, (False,)),
    "rope_backward": Case(rope_backward, HEADS, (False,), backward=True),
    "repeat_kv_forward": Case(repeat_kv_forward, HEADS),
    "repeat_kv_backward": Case(repeat_kv_backward, HEADS, backward=True),
    "attention_forward": Case(attention_forward, HEADS, (SCALE,)),
    "attention_backward": Case(attention_backward, HEADS, (SCALE,), backward=True),
    "swiglu_forward": Case(swiglu_forward, FEED),
    "swiglu_backward": Case(swiglu_backward, FEED, backward=True),
    "matmul_forward": Case(matmul_forward, PRODUCTS),
    "matmul_backward_input": Case(matmul_backward_input, PRODUCTS, backward=True),
    "matmul_backward_weight": Case(matmul_backward_weight, PRODUCTS, (False,), backward=True),
    "cross_entropy": Case(cross_entropy, CLASSES, (SCALE, -100)),
    "mean_loss": Case(mean_loss, [{"N": n} for n in (1, 7, 65, 1031, 100003)], (-100,)),
    "global_norm": Case(global_norm, ELEMENTS, (False,)),
    "adamw": Case(adamw, ELEMENTS, ADAMW_SCALARS),
}


def variants() -> list:
    """(operation, variant, types of its operands) of everything that is registered."""
    return [
        pytest.param(name, v["name"], types, id=f"{name}-{v['name']}-{'-'.join(dict.fromkeys(types))}")
        for name, op in OPERATIONS.items()
        for v in op["variants"]
        for types in v["types"]
    ]


def guarded(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of `value` with guard bytes on both sides, and the whole memory."""
    size = value.numel() * value.element_size()
    memory = torch.full((size + 2 * GUARD,), GUARD_BYTE, dtype=torch.uint8)
    inner = memory[GUARD : GUARD + size].view(value.dtype).view(value.shape)
    inner.copy_(value)
    return inner, memory


def guards_intact(memory: torch.Tensor) -> bool:
    return bool(
        (memory[:GUARD] == GUARD_BYTE).all() and (memory[memory.numel() - GUARD :] == GUARD_BYTE).all()
    )


def shape_of(operand: dict, sizes: dict[str, int]) -> list[int]:
    return [
        factor * (sizes[symbol] if symbol else 1) // divisor for symbol, factor, divisor in operand["shape"]
    ]


def make_inputs(op: dict, types: list[str], sizes: dict[str, int], seed: int) -> dict[str, torch.Tensor]:
    """Random normal values for all that the operation reads; values that belong together do."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for operand, dtype in zip(op["operands"], types):
        if operand["output"] and not operand["in_place"]:
            continue
        shape = shape_of(operand, sizes)
        if operand["bound"]:
            value = torch.randint(sizes[operand["bound"]], shape, generator=generator, dtype=torch.int32)
        else:
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[dtype])
        values[operand["name"]] = value.abs() if operand["positive"] else value
    if op["name"] == "adamw":
        for name, value in (("lr", ADAMW["lr"]), ("step", ADAMW["step"]), ("grad_norm", ADAMW["norm"])):
            values[name].fill_(value)
        if types[0] == "bf16":
            values["master"] = values["weight"].float()
    if op["name"] in ("cross_entropy", "mean_loss") and sizes["N"] > 2:
        values["targets"][1] = -100
    if op["name"] == "rmsnorm_backward":
        values["rstd"] = rmsnorm_forward(values)["rstd"]
    if op["name"] == "attention_backward":
        values["out"] = attention(*(values[n].double() for n in "qkv")).to(values["q"].dtype)
        values["lse"] = log_sum_exp(values["q"].double(), values["k"].double()).to(values["lse"].dtype)
    if op["name"] == "adamw" and types[0] != "bf16":
        values["master"] = None
    return values


def run_guarded(op, variant, types, sizes, values, scalars) -> dict[str, torch.Tensor]:
    """Runs one variant on guarded memory, outputs NaN at first; guards and inputs must be as they were."""
    operands, memories = {}, {}
    for operand, dtype in zip(op["operands"], types):
        name = operand["name"]
        value = (
            values[name]
            if name in values
            else torch.full(shape_of(operand, sizes), torch.nan, dtype=DTYPES[dtype])
        )
        operands[name], memories[name] = (None, None) if value is None else guarded(value)
    split = sum(o["output"] for o in op["operands"])
    ordered = list(operands.values())
    registry.run(op["name"], ordered[:split], ordered[split:], scalars, variant)
    for operand in op["operands"]:
        name = operand["name"]
        assert memories[name] is None or guards_intact(memories[name]), f"{name}: written outside of it"
        if not operand["output"] and operands[name] is not None:
            assert torch.equal(operands[name], values[name]), f"{name}: an input was changed"
    return {
        o["name"]: operands[o["name"]]
        for o in op["operands"]
        if o["output"] and operands[o["name"]] is not None
    }


COPIES = "embedding_forward", "repeat_kv_forward"


def as_type(values: dict, storage: torch.dtype | None) -> dict:
    """The same values; where storage is given, all floats in that type."""
    return {
        name: value.to(storage) if value is not None and storage and value.is_floating_point() else value
        for name, value in values.items()
    }


def check(op, variant, types, sizes, case, seed=0, spoil=lambda outputs: None) -> list[str]:
    values = make_inputs(op, types, sizes, seed)
    context = sizes | {"stat": torch.float64 if "f64" in types else torch.float32}
    theirs = case.torch(as_type(values, None) | context)
    truth = case.torch(as_type(values, torch.float64) | sizes | {"stat": torch.float64})
    ours = run_guarded(op, variant, types, sizes, values, case.scalars)
    spoil(ours)
    wrong = []
    for name, found in ours.items():
        dtype = next(t for o, t in zip(op["operands"], types) if o["name"] == name)
        if dtype == "f64":  # the oracle itself
            off = (found - truth[name]).abs().max().item() / truth[name].abs().max().clamp(min=1e-300).item()
            if not off <= 1e-13:
                wrong.append(f"{op['name']} {variant} {types} {sizes} {name}: off by {off:.1e}")
            continue
        if op["name"] in COPIES and not torch.equal(found, truth[name].to(found.dtype)):
            wrong.append(f"{op['name']} {variant} {types} {sizes} {name}: a copy is not one")
        message = violation(
            found.double().numpy(),
            theirs[name].double().numpy(),
            truth[name].double().numpy(),
            dtype,
            BACKWARD if case.backward else FORWARD,
        )
        if message:
            wrong.append(f"{op['name']} {variant} {types} {sizes} {name}: {message}")
    return wrong


def check_shapes(op, variant, types, case):
    """Every shape of the case that the variant takes: it need not take all, but must take one."""
    wrong, ran = [], 0
    for seed, sizes in enumerate(case.shapes):
        try:
            wrong += check(op, variant, types, sizes, case, seed)
            ran += 1
        except InputError as error:
            if "does not take these shapes" not in str(error):
                raise
    assert ran
    assert not wrong, "\n".join(wrong)


def test_every_operation_has_a_case():
    assert set(CASES) == set(OPERATIONS)


@pytest.mark.parametrize("operation, variant, types", variants())
def test_operation(operation, variant, types):
    op, case = OPERATIONS[operation], CASES[operation]
    if operation == "adamw" and "bf16" in (types[2], types[3]):
        pytest.skip("bf16 moments are rounded stochastically: test_stochastic_rounding")
    check_shapes(op, variant, types, case)


@pytest.mark.parametrize("fault", ["nan", "zero", "swapped", "scaled"])
def test_faults_are_caught(fault):
    def spoil(outputs):
        x = outputs["out"]
        x.view(-1)[-1] = {"nan": torch.nan, "zero": 0.0}.get(fault, x.view(-1)[-1])
        if fault == "swapped":
            x[[0, 1]] = x[[1, 0]]
        if fault == "scaled":
            x.mul_(1 + 1e-5)

    op = OPERATIONS["rmsnorm_forward"]
    assert check(op, "reference", ["f32"] * 4, {"N": 33, "C": 129}, CASES["rmsnorm_forward"], spoil=spoil)
    assert not check(op, "reference", ["f32"] * 4, {"N": 33, "C": 129}, CASES["rmsnorm_forward"])


def test_the_checks_of_all_operations_see_every_fault(build):
    """check_operations with a wrong variant in the place of all others must fail, for each kind of fault."""

    def run(fault):
        return subprocess.run([build / "check_operations", "--fault", fault], capture_output=True, text=True)

    faults = run("none").stderr.split("NAME one of ")[1].split()
    assert len(faults) > 5
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        codes = pool.map(lambda fault: run(fault).returncode, faults)
        assert dict(zip(faults, codes, strict=True)) == dict.fromkeys(faults, 1)


def test_guards_are_seen():
    inner, memory = guarded(torch.zeros(3, 5))
    assert guards_intact(memory)
    memory[GUARD + inner.numel() * 4] = 0
    assert not guards_intact(memory)


@pytest.mark.parametrize("function", [rope_forward, rope_backward])
def test_interleaved_rope(function):
    op = OPERATIONS[function.__name__]
    case = Case(partial(function, function=interleaved_rope), HEADS, (True,), function is rope_backward)
    for v in op["variants"]:
        for types in v["types"]:
            check_shapes(op, v["name"], types, case)


@pytest.mark.parametrize(
    "variant", [v["name"] for v in OPERATIONS["precompute_cis"]["variants"] if ["f64"] in v["types"]]
)
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaled_frequencies_are_transformers(variant, factor):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=scaling,
    )
    theirs = LlamaRotaryEmbedding(config).inv_freq.double().numpy()
    positions = np.arange(70000)[:, None]
    cis = np.full((70000, 64, 2), np.nan, np.float64)
    registry.run("precompute_cis", [cis], [], (500000.0, factor, 1.0, 4.0, 8192.0), variant)
    ours = np.arctan2(cis[1, :, 1], cis[1, :, 0])
    # transformers computes them in f32, the interpolated ones with a difference of near numbers: eight units.
    np.testing.assert_allclose(ours, theirs, rtol=8 * 2.0**-23, atol=0)
    assert (theirs != 500000.0 ** (-np.arange(64) / 64)).any()
    np.testing.assert_allclose(
        cis[..., 0] + 1j * cis[..., 1], np.exp(1j * positions * ours), rtol=0, atol=1e-10
    )


def test_stochastic_rounding():
    """AdamW into bf16 without master: each result is a bf16 neighbour of the exact one, right on average."""
    n = 1 << 16
    exact_inputs = {
        "weight": torch.full((n,), 0.7),
        "master": None,
        "m": torch.full((n,), 0.01),
        "v": torch.full((n,), 0.02),
        "grad": torch.full((n,), 0.3),
    }
    exact = adamw(as_type(exact_inputs | {"weight": torch.full((n,), 0.7).bfloat16()}, torch.float64))
    state = {name: None if x is None else x.bfloat16() for name, x in exact_inputs.items()}
    exact = adamw(as_type(state, torch.float64))
    extra = [
        torch.tensor([x], dtype=d)
        for x, d in (
            (ADAMW["norm"], torch.float32),
            (ADAMW["lr"], torch.float32),
            (ADAMW["step"], torch.int32),
        )
    ]
    for variant in OPERATIONS["adamw"]["variants"]:
        out = {name: x.clone() for name, x in state.items() if name not in ("grad", "master")}
        registry.run(
            "adamw",
            [out["weight"], None, out["m"], out["v"]],
            [state["grad"], *extra],
            ADAMW_SCALARS,
            variant["name"],
        )
        for name, found in out.items():
            truth = exact[name].double()
            ulp = 2.0 ** (torch.floor(torch.log2(truth.abs())) - 7)
            assert ((found.double() - truth).abs() <= ulp).all(), name
            # The mean of n independent roundings: six standard deviations of at most half an ulp each.
            assert (
                found.double().mean() - truth.mean()
            ).abs() <= 6 * 0.5 * ulp.max() / n**0.5 + 1e-6 * truth.abs().max(), name
            assert found.unique().numel() == 2, name
