// Every operation of the registry, every variant of it, every combination of types, on odd shapes, against
// the operation's own reference in f64 on the same values. What is called comes from the descriptions; only
// sizes by dimension letter stand here.
//
// A case: operands between guard bytes (in the gaps of strided ones too), outputs full of NaN, those that are
// updated or accumulated full of noise. Afterwards: outputs within the bound, guards and inputs as they were,
// the same bits in a second run and with another number of threads, and in place where that is allowed.
//
// The bound on the error: operation_check.h.
//
// Combinations of scalars, operands that are left out and strides run with every shape where they and those of types are
// few, else they rotate over the shapes, and each of them runs. --brief: they always rotate, and all or no operands are left out.
//
// --once: as --brief, and in place instead of a second run; values are not compared; of the types of fp8, which have one
// size, the first that a variant takes. For sanitizers: which accesses a kernel makes depends on shape, combination and the
// sizes of types, hardly on their pairs.
//
// --every N: every Nth shape alone, other ones for each combination of types; without --once, of the large shapes, which take
// most of the time, and each of those with one of N or more combinations. `make test-all` runs every shape. For sanitizers: whether
// a barrier is missing hardly depends on the shape.
//
// --fault NAME puts a wrong variant in the place of all others: the checks have to see it in every operation
// to which it applies, for every combination of the types' sizes; then the program ends with 1, as with any failure,
// else with 0. Without --verbose, a combination's cases end with the first in which it was seen.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

#include "dev/hip/operation_check.h"
#include "operation_faults.h"
#include "platform/threads.h"

using namespace llamac;

namespace {

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

// In place, where that is allowed.
std::string compare_aliases(const Case& c, const Variant& v, const Run& first) {
    for (size_t i = 0; i < c.absent.size(); i++)
        for (const int shared : c.op->operands[i].may_share) {
            const Alias a{i, static_cast<size_t>(shared)};
            if (c.absent[a.output] || c.absent[a.input]) continue;
            const Run in_place = run_variant(c, v, 2, &a);
            if (in_place.supported && in_place.bits != first.bits)
                return c.op->operands[i].name + " in " + c.op->operands[a.input].name +
                       "'s memory gives other bits";
        }
    return "";
}

// Empty, or how the bits of other runs differ from the first one's.
std::string compare_runs(const Case& c, const Variant& v, const Run& first) {
    const bool device = v.backend() == Backend::device;
    if (run_variant(c, v, 2).bits != first.bits) return "a second run gives other bits";
    if (!device && run_variant(c, v, 1).bits != first.bits) return "the bits depend on the number of threads";
    const std::string wrong = device ? compare_orders(c, v, first) : "";
    return wrong.empty() ? compare_aliases(c, v, first) : wrong;
}

// What every variant of an operation shares of a case, strided or not: its values, with those that the forward
// makes of the others, and, once somebody has asked, its truth.
struct Known {
    std::vector<std::vector<double>> values;
    std::vector<bool> derived;
    std::unique_ptr<Truth> truth;
};
Known& known_of(Case& c) {
    static const Operation* of = nullptr;
    static std::map<std::string, Known> known;
    if (of != c.op) known.clear();
    of = c.op;
    Known& k = known[describe_values(c)];
    if (k.values.empty()) {
        fill_values(c);
        k.values = c.values;
        k.derived = c.derived;
    }
    c.values = k.values;
    c.derived = k.derived;
    return k;
}

struct Tally {
    int passed = 0, failed = 0, reported = 0, unseen = 0, every = 1;
    bool verbose = false, brief = false, once = false;
};
struct Verdict {
    bool ran = false;
    std::string wrong;  // empty: nothing
};
// tightest: the largest share of a bound that an error has taken.
Verdict check_case(Case& c, const Variant& v, bool once, double& tightest) {
    Known& known = known_of(c);
    const Run first = run_variant(c, v, 2);
    if (!first.supported) return {};
    if (injected && !injected_matters) return {true, ""};  // nothing to see
    const auto wrong = [&]() -> std::string {
        if (!first.wrong.empty()) return first.wrong;
        if (once) return compare_aliases(c, v, first);
        if (!known.truth) known.truth = std::make_unique<Truth>(truth_of(c));
        const std::string unequal = compare(c, first, *known.truth, tightest);
        return unequal.empty() ? compare_runs(c, v, first) : unequal;
    };
    return {true, wrong()};
}

constexpr size_t most_with_every_shape = 32;  // times combinations of types
bool is_large(const std::vector<int64_t>& sizes) {
    double product = 1;
    for (const int64_t size : sizes) product *= static_cast<double>(std::max<int64_t>(size, 1));
    return product > (1 << 15);
}
// Whether an instantiation before this one has operands of the same sizes.
bool has_sizes_of_another(const Variant& v, const Instantiation& entry) {
    const auto same = [](const ParameterType& a, const ParameterType& b) {
        return size_of(a.dtype) == size_of(b.dtype);
    };
    for (const Instantiation& e : v.instantiations) {
        if (&e == &entry) return false;
        if (std::ranges::equal(e.operands, entry.operands, same)) return true;
    }
    return false;
}

// All cases of one variant with one combination of types.
void check_instantiation(const Operation& op, const Variant& v, const Instantiation& entry, Tally& tally) {
    const std::vector<Combination> all = combinations(op, tally.brief);
    size_t ran = 0;
    int seen = 0, mattered = 0;
    double tightest = 0;
    int step = tally.every > 1 && !tally.once
                   ? std::max(tally.every, static_cast<int>(v.instantiations.size()))
                   : tally.every;
    const int turn_of_types = static_cast<int>(&entry - v.instantiations.data());
    const auto report = [&](const std::string& what) {
        if (tally.reported++ < 40) std::printf("FAILED %s\n", what.c_str());
    };
    const auto enough = [&] { return injected && seen > 0 && !tally.verbose; };
    // Whether the variant takes the case.
    const auto check_combination = [&](int number, const Combination& k) {
        const std::vector<int64_t> sizes = test_sizes(op, number);
        if (sizes.empty()) return false;
        if (number % step != turn_of_types % step && (tally.once || is_large(sizes))) return false;
        Case c = make_case(op, entry, sizes, number, k.strided, k.flags, k.absent);
        if (!holds_limits(c)) return false;
        injected_matters = false;
        Verdict verdict;
        try {
            verdict = check_case(c, v, tally.once, tightest);
        } catch (const Error& e) {
            verdict = {true, e.what()};
        }
        if (!verdict.ran) return false;
        const bool right = verdict.wrong.empty();
        ran++;
        mattered += injected_matters;
        seen += injected_matters && !right;
        (right ? tally.passed : tally.failed)++;
        if (!right && !injected) report(describe(c, v) + ": " + verdict.wrong);
        return true;
    };
    const bool rotate = tally.brief || all.size() * v.instantiations.size() > most_with_every_shape;
    for (size_t before = 0; !enough();) {
        for (int number = 0; number < shape_count(op); number++)
            for (size_t k = 0, turn = rotate ? ran : 0; k < all.size() && !enough(); k++)
                if (check_combination(number, all[(turn + k) % all.size()]) && rotate) break;
        // A variant that takes few shapes: again, until each combination has run.
        if (ran == 0 && step > 1) {
            step = 1;
            continue;
        }
        if (!rotate || ran >= all.size() || ran == before) break;
        before = ran;
    }
    if (ran == 0) tally.failed++, report(op.name + " " + v.name + ": supports none of the cases");
    if (tally.verbose)
        std::printf("%s %s: %zu cases, %.2f of the bound\n", op.name.c_str(), v.name, ran, tightest);
    if (injected && mattered)
        std::printf("%s %s: seen in %d of %d cases\n", op.name.c_str(), injected->name, seen, mattered);
    tally.unseen += mattered > 0 && seen == 0;
}

[[noreturn]] void usage() {
    std::fprintf(stderr,
                 "check_operations: expected [--operation NAME] [--variant NAME] [--where host|device]"
                 " [--verbose] [--brief] [--once] [--every N] [--fault NAME], NAME one of");
    for (const Fault& f : faults) std::fprintf(stderr, " %s", f.name);
    std::fprintf(stderr, "\n");
    std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
    limit_spinning(argv);
    Tally tally;
    const char *only = nullptr, *variant = nullptr, *where = nullptr, *fault = nullptr, *every = "1";
    const std::map<std::string, bool*> switches = {
        {"--verbose", &tally.verbose}, {"--brief", &tally.brief}, {"--once", &tally.once}};
    const std::map<std::string, const char**> texts = {{"--operation", &only},
                                                       {"--variant", &variant},
                                                       {"--where", &where},
                                                       {"--fault", &fault},
                                                       {"--every", &every}};
    for (int i = 1; i < argc; i++) {
        const std::string flag = argv[i];
        if (const auto set = switches.find(flag); set != switches.end()) {
            *set->second = true;
        } else if (const auto text = texts.find(flag); text != texts.end() && i + 1 < argc) {
            *text->second = argv[++i];
        } else {
            usage();
        }
    }
    tally.brief |= tally.once;
    char* end = nullptr;
    tally.every = static_cast<int>(std::strtol(every, &end, 10));
    if (tally.every < 1 || *end) usage();
    const bool on_host = where && std::strcmp(where, "host") == 0;
    if (where && !on_host && std::strcmp(where, "device") != 0) usage();
    for (const Fault& f : faults)
        if (fault && std::strcmp(fault, f.name) == 0) injected = &f;
    if (fault && !injected) usage();
    if (injected) inject();
    int chosen = 0;
    for (const Operation* op : operations())
        for (const Variant& v : op->variants)
            for (const Instantiation& e : v.instantiations)
                if ((!only || op->name == only) && (!variant || std::strcmp(v.name, variant) == 0) &&
                    !injected == (std::strcmp(v.name, "fault") != 0) &&
                    (!where || v.backend() == (on_host ? Backend::host : Backend::device)) &&
                    !((tally.once || injected) && has_sizes_of_another(v, e))) {
                    chosen++;
                    check_instantiation(*op, v, e, tally);
                }
    if (chosen == 0) {
        std::fprintf(
            stderr,
            "check_operations: expected a variant of --operation %s, --variant %s, --where %s, found "
            "none; train_llama3 --list-kernels shows all\n",
            only ? only : "any", variant ? variant : "any", where ? where : "any");
        return 2;
    }
    std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
    if (tally.unseen)
        std::printf("the fault was not seen in %d combinations of operation and types\n", tally.unseen);
    return tally.failed != 0 && tally.unseen == 0;
}
