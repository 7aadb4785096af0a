"""Searches the disassembly of gfx942 kernels for what an emulator that executes in order cannot see.

Over all paths of the control flow graph: LDS writes that may be in flight at a barrier, and registers that
are used before the load that fills them has arrived (a missing or too weak s_waitcnt).

A wait decides by an access's age alone, the number of later accesses. So for each register the least age on
any path is all there is to know, and paths are joined where they meet.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from build import Error, program_parser, start, tool

REGISTER = re.compile(r"\b([vas])(?:(\d+)|\[(\d+):(\d+)\])")
LOADS = ("global_load", "buffer_load", "scratch_load")
STORES = ("global_store", "global_atomic", "buffer_store", "scratch_store")
OLDEST_VM, OLDEST_LGKM = 63, 15  # ages: the counters count no more accesses

Instruction = tuple[int, str, str]  # address, opcode, operands
Register = tuple[str, int]
LDS_WRITE: Register = "LDS write", 0  # stands for what it fills


@cache
def registers(operands: str) -> frozenset[Register]:
    """All registers that the operands name, ranges included."""
    return frozenset(
        (kind, i)
        for kind, one, first, last in REGISTER.findall(operands)
        for i in range(int(one or first), int(one or last) + 1)
    )


@dataclass
class InFlight:
    """What may be in flight on one of the paths to an instruction, and its least age.

    vm: memory. lgkm: LDS, which arrives in order, and scalar loads, which do not: while one of them is in
    flight, only lgkmcnt(0) helps. So its ages are kept apart by whether one is; scalar: what it may be here.
    """

    vm: dict[Register, int] = field(default_factory=dict)
    lgkm: dict[tuple[Register, bool], int] = field(default_factory=dict)
    scalar: frozenset[bool] = frozenset([False])

    def joined(self, other: "InFlight") -> "InFlight":
        def least(a: dict, b: dict) -> dict:
            return a | {key: min(age, a.get(key, age)) for key, age in b.items()}

        return InFlight(least(self.vm, other.vm), least(self.lgkm, other.lgkm), self.scalar | other.scalar)

    def wait(self, operands: str) -> None:
        if m := re.search(r"vmcnt\((\d+)\)", operands):
            self.vm = {register: age for register, age in self.vm.items() if age < int(m[1])}
        if m := re.search(r"lgkmcnt\((\d+)\)", operands):
            count = int(m[1])
            if count == 0:
                self.lgkm, self.scalar = {}, frozenset([False])
            else:
                self.lgkm = {key: age for key, age in self.lgkm.items() if key[1] or age < count}

    def arriving(self, opcode: str, operands: str) -> set[Register]:
        """Registers of the instruction that are still to arrive. Afterwards they count as there."""
        lgkm = {register for register, _ in self.lgkm}
        used = registers(operands)
        early = {register for register in used if register in self.vm or register in lgkm}
        # Loads from memory arrive in order: a later one may overwrite the result of one in flight.
        if opcode.startswith(LOADS) and early.isdisjoint(registers(operands.split(",", 1)[1])):
            early &= lgkm
        if early:
            self.vm = {register: age for register, age in self.vm.items() if register not in early}
            self.lgkm = {key: age for key, age in self.lgkm.items() if key[0] not in early}
        return early

    def add_vm(self, filled: frozenset[Register]) -> None:
        older = {register: age + 1 for register, age in self.vm.items() if age < OLDEST_VM}
        self.vm = older | dict.fromkeys(filled, 0)

    def add_lgkm(self, filled: frozenset[Register]) -> None:
        older = {key: age + 1 for key, age in self.lgkm.items() if age < OLDEST_LGKM}
        self.lgkm = older | {(register, scalar): 0 for register in filled for scalar in self.scalar}

    def issue(self, opcode: str, operands: str) -> None:
        result: frozenset[Register] = registers(operands.split(",")[0])
        nothing: frozenset[Register] = frozenset()
        if opcode.startswith(LOADS):
            self.add_vm(result)
        elif opcode.startswith(STORES):
            self.add_vm(nothing)
        elif opcode.startswith("flat_"):
            loads = "_load" in opcode
            self.add_vm(result if loads else nothing)
            self.add_lgkm(result if loads else frozenset([LDS_WRITE]))
        elif opcode.startswith("ds_"):
            adds = opcode.startswith("ds_add") and "rtn" not in opcode
            self.add_lgkm(frozenset([LDS_WRITE]) if opcode.startswith("ds_write") or adds else result)
        elif opcode.startswith(("s_load", "s_memtime")):
            ages: dict[tuple[Register, bool], int] = {}
            for (register, _), age in self.lgkm.items():
                ages[register, True] = min(age, ages.get((register, True), age))
            self.lgkm, self.scalar = ages, frozenset([True])
            self.add_lgkm(result)

    def step(self, instruction: Instruction) -> str:
        """What is in flight after the instruction. Returns its fault, or nothing."""
        _, opcode, operands = instruction
        if opcode == "s_waitcnt":
            self.wait(operands)
        elif opcode == "s_barrier":
            if any(register == LDS_WRITE for register, _ in self.lgkm):
                return "LDS write in flight at a barrier"
        else:
            early = self.arriving(opcode, operands)
            self.issue(opcode, operands)
            if early:
                return f"{opcode} {operands} uses {sorted(early)[:3]} before it arrives"
        return ""


def target_of(address: int, operands: str) -> int:
    """The address that a branch jumps to: its operand counts words from the next instruction."""
    offset = int(operands.split()[0])
    return address + 4 + 4 * (offset - 65536 if offset >= 32768 else offset)


def find_hazards(name: str, code: list[Instruction]) -> list[str]:
    """A line for each hazard."""
    index = {address: i for i, (address, _, _) in enumerate(code)}
    targets = {
        i: index[target_of(address, operands)]
        for i, (address, opcode, operands) in enumerate(code)
        if opcode.startswith(("s_branch", "s_cbranch"))
    }
    begins = {0, *targets.values()}
    known: dict[int, InFlight] = {0: InFlight()}  # where a block of instructions begins
    faults: dict[int, str] = {}

    def walk(at: int) -> Iterator[tuple[int, InFlight]]:
        """Executes a block; gives where it goes on, with what is in flight."""
        state = replace(known[at])
        while True:
            if fault := state.step(code[at]):
                faults[at] = fault
            opcode = code[at][1]
            if at in targets:
                yield targets[at], state
            if opcode == "s_endpgm" or opcode.startswith("s_branch") or at + 1 == len(code):
                return
            at += 1
            if at in begins:
                yield at, state
                return

    todo = [0]
    while todo:
        for to, state in walk(todo.pop()):
            joined = known[to].joined(state) if to in known else replace(state)
            if joined != known.get(to):
                known[to] = joined
                todo.append(to)
    return [f"{name[:90]} +{code[at][0]:#x}: {faults[at]}" for at in sorted(faults)]


def parse(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    """The symbols of `llvm-objdump -d --no-show-raw-insn` with their instructions."""
    for name, body in re.findall(r"^[0-9a-f]+ <([^>]+)>:\n((?:.+\n?)*)", text, re.MULTILINE):
        lines = re.findall(r"^\s+(\S+)\s*(.*?)\s*// 0*([0-9A-F]+):", body, re.MULTILINE)
        yield name, [(int(address, 16), opcode, operands) for opcode, operands, address in lines]


def main() -> int:
    parser = program_parser(__doc__)
    parser.add_argument("folder", type=Path, help="of *.hsaco code objects, as check.py leaves them")
    folder = parser.parse_args().folder
    paths = sorted(folder.glob("*.hsaco"))
    if not paths:
        raise Error(f"{folder}: expected *.hsaco files, found none: check.py writes them")
    faults: list[str] = []
    kernels = 0
    for path in paths:
        command = [tool("llvm-objdump"), "-d", "--no-show-raw-insn", path]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for name, code in parse(text):
            if name.endswith(".kd") or not code:
                continue
            faults += find_hazards(name, code)
            kernels += 1
    print(f"hazards: {kernels} kernels, {len(faults)} faults")
    for fault in faults[:20]:
        print(f"  {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    start(main)
