// AdamW: weights rounded stochastically, and with fp32 master weights. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"adamw", {"master"}}, {"adamw"}});
}
