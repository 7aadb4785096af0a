// RMSNorm, backward: alone, and with the gradient that passes the norm added. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(
        argc, argv, {{"rmsnorm_backward", {"out", "dresidual"}}, {"rmsnorm_backward", {"out"}}});
}
