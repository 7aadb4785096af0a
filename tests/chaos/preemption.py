"""A scheduler's signal at any moment of a run: exit code 128 + signal, a checkpoint of the last step.

The run validates and samples; restarted with --resume auto, it ends with the bits of an uninterrupted one.
"""

import random
import signal
import subprocess
import time
from itertools import count
from pathlib import Path

from common import SECONDS, Case, Reference, Run, Totals, expect, last_step, main, newest, poll

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
SIGNALS_PER_CASE = 5


def start_and_wait(run: Run) -> subprocess.Popen:
    """Until the run writes its log. Before, a signal ends it as any program: there is nothing to lose."""
    log = run.out / "log.jsonl"
    before = log.stat().st_size if log.exists() else 0
    process = run.start("--resume", "auto")
    for _ in poll(time.monotonic() + SECONDS):
        if process.poll() is not None or (log.exists() and log.stat().st_size != before):
            break
    return process


def prepare(folder: Path) -> Case:
    # Few checkpoints of its own accord: those that the signals leave count.
    reference = Reference(folder, steps=200, checkpoint_every=50, val_every=3, sample_every=4, val_steps=4)

    def case(own: Path, rng: random.Random, totals: Totals) -> None:
        runs = (reference.copy(own / f"history_{i}") for i in count())
        run, sent = next(runs), 0
        while sent < SIGNALS_PER_CASE:
            number = rng.choice(SIGNALS)
            process = start_and_wait(run)
            time.sleep(rng.uniform(0, reference.seconds))
            process.send_signal(number)
            code = run.wait(process)
            if code == 0:  # it had ended before: another history begins
                reference.expect_same(run)
                run = next(runs)
                continue
            sent += 1
            totals.count("signals")
            totals.count(f"by {number.name}")
            expect(code == 128 + number, "expected exit code", 128 + number, "found", code, run.errors()[-3:])
            expect(not run.errors(), "expected nothing on stderr, found", run.errors()[:3])
            saved, logged = newest(run.out), last_step(run.out)
            expect(saved == logged, "the checkpoint is of step", saved, "the last one in the log", logged)
            run.expect_all_good()
        reference.finish(run)

    return case


if __name__ == "__main__":
    main(prepare, "signals", SIGNALS_PER_CASE)
