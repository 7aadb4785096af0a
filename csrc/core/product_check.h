// Whether a result of the vendor's library is right: its algorithms are compared with our own kernel before one is kept.
#pragma once
#include <string>
#include <vector>

#include "core/library_gemm.h"
#include "core/tolerance.h"

namespace llamac {

// A product in host memory.
struct ProductValues {
    std::vector<char> a, b, c, bias;  // c: the summand; it and the bias may be empty
    std::vector<float> a_scale, b_scale;
    std::vector<char> own;  // the result of our own kernel
};

// Two results may differ by the error of each. The allowed error is measured on a sample of rows and columns in f64: the error
// of our own kernel or of a plain sum in f32, whichever is larger, times the factor of a backward tolerance. The sample
// contains the row and the column of the largest element. Rounding errors have normal tails: the largest of n grows as the
// root of log n.
struct ProductCheck {
    ProductCheck(const Gemm& gemm, ProductValues values);

    // "" if the result is right; else its distance from our own.
    std::string difference(const std::vector<char>& result) const;

  private:
    const Gemm gemm;
    const ProductValues values;
    Deviation allowed;
};

}  // namespace llamac
