// Operations that end as codes of fp8: the bits are those of the operation itself, whose result is stored, and of quantize
// behind it: codes, transposed codes, the largest size and the count of values beyond the type, for each variant, with each
// of them alone and all together.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "check.h"
#include "core/device_memory.h"
#include "core/dispatch.h"
#include "core/random.h"
#include "core/registry.h"

using namespace llamac;

namespace {

// A tensor and its memory.
struct Held {
    DeviceMemory memory;
    Tensor tensor;

    Held(DType dtype, std::initializer_list<int64_t> shape) : tensor(shaped(dtype, shape)) {
        memory = DeviceMemory(tensor.bytes());
        tensor.data = memory.data;
    }
    // Normal numbers, of the stream `seed`.
    Held(DType dtype, std::initializer_list<int64_t> shape, uint32_t seed) : Held(dtype, shape) {
        std::vector<float> values(static_cast<size_t>(tensor.elements()));
        for (size_t i = 0; i < values.size(); i++)
            values[i] = random_normal(7, 0, seed, static_cast<int64_t>(i));
        fill(values);
    }
    // Of one element.
    template <class V>
    static Held of(V value) {
        Held one(dtype_of<V>(), {1});
        copy_bytes(one.tensor.data, &value, sizeof value);
        return one;
    }
    void fill(const std::vector<float>& values) {
        std::vector<char> stored(static_cast<size_t>(tensor.bytes()));
        convert(values.data(), DType::f32, stored.data(), tensor.dtype, tensor.elements());
        copy_bytes(tensor.data, stored.data(), tensor.bytes());
    }
    std::string bits() const {
        CHECK(hipDeviceSynchronize());
        std::string copy(static_cast<size_t>(tensor.bytes()), '\0');
        copy_bytes(copy.data(), tensor.data, tensor.bytes());
        return copy;
    }
};

// What a quantisation writes.
struct Codes {
    Held out, transposed, amax, saturated;
    unsigned wanted;  // a bit for each

    Codes(DType type, int64_t N, int64_t C, unsigned wanted_)
        : out(type, {N, C}),
          transposed(type, {C, N}),
          amax(DType::f32, {1}),
          saturated(DType::i32, {1}),
          wanted(wanted_) {
        for (Held* each : {&out, &transposed})
            CHECK(hipMemset(each->tensor.data, 0x5a, static_cast<size_t>(each->tensor.bytes())));
        const float before = 0.01f;
        const int32_t count = 3;
        copy_bytes(amax.tensor.data, &before, sizeof before);
        copy_bytes(saturated.tensor.data, &count, sizeof count);
    }
    std::vector<Tensor> tensors() const {
        const Held* all[] = {&out, &transposed, &amax, &saturated};
        std::vector<Tensor> chosen(4);
        for (size_t i = 0; i < 4; i++)
            if (wanted >> i & 1) chosen[i] = all[i]->tensor;
        return chosen;
    }
    std::string bits() const { return out.bits() + transposed.bits() + amax.bits() + saturated.bits(); }
};

// An operation and the same with quantize: how both are called. result: what the plain one leaves, [N,C], which quantize
// takes.
struct Pair {
    const char *plain, *fused;
    Tensor result;
    std::vector<Tensor> outputs, inputs;  // of the plain one
    std::vector<Scalar> scalars;
    std::vector<Tensor> fused_inputs;  // without the scale
    std::vector<Scalar> fused_scalars = {};
    int64_t heads = 0;  // the fused one's codes are [N,C], or with heads [N,heads,C/heads]
};

bool runs(const char* operation, const std::vector<Tensor>& tensors, const std::vector<Scalar>& scalars,
          const Variant& variant) {
    const std::string error = error_of(
        [&] { run(find_operation(operation), tensors, scalars, {variant.backend()}, variant.name); });
    if (!error.empty() && error.find("does not take these shapes") == error.npos) fail(error);
    return error.empty();
}

std::vector<Tensor> joined(std::vector<Tensor> a, const std::vector<Tensor>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

bool is_for_this_device(const Variant& v) {
    return v.backend() == Backend::device || device_properties().emulated;
}

// The codes as the fused one takes them.
std::vector<Tensor> by_head(std::vector<Tensor> codes, int64_t heads) {
    if (heads && codes[0].data)
        codes[0] = reshape(codes[0], {codes[0].shape[0], heads, codes[0].shape[1] / heads});
    if (heads && codes[1].data)
        codes[1] = reshape(codes[1], {heads, codes[1].shape[0] / heads, codes[1].shape[1]});
    return codes;
}

void compare(const Pair& pair, DType type, float scale_value) {
    const int64_t N = pair.result.shape[0], C = pair.result.shape[1];
    const Held scale = Held::of(scale_value);
    int compared = 0;
    for (const Variant& v : find_operation(pair.fused).variants) {
        if (!is_for_this_device(v)) continue;
        if (!runs(pair.plain, joined(pair.outputs, pair.inputs), pair.scalars, v)) continue;
        for (const unsigned wanted : {15u, 1u, 2u, 4u, 8u, 3u}) {
            const Codes expected(type, N, C, wanted), found(type, N, C, wanted);
            const char* const by = v.backend() == Backend::host ? "cpu" : "naive";
            run(find_operation("quantize"), joined(expected.tensors(), {pair.result, scale.tensor}), {},
                {v.backend()}, by);
            const std::vector<Tensor> outputs = by_head(found.tensors(), pair.heads);
            if (!runs(pair.fused, joined(joined(outputs, pair.fused_inputs), {scale.tensor}),
                      pair.fused_scalars, v))
                continue;
            compared++;
            check(found.bits() == expected.bits(),
                  std::string(pair.fused) + " " + v.name + " " + name(pair.result.dtype) + " " + name(type) +
                      " N=" + std::to_string(N) + " columns=" + std::to_string(C) + " outputs " +
                      std::to_string(wanted) + ": the bits of quantize");
        }
    }
    check(compared > 0, std::string(pair.fused) + ": some variant runs");
}

constexpr DType storages[] = {DType::f32, DType::bf16};
constexpr DType codes[] = {DType::e4m3, DType::e5m2, DType::e4m3fnuz, DType::e5m2fnuz};
// Within the type, and far beyond it.
constexpr float scales[] = {16.0f, 32768.0f};
struct Size {
    int64_t N, C;
};
constexpr Size sizes[] = {{160, 144}, {16, 272}, {7, 63}, {33, 16}};

// Calls it for every size, storage type, fp8 type and scale.
template <class Make>
void compare_all(const Make& make) {
    for (const Size& size : sizes)
        for (const DType storage : storages)
            for (const DType type : codes)
                for (const float scale : scales) make(size.N, size.C, storage, type, scale);
}

TEST(check_swiglu_forward) {
    compare_all([](int64_t N, int64_t F, DType storage, DType type, float scale) {
        const Held out(storage, {N, F}), gate_up(storage, {N, 2 * F}, 1);
        compare({.plain = "swiglu_forward",
                 .fused = "swiglu_forward_quantize",
                 .result = out.tensor,
                 .outputs = {out.tensor},
                 .inputs = {gate_up.tensor},
                 .scalars = {},
                 .fused_inputs = {gate_up.tensor}},
                type, scale);
    });
}

TEST(check_swiglu_backward) {
    compare_all([](int64_t N, int64_t F, DType storage, DType type, float scale) {
        const Held dgate_up(storage, {N, 2 * F}), dout(storage, {N, F}, 1), gate_up(storage, {N, 2 * F}, 2);
        compare({.plain = "swiglu_backward",
                 .fused = "swiglu_backward_quantize",
                 .result = dgate_up.tensor,
                 .outputs = {dgate_up.tensor, Tensor{}},
                 .inputs = {dout.tensor, gate_up.tensor},
                 .scalars = {},
                 .fused_inputs = {dout.tensor, gate_up.tensor}},
                type, scale);
    });
}

// Three heads, of which the last is not turned.
TEST(check_rope_backward) {
    compare_all([](int64_t N, int64_t size, DType storage, DType type, float scale) {
        const int64_t heads = 3, turned = 2, HD = size / 2 * 2, time = N % 2 ? N : N / 2;
        const Held result(storage, {N, heads * HD}, 1), dout(storage, {N, heads * HD}, 1);
        const Held cis(DType::f32, {time, HD / 2, 2}, 2);
        const auto first_heads = [&](const Held& rows) {
            Tensor t = reshape(rows.tensor, {N / time, time, heads, HD});
            t.shape[2] = turned;
            return t;
        };
        compare({.plain = "rope_backward",
                 .fused = "rope_backward_quantize",
                 .result = result.tensor,
                 .outputs = {first_heads(result)},
                 .inputs = {first_heads(dout), cis.tensor},
                 .scalars = {false},
                 .fused_inputs = {reshape(dout.tensor, {N, heads, HD}), cis.tensor},
                 .fused_scalars = {turned},
                 .heads = heads},
                type, scale);
    });
}

// The new weight and the codes of both, and the state that AdamW leaves.
TEST(check_adamw) {
    const auto with = [](int64_t K, int64_t C, DType T, DType G, DType M, DType type, bool has_master,
                         bool skipped) {
        const auto pass = [&](const Variant& v, bool fused, std::string& bits) {
            Held w(T, {K, C}, 1), master(DType::f32, {K, C}, 1), m(M, {K, C}, 2), v2(M, {K, C}, 3);
            const double loss = skipped ? std::numeric_limits<double>::infinity() : 1;
            const Held grad(G, {K, C}, 4), squares = Held::of(25.0), lr = Held::of(0.01f),
                                           scale = Held::of(256.0f), step = Held::of(int32_t{3}),
                                           guard = Held::of(loss);
            std::vector<float> positive(static_cast<size_t>(K * C));
            for (size_t i = 0; i < positive.size(); i++)
                positive[i] = std::fabs(random_normal(7, 0, 3, static_cast<int64_t>(i)));
            v2.fill(positive);
            const Tensor none, kept = has_master ? master.tensor : none;
            const Codes codes(type, K, C, 15);
            const std::vector<Scalar> scalars = {0.9, 0.95,        1e-8,       0.1,
                                                 1.0, int64_t{42}, int64_t{4}, int64_t{0}};
            bool ran;
            if (fused) {
                ran = runs(
                    "adamw_quantize",
                    joined(codes.tensors(), {w.tensor, kept, m.tensor, v2.tensor, grad.tensor, squares.tensor,
                                             lr.tensor, step.tensor, scale.tensor, guard.tensor}),
                    scalars, v);
            } else {
                const auto flat = [&](const Tensor& t) { return t.data ? reshape(t, {K * C}) : t; };
                ran = runs("adamw",
                           {flat(w.tensor), flat(kept), flat(m.tensor), flat(v2.tensor), flat(grad.tensor),
                            squares.tensor, lr.tensor, step.tensor, guard.tensor, none},
                           scalars, v);
                run(find_operation("quantize"), joined(codes.tensors(), {w.tensor, scale.tensor}), {},
                    {v.backend()}, v.backend() == Backend::host ? "cpu" : "naive");
            }
            if (ran) bits = w.bits() + master.bits() + m.bits() + v2.bits() + codes.bits();
            return ran;
        };
        for (const Variant& v : find_operation("adamw_quantize").variants) {
            std::string plain, fused;
            if (!is_for_this_device(v) || !pass(v, true, fused) || !pass(v, false, plain)) continue;
            check(plain == fused, std::string("adamw_quantize ") + v.name + " " + name(T) + " " + name(G) +
                                      " " + name(M) + " " + name(type) + " K=" + std::to_string(K) +
                                      (has_master ? " master" : "") + (skipped ? " skipped" : "") +
                                      ": the bits of adamw and quantize");
        }
    };
    const DType types[][3] = {
        {DType::f32, DType::f32, DType::f32},   {DType::f32, DType::f32, DType::bf16},
        {DType::bf16, DType::f32, DType::f32},  {DType::bf16, DType::f32, DType::bf16},
        {DType::bf16, DType::bf16, DType::f32}, {DType::bf16, DType::bf16, DType::bf16}};
    for (const Size& size : sizes)
        for (const auto& [T, G, M] : types)
            for (const DType type : {DType::e4m3, DType::e4m3fnuz})
                for (const bool master : {false, true})
                    for (const bool skipped : {false, true})
                        with(size.N, size.C, T, G, M, type, master, skipped);
}

}  // namespace

int main(int argc, char** argv) {
    return run_checks(argc, argv);
}
