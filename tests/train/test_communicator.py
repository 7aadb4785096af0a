"""Collectives between processes: check_communicator, one process per rank, as each launcher starts it."""

import os
import socket
import subprocess
import sys
import threading

import pytest
from launch import as_ranks, free_port, has, needs, torchrun_environment
from run import one_line

pytestmark = pytest.mark.program


@pytest.mark.parametrize("ranks", [pytest.param(3, marks=pytest.mark.more), 4])  # two: test_torchrun
def test_gloo(build, ranks):
    needs(build, "GLOO")
    for code, text in as_ranks([build / "check_communicator"], ranks, {}, "stdout"):
        assert code == 0 and " 0 failed" in text, text
        assert int(text.split()[-4]) > 80


def test_ranks_choose_the_same_algorithms(build):
    """Of the vendor's library, whatever their own caches keep: check_gemm.cpp."""
    needs(build, "GLOO")
    if not (build / "check_gemm").exists():
        pytest.skip("this build has no stand-in for the vendor's library")
    for code, text in as_ranks([build / "check_gemm"], pipe="stdout"):
        assert code == 0 and " 0 failed" in text, text


def test_a_rank_that_ends_is_named(build):
    needs(build, "GLOO")
    own = {rank: {"LLAMAC_LAST_ENDS": "1"} for rank in range(3)}
    for code, text in as_ranks([build / "check_communicator"], 3, own, "stdout")[:2]:
        assert code == 0 and " 0 failed" in text, text


def test_mpi(build):
    needs(build, "MPI")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", build / "check_communicator"]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.count(" 0 failed") == 3, done.stdout + done.stderr


def test_torchrun(build):
    pytest.importorskip("torch.distributed.run")
    needs(build, "GLOO")
    # torchrun's agent listens at MASTER_PORT itself meanwhile.
    command = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), build / "check_communicator"]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.count(" 0 failed") == 2, done.stdout + done.stderr


def rank_0_alone(build, ranks: int, port: int) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LLAMAC_SECONDS": "3"}
    environment |= torchrun_environment(0, ranks, port)
    command = [build / "check_communicator"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120).stdout


def test_ranks_that_do_not_come(build):
    """Rank 0 alone: an error that names the others."""
    needs(build, "GLOO")
    text = rank_0_alone(build, 3, free_port())
    assert "expected 3 ranks" in text and "rank 1, 2" in text


def test_a_build_without_gloo(build, train, tmp_path):
    """One line, from the process that would have started the ranks."""
    if has(build, "GLOO"):
        pytest.skip("the build has Gloo")
    done = train("--devices", "2", "--train-data", "none.bin", "--out", tmp_path / "out", code=2)
    assert "libgloo-dev" in one_line(done)


def test_a_port_in_use(build):
    needs(build, "GLOO")
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", port - 8192))
        taken.listen()
        text = rank_0_alone(build, 2, port)
    assert f"port {port - 8192}" in text and "MASTER_PORT" in text


class Relay:
    """Passes connections from one port to another. bytes: per connection, to and from the other one."""

    def __init__(self, port: int, to: int):
        self.to, self.bytes = to, []
        self.listening = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            rank, _ = self.listening.accept()
            try:
                first = socket.create_connection(("127.0.0.1", self.to))
            except OSError:  # rank 0 does not listen yet: the rank tries again
                rank.close()
                continue
            self.bytes.append([0, 0])
            for direction, ends in enumerate([(rank, first), (first, rank)]):
                arguments = (*ends, self.bytes[-1], direction)
                threading.Thread(target=self.copy, args=arguments, daemon=True).start()

    @staticmethod
    def copy(source: socket.socket, to: socket.socket, counts: list[int], direction: int) -> None:
        try:
            while piece := source.recv(65536):
                counts[direction] += len(piece)
                to.sendall(piece)
            to.shutdown(socket.SHUT_WR)
        except OSError:  # rank 0 has another purpose
            to.close()


@pytest.mark.more
def test_the_bytes_of_the_rendezvous(build):
    """A rank gives rank 0 an address for each rank, and gets one of each: not those of all pairs."""
    needs(build, "GLOO")
    ranks, first, others = 8, free_port(), free_port()
    relay = Relay(others - 8192, first - 8192)  # their rendezvous ports
    own = {rank: {"MASTER_PORT": str(others if rank else first)} for rank in range(ranks)}
    for code, text in as_ranks([build / "check_communicator"], ranks, own, "stdout"):
        assert code == 0 and " 0 failed" in text, text
    address = 160  # bytes of Gloo's, with its length
    assert 16 < max(map(max, relay.bytes)) / ranks < address
    assert len([sent for sent in relay.bytes if sent[1] > 0]) == 4 * (ranks - 1)  # its transports
