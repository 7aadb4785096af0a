// Every operation of the registry, every variant of it, every combination of types, on odd shapes, against the operation's
// own reference in f64 on the same values. What is called comes from the descriptions; only sizes by dimension letter and
// scalars by name stand here.
//
// A case: operands between guard bytes (in the gaps of strided ones too), outputs full of NaN, those that are updated or
// accumulated full of noise. Afterwards: outputs within the bound, guards and inputs as they were, the same bits in a
// second run and with another number of threads, and in place where that is allowed.
//
// The bound. An error may be 2 ulp of the largest output (design: the floor of the rule against PyTorch), or what
// rounding can do to this input: the f64 reference is run again with every input moved by one rounding error u of the
// arithmetic (2^-24; 2^-53 for f64), up or down at random. How far the outputs move is the problem's own sensitivity, and
// no algorithm in that arithmetic can be blamed for as much. A sum of n terms adds a factor sqrt(n) with probability near
// one (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019); n is at most the largest
// dimension. The constant in front is 4: the handful of roundings that an element goes through before and after its sum.
// Operations without FLOPs copy: exact. Everything is compared so that NaN fails.
//
// Stochastic rounding (bf16 in an operation with a seed): within one ulp of the element, and unbiased (below).
//
// --fault NAME puts a wrong variant in the place of all others: the checks have to see it in every operation to which it
// applies; then the program ends with 1, as with any failure.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/random.h"
#include "core/registry.h"

using namespace llamac;

namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// Shapes: a case takes one value a letter. NH is a multiple of NKV, so its values are heads a group where both occur.
struct Sizes {
    const char* letter;
    std::vector<int64_t> values;
};
const std::vector<Sizes> size_rules = {
    {"B", {1, 2, 3}},        {"T", {1, 2, 17, 63, 65}},      {"NH", {1, 3, 4}},      {"NKV", {1, 2}},
    {"HD", {2, 8, 64, 66}},  {"N", {1, 7, 32, 65, 101}},     {"C", {1, 63, 64, 65, 131, 1031}},
    {"V", {1, 2, 63, 257, 1031}}, {"P", {1, 3, 64, 1025, 16389}},
};
const std::vector<int64_t> other_sizes = {1, 31, 63, 64, 65, 131};
constexpr int shapes_an_entry = 12;

struct Values {
    const char* scalar;
    std::vector<double> values;
};
const std::vector<Values> scalar_rules = {
    {"eps", {1e-5, 1e-6}},      {"theta", {10000, 500000}},     {"factor", {1, 8, 32}},  {"low_freq_factor", {1}},
    {"high_freq_factor", {4}},  {"original_context", {64, 8192}}, {"scale", {0.125, 0.3}}, {"dloss", {0.25, 1}},
    {"ignore_index", {-100, 0}}, {"beta1", {0.9}},              {"beta2", {0.95, 0.999}}, {"weight_decay", {0.1, 0}},
    {"grad_clip", {1, 0}},      {"seed", {42, 1e12}},           {"stream", {4}},
};

// Outputs that may lie in an input's memory: the descriptions have no mark for it.
struct Alias {
    const char *operation, *output, *input;
};
const std::vector<Alias> aliases = {
    {"rope_forward", "out", "x"},          {"rope_backward", "dx", "dout"},
    {"swiglu_backward", "dgate_up", "gate_up"}, {"cross_entropy", "dlogits", "logits"},
    {"rmsnorm_backward", "dx", "dresidual"},    {"rmsnorm_backward", "dx", "dout"},
    {"residual_rmsnorm_forward", "sum", "x"},   {"residual_rmsnorm_forward", "sum", "residual"},
    {"matmul_forward", "out", "residual"},
};

int64_t offset_of(const Tensor& t, int64_t element) {
    int64_t offset = 0;
    for (int d = t.rank - 1; d >= 0; element /= t.shape[d--]) offset += element % t.shape[d] * t.stride[d];
    return offset;
}
uint8_t* address(const Tensor& t, int64_t element) {
    return static_cast<uint8_t*>(t.data) + offset_of(t, element) * size_of(t.dtype);
}
double load(DType dtype, const uint8_t* p) {
    switch (dtype) {
    case DType::f32: return *reinterpret_cast<const float*>(p);
    case DType::bf16: return *reinterpret_cast<const bf16*>(p);
    case DType::f64: return *reinterpret_cast<const double*>(p);
    case DType::i32: return *reinterpret_cast<const int32_t*>(p);
    }
    return nan;
}
void store(DType dtype, uint8_t* p, double value) {
    switch (dtype) {
    case DType::f32: *reinterpret_cast<float*>(p) = static_cast<float>(value); break;
    case DType::bf16: *reinterpret_cast<bf16*>(p) = bf16(static_cast<float>(value)); break;
    case DType::f64: *reinterpret_cast<double*>(p) = value; break;
    case DType::i32: *reinterpret_cast<int32_t*>(p) = static_cast<int32_t>(value); break;
    }
}
double get(const Tensor& t, int64_t element) { return load(t.dtype, address(t, element)); }
void set(const Tensor& t, int64_t element, double value) { store(t.dtype, address(t, element), value); }

// row(first element, address, elements): the stretches that are contiguous whatever the strides.
template <class Row>
void for_each_row(const Tensor& t, Row row) {
    const int64_t length = t.shape[t.rank - 1];
    for (int64_t i = 0; i < t.elements(); i += length) row(i, address(t, i), length);
}
std::vector<double> read(const Tensor& t) {
    std::vector<double> values(t.elements());
    for_each_row(t, [&](int64_t i, const uint8_t* p, int64_t n) {
        for (int64_t k = 0; k < n; k++) values[i + k] = load(t.dtype, p + k * size_of(t.dtype));
    });
    return values;
}
int digits(DType t) { return t == DType::f64 ? 52 : t == DType::f32 ? 23 : 7; }
double ulp(double x, DType t) { return x == 0 ? 0 : std::ldexp(1.0, std::ilogb(x) - digits(t)); }

void set_threads([[maybe_unused]] int n) {
#ifdef _OPENMP
    omp_set_num_threads(n);
#endif
}
int max_threads() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

struct Case {
    const Operation* op;
    const Entry* entry;
    int number;
    bool strided;  // also: which memory order, how much padding
    std::vector<int64_t> size;
    std::vector<Scalar> scalars;
    std::vector<bool> absent;                 // by operand
    std::vector<std::vector<double>> values;  // by operand, exactly as its type holds them; NaN: not read

    bool flag(const char* name) const {
        for (size_t i = 0; i < op->scalars.size(); i++)
            if (op->scalars[i].name == name) return scalars[i].integer != 0;
        return false;
    }
    bool reads(const Operand& o) const { return !o.output || o.in_place || (o.accumulated && flag("accumulate")); }
};

Tensor shape_of(const Case& c, size_t operand, DType dtype) {
    const Operand& o = c.op->operands[operand];
    Tensor t;
    t.dtype = dtype;
    t.rank = static_cast<int>(o.shape.size());
    for (int d = 0; d < t.rank; d++) {
        const Dimension& dim = o.shape[d];
        t.shape[d] = dim.factor * (dim.symbol < 0 ? 1 : c.size[dim.symbol]) / dim.divisor;
    }
    int64_t stride = 1;
    for (int d = t.rank - 1; d >= 0; stride *= t.shape[d--]) t.stride[d] = stride;
    return t;
}

// The memory of one operand: guard, elements, guard; strides leave gaps that are guarded too.
struct Memory {
    static constexpr int64_t guard = 128;
    static constexpr uint8_t guard_byte = 0xA5;
    std::vector<uint8_t> bytes, before;
    Tensor tensor;

    // shift: starts one element past a 64-byte border.
    void place(const Tensor& shape, const std::vector<double>& values, bool shift) {
        tensor = shape;
        int64_t elements = 1;
        for (int d = 0; d < tensor.rank; d++) elements += (tensor.shape[d] - 1) * tensor.stride[d];
        bytes.assign(static_cast<size_t>(elements * size_of(tensor.dtype) + 3 * guard), guard_byte);
        const uintptr_t begin = reinterpret_cast<uintptr_t>(bytes.data()), start = (begin + guard + 63) / 64 * 64;
        tensor.data = bytes.data() + (start - begin) + (shift ? size_of(tensor.dtype) : 0);
        for_each_row(tensor, [&](int64_t i, uint8_t* p, int64_t n) {
            for (int64_t k = 0; k < n; k++) store(tensor.dtype, p + k * size_of(tensor.dtype), values[i + k]);
        });
        before = bytes;
    }
    std::vector<uint8_t> elements() const {
        std::vector<uint8_t> packed;
        for_each_row(tensor, [&](int64_t, const uint8_t* p, int64_t n) {
            packed.insert(packed.end(), p, p + n * size_of(tensor.dtype));
        });
        return packed;
    }
    // Whether nothing but the elements, where they may, has changed.
    bool intact(bool elements_may_change) const {
        if (!elements_may_change) return bytes == before;
        std::vector<uint8_t> restored = bytes;
        for_each_row(tensor, [&](int64_t, const uint8_t* p, int64_t n) {
            const int64_t at = p - bytes.data();
            std::copy_n(before.data() + at, n * size_of(tensor.dtype), restored.data() + at);
        });
        return restored == before;
    }
};

// Any memory order of all but the last dimension, with gaps.
void spread(Tensor& t, int number) {
    int order[Tensor::max_rank] = {0, 1, 2, 3};
    std::rotate(order, order + number % (t.rank - 1), order + t.rank - 1);
    int64_t stride = t.shape[t.rank - 1] + 3;
    for (int k = t.rank - 2; k >= 0; k--) {
        t.stride[order[k]] = stride;
        stride = stride * t.shape[order[k]] + 5 * (number % 2);
    }
}

std::vector<double> initial_values(const Case& c, size_t operand) {
    const Operand& o = c.op->operands[operand];
    const DType dtype = c.entry->operands[operand].dtype;
    const Tensor shape = shape_of(c, operand, dtype);
    std::vector<double> values(shape.elements(), nan);
    const uint32_t step = static_cast<uint32_t>(c.number), stream = static_cast<uint32_t>(operand);
    for (size_t i = 0; c.reads(o) && i < values.size(); i++) {
        const int64_t e = static_cast<int64_t>(i);
        const uint32_t word = random_block(1, step, stream, e / 4).word[e % 4];
        if (o.bound >= 0) values[i] = word % c.size[o.bound];
        else if (dtype == DType::i32) values[i] = 1 + word % 9;
        else if (o.positive) values[i] = bf16(static_cast<float>(0.5 + uniform(word)));
        // A grid on which the sum of two is a bf16 too, so that an operation that rounds one to storage before it goes on
        // (residual_rmsnorm_forward) still has the f64 reference's values.
        else if (dtype == DType::bf16) values[i] = (word % 127 - 63.0) / 32;
        else values[i] = random_normal(1, step, stream, e);
    }
    return values;
}

using Outputs = std::vector<std::vector<double>>;

// The reference in f64 on these values; outputs that are absent stay empty.
Outputs oracle(const Case& c, const std::vector<std::vector<double>>& values) {
    std::vector<Memory> memory(values.size());
    std::vector<Tensor> tensors(values.size());
    for (size_t i = 0; i < values.size(); i++) {
        const Operand& o = c.op->operands[i];
        if (c.absent[i]) continue;
        memory[i].place(shape_of(c, i, o.type ? DType::f64 : o.dtype), values[i], false);
        tensors[i] = memory[i].tensor;
    }
    run(*c.op, tensors, c.scalars, {}, "reference");
    Outputs outputs;
    for (int i = 0; i < c.op->outputs; i++) outputs.push_back(c.absent[i] ? std::vector<double>() : read(tensors[i]));
    return outputs;
}

size_t position(const std::vector<std::string>& names, const std::string& name) {
    return static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
}
size_t operand_called(const Operation& op, const std::string& name) {
    const auto is = [&](const Operand& o) { return o.name == name; };
    return static_cast<size_t>(std::find_if(op.operands.begin(), op.operands.end(), is) - op.operands.begin());
}
std::vector<double> rounded(std::vector<double> values, DType dtype) {
    for (double& x : values) {
        alignas(8) uint8_t bytes[8];
        store(dtype, bytes, x);
        x = load(dtype, bytes);
    }
    return values;
}

Scalar scalar_for(const std::string& name, int number) {
    for (const Values& rule : scalar_rules)
        if (name == rule.scalar) return rule.values[static_cast<size_t>(number) % rule.values.size()];
    return 1;
}

int64_t pick(const std::vector<int64_t>& values, int number, size_t salt) {
    const size_t n = values.size(), i = static_cast<size_t>(number);
    // Every value occurs; later cases mix the letters otherwise.
    return values[(i + salt * (1 + i / n)) % n];
}

Case make_case(const Operation& op, const Entry& entry, int number, bool strided, unsigned flags, unsigned nulls) {
    Case c{&op, &entry, number, strided, {}, {}, {}, {}};
    for (size_t d = 0; d < op.dimensions.size(); d++) {
        const auto rule = std::find_if(size_rules.begin(), size_rules.end(),
                                       [&](const Sizes& s) { return op.dimensions[d] == s.letter; });
        c.size.push_back(pick(rule == size_rules.end() ? other_sizes : rule->values, number, d));
    }
    const size_t heads = position(op.dimensions, "NH"), groups = position(op.dimensions, "NKV");
    if (heads < c.size.size() && groups < c.size.size()) c.size[heads] *= c.size[groups];
    for (const ScalarInfo& s : op.scalars) {
        c.scalars.push_back(s.kind == 'b' ? Scalar((flags & 1) != 0) : scalar_for(s.name, number));
        if (s.kind == 'b') flags >>= 1;
    }
    for (const Operand& o : op.operands) {
        c.absent.push_back(o.nullable && (nulls & 1));
        if (o.nullable) nulls >>= 1;
    }
    for (size_t i = 0; i < op.operands.size(); i++) c.values.push_back(initial_values(c, i));
    return c;
}

// The forward operation of X_backward, where all that it reads is there; else null.
const Operation* forward_of(const Operation& backward) {
    const size_t suffix = backward.name.rfind("_backward");
    const std::string wanted = backward.name.substr(0, suffix) + "_forward";
    for (const Operation* op : operations()) {
        if (op->name != wanted || suffix == std::string::npos) continue;
        const auto has = [&](const Operand& o) {
            return o.output || o.nullable || operand_called(backward, o.name) < backward.operands.size();
        };
        return std::all_of(op->operands.begin(), op->operands.end(), has) ? op : nullptr;
    }
    return nullptr;
}

// X_backward's inputs that are called as an output of X_forward is (attention's lse, rmsnorm's rstd) hold what that gives:
// a variant may rely on it.
void take_from_forward(Case& c) {
    const Operation* op = forward_of(*c.op);
    if (!op) return;
    Case f{op, nullptr, c.number, false, {}, {}, {}, {}};
    for (const std::string& letter : op->dimensions) f.size.push_back(c.size[position(c.op->dimensions, letter)]);
    for (const ScalarInfo& s : op->scalars) f.scalars.push_back(scalar_for(s.name, c.number));
    for (size_t i = 0; i < op->operands.size(); i++) {
        const Operand& o = op->operands[i];
        const size_t from = operand_called(*c.op, o.name);
        f.absent.push_back(o.nullable);
        if (o.output) f.values.push_back(std::vector<double>(shape_of(f, i, DType::f64).elements(), nan));
        else f.values.push_back(o.nullable ? std::vector<double>() : c.values[from]);
    }
    const Outputs outputs = oracle(f, f.values);
    for (size_t i = 0; i < outputs.size(); i++) {
        const size_t to = operand_called(*c.op, op->operands[i].name);
        if (to < c.values.size() && !c.op->operands[to].output) c.values[to] = rounded(outputs[i], c.entry->operands[to].dtype);
    }
}

std::string describe(const Case& c, const Variant& v) {
    std::string text = c.op->name + " " + v.name + " (";
    for (size_t i = 0; i < c.absent.size(); i++)
        text += (i ? " " : "") + std::string(c.absent[i] ? "-" : name(c.entry->operands[i].dtype));
    text += ")";
    for (size_t d = 0; d < c.size.size(); d++) text += " " + c.op->dimensions[d] + "=" + std::to_string(c.size[d]);
    for (size_t i = 0; i < c.scalars.size(); i++)
        if (c.op->scalars[i].kind == 'b') text += " " + c.op->scalars[i].name + "=" + std::to_string(c.scalars[i].integer);
    return text + (c.strided ? " strided" : "");
}

struct Size {
    double l2 = 0, largest = 0;
};
struct Bound {
    Size arithmetic, total;  // by rounding in the arithmetic; with the floor of 2 ulp of the storage
};
Size distance(const std::vector<double>& a, const std::vector<double>& b) {
    Size s;
    for (size_t i = 0; i < a.size(); i++) {
        const double d = std::fabs(a[i] - b[i]);
        s.l2 += d * d;
        if (!(d <= s.largest)) s.largest = d;  // NaN stays
    }
    s.l2 = std::sqrt(s.l2);
    return s;
}

// How far rounding may take each output: see the top of the file.
std::vector<Bound> bounds(const Case& c, const Outputs& truth) {
    std::vector<Bound> bound(truth.size());
    if (!c.op->flops) return bound;
    const auto is_wide = [](const Slot& s) { return s.dtype == DType::f64; };
    const bool wide = std::any_of(c.entry->operands.begin(), c.entry->operands.end(), is_wide);
    const double u = wide ? 0x1p-53 : 0x1p-24;
    const double factor = 4 * std::sqrt(static_cast<double>(*std::max_element(c.size.begin(), c.size.end())));
    for (uint32_t trial = 0; trial < 2; trial++) {
        auto moved = c.values;
        for (size_t i = 0; i < moved.size(); i++)
            for (size_t e = 0; c.entry->operands[i].dtype != DType::i32 && e < moved[i].size(); e++) {
                const uint32_t word = random_block(2, trial, static_cast<uint32_t>(i), static_cast<int64_t>(e / 128)).word[e / 32 % 4];
                moved[i][e] *= 1 + (word >> e % 32 & 1 ? u : -u);
            }
        const Outputs outputs = oracle(c, moved);
        for (size_t i = 0; i < truth.size(); i++) {
            const Size d = distance(outputs[i], truth[i]);
            Size& largest = bound[i].arithmetic;
            largest = {std::max(largest.l2, factor * d.l2), std::max(largest.largest, factor * d.largest)};
        }
    }
    for (size_t i = 0; i < truth.size(); i++) {
        const DType dtype = c.entry->operands[i].dtype;
        const Size norm = distance(truth[i], std::vector<double>(truth[i].size(), 0)), &a = bound[i].arithmetic;
        bound[i].total = {std::max(a.l2, 2 * std::ldexp(norm.l2, -digits(dtype))),
                          std::max(a.largest, 2 * ulp(norm.largest, dtype))};
    }
    return bound;
}

// Whether output i is rounded stochastically. Beside a master copy (A), the storage (T) is the master's nearest.
bool is_stochastic(const Case& c, size_t i) {
    const auto seeded = [](const ScalarInfo& s) { return s.name == "seed"; };
    if (c.entry->operands[i].dtype != DType::bf16 || !c.op->operands[i].in_place) return false;
    if (std::none_of(c.op->scalars.begin(), c.op->scalars.end(), seeded)) return false;
    for (int k = 0; k < c.op->outputs; k++)
        if (c.op->operands[i].type == 'T' && c.op->operands[k].type == 'A' && !c.absent[k]) return false;
    return true;
}

// f: how far the truth lies above the lower neighbour, in ulp. The error, 1 - f with probability f and else -f, has mean 0
// and variance f (1 - f) for every f: neither its sum nor its sum with the sign of f - 1/2 (which sees rounding to
// nearest) may be more than five standard deviations from 0. slack: the error of the arithmetic before the rounding.
std::string check_stochastic(const std::vector<double>& found, const std::vector<double>& truth, double slack) {
    double sum = 0, toward_nearest = 0, variance = 0;
    for (size_t i = 0; i < truth.size(); i++) {
        const double unit = ulp(truth[i], DType::bf16), error = found[i] - truth[i];
        if (!(std::fabs(error) <= unit + slack)) return "element " + std::to_string(i) + " is more than an ulp away";
        if (unit < 64 * slack) continue;  // the arithmetic's error blurs f
        const double f = truth[i] / unit - std::floor(truth[i] / unit);
        sum += error / unit;
        toward_nearest += f < 0.5 ? -error / unit : error / unit;
        variance += f * (1 - f);
    }
    if (variance < 10) return "";  // too few elements to tell
    const double deviations = std::max(std::fabs(sum), std::fabs(toward_nearest)) / std::sqrt(variance);
    return deviations <= 5 ? "" : "rounding is biased by " + std::to_string(deviations) + " standard deviations";
}

struct Run {
    std::vector<std::vector<uint8_t>> bits;  // by output
    Outputs values;
    std::string wrong;  // what was written that should not be
};
Run run_variant(const Case& c, const Variant& v, int threads, const Alias* alias = nullptr) {
    std::vector<Memory> memory(c.values.size());
    std::vector<Tensor> tensors(c.values.size());
    for (size_t i = 0; i < c.values.size(); i++) {
        if (c.absent[i]) continue;
        Tensor shape = shape_of(c, i, c.entry->operands[i].dtype);
        if (c.strided && c.op->operands[i].strided) spread(shape, c.number + static_cast<int>(i));
        memory[i].place(shape, c.values[i], c.number % 2 == 1);
        tensors[i] = memory[i].tensor;
    }
    size_t output = tensors.size(), input = tensors.size();
    for (size_t i = 0; alias && i < tensors.size(); i++) {
        if (c.op->operands[i].name == alias->output) output = i;
        if (c.op->operands[i].name == alias->input) input = i;
    }
    if (alias) tensors[output] = tensors[input];
    set_threads(threads);
    run(*c.op, tensors, c.scalars, {v.where, nullptr}, v.name);
    Run r;
    for (size_t i = 0; i < tensors.size(); i++) {
        const bool is_output = static_cast<int>(i) < c.op->outputs;
        const Memory& m = memory[i == output ? input : i];
        if (is_output) r.bits.push_back(c.absent[i] ? std::vector<uint8_t>() : m.elements());
        if (is_output) r.values.push_back(c.absent[i] ? std::vector<double>() : read(m.tensor));
        if (!c.absent[i] && !memory[i].intact(is_output || i == input))
            r.wrong = c.op->operands[i].name + (is_output ? ": written outside of it" : ": an input was changed");
    }
    return r;
}

std::string number(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g", x);
    return text;
}

// Empty, or what is wrong. tightest: the largest share of a bound that an error takes.
std::string check_case(const Case& c, const Variant& v, double& tightest) {
    const Outputs truth = oracle(c, c.values);
    const std::vector<Bound> bound = bounds(c, truth);
    const Run first = run_variant(c, v, 2);
    if (!first.wrong.empty()) return first.wrong;
    for (size_t i = 0; i < truth.size(); i++) {
        const std::string& output = c.op->operands[i].name;
        if (is_stochastic(c, i)) {
            const std::string wrong = check_stochastic(first.values[i], truth[i], bound[i].arithmetic.largest);
            if (!wrong.empty()) return output + ": " + wrong;
            continue;
        }
        const Size error = distance(first.values[i], truth[i]), &allowed = bound[i].total;
        if (!(error.l2 <= allowed.l2)) return output + ": L2 error " + number(error.l2) + ", allowed " + number(allowed.l2);
        if (!(error.largest <= allowed.largest))
            return output + ": largest error " + number(error.largest) + ", allowed " + number(allowed.largest);
        if (allowed.largest > 0) tightest = std::max(tightest, error.largest / allowed.largest);
    }
    if (run_variant(c, v, 2).bits != first.bits) return "a second run gives other bits";
    if (run_variant(c, v, 1).bits != first.bits) return "the bits depend on the number of threads";
    for (const Alias& a : aliases) {
        bool whole = c.op->name == a.operation;
        for (size_t i = 0; i < c.absent.size(); i++)
            whole &= !c.absent[i] || (c.op->operands[i].name != a.output && c.op->operands[i].name != a.input);
        if (whole && run_variant(c, v, 2, &a).bits != first.bits)
            return std::string(a.output) + " in " + a.input + "'s memory gives other bits";
    }
    return "";
}

// Deliberate faults. Each runs the reference and spoils the call or the result; true: it has made a difference.
using Launch = void (*)(const Call&);

void flip(const Tensor& t, int64_t element) { *address(t, element) ^= 1; }

bool swapped_index(const Call& c, Launch launch) {
    launch(c);
    const Tensor& t = c.tensor[0];
    if (!t.data || t.elements() < 2) return false;
    const double a = get(t, 0), b = get(t, 1);
    set(t, 0, b);
    set(t, 1, a);
    return std::fabs(a - b) > 0.1 * std::max(std::fabs(a), std::fabs(b));
}
bool missing_accumulate(const Call& c, Launch launch) {
    std::vector<Scalar> scalars(c.scalar, c.scalar + c.op->scalars.size());
    bool changed = false;
    for (size_t i = 0; i < scalars.size(); i++)
        if (c.op->scalars[i].name == "accumulate" && scalars[i].integer) scalars[i] = Scalar(false), changed = true;
    launch({c.op, c.tensor, scalars.data(), c.size, c.stream});
    return changed;
}
bool dropped_tail(const Call& c, Launch launch) {
    const Tensor& t = c.tensor[0];
    const int64_t last = t.elements() - 1;
    const double before = get(t, last);
    launch(c);
    const bool changed = get(t, last) != before;
    set(t, last, before);
    return changed;
}
bool overrun(const Call& c, Launch launch) {
    launch(c);
    const Tensor& t = c.tensor[0];
    uint8_t* last = address(t, t.elements() - 1);
    std::copy_n(last, size_of(t.dtype), last + size_of(t.dtype));
    return true;
}
bool nan_left(const Call& c, Launch launch) {
    launch(c);
    const Tensor& t = c.tensor[0];
    set(t, t.elements() / 2, nan);
    return true;
}
bool changed_input(const Call& c, Launch launch) {
    launch(c);
    if (static_cast<size_t>(c.op->outputs) == c.op->operands.size()) return false;
    flip(c.tensor[c.op->outputs], 0);
    return true;
}
bool ignored_strides(const Call& c, Launch launch) {
    std::vector<Tensor> tensors(c.tensor, c.tensor + c.op->operands.size());
    bool changed = false;
    for (Tensor& t : tensors) {
        changed |= t.data && !t.contiguous();
        int64_t stride = 1;
        for (int d = t.rank - 1; d >= 0; stride *= t.shape[d--]) t.stride[d] = stride;
    }
    launch({c.op, tensors.data(), c.scalar, c.size, c.stream});
    return changed;
}
// Results of the next smaller type: f32 in f64's place, bf16 in f32's.
bool low_precision(const Call& c, Launch launch) {
    launch(c);
    bool changed = false;
    for (int i = 0; i < c.op->outputs; i++) {
        const Tensor& t = c.tensor[i];
        for (int64_t e = 0; t.data && e < t.elements(); e++) {
            const double x = get(t, e), y = t.dtype == DType::f64 ? float(x) : t.dtype == DType::f32 ? float(bf16(float(x))) : x;
            changed |= std::fabs(x - y) > 4 * ulp(x, t.dtype);
            set(t, e, y);
        }
    }
    return changed;
}
bool unrepeatable(const Call& c, Launch launch) {
    static int calls = 0;
    launch(c);
    if (calls++ % 2) flip(c.tensor[0], 0);
    return true;
}
bool depends_on_threads(const Call& c, Launch launch) {
    launch(c);
    if (max_threads() > 1) flip(c.tensor[0], 0);
    return true;
}
const Entry* reference_for(const Operation& op, const std::vector<Tensor>& tensors) {
    for (const Variant& v : op.variants)
        for (const Entry& e : v.entries) {
            bool fits = std::strcmp(v.name, "reference") == 0;
            for (size_t i = 0; i < tensors.size(); i++) fits &= !tensors[i].data || tensors[i].dtype == e.operands[i].dtype;
            if (fits) return &e;
        }
    return nullptr;
}
// The same in f32, then rounded to nearest where storage is bf16.
bool nearest_rounding(const Call& c, Launch launch) {
    const bool seeded = std::any_of(c.op->scalars.begin(), c.op->scalars.end(), [](const ScalarInfo& s) { return s.name == "seed"; });
    std::vector<Tensor> wide(c.tensor, c.tensor + c.op->operands.size());
    std::vector<Memory> memory(wide.size());
    bool changed = false;
    for (size_t i = 0; i < wide.size(); i++)
        if (wide[i].data && wide[i].dtype == DType::bf16) {
            const std::vector<double> values = read(wide[i]);
            wide[i].dtype = DType::f32;
            memory[i].place(wide[i], values, false);
            wide[i] = memory[i].tensor;
            changed = true;
        }
    const Entry* entry = reference_for(*c.op, wide);
    if (!seeded || !changed || !entry) return launch(c), false;
    entry->launch({c.op, wide.data(), c.scalar, c.size, c.stream});
    for (int i = 0; i < c.op->outputs; i++)
        for (int64_t e = 0; c.tensor[i].data && e < wide[i].elements(); e++) set(c.tensor[i], e, get(wide[i], e));
    return wide[0].elements() > 1000;
}

struct Fault {
    const char* name;
    bool (*run)(const Call&, Launch);
};
const std::vector<Fault> faults = {
    {"swapped-index", swapped_index},     {"missing-accumulate", missing_accumulate}, {"dropped-tail", dropped_tail},
    {"overrun", overrun},                 {"nan-left", nan_left},                     {"changed-input", changed_input},
    {"ignored-strides", ignored_strides}, {"low-precision", low_precision},           {"unrepeatable", unrepeatable},
    {"thread-dependent", depends_on_threads}, {"nearest-rounding", nearest_rounding},
};
const Fault* planted = nullptr;
bool planted_matters = false;  // whether the fault has made a difference since this was reset

void launch_fault(const Call& c) {
    const std::vector<Tensor> tensors(c.tensor, c.tensor + c.op->operands.size());
    planted_matters |= planted->run(c, reference_for(*c.op, tensors)->launch);
}
// A variant "fault" of every operation, for all types of the reference.
void plant() {
    for (const Operation* op : operations()) {
        Operation& o = find_operation(op->name);
        for (const Variant& v : std::vector<Variant>(o.variants)) {
            if (std::strcmp(v.name, "reference") != 0) continue;
            Variant fault{"fault", planted->name, Where::host, v.entries, v.supports};
            for (Entry& e : fault.entries) e.launch = launch_fault;
            o.variants.push_back(fault);
        }
    }
}

struct Tally {
    int passed = 0, failed = 0, reported = 0;
    bool verbose = false;
};

bool supported(const Case& c, const Variant& v) {
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < c.absent.size(); i++)
        tensors.push_back(c.absent[i] ? Tensor{} : shape_of(c, i, c.entry->operands[i].dtype));
    return !v.supports || v.supports({c.op, tensors.data(), c.scalars.data(), c.size.data(), nullptr});
}

// All cases of one variant with one combination of types.
void check_entry(const Operation& op, const Variant& v, const Entry& entry, Tally& tally) {
    const auto count = [](const auto& items, auto is) { return std::count_if(items.begin(), items.end(), is); };
    const unsigned flags = 1u << count(op.scalars, [](const ScalarInfo& s) { return s.kind == 'b'; });
    const unsigned nulls = 1u << count(op.operands, [](const Operand& o) { return o.nullable; });
    const int layouts = count(op.operands, [](const Operand& o) { return o.strided; }) ? 2 : 1;
    int ran = 0, seen = 0, mattered = 0;
    double tightest = 0;
    const auto report = [&](const std::string& what) {
        if (tally.reported++ < 40) std::printf("FAILED %s\n", what.c_str());
    };
    for (int number = 0; number < shapes_an_entry; number++)
        for (unsigned k = 0; k < flags * nulls * layouts; k++) {
            Case c = make_case(op, entry, number, k / (flags * nulls), k % flags, k / flags % nulls);
            if (!supported(c, v)) continue;
            take_from_forward(c);
            ran++;
            planted_matters = false;
            std::string wrong;
            try {
                wrong = check_case(c, v, tightest);
            } catch (const Error& e) {
                wrong = e.what();
            }
            mattered += planted_matters;
            seen += planted_matters && !wrong.empty();
            tally.passed += wrong.empty();
            tally.failed += !wrong.empty();
            if (!wrong.empty() && !planted) report(describe(c, v) + ": " + wrong);
        }
    if (ran == 0) tally.failed++, report(op.name + " " + v.name + ": supports none of the cases");
    if (tally.verbose) std::printf("%s %s: %d cases, %.2f of the bound\n", op.name.c_str(), v.name, ran, tightest);
    if (planted && mattered) std::printf("%s %s: seen in %d of %d cases\n", op.name.c_str(), planted->name, seen, mattered);
    if (planted && mattered && !seen) tally.reported = -1;
}

[[noreturn]] void usage() {
    std::fprintf(stderr, "check_operations: expected [--operation NAME] [--verbose] [--fault NAME], NAME one of");
    for (const Fault& f : faults) std::fprintf(stderr, " %s", f.name);
    std::fprintf(stderr, "\n");
    std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
    Tally tally;
    const char* only = nullptr;
    for (int i = 1; i < argc; i++) {
        const std::string flag = argv[i];
        if (flag == "--verbose") tally.verbose = true;
        else if (flag == "--operation" && i + 1 < argc) only = argv[++i];
        else if (flag == "--fault" && i + 1 < argc) {
            const std::string name = argv[++i];
            for (const Fault& f : faults)
                if (name == f.name) planted = &f;
            if (!planted) usage();
        } else usage();
    }
    if (planted) plant();
    for (const Operation* op : operations())
        for (const Variant& v : op->variants)
            for (const Entry& e : v.entries)
                if ((!only || op->name == only) && !planted == (std::strcmp(v.name, "fault") != 0))
                    check_entry(*op, v, e, tally);
    std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
    return tally.failed != 0;
}
