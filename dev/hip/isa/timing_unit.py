"""A compute unit of gfx942 in time: decodes disassembled instructions and simulates the waves that share it.

A wave issues in order, at most one instruction per four cycles. A SIMD issues, in these four cycles, one
instruction of each category (vector, scalar, LDS, memory, branch), from different waves: of the highest
priority first, then of the oldest. timing_numbers.toml has every number, with its source.
"""

import re
import tomllib
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

NUMBERS = Path(__file__).with_name("timing_numbers.toml")
SIMDS, SLOT = 4, 4  # SIMDs of a compute unit; cycles in which each may issue once
LINE = re.compile(r"^\s+(\S+)\s*(.*?)\s*// ([0-9A-F]{12}):(?: ([0-9A-F]{8}))?")
MODIFIER = re.compile(r"\b(?:offset[01]?|op_sel(?:_hi)?|neg_(?:lo|hi)|quad_perm|row_\w+|cbsz|abid|blgp):\S+")
REGISTER = re.compile(r"([vas])(?:(\d+)|\[(\d+):(\d+)\])$")
FIRST = {"v": 0, "a": 256, "s": 512}  # of each register file, in Wave.ready
NAMED = {"vcc": 640, "vcc_lo": 640, "vcc_hi": 640, "exec": 641, "scc": 642, "m0": 643}
# Cycles of the matrix unit by M and K; the result of all shapes is 1024 or 256 numbers.
MFMA = {
    (32, 8): 32,
    (16, 16): 16,
    (32, 16): 32,
    (16, 32): 16,
    (32, 4): 32,
    (16, 4): 32,
    (32, 2): 64,
    (4, 4): 8,
}
WAITS = {"vm": "vmcnt", "lgkm": "lgkmcnt"}
# Where an instruction issues; others need no port.
PORTS = dict.fromkeys(("vector", "packed", "trans", "mfma"), "vector") | {"lds": "LDS", "memory": "memory"}
PORTS |= {"scalar": "scalar", "scalar load": "scalar", "branch": "branch"}


@dataclass(frozen=True)
class Numbers:
    """The model's numbers; see the table for what each one is."""

    slot_vector: int
    quarter_rate: int
    vector_latency: int
    transcendental: int
    transcendental_latency: int
    mfma_hold: float
    mfma_packed: int
    mfma_read: int
    mfma_chain: int
    scalar_latency: int
    scalar_load: int
    branch: int
    branch_taken: int
    wait: int
    barrier: int
    lds_bytes: int
    lds_latency: int
    lds_queue: int
    l1_bytes: int
    address: int
    l1_latency: int
    l2_bytes: float
    l2_latency: int
    far_latency: int
    atomic: int
    memory_queue: int
    far_bytes: float = 46.9  # a compute unit's share beyond the L2 cache; of the chip


@cache
def table() -> dict:
    return tomllib.loads(NUMBERS.read_text())


def numbers(**changes: float) -> Numbers:
    values = {name: entry["value"] for name, entry in table()["cycles"].items()}
    return Numbers(**(values | changes))


@dataclass
class Instruction:
    name: str
    operands: str = ""
    address: int = 0
    target: int | None = None  # index of the instruction that a branch jumps to
    kind: str = ""
    result: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()  # an MFMA's third operand
    cycles: int = 0
    bytes: int = 0  # of 64 lanes
    wait: tuple[int, int] = (99, 99)  # vmcnt, lgkmcnt
    value: int = 0


def registers(operand: str) -> tuple[int, ...]:
    operand = operand.strip().split(" ")[0].strip("-|")
    if m := REGISTER.match(operand):
        first, last = int(m[2] or m[3]), int(m[2] or m[4])
        return tuple(range(FIRST[m[1]] + first, FIRST[m[1]] + last + 1))
    return (NAMED[operand],) if operand in NAMED else ()


def operands_of(text: str) -> list[tuple[int, ...]]:
    return [registers(part) for part in re.split(r",(?![^\[]*\])", MODIFIER.sub("", text))]


def join(parts: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(register for part in parts for register in part)


def width(name: str) -> int:
    """Bits per lane of a memory instruction."""
    if m := re.search(r"dword(?:x(\d))?|_[bfuid](\d+)", name):
        return max(32, int(m[2])) if m[2] else 32 * int(m[1] or 1)
    return 32


def decode(name: str, operands: str = "", address: int = 0) -> Instruction:
    i = Instruction(name, operands, address)
    parts = operands_of(operands)
    result, reads = parts[0], join(parts[1:])
    if m := re.match(r"v_s?mfmac?_\w+?_\d+x(\d+)x(\d+)", name):
        i.kind, i.result, i.reads, i.adds = "mfma", result, join(parts[1:3]), join(parts[3:4])
        i.cycles = MFMA[int(m[1]), int(m[2])]
    elif name.startswith("v_"):
        i.kind = "trans" if re.match(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_", name) else "vector"
        if re.match(r"v_(pk_(add|fma|mul)_f32|pk_mov_b32|dot)", name):
            i.kind = "packed"
        i.value = int(bool(re.match(r"v_(mul_(lo|hi)_[ui]32|mad_[ui]64)", name)))
        i.result, i.reads = result, reads
        if name.startswith("v_cmp") and name.endswith("_e32"):
            i.result, i.reads = (NAMED["vcc"],), join(parts)
        elif name.startswith("v_swap"):
            i.result = i.reads = join(parts)
        elif re.match(r"v_(pk_)?(fmac|mac|dot\w*c)_", name):
            i.reads += result
        if re.match(r"v_(add|sub|subb|addc|subrev)_co", name):
            i.result += parts[1]
        if "cndmask" in name and name.endswith("_e32"):
            i.reads += (NAMED["vcc"],)
    elif name.startswith("ds_"):
        i.kind = "lds"
        i.bytes = 8 * width(name) * (2 if re.search(r"(read|write)2", name) else 1)
        loads = re.match(r"ds_(read|load|permute|bpermute|swizzle)|.*_rtn", name)
        i.result, i.reads = (result, reads) if loads else ((), join(parts))
    elif re.match(r"(buffer|global|flat|scratch)_(load|store|atomic)", name):
        i.kind, i.bytes = "memory", 8 * width(name)
        if "_load_" in name and not re.search(r"\blds\b", operands):
            i.result, i.reads = result, reads
        else:
            i.reads = join(parts)
            i.value = 2 if "_load_" in name else 3 if "_atomic_" in name else 1  # to LDS, atomic, store
    elif re.match(r"s_(buffer_)?load|s_memtime", name):
        i.kind, i.result, i.reads = "scalar load", result, reads
    elif re.match(r"s_c?branch|s_setpc|s_endpgm", name):
        i.kind = "branch"
        i.reads = tuple(NAMED[flag] for flag in ("scc", "vcc") if flag in name)
    elif name == "s_waitcnt":
        i.kind = "wait"
        counts = {key: re.search(rf"{key}cnt\((\d+)\)", operands) for key in WAITS}
        i.wait = tuple(int(found[1]) if found else 99 for found in counts.values())
    elif name in ("s_barrier", "s_setprio", "s_nop"):
        i.kind = name[2:]
        i.value = int(operands.split()[0], 0) if operands else 0
    elif re.match(r"s_(sleep|sched|icache|inst_prefetch|code_end|buffer_wb|dcache)|buffer_(wb|inv)", name):
        i.kind = "nop"
    else:
        i.kind, i.result, i.reads = "scalar", result, reads
        if re.match(r"s_(cmp|bitcmp)", name):
            i.result, i.reads = (NAMED["scc"],), join(parts)
        elif re.match(r"s_(add|sub|and|or|xor|lsh|ash|min|max|not|bfe)", name):
            i.result += (NAMED["scc"],)
        if re.match(r"s_(addc|subb|cselect)", name):
            i.reads += (NAMED["scc"],)
    return i


def parse(text: str) -> dict[str, list[Instruction]]:
    """The symbols of `llvm-objdump -d` with their instructions. Labels inside of a kernel are no symbols."""
    parts = re.split(r"^[0-9a-f]+ <([^>]+)>:\n", text, flags=re.MULTILINE)[1:]
    symbols: dict[str, list[Instruction]] = {}
    name = ""
    for symbol, body in zip(parts[::2], parts[1::2]):
        if not name or not re.match(r"label_|L\w*\d", symbol):
            name = symbol
            symbols[name] = []
        for m in filter(None, map(LINE.match, body.splitlines())):
            i = decode(m[1], m[2], int(m[3], 16))
            if re.match(r"s_c?branch", m[1]) and m[4]:
                words = int(m[4][4:], 16)
                i.target = i.address + 4 + 4 * (words - 65536 if words >= 32768 else words)
            symbols[name].append(i)
    for code in symbols.values():
        index = {i.address: k for k, i in enumerate(code)}
        for i in code:
            i.target = index.get(i.target)
    return symbols


@dataclass
class Wave:
    """A wave's path: indices of instructions, ~index for a branch that is taken."""

    path: list[int]
    block: int
    number: int  # within the block
    marks: tuple[int, ...] = ()  # positions in the path whose issue times are kept
    at: int = 0
    earliest: int = 0
    why: str = "issue"
    issued: int = 0
    priority: int = 0
    done: int = -1
    waiting: bool = False
    ready: list[int] = field(default_factory=lambda: [0] * 644)
    chained: list[int] = field(default_factory=lambda: [0] * 644)  # when an MFMA may add to a register
    cause: list[str] = field(default_factory=lambda: ["issue"] * 644)
    memory: deque = field(default_factory=deque)
    lds: deque = field(default_factory=deque)
    times: list[int] = field(default_factory=list)
    stalls: Counter = field(default_factory=Counter)


@dataclass(frozen=True)
class Memory:
    """Where vector loads hit: shares of the bytes. conflicts: LDS cycles per instruction by its index."""

    l1: float = 0.0  # in the L1 cache
    far: float = 0.0  # beyond the L2 cache
    conflicts: dict[int, int] = field(default_factory=dict)


class Unit:
    """The waves of the blocks that a compute unit holds at a time. run(): the cycle in which all ended."""

    def __init__(self, code: list[Instruction], waves: list[Wave], n: Numbers, memory: Memory = Memory()):
        self.code, self.waves, self.n, self.where = code, waves, n, memory
        self.busy: Counter[str] = Counter()
        rate = max(1 / n.l1_bytes, (1 - memory.l1) / n.l2_bytes, memory.far / n.far_bytes)
        self.memory_rate = rate
        beyond = n.l2_latency + memory.far * (n.far_latency - n.l2_latency)
        self.memory_latency = round(memory.l1 * n.l1_latency + (1 - memory.l1) * beyond)

    def prepare(self, w: Wave, now: int) -> None:
        """Sets when the wave's next instruction may issue by what it depends on, and the cause."""
        k = w.path[w.at]
        i = self.code[k if k >= 0 else ~k]
        time, why = now, "issue"
        if i.kind == "wait":
            vm, lgkm = i.wait
            if len(w.memory) > vm and w.memory[-vm - 1] > time:
                time, why = w.memory[-vm - 1], "vmcnt"
            if len(w.lds) > lgkm:
                last = max(list(w.lds)[: len(w.lds) - lgkm])
                if last > time:
                    time, why = last, "lgkmcnt"
        else:
            ready = w.ready
            for r in i.reads:
                if ready[r] > time:
                    time, why = ready[r], w.cause[r]
            if i.kind == "mfma":
                when = w.chained if i.adds == i.result else ready
                for r in i.adds:
                    if when[r] > time:
                        time, why = when[r], "MFMA chain"
            for r in i.result:  # written by an MFMA that is still on its way
                if w.cause[r] == "MFMA result" and i.adds != i.result and w.chained[r] > time:
                    time, why = w.chained[r], "MFMA result"
        w.earliest, w.why = time, why

    def run(self) -> int:
        n, code = self.n, self.code
        simds = [[w for w in self.waves if w.number % SIMDS == s] for s in range(SIMDS)]
        vector_free, issue_free, packed_free, matrix_free = ([0] * SIMDS for _ in range(4))
        lds_free = memory_free = 0
        queues = {"LDS": (deque[int](), n.lds_queue), "memory": (deque[int](), n.memory_queue)}
        blocks = Counter(w.block for w in self.waves)
        arrived: Counter[int] = Counter()
        alive, t = len(self.waves), 0
        for w in self.waves:
            self.prepare(w, 0)
        while alive:
            next_time = 1 << 60
            for s, waves in enumerate(simds):
                used = set()
                for w in waves:
                    if w.done >= 0 or w.waiting:
                        continue
                    if w.earliest > t:
                        next_time = min(next_time, w.earliest)
                        continue
                    k = w.path[w.at]
                    i = code[k if k >= 0 else ~k]
                    kind = i.kind
                    blocked = ""
                    port = PORTS.get(kind, "")
                    if port in queues:
                        queue, most = queues[port]
                        while queue and queue[0] <= t:
                            queue.popleft()
                        if len(queue) >= most:
                            blocked = f"{port} queue"
                    elif port == "vector" and (vector_free if kind != "mfma" else issue_free)[s] > t:
                        blocked = "vector port"
                    elif kind == "packed" and packed_free[s] > t:
                        blocked = "packed beside MFMA"
                    elif kind == "mfma" and matrix_free[s] > t:
                        blocked = "matrix unit"
                    if port and not blocked and port in used:
                        blocked = f"{port} port"
                    if blocked:
                        w.stalls[blocked] += SLOT
                        next_time = t + SLOT
                        continue
                    if port:
                        used.add(port)
                    waited = w.earliest - w.issued - SLOT
                    if waited > 0:
                        w.stalls[w.why] += waited
                    done = t + SLOT
                    if kind in ("vector", "packed", "trans"):
                        if kind == "trans":
                            cycles, latency = n.transcendental, n.transcendental + n.transcendental_latency
                        else:
                            cycles = n.quarter_rate if i.value else n.slot_vector
                            latency = max(cycles, n.vector_latency)
                        vector_free[s] = issue_free[s] = t + cycles
                        self.busy["vector"] += cycles
                        self.write(w, i.result, t + latency, "vector result")
                    elif kind == "mfma":
                        cycles = i.cycles
                        issue_free[s], matrix_free[s] = t + SLOT, t + cycles
                        vector_free[s] = t + max(SLOT, round(n.mfma_hold * cycles))
                        packed_free[s] = t + cycles + n.mfma_packed
                        self.busy["vector"] += SLOT
                        self.busy["matrix"] += cycles
                        chained = t + cycles + n.mfma_chain
                        for r in i.result:
                            w.ready[r], w.chained[r] = t + cycles + n.mfma_read, chained
                            w.cause[r] = "MFMA result"
                    elif kind == "lds":
                        cycles = self.where.conflicts.get(k, 0) or max(2, -(-i.bytes // n.lds_bytes))
                        lds_free = max(t + s, lds_free) + cycles
                        self.busy["lds"] += cycles
                        queue.append(lds_free)
                        w.lds.append(lds_free + n.lds_latency)
                    elif kind == "memory":
                        moved = i.bytes * (n.atomic if i.value == 3 else 1)
                        cycles = max(n.address, round(moved * self.memory_rate))
                        memory_free = max(t + s, memory_free) + cycles
                        self.busy["memory"] += cycles
                        queue.append(memory_free)
                        end = memory_free + self.memory_latency
                        w.memory.append(max(end, w.memory[-1]) if w.memory else end)
                        if i.value == 2:
                            self.busy["lds"] += max(2, i.bytes // n.lds_bytes)
                    elif kind == "scalar load":
                        w.lds.append(t + n.scalar_load)
                    elif kind == "scalar":
                        self.write(w, i.result, t + n.scalar_latency, "scalar result")
                    elif kind == "branch":
                        done = t + (n.branch_taken if k < 0 else n.branch)
                    elif kind == "nop":
                        done = t + SLOT * (i.value + 1)
                    elif kind == "setprio":
                        w.priority = i.value
                        waves.sort(key=lambda x: (-x.priority, x.block, x.number))
                    elif kind == "wait":
                        done = t + n.wait
                        while len(w.memory) > i.wait[0]:
                            w.memory.popleft()
                        while len(w.lds) > i.wait[1]:
                            w.lds.popleft()
                    if w.at in w.marks:
                        w.times.append(t)
                    w.issued = t
                    w.at += 1
                    if w.at == len(w.path):
                        w.done = t
                        alive -= 1
                        blocks[w.block] -= 1
                    if kind == "barrier" or w.done >= 0:
                        if w.done < 0:
                            w.waiting = True
                            arrived[w.block] += 1
                        if arrived[w.block] and arrived[w.block] >= blocks[w.block]:
                            arrived[w.block] = 0
                            for other in self.waves:
                                if other.block == w.block and other.waiting:
                                    other.waiting = False
                                    other.stalls["barrier"] += t - other.issued
                                    other.issued = t
                                    self.prepare(other, t + n.barrier)
                                    next_time = min(next_time, max(t + SLOT, other.earliest))
                        if w.done >= 0 or w.waiting:
                            continue
                    else:
                        self.prepare(w, done)
                    next_time = min(next_time, max(w.earliest, t + SLOT))
            if alive:
                assert next_time < 1 << 60, f"no wave can go on in cycle {t}"
                t = max(t + SLOT, -(-next_time // SLOT) * SLOT)
        return max(w.done for w in self.waves)

    @staticmethod
    def write(w: Wave, result: tuple[int, ...], time: int, cause: str) -> None:
        for r in result:
            w.ready[r] = w.chained[r] = time
            w.cause[r] = cause
