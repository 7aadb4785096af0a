"""llamac.patch beside the model as it was: a training step (loss, gradients) of transformers' Llama with
random bf16 weights, or with --lora of PEFT's adapters on all its linear layers. Prints medians of the time
and peak memory of both, and the ratios.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import llamac
from llamac.config import load_config
from llamac.transformers_patch import report
from llamac.version import provenance, provenance_text

WARM_UP = 3


def build(model: str, device: str, lora: int) -> Any:
    """The model; with lora > 0, under adapters of that rank."""
    values = load_config(model).to_dict("bfloat16") | {"use_cache": False}
    torch.manual_seed(0)
    with torch.device(device):
        found = LlamaForCausalLM(LlamaConfig(**values)).bfloat16()
    if lora > 0:
        import peft

        found = peft.get_peft_model(found, peft.LoraConfig(r=lora, target_modules="all-linear"))
    return found.train()


def measure(model: Any, ids: torch.Tensor, steps: int) -> tuple[float, float]:
    """(seconds a step, peak GiB; 0 on a CPU, where nobody counts)."""
    on_gpu, seconds = ids.is_cuda, []
    for step in range(WARM_UP + steps):
        if step == WARM_UP and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return statistics.median(seconds[WARM_UP:]), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3.2-1b", help="a preset or a config.json")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10, help=f"timed, after {WARM_UP} that are not")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="0: all weights are trained")
    o = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(o.model, device, o.lora)
    base = model.get_base_model() if o.lora else model
    ids = torch.randint(model.config.vocab_size, (o.batch, o.length), device=device)
    print(provenance_text(provenance()), flush=True)
    found = {}
    for name, change in (("as it was", None), ("patched", llamac.patch), ("again", llamac.unpatch)):
        if change:
            change(base)
        seconds, peak = found[name] = measure(model, ids, o.steps)
        tokens = ids.numel() / seconds
        print(f"{name:10} {1e3 * seconds:9.1f} ms {tokens:9.0f} tokens/s, peak {peak:6.2f} GiB", flush=True)
        if name == "patched":
            print("\n".join(f"           {line}" for line in report(base)))
    fastest = min(found["as it was"][0], found["again"][0])
    print(f"patched: {fastest / found['patched'][0]:.2f} times the speed", end="")
    print(f", {found['patched'][1] / found['again'][1]:.2f} times the memory" if device == "cuda" else "")


if __name__ == "__main__":
    main()
