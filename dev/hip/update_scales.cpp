// The scales of fp8 from maxima. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"update_scales", {}, {}, {{"P", 1024}}}});
}
