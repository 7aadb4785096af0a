// The gradients of a group's heads, added. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"repeat_kv_backward"}});
}
