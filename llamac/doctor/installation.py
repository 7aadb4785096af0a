"""Checks of the installation, a Line each."""

import ctypes
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from llamac.base.dtypes import fp8_of
from llamac.base.errors import one_line

OLDEST_TORCH = (2, 11)
# Libraries by the beginning of their file's name. A process must have the platform's once.
RUNTIMES = {"amd": ("libamdhip64", "libhipblaslt"), "nvidia": ("libcudart", "libcublasLt"), "cpu": ()}
OTHERS = ("libcudnn", "libMIOpen", "libnccl", "librccl", "libgomp", "libomp", "libiomp5")
PREFIX = {"amd": "hip", "nvidia": "cuda"}  # of the runtime's functions
DRIVERS = {"amd": Path("/dev/kfd"), "nvidia": Path("/dev/nvidiactl")}  # where it is loaded
NAMES = {"amd": "ROCm", "nvidia": "CUDA", "cpu": "CPU"}
REINSTALL = "in llamac's folder: pip install --no-build-isolation --no-deps -e ."


@dataclass(frozen=True)
class Line:
    what: str
    found: str
    ok: bool = True
    expected: str = ""
    advice: str = ""
    skipped: bool = False

    def __str__(self) -> str:
        if self.skipped:
            return f"skip  {self.what}: {self.found}"
        if self.ok:
            return f"ok    {self.what}: {self.found}"
        expected = f" (expected {self.expected})" if self.expected else ""
        return f"FAIL  {self.what}: {self.found}{expected} - {self.advice}"


def failed(what: str, found: str, expected: str, advice: str) -> Line:
    return Line(what, found, False, expected, advice)


def skipped(what: str, found: str) -> Line:
    return Line(what, found, skipped=True)


# ---- torch


def import_torch() -> ModuleType:
    import torch

    return torch


def find_torch() -> ModuleType | Line:
    """torch, or the line that says why there is none. It is optional; a broken one is a fault."""
    try:
        return import_torch()
    except ModuleNotFoundError as error:
        if error.name != "torch":
            return failed("torch", one_line(error), "what torch needs", "reinstall torch")
        need = "llamac.ops and llamac.patch need 2.11 or newer, the rest does not"
        return Line("torch", f"not installed: {need}")
    except Exception as error:
        return failed("torch", one_line(error), "2.11 or newer", "reinstall torch for this machine's devices")


def driver_platform(root: Path = Path("/")) -> str:
    """The platform whose driver is loaded, as dev/platform.sh finds it."""
    return next((platform for platform in DRIVERS if has_driver(platform, root)), "cpu")


def has_driver(platform: str, root: Path = Path("/")) -> bool:
    """Whether this machine has a device that torch should find. A torch for GPUs is no fault elsewhere."""
    return platform != "cpu" and (root / DRIVERS[platform].relative_to("/")).exists()


def check_torch(torch: ModuleType, platform: str) -> Iterator[Line]:
    found = f"{torch.__version__} for {NAMES[platform]}"
    ok = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= OLDEST_TORCH
    found += f", {Path(str(torch.__file__)).parent}" if ok else ""
    oldest = ".".join(map(str, OLDEST_TORCH))
    yield Line("torch", found, ok, f"{oldest} or newer", "upgrade torch, then reinstall llamac")
    if not has_driver(platform):
        return
    tool, driver = ("rocminfo", "amdgpu") if platform == "amd" else ("nvidia-smi", "NVIDIA")
    try:
        torch.cuda.init()
    except Exception as error:
        advice = (
            f"look at {tool}: is there a device, may this user open it, is the {driver} driver at least as "
            f"new as torch's {NAMES[platform]}?"
        )
        yield failed("device", one_line(error), f"one that {NAMES[platform]} can use", advice)


# ---- libraries


def mapped_files(maps: str) -> set[Path]:
    """Files in the text of a /proc/PID/maps."""
    fields = (line.split(maxsplit=5) for line in maps.splitlines())
    return {Path(f[5].removesuffix(" (deleted)")) for f in fields if len(f) == 6 and f[5].startswith("/")}


def loaded_files() -> set[Path]:
    return mapped_files(Path("/proc/self/maps").read_text())


def version_of(library: Path, function: str) -> str:
    """13.0 of a CUDA or HIP library's version function, which both write as one number."""
    number = ctypes.c_int()
    if getattr(ctypes.CDLL(str(library)), function)(ctypes.byref(number)) != 0:
        return "unknown"
    if function.startswith("cuda"):
        return f"{number.value // 1000}.{number.value % 1000 // 10}"
    return f"{number.value // 10_000_000}.{number.value // 100_000 % 100}"


def called(name: str, files: Iterable[Path]) -> list[str]:
    return sorted(str(file) for file in files if file.name.startswith(f"{name}.so"))


def check_libraries(platform: str, files: Iterable[Path]) -> Iterator[Line]:
    """The platform's: one file of each, whoever loaded it. Of the others, what is there."""
    for name in RUNTIMES[platform]:
        if not (found := called(name, files)):
            yield failed(name, "not loaded", "torch's", "reinstall torch: its wheel carries it")
            continue
        remove = "remove the other from LD_LIBRARY_PATH and LD_PRELOAD, or rebuild what loads it"
        advice = f"{remove}; if that is llamac, {REINSTALL}"
        yield Line(name, ", ".join(found), len(found) == 1, "one file, torch's", advice)
    for name in OTHERS:
        if found := called(name, files):
            yield Line(name, ", ".join(found))


def check_versions(platform: str, files: Iterable[Path]) -> Iterator[Line]:
    """The runtime's version and the driver's, as the loaded runtime says."""
    runtimes = [file for file in files if file.name.startswith(RUNTIMES[platform][0] + ".so")]
    if not runtimes:
        return
    what, prefix = f"{NAMES[platform]} runtime", PREFIX[platform]
    try:
        runtime = version_of(runtimes[0], f"{prefix}RuntimeGetVersion")
        driver = version_of(runtimes[0], f"{prefix}DriverGetVersion")
    except (OSError, AttributeError) as error:
        yield failed(what, one_line(error), "its version", "reinstall torch")
        return
    yield Line(what, runtime)
    if platform == "amd":  # HIP's driver version is the runtime's own
        yield amd_driver()
        return
    found = f"for CUDA {driver}, kernel module {kernel_module('nvidia') or 'unknown'}"
    major = runtime.split(".")[0]
    if driver == "0.0":
        advice = "install the NVIDIA driver; in a container, start it with access to the GPUs"
        yield failed("driver", "none", f"one for CUDA {major}.0 or newer", advice)
    # A driver serves older runtimes, and newer ones of its own major version.
    elif "unknown" not in (runtime, driver) and int(driver.split(".")[0]) < int(major):
        advice = f"update the NVIDIA driver, or install a torch for CUDA {driver.split('.')[0]}"
        yield failed("driver", found, f"for CUDA {major}.0 or newer", advice)
    else:
        yield Line("driver", found)


def kernel_module(name: str, root: Path = Path("/")) -> str:
    """Its version; empty where it says none."""
    try:
        return (root / f"sys/module/{name}/version").read_text().strip()
    except OSError:
        return ""


def amd_driver(root: Path = Path("/")) -> Line:
    return Line("driver", f"amdgpu {kernel_module('amdgpu', root) or 'of the kernel'}")


# ---- the extension and the devices


def covers(compiled: str, device: str) -> bool:
    """Whether code for CMake's name of an architecture ("90a-real", "80", "gfx942") runs on a device
    ("sm_90", "gfx942:sramecc+:xnack-").
    """
    if device.startswith("gfx"):
        name, *features = compiled.split(":")
        have = device.split(":")
        return name == have[0] and all(feature in have for feature in features)
    number, _, kind = compiled.partition("-")
    if not number.rstrip("af").isdigit():
        return True  # "native", "all": CMake chose
    wanted, found = int(number.rstrip("af")), int(device.removeprefix("sm_"))
    if number.endswith("a"):
        return wanted == found
    if number.endswith("f") or kind == "real":
        return wanted <= found and wanted // 10 == found // 10
    return wanted <= found  # PTX, which the driver compiles for newer ones


def architecture_of(torch: ModuleType, index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return properties.gcnArchName
    return f"sm_{properties.major}{properties.minor}"


def import_registry() -> ModuleType:
    from llamac.base.native import native

    return native


def check_registry() -> Line:
    """The registry and the trainer, which need no torch."""
    try:
        native = import_registry()
    except Exception as error:
        return failed("llamac._native", one_line(error), "a module that loads", REINSTALL)
    try:
        level = native.cpu_level()
    except Exception as error:
        advice = "unset LLAMAC_CPU_LEVEL, or name a level that this machine has"
        return failed("llamac._native", one_line(error), "a level that is there", advice)
    if without := native.without_gemm_library():
        advice = f"install the library's development package, then {REINSTALL}"
        return failed("llamac._native", without, "the vendor's library", advice)
    from llamac.base.native import facts

    beside = f"beside PyTorch {facts['torch']}" if facts["torch"] else "without PyTorch"
    found = f"built {beside}, for {facts['kernels']}" + (f", operations for {level}" if level else "")
    return Line("llamac._native", found)


def count_gpus(platform: str, root: Path = Path("/")) -> int:
    """As their drivers list them, and dev/setup.sh counts them."""
    if platform == "amd":
        nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
        return sum(bool(re.search("^simd_count [1-9]", node.read_text(), re.MULTILINE)) for node in nodes)
    return len(list((root / "proc/driver/nvidia/gpus").glob("*"))) if platform == "nvidia" else 0


# By what several processes of a run communicate, and the package of each. MPI replaces Gloo, under mpirun.
ENGINES = {"Gloo": "libgloo-dev", "RCCL": "rccl-dev", "NCCL": "libnccl-dev"}


def check_engines(gpus: int) -> Iterator[Line]:
    """What the processes of a run, one per GPU, communicate by; nothing where no module is built."""
    try:
        found = import_registry().engines()
    except Exception:
        return  # check_registry() says why
    lacking = [name for name in ENGINES if f"no {name}" in found and (name != "Gloo" or "no MPI" in found)]
    first = lacking[0] if lacking else "Gloo"
    expected = f"{'Gloo or MPI' if first == 'Gloo' else first}, for {gpus} GPUs"
    advice = f"sudo apt-get install {ENGINES[first]}, and build again: make train_llama3; {REINSTALL}"
    yield Line("several devices", found, not lacking or gpus < 2, expected, advice)


def check_extension(extension: ModuleType, torch: ModuleType) -> Iterator[Line]:
    """Whether it is there, was built for this torch, and loads."""
    yield check_registry()
    path = extension.file()
    if path is None:
        yield failed("extension", "missing", "llamac/_C.so", f"built without torch; {REINSTALL}")
        return
    try:
        facts = extension.built(path)
    except ImportError as error:
        yield failed("extension", one_line(error), "what it was built for", REINSTALL)
        return
    found = f"built for torch {facts['torch']} ({facts['platform']}), kernels for {facts['kernels']}"
    if not extension.matches(facts):
        yield failed("extension", found, f"{torch.__version__} ({extension.platform()})", REINSTALL)
        return
    try:
        extension.load()
    except Exception as error:
        yield failed("extension", one_line(error), "a library that torch can load", REINSTALL)
        return
    lacking = facts["without_gpu"]
    if lacking and torch.cuda.is_available():
        yield failed("extension", found, f"kernels for {facts['platform']}", lacking)
    else:
        yield Line("extension", f"{found}, {path}{f'; {lacking}' if lacking else ''}")


def check_devices(torch: ModuleType, platform: str, architectures: list[str]) -> Iterator[Line]:
    """Each device: what it is, and whether the extension has code for it."""
    for index in range(torch.cuda.device_count()):
        name, device = f"device {index}", architecture_of(torch, index)
        free, total = torch.cuda.mem_get_info(index)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        memory = f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} free"
        speed = "in hardware" if bf16 else "emulated: slow"
        found = f"{torch.cuda.get_device_name(index)}, {device}, {memory}, bf16 {speed}"
        found += f", fp8 {' and '.join(fp8_of(device)) or 'not in hardware'}"
        ok = not architectures or any(covers(compiled, device) for compiled in architectures)
        flag = f"CMAKE_HIP_ARCHITECTURES={device.split(':')[0]}"
        if platform != "amd":
            flag = f"CMAKE_CUDA_ARCHITECTURES={device.removeprefix('sm_')}-real"
        expected = f"code for it; the extension has {', '.join(architectures)}"
        yield Line(name, found, ok, expected, f"{REINSTALL} -C cmake.define.{flag}")


# ---- computing


def check_product(torch: ModuleType, device: str | int) -> Iterator[Line]:
    """torch's product in each type against float64, on "cpu" or a GPU by its index. Sums are in f32: their
    roundings add up like a walk of n steps, which bf16's own rounding hides.
    """
    from llamac.base.tolerance import error_of, floor_of
    from llamac.bench.timing import medians_ms

    n, kind, where = (256, "cpu", "") if device == "cpu" else (1024, "cuda", f" on device {device}")
    for label, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        what = f"matmul {n}x{n}x{n} {label}{where}"
        try:
            with nullcontext() if kind == "cpu" else torch.cuda.device(device):
                x, y = (torch.randn(n, n, dtype=dtype, device=kind) for _ in range(2))
                truth = (x.double() @ y.double()).cpu().numpy()
                error = error_of((x @ y).double().cpu().numpy(), truth).largest
                ms = medians_ms({"": [partial(torch.matmul, x, y)]}, kind, 0.05)[""]
        except Exception as failure:
            yield failed(what, one_line(failure), "a product", "torch itself does not compute: reinstall it")
            continue
        allowed = floor_of(truth, label).largest * (n**0.5 if label == "f32" else 1)
        timed = f"{ms * 1e3:.1f} us, {2e-9 * n**3 / ms:.2f} TFLOP/s"
        found = f"error {error:.2g} of at most {allowed:.2g}, {timed}"
        advice = "torch's matrix library is wrong here: reinstall torch"
        yield Line(what, found, error <= allowed, "the product", advice)


def check_functions(device: str) -> Iterator[Line]:
    """Every function of llamac.ops within the tolerance (llamac/base/tolerance.py), and its time."""
    try:
        from llamac.bench.functions import FUNCTIONS, call_of, differences, sizes
        from llamac.bench.timing import medians_ms
        from llamac.bench.torch_operations import Case
    except Exception as error:
        yield failed("llamac.ops", one_line(error), "a module that loads", REINSTALL)
        return
    size = sizes("tiny", 2, 16)
    for name, function in FUNCTIONS.items():
        if why := function.unsupported(device):
            yield Line(f"llamac.ops.{name}", f"not on this device: {why}")
            continue
        for dtype in ("f32", "bf16"):
            what = f"llamac.ops.{name} {dtype}"
            case = Case(size, dtype, device)
            advice = f"rebuild ({REINSTALL}); if it fails again, report this line"
            try:
                wrong = differences(function, case)
                call = call_of(function.ours, function.inputs(case), function.leaves)
                ms = medians_ms({"": [call]}, device, 0.02)[""]
            except Exception as error:
                yield failed(what, one_line(error), "a result", advice)
                continue
            timed = f"{ms * 1e3:.1f} us {'forward+backward' if function.leaves else 'forward'}"
            found = "; ".join(wrong) or f"agrees with float64, {timed}"
            yield Line(what, found, not wrong, "PyTorch's own error or little more", advice)


def examine() -> Iterator[Line]:
    yield Line("python", f"{sys.version.split()[0]}, {sys.executable}")
    yield Line("llamac", str(Path(__file__).parents[1]))
    torch = find_torch()
    if isinstance(torch, Line):
        yield torch
        yield check_registry()
        yield from check_engines(count_gpus(driver_platform()))
        return
    from llamac.base import extension

    platform, wrong = extension.platform(), list[Line]()

    def noted(lines: Iterable[Line]) -> Iterator[Line]:
        for line in lines:
            wrong.extend([] if line.ok else [line])
            yield line

    yield from noted(check_torch(torch, platform))
    gpus = torch.cuda.device_count() if has_driver(platform) and not wrong else 0
    if not wrong:
        for device in range(gpus) or ["cpu"]:
            yield from check_product(torch, device)
    yield from noted(check_extension(extension, torch))
    yield from check_engines(gpus)
    files = loaded_files()
    yield from check_libraries(platform, files)
    if has_driver(platform):
        yield from check_versions(platform, files)
        yield from noted(check_devices(torch, platform, architectures(extension)))
    else:
        unused = "" if platform == "cpu" else f"; no driver for torch's {NAMES[platform]} devices is loaded"
        yield Line("device", f"CPU, {torch.get_num_threads()} threads{unused}")
    if not wrong:
        yield from check_functions("cuda" if gpus else "cpu")


def architectures(extension: ModuleType) -> list[str]:
    """Those that the extension has code for; none where it does not say."""
    try:
        return extension.built(extension.file()).get("architectures", [])
    except (ImportError, AttributeError):
        return []


def report(lines: Iterable[Line], write: Callable[[str], object] = print) -> int:
    """Writes each line as it comes; the exit code."""
    failures, unchecked = 0, []
    for line in lines:
        write(str(line))
        failures += not line.ok
        unchecked += [line.what] if line.skipped else []
    partly = f"nothing failed; not checked: {', '.join(unchecked)}" if unchecked else "all is well"
    write(f"{failures} failed" if failures else partly)
    return 1 if failures else 0
