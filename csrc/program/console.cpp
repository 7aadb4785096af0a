#include "program/console.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "program/stop.h"

namespace llamac {

// For PIPE_BUF bytes of a pipe. A signal ends the wait: the run has better things to do then.
bool Console::has_room(int descriptor, int milliseconds) const {
    constexpr int slice = 100;  // a signal before poll() does not end it
    for (int waited = 0;; waited += slice) {
        pollfd ready{descriptor, POLLOUT, 0};
        const int n = poll(&ready, 1, std::min(slice, milliseconds));
        if (n > 0) return true;
        if ((n < 0 && errno != EINTR) || waited >= milliseconds || stop_signal() != 0) return false;
    }
}

void Console::write(const std::string& line) {
    std::fflush(stream);
    const int descriptor = fileno(stream);
    if (descriptor < 0) {
        std::fwrite(line.data(), 1, line.size(), stream);
        std::fflush(stream);
        return;
    }
    // Long enough for any reader that reads at all; once it does not, no further line waits.
    constexpr int patience = 1000;
    if (!has_room(descriptor, dropped > 0 ? 0 : patience)) {
        dropped++;
        return;
    }
    std::string text = line;
    if (dropped > 0) text = "(" + std::to_string(dropped) + " unread lines were left out)\n" + text;
    dropped = 0;
    for (size_t done = 0; done < text.size();) {
        if (done > 0 && !has_room(descriptor, patience)) return;
        const ssize_t written =
            ::write(descriptor, text.data() + done, std::min(text.size() - done, size_t{PIPE_BUF}));
        if (written < 0 && errno == EINTR) continue;
        if (written < 0 && errno == EAGAIN) continue;
        if (written <= 0) return;
        done += static_cast<size_t>(written);
    }
}

}  // namespace llamac
