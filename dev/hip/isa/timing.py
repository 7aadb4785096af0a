#!/usr/bin/env python3
"""Predicts the times of gfx942 kernels from their code objects, without a GPU, beside published times.

timing_cases.toml says which kernels: facts alone. Code objects of others are read from the folder that
LLAMAC_TIMING_OBJECTS names, our own from build/resources (dev/hip/resources.py). What is absent is left out.

Per case: the time by the simulator (timing_unit.py) and its clock, the published time and the error, the
rate, and the time without any overlap. Per kernel: the share of the matrix units' peak, what waves waited
for, and a simple model, `count`: the cycles of MFMA and of vector issue.

--fit chooses the free numbers on all families of kernels but one, for each family in turn, and prints the
errors on that one.
"""

import heapq
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median

import numpy as np
from timing_kernel import load
from timing_unit import SIMDS, Memory, Numbers, Unit, Wave, numbers, table

from build import ROOT, Error, program_parser, start

CASES = Path(__file__).with_name("timing_cases.toml")
OURS = ROOT / "build/resources/gfx942"
ISSUES = 10_000  # instructions of a wave that are simulated, about


@dataclass(frozen=True)
class Clock:
    """The clock model's free numbers (timing_numbers.toml, [clock])."""

    waiting: float
    vector: float
    eight_bit: float
    attention: float
    exponent: float
    launch: float  # microseconds
    fixed: float

    @classmethod
    def read(cls, rule: str) -> "Clock":
        values = {name: entry["value"] for name, entry in table()["clock"].items()}
        return cls(**(values | table()["rule"][rule]["clock"]))

    def power(self, matrix: float, vector: float, kind: str) -> float:
        """Of a load that uses the matrix and the vector units for these shares of its time."""
        weight = {"gemm": 1.0, "eight_bit": self.eight_bit, "attention": self.attention}[kind]
        return weight * matrix + self.vector * vector

    def ghz(self, chip: dict, matrix: float, vector: float, kind: str, share: float) -> float:
        """share: of the time in which units are in their loops. A power limit holds for longer than that."""
        if "gemm" not in chip:
            return self.fixed
        known = chip["gemm"]
        power = self.power(matrix, vector, kind) / self.power(known["matrix"], known["vector"], "gemm")
        power *= share + self.waiting * (1 - share)
        return min(chip["peak"]["value"], known["value"] * power**-self.exponent)


@dataclass(frozen=True)
class Rounds:
    """Blocks that share a compute unit: cycles are first + each * rounds of the loop."""

    first: float
    each: float
    matrix: float  # shares of the SIMDs' time in the steady state
    vector: float
    stalls: Counter

    def cycles(self, rounds: float) -> float:
        return self.first + self.each * rounds


@dataclass(frozen=True)
class Case:
    """A call of a kernel. tail: of its last blocks, how many are split, and into how many parts."""

    shape: tuple[int, ...]
    ms: float  # published, or 0
    tail: tuple[int, int]


class Entry:
    """A kernel of timing_cases.toml with its cases."""

    def __init__(self, facts: dict, path: Path, conflicts: dict[str, dict[str, int]]):
        self.facts, self.name, self.family = facts, facts["name"], facts["family"]
        self.kernel = load(path, facts.get("symbol", ""))
        self.chip = table()["chips"][facts["chip"]]
        self.cases = [
            Case(tuple(row[:-1]), row[-1], tail)
            for row, tail in zip_longest(facts["cases"], facts.get("tails", []), fillvalue=[0, 1])
        ]
        loops = [
            tuple(loop) if isinstance(loop, list) else self.kernel.loops[loop]
            for loop in facts.get("loops", [0])
        ]
        taken = facts.get("taken", [[]] * len(loops))
        loops = loops if len(loops) == len(taken) else loops * len(taken)
        again = {int(k): count for k, count in facts.get("again", {}).items()}
        self.parts = [self.kernel.parts(loop, frozenset(t), again) for loop, t in zip(loops, taken)]
        self.body = [self.kernel.code[k if k >= 0 else ~k] for k in self.parts[0][1]]
        found = sum(i.kind == "mfma" for i in self.body)
        if found != facts["mfma"]:
            raise ValueError(f"{path}: {self.name}: expected {facts['mfma']} MFMAs in a loop, found {found}")
        eight_bit = any(re.search(r"mfma.*_(i8|fp8|bf8)", i.name) for i in self.body)
        self.kind = "eight_bit" if eight_bit else facts["work"]
        self.waves = -(-self.kernel.threads // 64)
        self.resident = self.kernel.resident(facts.get("lds", 0))
        code = self.kernel.code
        index = {i.address - code[0].address: k for k, i in enumerate(code)}
        cycles = {index[int(at)]: count for at, count in conflicts.get(self.kernel.name, {}).items()}
        self.memory = Memory(facts.get("l1", 0.0), facts.get("far", 0.0), cycles)
        self.known: dict[tuple, Rounds] = {}
        self.grids: dict[tuple, tuple[float, float]] = {}

    def numbers(self, n: Numbers, clock: Clock) -> Numbers:
        chip = self.chip
        ghz = chip.get("gemm", {}).get("value", clock.fixed)
        per_cycle = chip["far"]["value"] / chip["units"] / (ghz * 1e9)
        return replace(n, far_bytes=round(per_cycle, 1), mfma_hold=chip.get("mfma_hold", n.mfma_hold))

    def unit(self, resident: int, rounds: int, n: Numbers) -> Unit:
        waves = []
        for block in range(resident):
            for w in range(self.waves):
                before, body, after = self.parts[w * len(self.parts) // self.waves]
                waves.append(Wave(before + body * rounds + after, block, w))
        return Unit(self.kernel.code, waves, n, self.memory)

    def rounds(self, resident: int, n: Numbers) -> Rounds:
        key = resident, n
        if key not in self.known:
            more = max(2, min(8, ISSUES // len(self.body)))  # the steady state: what these rounds add
            start = more // 2
            if resident > 1:  # the oldest goes first, and must be in its loop while another starts or ends
                start, more = 4 * more, 4 * more
            few, many = self.unit(resident, start, n), self.unit(resident, start + more, n)
            short, long = few.run(), many.run()
            cycles = long - short
            matrix, vector = (
                (many.busy[kind] - few.busy[kind]) / cycles / SIMDS for kind in ("matrix", "vector")
            )
            stalls: Counter[str] = Counter()
            for w in many.waves:
                stalls += w.stalls
            total = sum(w.done for w in many.waves)
            stalls = Counter({name: share / total for name, share in stalls.items()})
            each = cycles / more
            self.known[key] = Rounds(short - start * each, each, matrix, vector, stalls)
        return self.known[key]

    def jobs(self, case: Case) -> list[tuple[float, float]]:
        """Per block, in the order of their start: how often it begins and how many rounds it does."""
        facts, shape = self.facts, case.shape
        if facts["work"] == "gemm":
            m, n, k = shape
            tile_m, tile_n, step = facts["tile"]
            return [(1, k / step)] * (-(-m // tile_m) * -(-n // tile_n))
        batch, heads, length, _ = shape
        rows, step = facts["tile"]
        tiles = -(-length // rows)
        each = [length / step] * tiles
        if facts.get("causal"):  # the longest first
            each = [(i + 1) * rows / step for i in range(tiles)]
            each = each[::-1] if facts["causal"] != "pairs" else each
        jobs = [(1.0, r) for r in each]
        if facts.get("causal") == "pairs":  # a block does the first and the last tile, and so on
            jobs = [(2.0, each[i] + each[-i - 1]) for i in range(tiles // 2)]
        jobs = [job for job in jobs for _ in range(batch * heads)]
        blocks, parts = case.tail
        if blocks:
            jobs = jobs[: len(jobs) - blocks] + [(1.0, length / step / parts)] * (blocks * parts)
        return jobs

    def operations(self, case: Case) -> float:
        shape = case.shape
        if self.facts["work"] == "gemm":
            return 2.0 * shape[0] * shape[1] * shape[2]
        batch, heads, length, depth = shape
        whole = self.facts["products"] * 2.0 * batch * heads * length**2 * depth
        return whole / 2 if self.facts.get("causal") else whole

    def grid(self, case: Case, n: Numbers) -> tuple[float, float]:
        """Cycles, and the share of them in which a compute unit's blocks are in their loop."""
        key = tuple(case.shape), n
        if key not in self.grids:
            self.grids[key] = self.schedule(case, n)
        return self.grids[key]

    def schedule(self, case: Case, n: Numbers) -> tuple[float, float]:
        """Blocks go to the XCDs in turn, on each to the compute unit with the fewest."""
        jobs = self.jobs(case)[:: self.chip["xcds"]]
        units = self.chip["units"] // self.chip["xcds"]
        per_unit = -(-len(jobs) // units)
        by = {r: self.rounds(r, n) for r in range(1, min(self.resident, per_unit) + 1)}

        def duration(job: tuple[float, float], resident: int) -> float:
            return job[0] * by[resident].first + job[1] * by[resident].each

        held: list[list[list]] = [[] for _ in range(units)]  # per unit: [job, share left]
        since, version = [0.0] * units, [0] * units
        events: list[tuple[float, int, int]] = []
        queue, time, busy = iter(jobs), 0.0, 0.0

        def note(u: int) -> None:
            version[u] += 1
            if held[u]:
                left = min(share * duration(job, len(held[u])) for job, share in held[u])
                heapq.heappush(events, (since[u] + left, u, version[u]))

        changed = set(range(units))
        while True:
            for _ in range(len(by)):  # a block for each compute unit with room, before another for any
                fewest = min(map(len, held))
                for u in range(units):
                    if len(held[u]) == fewest < len(by) and (job := next(queue, None)):
                        held[u].append([job, 1.0])
                        changed.add(u)
            for u in changed:
                note(u)
            changed = set()
            while events and (not changed or events[0][0] <= time):
                ends, u, number = heapq.heappop(events)
                if number != version[u]:
                    continue
                time = max(time, ends)
                for block in held[u]:
                    block[1] -= (time - since[u]) / duration(block[0], len(held[u]))
                busy += time - since[u]
                since[u] = time
                held[u] = [block for block in held[u] if block[1] > 1e-9]
                changed.add(u)
            if not changed:
                break
        steady = by[max(by)]
        inside = sum(steady.each * rounds for _, rounds in jobs)
        return time, busy / units / time * inside / sum(duration(job, max(by)) for job in jobs)

    def clock(self, case: Case, n: Numbers, clock: Clock) -> float:
        steady, (_, share) = self.rounds(self.resident, n), self.grid(case, n)
        return clock.ghz(self.chip, steady.matrix, steady.vector - self.issue_share(steady), self.kind, share)

    def issue_share(self, steady: Rounds) -> float:
        """The MFMAs' own issue, which counts as vector time."""
        cycles = [i.cycles for i in self.body if i.kind == "mfma"]
        return steady.matrix * 4 * len(cycles) / max(1, sum(cycles))

    def milliseconds(self, case: Case, n: Numbers, clock: Clock) -> float:
        n = self.numbers(n, clock)
        compute = self.grid(case, n)[0] / self.clock(case, n, clock) / 1e6
        shape = case.shape
        elements = 1.0 if self.facts["work"] == "gemm" else shape[0] * shape[1] * shape[2] * shape[3]
        beside = self.facts.get("beside", 0) * elements / table()["memory"]["copy"]["value"] * 1e3
        return compute + beside + clock.launch * 1e-3 * self.facts.get("launches", 1)

    def count_cycles(self) -> float:
        """MFMA and vector issue of a SIMD's waves per round of the loop, one after the other."""
        waves = self.waves * self.resident / SIMDS
        issue = sum({"vector": 4, "packed": 4, "mfma": 4, "trans": 16}.get(i.kind, 0) for i in self.body)
        return waves * (issue + sum(i.cycles for i in self.body if i.kind == "mfma"))


def entries(only: str, conflicts: dict[str, dict[str, int]]) -> list[Entry]:
    """Those that can be simulated; of a sum all or none."""
    folder = os.environ.get("LLAMAC_TIMING_OBJECTS")
    families = tomllib.loads(CASES.read_text())["family"]
    found, lost = [], set()
    for facts in (
        {"family": name} | family | k for name, family in families.items() for k in family["kernels"]
    ):
        root = OURS if facts["family"] == "llamac" else Path(folder) if folder else None
        if root is None or not re.search(only, facts["name"]):
            continue
        path = root / facts["object"]
        left_out = "" if path.exists() else f"{path}: absent"
        if not left_out:
            try:
                found.append(Entry(facts, path, conflicts))
            except ValueError as error:
                if facts["family"] != "llamac":
                    raise
                left_out = f"another compiler's code: {error}"  # with other branches than the table's
        if left_out:
            lost.add(facts.get("sum", facts["name"]))
            print(f"timing.py: {left_out}: {facts['name']} is left out", file=sys.stderr)
    return [e for e in found if e.facts.get("sum") not in lost]


def errors(found: list[Entry], n: Numbers, clock: Clock) -> dict[str, list[float]]:
    """Predicted over published, minus 1, of each kernel's cases."""
    return {
        e.name: [e.milliseconds(case, n, clock) / case.ms - 1 for case in e.cases if case.ms] for e in found
    }


def loss(found: list[Entry], n: Numbers, clock: Clock) -> float:
    """Mean over families of the mean over kernels of the mean absolute logarithm."""
    by = errors(found, n, clock)
    families: dict[str, list[float]] = {}
    for e in found:
        if by[e.name]:
            families.setdefault(e.family, []).append(np.mean(np.abs(np.log1p(by[e.name]))))
    return float(np.mean([np.mean(values) for values in families.values()]))


def fit(found: list[Entry], rule: str) -> tuple[dict[str, float], Clock]:
    """Coordinate descent: the clock's numbers, then each free number's values, until nothing improves."""
    chosen: dict[str, float] = {"mfma_hold": table()["rule"][rule]["mfma_hold"]}
    clock = Clock.read(rule)

    def fit_clock(n: Numbers, clock: Clock) -> Clock:
        for _ in range(3):
            for name, entry in table()["clock"].items():
                if "range" not in entry:
                    continue
                options = [replace(clock, **{name: round(float(v), 4)}) for v in np.linspace(*entry["range"])]
                clock = min([clock, *options], key=lambda c: loss(found, n, c))
        return clock

    clock = fit_clock(numbers(**chosen), clock)
    best = loss(found, numbers(**chosen), clock)
    improved = True
    while improved:
        improved = False
        for name, entry in table()["cycles"].items():
            for value in entry.get("free", []):
                trial = chosen | {name: value}
                trial_loss = loss(found, numbers(**trial), clock)
                if trial_loss < best - 0.0005:
                    chosen, best, improved = trial, trial_loss, True
        clock = fit_clock(numbers(**chosen), clock)
        best = loss(found, numbers(**chosen), clock)
    return chosen, clock


def ranked(found: list[Entry], times: dict[str, list[float]]) -> tuple[int, int]:
    """Pairs of kernels on one chip and shape, or GEMMs on one chip by rate, that differ by more than 10%: the
    number ranked right, and of all."""
    rows = []
    for e in found:
        for case, ms in zip([c for c in e.cases if c.ms], times[e.name]):
            where = (e.facts["chip"], () if e.facts["work"] == "gemm" else tuple(case.shape))
            rows.append((where, e.name, e.operations(case) / case.ms, e.operations(case) / ms))
    right = pairs = 0
    for i, a in enumerate(rows):
        for b in rows[:i]:
            if a[0] == b[0] and a[1] != b[1] and max(a[2], b[2]) > 1.1 * min(a[2], b[2]):
                pairs += 1
                right += (a[2] > b[2]) == (a[3] > b[3])
    return right, pairs


def cross_validate(found: list[Entry], rule: str) -> None:
    """Fits without each family and prints the errors on it."""
    print(f"\nrule: {rule}")
    held: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    for family in dict.fromkeys(e.family for e in found):
        rest, out = [e for e in found if e.family != family], [e for e in found if e.family == family]
        chosen, clock = fit(rest, rule)
        print(f"\nheld out: {family}; fitted: {chosen} {clock}", flush=True)
        n = numbers(**chosen)
        for name, values in errors(out, n, clock).items():
            held[name] = values
            cases = next(e for e in out if e.name == name).cases
            times[name] = [c.ms * (1 + v) for c, v in zip([c for c in cases if c.ms], values)]
            print(f"  {name:34} {len(values):3} cases  " + " ".join(f"{100 * v:+.1f}" for v in values))
    sizes = [abs(v) for values in held.values() for v in values]
    kernels = [median(map(abs, values)) for values in held.values()]
    right, pairs = ranked(found, times)
    print(
        f"\nheld out: median {100 * median(sizes):.1f}%, worst {100 * max(sizes):.1f}%; medians of kernels: "
        f"median {100 * median(kernels):.1f}%, worst {100 * max(kernels):.1f}%; "
        f"pairs that differ by more than 10%: {right} of {pairs} ranked right"
    )
    chosen, clock = fit(found, rule)
    print(f"fitted on all: {chosen} {clock}; loss {100 * loss(found, numbers(**chosen), clock):.2f}%")


def models_by_rule() -> list[tuple[Numbers, Clock]]:
    return [
        (numbers(mfma_hold=facts["mfma_hold"]), Clock.read(rule)) for rule, facts in table()["rule"].items()
    ]


def rates(found: list[Entry]) -> None:
    """TFLOP/s of our causal attention for configs/tables/devices.toml: per pass and head size the fastest
    variant's, by the slower rule."""
    models = models_by_rule()
    times: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    operations: dict[tuple[str, int], float] = {}
    for e in found:
        if m := re.match(r"llamac (\w+) (forward|backward) <(\d+)> causal", e.name):
            key, case = (m[2], int(m[3])), e.cases[0]
            taken = times.setdefault(key, {})
            taken[m[1]] = taken.get(m[1], 0.0) + np.array([e.milliseconds(case, *model) for model in models])
            products = {"forward": 2, "backward": 5}[m[2]]
            operations[key] = products * np.prod(case.shape) * case.shape[2]
    for (which, size), taken in times.items():
        rate = max(operations[which, size] / max(ms) / 1e9 for ms in taken.values())
        print(f'    {{ name = "attention_{which}", HD = {size}, tflops = {rate:.0f} }},')


def benchmark(e: Entry) -> tuple[str, ...]:
    """The program of dev/hip that times this kernel's first case, with its flags; () where none does."""
    shape = e.cases[0].shape
    if e.name == "llamac tiled GEMM bf16":
        m, n, k = shape
        return "matmul_forward", "--variant", "tiled", "--shape", f"N={m},K={n},C={k}"
    if m := re.match(r"llamac (\w+) (forward|backward) <\d+> causal", e.name):
        batch, heads, length, size = shape
        sizes = f"B={batch},T={length},NH={heads},NKV={heads},HD={size}"
        return f"attention_{m[2]}", "--variant", m[1], "--shape", sizes
    return ()


def measured_ms(text: str, variant: str) -> float:
    """Of the fastest block size in what a program of dev/hip prints."""
    found = re.findall(rf"^  {variant} +\S+ +([\d.]+) ", text, re.MULTILINE)
    if not found:
        raise ValueError(f"expected a row of {variant} with its ms, found {text.strip()!r}")
    return min(map(float, found))


def measure(found: list[Entry], build: Path) -> None:
    """Times our kernels by the programs in `build`, beside both predictions."""
    sums: dict[tuple[str, ...], np.ndarray] = {}  # a backward pass has two kernels
    for e in found:
        if command := benchmark(e):
            times = np.array([e.milliseconds(e.cases[0], *model) for model in models_by_rule()])
            sums[command] = sums.get(command, 0.0) + times
    rules = " | ".join(f"{rule} ms | error" for rule in table()["rule"])
    print(f"Predicted beside measured\n\n| kernel | shape | measured ms | {rules} |")
    print("| --- | --- |" + " ---: |" * (1 + 2 * len(table()["rule"])))
    for (program, _, variant, _, shape), times in sums.items():
        command = [build / program, "--variant", variant, "--shape", shape]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        ms = measured_ms(done.stdout, variant)
        cells = " | ".join(f"{time:.3f} | {100 * (time / ms - 1):+.1f}%" for time in times)
        print(f"| {program} {variant} | {shape} | {ms:.3f} | {cells} |", flush=True)


def report(found: list[Entry]) -> None:
    """Both rules beside each other: what differs between them is not known."""
    rules = table()["rule"]
    models = models_by_rule()
    print("Predicted, not measured. Errors on families held out, median and worst case, percent:")
    for rule, facts in rules.items():
        shown = (f"{work} {half}, {worst}" for work, (half, worst) in facts["errors"].items())
        print(f"- {rule}: {', '.join(shown)}")
    both = " | ".join(f"{rule} ms | error | GHz" for rule in rules)
    print(f"\n| kernel | shape | {both} | published | TFLOP/s | count, no overlap |")
    print("| --- | --- |" + " ---: |" * (3 * len(rules) + 3))
    sums: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
    for e in found:
        for case in e.cases:
            times = np.array([e.milliseconds(case, *model) for model in models])
            cells = []
            for ms, (n, clock) in zip(times, models):
                error = f"{100 * (ms / case.ms - 1):+.1f}%" if case.ms else ""
                cells.append(f"{ms:.3f} | {error} | {e.clock(case, e.numbers(n, clock), clock):.2f}")
            rates = "; ".join(f"{rate:.0f}" for rate in e.operations(case) / times / 1e9)
            count = times[0] * e.count_cycles() / e.rounds(e.resident, e.numbers(*models[0])).each
            known, shape = f"{case.ms:.3f}" if case.ms else "", " x ".join(map(str, case.shape))
            print(f"| {e.name} | {shape} | {' | '.join(cells)} | {known} | {rates} | {count:.3f} |")
            if total := e.facts.get("sum"):
                sums[total, case.shape] = sums.get((total, case.shape), 0.0) + times
    for (total, shape), times in sums.items():  # causal, five products
        rates = "; ".join(f"{rate:.0f}" for rate in 5 * np.prod(shape) * shape[2] / times / 1e9)
        cells = [f"{ms:.3f} | | " for ms in times]
        print(f"| {total} | {' x '.join(map(str, shape))} | {' | '.join(cells)} | | {rates} | |")
    print("\n| kernel | rule | blocks | cycles per round | count | MFMA | vector | waits |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for e in found:
        for rule, (n, clock) in zip(rules, models):
            steady = e.rounds(e.resident, e.numbers(n, clock))
            waits = ", ".join(f"{name} {100 * share:.0f}%" for name, share in steady.stalls.most_common(5))
            cycles = f"{steady.each:.0f} | {e.count_cycles():.0f}"
            shares = f"{100 * steady.matrix:.0f}% | {100 * steady.vector:.0f}%"
            print(f"| {e.name} | {rule} | {e.resident} | {cycles} | {shares} | {waits} |")


def main() -> int:
    parser = program_parser(__doc__)
    add = parser.add_argument
    add("--only", default="", metavar="REGEX", help="kernels whose name matches")
    add("--fit", action="store_true", help="fit and cross-validate the free numbers")
    add("--conflicts", type=Path, metavar="FILE", help="cycles of LDS instructions, by check.py --conflicts")
    add("--measure", type=Path, metavar="BUILD", help="time our kernels beside it, on a gfx942")
    add("--rates", action="store_true", help="print the rows of configs/tables/devices.toml")
    options = parser.parse_args()
    conflicts = json.loads(options.conflicts.read_text()) if options.conflicts else {}
    found = entries(options.only, conflicts)
    if not found:
        raise Error(
            "expected code objects in LLAMAC_TIMING_OBJECTS or build/resources, found none: "
            "`dev/hip/resources.py` makes those of build/resources"
        )
    if options.fit:
        for rule in table()["rule"]:
            cross_validate([e for e in found if any(case.ms for case in e.cases)], rule)
    elif options.rates:
        rates(found)
    elif options.measure:
        measure(found, options.measure)
    else:
        report(found)
    return 0


if __name__ == "__main__":
    start(main)
