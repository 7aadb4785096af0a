// The processes that train together, one per device: their identities, and their messages in addition to the
// collectives of a step.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "platform/ranks/communicator.h"
#include "platform/ranks/heartbeat.h"
#include "platform/ranks/launch.h"
#include "platform/ranks/transport.h"
#include "train/options.h"

namespace llamac {

// Seconds until a missing rank is an error, before the options are known.
constexpr double default_collective_timeout = 60;

// An error that another rank reports.
struct ReportedElsewhere : Error {
    using Error::Error;
};

struct Ranks {
    int64_t own = 0, count = 1;
    // Null with one rank, and where ranks are only planned.
    std::unique_ptr<Heartbeat> heartbeat;        // and with MPI: mpirun ends all ranks where one is lost
    std::unique_ptr<Transport> channel;          // between hosts: never waits for a device
    std::unique_ptr<Communicator> communicator;  // of the step's collectives

    // One process.
    Ranks() = default;
    // Those of the launch. Connects the channel; every rank calls it. Throws Error.
    Ranks(const Launch& launch, double seconds, const std::string& purpose = "channel");
    // The same ranks with a channel of their own, for another thread. Every rank calls it; this one must outlive it.
    // Throws Error.
    Ranks beside(const std::string& purpose, double seconds) const;
    // Connects the communicator, on the current device, and the heartbeat. seconds: until a missing rank is an error, from
    // now on. abandoned: Heartbeat's. Every rank calls it; they throw as in together().
    void connect_devices(double seconds, std::function<void(const LostRank&)> abandoned = {});

    bool is_first() const { return own == 0; }
    // Ranks that share this one's host.
    int64_t on_this_host() const { return launch.local_size; }
    // Calls it. If it throws on any rank, the first of these ranks throws its error, and all others ReportedElsewhere.
    void together(const std::function<void()>& call) const;
    // Everybody's number, by rank.
    std::vector<double> gather(double number) const;
    // Everybody's text, by rank.
    std::vector<std::string> gather(const std::string& text) const;
    void barrier() const;
    // Throws the same Error on all ranks where one of them runs with another value of a flag, another version or other
    // data than rank 0. facts: what else has to be the same, by name.
    void compare(const Options& options, const std::vector<std::pair<std::string, std::string>>& facts) const;

  private:
    std::unique_ptr<Transport> watch(std::unique_ptr<Transport> transport) const;

    Launch launch;
};

// find_launch(), where this build has an engine for it. What is wrong is wrong for all processes of a host: the first of
// them throws Error, the others ReportedElsewhere.
Launch join_launch();

// Throws Error where options ask for other ranks than there are, or for a batch or groups that they do not divide.
void check_launch(const Ranks& ranks, const Options& options);

inline const Ranks one_rank;

}  // namespace llamac
