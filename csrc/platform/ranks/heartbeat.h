// Finds the rank that was lost first. A lost rank stops the ranks that wait for it, which stop others, and each would name
// another one. So every rank reports to rank 0 several times per second, in a thread and over a transport of its own, and
// rank 0 tells all which rank does not.
#pragma once
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "platform/ranks/transport.h"

namespace llamac {

struct Heartbeat {
    // Every rank calls it. abandoned: called by the heartbeat's thread if this rank is still blocked, as by its device, 5 s
    // after a rank was lost.
    Heartbeat(std::unique_ptr<Transport> transport, std::function<void(const LostRank&)> abandoned);
    Heartbeat(const Heartbeat&) = delete;
    // Tells the others that this rank ends; during an exception, as a lost rank.
    ~Heartbeat();

    // The rank that all ranks are told, if that comes within two seconds, else `found`. Later calls return the same.
    LostRank first_lost(const LostRank& found);
    // Throws LostRank if a rank is lost, and Error after announce().
    void check();
    // Tells the others that this rank ends because of an error, as if it were lost.
    void announce();

  private:
    enum class State : int64_t { there, leaving, ended, silent };
    struct Word {  // from rank 0 to another rank, and from that rank about itself
        State state = State::there;
        int64_t rank = 0;  // that has ended or is silent
    };
    void run();
    void ask_others();
    void answer_first();
    void exchange(int64_t peer, const Word& own, Word& theirs);
    void keep(const LostRank& lost);  // with the mutex held
    void learn(const LostRank& lost);
    void learn(const Word& word);

    const std::unique_ptr<Transport> transport;
    const std::function<void(const LostRank&)> abandoned;
    std::mutex mutex;
    std::condition_variable changed;
    Word own;                       // said next
    std::optional<LostRank> known;  // the first one
    std::chrono::steady_clock::time_point known_since;
    bool asked = false;  // for it
    bool announced = false;
    bool over = false;
    std::thread thread;
};

// A transport that throws the heartbeat's LostRank in place of its own, and does not wait for a rank that is known to be
// lost. The heartbeat must outlive it.
std::unique_ptr<Transport> watched(std::unique_ptr<Transport> transport, Heartbeat& heartbeat);

}  // namespace llamac
