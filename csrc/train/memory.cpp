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

struct Room {
    DeviceMemoryInfo device;
    int64_t later;  // what the runtime takes
};
Room room_for(const Options& options, const Sharding& sharding, Backend backend) {
    const int64_t given = options.device_memory.bytes;  // another machine's device, all of it free
    if (backend == Backend::host && given == 0) return {device_memory(), 0};
    return {given > 0 ? DeviceMemoryInfo{given, given} : device_memory(), runtime_bytes(sharding)};
}

std::string gib(int64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (int64_t{1} << 30));
    return text;
}

}  // namespace

int64_t runtime_bytes(const Sharding& sharding) {
    // For kernels that it loads at their first call, graphs and the matrix products' library; and of NCCL, which makes a
    // communicator's buffers at its first collective. On two H100s a run with three communicators took 0.97 GiB in all.
    constexpr int64_t loaded = int64_t{512} << 20, communicator = int64_t{192} << 20;
    return loaded + sharding.communicators() * communicator;
}

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

Options with_fp8_weights(const Config& config, const Options& options, int64_t ranks) {
    Options chosen = options;
    if (options.matmul_dtype != MatmulDType::fp8 || options.fp8_weights) return chosen;
    chosen.fp8_weights = Fp8Weights::recomputed;
    if (options.zero == 3 && ranks > 1) return chosen;
    chosen.fp8_weights = Fp8Weights::stored;
    // Beside the model: a step's tokens, and what --verify-every copies.
    constexpr int64_t beside = int64_t{1} << 30;
    const Room room =
        room_for(options, model_options(options, 0, ranks).sharding, computing_context().backend);
    if (planned_bytes(config, chosen, ranks) + beside > room.device.free - room.later)
        chosen.fp8_weights = Fp8Weights::recomputed;
    return chosen;
}

void check_memory(const Model& model, const Options& options) {
    const auto [device, later] = room_for(options, model.options.sharding, model.context.backend);
    const int64_t needed = model.arena.bytes() + later;
    if (needed <= device.free) return;
    // The trainer's own tensors in the arena: a step's tokens, whatever the flags.
    const int64_t ranks = model.options.sharding.ranks;
    const int64_t beside = model.arena.bytes() - planned_bytes(model.config, options, ranks);
    const std::string change = least_change(model.config, options, ranks, device.free - later - beside);
    fail("memory: the run needs ", gib(needed), ", the device has ", gib(device.free), " free of ",
         gib(device.total),
         change.empty() ? "; no recomputation, batch size or precision makes it fit"
                        : "; it fits with " + change);
}

}  // namespace llamac
