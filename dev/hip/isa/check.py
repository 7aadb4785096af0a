#!/usr/bin/env python3
"""Executes the gfx942 code of every optimized kernel on an emulated MI300X and compares with float64.

No GPU is needed. The AMD build's own launchers start the kernels. The cases are those of
check_operations.cpp: shapes and values by the operation's description, guards, the reference in float64
and its tolerance (operation_check.h). Launches are noted first. A case runs if it launches a kernel that
fewer than --cases cases have run, and once for each combination of flags, absent operands and strides. It
runs with the waves of a block in order, in reverse and interleaved at random. README.md says what is needed
and what is not seen.
"""

import argparse
import ctypes
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from build import LIBRARIES, Error, build, program_parser, start

HERE = Path(__file__).resolve().parent
ORDERS = "forward", "reverse", "random"


def parse_arguments() -> argparse.Namespace:
    parser = program_parser(__doc__)
    add = parser.add_argument
    add("--libraries", type=Path, default=LIBRARIES, help="folder to build in")
    add("--no-build", action="store_true", help="use the libraries as they are")
    add("--program", action="store_true", help="link train_llama3 too, for program.py")
    add("--only", default="", metavar="REGEX", help="variants whose `operation variant` matches")
    add("--cases", type=int, default=5, help="of each kernel, at least (default: %(default)s)")
    add("--quick", action="store_true", help="one order of waves instead of three")
    add("--races", action="store_true", help="find LDS accesses that no barrier separates; one order, slow")
    add("--conflicts", type=Path, metavar="FILE", help="write LDS cycles for timing.py; one order, slow")
    add("--compute-units", type=int, default=304, help="of the emulated device (default: %(default)s)")
    return parser.parse_args()


class Cases:
    """Runs the cases of variants, and counts."""

    def __init__(self, device, orders: tuple[str, ...], least: int):
        self.device, self.machine, self.orders, self.least = device, device.machine, orders, least
        self.of_kernel: Counter[str] = Counter()
        self.noted: set[str] = set()
        self.cases, self.wrong = 0, 0
        integer, text = ctypes.c_int, ctypes.c_char_p
        self.callbacks = (
            ctypes.CFUNCTYPE(None, integer)(self.order),
            ctypes.CFUNCTYPE(integer)(self.choose),
            ctypes.CFUNCTYPE(None, text, text, ctypes.c_double)(self.report),
        )

    def run(self, operation: str, variant: str) -> None:
        self.name, self.start, before = f"{operation} {variant}", time.time(), self.cases
        words = operation.encode(), variant.encode()
        self.device.lib.check_variant(*words, len(self.orders), *self.callbacks)
        if self.cases == before:
            self.wrong += 1
            print(f"{self.name}: WRONG: it takes none of the cases")

    def order(self, number: int) -> None:
        self.machine.order = self.orders[number] if number >= 0 else None
        if number < 0:
            self.machine.log.clear()

    def choose(self) -> bool:
        self.noted = {launch.name for launch in self.machine.log}
        return any(self.of_kernel[name] < self.least for name in self.noted)

    def report(self, shape: bytes, wrong: bytes, share: float) -> None:
        self.of_kernel.update(self.noted)
        error, self.device.error = self.device.error, None
        message = f"{type(error).__name__}: {error}" if error else wrong.decode()
        instructions = sum(launch.instructions for launch in self.machine.log)
        verdict = f"WRONG: {message}" if message else f"right, {share:.2f} of the tolerance"
        seconds, self.start = time.time() - self.start, time.time()
        print(
            f"{self.name} {shape.decode()}: {verdict}; {instructions} wave instructions, {seconds:.1f} s",
            flush=True,
        )
        self.cases, self.wrong = self.cases + 1, self.wrong + bool(message)


def never_ran(device) -> list[str]:
    """Kernels of optimized variants in the code objects that no case ran."""
    from device import kernel_name

    # A kernel is named after its operations and variant: matmul_tiled_kernel. The other code objects are
    # those of tests/ops/check_tile.cpp. `naive` needs no case here.
    words = tuple({operation.split("_")[0] for operation in device.operations})
    # Without code: of a form that the chip does not multiply.
    loaded = {k.name for module in device.modules for k in module.kernels.values() if not k.is_empty}
    names = {kernel_name(name) for name in loaded - set(device.machine.executed)}
    return sorted(name for name in names if name.startswith(words) and "_naive_" not in name)


def print_races(machine) -> None:
    from device import kernel_name

    races = machine.races
    print(f"LDS: {races.checked} accesses of waves checked, {len(races.found)} places race")
    for (kernel, name, at), count in races.found.most_common():
        print(f"  {count} times {name} at +{at:#x} of {kernel_name(kernel)}")


def main() -> int:
    options = parse_arguments()
    import emulator  # noqa: F401  # ends the program where TINYGRAD is no checkout: before minutes of compiling

    if not options.no_build:
        build(options.libraries, options.program)
    from device import Device
    from lds import Conflicts, Races

    device = Device(options.libraries, options.compute_units)
    if options.races:
        device.machine.races = Races()
    if options.conflicts:
        device.machine.races = Conflicts()
    one_order = options.quick or options.races or options.conflicts
    cases = Cases(device, ORDERS[:1] if one_order else ORDERS, options.cases)
    start = time.time()
    for operation in device.operations:
        for variant in device.optimized(operation):
            if re.search(options.only, f"{operation} {variant}"):
                cases.run(operation, variant)
    if not cases.cases:
        raise Error(f"--only: expected it to match `operation variant`, found {options.only!r}")
    machine, faults = device.machine, cases.wrong
    print(
        f"\n{cases.cases} cases, {cases.wrong} wrong; {len(machine.executed)} kernels; "
        f"{sum(machine.executed.values())} wave instructions of {len(machine.opcodes)} opcodes "
        f"in {time.time() - start:.0f} s"
    )
    if options.conflicts:
        found: dict[str, dict[int, int]] = {}
        for (kernel, offset), cycles in machine.races.cycles.items():
            found.setdefault(kernel, {})[offset] = cycles
        options.conflicts.write_text(json.dumps(found))
    if options.races:
        print_races(machine)
        faults += len(machine.races.found)
    if not options.only:
        missing = never_ran(device)
        for name in missing:
            print(f"never ran: {name}")
        hazards = subprocess.run([sys.executable, HERE / "hazards.py", options.libraries / "code"])
        faults += len(missing) + hazards.returncode
    return 1 if faults else 0


if __name__ == "__main__":
    start(main)
