// The gradient of queries, keys and values, turned back, in fp8. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"rope_backward_quantize"}});
}
