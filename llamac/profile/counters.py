"""Hardware counters per operation, from two short steps of a run under ncu (NVIDIA) or rocprofv3 (AMD).

`llamac profile OUT --counters` calls `collect()`. Kernels belong to the operation in whose range
(csrc/platform/ranges.h) they are launched, so kernels of cuBLASLt and hipBLASLt belong to the products. The
tools' own files stay in OUT/counters. docs/profiling.md says what each counter means.
"""

import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from llamac.base.errors import InputError
from llamac.base.files import read_json
from llamac.base.log import read_log

GUIDE = "docs/profiling.md, Counters"
MOST_SECONDS = 900  # of one run of a tool


@dataclass(frozen=True)
class Counters:
    """Of one operation: means over its kernels, weighted by their time; in percent, but bandwidth in GB/s.
    None: the tool did not count it."""

    kernels: int
    matrix: float | None  # time in which the matrix units work
    vector: float | None  # time in which the vector units work
    occupancy: float | None  # resident warps or waves, of the most that there can be
    stalled: float | None  # warps that wait for memory (NVIDIA), waves that wait for anything (AMD)
    conflicts: float | None  # cycles that LDS or shared memory loses to bank conflicts
    l2_hits: float | None
    read_gbps: float | None  # from HBM
    write_gbps: float | None  # to HBM


@dataclass(frozen=True)
class Sample:
    """One launch of a kernel. operation: "" where it lies in none's range. values: by the tool's names."""

    operation: str
    seconds: float
    values: dict[str, float]


@dataclass(frozen=True)
class Formula:
    """A field of Counters from a tool's counters."""

    names: tuple[str, ...]
    value: Callable[..., float]  # of the sums or means of these counters, in this order


def _share(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


# Metrics of Nsight Compute's documentation, "Metrics Reference".
TIME = "gpu__time_duration.sum"
NCU = {
    "matrix": Formula(("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",), float),
    "vector": Formula(("sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",), float),
    "occupancy": Formula(("sm__warps_active.avg.pct_of_peak_sustained_active",), float),
    "stalled": Formula(("smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct",), float),
    "conflicts": Formula(("l1tex__data_bank_conflicts_pipe_lsu.sum", "sm__cycles_elapsed.sum"), _share),
    "l2_hits": Formula(("lts__t_sector_hit_rate.pct",), float),
    "read_gbps": Formula(("dram__bytes_read.sum.per_second",), lambda rate: 1e-9 * rate),
    "write_gbps": Formula(("dram__bytes_write.sum.per_second",), lambda rate: 1e-9 * rate),
}

# Names: AMD's "MI300 and MI200 Series performance counters and metrics" and counter_defs.yaml of
# rocprofiler-sdk, which has no L2CacheHit and no LDSBankConflict for gfx942, and an MfmaUtil that leaves out
# that a compute unit has four SIMDs. SQ_VALU_MFMA_BUSY_CYCLES is in cycles, summed over SIMDs;
# SQ_ACTIVE_INST_VALU (over SIMDs) and SQ_BUSY_CU_CYCLES (over compute units) are in units of four cycles.
# FETCH_SIZE and WRITE_SIZE are in KiB; divided by the time of the kernel.
ROCPROF = {
    "matrix": Formula(
        ("SQ_VALU_MFMA_BUSY_CYCLES", "SQ_BUSY_CU_CYCLES"), lambda busy, cu: _share(busy, 16 * cu)
    ),
    "vector": Formula(("SQ_ACTIVE_INST_VALU", "SQ_BUSY_CU_CYCLES"), lambda busy, cu: _share(busy, 4 * cu)),
    "occupancy": Formula(("OccupancyPercent",), float),
    "stalled": Formula(("SQ_WAIT_ANY", "SQ_WAVE_CYCLES"), _share),
    "conflicts": Formula(("SQ_LDS_BANK_CONFLICT", "SQ_LDS_IDX_ACTIVE"), _share),
    "l2_hits": Formula(("TCC_HIT_sum", "TCC_MISS_sum"), lambda hits, misses: _share(hits, hits + misses)),
    "read_gbps": Formula(("FETCH_SIZE",), lambda kib: 1024e-9 * kib),
    "write_gbps": Formula(("WRITE_SIZE",), lambda kib: 1024e-9 * kib),
}
# The hardware counts few at once: a run of the program for each group.
PASSES = (
    ("SQ_VALU_MFMA_BUSY_CYCLES", "SQ_ACTIVE_INST_VALU", "SQ_BUSY_CU_CYCLES"),
    ("OccupancyPercent",),
    ("SQ_WAIT_ANY", "SQ_WAVE_CYCLES", "SQ_LDS_BANK_CONFLICT", "SQ_LDS_IDX_ACTIVE"),
    ("TCC_HIT_sum", "TCC_MISS_sum"),
    ("FETCH_SIZE",),
    ("WRITE_SIZE",),
)


def collect(out: Path, program: Path, operations: set[str]) -> dict[str, Counters]:
    """Runs two steps of the run in `out` under the tool of this machine. Operations that no kernel was
    counted for are left out. Raises InputError, one line, where the tool is missing, fails or writes what is
    not expected."""
    if not program.is_file():
        raise InputError(
            f"{program}: expected the program train_llama3, found no file; name it with --program"
        )
    tool = shutil.which("ncu") or shutil.which("rocprofv3")
    if not tool:
        raise InputError(
            "--counters: expected ncu (NVIDIA) or rocprofv3 (AMD) on PATH, found neither; install Nsight "
            f"Compute or rocprofiler-sdk, or add its folder to PATH ({GUIDE})"
        )
    folder = out / "counters"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = [str(program.resolve()), *run_flags(out, folder / "run")]
    if Path(tool).name == "ncu":
        samples, formulas = _run_ncu(tool, folder, command, operations), NCU
    else:
        samples, formulas = _run_rocprof(tool, folder, command, operations), ROCPROF
    if not any(sample.operation for sample in samples):
        raise InputError(
            f"{folder}: expected kernels within ranges of operations, found none among {len(samples)}; the "
            f"program needs NVTX 3 or roctx ({GUIDE})"
        )
    return join(samples, formulas)


def run_flags(out: Path, to: Path) -> list[str]:
    """The flags of two steps as in the run in `out`, on one device, without its validation, samples and
    checkpoints."""
    start = next((event for event in read_log(out / "log.jsonl") if event["event"] == "start"), None)
    if start is None:
        raise InputError(f"{out / 'log.jsonl'}: expected an event start, found none; profile the run again")
    flags = {key: value for key, value in start.items() if key not in ("event", "time")}
    # A replayed graph is one launch, whose kernels have no ranges. One micro-batch has all operations. The
    # log has no --devices, so the program starts one rank, and --shard-group has to divide 1.
    flags |= {"graphs": "off", "steps": 2, "warmup-steps": 0, "resume": "none", "out": str(to), "profile": 0}
    flags |= {"val-data": "", "eval-every": 0, "sample-every": 0, "checkpoint-every": -1}
    flags["shard-group"] = 0
    flags["total-batch-size"] = start["batch-size"] * start["seq-len"]
    words = []
    for key, value in flags.items():
        for each in value if isinstance(value, list) else [value]:
            words += [f"--{key}", str(each)]
    return words


def _run(command: list[str], log: Path, what: str, report: Path | None = None) -> str:
    """What the command prints, also in `log`. report: a file that it writes messages to. Raises InputError
    where it fails."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{what}: expected an end within {MOST_SECONDS} s, found none; profile a smaller --batch-size"
        ) from None
    log.write_text(done.stdout)
    said = done.stdout + (report.read_text(errors="replace") if report and report.exists() else "")
    if "ERR_NVGPUCTRPERM" in said:
        raise InputError(
            f"{what}: expected permission to read counters, found ERR_NVGPUCTRPERM; run as root, or load the "
            "driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if done.returncode:
        last = (said.strip().splitlines() or ["no output"])[-1]
        raise InputError(f"{what}: expected exit status 0, found {done.returncode}: {last}; see {log}")
    return done.stdout


def listed(names: Iterable[str], listing: str, tool: str) -> list[str]:
    """Those of the names that the tool's listing has; the others are named on stderr. ncu lists metrics
    without their suffixes."""
    words = set(re.findall(r"\w+", listing))
    known = [name for name in names if name.split(".")[0] in words]
    if left_out := [name for name in names if name not in known]:
        print(f"{tool} does not list {', '.join(left_out)}: left out", file=sys.stderr)
    if not known:
        raise InputError(f"{tool}: expected a list of this device's counters, found none of ours; {GUIDE}")
    return known


def _names(formulas: dict[str, Formula]) -> list[str]:
    return list(dict.fromkeys(name for formula in formulas.values() for name in formula.names))


# ncu


def _run_ncu(tool: str, folder: Path, command: list[str], operations: set[str]) -> list[Sample]:
    listing = _run([tool, "--query-metrics"], folder / "list.log", "ncu --query-metrics")
    metrics = ",".join(listed([TIME, *_names(NCU)], listing, "ncu"))
    report = folder / "ncu.csv"
    line = [tool, "--csv", "--page", "raw", "--print-units", "base", "--metrics", metrics]
    # The first step loads kernels and tunes products.
    line += ["--clock-control", "none", "--nvtx", "--nvtx-include", "step 2/"]
    line += ["--log-file", str(report)]
    _run([*line, *command], folder / "console.log", "ncu", report)
    return read_ncu(report, operations)


def read_ncu(path: Path, operations: set[str]) -> list[Sample]:
    """The launches in what `ncu --csv --page raw --print-units base --nvtx` writes: lines of ncu's own that
    begin with ==, a heading, units, then a line per launch."""
    if not path.is_file():
        raise InputError(f"{path}: expected a file, found none; see console.log in the same folder")
    lines = path.read_text(errors="replace").splitlines()
    begin = next((k for k, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        last = next((line for line in reversed(lines) if line.strip()), "an empty file")
        raise InputError(
            f'{path}: expected a line that begins with "ID", found none; the last is: {last[:200]}'
        )
    table = list(csv.reader(line for line in lines[begin:] if line.startswith('"')))
    heading = table[0]
    ranges = next((k for k, name in enumerate(heading) if "Push/Pop_Range" in name), None)
    if ranges is None or TIME not in heading:
        lacking = TIME if ranges is not None else "Push/Pop_Range (of --nvtx)"
        raise InputError(f"{path}: expected a column {lacking}, found {', '.join(heading)[:300]}")
    units = dict(zip(heading, table[1])) if len(table) > 1 else {}
    if units.get(TIME, "") not in ("ns", "nsecond"):
        raise InputError(
            f"{path}: {TIME}: expected the unit ns, found {units.get(TIME, 'no line of units')!r}"
        )
    wanted = [(k, name) for k, name in enumerate(heading) if name in _names(NCU)]
    samples = []
    for cells in table[2:]:
        if len(cells) != len(heading):
            raise InputError(f"{path}: launch {cells[0]}: expected {len(heading)} cells, found {len(cells)}")
        # `7  "<default domain>:matmul_forward:none:none"`, one per range of the stack
        around = re.findall(r"<default domain>:([^:\"]*)", cells[ranges])
        inside = [name for name in around if name in operations]
        values = {name: _number(cells[k], path, name) for k, name in wanted if cells[k] != ""}
        seconds = 1e-9 * _number(cells[heading.index(TIME)], path, TIME)
        samples.append(Sample(inside[-1] if inside else "", seconds, values))
    return samples


def _number(text: str, path: Path, column: str) -> float:
    try:
        return float(text.replace(",", ""))  # 16,384
    except ValueError:
        raise InputError(f"{path}: {column}: expected a number, found {text[:60]!r}") from None


# rocprofv3

ROCPROF_COLUMNS = ["Dispatch_Id", "Kernel_Name", "Counter_Name", "Counter_Value"]
ROCPROF_COLUMNS += ["Start_Timestamp", "End_Timestamp"]  # nanoseconds


def _run_rocprof(tool: str, folder: Path, command: list[str], operations: set[str]) -> list[Sample]:
    listing = _run([tool, "--list-avail"], folder / "list.log", "rocprofv3 --list-avail")
    known = set(listed(_names(ROCPROF), listing, "rocprofv3"))
    samples = []
    for k, group in enumerate(PASSES):
        names = [name for name in group if name in known]
        if not names:
            continue
        to = folder / f"pass_{k}"
        # A kernel takes the name of the innermost range around its launch.
        line = [tool, "--marker-trace", "--kernel-rename", "--output-format", "csv", "-d", str(to)]
        _run([*line, "--pmc", *names, "--", *command], folder / f"pass_{k}.log", "rocprofv3")
        files = sorted(to.rglob("*counter_collection.csv"))
        if not files:
            raise InputError(f"{to}: expected a file *counter_collection.csv, found none; see {to}.log")
        for file in files:
            samples += read_rocprof(file, operations)
    return samples


def read_rocprof(path: Path, operations: set[str]) -> list[Sample]:
    """The dispatches in a counter_collection.csv of `rocprofv3 --pmc`: a line per dispatch and counter."""
    with path.open(newline="", errors="replace") as file:
        reader = csv.DictReader(file)
        heading = list(reader.fieldnames or [])
        if lacking := [name for name in ROCPROF_COLUMNS if name not in heading]:
            raise InputError(
                f"{path}: expected a column {lacking[0]}, found {', '.join(heading)[:300] or 'an empty file'}"
            )
        found: dict[str, Sample] = {}
        for cells in reader:
            if any(cells[name] is None for name in ROCPROF_COLUMNS):
                raise InputError(
                    f"{path}: line {reader.line_num}: expected {len(heading)} cells, found fewer"
                )
            begin, end = (_number(cells[name], path, name) for name in ROCPROF_COLUMNS[4:])
            name = cells["Kernel_Name"]
            operation = name if name in operations else ""
            sample = found.setdefault(cells["Dispatch_Id"], Sample(operation, 1e-9 * (end - begin), {}))
            sample.values[cells["Counter_Name"]] = _number(cells["Counter_Value"], path, "Counter_Value")
    return list(found.values())


# Joining


def join(samples: list[Sample], formulas: dict[str, Formula]) -> dict[str, Counters]:
    """Counters by operation. Formulas of several counters are of their sums, so that a kernel counts by its
    cycles or accesses; those of one are means weighted by time, or, of KiB, per second."""
    found = {}
    for operation in sorted({sample.operation for sample in samples} - {""}):
        own = [sample for sample in samples if sample.operation == operation]
        fields = {key: _field(own, formula) for key, formula in formulas.items()}
        # A run per group counts the same kernels again.
        passes = max(1, len({tuple(sorted(sample.values)) for sample in own}))
        found[operation] = Counters(kernels=round(len(own) / passes), **fields)
    return found


def _field(own: list[Sample], formula: Formula) -> float | None:
    counted = [sample for sample in own if all(name in sample.values for name in formula.names)]
    seconds = sum(sample.seconds for sample in counted)
    if not counted or seconds <= 0:
        return None
    sums = [sum(sample.values[name] for sample in counted) for name in formula.names]
    if len(formula.names) > 1:
        return formula.value(*sums)
    if formula.names[0] in ("FETCH_SIZE", "WRITE_SIZE"):
        return formula.value(sums[0] / seconds)
    name = formula.names[0]
    return formula.value(sum(sample.values[name] * sample.seconds for sample in counted) / seconds)


# In profile.json


# In a profile.json: by operation.
KIND = {str: {f.name: float if f.name == "kernels" else (float, None) for f in fields(Counters)}}


def parse(values: dict) -> dict[str, Counters]:
    """Counters by operation, from what is of the KIND."""
    names = [f.name for f in fields(Counters)]
    return {
        operation: Counters(**{name: given.get(name) for name in names})
        for operation, given in values.items()
    }


# Reading them

MANY_BYTES, LOW_MATRIX, LOW_OCCUPANCY, MUCH_STALLED, MANY_CONFLICTS = 1.3, 50, 25, 50, 5
LOW_HITS, MUCH_VECTOR = 50, 60


def findings(c: Counters, limit: str, gbps: float) -> list[str]:
    """What the counters say of an operation whose limit is "memory" or "compute". gbps: the least bytes of
    its description per second of the kernel."""
    said = []
    moved = None if c.read_gbps is None or c.write_gbps is None else c.read_gbps + c.write_gbps
    busy = c.vector is not None and c.vector > MUCH_VECTOR
    if limit == "memory" and moved and gbps and moved > MANY_BYTES * gbps:
        text = f"HBM moves {moved / gbps:.1f} times the bytes of the description: something is read twice"
        if c.l2_hits is not None and c.l2_hits < LOW_HITS:
            text += f", and L2 has only {c.l2_hits:.0f}% of the accesses: use data again sooner"
        said.append(text)
    if limit == "memory" and busy:
        said.append(f"the vector units work {c.vector:.0f}% of the time: use fewer instructions per byte")
    if limit == "compute" and c.matrix is not None and c.matrix < LOW_MATRIX:
        cure = f"the vector units {c.vector:.0f}%: use fewer vector instructions per product"
        cure = f", {cure}" if busy else ": overlap loads with products"
        said.append(f"the matrix units work {c.matrix:.0f}% of the time{cure}")
    if c.conflicts is not None and c.conflicts > MANY_CONFLICTS:
        said.append(f"bank conflicts cost {c.conflicts:.0f}%: change the layout of the tile")
    if c.stalled is not None and c.stalled > MUCH_STALLED:
        low = c.occupancy is not None and c.occupancy < LOW_OCCUPANCY
        cure = "use fewer registers or less LDS per block" if low else "have more loads in flight"
        said.append(f"{c.stalled:.0f}% of the warps' time is waiting: {cure}")
    return said


# What the compiler says

FEW_WAVES, LOW_LOOP = 2, 80


@dataclass(frozen=True)
class Compiled:
    """Of gfx942's code of a variant, the kernel that needs most registers. loop: percent of the matrix cores'
    peak that its loop reaches at most (dev/hip/loops.py); None without a loop of matrix products."""

    operation: str  # or the beginning of several names
    variant: str
    vgpr: int
    agpr: int
    lds: int
    waves: int
    loop: int | None

    def of(self, operation: str, variant: str) -> bool:
        return variant == self.variant and f"{operation}_".startswith(f"{self.operation}_")

    def text(self) -> str:
        loop = "" if self.loop is None else f", loop {self.loop}%"
        return f"{self.vgpr}+{self.agpr} VGPR, LDS {self.lds}, waves {self.waves}{loop}"

    def findings(self, limit: str) -> list[str]:
        """What it says of an operation whose limit is "memory" or "compute"."""
        if limit == "compute" and self.loop is not None and self.loop < LOW_LOOP:
            return [
                f"gfx942's loop reaches at most {self.loop}% of the matrix cores' peak: dev/hip/loops.py "
                "shows whether vector instructions or LDS limit it"
            ]
        # The least of a kernel of the matrix cores, whose sums are in registers.
        if self.waves < FEW_WAVES or (limit == "memory" and self.waves <= FEW_WAVES):
            return [
                f"gfx942 has room for {self.waves} waves per SIMD, with {self.vgpr + self.agpr} registers "
                f"and {self.lds} bytes of LDS: use fewer of them"
            ]
        return []


# The kernels of dev/hip/resources.py --json.
_RESOURCES = {"operation": str, "variant": str, "vgpr": int, "agpr": int, "lds": int, "waves": int}
COMPILED = [_RESOURCES | {"loop": (int, {"most": (int, None)}, None)}]


def parse_compiled(kernels: list) -> tuple[Compiled, ...]:
    """What is COMPILED, by operation and variant."""
    most: dict[tuple[str, str], Compiled] = {}
    for kernel in kernels:
        loop = kernel.get("loop")
        loop = loop.get("most") if isinstance(loop, dict) else loop
        found = Compiled(**{key: kernel[key] for key in _RESOURCES}, loop=loop)
        at = (found.operation, found.variant)
        if at not in most or found.vgpr + found.agpr > most[at].vgpr + most[at].agpr:
            most[at] = found
    return tuple(most.values())


def read_resources(path: Path) -> tuple[Compiled, ...]:
    """The output of dev/hip/resources.py --json."""
    return parse_compiled(read_json(path, {"kernels": COMPILED})["kernels"])
