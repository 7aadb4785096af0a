"""python -m llamac.bench: the functions of llamac.ops as a model calls them, beside PyTorch eager,
torch.compile and Liger (where it is installed), forward and forward with backward.

Widths are those of Llama 3.2 1B, 3.1 8B and 70B at 2 x 8192 tokens; on a CPU the small preset "tiny". Data
is normal. Peers take turns within one run; inputs and outputs rotate through more memory than the caches
hold, so every call finds them cold. On a GPU times are the device's, by events; on a CPU they are the host's.
A time is a median.

Rate: the bytes or FLOPs that the operation's description says it must at least move or compute, by the time.
Limit: a copy of as many bytes (the faster of memcpy and an elementwise kernel), for attention and
linear_cross_entropy a square matrix product, measured in the same run. Peak memory: what a call allocates
beyond its inputs; extra: beyond inputs, outputs and gradients. Ratio: the peer's time by ours.

Writes bench.json, bench.md and a chart bench-PRESET.png to --out. Exit code: 1 where ours failed, 2 for
bad arguments.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from llamac import extension, liger
from llamac.errors import run
from llamac.functions import (
    FUNCTIONS,
    Function,
    call_of,
    case_of,
    differences,
    outputs_of,
    sizes,
)
from llamac.overhead import measure_overhead, overhead_table
from llamac.report import bars, markdown
from llamac.timing import Call, Inputs, make_sets, medians_ms, reason
from llamac.torch_operations import Case

# Model, sequences and tokens in each.
PRESETS = {
    "1b": ("llama3.2-1b", 2, 8192),
    "8b": ("llama3.1-8b", 2, 8192),
    "70b": ("llama3.1-70b", 2, 8192),
    "tiny": ("tiny", 1, 32),
}
DIRECTIONS = ("forward", "forward+backward")
MODES = ("default", "max-autotune-no-cudagraphs")
LARGEST_COPY = 2 << 30  # bytes read and written: the rate grows no more
PRODUCT = {"cuda": 8192, "cpu": 256}  # rows, columns and depth
HEAD = ("operation", "direction", "peer", "ms", "rate", "% of limit", "peak MiB", "extra MiB", "ratio")


@dataclass(frozen=True)
class Peer:
    """prepare: its own inputs from the others', where it wants them otherwise or destroys them."""

    function: Callable
    leaves: tuple[str, ...]
    prepare: Callable[[Inputs], Inputs] | None = None


def peers_of(name: str, function: Function, mode: str) -> dict[str, Peer]:
    leaves = function.leaves
    compiled = torch.compile(function.torch, dynamic=False, mode=None if mode == "default" else mode)
    peers = {
        "ours": Peer(function.ours, leaves),
        "eager": Peer(function.torch, leaves),
        "compile": Peer(compiled, leaves),
    }
    if name == "attention":
        for kind, backend in (
            ("flash", SDPBackend.FLASH_ATTENTION),
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ):
            peers[kind] = Peer(sdpa_kernel(backend)(function.torch), leaves)
    if form := liger.forms().get(name):
        peers["liger"] = Peer(form.function, form.leaves, form.prepare)
    return peers


def calls_of(peer: Peer, sets: list[Inputs], backward: bool) -> list[Call]:
    """A call for each set of inputs."""
    given = [peer.prepare(inputs) if peer.prepare else inputs for inputs in sets]
    leaves = peer.leaves if backward else ()
    return [call_of(peer.function, inputs, leaves) for inputs in given]


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
    stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in results}
    return peak, peak - sum(stored.values())


def copies(bytes_moved: float, device: str) -> dict[str, list[Call]]:
    """The limit of what moves bytes: two ways to copy as many."""
    count = max(1, int(min(bytes_moved, LARGEST_COPY)) // 8)  # of f32 elements, read and written

    def inputs() -> Inputs:
        return {"to": torch.empty(count, device=device), "from": torch.randn(count, device=device)}

    sets = make_sets(inputs, 8 * count)
    return {
        "memcpy": [lambda s=s: s["to"].copy_(s["from"]) for s in sets],
        "copy": [lambda s=s: torch.neg(s["from"], out=s["to"]) for s in sets],
    }


def products(dtype: torch.dtype, device: str) -> dict[str, list[Call]]:
    """The limit of what computes."""
    n = PRODUCT[device]
    x, weight = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    return {"matmul": [lambda: x @ weight.T]}


@dataclass(frozen=True)
class Limit:
    calls: dict[str, list[Call]]
    amount: float  # bytes or FLOPs of each of its calls
    unit: str

    def rate(self, ms: dict[str, float]) -> float:
        return self.amount / min(ms[name] for name in self.calls) * 1e3


def limit_of(function: Function, case: Case, moved: float) -> Limit:
    if function.computes:
        n = PRODUCT[case.device]
        return Limit(products(case.dtype["T"], case.device), 2.0 * n**3, "TFLOP/s")
    calls = copies(moved, case.device)
    amount = 8.0 * max(1, int(min(moved, LARGEST_COPY)) // 8)
    return Limit(calls, amount, "GB/s")


def measure(
    name: str, function: Function, case: Case, backward: bool, mode: str, seconds: float
) -> list[dict]:
    """A row for each peer: its time, rate and memory, or why it has none ("error")."""
    torch.compiler.reset()  # else shapes and operations before this one count towards the recompile limit
    moved, computed = function.work(case, backward)
    rows: dict[str, dict] = {}
    ready: dict[str, list[Call]] = {}
    sets = make_sets(lambda: function.inputs(case), moved)
    for peer_name, peer in peers_of(name, function, mode).items():
        rows[peer_name] = {"peer": peer_name}
        try:
            calls = calls_of(peer, sets, backward)
            for call in calls[:3]:
                call()
            peak, extra = memory_of(calls[0], case.device)
        except Exception as error:
            rows[peer_name]["error"] = reason(error)
            continue
        rows[peer_name] |= {"peak_bytes": peak, "extra_bytes": extra}
        ready[peer_name] = calls
    limit = limit_of(function, case, moved)
    ms = medians_ms(ready | limit.calls, case.device, seconds)
    amount, top = computed if function.computes else moved, limit.rate(ms)
    for peer_name in ready:
        rate = amount / ms[peer_name] * 1e3
        rows[peer_name] |= {
            "ms": ms[peer_name],
            "rate": rate,
            "limit": top,
            "unit": limit.unit,
            "percent": 100 * rate / top,
            "ratio": ms[peer_name] / ms["ours"] if "ours" in ready else None,
        }
    return list(rows.values())


def checked(name: str, function: Function, case: Case) -> list[str]:
    """What breaks the rule at the same widths and few rows, in float64 as well."""
    size = case.size | {"B": 1, "T": min(64, case.size["T"]), "V": min(4096, case.size["V"])}
    size |= {"N": size["T"], "K": size["V"]}
    try:
        return differences(function, Case(name, size, case.dtype, case.absent, case.device))
    except Exception as error:
        return [reason(error)]


def measure_preset(preset: str, names: list[str], options: argparse.Namespace, device: str) -> list[dict]:
    model, batch, length = PRESETS[preset]
    size = sizes(model, batch, length)
    facts = {"device": device_name(device), "torch": torch.__version__, "preset": preset}
    rows = []
    for name in names:
        function, case = FUNCTIONS[name], case_of(name, size, options.dtype, device)
        wrong = checked(name, function, case)
        for direction in DIRECTIONS:
            backward = direction != "forward"
            if backward and not function.leaves:
                continue
            try:
                found = measure(name, function, case, backward, options.compile_mode, options.seconds)
            except Exception as error:  # of the device's memory, most likely
                found = [{"peer": "ours", "error": reason(error)}]
            head = facts | {"operation": name, "direction": direction, "dtype": options.dtype}
            found[0] |= {"wrong": wrong}
            for row in found:
                if trouble := row.get("error") or "; ".join(row.get("wrong", [])):
                    say(f"{preset} {name} {direction} {row['peer']}: {trouble}")
                rows.append(head | row)
            gc.collect()
            if device != "cpu":
                torch.cuda.empty_cache()
    return rows


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def cells(row: dict) -> list[str]:
    head = [row["operation"], row["direction"], row["peer"]]
    if "ms" not in row:
        return [*head, *["-"] * 6]
    rate = row["rate"] * (1e-9 if row["unit"] == "GB/s" else 1e-12)
    memory = [row["peak_bytes"], row["extra_bytes"]]
    ratio = f"{row['ratio']:.2f}" if row["ratio"] is not None else "-"
    return [
        *head,
        f"{row['ms']:.4f}",
        f"{rate:.{0 if rate >= 1000 else 1 if rate >= 10 else 3}f} {row['unit']}",
        f"{row['percent']:.1f}",
        *("-" if bytes_ is None else f"{bytes_ / 2**20:.1f}" for bytes_ in memory),
        ratio + (" CHECK FAILED" if row.get("wrong") else ""),
    ]


def report(rows: list[dict]) -> str:
    """A table a preset."""
    parts = []
    for preset in dict.fromkeys(row["preset"] for row in rows):
        mine = [row for row in rows if row["preset"] == preset]
        head = f"## {preset}: {mine[0]['device']}, PyTorch {mine[0]['torch']}, {mine[0]['dtype']}"
        parts.append(f"{head}\n\n{markdown(HEAD, ['---'] * 3 + ['---:'] * 6, map(cells, mine))}")
    return "\n\n".join(parts) + "\n"


def chart(rows: list[dict], path: Path) -> None:
    """One preset's percents of the limit."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        if "percent" in row:
            label = f"{row['operation']}\n{row['direction']}"
            groups.setdefault(label, {})[row["peer"]] = row["percent"]
    title = f"{rows[0]['preset']}: {rows[0]['device']}, PyTorch {rows[0]['torch']}, {rows[0]['dtype']}"
    bars(groups, title, "% of the device's copy (attention, linear_cross_entropy: of its product)", path)


def draw(rows: list[dict], folder: Path) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return say("no charts: matplotlib is not installed")
    for preset in dict.fromkeys(row["preset"] for row in rows):
        chart([row for row in rows if row["preset"] == preset], folder / f"bench-{preset}.png")


def parse_arguments(arguments: list[str] | None, device: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m llamac.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    presets = ["tiny"] if device == "cpu" else ["1b", "8b", "70b"]
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=presets, help=" ".join(presets))
    parser.add_argument("--operation", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS), metavar="NAME")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16", help="storage")
    parser.add_argument("--compile-mode", choices=MODES, default=MODES[0], help="torch.compile's")
    parser.add_argument("--seconds", type=float, default=0.3, help="of timed calls, a peer and operation")
    parser.add_argument("--overhead", action="store_true", help="the host's time a call instead: tiny shapes")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of the results")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    device = "cuda" if extension.platform() != "cpu" and torch.cuda.is_available() else "cpu"
    options = parse_arguments(arguments, device)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.overhead:
        rows = measure_overhead(options.operation, options.dtype, device)
        for row in rows:
            row |= {"device": device_name(device), "torch": torch.__version__, "dtype": options.dtype}
        text, name = overhead_table(rows), "overhead"
    else:
        rows = []
        for preset in options.preset:
            rows += measure_preset(preset, options.operation, options, device)
            (options.out / "bench.json").write_text(json.dumps(rows, indent=1) + "\n")
        text, name = report(rows), "bench"
        draw(rows, options.out)
    (options.out / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(text)
    print(text, end="")
    return int(any(row["peer"] == "ours" and (row.get("error") or row.get("wrong")) for row in rows))


if __name__ == "__main__":
    run(lambda: sys.exit(main()))
