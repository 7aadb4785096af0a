"""llamac.kernels() and llamac.run(): what the registry shows, and arrays of any library."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from run import Foreign, refused, refuses

import llamac
from llamac.base.registry import least_work

ROWS, C, EPS = 5, 24, 1e-5


def operands() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Outputs, NaN at first, and inputs of rmsnorm_forward."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape, dtype=np.float32) for shape in ((ROWS, C), (C,)))
    return [np.full((ROWS, C), np.nan, np.float32), np.full(ROWS, np.nan, np.float32)], [x, weight]


def rmsnorm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def test_the_listing_says_what_runs():
    listing = {op["name"]: op for op in llamac.kernels()}
    assert {"rmsnorm_forward", "attention_backward", "adamw"} <= listing.keys()
    for op in listing.values():
        variants = {v["name"]: v for v in op["variants"]}
        home = [v["name"] for v in op["variants"] if v["where"] == variants[op["default"]]["where"]]
        assert op["default"] == home[0] and "reference" in variants
        assert all(v["types"] and v["idea"] and v["where"] in ("host", "device") for v in variants.values())
    variants = {v["name"]: v for v in listing["attention_forward"]["variants"]}
    assert "naive" in variants and {n for n, v in variants.items() if v["chip"]} <= {"mfma", "wgmma"}
    assert variants["flash"]["limits"] and variants["flash"]["types"][0][0] == "bf16"


def test_types_of_letters_are_those_that_variants_take():
    """Each declared type occurs in a variant, and no other."""
    for op in llamac.kernels():
        taken: dict[str, set[str]] = {}
        for variant in op["variants"]:
            for types in variant["types"]:
                for operand, dtype in zip(op["operands"], types, strict=True):
                    taken.setdefault(operand["type"], set()).add(dtype)
        declared = {letter: set(choices) for letter, choices in op["types"].items()}
        assert declared == {letter: t for letter, t in taken.items() if letter in declared}, op["name"]
        assert all(taken[t] == {t} for t in taken if t not in declared), op["name"]


def variants(operation: str) -> dict[str, dict]:
    """By name; "" is the one that runs by default."""
    op = next(op for op in llamac.kernels() if op["name"] == operation)
    by_name = {v["name"]: v for v in op["variants"]}
    return by_name | {"": by_name[op["default"]]}


@pytest.fixture
def gpu():
    """torch, where our kernels and it compute on a GPU."""
    torch = pytest.importorskip("torch")
    if variants("rmsnorm_forward")[""]["where"] != "device" or not torch.cuda.is_available():
        pytest.skip("this build computes on the CPU")
    return torch


def test_the_default_is_what_runs_without_a_name():
    default = variants("rmsnorm_forward")[""]
    if default["where"] == "device":
        pytest.skip("arrays in host memory have other variants: test_arrays_on_a_gpu")
    found = []
    for variant in ("", "optimized", default["name"]):
        outputs, inputs = operands()
        llamac.run("rmsnorm_forward", outputs, inputs, [EPS], variant)
        np.testing.assert_allclose(outputs[0], rmsnorm(*inputs), rtol=1e-5, atol=1e-6)
        found.append(outputs)
    assert all(np.array_equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


@pytest.mark.parametrize("own_stream", [False, True])
def test_arrays_on_a_gpu(gpu, own_stream):
    """In place, also behind work that their library has not done yet."""
    stream = gpu.cuda.Stream()
    for name, variant in variants("rmsnorm_forward").items():
        if variant["where"] != "device":
            continue
        outputs, inputs = operands()
        on_gpu = [gpu.from_numpy(array).cuda() for array in outputs + inputs]
        with gpu.cuda.stream(stream):
            stream.wait_stream(gpu.cuda.default_stream())
            gpu.cuda._sleep(10_000_000)
            on_gpu[2] *= 2
            which = stream.cuda_stream if own_stream else None
            llamac.run("rmsnorm_forward", on_gpu[:2], on_gpu[2:], [EPS], name, which)
        stream.synchronize()
        truth = rmsnorm(2 * inputs[0], inputs[1])
        np.testing.assert_allclose(on_gpu[0].cpu().numpy(), truth, rtol=1e-5, atol=1e-6)


def test_arrays_in_two_places(gpu):
    outputs, inputs = operands()
    on_gpu = [gpu.from_numpy(array).cuda() for array in outputs]
    with pytest.raises(llamac.Error, match="out is on the device, x is in host memory: expected all of them"):
        llamac.run("rmsnorm_forward", on_gpu, inputs, [EPS])


@pytest.mark.parametrize("variant", ["", "optimized", "reference", "vectorized"])
@pytest.mark.parametrize("library", ["numpy", "torch", "foreign", "mixed"])
def test_arrays_of_any_library(library, variant):
    import torch

    wraps = {"numpy": [np.asarray] * 4, "torch": [torch.from_numpy] * 4, "foreign": [Foreign] * 4}
    wraps["mixed"] = [np.asarray, torch.from_numpy, Foreign, np.asarray]
    outputs, inputs = operands()
    truth = rmsnorm(*inputs)
    wrapped = [wrap(array) for wrap, array in zip(wraps[library], outputs + inputs)]
    llamac.run("rmsnorm_forward", wrapped[:2], wrapped[2:], [EPS], variant)
    np.testing.assert_allclose(outputs[0], truth, rtol=1e-5, atol=1e-6)
    assert np.isfinite(outputs[1]).all()


@pytest.mark.parametrize("variant", ["", "reference", "naive"])
def test_bf16_and_strides(variant):
    """Heads inside of joined rows, in torch's bf16, which numpy has not."""
    import torch

    joined = torch.randn(2, 3, 6, 8).bfloat16()
    x = joined[:, :, 1:3]
    out = torch.full((2, 3, 4, 8), torch.nan, dtype=torch.bfloat16)
    llamac.run("repeat_kv_forward", [out], [x], [], "" if variant == "" else variant)
    assert torch.equal(out, x.repeat_interleave(2, 2))


def test_read_only_arrays():
    outputs, inputs = operands()
    for array in inputs:
        array.flags.writeable = False
    llamac.run("rmsnorm_forward", outputs, inputs, [EPS])
    assert np.isfinite(outputs[0]).all()
    outputs[0].flags.writeable = False
    refuses("rmsnorm_forward: out: is read-only", llamac.run, "rmsnorm_forward", outputs, inputs, [EPS])


def test_a_call_keeps_no_array():
    outputs, inputs = operands()
    wrapped = [Foreign(array) for array in (*outputs, *inputs)]
    before = [sys.getrefcount(w.array) for w in wrapped]
    llamac.run("rmsnorm_forward", wrapped[:2], wrapped[2:], [EPS])
    assert [sys.getrefcount(w.array) for w in wrapped] == before


@pytest.mark.parametrize(
    "pattern, change",
    [
        ("x: expected an array .* found list", {2: [[1.0]]}),
        ("x: is i16, expected f32, ", {2: np.zeros((ROWS, C), np.int16)}),
        ("x: is i64", {2: np.zeros((ROWS, C), np.int64)}),
        ("weight is f64, expected f32", {3: np.zeros(C)}),
        ("weight has shape", {3: np.zeros(C + 1, np.float32)}),
        ("x: expected numbers, found elements of no bytes", {2: np.zeros((ROWS, C), "V0")}),
        ("x: expected this machine's byte order", {2: np.zeros((ROWS, C), ">f4")}),
        ("rstd must be contiguous", {1: np.zeros(2 * ROWS, np.float32)[::2]}),
        ("x must have stride 1 in its last dimension", {2: np.zeros((ROWS, 2 * C), np.float32)[:, ::2]}),
        ("x: expected strides of at least 0", {2: np.zeros((ROWS, C), np.float32)[::-1]}),
        ("x is missing", {2: None}),
        ("x: expected at most 4 dimensions, found 5", {2: np.zeros((1,) * 5, np.float32)}),
        ("x: is on a device of DLPack's type 7", {2: Foreign(np.zeros(1), (7, 0))}),
    ],
)
def test_bad_arrays(pattern, change):
    outputs, inputs = operands()
    arrays = [change.get(k, array) for k, array in enumerate(outputs + inputs)]
    pattern = f"^rmsnorm_forward: .*{pattern}"
    refuses(pattern, llamac.run, "rmsnorm_forward", arrays[:2], arrays[2:], [EPS])


def test_bad_calls():
    outputs, inputs = operands()
    for pattern, arguments in (
        ("no operation is called rms", ("rms", outputs, inputs, [EPS])),
        ("no variant magic, expected one of", ("rmsnorm_forward", outputs, inputs, [EPS], "magic")),
        ("expected 1 scalars, found 0", ("rmsnorm_forward", outputs, inputs)),
        ("expected 4 tensors, found 5", ("rmsnorm_forward", outputs, [*inputs, None], [EPS])),
    ):
        refuses(pattern, llamac.run, *arguments)


def test_a_tensor_that_wants_gradients():
    import torch

    outputs, inputs = operands()
    x = torch.from_numpy(inputs[0]).requires_grad_()
    refuses(r"rmsnorm_forward: x: .*detach", llamac.run, "rmsnorm_forward", outputs, [x, inputs[1]], [EPS])


def test_torchs_operations_come_first():
    """Both modules have the emulated device; its state in one is not that in the other."""
    code = "import torch; from llamac import ops; import llamac, numpy as np\n"
    code += "ops.rmsnorm(torch.ones(2, 8), torch.ones(8)); out = np.full((2, 8), np.nan, np.float32)\n"
    code += "x = np.ones_like(out); arrays = [out, np.full(2, np.nan, np.float32)], [x, x[0]]\n"
    code += "llamac.run('rmsnorm_forward', *arrays, [0.0], 'vectorized'); assert (out == 1).all()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_are_functions_whatever_was_imported():
    """No module of the package takes the place of one of its functions."""
    names = "llamac.kernels, llamac.run, llamac.Trainer"
    code = (
        f"import llamac, llamac.base.registry, llamac.training.trainer; assert all(map(callable, ({names})))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def every_variant(operation: str) -> list[str]:
    return [name for name in variants(operation) if name]


@pytest.mark.parametrize(
    "operation", ["rmsnorm_forward", "cross_entropy", "embedding_forward", "repeat_kv_forward"]
)
def test_no_rows(operation):
    """Nothing to do, in any variant."""
    shapes = {
        "rmsnorm_forward": ([(0, 8), (0,)], [(0, 8), (8,)], [EPS]),
        "cross_entropy": ([(0,), (0, 8), (), ()], [(0, 8), (0,), None], [1.0, -100]),
        "embedding_forward": ([(0, 8)], [(0,), (4, 8), None, None], []),
        "repeat_kv_forward": ([(1, 0, 4, 8)], [(1, 0, 2, 8)], []),
    }
    outputs, inputs, scalars = shapes[operation]
    indices = {"cross_entropy": 1, "embedding_forward": 0}
    arrays = [None if shape is None else np.ones(shape, np.float32) for shape in outputs + inputs]
    if operation in indices:
        k = len(outputs) + indices[operation]
        arrays[k] = arrays[k].astype(np.int32)
    for variant in every_variant(operation):
        if operation == "cross_entropy":
            mean, num_valid = arrays[2:4] = np.ones((), np.float32), np.ones((), np.float32)
        llamac.run(operation, arrays[: len(outputs)], arrays[len(outputs) :], scalars, variant)
        if operation == "cross_entropy":
            assert np.isnan(mean) and num_valid == 0


def test_losses_of_large_logits():
    """Their maximum is taken off before the logarithm is added, which it would swallow."""
    logits, targets = np.full((3, 16), 1e18, np.float32), np.arange(3, dtype=np.int32)
    for variant in every_variant("cross_entropy"):
        losses = np.zeros(3, np.float32)
        llamac.run("cross_entropy", [losses, None, None, None], [logits, targets, None], [1.0, -100], variant)
        np.testing.assert_allclose(losses, np.log(16), rtol=1e-6)


def test_a_size_of_nothing():
    """Only rows may be none."""
    out, x = (np.zeros((1, 3, heads, 0), np.float32) for heads in (4, 2))
    assert "HD = 0, expected at least 1" in refused(llamac.run, "repeat_kv_forward", [out], [x], [])


def test_a_sum_over_no_rows():
    for variant in every_variant("matmul_backward_weight"):
        if variant == "library":
            continue
        dweight = np.full((3, 4), 7, np.float32)
        none = np.zeros((0, 3), np.float32), np.zeros((0, 4), np.float32)
        llamac.run("matmul_backward_weight", [dweight], none, [True], variant)
        assert (dweight == 7).all()
        llamac.run("matmul_backward_weight", [dweight], none, [False], variant)
        assert (dweight == 0).all()


@pytest.mark.parametrize("eps", [np.float32(0.5), np.float64(0.5), np.array(0.5), 0.5])
def test_a_scalar_of_any_library(eps):
    outputs, inputs = operands()
    llamac.run("rmsnorm_forward", outputs, inputs, [eps])
    x = inputs[0].astype(np.float64)
    np.testing.assert_allclose(outputs[1], 1 / np.sqrt((x**2).mean(-1) + 0.5), rtol=1e-6)


def test_flops_by_shape():
    """Causal attention: two products over each query and the keys that it sees; five backward."""
    B, T, NH, HD, N, C, K = 2, 5, 6, 4, 7, 11, 13
    sizes = {"B": B, "T": T, "S": T, "NH": NH, "NKV": 3, "HD": HD, "N": N, "C": C, "K": K}
    wanted = {f"matmul_{which}": 2 * N * C * K for which in ("forward", "backward_input", "backward_weight")}
    pairs = B * NH * T * (T + 1) / 2
    wanted |= {"attention_forward": 2 * 2 * HD * pairs, "attention_backward": 5 * 2 * HD * pairs}
    assert {name: least_work(name, sizes, "f32")[1] for name in wanted} == wanted


def test_an_odd_size():
    x, cis = np.zeros((1, 2, 1, 7), np.float32), np.zeros((2, 3, 2), np.float32)
    assert "HD = 7, expected a multiple of 2" in refused(llamac.run, "rope_forward", [x], [x, cis], [False])


@pytest.mark.parametrize("variant", ["cpu", "reference", "naive", "vectorized"])
def test_a_norm_that_is_no_number_leaves_none(variant):
    """As torch's clip_grad_norm_: one NaN among the gradients is one in every weight, seen at once."""
    n = 40
    weight, m, v = (np.zeros(n, np.float32) for _ in range(3))
    inputs = [np.full(n, 50, np.float32), np.full(1, np.nan), np.ones(1, np.float32)]
    inputs += [np.ones(1, np.int32), None, None]
    scalars = [0.9, 0.95, 1e-8, 0.1, 1.0, 42, 0]
    llamac.run("adamw", [weight, None, m, v], inputs, scalars, variant)
    assert np.isnan(weight).all() and np.isnan(m).all()


@pytest.mark.parametrize("squares, guard", [(np.nan, 4), (np.inf, 4), (2e77, 4), (9, np.nan), (9, np.inf)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("variant", ["cpu", "reference", "naive", "vectorized"])
def test_a_guarded_step_that_is_not_finite_keeps_every_bit(variant, dtype, squares, guard):
    """Of whole thread blocks and of the last one, with and without a master."""
    n, rng = 1500, np.random.default_rng(1)
    master = None if dtype == np.float32 else rng.random(n, np.float32)
    weight, m, v, gradient = (rng.random(n, np.float32).astype(dtype) for _ in range(4))
    state = [x for x in (weight, master, m, v) if x is not None]

    def step(squares: float, guard: float):
        inputs = [gradient, np.full(1, squares, float), np.ones(1, np.float32), np.ones(1, np.int32)]
        scalars = [0.9, 0.95, 1e-8, 0.1, 1.0, 42, 0]
        llamac.run(
            "adamw", [weight, master, m, v], [*inputs, np.full(1, guard, float), None], scalars, variant
        )

    before = [x.tobytes() for x in state]
    step(squares, guard)
    assert [x.tobytes() for x in state] == before
    step(9, 4)
    assert all(x.tobytes() != b for x, b in zip(state, before))


def test_memory_that_nobody_wrote_shows():
    """Attention's backward rounds p and ds to operands by adding to their bits: not to those of a NaN."""
    import torch

    B, time, NH, HD = 1, 32, 2, 64
    q, k, v, out, dout = (torch.randn(B, time, NH, HD).bfloat16() for _ in range(5))
    lse = torch.full((B, NH, time), -1, dtype=torch.int32).view(torch.float32)
    for variant in ("cpu", "naive", "flash"):
        gradients = [torch.zeros_like(x) for x in (q, k, v)]
        llamac.run(
            "attention_backward", gradients, [dout, out, lse, q, k, v, None, None], [HD**-0.5], variant
        )
        assert all(g.isnan().all() for g in gradients), variant


# What could crash, or give a wrong result without a word


def refusal(*arguments) -> str:
    with pytest.raises(llamac.Error) as error:
        llamac.run(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("variant", ["", "reference", "naive"])
@pytest.mark.parametrize("bad", [-1, 7, 10**9, -(2**31)])
def test_a_token_id_that_is_none(bad, variant):
    out, weight = np.full((3, 4), np.nan, np.float32), np.ones((7, 4), np.float32)
    ids = np.array([0, bad, 6], np.int32)
    message = refusal("embedding_forward", [out], [ids, weight, None, None], [], variant)
    assert message == f"embedding_forward: tokens holds {bad}, expected values from 0 to 6"
    assert np.isnan(out).all()
    message = refusal("embedding_backward", [weight], [out, ids], [True], variant)
    assert message == f"embedding_backward: tokens holds {bad}, expected values from 0 to 6"


def test_a_repeated_token_id_of_any_count():
    """A view of one element is refused for its size, without reading it 10^12 times."""
    ids = np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (2**40,), (0,))
    arrays = [np.ones((7, 4), np.float32)], [np.zeros((3, 4), np.float32), ids]
    assert "tokens" in refusal("embedding_backward", *arrays, [True])


def test_a_target_that_is_none():
    targets = np.array([0, -100, 8], np.int32)
    arrays = [np.zeros(3, np.float32), None, None, None], [np.ones((3, 8), np.float32), targets, None]
    assert "targets holds 8, expected values from 0 to 7" in refusal("cross_entropy", *arrays, [1.0, -100])
    assert "targets holds -100" in refusal("cross_entropy", *arrays, [1.0, 8])
    assert "ignore_index is 4294967196, expected one of 32 bits" in refusal(
        "cross_entropy", *arrays, [1.0, 2**32 - 100]
    )


def test_outputs_have_memory_of_their_own():
    (out, rstd), (x, weight) = operands()
    run = "rmsnorm_forward"
    assert refusal(run, [out, out[0, :ROWS]], [x, weight], [EPS]) == (
        "rmsnorm_forward: out overlaps rstd in memory, expected separate memory"
    )
    rows = np.zeros(2 * ROWS * C, np.float32)
    first, last = rows[: ROWS * C].reshape(ROWS, C), rows[C : (ROWS + 1) * C].reshape(ROWS, C)
    assert "out overlaps x" in refusal(run, [last, rstd], [first, weight], [EPS])
    none = np.lib.stride_tricks.as_strided(np.zeros((0, 4, 2, 8), np.float32), strides=(0, 0, 0, 4))
    llamac.run("repeat_kv_backward", [none], [np.zeros((0, 4, 4, 8), np.float32)], [])
    joined = np.zeros((1, 4, 6, 8), np.float32)
    message = refusal("repeat_kv_forward", [np.zeros((1, 4, 4, 8), np.float32)], [joined[:, :, 1:3, ::2]], [])
    assert "x must have stride 1 in its last dimension" in message
    same = np.lib.stride_tricks.as_strided(joined, (1, 4, 2, 8), (0, 0, 32, 4))
    assert refusal("rope_forward", [same], [joined[:, :, 2:4], np.zeros((4, 4, 2), np.float32)], [False]) == (
        "rope_forward: out overlaps itself, expected strides that keep its elements apart"
    )


def test_outputs_may_share_exactly():
    """As the description says; not with a shift."""
    memory = np.arange(1, 2 * 3 * 4 * 6 + 1, dtype=np.float32)
    x, cis = memory[:96].reshape(1, 3, 4, 8), np.random.default_rng(0).standard_normal((3, 4, 2))
    cis = cis.astype(np.float32)
    expected = np.zeros_like(x)
    llamac.run("rope_forward", [expected], [x, cis], [False])
    message = refusal("rope_forward", [memory[8:104].reshape(x.shape)], [x, cis], [False])
    assert message == "rope_forward: out overlaps x in memory, expected separate memory, or exactly that of x"
    llamac.run("rope_forward", [x], [x, cis], [False])
    np.testing.assert_array_equal(x, expected)


def random_slices(rng: np.random.Generator, apart: int | None) -> list[np.ndarray]:
    """Two slices of an array, of one shape, some dimensions in steps; none where `apart`, a dimension, keeps
    them in halves of its own."""
    whole = np.zeros((2, 4, 4, 8) if apart is None else (4, 9, 8, 16), np.float32)
    limits = ((1, 3, 1), (1, 4, 1), (1, 4, 1), (1, 4, 2))
    sizes = [factor * int(rng.integers(low, high)) for low, high, factor in limits]
    slices = []
    for side in (0, 1):
        index = []
        for d, (size, n) in enumerate(zip(sizes, whole.shape)):
            low, high = (side * n // 2, (side + 1) * n // 2) if d == apart else (0, n)
            step = int(rng.integers(1, 3)) if d < 3 else 1
            if low + (size - 1) * step >= high:
                step = 1
            begin = int(rng.integers(low, high - (size - 1) * step))
            index.append(slice(begin, begin + (size - 1) * step + 1, step))
        slices.append(whole[tuple(index)])
    return slices


def test_interleaved_operands():
    """Refused if they have an element in common, and taken if a range of one dimension keeps them apart."""
    rng, refused = np.random.default_rng(0), 0
    for apart in (0, 1, 2, 3, None) * 60:
        out, x = random_slices(rng, apart)
        cis = np.zeros((x.shape[1], x.shape[3] // 2, 2), np.float32)
        steps = [[s for s, n in zip(a.strides, a.shape) if n > 1] for a in (out, x)]
        same = out.ctypes.data == x.ctypes.data and steps[0] == steps[1]
        if np.shares_memory(out, x) and not same:
            assert "out overlaps x" in refusal("rope_forward", [out], [x, cis], [False])
            refused += 1
        elif apart is not None:
            llamac.run("rope_forward", [out], [x, cis], [False])
    assert refused > 10


@pytest.mark.parametrize("variant", ["", "reference", "naive"])
def test_addresses_are_aligned(variant):
    outputs, inputs = operands()
    memory = np.zeros(inputs[0].nbytes + 4, np.uint8)
    inputs[0] = np.frombuffer(memory, np.float32, inputs[0].size, 1).reshape(ROWS, C)
    assert refusal("rmsnorm_forward", outputs, inputs, [EPS], variant) == (
        "rmsnorm_forward: x begins 1 bytes past a multiple of 4, expected an aligned address"
    )


class Shaped(Foreign):
    """One number, whose capsule says another shape."""

    def __init__(self, *shape: int):
        super().__init__(np.zeros(1, np.float32))
        self.shape = shape

    def __dlpack__(self, stream=None):
        import ctypes

        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        tensor = pointer(capsule, b"dltensor")  # data, device, ndim, dtype, shape, strides, offset
        self.sizes = (ctypes.c_int64 * len(self.shape))(*self.shape)
        self.strides = (ctypes.c_int64 * len(self.shape))()
        ctypes.c_int32.from_address(tensor + 16).value = len(self.shape)
        ctypes.c_int64.from_address(tensor + 24).value = ctypes.addressof(self.sizes)
        ctypes.c_int64.from_address(tensor + 32).value = ctypes.addressof(self.strides)
        return capsule


@pytest.mark.parametrize(
    "shape, message",
    [
        ((-ROWS, C), "x: expected sizes of at least 0, found -5"),
        ((2**40, C), "x must have stride 1"),
        ((2**40, 2**40), "x: expected fewer than 2^63 bytes, found more"),
        ((2**62, 2**62, 2**62, 2**62), "x: expected fewer than 2^63 bytes"),
    ],
)
def test_sizes_that_no_memory_has(shape, message):
    outputs, inputs = operands()
    assert message in refusal("rmsnorm_forward", outputs, [Shaped(*shape), inputs[1]], [EPS])


@pytest.mark.parametrize(
    "operation, scalars, message",
    [
        ("rmsnorm_forward", ["1e-5"], "eps is str, expected a number"),
        ("rmsnorm_forward", [None], "eps is NoneType, expected a number"),
        ("rmsnorm_forward", [1j], "eps is complex, expected a number"),
        ("rmsnorm_forward", [10**400], "eps is int of 1329 bits, expected a number"),
        ("rmsnorm_forward", [np.zeros(2)], "eps is ndarray, expected a number"),
        ("mean_loss", [0.5], "ignore_index is float, expected an integer of 64 bits"),
        ("mean_loss", [np.float32(1)], "ignore_index is float32, expected an integer of 64 bits"),
        ("mean_loss", [2**63], "ignore_index is int of 64 bits, expected an integer of 64 bits"),
        ("global_norm", [0.0], "accumulate is float, expected a bool"),
        ("global_norm", ["yes"], "accumulate is str, expected a bool"),
        ("global_norm", [True, 1], "expected 1 scalars, found 2"),
    ],
)
def test_scalars_of_another_type(operation, scalars, message):
    op = next(op for op in llamac.kernels() if op["name"] == operation)
    split = sum(o["output"] for o in op["operands"])
    message = f"{operation}: {message}"
    assert refusal(operation, [None] * split, [None] * (len(op["operands"]) - split), scalars) == message


def test_scalars_that_are_taken():
    """As PyTorch takes them: a bool is a number."""
    squares, x = np.zeros(1), np.full(3, 2, np.float32)
    taken = [(False, 12), (True, 24), (np.True_, 36), (1, 48), (0, 12), (np.int32(1), 24)]
    for accumulate, expected in taken:
        llamac.run("global_norm", [squares], [x], [accumulate])
        assert squares[0] == expected
    mean, losses, targets = np.zeros((), np.float32), np.array([1, 3], np.float32), np.array([0, 1], "i4")
    llamac.run("mean_loss", [mean, None], [losses, targets], [True])
    assert mean == 1
    outputs, inputs = operands()
    for eps in (1, True, float("nan")):
        llamac.run("rmsnorm_forward", outputs, inputs, [eps])
    assert np.isnan(outputs[0]).all()
