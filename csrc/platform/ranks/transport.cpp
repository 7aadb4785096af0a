#include "platform/ranks/transport.h"

#include <net/if.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace llamac {

LostRank::LostRank(int64_t lost, int64_t by, bool is_late)
    : Error("rank " + std::to_string(lost) +
            (is_late ? " did not answer in time" : " has ended or cannot be reached") + ", as rank " +
            std::to_string(by) + " found"),
      rank(lost),
      late(is_late) {}

LostRank::LostRank(int64_t lost, const std::string& line) : Error(one_line(line)), rank(lost), late(true) {}

LostRank::LostRank(const LostRank& other, const std::string& during)
    : Error(other.what() + (" in " + during)), rank(other.rank), late(other.late) {}

void Transport::all_gather(const void* own, void* all, int64_t bytes) {
    char* const places = static_cast<char*>(all);
    std::memcpy(places + rank * bytes, own, static_cast<size_t>(bytes));
    std::vector<Message> messages;
    for (int64_t peer = 0; peer < size; peer++) {
        if (peer == rank) continue;
        messages.push_back({peer, places + peer * bytes, bytes, true});
        messages.push_back({peer, places + rank * bytes, bytes, false});
    }
    exchange(messages);
}

void Transport::barrier() {
    std::vector<char> all(static_cast<size_t>(size));
    const char own = 0;
    all_gather(&own, all.data(), 1);
}

void Transport::broadcast(void* data, int64_t bytes, int64_t root) {
    std::vector<Message> messages;
    if (rank != root)
        messages.push_back({root, data, bytes, true});
    else
        for (int64_t peer = 0; peer < size; peer++)
            if (peer != root) messages.push_back({peer, data, bytes, false});
    exchange(messages);
}

void Transport::wait_for(int64_t peer, double waited) const {
    if (waiting) return waiting(peer, waited);
    if (waited > seconds) throw LostRank(peer, rank, true);
}

namespace {

// Describes the text of a rank, and contains it if it fits.
struct Header {
    char kind[16] = {};
    int64_t number = 0, bytes = 0, failed = 0;
    char text[24] = {};

    bool holds_text() const { return bytes <= static_cast<int64_t>(sizeof text); }
    std::string step() const { return std::to_string(number) + " (" + kind + ")"; }
};

}  // namespace

std::vector<std::string> Transport::gather(const char* kind, const std::string& text, bool failed) {
    Header header;
    CHECK(std::strlen(kind) < sizeof header.kind);
    std::strcpy(header.kind, kind);
    header.number = gathered++;
    header.bytes = static_cast<int64_t>(text.size());
    header.failed = failed ? 1 : 0;
    if (header.holds_text()) std::memcpy(header.text, text.data(), text.size());
    std::vector<Header> headers(static_cast<size_t>(size));
    all_gather(&header, headers.data(), sizeof header);
    const auto failure = std::ranges::find(headers, 1, &Header::failed);
    // A failed rank may be at another kind.
    for (size_t r = 1; failure == headers.end() && r < headers.size(); r++)
        if (headers[r].number != headers[0].number || std::strcmp(headers[r].kind, headers[0].kind) != 0)
            throw OutOfStep("rank " + std::to_string(r) + ": expected message " + headers[0].step() +
                            ", as rank 0 sends it, found " + headers[r].step() +
                            ": the ranks are out of step");
    std::string own = text;
    std::vector<std::string> texts(static_cast<size_t>(size));
    std::vector<Message> messages;
    for (int64_t peer = 0; peer < size; peer++) {
        const Header& its = headers[peer];
        std::string& theirs = texts[peer];
        theirs.resize(static_cast<size_t>(its.bytes));
        if (its.holds_text())
            std::memcpy(theirs.data(), its.text, theirs.size());
        else if (peer != rank)
            messages.push_back({peer, theirs.data(), its.bytes, true});
        if (peer != rank && !header.holds_text()) messages.push_back({peer, own.data(), header.bytes, false});
    }
    if (!messages.empty()) exchange(messages);
    texts[rank] = text;
    if (failure != headers.end()) {
        const size_t first = static_cast<size_t>(failure - headers.begin());
        throw FailedRank(static_cast<int64_t>(first), texts[first]);
    }
    return texts;
}

void check_engine(Launcher launcher, int64_t ranks) {
    if (launcher == Launcher::mpi && !has_mpi())
        fail(ranks, " processes were started by mpirun, but this program was built without MPI. ",
             "Install it with: apt-get install libopenmpi-dev, and build again; torchrun needs Gloo alone");
    if (launcher != Launcher::mpi && !has_gloo())
        fail(ranks, " processes: this program was built without Gloo. ",
             "Install it with: apt-get install libgloo-dev, and build again");
    const char* const interface = std::getenv("GLOO_SOCKET_IFNAME");
    if (launcher != Launcher::mpi && interface && if_nametoindex(interface) == 0)
        fail("environment: GLOO_SOCKET_IFNAME: expected a network interface of this host, found \"",
             interface, "\"; `ip address` lists them");
}

std::unique_ptr<Transport> connect(const Launch& launch, const std::string& purpose, double seconds) {
    CHECK(launch.size > 1);
    check_engine(launch.launcher, launch.size);
    return launch.launcher == Launcher::mpi ? connect_mpi(launch, seconds)
                                            : connect_gloo(launch, purpose, seconds);
}

}  // namespace llamac
