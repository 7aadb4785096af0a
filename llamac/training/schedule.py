"""Written twice on purpose: csrc/run/schedule.cpp has the same rule; test_agreement.py::test_learning_rate.

The learning rate of each step: linear warm-up, then cosine, linear, constant or warm-up-stable-decay.
"""

import math


def learning_rate(
    step: int, *, lr: float, min_lr_frac: float, warmup_steps: int, steps: int, schedule: str
) -> float:
    """Learning rate of step `step` (1 .. steps); the same double arithmetic as the C program's."""
    if step <= warmup_steps:
        return lr * step / warmup_steps
    minimum = lr * min_lr_frac
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    if schedule == "cosine":
        return minimum + 0.5 * (1.0 + math.cos(math.pi * progress)) * (lr - minimum)
    if schedule == "linear":
        return lr + (minimum - lr) * progress
    if schedule == "constant":
        return lr
    if schedule == "wsd":
        # The last fifth, or what the warm-up leaves of it.
        begin = max(warmup_steps, steps - max(1, steps // 5))
        return lr if step <= begin else lr + (minimum - lr) * (step - begin) / (steps - begin)
    raise ValueError(f"unknown schedule {schedule}")
