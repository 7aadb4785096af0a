"""--profile in train_llama3.py: a run on the CPU, and a GPU's trace, which is made up here."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from run import ROOT, reference_flags

import train_llama3 as ref
from llamac import ops
from llamac.profile import peak, profile
from llamac.profile.torch_profile import Profiler, flops_of, operation_of, summarise
from llamac.training.options import parse

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's kernels have no operation's time on the host")
@pytest.mark.parametrize("ops", ["torch", "llamac"])
def test_a_run(data, tmp_path, capsys, ops):
    """Two of four steps, the second and the third."""
    extra = {"steps": 4, "profile": 2, "total_batch_size": 128}
    ref.train(parse([*reference_flags(data, tmp_path, **extra), "--ops", ops]))
    values = json.loads((tmp_path / "profile.json").read_text())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [e for e in events if re.fullmatch(r"step \d", e["name"])]
    assert [e["name"] for e in steps] == ["step 2", "step 3"]
    assert values["steps"] == 2
    assert values["seconds"] == pytest.approx(1e-6 * sum(e["dur"] for e in steps), rel=1e-6)
    busy = sum(row["seconds"] for row in values["operations"])
    assert values["seconds"] == pytest.approx(busy + values["idle_seconds"], rel=1e-3)
    calls = {(row["operation"], row["variant"]): row for row in values["operations"]}
    layers = 2
    if ops == "llamac":
        assert calls["attention_forward", ""]["calls"] == 2 * 2 * layers  # steps, micro-batches
        assert calls["residual_rmsnorm_forward", ""]["calls"] == 2 * 2 * layers
    products = [row for row in values["operations"] if row["operation"] == "matmul"]
    # q/k/v, o, gate/up, down and the head, forward and two backward, on 4 x 16 tokens
    parameters = ref.load_config(ROOT / "tests/models/tied-gqa.json").parameters()
    elements = sum(shape[0] * shape[1] for _, shape in parameters if len(shape) == 2)
    assert sum(row["flops"] for row in products) == 2 * 2 * 3 * 2 * 64 * elements
    assert all(row["flops"] == sum(part["flops"] for part in row["shapes"]) for row in products)
    report = profile.report(profile.read(tmp_path / "profile.json"))
    assert "--kernel" not in report and "--graphs" not in report  # flags that this program refuses
    assert report in capsys.readouterr().out
    found = [line.split()[0] for line in report.splitlines() if line]
    names = {"GEMM", "attention", "norm", "SwiGLU", "loss", "optimizer", "embedding", "copy", "idle"}
    assert (names | {"RoPE"} if ops == "llamac" else names) <= set(found)


@pytest.mark.parametrize("chunks", [2, 9])  # of more than eight our product adds the weight's gradient up
def test_products_of_a_loss(chunks, tmp_path, monkeypatch):
    rows, channels, vocabulary = 45, 16, 33
    monkeypatch.setattr("llamac.ops.operations.CHUNK_BYTES", -(-2 * vocabulary * rows // chunks))
    hidden, weight = (torch.randn(n, channels).bfloat16().requires_grad_() for n in (rows, vocabulary))
    profiler = Profiler(tmp_path, count=1, steps=1, device="cpu", dtype=torch.bfloat16)
    with profiler.step(1):
        ops.linear_cross_entropy(hidden, weight, torch.arange(rows) % vocabulary).backward()
    found = json.loads(profiler.finish().read_text())["operations"]
    products = [row for row in found if row["operation"].startswith("matmul")]
    assert sum(row["calls"] for row in products) == 3 * chunks
    assert sum(row["flops"] for row in products) == 3 * 2 * rows * channels * vocabulary
    assert sum(row["calls"] for row in found if row["operation"] == "cross_entropy") == chunks


def event(cat: str, name: str, ts: float, dur: float, **args) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 1, "args": args}


def launched(name: str, call: str, host: float, start: float, dur: float, k: int, dims: list | None = None):
    """A kernel, the call and the launch that it comes from."""
    return [
        event("cpu_op", call, host, 2, **{"External id": k, "Input Dims": dims or []}),
        event("cuda_runtime", "cudaLaunchKernel", host + 1, 1, correlation=100 + k, **{"External id": k}),
        event("kernel", name, start, dur, correlation=100 + k, stream=7, **{"External id": k}),
    ]


GPU = {"name": "Abacus", "gpu": True, "peak_tflops": 1.0, "copy_gbps": 1.0}


def test_a_gpus_trace():
    """The host is ahead: step 2's kernels begin when step 1's have ended, and validation does not count."""
    product = [[8, 16], [16, 4]]
    events = [
        event("user_annotation", "step 1", 0, 20),
        event("gpu_user_annotation", "step 1", 5, 50),
        *launched("nvjet_hsh_128x256", "aten::mm", 2, 10, 30, 1, product),
        *launched("ncclDevKernel_AllGather_RING_LL(a)", "c10d::_allgather_base_", 6, 20, 30, 2),
        event("user_annotation", "step 2", 22, 10),
        *launched("void x::attention_forward_wgmma_kernel<bf16>(y)", "llamac::attention_forward", 24, 60, 10,
                  3, [[1, 8, 2, 4], [1, 8, 1, 4], [1, 8, 1, 4]]),
        *launched("nvjet_hsh_128x256", "aten::mm", 26, 70, 10, 4, product),
        *launched("nvjet_hsh_128x256", "aten::mm", 40, 90, 10, 5, product),  # behind the steps
    ]  # fmt: skip
    events += launched("Memset (Device)", "aten::mm", 26, 80, 2.5, 4)[1:]  # call 4 launches it, too
    values = summarise(events, GPU)
    # 0 to 50, without 10 before the first kernel; 50 to 82.5, without the 10 before attention
    assert values["steps"] == 2
    assert values["seconds"] == pytest.approx(82.5e-6) and values["idle_seconds"] == pytest.approx(20e-6)
    rows = {(row["operation"], row["variant"]): row for row in values["operations"]}
    assert rows["matmul", "nvjet_hsh_128x256"]["calls"] == 2
    assert rows["matmul", "nvjet_hsh_128x256"]["seconds"] == pytest.approx(40e-6)
    one = 2 * 8 * 16 * 4  # of the second product, the clearing has its share of the time
    assert rows["matmul", "nvjet_hsh_128x256"]["flops"] == one + one * 10 / 12.5
    assert rows["matmul", "Memset"]["flops"] == one * 2.5 / 12.5
    attention = rows["attention_forward", "attention_forward_wgmma_kernel"]
    assert attention["flops"] == 2 * 2 * (8 * 9 / 2) * 2 * 4  # two products, 36 pairs of positions
    assert rows["communication", "ncclDevKernel_AllGather_RING_LL"]["seconds"] == pytest.approx(30e-6)
    assert len(rows) == 4


@pytest.mark.parametrize(
    "name", ["llamac::attention", "aten::_flash_attention", "aten::_efficient_attention"]
)
def test_attentions_flops(name):
    """B=2 T=5 NH=3 HD=4, wherever the heads stand; backward has two and a half times as many products."""
    forward = 2 * 2 * 15 * 2 * 3 * 4
    assert flops_of(f"{name}_forward", [[2, 5, 3, 4]]) == forward
    for outer in ("scaled_dot_product_cudnn_attention", "cudnn_attention_forward"):
        assert flops_of(f"aten::_{outer}", [[2, 3, 5, 4]]) == forward
    assert flops_of(f"{name}_backward", [[2, 5, 3, 4]]) == 2.5 * forward


@pytest.mark.parametrize(
    ("kernel", "call", "category"),
    [
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16>(x)", "aten::mm", "GEMM"),
        ("Cijk_Alik_Bljk_BBS_BH_MT256x256", "", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "aten::_scaled_dot_product_cudnn_attention",
         "attention"),
        ("void pytorch_flash::flash_bwd_kernel<x>(y)", "aten::_flash_attention_backward", "attention"),
        ("attn_fwd", "", "attention"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "## Call CompiledFxGraph x ##", "norm"),
        ("triton_poi_fused_mul_silu_split_7", "", "SwiGLU"),
        ("triton_poi_fused_add_cat_mul_sub_5", "", "RoPE"),
        ("triton_red_fused__log_softmax_nll_loss_forward_9", "", "loss"),
        ("triton_poi_fused_add_addcmul_copy_lerp_sqrt_0", "", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<LpNorm>(x)", "aten::_foreach_norm", "optimizer"),
        ("void llamac::adamw_vectorized_kernel<float>(x)", "llamac::adamw", "optimizer"),
        ("void llamac::rope_backward_shuffle_kernel(x)", "llamac::rope_backward", "RoPE"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", "c10d::_reduce_scatter_base_", "communication"),
        ("Memcpy DtoD (Device -> Device)", "aten::copy_", "copy"),
        ("void at::native::CatArrayBatchedCopy(x)", "fsdp::chunk_cat", "copy"),
        ("void at::native::elementwise_kernel<x>(y)", "aten::add", "other"),
        ("", "aten::matmul", "other"),
        ("", "autograd::engine::evaluate_function: AttentionBackward0", "other"),
    ],
)  # fmt: skip
def test_categories(kernel, call, category):
    assert profile.category(operation_of(kernel, call)) == category


def test_published_rates(monkeypatch):
    """tests/train/check_profile.cpp asks the C program for the same."""

    def tflops(name: str, units: int, dtype: torch.dtype) -> float | None:
        device = SimpleNamespace(name=name, multi_processor_count=units)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
        return peak.peak_tflops("cuda", dtype)

    assert tflops("NVIDIA H200", 132, torch.bfloat16) == 989.4
    assert tflops("NVIDIA H200", 132, torch.float32) == 66.9
    assert tflops("AMD Instinct MI300X VF", 38, torch.bfloat16) == pytest.approx(1307.4 / 8)
    assert tflops("AMD Radeon RX 7900 XTX", 96, torch.bfloat16) == 122.8
    assert tflops("NVIDIA GeForce RTX 4090 D", 114, torch.bfloat16) is None


def test_every_device_has_a_source():
    rows = list(peak.published().values())
    assert len(rows) == sum(len(row["names"]) for row in {id(row): row for row in rows}.values()) > 15
    for row in rows:
        assert (
            set(row) - {"gbps", "gib"} == {"names", "multiprocessors", "tflops", "source"} and row["source"]
        )
        assert row["multiprocessors"] > 0 and 0 < row["tflops"]["f32"] < row["tflops"]["bf16"]
        assert set(row["tflops"]) - {"fp8"} == {"f32", "bf16"} and row.get("gbps", 900) >= 900


def test_measured_rates():
    assert peak.peak_tflops("cpu", torch.float32) > 1e-3 and peak.copy_gbps("cpu") > 0.1
