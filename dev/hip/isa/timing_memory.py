#!/usr/bin/env python3
"""How close to the memory's rate our memory-bound kernels come on MI300X: predicted, not measured.

Reads the code objects of build/resources (dev/hip/resources.py). Two limits per kernel:

- By Little's law, a chip that is to move `copy` bytes per second with loads of `latency` needs latency x
  copy / units bytes in flight per compute unit (timing_numbers.toml). A kernel's are those of its loop, or
  of all its code without one: the most bytes that a wave has requested and not waited for, times the waves
  that registers, LDS and blocks leave room for. LDS that a launch gives is not known here.
- The simulated compute unit (timing_unit.py), with all of these waves, no hits, and its share of `copy`:
  the bytes that it loads and stores per second, of that share. By both rules; the lower one.
"""

import re
from dataclasses import replace

from timing import OURS
from timing_kernel import Kernel, Loop, load_all
from timing_unit import Memory, Numbers, Unit, Wave, numbers, table

from build import Error, program_parser, start

# Kernels that explain, that read little, or of fp8 in the form that the chip does not multiply.
UNLESS = r"naive|_delta|lambda|fp8<\d, false>"
ATOMIC_LANES = {"quantize_rows_vectorized_kernel_largest": 4}  # that a mask leaves of 64
STORE_ROUNDS = 3  # of a loop that only stores, after the first: quantize.h's, of a tile's columns
ISSUES = 6000  # instructions of a wave that are simulated, about


def ends_of_rows(kernel: Kernel) -> frozenset[int]:
    """Branches of a wave without the end of a row: around accesses to single elements beside vectors."""
    code = kernel.code
    if not any(i.bytes == 1024 and i.result for i in code):
        return frozenset()

    def single(k: int, end: int) -> bool:
        accesses = [i for i in code[k + 1 : end] if i.kind == "memory"]
        return bool(accesses) and all(
            re.search(r"_(short|[us]short|short_d16\w*)$", i.name) for i in accesses
        )

    masks = ((k, i.target) for k, i in enumerate(code) if i.name == "s_cbranch_execz")
    return frozenset(k for k, target in masks if target is not None and target > k and single(k, target))


def streaming(kernel: Kernel) -> list[int]:
    """A round of the loop that loads most bytes, or all code without one."""

    def loaded(loop: Loop) -> int:
        return sum(i.bytes for i in kernel.code[loop[0] : loop[1]] if i.kind == "memory" and i.result)

    loop = max(kernel.loops, key=loaded, default=(0, 0))
    if loaded(loop):
        return kernel.walk(*loop, ends_of_rows(kernel))
    exits = {
        k: STORE_ROUNDS
        for start, end in kernel.loops
        for k in range(start, end)
        if (kernel.code[k].target or 0) > end
    }
    return kernel.walk(0, None, ends_of_rows(kernel), exits)


def share_of_copy(kernel: Kernel, n: Numbers, per_cycle: float) -> float:
    """Bytes that a compute unit moves per cycle, of its share of a copy."""
    path = streaming(kernel)
    moved = sum(i.bytes for i in (kernel.code[k if k >= 0 else ~k] for k in path) if i.kind == "memory")
    waves = -(-kernel.threads // 64)

    def cycles(rounds: int) -> int:
        # Barriers of a block keep its waves together; one block after another is one longer path.
        # A block's first wave goes to the SIMD after the last block's last.
        on = [
            Wave(path * rounds, block, block * waves + w)
            for block in range(kernel.resident())
            for w in range(waves)
        ]
        return Unit(kernel.code, on, n, Memory(far=1.0)).run()

    rounds = max(2, min(6, ISSUES // len(path)))
    taken = cycles(rounds + 2) - cycles(2)
    return rounds * moved * waves * kernel.resident() / taken / per_cycle


def most_in_flight(kernel: Kernel) -> int:
    """Bytes that a wave has requested and not waited for, at most."""
    path = streaming(kernel) * 2
    waiting: list[int] = []  # of each access: bytes it will bring
    most = 0
    for k in path:
        i = kernel.code[k if k >= 0 else ~k]
        if i.kind == "memory":
            waiting.append(i.bytes if i.result else 0)
            most = max(most, sum(waiting))
        elif i.kind == "wait":
            waiting = waiting[max(0, len(waiting) - i.wait[0]) :]
    return most


def main() -> int:
    parser = program_parser(__doc__)
    parser.add_argument("--only", default="bf16", metavar="REGEX", help="names that match (%(default)s)")
    only = parser.parse_args().only
    chip, memory = table()["chips"]["mi300x"], table()["memory"]
    needed = memory["latency"]["value"] * memory["copy"]["value"] / chip["units"]
    # Waves wait for memory, so the clock is the highest.
    ghz = chip["peak"]["value"]
    per_cycle = memory["copy"]["value"] / chip["units"] / (ghz * 1e9)
    far = {"far_bytes": per_cycle, "far_latency": round(memory["latency"]["value"] * ghz * 1e9)}
    holds = (facts["mfma_hold"] for facts in table()["rule"].values())
    models = [replace(numbers(mfma_hold=hold), **far) for hold in holds]
    rows: set[tuple[str, int, int, float]] = set()
    for path in sorted(OURS.rglob("*.hsaco")):
        for name, kernel in load_all(path):
            if re.search(UNLESS, name) or not re.search(only, name):
                continue
            if any(i.kind == "mfma" for i in kernel.code) or not any(i.bytes == 1024 for i in kernel.code):
                continue
            if not most_in_flight(kernel):
                continue  # without code, of a form of fp8 that the chip does not multiply
            if lanes := ATOMIC_LANES.get(name.partition("<")[0]):
                kernel.code = [
                    replace(i, bytes=i.bytes * lanes // 64) if "_atomic_" in i.name else i
                    for i in kernel.code
                ]
            waves = kernel.resident() * -(-kernel.threads // 64)
            share = min(share_of_copy(kernel, n, per_cycle) for n in models)
            rows.add((name, waves, most_in_flight(kernel), share))
    if not rows:
        raise Error(f"{OURS}: expected code objects, found none: dev/hip/resources.py")
    print(f"needed: {needed / 1024:.1f} KiB per compute unit\n")
    print("| kernel | waves | KiB per wave | KiB per unit | of what is needed | predicted, of a copy |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, waves, each, share in sorted(rows, key=lambda row: row[3]):
        filled = 100 * waves * each / needed
        kib = f"{each / 1024:.2f} | {waves * each / 1024:.1f}"
        print(f"| {name} | {waves} | {kib} | {filled:.0f}% | {100 * share:.0f}% |")
    return 0


if __name__ == "__main__":
    start(main)
