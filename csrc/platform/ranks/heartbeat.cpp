#include "platform/ranks/heartbeat.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <vector>

#include "platform/threads.h"

namespace llamac {
namespace {

constexpr auto interval = std::chrono::milliseconds(200);
constexpr auto patience = std::chrono::seconds(2);
constexpr auto grace = std::chrono::seconds(5);

}  // namespace

Heartbeat::Heartbeat(std::unique_ptr<Transport> over_transport,
                     std::function<void(const LostRank&)> when_abandoned)
    : transport(std::move(over_transport)), abandoned(std::move(when_abandoned)) {
    const double limit =
        transport->seconds * (transport->rank == 0 ? 1 : 2);  // rank 0 may wait for another one
    transport->waiting = [this, limit](int64_t peer, double waited) {
        const std::lock_guard<std::mutex> lock(mutex);
        // The ranks of a node are lost together: after the first one, the others have no limit of their own.
        const bool late = known && std::chrono::steady_clock::now() - known_since > patience;
        if (late || waited > limit) throw LostRank(peer, transport->rank, true);
    };
    thread = start_thread_without_signals([this] { run(); });
}

Heartbeat::~Heartbeat() {
    {
        const std::lock_guard<std::mutex> lock(mutex);
        over = true;
        if (own.state == State::there)
            own = {std::uncaught_exceptions() > 0 ? State::ended : State::leaving, transport->rank};
    }
    changed.notify_all();
    thread.join();
}

LostRank Heartbeat::first_lost(const LostRank& found) {
    std::unique_lock<std::mutex> lock(mutex);
    asked = true;
    changed.notify_all();
    changed.wait_for(lock, patience, [this] { return known.has_value(); });
    if (!known) keep(found);
    return *known;
}

void Heartbeat::check() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (known) throw LostRank(*known);
    if (announced)
        fail("rank ", transport->rank, ": sends nothing after an error that the ranks did not agree on");
}

void Heartbeat::announce() {
    const std::lock_guard<std::mutex> lock(mutex);
    announced = true;
    if (own.state == State::there) own = {State::ended, transport->rank};
    changed.notify_all();
}

void Heartbeat::keep(const LostRank& lost) {
    known = lost;
    known_since = std::chrono::steady_clock::now();
    if (own.state == State::there) own = {lost.late ? State::silent : State::ended, lost.rank};
    changed.notify_all();
}

void Heartbeat::learn(const LostRank& lost) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!known) keep(lost);
}

void Heartbeat::learn(const Word& word) {
    if (word.state == State::ended || word.state == State::silent)
        learn(LostRank(word.rank, 0, word.state == State::silent));
}

void Heartbeat::exchange(int64_t peer, const Word& said, Word& theirs) {
    Word copy = said;
    const Message messages[] = {{peer, &theirs, sizeof theirs, true}, {peer, &copy, sizeof copy, false}};
    transport->exchange(messages);
}

void Heartbeat::ask_others() {
    std::vector<int64_t> there;
    for (int64_t peer = 1; peer < transport->size; peer++) there.push_back(peer);
    while (!there.empty()) {
        Word said;
        {
            std::unique_lock<std::mutex> lock(mutex);
            changed.wait_for(lock, interval, [this] { return asked || own.state != State::there; });
            asked = false;
            said = own;
        }
        std::erase_if(there, [&](int64_t peer) {
            Word theirs;
            try {
                exchange(peer, said, theirs);
            } catch (const LostRank& lost) {
                learn(lost);
                return true;
            }
            learn(theirs);
            return theirs.state != State::there;
        });
        if (said.state != State::there) return;  // all have heard it
    }
}

void Heartbeat::answer_first() {
    for (;;) {
        Word said, first;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            said = own;
        }
        try {
            exchange(0, said, first);
        } catch (const LostRank& lost) {
            return learn(lost);
        }
        learn(first);
        if (said.state != State::there || first.state != State::there) return;
    }
}

void Heartbeat::run() {
    try {
        transport->rank == 0 ? ask_others() : answer_first();
    } catch (
        const std::exception&) {  // out of memory: this rank is as good as lost, and its main thread ends it
        learn(LostRank(transport->rank, transport->rank, false));
    }
    std::unique_lock<std::mutex> lock(mutex);
    if (!known || !abandoned) return;
    if (changed.wait_for(lock, grace, [this] { return over; })) return;
    lock.unlock();
    abandoned(*known);
}

namespace {

struct WatchedTransport : Transport {
    const std::unique_ptr<Transport> transport;
    Heartbeat& heartbeat;

    WatchedTransport(std::unique_ptr<Transport> inner, Heartbeat& of)
        : Transport(inner->rank, inner->size, inner->seconds), transport(std::move(inner)), heartbeat(of) {}

    void exchange(std::span<const Message> messages) override {
        heartbeat.check();
        try {
            transport->exchange(messages);
        } catch (const LostRank& lost) {
            throw LostRank(heartbeat.first_lost(lost));
        }
    }
};

}  // namespace

std::unique_ptr<Transport> watched(std::unique_ptr<Transport> transport, Heartbeat& heartbeat) {
    return std::make_unique<WatchedTransport>(std::move(transport), heartbeat);
}

}  // namespace llamac
