"""Storage types with llamac's names. csrc/core/dtype.h holds the same table on purpose, for the compiled
program; tests/ops/test_dtypes.py compares the two, and both with numpy, safetensors and torch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DType:
    """A row. mantissa_bits: those that are stored, 0 for an integer; torch: also config.json's name."""

    name: str
    mantissa_bits: int
    safetensors: str
    torch: str

    @property
    def narrow(self) -> bool:
        """Whether values are rounded from the type of the arithmetic as they are stored."""
        return 0 < self.mantissa_bits < TABLE["f32"].mantissa_bits

    @property
    def in_files(self) -> bool:
        """Not of fp8: its codes mean nothing without their scale."""
        return not self.torch.startswith("float8_")


TABLE = {
    row.name: row
    for row in (
        DType("f32", 23, "F32", "float32"),
        DType("bf16", 7, "BF16", "bfloat16"),
        DType("f64", 52, "F64", "float64"),
        DType("i32", 0, "I32", "int32"),
        DType("fp16", 10, "F16", "float16"),
        DType("e4m3", 3, "F8_E4M3", "float8_e4m3fn"),
        DType("e5m2", 2, "F8_E5M2", "float8_e5m2"),
        DType("e4m3fnuz", 3, "F8_E4M3FNUZ", "float8_e4m3fnuz"),
        DType("e5m2fnuz", 2, "F8_E5M2FNUZ", "float8_e5m2fnuz"),
    )
}


def fp8_of(architecture: str) -> tuple[str, ...]:
    """The fp8 types of a GPU's matrix units (e4m3 first), by a name such as sm_90 or gfx942; () for none."""
    chip = architecture.split(":")[0]
    if chip == "gfx942":
        return "e4m3fnuz", "e5m2fnuz"
    nvidia = chip.startswith("sm_") and int(chip.removeprefix("sm_")) >= 89
    return ("e4m3", "e5m2") if nvidia or chip == "gfx950" else ()


_BY_TORCH = {f"torch.{row.torch}": row for row in TABLE.values()}


def dtype_row(dtype: "torch.dtype") -> DType:
    """The row of one of torch's types."""
    return _BY_TORCH[str(dtype)]


def torch_dtypes(*names: str) -> dict[str, "torch.dtype"]:
    """Torch's types by our names."""
    import torch

    return {name: getattr(torch, TABLE[name].torch) for name in names}
