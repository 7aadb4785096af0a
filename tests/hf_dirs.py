"""Hugging Face directories with random weights, a small tokenizer and a chat template."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RANDOM = ("qwen2", "qwen3", "phi3", "olmo2", "gpt2")  # whose vectors have random values
# What a config.json changes: a window for every other layer, and rotary frequencies stretched by YaRN.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 3.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
SMALL = {"model_type": "llama", "vocab_size": 10, "hidden_size": 12, "intermediate_size": 20}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 3}
WINDOWS = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 7}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEXT = "the cat sat on the mat and looked at the moon; déjà vu, said the cat: 🙂 "


def write_weights(folder: Path, config: dict, seed: int = 0, dtype: str = "float32") -> Path:
    """config.json and model.safetensors, as transformers writes and initializes them; vectors of Qwens and
    GPT-2, which would be zeros and ones, have random values."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).to(getattr(torch, dtype))
    for parameter in model.parameters() if config["model_type"] in RANDOM else ():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = None  # as tests say it
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> int:
    """tokenizer.json and its settings: byte-level BPE, <|begin|> before a text. Returns its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT * 20], trainer)
    made.add_special_tokens(SPECIAL)
    begin = ("<|begin|>", made.token_to_id("<|begin|>"))
    made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return made.get_vocab_size()


def noise(seed: int, length: int, words: Iterable[str] = ()) -> str:
    """All of Unicode, with many letters, digits, quotes and white space, and these words."""
    rng = random.Random(seed)
    plain = [
        *"abcXYZ  \t\n\r\n0123456789'sS'll .,;_()[]\u00a0\u2028\u3000\u0085éßñЖ漢🙂\u0301\u0308\0",
        *words,
    ]
    other = [lambda: chr(rng.randrange(0xD800)), lambda: chr(rng.randrange(0xE000, 0x110000))]
    draw = lambda: rng.choice(plain) if rng.random() < 0.8 else rng.choice(other)()  # noqa: E731
    return "".join(draw() for _ in range(length))


NAMES = ["<unk>", "<s>", "</s>", "<pad>"]


def sentencepiece(prepended: bool, corpus: Iterable[str]) -> Any:
    """A tokenizer as Llama 2's: spaces become U+2581, one stands before the text, unknown characters are
    bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=NAMES + bytes_, show_progress=False)
    made.train_from_iterator((text.replace("\n", " ") for text in corpus), trainer)
    config = json.loads(made.to_str())
    config["added_tokens"] = config["added_tokens"][: len(NAMES)]
    config["pre_tokenizer"] = None
    made = Tokenizer.from_str(json.dumps(config))
    if prepended:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def write_directory(folder: Path, context: int = 128, **changes) -> Path:
    """All of it, for a model with grouped queries, or GPT-2."""
    folder.mkdir(parents=True, exist_ok=True)
    V, is_gpt2 = write_tokenizer(folder), changes.get("model_type") == "gpt2"
    model = "gpt2" if is_gpt2 else "tied-gqa"
    config = json.loads((Path(__file__).parent / f"models/{model}.json").read_text())
    longest = "n_positions" if is_gpt2 else "max_position_embeddings"
    config |= {"vocab_size": V, longest: context, "bos_token_id": V - 5} | changes
    config |= {"eos_token_id": V - 4, "pad_token_id": None}
    return write_weights(folder, config)
