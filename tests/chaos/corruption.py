"""Damaged files: no damage of a checkpoint is accepted, and a restart goes on from the newest good one.

Other files have no checksum: a run goes on or ends in one line; what it computes again has the right bits.
"""

import random
import shutil
import sys
from pathlib import Path

from common import Case, Reference, Run, Totals, checkpoints, expect, history, is_good, main, newest
from faults_library import FaultsLibrary

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from damaged import damaged

CHECKPOINT = ["manifest.json", "config.json", "model.safetensors", "optimizer.safetensors"]
# Files beside the run's checkpoints, and how often they are chosen.
OTHERS = {"out/log.jsonl": 8, "train_000.bin": 3, "val_000.bin": 2, "model/config.json": 4, "gemm.json": 3}
CHOICES = {"checkpoint": 80, **OTHERS}


def damage(path: Path, rng: random.Random, beside: list[Path]) -> str:
    """Change a file, delete it, or replace it by one of the same name beside it; says which."""
    before = after = path.read_bytes()
    while after == before:
        kind = rng.choice(["changed"] * 7 + ["deleted", "another's"])
        if kind == "deleted":
            path.unlink()
            return f"{path.name}: {kind}"
        other = kind == "another's" and beside
        after = rng.choice(beside).read_bytes() if other else damaged(rng, before)
    path.write_bytes(after)
    return f"{path.name}: {kind}"


def check_checkpoints(reference: Reference, run: Run, rng: random.Random, totals: Totals) -> None:
    """Damage of the newest checkpoint, of some, or of all."""
    found = checkpoints(run.out)
    steps = sorted(found, reverse=True)
    bad = steps[: rng.choice([1, 1, 1, 1, 1, 1, 2, 2, 2, len(steps)])]
    for step in bad:
        for name in rng.sample(CHECKPOINT, rng.choice([1, 1, 1, 2])):
            beside = [
                path / name for other, path in found.items() if other != step and (path / name).exists()
            ]
            what = damage(found[step] / name, rng, beside)
            totals.count("damaged files")
            totals.count("of them in checkpoints")
            expect(not is_good(found[step]), what, "is no damage")
    if rng.random() < 0.2:  # who names a checkpoint gets this one or none
        log = (run.out / "log.jsonl").read_bytes()
        run.expect_one_line(run.run("--resume", str(found[bad[-1]])))
        expect((run.out / "log.jsonl").read_bytes() == log, "a refused run changed the log")
        totals.count("refused by name")
    code = run.run("--resume", "auto")
    if bad == steps:
        run.expect_one_line(code)
        totals.count("refused: no good checkpoint")
        return
    good = max(set(steps) - set(bad))
    expect(code == 0, "blocked restart: exit code", code, run.errors()[-3:])
    resumed = [line for line in run.said().splitlines() if line.startswith("resuming from ")]
    expect(len(resumed) == 1 and resumed[0].endswith(f"step_{good:06d}"), "silent acceptance:", resumed)
    kept = sorted(path.name for path in run.out.glob("damaged_*"))
    expect(kept == sorted(f"damaged_step_{step:06d}" for step in bad), "expected", bad, "kept, found", kept)
    reference.expect_same(run)


def check_other(reference: Reference, run: Run, name: str, rng: random.Random, totals: Totals) -> None:
    step = newest(run.out)
    what = damage(run.folder / name, rng, list(run.folder.glob("train_*.bin")) if ".bin" in name else [])
    totals.count("damaged files")
    code = run.run("--resume", "auto")
    totals.count(f"{Path(name).name} refused", code != 0)
    if name == "out/log.jsonl":
        expect(code == 0, what, "blocked restart: exit code", code, run.errors()[-3:])
        after = history(run.out, last_start=True)  # lines before it may have other numbers, or names, now
        healed = after == [entry for entry in reference.history if entry[1] > step]
        expect(healed, what, "the log is not healed")
    elif code != 0:
        run.expect_one_line(code)
    elif not name.endswith(".bin"):  # another token is as good as the first one
        reference.expect_same(run)


def prepare(folder: Path) -> Case:
    reference = Reference(folder, keep_checkpoints=3)
    library = FaultsLibrary(folder)
    half = reference.copy(folder / "half")
    code = half.run(environment=library.environment(half.folder, "rename", 50, "kill"))
    expect(
        code == -9 and len(checkpoints(half.out)) >= 3, "expected a killed run, found", code, half.errors()
    )

    def case(own: Path, rng: random.Random, totals: Totals) -> None:
        run = reference.copy(own)
        shutil.copytree(half.out, run.out)
        (own / "gemm.json").write_text('{"device": "D", "library": "L", "choices": {}}\n')
        name = rng.choices(list(CHOICES), list(CHOICES.values()))[0]
        if name == "checkpoint":
            check_checkpoints(reference, run, rng, totals)
        else:
            check_other(reference, run, name, rng, totals)

    return case


if __name__ == "__main__":
    main(prepare, "damaged files")
