"""ROCm in the layouts that users have: what dev/platform.sh and CMake find of it. Here it is an imitation
whose compiler compiles nothing; `make rocm` builds with a real one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

PLATFORM = ROOT / "dev/platform.sh"
IMPORTED = """add_library({name} SHARED IMPORTED)
set_target_properties({name} PROPERTIES IMPORTED_LOCATION {rocm}/lib/{file})
"""
COMPILER = """#!/bin/sh
case "$*" in
    -print-file-name=libomp.so) ls {rocm}/lib/llvm/lib/clang/22/../../libomp.so || echo libomp.so ;;
    *--offload-arch=gfx950*) exit {without_gfx950} ;;
    *) echo "Found HIP installation: {rocm}, version 7.2.53211" >&2 ;;
esac
"""


def write(path: Path, text: str = "", mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def rocm(tmp_path):
    """AMD's layout, with hipconfig for PATH in a folder of its own, as distributions have it."""
    rocm = tmp_path / "opt/rocm-7.2.4"
    write(rocm / "lib/llvm/bin/clang++", COMPILER.format(rocm=rocm, without_gfx950=0), 0o755)
    (rocm / "llvm").symlink_to("lib/llvm")
    (rocm / "lib/llvm/lib/clang/22").mkdir(parents=True)
    for file in ("lib/llvm/lib/libomp.so", "lib/librccl.so", "lib/libamdhip64.so", "include/rccl/rccl.h"):
        write(rocm / file)
    package = rocm / "lib/cmake"
    device = "add_library(hip-lang::device INTERFACE IMPORTED)\n"
    device += "set(_CMAKE_HIP_DEVICE_RUNTIME_TARGET hip-lang::device)\n"
    write(package / "hip-lang/hip-lang-config.cmake", device)
    hip = IMPORTED.format(name="hip::host", rocm=rocm, file="libamdhip64.so")
    write(package / "hip/hip-config.cmake", hip)
    blaslt = "include(CMakeFindDependencyMacro)\nfind_dependency(hipblas-common)\n"
    blaslt += IMPORTED.format(name="roc::hipblaslt", rocm=rocm, file="libhipblaslt.so")
    write(package / "hipblaslt/hipblaslt-config.cmake", blaslt)
    write(package / "hipblas-common/hipblas-common-config.cmake")
    write(tmp_path / "bin/hipconfig", f"#!/bin/sh\nprintf %s {rocm}/lib/llvm/bin\n", 0o755)
    return rocm


def configure(rocm: Path, *flags: str, **variables: str) -> tuple[str, str]:
    """build.ninja, and what CMake says in one line. What it would find out by compiling is given."""
    build = rocm.parents[1] / "build"
    given = {
        "COMPILER_ID_RUN": "1", "COMPILER_ID": "Clang", "COMPILER_VERSION": "22", "COMPILER_WORKS": "1",
        "ABI_COMPILED": "1", "COMPILER_ABI": "ELF", "IMPLICIT_LINK_DIRECTORIES": f"/usr/lib;{rocm}/lib",
    }  # fmt: skip
    command = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", build, "-DLLAMAC_PLATFORM=amd"]
    command.append("-DBUILD_TESTING=OFF")
    command += [f"-DCMAKE_HIP_{name}={value}" for name, value in given.items()]
    path = f"{rocm.parents[1]}/bin:{os.environ['PATH']}"
    found = subprocess.run(
        [*command, *flags], env={"PATH": path, **variables}, capture_output=True, text=True
    )
    ninja = build / "build.ninja"
    return ninja.read_text() if ninja.exists() else "", " ".join((found.stdout + found.stderr).split())


def test_what_a_rocm_has_is_used_without_a_variable(rocm):
    ninja, said = configure(rocm)
    assert "-DLLAMAC_BLASLT" in ninja and "no hipBLASLt" not in said and "no NCCL" not in said
    (link,) = [part for part in ninja.split("\n\n") if part.startswith("build train_llama3:")]
    (paths,) = [word for word in link.split() if word.startswith("-Wl,-rpath,")]
    folders = {str(Path(folder)) for folder in paths.removeprefix("-Wl,-rpath,").split(":")}
    assert {f"{rocm}/lib", f"{rocm}/lib/llvm/lib"} <= folders, "no loader searches them"
    assert all(name in link for name in ("rccl", "hipblaslt", "amdhip64", "omp"))


def test_a_compiler_that_is_a_script_elsewhere(rocm):
    script = f'#!/bin/sh\nexec {rocm}/lib/llvm/bin/clang++ "$@"\n'
    ninja, _ = configure(rocm, HIPCXX=str(write(rocm.parents[1] / "pip/amdclang++", script, 0o755)))
    assert f"{rocm}/lib/llvm/lib/libomp.so" in ninja and "-DLLAMAC_BLASLT" in ninja
    (rocm / "lib/llvm/lib/libomp.so").unlink()
    _, said = configure(rocm)
    assert "amdclang++ has no OpenMP (libomp.so). Install it with:" in said


@pytest.mark.skipif(
    any(Path("/usr/lib").glob("*/cmake/hipblaslt")), reason="CMake finds the distribution's hipBLASLt"
)
@pytest.mark.parametrize("missing", ["hipblaslt", "hipblas-common"])
def test_a_build_without_the_library_says_its_cost(rocm, missing):
    shutil.rmtree(rocm / "lib/cmake" / missing)
    ninja, said = configure(rocm)
    assert "-DLLAMAC_BLASLT" not in ninja
    assert "CMake Warning" in said and "llamac's own, at about half of the library's speed" in said
    assert missing in said.partition("llamac: no hipBLASLt (")[2].partition("). Matrix products")[0]


def test_the_architectures(rocm, tmp_path):
    def architectures(ninja: str) -> set[str]:
        return {word for word in ninja.split() if word.startswith("--offload-arch=")}

    if not Path("/dev/kfd").exists():  # those of the devices otherwise
        names = {f"--offload-arch={name}" for name in ("gfx942", "gfx90a", "gfx1100")}
        assert architectures(configure(rocm)[0]) == names | {"--offload-arch=gfx950"}
        write(rocm / "lib/llvm/bin/clang++", COMPILER.format(rocm=rocm, without_gfx950=1), 0o755)
        shutil.rmtree(tmp_path / "build")
        assert architectures(configure(rocm)[0]) == names
        shutil.rmtree(tmp_path / "build")
    ninja, said = configure(rocm, "-DCMAKE_HIP_ARCHITECTURES=gfx1100;gfx1201")
    assert not ninja and "expected gfx90a, gfx942, gfx950 or gfx11, found gfx1201, whose matrix" in said


def test_the_architectures_of_the_devices(tmp_path):
    for node, version in enumerate((0, 90402, 90402, 90010, 110000, 90500, 120001)):
        write(
            tmp_path / f"{node}/properties",
            f"simd_count 0\ngfx_target_version {version}\nvendor_id 4098\n",
        )
    found = subprocess.run([PLATFORM, "architectures", tmp_path], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["gfx1100", "gfx1201", "gfx90a", "gfx942", "gfx950"]
    none = subprocess.run([PLATFORM, "architectures", "/none"], check=True, capture_output=True, text=True)
    assert none.stdout == ""


def test_an_old_cmake_for_rocm(tmp_path):
    """Ubuntu 22.04's."""
    text = f"set(CMAKE_VERSION 3.22.1)\ninclude({ROOT}/csrc/platform/amd.cmake)\n"
    script = write(tmp_path / "old.cmake", text)
    found = subprocess.run(["cmake", "-P", script], capture_output=True, text=True)
    text = " ".join(found.stderr.split())
    assert found.returncode and "CMake is 3.22.1, ROCm's libraries need 3.25 or newer: `make setup" in text


@pytest.mark.parametrize("where", ["ROCM_PATH", "HIP_PATH", "PATH", "HIPCXX", "amdclang++"])
def test_where_a_rocm_is_found(rocm, where):
    other = rocm.parents[1] / "other/bin"
    write(other / "amdclang++", "#!/bin/sh\n", 0o755)
    if where == "amdclang++":  # before that of a distribution
        write(other / "hipconfig", "#!/bin/sh\nexit 1\n", 0o755)
    clang = rocm / "llvm/bin/clang++"
    variables = {
        "ROCM_PATH": {"ROCM_PATH": str(rocm), "PATH": f"{other}:/usr/bin:/bin"},
        "HIP_PATH": {"HIP_PATH": str(rocm), "PATH": f"{other}:/usr/bin:/bin"},
        "PATH": {"PATH": f"{rocm.parents[1]}/bin:{other}:/usr/bin:/bin"},  # hipconfig
        "HIPCXX": {"HIPCXX": str(clang), "PATH": f"{other}:/usr/bin:/bin"},
        "amdclang++": {"PATH": f"{other}:/usr/bin:/bin"},
    }[where]
    found = subprocess.run(
        [PLATFORM, "compiler", "amd"], env=variables, check=True, capture_output=True, text=True
    ).stdout.strip()
    if where == "amdclang++":
        assert found == str(other / "amdclang++")
    else:
        assert Path(found).resolve() == clang.resolve()
