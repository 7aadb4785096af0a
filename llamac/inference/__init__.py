"""Inference: text generation on the compiled model, and export to GGUF, which needs no compiled module."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("Inference", "Sampling"):
        from llamac.inference import model

        return getattr(model, name)
    raise AttributeError(f"module 'llamac.inference' has no attribute '{name}'")
