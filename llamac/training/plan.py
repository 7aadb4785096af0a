"""`llamac plan --model MODEL --devices 8 --device mi300x` searches for the fastest flags of a training run on
devices that this machine need not have, and --out writes them as a configuration. Nothing is measured:
memory and time are the program's estimates, as --dry-run prints them.
"""

import argparse
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamac.base.arguments import Parser, fill, table
from llamac.base.errors import InputError
from llamac.base.folders import CONFIGS
from llamac.base.native import native

# In the order in which they are preferred.
STATES: dict[str, dict[str, str]] = {
    "f32 weights, gradients, moments": {
        "dtype": "bf16", "grad-dtype": "f32", "master-weights": "on", "optimizer-state": "f32"},
    "f32 weights, gradients": {
        "dtype": "bf16", "grad-dtype": "f32", "master-weights": "on", "optimizer-state": "bf16"},
    "bf16 throughout": {
        "dtype": "bf16", "grad-dtype": "bf16", "master-weights": "off", "optimizer-state": "bf16"},
}  # fmt: skip
RECOMPUTE = ("none", "norm", "norm,swiglu", "norm,swiglu,qkv,attention", "block:4", "block:2", "block")
ALIKE = 1.005  # estimates within this ratio do not tell which is faster
MOST_DEVICES = 4096
WIDTH = 100  # of lines of a configuration


@dataclass(frozen=True)
class Plan:
    """flags: those that were searched for. estimate: native.plan's."""

    states: str
    flags: dict[str, Any]
    estimate: dict[str, Any]

    def order(self) -> tuple[int, int, int]:
        recompute = RECOMPUTE.index(self.flags["recompute"])
        return self.flags["zero"], recompute, self.estimate["memory"]

    @property
    def fits(self) -> bool:
        return self.estimate["memory"] <= self.estimate["available"]


@dataclass(frozen=True)
class Search:
    """values: a configuration's, whose micro-batch, recomputation, states and sharding are searched for."""

    values: dict[str, Any]
    device: str
    memory: str

    def plan(self, devices: int, states: str, **flags: Any) -> Plan:
        chosen = {"devices": devices} | STATES[states] | {k.replace("_", "-"): v for k, v in flags.items()}
        layers = [("", json.dumps(values)) for values in (self.values, chosen)]
        return Plan(states, chosen, native.plan(layers, devices, self.device, self.memory))

    def batches(self, devices: int) -> list[int]:
        sequences = self.values["total-batch-size"] // self.values["seq-len"]
        return [b for b in (2**k for k in range(8)) if sequences % (b * devices) == 0]

    def _fitting(self, devices: int, states: str) -> Iterator[Plan]:
        """All that may be the fastest."""
        batches = self.batches(devices)
        for zero in (1, 2, 3) if devices > 1 else (1,):
            for recompute in RECOMPUTE:
                for batch in batches:
                    found = self.plan(devices, states, batch_size=batch, recompute=recompute, zero=zero)
                    if not found.fits:
                        break
                    yield found
                else:  # more recomputation, or sharding, only takes more time
                    if recompute == RECOMPUTE[0]:
                        return
                    break

    def fastest(self, devices: int, states: str) -> Plan | None:
        """Of those that are as fast, the one that shards, recomputes and takes least."""
        found = list(self._fitting(devices, states))
        limit = ALIKE * min((p.estimate["seconds"] for p in found), default=0)
        fast = [p for p in found if p.estimate["seconds"] <= limit]
        return min(fast, key=Plan.order, default=None)

    def least(self, devices: int) -> Plan:
        return self.plan(devices, list(STATES)[-1], batch_size=1, recompute="block", zero=3)


def tokens_of(text: str) -> int:
    """100B, 1.5T, 300M, or a number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([MBT]?)", text)
    count = float(match[1]) * {"": 1, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]] if match else 0
    if not 1 <= count < 2**53:
        raise InputError(f"--tokens: expected a number such as 300M, 100B or 15T, found {text!r}")
    return round(count)


def base_values(args: argparse.Namespace) -> dict[str, Any]:
    """Of --config, or of the configuration with the model's name; else the defaults, on data of one's own."""
    own: dict[str, Any] = {"model": args.model} if args.model else {}
    config, total = args.config or "", 1 << 19
    if not config and (CONFIGS / f"{args.model}.toml").exists():
        config = f"{args.model}.toml"
    if config:
        total = json.loads(native.options(config, [("", "{}")]))["total-batch-size"]
    elif args.model:
        shape = json.loads(native.model(args.model, 1)[2])
        own |= {"train-data": "data/text/train_*.bin", "val-data": "data/text/val_*.bin", "steps": 0}
        own |= {"seq-len": min(shape["max_position_embeddings"], 8192), "out": f"out/{Path(args.model).name}"}
    else:
        raise InputError("expected --model or --config, found neither")
    if args.seq_len:
        own["seq-len"] = args.seq_len
    values = json.loads(native.options(config, [("", json.dumps(own | {"total-batch-size": 0}))]))
    # Every device computes as many sequences.
    total = args.total_batch_size or total or values["batch-size"] * values["seq-len"]
    unit = values["seq-len"] * args.devices
    return values | {"batch-size": 1, "total-batch-size": -(-total // unit) * unit}


def toml(values: dict[str, Any], title: list[str]) -> str:
    """Keys with other values than the defaults."""
    default = json.loads(native.default_options())
    lines = [f"{k} = {json.dumps(v)}" for k, v in values.items() if v != default[k] or k == "model"]
    return "\n".join([*(f"# {line}".rstrip() for line in title), *lines, ""])


def days(seconds: float) -> str:
    count = seconds / 86400
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"


def plan_table(plans: list[Plan], steps: int) -> str:
    """A column per plan: its flags, then its estimates."""
    columns = []
    for plan in plans:
        e = plan.estimate
        columns.append({
            **{flag: str(value) for flag, value in plan.flags.items()},
            "GiB per device": f"{e['memory'] / 2**30:.1f}",
            "micro-batches per step": str(e["micro_batches"]),
            "seconds per step": f"{e['seconds']:.3g}",
            "tokens/s": f"{e['tokens_per_step'] / e['seconds']:,.0f}",
            "days": days(steps * e["seconds"]),
        })  # fmt: skip
    cells = ([name, *(column[name] for column in columns)] for name in columns[0])
    return table(["plan", *(str(number) for number in range(1, len(plans) + 1))], 1, cells)


def refuse(search: Search, devices: int) -> InputError:
    """Of a model that no flags make fit, with the number of devices that it needs."""
    least = search.least(devices)
    e, name = least.estimate, search.values["model"]
    said = (
        f"memory: {name} needs at least {e['memory'] / 2**30:.1f} GiB per device on {devices} x "
        f"{e['device']} of {e['available'] / 2**30:.4g} GiB"
    )
    more = devices
    while more <= MOST_DEVICES:
        more *= 2
        total = search.values["total-batch-size"]
        unit = more * search.values["seq-len"]
        larger = Search(
            search.values | {"total-batch-size": -(-total // unit) * unit}, search.device, search.memory
        )
        if larger.least(more).fits:
            return InputError(f"{said}; it fits on {more} devices: --devices {more}")
    return InputError(f"{said}; it does not fit on {MOST_DEVICES} devices either")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("plan", __doc__)
    parser.add_argument(
        "--model", help="preset or Hugging Face directory; a preset's configuration is the base"
    )
    parser.add_argument("--config", help="TOML file whose other flags the plan keeps")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="number of devices [1]")
    parser.add_argument("--device", default="mi300x", help="their name, for example h200 [mi300x]")
    parser.add_argument("--device-memory", default="", metavar="SIZE", help="memory of each [the device's]")
    parser.add_argument(
        "--tokens", help="training tokens, for example 100B [--config's steps, or 20 per parameter]"
    )
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens per sequence")
    parser.add_argument("--total-batch-size", type=int, metavar="N", help="tokens per optimizer step")
    parser.add_argument("--out", metavar="FILE", help="writes the first plan as a configuration")
    args = parser.parse_args(argv)
    if not 1 <= args.devices <= MOST_DEVICES:
        raise InputError(f"--devices: expected 1 to {MOST_DEVICES}, found {args.devices}")
    return args


def main() -> None:
    args = arguments()
    values = base_values(args)
    search = Search(values, args.device, args.device_memory)
    plans = [plan for states in STATES if (plan := search.fastest(args.devices, states))]
    if not plans:
        raise refuse(search, args.devices)
    best = plans[0]
    e = best.estimate
    per_step = e["tokens_per_step"]
    # Of a model without a configuration, the tokens are those of Hoffmann et al. (arXiv:2203.15556).
    tokens = tokens_of(args.tokens) if args.tokens else values["steps"] * per_step or 20 * e["parameters"]
    steps = math.ceil(tokens / per_step)
    head = (
        f"{values['model']}, {e['parameters']:,} parameters, on {args.devices} x {e['device']} of "
        f"{e['available'] / 2**30:.4g} GiB: {steps:,} steps of {per_step:,} tokens, {tokens:,} in all"
    )
    flags = " ".join(f"--{k} {v}" for k, v in best.flags.items())
    print(fill(head), plan_table(plans, steps), fill(e["assumptions"]), sep="\n\n", end="\n\n")
    print(f"the flags of plan 1:\n  {flags}")
    if args.out:
        chosen = values | best.flags | {"steps": steps}
        chosen["warmup-steps"] = min(values["warmup-steps"], steps)
        title = f"{fill(head, WIDTH)}\n\n{plan_table([best], steps)}\n\n{fill(e['assumptions'], WIDTH)}"
        text = toml(chosen, title.splitlines())
        try:
            Path(args.out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{args.out}: {error.strerror}") from None
        print(f"written: {args.out}; ./train_llama3 --config {args.out} trains with it")
