"""SIGKILL at any moment of a run, then --resume auto; the history is that of a run that was never killed.

A third of the kills comes at a random time, a third while a checkpoint's temporary folder is there, a third
instead of a random call of the file system. Half of the histories write their checkpoints while they train.
"""

import random
import time
from pathlib import Path

from common import Case, Reference, Run, Totals, events, expect, kill_histories, last_step, main, newest, poll
from faults_library import FaultsLibrary

KILLS = 10  # per case


def is_inside_a_save(run: Run) -> bool:
    """Whether the kill left what only an unfinished save has: a temporary folder, or one to be removed."""
    steps = [path for path in run.out.glob("step_*")]
    return any(run.out.glob(".step_*")) or len(steps) > run.keep


def wait_for_a_save(run: Run, rng: random.Random, seconds: float) -> None:
    """Until a temporary folder appears after some random time, and some time more."""
    time.sleep(rng.uniform(0, 0.8 * seconds))
    for _ in poll(time.monotonic() + seconds):
        if any(run.out.glob(".step_*.tmp")):
            break
    time.sleep(rng.uniform(0, 0.1 * seconds / (run.steps / run.every)))


def expect_nothing_lost(run: Run, before: int, saves: str) -> None:
    """That every checkpoint that the log promises is there."""
    run.expect_all_good()
    found, logged = newest(run.out), last_step(run.out)
    due = (logged - 1) // run.every * run.every  # a step is logged when the save before it is done
    if saves == "on":  # or begun: then the one before that is done
        due -= run.every
    expect(found >= max(before, due), "the newest checkpoint is of step", found, "behind", max(before, due))
    written = [e["step"] for e in events(run.out) if e["event"] == "checkpoint"]
    expect(found >= max(written, default=0), "the log has a checkpoint of step", max(written, default=0))


def expect_resumed(run: Run, step: int) -> None:
    """That a restart, as far as it came, took the newest checkpoint."""
    lines = [line for line in run.said().splitlines() if line.startswith("resuming from ")]
    if lines and step:
        expect(lines[0].endswith(f"step_{step:06d}"), "expected to resume step", step, "found", lines)


def was_killed(run: Run, code: int, saves: str, before: int, totals: Totals) -> bool:
    """Whether a kill ended the run, which is checked."""
    expect_resumed(run, before)
    if code == 0:
        return False
    expect(code in (-9, 137), "blocked restart: exit code", code, run.errors()[-3:])
    totals.count("inside a save", is_inside_a_save(run))
    expect_nothing_lost(run, before, saves)
    return True


def prepare(folder: Path) -> Case:
    reference = Reference(folder)
    library = FaultsLibrary(folder)
    calls = sum(reference.count_calls(reference.copy(folder / "counted"), library).values())

    def case(own: Path, rng: random.Random, totals: Totals) -> None:
        def kill(run: Run, saves: str, before: int) -> bool:
            kind = rng.choice(["time", "save", "call"])
            environment = {}
            if kind == "call":
                environment = library.environment(run.folder, "any", rng.randint(1, calls), "kill")
            flags = ("--resume", "auto", "--checkpoint-async", saves)
            process = run.start(*flags, environment=environment)
            if kind == "time":
                time.sleep(rng.uniform(0, 1.1 * reference.seconds))
            if kind == "save":
                wait_for_a_save(run, rng, reference.seconds)
            if kind != "call":
                process.kill()
            code = run.wait(process)
            return was_killed(run, code, saves, before, totals)

        kill_histories(reference, own, rng, totals, KILLS, kill)

    return case


if __name__ == "__main__":
    main(prepare, "kills", KILLS)
