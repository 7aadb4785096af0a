#!/usr/bin/env python3
"""Generation on this machine: the model of a directory with its cache, by whole passes, and in transformers.

Tokens per second of one sequence, greedy, after a prompt of one token, with the same weights in f32 and as
many threads; rounds are interleaved, medians are printed. By hand: it takes minutes.

    dev/bench_generate.py out/step_000600 --tokens 1023
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from transformers import AutoModelForCausalLM

import llamac
from llamac.inference import Inference, Sampling


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--tokens", type=int, default=1023)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ours = Inference(args.directory, dtype="f32")
    theirs = AutoModelForCausalLM.from_pretrained(args.directory, dtype=torch.float32)
    # A trainer without samples has no cache: each token is a pass over all before it.
    whole = llamac.Trainer(
        "tiny", model=args.directory, seq_len=args.tokens + 1, batch_size=1, sample_every=0
    )
    prompt = [ours.config.bos_token_id]

    def with_transformers(count: int) -> list[int]:
        ids = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return ids[0, 1:].tolist()

    ways = {
        "llamac": lambda count: ours.generate([prompt], count, Sampling(0), stops=[])[0],
        "llamac, whole passes": lambda count: whole.sample(count, 0.0, 0, prompt),
        "transformers": with_transformers,
    }
    made = {name: way(16) for name, way in ways.items()}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            made[name] = way(args.tokens)
            rates[name].append(args.tokens / (time.perf_counter() - begin))
    for name, values in rates.items():
        spread = f"{min(values):.0f} to {max(values):.0f}"
        print(f"{name:24} {statistics.median(values):8.0f} tokens/s ({spread})")
    print("greedy ids:", "equal" if len({tuple(ids) for ids in made.values()}) == 1 else "DIFFERENT")


if __name__ == "__main__":
    main()
