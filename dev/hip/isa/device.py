"""The AMD build in this process: its registry and launchers run unchanged, its kernels on machine.Machine."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from code_object import Module
from fp8 import FORMS
from machine import Machine

from build import HERE, LIBRARIES, program_parser, tool

sys.path.append(str(HERE.parent))
from resources import short_name

# core/dtype.h; numpy has no types for those with names.
NUMBERS = {np.float32: 0, "bf16": 1, np.float64: 2, np.int32: 3}
NUMBERS |= {form: 5 + i for i, form in enumerate(FORMS)}
NAIVE = "naive"  # the variant that explains; all others of the device are optimized


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """bf16 of f32, rounded to nearest, ties to even."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return np.asarray(bits).view(ml_dtypes.bfloat16).astype(np.float32)


def storage_of(dtype) -> np.dtype:
    """Numbers of numpy with the type's bits."""
    return np.dtype(np.uint16 if dtype == "bf16" else np.uint8 if dtype in FORMS else dtype)


def kernel_name(mangled: str) -> str:
    """`f<bf16>` of the mangled `void llamac::(anonymous namespace)::f<llamac::bf16>(float*)`."""
    done = subprocess.run([tool("llvm-cxxfilt"), mangled], capture_output=True, text=True)
    return short_name(done.stdout.strip())


class Tensor:
    """Memory of the fake runtime, full of NaN. set() takes and get() gives numbers, of fp8 their codes."""

    def __init__(self, device, shape, dtype, values=None):
        self.shape, self.dtype = tuple(shape), dtype
        size = int(np.prod(shape)) * storage_of(dtype).itemsize
        p = ctypes.c_void_p()
        assert device.hip.hipMalloc(ctypes.byref(p), ctypes.c_size_t(size)) == 0
        self.at = p.value
        raw = np.frombuffer((ctypes.c_char * size).from_address(self.at), np.uint8)
        self.data = raw.view(storage_of(dtype)).reshape(self.shape)
        if values is not None:
            self.set(values)

    def set(self, values) -> None:
        bits = bf16_bits(values) if self.dtype == "bf16" else np.asarray(values, storage_of(self.dtype))
        self.data[...] = bits.reshape(self.shape)

    def get(self) -> np.ndarray:
        return (from_bf16(self.data) if self.dtype == "bf16" else self.data).astype(np.float64)


class Device:
    """The two libraries of build.py, with the launches of one going to the machine."""

    def __init__(self, build: Path, compute_units: int = 304):
        self.hip = ctypes.CDLL(f"{build}/libamdhip64.so", mode=ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(f"{build}/libllamac.so", mode=ctypes.RTLD_GLOBAL)
        self.machine = Machine()
        self.hip.fake_code.restype = ctypes.c_void_p
        self.modules = []
        for i in range(self.hip.fake_codes()):
            size = ctypes.c_size_t()
            at = self.hip.fake_code(i, ctypes.byref(size))
            blob = ctypes.string_at(at, size.value)
            self.modules.append(Module(blob))
            os.makedirs(f"{build}/code", exist_ok=True)
            with open(f"{build}/code/{i}.hsaco", "wb") as file:  # for hazards.py
                file.write(blob)
        integer, text, size = ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t
        extent, pointers = ctypes.POINTER(ctypes.c_uint * 3), ctypes.POINTER(ctypes.c_void_p)
        self.launch_callback = ctypes.CFUNCTYPE(integer, integer, text, extent, extent, pointers, size)(
            self.launch
        )
        self.occupancy_callback = ctypes.CFUNCTYPE(integer, integer, text, integer, size)(self.occupancy)
        self.hip.fake_set(self.launch_callback, self.occupancy_callback, compute_units)
        self.error: BaseException | None = None  # of a launch
        self.operations = self.read_operations()

    def read_operations(self) -> dict[str, list[str]]:
        """The registry's operations with their device variants, in order of preference."""
        text = ctypes.create_string_buffer(1 << 16)
        self.lib.describe_operations(text, len(text))
        operations: dict[str, list[str]] = {}
        for line in text.value.decode().splitlines():
            operation, variant = line.split()
            operations.setdefault(operation, []).append(variant)
        return operations

    def optimized(self, operation: str) -> list[str]:
        """All device variants but the one that explains."""
        return [variant for variant in self.operations[operation] if variant != NAIVE]

    def launch(self, code, name, grid, block, arguments, dynamic):
        try:
            kernel = self.modules[code].kernels[name.decode()]
            args = [arguments[i] for i in range(len(kernel.explicit))]
            self.machine.launch(kernel, tuple(grid.contents), tuple(block.contents), args, dynamic)
            return 0
        except BaseException as error:  # C++ lies in between: call() raises it
            self.error = error
            return 1

    def occupancy(self, code, name, threads, dynamic) -> int:
        """Blocks per compute unit, which has four SIMDs of 512 VGPRs and 8 waves each, and 64 KiB of LDS."""
        kernel = self.modules[code].kernels[name.decode()]
        waves = -(-threads // 64)
        vgprs = -(-max(kernel.meta[".vgpr_count"], 1) // 8) * 8
        by_registers = min(8, 512 // vgprs) * 4 // waves
        lds = kernel.lds + dynamic
        return max(0, min(by_registers, 65536 // lds if lds else 32))

    def tensor(self, shape, dtype, values=None) -> Tensor:
        return Tensor(self, shape, dtype, values)

    def call(self, operation: str, variant: str, tensors, scalars=()) -> None:
        """tensors: None for a null operand."""
        n = len(tensors)
        data, dtype, rank = (ctypes.c_void_p * n)(), (ctypes.c_int * n)(), (ctypes.c_int * n)()
        shape, stride = (ctypes.c_int64 * (4 * n))(), (ctypes.c_int64 * (4 * n))()
        for i, t in enumerate(tensors):
            if t is None:
                continue
            data[i], rank[i] = t.at, len(t.shape)
            dtype[i] = NUMBERS[t.dtype]
            contiguous = [int(np.prod(t.shape[d + 1 :])) for d in range(rank[i])]
            for d, (extent, step) in enumerate(zip(t.shape, contiguous)):
                shape[4 * i + d], stride[4 * i + d] = extent, step
        real = (ctypes.c_double * max(1, len(scalars)))(*map(float, scalars))
        integer = (ctypes.c_int64 * max(1, len(scalars)))(*map(int, scalars))
        message = ctypes.create_string_buffer(1000)
        self.error = None
        self.machine.log.clear()
        operands = n, data, dtype, rank, shape, stride
        names = operation.encode(), variant.encode()
        if self.lib.call_operation(*names, *operands, len(scalars), real, integer, message):
            raise self.error or RuntimeError(message.value.decode())


def device_of_arguments(description: str | None) -> Device:
    """For programs without flags of their own but these."""
    parser = program_parser(description)
    parser.add_argument("--libraries", type=Path, default=LIBRARIES, help="folder that check.py built")
    parser.add_argument("--compute-units", type=int, default=304, help="of the device (default: %(default)s)")
    options = parser.parse_args()
    return Device(options.libraries, options.compute_units)
