// What a run does where its numbers are no longer usable: steps that are skipped, spikes, data that is left out.
#include <array>
#include <cmath>
#include <limits>

#include "checkpoint/manifest.h"
#include "core/device_memory.h"
#include "core/observer.h"
#include "ops/operations.h"
#include "platform/sensors.h"
#include "program/spikes.h"
#include "small_run.h"

using namespace llamac;

namespace divergence_checks {
namespace {

// Without the columns beside frozen weights, which each pass writes.
std::string state_of(const Model& m) {
    const Parameters& p = m.parameters;
    std::string state = bits_of(p.weights) + bits_of(p.master) + bits_of(p.m) + bits_of(p.v);
    for (const Parameter& each : p.table)
        if (!each.trains) state += bits_of(decode(m.context, p, each));
    return state;
}

// ---- steps that are not finite ----

// What may train: all, all but the norms, adapters.
const Words trained[] = {{}, {"--freeze", "*norm.weight"}, {"--lora", "4"}};

// A number of the step's losses, or of the gradients that its last micro-batch adds to, becomes `value`.
StepResult spoiled_step(Trainer& t, bool loss, float value) {
    int64_t calls = 0;
    const Observer observer = observe_calls([&](const Call& call, const Variant&) {
        if (call.op->name != "cross_entropy") return;
        if (++calls != t.accumulation) return;
        const Tensor& x = loss ? t.model.activations.losses : t.model.parameters.gradients;
        if (x.dtype == DType::f32) return copy_bytes(x.data, &value, sizeof value);
        const bf16 narrow(value);
        copy_bytes(x.data, &narrow, sizeof narrow);
    });
    t.model.context.observer = &observer;
    t.start_step();
    const StepResult r = t.finish_step();
    t.model.context.observer = nullptr;
    return r;
}

TEST(check_skipped) {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN(),
                    inf = std::numeric_limits<float>::infinity();
    std::vector<Words> runs(std::begin(precisions), std::end(precisions));
    for (const Words& words : trained) runs.push_back(with({"--dtype", "fp16"}, words));
    for (const Words& precision : runs)
        for (const bool loss : {false, true})
            for (const float value : {nan, inf, -inf}) {
                Trainer t(small_run(with(precision, {"--skip-nonfinite", "1"})), 0);
                Trained before;
                t.start_step();
                finish(t, 0, before);
                const std::string state = state_of(t.model);
                const StepResult skipped = spoiled_step(t, loss, value);
                check(skipped.skipped && skipped.step == 2 && t.step == 2, "skipped, and counted");
                check(state_of(t.model) == state, "a skipped step changes a bit");
                check(std::isfinite(loss ? skipped.grad_norm : skipped.loss) &&
                      !std::isfinite(loss ? skipped.loss : skipped.grad_norm));
                t.start_step();
                const StepResult next = t.finish_step();
                check(!next.skipped && std::isfinite(next.loss) && state_of(t.model) != state);
            }
}

// Without the flag, the weights show it, but for fp16's; with it, finite steps have the same bits.
TEST(check_not_skipped) {
    for (const Words& precision : precisions) {
        if (precision == Words{"--dtype", "fp16"}) continue;
        Trainer t(small_run(precision), 0);
        const StepResult r = spoiled_step(t, false, std::numeric_limits<float>::quiet_NaN());
        t.start_step();
        check(!r.skipped && !std::isfinite(t.finish_step().loss), "without the flag a step is not skipped");
        const Trained plain = train(small_run(precision), 0);
        for (const Words& more :
             {Words{"--skip-nonfinite", "3"}, {"--skip-nonfinite", "3", "--verify-every", "2"}})
            check(train(small_run(with(precision, more)), 1) == plain, "finite steps have other bits");
    }
}

// A verified step may be skipped, too.
TEST(check_verified_and_skipped) {
    Trainer t(small_run({"--skip-nonfinite", "2", "--verify-every", "1", "--total-batch-size", "64"}), 0);
    const std::string state = state_of(t.model);
    int calls = 0;
    const float inf = std::numeric_limits<float>::infinity();
    const Observer observer = observe_calls([&](const Call& call, const Variant&) {
        if (call.op->name == "cross_entropy" && ++calls <= 2)
            copy_bytes(t.model.activations.losses.data, &inf, sizeof inf);
    });
    t.model.context.observer = &observer;
    t.start_step();
    check(t.finish_step().skipped && state_of(t.model) == state, "a verified step that is skipped");
}

TEST(check_update_of_loss_scale) {
    Trainer t(small_run({"--dtype", "fp16"}), 0);
    const Model& m = t.model;
    float scale = 8;
    int32_t counts[2] = {0, 1};
    copy_bytes(m.loss_scale_counts.data, counts, sizeof counts);
    struct Update {
        bool overflows;
        int64_t interval;
        float before, after;
        std::array<int32_t, 2> counts;
    };
    for (const Update& u : {Update{false, 2, 8, 8, {1, 2}},
                            {false, 2, 8, 16, {0, 3}},
                            {false, 2, 16, 16, {1, 4}},
                            {true, 2, 16, 8, {0, 4}},
                            {true, 0, 8, 8, {0, 4}},
                            {false, 2, 0x1p127f, 0x1p127f, {1, 5}},
                            {false, 2, 0x1p127f, 0x1p127f, {0, 6}}}) {
        const double squares = u.overflows ? INFINITY : 1, guard = 1;
        copy_bytes(m.loss_scale.data, &u.before, sizeof u.before);
        copy_bytes(m.squares.data, &squares, sizeof squares);
        copy_bytes(m.loss_squares.data, &guard, sizeof guard);
        update_loss_scale(m.context, {.scale = m.loss_scale,
                                      .counts = m.loss_scale_counts,
                                      .squares = m.squares,
                                      .guard = m.loss_squares,
                                      .interval = u.interval});
        CHECK(hipDeviceSynchronize());
        copy_bytes(&scale, m.loss_scale.data, sizeof scale);
        copy_bytes(counts, m.loss_scale_counts.data, sizeof counts);
        check(scale == u.after && counts[0] == u.counts[0] && counts[1] == u.counts[1],
              "scale " + std::to_string(scale) + ", counts " + std::to_string(counts[0]) + " " +
                  std::to_string(counts[1]));
    }
}

// An overflow halves the loss's scale. AdamW's bias correction does not count its step, the schedule does. A checkpoint behind it
// continues with the same bits.
TEST(check_loss_scale) {
    constexpr float inf = std::numeric_limits<float>::infinity();
    for (size_t i = 0; i < std::size(trained); i++) {
        const std::string out = in_folder("scaled" + std::to_string(i));
        const Words words = with({"--dtype", "fp16", "--out", out, "--total-batch-size", "256"}, trained[i]);
        fs::create_directories(out);
        Trainer t(small_run(words), 0);
        t.start_step();
        const StepResult first = t.finish_step(), skipped = spoiled_step(t, false, inf);
        check(!first.skipped && first.loss_scale == 65536 && skipped.skipped && skipped.loss_scale == 65536);
        save(t, OpenFolder(out));
        Trainer resumed(small_run(with(words, {"--resume", out + "/step_000002"})), 0);
        for (Trainer* each : {&t, &resumed}) {
            int32_t number = 0;
            const Observer observer = observe_calls([&](const Call& call, const Variant&) {
                if (call.op->name == "adamw") copy_bytes(&number, call.operand("step").data, sizeof number);
            });
            each->model.context.observer = &observer;
            each->start_step();
            const StepResult next = each->finish_step();
            check(!next.skipped && next.loss_scale == 32768 && number == 2, "AdamW's second step");
            check(next.lr == learning_rate(t.options, 3), "the schedule counts it");
            int32_t counts[2];
            copy_bytes(counts, each->model.loss_scale_counts.data, sizeof counts);
            check(counts[0] == 1 && counts[1] == 3, "one good step since; the next one is AdamW's third");
        }
        check(state_of(t.model) == state_of(resumed.model), "a resumed run has other bits");
        Trainer other(small_run(with(words, {"--resume", out + "/step_000002", "--loss-scale", "512"})), 0);
        other.start_step();
        check(other.finish_step().loss_scale == 512, "a fixed scale is the flag's");
    }
    Trainer diverged(small_run({"--dtype", "fp16"}), 0);
    const float low = 0x1p-13f;
    copy_bytes(diverged.model.loss_scale.data, &low, sizeof low);
    check(spoiled_step(diverged, false, inf).skipped);
    refused("an overflow at the least scale", {"step 2: ", "the run has diverged"},
            [&] { spoiled_step(diverged, false, inf); });
    Trainer fixed(small_run({"--dtype", "fp16", "--loss-scale", "1024"}), 0);
    refused("an overflow at a fixed scale", {"step 1: ", "1024", "--loss-scale 0"},
            [&] { spoiled_step(fixed, false, inf); });
}

// ---- spikes ----

TEST(check_spikes) {
    SpikeDetector detector;
    for (int i = 0; i < 200; i++) {
        const double loss = 3 + 0.01 * (i % 5), norm = 1 + 0.05 * (i % 7);
        const bool high = i == 40 || i == 20;
        const auto spikes = detector.add(high ? 4 : loss, i == 100 ? 9 : norm);
        if (i == 40)
            check(spikes.size() == 1 && std::string(spikes[0].quantity) == "loss" && spikes[0].found == 4 &&
                  spikes[0].expected == 3.02 && spikes[0].allowed > 3.2 && spikes[0].allowed < 3.3);
        else if (i == 100)
            check(spikes.size() == 1 && std::string(spikes[0].quantity) == "grad_norm" &&
                  spikes[0].found == 9);
        else
            check(spikes.empty(), "no spike at " + std::to_string(i));
    }
    SpikeDetector level;
    int found = 0;
    for (int i = 0; i < 200; i++) found += static_cast<int>(level.add(i < 64 ? 1 : 2, 1).size());
    check(found == 32, "a value that stays high is normal after 32 steps: " + std::to_string(found));
    SpikeDetector falling;
    for (int i = 0; i < 200; i++)
        check(falling.add(10.0 / (1 + i), 1.0 / (1 + i)).empty(), "a loss that falls");
}

// ---- data that is left out ----

std::vector<int32_t> tokens_of(Trainer& t) {
    t.start_step();
    t.finish_step();
    std::vector<int32_t> tokens(static_cast<size_t>(t.model.activations.tokens.elements()));
    copy_bytes(tokens.data(), t.model.activations.tokens.data, t.model.activations.tokens.bytes());
    return tokens;
}
std::vector<int32_t> expected_tokens(const Trainer& t, int64_t step) {
    std::vector<int32_t> tokens(static_cast<size_t>(t.options.batch_size * t.options.seq_len)),
        targets = tokens;
    t.data.train->micro_batch(step, t.accumulation - 1, 0, 1, tokens.data(), targets.data());
    return tokens;
}

// Resumed in front of a spike with other data, then resumed again without the flag.
TEST(check_data_skip) {
    const Words words = {"--out", in_folder("skip")};
    fs::create_directories(in_folder("skip"));
    {
        Trainer t(small_run(words), 0);
        for (int64_t step = 0; step < 3; step++) check(tokens_of(t) == expected_tokens(t, step), "all data");
        save(t, OpenFolder(in_folder("skip")));
        check(parse_manifest(get(in_folder("skip/step_000003/manifest.json")), "").data_position == 3 * 8);
    }
    const Words resumed = with(words, {"--resume", in_folder("skip/step_000003")});
    {
        Trainer t(small_run(with(resumed, {"--data-skip", "16"})), 0);  // two steps' sequences
        check(t.warnings.find("16 sequences after") != t.warnings.npos, "it is said: " + t.warnings);
        check(tokens_of(t) == expected_tokens(t, 5), "the data goes on two steps later");
        save(t, OpenFolder(in_folder("skip")));
        const Manifest m = parse_manifest(get(in_folder("skip/step_000004/manifest.json")), "");
        check(m.data_position == 4 * 8 + 16 && m.config["data-skip"] == 16, "the manifest has it");
    }
    const Words later = with(words, {"--resume", in_folder("skip/step_000004")});
    for (const Words& flag : {Words{}, {"--data-skip", "16"}}) {
        Trainer t(small_run(with(later, flag)), 0);
        check(t.warnings.find("sequences") == t.warnings.npos, "nothing more is left out: " + t.warnings);
        check(tokens_of(t) == expected_tokens(t, 6), "a later resume keeps it");
    }
    Trainer more(small_run(with(later, {"--data-skip", "24"})), 0);
    check(tokens_of(more) == expected_tokens(more, 7), "more is left out");
    refused("less than was left out", {"--data-skip 8", "expected at least 16", "step_000004"},
            [&] { Trainer t(small_run(with(later, {"--data-skip", "8"})), 0); });
    Trainer fresh(small_run({"--data-skip", "8"}), 0);
    check(tokens_of(fresh) == expected_tokens(fresh, 1), "from the start");
}

// ---- the device's sensors ----

TEST(check_sensors) {
    const std::string device = fresh_folder("0000:c1:00.0");
    check(std::isnan(read_amdgpu_sensors(device).watts) &&
          std::isnan(read_amdgpu_sensors(device).ecc_corrected));
    fs::create_directories(device + "/hwmon/hwmon3");
    fs::create_directories(device + "/ras");
    put("0000:c1:00.0/hwmon/hwmon3/power1_input", "750000000\n");
    put("0000:c1:00.0/hwmon/hwmon3/temp2_input", "61000\n");
    put("0000:c1:00.0/hwmon/hwmon3/freq1_input", "2100000000\n");
    put("0000:c1:00.0/hwmon/hwmon3/freq2_input", "none\n");
    put("0000:c1:00.0/ras/umc_err_count", "ue: 1\nce: 12\n");
    const Sensors s = read_amdgpu_sensors(device);
    check(s.watts == 750 && s.celsius == 61 && s.clock_mhz == 2100 && std::isnan(s.memory_clock_mhz) &&
          s.ecc_corrected == 12 && s.ecc_uncorrected == 1);
}

}  // namespace
}  // namespace divergence_checks
