"""llamac.patch under the adapters of PEFT: its operations run; losses and the adapters' gradients are the
unpatched model's within the tolerance, whichever of the two comes first.
"""

import warnings

import pytest
import torch
from patched import DTYPES, INPUTS, LAYERS, NORMS, OTHERS, build, call, counted, in_double, mismatches
from torch import nn

import llamac

pytestmark = pytest.mark.usefixtures("one_thread")
TARGETS = {"attention": ["q_proj", "v_proj"], "all": "all-linear"}
SOME = ["plain", "ignored", "padded", "packed"]


def adapted(model: nn.Module, targets: str) -> nn.Module:
    """The model with LoRA's adapters, which do something from the beginning, the same every time."""
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    dtype = model.dtype
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, at what peft calls
        wanted = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[targets], task_type="CAUSAL_LM")
        found = peft.get_peft_model(model, wanted)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=generator) * 0.2
            kind = torch.float64 if dtype == torch.float64 else parameter.dtype
            parameter.data = values.bfloat16().to(kind)
    return found.train()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("first", ["patch", "adapters"])
def test_agreement(first, targets, dtype):
    if first == "patch":
        ours = adapted(llamac.patch(build(dtype=DTYPES[dtype])), targets)
    else:
        ours = adapted(build(dtype=DTYPES[dtype]), targets)
        llamac.patch(ours.get_base_model())
    models = ours, adapted(build(dtype=DTYPES[dtype]), targets)
    found = [[call(model, INPUTS[inputs]) for inputs in SOME] for model in models]
    double = adapted(build(dtype=torch.float64), targets)
    assert mismatches(*found, [in_double(double, INPUTS[inputs]) for inputs in SOME], dtype) == []
    trained = set(found[0][0][1])
    assert trained and all("lora_" in name for name in trained)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("inputs", SOME)
def test_our_operations_run(targets, inputs):
    """All of them. Below the first adapter nothing has a gradient: the backward pass leaves out the first
    norm and, where keys have no adapter, their first RoPE."""
    ropes = 2 * LAYERS if targets == "all" else 2 * LAYERS - 1
    expected = NORMS | OTHERS | {"rope_forward": 2 * LAYERS, "rope_backward": ropes}
    expected |= {"attention_forward": LAYERS, "attention_backward": LAYERS, "rmsnorm_backward": 2 * LAYERS}
    assert counted(adapted(llamac.patch(build()), targets), INPUTS[inputs]) == expected


def test_adapters_that_are_merged_leave_a_patched_model():
    ours, theirs = adapted(llamac.patch(build()), "all"), adapted(build(), "all")
    merged, wanted = ours.merge_and_unload(), theirs.merge_and_unload()
    assert llamac.transformers_patch.report(merged) == llamac.transformers_patch.report(llamac.patch(build()))
    loss, other = (model(**INPUTS["plain"]).loss.item() for model in (merged, wanted))
    assert loss == pytest.approx(other, rel=1e-5)


def test_a_wrapped_model_names_its_part():
    with pytest.raises(TypeError, match=r"its part base_model\.model is one"):
        llamac.patch(adapted(build(), "all"))
