#include "core/registry.h"

#include <algorithm>
#include <cctype>
#include <cstring>

namespace llamac {
namespace {

std::vector<Operation*>& table() {
    static std::vector<Operation*> t;  // constructed on first use: registration runs before main()
    return t;
}
const Observer* observer = nullptr;

// Descriptions are ours: a wrong one is a bug, found when the program starts.
[[noreturn]] void bad_description(const std::string& what) {
    std::fprintf(stderr, "llamac: bad operation description: %s\n", what.c_str());
    std::abort();
}

struct Parser {
    const char* text;
    const char* at;

    void skip_space() {
        while (*at == ' ') at++;
    }
    bool eat(const char* token) {
        skip_space();
        const size_t n = std::strlen(token);
        if (std::strncmp(at, token, n) != 0) return false;
        at += n;
        return true;
    }
    void need(const char* token) {
        if (!eat(token)) bad_description(std::string(text) + ": expected '" + token + "' at '" + at + "'");
    }
    std::string word() {
        skip_space();
        const char* begin = at;
        while (std::isalnum(static_cast<unsigned char>(*at)) || *at == '_') at++;
        if (begin == at) bad_description(std::string(text) + ": expected a name at '" + at + "'");
        return {begin, at};
    }
    int number() {
        skip_space();
        int n = 0;
        while (std::isdigit(static_cast<unsigned char>(*at))) n = 10 * n + (*at++ - '0');
        return n;
    }
};

int symbol_index(Operation& op, const std::string& symbol) {
    const auto found = std::find(op.dimensions.begin(), op.dimensions.end(), symbol);
    const int index = static_cast<int>(found - op.dimensions.begin());
    if (found == op.dimensions.end()) op.dimensions.push_back(symbol);
    return index;
}

// "2F", "HD/2", "N", or a plain number, which is a factor of the empty symbol.
Dimension parse_dimension(Operation& op, Parser& p) {
    Dimension d{};
    if (const int factor = p.number()) d.factor = factor;
    const bool symbol = std::isalpha(static_cast<unsigned char>(*p.at));
    d.symbol = symbol ? symbol_index(op, p.word()) : -1;
    if (p.eat("/")) d.divisor = p.number();
    return d;
}

void parse_type(const Operation& op, Operand& o, const std::string& type) {
    if (type.size() == 1 && std::strchr("TAGM", type[0]))
        o.type = type[0];
    else if (type == "f32")
        o.dtype = DType::f32;
    else if (type == "i32")
        o.dtype = DType::i32;
    else
        bad_description(op.name + ": " + o.name + " has unknown type " + type);
}

void parse_operands(Operation& op, Parser& p, bool output) {
    do {
        Operand o{};
        o.name = p.word();
        o.output = output;
        o.nullable = p.eat("?");
        o.accumulated = p.eat("+=");
        o.in_place = p.eat("~");
        p.need(":");
        parse_type(op, o, p.word());
        p.need("[");
        if (!p.eat("]")) {
            do o.shape.push_back(parse_dimension(op, p));
            while (p.eat(","));
            p.need("]");
        }
        o.strided = p.eat("strided");
        o.positive = p.eat(">0");
        o.mean = p.eat("mean");
        if (p.eat("<")) o.bound = symbol_index(op, p.word());
        if (o.shape.size() > Tensor::max_rank)
            bad_description(op.name + ": " + o.name + " has too many dimensions");
        op.operands.push_back(o);
    } while (p.eat(","));
}

void parse(Operation& op, const char* description) {
    Parser p{description, description};
    op.name = p.word();
    p.need("(");
    parse_operands(op, p, true);
    op.outputs = static_cast<int>(op.operands.size());
    p.need(";");
    p.skip_space();
    if (*p.at != ';') parse_operands(op, p, false);
    if (p.eat(";")) {
        do {
            const std::string scalar = p.word();
            p.need(":");
            const std::string kind = p.word();
            if (kind != "float" && kind != "int" && kind != "bool")
                bad_description(op.name + ": scalar type " + kind);
            op.scalars.push_back({scalar, kind[0]});
        } while (p.eat(","));
    }
    p.need(")");
    const bool flag = std::any_of(op.scalars.begin(), op.scalars.end(), [](const ScalarInfo& s) {
        return s.name == "accumulate" && s.kind == 'b';
    });
    for (const Operand& o : op.operands)
        if (o.accumulated && !flag) bad_description(op.name + ": += wants the scalar accumulate: bool");
}

void check_entry(const Operation& op, const Variant& v, const Entry& e) {
    const std::string where = op.name + " variant " + v.name;
    if (e.operands.size() != op.operands.size()) bad_description(where + ": number of operands");
    Types types;
    for (size_t i = 0; i < e.operands.size(); i++) {
        const Operand& o = op.operands[i];
        const Slot& slot = e.operands[i];
        if (slot.rank != static_cast<int>(o.shape.size())) bad_description(where + ": rank of " + o.name);
        if (slot.is_const == o.output)
            bad_description(where + ": inputs are const, outputs are not: " + o.name);
        if (o.type ? !types.match(o.type, slot.dtype) : slot.dtype != o.dtype)
            bad_description(where + ": type of " + o.name);
    }
    const bool wide = types.T == static_cast<int>(DType::f64);
    if (types.A >= 0 && types.T >= 0 && types.A != static_cast<int>(wide ? DType::f64 : DType::f32))
        bad_description(where + ": A is the arithmetic type of T");
    std::string kinds;
    for (const ScalarInfo& s : op.scalars) kinds += s.kind;
    if (e.scalars != kinds) bad_description(where + ": scalars are " + e.scalars + ", described as " + kinds);
}

constexpr int max_dimensions = 12, max_operands = 16;

// Binds the dimension letters to sizes, or compares.
void bind_shape(const Operation& op, const Operand& o, const Tensor& t, int64_t* size) {
    const auto found = [&] { return shape_text(t.shape, t.rank); };  // a call pays for no text
    if (t.rank != static_cast<int>(o.shape.size()))
        fail(op.name, ": ", o.name, " has shape ", found(), ", expected ", dimension_text(op, o));
    for (int d = 0; d < t.rank; d++) {
        const Dimension& dim = o.shape[d];
        const int64_t scaled = t.shape[d] * dim.divisor;
        int64_t expected = dim.factor;
        if (dim.symbol >= 0) {
            if (size[dim.symbol] < 0 && scaled % dim.factor)
                fail(op.name, ": ", o.name, " has shape ", found(), ", expected ", dimension_text(op, o),
                     " with dimension ", d, " a multiple of ", dim.factor);
            if (size[dim.symbol] < 0) size[dim.symbol] = scaled / dim.factor;
            expected *= size[dim.symbol];
            if (expected % dim.divisor)
                fail(op.name, ": ", op.dimensions[static_cast<size_t>(dim.symbol)], " = ", size[dim.symbol],
                     ", expected a multiple of ", dim.divisor);
        }
        if (scaled != expected)
            fail(op.name, ": ", o.name, " has shape ", found(), ", expected ", dimension_text(op, o),
                 " with dimension ", d, " = ", expected / dim.divisor);
    }
}

void check_strides(const Operation& op, const Operand& o, const Tensor& t) {
    if (t.elements() == 0) return;
    if (!o.strided && !t.contiguous()) fail(op.name, ": ", o.name, " must be contiguous");
    if (o.strided && t.rank > 1 && t.shape[t.rank - 1] > 1 && t.stride[t.rank - 1] != 1)
        fail(op.name, ": ", o.name, " must have stride 1 in its last dimension");
}

void check_operand(const Operation& op, const Operand& o, const Tensor& t, int64_t* size, Types& types) {
    if (!t.data && t.elements() != 0) {
        if (!o.nullable) fail(op.name, ": ", o.name, " is missing");
        return;
    }
    types.check(op, o, t.dtype);
    bind_shape(op, o, t, size);
    check_strides(op, o, t);
}

bool takes(const Entry& e, const Operation& op, const Tensor* tensors) {
    for (size_t i = 0; i < op.operands.size(); i++)
        if (tensors[i].data && tensors[i].dtype != e.operands[i].dtype) return false;
    return true;
}

const Entry* entry_for(const Variant& v, const Call& call) {
    if (!v.supports(call)) return nullptr;
    for (const Entry& e : v.entries)
        if (takes(e, *call.op, call.tensor)) return &e;
    return nullptr;
}

struct Choice {
    const Variant* variant;
    const Entry* entry;
};
const Variant& variant_called(const Operation& op, const std::string& name) {
    std::string known;
    for (const Variant& v : op.variants) {
        if (name == v.name) return v;
        known += std::string(known.empty() ? "" : ", ") + v.name;
    }
    fail(op.name, ": no variant ", name, ", expected one of ", known);
}

// variant: the only one that will do; null: one of those selected, else of those at home there.
Choice choose(const Operation& op, const Call& call, Where where, const char* variant) {
    if (!variant && op.selected.empty()) {
        for (const Variant& v : op.variants)
            if (v.where == where && v.deterministic)
                if (const Entry* entry = entry_for(v, call)) return {&v, entry};
        fail(op.name, ": no variant takes these shapes, types or strides");
    }
    std::vector<const Variant*> candidates = op.selected;
    if (variant) candidates = {&variant_called(op, variant)};
    std::string names;
    for (const Variant* v : candidates) {
        names += std::string(names.empty() ? "" : ", ") + v->name;
        if (v->where != where && !device_properties().emulated)
            fail(op.name, ": variant ", v->name, " computes on the ",
                 where == Where::host ? "device, the call's operands are the host's"
                                      : "host, the call's operands are the device's");
    }
    for (const Variant* v : candidates)
        if (const Entry* entry = entry_for(*v, call)) return {v, entry};
    fail(op.name, ": variant ", names, " does not take these shapes, types or strides");
}

// A call without rows (N, B, T or P is 0) launches nothing: what is left to write are sums and means over none.
bool is_empty(const std::vector<Tensor>& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.elements() == 0; });
}
void run_empty(const Call& call) {
    const Operation& op = *call.op;
    for (size_t d = 0; d < op.dimensions.size(); d++) {
        const std::string& name = op.dimensions[d];
        if (call.size[d] == 0 && name != "N" && name != "B" && name != "T" && name != "P")
            fail(op.name, ": ", name, " = 0, expected at least 1");
    }
    for (int i = 0; i < op.outputs && !call.device.queue.rehearsal; i++) {
        const Operand& o = op.operands[static_cast<size_t>(i)];
        const Tensor& t = call.tensor[i];
        if (!t.data || t.elements() == 0 || o.in_place || (o.accumulated && call.flag("accumulate")))
            continue;
        CHECK(t.contiguous());
        const size_t bytes = static_cast<size_t>(t.bytes());
        const int byte = o.mean ? 0xff : 0;  // all bits set are a NaN
        if (call.device.queue.where == Where::host)
            std::memset(t.data, byte, bytes);
        else
            CHECK(hipMemsetAsync(t.data, byte, bytes, call.device.stream));
    }
}

// Threads a block and workspace of a device variant.
void prepare_launch(Call& call, const Variant& v, int threads) {
    if (v.where == Where::host) return;
    call.device.threads = threads ? threads : v.threads.empty() ? 256 : v.threads.front();
    call.device.queue.where = Where::device;
    if (!v.workspace) return;
    static Workspace own;
    Workspace& workspace = call.device.queue.workspace ? *call.device.queue.workspace : own;
    const int64_t bytes = v.workspace(call);
    workspace.asked = std::max(workspace.asked, bytes);
    if (!call.device.queue.rehearsal) call.device.workspace = workspace.reserve(bytes);
}

}  // namespace

Operation::Operation(const char* description, const char* summary_, std::vector<Variant> variants_,
                     double (*flops_)(const Call&), double (*bytes_)(const Call&))
    : summary(summary_), variants(std::move(variants_)), flops(flops_), bytes(bytes_) {
    parse(*this, description);
    if (dimensions.size() > max_dimensions || operands.size() > max_operands)
        bad_description(name + ": too large");
    for (const Variant& v : variants)
        for (const Entry& e : v.entries) check_entry(*this, v, e);
    auto& all = table();
    all.insert(std::upper_bound(all.begin(), all.end(), this,
                                [](const Operation* a, const Operation* b) { return a->name < b->name; }),
               this);
}

int& Types::of(char letter) {
    return letter == 'T' ? T : letter == 'A' ? A : letter == 'G' ? G : M;
}

bool Types::match(char letter, DType found) {
    int& bound = of(letter);
    if (bound < 0) bound = static_cast<int>(found);
    return bound == static_cast<int>(found);
}

void Types::check(const Operation& op, const Operand& o, DType found) {
    if (o.type ? match(o.type, found) : found == o.dtype) return;
    const int wanted = o.type ? of(o.type) : static_cast<int>(o.dtype);
    fail(op.name, ": ", o.name, " is ", name(found), ", expected ", name(static_cast<DType>(wanted)));
}

std::string dimension_text(const Operation& op, const Operand& o) {
    std::string text = "[";
    for (const Dimension& d : o.shape) {
        if (text.size() > 1) text += ",";
        if (d.factor != 1 || d.symbol < 0) text += std::to_string(d.factor);
        if (d.symbol >= 0) text += op.dimensions[d.symbol];
        if (d.divisor != 1) text += "/" + std::to_string(d.divisor);
    }
    return text + "]";
}

int64_t Call::operator[](const char* dimension) const {
    for (size_t d = 0; d < op->dimensions.size(); d++)
        if (op->dimensions[d] == dimension) return size[d];
    bad_description(op->name + " has no dimension " + dimension);
}

const Tensor& Call::operand(const char* operand) const {
    for (size_t i = 0; i < op->operands.size(); i++)
        if (op->operands[i].name == operand) return tensor[i];
    bad_description(op->name + " has no operand " + operand);
}

double Call::number(const char* name) const {
    for (size_t i = 0; i < op->scalars.size(); i++)
        if (op->scalars[i].name == name) return scalar[i].real;
    bad_description(op->name + " has no scalar " + name);
}

bool Call::flag(const char* name) const {
    return number(name) != 0;
}

const std::vector<Operation*>& operations() {
    return table();
}

Operation& find_operation(const std::string& name) {
    for (Operation* op : table())
        if (op->name == name) return *op;
    fail("no operation is called ", name, " (--list-kernels shows them)");
}

void select_kernel(const std::string& choice) {
    const size_t equals = choice.find('=');
    if (equals == std::string::npos) fail("--kernel ", choice, ": expected OPERATION=VARIANT[,VARIANT...]");
    Operation& op = find_operation(choice.substr(0, equals));
    std::vector<const Variant*> selected;
    for (size_t begin = equals + 1; begin <= choice.size();) {
        const size_t end = std::min(choice.find(',', begin), choice.size());
        selected.push_back(&variant_called(op, choice.substr(begin, end - begin)));
        begin = end + 1;
    }
    op.selected = std::move(selected);
}

KernelSelection::KernelSelection(const std::vector<std::string>& choices) {
    for (Operation* op : table()) before.push_back(std::exchange(op->selected, {}));
    try {
        for (const std::string& choice : choices) select_kernel(choice);
    } catch (...) {
        restore();
        throw;
    }
}

KernelSelection::~KernelSelection() {
    restore();
}

void KernelSelection::restore() {
    for (size_t i = 0; i < before.size(); i++) table()[i]->selected = std::move(before[i]);
}

void list_kernels() {
    for (const Operation* op : table()) {
        std::printf("%s: %s\n", op->name.c_str(), op->summary);
        for (const Variant& v : op->variants)
            std::printf("  %-9s  %-6s  %s%s%s\n", v.name, v.where == Where::host ? "host" : "device", v.idea,
                        *v.supports.words ? "; takes: " : "", v.supports.words);
    }
}

double least_flops(const Call& call) {
    return call.op->flops ? call.op->flops(call) : 0;
}

double least_bytes(const Call& call) {
    if (call.op->bytes) return call.op->bytes(call);
    double bytes = 0;
    for (size_t i = 0; i < call.op->operands.size(); i++) {
        const Operand& o = call.op->operands[i];
        const bool accumulates = o.accumulated && call.flag("accumulate");
        if (call.tensor[i].data)
            bytes += static_cast<double>(call.tensor[i].bytes()) * (o.in_place || accumulates ? 2 : 1);
    }
    return bytes;
}

Queue computing_queue() {
    return {device_properties().emulated ? Where::host : Where::device};
}

void observe_runs(const Observer* o) {
    observer = o;
}

bool runs_are_observed() {
    return observer != nullptr;
}

void copy_bytes_async(void* to, const void* from, int64_t bytes, hipStream_t stream) {
    if (observer) observer->before(stream);
    CHECK(hipMemcpyAsync(to, from, static_cast<size_t>(bytes), hipMemcpyDefault, stream));
    if (observer) observer->after_copy(bytes, stream);
}

void run(const Operation& op, std::vector<Tensor> tensors, const std::vector<Scalar>& scalars, Queue queue,
         const char* variant, int threads) {
    if (tensors.size() != op.operands.size())
        fail(op.name, ": expected ", op.operands.size(), " tensors, found ", tensors.size());
    if (scalars.size() != op.scalars.size())
        fail(op.name, ": expected ", op.scalars.size(), " scalars, found ", scalars.size());
    int64_t size[max_dimensions];
    std::fill(size, size + max_dimensions, -1);
    Types types;
    for (size_t k = 0; k < tensors.size(); k++) {
        const size_t i = op.in_order(k);
        check_operand(op, op.operands[i], tensors[i], size, types);
    }
    Call call{&op, tensors.data(), scalars.data(), size, {queue.stream, 0, nullptr, queue}};
    if (is_empty(tensors)) return run_empty(call);
    const Choice chosen = choose(op, call, queue.where, variant);
    prepare_launch(call, *chosen.variant, threads);
    if (queue.rehearsal) return;
    if (observer) observer->before(queue.stream);
    chosen.entry->launch(call);
    if (observer) observer->after_run(call, *chosen.variant);
}

void run(const char* name, std::initializer_list<Tensor> outputs, std::initializer_list<Tensor> inputs,
         std::initializer_list<Scalar> scalars, Queue queue) {
    std::vector<Tensor> tensors(outputs);
    tensors.insert(tensors.end(), inputs);
    run(find_operation(name), std::move(tensors), scalars, queue);
}

}  // namespace llamac
