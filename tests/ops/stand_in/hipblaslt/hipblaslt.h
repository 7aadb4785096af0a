// A stand-in for hipBLASLt on the host, for check_gemm.cpp: its algorithms compute right, wrong, fast or slowly, as a test says.
#pragma once
#include <chrono>
#include <vector>

#include "core/dtype.h"

enum hipblasStatus_t { HIPBLAS_STATUS_SUCCESS, HIPBLAS_STATUS_NOT_SUPPORTED };
enum hipDataType : int { HIP_R_32F = 0, HIP_R_16BF = 14 };
enum hipblasComputeType_t { HIPBLAS_COMPUTE_32F };
enum hipblasOperation_t { HIPBLAS_OP_N = 111, HIPBLAS_OP_T = 112 };
enum hipblasLtMatmulDescAttributes_t : int {
    HIPBLASLT_MATMUL_DESC_TRANSA,
    HIPBLASLT_MATMUL_DESC_TRANSB,
    HIPBLASLT_MATMUL_DESC_A_SCALE_POINTER,
    HIPBLASLT_MATMUL_DESC_B_SCALE_POINTER,
    HIPBLASLT_MATMUL_DESC_BIAS_POINTER,
    HIPBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
    HIPBLASLT_MATMUL_DESC_EPILOGUE,
    stand_in_a_scale_mode = 31,
    stand_in_b_scale_mode = 32
};
enum hipblasLtEpilogue_t { HIPBLASLT_EPILOGUE_BIAS = 4 };
enum hipblasLtMatmulPreferenceAttributes_t { HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES };

struct hipblasLtMatmulAlgo_t {
    int index;
};
struct hipblasLtMatmulHeuristicResult_t {
    hipblasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    hipblasStatus_t state;
};
struct StandInProduct {
    int32_t op[2] = {HIPBLAS_OP_N, HIPBLAS_OP_N}, by_row[2] = {0, 0};
    const float* scale[2] = {nullptr, nullptr};
    const void* bias = nullptr;
    int32_t bias_type = 0, epilogue = 0;
};
struct StandInMatrix {  // by columns
    hipDataType type;
    int64_t rows, columns, step;
};
using hipblasLtHandle_t = int*;
using hipblasLtMatmulDesc_t = StandInProduct*;
using hipblasLtMatrixLayout_t = StandInMatrix*;
using hipblasLtMatmulPreference_t = int*;

namespace stand_in {

struct Algorithm {
    double factor = 1;  // that its results are wrong by
    double ms = 0.05;
};
inline std::vector<Algorithm> algorithms;  // the best guess first
inline int handles = 0;                    // made

inline llamac::DType type_of(const StandInMatrix& m) {
    size_t t = 0;
    while (llamac::dtype_table[t].library != m.type) t++;
    return static_cast<llamac::DType>(t);
}
inline double get(const StandInMatrix& m, const void* data, int64_t row, int64_t column) {
    return llamac::visit_dtype(type_of(m), [&]<class T>() {
        return llamac::to_storage<double>(static_cast<const T*>(data)[column * m.step + row]);
    });
}

}  // namespace stand_in

inline hipblasStatus_t hipblasLtCreate(hipblasLtHandle_t* handle) {
    *handle = new int(stand_in::handles++);
    return HIPBLAS_STATUS_SUCCESS;
}
inline hipblasStatus_t hipblasLtGetVersion(hipblasLtHandle_t, int* version) {
    *version = 1;
    return HIPBLAS_STATUS_SUCCESS;
}
inline hipblasStatus_t hipblasLtMatmulDescCreate(hipblasLtMatmulDesc_t* product, hipblasComputeType_t,
                                                 hipDataType) {
    *product = new StandInProduct;
    return HIPBLAS_STATUS_SUCCESS;
}
inline hipblasStatus_t hipblasLtMatmulDescSetAttribute(hipblasLtMatmulDesc_t product,
                                                       hipblasLtMatmulDescAttributes_t attribute,
                                                       const void* value, size_t bytes) {
    void* const places[] = {&product->op[0], &product->op[1],     &product->scale[0], &product->scale[1],
                            &product->bias,  &product->bias_type, &product->epilogue};
    const bool is_mode = attribute >= stand_in_a_scale_mode;
    std::memcpy(is_mode ? &product->by_row[attribute - stand_in_a_scale_mode] : places[attribute], value,
                bytes);
    return HIPBLAS_STATUS_SUCCESS;
}
inline hipblasStatus_t hipblasLtMatrixLayoutCreate(hipblasLtMatrixLayout_t* layout, hipDataType type,
                                                   uint64_t rows, uint64_t columns, int64_t step) {
    *layout = new StandInMatrix{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), step};
    return HIPBLAS_STATUS_SUCCESS;
}
inline hipblasStatus_t hipblasLtMatmulPreferenceCreate(hipblasLtMatmulPreference_t* preference) {
    *preference = nullptr;
    return HIPBLAS_STATUS_SUCCESS;
}
inline hipblasStatus_t hipblasLtMatmulPreferenceSetAttribute(hipblasLtMatmulPreference_t,
                                                             hipblasLtMatmulPreferenceAttributes_t,
                                                             const void*, size_t) {
    return HIPBLAS_STATUS_SUCCESS;
}
inline hipblasStatus_t hipblasLtMatmulPreferenceDestroy(hipblasLtMatmulPreference_t) {
    return HIPBLAS_STATUS_SUCCESS;
}
inline hipblasStatus_t hipblasLtMatmulAlgoGetHeuristic(hipblasLtHandle_t, hipblasLtMatmulDesc_t,
                                                       hipblasLtMatrixLayout_t, hipblasLtMatrixLayout_t,
                                                       hipblasLtMatrixLayout_t, hipblasLtMatrixLayout_t,
                                                       hipblasLtMatmulPreference_t, int most,
                                                       hipblasLtMatmulHeuristicResult_t* results,
                                                       int* found) {
    for (*found = 0; *found < most && *found < static_cast<int>(stand_in::algorithms.size()); ++*found)
        results[*found] = {{*found}, 0, HIPBLAS_STATUS_SUCCESS};
    return HIPBLAS_STATUS_SUCCESS;
}
// d = alpha * scales * op(a) * op(b) + beta * c, wrong by the algorithm's factor, and not before its time is over.
inline hipblasStatus_t hipblasLtMatmul(hipblasLtHandle_t, hipblasLtMatmulDesc_t product, const void* alpha,
                                       const void* a, hipblasLtMatrixLayout_t a_layout, const void* b,
                                       hipblasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                                       hipblasLtMatrixLayout_t c_layout, void* d,
                                       hipblasLtMatrixLayout_t d_layout,
                                       const hipblasLtMatmulAlgo_t* algorithm, void*, size_t, hipStream_t) {
    const auto begin = std::chrono::steady_clock::now();
    const stand_in::Algorithm& how = stand_in::algorithms.at(static_cast<size_t>(algorithm->index));
    const auto factor_of = [&](int operand, int64_t i) {
        const float* const scale = product->scale[operand];
        return scale ? static_cast<double>(scale[product->by_row[operand] ? i : 0]) : 1.0;
    };
    const bool a_turned = product->op[0] == HIPBLAS_OP_T, b_turned = product->op[1] == HIPBLAS_OP_T;
    const int64_t inner = a_turned ? a_layout->rows : a_layout->columns;
    for (int64_t j = 0; j < d_layout->columns; j++)
        for (int64_t i = 0; i < d_layout->rows; i++) {
            double sum = 0;
            for (int64_t k = 0; k < inner; k++)
                sum += stand_in::get(*a_layout, a, a_turned ? k : i, a_turned ? i : k) *
                       stand_in::get(*b_layout, b, b_turned ? j : k, b_turned ? k : j);
            sum *= static_cast<double>(*static_cast<const float*>(alpha)) * factor_of(0, i) * factor_of(1, j);
            const double weight = static_cast<double>(*static_cast<const float*>(beta));
            double added = weight == 0 ? 0 : weight * stand_in::get(*c_layout, c, i, j);
            if (product->epilogue == HIPBLASLT_EPILOGUE_BIAS)
                added += stand_in::get({hipDataType(product->bias_type), d_layout->rows, 1, d_layout->rows},
                                       product->bias, i, 0);
            llamac::visit_dtype(stand_in::type_of(*d_layout), [&]<class T>() {
                static_cast<T*>(d)[j * d_layout->step + i] =
                    llamac::to_storage<T>((sum + added) * how.factor);
            });
        }
    while (std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count() <
           how.ms) {
    }
    return HIPBLAS_STATUS_SUCCESS;
}
