// How check_operations and the microbenchmarks run one variant on a case and judge what it gives.
//
// The baseline of the tolerance (tolerance.h). There is no PyTorch here, whose error it is in the Python tests. Here it is
// what rounding can do to this input, with the factor 1: the f64 reference is run again with every input moved at random
// by up to two rounding errors u of the arithmetic (2^-24; 2^-53 for f64), three times. How far the outputs move is the
// problem's own sensitivity: no algorithm in that arithmetic can be blamed for as much. A sum of n terms adds a factor
// sqrt(n) with probability near one (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019);
// n is at most the largest dimension. The constant in front is 4: the handful of roundings that an element goes through
// beside its sum. What the forward pass has made of the other inputs moves by its storage's u: a variant may read it or
// compute it anew. Operations without FLOPs copy, or round one sum of two: exact.
//
// Stochastic rounding (narrow outputs that are marked random): within one ulp of the element, and
// unbiased (below).
#pragma once
#include <cstdio>
#include <cstring>

#include "core/tolerance.h"
#include "operation_case.h"

namespace llamac {

// An output in an input's memory.
struct Alias {
    size_t output, input;
};

// Of one output.
struct Bound {
    double element;  // what a handful of roundings do
    Deviation allowed;
};

// How far rounding may take each output: see the top of the file.
inline std::vector<Bound> bounds(const Case& c, const Outputs& truth) {
    std::vector<Bound> bound(truth.size());
    if (!c.op->flops) return bound;
    const DType storage = storage_of(*c.op, c.entry->operands);
    const double u = std::ldexp(0.5, -info(info(storage).arithmetic).mantissa_bits);
    const double terms = static_cast<double>(*std::max_element(c.size.begin(), c.size.end()));
    std::vector<Deviation> moves(truth.size());
    for (uint32_t trial = 0; trial < 3; trial++) {
        auto moved = c.values;
        for (size_t i = 0; i < moved.size(); i++) {
            const DType dtype = c.entry->operands[i].dtype;
            const double step = c.derived[i] ? std::ldexp(0.5, -info(dtype).mantissa_bits) : u;
            Philox p{};
            for (size_t e = 0; !info(dtype).is_integer() && e < moved[i].size(); e++) {
                if (e % 4 == 0)
                    p = random_block(2, trial, static_cast<uint32_t>(i), static_cast<int64_t>(e / 4));
                moved[i][e] *= 1 + step * (4 * uniform(p.bits[e % 4]) - 2);
            }
        }
        const Outputs outputs = oracle(c, moved);
        for (size_t i = 0; i < truth.size(); i++) {
            const Deviation move = error_of(outputs[i], truth[i]);
            moves[i] = {std::max(moves[i].relative_l2, move.relative_l2),
                        std::max(moves[i].largest, move.largest)};
        }
    }
    for (size_t i = 0; i < truth.size(); i++) {
        const DType dtype = precision_of(c.op->operands[i], c.entry->operands[i].dtype, storage);
        const double all = 4 * std::sqrt(terms);
        const Deviation baseline{all * moves[i].relative_l2, all * moves[i].largest};
        bound[i] = {4 * moves[i].largest, allowed_of(baseline, truth[i], dtype, 1)};
    }
    return bound;
}

// Whether output i is rounded stochastically.
inline bool is_stochastic(const Case& c, size_t i) {
    const Operand& o = c.op->operands[i];
    const bool has_nearest = o.nearest_beside >= 0 && !c.absent[static_cast<size_t>(o.nearest_beside)];
    return is_narrow(c.entry->operands[i].dtype) && o.random >= 0 && !has_nearest;
}

// f: how far the truth lies above the lower neighbor, in ulp. The error, 1 - f with probability f and else
// -f, has mean 0 and variance f (1 - f) for every f: neither its sum nor its sum with the sign of f - 1/2
// (which sees rounding to nearest) may be more than five standard deviations from 0. slack: the error of
// the arithmetic before the rounding, which has no sums.
inline std::string check_stochastic(const std::vector<double>& found, const std::vector<double>& truth,
                                    DType dtype, double slack) {
    double sum = 0, toward_nearest = 0, variance = 0;
    for (size_t i = 0; i < truth.size(); i++) {
        const double unit = ulp(truth[i], dtype), error = found[i] - truth[i];
        if (!(std::fabs(error) <= unit + slack))
            return "element " + std::to_string(i) + " is more than an ulp away";
        if (unit < 64 * slack) continue;  // the arithmetic's error blurs f
        const double f = truth[i] / unit - std::floor(truth[i] / unit);
        sum += error / unit;
        toward_nearest += f < 0.5 ? -error / unit : error / unit;
        variance += f * (1 - f);
    }
    if (variance < 10) return "";  // too few elements to tell
    const double deviations = std::max(std::fabs(sum), std::fabs(toward_nearest)) / std::sqrt(variance);
    return deviations <= 5 ? ""
                           : "rounding is biased by " + std::to_string(deviations) + " standard deviations";
}

// Every block size of the variant's list in some cases.
inline int block_size(const Case& c, const Variant& v) {
    return c.threads || v.threads.empty() ? c.threads
                                          : v.threads[static_cast<size_t>(c.number) % v.threads.size()];
}

struct Run {
    std::vector<std::vector<uint8_t>> bits;  // by output
    Outputs values;
    bool supported = true;
    std::string wrong;  // what was written that should not be
};
inline Run run_variant(const Case& c, const Variant& v, int threads, const Alias* alias = nullptr) {
    const bool device = v.backend() == Backend::device;
    std::vector<Memory> memory(c.values.size());
    std::vector<Tensor> tensors(c.values.size());
    for (size_t i = 0; i < c.values.size(); i++) {
        if (c.absent[i]) continue;
        Tensor shape = shape_of(c, i, c.entry->operands[i].dtype);
        if (c.strided && c.op->operands[i].strided)
            spread(shape, c.number + static_cast<int>(i), c.number % 2 == 0);
        memory[i].place(shape, c.values[i], c.number % 2 == 1);
        tensors[i] = device ? memory[i].to_device() : memory[i].tensor;
    }
    const size_t output = alias ? alias->output : tensors.size(), input = alias ? alias->input : output;
    if (alias) tensors[output] = tensors[input];
    Run r;
    r.supported = v.supports({c.op, tensors.data(), c.scalars.data(), c.size.data(), {}});
    if (!r.supported) return r;
    set_threads(threads);
    run(*c.op, tensors, c.scalars, {v.backend()}, v.name, block_size(c, v));
    if (device) CHECK(hipDeviceSynchronize());
    for (size_t i = 0; device && i < tensors.size(); i++)
        if (!c.absent[i]) memory[i].from_device();
    for (size_t i = 0; i < tensors.size(); i++) {
        const bool is_output = static_cast<int>(i) < c.op->outputs;
        const Memory& m = memory[i == output ? input : i];
        if (is_output) r.bits.push_back(c.absent[i] ? std::vector<uint8_t>() : m.elements());
        if (is_output) r.values.push_back(c.absent[i] ? std::vector<double>() : read(m.tensor));
        if (!c.absent[i] && !memory[i].intact(is_output || i == input))
            r.wrong =
                c.op->operands[i].name + (is_output ? ": written outside of it" : ": an input was changed");
    }
    return r;
}

inline std::string number(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g", x);
    return text;
}

// What a case's outputs are, and how far from it they may be.
struct Truth {
    Outputs outputs;
    std::vector<Bound> bound;
};
inline Truth truth_of(const Case& c) {
    Truth t{oracle(c, c.values), {}};
    for (size_t i = 0; !c.op->flops && i < t.outputs.size(); i++)
        t.outputs[i] = rounded(std::move(t.outputs[i]), c.entry->operands[i].dtype);
    t.bound = bounds(c, t.outputs);
    return t;
}

// Empty, or what is wrong. tightest: raised to the largest share of a bound that an error has taken.
inline std::string compare(const Case& c, const Run& found, const Truth& expected, double& tightest) {
    const Outputs& truth = expected.outputs;
    const std::vector<Bound>& bound = expected.bound;
    for (size_t i = 0; i < truth.size(); i++) {
        const std::string& output = c.op->operands[i].name;
        if (is_stochastic(c, i)) {
            const std::string wrong =
                check_stochastic(found.values[i], truth[i], c.entry->operands[i].dtype, bound[i].element);
            if (!wrong.empty()) return output + ": " + wrong;
            continue;
        }
        const Deviation error = error_of(found.values[i], truth[i]), &allowed = bound[i].allowed;
        if (!within(error, allowed))
            return output + ": relative L2 error " + number(error.relative_l2) + ", allowed " +
                   number(allowed.relative_l2) + "; largest " + number(error.largest) + ", allowed " +
                   number(allowed.largest);
        if (allowed.largest > 0) tightest = std::max(tightest, error.largest / allowed.largest);
    }
    return "";
}

}  // namespace llamac
