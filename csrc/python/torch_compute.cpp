#include "torch_compute.h"

#include <ATen/ATen.h>
#include <ATen/DLConvertor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>

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

// The value that is no index. One that no int32, or lower half of a target, is would be ignored nowhere.
std::optional<int64_t> exception_of(const Operation& op, const Operand& o,
                                    const std::vector<Scalar>& scalars) {
    if (o.except < 0) return std::nullopt;
    const int64_t value = scalars[static_cast<size_t>(o.except)].integer;
    if (static_cast<int32_t>(value) != value)
        fail(op.name, ": ", op.scalars[static_cast<size_t>(o.except)].name, " is ", value,
             ", expected one of 32 bits");
    return value;
}
void check_exceptions(const Operation& op, const std::vector<Scalar>& scalars) {
    for (const Operand& o : op.operands) exception_of(op, o, scalars);
}

int64_t size_of_dimension(const Operation& op, const std::vector<Tensor>& views, int dimension) {
    for (size_t i = 0; i < views.size(); i++)
        for (int d = 0; d < views[i].rank; d++)
            if (const Dimension& known = op.operands[i].shape[static_cast<size_t>(d)];
                known.symbol == dimension)
                return views[i].shape[d] * known.divisor / known.factor;
    return 0;
}

// Values that address memory, where the host can see them: in bounds, or the scalar that means "none".
void check_bounds(const Operation& op, const std::vector<at::Tensor>& operands,
                  const std::vector<Tensor>& views, const std::vector<Scalar>& scalars) {
    for (size_t i = 0; i < views.size(); i++) {
        const Operand& o = op.operands[i];
        if (o.bound < 0 || views[i].dtype != DType::i32) continue;
        const int64_t below = size_of_dimension(op, views, o.bound);
        if (below <= 0) continue;  // run() says it
        const bool wide = has_halves(o, operands[i]);
        const std::optional<int64_t> none = exception_of(op, o, scalars);
        for (int64_t n = 0; n < views[i].elements(); n++) {
            const int32_t* at = views[i].as<int32_t>() + n * views[i].stride[0];
            const int64_t value = wide ? *reinterpret_cast<const int64_t*>(at) : *at;
            if (value != none && (value < 0 || value >= below))
                fail(op.name, ": ", o.name, " holds ", value, ", expected values from 0 to ", below - 1);
        }
    }
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
    check_exceptions(op, scalars);
    std::vector<Tensor> views(operands.size());
    c10::Device device = at::kCPU;
    for (size_t k = 0; k < operands.size(); k++) {
        const size_t i = op.in_order(k);
        const Operand& o = op.operands[i];
        at::Tensor& t = operands[i];
        if (!t.defined()) continue;
        arrange(o, t);
        views[i] = view(op, o, t);
        device = t.device();
        if (!device.is_cpu() && !without_gpu.empty())
            fail(op.name, ": ", o.name, " is on ", device.str(), ", but ", without_gpu);
    }
    if (device.is_cpu()) check_bounds(op, operands, views, scalars);
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
        if (dtype_table[t].in_operations && torch_type(static_cast<DType>(t)) == type)
            return static_cast<DType>(t);
    return std::nullopt;
}

void compute(const Operation& op, std::vector<at::Tensor> operands, const std::vector<Scalar>& scalars) {
    with_value_errors([&] { compute_or_fail(op, std::move(operands), scalars); });
}

void check_types(const Operation& op, const std::vector<at::Tensor>& operands,
                 const std::vector<Scalar>& scalars) {
    with_value_errors([&] {
        check_exceptions(op, scalars);
        Types types(op);
        for (size_t k = 0; k < operands.size(); k++) {
            const size_t i = op.in_order(k);
            const Operand& o = op.operands[i];
            if (operands[i].defined()) types.check(o, type_of(op, o, operands[i]));
        }
    });
}

}  // namespace llamac
