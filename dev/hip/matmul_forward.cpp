// A linear layer's product. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(
        argc, argv, {{"matmul_forward", {"residual"}, {}, {{"N", 8192}, {"C", 8192}, {"K", 8192}}}});
}
