// Cross-entropy with its gradient in the logits' place. Flags: benchmark.h.
#include "benchmark.h"

int main(int argc, char** argv) {
    return llamac::run_benchmarks(
        argc, argv,
        {{"cross_entropy", {"dlosses", "mean", "num_valid"}, {"dlogits", "logits"}, {{"N", 4096}}}});
}
