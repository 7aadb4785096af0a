"""dev/validate.py and llamac.report validation: stages that pass, fail, hang or are left out; the archive."""

import json
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from run import ROOT, refuses

sys.path.insert(0, str(ROOT / "dev"))
import validate
from validate import Machine, Stage

from llamac.report import validation


@pytest.fixture
def machine(tmp_path, monkeypatch):
    build = tmp_path / "build"
    build.mkdir()
    program = build / "train_llama3"
    program.write_text("#!/bin/sh\necho llamac 0.0.0\n")
    program.chmod(0o755)
    monkeypatch.setattr(validate, "driver_platform", lambda: "cpu")
    return Machine("cpu", build, tmp_path / "out", [], False)


def python(text: str) -> list:
    return [sys.executable, "-c", text]


@pytest.fixture
def command(machine, monkeypatch):
    """command(stages, *arguments): validate.py of these stages; exit code, records by stage."""

    def call(stages: dict[str, Stage], *arguments: str) -> tuple[int, dict]:
        monkeypatch.setattr(validate, "stages", lambda m: stages)
        code = validate.main(["--build", str(machine.build), "--out", str(machine.out), *arguments])
        records = json.loads((machine.out / "results.json").read_text())["stages"]
        return code, {record["stage"]: record for record in records}

    return call


def test_a_stage_ends_at_its_first_failure(machine):
    stage = Stage([python("print(1)"), python("import sys; sys.exit(3)"), python("print(2)")])
    record = validate.try_stage("it", stage, machine, 60)
    assert record["status"] == "failed" and ": exit code 3" in record["reason"]
    log = (machine.out / "it/console.log").read_text()
    assert "\n1\n" in log and "\n2\n" not in log


def test_the_time_of_a_stage(machine):
    """Its processes end as well, also those that it has started."""
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    begin = time.monotonic()
    record = validate.try_stage("it", Stage([python(child)]), machine, 2)
    assert record["status"] == "time was over" and time.monotonic() - begin < 30
    before = (machine.out / "it/console.log").stat().st_size
    time.sleep(0.5)
    assert (machine.out / "it/console.log").stat().st_size == before > 0


SLEEP = "import time\nwhile True: print('x', flush=True); time.sleep(0.05)"


def test_what_a_check_finds(machine):
    record = validate.try_stage(
        "it", Stage([python("")], check=lambda: (False, "losses differ")), machine, 60
    )
    assert (record["status"], record["reason"]) == ("failed", "losses differ")
    record = validate.try_stage("it", Stage([python("")], check=lambda: (True, "equal")), machine, 60)
    assert (record["status"], record["reason"]) == ("passed", "")
    assert (machine.out / "it/console.log").read_text().endswith("\nequal\n")


@pytest.mark.slow
def test_it_goes_on_after_a_failure_and_is_continued(command, capsys):
    stages = {
        "good": Stage([python("print('fine')")]),
        "bad": Stage([python("print('FAIL  it: broken'); raise SystemExit(1)")]),
        "absent": Stage([], without="needs two GPUs"),
        "last": Stage([python("")]),
    }
    code, records = command(stages)
    assert code == 1
    assert [record["status"] for record in records.values()] == ["passed", "failed", "left out", "passed"]
    assert "bad: failed" in capsys.readouterr().out
    code, again = command(stages | {"bad": Stage([python("")])})
    assert code == 0 and again["bad"]["status"] == "passed"
    assert again["good"] == records["good"], "it is not run again"
    code, named = command(stages, "bad")
    assert code == 1 and named["bad"]["status"] == "failed" and named["last"] == again["last"]
    with pytest.raises(SystemExit) as end:
        command(stages, "nothing")
    assert end.value.code == 2 and "no such stage; expected some of good, bad" in capsys.readouterr().err


MACHINE = "ok    host: 2 cores\nok    torch: 2.11, /home/me/x\nFAIL  IOMMU: on"


def test_results_of_another_machine(command, machine, monkeypatch, capsys):
    """Where machines share a file system: nothing of theirs is mixed."""
    command({"it": Stage([python("")])})
    monkeypatch.setattr(validate, "driver_platform", lambda: "nvidia")
    monkeypatch.setattr(validate, "found_gpus", lambda: ["NVIDIA H200"])
    before = (machine.out / "results.json").read_text()
    with pytest.raises(SystemExit):
        command({"it": Stage([python("")])})
    assert "expected results of NVIDIA H200, found those of a CPU: name another" in capsys.readouterr().err
    assert (machine.out / "results.json").read_text() == before


def test_archive_and_page(command, machine, capsys, monkeypatch):
    table = machine.out / "good/table.md"
    good = [python(f"open({str(table)!r}, 'w').write('| a table |'); print('x' * 2**20)")]
    stages = {
        "good": Stage([*good, python("print('7 passed in 1 s')")]),
        "machine": Stage([python(f"print({MACHINE!r}); exit(1)")]),
    }
    command(stages)
    archive = machine.out / "validation.tar.gz"
    with tarfile.open(archive) as tar:
        sizes = {entry.name: entry.size for entry in tar}
    assert sizes["validation/good/console.log"] == validate.LOG_BYTES and archive.stat().st_size < 1 << 20
    monkeypatch.setattr(sys, "argv", ["report", "validation", str(archive)])
    from llamac.report.command import main

    capsys.readouterr()
    main()
    page = capsys.readouterr().out
    assert page.startswith("# cpu\n\nValidation of llamac ") and "llamac 0.0.0" in page
    assert "| machine | failed | python" in page and "| good | passed | 7 passed in 1 s | " in page
    assert "## machine failed\n\n```\nFAIL  IOMMU: on\n```" in page
    assert "ok    torch: 2.11\n" in page and "/home/me" not in page, "without the user's folder"
    assert "| a table |" not in page, "of a CPU's emulated kernels"
    read = validation.read(archive)
    gpu = validation.render(replace(read, results=read.results | {"platform": "nvidia", "commit": "other"}))
    assert gpu.endswith("| a table |\n")
    assert f"7 passed in 1 s (at {read.results['commit']}) |" in gpu
    to = machine.out / "page.md"
    validation.main([str(archive), "--to", str(to)])
    assert to.read_text() == page


@pytest.mark.parametrize(
    "log, found",
    [
        ("7 passed\n9 passed in 2 s | x", "9 passed in 2 s / x"),
        ("all is well", "all is well"),
        ("nothing failed; not checked: GPU", "nothing failed; not checked: GPU"),
        ("largest difference of losses: 0", "largest difference of losses: 0"),
        ("matmul: ratio 0.5", "matmul: ratio 0.5"),
        ("nothing", ""),
    ],
)
def test_what_a_stage_found(log, found):
    assert validation._found({"status": "passed"}, f"begin\n{log}\nend\n") == found


def test_no_archive(tmp_path):
    (tmp_path / "x").write_bytes(b"no archive")
    with tarfile.open(tmp_path / "other", "w:gz") as tar:
        entry = tmp_path / "results.json"
        entry.write_text(json.dumps({"format": "another", "stages": []}))
        tar.add(entry, "validation/results.json")
    for name, expected in [("x", "expected what `make validate` writes"), ("missing", "No such file"),
                           ("other", "format: expected llamac validation 1, found .another")]:  # fmt: skip
        refuses(expected, validation.read, tmp_path / name)


@pytest.mark.parametrize(
    "other, expected",
    [
        ([2.0, 1.5, 1.0], "largest difference of losses in 3 steps: 0.0e+00"),
        ([2.0, 1.501, 1.0], "largest difference of losses in 3 steps: 1.0e-03"),
        ([2.0, 1.6, 1.0], "loss of step 2: expected a difference of at most 0.002, found 1.5 of a, 1.6 of b"),
        ([2.0, None, 1.0], "loss of step 2"),
        ([2.0, 1.5], "a has 3 steps, b 2"),
        ([], "a has 3 steps, b 0"),
    ],
)
def test_losses_of_two_runs(tmp_path, other, expected):
    for name, losses in (("a", [2.0, 1.5, 1.0]), ("b", other)):
        (tmp_path / name).mkdir()
        events = [{"event": "step", "step": i + 1, "loss": loss} for i, loss in enumerate(losses)]
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    right, found = validate.compare(tmp_path / "a", tmp_path / "b")
    assert found.startswith(expected) and right == expected.startswith("largest difference")


@pytest.mark.parametrize(
    "engines, lacking",
    [
        ("Gloo, no MPI", ""),
        ("no Gloo, MPI", "needs Gloo: apt-get install libgloo-dev, then make validate STAGES=devices"),
        ("Gloo, MPI, no RCCL", "needs RCCL: apt-get install rccl-dev, then make validate STAGES=devices"),
    ],
)
def test_a_build_that_cannot_have_several_devices(machine, engines, lacking):
    machine.program.write_text(f"#!/bin/sh\necho 'llamac 0.0.0'\necho 'engines   {engines}'\n")
    stage = validate.devices_stage(machine)
    assert stage.without == lacking
    if lacking:
        assert validate.try_stage("devices", stage, machine, 60)["reason"] == lacking


@pytest.mark.parametrize("platform, gpus", [("cpu", 0), ("nvidia", 1), ("nvidia", 2), ("amd", 8)])
def test_stages_of_each_platform(machine, tmp_path, platform, gpus):
    machine.program.write_text("#!/bin/sh\necho 'engines   Gloo, no MPI'\n")
    found = validate.stages(Machine(platform, machine.build, tmp_path, gpus * ["A"], False))
    assert bool(found["devices"].without) == (gpus == 1)
    assert bool(found["memory"].without) or platform == "nvidia"
    assert ("train" in found) == (platform == "cpu") and all(stage.commands for stage in found.values())
    for stage in found.values():  # what they call is there
        for command in stage.commands:
            for word in map(str, command):
                if word.endswith(".py") and not word.startswith("tests/"):
                    assert Path(word).is_file()
                assert not word.startswith("tests/") or (ROOT / word).is_file()
