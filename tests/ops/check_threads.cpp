// Two models of one process, with different kernels, in two threads: the bits of each are those that it has alone. Under
// ThreadSanitizer (OMP_NUM_THREADS=1: it does not know libgomp's barriers) nothing may be shared.
#include <thread>

#include "core/observer.h"
#include "small_run.h"

using namespace llamac;

namespace {

struct Run {
    Options options;
    std::vector<std::string> calls;  // "operation variant", of a step
    Trained trained;

    void operator()() {
        Trainer t(options, 0);
        const Observer observer = observe_calls(
            [this](const Call& call, const Variant& v) { calls.push_back(call.op->name + " " + v.name); });
        t.model.context.observer = &observer;
        t.start_step();
        t.finish_step();
        t.model.context.observer = nullptr;
        trained = train(t);
        trained.numbers.push_back(validate(t));
        for (const int32_t id : sample(t, {1}, 4, 1.0, 0)) trained.numbers.push_back(id);
    }
};

Run run_of(int64_t seed, const std::vector<std::string>& kernels, const Words& more = {}) {
    Run run{small_run(more), {}, {}};
    run.options.steps = 3;
    run.options.seed = seed;
    run.options.kernel = kernels;
    return run;
}

void check_together(const std::string& what, Run a, Run b) {
    Run alone_a = a, alone_b = b;
    alone_a();
    alone_b();
    check(alone_a.calls != alone_b.calls, what + ": the kernels differ");
    std::thread first(std::ref(a)), second(std::ref(b));
    first.join();
    second.join();
    check(a.trained == alone_a.trained && b.trained == alone_b.trained, what + ": other bits than alone");
    check(a.calls == alone_a.calls && b.calls == alone_b.calls, what + ": other kernels than alone");
}

TEST(check_two_trainers) {
    // The host's plain loops cannot reach a GPU's memory; on a CPU the naive kernels are emulated, which takes minutes.
    const std::string other = computing_context().backend == Backend::host ? "reference" : "naive";
    const std::vector<std::string> slow = {"matmul_forward=" + other, "rmsnorm_forward=" + other};
    check_together("the same weights, two choices", run_of(1, {}), run_of(1, slow));
    check_together("bf16, kernels beside the host's", run_of(1, {}, precisions[1]),
                   run_of(2, all_kernels(), precisions[2]));
}

}  // namespace

int main(int argc, char** argv) {
    return run_checks(argc, argv);
}
