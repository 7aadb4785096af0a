"""Damaged files for every reader of llamac in Python: each is read, or refused in one line.

    python tests/fuzz/damage.py --count 20000 --seed 1

A reader is a folder of good files and what reads them; one file at a time is damaged. The readers that C has,
too, are those of twins.py.
"""

import argparse
import gzip
import io
import json
import random
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import report_logs
import task_rows
from damaged import damaged
from fuzz import inputs, twins
from fuzz.inputs import dumped, lines
from hf_dirs import TEXT, sentencepiece, write_tokenizer

from llamac.base import limited
from llamac.base.errors import InputError
from llamac.data import chat, documents, encode, prepare, tokenizer
from llamac.data import inputs as data_inputs
from llamac.eval import tasks, text
from llamac.inference import generate
from llamac.inference.model import TextModel, _dtype
from llamac.model import checkpoint
from llamac.report import content, page, validation
from llamac.report.log import read as read_report
from llamac.training import finetune

SECONDS = 20  # of a reader, on a busy machine
MESSAGES = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
Files = dict[str, bytes]
Reader = tuple[Files, Callable[[Path], Any]]


# The readers


def _tokenizer_files() -> Iterator[tuple[str, Files]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        more = {
            "additional_special_tokens": ["<x>", {"content": "<y>"}],
            "unk_token": {"content": "<|begin|>"},
        }
        more["added_tokens_decoder"] = {"400": {"content": "<z>", "lstrip": True, "special": True}}
        settings = json.loads((folder / "tokenizer_config.json").read_text()) | more
        files = {"tokenizer.json": (folder / "tokenizer.json").read_bytes()}
        beside = {"special_tokens_map.json": dumped({"eos_token": "<|end|>"})}
        yield "byte-level", files | beside | {"tokenizer_config.json": dumped(settings)}
        files = {"tokenizer.json": sentencepiece(True, [TEXT]).to_str().encode()}
        yield "sentencepiece", files | {"tokenizer_config.json": dumped({"bos_token": "<s>"})}


def _read_tokenizer(folder: Path) -> None:
    own = tokenizer.load(folder)
    own.decode(own.encode("the cat <x> déjà 🙂"))
    str((own.bos, own.eos, own.pad, own.cuttable, own.fast is None, own.rank_hash, own.vocabulary.tokens[-1]))
    own.encode_with_places("<|end|>the cat")
    (folder / "out").mkdir()
    own.write_beside_tokens(folder / "out")


def _read_model(folder: Path) -> None:
    model = TextModel(folder)
    assert all(isinstance(id, int) for id in model.stops)
    _dtype(folder)
    model.encode_chat(MESSAGES)


def _read_data(folder: Path) -> None:
    own = _small_tokenizer()
    how = documents.Reading()
    for path in sorted(folder.iterdir()):
        if path.name != "out":
            files = data_inputs.find(str(path), folder / "out")[0]
            for block in documents.blocks(files, how, [0]):
                encode.encode_block(block, how, own, prepare.token_dtype(own.vocab_size))


def _small_tokenizer() -> Any:
    return tokenizer.of_ranks({bytes([byte]): byte for byte in range(256)})


def _columns(kind: str) -> bytes:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": [TEXT, "", None, "the end"] * 3, "more": list(range(12))})
    sink = io.BytesIO()
    if kind == "parquet":
        parquet.write_table(table, sink, row_group_size=5)
    else:
        new = pyarrow.ipc.new_file if kind == "arrow" else pyarrow.ipc.new_stream
        with new(sink, table.schema) as writer:
            writer.write_table(table, 5)
    return sink.getvalue()


def _data_files() -> Iterator[tuple[str, Files]]:
    import zstandard

    rows = lines({"text": TEXT}, {"text": "a", "n": [1, {"x": None}]}, {"other": 1}, 5)
    yield "lines", {"a.jsonl": rows, "b.json": rows, "c.txt": TEXT.encode() * 20}
    yield (
        "compressed",
        {"a.jsonl.gz": gzip.compress(rows), "b.txt.zst": zstandard.compress(TEXT.encode() * 9)},
    )
    yield "parquet", {"a.parquet": _columns("parquet")}
    yield "arrow", {"a.arrow": _columns("arrow"), "b.arrow": _columns("stream")}
    state = {"_data_files": [{"filename": "data.arrow"}]}
    saved = {"dataset_dict.json": dumped({"splits": ["train", "test"]}), "train/state.json": dumped(state)}
    saved |= {"train/dataset_info.json": b"{}", "train/data.arrow": _columns("stream")}
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 3)  # two documents, of one and two sequences
    index = header + struct.pack("<3i3q3q", 2, 3, 4, 0, 4, 10, 0, 1, 3)
    yield "megatron", {"a.bin": bytes([7, 0] * 9), "a.idx": index}
    yield "datasets", {f"d/{name}": content for name, content in saved.items()}


def _read_state(folder: Path) -> None:
    """Of `llamac data`, to go on with a stopped run and to find a finished one."""
    from llamac.data.command import _summary

    (folder / "x.txt").write_text(TEXT)
    sources = [prepare.Source("x", data_inputs.find(str(folder / "x.txt"), folder)[0], documents.Reading())]
    prepare.Run(prepare.Settings(folder, 1, 1000), sources, _small_tokenizer(), "f")
    if index := prepare.is_made(folder, "f"):
        _summary(folder, index)


def _state_files() -> Files:
    feed = {"after": [0], "used": 0, "counted": False, "open": False, "given": 3, "documents": 1}
    writers = {split: {"shards": [], "held": 0} for split in prepare.SPLITS}
    state = {"fingerprint": "f", "writers": writers, "feeds": [feed], "documents": {"train": 1}}
    state |= {"left_out": {"empty": 2}, "text_bytes": 9}
    splits = {split: {"documents": 1, "tokens": 5, "shards": []} for split in prepare.SPLITS}
    index = {"fingerprint": "f", "splits": splits, "left_out": {"empty": 1}, "mix_ended_by": None}
    index["sources"] = [{"name": "x", "mix": 0.5, "documents": 1, "train_tokens": 5}]
    return {"partial/state.json": dumped(state), "index.json": dumped(index)}


def _read_tasks(folder: Path) -> None:
    for name, task in tasks.TASKS.items():
        if (folder / name).exists() or (folder / f"{name}.jsonl").exists():
            list(tasks.read(task, folder))


def _task_parquet() -> bytes:
    import pyarrow
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist([task_rows.ROWS["hellaswag"]] * 3), sink)
    return sink.getvalue()


def _archive(results: bytes) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w:gz") as tar:
        for name, text in {"results.json": results, "kernels/console.log": b"1 passed\n"}.items():
            entry = tarfile.TarInfo(f"validation/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))
    return sink.getvalue()


def _read_results(folder: Path) -> None:
    (folder / "v.tar.gz").write_bytes(_archive((folder / "results.json").read_bytes()))
    _read_archive(folder)


def _read_archive(folder: Path) -> None:
    found = validation.read(folder / "v.tar.gz")
    validation.render(found)


_STAGE = {"stage": "kernels", "status": "failed", "reason": "r", "seconds": 1.5, "commit": "c"}
_RESULTS = {"format": validation.FORMAT, "platform": "cpu", "system": "s", "program": ["p"], "devices": ["d"]}
_RESULTS |= {"date": "2026-11-26", "version": "0.1", "commit": "c"}
_RESULTS |= {"stages": [_STAGE, _STAGE | {"stage": "tests", "status": "passed"}]}


def _read_prompts(folder: Path) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{% endfor %}"
    template = chat.Template(folder / "t", source, {})
    for name in ("a.jsonl", "b.txt"):
        for prompt in generate.read_prompts(str(folder / name)).values():
            chat.encode(_small_tokenizer(), prompt if isinstance(prompt, str) else template.render(prompt)[0])


def _read_rows(folder: Path) -> None:
    encoder = finetune.Encoder(folder)
    found = finetune.read([folder / "a.jsonl"], encoder, 200)
    finetune.packed(found.rows, 200, 0)


class _Scorer:
    """What text.of_files needs of a model, but the model."""

    context = 8

    def __init__(self) -> None:
        self.model = self

    def encode(self, text: str, bos: bool) -> list[int]:
        return list(text.encode())

    def windows(self, ids: Any) -> Iterator[Any]:
        return iter(())


def _read_text(folder: Path) -> None:
    text.of_files(_Scorer(), [str(folder / "a.txt")])


def _read_checkpoint(folder: Path) -> None:
    checkpoint.check(folder / "step_000006")


def _old_checkpoint() -> Files:
    folder = inputs.ROOT / "tests/data/resume_9252fa4/step_000006"
    return {f"step_000006/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}


def _read_twin(read: Callable[[Path, bytes], None], folder: Path) -> None:
    read(folder, (folder / "file").read_bytes())


def readers() -> dict[str, Reader]:
    """By name."""
    found: dict[str, Reader] = {}
    for name, read in twins.TWINS.items():
        accepted = [seed for seed in inputs.SEEDS[name].values() if not twins.refusal(name, seed)]
        for number, seed in enumerate(accepted[:3]):
            action = partial(_read_twin, read)
            found[f"{name} {number}"] = {"file": seed}, action
    rows = [{"messages": MESSAGES}, {"prompt": "the cat", "completion": " sat"}]
    rows.append({"prompt": MESSAGES[:1], "completion": MESSAGES[1:]})
    for name, files in _tokenizer_files():
        found[f"tokenizer {name}"] = files, _read_tokenizer
        if name == "byte-level":
            config = json.loads(inputs.SEEDS["config"]["tokens"]) | {"vocab_size": 1000}
            generation = {"eos_token_id": [1, 2]}
            model = {"config.json": dumped(config), "generation_config.json": dumped(generation)}
            jinja = json.loads(files["tokenizer_config.json"])["chat_template"]
            found["model"] = files | model | {"chat_template.jinja": jinja.encode()}, _read_model
            others = {"chat_template.json": dumped({"chat_template": jinja})}
            others["tokenizer_config.json"] = dumped({"eos_token": "<|end|>"})
            found["model with a template beside"] = files | model | others, _read_model
            found["conversations"] = files | model | {"a.jsonl": lines(*rows)}, _read_rows
    found |= {f"data {name}": (files, _read_data) for name, files in _data_files()}
    found["data state"] = _state_files(), _read_state
    rows_of = {f"{name}.jsonl": lines(row, row) for name, row in task_rows.ROWS.items()}
    found["tasks"] = rows_of, _read_tasks
    found["tasks in Parquet"] = {"hellaswag/validation.parquet": _task_parquet()}, _read_tasks
    found["validation"] = {"results.json": dumped(_RESULTS)}, _read_results
    found["validation archive"] = {"v.tar.gz": _archive(dumped(_RESULTS))}, _read_archive
    prompts = {"a.jsonl": lines({"prompt": TEXT}, {"messages": MESSAGES}), "b.txt": TEXT.encode()}
    found["prompts"] = prompts, _read_prompts
    found["texts"] = {"a.txt": TEXT.encode()}, _read_text
    ranks = {"event": "ranks", "step": 8, "ranks": [{"host": "h", "device": {"watts": 500.0}}] * 2}
    log = b"".join(lines(event) for event in [*report_logs.a_run(8), ranks])
    report = {"log.jsonl": log, "profile.json": inputs.SEEDS["profile"]["one"]}
    found["report"] = report, lambda folder: page.render(content.report({"x": read_report(folder)}))
    found["checkpoint"] = _old_checkpoint(), _read_checkpoint
    return found


def attempt(reader: Reader, changed: str, content: bytes) -> str:
    """The reader's verdict where one of its files has another content: "" (read), or the line of its
    InputError. Any other exception goes through."""
    files, read = reader
    with tempfile.TemporaryDirectory() as name, chdir(name), ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(redirect_stdout(io.StringIO()))
        warnings.simplefilter("error", RuntimeWarning)
        for path, whole in files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(content if path == changed else whole)
        begin = time.monotonic()
        try:
            read(Path(name))
        except InputError as error:
            assert len(str(error).splitlines()) == 1, error
            return str(error)
        finally:
            assert time.monotonic() - begin < SECONDS, "too slow"
    return ""


def check(name: str, reader: Reader, count: int, seed: int, keep: Path | None = None) -> list[str]:
    """A traceback for each of `count` damaged files that is neither read nor refused; `keep` gets them."""
    rng, failures = random.Random(f"{name} {seed}"), []
    for number in range(count):
        changed = rng.choice(sorted(reader[0]))
        content = damaged(rng, reader[0][changed])
        try:
            attempt(reader, changed, content)
        except KeyboardInterrupt:
            raise
        except BaseException:  # a panic of tokenizers is no Exception
            failures.append(f"{name}: {number}: {changed}: {content[:300]!r}\n{traceback.format_exc()}")
            if keep:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{name} {number} {Path(changed).name}").write_bytes(content)
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20000, help="of damaged files, over all readers (20000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reader", help="those whose names begin so")
    parser.add_argument("--keep", type=Path, help="folder for the files that end a reader otherwise")
    o = parser.parse_args()
    limited.SECONDS = 1.0
    chosen = {name: reader for name, reader in readers().items() if name.startswith(o.reader or "")}
    each, failed = -(-o.count // len(chosen)), 0
    for name, reader in chosen.items():
        refused = attempt(reader, "", b"")
        assert not refused, f"{name}: undamaged: {refused}"
        begin = time.monotonic()
        failures = check(name, reader, each, o.seed, o.keep)
        failed += len(failures)
        line = f"{name:32} {each:6} files {time.monotonic() - begin:6.0f} s  {len(failures)} tracebacks"
        print(line, *failures[:3], sep="\n  ", flush=True)
    print(f"{each * len(chosen):,} damaged files, {failed} tracebacks")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
