#include "core/gemm.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <vector>

#include "core/device_memory.h"
#include "platform/blaslt.h"
#include "platform/stream.h"

namespace llamac {

std::string Gemm::name() const {
    return std::string(a_transposed ? "t" : "n") + (b_transposed ? "t" : "n") + " " + std::to_string(rows) +
           "x" + std::to_string(columns) + "x" + std::to_string(inner) + " " + llamac::name(in) + " " +
           llamac::name(out) + (adds ? " +c" : "");
}

#if defined(LLAMAC_BLASLT)
namespace {

constexpr int most_candidates = 32;
using Candidate = hipblasLtMatmulHeuristicResult_t;

void check_blas(hipblasStatus_t status, const char* what) {
    if (status != HIPBLAS_STATUS_SUCCESS) fail(blaslt_name, ": ", what, " failed with status ", int(status));
}

// The library is column-major: it computes transposed out = transposed b * transposed a, and our operands, read
// in its order, are transposed already.
struct Plan {
    hipblasLtMatmulDesc_t product = nullptr;
    hipblasLtMatrixLayout_t a = nullptr, b = nullptr, out = nullptr;  // as the library names them
    std::vector<Candidate> candidates;                                // its best guess first
    GemmChoices::Choice choice;
    hipblasLtMatmulAlgo_t chosen;
    enum { open, guessed, settled } decision = open;
};

struct Library {
    hipblasLtHandle_t handle = nullptr;
    std::map<hipStream_t, hipblasLtHandle_t> handles;  // of streams, where each wants its own
    std::map<std::string, Plan> plans;
    GemmChoices known;  // from files

    Library() {
        check_blas(hipblasLtCreate(&handle), "hipblasLtCreate");
        hipDeviceProp_t properties;
        CHECK(hipGetDeviceProperties(&properties, current_device()));
        known.device = properties.name;
        known.library = std::string(blaslt_name) + " " + std::to_string(blaslt_version(handle));
    }
    hipblasLtHandle_t handle_for(hipStream_t stream) {
        if (!handle_for_each_stream) return handle;
        hipblasLtHandle_t& own = handles[stream];
        if (!own) check_blas(hipblasLtCreate(&own), "hipblasLtCreate");
        return own;
    }
};
// The current device's. Whoever asks holds the lock: PyTorch's backward has a thread for each device.
std::mutex lock;
Library& library() {
    static std::map<int, Library> libraries;
    return libraries[current_device()];
}
thread_local bool tuning = false;

hipDataType library_type(DType type) {
    return type == DType::bf16 ? HIP_R_16BF : HIP_R_32F;
}

hipblasLtMatrixLayout_t make_layout(DType type, int64_t rows, int64_t columns) {
    hipblasLtMatrixLayout_t layout = nullptr;
    check_blas(hipblasLtMatrixLayoutCreate(&layout, library_type(type), static_cast<uint64_t>(rows),
                                           static_cast<uint64_t>(columns), rows),
               "hipblasLtMatrixLayoutCreate");
    return layout;
}

Plan make_plan(const Gemm& g) {
    Library& lib = library();
    Plan plan;
    check_blas(hipblasLtMatmulDescCreate(&plan.product, HIPBLAS_COMPUTE_32F, HIP_R_32F),
               "hipblasLtMatmulDescCreate");
    const int32_t first = g.b_transposed ? HIPBLAS_OP_T : HIPBLAS_OP_N,
                  second = g.a_transposed ? HIPBLAS_OP_T : HIPBLAS_OP_N;
    check_blas(
        hipblasLtMatmulDescSetAttribute(plan.product, HIPBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first),
        "hipblasLtMatmulDescSetAttribute");
    check_blas(
        hipblasLtMatmulDescSetAttribute(plan.product, HIPBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second),
        "hipblasLtMatmulDescSetAttribute");
    plan.a = g.b_transposed ? make_layout(g.in, g.inner, g.columns) : make_layout(g.in, g.columns, g.inner);
    plan.b = g.a_transposed ? make_layout(g.in, g.rows, g.inner) : make_layout(g.in, g.inner, g.rows);
    plan.out = make_layout(g.out, g.columns, g.rows);

    hipblasLtMatmulPreference_t preference = nullptr;
    check_blas(hipblasLtMatmulPreferenceCreate(&preference), "hipblasLtMatmulPreferenceCreate");
    const uint64_t workspace = gemm_workspace_bytes;
    check_blas(hipblasLtMatmulPreferenceSetAttribute(preference, HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                     &workspace, sizeof workspace),
               "hipblasLtMatmulPreferenceSetAttribute");
    promise_alignment(preference, gemm_alignment);
    plan.candidates.resize(most_candidates);
    int found = 0;
    const hipblasStatus_t status =
        hipblasLtMatmulAlgoGetHeuristic(lib.handle, plan.product, plan.a, plan.b, plan.out, plan.out,
                                        preference, most_candidates, plan.candidates.data(), &found);
    static_cast<void>(hipblasLtMatmulPreferenceDestroy(preference));
    plan.candidates.resize(status == HIPBLAS_STATUS_SUCCESS ? static_cast<size_t>(found) : 0);
    const auto unfit = [](const Candidate& c) {
        return c.state != HIPBLAS_STATUS_SUCCESS || c.workspaceSize > size_t{gemm_workspace_bytes};
    };
    plan.candidates.erase(std::remove_if(plan.candidates.begin(), plan.candidates.end(), unfit),
                          plan.candidates.end());
    return plan;
}

Plan& plan_of(const Gemm& gemm) {
    auto& plans = library().plans;
    const std::string name = gemm.name();
    const auto found = plans.find(name);
    return found != plans.end() ? found->second : plans.emplace(name, make_plan(gemm)).first->second;
}

// An algorithm is the library's own to read; written down, it is valid for the same version.
std::string text_of(const hipblasLtMatmulAlgo_t& algorithm) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&algorithm);
    std::string text;
    for (size_t i = 0; i < sizeof algorithm; i++) {
        char two[3];
        std::snprintf(two, sizeof two, "%02x", bytes[i]);
        text += two;
    }
    return text;
}
// Whether the text is an algorithm that the library takes for the product.
bool read_algorithm(const Plan& plan, const std::string& text, hipblasLtMatmulAlgo_t* algorithm) {
    auto* bytes = reinterpret_cast<unsigned char*>(algorithm);
    if (text.size() != 2 * sizeof *algorithm || text.find_first_not_of("0123456789abcdef") != text.npos)
        return false;
    for (size_t i = 0; i < sizeof *algorithm; i++)
        bytes[i] = static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
    size_t workspace = 0;
    return takes_algorithm(library().handle, plan.product, plan.a, plan.b, plan.out, plan.candidates,
                           *algorithm, &workspace) &&
           workspace <= size_t{gemm_workspace_bytes};
}

struct Operands {
    void* out;
    const void *a, *b, *c;
    void* workspace;
    hipStream_t stream;
};

bool compute(const Gemm& g, const Plan& plan, const hipblasLtMatmulAlgo_t& algorithm, const Operands& o) {
    const float one = 1, beta = g.adds ? 1.0f : 0.0f;
    return hipblasLtMatmul(library().handle_for(o.stream), plan.product, &one, o.b, plan.a, o.a, plan.b,
                           &beta, g.adds ? o.c : o.out, plan.out, o.out, plan.out, &algorithm, o.workspace,
                           size_t{gemm_workspace_bytes}, o.stream) == HIPBLAS_STATUS_SUCCESS;
}

// Milliseconds of a call, the mean of `calls` after as many; infinity where the algorithm cannot.
double time_of(const Gemm& g, const Plan& plan, const hipblasLtMatmulAlgo_t& algorithm, const Operands& o,
               int calls) {
    const Event begin, end;
    if (!compute(g, plan, algorithm, o)) return INFINITY;
    for (int i = 1; i < calls; i++) compute(g, plan, algorithm, o);
    begin.record(o.stream);
    for (int i = 0; i < calls; i++) compute(g, plan, algorithm, o);
    end.record(o.stream);
    end.wait();
    return end.ms_since(begin) / calls;
}

double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

// Times the candidates in turns, each for so long that it finds the clock that it keeps: in a step the card is at its
// power limit, where the clock follows what a product draws. Medians of turns in changing order: a cool card is fast
// for 50 ms, and a card at its limit is slow for a tenth of a second every now and then.
void tune(const Gemm& g, Plan& plan, const Operands& o) {
    constexpr double stretch_ms = 25, near = 1.05;
    constexpr int most_calls = 200, rounds = 5, rounds_of_all = 2;
    const size_t count = plan.candidates.size();
    std::vector<std::vector<double>> ms(count);
    std::vector<double> least(count, INFINITY);
    for (int round = 0; round < rounds; round++) {
        const double limit =
            round < rounds_of_all ? INFINITY : near * *std::min_element(least.begin(), least.end());
        for (size_t i = 0; i < count; i++) {
            const size_t k = round % 2 ? count - 1 - i : i;
            const auto& algorithm = plan.candidates[k].algo;
            if (round == 0) least[k] = time_of(g, plan, algorithm, o, 1);
            if (least[k] > limit || least[k] == INFINITY) continue;
            const int calls = std::clamp(static_cast<int>(stretch_ms / least[k]), 1, most_calls);
            ms[k].push_back(time_of(g, plan, algorithm, o, calls));
            least[k] = round == 0 ? ms[k][0] : std::min(least[k], ms[k].back());
        }
    }
    const auto time = [&](size_t k) { return ms[k].size() == rounds ? median(ms[k]) : INFINITY; };
    size_t best = 0;
    for (size_t k = 1; k < count; k++)
        if (time(k) < time(best)) best = k;
    plan.chosen = plan.candidates[best].algo;
    plan.choice = {text_of(plan.chosen), time(best), static_cast<int>(count)};
}

// tune, with what stands in `out` kept where the product adds to it. Without memory for that, the library's guess
// stays.
void tune_in_place(const Gemm& g, Plan& plan, const Operands& o) {
    if (!g.adds || o.c != o.out) return tune(g, plan, o);
    DeviceMemory kept;
    try {
        kept = DeviceMemory(g.rows * g.columns * size_of(g.out));
    } catch (const Error&) {
        return;
    }
    const size_t bytes = static_cast<size_t>(kept.bytes);
    CHECK(hipMemcpyAsync(kept.data, o.out, bytes, hipMemcpyDefault, o.stream));
    tune(g, plan, o);
    CHECK(hipMemcpyAsync(o.out, kept.data, bytes, hipMemcpyDefault, o.stream));
    CHECK(hipStreamSynchronize(o.stream));
}

void decide(const Gemm& g, Plan& plan, const Operands& o) {
    if (plan.decision == Plan::open) {
        const auto kept = library().known.choices.find(g.name());
        if (kept != library().known.choices.end()) {
            if (read_algorithm(plan, kept->second.algorithm, &plan.chosen)) {
                plan.choice = kept->second;
                plan.decision = Plan::settled;
                return;
            }
            std::fprintf(stderr, "llamac: matrix product %s: %s does not take the algorithm that was kept\n",
                         g.name().c_str(), library().known.library.c_str());
        }
        plan.chosen = plan.candidates[0].algo;
        plan.choice = {text_of(plan.chosen), 0, 0};
        plan.decision = Plan::guessed;
    }
    if (!tuning) return;
    plan.decision = Plan::settled;
    if (plan.candidates.size() > 1) tune_in_place(g, plan, o);
}

}  // namespace

bool gemm_supports(const Gemm& gemm) {
    const std::lock_guard<std::mutex> held(lock);
    return !plan_of(gemm).candidates.empty();
}

void run_gemm(const Gemm& gemm, void* out, const void* a, const void* b, const void* c, void* workspace,
              hipStream_t stream) {
    const std::lock_guard<std::mutex> held(lock);
    Plan& plan = plan_of(gemm);
    const Operands operands{out, a, b, c, workspace, stream};
    if (plan.decision != Plan::settled) decide(gemm, plan, operands);
    if (!compute(gemm, plan, plan.chosen, operands)) fail(library().known.library, " refused ", gemm.name());
}

GemmTuning::GemmTuning(bool on) : before(tuning) {
    tuning = on;
}
GemmTuning::~GemmTuning() {
    tuning = before;
}

GemmChoices gemm_choices() {
    const std::lock_guard<std::mutex> held(lock);
    GemmChoices used{library().known.device, library().known.library, {}};
    for (const auto& [name, plan] : library().plans)
        if (plan.decision == Plan::settled) used.choices[name] = plan.choice;
    return used;
}

std::string use_gemm_choices(const GemmChoices& choices) {
    const std::lock_guard<std::mutex> held(lock);
    const GemmChoices& own = library().known;
    if (choices.choices.empty()) return "";
    if (choices.device != own.device || choices.library != own.library)
        return "of " + choices.device + " with " + choices.library + ", not of " + own.device + " with " +
               own.library;
    for (const auto& [name, choice] : choices.choices) library().known.choices[name] = choice;
    return "";
}

#else

bool gemm_supports(const Gemm&) {
    return false;
}
void run_gemm(const Gemm& gemm, void*, const void*, const void*, const void*, void*, hipStream_t) {
    fail(gemm.name(), ": this build has no vendor's library");
}
GemmTuning::GemmTuning(bool) : before(false) {}
GemmTuning::~GemmTuning() = default;
GemmChoices gemm_choices() {
    return {};
}
std::string use_gemm_choices(const GemmChoices&) {
    return "";
}

#endif

}  // namespace llamac
