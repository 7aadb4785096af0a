// Key/value heads repeated for their query heads. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"repeat_kv_forward"}});
}
