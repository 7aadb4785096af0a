"""`llamac plan --model MODEL --devices 64 --device mi300x` searches for the fastest flags of a training run
on devices that this machine need not have, and --out writes them as a configuration. It lists meshes (--tp,
--cp, --pp, --zero) with the fastest recomputation and micro-batch of each, the fastest mesh first. Nothing is
measured: memory and time are the program's estimates, as --dry-run prints them.
"""

import argparse
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamac.base.arguments import Parser, check_least, fill, table
from llamac.base.errors import InputError
from llamac.base.files import write_text
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
MOST_STAGES = 16  # of a pipeline
LISTED = 10  # meshes
LONG = 16384  # tokens of a sequence from which context parallelism is searched for
WIDTH = 100  # of lines of a configuration


@dataclass(frozen=True)
class Plan:
    """flags: those that were searched for. estimate: native.plan's."""

    states: str
    flags: dict[str, Any]
    estimate: dict[str, Any]

    def order(self) -> tuple[int, ...]:
        f, memory = self.flags, self.estimate["memory"]
        parts = f["tp"] * f["cp"] * f["pp"]
        return parts, f["zero"], -f["shard-group"], RECOMPUTE.index(f["recompute"]), memory

    @property
    def fits(self) -> bool:
        return self.estimate["memory"] <= self.estimate["available"]

    @property
    def seconds(self) -> float:
        return self.estimate["seconds"]


@dataclass(frozen=True)
class Mesh:
    tp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def parts(self) -> int:
        return self.tp * self.cp * self.pp


def powers_of_2(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length())] if most else []


@dataclass(frozen=True)
class Search:
    """values: a configuration's; mesh, micro-batch, recomputation, states and sharding are searched for."""

    values: dict[str, Any]
    device: str
    memory: str
    per_node: int = 8

    def plan(self, devices: int, states: str, mesh: Mesh = Mesh(), **flags: Any) -> Plan:
        chosen = {"devices": devices, "tp": mesh.tp, "cp": mesh.cp, "pp": mesh.pp, "shard-group": 0}
        chosen |= STATES[states] | {k.replace("_", "-"): v for k, v in flags.items()}
        layers = [("", json.dumps(values)) for values in (self.values, chosen)]
        found = native.plan(layers, devices, self.device, self.memory, self.per_node)
        return Plan(states, chosen, found)

    def batches(self, devices: int, mesh: Mesh = Mesh()) -> list[int]:
        """Sequences per micro-batch of each data-parallel rank."""
        sequences = self.values["total-batch-size"] // self.values["seq-len"]
        ranks = devices // mesh.parts
        return [b for b in powers_of_2(128) if sequences % (b * ranks) == 0]

    def meshes(self, devices: int) -> list[Mesh]:
        """Tensor and context parallelism stay within a node: each layer waits for their exchanges."""
        shape = json.loads(native.model(self.values["model"], 1)[2])
        if shape["model_type"] == "bert":  # on none of these axes
            return [Mesh()] if self.batches(devices) else []
        most_tp = 1 if self.values["frozen-dtype"] == "fp8" else min(self.per_node, devices)
        most_pp = min(shape.get("num_hidden_layers", shape.get("n_layer", 1)), MOST_STAGES)
        long = self.values["seq-len"] >= LONG
        return [
            mesh
            for tp in powers_of_2(most_tp)
            for cp in powers_of_2(self.per_node // tp if long else 1)
            for pp in powers_of_2(most_pp)
            if devices % (mesh := Mesh(tp, cp, pp)).parts == 0 and self.batches(devices, mesh)
        ]

    def _levels(self, devices: int, mesh: Mesh) -> Iterator[tuple[int, int]]:
        """--zero and --shard-group, the fewest exchanges first: groups within a node, or one of all."""
        ranks = devices // (mesh.tp * mesh.pp)
        group = max(1, self.per_node // mesh.tp)
        groups = (group, 0) if 1 < group < ranks and ranks % group == 0 else (0,)
        for zero in (1, 2, 3) if ranks > 1 else (1,):
            yield from ((zero, each) for each in groups)

    def _accepted(self, devices: int, states: str, meshes: list[Mesh], **flags: Any) -> dict[Mesh, Plan]:
        """A plan, with the least micro-batch, of each mesh that the model can have. Raises InputError where
        there is none."""
        plans, refusals = {}, []
        for mesh in meshes:
            try:
                batch = self.batches(devices, mesh)[0]
                plans[mesh] = self.plan(devices, states, mesh, batch_size=batch, **flags)
            except InputError as error:
                refusals.append(error)
        if refusals and not plans:
            raise refusals[0]
        return plans

    def _fitting(self, devices: int, states: str, mesh: Mesh) -> Iterator[Plan]:
        """All that may be the fastest of a mesh."""
        batches = self.batches(devices, mesh)
        for zero, group in self._levels(devices, mesh):

            def plan(recompute: str, batch: int, zero: int = zero, group: int = group) -> Plan:
                flags = {"batch_size": batch, "recompute": recompute, "zero": zero, "shard_group": group}
                return self.plan(devices, states, mesh, **flags)

            if not plan(RECOMPUTE[-1], batches[0]).fits:
                continue
            fitting = []
            for recompute in RECOMPUTE:
                if (found := plan(recompute, batches[0])).fits:
                    fitting.append(found)
                    if recompute == RECOMPUTE[0]:
                        break
            yield from fitting
            # Larger micro-batches are fewer exchanges, and more recomputation makes room for them.
            fastest = min(fitting, key=lambda p: p.seconds)
            for start in [fastest] if zero < 3 else [fastest, fitting[-1]]:
                before = start
                for batch in batches[1:]:
                    found = plan(start.flags["recompute"], batch)
                    if not found.fits or found.seconds * ALIKE > before.seconds:
                        break
                    yield found
                    before = found
            if fitting[0].flags["recompute"] == RECOMPUTE[0]:
                return  # more sharding only takes more time

    def plans(self, devices: int, states: str, count: int = LISTED) -> list[Plan]:
        """The fastest plan of each mesh that fits, the fastest `count` of them. Of equally fast meshes, the
        one that divides, shards, recomputes and takes least is first."""
        # No plan of a mesh is faster than this one, whose memory may not suffice.
        bounds = self._accepted(devices, states, self.meshes(devices), recompute=RECOMPUTE[0], zero=1)
        found: list[Plan] = []
        for mesh, bound in sorted(bounds.items(), key=lambda each: each[1].seconds):
            if len(found) >= count and bound.seconds > ALIKE * sorted(p.seconds for p in found)[count - 1]:
                break
            fitting = list(self._fitting(devices, states, mesh))
            limit = ALIKE * min((p.seconds for p in fitting), default=0)
            found += sorted((p for p in fitting if p.seconds <= limit), key=Plan.order)[:1]
        found.sort(key=lambda p: p.seconds)
        alike = [p for p in found if p.seconds <= ALIKE * found[0].seconds]
        return [*sorted(alike, key=Plan.order), *found[len(alike) :]][:count]

    def least(self, devices: int) -> Plan:
        """Of tensor parallelism within a node and of none, as ranks that share take all else."""
        meshes = [mesh for mesh in self.meshes(devices) if mesh.pp == mesh.cp == 1] or self.meshes(devices)
        plans = self._accepted(devices, list(STATES)[-1], meshes, recompute="block", zero=3)
        return min(plans.values(), key=lambda p: p.estimate["memory"])

    def one_device(self, states: str) -> float:
        """Seconds per step of one device, whose memory is taken to suffice."""
        layers = [("", json.dumps(values)) for values in (self.values, STATES[states])]
        total = self.values["total-batch-size"]
        return native.one_device_seconds(layers, total, self.device, self.memory)


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
    # Unless the number is asked for, every device computes as many sequences.
    total = args.total_batch_size or total or values["batch-size"] * values["seq-len"]
    unit = values["seq-len"] * (1 if args.total_batch_size else args.devices)
    return values | {"batch-size": 1, "total-batch-size": -(-total // unit) * unit}


def toml(values: dict[str, Any], title: list[str]) -> str:
    """Keys with other values than the defaults."""
    default = json.loads(native.default_options())
    lines = [f"{k} = {json.dumps(v)}" for k, v in values.items() if v != default[k] or k == "model"]
    return "\n".join([*(f"# {line}".rstrip() for line in title), *lines, ""])


def days(seconds: float) -> str:
    count = seconds / 86400
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"


def row_of(plan: Plan, steps: int, alone: float) -> dict[str, str]:
    """A plan's flags and estimates, as texts. alone: seconds per step of one device."""
    f, e = plan.flags, plan.estimate
    data = f["devices"] // (f["tp"] * f["cp"] * f["pp"])
    return {
        "tp": str(f["tp"]),
        "cp": str(f["cp"]),
        "pp": str(f["pp"]),
        "dp": str(data),
        "zero": f"{f['zero']}" + (f" in {f['shard-group']}" if f["shard-group"] else ""),
        "batch": str(f["batch-size"]),
        "micro-batches": str(e["micro_batches"]),
        "recompute": f["recompute"],
        "GiB": f"{e['memory'] / 2**30:.1f}",
        "s/step": f"{e['seconds']:.3g}",
        "tokens/s": f"{e['tokens_per_step'] / e['seconds']:,.0f}",
        "% of one": f"{100 * alone / f['devices'] / e['seconds']:.1f}",
        "days": days(steps * e["seconds"]),
    }  # fmt: skip


def plan_table(search: Search, plans: list[Plan], steps: int) -> str:
    """A row per plan, of one choice of states. % of one: tokens per second and device, of those of one device
    alone."""
    alone = search.one_device(plans[0].states)
    rows = [row_of(plan, steps, alone) for plan in plans]
    heading = ["plan", *rows[0]]
    return table(heading, 1, ([str(i), *row.values()] for i, row in enumerate(rows, 1)))


def refuse(search: Search, devices: int) -> InputError:
    """Of a model that no flags make fit, with the number of devices that it needs."""
    least = search.least(devices)
    e, name = least.estimate, search.values["model"]
    said = (
        f"memory: {name} needs at least {e['memory'] / 2**30:.1f} GiB per device on {devices} x "
        f"{e['device']} of {e['available'] / 2**30:.4g} GiB"
    )
    more = devices
    while more < MOST_DEVICES:
        more = min(2 * more, MOST_DEVICES)
        total = search.values["total-batch-size"]
        unit = more * search.values["seq-len"]
        larger = replace(search, values=search.values | {"total-batch-size": -(-total // unit) * unit})
        if larger.least(more).fits:
            return InputError(f"{said}; it fits on {more} devices: --devices {more}")
    return InputError(f"{said}; it does not fit on {MOST_DEVICES} devices either")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("plan", __doc__)
    add = parser.add_argument
    add("--model", help="preset or Hugging Face directory; a preset's configuration is the base")
    add("--config", help="TOML file whose other flags the plan keeps")
    add("--devices", type=int, default=1, metavar="N", help="number of devices [1]")
    add("--device", default="mi300x", help="their name, for example h200 [mi300x]")
    add("--device-memory", default="", metavar="SIZE", help="memory of each [the device's]")
    parser.integer("--devices-per-node", "devices of a machine [8]", 8)
    add("--tokens", help="training tokens, for example 100B [--config's steps, or 20 per parameter]")
    add("--seq-len", type=int, metavar="N", help="tokens per sequence")
    add("--total-batch-size", type=int, metavar="N", help="tokens per optimizer step")
    add("--out", metavar="FILE", help="writes the first plan as a configuration")
    args = parser.parse_args(argv)
    if not 1 <= args.devices <= MOST_DEVICES:
        raise InputError(f"--devices: expected 1 to {MOST_DEVICES}, found {args.devices}")
    check_least(args, devices_per_node=1)
    return args


def main() -> None:
    args = arguments()
    values = base_values(args)
    search = Search(values, args.device, args.device_memory, args.devices_per_node)
    if not search.meshes(args.devices):
        sequences = values["total-batch-size"] // values["seq-len"]
        none = f"no mesh of {args.devices} devices divides {sequences} sequences"
        raise InputError(f"--total-batch-size: {none}")
    plans: list[Plan] = []
    others: list[Plan] = []  # the fastest with fewer bytes per parameter
    for states in STATES:
        if plans:
            others += search.plans(args.devices, states, 1)
        else:
            plans = search.plans(args.devices, states)
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
    print(fill(head), f"estimated, with {best.states}:", plan_table(search, plans, steps), sep="\n\n")
    for plan in others:
        print(f"\nestimated, the fastest with {plan.states}:\n\n{plan_table(search, [plan], steps)}")
    print(f"\n{fill(e['assumptions'])}\n\nthe flags of plan 1:\n  {flags}")
    if args.out:
        chosen = values | best.flags | {"steps": steps}
        chosen["warmup-steps"] = min(values["warmup-steps"], steps)
        estimate = plan_table(search, [best], steps)
        title = f"{fill(head, WIDTH)}\n\n{estimate}\n\n{fill(e['assumptions'], WIDTH)}"
        write_text(Path(args.out), toml(chosen, title.splitlines()))
        print(f"written: {args.out}; ./train_llama3 --config {args.out} trains with it")
