"""Operations for several instruction sets in one program (csrc/platform/cpu_level.h): which code is where,
which level a processor gets, which one can be asked for, and that all of them compute.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT
from run import events, flags

LEVELS = ["baseline", "v3", "v4"]
# Of processors as qemu names them, without a warning about what else of them it lacks.
EMULATED = {"qemu64": "baseline", "Nehalem": "baseline", "Haswell": "v3", "max": "v3"}
BIT_INSTRUCTIONS = {"andn", "bextr", "blsi", "blsmsk", "blsr", "bzhi", "mulx", "pdep", "pext", "rorx", "sarx",
                    "shlx", "shrx", "lzcnt", "movbe", "popcnt"}  # fmt: skip
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are those of x86-64")


def is_newer(mnemonic: str) -> bool:
    """Whether x86-64-v3 or v4 has the instruction, and the baseline has not."""
    if mnemonic.startswith("v") or re.fullmatch(r"k[a-z]+[bwdq]", mnemonic):
        return True
    return mnemonic.rstrip("wlq") in BIT_INSTRUCTIONS


def code(program: Path) -> dict[str, list[str]]:
    """The instructions of each section, in AT&T's syntax."""
    command = ["objdump", "-d", "--no-show-raw-insn", "-w", program]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    sections: dict[str, list[str]] = defaultdict(list)
    section = ""
    for line in listing.splitlines():
        if line.startswith("Disassembly of section "):
            section = line.split()[-1].rstrip(":")
        elif found := re.match(r" *[0-9a-f]+:\t(.*)", line):
            sections[section].append(found[1])
    return sections


def shared_symbols(joined: Path) -> set[str]:
    """Names of a level's code and data that the linker could use for other code, or other code's for it."""
    command = ["nm", "--defined-only", "--extern-only", "--format=just-symbols", joined]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def newer_instructions(sections: dict[str, list[str]]) -> list[str]:
    """Those outside of the sections that may have them."""
    allowed = ("llamac_v3_code", "llamac_v4_code")
    return [
        f"{name}: {instruction}"
        for name, instructions in sections.items()
        if name not in allowed
        for instruction in instructions
        if is_newer(instruction.split()[0])
    ]


def check_separation(program: Path):
    """No older processor can meet an instruction that it has not."""
    sections = code(program)
    assert newer_instructions(sections) == []
    for level in LEVELS:
        joined = program.parent / f"levels/{level}.o"
        assert shared_symbols(joined) == {f"llamac_{level}_begin", f"llamac_{level}_end"}
    v3, v4 = sections["llamac_v3_code"], sections["llamac_v4_code"]
    assert any("%ymm" in line for line in v3) and any(line.startswith("vfmadd") for line in v3)
    assert not any(re.search(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k\d", line) for line in v3)
    assert any("%zmm" in line for line in v4)


def has(flags: str) -> bool:
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split()
    return set(flags.split()) <= set(found)


@pytest.fixture(scope="session")
def supported() -> list[str]:
    """The levels that this processor has."""
    v3 = has("avx2 fma f16c bmi1 bmi2 abm movbe popcnt")
    v4 = v3 and has("avx512f avx512bw avx512cd avx512dq avx512vl")
    return LEVELS[: 1 + v3 + v4]


def environment(level: str | None = None, **more: str) -> dict[str, str]:
    outer = {name: value for name, value in os.environ.items() if name != "LLAMAC_CPU_LEVEL"}
    return outer | ({} if level is None else {"LLAMAC_CPU_LEVEL": level}) | more


def emulated(processor: str, *command, **keywords) -> subprocess.CompletedProcess:
    """Runs a program on another processor. One that started itself again would leave the emulator."""
    if not shutil.which("qemu-x86_64"):
        pytest.skip("no qemu-x86_64: apt-get install qemu-user")
    keywords = {"env": environment(OMP_WAIT_POLICY="passive")} | keywords
    return subprocess.run(
        ["qemu-x86_64", "-cpu", processor, *command], capture_output=True, text=True, timeout=300, **keywords
    )


# ---- a program with one operation


@pytest.fixture(scope="module")
def one_operation(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("levels")
    configure = ["cmake", "-S", ROOT / "tests/ops/levels", "-B", folder, "-DCMAKE_BUILD_TYPE=Release"]
    for command in (configure, ["cmake", "--build", folder]):
        done = subprocess.run(command, capture_output=True, text=True, env=environment(CXXFLAGS=""))
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "one_operation"


def test_code_of_the_levels_stays_apart(one_operation):
    check_separation(one_operation)


def test_a_copy_that_levels_share_is_seen(one_operation):
    before = one_operation.parent / "levels/v3.joined.o"  # its symbols became local
    assert any("add_to_all" in name for name in shared_symbols(before))


def test_newer_instructions_are_seen(one_operation):
    sections = code(one_operation)
    assert any(is_newer(line.split()[0]) for line in sections["llamac_v3_code"])
    sections[".text"] = sections["llamac_v3_code"]
    assert newer_instructions(sections)


def said(program: Path, **keywords) -> str:
    done = subprocess.run([program], capture_output=True, text=True, **keywords)
    assert (done.returncode == 0) == (done.stderr == ""), done
    return done.stdout + done.stderr


def test_the_processor_chooses(one_operation, supported):
    for level in ("", None):
        assert said(one_operation, env=environment(level)) == f"{supported[-1]} 1 200 60\n"
    for level in supported:
        assert said(one_operation, env=environment(level)) == f"{level} 1 200 60\n"


def test_a_level_that_is_not_there(one_operation, supported):
    unknown = "LLAMAC_CPU_LEVEL: expected one of baseline, v3, v4, found avx2\n"
    assert said(one_operation, env=environment("avx2")) == unknown
    for level in LEVELS[len(supported) :]:
        refused = f"LLAMAC_CPU_LEVEL: this processor has at most {supported[-1]}, found {level}\n"
        assert said(one_operation, env=environment(level)) == refused


@pytest.mark.parametrize("processor, level", EMULATED.items())
def test_other_processors(one_operation, processor, level):
    assert emulated(processor, one_operation).stdout == f"{level} 1 200 60\n"


# ---- Python's modules


@pytest.mark.skipif(not find_spec("torch"), reason="without torch _native is linked as the program is")
def test_the_modules_beside_torch_have_every_level(tmp_path):
    """A wheel that travels. Without them a module would load, and have no operations."""
    settings = {"PLATFORM": "cpu", "NATIVE": "OFF", "PYTHON": "ON"}
    configure = ["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += ["-DBUILD_TESTING=OFF", *(f"-DLLAMAC_{name}={value}" for name, value in settings.items())]
    done = subprocess.run(configure, capture_output=True, text=True, env=environment(CXXFLAGS=""))
    assert done.returncode == 0, done.stdout + done.stderr
    for module in ("_native", "_C"):
        command = ["ninja", "-C", tmp_path, "-t", "commands", module]
        link = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        assert " -shared " in link and [level for level in LEVELS if f" levels/{level}.o " not in link] == []


# ---- train_llama3, in a build that has levels: `make levels`


@pytest.fixture
def program(build, train) -> Path:
    if "operations for baseline" not in train("--version", env=environment()).stdout:
        pytest.skip("this build has one level only")
    return build / "train_llama3"


def run(train, data: Path, out: Path, level: str | None) -> list[float]:
    """Losses of a short run."""
    train(*flags(data, out, steps=3, val_data="none", checkpoint_every=-1), env=environment(level))
    assert level is None or events(out, "run")[0]["device"].endswith(f", {level}")
    return [event["loss"] for event in events(out, "step")]


def test_code_of_the_program_stays_apart(program):
    check_separation(program)


def test_every_level_trains(program, train, data, supported, tmp_path):
    losses = {level: run(train, data, tmp_path / level, level) for level in supported}
    assert run(train, data, tmp_path / "default", None) == losses[supported[-1]]
    for level in supported[1:]:  # which round products and sums as one
        assert losses[level] == pytest.approx(losses["baseline"], rel=2**-20)
    version = [train("--version", env=environment(level)).stdout for level in supported]
    assert all(f"this process: {level}\n" in text for level, text in zip(supported, version))


@pytest.mark.slow
def test_every_operation_at_every_level(program, supported):
    for level in supported:
        command = [program.parent / "check_operations", "--where", "host", "--once", "--brief"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(level))
        assert done.returncode == 0, level + done.stdout + done.stderr


def test_the_program_refuses_a_level(program, train):
    refused = train("--version", env=environment("v5"), code=2)
    assert refused.stderr == "train_llama3: LLAMAC_CPU_LEVEL: expected one of baseline, v3, v4, found v5\n"


def test_the_program_on_an_older_processor(program, train, data, tmp_path):
    """Nehalem has no AVX. Emulated AVX2 takes minutes per step: test_other_processors covers the choice."""
    steps = {"steps": 1, "val_data": "none", "checkpoint_every": -1}
    emulator = environment(OMP_WAIT_POLICY="passive", OMP_NUM_THREADS="1")
    done = emulated("Nehalem", program, *flags(data, tmp_path / "there", **steps), env=emulator)
    assert done.returncode == 0, done.stderr
    train(*flags(data, tmp_path / "here", **steps), env=environment("baseline", OMP_NUM_THREADS="1"))
    for out in (tmp_path / "there", tmp_path / "here"):
        assert events(out, "run")[0]["device"] == "CPU, 1 threads, baseline"
    assert events(tmp_path / "there", "step")[0]["loss"] == events(tmp_path / "here", "step")[0]["loss"]


@pytest.mark.program
def test_a_build_with_one_level_refuses_a_choice(train):
    if "operations for baseline" in train("--version", env=environment()).stdout:
        pytest.skip("this build has several levels")
    refused = train("--version", env=environment("v3"), code=2)
    assert refused.stderr == (
        "train_llama3: LLAMAC_CPU_LEVEL: this program is for one instruction set only, found v3\n"
    )
