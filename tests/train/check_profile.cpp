// --profile's files: what they count, and what they leave out. The published peaks. What a run takes of the machine.
#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include "check.h"
#include "core/context.h"
#include "core/device_memory.h"
#include "core/json.h"
#include "ops/operations.h"
#include "platform/usage.h"
#include "train/peak.h"
#include "train/profile.h"

using namespace llamac;
using nlohmann::json;

namespace profile_checks {
namespace {

void wait_ms(int ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

struct Norm {
    static constexpr int64_t N = 64, C = 128;
    DeviceMemory x{N * C * 4}, out{N * C * 4}, weight{C * 4}, rstd{N * 4};

    void run_once(const Context& context) const {
        const auto rows = [&](const DeviceMemory& m) { return make_tensor(m.data, DType::f32, {N, C}); };
        const Tensor statistics = make_tensor(rstd.data, DType::f32, {N});
        const Tensor w = make_tensor(weight.data, DType::f32, {C});
        rmsnorm_forward(context,
                        {.out = rows(out), .rstd = statistics, .x = rows(x), .weight = w, .eps = 1e-5});
    }
};

json read_json(const std::string& path) {
    return json::parse(get(path));
}

const json* row_of(const json& profile, const std::string& operation) {
    for (const json& row : profile["operations"])
        if (row["operation"] == operation) return &row;
    return nullptr;
}

// Two steps of three norms, a copy and 20 ms of nothing each; the same work before, between and after them.
std::string profile_norms(int64_t begun, int64_t count) {
    const std::string out = in_folder("norms_" + std::to_string(begun));
    std::filesystem::create_directories(out);
    const Norm norm;
    std::vector<float> host(Norm::N * Norm::C);
    Context context = computing_context();
    const OpenFolder opened(out);
    Profile profile({5, count}, context, opened, 1e12);
    for (int64_t step = 4; step < 4 + begun; step++) {
        norm.run_once(context);
        profile.begin_step(step);
        for (int k = 0; k < 3; k++) norm.run_once(context);
        check(!!context.observer == (step >= 5 && step - 5 < count), "observed only in the profiled steps");
        wait_ms(20);
        copy_bytes_async(context, host.data(), norm.out.data, norm.out.bytes);
        profile.end_step();
        if (profile.ends_with(step)) profile.finish();
        norm.run_once(context);
    }
    check(!context.observer, "not observed after the steps");
    profile.finish();
    return out;
}

TEST(check_counts) {
    const std::string out = profile_norms(5, 2);
    const json profile = read_json(out + "/profile.json");
    check(profile["steps"] == 2 && profile["operations"].size() == 2, "two steps, two kinds of work");
    const json *norm = row_of(profile, "rmsnorm_forward"), *copy = row_of(profile, "copy");
    check(norm && copy, "rows of the norm and of the copy");
    if (!norm || !copy) return;
    constexpr double N = Norm::N, C = Norm::C;
    check((*norm)["calls"] == 6 && (*norm)["bytes"] == 6 * 4 * (2 * N * C + C + N), "calls and bytes");
    check((*norm)["shapes"].size() == 1 && (*norm)["shapes"][0]["shape"] == "N=64 C=128" &&
          (*norm)["shapes"][0]["calls"] == 6);
    check((*copy)["calls"] == 2 && (*copy)["bytes"] == 2 * 4 * N * C, "the copies");
    const double seconds = profile["seconds"], idle = profile["idle_seconds"];
    const double busy = (*norm)["seconds"].get<double>() + (*copy)["seconds"].get<double>();
    check(idle > 0.038 && seconds >= idle && std::abs(seconds - idle - busy) < 1e-5);
    const json& device = profile["device"];
    check(device["peak_tflops"] == 1.0 && device["copy_gbps"] > 0.1 && device["name"].is_string());
}

TEST(check_early_end) {
    for (const int64_t count : {int64_t{9}, INT64_MAX})
        check(read_json(profile_norms(2, count) + "/profile.json")["steps"] == 1, "a run that ends early");
    const std::string none = profile_norms(1, 9);
    check(!std::filesystem::exists(none + "/profile.json"), "no profile of no step");
    const auto steps = [](int64_t first, int64_t last, int64_t count) {
        const ProfiledSteps s = choose_profiled_steps(first, last, count);
        return std::pair(s.first, s.count);
    };
    check(steps(1, 10, 3) == std::pair(int64_t{2}, int64_t{3}), "not the first of many");
    check(steps(7, 9, 3) == std::pair(int64_t{7}, int64_t{3}), "all there are");
    check(steps(7, 9, 0).second == 0, "none");
}

// Naive attention copies keys and values by another operation: their time is its own.
TEST(check_calls_within_calls) {
    if (!device_properties().emulated) return;
    const std::string out = in_folder("nested");
    std::filesystem::create_directories(out);
    constexpr int64_t B = 1, T = 16, NH = 2, NKV = 1, HD = 16;
    std::vector<float> q(B * T * NH * HD), k(B * T * NKV * HD), v(k), to(q), lse(B * NH * T);
    const auto heads = [](std::vector<float>& x, int64_t count) {
        return make_tensor(x.data(), DType::f32, {B, T, count, HD});
    };
    Context context = computing_context();
    const OpenFolder opened(out);
    Profile profile({1, 1}, context, opened, 0);
    profile.begin_step(1);
    Context dry_run = context;
    dry_run.dry_run = true;
    double squares = 0;
    global_norm(dry_run, {.squares = make_tensor(&squares, DType::f64, {1}),
                          .x = make_tensor(q.data(), DType::f32, {4}),
                          .accumulate = false});
    const std::vector<Tensor> tensors = {heads(to, NH),
                                         make_tensor(lse.data(), DType::f32, {B, NH, T}),
                                         heads(q, NH),
                                         heads(k, NKV),
                                         heads(v, NKV),
                                         {},
                                         {}};
    const std::vector<Scalar> scalars = {0.25};
    run(find_operation("attention_forward"), tensors, scalars, context, "naive");
    profile.end_step();
    profile.finish();
    const json rows = read_json(out + "/profile.json");
    check(rows["operations"].size() == 1 && row_of(rows, "attention_forward"));
    check(rows["device"]["peak_tflops"].is_null(), "a peak that is not known");
}

TEST(check_peaks) {
    const auto tflops = [](const char* name, int units, DType dtype) {
        return std::round(published_flops(name, units, dtype) / 1e11) / 10;
    };
    check(tflops("NVIDIA H200", 132, DType::bf16) == 989.4 && tflops("NVIDIA H200", 132, DType::f32) == 66.9);
    check(tflops("AMD Instinct MI300X", 304, DType::bf16) == 1307.4, "MI300X");
    check(tflops("AMD Instinct MI300X", 38, DType::bf16) == 163.4, "an eighth of an MI300X");
    check(tflops("AMD Instinct MI250X", 110, DType::bf16) == 191.5, "one of an MI250X's two devices");
    check(tflops("AMD Radeon RX 7900 XTX", 96, DType::bf16) == 122.8, "never more than the whole");
    check(tflops("NVIDIA GeForce RTX 4090 D", 114, DType::bf16) == 0 && tflops("", 1, DType::bf16) == 0);
    if (device_properties().emulated) check(peak_flops(DType::bf16) > 1e8, "the CPU's is measured");
}

TEST(check_usage) {
    UsageMeter meter;
    const auto begin = std::chrono::steady_clock::now();
    volatile double x = 1;
    while (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(150)) x = x * 1.0001;
    const Usage busy = meter.read();
    wait_ms(150);
    const Usage quiet = meter.read();
    check(busy.rss_gib > 0 && busy.rss_gib < 1000 && busy.system_mem_gib > 0, "memory");
    check(busy.cpu_percent > 10 && quiet.cpu_percent < busy.cpu_percent / 2, "CPU use");
    if (device_properties().emulated) check(busy.gpu_mem_gib == 0 && std::isnan(busy.gpu_percent), "no GPU");
    check(meter.read().cpu_percent == quiet.cpu_percent, "a reading is kept for a while");
}

// Of both versions of cgroups, with a limit above the process's own group, and in a container.
TEST(check_cgroups) {
    const std::string mounts = fresh_folder("cgroup"), list = mounts + "/list";
    const auto group = [&](const std::string& path, const std::string& limit, const char* used,
                           bool unified) {
        std::filesystem::create_directories(mounts + path);
        put("cgroup" + path + (unified ? "/memory.max" : "/memory.limit_in_bytes"), limit);
        put("cgroup" + path + (unified ? "/memory.current" : "/memory.usage_in_bytes"), used);
        put("cgroup" + path + "/memory.stat",
            "anon 1\ninactive_file 1073741824\ntotal_inactive_file 1073741824\n");
    };
    put("cgroup/list", "0::/jobs/run\n");
    check(std::isinf(cgroup_memory_gib(list, mounts)), "no limit");
    group("/jobs", "8589934592", "3221225472", true);
    group("/jobs/run", "max", "1", true);
    check(cgroup_memory_gib(list, mounts) == 6, "the limit of a group above");
    group("/jobs/run", "4294967296", "4294967296", true);
    check(cgroup_memory_gib(list, mounts) == 1, "the least, without pages of files");
    put("cgroup/list", "3:cpu:/x\n4:memory:/on/the/host\n");
    group("/memory", "2147483648", "2147483648", false);
    check(cgroup_memory_gib(list, mounts) == 1, "a container's, version 1");
}

// Ranks that do not record end the profile with the step of the one that does.
TEST(check_ranks_agree) {
    Context context;
    const OpenFolder out(fresh_folder("along"));
    const ProfiledSteps steps = choose_profiled_steps(1, 12, 3);
    Profile records(steps, context, out, 0), goes_along(steps, context, out, 0, false);
    for (int64_t step = 1; step <= 12; step++) {
        goes_along.begin_step(step);
        check(!context.observer, "nothing is observed");
        check(goes_along.ends_with(step) == (step == 4) && records.ends_with(step) == (step == 4));
    }
}

}  // namespace
}  // namespace profile_checks
