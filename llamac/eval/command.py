"""`llamac eval DIR --tasks hellaswag,mmlu,arc,piqa,winogrande --data FOLDER` evaluates a model.

DIR is a checkpoint, a run's output folder (its newest checkpoint), or any Hugging Face directory of a Llama
with its tokenizer. --tasks are multiple-choice questions with the wording and scoring of lm-eval. FOLDER
contains the original files of the data sets (NAME.jsonl, NAME.parquet, or a folder NAME of them); without
--data they come from the hub. --text and --shards compute bits per byte and perplexity. --prepare FOLDER
writes the tasks' questions as token ids, for --eval-tasks of a training run. docs/guides/evaluate.md has
examples.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from llamac.base.arguments import Parser, check_least, table
from llamac.base.errors import InputError, printable
from llamac.base.files import write_text
from llamac.data.tokenizer import data_hash
from llamac.eval import questions as asked
from llamac.eval import tasks, text
from llamac.eval.likelihood import BATCH_TOKENS, PairEncoder, Scorer
from llamac.eval.tasks import Question, Task
from llamac.inference.model import add_flags

Row = dict[str, str | float | int | None]


def _parser() -> Parser:
    parser = Parser("eval", __doc__)
    add = parser.add_argument
    add("directory", metavar="DIR", help="config.json, weights, tokenizer; or a run's output folder")
    known = ", ".join([*tasks.TASKS, *tasks.GROUPS])
    add("--tasks", default="", metavar="LIST", help=f"tasks, separated by commas: {known}")
    parser.path("--data", "folder of the tasks' files (default: the hub)", "FOLDER")
    parser.integer("--limit", "use the first N questions of each task")
    add("--text", nargs="+", metavar="FILE", help="compute bits per byte of text files, one document each")
    add("--shards", metavar="PATTERN", help="compute the perplexity of token files")
    parser.path("--prepare", "write NAME.questions of the tasks; DIR may be a tokenizer", "FOLDER")
    add("--json", metavar="FILE", help="write the results and each question's answer")
    parser.integer("--batch-tokens", f"tokens per pass ({BATCH_TOKENS})", BATCH_TOKENS)
    parser.integer("--context", "tokens per sequence (the model's, up to --batch-tokens)")
    add_flags(parser)
    return parser


def answers(scorer: Scorer, questions: list[Question], done: Callable[[int], object] | None = None):
    """(likelihoods of the choices) of each question."""
    pairs = [pair for question in questions for pair in question.pairs]
    found = iter(scorer.of_texts(pairs, done))
    return [[next(found).log for _ in question.pairs] for question in questions]


def _score(name: str, metric: str, right: list[bool]) -> Row:
    n, mean = len(right), float(np.mean(right))
    error = math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else None
    return {"task": name, "metric": metric, "value": mean, "stderr": error, "n": n}


def count(task: Task, questions: list[Question], logs: list[list[float]]) -> list[Row]:
    """The scores of a task, and of its groups."""
    right = [int(np.argmax(log)) == q.gold for q, log in zip(questions, logs)]
    rows = [_score(task.name, "acc", right)]
    if questions[0].lengths:
        normed = [np.array(log) / np.array(q.lengths, float) for q, log in zip(questions, logs)]
        rows.append(
            _score(task.name, "acc_norm", [int(np.argmax(x)) == q.gold for q, x in zip(questions, normed)])
        )
    for group in sorted({q.group for q in questions} - {""}):
        of_group = [good for q, good in zip(questions, right) if q.group == group]
        rows.append(_score(f"{task.name}: {group}", "acc", of_group))
    return rows


def _questions(task: Task, args: argparse.Namespace) -> list[Question]:
    every = tasks.read(task, args.data) if args.data else tasks.from_hub(task)
    return list(islice(every, args.limit))


def prepare(encoder: PairEncoder, args: argparse.Namespace) -> None:
    """A file of questions for each task."""
    own = encoder.tokenizer
    hash = data_hash(own)
    args.prepare.mkdir(parents=True, exist_ok=True)
    for task in tasks.named(args.tasks):
        questions = _questions(task, args)
        made = [
            asked.Asked([encoder.encode_pair(*pair) for pair in q.pairs], q.gold, q.lengths)
            for q in questions
        ]
        path = args.prepare / f"{task.name}{asked.SUFFIX}"
        asked.write(path, asked.Questions(made, own.vocab_size, hash))
        print(f"{path}: {len(made):,} questions")


def _bar(total: int, what: str) -> Callable[[int], object]:
    """Counts what is done, on a terminal."""
    return tqdm(total=total, desc=what, disable=None).update


def evaluate(scorer: Scorer, args: argparse.Namespace):
    """(rows of results, {task: [{"gold", "logs"} of each question]})."""
    rows, details = [], {}
    for task in tasks.named(args.tasks):
        questions = _questions(task, args)
        total = sum(len(q.pairs) for q in questions)
        logs = answers(scorer, questions, _bar(total, f"{task.name}: choices"))
        rows += count(task, questions, logs)
        details[task.name] = [{"gold": q.gold, "logs": log} for q, log in zip(questions, logs)]
    for what, score, given in (("text", text.of_files, args.text), ("shards", text.of_shards, args.shards)):
        if not given:
            continue
        found = score(scorer, given, partial(_bar, what=f"{what}: windows"))
        for metric in ("bits_per_byte", "perplexity"):
            value = getattr(found, metric)
            if value is not None:
                rows.append(
                    {"task": what, "metric": metric, "value": value, "stderr": None, "n": found.tokens}
                )
    return rows, details


def as_table(rows: list[Row]) -> str:
    """The results as aligned columns."""
    lines = []
    for row in rows:
        error = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
        lines.append((str(row["task"]), str(row["metric"]), f"{row['value']:.4f}", error, str(row["n"])))
    return table(("task", "metric", "value", "stderr", "n"), 2, lines)


def main() -> None:
    args = _parser().parse_args()
    if not (tasks.named(args.tasks) or args.text or args.shards):
        raise InputError("nothing to do: expected --tasks, --text or --shards, found none of them")
    check_least(args, limit=1)
    if args.limit is not None and not args.tasks:
        raise InputError("--limit: expected it with --tasks, whose questions it limits")

    if args.prepare:
        if not args.tasks or args.text or args.shards or args.json:
            raise InputError("--prepare: expected --tasks and neither --text, --shards nor --json")
        prepare(PairEncoder(args.directory), args)
        return

    scorer = Scorer(
        args.directory, args.dtype, args.context, batch_tokens=args.batch_tokens, kernels=args.kernel
    )
    rows, details = evaluate(scorer, args)
    print(printable(as_table(rows)))
    if args.json:
        write_text(Path(args.json), json.dumps({"results": rows, "questions": details}, indent=1) + "\n")
