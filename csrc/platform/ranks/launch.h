// The processes of a run: this one's rank and how to reach the others, as its launcher says in the environment.
#pragma once
#include <cstdint>
#include <string>

namespace llamac {

enum class Launcher : uint8_t { none, torchrun, mpi, slurm };

struct Launch {
    Launcher launcher = Launcher::none;
    int64_t rank = 0, size = 1;              // of all processes
    int64_t local_rank = 0, local_size = 1;  // of those on this host
    std::string address;                     // of rank 0's host; "" with mpi: MPI finds it
    int port = 0;                            // where rank 0 listens for the others
};

// torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), which --devices sets as
// well, or else those of Open MPI, MPICH and Intel MPI, or else those of srun. Throws Error where they are incomplete or
// contradict one another.
Launch find_launch();

// The number of this process's device among so many that it sees: its place on the host, or the only one, where the launcher
// shows each process its own alone (ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES). Throws Error where
// there are too few.
int own_device(const Launch& launch, int devices);

// Whether this process is the first one on its host, as far as its launcher's variables say. Where they are incomplete, or
// a library is missing, all processes find the same and cannot agree who says it: this one does.
bool speaks_for_host();

// Another port than master_port, where torchrun's agent listens; the same on all ranks. Below the ports that systems give
// to clients (Linux: from 32768).
int rendezvous_port(int master_port);

}  // namespace llamac
