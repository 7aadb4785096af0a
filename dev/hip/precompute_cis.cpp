// The table of RoPE's angles, at Llama 3.1's longest context. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"precompute_cis", {}, {}, {{"T", 131072}}}});
}
