#!/usr/bin/env python3
"""llamac.patch beside the model as it was: a training step (loss, gradients) of transformers' Llama with
random weights, or with --lora of PEFT's adapters on all its linear layers. The two take turns, step by step.
Prints medians of their times and of the ratio of neighbouring steps, and peak memory.
"""

import statistics
import time
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import llamac
from llamac.base.dtypes import torch_dtypes
from llamac.base.version import provenance, provenance_text
from llamac.bench import harness
from llamac.model.config import load_config
from llamac.ops.transformers_patch import report

WARM_UP = 3


def build(model: str, device: str, dtype: torch.dtype, lora: int) -> Any:
    """The model; with lora > 0, under adapters of that rank."""
    values = load_config(model).to_dict("bfloat16") | {"use_cache": False}
    torch.manual_seed(0)
    with torch.device(device):
        found = LlamaForCausalLM(LlamaConfig(**values)).to(dtype)
    if lora > 0:
        import peft

        found = peft.get_peft_model(found, peft.LoraConfig(r=lora, target_modules="all-linear"))
    return found.train()


def step(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """(seconds, peak GiB; 0 on a CPU, where nobody counts)."""
    on_gpu = ids.is_cuda
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begin, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="llama3.2-1b", help="a preset or a config.json")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f32"])
    parser.add_argument("--steps", type=int, default=10, help=f"timed of each, after {WARM_UP} that are not")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="0: all weights are trained")
    o = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(o.model, device, torch_dtypes(o.dtype)[o.dtype], o.lora)
    base = model.get_base_model() if o.lora else model
    ids = torch.randint(model.config.vocab_size, (o.batch, o.length), device=device)
    print(provenance_text(provenance()), flush=True)

    def changed_step(change):
        change(base)
        return step(model, ids)

    ways = {
        "as it was": partial(changed_step, llamac.unpatch),
        "patched": partial(changed_step, llamac.patch),
    }
    found = harness.take_turns(ways, o.steps, WARM_UP)
    print("\n".join(report(base)))
    seconds = {name: [time for time, _ in steps] for name, steps in found.items()}
    peaks = {name: max(peak for _, peak in steps) for name, steps in found.items()}
    for name, times in seconds.items():
        median = statistics.median(times)
        memory = f", peak {peaks[name]:6.2f} GiB" if peaks[name] else ""
        print(f"{name:10} {1e3 * median:9.1f} ms {ids.numel() / median:9.0f} tokens/s{memory}")
    ratios = sorted(before / after for before, after in zip(*seconds.values()))
    middle = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
    memory = f", {peaks['patched'] / peaks['as it was']:.2f} times the memory" if device == "cuda" else ""
    print(f"patched: {statistics.median(ratios):.2f} times the speed (quartiles {middle}){memory}")


if __name__ == "__main__":
    main()
