// Which rank was lost first. A rank that is lost stops those that wait for it, which stops those that wait for them: each
// would name another one. So every rank tells rank 0 several times per second that it is there, in a thread and over a
// transport of their own, and rank 0 tells all which one does not.
#pragma once
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "platform/ranks/transport.h"

namespace llamac {

struct Heartbeat {
    // Every rank calls it. abandoned: called by the heartbeat's thread where this rank is still there five seconds after
    // one was lost, because it waits for a device, for one; none: not called.
    Heartbeat(std::unique_ptr<Transport> transport, std::function<void(const LostRank&)> abandoned);
    Heartbeat(const Heartbeat&) = delete;
    // Takes leave of the others; while an exception is thrown, as a rank that is lost.
    ~Heartbeat();

    // What all ranks are told, if that comes within two seconds, else what this one has found. The same from then on.
    LostRank first_lost(const LostRank& found);
    // Throws it, where there is one, and Error after announce().
    void check();
    // Tells the others that this rank has met an error and ends, like one that is lost: before what it still does.
    void announce();

  private:
    enum class State : int64_t { there, leaving, ended, silent };
    struct Word {  // of rank 0 to another one, and back: of itself
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
    bool asked = false;             // for it
    bool announced = false;
    bool over = false;
    std::thread thread;
};

// A transport that throws what the heartbeat says in place of what it finds itself, and does not wait again for a rank that
// is known to be lost. The heartbeat must outlive it.
std::unique_ptr<Transport> watched(std::unique_ptr<Transport> transport, Heartbeat& heartbeat);

}  // namespace llamac
