"""--eval-tasks: the scores that a run logs are those of llamac.eval on the checkpoint of that step."""

import json
from pathlib import Path

import numpy as np
import pytest
from hf_dirs import TEXT, write_directory
from launch import as_ranks, needs
from run import events, flags, refuses, timed_events
from task_rows import drawn_row, read_questions

import llamac
from llamac.data.tokens import write_bin
from llamac.eval import tasks
from llamac.eval.command import answers, count, main
from llamac.eval.likelihood import PairEncoder, Scorer

B, T = 4, 64  # of the runs; some of mmlu's prompts are longer
NAMES = ["hellaswag", "winogrande", "mmlu"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_directory(tmp_path_factory.mktemp("model"), context=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, directory) -> Path:
    """Rows of 40 questions a task, and of these, by the command, files of questions."""
    made, rng = tmp_path_factory.mktemp("tasks"), np.random.default_rng(5)
    for name in NAMES:
        rows = [drawn_row(name, rng) for _ in range(40)]
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        words = ["--tasks", ",".join(NAMES), "--data", str(made), "--prepare", str(made / "prepared")]
        patch.setattr("sys.argv", ["eval", str(directory), *words])
        main()
    return made


def files(folder: Path) -> str:
    return ",".join(str(folder / f"prepared/{name}.questions") for name in NAMES)


@pytest.fixture(scope="module")
def run_flags(directory, folder, tmp_path_factory):
    """Flags of a run of the directory's model, on shards of its tokenizer."""
    shards, encoder = tmp_path_factory.mktemp("shards"), PairEncoder(directory)
    ids = np.array(encoder.encode(TEXT * 60), np.uint32)
    for part in ("train", "val"):
        own = encoder.tokenizer
        write_bin(shards / f"{part}_000.bin", ids, own.vocab_size, own.hash)

    def of(out: Path, **extra) -> list[str]:
        sizes = {"steps": 4, "batch_size": B, "seq_len": T, "total_batch_size": 2 * B * T, "lr": 0.01}
        every = {"eval_every": 2, "eval_tasks": files(folder), "checkpoint_every": 2, "tokenizer": "auto"}
        return flags(shards, out, **(sizes | every | {"model": directory} | extra))

    return of


def scores(out: Path) -> dict[tuple[int, str], tuple]:
    """{(step, task): scores} of a run's log."""
    found = events(out, "evaluation")
    assert all(set(e) == {"event", "step", "task", "accuracy", "accuracy_norm", "questions"} for e in found)
    return {(e["step"], e["task"]): (e["accuracy"], e["accuracy_norm"], e["questions"]) for e in found}


def scores_of_eval(directory: Path, folder: Path) -> dict[str, tuple]:
    """Those of `llamac eval DIR --context T --batch-tokens B*T`."""
    scorer, found = Scorer(directory, context=T, batch_tokens=B * T), {}
    for name in NAMES:
        task = tasks.TASKS[name]
        every = list(tasks.read(task, folder))
        rows = {row["metric"]: row["value"] for row in reversed(count(task, every, answers(scorer, every)))}
        found[name] = rows["acc"], rows.get("acc_norm"), len(every)
    return found


@pytest.mark.program
def test_scores_are_those_of_llamac_eval(train, run_flags, directory, folder, tmp_path):
    out = tmp_path / "out"
    said = train(*run_flags(out)).stdout
    found = scores(out)
    assert [*found] == [(step, name) for step in (0, 2, 4) for name in NAMES]
    for step, where in ((0, directory), (2, out / "step_000002"), (4, out / "step_000004")):
        assert {name: found[step, name] for name in NAMES} == scores_of_eval(where, folder)
    assert len({found[step, name] for step in (0, 4) for name in NAMES}) > 3  # the scores say something
    assert found[0, "winogrande"][1] is None and said.count(": winogrande, 40 questions") == 3
    resumed = llamac.Trainer(out / "step_000004", eval_tasks=files(folder))
    assert {name: tuple(each.values()) for name, each in resumed.evaluate().items()} == {
        name: found[4, name] for name in NAMES
    }


@pytest.mark.program
def test_a_resumed_run_makes_up_for_an_evaluation(train, run_flags, tmp_path):
    """One that a signal has left out: the log has the step, not the scores."""
    train(*run_flags(tmp_path / "out"))
    train(*run_flags(tmp_path / "cut"))
    log = tmp_path / "cut/log.jsonl"
    lines = [json.dumps(e) for e in timed_events(tmp_path / "cut")]
    kept = [line for line in lines if not ('"evaluation"' in line and '"step": 4' in line)]
    log.write_text("\n".join(kept) + "\n")
    assert len(kept) == len(lines) - len(NAMES)
    train(*run_flags(tmp_path / "cut"))
    assert scores(tmp_path / "cut") == scores(tmp_path / "out")


@pytest.mark.program
@pytest.mark.parametrize("cp", [1, pytest.param(2, marks=pytest.mark.more)])
def test_ranks_share_the_questions(train, build, run_flags, tmp_path, cp):
    """Or, with --cp, each of their sequences."""
    needs(build, "GLOO")
    train(*run_flags(tmp_path / "one", steps=2))
    command = [build / "train_llama3", *run_flags(tmp_path / "two", steps=2, cp=cp)]
    assert as_ranks(command) == [(0, ""), (0, "")]
    one, two = scores(tmp_path / "one"), scores(tmp_path / "two")
    assert one.keys() == two.keys()
    assert {key: two[key] for key in two if key[0] == 0} == {key: one[key] for key in one if key[0] == 0}


def test_the_file_keeps_what_is_asked(directory, folder):
    encoder = PairEncoder(directory)
    for name in NAMES:
        found = read_questions(folder / f"prepared/{name}.questions")
        wanted = list(tasks.read(tasks.TASKS[name], folder))
        assert (found.vocab_size, found.hash) == (encoder.tokenizer.vocab_size, encoder.tokenizer.hash)
        assert [(q.gold, q.lengths) for q in found.questions] == [(q.gold, q.lengths) for q in wanted]
        assert [q.pairs for q in found.questions] == [
            [encoder.encode_pair(*pair) for pair in q.pairs] for q in wanted
        ]


REFUSED = {
    "missing": ["none.questions", "cannot open"],
    "damaged": ["damaged: checksum: expected", "it is damaged"],
    "tokenizer": ["ids of the training data's tokenizer (XXH3_64 ", "--prepare"],
    "vocabulary": ["the model's vocabulary of 300", "found one of 9999"],
    "twice": ["--eval-tasks", "different names"],
    "empty": ["--eval-tasks: expected files separated by commas"],
    "rows": ["mmlu.jsonl: header: expected magic 20261125 version 1"],
}


@pytest.mark.program
@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_is_refused(train, run_flags, folder, tmp_path, kind):
    """In one line, before anything is written."""
    good = folder / "prepared/mmlu.questions"
    words = np.frombuffer(good.read_bytes(), "<u4").copy()
    changes = {"damaged": {40: 7}, "tokenizer": {6: 7}, "vocabulary": {2: 9999}}
    for word, value in changes.get(kind, {}).items():
        words[word] = value
    (tmp_path / kind).write_bytes(words.tobytes())
    (tmp_path / "mmlu.questions").write_bytes(words.tobytes())
    given = {
        "missing": "none.questions",
        "twice": f"{good},{tmp_path}/mmlu.questions",
        "empty": f"{good},",
        "rows": str(folder / "mmlu.jsonl"),
    }.get(kind, str(tmp_path / kind))
    said = train(*run_flags(tmp_path / "out", eval_tasks=given), code=2).stderr.strip()
    assert len(said.splitlines()) == 1 and all(part in said for part in REFUSED[kind]), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--prepare", "x"], "nothing to do"),
        (["--prepare", "x", "--tasks", "mmlu", "--text", "a"], "--prepare: expected --tasks and neither"),
    ],
)
def test_what_prepare_refuses(directory, monkeypatch, words, expected):
    monkeypatch.setattr("sys.argv", ["eval", str(directory), *words])
    refuses(expected, main)
