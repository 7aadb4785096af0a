"""llamac bench times the functions of llamac.ops as a model calls them, forward and forward with
backward. Baselines are PyTorch eager and torch.compile; for attention also
scaled_dot_product_attention with FlashAttention-2 and with cuDNN ("sdpa flash", "sdpa cudnn"). linear is in
fp8, and eager uses torch._scaled_mm on a GPU; "storage" is F.linear in --dtype.

Widths are those of Llama 3.2 1B, 3.1 8B and 70B at 2 x 8192 tokens, or on a CPU of the small preset "tiny".
--shape sets other numbers of tokens. The data is normally distributed. All implementations are timed in turn
within one run. Inputs and outputs rotate through more memory than the caches hold, so every call finds them
cold. Times are medians, from device events on a GPU and from the host's clock on a CPU.

Rate: the minimum bytes or FLOPs of the operation's description, divided by the time. Limit: the rate of a
copy of the same number of bytes (the faster of memcpy and an elementwise kernel), or for attention and
linear_cross_entropy of a square matrix product, measured in the same run. Peak memory: the memory that a
call allocates in addition to its inputs; extra: in addition to inputs, outputs and gradients. Ratio: the
baseline's time divided by llamac's.

--hf trains a model by Hugging Face and by llamac instead; `llamac bench --hf --help` explains it.

Writes bench.json, bench.md and a chart bench-PRESET.png to --out. The exit code is 1 if llamac failed, and 2
for bad arguments.
"""

import argparse
import itertools
import sys
from pathlib import Path

from llamac.base.errors import InputError
from llamac.base.version import provenance, provenance_text
from llamac.bench import harness, hf
from llamac.bench.harness import say
from llamac.bench.report import Bar, bars, can_draw, markdown

# Model, sequences and tokens in each.
PRESETS = {
    "1b": ("llama3.2-1b", 2, 8192),
    "8b": ("llama3.1-8b", 2, 8192),
    "70b": ("llama3.1-70b", 2, 8192),
    "tiny": ("tiny", 1, 32),
}
Shape = tuple[int, int]
LONGEST = 120.0  # percent in a chart: one call that the caches serve would make all other bars short
LIMITS = {"GB/s": "% of the device's copy of as many bytes", "TFLOP/s": "% of the device's matrix product"}
MODES = ("default", "max-autotune-no-cudagraphs")
HEAD = ("operation", "direction", "baseline", "ms", "rate", "% of limit", "peak MiB", "extra MiB", "ratio")


def where(row: dict) -> str:
    return f"{row['device']}, PyTorch {row['torch']}, {row['dtype']}"


def cells(row: dict) -> list[str]:
    head = [row["operation"], row["direction"], row["baseline"]]
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
    """A table per preset."""
    parts = []
    for preset in dict.fromkeys(row["preset"] for row in rows):
        mine = [row for row in rows if row["preset"] == preset]
        head = f"## {preset}: {where(mine[0])}, {provenance_text(mine[0])}"
        parts.append(f"{head}\n\n{markdown(HEAD, ['---'] * 3 + ['---:'] * 6, map(cells, mine))}")
    return "\n\n".join(parts) + "\n"


def chart(rows: list[dict], path: Path) -> None:
    """One preset's percents of the limit: a panel for a copy's, one for a matrix product's. Behind a
    baseline's bar, how many times as fast llamac is.
    """
    panels: dict[str, dict[str, dict[str, Bar]]] = {}
    for row in rows:
        if "percent" in row:
            label = f"{row['operation']}\n{row['direction']}"
            known = row["ratio"] is not None and row["baseline"] != "llamac"
            times = f"   {row['ratio']:.2f}x" if known else ""
            groups = panels.setdefault(LIMITS[row["unit"]], {})
            groups.setdefault(label, {})[row["baseline"]] = Bar(
                row["percent"], f"{row['percent']:.3g}%{times}"
            )
    title = f"{rows[0]['preset']}: {where(rows[0])}\n{provenance_text(rows[0])}"
    title += "\n2.00x: llamac takes half the time"
    bars(panels, title, path, LONGEST, 100)


def draw(rows: list[dict], folder: Path) -> None:
    if not can_draw():
        return
    for preset in dict.fromkeys(row["preset"] for row in rows):
        chart([row for row in rows if row["preset"] == preset], folder / f"bench-{preset}.png")


def shape(text: str) -> Shape:
    sequences, _, tokens = text.partition("x")
    if not (sequences.isdecimal() and tokens.isdecimal() and int(sequences) and int(tokens)):
        raise argparse.ArgumentTypeError(f"{text}: expected sequences x tokens in each, as 8x2048")
    return int(sequences), int(tokens)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__, prog="llamac bench")
    add = parser.add_argument
    add("--preset", nargs="+", choices=PRESETS, help="1b 8b 70b on a GPU, tiny on a CPU")
    add("--operation", nargs="+", default=[], help="only these functions of llamac.ops")
    shapes = "sequences x tokens, for example 8x2048, instead of 2x8192"
    add("--shape", nargs="+", type=shape, default=[], help=shapes)
    add("--dtype", choices=("bf16", "f32"), default="bf16", help="storage type")
    add("--compile-mode", choices=MODES, default=MODES[0], help="mode of torch.compile")
    add("--seconds", type=float, default=0.3, help="time per baseline and operation")
    add("--hf", action="store_true", help="compare training with Hugging Face, with flags of its own")
    add("--out", type=Path, default=Path("out/bench"), help="folder for the results")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if "--hf" in words:
        return hf.main([word for word in words if word != "--hf"])
    options = parse_arguments(arguments)
    try:
        from llamac.base import extension
        from llamac.bench import measure

        device = extension.device()
    except ImportError as error:
        raise InputError(f"{error} (llamac doctor says more)") from None
    if (advice := extension.without_gpu()) and measure.torch.cuda.is_available():
        raise InputError(f"the GPU cannot be measured: {advice}")
    facts = measure.facts(device) | provenance()
    names = options.operation or list(measure.FUNCTIONS)
    for name in set(names) - measure.FUNCTIONS.keys():
        raise InputError(f"--operation {name}: expected one of {', '.join(measure.FUNCTIONS)}")
    for name in names[:]:
        if why := measure.FUNCTIONS[name].unsupported(device):
            say(f"{name} is left out: {why}")
            names.remove(name)
    rows: list[dict] = []

    presets = options.preset or (["tiny"] if device == "cpu" else ["1b", "8b", "70b"])
    for preset, of_shape, name in itertools.product(presets, options.shape or [None], names):
        model, *default = PRESETS[preset]
        sequences, tokens = of_shape or default
        head = {"preset": f"{preset}-{sequences}x{tokens}" if of_shape else preset}
        head["compile_mode"] = options.compile_mode
        case = (name, (model, sequences, tokens), options.dtype, device)
        for row in measure.measure_operation(*case, options.compile_mode, options.seconds):
            if trouble := row.get("error") or "; ".join(row.get("wrong", [])):
                say(f"{row['operation']} {row['direction']} {row['baseline']}: {trouble}")
            rows.append(facts | head | row)
        harness.write(options.out / "bench.json", rows, report(rows))
    draw(rows, options.out)
    print(report(rows), end="")
    return int(any(row["baseline"] == "llamac" and (row.get("error") or row.get("wrong")) for row in rows))
