// Signals that end a run with a checkpoint: SIGHUP, SIGINT, SIGTERM, SIGUSR1 and SIGUSR2, which schedulers send
// before they kill. Only the program handles them: a Python process that trains keeps its own handlers.
#pragma once
namespace llamac {

// Thrown between micro-batches after a signal, out of steps, validation and samples. Not an std::exception, as nothing is
// wrong.
struct Stopped {};

// Handles these signals from now on: the first is noted, the second prints a line on stderr, the third ends the program with a
// line and without a checkpoint. Ignored signals, as under nohup, stay ignored.
void answer_stop_signals();

// The signal that came first; 0: none.
int stop_signal();
// The number of signals.
int stop_signals();
// "SIGTERM"
const char* signal_name(int signal);
// The ranks agree on the step at which they end after a signal. If they have not called this again within `seconds`, a rank is
// lost, and the program ends without a checkpoint. 0: no limit.
void limit_agreement(unsigned seconds);
// A shell's exit code of a process that the signal ended.
constexpr int exit_code_of(int signal) {
    return 128 + signal;
}

// Writes to a closed console or beyond the file size limit fail with an error instead of a signal.
void ignore_write_signals();

}  // namespace llamac
