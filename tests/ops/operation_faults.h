// Deliberate faults for check_operations --fault: each runs the reference and spoils the call or its result,
// and says whether that has made a difference (no accumulation: nothing to forget).
#pragma once
#include <deque>

#include "core/tolerance.h"
#include "dev/hip/operation_case.h"

namespace llamac {

struct Launch {
    const Instantiation* entry;
    void operator()(const Call& c) const { entry->launch(c); }
};

inline void flip(const Tensor& t, int64_t element) {
    *address(t, element) ^= 1;
}

inline bool swapped_index(const Call& c, Launch launch) {
    launch(c);
    const Tensor& t = c.tensor[0];
    const int64_t last = t.elements() - 1;
    if (!t.data || last < 1) return false;
    // Neighbours may both be 0 but for rounding, as a first query's gradients are.
    const double a = get(t, 0), b = get(t, last);
    set(t, 0, b);
    set(t, last, a);
    return std::fabs(a - b) > 0.1 * std::max(std::fabs(a), std::fabs(b));
}
inline bool missing_accumulate(const Call& c, Launch launch) {
    std::vector<Scalar> scalars(c.scalar, c.scalar + c.op->scalars.size());
    bool changed = false;
    for (const Operand& o : c.op->operands)
        if (o.accumulated() && c.adds(o))
            scalars[static_cast<size_t>(o.adds_if)] = Scalar(false), changed = true;
    launch({c.op, c.tensor, scalars.data(), c.size, c.launch});
    return changed;
}
inline bool dropped_tail(const Call& c, Launch launch) {
    const Tensor& t = c.tensor[0];
    const int64_t last = t.elements() - 1;
    const double before = get(t, last);
    launch(c);
    const bool changed = get(t, last) != before;
    set(t, last, before);
    return changed;
}
inline bool overrun(const Call& c, Launch launch) {
    launch(c);
    size_t output = 0;
    while (!c.tensor[output].data) output++;  // the first that the call wants
    const Tensor& t = c.tensor[output];
    uint8_t* last = address(t, t.elements() - 1);
    std::copy_n(last, size_of(t.dtype), last + size_of(t.dtype));
    return true;
}
inline bool nan_left(const Call& c, Launch launch) {
    launch(c);
    const Tensor& t = c.tensor[0];
    set(t, t.elements() / 2, not_a_number);
    return true;
}
inline bool changed_input(const Call& c, Launch launch) {
    launch(c);
    if (static_cast<size_t>(c.op->outputs) == c.op->operands.size()) return false;
    flip(c.tensor[c.op->outputs], 0);
    return true;
}
inline bool ignored_strides(const Call& c, Launch launch) {
    std::vector<Tensor> tensors(c.tensor, c.tensor + c.op->operands.size());
    bool changed = false;
    for (size_t i = 0; i < tensors.size(); i++) {
        Tensor& t = tensors[i];
        changed |= t.data && !t.contiguous();
        // What lies in the gaps is no index: of indices the first alone is read.
        const bool indices = c.op->operands[i].bound >= 0;
        int64_t stride = indices ? 0 : 1;
        for (int d = t.rank - 1; d >= 0; stride *= t.shape[d--]) t.stride[d] = stride;
    }
    launch({c.op, tensors.data(), c.scalar, c.size, c.launch});
    return changed;
}
// The operations' type with the most mantissa bits below those of t; t where there is none.
inline DType next_smaller(DType t) {
    DType best = t;
    for (size_t i = 0; i < dtype_count; i++) {
        const DTypeInfo& d = dtype_table[i];
        const bool smaller = is_float(d) && d.mantissa_bits < info(t).mantissa_bits;
        if (smaller && (best == t || d.mantissa_bits > info(best).mantissa_bits))
            best = static_cast<DType>(i);
    }
    return best;
}
// Results of the next smaller type: f32 in f64's place, bf16 in f32's.
inline bool low_precision(const Call& c, Launch launch) {
    launch(c);
    bool changed = false;
    const DType storage = storage_of(*c.op, c.tensor);
    for (int i = 0; i < c.op->outputs; i++) {
        const Tensor& t = c.tensor[i];
        const DType precision = precision_of(c.op->operands[static_cast<size_t>(i)], t.dtype, storage),
                    low = next_smaller(precision);
        for (int64_t e = 0; t.data && e < t.elements(); e++) {
            const double x = get(t, e), y = rounded(x, low);
            changed |= std::fabs(x - y) > 4 * ulp(x, precision);
            set(t, e, y);
        }
    }
    return changed;
}
inline bool unrepeatable(const Call& c, Launch launch) {
    static int calls = 0;
    launch(c);
    if (calls++ % 2) flip(c.tensor[0], 0);
    return true;
}
inline bool depends_on_threads(const Call& c, Launch launch) {
    launch(c);
    if (max_threads() > 1) flip(c.tensor[0], 0);
    return true;
}
inline const Instantiation* reference_for(const Operation& op, const std::vector<Tensor>& tensors) {
    for (const Variant& v : op.variants)
        for (const Instantiation& e : v.instantiations) {
            bool fits = std::strcmp(v.name, "reference") == 0;
            for (size_t i = 0; i < tensors.size(); i++)
                fits &= !tensors[i].data || tensors[i].dtype == e.operands[i].dtype;
            if (fits) return &e;
        }
    return nullptr;
}
// The same in the type of the arithmetic, then rounded to nearest where storage is narrower.
inline bool nearest_rounding(const Call& c, Launch launch) {
    std::vector<Tensor> wide(c.tensor, c.tensor + c.op->operands.size());
    std::vector<Memory> memory(wide.size());
    bool changed = false;
    for (size_t i = 0; i < wide.size(); i++)
        if (wide[i].data && is_narrow(wide[i].dtype)) {
            const std::vector<double> values = read(wide[i]);
            wide[i].dtype = info(wide[i].dtype).arithmetic;
            memory[i].place(wide[i], values, false);
            wide[i] = memory[i].tensor;
            changed = true;
        }
    const Instantiation* entry = reference_for(*c.op, wide);
    if (!changed || !entry) return launch(c), false;
    entry->launch({c.op, wide.data(), c.scalar, c.size, c.launch});
    for (int i = 0; i < c.op->outputs; i++)
        for (int64_t e = 0; c.tensor[i].data && e < wide[i].elements(); e++)
            set(c.tensor[i], e, get(wide[i], e));
    return wide[0].elements() > 1000;
}

struct Fault {
    const char* name;
    bool (*run)(const Call&, Launch);
    // Whether an operand can show it; all cases of the other operations would be run in vain.
    bool (*shows)(const Operand&) = [](const Operand&) { return true; };
};
inline const std::vector<Fault> faults = {
    {"swapped-index", swapped_index},
    {"missing-accumulate", missing_accumulate, [](const Operand& o) { return o.accumulated(); }},
    {"dropped-tail", dropped_tail},
    {"overrun", overrun},
    {"nan-left", nan_left},
    {"changed-input", changed_input},
    {"ignored-strides", ignored_strides, [](const Operand& o) { return o.strided; }},
    {"low-precision", low_precision},
    {"unrepeatable", unrepeatable},
    {"thread-dependent", depends_on_threads},
    {"nearest-rounding", nearest_rounding, [](const Operand& o) { return o.random >= 0; }},
};
inline const Fault* injected = nullptr;
inline bool injected_matters = false;  // whether the fault has made a difference since this was reset

inline void launch_fault(const Call& c, const void*) {
    const std::vector<Tensor> tensors(c.tensor, c.tensor + c.op->operands.size());
    injected_matters |= injected->run(c, {reference_for(*c.op, tensors)});
}
// A variant "fault" of every operation that can show it, for all types of the reference.
inline void inject() {
    for (const Operation* op : operations()) {
        if (std::none_of(op->operands.begin(), op->operands.end(), injected->shows)) continue;
        Operation& o = find_operation(op->name);
        for (const Variant& v : std::vector<Variant>(o.variants)) {
            if (std::strcmp(v.name, "reference") != 0) continue;
            static std::deque<std::vector<Instantiation>> kept;
            std::vector<Instantiation>& all =
                kept.emplace_back(v.instantiations.begin(), v.instantiations.end());
            for (Instantiation& e : all) e.pass = launch_fault;
            o.variants.push_back({"fault", injected->name, all, v.supports});
        }
    }
}

}  // namespace llamac
