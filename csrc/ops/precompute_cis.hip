// The table of RoPE's angles (Su et al., "RoFormer", 2021), with the frequency scaling of Llama 3.1.
//
//   frequency[j] = theta^(-2j/HD),   cis[t,j] = (cos, sin)(t * frequency[j]),   j < HD/2
//
// Llama 3.1 stretches the slow frequencies, so that a model trained on original_context positions reaches
// further (transformers calls it rope_type "llama3"). With turns = original_context * frequency / 2 pi, the
// turns that a pair makes in the original context:
//   turns > high_freq_factor:  frequency as it is
//   turns < low_freq_factor:   frequency / factor
//   between:                   (1-s) frequency / factor + s frequency, with s = (turns - low) / (high - low)
// factor 1: no scaling; the other three are not read.
//
// Angles reach t itself (frequency 1), where a float keeps only 0.008 rad at t = 131,072: they are computed
// in double and only their cosine and sine are rounded.
#include <cmath>

#include "core/registry.h"

namespace llamac {
namespace {

double scaled_frequency(double frequency, double factor, double low_freq_factor, double high_freq_factor,
                        double original_context) {
    if (factor == 1) return frequency;
    constexpr double two_pi = 6.283185307179586476925286766559;
    const double turns = original_context * frequency / two_pi;
    if (turns > high_freq_factor) return frequency;
    if (turns < low_freq_factor) return frequency / factor;
    const double s = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
    return (1 - s) * frequency / factor + s * frequency;
}

template <class A>
void precompute_cis_reference(View<A, 3> cis, double theta, double factor, double low_freq_factor,
                              double high_freq_factor, double original_context) {
    const int64_t T = cis.shape[0], half = cis.shape[1];
#pragma omp parallel for
    for (int64_t j = 0; j < half; j++) {
        const double frequency =
            scaled_frequency(std::pow(theta, -static_cast<double>(j) / static_cast<double>(half)), factor,
                             low_freq_factor, high_freq_factor, original_context);
        for (int64_t t = 0; t < T; t++) {
            const double angle = static_cast<double>(t) * frequency;
            cis(t, j, 0) = A(std::cos(angle));
            cis(t, j, 1) = A(std::sin(angle));
        }
    }
}

Operation precompute_cis(
    "precompute_cis(cis: A[T,HD/2,2];;"
    " theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: float)",
    "cosine and sine of every position's RoPE angles",
    {{"reference", "plain loops in double", Where::host,
      entries<precompute_cis_reference<float>, precompute_cis_reference<double>>()}},
    [](const Call& c) { return 1.5 * c["T"] * c["HD"]; });

}  // namespace
}  // namespace llamac
