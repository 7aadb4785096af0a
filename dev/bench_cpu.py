"""Tokens per second and peak memory of the C program beside PyTorch's (train_llama3.py --train; --compile for
torch.compile): same model, batch and type, two threads, taking turns on this machine.

Prints one row per round and the ratio of the medians. Other flags go to both programs as they are: those that
both have.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llamac.base.version import provenance, provenance_text

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 5  # first steps left out: pages are touched, threads are started, PyTorch fills its caches


def run(command: list[str], out: Path, threads: int) -> tuple[float, float]:
    """Median tokens/s of a run's steps after warm-up, and the process's peak memory in MiB."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    with open(out / "console", "wb") as console:
        streams = [(os.POSIX_SPAWN_DUP2, console.fileno(), 1), (os.POSIX_SPAWN_DUP2, console.fileno(), 2)]
        child = os.posix_spawn(command[0], command, environment, file_actions=streams)
        _, status, usage = os.wait4(child, 0)
    if status:
        sys.exit(f"bench_cpu: {' '.join(command)} failed:\n{(out / 'console').read_text()[-2000:]}")
    events = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    rates = [e["tokens_per_s"] for e in events if e["event"] == "step" and e["step"] > WARM_UP]
    return statistics.median(rates), usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program")
    parser.add_argument("--steps", type=int, default=40, help="steps per run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="torch.compile instead of eager")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options, flags = parser.parse_known_args()
    if options.steps <= WARM_UP or options.rounds < 1:
        parser.error(f"expected --steps above {WARM_UP} and --rounds of at least 1")
    if not (ROOT / "train_llama3").exists():
        parser.error(f"{ROOT / 'train_llama3'}: not there yet; make train_llama3 builds it")
    flags += ["--steps", str(options.steps)]
    alone = ["--val-data", "", "--sample-every", "0", "--checkpoint-every", "-1", "--out"]
    torch_flags = [*(["--compile"] if options.compile else []), "--log"]
    programs = {
        "llamac": ([str(ROOT / "train_llama3"), *flags, *alone], ""),
        "PyTorch": (
            [sys.executable, str(ROOT / "train_llama3.py"), "--train", *flags, *torch_flags],
            "log.jsonl",
        ),
    }
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    os.chdir(ROOT)
    when = provenance()
    if not options.json:
        print(provenance_text(when), flush=True)
    for number in range(options.rounds):
        for name, (command, file) in programs.items():
            with tempfile.TemporaryDirectory() as folder:
                result = run([*command, str(Path(folder) / file)], Path(folder), options.threads)
            results[name].append(result)
            if not options.json:
                print(
                    f"round {number + 1}  {name:8s} {result[0]:9.0f} tokens/s  peak {result[1]:7.0f} MiB",
                    flush=True,
                )
    rate = {name: statistics.median(r for r, _ in rows) for name, rows in results.items()}
    memory = {name: max(m for _, m in rows) for name, rows in results.items()}
    ratio = rate["llamac"] / rate["PyTorch"]
    if options.json:
        print(json.dumps(when | {"tokens_per_s": rate, "peak_mib": memory, "ratio": ratio}))
    else:
        mode = "compiled" if options.compile else "eager"
        print(
            f"llamac {rate['llamac']:.0f} tokens/s, PyTorch {mode} {rate['PyTorch']:.0f}: ratio {ratio:.2f}; "
            f"peak memory {memory['llamac']:.0f} and {memory['PyTorch']:.0f} MiB"
        )


if __name__ == "__main__":
    main()
