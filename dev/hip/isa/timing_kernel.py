"""A kernel of a code object as the timing model takes it: its instructions, and the paths of its waves."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from timing_unit import Instruction, parse

from build import HERE, tool

sys.path.append(str(HERE.parent))
from compiler import run
from loops import is_mask
from resources import CDNA, parse_notes, short_name

Loop = tuple[int, int]  # indices of its first instruction and of the branch that closes it


@dataclass
class Kernel:
    name: str
    code: list[Instruction]
    threads: int
    registers: int
    lds: int

    @cached_property
    def loops(self) -> list[Loop]:
        """Innermost loops with MFMA instructions, or, without any, with loads; those with the most first."""
        edges = [(i.target, k) for k, i in enumerate(self.code) if i.target is not None and i.target <= k]
        loops = [(start, end) for start, end in edges if end in self.forward(start, end + 1)]

        def weight(loop: Loop) -> int:
            names = [self.code[k].kind for k in range(loop[0], loop[1])]
            return 1000 * names.count("mfma") + names.count("memory")

        loops = [loop for loop in loops if weight(loop)]
        inner = [
            a
            for a in loops
            if not any(b != a and a[0] <= b[0] and b[1] <= a[1] and weight(b) >= 1000 for b in loops)
        ]
        return sorted(inner, key=lambda loop: (-weight(loop), loop))

    def forward(self, start: int, end: int) -> set[int]:
        """Instructions before `end` that are reached from `start` without a jump backwards."""
        seen: set[int] = set()
        todo = [start]
        while todo:
            k = todo.pop()
            while k < end and k not in seen:
                seen.add(k)
                i = self.code[k]
                if i.target is not None and i.target > k:
                    todo.append(i.target)
                if i.name in ("s_branch", "s_endpgm"):
                    break
                k += 1
        return seen

    def walk(
        self,
        start: int,
        goal: int | None,
        taken: frozenset[int] = frozenset(),
        again: dict[int, int] | None = None,
    ) -> list[int]:
        """From `start` up to the goal, or else to the end.

        A conditional branch is taken if it is in `taken`, if the goal is not reached otherwise, or if it
        jumps over a mask. Of loops on the way, a branch that closes one is taken, and one that leaves one is
        not, as often as `again` says.
        """
        path, k = [], start
        last = len(self.code) if goal is None else goal + 1
        seen: Counter[int] = Counter()
        while True:
            i = self.code[k]
            seen[k] += 1
            backward = i.target is not None and i.target <= k
            more = seen[k] <= (again or {}).get(k, 0 if backward else 1)
            jumps = i.name == "s_branch" or k in taken or (i.target is not None and more == backward)
            if k != goal and i.target is not None and not jumps and i.target > k:
                lost = goal is not None and goal not in self.forward(k + 1, last)
                between = [x.name for x in self.code[k + 1 : i.target]]
                jumps = lost or (is_mask(between) and (goal is None or i.target <= goal))
            path.append(~k if jumps or (k == goal and i.target is not None) else k)
            if k == goal or i.name == "s_endpgm":
                return path
            if jumps and (i.target is None or seen[k] > 100):
                raise ValueError(f"{self.name}: instruction {k}: a jump that the path cannot follow")
            k = i.target if jumps else k + 1

    def parts(
        self, loop: Loop, taken: frozenset[int], again: dict[int, int] | None = None
    ) -> tuple[list[int], list[int], list[int]]:
        """Before the loop, one round of it, after it."""
        start, end = loop
        before = self.walk(0, start, taken, again) if start else []
        before = before[:-1] if before and before[-1] in (start, ~start) else before
        body = self.walk(start, end, taken)
        code = self.code
        # Another way into the loop.
        back = code[end + 1].name == "s_branch" and (code[end + 1].target or 0) <= end
        exits = [code[k].target for k in range(start, end) if code[k].target is not None]
        exits += [end + 1] if code[end].name != "s_branch" and not back else []
        out = [t for t in exits if t > end] or [t for t in exits if t < start]
        return before, body, self.walk(out[-1], None, taken, again)

    def resident(self, dynamic_lds: int = 0) -> int:
        """Blocks that a compute unit holds at a time."""
        waves = -(-self.threads // 64)
        granule = CDNA.granule
        by_registers = min(CDNA.waves, CDNA.vgprs // (-(-max(self.registers, 1) // granule) * granule))
        lds = self.lds + dynamic_lds
        per_simd = -(-waves // CDNA.simds)
        blocks = by_registers // per_simd if waves >= CDNA.simds else by_registers * CDNA.simds // waves
        return max(1, min(blocks, CDNA.lds // lds if lds else blocks))


def load_all(path: Path, symbol: str = "") -> Iterator[tuple[str, Kernel]]:
    """Kernels of a code object whose mangled name contains `symbol`, with their names for readers."""
    notes = parse_notes(run(tool("llvm-readelf"), "--notes", path))
    notes = [note for note in notes if symbol in note["name"]]
    if not notes:
        return
    codes = parse(run(tool("llvm-objdump"), "-d", "--mcpu=gfx942", path))
    names = run(tool("llvm-cxxfilt"), *(note["name"] for note in notes)).splitlines()
    for note, name in zip(notes, names):
        fields = "max_flat_workgroup_size", "vgpr_count", "group_segment_fixed_size"
        sizes = (int(note[field]) for field in fields)
        yield short_name(name), Kernel(note["name"], codes[note["name"]], *sizes)


def load(path: Path, symbol: str = "") -> Kernel:
    """The one kernel whose mangled name contains `symbol`."""
    found = [kernel for _, kernel in load_all(path, symbol)]
    if len(found) != 1:
        names = ", ".join(kernel.name for kernel in found)
        raise ValueError(f"{path}: {symbol!r}: expected one kernel, found {len(found)}: {names}")
    return found[0]
