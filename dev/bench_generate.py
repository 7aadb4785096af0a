#!/usr/bin/env python3
"""Generation on this machine's device, beside transformers with the same weights and type; rounds are
interleaved, medians are printed. By hand: it takes minutes.

Decoding: tokens per second of one sequence, greedy, after a prompt of one token, beside transformers'
generate; on a GPU with a static cache and torch.compile, and beside the limit: the bytes of the weights, each
read once per token, at the rate of the best copy in this run. There also: a prompt read at once, and scores
of HellaSwag-sized endings.

    dev/bench_generate.py out/step_000600 --tokens 1023
    dev/bench_generate.py --preset llama3.2-1b --dtype bf16       # random weights
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from llamac.base.dtypes import torch_dtypes
from llamac.base.native import native
from llamac.base.version import provenance, provenance_text
from llamac.bench import harness
from llamac.eval.likelihood import Scorer
from llamac.inference.model import Inference, Sampling
from llamac.model.config import load_config
from llamac.profile.peak import copy_gbps

TORCH = torch_dtypes("f32", "bf16")
BATCH = 4096  # tokens of a prompt, and of a pass that scores
QUESTIONS, ENDINGS = 200, 4


def write_preset(name: str, directory: str, dtype: str) -> str:
    """A model of this preset with random weights."""
    torch.manual_seed(1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**load_config(name).to_dict("float32"))).to(TORCH[dtype])
    model.save_pretrained(directory)
    return directory


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def compare(ways: dict[str, tuple[float, Callable]], rounds: int, limit: float | None = None) -> None:
    """Prints the rates of each way (units, work), after a round that does not count."""
    works = {name: partial(seconds_of, work) for name, (_, work) in ways.items()}
    for name, seconds in harness.take_turns(works, rounds, warm_up=1).items():
        rates = [ways[name][0] / each for each in seconds]
        median = statistics.median(rates)
        share = f", {median / limit:.1%} of the limit" if limit else ""
        print(f"{name:44} {median:8.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f}){share}", flush=True)


def decoding(args: argparse.Namespace, on_gpu: bool) -> None:
    ours = Inference(args.directory, dtype=args.dtype, context=args.tokens + 1)
    theirs = AutoModelForCausalLM.from_pretrained(args.directory, dtype=TORCH[args.dtype])
    theirs = theirs.to("cuda" if on_gpu else "cpu")
    prompt, made = [ours.config.bos_token_id], {}
    how: dict = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    how |= {"cache_implementation": "static"} if on_gpu else {}

    def with_llamac() -> None:
        made["llamac"] = ours.generate([prompt], args.tokens, Sampling(0), stops=[])[0]

    def with_transformers() -> None:
        ids = theirs.generate(torch.tensor([prompt], device=theirs.device), **how)
        made["transformers"] = ids[0, 1:].tolist()

    ways = {"llamac": (args.tokens, with_llamac)}
    if not args.alone:
        name = "transformers, static cache, torch.compile" if on_gpu else "transformers"
        ways[name] = (args.tokens, with_transformers)
    limit = None
    if on_gpu:
        size = sum(p.nbytes for p in theirs.parameters())
        rate = copy_gbps("cuda") or 0.0
        limit = 1e9 * rate / size
        print(f"limit: {size / 1e9:.3f} GB at {rate:.0f} GB/s, {limit:.0f} tokens/s", flush=True)
    compare(ways, args.rounds, limit)
    different = next((i for i, ids in enumerate(zip(*made.values())) if len(set(ids)) > 1), None)
    print("greedy ids:", "equal" if different is None else f"DIFFERENT from token {different} on", flush=True)


def prompts_and_scores(args: argparse.Namespace) -> None:
    random = np.random.default_rng(1)
    reader = Inference(args.directory, dtype=args.dtype, context=BATCH + 1)
    scorer = Scorer(args.directory, dtype=args.dtype, context=256, batch_tokens=BATCH)
    V = reader.config.vocab_size
    ids = random.integers(0, V, BATCH).tolist()
    pairs = []
    for _ in range(QUESTIONS):
        context = random.integers(0, V, random.integers(40, 110)).tolist()
        for _ in range(ENDINGS):
            pairs.append((context, random.integers(0, V, random.integers(10, 50)).tolist()))
    # What a pass reads of a pair: all but its last token.
    unpadded = sum(len(context) + len(ending) - 1 for context, ending in pairs)
    lengths = f"{len(pairs)} endings of {unpadded / len(pairs):.0f} tokens with their context"
    ways = {
        f"prompt of {BATCH} tokens": (BATCH, lambda: reader.next_logits(ids, BATCH)),
        f"scores, {lengths}": (unpadded, lambda: scorer.of_ids(pairs)),
    }
    compare(ways, args.rounds)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("directory", nargs="?")
    parser.add_argument("--preset", metavar="NAME", help="instead of a directory: random weights")
    parser.add_argument("--dtype", default="f32", choices=list(TORCH))
    parser.add_argument("--tokens", type=int, default=1023)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="without transformers")
    args = parser.parse_args()
    if (args.directory is None) == (args.preset is None):
        parser.error("expected a directory, or --preset NAME")
    torch.set_num_threads(args.threads)
    on_gpu = native.computes_on_device()
    print(provenance_text(provenance()))
    with tempfile.TemporaryDirectory() as folder:
        if args.preset:
            args.directory = write_preset(args.preset, folder, args.dtype)
        decoding(args, on_gpu)
        if on_gpu:
            prompts_and_scores(args)


if __name__ == "__main__":
    main()
