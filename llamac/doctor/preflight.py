"""`llamac doctor --preflight` checks whether a machine is set up for full training speed.

It checks the host's settings, environment variables that slow a run down, each device's state (partitions,
power limit, temperature, memory errors, links) and the versions of driver, ROCm and PyTorch, and compares
measured with published rates (configs/tables/devices.toml). Without PyTorch, it checks everything but rates.
docs/rocm.md names the sources of the expected values.
"""

import os
import re
import resource
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, permutations
from pathlib import Path
from types import ModuleType

from llamac.base.folders import CONFIGS
from llamac.base.rocm import find_rocm
from llamac.doctor import installation as doctor
from llamac.doctor.installation import NAMES, Line, failed, skipped

GIB = 1 << 30
# Shares of a published rate below which something is wrong: well under what an idle device reaches.
LEAST_COPY, LEAST_PRODUCT, LEAST_LINK = 0.6, 0.35, 0.5
# Above this share, the measurement is wrong. A partition of a device can exceed its part of the memory's rate
# several times while the other partitions are idle.
MOST_OF_PUBLISHED = 4.0
LEAST_BETWEEN_DEVICES = 20  # 10^9 bytes per second; a copy through the host's memory is slower

# Variables that make every launch or copy wait, with the value that does not.
SLOW = {
    "AMD_SERIALIZE_KERNEL": "0", "AMD_SERIALIZE_COPY": "0", "HIP_LAUNCH_BLOCKING": "0",
    "CUDA_LAUNCH_BLOCKING": "0", "HSA_ENABLE_SDMA": "1", "NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0",
    "HSA_ENABLE_PEER_SDMA": "1",
}  # fmt: skip
RESEAT = "reseat the device; look at the slot's setting in the BIOS"
UNCHECKED = "its partition, clocks, power, heat, memory errors, PCIe, links and driver were not checked"
# Others that a reader of the result wants to know, where they are set.
TOLD = re.compile(r"(HSA|HIP|ROCR?|AMD|GPU|RCCL|NCCL|CUDA|OMP|KMP|GOMP)_\w+|PYTORCH_\w*ALLOC_CONF")


def _run(*command: str) -> str:
    """What a command prints; "" where there is none, or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


@dataclass(frozen=True)
class Machine:
    """Where facts are read: this machine, or files that look like one."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    run: Callable[..., str] = _run

    def text(self, path: str | Path) -> str:
        """Of a file below the root; "" where it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""


# ---- the host


def check_host(machine: Machine, platform: str) -> Iterator[Line]:
    memory = re.search(r"MemTotal:\s*(\d+) kB", machine.text("proc/meminfo"))
    gib = f"{int(memory[1]) / (1 << 20):.0f} GiB" if memory else "unknown memory"
    model = re.search(r"^model name\s*: (.+)$", machine.text("proc/cpuinfo"), re.MULTILINE)
    cores = f"{len(os.sched_getaffinity(0))} CPU cores for this process"
    yield Line("host", f"{cores}, {gib}{f', {model[1]}' if model else ''}")
    if platform != "cpu":
        yield from check_settings(machine, platform)
    yield Line("huge pages", machine.text("sys/kernel/mm/transparent_hugepage/enabled") or "unknown")
    shared = os.statvfs(machine.root / "dev/shm")
    size = shared.f_frsize * shared.f_blocks
    advice = "several devices exchange through it; in a container: --ipc host or --shm-size 16g"
    yield Line("/dev/shm", f"{size / GIB:.2f} GiB", size >= GIB, "1 GiB or more", advice)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = soft == resource.RLIM_INFINITY
    locked = "unlimited" if is_unlimited else f"{soft / (1 << 20):.0f} MiB"
    ok = is_unlimited or not any((machine.root / "sys/class/infiniband").glob("*"))
    advice = "adapters lock what they send: ulimit -l unlimited; in a container: --ulimit memlock=-1"
    yield Line("locked memory", locked, ok, "unlimited, with InfiniBand adapters", advice)


def check_settings(machine: Machine, platform: str) -> Iterator[Line]:
    balancing = machine.text("proc/sys/kernel/numa_balancing")
    advice = "pages that move stall the device's copies: sudo sysctl kernel.numa_balancing=0"
    yield Line("NUMA balancing", balancing or "not in this kernel", balancing in ("", "0"), "0", advice)
    is_on = any((machine.root / "sys/class/iommu").glob("*"))
    passes = "iommu=pt" in machine.text("proc/cmdline").split()
    found = "pass-through" if passes else "translates every address" if is_on else "off"
    advice = "devices reach each other's memory through it: add iommu=pt to the kernel's command line"
    yield Line("IOMMU", found, platform != "amd" or passes or not is_on, "iommu=pt, or off", advice)


def check_environment(machine: Machine) -> Iterator[Line]:
    for name, value in sorted(machine.environment.items()):
        if name in SLOW and value != SLOW[name]:
            yield failed(name, value, f"unset, or {SLOW[name]}", f"it is for finding faults: unset {name}")
        elif TOLD.fullmatch(name):
            yield Line(name, value)


# ---- AMD's devices, as the kernel's driver shows them


def cards(machine: Machine) -> list[Path]:
    """Below the root, in the order of their numbers. A partition of a device has a card of its own."""
    found = [
        folder.relative_to(machine.root)
        for folder in (machine.root / "sys/class/drm").glob("card*/device")
        if re.fullmatch(r"card\d+", folder.parent.name)
    ]
    amd = [card for card in found if machine.text(card / "vendor") == "0x1002"]
    return sorted(amd, key=lambda card: int(card.parent.name.removeprefix("card")))


def check_amd(machine: Machine) -> Iterator[Line]:
    devices = [machine.root / "dev/kfd", *sorted((machine.root / "dev/dri").glob("render*"))]
    closed = [
        str(device) for device in devices if device.exists() and not os.access(device, os.R_OK | os.W_OK)
    ]
    if closed:
        advice = (
            "sudo usermod -aG render,video $USER, and log in again; "
            "in a container: --group-add with the host's number of each of the two groups"
        )
        yield failed("devices", f"{' '.join(closed)} closed to this user", "open", advice)
    found = cards(machine)
    if not found:
        yield skipped("GPU", f"none in /sys/class/drm, but {doctor.DRIVERS['amd']} is there: {UNCHECKED}")
    for number, card in enumerate(found):
        yield from check_card(machine, f"GPU {number}", card)
    yield from check_links(machine)


def check_card(machine: Machine, name: str, card: Path) -> Iterator[Line]:
    modes = {"compute": "SPX", "memory": "NPS1"}
    for kind, whole in modes.items():
        if not (mode := machine.text(card / f"current_{kind}_partition")):
            continue
        advice = f"a process sees a part of the device: sudo amd-smi set --{kind}-partition {whole}"
        yield Line(f"{name} {kind} partition", mode, mode == whole, f"{whole}, the whole device", advice)
    if level := machine.text(card / "power_dpm_force_performance_level"):
        found = f"{level}{current_clock(machine, card)}"
        advice = f"echo auto | sudo tee /{card}/power_dpm_force_performance_level"
        yield Line(f"{name} clocks", found, level == "auto", "auto", advice)
    for sensors in sorted((machine.root / card / "hwmon").glob("hwmon*")):
        yield from check_sensors(machine, name, sensors.relative_to(machine.root))
    if (machine.root / card / "ras").is_dir():
        wrong = errors_by_part(machine, card, "ue")
        parts = ", ".join(f"{part} {count}" for part, count in wrong.items())
        corrected = sum(errors_by_part(machine, card, "ce").values())
        yield memory_errors(name, sum(wrong.values()), corrected, f" ({parts})" if parts else "")
    yield from check_pcie(machine, name, card)


def current_clock(machine: Machine, card: Path) -> str:
    """Of the compute units; the driver marks the current one of its clocks with a star."""
    clocks = re.findall(r"(\d+)Mhz( \*)?", machine.text(card / "pp_dpm_sclk"))
    now = [int(clock) for clock, star in clocks if star]
    return f", {now[0]} of at most {max(int(clock) for clock, _ in clocks)} MHz" if now else ""


def memory_errors(name: str, uncorrected: float, corrected: float | None, parts: str = "") -> Line:
    told = "" if corrected is None else f", {corrected:.0f} corrected"
    found = f"{uncorrected:.0f} uncorrected{parts}{told}" if uncorrected else f"none uncorrected{told}"
    advice = "reset the device; if they come back, replace it"
    return Line(f"{name} memory errors", found, not uncorrected, "none uncorrected", advice)


def power_limit(name: str, watts: float, usual: float | None, command: str) -> Line:
    """usual: the device's own limit; command: sets it."""
    ok, expected = usual is None or watts >= usual, f"{usual or 0:.0f} W, the device's own"
    return Line(f"{name} power limit", f"{watts:.0f} W", ok, expected, f"sudo {command} {usual or 0:.0f}")


def check_sensors(machine: Machine, name: str, sensors: Path) -> Iterator[Line]:
    cap, usual = (machine.text(sensors / f"power1_cap{end}") for end in ("", "_default"))
    if cap.isdigit():
        own = int(usual) / 1e6 if usual.isdigit() else None
        yield power_limit(name, int(cap) / 1e6, own, "amd-smi set --power-cap")
    for label in sorted((machine.root / sensors).glob("temp*_label")):
        if label.read_text().strip() != "junction":
            continue
        number = label.name.removesuffix("_label")
        now, most = (machine.text(sensors / f"{number}_{kind}") for kind in ("input", "crit"))
        if now.lstrip("-").isdigit():
            limit = int(most) / 1000 if most.isdigit() else 100
            yield temperature(name, int(now) / 1000, limit - 10)


def temperature(name: str, degrees: float, most: float) -> Line:
    advice = "clocks fall when it is hotter: look at fans, air and the devices beside it"
    return Line(f"{name} temperature", f"{degrees:.0f} C", degrees <= most, f"below {most:.0f} C", advice)


def errors_by_part(machine: Machine, card: Path, kind: str) -> dict[str, int]:
    """Uncorrected ("ue") or corrected ("ce") errors by part of the device, where there are any."""
    errors = {}
    for file in sorted((machine.root / card / "ras").glob("*_err_count")):
        found = re.search(rf"{kind}:\s*(\d+)", machine.text(file.relative_to(machine.root)))
        if found and int(found[1]):
            errors[file.name.removesuffix("_err_count")] = int(found[1])
    return errors


def check_pcie(machine: Machine, name: str, card: Path) -> Iterator[Line]:
    speed, fastest, width, widest = (
        machine.text(card / f"{which}_link_{what}")
        for what in ("speed", "width")
        for which in ("current", "max")
    )
    if not speed or not width:
        return
    ok, expected = (speed, width) == (fastest, widest), f"{fastest}, x{widest}"
    advice = f"{RESEAT} (some devices slow down while idle)"
    yield Line(f"{name} PCIe", f"{speed}, x{width}", ok, expected, advice)


def check_links(machine: Machine) -> Iterator[Line]:
    """xGMI between the devices, in the driver's table of nodes."""

    def numbers(file: Path) -> dict[str, int]:
        words = (line.split() for line in machine.text(file.relative_to(machine.root)).splitlines())
        return {word[0]: int(word[1]) for word in words if len(word) == 2 and word[1].isdigit()}

    folder = machine.root / "sys/class/kfd/kfd/topology/nodes"
    nodes = {int(node.name): numbers(node / "properties") for node in folder.glob("[0-9]*")}
    gpus = sorted(node for node, facts in nodes.items() if facts.get("simd_count", 0) > 0)
    if len(gpus) < 2:
        return
    links = [numbers(file) for file in folder.glob("*/io_links/*/properties")]
    xgmi = 11  # the driver's number of this kind of link
    linked = {(link.get("node_from"), link.get("node_to")) for link in links if link.get("type") == xgmi}
    apart = [pair for pair in permutations(gpus, 2) if pair not in linked]
    pairs, all_linked = " ".join(f"{a}-{b}" for a, b in apart if a < b), f"links between all {len(gpus)} GPUs"
    found = f"no link between nodes {pairs}" if apart else all_linked
    advice = "collectives between these go over PCIe: look at the bridges, and at this job's part of the node"
    yield Line("xGMI", found, not apart, all_linked, advice)


# ---- NVIDIA's devices, as nvidia-smi shows them

QUERY = ("name", "driver_version", "pstate", "clocks.max.sm", "power.limit", "power.default_limit",
         "temperature.gpu", "ecc.errors.uncorrected.volatile.total", "mig.mode.current",
         "pcie.link.gen.current", "pcie.link.width.current", "pcie.link.gen.max", "pcie.link.width.max",
         "ecc.errors.corrected.volatile.total", "clocks.current.sm")  # fmt: skip
# nvidia-smi's bits of what slows the clocks down. Idle devices and the power limit do so on every machine.
REASONS = {0x08: "hardware slowdown", 0x20: "heat, by the driver", 0x40: "heat, by the hardware",
           0x80: "the power supply's brake"}  # fmt: skip
HOTTEST = 85  # degrees; Hopper's clocks fall a few above


def check_nvidia(machine: Machine) -> Iterator[Line]:
    # The second name is that of drivers before 535.
    for reasons in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        query = f"--query-gpu={','.join(QUERY)},{reasons}"
        if table := machine.run("nvidia-smi", query, "--format=csv,noheader,nounits"):
            break
    else:
        advice = "is the NVIDIA driver loaded, and its tool on PATH?"
        yield failed("nvidia-smi", "no answer", "a table of devices", advice)
    for number, row in enumerate(table.splitlines()):
        values = dict(zip((*QUERY, "reasons"), (word.strip() for word in row.split(",")), strict=False))
        yield from check_nvidia_device(f"GPU {number}", values)
    for (i, j), link in nvidia_links(machine).items():
        yield Line(f"link of GPU {i} and GPU {j}", link)


def nvidia_links(machine: Machine) -> dict[tuple[int, int], str]:
    """By the numbers of two devices: NV18 for 18 NVLinks, PIX, NODE or SYS for ways over PCIe."""
    topology = machine.run("nvidia-smi", "topo", "-m")
    rows = [line.split() for line in topology.splitlines() if re.match(r"GPU\d+\s", line)]
    return {(i, j): rows[i][j + 1] for i, j in combinations(range(len(rows)), 2)}


def number_of(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A], Not Supported
        return None


def check_nvidia_device(name: str, values: Mapping[str, str]) -> Iterator[Line]:
    yield Line(name, f"{values['name']}, driver {values['driver_version']}, {values['pstate']}")
    yield nvidia_clocks(name, values)
    # Only the width: idle devices lower the generation.
    width, widest = values["pcie.link.width.current"], values["pcie.link.width.max"]
    pcie = f"generation {values['pcie.link.gen.current']} of {values['pcie.link.gen.max']}, x{width}"
    yield Line(f"{name} PCIe", pcie, width == widest, f"x{widest}", RESEAT)
    if (limit := number_of(values["power.limit"])) is not None:
        yield power_limit(name, limit, number_of(values["power.default_limit"]), "nvidia-smi -pl")
    if (degrees := number_of(values["temperature.gpu"])) is not None:
        yield temperature(name, degrees, HOTTEST)
    errors, corrected = (
        number_of(values[f"ecc.errors.{kind}.volatile.total"]) for kind in ("uncorrected", "corrected")
    )
    if errors is not None:
        yield memory_errors(name, errors, corrected)
    if values["mig.mode.current"] == "Enabled":
        advice = "a process sees a part of the device; without MIG it has all of it: sudo nvidia-smi -mig 0"
        yield failed(f"{name} MIG", "Enabled", "Disabled", advice)


def nvidia_clocks(name: str, values: Mapping[str, str]) -> Line:
    found = f"{values['clocks.current.sm']} of at most {values['clocks.max.sm']} MHz"
    try:
        bits = int(values["reasons"], 16)
    except ValueError:  # [N/A]
        return Line(f"{name} clocks", found)
    if slowed := ", ".join(reason for bit, reason in REASONS.items() if bits & bit):
        advice = "nvidia-smi -q -d PERFORMANCE shows it: look at fans, air and power supplies"
        return failed(f"{name} clocks", f"{found}, lowered by {slowed}", "not lowered", advice)
    return Line(f"{name} clocks", found)


def check_engines(machine: Machine, platform: str) -> Iterator[Line]:
    """Those of the build or, before there is one, what it will find."""
    if (gpus := doctor.count_gpus(platform, machine.root)) < 2:
        return
    if lines := list(doctor.check_engines(gpus)):
        yield from lines
    elif any((machine.root / f"usr/{folder}include/gloo").is_dir() for folder in ("", "local/")):
        yield Line("several devices", "Gloo is installed; llamac is not built yet")
    else:
        advice = "sudo apt-get install libgloo-dev, before make; as root, make does it"
        yield failed("several devices", "no Gloo", f"Gloo or MPI, for {gpus} GPUs", advice)


# ---- versions of the driver, ROCm and torch


def check_rocm(machine: Machine, torch: ModuleType | Line) -> Iterator[Line]:
    """ROCm compiles llamac's kernels, and torch has a runtime of its own: both of one major version."""
    yield doctor.amd_driver(machine.root)
    rocm = find_rocm(machine.root, machine.environment)
    if rocm is None:
        named = machine.environment.get("ROCM_PATH") or machine.environment.get("HIP_PATH")
        yield Line("ROCm", f"none in {named or '/opt, and no hipcc in PATH'}")
        return
    folder = f"/{rocm.folder.relative_to(machine.root)}"
    found = f"{rocm.release or f'HIP {rocm.hip}'} in {folder}"
    if isinstance(torch, Line):
        yield Line("ROCm", found)
        return
    release, hip = getattr(torch.version, "rocm", None), torch.version.hip
    name, own, its = ("ROCm", rocm.release, release) if release and rocm.release else ("HIP", rocm.hip, hip)
    found += f", torch has {name} {its}" if its else ""
    major, its_major = own.split(".")[0], (its or "").split(".")[0]
    ok = not major or not its_major or major == its_major
    either = f"torch for {name} {major}, or {name} {its_major} and set ROCM_PATH to it"
    advice = f"install {either}; then {doctor.REINSTALL}"
    yield Line("ROCm", found, ok, f"{name} {its_major}, as torch's", advice)


def check_software(machine: Machine, platform: str, torch: ModuleType | Line) -> Iterator[Line]:
    """Whether the driver of this platform, its toolkit and torch fit each other."""
    if platform == "amd":
        yield from check_rocm(machine, torch)
    if isinstance(torch, Line):
        return
    from llamac.base import extension

    built_for = extension.platform()
    if built_for != platform:
        found, name = f"{torch.__version__} for {NAMES[built_for]}", NAMES[platform]
        advice = f"install torch for {name} as pytorch.org/get-started says; then {doctor.REINSTALL}"
        yield failed("torch", found, f"one for {name}, whose driver is loaded", advice)
        return
    yield from doctor.check_torch(torch, platform)
    if platform == "nvidia":
        yield from doctor.check_versions(platform, doctor.loaded_files())


# ---- measured rates

BUSY = "is another process using it? Then look at power limit, temperature and partition above"
LINKS = "look at the links above, at NCCL_P2P_DISABLE and at the IOMMU"


def share_of(
    what: str, measured: float, published: float | None, unit: str, least: float, advice: str = BUSY
) -> Line:
    found = f"{measured:,.0f} {unit}" if measured >= 10 else f"{measured:.2f} {unit}"
    if published is None:
        return Line(what, found)
    found += f", {100 * measured / published:.0f}% of the published {published:,.0f}"
    if measured < least * published:
        return failed(what, found, f"{100 * least:.0f}% or more", advice)
    if measured > MOST_OF_PUBLISHED * published:
        advice = "this measurement or configs/tables/devices.toml is wrong: please report it"
        return failed(what, found, f"{100 * MOST_OF_PUBLISHED:.0f}% at most", advice)
    return Line(what, found)


def products(torch: ModuleType, device: str) -> dict[str, float]:
    """10^12 FLOP per second of a large square product, by the types that the device's matrix units take."""
    from llamac.base.dtypes import fp8_of
    from llamac.doctor.installation import architecture_of
    from llamac.profile import peak

    n = 1024 if device == "cpu" else 8192
    x, y = (torch.randn(n, n, device=device) for _ in range(2))
    work: dict[str, Callable[[], object]] = {}
    if device == "cpu":
        work["f32"] = partial(torch.mm, x, y)
    else:
        work["bf16"] = partial(torch.mm, x.bfloat16(), y.bfloat16())
        if forms := fp8_of(architecture_of(torch, torch.device(device).index)):
            form = torch.float8_e4m3fnuz if "e4m3fnuz" in forms else torch.float8_e4m3fn
            one = torch.ones((), device=device)
            a, b = x.to(form), y.to(form).t()  # it takes the second operand by columns
            work["fp8"] = partial(torch._scaled_mm, a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return {name: 2e-12 * n**3 / peak.seconds_of(device, call) for name, call in work.items()}


def check_rates(torch: ModuleType, devices: list[str]) -> Iterator[Line]:
    from llamac.profile import peak

    for device in devices:
        published = {} if device == "cpu" else peak.published_rates(device)
        copied = peak.copy_gbps(device)
        if copied is not None:
            yield share_of(
                f"{device} memory, read and written", copied, published.get("gbps"), "GB/s", LEAST_COPY
            )
        for dtype, rate in products(torch, device).items():
            yield share_of(
                f"{device} product in {dtype}", rate, published.get(dtype), "TFLOP/s", LEAST_PRODUCT
            )


def links_of_a_pair(machine: Machine, platform: str) -> int:
    """How many links two devices have; 0 where they have none, or not all pairs have as many."""
    if platform == "amd":
        return 1
    found = {re.sub(r"^NV(?=\d+$)", "", link) for link in nvidia_links(machine).values()}
    (links,) = found if len(found) == 1 else ("0",)
    return int(links) if links.isdigit() else 0


def link_table() -> list[dict]:
    return tomllib.loads((CONFIGS / "tables/devices.toml").read_text(encoding="utf-8"))["link"]


def published_links(name: str, pair: int, devices: int) -> tuple[float | None, float | None]:
    """10^9 bytes per second that this device sends to another one, and to all of so many devices together."""
    row = next((row for row in link_table() if name in row["names"]), None)
    if row is None or not pair:
        return None, None
    # A switch leads all links of a device to each other one; without it, each pair has some of them.
    return pair * row["gbps"], min(row["links"], pair * (devices - 1)) * row["gbps"]


def check_between_devices(torch: ModuleType, devices: list[str], pair: int) -> Iterator[Line]:
    """Copies from each device to each other one, and an all-reduce of all, beside the rates of the links."""
    if len(devices) < 2:
        return
    from llamac.profile import peak

    name = torch.cuda.get_device_properties(0).name
    to_one, to_all = published_links(name, pair, len(devices))
    for source, target in permutations(devices, 2):
        x, y = (torch.zeros(GIB // 4, dtype=torch.uint8, device=device) for device in (source, target))
        rate = 1e-9 * x.numel() / peak.seconds_of(target, partial(y.copy_, x))
        what = f"copy from {source} to {target}"
        if rate < LEAST_BETWEEN_DEVICES:
            advice = f"it goes through the host: {LINKS}"
            yield failed(what, f"{rate:.0f} GB/s", f"{LEAST_BETWEEN_DEVICES} GB/s or more", advice)
        else:
            yield share_of(what, rate, to_one, "GB/s", LEAST_LINK, LINKS)
    rate = all_reduce_gbps(torch, len(devices), "nccl", GIB // 4)
    what = f"all-reduce of {len(devices)} devices, bus bandwidth"
    yield share_of(what, rate, to_all, "GB/s", LEAST_LINK, LINKS)


def _all_reduce(rank: int, ranks: int, backend: str, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from llamac.profile import peak

    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    seconds = peak.seconds_of(device, partial(dist.all_reduce, x))
    if rank == 0:
        Path(folder, "seconds").write_text(str(seconds))
    dist.destroy_process_group()


def all_reduce_gbps(torch: ModuleType, ranks: int, backend: str, size: int) -> float:
    """Bus bandwidth in 10^9 bytes per second of an all-reduce of `size` bytes: what each device sends, as
    nccl-tests counts it. One process per device."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_all_reduce, (ranks, backend, size, folder), nprocs=ranks)
        seconds = float(Path(folder, "seconds").read_text())
    return 2 * (ranks - 1) / ranks * 1e-9 * size / seconds


# ---- all of it


def examine(machine: Machine | None = None) -> Iterator[Line]:
    """Every line. The devices are those whose driver is loaded; rates need a torch."""
    machine = machine or Machine()
    torch = doctor.find_torch()
    platform = doctor.driver_platform(machine.root)
    if not isinstance(torch, Line):
        from llamac.base import extension

        # Of two drivers, the one for torch's devices.
        if doctor.has_driver(extension.platform(), machine.root):
            platform = extension.platform()
    yield from check_host(machine, platform)
    yield from check_environment(machine)
    if platform != "cpu":
        yield from {"amd": check_amd, "nvidia": check_nvidia}[platform](machine)
        yield from check_engines(machine, platform)
        yield from check_software(machine, platform, torch)
    else:
        drivers = " and no ".join(map(str, doctor.DRIVERS.values()))
        yield skipped("GPU", f"none found (no {drivers}): {UNCHECKED}")
    if isinstance(torch, Line):
        yield torch
        yield skipped("rates", "not measured: they need torch")
        return
    usable = platform != "cpu" and torch.cuda.is_available()
    devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if usable else ["cpu"]
    yield from check_rates(torch, devices)
    yield from check_between_devices(torch, devices, links_of_a_pair(machine, platform))
