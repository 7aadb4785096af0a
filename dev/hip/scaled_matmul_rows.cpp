// A product in fp8 with scales per row. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"scaled_matmul_rows"}});
}
