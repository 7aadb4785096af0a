"""What the C model computes, tensor by tensor, and its comparison with the reference model."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import train_llama3 as ref
from llamac.base.tolerance import BACKWARD, FORWARD, Error, error_of, violation_of
from llamac.training import references
from llamac.training.options import Options

EPSILON = 1e-5  # of the norms of all models
MODELS_FOLDER = Path(__file__).parent / "models"
MODELS = sorted(path.stem for path in MODELS_FOLDER.glob("*.json"))


def run_model(build: Path, reference: Path, out: Path, dtype: str, *arguments: str) -> dict[str, np.ndarray]:
    """What the C model computes, by name, in the order of computation."""
    subprocess.run([build / "debug_state", reference, out, dtype, *arguments], check=True)
    raw = out.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    tensors = load_file(out)
    names = sorted(header, key=lambda name: header[name]["data_offsets"])
    return {name: tensors[name].double().numpy().ravel() for name in names}


def load(file: Path) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy().ravel() for name, tensor in load_file(file).items()}


def write_states(
    folder: Path, model: str, changes: dict, dtype: str, documents: bool, length: int = references.T
) -> tuple[dict, dict]:
    """PyTorch's tensors and float64's of a test model with changes, of two updates, written to the folder."""
    config = replace(ref.load_config(MODELS_FOLDER / f"{model}.json"), **changes)
    settings = {"lr": ref.LR, **ref.OPTIMIZER, "grad_clip": ref.GRAD_CLIP}
    options = Options(document_mask="on" if documents else "off")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references, "T", length)
        patch.setattr(ref, "UPDATES", 2)
        made = ref.empty_model, ref.debug_state, settings, options
        references.write_reference(config, ref.DTYPES[dtype], folder, *made)
    return load(folder / "debug_state.safetensors"), load(folder / "truth.safetensors")


def normalized_rows(name: str, tensors: dict) -> np.ndarray:
    """The rows [N,C], of one of `tensors`, whose rstd or mean has that name."""
    layer = int(name.split(".")[1])
    before = f"act.{layer - 1}.residual_out" if layer else "act.embedding"
    x = f"act.{layer}.residual_mid" if ".post_" in name else before
    if name.endswith("_out_rstd"):
        x = name.removesuffix("_rstd")
    return tensors[x].reshape(len(tensors[name]), -1)


def is_of_layer_norm(name: str, tensors: dict) -> bool:
    return name.replace("_rstd", "_mean") in tensors


def statistics_of(name: str, tensors: dict) -> np.ndarray:
    """The rstd or mean of that name, from the rows that it normalizes, in their type."""
    rows = normalized_rows(name, tensors)
    if name.endswith("_mean"):
        return rows.mean(1)
    if is_of_layer_norm(name, tensors):
        rows = rows - rows.mean(1, keepdims=True)
    return 1 / np.sqrt((rows * rows).mean(1) + rows.dtype.type(EPSILON))


def statistics_in_f32(name: str, tensors: dict) -> np.ndarray:
    """The same in f32, of a layer norm by PyTorch's own operation; none of it returns RMSNorm's rstd."""
    if not is_of_layer_norm(name, tensors):
        return statistics_of(name, {key: x.astype(np.float32) for key, x in tensors.items()})
    rows = torch.from_numpy(normalized_rows(name, tensors)).float()
    _, mean, rstd = torch.native_layer_norm(rows, rows.shape[1:], None, None, EPSILON)
    return (mean if name.endswith("_mean") else rstd).numpy().ravel()


def first_difference(ours: dict, torchs: dict, truth: dict, dtype: str, series: dict[str, Error]) -> str:
    """The first tensor, in the order of computation, that is outside the tolerance; empty if none is.
    series: PyTorch's errors of the ten steps' numbers, relative to the largest.
    """
    for name, found in ours.items():
        if name == "loss":  # one number's error is one draw; its rows' errors within the tolerance bound it
            continue
        backward = name.startswith(("dact.", "grad.", "train."))
        kept_in = (
            "f32"
            if name.startswith(("grad.", "loss", "train.")) or name.endswith(("_rstd", "_mean", "_lse"))
            else dtype
        )
        expected, theirs = truth[name], torchs[name]
        if name.endswith(("_rstd", "_mean")):
            # Of our own rows, whose errors are within the tolerance: the largest error of few is one draw.
            expected, theirs = statistics_of(name, ours), statistics_in_f32(name, ours)
        baseline = error_of(theirs, expected)
        if name in series:
            largest = series[name].largest * np.abs(expected).max()
            wide = series[name]
            baseline = Error(max(baseline.relative_l2, wide.relative_l2), max(baseline.largest, largest))
        factor = BACKWARD if backward else FORWARD
        if wrong := violation_of(found, baseline, expected, kept_in, factor):
            return f"{name}: {wrong}"
    return ""
