"""Runs over two nodes: network namespaces and a wire; each has its own processes, host name and /tmp.

They share the checkout and one folder, as the nodes of a cluster share a file system.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launch import needs
from run import ROOT, T, assert_same_state, events, flags, losses, numbers, until_logged, write_model

pytestmark = pytest.mark.program
PORT = 29500  # nobody else is in these networks
SETUP = """
set -e
hostname "$1"
exec 3<"$2" 4<"$3"                        # what the nodes share may be in the /tmp that they do not
mount -t tmpfs none /tmp
mount -t tmpfs none /dev/shm
mkdir -p "$2" "$3"
mount --no-canonicalize --bind /proc/self/fd/3 "$2"
mount --no-canonicalize --bind /proc/self/fd/4 "$3"
ip link set lo up
touch "$3/$1.is_up"
mkfifo "$3/$1"                            # mpirun's way to start a process here
exec 5<>"$3/$1"                           # open for writing, too: it has no end when a writer closes it
while read -r command <&5; do sh -c "$command" 5<&- & done
"""
# As ssh would be called: the node's address, and words of a command. mpirun may pass ssh's flags before them.
AGENT = """#!/bin/sh
node=node$((${1##*.} - 1))
shift
echo "$*" >"$(dirname "$0")/$node"
"""


class Node:
    """A network of its own; its processes end with the first one."""

    def __init__(self, number: int, shared: Path):
        self.name, self.address = f"node{number}", f"10.77.0.{number + 1}"
        names = ["--net", "--mount", "--uts", "--ipc", "--pid"]
        start = ["unshare", *names, "--fork", "--kill-child", "--mount-proc"]
        self.outer = subprocess.Popen(
            [*start, "sh", "-c", SETUP, "sh", self.name, ROOT, shared],
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 20
        while not (shared / f"{self.name}.is_up").exists():
            if self.outer.poll() is not None or time.monotonic() > deadline:
                said = self.outer.communicate()[1] if self.outer.poll() is not None else "no answer"
                pytest.skip(f"no namespaces of its own here: {said.strip()[-200:]}")
            time.sleep(0.01)
        children = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children").read_text()
        self.first = int(children.split()[0])
        # Keeps the wire until the other node has heard of the ends of connections.
        self.network = os.open(f"/proc/{self.first}/ns/net", os.O_RDONLY)
        self.enter = ["nsenter", "--target", str(self.first), "--net", "--mount", "--uts", "--ipc", "--pid"]

    def run(self, *command: object) -> str:
        return subprocess.run([*self.enter, *command], check=True, capture_output=True, text=True).stdout

    def start(self, *command: object, **variables: object) -> subprocess.Popen:
        own = {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*self.enter, f"--wd={ROOT}", *command],
            env=os.environ | own | {name: str(value) for name, value in variables.items()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def expect_nothing_left(self) -> None:
        """No process but the first one; what was told to end has a few seconds."""
        deadline = time.monotonic() + 5
        while True:
            rows = [row.split(None, 2) for row in self.run("ps", "-A", "-o", "pid=,stat=,args=").splitlines()]
            # Its first process waits for no child, so that those that have ended stay.
            others = [row for row in rows if row[0] != "1" and not row[2].startswith("ps ")]
            left = [row for row in others if row[1][0] != "Z"]
            if not left:
                return
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def kill(self) -> None:
        if self.outer.poll() is None:
            os.kill(self.first, signal.SIGKILL)
        self.outer.wait()


@pytest.fixture
def shared(tmp_path, data) -> Path:
    """The folder that both nodes see, with the tokens."""
    folder = tmp_path / "shared"
    shutil.copytree(data, folder / "data")
    agent = folder / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    return folder


@pytest.fixture
def nodes(shared) -> Iterator[list[Node]]:
    if os.geteuid() != 0:
        pytest.skip("needs root, for namespaces")
    for tool in ("unshare", "nsenter", "ip", "ps"):
        if not shutil.which(tool):
            pytest.skip(f"needs {tool} (Debian: util-linux, iproute2, procps)")
    made: list[Node] = []
    try:
        for number in range(2):
            made.append(Node(number, shared))
        wire = ["ip", "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns",
                str(made[1].first)]  # fmt: skip
        try:
            # The peer's namespace is named by a process, which the other node does not see.
            subprocess.run(["nsenter", "--target", str(made[0].first), "--net", *wire], check=True)
        except subprocess.CalledProcessError:
            pytest.skip("the kernel has no veth devices")
        for node in made:
            node.run("ip", "address", "add", f"{node.address}/24", "dev", "wire")
            node.run("ip", "link", "set", "wire", "up")
        yield made
    finally:
        for node in made:
            node.kill()
            os.close(node.network)


def start_ranks(nodes: list[Node], per_node: int, command: list) -> list[subprocess.Popen]:
    """As torchrun starts them, by rank."""
    return [
        node.start(
            *command,
            RANK=number * per_node + local,
            WORLD_SIZE=len(nodes) * per_node,
            LOCAL_RANK=local,
            LOCAL_WORLD_SIZE=per_node,
            MASTER_ADDR=nodes[0].address,
            MASTER_PORT=PORT,
        )
        for number, node in enumerate(nodes)
        for local in range(per_node)
    ]


def finish(processes: list[subprocess.Popen], seconds: float = 60) -> list[tuple[int, str]]:
    """Exit codes and error lines."""
    deadline = time.monotonic() + seconds
    try:
        said = [p.communicate(timeout=max(0.1, deadline - time.monotonic()))[1] for p in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, said)]


SHORT = {"steps": 2, "val_every": 0, "val_data": "none"}
ENDLESS = {"steps": 1000000, "schedule": "constant", "batch_size": 1, "val_every": 0, "checkpoint_every": 2,
           "keep_checkpoints": 2}  # fmt: skip


@pytest.fixture(scope="module")
def one_node(train, build, data, tmp_path_factory) -> Path:
    """The same run on one node, by four processes, which have the losses of one process."""
    needs(build, "GLOO", 4)
    folder = tmp_path_factory.mktemp("one_node")
    train(*flags(data, folder / "alone", **SHORT, batch_size=4))
    train(*flags(data, folder / "out", **SHORT, batch_size=1, devices=4, zero=3))
    np.testing.assert_allclose(losses(folder / "out"), losses(folder / "alone"), rtol=2e-6)
    return folder / "out"


def test_torchrun(build, shared, nodes, one_node):
    """Two processes per node: the bits of one node, and a checkpoint that both have written."""
    pytest.importorskip("torch.distributed.run")
    assert [node.run("hostname") for node in nodes] == ["node0\n", "node1\n"]
    nodes[0].run("touch", "/tmp/own")
    assert "own" not in nodes[1].run("ls", "/tmp").split()
    out = shared / "out"
    program = [build / "train_llama3", *flags(shared / "data", out, **SHORT, batch_size=1, zero=3)]
    agent = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2"]
    agent += ["--master-addr", nodes[0].address, "--master-port", str(PORT), "--nnodes", "2", "--node-rank"]
    started = [node.start(*agent, str(rank), *program) for rank, node in enumerate(nodes)]
    for code, said in finish(started):
        assert code == 0, said
    assert numbers(out) == numbers(one_node)
    for file in (one_node / "step_000002").glob("*.safetensors"):
        assert (out / "step_000002" / file.name).read_bytes() == file.read_bytes()


def start_mpirun(build: Path, nodes: list[Node], shared: Path, arguments: list) -> subprocess.Popen:
    """dev/launch/mpirun.sh on the first node, one process per node; its way to the second is the agent."""
    if not (shared / "train_llama3").exists():
        shutil.copytree(ROOT / "dev/launch", shared / "dev/launch")
        (shared / "train_llama3").symlink_to(build / "train_llama3")
    network = nodes[0].address.rsplit(".", 1)[0] + ".0/24"
    return nodes[0].start(
        shared / "dev/launch/mpirun.sh",
        ",".join(f"{node.address}:1" for node in nodes),
        *arguments,
        OMPI_ALLOW_RUN_AS_ROOT=1,
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1,
        OMPI_MCA_plm_rsh_agent=shared / "agent",
        OMPI_MCA_oob_tcp_if_include=network,
        OMPI_MCA_btl_tcp_if_include=network,
        OMPI_MCA_mpi_yield_when_idle=1,  # both nodes are on the same cores, which mpirun does not know
    )


def test_mpirun(build, shared, nodes, one_node):
    needs(build, "MPI", 4)
    out = shared / "out"
    arguments = flags(shared / "data", out, **SHORT, batch_size=2)
    ((code, said),) = finish([start_mpirun(build, nodes, shared, arguments)])
    assert code == 0, said
    np.testing.assert_allclose(losses(out), losses(one_node), rtol=2e-6)


def test_a_lost_node_under_mpirun(build, shared, nodes):
    """mpirun ends the other processes."""
    needs(build, "MPI", 4)
    arguments = flags(shared / "data", shared / "lost", **ENDLESS, collective_timeout=5)
    started = start_mpirun(build, nodes, shared, arguments)
    until_logged(shared / "lost", "checkpoint", started)
    nodes[1].kill()
    ((code, said),) = finish([started])
    assert code != 0 and said
    nodes[0].expect_nothing_left()


# --tp inside a node, data parallelism or --pp over both.
MESHES = {"tp 2 dp 2": {"tp": 2}, "tp 2 pp 2": {"tp": 2, "pp": 2}}


@pytest.fixture
def divisible(shared) -> dict:
    """A model whose layers two ranks divide, and four sequences per step."""
    model = write_model(shared, "tied-gqa", intermediate_size=132)
    return model | {"batch_size": 1, "total_batch_size": 4 * T}


@pytest.mark.parametrize(
    "mesh",
    [pytest.param("tp 2 pp 2", marks=pytest.mark.more), pytest.param("tp 2 dp 2", marks=pytest.mark.slow)],
)
def test_a_mesh(train, build, shared, nodes, divisible, mesh):
    """The bits of one node, and a checkpoint that both have written."""
    needs(build, "GLOO", 4)
    more = SHORT | divisible | MESHES[mesh]
    train(*flags(shared / "data", shared / "one", **more, devices=4))
    command = [build / "train_llama3", *flags(shared / "data", shared / "out", **more)]
    for code, said in finish(start_ranks(nodes, 2, command)):
        assert code == 0, said
    assert numbers(shared / "out") == numbers(shared / "one")
    assert_same_state(shared / "out/step_000002", shared / "one/step_000002")


@pytest.mark.parametrize(
    ("mesh", "lost"),
    [
        pytest.param("dp 4", 0, marks=pytest.mark.more),
        ("tp 2 pp 2", 1),
        pytest.param("dp 4", 1, marks=pytest.mark.slow),
        pytest.param("tp 2 pp 2", 0, marks=pytest.mark.slow),
        pytest.param("tp 2 dp 2", 0, marks=pytest.mark.slow),
        pytest.param("tp 2 dp 2", 1, marks=pytest.mark.slow),
    ],
)
def test_a_lost_node(train, build, shared, nodes, divisible, mesh, lost):
    """The other one's processes end, and name a rank of it; the newest checkpoint resumes on what is left."""
    needs(build, "GLOO", 4)
    out = shared / "out"
    more = ENDLESS | divisible | MESHES.get(mesh, {})
    command = [build / "train_llama3", *flags(shared / "data", out, **more, collective_timeout=40)]
    started = start_ranks(nodes, 2, command)
    until_logged(out, "checkpoint", started[0])
    nodes[lost].kill()
    began = time.monotonic()
    left = finish(started)[2 * (1 - lost) :][:2]
    assert time.monotonic() - began < 30  # not when the time is over
    assert [code for code, _ in left] == [2, 2], left
    said = "".join(text for _, text in left)
    assert all(len(text.splitlines()) <= 1 for _, text in left), said
    assert any(f"rank {2 * lost + local} has ended" in said for local in range(2)), said
    nodes[1 - lost].expect_nothing_left()
    newest = int(max(out.glob("step_*")).name[5:])
    again = more | {"steps": newest + 2, "resume": "auto", "devices": 2, "pp": 1}
    train(*flags(shared / "data", out, **again))
    assert [e["step"] for e in events(out, "step")] == list(range(1, newest + 3))


def test_a_cut_wire(build, shared, nodes):
    """Nobody learns that the other node is away: both end when --collective-timeout is over."""
    needs(build, "GLOO", 4)
    out = shared / "out"
    command = [build / "train_llama3", *flags(shared / "data", out, **ENDLESS, collective_timeout=3)]
    started = start_ranks(nodes, 1, command)
    until_logged(out, "step", started[0])
    nodes[1].run("ip", "link", "set", "wire", "down")
    for number, (code, said) in enumerate(finish(started, 30)):
        assert code == 2 and len(said.splitlines()) == 1, said
        assert f"rank {1 - number} did not answer in time, as rank {number} found" in said
    for node in nodes:
        node.expect_nothing_left()
