#include "platform/threads.h"

#include <omp.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <system_error>

#include "platform/error.h"

namespace llamac {

void limit_spinning(char** argv) {
    for (const char* name : {"GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"})
        if (std::getenv(name)) return;
    setenv("GOMP_SPINCOUNT", "5000", 0);
    setenv("KMP_BLOCKTIME", "0", 0);
    execv("/proc/self/exe", argv);  // returns only on failure, and the run continues unchanged
}

int host_threads() {
    return omp_get_max_threads();
}

std::thread start_thread_without_signals(const std::function<void()>& work) {
    sigset_t all, before;
    sigfillset(&all);
    CHECK(pthread_sigmask(SIG_SETMASK, &all, &before) == 0);
    std::thread thread;
    std::string error;
    try {
        thread = std::thread(work);
    } catch (const std::system_error& found) {
        error = found.code().message();
    }
    CHECK(pthread_sigmask(SIG_SETMASK, &before, nullptr) == 0);
    if (!error.empty()) fail("cannot start a thread: ", error, "; `ulimit -u` shows how many there may be");
    return thread;
}

}  // namespace llamac
