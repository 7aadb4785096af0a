"""Runs the kernels of gfx942 code objects on the host, wave by wave.

Single instructions are compiled by tinygrad's emulator. Everything around them is here: kernel arguments,
waves, barriers, LDS, counting. Differences from the emulator's own loop:

- Registers, LDS and whatever a kernel does not initialize hold NaN patterns instead of zeros.
- Waves of a block run in order, in reverse, or are interrupted after random numbers of instructions, by
  others of the block and by other blocks.
- fp32 denormals are kept or flushed as the kernel's descriptor says.
- Instructions that the emulator gets wrong are corrected (corrections.py) or refused.
"""

import ctypes
import random
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
from code_object import Kernel
from corrections import REFUSED, corrected
from emulator import decode_inst, emu, instructions
from lds import Lds, lds_access

ENDPGM = 0xFFFFFFFFFFFFFFFF
NAN_REGISTER = 0x7FC12340


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel: its grid in blocks, and the wave instructions that it took."""

    name: str  # mangled
    grid: tuple[int, int, int]
    instructions: int


def aligned(memory, alignment: int) -> int:
    return ctypes.addressof(memory) + alignment - 1 & -alignment


def argument_segment(kernel: Kernel, grid, block, arguments, dynamic: int):
    """The kernel's arguments, explicit and hidden: the memory that holds them, and their address."""
    size = kernel.meta[".kernarg_segment_size"]
    memory = ctypes.create_string_buffer(size + 512)
    at = aligned(memory, 256)
    ctypes.memset(at, 0xFF, size)
    for argument, value in zip(kernel.explicit, arguments):
        ctypes.memmove(at + argument[".offset"], value, argument[".size"])
    hidden = {f"hidden_block_count_{d}": grid[i] for i, d in enumerate("xyz")}
    hidden |= {f"hidden_group_size_{d}": block[i] for i, d in enumerate("xyz")}
    hidden["hidden_grid_dims"] = 3 if grid[2] * block[2] > 1 else 2 if grid[1] * block[1] > 1 else 1
    hidden["hidden_dynamic_lds_size"] = dynamic
    for argument in kernel.meta[".args"]:
        if argument[".value_kind"].startswith("hidden"):
            value = hidden.get(argument[".value_kind"], 0).to_bytes(argument[".size"], "little")
            ctypes.memmove(at + argument[".offset"], value, len(value))
    return memory, at


def dispatch_packet(grid, block, lds: int, arguments: int):
    """The AQL packet of the launch: the memory that holds it, and its address."""
    memory = ctypes.create_string_buffer(128)
    at = aligned(memory, 64)
    sizes = [g * b for g, b in zip(grid, block)]
    packet = struct.pack("<HHHHHHIIIIIQQQQ", 0, 3, *block, 0, *sizes, 0, lds, 0, arguments, 0, 0)
    ctypes.memmove(at, packet, 64)
    return memory, at


def user_registers(kernel: Kernel, packet: int, arguments: int) -> list[int]:
    """The SGPRs that the descriptor asks for, preloaded arguments included."""

    def pair(x):
        return [x & 0xFFFFFFFF, x >> 32]

    none = [0, 0]
    parts = ([0] * 4, pair(packet), none, pair(arguments), none, none, [0])
    user = [word for bit, words in enumerate(parts) if kernel.properties >> bit & 1 for word in words]
    for i in range(kernel.preloaded):
        user.append(ctypes.c_uint32.from_address(arguments + 4 * ((kernel.preload >> 7) + i)).value)
    assert len(user) == kernel.rsrc2 >> 1 & 31, "user SGPRs"
    return user


class Wave:
    """Registers of 64 lanes. buffers: as the emulator's compiled instructions take them."""

    __slots__ = ("acc", "buffers", "mv", "pc", "scratch", "sgpr", "vgpr")

    def __init__(self, lds):
        self.sgpr = np.zeros(emu.SGPR_COUNT + 4, np.uint32)
        self.vgpr, self.acc = np.zeros((256, 64), np.uint32), np.zeros((256, 64), np.uint32)
        self.mv = memoryview(self.sgpr).cast("B")[: emu.PC_LO_IDX * 4 + 8].cast("Q")
        sgpr, vgpr, acc = (file.ctypes.data for file in (self.sgpr, self.vgpr, self.acc))
        self.buffers = [ctypes.c_uint64(at) for at in (sgpr, vgpr, 0, lds.at, 0, acc)]

    def start(self, kernel, user, group, first, threads, block):
        s = self.sgpr
        s[:128] = NAN_REGISTER
        s[128:] = 0
        s[128:193] = np.arange(65)
        s[193:209] = (-np.arange(1, 17)).astype(np.int64).astype(np.uint32)
        for at, value in emu.F32_INLINE.items():
            s[at] = value
        s[: len(user)] = user
        at = len(user)
        for bit, value in ((7, group[0]), (8, group[1]), (9, group[2])):
            if kernel.rsrc2 >> bit & 1:
                s[at] = value
                at += 1
        lanes = min(64, threads - first)
        mask = (1 << lanes) - 1
        s[126], s[127] = mask & 0xFFFFFFFF, mask >> 32
        self.vgpr[:] = NAN_REGISTER
        self.acc[:] = NAN_REGISTER
        t = first + np.arange(64)
        ids = t % block[0] | t // block[0] % block[1] << 10 | t // (block[0] * block[1]) << 20
        self.vgpr[0, :lanes] = ids[:lanes]
        if kernel.scratch:
            self.scratch = np.full(kernel.scratch * 64 + 64, 0xFF, np.uint8)
            self.buffers[4] = ctypes.c_uint64(self.scratch.ctypes.data)
            s[emu.SCRATCH_STRIDE_IDX] = kernel.scratch
        self.mv[emu.PC_LO_IDX // 2] = kernel.entry


@dataclass(eq=False)
class Block:
    """A block that has begun and not ended."""

    waves: list[Wave]
    steps: Iterator[int]  # of run_block()
    lds: np.ndarray | None = None  # its LDS while another block runs


RESIDENT = 8  # blocks that run at a time in random order


class Machine:
    """Runs kernels. order: of a block's waves, "forward", "reverse" or "random". In random order, some blocks
    run at a time, else one. With None, launches are noted and do not run.
    """

    races = None  # Races: LDS accesses are recorded
    some = None  # number of blocks in x -> those that run; None: all

    def __init__(self):
        self.lds, self.waves, self.programs = Lds(), [], {}
        self.executed, self.log = Counter(), []
        self.order, self.random = "forward", random.Random(1)
        self.opcodes = Counter()
        self.limit, self.watched = 10_000_000, {}

    def decode(self, kernel, pc):
        raw = ctypes.string_at(pc, 16)
        inst = decode_inst(raw, "cdna")
        name, size = emu._op_name(inst), inst.size()
        if handler := corrected(name, int.from_bytes(raw[:8], "little"), self.lds):
            return handler, size, False, name
        if "ATOMIC" in name and getattr(inst, "sc0", 0):
            raise NotImplementedError(f"the emulator gets {name} with a returned value wrong")
        if REFUSED.search(name) or "DPP" in type(inst).__name__:
            raise NotImplementedError(f"the emulator gets {name} wrong")
        (prg, runtime), inst = emu._decode_at(pc, "cdna")
        barrier = isinstance(inst, instructions.SOPP) and inst.op in emu._BARRIER_OPS
        return runtime.fxn, tuple(prg.arg.globals), barrier, name

    def watch(self, kernel, pc, wave_number):
        """Records the LDS accesses of an instruction before it runs."""
        key = kernel.name, pc
        if key not in self.watched:
            raw = ctypes.string_at(pc, 16)
            name = emu._op_name(decode_inst(raw, "cdna"))
            self.watched[key] = name, lds_access(name, int.from_bytes(raw[:8], "little"))
        name, use = self.watched[key]
        if use:
            words, writes = use
            where = kernel.name, name, pc - kernel.entry
            who = wave_number, self.epochs[wave_number]
            self.races.access(*where, words(self.waves[wave_number]), writes, *who)

    def launch(self, kernel, grid, block, arguments, dynamic):
        """arguments: addresses of the explicit arguments' values, as hipLaunchKernel takes them."""
        threads = block[0] * block[1] * block[2]
        most = kernel.meta[".max_flat_workgroup_size"]
        assert threads <= most, f"{threads} threads per block, compiled for at most {most}"
        assert threads > 0 and grid[0] * grid[1] * grid[2] > 0
        assert all(g * b < 1 << 32 for g, b in zip(grid, block)), "HIP: fewer than 2^32 threads per dimension"
        lds = kernel.lds + dynamic
        assert lds <= 65536, f"{lds} bytes of LDS"
        if self.order is None:
            self.log.append(Launch(kernel.name, tuple(grid), 0))
            return
        memory, at = argument_segment(kernel, grid, block, arguments, dynamic)
        packet, packet_at = dispatch_packet(grid, block, lds, at)
        user = user_registers(kernel, packet_at, at)
        program = self.programs.setdefault(kernel.name, {})
        count = -(-threads // 64)
        most = RESIDENT if self.order == "random" else 1
        while len(self.waves) < most * count:
            self.waves.append(Wave(self.lds))
        free = [self.waves[i * count : (i + 1) * count] for i in range(most)]
        groups, resident, current, executed = iter(self.groups(grid)), [], None, 0
        with nullcontext() if kernel.keeps_denormals else emu._MXCSRContext():
            while True:
                while free and (group := next(groups, None)):
                    waves = free.pop(0)
                    for w in range(count):
                        waves[w].start(kernel, user, group, 64 * w, threads, block)
                    if current:
                        current.lds = self.lds.words.copy()
                    self.lds.fill(lds)
                    current = Block(waves, self.run_block(kernel, program, waves))
                    resident.append(current)
                if not resident:
                    break
                now = self.random.choice(resident)
                if now is not current:
                    current.lds = self.lds.words.copy()
                    self.lds.words[:] = now.lds
                    current = now
                steps = next(now.steps, None)
                assert self.lds.intact(), "write past the end of LDS"
                if steps is None:
                    resident.remove(now)
                    free.append(now.waves)
                else:
                    executed += steps
        del memory, packet  # the kernel has read them
        self.executed[kernel.name] += executed
        self.log.append(Launch(kernel.name, tuple(grid), executed))

    def groups(self, grid) -> list[tuple[int, int, int]]:
        """The grid's blocks in the order in which they run."""
        columns = (self.some or range)(grid[0])
        groups = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in columns]
        if self.order == "reverse":
            groups.reverse()
        elif self.order == "random":
            self.random.shuffle(groups)
        return groups

    def run_block(self, kernel, program, waves):
        """Yields how many instructions have been executed when another block may go on."""
        count, told = len(waves), 0
        running, waiting, executed = list(range(count)), set(), 0
        pc_at = emu.PC_LO_IDX // 2
        if self.races:
            self.races.reset()
            self.epochs = [0] * count
        if self.order == "reverse":
            running.reverse()
        while running:
            ready = [w for w in running if w not in waiting]
            if not ready:
                waiting.clear()  # every running wave is at the barrier
                ready = running[:]
            if self.order == "random":
                self.random.shuffle(ready)
                ready = ready[:1]
            for w in ready:
                wave = waves[w]
                mv, buffers = wave.mv, wave.buffers
                quantum = self.random.randrange(1, 200) if self.order == "random" else self.limit + 1
                while quantum:
                    pc = mv[pc_at]
                    if pc == ENDPGM:
                        running.remove(w)
                        break
                    entry = program.get(pc)
                    if entry is None:
                        entry = program[pc] = self.decode(kernel, pc)
                        self.opcodes[entry[3]] += 1
                    if self.races:
                        self.watch(kernel, pc, w)
                        self.epochs[w] += entry[2]
                    fxn, uses, barrier, _ = entry
                    if isinstance(uses, int):
                        fxn(wave)
                        mv[pc_at] = pc + uses
                    else:
                        fxn(*[buffers[i] for i in uses])
                    executed += 1
                    quantum -= 1
                    if barrier:
                        waiting.add(w)
                        break
            if executed > self.limit:
                raise RuntimeError(f"more than {self.limit} instructions in one block")
            if self.order == "random":
                yield executed - told
                told = executed
        yield executed - told
