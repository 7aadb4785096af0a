"""Written twice on purpose: csrc/train/{checkpoint,resume}.cpp and read_rows() in csrc/model/parameters.cpp
have the same rules and messages; tests/test_ranks.py compares them, and each resumes what the other wrote.

Checkpoints of train_llama3.py, written and resumed by any number of ranks. Each rank writes its rows of the
optimizer's state and some of the weights, at the same time as the others.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor, nn

from llamac import checkpoint, hf, manifest
from llamac.config import Config, load_config
from llamac.dtypes import TABLE, dtype_row
from llamac.errors import InputError
from llamac.options import Options
from llamac.output import OutputFolder, step_of, temporary_name
from llamac.training.ranks import DTYPES, everybodys, rank, world
from llamac.training.weights import Part, whole_weights

# Which one --resume means ===================================================================================


@dataclass
class ResumePoint:
    """A checkpoint whose files are as its manifest says. damaged: (name, reason) of newer ones that --resume
    auto passed over, newest first. No directory: the run begins at step 0.
    """

    directory: str = ""
    manifest: dict[str, Any] = field(default_factory=dict)
    damaged: list[tuple[str, str]] = field(default_factory=list)


def find(out: str, resume: str) -> ResumePoint:
    """What --resume means. Every byte of the checkpoint is read and verified. Raises InputError."""
    if resume == "none":
        return ResumePoint()
    if resume == "auto":
        point = _newest(Path(out)) if os.path.exists(out) else ResumePoint()
        if point.damaged and not point.directory:
            found = f"found {len(point.damaged)} damaged: {point.damaged[0][1]}"
            raise InputError(
                f"--resume auto: expected a complete checkpoint in {out}, {found}; "
                "--resume none starts again at step 0"
            )
        return point
    fields, problem = _open(Path(resume))
    if problem:
        parent = Path(resume).absolute().parent
        other = _newest(parent, Path(resume).name).directory if parent.is_dir() else ""
        beside = f"; the newest complete checkpoint in its folder is {other}" if other else ""
        raise InputError(problem + beside)
    return ResumePoint(resume, fields)


def _newest(folder: Path, excepted: str = "") -> ResumePoint:
    """The newest complete checkpoint of a folder."""
    point = ResumePoint()
    steps = [(step, name) for name in os.listdir(folder) if (step := step_of(name)) is not None]
    for _, name in sorted(steps, reverse=True):
        if name == excepted:
            continue
        fields, problem = _open(folder / name)
        if not problem:
            point.directory, point.manifest = str(folder / name), fields
            break
        point.damaged.append((name, problem))
    return point


def _open(directory: Path) -> tuple[dict[str, Any], str]:
    """The manifest, and how the checkpoint is damaged. Raises InputError where it cannot be read."""
    if not directory.is_dir():
        nothing = "something else" if directory.exists() else "nothing"
        return {}, f"{directory}: expected a checkpoint's directory, found {nothing}"
    if not (directory / manifest.NAME).exists():
        return {}, f"{directory}: expected a checkpoint, found a directory without {manifest.NAME}"
    found = checkpoint.check(directory)
    if not found.readable:
        raise InputError(found.problem)
    return found.manifest, f"{directory}/{found.problem}" if found.problem else ""


# Whether a run can go on from it ============================================================================


def check_resume(point: ResumePoint, o: Options, config: Config, tokens: int) -> None:
    """Raise InputError where the options ask for what the checkpoint cannot go on with. tokens: per step."""
    m, directory = point.manifest, point.directory

    def same(flag: str, asked: Any) -> None:
        if (made := m[flag.replace("-", "_")]) != asked:
            was = f"was written with --{flag} {made}"
            raise InputError(f"{directory}: {was}, expected the same, found {asked}")

    same("seed", o.seed)
    same("seq-len", o.seq_len)
    same("total-batch-size", tokens)
    same("dtype", o.dtype)
    same("optimizer-state", o.optimizer_state)
    same("master-weights", o.master_weights)
    if m["step"] > o.steps:
        expected = f"expected at most --steps {o.steps}"
        raise InputError(f"{directory}: {expected}, found a checkpoint of step {m['step']}")
    name = dtype_row(DTYPES[o.dtype]).torch
    if load_config(directory).to_dict(name) != config.to_dict(name):
        raise InputError(f"{directory}/config.json: is not the model that --model {o.model} means")


def skipped_data(point: ResumePoint, o: Options) -> int:
    """Sequences that are left out, before the checkpoint or from here on. Raises InputError."""
    m = point.manifest
    drawn = m["step"] * (m["total_batch_size"] // m["seq_len"])
    before = m["data_position"] - drawn
    if not 0 <= before <= 2**53:
        expected = f"expected {drawn}, the number that its steps have drawn, or up to 2^53 more"
        where = f"{point.directory}/{manifest.NAME}: data_position"
        raise InputError(f"{where}: {expected}, found {m['data_position']}")
    if 0 < o.data_skip < before:
        expected = f"expected at least {before}, which {point.directory} has left out"
        raise InputError(f"--data-skip {o.data_skip}: {expected}; without the flag they stay left out")
    return max(before, o.data_skip)


def resume_warnings(point: ResumePoint, o: Options, sequences: int) -> list[str]:
    """What a user should know of how the run begins; sequences: of the training data."""
    lines = [f"--resume auto: {name} is damaged: {reason}" for name, reason in point.damaged]
    if not point.directory:
        begins = f"--resume auto: no checkpoint in {o.out}: the run begins at step 0"
        return [*lines, begins] if o.resume == "auto" else lines
    if changed := _changed_flags(point.manifest, o, sequences):
        lines.append(f"{point.directory}: continues with other settings: {changed}")
    if more := skipped_data(point, o) - skipped_data(point, replace(o, data_skip=0)):
        further = f"the data continues {more} sequences after the checkpoint's"
        lines.append(f"{point.directory}: {further}")
    return [*lines, f"resuming from {point.directory}"]


_MAY_CHANGE = (
    *("steps", "lr", "min-lr-frac", "warmup-steps", "schedule", "weight-decay", "beta1", "beta2"),
    *("grad-clip", "batch-size", "grad-dtype", "matmul-dtype", "fp8-recipe", "fp8-gradients"),
    *("fp8-head", "fp8-keep-first", "fp8-keep-last", "train-data", "document-mask", "kernel"),
)


def _changed_flags(m: dict, o: Options, sequences: int) -> str:
    """What changes the steps and may change, but has other values than the checkpoint's run had."""
    now = json.loads(json.dumps(o.to_dict()))
    pairs = [(f"--{flag}", m["config"][flag], now[flag]) for flag in _MAY_CHANGE if flag in m["config"]]
    if m["sequences"] and sequences:
        what = "sequences of training data, whose order depends on their number:"
        pairs.append((what, m["sequences"], sequences))
    changed = [(what, json.dumps(was), json.dumps(now)) for what, was, now in pairs if was != now]
    return ", ".join(f"{what} was {was}, is {now}" for what, was, now in changed)


# Writing ====================================================================================================


def describe(o: Options, tokens: int, step: int, skip: int, sequences: int) -> dict[str, Any]:
    """The manifest's fields but files, after `step` steps of tokens tokens each."""
    return {
        "step": step,
        "data_position": step * (tokens // o.seq_len) + skip,
        "seed": o.seed,
        "world_size": world(),
        "seq_len": o.seq_len,
        "batch_size": o.batch_size,
        "sequences": sequences,
        "total_batch_size": tokens,
        "dtype": o.dtype,
        "grad_dtype": o.grad_dtype,
        "optimizer_state": o.optimizer_state,
        "master_weights": o.master_weights,
        "kernels": {},
        "gemms": {"device": "", "library": "", "choices": {}},
        "config": o.to_dict() | {"data-skip": skip},
    }


class _Writer:
    """A file of a checkpoint, which is hashed as it is written, and on the disk when it is closed."""

    def __init__(self, path: Path):
        self.file, self.bytes, self.digest = open(path, "xb"), 0, xxhash.xxh3_64()  # noqa: SIM115

    def write(self, data: Any) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.bytes += memoryview(data).nbytes

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self.file.flush()
            os.fsync(self.file.fileno())
        self.file.close()


def shard_name(stem: str, number: int) -> str:
    """A rank's file: model.safetensors, or with several ranks model-00001-of-00008.safetensors."""
    ranks = f"-{number + 1:05d}-of-{world():05d}" if world() > 1 else ""
    return f"{stem}{ranks}.safetensors"


def _writers(config: Config) -> dict[str, int]:
    """The rank that writes each weight: each consecutive ones, of about the same size in all."""
    found, begin, whole = {}, 0, config.num_parameters()
    for name, shape in config.parameters():
        elements = math.prod(shape)
        found[name] = (begin + elements // 2) * world() // whole
        begin += elements
    return found


def _index(config: Config, dtype: torch.dtype, writers: dict[str, int]) -> bytes:
    """transformers finds the ranks' files by it."""
    size = config.num_parameters() * dtype.itemsize
    weight_map = {name: shard_name("model", number) for name, number in writers.items()}
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    return (json.dumps(index, indent=2) + "\n").encode()


FP8_SCALE = "fp8.scale"  # in the first rank's file: the next step's scales, the same on all ranks


def _states(optimizer: Any, o: Options) -> Iterator[tuple[str, Part, Tensor]]:
    """(name, part, tensor) of the optimizer's state. Weights stored exactly are their own masters."""
    kinds = [("m.", optimizer.m), ("v.", optimizer.v)]
    if o.master_weights == "on" and TABLE[o.dtype].narrow:
        kinds.append(("master.", optimizer.master))
    for prefix, tensors in kinds:
        for part, x in zip(optimizer.parts, tensors, strict=True):
            yield prefix + part.name, part, x


def _own_files(folder: Path, model: nn.Module, optimizer: Any, o: Options, carried: dict) -> list[dict]:
    """Write this rank's files; their records for the manifest."""
    config, dtype, records = model.config, DTYPES[o.dtype], []
    writers = _writers(config)

    def add(name: str, role: str, write: Any, number: int | None = None) -> None:
        with _Writer(folder / name) as file:
            write(file)
        xxh3 = file.digest.hexdigest()
        records.append({"name": name, "bytes": file.bytes, "xxh3": xxh3, "role": role, "rank": number})

    def write_weights(file: _Writer) -> None:
        entries = [(name, dtype, shape) for name, shape in config.parameters() if writers[name] == rank()]
        hf.write_safetensors(file, entries, whole_weights(model, dtype, lambda name: writers[name] == rank()))

    def write_states(file: _Writer) -> None:
        states = [(name, x) for name, _, x in _states(optimizer, o)]
        scale = model.fp8.state() if model.fp8 and rank() == 0 else None
        if scale is not None:
            states.append((FP8_SCALE, scale))
        entries = [(name, x.dtype, tuple(x.shape)) for name, x in states]
        hf.write_safetensors(file, entries, ((name, x.cpu()) for name, x in states))

    number = rank() if world() > 1 else None
    texts = [("config.json", "config", hf.config_json(config, dtype))]
    if world() > 1:
        texts.append(("model.safetensors.index.json", "index", _index(config, dtype, writers)))
    for name, content in carried.items():
        role = "generation" if name == "generation_config.json" else "tokenizer"
        texts.append((name, role, content))
    for name, role, content in texts if rank() == 0 else ():
        add(name, role, lambda file, content=content: file.write(content))
    add(shard_name("model", rank()), "weights", write_weights, number)
    add(shard_name("optimizer", rank()), "optimizer", write_states, number)
    return records


def write(
    output: OutputFolder | None, o: Options, fields: dict, model: nn.Module, optimizer: Any, carried: dict
) -> Path:
    """Write OUT/step_000100, which must not exist, then remove the oldest checkpoints beyond
    --keep-checkpoints. All ranks call it; rank 0, whose folder `output` is, writes the manifest and gives the
    checkpoint its name when all files are whole. fields: describe()'s.
    """
    name = f"step_{fields['step']:06d}"
    folder = Path(o.out) / temporary_name(name)
    if output:
        output.begin(name)
    everybodys(None)  # the folder is there
    records = everybodys(_own_files(folder, model, optimizer, o, carried))
    if output:
        files = [record for own in records for record in own]
        with _Writer(folder / manifest.NAME) as file:
            file.write(manifest.content(fields | {"files": files}))
        output.finish(name)
        output.prune(o.keep_checkpoints)
    return Path(o.out) / name


# Reading ====================================================================================================


def _optimizer_files(point: ResumePoint) -> list[Path]:
    """Of all ranks that wrote them, by rank."""
    wrote = [file for file in point.manifest["files"] if file["role"] == "optimizer"]
    return [Path(point.directory) / f["name"] for f in sorted(wrote, key=lambda f: f["rank"] or 0)]


def load_fp8(point: ResumePoint, products: Any) -> None:
    """Give the products of a run in fp8 the scales of the checkpoint, if an optimizer step has written it and
    it has them. Raises InputError.
    """
    if not products or products.state() is None or not point.manifest["step"]:
        return
    path = _optimizer_files(point)[0]
    header = hf.read_header(path)
    if FP8_SCALE not in header:
        return
    row, shape = header[FP8_SCALE]
    expected = list(products.state().shape)
    if list(shape) != expected or row.name != "f32":
        found = f"{row.name} {list(shape)}"
        raise InputError(f'{path}: "{FP8_SCALE}": expected f32 {expected}, found {found}')
    with safe_open(path, "pt") as file:
        products.load(file.get_tensor(FP8_SCALE))


@torch.no_grad()
def load_optimizer(point: ResumePoint, optimizer: Any, o: Options) -> None:
    """Fill the optimizer's state from the rows in the files of all ranks that wrote them. InputError."""
    paths = _optimizer_files(point)
    headers = [hf.read_header(path) for path in paths]
    files = [safe_open(path, "pt") for path in paths]
    for name, part, x in _states(optimizer, o):
        first, begin = part.first, 0  # begin: of a file's rows
        for path, header, file in zip(paths, headers, files, strict=True):
            if name not in header:
                continue
            row, shape = header[name]
            if row != dtype_row(x.dtype):
                expected = dtype_row(x.dtype).name
                raise InputError(f"{path}: {name} is {row.name}, expected {expected}")
            if not shape or shape[1:] != part.shape[1:]:
                expected = ", ".join(map(str, (*shape[:1], *part.shape[1:])))
                raise InputError(f'{path}: "{name}": shape: expected [{expected}], found {list(shape)}')
            low, high = max(first, begin), min(first + len(x), begin + shape[0])
            if low < high:
                x[low - first : high - first].copy_(file.get_slice(name)[low - begin : high - begin])
            begin += shape[0]
        if begin != part.shape[0]:
            size = math.prod(part.shape[1:])
            where = f"{paths[0]} and the other ranks' files" if len(paths) > 1 else f"{paths[0]}"
            expected = f"expected {math.prod(part.shape)} elements, found {begin * size}"
            raise InputError(f'{where}: "{name}": {expected}')
    optimizer.steps = point.manifest["step"]
