// Attention of the token for which a cache has room left, to all before it. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"attention_next", {}, {}, {{"B", 1}}, {"begin"}, {"end"}}});
}
