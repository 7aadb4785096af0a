"""The state of a training run, and its work around the optimizer steps: data, log, profile, validation,
samples, checkpoints.
"""

import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import llamac.options
import llamac.plot
import llamac.profile
import llamac.random
import llamac.tokenizer
from llamac import hf
from llamac.carried_files import read_carried_files
from llamac.config import Config, load_config
from llamac.data import Loader, check_same_tokenizer, find_documents
from llamac.dtypes import TABLE
from llamac.errors import InputError
from llamac.eval import questions
from llamac.eval.questions import Questions
from llamac.log import Log
from llamac.options import Options, prompt_ids, recompute_parts
from llamac.output import OutputFolder
from llamac.peak import peak_tflops
from llamac.run_warnings import run_warnings
from llamac.schedule import learning_rate
from llamac.spikes import SpikeDetector
from llamac.torch_profile import Profiler
from llamac.training import checkpoints, evaluation, fp8, stop
from llamac.training.checkpoints import ResumePoint
from llamac.training.operations import adamw_step, llamac_operations
from llamac.training.ranks import (
    DTYPES,
    everybodys,
    join_ranks,
    leave,
    rank,
    shard,
    tell_launcher,
    world,
)
from llamac.training.rounding import upload
from llamac.training.sampling import SAMPLING_STREAM, sample_token
from llamac.training.weights import fuse_products, init_weights, load_weights, parts

Moment: TypeAlias = torch.cuda.Event | float
# Libraries that compute attention, the fastest first: each takes what those before it do not.
ATTENTION = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]


@dataclass
class Step:
    """An optimizer step that the device may still be computing."""

    step: int
    lr: float
    result: Tensor = field(init=False)  # loss and gradient norm, on the host once `done`
    done: Moment = 0.0
    batches: list[tuple[Tensor, ...]] = field(default_factory=list)  # as to_device() gives them
    stop: Tensor | None = None  # with several ranks: the signal that one of them has got, 0 for none


@dataclass
class Run:
    """What a training run consists of. prepare() fills in what comes before the model, begin() the rest."""

    options: Options
    config: Config
    device: str
    data: Loader
    val_data: Loader | None
    tokenizer: Any  # as llamac.tokenizer.find() gives it
    output: OutputFolder | None  # rank 0's
    model: nn.Module = field(init=False)
    forward: Callable = field(init=False)  # the model, compiled or not
    cis: Any = None
    optimizer: Any = None
    log: Log = field(init=False)
    profiler: Profiler | None = None
    carried: dict[str, bytes] = field(default_factory=dict)  # files into every checkpoint: {name: content}
    questions: dict[str, Questions] = field(default_factory=dict)  # of --eval-tasks, by their names
    resumed: ResumePoint = field(default_factory=ResumePoint)
    saved: str = ""  # the newest checkpoint; "": there is none
    saved_step: int = 0  # of it, or the first one
    logged: set[str] = field(default_factory=set)  # events of the resumed step
    running: list[Step] = field(default_factory=list)  # begun and not yet logged, oldest first
    finished: int = 0  # the last step that was logged, or before the checkpoint that the run resumed
    stop: int = 0  # with several ranks: the signal that ends the run on all of them
    begun: Moment = 0.0  # start of the time that the next logged step took
    spikes: SpikeDetector = field(default_factory=SpikeDetector)


# The start ==================================================================================================


def check_supported(o: Options) -> None:
    """Refuse what the C program does and train_llama3.py does not."""
    for flag, given in {
        "kernel": o.kernel,
        "verify-every": o.verify_every,
        "skip-nonfinite": o.skip_nonfinite,
        "shard-group": o.shard_group,
        "zero": o.zero not in (Options().zero, 3),  # FSDP2 shards as level 3 does
    }.items():
        if given:
            raise InputError(f"--{flag}: only the C program has it")
    if not o.train_data:
        raise InputError("--train-data: expected a pattern of files, found none")
    if parts := recompute_parts(o.recompute).keys() - {"block"}:
        raise InputError(f"--recompute: expected none, block or block:K, found {min(parts)} (C program only)")


def prepare(o: Options) -> Run:
    """The run that the options describe, with its data open. Raises InputError."""
    check_supported(o)
    output = OutputFolder(o.out) if rank() == 0 else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # every token file stays open
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    load = hf.load_config_of_weights if o.init == "load" and Path(o.model).is_dir() else load_config
    config, T, B, micro_batches = load(o.model), o.seq_len, o.batch_size, o.micro_batches(world())
    ranks = rank(), world()
    data = Loader(o.train_data, T, config.vocab_size, B, micro_batches, *ranks, o.seed, o.data_skip)
    val_data = Loader(o.val_data, T, config.vocab_size, B, 1, rank(), world()) if o.val_data else None
    for loader in filter(None, (data, val_data)):
        if loader.is_packed:
            raise InputError(f"{loader.shards[0].path}: packed documents: only the C program trains on them")
    if val_data:
        check_same_tokenizer(data.shards, val_data.shards)
    if o.init == "load" and not Path(o.model).is_dir():
        raise InputError(f"--init load: expected a directory as --model, found {o.model}")
    if o.matmul_dtype == "fp8":
        fp8.blocks_in_fp8(o, config)
    if (longest := config.max_position_embeddings) < T:
        raise InputError(f"--seq-len: expected at most max_position_embeddings {longest}, found {T}")
    tokenizer = llamac.tokenizer.find(o.tokenizer, data.shards)
    if tokenizer:
        llamac.tokenizer.check_model(o.model, tokenizer)
    check_documents(o, tokenizer, config)
    if o.sample_every:
        sample_prompt(o, tokenizer, config)  # refused now, not after the first hour
    hash = tokenizer.hash if tokenizer else data.shards[0].tokenizer_hash
    tasks = questions.load(o.eval_tasks, config.vocab_size, hash)
    point = checkpoints.find(o.out, o.resume)
    if point.directory:
        checkpoints.check_resume(point, o, config, tokens_per_step(data))
        data.skip = checkpoints.skipped_data(point, o)
    join_ranks(device)
    carried = read_carried_files(o.model, tokenizer.path if tokenizer else None)
    return Run(
        o, config, device, data, val_data, tokenizer, output, carried=carried, resumed=point, questions=tasks
    )


def check_documents(o: Options, tokenizer: Any, config: Config) -> None:
    """With --document-mask on: where documents begin is what the tokenizer has marked in the shards."""
    if o.document_mask == "off":
        return
    if not tokenizer:
        expected = "the tokenizer of the data, whose tokens tell documents apart"
        raise InputError(f"--document-mask on: expected {expected}, found none; --tokenizer FILE names it")
    marks = [token for token in (tokenizer.bos, tokenizer.eos) if token is not None]
    where = f"{tokenizer.path}: --document-mask on: expected"
    if not marks:
        raise InputError(f"{where} a token that begins or ends a text (bos, eos), found neither")
    if max(marks) >= config.vocab_size:
        expected = f"tokens that begin and end a text below the model's vocabulary of {config.vocab_size}"
        raise InputError(f"{where} {expected}, found {max(marks)}")


def tokens_per_step(data: Loader) -> int:
    """Of all ranks."""
    return data.accum * data.batch_size * data.seq_len * data.world


def operations(o: Options, torchs: SimpleNamespace) -> SimpleNamespace:
    """Those of --ops: llamac's, or PyTorch's, which are given."""
    ops = SimpleNamespace(**(llamac_operations() if o.ops == "llamac" else vars(torchs)))
    if o.compile and world() > 1:  # block by block, as shard() compiles the rest
        ops.linear_cross_entropy = torch.compile(ops.linear_cross_entropy, fullgraph=True, dynamic=False)
    return ops


def stored_dtype(o: Options) -> torch.dtype:
    """Of the model's parameters: on several devices the master weights', which are gathered rounded."""
    return torch.float32 if world() > 1 and o.master_weights == "on" else DTYPES[o.dtype]


def set_up(r: Run) -> None:
    """Move the model, without values, to the device, or to all of them, and give it its first weights."""
    model, o, device = r.model, r.options, r.device
    model.model.recompute_every = recompute_parts(o.recompute).get("block", 0)
    fuse_products(model)
    if o.matmul_dtype == "fp8":
        fp8.use_products(model, o, device)
    if world() > 1:
        shard(model, o, device)
    model.to_empty(device=device)
    if r.resumed.directory or o.init == "load":
        load_weights(model, r.resumed.directory or o.model)
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


def begin(r: Run) -> None:
    """Take the resumed checkpoint's state, open the log, say what the run is, prepare the profile. An earlier
    run's output is moved away.
    """
    o, config, T = r.options, r.config, r.options.seq_len
    if r.resumed.directory:
        checkpoints.load_optimizer(r.resumed, r.optimizer, o)
        checkpoints.load_fp8(r.resumed, r.model.fp8)
        r.saved, r.saved_step = r.resumed.directory, r.optimizer.steps
        r.finished = r.saved_step
    out = o.out if rank() == 0 else None
    peak = peak_tflops(r.device, DTYPES[o.dtype])
    rates: dict[str, Any] = {
        "flops_per_token": config.flops_per_token(T),
        "peak_tflops": peak * world() if peak else None,
    }
    moved = []
    if r.output:
        moved = r.output.prepare(r.saved, r.saved_step, [name for name, _ in r.resumed.damaged])
    r.logged = everybodys(r.output.logged if r.output else None)[0]
    r.log = Log(out, steps=o.steps, tokens=tokens_per_step(r.data), every=o.log_every, **rates)
    if r.output:
        r.log.before_write = r.output.check
    resumed = checkpoints.resume_warnings(r.resumed, o, r.data.sequences)
    for line in (*run_warnings(o, config, r.data, world()), *moved, *resumed):
        r.log.print(line)
    stop.answer_signals()
    name = torch.cuda.get_device_name() if r.device == "cuda" else "the CPU"
    r.log.print(f"PyTorch {torch.__version__} on {name}, {o.model}: {config.num_parameters():,} parameters")
    ranks = f"{world()} devices x " if world() > 1 else ""
    sizes = f"{ranks}{r.data.accum} x {o.batch_size} x {T} tokens per step"
    r.log.print(f"{sizes}, {r.data.tokens:,} to train on")
    origin = ("loaded", o.model) if o.init == "load" else ("fresh", None)
    if r.saved:
        origin = "resumed", r.saved
    r.log.run(name, config.num_parameters(), world(), *origin)
    r.log.start(o.to_dict())
    if out and o.profile:
        r.profiler = Profiler(out, o.profile, o.steps, r.device, DTYPES[o.dtype], r.finished + 1)


def sample_prompt(o: Options, tokenizer: Any, config: Config) -> list[int]:
    """What samples begin with: --sample-prompt-ids, else the token before a document. Raises InputError where
    the model has no such token.
    """
    marks = [tokenizer.bos, tokenizer.eos] if tokenizer else []
    first = next((token for token in marks if token is not None), config.bos_token_id or 0)
    tokens = prompt_ids(o.sample_prompt_ids) or [first]
    for token in tokens:
        if token >= config.vocab_size:
            which = "--sample-prompt-ids" if o.sample_prompt_ids else "the token that begins a sample"
            raise InputError(
                f"{which}: expected one below the vocabulary's {config.vocab_size}, found {token}"
            )
    return tokens


# An optimizer step ==========================================================================================


def to_device(r: Run, batch: tuple[np.ndarray, ...]) -> tuple[Tensor, ...]:
    """tokens and targets, int32[B,T] -> int64[B,T] on the device; with --document-mask on also where the
    tokens' documents begin.
    """
    tokens, targets = (upload(x, r.device).long() for x in batch)
    if r.options.document_mask == "off":
        return tokens, targets
    first = find_documents(batch[0], (r.tokenizer.bos, r.tokenizer.eos))
    return tokens, targets, upload(first, r.device)


def report_profile(r: Run, step: int) -> None:
    """Print the report after the last profiled step."""
    if r.profiler and r.profiler.is_complete(step):
        finish(r)
        if r.output:
            r.output.check()
        r.log.print(llamac.profile.report(llamac.profile.read(r.profiler.finish())))


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


@contextmanager
def optimizer_step(r: Run, step: int) -> Iterator[Step]:
    """Surrounds the work of a step: hands out its learning rate and micro-batches, and takes its result. Logs
    what has ended: on a GPU one step late, so that the host queues the next step before it waits for this
    one's loss.
    """
    o = r.options
    if not r.running:
        r.begun = moment(r.device)
    schedule = {"min_lr_frac": o.min_lr_frac, "warmup_steps": o.warmup_steps, "schedule": o.schedule}
    u = Step(step, learning_rate(step, lr=o.lr, steps=o.steps, **schedule))
    profiled = r.profiler.step(step) if r.profiler else nullcontext()
    with profiled, sdpa_kernel(ATTENTION, set_priority=True):
        read = (r.data.micro_batch(step - 1, k) for k in range(r.data.accum))
        u.batches = stop.Batches(r, [to_device(r, batch) for batch in read])
        yield u
    u.batches, u.result = [], u.result.to("cpu", non_blocking=True)
    if world() > 1:  # as their next steps need one another
        signals = torch.tensor([stop.came()], device=r.device)
        dist.all_reduce(signals, dist.ReduceOp.MAX)
        u.stop = signals.to("cpu", non_blocking=True)
    u.done = moment(r.device)
    r.running.append(u)
    finish(r, late=0 if r.device == "cpu" else 1)
    if r.stop:
        raise stop.Stopped(r, r.stop)


def busy_percent() -> float | None:
    """Share of its last sample period in which the GPU ran a kernel; None where its library does not say."""
    try:
        return float(torch.cuda.utilization())
    except Exception:  # the vendors' modules have their own kinds
        return None


def finish(r: Run, late: int = 0) -> None:
    """Wait for the steps begun, except for the last `late`, and log them. A step's time starts at the end of
    the step before it, or at its own begin where none was running.
    """
    while len(r.running) > late:
        u = r.running.pop(0)
        ms = milliseconds(r.begun, u.done)
        r.begun = u.done
        loss, norm = u.result.tolist()
        r.finished = u.step
        if u.stop is not None and not r.stop:
            r.stop = int(u.stop.item())
        gpu = (torch.cuda.max_memory_allocated() / 2**30, busy_percent()) if r.device == "cuda" else ()
        r.log.step(u.step, loss, norm, u.lr, ms, *gpu)
        # Every weight is as bad from here on, and the next checkpoints would replace the good ones.
        if not (math.isfinite(loss) and math.isfinite(norm)):
            last = f"the last checkpoint is {r.saved}" if r.saved else "there is no checkpoint"
            expected = "expected a finite loss and gradient norm"
            raise InputError(f"step {u.step}: {expected}, found {loss} and {norm}; {last}")
        for spike in r.spikes.add(loss, norm):
            r.log.spike(u.step, spike)


# Between steps ==============================================================================================


def due(o: Options, step: int, every: int) -> bool:
    """Whether what comes every so many steps, and after the last, comes after this one."""
    return step == o.steps or (every > 0 and step % every == 0)


def infer(r: Run, tokens: Tensor, *others: Tensor) -> Tensor:
    """The model's result without gradients, and without compiling it for other shapes. Of a sharded model the
    blocks themselves are compiled; otherwise r.model is not, and torch._dynamo takes a second to import.
    """
    compiled = r.options.compile and world() > 1
    with torch.no_grad(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        return r.model(tokens, r.cis, *others)


def validate(r: Run) -> float:
    """Mean loss over --val-steps batches, in nats per token. Ranks take turns with them; a rank that has none
    left computes any batch without counting it: all ranks are needed to gather the weights.
    """
    finish(r)
    data = r.val_data
    assert data is not None
    count = data.validation_batches(r.options.val_steps)
    zeros = np.zeros((data.batch_size, data.seq_len), np.int32)
    own, losses = data.validation(r.options.val_steps), []
    for batch in range(rank(), -(-count // world()) * world(), world()):
        tokens, *others = to_device(r, next(own, (zeros, zeros)))
        losses.append(infer(r, tokens, *others).double() * (batch < count))
        stop.check(r)
    total = torch.stack(losses).sum() / count
    if world() > 1:
        dist.all_reduce(total)
    return total.item()


def sample(r: Run, step: int) -> str:
    """--sample-tokens tokens behind the one that begins a text, as text where there is a tokenizer. Each
    costs a forward over the last --seq-len: a cache of keys and values is more code than an occasional sample
    is worth.
    """
    finish(r)
    o = r.options
    tokens = sample_prompt(o, r.tokenizer, r.config)
    shown = 0 if o.sample_prompt_ids else len(tokens)
    for i in range(o.sample_tokens):
        context = torch.tensor([tokens[-o.seq_len :]], device=r.device)
        logits = infer(r, context)[0, -1]
        u = llamac.random.uniform(o.seed, step, SAMPLING_STREAM, 1, start=i).item()
        tokens.append(sample_token(logits, o.sample_temperature, o.sample_top_k, u))
        stop.check(r)
    return r.tokenizer.decode(tokens[shown:]) if r.tokenizer else " ".join(map(str, tokens[shown:]))


def evaluate(r: Run, step: int) -> None:
    """Log the scores of --eval-tasks."""
    finish(r)
    o, scores = r.options, {}
    for task, asked in r.questions.items():
        logs = evaluation.likelihoods(
            partial(infer, r), asked, o.batch_size, o.seq_len, r.device, partial(stop.check, r)
        )
        scores[task] = evaluation.score(asked, logs)
    for task, score in scores.items():
        r.log.evaluation(step, task, **score)


def observe(r: Run, step: int, logged: Container[str] = ()) -> None:
    """Validate, evaluate and sample, as far as that is due after this step and not logged."""
    o = r.options
    at_start = step == 0
    if r.val_data and "val" not in logged and (at_start or due(o, step, o.val_every)):
        r.log.val(step, validate(r))
    if r.questions and "evaluation" not in logged and (at_start or due(o, step, o.eval_every)):
        evaluate(r, step)
    if not at_start and o.sample_every and "sample" not in logged and due(o, step, o.sample_every):
        r.log.sample(step, sample(r, step))


def before_steps(r: Run) -> None:
    """Observe the first weights. A signal that came while a run observed left the checkpoint of the step, and
    the log without the event: a resumed run does that first.
    """
    if r.finished == 0 or "step" in r.logged:  # else the log begins here
        observe(r, r.finished, r.logged)


def save_checkpoint(r: Run, step: int) -> None:
    """Write OUT/step_NNNNNN and remove the oldest checkpoints beyond --keep-checkpoints."""
    finish(r)
    begin = time.perf_counter()
    o = r.options
    fields = checkpoints.describe(o, tokens_per_step(r.data), step, r.data.skip, r.data.sequences)
    path = checkpoints.write(r.output, o, fields, r.model, r.optimizer, r.carried)
    r.log.checkpoint(step, path, 1e3 * (time.perf_counter() - begin))
    r.saved, r.saved_step = str(path), step


# The end ====================================================================================================


def end_early(r: Run, number: int) -> int:
    """What follows a signal: a checkpoint of the last finished step. Returns the exit code."""
    finish(r)
    if r.options.checkpoint_every >= 0 and r.finished > r.saved_step:
        save_checkpoint(r, r.finished)
    end(r, f"interrupted by {signal.Signals(number).name}")
    return 128 + number


def end(r: Run, how: str = "done") -> None:
    """Wait for the last step, close the log, say where everything is."""
    finish(r)
    r.log.print_usage()
    r.log.close()
    if r.output:
        conclude(r, how)
        r.output.close()
    if world() > 1:
        dist.barrier()  # with another exit code than 0, the first to leave ends the others
        dist.destroy_process_group()
    stop.restore_signals()


def conclude(r: Run, how: str) -> None:
    """Draw the loss and print the last line."""
    out = Path(r.options.out)
    assert r.output is not None  # rank 0's
    r.output.check()
    model = f"model {r.saved}" if r.saved and r.saved_step == r.finished else "no model"
    result = f"{how}: {model}, log {out}/log.jsonl"
    events = llamac.plot.read_log(out / "log.jsonl")
    if all(event["event"] != "step" for event in events):
        return r.log.print(f"{result}, no loss plot (there was no step)")
    try:
        llamac.plot.draw(events, out / "loss.png")
        result += f", loss plot {out}/loss.png"
    except ImportError:
        result += " (no loss plot: matplotlib is not installed)"
    r.log.print(result)


REFERENCE_FLAGS = ("--matmul-dtype", "--fp8-", "--document-mask")
Program: TypeAlias = Callable[[Options], None]


def command_line(argv: list[str], train: Program, write_references: Program, help: str) -> None:
    """train_llama3.py with arguments: --train and flags, or --help, or at most flags of the matrix products
    for reference tensors. Raises InputError.
    """
    if "--train" in argv:
        try:
            options = llamac.options.parse([arg for arg in argv if arg != "--train"])
            print(options.to_toml(), end="") if options.print_config else train(options)
            leave()
        except stop.Stopped as stopped:
            code = end_early(stopped.run, stopped.number)
            leave(code)
            sys.exit(code)
        except (InputError, OSError) as error:
            tell_launcher(error)
            if rank() == 0:
                raise
            if not dist.is_initialized():  # found in flags and files, which are the same for all
                time.sleep(60)  # rank 0 says it, and its end is the others'
                os._exit(2)
            time.sleep(5)  # as above, where all find the same
            raise InputError(f"rank {rank()}: {error}") from None
    elif argv[:1] in (["-h"], ["--help"]):
        print(f"{help}\nWith --train:\n")
        llamac.options.parse(["--help"])
    elif all(arg.startswith(REFERENCE_FLAGS) for arg in argv if arg.startswith("-")):
        write_references(llamac.options.parse(argv))
    else:
        expected = "--train, or nothing but --matmul-dtype, --fp8-... and --document-mask (reference tensors)"
        raise InputError(f"expected {expected}, found {' '.join(argv)}")
