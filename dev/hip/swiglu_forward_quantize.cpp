// SwiGLU that writes fp8.
#include "benchmark.h"

static const llamac::Benchmarks swiglu_forward_quantize = {{.operation = "swiglu_forward_quantize"}};
