// llamac._native: the registry and the trainer for Python, without torch, behind llamac/base/registry.py and
// llamac/training/trainer.py.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "arrays.h"
#include "checkpoint/config_json.h"
#include "checkpoint/manifest.h"
#include "core/call_checks.h"
#include "core/device_memory.h"
#include "core/dispatch.h"
#include "core/library_gemm.h"
#include "core/random.h"
#include "core/registry.h"
#include "data/tokens.h"
#include "model/parameters.h"
#include "native.h"
#include "platform/cpu_level.h"
#include "program/spikes.h"
#include "run/flag_table.h"
#include "run/options.h"
#include "run/schedule.h"
#include "run/version.h"

namespace py = pybind11;
using namespace py::literals;

namespace llamac {
namespace {

template <class Named>
std::string name_in(const std::vector<Named>& all, int i) {
    return i < 0 ? "" : all[i].name;
}

py::dict describe_operand(const Operation& op, const Operand& o) {
    py::list shape, may_share;
    for (const Dimension& d : o.shape)
        shape.append(py::make_tuple(name_in(op.dimensions, d.symbol), d.factor, d.divisor));
    for (const int i : o.may_share) may_share.append(name_in(op.operands, i));
    return py::dict("name"_a = o.name, "type"_a = type_text(op, o), "shape"_a = shape, "output"_a = o.output,
                    "nullable"_a = o.nullable, "adds_if"_a = name_in(op.scalars, o.adds_if),
                    "except"_a = name_in(op.scalars, o.except), "random"_a = name_in(op.scalars, o.random),
                    "may_share"_a = may_share, "in_place"_a = o.in_place, "strided"_a = o.strided,
                    "positive"_a = o.positive, "rounded"_a = o.rounded,
                    "begins"_a = name_in(op.dimensions, o.begins), "ends"_a = name_in(op.dimensions, o.ends),
                    "bound"_a = name_in(op.dimensions, o.bound), "with"_a = name_in(op.operands, o.with));
}

py::dict describe_variant(const Variant& v) {
    py::list types;  // one list of dtypes, operand by operand, for each combination that the variant takes
    for (const Instantiation& e : v.instantiations) {
        py::list row;
        for (const ParameterType& s : e.operands) row.append(name(s.dtype));
        types.append(row);
    }
    py::list threads;
    for (const int choice : v.threads) threads.append(choice);
    return py::dict("name"_a = v.name, "idea"_a = v.idea,
                    "where"_a = v.backend() == Backend::host ? "host" : "device", "types"_a = types,
                    "limits"_a = v.supports.words, "threads"_a = threads, "chip"_a = v.chip);
}

py::dict describe_operation(const Operation& op) {
    const Variant* first = first_choice(op);
    py::list operands, variants, scalars, not_negative, dimensions;
    py::dict values, types;
    for (const Operand& o : op.operands) operands.append(describe_operand(op, o));
    for (const Variant& v : op.variants) variants.append(describe_variant(v));
    for (const ScalarInfo& s : op.scalars) {
        scalars.append(py::make_tuple(s.name, std::string(1, s.kind)));
        values[py::str(s.name)] = s.values;
        if (s.not_negative) not_negative.append(s.name);
    }
    for (const TypeLetter& t : op.types) {
        py::list choices;
        for (const DType choice : t.choices) choices.append(name(choice));
        types[py::str(std::string(1, t.letter))] = choices;
    }
    for (const DimensionInfo& d : op.dimensions)
        dimensions.append(py::dict("name"_a = d.name, "may_be_zero"_a = d.may_be_zero, "rows"_a = d.splits,
                                   "multiple_of"_a = name_in(op.dimensions, d.multiple_of),
                                   "at_most"_a = name_in(op.dimensions, d.at_most)));
    return py::dict("name"_a = op.name, "summary"_a = op.summary, "types"_a = types,
                    "dimensions"_a = dimensions, "operands"_a = operands, "variants"_a = variants,
                    "scalars"_a = scalars, "values"_a = values, "not_negative"_a = not_negative,
                    "default"_a = first ? py::object(py::str(first->name)) : py::none());
}

py::list dtypes() {
    py::list all;
    for (const DTypeInfo& d : dtype_table)
        all.append(py::dict("name"_a = d.name, "bytes"_a = d.bytes, "mantissa_bits"_a = d.mantissa_bits,
                            "arithmetic"_a = name(d.arithmetic), "is_float"_a = is_float(d),
                            "safetensors"_a = d.safetensors, "python"_a = d.python,
                            "dlpack"_a = py::make_tuple(d.dlpack.code, d.dlpack.bits, d.dlpack.lanes),
                            "library"_a = d.library));
    return all;
}

py::list kernels() {
    py::list all;
    for (const Operation* op : operations()) all.append(describe_operation(*op));
    return all;
}

bool is_device_variant(const Operation& op, const std::string& variant) {
    for (const Variant& v : op.variants)
        if (variant == v.name) return v.backend() == Backend::device;
    return false;
}

// Without the gaps between strides, which may belong to another operand.
void copy_elements(const Tensor& t, char* to, const char* from, int d = 0) {
    if (d == t.rank || d == Tensor::max_rank) {  // the second: g++ 16 does not know that rank is at most that
        std::memcpy(to, from, static_cast<size_t>(size_of(t.dtype)));
        return;
    }
    for (int64_t i = 0; i < t.shape[d]; i++) {
        const int64_t at = i * t.stride[d] * size_of(t.dtype);
        copy_elements(t, to + at, from + at, d + 1);
    }
}

// The host's arrays go to the device and back.
void run_on_copies(const Operation& op, const std::vector<Array>& arrays, const std::vector<Tensor>& tensors,
                   const std::vector<Scalar>& scalars, const char* variant) {
    std::vector<DeviceMemory> memory;
    std::vector<Tensor> copies = tensors;
    for (size_t i = 0; i < arrays.size(); i++) {
        if (!copies[i].data) continue;
        memory.emplace_back(arrays[i].span_bytes());
        copy_bytes(memory.back().data, arrays[i].data, arrays[i].span_bytes());
        copies[i].data = memory.back().data;
    }
    run(op, copies, scalars, {.backend = Backend::device}, variant);
    CHECK(hipDeviceSynchronize());
    for (size_t i = 0; i < arrays.size() && static_cast<int>(i) < op.outputs; i++)
        if (copies[i].data) {
            std::vector<char> span(static_cast<size_t>(arrays[i].span_bytes()));
            copy_bytes(span.data(), copies[i].data, arrays[i].span_bytes());
            copy_elements(tensors[i], static_cast<char*>(arrays[i].data), span.data());
        }
}

// Device arrays, in place. Without a stream of the caller's: the default one, and done on return.
void run_in_place(const Operation& op, const std::vector<Tensor>& tensors, const std::vector<Scalar>& scalars,
                  const char* variant, std::optional<int64_t> stream) {
    // Per thread and stream, on which calls are ordered.
    static thread_local std::map<std::pair<int, int64_t>, Workspace> workspaces;
    const int64_t number = stream.value_or(0);
    Workspace& workspace = workspaces[{current_device(), number}];
    run(op, tensors, scalars,
        {.backend = Backend::device,
         .stream = reinterpret_cast<hipStream_t>(number),
         .workspace = &workspace},
        variant);
    if (!stream) CHECK(hipDeviceSynchronize());
}

// A call's arrays, all of them on the host or all on the device.
struct Operands {
    std::vector<Array> arrays;
    std::vector<Tensor> tensors;  // null where an operand is left out
    bool on_device = false;
    std::string first;  // the name of the first that is there

    void add(const Operation& op, py::handle object, std::optional<int64_t> stream) {
        const size_t i = arrays.size();
        Array& array = arrays.emplace_back();
        Tensor& tensor = tensors.emplace_back();
        if (object.is_none()) return;
        const bool known = i < op.operands.size();
        const std::string name = known ? op.operands[i].name : "array " + std::to_string(i);
        const std::string what = op.name + ": " + name;
        array = array_of(object, what, stream);
        tensor = tensor_of(array, what);
        if (known && op.operands[i].output && array.read_only)
            fail(what, ": is read-only, expected an array that can be written");
        if (first.empty()) first = name, on_device = array.on_device;
        const auto place = [](bool device) { return device ? "on the device" : "in host memory"; };
        if (array.on_device != on_device)
            fail(op.name, ": ", first, " is ", place(on_device), ", ", name, " is ", place(array.on_device),
                 ": expected all of them in one place");
    }
};

// As in PyTorch, a bool is also a number; nothing is rounded to an integer.
Scalar scalar_of(const Operation& op, const ScalarInfo& s, py::handle value) {
    py::detail::make_caster<double> real;
    py::detail::make_caster<int64_t> integer;
    py::detail::make_caster<bool> truth;
    if (s.kind == 'f' && real.load(value, true)) return double{real};
    if (s.kind == 'b' && truth.load(value, false)) return bool{truth};
    if (s.kind != 'f' && integer.load(value, false)) return int64_t{integer};
    std::string found = py::type::of(value).attr("__name__").cast<std::string>();
    if (py::isinstance<py::int_>(value))
        found += " of " + value.attr("bit_length")().attr("__str__")().cast<std::string>() + " bits";
    fail(op.name, ": ", s.name, " is ", found, ", expected ",
         s.kind == 'f'   ? "a number"
         : s.kind == 'i' ? "an integer of 64 bits"
                         : "a bool");
}

std::vector<Scalar> scalars_of(const Operation& op, const std::vector<py::object>& values) {
    if (values.size() > op.scalars.size())
        fail(op.name, ": expected ", op.scalars.size(), " scalars, found ", values.size());
    std::vector<Scalar> scalars;
    for (const py::object& value : values)
        scalars.push_back(scalar_of(op, op.scalars[scalars.size()], value));
    return scalars;
}

void run_operation(const std::string& operation, const std::vector<py::object>& objects,
                   const std::vector<py::object>& values, const std::string& variant,
                   std::optional<int64_t> stream) {
    const Operation& op = find_operation(operation);
    Operands operands;
    for (const py::object& object : objects) operands.add(op, object, stream);
    const std::vector<Scalar> scalars = scalars_of(op, values);
    const char* named = variant.empty() ? nullptr : variant.c_str();
    const py::gil_scoped_release others_run_on;
    check_memory(op, operands.tensors, scalars, operands.on_device ? Backend::device : Backend::host);
    if (operands.on_device) return run_in_place(op, operands.tensors, scalars, named, stream);
    if (is_device_variant(op, variant))
        return run_on_copies(op, operands.arrays, operands.tensors, scalars, named);
    run(op, operands.tensors, scalars, {}, named);
}

// Of a call with these sizes, in storage of one type.
py::tuple find_least_work(const std::string& operation, const std::map<std::string, int64_t>& sizes,
                          const std::string& dtype, const std::vector<std::string>& absent) {
    const Operation& op = find_operation(operation);
    std::vector<int64_t> size;
    for (const DimensionInfo& d : op.dimensions) {
        const auto limited = std::find_if(op.dimensions.begin(), op.dimensions.end(), [&](const auto& e) {
            return e.at_most >= 0 && &op.dimensions[e.at_most] == &d;
        });
        auto found = sizes.find(d.name);
        if (found == sizes.end() && limited != op.dimensions.end()) found = sizes.find(limited->name);
        if (found == sizes.end()) fail(operation, ": expected the size ", d.name, ", found none");
        size.push_back(found->second);
    }
    const DType storage = float_dtype(dtype);
    static char somewhere;  // the address of present operands; never read
    std::vector<Tensor> tensors;
    for (const Operand& o : op.operands) {
        Tensor& t = tensors.emplace_back();
        if (std::find(absent.begin(), absent.end(), o.name) != absent.end()) continue;
        t.data = &somewhere;
        t.dtype = o.letter < 0 ? o.dtype : op.types[o.letter].beside(storage);
        for (const Dimension& d : o.shape)
            t.shape[t.rank++] = (d.symbol < 0 ? 1 : size[d.symbol]) * d.factor / d.divisor;
    }
    std::vector<Scalar> scalars;
    for (const ScalarInfo& s : op.scalars) scalars.emplace_back(s.missing.value_or(0));
    const Call call{&op, tensors.data(), scalars.data(), size.data(), {}};
    return py::make_tuple(least_bytes(call), least_flops(call));
}

py::tuple describe_model(const std::string& model, int64_t seq_len) {
    const Config c = load_config(model);
    return py::make_tuple(count_parameters(c), flops_per_token(c, seq_len), config_json(c, DType::f32));
}

using Ids = py::array_t<int32_t, py::array::c_style>;

void read_micro_batch(const std::string& pattern, int64_t seq_len, int64_t vocab_size, int64_t batch_size,
                      int64_t accumulation, uint64_t seed, int64_t step, int64_t micro, int64_t rank,
                      int64_t world, Ids tokens, Ids targets, int64_t skip, double probability, int32_t mask,
                      const std::vector<bool>& special, const std::vector<bool>& continues) {
    for (const Ids& ids : {tokens, targets})
        if (ids.size() != batch_size * seq_len)
            fail("an array of token ids: expected ", batch_size, " x ", seq_len, " elements, found ",
                 ids.size());
    Loader loader(pattern, seq_len, vocab_size, batch_size, accumulation, seed);
    if (!special.empty()) loader.masking = Masking{probability, mask, special, seed, continues};
    loader.micro_batch(step, micro, rank, world, tokens.mutable_data(), targets.mutable_data(), skip);
}

// tokens, first: [rows,T].
void find_documents_of(const Ids& tokens, int32_t begin, int32_t end, Ids first) {
    CHECK(tokens.ndim() == 2 && first.size() == tokens.size());
    find_documents(tokens.data(), tokens.shape(0), tokens.shape(1), {begin, end}, first.mutable_data());
}

// The step, and name, bytes and hash of each file; nothing for a damaged text.
std::optional<py::tuple> read_manifest(const std::string& text, const std::string& where) {
    if (!is_whole_manifest(text)) return {};
    const Manifest manifest = parse_manifest(text, where);
    py::list files;
    for (const FileRecord& file : manifest.files)
        files.append(py::make_tuple(file.name, file.bytes, hex(file.xxh3)));
    return py::make_tuple(manifest.step, files);
}

// (step, quantity, found, expected, allowed) of every spike in the losses and norms of a run.
py::list find_spikes(const std::vector<double>& losses, const std::vector<double>& grad_norms) {
    SpikeDetector detector;
    py::list found;
    for (size_t i = 0; i < losses.size(); i++)
        for (const Spike& s : detector.add(losses[i], grad_norms.at(i)))
            found.append(py::make_tuple(i + 1, s.quantity, s.found, s.expected, s.allowed));
    return found;
}

}  // namespace
}  // namespace llamac

PYBIND11_MODULE(_native, m) {
    using namespace llamac;
    m.doc() = "The registry of llamac's operations, and the rules that C and Python share.";
    raise_failed_checks();
    const py::module_ errors = py::module_::import("llamac.base.errors");
    // Never given back: the interpreter is gone before this library's statics are.
    static const py::handle error = py::object(errors.attr("InputError")).release();
    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            std::rethrow_exception(thrown);
        } catch (const Error& e) {
            const std::string_view text = e.what();  // may quote any bytes of a file or a name
            const auto size = static_cast<Py_ssize_t>(text.size());
            const auto decoded = py::reinterpret_steal<py::object>(
                PyUnicode_DecodeUTF8(text.data(), size, "backslashreplace"));
            PyErr_SetObject(error.ptr(), decoded.ptr());
        }
    });
    define_trainer(m);
    define_inference(m);
    m.def("cpu_level", &cpu_level,
          "The level of the operations, as platform/cpu_level.h has it; empty: there is one.");
    m.def("without_gemm_library", &without_gemm_library,
          "What the lack of the vendor's library costs, as core/library_gemm.h has it; empty: it is there.");
    m.def(
        "computes_on_device", [] { return computing_backend() == Backend::device; },
        "Whether this build's models compute on a GPU.");
    m.def("engines", &engines_text,
          "By what several processes of a run communicate, as --version prints it.");
    m.def("dtypes", &dtypes, "The table of storage types.");
    m.def("kernels", &kernels, "Every operation: operands, scalars and variants, as its description says.");
    m.def("run", &run_operation, py::arg("operation"), py::arg("arrays"), py::arg("scalars"),
          py::arg("variant") = "", py::arg("stream") = py::none(),
          "Runs one call. arrays: outputs, then inputs; None for one that is left out.");
    m.def("least_work", &find_least_work, py::arg("operation"), py::arg("sizes"), py::arg("dtype"),
          py::arg("absent"), "(bytes, FLOPs) that a call must at least move and compute.");
    m.def(
        "host_array",
        [](const py::object& object, const std::string& what) {
            return host_array(array_of(object, what), what);
        },
        py::arg("array"), py::arg("what"), "The array as numpy's, copied if it is on the device.");
    m.def("permute", &permute, py::arg("index"), py::arg("size"), py::arg("seed"), py::arg("epoch"),
          "Where the data order takes an index in this epoch.");
    m.def("random_normal", &random_normal, py::arg("seed"), py::arg("step"), py::arg("stream"),
          py::arg("element"));
    m.def("random_bits", [](uint64_t seed, uint32_t step, uint32_t stream, int64_t block) {
        const Philox p = random_block(seed, step, stream, block);
        return py::make_tuple(p.bits[0], p.bits[1], p.bits[2], p.bits[3]);
    });
    m.def("learning_rate", [](int64_t step, double lr, double min_lr_frac, int64_t warmup_steps,
                              int64_t steps, const std::string& schedule) {
        Options o;
        o.schedule = find_choice<ScheduleShape>(schedule).value();
        o.lr = lr, o.min_lr_frac = min_lr_frac, o.warmup_steps = warmup_steps, o.steps = steps;
        return learning_rate(o, step);
    });
    m.def("default_options", [] { return to_json(Options{}).dump(); }, "Every flag's default, as JSON.");
    m.def("model", &describe_model, py::arg("model"), py::arg("seq_len"),
          "Parameters, FLOPs a token and the config.json of a preset, file or folder.");
    m.def("manifest", &read_manifest, py::arg("text"), py::arg("where"),
          "(step, [(name, bytes, XXH3_64)]) of a checkpoint's manifest; None where it is damaged.");
    m.def("find_documents", &find_documents_of);
    m.def("micro_batch", &read_micro_batch, py::arg("train_data"), py::arg("seq_len"), py::arg("vocab_size"),
          py::arg("batch_size"), py::arg("accumulation"), py::arg("seed"), py::arg("step"), py::arg("micro"),
          py::arg("rank"), py::arg("world"), py::arg("tokens"), py::arg("targets"), py::arg("skip") = 0,
          py::arg("probability") = 0.0, py::arg("mask") = 0, py::arg("special") = std::vector<bool>(),
          py::arg("continues") = std::vector<bool>(),
          "Fills tokens and targets [B,T], as the program draws them; special, continues [V]: those of "
          "masked tokens.");
    m.def("spikes", &find_spikes, py::arg("losses"), py::arg("grad_norms"),
          "(step, quantity, found, expected, allowed) of every spike.");
}
