#include "model/fp8.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/device_memory.h"
#include "model/block.h"
#include "model/model.h"
#include "model/pipeline.h"
#include "model/tensor_parallel.h"
#include "model/zero.h"
#include "ops/operations.h"

namespace llamac {
namespace {

enum class Role : uint8_t { input, weight, gradient };
constexpr int64_t rows_per_block = block_linears.size(), slots_per_block = 3 * rows_per_block,
                  slots_of_head = 3;

int64_t slot_of(const Linear& linear, Role role) {
    const int64_t first = linear.block * slots_per_block;
    if (!linear.row) return first + static_cast<int64_t>(role);
    const int64_t row = index_of(*linear.row);
    return first + (role == Role::gradient ? 2 * rows_per_block + row : 2 * row + (role == Role::weight));
}

int64_t first_of_head(int64_t blocks) {
    return blocks * slots_per_block;
}
struct SlotOf {
    Role role;
    const LinearRow* row;  // null: the head
};
SlotOf slot_at(int64_t blocks, int64_t slot) {
    if (slot >= first_of_head(blocks)) return {static_cast<Role>(slot - first_of_head(blocks)), nullptr};
    const int64_t place = slot % slots_per_block, gradient = place - 2 * rows_per_block;
    if (gradient >= 0) return {Role::gradient, &block_linears[gradient]};
    return {place % 2 ? Role::weight : Role::input, &block_linears[place / 2]};
}

// One element of a table of slots.
Tensor at(const Tensor& table, int64_t slot) {
    return make_tensor(static_cast<char*>(table.data) + slot * size_of(table.dtype), table.dtype, {1});
}
// A row of the table of inverses; the slot's is the first element.
Tensor inverse_row(const Fp8Scales& f, int64_t slot) {
    const int64_t length = f.inverse.shape[1];
    return make_tensor(f.inverse.as<float>() + slot * length, f.inverse.dtype, {1, length});
}

// A matrix of codes in memory that was planned for any.
Tensor codes(const Tensor& memory, DType type, int64_t rows, int64_t columns) {
    return make_tensor(memory.data, type, {rows, columns});
}

bool is_fp8(const Model& m, const Linear& linear) {
    return m.fp8 && (linear.row ? m.fp8->blocks.has(linear.block) : m.fp8->options.head);
}

Role role_of(const Config& c, int64_t slot) {
    return slot_at(c.L, slot).role;
}
float largest_code(const Fp8Options& options, Role role) {
    return info(role == Role::gradient ? options.gradients : options.values).largest;
}
// Whether products of fp8 read the slot's tensor.
bool is_used(const Fp8Blocks& blocks, const Config& c, int64_t slot) {
    return slot >= first_of_head(c.L) || blocks.has(slot / slots_per_block);
}
bool all_measured(const Fp8State& f) {
    return std::find(f.measured.begin(), f.measured.end(), false) == f.measured.end();
}

// The scales of all slots, from amax [slots] or else from `largest`.
void make_scales(Model& m, const Tensor& amax) {
    const Fp8State& f = *m.fp8;
    update_scales(m.context, {.scale = f.scale,
                              .inverse = f.inverse,
                              .amax = amax,
                              .largest = f.largest,
                              .limit = f.limit,
                              .unit = f.unit});
}
void fill(const Tensor& table, const std::vector<float>& values) {
    copy_bytes(table.data, values.data(), table.bytes());
}

// All blocks have its shapes.
const BlockParameters& first_block(const Parameters& p) {
    return p.blocks[p.layers.front().first];
}
// The shape of a slot's tensor in a batch of N rows.
struct SlotShape {
    int64_t rows, columns;
};
SlotShape slot_shape(const Config& c, const Parameters& p, int64_t slot, int64_t N) {
    const auto [role, row] = slot_at(c.L, slot);
    const std::vector<int64_t> weight =
        row ? (first_block(p).*row->weight).shape : std::vector{c.padded_V(), c.C};
    return {role == Role::weight ? weight[0] : N, role == Role::gradient ? weight[0] : weight[1]};
}

// A slot's inverses in a batch that may be smaller than planned.
Tensor first_of(const Tensor& inverses, int64_t count) {
    return make_tensor(inverses.data, inverses.dtype, {count});
}

// The scales that a slot's tensor of the current micro-batch has.
const Fp8Scales& scales_of(const Model& m, int64_t slot) {
    const Fp8State& f = *m.fp8;
    const bool ahead = f.options.scaling == Fp8Scaling::delayed && f.measured[slot];
    if (m.micro_batch == 0 || ahead || role_of(m.config, slot) != Role::input) return f;
    return f.waiting[m.micro_batch - 1];
}

// The scale of a tensor from its own largest value.
void take_current_scale(Model& m, int64_t slot, const Tensor& x) {
    const Fp8State& f = *m.fp8;
    const Tensor amax = at(f.amax, f.slots);
    const Fp8Scales& to = scales_of(m, slot);
    quantize(m.context, {.amax = amax, .x = x, .scale = at(to.scale, slot)});
    reduce_over_tensor(m, amax, Reduction::max);
    update_scales(m.context, {.scale = at(to.scale, slot),
                              .inverse = inverse_row(to, slot),
                              .amax = amax,
                              .limit = at(f.limit, slot)});
}

// The shapes that the libraries and our kernels support. The host supports all.
void check_shapes(const Config& c, int64_t N, bool head) {
    if (computing_context().backend == Backend::host) return;
    const DeviceProperties& device = device_properties();
    if (device.fp8 == Fp8Units::none)
        fail(
            "--matmul-dtype fp8: expected a device with fp8 matrix units (NVIDIA from compute capability 8.9 "
            "on, gfx942, "
            "gfx950), found ",
            device.name, "; --matmul-dtype storage runs there");
    const std::pair<const char*, int64_t> sizes[] = {{"--batch-size times --seq-len", N},
                                                     {"hidden_size", c.C},
                                                     {"num_attention_heads times head_dim", c.q_size()},
                                                     {"num_key_value_heads times head_dim", c.kv_size()},
                                                     {"intermediate_size", c.F},
                                                     {"vocab_size", head ? c.padded_V() : 0}};
    for (const auto& [what, size] : sizes)
        if (size % fp8_multiple)
            fail("--matmul-dtype fp8: ", what, ": expected a multiple of ", fp8_multiple, ", found ", size,
                 "; --matmul-dtype storage takes it");
}

void plan_scales(Fp8Scales& scales, const Fp8State& f, const Config& c, const Parameters& p, int64_t N,
                 Arena& arena) {
    arena.plan("fp8 scales", &scales.inverse, shaped(DType::f32, {f.slots, 4}));
    arena.plan("fp8 scales", &scales.scale, shaped(DType::f32, {f.slots}));
    if (f.options.scaling != Fp8Scaling::row) return;
    scales.inverses.resize(static_cast<size_t>(f.slots));
    for (int64_t slot = 0; slot < f.slots; slot++) {
        const bool is_here = slot < first_of_head(c.L) ? p.holds(slot / slots_per_block) : f.options.head;
        if (!is_here || !is_used(f.blocks, c, slot)) continue;
        BothOrientations& inverses = scales.inverses[slot];
        const SlotShape shape = slot_shape(c, p, slot, N);
        arena.plan("fp8 scales", &inverses.rows, shaped(DType::f32, {shape.rows}));
        arena.plan("fp8 scales", &inverses.transposed, shaped(DType::f32, {shape.columns}));
    }
}

size_t stored_at(const Linear& linear) {
    return static_cast<size_t>(linear.block * rows_per_block + index_of(*linear.row));
}

}  // namespace

std::string slot_name(const Config& c, int64_t slot) {
    const auto [role, row] = slot_at(c.L, slot);
    const std::string block = row ? std::to_string(slot / slots_per_block) + "." : "";
    const std::string linear = row ? row->name : "head";
    if (role == Role::input) return row ? block + name_of(c, row->x) : "final_norm";
    return role == Role::weight ? block + linear + ".weight" : block + "d." + linear;
}

int64_t slot_elements(const Config& c, const Parameters& p, int64_t slot, int64_t N) {
    const SlotShape shape = slot_shape(c, p, slot, N);
    return shape.rows * shape.columns;
}

void plan_fp8(Fp8State& f, const Fp8Options& options, const Config& c, const Parameters& p, int64_t N,
              int64_t micro_batches, Arena& arena) {
    const Sharding& sharding = p.sharding;
    check_shapes(c, N, options.head);
    if (options.weights == Fp8Weights::stored && sharding.shares_weights())
        fail(
            "--fp8-weights stored: expected --zero 0 to 2, as no rank of --zero 3 holds all weights; "
            "--fp8-weights recomputed runs there");
    f.options = options;
    f.blocks = {options.keep_first, c.L - options.keep_last, options.values};
    if (f.blocks.first >= f.blocks.end)
        fail("--fp8-keep-first ", options.keep_first, " --fp8-keep-last ", options.keep_last,
             ": the model has ", c.L, " blocks, expected at least one with products in fp8");
    f.options.head = options.head && p.holds_head();
    f.slots = first_of_head(c.L) + (options.head ? slots_of_head : 0);
    f.measured.assign(static_cast<size_t>(f.slots), false);
    f.waiting.resize(static_cast<size_t>(micro_batches - 1));
    plan_scales(f, f, c, p, N, arena);
    for (Fp8Scales& scales : f.waiting) plan_scales(scales, f, c, p, N, arena);
    for (Tensor* table : {&f.limit, &f.largest, &f.unit, &f.nothing})
        arena.plan("fp8 scales", table, shaped(DType::f32, {f.slots}));
    arena.plan("fp8 scales", &f.amax, shaped(DType::f32, {f.slots + 1}));
    arena.plan("fp8 scales", &f.saturated, shaped(DType::i32, {f.slots}));
    int64_t widest = 0, largest = 0;  // columns of an input or an output; elements of a weight
    for (const LinearRow& row : block_linears) {
        const FlatParam& weight = first_block(p).*row.weight;
        widest = std::max({widest, weight.shape[0], weight.shape[1]});
        largest = std::max(largest, weight.elements());
    }
    arena.plan("fp8 operands", &f.rows, shaped(options.values, {N * widest}));
    arena.plan("fp8 operands", &f.transposed, shaped(options.values, {N * widest}));
    if (options.weights == Fp8Weights::recomputed)
        return arena.plan("fp8 operands", &f.weight, shaped(options.values, {largest}));
    f.by_optimizer =
        options.scaling == Fp8Scaling::delayed && !sharding.shares_states() && p.tensor.ranks == 1;
    f.stored.resize(static_cast<size_t>(c.L * rows_per_block));
    for (int64_t block = f.blocks.first; block < f.blocks.end; block++)
        for (const LinearRow& row : block_linears) {
            if (!p.holds(block)) continue;
            const std::vector<int64_t>& shape = (first_block(p).*row.weight).shape;
            BothOrientations& kept = f.stored[stored_at({block, &row})];
            arena.plan("fp8 weights", &kept.rows, shaped(options.values, {shape[0], shape[1]}));
            arena.plan("fp8 weights", &kept.transposed, shaped(options.values, {shape[1], shape[0]}));
        }
}

void plan_fp8_head(Fp8State& f, const Config& c, int64_t chunk, Arena& arena) {
    if (!f.options.head) return;
    const auto plan = [&](const char* group, Tensor& tensor, DType type, int64_t rows, int64_t columns) {
        arena.plan(group, &tensor, shaped(type, {rows, columns}));
    };
    plan("fp8 weights", f.head.rows, f.options.values, c.padded_V(), c.C);
    plan("fp8 weights", f.head.transposed, f.options.values, c.C, c.padded_V());
    plan("fp8 operands", f.head_inputs, f.options.values, c.C, chunk);
    plan("fp8 operands", f.dlogits.rows, f.options.gradients, chunk, c.padded_V());
    plan("fp8 operands", f.dlogits.transposed, f.options.gradients, c.padded_V(), chunk);
}

void reset_fp8(Fp8State& f, const Config& c) {
    const size_t slots = static_cast<size_t>(f.slots);
    const auto begin = [&](const Fp8Scales& scales) {
        fill(scales.scale, std::vector<float>(slots, 1.0f));
        fill(scales.inverse, std::vector<float>(4 * slots, 1.0f));
    };
    begin(f);
    std::for_each(f.waiting.begin(), f.waiting.end(), begin);
    fill(f.amax, std::vector<float>(slots + 1, 0.0f));
    fill(f.unit, std::vector<float>(slots, 1.0f));
    fill(f.nothing, std::vector<float>(slots, 0.0f));
    std::vector<float> limits(slots), largest(slots);
    for (int64_t slot = 0; slot < f.slots; slot++) {
        limits[slot] = largest_code(f.options, role_of(c, slot));
        largest[slot] = is_used(f.blocks, c, slot) ? 0 : -1;
    }
    fill(f.limit, limits);
    fill(f.largest, largest);
    CHECK(hipMemset(f.saturated.data, 0, static_cast<size_t>(f.saturated.bytes())));
    f.measured.assign(slots, false);
    f.loss_scale = 1;
    f.current = false;
}

void begin_fp8_pass(Model& m, bool measures, bool first) {
    if (!m.fp8) return;
    m.fp8->measures = measures;
    m.fp8->makes_weights = m.fp8->by_optimizer ? !m.fp8->current : first;
    m.fp8->makes_head = m.fp8->makes_weights || m.fp8->options.weights == Fp8Weights::recomputed;
}

void pause_fp8(Model& m, bool on) {
    if (!m.fp8) return;
    m.fp8->measures = !on;
    m.fp8->makes_weights = false;
}

void clear_saturated(Model& m) {
    if (!m.fp8) return;
    const Tensor& counts = m.fp8->saturated;
    CHECK(hipMemsetAsync(counts.data, 0, static_cast<size_t>(counts.bytes()), m.context.stream));
}

void copy_saturated(Model& m, int32_t* counts) {
    if (m.fp8) copy_bytes_async(m.context, counts, m.fp8->saturated.data, m.fp8->saturated.bytes());
}

std::vector<NamedTensor> fp8_tensors(const Model& m) {
    if (!m.fp8 || m.fp8->options.scaling != Fp8Scaling::delayed) return {};
    return {{"fp8.scale", m.fp8->scale}, {"fp8.amax", m.fp8->largest}};
}

void load_fp8(Model& m, const std::string& path, const Fp8Options& saved) {
    if (fp8_tensors(m).empty()) return;
    Fp8State& f = *m.fp8;
    const SafetensorsFile file(path);
    const SafetensorsFile::Entry* entry = file.find("fp8.scale");
    if (!entry) return;
    // With another --fp8-head, the blocks' slots are the same.
    const int64_t of_blocks = first_of_head(m.config.L), with_head = of_blocks + slots_of_head;
    int64_t count = f.slots;
    for (const int64_t each : {of_blocks, with_head})
        if (entry->shape == std::vector<int64_t>{each}) count = each;
    std::vector<float> scales(static_cast<size_t>(std::max(count, f.slots)), 1.0f), sizes = scales;
    const auto read = [&](const char* name, std::vector<float>& to) {
        file.read(name, {count}, 0, make_tensor(to.data(), DType::f32, {count}));
    };
    read("fp8.scale", scales);
    const bool has_sizes = file.find("fp8.amax");
    if (has_sizes) read("fp8.amax", sizes);
    const Fp8Blocks saved_blocks{saved.keep_first, m.config.L - saved.keep_last, saved.values};
    std::vector<float> inverses(4 * static_cast<size_t>(f.slots), 1.0f);
    for (int64_t slot = 0; slot < f.slots; slot++) {
        const size_t s = static_cast<size_t>(slot);
        if (!has_sizes)  // the largest amax with this scale
            sizes[s] = is_used(saved_blocks, m.config, slot)
                           ? largest_code(saved, role_of(m.config, slot)) / scales[s]
                           : -1;
        const bool known = slot < count && sizes[s] >= 0, used = is_used(f.blocks, m.config, slot);
        sizes[s] = !used ? -1 : known ? sizes[s] : 0;
        if (!known) scales[s] = 1;
        inverses[4 * s] = 1.0f / scales[s];
        f.measured[s] = known || !used;
    }
    scales.resize(static_cast<size_t>(f.slots)), sizes.resize(scales.size());
    fill(f.scale, scales);
    fill(f.inverse, inverses);
    fill(f.largest, sizes);
    make_scales(m, f.nothing);
    f.current = false;
}

void follow_loss_scale(Model& m, double scale) {
    if (!m.fp8 || m.fp8->options.scaling != Fp8Scaling::delayed) return;
    Fp8State& f = *m.fp8;
    if (scale == 1 && f.loss_scale == 1) return;
    f.loss_scale = static_cast<float>(scale);
    std::vector<float> units(static_cast<size_t>(f.slots), 1.0f);
    for (int64_t slot = 0; slot < f.slots; slot++)
        if (role_of(m.config, slot) == Role::gradient) units[slot] = f.loss_scale;
    copy_bytes_async(m.context, f.unit.data, units.data(), f.unit.bytes());
    make_scales(m, f.nothing);  // AdamW has measured the step's weights already
}

bool is_settled(const Model& m) {
    if (!m.fp8 || m.fp8->options.scaling != Fp8Scaling::delayed) return true;
    return all_measured(*m.fp8) && m.fp8->current == m.fp8->by_optimizer;
}

void update_fp8_scales(Model& m) {
    if (!m.fp8 || m.fp8->options.scaling != Fp8Scaling::delayed) return;
    Fp8State& f = *m.fp8;
    const Tensor amax = make_tensor(f.amax.data, f.amax.dtype, {f.slots});
    reduce_over_tensor(m, amax, Reduction::max);
    max_over_ranks(m, amax);
    reduce_over_stages(m, amax, Reduction::max);
    make_scales(m, amax);
    if (!m.context.dry_run) f.measured.assign(f.measured.size(), true);
}

std::optional<Fp8Codes> updated_codes(const Model& m, const Parameter& parameter) {
    if (!m.fp8 || !m.fp8->by_optimizer || !parameter.trains || parameter.shape.size() != 2)
        return std::nullopt;
    const Fp8State& f = *m.fp8;
    // The parameter's rows and columns of the codes of a fused matrix.
    const auto of = [&](const Linear& linear, const FlatParam& matrix) {
        const Quantizable weight = linear_weight(m, linear);
        const int64_t first = parameter.offset - matrix.offset, K = parameter.shape[0],
                      C = parameter.shape[1];
        Tensor transposed =
            codes({static_cast<char*>(weight.transposed.data) + first / C}, f.options.values, C, K);
        transposed.stride[0] = matrix.shape[0];
        return Fp8Codes{codes({static_cast<char*>(weight.rows.data) + first}, f.options.values, K, C),
                        transposed, at(f.amax, weight.slot), at(f.saturated, weight.slot),
                        at(f.scale, weight.slot)};
    };
    if (f.options.head && m.parameters.head.trains && parameter.offset == m.parameters.head.offset)
        return of({m.config.L}, m.parameters.head);
    const int64_t block = m.parameters.layer_of(parameter.segment);
    if (!f.blocks.has(block)) return std::nullopt;
    for (const LinearRow& row : block_linears) {
        const FlatParam& matrix = m.parameters.blocks[block].*row.weight;
        if (matrix.trains && parameter.offset >= matrix.offset &&
            parameter.offset < matrix.offset + matrix.elements())
            return of({block, &row}, matrix);
    }
    return std::nullopt;
}

void finish_fp8_update(Model& m) {
    if (m.fp8 && !m.context.dry_run) m.fp8->current = m.fp8->by_optimizer;
}

Tensor head_input_codes(const Model& m, int64_t rows) {
    if (!m.fp8 || !m.fp8->options.head) return {};
    return codes(m.fp8->head_inputs, m.fp8->options.values, m.config.C, rows);
}

Quantizable linear_input(const Model& m, const Linear& linear, const Tensor& x, const Tensor& transposed) {
    if (!is_fp8(m, linear)) return {x};
    const Fp8State& f = *m.fp8;
    return {x, slot_of(linear, Role::input), codes(f.rows, f.options.values, x.shape[0], x.shape[1]),
            transposed};
}

Quantizable output_gradient(const Model& m, const Linear& linear, const Tensor& dout) {
    if (!is_fp8(m, linear)) return {dout};
    const Fp8State& f = *m.fp8;
    const int64_t N = dout.shape[0], K = dout.shape[1];
    const auto& [rows, transposed] = linear.row ? BothOrientations{f.rows, f.transposed} : f.dlogits;
    return {dout, slot_of(linear, Role::gradient), codes(rows, f.options.gradients, N, K),
            codes(transposed, f.options.gradients, K, N)};
}

Quantizable linear_weight(const Model& m, const Linear& linear) {
    const Parameters& p = m.parameters;
    const Tensor weight =
        decode_with_room(m.context, p, linear.row ? p.blocks[linear.block].*linear.row->weight : p.head);
    if (!is_fp8(m, linear)) return {weight};
    const BothOrientations kept = !linear.row             ? m.fp8->head
                                  : m.fp8->stored.empty() ? BothOrientations{}
                                                          : m.fp8->stored[stored_at(linear)];
    return {weight, slot_of(linear, Role::weight), kept.rows, kept.transposed};
}

bool computes_codes(const Model& m, int64_t block) {
    if (!m.fp8 || !m.fp8->blocks.has(block) || m.hook) return false;  // a hook sees the values
    const auto first = m.fp8->measured.begin() + block * slots_per_block;
    return m.fp8->options.scaling == Fp8Scaling::delayed &&
           std::find(first, first + slots_per_block, false) == first + slots_per_block;
}

Fp8Codes codes_of(const Model& m, const Quantizable& x, bool again) {
    const Fp8State& f = *m.fp8;
    const bool measures = f.measures && !again, delayed = f.options.scaling == Fp8Scaling::delayed;
    return {x.rows, x.transposed, measures && delayed ? at(f.amax, x.slot) : Tensor{},
            measures ? at(f.saturated, x.slot) : Tensor{}, at(scales_of(m, x.slot).scale, x.slot)};
}

void quantize(Model& m, const Quantizable& x, bool again) {
    if (!x.in_fp8()) return;
    const Fp8State& f = *m.fp8;
    const Fp8Codes to = codes_of(m, x, again);
    if (f.options.scaling == Fp8Scaling::row) {
        const BothOrientations& inverses = scales_of(m, x.slot).inverses[x.slot];
        return quantize_rows(m.context,
                             {.out = to.out,
                              .transposed = to.transposed,
                              .inverse = first_of(inverses.rows, x.values.shape[0]),
                              .inverse_transposed = first_of(inverses.transposed, x.values.shape[1]),
                              .saturated = to.saturated,
                              .x = x.values,
                              .limit = largest_code(f.options, role_of(m.config, x.slot))});
    }
    if (!again && !(f.options.scaling == Fp8Scaling::delayed && f.measured[x.slot]))
        take_current_scale(m, x.slot, x.values);
    quantize(m.context, {.out = to.out,
                         .transposed = to.transposed,
                         .amax = to.amax,
                         .saturated = to.saturated,
                         .x = x.values,
                         .scale = to.scale});
}

Tensor weight_codes(Model& m, const Quantizable& weight, bool transposed) {
    const Fp8State& f = *m.fp8;
    Quantizable to = weight;
    if (weight.rows.data) {
        // The first product of a pass quantizes the weight for all of them.
        const bool is_head = weight.slot >= first_of_head(m.config.L);
        if (is_head ? std::exchange(m.fp8->makes_head, false) : !transposed && f.makes_weights)
            quantize(m, weight, false);
        return transposed ? weight.transposed : weight.rows;
    }
    const int64_t K = weight.values.shape[0], C = weight.values.shape[1];
    Tensor& scratch = transposed ? to.transposed : to.rows;
    scratch = codes(f.weight, f.options.values, transposed ? C : K, transposed ? K : C);
    quantize(m, to, transposed);
    return scratch;
}

Tensor inverse_of(const Model& m, const Quantizable& x, const Tensor& codes, bool transposed) {
    if (m.fp8->options.scaling != Fp8Scaling::row)
        return make_tensor(inverse_row(scales_of(m, x.slot), x.slot).data, DType::f32, {1});
    const BothOrientations& inverses = scales_of(m, x.slot).inverses[x.slot];
    return first_of(transposed ? inverses.transposed : inverses.rows, codes.shape[0]);
}

}  // namespace llamac
