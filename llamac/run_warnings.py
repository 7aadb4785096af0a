"""Warnings about runs that can be computed but look wrong: the lines of the C program (train/warnings.h;
tests/test_program.py compares them).
"""

from pathlib import Path

from llamac import hf
from llamac.config import Config, find_weights, load_config
from llamac.data import Loader
from llamac.options import Options


def run_warnings(o: Options, config: Config, data: Loader, devices: int = 1) -> list[str]:
    """The lines; data is the training data."""
    lines = []
    shard = data.shards[0]
    if shard.vocab_size not in (0, config.vocab_size):
        which = f"tokens of a vocabulary of {shard.vocab_size}, the model's is {config.vocab_size}"
        doubt = f"the ids from {shard.vocab_size} on never occur"
        if o.init == "load":
            doubt = "were the weights trained on these tokens?"
        lines.append(f"{shard.path}: {which}: {doubt}")
    if 0 < o.steps < o.warmup_steps:
        end = f"the run ends at step {o.steps}, before its learning rate has reached --lr {o.lr!r}"
        lines.append(f"--warmup-steps {o.warmup_steps}: {end}")
    if data.is_packed and o.document_mask != "on":
        apart = "packed documents see those before them; --document-mask on keeps them apart"
        lines.append(f"{shard.path}: {apart}")
    passes = o.steps * o.micro_batches(devices) * o.batch_size * devices / data.sequences
    if passes > 1:
        times = f"{passes:.1f} times ({data.sequences} sequences)"
        lines.append(f"--steps {o.steps}: the run reads its training data {times}")
    if Path(o.model).is_dir() and not find_weights(o.model):
        lines.append(f"--model {o.model}: the directory has no weights; the initial weights are random")
    if o.init == "load" and config.tie_word_embeddings != load_config(o.model).tie_word_embeddings:
        lines.append(hf.own_head_line(o.model))
    return lines
