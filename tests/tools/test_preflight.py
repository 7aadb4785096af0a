"""llamac.doctor.preflight: machines made of files, which have what a line says or lack it."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from llamac.base import extension
from llamac.doctor import installation as doctor
from llamac.doctor import preflight
from llamac.doctor.installation import Line
from llamac.doctor.preflight import Machine
from llamac.profile import peak

CARD = "sys/class/drm/card1/device"
SENSORS = f"{CARD}/hwmon/hwmon4"
NODES = "sys/class/kfd/kfd/topology/nodes"
MI300X = {
    f"{CARD}/vendor": "0x1002",
    f"{CARD}/current_compute_partition": "SPX",
    f"{CARD}/current_memory_partition": "NPS1",
    f"{CARD}/power_dpm_force_performance_level": "auto",
    f"{CARD}/current_link_speed": "32.0 GT/s PCIe",
    f"{CARD}/max_link_speed": "32.0 GT/s PCIe",
    f"{CARD}/current_link_width": "16",
    f"{CARD}/max_link_width": "16",
    f"{CARD}/pp_dpm_sclk": "S: 132Mhz *\n0: 500Mhz\n1: 2100Mhz",
    f"{CARD}/ras/umc_err_count": "ue: 0\nce: 3",
    f"{CARD}/ras/gfx_err_count": "ue: 0\nce: 0",
    f"{SENSORS}/power1_cap": "750000000",
    f"{SENSORS}/power1_cap_default": "750000000",
    f"{SENSORS}/temp2_label": "junction",
    f"{SENSORS}/temp2_input": "54000",
    f"{SENSORS}/temp2_crit": "100000",
    "sys/class/drm/card0/device/vendor": "0x1a03",  # the host's own graphics
    "sys/class/drm/card1-DP-1/device/vendor": "0x1002",  # a connector
    "sys/class/iommu/ivhd0/x": "",
    "opt/rocm/.info/version": "7.0.2-56",
    "sys/module/amdgpu/version": "6.14.14",
    "proc/cmdline": "BOOT_IMAGE=/vmlinuz iommu=pt quiet",
    "proc/meminfo": "MemTotal:       2377756848 kB",
    "proc/sys/kernel/numa_balancing": "0",
    "dev/shm/x": "",
    **{f"{NODES}/{node}/properties": "simd_count 1216" for node in (2, 3)},
    f"{NODES}/0/properties": "cpu_cores_count 96\nsimd_count 0",
    f"{NODES}/2/io_links/1/properties": "type 11\nnode_from 2\nnode_to 3",
    f"{NODES}/3/io_links/1/properties": "type 11\nnode_from 3\nnode_to 2",
    f"{NODES}/2/io_links/0/properties": "type 2\nnode_from 2\nnode_to 0",
}
H200 = "NVIDIA H200, 580.95.05, P0, 1980, 700.00, 700.00, 41, 0, Disabled, 5, 16, 5, 16, 2, 345, 0x0001"
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\t0-31\t0\t\tN/A
GPU1\tNV18\t X \t0-31\t0\t\tN/A

Legend:
"""


@pytest.fixture
def machine(tmp_path):
    """machine(**changed): the MI300X above with files changed; None removes one."""

    def make(changed: dict | None = None, run=lambda *command: "") -> Machine:
        for path, text in (MI300X | (changed or {})).items():
            if text is not None:
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / path).write_text(text + "\n")
        return Machine(tmp_path, {}, run)

    return make


@pytest.fixture(autouse=True)
def built(monkeypatch):
    """What the built module has for several devices."""
    native = SimpleNamespace(engines=lambda: "Gloo, no MPI, RCCL 2.27.7")
    monkeypatch.setattr(doctor, "import_registry", lambda: native)


def failures(lines) -> list[str]:
    found = [str(line) for line in lines if not line.ok]
    for text in found:
        assert text.startswith("FAIL  ") and " - " in text and "(expected " in text and "\n" not in text
    return found


def test_a_machine_that_is_well(machine):
    lines = [str(line) for line in preflight.check_amd(machine())]
    lines += map(str, preflight.check_settings(machine(), "amd"))
    assert all(line.startswith("ok    ") for line in lines), lines
    for expected in ("GPU 0 compute partition: SPX", "GPU 0 power limit: 750 W", "GPU 0 temperature: 54 C",
                     "GPU 0 memory errors: none uncorrected, 3 corrected",
                     "GPU 0 clocks: auto, 132 of at most 2100 MHz", "GPU 0 PCIe: 32.0 GT/s PCIe, x16",
                     "xGMI: links between all 2 GPUs", "NUMA balancing: 0",
                     "IOMMU: pass-through"):  # fmt: skip
        assert f"ok    {expected}" in lines


@pytest.mark.parametrize(
    "path, text, line",
    [
        (f"{CARD}/current_compute_partition", "CPX",
         "GPU 0 compute partition: CPX (expected SPX, the whole device) - a process sees a part of the "
         "device: sudo amd-smi set --compute-partition SPX"),
        (f"{CARD}/current_memory_partition", "NPS4", "--memory-partition NPS1"),
        (f"{CARD}/power_dpm_force_performance_level", "low",
         "GPU 0 clocks: low, 132 of at most 2100 MHz (expected auto)"),
        (f"{CARD}/ras/umc_err_count", "ue: 2\nce: 0",
         "memory errors: 2 uncorrected (umc 2), 0 corrected (expected none uncorrected)"),
        (f"{CARD}/current_link_width", "8", "PCIe: 32.0 GT/s PCIe, x8 (expected 32.0 GT/s PCIe, x16)"),
        (f"{SENSORS}/power1_cap", "550000000", "power limit: 550 W (expected 750 W, the device's own)"),
        (f"{SENSORS}/temp2_input", "96000", "temperature: 96 C (expected below 90 C)"),
        (f"{NODES}/3/io_links/1/properties", "type 2\nnode_from 3\nnode_to 2",
         "xGMI: no link between nodes"),
        ("proc/sys/kernel/numa_balancing", "1", "NUMA balancing: 1 (expected 0)"),
        ("proc/cmdline", "quiet", "IOMMU: translates every address (expected iommu=pt, or off)"),
    ],
)  # fmt: skip
def test_each_fault_is_named(machine, path, text, line):
    made = machine({path: text})
    (found,) = failures([*preflight.check_amd(made), *preflight.check_settings(made, "amd")])
    assert line in found


def test_a_device_that_is_closed_to_the_user(machine, monkeypatch):
    made = machine({"dev/kfd": "", "dev/dri/renderD128": ""})
    assert not failures(preflight.check_amd(made))
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: path.name != "kfd")
    (found,) = failures(preflight.check_amd(made))
    assert "dev/kfd closed to this user (expected open) - sudo usermod -aG render,video $USER" in found


def test_files_that_are_missing_are_no_faults(tmp_path):
    (tmp_path / "dev/shm").mkdir(parents=True)
    made = Machine(tmp_path, {}, lambda *command: "")
    assert not failures([*preflight.check_amd(made), *preflight.check_host(made, "amd")])


def test_host(machine, monkeypatch):
    made = machine()
    lines = [str(line) for line in preflight.check_host(made, "amd")]
    assert lines[0].endswith("2268 GiB") and not failures(preflight.check_host(made, "amd"))
    monkeypatch.setattr(preflight.os, "statvfs", lambda path: SimpleNamespace(f_frsize=4096, f_blocks=16384))
    (found,) = failures(preflight.check_host(made, "amd"))
    assert "/dev/shm: 0.06 GiB (expected 1 GiB or more)" in found
    monkeypatch.undo()
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    assert not failures(preflight.check_host(made, "amd"))
    (found,) = failures(preflight.check_host(machine({"sys/class/infiniband/mlx5_0/x": ""}), "amd"))
    assert "locked memory: 8 MiB (expected unlimited, with InfiniBand adapters)" in found


def test_variables():
    given = {"CUDA_LAUNCH_BLOCKING": "1", "AMD_SERIALIZE_KERNEL": "0", "HSA_ENABLE_SDMA": "0", "PATH": "/bin",
             "NCCL_DEBUG": "INFO", "PYTORCH_HIP_ALLOC_CONF": "x"}  # fmt: skip
    lines = list(preflight.check_environment(Machine(environment=given)))
    found = failures(lines)
    assert len(found) == 2 and "CUDA_LAUNCH_BLOCKING: 1 (expected unset, or 0)" in found[0]
    assert "HSA_ENABLE_SDMA: 0 (expected unset, or 1)" in found[1]
    told = [line.what for line in lines if line.ok]
    assert told == ["AMD_SERIALIZE_KERNEL", "NCCL_DEBUG", "PYTORCH_HIP_ALLOC_CONF"]


def nvidia(row: str = H200, topology: str = TOPOLOGY, reasons: str = "clocks_event_reasons"):
    """A machine with two H200 whose nvidia-smi knows one of the two names of the reasons."""

    def run(*command: str) -> str:
        if "topo" in command:
            return topology
        return f"{row}\n{H200}\n" if reasons in command[1] else ""

    return Machine(run=run)


def test_nvidia():
    lines = [str(line) for line in preflight.check_nvidia(nvidia())]
    for line in ("GPU 1: NVIDIA H200, driver 580.95.05, P0", "GPU 1 clocks: 345 of at most 1980 MHz",
                 "GPU 1 PCIe: generation 5 of 5, x16",
                 "GPU 1 memory errors: none uncorrected, 2 corrected"):  # fmt: skip
        assert f"ok    {line}" in lines
    assert "ok    link of GPU 0 and GPU 1: NV18" in lines
    assert not failures(preflight.check_nvidia(nvidia()))
    old = [str(line) for line in preflight.check_nvidia(nvidia(reasons="clocks_throttle_reasons"))]
    assert old == lines
    for old, new, line in [
        ("700.00, 700.00", "500.00, 700.00", "GPU 0 power limit: 500 W (expected 700 W, the device's own)"),
        (" 41,", " 88,", "GPU 0 temperature: 88 C (expected below 85 C)"),
        ("41, 0,", "41, 3,", "GPU 0 memory errors: 3 uncorrected, 2 corrected (expected none uncorrected)"),
        ("5, 16, 5", "1, 8, 5", "GPU 0 PCIe: generation 1 of 5, x8 (expected x16)"),
        ("0001", "0044", "345 of at most 1980 MHz, lowered by heat, by the hardware (expected not lowered)"),
        ("Disabled", "Enabled", "GPU 0 MIG: Enabled (expected Disabled)"),
    ]:
        (found,) = failures(preflight.check_nvidia(nvidia(H200.replace(old, new))))
        assert line in found
    unknown = H200.replace("700.00, 700.00", "[N/A], [N/A]").replace("41, 0", "N/A, [N/A]")
    unknown = unknown.replace("0x0001", "[N/A]").replace("5, 16, 5", "1, 16, 5")
    assert not failures(preflight.check_nvidia(nvidia(unknown)))
    (found,) = failures(preflight.check_nvidia(replace(nvidia(), run=lambda *command: "")))
    assert "nvidia-smi: no answer (expected a table of devices)" in found


def test_rates_beside_published_ones():
    ok = preflight.share_of("copy", 4200, 4800, "GB/s", 0.6)
    assert str(ok) == "ok    copy: 4,200 GB/s, 88% of the published 4,800"
    slow = preflight.share_of("copy", 2000, 4800, "GB/s", 0.6)
    assert failures([slow]) and "42% of the published 4,800 (expected 60% or more)" in str(slow)
    assert "3994% of the published 4,800 (expected 400% at most)" in str(
        preflight.share_of("copy", 191712, 4800, "GB/s", 0.6)
    )
    assert preflight.share_of("copy", 5, None, "GB/s", 0.6).ok


def test_a_rate_is_that_of_its_device(monkeypatch):
    """Work on another device than the current one goes on when the current one is done."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    peak.seconds_of("cuda:1", lambda: waited.append("work"), tries=1)
    assert waited == 2 * ["cuda:1", "work", "cuda:1"]


def test_rates_of_this_cpu(one_thread):
    lines = [str(line) for line in preflight.check_rates(torch, ["cpu"])]
    assert [line.split(":")[0] for line in lines] == [
        "ok    cpu memory, read and written", "ok    cpu product in f32",
    ]  # fmt: skip


@pytest.mark.more
def test_all_reduce_of_two_processes():
    assert preflight.all_reduce_gbps(torch, 2, "gloo", 1 << 20) > 0


@pytest.mark.more
def test_the_command():
    command = [sys.executable, "-m", "llamac", "doctor", "--preflight"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.stdout.startswith("ok    host: ") and "memory, read and written" in found.stdout
    *lines, last = found.stdout.splitlines()
    failed = [line for line in lines if line.startswith("FAIL")]
    assert found.returncode == bool(failed), found.stderr
    if doctor.driver_platform() == "cpu":
        assert last == f"{len(failed)} failed" if failed else "nothing failed; not checked: GPU"


def test_several_gpus(machine, monkeypatch):
    def lines(**files: str) -> list[str]:
        return [str(line) for line in preflight.check_engines(machine(files), "amd")]

    assert lines() == ["ok    several devices: Gloo, no MPI, RCCL 2.27.7"]
    monkeypatch.delattr(doctor, "import_registry")  # nothing is built yet
    assert lines() == [
        "FAIL  several devices: no Gloo (expected Gloo or MPI, for 2 GPUs) - "
        "sudo apt-get install libgloo-dev, before make; as root, make does it"
    ]
    assert lines(**{"usr/include/gloo/context.h": ""}) == [
        "ok    several devices: Gloo is installed; llamac is not built yet"
    ]
    assert lines(**{f"{NODES}/3/properties": "simd_count 0"}) == []


def test_a_machine_without_a_gpu(machine, monkeypatch):
    """It says what it could not check, also where a driver is loaded and no device is there."""
    monkeypatch.setattr(doctor, "find_torch", lambda: Line("torch", "not installed"))
    written: list[str] = []
    assert doctor.report(preflight.examine(machine()), written.append) == 0
    (line,) = (line for line in written if "GPU" in line and line.startswith("skip  "))
    assert line.startswith("skip  GPU: none found (no /dev/kfd and no /dev/nvidiactl): its partition, clocks")
    assert written[-1] == "nothing failed; not checked: GPU, rates"
    none = {f"{CARD}/vendor": "0x1a03", "dev/kfd": ""}
    (line,) = (line for line in preflight.examine(machine(none)) if line.what == "GPU")
    assert line.skipped and line.found.startswith("none in /sys/class/drm, but /dev/kfd is there: its")


# ---- between devices


def test_links_and_their_published_rates():
    assert preflight.links_of_a_pair(nvidia(), "nvidia") == 18
    assert preflight.links_of_a_pair(nvidia(topology=TOPOLOGY.replace("NV18", "SYS")), "nvidia") == 0
    assert preflight.links_of_a_pair(nvidia(topology=""), "nvidia") == 0
    three = "GPU0 X NV18 NV18\nGPU1 NV18 X SYS\nGPU2 NV18 SYS X\n"
    assert preflight.links_of_a_pair(nvidia(topology=three), "nvidia") == 0
    assert preflight.links_of_a_pair(nvidia(), "amd") == 1
    rates = preflight.published_links
    assert rates("AMD Instinct MI300X", 1, 2) == (64, 64) and rates("AMD Instinct MI300X", 1, 8) == (64, 448)
    assert rates("NVIDIA H200", 18, 8) == (450, 450)  # through a switch
    assert rates("NVIDIA A100-SXM4-40GB", 4, 4) == (100, 300)  # four, each linked to each
    assert rates("NVIDIA H200", 0, 8) == rates("Some GPU", 18, 8) == (None, None)


def test_every_link_has_a_source():
    known = peak.published()
    for row in preflight.link_table():
        assert set(row) - {"switched"} == {"names", "gbps", "links", "source"} and row["source"]
        assert set(row["names"]) <= set(known)
        assert 20 <= row["gbps"] <= 100 and row["links"] * row["gbps"] in (300, 448, 450)


def test_rates_between_devices(monkeypatch):
    """Copies and an all-reduce at a share of the link's rate, by devices that take as long as they should."""
    rate = {"copy": 400.0, "reduce": 350.0}
    device = SimpleNamespace(name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(peak, "seconds_of", lambda *_: 1e-9 * (1 << 28) / rate["copy"])
    monkeypatch.setattr(preflight, "all_reduce_gbps", lambda *_: rate["reduce"])
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda n, dtype, device: zeros(n, dtype=dtype, device="meta"))

    def lines(count: int = 2, pair: int = 18) -> list[str]:
        devices = [f"cuda:{number}" for number in range(count)]
        return [str(line) for line in preflight.check_between_devices(torch, devices, pair)]

    assert lines() == [
        "ok    copy from cuda:0 to cuda:1: 400 GB/s, 89% of the published 450",
        "ok    copy from cuda:1 to cuda:0: 400 GB/s, 89% of the published 450",
        "ok    all-reduce of 2 devices, bus bandwidth: 350 GB/s, 78% of the published 450",
    ]
    rate |= {"copy": 100.0, "reduce": 12.0}
    assert all(
        line.startswith("FAIL") and "(expected 50% or more) - look at the links" in line for line in lines()
    )
    rate["copy"] = 12.0
    assert "12 GB/s (expected 20 GB/s or more) - it goes through the host" in lines()[0]
    assert not list(preflight.check_between_devices(torch, ["cpu"], 0))
    device.name, rate["reduce"] = "AMD Instinct MI300X", 320.0
    assert lines(8, 1)[-1].endswith("bus bandwidth: 320 GB/s, 71% of the published 448")


# ---- torch, and machines without one


def test_a_broken_torch(machine, monkeypatch):
    monkeypatch.setattr(
        doctor, "find_torch", lambda: doctor.failed("torch", "OSError", "a torch", "reinstall")
    )
    assert "torch: OSError" in failures(preflight.examine(machine()))[0]


@pytest.mark.parametrize("driver, line", [
    ("dev/kfd", "GPU 0 compute partition: SPX"), ("dev/nvidiactl", "GPU 1: NVIDIA H200, driver 580.95.05, P0")
])  # fmt: skip
@pytest.mark.parametrize("built_for", ["cpu", ""])
def test_devices_of_a_driver_without_torch_for_them(machine, monkeypatch, driver, line, built_for):
    """They are checked with no torch at all, and with one for the CPU, which is a fault then."""
    if not built_for:
        monkeypatch.setattr(doctor, "find_torch", lambda: Line("torch", "not installed"))
    monkeypatch.setattr(extension, "platform", lambda: built_for)
    monkeypatch.setattr(preflight, "check_rates", lambda torch, devices: [])
    monkeypatch.setattr(preflight, "check_between_devices", lambda *_: [])
    made = machine({driver: ""}, nvidia().run)
    lines = list(preflight.examine(made))
    assert f"ok    {line}" in map(str, lines)
    if not built_for:
        assert not failures(lines) and str(lines[-1]) == "skip  rates: not measured: they need torch"
        return
    (found,) = failures(lines)
    name = "ROCm" if driver == "dev/kfd" else "CUDA"
    assert f"for CPU (expected one for {name}, whose driver is loaded) - install torch for {name}" in found


def test_of_two_drivers_the_one_of_torch(machine, monkeypatch):
    monkeypatch.setattr(extension, "platform", lambda: "nvidia")
    monkeypatch.setattr(preflight, "check_rates", lambda torch, devices: [])
    monkeypatch.setattr(preflight, "check_between_devices", lambda *_: [])
    monkeypatch.setattr(doctor, "check_torch", lambda torch, platform: [Line("torch", platform)])
    monkeypatch.setattr(doctor, "check_versions", lambda platform, files: [Line("driver", "for CUDA 13.0")])
    lines = [
        str(line) for line in preflight.examine(machine({"dev/kfd": "", "dev/nvidiactl": ""}, nvidia().run))
    ]
    assert any("driver 580.95.05" in line for line in lines)
    assert "ok    torch: nvidia" in lines and "ok    driver: for CUDA 13.0" in lines


HEADER = "#define HIP_VERSION_MAJOR {}\n#define HIP_VERSION_MINOR {}\n#define HIP_VERSION_PATCH {}\n"
HIP_7_15 = HEADER.format(7, 15, 26333)


@pytest.mark.parametrize("files, environment, torch_has, line", [
    ({}, {}, {"hip": "7.1.5"}, "7.0.2-56 in /opt/rocm, torch has HIP 7.1.5"),
    ({}, {}, {"hip": None}, "7.0.2-56 in /opt/rocm"),
    ({}, {}, {"hip": "6.4.4"}, "7.0.2-56 in /opt/rocm, torch has HIP 6.4.4 (expected HIP 6, as torch's)"),
    ({"apps/rocm-6.4/.info/version": "6.4.1"}, {"ROCM_PATH": "/apps/rocm-6.4"}, {"hip": "7.1.5"},
     "6.4.1 in /apps/rocm-6.4, torch has HIP 7.1.5 (expected HIP 7, as torch's)"),
    # Packages since 7.13: .info below core alone, ROCm 10 with HIP 7.
    ({"opt/rocm/core/.info/version": "10.0.0", "opt/rocm/include/hip/hip_version.h": HIP_7_15}, {},
     {"hip": "7.2.1"}, "10.0.0 in /opt/rocm, torch has HIP 7.2.1"),
    ({"opt/rocm/core/.info/version": "10.0.0"}, {}, {"hip": "7.15.0", "rocm": "10.0.0"},
     "10.0.0 in /opt/rocm, torch has ROCm 10.0.0"),
    ({"opt/rocm/core-7.14/.info/version": "7.14.0", "opt/rocm/core-10.0/.info/version": "10.0.0"}, {},
     {"hip": "7.15.0", "rocm": "7.14.0"},
     "10.0.0 in /opt/rocm, torch has ROCm 7.14.0 (expected ROCm 7, as torch's)"),
    ({"opt/rocm/core-10.0/.info/version": "10.0.0"}, {}, {"hip": "7.15.0"},
     "10.0.0 in /opt/rocm, torch has HIP 7.15.0"),
    # Debian's packages.
    ({"usr/bin/hipcc": "", "usr/include/hip/hip_version.h": HEADER.format(6, 4, 43484)}, {"PATH": "usr/bin"},
     {"hip": "7.2.0"}, "HIP 6.4.43484 in /usr, torch has HIP 7.2.0 (expected HIP 7, as torch's)"),
    # PATH has another one than AMD's usual folder; several without it.
    ({"opt/rocm/.info/version": "7.2.4", "rocm-6.4/bin/hipcc": "", "rocm-6.4/.info/version": "6.4.1"},
     {"PATH": "rocm-6.4/bin"}, {"hip": "6.4.0"}, "6.4.1 in /rocm-6.4, torch has HIP 6.4.0"),
    ({"opt/rocm-7.10.0/.info/version": "7.10.0", "opt/rocm-7.2.4/.info/version": "7.2.4"}, {},
     {"hip": "7.2.0"}, "7.10.0 in /opt/rocm-7.10.0, torch has HIP 7.2.0"),
    ({"sdk/include/hip/hip_version.h": HIP_7_15}, {"HIP_PATH": "/sdk"}, {"hip": "7.15.0", "rocm": "10.0.0"},
     "HIP 7.15.26333 in /sdk, torch has HIP 7.15.0"),
    ({"x": ""}, {"ROCM_PATH": "/none"}, {"hip": "7.2.0"}, "none in /none"),
    ({"x": ""}, {}, {"hip": "7.2.0"}, "none in /opt, and no hipcc in PATH"),
])  # fmt: skip
def test_rocm_beside_torch(machine, tmp_path, files, environment, torch_has, line):
    made = machine({"opt/rocm/.info/version": None} | files if files else {})
    for name in files:
        (tmp_path / name).chmod(0o755)
    if "PATH" in environment:
        environment = environment | {"PATH": f"{tmp_path}/{environment['PATH']}"}
    version = SimpleNamespace(version=SimpleNamespace(**torch_has))
    made = replace(made, environment=environment)
    driver, rocm = preflight.check_rocm(made, version)
    assert str(driver) == "ok    driver: amdgpu 6.14.14"
    assert str(rocm).split(" - ")[0] == f"{'FAIL' if '(expected' in line else 'ok  '}  ROCm: {line}"
    _, without = preflight.check_rocm(made, Line("torch", "not installed"))
    assert str(without) == f"ok    ROCm: {line.split(', torch')[0]}"
