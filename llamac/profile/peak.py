"""The published rates of a GPU (configs/tables/devices.toml), of which preflight prints shares, and times."""

import time
import tomllib
from collections.abc import Callable
from functools import cache, partial

import torch

from llamac.base.folders import CONFIGS


@cache
def published() -> dict[str, dict]:
    """The table's rows by the device's name, as the runtime reports it: multiprocessors, tflops, source."""
    table = tomllib.loads((CONFIGS / "tables/devices.toml").read_text(encoding="utf-8"))
    return {name: row for row in table["device"] for name in row["names"]}


def published_rates(device: str) -> dict[str, float]:
    """Of a GPU, in the share of it that this process has: TFLOP/s by the operands' type, and "gbps" of
    its memory; those that are known.
    """
    properties = torch.cuda.get_device_properties(device)
    row = published().get(properties.name)
    if row is None:
        return {}
    share = min(1.0, properties.multi_processor_count / row["multiprocessors"])
    rates = row["tflops"] | ({"gbps": row["gbps"]} if "gbps" in row else {})
    return {what: rate * share for what, rate in rates.items()}


def copy_gbps(device: str) -> float | None:
    """10^9 bytes per second, read and written, of a large copy within the device's memory, the best of ten;
    None where there is no room for one.
    """
    size = 64 << 20 if device == "cpu" else 1 << 30
    try:
        source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    except torch.OutOfMemoryError:
        return None
    return 2e-9 * size / seconds_of(device, partial(target.copy_, source))


def seconds_of(device: str, work: Callable[[], object], tries: int = 10) -> float:
    """Seconds of one call of work on this device, which need not be the current one: the best of tries, after
    a first call that loads kernels.
    """
    wait = (lambda: None) if device == "cpu" else partial(torch.cuda.synchronize, device)
    best = float("inf")
    for _ in range(tries + 1):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - begin)
    return best
