// Collectives on the memory that kernels compute in: over NCCL or RCCL between GPUs, over a Transport between processes of
// CPU builds. core/collectives.h has them for tensors.
//
// Sums of host memory are made in the order of the ranks, in the type of the arithmetic, and rounded once: every rank gets
// the same bits, and an element the same ones in all_reduce() and in reduce_scatter(), wherever the parts end. NCCL's order
// depends on the place of an element, so there only calls of the same sizes give the same bits.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "platform/hip.h"
#include "platform/ranks/transport.h"

namespace llamac {

enum class Reduction : uint8_t { sum, max };

// A storage type, as far as collectives know it: core/collectives.cpp makes them from the table of dtypes.
struct ElementType {
    int64_t bytes;
    int nccl;  // ncclDataType_t
    // out[i] = the reduction of parts[0][i], parts[1][i], ...; out may be one of the parts.
    void (*reduce)(Reduction reduction, void* out, const std::vector<const void*>& parts, int64_t count);
};

// Every rank makes the same calls in the same order, one thread at a time. Each is enqueued on the stream; in a CPU build it
// is done when it returns. Throws Error where a rank is gone.
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
    // Part r of out[size * count] = in[count] of rank r. in may be the own part.
    virtual void all_gather(void* out, const void* in, int64_t count, const ElementType& type,
                            hipStream_t stream) = 0;
    // data[count] = that of rank `root`.
    virtual void broadcast(void* data, int64_t count, const ElementType& type, int64_t root,
                           hipStream_t stream) = 0;
    virtual void send(const void* data, int64_t count, const ElementType& type, int64_t to,
                      hipStream_t stream) = 0;
    virtual void receive(void* data, int64_t count, const ElementType& type, int64_t from,
                         hipStream_t stream) = 0;
    // Work behind it on the stream begins when all ranks' work before it is done.
    virtual void barrier(hipStream_t stream) = 0;

    // The communicator of some of the ranks, in ascending order, among them the own one. Every rank calls it, for a division
    // of all ranks. The made one uses this one, and ends first.
    virtual std::unique_ptr<Communicator> split(const std::vector<int64_t>& members) = 0;

    // Calls between the two run as one, which is faster; what they are given must not overlap.
    virtual void begin_group() {}
    virtual void end_group() {}
    // In place of end_group() after an exception: none of the calls has a result.
    virtual void drop_group() {}

    // Ends what this rank has enqueued, here and in communicators that were split from this one; the others wait no longer
    // for its device. Only destruction may follow.
    virtual void abort() {}
};

// Between the processes of a CPU build.
std::unique_ptr<Communicator> make_host_communicator(std::unique_ptr<Transport> transport);
// Between GPUs: on this process's current device; channel carries NCCL's id. Null where the build is without NCCL or RCCL.
std::unique_ptr<Communicator> make_device_communicator(Transport& channel);

// What make_device_communicator() is of, by its header: "RCCL 2.27.7", or "no RCCL"; empty in a CPU build.
std::string collectives_library();
// Throws Error where this build has none for so many GPUs.
void check_collectives(int64_t gpus);

}  // namespace llamac
