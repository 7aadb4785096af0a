// Signals that end a run with a checkpoint: SIGHUP, SIGINT, SIGTERM, SIGUSR1 and SIGUSR2, which schedulers send
// before they kill. Only the program handles them: a Python process that trains keeps its own handlers.
#pragma once
namespace llamac {

// Out of micro-batches, validation and samples to the loop of the run: a signal came. No exception of the library's: nothing
// is wrong.
struct Stopped {};

// From now on the first of these signals is noted, the second is answered by a line on stderr, and the third ends the
// program at once, with a line and without a checkpoint. A signal that is ignored, as nohup does it, stays ignored.
void answer_stop_signals();

// The signal that came first; 0: none.
int stop_signal();
// How many came.
int stop_signals();
// "SIGTERM"
const char* signal_name(int signal);
// The ranks of a run end at the same step, on which they agree after a signal. Where they have not called it again so many
// seconds after one, the signal ends the program at once, without a checkpoint: a rank is lost. 0: no limit.
void limit_agreement(unsigned seconds);
// What a shell reports of a process that the signal ended.
constexpr int exit_code_of(int signal) {
    return 128 + signal;
}

// A closed console and a file beyond the limit of the process become errors of the write, in place of signals that end
// the program.
void ignore_write_signals();

}  // namespace llamac
