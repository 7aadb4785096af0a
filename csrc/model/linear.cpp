#include "model/linear.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "core/device_memory.h"
#include "model/exchange.h"
#include "model/model.h"
#include "ops/operations.h"

namespace llamac {
namespace {

enum class Role : uint8_t { input, weight, gradient };

int64_t slot_of(const LayerCall& call, Role role) {
    if (call.layer == Layer::head) return call.block * slots_per_block + static_cast<int64_t>(role);
    const int64_t layer = static_cast<int64_t>(call.layer), first = call.block * slots_per_block;
    if (role == Role::gradient) return first + 2 * linear_layers + layer;
    return first + 2 * layer + (role == Role::weight);
}

// One element of a table of slots.
Tensor at(const Tensor& table, int64_t slot) {
    return make_tensor(static_cast<char*>(table.data) + slot * size_of(table.dtype), table.dtype, {1});
}
// A row of the table of inverses, whose first element is the slot's.
Tensor inverse_row(const Fp8State& f, int64_t slot) {
    const int64_t length = f.inverse.shape[1];
    return make_tensor(f.inverse.as<float>() + slot * length, f.inverse.dtype, {1, length});
}

// A matrix of codes in memory that was planned for any.
Tensor codes(const Tensor& memory, DType type, int64_t rows, int64_t columns) {
    return make_tensor(memory.data, type, {rows, columns});
}

const StoredCodes& stored_codes(const Fp8State& f, int64_t block, Layer layer) {
    return f.stored[static_cast<size_t>(block * linear_layers) + static_cast<size_t>(layer)];
}

bool is_fp8(const Model& m, const LayerCall& call) {
    return m.fp8 && (call.layer == Layer::head ? m.fp8->options.head : m.fp8->blocks.has(call.block));
}

int64_t first_of_head(const Config& c) {
    return c.L * slots_per_block;
}
Role role_of(const Config& c, int64_t slot) {
    if (slot >= first_of_head(c)) return static_cast<Role>(slot - first_of_head(c));
    const int64_t place = slot % slots_per_block;
    return place >= 2 * linear_layers ? Role::gradient : place % 2 ? Role::weight : Role::input;
}
float largest_code(const Fp8Options& options, Role role) {
    return info(role == Role::gradient ? options.gradients : options.values).largest;
}
// Whether products of fp8 read the slot's tensor.
bool is_used(const Fp8Blocks& blocks, const Config& c, int64_t slot) {
    return slot >= first_of_head(c) || blocks.has(slot / slots_per_block);
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

// Of a slot's tensor in a batch of N rows.
struct SlotShape {
    int64_t rows, columns;
};
SlotShape slot_shape(const Config& c, int64_t slot, int64_t N) {
    struct {
        int64_t inputs, outputs;
    } const shapes[] = {{c.C, c.qkv_size()}, {c.q_size(), c.C}, {c.C, 2 * c.F}, {c.F, c.C}, {c.C, c.V}};
    const Role role = role_of(c, slot);
    const int64_t place = slot % slots_per_block;
    const auto& [inputs, outputs] = shapes[slot >= first_of_head(c) ? linear_layers
                                           : role == Role::gradient ? place - 2 * linear_layers
                                                                    : place / 2];
    return {role == Role::weight ? outputs : N, role == Role::gradient ? outputs : inputs};
}

// The first of a slot's inverses in a batch that may be smaller than planned.
Tensor first_of(const Tensor& inverses, int64_t count) {
    return make_tensor(inverses.data, inverses.dtype, {count});
}

// The scale of a tensor from its own largest value.
void take_current_scale(Model& m, int64_t slot, const Tensor& x) {
    const Fp8State& f = *m.fp8;
    const Tensor amax = at(f.amax, f.slots);
    quantize(m.context, {.amax = amax, .x = x, .scale = at(f.scale, slot)});
    update_scales(m.context, {.scale = at(f.scale, slot),
                              .inverse = inverse_row(f, slot),
                              .amax = amax,
                              .limit = at(f.limit, slot)});
}

// rows, transposed: where they have data, get the codes of x, which maker makes where it is one. again: the same tensor has
// been quantised in this pass.
void quantize_slot(Model& m, int64_t slot, const Tensor& rows, const Tensor& transposed, const Tensor& x,
                   const TensorMaker& maker, bool again) {
    const Fp8State& f = *m.fp8;
    const bool delayed = f.options.scaling == Fp8Scaling::delayed;
    const bool measures = f.measures && !again;
    const Fp8Codes to{rows, transposed, measures && delayed ? at(f.amax, slot) : Tensor{},
                      measures ? at(f.saturated, slot) : Tensor{}, at(f.scale, slot)};
    if (maker.codes && makes_codes(m, slot / slots_per_block)) return maker.codes(to);
    if (maker.values && !again) maker.values();
    if (f.options.scaling == Fp8Scaling::row) {
        const RowInverses& inverses = f.inverses[static_cast<size_t>(slot)];
        return quantize_rows(m.context, {.out = to.out,
                                         .transposed = to.transposed,
                                         .inverse = first_of(inverses.rows, x.shape[0]),
                                         .inverse_transposed = first_of(inverses.transposed, x.shape[1]),
                                         .saturated = to.saturated,
                                         .x = x,
                                         .limit = largest_code(f.options, role_of(m.config, slot))});
    }
    if (!again && !(delayed && f.measured[static_cast<size_t>(slot)])) take_current_scale(m, slot, x);
    quantize(m.context, {.out = to.out,
                         .transposed = to.transposed,
                         .amax = to.amax,
                         .saturated = to.saturated,
                         .x = x,
                         .scale = to.scale});
}

// The codes of a weight, as rows or transposed. forward: the first use in a pass.
Tensor weight_codes(Model& m, const LayerCall& call, bool transposed, bool forward) {
    const Fp8State& f = *m.fp8;
    const int64_t slot = slot_of(call, Role::weight), K = call.weight.shape[0], C = call.weight.shape[1];
    if (call.layer == Layer::head) {
        if (std::exchange(m.fp8->makes_head, false))
            quantize_slot(m, slot, f.head.rows, f.head.transposed, call.weight, {}, false);
        return transposed ? f.head.transposed : f.head.rows;
    }
    if (f.stored.empty()) {
        const Tensor scratch = codes(f.weight, f.options.values, transposed ? C : K, transposed ? K : C);
        quantize_slot(m, slot, transposed ? Tensor{} : scratch, transposed ? scratch : Tensor{}, call.weight,
                      {}, !forward);
        return scratch;
    }
    const StoredCodes& kept = stored_codes(f, call.block, call.layer);
    if (forward && f.makes_weights)
        quantize_slot(m, slot, kept.rows, kept.transposed, call.weight, {}, false);
    return transposed ? kept.transposed : kept.rows;
}

// Memory for the transposed codes of an output's gradient.
Tensor transposed_gradient(const Fp8State& f, const LayerCall& call, const Tensor& dout) {
    const Tensor& memory = call.layer == Layer::head ? f.dlogits.transposed : f.transposed;
    return codes(memory, f.options.gradients, dout.shape[1], dout.shape[0]);
}

struct Operand8 {
    Tensor codes, inverse;
};
Operand8 operand(const Model& m, const LayerCall& call, Role role, const Tensor& values, bool transposed) {
    const int64_t slot = slot_of(call, role);
    if (m.fp8->options.scaling != Fp8Scaling::row)
        return {values, make_tensor(inverse_row(*m.fp8, slot).data, DType::f32, {1})};
    const RowInverses& inverses = m.fp8->inverses[static_cast<size_t>(slot)];
    return {values, first_of(transposed ? inverses.transposed : inverses.rows, values.shape[0])};
}

void multiply(Model& m, const Tensor& out, const Operand8& a, const Operand8& b, const Tensor& residual,
              bool accumulate, bool fast) {
    if (m.fp8->options.scaling == Fp8Scaling::row)
        return scaled_matmul_rows(m.context, {.out = out,
                                              .a = a.codes,
                                              .b = b.codes,
                                              .a_scale = a.inverse,
                                              .b_scale = b.inverse,
                                              .residual = residual,
                                              .accumulate = accumulate,
                                              .fast_accum = int64_t{fast}});
    scaled_matmul(m.context, {.out = out,
                              .a = a.codes,
                              .b = b.codes,
                              .a_scale = a.inverse,
                              .b_scale = b.inverse,
                              .residual = residual,
                              .accumulate = accumulate,
                              .fast_accum = int64_t{fast}});
}

// What the libraries' products and our kernels take; the host takes any.
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
                                                     {"vocab_size", head ? c.V : 0}};
    for (const auto& [what, size] : sizes)
        if (size % fp8_multiple)
            fail("--matmul-dtype fp8: ", what, ": expected a multiple of ", fp8_multiple, ", found ", size,
                 "; --matmul-dtype storage takes it");
}

void plan_inverses(Fp8State& f, const Config& c, int64_t N, Arena& arena) {
    f.inverses.resize(static_cast<size_t>(f.slots));
    for (int64_t slot = 0; slot < f.slots; slot++) {
        if (!is_used(f.blocks, c, slot)) continue;
        RowInverses& inverses = f.inverses[static_cast<size_t>(slot)];
        const SlotShape shape = slot_shape(c, slot, N);
        arena.plan("fp8 scales", &inverses.rows, shaped(DType::f32, {shape.rows}));
        arena.plan("fp8 scales", &inverses.transposed, shaped(DType::f32, {shape.columns}));
    }
}

}  // namespace

std::string slot_name(const Config& c, int64_t slot) {
    constexpr const char* of_head[slots_of_head] = {"final_norm", "head.weight", "d.head"};
    if (slot >= first_of_head(c)) return of_head[slot - first_of_head(c)];
    constexpr const char* names[slots_per_block] = {
        "input_norm", "qkv.weight",  "attention", "o.weight", "post_norm", "gate_up.weight",
        "swiglu",     "down.weight", "d.qkv",     "d.o",      "d.gate_up", "d.down"};
    return std::to_string(slot / slots_per_block) + "." + names[slot % slots_per_block];
}

int64_t slot_elements(const Config& c, int64_t slot, int64_t N) {
    const SlotShape shape = slot_shape(c, slot, N);
    return shape.rows * shape.columns;
}

void plan_fp8(Fp8State& f, const Fp8Options& options, const Config& c, const Sharding& sharding, int64_t N,
              Arena& arena) {
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
    f.slots = first_of_head(c) + (options.head ? slots_of_head : 0);
    f.measured.assign(static_cast<size_t>(f.slots), false);
    arena.plan("fp8 scales", &f.inverse, shaped(DType::f32, {f.slots, 4}));
    for (Tensor* table : {&f.scale, &f.limit, &f.largest, &f.unit, &f.nothing})
        arena.plan("fp8 scales", table, shaped(DType::f32, {f.slots}));
    arena.plan("fp8 scales", &f.amax, shaped(DType::f32, {f.slots + 1}));
    arena.plan("fp8 scales", &f.saturated, shaped(DType::i32, {f.slots}));
    if (options.scaling == Fp8Scaling::row) plan_inverses(f, c, N, arena);
    const int64_t widest = std::max({c.C, c.q_size(), c.qkv_size(), 2 * c.F});
    const int64_t largest = c.C * std::max({c.q_size(), c.qkv_size(), 2 * c.F});
    arena.plan("fp8 operands", &f.rows, shaped(options.values, {N * widest}));
    arena.plan("fp8 operands", &f.transposed, shaped(options.values, {N * widest}));
    if (options.weights == Fp8Weights::recomputed)
        return arena.plan("fp8 operands", &f.weight, shaped(options.values, {largest}));
    const std::array<std::array<int64_t, 2>, linear_layers> shapes = {
        {{c.qkv_size(), c.C}, {c.C, c.q_size()}, {2 * c.F, c.C}, {c.C, c.F}}};
    f.by_optimizer = options.scaling == Fp8Scaling::delayed && !sharding.shares_states();
    f.stored.resize(static_cast<size_t>(c.L * linear_layers));
    for (int64_t i = f.blocks.first * linear_layers; i < f.blocks.end * linear_layers; i++) {
        const auto [K, C] = shapes[static_cast<size_t>(i % linear_layers)];
        StoredCodes& kept = f.stored[static_cast<size_t>(i)];
        arena.plan("fp8 weights", &kept.rows, shaped(options.values, {K, C}));
        arena.plan("fp8 weights", &kept.transposed, shaped(options.values, {C, K}));
    }
}

void plan_fp8_head(Fp8State& f, const Config& c, int64_t chunk, Arena& arena) {
    if (!f.options.head) return;
    const auto plan = [&](const char* group, Tensor& tensor, DType type, int64_t rows, int64_t columns) {
        arena.plan(group, &tensor, shaped(type, {rows, columns}));
    };
    plan("fp8 weights", f.head.rows, f.options.values, c.V, c.C);
    plan("fp8 weights", f.head.transposed, f.options.values, c.C, c.V);
    plan("fp8 operands", f.head_inputs, f.options.values, c.C, chunk);
    plan("fp8 operands", f.dlogits.rows, f.options.gradients, chunk, c.V);
    plan("fp8 operands", f.dlogits.transposed, f.options.gradients, c.V, chunk);
}

void reset_fp8(Fp8State& f, const Config& c) {
    const size_t slots = static_cast<size_t>(f.slots);
    fill(f.scale, std::vector<float>(slots, 1.0f));
    fill(f.inverse, std::vector<float>(4 * slots, 1.0f));
    fill(f.amax, std::vector<float>(slots + 1, 0.0f));
    fill(f.unit, std::vector<float>(slots, 1.0f));
    fill(f.nothing, std::vector<float>(slots, 0.0f));
    std::vector<float> limits(slots), largest(slots);
    for (int64_t slot = 0; slot < f.slots; slot++) {
        limits[static_cast<size_t>(slot)] = largest_code(f.options, role_of(c, slot));
        largest[static_cast<size_t>(slot)] = is_used(f.blocks, c, slot) ? 0 : -1;
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

bool makes_codes(const Model& m, int64_t block) {
    if (!m.fp8 || !m.fp8->blocks.has(block) || m.hook) return false;  // a hook sees the values
    const auto first = m.fp8->measured.begin() + block * slots_per_block;
    return m.fp8->options.scaling == Fp8Scaling::delayed &&
           std::find(first, first + slots_per_block, false) == first + slots_per_block;
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
    const int64_t of_blocks = first_of_head(m.config), with_head = of_blocks + slots_of_head;
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
        if (!has_sizes)  // the most that the scale stands for, which has this scale again
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
        if (role_of(m.config, slot) == Role::gradient) units[static_cast<size_t>(slot)] = f.loss_scale;
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
    largest_over_ranks(m, amax);
    make_scales(m, amax);
    if (!m.context.dry_run) f.measured.assign(f.measured.size(), true);
}

std::optional<UpdatedCodes> updated_codes(const Model& m, const Parameter& parameter) {
    if (!m.fp8 || !m.fp8->by_optimizer || parameter.shape.size() != 2) return std::nullopt;
    const Fp8State& f = *m.fp8;
    if (f.options.head && parameter.offset == m.parameters.head.offset) {
        const int64_t slot = slot_of({m.config.L, Layer::head, {}}, Role::weight);
        return UpdatedCodes{f.head.rows, f.head.transposed, at(f.amax, slot), at(f.saturated, slot),
                            at(f.scale, slot)};
    }
    for (int64_t block = f.blocks.first; block < f.blocks.end; block++) {
        const BlockParameters& w = m.parameters.blocks[static_cast<size_t>(block)];
        const Placement* const matrices[linear_layers] = {&w.qkv, &w.o, &w.gate_up, &w.down};
        for (const Layer layer : {Layer::qkv, Layer::o, Layer::gate_up, Layer::down}) {
            const Placement& matrix = *matrices[static_cast<size_t>(layer)];
            const int64_t first = parameter.offset - matrix.offset;
            if (first < 0 || first >= matrix.elements()) continue;
            const StoredCodes& kept = stored_codes(f, block, layer);
            const int64_t K = parameter.shape[0], C = parameter.shape[1],
                          slot = slot_of({block, layer, {}}, Role::weight);
            Tensor transposed =
                codes({static_cast<char*>(kept.transposed.data) + first / C}, f.options.values, C, K);
            transposed.stride[0] = matrix.shape[0];
            return UpdatedCodes{codes({static_cast<char*>(kept.rows.data) + first}, f.options.values, K, C),
                                transposed, at(f.amax, slot), at(f.saturated, slot), at(f.scale, slot)};
        }
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

void linear_forward(Model& m, const LayerCall& call, const Tensor& out, const Tensor& x,
                    const Tensor& x_transposed, const TensorMaker& x_maker, const Tensor& residual) {
    if (!is_fp8(m, call)) {
        if (x_maker.values) x_maker.values();
        return matmul_forward(m.context, {.out = out, .x = x, .weight = call.weight, .residual = residual});
    }
    const Fp8State& f = *m.fp8;
    const Tensor rows = codes(f.rows, f.options.values, x.shape[0], x.shape[1]);
    quantize_slot(m, slot_of(call, Role::input), rows, x_transposed, x, x_maker, false);
    const Tensor weight = weight_codes(m, call, false, true);
    multiply(m, out, operand(m, call, Role::input, rows, false),
             operand(m, call, Role::weight, weight, false), residual, false, true);
}

void linear_backward_input(Model& m, const LayerCall& call, const Tensor& dx, const Tensor& dout,
                           const TensorMaker& dout_maker) {
    if (!is_fp8(m, call)) {
        if (dout_maker.values) dout_maker.values();
        return matmul_backward_input(m.context, {.dx = dx, .dout = dout, .weight = call.weight});
    }
    const Fp8State& f = *m.fp8;
    const Tensor& memory = call.layer == Layer::head ? f.dlogits.rows : f.rows;
    const Tensor rows = codes(memory, f.options.gradients, dout.shape[0], dout.shape[1]);
    const Tensor transposed = transposed_gradient(f, call, dout);
    quantize_slot(m, slot_of(call, Role::gradient), rows, transposed, dout, dout_maker, false);
    const Tensor weight = weight_codes(m, call, true, false);
    multiply(m, dx, operand(m, call, Role::gradient, rows, false),
             operand(m, call, Role::weight, weight, true), {}, false, false);
}

void linear_backward_weight(Model& m, const LayerCall& call, const Tensor& dweight, const Tensor& dout,
                            const Tensor& x, const Tensor& x_transposed, bool again,
                            const TensorMaker& x_maker, bool accumulate) {
    if (!is_fp8(m, call))
        return matmul_backward_weight(m.context,
                                      {.dweight = dweight, .dout = dout, .x = x, .accumulate = accumulate});
    const Fp8State& f = *m.fp8;
    if (again) quantize_slot(m, slot_of(call, Role::input), {}, x_transposed, x, x_maker, true);
    const Tensor transposed = transposed_gradient(f, call, dout);
    multiply(m, dweight, operand(m, call, Role::gradient, transposed, true),
             operand(m, call, Role::input, x_transposed, true), {}, accumulate, false);
}

}  // namespace llamac
