#include "train/verify.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "ops/operations.h"
#include "platform/ranges.h"

namespace llamac {
namespace {

constexpr int64_t max_copied = int64_t{256} << 20;  // bytes of weights, master weights and moments
// Thread blocks of AdamW, and vectors of any access, begin in a piece where they begin in the whole tensor.
constexpr int64_t piece_multiple = 2048, alignment = 64;

// The tensors that a state consists of, in the order of its rows.
std::vector<Tensor> tensors_of(const OptimizerState& s) {
    std::vector<Tensor> tensors;
    for (const Tensor& x : {s.weight, s.master, s.m, s.v})
        if (x.data) tensors.push_back(x);
    return tensors;
}

std::string this_device() {
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    const DeviceProperties& device = device_properties();
    return (device.emulated ? std::string("the CPU")
                            : device.name + std::string(", device ") + std::to_string(current_device())) +
           " of " + host;
}

}  // namespace

Verifier::Verifier(Model& m, int64_t micro, const AdamW& a, uint64_t s)
    : model(m), micro_batches(micro), adamw(a), seed(s) {
    const Parameters& p = model.parameters;
    int64_t bytes = 0;  // of a state's element
    const std::pair<const Tensor*, Tensor*> copies[] = {
        {&p.weights, &copy.weight}, {&p.master, &copy.master}, {&p.m, &copy.m}, {&p.v, &copy.v}};
    for (const auto& [buffer, copied] : copies)
        if (buffer->rank > 0) bytes += size_of(buffer->dtype), buffers++;
    plan_pieces(max_copied / bytes / piece_multiple * piece_multiple);
    int64_t largest = 0;
    for (const Piece& piece : pieces) largest = std::max(largest, piece.count);
    for (const auto& [buffer, copied] : copies)
        if (buffer->rank > 0)
            model.arena.plan("verification", copied, shaped(buffer->dtype, {largest + alignment}));
    name_rows();
    model.arena.plan("verification", &hashes, shaped(DType::f64, {hash_count()}));
    plan_workspace();
}

void Verifier::plan_pieces(int64_t max_elements) {
    const Parameters& p = model.parameters;
    for (const Parameter& parameter : p.table) {
        const auto [begin, count] = p.held(p.m, parameter);
        for (int64_t first = begin; first < begin + count; first += max_elements)
            pieces.push_back({&parameter, first, std::min(max_elements, begin + count - first)});
    }
}

// In the order of the reports: memory that must not change, losses, gradients in the order of the backward
// pass, the norm, results of the optimizer step.
void Verifier::name_rows() {
    const Parameters& p = model.parameters;
    const bool kept[] = {p.weights.rank > 0, p.master.rank > 0, true, true};
    const auto name_state = [&](const std::array<const char*, 4>& names) {
        for (const Piece& piece : pieces)
            for (size_t i = 0; i < names.size(); i++)
                if (kept[i]) rows.push_back({names[i], piece.parameter->name});
    };
    name_state({"the weight", "the master weight", "the first moment", "the second moment"});
    losses = rows.size();
    for (int64_t micro = 0; p.holds_head() && micro < micro_batches; micro++)
        rows.push_back({"the losses", "micro-batch " + std::to_string(micro)});
    gradients = rows.size();
    const std::vector<Parameter>& table = p.table;
    for (auto parameter = table.rbegin(); parameter != table.rend(); ++parameter)
        if (parameter->trains) rows.push_back({"the gradient", parameter->name});
    squares = rows.size();
    rows.push_back({"the norm", "all gradients"});
    results = rows.size();
    name_state({"the new weight", "the new master weight", "the new first moment", "the new second moment"});
}

// The workspace of the hashes, by a dry run on dummy addresses.
void Verifier::plan_workspace() {
    model.arena.place(reinterpret_cast<void*>(uintptr_t{1} << 20));
    model.context.dry_run = true;
    begin();
    for (const int pass : {0, 1}) end_micro_batch(pass, 0);
    end_first_pass();
    end(nullptr);
    model.context.dry_run = false;
    if (workspace.asked)
        model.arena.plan("verification", &workspace_bytes, shaped(DType::i32, {(workspace.asked + 3) / 4}));
}

Tensor Verifier::cell(size_t row, int column) const {
    return make_tensor(static_cast<double*>(hashes.data) + 4 * row + 2 * static_cast<size_t>(column),
                       DType::f64, {2});
}

void Verifier::hash(const Tensor& x, size_t row, int column) {
    Context context = model.context;
    context.workspace = &workspace;
    const Tensor memory = make_tensor(x.data, DType::bf16, {x.bytes() / size_of(DType::bf16)});
    llamac::hash(context, {.sum = cell(row, column), .x = memory});
}
void Verifier::hash_state(const OptimizerState& state, size_t row, int column) {
    for (const Tensor& x : tensors_of(state)) hash(x, row++, column);
}
void Verifier::hash_states(size_t row, int column) {
    for (const Piece& piece : pieces) {
        hash_state(optimizer_state(model.parameters, *piece.parameter, piece.first, piece.count), row,
                   column);
        row += buffers;
    }
}
void Verifier::hash_gradients(int column) {
    const Parameters& p = model.parameters;
    size_t row = gradients;
    for (auto parameter = p.table.rbegin(); parameter != p.table.rend(); ++parameter) {
        if (!parameter->trains) continue;
        const auto [first, count] = p.held(p.m, *parameter);
        if (count > 0) hash(p.part(p.gradients, *parameter, first, count), row, column);
        row++;
    }
}

// A piece's place in the copies: as far behind an address that vectors want as it is itself.
OptimizerState Verifier::copy_of(const Piece& piece) const {
    const int64_t shift = (piece.parameter->offset + piece.first) % alignment;
    const auto part = [&](const Tensor& buffer) {
        if (!buffer.data) return Tensor{};
        return make_tensor(static_cast<char*>(buffer.data) + shift * size_of(buffer.dtype), buffer.dtype,
                           {piece.count});
    };
    return {part(copy.weight), part(copy.master), part(copy.m), part(copy.v)};
}

void Verifier::begin() {
    const Range range("verification");
    if (workspace_bytes.data) workspace.use(workspace_bytes.data, workspace_bytes.bytes());
    hash_states(0, 0);
}

void Verifier::end_micro_batch(int pass, int64_t micro) {
    if (model.parameters.holds_head())
        hash(model.activations.losses, losses + static_cast<size_t>(micro), pass);
}

void Verifier::end_first_pass() {
    const Range range("verification");
    hash_gradients(0);
}

void Verifier::repeat_optimizer_step() {
    const Range range("verification");
    const bool is_summed = sums_squares_in_backward(model);
    if (!is_summed) sum_squares(model);
    hash(model.squares, squares, 0);
    if (is_summed) sum_squares(model);
    size_t row = 0;
    for (const Piece& piece : pieces) {
        const OptimizerState state = optimizer_state(model.parameters, *piece.parameter, piece.first,
                                                     piece.count),
                             copied = copy_of(piece);
        const std::vector<Tensor> from = tensors_of(state), to = tensors_of(copied);
        for (size_t k = 0; k < to.size(); k++)
            copy_bytes_async(model.context, to[k].data, from[k].data, to[k].bytes());
        hash_state(copied, row, 1);
        update(model, *piece.parameter, piece.first, copied, adamw, seed);
        hash_state(copied, results + row, 0);
        row += buffers;
    }
}

void Verifier::end(double* to) {
    const Range range("verification");
    hash(model.squares, squares, 1);
    hash_states(results, 1);
    hash_gradients(1);
    if (!model.context.dry_run) copy_bytes_async(model.context, to, hashes.data, hashes.bytes());
}

std::string Verifier::difference(const double* found) const {
    for (size_t row = 0; row < rows.size(); row++) {
        // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): the bits count
        if (std::memcmp(found + 4 * row, found + 4 * row + 2, 2 * sizeof(double)) == 0) continue;
        const std::string expected = row < losses
                                         ? "the bits from before the step, which nothing had written since,"
                                         : "the same bits from the same computation";
        return std::string(rows[row].what) + " of " + rows[row].name + ": expected " + expected + " on " +
               this_device() + ", found others; go on from an earlier checkpoint, on another device";
    }
    return "";
}

}  // namespace llamac
