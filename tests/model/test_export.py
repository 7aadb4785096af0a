"""llamac export: a GGUF file, read back by the gguf package, has the directory's tensors and tokenizer."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from hf_dirs import SPECIAL, TEMPLATE, TEXT, WINDOWS, sentencepiece, write_directory, write_weights
from run import events, flags, refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from llamac import Error
from llamac.data import tokenizer
from llamac.inference import export, export_hf
from llamac.model.config import load_config

gguf = pytest.importorskip("gguf")


def half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of export.interleaved(), one row at a time."""
    size = rows.shape[0] // heads
    found = np.empty_like(rows)
    for head in range(heads):
        for j in range(size // 2):
            found[head * size + j] = rows[head * size + 2 * j]
            found[head * size + size // 2 + j] = rows[head * size + 2 * j + 1]
    return found


def tensors(path) -> dict[str, np.ndarray]:
    """In float32."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        data = tensor.data
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            data = (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        found[tensor.name] = data.reshape(tensor.shape[::-1])
    return found


@pytest.mark.parametrize(
    "stored, dtype, model",
    [(*types, "llama") for types in (("f32", "f32"), ("f32", "bf16"), ("f32", "f16"), ("f16", "auto"))]
    + [
        ("f32", "f32", "qwen2"),
        ("f32", "bf16", "qwen3"),
        ("f32", "f16", "phi3"),
        ("f32", "f32", "olmo2"),
        ("f32", "f16", "gpt2"),
    ],
)
def test_every_tensor(tmp_path, stored, dtype, model):
    directory = write_directory(tmp_path / "model", model_type=model, architectures=None)
    if stored == "f16":
        weights = {name: x.half() for name, x in load_file(directory / "model.safetensors").items()}
        save_file(weights, directory / "model.safetensors")
    export.write_gguf(directory, tmp_path / "model.gguf", dtype)
    dtype = stored if dtype == "auto" else dtype
    kind = gguf.GGUFReader(tmp_path / "model.gguf").fields["general.file_type"].contents()
    assert kind == gguf.LlamaFileType["ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"]
    config, found = load_config(str(directory)), tensors(tmp_path / "model.gguf")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with safe_open(directory / "model.safetensors", "pt") as file:
        names = [name for name, _ in config.parameters()]
        architecture = gguf.MODEL_ARCH[model.upper()]
        in_gguf = gguf.get_tensor_name_map(architecture, config.num_hidden_layers).mapping
        assert len(found) == len(names)
        for name in names:
            weight = file.get_tensor(name)
            if name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") and weight.dim() == 2:
                weight = weight.T
            narrow = weight.to({"f32": torch.float32, "f16": torch.float16}.get(dtype, torch.bfloat16))
            wanted = (weight if weight.dim() == 1 or "wpe" in name else narrow).float()
            stem, kind = name.rsplit(".", 1)
            ours = found[f"{in_gguf[stem][1]}.{kind}"]
            if model == "llama" and (role := name.split(".")[-2]) in heads:
                ours = half_split(ours, heads[role])
            np.testing.assert_array_equal(ours, wanted.numpy(), err_msg=name)
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


def test_settings_and_tokenizer(tmp_path):
    directory = write_directory(tmp_path / "model")
    export.write_gguf(directory, tmp_path / "model.gguf")
    config, own = load_config(str(directory)), tokenizer.load(directory)
    fields = {n: f.contents() for n, f in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    wanted = {
        "general.architecture": "llama",
        "general.name": "model",
        "llama.vocab_size": config.vocab_size,
        "llama.context_length": 128,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(config.rms_norm_eps),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": own.bos,
        "tokenizer.ggml.eos_token_id": own.eos,
        "tokenizer.chat_template": TEMPLATE,
    }
    assert {name: fields[name] for name in wanted} == wanted
    tokens = fields["tokenizer.ggml.tokens"]
    assert tokens == [own.backend.id_to_token(id) for id in range(config.vocab_size)]
    assert tokens[-len(SPECIAL) :] == SPECIAL
    assert fields["tokenizer.ggml.token_type"] == [1] * (len(tokens) - len(SPECIAL)) + [3] * len(SPECIAL)
    merges = json.loads((directory / "tokenizer.json").read_text())["model"]["merges"]
    assert [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]] == merges


@pytest.mark.parametrize("prepended", [True, False])
def test_sentencepiece(tmp_path, prepended):
    """Kinds of tokens, and scores in the order of merges, of the first where two make one token. With
    llama_cpp installed: its ids of texts.
    """
    directory = write_directory(tmp_path / "model")
    content = json.loads(sentencepiece(prepended, [TEXT + "a "] * 20).to_str())
    content["model"]["merges"].append(["▁a", "t"])  # a second merge to the token of "▁" and "at"
    made = Tokenizer.from_str(json.dumps(content))
    made.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((directory / "config.json").read_text()) | {"vocab_size": made.get_vocab_size()}
    write_weights(directory, config)
    export.write_gguf(directory, tmp_path / "model.gguf", "f32")
    fields = {n: f.contents() for n, f in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    assert fields["tokenizer.ggml.model"] == "llama" and fields["tokenizer.ggml.add_space_prefix"]
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert tokens == [made.id_to_token(id) for id in range(made.get_vocab_size())]
    assert types[tokens.index("<0x41>")] == 6 and types[tokens.index("<s>")] == 3
    assert types[fields["tokenizer.ggml.unknown_token_id"]] == 2 and types[tokens.index("▁the")] == 1
    scores = dict(zip(tokens, fields["tokenizer.ggml.scores"], strict=True))
    merged = ["".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    order = [scores[name] for name in dict.fromkeys(merged)]
    assert merged.count("▁at") == 2
    assert order == sorted(order, reverse=True) and len(set(order)) == len(order)
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    texts = ["the cat sat", "déjà vu: 🙂 猫", "a\tb  c   d\nbreak"]
    # Where Metaspace finds a space there, it puts none before it; llama.cpp always does.
    for text in [*texts, *(["  two spaces"] if prepended else [])]:
        ids = made.encode(text, add_special_tokens=False).ids
        assert theirs.tokenize(text.encode(), add_bos=False, special=False) == ids


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.25, 1.5] * 2, "long_factor": [4.5] * 6}
YARNS = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 20.0}


@pytest.mark.parametrize(
    "changes, wanted, absent",
    [
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            ["attention.sliding_window"],
        ),
        (
            {"rope_scaling": YARNS},
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_beta_fast": 20.0,
                "rope.scaling.yarn_beta_slow": 1.0,
            },
            ["rope.scaling.yarn_attn_factor"],
        ),
        ({"rope_scaling": YARNS | {"attention_factor": 1.25}}, {"rope.scaling.yarn_attn_factor": 1.25}, []),
        (WINDOWS, {"attention.sliding_window": 7}, ["rope.scaling.type"]),
        (
            WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]},
            {"attention.sliding_window": 7, "attention.sliding_window_pattern": [True, False]},
            [],
        ),
        (
            {"model_type": "phi3", "rope_scaling": LONGROPE, "original_max_position_embeddings": 32},
            {
                "rope.scaling.original_context_length": 32,
                "rope.scaling.attn_factor": pytest.approx((1 + math.log(4) / math.log(32)) ** 0.5),
            },
            ["rope.scaling.type", "rope.scaling.factor"],
        ),
    ],
)
def test_scaling_and_windows(tmp_path, changes, wanted, absent):
    """The keys of llama.cpp's converter; of a window, which its architecture does not read, a line."""
    kind = changes.get("model_type")
    directory = write_directory(tmp_path / "model", **({"model_type": kind} if kind == "phi3" else {}))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        export.write_gguf(directory, tmp_path / "model.gguf")
    assert len(said) == ("sliding_window" in changes)
    assert all("does not read the window of 7 tokens" in str(each.message) for each in said)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    kind = fields["general.architecture"].contents()
    assert {name: fields[f"{kind}.{name}"].contents() for name in wanted} == wanted
    assert not {f"{kind}.{name}" for name in absent} & fields.keys()
    for name in ("short", "long") if "original_max_position_embeddings" in changes else ():
        divisors = changes["rope_scaling"][f"{name}_factor"]
        assert tensors(tmp_path / "model.gguf")[f"rope_factors_{name}.weight"].tolist() == divisors


@pytest.mark.parametrize("adds, wanted", [({}, True), ({"add_bos_token": False}, False)])
def test_whether_a_text_begins_with_a_token(tmp_path, adds, wanted):
    """tokenizer_config.json says it, else the template of tokenizer.json."""
    directory = write_directory(tmp_path / "model")
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | adds))
    export.write_gguf(directory, tmp_path / "model.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() == wanted


def test_frequencies_of_long_contexts(tmp_path):
    """As transformers computes them."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 32
    directory = write_directory(tmp_path / "model", rope_scaling=scaling, rope_theta=500.0)
    export.write_gguf(directory, tmp_path / "model.gguf")
    factors = tensors(tmp_path / "model.gguf")["rope_freqs.weight"]
    theirs = LlamaConfig.from_pretrained(directory)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    HD = load_config(str(directory)).head_dim
    plain = 500.0 ** (-np.arange(0, HD, 2) / HD)
    np.testing.assert_allclose(plain / factors, stretched.numpy(), rtol=1e-6)
    assert len(set(factors)) > 2


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_llama_cpp_goes_on_alike(tmp_path, model):
    """llama.cpp, in the package xllamacpp, opens the file and makes the same greedy ids, in float32: make
    test does not install it."""
    reason = "llama.cpp is not installed: pip install xllamacpp"
    xllamacpp = pytest.importorskip("xllamacpp", reason=reason)
    from llamac.inference.model import Inference, Sampling

    directory = write_directory(tmp_path / "model", model_type=model, architectures=None)
    export.write_gguf(directory, tmp_path / "model.gguf", "f32")
    settings = xllamacpp.CommonParams()
    settings.model.path = str(tmp_path / "model.gguf")
    settings.n_ctx, settings.n_parallel, settings.warmup = 128, 1, False
    settings.cpuparams.n_threads = 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.verbosity = 10  # answers have token ids
    theirs, ours = xllamacpp.Server(settings), Inference(directory)
    asked = {"n_predict": 48, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    for prompt in ("the cat", "on the moon; déjà"):
        ids = ours.encode(prompt)
        made = ours.generate([ids], 48, Sampling(0), stops=[])[0]
        for given in (ids, prompt):  # its own tokenizer makes the ids of the text, bos before them
            answer = theirs.handle_completions(asked | {"prompt": given})
            assert answer["usage"]["prompt_tokens"] == len(ids)
            assert answer["__verbose"]["tokens"] == made


def test_what_is_refused(tmp_path):
    assert "expected a directory" in refused(export.write_gguf, tmp_path / "none", tmp_path / "x.gguf")
    config = json.loads((write_directory(tmp_path / "good") / "config.json").read_text())
    bare = write_weights(tmp_path / "bare", {k: v for k, v in config.items() if k != "transformers_version"})
    assert "expected a tokenizer" in refused(export.write_gguf, bare, tmp_path / "x.gguf")
    content = json.loads((tmp_path / "good/tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "_"}
    content["pre_tokenizer"] |= {"prepend_scheme": "first", "split": True}
    (bare / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(Error, match=r"tokenizer\.json: expected a byte-level .* or sentencepiece's BPE"):
        export.write_gguf(bare, tmp_path / "x.gguf")
    assert not list(tmp_path.glob("x.gguf*"))


@pytest.mark.program
def test_the_model_alone_with_a_card(tmp_path, train, data):
    """transformers opens it; a damaged checkpoint, or an output that exists, is refused."""
    transformers = pytest.importorskip("transformers")
    train(*flags(data, tmp_path / "out", val_every=4))
    step = tmp_path / "out/step_000008"
    export_hf.write_hf(step, tmp_path / "hub/my-model")
    names = {path.name for path in (tmp_path / "hub/my-model").iterdir()}
    assert names == {path.name for path in step.iterdir()} - {"manifest.json", "optimizer.safetensors"} | {
        "README.md"
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub/my-model")
    text = (tmp_path / "hub/my-model/README.md").read_text()
    loss = next(event for event in events(tmp_path / "out", "val") if event["step"] == 8)["loss"]
    for row in (
        f"| parameters | {sum(x.numel() for x in model.parameters()):,} |",
        "| optimizer steps | 8 |",
        f"| validation loss | {loss:.4f} nats per token |",
    ):
        assert row in text
    assert "my-model: exists" in refused(export_hf.write_hf, step, tmp_path / "hub/my-model")
    with open(step / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    with pytest.raises(Error, match=r"expected a complete checkpoint, model\.safetensors: expected the XXH3"):
        export_hf.write_hf(step, tmp_path / "other")
    assert not list(tmp_path.glob("other*"))


def test_a_folder_of_shards(tmp_path):
    directory = write_directory(tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    save_file(weights, directory / "a.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "a.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    export_hf.write_hf(directory, tmp_path / "out")
    assert (tmp_path / "out/a.safetensors").exists() and (tmp_path / "out/tokenizer.json").exists()
    index["weight_map"]["lm_head.weight"] = "../a.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Error, match=r"lm_head\.weight.*: expected the name of a file in"):
        export_hf.write_hf(directory, tmp_path / "again")
