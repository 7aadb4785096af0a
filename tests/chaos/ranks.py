"""SIGKILL of a rank, or of the process that started the ranks, at any moment; then --resume auto.

Half of the cases are runs of two data-parallel ranks, half of --tp 2 and --pp 2. Half of the kills come at a
random time, half while the temporary folder of a checkpoint is there. All processes must end; the history is
that of a run that was never killed. Half of the histories write checkpoints while training goes on.
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
FLAGS = {"batch-size": 1, "collective-timeout": TIMEOUT}
DATA = {"devices": 2, "zero": 2}
# With four micro-batches of four tokens.
MESH = {"devices": 4, "tp": 2, "pp": 2, "total-batch-size": 16}
TWO_OF_EACH = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}


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


def kill_one(process: subprocess.Popen, devices: int, rng: random.Random) -> tuple[str, list[int]]:
    """Which one was killed, and the ranks."""
    ranks = ranks_of(process)
    rank = rng.choice([*range(devices), *range(devices), None])
    of_ranks = rank is not None and len(ranks) == devices
    killed = f"rank {rank}" if of_ranks else "the process that started them"
    pid = ranks[rank] if of_ranks else process.pid
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, signal.SIGKILL)
    return killed, ranks


def prepare(folder: Path) -> Case:
    references = {}
    for name, changes, flags in (("data", {}, DATA), ("mesh", TWO_OF_EACH, MESH)):
        references[name] = Reference(folder / name, changes, **FLAGS, **flags)

    def case(own: Path, rng: random.Random, totals: Totals) -> None:
        name = rng.choice(["data", "mesh"])
        reference, devices = references[name], references[name].flags["devices"]

        def kill(run: Run, saves: str, before: int) -> bool:
            process = run.start("--resume", "auto", "--checkpoint-async", saves)
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, 1.1 * reference.seconds))
            else:
                wait_for_a_save(run, rng, reference.seconds)
            killed, ranks = kill_one(process, devices, rng)
            code = run.wait(process)
            for _ in poll(time.monotonic() + 2):
                if not any(map(runs, ranks)):
                    break
            expect(not any(map(runs, ranks)), "ranks that still run:", [pid for pid in ranks if runs(pid)])
            totals.count(f"of {killed}", code != 0)
            totals.count(f"in runs of {name}", code != 0)
            return was_killed(run, code, saves, before, totals)

        kill_histories(reference, own, rng, totals, KILLS, kill)

    return case


if __name__ == "__main__":
    probe = [PROGRAM, "--devices", "2", "--train-data", "none.bin", "--out", "/dev/null/out"]
    if "built without Gloo" in subprocess.run(probe, capture_output=True, text=True).stderr:
        sys.exit(print("ranks: skipped: the program was built without Gloo"))
    main(prepare, "kills", KILLS)
