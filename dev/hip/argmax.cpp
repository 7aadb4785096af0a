// The likeliest token of one sequence. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"argmax", {}, {}, {{"N", 1}}}});
}
