// Collectives between GPUs: NCCL and RCCL, which have one interface.
#include "platform/error.h"
#include "platform/ranks/communicator.h"

#if defined(LLAMAC_NCCL)
#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#if __has_include(<rccl/rccl.h>)
#include <rccl/rccl.h>
#else
#include <nccl.h>
#endif

namespace llamac {
namespace {

#define CHECK_NCCL(call) check_call(call, #call)

struct DeviceCommunicator : Communicator {
    ncclComm_t ranks = nullptr;
    int* barrier_cell = nullptr;  // on the device
    DeviceCommunicator* whole = nullptr;
    std::vector<DeviceCommunicator*> parts;

    explicit DeviceCommunicator(Transport& channel) : Communicator(channel.rank, channel.size) {
        ncclUniqueId id{};
        if (rank == 0) CHECK_NCCL(ncclGetUniqueId(&id));
        std::memcpy(&id, channel.gather("NCCL's id", std::string(id.internal, sizeof id))[0].data(),
                    sizeof id);
        CHECK_NCCL(ncclCommInitRank(&ranks, static_cast<int>(size), id, static_cast<int>(rank)));
        make_barrier_cell();
    }
    // members: of the ranks of `whole`.
    DeviceCommunicator(DeviceCommunicator& of, const std::vector<int64_t>& members)
        : Communicator(std::ranges::find(members, of.rank) - members.begin(),
                       static_cast<int64_t>(members.size())),
          whole(&of) {
        CHECK_NCCL(ncclCommSplit(of.ranks, static_cast<int>(members.front()), static_cast<int>(rank), &ranks,
                                 nullptr));
        whole->parts.push_back(this);
        make_barrier_cell();
    }
    void make_barrier_cell() {
        CHECK(hipMalloc(reinterpret_cast<void**>(&barrier_cell), sizeof *barrier_cell));
        CHECK(hipMemset(barrier_cell, 0, sizeof *barrier_cell));
    }
    ~DeviceCommunicator() override {
        if (whole) std::erase(whole->parts, this);
        static_cast<void>(hipFree(barrier_cell));
        if (ranks) ncclCommDestroy(ranks);
    }
    void abort() override {
        for (DeviceCommunicator* part : parts) part->abort();
        if (ranks) ncclCommAbort(std::exchange(ranks, nullptr));
    }

    void check_call(ncclResult_t result, std::string_view call) const {
        if (result == ncclSuccess) return;
        const char* const more = ranks ? ncclGetLastError(ranks) : "";
        fail("rank ", rank, ": ", call.substr(0, call.find('(')), ": ", ncclGetErrorString(result),
             *more ? ": " : "", more);
    }
    static size_t size_of_count(int64_t count) { return static_cast<size_t>(count); }
    static ncclDataType_t type_of(const ElementType& type) { return static_cast<ncclDataType_t>(type.nccl); }
    static ncclRedOp_t operation_of(Reduction reduction) {
        return reduction == Reduction::sum ? ncclSum : ncclMax;
    }

    void all_reduce(void* data, int64_t count, const ElementType& type, Reduction reduction,
                    hipStream_t stream) override {
        CHECK_NCCL(ncclAllReduce(data, data, size_of_count(count), type_of(type), operation_of(reduction),
                                 ranks, stream));
    }
    void reduce_scatter(void* out, const void* in, int64_t count, const ElementType& type,
                        Reduction reduction, hipStream_t stream) override {
        CHECK_NCCL(ncclReduceScatter(in, out, size_of_count(count), type_of(type), operation_of(reduction),
                                     ranks, stream));
    }
    void all_gather(void* out, const void* in, int64_t count, const ElementType& type,
                    hipStream_t stream) override {
        CHECK_NCCL(ncclAllGather(in, out, size_of_count(count), type_of(type), ranks, stream));
    }
    void broadcast(void* data, int64_t count, const ElementType& type, int64_t root,
                   hipStream_t stream) override {
        CHECK_NCCL(ncclBroadcast(data, data, size_of_count(count), type_of(type), static_cast<int>(root),
                                 ranks, stream));
    }
    void send(const void* data, int64_t count, const ElementType& type, int64_t to,
              hipStream_t stream) override {
        CHECK_NCCL(ncclSend(data, size_of_count(count), type_of(type), static_cast<int>(to), ranks, stream));
    }
    void receive(void* data, int64_t count, const ElementType& type, int64_t from,
                 hipStream_t stream) override {
        CHECK_NCCL(
            ncclRecv(data, size_of_count(count), type_of(type), static_cast<int>(from), ranks, stream));
    }
    void barrier(hipStream_t stream) override {
        CHECK_NCCL(ncclAllReduce(barrier_cell, barrier_cell, 1, ncclInt32, ncclMax, ranks, stream));
    }
    std::unique_ptr<Communicator> split(const std::vector<int64_t>& members) override {
        return std::make_unique<DeviceCommunicator>(*this, members);
    }
    void begin_group() override { CHECK_NCCL(ncclGroupStart()); }
    void end_group() override { CHECK_NCCL(ncclGroupEnd()); }
    // NCCL cannot take calls back: other ranks that make them wait until the communicator is aborted.
    void drop_group() override { static_cast<void>(ncclGroupEnd()); }
};

}  // namespace

std::unique_ptr<Communicator> make_device_communicator(Transport& channel) {
    return std::make_unique<DeviceCommunicator>(channel);
}

}  // namespace llamac
#else
namespace llamac {
std::unique_ptr<Communicator> make_device_communicator(Transport&) {
    return nullptr;
}
}  // namespace llamac
#endif

namespace llamac {
namespace {

#if defined(LLAMAC_AMD)
constexpr const char* collectives_name = "RCCL";
constexpr const char* collectives_package =
    "rccl-dev (librccl-dev in Debian and Ubuntu, amdrocm-core-sdk in ROCm since 7.13)";
#else
constexpr const char* collectives_name = "NCCL";
constexpr const char* collectives_package = "libnccl-dev (or nvidia-nccl-cu13 with pip, into .venv)";
#endif

}  // namespace

std::string collectives_library() {
#if defined(LLAMAC_CPU)
    return "";
#elif defined(LLAMAC_NCCL)
    return std::string(collectives_name) + " " + std::to_string(NCCL_MAJOR) + "." +
           std::to_string(NCCL_MINOR) + "." + std::to_string(NCCL_PATCH);
#else
    return std::string("no ") + collectives_name;
#endif
}

void check_collectives(int64_t gpus) {
    if (collectives_library() == std::string("no ") + collectives_name)
        fail(gpus, " GPUs: this program was built without ", collectives_name,
             ". Install it with: apt-get install ", collectives_package, ", and build again");
}

}  // namespace llamac
