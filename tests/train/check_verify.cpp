// --verify-every: a run with it has the bits of a run without, and one flipped bit of whatever a step reads or writes ends
// it with the tensor's name. The flips are made by an observer of the model's calls, as a profile's is.
#include <map>

#include "checkpoint/config_json.h"
#include "core/device_memory.h"
#include "core/observer.h"
#include "small_run.h"
#include "train/memory.h"

using namespace llamac;

namespace verify_checks {
namespace {

// bit: from the highest one on where it is negative; -2 makes 2.0 of 0.
void flip(const Tensor& t, int64_t element, int bit) {
    if (bit < 0) bit += 8 * static_cast<int>(size_of(t.dtype));
    char* const byte = static_cast<char*>(t.data) + element * size_of(t.dtype) + bit / 8;
    char value;
    copy_bytes(&value, byte, 1);
    value = static_cast<char>(value ^ 1 << bit % 8);
    copy_bytes(byte, &value, 1);
}

// ---- the same bits ----

TEST(check_same_bits) {
    for (const Words& precision : precisions)
        for (const Words& how : {Words{}, {"--recompute", "block", "--total-batch-size", "64"}}) {
            const Words words = with(precision, how);
            const Trained plain = train(small_run(words), 0);
            check(train(small_run(with(words, {"--verify-every", "1"})), 1) == plain);
            check(train(small_run(with(words, {"--verify-every", "4"})), 0) == plain);
        }
}

TEST(check_kernels) {
    Options o =
        small_run(with(precisions[2], {"--steps", "2", "--seq-len", "8", "--total-batch-size", "64"}));
    o.kernel = all_kernels();
    const Trained plain = train(o, 0);
    o.verify_every = 1;
    for (const bool graphs : {true, false}) {
        o.graphs = graphs;
        check(train(o, 0) == plain, "verified with kernels: other bits");
    }
}

// ---- one flipped bit ----

// After the count-th call of an operation, counted from the first step on.
struct Fault {
    const char* what;
    const char* operation;
    int count;
    std::function<void(Model&)> make;
    std::vector<std::string> said;
};

const Parameter& parameter(const Model& m, const std::string& name) {
    const auto& table = m.parameters.table;
    return *std::find_if(table.begin(), table.end(), [&](const Parameter& p) { return p.name == name; });
}

// What the verified step says where the fault is made; "": nothing.
std::string said(const Options& o, const Fault& fault) {
    Trainer t(o, 0);
    std::map<std::string, int> calls;
    const Observer observer = observe_calls([&](const Call& call, const Variant&) {
        if (call.op->name == fault.operation && ++calls[call.op->name] == fault.count) fault.make(t.model);
    });
    t.model.context.observer = &observer;
    t.start_step();
    const std::string message = error_of([&] { t.finish_step(); });
    if (calls[fault.operation] < fault.count) return "the fault was not made";
    return message;
}

// A step of two micro-batches: calls of a pass are twice those of a micro-batch.
// norms: calls of global_norm before the gradients', of the losses.
std::vector<Fault> faults(bool master, int norms) {
    using P = Parameters;
    const std::string down = "model.layers.0.mlp.down_proj.weight", up = "model.layers.0.mlp.up_proj.weight",
                      o = "model.layers.1.self_attn.o_proj.weight";
    const std::string kept = "expected the bits from before the step", twice = "expected the same bits";
    const char *const embedding = "embedding_forward", *const norm = "global_norm";
    const auto in = [](Tensor P::* buffer, const std::string& name, int bit) {
        return [=](Model& m) {
            const Parameter& p = parameter(m, name);
            flip(m.parameters.part(m.parameters.*buffer, p, 0, p.elements()), 77, bit);
        };
    };
    const auto mid = [](Model& m) { flip(m.activations.blocks[1].residual_mid, 70, 14); };
    const auto post = [](Model& m) { flip(m.activations.blocks[0].post_norm, 70, 14); };
    const auto squares = [](Model& m) { flip(m.squares, 0, 5); };
    std::vector<Fault> all = {
        {"an activation for the loss", "rmsnorm_forward", 14, mid, {"the losses of micro-batch 0", twice}},
        {"an activation for a gradient", "cross_entropy", 3, post, {"the gradient of " + up, twice}},
        {"a gradient between micro-batches",
         embedding,
         4,
         in(&P::gradients, o, 3),
         {"the gradient of " + o, twice}},
        {"a gradient before the update",
         norm,
         norms + 1,
         in(&P::gradients, o, 0),
         {"the gradient of " + o, twice}},
        {"a weight between the passes",
         embedding,
         3,
         in(&P::weights, down, 9),
         {"the weight of " + down, kept}},
        {"m between the passes", embedding, 3, in(&P::m, down, 15), {"the first moment of " + down, kept}},
        {"v in the first pass", embedding, 2, in(&P::v, down, 1), {"the second moment of " + down, kept}},
        {"v between the updates", "adamw", 20, in(&P::v, down, -2), {"the new weight of " + down, twice}},
        {"a new first moment", "adamw", 30, in(&P::m, down, 2), {"the new first moment of " + down, twice}},
        {"the norm", norm, norms + 2, squares, {"the norm of all gradients", twice}},
    };
    if (master)
        all.push_back({"a master weight",
                       embedding,
                       3,
                       in(&P::master, down, 30),
                       {"the master weight of " + down, kept}});
    return all;
}

TEST(check_faults) {
    for (const Words& precision : precisions) {
        const Options o = small_run(with(precision, {"--verify-every", "1"}));
        check(said(o, {"none", "adamw", 1, [](Model&) {}, {}}).empty(), "no fault, no difference");
        const int norms = o.dtype == DType::fp16 ? 4 : 0;
        for (const Fault& fault : faults(o.dtype != DType::f32 && o.master_weights, norms)) {
            const std::string message = said(o, fault);
            bool named = message.rfind("step 1: ", 0) == 0 && message.find('\n') == message.npos;
            for (const std::string& word : fault.said) named &= message.find(word) != message.npos;
            check(named, std::string(fault.what) + ", " + info(o.dtype).name + ": " + message);
        }
    }
}

// ---- flags and memory ----

int64_t verification_bytes(const Model& m) {
    int64_t bytes = 0;
    for (const MemoryRow& row : memory_rows(m, true)) bytes += row.group == "verification" ? row.bytes : 0;
    return bytes;
}

TEST(check_planned_memory) {
    Trainer with_it(small_run({"--verify-every", "1"}), 0), without(small_run(), 0);
    check(verification_bytes(with_it.model) > 0 && verification_bytes(without.model) == 0);
    for (const Words& precision : precisions) {
        ModelOptions large = model_options(small_run(precision));
        large.batch_size = 1;
        Model m(load_config("llama3.1-8b"), large);
        const Verifier verifier(m, 64, {}, 0);
        const int64_t bytes = verification_bytes(m);
        check(bytes > int64_t{100} << 20 && bytes < int64_t{300} << 20,
              "8B: " + std::to_string(bytes >> 20) + " MiB");
    }
}

}  // namespace
}  // namespace verify_checks
