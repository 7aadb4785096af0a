#include "platform/threads.h"

#include <omp.h>
#include <unistd.h>

#include <cstdlib>
#include <initializer_list>

namespace llamac {

void limit_spinning(char** argv) {
    for (const char* name : {"GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"})
        if (std::getenv(name)) return;
    setenv("GOMP_SPINCOUNT", "5000", 0);
    setenv("KMP_BLOCKTIME", "0", 0);
    execv("/proc/self/exe", argv);  // returns only if it failed: then the run goes on as it is
}

int host_threads() {
    return omp_get_max_threads();
}

}  // namespace llamac
