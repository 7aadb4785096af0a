"""llamac.doctor: the happy path on this machine, and every line that can fail, by injected faults."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch
from run import ROOT, run_llamac

from llamac import ops
from llamac.base import extension
from llamac.base.native import facts
from llamac.bench import functions
from llamac.doctor import installation as doctor
from llamac.doctor.installation import Line

CUDA = [Path("/torch/lib/libcudart.so.12"), Path("/torch/lib/libcublasLt.so.12")]
HIP = [Path("/torch/lib/libamdhip64.so"), Path("/torch/lib/libhipblaslt.so.0")]

BUILT = f"built beside PyTorch {torch.__version__}, for {facts['kernels']}"
FUNCTIONS_OF_OPS = sorted(name for name in ops.__all__ if isinstance(getattr(ops, name), FunctionType))


def texts(lines) -> list[str]:
    return [str(line) for line in lines]


def only(lines) -> str:
    (text,) = texts(line for line in lines if not line.ok)
    assert text.startswith("FAIL  ") and " - " in text and "\n" not in text
    return text


@pytest.fixture
def record(tmp_path, monkeypatch):
    """record(**facts): an extension whose _native.json says so."""
    monkeypatch.setattr(extension, "file", lambda: tmp_path / "_C.so")
    monkeypatch.setattr(doctor, "check_registry", lambda: Line("llamac._native", "loads"))

    def write(**facts) -> Path:
        platform = extension.platform()
        right = {"torch": torch.__version__, "platform": platform, "kernels": platform}
        right |= {"without_gpu": "", "architectures": []}
        (tmp_path / "_native.json").write_text(json.dumps(right | facts))
        return tmp_path / "_C.so"

    return write


def test_this_machine_is_well(one_thread):
    """The whole command, as a user calls it. Where torch has a GPU that the extension was not built for, it
    says that, and the functions are not examined."""
    command = [sys.executable, "-m", "llamac", "doctor"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    *lines, last = found.stdout.splitlines()
    failed = [line for line in lines if not line.startswith("ok    ")]
    if torch.cuda.is_available() and (advice := extension.without_gpu()):
        assert found.returncode == 1 and len(failed) == 1 and failed[0].endswith(advice)
        return
    assert found.returncode == 0, found.stdout + found.stderr
    assert failed == [] and last == "all is well"
    for name in FUNCTIONS_OF_OPS:
        assert sum(line.startswith(f"ok    llamac.ops.{name} ") for line in lines) == 2
    assert any(line.startswith("ok    matmul") and "TFLOP/s" in line for line in lines)


def test_one_failed_line_is_the_exit_code():
    written: list[str] = []
    bad = Line("a", "1", False, "2", "do this")
    assert doctor.report([Line("b", "3"), bad], written.append) == 1
    assert written == ["ok    b: 3", "FAIL  a: 1 (expected 2) - do this", "1 failed"]
    assert doctor.report([Line("b", "3")], written.append) == 0 and written[-1] == "all is well"
    assert doctor.report([doctor.skipped("c", "none"), Line("b", "3")], written.append) == 0
    assert written[-3:] == ["skip  c: none", "ok    b: 3", "nothing failed; not checked: c"]


@pytest.mark.parametrize("command", ["doctor --preflight", ""])
def test_an_old_python(tmp_path, command):
    """Ubuntu 22.04's 3.10, which has no tomllib: one line."""
    imitation = "import sys\nsys.version_info = (3, 10, 12, 'final', 0)\nsys.modules['tomllib'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(imitation)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin"}
    found = run_llamac(*command.split(), env=environment, code=1)
    assert found.stdout == "" and found.stderr.count("\n") == 1
    assert "expected Python 3.11 or newer, found 3.10.12: install one" in found.stderr


# ---- torch


@pytest.mark.parametrize(
    "error, said",
    [
        (ModuleNotFoundError("No module named 'sympy'", name="sympy"), "'sympy' (expected what torch needs)"),
        (OSError("libcudart.so.13: cannot open shared object file"), "libcudart.so.13"),
    ],
)
def test_a_broken_torch(monkeypatch, error, said):
    """It is optional; one that is broken is not."""

    def broken():
        raise error

    monkeypatch.setattr(doctor, "import_torch", broken)
    assert said in only(doctor.examine())


@pytest.mark.parametrize(
    "flags, last", [([], "all is well\n"), (["--preflight"], "skip  rates: not measured: they need torch\n")]
)
def test_without_an_installed_torch(tmp_path, flags, last):
    """In a process where torch cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    command = [sys.executable, "-m", "llamac", "doctor", *flags]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin"}
    found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert found.stderr == "" and "ok    torch: not installed" in found.stdout and last in found.stdout


def fake_torch(version="2.13.0", hip=None, init=None, count=1, major=9, bf16=True):
    """What doctor asks a torch for a GPU."""

    def fail():
        if init:
            raise RuntimeError(init)

    cuda = SimpleNamespace(
        init=fail,
        device_count=lambda: count,
        get_device_properties=lambda index: SimpleNamespace(
            gcnArchName="gfx942:sramecc+:xnack-", major=major, minor=0
        ),
        mem_get_info=lambda index: (2**30, 2**37),
        is_bf16_supported=lambda including_emulation: bf16,
        get_device_name=lambda index: "Some GPU",
    )
    return SimpleNamespace(
        __version__=version, __file__="/torch/__init__.py", version=SimpleNamespace(hip=hip), cuda=cuda
    )


def test_an_old_torch():
    text = only(doctor.check_torch(fake_torch("2.9.1+cu128"), "nvidia"))
    assert text.startswith("FAIL  torch: 2.9.1+cu128 for CUDA (expected 2.11 or newer) - upgrade torch")


@pytest.mark.parametrize("platform, tool", [("nvidia", "nvidia-smi"), ("amd", "rocminfo")])
def test_a_device_that_torch_cannot_use(platform, tool, tmp_path, monkeypatch):
    monkeypatch.setitem(doctor.DRIVERS, platform, tmp_path)
    torch = fake_torch(init="The NVIDIA driver on your system is too old (found version 11040).\nmore")
    text = only(doctor.check_torch(torch, platform))
    assert "too old (found version 11040)" in text and f"look at {tool}" in text
    monkeypatch.setitem(doctor.DRIVERS, platform, tmp_path / "none")  # a laptop with a torch for GPUs
    assert all(line.ok for line in doctor.check_torch(torch, platform))


# ---- the extension


def test_a_missing_extension(record, monkeypatch):
    monkeypatch.setattr(extension, "file", lambda: None)
    assert "extension: missing (expected llamac/_C.so)" in only(doctor.check_extension(extension, torch))


@pytest.mark.parametrize("facts", [{"torch": "2.10.0+cu128"}, {"platform": "new"}])
def test_an_extension_for_another_torch(record, facts):
    record(**facts)
    text = only(doctor.check_extension(extension, torch))
    assert next(iter(facts.values())) in text and f"(expected {torch.__version__}" in text
    assert "pip install --no-build-isolation" in text


@pytest.mark.parametrize("gpu", [True, False])
def test_an_extension_with_kernels_for_the_cpu_only(record, monkeypatch, gpu):
    """A fault where torch has a GPU, else a remark."""
    record(kernels="cpu", without_gpu="no CUDA compiler was found: do this")
    monkeypatch.setattr(extension, "load", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    *_, line = doctor.check_extension(extension, torch)
    assert line.ok is not gpu and "kernels for cpu" in str(line)
    assert str(line).endswith("no CUDA compiler was found: do this")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"torch": "2.13.0"}', None])
def test_an_extension_that_says_nothing(record, content):
    path = record().with_name("_native.json")
    path.unlink() if content is None else path.write_text(content)
    assert "does not say" in only(doctor.check_extension(extension, torch))
    with pytest.raises(ImportError, match="does not say what llamac was built for"):
        extension.load.__wrapped__()


def test_an_extension_that_does_not_load(record, monkeypatch):
    record().write_bytes(b"no library")
    monkeypatch.setattr(extension, "load", extension.load.__wrapped__)
    text = only(doctor.check_extension(extension, torch))
    assert "OSError" in text and "a library that torch can load" in text


def test_a_registry_that_does_not_load(monkeypatch):
    assert doctor.check_registry().ok

    def broken():
        raise ImportError("libopenblas.so.0: cannot open")

    monkeypatch.setattr(doctor, "import_registry", broken)
    assert "ImportError: libopenblas.so.0: cannot open" in only([doctor.check_registry()])


@pytest.mark.parametrize(
    "level, without, said",
    [
        ("", "", f"ok    llamac._native: {BUILT}"),
        ("v3", "", f"ok    llamac._native: {BUILT}, operations for v3"),
        ("", "no L: slow", "FAIL  llamac._native: no L: slow (expected the vendor's library) - install"),
    ],
)
def test_the_level_of_the_operations_and_their_library(monkeypatch, level, without, said):
    registry = SimpleNamespace(cpu_level=lambda: level, without_gemm_library=lambda: without)
    monkeypatch.setattr(doctor, "import_registry", lambda: registry)
    assert str(doctor.check_registry()).startswith(said)


def test_a_level_that_is_not_there(monkeypatch):
    def refuse():
        raise ValueError("LLAMAC_CPU_LEVEL: expected one of baseline, v3, v4, found v9")

    monkeypatch.setattr(doctor, "import_registry", lambda: SimpleNamespace(cpu_level=refuse))
    assert "found v9 (expected a level that is there) - unset LLAMAC_CPU_LEVEL" in only(
        [doctor.check_registry()]
    )


def test_a_failed_extension_ends_before_its_operations(record, monkeypatch):
    monkeypatch.setattr(doctor, "check_product", lambda torch, device: [Line("matmul", "right")])
    record(torch="2.10.0")
    lines = texts(doctor.examine())
    assert "ok    matmul: right" in lines and not any("llamac.ops" in line for line in lines)


# ---- devices


@pytest.mark.parametrize(
    "engines, lacking, package",
    [
        ("Gloo, MPI, RCCL 2.27.7", "", ""),
        ("no Gloo, MPI, RCCL 2.27.7", "", ""),
        ("no Gloo, no MPI, RCCL 2.27.7", "Gloo or MPI", "libgloo-dev"),
        ("Gloo, no MPI, no RCCL", "RCCL", "rccl-dev"),
        ("Gloo, MPI, no NCCL", "NCCL", "libnccl-dev"),
    ],
)
def test_what_several_gpus_need(monkeypatch, engines, lacking, package):
    monkeypatch.setattr(doctor, "import_registry", lambda: SimpleNamespace(engines=lambda: engines))
    assert texts(doctor.check_engines(1)) == [f"ok    several devices: {engines}"]
    (line,) = doctor.check_engines(8)
    assert line.ok is not bool(lacking)
    if lacking:
        advice = f"sudo apt-get install {package}, and build again"
        assert f"{engines} (expected {lacking}, for 8 GPUs) - {advice}" in str(line)


def test_gpus_are_counted(tmp_path):
    nodes = [("cpu_cores_count 96\nsimd_count 0\n"), *2 * ["cpu_cores_count 0\nsimd_count 1216\n"]]
    for number, text in enumerate(nodes):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(text)
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert [doctor.count_gpus(platform, tmp_path) for platform in ("amd", "nvidia", "cpu")] == [2, 1, 0]


@pytest.mark.parametrize(
    "compiled, device, runs",
    [
        ("80-real", "sm_80", True),
        ("80-real", "sm_86", True),
        ("80-real", "sm_90", False),
        ("86-real", "sm_80", False),
        ("90a-real", "sm_90", True),
        ("90a-real", "sm_100", False),
        ("100f-real", "sm_103", True),
        ("100f-real", "sm_120", False),
        ("80", "sm_90", True),
        ("80-virtual", "sm_120", True),
        ("90", "sm_80", False),
        ("native", "sm_75", True),
        ("gfx942", "gfx942:sramecc+:xnack-", True),
        ("gfx942:xnack+", "gfx942:sramecc+:xnack-", False),
        ("gfx942:sramecc+", "gfx942:sramecc+:xnack-", True),
        ("gfx90a", "gfx942:sramecc+:xnack-", False),
    ],
)
def test_which_code_runs_where(compiled, device, runs):
    assert doctor.covers(compiled, device) is runs


def test_devices_and_what_the_extension_has_for_them():
    nvidia, amd = fake_torch(count=2), fake_torch(hip="7.0")
    fine = texts(doctor.check_devices(nvidia, "nvidia", ["80-real", "90a-real"]))
    assert fine == [
        f"ok    device {index}: Some GPU, sm_90, 128.0 GiB, 1.0 free, bf16 in hardware, fp8 e4m3 and e5m2"
        for index in (0, 1)
    ]
    (line,) = doctor.check_devices(amd, "amd", [])  # a record that does not say
    assert line.ok and line.found.endswith("fp8 e4m3fnuz and e5m2fnuz")
    text = only(doctor.check_devices(fake_torch(), "nvidia", ["80-real"]))
    assert "the extension has 80-real" in text and "CMAKE_CUDA_ARCHITECTURES=90-real" in text
    text = only(doctor.check_devices(amd, "amd", ["gfx90a"]))
    assert "the extension has gfx90a" in text and "CMAKE_HIP_ARCHITECTURES=gfx942" in text
    (line,) = doctor.check_devices(fake_torch(major=7, bf16=False), "nvidia", ["native"])
    assert line.found.endswith("bf16 emulated: slow, fp8 not in hardware")


# ---- libraries


def test_what_is_mapped():
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 1 /torch/lib/libcudart.so.12\n"
        "7f01-7f02 r--p 00001000 08:01 1 /torch/lib/libcudart.so.12\n"
        "7f02-7f03 r-xp 00000000 08:01 2 /a b/libcublasLt.so.13 (deleted)\n"
        "7f03-7f04 rw-p 00000000 00:00 0 [heap]\n"
        "7f04-7f05 rw-p 00000000 00:00 0 \n"
    )
    assert doctor.mapped_files(maps) == {CUDA[0], Path("/a b/libcublasLt.so.13")}
    assert any(file.name.startswith("libtorch_cpu") for file in doctor.loaded_files())


@pytest.mark.parametrize("platform, right", [("nvidia", CUDA), ("amd", HIP)])
def test_two_runtimes_in_one_process(platform, right):
    assert all(line.ok for line in doctor.check_libraries(platform, right))
    for library in right:
        second = Path("/opt/lib", library.name)
        text = only(doctor.check_libraries(platform, [*right, second]))
        assert str(second) in text and str(library) in text and "(expected one file, torch's)" in text
        text = only(doctor.check_libraries(platform, [file for file in right if file != library]))
        assert "not loaded" in text


def test_libraries_beside_the_runtime_are_told():
    nccl = Path("/torch/lib/libnccl.so.2")
    assert "ok    libnccl: /torch/lib/libnccl.so.2" in texts(doctor.check_libraries("nvidia", [*CUDA, nccl]))


@pytest.mark.parametrize(
    "driver, advice",
    [("13.0", ""), ("12.4", ""), ("unknown", ""), ("11.4", "update the"), ("0.0", "install the")],
)
def test_a_driver_older_than_the_runtime(driver, advice, monkeypatch):
    versions = {"cudaRuntimeGetVersion": "12.8", "cudaDriverGetVersion": driver}
    monkeypatch.setattr(doctor, "version_of", lambda library, function: versions[function])
    runtime, line = doctor.check_versions("nvidia", CUDA)
    assert str(runtime) == "ok    CUDA runtime: 12.8" and line.ok is not bool(advice)
    if advice:
        assert "for CUDA 12.0 or newer" in line.expected and f"{advice} NVIDIA driver" in only([line])


def test_versions_of_a_library(tmp_path):
    """A library of ours that answers as CUDA's and HIP's do; one that cannot is a failed line."""
    source, library = tmp_path / "a.c", tmp_path / "libcudart.so.12"
    source.write_text(
        "int cudaRuntimeGetVersion(int* v) { *v = 12080; return 0; }\n"
        "int cudaDriverGetVersion(int* v) { *v = 13000; return 0; }\n"
        "int hipRuntimeGetVersion(int* v) { *v = 70253211; return 0; }\n"
        "int hipDriverGetVersion(int* v) { return 1; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    names = ("cudaRuntimeGetVersion", "cudaDriverGetVersion", "hipRuntimeGetVersion", "hipDriverGetVersion")
    assert [doctor.version_of(library, name) for name in names] == ["12.8", "13.0", "7.2", "unknown"]
    lines = list(doctor.check_versions("nvidia", [library]))
    assert [line.ok for line in lines] == [True, True] and "for CUDA 13.0" in lines[1].found
    assert "OSError" in only(doctor.check_versions("amd", HIP))


# ---- computing


def test_a_wrong_product(monkeypatch):
    right = torch.Tensor.__matmul__

    def wrong(x, y):
        out = right(x, y)
        return out if out.dtype == torch.float64 else out * 1.02

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    lines = list(doctor.check_product(torch, "cpu"))
    assert len(lines) == 2 and not any(line.ok for line in lines)
    assert all("torch's matrix library is wrong here" in line.advice for line in lines)


FAULTS = {
    "scaled": lambda out: out * 1.05,
    "a lost half": lambda out: out * (torch.arange(out.numel()) < out.numel() // 2).view(out.shape),
    "not a number": lambda out: out * torch.nan,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("name", functions.FUNCTIONS)
def test_a_wrong_function(name, fault, monkeypatch, one_thread):
    right = functions.FUNCTIONS[name]

    def wrong(*arguments):
        out = right.ours(*arguments)
        return (fault(out[0]), *out[1:]) if isinstance(out, tuple) else fault(out)

    wrong.__signature__ = functions.inspect.signature(right.ours)
    monkeypatch.setattr(functions, "FUNCTIONS", {name: replace(right, ours=wrong)})
    lines = list(doctor.check_functions("cpu"))
    assert len(lines) == 2
    for line in lines:
        assert not line.ok and "error" in line.found and "report this line" in line.advice


def test_functions_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "llamac.bench.functions", None)
    assert "llamac.ops: ModuleNotFoundError" in only(doctor.check_functions("cpu"))


def test_a_function_that_raises(monkeypatch):
    right = functions.FUNCTIONS["swiglu"]

    def broken(gate_up):
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(functions, "FUNCTIONS", {"swiglu": replace(right, ours=broken)})
    lines = texts(doctor.check_functions("cpu"))
    assert len(lines) == 2 and all("no kernel image is available" in line for line in lines)


def test_every_function_is_examined():
    assert sorted(functions.FUNCTIONS) == FUNCTIONS_OF_OPS
    assert all(not f.leaves or f.backward for f in functions.FUNCTIONS.values())
