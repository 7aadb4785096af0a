"""`llamac export hf DIR OUT` copies a checkpoint's model, without its training state, and writes a card;
`llamac export merge DIR OUT` copies the model that a checkpoint's adapters belong to, and adds them to it.
"""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llamac.base.errors import InputError
from llamac.base.files import read_json
from llamac.base.folders import how_to_fetch
from llamac.base.log import read_log
from llamac.data.tokenizer_json import SETTINGS
from llamac.model import checkpoint, hf
from llamac.model.config import WEIGHTS, Config, load_config

OTHERS = ("generation_config.json", "tokenizer.json", "tokenizer.model", *SETTINGS)


def state(folder: Path) -> dict:
    """The manifest of a checkpoint whose files are complete; {} for another directory. Raises InputError."""
    if not (folder / checkpoint.MANIFEST).exists():
        return {}
    found = checkpoint.check(folder)
    if found.problem:
        raise InputError(f"{folder}: expected a complete checkpoint, {found.problem}")
    return read_json(folder / checkpoint.MANIFEST, {})


def validation_loss(folder: Path, step: int) -> float | None:
    """The last one up to a step of the run that has the checkpoint's folder, by its log."""
    log = folder.resolve().parent / "log.jsonl"
    events = read_log(log) if log.is_file() else []
    losses = [event["loss"] for event in events if event.get("event") == "val" and event["step"] <= step]
    return losses[-1] if losses else None


def card(config: Config, name: str, manifest: dict, loss: float | None) -> str:
    """The README.md of the model: the facts that its files and its run's log state."""
    rows = {
        "parameters": f"{config.num_parameters():,}",
        "layers": config.num_hidden_layers,
        "channels": config.hidden_size,
        "heads (queries / keys and values)": f"{config.num_attention_heads} / {config.num_key_value_heads}",
        "vocabulary": f"{config.vocab_size:,}",
        "context": f"{config.max_position_embeddings:,} tokens",
    }
    if manifest:
        step, tokens = manifest["step"], manifest["step"] * manifest["total_batch_size"]
        rows |= {"optimizer steps": f"{step:,}", "training tokens": f"{tokens:,}"}
        rows |= {"sequence length": f"{manifest['seq_len']:,} tokens"}
        if manifest["config"]["init"] == "load":
            rows |= {"initial weights": Path(manifest["config"]["model"]).name}
    if loss is not None:
        rows["validation loss"] = f"{loss:.4f} nats per token"
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [llamac]
---

# {name}

A {config.model_type.capitalize()} model{", trained with llamac" if manifest else ""}.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")
print(tokenizer.decode(model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=50)[0]))
```

To add before publishing: the license, the training data and its license, intended uses and limitations.
"""


# Fields of PEFT's adapter_config.json that mean other products than those of plain LoRA.
OTHER_ADAPTERS = [
    "use_rslora",
    "use_dora",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
]


def add_adapters(adapters: Path, model: Path) -> None:
    """Add PEFT's adapters to the weights of a model: weight += lora_alpha / r * B @ A. Files of the tokenizer
    that are beside them replace the model's. Raises InputError."""
    for name in (name for name in OTHERS if (adapters / name).is_file()):
        shutil.copyfile(adapters / name, model / name)
    where, file, end = adapters / hf.ADAPTER_CONFIG, adapters / hf.ADAPTERS, ".lora_A.weight"
    config = read_json(where, {"r": range(1, 2**31), "lora_alpha": float})
    if other := [name for name in OTHER_ADAPTERS if config.get(name)]:
        raise InputError(f"{where}: expected plain LoRA, found {other[0]}")
    low = hf.read_header(file)
    files = hf.weight_files(model).items()
    places = {name: (path, own) for path, header in files for name, own in header.items()}
    for stem in (name.removesuffix(end) for name in low if name.endswith(end)):
        a, b, target = stem + end, stem + ".lora_B.weight", stem.removeprefix("base_model.model.") + ".weight"
        if b not in low or target not in places:
            raise InputError(f"{file}: {a}: expected {b}, and {target} in {model}, found none")
        path, weight = places[target]
        r, sizes = config["r"], weight.shape if len(weight.shape) == 2 else (0, 0)
        for name, own, shape in (
            (a, low[a], (r, sizes[1])),
            (b, low[b], (sizes[0], r)),
            (target, weight, sizes),
        ):
            if own.shape != shape or own.type.mantissa_bits == 0:
                found = f"found {own.type.safetensors} {list(own.shape)}"
                raise InputError(f"{file}: {name}: expected floating point {list(shape)}, {found}")
        delta = hf.read_array(file, low[b]) @ hf.read_array(file, low[a])
        hf.replace_array(path, weight, hf.read_array(path, weight) + config["lora_alpha"] / r * delta)


def write_merged(directory: str | Path, out: str | Path) -> None:
    """write_hf() of the model that the adapters of a checkpoint, or of PEFT, belong to, with them added."""
    adapters = checkpoint.find_model(directory)
    if not (adapters / hf.ADAPTER_CONFIG).is_file():
        raise InputError(f"{directory}: expected adapters, found no {hf.ADAPTER_CONFIG}")
    state(adapters)
    where = adapters / hf.ADAPTER_CONFIG
    base = read_json(where, {"base_model_name_or_path": str})["base_model_name_or_path"]
    if not hf.find_weights(base):
        expected = f"expected a directory with weights, found {base}{how_to_fetch(base)}"
        raise InputError(f"{where}: base_model_name_or_path: {expected}")
    write_hf(base, out, partial(add_adapters, adapters))


def write_hf(directory: str | Path, out: str | Path, change: Callable[[Path], None] | None = None) -> None:
    """Copy config, weights and tokenizer of a checkpoint or another Hugging Face directory into a new folder,
    change them there, and write README.md; the folder gets its name when it is whole. Raises InputError."""
    folder, out = checkpoint.find_model(directory), Path(out)
    if not folder.is_dir():
        raise InputError(f"{directory}: expected a directory with config.json and weights")
    if out.exists():
        raise InputError(f"{out}: exists; expected the name of a new folder")
    config, manifest = load_config(folder), state(folder)
    weights = [path.name for path in hf.weight_files(folder)]
    weights += [] if weights == [WEIGHTS[0]] else WEIGHTS[1:]  # the index of shards
    names = ["config.json", *weights, *(name for name in OTHERS if (folder / name).is_file())]
    loss = validation_loss(folder, manifest["step"]) if manifest else None
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for name in dict.fromkeys(names):
            shutil.copyfile(folder / name, temporary / name)
        if change:
            change(temporary)
        (temporary / "README.md").write_text(card(config, out.name, manifest, loss))
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
