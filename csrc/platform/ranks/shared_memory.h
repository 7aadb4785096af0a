// Messages between the processes of one host through memory that they share: several times as fast as Gloo's TCP, and with
// a hundredth of its latency.
//
// Each rank has one region with a ring of bytes for every other rank; it alone writes into them, and each reader moves the
// mark behind which the ring is free again. The region is a file without a name (memfd), so nothing is left behind by a
// process that is killed, and its owner holds its lock, which the kernel releases when the owner ends in any way.
// LLAMAC_SHARED_MEMORY=off does without.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "platform/ranks/transport.h"

namespace llamac {

struct SharedMemory {
    // Every rank of the transport calls it. Throws Error.
    explicit SharedMemory(Transport& transport);
    SharedMemory(const SharedMemory&) = delete;
    ~SharedMemory();

    // Whether that rank shares memory with this one: it runs on the same kernel and sees the same processes.
    bool reaches(int64_t peer) const { return theirs[static_cast<size_t>(peer)] != nullptr; }
    // As Transport::exchange, of the messages whose peers it reaches; passes over the others. waits: called while it waits for
    // a peer, with the seconds so far.
    void exchange(std::span<const Message> messages, const std::function<void(int64_t, double)>& waits);

  private:
    struct Ring;
    struct Header;
    struct Region;
    struct Flow {  // the messages with one peer in one direction
        int64_t peer;
        bool incoming;
        std::vector<const Message*> messages;
        size_t next;   // of messages
        int64_t done;  // bytes of the next one
    };
    int64_t move(Flow& flow);
    void wait(uint32_t doorbell) const;
    bool has_ended(int64_t peer) const;

    const int64_t rank;
    std::unique_ptr<Region> own;
    std::vector<std::unique_ptr<Region>> theirs;  // by rank; null: not reached
    std::vector<Flow> flows;
};

}  // namespace llamac
