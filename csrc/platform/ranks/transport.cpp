#include "platform/ranks/transport.h"

#include <net/if.h>

#include <cstdlib>
#include <cstring>

namespace llamac {

LostRank::LostRank(int64_t lost, int64_t by, bool is_late)
    : Error("rank " + std::to_string(lost) +
            (is_late ? " did not answer in time" : " has ended or cannot be reached") + ", as rank " +
            std::to_string(by) + " found"),
      rank(lost),
      late(is_late) {}

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

std::vector<std::string> Transport::gather(const std::string& text) {
    std::vector<int64_t> lengths(static_cast<size_t>(size));
    const int64_t length = static_cast<int64_t>(text.size());
    all_gather(&length, lengths.data(), sizeof length);
    std::string own = text;
    std::vector<std::string> texts(static_cast<size_t>(size));
    std::vector<Message> messages;
    for (int64_t peer = 0; peer < size; peer++) {
        std::string& theirs = texts[static_cast<size_t>(peer)];
        if (peer == rank) continue;
        theirs.resize(static_cast<size_t>(lengths[static_cast<size_t>(peer)]));
        messages.push_back({peer, theirs.data(), lengths[static_cast<size_t>(peer)], true});
        messages.push_back({peer, own.data(), length, false});
    }
    exchange(messages);
    texts[static_cast<size_t>(rank)] = text;
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
