// A case of check_operations: sizes, scalars and values for one operation with one combination of types, its
// memory between guards, and the f64 reference's answer to it. Only sizes by dimension letter are listed here; an
// operation's description has further ones, and the values of its scalars.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/device_memory.h"
#include "core/dispatch.h"
#include "core/random.h"
#include "core/registry.h"

namespace llamac {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

// Shapes: a case takes one value per letter; of a letter that is a multiple of another, the factor.
struct Sizes {
    const char* letter;
    std::vector<int64_t> values;
};
inline const std::vector<Sizes> size_rules = {
    {"B", {1, 2, 3}},
    {"T", {1, 2, 17, 63, 65}},
    {"NH", {1, 3, 4}},
    {"NKV", {1, 2}},
    {"HD", {2, 8, 64, 66, 16}},
    {"S", {0, 0, 1, 46}},  // beside what it may not be less than
    {"N", {1, 7, 32, 65, 101}},
    {"C", {1, 63, 64, 65, 131, 1031, 1032}},
    {"V", {1, 2, 63, 257, 1031, 1032}},
    {"P", {1, 3, 64, 1025, 16389}},
};
inline const std::vector<int64_t> other_sizes = {1, 31, 63, 64, 65, 131, 136};
constexpr int shapes_an_entry = 12;

inline void set_threads([[maybe_unused]] int n) {
#ifdef _OPENMP
    omp_set_num_threads(n);
#endif
}
inline int max_threads() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

inline int64_t offset_of(const Tensor& t, int64_t element) {
    int64_t offset = 0;
    for (int d = t.rank - 1; d >= 0; element /= t.shape[d--]) offset += element % t.shape[d] * t.stride[d];
    return offset;
}
inline uint8_t* address(const Tensor& t, int64_t element) {
    return static_cast<uint8_t*>(t.data) + offset_of(t, element) * size_of(t.dtype);
}
inline double load(DType dtype, const uint8_t* p) {
    return visit_dtype(dtype, [&]<class T>() { return to_storage<double>(*reinterpret_cast<const T*>(p)); });
}
inline void store(DType dtype, uint8_t* p, double value) {
    visit_dtype(dtype, [&]<class T>() { *reinterpret_cast<T*>(p) = to_storage<T>(value); });
}
inline double get(const Tensor& t, int64_t element) {
    return load(t.dtype, address(t, element));
}
inline void set(const Tensor& t, int64_t element, double value) {
    store(t.dtype, address(t, element), value);
}

// row(first element, address, elements): the stretches that are contiguous whatever the strides.
template <class Row>
void for_each_row(const Tensor& t, Row row) {
    const int64_t length = t.stride[t.rank - 1] == 1 ? t.shape[t.rank - 1] : 1;
    for (int64_t i = 0; i < t.elements(); i += length) row(i, address(t, i), length);
}
inline std::vector<double> read(const Tensor& t) {
    std::vector<double> values(t.elements());
    visit_dtype(t.dtype, [&]<class T>() {
        for_each_row(t, [&](int64_t i, const uint8_t* p, int64_t n) {
            for (int64_t k = 0; k < n; k++)
                values[i + k] = to_storage<double>(reinterpret_cast<const T*>(p)[k]);
        });
    });
    return values;
}
// What an operand is precise to: its type, but that of the arithmetic where it is wider (a sum, say), and that of storage
// where it is marked as rounded. T: the storage type.
inline DType precision_of(const Operand& o, DType operand, DType T) {
    const DType computed = o.rounded ? T : info(T).arithmetic;
    return info(operand).mantissa_bits > info(computed).mantissa_bits ? computed : operand;
}

// The storage type of a call or an entry, by its operands' types.
template <class Typed>
DType storage_of(const Operation& op, const Typed& typed) {
    for (size_t i = 0; i < op.operands.size(); i++)
        if (op.operands[i].letter == 0 && !op.operands[i].nullable) return typed[i].dtype;
    return typed[0].dtype;
}

struct Case {
    const Operation* op;
    const Instantiation* entry;
    int number;
    bool strided;  // number also says which memory order, how much padding
    std::vector<int64_t> size;
    std::vector<Scalar> scalars;
    std::vector<bool> absent;   // by operand
    std::vector<bool> derived;  // by operand: an input that the forward pass has made of the others
    std::vector<std::vector<double>> values;  // by operand, exactly as its type holds them; NaN: not read
    int threads = 0;                          // a block; 0: by number

    bool adds(const Operand& o) const {
        return o.accumulated() && scalars[static_cast<size_t>(o.adds_if)].integer != 0;
    }
    bool reads(const Operand& o) const { return !o.output || o.in_place || adds(o); }
};

inline Tensor shape_of(const Case& c, size_t operand, DType dtype) {
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
    DeviceMemory device;

    // shift: starts one element past a 64-byte border.
    void place(const Tensor& shape, const std::vector<double>& values, bool shift) {
        tensor = shape;
        int64_t elements = 1;
        for (int d = 0; d < tensor.rank; d++) elements += (tensor.shape[d] - 1) * tensor.stride[d];
        bytes.assign(static_cast<size_t>(elements * size_of(tensor.dtype) + 3 * guard), guard_byte);
        const uintptr_t begin = reinterpret_cast<uintptr_t>(bytes.data()),
                        start = (begin + guard + 63) / 64 * 64;
        tensor.data = bytes.data() + (start - begin) + (shift ? size_of(tensor.dtype) : 0);
        visit_dtype(tensor.dtype, [&]<class T>() {
            for_each_row(tensor, [&](int64_t i, uint8_t* p, int64_t n) {
                for (int64_t k = 0; k < n; k++) reinterpret_cast<T*>(p)[k] = to_storage<T>(values[i + k]);
            });
        });
        before = bytes;
    }
    // The device's copy of all bytes, as far from a 64-byte border as the host's.
    uint8_t* device_bytes() const {
        const uintptr_t host = reinterpret_cast<uintptr_t>(bytes.data()) % 64,
                        border = (reinterpret_cast<uintptr_t>(device.data) + 63) / 64 * 64;
        return reinterpret_cast<uint8_t*>(border + host);
    }
    Tensor to_device() {
        const int64_t count = static_cast<int64_t>(bytes.size());
        device = DeviceMemory(count + 128);
        copy_bytes(device_bytes(), bytes.data(), count);
        Tensor t = tensor;
        t.data = device_bytes() + (static_cast<uint8_t*>(tensor.data) - bytes.data());
        return t;
    }
    void from_device() { copy_bytes(bytes.data(), device_bytes(), static_cast<int64_t>(bytes.size())); }
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

// Any memory order of all but the last dimension, with gaps: such that rows still start at 128-bit borders
// (as the heads of joined rows do in training), or not. A single dimension has gaps of its own: int64's halves.
inline void spread(Tensor& t, int number, bool aligned) {
    if (t.rank < 2) {
        t.stride[0] = aligned ? 2 : 3;
        return;
    }
    int order[Tensor::max_rank] = {0, 1, 2, 3};
    std::rotate(order, order + number % (t.rank - 1), order + t.rank - 1);
    int64_t stride = t.shape[t.rank - 1] + (aligned ? 16 : 3);
    for (int k = t.rank - 2; k >= 0; k--) {
        t.stride[order[k]] = stride;
        stride = stride * t.shape[order[k]] + (aligned ? 16 : 5) * (number % 2);
    }
}

// Of a row e of [B,T], given the one before: about as many documents as rows by eight, the most in short sequences.
inline double begins_of(const Case& c, const Operand& o, int64_t e, uint32_t random, double before) {
    const int64_t rows = c.size[o.shape[1].symbol], row = e % rows;
    const int64_t own = std::max<int64_t>(0, c.size[o.begins] - rows + row);
    const int64_t last = row ? static_cast<int64_t>(before) : 0;
    const bool begins_another = random % std::clamp<int64_t>(rows / 4, 2, 64) == 0;
    // Most begin with their own row; some see a few rows before it, as behind keys of a cache.
    return static_cast<double>(!begins_another   ? last
                               : random / 64 % 3 ? own
                                                 : last + random / 256 % (own - last + 1));
}

// The same for the ends of documents.
inline double ends_of(const Case& c, const Operand& o, int64_t e, uint32_t random, double before) {
    const int64_t rows = c.size[o.shape[1].symbol], row = e % rows, keys = c.size[o.ends];
    const int64_t own = std::max<int64_t>(0, keys - rows + row),
                  last = row ? static_cast<int64_t>(before) : 0;
    const int64_t least = std::max(last, own + 1);
    const bool ends_another = last <= own || random % std::clamp<int64_t>(rows / 4, 2, 64) == 0;
    return static_cast<double>(ends_another ? least + random / 64 % std::max<int64_t>(1, keys - least + 1)
                                            : last);
}

inline std::vector<double> initial_values(const Case& c, size_t operand) {
    const Operand& o = c.op->operands[operand];
    const DType dtype = c.entry->operands[operand].dtype;
    const Tensor shape = shape_of(c, operand, dtype);
    std::vector<double> values(shape.elements(), not_a_number);
    const uint32_t step = static_cast<uint32_t>(c.number), stream = static_cast<uint32_t>(operand);
    const uint32_t half = is_narrow(dtype) ? 1u << (info(dtype).mantissa_bits - 1) : 1;
    Philox p{};
    for (size_t i = 0; c.reads(o) && i < values.size(); i++) {
        const int64_t e = static_cast<int64_t>(i);
        if (e % 4 == 0) p = random_block(1, step, stream, e / 4);
        const uint32_t random = p.bits[e % 4];
        if (o.bound >= 0)
            values[i] = random % c.size[o.bound];
        else if (o.begins >= 0)
            values[i] = begins_of(c, o, e, random, e ? values[i - 1] : 0);
        else if (o.ends >= 0)
            values[i] = ends_of(c, o, e, random, e ? values[i - 1] : 0);
        else if (info(dtype).is_integer())
            values[i] = 1 + random % 9;
        else if (o.positive)
            values[i] = bf16(static_cast<float>(0.5 + uniform(random)));
        // A grid on which the sum of two is of the type too (in bf16: multiples of 1/32 below 2), so that an operation
        // that rounds one to storage before it goes on (residual_rmsnorm_forward) still has the f64 reference's values.
        else if (is_narrow(dtype))
            values[i] = (random % (2 * half - 1) - (half - 1.0)) / (0.5 * half);
        else
            values[i] = random_normal(1, step, stream, e);
    }
    return values;
}

using Outputs = std::vector<std::vector<double>>;

// The reference in f64 on these values; outputs that are absent stay empty.
inline Outputs oracle(const Case& c, const std::vector<std::vector<double>>& values) {
    std::vector<Memory> memory(values.size());
    std::vector<Tensor> tensors(values.size());
    for (size_t i = 0; i < values.size(); i++) {
        const Operand& o = c.op->operands[i];
        if (c.absent[i]) continue;
        memory[i].place(shape_of(c, i, o.letter < 0 ? o.dtype : DType::f64), values[i], false);
        tensors[i] = memory[i].tensor;
    }
    run(*c.op, tensors, c.scalars, {}, "reference");
    Outputs outputs;
    for (int i = 0; i < c.op->outputs; i++)
        outputs.push_back(c.absent[i] ? std::vector<double>() : read(tensors[i]));
    return outputs;
}

inline double rounded(double x, DType dtype) {
    alignas(8) uint8_t bytes[8];
    store(dtype, bytes, x);
    return load(dtype, bytes);
}
inline std::vector<double> rounded(std::vector<double> values, DType dtype) {
    for (double& x : values) x = rounded(x, dtype);
    return values;
}

inline Scalar scalar_for(const ScalarInfo& s, int number) {
    return s.values.empty() ? 1 : s.values[static_cast<size_t>(number) % s.values.size()];
}

inline int64_t pick(const std::vector<int64_t>& values, int number, size_t salt) {
    const size_t n = values.size(), i = static_cast<size_t>(number);
    // Every value occurs; later cases mix the letters otherwise.
    return values[(i + salt * (1 + i / n)) % n];
}

inline std::vector<const TestShape*> further(const Operation& op) {
    std::vector<const TestShape*> shapes;
    for (const TestShape& s : op.test_shapes)
        if (!(s.large && device_properties().emulated)) shapes.push_back(&s);
    return shapes;
}
// Cases of an entry: the description's shapes stand at even numbers, which are aligned (run_variant).
inline int shape_count(const Operation& op) {
    return shapes_an_entry + 2 * static_cast<int>(further(op).size());
}

// Sizes by dimension, from the list above and the description; empty: no such case.
inline std::vector<int64_t> test_sizes(const Operation& op, int number) {
    std::vector<int64_t> size;
    if (number >= shapes_an_entry) {
        if (number % 2) return {};
        return further(op)[static_cast<size_t>(number - shapes_an_entry) / 2]->size;
    }
    for (size_t d = 0; d < op.dimensions.size(); d++) {
        const auto rule = std::find_if(size_rules.begin(), size_rules.end(),
                                       [&](const Sizes& s) { return op.dimensions[d].name == s.letter; });
        size.push_back(pick(rule == size_rules.end() ? other_sizes : rule->values, number, d));
    }
    for (size_t d = 0; d < size.size(); d++)
        if (const int of = op.dimensions[d].multiple_of; of >= 0) size[d] *= size[static_cast<size_t>(of)];
    for (size_t d = 0; d < size.size(); d++)
        if (const int most = op.dimensions[d].at_most; most >= 0) size[static_cast<size_t>(most)] += size[d];
    return size;
}

// Whether the case's sizes hold to at_most().
inline bool holds_limits(const Case& c) {
    for (size_t d = 0; d < c.size.size(); d++)
        if (const DimensionInfo& limited = c.op->dimensions[d];
            limited.at_most >= 0 && c.scalars[static_cast<size_t>(limited.at_most_if)].integer &&
            c.size[d] > c.size[static_cast<size_t>(limited.at_most)])
            return false;
    return true;
}

// A case without values: fill_values.
inline Case make_case(const Operation& op, const Instantiation& entry, std::vector<int64_t> size, int number,
                      bool strided, unsigned flags, unsigned nulls) {
    Case c{&op, &entry, number, strided, std::move(size), {}, {}, {}, {}};
    for (const ScalarInfo& s : op.scalars) {
        c.scalars.push_back(s.kind == 'b' ? Scalar((flags & 1) != 0) : scalar_for(s, number));
        if (s.kind == 'b') flags >>= 1;
    }
    c.derived.resize(op.operands.size());
    for (const Operand& o : op.operands) {
        c.absent.push_back(o.nullable && (nulls & 1));
        if (o.nullable) nulls >>= 1;
    }
    return c;
}

// All that the values of a case's operands go by.
inline std::string describe_values(const Case& c) {
    std::string text = "(";
    for (size_t i = 0; i < c.absent.size(); i++)
        text += (i ? " " : "") + std::string(c.absent[i] ? "-" : name(c.entry->operands[i].dtype));
    text += ")";
    for (size_t d = 0; d < c.size.size(); d++)
        text += " " + c.op->dimensions[d].name + "=" + std::to_string(c.size[d]);
    for (size_t i = 0; i < c.scalars.size(); i++)
        if (c.op->scalars[i].kind == 'b')
            text += " " + c.op->scalars[i].name + "=" + std::to_string(c.scalars[i].integer);
    return text + " case " + std::to_string(c.number);
}
inline std::string describe(const Case& c, const Variant& v) {
    return c.op->name + " " + v.name + " " + describe_values(c) + (c.strided ? " strided" : "");
}

// What cases of one shape differ in; flags and absent have a bit per bool scalar and per operand that may be null.
struct Combination {
    unsigned flags, absent;
    bool strided;
    bool operator==(const Combination&) const = default;
};
// Whether operands with with(OPERAND) are left out as that is.
inline bool keeps_company(const Operation& op, unsigned absent) {
    unsigned place = 0;
    std::vector<unsigned> left_out;  // by operand
    for (const Operand& o : op.operands) left_out.push_back(o.nullable ? absent >> place++ & 1 : 0);
    for (size_t i = 0; i < left_out.size(); i++)
        if (const int with = op.operands[i].with;
            with >= 0 && left_out[i] != left_out[static_cast<size_t>(with)])
            return false;
    return true;
}
inline std::vector<Combination> combinations(const Operation& op, bool brief) {
    const auto count = [](const auto& items, auto is) {
        return std::count_if(items.begin(), items.end(), is);
    };
    const unsigned flags = 1u << count(op.scalars, [](const ScalarInfo& s) { return s.kind == 'b'; });
    const unsigned nulls = 1u << count(op.operands, [](const Operand& o) { return o.nullable; });
    const int layouts = count(op.operands, [](const Operand& o) { return o.strided; }) ? 2 : 1;
    std::vector<Combination> all;
    for (unsigned k = 0; k < flags * nulls * layouts; k++) {
        const Combination c{k % flags, k / flags % nulls, k >= flags * nulls};
        if (c.strided && c.absent) continue;  // neither has to do with the other
        if (!keeps_company(op, c.absent)) continue;
        if (!brief || c.absent == 0 || c.absent == nulls - 1) all.push_back(c);
    }
    return all;
}

// The operation whose derivative `backward` is, where that reads all of its inputs as they are, and how; else null.
inline const Operation* forward_of(const Operation& backward, const Derivative** how) {
    for (const Operation* op : operations())
        for (const Derivative& d : op->derivatives) {
            if (d.operation != backward.name) continue;
            const auto reads = [&](const Operand& o) {
                return o.output || o.nullable ||
                       std::any_of(d.takes.begin(), d.takes.end(), [&](const Derivative::Binding& b) {
                           return !b.gradient && &op->operands[static_cast<size_t>(b.source)] == &o;
                       });
            };
            *how = &d;
            if (std::all_of(op->operands.begin(), op->operands.end(), reads)) return op;
        }
    return nullptr;
}

// Random values. A derivative's inputs that are outputs of the forward operation (attention's lse, rmsnorm's rstd) hold
// what that gives: a variant may rely on it.
inline void fill_values(Case& c) {
    for (size_t i = 0; i < c.op->operands.size(); i++) c.values.push_back(initial_values(c, i));
    const Derivative* how = nullptr;
    const Operation* op = forward_of(*c.op, &how);
    if (!op) return;
    Case f{op, nullptr, c.number, false, {}, {}, {}, {}, {}};
    for (const DimensionInfo& d : op->dimensions)
        f.size.push_back(c.size[static_cast<size_t>(c.op->find_dimension(d.name))]);
    for (const ScalarInfo& s : op->scalars) {
        const int own = c.op->find_scalar(s.name);
        f.scalars.push_back(own < 0 ? scalar_for(s, c.number) : c.scalars[static_cast<size_t>(own)]);
    }
    for (size_t i = 0; i < op->operands.size(); i++) {
        const Operand& o = op->operands[i];
        f.absent.push_back(o.nullable);
        f.values.emplace_back();
        if (o.output) f.values[i].assign(shape_of(f, i, DType::f64).elements(), not_a_number);
    }
    const auto bound = [&](const Derivative::Binding& b) {
        return static_cast<size_t>(c.op->find_operand(b.operand));
    };
    for (const Derivative::Binding& b : how->takes)
        if (const size_t from = static_cast<size_t>(b.source); !b.gradient && !op->operands[from].output) {
            f.values[from] = c.values[bound(b)];
            f.absent[from] = c.absent[bound(b)] && op->operands[from].nullable;
        }
    const Outputs outputs = oracle(f, f.values);
    for (const Derivative::Binding& b : how->takes) {
        if (b.gradient || b.source >= op->outputs) continue;
        const size_t to = bound(b);
        c.values[to] = rounded(outputs[static_cast<size_t>(b.source)], c.entry->operands[to].dtype);
        c.derived[to] = true;
    }
}

}  // namespace llamac
