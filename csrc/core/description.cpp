#include "core/description.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "platform/error.h"

namespace llamac {
namespace {

template <class Items>
int find_named(const Items& items, const std::string& name) {
    const auto found =
        std::find_if(items.begin(), items.end(), [&](const auto& i) { return i.name == name; });
    return found == items.end() ? -1 : static_cast<int>(found - items.begin());
}

struct Parser {
    const char* text;
    const char* at;
    Description op;

    explicit Parser(const char* text_) : text(text_), at(text_) {}

    // ---- characters and words

    [[noreturn]] void fail_here(const std::string& expected) {
        skip_space();
        const std::string found = *at ? std::string("'") + std::string(at).substr(0, 24) + "'" : "the end";
        fail("description of ", op.name.empty() ? "an operation" : op.name, ", column ", at - text + 1,
             ": expected ", expected, ", found ", found);
    }
    void skip_space() {
        while (*at == ' ') at++;
    }
    const char* here() {
        skip_space();
        return at;
    }
    bool eat(const char* token) {
        skip_space();
        const size_t n = std::strlen(token);
        if (std::strncmp(at, token, n) != 0) return false;
        at += n;
        return true;
    }
    void need(const char* token) {
        if (!eat(token)) fail_here(std::string("'") + token + "'");
    }
    static bool in_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }
    bool at_word() {
        skip_space();
        return std::isalpha(static_cast<unsigned char>(*at));
    }
    std::string word(const char* expected) {
        if (!at_word()) fail_here(expected);
        const char* begin = at;
        while (in_word(*at)) at++;
        return {begin, at};
    }
    bool eat_word(const char* expected) {
        skip_space();
        const size_t n = std::strlen(expected);
        if (std::strncmp(at, expected, n) != 0 || in_word(at[n])) return false;
        at += n;
        return true;
    }
    int number() {
        skip_space();
        if (!std::isdigit(static_cast<unsigned char>(*at))) fail_here("a number");
        return static_cast<int>(take_number());
    }
    int64_t take_number() {
        char* end = nullptr;
        const long value = std::strtol(at, &end, 10);
        if (value < 1 || value > (1 << 30)) fail_here("a number from 1 to 2^30");
        at = end;
        return value;
    }

    // ---- references to other parts of the text, resolved at its end

    struct Place {
        const char* at;
        std::string name;
    };
    Place reference(const char* expected) {
        const char* begin = here();
        return {begin, word(expected)};
    }
    template <class Items>
    int resolve(const Place& p, const Items& items, const std::string& expected) {
        const int found = find_named(items, p.name);
        if (found < 0) at = p.at, fail_here(expected);
        return found;
    }
    struct OperandMarks {
        std::vector<Place> bound, begins, ends, except, adds_if, random, with, may_share;
    };
    std::vector<OperandMarks> marks;

    std::vector<Place> arguments(const char* expected) {
        std::vector<Place> all;
        need("(");
        do all.push_back(reference(expected));
        while (eat(","));
        need(")");
        return all;
    }

    // ---- types

    void parse_choices(TypeLetter& t) {
        const char* begin = here();
        if (eat_word("arithmetic")) {
            need("(");
            const Place of = reference("a type letter before this one");
            t.arithmetic_of = of.name.size() == 1 ? op.find_type(of.name[0]) : -1;
            if (t.arithmetic_of < 0) at = of.at, fail_here("a type letter before this one");
            for (const DType of_choice : op.types[t.arithmetic_of].choices)
                if (const DType a = info(of_choice).arithmetic; !t.takes(a)) t.choices.push_back(a);
            need(")");
            return;
        }
        while (at_word()) t.choices.push_back(parse_dtype());
        if (t.choices.empty()) at = begin, fail_here("types or 'arithmetic'");
    }
    void parse_type_letter() {
        const char* begin = here();
        const std::string letter = word("a type letter");
        if (letter.size() != 1 || !std::isupper(static_cast<unsigned char>(letter[0])) ||
            op.find_type(letter[0]) >= 0)
            at = begin, fail_here("a capital letter that no other type has");
        if (op.types.size() == Description::max_types)
            at = begin, fail_here("at most " + std::to_string(Description::max_types) + " type letters");
        TypeLetter t{letter[0], {}};
        need(":");
        parse_choices(t);
        op.types.push_back(std::move(t));
    }
    DType parse_dtype() {
        const Place p = reference("the name of a type");
        const std::optional<DType> found = find_dtype(p.name);
        if (!found) at = p.at, fail_here(dtype_names(is_any));
        return *found;
    }

    // ---- operands

    int symbol_index(const std::string& symbol) {
        const int known = op.find_dimension(symbol);
        if (known >= 0) return known;
        op.dimensions.push_back({symbol});
        return static_cast<int>(op.dimensions.size()) - 1;
    }
    Dimension parse_dimension() {
        Dimension d;
        skip_space();
        const bool counted = std::isdigit(static_cast<unsigned char>(*at));
        if (counted) d.factor = number();
        if (!counted || std::isalpha(static_cast<unsigned char>(*at)))
            d.symbol = symbol_index(word("a dimension letter or a number"));
        if (eat("/")) d.divisor = number();
        return d;
    }
    void parse_type(Operand& o) {
        const Place p = reference("a type letter or a type");
        const std::optional<DType> fixed = find_dtype(p.name);
        o.letter = p.name.size() == 1 ? op.find_type(p.name[0]) : -1;
        if (fixed)
            o.dtype = *fixed;
        else if (o.letter < 0)
            at = p.at, fail_here("a type letter or " + dtype_names(is_any));
    }
    void parse_shape(Operand& o) {
        need("[");
        if (eat("]")) return;
        const char* begin = at;
        do o.shape.push_back(parse_dimension());
        while (eat(","));
        need("]");
        if (o.shape.size() > Tensor::max_rank)
            at = begin, fail_here("at most " + std::to_string(Tensor::max_rank) + " dimensions");
    }
    // One mark; false where there is none.
    bool parse_mark(Operand& o, OperandMarks& m) {
        const char* begin = here();
        const auto only = [&](bool fits, const char* expected) {
            if (!fits) at = begin, fail_here(expected);
        };
        if (eat_word("strided")) return o.strided = true;
        if (eat(">0")) return o.positive = true;
        if (eat_word("mean")) {
            only(o.output, "'mean' only after an output");
            return o.mean = true;
        }
        if (eat_word("rounded")) {
            only(o.output, "'rounded' only after an output");
            return o.rounded = true;
        }
        if (eat("<")) {
            only(o.holds_integers(), "'<' only after an i32");
            m.bound = {reference("a dimension letter")};
        } else if (eat_word("begins")) {
            only(o.holds_integers() && o.shape.size() == 2, "'begins' only after an i32 of two dimensions");
            m.begins = arguments("a dimension letter");
        } else if (eat_word("ends")) {
            only(o.holds_integers() && o.shape.size() == 2, "'ends' only after an i32 of two dimensions");
            m.ends = arguments("a dimension letter");
        } else if (eat_word("except")) {
            only(o.holds_integers(), "'except' only after an i32");
            m.except = arguments("a scalar of type int");
        } else if (eat_word("adds_if")) {
            only(o.output && !o.in_place, "'adds_if' only after an output without ~");
            m.adds_if = arguments("a scalar of type bool");
        } else if (eat_word("random")) {
            only(o.in_place, "'random' only after an output with ~");
            m.random = arguments("a scalar of type int");
        } else if (eat_word("with")) {
            only(o.nullable, "'with' only after an operand that may be null");
            m.with = arguments("an operand that may be null");
        } else if (eat_word("may_share")) {
            only(o.output, "'may_share' only after an output");
            m.may_share = arguments("an input");
        } else {
            return false;
        }
        return true;
    }
    void parse_operand(bool output) {
        const char* begin = here();
        Operand o;
        OperandMarks m;
        o.output = output;
        o.name = word("the name of an operand");
        if (op.find_operand(o.name) >= 0) at = begin, fail_here("a name that no other operand has");
        o.nullable = eat("?");
        const char* tilde = here();
        o.in_place = eat("~");
        if (o.in_place && !output) at = tilde, fail_here("'~' only after an output");
        need(":");
        parse_type(o);
        parse_shape(o);
        while (parse_mark(o, m)) {
        }
        op.operands.push_back(std::move(o));
        marks.push_back(std::move(m));
    }
    void parse_operands(bool output) {
        do parse_operand(output);
        while (eat(","));
    }

    // ---- scalars

    double value(const char* expected) {
        skip_space();
        char* end = nullptr;
        const double v = std::strtod(at, &end);
        if (end == at) fail_here(expected);
        at = end;
        return v;
    }
    void parse_scalar() {
        const char* begin = here();
        ScalarInfo s{word("the name of a scalar"), 0, {}, {}, false};
        if (op.find_scalar(s.name) >= 0 || op.find_operand(s.name) >= 0)
            at = begin, fail_here("a name that no other scalar or operand has");
        need(":");
        if (eat_word("float"))
            s.kind = 'f';
        else if (eat_word("int"))
            s.kind = 'i';
        else if (eat_word("bool"))
            s.kind = 'b';
        else
            fail_here("float, int or bool");
        const char* const limit = here();
        s.not_negative = eat(">=0");
        if (s.not_negative && s.kind != 'i') at = limit, fail_here("'>=0' only after an int");
        const char* const after = here();
        if (eat("="))
            s.missing = value("the value of a call that leaves it out");
        else if (!op.scalars.empty() && op.scalars.back().missing)
            at = after, fail_here("'=' and a value, as the scalar before has");
        if (eat("{")) {
            do s.values.push_back(value("a value that tests take"));
            while (eat(","));
            need("}");
        }
        op.scalars.push_back(std::move(s));
    }

    // ---- clauses

    int dimension_of(const Place& p) {
        return resolve(p, op.dimensions, "a dimension letter of the operands");
    }
    int input_of(const Place& p) {
        const int i = resolve(p, op.operands, "an input");
        if (op.operands[i].output) at = p.at, fail_here("an input");
        return i;
    }
    int scalar_of(const Place& p, char kind, const char* expected) {
        const int s = resolve(p, op.scalars, expected);
        if (op.scalars[s].kind != kind) at = p.at, fail_here(expected);
        return s;
    }

    void parse_multiple() {
        need("(");
        DimensionInfo& d = op.dimensions[static_cast<size_t>(dimension_of(reference("a dimension letter")))];
        need(",");
        d.multiple_of = dimension_of(reference("a dimension letter"));
        need(")");
    }
    void parse_at_most() {
        need("(");
        DimensionInfo& d = op.dimensions[static_cast<size_t>(dimension_of(reference("a dimension letter")))];
        need(",");
        d.at_most = dimension_of(reference("a dimension letter"));
        need(",");
        d.at_most_if = scalar_of(reference("a scalar of type bool"), 'b', "a scalar of type bool");
        need(")");
    }
    void parse_rows() {
        for (const Place& p : arguments("a dimension letter")) {
            const int d = dimension_of(p);
            for (const Operand& o : op.operands)
                for (size_t k = 0; k < o.shape.size(); k++)
                    if (o.shape[k].symbol == d &&
                        (k > 0 || o.shape[k].factor != 1 || o.shape[k].divisor != 1))
                        at = p.at, fail_here("a letter that only begins shapes");
            op.dimensions[d].splits = true;
        }
    }
    // Whether a derivative parsed so far gives the gradient of the operand.
    bool is_given(int operand) const {
        for (const Derivative& d : op.derivatives)
            for (const Derivative::Binding& b : d.gives)
                if (b.source == operand) return true;
        return false;
    }
    // "dx: grad x", "dout: grad out", "x: sum", or "weight" for "weight: weight".
    Derivative::Binding parse_binding(bool gives) {
        Place own = reference("an operand of the derivative");
        Derivative::Binding b{own.name, -1, false};
        if (eat(":")) {
            b.gradient = eat_word("grad");
            own = reference("an operand");
        }
        if (gives && !b.gradient) at = own.at, fail_here("': grad' and an input");
        b.source = gives ? input_of(own) : resolve(own, op.operands, "an operand");
        if (!gives && b.gradient && !op.operands[b.source].output && !is_given(b.source))
            at = own.at,
            fail_here("an output, or an input whose gradient a derivative before this one gives");
        return b;
    }
    void parse_derivative() {
        Derivative d;
        d.operation = word("the name of an operation");
        need("(");
        do d.gives.push_back(parse_binding(true));
        while (eat(","));
        need(";");
        if (at_word()) {
            do d.takes.push_back(parse_binding(false));
            while (eat(","));
        }
        if (eat(";")) {
            do d.scalars.push_back(resolve(reference("a scalar"), op.scalars, "a scalar"));
            while (eat(","));
        }
        need(")");
        op.derivatives.push_back(std::move(d));
    }
    void parse_same_gradient() {
        SameGradient s{};
        s.input = input_of(reference("an input"));
        need("=");
        if (!eat_word("grad")) fail_here("'grad'");
        s.source = resolve(reference("an operand"), op.operands, "an operand");
        op.same_gradients.push_back(s);
    }
    void parse_test_shape(bool large) {
        TestShape shape{std::vector<int64_t>(op.dimensions.size(), 0), large};
        need("(");
        const char* begin = at;
        do {
            const size_t d = static_cast<size_t>(dimension_of(reference("a dimension letter")));
            need("=");
            shape.size[d] = number();
        } while (eat(","));
        if (std::count(shape.size.begin(), shape.size.end(), 0))
            at = begin, fail_here("a size for every letter");
        need(")");
        op.test_shapes.push_back(std::move(shape));
    }
    void parse_clause() {
        if (eat_word("empty")) {
            for (const Place& p : arguments("a dimension letter"))
                op.dimensions[dimension_of(p)].may_be_zero = true;
        } else if (eat_word("rows")) {
            parse_rows();
        } else if (eat_word("multiple")) {
            parse_multiple();
        } else if (eat_word("at_most")) {
            parse_at_most();
        } else if (eat_word("derivative")) {
            parse_derivative();
        } else if (eat_word("grad")) {
            parse_same_gradient();
        } else if (eat_word("test")) {
            parse_test_shape(false);
        } else if (eat_word("test_large")) {
            parse_test_shape(true);
        } else {
            fail_here("empty, rows, multiple, at_most, derivative, grad, test, test_large or the end");
        }
    }

    // ---- all of it

    void resolve_marks() {
        const char* end = at;
        for (size_t i = 0; i < marks.size(); i++) {
            Operand& o = op.operands[i];
            for (const Place& p : marks[i].bound) o.bound = dimension_of(p);
            for (const Place& p : marks[i].begins) o.begins = dimension_of(p);
            for (const Place& p : marks[i].ends) o.ends = dimension_of(p);
            for (const Place& p : marks[i].except) o.except = scalar_of(p, 'i', "a scalar of type int");
            for (const Place& p : marks[i].adds_if) o.adds_if = scalar_of(p, 'b', "a scalar of type bool");
            for (size_t k = 0; k < marks[i].random.size(); k++) {
                const Place& p = marks[i].random[k];
                if (k == 0)
                    o.random = scalar_of(p, 'i', "a scalar of type int");
                else
                    o.nearest_beside = resolve(p, op.operands, "an operand");
            }
            for (const Place& p : marks[i].with) {
                o.with = resolve(p, op.operands, "an operand that may be null");
                if (!op.operands[static_cast<size_t>(o.with)].nullable)
                    at = p.at, fail_here("an operand that may be null");
            }
            for (const Place& p : marks[i].may_share) o.may_share.push_back(input_of(p));
        }
        at = end;
    }
    Description parse() {
        op.name = word("the name of an operation");
        if (eat("<")) {
            do parse_type_letter();
            while (eat(","));
            need(">");
        }
        need("(");
        parse_operands(true);
        op.outputs = static_cast<int>(op.operands.size());
        need(";");
        if (at_word()) parse_operands(false);
        if (eat(";")) {
            do parse_scalar();
            while (eat(","));
        }
        need(")");
        resolve_marks();
        for (skip_space(); *at; skip_space()) parse_clause();
        return std::move(op);
    }
};

}  // namespace

bool TypeLetter::takes(DType t) const {
    return std::find(choices.begin(), choices.end(), t) != choices.end();
}

int Description::find_type(char wanted) const {
    const auto found =
        std::find_if(types.begin(), types.end(), [&](const TypeLetter& t) { return t.letter == wanted; });
    return found == types.end() ? -1 : static_cast<int>(found - types.begin());
}
int Description::find_operand(const std::string& wanted) const {
    return find_named(operands, wanted);
}
int Description::find_scalar(const std::string& wanted) const {
    return find_named(scalars, wanted);
}
int Description::find_dimension(const std::string& wanted) const {
    return find_named(dimensions, wanted);
}

std::string missing_text(const ScalarInfo& s) {
    if (!s.missing) return "";
    char real[32];
    std::snprintf(real, sizeof real, "%.17g", *s.missing);
    return s.kind == 'f'   ? real
           : s.kind == 'b' ? (*s.missing ? "true" : "false")
                           : std::to_string(static_cast<int64_t>(*s.missing));
}

Description parse_description(const char* text) {
    return Parser(text).parse();
}

std::string type_text(const Description& op, const Operand& o) {
    return o.letter < 0 ? name(o.dtype) : std::string(1, op.types[o.letter].letter);
}

std::string dimension_text(const Description& op, const Operand& o) {
    std::string text = "[";
    for (const Dimension& d : o.shape) {
        if (text.size() > 1) text += ",";
        if (d.factor != 1 || d.symbol < 0) text += std::to_string(d.factor);
        if (d.symbol >= 0) text += op.dimensions[d.symbol].name;
        if (d.divisor != 1) text += "/" + std::to_string(d.divisor);
    }
    return text + "]";
}

}  // namespace llamac
