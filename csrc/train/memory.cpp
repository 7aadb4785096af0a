#include "train/memory.h"

#include "train/memory_advice.h"

namespace llamac {
namespace {

struct DeviceMemoryInfo {
    int64_t free, total;
};
DeviceMemoryInfo device_memory() {
    size_t free = 0, total = 0;
    CHECK(hipMemGetInfo(&free, &total));
    return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
}

std::string gib(int64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (int64_t{1} << 30));
    return text;
}

}  // namespace

std::vector<MemoryRow> memory_rows(const Model& model, bool allocated) {
    std::vector<MemoryRow> rows;
    for (const Arena::Row& row : model.arena.rows) {
        auto it = rows.begin();
        while (it != rows.end() && it->group != row.group) ++it;
        if (it == rows.end()) it = rows.insert(it, {row.group, 0, 0});
        it->tensors++;
        it->bytes += row.bytes;
    }
    if (model.context.backend == Backend::host) return rows;
    const DeviceMemoryInfo device = device_memory();
    const int64_t ours = allocated ? model.arena.bytes() : 0;
    rows.push_back({"runtime, other programs", 0, device.total - device.free - ours});
    return rows;
}

MemoryRow copy_row(const std::vector<NamedTensor>& tensors) {
    MemoryRow row{"checkpoint copy (host)", 0, 0, true};
    for (const NamedTensor& each : tensors) {
        row.tensors++;
        row.bytes += each.tensor.bytes();
    }
    return row;
}

void check_memory(const Model& model, const Options& options) {
    const int64_t given =
        parse_device_memory(options.device_memory);  // another machine's device, all of it free
    // The runtime takes more later: for kernels that it loads at their first call, graphs, the library.
    const int64_t later = model.context.backend == Backend::host && given == 0 ? 0 : int64_t{512} << 20;
    const DeviceMemoryInfo device = given > 0 ? DeviceMemoryInfo{given, given} : device_memory();
    const int64_t needed = model.arena.bytes() + later;
    if (needed <= device.free) return;
    // What the trainer planned into the model's arena: a step's tokens, whatever the flags.
    const int64_t ranks = model.options.sharding.ranks;
    const int64_t beside = model.arena.bytes() - planned_bytes(model.config, options, ranks);
    const std::string change = least_change(model.config, options, ranks, device.free - later - beside);
    fail("memory: the run needs ", gib(needed), ", the device has ", gib(device.free), " free of ",
         gib(device.total),
         change.empty() ? "; no recomputation, batch size or precision makes it fit"
                        : "; it fits with " + change);
}

}  // namespace llamac
