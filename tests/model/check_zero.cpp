// The order of the exchanges between ranks: test_several_devices.py starts the program once per rank. The exchanges of a step are
// done as late as its waits allow, where a missing wait changes results, and the bits are those of exchanges that are done at once.
#include "check.h"
#include "model/zero.h"
#include "run/ranks.h"
#include "small_run.h"

using namespace llamac;

namespace zero_checks {
namespace {

Words words_for(int64_t level) {
    return words_of("--zero " + std::to_string(level) +
                    " --optimizer-state bf16 --master-weights off --dtype bf16 --grad-dtype bf16 --steps 4 "
                    "--grad-clip 0.1");
}

// Each rank has a folder of its own, and ranks compare their flags: names in that folder.
const Words names = {"--model", "model",        "--train-data", "train.bin", "--val-data",
                     "val.bin", "--gemm-cache", "gemm.json",    "--out",     "out"};

// The steps, with a validation after the second one, and all weights.
Trained train_with(const Options& options, const Ranks& ranks, bool late) {
    Trainer t(options, 0, ranks);
    t.model.exchanges->late = late;
    Trained trained;
    while (t.step < options.steps) {
        t.start_step();
        finish(t, 0, trained);
        if (t.step == 2) trained.numbers.push_back(validate(t));
    }
    visit_weights(t, [&](const Parameter&, const Tensor& weight) { trained.weights += bits_of(weight); });
    return trained;
}

// In one process.
TEST(check_late_work) {
    Exchanges exchanges(1);
    std::string done;
    Exchanges::Moment first, second;
    exchanges.enqueue([&] { done += "a"; });
    check(done == "a", "at once");
    exchanges.late = true;
    exchanges.enqueue([&] { done += "b"; });
    exchanges.record(first);
    exchanges.enqueue([&] { done += "c"; });
    exchanges.record(second);
    check(done == "a", "nothing waits");
    exchanges.wait(first, exchanges.stream.handle);
    check(done == "ab", "what is before the moment");
    exchanges.wait(second, exchanges.stream.handle);
    exchanges.wait(first, exchanges.stream.handle);
    check(done == "abc", "once");
}

TEST_OF_RANKS(check_exchanges) {
    const Launch launch = join_launch();
    const Options any = small_run();
    fs::current_path(in_folder(""));
    Ranks ranks(launch, Patience(any));
    ranks.connect_devices();
    std::optional<Trained> first;
    for (const int64_t level : {0, 1, 2, 3}) {
        // One micro-batch per step, with which all levels have the same bits, and two.
        for (const int64_t micro_batches : {1, 2}) {
            Words words = words_for(level);
            const int64_t tokens = micro_batches * ranks.count * 4 * 16;
            words = with(words, {"--total-batch-size", std::to_string(tokens)});
            const Options options = small_run(with(words, names));
            const Trained at_once = train_with(options, ranks, false);
            check(train_with(options, ranks, true) == at_once,
                  "level " + std::to_string(level) + ", " + std::to_string(micro_batches) + " micro-batches");
            if (micro_batches > 1) continue;
            if (!first) first = at_once;
            check(at_once == *first, "level " + std::to_string(level) + " has the bits of level 0");
        }
    }
    ranks.barrier();
}

}  // namespace
}  // namespace zero_checks
