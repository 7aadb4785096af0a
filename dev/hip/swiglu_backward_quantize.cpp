// The gradients of SwiGLU's inputs, in fp8. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"swiglu_backward_quantize"}});
}
