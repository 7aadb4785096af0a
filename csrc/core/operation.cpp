#include "core/operation.h"

#include <cstdio>
#include <string_view>

#include "core/registry.h"

namespace llamac {
namespace {

// Descriptions are ours: a wrong one is a bug, found when the program starts.
[[noreturn]] void bad_description(const std::string& what) {
    std::fprintf(stderr, "llamac: bad operation: %s\n", what.c_str());
    std::abort();
}

// Compares lengths first: constraints and workspaces look names up in every call.
template <class Named>
size_t index_of(const std::vector<Named>& all, std::string_view name, const Operation& op) {
    for (size_t i = 0; i < all.size(); i++)
        if (all[i].name == name) return i;
    bad_description(op.name + " has no " + std::string(name));
}

}  // namespace

Operation::Operation(const char* description, const char* summary_, std::initializer_list<Variant> variants_,
                     double (*flops_)(const Call&), double (*bytes_)(const Call&))
    : Operation(description, summary_, std::span(variants_.begin(), variants_.size()), flops_, bytes_) {}

Operation::Operation(const char* description, const char* summary_, std::span<const Variant> variants_,
                     double (*flops_)(const Call&), double (*bytes_)(const Call&))
    : summary(summary_), variants(variants_.begin(), variants_.end()), flops(flops_), bytes(bytes_) {
    std::erase_if(variants, [](const Variant& v) { return v.instantiations.empty(); });
    try {
        Description::operator=(parse_description(description));
        if (dimensions.size() > max_dimensions) fail(name, ": more than ", max_dimensions, " dimensions");
        if (operands.size() > max_operands) fail(name, ": more than ", max_operands, " operands");
        if (scalars.size() > max_scalars) fail(name, ": more than ", max_scalars, " scalars");
        for (const Variant& v : variants)
            for (const Instantiation& e : v.instantiations) check_instantiation(*this, v.name, e);
    } catch (const Error& e) {
        bad_description(e.what());
    }
    register_operation(*this);
}
Operation::~Operation() = default;

// By the letters that are bound, which may be in the arithmetic type of one another.
bool Types::may_be(int letter, DType found) const {
    const TypeLetter& own = op.types[letter];
    if (bound[letter] >= 0) return bound[letter] == static_cast<int>(found);
    for (size_t i = 0; i < op.types.size(); i++) {
        if (bound[i] < 0) continue;
        const DType other = static_cast<DType>(bound[i]);
        if (own.arithmetic_of == static_cast<int>(i) && info(other).arithmetic != found) return false;
        if (op.types[i].arithmetic_of == letter && info(found).arithmetic != other) return false;
    }
    return own.takes(found);
}

bool Types::bind(int letter, DType found) {
    if (!may_be(letter, found)) return false;
    bound[letter] = static_cast<int>(found);
    return true;
}

std::string Types::expected(const Operand& o) const {
    if (o.letter < 0) return name(o.dtype);
    return dtype_names([&](const DTypeInfo& d) { return may_be(o.letter, *find_dtype(d.name)); });
}

void Types::refuse(const Operand& o, DType found) const {
    fail(op.name, ": ", o.name, " is ", name(found), ", expected ", expected(o));
}

void check_instantiation(const Description& op, const char* variant, const Instantiation& e) {
    const std::string where = op.name + " variant " + variant + ": ";
    if (e.operands.size() != op.operands.size())
        fail(where, "takes ", e.operands.size(), " operands, described are ", op.operands.size());
    Types types(op);
    for (size_t i = 0; i < e.operands.size(); i++) {
        const Operand& o = op.operands[i];
        const ParameterType& type = e.operands[i];
        if (type.rank != static_cast<int>(o.shape.size()))
            fail(where, o.name, " has rank ", type.rank, ", described is ", o.shape.size());
        if (type.is_const == o.output)
            fail(where, o.name,
                 type.is_const ? " is const, described as an output" : " is an input, expected const");
        if (!types.match(o, type.dtype))
            fail(where, o.name, " is ", name(type.dtype), ", expected ", types.expected(o));
    }
    std::string kinds;
    for (const ScalarInfo& s : op.scalars) kinds += s.kind;
    const std::string found(e.scalars.begin(), e.scalars.end());
    if (found != kinds) fail(where, "scalars are '", found, "', described are '", kinds, "'");
}

int64_t Call::operator[](const char* dimension) const {
    return size[index_of(op->dimensions, dimension, *op)];
}

const Tensor& Call::operand(const char* operand) const {
    return tensor[index_of(op->operands, operand, *op)];
}

double Call::number(const char* name) const {
    return scalar[index_of(op->scalars, name, *op)].real;
}

bool Call::adds(const Operand& o) const {
    return o.accumulated() && scalar[o.adds_if].integer != 0;
}

double least_flops(const Call& call) {
    return call.op->flops ? call.op->flops(call) : 0;
}

double least_bytes(const Call& call) {
    if (call.op->bytes) return call.op->bytes(call);
    double bytes = 0;
    for (size_t i = 0; i < call.op->operands.size(); i++) {
        const Operand& o = call.op->operands[i];
        if (call.tensor[i].data)
            bytes += static_cast<double>(call.tensor[i].bytes()) * (o.in_place || call.adds(o) ? 2 : 1);
    }
    return bytes;
}

}  // namespace llamac
