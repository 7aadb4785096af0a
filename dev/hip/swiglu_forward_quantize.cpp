// SwiGLU that writes fp8. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"swiglu_forward_quantize"}});
}
