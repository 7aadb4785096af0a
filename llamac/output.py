"""Written twice on purpose: csrc/train/output.cpp has the same lock; tests/test_output.py compares them.

The output folder of a run: it has one owner at a time, may not be replaced during the run, and the output of
an earlier run is moved aside, not lost. A checkpoint is written under a temporary name and renamed last. For
why the lock uses flock, and where it works, see csrc/train/output.cpp.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from llamac.errors import InputError
from llamac.files import MOST_LOG, parse_json, read_bytes

LOCK = ".lock"
_ATTEMPTS, _WAIT = 10, 0.05  # seconds
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_OWN = ("log.jsonl", "loss.png", "profile.json", "trace.json")
_LEFTOVER = re.compile(r"\.(step_|log\.jsonl\.|profile\.json\.|trace\.json\.).*\.(tmp|removed)")


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder, step_000100; None for other names."""
    found = re.fullmatch(r"step_(\d{6}|[1-9]\d{6,17})", name, re.ASCII)
    return int(found[1]) if found else None


def temporary_name(name: str) -> str:
    """Of a checkpoint that is being written."""
    return f".{name}.tmp"


def _is_own(name: str) -> bool:
    return name in _OWN or name.startswith("damaged_step_")


def sync_folder(path: str | Path) -> None:
    """What a folder's names lead to is on the disk: a machine that stops loses none of them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: str | Path) -> None:
    """Remove a file, a link (not what it leads to), or a folder with all that it contains, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)


def truncate_log(path: Path, step: int) -> set[str]:
    """Cut log.jsonl behind a step: torn lines and those of steps that are computed again go. Returns the
    events of that step. As train/truncate_log.cpp.
    """
    if not path.exists():
        return set()
    kept, last = [], set()
    for line in read_bytes(path, MOST_LOG).split(b"\n"):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(event, dict) or b"\0" in line:
            continue
        its_step = event.get("step")
        # Steps only grow in a log: what follows the first one past `step` belongs to the part that is redone.
        if isinstance(its_step, (int, float)) and its_step > step:
            break
        kept.append(line + b"\n")
        if its_step == step and isinstance(event.get("event"), str):
            last.add(event["event"])
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(b"".join(kept))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return last


def _same(a: os.stat_result, b: os.stat_result) -> bool:
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


class OutputFolder:
    """The folder, locked for this process until close() or its end; where it does not exist yet, prepare()
    makes and locks it. Raises InputError, with the owner's host, process and start time where there is one.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.warning = ""  # where the file system has no locks
        self.logged: set[str] = set()  # events of the resumed step, where the log goes on
        self._folder = self._lock = -1  # descriptors
        self._process = os.getpid()
        if os.path.exists(path):
            self._open()

    def prepare(self, checkpoint: str | Path = "", step: int = 0, damaged: Sequence[str] = ()) -> list[str]:
        """Make the folder ready for a run that begins, or goes on from a checkpoint at `step`. What an
        earlier run left goes to the first free previous_N, or, in the checkpoint's own folder, what is newer,
        and log.jsonl is cut behind the step. Damaged checkpoints get another name; what interrupted writes
        left is removed. Returns the lines that say so.
        """
        if self._folder < 0:
            self.path.mkdir(parents=True, exist_ok=True)
            self._open()
            # Whoever looked for a checkpoint found none then.
            for name in sorted(os.listdir(self._folder)):
                if step_of(name) is not None or _is_own(name):
                    raise InputError(
                        f"{self.path}: expected no folder, as when this run started, found {name} of another "
                        "run, which has begun since; start again"
                    )
        self.check()
        lines = [self.warning] if self.warning else []
        self._remove_leftovers()
        for name in damaged:
            other = self._free_name(f"damaged_{name}")
            self._rename(name, other)
            lines.append(f"the damaged checkpoint is now {self.path}/{other}")
        goes_on = bool(checkpoint) and self._holds(Path(checkpoint))
        names = []
        for name in sorted(os.listdir(self._folder)):
            its_step = step_of(name)
            if goes_on:
                chosen = its_step is not None and its_step > step
            else:
                chosen = its_step is not None or _is_own(name)
            names += [name] if chosen else []
        if names:
            what = "newer checkpoints" if goes_on else "an earlier run's log and checkpoints"
            lines.append(f"{what} are now in {self._set_aside(names)}")
        if goes_on:
            self.logged = truncate_log(self.path / "log.jsonl", step)
        return lines

    def begin(self, name: str) -> None:
        """Make a checkpoint's folder, under a temporary name until finish()."""
        self.check()
        self._remove_leftovers()
        if os.path.lexists(self.path / name):
            raise InputError(f"{self.path / name}: expected no file or directory of this name yet, found one")
        os.mkdir(temporary_name(name), dir_fd=self._folder)

    def finish(self, name: str) -> None:
        """The checkpoint is whole: give it its name, on the disk as well."""
        self.check()
        sync_folder(self.path / temporary_name(name))
        self._rename(temporary_name(name), name)

    def prune(self, keep: int) -> None:
        """Remove the oldest checkpoints beyond `keep`."""
        names = sorted(
            (step, name) for name in os.listdir(self._folder) if (step := step_of(name)) is not None
        )
        for _, name in names[:-keep]:
            self.remove(name)

    def check(self) -> None:
        """Before each write: raise InputError where the path leads to another folder, or the lock is gone."""
        self._check_folder()
        if not self._in_place():
            self._check_folder()  # a folder that is gone has no lock either
            found = "another file" if os.path.lexists(self.path / LOCK) else "none"
            raise InputError(
                f"{self.path}/{LOCK}: expected the lock of this run, found {found}: "
                "a second run may have started; nothing more is written"
            )

    def remove(self, name: str) -> None:
        """Remove a checkpoint, renamed first: whatever has its name is complete."""
        self.check()
        removed = f".{name}.removed"
        self._rename(name, removed)
        remove(self.path / removed)

    def close(self) -> None:
        """Give the lock back, also where a forked child still has the descriptor; not in such a child."""
        if self._lock >= 0 and os.getpid() == self._process:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        for descriptor in (self._lock, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock = self._folder = -1

    def __del__(self):
        self.close()

    def _rename(self, name: str, other: str) -> None:
        os.rename(name, other, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)

    def _remove_leftovers(self) -> None:
        for name in filter(_LEFTOVER.fullmatch, os.listdir(self._folder)):
            remove(self.path / name)

    def _free_name(self, name: str) -> str:
        """The first of NAME, NAME_2, NAME_3, … that does not exist."""
        names = (name if n == 1 else f"{name}_{n}" for n in count(1))
        return next(name for name in names if not os.path.lexists(self.path / name))

    def _holds(self, checkpoint: Path) -> bool:
        """By its name, or by where it lies: either may be a link."""
        own = os.fstat(self._folder)
        parents = checkpoint.absolute().parent, checkpoint / ".."
        return any(_same(os.stat(parent), own) for parent in parents)

    def _open(self) -> None:
        try:
            self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise InputError(f"{self.path}: cannot open: {error.strerror}") from None
        for attempt in range(1, _ATTEMPTS + 1):
            if self._take():
                break
            owner = self._owner()
            os.close(self._lock)
            self._lock = -1
            if attempt == _ATTEMPTS:
                raise InputError(
                    f"{self.path}: expected a folder that no other run writes to, found {owner}; "
                    "wait for its end, or choose another folder (--out)"
                )
            time.sleep(_WAIT)
        if not self.warning:
            self._write_owner()

    def _check_folder(self) -> None:
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            there = None
        if there is None or not _same(there, os.fstat(self._folder)):
            raise InputError(
                f"{self.path}: expected the folder that is being written to, found "
                f"{'another one' if there else 'none'} at this path: it was moved, removed or replaced; "
                "nothing more is written"
            )

    def _take(self) -> bool:
        path, flags = self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._lock = os.open(LOCK, flags, 0o666, dir_fd=self._folder)
        except OSError as error:
            raise InputError(f"{path}: cannot write: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(self._lock).st_mode):
            raise InputError(f"{path}: expected a file, found something else")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise InputError(f"{path}: cannot lock: {error.strerror}") from None
            self.warning = f"{path}: the file system has no locks ({error.strerror}): nothing keeps a second "
            self.warning += f"run out of {self.path}"
            return True
        return self._in_place()

    def _in_place(self) -> bool:
        try:
            there = os.stat(LOCK, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return _same(there, os.fstat(self._lock))

    def _write_owner(self) -> None:
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
        text = json.dumps(owner, separators=(",", ":")).encode() + b"\n"
        os.pwrite(self._lock, text, 0)
        os.ftruncate(self._lock, len(text))

    def _owner(self) -> str:
        try:
            owner = parse_json(os.pread(self._lock, 1024, 0), LOCK, {"pid": int, "host": str, "started": str})
        except InputError:
            return "a process that does not say which"
        return f"process {owner['pid']} on {owner['host']}, started {owner['started']}"

    def _set_aside(self, names: list[str]) -> Path:
        previous = next(p for n in count(1) if not os.path.lexists(p := self.path / f"previous_{n}"))
        os.mkdir(previous.name, dir_fd=self._folder)
        for name in names:
            try:
                target = os.readlink(name, dir_fd=self._folder)
            except OSError:  # not a link
                target = "/"
            into = f"{previous.name}/{name}"
            if target.startswith("/"):
                os.rename(name, into, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            else:  # a relative link would lead elsewhere from one folder down
                os.symlink(f"../{target}", into, dir_fd=self._folder)
                os.unlink(name, dir_fd=self._folder)
        return previous
