// Causal attention with grouped queries. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"attention_forward", {"first"}}});
}
