"""Meshes of 2, 4 and 8 ranks: the losses and gradients of one rank, and the same bits in another run."""

from functools import partial
from itertools import combinations, product

import pytest
from meshes import compare_numbers_of_one_rank, write_model, write_packed
from run import T, assert_same_state, flags, numbers

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("ranks_over_gloo")]
SEQUENCES = 16  # of an optimizer step
# Heads and channels that 4 ranks divide.
CHANGES = {
    "tied-gqa": {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 132},
    "untied-mha": {"intermediate_size": 152},
    "qwen2": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "gpt2": {},
}
TABLE = """
tp pp cp dp zero  model     micro_batches  chunks packed  recompute
1  1  1  2  3    qwen3       1             1      1      norm,swiglu,attention
1  1  2  1  0    gpt2        4             1      1      block
1  2  1  1  0    gpt2        4             2      1      none
2  1  1  1  2    tied-gqa    2             1      0      norm,swiglu,attention
1  1  1  4  3    untied-mha  4             1      0      block
1  1  1  4  1    qwen3       1             1      1      none
1  1  1  4  1    qwen2       1             1      0      none
1  1  2  2  2    qwen3       1             1      1      block
1  1  4  1  2    untied-mha  2             1      1      block
1  1  4  1  2    gpt2        2             1      0      norm,swiglu,attention
1  2  1  2  0    qwen3       2             2      1      block
1  2  2  1  2    tied-gqa    2             2      1      norm,swiglu,attention
1  4  1  1  2    untied-mha  2             1      1      block
2  1  1  2  1    untied-mha  2             1      0      none
2  1  2  1  2    untied-mha  1             1      1      block
2  2  1  1  3    qwen2       2             1      1      none
4  1  1  1  2    tied-gqa    1             1      0      none
1  1  2  4  0    tied-gqa    1             1      0      block
1  1  4  2  0    tied-gqa    4             1      0      none
1  2  1  4  3    tied-gqa    2             2      1      norm,swiglu,attention
1  2  2  2  1    tied-gqa    2             2      0      block
1  2  2  2  3    untied-mha  2             2      1      block
1  2  4  1  1    qwen2       4             2      1      block
1  4  1  2  0    untied-mha  4             2      0      norm,swiglu,attention
1  4  1  2  3    qwen2       1             1      1      none
1  4  1  2  1    gpt2        2             1      0      norm,swiglu,attention
1  4  2  1  2    qwen3       4             2      0      none
2  1  1  4  2    gpt2        1             1      1      norm,swiglu,attention
2  1  2  2  0    qwen2       1             1      0      norm,swiglu,attention
2  1  2  2  1    qwen2       1             1      1      norm,swiglu,attention
2  1  2  2  3    untied-mha  4             1      1      block
2  1  4  1  3    qwen3       1             1      1      norm,swiglu,attention
2  2  1  2  1    untied-mha  1             1      0      none
2  2  1  2  3    untied-mha  4             1      0      block
2  2  2  1  3    gpt2        2             2      0      none
2  2  2  1  1    qwen3       2             2      0      block
2  4  1  1  1    tied-gqa    4             1      1      block
4  1  1  2  2    qwen2       2             1      0      block
4  1  1  2  3    gpt2        1             1      1      norm,swiglu,attention
4  1  1  2  0    untied-mha  2             1      1      block
4  1  2  1  1    untied-mha  2             1      1      none
4  2  1  1  3    qwen3       4             2      0      norm,swiglu,attention
"""
FACTORS, *ROWS = [line.split() for line in TABLE.strip().splitlines()]
CASES = [{name: int(x) if x.isdecimal() else x for name, x in zip(FACTORS, row)} for row in ROWS]
AXES = ("tp", "pp", "cp", "dp")
# "tp pp cp dp zero": two axes of each pair of them, and three. `make test` and `make test-more` run them.
QUICK = ("1 2 1 2 0", "2 1 2 1 2", "2 2 1 1 3")
MORE = ("1 1 2 2 2", "1 2 2 1 2", "2 1 1 2 1")


def ranks_of(case: dict) -> int:
    return case["tp"] * case["pp"] * case["cp"] * case["dp"]


def is_possible(case: dict) -> bool:
    chunks = case["chunks"] == 1 or (case["pp"] > 1 and case["micro_batches"] % case["pp"] == 0)
    return ranks_of(case) in (2, 4, 8) and chunks


def covered(case: dict) -> set[tuple]:
    """Pairs of values of two factors. A level of ZeRO counts where ranks have the same weights."""
    values = [each for each in case.items() if each[0] != "zero" or case["cp"] * case["dp"] > 1]
    return set(combinations(values, 2))


def test_cases_cover_all_pairs():
    """Each mesh is there, and each possible pair of values."""
    values = {name: dict.fromkeys(case[name] for case in CASES) for name in FACTORS}
    assert [len(values[name]) for name in FACTORS] == [3, 3, 3, 3, 4, 5, 3, 2, 2, 3]
    everything = (dict(zip(FACTORS, each)) for each in product(*values.values()))
    possible = [case for case in everything if is_possible(case)]
    assert all(is_possible(case) for case in CASES) and len(CASES) >= 40
    assert set().union(*map(covered, possible)) == set().union(*map(covered, CASES))
    meshes = [{tuple(case[axis] for axis in AXES) for case in cases} for cases in (possible, CASES)]
    assert meshes[0] == meshes[1] and len(meshes[0]) == 30


MARKS = dict.fromkeys(QUICK, ()) | dict.fromkeys(MORE, pytest.mark.more)
PARAMETERS = [
    pytest.param(case, id=(name := " ".join(row[:5])), marks=MARKS.get(name, pytest.mark.slow))
    for case, row in zip(CASES, ROWS)
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_the_numbers_of_one_rank(train, data, tmp_path, case):
    """In f32, with clipped gradients; the first gradients tensor by tensor; the same bits in another run."""
    layers = case["pp"] * case["chunks"] + 1  # of which one part has two
    changes = {"n_layer" if case["model"] == "gpt2" else "num_hidden_layers": layers} | CHANGES[case["model"]]
    # With larger weights or steps, losses or gradients of one rank change by more than 2e-6, too, if its
    # first weights change by one ulp.
    changes["initializer_range"] = 0.03
    more = {"total_batch_size": SEQUENCES * T, "lr": 3e-4, "grad_clip": 0.5, "recompute": case["recompute"]}
    more |= {"val_every": 0, "val_data": "none", "checkpoint_every": 0}
    more |= write_model(tmp_path, {case["model"]: changes}, case["model"])
    more |= write_packed(tmp_path) if case["packed"] else {}
    mesh = {"devices": ranks_of(case), "batch_size": SEQUENCES // case["dp"] // case["micro_batches"]}
    mesh |= {"pp_chunks": case["chunks"]} | {name: case[name] for name in ("tp", "pp", "cp", "zero")}
    make_flags = partial(flags, data, **more)
    compare_numbers_of_one_rank(train, tmp_path, make_flags, mesh, {"batch_size": SEQUENCES})
    train(*make_flags(tmp_path / "again", **mesh | {"steps": 20}))
    assert numbers(tmp_path / "again") == numbers(tmp_path / "mesh")
    assert_same_state(tmp_path / "again/step_000020", tmp_path / "mesh/step_000020")
