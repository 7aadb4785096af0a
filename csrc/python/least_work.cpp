// For llamac/extension.py, by ctypes: what a call must at least move and compute, in the module that runs it.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/registry.h"

namespace llamac {
namespace {

DType type_of(const Operand& o, const std::string& storage) {
    if (!o.type) return o.dtype;
    if (o.type == 'A') return storage == name(DType::f64) ? DType::f64 : DType::f32;
    for (const DType t : {DType::f32, DType::bf16, DType::f64})
        if (storage == name(t)) return t;
    fail("dtype ", storage, ": expected f32, bf16 or f64");
}

void find_least_work(const nlohmann::json& j, double* work) {
    const Operation& op = find_operation(j.at("operation"));
    std::vector<int64_t> size;
    for (const std::string& letter : op.dimensions) size.push_back(j.at("sizes").at(letter));
    const std::vector<std::string> absent = j.at("absent");
    static char somewhere;  // where an operand is that is there; nobody reads it
    std::vector<Tensor> tensors;
    for (const Operand& o : op.operands) {
        Tensor& t = tensors.emplace_back();
        if (std::find(absent.begin(), absent.end(), o.name) != absent.end()) continue;
        t.data = &somewhere;
        t.dtype = type_of(o, j.at("dtype"));
        for (const Dimension& d : o.shape)
            t.shape[t.rank++] =
                (d.symbol < 0 ? 1 : size[static_cast<size_t>(d.symbol)]) * d.factor / d.divisor;
    }
    const std::vector<Scalar> scalars(op.scalars.size(), Scalar(0));
    const Call call{&op, tensors.data(), scalars.data(), size.data(), {}};
    work[0] = least_bytes(call);
    work[1] = least_flops(call);
}

}  // namespace
}  // namespace llamac

// call: {"operation", "sizes" by dimension letter, "dtype" of T, G and M, "absent": operands left out}, as JSON.
// work: bytes, FLOPs. Returns what is wrong with the call; empty: nothing.
extern "C" __attribute__((visibility("default"))) const char* llamac_least_work(const char* call,
                                                                                double* work) {
    static thread_local std::string wrong;
    wrong.clear();
    try {
        llamac::find_least_work(nlohmann::json::parse(call), work);
    } catch (const std::exception& e) {
        wrong = e.what();
    }
    return wrong.c_str();
}
