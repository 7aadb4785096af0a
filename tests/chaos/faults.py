"""A system call on the run's files fails, once or from then on: the run goes on or ends in one line.

No complete checkpoint is harmed, and a restart without the fault ends with the bits of an uninterrupted run.
Every second run is a resume, so that the calls of reading a checkpoint fail, too.
"""

import errno
import random
import shutil
from pathlib import Path

from common import Case, Reference, Totals, expect, main, newest
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
    "thread": ["EAGAIN"],
}
START = 25  # calls of a kind: about as many as a start makes


def prepare(folder: Path) -> Case:
    reference = Reference(folder)
    library = FaultsLibrary(folder)
    calls = reference.count_calls(reference.copy(folder / "counted"), library)
    half = reference.copy(folder / "half")
    code = half.run(environment=library.environment(half.folder, "rename", calls["rename"] // 2 + 2, "kill"))
    expect(code == -9 and newest(half.out), "expected a killed run, found exit code", code, half.errors())
    resumed = reference.copy(folder / "resumed")
    shutil.copytree(half.out, resumed.out)
    counts = [calls, reference.count_calls(resumed, library)]

    def case(own: Path, rng: random.Random, totals: Totals) -> None:
        resumes = rng.random() < 0.5
        run = reference.copy(own)
        if resumes:
            shutil.copytree(half.out, run.out)
        kind = rng.choice(sorted(counts[resumes]))
        most = counts[resumes][kind]
        # Half of the faults meet the start, whose calls are few and differ from those of the steps.
        at = rng.randint(1, most if rng.random() < 0.5 else min(START, most))
        action, on = rng.choice(ERRORS[kind]), rng.choice(["once", "on"])
        if action == "EINTR":
            on = "once"  # no program could go on, or end
        number = action if action == "short" else str(getattr(errno, action))
        code = run.run("--resume", "auto", environment=library.environment(run.folder, kind, at, number, on))
        totals.count("faults")
        try:
            if code == 0:
                totals.count("runs that went on")
                reference.expect_same(run)
            else:
                run.expect_one_line(code)
                run.expect_all_good()
                expect(not resumes or newest(run.out) >= newest(half.out), "a checkpoint is gone")
            reference.finish(run)
        except Exception as error:
            fault = f"{'resumed' if resumes else 'new'} run, {kind} {at} of {most}, {action} {on}: "
            raise type(error)(f"{fault}{error}") from None

    return case


if __name__ == "__main__":
    main(prepare, "faults")
