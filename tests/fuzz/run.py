"""`make fuzz`: each reader in C under libFuzzer, then the readers in Python on what was found.

BUILD/corpus keeps what covers new code, for the next run. BUILD/found gets the inputs that end a reader in
anything but its one line: once it is mended, each of them belongs into inputs.py. Exit status 1 where there
is one, or where C and Python differ.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fuzz import inputs, twins

LIMITS = ["-timeout=10", "-malloc_limit_mb=1024", "-rss_limit_mb=2048", "-max_len=16384", "-detect_leaks=1"]


def run(build: Path, reader: str, seconds: int, seed: int) -> tuple[bool, str]:
    """Whether nothing was found, and a line: reader, executions, seconds, edges covered."""
    corpus = build / "corpus" / reader
    corpus.mkdir(parents=True, exist_ok=True)
    (build / "found").mkdir(exist_ok=True)
    command = [build / "fuzz", *LIMITS, f"-max_total_time={seconds}", f"-seed={seed}", "-print_final_stats=1"]
    command += [f"-dict={build}/inputs/{reader}.dict", f"-artifact_prefix={build}/found/{reader}-"]
    begin = time.monotonic()
    chosen = {"LLAMAC_READER": reader, "ASAN_SYMBOLIZER_PATH": "/usr/bin/llvm-symbolizer-19"}
    done = subprocess.run(
        [*command, corpus, build / "inputs/seeds" / reader],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | chosen,
    )
    said = done.stderr.decode("utf-8", "replace")
    (build / f"{reader}.log").write_text(said)
    executed = re.search(r"number_of_executed_units: (\d+)", said)
    covered = re.findall(r" cov: (\d+) ", said)
    line = (
        f"{reader:12} {int(executed[1]) if executed else 0:12,} inputs  {time.monotonic() - begin:6.0f} s"
        f"  {covered[-1] if covered else '-':>6} edges"
    )
    return done.returncode == 0, line if done.returncode == 0 else f"{line}  FAILED\n{said[-4000:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("--seconds", type=int, required=True, help="for each reader")
    parser.add_argument("--seed", type=int, default=0, help="of libFuzzer; 0: another one in each run (0)")
    parser.add_argument("--jobs", type=int, default=1, help="readers side by side")
    parser.add_argument("--reader", action="append", help="this one alone")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    inputs.write(build / "inputs")
    readers = arguments.reader or [
        reader for reader in inputs.SEEDS if reader != "profile"
    ]  # that is Python's alone
    failed = False
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for good, line in pool.map(
            lambda reader: run(build, reader, arguments.seconds, arguments.seed), readers
        ):
            print(line, flush=True)
            failed |= not good
    failed |= not twins.compare(build / "read_inputs", build / "corpus")
    sys.exit(failed)


if __name__ == "__main__":
    main()
