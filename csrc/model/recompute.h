// Which activations are discarded after the forward pass and recomputed in the backward pass.
#pragma once
#include <cstdint>

namespace llamac {

struct Recompute {
    bool norm = false;        // the outputs of both norms
    bool swiglu = false;      // the product that enters the down projection
    bool qkv = false;         // queries, keys and values
    bool attention = false;   // the attention's output
    int64_t block_every = 0;  // every k-th block as a whole, all but its output; 0: none, 1: every block
};

}  // namespace llamac
