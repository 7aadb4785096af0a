#!/usr/bin/env python3
"""Tokenizing JSON lines: `llamac data` with two workers and with one, beside `datasets.map`
(batched, 1,000 rows per batch, two processes), with the same tokenizer of 128,000 tokens, which is trained on
the text.

The text is made: words by Zipf's law out of the installed Python sources and random ones, so that the
vocabulary has enough to learn. Rounds are interleaved; each side starts as a process of its own, without any
cache. Memory is the largest sum, over the process and its children, of the proportional set size (PSS: pages
that n processes share count as 1/n in each), sampled ten times per second. Linux only.
"""

import json
import random
import re
import statistics
import sys
import sysconfig
import tempfile
from functools import partial
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llamac.base import errors
from llamac.base.errors import InputError
from llamac.bench import harness

ROOT = Path(__file__).resolve().parents[1]
TWO, ONE, MAPPED = "llamac.data, 2 workers", "llamac.data, 1 worker", "datasets.map"
MAP = """
import sys
import datasets, transformers
rows, file, out = sys.argv[1:]
datasets.disable_caching()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
data = datasets.load_dataset("json", data_files=rows, split="train", cache_dir=out)
encode = lambda batch: tokenizer(batch["text"], add_special_tokens=False)
data = data.map(encode, batched=True, batch_size=1000, num_proc=2, remove_columns=["text"])
"""


def words(seed: int) -> list[str]:
    """Words of source text, and as many made ones as give 128,000 tokens."""
    rng = random.Random(seed)
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text("utf-8", "ignore") for path in paths)
    found = list(dict.fromkeys(re.findall(r"\w+|[^\w\s]+", text)))
    syllables = [a + b + c for a in "bcdfghjklmnprstvwz" for b in "aeiouy" for c in ("", *"lmnrstx")]
    made = {"".join(rng.choice(syllables) for _ in range(rng.randrange(2, 5))) for _ in range(150_000)}
    found += sorted(made)
    rng.shuffle(found)
    return found


def write_rows(path: Path, megabytes: int) -> None:
    rng = random.Random(0)
    found = words(1)
    sums = list(accumulate(1 / (rank + 20) for rank in range(len(found))))
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < megabytes * 10**6:
            for _ in range(200):
                chosen = rng.choices(found, cum_weights=sums, k=rng.randrange(50, 800))
                file.write(json.dumps({"text": " ".join(chosen)}, ensure_ascii=False) + "\n")


def memory(pid: int) -> int:
    """PSS in KiB of a process and all below it; 0 of those that have ended."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return (int(found[1]) if found else 0) + sum(memory(int(child)) for child in children)


def run(command: list[object], folder: Path, to: Path | None = None) -> tuple[float, int]:
    """(wall time of the command, the largest memory in MiB of all its processes together).

    to: where its result is kept.
    """
    most = 0

    def watch(pid: int) -> None:
        nonlocal most
        most = max(most, memory(pid))

    with tempfile.TemporaryDirectory(dir=folder) as out:
        finished = harness.execute([*command, to or f"{out}/made"], folder=ROOT, watch=watch)
    if finished.failure:
        raise InputError(f"{finished.failure}\n{finished.text[-2000:]}")
    return finished.seconds, most >> 10


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--vocab-size", type=int, default=128_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("build/bench_data"))
    a = parser.parse_args()
    folder = a.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows, trained = folder / f"{a.megabytes}.jsonl", folder / f"tokenizer_{a.megabytes}_{a.vocab_size}"
    if not rows.exists():
        write_rows(rows, a.megabytes)
    data, tokenizer = [sys.executable, "-m", "llamac", "data", rows], trained / "tokenizer.json"
    if not tokenizer.exists():
        run([*data, "--vocab-size", a.vocab_size, "--out"], folder, trained)
    ours = [*data, "--tokenizer", tokenizer, "--workers"]
    commands = {
        TWO: [*ours, "2", "--out"],
        ONE: [*ours, "1", "--out"],
        MAPPED: [sys.executable, "-c", MAP, rows, tokenizer],
    }
    ways = {name: partial(run, command, folder) for name, command in commands.items()}
    runs = harness.take_turns(ways, a.rounds)
    medians = {name: statistics.median(t for t, _ in taken) for name, taken in runs.items()}
    most = {name: max(found for _, found in taken) for name, taken in runs.items()}
    for name in runs:
        print(f"{name:22} {rows.stat().st_size / 1e6 / medians[name]:6.2f} MB/s, {most[name]:,} MiB")
    ratio = medians[MAPPED] / medians[TWO]
    print(f"two workers are {medians[ONE] / medians[TWO]:.2f} times as fast as one")
    print(f"two workers are {ratio:.2f} times as fast as datasets.map (expected at least 1.5)")
    print(f"memory of two workers: {most[TWO]:,} MiB (expected less than 1,024)")
    sys.exit(ratio < 1.5 or most[TWO] >= 1024)


if __name__ == "__main__":
    errors.run(main)
