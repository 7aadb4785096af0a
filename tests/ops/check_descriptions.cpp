// The language of operation descriptions: what a description says, each error of its parser, and the descriptions that
// the program has.
#include <cctype>
#include <set>

#include "check.h"
#include "core/dispatch.h"
#include "core/registry.h"

using namespace llamac;

namespace descriptions_checks {
namespace {

const char* const norm =
    "norm<T: f32 bf16, A: arithmetic(T), G: f32, M: bf16 f64, W: f64 f32>"
    "(dx: T[N,2C] may_share(x), sum: G[C] adds_if(accumulate), m?~: M[N,C/2] random(seed, y) with(y);"
    " x: T[N,2C] strided >0, y?: A[], ids: i32[N] <V except(none), table: W[V,C], f: f64[1],"
    " begin: i32[N,V] begins(C);"
    " accumulate: bool, seed: int {42, 1e12}, none: int, eps: float {1e-5}, first: int >=0 = 3 {0, 5}, on: "
    "bool "
    "= 1)"
    " rows(N) empty(N, V) multiple(C, V) at_most(V, C, on) derivative norm_backward(dq: grad x; dout: grad "
    "dx, x, z: sum; eps, "
    "seed)"
    " grad table = grad dx test(N=1, C=2, V=3) test_large(V=4, C=8, N=5)";

TEST(check_all_marks) {
    const Description d = parse_description(norm);
    check(d.name == "norm" && d.operands.size() == 9 && d.outputs == 3, "operands");
    const Operand &dx = d.operands[0], &sum = d.operands[1], &m = d.operands[2], &x = d.operands[3],
                  &ids = d.operands[5], &f = d.operands[7], &begin = d.operands[8];
    check(d.types.size() == 5 && d.types[0].letter == 'T' && d.types[4].letter == 'W', "type letters");
    check(d.types[3].choices == std::vector<DType>{DType::bf16, DType::f64}, "the types of a letter");
    check(d.types[1].arithmetic_of == 0 && d.types[1].choices == std::vector<DType>{DType::f32} &&
          d.types[0].arithmetic_of < 0);
    check(dx.letter == 0 && sum.letter == 2 && m.letter == 3 && d.operands[4].letter == 1 &&
          d.operands[6].letter == 4 && f.letter < 0 && f.dtype == DType::f64);
    check(type_text(d, m) == "M" && type_text(d, ids) == "i32", "a type's text");
    check(dx.output && dx.may_share == std::vector<int>{3}, "may_share");
    check(dimension_text(d, dx) == "[N,2C]" && dimension_text(d, m) == "[N,C/2]" &&
          dimension_text(d, f) == "[1]" && dimension_text(d, d.operands[4]) == "[]");
    check(sum.adds_if == 0 && sum.accumulated() && !dx.accumulated(), "adds_if");
    check(m.nullable && m.in_place && m.random == 1 && m.nearest_beside == 4 && m.with == 4, "random, with");
    check(!x.output && x.strided && x.positive, "strided >0");
    check(ids.letter < 0 && ids.holds_integers() && ids.bound == d.find_dimension("V") && ids.except == 2);
    check(begin.begins == d.find_dimension("C") && ids.begins < 0 && begin.bound < 0, "begins");
    check(d.scalars[0].kind == 'b' && d.scalars[1].kind == 'i' && d.scalars[3].kind == 'f', "scalars");
    check(d.scalars[1].values == std::vector<double>{42, 1e12} && d.scalars[2].values.empty(), "values");
    const ScalarInfo &eps = d.scalars[3], &first = d.scalars[4], &on = d.scalars[5];
    check(!eps.missing && first.missing == 3 && first.values == std::vector<double>{0, 5} && on.missing == 1);
    check(first.not_negative && !d.scalars[1].not_negative, ">=0");
    check(missing_text(eps).empty() && missing_text(first) == "3" && missing_text(on) == "true");
    const DimensionInfo &N = d.dimensions[0], &C = d.dimensions[1], &V = d.dimensions[2];
    check(N.name == "N" && N.splits && N.may_be_zero && V.may_be_zero && !C.may_be_zero && !C.splits, "rows");
    check(C.multiple_of == 2 && V.multiple_of < 0, "multiple");
    check(V.at_most == 1 && V.at_most_if == 5 && C.at_most < 0, "at_most");
    const Derivative& b = d.derivatives.at(0);
    check(b.operation == "norm_backward" && b.gives.size() == 1 && b.takes.size() == 3, "derivative");
    check(b.gives[0].operand == "dq" && b.gives[0].source == 3 && b.gives[0].gradient, "a gradient given");
    check(b.takes[0].operand == "dout" && b.takes[0].source == 0 && b.takes[0].gradient, "a gradient taken");
    check(b.takes[1].operand == "x" && b.takes[1].source == 3 && !b.takes[1].gradient, "an operand taken");
    check(b.takes[2].operand == "z" && b.takes[2].source == 1 && b.scalars == std::vector<int>{3, 1});
    check(d.same_gradients.at(0).input == 6 && d.same_gradients[0].source == 0, "grad");
    check(d.test_shapes.at(0).size == std::vector<int64_t>{1, 2, 3} && !d.test_shapes[0].large, "test");
    check(d.test_shapes.at(1).size == std::vector<int64_t>{5, 8, 4} && d.test_shapes[1].large, "test_large");
}

const std::string storage = dtype_names(is_any);

// Errors of the parser: words of the message, and the texts.
const std::vector<std::pair<std::vector<std::string>, std::vector<const char*>>> errors = {
    {{"an operation, column 1", "the name of an operation", "the end"}, {""}},
    {{"the name of an operation", "'2f(a: T[N];)'"}, {"2f(a: T[N];)"}},
    {{"description of f, column 3", "expected '('"}, {"f a: T[N];)"}},
    {{"the name of an operand"}, {"f<T: f32>(;)"}},
    {{"a name that no other operand has", "column 20"}, {"f<T: f32>(a: T[N], a: T[N];)"}},
    {{"expected ':'"}, {"f<T: f32>(a T[N];)", "f<T f32>(a: T[N];)", "f<T: f32>(a: T[N];; s)"}},
    {{"expected a type letter"}, {"f<(a: T[N];)"}},
    {{"a capital letter that no other type has", "column 3"}, {"f<t: f32>(a: t[N];)"}},
    {{"a capital letter that no other type has"}, {"f<TA: f32>(a: TA[N];)"}},
    {{"a capital letter that no other type has", "column 11"}, {"f<T: f32, T: f32>(a: T[N];)"}},
    {{"types or 'arithmetic'"}, {"f<T: >(a: T[N];)"}},
    {{"expected " + storage, "'f31>"}, {"f<T: f32 f31>(a: T[N];)"}},
    {{"expected " + storage}, {"f<T: f8>(a: T[N];)"}},
    {{"expected '>'"}, {"f<T: f32(a: T[N];)"}},
    {{"expected '('"}, {"f<A: arithmetic T>(a: T[N];)", "f<T: f32>(a: T[N] adds_if s;; s: bool)"}},
    {{"a type letter before this one", "'T), T"}, {"f<A: arithmetic(T), T: f32>(a: T[N];)"}},
    {{"expected ')'"}, {"f<T: f32, A: arithmetic(T>(a: T[N];)"}},
    {{"at most 8 type letters", "'I: f32"},
     {"f<A: f32, B: f32, C: f32, D: f32, E: f32, F: f32, G: f32, H: f32, I: f32>(a: I[N];)"}},
    {{"expected a type letter or " + storage, "'Q[N]"}, {"f<T: f32>(a: Q[N];)"}},
    {{"expected a type letter or", "'i64[N]"}, {"f<T: f32>(a: i64[N];)"}},
    {{"expected a type letter or", "'f8[N]"}, {"f<T: f32>(a: f8[N];)"}},
    {{"expected a type letter or"}, {"f<T: f32>(a: ;)"}},
    {{"expected '['"}, {"f<T: f32>(a: T N;)"}},
    {{"expected ']'"}, {"f<T: f32>(a: T[N;)"}},
    {{"a dimension letter or a number"}, {"f<T: f32>(a: T[N,];)"}},
    {{"a number from 1 to 2^30"}, {"f<T: f32>(a: T[0];)", "f<T: f32>(a: T[2000000000];)"}},
    {{"expected a number"}, {"f<T: f32>(a: T[C/x];)"}},
    {{"at most 4 dimensions"}, {"f<T: f32>(a: T[A,B,C,D,E];)"}},
    {{"'~' only after an output"}, {"f<T: f32>(a: T[N]; b~: T[N])"}},
    {{"'mean' only after an output"}, {"f<T: f32>(a: T[N]; b: T[] mean)"}},
    {{"'rounded' only after an output"}, {"f<T: f32>(a: T[N]; b: T[N] rounded)"}},
    {{"'<' only after an i32"}, {"f<T: f32>(a: T[N]; b: T[N] <N)"}},
    {{"a dimension letter"}, {"f<T: f32>(a: T[N]; b: i32[N] <)", "f<T: f32>(a: T[N];) empty()"}},
    {{"a dimension letter of the operands", "'V)'"}, {"f<T: f32>(a: T[N]; b: i32[N] <V)"}},
    {{"'except' only after an i32"}, {"f<T: f32>(a: T[N]; b: T[N] except(s); s: int)"}},
    {{"a scalar of type int", "'s); s"}, {"f<T: f32>(a: T[N]; b: i32[N] except(s); s: bool)"}},
    {{"'ends' only after an i32 of two dimensions"}, {"f<T: f32>(a: T[N]; b: i32[N] ends(N))"}},
    {{"'begins' only after an i32 of two dimensions"},
     {"f<T: f32>(a: T[N]; b: T[N,N] begins(N))", "f<T: f32>(a: T[N]; b: i32[N] begins(N))"}},
    {{"a dimension letter of the operands", "'V))'"}, {"f<T: f32>(a: T[N]; b: i32[N,N] begins(V))"}},
    {{"a scalar of type bool"},
     {"f<T: f32>(a: T[N] adds_if(s);)", "f<T: f32>(a: T[N] adds_if(s);; s: int)",
      "f<T: f32>(a: T[N,S];; s: int) at_most(N, S, s)"}},
    {{"'adds_if' only after an output without ~"},
     {"f<T: f32>(a~: T[N] adds_if(s);; s: bool)", "f<T: f32>(a: T[N]; b: T[N] adds_if(s); s: bool)"}},
    {{"'random' only after an output with ~"}, {"f<T: f32>(a: T[N] random(s);; s: int)"}},
    {{"a scalar of type int"}, {"f<T: f32>(a~: T[N] random(s);; s: float)"}},
    {{"an operand", "'b);; s"}, {"f<T: f32>(a~: T[N] random(s, b);; s: int)"}},
    {{"'with' only after an operand that may be null"}, {"f<T: f32>(a: T[N]; b?: T[N], c: T[N] with(b))"}},
    {{"an operand that may be null", "'b)"},
     {"f<T: f32>(a: T[N]; b: T[N], c?: T[N] with(b))", "f<T: f32>(a: T[N] ; c?: T[N] with(b))"}},
    {{"'may_share' only after an output"}, {"f<T: f32>(a: T[N]; b: T[N] may_share(a))"}},
    {{"an input"},
     {"f<T: f32>(a: T[N] may_share(a);)", "f<T: f32>(a: T[N] may_share(b);)",
      "f<T: f32>(a: T[N]; b: T[N]) derivative g(db: grad a;)",
      "f<T: f32>(a: T[N]; b: T[N]) derivative g(db: grad c;)",
      "f<T: f32>(a: T[N]; b: T[N]) grad a = grad a"}},
    {{"expected ';'", "'odd;)'"}, {"f<T: f32>(a: T[N] odd;)"}},
    {{"a name that no other scalar or operand has"},
     {"f<T: f32>(a: T[N];; a: int)", "f<T: f32>(a: T[N];; s: int, s: int)"}},
    {{"float, int or bool"}, {"f<T: f32>(a: T[N];; s: double)"}},
    {{"the name of a scalar"}, {"f<T: f32>(a: T[N];; )"}},
    {{"the value of a call that leaves it out"}, {"f<T: f32>(a: T[N];; s: int = {1})"}},
    {{"'=' and a value, as the scalar before has", "'{1})'"},
     {"f<T: f32>(a: T[N];; s: int = 1, t: int {1})"}},
    {{"'>=0' only after an int", "'>=0)'"}, {"f<T: f32>(a: T[N];; s: float >=0)"}},
    {{"a value that tests take"}, {"f<T: f32>(a: T[N];; s: int {x})"}},
    {{"expected '}'"}, {"f<T: f32>(a: T[N];; s: int {1)"}},
    {{"expected ')'", "found the end"}, {"f<T: f32>(a: T[N];"}},
    {{"empty, rows, multiple, at_most, derivative, grad, test, test_large or the end"},
     {"f<T: f32>(a: T[N];) often(N)"}},
    {{"a dimension letter of the operands"},
     {"f<T: f32>(a: T[N];) empty(C)", "f<T: f32>(a: T[N];) multiple(N, C)",
      "f<T: f32>(a: T[N,S];; s: bool) at_most(N, C, s)", "f<T: f32>(a: T[N];) test(C=1)"}},
    {{"a letter that only begins shapes"}, {"f<T: f32>(a: T[C,N];) rows(N)", "f<T: f32>(a: T[2N];) rows(N)"}},
    {{"expected ','"}, {"f<T: f32>(a: T[N];) multiple(N)", "f<T: f32>(a: T[N,S];; s: bool) at_most(N, S)"}},
    {{"the name of an operation"}, {"f<T: f32>(a: T[N]; b: T[N]) derivative (db: grad b;)"}},
    {{"': grad' and an input"}, {"f<T: f32>(a: T[N]; b: T[N]) derivative g(db: b;)"}},
    {{"expected ';'"}, {"f<T: f32>(a: T[N]; b: T[N]) derivative g(db: grad b)"}},
    {{"an operand"},
     {"f<T: f32>(a: T[N]; b: T[N]) derivative g(db: grad b; c)",
      "f<T: f32>(a: T[N]; b: T[N]) grad b = grad c"}},
    {{"an output, or an input whose gradient a derivative before this one gives"},
     {"f<T: f32>(a: T[N]; b: T[N]) derivative g(db: grad b; x: grad b)"}},
    {{"a scalar"}, {"f<T: f32>(a: T[N]; b: T[N]) derivative g(db: grad b; b; s)"}},
    {{"expected 'grad'"}, {"f<T: f32>(a: T[N]; b: T[N]) grad b = a"}},
    {{"expected '='"}, {"f<T: f32>(a: T[N]; b: T[N]) grad b grad a", "f<T: f32>(a: T[N];) test(N)"}},
    {{"a size for every letter"}, {"f<T: f32>(a: T[N,C];) test(N=1)"}},
};
TEST(check_errors) {
    for (const auto& [words, texts] : errors)
        for (const char* text : texts) refused(text, words, [&, text = text] { parse_description(text); });
}

// A launcher against a description.
template <class T>
void launcher(View<T, 2>, View<const float, 1>, double) {}

TEST(check_launchers) {
    const Instantiation fits = instantiations<launcher<float>>()[0],
                        wide = instantiations<launcher<double>>()[0];
    const auto take = [](const std::string& text, const Instantiation& e) {
        const Description d = parse_description(("f<T: f32 f64, A: arithmetic(T), W: f32>" + text).c_str());
        check_instantiation(d, "v", e);
    };
    const auto refuse = [&](const std::string& text, const Instantiation& e,
                            const std::vector<std::string>& words) {
        refused(text, words, [&] { take(text, e); });
    };
    take("(a: T[N,C]; b: A[N]; s: float)", fits);
    take("(a: T[N,C]; b: T[N]; s: float)", fits);
    take("(a: T[N,C]; b: W[N]; s: float)", wide);
    refuse("(a: T[N,C];; s: float)", fits, {"f variant v: takes 2 operands, described are 1"});
    refuse("(a: T[N]; b: A[N]; s: float)", fits, {"a has rank 2, described is 1"});
    refuse("(a: T[N,C], b: A[N];; s: float)", fits, {"b is const, described as an output"});
    refuse("(a: T[N,C]; b: i32[N]; s: float)", fits, {"b is f32, expected i32"});
    refuse("(a: T[N,C]; b: A[N]; s: int)", fits, {"scalars are 'f', described are 'i'"});
    refuse("(a: T[N,C]; b: A[N]; s: float)", wide, {"b is f32, expected f64"});
    refuse("(a: A[N,C]; b: T[N]; s: float)", wide, {"b is f32, expected f64"});
    refuse("(a: T[N,C]; b: T[N]; s: float)", wide, {"b is f32, expected f64"});
    refuse("(a: W[N,C]; b: T[N]; s: float)", wide, {"a is f64, expected f32"});
}

TEST(check_derivatives_of_the_program) {
    check(error_of(check_derivatives).empty(), error_of(check_derivatives));
    const Operation& op = find_operation("matmul_forward");
    check(op.derivatives.size() == 3 && op.same_gradients.size() == 1, "matmul_forward has three");
}

// The same, of descriptions that are wrong.
TEST(check_wrong_derivatives) {
    const std::pair<const char*, const char*> wrong[] = {
        {"nowhere(dx: grad x; dout: grad out)", "no operation is called nowhere"},
        {"swiglu_backward(dx: grad x; dout: grad out, gate_up: x)", "dx is no output of it"},
        {"swiglu_backward(dgate_up: grad x; y: grad out, gate_up: x)", "y is no input of it"},
        {"swiglu_backward(dgate_up: grad x; dout: grad out)", "gate_up is left out"},
        {"rope_backward(dx: grad x; dout: grad out, cis: x)", "the scalar interleaved is left out"},
    };
    for (const auto& [clause, message] : wrong) {
        const Description d =
            parse_description((std::string("f<T: f32>(out: T[N]; x: T[N]) derivative ") + clause).c_str());
        refused(clause, {message}, [&] { check_derivative(d, d.derivatives[0]); });
    }
}

// Every variant has a name of its own, which is no number; what has kernels has a naive one.
TEST(check_variant_names) {
    for (const Operation* op : operations()) {
        std::set<std::string> names;
        for (const Variant& v : op->variants)
            check(names.insert(v.name).second && std::isalpha(static_cast<unsigned char>(v.name[0])),
                  op->name + ": " + v.name);
        check(names.count("reference") && names.count("naive") && !names.count("optimized"), op->name);
    }
}

std::string names_of(const std::string& choice) {
    const KernelChoices choices({choice});
    const Operation& op = find_operation(choice.substr(0, choice.find('=')));
    std::string names;
    for (const Variant* v : *choices.of(op)) names += std::string(names.empty() ? "" : ",") + v->name;
    return names;
}

// As --kernel takes them; `optimized` is what runs by default, in its order.
TEST(check_kernel_choices) {
    const bool host = computing_context().backend == Backend::host;
    check(names_of("cross_entropy=vectorized,naive") == "vectorized,naive", "a list");
    check(names_of("cross_entropy=optimized") == (host ? "cpu,reference" : "on_chip,vectorized,naive"));
    check(names_of("cross_entropy=naive,optimized") ==
          (host ? "naive,cpu,reference" : "naive,on_chip,vectorized"));
    refused("magic",
            {"cross_entropy: no variant magic, expected one of optimized, cpu, on_chip, vectorized, naive, "
             "reference"},
            [] { KernelChoices({"cross_entropy=magic"}); });
    refused("empty", {"cross_entropy: no variant , expected"},
            [] { KernelChoices({"cross_entropy=naive,"}); });
}

}  // namespace
}  // namespace descriptions_checks
