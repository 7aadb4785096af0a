"""--profile of a run in PyTorch: OUT/trace.json is torch.profiler's trace, and OUT/profile.json has its sums
by operation, for the same report as that of the C program's runs (llamac.profile).
"""

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from llamac.profile import flops
from llamac.profile.peak import copy_gbps, peak_tflops
from llamac.profile.profile import OTHER, PYTORCH, category

# What a kernel, or on the CPU a call, is: the first pattern that is found in its own name, or in the name of
# the call that launched it. Compiled kernels have the names of what was fused into them.
_KERNELS = (
    (r"nccl|rccl", "communication"),
    (r"^triton.*(lerp|addcmul)", "adamw"),
    (r"^triton.*(log_softmax|logsumexp|nll_loss|cross_entropy)", "cross_entropy"),
    (r"^triton.*(rsqrt|rms_norm)", "rmsnorm"),
    (r"^triton.*(silu|sigmoid)", "swiglu"),
    (r"^triton.*embedding", "embedding"),
    (r"^triton.*(cat|neg|slice|split).*mul|^triton.*mul.*(cat|neg|slice|split)", "rope"),
)
_CALLS = (
    (r"^(?:llamac::)(\w+)", r"\1"),
    (r"^aten::(mm|addmm|addmm_|bmm|baddbmm)$", "matmul"),
    (r"^aten::.*(scaled_dot_product|flash_attention|cudnn_attention|efficient_attention)", "attention"),
    (r"^aten::.*rms_norm", "rmsnorm"),
    (r"^aten::.*(cross_entropy|nll_loss|log_softmax)", "cross_entropy"),
    (r"^aten::silu", "swiglu"),
    (r"^aten::embedding", "embedding"),
    (r"^aten::.*(foreach_norm|linalg_vector_norm)", "global_norm"),
    (r"^c10d::|^gloo:|^nccl:", "communication"),
    (
        r"^aten::(_to_copy|_?foreach_copy_|copy_|cat|clone|fill_|zero_|_?chunk_cat|split_with_sizes_copy)$",
        "copy",
    ),
    (r"^fsdp::.*(copy|cat)", "copy"),
)
_KERNELS_OF_LIBRARIES = (
    (r"fmha|flash|sdpa|attn|attention", "attention"),
    (r"gemm|nvjet|^Cijk|cutlass|xmma", "matmul"),
    (r"Memcpy|Memset", "copy"),
)
SMALL = 0.005  # of a step: what no category knows and takes less is one row
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def operation_of(kernel: str, call: str) -> str:
    """The operation that a kernel's time counts to. kernel: its name, "" on the CPU; call: of what launched
    it."""
    for patterns, name in ((_KERNELS, kernel), (_CALLS, call), (_KERNELS_OF_LIBRARIES, kernel)):
        for pattern, operation in patterns:
            if match := re.search(pattern, name):
                return match.expand(operation)
    return short_name(kernel) if kernel else call[:40]


def short_name(kernel: str) -> str:
    """Without return type, namespaces, template's and function's arguments."""
    name = re.split(r"[<(]", kernel.removeprefix("void ").replace("(anonymous namespace)::", ""))[0]
    return (name.split("::")[-1].strip() or kernel)[:40]


def flops_of(call: str, dims: list) -> float:
    """Of a matrix product or of causal attention, by the shapes of its operands; 0 of all others."""
    if match := re.match(r"aten::(mm|addmm|addmm_|bmm|baddbmm)$", call):
        return flops.matmul_backward_input(dims[:2] if match[1] in ("mm", "bmm") else dims[1:3])
    if match := re.match(r"llamac::(matmul_(forward|backward_input|backward_weight))", call):
        return getattr(flops, match[1])(dims)
    if re.match(r"aten::_scaled_dot_product|(aten::_(cudnn|flash|efficient)|llamac::)_?attention", call):
        if re.match(r"aten::_(scaled_dot_product|cudnn)", call):  # heads before positions
            B, NH, T, HD = dims[0]
            dims = [[B, T, NH, HD]]
        return (flops.attention_backward if "backward" in call else flops.attention_forward)(dims)
    return 0.0


@dataclass
class _Total:
    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0

    def add(self, us: float, flops: float) -> None:
        self.calls, self.seconds, self.flops = self.calls + 1, self.seconds + 1e-6 * us, self.flops + flops

    def fields(self) -> dict:
        return {"calls": self.calls, "seconds": self.seconds, "flops": self.flops, "bytes": 0}


@dataclass
class _Work:
    """A kernel, or on the CPU a call without those within it."""

    kernel: str
    call: str
    dims: list
    start: float  # microseconds, as all times of a trace
    end: float
    us: float
    step: int  # index of the profiled step
    share: float = 1.0  # of its call's time, and so of its FLOPs: a call may launch several kernels


@dataclass
class _Steps:
    """The steps on the host's clock."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def at(self, time: float) -> int:
        """The index of the step that the host was in; -1: none."""
        k = bisect_right(self.begins, time) - 1
        return k if k >= 0 and time <= self.ends[k] else -1


def _device_work(events: list[dict], steps: _Steps) -> Iterator[_Work]:
    """Every kernel and copy that was launched in a step."""
    calls = {
        e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op" and "External id" in e["args"]
    }
    launches = {}
    for e in events:
        if e.get("cat", "").endswith(("_runtime", "_driver")) and "correlation" in e["args"]:
            launches[e["args"]["correlation"]] = e["ts"]
    done = [e for e in events if e.get("cat") in _DEVICE]
    spent: Counter = Counter()
    for e in done:
        spent[e["args"].get("External id")] += e["dur"]
    for e in done:
        step = steps.at(launches.get(e["args"].get("correlation"), e["ts"]))
        number = e["args"].get("External id")
        call = calls.get(number, {})
        dims = call.get("args", {}).get("Input Dims", [])
        if step >= 0:
            start, us = e["ts"], e["dur"]
            share = us / spent[number] if us else 0.0
            yield _Work(e["name"], call.get("name", ""), dims, start, start + us, us, step, share)


def _host_work(events: list[dict], steps: _Steps) -> Iterator[_Work]:
    """Every call in a step, with the time that it did not spend in calls within."""
    open_calls: dict[int, list[_Work]] = {}
    for e in sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"])):
        stack, end = open_calls.setdefault(e["tid"], []), e["ts"] + e["dur"]
        while stack and stack[-1].end <= e["ts"]:
            stack.pop()
        if stack:
            stack[-1].us -= e["dur"]
        dims = e["args"].get("Input Dims", [])
        work = _Work("", e["name"], dims, e["ts"], end, e["dur"], steps.at(e["ts"]))
        stack.append(work)
        if work.step >= 0:
            yield work


def _uncovered(begin: float, end: float, spans: list[tuple[float, float]]) -> float:
    idle, at = 0.0, begin
    for start, stop in sorted(spans):
        idle += max(0.0, min(start, end) - at)
        at = max(at, min(stop, end))
    return idle + max(0.0, end - at)


def _times(work: list[_Work], steps: _Steps, gpu: bool) -> tuple[float, float]:
    """Microseconds of all steps, and of them those in which nothing ran. On a GPU, which works behind the
    host, a step lasts from the end of the one before to its own last kernel's.
    """
    total = idle = last = 0.0
    for k, begin in enumerate(steps.begins):
        spans = [(w.start, w.end) for w in work if w.step == k]
        if gpu and spans:
            begin, end = max(last, begin), max(stop for _, stop in spans)
        else:
            end = steps.ends[k]
        total, idle, last = total + end - begin, idle + _uncovered(begin, end, spans), end
    return total, idle


def summarise(events: list[dict], device: dict) -> dict:
    """profile.json of a trace's events, in which the steps are annotations "step N". device: its name,
    whether it is a GPU, peak_tflops, copy_gbps.
    """
    marks = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "user_annotation" and re.fullmatch(r"step \d+", e["name"])
    )
    steps = _Steps([begin for begin, _ in marks], [end for _, end in marks])
    work = list((_device_work if device["gpu"] else _host_work)(events, steps))
    seconds, idle = (1e-6 * us for us in _times(work, steps, device["gpu"]))
    rows: dict[tuple[str, str], tuple[_Total, dict[str, _Total]]] = {}
    for w in work:
        name = operation_of(w.kernel, w.call)
        variant = short_name(w.kernel) if w.kernel else w.call.removeprefix("aten::")
        if category(name) == OTHER or (not w.kernel and w.call == f"llamac::{name}"):
            variant = ""
        total, shapes = rows.setdefault((name, variant), (_Total(), {}))
        flops = w.share * flops_of(w.call, w.dims)
        total.add(w.us, flops)
        if flops:
            text = " ".join("x".join(map(str, d)) for d in w.dims if isinstance(d, list) and d)
            shapes.setdefault(text, _Total()).add(w.us, flops)
    small = [key for key in rows if category(key[0]) == OTHER and rows[key][0].seconds < SMALL * seconds]
    for total, _ in (rows.pop(key) for key in small):
        rest, _ = rows.setdefault((OTHER, "small ones"), (_Total(), {}))
        rest.calls, rest.seconds = rest.calls + total.calls, rest.seconds + total.seconds
    operations = [
        {
            **{"operation": name, "variant": variant, **total.fields()},
            "shapes": [{"shape": text, **part.fields()} for text, part in shapes.items()],
        }
        for (name, variant), (total, shapes) in sorted(rows.items(), key=lambda row: -row[1][0].seconds)
    ]
    counts = {"steps": len(marks), "seconds": seconds, "idle_seconds": idle}
    return {"runtime": PYTORCH, "device": device, **counts, "operations": operations}


class Profiler:
    """Profiles `count` of the steps 1 to `steps` into the folder `out`: without the first one, in which
    memory is touched and kernels are made, if there are enough. count 0: none.
    """

    def __init__(self, out: str | Path, count: int, steps: int, device: str, dtype: torch.dtype):
        self.out, self.device, self.dtype = Path(out), device, dtype
        self.first = 2 if steps > count > 0 else 1
        self.last = min(steps, self.first + count - 1)
        self.profile: profile | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around the launches of a step."""
        if not self.first <= step <= self.last:
            yield
            return
        if self.profile is None:
            activities = [ProfilerActivity.CPU]
            if self.device != "cpu":
                torch.cuda.synchronize()
                activities.append(ProfilerActivity.CUDA)
            self.profile = profile(activities=activities, record_shapes=True)
            self.profile.start()
        with record_function(f"step {step}"):
            yield

    def is_complete(self, step: int) -> bool:
        """Step `step` was the last to profile, and finish() is due."""
        return self.profile is not None and step == self.last

    def finish(self) -> Path:
        """Waits for the steps, writes trace.json and profile.json; the latter's path."""
        gpu = self.device != "cpu"
        if gpu:
            torch.cuda.synchronize()
        assert self.profile is not None  # is_complete() says so
        self.profile.stop()
        trace = self.out / "trace.json"
        self.profile.export_chrome_trace(str(trace))
        self.profile = None
        device = {
            "name": torch.cuda.get_device_name() if gpu else "CPU",
            "gpu": gpu,
            "peak_tflops": peak_tflops(self.device, self.dtype),
            "copy_gbps": copy_gbps(self.device),
        }
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        path = self.out / "profile.json"
        path.write_text(json.dumps(summarise(events, device), indent=2) + "\n", encoding="utf-8")
        return path
