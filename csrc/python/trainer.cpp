// llamac._native.Trainer: the program's trainer (train/trainer.h) for Python. llamac/training/trainer.py checks its arguments.
#include "core/device_memory.h"
#include "train/save.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/config_json.h"
#include "core/json.h"
#include "native.h"
#include "run/flag_table.h"
#include "train/estimate.h"
#include "train/evaluate.h"

namespace py = pybind11;
using namespace py::literals;

namespace llamac {
namespace {

using Ids = py::array_t<int32_t, py::array::c_style>;

// The processes of a script that torchrun, mpirun or srun has started.
struct JoinedRanks {
    Ranks joined;

    explicit JoinedRanks(const Options& options) : joined(find_launch(), Patience(options)) {
        Options launched = options;
        launched.devices = 1;  // a script starts no processes
        joined.together("options", [&] { check_launch(joined, launched); });
        joined.compare(options, {});
        joined.connect_devices();
    }
};
struct JoinedTrainer : private JoinedRanks, Trainer {
    explicit JoinedTrainer(const Options& options)
        : JoinedRanks(options), Trainer(options, 0, joined) {}  // step() waits for its loss: nothing is ahead
};
using LockedTrainer = Locked<JoinedTrainer>;

// config: a TOML file, "", or None, as parse_options() takes it. layers: what begins the messages about an object with its keys, and
// the object as JSON.
using Layers = std::vector<std::pair<std::string, std::string>>;

Options options_of(const std::optional<std::string>& config, const Layers& layers) {
    std::vector<OptionValues> values;
    for (const auto& [where, text] : layers) values.push_back({where, parse_json(text, where + "options")});
    return parse_options(config, values);
}

std::unique_ptr<LockedTrainer> make_trainer(const std::optional<std::string>& config, const Layers& layers) {
    const Options options = options_of(config, layers);
    const py::gil_scoped_release others_run_on;
    return std::make_unique<LockedTrainer>(options);
}

py::dict as_dict(const StepResult& r) {
    return py::dict("step"_a = r.step, "loss"_a = r.loss, "grad_norm"_a = r.grad_norm, "lr"_a = r.lr,
                    "ms"_a = r.ms, "skipped"_a = r.skipped, "loss_scale"_a = r.loss_scale);
}

// tokens, targets: [tokens_per_rank], this rank's. counted: the loss is a mean over the targets that are not -100.
py::dict step(LockedTrainer& t, const Ids& tokens, const Ids& targets, bool counted) {
    CHECK(tokens.size() == t.tokens_per_rank() && targets.size() == t.tokens_per_rank());
    const int64_t rows = t.options.batch_size * t.options.seq_len;
    const Trainer::Fill batch = [&, from = tokens.data(), to = targets.data()](
                                    int64_t micro, int32_t* micro_tokens, int32_t* micro_targets) {
        std::copy_n(from + micro * rows, rows, micro_tokens);
        std::copy_n(to + micro * rows, rows, micro_targets);
    };
    const int64_t own =
        std::count_if(targets.data(), targets.data() + targets.size(), [](int32_t id) { return id >= 0; });
    return as_dict(in_turn(t, [&] {
        std::optional<int64_t> count;
        if (counted) count = static_cast<int64_t>(t.sum_over_data("targets", static_cast<double>(own)));
        if (count == 0) fail("step: expected a target that counts, found only -100");
        t.start_step(batch, count);
        return t.finish_step();
    }));
}

py::dict next_step(LockedTrainer& t) {
    return as_dict(in_turn(t, [&] {
        t.start_step();
        return t.finish_step();
    }));
}

// tokens, targets: [rows,T].
double loss_of(LockedTrainer& t, const Ids& tokens, const Ids& targets) {
    const int64_t rows = tokens.shape(0), T = tokens.shape(1);
    const int32_t *from = tokens.data(), *to = targets.data();
    const Turn turn(t);
    if (t.model.options.passes_exchange())  // equally often on all ranks
        for (const double each : t.ranks.gather("rows", static_cast<double>(rows)))
            if (each != static_cast<double>(rows))
                fail("validate: expected as many rows on all ranks, which share the weights, found ", rows,
                     " and ", each);
    return mean_loss_of(t, rows, T,
                        [&](int64_t first, int64_t count, int32_t* some_tokens, int32_t* some_targets) {
                            std::copy_n(from + first * T, count * T, some_tokens);
                            std::copy_n(to + first * T, count * T, some_targets);
                        });
}

// {task: its score}.
py::dict scores_of(LockedTrainer& t) {
    py::dict all;
    for (const Score& score : in_turn(t, [&] { return evaluate(t); }))
        all[score.task.c_str()] =
            py::dict("accuracy"_a = score.accuracy, "accuracy_norm"_a = score.accuracy_norm,
                     "questions"_a = score.questions);
    return all;
}

// In f32, which holds narrower types exactly; numpy has no bf16.
py::dict parameters(LockedTrainer& t) {
    py::dict all;
    std::vector<float*> to;
    for (const Parameter& p : t.model.parameters.table) {
        py::array_t<float> values(p.slice.whole);
        to.push_back(values.mutable_data());
        all[p.name.c_str()] =
            p.group.adapter && p.transposed ? py::object(values.attr("T")) : values;  // as in files
    }
    const Turn turn(t);
    size_t next = 0;
    visit_weights(t,
                  [&](const Parameter&, const Tensor& weight) { copy_as(DType::f32, to[next++], weight); });
    return all;
}

Options options_of_plan(const Layers& layers, const std::string& device, const std::string& memory,
                        int64_t per_node) {
    Options options = options_of("", layers);
    options.dry_run = true;
    options.device = device;
    options.devices_per_node = per_node;
    for (const FlagRow& flag : flags())
        if (flag.name == "device-memory") assign(options, flag, memory, "--device-memory");
    return planned_options(options);
}

double one_device(const Layers& layers, int64_t tokens, const std::string& device,
                  const std::string& memory) {
    return one_device_seconds(options_of_plan(layers, device, memory, 1), tokens, find_device(device));
}

py::dict plan(const Layers& layers, int64_t devices, const std::string& device, const std::string& memory,
              int64_t per_node) {
    const Options options = options_of_plan(layers, device, memory, per_node);
    const PlannedDevice planned_device = find_device(device);
    const Ranks ranks = planned_ranks(options, devices);
    Trainer t(options, {}, ranks);
    const Estimate e = estimate_step(t, planned_device);
    return py::dict("device"_a = planned_device.name, "available"_a = options.device_memory.bytes,
                    "memory"_a = e.memory, "seconds"_a = e.seconds, "flops"_a = e.flops, "moved"_a = e.moved,
                    "exchanged"_a = e.exchanged, "waited"_a = e.waited, "idle"_a = e.idle,
                    "micro_batches"_a = t.accumulation, "tokens_per_step"_a = t.tokens_per_step(),
                    "parameters"_a = count_parameters(t.config),
                    "assumptions"_a = assumptions(planned_device));
}

}  // namespace

void define_trainer(py::module_& m) {
    m.def(
        "options",
        [](const std::optional<std::string>& config, const Layers& layers) {
            return to_json(options_of(config, layers)).dump();
        },
        py::arg("config"), py::arg("layers"), "The options of a run, resolved, as JSON.");
    m.def("plan", &plan, py::arg("layers"), py::arg("devices"), py::arg("device"), py::arg("memory"),
          py::arg("per_node") = 8,
          "What a run takes on `devices` of the device, each with `memory` bytes (0: those of the table), as "
          "--dry-run says it.");
    m.def("one_device_seconds", &one_device, py::arg("layers"), py::arg("tokens"), py::arg("device"),
          py::arg("memory"),
          "The estimate of a step of so many tokens on one device, whose memory is taken to suffice.");
    py::class_<LockedTrainer>(m, "Trainer")
        .def(py::init(&make_trainer), py::arg("config"), py::arg("layers"))
        .def("step", &step)
        .def("step", &next_step)
        .def("validate", &loss_of)
        .def("validate", [](LockedTrainer& t) { return in_turn(t, [&] { return validate(t); }); })
        .def("evaluate", &scores_of)
        .def("sample",
             [](LockedTrainer& t, const std::vector<int32_t>& prompt, int64_t count, double temperature,
                int64_t top_k) {
                 return in_turn(t, [&] { return sample(t, prompt, count, temperature, top_k); });
             })
        .def("text_of", [](const LockedTrainer& t,
                           const std::vector<int32_t>& ids) { return py::bytes(text_of(t, ids)); })
        .def("first_token", [](const LockedTrainer& t) { return first_token(t); })
        .def("parameters", &parameters)
        .def("save", [](LockedTrainer& t,
                        const std::string& directory) { in_turn(t, [&] { save_to(t, directory); }); })
        .def_property_readonly("steps_done", [](const LockedTrainer& t) { return t.step; })
        .def_property_readonly("accumulation", [](const LockedTrainer& t) { return t.accumulation; })
        .def_property_readonly("warnings", [](const LockedTrainer& t) { return t.warnings; })
        .def_property_readonly("has_training_data",
                               [](const LockedTrainer& t) { return t.data.train.has_value(); })
        .def_property_readonly("has_validation_data",
                               [](const LockedTrainer& t) { return t.data.val.has_value(); })
        .def_property_readonly("options", [](const LockedTrainer& t) { return to_json(t.options).dump(); })
        .def_property_readonly("config", [](const LockedTrainer& t) {
            return config_json(t.config, t.model.options.precision.weights);
        });
}

}  // namespace llamac
