#include "train/ranks.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/context.h"

namespace llamac {
namespace {

// Chooses the device of a process among those of its host. Without a device, or in a CPU build, nothing.
void choose_device(const Launch& launch) {
    if (computing_context().backend == Backend::host) return;
    const int devices = device_count();
    // A launcher may show each process its own device alone.
    if (devices == 1 && launch.local_size > 1 && std::getenv("ROCR_VISIBLE_DEVICES")) return;
    if (launch.local_rank >= devices)
        fail("expected a device for each of the ", launch.local_size, " processes on this host, found ",
             devices);
    use_device(static_cast<int>(launch.local_rank));
}

}  // namespace

Ranks::Ranks(const Launch& from, double seconds, const std::string& purpose)
    : own(from.rank), count(from.size), launch(from) {
    if (count > 1) channel = connect(launch, purpose, seconds);
}

std::unique_ptr<Transport> Ranks::watch(std::unique_ptr<Transport> transport) const {
    return heartbeat && transport ? watched(std::move(transport), *heartbeat) : std::move(transport);
}

Ranks Ranks::beside(const std::string& purpose, double seconds) const {
    Ranks made(launch, seconds, purpose);
    made.channel = watch(std::move(made.channel));
    return made;
}

void Ranks::connect_devices(double seconds, std::function<void(const LostRank&)> abandoned) {
    if (count == 1) return;
    // Before any rank waits for another: one without a device would be missed for the whole of the timeout.
    together([&] { choose_device(launch); });
    together([&] {
        if (launch.launcher != Launcher::mpi)
            heartbeat =
                std::make_unique<Heartbeat>(connect(launch, "heartbeat", seconds), std::move(abandoned));
        channel->seconds = seconds;
        channel = watch(std::move(channel));
        check_collectives(count);
        communicator = computing_context().backend == Backend::host
                           ? make_host_communicator(watch(connect(launch, "collectives", seconds)))
                           : make_device_communicator(*channel);
    });
}

Launch join_launch() {
    try {
        const Launch launch = find_launch();
        if (launch.size > 1) check_engine(launch.launcher, launch.size);
        return launch;
    } catch (const Error& error) {
        if (speaks_for_host()) throw;
        throw ReportedElsewhere(error.what());
    }
}

void check_launch(const Ranks& ranks, const Options& options) {
    if (ranks.count > 1 && options.devices > 1 && options.devices != ranks.count)
        fail("--devices ", options.devices,
             ": expected no --devices if a launcher starts the processes, found ", ranks.count, " of them");
    micro_batches(options, ranks.count);
    shard_group(options, std::max(ranks.count, options.devices));
}

std::vector<std::string> Ranks::gather(const std::string& text) const {
    return channel ? channel->gather(text) : std::vector<std::string>{text};
}

std::vector<double> Ranks::gather(double number) const {
    std::vector<double> numbers(static_cast<size_t>(count));
    numbers[static_cast<size_t>(own)] = number;
    if (channel) channel->all_gather(&number, numbers.data(), sizeof number);
    return numbers;
}

void Ranks::barrier() const {
    if (channel) channel->barrier();
}

void Ranks::together(const std::function<void()>& call) const {
    if (!channel) return call();
    std::string error;
    try {
        call();
    } catch (const Error& found) {
        error = found.what();
    }
    const std::vector<double> failed = gather(error.empty() ? 0. : 1.);
    if (std::find(failed.begin(), failed.end(), 1.) == failed.end()) return;
    const std::vector<std::string> errors = gather(error);
    for (size_t rank = 0; rank < errors.size(); rank++) {
        if (errors[rank].empty()) continue;
        if (static_cast<int64_t>(rank) != own) throw ReportedElsewhere(errors[rank]);
        fail(rank == 0 ? "" : "rank " + std::to_string(rank) + ": ", errors[rank]);
    }
}

void Ranks::compare(const Options& options,
                    const std::vector<std::pair<std::string, std::string>>& facts) const {
    if (!channel) return;
    const nlohmann::ordered_json flags = to_json(options);
    nlohmann::ordered_json values;
    for (const auto& [flag, value] : flags.items()) values["--" + flag] = value.dump();
    for (const auto& [name, value] : facts) values[name] = value;
    const std::vector<std::string> all =
        gather(values.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    const auto first = nlohmann::json::parse(all[0]);
    for (size_t rank = 1; rank < all.size(); rank++) {
        const auto its = nlohmann::json::parse(all[rank]);
        for (const auto& item : first.items()) {
            const std::string expected = item.value().get<std::string>(),
                              found = its.value(item.key(), "none");
            if (found == expected) continue;
            const std::string line = "rank " + std::to_string(rank) + ": " + item.key() + ": expected " +
                                     expected + ", as rank 0 has it, found " + found;
            if (own != 0) throw ReportedElsewhere(line);
            fail(line);
        }
    }
}

}  // namespace llamac
