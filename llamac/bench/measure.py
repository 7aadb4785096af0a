"""Time, rate and memory of one function of llamac.ops and of its baselines, for llamac.bench."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from llamac.base.errors import one_line
from llamac.bench.functions import FUNCTIONS, Function, call_of, differences, outputs_of, sizes
from llamac.bench.timing import Call, Inputs, make_sets, medians_ms
from llamac.bench.torch_operations import DTYPES, SDPA, Case

LARGEST_COPY = 2 << 30  # bytes read and written: the rate grows no more
PRODUCT = {"cuda": 8192, "cpu": 256}  # rows, columns and depth


def baselines_of(name: str, function: Function, mode: str) -> dict[str, Callable]:
    compiled = torch.compile(function.torch, dynamic=False, mode=None if mode == "default" else mode)
    baselines = {"llamac": function.ours, "eager": function.torch, "compile": compiled}
    if name == "attention":
        for kind, backend in SDPA.items():
            baselines[f"sdpa {kind}"] = sdpa_kernel(backend)(function.torch)
    if name == "linear":
        baselines["storage"] = lambda x, weight: F.linear(x, weight)
    return baselines


def memory_of(call: Call, device: str) -> tuple[int | None, int | None]:
    """(peak, extra) bytes of a call that has been made before; None where nobody counts."""
    if device == "cpu":
        return None, None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = outputs_of(call())
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    kept = torch.cuda.memory_allocated() - before
    stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in results}
    return peak, peak - min(sum(stored.values()), kept)  # a view of an input stores nothing of its own


@dataclass(frozen=True)
class Limit:
    calls: dict[str, list[Call]]
    amount: float  # bytes or FLOPs of each of its calls
    unit: str

    def rate(self, ms: dict[str, float]) -> float:
        return self.amount / min(ms[name] for name in self.calls) * 1e3


def limit_of(function: Function, case: Case, moved: float) -> Limit:
    """Of what computes: a square product. Of what moves bytes: two ways to copy as many."""
    device = case.device
    if function.computes:
        n = PRODUCT[device]
        x, weight = (torch.randn(n, n, dtype=DTYPES[case.dtype], device=device) for _ in range(2))
        return Limit({"matmul": [lambda: x @ weight.T]}, 2.0 * n**3, "TFLOP/s")
    count = max(1, int(min(moved, LARGEST_COPY)) // 8)  # of f32 elements, read and written

    def inputs() -> Inputs:
        return {"to": torch.empty(count, device=device), "from": torch.randn(count, device=device)}

    sets = make_sets(inputs, 8 * count)
    memcpy: list[Call] = [partial(s["to"].copy_, s["from"]) for s in sets]
    copy: list[Call] = [partial(torch.neg, s["from"], out=s["to"]) for s in sets]
    return Limit({"memcpy": memcpy, "copy": copy}, 8.0 * count, "GB/s")


def measure(
    name: str, function: Function, case: Case, backward: bool, mode: str, seconds: float
) -> list[dict]:
    """A row for each baseline: its time, rate and memory, or why it has none ("error")."""
    torch.compiler.reset()  # else shapes and operations before this one count towards the recompile limit
    moved, computed = function.work(case, backward)
    rows: dict[str, dict] = {}
    ready: dict[str, list[Call]] = {}
    sets = make_sets(lambda: function.inputs(case), moved)
    douts: list[list[torch.Tensor]] = [[] for _ in sets]  # the outputs' gradients, shared as the inputs are
    leaves = function.leaves if backward else ()
    for baseline_name, baseline in baselines_of(name, function, mode).items():
        rows[baseline_name] = {"baseline": baseline_name}
        try:
            pairs = zip(sets, douts, strict=True)
            calls = [call_of(baseline, inputs, leaves, own) for inputs, own in pairs]
            for call in calls[:3]:
                call()
            peak, extra = memory_of(calls[0], case.device)
        except Exception as error:
            rows[baseline_name]["error"] = one_line(error)
            continue
        rows[baseline_name] |= {"peak_bytes": peak, "extra_bytes": extra}
        ready[baseline_name] = calls
    limit = limit_of(function, case, moved)
    ms = times_of(ready, limit, rows, case.device, seconds)
    amount, top = computed if function.computes else moved, limit.rate(ms)
    for baseline_name in ready.keys() & ms.keys():
        rate = amount / ms[baseline_name] * 1e3
        rows[baseline_name] |= {
            "ms": ms[baseline_name],
            "rate": rate,
            "limit": top,
            "unit": limit.unit,
            "percent": 100 * rate / top,
            "ratio": ms[baseline_name] / ms["llamac"] if "llamac" in ms else None,
        }
    return list(rows.values())


def times_of(
    ready: dict[str, list[Call]], limit: Limit, rows: dict[str, dict], device: str, seconds: float
) -> dict[str, float]:
    """ms by baseline and by the limit's calls: together, or one by one where all their results at once are
    more than the memory holds; what fails alone gets an "error" in its row.
    """
    try:
        return medians_ms(ready | limit.calls, device, seconds)
    except torch.OutOfMemoryError:
        ms = medians_ms(limit.calls, device, seconds)
    for name, calls in ready.items():
        try:
            ms |= medians_ms({name: calls}, device, seconds)
        except torch.OutOfMemoryError as error:
            rows[name]["error"] = one_line(error)
    return ms


def checked(name: str, function: Function, case: Case) -> list[str]:
    """What is outside the tolerance at the same widths and few rows, in float64 as well."""
    size = case.size | {"B": 1, "T": min(64, case.size["T"]), "V": min(4096, case.size["V"])}
    size |= {"N": size["T"], "K": size["V"]}
    try:
        return differences(function, Case(size, case.dtype, case.device))
    except Exception as error:
        return [one_line(error)]


def facts(device: str) -> dict[str, str]:
    """What every row says of where it was measured."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": name, "torch": torch.__version__, "caches": "cold"}


def measure_operation(
    name: str, model: tuple[str, int, int], dtype: str, device: str, mode: str, seconds: float
) -> list[dict]:
    """Rows of one operation, both directions; model: its name, sequences, tokens in each."""
    function, case = FUNCTIONS[name], Case(sizes(*model), dtype, device)
    wrong = checked(name, function, case)
    rows = []
    for direction in ("forward", "forward+backward") if function.leaves else ("forward",):
        try:
            found = measure(name, function, case, direction != "forward", mode, seconds)
        except Exception as error:  # of the device's memory, most likely
            found = [{"baseline": "llamac", "error": one_line(error)}]
        for row in found:
            more = {"wrong": wrong} if row["baseline"] == "llamac" else {}
            head = {"operation": name, "direction": direction, "dtype": dtype, "shape": case.size}
            rows.append(head | row | more)
        if device != "cpu":
            gc.collect()
            torch.cuda.empty_cache()
    return rows
