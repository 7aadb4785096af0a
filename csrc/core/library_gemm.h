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

// What an operand is multiplied by as it is read: nothing, one number, or one number for each row of a (column of b).
enum class GemmScale : uint8_t { none, tensor, row };

// Row-major out[rows,columns] = a * b (+ c), summed over `inner` in f32.
struct Gemm {
    int64_t rows, columns, inner;
    bool a_transposed, b_transposed;  // a is stored [inner,rows]; b is stored [columns,inner]
    DType a, b, c, out;               // c: of what is added; where nothing is, that of out
    bool adds;                        // + c, which may be out
    GemmScale a_scale = GemmScale::none, b_scale = GemmScale::none;
    // Of fp8 on Hopper: sums keep fewer bits between instructions, and the product is faster.
    bool fast_accumulation = false;

    // "nt 8192x6144x4096 bf16 bf16 +c", the types of a and out: what files keep choices by. Where b's type is another
    // than a's, or c's than out's, it follows behind a slash; scales come last: "nt 64x64x64 e4m3/e5m2 bf16 +c/f32 a*1 b*row fast".
    std::string name() const;
    std::strong_ordering operator<=>(const Gemm&) const = default;
};

// What all addresses must be multiples of, whatever the candidate: other addresses, the same bits.
constexpr int gemm_alignment = 16;
// What the library is given to work in.
constexpr int64_t gemm_workspace_bytes = int64_t{64} << 20;

// Of a build for GPUs without the vendor's library: "no hipBLASLt: ...", what that costs. Otherwise "".
const char* without_gemm_library();
// Whether this build and the device's library can compute it. stream: where it would. Throws Error while a graph is
// recorded there, if the library has to take memory first.
bool gemm_supports(const Gemm& gemm, hipStream_t stream);
struct GemmAlgorithms;
struct GemmOperands {
    void* out;
    const void *a, *b;
    const void* c = nullptr;                             // where the product adds
    const float *a_scale = nullptr, *b_scale = nullptr;  // device memory, where the product scales
};
// Computes a product by our own kernels: on what stands in `out` where c is out.
using OwnGemm = void (*)(const Gemm& gemm, const GemmOperands& operands, hipStream_t stream);
// workspace: gemm_workspace_bytes. algorithms: null for the library's guess. own: what an algorithm is compared with
// before it is kept, and what computes the product where none is right.
void run_gemm(const Gemm& gemm, const GemmOperands& operands, OwnGemm own, void* workspace,
              GemmAlgorithms* algorithms, hipStream_t stream);

// The candidates that compute products, by the products' names.
struct GemmChoices {
    std::string device, library;  // of which they are candidates
    struct Choice {
        std::string algorithm;  // the library's own description, in hexadecimal; "own": our own kernel
        double ms = 0;          // as timed; 0: not timed, the library's guess
        int tried = 0;
    };
    std::map<std::string, Choice> choices;
};
// Which candidates compute the products of one model, on one device. Calls that share it take turns.
struct GemmAlgorithms {
    GemmAlgorithms();
    ~GemmAlgorithms();
    GemmAlgorithms(const GemmAlgorithms&) = delete;

    // A product that has no timing yet is timed at its next call, which waits for the device and takes device memory
    // for a moment. One product is timed at a time on a device. The fastest candidate whose result is right (ProductCheck)
    // is kept; a wrong one is named on stderr. Where none is right, our own kernel is kept. Candidates of files are kept as they are: they were compared when
    // they were timed, and a resumed run has to have the same bits.
    bool tuning = false;
    // Everybody's text, by rank: the ranks of a run compute alike, for the same bits after a resume. While it tunes, each
    // of them calls it for the same products in the same order. Null: there is one rank.
    std::function<std::vector<std::string>(const std::string& own)> gather;
    // What has been timed or taken, and used. Without the library: empty.
    GemmChoices choices() const;
    // Products that have not been used yet take these candidates. Returns "", or why they are not taken: "another
    // device's ...". One that the library refuses is said on stderr, and not taken.
    std::string use(const GemmChoices& choices);
    // What use() has been given; and what takes it back.
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

// Ranks take what rank 0 has been given, and nothing else, so that they time the same products. Returns "", or the line that
// says why none is taken: a rank's device or library is another.
std::string take_first_ranks_choices(GemmAlgorithms& algorithms);

nlohmann::ordered_json to_json(const GemmChoices& choices);
// where: begins the message of an Error, where the object is not what to_json made.
GemmChoices parse_gemm_choices(const nlohmann::json& object, const std::string& where);
// Throws Error where the file cannot be read; one that is not there holds nothing.
GemmChoices read_gemm_cache(const std::string& path);
// What the file holds of the same device and library stays; of another's, it is replaced. Only what was timed is
// kept.
void add_to_gemm_cache(const std::string& path, const GemmChoices& choices);

}  // namespace llamac
