"""The program's trainer for Python: `./train_llama3` step by step, with the same bits."""

import json
import os
import warnings
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from llamac.base.arguments import split_list
from llamac.base.errors import InputError, printable
from llamac.base.files import check_text, read_json
from llamac.base.native import native
from llamac.data import read_bin, tokenizer
from llamac.data.tokens import IGNORED, as_ids

_NO_DATA = {"train-data": "none", "val-data": "none"}


def _json(values: dict[str, Any]) -> str:
    """Flags' values, by names with underscores or dashes, for the program's parser."""
    found = {}
    for name, value in values.items():
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=os.fspath)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"{name}: expected text, a number, a truth value or a list: {error}") from None
        found[name.replace("_", "-")] = json.loads(check_text(text, name))
    return json.dumps(found)


def _layers(config: Any) -> tuple[str | None, list[tuple[str, str]]]:
    """The TOML file (None: that of the run that the flags resume) and the values, with what begins messages,
    that Trainer's first argument means."""
    if isinstance(config, SimpleNamespace):
        return "", [("", _json(vars(config)))]
    if config is None:
        return None, [("", _json(_NO_DATA))]
    path = Path(config)
    if path.suffix == ".toml":
        return str(path), []
    manifest = path / "manifest.json"
    if not manifest.exists():
        return "", [("", _json(_NO_DATA | {"model": config}))]
    values = read_json(manifest, {"config": {}})["config"]
    return "", [(f"{manifest}: ", _json(values)), ("", _json({"model": path, "resume": path}))]


def _options(text: str) -> SimpleNamespace:
    return SimpleNamespace(**{name.replace("-", "_"): value for name, value in json.loads(text).items()})


class Trainer:
    """One training run, with the model on the device (the CPU in a CPU build).

    config: a TOML file that `--config` takes; a preset's name; a Hugging Face directory, with whose weights,
    where it has any, the run begins (unless `init="random"`); a checkpoint, Trainer's or the program's, that
    it goes on from, with the run's options; or another Trainer's options. flags: the program's flags over
    these, with underscores: `Trainer("tiny", lr=1e-3)`. Without config, `Trainer(resume="auto", out=OUT)`
    goes on with the run in OUT, by its config.toml. Options, files and checkpoints name training and
    validation data, which are opened; a model alone names none, nor does `train_data="none"`. A run's
    learning rates follow its schedule, so `steps` says how long it will be.

    The caller is the loop: the flags of the program's own (val_every, checkpoint_every, out, profile, ...) do
    nothing, and nothing is written but by save(). One call computes at a time in a process; other Python
    threads run on. Raises Error (a ValueError) for bad input, in one line: what, where, expected, found.

    options: all flags, resolved, as attributes. config: the model's config.json.
    """

    def __init__(self, config: str | os.PathLike | SimpleNamespace | None = None, **flags: Any):
        file, layers = _layers(config)
        self._native = native.Trainer(file, [*layers, ("", _json(flags))])
        self.options = _options(self._native.options)
        self.config: dict[str, Any] = json.loads(self._native.config)
        self._last: dict[str, float] = {}
        self._tokenizer: Any = None  # once encode() has found it
        for line in self._native.warnings.splitlines():
            warnings.warn(printable(line), stacklevel=2)

    @property
    def steps_done(self) -> int:
        """Optimizer steps done, including those before the checkpoint that the run resumed."""
        return self._native.steps_done

    @property
    def last(self) -> dict[str, float]:
        """Of the last step: step (from 1), loss, grad_norm (before clipping), lr, ms; skipped, loss_scale (of
        fp16). {} before the first."""
        return dict(self._last)

    def step(self, tokens: Any = None, targets: Any = None, counted: bool = False) -> float:
        """One step: micro-batches, gradient norm, AdamW. Returns its loss, the mean over its tokens.

        tokens, targets: integers [accumulation * B, T], micro-batch after micro-batch, B = batch_size and T =
        seq_len, with several ranks those of this one, which ranks of a tp or cp axis give alike; numpy's, or
        with `__dlpack__`, on the host or on the device; or nested lists. Targets are the next tokens; -100
        counts as loss 0. counted: it does not count, and the loss is the mean over the other targets of all
        micro-batches, as transformers has it.
        Without arguments: the run's own next batch, as the program draws it.
        """
        if self.steps_done >= self.options.steps:
            expected = f"at most steps = {self.options.steps} steps"
            raise InputError(f"step {self.steps_done + 1}: expected {expected}")
        if tokens is None and targets is None:
            if not self._native.has_training_data:
                raise InputError("step: expected tokens and targets, or train_data, found neither")
            self._last = self._native.step()
        else:
            rows = self._native.accumulation * self.options.batch_size
            self._last = self._native.step(*self._batch(tokens, targets, rows), counted)
        return self._last["loss"]

    def validate(self, tokens: Any = None, targets: Any = None) -> float:
        """Mean loss, weights unchanged. tokens, targets: integers [any, up to seq_len], as step() takes them.
        Without arguments: over the run's validation batches, at most val_steps of them, as the program does
        it."""
        if tokens is None and targets is None:
            if not self._native.has_validation_data:
                raise InputError("validate: expected tokens and targets, or val_data, found neither")
            return self._native.validate()
        return self._native.validate(*self._batch(tokens, targets))

    def evaluate(self) -> dict[str, dict[str, Any]]:
        """{task: {"accuracy", "accuracy_norm" or None, "questions"}} of the flag eval_tasks."""
        if not self.options.eval_tasks:
            raise InputError("evaluate: expected eval_tasks, found none")
        return self._native.evaluate()

    def sample(
        self,
        n: int | str | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        prompt: Sequence[int] | str | None = None,
    ) -> list[int] | str:
        """Ids of n tokens that the model writes after the prompt (by default the flag sample_prompt_ids, else
        the token that stands before a document); after a text, as in `sample("def ")` or with prompt="def ",
        their text. The flags sample_tokens, sample_temperature (0: the likeliest token) and sample_top_k (0:
        all) are the defaults. The same of the same weights: random numbers come from the seed and the number
        of steps."""
        if isinstance(n, str):
            if prompt is not None:
                raise InputError(f"sample: expected one prompt, found {n!r} and another")
            n, prompt = None, n
        given = {"sample_tokens": n, "sample_temperature": temperature, "sample_top_k": top_k}
        given = {name: value for name, value in given.items() if value is not None}
        o = _options(native.options("", [("", _json(vars(self.options) | given))]))
        if isinstance(prompt, str):
            ids: Sequence[int] = [self._native.first_token(), *self.encode(prompt)]
        elif prompt is None:
            given_ids = map(int, split_list("sample_prompt_ids", o.sample_prompt_ids))
            ids = list(given_ids) or [self._native.first_token()]
        else:
            ids = prompt
        start = self._ids(ids, "prompt", 1).tolist()
        made = self._native.sample(start, o.sample_tokens, o.sample_temperature, o.sample_top_k)
        return self.decode(made) if isinstance(prompt, str) else made

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, by the tokenizer beside the training data or of the flag tokenizer."""
        if self._tokenizer is None:
            o = self.options
            if o.train_data:
                shards = [read_bin(path) for path in sorted(glob(o.train_data), key=os.fsencode)]
                self._tokenizer = tokenizer.find(o.tokenizer, shards)
            elif o.tokenizer not in ("auto", "none"):
                self._tokenizer = tokenizer.load(o.tokenizer)
        if self._tokenizer is None:
            expected = "expected train_data with a tokenizer in its folder, or the flag tokenizer"
            raise InputError(f"encode: {expected}, found neither")
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, by the tokenizer beside the training data or of the flag tokenizer; without
        one, the ids themselves. Bytes that are not UTF-8 become U+FFFD."""
        array = np.asarray(ids)
        if array.size and (array.ndim != 1 or array.dtype.kind not in "iu" or not (abs(array) < 2**31).all()):
            raise InputError("ids: expected a list of integers below 2^31")
        return self._native.text_of(array.tolist()).decode(errors="replace")

    def save(self, path: str | os.PathLike) -> None:
        """Write a checkpoint into a new directory: config.json and model.safetensors, which transformers
        opens, the optimizer's state and a manifest. `--resume PATH` and Trainer(path) continue it with the
        same bits."""
        directory = os.path.abspath(path)
        if "\0" in directory:
            raise InputError(f"save: expected a path, found {directory!r}")
        try:
            os.makedirs(os.path.dirname(directory), exist_ok=True)
        except OSError as error:
            raise InputError(f"{error.filename}: {error.strerror}") from None
        self._native.save(os.fsencode(directory))

    def parameters(self) -> dict[str, np.ndarray]:
        """Copies of all weights by Hugging Face's names, in float32, which holds bfloat16 exactly."""
        return self._native.parameters()

    def _batch(self, tokens: Any, targets: Any, rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Both as int32, checked: [rows, seq_len]; without rows, any number of them, of at most seq_len."""
        if tokens is None or targets is None:
            missing = "tokens" if tokens is None else "targets"
            raise InputError(f"{missing}: expected an array of integers, found none")
        arrays = self._ids(tokens, "tokens", 2), self._ids(targets, "targets", 2, IGNORED)
        for name, array in zip(("tokens", "targets"), arrays):
            T = self.options.seq_len
            good = array.shape == (rows, T) if rows else array.size and array.shape[1] <= T
            if not good:
                expected = f"({rows}, {T})" if rows else f"(rows, up to {T})"
                raise InputError(f"{name}: expected shape {expected}, found {array.shape}")
        if arrays[0].shape != arrays[1].shape:
            raise InputError(f"targets: expected shape {arrays[0].shape} as tokens, found {arrays[1].shape}")
        return arrays

    def _ids(self, array: Any, what: str, rank: int, none: int | None = None) -> np.ndarray:
        """as_ids() of an array of any library."""
        if hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray):
            array = native.host_array(array, what)
        return as_ids(array, what, self.config["vocab_size"], rank, none)
