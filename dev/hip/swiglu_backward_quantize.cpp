// The gradients of SwiGLU's inputs, in fp8.
#include "benchmark.h"

static const llamac::Benchmarks swiglu_backward_quantize = {{.operation = "swiglu_backward_quantize"}};
