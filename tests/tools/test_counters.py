"""llamac.profile.counters: the readers, on text in the form that the tools document (no tool has written it),
and the command with programs that stand in for ncu and rocprofv3.
"""

import json
import sys
from dataclasses import replace

import pytest

from llamac.base.errors import InputError, run
from llamac.profile import counters, profile
from llamac.profile.counters import NCU, ROCPROF, TIME
from llamac.report.profile import picture

OPERATIONS = {"matmul_forward", "rmsnorm_forward"}
RANGES = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
METRICS = [TIME, *counters._names(NCU)]


def line(cells) -> str:
    return ",".join('"' + str(cell).replace('"', '""') + '"' for cell in cells) + "\n"


def launch(k: int, around: list[str], kernel: str, seconds: float, **values: float) -> list:
    """A row of ncu's raw page: every metric 1 but those of `values`, by the beginning of their names."""
    stack = "".join(f'7  "<default domain>:{name}:none:none:none:none:none:none"' for name in around)
    found = [next((v for key, v in values.items() if name.startswith(key)), 1) for name in METRICS]
    found[0] = f"{round(1e9 * seconds):,}"
    return [k, 7, stack, kernel, *found]


NCU_TEXT = (
    "==PROF== Connected to process 7\n"
    + line(["ID", "Process ID", RANGES, "Kernel Name", *METRICS])
    + line(["", "", "", "", "ns", *["x"] * len(NCU), "x"])
    + line(launch(0, ["step 2", "forward", "matmul_forward"], "nvjet_tst", 3e-3, sm__pipe_tensor=80))
    + line(launch(1, ["step 2", "forward", "matmul_forward"], "splitK", 1e-3, sm__pipe_tensor=0))
    + line(
        launch(
            2, ["step 2", "rmsnorm_forward"], "rmsnorm_forward_vectorized_kernel", 1e-3,
            l1tex=5, sm__cycles=50, dram__bytes_read=3e12,
        )
    )
    + line(launch(3, ["step 2"], "memset", 1e-3))
    + "==PROF== Disconnected from process 7\n"
)  # fmt: skip


def test_ncu(tmp_path):
    path = tmp_path / "ncu.csv"
    path.write_text(NCU_TEXT)
    samples = counters.read_ncu(path, OPERATIONS)
    assert [s.operation for s in samples] == ["matmul_forward", "matmul_forward", "rmsnorm_forward", ""]
    found = counters.join(samples, NCU)
    assert set(found) == OPERATIONS
    product, norm = found["matmul_forward"], found["rmsnorm_forward"]
    assert product.kernels == 2 and product.matrix == pytest.approx(60), "weighted by time"
    assert norm.conflicts == pytest.approx(10) and norm.read_gbps == pytest.approx(3000)


@pytest.mark.parametrize(
    "change, message",
    [
        (("Push/Pop_Range", "Ranges"), "expected a column Push/Pop_Range (of --nvtx), found ID, Process ID"),
        ((TIME, "duration"), f"expected a column {TIME}, found ID"),
        (('"ns"', '"msecond"'), f"{TIME}: expected the unit ns, found 'msecond'"),
        (('"3,000,000"', '"n/a"'), f"{TIME}: expected a number, found 'n/a'"),
        (('"ID"', "No kernels\n"), 'expected a line that begins with "ID", found none; the last is: =='),
        (('"memset",', ""), "launch 3: expected 14 cells, found 13"),
    ],
)
def test_what_ncu_does_not_write(tmp_path, change, message):
    path = tmp_path / "ncu.csv"
    path.write_text(NCU_TEXT.replace(*change))
    with pytest.raises(InputError) as error:
        counters.read_ncu(path, OPERATIONS)
    assert str(error.value).startswith(f"{path}: {message}")


ROCPROF_HEADING = ["Correlation_Id", "Dispatch_Id", "Agent_Id", "Queue_Id", "Process_Id", "Thread_Id",
                   "Grid_Size", "Kernel_Id", "Kernel_Name", "Workgroup_Size", "LDS_Block_Size",
                   "Scratch_Size", "VGPR_Count", "SGPR_Count", "Counter_Name", "Counter_Value",
                   "Start_Timestamp", "End_Timestamp"]  # fmt: skip


def rocprof_text(*rows: tuple[int, str, float, str, float]) -> str:
    """Dispatch, kernel's name, milliseconds, counter and value of each row."""
    text = line(ROCPROF_HEADING)
    for k, name, ms, counter, value in rows:
        numbers = [k, k, 4, 1, 9, 9, 4096, 3]
        text += line([*numbers, name, 256, 0, 0, 32, 16, counter, value, 1000, 1000 + round(1e6 * ms)])
    return text


def test_rocprofv3(tmp_path):
    one, two = tmp_path / "1.csv", tmp_path / "2.csv"
    rows = [(1, "matmul_forward", 1, "SQ_VALU_MFMA_BUSY_CYCLES", 800)]
    rows += [(1, "matmul_forward", 1, "SQ_BUSY_CU_CYCLES", 100), (2, "step 2", 1, "SQ_BUSY_CU_CYCLES", 7)]
    one.write_text(rocprof_text(*rows))
    two.write_text(rocprof_text((1, "matmul_forward", 2, "FETCH_SIZE", 2_000_000)))
    samples = counters.read_rocprof(one, OPERATIONS) + counters.read_rocprof(two, OPERATIONS)
    (found,) = counters.join(samples, ROCPROF).values()
    assert found.kernels == 1, "the same kernel in two runs"
    assert found.matrix == pytest.approx(50) and found.read_gbps == pytest.approx(1024)
    assert found.vector is None and found.write_gbps is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected a column Dispatch_Id, found an empty file"),
        (line(ROCPROF_HEADING[:-1]), "expected a column End_Timestamp, found Correlation_Id"),
        (rocprof_text((1, "x", 1, "FETCH_SIZE", "?")), "Counter_Value: expected a number, found '?'"),
        (line(ROCPROF_HEADING) + '"1","1"\n', "line 2: expected 18 cells, found fewer"),
    ],
)
def test_what_rocprofv3_does_not_write(tmp_path, text, message):
    path = tmp_path / "counter_collection.csv"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        counters.read_rocprof(path, OPERATIONS)
    assert str(error.value).startswith(f"{path}: {message}")


def test_every_counter_is_in_a_pass():
    passes = [name for group in counters.PASSES for name in group]
    assert sorted(passes) == sorted(counters._names(ROCPROF))
    assert set(NCU) == set(ROCPROF) == set(vars(counters.Counters(0, *[None] * 8))) - {"kernels"}


# The command


@pytest.fixture
def out(tmp_path):
    """The folder of a profiled run on a GPU, and a program to run again."""
    folder = tmp_path / "out"
    folder.mkdir()
    totals = {"calls": 2, "flops": 1e9, "bytes": 1e6}
    rows = [{"operation": name, "variant": "library", "seconds": 0.1} | totals for name in sorted(OPERATIONS)]
    device = {"name": "Abacus", "gpu": True, "peak_tflops": 100, "copy_gbps": 1000}
    values = {"device": device, "steps": 2, "seconds": 0.2, "idle_seconds": 0, "operations": rows}
    (folder / "profile.json").write_text(json.dumps(values))
    start = {"event": "start", "time": "x", "batch-size": 2, "seq-len": 16, "total-batch-size": 64,
             "steps": 9}  # fmt: skip
    start |= {"shard-group": 2, "kernel": ["a=b", "c=d"], "graphs": "on", "out": str(folder), "profile": 3}
    (folder / "log.jsonl").write_text(json.dumps(start) + "\n")
    (tmp_path / "train_llama3").write_text("")
    return folder


@pytest.fixture
def command(out, tmp_path, monkeypatch, capsys):
    """command(tool's name, its Python code): exit code, stdout and stderr of --counters with it."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()

    def call(name: str = "", code: str = "") -> tuple[int, str, str]:
        if name:
            tool = tmp_path / "bin" / name
            tool.write_text(
                f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\na = sys.argv\n{code}\n"
            )
            tool.chmod(0o755)
        monkeypatch.setattr(
            sys, "argv", ["profile.py", str(out), "--counters", "--program", str(tmp_path / "train_llama3")]
        )
        exit_code = 0
        try:
            run(profile.main)
        except SystemExit as end:
            exit_code = int(end.code or 0)
        said = capsys.readouterr()
        return exit_code, said.out, said.err

    return call


LIST = "if '--query-metrics' in a or '--list-avail' in a: print({names!r}); sys.exit()\n"
NCU_LIST = LIST.format(names=" ".join(name.split(".")[0] for name in METRICS if "inst_executed" not in name))


def write_log(text: str) -> str:
    return f"Path(a[a.index('--log-file') + 1]).write_text({text!r})"


def test_the_command_with_ncu(command, out):
    exit_code, said, errors = command("ncu", NCU_LIST + write_log(NCU_TEXT) + "\nprint(a)")
    assert exit_code == 0, errors
    assert (
        errors == "ncu does not list sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active: left out\n"
    )
    table = [row.split() for row in said.splitlines()]
    assert ["matmul_forward", "library", "2", "60"] in [row[:4] for row in table]
    words = (out / "counters/console.log").read_text()
    for expected in ("'--graphs', 'off'", "'--steps', '2'", "'--kernel', 'a=b', '--kernel', 'c=d'",
                     "'--total-batch-size', '32'", "'--shard-group', '0'",
                     "'--clock-control', 'none'"):  # fmt: skip
        assert expected in words


def test_the_command_with_rocprofv3(command, out):
    names = LIST.format(names="".join(f"Name:{name}\n" for name in counters._names(ROCPROF)))
    heading, row = rocprof_text((1, "matmul_forward", 1, "NAME", 2e3)).splitlines()
    code = "to = Path(a[a.index('-d') + 1]) / 'host'; to.mkdir(parents=True)\n"
    code += "names = a[a.index('--pmc') + 1 : a.index('--')]\n"
    code += f"text = '\\n'.join([{heading!r}, *({row!r}.replace('NAME', name) for name in names)])\n"
    code += "(to / '7_counter_collection.csv').write_text(text + '\\n')"
    exit_code, said, errors = command("rocprofv3", names + code)
    assert (exit_code, errors) == (0, "")
    row = [words for words in map(str.split, said.splitlines()) if words[:1] == ["matmul_forward"]][-1]
    assert row[1:5] == ["library", "1", "6", "25"], "shares of SQ_BUSY_CU_CYCLES"
    assert row[-2:] == ["2", "2"], "GB/s"
    assert len(list((out / "counters").glob("pass_*.log"))) == len(counters.PASSES)


@pytest.mark.parametrize(
    "name, code, message",
    [
        ("", "", "expected ncu (NVIDIA) or rocprofv3 (AMD) on PATH, found neither"),
        ("ncu", "print('nothing')", "ncu: expected a list of this device's counters, found none of ours"),
        ("ncu", NCU_LIST + "print('ERR_NVGPUCTRPERM'); sys.exit(1)", "found ERR_NVGPUCTRPERM; run"),
        ("ncu", NCU_LIST + "print('no device'); sys.exit(3)", "expected exit status 0, found 3: no device"),
        ("ncu", NCU_LIST, "ncu.csv: expected a file, found none"),
        (
            "ncu",
            NCU_LIST + write_log(NCU_TEXT.replace("_forward:", ":")),
            "expected kernels within ranges of operations, found none among 4",
        ),
        (
            "rocprofv3",
            LIST.format(names="FETCH_SIZE"),
            "pass_4: expected a file *counter_collection.csv, found none",
        ),
    ],
)  # fmt: skip
def test_a_tool_that_fails(command, name, code, message):
    exit_code, said, errors = command(name, code)
    last = errors.splitlines()[-1]
    assert (exit_code, said) == (2, "") and message in last
    assert len([row for row in errors.splitlines() if "left out" not in row]) == 1


@pytest.mark.parametrize("change, found", [({"gpu": False}, "a run on Abacus"), ({}, "a run in PyTorch")])
def test_a_run_without_counters(command, out, change, found):
    values = json.loads((out / "profile.json").read_text())
    values["device"] |= change
    (out / "profile.json").write_text(json.dumps(values | ({} if change else {"runtime": "PyTorch"})))
    exit_code, _, errors = command()
    assert exit_code == 2 and f"expected a run of the program on a GPU, found {found}" in errors


def test_findings():
    c = counters.Counters(4, 30, 20, 15, 70, 12, 50, 900, 100)
    compute = counters.findings(c, "compute", 100)
    assert len(compute) == 3 and "matrix units work 30%" in compute[0] and "bank conflicts" in compute[1]
    assert "fewer registers" in compute[2]
    assert "10.0 times the bytes" in counters.findings(c, "memory", 100)[0]
    fine = replace(c, matrix=70, stalled=10, conflicts=0)
    assert counters.findings(fine, "compute", 100) == [] and counters.findings(fine, "memory", 900) == []


def test_findings_of_l2_and_vector_units():
    c = counters.Counters(4, 30, 75, 50, 10, 0, 20, 900, 100)
    memory = counters.findings(c, "memory", 100)
    assert memory[0].endswith("and L2 has only 20% of the accesses: use data again sooner")
    assert memory[1].startswith("the vector units work 75%") and len(memory) == 2
    (compute,) = counters.findings(c, "compute", 100)
    assert compute.startswith("the matrix units work 30% of the time, the vector units 75%")
    few = replace(c, vector=20, l2_hits=90)
    assert counters.findings(few, "memory", 100) == [memory[0].split(", and")[0]]


def kernel(**more) -> dict:
    given = {"operation": "matmul", "variant": "tiled", "vgpr": 64, "agpr": 128, "lds": 4096, "waves": 2}
    return given | more


def test_resources(tmp_path):
    path = tmp_path / "resources.json"
    loop = {"MFMA": 64, "most": 53}
    path.write_text(
        json.dumps({"kernels": [kernel(vgpr=8, agpr=0, loop={}), kernel(loop=loop)], "faults": []})
    )
    (found,) = counters.read_resources(path)
    assert found.text() == "64+128 VGPR, LDS 4096, waves 2, loop 53%"
    assert found.of("matmul_forward", "tiled") and not found.of("matmul_forward", "naive")
    row = profile.Row("matmul_forward", "tiled", 1, 1.0, 0.5e12, 0.0)
    p = profile.Profile("Abacus", True, 1.0, 1.0, 1, 1.0, 0.0, (row,), compiled=(found,))
    assert any(text.endswith(found.text()) for text in profile.report(p).splitlines())
    assert "gfx942's loop reaches at most 53%" in profile.advice(p)[0]
    low, fine = replace(found, loop=90, waves=1), replace(found, loop=90)
    assert "room for 1 waves" in low.findings("compute")[0] and fine.findings("compute") == []
    assert "with 192 registers and 4096 bytes of LDS" in fine.findings("memory")[0]
    for text, message in [
        ("3", "expected an object, found 3"),
        ('{"kernels": [{}]}', "kernels[0].operation: expected"),
        (
            json.dumps({"kernels": [kernel(loop="x")]}),
            "kernels[0].loop: expected an integer or an object",
        ),
    ]:
        path.write_text(text)
        with pytest.raises(InputError) as error:
            counters.read_resources(path)
        assert str(error.value).startswith(f"{path}: {message}")


def test_what_was_found_is_kept(command, out, tmp_path, monkeypatch):
    """In profile.json: in the report of a later call, and on the page."""
    exit_code, _, errors = command("ncu", NCU_LIST + write_log(NCU_TEXT))
    assert exit_code == 0, errors
    path = tmp_path / "resources.json"
    path.write_text(json.dumps({"kernels": [kernel(variant="library", loop={"most": 53})]}))
    monkeypatch.setattr(sys, "argv", ["profile.py", str(out), "--resources", str(path)])
    profile.main()
    kept = profile.read(out / "profile.json")
    assert kept.counters["matmul_forward"].matrix == pytest.approx(60) and kept.compiled[0].loop == 53
    table = picture(out / "profile.json")[0]["counters"]
    assert table[0][:4] == ["operation", "variant", "kernels", "matrix %"] and table[0][-1] == "gfx942"
    (row,) = [cells for cells in table if cells[0] == "matmul_forward"]
    assert row[:4] == ["matmul_forward", "library", "2", "60"] and row[-1].endswith("loop 53%")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"counters": 3}, "counters: expected an object or null, found 3"),
        ({"counters": {"x": 3}}, "counters.x: expected an object, found 3"),
        ({"counters": {"x": {"kernels": "1"}}}, 'counters.x.kernels: expected a number, found "1"'),
        ({"counters": {"x": {"kernels": True}}}, "counters.x.kernels: expected a number, found true"),
        ({"compiled": [3]}, "compiled[0]: expected an object, found 3"),
    ],
)
def test_bad_counters_of_a_profile(out, change, message):
    path = out / "profile.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError) as error:
        profile.read(path)
    assert str(error.value) == f"{path}: {message}"
