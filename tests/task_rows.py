"""Rows of the tasks of llamac.eval, in the formats of their own files; a reader of what --prepare makes."""

from pathlib import Path

import numpy as np
from hf_dirs import TEXT

from llamac.eval.questions import Asked, Questions


def read_questions(path: Path) -> Questions:
    """A file NAME.questions, by csrc/data/questions.h."""
    words = np.frombuffer(path.read_bytes(), "<u4").tolist()
    _, _, vocab_size, n, choices, _, low, high, *_ = words
    every, sizes, ids = (
        words[16 : 16 + 2 * n],
        words[16 + 2 * n : 16 + 2 * n + 3 * choices],
        iter(words[16 + 2 * n + 3 * choices :]),
    )
    taken = [
        [[next(ids) for _ in range(count)] for count in sizes[k : k + 2]] for k in range(0, len(sizes), 3)
    ]
    pairs, lengths, found = iter(map(tuple, taken)), iter(sizes[2::3]), []
    for count, gold in zip(every[::2], every[1::2]):
        own = [next(pairs) for _ in range(count)]
        long = [next(lengths) for _ in range(count)]
        found.append(Asked(own, gold, long if words[10] else None))
    return Questions(found, vocab_size, low | high << 32)


WORDS = TEXT.split()
ROWS = {
    "hellaswag": {
        "activity_label": "Cats",
        "ctx_a": "The cat [sits]  on the mat. [title] Now",
        "ctx_b": "it LOOKS up",
        "endings": [" and [step] sees the moon", "sleeps", "flies  away", "is a dog"],
        "label": "2",
    },
    "arc_easy": {
        "question": "Where is the cat?",
        "choices": {"text": ["moon", "mat"], "label": ["A", "B"]},
        "answerKey": "B",
    },
    "piqa": {"goal": "Feed the cat", "sol1": "with fish", "sol2": "with the moon itself", "label": 0},
    "winogrande": {
        "sentence": "The cat saw the _ and sat.",
        "option1": "moon",
        "option2": "mat",
        "answer": "2",
    },
    "mmlu": {"question": " Who? ", "choices": ["a", "b", "c", "d"], "answer": 3, "subject": "cat_lore"},
}
ROWS["arc_challenge"] = ROWS["arc_easy"] | {
    "answerKey": "1",
    "choices": {"text": ["x", "y"], "label": ["1", "2"]},
}


def drawn_row(name: str, rng: np.random.Generator) -> dict:
    """A row of other words, in the same format."""

    def words(least: int = 1, most: int = 9) -> str:
        return " ".join(rng.choice(WORDS, rng.integers(least, most)))

    row = dict(ROWS[name])
    if name == "hellaswag":
        row |= {"ctx_a": words(), "ctx_b": words(), "endings": [words() for _ in range(4)]}
        row["label"] = str(rng.integers(4))
    elif name.startswith("arc"):
        labels = list("ABCDE"[: rng.integers(3, 6)])
        row = {"question": words(), "choices": {"text": [words() for _ in labels], "label": labels}}
        row["answerKey"] = str(rng.choice(labels))
    elif name == "piqa":
        row |= {"goal": words(), "sol1": words(), "sol2": words(), "label": int(rng.integers(2))}
    elif name == "winogrande":
        row = {"sentence": f"{words()} _ {words()}.", "option1": words(1, 3), "option2": words(1, 3)}
        row["answer"] = str(rng.integers(1, 3))
    else:
        subject = str(rng.choice(["anatomy", "virology"]))
        row = {"question": words(), "choices": [words() for _ in range(4)], "subject": subject}
        row["answer"] = int(rng.integers(4))
    return row
