#include "platform/ranks/launch.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>

#include "platform/error.h"

namespace llamac {
namespace {

std::optional<std::string> variable(const char* name) {
    const char* const value = std::getenv(name);
    if (!value || !*value) return {};
    return value;
}

int64_t integer(const char* name, const std::string& text, int64_t low, int64_t high) {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < low || value > high)
        fail("environment: ", name, ": expected an integer from ", low, " to ", high, ", found \"", text,
             "\"");
    return value;
}
int64_t required(const char* launcher, const char* name, int64_t low, int64_t high) {
    const auto text = variable(name);
    if (!text) fail("environment: ", name, ": expected it from ", launcher, ", found none");
    return integer(name, *text, low, high);
}

constexpr int64_t max_ranks = 1 << 20, max_ports = 65535;

// The names of one launcher's variables.
struct Names {
    const char *launcher, *rank, *size, *local_rank, *local_size;
};

// The tasks of a node of a list such as "4,8(x2)", which is 4,8,8; 0 where it has no such node, or is no such list.
int64_t tasks_of_node(const std::string& list, int64_t node) {
    for (const char *at = list.c_str(), *const end = at + list.size(); at < end;) {
        int64_t tasks = 0, times = 1;
        at = std::from_chars(at, end, tasks).ptr;
        if (std::strncmp(at, "(x", 2) == 0) {
            at = std::from_chars(at + 2, end, times).ptr;
            if (*at++ != ')') return 0;
        }
        if (at < end && *at++ != ',') return 0;
        if (node < times) return tasks;
        node -= times;
    }
    return 0;
}

// Of the node of this process.
int64_t slurm_local_size(const char* name, int64_t size) {
    const auto list = variable(name);
    if (!list) fail("environment: ", name, ": expected it from srun, found none");
    const bool many = list->find(',') != list->npos;
    const int64_t node = many ? required("srun", "SLURM_NODEID", 0, max_ranks) : 0,
                  tasks = tasks_of_node(*list, node);
    if (tasks < 1 || tasks > size)
        fail("environment: ", name, ": expected the tasks of each node, as in 4,8(x2), up to ", size,
             " and one for node ", node, ", found \"", *list, "\"");
    return tasks;
}

void read(const Names& names, Launch& launch) {
    launch.size = required(names.launcher, names.size, 1, max_ranks);
    launch.rank = required(names.launcher, names.rank, 0, launch.size - 1);
    launch.local_size = launch.launcher == Launcher::slurm
                            ? slurm_local_size(names.local_size, launch.size)
                            : required(names.launcher, names.local_size, 1, launch.size);
    launch.local_rank = required(names.launcher, names.local_rank, 0, launch.local_size - 1);
}

constexpr Names torchrun{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names mpi[] = {
    {"Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"MPICH's mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
};
constexpr Names slurm{"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"};

// "node[003-006,12],login" begins with node003.
std::string first_host(const std::string& list) {
    const size_t open = list.find_first_of("[,");
    if (open == list.npos || list[open] == ',') return list.substr(0, open);
    const size_t end = list.find_first_of("-,]", open);
    return list.substr(0, open) + list.substr(open + 1, end - open - 1);
}

// Jobs that share a node have other numbers: 4096 ports below those of clients.
int slurm_port(int64_t job) {
    return 16384 + static_cast<int>(job % 4096);
}

}  // namespace

Launch find_launch() {
    Launch launch;
    if (variable("RANK") || variable("WORLD_SIZE")) {
        launch.launcher = Launcher::torchrun;
        read(torchrun, launch);
        const auto address = variable("MASTER_ADDR");
        if (!address) fail("environment: MASTER_ADDR: expected it from torchrun, found none");
        launch.address = *address;
        launch.port = rendezvous_port(static_cast<int>(required("torchrun", "MASTER_PORT", 1, max_ports)));
        return launch;
    }
    for (const Names& names : mpi) {
        if (!variable(names.rank)) continue;
        launch.launcher = Launcher::mpi;
        read(names, launch);
        return launch;
    }
    // Batch scripts and salloc shells have SLURM_JOB_ID; only processes of srun have a step and a number.
    if (variable("SLURM_PROCID") && variable("SLURM_STEP_ID")) {
        launch.launcher = Launcher::slurm;
        read(slurm, launch);
        const auto address = variable("MASTER_ADDR"), nodes = variable("SLURM_STEP_NODELIST");
        if (!address && !nodes)
            fail(
                "environment: SLURM_STEP_NODELIST: expected it from srun, found none; MASTER_ADDR may name "
                "rank 0's host");
        launch.address = address ? *address : first_host(*nodes);
        const auto port = variable("MASTER_PORT");
        launch.port =
            port ? rendezvous_port(static_cast<int>(integer("MASTER_PORT", *port, 1, max_ports)))
                 : slurm_port(required("srun", "SLURM_JOB_ID", 0, std::numeric_limits<int64_t>::max()));
        return launch;
    }
    return launch;
}

int own_device(const Launch& launch, int devices) {
    const auto shows_one = [](const char* name) {
        const auto list = variable(name);
        return list && list->find(',') == list->npos;
    };
    if (devices == 1 && launch.local_size > 1 &&
        (shows_one("ROCR_VISIBLE_DEVICES") || shows_one("HIP_VISIBLE_DEVICES") ||
         shows_one("CUDA_VISIBLE_DEVICES")))
        return 0;
    if (launch.local_rank >= devices)
        fail("expected a device for each of the ", launch.local_size, " processes on this host, found ",
             devices);
    return static_cast<int>(launch.local_rank);
}

bool speaks_for_host() {
    for (const char* name : {torchrun.local_rank, mpi[0].local_rank, mpi[1].local_rank, slurm.local_rank})
        if (const auto local = variable(name)) return *local == "0";
    return true;
}

int rendezvous_port(int master_port) {
    constexpr int distance = 8192, lowest = 1024;
    return master_port - distance >= lowest ? master_port - distance : master_port + distance;
}

}  // namespace llamac
