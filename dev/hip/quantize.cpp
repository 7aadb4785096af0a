// Quantisation to fp8, transposed too, with the maximum. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"quantize"}});
}
