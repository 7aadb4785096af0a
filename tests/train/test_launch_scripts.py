"""dev/launch: two processes of a CPU build, under an imitated srun, and under Slurm where it is there."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from launch import needs
from run import ROOT, flags, numbers

pytestmark = pytest.mark.program
SCRIPTS = ["slurm.sbatch", "frontier.sbatch"]
SHORT = {"steps": 4, "batch_size": 2, "val_every": 0, "val_data": "none"}
# Of one node with two CPUs and eight devices that nobody opens.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
GresTypes=gpu
NodeName=localhost NodeAddr=127.0.0.1 CPUs=2 Gres=gpu:8
PartitionName=batch Nodes=ALL Default=YES
"""
SRUN = """#!/bin/bash
echo "$*" >srun.arguments
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_JOB_ID=$$ SLURM_NTASKS=2 SLURM_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=localhost
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" &
SLURM_PROCID=1 SLURM_LOCALID=1 "$@"
wait $!
"""


@pytest.fixture
def folder(build, tmp_path) -> Path:
    """A checkout, as far as the scripts know it."""
    needs(build, "GLOO")
    shutil.copytree(ROOT / "dev/launch", tmp_path / "dev/launch")
    (tmp_path / "train_llama3").symlink_to(build / "train_llama3")
    return tmp_path


@pytest.fixture(scope="module")
def expected(build, train, data, tmp_path_factory) -> list[tuple]:
    """What the same run with --devices 2 logs."""
    needs(build, "GLOO")
    out = tmp_path_factory.mktemp("devices") / "out"
    train(*flags(data, out, **SHORT, devices=2))
    return numbers(out)


def environment(**variables: object) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return os.environ | own | {name: str(value) for name, value in variables.items()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_imitated_slurm(folder, data, gpu, expected, script):
    if gpu and script == "frontier.sbatch":
        pytest.skip("the script has NCCL use Frontier's network interfaces")
    programs = folder / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN)
    (programs / "srun").chmod(0o755)
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": folder,
        "SLURM_CPUS_PER_TASK": 1,
    }
    command = ["bash", folder / "dev/launch" / script, *flags(data, folder / "out", **SHORT)]
    subprocess.run(command, check=True, cwd="/", env=environment(**variables), timeout=120)
    assert numbers(folder / "out") == expected
    assert "--kill-on-bad-exit=1 --cpus-per-task=1 " in (folder / "srun.arguments").read_text()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[dict[str, object]]:
    """Slurm's daemons on the loopback; the variable by which its programs find them."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for Slurm's daemons")
    for tool in ("munged", "slurmctld", "slurmd", "sbatch"):
        if not shutil.which(tool):
            pytest.skip(f"needs {tool} (Debian: slurm-wlm, munge)")
    folder = tmp_path_factory.mktemp("slurm")
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    for parent in [folder, *folder.parents]:  # munge: others cannot change it, and all can enter
        if parent != Path("/tmp"):
            parent.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, ports=ports))
    for device in range(8):
        (folder / f"gpu{device}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    variables = {"SLURM_CONF": folder / "slurm.conf"}
    daemons = []
    try:
        for command in (
            ["munged", "--foreground", f"--key-file={folder}/key", f"--socket={folder}/munge.socket"]
            + [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")],
            ["slurmctld", "-D", "-c"],
            ["slurmd", "-D", "-N", "localhost"],
        ):
            with open(folder / f"{command[0]}.log", "w") as log:
                pipes = {"stdout": log, "stderr": log}
                daemons.append(subprocess.Popen(command, env=environment(**variables), **pipes))
            time.sleep(0.5)
        deadline = time.monotonic() + 20
        info = {"env": environment(**variables), "capture_output": True, "text": True}
        while "idle" not in subprocess.run(["sinfo", "--noheader"], **info).stdout:
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
                logs = [path.read_text()[-300:] for path in sorted(folder.glob("*.log"))]
                pytest.skip(f"Slurm does not start here: {logs}")
            time.sleep(0.2)
        yield variables
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait()


@pytest.mark.parametrize("script", SCRIPTS)
def test_slurm(folder, data, expected, slurm, script):
    """As on nodes of eight devices, but for the numbers of processes and cores."""
    command = ["sbatch", "--wait", f"--output={folder}/job", "--ntasks-per-node=2", "--gpus-per-node=2"]
    command += ["--cpus-per-task=1", folder / "dev/launch" / script, *flags(data, folder / "out", **SHORT)]
    done = subprocess.run(
        command, cwd=folder, env=environment(**slurm), capture_output=True, text=True, timeout=120
    )
    said = (folder / "job").read_text() if (folder / "job").exists() else ""
    assert done.returncode == 0, done.stderr + said
    assert numbers(folder / "out") == expected


def test_frontier_loads_its_modules(tmp_path):
    """The module command is a function of the shell that reads variables which are not set."""
    program = tmp_path / "srun"
    program.write_text('#!/bin/sh\necho "$LOADED: $FI_CXI_RDZV_PROTO"\n')
    program.chmod(0o755)
    module = '() { echo "$LMOD_IS_NOT_SET" >/dev/null; export LOADED="$*"; }'
    variables = {"BASH_FUNC_module%%": module, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    variables |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK": "1"}
    command = ["bash", ROOT / "dev/launch/frontier.sbatch"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("load rocm rccl-net-plugin: alt_read\n", "")


@pytest.mark.parametrize("names", [[], ["HIP_VISIBLE_DEVICES", "HSA_NO_SCRATCH_RECLAIM", "LD_LIBRARY_PATH"]])
def test_what_mpirun_hands_on(tmp_path, names):
    program = tmp_path / "mpirun"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/", "OTHER": "1"} | dict.fromkeys(names, "1")
    command = [ROOT / "dev/launch/mpirun.sh", "node1:8,node2:8", "--steps", "3"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    exports = "".join(f" -x {name}" for name in sorted(names))
    assert done.stdout == f"--host node1:8,node2:8 --bind-to none{exports} ./train_llama3 --steps 3\n"


def test_mpirun(build, folder, data, expected):
    needs(build, "MPI")
    command = [folder / "dev/launch/mpirun.sh", "localhost:2", *flags(data, folder / "out", **SHORT)]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
    subprocess.run(command, check=True, cwd="/", env=environment(**allowed), timeout=120)
    assert numbers(folder / "out") == expected
    wrong = subprocess.run([command[0], "--steps", "3"], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "node1:8,node2:8" in wrong.stderr
