"""Trains a tiny model with train_llama3's AMD build on the emulated MI300X for a few steps.

program.py --out DIR [further flags of train_llama3]. `check.py --program` links the program. The flags are
printed: a CPU build takes the same, for comparison. Sizes are multiples of 16, as products in fp8 want them.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from build import LIBRARIES

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 128,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 96,
    "eos_token_id": 96,
    "torch_dtype": "float32",
}


def write_inputs(folder: Path) -> list[str]:
    """A model's config.json and a file of tokens; the flags of a run on them."""
    model, data = folder / "model", folder / "train_000.bin"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    tokens = (np.random.default_rng(3).integers(0, 16, 4000) ** 2 % 260).astype(np.uint16)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    data.write_bytes(header.tobytes() + tokens.tobytes())
    inputs = ["--model", str(model), "--init", "random", "--train-data", str(data), "--val-data", ""]
    sizes = ["--seq-len", "48", "--batch-size", "2", "--steps", "3", "--warmup-steps", "1", "--lr", "1e-2"]
    quiet = ["--tokenizer", "none", "--checkpoint-every", "-1", "--sample-every", "0", "--val-every", "0"]
    return [*inputs, *sizes, *quiet, "--graphs", "off", "--seed", "5"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--libraries", type=Path, default=LIBRARIES, help="folder that check.py built")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for model, tokens and the run's output"
    )
    options, further = parser.parse_known_args()
    words = ["train_llama3", *write_inputs(options.out), *further, "--out", str(options.out / "run")]
    print(" ".join(word or "''" for word in words), flush=True)
    from device import Device
    from harness import kernel_name
    from suite import run_main

    device = Device(options.libraries)
    status = run_main(device, words)
    for name, count in device.machine.executed.most_common():
        print(f"{count:12d} {kernel_name(name)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
