"""What PyTorch's device could do at best: the 100% that rates are measured against, as in the C program
(csrc/train/peak.cpp, which has the same table).
"""

import time

import torch

# Name as the runtime reports it: (multiprocessors of the whole device, TFLOP/s of dense matrix products in
# bf16, in f32). Vendors' data sheets and white papers; csrc/train/peak.cpp says which.
PUBLISHED = {
    "AMD Instinct MI300X": (304, 1307.4, 163.4),
    "AMD Instinct MI300X VF": (304, 1307.4, 163.4),
    "AMD Instinct MI325X": (304, 1307.4, 163.4),
    "AMD Instinct MI325X VF": (304, 1307.4, 163.4),
    "AMD Instinct MI250X": (220, 383.0, 95.7),
    "AMD Instinct MI250X/MI250": (220, 383.0, 95.7),
    "AMD Instinct MI250X / MI250": (220, 383.0, 95.7),
    "AMD Radeon RX 7900 XTX": (48, 122.8, 61.4),
    "Radeon RX 7900 XTX": (48, 122.8, 61.4),
    "NVIDIA H200": (132, 989.4, 66.9),
    "NVIDIA H200 NVL": (132, 835.5, 60.0),
    "NVIDIA H100 80GB HBM3": (132, 989.4, 66.9),
    "NVIDIA H100 PCIe": (114, 756.0, 51.2),
    "NVIDIA H100 NVL": (132, 835.5, 60.0),
    "NVIDIA A100-SXM4-40GB": (108, 312.0, 19.5),
    "NVIDIA A100-SXM4-80GB": (108, 312.0, 19.5),
    "NVIDIA A100-PCIE-40GB": (108, 312.0, 19.5),
    "NVIDIA A100 80GB PCIe": (108, 312.0, 19.5),
    "NVIDIA GeForce RTX 4090": (128, 165.2, 82.6),
}


def peak_tflops(device: str, dtype: torch.dtype) -> float | None:
    """TFLOP/s of matrix products of this type: a GPU's published ones, in the share of the device that this
    process has, None where they are not known; the processor's of a 1024^3 product in f32.
    """
    if device == "cpu":
        return _measured_tflops()
    properties = torch.cuda.get_device_properties(device)
    units, bf16, f32 = PUBLISHED.get(properties.name, (0, 0.0, 0.0))
    if not units:
        return None
    return (bf16 if dtype == torch.bfloat16 else f32) * min(1.0, properties.multi_processor_count / units)


def _measured_tflops() -> float:
    n = 1024
    x, weight, out = torch.full((n, n), 0.5), torch.full((n, n), 0.25), torch.empty(n, n)
    start, best, tries = time.perf_counter(), float("inf"), 0
    while tries < 3 or time.perf_counter() - start < 0.1:
        begin = time.perf_counter()
        torch.mm(x, weight, out=out)
        best, tries = min(best, time.perf_counter() - begin), tries + 1
    return 2e-12 * n**3 / best


def copy_gbps(device: str) -> float | None:
    """10^9 bytes a second, read and written, of a large copy within the device's memory, the best of ten;
    None where there is no room for one.
    """
    size, gpu = (64 << 20, False) if device == "cpu" else (1 << 30, True)
    try:
        source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    except torch.OutOfMemoryError:
        return None
    best = float("inf")
    for _ in range(11):
        if gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        if gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2e-9 * size / best
