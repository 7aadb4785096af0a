#include "model/linear.h"

#include <algorithm>
#include <vector>

#include "core/device_memory.h"
#include "model/exchange.h"
#include "model/model.h"
#include "ops/operations.h"

namespace llamac {
namespace {

enum class Role : uint8_t { input, weight, gradient };

int64_t slot_of(const LayerCall& call, Role role) {
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

bool is_fp8(const Model& m, const LayerCall& call) {
    return m.fp8 && m.fp8->blocks.has(call.block);
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

// rows, transposed: where they have data, get x's codes. again: the same tensor has been quantised in this pass.
void quantize_slot(Model& m, int64_t slot, const Tensor& rows, const Tensor& transposed, const Tensor& x,
                   bool again) {
    const Fp8State& f = *m.fp8;
    const bool delayed = f.options.scaling == Fp8Scaling::delayed;
    if (!again && !(delayed && f.calibrated)) take_current_scale(m, slot, x);
    const bool measures = f.measures && !again;
    quantize(m.context, {.out = rows,
                         .transposed = transposed,
                         .amax = measures && delayed ? at(f.amax, slot) : Tensor{},
                         .saturated = measures ? at(f.saturated, slot) : Tensor{},
                         .x = x,
                         .scale = at(f.scale, slot)});
}

struct Operand8 {
    Tensor codes, inverse;
};
Operand8 operand(const Model& m, const LayerCall& call, Role role, const Tensor& values) {
    return {values, make_tensor(inverse_row(*m.fp8, slot_of(call, role)).data, DType::f32, {1})};
}

void multiply(Model& m, const Tensor& out, const Operand8& a, const Operand8& b, const Tensor& residual,
              bool accumulate, bool fast) {
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
void check_shapes(const Config& c, int64_t N) {
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
                                                     {"intermediate_size", c.F}};
    for (const auto& [what, size] : sizes)
        if (size % 16)
            fail("--matmul-dtype fp8: ", what, ": expected a multiple of 16, found ", size,
                 "; --matmul-dtype storage takes it");
}

}  // namespace

std::string slot_name(int64_t slot) {
    constexpr const char* names[slots_per_block] = {
        "input_norm", "qkv.weight",  "attention", "o.weight", "post_norm", "gate_up.weight",
        "swiglu",     "down.weight", "d.qkv",     "d.o",      "d.gate_up", "d.down"};
    return std::to_string(slot / slots_per_block) + "." + names[slot % slots_per_block];
}

void plan_fp8(Fp8State& f, const Fp8Options& options, const Config& c, int64_t N, Arena& arena) {
    check_shapes(c, N);
    f.options = options;
    f.blocks = {options.keep_first, c.L - options.keep_last, options.values};
    if (f.blocks.first >= f.blocks.end)
        fail("--fp8-keep-first ", options.keep_first, " --fp8-keep-last ", options.keep_last,
             ": the model has ", c.L, " blocks, expected at least one with products in fp8");
    f.slots = c.L * slots_per_block;
    arena.plan("fp8 scales", &f.inverse, shaped(DType::f32, {f.slots, 4}));
    for (Tensor* table : {&f.scale, &f.limit}) arena.plan("fp8 scales", table, shaped(DType::f32, {f.slots}));
    arena.plan("fp8 scales", &f.amax, shaped(DType::f32, {f.slots + 1}));
    arena.plan("fp8 scales", &f.saturated, shaped(DType::i32, {f.slots}));
    const int64_t widest = std::max({c.C, c.q_size(), c.qkv_size(), 2 * c.F});
    const int64_t largest = c.C * std::max({c.q_size(), c.qkv_size(), 2 * c.F});
    arena.plan("fp8 operands", &f.rows, shaped(options.values, {N * widest}));
    arena.plan("fp8 operands", &f.transposed, shaped(options.values, {N * widest}));
    arena.plan("fp8 operands", &f.weight, shaped(options.values, {largest}));
}

void reset_fp8(Fp8State& f) {
    const auto fill = [](const Tensor& table, const std::vector<float>& values) {
        copy_bytes(table.data, values.data(), table.bytes());
    };
    const size_t slots = static_cast<size_t>(f.slots);
    fill(f.scale, std::vector<float>(slots, 1.0f));
    fill(f.inverse, std::vector<float>(4 * slots, 1.0f));
    fill(f.amax, std::vector<float>(slots + 1, 0.0f));
    std::vector<float> limits(slots);
    for (size_t s = 0; s < slots; s++) {
        const bool gradient = s % slots_per_block >= 2 * linear_layers;
        limits[s] = info(gradient ? f.options.gradients : f.options.values).largest;
    }
    fill(f.limit, limits);
    CHECK(hipMemset(f.saturated.data, 0, static_cast<size_t>(f.saturated.bytes())));
    f.calibrated = false;
}

void measure_fp8(Model& m, bool on) {
    if (m.fp8) m.fp8->measures = on;
}

std::vector<NamedTensor> fp8_tensors(const Model& m) {
    if (!m.fp8 || m.fp8->options.scaling == Fp8Scaling::current) return {};
    return {{"fp8.scale", m.fp8->scale}};
}

void load_fp8(Model& m, const std::string& path) {
    if (fp8_tensors(m).empty()) return;
    Fp8State& f = *m.fp8;
    const SafetensorsFile file(path);
    if (!file.find("fp8.scale")) return;
    file.read("fp8.scale", {f.slots}, 0, f.scale);
    std::vector<float> scales(static_cast<size_t>(f.slots)), inverses(4 * scales.size(), 1.0f);
    copy_bytes(scales.data(), f.scale.data, f.scale.bytes());
    for (size_t s = 0; s < scales.size(); s++) inverses[4 * s] = 1.0f / scales[s];
    copy_bytes(f.inverse.data, inverses.data(), f.inverse.bytes());
    f.calibrated = true;
}

bool is_settled(const Model& m) {
    return !m.fp8 || m.fp8->options.scaling == Fp8Scaling::current || m.fp8->calibrated;
}

void update_fp8_scales(Model& m) {
    if (!m.fp8 || m.fp8->options.scaling == Fp8Scaling::current) return;
    Fp8State& f = *m.fp8;
    const Tensor amax = make_tensor(f.amax.data, f.amax.dtype, {f.slots});
    largest_over_ranks(m, amax);
    update_scales(m.context, {.scale = f.scale, .inverse = f.inverse, .amax = amax, .limit = f.limit});
    if (!m.context.dry_run) f.calibrated = true;
}

void linear_forward(Model& m, const LayerCall& call, const Tensor& out, const Tensor& x,
                    const Tensor& x_transposed, const Tensor& residual) {
    if (!is_fp8(m, call))
        return matmul_forward(m.context, {.out = out, .x = x, .weight = call.weight, .residual = residual});
    const Fp8State& f = *m.fp8;
    const Tensor rows = codes(f.rows, f.options.values, x.shape[0], x.shape[1]);
    const Tensor weight = codes(f.weight, f.options.values, call.weight.shape[0], call.weight.shape[1]);
    quantize_slot(m, slot_of(call, Role::input), rows, x_transposed, x, false);
    quantize_slot(m, slot_of(call, Role::weight), weight, {}, call.weight, false);
    multiply(m, out, operand(m, call, Role::input, rows), operand(m, call, Role::weight, weight), residual,
             false, true);
}

void linear_backward_input(Model& m, const LayerCall& call, const Tensor& dx, const Tensor& dout) {
    if (!is_fp8(m, call))
        return matmul_backward_input(m.context, {.dx = dx, .dout = dout, .weight = call.weight});
    const Fp8State& f = *m.fp8;
    const Tensor rows = codes(f.rows, f.options.gradients, dout.shape[0], dout.shape[1]);
    const Tensor transposed = codes(f.transposed, f.options.gradients, dout.shape[1], dout.shape[0]);
    const Tensor weight = codes(f.weight, f.options.values, call.weight.shape[1], call.weight.shape[0]);
    quantize_slot(m, slot_of(call, Role::gradient), rows, transposed, dout, false);
    quantize_slot(m, slot_of(call, Role::weight), {}, weight, call.weight, true);
    multiply(m, dx, operand(m, call, Role::gradient, rows), operand(m, call, Role::weight, weight), {}, false,
             false);
}

void linear_backward_weight(Model& m, const LayerCall& call, const Tensor& dweight, const Tensor& dout,
                            const Tensor& x, const Tensor& x_transposed, bool again, bool accumulate) {
    if (!is_fp8(m, call))
        return matmul_backward_weight(m.context,
                                      {.dweight = dweight, .dout = dout, .x = x, .accumulate = accumulate});
    const Fp8State& f = *m.fp8;
    if (again) quantize_slot(m, slot_of(call, Role::input), {}, x_transposed, x, true);
    const Tensor transposed = codes(f.transposed, f.options.gradients, dout.shape[1], dout.shape[0]);
    multiply(m, dweight, operand(m, call, Role::gradient, transposed),
             operand(m, call, Role::input, x_transposed), {}, accumulate, false);
}

}  // namespace llamac
