"""Products in fp8 with torch.ops.llamac: the parts of llamac.ops.linear. docs/fp8.md describes the recipe,
and llamac.training.fp8_reference implements it in plain PyTorch.

A tensor has one scale, a power of two. Scales are float32: `scale` [1], and `inverse` [1, 4], whose first
element is 1 / scale, as the products read it. With scales per row, there are inverses [N] for the rows of the
codes, and [C] for those of the transposed codes.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llamac.base import extension
from llamac.base.dtypes import fp8_of, torch_dtypes

extension.load()
_ops = torch.ops.llamac
_FP8 = torch_dtypes("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")
GRADIENTS = ("e5m2", "e4m3")
MULTIPLE = 16  # of a GPU's products: every dimension that lies along memory


@cache
def _of_gpu(index: int) -> tuple[str, ...]:
    """Raises ValueError."""
    properties = torch.cuda.get_device_properties(index)
    own = properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    if not (found := fp8_of(own)):
        expected = "a device with fp8 units (NVIDIA from compute capability 8.9 on, gfx942, gfx950)"
        raise ValueError(f"linear: expected {expected}, found {torch.cuda.get_device_name(index)}")
    return found


@torch.compiler.assume_constant_result
def types(index: int | None, gradients: str) -> tuple[torch.dtype, torch.dtype]:
    """(of inputs and weights, of outputs' gradients) on a GPU by its index; None: the CPU. ValueError."""
    if gradients not in GRADIENTS:
        raise ValueError(f"linear: gradients is {gradients!r}, expected one of {', '.join(GRADIENTS)}")
    values, wide = (_FP8[name] for name in (GRADIENTS[::-1] if index is None else _of_gpu(index)))
    return values, wide if gradients == "e5m2" else values


class Scaled(NamedTuple):
    """A tensor in fp8 [N, C], its codes transposed [C, N], where they were wanted; scale and inverses."""

    codes: Tensor | None
    transposed: Tensor | None
    scale: Tensor | None  # by row: None
    inverse: Tensor
    inverse_transposed: Tensor


def _own_scale(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """scale and inverse of x [N, C] from its largest value; 1 where that is 0, infinite or NaN."""
    exact = {"dtype": torch.float32, "device": x.device}
    scale, inverse, amax = torch.ones(1, **exact), torch.ones(1, 4, **exact), torch.zeros(1, **exact)
    _ops.quantize.out(amax, None, x, scale, out=None, transposed=None)
    _ops.update_scales(scale, inverse, amax, None, torch.full((1,), torch.finfo(dtype).max, **exact), None)
    return scale, inverse


def codes(
    x: Tensor, dtype: torch.dtype, scale: Tensor, rows: bool, transposed: bool, amax: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """(codes of x · scale [N, C], transposed codes [C, N]), None if not wanted. amax: at least max |x|."""
    out = x.new_empty(x.shape, dtype=dtype) if rows else None
    turned = x.new_empty(x.shape[::-1], dtype=dtype) if transposed else None
    _ops.quantize.out(amax, None, x, scale, out=out, transposed=turned)
    return out, turned


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    role: int,
    scale: Tensor | None,
    inverse: Tensor | None,
    amax: Tensor | None,
    rows: bool = True,
    transposed: bool = True,
    by_row: bool = False,
) -> Scaled:
    """x [N, C] by the scale of its role (0 input, 1 weight, 2 gradient of the output), or its own where there
    is none. scale [3], inverse [3, 4], amax [3]: a layer's of DelayedScaling. by_row: by a scale per row.
    """
    if by_row:
        return quantize_by_row(x, dtype, rows, transposed)
    at = slice(role, role + 1)
    own = _own_scale(x, dtype) if scale is None or inverse is None else (scale[at], inverse[at])
    largest = None if amax is None else amax[at]
    return Scaled(*codes(x, dtype, own[0], rows, transposed, largest), *own, own[1])


def quantize_by_row(x: Tensor, dtype: torch.dtype, rows: bool = True, transposed: bool = True) -> Scaled:
    """x [N, C] with a scale per row, and transposed with a scale per column."""
    out = x.new_empty(x.shape, dtype=dtype) if rows else None
    turned = x.new_empty(x.shape[::-1], dtype=dtype) if transposed else None
    inverse, inverse_turned = (x.new_empty(n, dtype=torch.float32) for n in x.shape)
    results = {"out": out, "transposed": turned, "inverse": inverse, "inverse_transposed": inverse_turned}
    _ops.quantize_rows.out(None, x, torch.finfo(dtype).max, **results)
    return Scaled(out, turned, None, inverse, inverse_turned)


def product(a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast=False):
    """a [N, C] times b [K, C] transposed, of codes -> [N, K]. Inverses: [1, 4] of both, or [N] and [K]. fast:
    fewer bits between instructions, where the device has that.
    """
    out = a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
    if a_inverse.dim() == 1:
        _ops.scaled_matmul_rows.out(a, b, a_inverse, b_inverse, None, False, int(fast), out=out)
        return out
    inverses = a_inverse.view(-1)[:1], b_inverse.view(-1)[:1]
    _ops.scaled_matmul.out(a, b, *inverses, None, False, int(fast), out=out)
    return out


class Delayed(NamedTuple):
    """A layer's part of DelayedScaling, as linear() takes it."""

    scaling: "DelayedScaling"
    layer: int


class DelayedScaling:
    """Scales of fp8 from the largest values of the step before: of any number of linear layers, in one table,
    so that one kernel makes all of the next step's.

        scaling = DelayedScaling(len(layers), device="cuda")
        y = linear(x, weight, scaling[k])     # of the k-th layer, wherever it is called
        optimizer.step(); scaling.update()

    The first step has tensors' own scales, as recipe "tensor". All calls between two updates count, of all
    processes of the group; passes without gradients do not. A layer whose largest value is 0, infinite or NaN
    keeps its scales.
    """

    def __init__(
        self, layers: int, gradients: str = "e5m2", device: torch.device | str | None = None, group=None
    ):
        """gradients: "e5m2" or "e4m3", the type of outputs' gradients; group: of torch.distributed, None for
        all processes where it is initialized.
        """
        place = torch.empty(0, device=device).device
        index = None
        if place.type == "cuda":
            index = torch.cuda.current_device() if place.index is None else place.index
        values, of_gradients = types(index, gradients)
        limits = [torch.finfo(dtype).max for dtype in (values, values, of_gradients)]
        exact = {"dtype": torch.float32, "device": place}
        self.gradients, self.group = gradients, group
        self.calibrated = False  # whether scales have been measured or loaded
        self.scale = torch.ones(layers, 3, **exact)  # of the input, the weight, the gradient of the output
        self.inverse = torch.ones(layers, 3, 4, **exact)
        self.amax = torch.zeros(layers, 3, **exact)
        self.largest = torch.zeros(layers, 3, **exact)  # of the last update; 0: it had none
        self.limit = torch.tensor(limits, **exact).repeat(layers)
        # A compiled function with dynamic shapes would take these sizes for dynamic, too, although they never
        # change, and in PyTorch 2.11 it would lose what a layer writes to its part of amax.
        for table in (self.scale, self.inverse, self.amax):
            torch._dynamo.mark_static(table)

    def __len__(self) -> int:
        return self.scale.shape[0]

    def __getitem__(self, layer: int) -> Delayed:
        if not 0 <= layer < len(self):
            raise IndexError(f"DelayedScaling: layer {layer}, expected one below {len(self)}")
        return Delayed(self, layer)

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step: the next step's scales. All processes of the group call it."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.amax, dist.ReduceOp.MAX, self.group)
        self._make_scales()
        self.calibrated = True

    def _make_scales(self) -> None:
        scale, amax, largest = (t.view(-1) for t in (self.scale, self.amax, self.largest))
        _ops.update_scales(scale, self.inverse.view(-1, 4), amax, largest, self.limit, None)

    def state_dict(self) -> dict[str, Tensor]:
        """{"scale", "amax": float32 [layers, 3]} after an update, else {}: what a resumed run needs, also one
        with another type of gradients.
        """
        return {"scale": self.scale.clone(), "amax": self.largest.clone()} if self.calibrated else {}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads a result of state_dict(). ValueError: it has another number of layers."""
        if "scale" not in state:
            self.calibrated = False
            return
        for name, t in state.items():
            if t.shape != self.scale.shape:
                expected, found = list(self.scale.shape), list(t.shape)
                raise ValueError(f"DelayedScaling: {name} has shape {found}, expected {expected}")
        self.scale.copy_(state["scale"])
        self.inverse[..., 0] = 1 / self.scale
        self.amax.zero_()
        self.largest.copy_(state.get("amax", torch.zeros_like(self.scale)))  # earlier versions have none
        self._make_scales()
        self.calibrated = True
