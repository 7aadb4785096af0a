// The host's threads, and how they wait for one another.
#pragma once
#include <functional>
#include <thread>

namespace llamac {

// GNU's OpenMP spins for milliseconds at the end of each parallel loop. Where another process holds a core,
// the thread that is waited for then cannot run on the spinning one's: with one busy process on two cores, a
// step took 5 times as long as with a spin of some 20 microseconds, which costs nothing on a quiet machine
// (docs/log/cpu.md). LLVM's, which the HIP compiler brings, spins for 200 ms. The runtime reads the setting before
// main(), so this sets it and starts the program again, once; it returns where the environment holds a setting
// already.
void limit_spinning(char** argv);

// Threads that a parallel loop has.
int host_threads();

// A thread that no signal interrupts: the process's are answered by those that it had before. Throws Error where the system
// starts none.
std::thread start_thread_without_signals(const std::function<void()>& work);

}  // namespace llamac
