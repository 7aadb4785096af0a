"""Calls of operations on the emulated device: every optimized variant, in several orders of its waves."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from device import Device, Tensor, demangle
from output import Output

NOT_SUPPORTED = "does not take these shapes, types or strides"  # the registry's message


def kernel_name(mangled: str) -> str:
    """`f<bf16>` of the mangled `void llamac::(anonymous namespace)::f<llamac::bf16>(float*)`."""
    text = re.sub(r"\(anonymous namespace\)::|llamac::|^void ", "", demangle(mangled))
    depth, end = 0, len(text)
    for at, letter in enumerate(text):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            end = at
            break
    return re.sub(r"\((?:Layout)\)", "", text[:end])


@dataclass
class Row:
    """The result of one call of one variant."""

    operation: str
    variant: str
    shape: str
    status: str
    share: float  # of the tolerance
    errors: str
    kernels: list[str]
    instructions: int  # of waves, in the first order
    seconds: float


class Harness:
    """Runs calls and keeps their results."""

    def __init__(self, device: Device, orders: tuple[str, ...], only: str = ""):
        self.device, self.orders, self.only = device, orders, only
        self.random = np.random.default_rng(7)
        self.rows: list[Row] = []
        self.tensor = device.tensor

    def normal(self, *shape, scale=1.0) -> np.ndarray:
        return self.random.standard_normal(shape) * scale

    def wanted(self, operation: str, variant: str) -> bool:
        return bool(re.search(self.only, f"{operation} {variant}"))

    def case(
        self,
        operation: str,
        shape: str,
        tensors: list[Tensor | None],
        scalars: list,
        outputs: list[Output],
        threads: int = 0,
        strides: dict[int, tuple[int, ...]] | None = None,
        check: Callable[[], tuple[float, str]] | None = None,
    ) -> None:
        """The call by every optimized variant that takes it. threads: per block; 0: the default."""
        shape += f" threads={threads}" if threads else ""
        variants = [v for v in self.device.optimized(operation) if not threads or threads in v.threads]
        before = [t.raw.copy() if t is not None else None for t in tensors]
        taken = 0
        for variant in variants:
            if not self.wanted(operation, variant.name):
                taken += 1
                continue
            start = time.time()
            row = Row(operation, variant.name, shape, "", 0.0, "", [], 0, 0.0)
            try:
                call = (operation, variant.name, tensors, scalars, threads, strides)
                self.run_orders(row, call, before, outputs, variant.deterministic, check)
            except NotImplementedError as error:
                row.status = f"not checked: {error}"
            except Exception as error:
                if NOT_SUPPORTED in str(error):
                    continue
                row.status = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
            row.seconds = time.time() - start
            taken += 1
            self.report(row)
        if not taken:
            self.report(Row(operation, "", shape, "FAILED: no variant takes this call", 0.0, "", [], 0, 0.0))

    def run_orders(self, row: Row, call, before, outputs, deterministic, check) -> None:
        """The call in each order of waves: guards, inputs and a deterministic variant's bits are compared."""
        problems, texts, first = [], [], None
        tensors = call[2]
        written = {o.tensor.at for o in outputs}
        for order in self.orders:
            self.device.machine.order = order
            for t, old in zip(tensors, before):
                if t is not None:
                    t.raw[:] = old
            log = self.device.call(*call)
            for t, old in zip(tensors, before):
                if t is not None and not t.guards_intact():
                    problems.append(f"{order}: wrote outside a tensor")
                if t is not None and t.at not in written and not (t.raw == old).all():
                    problems.append(f"{order}: an input changed")
            bits = [o.tensor.raw.copy() for o in outputs]
            if first is None:
                first = bits
                row.kernels = [kernel_name(launch.name) for launch in log]
                row.instructions = sum(launch.instructions for launch in log)
            elif deterministic:
                if any(not (a == b).all() for a, b in zip(first, bits)):
                    problems.append(f"{order}: other bits than {self.orders[0]}")
                continue
            results = [o.judge() for o in outputs] + ([check()] if check else [])
            row.share = float(np.max([row.share, *(share for share, _ in results)]))  # a NaN stays
            texts = texts or [text for _, text in results]
        row.errors = ", ".join(texts)
        row.status = "right" if row.share <= 1 and not problems else "WRONG " + "; ".join(problems)

    def report(self, row: Row) -> None:
        self.rows.append(row)
        print(
            f"{row.operation} {row.variant} {row.shape}: {row.status}, {row.errors}, "
            f"{row.share:.2f} of the tolerance, "
            f"{row.instructions} wave instructions, {row.seconds:.1f} s, {row.kernels}",
            flush=True,
        )
