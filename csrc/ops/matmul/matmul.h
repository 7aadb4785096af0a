// The variants of matmul: their launchers, as matmul.hip lists them.
#pragma once
#include "core/operation.h"

namespace llamac {

// cpu.hip
template <class T>
void matmul_forward_cpu(View<T, 2> out, View<const T, 2> x, View<const T, 2> weight,
                        View<const T, 2> residual, View<const T, 1> bias);
template <class T>
void matmul_forward_few_rows(View<T, 2> out, View<const T, 2> x, View<const T, 2> weight,
                             View<const T, 2> residual, View<const T, 1> bias);
bool few_rows_supports(const Call& call);
template <class T>
void matmul_backward_input_cpu(View<T, 2> dx, View<const T, 2> dout, View<const T, 2> weight,
                               bool accumulate);
template <class T, class G>
void matmul_backward_weight_cpu(View<G, 2> dweight, View<const T, 2> dout, View<const T, 2> x,
                                bool accumulate);

// naive.hip
template <class T>
void matmul_forward_naive(View<T, 2> out, View<const T, 2> x, View<const T, 2> weight,
                          View<const T, 2> residual, View<const T, 1> bias, LaunchContext context);
template <class T>
void matmul_backward_input_naive(View<T, 2> dx, View<const T, 2> dout, View<const T, 2> weight,
                                 bool accumulate, LaunchContext context);
template <class T, class G>
void matmul_backward_weight_naive(View<G, 2> dweight, View<const T, 2> dout, View<const T, 2> x,
                                  bool accumulate, LaunchContext context);

// vectorized.hip
template <class T>
void matmul_forward_vectorized(View<T, 2> out, View<const T, 2> x, View<const T, 2> weight,
                               View<const T, 2> residual, View<const T, 1> bias, LaunchContext context);
bool vectorized_supports(const Call& call);

// tiled.hip
template <class E>
void matmul_forward_tiled(View<E, 2> out, View<const E, 2> x, View<const E, 2> weight,
                          View<const E, 2> residual, View<const E, 1> bias, LaunchContext context);
template <class E>
void matmul_backward_input_tiled(View<E, 2> dx, View<const E, 2> dout, View<const E, 2> weight,
                                 bool accumulate, LaunchContext context);
template <class E, class G>
void matmul_backward_weight_tiled(View<G, 2> dweight, View<const E, 2> dout, View<const E, 2> x,
                                  bool accumulate, LaunchContext context);
bool tiled_supports(const Call& call);

// A library's launchers for the three products: none where the build has not the library.
struct LibraryEntries {
    std::span<const Instantiation> forward, backward_input, backward_weight;
};
LibraryEntries blas_instantiations();     // cpu.hip
LibraryEntries library_instantiations();  // library.hip
bool library_supports_forward(const Call& call);
bool library_supports_backward_input(const Call& call);
bool library_supports_backward_weight(const Call& call);
int64_t library_workspace(const Call& call);

}  // namespace llamac
