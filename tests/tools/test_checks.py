"""A check that checks nothing fails. tests/check.h: check programs list their checks, and run those whose
names contain an argument."""

import re
import subprocess

import pytest


@pytest.fixture
def check_log(build):
    """Runs check_log, which is quick."""

    def run(*words) -> subprocess.CompletedProcess:
        return subprocess.run([build / "check_log", *words], capture_output=True, text=True)

    return run


def passed(result) -> int:
    found = re.search(r"^(\d+) passed, 0 failed\n\Z", result.stdout, re.MULTILINE)  # behind lines of a log
    assert found and result.returncode == 0, result.stdout
    return int(found[1])


@pytest.mark.slow
def test_lists_and_filters(check_log):
    names = check_log("--list").stdout.split()
    parts = ("log", "divergence", "saturated", "truncate_log")
    assert names == [f"check_{part}" for part in parts]
    each = [passed(check_log(f"check_{part}")) for part in parts]
    assert all(each) and sum(each) == passed(check_log())
    assert passed(check_log("check_log", "check_truncate")) == each[0] + each[3]


def test_a_program_without_checks_fails(build):
    result = subprocess.run([build / "checks"], capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith("checks: no source of this name has checks")


def test_refuses_a_name_that_is_none(check_log):
    result = check_log("truncate", "nonsense")
    assert result.returncode == 2 and not result.stdout
    assert result.stderr == "expected a part of a check's name, found nonsense; --list shows the names\n"


@pytest.mark.parametrize(
    "command, found",
    [
        ("check_operations --operation rmsnorm", "--operation rmsnorm, --variant any, --where any"),
        ("check_operations --variant fast --where host", "--variant fast, --where host"),
        ("check_operations --where gpu", "[--where host|device]"),
        ("check_operations --every 0", "[--every N]"),
        pytest.param(
            "rmsnorm_forward --preset tiny --variant cpu",
            "--variant cpu, --dtype bf16",
            marks=pytest.mark.more,
        ),
        pytest.param(
            "matmul_forward --preset tiny --variant vectorized",
            "--variant vectorized",
            marks=pytest.mark.more,
        ),
    ],
)
def test_nothing_to_check_is_an_error(build, command, found):
    program, *flags = command.split()
    result = subprocess.run([build / program, *flags], capture_output=True, text=True)
    assert result.returncode == 2 and not result.stdout
    assert result.stderr.count("\n") == 1 and found in result.stderr


@pytest.mark.more
def test_an_emulated_kernel_is_not_timed(build, gpu):
    if gpu:
        pytest.skip("its kernels are timed")
    command = [build / "rmsnorm_forward", "--preset", "tiny", "--variant", "naive"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "emulated, so checked and not timed" in said and "GB/s" not in said and " naive " in said
