// Lines on the console. A reader that leaves or stops reading neither ends the run nor delays it.
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>

namespace llamac {

struct Console {
    explicit Console(std::FILE* to) : stream(to) {}

    // Writes all of it. What cannot be written, because the console is closed or fails, is dropped; so are whole
    // lines where nobody reads, and the next line that gets through says how many.
    void write(const std::string& line);

  private:
    bool has_room(int descriptor, int milliseconds) const;

    std::FILE* stream;  // of a file, or a buffer in memory
    int64_t dropped = 0;
};

}  // namespace llamac
