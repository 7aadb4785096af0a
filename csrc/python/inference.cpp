// llamac._native.Inference: train/inference.h for Python. llamac/inference/model.py checks its arguments.
#include "train/inference.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "native.h"
#include "train/sample.h"

namespace py = pybind11;

namespace llamac {
namespace {

using Ids = py::array_t<int32_t, py::array::c_style>;
using Prompts = std::vector<std::vector<int32_t>>;

using LockedInference = Locked<Inference>;

std::unique_ptr<LockedInference> make_inference(const std::string& model, const std::string& dtype,
                                                int64_t batch_size, int64_t seq_len, int64_t sequences,
                                                int64_t positions, const std::vector<std::string>& kernels) {
    const InferenceOptions options{model,   float_dtype(dtype),     batch_size,
                                   seq_len, {sequences, positions}, kernels};
    const py::gil_scoped_release others_run_on;
    return std::make_unique<LockedInference>(options);
}

using SamplingFields =
    std::tuple<double, int64_t, double, uint64_t, uint32_t>;  // temperature, top_k, top_p, seed, step

// samplings: of each prompt. made(prompt, token) -> whether the sequence continues; None: no callback.
Prompts generate_for_python(LockedInference& of, const Prompts& prompts, int64_t count,
                            const std::vector<int32_t>& stops, const std::vector<SamplingFields>& samplings,
                            const py::object& made) {
    std::vector<Sampling> choices;
    for (const auto& [temperature, top_k, top_p, seed, step] : samplings)
        choices.push_back({temperature, top_k, seed, step, top_p});
    const auto tell = [&](size_t prompt, int32_t token) {
        const py::gil_scoped_acquire python;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        return made.is_none() || py::cast<bool>(made(prompt, token));
    };
    const Turn turn(of);
    return generate_all(of.model, prompts, {count, stops}, choices, tell);
}

py::array_t<float> next_logits_of(LockedInference& of, const std::vector<int32_t>& tokens, size_t prompt) {
    const std::vector<float> logits = in_turn(of, [&] { return of.next_logits(tokens, prompt); });
    const int64_t V = of.model.config.V;
    py::array_t<float> array({static_cast<int64_t>(logits.size()) / V, V});
    std::copy(logits.begin(), logits.end(), array.mutable_data());
    return array;
}

// tokens, targets: [B,T]. (losses [B,T], whether each target is the likeliest [B,T], or None).
py::tuple score_rows(LockedInference& of, const Ids& tokens, const Ids& targets, bool wants_likeliest) {
    const int64_t B = tokens.shape(0), T = tokens.shape(1);
    const ModelOptions& options = of.model.options;
    if (targets.ndim() != 2 || targets.shape(0) != B || targets.shape(1) != T || T > options.seq_len ||
        B * T > options.batch_size * options.seq_len)
        fail("score: expected tokens and targets of one shape, of rows of at most ", options.seq_len,
             " and in all at most ", options.batch_size * options.seq_len, " tokens, found ", B, " rows of ",
             T);
    py::array_t<float> losses({B, T});
    py::array_t<bool> likeliest({B, wants_likeliest ? T : 0});
    const std::span<float> all(losses.mutable_data(), static_cast<size_t>(losses.size()));
    const std::span<bool> flags(likeliest.mutable_data(), static_cast<size_t>(likeliest.size()));
    const int32_t *from = tokens.data(), *to = targets.data();
    in_turn(of, [&] { of.score(from, to, B, T, all, flags); });
    return py::make_tuple(losses, wants_likeliest ? py::object(likeliest) : py::none());
}

}  // namespace

void define_inference(py::module_& m) {
    py::class_<LockedInference>(m, "Inference")
        .def(py::init(&make_inference), py::arg("model"), py::arg("dtype"), py::arg("batch_size"),
             py::arg("seq_len"), py::arg("sequences"), py::arg("positions"), py::arg("kernels"))
        .def_property_readonly("warnings", [](const LockedInference& of) { return of.warnings; })
        .def("generate", &generate_for_python)
        .def("next_logits", &next_logits_of)
        .def("score", &score_rows);
}

}  // namespace llamac
