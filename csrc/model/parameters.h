// The table of parameters: it drives allocation, initialization, files, optimizer groups, the counts of parameters and
// FLOPs, and the memory report.
#pragma once
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/context.h"
#include "core/tensor.h"
#include "model/config.h"
#include "model/mesh.h"
#include "model/sharding.h"

namespace llamac {

struct Precision {
    DType weights = DType::f32;  // and activations
    DType gradients = DType::f32;
    DType moments = DType::f32;
    // Master weights in the type of the arithmetic beside narrower weights, which without them are rounded
    // stochastically.
    bool master = true;

    bool keeps_master() const { return master && is_narrow(weights); }
};

// A parameter in each buffer with one element per parameter. Fused parameters are contiguous and are one FlatParam, a matrix
// with the rows of all. Frozen ones are in Parameters::frozen only.
struct FlatParam {
    int64_t offset = 0;               // in elements
    std::vector<int64_t> shape = {};  // [out,in] or [C]
    int64_t segment = 0;              // where it lies: Parameters::segments
    int64_t shard = 0;                // elements of each shard, the last of which may end in padding
    bool trains = true;
    std::optional<Split> split = {};  // by tensor parallelism: other ranks hold the other parts
    bool partial = false;             // whether the gradient is a sum over the tensor axis
    bool is_copy = false;             // of the embedding, which another stage holds too, and writes to files
    bool coded = false;               // frozen, in fp8: `offset` is that in Parameters::codes
    int64_t first_row = 0;            // of its codes: in Parameters::code_scales
    // Of a frozen matrix: room behind each row, or behind the last, for what adapters add to its products (model/lora.h).
    int64_t spare_columns = 0, spare_rows = 0;

    int64_t elements() const;
    // With the spare ones.
    int64_t elements_with_room() const;
    // Whether the matrix of files and initial values is in Parameters::decoded, and encode() and decode() convert it.
    bool is_encoded() const { return coded || spare_columns > 0; }
};

// A range of a buffer that is gathered and reduced together: the embedding, each block, the final norm with the head.
struct Segment {
    int64_t offset = 0, elements = 0;
    std::vector<FlatParam> flat_params = {};
};

// Of a linear with low-rank adapters (model/lora.h): A of its targets, which are rows of one matrix; Bᵀ of each target, or B
// where the weight has spare columns.
struct Adapter {
    FlatParam a;
    std::array<FlatParam, 3> b;
};

struct BlockParameters {
    FlatParam input_norm, qkv, q_norm, k_norm, o, post_norm, gate_up, down;
    // Biases, of norms and of products.
    FlatParam input_norm_bias, qkv_bias, o_bias, post_norm_bias, gate_up_bias, down_bias;
    Adapter qkv_adapter, o_adapter, gate_up_adapter, down_adapter;
};

struct ModelParameters {
    FlatParam embedding, positions;
    std::vector<BlockParameters> blocks;
    FlatParam types;  // of tokens
    FlatParam final_norm, final_norm_bias;
    FlatParam transform, transform_bias, transform_norm, transform_norm_bias, head_bias;  // of BERT's head
    FlatParam pooler, pooler_bias, next_sentence, next_sentence_bias;  // of BERT, which files carry
    FlatParam head;  // makes the logits; the embedding where they are tied
};

enum class Update : uint8_t { none, adamw };  // by an optimizer step; none: the parameter does not train

struct ParameterGroup {
    std::optional<float> initial;  // the value of all elements; none: normal, with Config::initializer_range
    bool decays;                   // weight decay applies
    bool multiplied;               // takes part in a matrix product, which counts as FLOPs
    Update update = Update::adamw;
    bool adapter = false;  // trains beside frozen weights; `initial` of none: as PEFT draws A
};
constexpr ParameterGroup matrices{{}, true, true}, norms{1.0f, false, false}, biases{0.0f, false, false},
    carried{0.0f, false, false, Update::none};

constexpr ParameterGroup adapters_a{{}, true, true, Update::adamw, true},
    adapters_b{0.0f, true, true, Update::adamw, true};

// Low-rank adapters of all linears with these names: q, k, v, o, gate, up, down. rank 0: none.
struct Lora {
    int64_t rank = 0;
    double alpha = 0;
    std::vector<std::string> targets = {};

    double scale() const { return alpha / static_cast<double>(rank); }
};

// The layers [first, end) that a model holds. The embedding belongs to layer 0, the final norm and the head to the last layer.
struct LayerRange {
    int64_t first = 0, end = 0;
};

// A row of the table, with the sizes of this rank. Consecutive rows of one flat parameter are fused.
struct ParameterRow {
    std::string name;  // Hugging Face's
    FlatParam* flat;
    std::vector<int64_t> shape;
    ParameterGroup group;
    bool present = true;
    bool transposed = false;  // in files: [in,out]
    int64_t padding = 0;      // rows of zeros behind it in memory
    int64_t blocks = 1;       // of rows, as many matrices as files have in this one
    bool is_copy = false;     // of the embedding
};

// The name of BERT's norm that makes the input of layer `layer`: of the embedding, or of the output of the layer before.
inline std::string norm_before(int64_t layer) {
    return layer ? "encoder.layer." + std::to_string(layer - 1) + ".output.LayerNorm."
                 : "embeddings.LayerNorm.";
}

// Before the names of layer `layer`.
std::string block_prefix(const Config& config, int64_t layer);

// In the order of files and of random streams.
inline std::vector<ParameterRow> block_parameters(const Config& c, BlockParameters& p, int64_t layer = 0) {
    const auto linear = [](const char* name, FlatParam* flat, int64_t outputs, int64_t inputs,
                           int64_t blocks = 1) {
        return ParameterRow{name, flat, {outputs, inputs}, matrices, true, true, 0, blocks};
    };
    if (c.is_gpt2())
        return {{"ln_1.weight", &p.input_norm, {c.C}, norms},
                {"ln_1.bias", &p.input_norm_bias, {c.C}, biases},
                linear("attn.c_attn.weight", &p.qkv, c.qkv_size(), c.C, 3),
                {"attn.c_attn.bias", &p.qkv_bias, {c.qkv_size()}, biases, true, false, 0, 3},
                linear("attn.c_proj.weight", &p.o, c.C, c.q_size()),
                {"attn.c_proj.bias", &p.o_bias, {c.C}, biases},
                {"ln_2.weight", &p.post_norm, {c.C}, norms},
                {"ln_2.bias", &p.post_norm_bias, {c.C}, biases},
                linear("mlp.c_fc.weight", &p.gate_up, c.F, c.C),
                {"mlp.c_fc.bias", &p.gate_up_bias, {c.F}, biases},
                linear("mlp.c_proj.weight", &p.down, c.C, c.F),
                {"mlp.c_proj.bias", &p.down_bias, {c.C}, biases}};
    if (c.is_bert()) {
        const std::string before = norm_before(layer), own = "encoder.layer." + std::to_string(layer) + ".",
                          attention = own + "attention.", in = attention + "self.",
                          out = attention + "output.";
        return {{before + "weight", &p.input_norm, {c.C}, norms},
                {before + "bias", &p.input_norm_bias, {c.C}, biases},
                {in + "query.weight", &p.qkv, {c.C, c.C}, matrices},
                {in + "key.weight", &p.qkv, {c.C, c.C}, matrices},
                {in + "value.weight", &p.qkv, {c.C, c.C}, matrices},
                {in + "query.bias", &p.qkv_bias, {c.C}, biases},
                {in + "key.bias", &p.qkv_bias, {c.C}, biases},
                {in + "value.bias", &p.qkv_bias, {c.C}, biases},
                {out + "dense.weight", &p.o, {c.C, c.C}, matrices},
                {out + "dense.bias", &p.o_bias, {c.C}, biases},
                {out + "LayerNorm.weight", &p.post_norm, {c.C}, norms},
                {out + "LayerNorm.bias", &p.post_norm_bias, {c.C}, biases},
                {own + "intermediate.dense.weight", &p.gate_up, {c.F, c.C}, matrices},
                {own + "intermediate.dense.bias", &p.gate_up_bias, {c.F}, biases},
                {own + "output.dense.weight", &p.down, {c.C, c.F}, matrices},
                {own + "output.dense.bias", &p.down_bias, {c.C}, biases}};
    }
    // With output_norm, each norm follows the linears that read its input in other models.
    FlatParam& post_attention = c.output_norm ? p.input_norm : p.post_norm;
    return {{"input_layernorm.weight", &p.input_norm, {c.C}, norms, !c.output_norm},
            {"self_attn.qkv_proj.weight", &p.qkv, {c.qkv_size(), c.C}, matrices, c.is_fused, false, 0, 3},
            {"self_attn.q_proj.weight", &p.qkv, {c.q_size(), c.C}, matrices, !c.is_fused},
            {"self_attn.k_proj.weight", &p.qkv, {c.kv_size(), c.C}, matrices, !c.is_fused},
            {"self_attn.v_proj.weight", &p.qkv, {c.kv_size(), c.C}, matrices, !c.is_fused},
            {"self_attn.q_proj.bias", &p.qkv_bias, {c.q_size()}, biases, c.qkv_bias},
            {"self_attn.k_proj.bias", &p.qkv_bias, {c.kv_size()}, biases, c.qkv_bias},
            {"self_attn.v_proj.bias", &p.qkv_bias, {c.kv_size()}, biases, c.qkv_bias},
            {"self_attn.q_norm.weight", &p.q_norm, {c.joint_qk_norm ? c.q_size() : c.HD}, norms, c.qk_norm},
            {"self_attn.k_norm.weight", &p.k_norm, {c.joint_qk_norm ? c.kv_size() : c.HD}, norms, c.qk_norm},
            {"self_attn.o_proj.weight", &p.o, {c.C, c.q_size()}, matrices},
            {"post_attention_layernorm.weight", &post_attention, {c.C}, norms},
            {"mlp.gate_up_proj.weight", &p.gate_up, {2 * c.F, c.C}, matrices, c.is_fused, false, 0, 2},
            {"mlp.gate_proj.weight", &p.gate_up, {c.F, c.C}, matrices, !c.is_fused},
            {"mlp.up_proj.weight", &p.gate_up, {c.F, c.C}, matrices, !c.is_fused},
            {"mlp.down_proj.weight", &p.down, {c.C, c.F}, matrices},
            {"post_feedforward_layernorm.weight", &p.post_norm, {c.C}, norms, c.output_norm}};
}

// A linear of Hugging Face's with adapters.
struct LoraTarget {
    const char *name, *module;
    Adapter BlockParameters::* adapter;
    int64_t first, outputs;  // its rows in the weight that is fused of several
    int64_t inputs;
    int64_t index = 0;  // among the targets that are fused with it

    // Where the largest matrices are written, the output of gate_up and the input's gradient of down, the product with the weight
    // sums over the rank, too: it reads [W | B], or [W ; A].
    bool joins_columns() const { return adapter == &BlockParameters::gate_up_adapter; }
    bool joins_rows() const { return adapter == &BlockParameters::down_adapter; }
};
// In the order of block_linears.
std::vector<LoraTarget> lora_targets(const Config& config, const Lora& lora);
std::vector<ParameterRow> adapter_parameters(const Config& config, BlockParameters& p, const Lora& lora);

inline std::vector<ParameterRow> parameters_before_blocks(const Config& c, ModelParameters& p) {
    const ParameterGroup table{{}, true, c.tied};
    const int64_t padding = c.padded_V() - c.V;
    if (c.is_gpt2())
        return {{"transformer.wte.weight", &p.embedding, {c.V, c.C}, table, true, false, padding},
                {"transformer.wpe.weight", &p.positions, {c.max_context, c.C}, {{}, true, false}}};
    if (c.is_bert())
        return {
            {"bert.embeddings.word_embeddings.weight", &p.embedding, {c.V, c.C}, table, true, false, padding},
            {"bert.embeddings.position_embeddings.weight",
             &p.positions,
             {c.max_context, c.C},
             {{}, true, false}},
            {"bert.embeddings.token_type_embeddings.weight",
             &p.types,
             {c.token_types, c.C},
             {{}, true, false}}};
    return {{"model.embed_tokens.weight", &p.embedding, {c.V, c.C}, table, true, false, padding}};
}
inline std::vector<ParameterRow> parameters_after_blocks(const Config& c, ModelParameters& p) {
    const ParameterRow head{"lm_head.weight", &p.head, {c.V, c.C},        matrices,
                            !c.tied,          false,   c.padded_V() - c.V};
    if (c.is_gpt2())
        return {{"transformer.ln_f.weight", &p.final_norm, {c.C}, norms},
                {"transformer.ln_f.bias", &p.final_norm_bias, {c.C}, biases},
                head};
    if (c.is_bert()) {
        const std::string norm = "bert." + norm_before(c.L), transform = "cls.predictions.transform.";
        return {{norm + "weight", &p.final_norm, {c.C}, norms},
                {norm + "bias", &p.final_norm_bias, {c.C}, biases},
                {transform + "dense.weight", &p.transform, {c.C, c.C}, matrices},
                {transform + "dense.bias", &p.transform_bias, {c.C}, biases},
                {transform + "LayerNorm.weight", &p.transform_norm, {c.C}, norms},
                {transform + "LayerNorm.bias", &p.transform_norm_bias, {c.C}, biases},
                {"cls.predictions.bias", &p.head_bias, {c.V}, biases, true, false, c.padded_V() - c.V},
                {"bert.pooler.dense.weight", &p.pooler, {c.C, c.C}, carried, c.has_pooler},
                {"bert.pooler.dense.bias", &p.pooler_bias, {c.C}, carried, c.has_pooler},
                {"cls.seq_relationship.weight", &p.next_sentence, {2, c.C}, carried, c.has_next_sentence},
                {"cls.seq_relationship.bias", &p.next_sentence_bias, {2}, carried, c.has_next_sentence}};
    }
    return {{"model.norm.weight", &p.final_norm, {c.C}, norms}, head};
}

// One tensor of the files.
struct Parameter : FlatParam {
    std::string name;
    ParameterGroup group;
    bool transposed;      // in files: [in,out]
    uint32_t rng_stream;  // of random numbers
    Slice slice;          // of the files' tensor
    // Elements first .. first+count lie in this rank's shard, from `place` on in a buffer of shards.
    int64_t first = 0, count = 0, place = 0;
};

// Memory for the segments in use of sharded weights or gradients: the first, the last, and the blocks in turn. They overlap; a
// gather waits until overlapping ones are released.
struct GatherBuffers {
    static constexpr size_t count = 4;
    Tensor memory;
    std::array<int64_t, count> begin = {}, end = {};  // in elements

    bool overlap(size_t a, size_t b) const { return begin[a] < end[b] && begin[b] < end[a]; }
};

struct Parameters : ModelParameters {
    Sharding sharding;
    Axis tensor;
    int64_t vocabulary = 0;            // tokens, of all ranks of the tensor axis
    std::vector<LayerRange> layers;    // that the model holds, in chunks
    bool is_tied = false;              // the model's LM head is the embedding
    std::vector<Parameter> table;      // parameters that are present, in order
    std::vector<Parameter> elsewhere;  // those of other stages: names, groups and sizes in files
    std::vector<Segment> segments;
    int64_t elements = 0;  // of parameters that train, with the gaps between tensors
    // [elements], or if the buffer is sharded, [elements / ranks of a group]: this rank's shards. master has no data if it is not
    // kept; neither have sharded weights with a master, because each gather rounds the master.
    Tensor weights, gradients, master, m, v;
    Tensor frozen;  // weights of parameters that do not train, on every rank
    // The same of coded ones: e4m3, and f32 of each row. decoded: an encoded one in the weights' type, of the last decode().
    Tensor codes, code_scales, decoded;
    Tensor column_scales;  // that quantization also computes
    Tensor frozen_vector;  // of the largest frozen vector: norms write gradients that nothing reads
    GatherBuffers weight_buffers, gradient_buffers;
    // A segment's gradients in the type in which they are summed over the ranks; no data where that is their own.
    Tensor sums;

    bool holds_embedding() const { return layers.front().first == 0; }
    bool holds_head() const { return layers.back().end == static_cast<int64_t>(blocks.size()); }
    bool holds(int64_t layer) const;
    // Elements of the whole model's parameters that train.
    int64_t trained() const;
    // Whether a parameter of the segments before this one trains, or may, in layers that another model holds.
    bool trains_before(int64_t segment) const;
    // The segment of a layer's parameters, or of the final norm's and the head's.
    int64_t segment_of(int64_t layer) const;
    // The layer of a segment; -1: of none.
    int64_t layer_of(int64_t segment) const;
    bool is_shared(const Tensor& buffer) const { return buffer.shape[0] < elements; }
    // The buffer with the weights of a parameter.
    const Tensor& weights_with(const FlatParam& p) const {
        return p.trains ? weights : p.is_encoded() ? decoded : frozen;
    }
    // Elements first .. first+count of a parameter, [count]; a buffer of shards must hold them.
    Tensor part(const Tensor& buffer, const Parameter& parameter, int64_t first, int64_t count) const;
    // This rank's shard of a flat parameter, [shard].
    Tensor own(const Tensor& buffer, const FlatParam& p) const;
    // A segment's elements, in the buffer or gathered.
    Tensor weights_of(int64_t segment) const { return in_use(weights, weight_buffers, segment); }
    Tensor gradients_of(int64_t segment) const { return in_use(gradients, gradient_buffers, segment); }
    size_t buffer_of(int64_t segment) const;
    // Memory for weights of one flat parameter that are not kept, valid until the next gather.
    Tensor transient_weights(int64_t count) const;
    // The operands of kernels.
    Tensor weight(const FlatParam& p) const {
        return p.trains ? in_segment(weights_of(p.segment), p)
                        : matrix(weights_with(p), p.is_encoded() ? 0 : p.offset, p);
    }
    Tensor gradient(const FlatParam& p) const {
        return p.trains ? in_segment(gradients_of(p.segment), p) : matrix(frozen_vector, 0, p);
    }
    // The writer, of `count`, of each parameter of the table. All write about as many elements, and those of a segment are of
    // several writers: ranks that gather a segment write it at the same time.
    std::vector<int64_t> writers(int64_t count) const;
    // The elements of a parameter that lie in a buffer: (first, count); as a tensor.
    std::pair<int64_t, int64_t> held(const Tensor& buffer, const Parameter& parameter) const;
    Tensor held_part(const Tensor& buffer, const Parameter& parameter) const;

  private:
    Tensor in_use(const Tensor& buffer, const GatherBuffers& buffers, int64_t segment) const;
    Tensor in_segment(const Tensor& segment, const FlatParam& p) const;
    static Tensor matrix(const Tensor& buffer, int64_t offset, const FlatParam& p);
};

// The buffers of an optimizer's state: the first part of their tensors' names in files, and their group in the memory report.
struct StateRow {
    const char *prefix, *group;
    Tensor Parameters::* buffer;
};
inline constexpr StateRow optimizer_states[] = {{"m.", "first moments", &Parameters::m},
                                                {"v.", "second moments", &Parameters::v}};

// Elements of all separate tensors.
int64_t count_parameters(const Config& config);
// Forward and backward: 6 * (parameters that are multiplied) + 6*L*NH*HD*T of causal attention, twice that of other.
double flops_per_token(const Config& config, int64_t T);
// The same of a model with frozen parameters, which count 4, as they have no gradient, and with adapters.
double flops_per_token(const Parameters& parameters, const Config& config, int64_t T);

// Fills the table and plans its buffers; without training, those of the weights only. config: the sizes of this rank of the tensor
// axis. vocabulary: tokens of all of them. frozen: see ModelOptions.
void plan_parameters(Parameters& p, const Config& config, int64_t vocabulary, const Precision& precision,
                     const Sharding& sharding, const Axis& tensor, const std::vector<LayerRange>& layers,
                     const std::vector<std::string>& frozen, bool frozen_codes, const Lora& lora,
                     bool training, Arena& arena);
// The weight of a parameter; of an encoded one, in Parameters::decoded, from its memory, or into it.
Tensor decode(const Context& context, const Parameters& p, const FlatParam& parameter);
// The same with its spare columns and before its spare rows, which hold what was last written there, or, of a coded one, nothing.
Tensor decode_with_room(const Context& context, const Parameters& p, const FlatParam& parameter);
void encode(const Context& context, const Parameters& p, const FlatParam& parameter);
// What an encoded parameter is kept as: e4m3 [rows,columns] and f32 [rows], or the matrix with its spare columns.
std::vector<Tensor> encoded(const Parameters& p, const FlatParam& parameter);
// Zeros all buffers, gaps between tensors included: the gradient norm reads them.
void zero(const Parameters& p);
// As transformers initializes a Llama, and PEFT its adapters. Moments and gradients are zeroed. Returns when the device is done.
void initialize(const Context& context, Parameters& p, const Config& config, uint64_t seed);
// The adapters alone, beside weights that are there.
void initialize_adapters(const Context& context, Parameters& p, uint64_t seed);

}  // namespace llamac
