// Collectives in host memory, as messages: every part goes straight to where it is wanted, which moves as few bytes as any
// algorithm.
#include <algorithm>
#include <cstring>
#include <optional>

#include "platform/error.h"
#include "platform/ranks/communicator.h"

namespace llamac {
namespace {

// Elements of a part that are reduced while they are in the cache, and all that is held of others' data beyond that.
constexpr int64_t piece_bytes = int64_t{4} << 20;

char* at(void* data, int64_t element, const ElementType& type) {
    return static_cast<char*>(data) + element * type.bytes;
}
const char* at(const void* data, int64_t element, const ElementType& type) {
    return static_cast<const char*>(data) + element * type.bytes;
}

// Some of the ranks of another transport, under numbers of their own.
struct PartOfTransport : Transport {
    Transport& whole;
    const std::vector<int64_t> members;

    PartOfTransport(Transport& of, const std::vector<int64_t>& chosen)
        : Transport(std::ranges::find(chosen, of.rank) - chosen.begin(), static_cast<int64_t>(chosen.size()),
                    of.seconds),
          whole(of),
          members(chosen) {}
    void exchange(std::span<const Message> messages) override {
        std::vector<Message> renumbered(messages.begin(), messages.end());
        for (Message& message : renumbered) message.peer = members[message.peer];
        whole.exchange(renumbered);
    }
};

struct HostCommunicator : Communicator {
    // The parts of data[count] that ranks own: rank r's is first(r) .. first(r+1).
    struct Parts {
        int64_t count, size;
        int64_t first(int64_t rank) const { return count / size * rank + std::min(rank, count % size); }
        int64_t elements(int64_t rank) const { return first(rank + 1) - first(rank); }
        int64_t largest() const { return elements(0); }
    };
    // Reduces this rank's part of all ranks' `in`, or gathers the parts `in` of all ranks.
    struct Call {
        void* out;
        const void* in;
        Parts parts;
        ElementType type;
        std::optional<Reduction> reduction;  // none: gathers

        int64_t first(int64_t rank) const { return parts.first(rank) * type.bytes; }
        int64_t bytes(int64_t rank) const { return parts.elements(rank) * type.bytes; }
    };

    const std::unique_ptr<Transport> transport;
    std::vector<char> received;
    bool grouped = false;
    std::vector<Call> group, afterwards;  // calls that need the results of others
    std::vector<Message> messages_of_group;

    explicit HostCommunicator(std::unique_ptr<Transport> over)
        : Communicator(over->rank, over->size), transport(std::move(over)) {}

    // out = the reduction of this rank's part of all ranks' `in`.
    void reduce_own(char* out, const void* in, const Parts& parts, const ElementType& type,
                    Reduction reduction) {
        const int64_t own = parts.elements(rank);
        const int64_t piece = std::max<int64_t>(1, piece_bytes / type.bytes);
        received.resize(static_cast<size_t>(size * std::min(piece, parts.largest()) * type.bytes));
        std::vector<Message> messages;
        std::vector<const void*> terms(static_cast<size_t>(size));
        for (int64_t begin = 0; begin < parts.largest(); begin += piece) {
            messages.clear();
            const auto within = [&](int64_t r) {
                return std::clamp<int64_t>(parts.elements(r) - begin, 0, piece);
            };
            const int64_t count = within(rank);
            for (int64_t peer = 0; peer < size; peer++) {
                char* const theirs = received.data() + peer * count * type.bytes;
                terms[peer] = theirs;
                if (peer == rank) continue;
                messages.push_back({peer, theirs, count * type.bytes, true});
                messages.push_back({peer, const_cast<char*>(at(in, parts.first(peer) + begin, type)),
                                    within(peer) * type.bytes, false});
            }
            terms[rank] = at(in, parts.first(rank) + begin, type);
            transport->exchange(messages);
            if (begin < own) type.reduce(reduction, out + begin * type.bytes, terms, count);
        }
    }

    void all_reduce(void* data, int64_t count, const ElementType& type, Reduction reduction,
                    hipStream_t) override {
        const Parts parts{count, size};
        char* const own = at(data, parts.first(rank), type);
        put({own, data, parts, type, reduction}, group);
        put({data, own, parts, type, {}}, afterwards);
    }
    void reduce_scatter(void* out, const void* in, int64_t count, const ElementType& type,
                        Reduction reduction, hipStream_t) override {
        put({out, in, {size * count, size}, type, reduction}, group);
    }
    void all_gather(void* out, const void* in, int64_t count, const ElementType& type, hipStream_t) override {
        put({out, in, {size * count, size}, type, {}}, group);
    }
    void begin_group() override { grouped = true; }
    void end_group() override {
        grouped = false;
        run_all(group);
        run_all(afterwards);
        if (!messages_of_group.empty()) transport->exchange(messages_of_group);
        messages_of_group.clear();
    }
    void drop_group() override {
        grouped = false;
        group.clear();
        afterwards.clear();
        messages_of_group.clear();
    }

    void put(const Call& call, std::vector<Call>& calls) {
        if (grouped)
            calls.push_back(call);
        else
            run(call);
    }
    void put(const Message& message) {
        if (grouped)
            messages_of_group.push_back(message);
        else
            transport->exchange({&message, 1});
    }
    void run_all(std::vector<Call>& calls) {
        // By TCP an exchange costs up to a millisecond, whatever it carries: small calls share one.
        for (size_t first = 0, end = 0; first < calls.size(); first = end) {
            int64_t bytes = 0;
            while (end < calls.size() && (end == first || bytes + calls[end].bytes(0) <= piece_bytes))
                bytes += calls[end++].bytes(0);
            if (end - first == 1)
                run(calls[first]);
            else
                run_together({calls.begin() + static_cast<ptrdiff_t>(first),
                              calls.begin() + static_cast<ptrdiff_t>(end)});
        }
        calls.clear();
    }
    void run(const Call& call) {
        if (call.reduction)
            reduce_own(static_cast<char*>(call.out), call.in, call.parts, call.type, *call.reduction);
        else
            run_together({call});
    }
    void run_together(const std::vector<Call>& calls) {
        int64_t bytes = 0;  // of one rank's terms in the calls that reduce
        for (const Call& call : calls) bytes += call.reduction ? size * call.bytes(rank) : 0;
        received.resize(static_cast<size_t>(bytes));
        std::vector<Message> messages;
        char* place = received.data();
        for (const Call& call : calls) {
            char *const out = static_cast<char*>(call.out), *const own = out + call.first(rank);
            if (!call.reduction && own != call.in)
                std::memmove(own, call.in, static_cast<size_t>(call.bytes(rank)));
            for (int64_t peer = 0; peer < size; peer++) {
                if (peer == rank) continue;
                if (call.reduction) {
                    char* const term =
                        const_cast<char*>(static_cast<const char*>(call.in)) + call.first(peer);
                    messages.push_back({peer, place + peer * call.bytes(rank), call.bytes(rank), true});
                    messages.push_back({peer, term, call.bytes(peer), false});
                } else {
                    messages.push_back({peer, out + call.first(peer), call.bytes(peer), true});
                    messages.push_back({peer, own, call.bytes(rank), false});
                }
            }
            if (call.reduction) place += size * call.bytes(rank);
        }
        transport->exchange(messages);
        place = received.data();
        std::vector<const void*> terms(static_cast<size_t>(size));
        for (const Call& call : calls) {
            if (!call.reduction) continue;
            for (int64_t peer = 0; peer < size; peer++) terms[peer] = place + peer * call.bytes(rank);
            terms[rank] = static_cast<const char*>(call.in) + call.first(rank);
            call.type.reduce(*call.reduction, call.out, terms, call.parts.elements(rank));
            place += size * call.bytes(rank);
        }
    }
    void broadcast(void* data, int64_t count, const ElementType& type, int64_t root, hipStream_t) override {
        transport->broadcast(data, count * type.bytes, root);
    }
    void send(const void* data, int64_t count, const ElementType& type, int64_t to, hipStream_t) override {
        put({to, const_cast<void*>(data), count * type.bytes, false});
    }
    void receive(void* data, int64_t count, const ElementType& type, int64_t from, hipStream_t) override {
        put({from, data, count * type.bytes, true});
    }
    void barrier(hipStream_t) override { transport->barrier(); }
    std::unique_ptr<Communicator> split(const std::vector<int64_t>& members) override {
        return std::make_unique<HostCommunicator>(std::make_unique<PartOfTransport>(*transport, members));
    }
};

}  // namespace

std::unique_ptr<Communicator> make_host_communicator(std::unique_ptr<Transport> transport) {
    return std::make_unique<HostCommunicator>(std::move(transport));
}

}  // namespace llamac
