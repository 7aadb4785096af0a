// The vendor's matrix products with hipBLASLt's names; on NVIDIA, these are names for cuBLASLt. Only if the build
// found the library (LLAMAC_BLASLT). In a CPU build, tests/ops/check_gemm.cpp alone has it, a stand-in for hipBLASLt.
#pragma once
#include <string>
#include <vector>

#include "platform/hip.h"

#if defined(LLAMAC_BLASLT)
#if defined(LLAMAC_AMD) || defined(LLAMAC_CPU)
#include <hipblaslt/hipblaslt.h>
#include <hipblaslt/hipblaslt-ext.hpp>
#else
#include <cublasLt.h>

using hipblasStatus_t = cublasStatus_t;
using hipblasLtHandle_t = cublasLtHandle_t;
using hipblasLtMatmulDesc_t = cublasLtMatmulDesc_t;
using hipblasLtMatmulDescAttributes_t = cublasLtMatmulDescAttributes_t;
using hipblasLtMatrixLayout_t = cublasLtMatrixLayout_t;
using hipblasLtMatmulPreference_t = cublasLtMatmulPreference_t;
using hipblasLtMatmulHeuristicResult_t = cublasLtMatmulHeuristicResult_t;
using hipblasLtMatmulAlgo_t = cublasLtMatmulAlgo_t;
using hipDataType = cudaDataType;
using hipblasOperation_t = cublasOperation_t;

#define HIP_R_32F CUDA_R_32F
#define HIP_R_16BF CUDA_R_16BF
#define HIPBLAS_STATUS_SUCCESS CUBLAS_STATUS_SUCCESS
#define HIPBLAS_STATUS_NOT_SUPPORTED CUBLAS_STATUS_NOT_SUPPORTED
#define HIPBLAS_COMPUTE_32F CUBLAS_COMPUTE_32F
#define HIPBLAS_OP_N CUBLAS_OP_N
#define HIPBLAS_OP_T CUBLAS_OP_T
#define HIPBLASLT_MATMUL_DESC_TRANSA CUBLASLT_MATMUL_DESC_TRANSA
#define HIPBLASLT_MATMUL_DESC_TRANSB CUBLASLT_MATMUL_DESC_TRANSB
#define HIPBLASLT_MATMUL_DESC_A_SCALE_POINTER CUBLASLT_MATMUL_DESC_A_SCALE_POINTER
#define HIPBLASLT_MATMUL_DESC_B_SCALE_POINTER CUBLASLT_MATMUL_DESC_B_SCALE_POINTER
#define HIPBLASLT_MATMUL_DESC_EPILOGUE CUBLASLT_MATMUL_DESC_EPILOGUE
#define HIPBLASLT_MATMUL_DESC_BIAS_POINTER CUBLASLT_MATMUL_DESC_BIAS_POINTER
#define HIPBLASLT_MATMUL_DESC_BIAS_DATA_TYPE CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE
#define HIPBLASLT_EPILOGUE_BIAS CUBLASLT_EPILOGUE_BIAS
#define HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
#define hipblasLtCreate cublasLtCreate
#define hipblasLtMatmulDescCreate cublasLtMatmulDescCreate
#define hipblasLtMatmulDescSetAttribute cublasLtMatmulDescSetAttribute
#define hipblasLtMatrixLayoutCreate cublasLtMatrixLayoutCreate
#define hipblasLtMatmulPreferenceCreate cublasLtMatmulPreferenceCreate
#define hipblasLtMatmulPreferenceSetAttribute cublasLtMatmulPreferenceSetAttribute
#define hipblasLtMatmulPreferenceDestroy cublasLtMatmulPreferenceDestroy
#define hipblasLtMatmulAlgoGetHeuristic cublasLtMatmulAlgoGetHeuristic
#define hipblasLtMatmul cublasLtMatmul
#endif

namespace llamac {

// ..._DESC_A_SCALE_MODE, ..._DESC_B_SCALE_MODE and ..._MATRIX_SCALE_OUTER_VEC_32F, which have the same numbers in both
// libraries; headers before CUDA 12.9 and ROCm 7 lack the names, and those libraries refuse the attributes.
constexpr auto first_scale_mode = static_cast<hipblasLtMatmulDescAttributes_t>(31),
               second_scale_mode = static_cast<hipblasLtMatmulDescAttributes_t>(32);
constexpr int32_t scale_by_row = 3;

#if defined(LLAMAC_AMD) || defined(LLAMAC_CPU)
constexpr const char* blaslt_name = "hipBLASLt";
inline int blaslt_version(hipblasLtHandle_t handle) {
    int version = 0;
    static_cast<void>(hipblasLtGetVersion(handle, &version));
    return version;
}
// A handle owns memory that synchronizes the blocks of a product, so two streams need two handles. None can be made during a
// capture.
constexpr bool handle_owns_memory = true;
// If fewer are tuned for a product, the library looks at all of its solutions for the rest, for 0.6 s.
constexpr int max_candidates = 8;
// Whether the library takes an algorithm that an earlier run saved, and its workspace. hipBLASLt crashes on an unknown algorithm,
// so it is looked up among those offered.
inline bool takes_algorithm(hipblasLtHandle_t, hipblasLtMatmulDesc_t, hipblasLtMatrixLayout_t,
                            hipblasLtMatrixLayout_t, hipblasLtMatrixLayout_t, hipblasLtMatrixLayout_t,
                            const std::vector<hipblasLtMatmulHeuristicResult_t>& offered,
                            hipblasLtMatmulAlgo_t algorithm, size_t* workspace) {
    for (hipblasLtMatmulHeuristicResult_t one : offered) {
        *workspace = one.workspaceSize;
        if (hipblaslt_ext::getIndexFromAlgo(one.algo) == hipblaslt_ext::getIndexFromAlgo(algorithm))
            return true;
    }
    return false;
}
// MFMA sums in full fp32 at its full rate.
inline bool set_fast_accumulation(hipblasLtMatmulDesc_t) {
    return true;
}
// hipBLASLt asks for no more than a matrix's own type needs.
inline void promise_alignment(hipblasLtMatmulPreference_t, int) {}
#else
constexpr const char* blaslt_name = "cuBLASLt";
inline int blaslt_version(hipblasLtHandle_t) {
    return static_cast<int>(cublasLtGetVersion());
}
constexpr bool handle_owns_memory = false;
constexpr int max_candidates = 32;
// cuBLASLt may offer other algorithms in another process (f32, beside PyTorch) and still accepts these.
inline bool takes_algorithm(hipblasLtHandle_t handle, hipblasLtMatmulDesc_t product,
                            hipblasLtMatrixLayout_t a, hipblasLtMatrixLayout_t b, hipblasLtMatrixLayout_t c,
                            hipblasLtMatrixLayout_t out, const std::vector<hipblasLtMatmulHeuristicResult_t>&,
                            hipblasLtMatmulAlgo_t algorithm, size_t* workspace) {
    hipblasLtMatmulHeuristicResult_t found = {};
    const cublasStatus_t status = cublasLtMatmulAlgoCheck(handle, product, a, b, c, out, &algorithm, &found);
    *workspace = found.workspaceSize;
    return status == CUBLAS_STATUS_SUCCESS && found.state == CUBLAS_STATUS_SUCCESS;
}
inline bool set_fast_accumulation(hipblasLtMatmulDesc_t product) {
    const int8_t on = 1;
    return cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &on, sizeof on) ==
           CUBLAS_STATUS_SUCCESS;
}
// Candidates need addresses aligned to no more than these bytes; unless told, cuBLASLt expects 256.
inline void promise_alignment(hipblasLtMatmulPreference_t preference, int bytes) {
    const uint32_t value = static_cast<uint32_t>(bytes);
    for (cublasLtMatmulPreferenceAttributes_t operand :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        static_cast<void>(cublasLtMatmulPreferenceSetAttribute(preference, operand, &value, sizeof value));
}
#endif

// Of the current device; a process may use devices of several kinds.
inline std::string device_name() {
#if defined(LLAMAC_CPU)
    return device_properties().name;
#else
    hipDeviceProp_t properties;
    CHECK(hipGetDeviceProperties(&properties, current_device()));
    return properties.name;
#endif
}

}  // namespace llamac
#endif
