"""The reference tensors of the test models, with which tests compare the C program."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import llamac.base.random
from llamac.data.tokens import IGNORED, find_documents
from llamac.model import hf
from llamac.model.config import Config, load_config
from llamac.training import fp8
from llamac.training.options import Options
from llamac.training.ranks import DTYPES
from llamac.training.weights import fuse_products, init_weights, load_weights, save_model

B, T = 2, 33


def load(model: Any, directory: Path, o: Options) -> Any:
    """The model with the weights of a directory, its products as the flags want them."""
    load_weights(model, directory)
    if o.matmul_dtype == "fp8":
        fuse_products(model)
        fp8.use_products(model, o)
    return model


def suffix(o: Options) -> str:
    """Of the folders' names, by the flags of the matrix products and document masks; none by default."""
    names = ("matmul_dtype", "fp8_recipe", "fp8_gradients", "fp8_keep_first", "fp8_keep_last")
    masked = ".documents" if o.document_mask == "on" else ""
    if o.matmul_dtype == Options().matmul_dtype:
        return masked
    head = "-head" if o.fp8_head == "on" else ""
    return "." + "-".join(str(getattr(o, name)) for name in names) + head + masked


def masks(tokens: np.ndarray, o: Options) -> list[np.ndarray]:
    """With --document-mask on: where each token's document begins. Puts ends of documents, 0, into them."""
    if o.document_mask == "off":
        return []
    tokens[0, [0, 4, 20]] = tokens[1, -1] = 0
    return [find_documents(tokens, (None, 0))]


def write_reference(
    config: Config,
    dtype: torch.dtype,
    directory: Path,
    empty_model: Callable,
    debug_state: Callable,
    settings: dict,
    o: Options,
    seed: int = 1,
) -> None:
    """One model's reference: a Hugging Face directory; debug_state.safetensors in dtype; truth.safetensors,
    the same in double arithmetic from the same, already rounded, weights. The files note the settings.
    """
    model = empty_model(config, dtype)
    init_weights(model, seed)
    for k, weight in enumerate(model.parameters()):
        if weight.dim() == 1:  # norm weights other than 1: one that is forgotten or swapped must show
            noise = torch.from_numpy(llamac.base.random.normal(seed, 0, 4 * k, weight.numel()))
            weight.data += 0.2 * noise
    save_model(model, directory, dtype)
    ids = np.random.default_rng(seed).integers(config.vocab_size, size=(2, B, T))
    if config.is_encoder:  # as of masked tokens
        ids[1][np.random.default_rng(seed + 1).random((B, T)) > 0.4] = IGNORED
    batch = [torch.from_numpy(x) for x in (*ids, *masks(ids[0], o))]
    metadata = {name: repr(x) for name, x in settings.items()}
    for file, precision in (("debug_state", dtype), ("truth", torch.float64)):
        state = debug_state(directory, precision, [batch], o, dtype == torch.float16)
        hf.write_ordered(directory / f"{file}.safetensors", state, metadata)


def write_references(
    models: Path, root: Path, empty_model: Callable, debug_state: Callable, settings: dict, o: Options
) -> None:
    """Every model of a folder of configurations, in each dtype, at root/MODEL/DTYPE + suffix()."""
    torch.use_deterministic_algorithms(True)
    for file in sorted(models.glob("*.json")):
        for name, dtype in DTYPES.items():
            if dtype == torch.float16 and suffix(o):  # fp8's operations do not take it
                continue
            started = time.perf_counter()
            directory = root / file.stem / (name + suffix(o))
            write_reference(load_config(file), dtype, directory, empty_model, debug_state, settings, o)
            size = sum(f.stat().st_size for f in directory.iterdir()) / 2**20
            print(f"{directory}  {size:.1f} MiB  {time.perf_counter() - started:.2f} s", flush=True)
