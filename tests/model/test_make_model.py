"""llamac model: sizes of one dial, fields of another model, ids of the tokenizer; the program trains it."""

import json
import re

import pytest
from run import ROOT, run_llamac

from llamac import Error
from llamac.data import tokenizer
from llamac.model.config import load_config
from llamac.model.make import make

QWEN2 = str(ROOT / "tests/models/qwen2.json")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of token files with a tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("data")
    text = "".join(f"line {i} of a text with words {i * 7919}\n" for i in range(2000))
    for name, part in (("a", text[:30000]), ("b", text[30000:])):
        (folder / f"{name}.txt").write_text(part)
    texts = [folder / "a.txt", folder / "b.txt"]
    run_llamac("data", *texts, "--vocab-size", 300, "--val-fraction", 0.3, "--out", folder / "tokens")
    return folder / "tokens"


@pytest.mark.parametrize(
    "depth, sizes", [(2, (128, 512, 2, 2, 64)), (12, (768, 2048, 12, 12, 64)), (32, (2048, 5632, 16, 4, 128))]
)
def test_one_dial(data, tmp_path, depth, sizes):
    transformers = pytest.importorskip("transformers")
    import torch

    said = run_llamac("model", "--depth", depth, "--tokenizer", data, "--out", tmp_path / "m").stdout
    made = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    found = made.hidden_size, made.intermediate_size, made.num_attention_heads, made.num_key_value_heads
    assert (*found, made.head_dim) == sizes and made.num_hidden_layers == depth
    assert (made.vocab_size, made.bos_token_id, made.eos_token_id, made.pad_token_id) == (320, 299, 299, 299)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert f"{parameters:,} parameters, {2 * 320 * sizes[0]:,} of them of the vocabulary" in said


def test_like_another_model(data):
    own, other = tokenizer.load(data), load_config("llama3.2-1b")
    same = make(own, "llama3.2-1b")
    assert same.num_parameters() == other.num_parameters() - (other.vocab_size - 320) * other.hidden_size
    assert same.rope_scaling == other.rope_scaling and same.eos_token_id == 299
    small = make(own, "llama3.2-1b", hidden_size=512, num_hidden_layers=3)
    assert (small.intermediate_size, small.num_attention_heads, small.num_key_value_heads) == (2048, 8, 2)
    gpt2 = make(own, "gpt2-125m", hidden_size=512, num_hidden_layers=3)
    assert gpt2.to_dict("float32") | {"n_embd": 512, "n_head": 8, "n_layer": 3} == gpt2.to_dict("float32")
    assert (gpt2.model_type, gpt2.intermediate_size, gpt2.eos_token_id) == ("gpt2", 2048, 299)
    for given in ({}, {"num_hidden_layers": 2}):  # one of which has a window
        assert make(own, QWEN2, **given).windows() == load_config(QWEN2).windows() == [None, 7]


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"num_hidden_layers": 0}, "the new model: hidden_size: expected an integer"),
        ({"num_hidden_layers": 3, "hidden_size": 100}, "--channels: expected a multiple of 64, found 100"),
        ({"num_hidden_layers": 3, "num_key_value_heads": 2}, "expected a divisor of num_attention_heads 3"),
        ({"like": "gpt2-125m", "rope_theta": 5e5}, "a model of type gpt2 has no rope_theta"),
        ({"like": QWEN2, "num_hidden_layers": 3}, "--depth: expected 2, as layer_types of --like"),
        ({"like": "unknown"}, "model unknown: expected a directory with config.json or a preset"),
    ],
)
def test_sizes_that_do_not_fit(data, given, expected):
    with pytest.raises(Error, match=re.escape(expected)):
        make(tokenizer.load(data), **given)


def test_what_the_command_refuses(data, tmp_path):
    words = ["model", "--tokenizer", data, "--out", tmp_path / "m"]
    assert "expected --depth or --like" in run_llamac(*words, code=2).stderr
    run_llamac(*words, "--depth", 2)
    before = (tmp_path / "m/config.json").read_bytes()
    assert "config.json: exists; expected a new folder" in run_llamac(*words, "--depth", 3, code=2).stderr
    assert (tmp_path / "m/config.json").read_bytes() == before


@pytest.mark.program
def test_the_program_trains_it_and_names_ids_that_differ(data, tmp_path, train):
    """The first and last token of documents are those of config.json, or a line says so."""
    run_llamac("model", "--depth", 2, "--tokenizer", data, "--out", tmp_path / "m")
    config = tmp_path / "m/config.json"
    flags = ["--train-data", data / "train_*.bin", "--val-data", "none", "--seq-len", 16, "--steps", 1]
    flags += ["--batch-size", 1, "--sample-every", 0, "--checkpoint-every", -1]
    words = ["--model", tmp_path / "m", "--out", tmp_path / "out", *flags]
    assert "token_id" not in train(*map(str, words)).stdout
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"bos_token_id": None, "eos_token_id": [7, 8]}))
    said = train(*map(str, words)).stdout
    documents = f"expected 299, which the documents of the data have ({data}/tokenizer.tiktoken), found"
    assert f"config.json: bos_token_id: {documents} none" in said
    assert f"config.json: eos_token_id: {documents} [7,8]" in said
    config.write_text(json.dumps(values | {"eos_token_id": [7, 299]}))
    assert "token_id" not in train(*map(str, words)).stdout
