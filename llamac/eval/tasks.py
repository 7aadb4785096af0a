"""Multiple-choice tasks: the rows of their original files as questions, with the wording of lm-eval 0.4.

A choice's score is the likelihood of a continuation after a context. The choice with the largest score is the
model's answer.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llamac.base.arguments import split_list
from llamac.base.errors import InputError, first_line, requires
from llamac.base.files import excerpt
from llamac.data.documents import whole_rows
from llamac.data.inputs import describe


@dataclass(frozen=True)
class Question:
    """pairs: (context, continuation) of each choice. lengths: of the choices, in characters, by which
    acc_norm divides; None where the task has no such score. group: of the questions that are counted by
    themselves, too, or ""."""

    pairs: list[tuple[str, str]]
    gold: int
    lengths: list[int] | None = None
    group: str = ""


@dataclass(frozen=True)
class Task:
    """question: of a row, raising KeyError, ValueError, TypeError, AttributeError or IndexError for a row of
    another format. split: whose files are read. hub: NAME or NAME:CONFIG there."""

    name: str
    question: Callable[[dict], Question]
    split: str
    hub: str


def _choices(context: str, choices: list[str], gold: int, normed: bool = True, group: str = "") -> Question:
    if not 0 <= gold < len(choices) or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError
    lengths = [len(choice) for choice in choices] if normed else None
    return Question([(context, f" {choice}") for choice in choices], gold, lengths, group)


def _cleaned(text: str) -> str:
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _hellaswag(row: dict) -> Question:
    context = row["ctx_a"] + " " + row["ctx_b"].capitalize()
    endings = [_cleaned(ending) for ending in row["endings"]]
    return _choices(_cleaned(row["activity_label"] + ": " + context), endings, int(row["label"]))


def _arc(row: dict) -> Question:
    labels, texts = list(row["choices"]["label"]), list(row["choices"]["text"])
    return _choices(f"Question: {row['question']}\nAnswer:", texts, labels.index(row["answerKey"]))


def _piqa(row: dict) -> Question:
    return _choices(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], int(row["label"]))


def _winogrande(row: dict) -> Question:
    before, after = row["sentence"].split("_", 1)
    pairs = [(before + row[option], " " + after.strip()) for option in ("option1", "option2")]
    return Question(pairs, {"1": 0, "2": 1}[str(row["answer"])])


def _mmlu(row: dict) -> Question:
    subject, choices = row.get("subject", ""), list(row["choices"])
    lines = [f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True)]
    about = f" about {subject.replace('_', ' ')}" if subject else ""
    context = "\n".join([row["question"].strip(), *lines, "Answer:"])
    intro = f"The following are multiple choice questions (with answers){about}.\n\n"
    return _choices(intro + context, list("ABCD"), int(row["answer"]), False, subject)


# For messages: the fields of a row.
_FIELDS: dict[Callable[[dict], Question], str] = {
    _hellaswag: "activity_label, ctx_a, ctx_b, endings, label",
    _arc: "question, choices, answerKey",
    _piqa: "goal, sol1, sol2, label",
    _winogrande: "sentence, option1, option2, answer",
    _mmlu: "question, choices, answer, subject",
}
_TASKS = (
    Task("hellaswag", _hellaswag, "validation", "Rowan/hellaswag"),
    Task("arc_easy", _arc, "test", "allenai/ai2_arc:ARC-Easy"),
    Task("arc_challenge", _arc, "test", "allenai/ai2_arc:ARC-Challenge"),
    Task("piqa", _piqa, "validation", "baber/piqa"),
    Task("winogrande", _winogrande, "validation", "allenai/winogrande:winogrande_xl"),
    Task("mmlu", _mmlu, "test", "cais/mmlu:all"),
)
TASKS = {task.name: task for task in _TASKS}
GROUPS = {"arc": ("arc_easy", "arc_challenge")}


def named(names: str) -> list[Task]:
    """The tasks of a list such as "arc,piqa". Raises InputError for a name that is none."""
    found: list[Task] = []
    for name in split_list("--tasks", names):
        members = GROUPS.get(name, (name,))
        if not set(members) <= TASKS.keys():
            known = ", ".join([*TASKS, *GROUPS])
            raise InputError(f"--tasks: expected some of {known}, found {name}")
        found += [TASKS[member] for member in members if TASKS[member] not in found]
    return found


def read(task: Task, folder: Path) -> Iterator[Question]:
    """The questions of FOLDER/NAME, or FOLDER/NAME.jsonl or .parquet. Raises InputError with file and row."""
    for path in _files(task, folder):
        yield from _questions(task, _rows(path), str(path))


def from_hub(task: Task) -> Iterator[Question]:
    """The questions of the hub's data set, which the package datasets downloads."""
    datasets = requires("datasets", f"{task.name} without --data")
    name, _, configuration = task.hub.partition(":")
    try:
        found = datasets.load_dataset(name, configuration or None, split=task.split)
    except Exception as error:  # what datasets raises has no class of its own
        raise InputError(f"{name}: cannot load: {first_line(error)}; --data takes a copy") from None
    yield from _questions(task, found, name)


def _questions(task: Task, rows: Iterable[dict], where: str) -> Iterator[Question]:
    number = 0
    for number, row in enumerate(rows, 1):
        try:
            yield task.question(row)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError):
            expected = f"a row of {task.name} ({_FIELDS[task.question]})"
            raise InputError(f"{where}: row {number}: expected {expected}, found {excerpt(row)}") from None
    if not number:
        raise InputError(f"{where}: expected rows of {task.name}, found none")


def _files(task: Task, folder: Path) -> list[Path]:
    kinds = (".jsonl", ".parquet")
    single = [path for kind in kinds if (path := folder / f"{task.name}{kind}").is_file()]
    if single:
        return single[:1]
    there = folder / task.name
    paths = sorted(path for kind in kinds for path in there.glob(f"**/*{kind}")) if there.is_dir() else []
    of_split = [path for path in paths if task.split in path.name or task.split in path.parent.name]
    if not paths or (not of_split and len(paths) > 1):
        expected = (
            f"{task.name}.jsonl or .parquet, or a folder {task.name} with {task.split}*.parquet or .jsonl"
        )
        raise InputError(f"{folder}: expected {expected}, found {'several others' if paths else 'none'}")
    return of_split or paths


def _rows(path: Path) -> Iterator[dict]:
    for where, row, reason in whole_rows([describe(str(path))]):
        if reason:
            raise InputError(f"{where}: expected JSON, found {reason}")
        yield row
