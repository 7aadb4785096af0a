"""dev/bench_train.py on programs that are scripts, and `llamac bench --hf`."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run import ROOT, refuses

import llamac
from llamac.base.version import provenance
from llamac.bench import command, hf, peers, training
from llamac.data import Loader, write_bin
from llamac.report.plot import read_log
from llamac.training.options import parse

sys.path.insert(0, str(ROOT / "dev"))
import bench_train

PROGRAM = """\
import json, os, sys, time
folder = {folder!r}
with open(folder + "/calls", "a") as calls:
    calls.write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")
compiled = "--compile" in sys.argv
turns = [json.loads(line) for line in open(folder + "/calls")]
first = [turn[0] == {name!r} and ("--compile" in turn) == compiled for turn in turns].count(True) == 1
words = [word for word in sys.argv[1:] if word not in ("--train", "--compile", "script", "hf")]
flags = dict(zip(words[::2], words[1::2]))
log_file = flags.get("--log") or flags.get("--out", "") + "/log.jsonl"
print({greeting!r})
speed = (2 if compiled else 1) * ({speed} if first else {later})
def steps(loss=7.5):
    with open(log_file, "w") as log:
        log.write(json.dumps({{"event": "start"}}) + "\\n")
        for step in range(1, int(flags["--steps"]) + 1):
            rate = 1.0 if step <= 3 else speed + (step == 5) * 500
            event = {{"event": "step", "step": step, "loss": loss, "ms": 128e3 / rate, "tokens_per_s": rate}}
            log.write(json.dumps(event | {{"gpu_mem_gib": 80.25}}) + "\\n")
{body}
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """fake(ours=body, torch=body): both programs -> their folder as a flag. Without a body: a good run."""
    monkeypatch.setattr(training, "FOLDER", tmp_path)
    monkeypatch.setattr(training, "PEER", [sys.executable, str(tmp_path / "peers.py")])
    model = SimpleNamespace(vocab_size=4096, flops_per_token=lambda T: 1e11)
    monkeypatch.setattr(training, "load_config", lambda name: model)

    def make(ours: str = "steps()", torch: str = "steps()") -> list[str]:
        texts = {"train_llama3": (ours, "  computes on   Some GPU    tokens  1", 1000, 1100)}
        texts["train_llama3.py"] = (torch, "PyTorch 9.9 on Some GPU, tiny: 5 parameters", 400, 320)
        texts["peers.py"] = ("steps()", "PyTorch 9.9 on Some GPU, tiny: 5 parameters", 500, 500)
        for name, (body, greeting, speed, later) in texts.items():
            values = {"name": name, "greeting": greeting, "speed": speed, "later": later, "body": body}
            text = PROGRAM.format(folder=str(tmp_path), **values)
            (tmp_path / name).write_text(f"#!{sys.executable}\n{text}")
            (tmp_path / name).chmod(0o755)
        return ["--build", str(tmp_path), "--workload", "tiny"]

    return make


OURS = ["--only", "llamac,compile,eager"]


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def cells(markdown: str) -> list[list[str]]:
    """The table's rows without their workload."""
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ")[1:] for line in lines[2:]]


def test_programs_take_turns_and_are_compared(fake, tmp_path, capsys):
    assert bench_train.main([*fake(), *OURS, "--llamac-flags", "--kernel 'a b'"]) == 0
    out = capsys.readouterr().out
    # llamac 1000 and 1100 in the two rounds, compile 800 and 640, eager 400 and 320.
    assert cells(out) == [
        ["llamac", "none", "1050", "105", "80.2", "9.5", "2/2", "7.500", "-"],
        ["compile", "none", "720", "72", "80.2", "22.2", "2/2", "7.500", "1.484"],
        ["eager", "none", "360", "36", "80.2", "22.2", "2/2", "7.500", "2.969"],
    ]
    turns = [(words[0], words[-1] == "--compile") for words in calls(tmp_path)]
    assert turns == [("train_llama3", False), ("train_llama3.py", True), ("train_llama3.py", False)] * 2
    assert (
        f"## Training: Some GPU · PyTorch 9.9 on Some GPU, llamac {llamac.__version__}, commit " in out
        and "Left out" not in out
    )


def test_another_build_takes_its_turns(fake, tmp_path, capsys):
    """`--other`: the same run by the program of another folder, without --llamac-flags."""
    arguments, other = fake(), tmp_path / "other"
    other.mkdir()
    program = (tmp_path / "train_llama3").read_text().replace("'train_llama3'", "'other'")
    (other / "train_llama3").write_text(program.replace("(1000 if", "(500 if"))
    (other / "train_llama3").chmod(0o755)
    arguments += ["--only", "llamac,other", "--llamac-flags", "--kernel a=b", "--other", str(other)]
    assert bench_train.main(arguments) == 0
    # llamac 1000 and 1100 in the two rounds, other 500 and 1100.
    assert [row[-1] for row in cells(capsys.readouterr().out)] == ["-", "1.500"]
    assert [words[0] for words in calls(tmp_path)] == ["train_llama3", "other"] * 2
    ours, other = (dict(zip(words[1::2], words[2::2])) for words in calls(tmp_path)[:2])
    assert ours.pop("--kernel") == "a=b" and ours.pop("--out") != other.pop("--out") and ours == other


def test_each_program_gets_the_same_run(fake, tmp_path):
    """The flags are ones that the programs take, and the tokens are there while they run."""
    check = "import shutil; shutil.copy(flags['--train-data'], folder + '/tokens.bin'); steps()"
    assert bench_train.main([*fake(check), *OURS, "--rounds", "1", "--llamac-flags", "--kernel a=b"]) == 0
    ours, compiled, eager = calls(tmp_path)
    assert [ours[0], compiled[0], eager[0]] == ["train_llama3", "train_llama3.py", "train_llama3.py"]
    assert ours[-2:] == ["--kernel", "a=b"] and compiled[1] == eager[1] == "--train"
    assert compiled[-1] == "--compile" and "--compile" not in eager
    flags = dict(zip(ours[1:-2:2], ours[2:-2:2]))
    assert (flags.pop("--val-data"), flags.pop("--sample-every"), flags.pop("--checkpoint-every")) == (
        "",
        "0",
        "-1",
    )
    folders, options = {flags.pop("--out")}, [parse(words) for words in (compiled[2:], eager[2:])]
    for o in options:
        folders.add(str(Path(o.log).parent))
        o.log, o.compile = "", False
    o = options[0]
    assert len(folders) == 3 and o == options[1]
    assert o == parse([word for pair in flags.items() for word in pair])
    assert (o.model, o.batch_size, o.seq_len, o.steps) == ("tiny", 2, 64, 11)
    assert Loader(str(tmp_path / "tokens.bin"), 64, 4096, 2).sequences >= 22
    assert not Path(o.train_data).exists()


def test_each_side_computes_its_own_parts_again():
    o = bench_train.parse_arguments(["--build", "b"])
    o.data, w = "tokens.bin", bench_train.WORKLOADS["8b-b1-t8192"]
    found = {}
    for program in ("llamac", "eager"):
        words = training.command(o, w, program, Path("out"))
        found[program] = words[words.index("--recompute") + 1]
    assert found == {"llamac": "norm,swiglu", "eager": "none"}


def test_sharded_workloads():
    """The same run for both programs, but for the operations, on as many processes."""
    o = bench_train.parse_arguments(["--build", "b"])
    o.data, w = "tokens.bin", bench_train.SHARDED["8b-b2-t8192-fsdp"]
    lines = [training.command(o, w, program, Path("out")) for program in ("ops", "compile")]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launcher += ["--no-python", "--nproc-per-node", "8", "--"]
    assert all(line[1:10] == launcher and line[12] == "--train" for line in lines)
    ours, theirs = (parse(line[13:]) for line in lines)
    assert (ours.ops, theirs.ops) == ("llamac", "torch") and ours.compile and theirs.compile
    assert (ours.batch_size, ours.seq_len, ours.grad_dtype) == (2, 8192, "bf16")
    assert (ours.master_weights, ours.optimizer_state) == ("on", "f32")
    ours.ops = "torch"
    assert ours == theirs
    assert set(o.workloads) == set(bench_train.WORKLOADS), "on one device unless asked"
    names = ["8b-b2-t8192-fsdp", "1b-b4-t8192-ops"]
    o = bench_train.parse_arguments(["--build", "b", "--devices", "4", "--workload", *names])
    assert [o.workloads[name].devices for name in names] == [4, 1]


def test_peers_are_more_programs(fake, tmp_path, capsys, monkeypatch):
    """Each runs where its packages are; without them its row says so, which is no failure."""
    monkeypatch.setattr(training, "find_spec", lambda name: None if name == "torchao" else name)
    arguments = [*fake(), "--rounds", "1", "--only", "script,torchao,hf"]
    assert bench_train.main(arguments) == 0
    rows = {row[0]: row[1:] for row in cells(capsys.readouterr().out)}
    assert rows["script"] == rows["hf"] == ["none", "500", "50", "80.2", "0.0", "1/1", "7.500", "-"]
    assert rows["torchao"] == ["none", "-", "-", "-", "-", "0/1", "-", "not installed: torchao"]
    assert [words[:2] for words in calls(tmp_path)] == [["peers.py", "script"], ["peers.py", "hf"]]


@pytest.mark.parametrize("program", ["script", "hf", "patched --lora 4"])
def test_a_peer_trains(program, tmp_path, monkeypatch):
    """Without its compiler, and without Liger, whose part is in the place of a loss of the same value."""
    liger = SimpleNamespace(apply_liger_kernel_to_llama=lambda **parts: None)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    log = tmp_path / "log.jsonl"
    flags = "--batch-size 2 --seq-len 32 --steps 3 --lr 1e-2 --dtype f32 --warmup-steps 0 --model tiny"
    write_bin(tmp_path / "tokens.bin", np.arange(500, dtype=np.uint32), 4096)
    flags += f" --train-data {tmp_path}/tokens.bin"
    monkeypatch.setattr("sys.argv", ["peers", *program.split(), *flags.split(), "--log", str(log)])
    with torch.compiler.set_stance("force_eager"):
        peers.main()
    events = read_log(log)
    assert [event["step"] for event in events] == [1, 2, 3]
    assert all(8 < event["loss"] < 9 and event["tokens_per_s"] > 0 for event in events)


FAULTS = {
    "exit": ("print('x\\nno device'); sys.exit(2)", "exit code 2: no device"),
    "memory": ("print('torch.OutOfMemoryError: CUDA out of memory.\\nhint'); sys.exit(1)", "out of memory"),
    "signal": ("os.kill(os.getpid(), 11)", "killed by signal 11"),
    "key": (
        'open(log_file, \'w\').write(\'{"event": "step", "step": 9}\\n\')',
        "its log: 'ms'",
    ),
    "empty": ("open(log_file, 'w')", "its log has 0 steps, expected more than 3"),
    "nan": ("steps(None)", "its loss is no number"),
    "log": ("", "its log: "),
}


@pytest.mark.parametrize("body, reason", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("who", ["ours", "torch"])
def test_a_failing_run_is_named_and_the_rest_goes_on(fake, tmp_path, capsys, who, body, reason):
    arguments = [*fake(**{who: body}), "--rounds", "1", "--only", "llamac,eager"]
    assert bench_train.main(arguments) == int(who == "ours" or reason != "out of memory")
    rows = {row[0]: row for row in cells(capsys.readouterr().out)}
    failed, good = ("llamac", "eager") if who == "ours" else ("eager", "llamac")
    assert rows[failed][-1].startswith(reason) and rows[failed][2] == "-"
    assert rows[good][-3:] == ["1/1", "7.500", "-"]
    runs = json.loads((tmp_path / "bench_train.json").read_text())["runs"]
    assert [bool(run["failure"]) for run in runs] == [who == "ours", who != "ours"]


def test_what_the_time_does_not_allow_is_said(fake, tmp_path, capsys):
    """A run is stopped with its children; one that took too long is not begun again."""
    child = f"import subprocess; subprocess.Popen(['sleep', '{OWN}']); "
    child += "open(folder + '/slow', 'w'); time.sleep(60)"
    begin = time.monotonic()
    arguments = [*fake(torch=child), "--seconds", "4", "--only", "llamac,eager"]
    assert bench_train.main(arguments) == 0
    assert time.monotonic() - begin < 20 and (tmp_path / "slow").exists()
    out = capsys.readouterr().out
    assert [row[0] for row in cells(out)] == ["llamac"]
    labels = "tiny eager, round 1; tiny llamac, round 2; tiny eager, round 2"
    assert f"Left out, the time was over: {labels}." in out
    assert (tmp_path / "bench_train.md").read_text() == out
    content = json.loads((tmp_path / "bench_train.json").read_text())
    assert content["left_out"] == labels.split("; ") and len(content["runs"]) == 1
    assert not running("sleep", OWN)


OWN = f"60.{os.getpid()}"  # seconds: nobody else's sleep


def running(*command: str) -> bool:
    """Whether some process is this command."""
    line = "".join(f"{word}\0" for word in command).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            if path.read_bytes() == line:
                return True
    return False


def test_ended_from_outside(fake, tmp_path):
    """The run under way ends, too."""
    child = f"import subprocess; subprocess.Popen(['sleep', '{OWN}']); "
    child += "open(folder + '/slow', 'w'); time.sleep(60)"
    script = Path(bench_train.__file__)
    process = subprocess.Popen([sys.executable, script, *fake(ours=child), "--only", "llamac"])
    while not (tmp_path / "slow").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(20) == 128 + 15 and not running("sleep", OWN)


@pytest.mark.slow
def test_dtensor(tmp_path):
    """Two devices have the losses of one."""
    write_bin(
        tmp_path / "tokens.bin", np.random.default_rng(0).integers(4096, size=2000, dtype=np.uint32), 4096
    )
    o = SimpleNamespace(warm_up=1, steps=3, data=tmp_path / "tokens.bin")
    config = json.loads((ROOT / "configs/models/tiny.json").read_text())
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    w = training.Workload(str(tmp_path / "config.json"), 2, 64, dtype="f32", devices=2)
    line = training.command(o, w, "dtensor", tmp_path)
    place, losses = line.index("--nproc-per-node") + 1, []
    for devices in ("1", "2"):
        subprocess.run([*line[:place], devices, *line[place + 1 :]], check=True, cwd=ROOT)
        losses.append([event["loss"] for event in read_log(tmp_path / "log.jsonl")])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], abs=2e-6)


REFUSED = {
    "--only=llamac,torch": "some of llamac, other, ops, compile, eager, script, .*, dtensor, found torch",
    "--other=/nowhere": "--other: expected a folder with train_llama3",
    "--build=/nowhere": "--build /nowhere: expected train_llama3 in it",
    "--rounds=0": "--rounds: expected at least 1, found 0",
}


@pytest.mark.parametrize("flag, message", REFUSED.items(), ids=REFUSED)
def test_bad_arguments(fake, flag, message):
    refuses(message, bench_train.main, [*fake(), flag])


# llamac bench --hf


def hf_runs(**speeds: float) -> list[training.Run]:
    """Two rounds, the second a tenth faster."""
    same = {"tflops": 1.0, "first_loss": 8.0, "loss": 7.0, "device": "CPU"}
    return [
        training.Run("w", name, k, tokens_per_s=speed * (0.9 + 0.1 * k), gpu_mem_gib=speed / 100, **same)
        for name, speed in speeds.items()
        for k in (1, 2)
    ]


def test_hf_rows_and_chart(tmp_path, figures):
    """Ratios to Hugging Face's plain model, round by round; what failed has a row and no bar."""
    found = [
        *hf_runs(transformers=1000, llamac=2000),
        training.Run("w", "liger", 1, failure="not installed: x"),
    ]
    text = hf.report(SimpleNamespace(label="tiny", dtype="f32"), found, ["w hf, round 2"], provenance())
    losses = ["8.0000", "7.0000"]
    assert cells(text) == [
        ["Hugging Face", "1,050", "1.00", "10", "9.5", "2/2", *losses],
        ["Liger", "-", "-", "-", "-", "0/1", "-", "not installed: x"],
        ["llamac", "2,100", "2.00", "20", "9.5", "2/2", *losses],
    ]
    assert text.startswith("## tiny: CPU, llamac ") and "Left out, the time was over: w hf, round 2." in text
    hf.chart(found, "title", tmp_path / "a.png")
    speeds, memory = figures[0].axes
    assert [label.get_text() for label in speeds.texts] == ["2,100   2.00x", "1,050"]
    assert [bar.get_width() for bar in memory.patches] == [20, 10]


@pytest.mark.parametrize(
    "change, said",
    [
        ({}, []),
        ({"first_loss": 8.00007}, []),
        ({"first_loss": 8.0001}, ["llamac: first loss 8.000100, that of transformers is 8.000000"]),
        ({"device": "Some GPU"}, ["llamac: computes on Some GPU, transformers on CPU"]),
    ],
)
def test_hf_runs_that_differ(change, said):
    found = hf_runs(transformers=1, llamac=1)
    vars(found[-1]).update(change)
    assert hf.differences(found, "f32") == said
    text = hf.report(SimpleNamespace(label="tiny", dtype="f32"), found, [], provenance())
    assert ("NOT COMPARABLE: " in text) == bool(said)


def hf_bench(folder: Path, build: Path, capsys, *words: str) -> tuple[str, list[dict]]:
    """The markdown and the runs of `llamac bench --hf` on small batches."""
    small = ["--batch-size", "1", "--seq-len", "32", "--rounds", "1", "--steps", "2", "--warm-up", "1"]
    line = ["--hf", *small, "--program", f"{build}/train_llama3", "--out", str(folder), *words]
    assert command.main(line) == 0
    text = capsys.readouterr().out
    assert text == (folder / "bench-hf.md").read_text()
    return text, json.loads((folder / "bench-hf.json").read_text())["runs"]


@pytest.mark.more
@pytest.mark.program
def test_hf(build, gpu, tmp_path, capsys):
    """The program and Hugging Face begin with the same loss, which needs the same weights and batch."""
    text, found = hf_bench(tmp_path, build, capsys, "--only", "transformers,liger,llamac")
    rows = {row[0]: row for row in cells(text)}
    assert rows["llamac"][-3] == rows["Hugging Face"][-3] == "1/1"
    if not find_spec("liger_kernel"):
        assert rows["Liger"][-1] == "not installed: liger_kernel"
    assert "NOT COMPARABLE" not in text and all(run["gpu_mem_gib"] > 0 for run in found if not run["failure"])


@pytest.mark.slow
@pytest.mark.program
def test_hf_with_torch_compile(build, tmp_path, capsys):
    _, found = hf_bench(tmp_path, build, capsys)
    assert {"transformers", "compiled", "patched", "llamac"} <= {run["program"] for run in found}
    assert not any(run["failure"] for run in found) and (tmp_path / "bench-hf.png").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--only transformers,eager", "--only: expected some of transformers, .*, llamac, found eager"),
        ("--seq-len 99999", "--seq-len: expected at most"),
        ("--program /nowhere", "--program /nowhere: expected the program train_llama3, found no file"),
        ("--rounds 0", "--rounds: expected at least 1, found 0"),
    ],
)
def test_bad_arguments_of_hf(flags, message):
    refuses(message, hf.main, flags.split())
