"""llamac.training.options and llamac.model.config: flags, presets; the command llamac; llamac.report.plot."""

import json
import math
import os
import re
import subprocess
import sys
import zipfile
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hf_dirs import LLAMA3, SMALL
from run import ROOT, refused, run_llamac

import train_llama3 as ref
from llamac import _native
from llamac.__main__ import COMMANDS, main, usage
from llamac.base.errors import InputError
from llamac.model.config import NOT_LLAMAS, Config, load_config, presets
from llamac.report import plot
from llamac.report.summary import duration
from llamac.training import program
from llamac.training.options import Options, parse

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


# flags


def test_flags():
    line = "--batch-size 4 --lr=1e-3 --grad-clip 0 --schedule wsd --log a --log b --compile"
    o = parse(line.split())
    assert (o.batch_size, o.lr, o.grad_clip, o.schedule, o.log, o.compile) == (4, 1e-3, 0.0, "wsd", "b", True)
    assert type(o.grad_clip) is float


def test_help(monkeypatch, capsys):
    """train_llama3.py --help has what its text says, and the flags of --train."""
    monkeypatch.setattr("sys.argv", ["train_llama3.py", "--help"])
    with pytest.raises(SystemExit) as end:
        ref.main()
    said, wrong = capsys.readouterr()
    assert (end.value.code, wrong) == (0, "") and "write the reference tensors" in said
    flags = ["--" + f.name.replace("_", "-") for f in fields(Options)]
    assert all(f"  {flag}" in said for flag in flags)


@pytest.mark.parametrize(
    "line, found",
    [
        (["llamac", "ev"], ["eval"]),
        (["llamac", "generate", "--to"], ["--tokens", "--top-k", "--top-p"]),
        (["llamac", "train", "--grad-d"], ["--grad-dtype"]),
        (["./train_llama3", "--batch"], ["--batch-size"]),
        (["llamac", "plot", "ou"], []),  # files are the shell's
    ],
)
def test_completion_in_bash(line, found, build):
    words = " ".join(f"'{word}'" for word in line)
    ask = f'eval "$(llamac completion bash)"; COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _llamac; '
    ask += 'printf "%s\\n" "${COMPREPLY[@]}"'
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", ask], cwd=build, env=os.environ | {"PATH": path}, text=True,
                          capture_output=True, check=True)  # fmt: skip
    assert done.stdout.split() == found and not done.stderr


def test_commands_of_the_package():
    """Each has a module with main(); no other module runs as one; no page names another command."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"`llamac ([a-z-]+)", page.read_text())}
    assert named <= set(COMMANDS)
    for name, (_, module, _) in COMMANDS.items():
        path = ROOT / "llamac" / f"{module.replace('.', '/')}.py"
        assert "\ndef main(" in path.read_text() and f"\n  llamac {name} " in usage()
    sources = [p.name for p in (ROOT / "llamac").rglob("*.py") if '__name__ == "__main__"' in p.read_text()]
    assert sorted(sources) == ["__main__.py", "reference.py"]
    assert run_llamac("--version").stdout == run_llamac().stdout.splitlines()[0] + "\n"


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS.keys() - {"train"})])  # not argparse's
def test_help_of_80_columns(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["llamac", *([name] if name else []), "--help"])
    with suppress(SystemExit):
        main()
    shown = capsys.readouterr().out
    assert 60 < max(map(len, shown.splitlines())) <= 80, shown


def test_an_error_names_the_command(tmp_path):
    assert run_llamac("plot", tmp_path / "none", code=2).stderr.startswith("llamac plot: ")
    said = run_llamac("nothing", code=2).stderr
    assert said.startswith("llamac: nothing: no such command; expected one of")


def test_the_command_train(tmp_path, monkeypatch):
    """The program of the working folder, else of PATH, else of the checkout; its exit status."""
    with monkeypatch.context() as patch, pytest.raises(InputError, match="expected the program train_llama3"):
        patch.setattr(program, "__file__", str(tmp_path / "llamac/training/program.py"))
        patch.setenv("PATH", "/none")
        patch.chdir(tmp_path)
        program.find()
    for folder in ("bin", "work"):
        script = tmp_path / folder / "train_llama3"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\necho {folder} "$@"\nexit 3\n')
        script.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    assert (
        run_llamac("train", "--a", "b", code=3, cwd=tmp_path, env=ENVIRONMENT | {"PATH": path}).stdout
        == "bin --a b\n"
    )
    assert (
        run_llamac("train", code=3, cwd=tmp_path / "work", env=ENVIRONMENT | {"PATH": path}).stdout
        == "work\n"
    )


def test_micro_steps():
    assert Options().micro_batches() == 1
    assert Options(batch_size=2, seq_len=8, total_batch_size=64).micro_batches() == 4
    assert Options(batch_size=2, seq_len=8, total_batch_size=64).micro_batches(devices=2) == 2
    expected = "--total-batch-size: expected a multiple of batch-size·seq-len·devices = 24 tokens, found 64"
    assert refused(Options(batch_size=3, seq_len=8, total_batch_size=64).micro_batches) == expected
    refused(Options(batch_size=2, seq_len=8, total_batch_size=64).micro_batches, 8)


def test_recompute():
    found = {text: Options(recompute=text).recompute_every() for text in ("none", "block", "block:4")}
    assert found == {"none": 0, "block": 1, "block:4": 4}


def test_run_configurations_by_name(tmp_path, monkeypatch):
    """From any folder, where no file of this name lies."""
    monkeypatch.chdir(tmp_path)
    no_data = [("", '{"train-data": "none"}')]
    assert json.loads(_native.options("llama3.2-1b.toml", no_data))["model"] == "llama3.2-1b"
    (tmp_path / "llama3.2-1b.toml").write_text('model = "tiny"\n')
    assert json.loads(_native.options("llama3.2-1b.toml", no_data))["model"] == "tiny"
    for missing in ("none.toml", "elsewhere/llama3.2-1b.toml"):
        assert f"{missing}: cannot open: No such file" in refused(_native.options, missing, [])


def files_of_wheel(folder: Path, kind: str) -> dict[str, str]:
    """The names of its files, and the texts of those that Python reads at its start."""
    pytest.importorskip("scikit_build_core")
    build = f"from scikit_build_core.build import build_{kind} as build; import sys; "
    build += "build(sys.argv[1], {'wheel.cmake': 'false'})"
    subprocess.run([sys.executable, "-c", build, folder], cwd=ROOT, check=True)
    (wheel,) = folder.glob("llamac-*.whl")
    with zipfile.ZipFile(wheel) as files:
        assert len(files.namelist()) == len(set(files.namelist()))
        return {name: files.read(name).decode() if name.endswith(".pth") else "" for name in files.namelist()}


def test_what_a_wheel_carries(tmp_path):
    """Without the compiled modules, which CMake installs."""
    configurations = {f"llamac/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.*")}
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "llamac/report/page").iterdir()}
    assert len(configurations) > 12 and len(page) > 4
    found = files_of_wheel(tmp_path, "wheel").keys()
    assert configurations | page | {"llamac/data/command.py"} <= found
    assert not [name for name in found if "_native" in name]


def test_an_editable_installation_adds_the_checkout_alone(tmp_path):
    """Not the folder beside it, whose modules would be everybody's."""
    (text,) = filter(None, files_of_wheel(tmp_path, "editable").values())
    assert [line for line in text.splitlines() if line and not line.startswith("import ")] == [str(ROOT)]


# configurations


PARAMETERS = {  # as published with the models
    "llama3.2-1b": 1_235_814_400,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "gpt2-125m": 124_439_808,
    "gpt2-1.5b": 1_557_611_200,
    "bert-base": 109_514_298,  # without pooler and next-sentence head
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_published_size(name):
    assert load_config(name).num_parameters() == PARAMETERS[name]


def test_presets():
    assert set(presets()) >= {"tiny", *PARAMETERS, "llama3.1-70b-proxy"}
    big, proxy = load_config("llama3.1-70b"), load_config("llama3.1-70b-proxy")
    assert vars(proxy) == vars(big) | {"num_hidden_layers": 1}
    small = load_config("llama3.2-1b")
    assert (small.q_size, small.kv_size, small.tie_word_embeddings) == (2048, 512, True)
    assert small.rope_scaling.factor == 32 and big.rope_scaling.factor == 8
    assert load_config("tiny").vocab_size == 4096


def test_flops_per_token():
    c = load_config(ROOT / "configs" / "models" / "llama3.1-8b.json")
    block = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert c.flops_per_token(8192) == 6 * (32 * block + 128256 * 4096) + 6 * 32 * 4096 * 8192
    gpt2 = 6 * (12 * 12 * 768**2 + 50257 * 768) + 6 * 12 * 768 * 1024  # positions are looked up
    assert load_config("gpt2-125m").flops_per_token(1024) == gpt2
    bert = 6 * (12 * 12 * 768**2 + 768**2 + 30522 * 768) + 12 * 12 * 768 * 512  # a token sees all
    assert load_config("bert-base").flops_per_token(512) == bert
    tied = load_config("llama3.2-1b")
    matrices = sum(math.prod(shape) for _, shape in tied.parameters() if len(shape) == 2)
    assert tied.flops_per_token(2048) == 6 * matrices + 6 * 16 * 2048 * 2048


def test_parameters_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    for name, biases in (("tiny", False), ("tiny", True), ("llama3.1-8b", False)):
        c = replace(load_config(name), attention_bias=biases, mlp_bias=biases)
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**c.to_dict("float32")))
        ours = dict(c.parameters())
        assert ours == {key: tuple(value.shape) for key, value in model.named_parameters()}
        assert c.parameters()[0][0] == "model.embed_tokens.weight"


@pytest.mark.parametrize("name", sorted(presets()))
def test_config_round_trip(tmp_path, name):
    c = load_config(name)
    (tmp_path / "config.json").write_text(json.dumps(c.to_dict("bfloat16")))
    assert load_config(tmp_path) == load_config(tmp_path / "config.json") == c
    assert c.to_dict("float32")["torch_dtype"] == "float32"


def config_of(tmp_path: Path, **changes) -> Config:
    values = {key: value for key, value in (SMALL | changes).items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return load_config(tmp_path)


def test_config_defaults_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = config_of(tmp_path)
    theirs = transformers.LlamaConfig(**SMALL)
    different = {*NOT_LLAMAS, "type_vocab_size", "partial_rotary_factor"}
    for key in vars(ours).keys() - different:
        if not key.startswith("rope_"):
            assert getattr(ours, key) == getattr(theirs, key), key
    assert (ours.head_dim, ours.num_key_value_heads, ours.rope_scaling) == (4, 3, None)
    assert ours.rope_theta == 10000.0
    assert config_of(tmp_path, head_dim=None, rope_scaling=None, num_key_value_heads=None) == ours


def test_rope_of_transformers_4_and_5(tmp_path):
    four = config_of(tmp_path, rope_theta=500000.0, rope_scaling=LLAMA3)
    five = config_of(tmp_path, rope_parameters=LLAMA3 | {"rope_theta": 500000.0})
    assert four == five and four.rope_theta == 500000 and four.rope_scaling.factor == 8
    plain = config_of(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert plain.rope_scaling is None and plain.rope_theta == 500000
    old = {"type" if key == "rope_type" else key: value for key, value in LLAMA3.items()}
    assert config_of(tmp_path, rope_theta=500000, rope_scaling=old) == four


def test_no_config(tmp_path):
    expected = "expected a directory with config.json or a preset (bert-base, "
    assert expected in refused(load_config, "llama9")
    assert "config.json: cannot open: No such file" in refused(load_config, tmp_path)
    assert "hub" not in refused(load_config, tmp_path) + refused(load_config, "./llama9")
    fetched = "`hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B`"
    assert fetched in refused(load_config, "meta-llama/Llama-3.2-1B")
    for text, message in (
        ("{", "expected JSON"),
        ("[]", "expected an object, found []"),
        ("", "expected JSON"),
    ):
        (tmp_path / "config.json").write_text(text)
        assert refused(load_config, tmp_path).startswith(f"{tmp_path / 'config.json'}: {message}")


# plot


def written_log(out: Path, losses: list[float]) -> None:
    """A run's log in out."""
    events: list[dict] = [
        {"event": "run", "device": "Abacus", "parameters": 2_400_000, "tokens_per_step": 2048}
    ]
    events += [{"event": "start", "model": "tiny"}, {"event": "val", "step": 0, "loss": 8.3}]
    for step, loss in enumerate(losses, 1):
        found = None if math.isnan(loss) else loss
        events.append({"event": "step", "step": step, "loss": found, "lr": 1e-3, "tokens_per_s": 2048.0})
    (out / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_plot_of_a_short_run(tmp_path, figures):
    """Whole steps on the axis, the last value right of the curves, a title that says what ran."""
    events = [
        {"event": "run", "device": "Abacus", "parameters": 2_400_000, "tokens_per_step": 2048},
        {"event": "start", "model": "models/tiny"},
        {"event": "val", "step": 0, "loss": 8.3},
        {"event": "val", "step": 3, "loss": 5.1},
    ]
    speed = {"event": "step", "tokens_per_s": 1e4}
    events += [speed | {"step": k, "loss": 8.0 - k, "lr": 1e-3 * k} for k in (1, 2, 3)]
    plot.draw(events, tmp_path / "loss.png")
    (figure,) = figures
    top, bottom = figure.axes
    assert top.get_title(loc="left") == "tiny · 2.4M parameters · 6.14K tokens\nAbacus · 10,000 tokens/s"
    figure.canvas.draw()
    ticks = [tick for tick in bottom.get_xticks() if bottom.get_xlim()[0] <= tick <= bottom.get_xlim()[1]]
    assert len(ticks) > 1 and all(tick == round(tick) for tick in ticks)
    (label,) = top.texts
    left = label.get_window_extent().x0
    curves = max(line.get_transform().transform(line.get_xydata())[:, 0].max() for line in top.lines)
    assert label.get_text() == "5.100" and left > curves
    assert label.get_window_extent().x1 <= figure.bbox.x1
    assert len(figure.axes) == 2
    saturated = [{"event": "saturated", "step": k, "share": 10.0**-k} for k in (2, 3)]
    plot.draw(events + saturated, tmp_path / "loss.png")
    (points,) = figures.pop().axes[2].lines
    assert points.get_xydata().tolist() == [[2, 1e-2], [3, 1e-3]]
    answers = [{"event": "evaluation", "step": 3, "task": task, "accuracy": 0.5} for task in ("piqa", "arc")]
    plot.draw(events + saturated + answers, tmp_path / "loss.png")
    panel = figures.pop().axes[3]
    assert [(line.get_label(), line.get_xydata().tolist()) for line in panel.lines] == [
        ("arc", [[3, 0.5]]),
        ("piqa", [[3, 0.5]]),
    ]
    plot.draw(events[1:], tmp_path / "loss.png")  # a log of an earlier version
    assert figures[1].axes[0].get_title(loc="left") == "tiny\n10,000 tokens/s"


def test_duration():
    found = [duration(s) for s in (0.4, 59.4, 59.6, 185, 3600, 25325)]
    assert found == ["0 s", "59 s", "1:00", "3:05", "1:00:00", "7:02:05"]


def test_plot_reads_what_a_killed_run_left(tmp_path):
    written_log(tmp_path, [8.0, 7.0])
    path = tmp_path / "log.jsonl"
    events = plot.read_log(path)
    with open(path, "a") as file:
        file.write('{"event":"step","step":3,"loss":6.5}\n{"event":"st')
    again = plot.read_log(path)
    assert len(again) == len(events) + 1
    assert plot.series(again, "step", "loss") == ([1, 2, 3], [8.0, 7.0, 6.5])
    written = path.read_bytes()
    for cut in range(len(written) + 1):  # wherever the run died: the events that are whole, and no other
        path.write_bytes(written[:cut])
        assert plot.read_log(path) == again[: written[: cut + 1].count(b"}\n")], cut
    path.write_text('{"event":"st\n{"event":"step"}\n')
    assert "line 1: expected a JSON object" in refused(plot.read_log, path)
    assert "No such file" in refused(plot.read_log, tmp_path / "missing")


def test_smooth():
    line = np.arange(200.0)
    assert plot.smooth(line)[3:-3] == pytest.approx(line[3:-3])  # no lag
    spike = 7.0 * (line == 100)
    assert plot.smooth(spike)[96:105] == pytest.approx([0, *[1.0] * 7, 0])
    assert plot.smooth(np.array([1.0, 5.0])).tolist() == [1.0, 5.0]
    line[100] = np.nan
    assert plot.smooth(line)[99:102] == pytest.approx([593 / 6, 100, 607 / 6])
