#include "model/model.h"

#include <cmath>
#include <numeric>

namespace llamac {
namespace {

constexpr int64_t ignore_index = -100;  // PyTorch's

void call(const Model& m, const char* op, std::initializer_list<Tensor> outputs,
          std::initializer_list<Tensor> inputs, std::initializer_list<Scalar> scalars = {}) {
    run(op, outputs, inputs, scalars, m.queue);
}

void show(const Model& m, const std::string& name, const Tensor& value) {
    if (m.tap) m.tap(name, value);
}
std::string block_name(const char* prefix, int64_t layer) {
    return prefix + std::to_string(layer) + ".";
}

// heads [B,T,count,HD] out of joined rows [N,QKV], the first of them at head `first`.
Tensor heads(const Model& m, const Tensor& rows, int64_t first, int64_t count) {
    const int64_t B = m.activations.tokens.shape[0], T = m.activations.tokens.shape[1], HD = m.config.HD;
    const int64_t row = rows.shape[1];
    Tensor t = make_tensor(static_cast<char*>(rows.data) + first * HD * size_of(rows.dtype), rows.dtype,
                           {B, T, count, HD});
    t.stride[0] = T * row;
    t.stride[1] = row;
    return t;
}
struct Heads {
    Tensor q, k, v, rotated;  // rotated: queries and keys, which RoPE turns alike
};
Heads split_heads(const Model& m, const Tensor& qkv) {
    const int64_t NH = m.config.NH, NKV = m.config.NKV;
    return {heads(m, qkv, 0, NH), heads(m, qkv, NH, NKV), heads(m, qkv, NH + NKV, NKV),
            heads(m, qkv, 0, NH + NKV)};
}
Tensor attention_heads(const Model& m, const Tensor& attention) {
    return heads(m, attention, 0, m.config.NH);
}
double attention_scale(const Model& m) {
    return 1.0 / std::sqrt(static_cast<double>(m.config.HD));
}

Tensor residual_in(const Model& m, int64_t layer) {
    return layer ? m.activations.blocks[layer - 1].residual_out : m.activations.embedding;
}

// Runs the parts of a block that are asked for: all in the forward pass, those thrown away in the backward
// pass.
void forward_block(Model& m, int64_t layer, unsigned parts) {
    const Parameters& p = m.parameters;
    const BlockParameters w = block_parameters(layer);
    const BlockActivations& a = m.activations.blocks[layer];
    const Tensor in = residual_in(m, layer);
    if (parts & input_norm_part)
        call(m, "rmsnorm_forward", {a.input_norm, a.input_rstd}, {in, p.weight(w.input_norm)},
             {m.config.eps});
    const Heads h = split_heads(m, a.qkv);
    if (parts & qkv_part) {
        call(m, "matmul_forward", {a.qkv}, {a.input_norm, p.weight(w.qkv, 3), Tensor{}});
        call(m, "rope_forward", {h.rotated}, {h.rotated, m.activations.cis}, {false});
    }
    if (parts & attention_part)
        call(m, "attention_forward", {attention_heads(m, a.attention), a.lse}, {h.q, h.k, h.v},
             {attention_scale(m)});
    if (parts & residual_mid_part)
        call(m, "matmul_forward", {a.residual_mid}, {a.attention, p.weight(w.o), in});
    if (parts & post_norm_part)
        call(m, "rmsnorm_forward", {a.post_norm, a.post_rstd}, {a.residual_mid, p.weight(w.post_norm)},
             {m.config.eps});
    if (parts & gate_up_part)
        call(m, "matmul_forward", {a.gate_up}, {a.post_norm, p.weight(w.gate_up, 2), Tensor{}});
    if (parts & swiglu_part) call(m, "swiglu_forward", {a.swiglu}, {a.gate_up});
    if (parts & residual_out_part)
        call(m, "matmul_forward", {a.residual_out}, {a.swiglu, p.weight(w.down), a.residual_mid});
}

void show_block(const Model& m, int64_t layer) {
    if (!m.tap) return;
    const BlockActivations& a = m.activations.blocks[layer];
    const Heads h = split_heads(m, a.qkv);
    const std::string name = block_name("act.", layer);
    const std::pair<const char*, Tensor> shown[] = {{"input_norm", a.input_norm},
                                                    {"input_rstd", a.input_rstd},
                                                    {"q", h.q},
                                                    {"k", h.k},
                                                    {"v", h.v},
                                                    {"attention", a.attention},
                                                    {"attention_lse", a.lse},
                                                    {"residual_mid", a.residual_mid},
                                                    {"post_norm", a.post_norm},
                                                    {"post_rstd", a.post_rstd},
                                                    {"gate_up", a.gate_up},
                                                    {"swiglu", a.swiglu},
                                                    {"residual_out", a.residual_out}};
    for (const auto& [what, value] : shown) show(m, name + what, value);
}

// Embedding to final norm.
void forward_trunk(Model& m) {
    const Activations& a = m.activations;
    call(m, "embedding_forward", {a.embedding},
         {reshape(a.tokens, {a.tokens.elements()}), m.parameters.weight(embedding_parameter)});
    show(m, "act.embedding", a.embedding);
    for (int64_t layer = 0; layer < m.config.L; layer++) {
        forward_block(m, layer, all_parts);
        show_block(m, layer);
    }
    const Tensor weight = m.parameters.weight(final_norm_parameter(m.config));
    call(m, "rmsnorm_forward", {a.final_norm, a.final_rstd}, {residual_in(m, m.config.L), weight},
         {m.config.eps});
    show(m, "act.final_norm", a.final_norm);
}

// rows first .. first+count of a [N,X] tensor, or of a [N] one.
Tensor slice_rows(const Tensor& t, int64_t first, int64_t count) {
    Tensor s = t;
    s.data = static_cast<char*>(t.data) + first * t.stride[0] * size_of(t.dtype);
    s.shape[0] = count;
    return s;
}

struct HeadGradient {  // what the head computes on top of the losses; nothing where wanted is false
    bool wanted = false, accumulate = false;
    double dloss = 0;
};

// LM head and cross-entropy, a chunk of rows at a time, so that the logits never exist as a whole; with
// gradients, the logits' gradient takes the logits' place and is used before the next chunk.
void run_head(Model& m, const HeadGradient& gradient) {
    const Activations& a = m.activations;
    const int64_t N = a.losses.shape[0];
    const Tensor weight = m.parameters.weight(m.parameters.head), all_targets = reshape(a.targets, {N});
    const int64_t chunk = a.logits.shape[0];
    for (int64_t first = 0; first < N; first += chunk) {
        const int64_t count = std::min(chunk, N - first);
        const Tensor x = slice_rows(a.final_norm, first, count), logits = slice_rows(a.logits, 0, count);
        const Tensor losses = slice_rows(a.losses, first, count),
                     chunk_targets = slice_rows(all_targets, first, count);
        call(m, "matmul_forward", {logits}, {x, weight, Tensor{}});
        show(m, "logits", logits);
        const Tensor dlogits = gradient.wanted ? logits : Tensor{};
        call(m, "cross_entropy", {losses, dlogits, Tensor{}, Tensor{}}, {logits, chunk_targets, Tensor{}},
             {gradient.dloss, ignore_index});
        if (!gradient.wanted) continue;
        show(m, "dact.logits", dlogits);
        call(m, "matmul_backward_input", {slice_rows(a.dnorm, first, count)}, {dlogits, weight});
        call(m, "matmul_backward_weight", {m.parameters.gradient(m.parameters.head)}, {dlogits, x},
             {gradient.accumulate || first > 0});
    }
    show(m, "losses", a.losses);
}

// dresidual enters as the gradient of the block's output and leaves as that of its input. again: parts whose result was
// thrown away and whose backward, which reads what it was made of anyway, writes it once more.
void backward_feed_forward(Model& m, int64_t layer, unsigned again, bool accumulate) {
    const Parameters& p = m.parameters;
    const BlockParameters w = block_parameters(layer);
    const BlockActivations& a = m.activations.blocks[layer];
    const Activations& d = m.activations;
    const std::string name = block_name("dact.", layer);
    call(m, "matmul_backward_input", {d.dswiglu}, {d.dresidual, p.weight(w.down)});
    show(m, name + "swiglu", d.dswiglu);
    call(m, "swiglu_backward", {d.dgate_up, again & swiglu_part ? a.swiglu : Tensor{}},
         {d.dswiglu, a.gate_up});
    show(m, name + "gate_up", d.dgate_up);
    call(m, "matmul_backward_weight", {p.gradient(w.down)}, {d.dresidual, a.swiglu}, {accumulate});
    call(m, "matmul_backward_input", {d.dnorm}, {d.dgate_up, p.weight(w.gate_up, 2)});
    show(m, name + "post_norm", d.dnorm);
    call(m, "rmsnorm_backward",
         {d.dresidual, p.gradient(w.post_norm), again & post_norm_part ? a.post_norm : Tensor{}},
         {d.dnorm, a.residual_mid, p.weight(w.post_norm), a.post_rstd, d.dresidual}, {accumulate});
    call(m, "matmul_backward_weight", {p.gradient(w.gate_up, 2)}, {d.dgate_up, a.post_norm}, {accumulate});
    show(m, name + "residual_mid", d.dresidual);
}

void backward_attention(Model& m, int64_t layer, unsigned again, bool accumulate) {
    const Parameters& p = m.parameters;
    const BlockParameters w = block_parameters(layer);
    const BlockActivations& a = m.activations.blocks[layer];
    const Activations& d = m.activations;
    const std::string name = block_name("dact.", layer);
    call(m, "matmul_backward_input", {d.dattention}, {d.dresidual, p.weight(w.o)});
    call(m, "matmul_backward_weight", {p.gradient(w.o)}, {d.dresidual, a.attention}, {accumulate});
    show(m, name + "attention", d.dattention);
    const Heads h = split_heads(m, a.qkv), dh = split_heads(m, d.dqkv);
    call(m, "attention_backward", {dh.q, dh.k, dh.v},
         {attention_heads(m, d.dattention), attention_heads(m, a.attention), a.lse, h.q, h.k, h.v},
         {attention_scale(m)});
    show(m, name + "q", dh.q);
    show(m, name + "k", dh.k);
    show(m, name + "v", dh.v);
    call(m, "rope_backward", {dh.rotated}, {dh.rotated, d.cis}, {false});
    call(m, "matmul_backward_input", {d.dnorm}, {d.dqkv, p.weight(w.qkv, 3)});
    show(m, name + "input_norm", d.dnorm);
    call(m, "rmsnorm_backward",
         {d.dresidual, p.gradient(w.input_norm), again & input_norm_part ? a.input_norm : Tensor{}},
         {d.dnorm, residual_in(m, layer), p.weight(w.input_norm), a.input_rstd, d.dresidual}, {accumulate});
    call(m, "matmul_backward_weight", {p.gradient(w.qkv, 3)}, {d.dqkv, a.input_norm}, {accumulate});
}

// Of the parts to compute again, those that no other needs: their own backward writes their result, which only the
// gradient of the next product's weight reads.
unsigned written_again(unsigned again) {
    unsigned written = again & swiglu_part;
    if (!(again & qkv_part)) written |= again & input_norm_part;
    if (!(again & gate_up_part)) written |= again & post_norm_part;
    return written;
}

// From the final norm's gradient, in dnorm, down to the embedding.
void backward_trunk(Model& m, bool accumulate) {
    const Activations& a = m.activations;
    const Parameters& p = m.parameters;
    const size_t norm = final_norm_parameter(m.config);
    show(m, "dact.final_norm", a.dnorm);
    call(m, "rmsnorm_backward", {a.dresidual, p.gradient(norm), Tensor{}},
         {a.dnorm, residual_in(m, m.config.L), p.weight(norm), a.final_rstd, Tensor{}}, {accumulate});
    for (int64_t layer = m.config.L - 1; layer >= 0; layer--) {
        show(m, block_name("dact.", layer) + "residual_out", a.dresidual);
        const unsigned again = recomputed_parts(m.options.recompute, layer), written = written_again(again);
        forward_block(m, layer, again & ~written);
        backward_feed_forward(m, layer, written, accumulate);
        backward_attention(m, layer, written, accumulate);
    }
    show(m, "dact.embedding", a.dresidual);
    call(m, "embedding_backward", {p.gradient(embedding_parameter)},
         {a.dresidual, reshape(a.tokens, {a.tokens.elements()})},
         {accumulate || m.config.tied});  // tied: the head has written its share already
}

void make_cis(const Model& m) {
    const RopeScaling& s = m.config.rope_scaling;
    call(m, "precompute_cis", {m.activations.cis}, {},
         {m.config.rope_theta, s.factor, s.low_freq_factor, s.high_freq_factor,
          static_cast<double>(s.original_context)});
}

}  // namespace

Model::Model(const Config& config_, const ModelOptions& options_)
    : config(config_), options(options_), queue(computing_queue()) {
    queue.stream = stream.handle;
    queue.workspace = &workspace;
    plan_parameters(parameters, config, options.precision, arena);
    plan_activations(activations, config, options.batch_size, options.seq_len, options.precision.weights,
                     options.recompute, options.logits_bytes, arena);
    arena.plan("scalars", &grad_norm, shaped(DType::f32, {1}));
    arena.plan("scalars", &lr, shaped(DType::f32, {1}));
    arena.plan("scalars", &step, shaped(DType::i32, {1}));

    // A step that only asks its operations what they work in, on addresses that nobody reads.
    arena.place(reinterpret_cast<void*>(uintptr_t{1} << 20));
    reshape_activations(activations, config, options.batch_size, options.seq_len);
    queue.rehearsal = true;
    make_cis(*this);
    forward(*this);
    forward_backward(*this, true, 1);
    forward_backward(*this, false, 1);
    llamac::update(*this, {}, 0);
    queue.rehearsal = false;
    if (workspace.asked)
        arena.plan("work space of operations", &workspace_bytes,
                   shaped(DType::i32, {(workspace.asked + 3) / 4}));
}

void Model::allocate() {
    arena.allocate();
    if (workspace_bytes.data) workspace.use(workspace_bytes.data, workspace_bytes.bytes());
    make_cis(*this);
}

void set_batch(Model& m, const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T) {
    CHECK(B * T <= m.options.batch_size * m.options.seq_len && T <= m.options.seq_len);
    const Activations& a = m.activations;
    reshape_activations(m.activations, m.config, B, T);
    copy_bytes_async(a.tokens.data, tokens, a.tokens.bytes(), m.stream.handle);
    copy_bytes_async(a.targets.data, targets, a.targets.bytes(), m.stream.handle);
}

void forward(Model& m) {
    forward_trunk(m);
    run_head(m, {});
}

void forward_backward(Model& m, bool first, double scale) {
    forward_trunk(m);
    run_head(m, {true, !first, scale / static_cast<double>(m.activations.losses.shape[0])});
    backward_trunk(m, !first);
}

void set_update(Model& m, const float* lr, const int32_t* step) {
    copy_bytes_async(m.lr.data, lr, sizeof *lr, m.stream.handle);
    copy_bytes_async(m.step.data, step, sizeof *step, m.stream.handle);
}

void update(Model& m, const AdamW& adamw, uint64_t seed) {
    const Parameters& p = m.parameters;
    call(m, "global_norm", {m.grad_norm}, {p.gradients}, {false});
    for (size_t k = 0; k < p.table.size(); k++) {
        const int64_t n = p.table[k].elements;
        const Tensor master = p.master.data ? reshape(p.view(p.master, k), {n}) : Tensor{};
        const double decay = p.table[k].is_matrix() ? adamw.weight_decay : 0.0;
        call(m, "adamw",
             {reshape(p.weight(k), {n}), master, reshape(p.view(p.m, k), {n}), reshape(p.view(p.v, k), {n})},
             {reshape(p.gradient(k), {n}), m.grad_norm, m.lr, m.step},
             {adamw.beta1, adamw.beta2, adamw.eps, decay, adamw.grad_clip, static_cast<int64_t>(seed),
              static_cast<int64_t>(4 * k)});
    }
}

double mean(const float* losses, int64_t count) {
    return std::accumulate(losses, losses + count, 0.0) / static_cast<double>(count);
}

double mean_loss(const Model& m) {
    const Tensor& losses = m.activations.losses;
    std::vector<float> values(static_cast<size_t>(losses.elements()));
    copy_bytes(values.data(), losses.data, losses.bytes());
    return mean(values.data(), losses.elements());
}

void next_logits(Model& m, const int32_t* tokens, int64_t T, std::vector<float>& logits) {
    set_batch(m, tokens, tokens, 1, T);  // no losses are made: targets are not read
    forward_trunk(m);
    const Tensor row = slice_rows(m.activations.logits, 0, 1);
    call(m, "matmul_forward", {row},
         {slice_rows(m.activations.final_norm, T - 1, 1), m.parameters.weight(m.parameters.head), Tensor{}});
    logits.resize(static_cast<size_t>(m.config.V));
    HostCopy copy(row.data, row.bytes());
    const void* values = copy.from_device().data;
    for (size_t v = 0; v < logits.size(); v++)
        logits[v] = row.dtype == DType::f32 ? static_cast<const float*>(values)[v]
                                            : float(static_cast<const bf16*>(values)[v]);
}

}  // namespace llamac
