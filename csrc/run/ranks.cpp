#include "run/ranks.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/context.h"

namespace llamac {
namespace {

// Chooses the device of a process among those of its host. In a CPU build, nothing.
void choose_device(const Launch& launch) {
    if (computing_context().backend == Backend::device) use_device(own_device(launch, device_count()));
}

}  // namespace

// The wait for another rank: its limit, and a line per minute.
struct Ranks::Wait {
    const int64_t own;
    const Patience patience;
    Heartbeat* heartbeat;        // null: there is none
    const char* work = nullptr;  // in together()
    int minutes = 0;

    struct In {
        Wait& wait;
        const char* const outer;
        In(Wait& of, const char* work) : wait(of), outer(std::exchange(of.work, work)) {}
        In(const In&) = delete;
        ~In() { wait.work = outer; }
    };

    void check(int64_t peer, double seconds) {
        if (heartbeat) heartbeat->check();
        const double limit = work ? patience.work : patience.answer;
        if ((!work || limit > 0) && seconds > limit) throw LostRank(peer, own, true);
        const int now = static_cast<int>(seconds / 60);
        // One rank says it: rank 0, or where it is the one that is waited for, the next.
        if (now > minutes && (own == 0 || (own == 1 && peer == 0)))
            std::fprintf(stderr, "train_llama3: rank %d waits for rank %d (%s), for %d min so far\n",
                         static_cast<int>(own), static_cast<int>(peer), work ? work : "a collective", now);
        minutes = now;
    }
};

Ranks::Ranks() = default;
Ranks::Ranks(Ranks&&) noexcept = default;
Ranks::~Ranks() = default;

Ranks::Ranks(const Launch& from, std::unique_ptr<Wait> waits, const std::string& purpose)
    : own(from.rank), count(from.size), launch(from), wait(std::move(waits)) {
    if (count > 1) channel = connect(purpose);
}

Ranks::Ranks(const Launch& from, const Patience& patience, const std::string& purpose)
    : Ranks(from, std::make_unique<Wait>(Wait{from.rank, patience, nullptr}), purpose) {}

Ranks Ranks::beside(const std::string& purpose) const {
    return {launch, count > 1 ? std::make_unique<Wait>(Wait{own, wait->patience, heartbeat.get()}) : nullptr,
            purpose};
}

std::unique_ptr<Transport> Ranks::connect(const std::string& purpose) const {
    std::unique_ptr<Transport> made = llamac::connect(launch, purpose, wait->patience.answer);
    made->waiting = [limits = wait.get()](int64_t peer, double seconds) { limits->check(peer, seconds); };
    return heartbeat ? watched(std::move(made), *heartbeat) : std::move(made);
}

void Ranks::connect_devices(std::function<void(const LostRank&)> abandoned) {
    if (count == 1) return;
    // Before any rank waits for another: one without a device would be missed for the whole of the timeout.
    together("devices", [&] { choose_device(launch); });
    together("connections", [&] {
        if (launch.launcher != Launcher::mpi) {
            heartbeat = std::make_unique<Heartbeat>(
                llamac::connect(launch, "heartbeat", wait->patience.answer), std::move(abandoned));
            wait->heartbeat = heartbeat.get();
            channel = watched(std::move(channel), *heartbeat);
        }
        check_collectives(count);
        communicator = computing_context().backend == Backend::host
                           ? make_host_communicator(connect("collectives"))
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
        fail("--devices ", options.devices, ": expected 1, or as many as the launcher has started, found ",
             ranks.count, " processes");
    const int64_t devices = std::max(ranks.count, options.devices);
    micro_batches(options, devices);
    shard_group(options, mesh_of(options, 0, devices).replicas().ranks);
}

std::vector<std::string> Ranks::exchange(const char* kind, const std::string& text, bool failed) const {
    try {
        return channel->gather(kind, text, failed);
    } catch (const FailedRank& error) {
        if (error.rank != own) throw ReportedElsewhere(error.what());
        throw AgreedError((own == 0 ? "" : "rank " + std::to_string(own) + ": ") + error.what());
    }
}

std::vector<std::string> Ranks::gather(const char* kind, const std::string& text) const {
    return channel ? exchange(kind, text, false) : std::vector<std::string>{text};
}

std::vector<double> Ranks::gather(const char* kind, double number) const {
    std::vector<double> numbers;
    for (const std::string& text :
         gather(kind, std::string(reinterpret_cast<char*>(&number), sizeof number))) {
        CHECK(text.size() == sizeof number);
        std::memcpy(&numbers.emplace_back(), text.data(), sizeof number);
    }
    return numbers;
}

void Ranks::barrier() const {
    gather("barrier", "");
}

void Ranks::abandon() const {
    if (heartbeat) heartbeat->announce();
    if (communicator) communicator->abort();
}

std::string reason_of(const std::exception& error) {
    return dynamic_cast<const std::bad_alloc*>(&error) ? "out of memory" : one_line(error.what());
}

void Ranks::together(const char* work, const std::function<void()>& call) const {
    if (!channel) return call();
    const Wait::In in(*wait, work);
    std::optional<std::string> error;
    try {
        call();
    } catch (const AgreedError&) {  // in a gather() of the call
        throw;
    } catch (const LostRank&) {
        throw;
    } catch (const std::exception& found) {
        error = reason_of(found);
    }
    try {
        exchange(work, error.value_or(""), error.has_value());
    } catch (const LostRank&) {  // it may have ended for the same reason, which says more
        if (error) fail("rank ", own, ": ", *error);
        throw;
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
        gather("options", values.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
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
            throw AgreedError(one_line(line));
        }
    }
}

}  // namespace llamac
