#include "core/collectives.h"
#include "core/observer.h"

#include <algorithm>

namespace llamac {
namespace {

// In the order of the parts, in the type of the arithmetic, rounded once. Integers: in their own type.
template <class T>
void reduce(Reduction reduction, void* out, const std::vector<const void*>& parts, int64_t count) {
    using A = std::conditional_t<std::is_integral_v<T>, T, arithmetic<T>>;
    T* const to = static_cast<T*>(out);
    const bool sum = reduction == Reduction::sum;
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++) {
        A value = A(static_cast<const T*>(parts[0])[i]);
        for (size_t p = 1; p < parts.size(); p++) {
            const A next = A(static_cast<const T*>(parts[p])[i]);
            value = sum ? A(value + next) : std::max(value, next);
        }
        to[i] = T(value);
    }
}

ElementType element_type(DType dtype) {
    return visit_dtype<is_tensor>(
        dtype, [&]<class T>() { return ElementType{size_of(dtype), info(dtype).collectives, reduce<T>}; });
}

// Bytes exchanged between each rank and the others, given those that a rank holds after an all_gather or before a reduce_scatter.
int64_t moved(int64_t ranks, int64_t bytes) {
    return bytes / ranks * (ranks - 1);
}

void group(Communicator& ranks, const std::function<void()>& calls) {
    ranks.begin_group();
    try {
        calls();
    } catch (...) {
        ranks.drop_group();
        throw;
    }
    ranks.end_group();
}

// Calls, and tells the observer. bytes: that this rank sends or, where it sends none, receives.
template <class Call>
void run(const Context& context, const char* name, int64_t bytes, const Call& call) {
    if (context.dry_run) return;
    const Observer* const observer = context.observer;
    if (observer) observer->before(context.stream);
    try {
        call();
    } catch (const LostRank& lost) {
        throw LostRank(lost, name);
    }
    if (observer && observer->after_collective) observer->after_collective(name, bytes, context.stream);
}

}  // namespace

void all_reduce(const Context& context, Communicator& ranks, const Tensor& x, Reduction reduction) {
    CHECK(x.contiguous());
    run(context, "all_reduce", 2 * moved(ranks.size, x.bytes()),
        [&] { ranks.all_reduce(x.data, x.elements(), element_type(x.dtype), reduction, context.stream); });
}

void reduce_scatter(const Context& context, Communicator& ranks, const Tensor& out, const Tensor& in,
                    Reduction reduction) {
    CHECK(out.contiguous() && in.contiguous() && out.dtype == in.dtype);
    CHECK(in.elements() == ranks.size * out.elements());
    run(context, "reduce_scatter", moved(ranks.size, in.bytes()), [&] {
        ranks.reduce_scatter(out.data, in.data, out.elements(), element_type(in.dtype), reduction,
                             context.stream);
    });
}

void all_gather(const Context& context, Communicator& ranks, const Tensor& out, const Tensor& in) {
    CHECK(out.contiguous() && in.contiguous() && out.dtype == in.dtype);
    CHECK(out.elements() == ranks.size * in.elements());
    run(context, "all_gather", moved(ranks.size, out.bytes()),
        [&] { ranks.all_gather(out.data, in.data, in.elements(), element_type(in.dtype), context.stream); });
}

void plan_exchange(const Context& context, ExchangeAxis axis, int64_t ranks, int64_t bytes) {
    if (context.dry_run && context.observer && context.observer->planned_exchange)
        context.observer->planned_exchange(axis, moved(ranks, bytes));
}

void broadcast(const Context& context, Communicator& ranks, const Tensor& x, int64_t root) {
    CHECK(x.contiguous() && root >= 0 && root < ranks.size);
    run(context, "broadcast", x.bytes(),
        [&] { ranks.broadcast(x.data, x.bytes(), element_of_bytes, root, context.stream); });
}

void grouped(const Context& context, Communicator& ranks, const char* name, int64_t bytes,
             const std::function<void()>& calls) {
    run(context, name, moved(ranks.size, bytes), [&] { group(ranks, calls); });
}

void send(const Context& context, Communicator& ranks, const Tensor& x, int64_t to) {
    CHECK(x.contiguous() && to >= 0 && to < ranks.size && to != ranks.rank);
    run(context, "send", x.bytes(),
        [&] { ranks.send(x.data, x.elements(), element_type(x.dtype), to, context.stream); });
}

void receive(const Context& context, Communicator& ranks, const Tensor& x, int64_t from) {
    CHECK(x.contiguous() && from >= 0 && from < ranks.size && from != ranks.rank);
    run(context, "receive", x.bytes(),
        [&] { ranks.receive(x.data, x.elements(), element_type(x.dtype), from, context.stream); });
}

void transfer(const Context& context, Communicator& ranks, std::span<const Transfer> transfers) {
    int64_t bytes[2] = {};
    for (const Transfer& each : transfers) {
        CHECK(each.x.contiguous() && each.peer != ranks.rank);
        bytes[each.incoming] += each.x.bytes();
    }
    if (transfers.empty()) return;
    run(context, "transfer", bytes[0] ? bytes[0] : bytes[1], [&] {
        group(ranks, [&] {
            for (const auto& [x, peer, incoming] : transfers)
                if (incoming)
                    ranks.receive(x.data, x.elements(), element_type(x.dtype), peer, context.stream);
                else
                    ranks.send(x.data, x.elements(), element_type(x.dtype), peer, context.stream);
        });
    });
}

}  // namespace llamac
