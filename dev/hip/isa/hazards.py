"""Searches the disassembly of gfx942 kernels for what an emulator that executes in order cannot see.

Over the paths of the control flow graph: LDS writes that may be in flight at a barrier, and registers that
are used before the load that fills them has arrived (a missing or too weak s_waitcnt).
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REGISTER = re.compile(r"\b([vas])(?:(\d+)|\[(\d+):(\d+)\])")
LOADS = ("global_load", "buffer_load", "scratch_load")
STORES = ("global_store", "global_atomic", "buffer_store", "scratch_store")
MOST_STATES = 40  # per instruction: further paths to it are cut off, and counted

Instruction = tuple[int, str, str]  # address, opcode, operands
Access = tuple[str, frozenset[tuple[str, int]]]
State = tuple[tuple[Access, ...], tuple[Access, ...], bool]


def registers(operands: str) -> frozenset[tuple[str, int]]:
    """All registers that the operands name, ranges included."""
    return frozenset(
        (kind, i)
        for kind, one, first, last in REGISTER.findall(operands)
        for i in range(int(one or first), int(one or last) + 1)
    )


@dataclass
class Queues:
    """Accesses in flight, oldest first: ("read", registers that arrive) or ("write", nothing).

    vm: memory. lgkm: LDS, which arrives in order, and scalar loads, which do not: while one of them is in
    flight, only lgkmcnt(0) helps.
    """

    vm: list[Access] = field(default_factory=list)
    lgkm: list[Access] = field(default_factory=list)
    scalar: bool = False

    def state(self) -> State:
        return tuple(self.vm[-64:]), tuple(self.lgkm[-16:]), self.scalar

    def wait(self, operands: str) -> None:
        if m := re.search(r"vmcnt\((\d+)\)", operands):
            self.vm = self.vm[len(self.vm) - min(int(m[1]), len(self.vm)) :]
        if m := re.search(r"lgkmcnt\((\d+)\)", operands):
            count = int(m[1])
            if count == 0:
                self.lgkm, self.scalar = [], False
            elif not self.scalar:
                self.lgkm = self.lgkm[len(self.lgkm) - min(count, len(self.lgkm)) :]

    def used_early(self, opcode: str, operands: str) -> frozenset:
        """Registers of the instruction that are still to arrive."""
        vm = frozenset().union(*(arriving for _, arriving in self.vm))
        lgkm = frozenset().union(*(arriving for _, arriving in self.lgkm))
        used = registers(operands)
        # Loads from memory arrive in order: a later one may overwrite the result of one in flight.
        if opcode.startswith("global_load") and not registers(operands.split(",", 1)[1]) & (vm | lgkm):
            used &= lgkm
        return used & (vm | lgkm)

    def issue(self, opcode: str, operands: str) -> None:
        result = registers(operands.split(",")[0])
        read: Access = ("read", result)
        write: Access = ("write", frozenset())
        if opcode.startswith(LOADS):
            self.vm.append(read)
        elif opcode.startswith(STORES):
            self.vm.append(write)
        elif opcode.startswith("flat_"):
            access = read if "_load" in opcode else write
            self.vm.append(access)
            self.lgkm.append(access)
        elif opcode.startswith("ds_"):
            adds = opcode.startswith("ds_add") and "rtn" not in opcode
            self.lgkm.append(write if opcode.startswith("ds_write") or adds else read)
        elif opcode.startswith(("s_load", "s_memtime")):
            self.lgkm.append(read)
            self.scalar = True


def target_of(address: int, operands: str) -> int:
    """The address that a branch jumps to: its operand counts words from the next instruction."""
    offset = int(operands.split()[0])
    return address + 4 + 4 * (offset - 65536 if offset >= 32768 else offset)


def find_hazards(name: str, code: list[Instruction]) -> tuple[list[str], int]:
    """A line for each hazard, and the number of instructions where paths were cut off."""
    index = {address: i for i, (address, _, _) in enumerate(code)}
    todo: list[tuple[int, State]] = [(0, ((), (), False))]
    seen: dict[int, set[State]] = {}
    faults, cut = [], 0
    while todo:
        at, state = todo.pop()
        while at < len(code):
            known = seen.setdefault(at, set())
            if state in known:
                break
            if len(known) > MOST_STATES:
                cut += 1
                break
            known.add(state)
            queues = Queues(list(state[0]), list(state[1]), state[2])
            address, opcode, operands = code[at]
            if opcode == "s_waitcnt":
                queues.wait(operands)
            elif opcode == "s_barrier":
                if any(kind == "write" for kind, _ in queues.lgkm):
                    faults.append(f"{name[:90]} +{address:#x}: LDS write in flight at a barrier")
            else:
                if early := queues.used_early(opcode, operands):
                    first = sorted(early)[:3]
                    faults.append(
                        f"{name[:90]} +{address:#x}: {opcode} {operands} uses {first} before it arrives"
                    )
                    queues = Queues()
                queues.issue(opcode, operands)
            state = queues.state()
            if opcode == "s_endpgm":
                break
            if opcode.startswith("s_branch"):
                at = index[target_of(address, operands)]
                continue
            if opcode.startswith("s_cbranch"):
                todo.append((index[target_of(address, operands)], state))
            at += 1
    return faults, cut


def parse(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    """The symbols of `llvm-objdump -d --no-show-raw-insn` with their instructions."""
    for name, body in re.findall(r"^[0-9a-f]+ <([^>]+)>:\n((?:.+\n?)*)", text, re.MULTILINE):
        lines = re.findall(r"^\s+(\S+)\s*(.*?)\s*// 0*([0-9A-F]+):", body, re.MULTILINE)
        yield name, [(int(address, 16), opcode, operands) for opcode, operands, address in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of *.hsaco code objects, as check.py leaves them")
    folder = parser.parse_args().folder
    paths = sorted(folder.glob("*.hsaco"))
    if not paths:
        print(
            f"hazards.py: {folder}: expected *.hsaco files, found none: check.py writes them", file=sys.stderr
        )
        return 2
    faults: list[str] = []
    kernels, cut = 0, 0
    for path in paths:
        command = ["llvm-objdump-19", "-d", "--no-show-raw-insn", path]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for name, code in parse(text):
            if name.endswith(".kd") or not code:
                continue
            found, places = find_hazards(name, code)
            faults, kernels, cut = faults + found, kernels + 1, cut + places
    print(f"hazards: {kernels} kernels, {len(faults)} faults, {cut} places where paths were cut off")
    for fault in list(dict.fromkeys(faults))[:20]:
        print(f"  {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
