// Collectives on contiguous tensors: platform/ranks/communicator.h with the table of dtypes and the observer. Each call is
// enqueued on context.stream.
#pragma once
#include <functional>
#include <span>

#include "core/context.h"
#include "core/observer.h"
#include "core/tensor.h"
#include "platform/ranks/communicator.h"

namespace llamac {

// x = its reduction over the ranks.
void all_reduce(const Context& context, Communicator& ranks, const Tensor& x,
                Reduction reduction = Reduction::sum);
// out = the reduction of this rank's part of `in`; out may be that part.
void reduce_scatter(const Context& context, Communicator& ranks, const Tensor& out, const Tensor& in,
                    Reduction reduction = Reduction::sum);
// The parts of out = `in` of each rank; in may be this rank's part.
void all_gather(const Context& context, Communicator& ranks, const Tensor& out, const Tensor& in);
// Runs calls of all_gather or of reduce_scatter as one, which is faster; their operands must not overlap. name, bytes: for
// the observer.
void grouped(const Context& context, Communicator& ranks, const char* name, int64_t bytes,
             const std::function<void()>& calls);
// What a dry run, which has no communicators, tells its observer instead of a call. bytes: as all_gather's and reduce_scatter's
// larger tensor has them; all_reduce moves them twice.
void plan_exchange(const Context& context, ExchangeAxis axis, int64_t ranks, int64_t bytes);
// x = x of rank `root`.
void broadcast(const Context& context, Communicator& ranks, const Tensor& x, int64_t root);
void send(const Context& context, Communicator& ranks, const Tensor& x, int64_t to);
void receive(const Context& context, Communicator& ranks, const Tensor& x, int64_t from);
// Messages that are sent and received as one: none waits for another one of this rank. At most one goes from a rank to another.
struct Transfer {
    Tensor x;
    int64_t peer;
    bool incoming;
};
void transfer(const Context& context, Communicator& ranks, std::span<const Transfer> transfers);

}  // namespace llamac
