// llamac._native: the registry for Python, free of torch. Arrays come as (address, dtype, shape, strides), so
// that numpy and torch serve alike; llamac/kernels.py makes them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <nlohmann/json.hpp>

#include "core/random.h"
#include "core/registry.h"
#include "model/config.h"
#include "train/options.h"
#include "train/schedule.h"
#include "train/tokens.h"

namespace py = pybind11;

namespace llamac {
namespace {

DType parse_dtype(const std::string& text) {
    for (DType t : {DType::f32, DType::bf16, DType::f64, DType::i32})
        if (text == name(t)) return t;
    fail("dtype ", text, ": expected f32, bf16, f64 or i32");
}

// (address, dtype, shape, strides in elements); None: an operand that is left out.
using Array = std::optional<std::tuple<uintptr_t, std::string, std::vector<int64_t>, std::vector<int64_t>>>;

Tensor tensor_of(const Array& array) {
    Tensor t;
    if (!array) return t;
    const auto& [address, dtype, shape, strides] = *array;
    if (shape.size() > Tensor::max_rank || strides.size() != shape.size())
        fail("an array of ", shape.size(), " dimensions and ", strides.size(),
             " strides, expected at most 4 of each");
    t.data = reinterpret_cast<void*>(address);
    t.dtype = parse_dtype(dtype);
    for (size_t d = 0; d < shape.size(); d++, t.rank++) t.shape[d] = shape[d], t.stride[d] = strides[d];
    return t;
}

py::dict describe_operand(const Operation& op, const Operand& o) {
    py::list shape;
    for (const Dimension& d : o.shape)
        shape.append(py::make_tuple(d.symbol < 0 ? "" : op.dimensions[static_cast<size_t>(d.symbol)],
                                    d.factor, d.divisor));
    py::dict r;
    r["name"] = o.name;
    r["type"] = o.type ? std::string(1, o.type) : name(o.dtype);
    r["shape"] = shape;
    r["output"] = o.output;
    r["nullable"] = o.nullable;
    r["accumulated"] = o.accumulated;
    r["in_place"] = o.in_place;
    r["strided"] = o.strided;
    r["positive"] = o.positive;
    r["bound"] = o.bound < 0 ? "" : op.dimensions[static_cast<size_t>(o.bound)];
    return r;
}

py::dict describe_variant(const Variant& v) {
    py::list types;  // one list of dtypes, operand by operand, for each combination that the variant takes
    for (const Entry& e : v.entries) {
        py::list row;
        for (const Slot& s : e.operands) row.append(name(s.dtype));
        types.append(row);
    }
    py::dict r;
    r["name"] = v.name;
    r["idea"] = v.idea;
    r["where"] = v.where == Where::host ? "host" : "device";
    r["types"] = types;
    return r;
}

py::dict describe_operation(const Operation& op) {
    py::list operands, variants, scalars;
    for (const Operand& o : op.operands) operands.append(describe_operand(op, o));
    for (const Variant& v : op.variants) variants.append(describe_variant(v));
    for (const ScalarInfo& s : op.scalars) scalars.append(py::make_tuple(s.name, std::string(1, s.kind)));
    py::dict r;
    r["name"] = op.name;
    r["summary"] = op.summary;
    r["operands"] = operands;
    r["variants"] = variants;
    r["scalars"] = scalars;
    return r;
}

py::list kernels() {
    py::list all;
    for (const Operation* op : operations()) all.append(describe_operation(*op));
    return all;
}

bool is_device_variant(const Operation& op, const std::string& variant) {
    for (const Variant& v : op.variants)
        if (variant == v.name) return v.where == Where::device;
    return false;
}

// Elements from a tensor's first to its last, gaps of its strides included.
int64_t span_bytes(const Tensor& t) {
    int64_t elements = 1;
    for (int d = 0; d < t.rank; d++) elements += (t.shape[d] - 1) * t.stride[d];
    return t.elements() ? elements * size_of(t.dtype) : 0;
}

// The host's arrays go to the device and back.
void run_on_device(const Operation& op, const std::vector<Tensor>& tensors,
                   const std::vector<Scalar>& scalars, const char* variant) {
    std::vector<DeviceMemory> memory;
    std::vector<Tensor> copies = tensors;
    for (Tensor& t : copies) {
        if (!t.data) continue;
        memory.emplace_back(span_bytes(t));
        copy_bytes(memory.back().data, t.data, span_bytes(t));
        t.data = memory.back().data;
    }
    run(op, copies, scalars, {Where::device, nullptr, nullptr}, variant);
    CHECK(hipDeviceSynchronize());
    for (size_t i = 0; i < tensors.size() && static_cast<int>(i) < op.outputs; i++)
        if (tensors[i].data) copy_bytes(tensors[i].data, copies[i].data, span_bytes(tensors[i]));
}

void run_operation(const std::string& operation, const std::vector<Array>& arrays,
                   const std::vector<py::object>& values, const std::string& variant) {
    const Operation& op = find_operation(operation);
    std::vector<Tensor> tensors;
    for (const Array& a : arrays) tensors.push_back(tensor_of(a));
    std::vector<Scalar> scalars;
    for (const py::object& v : values)
        scalars.push_back(py::isinstance<py::float_>(v) ? Scalar(v.cast<double>())
                                                        : Scalar(v.cast<int64_t>()));
    const py::gil_scoped_release release;
    if (is_device_variant(op, variant)) return run_on_device(op, tensors, scalars, variant.c_str());
    run(op, tensors, scalars, {}, variant.empty() ? nullptr : variant.c_str());
}

py::tuple describe_model(const std::string& model, int64_t seq_len) {
    const Config c = load_config(model);
    return py::make_tuple(c.parameters(), c.flops_per_token(seq_len), config_json(c, DType::f32));
}

using Ids = py::array_t<int32_t, py::array::c_style>;

void read_micro_batch(const std::string& pattern, int64_t seq_len, int64_t vocab_size, int64_t batch_size,
                      int64_t accumulation, uint64_t seed, int64_t update, int64_t micro, int64_t rank,
                      int64_t world, Ids tokens, Ids targets) {
    for (const Ids& ids : {tokens, targets})
        if (ids.size() != batch_size * seq_len)
            fail("an array of token ids: expected ", batch_size, " x ", seq_len, " elements, found ",
                 ids.size());
    const Loader loader(pattern, seq_len, vocab_size, batch_size, accumulation, seed);
    loader.micro_batch(update, micro, rank, world, tokens.mutable_data(), targets.mutable_data());
}

}  // namespace
}  // namespace llamac

PYBIND11_MODULE(_native, m) {
    using namespace llamac;
    m.doc() = "The registry of llamac's operations, and the rules that C and Python share.";
    py::register_exception<Error>(m, "Error", PyExc_ValueError);
    m.def("kernels", &kernels, "Every operation: operands, scalars and variants, as its description says.");
    m.def("run", &run_operation, py::arg("operation"), py::arg("arrays"), py::arg("scalars"),
          py::arg("variant") = "",
          "Runs one call on host memory. arrays: outputs, then inputs; None for one that is left out.");
    m.def("permute", &permute, py::arg("index"), py::arg("size"), py::arg("seed"), py::arg("epoch"),
          "Where the data order takes an index in this epoch.");
    m.def("random_normal", &random_normal, py::arg("seed"), py::arg("step"), py::arg("stream"),
          py::arg("element"));
    m.def("random_words", [](uint64_t seed, uint32_t step, uint32_t stream, int64_t block) {
        const Philox p = random_block(seed, step, stream, block);
        return py::make_tuple(p.word[0], p.word[1], p.word[2], p.word[3]);
    });
    m.def("learning_rate", [](int64_t step, double lr, double min_lr_frac, int64_t warmup_steps,
                              int64_t steps, const std::string& schedule) {
        return learning_rate({schedule, lr, min_lr_frac, warmup_steps, steps}, step);
    });
    m.def("default_options", [] { return to_json(Options{}).dump(); }, "Every flag's default, as JSON.");
    m.def("model", &describe_model, py::arg("model"), py::arg("seq_len"),
          "Parameters, FLOPs a token and the config.json of a preset, file or folder.");
    m.def("micro_batch", &read_micro_batch, "Fills tokens and targets [B,T], as the program draws them.");
}
