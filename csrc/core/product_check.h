// Whether a result of the vendor's library is right: its algorithms are compared with our own kernel before one is kept.
#pragma once
#include <string>
#include <vector>

#include "core/library_gemm.h"
#include "core/tolerance.h"

namespace llamac {

// A product in host memory, as it was computed.
struct ProductValues {
    std::vector<char> a, b, c;  // c: what is added, where something is
    std::vector<float> a_scale, b_scale;
    std::vector<char> own;  // the result of our own kernel
};

// The errors of two results add up, so a result may differ from our own kernel's by an error of each. How large that
// is, is measured on a sample of rows and columns whose truth is computed in f64: as much as our own kernel or a plain
// sum in f32 is off there, times the factor of the tolerance of a backward pass, which is the larger one. The sample
// holds the row and the column of the largest element. Errors of roundings have the tails of a normal distribution:
// the largest of n of them grows as the root of log n.
struct ProductCheck {
    ProductCheck(const Gemm& gemm, ProductValues values);

    // "" where the result is right; else how far it is from our own.
    std::string difference(const std::vector<char>& result) const;

  private:
    const Gemm gemm;
    const ProductValues values;
    Deviation allowed;
};

}  // namespace llamac
