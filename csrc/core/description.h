// The description of an operation: one string, from which all other code derives its knowledge of the operation.
// docs/operations.md gives the grammar and an annotated example.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace llamac {

// One entry of a shape: factor * letter / divisor, or the factor alone.
struct Dimension {
    int symbol = -1;  // index into Description::dimensions; -1: a plain number
    int factor = 1, divisor = 1;

    bool is_letter() const { return symbol >= 0 && factor == 1 && divisor == 1; }
};

// A letter of <T: f32 bf16 f64, A: arithmetic(T)>: one storage type of those that it may take, in all its operands.
struct TypeLetter {
    char letter;
    std::vector<DType> choices;
    int arithmetic_of = -1;  // the letter in whose arithmetic type it is; -1: any of the choices

    bool takes(DType t) const;
    // This letter's dtype when the call's storage type is t.
    DType beside(DType t) const { return arithmetic_of < 0 && takes(t) ? t : info(t).arithmetic; }
};

struct Operand {
    std::string name;
    int letter = -1;           // index into Description::types; -1: dtype
    DType dtype = DType::f32;  // where there is no letter
    std::vector<Dimension> shape;
    bool output = false, nullable = false, in_place = false, strided = false, positive = false, mean = false;
    bool rounded = false;  // values have the precision of the first letter's type
    int bound = -1;        // <V: the dimension that limits the values of indices
    int begins = -1;       // begins(S): rows are the last elements of that dimension; values are first keys
    int ends = -1;         // ends(S): likewise; values are behind the last keys
    int except = -1;       // except(...): the scalar whose value marks ignored rows
    int adds_if = -1;      // adds_if(...): the scalar that decides whether an output is added to or written
    int random = -1;       // random(...): the scalar that seeds stochastic rounding
    int nearest_beside = -1;     // random(seed, OPERAND): rounded to nearest where that operand is given
    int with = -1;               // with(OPERAND): given in the calls that give that operand, and in no others
    std::vector<int> may_share;  // operands whose memory an output may be

    bool accumulated() const { return adds_if >= 0; }
    bool holds_integers() const { return letter < 0 && info(dtype).is_integer(); }
};

struct ScalarInfo {
    std::string name;
    char kind;                      // 'f' float or double, 'i' int64_t, 'b' bool
    std::vector<double> values;     // for tests, in turns
    std::optional<double> missing;  // the default of calls that omit it and all scalars after it
    bool not_negative = false;      // >=0
};

struct DimensionInfo {
    std::string name;
    bool may_be_zero = false;  // empty(N): a call with 0 of them computes nothing
    bool splits = false;       // rows(N): callers may pass several dimensions with this product
    int multiple_of = -1;      // multiple(NH, NKV)
    int at_most = -1;          // at_most(T, S, causal): the dimension that limits it
    int at_most_if = -1;       // in calls where this scalar is true
};

// A scalar's default, as C++ and torch's schemas write it; empty: required.
std::string missing_text(const ScalarInfo& scalar);

// The operation that computes gradients of the inputs.
struct Derivative {
    // An operand of that operation, bound to an operand of this one or to the gradient of one.
    struct Binding {
        std::string operand;
        int source;
        bool gradient;
    };
    std::string operation;
    std::vector<Binding> gives, takes;  // its outputs, its inputs; the others are null
    std::vector<int> scalars;           // of this operation, passed to the scalar of the same name
};

// grad residual = grad out: an input whose gradient is another input's, or an output's.
struct SameGradient {
    int input, source;
};

// Sizes for tests, in addition to those that they choose by dimension letter. large: too slow for the emulated device.
struct TestShape {
    std::vector<int64_t> size;  // by dimension
    bool large = false;
};

struct Description {
    static constexpr size_t max_types = 8, max_dimensions = 12, max_operands = 16, max_scalars = 12;
    std::string name;
    std::vector<TypeLetter> types;
    std::vector<Operand> operands;  // outputs, then inputs
    int outputs = 0;
    std::vector<ScalarInfo> scalars;
    std::vector<DimensionInfo> dimensions;
    std::vector<Derivative> derivatives;
    std::vector<SameGradient> same_gradients;
    std::vector<TestShape> test_shapes;

    // The k-th operand in the order of the checks: inputs first, as they bind the dimensions of the outputs.
    size_t in_order(size_t k) const { return (k + static_cast<size_t>(outputs)) % operands.size(); }
    // Indices; -1: there is none of this name.
    int find_type(char letter) const;
    int find_operand(const std::string& name) const;
    int find_scalar(const std::string& name) const;
    int find_dimension(const std::string& name) const;
};

// Throws Error with the operation, the column, expected and found.
Description parse_description(const char* text);

// "T" or "i32", for listings; "[N,2F]", for messages.
std::string type_text(const Description& op, const Operand& operand);
std::string dimension_text(const Description& op, const Operand& operand);

}  // namespace llamac
