// MPI, for processes that mpirun started: shared memory on a host, and a cluster's own network between hosts.
#include "platform/error.h"
#include "platform/ranks/transport.h"

#if defined(LLAMAC_MPI)
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

// NOLINTBEGIN(bugprone-casting-through-void): Open MPI's own macros do it.
namespace llamac {
namespace {

// Counts are int; whole elements of any type.
constexpr int64_t max_bytes = int64_t{1} << 30;

void check_mpi(int error, const char* call) {
    if (error == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(error, text, &length);
    fail(call, ": ", std::string(text, static_cast<size_t>(length)));
}
#define CHECK_MPI(call) check_mpi((call), #call)

// Once per process, for its life: MPI cannot be started again.
void start_mpi() {
    int started = 0;
    CHECK_MPI(MPI_Initialized(&started));
    if (started) return;
    int given = MPI_THREAD_SINGLE;
    CHECK_MPI(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &given));
    if (given != MPI_THREAD_MULTIPLE)
        fail("MPI: expected one that several threads may call (MPI_THREAD_MULTIPLE), found one for fewer");
    static_cast<void>(std::atexit([] {
        int over = 0;
        if (MPI_Finalized(&over) == MPI_SUCCESS && !over) MPI_Finalize();
    }));
}

struct MpiTransport : Transport {
    MPI_Comm ranks = MPI_COMM_NULL;

    MpiTransport(const Launch& launch, double limit) : Transport(launch.rank, launch.size, limit) {
        start_mpi();
        CHECK_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &ranks));
        CHECK_MPI(MPI_Comm_set_errhandler(ranks, MPI_ERRORS_RETURN));
        int own = 0, count = 0;
        CHECK_MPI(MPI_Comm_rank(ranks, &own));
        CHECK_MPI(MPI_Comm_size(ranks, &count));
        if (own != rank || count != size)
            fail("MPI: expected rank ", rank, " of ", size, " as mpirun's environment says, found ", own,
                 " of ", count, ": this program was built with another MPI than mpirun's");
    }
    ~MpiTransport() override {
        int over = 0;
        if (MPI_Finalized(&over) == MPI_SUCCESS && !over) MPI_Comm_free(&ranks);
    }

    void exchange(std::span<const Message> messages) override {
        std::vector<MPI_Request> requests;
        std::vector<int64_t> peers;
        for (const Message& m : messages)
            for (int64_t begin = 0; begin < m.bytes; begin += max_bytes) {
                const int count = static_cast<int>(std::min(max_bytes, m.bytes - begin)),
                          peer = static_cast<int>(m.peer);
                char* const data = static_cast<char*>(m.data) + begin;
                requests.push_back(MPI_REQUEST_NULL);
                peers.push_back(m.peer);
                CHECK_MPI(m.incoming ? MPI_Irecv(data, count, MPI_BYTE, peer, 0, ranks, &requests.back())
                                     : MPI_Isend(data, count, MPI_BYTE, peer, 0, ranks, &requests.back()));
            }
        const auto begin = std::chrono::steady_clock::now();
        for (int64_t polls = 0;; polls++) {
            int done = 0;
            CHECK_MPI(
                MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE));
            if (done) return;
            if (polls < 1000) continue;
            std::this_thread::yield();  // for a rank that shares the core
            if (polls % 1000 != 0) continue;
            const size_t first =
                static_cast<size_t>(std::find_if(requests.begin(), requests.end(),
                                                 [](MPI_Request r) { return r != MPI_REQUEST_NULL; }) -
                                    requests.begin());
            wait_for(peers[first],
                     std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
        }
    }
};

}  // namespace

bool has_mpi() {
    return true;
}
std::unique_ptr<Transport> connect_mpi(const Launch& launch, double seconds) {
    return std::make_unique<MpiTransport>(launch, seconds);
}

}  // namespace llamac
// NOLINTEND(bugprone-casting-through-void)
#else
namespace llamac {
bool has_mpi() {
    return false;
}
std::unique_ptr<Transport> connect_mpi(const Launch&, double) {
    return nullptr;
}
}  // namespace llamac
#endif
