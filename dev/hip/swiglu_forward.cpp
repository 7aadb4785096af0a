// SwiGLU on the joined gate and up rows.
#include "benchmark.h"

static const llamac::Benchmarks swiglu_forward = {{.operation = "swiglu_forward"}};
