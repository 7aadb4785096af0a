#include "platform/ranks/shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>

#include "platform/error.h"

namespace llamac {
namespace {

// A ring, and what is copied before the other side is told: both halves of a copy run at the same time, in the cache.
constexpr int64_t ring_bytes = int64_t{1} << 20, ring_piece = int64_t{1} << 17;
// Waking a process costs about as much as this. Longer waits leave the core to others.
constexpr auto spinning = std::chrono::microseconds(100);
// How often a sleeper looks whether those it waits for are alive.
constexpr auto nap = std::chrono::milliseconds(100);

// Processes with the same text can open one another's files by /proc.
std::string neighbourhood() {
    std::string boot;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
    char processes[64] = {};
    const ssize_t length = readlink("/proc/self/ns/pid", processes, sizeof processes - 1);
    return boot + "," + std::string(processes, static_cast<size_t>(std::max<ssize_t>(length, 0)));
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* limit) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, limit, nullptr, 0);
}

}  // namespace

static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// Counts of bytes since the start.
struct SharedMemory::Ring {
    alignas(64) std::atomic<int64_t> written;  // by the owner
    alignas(64) std::atomic<int64_t> read;     // by the reader
    alignas(64) char data[ring_bytes];
};

// What a region begins with. The rings follow, by reader.
struct SharedMemory::Header {
    uint64_t token;  // the owner's: what a peer opens may be another file
    alignas(64)
        std::atomic<uint32_t> doorbell;  // counts what others have done to its rings, and for it in theirs
    std::atomic<uint32_t> sleeps;        // whether the owner waits for the doorbell
};

struct SharedMemory::Region {
    const int fd;
    const size_t bytes;
    Header* header = nullptr;

    // Takes the descriptor.
    Region(int descriptor, int64_t ranks)
        : fd(descriptor), bytes(sizeof(Header) + static_cast<size_t>(ranks) * sizeof(Ring)) {}
    Region(const Region&) = delete;
    ~Region() {
        if (header) munmap(header, bytes);
        if (fd >= 0) close(fd);
    }
    // Whether it worked.
    bool map() {
        void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED) return false;
        header = static_cast<Header*>(at);
        return true;
    }
    Ring& ring(int64_t reader) const { return reinterpret_cast<Ring*>(header + 1)[reader]; }
    void tell() const {
        header->doorbell.fetch_add(1);
        if (header->sleeps.load() != 0) futex(header->doorbell, FUTEX_WAKE, INT_MAX, nullptr);
    }
};

SharedMemory::SharedMemory(Transport& transport)
    : rank(transport.rank), theirs(static_cast<size_t>(transport.size)) {
    const auto ranks = static_cast<size_t>(transport.size);
    std::random_device random;
    const uint64_t token = uint64_t{random()} << 32 | random();
    own = std::make_unique<Region>(memfd_create("llamac", MFD_CLOEXEC), transport.size);
    const char* const setting = std::getenv("LLAMAC_SHARED_MEMORY");
    const bool wanted = !setting || std::strcmp(setting, "off") != 0;
    const bool made = wanted && own->fd >= 0 && ftruncate(own->fd, static_cast<off_t>(own->bytes)) == 0 &&
                      flock(own->fd, LOCK_EX) == 0 && own->map();
    if (made) own->header->token = token;

    std::ostringstream text;
    text << (made ? neighbourhood() : "none") << ' ' << getpid() << ' ' << own->fd << ' ' << token;
    const std::vector<std::string> texts = transport.gather("shared memory", text.str());
    std::string reached(ranks, '0');
    for (size_t peer = 0; peer < ranks; peer++) {
        std::istringstream fields(texts[peer]);
        std::string where;
        int64_t process = 0, file = 0;
        uint64_t its_token = 0;
        fields >> where >> process >> file >> its_token;
        if (!made || static_cast<int64_t>(peer) == rank || where != neighbourhood()) continue;
        const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file);
        auto region = std::make_unique<Region>(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY),
                                               transport.size);
        struct stat status;
        if (region->fd < 0 || fstat(region->fd, &status) != 0 || !S_ISREG(status.st_mode) ||
            status.st_size != static_cast<off_t>(region->bytes) || !region->map() ||
            region->header->token != its_token)
            continue;
        theirs[peer] = std::move(region);
        reached[peer] = '1';
    }
    // Both ways, or not at all.
    const std::vector<std::string> everybodys = transport.gather("shared memory", reached);
    for (size_t peer = 0; peer < ranks; peer++) {
        if (everybodys[peer][static_cast<size_t>(rank)] != '1') theirs[peer].reset();
        if (!theirs[peer]) continue;
        for (const bool incoming : {true, false})
            flows.push_back({static_cast<int64_t>(peer), incoming, {}, 0, 0});
    }
}

SharedMemory::~SharedMemory() = default;

// Copies a piece of its next message; returns the bytes that were moved.
int64_t SharedMemory::move(Flow& flow) {
    if (flow.next == flow.messages.size()) return 0;
    const Message& message = *flow.messages[flow.next];
    const Region& peer = *theirs[static_cast<size_t>(flow.peer)];
    Ring& ring = flow.incoming ? peer.ring(rank) : own->ring(flow.peer);
    const int64_t written = ring.written.load(std::memory_order_acquire);
    const int64_t read = ring.read.load(std::memory_order_acquire);
    const int64_t at = (flow.incoming ? read : written) % ring_bytes;
    const int64_t possible = flow.incoming ? written - read : ring_bytes - (written - read);
    const int64_t count = std::min({possible, ring_piece, message.bytes - flow.done, ring_bytes - at});
    if (count == 0) return 0;
    char* const data = static_cast<char*>(message.data) + flow.done;
    if (flow.incoming) {
        std::memcpy(data, ring.data + at, static_cast<size_t>(count));
        ring.read.store(read + count, std::memory_order_release);
    } else {
        std::memcpy(ring.data + at, data, static_cast<size_t>(count));
        ring.written.store(written + count, std::memory_order_release);
    }
    peer.tell();
    flow.done += count;
    if (flow.done == message.bytes) {
        flow.done = 0;
        flow.next++;
    }
    return count;
}

// Until somebody rings after `doorbell` was read, for a nap at most.
void SharedMemory::wait(uint32_t doorbell) const {
    Header& header = *own->header;
    for (const auto end = std::chrono::steady_clock::now() + spinning;
         std::chrono::steady_clock::now() < end;)
        for (int i = 0; i < 100; i++)
            if (header.doorbell.load() != doorbell) return;
    const timespec limit{0, std::chrono::nanoseconds(nap).count()};
    header.sleeps.store(1);
    futex(header.doorbell, FUTEX_WAIT, doorbell, &limit);  // returns where it has changed
    header.sleeps.store(0);
}

bool SharedMemory::has_ended(int64_t peer) const {
    const int fd = theirs[static_cast<size_t>(peer)]->fd;
    if (flock(fd, LOCK_SH | LOCK_NB) != 0) return false;
    flock(fd, LOCK_UN);
    return true;
}

void SharedMemory::exchange(std::span<const Message> messages,
                            const std::function<void(int64_t, double)>& waits) {
    for (Flow& flow : flows) {
        flow.messages.clear();
        flow.next = 0;
        flow.done = 0;
        for (const Message& m : messages)
            if (m.peer == flow.peer && m.incoming == flow.incoming && m.bytes > 0)
                flow.messages.push_back(&m);
    }
    const auto remains = [](const Flow& flow) { return flow.next < flow.messages.size(); };
    auto moved_at = std::chrono::steady_clock::now();
    std::vector<bool> ended(theirs.size());
    while (std::any_of(flows.begin(), flows.end(), remains)) {
        const uint32_t doorbell = own->header->doorbell.load();
        int64_t moved = 0;
        for (Flow& flow : flows)
            while (const int64_t bytes = move(flow)) moved += bytes;
        if (moved > 0) {
            moved_at = std::chrono::steady_clock::now();
            continue;
        }
        const std::chrono::duration<double> idle = std::chrono::steady_clock::now() - moved_at;
        for (const Flow& flow : flows) {
            if (!remains(flow)) continue;
            if (ended[static_cast<size_t>(flow.peer)])  // and what it had sent has been taken since
                throw LostRank(flow.peer, rank, false);
            if (idle < nap) continue;
            ended[static_cast<size_t>(flow.peer)] = has_ended(flow.peer);
            waits(flow.peer, idle.count());
        }
        wait(doorbell);
    }
}

}  // namespace llamac
