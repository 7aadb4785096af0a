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
#include "run/options.h"

namespace llamac {

// How long ranks wait for one another.
struct Patience {
    double answer;  // --collective-timeout: seconds until a rank is lost that is at the same work
    double work;    // --watchdog: likewise where each has work of its own, such as files to read; 0: no limit

    explicit Patience(const Options& options) : answer(options.collective_timeout), work(options.watchdog) {}
};

// An error that all ranks have learned of at the same place: they can still do something together.
struct AgreedError : Error {
    using Error::Error;
};
// One that another rank reports.
struct ReportedElsewhere : AgreedError {
    using AgreedError::AgreedError;
};

// The reason of an exception that is no Error, too.
std::string reason_of(const std::exception& error);

struct Ranks {
    int64_t own = 0, count = 1;
    // Null with one rank, and where ranks are only planned.
    std::unique_ptr<Heartbeat> heartbeat;        // and with MPI: mpirun ends all ranks where one is lost
    std::unique_ptr<Transport> channel;          // between hosts: never waits for a device
    std::unique_ptr<Communicator> communicator;  // of the step's collectives

    // One process.
    Ranks();
    Ranks(Ranks&&) noexcept;
    ~Ranks();
    // Those of the launch. Connects the channel; every rank calls it. Throws Error.
    Ranks(const Launch& launch, const Patience& patience, const std::string& purpose = "channel");
    // The same ranks with a channel of their own, for another thread. Every rank calls it; this one must outlive it.
    // Throws Error.
    Ranks beside(const std::string& purpose) const;
    // Connects the communicator, on the current device, and the heartbeat. abandoned: Heartbeat's. Every rank calls it;
    // they throw as in together().
    void connect_devices(std::function<void(const LostRank&)> abandoned = {});

    bool is_first() const { return own == 0; }
    // Ranks that share this one's host.
    int64_t on_this_host() const { return launch.local_size; }
    // Calls it. If it throws on any rank, the first of these ranks throws an AgreedError, and all others ReportedElsewhere.
    // A rank that is done waits while the heartbeats of the others come, for Patience::work. work: up to 15 characters, for
    // who reads of the wait.
    void together(const char* work, const std::function<void()>& call) const;
    // Everybody's number or text, by rank. kind: Transport::gather's. Where another rank has failed in together(), inside of
    // which this may be, throws as together() does.
    std::vector<double> gather(const char* kind, double number) const;
    std::vector<std::string> gather(const char* kind, const std::string& text) const;
    // The sum of the ranks' numbers, in the order of ranks. kind: as in gather().
    double sum(const char* kind, double number) const;
    void barrier() const;
    // After an error that is not agreed on: nobody can tell what the others wait for. They are told, the device's work with
    // them is ended, and nothing is sent any more.
    void abandon() const;
    // Throws the same Error on all ranks where one of them runs with another value of a flag, another version or other
    // data than rank 0. facts: what else has to be the same, by name.
    void compare(const Options& options, const std::vector<std::pair<std::string, std::string>>& facts) const;

  private:
    struct Wait;
    Ranks(const Launch& launch, std::unique_ptr<Wait> wait, const std::string& purpose);
    std::unique_ptr<Transport> connect(const std::string& purpose) const;
    std::vector<std::string> exchange(const char* kind, const std::string& text, bool failed) const;

    Launch launch;
    std::unique_ptr<Wait> wait;  // for any of them
};

// find_launch(), where this build has an engine for it. What is wrong is wrong for all processes of a host: the first of
// them throws Error, the others ReportedElsewhere.
Launch join_launch();

// Throws Error where options ask for other ranks than there are, or for a batch or groups that they do not divide.
void check_launch(const Ranks& ranks, const Options& options);

inline const Ranks one_rank;

}  // namespace llamac
