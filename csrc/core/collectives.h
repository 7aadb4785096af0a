// Collectives of tensors: platform/ranks/communicator.h with the dtypes' table and the observer. Tensors are
// contiguous. Each call is enqueued on context.stream.
#pragma once
#include <functional>

#include "core/context.h"
#include "core/tensor.h"
#include "platform/ranks/communicator.h"

namespace llamac {

// x = its reduction over the ranks.
void all_reduce(const Context& context, Communicator& ranks, const Tensor& x,
                Reduction reduction = Reduction::sum);
// out = the reduction of the own of `in`'s equal parts; out may be that part.
void reduce_scatter(const Context& context, Communicator& ranks, const Tensor& out, const Tensor& in,
                    Reduction reduction = Reduction::sum);
// out's equal parts = everybody's `in`, which may be the own part.
void all_gather(const Context& context, Communicator& ranks, const Tensor& out, const Tensor& in);
// Calls of all_gather, or of reduce_scatter, as one, which is faster; what they are given must not overlap. name: of what
// is called; bytes: all that the ranks hold after it, or before.
void grouped(const Context& context, Communicator& ranks, const char* name, int64_t bytes,
             const std::function<void()>& calls);
// x = that of rank `root`.
void broadcast(const Context& context, Communicator& ranks, const Tensor& x, int64_t root);
void send(const Context& context, Communicator& ranks, const Tensor& x, int64_t to);
void receive(const Context& context, Communicator& ranks, const Tensor& x, int64_t from);

}  // namespace llamac
