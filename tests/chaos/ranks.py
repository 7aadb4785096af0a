"""SIGKILL of a rank of a run of two, or of the process that started both, at any moment; then --resume auto.

Half of the kills come at a random time, half while a checkpoint's temporary folder is there. All processes
must end; the history is that of a run of two ranks that was never killed. Half of the histories write
checkpoints while training goes on.
"""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from common import PROGRAM, Case, Reference, Run, Totals, expect, kill_histories, main, poll
from kill import wait_for_a_save, was_killed

KILLS = 5  # per case
TIMEOUT = 5  # of a rank that waits for another one
FLAGS = {"devices": 2, "zero": 2, "batch-size": 1, "collective-timeout": TIMEOUT}


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Process ids of the ranks, as far as they have started, in their order."""
    try:
        text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    except OSError:
        return []
    return [int(pid) for pid in text.split()]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill_one(process: subprocess.Popen, rng: random.Random) -> tuple[str, list[int]]:
    """Which one was killed, and the ranks."""
    ranks = ranks_of(process)
    killed = rng.choice(["rank 0", "rank 1", "rank 0", "rank 1", "the process that started them"])
    pid = ranks[int(killed[-1])] if killed[:4] == "rank" and len(ranks) == 2 else process.pid
    if pid == process.pid:
        killed = "the process that started them"
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, signal.SIGKILL)
    return killed, ranks


def prepare(folder: Path) -> Case:
    reference = Reference(folder, **FLAGS)

    def case(own: Path, rng: random.Random, totals: Totals) -> None:
        def kill(run: Run, saves: str, before: int) -> bool:
            process = run.start("--resume", "auto", "--checkpoint-async", saves)
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, 1.1 * reference.seconds))
            else:
                wait_for_a_save(run, rng, reference.seconds)
            killed, ranks = kill_one(process, rng)
            code = run.wait(process)
            for _ in poll(time.monotonic() + 2):
                if not any(map(runs, ranks)):
                    break
            expect(not any(map(runs, ranks)), "ranks that still run:", [pid for pid in ranks if runs(pid)])
            totals.count(f"of {killed}", code != 0)
            return was_killed(run, code, saves, before, totals)

        kill_histories(reference, own, rng, totals, KILLS, kill)

    return case


if __name__ == "__main__":
    probe = [PROGRAM, "--devices", "2", "--train-data", "none.bin", "--out", "/dev/null/out"]
    if "built without Gloo" in subprocess.run(probe, capture_output=True, text=True).stderr:
        sys.exit(print("ranks: skipped: the program was built without Gloo"))
    main(prepare, "kills", KILLS)
