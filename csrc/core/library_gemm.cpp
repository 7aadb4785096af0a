#include "core/library_gemm.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <optional>
#include <string_view>

#include "core/clock.h"
#include "core/device_memory.h"
#include "core/product_check.h"
#include "platform/blaslt.h"
#include "platform/stream.h"

namespace llamac {

std::string Gemm::name() const {
    const auto other = [](DType type, DType than) {
        return type == than ? std::string() : std::string("/") + llamac::name(type);
    };
    const auto scale = [](const char* operand, GemmScale s) {
        constexpr const char* texts[] = {"", "*1", "*row"};
        return s == GemmScale::none ? std::string() : std::string(operand) + texts[static_cast<int>(s)];
    };
    return std::string(a_transposed ? "t" : "n") + (b_transposed ? "t" : "n") + " " + std::to_string(rows) +
           "x" + std::to_string(columns) + "x" + std::to_string(inner) + " " + llamac::name(a) + other(b, a) +
           " " + llamac::name(out) + (adds ? " +c" + other(c, out) : "") + scale(" a", a_scale) +
           scale(" b", b_scale) + (fast_accumulation ? " fast" : "") + (has_bias ? " +bias" : "");
}

const char* without_gemm_library() {
#if defined(LLAMAC_LACKS)
    return "no " LLAMAC_LACKS ": matrix products are llamac's own, at about half of its speed";
#else
    return "";
#endif
}

#if defined(LLAMAC_BLASLT)
namespace {

using Candidate = hipblasLtMatmulHeuristicResult_t;

void check_blas(hipblasStatus_t status, std::string_view call) {
    if (status != HIPBLAS_STATUS_SUCCESS)
        fail(blaslt_name, ": ", call.substr(0, call.find('(')), " failed with status ", int(status));
}
#define CHECK_BLAS(call) check_blas(call, #call)

// The library is column-major: it computes transposed out = transposed b * transposed a, and our operands, read
// in its order, are transposed already.
struct Plan {
    hipblasLtMatmulDesc_t product = nullptr;
    hipblasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr,
                            out = nullptr;  // as the library names them
    std::vector<Candidate> candidates;      // its best guess first
};

// The library objects of the process on a device; they do not depend on the first caller.
struct Library {
    std::mutex lock;  // for all that follows, and while a product is timed: PyTorch's backward has threads
    hipblasLtHandle_t handle = nullptr;
    // Handles per stream, if each needs its own, and a spare one for a stream whose first product is captured.
    std::map<hipStream_t, hipblasLtHandle_t> handles;
    hipblasLtHandle_t spare = nullptr;
    std::map<Gemm, Plan> plans;
    std::string device = device_name(), version;

    explicit Library(hipStream_t stream) : handle(make_handle(stream)) {
        version = std::string(blaslt_name) + " " + std::to_string(blaslt_version(handle));
    }
    static hipblasLtHandle_t make_handle(hipStream_t stream) {
        if (handle_owns_memory && is_capturing(stream))
            fail(blaslt_name,
                 ": the first matrix products of a device and a stream take memory, which is not possible "
                 "while "
                 "a graph is recorded; compute one before the capture");
        hipblasLtHandle_t made = nullptr;
        CHECK_BLAS(hipblasLtCreate(&made));
        return made;
    }
    hipblasLtHandle_t handle_for(hipStream_t stream) {
        if (!handle_owns_memory) return handle;
        hipblasLtHandle_t& own = handles[stream];
        if (!own) own = spare ? std::exchange(spare, nullptr) : make_handle(stream);
        if (!spare && !is_capturing(stream)) spare = make_handle(stream);
        return own;
    }
};
// The current device's; the stream is that of its first product, if it is made.
Library& library(hipStream_t stream = nullptr) {
    static std::mutex lock;
    static std::map<int, Library> libraries;
    const std::lock_guard<std::mutex> held(lock);
    const int device = current_device();
    const auto found = libraries.find(device);
    return found != libraries.end() ? found->second : libraries.try_emplace(device, stream).first->second;
}

}  // namespace

// Not in the unnamed namespace: g++ 16 warns of members whose types are.
struct GemmAlgorithms::State {
    struct Decision {
        GemmChoices::Choice choice;
        std::optional<hipblasLtMatmulAlgo_t> chosen;  // empty: our own kernel
        // kept: as a file has it, until all ranks have said that they take it.
        enum { open, guessed, kept, settled } state = open;
    };
    std::map<Gemm, Decision> decisions;
    std::map<std::string, GemmChoices::Choice> known;   // from files
    std::map<std::string, GemmChoices::Choice> common;  // of replace()
};

namespace {

using Decision = GemmAlgorithms::State::Decision;

static_assert(info(DType::f32).library == HIP_R_32F && info(DType::bf16).library == HIP_R_16BF);
hipblasLtMatrixLayout_t make_layout(DType type, int64_t rows, int64_t columns) {
    hipblasLtMatrixLayout_t layout = nullptr;
    CHECK_BLAS(hipblasLtMatrixLayoutCreate(&layout, static_cast<hipDataType>(info(type).library),
                                           static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                                           rows));
    return layout;
}

template <class T>
bool set(const Plan& plan, hipblasLtMatmulDescAttributes_t attribute, const T& value) {
    return hipblasLtMatmulDescSetAttribute(plan.product, attribute, static_cast<const void*>(&value),
                                           sizeof value) == HIPBLAS_STATUS_SUCCESS;
}

// The product's description; false where the library is too old for its scales or its bias.
bool describe(Plan& plan, const Gemm& g) {
    CHECK_BLAS(hipblasLtMatmulDescCreate(&plan.product, HIPBLAS_COMPUTE_32F, HIP_R_32F));
    const int32_t first = g.b_transposed ? HIPBLAS_OP_T : HIPBLAS_OP_N,
                  second = g.a_transposed ? HIPBLAS_OP_T : HIPBLAS_OP_N;
    bool taken = set(plan, HIPBLASLT_MATMUL_DESC_TRANSA, first);
    taken &= set(plan, HIPBLASLT_MATMUL_DESC_TRANSB, second);
    if (g.b_scale == GemmScale::row) taken &= set(plan, first_scale_mode, scale_by_row);
    if (g.a_scale == GemmScale::row) taken &= set(plan, second_scale_mode, scale_by_row);
    if (g.fast_accumulation) taken &= set_fast_accumulation(plan.product);
    if (g.has_bias) {
        taken &= set(plan, HIPBLASLT_MATMUL_DESC_EPILOGUE, int32_t{HIPBLASLT_EPILOGUE_BIAS});
        taken &= set(plan, HIPBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t{info(g.out).library});
    }
    plan.a = g.b_transposed ? make_layout(g.b, g.inner, g.columns) : make_layout(g.b, g.columns, g.inner);
    plan.b = g.a_transposed ? make_layout(g.a, g.rows, g.inner) : make_layout(g.a, g.inner, g.rows);
    plan.c = make_layout(g.c, g.columns, g.rows);
    plan.out = make_layout(g.out, g.columns, g.rows);
    return taken;
}

// The addresses that are part of the description.
bool set_addresses(const Plan& plan, const Gemm& g, const GemmOperands& o) {
    return (g.b_scale == GemmScale::none || set(plan, HIPBLASLT_MATMUL_DESC_A_SCALE_POINTER, o.b_scale)) &&
           (g.a_scale == GemmScale::none || set(plan, HIPBLASLT_MATMUL_DESC_B_SCALE_POINTER, o.a_scale)) &&
           (!g.has_bias || set(plan, HIPBLASLT_MATMUL_DESC_BIAS_POINTER, o.bias));
}

Plan make_plan(Library& lib, const Gemm& g) {
    Plan plan;
    // cuBLASLt offers nothing for scales per row before it knows their addresses; it does not read them here.
    alignas(gemm_alignment) static const float any = 1;
    if (!describe(plan, g) ||
        !set_addresses(
            plan, g,
            {.out = nullptr, .a = nullptr, .b = nullptr, .a_scale = &any, .b_scale = &any, .bias = &any}))
        return plan;

    hipblasLtMatmulPreference_t preference = nullptr;
    CHECK_BLAS(hipblasLtMatmulPreferenceCreate(&preference));
    const uint64_t workspace = gemm_workspace_bytes;
    CHECK_BLAS(hipblasLtMatmulPreferenceSetAttribute(preference, HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                     &workspace, sizeof workspace));
    promise_alignment(preference, gemm_alignment);
    plan.candidates.resize(max_candidates);
    int found = 0;
    const hipblasStatus_t status =
        hipblasLtMatmulAlgoGetHeuristic(lib.handle, plan.product, plan.a, plan.b, plan.c, plan.out,
                                        preference, max_candidates, plan.candidates.data(), &found);
    static_cast<void>(hipblasLtMatmulPreferenceDestroy(preference));
    plan.candidates.resize(status == HIPBLAS_STATUS_SUCCESS ? static_cast<size_t>(found) : 0);
    const auto unfit = [](const Candidate& c) {
        return c.state != HIPBLAS_STATUS_SUCCESS || c.workspaceSize > size_t{gemm_workspace_bytes};
    };
    plan.candidates.erase(std::remove_if(plan.candidates.begin(), plan.candidates.end(), unfit),
                          plan.candidates.end());
    return plan;
}

const Plan& plan_of(Library& lib, const Gemm& gemm) {
    const auto found = lib.plans.find(gemm);
    return found != lib.plans.end() ? found->second
                                    : lib.plans.emplace(gemm, make_plan(lib, gemm)).first->second;
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
// Whether the text is our own kernel, or an algorithm that the library takes for the product.
bool read_algorithm(Library& lib, const Plan& plan, const std::string& text,
                    std::optional<hipblasLtMatmulAlgo_t>* chosen) {
    if (text == own_kernel) {
        chosen->reset();
        return true;
    }
    hipblasLtMatmulAlgo_t algorithm;
    auto* bytes = reinterpret_cast<unsigned char*>(&algorithm);
    if (text.size() != 2 * sizeof algorithm || text.find_first_not_of("0123456789abcdef") != text.npos)
        return false;
    for (size_t i = 0; i < sizeof algorithm; i++)
        bytes[i] = static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
    size_t workspace = 0;
    if (!takes_algorithm(lib.handle, plan.product, plan.a, plan.b, plan.c, plan.out, plan.candidates,
                         algorithm, &workspace) ||
        workspace > size_t{gemm_workspace_bytes})
        return false;
    *chosen = algorithm;
    return true;
}

struct Operands : GemmOperands {
    void* workspace;
    hipStream_t stream;
    hipblasLtHandle_t handle;
};

hipblasStatus_t compute(const Gemm& g, const Plan& plan, const hipblasLtMatmulAlgo_t& algorithm,
                        const Operands& o) {
    const float one = 1, beta = g.adds ? 1.0f : 0.0f;
    if (!set_addresses(plan, g, o)) return HIPBLAS_STATUS_NOT_SUPPORTED;
    return hipblasLtMatmul(o.handle, plan.product, &one, o.b, plan.a, o.a, plan.b, &beta,
                           g.adds ? o.c : o.out, plan.c, o.out, plan.out, &algorithm, o.workspace,
                           size_t{gemm_workspace_bytes}, o.stream);
}

// Milliseconds of a call, the mean of `calls` after as many; infinity where the algorithm cannot.
double time_of(const Gemm& g, const Plan& plan, const hipblasLtMatmulAlgo_t& algorithm, const Operands& o,
               int calls) {
    const Event begin, end;
    if (compute(g, plan, algorithm, o) != HIPBLAS_STATUS_SUCCESS) return INFINITY;
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

struct Timed {
    size_t candidate;
    double ms;  // 0: there is no other one to compare with
};

// Times the candidates in rounds of changing order, each long enough to reach its steady clock: in a training step the card is
// at its power limit, and its clock depends on the product. Medians, because a cool card is fast for 50 ms, and a card at its
// limit is slow for a tenth of a second now and then. Returns those that compute, candidates of all rounds first, by time.
std::vector<Timed> tune(const Gemm& g, const Plan& plan, const Operands& o) {
    constexpr double stretch_ms = 25, near = 1.05;
    constexpr int max_calls = 200, rounds = 5, rounds_of_all = 2;
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
            const int calls = std::clamp(static_cast<int>(stretch_ms / least[k]), 1, max_calls);
            ms[k].push_back(time_of(g, plan, algorithm, o, calls));
            least[k] = round == 0 ? ms[k][0] : std::min(least[k], ms[k].back());
        }
    }
    std::vector<Timed> order;
    for (size_t k = 0; k < count; k++)
        if (!ms[k].empty()) order.push_back({k, median(ms[k])});
    std::stable_sort(order.begin(), order.end(), [&](const Timed& x, const Timed& y) {
        const size_t x_rounds = ms[x.candidate].size(), y_rounds = ms[y.candidate].size();
        return x_rounds != y_rounds ? x_rounds > y_rounds : x.ms < y.ms;
    });
    return order;
}

// A copy of `out` if the product adds to it.
struct KeptOutput {
    explicit KeptOutput(const Gemm& g, const Operands& operands) : o(operands) {
        if (!g.adds || o.c != o.out) return;
        kept = DeviceMemory(g.rows * g.columns * size_of(g.out));
        copy(kept.data, o.out);
    }
    void restore() const {
        if (kept.data) copy(o.out, kept.data);
    }

  private:
    const Operands& o;
    DeviceMemory kept;

    void copy(void* to, const void* from) const {
        CHECK(hipMemcpyAsync(to, from, static_cast<size_t>(kept.bytes), hipMemcpyDefault, o.stream));
        CHECK(hipStreamSynchronize(o.stream));
    }
};

template <class T = char>
std::vector<T> from_device(const void* data, int64_t bytes, hipStream_t stream) {
    std::vector<T> values(static_cast<size_t>(bytes) / sizeof(T));
    CHECK(hipStreamSynchronize(stream));
    copy_bytes(values.data(), data, bytes);
    return values;
}

// The product as our own kernels compute it, for the comparison. `out` is as it was.
ProductCheck compute_own(const Gemm& g, const Operands& o, OwnGemm own, const KeptOutput& before) {
    const auto values = [&](const void* data, DType type, int64_t count) {
        return from_device(data, count * size_of(type), o.stream);
    };
    const auto scales = [&](const float* data, GemmScale scale, int64_t count) {
        if (scale == GemmScale::none) return std::vector<float>();
        return from_device<float>(data, (scale == GemmScale::row ? count : 1) * int64_t{sizeof(float)},
                                  o.stream);
    };
    ProductValues v;
    v.a = values(o.a, g.a, g.rows * g.inner), v.b = values(o.b, g.b, g.inner * g.columns);
    if (g.adds) v.c = values(o.c, g.c, g.rows * g.columns);
    if (g.has_bias) v.bias = values(o.bias, g.out, g.columns);
    v.a_scale = scales(o.a_scale, g.a_scale, g.rows), v.b_scale = scales(o.b_scale, g.b_scale, g.columns);
    own(g, o, o.stream);
    v.own = values(o.out, g.out, g.rows * g.columns);
    before.restore();
    return ProductCheck(g, std::move(v));
}

// The fastest candidate whose result is right, or our own kernel if none is. Without memory for a copy of `out`, the library's
// guess stays.
void choose(const Library& lib, const Gemm& g, const Plan& plan, Decision& decision, const Operands& o,
            OwnGemm own) {
    std::optional<KeptOutput> before;
    try {
        before.emplace(g, o);
    } catch (const Error&) {
        return;
    }
    const size_t count = plan.candidates.size();
    const std::vector<Timed> order = count > 1 ? tune(g, plan, o) : std::vector<Timed>{{0, 0}};
    before->restore();
    const ProductCheck check = compute_own(g, o, own, *before);
    for (const Timed& timed : order) {
        const hipblasLtMatmulAlgo_t& algorithm = plan.candidates[timed.candidate].algo;
        const bool computes = compute(g, plan, algorithm, o) == HIPBLAS_STATUS_SUCCESS;
        const std::string wrong =
            computes ? check.difference(from_device(o.out, g.rows * g.columns * size_of(g.out), o.stream))
                     : "it is refused";
        before->restore();
        if (wrong.empty()) {
            decision.chosen = algorithm;
            decision.choice = {text_of(algorithm), timed.ms, count > 1 ? static_cast<int>(count) : 0};
            return;
        }
        std::fprintf(stderr, "llamac: matrix product %s: algorithm %zu of %zu of %s is left out: %s\n",
                     g.name().c_str(), timed.candidate + 1, count, lib.version.c_str(), wrong.c_str());
    }
    std::fprintf(
        stderr,
        "llamac: matrix product %s: no algorithm of %s has the result of our own kernel, which computes "
        "the product instead, at about half of the library's speed; --tune off takes the library's "
        "first algorithm without this comparison\n",
        g.name().c_str(), lib.version.c_str());
    decision.chosen.reset();
    decision.choice = {own_kernel, 0, 0};  // not for the cache: the next run looks for an algorithm again
}

// Without a timing: the choice in a file, or the library's guess.
void decide_untimed(Library& lib, const Gemm& g, const Plan& plan, const GemmAlgorithms& algorithms,
                    Decision& decision) {
    const auto kept = algorithms.state->known.find(g.name());
    if (kept != algorithms.state->known.end()) {
        if (read_algorithm(lib, plan, kept->second.algorithm, &decision.chosen)) {
            decision.choice = kept->second;
            decision.state = algorithms.gather ? Decision::kept : Decision::settled;
            return;
        }
        std::fprintf(stderr, "llamac: matrix product %s: %s does not take the algorithm that was kept\n",
                     g.name().c_str(), lib.version.c_str());
    }
    decision.chosen = plan.candidates[0].algo;
    decision.choice = {text_of(*decision.chosen), 0, 0};
    decision.state = Decision::guessed;
}

// Another rank's choice.
void take(Library& lib, const Gemm& g, const Plan& plan, const GemmChoices::Choice& choice,
          Decision& decision) {
    if (!read_algorithm(lib, plan, choice.algorithm, &decision.chosen))
        fail("matrix product ", g.name(),
             ": expected the algorithm that another rank has chosen, which this device's ", lib.version,
             " does not take; --tune off needs none");
    decision.choice = choice;
}

void decide(Library& lib, const Gemm& g, const Plan& plan, const GemmAlgorithms& algorithms,
            Decision& decision, const Operands& o, OwnGemm own) {
    if (decision.state == Decision::open) decide_untimed(lib, g, plan, algorithms, decision);
    if (decision.state == Decision::settled || !algorithms.tuning) return;
    if (algorithms.gather) {
        const std::vector<std::string> kept =
            algorithms.gather(decision.state == Decision::kept ? "kept" : "");
        if (std::find(kept.begin(), kept.end(), "") == kept.end()) {
            decision.state = Decision::settled;
            return;
        }
    }
    decision.state = Decision::settled;
    choose(lib, g, plan, decision, o, own);
    if (!algorithms.gather) return;
    const std::vector<std::string> all = algorithms.gather(decision.choice.algorithm);
    const bool own_somewhere = std::find(all.begin(), all.end(), own_kernel) != all.end();
    const std::string common = own_somewhere ? own_kernel : all[0];
    if (common == decision.choice.algorithm) return;
    take(lib, g, plan, {common, 0, 0}, decision);
}

}  // namespace

bool gemm_supports(const Gemm& gemm, hipStream_t stream) {
    Library& lib = library(stream);
    const std::lock_guard<std::mutex> held(lib.lock);
    return !plan_of(lib, gemm).candidates.empty();
}

void run_gemm(const Gemm& gemm, const GemmOperands& given, OwnGemm own, void* workspace,
              GemmAlgorithms* algorithms, hipStream_t stream) {
    Library& lib = library(stream);
    const std::lock_guard<std::mutex> held(lib.lock);
    const Plan& plan = plan_of(lib, gemm);
    const Operands operands{given, workspace, stream, lib.handle_for(stream)};
    std::optional<hipblasLtMatmulAlgo_t> algorithm = plan.candidates[0].algo;
    if (algorithms) {
        Decision& decision = algorithms->state->decisions[gemm];
        if (decision.state != Decision::settled) {
            const Clock::time_point begin = Clock::now();
            decide(lib, gemm, plan, *algorithms, decision, operands, own);
            if (algorithms->tuning) algorithms->tuning_seconds += seconds_since(begin);
        }
        algorithm = decision.chosen;
    }
    if (!algorithm) return own(gemm, given, stream);
    const hipblasStatus_t status = compute(gemm, plan, *algorithm, operands);
    if (status != HIPBLAS_STATUS_SUCCESS)
        fail(lib.version, " refused ", gemm.name(), " with status ", static_cast<int>(status));
}

GemmAlgorithms::GemmAlgorithms() : state(std::make_unique<State>()) {}
GemmAlgorithms::~GemmAlgorithms() = default;

GemmChoices GemmAlgorithms::choices() const {
    Library& lib = library();
    const std::lock_guard<std::mutex> held(lib.lock);
    GemmChoices used{lib.device, lib.version, state->common};
    for (const auto& [gemm, decision] : state->decisions)
        if (decision.state == Decision::settled || decision.state == Decision::kept)
            used.choices[gemm.name()] = decision.choice;
    return used;
}

std::string GemmAlgorithms::use(const GemmChoices& choices) {
    Library& lib = library();
    const std::lock_guard<std::mutex> held(lib.lock);
    if (choices.choices.empty()) return "";
    if (choices.device != lib.device || choices.library != lib.version)
        return "of " + choices.device + " with " + choices.library + ", not of " + lib.device + " with " +
               lib.version;
    for (const auto& [name, choice] : choices.choices) state->known[name] = choice;
    return "";
}

std::string GemmAlgorithms::replace(const GemmChoices& choices) {
    if (std::string why = use(choices); !why.empty()) return why;
    Library& lib = library();
    const std::lock_guard<std::mutex> held(lib.lock);
    state->common = choices.choices;
    for (auto& [gemm, decision] : state->decisions) {
        const auto found = choices.choices.find(gemm.name());
        if (found == choices.choices.end() || found->second.algorithm == decision.choice.algorithm) continue;
        take(lib, gemm, plan_of(lib, gemm), found->second, decision);
        decision.state = Decision::settled;
    }
    return "";
}

GemmChoices GemmAlgorithms::given() const {
    Library& lib = library();
    const std::lock_guard<std::mutex> held(lib.lock);
    return {lib.device, lib.version, state->known};
}

void GemmAlgorithms::forget() {
    const std::lock_guard<std::mutex> held(library().lock);
    state->known.clear();
}

#else

struct GemmAlgorithms::State {};

bool gemm_supports(const Gemm&, hipStream_t) {
    return false;
}
void run_gemm(const Gemm& gemm, const GemmOperands&, OwnGemm, void*, GemmAlgorithms*, hipStream_t) {
    fail(gemm.name(), ": this build has no vendor's library");
}
GemmAlgorithms::GemmAlgorithms() = default;
GemmAlgorithms::~GemmAlgorithms() = default;
GemmChoices GemmAlgorithms::choices() const {
    return {};
}
std::string GemmAlgorithms::use(const GemmChoices&) {
    return "";
}
std::string GemmAlgorithms::replace(const GemmChoices&) {
    return "";
}
GemmChoices GemmAlgorithms::given() const {
    return {};
}
void GemmAlgorithms::forget() {}

#endif

}  // namespace llamac
