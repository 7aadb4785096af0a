// The host's threads, and how they wait for one another.
#pragma once
#include <functional>
#include <thread>

namespace llamac {

// Limits the spinning of OpenMP at the end of parallel loops to about 20 microseconds. GNU's default is milliseconds, LLVM's
// 200 ms: beside one busy process on two cores, a step took 5 times as long (docs/log/cpu.md). The runtime reads the setting
// before main(), so this sets it and starts the program again, once, unless the environment has a setting.
void limit_spinning(char** argv);

// Threads of a parallel loop.
int host_threads();

// A thread that blocks all signals. Throws Error if the system starts none.
std::thread start_thread_without_signals(const std::function<void()>& work);

}  // namespace llamac
