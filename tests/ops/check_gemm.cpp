// Which of the vendor's algorithms computes a product (core/library_gemm.cpp), with a stand-in for hipBLASLt on the host:
// the fastest that is right, the same on all ranks, and no memory while a graph is recorded. test_communicator.py starts one
// of this program per rank.
#include <hipblaslt/hipblaslt.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "check.h"
#include "core/library_gemm.h"
#include "core/random.h"
#include "platform/ranks/transport.h"
#include "platform/stream.h"

namespace llamac {
namespace {

constexpr auto f32 = DType::f32, bf16_type = DType::bf16, e4 = DType::e4m3, e5 = DType::e5m2;
constexpr double no_number = NAN;

std::vector<char> stored(const std::vector<double>& values, DType type) {
    std::vector<char> bytes(values.size() * static_cast<size_t>(size_of(type)));
    convert(values.data(), DType::f64, bytes.data(), type, static_cast<int64_t>(values.size()));
    return bytes;
}
std::vector<double> values_of(const void* bytes, DType type, int64_t count) {
    std::vector<double> values(static_cast<size_t>(count));
    convert(bytes, type, values.data(), DType::f64, count);
    return values;
}

// What the product is, on what stands in `out` where c is out.
std::vector<double> truth_of(const Gemm& g, const GemmOperands& o) {
    const std::vector<double> a = values_of(o.a, g.a, g.rows * g.inner),
                              b = values_of(o.b, g.b, g.inner * g.columns);
    const std::vector<double> bias = g.has_bias ? values_of(o.bias, g.out, g.columns) : std::vector<double>();
    std::vector<double> out = o.c && g.adds ? values_of(o.c, g.c, g.rows * g.columns)
                                            : std::vector<double>(static_cast<size_t>(g.rows * g.columns));
    const auto scale = [](GemmScale kind, const float* scales, int64_t i) {
        return kind == GemmScale::none ? 1.0 : static_cast<double>(scales[kind == GemmScale::row ? i : 0]);
    };
    for (int64_t i = 0; i < g.rows; i++)
        for (int64_t j = 0; j < g.columns; j++) {
            double sum = 0;
            for (int64_t k = 0; k < g.inner; k++)
                sum += a[static_cast<size_t>(g.a_transposed ? k * g.rows + i : i * g.inner + k)] *
                       b[static_cast<size_t>(g.b_transposed ? j * g.inner + k : k * g.columns + j)];
            out[static_cast<size_t>(i * g.columns + j)] +=
                sum * scale(g.a_scale, o.a_scale, i) * scale(g.b_scale, o.b_scale, j) +
                (g.has_bias ? bias[static_cast<size_t>(j)] : 0);
        }
    return out;
}
void own_product(const Gemm& g, const GemmOperands& o, hipStream_t) {
    const std::vector<char> out = stored(truth_of(g, o), g.out);
    std::copy(out.begin(), out.end(), static_cast<char*>(o.out));
}

// A product with operands; in_place: it adds to what stands in `out`.
struct Product {
    Gemm g;
    std::vector<char> a, b, c, out, before, bias;
    std::vector<float> a_scale, b_scale;
    bool in_place;

    explicit Product(const Gemm& gemm, bool in_place_ = false) : g(gemm), in_place(in_place_) {
        auto random = [&, part = 0u](int64_t count, DType type) mutable {
            std::vector<double> values(static_cast<size_t>(count));
            for (size_t i = 0; i < values.size(); i++)
                values[i] = 2 * uniform(random_block(1, 0, part, static_cast<int64_t>(i)).bits[0]) - 1;
            part++;
            return stored(values, type);
        };
        a = random(g.rows * g.inner, g.a), b = random(g.inner * g.columns, g.b);
        c = random(g.rows * g.columns, g.c), before = out = random(g.rows * g.columns, g.out);
        bias = random(g.columns, g.out);
        for (int64_t i = 0; i < g.rows; i++) a_scale.push_back(std::ldexp(1.0f, static_cast<int>(i % 3) - 3));
        for (int64_t j = 0; j < g.columns; j++) b_scale.push_back(std::ldexp(1.0f, static_cast<int>(j % 2)));
    }
    GemmOperands operands() {
        return {out.data(),
                a.data(),
                b.data(),
                !g.adds    ? nullptr
                : in_place ? out.data()
                           : c.data(),
                a_scale.data(),
                b_scale.data(),
                g.has_bias ? bias.data() : nullptr};
    }
    void compute(GemmAlgorithms* algorithms, hipStream_t stream = nullptr) {
        out = before;
        run_gemm(g, operands(), own_product, nullptr, algorithms, stream);
    }
    bool is_right() {
        Product same = *this;
        same.out = before;
        const std::vector<double> truth =
            values_of(stored(truth_of(g, same.operands()), g.out).data(), g.out, count());
        return values_of(out.data(), g.out, count()) == truth;
    }
    int64_t count() const { return g.rows * g.columns; }
};

// Instead of an algorithm's index.
constexpr int none_chosen = -1, own_kernel = -2, any = -3;
int chosen(const GemmAlgorithms& algorithms, const Gemm& g) {
    const auto choices = algorithms.choices().choices;
    const auto found = choices.find(g.name());
    if (found == choices.end()) return none_chosen;
    const std::string& text = found->second.algorithm;
    return text == "own" ? own_kernel : std::stoi(text.substr(0, 2), nullptr, 16);
}
GemmChoices choice_of(const Gemm& g, int index) {
    GemmAlgorithms none;
    GemmChoices choices = none.given();
    char text[9];
    std::snprintf(text, sizeof text, "%02x000000", static_cast<unsigned>(index));
    choices.choices[g.name()] = {text, 1, 3};
    return choices;
}

// Each a product of its own: the stand-in offers what is there when it is first asked for one.
Gemm next_product(DType type = f32) {
    static int64_t rows = 20;
    return {rows++, 8, 16, false, true, type, type, type, type, false};
}

TEST(check_captures) {
    const auto stream = [](uintptr_t number) { return reinterpret_cast<hipStream_t>(number); };
    stand_in::algorithms = {{}};
    Product p(next_product());
    const auto in_capture = [&](uintptr_t number) {
        emulated_capture = true;
        const std::string message = error_of([&] {
            if (gemm_supports(p.g, stream(number))) p.compute(nullptr, stream(number));
        });
        emulated_capture = false;
        return message;
    };
    const std::string refusal = "compute one before the capture";
    check(in_capture(1).find(refusal) != std::string::npos && stand_in::handles == 0);
    p.compute(nullptr, stream(1));
    check(in_capture(1).empty() && in_capture(2).empty() && in_capture(2).empty() && p.is_right());
    check(in_capture(3).find(refusal) != std::string::npos, "no handle is left for a second one");
    p.compute(nullptr, stream(1));
    check(in_capture(3).empty(), "until products are computed again");
    check(stand_in::handles == 4, "handles: of the device and of three streams");
}

TEST(check_wrong_algorithms) {
    const auto row = GemmScale::row, one = GemmScale::tensor;
    const std::pair<Gemm, bool> products[] = {
        {{6, 8, 21, false, true, bf16_type, bf16_type, bf16_type, bf16_type, true, {}, {}, false, true},
         false},
        {{6, 8, 16, false, true, f32, f32, f32, f32, false}, false},
        {{6, 8, 17, false, true, bf16_type, bf16_type, bf16_type, bf16_type, true}, false},
        {{6, 8, 18, false, false, bf16_type, bf16_type, bf16_type, bf16_type, false}, false},
        {{6, 8, 19, true, false, bf16_type, bf16_type, f32, f32, true}, true},
        {{6, 8, 20, true, false, bf16_type, bf16_type, bf16_type, bf16_type, true}, true},
        {{6, 8, 16, false, true, e5, e4, bf16_type, bf16_type, true, one, one}, true},
        {{6, 8, 32, false, true, e4, e4, bf16_type, bf16_type, true, row, row, true}, false},
        {{6, 8, 48, false, true, e4, e4, f32, f32, false, row, row}, false}};
    const double factors[] = {no_number, 1.05, 0.0, -1.0};
    size_t number = 0;
    for (const auto& [g, in_place] : products) {
        const double factor = factors[number++ % std::size(factors)];
        stand_in::algorithms = {{factor, 0.02}, {1, 0.2}, {factor, 0.02}};
        Product p(g, in_place);
        GemmAlgorithms algorithms;
        const GemmTuning tuning(algorithms, true);
        p.compute(&algorithms);
        check(chosen(algorithms, g) == 1 && p.is_right(),
              g.name() + ": algorithms that are wrong by " + std::to_string(factor));
    }
    for (const size_t count : {1, 2}) {
        stand_in::algorithms.assign(count, {2});
        Product p({7, 8, static_cast<int64_t>(count), true, false, f32, f32, f32, f32, true}, true);
        GemmAlgorithms algorithms;
        const GemmTuning tuning(algorithms, true);
        p.compute(&algorithms);
        check(chosen(algorithms, p.g) == own_kernel && p.is_right(), "our own kernel, where all are wrong");
        check(algorithms.choices().choices[p.g.name()].tried == 0, "which the cache does not keep");
        GemmAlgorithms resumed;
        check(resumed.use(algorithms.choices()).empty(), "our own kernel is kept");
        stand_in::algorithms.assign(count, {1});
        p.compute(&resumed);
        check(chosen(resumed, p.g) == own_kernel && p.is_right(), "our own kernel computes after a resume");
    }
}

// A resumed run has to have the same bits, and a cache is of algorithms that were compared.
TEST(check_kept_algorithms) {
    stand_in::algorithms = {{1}, {no_number}};
    Product p(next_product());
    GemmAlgorithms algorithms;
    check(algorithms.use(choice_of(p.g, 1)).empty(), "a choice is taken");
    const GemmTuning tuning(algorithms, true);
    p.compute(&algorithms);
    check(chosen(algorithms, p.g) == 1 && !p.is_right(), "a kept choice stays");
    // Of 12, the 8 best guesses are looked at.
    stand_in::algorithms.assign(12, {1, 0.02});
    Product many(next_product());
    many.compute(&algorithms);
    check(algorithms.choices().choices[many.g.name()].tried == 8, "the first eight");
}

// Ranks whose files keep other choices choose alike, whatever they time.
TEST_OF_RANKS(check_ranks) {
    const Launch launch = find_launch();
    const std::unique_ptr<Transport> channel = connect(launch, "channel", 20);
    const int own = static_cast<int>(launch.rank);
    const auto run = [&](const char* what, const GemmChoices& kept, std::vector<Product> products,
                         std::vector<int> expected) {
        GemmAlgorithms algorithms;
        algorithms.use(kept);
        algorithms.gather = [&](const std::string& text) { return channel->gather("check", text); };
        const std::string line = take_first_ranks_choices(algorithms);
        check(line.empty(), std::string(what) + ": " + line);
        const std::string given = to_json(algorithms.given()).dump();
        check(given == channel->gather("check", given)[0], std::string(what) + ": not what rank 0 has");
        for (const bool tunes : {false, true, true}) {
            const GemmTuning tuning(algorithms, tunes);
            for (Product& p : products) p.compute(&algorithms);
        }
        for (size_t i = 0; i < products.size(); i++) {
            const int found = chosen(algorithms, products[i].g);
            for (const std::string& each : channel->gather("check", std::to_string(found)))
                check(each == std::to_string(found), std::string(what) + ": others choose " + each);
            check(expected[i] == any ? found >= 0 : found == expected[i], what);
            check(products[i].is_right(), what);
        }
    };
    const GemmChoices none = GemmAlgorithms().given();
    // This rank's fastest is its own number: without an agreement they would differ.
    stand_in::algorithms.assign(3, {1, 0.3});
    stand_in::algorithms[static_cast<size_t>(own)].ms = 0.02;
    const Gemm first = next_product(), second = next_product(), third = next_product(),
               fourth = next_product();
    run("rank 1 alone has kept a choice", own == 1 ? choice_of(first, 2) : none, {Product(first)}, {any});
    run("each has kept another product's", choice_of(own == 0 ? first : second, 2),
        {Product(first), Product(second)}, {2, any});
    stand_in::algorithms.assign(own == 0 ? 3 : 2, {1, 0.3});
    stand_in::algorithms[0].ms = 0.02;
    run("rank 1 refuses what rank 0 has kept", choice_of(third, 2), {Product(third)}, {any});
    stand_in::algorithms.assign(3, {own == 1 ? 2.0 : 1.0});
    run("all are wrong on rank 1", none, {Product(fourth)}, {own_kernel});
    GemmAlgorithms other;
    GemmChoices choices = choice_of(first, 1);
    other.use(choices);
    other.gather = [&](const std::string& text) {
        std::vector<std::string> all = channel->gather("check", text);
        if (text.starts_with("{"))
            all[0].replace(all[0].find("hipBLASLt 1"), 11, own == 0 ? "hipBLASLt 1" : "hipBLASLt 2");
        return all;
    };
    // Ranks that time other products, each by itself.
    stand_in::algorithms.assign(3, {1, 0.3});
    stand_in::algorithms[static_cast<size_t>(own)].ms = 0.02;
    GemmAlgorithms alone;
    const auto gather = [&](const std::string& text) { return channel->gather("check", text); };
    Product shared(next_product()), ours(next_product(own == 0 ? f32 : bf16_type));
    {
        const GemmTuning tuning(alone, true);
        shared.compute(&alone), ours.compute(&alone);
    }
    check(chosen(alone, shared.g) == own && chosen(alone, ours.g) == own, "each its fastest");
    check(take_common_choices(alone, gather).empty(), "they agree");
    check(chosen(alone, shared.g) == 0 && chosen(alone, ours.g) == own, "rank 0's choice");
    check(alone.choices().choices.size() == 3, "a checkpoint has the choices of all ranks");
    stand_in::algorithms[0] = {2};
    shared.compute(&alone);
    check(!shared.is_right(), "rank 0's choice computes");
    const std::string line = take_first_ranks_choices(other);
    check(line.find("rank 1: the matrix products' choices of rank 0 are of ") == 0 &&
              other.given().choices.empty(),
          "a rank with another library: " + line);
}

}  // namespace
}  // namespace llamac

int main(int argc, char** argv) {
    return llamac::run_checks(argc, argv);
}
