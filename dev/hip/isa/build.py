"""Compiles the AMD build of the operations (gfx942, no GPU needed) into shared libraries for device.py."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from compiler import ROOT, Compiler, Error, program_parser, run, start  # noqa: E402

__all__ = ["HERE", "LIBRARIES", "ROOT", "Compiler", "Error", "program_parser", "run", "start", "tool"]
LIBRARIES = ROOT / "build/isa_libraries"


@cache
def tool(name: str) -> str:
    """A program of the compiler's LLVM."""
    return Compiler().tool(name)


def build(folder: Path, program: bool = False) -> None:
    """libamdhip64.so is fake_hip.cpp; libllamac.so has the operations, bridge.cpp and the check programs.

    program: train_llama3 too. CMake keeps its objects in build/isa.
    """
    folder.mkdir(parents=True, exist_ok=True)
    compiler, objects = Compiler(), ROOT / "build/isa"
    clang = compiler.path
    # Debian's folder has links, ROCm's compiler may be one.
    below = [*clang.parents, *clang.resolve().parents]
    headers = next(p / "include" for p in below if (p / "include/hip/hip_runtime.h").exists())

    def call(*command: str | Path, **keywords) -> None:
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, **keywords)

    environment = os.environ | {"HIPCXX": str(clang)}
    if compiler.folder:
        environment["ROCM_PATH"] = str(compiler.folder)
    configure = ["-DLLAMAC_PLATFORM=amd", "-DCMAKE_HIP_ARCHITECTURES=gfx942"]
    configure += [f"-DLLAMAC_{engine}=OFF" for engine in ("GLOO", "MPI", "NCCL")]
    configure += ["-DCMAKE_DISABLE_FIND_PACKAGE_hipblaslt=ON"]
    call("cmake", "-S", ROOT, "-B", objects, *configure, env=environment)
    targets = ["llamac_operations", *(["llamac"] if program else [])]
    call("cmake", "--build", objects, "--parallel", "2", "--target", *targets, env=environment)

    common = ["-std=c++20", "-fPIC", "-fopenmp", "-DLLAMAC_AMD"]
    common += [f"-I{include}" for include in (ROOT / "csrc", ROOT, HERE.parent, ROOT / "tests")]
    host = [*common, "-D__HIP_PLATFORM_AMD__=1", "-idirafter", str(headers), f"-I{objects}/generated"]
    device = [*common, "-x", "hip", "--offload-arch=gfx942", *compiler.flags]
    runtime = folder / "libamdhip64.so"
    call(clang, "-shared", *host, "-O1", HERE / "fake_hip.cpp", f"-Wl,-soname,{runtime.name}", "-o", runtime)
    sources: list[tuple[list[str], Path, str]] = [
        (host, HERE / "bridge.cpp", ""),
        (host, ROOT / "tests/ops/check_operations.cpp", "check_operations_main"),
        (device, ROOT / "tests/ops/check_tile.cpp", "check_tile_main"),
    ]
    if program:
        sources.append((host, ROOT / "csrc/program/main.cpp", "train_llama3_main"))
    linked = []
    for flags, source, main in sources:
        output = folder / f"{source.stem}.o"
        rename = [f"-Dmain={main}"] if main else []
        call(clang, *flags, "-O2", *rename, "-c", source, "-o", output)
        linked.append(output)
    for target in targets:
        linked += [
            o for o in sorted(objects.rglob("*.o")) if f"{target}.dir" in o.parts
        ]  # a target's in its folder
    libraries = ["-L", str(folder), f"-l:{runtime.name}", "-Wl,-rpath,$ORIGIN", "-lxxhash", "-ldl"]
    call(clang, "-shared", *linked, "-fopenmp", *libraries, "-o", folder / "libllamac.so")
