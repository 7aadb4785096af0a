// Quantisation to fp8 with a scale per row. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"quantize_rows"}});
}
