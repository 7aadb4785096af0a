// torch.ops.llamac.linear_cross_entropy: PyTorch's products around our cross-entropy, by chunks of rows, so that logits
// exist for one chunk at a time and hold their own gradient right after. llamac.ops.linear_cross_entropy says where
// that is from. It is no described operation, as its products are PyTorch's; and it is not Python, whose steps cost the
// host more than the launches between them.
//
//   hidden [..., C], weight [V, C], targets [...] int32 or int64, chunk_bytes: of logits at most, but for one row
//   -> the mean over rows that count, or the sum: f32 (f64 for f64)
//
// .gradients: also the sum's gradients, those that are wanted (else [0]); they are to be multiplied by scale [1], in
// float32, and by the loss's own.
// Throws ValueError, in one line, for bad arguments; ignore_index, and targets' type and values, are checked by our
// cross-entropy.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "torch_autograd.h"
#include "torch_compute.h"

namespace llamac {
namespace {

using at::Tensor;

constexpr int64_t max_roundings = 8;  // of a weight's gradient in bf16, as chunks are added

// Our operations, without PyTorch's dispatcher, which would cost the host half as much as a launch; profilers see them.
// An undefined result is not computed.

const Operation& losses_operation() {
    static const Operation& op = find_operation("cross_entropy");
    return op;
}

void cross_entropy(const Tensor& logits, const Tensor& targets, int64_t ignore_index, const Tensor& losses,
                   const Tensor& dlogits, const Tensor& mean, const Tensor& num_valid) {
    RECORD_FUNCTION("llamac::cross_entropy", std::vector<c10::IValue>({logits, targets}));
    const Tensor all_ones;
    Tensor operands[] = {losses, dlogits, mean, num_valid, logits, targets, all_ones};
    const Scalar scalars[] = {1.0, ignore_index};
    compute(losses_operation(), operands, scalars);
}

void mean_loss(const Tensor& losses, const Tensor& targets, int64_t ignore_index, const Tensor& mean,
               const Tensor& num_valid) {
    RECORD_FUNCTION("llamac::mean_loss", std::vector<c10::IValue>({losses, targets}));
    static const Operation& op = find_operation("mean_loss");
    Tensor operands[] = {mean, num_valid, losses, targets};
    const Scalar scalars[] = {ignore_index};
    compute(op, operands, scalars);
}

void add_weight_gradient(const Tensor& dout, const Tensor& x, bool accumulate, const Tensor& dweight) {
    RECORD_FUNCTION("llamac::matmul_backward_weight", std::vector<c10::IValue>({dout, x}));
    static const Operation& op = find_operation("matmul_backward_weight");
    Tensor operands[] = {dweight, dout, x};
    const Scalar scalars[] = {accumulate};
    compute(op, operands, scalars);
}

at::ScalarType statistics(const Tensor& x) {
    const std::optional<DType> type = find_dtype(x.scalar_type());
    return type ? torch_type(info(*type).arithmetic) : at::kFloat;  // check() refuses other types
}

void check(const Tensor& hidden, const Tensor& weight, const Tensor& targets, int64_t ignore_index,
           int64_t chunk_bytes) {
    const auto same = [](const c10::SymInt& a, const c10::SymInt& b) {
        return a.sym_eq(b).expect_true(__FILE__, __LINE__);
    };
    constexpr auto op = "linear_cross_entropy: ";
    TORCH_CHECK_VALUE(chunk_bytes > 0, op, "chunk_bytes is ", chunk_bytes, ", expected at least 1");
    // Else one on meta, beside others, would make the fake a result of uninitialized memory.
    const auto check_device = [&](const Tensor& t, const char* name) {
        TORCH_CHECK_VALUE(t.device() == hidden.device(), op, name, " is on ", t.device().str(), ", expected ",
                          hidden.device().str());
    };
    check_device(weight, "weight");
    check_device(targets, "targets");
    const at::ScalarType type = hidden.scalar_type();
    const std::optional<DType> known = find_dtype(type);
    TORCH_CHECK_VALUE(known && is_float(info(*known)), op, "hidden is ", type, ", expected ",
                      dtype_names(is_float));
    TORCH_CHECK_VALUE(weight.scalar_type() == type, op, "weight is ", weight.scalar_type(), ", expected ",
                      type);
    const c10::SymIntArrayRef sizes = hidden.sym_sizes(), matrix = weight.sym_sizes(),
                              found = targets.sym_sizes();
    TORCH_CHECK_VALUE(!sizes.empty(), op, "hidden has shape [], expected [...,C]");
    TORCH_CHECK_VALUE(matrix.size() == 2 && same(matrix[1], sizes.back()), op, "weight has shape ", matrix,
                      ", expected [V,C] with dimension 1 = ", sizes.back());
    const c10::SymIntArrayRef rows = sizes.slice(0, sizes.size() - 1);
    bool fit = found.size() == rows.size();
    for (size_t d = 0; fit && d < found.size(); d++) fit = same(found[d], rows[d]);
    TORCH_CHECK_VALUE(fit, op, "targets has shape ", found, ", expected ", rows);
    const Tensor &logits = hidden, none;  // as far as types go
    const Tensor operands[] = {none, none, none, none, logits, targets, none};
    const Scalar scalars[] = {1.0, ignore_index};
    check_types(losses_operation(), operands, scalars);
}

// Views as PyTorch's own kernels make them: one by its operations costs the host a microsecond, for features
// that only outside callers or autograd need. offset: in elements of the type.
Tensor view_of(const Tensor& t, at::ScalarType type, at::IntArrayRef sizes, at::IntArrayRef strides,
               int64_t offset) {
    Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()),
                                                           t.key_set(), c10::scalarTypeToTypeMeta(type));
    view.unsafeGetTensorImpl()->set_storage_offset(offset);
    view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    return view;
}
Tensor transposed(const Tensor& t) {
    return view_of(t, t.scalar_type(), {t.size(1), t.size(0)}, {t.stride(1), t.stride(0)},
                   t.storage_offset());
}
Tensor rows_of(const Tensor& t, int64_t begin, int64_t count) {
    if (count == t.size(0)) return t;
    at::DimVector sizes(t.sizes());
    sizes[0] = count;
    return view_of(t, t.scalar_type(), sizes, t.strides(), t.storage_offset() + begin * t.stride(0));
}

struct Results {
    Tensor loss, scale, dhidden, dweight;  // the last three: where gradients are wanted
};
struct Wanted {
    bool dhidden, dweight;
};

Results by_chunks(const Tensor& hidden, const Tensor& weight, const Tensor& targets, int64_t ignore_index,
                  bool wants_mean, int64_t chunk_bytes, Wanted wanted) {
    check(hidden, weight, targets, ignore_index, chunk_bytes);
    const at::AutoDispatchBelowADInplaceOrView guard;
    const int64_t rows = targets.numel(), channels = hidden.size(-1), vocabulary = weight.size(0);
    const at::ScalarType type = hidden.scalar_type(), wide_type = statistics(hidden);
    const int64_t element = static_cast<int64_t>(c10::elementSize(type)), bytes = rows * vocabulary * element;
    const int64_t chunks = std::max<int64_t>(1, (bytes + chunk_bytes - 1) / chunk_bytes);
    const int64_t height = std::max<int64_t>(1, (rows + chunks - 1) / chunks);
    // Each chunk's addition rounds to the storage type: a few stay within the error of the products.
    const bool wide = chunks > max_roundings && type != wide_type;
    const bool gradients = wanted.dhidden || wanted.dweight;

    const Tensor x = hidden.dim() == 2 ? hidden : hidden.reshape({rows, channels});
    const Tensor ids = targets.dim() == 1 ? targets : targets.reshape({rows});
    const Tensor columns = transposed(weight);
    const auto empty = [&](at::IntArrayRef shape, at::ScalarType t) {
        return allocate(shape, t, hidden.device());
    };
    // The losses lie behind the logits: one more allocation costs the host a microsecond, too.
    const int64_t max_rows = std::min(height, rows);
    const int64_t ratio = static_cast<int64_t>(c10::elementSize(wide_type)) / element;
    const int64_t behind = (max_rows * vocabulary + ratio - 1) / ratio;
    const Tensor memory = empty({(behind + rows) * ratio}, type);
    const Tensor logits = view_of(memory, type, {max_rows, vocabulary}, {vocabulary, 1}, 0);
    const Tensor losses = view_of(memory, wide_type, {rows}, {1}, behind);
    Tensor dhidden, dweight;
    if (wanted.dhidden) dhidden = empty(x.sizes(), type);
    if (wanted.dweight) dweight = empty(weight.sizes(), wide ? wide_type : type);
    if (wanted.dweight && rows == 0) dweight.zero_();
    const Tensor none;
    Tensor mean, num_valid;
    if (wants_mean) mean = empty({}, wide_type);
    if (wants_mean && gradients) num_valid = empty({}, wide_type);
    const bool at_once = chunks == 1 && rows > 0;  // then the mean is the losses' own call's

    for (int64_t begin = 0; begin < rows; begin += height) {
        const int64_t count = std::min(height, rows - begin);
        const Tensor part = rows_of(x, begin, count);
        Tensor out = rows_of(logits, 0, count);
        at::mm_out(out, part, columns);
        cross_entropy(out, rows_of(ids, begin, count), ignore_index, rows_of(losses, begin, count),
                      gradients ? out : none, at_once ? mean : none, at_once ? num_valid : none);
        if (wanted.dhidden) {
            Tensor dpart = rows_of(dhidden, begin, count);
            at::mm_out(dpart, out, weight);
        }
        if (!wanted.dweight) continue;
        if (wide)
            add_weight_gradient(out, part, begin > 0, dweight);
        else if (begin == 0)
            at::mm_out(dweight, transposed(out), part);
        else
            dweight.addmm_(transposed(out), part);
    }
    if (wants_mean && !at_once) mean_loss(losses, ids, ignore_index, mean, num_valid);

    Results r;
    if (gradients) {  // where no row counts, they are 0 and stay it
        r.scale = wants_mean ? num_valid.clamp_min(1).reciprocal().view({1})
                             : at::ones({1}, hidden.options().dtype(wide_type));
        r.dhidden = wanted.dhidden ? dhidden.view(hidden.sizes()) : empty({0}, type);
        r.dweight = wanted.dweight ? dweight.to(weight.scalar_type()) : empty({0}, type);
    }
    r.loss = wants_mean ? mean : losses.sum();
    return r;
}

using LossAndGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Tensor loss_alone(const Tensor& hidden, const Tensor& weight, const Tensor& targets, int64_t ignore_index,
                  bool mean, int64_t chunk_bytes) {
    return by_chunks(hidden, weight, targets, ignore_index, mean, chunk_bytes, {false, false}).loss;
}
LossAndGradients loss_and_gradients(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                    int64_t ignore_index, bool mean, int64_t chunk_bytes, bool dhidden,
                                    bool dweight) {
    TORCH_CHECK_VALUE(dhidden || dweight, "linear_cross_entropy.gradients: none is wanted");
    Results r = by_chunks(hidden, weight, targets, ignore_index, mean, chunk_bytes, {dhidden, dweight});
    return {std::move(r.loss), std::move(r.scale), std::move(r.dhidden), std::move(r.dweight)};
}

Tensor fake_loss(const Tensor& hidden, const Tensor& weight, const Tensor& targets, int64_t ignore_index,
                 bool, int64_t chunk_bytes) {
    check(hidden, weight, targets, ignore_index, chunk_bytes);
    return at::empty({}, hidden.options().dtype(statistics(hidden)));
}
LossAndGradients fake_gradients(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                int64_t ignore_index, bool, int64_t chunk_bytes, bool dhidden, bool dweight) {
    check(hidden, weight, targets, ignore_index, chunk_bytes);
    const auto arithmetic = hidden.options().dtype(statistics(hidden));
    const auto gradient = [](const Tensor& t, bool wanted) {
        return wanted ? at::empty_symint(t.sym_sizes(), t.options()) : at::empty({0}, t.options());
    };
    return {at::empty({}, arithmetic), at::empty({1}, arithmetic), gradient(hidden, dhidden),
            gradient(weight, dweight)};
}

template <class Kernel, class Fake>
void define(torch::Library& library, const std::string& name, const std::string& more, Kernel* kernel,
            Fake* fake) {
    const std::string schema = name +
                               "(Tensor hidden, Tensor weight, Tensor targets, int ignore_index, "
                               "bool mean, int chunk_bytes" +
                               more;
    library.def(torch::schema(schema.c_str()), {at::Tag::pt2_compliant_tag});
    const auto implement = [&](c10::DispatchKey key, auto&& function) {
        library.impl(name.c_str(), torch::dispatch(key, std::forward<decltype(function)>(function)));
    };
    implement(c10::DispatchKey::Meta, fake);
    implement(c10::DispatchKey::CPU, kernel);
    implement(c10::DispatchKey::CUDA, kernel);
    refuse_derivative(library, name);
}

}  // namespace
}  // namespace llamac

TORCH_LIBRARY_FRAGMENT(llamac, library) {
    llamac::define(library, "linear_cross_entropy", ") -> Tensor", llamac::loss_alone, llamac::fake_loss);
    llamac::define(library, "linear_cross_entropy.gradients",
                   ", bool wants_dhidden, bool wants_dweight)"
                   " -> (Tensor loss, Tensor scale, Tensor dhidden, Tensor dweight)",
                   llamac::loss_and_gradients, llamac::fake_gradients);
}
