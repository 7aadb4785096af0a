// SwiGLU, backward.
#include "benchmark.h"

static const llamac::Benchmarks swiglu_backward = {{.operation = "swiglu_backward", .absent = {"out"}}};
