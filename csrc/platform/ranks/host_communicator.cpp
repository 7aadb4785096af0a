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

struct HostCommunicator : Communicator {
    // reduce_scatter() or all_gather(), of equal parts.
    struct Call {
        void* out;
        const void* in;
        int64_t count;
        ElementType type;
        std::optional<Reduction> reduction;  // none: all_gather

        int64_t bytes() const { return count * type.bytes; }
    };

    const std::unique_ptr<Transport> transport;
    std::vector<char> received;
    bool grouped = false;
    std::vector<Call> group;

    explicit HostCommunicator(std::unique_ptr<Transport> over)
        : Communicator(over->rank, over->size), transport(std::move(over)) {}

    // The parts of data[count] that ranks own: rank r's is first(r) .. first(r+1).
    struct Parts {
        int64_t count, size;
        int64_t first(int64_t rank) const { return count / size * rank + std::min(rank, count % size); }
        int64_t elements(int64_t rank) const { return first(rank + 1) - first(rank); }
        int64_t largest() const { return elements(0); }
    };

    // out = the reduction of the own part of everybody's `in`.
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
                terms[static_cast<size_t>(peer)] = theirs;
                if (peer == rank) continue;
                messages.push_back({peer, theirs, count * type.bytes, true});
                messages.push_back({peer, const_cast<char*>(at(in, parts.first(peer) + begin, type)),
                                    within(peer) * type.bytes, false});
            }
            terms[static_cast<size_t>(rank)] = at(in, parts.first(rank) + begin, type);
            transport->exchange(messages);
            if (begin < own) type.reduce(reduction, out + begin * type.bytes, terms, count);
        }
    }
    void gather(void* out, const void* own, const Parts& parts, const ElementType& type) {
        char* const place = at(out, parts.first(rank), type);
        if (place != own) std::memmove(place, own, static_cast<size_t>(parts.elements(rank) * type.bytes));
        std::vector<Message> messages;
        for (int64_t peer = 0; peer < size; peer++) {
            if (peer == rank) continue;
            messages.push_back(
                {peer, at(out, parts.first(peer), type), parts.elements(peer) * type.bytes, true});
            messages.push_back({peer, place, parts.elements(rank) * type.bytes, false});
        }
        transport->exchange(messages);
    }

    void all_reduce(void* data, int64_t count, const ElementType& type, Reduction reduction,
                    hipStream_t) override {
        const Parts parts{count, size};
        char* const own = at(data, parts.first(rank), type);
        reduce_own(own, data, parts, type, reduction);
        gather(data, own, parts, type);
    }
    void reduce_scatter(void* out, const void* in, int64_t count, const ElementType& type,
                        Reduction reduction, hipStream_t) override {
        put({out, in, count, type, reduction});
    }
    void all_gather(void* out, const void* in, int64_t count, const ElementType& type, hipStream_t) override {
        put({out, in, count, type, {}});
    }
    void begin_group() override { grouped = true; }
    void end_group() override {
        grouped = false;
        // An exchange costs about a millisecond of waiting, whatever it carries: small calls share one.
        for (size_t first = 0, end = 0; first < group.size(); first = end) {
            int64_t bytes = 0;
            while (end < group.size() && (end == first || bytes + group[end].bytes() <= piece_bytes))
                bytes += group[end++].bytes();
            if (end - first == 1)
                run(group[first]);
            else
                run_together({group.begin() + static_cast<ptrdiff_t>(first),
                              group.begin() + static_cast<ptrdiff_t>(end)});
        }
        group.clear();
    }

    void put(const Call& call) {
        if (grouped)
            group.push_back(call);
        else
            run(call);
    }
    void run(const Call& call) {
        const Parts parts{size * call.count, size};
        if (call.reduction)
            reduce_own(static_cast<char*>(call.out), call.in, parts, call.type, *call.reduction);
        else
            gather(call.out, call.in, parts, call.type);
    }
    void run_together(const std::vector<Call>& calls) {
        int64_t bytes = 0;  // of everybody's part of the calls that reduce
        for (const Call& call : calls) bytes += call.reduction ? size * call.bytes() : 0;
        received.resize(static_cast<size_t>(bytes));
        std::vector<Message> messages;
        char* place = received.data();
        for (const Call& call : calls) {
            char* const into = call.reduction ? place : static_cast<char*>(call.out);
            const bool sends_parts = call.reduction.has_value();
            if (sends_parts) place += size * call.bytes();
            if (char* const own = into + rank * call.bytes(); !sends_parts && own != call.in)
                std::memmove(own, call.in, static_cast<size_t>(call.bytes()));
            for (int64_t peer = 0; peer < size; peer++) {
                if (peer == rank) continue;
                const char* const out =
                    sends_parts ? at(call.in, peer * call.count, call.type) : into + rank * call.bytes();
                messages.push_back({peer, into + peer * call.bytes(), call.bytes(), true});
                messages.push_back({peer, const_cast<char*>(out), call.bytes(), false});
            }
        }
        transport->exchange(messages);
        place = received.data();
        std::vector<const void*> terms(static_cast<size_t>(size));
        for (const Call& call : calls) {
            if (!call.reduction) continue;
            for (int64_t peer = 0; peer < size; peer++)
                terms[static_cast<size_t>(peer)] = place + peer * call.bytes();
            terms[static_cast<size_t>(rank)] = at(call.in, rank * call.count, call.type);
            call.type.reduce(*call.reduction, call.out, terms, call.count);
            place += size * call.bytes();
        }
    }
    void broadcast(void* data, int64_t count, const ElementType& type, int64_t root, hipStream_t) override {
        transport->broadcast(data, count * type.bytes, root);
    }
    void send(const void* data, int64_t count, const ElementType& type, int64_t to, hipStream_t) override {
        const Message message{to, const_cast<void*>(data), count * type.bytes, false};
        transport->exchange({&message, 1});
    }
    void receive(void* data, int64_t count, const ElementType& type, int64_t from, hipStream_t) override {
        const Message message{from, data, count * type.bytes, true};
        transport->exchange({&message, 1});
    }
    void barrier(hipStream_t) override { transport->barrier(); }
};

}  // namespace

std::unique_ptr<Communicator> make_host_communicator(std::unique_ptr<Transport> transport) {
    return std::make_unique<HostCommunicator>(std::move(transport));
}

}  // namespace llamac
