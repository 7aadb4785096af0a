// debug_state REFERENCE OUT [dtype] [recompute] [logits bytes] [OPERATION=VARIANT ...] [fp8=RECIPE,GRADIENTS[,head]] [steps=N] [cp=N]
// The C model on the tokens of REFERENCE/debug_state.safetensors, from the weights in REFERENCE: writes every
// activation, gradient and the ten steps to OUT under the reference's names, in the order of computation. With `first`
// where the file has it: attention is masked.
// tests/model/test_model.py compares the two. fp8 (tests/model/test_fp8_model.py): products in fp8; also shows their scales and the
// gradient of qkv as it enters a product. lora=RANK,ALPHA,TARGET,...: with the adapters in REFERENCE (tests/train/test_adapters.py).
// steps: shows what follows so many optimizer steps, weights included. cp=N: one of N ranks of a context axis, which a launcher has
// started; shows the tensors of its own tokens (tests/train/test_meshes.py).
#include <deque>
#include <optional>

#include "checkpoint/config_json.h"
#include "checkpoint/weights.h"
#include "core/device_memory.h"
#include "core/words.h"
#include "data/tokens.h"
#include "model/optimizer.h"
#include "platform/threads.h"
#include "run/flag_table.h"
#include "run/ranks.h"
#include "safetensors_file.h"

using namespace llamac;

namespace {

// Copies of everything the model shows: later operations overwrite the originals.
struct Recorder {
    std::deque<std::vector<char>> memory;
    std::vector<NamedTensor> tensors;

    Tensor copy(const Tensor& t) {
        const int64_t size = size_of(t.dtype), row = t.shape[t.rank - 1] * size,
                      rows = t.elements() * size / row;
        memory.emplace_back(static_cast<size_t>(rows * row));
        for (int64_t r = 0; r < rows; r++) {
            int64_t offset = 0, rest = r;
            for (int d = t.rank - 2; d >= 0; rest /= t.shape[d--]) offset += rest % t.shape[d] * t.stride[d];
            copy_bytes(memory.back().data() + r * row, static_cast<char*>(t.data) + offset * size, row);
        }
        Tensor c = t;
        c.data = memory.back().data();
        int64_t stride = 1;
        for (int d = c.rank - 1; d >= 0; stride *= c.shape[d--]) c.stride[d] = stride;
        return c;
    }
    // Chunks of the logits follow one another under one name.
    void add(const std::string& name, const Tensor& value) {
        const Tensor c = copy(value);
        for (NamedTensor& t : tensors) {
            if (t.name != name) continue;
            std::vector<char> joined(static_cast<char*>(t.tensor.data),
                                     static_cast<char*>(t.tensor.data) + t.tensor.bytes());
            joined.insert(joined.end(), static_cast<char*>(c.data), static_cast<char*>(c.data) + c.bytes());
            t.tensor.shape[0] += c.shape[0];
            memory.push_back(std::move(joined));
            t.tensor.data = memory.back().data();
            return;
        }
        tensors.push_back({name, c});
    }
    void add_floats(const std::string& name, std::vector<float> values) {
        const int64_t n = static_cast<int64_t>(values.size());
        add(name, make_tensor(values.data(), DType::f32, {n}));
    }
};

// Behind the document of each token.
std::vector<int32_t> ends_of(const std::vector<int32_t>& first, int64_t T) {
    std::vector<int32_t> end(first.size());
    find_ends(first.data(), std::ssize(first) / T, T, end.data());
    return end;
}

// Optimizer steps on the batch that is set; {loss, gradient norm} of each.
std::vector<std::pair<float, float>> train(Model& model, const AdamW& adamw, float lr, int32_t first,
                                           int32_t count) {
    std::vector<std::pair<float, float>> results;
    for (int32_t step = first; step < first + count; step++) {
        forward_backward(model, true);
        const float loss = static_cast<float>(mean_loss(model));
        set_step(model, &lr, &step);
        float scale = 1;
        if (model.loss_scale.data) copy_bytes(&scale, model.loss_scale.data, sizeof scale);
        optimizer_step(model, adamw, 42);
        double squares = 0;
        copy_bytes(&squares, model.squares.data, sizeof squares);
        results.emplace_back(loss, static_cast<float>(grad_norm(squares, scale)));
    }
    return results;
}

void record_scales(Recorder& recorder, const Model& model) {
    const Fp8State& fp8 = *model.fp8;
    if (fp8.inverses.empty()) return recorder.add("fp8.scale", fp8.scale);
    for (int64_t slot = 0; slot < fp8.slots; slot++) {
        const BothOrientations& inverses = fp8.inverses[slot];
        recorder.add("fp8.inverse." + slot_name(model.config, slot) + ".rows", inverses.rows);
        recorder.add("fp8.inverse." + slot_name(model.config, slot) + ".transposed", inverses.transposed);
    }
}

void record(const std::string& reference, const std::string& out, const ModelOptions& base, int32_t steps,
            Communicator* ranks) {
    const SafetensorsFile file(reference + "/debug_state.safetensors");
    const SafetensorsFile::Entry* entry = file.find("tokens");
    if (!entry || entry->shape.size() != 2) fail(file.path(), ": tokens is missing or not [B,T]");
    const int64_t B = entry->shape[0], T = entry->shape[1];
    std::vector<int32_t> tokens(static_cast<size_t>(B * T)), targets(tokens.size());
    file.read("tokens", make_tensor(tokens.data(), DType::i32, {B, T}));
    file.read("targets", make_tensor(targets.data(), DType::i32, {B, T}));
    std::vector<int32_t> first(file.find("first") ? tokens.size() : 0);
    if (!first.empty()) file.read("first", make_tensor(first.data(), DType::i32, {B, T}));
    const auto setting = [&](const char* key) { return std::stod(file.metadata.at(key)); };

    ModelOptions options = base;
    options.batch_size = B;
    options.seq_len = T;
    options.document_mask = !first.empty();
    Model model(load_config(reference), options, ranks);
    model.allocate();
    load_weights(model.parameters, reference);
    if (model.lora) load_adapters(model.parameters, reference);
    const std::vector<int32_t> end = model.config.causal ? std::vector<int32_t>() : ends_of(first, T);
    // The loss is the mean over the targets that count.
    const auto counted = static_cast<double>(B * T - std::ranges::count(targets, ignore_index));
    const float dloss = static_cast<float>(1 / counted);
    set_dloss(model, &dloss);
    const double of_mean = static_cast<double>(B * T) / counted;
    const AdamW adamw{setting("beta1"), setting("beta2"), setting("eps"), setting("weight_decay"),
                      setting("grad_clip")};
    const float lr = static_cast<float>(setting("lr"));
    set_batch(model, tokens.data(), targets.data(), B, T, first.empty() ? nullptr : first.data(),
              end.empty() ? nullptr : end.data());
    train(model, adamw, lr, 1, steps);
    Recorder recorder;
    model.hook = [&](const std::string& name, const Tensor& value) { recorder.add(name, value); };
    forward_backward(model, true);
    const double loss = mean_loss(model);
    model.hook = nullptr;
    recorder.add_floats("loss", {static_cast<float>(loss * of_mean)});
    for (const Parameter& parameter : model.parameters.table)
        if (parameter.trains) recorder.add("grad." + parameter.name, model.parameters.gradient(parameter));
    if (model.fp8) record_scales(recorder, model);
    if (steps)
        for (const Parameter& parameter : model.parameters.table)
            recorder.add("weight." + parameter.name, model.parameters.weight(parameter));

    std::vector<float> losses, norms;
    for (const auto& [each_loss, norm] : train(model, adamw, lr, steps + 1, 10)) {
        losses.push_back(static_cast<float>(each_loss * of_mean));
        norms.push_back(norm);
    }
    recorder.add_floats("train.losses", losses);
    recorder.add_floats("train.grad_norms", norms);
    write_safetensors(out, recorder.tensors);
}

// RECIPE,GRADIENTS[,head], as the flags of the program.
Fp8Options parse_fp8(const std::string& text) {
    const size_t first = text.find(','), second = text.find(',', first + 1);
    Options flags;
    flags.matmul_dtype = MatmulDType::fp8;
    flags.fp8_recipe = find_choice<Fp8Scaling>(text.substr(0, first)).value();
    flags.fp8_gradients = find_choice<Fp8Gradients>(text.substr(first + 1, second - first - 1)).value();
    flags.fp8_head = second != text.npos;
    return *model_options(flags).fp8;
}

}  // namespace

int main(int argc, char** argv) {
    limit_spinning(argv);
    try {
        if (argc < 3)
            fail(
                "expected REFERENCE OUT [dtype[,gradients' dtype]] [recompute] [logits bytes] "
                "[OPERATION=VARIANT ...] [fp8=RECIPE,GRADIENTS[,head]] [steps=N] [cp=N]");
        ModelOptions options;
        std::optional<Ranks> ranks;
        int32_t steps = 0;
        if (argc > 3) {
            const std::string types = argv[3];
            const size_t comma = types.find(',');
            options.precision.weights = float_dtype(types.substr(0, comma));
            if (comma != std::string::npos)
                options.precision.gradients = float_dtype(types.substr(comma + 1));
        }
        if (argc > 4) options.recompute = parse_recompute(argv[4]);
        if (argc > 5) options.logits_bytes = std::stoll(argv[5]);
        for (int i = 6; i < argc; i++) {
            const std::string argument = argv[i];
            if (argument.starts_with("fp8="))
                options.fp8 = parse_fp8(argument.substr(4));
            else if (argument.starts_with("lora=")) {
                const std::vector<std::string> parts = split_list(argument.substr(5));
                options.lora = {std::stoll(parts[0]), std::stod(parts[1]), {parts.begin() + 2, parts.end()}};
                options.frozen = {"*"};
            } else if (argument.starts_with("cp=")) {
                ranks.emplace(find_launch(), Patience(Options()));
                ranks->connect_devices();
                options.context = {ranks->own, std::stoll(argument.substr(3))};
                options.sharding = {ranks->own, ranks->count};
            } else if (argument == "frozen=fp8")
                options.frozen_codes = true;
            else if (argument.starts_with("steps="))
                steps = std::stoi(argument.substr(6));
            else
                options.kernels.push_back(argument);
        }
        record(argv[1], argv[2], options, steps, ranks ? ranks->communicator.get() : nullptr);
    } catch (const Error& error) {
        std::fprintf(stderr, "debug_state: %s\n", error.what());
        return 2;
    }
}
