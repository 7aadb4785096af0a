// HIP's names for CUDA's runtime: those that are used, no more.
#pragma once
#include <cuda_runtime.h>

using hipStream_t = cudaStream_t;
