// Of the stand-in for hipBLASLt (hipblaslt.h).
#pragma once
#include <hipblaslt/hipblaslt.h>

namespace hipblaslt_ext {

inline int getIndexFromAlgo(hipblasLtMatmulAlgo_t& algorithm) {
    return algorithm.index;
}

}  // namespace hipblaslt_ext
