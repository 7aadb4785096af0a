"""What the tests of meshes share: configurations of models, and comparisons with runs of one rank."""

import json
from pathlib import Path

import numpy as np
from run import ROOT, T, V, losses, numbers, tensors

from llamac.data import write_bin
from llamac.data.tokens import BEGINS_DOCUMENT, NO_TARGET


def write_model(folder: Path, changes: dict[str, dict], name: str) -> dict:
    """The flag of a model of tests/models, the first word of `name`, with the changes of that name."""
    config = json.loads((ROOT / f"tests/models/{name.split()[0]}.json").read_text()) | changes.get(name, {})
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return {"model": path}


def write_packed(folder: Path) -> dict:
    """Flags of runs on packed documents of any length, of whose targets a third does not count."""
    rng = np.random.default_rng(2)
    words = (np.cumsum(rng.choice([1, 2, 5], 60 * T + 1)) % V).astype(np.uint32)
    words[rng.random(len(words)) < 0.3] |= NO_TARGET
    words[rng.random(len(words)) < 0.2] |= NO_TARGET | BEGINS_DOCUMENT
    write_bin(folder / "train_000.bin", words, V, packed=T)
    return {"train_data": folder / "train_000.bin", "document_mask": "on"}


def compare(a: Path, b: Path) -> None:
    """Losses and other numbers of two runs in f32."""
    np.testing.assert_allclose(losses(a), losses(b), rtol=2e-6)
    np.testing.assert_allclose(numbers(a), numbers(b), rtol=2e-5)


def compare_numbers_of_one_rank(train, folder: Path, make_flags, mesh: dict, alone: dict) -> None:
    """Of 20 steps on a mesh and without one; and the first gradients by the first moments, tensor by tensor.
    make_flags: the flags of a run, from its folder and more flags.
    """
    for out, of in (("alone", alone), ("mesh", mesh)):
        train(*make_flags(folder / out, **of | {"steps": 20}))
        train(*make_flags(folder / f"{out}1", **of | {"steps": 1, "warmup_steps": 0}))
    compare(folder / "mesh", folder / "alone")
    found, expected = (tensors(folder / f"{of}1/step_000001", "optimizer") for of in ("mesh", "alone"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key.startswith("m."):
            scale = np.abs(value).max()
            np.testing.assert_allclose(found[key], value, rtol=0, atol=2e-6 * scale, err_msg=key)
