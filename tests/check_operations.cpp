// Every operation of the registry, every variant of it, every combination of types, on odd shapes, against
// the operation's own reference in f64 on the same values. What is called comes from the descriptions; only
// sizes by dimension letter and scalars by name stand here.
//
// A case: operands between guard bytes (in the gaps of strided ones too), outputs full of NaN, those that are
// updated or accumulated full of noise. Afterwards: outputs within the bound, guards and inputs as they were,
// the same bits in a second run and with another number of threads, and in place where that is allowed.
//
// The bound. An error may be 2 ulp of the largest output (design: the floor of the rule against PyTorch), or
// what rounding can do to this input: the f64 reference is run again with every input moved at random by up
// to two rounding errors u of the arithmetic (2^-24; 2^-53 for f64), three times. How far the outputs move is
// the problem's own sensitivity: no algorithm in that arithmetic can be blamed for as much. A sum of n terms
// adds a factor sqrt(n) with probability near one (Higham and Mary, "A New Approach to Probabilistic Rounding
// Error Analysis", 2019); n is at most the largest dimension. The constant in front is 4: the handful of
// roundings that an element goes through beside its sum. What the forward pass has made of the other inputs
// moves by its storage's u: a variant may read it or compute it anew. Operations without FLOPs copy: exact.
// Everything is compared so that NaN fails.
//
// Stochastic rounding (bf16 in an operation with a seed): within one ulp of the element, and
// unbiased (below).
//
// --fault NAME puts a wrong variant in the place of all others: the checks have to see it in every operation
// to which it applies, for every combination of types; then the program ends with 1, as with any failure,
// else with 0.
#include <cstdio>
#include <cstring>

#include "operation_case.h"
#include "operation_faults.h"

using namespace llamac;

namespace {

// Outputs that may lie in an input's memory: the descriptions have no mark for it.
struct Alias {
    const char *operation, *output, *input;
};
const std::vector<Alias> aliases = {
    {"rope_forward", "out", "x"},
    {"rope_backward", "dx", "dout"},
    {"swiglu_backward", "dgate_up", "gate_up"},
    {"cross_entropy", "dlogits", "logits"},
    {"rmsnorm_backward", "dx", "dresidual"},
    {"rmsnorm_backward", "dx", "dout"},
    {"residual_rmsnorm_forward", "sum", "x"},
    {"residual_rmsnorm_forward", "sum", "residual"},
    {"matmul_forward", "out", "residual"},
};

std::string describe(const Case& c, const Variant& v) {
    std::string text = c.op->name + " " + v.name + " (";
    for (size_t i = 0; i < c.absent.size(); i++)
        text += (i ? " " : "") + std::string(c.absent[i] ? "-" : name(c.entry->operands[i].dtype));
    text += ")";
    for (size_t d = 0; d < c.size.size(); d++)
        text += " " + c.op->dimensions[d] + "=" + std::to_string(c.size[d]);
    for (size_t i = 0; i < c.scalars.size(); i++)
        if (c.op->scalars[i].kind == 'b')
            text += " " + c.op->scalars[i].name + "=" + std::to_string(c.scalars[i].integer);
    return text + (c.strided ? " strided" : "");
}

struct Size {
    double l2 = 0, largest = 0;
};
struct Bound {
    Size element, total;  // a handful of roundings; all that is allowed
};
Size distance(const std::vector<double>& a, const std::vector<double>& b) {
    Size s;
    for (size_t i = 0; i < a.size(); i++) {
        const double d = std::fabs(a[i] - b[i]);
        s.l2 += d * d;
        if (d > s.largest || std::isnan(d)) s.largest = d;  // NaN stays
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
    const double terms = static_cast<double>(*std::max_element(c.size.begin(), c.size.end()));
    for (uint32_t trial = 0; trial < 3; trial++) {
        auto moved = c.values;
        for (size_t i = 0; i < moved.size(); i++) {
            const DType dtype = c.entry->operands[i].dtype;
            const double step = c.derived[i] ? std::ldexp(0.5, -digits(dtype)) : u;
            Philox p{};
            for (size_t e = 0; dtype != DType::i32 && e < moved[i].size(); e++) {
                if (e % 4 == 0)
                    p = random_block(2, trial, static_cast<uint32_t>(i), static_cast<int64_t>(e / 4));
                moved[i][e] *= 1 + step * (4 * uniform(p.word[e % 4]) - 2);
            }
        }
        const Outputs outputs = oracle(c, moved);
        for (size_t i = 0; i < truth.size(); i++) {
            const Size d = distance(outputs[i], truth[i]);
            Size& element = bound[i].element;
            element = {std::max(element.l2, 4 * d.l2), std::max(element.largest, 4 * d.largest)};
        }
    }
    for (size_t i = 0; i < truth.size(); i++) {
        const DType dtype = c.entry->operands[i].dtype;
        const Size norm = distance(truth[i], std::vector<double>(truth[i].size(), 0)), &e = bound[i].element;
        bound[i].total = {std::max(std::sqrt(terms) * e.l2, 2 * std::ldexp(norm.l2, -digits(dtype))),
                          std::max(std::sqrt(terms) * e.largest, 2 * ulp(norm.largest, dtype))};
    }
    return bound;
}

// Whether output i is rounded stochastically. Beside a master copy (A), the storage (T) is the master's
// nearest.
bool is_stochastic(const Case& c, size_t i) {
    const auto seeded = [](const ScalarInfo& s) { return s.name == "seed"; };
    if (c.entry->operands[i].dtype != DType::bf16 || !c.op->operands[i].in_place) return false;
    if (std::none_of(c.op->scalars.begin(), c.op->scalars.end(), seeded)) return false;
    for (int k = 0; k < c.op->outputs; k++)
        if (c.op->operands[i].type == 'T' && c.op->operands[k].type == 'A' && !c.absent[k]) return false;
    return true;
}

// f: how far the truth lies above the lower neighbour, in ulp. The error, 1 - f with probability f and else
// -f, has mean 0 and variance f (1 - f) for every f: neither its sum nor its sum with the sign of f - 1/2
// (which sees rounding to nearest) may be more than five standard deviations from 0. slack: the error of
// the arithmetic before the rounding, which has no sums.
std::string check_stochastic(const std::vector<double>& found, const std::vector<double>& truth,
                             double slack) {
    double sum = 0, toward_nearest = 0, variance = 0;
    for (size_t i = 0; i < truth.size(); i++) {
        const double unit = ulp(truth[i], DType::bf16), error = found[i] - truth[i];
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
int block_size(const Case& c, const Variant& v) {
    return v.threads.empty() ? 0 : v.threads[static_cast<size_t>(c.number) % v.threads.size()];
}

struct Run {
    std::vector<std::vector<uint8_t>> bits;  // by output
    Outputs values;
    bool supported = true;
    std::string wrong;  // what was written that should not be
};
Run run_variant(const Case& c, const Variant& v, int threads, const Alias* alias = nullptr) {
    const bool device = v.where == Where::device;
    std::vector<Memory> memory(c.values.size());
    std::vector<Tensor> tensors(c.values.size());
    for (size_t i = 0; i < c.values.size(); i++) {
        if (c.absent[i]) continue;
        Tensor shape = shape_of(c, i, c.entry->operands[i].dtype);
        if (c.strided && c.op->operands[i].strided) spread(shape, c.number + static_cast<int>(i));
        memory[i].place(shape, c.values[i], c.number % 2 == 1);
        tensors[i] = device ? memory[i].to_device() : memory[i].tensor;
    }
    size_t output = tensors.size(), input = tensors.size();
    for (size_t i = 0; alias && i < tensors.size(); i++) {
        if (c.op->operands[i].name == alias->output) output = i;
        if (c.op->operands[i].name == alias->input) input = i;
    }
    if (alias) tensors[output] = tensors[input];
    Run r;
    r.supported = !v.supports || v.supports({c.op, tensors.data(), c.scalars.data(), c.size.data(), {}});
    if (!r.supported) return r;
    set_threads(threads);
    run(*c.op, tensors, c.scalars, {v.where}, v.name, block_size(c, v));
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

std::string number(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g", x);
    return text;
}

std::string compare(const Case& c, const Run& found, double& tightest) {
    const Outputs truth = oracle(c, c.values);
    const std::vector<Bound> bound = bounds(c, truth);
    for (size_t i = 0; i < truth.size(); i++) {
        const std::string& output = c.op->operands[i].name;
        if (is_stochastic(c, i)) {
            const std::string wrong = check_stochastic(found.values[i], truth[i], bound[i].element.largest);
            if (!wrong.empty()) return output + ": " + wrong;
            continue;
        }
        const Size error = distance(found.values[i], truth[i]), &allowed = bound[i].total;
        if (!(error.l2 <= allowed.l2))
            return output + ": L2 error " + number(error.l2) + ", allowed " + number(allowed.l2);
        if (!(error.largest <= allowed.largest))
            return output + ": largest error " + number(error.largest) + ", allowed " +
                   number(allowed.largest);
        if (allowed.largest > 0) tightest = std::max(tightest, error.largest / allowed.largest);
    }
    return "";
}

// Runs of an emulated kernel with its lanes in other orders.
std::string compare_orders([[maybe_unused]] const Case& c, [[maybe_unused]] const Variant& v,
                           [[maybe_unused]] const Run& first) {
#if defined(LLAMAC_CPU)
    using emulation::Order;
    for (const Order order : {Order::reversed, Order::shuffled}) {
        emulation::set_order(order);
        const bool same = run_variant(c, v, 2).bits == first.bits;
        emulation::set_order(Order::forward);
        if (!same) return "the bits depend on the order of the lanes";
    }
#endif
    return "";
}

// Empty, or how the bits of other runs differ from the first one's.
std::string compare_runs(const Case& c, const Variant& v, const Run& first) {
    const bool device = v.where == Where::device;
    if (run_variant(c, v, 2).bits != first.bits) return "a second run gives other bits";
    const bool library = std::strcmp(v.name, "blas") == 0;  // divides its sums by threads as it likes
    if (!device && !library && run_variant(c, v, 1).bits != first.bits)
        return "the bits depend on the number of threads";
    if (device) {
        const std::string wrong = compare_orders(c, v, first);
        if (!wrong.empty()) return wrong;
    }
    for (const Alias& a : aliases) {
        bool whole = c.op->name == a.operation;
        for (size_t i = 0; i < c.absent.size(); i++)
            whole &=
                !c.absent[i] || (c.op->operands[i].name != a.output && c.op->operands[i].name != a.input);
        if (whole && run_variant(c, v, 2, &a).bits != first.bits)
            return std::string(a.output) + " in " + a.input + "'s memory gives other bits";
    }
    return "";
}

struct Verdict {
    bool ran = false;
    std::string wrong;  // empty: nothing
};
// tightest: the largest share of a bound that an error has taken.
Verdict check_case(Case& c, const Variant& v, double& tightest) {
    take_from_forward(c);
    const Run first = run_variant(c, v, 2);
    if (!first.supported) return {};
    const auto wrong = [&]() -> std::string {
        if (!first.wrong.empty()) return first.wrong;
        const std::string unequal = compare(c, first, tightest);
        return unequal.empty() ? compare_runs(c, v, first) : unequal;
    };
    return {true, wrong()};
}

struct Tally {
    int passed = 0, failed = 0, reported = 0, unseen = 0;
    bool verbose = false;
};

// All cases of one variant with one combination of types.
void check_entry(const Operation& op, const Variant& v, const Entry& entry, Tally& tally) {
    const auto count = [](const auto& items, auto is) {
        return std::count_if(items.begin(), items.end(), is);
    };
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
            planted_matters = false;
            Verdict verdict;
            try {
                verdict = check_case(c, v, tightest);
            } catch (const Error& e) {
                verdict = {true, e.what()};
            }
            if (!verdict.ran) continue;
            const bool right = verdict.wrong.empty();
            ran++;
            mattered += planted_matters;
            seen += planted_matters && !right;
            (right ? tally.passed : tally.failed)++;
            if (!right && !planted) report(describe(c, v) + ": " + verdict.wrong);
        }
    if (ran == 0) tally.failed++, report(op.name + " " + v.name + ": supports none of the cases");
    if (tally.verbose)
        std::printf("%s %s: %d cases, %.2f of the bound\n", op.name.c_str(), v.name, ran, tightest);
    if (planted && mattered)
        std::printf("%s %s: seen in %d of %d cases\n", op.name.c_str(), planted->name, seen, mattered);
    tally.unseen += mattered > 0 && seen == 0;
}

[[noreturn]] void usage() {
    std::fprintf(stderr,
                 "check_operations: expected [--operation NAME] [--where host|device] [--verbose]"
                 " [--fault NAME], NAME one of");
    for (const Fault& f : faults) std::fprintf(stderr, " %s", f.name);
    std::fprintf(stderr, "\n");
    std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
    Tally tally;
    const char *only = nullptr, *where = nullptr;
    for (int i = 1; i < argc; i++) {
        const std::string flag = argv[i];
        if (flag == "--verbose")
            tally.verbose = true;
        else if (flag == "--operation" && i + 1 < argc)
            only = argv[++i];
        else if (flag == "--where" && i + 1 < argc)
            where = argv[++i];
        else if (flag == "--fault" && i + 1 < argc) {
            const std::string name = argv[++i];
            for (const Fault& f : faults)
                if (name == f.name) planted = &f;
            if (!planted) usage();
        } else
            usage();
    }
    if (planted) plant();
    for (const Operation* op : operations())
        for (const Variant& v : op->variants)
            for (const Entry& e : v.entries)
                if ((!only || op->name == only) && !planted == (std::strcmp(v.name, "fault") != 0) &&
                    (!where || v.where == (std::strcmp(where, "host") == 0 ? Where::host : Where::device)))
                    check_entry(*op, v, e, tally);
    std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
    if (tally.unseen)
        std::printf("the fault was not seen in %d combinations of operation and types\n", tally.unseen);
    return tally.failed != 0 && tally.unseen == 0;
}
