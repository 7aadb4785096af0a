// Embedding, backward: rows of equal tokens added in order. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"embedding_backward"}});
}
