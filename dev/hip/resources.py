#!/usr/bin/env python3
"""What the AMD compiler makes of every kernel in csrc/ops: registers, LDS, scratch, spills, waves a SIMD, and
counts of its matrix, memory, barrier and atomic instructions. No GPU is needed.

Prints a table for each architecture, then a line for each fault, and exits with 1 where there is one:
scratch, a spill, too few waves, a kernel that belongs to no variant, or one that has not what its variant's
idea says:

"128-bit"        128-bit accesses to global memory. (The scalar path of a kernel may be an instantiation of
                 its own, without any: the one whose first boolean argument is false where its vector twin's
                 is true.)
"matrix cores"   MFMA or WMMA instructions, 128-bit reads of LDS beside them, no flat accesses. Two waves a
                 SIMD are enough: sums and operands are in registers. Helpers may be without. A kernel of
                 fp8 is empty on a chip that does not multiply fp8.

A kernel is named <operation>_<variant>_kernel, a helper of it <operation>_<variant>_kernel_<what>. One that
several operations share is named after the start of their names: matmul_tiled_kernel. LDS whose size the
launch gives is not in the code, so waves do not count it. build/resources keeps the code objects and their
disassembly.

The compiler is that of dev/hip/compiler.py.
"""

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import loops
from compiler import ROOT, Compiler, Error, program_parser, run, start

OPERATIONS = ROOT / "csrc/ops"
FLAGS = [
    *("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-O3", "-std=c++20", "-fopenmp"),
    *("-Wall", "-Wextra", "-Werror", "-DLLAMAC_AMD", f"-I{ROOT / 'csrc'}"),
]


@dataclass(frozen=True)
class Chip:
    """What a kernel's waves share, as LLVM's AMDGPU backend counts it: per SIMD, LDS per `simds` SIMDs."""

    vgprs: int
    granule: int
    waves: int
    lds: int
    simds: int
    sgprs: int | None  # more than these cost one wave; None: every wave has its own


Variants = dict[tuple[str, str], str]  # operation and variant to its idea, in words

CDNA = Chip(vgprs=512, granule=8, waves=8, lds=65536, simds=4, sgprs=100)
CHIPS = {
    "gfx90a": CDNA,
    "gfx942": CDNA,
    "gfx950": replace(CDNA, lds=163840),
    "gfx1100": Chip(vgprs=1536, granule=24, waves=16, lds=131072, simds=4, sgprs=None),
}

# Whether the fp8 of a chip's matrix instructions is fnuz; other chips have none.
FP8_FORMS = {"gfx942": "true", "gfx950": "false"}
MATRIX_WAVES = 2  # that a kernel with matrix instructions needs at least, a SIMD

# Global memory: flat instructions count too; there the compiler could not tell which memory a pointer is to.
# LDS: two 64-bit halves in one instruction are 128 bits.
INSTRUCTIONS = {
    "mfma": r"v_(mfma|smfmac|wmma|swmmac)_",
    "loads": r"(global|buffer|flat)_load_",
    "loads128": r"(global|buffer|flat)_load_(dwordx4|b128)\b",
    "stores": r"(global|buffer|flat)_store_",
    "stores128": r"(global|buffer|flat)_store_(dwordx4|b128)\b",
    "lds_loads": r"ds_(read|load)",
    "lds_loads128": r"ds_(read|load)(_b128|(2|2st64|_2addr|_2addr_stride64)_b64)\b",
    "lds_stores": r"ds_(write|store)[_2]",
    "lds_stores128": r"ds_(write|store)(_b128|(2|2st64|_2addr|_2addr_stride64)_b64)\b",
    "flat": r"flat_(load|store)_",
    "barriers": r"s_barrier",
    "atomics": r"(global|buffer|flat)_atomic_"
    r"|ds_(add|pk_add|sub|rsub|inc|dec|min|max|and|or|xor|wrxchg|storexchg|cmp)",
}


@dataclass(frozen=True)
class Kernel:
    """One kernel in one architecture's code. Bytes: of static LDS a block, of scratch a thread."""

    arch: str
    source: str
    operation: str  # with variant: of <operation>_<variant>_kernel; empty where there is no such variant
    variant: str
    name: str  # demangled, without namespaces and parameters
    main: bool  # not a helper <operation>_<variant>_kernel_<what>
    vgpr: int
    agpr: int
    sgpr: int
    lds: int
    scratch: int
    vgpr_spills: int
    sgpr_spills: int
    block: int  # the most threads it may be launched with
    waves: int  # a SIMD
    instructions: dict[str, int]
    # loops.py's figures; empty without a loop of MFMA on gfx942
    loop: dict[str, int] = field(default_factory=dict)


def parse_notes(text: str) -> list[dict[str, str]]:
    """The kernels' entries in `llvm-readelf --notes`: name to value, the arguments' own entries left out."""
    section = re.search(r"^amdhsa\.kernels:(.*?)^amdhsa\.", text, re.MULTILINE | re.DOTALL)
    entries = re.split(r"^  - ", section[1], flags=re.MULTILINE)[1:] if section else []
    return [dict(re.findall(r"^(?:    )?\.(\w+): +(\S+)", entry, re.MULTILINE)) for entry in entries]


def count(body: str) -> dict[str, int]:
    """INSTRUCTIONS in the instructions of a symbol."""
    return {name: len(re.findall(rf"^\s+(?:{p})", body, re.MULTILINE)) for name, p in INSTRUCTIONS.items()}


def occupancy(chip: Chip, vgpr: int, sgpr: int, lds: int, block: int, wavefront: int) -> int:
    """Waves a SIMD that registers and LDS leave room for, in whole blocks. vgpr: AGPRs included."""
    granules = -(-max(vgpr, 1) // chip.granule)
    by_registers = min(chip.waves, max(1, chip.vgprs // (granules * chip.granule)))
    if chip.sgprs is not None and sgpr > chip.sgprs:
        by_registers = min(by_registers, chip.waves - 1)
    waves = -(-block // wavefront)
    blocks = chip.waves * chip.simds // waves
    if lds:
        blocks = min(blocks, max(1, chip.lds // lds))
    return min(by_registers, -(-blocks * waves // chip.simds))


def short_name(demangled: str) -> str:
    """`void llamac::(anonymous namespace)::f<llamac::bf16>(float*)` is `f<bf16>`."""
    text = re.sub(r"[\w:]+\([^()]*\)::'(lambda\d*)'\([^()]*\)", r"\1", demangled)
    text = text.replace("(anonymous namespace)::", "")
    depth = 0
    for end, letter in enumerate(text):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            text = text[:end]
            break
    return re.sub(r"\b\w+::", "", text.removeprefix("void "))


def compile_kernels(
    compiler: Compiler, source: Path, arch: str, folder: Path, variants: Variants
) -> list[Kernel]:
    """The kernels of one file; folder/<arch>/ keeps its code object and disassembly."""
    inside = source.absolute().is_relative_to(OPERATIONS)
    name = source.absolute().relative_to(OPERATIONS) if inside else Path(source.name)
    code = (folder / arch / name).with_suffix(".hsaco")
    code.parent.mkdir(parents=True, exist_ok=True)
    run(compiler.path, *FLAGS, *compiler.flags, f"--offload-arch={arch}", source, "-o", code)
    notes = parse_notes(run(compiler.tool("llvm-readelf"), "--notes", code))
    if not notes:
        return []
    disassembly = run(compiler.tool("llvm-objdump"), "-d", "--no-show-raw-insn", code)
    code.with_suffix(".s").write_text(disassembly)
    bodies = loops.symbols(disassembly)
    names = run(compiler.tool("llvm-cxxfilt"), *(note["name"] for note in notes)).splitlines()
    kernels = []
    for note, demangled in zip(notes, names):
        body = bodies[note["name"]]
        kernel = describe(note, short_name(demangled), count(body), str(name), arch, variants)
        if arch == "gfx942" and (loop := loops.loop_of(body)):
            kernel = replace(kernel, loop=loops.figures(loop))
        kernels.append(kernel)
    return kernels


def variant_of(name: str, variants: Variants) -> tuple[str, str, bool]:
    """Operation (or the start of several names) and variant of a kernel, and whether it is no helper."""
    if found := re.match(r"(\w+?)_kernel(_\w+)?(?=<|$)", name):
        for operation, variant in variants:
            start = found[1].removesuffix(f"_{variant}")
            if start != found[1] and (operation == start or operation.startswith(f"{start}_")):
                return start, variant, not found[2]
    return "", "", False


def describe(
    note: dict[str, str], name: str, instructions: dict[str, int], source: str, arch: str, variants: Variants
) -> Kernel:
    """A kernel from its entry in the notes and its instructions."""
    operation, variant, main = variant_of(name, variants)
    value = {key: int(text) for key, text in note.items() if text.isdigit()}
    vgpr, sgpr, agpr = value["vgpr_count"], value["sgpr_count"], value.get("agpr_count", 0)
    lds, block = value["group_segment_fixed_size"], value["max_flat_workgroup_size"]
    return Kernel(
        arch=arch,
        source=source,
        operation=operation,
        variant=variant,
        name=name,
        main=main,
        vgpr=vgpr - agpr,  # the notes count both kinds of a unified file
        agpr=agpr,
        sgpr=sgpr,
        lds=lds,
        scratch=value["private_segment_fixed_size"],
        vgpr_spills=value["vgpr_spill_count"],
        sgpr_spills=value["sgpr_spill_count"],
        block=block,
        waves=occupancy(CHIPS[arch], vgpr, sgpr, lds, block, value["wavefront_size"]),
        instructions=instructions,
    )


def parse_variants(listing: str) -> Variants:
    """The variants that `train_llama3 --list-kernels` prints."""
    variants = {}
    operation = variant = ""
    for line in listing.splitlines():
        if found := re.match(r"(\w+):", line):
            operation, variant = found[1], ""
        elif operation and (found := re.match(r"[ *] (\S+) +\S.*? {2,}(.*)", line)):
            variant = found[1]
            variants[operation, variant] = found[2]
        elif variant:  # the idea goes on
            variants[operation, variant] += f" {line.strip()}"
    if not variants:
        raise Error("--list-kernels: expected operations with variants, found none")
    return variants


def find_program() -> Path:
    """The newest build's train_llama3."""
    programs = [*ROOT.glob("build/*/train_llama3"), *ROOT.glob("train_llama3")]
    programs = [program for program in programs if program.is_file()]
    if not programs:
        raise Error("no build/*/train_llama3 to list the variants: `make train_llama3` builds it")
    return max(programs, key=lambda program: program.stat().st_mtime)


def is_wide(kernel: Kernel) -> bool:
    """Whether it has 128-bit accesses to global memory."""
    return kernel.instructions["loads128"] + kernel.instructions["stores128"] > 0


def vector_twin(name: str) -> str:
    """`f<bf16, 8, true>` of its scalar path `f<bf16, 8, false>`; of every other kernel itself."""
    of_no_type = r"\b(?<!fp8<[23], )(true|false)\b"
    return re.sub(of_no_type, "true", name, count=1)


def is_absent(kernel: Kernel) -> bool:
    """Whether it is an empty kernel of types of fp8 that the chip's matrix instructions do not take."""
    forms = set(re.findall(r"fp8<\d+, (true|false)>", kernel.name))
    return kernel.vgpr == 0 and bool(forms - {FP8_FORMS.get(kernel.arch)})


def ideas(kernel: Kernel, variants: Variants) -> str:
    """Of the variants that the kernel belongs to, one or (matmul_tiled_kernel) several operations'."""
    name = kernel.operation
    return "; ".join(
        idea
        for (operation, variant), idea in variants.items()
        if variant == kernel.variant and (operation == name or operation.startswith(f"{name}_"))
    )


def faults(kernels: list[Kernel], variants: Variants, min_waves: int) -> Iterator[str]:
    """What is wrong with the kernels, a line each."""
    wide = {(kernel.arch, kernel.name) for kernel in kernels if is_wide(kernel)}
    matrix = {(k.arch, k.operation, k.variant) for k in kernels if k.instructions["mfma"]}
    for k in kernels:
        where = f"{k.arch} {k.source} {k.name}:"
        idea = ideas(k, variants)
        multiplies = "matrix cores" in idea and k.instructions["mfma"] > 0
        if k.scratch:
            yield f"{where} {k.scratch} bytes of scratch, expected none"
        for kind, spills in (("VGPR", k.vgpr_spills), ("SGPR", k.sgpr_spills)):
            if spills:
                yield f"{where} {spills} {kind} spills, expected none"
        fewest = min(MATRIX_WAVES, min_waves) if multiplies else min_waves
        if k.waves < fewest:
            yield f"{where} {k.waves} waves a SIMD, expected at least {fewest}"
        if not idea:
            yield f"{where} expected <operation>_<variant>_kernel of a variant in --list-kernels, found none"
        narrow = not {(k.arch, k.name), (k.arch, vector_twin(k.name))} & wide
        if "128-bit" in idea and (k.main or multiplies) and narrow and not is_absent(k):
            yield f"{where} expected the 128-bit accesses to global memory of its variant's idea, found none"
        if multiplies and (flat := k.instructions["flat"]):
            yield f"{where} {flat} flat accesses, expected none: to the compiler they may be LDS or memory"
        if multiplies and not k.instructions["lds_loads128"]:
            yield f"{where} expected 128-bit reads of LDS beside its matrix instructions, found none"
        helper = not k.main and (k.arch, k.operation, k.variant) in matrix
        if "matrix cores" in idea and not (multiplies or helper or is_absent(k)):
            yield f"{where} expected the matrix instructions of its variant's idea, found none"


def table(kernels: list[Kernel]) -> str:
    """One architecture's kernels, a row each. Memory instructions: 128-bit ones / all."""
    head = ["operation", "variant", "kernel", "VGPR", "AGPR", "SGPR", "LDS", "scratch", "spills V/S", "block"]
    head += ["waves", "MFMA", "loads", "stores", "LDS loads", "LDS stores", "barriers", "atomics"]
    rows = [head]
    for k in kernels:
        n = k.instructions
        row = [k.operation or "?", k.variant or "?", k.name, k.vgpr, k.agpr, k.sgpr, k.lds, k.scratch]
        row += [f"{k.vgpr_spills}/{k.sgpr_spills}", k.block, k.waves, n["mfma"]]
        row += [f"{n[f'{what}128']}/{n[what]}" for what in ("loads", "stores", "lds_loads", "lds_stores")]
        row += [n["barriers"], n["atomics"]]
        rows.append([str(cell) for cell in row])
    widths = [max(map(len, column)) for column in zip(*rows)]
    sides = [str.ljust] * 3 + [str.rjust] * (len(head) - 3)  # columns of text, then of numbers
    lines = ("  ".join(side(*cell) for side, *cell in zip(sides, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def parse_arguments() -> argparse.Namespace:
    parser = program_parser(__doc__)
    parser.add_argument("sources", nargs="*", type=Path, help="files to compile, instead of all of csrc/ops")
    parser.add_argument(
        "--arch",
        action="append",
        choices=[*CHIPS, "all"],
        help="may be repeated (default: gfx942); all: those that the compiler knows",
    )
    parser.add_argument("--min-waves", type=int, default=4, help="fewest waves a SIMD (default: %(default)s)")
    parser.add_argument("--program", type=Path, help="lists the variants (default: the newest train_llama3)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/resources", help="where code objects go")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    compiler = Compiler()
    archs = list(dict.fromkeys(options.arch or ["gfx942"]))
    if "all" in archs:
        archs = [arch for arch in CHIPS if compiler.knows(arch)]
    sources = options.sources or sorted(OPERATIONS.glob("**/*.hip"))
    variants = parse_variants(run((options.program or find_program()).absolute(), "--list-kernels"))
    jobs = [(source, arch) for arch in archs for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda job: compile_kernels(compiler, *job, options.out, variants), jobs)
        kernels = [kernel for result in results for kernel in result]
    kernels.sort(key=lambda k: (archs.index(k.arch), k.operation, k.variant, not k.main, k.name))
    wrong = list(faults(kernels, variants, options.min_waves))
    if not (kernels or options.sources) and any(variant == "naive" for _, variant in variants):
        wrong.append("csrc/ops: expected the kernels of the variants that --list-kernels shows, found none")
    if options.json:
        print(json.dumps({"kernels": [asdict(kernel) for kernel in kernels], "faults": wrong}))
    else:
        by_arch = defaultdict(list)
        for kernel in kernels:
            by_arch[kernel.arch].append(kernel)
        for arch in archs:
            print(f"{arch}: {len(by_arch[arch])} kernels")
            if by_arch[arch]:
                print(table(by_arch[arch]) + "\n")
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    start(main)
