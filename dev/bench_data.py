"""Tokenizing JSON lines: `python -m llamac.data --workers 2` beside `datasets.map` (batched, 1,000 rows per
batch, two processes), with the same tokenizer of 128,000 tokens, which is trained on the text.

The text is made: words by Zipf's law out of the installed Python sources and random ones, so that the
vocabulary has enough to learn. Rounds are interleaved; each side starts as a process of its own, without any
cache.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MAP = """
import sys
import datasets, transformers
rows, directory, out = sys.argv[1:]
datasets.disable_caching()
tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
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
    weights = [1 / (rank + 20) for rank in range(len(found))]
    total, sums = 0.0, []
    for weight in weights:
        sums.append(total := total + weight)
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < megabytes * 10**6:
            for _ in range(200):
                chosen = rng.choices(found, cum_weights=sums, k=rng.randrange(50, 800))
                file.write(json.dumps({"text": " ".join(chosen)}, ensure_ascii=False) + "\n")


def train(path: Path, directory: Path, size: int) -> int:
    """A byte-level BPE with Llama 3's split pattern, as a directory of transformers; its number of tokens."""
    from tokenizers import decoders

    from llamac import tokenizer

    with open(path, encoding="utf-8") as file:
        made = tokenizer.train_bpe((json.loads(line)["text"] for line in file), size - 1)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    directory.mkdir(exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
    return made.get_vocab_size()


def seconds(command: list[str]) -> tuple[float, int]:
    """(wall time of the command, its largest resident memory in MiB, of one process)."""
    begin = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    said = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{command[:3]}: {said.decode()[-2000:]}")
    return time.monotonic() - begin, usage.ru_maxrss >> 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--vocab-size", type=int, default=128_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("build/bench_data"))
    a = parser.parse_args()
    folder = a.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows, directory = folder / f"{a.megabytes}.jsonl", folder / f"tokenizer_{a.megabytes}_{a.vocab_size}"
    if not rows.exists():
        write_rows(rows, a.megabytes)
    if not (directory / "tokenizer_config.json").exists():
        print(f"tokenizer of {train(rows, directory, a.vocab_size):,} tokens", flush=True)
    times: dict[str, list[tuple[float, int]]] = {"llamac.data": [], "datasets.map": []}
    for number in range(a.rounds):
        out = str(folder / f"out_{os.getpid()}_{number}")
        flags = [str(rows), "--tokenizer", str(directory), "--workers", "2", "--out", out]
        times["llamac.data"].append(seconds([sys.executable, "-m", "llamac.data", *flags]))
        mapped = [sys.executable, "-c", MAP, str(rows), str(directory), f"{out}_map"]
        times["datasets.map"].append(seconds(mapped))
        found = ", ".join(f"{name} {taken[-1][0]:.1f} s" for name, taken in times.items())
        print(f"round {number + 1}: {found}", flush=True)
    medians = {name: statistics.median(t for t, _ in taken) for name, taken in times.items()}
    for name, taken in times.items():
        memory = max(found for _, found in taken)
        print(f"{name:13} {rows.stat().st_size / 1e6 / medians[name]:6.2f} MB/s, parent {memory} MiB")
    ratio = medians["datasets.map"] / medians["llamac.data"]
    print(f"ratio {ratio:.2f} (expected at least 1.5)")
    sys.exit(ratio < 1.5)


if __name__ == "__main__":
    main()
