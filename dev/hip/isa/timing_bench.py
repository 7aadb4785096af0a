#!/usr/bin/env python3
"""Small streams of instructions whose cycles settle the timing model's rules: measured beside predicted.

Compiles a HIP program for gfx942 and runs it; --predict and --source need no GPU. The cycles are those of
s_memtime, the clock is their number per s_memrealtime's 10 ns.
"""

import subprocess
from pathlib import Path

from timing_unit import SIMDS, Memory, Unit, Wave, decode, numbers, table

from build import Compiler, program_parser, run, start

ROUNDS, UNROLLED = 2000, 4
LDS, MEMORY = "s_waitcnt lgkmcnt(0)", "s_waitcnt vmcnt(0)"
ADD, OWN, PACKED = (
    "v_add_f32 v{0}, v1, v2",
    "v_add_f32 v10, v10, v2",
    "v_pk_mul_f32 v[{0}:{1}], v[2:3], v[4:5]",
)
EXP, CHAIN = "v_exp_f32 v{0}, v1", "v_exp_f32 v10, v10"
SMALL = "v_mfma_f32_16x16x16_bf16 v[{0}:{1}], v[2:3], v[4:5], v[{0}:{1}]"
LARGE = "v_mfma_f32_32x32x8_bf16 a[{0}:{1}], v[2:3], v[4:5], a[{0}:{1}]"
READ, LOAD = "ds_read_b128 v[{0}:{1}], {2}", "global_load_dwordx4 v[{0}:{1}], %[memory], off"


def several(line: str, count: int, size: int = 1, *rest: str) -> list[str]:
    """The instruction with results in registers of their own, from v16 or a0."""
    first = 0 if " a[" in line else 16
    return [line.format(first + size * i, first + size * (i + 1) - 1, *rest) for i in range(count)]


ADDS, PRODUCTS = several(ADD, 12), several(SMALL, 4, 4)
# Streams: of all waves, or of the first and the second wave of each SIMD.
BENCHES: dict[str, list[list[str]]] = {
    "vector, independent": [ADDS],
    "vector, dependent": [[OWN] * 12],
    "exp, independent": [several(EXP, 4)],
    "exp, dependent": [[CHAIN] * 4],
    "packed f32": [several(PACKED, 4, 2)],
    "MFMA 16x16x16, independent": [PRODUCTS],
    "MFMA 16x16x16, one accumulator": [PRODUCTS[:1] * 4],
    "MFMA 32x32x8, independent": [several(LARGE, 2, 16)],
    "MFMA and 3 vector, one wave": [[PRODUCTS[0], *several(ADD, 20)[8:11]]],
    "MFMA and 1 packed, one wave": [[PRODUCTS[0], "v_pk_mul_f32 v[40:41], v[2:3], v[4:5]"]],
    "MFMA, then a read of its result": [[PRODUCTS[0], "v_add_f32 v10, v16, v2"]],
    "two waves: vector beside MFMA": [[OWN, "s_nop 2"] * 4, PRODUCTS],
    "two waves: exp beside MFMA": [[CHAIN, "s_nop 5"] * 4, PRODUCTS],
    "LDS, latency": [[*several(READ, 1, 4, "%[near]"), LDS]],
    "LDS, 8 reads": [[*several(READ, 8, 4, "%[near]"), LDS]],
    "LDS, 8 reads of one bank": [[*several(READ, 8, 4, "%[bank]"), LDS]],
    "L1, latency": [[*several(LOAD, 1, 4), MEMORY]],
    "L1, 8 loads": [[*several(LOAD, 8, 4), MEMORY]],
    "barrier": [["s_barrier"]],
}
LOOP = ["s_sub_u32 s24, s24, 1", "s_cmp_lg_u32 s24, 0", "s_cbranch_scc1 1b"]
SOURCE = """#include <hip/hip_runtime.h>
#include <cstdio>
#define CLOCKS(t, r) "s_memtime %[" t "]\\n s_memrealtime %[" r "]\\n s_waitcnt lgkmcnt(0)\\n"
#define STREAM(body)                                                                            \\
    asm volatile("s_movk_i32 s24, ROUNDS\\n s_barrier\\n" CLOCKS("t0", "r0")                    \\
                 "1:\\n" body "s_waitcnt vmcnt(0) lgkmcnt(0)\\n" CLOCKS("t1", "r1")             \\
                 : [t0] "=&s"(t0), [t1] "=&s"(t1), [r0] "=&s"(r0), [r1] "=&s"(r1)               \\
                 : [memory] "v"(memory), [near] "v"(near_), [bank] "v"(bank)                    \\
                 : "memory", "scc", "s24", CLOBBERS)
KERNELS
template <class Kernel>
void measure(const char* name, Kernel kernel, int threads, unsigned long long* out) {
    for (int again = 0; again < 3; again++) kernel<<<1, threads, 65536>>>(out);
    unsigned long long all[2] = {};
    (void)hipMemcpy(all, out, sizeof all, hipMemcpyDeviceToHost);
    const double cycles = double(all[0]);
    printf("%s\\t%.2f\\t%.3f\\n", name, cycles / ROUNDS / UNROLLED, cycles / double(all[1]) / 10);
}
int main() {
    unsigned long long* out;
    if (hipMalloc(&out, 1 << 20) != hipSuccess) return 1;
CALLS
    return hipDeviceSynchronize() != hipSuccess;
}
"""
KERNEL = """__global__ void __launch_bounds__(512) bench_%d(unsigned long long* out) {
    unsigned long long t0, t1, r0, r1, *memory = out + 64 + 2 * (threadIdx.x %% 64);
    int near_ = threadIdx.x %% 64 * 16, bank = threadIdx.x %% 64 * 128;
    %s
    if (threadIdx.x == 0) out[0] = t1 - t0, out[1] = r1 - r0;
}
"""


def source() -> str:
    def quoted(lines: list[str]) -> str:
        return "STREAM(" + " ".join(f'"{line}\\n"' for line in lines * UNROLLED + LOOP) + ");"

    kernels, calls = [], []
    for i, (name, streams) in enumerate(BENCHES.items()):
        body = quoted(streams[0])
        if len(streams) == 2:
            body = f"if (threadIdx.x < 256) {{ {body} }} else {{ {quoted(streams[1])} }}"
        kernels.append(KERNEL % (i, body))
        calls.append(f'    measure("{name}", bench_{i}, {256 * len(streams)}, out);')
    clobbers = ", ".join([f'"v{i}"' for i in range(10, 48)] + [f'"a{i}"' for i in range(32)])
    text = SOURCE.replace("KERNELS", "\n".join(kernels)).replace("CALLS", "\n".join(calls))
    for name, value in (("CLOBBERS", clobbers), ("ROUNDS", ROUNDS), ("UNROLLED", UNROLLED)):
        text = text.replace(name, str(value))
    return text


def predicted(streams: list[list[str]], rule: str) -> float:
    """Cycles of the first stream; waves of the second go on for as long."""
    hold = table()["rule"][rule]["mfma_hold"]
    named = {"%[memory]": "v[60:61]", "%[near]": "v62", "%[bank]": "v63"}
    code, paths = [], []
    for stream in streams:
        lines = stream * UNROLLED + LOOP
        for name, register in named.items():
            lines = [line.replace(name, register) for line in lines]
        paths.append([*range(len(code), len(code) + len(lines) - 1), ~(len(code) + len(lines) - 1)])
        code += [decode(*line.split(" ", 1)) if " " in line else decode(line) for line in lines]
    # 64 rows of 128 bytes begin in one bank: each lane's words come one after the other.
    conflicts = {k: 64 * 4 for k, i in enumerate(code) if i.kind == "lds" and "v63" in i.operands}
    waves = [Wave(paths[n // SIMDS] * 60, 0, n, (0,)) for n in range(SIMDS * len(paths))]
    for w in waves:
        w.marks = tuple(range(0, len(w.path), len(w.path) // 60))
    Unit(code, waves, numbers(mfma_hold=hold), Memory(l1=1.0, conflicts=conflicts)).run()
    return (waves[0].times[39] - waves[0].times[9]) / 30 / UNROLLED


def main() -> int:
    parser = program_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/timing_bench"), help="folder (%(default)s)")
    parser.add_argument("--predict", action="store_true", help="do not measure")
    parser.add_argument("--source", action="store_true", help="print the program")
    options = parser.parse_args()
    if options.source:
        print(source(), end="")
        return 0
    measured: dict[str, tuple[float, float]] = {}
    if not options.predict:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "bench.hip").write_text(source())
        compiler, program = Compiler(), options.out / "bench"
        flags = ["-O2", "--offload-arch=gfx942", *compiler.flags]
        run(compiler.path, "-x", "hip", *flags, options.out / "bench.hip", "-o", program)
        done = subprocess.run([program], capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            name, cycles, ghz = line.split("\t")
            measured[name] = float(cycles), float(ghz)
    rules = list(table()["rule"])
    print(f"| stream | {' | '.join(rules)} | measured | GHz |\n| --- | ---: | ---: | ---: | ---: |")
    for name, streams in BENCHES.items():
        found = "{:.1f} | {:.2f}".format(*measured[name]) if name in measured else " | "
        both = " | ".join(f"{predicted(streams, rule):.1f}" for rule in rules)
        print(f"| {name} | {both} | {found} |")
    return 0


if __name__ == "__main__":
    start(main)
