#!/usr/bin/env python3
"""Bytes that a compute unit has in flight in our memory-bound kernels, against latency times bandwidth.

Reads the code objects of build/resources (dev/hip/resources.py). By Little's law, a chip that is to move
`copy` bytes per second with loads of `latency` needs latency x copy / units bytes in flight per compute unit
(timing_numbers.toml). A kernel's are those of its loop, or of all its code without one: the most bytes that
a wave has requested and not waited for, times the waves that registers, LDS and blocks leave room for. LDS
that a launch gives is not known here.
"""

import argparse
import re
import sys

from timing import OURS
from timing_kernel import Kernel, load_all
from timing_unit import table

UNLESS = r"naive|_delta|lambda"  # kernels that explain, or that read little


def most_in_flight(kernel: Kernel) -> int:
    """Bytes that a wave has requested and not waited for, at most."""
    loops = [loop for loop in kernel.loops if any(i.kind == "memory" for i in kernel.code[loop[0] : loop[1]])]
    path = kernel.walk(*loops[0]) * 2 if loops else range(len(kernel.code))
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="bf16", metavar="REGEX", help="names that match (%(default)s)")
    only = parser.parse_args().only
    chip, memory = table()["chips"]["mi300x"], table()["memory"]
    needed = memory["latency"]["value"] * memory["copy"]["value"] / chip["units"]
    rows: set[tuple[str, int, int]] = set()
    for path in sorted(OURS.rglob("*.hsaco")):
        for name, kernel in load_all(path):
            if re.search(UNLESS, name) or not re.search(only, name):
                continue
            if any(i.kind == "mfma" for i in kernel.code) or not any(i.bytes == 1024 for i in kernel.code):
                continue
            if not most_in_flight(kernel):
                continue  # without code, of a form of fp8 that the chip does not multiply
            waves = kernel.resident() * -(-kernel.threads // 64)
            rows.add((name, waves, most_in_flight(kernel)))
    if not rows:
        print(
            f"timing_memory.py: {OURS}: expected code objects, found none: dev/hip/resources.py",
            file=sys.stderr,
        )
        return 2
    print(f"needed: {needed / 1024:.1f} KiB per compute unit\n")
    print("| kernel | waves | KiB per wave | KiB per unit | of what is needed |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, waves, each in sorted(rows, key=lambda row: row[1] * row[2]):
        share = 100 * waves * each / needed
        print(f"| {name} | {waves} | {each / 1024:.2f} | {waves * each / 1024:.1f} | {share:.0f}% |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
