// AdamW that also writes the new weight in fp8, rounded stochastically. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"adamw_quantize", {"master"}}});
}
