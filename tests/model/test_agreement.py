"""What C and Python both know, held together: flags and defaults, order of the data, schedules, random
numbers, models and their FLOPs.
"""

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hf_dirs import LLAMA3, SMALL
from run import ROOT, refused
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import llamac.base.random
from llamac import _native
from llamac.base.errors import InputError
from llamac.data import Loader, find_documents, permute, write_bin
from llamac.data.recipes import RECIPES
from llamac.data.tokens import IGNORED, Masking
from llamac.model.config import load_config, presets, rope_frequencies
from llamac.training.options import Options
from llamac.training.schedule import learning_rate

PRESETS = sorted((ROOT / "configs/models").glob("*.json"))
TEST_MODELS = sorted((ROOT / "tests/models").glob("*.json"))
LLAMA = ROOT / "configs/models/llama3.1-70b-proxy.json"
WRITTEN_TWICE = ["architectures", "config", "files", "random", "schedule", "tokens", "tolerance"]
MISTRAL = {"model_type": "mistral"}
QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 3, "use_sliding_window": True}
QWEN3 = QWEN2 | {"model_type": "qwen3"}
GPT2 = dict.fromkeys(SMALL.keys() - {"vocab_size"}, "absent")  # fields of Llama
GPT2 |= {"model_type": "gpt2", "n_embd": 12, "n_layer": 2, "n_head": 3}
BERT = {"model_type": "bert"}
PHI3 = {"model_type": "phi3"}
OLMO2 = {"model_type": "olmo2"}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.2], "long_factor": [2, 5.5]}
TWICE = re.compile(r'^(?://|""") ?Written twice on purpose: (\S+) .*?; (?:tests/\w+/)?(\w+\.py)::(\w+)\.')


def test_what_is_written_twice_names_the_other_and_the_test():
    """In the first line of the Python file and of the header or source in C."""
    patterns = ("llamac/**/*.py", "csrc/**/*.h", "csrc/**/*.cpp", "dev/hip/*.h")
    files = [file for pattern in patterns for file in ROOT.glob(pattern)]
    found = {file: TWICE.match(file.read_text().split("\n")[0]) for file in files}
    found = {file: match for file, match in found.items() if match}
    assert {file.stem for file in found if file.suffix == ".py"} == set(WRITTEN_TWICE)
    for file, match in found.items():
        assert (ROOT / match[1]).is_file(), file
        assert f"def {match[3]}(" in next((ROOT / "tests").rglob(match[2])).read_text(), file


def test_flags(train):
    """The table makes both: names, defaults, help."""
    table = tomllib.loads((ROOT / "configs/tables/flags.toml").read_text())["flag"]
    keys = {row["name"]: row["default"] for row in table if row.get("key", True)}
    ours = json.loads(_native.default_options())
    theirs = {f.name.replace("_", "-"): getattr(Options(), f.name) for f in dataclasses.fields(Options)}
    only = {name: {row["name"] for row in table if row.get("only") == name} for name in ("c", "torch")}
    assert ours == keys
    assert theirs == {row["name"]: row["default"] for row in table if row["name"] not in only["c"]}
    for found in (ours, theirs):
        assert all(type(value) is type(keys.get(name, value)) for name, value in found.items())
    given = {"lr": 1 / 3, "grad-clip": 0, "kernel": ["rope_forward=reference"], "out": 'o "u" t\\é'}
    words = [f"--{key}={value[0] if key == 'kernel' else value}" for key, value in given.items()]
    for flags, changed in (([], {}), (words, given)):
        printed = tomllib.loads(train(*flags, "--print-config").stdout)
        assert printed == ours | {"init": "random"} | changed  # what auto means for a preset
    listed = " ".join(train("--help").stdout.split())
    for row in table:
        found = f"--{row['name']} " in listed and row["help"] in listed
        assert found == (row["name"] not in only["torch"]), row["name"]


LIMITS = dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads"), 2**24)
LIMITS |= {"vocab_size": 2**24, "num_hidden_layers": 2**16}


def refusals(folder: Path, text: str) -> list[str]:
    """Why Python and C refuse a config.json; empty where they take it."""
    (folder / "config.json").write_text(text)
    found = []
    for read in (load_config, lambda file: _native.model(file, 512)):
        try:
            read(str(folder / "config.json"))
            found.append("")
        except InputError as error:
            found.append(str(error).removeprefix(f"{folder}/config.json: "))
    return found


@pytest.mark.parametrize("key, most", [*LIMITS.items(), ("max_position_embeddings", 2**31 - 1)])
def test_limits_of_a_model(tmp_path, key, most):
    """The largest size is taken by both or by none, one more by none, for the same reason."""
    values = json.loads(LLAMA.read_text())
    largest, beyond = (refusals(tmp_path, json.dumps(values | {key: size})) for size in (most, most + 1))
    assert largest[0] == largest[1] and beyond[0] == beyond[1] != largest[0]
    assert f"{key}: expected an integer from 1 to {most}, found {most + 1}" in beyond[0]


def test_llamas_values_written_out(tmp_path):
    values = {"normalization_function": "rmsnorm", "position_embedding_type": "rope", "hidden_act": "silu"}
    values |= {"attention_bias": False, "use_qk_norm": False, "sliding_window": None}
    assert refusals(tmp_path, json.dumps(SMALL | values)) == ["", ""]
    text = json.dumps(SMALL)
    for cut in range(len(text)):
        assert all(refusals(tmp_path, text[:cut])), cut


@pytest.mark.parametrize(
    "change, expected",
    [
        *[
            ({key: "absent"}, f"{key}: expected an integer from 1 to {m}, found nothing")
            for key, m in LIMITS.items()
        ],
        *[({key: 0}, f"{key}: expected an integer from 1 to {m}, found 0") for key, m in LIMITS.items()],
        *[
            (
                {"hidden_size": json.loads(x)},
                f"hidden_size: expected an integer from 1 to 16777216, found {x}",
            )
            for x in ("-12", "12.0", '"12"', "true")
        ],
        ({"vocab_size": 1 << 24, "hidden_size": 1 << 24, "head_dim": 4}, "expected fewer than 2^48"),
        ({"head_dim": 1 << 24}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a positive number, found 0"),
        ({"rope_theta": "x"}, 'rope_theta: expected a positive number, found "x"'),
        ({"tie_word_embeddings": "no"}, 'tie_word_embeddings: expected true or false, found "no"'),
        ({"eos_token_id": [1, -2]}, "eos_token_id: expected a token id, found [1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: expected none, as quantized weights"),
        (GPT2 | {"quantization_config": {"bits": 4}}, "quantization_config: expected none, as quantized"),
        (
            {"model_type": "mixtral"},
            'model_type: expected "llama" or "mistral" or "qwen2" or "qwen3" or "phi3" or "olmo2" or "gpt2"',
        ),
        ({"model_type": "gpt2"}, "hidden_size: expected none in a model of type gpt2, found 12"),
        (GPT2 | {"num_key_value_heads": 1}, "num_key_value_heads: expected none in a model of type gpt2"),
        (GPT2 | {"rope_theta": 1e4}, "rope_theta: expected none in a model of type gpt2, found 10000.0"),
        (GPT2 | {"n_embd": 0}, "n_embd: expected an integer from 1 to 16777216, found 0"),
        (GPT2 | {"n_embd": 13}, "n_embd: expected a multiple of n_head"),
        (GPT2 | {"n_positions": 2**31}, "n_positions: expected an integer from 1 to 2147483647"),
        (GPT2 | {"n_positions": 2**31 - 1, "n_embd": 2**18, "n_head": 2}, "expected fewer than 2^48"),
        (GPT2 | {"activation_function": "relu"}, 'activation_function: expected "gelu_new" or "gelu" or '),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights: expected true, found false"),
        (
            GPT2 | {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx: expected false, found true",
        ),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention: expected false, found true"),
        (GPT2 | {"sliding_window": 7}, "sliding_window: expected null, found 7"),
        (BERT | {"position_embedding_type": "relative_key"}, 'position_embedding_type: expected "absolute"'),
        (BERT | {"is_decoder": True}, "is_decoder: expected false, found true"),
        (BERT | {"add_cross_attention": True}, "add_cross_attention: expected false, found true"),
        (BERT | {"tie_word_embeddings": False}, "tie_word_embeddings: expected true, found false"),
        (BERT | {"hidden_act": "relu"}, 'hidden_act: expected "gelu" or "gelu_new" or '),
        (BERT | {"type_vocab_size": 0}, "type_vocab_size: expected an integer from 1 to 16777216, found 0"),
        (BERT | {"layer_norm_eps": 0}, "layer_norm_eps: expected a positive number, found 0"),
        (BERT | {"rms_norm_eps": 1}, "rms_norm_eps: expected none in a model of type bert, found 1"),
        (BERT | {"num_key_value_heads": 1}, "num_key_value_heads: expected none in a model of type bert"),
        (BERT | {"sliding_window": 7}, "sliding_window: expected null, found 7"),
        (
            QWEN2 | {"max_window_layers": -1},
            "max_window_layers: expected an integer from 0 to 65536, found -1",
        ),
        (QWEN2 | {"use_sliding_window": 1}, "use_sliding_window: expected true or false, found 1"),
        (QWEN3 | {"attention_bias": True}, "attention_bias: expected false, found true"),
        (
            PHI3 | {"layer_types": ["full_attention"] * 2},
            "layer_types: expected none in a model of type phi3",
        ),
        (PHI3 | {"rope_scaling": LLAMA3}, 'rope_scaling: rope_type: expected "default" or "longrope", found'),
        (
            {"rope_scaling": LONGROPE},
            'rope_scaling: rope_type: expected "default" or "linear" or "llama3" or',
        ),
        (
            PHI3 | {"rope_scaling": LONGROPE | {"long_factor": [1]}},
            "rope_scaling: long_factor: expected a list, for the pairs of a head's channels, of 2",
        ),
        (
            PHI3 | {"rope_scaling": LONGROPE | {"short_factor": [1, 0]}},
            "rope_scaling: short_factor: expected a list, for the pairs of a head's channels, of 2 numbers",
        ),
        (
            PHI3 | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1},
            "original_max_position_embeddings: expected an integer from 2 to 2147483647, found 1",
        ),
        (OLMO2 | {"attention_bias": True}, "attention_bias: expected false, found true"),
        (OLMO2 | {"sliding_window": 7}, "sliding_window: expected null, found 7"),
        (
            PHI3 | {"partial_rotary_factor": 0.75},
            "partial_rotary_factor: expected the part, up to 1, of a head's",
        ),
        (
            PHI3 | {"partial_rotary_factor": 1.5},
            "partial_rotary_factor: expected the part, up to 1, of a head's",
        ),
        (
            {"partial_rotary_factor": True},
            "partial_rotary_factor: expected 1: all channels of a head are turned",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters: partial_rotary_factor: expected 1: all channels of a head are turned",
        ),
        ({"hidden_act": "gelu"}, 'hidden_act: expected "silu", found "gelu"'),
        ({"normalization_function": "x"}, 'normalization_function: expected "rmsnorm", found "x"'),
        ({"position_embedding_type": "nope"}, 'position_embedding_type: expected "rope", found "nope"'),
        ({"attention_bias": True}, "attention_bias: expected false, found true"),
        ({"mlp_bias": True}, "mlp_bias: expected false, found true"),
        ({"mlp_bias": 0}, "mlp_bias: expected true or false, found 0"),
        ({"use_qk_norm": True}, "use_qk_norm: expected false, found true"),
        ({"sliding_window": 4096}, "sliding_window: expected null, found 4096"),
        ({"sliding_window": 0}, "sliding_window: expected an integer from 1 to 2147483647, found 0"),
        (MISTRAL | {"sliding_window": -1}, "sliding_window: expected an integer from 1 to 2147483647"),
        ({"layer_types": []}, "layer_types: expected a list of num_hidden_layers = 2 types, found []"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            'layer_types: expected "full_attention" or "sliding_attention", found "linear_attention"',
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            'layer_types: expected "full_attention" without sliding_window, found "sliding_attention"',
        ),
        ({"rope_scaling": 8}, "rope_scaling: expected an object or null, found 8"),
        (
            {"rope_scaling": LLAMA3 | {"rope_type": "dynamic"}},
            'rope_scaling: rope_type: expected "default" or "linear" or "llama3" or "yarn", found "dynamic"',
        ),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "rope_scaling: factor: expected a positive number"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "rope_scaling: low_freq_factor: expected less"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: factor: expected a positive number"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}},
            "rope_scaling: beta_fast: expected a number from 1e-9 to 1e9, found -1",
        ),
        (
            {"rope_scaling": {"full_attention": {"rope_type": "default"}}},
            "rope_scaling: full_attention: expected none, as all layers have the same rotary positions",
        ),
        (
            {"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_theta: expected more than 1, found 1.0",
        ),
    ],
)
def test_bad_config(tmp_path, change, expected):
    """Both refuse it in the same line."""
    values = {key: value for key, value in (SMALL | change).items() if value != "absent"}
    python, c = refusals(tmp_path, json.dumps(values))
    assert python.startswith(expected) and c.startswith(expected) and "\n" not in python + c


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_key_value_heads": 2}, "num_attention_heads num_key_value_heads 3 2"),
        ({"hidden_size": 13}, "hidden_size num_attention_heads 13 3"),
        ({"head_dim": 5}, "head_dim even 5"),
        ({"hidden_size": 9}, "head_dim even 3"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path, change, words):
    for said in refusals(tmp_path, json.dumps(SMALL | change)):
        assert all(word in said for word in words.split()), said


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_run_configurations(train, path):
    """The program and Trainer's parser read the same run from each; comments give every file its reasons."""
    o, text = tomllib.loads(train("--config", path, "--print-config").stdout), path.read_text()
    assert o == json.loads(_native.options(str(path), [])) and text.startswith("# ")
    assert {key: o[key] for key in tomllib.loads(text)} == tomllib.loads(text)
    assert o["seq-len"] <= load_config(o["model"]).max_position_embeddings
    assert o["total-batch-size"] % (o["batch-size"] * o["seq-len"]) == 0 and o["warmup-steps"] < o["steps"]
    assert o["model"] in presets()


def test_every_preset_has_a_run_configuration():
    texts = [path.read_text() for path in (ROOT / "configs").glob("*.toml")]
    assert set(presets()) <= {tomllib.loads(text).get("model", "tiny") for text in texts}


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000, 4097, 10**9 + 7, 2**40 + 3])
@pytest.mark.parametrize("seed, epoch", [(0, 0), (42, 0), (42, 1), (2**53 - 1, 10**6)])
def test_order_of_the_data(size, seed, epoch):
    index = np.unique(np.linspace(0, size - 1, 500).astype(np.uint64))
    ours = [_native.permute(int(i), size, seed, epoch) for i in index]
    assert permute(index, size, seed, epoch).tolist() == ours


@pytest.mark.parametrize("vocab", [500, 100000])
@pytest.mark.parametrize("rank, world", [(0, 1), (1, 3)])
def test_micro_batches(tmp_path, vocab, rank, world):
    rng = np.random.default_rng(0)
    for shard, n in enumerate((1000, 17, 16, 555)):
        write_bin(tmp_path / f"t_{shard}.bin", rng.integers(vocab, size=n).astype(np.uint32), vocab)
    pattern, T, B, A, seed = str(tmp_path / "t_*.bin"), 16, 3, 2, 7
    loader = Loader(pattern, T, vocab, B, A, rank, world, seed)
    for step in range(12):
        for micro in range(A):
            ours = np.full((2, B, T), -1, np.int32)
            _native.micro_batch(pattern, T, vocab, B, A, seed, step, micro, rank, world, *ours)
            assert np.array_equal(ours, loader.micro_batch(step, micro))
            skip = B * world  # the sequences of a micro-batch are left out
            _native.micro_batch(pattern, T, vocab, B, A, seed, step, micro, rank, world, *ours, skip)
            assert np.array_equal(ours, loader.micro_batch(step + (micro + 1) // A, (micro + 1) % A))


@pytest.mark.parametrize("rank, world, words", [(0, 1, False), (1, 3, False), (1, 2, True)])
def test_masked_tokens(tmp_path, rank, world, words):
    """The same in C and Python, and of any number of ranks and batch; 15% of tokens that are not special, of
    which 80% become the mask, 10% another token, and 10% stay. Of whole words all tokens, or none."""
    V, T, seed = 50, 128, 7
    tokens = np.random.default_rng(0).integers(V, size=300 * T + 1).astype(np.uint32)
    write_bin(tmp_path / "t.bin", tokens, V)
    special = np.arange(V) < 5
    continues = np.arange(V) >= 30
    masking = Masking(0.15, 4, special, seed, continues if words else None)
    pattern, B = str(tmp_path / "t.bin"), 4
    plain, loader = (Loader(pattern, T, V, B, 1, rank, world, seed, each) for each in (None, masking))
    found = []
    for step in range(75):
        ours = np.full((2, B, T), -1, np.int32)
        how = {"probability": 0.15, "mask": 4, "special": special.tolist()}
        how |= {"continues": continues.tolist()} if words else {}
        _native.micro_batch(pattern, T, V, B, 1, seed, step, 0, rank, world, *ours, **how)
        assert np.array_equal(ours, loader.micro_batch(step, 0))
        found.append((plain.micro_batch(step, 0)[0], *ours))
    before, after, targets = np.stack(found, 1)
    chosen = targets != IGNORED
    assert np.array_equal(targets[chosen], before[chosen]) and np.array_equal(before[~chosen], after[~chosen])
    assert not special[targets[chosen]].any() and not special[after[chosen & (after != 4)]].any()
    inner = continues[before[..., 1:]] & ~special[before[..., :-1]]  # of the word of the token before
    assert (chosen[..., 1:] == chosen[..., :-1])[inner].all() == words
    share, masked, kept = chosen[~special[before]].mean(), (after == 4)[chosen], (after == before)[chosen]
    assert share == pytest.approx(0.15, abs=0.007)
    assert masked.mean() == pytest.approx(0.8, abs=0.02) and kept.mean() == pytest.approx(0.11, abs=0.02)
    whole = Loader(pattern, T, V, 4 * world, 1, 0, 1, seed, masking)  # another batch, and one rank
    assert np.array_equal(whole.micro_batch(2, 0)[1][rank::world], found[2][2])


def test_documents():
    """Where they begin, by a mark before them, one behind them, both or neither."""
    tokens = np.random.default_rng(0).integers(5, size=(7, 33)).astype(np.int32)
    for marks in ((3, 1), (3, None), (None, 1), (None, None)):
        ours = np.full_like(tokens, -1)
        _native.find_documents(tokens, *(-1 if mark is None else mark for mark in marks), ours)
        assert np.array_equal(ours, find_documents(tokens, marks)), marks


@pytest.mark.parametrize("seed", range(3))
def test_spikes(seed):
    """The same spikes in the same numbers: outliers, a level that changes, values that do not move at all."""
    rng = np.random.default_rng(seed)
    losses = 3 + 0.05 * rng.standard_normal(400)
    norms = np.abs(1 + 0.2 * rng.standard_normal(400)) ** (seed + 1)
    losses[[10, 50, 51, 300]] += (5, 0.5, 1e-9, 40)
    losses[200:], norms[120:220], norms[90] = losses[200:] + 2, 1, 30
    found = []  # by the definition in csrc/program/spikes.h
    for k in range(32, 400):
        for quantity, values in (("loss", losses.tolist()), ("grad_norm", norms.tolist())):
            last = values[max(0, k - 64) : k]
            expected = median(last)
            spread = max(1.4826 * median(abs(x - expected) for x in last), 0.01 * abs(expected))
            if values[k] > expected + 8 * spread:
                found.append((k + 1, quantity, values[k], expected, expected + 8 * spread))
    assert found == _native.spikes(losses.tolist(), norms.tolist())
    assert {(51, "loss"), (91, "grad_norm"), (301, "loss")} <= {spike[:2] for spike in found}


@pytest.mark.parametrize(
    "pattern, script",
    [
        ("data/text/train_*.bin", "python -m llamac data TEXT --tokenizer FILE --out data/text"),
        ("none_*.bin", "python -m llamac data TEXT --tokenizer FILE --out ."),
        ("data/tinyshakespeare/none_*.bin", "python -m llamac data tinyshakespeare"),
        ("data/stdlib/none_*.bin", "python -m llamac data stdlib"),
    ],
)
def test_missing_tokens_name_the_script_that_makes_them(train, pattern, script):
    said = f"{pattern}: no such file; `{script}` makes token files there"
    assert refused(Loader, pattern, 8, 100, 1) == said
    assert train("--train-data", pattern, "--out", "/nowhere", code=2).stderr == f"train_llama3: {said}\n"
    assert script.split()[4] in {"TEXT", *RECIPES}


@pytest.mark.parametrize(
    ("flags", "expected"), [(["--train-data", "own"], ""), (["--train-data", "own", "--val-data", "v"], "v")]
)
def test_own_training_data_is_not_validated_on_the_defaults(train, flags, expected):
    assert tomllib.loads(train(*flags, "--print-config").stdout)["val-data"] == expected


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("warmup, steps", [(0, 1), (0, 7), (3, 7), (7, 7), (10, 7), (50, 500), (95, 100)])
def test_learning_rate(schedule, warmup, steps):
    for step in range(1, steps + 1):
        rule = {"lr": 3e-3, "min_lr_frac": 0.1, "warmup_steps": warmup, "steps": steps, "schedule": schedule}
        theirs = learning_rate(step, **rule)
        assert _native.learning_rate(step, 3e-3, 0.1, warmup, steps, schedule) == theirs


def test_random_numbers():
    for seed, step, stream in ((0, 0, 0), (42, 0, 4), (2**53 - 1, 10**6, 2**32 - 1)):
        bits = llamac.base.random.bits(seed, step, stream, 40)
        assert bits.tolist() == [w for b in range(10) for w in _native.random_bits(seed, step, stream, b)]
        normals = llamac.base.random.normal(seed, step, stream, 1000)
        assert normals.tolist() == [_native.random_normal(seed, step, stream, e) for e in range(1000)]


@pytest.mark.parametrize("path", PRESETS + TEST_MODELS, ids=lambda path: path.stem)
def test_models(path):
    config = load_config(str(path))
    parameters, flops, text = _native.model(str(path), 512)
    assert (parameters, flops) == (config.num_parameters(), config.flops_per_token(512))
    assert json.loads(text) == config.to_dict("float32")


@pytest.mark.parametrize(
    "change, window",
    [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 100}, 100)],
)
def test_mistral(tmp_path, change, window):
    """Read alike, what a file lacks as transformers does, and read back by it."""
    values = json.loads(LLAMA.read_text()) | MISTRAL
    for key in ("num_key_value_heads", "max_position_embeddings", "rope_scaling"):
        del values[key]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values | change))
    config, theirs = load_config(str(path)), AutoConfig.from_pretrained(tmp_path)
    _, flops, text = _native.model(str(path), 512)
    assert json.loads(text) == config.to_dict("float32") and flops == config.flops_per_token(512)
    assert config.sliding_window == theirs.sliding_window == window
    for name in ("num_key_value_heads", "max_position_embeddings", "model_type"):
        assert getattr(config, name) == getattr(theirs, name), name
    path.write_text(text)
    again = AutoConfig.from_pretrained(tmp_path)
    assert load_config(str(path)) == config and again.architectures == ["MistralForCausalLM"]
    assert again.sliding_window == window


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LONG_PART = LONGROPE | {"short_factor": [1.0, 1.5] * 16, "long_factor": [2.0, 5.5] * 16}
LONG_PART["partial_rotary_factor"] = 0.5
LONG = LONGROPE | {"short_factor": [1.0, 1.5] * 32, "long_factor": [2.0, 5.5] * 32}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": LINEAR},
        {"rope_scaling": {key: x for key, x in LLAMA3.items() if "original" not in key}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": YARN},  # the older one counts
        {"rope_scaling": {}, "rope_parameters": LINEAR | {"rope_theta": 3e4}},
        {"rope_scaling": YARN},
        {"rope_scaling": YARN | {"factor": None}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "beta_fast": 20, "beta_slow": 2.0}},
        {"rope_scaling": YARN | {"mscale": 0.7, "truncate": False}},
        {"rope_scaling": YARN | {"attention_factor": 0.9}},
        {"rope_scaling": YARN | {"original_max_position_embeddings": 4, "beta_fast": 0.3, "beta_slow": 0.3}},
        {"rope_scaling": YARN, "original_max_position_embeddings": 128},
        PHI3 | {"rope_scaling": LONG, "original_max_position_embeddings": 64},
        PHI3 | {"rope_scaling": LONG | {"factor": 3.0}, "original_max_position_embeddings": 512},
        PHI3 | {"rope_scaling": LONG_PART, "original_max_position_embeddings": 64},
        PHI3 | {"rope_scaling": LONG | {"attention_factor": 1.5}, "max_position_embeddings": 9000},
    ],
)
def test_rope_scaling(tmp_path, rope):
    """Both read the frequencies and the attention's factor that transformers computes, and what they write
    gives them again.
    """
    values = json.loads(LLAMA.read_text()) | {"max_position_embeddings": 512, "rope_scaling": None}
    path, found = tmp_path / "config.json", []
    for text in (values | rope, None):
        if text:
            path.write_text(json.dumps(text))
        config, theirs = load_config(str(path)), AutoConfig.from_pretrained(tmp_path)
        written = json.loads(_native.model(str(path), 512)[2])
        assert written == config.to_dict("float32")
        for T in (1, 10**6):  # of which LongRoPE's depend
            kind = theirs.rope_parameters["rope_type"]
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=T)
            ours = rope_frequencies(config.rotary_size, config.rope_theta, config.rope_scaling, T)
            np.testing.assert_allclose(ours, frequencies.double().numpy(), rtol=4 * 2.0**-23)
        assert config.rope_scaling.attention_factor == factor
        found.append(config)
        path.write_text(json.dumps(written))
    assert found[0] == found[1]


def test_flops_of_a_window(tmp_path):
    """Twice the mean number of tokens that a token sees takes the place of T."""
    values = json.loads(LLAMA.read_text()) | MISTRAL
    path, counts = tmp_path / "config.json", []
    for window in (None, 100):
        path.write_text(json.dumps(values | {"sliding_window": window}))
        counts.append(_native.model(str(path), 512)[1])
    config = load_config(str(path))
    assert counts[1] == config.flops_per_token(512)
    left, layers = 512 - 100 * (2 * 512 - 100) // 512, config.num_hidden_layers
    assert counts[0] - counts[1] == 6 * layers * config.q_size * left
    types = ["sliding_attention"] + ["full_attention"] * (layers - 1)
    path.write_text(json.dumps(values | {"sliding_window": 100, "layer_types": types}))
    _, flops, text = _native.model(str(path), 512)
    config = load_config(str(path))
    assert counts[0] - flops == 6 * config.q_size * left and flops == config.flops_per_token(512)
    assert json.loads(text) == config.to_dict("float32") and config.layer_types == types


@pytest.mark.parametrize(
    "change",
    [{}, {"bos_token_id": None, "eos_token_id": None}, {"eos_token_id": [3, 5]}, {"eos_token_id": [3]}],
)
def test_tokens_of_begin_and_end(tmp_path, change):
    values = json.loads(LLAMA.read_text())
    values = {key: value for key, value in values.items() if not key.endswith("_token_id")} | change
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    text = json.loads(_native.model(str(path), 512)[2])
    config = load_config(str(path))
    assert (text["bos_token_id"], config.bos_token_id) == (change.get("bos_token_id", 1),) * 2
    end = change.get("eos_token_id", 2)
    assert config.eos_token_id == end and text["eos_token_id"] == (3 if end == [3] else end)
