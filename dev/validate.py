"""validate.py [STAGE ...]: tries on this machine what llamac claims, and packs what was found into one file.

Stages run one after the other and go on after a failure. A stage that passed at this commit is not run again,
unless it is named: an interrupted validation is continued by the same command. Each stage has a time limit
(--seconds) and a log. The file, --out/validation.tar.gz, has results.json (machine, versions, commit; each
stage's commands, exit status and seconds), the logs' ends and the tables of the benchmarks. `llamac
report validation FILE` renders it.

`make validate` builds what the stages need and calls this. Exit code: 1 where a stage failed, 2 for bad
arguments.
"""

import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llamac.base.log import read_log
from llamac.base.version import provenance
from llamac.bench import harness
from llamac.doctor.installation import ENGINES, driver_platform
from llamac.report.validation import FORMAT

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
LOG_BYTES = 256 << 10  # of each log, in the archive
# Of losses in f32 on two devices, or by two programs: sums in another order.
EARLY_STEPS, EARLY, LATE = 20, 2e-3, 0.05


@dataclass(frozen=True)
class Machine:
    platform: str
    build: Path
    out: Path
    gpus: list[str]  # their names
    quick: bool

    @property
    def program(self) -> Path:
        return self.build / "train_llama3"


@dataclass(frozen=True)
class Stage:
    """commands: each begins where the one before has ended well. check: whether their results are right, and
    what was found, for the log. without: why the stage has no place on this machine; "": it has one."""

    commands: list[list]
    check: Callable[[], tuple[bool, str]] = lambda: (True, "")
    without: str = ""


def losses(folder: Path) -> dict[int, float]:
    """By step; the log has null for one that is not finite."""
    steps = [e for e in read_log(folder / "log.jsonl") if e["event"] == "step"]
    return {e["step"]: float("nan") if e["loss"] is None else e["loss"] for e in steps}


def compare(one: Path, other: Path) -> tuple[bool, str]:
    """Whether two runs on the same batches have the same losses, and the largest difference."""
    a, b = losses(one), losses(other)
    if not a or a.keys() != b.keys():
        return False, f"{one.name} has {len(a)} steps, {other.name} {len(b)}"
    apart = {step: abs(a[step] - b[step]) for step in a}
    for most, steps in ((EARLY, list(a)[:EARLY_STEPS]), (LATE, list(a))):
        step = next((step for step in steps if not apart[step] <= most), None)  # also NaN
        if step is not None:
            found = f"{a[step]} of {one.name}, {b[step]} of {other.name}"
            return False, f"loss of step {step}: expected a difference of at most {most}, found {found}"
    return True, f"largest difference of losses in {len(a)} steps: {max(apart.values()):.1e}"


def stages(m: Machine) -> dict[str, Stage]:
    """In the order in which they run. Each writes into --out/NAME alone."""
    gpu = m.platform != "cpu"
    tried = "`make test` has run it" if m.quick else ""
    on_device = [m.build / "check_operations", "--where", "device", "--once", "--brief"]
    sanitizer = shutil.which("compute-sanitizer") if m.platform == "nvidia" else None
    # As in the Makefile: side by side, a thread each, but what measures a GPU's memory.
    tests = ["tests/model/test_model.py", "tests/train/test_trainer.py", "tests/ops/test_ops.py"]
    workers = min((os.cpu_count() or 1) + 1, 8)
    pytest = ["env", "OMP_NUM_THREADS=1", PYTHON, "-m", "pytest", "-q", "-n", workers, *tests]
    # The kernels for GPUs that matter are those of bf16.
    short = [m.program, "--sample-every", 0, *(["--dtype", "bf16"] if gpu else [])]
    profiled = m.out / "profile/run"
    profile = [*short, "--steps", 15, "--profile", 10, "--out", profiled]
    found = {
        "installation": Stage([[PYTHON, "-m", "llamac", "doctor"]]),
        "machine": Stage([[PYTHON, "-m", "llamac", "doctor", "--preflight"]]),
        "tiles": Stage([[m.build / "check_tile"]], without=tried),
        "kernels": Stage([on_device], without=tried),
        "tests": Stage([[PYTHON, "-m", "pytest", "-q", "tests/ops/test_gpu.py"], pytest], without=tried),
        "memory": Stage(
            [[sanitizer, "--tool", "memcheck", "--error-exitcode", 1, *on_device]],
            without="" if sanitizer else "needs an NVIDIA GPU and compute-sanitizer",
        ),
        "losses": losses_stage(m),
        "devices": devices_stage(m),
        "profile": Stage([profile, [PYTHON, "-m", "llamac", "profile", profiled]]),
    }
    preset = "8b" if gpu and not m.quick else "tiny"
    programs = sorted(path.stem for path in (ROOT / "dev/hip").glob("*.cpp") if path.stem != "benchmark")
    some = ["rmsnorm_forward"] if m.quick else programs
    found["microbenchmarks"] = Stage([[m.build / program, "--preset", preset] for program in some])
    rules = [PYTHON, ROOT / "dev/hip/isa/timing_bench.py", "--out", m.out / "issue-rules"]
    found["issue-rules"] = Stage([rules], without="" if m.platform == "amd" else "needs an AMD GPU")
    isa, ops = ROOT / "dev/hip", ROOT / "csrc/ops"
    predicted = [*sorted((ops / "attention").glob("flash_*.hip")), ops / "matmul/tiled.hip"]
    compiled = [PYTHON, isa / "resources.py", *predicted, "--program", m.program]
    beside = [PYTHON, isa / "isa/timing.py", "--only", "llamac", "--measure", m.build]
    found["predicted"] = Stage([compiled, beside], without=found["issue-rules"].without)
    name = f"operations-{preset}"
    bench = [PYTHON, "-m", "llamac", "bench", "--preset", preset, "--out", m.out / name]
    found[name] = Stage([[*bench, *(["--operation", "rmsnorm"] if m.quick else [])]])
    if not gpu:
        found["train"] = training_stage(m, "train", "cpu", "--steps", 5 if m.quick else 35, "--warm-up", 5)
    for workload in ("1b-b8-t2048", "8b-b1-t8192") if gpu else ():
        found[f"train-{workload}"] = training_stage(m, f"train-{workload}", workload)
    return found


def training_stage(m: Machine, name: str, workload: str, *flags: object) -> Stage:
    """One round beside PyTorch."""
    command = [PYTHON, ROOT / "dev/bench_train.py", "--build", m.build, "--workload", workload, "--rounds", 1]
    only = ["--only", "llamac,eager" if workload == "cpu" else "llamac,compile,eager"]
    return Stage([[*command, *only, *flags, "--out", m.out / name / "bench_train.json"]])


def losses_stage(m: Machine) -> Stage:
    """The default run beside the CPU's; on a CPU, beside PyTorch's."""
    folder = m.out / "losses"
    both = ["--steps", 20 if m.quick else 300, "--dtype", "f32"]
    flags = [*both, "--sample-every", 0, "--out"]
    commands = [[m.program, *flags, folder / m.platform]]
    if m.platform == "cpu":
        log = folder / "pytorch/log.jsonl"
        commands += [[PYTHON, ROOT / "train_llama3.py", "--train", *both, "--log", log]]
        return Stage(commands, partial(compare, folder / "cpu", folder / "pytorch"))
    cpu = ROOT / "build/cpu"
    commands += [
        ["cmake", "-S", ROOT, "-B", cpu, "-DLLAMAC_PLATFORM=cpu"],
        ["cmake", "--build", cpu, "--parallel", os.cpu_count() or 1, "--target", "train_llama3"],
        [cpu / "train_llama3", *flags, folder / "cpu"],
    ]
    return Stage(commands, partial(compare, folder / m.platform, folder / "cpu"))


def devices_stage(m: Machine) -> Stage:
    """The same steps on one device, on two, and on two with a profile; then tests of ranks out of step."""
    flags = ["--steps", 10, "--total-batch-size", 4096, "--batch-size", 4, "--seq-len", 256, "--val-data", ""]
    runs = {"on-1": ["--devices", 1], "on-2": ["--devices", 2], "profiled": ["--devices", 2, "--profile", 3]}
    folders = [m.out / "devices" / name for name in runs]
    commands = [[m.program, *flags, *more, "--out", out] for more, out in zip(runs.values(), folders)]
    ranks = "lost_rank or other_caches or profile"
    files = [f"tests/train/test_{name}.py" for name in ("rank_faults", "several_devices")]
    commands += [[PYTHON, "-m", "pytest", "-q", "-rs", *files, "-k", ranks]]

    def check() -> tuple[bool, str]:
        found = [compare(folders[0], other) for other in folders[1:]]
        return min(found, key=lambda each: each[0])  # the first that failed, if one did

    without = "needs two GPUs" if m.platform != "cpu" and len(m.gpus) < 2 else lacking_engine(version(m))
    return Stage(commands, check, without=without)


def lacking_engine(said: list[str]) -> str:
    """What the program of this --version needs for --devices; empty: it has all."""
    engines = next((line for line in said if line.startswith("engines ")), "")
    for name, package in ENGINES.items():
        if f"no {name}" in engines:
            return f"needs {name}: apt-get install {package}, then make validate STAGES=devices"
    return ""


def version(m: Machine) -> list[str]:
    """What the program says of itself."""
    try:
        return subprocess.run([m.program, "--version"], capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return []


def try_stage(name: str, stage: Stage, m: Machine, seconds: float) -> dict:
    """Its record. status: passed, failed, "time was over", "left out"; reason: why."""
    record: dict = {"stage": name, "commit": provenance()["commit"], "quick": m.quick, "gpus": m.gpus}
    record["commands"] = [" ".join(map(str, command)) for command in stage.commands]
    if stage.without:
        return record | {"status": "left out", "reason": stage.without, "seconds": 0}
    shutil.rmtree(m.out / name, ignore_errors=True)
    (m.out / name).mkdir(parents=True)
    begin, status, reason = time.monotonic(), "passed", ""
    console = m.out / name / "console.log"

    def note(text: str) -> None:
        with console.open("a") as log:
            log.write(text + "\n")

    for command, words in zip(stage.commands, record["commands"]):
        note(f"$ {words}")
        left = seconds - (time.monotonic() - begin)
        failure = harness.execute(command, left, ROOT, console, LLAMAC_BUILD=str(m.build)).failure
        if failure == harness.STOPPED:
            status, reason = "time was over", f"{seconds:.0f} s"
        elif failure:
            status, reason = "failed", f"{Path(str(command[0])).name}: {failure}"
        if failure:
            break
    else:
        right, found = stage.check()
        note(found)
        if not right:
            status, reason = "failed", found
    return record | {"status": status, "reason": reason, "seconds": round(time.monotonic() - begin, 1)}


def found_gpus() -> list[str]:
    code = "import torch\nfor i in range(torch.cuda.device_count()): print(torch.cuda.get_device_name(i))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True).stdout.splitlines()


def facts(m: Machine) -> dict:
    installation = m.out / "installation/console.log"
    text = installation.read_text() if installation.exists() else ""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return provenance() | {
        "format": FORMAT,
        "platform": m.platform,
        "devices": re.findall(r"^ok    device(?: \d+)?: (.*)$", text, re.MULTILINE),
        "program": version(m),
        "system": f"{system}, Python {platform.python_version()}",
    }


def pack(m: Machine, records: list[dict]) -> Path:
    """results.json, the ends of logs, and tables, into one file."""
    (m.out / "results.json").write_text(json.dumps(facts(m) | {"stages": records}, indent=1) + "\n")
    archive = m.out / "validation.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(m.out / "results.json", "validation/results.json")
        for name in (record["stage"] for record in records):
            for path in sorted((m.out / name).glob("*.*")) + sorted((m.out / name).glob("*/log.jsonl")):
                content = path.read_bytes()
                if path.suffix in (".log", ".jsonl"):
                    content = content[-LOG_BYTES:]
                entry = tarfile.TarInfo(f"validation/{path.relative_to(m.out)}")
                entry.size, entry.mtime = len(content), path.stat().st_mtime
                tar.addfile(entry, io.BytesIO(content))
    return archive


def main(arguments: list[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("stage", nargs="*", help="these alone, again; default: all that have not passed")
    add("--build", type=Path, default=ROOT / "build/auto", help="folder of the built programs")
    add("--out", type=Path, default=ROOT / "build/validation", help="logs, results, the archive")
    add("--quick", action="store_true", help="three minutes: what `make test` does not run")
    add("--seconds", type=float, default=480, help="limit of a stage [480]")
    o = parser.parse_args(arguments)
    if not (o.build / "train_llama3").is_file():
        parser.error(f"--build {o.build}: expected train_llama3 in it, found none: make validate builds it")
    on = driver_platform()
    m = Machine(on, o.build.resolve(), o.out.resolve(), [] if on == "cpu" else found_gpus(), o.quick)
    found = stages(m)
    if unknown := [name for name in o.stage if name not in found]:
        parser.error(f"{unknown[0]}: no such stage; expected some of {', '.join(found)}")
    m.out.mkdir(parents=True, exist_ok=True)
    before = m.out / "results.json"
    records = {r["stage"]: r for r in json.loads(before.read_text())["stages"]} if before.exists() else {}
    for kept in (record.get("gpus", m.gpus) for record in records.values()):
        if kept != m.gpus:
            own, others = (", ".join(gpus) or "a CPU" for gpus in (m.gpus, kept))
            parser.error(f"--out {o.out}: expected results of {own}, found those of {others}: name another")
    for name, stage in found.items():
        old = records.get(name, {})
        as_now = old.get("commit") == provenance()["commit"] and old.get("quick") == m.quick
        if name not in o.stage if o.stage else as_now and old["status"] == "passed":
            continue
        print(f"{name} ...", flush=True)
        new = records[name] = try_stage(name, stage, m, o.seconds)
        print(
            f"{name}: {new['status']}{', ' * bool(new['reason'])}{new['reason']}, {new['seconds']} s",
            flush=True,
        )
        pack(m, [records[each] for each in found if each in records])
    archive = pack(m, [records[each] for each in found if each in records])
    print(f"{archive}: {archive.stat().st_size / (1 << 20):.1f} MiB")
    return 1 if any(r["status"] in ("failed", "time was over") for r in records.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
