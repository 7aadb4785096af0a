// A run without its loop: the memory that it is planned to take, and its steps, which may be started ahead,
// replayed as graphs, interrupted and resumed without a changed bit.
#include <sys/resource.h>

#include <cmath>
#include <ctime>
#include <map>

#include "checkpoint/config_json.h"
#include "core/device_memory.h"
#include "core/observer.h"
#include "safetensors_file.h"
#include "small_run.h"
#include "train/memory.h"

using namespace llamac;

namespace trainer_checks {
namespace {

// ---- memory ----

TEST(check_arena) {
    Arena arena;
    Tensor a, b, c, over, beyond;
    arena.plan("one", &a, shaped(DType::f32, {3}));
    arena.plan("two", &b, shaped(DType::bf16, {1000, 3}));
    arena.share(&over, shaped(DType::i32, {1600}), &b);
    arena.plan("two", &c, shaped(DType::f32, {77}));
    arena.share(&beyond, shaped(DType::f32, {70}), &c);
    check(a.elements() == 3 && over.elements() == 1600 && !a.data && !over.data);
    check(arena.rows.size() == 3 && arena.bytes() == 256 + 6144 + 512);
    char* const base = reinterpret_cast<char*>(uintptr_t{1} << 40);
    arena.place(base);
    check(a.data == base && b.data == base + 256 && c.data == base + 256 + 6144, "one after another");
    check(over.data == b.data && beyond.data == c.data, "shared memory");
    arena.allocate();
    check(a.data != base && static_cast<char*>(c.data) - static_cast<char*>(a.data) == 256 + 6144);
    float values[77];
    copy_bytes(values, c.data, c.bytes());
    check(std::all_of(values, values + 77, [](float x) { return std::isnan(x); }), "memory begins as NaN");
}

TEST(check_workspace) {
    Workspace workspace;
    check(workspace.reserve(1 << 16) != nullptr, "a workspace of its own");
    refused("more than there is", {"memory: ", " MiB are needed"},
            [&] { workspace.reserve(int64_t{1} << 60); });
    check(workspace.reserve(0) == nullptr, "what was given back for more is not used again");
    check(workspace.reserve(1 << 16) != nullptr, "and less is there");
}

int64_t planned_bytes(const Options& o) {
    return Model(load_config(o.model), model_options(o)).arena.bytes();
}

// The rows of the table are the tensors without their padding; the chunks of logits lie where nothing else is needed
// while they are.
void check_plan(const Options& o, const std::string& what) {
    Model m(load_config(o.model), model_options(o));
    m.arena.place(reinterpret_cast<void*>(uintptr_t{1} << 20));  // with what its plan ended with
    int64_t bytes = 0, tensors = 0;
    for (const MemoryRow& row : memory_rows(m, true)) {
        if (row.tensors == 0) continue;  // what others have of the device
        bytes += row.bytes;
        tensors += row.tensors;
    }
    check(tensors == static_cast<int64_t>(m.arena.rows.size()), what + ": the table has every tensor");
    check(bytes <= m.arena.bytes() && m.arena.bytes() < bytes + 256 * tensors,
          what + ": the table has every byte");

    const Activations& a = m.activations;
    const auto begin = [](const Tensor& t) { return static_cast<const char*>(t.data); };
    const auto end = [&](const Tensor& t) { return begin(t) + t.bytes(); };
    for (const Arena::Row& row : m.arena.rows) {
        const Tensor* t = row.tensor;
        const bool later =
            t == &a.dqkv || t == &a.dattention || t == &a.dgate_up || t == &a.dswiglu || t == &a.more_logits;
        check(later || end(*t) <= begin(a.logits) || end(a.logits) <= begin(*t),
              what + ": logits over " + row.group);
    }
    check(a.logits.data == a.dqkv.data, what + ": logits in the blocks' gradients");
}

TEST(check_plans) {
    for (const Words& precision : precisions)
        for (const char* recompute : {"none", "norm,swiglu,qkv,attention", "block:2"})
            check_plan(small_run(with(precision, {"--recompute", recompute})), recompute);
    Config config = load_config("llama3.1-8b");
    ModelOptions few = model_options(small_run());
    few.batch_size = 1;
    const Model m(config, few);
    check(m.activations.logits.bytes() <= int64_t{64} << 20, "few rows: logits of at most 64 MiB");
    few.logits_bytes = int64_t{1} << 40;
    const Model whole(config, few);
    check(whole.activations.logits.shape[0] == 16 && whole.activations.more_logits.elements() > 0);
    Config narrow = config;
    narrow.F = 128;
    ModelOptions many = model_options(small_run());
    many.batch_size = 1, many.seq_len = 4096;
    check(Model(narrow, many).activations.logits.shape[0] == 2048, "two chunks of logits");
    many.batch_size = 8;
    const Tensor ample = Model(narrow, many).activations.logits;
    check(ample.bytes() > (int64_t{2} << 30) - ample.shape[1] * 512 && ample.bytes() <= int64_t{2} << 30);
    many.batch_size = 32;
    check(Model(narrow, many).activations.logits.shape[0] == 16384, "no more than eight chunks of logits");
}

// Named members and the rows of the table are the same memory; fused rows lie behind one another.
TEST(check_parameters) {
    Model m(load_config(small_run().model), model_options(small_run()));
    const Parameters& p = m.parameters;
    const auto row = [&](const std::string& name) {
        return *std::find_if(p.table.begin(), p.table.end(),
                             [&](const Parameter& r) { return r.name == name; });
    };
    const Config& c = m.config;
    for (size_t k = 0; k < p.table.size(); k++) {
        check(p.table[k].rng_stream == 4 * k, p.table[k].name + ": its stream");
        const int64_t end = p.table[k].offset + p.table[k].elements();
        check(k + 1 == p.table.size() || (end <= p.table[k + 1].offset && p.table[k + 1].offset < end + 64),
              p.table[k].name + ": behind it the next one");
    }
    const BlockParameters& b = p.blocks[1];
    const Parameter q = row("model.layers.1.self_attn.q_proj.weight"),
                    v = row("model.layers.1.self_attn.v_proj.weight"),
                    up = row("model.layers.1.mlp.up_proj.weight");
    check(b.qkv.offset == q.offset && b.qkv.shape == std::vector<int64_t>{c.qkv_size(), c.C} &&
          b.qkv.offset + b.qkv.elements() == v.offset + v.elements());
    check(b.gate_up.shape[0] == 2 * c.F && b.gate_up.offset + up.elements() == up.offset, "gate and up, too");
    check(b.o.offset % 64 == 0 && b.o.offset == row("model.layers.1.self_attn.o_proj.weight").offset);
    check(c.tied && p.head.offset == p.embedding.offset, "a tied head is the embedding");
    check(row("model.norm.weight").group.initial == 1.0f && q.group.decays, "groups");
}

// What operations work in is asked for in the dry run, whatever a run does later.
TEST(check_dry_run) {
    for (const Words& precision : precisions) {
        if (!has_kernels(precision)) continue;
        Options o = small_run(precision);
        o.kernel = all_kernels();
        o.recompute.block_every = o.dtype == DType::f32 ? 0 : 1;
        Model m(load_config(o.model), model_options(o));
        const int64_t planned = m.context.workspace->asked;
        const Arena::Row& last = m.arena.rows.back();
        check(planned > 0 && last.group == "work space of operations" && last.tensor->bytes() >= planned);
        m.allocate();
        initialize(m.context, m.parameters, m.config, 1);
        const void* const memory = m.context.workspace->reserve(0);
        const std::vector<int32_t> tokens(64, 3);
        set_batch(m, tokens.data(), tokens.data(), 4, 16);
        for (const bool first : {true, false}) forward_backward(m, first);
        const float lr = 0.01f;
        const int32_t step = 1;
        set_step(m, &lr, &step);
        optimizer_step(m, {0.9, 0.95, 1e-8, 0.1, 1.0}, 1);
        forward(m);
        std::vector<float> logits;
        for (int64_t length = 1; length <= 16; length += 5) next_logits(m, tokens.data(), length, logits);
        check(std::isfinite(mean_loss(m)) && std::isfinite(logits[0]), "the step computes");
        check(m.context.workspace->asked == planned && m.context.workspace->reserve(0) == memory,
              "a step asks for no more than its dry run, dtype " + std::string(info(o.dtype).name));
    }
}

// How often each operation runs in a micro-batch.
std::map<std::string, int> calls_with(const std::string& recompute) {
    std::map<std::string, int> calls;
    Options o = small_run();
    o.recompute = parse_recompute(recompute);
    Model m(load_config(o.model), model_options(o));
    m.allocate();
    initialize(m.context, m.parameters, m.config, 1);
    const std::vector<int32_t> tokens(64, 3);
    set_batch(m, tokens.data(), tokens.data(), 4, 16);
    const Observer counter = observe_calls([&](const Call& call, const Variant&) { calls[call.op->name]++; });
    m.context.observer = &counter;
    forward_backward(m, true);
    return calls;
}

// What its own backward writes again is not computed a second time, unless another part needs it before.
TEST(check_recomputed_calls) {
    const auto none = calls_with("none"), cheap = calls_with("norm,swiglu");
    check(none == cheap, "norms and swiglu are written again by their backward");
    const int layers = static_cast<int>(load_config(small_run().model).L);
    auto expected = none;
    expected["rmsnorm_forward"] += layers;
    expected["matmul_forward"] += layers;
    expected["rope_forward"] += layers;
    check(calls_with("norm,swiglu,qkv") == expected, "queries, keys and values want their norm first");
}

// ---- a run that does not fit ----

int64_t free_bytes() {
    size_t free = 0, total = 0;
    CHECK(hipMemGetInfo(&free, &total));
    return static_cast<int64_t>(free);
}

// The flags that the refusal of a run proposes: with them it must fit.
Options proposed(const Config& config, const Words& flags, const std::string& what) {
    const Options o = small_run(flags);
    std::string message;
    refused(what, {"memory: the run needs ", " GiB, the device has ", " GiB free of ", "; it fits with --"},
            [&] {
                try {
                    check_memory(Model(config, model_options(o)), o);
                } catch (const Error& e) {
                    message = e.what();
                    throw;
                }
            });
    const size_t at = message.find("it fits with ");
    if (at == message.npos) return o;
    const Options changed = small_run(with(flags, words_of(message.substr(at + 13))));
    check(Model(config, model_options(changed)).arena.bytes() <= free_bytes(),
          what + ": it does fit: " + message);
    check(micro_batches(changed, 1) * changed.batch_size == micro_batches(o, 1) * o.batch_size,
          what + ": the step is of as many tokens: " + message);
    return changed;
}

int64_t peak_kib() {
    rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_maxrss;
}

TEST(check_refusal) {
    const int64_t before = peak_kib();
    const Config config = load_config(small_run().model);
    check(error_of([] {
              const Options o = small_run();
              check_memory(Model(load_config(o.model), model_options(o)), o);
          }).empty());
    // The last batch that fits, then just too large a one.
    int64_t batch = 4;
    const auto flags = [&](int64_t sequences) {
        return Words{"--batch-size", std::to_string(sequences), "--total-batch-size", "0", "--val-data",
                     "none"};
    };
    while (planned_bytes(small_run(flags(2 * batch))) <= free_bytes()) batch *= 2;
    const Options little = proposed(config, flags(2 * batch), "twice too much");
    check(text_of(little.recompute) != "none" || little.batch_size == batch,
          "recomputation first: " + text_of(little.recompute));
    const Options much = proposed(config, flags(64 * batch), "64 times too much");
    check(much.batch_size == batch && text_of(much.recompute) == "none" && much.dtype == DType::f32);
    const Options odd = proposed(config, flags(3 * 5 * 7 * batch), "a batch that halves do not divide");
    check(planned_bytes(small_run(flags(odd.batch_size))) <= free_bytes() && odd.batch_size > batch / 2);
    const Options least = proposed(
        config,
        {"--batch-size", std::to_string(64 * batch), "--recompute", "block", "--total-batch-size", "0"},
        "everything is recomputed already");
    check(least.recompute.block_every == 1, "no less recomputation is proposed");

    // Parameters that fit in fewer bytes each, alone and with a smaller batch.
    Config wide = config;
    wide.V =
        free_bytes() / (wide.C * 15);  // bytes: 16 in f32, with bf16 moments 12; with bf16 weights 18, 14
    const Options thin = proposed(wide, {"--batch-size", "1", "--total-batch-size", "0"}, "many parameters");
    check(thin.optimizer_state == DType::bf16 && thin.dtype == DType::f32 && thin.batch_size == 1,
          "smaller types");
    wide.V = free_bytes() / (wide.C * 12);
    const Options all = proposed(wide, flags(4 * batch), "many parameters and a large batch");
    check(all.dtype == DType::bf16 && all.batch_size < batch && all.recompute.block_every == 1,
          "everything at once");
    wide.V = free_bytes() / (wide.C * 5);
    const Options none = small_run({"--batch-size", "1", "--total-batch-size", "0"});
    refused("too many parameters", {"memory: ", "no recomputation, batch size or precision makes it fit"},
            [&] { check_memory(Model(wide, model_options(none)), none); });
    // Refused for the device's memory: the host's, of the same size, is not asked for.
    const Options endless = small_run({"--total-batch-size", std::to_string(int64_t{1} << 47)});
    refused("a step of too many tokens",
            {"memory: the run needs ", "no recomputation, batch size or precision makes it fit"},
            [&] { Trainer t(endless); });
    check(peak_kib() - before < int64_t{256} << 10, "plans of batches that do not fit take no memory");
}

// Sizes whose bytes are no numbers of 64 bits.
TEST(check_sizes) {
    Config wide = load_config("llama3.1-8b");
    wide.L = 1 << 16;
    wide.F = 1 << 24;
    ModelOptions options = model_options(small_run());
    options.batch_size = 1 << 16, options.seq_len = 1 << 14;
    refused("activations of 2^70 bytes", {"memory: the run needs more than 2^60 bytes"},
            [&] { Model(wide, options); });
}

// Planning goes through many alternatives, of 80 layers each.
TEST(check_planning_is_quick) {
    const Options o = small_run(
        {"--model", "llama3.1-70b", "--batch-size", "64", "--seq-len", "8192", "--total-batch-size", "0"});
    const auto seconds = [](const std::function<void()>& f) {
        const std::clock_t begin = std::clock();
        f();
        return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    };
    const Config config = load_config(o.model);
    std::string message;
    const double all =
        seconds([&] { message = error_of([&] { check_memory(Model(config, model_options(o)), o); }); });
    const double one = seconds([&] { Model(config, model_options(o)); });
    check(!message.empty(), "70B with 64 sequences of 8192 tokens is more than a device has");
    // There are 8 recomputations, 6 batch sizes, 4 precisions, and some of them together.
    check(all < 60 * one, "planned in the time of " + std::to_string(all / one) + " plans");
    // Without the sizes, which change with what else the device holds.
    const auto proposed = [&](const char* recompute) {
        Options one_in_many = o;
        one_in_many.recompute = parse_recompute(recompute);
        const std::string refusal = error_of(
            [&] { check_memory(Model(load_config(o.model), model_options(one_in_many)), one_in_many); });
        return refusal.substr(refusal.find("; ") + 1);
    };
    check(proposed("block:1000000000") == proposed("block:80"));
}

// ---- steps ----

// Scales of a checkpoint in a run whose types are others: of the largest values where the file has them, else of the
// most that a scale stands for. What was not in fp8 is measured first.
TEST(check_scales_of_other_types) {
    const Config config = load_config(small_run().model);
    Fp8Options saved;
    saved.keep_last = 1;
    std::vector<float> amax(24, -1), scale(24, 1);
    const auto is_gradient = [](size_t slot) { return slot % 12 >= 8; };
    for (size_t s = 0; s < 12; s++) {
        amax[s] = s == 5 ? 0 : 1e-7f * std::pow(7.0f, static_cast<float>(s));
        if (s != 5) scale[s] = fp8_scale(amax[s], is_gradient(s) ? e5m2::largest : e4m3::largest);
    }
    const auto tensor = [](std::vector<float>& values) {
        return make_tensor(values.data(), DType::f32, {24});
    };
    for (const bool has_amax : {false, true}) {
        const std::string path = in_folder("scales.safetensors");
        std::vector<NamedTensor> tensors = {{"fp8.scale", tensor(scale)}};
        if (has_amax) tensors.push_back({"fp8.amax", tensor(amax)});
        fs::remove(path);
        write_safetensors(path, tensors, {});
        for (const auto& [values, gradients] : {std::pair(DType::e4m3, DType::e5m2),
                                                {DType::e4m3, DType::e4m3},
                                                {DType::e4m3fnuz, DType::e5m2fnuz}}) {
            ModelOptions options = model_options(small_run({"--matmul-dtype", "fp8"}));
            options.fp8->values = values, options.fp8->gradients = gradients;
            Model m(config, options);
            m.allocate();
            load_fp8(m, path, saved);
            std::vector<float> found(24), inverse(4 * 24);
            copy_bytes(found.data(), m.fp8->scale.data, m.fp8->scale.bytes());
            copy_bytes(inverse.data(), m.fp8->inverse.data, m.fp8->inverse.bytes());
            bool right = true;
            for (size_t s = 0; s < 24; s++) {
                const float limit = info(is_gradient(s) ? gradients : values).largest;
                right &= m.fp8->measured[s] == (s < 12) && inverse[4 * s] == 1 / found[s];
                if (s >= 12 || s == 5)
                    right &= found[s] == 1 || (s == 5 && !has_amax);
                else if (has_amax)
                    right &= found[s] == fp8_scale(amax[s], limit);
                else
                    right &= amax[s] * found[s] <= limit && 4 * amax[s] * found[s] > limit;
                if (limit == (is_gradient(s) ? e5m2::largest : e4m3::largest)) right &= found[s] == scale[s];
            }
            check(right, std::string("scales of ") + name(values) + " and " + name(gradients) +
                             (has_amax ? "" : ", of version 0.1"));
        }
    }
}

// The same gradients each step, times what the number of targets that count makes of them: no value saturates. Of a
// factor that is no power of two, they round otherwise.
TEST(check_scales_follow_targets) {
    Trainer t(small_run({"--matmul-dtype", "fp8", "--lr", "1e-9"}), 0);
    const Trainer::Fill batch = [&](int64_t micro, int32_t* tokens, int32_t* targets) {
        t.data.train->micro_batch(0, micro, 0, 1, tokens, targets, 0);
    };
    for (const int64_t counted : {128, 8, 128, 11, 90, 128}) {
        t.start_step(batch, counted);
        const StepResult result = t.finish_step();
        int64_t values = 0;
        for (const Saturated& each : result.saturated)
            if (each.tensor.find(".d.") != each.tensor.npos) values += each.values;
        check(values <= (128 % counted == 0 ? 0 : 20),
              "step " + std::to_string(result.step) + ", of " + std::to_string(counted) +
                  " targets: " + std::to_string(values) + " gradients saturate");
    }
}

// However far the host is ahead, each step's numbers are its own.
TEST(check_updates_ahead) {
    for (const Words& precision : precisions) {
        const Trained now = train(small_run(precision), 0);
        check(now.numbers.size() == 4 * 6 && now.numbers[0] == 1 && now.numbers[4 * 5] == 6);
        for (size_t k = 4; k < now.numbers.size(); k++)
            check(std::isfinite(now.numbers[k]) && now.numbers[k] != now.numbers[k - 4]);
        for (const int64_t ahead : {1, 2, 5})
            check(train(small_run(precision), ahead) == now,
                  std::to_string(ahead) + " steps ahead: other bits");
    }
}

TEST(check_graphs) {
    const auto graphs = [](const Words& words) { return model_options(small_run(words)).graphs; };
    check(graphs({}) == graphs_by_default && graphs({"--graphs", "on"}) && !graphs({"--graphs", "off"}));
    for (const bool kernels : {false, true}) {
        for (const Words& precision : precisions) {
            Options o = small_run(precision);
            if (kernels && o.master_weights) continue;  // emulated ones take their time
            if (kernels) o.kernel = all_kernels();
            o.graphs = false;
            const Trained launched = train(o, 0);
            o.graphs = true;
            // Emulated ones a single time, with the host ahead.
            for (int64_t ahead = kernels ? 1 : 0; ahead <= 1; ahead++)
                check(train(o, ahead) == launched,
                      std::string("graphs give other bits, ") + (kernels ? "kernels" : info(o.dtype).name));
        }
    }
}

// What begins a sample is a token of the model.
TEST(check_first_token) {
    const std::string text = model_json;
    fs::create_directories(in_folder("first"));
    put("first/config.json", text.substr(0, text.size() - 1) + R"(, "bos_token_id": 2000000000})");
    const Words words = {"--model", in_folder("first"), "--sample-every", "0"};
    Trainer without(small_run(words));
    refused("a first token beyond the vocabulary", {in_folder("first"), "2000000000", "below", "128"},
            [&] { first_token(without); });
    refused("a run that would sample", {in_folder("first"), "2000000000", "below", "128"},
            [&] { Trainer t(small_run({"--model", in_folder("first")})); });
}

// Steps that end between micro-batches, by a signal or by a token that is none, change nothing: done again, they have the
// bits of steps that nothing has disturbed. So have validation and samples.
TEST(check_abandoned) {
    struct Interrupted : std::exception {};
    for (const int64_t ahead : {0, 1}) {
        const Trained whole = train(small_run(), ahead);
        Trainer t(small_run(), ahead);
        Trained trained;
        int calls = 0, abandoned = 0;
        // The second micro-batch of step 2, the first one of step 5.
        t.between = [&] {
            if (++calls % 7 == 4) throw Interrupted();
        };
        while (t.step < t.options.steps) {
            const int64_t before = t.step;
            try {
                t.start_step();
            } catch (const Interrupted&) {
                abandoned++;
                check(t.step == before, "an abandoned step does not count");
            }
            finish(t, ahead, trained);
        }
        check(abandoned == 2 && calls == 2 * 6 + 3, "calls between micro-batches: " + std::to_string(calls));
        t.between = nullptr;
        finish(t, 0, trained);
        const double loss = validate(t);
        const std::vector<int32_t> ids = sample(t, {1}, 4, 1.0, 0);
        const auto stopped = [&](const char* what, const std::function<void()>& work) {
            calls = 0;
            t.between = [&] {
                if (++calls == 2) throw Interrupted();
            };
            bool thrown = false;
            try {
                work();
            } catch (const Interrupted&) {
                thrown = true;
            }
            check(thrown, std::string(what) + " is stopped");
            t.between = nullptr;
        };
        stopped("validation", [&] { validate(t); });
        stopped("a sample", [&] { sample(t, {1}, 4, 1.0, 0); });
        check(validate(t) == loss && sample(t, {1}, 4, 1.0, 0) == ids, "the same afterwards");
        const Trained rest = train(t);
        check(trained.numbers == whole.numbers && rest.weights == whole.weights);
    }
}

// The head of an encoder computes about the rows that are masked, and all where a batch has more targets.
TEST(check_predicted_rows) {
    std::string json = model_json;
    json.replace(json.find("llama"), 5, "bert");
    for (const char* field : {"\"num_key_value_heads\": 1,", "\"head_dim\": 64,"})
        json.replace(json.find(field), std::string(field).size(), "");
    fs::create_directories(in_folder("encoder"));
    put("encoder/config.json", json);
    const Words words = with({"--model", in_folder("encoder")},
                             words_of("--val-data none --mask-token 3 --batch-size 16 --seq-len 32 --steps 2 "
                                      "--mlm-probability 0.05 --total-batch-size 1024"));
    const Options o = small_run(words);
    Trainer t(o, 1);
    int64_t rows = 0;
    const Observer observer = observe_calls([&](const Call& call, const Variant&) {
        if (call.op->name == "cross_entropy") rows += call["N"];
    });
    t.model.context.observer = &observer;
    t.start_step();
    check(rows == 2 * 128 && std::isfinite(t.finish_step().loss));
    check(flops_per_token(t.config, 32) - t.flops_per_token() ==
          6.0 * static_cast<double>(t.config.V * t.config.C) * (512 - 128) / 512);
    rows = 0;
    t.start_step(  // a target more than the 127 that fit, and as many
        [&](int64_t micro, int32_t* tokens, int32_t* targets) {
            for (int k = 0; k < 512; k++)
                tokens[k] = k % 128, targets[k] = k < 128 - micro ? 5 : ignore_index;
        },
        255);
    check(rows == 512 + 128 && std::isfinite(t.finish_step().loss));
    Options kernels = o;
    kernels.kernel = all_kernels();
    kernels.graphs = true;
    const Trained replayed = train(kernels, 1);
    kernels.graphs = false;
    check(train(kernels, 1) == replayed, "graphs: other bits");
}

// Products have 8 columns per rank or more, of which those that no adapter fills stay 0.
TEST(check_rank_of_3) {
    Trainer t(small_run({"--lora", "3"}), 0);
    const Observer observer = observe_calls([&](const Call& call, const Variant&) {
        if (call.op->name.starts_with("matmul")) check(call["C"] % 8 == 0 && call["K"] % 8 == 0);
    });
    t.model.context.observer = &observer;
    train(t);
    const Parameters& p = t.model.parameters;
    const Tensor a = p.weight(p.blocks[1].qkv_adapter.a);
    check(a.shape[0] == 16 && a.shape[1] == 64);
    for (int64_t row = 0; row < a.shape[0]; row++) {
        const float* const values = a.as<float>() + row * a.shape[1];
        check(std::all_of(values, values + a.shape[1], [](float x) { return x == 0; }) == (row >= 9));
    }
}

// Neighbours are one call, unless a parameter has random numbers of its own.
TEST(check_calls_of_adamw) {
    for (const auto& [words, expected] :
         {std::pair{Words{}, 10}, {Words{"--lora", "4"}, 2}, {precisions[2], 20}}) {
        Trainer t(small_run(words), 0);
        int calls = 0;
        const Observer observer =
            observe_calls([&](const Call& call, const Variant&) { calls += call.op->name == "adamw"; });
        t.model.context.observer = &observer;
        t.start_step();
        t.finish_step();
        check(calls == expected, std::to_string(calls) + " calls of adamw");
    }
}

}  // namespace
}  // namespace trainer_checks
