// The typed call of every operation. Written from the descriptions by `check_declarations --write`; not to be
// edited. docs/operations.md explains types and shapes.
// clang-format off
#pragma once
#include "core/typed_call.h"

namespace llamac {

// one update: clipping, moments, decoupled weight decay, rounding to storage
struct AdamwCall {
    Required weight;  // T[P]
    Tensor master = {};  // A[P]
    Required m, v;  // M[P]
    Required grad;  // G[P]
    Required squares;  // f64[1]
    Required lr;  // A[1]
    Required step;  // i32[1]
    Tensor guard = {};  // f64[1]
    Tensor scale = {};  // A[1]
    Real beta1, beta2, eps, weight_decay, grad_clip;
    Integer seed, stream, offset = 0, run = 0, distance = 0, start = 0;
};
inline void adamw(const Context& context, const AdamwCall& call) {
    run_by_name<"adamw">(context, {call.weight, call.master, call.m, call.v, call.grad, call.squares, call.lr, call.step, call.guard, call.scale}, {call.beta1, call.beta2, call.eps, call.weight_decay, call.grad_clip, call.seed, call.stream, call.offset, call.run, call.distance, call.start});
}

// adamw, and fp8 of the new weight
struct AdamwQuantizeCall {
    Tensor out = {};  // Q[K,C]
    Tensor transposed = {};  // Q[C,K]
    Required amax;  // A[1]
    Required saturated;  // i32[1]
    Required weight;  // T[K,C]
    Tensor master = {};  // A[K,C]
    Required m, v;  // M[K,C]
    Required grad;  // G[K,C]
    Required squares;  // f64[1]
    Required lr;  // A[1]
    Required step;  // i32[1]
    Required scale;  // A[1]
    Tensor guard = {};  // f64[1]
    Real beta1, beta2, eps, weight_decay, grad_clip;
    Integer seed, stream, offset = 0;
};
inline void adamw_quantize(const Context& context, const AdamwQuantizeCall& call) {
    run_by_name<"adamw_quantize">(context, {call.out, call.transposed, call.amax, call.saturated, call.weight, call.master, call.m, call.v, call.grad, call.squares, call.lr, call.step, call.scale, call.guard}, {call.beta1, call.beta2, call.eps, call.weight_decay, call.grad_clip, call.seed, call.stream, call.offset});
}

// the column of each row's largest element, the first of equals
struct ArgmaxCall {
    Required out;  // i32[N]
    Required x;  // T[N,V]
};
inline void argmax(const Context& context, const ArgmaxCall& call) {
    run_by_name<"argmax">(context, {call.out, call.x}, {});
}

// gradients of attention_forward
struct AttentionBackwardCall {
    Required dq;  // T[B,T,NH,HD]
    Required dk, dv;  // T[B,S,NKV,HD]
    Required dout, out;  // T[B,T,NH,HD]
    Required lse;  // A[B,NH,T]
    Required q;  // T[B,T,NH,HD]
    Required k, v;  // T[B,S,NKV,HD]
    Tensor first = {}, end = {};  // i32[B,T]
    Real scale;
    Flag causal = true;
    Integer window = 0;
};
inline void attention_backward(const Context& context, const AttentionBackwardCall& call) {
    run_by_name<"attention_backward">(context, {call.dq, call.dk, call.dv, call.dout, call.out, call.lse, call.q, call.k, call.v, call.first, call.end}, {call.scale, call.causal, call.window});
}

// attention of the next token of sequences to a cache, which its key and value go to
struct AttentionDecodeCall {
    Required out;  // T[B,NH,HD]
    Required keys, values;  // T[B,M,NKV,HD]
    Required q;  // T[B,NH,HD]
    Required k, v;  // T[B,NKV,HD]
    Required cis;  // A[M,HD/2,2]
    Required begin;  // i32[B]
    Required end;  // i32[1]
    Real scale;
    Integer window = 0;
};
inline void attention_decode(const Context& context, const AttentionDecodeCall& call) {
    run_by_name<"attention_decode">(context, {call.out, call.keys, call.values, call.q, call.k, call.v, call.cis, call.begin, call.end}, {call.scale, call.window});
}

// out = softmax(scale * q * transposed k) * v over the keys that a query sees
struct AttentionForwardCall {
    Required out;  // T[B,T,NH,HD]
    Required lse;  // A[B,NH,T]
    Required q;  // T[B,T,NH,HD]
    Required k, v;  // T[B,S,NKV,HD]
    Tensor first = {}, end = {};  // i32[B,T]
    Real scale;
    Flag causal = true;
    Integer window = 0;
};
inline void attention_forward(const Context& context, const AttentionForwardCall& call) {
    run_by_name<"attention_forward">(context, {call.out, call.lse, call.q, call.k, call.v, call.first, call.end}, {call.scale, call.causal, call.window});
}

// gradient of bias_forward's bias: the sums of dout's columns
struct BiasBackwardCall {
    Required dbias;  // G[K]
    Required dout;  // T[N,K]
    Flag accumulate;
};
inline void bias_backward(const Context& context, const BiasBackwardCall& call) {
    run_by_name<"bias_backward">(context, {call.dbias, call.dout}, {call.accumulate});
}

// out = x + bias
struct BiasForwardCall {
    Required out, x;  // T[N,K]
    Required bias;  // T[K]
};
inline void bias_forward(const Context& context, const BiasForwardCall& call) {
    run_by_name<"bias_forward">(context, {call.out, call.x, call.bias}, {});
}

// out += x of another type
struct ConvertCall {
    Required out;  // T[P]
    Required x;  // G[P]
    Flag accumulate;
};
inline void convert(const Context& context, const ConvertCall& call) {
    run_by_name<"convert">(context, {call.out, call.x}, {call.accumulate});
}

// losses = logsumexp(logits) - logits[target], their mean, and the gradient of logits
struct CrossEntropyCall {
    Required losses;  // A[N]
    Tensor dlogits = {};  // T[N,V]
    Tensor mean = {}, num_valid = {};  // A[]
    Required logits;  // T[N,V]
    Required targets;  // i32[N]
    Tensor dlosses = {};  // A[N]
    Real dloss;
    Integer ignore_index;
};
inline void cross_entropy(const Context& context, const CrossEntropyCall& call) {
    run_by_name<"cross_entropy">(context, {call.losses, call.dlogits, call.mean, call.num_valid, call.logits, call.targets, call.dlosses}, {call.dloss, call.ignore_index});
}

// cross-entropy and its gradient, of a rank's columns, by the softmax_parts of all ranks
struct CrossEntropyPartsCall {
    Required losses;  // A[N]
    Tensor dlogits = {};  // T[N,V]
    Required logits;  // T[N,V]
    Required targets;  // i32[N]
    Required parts;  // A[R,N,3]
    Tensor dlosses = {};  // A[N]
    Real dloss;
    Integer ignore_index;
};
inline void cross_entropy_parts(const Context& context, const CrossEntropyPartsCall& call) {
    run_by_name<"cross_entropy_parts">(context, {call.losses, call.dlogits, call.logits, call.targets, call.parts, call.dlosses}, {call.dloss, call.ignore_index});
}

// dweight[tokens] += dout, the rows of a token added before they are rounded
struct EmbeddingBackwardCall {
    Required dweight;  // G[V,C]
    Required dout;  // T[N,C]
    Required tokens;  // i32[N]
    Flag accumulate;
};
inline void embedding_backward(const Context& context, const EmbeddingBackwardCall& call) {
    run_by_name<"embedding_backward">(context, {call.dweight, call.dout, call.tokens}, {call.accumulate});
}

// out = weight[tokens] + positions[place]
struct EmbeddingForwardCall {
    Required out;  // T[N,C]
    Required tokens;  // i32[N]
    Required weight;  // T[V,C]
    Tensor positions = {};  // T[M,C]
    Tensor place = {};  // i32[N]
};
inline void embedding_forward(const Context& context, const EmbeddingForwardCall& call) {
    run_by_name<"embedding_forward">(context, {call.out, call.tokens, call.weight, call.positions, call.place}, {});
}

// out = normal numbers of a stream, from element `offset` on
struct FillNormalCall {
    Required out;  // T[P]
    Real deviation;
    Integer seed, stream, offset = 0;
};
inline void fill_normal(const Context& context, const FillNormalCall& call) {
    run_by_name<"fill_normal">(context, {call.out}, {call.deviation, call.seed, call.stream, call.offset});
}

// gradient of gelu_forward, and its result again
struct GeluBackwardCall {
    Required dx;  // T[N,F]
    Tensor out = {};  // T[N,F]
    Required dout, x;  // T[N,F]
    Tensor bias = {};  // T[F]
    Flag tanh;
};
inline void gelu_backward(const Context& context, const GeluBackwardCall& call) {
    run_by_name<"gelu_backward">(context, {call.dx, call.out, call.dout, call.x, call.bias}, {call.tanh});
}

// out = gelu(x + bias)
struct GeluForwardCall {
    Required out, x;  // T[N,F]
    Tensor bias = {};  // T[F]
    Flag tanh;
};
inline void gelu_forward(const Context& context, const GeluForwardCall& call) {
    run_by_name<"gelu_forward">(context, {call.out, call.x, call.bias}, {call.tanh});
}

// squares = sum of x^2, the square of the norm
struct GlobalNormCall {
    Required squares;  // f64[1]
    Required x;  // T[P]
    Flag accumulate;
};
inline void global_norm(const Context& context, const GlobalNormCall& call) {
    run_by_name<"global_norm">(context, {call.squares, call.x}, {call.accumulate});
}

// sum = a hash of x's memory, its lower and upper 32 bits
struct HashCall {
    Required sum;  // f64[2]
    Required x;  // bf16[P]
};
inline void hash(const Context& context, const HashCall& call) {
    run_by_name<"hash">(context, {call.sum, call.x}, {});
}

// gradients of layernorm_forward, and of residual_layernorm_forward with the sum as x
struct LayernormBackwardCall {
    Required dx;  // T[N,C]
    Required dweight, dbias;  // G[C]
    Tensor out = {};  // T[N,C]
    Required dout, x;  // T[N,C]
    Required weight;  // T[C]
    Tensor bias = {};  // T[C]
    Required mean, rstd;  // A[N]
    Tensor dresidual = {};  // T[N,C]
    Flag accumulate;
};
inline void layernorm_backward(const Context& context, const LayernormBackwardCall& call) {
    run_by_name<"layernorm_backward">(context, {call.dx, call.dweight, call.dbias, call.out, call.dout, call.x, call.weight, call.bias, call.mean, call.rstd, call.dresidual}, {call.accumulate});
}

// out = (x - mean(x)) / std(x) * weight + bias
struct LayernormForwardCall {
    Required out;  // T[N,C]
    Required mean, rstd;  // A[N]
    Required x;  // T[N,C]
    Required weight, bias;  // T[C]
    Real eps;
};
inline void layernorm_forward(const Context& context, const LayernormForwardCall& call) {
    run_by_name<"layernorm_forward">(context, {call.out, call.mean, call.rstd, call.x, call.weight, call.bias}, {call.eps});
}

// dx += dout * weight
struct MatmulBackwardInputCall {
    Required dx;  // T[N,C]
    Required dout;  // T[N,K]
    Required weight;  // T[K,C]
    Flag accumulate = false;
};
inline void matmul_backward_input(const Context& context, const MatmulBackwardInputCall& call) {
    run_by_name<"matmul_backward_input">(context, {call.dx, call.dout, call.weight}, {call.accumulate});
}

// dweight = transposed dout * x
struct MatmulBackwardWeightCall {
    Required dweight;  // G[K,C]
    Required dout;  // T[N,K]
    Required x;  // T[N,C]
    Flag accumulate;
};
inline void matmul_backward_weight(const Context& context, const MatmulBackwardWeightCall& call) {
    run_by_name<"matmul_backward_weight">(context, {call.dweight, call.dout, call.x}, {call.accumulate});
}

// out = x * transposed weight (+ residual) (+ bias)
struct MatmulForwardCall {
    Required out;  // T[N,K]
    Required x;  // T[N,C]
    Required weight;  // T[K,C]
    Tensor residual = {};  // T[N,K]
    Tensor bias = {};  // T[K]
};
inline void matmul_forward(const Context& context, const MatmulForwardCall& call) {
    run_by_name<"matmul_forward">(context, {call.out, call.x, call.weight, call.residual, call.bias}, {});
}

// mean = sum of losses / rows whose target is not ignore_index, and those rows' number
struct MeanLossCall {
    Required mean;  // A[]
    Tensor num_valid = {};  // A[]
    Required losses;  // A[N]
    Required targets;  // i32[N]
    Integer ignore_index;
};
inline void mean_loss(const Context& context, const MeanLossCall& call) {
    run_by_name<"mean_loss">(context, {call.mean, call.num_valid, call.losses, call.targets}, {call.ignore_index});
}

// cosine and sine of every position's RoPE angles
struct PrecomputeCisCall {
    Required cis;  // A[T,HD/2,2]
    Required frequency;  // f64[HD/2]
    Real attention_factor = 1;
};
inline void precompute_cis(const Context& context, const PrecomputeCisCall& call) {
    run_by_name<"precompute_cis">(context, {call.cis, call.frequency}, {call.attention_factor});
}

// gradients of qk_norm_rope_forward
struct QkNormRopeBackwardCall {
    Required dx;  // T[B,T,NH,HD]
    Required dweight;  // G[HD]
    Required dout, x;  // T[B,T,NH,HD]
    Required weight;  // T[HD]
    Required rstd;  // A[B,T,NH]
    Tensor cis = {};  // A[T,HD/2,2]
    Flag accumulate;
};
inline void qk_norm_rope_backward(const Context& context, const QkNormRopeBackwardCall& call) {
    run_by_name<"qk_norm_rope_backward">(context, {call.dx, call.dweight, call.dout, call.x, call.weight, call.rstd, call.cis}, {call.accumulate});
}

// RMSNorm of every head, then RoPE where cis is given
struct QkNormRopeForwardCall {
    Required out;  // T[B,T,NH,HD]
    Required rstd;  // A[B,T,NH]
    Required x;  // T[B,T,NH,HD]
    Required weight;  // T[HD]
    Tensor cis = {};  // A[T,HD/2,2]
    Real eps;
};
inline void qk_norm_rope_forward(const Context& context, const QkNormRopeForwardCall& call) {
    run_by_name<"qk_norm_rope_forward">(context, {call.out, call.rstd, call.x, call.weight, call.cis}, {call.eps});
}

// fp8 of x * scale, transposed too, and the largest |x|
struct QuantizeCall {
    Tensor out = {};  // Q[N,C]
    Tensor transposed = {};  // Q[C,N]
    Tensor amax = {};  // A[1]
    Tensor saturated = {};  // i32[1]
    Required x;  // T[N,C]
    Required scale;  // A[1]
};
inline void quantize(const Context& context, const QuantizeCall& call) {
    run_by_name<"quantize">(context, {call.out, call.transposed, call.amax, call.saturated, call.x, call.scale}, {});
}

// fp8 of x with a scale per row, and transposed with a scale per column
struct QuantizeRowsCall {
    Tensor out = {};  // Q[N,C]
    Tensor transposed = {};  // Q[C,N]
    Required inverse;  // A[N]
    Required inverse_transposed;  // A[C]
    Tensor saturated = {};  // i32[1]
    Required x;  // T[N,C]
    Real limit;
};
inline void quantize_rows(const Context& context, const QuantizeRowsCall& call) {
    run_by_name<"quantize_rows">(context, {call.out, call.transposed, call.inverse, call.inverse_transposed, call.saturated, call.x}, {call.limit});
}

// the gradients of a group's heads, added
struct RepeatKvBackwardCall {
    Required dx;  // T[B,T,NKV,HD]
    Required dout;  // T[B,T,NH,HD]
};
inline void repeat_kv_backward(const Context& context, const RepeatKvBackwardCall& call) {
    run_by_name<"repeat_kv_backward">(context, {call.dx, call.dout}, {});
}

// every key/value head NH/NKV times
struct RepeatKvForwardCall {
    Required out;  // T[B,T,NH,HD]
    Required x;  // T[B,T,NKV,HD]
};
inline void repeat_kv_forward(const Context& context, const RepeatKvForwardCall& call) {
    run_by_name<"repeat_kv_forward">(context, {call.out, call.x}, {});
}

// sum = x + residual, out = (sum - mean(sum)) / std(sum) * weight + bias
struct ResidualLayernormForwardCall {
    Required sum, out;  // T[N,C]
    Required mean, rstd;  // A[N]
    Required x, residual;  // T[N,C]
    Required weight, bias;  // T[C]
    Real eps;
};
inline void residual_layernorm_forward(const Context& context, const ResidualLayernormForwardCall& call) {
    run_by_name<"residual_layernorm_forward">(context, {call.sum, call.out, call.mean, call.rstd, call.x, call.residual, call.weight, call.bias}, {call.eps});
}

// sum = x + residual, out = sum / rms(sum) * weight
struct ResidualRmsnormForwardCall {
    Required sum, out;  // T[N,C]
    Required rstd;  // A[N]
    Required x, residual;  // T[N,C]
    Required weight;  // T[C]
    Real eps;
};
inline void residual_rmsnorm_forward(const Context& context, const ResidualRmsnormForwardCall& call) {
    run_by_name<"residual_rmsnorm_forward">(context, {call.sum, call.out, call.rstd, call.x, call.residual, call.weight}, {call.eps});
}

// gradients of rmsnorm_forward, and of residual_rmsnorm_forward with the sum as x
struct RmsnormBackwardCall {
    Required dx;  // T[N,C]
    Required dweight;  // G[C]
    Tensor out = {};  // T[N,C]
    Required dout, x;  // T[N,C]
    Required weight;  // T[C]
    Required rstd;  // A[N]
    Tensor dresidual = {};  // T[N,C]
    Flag accumulate;
};
inline void rmsnorm_backward(const Context& context, const RmsnormBackwardCall& call) {
    run_by_name<"rmsnorm_backward">(context, {call.dx, call.dweight, call.out, call.dout, call.x, call.weight, call.rstd, call.dresidual}, {call.accumulate});
}

// out = x / rms(x) * weight
struct RmsnormForwardCall {
    Required out;  // T[N,C]
    Required rstd;  // A[N]
    Required x;  // T[N,C]
    Required weight;  // T[C]
    Real eps;
};
inline void rmsnorm_forward(const Context& context, const RmsnormForwardCall& call) {
    run_by_name<"rmsnorm_forward">(context, {call.out, call.rstd, call.x, call.weight}, {call.eps});
}

// turns the gradient of rope_forward back
struct RopeBackwardCall {
    Required dx, dout;  // T[B,T,NH,HD]
    Required cis;  // A[T,HD/2,2]
    Flag interleaved;
};
inline void rope_backward(const Context& context, const RopeBackwardCall& call) {
    run_by_name<"rope_backward">(context, {call.dx, call.dout, call.cis}, {call.interleaved});
}

// fp8 of a gradient whose first heads are turned back, transposed too, and the largest size
struct RopeBackwardQuantizeCall {
    Tensor out = {};  // Q[N,NH,HD]
    Tensor transposed = {};  // Q[NH,HD,N]
    Tensor amax = {};  // A[1]
    Tensor saturated = {};  // i32[1]
    Required dout;  // T[N,NH,HD]
    Required cis;  // A[T,HD/2,2]
    Required scale;  // A[1]
    Integer rotated;
};
inline void rope_backward_quantize(const Context& context, const RopeBackwardQuantizeCall& call) {
    run_by_name<"rope_backward_quantize">(context, {call.out, call.transposed, call.amax, call.saturated, call.dout, call.cis, call.scale}, {call.rotated});
}

// turns every pair of a head's channels by its position's angle
struct RopeForwardCall {
    Required out, x;  // T[B,T,NH,HD]
    Required cis;  // A[T,HD/2,2]
    Flag interleaved;
};
inline void rope_forward(const Context& context, const RopeForwardCall& call) {
    run_by_name<"rope_forward">(context, {call.out, call.x, call.cis}, {call.interleaved});
}

// out = dloss * scale
struct ScaleLossCall {
    Required out, dloss, scale;  // f32[P]
};
inline void scale_loss(const Context& context, const ScaleLossCall& call) {
    run_by_name<"scale_loss">(context, {call.out, call.dloss, call.scale}, {});
}

// out += scale * row_scale * x of another type
struct ScaleRowsCall {
    Required out;  // T[K,C]
    Required x;  // G[K,C]
    Tensor row_scale = {};  // A[K]
    Real scale;
    Flag accumulate;
};
inline void scale_rows(const Context& context, const ScaleRowsCall& call) {
    run_by_name<"scale_rows">(context, {call.out, call.x, call.row_scale}, {call.scale, call.accumulate});
}

// out = a * transposed b in fp8, times both scales (+ residual)
struct ScaledMatmulCall {
    Required out;  // T[N,K]
    Required a;  // P[N,C]
    Required b;  // Q[K,C]
    Required a_scale, b_scale;  // A[1]
    Tensor residual = {};  // T[N,K]
    Flag accumulate;
    Integer fast_accum;
};
inline void scaled_matmul(const Context& context, const ScaledMatmulCall& call) {
    run_by_name<"scaled_matmul">(context, {call.out, call.a, call.b, call.a_scale, call.b_scale, call.residual}, {call.accumulate, call.fast_accum});
}

// out = a * transposed b in fp8, times the scales of both rows (+ residual)
struct ScaledMatmulRowsCall {
    Required out;  // T[N,K]
    Required a;  // P[N,C]
    Required b;  // Q[K,C]
    Required a_scale;  // A[N]
    Required b_scale;  // A[K]
    Tensor residual = {};  // T[N,K]
    Flag accumulate;
    Integer fast_accum;
};
inline void scaled_matmul_rows(const Context& context, const ScaledMatmulRowsCall& call) {
    run_by_name<"scaled_matmul_rows">(context, {call.out, call.a, call.b, call.a_scale, call.b_scale, call.residual}, {call.accumulate, call.fast_accum});
}

// out = each row's largest value, its sum of exponentials over that, its target's logit
struct SoftmaxPartsCall {
    Required out;  // A[N,3]
    Required logits;  // T[N,V]
    Required targets;  // i32[N]
};
inline void softmax_parts(const Context& context, const SoftmaxPartsCall& call) {
    run_by_name<"softmax_parts">(context, {call.out, call.logits, call.targets}, {});
}

// gradients of swiglu_forward, and its result again
struct SwigluBackwardCall {
    Required dgate_up;  // T[N,2F]
    Tensor out = {};  // T[N,F]
    Required dout;  // T[N,F]
    Required gate_up;  // T[N,2F]
};
inline void swiglu_backward(const Context& context, const SwigluBackwardCall& call) {
    run_by_name<"swiglu_backward">(context, {call.dgate_up, call.out, call.dout, call.gate_up}, {});
}

// fp8 of the gradients of gate and up, transposed too, and the largest size
struct SwigluBackwardQuantizeCall {
    Tensor out = {};  // Q[N,2F]
    Tensor transposed = {};  // Q[2F,N]
    Tensor amax = {};  // A[1]
    Tensor saturated = {};  // i32[1]
    Required dout;  // T[N,F]
    Required gate_up;  // T[N,2F]
    Required scale;  // A[1]
};
inline void swiglu_backward_quantize(const Context& context, const SwigluBackwardQuantizeCall& call) {
    run_by_name<"swiglu_backward_quantize">(context, {call.out, call.transposed, call.amax, call.saturated, call.dout, call.gate_up, call.scale}, {});
}

// out = silu(gate) * up
struct SwigluForwardCall {
    Required out;  // T[N,F]
    Required gate_up;  // T[N,2F]
};
inline void swiglu_forward(const Context& context, const SwigluForwardCall& call) {
    run_by_name<"swiglu_forward">(context, {call.out, call.gate_up}, {});
}

// fp8 of silu(gate) * up, transposed too, and the largest size
struct SwigluForwardQuantizeCall {
    Tensor out = {};  // Q[N,F]
    Tensor transposed = {};  // Q[F,N]
    Tensor amax = {};  // A[1]
    Tensor saturated = {};  // i32[1]
    Required gate_up;  // T[N,2F]
    Required scale;  // A[1]
};
inline void swiglu_forward_quantize(const Context& context, const SwigluForwardQuantizeCall& call) {
    run_by_name<"swiglu_forward_quantize">(context, {call.out, call.transposed, call.amax, call.saturated, call.gate_up, call.scale}, {});
}

// out = the position of each token in its sequence
struct TokenPositionsCall {
    Required out;  // i32[B,T]
    Tensor first = {};  // i32[B,T]
    Tensor begin = {};  // i32[B]
    Tensor end = {};  // i32[1]
    Integer offset;
};
inline void token_positions(const Context& context, const TokenPositionsCall& call) {
    run_by_name<"token_positions">(context, {call.out, call.first, call.begin, call.end}, {call.offset});
}

// the loss's scale and the number of AdamW's step after a step that may have been skipped
struct UpdateLossScaleCall {
    Required scale;  // f32[P]
    Required counts;  // i32[P,2]
    Required squares, guard;  // f64[P]
    Integer interval;
};
inline void update_loss_scale(const Context& context, const UpdateLossScaleCall& call) {
    run_by_name<"update_loss_scale">(context, {call.scale, call.counts, call.squares, call.guard}, {call.interval});
}

// scales of fp8 from the largest values, which begin anew
struct UpdateScalesCall {
    Required scale;  // f32[P]
    Required inverse;  // f32[P,4]
    Required amax;  // f32[P]
    Tensor largest = {};  // f32[P]
    Required limit;  // f32[P]
    Tensor unit = {};  // f32[P]
};
inline void update_scales(const Context& context, const UpdateScalesCall& call) {
    run_by_name<"update_scales">(context, {call.scale, call.inverse, call.amax, call.largest, call.limit, call.unit}, {});
}

// out = ids - first, or `other` for those of other ranks
struct VocabularyIdsCall {
    Required out, ids;  // i32[N]
    Integer first, count, other;
};
inline void vocabulary_ids(const Context& context, const VocabularyIdsCall& call) {
    run_by_name<"vocabulary_ids">(context, {call.out, call.ids}, {call.first, call.count, call.other});
}

}  // namespace llamac
