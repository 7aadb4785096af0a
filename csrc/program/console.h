// Lines on the console. A closed or blocked reader neither ends nor delays the run.
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>

namespace llamac {

struct Console {
    explicit Console(std::FILE* to) : stream(to) {}

    // Writes a line, or drops it if the console is closed, fails or blocks; the next line that gets through says how many
    // were dropped.
    void write(const std::string& line);

  private:
    bool has_room(int descriptor, int milliseconds) const;

    std::FILE* stream;  // of a file, or a buffer in memory
    int64_t dropped = 0;
};

}  // namespace llamac
