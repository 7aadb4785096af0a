"""A system call on the run's files fails, once or from then on; the run goes on or ends in one line, and a restart works.

Every second run is a resume, so that the calls of reading a checkpoint fail, too.
"""

import errno
import random
import shutil
from pathlib import Path

from common import Case, Reference, Run, Totals, checkpoints, expect, is_good, main
from faults_library import FaultsLibrary

ANY = ["EIO", "EINTR"]
ERRORS = {
    "open": [*ANY, "EMFILE", "ENFILE", "EACCES", "ENOSPC"],
    "read": ANY,
    "write": [*ANY, "ENOSPC", "EDQUOT", "EFBIG", "short"],
    "fsync": [*ANY, "ENOSPC"],
    "close": [*ANY, "ENOSPC"],
    "rename": ["EIO", "ENOSPC", "EACCES", "EXDEV"],
    "mkdir": ["EIO", "ENOSPC", "EMLINK"],
    "unlink": ["EIO", "EBUSY", "EROFS"],
    "mmap": ["ENOMEM", "EAGAIN", "ENODEV"],
    "stat": ["EIO", "EACCES", "ENOMEM"],
    "list": ["EIO"],
    "lock": [*ANY, "ENOLCK"],
}
HALF = 12  # steps of the run that is resumed


def half_done(reference: Reference, folder: Path) -> Run:
    """A run that was killed after HALF steps; the log goes on behind its newest checkpoint."""
    run = reference.copy(folder)
    library = FaultsLibrary(folder)
    # The first call behind the last checkpoint that is wanted is the log's line of it.
    for at in range(1, 10000):
        code = run.run("--resume", "auto", environment=library.environment(run, "rename", at, "kill"))
        expect(code == -9, "expected a killed run, found exit code", code, run.errors())
        if max(checkpoints(run.out), default=0) >= HALF:
            return run
    raise AssertionError


def prepare(folder: Path) -> Case:
    reference = Reference(folder)
    library = FaultsLibrary(folder)
    halves = half_done(reference, folder / "half")
    counts = [
        library.count(reference, reference.copy(folder / "counted")),
        library.count(
            reference, Run(shutil.copytree(halves.folder, folder / "counted_half"), **reference.flags)
        ),
    ]

    def case(own: Path, rng: random.Random, totals: Totals) -> None:
        resumes = rng.random() < 0.5
        run = reference.copy(own)
        if resumes:
            shutil.copytree(halves.out, run.out)
        kind = rng.choice(sorted(counts[resumes]))
        # Half of the calls are those of the start, which are other code than those of the steps.
        at = rng.randint(1, counts[resumes][kind] if rng.random() < 0.5 else min(40, counts[resumes][kind]))
        action, on = rng.choice(ERRORS[kind]), rng.choice(["once", "on"])
        number = action if action == "short" else str(getattr(errno, action))
        before = {path: is_good(path) for path in checkpoints(run.out).values()}
        environment = library.environment(run, kind, at, number, "once" if action == "EINTR" else on)
        code = run.run("--resume", "auto", environment=environment)
        totals.count("faults")
        fault = f"{kind} {at} of {counts[resumes][kind]}: {action} {on}:"
        try:
            if code == 0:
                totals.count("runs that went on")
                reference.expect_same(run)
            else:
                run.expect_one_line(code)
                run.expect_all_good()
            expect(all(before.values()), "the cases' own checkpoints are bad")
            reference.finish(run)
        except Exception as error:
            raise type(error)(f"{fault} {error}") from None

    return case


if __name__ == "__main__":
    main(prepare, "faults")
