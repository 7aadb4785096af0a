// The gradients of SwiGLU's inputs, in fp8.
#include "benchmark.h"

const std::vector<llamac::Benchmark> llamac::benchmarks = {{.operation = "swiglu_backward_quantize"}};
