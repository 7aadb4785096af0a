// Matrix products by the vendor's library (hipBLASLt, cuBLASLt). The library objects of a product are created once
// per device. The algorithm is the library's first candidate or, with tuning, the fastest in a timing. The choice
// determines the bits: each model has its own choices, checkpoints keep them, and a file keeps them for later runs.
#pragma once
#include <compare>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace llamac {

// The factor of an operand: none, one number, or one number per row of a (column of b).
enum class GemmScale : uint8_t { none, tensor, row };

// Row-major out[rows,columns] = a * b (+ c) (+ bias[columns]), summed over `inner` in f32.
struct Gemm {
    int64_t rows, columns, inner;
    bool a_transposed, b_transposed;  // a is stored [inner,rows]; b is stored [columns,inner]
    DType a, b, c, out;               // c: of the summand; that of out without one
    bool adds;                        // + c, which may be out
    GemmScale a_scale = GemmScale::none, b_scale = GemmScale::none;
    // For fp8 on Hopper: sums keep fewer bits between instructions; faster.
    bool fast_accumulation = false;
    bool has_bias = false;  // in the type of out

    // "nt 8192x6144x4096 bf16 bf16 +c", the types of a and out: the key in files. A type of b other than a's, or of c
    // other than out's, follows a slash; scales come last: "nt 64x64x64 e4m3/e5m2 bf16 +c/f32 a*1 b*row fast"; "+bias" ends it.
    std::string name() const;
    std::strong_ordering operator<=>(const Gemm&) const = default;
};

// The alignment of all addresses, for every candidate: the bits do not depend on addresses.
constexpr int gemm_alignment = 16;
constexpr int64_t gemm_workspace_bytes = int64_t{64} << 20;

// "no hipBLASLt: ..." with its cost, in a GPU build without the vendor's library; otherwise "".
const char* without_gemm_library();
// Whether this build and the device's library can compute it on the stream. Throws Error if the library has to allocate
// memory while the stream is captured.
bool gemm_supports(const Gemm& gemm, hipStream_t stream);
struct GemmAlgorithms;
struct GemmOperands {
    void* out;
    const void *a, *b;
    const void* c = nullptr;                             // the summand
    const float *a_scale = nullptr, *b_scale = nullptr;  // device memory
    const void* bias = nullptr;
};
// Computes a product by our own kernels; adds to `out` if c is out.
using OwnGemm = void (*)(const Gemm& gemm, const GemmOperands& operands, hipStream_t stream);
// workspace: gemm_workspace_bytes. algorithms: null for the library's guess. own: the reference of algorithms before they are
// kept, and the fallback if none is right.
void run_gemm(const Gemm& gemm, const GemmOperands& operands, OwnGemm own, void* workspace,
              GemmAlgorithms* algorithms, hipStream_t stream);

constexpr const char* own_kernel = "own";  // in the place of an algorithm's text

// The chosen candidates, by the names of the products.
struct GemmChoices {
    std::string device, library;  // of which they are candidates
    struct Choice {
        std::string algorithm;  // the library's own description, in hexadecimal; or own_kernel
        double ms = 0;          // as timed; 0: not timed, the library's guess
        int tried = 0;
    };
    std::map<std::string, Choice> choices;
};
// The choices of one model on one device. Calls that share it take turns.
struct GemmAlgorithms {
    GemmAlgorithms();
    ~GemmAlgorithms();
    GemmAlgorithms(const GemmAlgorithms&) = delete;

    // Times each new product at its next call, which waits for the device and allocates device memory for a moment; one
    // product at a time per device. Keeps the fastest candidate whose result is right (ProductCheck), or our own kernel;
    // wrong candidates are named on stderr. Candidates of files are kept: they were compared when they were timed, and a
    // resumed run must have the same bits.
    bool tuning = false;
    double tuning_seconds = 0;  // of these timings and comparisons, so far
    // Gathers a text per rank, so that all ranks use one algorithm. While tuning, all ranks call it for the same products in
    // the same order. Null: there is one rank.
    std::function<std::vector<std::string>(const std::string& own)> gather;
    // The choices in use, and those given to replace(), which other ranks use. Without the library: empty.
    GemmChoices choices() const;
    // Takes these candidates for products that have not been used yet. Returns "", or the reason against it: "another device's
    // ...". A candidate that the library refuses is reported on stderr and not taken.
    std::string use(const GemmChoices& choices);
    // Likewise, and for products that have been used. Throws Error if the library refuses one of these.
    std::string replace(const GemmChoices& choices);
    // The choices given to use(), and their removal.
    GemmChoices given() const;
    void forget();

    struct State;  // the library's
    std::unique_ptr<State> state;
};
// While it lives, algorithms.tuning is `on`.
struct GemmTuning {
    GemmTuning(GemmAlgorithms& algorithms_, bool on)
        : algorithms(algorithms_), before(std::exchange(algorithms_.tuning, on)) {}
    ~GemmTuning() { algorithms.tuning = before; }
    GemmTuning(const GemmTuning&) = delete;

  private:
    GemmAlgorithms& algorithms;
    const bool before;
};

// Broadcasts the choices given to rank 0, so that all ranks time the same products. Returns "", or a line with the reason if
// none are taken: another device or library on a rank.
std::string take_first_ranks_choices(GemmAlgorithms& algorithms);

// Ranks that have timed their products each by itself, as stages of a pipeline do, replace their choices by common ones: the lowest
// rank's, or our own kernel if one rank needs it. gather: of a text per rank. Returns as above.
std::string take_common_choices(
    GemmAlgorithms& algorithms,
    const std::function<std::vector<std::string>(const std::string& own)>& gather);

nlohmann::ordered_json to_json(const GemmChoices& choices);
// Throws Error, which begins with `where`, for an object that to_json did not make.
GemmChoices parse_gemm_choices(const nlohmann::json& object, const std::string& where);
// Throws Error if the file cannot be read; a missing file is empty.
GemmChoices read_gemm_cache(const std::string& path);
// Adds the timed choices. Entries of other devices or library versions are replaced.
void add_to_gemm_cache(const std::string& path, const GemmChoices& choices);

}  // namespace llamac
