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

// Time limits of ranks that wait for one another.
struct Patience {
    double answer;  // --collective-timeout: seconds until a rank at the same work is lost
    double work;    // --watchdog: likewise while each rank works alone, as on files; 0: no limit

    explicit Patience(const Options& options) : answer(options.collective_timeout), work(options.watchdog) {}
};

// An error that all ranks throw at the same place, so that they can still cooperate.
struct AgreedError : Error {
    using Error::Error;
};
// The same on the ranks that do not report it.
struct ReportedElsewhere : AgreedError {
    using AgreedError::AgreedError;
};

// The message of any exception.
std::string reason_of(const std::exception& error);

struct Ranks {
    int64_t own = 0, count = 1;
    // Null with one rank and in a dry run.
    std::unique_ptr<Heartbeat> heartbeat;        // and with MPI, as mpirun ends all ranks if one is lost
    std::unique_ptr<Transport> channel;          // between hosts: never waits for a device
    std::unique_ptr<Communicator> communicator;  // of the step's collectives

    // One process.
    Ranks();
    Ranks(Ranks&&) noexcept;
    ~Ranks();
    // The ranks of the launch. Connects the channel; every rank calls it. Throws Error.
    Ranks(const Launch& launch, const Patience& patience, const std::string& purpose = "channel");
    // The same ranks with a channel of their own, for another thread. Every rank calls it; *this must outlive the result.
    // Throws Error.
    Ranks beside(const std::string& purpose) const;
    // Connects the communicator, on the current device, and the heartbeat. abandoned: as in Heartbeat. Every rank calls it;
    // throws as together().
    void connect_devices(std::function<void(const LostRank&)> abandoned = {});

    bool is_first() const { return own == 0; }
    // Ranks that share this one's host.
    int64_t on_this_host() const { return launch.local_size; }
    // Runs `call` on every rank. If it throws on any, the first of these throws AgreedError, and all others
    // ReportedElsewhere. Waits for the others up to Patience::work. work: up to 15 characters, for messages.
    void together(const char* work, const std::function<void()>& call) const;
    // The number or text of each rank. kind: as in Transport::gather. If another rank has failed in together(), throws as
    // together() does.
    std::vector<double> gather(const char* kind, double number) const;
    std::vector<std::string> gather(const char* kind, const std::string& text) const;
    void barrier() const;
    // After an error that is not agreed on: tells the other ranks, ends the device's collectives, and sends nothing any more.
    void abandon() const;
    // Throws the same Error on all ranks if a flag or a fact of one differs from rank 0's. facts: names and values.
    void compare(const Options& options, const std::vector<std::pair<std::string, std::string>>& facts) const;

  private:
    struct Wait;
    Ranks(const Launch& launch, std::unique_ptr<Wait> wait, const std::string& purpose);
    std::unique_ptr<Transport> connect(const std::string& purpose) const;
    std::vector<std::string> exchange(const char* kind, const std::string& text, bool failed) const;

    Launch launch;
    std::unique_ptr<Wait> wait;  // for any of them
};

// find_launch() and a check of the engine. The first process of a host throws Error, the others ReportedElsewhere.
Launch join_launch();

// Throws Error if the options do not fit the number of ranks.
void check_launch(const Ranks& ranks, const Options& options);

inline const Ranks one_rank;

}  // namespace llamac
