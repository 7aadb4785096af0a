// Messages between the processes of a run, in host memory: by MPI under mpirun, else by Gloo over TCP. The collectives of CPU
// runs and the host channel are built on exchange().
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

// A rank has ended, cannot be reached or, if late, did not answer in time. by: the rank that found it.
struct LostRank : Error {
    int64_t rank;
    bool late;
    LostRank(int64_t lost, int64_t by, bool is_late);
    LostRank(int64_t lost, const std::string& line);
    LostRank(const LostRank& other, const std::string& during);
};

// Ranks gather different things, because one took a decision alone. All ranks throw it.
struct OutOfStep : Error {
    using Error::Error;
};
// A rank sent an error in place of its text. All ranks throw it.
struct FailedRank : Error {
    int64_t rank;
    FailedRank(int64_t failed, const std::string& error) : Error(error), rank(failed) {}
};

struct Message {
    int64_t peer;  // another rank
    void* data;    // only read if outgoing
    int64_t bytes;
    bool incoming;
};

// One thread at a time. Each purpose has its own transport.
struct Transport {
    const int64_t rank, size;
    double seconds;  // until a rank that does not answer is lost, unless `waiting` decides
    // Called several times per second while exchange() waits for a rank, with the seconds so far; may throw.
    std::function<void(int64_t peer, double waited)> waiting;

    Transport(int64_t own, int64_t count, double limit) : rank(own), size(count), seconds(limit) {}
    Transport(const Transport&) = delete;
    virtual ~Transport() = default;

    // Sends and receives all messages; blocking. Messages from one rank to another arrive in order. Throws LostRank.
    virtual void exchange(std::span<const Message> messages) = 0;

    // all[size * bytes] = the bytes of each rank.
    void all_gather(const void* own, void* all, int64_t bytes);
    // Returns when all ranks have called it.
    void barrier();
    // data = data of rank root.
    void broadcast(void* data, int64_t bytes, int64_t root);
    // The text of each rank. kind: up to 15 characters, sent with the number of the call; throws OutOfStep if the ranks'
    // differ. failed: the text is an error; all ranks throw FailedRank with the first one.
    std::vector<std::string> gather(const char* kind, const std::string& text, bool failed = false);

  protected:
    void wait_for(int64_t peer, double waited) const;

  private:
    int64_t gathered = 0;  // calls of gather()
};

// Connects all ranks of the launch, which call it with the same purposes in the same order. seconds: until a missing rank is
// an error. Throws Error, also if this build has no engine for the launcher.
std::unique_ptr<Transport> connect(const Launch& launch, const std::string& purpose, double seconds);

// Throws Error if this build has no engine for the processes of the launcher, or the engine's variables are wrong.
void check_engine(Launcher launcher, int64_t ranks);

// The engines of connect(); null in a build without them.
bool has_gloo();
bool has_mpi();
std::unique_ptr<Transport> connect_gloo(const Launch& launch, const std::string& purpose, double seconds);
std::unique_ptr<Transport> connect_mpi(const Launch& launch, double seconds);

}  // namespace llamac
