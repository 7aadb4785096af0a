#include "core/call_checks.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace llamac {
namespace {

// ---- indices

// The value that is no index. An int32 holds no other, and so no row would be marked.
std::optional<int64_t> exception_of(const Operation& op, const Operand& o, std::span<const Scalar> scalars) {
    if (o.except < 0) return std::nullopt;
    const size_t s = static_cast<size_t>(o.except);
    if (s >= scalars.size()) return op.scalars[s].missing;  // left out
    const int64_t value = scalars[s].integer;
    if (static_cast<int32_t>(value) != value)
        fail(op.name, ": ", op.scalars[s].name, " is ", value, ", expected one of 32 bits");
    return value;
}

// By the first operand that tells it; 0: none does. run() compares the others with it.
int64_t size_of_dimension(const Operation& op, std::span<const Tensor> tensors, int dimension) {
    for (size_t i = 0; i < tensors.size(); i++) {
        const std::vector<Dimension>& shape = op.operands[i].shape;
        if (!tensors[i].data || tensors[i].rank != static_cast<int>(shape.size())) continue;
        for (size_t d = 0; d < shape.size(); d++)
            if (shape[d].symbol == dimension) return tensors[i].shape[d] * shape[d].divisor / shape[d].factor;
    }
    return 0;
}

void check_indices(const Operation& op, std::span<const Tensor> tensors, size_t i,
                   std::optional<int64_t> none, bool wide) {
    const Operand& o = op.operands[i];
    const Tensor& t = tensors[i];
    CHECK(o.shape.size() == 1);
    if (!t.data || t.rank != 1 || t.dtype != DType::i32) return;
    const int64_t below = size_of_dimension(op, tensors, o.bound);
    if (below <= 0) return;
    // Elements with memory of their own: a view that repeats one may be of any size, which run() has yet to compare.
    const int64_t count = t.stride[0] == 0 ? std::min<int64_t>(t.shape[0], 1) : t.shape[0];
    for (int64_t n = 0; n < count; n++) {
        const int32_t* at = t.as<int32_t>() + n * t.stride[0];
        const int64_t value = wide ? *reinterpret_cast<const int64_t*>(at) : *at;
        if (value != none && (value < 0 || value >= below))
            fail(op.name, ": ", o.name, " holds ", value, ", expected values from 0 to ", below - 1);
    }
}

// Non-decreasing along each sequence; beginnings no later than the row's own position, ends behind it.
void check_range(const Operation& op, std::span<const Tensor> tensors, size_t i) {
    const Operand& o = op.operands[i];
    const Tensor& t = tensors[i];
    if (!t.data || t.rank != 2 || t.dtype != DType::i32 || !t.contiguous()) return;
    const bool ends = o.ends >= 0;
    const int64_t rows = t.shape[1], seen = size_of_dimension(op, tensors, ends ? o.ends : o.begins),
                  before = seen - rows;
    // run() has yet to compare the shapes.
    if (seen == 0 || rows != size_of_dimension(op, tensors, o.shape[1].symbol)) return;
    for (int64_t b = 0; b < t.shape[0]; b++)
        for (int64_t n = 0, last = 0; n < rows; n++) {
            const int64_t value = t.as<int32_t>()[b * rows + n];
            const auto refuse = [&](auto... expected) {
                fail(op.name, ": ", o.name, "[", b, ",", n, "] is ", value, ", expected ", expected...);
            };
            if (value < 0) refuse("0 or more");
            if (!ends && value > before + n) refuse("at most ", before + n, ", the row's own position");
            if (ends && value <= before + n) refuse("more than ", before + n, ", the row's own position");
            if (value > seen) refuse("at most ", seen, ", the number of keys");
            if (value < last) refuse("at least ", last, ", the value before it");
            last = value;
        }
}

// ---- overlaps

struct ByteRange {
    uintptr_t begin, end;  // equal: there is no memory

    bool intersects(const ByteRange& other) const { return begin < other.end && other.begin < end; }
};

int64_t byte_stride(const Tensor& t, int d) {
    return t.stride[d] * size_of(t.dtype);
}

ByteRange range_of(const Tensor& t) {
    if (!t.data) return {0, 0};
    int64_t last = 0;  // in elements
    for (int d = 0; d < t.rank; d++) {
        if (t.shape[d] == 0) return {0, 0};
        last += (t.shape[d] - 1) * t.stride[d];
    }
    const auto begin = reinterpret_cast<uintptr_t>(t.data);
    return {begin, begin + static_cast<uintptr_t>((last + 1) * size_of(t.dtype))};
}

// Bytes that all elements share out among them, counted from a multiple of the period on.
int64_t bytes_in_period(const Tensor& t, int64_t period) {
    int64_t last = 0;
    for (int d = 0; d < t.rank; d++)
        if (byte_stride(t, d) % period) last += (t.shape[d] - 1) * byte_stride(t, d);
    return last + size_of(t.dtype);
}

bool disjoint_by_period(const Tensor& a, const Tensor& b, int64_t period) {
    const int64_t bytes_a = bytes_in_period(a, period), bytes_b = bytes_in_period(b, period);
    const int64_t distance = static_cast<const char*>(b.data) - static_cast<const char*>(a.data);
    const int64_t begin_b = (distance % period + period) % period;  // a begins at 0
    return begin_b >= bytes_a && begin_b + bytes_b <= period;
}

// Proves it where a period keeps the two apart, as the rows of a fused QKV keep q and k, which are interleaved. Finds
// one for any two slices of an array that a range of one of its dimensions separates: its stride divides all larger
// strides of both.
bool are_disjoint(const Tensor& a, const Tensor& b) {
    std::vector<int64_t> strides;
    for (const Tensor* t : {&a, &b})
        for (int d = 0; d < t->rank; d++)
            if (t->shape[d] > 1 && t->stride[d] > 0) strides.push_back(byte_stride(*t, d));
    std::sort(strides.begin(), strides.end(), std::greater<>());
    int64_t period = 0;
    for (const int64_t stride : strides) {
        period = std::gcd(period, stride);
        if (disjoint_by_period(a, b, period)) return true;
    }
    return false;
}

bool same_elements(const Tensor& a, const Tensor& b) {
    if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank) return false;
    for (int d = 0; d < a.rank; d++)
        if (a.shape[d] != b.shape[d] || (a.shape[d] > 1 && a.stride[d] != b.stride[d])) return false;
    return true;
}

// Whether no dimension steps back into the smaller ones.
bool has_distinct_elements(const Tensor& t) {
    if (t.contiguous() || t.elements() == 0) return true;
    std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, size
    for (int d = 0; d < t.rank; d++)
        if (t.shape[d] > 1) dimensions.emplace_back(t.stride[d], t.shape[d]);
    std::sort(dimensions.begin(), dimensions.end());
    int64_t extent = 1;
    for (const auto& [stride, size] : dimensions) {
        if (stride < extent) return false;
        extent += (size - 1) * stride;
    }
    return true;
}

void check_overlap(const Operation& op, std::span<const Tensor> tensors, size_t output, size_t other) {
    const Operand& o = op.operands[output];
    const bool shares =
        std::find(o.may_share.begin(), o.may_share.end(), static_cast<int>(other)) != o.may_share.end();
    if (shares && same_elements(tensors[output], tensors[other])) return;
    if (are_disjoint(tensors[output], tensors[other])) return;
    const std::string& name = op.operands[other].name;
    fail(op.name, ": ", o.name, " overlaps ", name, " in memory, expected separate memory",
         shares ? ", or exactly that of " + name : "");
}

void check_overlaps(const Operation& op, std::span<const Tensor> tensors, uint32_t fresh) {
    ByteRange ranges[Description::max_operands];
    for (size_t i = 0; i < tensors.size(); i++)
        ranges[i] = fresh >> i & 1 ? ByteRange{0, 0} : range_of(tensors[i]);
    for (size_t i = 0; i < static_cast<size_t>(op.outputs); i++)
        for (size_t k = i + 1; k < tensors.size(); k++)
            if (ranges[i].intersects(ranges[k])) check_overlap(op, tensors, i, k);
}

// ---- all operands

void check_alignment(const Operation& op, const Operand& o, const Tensor& t) {
    const auto size = static_cast<uintptr_t>(size_of(t.dtype));  // a power of two
    if (const uintptr_t past = reinterpret_cast<uintptr_t>(t.data) & (size - 1))
        fail(op.name, ": ", o.name, " begins ", past, " bytes past a multiple of ", size,
             ", expected an aligned address");
}

void check_not_negative(const Operation& op, std::span<const Scalar> scalars) {
    for (size_t s = 0; s < scalars.size() && s < op.scalars.size(); s++)
        if (op.scalars[s].not_negative && scalars[s].integer < 0)
            fail(op.name, ": ", op.scalars[s].name, " is ", scalars[s].integer, ", expected 0 or more");
}

}  // namespace

void check_scalars(const Operation& op, std::span<const Scalar> scalars) {
    for (const Operand& o : op.operands) exception_of(op, o, scalars);
    check_not_negative(op, scalars);
}

void check_memory(const Operation& op, std::span<const Tensor> tensors, std::span<const Scalar> scalars,
                  Backend memory, uint32_t wide, uint32_t fresh) {
    if (tensors.size() != op.operands.size()) return check_scalars(op, scalars);
    check_not_negative(op, scalars);
    bool may_overlap = false;
    for (size_t i = 0; i < tensors.size(); i++) {
        const Operand& o = op.operands[i];
        const std::optional<int64_t> none = exception_of(op, o, scalars);
        if (!tensors[i].data) continue;
        may_overlap |= o.output && !(fresh >> i & 1);
        check_alignment(op, o, tensors[i]);
        if (o.output && o.strided && !has_distinct_elements(tensors[i]))
            fail(op.name, ": ", o.name, " overlaps itself, expected strides that keep its elements apart");
        if ((o.begins >= 0 || o.ends >= 0) && memory == Backend::host) check_range(op, tensors, i);
        if (o.bound >= 0 && memory == Backend::host) check_indices(op, tensors, i, none, wide >> i & 1);
    }
    if (may_overlap) check_overlaps(op, tensors, fresh);
}

}  // namespace llamac
