"""What the tests of meshes share: configurations of models, and comparisons with runs of one rank."""

import json
import sys
from pathlib import Path

import numpy as np
from launch import as_ranks
from run import PRECISIONS, ROOT, T, V, assert_same_state, events, flags, losses, numbers, one_line, tensors

from llamac.data import write_bin
from llamac.data.tokens import BEGINS_DOCUMENT, NO_TARGET

SHORT = {"val_every": 0, "val_data": "none", "checkpoint_every": 0}
BERT = {"devices": 2, "model": ROOT / "tests/models/bert.json", "mask_token": 4}


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


# In what follows, make_flags gives the flags of a run, from its folder and more flags.


def compare_levels(train, folder: Path, make_flags, levels: tuple[int, ...] = (0, 1, 2, 3, 3)) -> None:
    """The same bits, in bf16 rounded at random, with verified steps; a level of ZeRO twice: another run."""
    more = {"verify_every": 2, "steps": 4} | PRECISIONS["bf16-throughout"] | SHORT
    for number, level in enumerate(levels):
        out = folder / str(number)
        train(*make_flags(out, **more | {"zero": level}))
        assert numbers(out) == numbers(folder / "0")
        assert_same_state(out / "step_000004", folder / "0/step_000004")


def compare_rounded(train, folder: Path, make_flags, mesh: dict, alone: dict) -> None:
    """Losses in narrow types."""
    for out, of in (("alone", alone), ("mesh", mesh)):
        train(*make_flags(folder / out, **SHORT | of))
    np.testing.assert_allclose(losses(folder / "mesh"), losses(folder / "alone"), rtol=4e-3)


def compare_adapters(train, folder: Path, make_flags, mesh: dict, alone: dict) -> None:
    """Those of every linear: the losses of one rank, in f32; and a checkpoint for either."""
    more, runs = SHORT | {"lora": 4}, {"alone": alone, "mesh": mesh}
    for out, of in runs.items():
        train(*make_flags(folder / out, **more | of | {"checkpoint_every": 4}))
    compare(folder / "mesh", folder / "alone")
    names = [tensors(folder / out / "step_000004", "adapter_model").keys() for out in runs]
    assert names[0] == names[1]
    for of, other in (("alone", mesh), ("mesh", alone)):
        resume = {"resume": folder / of / "step_000004"}
        train(*make_flags(folder / f"from_{of}", **more | other | resume))
        np.testing.assert_allclose(losses(folder / f"from_{of}"), losses(folder / of)[4:], rtol=2e-6)


def compare_first_weights(train, folder: Path, make_flags, mesh: dict, alone: dict) -> None:
    """Random numbers are those of whole tensors."""
    more = {"steps": 1, "lr": 1e-30, "weight_decay": 0} | SHORT
    for out, of in (("alone", alone), ("mesh", mesh)):
        train(*make_flags(folder / out, **more | of))
    found, expected = (tensors(folder / f"{out}/step_000001", "model") for out in ("mesh", "alone"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-29, err_msg=key)  # biases were 0


SAVE_AGAIN = """
import json, sys, llamac
trainer = llamac.Trainer(sys.argv[1], batch_size=1, **json.loads(sys.argv[2]))
trainer.save(sys.argv[3])
"""


def resume_on_another_mesh(train, folder: Path, make_flags, before: dict, after: dict, first: dict) -> None:
    """The state has the same bits, and the run goes on. first: flags of the run before."""
    more = {"total_batch_size": 4 * T, "batch_size": 1, "dtype": "bf16", "val_steps": 4}
    train(*make_flags(folder / "a", **more | before | first))
    checkpoint = folder / "a/step_000004"
    mesh = json.dumps({key: value for key, value in after.items() if key != "devices"})
    command = [sys.executable, "-c", SAVE_AGAIN, checkpoint, mesh, folder / "again"]
    for code, text in as_ranks(command, after["devices"]):
        assert code == 0, text
    assert_same_state(folder / "again", checkpoint)
    train(*make_flags(folder / "b", **more | after | {"resume": checkpoint}))
    np.testing.assert_allclose(losses(folder / "b"), losses(folder / "a")[4:], rtol=4e-3)


def compare_validation(train, folder: Path, make_flags, mesh: dict, alone: dict) -> None:
    """Validation of three batches on two data-parallel ranks, and samples, are those of one rank."""
    more = {"steps": 2, "total_batch_size": 4 * T, "val_steps": 3, "sample_every": 2}
    for out, of in (("alone", alone), ("mesh", mesh)):
        train(*make_flags(folder / out, **more | of | {"batch_size": 2}))
    found, expected = (events(folder / out, "val") for out in ("mesh", "alone"))
    assert len(found) == len(expected) == 2
    np.testing.assert_allclose([e["loss"] for e in found], [e["loss"] for e in expected], rtol=2e-6)
    assert events(folder / "mesh", "sample") == events(folder / "alone", "sample")


def check_refusal(train, data: Path, folder: Path, more: dict, expected: str) -> None:
    assert expected in one_line(train(*flags(data, folder / "out", **more), code=2))
    assert not (folder / "out").exists()
