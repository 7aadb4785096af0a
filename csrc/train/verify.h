// --verify-every: a step in which every result is computed twice. The same computation gives the same bits, so a difference is a
// fault of the device, of its memory or of a kernel.
//
// The micro-batches run twice. The first one writes the gradients and the others add to them, so the second run needs no copy.
// Hashes (ops/hash.hip) of each micro-batch's losses and of each parameter's gradient are compared. The gradients of the second
// run are hashed after the optimizer step, so a change is detected until AdamW has read them.
//
// AdamW first runs on copies of the weights, master weights and moments, one piece of a tensor at a time. Its results are compared
// with those of the step's own AdamW, and the copies with the memory before the first micro-batch.
//
// The verified code is the code of the run: graphs are replayed as in all other steps, and only the repeated AdamW and the hashes
// are launched between them. Nothing waits: the hashes go to the host with the step's losses.
#pragma once
#include <string>
#include <vector>

#include "core/device_memory.h"
#include "model/optimizer.h"

namespace llamac {

struct Verifier {
    // Plans its memory in the model's arena, before that is allocated: 256 MiB and a few KB at most.
    Verifier(Model& model, int64_t micro_batches, const AdamW& adamw, uint64_t seed);
    Verifier(const Verifier&) = delete;

    // These put work into the model's stream, in this order.
    void begin();                                   // before the first micro-batch
    void end_micro_batch(int pass, int64_t micro);  // each of them in pass 0, then each of them in pass 1
    void end_first_pass();
    void repeat_optimizer_step();  // after set_step
    void end(double* hashes);      // after the step's own optimizer step; fills [hash_count], pinned
    int64_t hash_count() const { return 4 * static_cast<int64_t>(rows.size()); }

    // The first difference in the order of computation, of the hashes that `end` has filled; "": none.
    std::string difference(const double* hashes) const;

  private:
    // A comparison: of the hashes of pass 0 and pass 1, or of the repeated and of the step's own result.
    struct Row {
        const char* what;
        std::string name;
    };
    // Elements of a parameter that are updated in one call.
    struct Piece {
        const Parameter* parameter;
        int64_t first, count;
    };
    void plan_pieces(int64_t max_elements);
    void name_rows();
    void plan_workspace();
    Tensor cell(size_t row, int column) const;  // f64 [2]
    void hash(const Tensor& x, size_t row, int column);
    void hash_state(const OptimizerState& state, size_t row, int column);
    void hash_states(size_t row, int column);  // of all pieces
    void hash_gradients(int column);
    OptimizerState copy_of(const Piece& piece) const;

    Model& model;
    const int64_t micro_batches;
    const AdamW adamw;
    const uint64_t seed;
    std::vector<Piece> pieces;
    std::vector<Row> rows;
    size_t losses = 0, gradients = 0, squares = 0,
           results = 0;   // the first row of each; the state's are before
    size_t buffers = 0;   // of a state: 3, or 4 with master weights
    OptimizerState copy;  // [elements of the largest piece and an offset]
    Tensor hashes;        // f64 [rows, 2 columns, 2]
    Tensor workspace_bytes;
    Workspace workspace;  // of hash: its own, as the model's is planned already
};

}  // namespace llamac
