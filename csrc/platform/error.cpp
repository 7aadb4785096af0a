#include "platform/error.h"

#include <cstdio>
#include <cstdlib>

namespace llamac {

static bool failed_checks_raise = false;

void raise_failed_checks() {
    failed_checks_raise = true;
}

void check_failed(const std::string& line) {
    if (failed_checks_raise) throw std::runtime_error("llamac: " + line);
    std::fprintf(stderr, "llamac: %s\n", line.c_str());
    std::abort();
}

}  // namespace llamac
