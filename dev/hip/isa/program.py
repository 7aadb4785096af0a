"""Runs one of the project's programs on the emulated MI300X.

program.py check_tile               tests/ops/check_tile.cpp; check_operations takes flags
program.py train_llama3 --out DIR   trains a tiny model for a few steps, after `check.py --program`

Further flags go to the program. Those of train_llama3 are printed: a CPU build takes the same, for
comparison. Sizes are multiples of 16, as products in fp8 want them.
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from build import LIBRARIES, ROOT, program_parser, start

MAIN = {
    "check_operations": "_Z21check_operations_mainiPPc",
    "check_tile": "_Z15check_tile_mainiPPc",
    "train_llama3": "_Z17train_llama3_mainiPPc",
}
CONFIG = json.loads((ROOT / "tests/models/sixteens.json").read_text()) | {
    **{"vocab_size": 264, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 208},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64},  # as kernels of matrix cores want
    **{"tie_word_embeddings": True, "initializer_range": 0.05},
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
    parser = program_parser(__doc__)
    parser.add_argument("program", choices=MAIN)
    parser.add_argument("--libraries", type=Path, default=LIBRARIES, help="folder that check.py built")
    parser.add_argument("--order", choices=("forward", "reverse", "random"), default="forward")
    parser.add_argument("--out", type=Path, help="of train_llama3: for model, tokens and the run's output")
    options, further = parser.parse_known_args()
    words = [options.program, *further]
    if options.program == "train_llama3":
        if not options.out:
            parser.error("expected --out DIR for train_llama3, found none")
        words = [options.program, *write_inputs(options.out), *further, "--out", str(options.out / "run")]
    print(" ".join(word or "''" for word in words), flush=True)
    from device import Device, kernel_name

    device = Device(options.libraries)
    device.machine.order = options.order
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # else it sets this itself, and executes this process anew
    arguments = (ctypes.c_char_p * (len(words) + 1))(*(word.encode() for word in words), None)
    start = time.time()
    status = getattr(device.lib, MAIN[options.program])(len(words), arguments)
    ctypes.CDLL(None).fflush(None)
    for name, count in device.machine.executed.most_common():
        print(f"{count:12d} {kernel_name(name)}")
    total = sum(device.machine.executed.values())
    print(f"exit status {status}, {total} wave instructions in {time.time() - start:.1f} s", flush=True)
    if device.error:
        print(f"{type(device.error).__name__}: {device.error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    start(main)
