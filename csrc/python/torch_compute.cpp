#include "torch_compute.h"
#include "core/device_memory.h"

#include <ATen/ATen.h>
#include <ATen/DLConvertor.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <string>

#include "core/call_checks.h"

namespace llamac {
namespace {

// An int64 whose lower halves are a described int32 with gaps; every device here is little-endian.
bool has_halves(const Operand& o, const at::Tensor& t) {
    return t.scalar_type() == at::kLong && o.letter < 0 && o.dtype == DType::i32 && o.strided &&
           o.shape.size() == 1;
}

DType type_of(const Operation& op, const Operand& o, const at::Tensor& t) {
    if (const std::optional<DType> known = find_dtype(t.scalar_type())) return *known;
    if (has_halves(o, t)) return DType::i32;
    fail(op.name, ": ", o.name, " is ", c10::toString(t.scalar_type()), ", expected ", dtype_names(is_any));
}

// The distance of rows that the first dimensions number, all but `columns`, where it is one; of one row for all it is 0.
std::optional<int64_t> distance_of_rows(const at::Tensor& t, int64_t columns) {
    int64_t distance = 0, rows = 1;
    for (int64_t d = t.dim() - columns - 1; d >= 0; d--) {
        if (t.size(d) == 1) continue;
        if (rows == 1) distance = t.stride(d);
        if (t.stride(d) != rows * distance) return std::nullopt;
        rows *= t.size(d);
    }
    return distance;
}

// Contiguous where the description wants it, copied if necessary. An output cannot be a copy: run() refuses it.
void arrange(const Operand& o, at::Tensor& t) {
    if (o.output || t.is_contiguous()) return;
    const auto rank = static_cast<int64_t>(o.shape.size());
    const bool in_rows = rank == 1 || t.dim() <= 1 || t.size(-1) <= 1 || t.stride(-1) == 1;
    const bool as_described = t.dim() == rank || (rank <= 2 && distance_of_rows(t, rank - 1).has_value());
    if (!o.strided || !in_rows || !as_described) t = t.contiguous();
}

// With as many dimensions as are described: the leading ones become the first, its rows.
void set_shape(const Operation& op, const Operand& o, const at::Tensor& t, Tensor& r) {
    const c10::IntArrayRef sizes = t.sizes(), strides = t.strides();
    const size_t rank = o.shape.size();
    r.rank = static_cast<int>(rank);
    if (sizes.size() == rank) {
        std::copy(sizes.begin(), sizes.end(), r.shape);
        std::copy(strides.begin(), strides.end(), r.stride);
        return;
    }
    const bool apart = !t.is_contiguous();
    if (apart && (!o.strided || o.output)) fail(op.name, ": ", o.name, " must be contiguous");
    int64_t rest = 1;
    const int64_t* const columns = sizes.end() - (rank - 1);
    for (size_t d = rank - 1; d > 0; d--) {
        r.shape[d] = columns[d - 1], r.stride[d] = rest;
        rest *= r.shape[d];
    }
    r.shape[0] = c10::multiply_integers(sizes.begin(), columns);
    r.stride[0] = apart ? distance_of_rows(t, static_cast<int64_t>(rank) - 1).value() : rest;
}

// Whether the tensor holds int64s, of which the lower halves are seen.
bool set_view(const Operation& op, const Operand& o, const at::Tensor& t, Tensor& r) {
    r.data = t.data_ptr();
    r.dtype = type_of(op, o, t);
    set_shape(op, o, t, r);
    if (t.scalar_type() != at::kLong) return false;
    r.stride[0] *= 2;  // it has no other one
    return true;
}

std::string without_gpu;  // set once, before any call

// On the current stream. The workspace comes from torch's allocator, which knows of streams and graphs.
void run_on_device(const Operation& op, std::span<const Tensor> views, std::span<const Scalar> scalars,
                   c10::Device device) {
    const c10::DeviceGuard guard(device);
    const c10::impl::VirtualGuardImpl streams(device.type());
    at::Tensor memory;
    Workspace workspace;
    workspace.source = [&](int64_t bytes) {
        memory = at::empty({bytes}, at::TensorOptions(device).dtype(at::kByte));
        return memory.data_ptr();
    };
    const Context context{Backend::device,
                          static_cast<hipStream_t>(streams.getStream(device).native_handle()), &workspace};
    run(op, views, scalars, context);
}

void compute_or_fail(const Operation& op, std::span<at::Tensor> operands, std::span<const Scalar> scalars,
                     uint32_t fresh) {
    CHECK(operands.size() == op.operands.size() && scalars.size() == op.scalars.size());
    std::array<Tensor, Description::max_operands> all;  // no memory of the heap
    const std::span<Tensor> views(all.data(), operands.size());
    uint32_t wide = 0;
    c10::Device device = at::kCPU;
    for (size_t k = 0; k < operands.size(); k++) {
        const size_t i = op.in_order(k);
        const Operand& o = op.operands[i];
        at::Tensor& t = operands[i];
        if (!t.defined()) continue;
        arrange(o, t);
        wide |= uint32_t{set_view(op, o, t, views[i])} << i;
        device = t.device();
        if (!device.is_cpu() && !without_gpu.empty())
            fail(op.name, ": ", o.name, " is on ", device.str(), ", but ", without_gpu);
    }
    check_memory(op, views, scalars, device.is_cpu() ? Backend::host : Backend::device, wide, fresh);
    // Autograd refuses saved tensors that have changed since.
    for (size_t i = 0; i < static_cast<size_t>(op.outputs); i++)
        if (!(fresh >> i & 1) && operands[i].defined() && !operands[i].is_inference())
            operands[i].unsafeGetTensorImpl()->bump_version();
    if (!device.is_cpu()) return run_on_device(op, views, scalars, device);
    run(op, views, scalars);
}

template <class Function>
void with_value_errors(Function&& function) {
    try {
        function();
    } catch (const Error& e) {
        TORCH_CHECK_VALUE(false, e.what());
    }
}

}  // namespace

void refuse_gpus(std::string why) {
    without_gpu = std::move(why);
}

at::ScalarType torch_type(DType t) {
    static const auto types = [] {
        std::array<at::ScalarType, dtype_count> all;
        for (size_t i = 0; i < dtype_count; i++) {
            const dlpack::DataType& type = dtype_table[i].dlpack;
            all[i] = at::toScalarType({type.code, type.bits, type.lanes});
        }
        return all;
    }();
    return types[static_cast<size_t>(t)];
}

std::optional<DType> find_dtype(at::ScalarType type) {
    static const auto known = [] {
        std::array<std::optional<DType>, c10::NumScalarTypes> all;
        for (size_t i = 0; i < dtype_count; i++)
            all[static_cast<size_t>(torch_type(static_cast<DType>(i)))] = static_cast<DType>(i);
        return all;
    }();
    return known[static_cast<size_t>(type)];
}

// On a CPU as PyTorch's own kernels allocate; their call for a GPU is in a library that this one does not need.
at::Tensor allocate(at::IntArrayRef shape, at::ScalarType type, c10::Device device) {
    if (device.is_cpu()) return at::Tensor(at::detail::empty_cpu(shape, type));
    return at::empty(shape, at::TensorOptions(device).dtype(type));
}
at::Tensor allocate(c10::SymIntArrayRef shape, at::ScalarType type, c10::Device device) {
    return at::empty_symint(shape, at::TensorOptions(device).dtype(type));
}

void compute(const Operation& op, std::span<at::Tensor> operands, std::span<const Scalar> scalars,
             uint32_t fresh) {
    with_value_errors([&] { compute_or_fail(op, operands, scalars, fresh); });
}

void check_types(const Operation& op, std::span<const at::Tensor> operands, std::span<const Scalar> scalars) {
    with_value_errors([&] {
        check_scalars(op, scalars);
        Types types(op);
        for (size_t k = 0; k < operands.size(); k++) {
            const size_t i = op.in_order(k);
            const Operand& o = op.operands[i];
            if (operands[i].defined()) types.check(o, type_of(op, o, operands[i]));
        }
    });
}

}  // namespace llamac
