// RMSNorm fused with the residual add before it. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"residual_rmsnorm_forward"}});
}
