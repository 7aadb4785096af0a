"""llamac.eval: the wording and the choices of lm-eval, transformers' likelihoods, and what is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hf_dirs import TEXT, write_directory
from run import refused, run_llamac
from task_rows import ROWS, drawn_row, read_questions

from llamac import Error
from llamac.data import tokenizer
from llamac.data.tokens import write_bin
from llamac.eval import tasks, text
from llamac.eval.command import answers, count, main
from llamac.eval.likelihood import Scorer


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_directory(tmp_path_factory.mktemp("model"), context=256)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """200 questions per format, two of them as Parquet."""
    from pyarrow import Table, parquet

    folder, rng = tmp_path_factory.mktemp("tasks"), np.random.default_rng(3)
    for name in tasks.TASKS:
        rows = [drawn_row(name, rng) for _ in range(200)]
        if name in ("mmlu", "arc_easy"):
            (folder / name).mkdir()
            where = folder / name / f"{tasks.TASKS[name].split}-00000-of-00001.parquet"
            parquet.write_table(Table.from_pylist(rows), where)
            parquet.write_table(Table.from_pylist(rows[:5]), folder / name / "train-0.parquet")
        else:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_wording():
    """lm-eval's, by hand."""
    q = {name: tasks.TASKS[name].question(row) for name, row in ROWS.items()}
    context = "Cats: The cat  on the mat.. Now It looks up"
    assert q["hellaswag"].pairs[:2] == [(context, " and sees the moon"), (context, " sleeps")]
    assert q["hellaswag"].gold == 2 and q["hellaswag"].lengths == [17, 6, 10, 8]
    assert q["arc_easy"].pairs[1] == ("Question: Where is the cat?\nAnswer:", " mat")
    assert (q["arc_easy"].gold, q["arc_challenge"].gold, q["arc_easy"].lengths) == (1, 0, [4, 3])
    assert q["piqa"].pairs[0] == ("Question: Feed the cat\nAnswer:", " with fish") and q["piqa"].gold == 0
    assert q["winogrande"].pairs == [(f"The cat saw the {x}", " and sat.") for x in ("moon", "mat")]
    assert q["winogrande"].gold == 1 and q["winogrande"].lengths is None
    intro = "The following are multiple choice questions (with answers) about cat lore.\n\n"
    assert q["mmlu"].pairs[3] == (intro + "Who?\nA. a\nB. b\nC. c\nD. d\nAnswer:", " D")
    assert (q["mmlu"].gold, q["mmlu"].group, q["mmlu"].lengths) == (3, "cat_lore", None)


def likelihoods_of_transformers(directory: Path, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    found = []
    for context, continuation in pairs:
        before, whole = own(context)["input_ids"], own(context + continuation)["input_ids"]
        with torch.no_grad():
            logs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        rows = range(len(before) - 1, len(whole) - 1)
        log = sum(logs[row, whole[row + 1]].item() for row in rows)
        found.append((log, all(int(logs[row].argmax()) == whole[row + 1] for row in rows)))
    return found


def test_likelihoods(directory, files):
    questions = list(tasks.read(tasks.TASKS["hellaswag"], files))[:12]
    pairs = [pair for question in questions for pair in question.pairs]
    wanted = likelihoods_of_transformers(directory, pairs)
    scorer = Scorer(directory, likeliest=True, batch_tokens=300)
    found = scorer.of_texts(pairs)
    np.testing.assert_allclose([x.log for x in found], [log for log, _ in wanted], rtol=1e-5, atol=1e-4)
    assert [x.is_greedy for x in found] == [is_greedy for _, is_greedy in wanted]
    alone = [scorer.of_texts([pair])[0] for pair in pairs[:5]]
    np.testing.assert_allclose([x.log for x in alone], [x.log for x in found[:5]], rtol=1e-5)


def test_greedy_continuations_are_said_to_be(directory):
    from llamac.inference.model import Inference, Sampling

    model, scorer = Inference(directory), Scorer(directory, likeliest=True)
    context = model.encode("the cat")
    made = model.generate([context], 6, Sampling(0), stops=[])[0]
    other = [*made[:-1], (made[-1] + 1) % 200]
    first, second = scorer.of_ids([(context, made), (context, other)])
    assert first.is_greedy and not second.is_greedy and first.log > second.log and first.tokens == 6


def test_long_pairs_lose_the_contexts_begin(directory):
    scorer = Scorer(directory, context=16)
    ids = scorer.encode(TEXT)
    (cut,) = scorer.of_ids([(ids[:-4], ids[-4:])])
    (short,) = scorer.of_ids([(ids[-17:-4], ids[-4:])])
    assert cut == short
    (rest,) = scorer.of_ids([(ids[:4], ids[4:])])
    assert rest.tokens == min(16, len(ids) - 4)


@pytest.mark.parametrize("name", list(tasks.TASKS))
def test_choices_of_lm_eval(directory, files, name, monkeypatch):
    """Exact agreement with the hf back end, where lm-eval is installed: make test does not install it."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
    import datasets

    path = files / f"{name}.jsonl"
    if not path.exists():
        path = next((files / name).glob(f"{tasks.TASKS[name].split}*"))
    base = "mmlu_anatomy" if name == "mmlu" else name
    rows = list(tasks._rows(path))
    if name == "mmlu":
        rows = [row for row in rows if row["subject"] == "anatomy"]
    split, local = tasks.TASKS[name].split, datasets.Dataset.from_list(rows)
    splits = {split: local, "train": local, "validation": local, "dev": local}
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: datasets.DatasetDict(splits))
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={directory},dtype=float32",
        tasks=[base],
        device="cpu",
        batch_size=8,
    )
    questions = [tasks.TASKS[name].question(row) for row in rows]
    logs = answers(Scorer(directory), questions)
    samples = sorted(theirs["samples"][base], key=lambda sample: sample["doc_id"])
    wanted = [[response[0] for response in sample["filtered_resps"]] for sample in samples]
    for ours, others in zip(logs, wanted, strict=True):
        np.testing.assert_allclose(ours, others, rtol=1e-4, atol=1e-4)
        assert np.argmax(ours) == np.argmax(others)
    scores = {row["metric"]: row["value"] for row in count(tasks.TASKS[name], questions, logs)[:2]}
    for metric in ("acc", "acc_norm"):
        if metric in scores and not (metric == "acc_norm" and name == "mmlu"):
            assert scores[metric] == pytest.approx(theirs["results"][base][f"{metric},none"], abs=1e-12)


# Texts


def test_bits_per_byte(directory, tmp_path):
    """Every token counts once, behind as much as fits; the windows that are told are all of them."""
    import torch
    from transformers import AutoModelForCausalLM

    (tmp_path / "a.txt").write_text(TEXT * 3)
    (tmp_path / "b.txt").write_text("the moon")
    (tmp_path / "empty.txt").write_text("")
    scorer = Scorer(directory, context=16)
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt", "empty.txt")]
    windows: list[int] = []  # how many are announced, then how many are done

    def progress(total: int):
        windows.append(total)
        return windows.append

    found = text.of_files(scorer, paths, progress)
    assert windows[0] == sum(windows[1:]) == 5
    assert found.bytes == len((TEXT * 3).encode()) + len("the moon")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    nll = tokens = 0
    for document in (TEXT * 3, "the moon"):
        ids = [scorer.prefix(), *scorer.model.encode(document, bos=False)]
        for begin in range(0, len(ids) - 1, 16):
            end = min(begin + 16, len(ids) - 1)
            window = ids[max(0, end - 16) : end + 1]
            with torch.no_grad():
                logs = model(torch.tensor([window[:-1]])).logits[0].log_softmax(-1)
            counted = range(len(window) - 1 - (end - begin), len(window) - 1)
            nll -= sum(logs[i, window[i + 1]].item() for i in counted)
        tokens += len(ids) - 1
    assert found.tokens == tokens
    assert found.nll == pytest.approx(nll, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nll / math.log(2) / found.bytes, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(nll / tokens), rel=1e-4)


def test_shards(directory, tmp_path):
    scorer = Scorer(directory, context=16)
    ids = scorer.model.encode(TEXT * 3, bos=False)
    own = scorer.model.tokenizer
    write_bin(tmp_path / "x_000.bin", np.array(ids, np.uint32), own.vocab_size, own.hash)
    (tmp_path / "a.txt").write_text(TEXT * 3)
    done: list[int] = []
    found, wanted = (
        text.of_shards(scorer, f"{tmp_path}/x_*.bin", lambda total: done.append),
        text.of_files(scorer, [f"{tmp_path}/a.txt"]),
    )
    assert found == wanted and sum(done) == 4
    write_bin(tmp_path / "x_001.bin", np.array(ids, np.uint32), own.vocab_size, 7)
    with pytest.raises(Error, match=r"x_001\.bin: expected tokens of the model's tokenizer"):
        text.of_shards(scorer, f"{tmp_path}/x_*.bin")
    assert "expected token files" in refused(text.of_shards, scorer, f"{tmp_path}/none_*.bin")
    write_bin(tmp_path / "empty_000.bin", np.array([], np.uint32), own.vocab_size, own.hash)
    assert "expected tokens, found none" in refused(text.of_shards, scorer, f"{tmp_path}/empty_*.bin")


def test_shards_of_a_rank_file(tmp_path, monkeypatch):
    """Whose tokens a checkpoint knows by the tokenizer.json that was exported."""
    monkeypatch.setattr(text, "IDS_AT_ONCE", 7)
    own = tokenizer.of_ranks(tokenizer.train([TEXT * 20], 290))
    model = write_directory(tmp_path / "model", vocab_size=own.vocab_size)
    tokenizer.export(model, own)
    ids = np.array([own.bos, *own.encode(TEXT), own.bos, *own.encode("é")], np.uint32)
    write_bin(tmp_path / "x_000.bin", ids, own.vocab_size, own.hash)
    found = text.of_shards(Scorer(model), f"{tmp_path}/x_*.bin")
    assert found.bytes == len((TEXT + "é" + 2 * "<|endoftext|>").encode()) and found.tokens == len(ids)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/piqa.jsonl").write_text(json.dumps(ROWS["piqa"]) + "\n")
    flags = ["--tasks", "piqa", "--data", tmp_path / "tasks", "--prepare", tmp_path]
    command(model, *flags)
    assert read_questions(tmp_path / "piqa.questions").hash == own.hash


# The command


def command(directory: Path, *arguments, code: int = 0) -> str:
    found = run_llamac("eval", directory, *arguments, code=code)
    return found.stdout if code == 0 else found.stderr


def test_the_command(directory, files, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    flags = ["--tasks", "arc,winogrande,mmlu", "--data", files, "--limit", "30", "--text", tmp_path / "a.txt"]
    output = command(directory, *flags, "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    names = [(row["task"], row["metric"]) for row in found["results"]]
    both = [(name, metric) for name in ("arc_easy", "arc_challenge") for metric in ("acc", "acc_norm")]
    alone = [(name, "acc") for name in ("winogrande", "mmlu", "mmlu: anatomy", "mmlu: virology")]
    assert names == [*both, *alone, ("text", "bits_per_byte"), ("text", "perplexity")]
    assert [len(found["questions"][name]) for name in ("arc_easy", "winogrande")] == [30, 30]
    for row in found["results"]:
        lines = (x for x in output.splitlines() if x.startswith(row["task"] + " "))
        line = next(x for x in lines if f" {row['metric']} " in x)
        assert f"{row['value']:.4f}" in line.split()
    for name, answered in found["questions"].items():
        right = np.mean([int(np.argmax(each["logs"])) == each["gold"] for each in answered])
        assert right == next(r["value"] for r in found["results"] if r["task"] == name)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["nothing to do"]),
        (["--tasks", "piqa,other"], ["--tasks", "hellaswag", "found other"]),
        (["--tasks", "piqa", "--data", "nowhere"], ["nowhere", "piqa.jsonl"]),
        (["--text", "missing.txt"], ["missing.txt", "cannot open"]),
        (["--text", "missing.txt", "--limit", "0"], ["--limit", "found 0"]),
        (["--text", "missing.txt", "--limit", "5"], ["--limit", "--tasks"]),
        (["--text", "missing.txt", "--context", "9999"], ["at most 256", "found 9999"]),
    ],
)
def test_what_the_command_refuses(directory, monkeypatch, arguments, words):
    monkeypatch.setattr("sys.argv", ["eval", str(directory), *map(str, arguments)])
    said = refused(main)
    assert all(word in said for word in words), said


def test_a_refusal_is_a_line_and_an_exit_code(directory):
    lines = command(directory, code=2).strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("llamac eval: "), lines


@pytest.mark.parametrize("name", list(tasks.TASKS))
def test_files_of_another_format(tmp_path, name):
    task = tasks.TASKS[name]
    path = tmp_path / f"{name}.jsonl"
    good = json.dumps(ROWS[name]) + "\n"
    path.write_text(good + '{"text": "x"}\n')
    assert f"{name}.jsonl: row 2: expected a row of {name} " in refused(list, tasks.read(task, tmp_path))
    path.write_text(good + "{\n")
    assert f"{name}.jsonl: line 2: expected JSON" in refused(list, tasks.read(task, tmp_path))
    path.write_text("")
    assert "expected rows" in refused(list, tasks.read(task, tmp_path))
    path.unlink()
    (tmp_path / f"{name}.parquet").write_text("no Parquet")
    assert f"{name}.parquet: expected Parquet" in refused(list, tasks.read(task, tmp_path))
    label = {"mmlu": "answer", "winogrande": "answer", "hellaswag": "label", "piqa": "label"}
    key = label.get(name, "answerKey")
    (tmp_path / f"{name}.parquet").unlink()
    path.write_text(json.dumps(ROWS[name] | {key: 9}) + "\n")
    assert "row 1" in refused(list, tasks.read(task, tmp_path))
