// SwiGLU on the joined gate and up rows. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"swiglu_forward"}});
}
