// Gloo: TCP between any processes.
#include "platform/error.h"
#include "platform/ranks/launch.h"
#include "platform/ranks/transport.h"
#include "platform/threads.h"

#if defined(LLAMAC_GLOO)
#include <gloo/common/error.h>
#include <gloo/common/logging.h>
#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

namespace llamac {
namespace {

// Ends each wait for a message several times per second, from a thread: Gloo cannot tell whether a message has come, and a
// timeout of its own breaks the connections.
struct Turns {
    std::mutex mutex;
    std::condition_variable ended;
    gloo::transport::UnboundBuffer* awaited = nullptr;
    bool over = false;
    std::thread thread;

    Turns() : thread(start_thread_without_signals([this] { run(); })) {}
    Turns(const Turns&) = delete;
    ~Turns() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            over = true;
        }
        ended.notify_one();
        thread.join();
    }
    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        while (!ended.wait_for(lock, std::chrono::milliseconds(200), [this] { return over; })) {
            if (!awaited) continue;
            awaited->abortWaitRecv();
            awaited->abortWaitSend();
        }
    }
    void set(gloo::transport::UnboundBuffer* buffer) {
        const std::lock_guard<std::mutex> lock(mutex);
        awaited = buffer;
    }
    // Whether the message was received or sent within a turn.
    bool wait(gloo::transport::UnboundBuffer& buffer, bool incoming) {
        constexpr std::chrono::hours forever{24 * 365};
        const std::unique_ptr<Turns, void (*)(Turns*)> last(this, [](Turns* turns) { turns->set(nullptr); });
        set(&buffer);
        return incoming ? buffer.waitRecv(nullptr, forever) : buffer.waitSend(nullptr, forever);
    }
};

struct GlooTransport : Transport {
    std::shared_ptr<gloo::transport::Context> context;
    // Messages so far with each peer: their tags, which are the same at both ends.
    std::vector<uint64_t> sent, received;
    std::unique_ptr<Turns> turns;  // null until a message is waited for

    GlooTransport(const Launch& launch, const std::string& purpose, double limit)
        : Transport(launch.rank, launch.size, limit),
          sent(static_cast<size_t>(size)),
          received(static_cast<size_t>(size)) {
        gloo::transport::tcp::attr attributes;
        if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"))  // as PyTorch's
            attributes.iface = interface;
        else
            attributes.hostname = own_address(launch);
        try {
            auto device = gloo::transport::tcp::CreateDevice(attributes);
            context = device->createContext(static_cast<int>(rank), static_cast<int>(size));
            context->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds)));
            connect(launch, purpose);
        } catch (const gloo::Exception& error) {
            fail("rank ", rank, ": Gloo: ", error.what());
        } catch (const gloo::EnforceNotMet& error) {  // an interface without an address
            fail("rank ", rank, ": Gloo: ", error.what());
        } catch (const std::system_error& error) {
            fail("rank ", rank, ": Gloo: cannot start a thread: ", error.code().message());
        }
    }

    // Each pair of ranks has a connection, and each of its ends an address. Gloo's own rendezvous would give every rank the
    // addresses of all pairs.
    void connect(const Launch& launch, const std::string& purpose) {
        std::vector<std::string> addresses(static_cast<size_t>(size));
        for (int peer = 0; peer < size; peer++) {
            if (peer == rank) continue;
            const std::vector<char> bytes = context->createPair(peer)->address().bytes();
            addresses[peer].assign(bytes.begin(), bytes.end());
        }
        const std::vector<std::string> theirs = meet(launch, purpose, addresses, seconds);
        for (int peer = 0; peer < size; peer++)
            if (peer != rank) context->getPair(peer)->connect({theirs[peer].begin(), theirs[peer].end()});
    }

    void exchange(std::span<const Message> messages) override {
        struct Pending {
            std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
            const Message* message;
        };
        std::vector<Pending> pending;
        pending.reserve(messages.size());
        const Message* at = nullptr;
        try {
            for (const Message& m : messages) {
                if (m.bytes == 0) continue;
                at = &m;
                const size_t peer = static_cast<size_t>(m.peer);
                pending.push_back({context->createUnboundBuffer(m.data, static_cast<size_t>(m.bytes)), &m});
                if (m.incoming)
                    pending.back().buffer->recv(static_cast<int>(m.peer), received[peer]++);
                else
                    pending.back().buffer->send(static_cast<int>(m.peer), sent[peer]++);
            }
            const auto begin = std::chrono::steady_clock::now();
            for (const Pending& p : pending) {
                at = p.message;
                if (!turns) turns = std::make_unique<Turns>();
                while (!turns->wait(*p.buffer, at->incoming))
                    wait_for(at->peer,
                             std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
            }
        } catch (const gloo::Exception&) {  // its text begins with a source file of Gloo's
            throw LostRank(at->peer, rank, false);
        }
    }
};

}  // namespace

bool has_gloo() {
    return true;
}
std::unique_ptr<Transport> connect_gloo(const Launch& launch, const std::string& purpose, double seconds) {
    return std::make_unique<GlooTransport>(launch, purpose, seconds);
}

}  // namespace llamac
#else
namespace llamac {
bool has_gloo() {
    return false;
}
std::unique_ptr<Transport> connect_gloo(const Launch&, const std::string&, double) {
    return nullptr;
}
}  // namespace llamac
#endif
