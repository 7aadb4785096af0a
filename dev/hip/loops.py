#!/usr/bin/env python3
"""The loop of each matrix-core kernel in gfx942's disassembly, as a Markdown table or with --json as one JSON
object: instructions of a wave in one step, and the cycles that they take on paper.

Reads what dev/hip/resources.py leaves in build/resources/gfx942. The loop: the shortest with the most MFMA
instructions, without the mask of a diagonal, which most steps jump over. Cycles of CDNA3:

MFMA    16 of a SIMD for a 16x16x16, 32 for a 32x32x8; the same for twice the depth in fp8
issue   4 of a SIMD for a vector instruction, 16 for a transcendental one, 4 for an MFMA: its others are free
        for the vector instructions of another wave
LDS     128 bytes a cycle of the compute unit: 8 for 128 bits a lane, by each of its four SIMDs' waves
most    the share of the matrix cores' peak where the longest of the three hides the others
"""

import json
import re
from collections import Counter
from pathlib import Path

from compiler import ROOT, Error, program_parser, start

INSTRUCTION = re.compile(r"^\s+(\S+).*// ([0-9A-F]{12}):.*?(?:\+0x([0-9a-f]+)>)?$", re.MULTILINE)
MFMA = {"32x32x8": 32, "16x16x16": 16, "32x32x16": 32, "16x16x32": 16}
KINDS = {
    "MFMA": r"v_mfma_",
    "exp": r"v_exp_",
    "perm": r"v_perm_",
    "AGPR moves": r"v_accvgpr_",
    "LDS reads": r"ds_read",
    "LDS writes": r"ds_write",
    "global": r"(global|buffer|flat)_",
    "waits": r"s_waitcnt",
    "barriers": r"s_barrier",
}
HEAD = ["kernel", "MFMA", "VALU", *list(KINDS)[1:], "MFMA cycles", "issue cycles", "LDS cycles", "most"]


def loop_of(body: str) -> list[str]:
    """The mnemonics of a kernel's loop; empty where it has none with MFMA. body: of `llvm-objdump -d`."""
    found = [(int(at, 16), name, int(target or "0", 16)) for name, at, target in INSTRUCTION.findall(body)]
    first = found[0][0] if found else 0
    jumps = [
        (first + target, at)
        for at, name, target in found
        if re.match(r"s_c?branch", name) and first + target < at
    ]

    def inside(begin: int, end: int) -> list[str]:
        return [name for at, name, _ in found if begin <= at <= end]

    def rank(jump: tuple[int, int]) -> tuple[int, int]:
        return sum(name.startswith("v_mfma") for name in inside(*jump)), jump[0] - jump[1]

    begin, end = max(jumps, key=rank, default=(0, 0))
    if not rank((begin, end))[0]:
        return []
    # A loop whose start depends on how it is entered has a jump to each, side by side.
    entries = [jump for jump in jumps if abs(jump[1] - end) <= 8]
    begin, end = min(start for start, _ in entries), max(at for _, at in entries)
    masks = [
        (at, first + target)
        for at, name, target in found
        if begin < at < first + target <= end and name.startswith("s_cbranch")
    ]
    masks = [jump for jump in masks if is_mask([n for a, n, _ in found if jump[0] < a < jump[1]])]
    return [n for a, n, _ in found if begin <= a <= end and not any(x < a < y for x, y in masks)]


def is_mask(names: list[str]) -> bool:
    """Whether these instructions do nothing but choose between registers' values."""
    chooses = sum(name.startswith("v_cndmask") for name in names)
    return chooses >= 16 and not any(re.match(r"v_mfma|ds_|global_|buffer_", name) for name in names)


def lds_cycles(name: str) -> int:
    """Of one LDS instruction of 64 lanes without bank conflicts."""
    bits = int(re.search(r"_[bui](\d+)", name)[1])
    return 64 * (bits if bits >= 32 else 32) // 8 * (2 if "2_" in name or "2st64" in name else 1) // 128


def figures(loop: list[str]) -> dict[str, int]:
    """Of a kernel's loop, by the table's HEAD; `most` in percent."""
    counts = Counter({kind: sum(bool(re.match(p, n)) for n in loop) for kind, p in KINDS.items()})
    mfma = sum(
        cycles for n in loop for shape, cycles in MFMA.items() if n.startswith("v_mfma") and shape in n
    )
    vector = [n for n in loop if n.startswith("v_") and not n.startswith("v_mfma")]
    issue = sum(16 if re.match(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_", n) else 4 for n in vector)
    issue += 4 * counts["MFMA"]
    lds = 4 * sum(lds_cycles(n) for n in loop if re.match(r"ds_(read|write)", n))
    cells = [counts["MFMA"], len(vector), *(counts[kind] for kind in list(KINDS)[1:]), mfma, issue, lds]
    return dict(zip(HEAD[1:], [*cells, 100 * mfma // max(mfma, issue, lds)]))


def row_of(name: str, loop: list[str]) -> list[str]:
    """The table's row of a kernel."""
    cells = [str(value) for value in figures(loop).values()]
    return [f"`{name}`", *cells[:-1], f"{cells[-1]}%"]


def symbols(text: str) -> dict[str, str]:
    """The instructions of each symbol of `llvm-objdump -d`."""
    parts = re.split(r"^(?:[0-9a-f]+ )?<([^>]+)>:\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2]))


def main() -> int:
    parser = program_parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build/resources/gfx942")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    folder, found = options.folder, []
    for path in sorted(folder.glob("**/*.s")):
        for symbol, body in symbols(path.read_text()).items():
            name = re.search(r"\d([a-z][a-z_]*_kernel(?:_[a-z]+)?)I(.*?)EEv", symbol)
            if name and (loop := loop_of(body)):
                arguments = ", ".join(re.findall(r"L\w+?(\d+)E", f"{name[2]}E"))
                found.append((f"{name[1]}<{arguments}>", loop))
    if not found:
        raise Error(f"{folder}: expected dev/hip/resources.py's disassembly, found none")
    if options.json:
        print(json.dumps({"kernels": [{"kernel": name} | figures(loop) for name, loop in found]}))
        return 0
    rows = [row_of(name, loop) for name, loop in found]
    for row in (HEAD, ["---", *["---:"] * (len(HEAD) - 1)], *rows):
        print("| " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    start(main)
