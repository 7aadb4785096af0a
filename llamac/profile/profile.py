"""`llamac profile OUT` reports from OUT/profile.json how a step spends its time, with advice.

`read()` reads a `Profile`, and `report()` makes the same report of a `Profile` from any source.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamac.base.arguments import Parser, fill, table
from llamac.base.errors import printable
from llamac.base.files import Kind, read_json

# An operation belongs to the category whose prefix its name begins with, and to OTHER where none does. The
# number: the share of its limit that good kernels of that kind reach. Measured on an H200 (docs/benchmarks):
# cuBLAS 0.81 of the published peak, cuDNN's attention 0.64 forward and 0.49 backward, ours 0.85 to 1.0
# of a copy. A copy to or from the host has no limit here: it is the link's, not the device's.
CATEGORIES = {
    "GEMM": (0.80, ("matmul", "scaled_matmul")),
    "attention": (0.55, ("attention", "repeat_kv")),
    "norm": (0.90, ("rmsnorm", "residual_rmsnorm", "layernorm", "residual_layernorm", "qk_norm_rope")),
    "RoPE": (0.90, ("rope", "precompute_cis")),
    "bias": (0.85, ("bias",)),
    "SwiGLU": (0.90, ("swiglu",)),
    "GELU": (0.90, ("gelu",)),
    "loss": (
        0.90,
        ("cross_entropy", "linear_cross_entropy", "mean_loss", "scale_loss", "argmax", "softmax_parts"),
    ),
    "quantization": (0.90, ("quantize", "update_scales", "scale_rows")),
    "optimizer": (0.90, ("adamw", "global_norm", "update_loss_scale")),
    "embedding": (0.90, ("embedding", "token_positions", "vocabulary_ids")),
    "verification": (0.90, ("hash",)),
    "initial weights": (0.50, ("fill_normal",)),
    "communication": (
        1.0,
        ("communication", "all_gather", "all_reduce", "broadcast", "reduce_scatter", "convert"),
    ),
    "copy": (1.0, ("copy",)),
}
OTHER, IDLE = "other", "idle"

MUCH_IDLE, MUCH_COPY, MUCH_EXPOSED, MUCH_OTHER, LITTLE = 0.05, 0.02, 0.02, 0.05, 0.01  # shares of a step


@dataclass(frozen=True)
class Row:
    """One operation and variant, or one shape of it, over all profiled steps. flops, bytes: the least that
    the calls had to compute and move."""

    operation: str
    variant: str
    calls: int
    seconds: float
    flops: float
    bytes: float
    shape: str = ""
    shapes: tuple["Row", ...] = ()
    others: tuple[str, ...] | None = None  # variants that take the same calls; None: not known


@dataclass(frozen=True)
class Profile:
    """peak_tflops: of matrix products in the run's type. copy_gbps: read and written. None: not known."""

    device: str
    gpu: bool
    peak_tflops: float | None
    copy_gbps: float | None
    steps: int
    seconds: float  # of all profiled steps
    idle_seconds: float  # of them, without any operation, copy or collective
    rows: tuple[Row, ...]
    exposed_seconds: float = 0.0  # with collectives alone


# Reading


def _is_amount(value) -> bool:
    """Within bounds that keep products and quotients of two amounts finite."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return known and (value == 0 or 1e-30 < value < 1e30)


_EXPOSED = "exposed_communication_seconds"
_POSITIVE = Kind("a number above 0", lambda value: _is_amount(value) and value > 0)
_AMOUNT = Kind("a number of at least 0", _is_amount)
_TOTALS = dict.fromkeys(("calls", "seconds", "flops", "bytes"), _AMOUNT)
_SHAPES = {"shapes": ([_TOTALS | {"shape": str}], None)}  # files that know nothing of them have none
_KIND = {
    "device": {"name": str, "gpu": bool, "peak_tflops": (_POSITIVE, None), "copy_gbps": (_POSITIVE, None)},
    "operations": [{"operation": str, "variant": str, "others": ([str], None)} | _TOTALS | _SHAPES],
    "steps": _POSITIVE,
    "seconds": _POSITIVE,
    "idle_seconds": _AMOUNT,
    _EXPOSED: (_AMOUNT, None),
}


def _row(values: dict) -> Row:
    def row(part: dict, **more: Any) -> Row:
        totals: dict[str, Any] = {key: part[key] for key in _TOTALS}
        return Row(values["operation"], values["variant"], **totals, **more)

    others, shapes = values.get("others"), values.get("shapes") or ()
    return row(
        values,
        shapes=tuple(row(part, shape=part["shape"]) for part in shapes),
        others=None if others is None else tuple(others),
    )


def read(path: str | Path) -> Profile:
    """The profile.json of a run. Raises InputError naming the file and the field."""
    values = read_json(path, _KIND)
    device, rows = values["device"], tuple(map(_row, values["operations"]))
    rates = {key: device.get(key) for key in ("peak_tflops", "copy_gbps")}
    times = {key: values[key] for key in ("steps", "seconds", "idle_seconds")}
    exposed = values.get(_EXPOSED) or 0.0
    return Profile(device["name"], device["gpu"], **rates, **times, rows=rows, exposed_seconds=exposed)


# Judging


def category(operation: str) -> str:
    """The category that an operation's time counts to."""
    for name, (_, prefixes) in CATEGORIES.items():
        if operation.startswith(prefixes):
            return name
    return OTHER


def limit(profile: Profile, row: Row) -> tuple[float, str] | None:
    """The least seconds that the row could take, and by what: "memory" (its bytes at the device's copy rate)
    or "compute" (its FLOPs at the peak). None where that rate is not known, or does not apply."""
    if category(row.operation) in ("copy", "communication"):
        return None
    limits = []
    if profile.peak_tflops:
        limits.append((row.flops / profile.peak_tflops / 1e12, "compute"))
    if profile.copy_gbps:
        limits.append((row.bytes / profile.copy_gbps / 1e9, "memory"))
    largest = max(limits, default=(0.0, ""))
    return largest if largest[0] > 0 else None


def gain(profile: Profile, row: Row) -> float:
    """Seconds that the row would save if it came as near to its limit as good kernels of its kind do."""
    least = limit(profile, row)
    usual = CATEGORIES.get(category(row.operation), (0.9,))[0]
    return max(0.0, row.seconds - least[0] / usual) if least else 0.0


def shares(profile: Profile) -> dict[str, float]:
    """Seconds of each category that took any, the largest first, then idle. Work on two streams at once
    counts twice, so their sum may be more than the steps took."""
    seconds: dict[str, float] = {}
    for row in profile.rows:
        name = category(row.operation)
        seconds[name] = seconds.get(name, 0.0) + row.seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1])) | {IDLE: profile.idle_seconds}


def advice(profile: Profile) -> list[str]:
    """What to do next, one sentence or two each, the largest gain first."""
    seconds = shares(profile)
    found = [(gain(profile, row), row) for row in profile.rows]
    found = sorted((g for g in found if g[0] > LITTLE * profile.seconds), key=lambda g: -g[0])
    lines = [(saved, _about_row(profile, row, saved)) for saved, row in found[:3]]
    idle, copies = seconds[IDLE] / profile.seconds, seconds.get("copy", 0.0) / profile.seconds
    if idle > MUCH_IDLE:
        cure = "look for work outside the operations"
        if profile.gpu:
            cure = (
                "compare ms of profiled and other steps in log.jsonl (those replay graphs, unless --graphs "
                "off), give it more to do (--batch-size), wait for nothing in a step"
            )
        text = f"{IDLE}: {idle:.1%} of the step nothing runs; trace.json shows where. Then {cure}."
        lines.append((seconds[IDLE], text))
    if profile.exposed_seconds > MUCH_EXPOSED * profile.seconds:
        text = (
            f"communication: {profile.exposed_seconds / profile.seconds:.1%} of the step is spent in "
            "collectives alone. Give each rank more to do (--batch-size, more micro-batches), share less "
            "(--zero)."
        )
        lines.append((profile.exposed_seconds, text))
    if copies > MUCH_COPY:
        text = f"copy: {copies:.1%} of the step. Pin the host's memory, copy on a separate stream, copy less."
        lines.append((seconds["copy"], text))
    if seconds.get(OTHER, 0.0) > MUCH_OTHER * profile.seconds:
        lines.append((seconds[OTHER], _about_other(profile, seconds[OTHER])))
    texts = [text for _, text in sorted(lines, key=lambda line: -line[0])]
    if not texts:
        texts.append(
            "Every operation is about as near to its limit as its kind gets. What is left is to do less: a "
            "larger --batch-size, less recomputation, fewer bytes of optimizer state, fused operations."
        )
    for known, what in ((profile.peak_tflops, "peak"), (profile.copy_gbps, "copy rate")):
        if not known:
            texts.append(f"The {what} of {profile.device} is not known, so this limit is not judged.")
    return texts


EXPLAINING = ("naive", "reference")  # variants that are there to be read, and never the fastest


def _variants(row: Row) -> str:
    """Which others to try, and how."""
    listing = f"./train_llama3 --list-kernels {row.operation}"
    if row.others is None:
        return f"try its other variants ({listing} names them; --kernel {row.operation}=NAME)"
    others = [name for name in row.others if name not in EXPLAINING]
    if not others:
        return f"no other fast variant takes these calls ({listing} says why)"
    return "try " + " or ".join(f"--kernel {row.operation}={name}" for name in others)


def _about_row(profile: Profile, row: Row, saved: float) -> str:
    """In plain words: how far an operation is from its limit, which shape is to blame, what to try."""
    ms = 1e3 / profile.steps
    least, by = limit(profile, row) or (0.0, "")
    usual = CATEGORIES.get(category(row.operation), (0.9,))[0]
    worst = max(row.shapes, key=lambda shape: gain(profile, shape), default=None)
    blame = f", most of it at {worst.shape}" if worst and len(row.shapes) > 1 else ""
    cure = _variants(row)
    if by == "memory":
        cure += ", or fuse it with its neighbor: fewer bytes move then"
    elif by == "compute" and profile.gpu:
        cure += ", tune it for these shapes, count how busy the matrix cores are (docs/profiling.md)"
    return (
        f"{label(row)}: {row.seconds * ms:.3f} ms a step, {least / row.seconds:.0%} of its {by} limit; its "
        f"kind reaches {usual:.0%}: {saved * ms:.3f} ms ({saved / profile.seconds:.1%} of the step) to "
        f"win{blame}. Next: {cure}."
    )


def _about_other(profile: Profile, seconds: float) -> str:
    """What the work of no category is: it has no limit to be judged by."""
    rows = (row for row in profile.rows if category(row.operation) == OTHER)
    largest = sorted(rows, key=lambda row: -row.seconds)[:3]
    names = ", ".join(f"{label(row)} {row.seconds / profile.seconds:.1%}" for row in largest)
    return (
        f"{OTHER}: {seconds / profile.seconds:.1%} of the step is work of no known operation, without a "
        f"limit to judge it by; the largest: {names}. Next: find its caller in trace.json."
    )


def label(row: Row) -> str:
    return f"{row.operation} ({row.variant})" if row.variant else row.operation


# Printing


def _category_cells(profile: Profile) -> Iterable[list[str]]:
    for name, seconds in shares(profile).items():
        rows = [row for row in profile.rows if category(row.operation) == name]
        limits = [limit(profile, row) for row in rows]
        known = bool(rows) and all(limits)
        least = math.fsum(found[0] for found in limits if found) if known else 0.0
        yield [
            name,
            f"{1e3 * seconds / profile.steps:.3f}",
            f"{seconds / profile.seconds:.1%}",
            f"{1e3 * least / profile.steps:.3f}" if known else "-",
            f"{least / seconds:.0%}" if known and seconds else "-",
        ]


def _operation_cells(profile: Profile) -> Iterable[list[str]]:
    for row in sorted(profile.rows, key=lambda row: -row.seconds):
        least = limit(profile, row)
        rate = 1 / row.seconds if row.seconds else 0.0
        yield [
            row.operation,
            row.variant,
            f"{row.calls / profile.steps:.0f}",
            f"{1e3 * row.seconds / profile.steps:.3f}",
            f"{row.seconds / profile.seconds:.1%}",
            f"{1e-12 * row.flops * rate:.3g}",
            f"{1e-9 * row.bytes * rate:.3g}",
            f"{1e3 * least[0] / profile.steps:.3f} {least[1]}" if least else "-",
            f"{least[0] / row.seconds:.0%}" if least and row.seconds else "-",
        ]


def headline(profile: Profile) -> str:
    peak = f"{profile.peak_tflops:,.4g} TFLOP/s" if profile.peak_tflops else "peak not known"
    copy = f"copies {profile.copy_gbps:,.4g} GB/s" if profile.copy_gbps else "copy rate not known"
    step_ms = 1e3 * profile.seconds / profile.steps
    return f"{profile.device}, {peak}, {copy}; {profile.steps:g} steps of {step_ms:.3f} ms"


def report(profile: Profile) -> str:
    """Shares by category, each operation against its own limit, and what to do next: text of many lines."""
    categories = table(("category", "ms/step", "share", "limit ms", "of limit"), 1, _category_cells(profile))
    heading = ("operation", "variant", "calls", "ms/step", "share", "TFLOP/s", "GB/s", "limit ms", "of limit")
    operations = table(heading, 2, _operation_cells(profile))
    following = "\n".join(fill(f"{k}. {text}") for k, text in enumerate(advice(profile), 1))
    return f"{headline(profile)}\n\n{categories}\n\n{operations}\n\nWhat to do next\n{following}\n"


def main() -> None:
    parser = Parser("profile", "Show how a step spends its time, from OUT/profile.json, with advice.")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of a run with --profile")
    path = parser.parse_args().out / "profile.json"
    sys.stdout.write(printable(report(read(path))))
