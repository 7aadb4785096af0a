// An operation (a description with variants), and the call that a variant receives. Files in csrc/ops define
// operations with these types. Checks, dispatch, listing, tests, benchmarks and the torch schema follow from the
// description.
#pragma once
#include <initializer_list>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/context.h"
#include "core/description.h"

namespace llamac {

struct Scalar {
    double real;
    int64_t integer;
    Scalar(double v) : real(v), integer(static_cast<int64_t>(v)) {}
    Scalar(int64_t v) : real(static_cast<double>(v)), integer(v) {}
    Scalar(int v) : Scalar(static_cast<int64_t>(v)) {}
    Scalar(bool v) : Scalar(static_cast<int64_t>(v)) {}
};

struct Operation;

// The optional last parameter of a launcher of kernels.
struct LaunchContext {
    hipStream_t stream = nullptr;
    int threads = 0;            // a block, from the variant's list or the caller's choice
    void* workspace = nullptr;  // Variant::workspace bytes, aligned as hipMalloc does
    Context caller = {};        // for a launcher that calls another operation

    // A thread for each of `count` elements.
    Grid grid(int64_t count, const char* file = __builtin_FILE(), int line = __builtin_LINE()) const {
        return Grid(blocks_for(count, threads), threads, stream, 0, file, line);
    }
};

// A checked call: operands in the description's order (outputs first), sizes by dimension.
struct Call {
    const Operation* op;
    const Tensor* tensor;
    const Scalar* scalar;
    const int64_t* size;
    LaunchContext launch;

    int64_t operator[](const char* dimension) const;   // call["HD"]
    const Tensor& operand(const char* operand) const;  // call.operand("x")
    double number(const char* name) const;             // call.number("scale")
    bool adds(const Operand& o) const;                 // whether the output is added to, not written
};

// At most `most` values, in place: a table of operations is a constant of the program, which costs little to compile.
template <class T, size_t most>
struct ShortList {
    T value[most] = {};
    size_t count = 0;

    constexpr void push_back(T v) { value[count++] = v; }
    constexpr size_t size() const { return count; }
    constexpr bool empty() const { return count == 0; }
    constexpr const T& operator[](size_t i) const { return value[i]; }
    constexpr const T& front() const { return value[0]; }
    constexpr const T* begin() const { return value; }
    constexpr const T* end() const { return value + count; }
};

// A launcher's signature, derived from its C++ type: the View of each operand.
struct ParameterType {
    DType dtype;
    int rank;
    bool is_const;
};
struct Instantiation {
    void (*pass)(const Call&, const void* launcher) = nullptr;  // calls *launcher, a pointer to a function
    const void* launcher = nullptr;
    ShortList<ParameterType, Description::max_operands> operands = {};
    ShortList<char, Description::max_scalars> scalars = {};  // 'f' float or double, 'i' int64_t, 'b' bool
    Backend backend = Backend::host;                         // device: it takes a LaunchContext

    void launch(const Call& call) const { pass(call, launcher); }
};

// Requirements of a variant beyond the checks and the types of its entries: in words, and as a test.
struct Constraints {
    const char* words = "";
    bool (*hold)(const Call&) = nullptr;

    constexpr Constraints(std::nullptr_t = nullptr) {}
    constexpr Constraints(const char* words_, bool (*hold_)(const Call&)) : words(words_), hold(hold_) {}
    bool operator()(const Call& call) const { return !hold || hold(call); }
};

// Choices of threads per block: blocks_of(256, 128).
using BlockSizes = ShortList<int, 4>;
template <class... Threads>
constexpr BlockSizes blocks_of(Threads... threads) {
    return {{threads...}, sizeof...(threads)};
}

struct Variant {
    const char* name;  // one word for the idea, the same in all operations: listed in docs/operations.md
    const char* idea;
    std::span<const Instantiation> instantiations;  // one per combination of storage types
    Constraints supports = {};
    // For kernels: choices of threads per block, the default first; bytes of workspace, given LaunchContext::threads.
    BlockSizes threads = {};
    int64_t (*workspace)(const Call&) = nullptr;
    const char* chip = "";  // the only chip that the kernels run on; empty: any

    Backend backend() const { return instantiations.front().backend; }
};

struct Operation : Description {
    // Registers itself (core/registry.h).
    // variants: in order of preference; those without instantiations are left out. flops, bytes: the minimum of a call; null:
    // no FLOPs, and each operand once.
    Operation(const char* description, const char* summary, std::initializer_list<Variant> variants,
              double (*flops)(const Call&) = nullptr, double (*bytes)(const Call&) = nullptr);
    Operation(const char* description, const char* summary, std::span<const Variant> variants,
              double (*flops)(const Call&) = nullptr, double (*bytes)(const Call&) = nullptr);
    Operation(const Operation&) = delete;
    ~Operation();

    const char* summary;
    std::vector<Variant> variants;
    double (*flops)(const Call&);
    double (*bytes)(const Call&);
};

// The types that the letters stand for in one entry or one call.
struct Types {
    explicit Types(const Description& op_) : op(op_) {
        for (int& b : bound) b = -1;
    }
    // Binds the operand's letter, or compares it; false if the type contradicts the description or earlier operands.
    bool match(const Operand& o, DType found) {
        if (o.letter < 0) return found == o.dtype;
        return bound[o.letter] == static_cast<int>(found) || bind(o.letter, found);
    }
    // The same; throws Error.
    void check(const Operand& o, DType found) {
        if (!match(o, found)) refuse(o, found);
    }
    // The types that the operand may have, for messages.
    std::string expected(const Operand& o) const;

  private:
    bool may_be(int letter, DType found) const;
    bool bind(int letter, DType found);
    [[noreturn]] void refuse(const Operand& o, DType found) const;

    const Description& op;
    int bound[Description::max_types];  // a DType; -1: not yet
};

// Throws Error if a launcher's parameters contradict the description.
void check_instantiation(const Description& op, const char* variant, const Instantiation& entry);
// The minimum of bytes and FLOPs of a call, by its description.
double least_bytes(const Call& call);
double least_flops(const Call& call);

namespace detail {

// take(call, i, operands): the i-th argument of a launcher whose first `operands` parameters are Views.
template <class P>
struct Parameter;
template <class T, int R>
struct Parameter<View<T, R>> {
    static constexpr bool is_operand = true;
    static constexpr void describe(Instantiation& e) {
        e.operands.push_back({dtype_of<std::remove_const_t<T>>(), R, std::is_const_v<T>});
    }
    static View<T, R> take(const Call& c, size_t i, size_t) {
        const Tensor& t = c.tensor[i];
        View<T, R> v{static_cast<T*>(t.data), {}, {}};
        for (int d = 0; d < R; d++) v.shape[d] = t.shape[d], v.stride[d] = t.stride[d];
        return v;
    }
};
template <class P, char Letter>
struct ScalarParameter {
    static constexpr bool is_operand = false;
    static constexpr void describe(Instantiation& e) { e.scalars.push_back(Letter); }
    static P take(const Call& c, size_t i, size_t operands) {
        const Scalar& s = c.scalar[i - operands];
        return static_cast<P>(Letter == 'f' ? s.real : static_cast<double>(s.integer));
    }
};
template <>
struct Parameter<float> : ScalarParameter<float, 'f'> {};
template <>
struct Parameter<double> : ScalarParameter<double, 'f'> {};
template <>
struct Parameter<bool> : ScalarParameter<bool, 'b'> {};
template <>
struct Parameter<int64_t> : ScalarParameter<int64_t, 'i'> {
    static int64_t take(const Call& c, size_t i, size_t operands) { return c.scalar[i - operands].integer; }
};
template <>
struct Parameter<LaunchContext> {
    static constexpr bool is_operand = false;
    static constexpr void describe(Instantiation& e) { e.backend = Backend::device; }
    static LaunchContext take(const Call& c, size_t, size_t) { return c.launch; }
};

// What launchers of one type share. A launcher is called through a pointer: inlined here, it would round otherwise where the
// compiler fuses other multiplications with additions.
template <class F>
struct Signature;
template <class... P>
struct Signature<void (*)(P...)> {
    static constexpr size_t operands = (size_t{Parameter<P>::is_operand} + ...);
    static constexpr bool operands_first() {
        size_t i = 0;
        return ((Parameter<P>::is_operand == (i++ < operands)) && ...);
    }
    // By position: a std::tuple per launcher would take most of the time in which a small operation is compiled.
    template <size_t... i>
    static void pass_each(const Call& c, void (*launcher)(P...), std::index_sequence<i...>) {
        launcher(Parameter<P>::take(c, i, operands)...);
    }
    static void pass(const Call& c, const void* launcher) {
        pass_each(c, *static_cast<void (*const*)(P...)>(launcher), std::index_sequence_for<P...>());
    }
    static constexpr Instantiation describe() {
        static_assert(operands_first(), "Views, then scalars, then the LaunchContext");
        Instantiation e{&pass};
        (Parameter<P>::describe(e), ...);
        return e;
    }
};

template <auto F>
constexpr auto launcher = F;
template <auto F>
constexpr Instantiation entry() {
    Instantiation e = Signature<decltype(F)>::describe();
    e.launcher = static_cast<const void*>(&launcher<F>);
    return e;
}
template <auto... F>
constexpr Instantiation entries[] = {entry<F>()...};

}  // namespace detail

// instantiations<f<float>, f<bf16>, f<double>>(): functions that take Views in the description's order, its scalars and, to
// launch kernels, the LaunchContext.
template <auto... F>
constexpr std::span<const Instantiation> instantiations() {
    return detail::entries<F...>;
}
// instantiations<LLAMAC_FLOATS(f), f<double>>(): a launcher for each storage type of kernels. Further template arguments may
// follow its name.
#define LLAMAC_FLOATS(LAUNCHER, ...)                                                       \
    LAUNCHER<float __VA_OPT__(, ) __VA_ARGS__>, LAUNCHER<bf16 __VA_OPT__(, ) __VA_ARGS__>, \
        LAUNCHER<fp16 __VA_OPT__(, ) __VA_ARGS__>
// The same of kernels. Of memory-bound operations they differ by their accesses alone (core/device.h), and the emulated device
// has them in fp16 only on demand: they would take a fifth of a CPU build's time.
#if !defined(LLAMAC_FP16_KERNELS)
#define LLAMAC_KERNELS(LAUNCHER, ...) \
    LAUNCHER<float __VA_OPT__(, ) __VA_ARGS__>, LAUNCHER<bf16 __VA_OPT__(, ) __VA_ARGS__>
#else
#define LLAMAC_KERNELS(LAUNCHER, ...) LLAMAC_FLOATS(LAUNCHER __VA_OPT__(, ) __VA_ARGS__)
#endif

}  // namespace llamac
