"""Runs one of the project's check programs, check_operations or check_tile, on the emulated MI300X.

suite.py [--libraries DIR] [--order forward|reverse|random] PROGRAM [its arguments]
"""

import argparse
import ctypes
import os
import sys
import time
from pathlib import Path

from device import Device

from build import LIBRARIES

MAIN = {
    "check_operations": "_Z21check_operations_mainiPPc",
    "check_tile": "_Z15check_tile_mainiPPc",
    "train_llama3": "_Z17train_llama3_mainiPPc",
}


def run_main(device: Device, words: list[str]) -> int:
    """main() of the program that words[0] names, with the words as its arguments."""
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # else it sets this itself, and executes this process anew
    main = getattr(device.lib, MAIN[words[0]])
    arguments = (ctypes.c_char_p * (len(words) + 1))(*(word.encode() for word in words), None)
    start = time.time()
    status = main(len(words), arguments)
    ctypes.CDLL(None).fflush(None)
    total = sum(device.machine.executed.values())
    print(f"exit status {status}, {total} wave instructions in {time.time() - start:.1f} s", flush=True)
    if device.error:
        print(f"{type(device.error).__name__}: {device.error}", file=sys.stderr)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--libraries", type=Path, default=LIBRARIES, help="folder that check.py built")
    parser.add_argument("--order", choices=("forward", "reverse", "random"), default="forward")
    parser.add_argument("program", choices=("check_operations", "check_tile"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    device = Device(options.libraries)
    device.machine.order = options.order
    return run_main(device, [options.program, *options.arguments])


if __name__ == "__main__":
    sys.exit(main())
