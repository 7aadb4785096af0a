"""Two starts with one --out, at random offsets: one trains, the other ends in one line that names the owner.



Then the owner is killed, and a third start must not find its lock.
"""

import random
import shutil
import subprocess
import time
from pathlib import Path

from common import Case, Failure, Reference, Run, Totals, expect, history, main, poll

SECONDS = 900  # Python's start takes long on a busy machine
LONG = {"steps": 1000000, "schedule": "constant", "val_every": 0, "checkpoint_every": 50}


def wait_for_steps(run: Run, process: subprocess.Popen, steps: int) -> None:
    for _ in poll(time.monotonic() + SECONDS, pause=5e-3):
        log = run.out / "log.jsonl"
        if log.exists() and log.read_bytes().count(b'"event":"step"') >= steps:
            return
        expect(process.poll() is None, "the owner ended: exit code", process.returncode)
    raise Failure("the owner does not train")


def loser_of(processes: list[subprocess.Popen]) -> int:
    """The index of the first one that ends."""
    for _ in poll(time.monotonic() + SECONDS, pause=5e-3):
        for i, process in enumerate(processes):
            if process.poll() is not None:
                return i
    raise Failure(f"neither start ended within {SECONDS} s")


def prepare(folder: Path) -> Case:
    short = Reference(folder)  # for its input
    template = Run(short.template, **LONG)
    first = Run(shutil.copytree(short.template, folder / "long"), **LONG)
    process = first.start()
    wait_for_steps(first, process, 400)
    process.kill()
    first.wait(process)
    truth = [entry for entry in history(first.out) if entry[0] == "step"]

    def check_log(run: Run) -> None:
        """One process's steps, in order, as a run that was alone has them."""
        found = [entry for entry in history(run.out) if entry[0] == "step"]
        expect([e[1] for e in found] == list(range(1, len(found) + 1)), "steps of two processes in the log")
        expect(found[: len(truth)] == truth[: len(found)], "the log differs from that of a run alone")

    def case(own: Path, rng: random.Random, totals: Totals) -> None:
        shutil.copytree(template.folder, own, dirs_exist_ok=True)
        run = Run(own, **LONG)
        if rng.random() < 0.5:  # an earlier run's, which must go on or be moved aside once
            shutil.copytree(first.out, run.out)
        starts = [["--resume", rng.choice(["auto", "none"])] for _ in range(2)]
        offset = rng.choice([0, rng.uniform(0, 0.05), rng.uniform(0, 2 * short.seconds)])
        processes = []
        try:
            for i, flags in enumerate(starts):
                processes.append(run.start(*flags, label=str(i)))
                time.sleep(offset if i == 0 else 0)
            loser = loser_of(processes)
            owner = processes[1 - loser]
            errors = run.errors(str(loser))
            totals.count("starts", 2)
            expect(processes[loser].returncode == 2, "exit code", processes[loser].returncode, errors[-3:])
            expect(len(errors) == 1 and f"process {owner.pid} on " in errors[0], "expected the owner", errors)
            wait_for_steps(run, owner, 3)
            totals.count("by the second start", loser == 0)
            owner.kill()
            owner.wait()
            check_log(run)
            processes.append(run.start("--resume", "none", label="2"))
            for _ in poll(time.monotonic() + SECONDS, pause=5e-3):
                expect(processes[2].poll() is None, "blocked restart:", run.errors("2"))
                if f"/{LONG['steps']} " in run.said("2"):  # the line of a step
                    break
            expect(processes[2].poll() is None, "blocked restart:", run.errors("2"))
        finally:
            for process in processes:
                process.kill()
                process.wait()

    return case


if __name__ == "__main__":
    main(prepare, "starts", 2)
