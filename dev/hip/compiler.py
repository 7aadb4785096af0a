"""The compiler of AMD's code: ROCm's if dev/platform.sh finds one, else Debian's (dev/hip/rocm_folder.sh).
Also what the programs of dev/hip have in common.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Error(Exception):
    """Its text is the one line to print."""


def program_parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def start(main: Callable[[], int]) -> None:
    """Run a program's main(), whose result is the exit code. An Error is printed, and exits with 2."""
    try:
        sys.exit(main())
    except Error as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


def run(*command: str | Path) -> str:
    """The command's output. Raises Error with what it printed where it fails."""
    words = " ".join(map(str, command))
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise Error(f"{words}: {error.strerror}") from error
    if done.returncode:
        raise Error(f"{words}: exit code {done.returncode}\n{done.stderr.strip()}")
    return done.stdout


class Compiler:
    """A HIP compiler. flags: those by which it finds the device library."""

    def __init__(self) -> None:
        found = run(ROOT / "dev/platform.sh", "compiler", "amd").strip()
        self.folder = None if found else ROOT / "build/rocm"  # a folder like a ROCm installation
        self.path = Path(found) if found else ROOT / "build/rocm/llvm/bin/clang++"
        self.flags = [] if found else [f"--rocm-path={self.folder}"]
        if not found:
            run(ROOT / "dev/hip/rocm_folder.sh", self.folder)

    def tool(self, name: str) -> str:
        """A program of its LLVM."""
        return run(self.path, f"-print-prog-name={name}").strip()

    def knows(self, arch: str) -> bool:
        target = "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-nogpulib"
        try:
            run(self.path, "-x", "c", *target, "-fsyntax-only", "/dev/null")
        except Error:
            return False
        return True
