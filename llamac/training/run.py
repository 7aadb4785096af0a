"""The parts of a training run besides the model, AdamW and the loop: data, devices, log and command line."""

import json
import math
import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn, profiler
from torch.nn.attention import SDPBackend, sdpa_kernel

from llamac.base.dtypes import TABLE
from llamac.base.errors import InputError
from llamac.data import tokenizer as tokenizers
from llamac.data.tokens import BERT_SPECIAL, Loader, Masking, find_documents
from llamac.model import hf
from llamac.model.config import Config, dropouts, load_config
from llamac.training import fp8, options
from llamac.training.operations import adamw_step, llamac_operations
from llamac.training.options import Options
from llamac.training.ranks import DTYPES, join_ranks, leave, rank, shard, world
from llamac.training.rounding import upload
from llamac.training.weights import fuse_products, init_weights, load_weights, parts, whole_weights

Moment: TypeAlias = torch.cuda.Event | float
# Libraries that compute attention, the fastest first: each takes what those before it do not.
ATTENTION = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]


LEAST_LOSS_SCALE = 2.0**-14  # below, gradients are not what overflows


# The model and its data =====================================================================================


def prepare(o: Options) -> tuple[Config, str, "Batches"]:
    """(configuration, device, data of this process), after meeting the other processes. Raises InputError."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    if o.init == "load" and not Path(o.model).is_dir():
        raise InputError(f"--init load: expected a directory as --model, found {o.model}")
    if o.profile and not o.log:
        raise InputError("--profile: expected --log FILE, beside which it writes, found none")
    config = hf.load_config_of_weights(o.model) if o.init == "load" else load_config(o.model)
    if o.matmul_dtype == "fp8":
        fp8.blocks_in_fp8(o, config)
    if (longest := config.max_position_embeddings) < o.seq_len:
        expected = f"at most {longest}, the model's longest sequence"
        raise InputError(f"--seq-len: expected {expected}, found {o.seq_len}")
    if rank() == 0 and (dropout := dropouts(o.model)):
        warnings.warn(f"{o.model}: dropout is not applied, found {dropout}", stacklevel=2)
    batches = Batches(o, config, device)
    join_ranks(device)
    return config, device, batches


class Batches:
    """A run's micro-batches, in the C program's order, on the device."""

    def __init__(self, o: Options, config: Config, device: str):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # every token file stays open
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        ranks = rank(), world()
        self.accumulation = o.micro_batches(world())
        self.data = Loader(
            o.train_data, o.seq_len, config.vocab_size, o.batch_size, self.accumulation, *ranks, o.seed
        )
        self.marks = self._marks(o, config) if o.document_mask == "on" else None
        if config.is_encoder:
            self.data.masking = self._masking(o, config)
        self.device = device

    def _marks(self, o: Options, config: Config) -> tuple[int | None, int | None]:
        """The tokens that begin and end a text, of the tokenizer that made the data."""
        tokenizer = tokenizers.find(o.tokenizer, self.data.shards)
        if not tokenizer:
            expected = "the tokenizer of the data, whose tokens tell documents apart"
            found = "none; --tokenizer FILE names it"
            raise InputError(f"--document-mask on: expected {expected}, found {found}")
        marks = [token for token in (tokenizer.bos, tokenizer.eos) if token is not None]
        where = f"{tokenizer.path}: --document-mask on: expected"
        if not marks:
            raise InputError(f"{where} a token that begins or ends a text (bos, eos), found neither")
        if max(marks) >= config.vocab_size:
            expected = f"tokens that begin and end a text below the model's vocabulary of {config.vocab_size}"
            raise InputError(f"{where} {expected}, found {max(marks)}")
        return tokenizer.bos, tokenizer.eos

    def _masking(self, o: Options, config: Config) -> Masking:
        """Of an encoder's tokens: masking_of() of csrc/train/run_data.cpp."""
        tokenizer = tokenizers.find(o.tokenizer, self.data.shards)
        tokens = tokenizer.tokens if tokenizer else []
        mask = tokens.index(b"[MASK]") if o.mask_token < 0 and b"[MASK]" in tokens else o.mask_token
        if not 0 <= mask < config.vocab_size:
            expected = (
                f"a token below the model's vocabulary of {config.vocab_size} that replaces masked ones"
            )
            raise InputError(f"--mask-token: expected {expected}, or a tokenizer with [MASK], found {mask}")
        special = {mask, config.pad_token_id}
        special |= {id for id, token in enumerate(tokens) if token in BERT_SPECIAL}
        special |= {tokenizer.bos, tokenizer.eos} if tokenizer else set()
        found = np.isin(np.arange(config.vocab_size), [id for id in special if id is not None])
        continues = None
        if o.mlm_whole_words == "on":
            if not any(token.startswith(b" ") for token in tokens):
                expected = "the tokenizer of the data, with tokens that begin with a space"
                where = "none; --tokenizer FILE names it"
                where = f"no such token in {tokenizer.path}" if tokenizer else where
                raise InputError(f"--mlm-whole-words on: expected {expected}, found {where}")
            inside = [id for id, token in enumerate(tokens) if not token.startswith(b" ")]
            continues = np.isin(np.arange(config.vocab_size), inside) & ~found
        return Masking(o.mlm_probability, mask, found, o.seed, continues)

    def of_step(self, step: int) -> list[tuple[Tensor, ...]]:
        """Of each micro-batch of a step (1, 2, …) tokens and targets, int64[B,T]; with --document-mask on
        also int32[B,T]: where each token's document begins.
        """
        found = []
        for micro in range(self.accumulation):
            batch = self.data.micro_batch(step - 1, micro)
            tensors = tuple(upload(x, self.device).long() for x in batch)
            if self.marks:
                tensors += (upload(find_documents(batch[0], self.marks), self.device),)
            found.append(tensors)
        return found


def operations(o: Options, torchs: SimpleNamespace) -> SimpleNamespace:
    """Those of --ops: llamac's, or PyTorch's, which are given."""
    ops = SimpleNamespace(**(llamac_operations(vars(torchs)) if o.ops == "llamac" else vars(torchs)))
    if o.compile and world() > 1:  # block by block, as shard() compiles the rest
        ops.linear_cross_entropy = torch.compile(ops.linear_cross_entropy, fullgraph=True, dynamic=False)
    return ops


def stored_dtype(o: Options) -> torch.dtype:
    """Of the model's parameters: on several devices the master weights', which are gathered rounded."""
    return torch.float32 if world() > 1 and o.master_weights == "on" else DTYPES[o.dtype]


def set_up(model: nn.Module, o: Options, device: str) -> None:
    """Move the model, without values, to the device, or to all of them, and give it its first weights."""
    model.model.recompute_every = o.recompute_every()
    fuse_products(model)
    if o.matmul_dtype == "fp8":
        fp8.use_products(model, o, device)
    if world() > 1:
        shard(model, o, device)
    model.to_empty(device=device)
    if o.init == "load":
        load_weights(model, o.model)
    else:
        init_weights(model, o.seed)
    if stored_dtype(o) != DTYPES[o.dtype]:  # as they start on one device
        for part in parts(model):
            part.weight().copy_(part.weight().to(DTYPES[o.dtype]))
    torch.cuda.empty_cache()  # of random numbers


def adamw_options(o: Options, device: str) -> dict:
    """The reference's AdamW as the flags want it."""
    rounds = TABLE[o.optimizer_state].narrow or (TABLE[o.dtype].narrow and o.master_weights == "off")
    return {
        "beta1": o.beta1,
        "beta2": o.beta2,
        "weight_decay": o.weight_decay,
        "master_weights": o.master_weights == "on",
        "state_dtype": DTYPES[o.optimizer_state],
        "seed": o.seed,
        "compiled": o.compile or device == "cuda",
        # llamac's operation numbers a tensor's elements from 0: a shard's random bits would be another's.
        "fused": adamw_step if o.ops == "llamac" and not (rounds and world() > 1) else None,
    }


def save(model: nn.Module, o: Options) -> None:
    """--save: the weights as a Hugging Face directory, by rank 0; all ranks gather them."""
    dtype = DTYPES[o.dtype]
    weights = whole_weights(model, dtype)
    if rank() == 0:
        hf.write_directory(o.save, model.config, dtype, weights)  # type: ignore[arg-type]
    else:
        for _ in weights:
            pass


# The log ====================================================================================================


def moment(device: str) -> Moment:
    """Now, by the clock of the device: a GPU reaches this moment when it has done what is queued. The host's
    clock would be late whenever the host waits for room in the queue.
    """
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: Moment, end: Moment) -> float:
    """Between the two; waits for the later one."""
    if isinstance(begin, float) or isinstance(end, float):
        return 1e3 * (end - begin)
    end.synchronize()
    return begin.elapsed_time(end)


@dataclass
class Step:
    """An optimizer step that the device may still be computing."""

    step: int
    lr: float
    result: Tensor = field(init=False)  # loss and gradient norm, on the host once `done`
    loss_scale: float | None = None  # of fp16
    done: Moment = 0.0


def profile_of_steps(o: Options, device: str, trace: Path) -> profiler.profile:
    """--profile: PyTorch's profiler, which writes the trace and prints the largest calls. Without the first
    step, in which memory is touched and kernels are made, if there are enough.
    """

    def write(done: profiler.profile) -> None:
        done.export_chrome_trace(str(trace))
        where = "cpu" if device == "cpu" else "device"
        print(done.key_averages().table(sort_by=f"self_{where}_time_total", row_limit=30), flush=True)

    first = int(o.steps > o.profile)
    steps = profiler.schedule(wait=0, warmup=first, active=min(o.profile, o.steps), repeat=1)
    return profiler.profile(schedule=steps, on_trace_ready=write)


class Log:
    """Surrounds the steps of a run: a line per step on the console and, as JSON, in --log. On a GPU a step is
    written one step late, so that the host queues the next step before it waits for this one's loss.
    """

    def __init__(self, o: Options, config: Config, device: str, tokens: int):
        self.o, self.device, self.tokens = o, device, tokens  # tokens: of a step, of all devices
        self.late = 0 if device == "cpu" else 1
        self.running: list[Step] = []  # begun and not yet written, oldest first
        self.begun: Moment = 0.0  # start of the time that the next written step took
        self.file: TextIO | None = None
        self.profiler: profiler.profile | None = None
        if rank() > 0:
            return
        name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
        print(f"PyTorch {torch.__version__} on {name}, {o.model}: {config.num_parameters():,} parameters")
        print(
            f"{'step':>13}  {'loss':>8}  {'grad norm':>9}  {'lr':>8}  {'ms':>8}  {'tokens/s':>9}", flush=True
        )
        if o.log:
            folder = Path(o.log).parent
            folder.mkdir(parents=True, exist_ok=True)
            self.file = open(o.log, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
            if o.profile:
                self.profiler = profile_of_steps(o, device, folder / "trace.json")
                self.profiler.start()

    @contextmanager
    def step(self, step: int, lr: float) -> Iterator[Step]:
        """Surrounds the work of a step, which sets the result."""
        if not self.running:
            self.begun = moment(self.device)
        u = Step(step, lr)
        with sdpa_kernel(ATTENTION, set_priority=True):
            yield u
        u.result = u.result.to("cpu", non_blocking=True)
        u.done = moment(self.device)
        self.running.append(u)
        self.finish(self.late)
        if self.profiler:
            self.profiler.step()

    def finish(self, late: int = 0) -> None:
        """Wait for the steps begun, except for the last `late`, and write them. A step's time starts at the
        end of the step before it, or at its own begin where none was running.
        """
        while len(self.running) > late:
            u = self.running.pop(0)
            ms = milliseconds(self.begun, u.done)
            self.begun = u.done
            loss, norm = u.result.tolist()
            if rank() == 0:
                self.write(u, loss, norm, ms)
            at_end = u.loss_scale and (self.o.loss_scale or u.loss_scale <= LEAST_LOSS_SCALE)
            if at_end and not math.isfinite(loss + norm):
                raise InputError(f"step {u.step}: fp16 overflows at a loss scale of {u.loss_scale:g}")

    def write(self, u: Step, loss: float, norm: float, ms: float) -> None:
        speed = 1e3 * self.tokens / ms
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else 0.0
        event = {"step": u.step, "loss": loss, "grad_norm": norm, "lr": u.lr, "ms": ms}
        event |= {"tokens_per_s": speed, "gpu_mem_gib": memory}
        if u.loss_scale:
            event["loss_scale"] = u.loss_scale
        finite = {name: x if abs(x) < float("inf") else None for name, x in event.items()}  # JSON has no NaN
        if self.file:
            self.file.write(json.dumps({"event": "step"} | finite) + "\n")
        where = f"{u.step}/{self.o.steps}"
        print(f"{where:>13}  {loss:8.4f}  {norm:9.4f}  {u.lr:8.2e}  {ms:8.1f}  {speed:9.0f}", flush=True)

    def close(self) -> None:
        """Wait for the last step."""
        self.finish()
        if self.profiler:
            self.profiler.stop()
        if self.file:
            self.file.close()


# The command line ===========================================================================================

REFERENCE_FLAGS = ("--matmul-dtype", "--fp8-", "--document-mask")
Program: TypeAlias = Callable[[Options], Any]


def command_line(argv: list[str], train: Program, write_references: Program, help: str) -> None:
    """train_llama3.py's arguments: --train and flags, --help, or flags of reference tensors. InputError."""
    if "--train" in argv:
        try:
            train(options.parse([arg for arg in argv if arg != "--train"]))
        except InputError as error:
            if rank() == 0:
                raise
            if not dist.is_initialized():  # found in flags and files, which are the same for all
                time.sleep(60)  # rank 0 says it, and its end is the others'
                os._exit(2)
            raise InputError(f"rank {rank()}: {error}") from None
        leave()
    elif argv[:1] in (["-h"], ["--help"]):
        print(f"{help}\nWith --train:\n")
        options.parse(["--help"])
    elif all(arg.startswith(REFERENCE_FLAGS) for arg in argv if arg.startswith("-")):
        write_references(options.parse(argv))
    else:
        expected = "--train, or nothing but --matmul-dtype, --fp8-... and --document-mask (reference tensors)"
        raise InputError(f"expected {expected}, found {' '.join(argv)}")
