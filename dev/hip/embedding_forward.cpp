// Embedding: a row of the table for every token. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(argc, argv, {{"embedding_forward"}});
}
