"""Rows of the tasks of llamac.eval, in the formats of their own files."""

import numpy as np
from directories import TEXT

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
