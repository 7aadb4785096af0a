"""Writes shards while tokens arrive: under temporary names, in a separate folder until all are complete."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llamac.base.files import write_whole
from llamac.data.tokens import HEADER_BYTES, bin_header

INDEX = "index.json"
PARTIAL = "partial"  # the folder of a run that is not done
STATE = "state.json"
FORMAT = "llamac shards 1"


def write_json(path: Path, value: Any) -> None:
    write_whole(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


class ShardWriter:
    """Tokens of one split to folder/{split}_0.bin, …, each of shard_tokens but the last. A shard is
    {split}_N.tmp until it is whole. `restore` continues from a `state()`.
    """

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype, vocab_size: int, hash: int, shard_tokens: int
    ):
        self.folder, self.split, self.dtype = folder, split, dtype
        self._vocab_size, self._hash, self._most = vocab_size, hash, shard_tokens
        self.shards: list[int] = []  # tokens of those that are whole
        self._held = 0
        self._file: BinaryIO | None = None

    @property
    def tokens(self) -> int:
        return sum(self.shards) + self._held

    def path(self, index: int) -> Path:
        return self.folder / f"{self.split}_{index}.bin"

    def _open(self, at: int = 0) -> BinaryIO:
        path = self.path(len(self.shards)).with_suffix(".tmp")
        file = open(path, "r+b" if at else "wb")  # noqa: SIM115
        file.truncate(HEADER_BYTES + at * self.dtype.itemsize)
        file.seek(0, os.SEEK_END)
        return file

    def append(self, ids: np.ndarray) -> None:
        """Tokens [n] of the type."""
        while len(ids):
            if self._file is None:
                self._file = self._open()
            n = min(len(ids), self._most - self._held)
            self._file.write(ids[:n].data)
            self._held += n
            ids = ids[n:]
            if self._held == self._most:
                self.finish()

    def finish(self) -> None:
        """Complete the shard that is being written, if one is."""
        if self._file is None:
            return
        self._file.seek(0)
        self._file.write(bin_header(self._held, self._vocab_size, self._hash).tobytes())
        self._sync()
        self._file.close()
        path = self.path(len(self.shards))
        os.replace(path.with_suffix(".tmp"), path)
        self.shards.append(self._held)
        self._file, self._held = None, 0

    def _sync(self) -> None:
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def state(self) -> dict[str, Any]:
        self._sync()
        return {"shards": list(self.shards), "held": self._held}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; later writes are overwritten."""
        self.shards, self._held = list(state["shards"]), state["held"]
        later = self.path(len(self.shards))
        if later.exists():  # it became whole after the state was taken
            os.replace(later, later.with_suffix(".tmp"))
        if self._held:
            self._file = self._open(self._held)
