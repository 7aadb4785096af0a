#include "platform/ranks/launch.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "platform/error.h"
#include "platform/ranks/transport.h"

namespace llamac {
namespace {

using Clock = std::chrono::steady_clock;

// A message is its length in 4 bytes, most significant first, and so many bytes.
constexpr size_t max_bytes = size_t{1} << 24;
constexpr int patience_ms = 5000;  // with a connected peer, or a program that is not one

struct Socket {
    int fd = -1;

    Socket() = default;
    explicit Socket(int opened) : fd(opened) {}
    Socket(Socket&& other) noexcept { std::swap(fd, other.fd); }
    Socket& operator=(Socket&& other) noexcept {
        std::swap(fd, other.fd);
        return *this;
    }
    ~Socket() {
        if (fd >= 0) close(fd);
    }

    bool is_ready(short events, int ms) const {
        pollfd one{fd, events, 0};
        return poll(&one, 1, ms) > 0;
    }
    bool send_all(const char* data, size_t bytes) const {
        while (bytes > 0) {
            if (!is_ready(POLLOUT, patience_ms)) return false;
            const ssize_t sent = send(fd, data, bytes, MSG_NOSIGNAL);
            if (sent <= 0) return false;
            data += sent;
            bytes -= static_cast<size_t>(sent);
        }
        return true;
    }
    bool receive_all(char* data, size_t bytes, int ms) const {
        while (bytes > 0) {
            if (!is_ready(POLLIN, ms)) return false;
            const ssize_t received = recv(fd, data, bytes, 0);
            if (received <= 0) return false;
            data += received;
            bytes -= static_cast<size_t>(received);
        }
        return true;
    }
    bool send_message(const std::string& text) const {
        const uint32_t length = htonl(static_cast<uint32_t>(text.size()));
        return send_all(reinterpret_cast<const char*>(&length), sizeof length) &&
               send_all(text.data(), text.size());
    }
    std::optional<std::string> receive_message(int ms) const {
        uint32_t length = 0;
        if (!receive_all(reinterpret_cast<char*>(&length), sizeof length, ms)) return {};
        length = ntohl(length);
        if (length > max_bytes) return {};
        std::string text(length, '\0');
        if (!receive_all(text.data(), text.size(), patience_ms)) return {};
        return text;
    }
};

// Texts as one message: the length of each as above, and its bytes.
std::string packed(const std::vector<std::string>& texts) {
    std::string all;
    for (const std::string& text : texts) {
        const uint32_t length = htonl(static_cast<uint32_t>(text.size()));
        all.append(reinterpret_cast<const char*>(&length), sizeof length) += text;
    }
    return all;
}
// Nothing if these are not `count` texts.
std::optional<std::vector<std::string>> unpacked(const std::string& all, int64_t count) {
    std::vector<std::string> texts;
    size_t at = 0;
    while (static_cast<int64_t>(texts.size()) < count) {
        uint32_t length = 0;
        if (all.size() - at < sizeof length) return {};
        std::memcpy(&length, all.data() + at, sizeof length);
        length = ntohl(length), at += sizeof length;
        if (all.size() - at < length) return {};
        texts.push_back(all.substr(at, length));
        at += length;
    }
    if (at != all.size()) return {};
    return texts;
}

struct FreeAddresses {
    void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
std::unique_ptr<addrinfo, FreeAddresses> addresses_of(const Launch& launch, int type) {
    addrinfo wanted{}, *found = nullptr;
    wanted.ai_socktype = type;
    const int error =
        getaddrinfo(launch.address.c_str(), std::to_string(launch.port).c_str(), &wanted, &found);
    if (error != 0)
        fail("rank ", launch.rank, ": MASTER_ADDR ", launch.address, ": expected a host, found none (",
             gai_strerror(error), ")");
    return std::unique_ptr<addrinfo, FreeAddresses>(found);
}

// The first message of a rank; its first line is the purpose.
std::string greeting(const Launch& launch, const std::string& purpose) {
    return "llamac " + purpose + "\n" + std::to_string(launch.size) + " " + std::to_string(launch.rank);
}

Socket listen_for_ranks(const Launch& launch) {
    Socket listening(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const bool six = listening.fd >= 0;
    if (!six) listening.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = 1, off = 0;
    setsockopt(listening.fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in6 any6{};
    sockaddr_in any4{};
    const auto port = htons(static_cast<uint16_t>(launch.port));
    any6.sin6_family = AF_INET6, any6.sin6_port = port;
    any4.sin_family = AF_INET, any4.sin_port = port;
    if (six) setsockopt(listening.fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);  // IPv4, too
    const sockaddr* const any = six ? reinterpret_cast<sockaddr*>(&any6) : reinterpret_cast<sockaddr*>(&any4);
    if (bind(listening.fd, any, six ? sizeof any6 : sizeof any4) != 0 || listen(listening.fd, SOMAXCONN) != 0)
        fail("rank 0: port ", launch.port, ", where the other ranks connect: ", std::strerror(errno),
             "; it follows from MASTER_PORT: choose another one");
    return listening;
}

std::string missing_ranks(const std::vector<Socket>& ranks) {
    std::string text;
    for (size_t rank = 1; rank < ranks.size(); rank++)
        if (ranks[rank].fd < 0) text += (text.empty() ? "" : ", ") + std::to_string(rank);
    return text;
}

int64_t first_missing(const std::vector<Socket>& ranks) {
    return std::find_if(ranks.begin() + 1, ranks.end(), [](const Socket& rank) { return rank.fd < 0; }) -
           ranks.begin();
}

std::vector<std::string> meet_as_first(const Launch& launch, const std::string& purpose,
                                       const std::vector<std::string>& to, Clock::time_point end) {
    const size_t size = static_cast<size_t>(launch.size);
    const Socket listening = listen_for_ranks(launch);
    std::vector<std::vector<std::string>> from(size);  // each rank's texts, to each
    std::vector<Socket> ranks(size);
    from[0] = to;
    for (size_t met = 1; met < size;) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
        if (left <= 0 || !listening.is_ready(POLLIN, static_cast<int>(left)))
            throw LostRank(first_missing(ranks), "rank 0: expected " + std::to_string(launch.size) +
                                                     " ranks, not found in time: rank " +
                                                     missing_ranks(ranks));
        Socket peer(accept4(listening.fd, nullptr, nullptr, SOCK_CLOEXEC));
        const auto hello = peer.receive_message(patience_ms), theirs = peer.receive_message(patience_ms);
        // Another program, or a rank at the next purpose, which will try again.
        if (!hello || !theirs || hello->rfind("llamac " + purpose + "\n", 0) != 0) continue;
        int64_t their_size = 0, rank = 0;
        std::istringstream(hello->substr(hello->find('\n'))) >> their_size >> rank;
        if (their_size != launch.size || rank < 1 || rank >= launch.size)
            fail("rank 0: expected ", launch.size, " ranks, found one that is rank ", rank, " of ",
                 their_size, ": another run uses MASTER_PORT, or the launcher's environment differs");
        auto texts = unpacked(*theirs, launch.size);
        if (!texts) fail("rank 0: rank ", rank, " is of another version of the program");
        Socket& place = ranks[rank];
        met += place.fd < 0 ? 1 : 0;  // a second try of the same rank replaces the first
        place = std::move(peer);
        from[rank] = std::move(*texts);
    }
    const auto to_rank = [&](size_t rank) {
        std::vector<std::string> texts;
        for (const auto& each : from) texts.push_back(each[rank]);
        return texts;
    };
    for (size_t rank = 1; rank < size; rank++)
        if (!ranks[rank].send_message(packed(to_rank(rank))))
            fail("rank 0: rank ", rank, " ended while the ranks met");
    return to_rank(0);
}

// Rank 0's answer; nothing where it does not listen yet, or for another purpose.
std::optional<std::vector<std::string>> ask_first(const Launch& launch, const std::string& purpose,
                                                  const std::vector<std::string>& to, Clock::time_point end) {
    const auto addresses = addresses_of(launch, SOCK_STREAM);
    for (const addrinfo* a = addresses.get(); a; a = a->ai_next) {
        const Socket first(socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
        if (first.fd < 0 || ::connect(first.fd, a->ai_addr, a->ai_addrlen) != 0) continue;
        if (!first.send_message(greeting(launch, purpose)) || !first.send_message(packed(to))) continue;
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
        const auto texts = left > 0 ? first.receive_message(static_cast<int>(left)) : std::nullopt;
        return texts ? unpacked(*texts, launch.size) : std::nullopt;
    }
    return {};
}

}  // namespace

std::string own_address(const Launch& launch) {
    const auto addresses = addresses_of(launch, SOCK_DGRAM);
    for (const addrinfo* a = addresses.get(); a; a = a->ai_next) {
        const Socket none(socket(a->ai_family, a->ai_socktype, a->ai_protocol));
        sockaddr_storage own{};
        socklen_t length = sizeof own;
        char text[256];
        if (none.fd < 0 || ::connect(none.fd, a->ai_addr, a->ai_addrlen) != 0) continue;  // nothing is sent
        if (getsockname(none.fd, reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
            getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof text, nullptr, 0,
                        NI_NUMERICHOST) == 0)
            return text;
    }
    fail("rank ", launch.rank, ": MASTER_ADDR ", launch.address, ": no network of this host leads there");
}

std::vector<std::string> meet(const Launch& launch, const std::string& purpose,
                              const std::vector<std::string>& to, double seconds) {
    CHECK(static_cast<int64_t>(to.size()) == launch.size);
    const auto end = Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds));
    if (launch.rank == 0) return meet_as_first(launch, purpose, to, end);
    while (Clock::now() < end) {
        if (auto texts = ask_first(launch, purpose, to, end)) return *texts;
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    std::ostringstream line;
    line << "rank " << launch.rank << ": expected rank 0 at " << launch.address << ", port " << launch.port
         << ", found none in " << seconds << " s: has it ended, or is MASTER_ADDR another host's?";
    throw LostRank(0, line.str());
}

}  // namespace llamac
