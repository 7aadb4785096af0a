// Messages between the processes of a run, in host memory: MPI where it started them, else Gloo over TCP. The collectives
// of CPU runs and the host channel are made of exchange() alone.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "platform/error.h"
#include "platform/ranks/launch.h"

namespace llamac {

// A rank has ended or cannot be reached; or, late, it did not answer in time. by: who found it.
struct LostRank : Error {
    int64_t rank;
    bool late;
    LostRank(int64_t lost, int64_t by, bool is_late);
    // Of ranks that have not come, in words of the caller's.
    LostRank(int64_t lost, const std::string& line);
    LostRank(const LostRank& other, const std::string& during);
};

// Ranks that gather different things: one of them has taken a decision alone. All of them throw it.
struct OutOfStep : Error {
    using Error::Error;
};
// A rank that sent the error it had met in place of what the others gathered. All of them throw it.
struct FailedRank : Error {
    int64_t rank;
    FailedRank(int64_t failed, const std::string& error) : Error(error), rank(failed) {}
};

struct Message {
    int64_t peer;  // another rank
    void* data;    // of outgoing ones it is read only
    int64_t bytes;
    bool incoming;
};

// One thread at a time. Ranks that were connected for several purposes have a transport for each.
struct Transport {
    const int64_t rank, size;
    double seconds;  // until a rank that does not answer is lost, unless `waiting` decides
    // Called several times per second while exchange() waits for a rank, with the seconds so far. What it throws ends the
    // exchange.
    std::function<void(int64_t peer, double waited)> waiting;

    Transport(int64_t own, int64_t count, double limit) : rank(own), size(count), seconds(limit) {}
    Transport(const Transport&) = delete;
    virtual ~Transport() = default;

    // Starts all messages, and returns when all are done. Between two ranks, messages of a direction arrive in the order
    // of the calls and of their lists. Throws LostRank.
    virtual void exchange(std::span<const Message> messages) = 0;

    // all[size * bytes] = everybody's bytes, by rank.
    void all_gather(const void* own, void* all, int64_t bytes);
    // Returns when all ranks have called it.
    void barrier();
    // Rank root's bytes in place of everybody's.
    void broadcast(void* data, int64_t bytes, int64_t root);
    // Everybody's text, by rank. kind: of the text, up to 15 characters. It is sent with the number of the call, and throws
    // OutOfStep where those of the ranks differ. failed: the text is an error; throws FailedRank with the first one.
    std::vector<std::string> gather(const char* kind, const std::string& text, bool failed = false);

  protected:
    void wait_for(int64_t peer, double waited) const;

  private:
    int64_t gathered = 0;  // calls of gather()
};

// Connects to all ranks of the launch; every rank calls it with the same purposes in the same order. seconds: until a
// missing rank, now or later, is an error. Throws Error, also where this build has no engine for the launcher.
std::unique_ptr<Transport> connect(const Launch& launch, const std::string& purpose, double seconds);

// Throws Error where this build has no engine for so many processes of the launcher, or the engine's variables are wrong.
void check_engine(Launcher launcher, int64_t ranks);

// What connect() takes; null where the build is without.
bool has_gloo();
bool has_mpi();
std::unique_ptr<Transport> connect_gloo(const Launch& launch, const std::string& purpose, double seconds);
std::unique_ptr<Transport> connect_mpi(const Launch& launch, double seconds);

}  // namespace llamac
