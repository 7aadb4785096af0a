"""Executes the gfx942 code of every optimized kernel on an emulated MI300X and compares with float64.

No GPU is needed. The AMD build's own launchers start the kernels. Each call runs with the waves of a block
in order, in reverse and interleaved at random; guards, inputs and bits are compared. README.md says what is
needed and what is not seen.
"""

import argparse
import subprocess
import sys
import time
import traceback
from pathlib import Path

from build import LIBRARIES, build

HERE = Path(__file__).resolve().parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--libraries", type=Path, default=LIBRARIES, help="folder to build in")
    parser.add_argument("--no-build", action="store_true", help="use the libraries as they are")
    parser.add_argument("--program", action="store_true", help="link train_llama3 too, for program.py")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose `operation variant` matches")
    parser.add_argument("--quick", action="store_true", help="one order of waves instead of three")
    parser.add_argument(
        "--races", action="store_true", help="find LDS accesses that no barrier separates; one order, slow"
    )
    parser.add_argument(
        "--compute-units", type=int, default=304, help="of the emulated device (default: %(default)s)"
    )
    return parser.parse_args()


def print_table(rows) -> None:
    print(
        f"\n{'operation':26s} {'variant':12s} {'shape':52s} {'result':8s} "
        f"{'of tolerance':>12s} {'instructions':>12s}"
    )
    for r in rows:
        name = f"{r.operation:26s} {r.variant:12s} {r.shape:52s}"
        print(f"{name} {r.status:8s} {r.share:12.2f} {r.instructions:12d}  {r.errors}")


def never_ran(harness) -> list[str]:
    """Optimized variants in the registry, and kernels of theirs in the code objects, that no case ran."""
    from harness import kernel_name

    device = harness.device
    # A kernel is named after its operations and variant: matmul_tiled_kernel. The other code objects are
    # those of tests/check_tile.cpp. `naive` needs no case here.
    words = tuple({operation.split("_")[0] for operation in device.operations})
    # Without code: of a form that the chip does not multiply.
    loaded = {k.name for module in device.modules for k in module.kernels.values() if not k.is_empty}
    names = {kernel_name(name) for name in loaded - set(device.machine.executed)}
    kernels = [n for n in names if n.startswith(words) and "_naive_" not in n]
    ran = {(row.operation, row.variant) for row in harness.rows}
    variants = [
        f"{operation} {variant.name}"
        for operation in device.operations
        for variant in device.optimized(operation)
        if (operation, variant.name) not in ran
    ]
    return sorted(kernels) + variants


def print_races(machine) -> None:
    from device import demangle

    races = machine.races
    print(f"LDS: {races.checked} accesses of waves checked, {len(races.found)} places race")
    for (kernel, name, at), count in races.found.most_common():
        print(f"  {count} times {name} at +{at:#x} of {demangle(kernel)[:150]}")


def main() -> int:
    options = parse_arguments()
    import emulator  # noqa: F401  # ends the program where TINYGRAD is no checkout: before minutes of compiling

    if not options.no_build:
        build(options.libraries, options.program)
    import cases_quantize as fp8
    from cases_matrix import attention, attention_next, matmul, matmul_of_one_row, scaled_matmul
    from cases_optimizer import adamw, adamw_quantize
    from cases_rows import argmax, precompute_cis, repeat_kv, rmsnorm, rope, swiglu
    from cases_training import convert, cross_entropy, embedding, global_norm, hash_bits, mean_loss
    from device import Device
    from harness import Harness
    from lds import Races

    device = Device(options.libraries, options.compute_units)
    if options.races:
        device.machine.races = Races()
    one_order = options.quick or options.races
    harness = Harness(device, ("forward",) if one_order else ("forward", "reverse", "random"), options.only)
    start, broken = time.time(), 0
    elementwise = (rmsnorm, swiglu, rope, precompute_cis, repeat_kv, argmax)
    training = cross_entropy, mean_loss, adamw, global_norm, hash_bits, convert, embedding
    codes = fp8.quantize, fp8.quantize_rows, fp8.swiglu_forward_quantize, fp8.swiglu_backward_quantize
    codes += fp8.rope_backward_quantize, adamw_quantize
    products = matmul, matmul_of_one_row, scaled_matmul, attention, attention_next
    for group in (*elementwise, *training, *codes, *products):
        try:
            group(harness)
        except Exception:  # of the case itself: the other groups still run
            traceback.print_exc()
            broken += 1
    print_table(harness.rows)
    wrong = [row for row in harness.rows if row.status != "right"]
    kernels = {kernel for row in harness.rows for kernel in row.kernels}
    print(
        f"\n{len(harness.rows)} cases, {len(wrong)} wrong, {broken} groups "
        f"broken; {len(kernels)} kernels; {sum(device.machine.executed.values())} wave instructions of "
        f"{len(device.machine.opcodes)} opcodes in {time.time() - start:.0f} s"
    )
    if options.races:
        print_races(device.machine)
        wrong += list(device.machine.races.found)
    if not options.only:
        missing = never_ran(harness)
        for name in missing:
            print(f"never ran: {name}")
        wrong += missing
        hazards = subprocess.run([sys.executable, HERE / "hazards.py", options.libraries / "code"])
        broken += hazards.returncode != 0
    return 1 if wrong or broken else 0


if __name__ == "__main__":
    sys.exit(main())
