// The processes of a run: this rank and the address of rank 0, from the launcher's environment variables.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace llamac {

enum class Launcher : uint8_t { none, torchrun, mpi, slurm };

struct Launch {
    Launcher launcher = Launcher::none;
    int64_t rank = 0, size = 1;              // of all processes
    int64_t local_rank = 0, local_size = 1;  // of those on this host
    std::string address;                     // of rank 0's host; "" with mpi: MPI finds it
    int port = 0;                            // where rank 0 listens for the others
};

// Reads torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), which --devices sets
// as well, or else those of Open MPI, MPICH and Intel MPI, or else those of srun. Throws Error if they are incomplete or
// contradictory.
Launch find_launch();

// The index of this process's device among the visible ones: its local rank, or 0 if the launcher shows each process its own
// device (ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES). Throws Error if there are too few.
int own_device(const Launch& launch, int devices);

// Whether this process reports errors that all processes of the host find, before they are connected: the first one, by the
// launcher's variables.
bool speaks_for_host();

// A port other than master_port, at which torchrun's agent listens; the same on all ranks, and below the ports of clients
// (Linux: from 32768).
int rendezvous_port(int master_port);

// The numeric address of this host towards rank 0: 10.0.0.2.
std::string own_address(const Launch& launch);

// The first exchange of ranks: sends to[r] to rank r and returns the texts from each, by way of rank 0, which listens at the
// launch's port. Each other rank sends and receives one message of `size` texts. Throws Error if ranks are missing after
// `seconds`, have another number of ranks, or the port is taken.
std::vector<std::string> meet(const Launch& launch, const std::string& purpose,
                              const std::vector<std::string>& to, double seconds);

// --devices: starts `count` processes of this program on this host, with the same arguments and torchrun's variables; passes
// signals on to them and waits for them. If one fails, the others are killed after `seconds`; all end with this process.
// Returns the exit status of the first process that failed, or 0. Throws Error if a process cannot be started.
int run_ranks(int64_t count, char** argv, double seconds);

}  // namespace llamac
