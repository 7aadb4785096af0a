#include "train/profile.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/file.h"
#include "core/registry.h"

namespace llamac {
namespace {

struct Total {
    int64_t calls = 0;
    double seconds = 0, flops = 0, bytes = 0;
};
std::map<std::pair<std::string, std::string>, Total> totals;  // by operation and variant

void add(const Call& call, const Variant& variant, double seconds) {
    Total& t = totals[{call.op->name, variant.name}];
    t.calls++;
    t.seconds += seconds;
    t.flops += least_flops(call);
    t.bytes += least_bytes(call);
}

}  // namespace

void start_profile() {
    totals.clear();
    observe_runs(add);
}

void finish_profile(const std::string& out, int64_t steps, double seconds) {
    observe_runs(nullptr);
    std::vector<std::pair<std::pair<std::string, std::string>, Total>> rows(totals.begin(), totals.end());
    std::sort(rows.begin(), rows.end(),
              [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
    double measured = 0;
    for (const auto& row : rows) measured += row.second.seconds;
    rows.push_back({{"other", ""}, Total{0, seconds - measured, 0, 0}});

    std::printf("%-26s %-10s %8s %9s %6s %9s %8s\n", "operation", "variant", "calls", "ms/step", "share",
                "GFLOP/s", "GB/s");
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    const double n = static_cast<double>(steps);
    for (const auto& [key, t] : rows) {
        const double rate = t.seconds > 0 ? 1e-9 / t.seconds : 0;
        std::printf("%-26s %-10s %8.0f %9.3f %5.1f%% %9.1f %8.1f\n", key.first.c_str(), key.second.c_str(),
                    static_cast<double>(t.calls) / n, 1e3 * t.seconds / n, 100 * t.seconds / seconds,
                    t.flops * rate, t.bytes * rate);
        list.push_back({{"operation", key.first},
                        {"variant", key.second},
                        {"calls", t.calls},
                        {"seconds", t.seconds},
                        {"flops", t.flops},
                        {"bytes", t.bytes}});
    }
    const nlohmann::ordered_json profile = {{"steps", steps}, {"seconds", seconds}, {"operations", list}};
    write_file(out + "/profile.json", profile.dump(2) + "\n");
}

}  // namespace llamac
