"""tinygrad's emulator of single gfx942 instructions, from the unmodified checkout that TINYGRAD names."""

import os
import sys
from pathlib import Path

from build import tool

if not os.path.isfile(os.path.join(os.environ.get("TINYGRAD", ""), "test/mockgpu/amd/emu.py")):
    found = os.environ.get("TINYGRAD", "nothing")
    expected = "a checkout of tinygrad with test/mockgpu/amd/emu.py (dev/hip/isa/README.md)"
    print(f"TINYGRAD: expected {expected}, found {found}", file=sys.stderr)
    sys.exit(2)
if not any(os.access(os.path.join(folder, "clang"), os.X_OK) for folder in os.get_exec_path()):
    os.environ["PATH"] += f":{Path(tool('clang')).parent}"  # the emulator calls it
os.environ.setdefault("DEV", "CPU")
sys.path.insert(0, os.environ["TINYGRAD"])

import test.mockgpu.amd.emu as emu
from tinygrad.renderer.amd import decode_inst
from tinygrad.runtime.autogen.amd.cdna import ins as instructions
from tinygrad.runtime.support.elf import elf_loader

__all__ = ["decode_inst", "elf_loader", "emu", "instructions"]
