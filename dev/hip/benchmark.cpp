#include "benchmark.h"

#include <CLI/CLI.hpp>
#include <filesystem>
#include <map>
#include <sstream>

#include "core/device_memory.h"
#include "core/dispatch.h"
#include "core/registry.h"
#include "operation_check.h"
#include "platform/stream.h"

namespace llamac {
namespace {

// Of all sources.
std::vector<Benchmark>& benchmarks() {
    static std::vector<Benchmark> all;
    return all;
}

using Widths = std::map<std::string, int64_t>;

// By dimension letter. 8b: Llama 3.1 8B's widths at 16,384 rows; small: a 12-head model's; tiny: for the
// emulation.
const std::map<std::string, const char*> presets = {
    {"8b", "B=2,T=8192,NH=32,NKV=8,HD=128,M=8192,N=16384,C=4096,K=4096,F=14336,V=128256,R=2,P=268435456"},
    {"small", "B=8,T=1024,NH=12,NKV=4,HD=64,M=1024,N=8192,C=768,K=768,F=2048,V=32000,R=2,P=16777216"},
    {"tiny", "B=1,T=16,NH=4,NKV=2,HD=16,M=16,N=16,C=64,K=64,F=96,V=264,R=2,P=4096"},
};

// Sets the sizes of "N=16384,C=4096". Returns the first item that is not of this form.
std::string set_sizes(Widths& widths, const std::string& text) {
    std::istringstream items(text);
    for (std::string item; std::getline(items, item, ',');) {
        const size_t equals = item.find('=');
        char* end = nullptr;
        const int64_t value = equals == item.npos ? 0 : std::strtoll(item.c_str() + equals + 1, &end, 10);
        if (value < 1 || *end) return item;
        widths[item.substr(0, equals)] = value;
    }
    return "";
}

struct Flags {
    std::string variant, preset, dtype = "bf16", shape;
    int64_t documents = 0;  // rows of a document, where an operation can have them; 0: no documents
};

struct Timing {
    std::string variant;
    int threads;       // 0: the variant's own choice
    double ms, error;  // error: its share of the bound
};

// One combination of types of one operation.
struct Job {
    const Benchmark* benchmark;
    Case timed, checked;  // without values
    std::string label;    // "T=bf16 G=f32", and what is left out
    int64_t documents = 0;
};

int64_t largest_operand(const Case& c) {
    int64_t most = 0;
    for (size_t i = 0; i < c.op->operands.size(); i++)
        most = std::max(most, shape_of(c, i, DType::f32).elements());
    return most;
}

// Fewer rows, so that the serial float64 reference answers in seconds; the widths stay.
Case with_fewer_rows(Case c) {
    constexpr int64_t most = 1 << 22, longest = 512;
    for (const char* letter : {"B", "T", "S", "M", "N", "P", "V", "C", "K"}) {
        const int found = c.op->find_dimension(letter);
        if (found < 0) continue;
        int64_t& size = c.size[static_cast<size_t>(found)];
        if (*letter == 'T' || *letter == 'S') size = std::min(size, longest);
        while (size > 1 && largest_operand(c) > most) size = (size + 1) / 2;
    }
    return c;
}

bool same_types(const Instantiation& a, const Instantiation& b) {
    for (size_t i = 0; i < a.operands.size(); i++)
        if (a.operands[i].dtype != b.operands[i].dtype) return false;
    return true;
}
bool has_types_of(const Variant& v, const Case& c) {
    return std::any_of(v.instantiations.begin(), v.instantiations.end(),
                       [&](const Instantiation& e) { return same_types(e, *c.entry); });
}

// The storage type of an operation's type letter.
DType type_of(const Operation& op, const Instantiation& e, size_t letter) {
    size_t i = 0;
    while (op.operands[i].letter != static_cast<int>(letter)) i++;
    return e.operands[i].dtype;
}

// "T=bf16 M=f32": the letters whose type is not given by another's; "bf16" of a single one.
std::string type_label(const Operation& op, const Instantiation& e) {
    std::string text;
    for (size_t k = 0; k < op.types.size(); k++)
        if (op.types[k].arithmetic_of < 0)
            text += std::string(text.empty() ? "" : " ") + op.types[k].letter + "=" + name(type_of(op, e, k));
    return text.empty() || text.find(' ') != std::string::npos ? text : text.substr(2);
}

bool is_among(const std::vector<const char*>& names, const Operand& o) {
    return std::any_of(names.begin(), names.end(), [&](const char* name) { return o.name == name; });
}

// The bool scalars of a call that leaves them out, as make_case takes them.
unsigned flags_left_out(const Operation& op) {
    unsigned flags = 0, bit = 1;
    for (const ScalarInfo& s : op.scalars) {
        if (s.kind != 'b') continue;
        if (s.missing.value_or(0)) flags |= bit;
        bit <<= 1;
    }
    return flags;
}

std::vector<Job> jobs_of(const Benchmark& b, const Flags& flags) {
    const Operation& op = find_operation(b.operation);
    Widths widths, given;
    set_sizes(widths, presets.at(flags.preset));
    if (flags.preset == "8b") set_sizes(widths, b.widths_8b);
    std::string wrong = set_sizes(given, flags.shape);
    for (const auto& [letter, value] : given) {
        if (op.find_dimension(letter) < 0) wrong = letter;
        widths[letter] = value;
    }
    if (!wrong.empty())
        fail("--shape ", wrong, ": expected LETTER=SIZE with a letter of ", op.name, "'s shapes");
    for (const DimensionInfo& d : op.dimensions)  // as many keys as queries, where nobody says
        if (d.at_most >= 0)
            widths.emplace(op.dimensions[static_cast<size_t>(d.at_most)].name, widths.at(d.name));
    std::vector<int64_t> size;
    for (const DimensionInfo& d : op.dimensions) size.push_back(widths.at(d.name));
    unsigned nulls = 0, bit = 1;
    std::string left_out;
    for (const Operand& o : op.operands) {
        if (!o.nullable) continue;
        if (is_among(b.absent, o)) nulls |= bit, left_out += ", no " + o.name;
        bit <<= 1;
    }
    std::vector<Job> jobs;
    for (const Variant& v : op.variants)
        for (const Instantiation& e : v.instantiations) {
            const bool in_type =
                op.types.empty() || type_of(op, e, 0) == op.types.front().beside(float_dtype(flags.dtype));
            const bool known = std::any_of(jobs.begin(), jobs.end(),
                                           [&](const Job& j) { return same_types(*j.timed.entry, e); });
            if (v.backend() != Backend::device || !in_type || known) continue;
            const Case c = make_case(op, e, size, 0, false, flags_left_out(op), nulls);
            jobs.push_back({&b, c, with_fewer_rows(c), type_label(op, e) + left_out, flags.documents});
        }
    return jobs;
}

// ---- operands

// 2^20 random values of the type, as an operand of this kind wants them.
std::vector<uint8_t> pattern(const Job& job, size_t operand) {
    constexpr int64_t count = 1 << 20;
    const Case& c = job.timed;
    const Operand& o = c.op->operands[operand];
    const DType dtype = c.entry->operands[operand].dtype;
    std::vector<uint8_t> bytes(static_cast<size_t>(count * size_of(dtype)));
    const uint32_t stream = static_cast<uint32_t>(operand);
    // Statistics that a forward pass has left (rstd, lse) are positive, too.
    const bool statistic = o.letter >= 0 && c.op->types[static_cast<size_t>(o.letter)].arithmetic_of >= 0;
    const bool positive = o.positive || (statistic && !o.output);
    const bool is_first = is_among(job.benchmark->first, o), is_last = is_among(job.benchmark->last, o);
    Philox block{};
    for (int64_t i = 0; i < count; i++) {
        if (i % 4 == 0) block = random_block(3, 0, stream, i / 4);
        const uint32_t random = block.bits[i % 4];
        const auto edge_of_document = [&] {
            const int64_t rows = c.size[o.shape[1].symbol], keys = c.size[o.begins >= 0 ? o.begins : o.ends];
            const int64_t begin = (keys - rows + i % rows) / job.documents * job.documents;
            return o.begins >= 0 ? begin : std::min(begin + job.documents, keys);
        };
        const double value = o.begins >= 0 || o.ends >= 0 ? edge_of_document()
                             : is_first                   ? 0
                             : is_last                    ? c.size[o.bound] - 1
                             : o.bound >= 0               ? random % c.size[o.bound]
                             : info(dtype).is_integer()   ? 1 + random % 9
                             : positive                   ? 0.5 + uniform(random)
                                                          : random_normal(3, 0, stream, i);
        store(dtype, &bytes[static_cast<size_t>(i * size_of(dtype))], value);
    }
    return bytes;
}

void fill(void* to, int64_t bytes, const std::vector<uint8_t>& values) {
    int64_t filled = std::min(bytes, static_cast<int64_t>(values.size()));
    copy_bytes(to, values.data(), filled);
    for (; filled < bytes; filled *= 2)
        copy_bytes(static_cast<char*>(to) + filled, to, std::min(filled, bytes - filled));
}

struct Operands {
    std::vector<DeviceMemory> memory;
    std::vector<std::vector<Tensor>> sets;
};

// As many sets as it takes that a call finds nothing of its operands in a cache.
Operands make_operands(const Job& job) {
    Operands r;
    const Case& c = job.timed;
    std::vector<Tensor> tensors;
    int64_t bytes = 0;
    const auto [output, input] = job.benchmark->in_place;
    std::vector<bool> has_memory;  // its own: neither absent nor in the memory of another
    for (size_t i = 0; i < c.absent.size(); i++) {
        tensors.push_back(c.absent[i] ? Tensor{} : shape_of(c, i, c.entry->operands[i].dtype));
        has_memory.push_back(!c.absent[i] && !(output && c.op->operands[i].name == output));
        if (has_memory[i]) bytes += tensors[i].bytes();
    }
    constexpr int64_t most = int64_t{24} << 30;
    const DeviceProperties& device = device_properties();
    const int64_t wanted = device.emulated ? 2 : std::max<int64_t>(2, 4 * device.cache_bytes / bytes + 1);
    r.sets.assign(static_cast<size_t>(std::max<int64_t>(1, std::min(wanted, most / bytes))), tensors);
    for (size_t i = 0; i < tensors.size(); i++) {
        if (!has_memory[i]) continue;
        const std::vector<uint8_t> values = pattern(job, i);
        for (std::vector<Tensor>& set : r.sets) {
            r.memory.emplace_back(tensors[i].bytes());
            set[i].data = r.memory.back().data;
            fill(set[i].data, tensors[i].bytes(), values);
        }
    }
    for (std::vector<Tensor>& set : r.sets)
        if (output)
            set[static_cast<size_t>(c.op->find_operand(output))].data =
                set[static_cast<size_t>(c.op->find_operand(input))].data;
    return r;
}

// ---- check and time

// The error's share of its bound for every variant and block size. A wrong one is said, and counted.
struct Checker {
    Case c;
    Truth truth;
    int failed = 0;

    explicit Checker(const Job& job) : c(job.checked) {
        fill_values(c);
        truth = truth_of(c);
    }
    // Infinity where the variant does not take the shape.
    double error(const Variant& v, int threads) {
        c.threads = threads;
        double share = 0;
        const Run run = run_variant(c, v, max_threads());
        if (!run.supported) return std::numeric_limits<double>::infinity();
        const std::string wrong = run.wrong.empty() ? compare(c, run, truth, share) : run.wrong;
        if (wrong.empty()) return share;
        failed++;
        std::fprintf(stderr, "%s variant %s, %s threads a block: %s\n", c.op->name.c_str(), v.name,
                     threads ? std::to_string(threads).c_str() : "its own", wrong.c_str());
        return not_a_number;
    }
};

struct Result {
    std::vector<Timing> timings;
    double bytes = 0, flops = 0;
};

Result time_job(const Job& job, const Flags& flags, Checker& checker) {
    Operands operands = make_operands(job);
    const Stream stream;
    Workspace workspace;
    const Context context{Backend::device, stream.handle, &workspace};
    const Case& c = job.timed;
    const Call call{c.op, operands.sets[0].data(), c.scalars.data(), c.size.data(), {}};
    Result result{{}, least_bytes(call), least_flops(call)};
    for (const Variant& v : c.op->variants) {
        if (v.backend() != Backend::device || !has_types_of(v, c)) continue;
        if (!flags.variant.empty() && flags.variant != v.name) continue;
        if (!v.supports(call)) continue;
        const BlockSizes blocks = v.threads.empty() ? blocks_of(0) : v.threads;
        Call first = call;
        first.launch.threads = blocks[0];
        // Naive attention keeps whole scores.
        if (v.workspace && v.workspace(first) > device_properties().memory_bytes / 2) continue;
        for (size_t b = 0; b < blocks.size(); b++) {
            const double error = checker.error(v, blocks[b]);
            const auto time = [&] {
                return median_ms(stream.handle, static_cast<int>(operands.sets.size()), [&](int k) {
                    run(*c.op, operands.sets[static_cast<size_t>(k)], c.scalars, context, v.name, blocks[b]);
                });
            };
            // How long the emulation takes says nothing about a device.
            const double ms = device_properties().emulated ? not_a_number : time();
            result.timings.push_back({v.name, blocks[b], ms, error});
        }
    }
    return result;
}

void print_table(const Job& job, const Result& result, const Limit& limit) {
    const Case& c = job.timed;
    std::string shape;
    for (size_t d = 0; d < c.size.size(); d++)
        shape += " " + c.op->dimensions[d].name + "=" + std::to_string(c.size[d]);
    std::printf("%s (%s)%s on %s; ", c.op->name.c_str(), job.label.c_str(), shape.c_str(),
                device_properties().name);
    const auto block = [](const Timing& t) { return t.threads ? std::to_string(t.threads) : "own"; };
    if (device_properties().emulated) {
        std::printf("emulated, so checked and not timed\n  %-12s %6s %14s\n", "variant", "block",
                    "error / bound");
        for (const Timing& t : result.timings)
            std::printf("  %-12s %6s %14.2f\n", t.variant.c_str(), block(t).c_str(), t.error);
    } else {
        std::printf("limit %.0f GB/s by %s\n", limit.gbps, limit.by);
        std::printf("  %-12s %6s %11s %9s %9s %11s %14s\n", "variant", "block", "ms", "GB/s", "TFLOP/s",
                    "% of limit", "error / bound");
        for (const Timing& t : result.timings)
            std::printf("  %-12s %6s %11.4f %9.1f %9.3f %11.1f %14.2f\n", t.variant.c_str(), block(t).c_str(),
                        t.ms, 1e-6 * result.bytes / t.ms, 1e-9 * result.flops / t.ms,
                        1e-4 * result.bytes / t.ms / limit.gbps, t.error);
    }
    std::fflush(stdout);
}

// operation: "benchmark" for all.
int run_benchmarks(const std::string& operation, const Flags& flags) {
    int failed = 0;
    size_t ran = 0;
    for (Benchmark b : benchmarks()) {
        if (operation != "benchmark" && operation != b.operation) continue;
        if (flags.documents)
            std::erase_if(b.absent, [&](const char* name) {
                const Operation& op = find_operation(b.operation);
                const Operand& o = op.operands[static_cast<size_t>(op.find_operand(name))];
                return o.begins >= 0 || o.ends >= 0;
            });
        for (const Job& job : jobs_of(b, flags)) {
            Checker checker(job);
            const Result result = time_job(job, flags, checker);
            if (result.timings.empty() && !flags.variant.empty()) continue;
            print_table(job, result, device_properties().emulated ? Limit{} : copy_limit(result.bytes));
            failed += checker.failed;
            ran += result.timings.size();
        }
    }
    if (ran == 0)
        fail("expected a device's kernel that takes --variant ",
             flags.variant.empty() ? "any" : flags.variant, ", --dtype ", flags.dtype,
             " and these sizes, found none; train_llama3 --list-kernels shows all");
    return failed ? 1 : 0;
}

}  // namespace

Benchmarks::Benchmarks(std::initializer_list<Benchmark> rows) {
    benchmarks().insert(benchmarks().end(), rows);
}

}  // namespace llamac

int main(int argc, char** argv) {
    llamac::Flags flags;
    CLI::App app("Checks and times every kernel of the operation that the program is named after.");
    app.add_option("--variant", flags.variant, "only this variant");
    app.add_option("--preset", flags.preset, "widths [8b; tiny on an emulated device]")
        ->check(CLI::IsMember({"8b", "small", "tiny"}));
    app.add_option("--shape", flags.shape, "sizes by dimension letter, as in N=16384,C=4096");
    app.add_option("--dtype", flags.dtype, "storage")->check(CLI::IsMember({"bf16", "f32"}));
    app.add_option("--documents", flags.documents, "rows of a document, of attention")
        ->check(CLI::PositiveNumber);
    try {
        app.parse(argc, argv);
        if (flags.preset.empty()) flags.preset = llamac::device_properties().emulated ? "tiny" : "8b";
        return llamac::run_benchmarks(std::filesystem::path(argv[0]).filename(), flags);
    } catch (const CLI::ParseError& error) {
        return app.exit(error) ? 2 : 0;
    } catch (const llamac::Error& error) {
        std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
        return 2;
    }
}
