// Gloo: TCP between any processes.
#include "platform/error.h"
#include "platform/ranks/launch.h"
#include "platform/ranks/transport.h"
#include "platform/threads.h"

#if defined(LLAMAC_GLOO)
#include <gloo/common/logging.h>
#include <gloo/rendezvous/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>

namespace llamac {
namespace {

// The addresses of all ranks, which Gloo looks up. set() exchanges this rank's address for those of all.
struct Store : gloo::rendezvous::Store {
    const Launch& launch;
    const std::string& purpose;
    const double seconds;
    std::map<std::string, std::string> values;

    Store(const Launch& of, const std::string& what, double limit)
        : launch(of), purpose(what), seconds(limit) {}

    void set(const std::string& key, const std::vector<char>& data) override {
        const std::string own = key + "\n" + std::string(data.begin(), data.end());
        for (const std::string& each : meet(launch, purpose, own, seconds)) {
            const size_t end = each.find('\n');
            values[each.substr(0, end)] = each.substr(end + 1);
        }
    }
    std::vector<char> get(const std::string& key) override {
        const std::string& value = values.at(key);
        return {value.begin(), value.end()};
    }
    void wait(const std::vector<std::string>& keys) override {
        for (const std::string& key : keys) CHECK(values.count(key) == 1);
    }
};

// Versions of Gloo since 2025 share the store, older ones borrow it.
template <class Context>
void connect(Context& context, const std::shared_ptr<Store>& store,
             std::shared_ptr<gloo::transport::Device>& device) {
    if constexpr (requires { context.connectFullMesh(*store, device); })
        context.connectFullMesh(*store, device);
    else
        context.connectFullMesh(store, device);
}

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
    std::shared_ptr<gloo::rendezvous::Context> context;
    // Messages so far with each peer: their tags, which are the same at both ends.
    std::vector<uint64_t> sent, received;
    std::unique_ptr<Turns> turns;  // null until a message is waited for

    GlooTransport(const Launch& launch, const std::string& purpose, double limit)
        : Transport(launch.rank, launch.size, limit),
          context(
              std::make_shared<gloo::rendezvous::Context>(static_cast<int>(rank), static_cast<int>(size))),
          sent(static_cast<size_t>(size)),
          received(static_cast<size_t>(size)) {
        context->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds)));
        gloo::transport::tcp::attr attributes;
        if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"))  // as PyTorch's
            attributes.iface = interface;
        else
            attributes.hostname = own_address(launch);
        try {
            auto device = gloo::transport::tcp::CreateDevice(attributes);
            connect(*context, std::make_shared<Store>(launch, purpose, seconds), device);
        } catch (const gloo::Exception& error) {
            fail("rank ", rank, ": Gloo: ", error.what());
        } catch (const gloo::EnforceNotMet& error) {  // an interface without an address
            fail("rank ", rank, ": Gloo: ", error.what());
        } catch (const std::system_error& error) {
            fail("rank ", rank, ": Gloo: cannot start a thread: ", error.code().message());
        }
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
