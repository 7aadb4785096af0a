// Collectives on the memory that kernels compute in: over NCCL or RCCL between GPUs, over a Transport between processes of
// CPU builds. core/collectives.h has them for tensors.
//
// Sums in host memory are made in the order of the ranks, in the type of the arithmetic, and rounded once: all ranks get the
// same bits, also between all_reduce() and reduce_scatter(). NCCL's order depends on the position of an element, so there
// only calls of the same sizes give the same bits.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "platform/hip.h"
#include "platform/ranks/transport.h"

namespace llamac {

enum class Reduction : uint8_t { sum, max };

// A storage type of collectives, made from the table of dtypes by core/collectives.cpp.
struct ElementType {
    int64_t bytes;
    int nccl;  // ncclDataType_t
    // out[i] = the reduction of parts[0][i], parts[1][i], ...; out may be one of the parts.
    void (*reduce)(Reduction reduction, void* out, const std::vector<const void*>& parts, int64_t count);
};
// For values of any type that are moved and not reduced.
constexpr ElementType element_of_bytes{1, 1, nullptr};  // ncclUint8

// Every rank makes the same calls in the same order, one thread at a time. Each is enqueued on the stream; a CPU build
// blocks. Throws Error if a rank is lost.
struct Communicator {
    const int64_t rank, size;

    Communicator(int64_t own, int64_t count) : rank(own), size(count) {}
    Communicator(const Communicator&) = delete;
    virtual ~Communicator() = default;

    // data[count] = its reduction over the ranks.
    virtual void all_reduce(void* data, int64_t count, const ElementType& type, Reduction reduction,
                            hipStream_t stream) = 0;
    // out[count] = the reduction of part `rank` of in[size * count]. out may be that part.
    virtual void reduce_scatter(void* out, const void* in, int64_t count, const ElementType& type,
                                Reduction reduction, hipStream_t stream) = 0;
    // Part r of out[size * count] = in[count] of rank r. in may be that part.
    virtual void all_gather(void* out, const void* in, int64_t count, const ElementType& type,
                            hipStream_t stream) = 0;
    // data[count] = data of rank `root`.
    virtual void broadcast(void* data, int64_t count, const ElementType& type, int64_t root,
                           hipStream_t stream) = 0;
    virtual void send(const void* data, int64_t count, const ElementType& type, int64_t to,
                      hipStream_t stream) = 0;
    virtual void receive(void* data, int64_t count, const ElementType& type, int64_t from,
                         hipStream_t stream) = 0;
    // Later work on the stream waits for the earlier work of all ranks.
    virtual void barrier(hipStream_t stream) = 0;

    // The communicator of some ranks, in ascending order, this one among them. Every rank calls it, for a partition of the
    // ranks. The result uses this communicator, which must outlive it.
    virtual std::unique_ptr<Communicator> split(const std::vector<int64_t>& members) = 0;

    // Calls between the two run as one, which is faster; their operands must not overlap. Messages among them do not wait for one
    // another: two ranks can send to each other.
    virtual void begin_group() {}
    virtual void end_group() {}
    // In place of end_group() after an exception: none of the calls has a result.
    virtual void drop_group() {}

    // Ends the enqueued work of this rank, also in communicators split from this one, so that other ranks no longer wait for
    // its device. Only destruction may follow.
    virtual void abort() {}
};

// Between the processes of a CPU build.
std::unique_ptr<Communicator> make_host_communicator(std::unique_ptr<Transport> transport);
// Between GPUs, on the current device; channel carries NCCL's id. Null in a build without NCCL and RCCL.
std::unique_ptr<Communicator> make_device_communicator(Transport& channel);

// The library of make_device_communicator(): "RCCL 2.27.7" or "no RCCL"; empty in a CPU build.
std::string collectives_library();
// Throws Error if this build has none for this number of GPUs.
void check_collectives(int64_t gpus);

}  // namespace llamac
