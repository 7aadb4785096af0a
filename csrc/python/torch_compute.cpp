#include "torch_compute.h"

#include <ATen/ATen.h>
#include <ATen/DLConvertor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

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
    if (has_halves(o, t)) return DType::i32;
    if (const std::optional<DType> known = find_dtype(t.scalar_type())) return *known;
    fail(op.name, ": ", o.name, " is ", c10::toString(t.scalar_type()), ", expected ",
         dtype_names(in_operations));
}

// The distance of rows that several dimensions number, where it is one; of one number for all rows it is 0.
std::optional<int64_t> distance_of_rows(const at::Tensor& t) {
    if (t.is_contiguous()) return 1;
    int64_t distance = 0, rows = 1;
    for (int64_t d = t.dim() - 1; d >= 0; d--) {
        if (t.size(d) == 1) continue;
        if (rows == 1) distance = t.stride(d);
        if (t.stride(d) != rows * distance) return std::nullopt;
        rows *= t.size(d);
    }
    return distance;
}

// Contiguous where the description wants it, copied if it has to be. What is written cannot be a copy:
// run() refuses it.
void arrange(const Operand& o, at::Tensor& t) {
    if (o.output || t.is_contiguous()) return;
    const bool in_rows = t.dim() <= 1 || t.size(-1) <= 1 || t.stride(-1) == 1;
    const bool as_described = o.shape.size() == 1
                                  ? distance_of_rows(t).has_value()
                                  : in_rows && t.dim() == static_cast<int64_t>(o.shape.size());
    if (!o.strided || !as_described) t = t.contiguous();
}

Tensor view(const Operation& op, const Operand& o, const at::Tensor& t) {
    Tensor r;
    r.data = t.data_ptr();
    r.dtype = type_of(op, o, t);
    r.rank = static_cast<int>(o.shape.size());
    const int64_t step = has_halves(o, t) ? 2 : 1;
    if (t.dim() == r.rank) {
        for (int d = 0; d < r.rank; d++) r.shape[d] = t.size(d), r.stride[d] = step * t.stride(d);
        return r;
    }
    const bool rows_alone = o.strided && !o.output && r.rank == 1;
    if (!rows_alone && !t.is_contiguous()) fail(op.name, ": ", o.name, " must be contiguous");
    int64_t rest = rows_alone ? distance_of_rows(t).value() : 1;
    for (int d = r.rank - 1; d > 0; d--) {
        r.shape[d] = t.size(d - r.rank), r.stride[d] = rest;
        rest *= r.shape[d];
    }
    r.shape[0] = 1, r.stride[0] = step * rest;
    for (int64_t d = 0; d <= t.dim() - r.rank; d++) r.shape[0] *= t.size(d);
    return r;
}

std::string without_gpu;  // set once, before any call

// On the current stream. The workspace comes from torch's allocator, which knows of streams and graphs.
void run_on_device(const Operation& op, std::vector<Tensor> views, const std::vector<Scalar>& scalars,
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
    run(op, std::move(views), scalars, context);
}

void compute_or_fail(const Operation& op, std::vector<at::Tensor> operands,
                     const std::vector<Scalar>& scalars) {
    CHECK(operands.size() == op.operands.size() && scalars.size() == op.scalars.size());
    std::vector<Tensor> views(operands.size());
    uint32_t wide = 0;
    c10::Device device = at::kCPU;
    for (size_t k = 0; k < operands.size(); k++) {
        const size_t i = op.in_order(k);
        const Operand& o = op.operands[i];
        at::Tensor& t = operands[i];
        if (!t.defined()) continue;
        arrange(o, t);
        views[i] = view(op, o, t);
        wide |= uint32_t{has_halves(o, t)} << i;
        device = t.device();
        if (!device.is_cpu() && !without_gpu.empty())
            fail(op.name, ": ", o.name, " is on ", device.str(), ", but ", without_gpu);
    }
    check_memory(op, views, scalars, device.is_cpu() ? Backend::host : Backend::device, wide);
    // Autograd refuses saved tensors that have changed since.
    for (size_t i = 0; i < operands.size(); i++)
        if (op.operands[i].output && operands[i].defined() && !operands[i].is_inference())
            operands[i].unsafeGetTensorImpl()->bump_version();
    if (!device.is_cpu()) return run_on_device(op, std::move(views), scalars, device);
    run(op, std::move(views), scalars);
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
    static const std::vector<at::ScalarType> types = [] {
        std::vector<at::ScalarType> all;
        for (const DTypeInfo& d : dtype_table)
            all.push_back(at::toScalarType({d.dlpack.code, d.dlpack.bits, d.dlpack.lanes}));
        return all;
    }();
    return types[static_cast<size_t>(t)];
}

std::optional<DType> find_dtype(at::ScalarType type) {
    for (size_t t = 0; t < dtype_count; t++)
        if (in_operations(dtype_table[t]) && torch_type(static_cast<DType>(t)) == type)
            return static_cast<DType>(t);
    return std::nullopt;
}

void compute(const Operation& op, std::vector<at::Tensor> operands, const std::vector<Scalar>& scalars) {
    with_value_errors([&] { compute_or_fail(op, std::move(operands), scalars); });
}

void check_types(const Operation& op, const std::vector<at::Tensor>& operands,
                 const std::vector<Scalar>& scalars) {
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
