// --document-mask: runs whose bits do not depend on how they are computed, its memory, and what it refuses.
// tests/train/test_documents.py compares what it computes.
#include <map>

#include "core/device_memory.h"
#include "core/observer.h"
#include "small_run.h"
#include "train/memory.h"
#include "vocabulary_file.h"

using namespace llamac;

namespace documents_checks {
namespace {

std::string vocabulary(const std::string& name, uint32_t bos, uint32_t eos) {
    return put(name, vocabulary_file(std::vector<std::string>(128, "x"), 0, bos, eos));
}

// Documents of about 12 tokens each, in sequences of 16: the walk of small_run meets one of the marks in as many.
Options masked_run(const Words& more = {}) {
    return small_run(with({"--document-mask", "on", "--tokenizer", vocabulary("marks.vocab", 4, 8)}, more));
}

// ---- the same bits ----

TEST(check_same_bits) {
    for (const Words& precision : {precisions[0], precisions[2]}) {
        const Trained whole = train(masked_run(precision), 0);
        check(!(train(small_run(precision), 0) == whole), "the mask changes a run");
        check(train(masked_run(precision), 2) == whole, "two steps ahead: other bits");
        for (const Words& how : {Words{"--graphs", "off"}, {"--recompute", "block", "--verify-every", "1"}})
            check(train(masked_run(with(precision, how)), 1) == whole, how[0] + ": other bits");
    }
}

TEST(check_kernels) {
    Options o = masked_run({"--steps", "2", "--dtype", "bf16", "--verify-every", "1"});
    o.kernel = all_kernels();
    const Trained replayed = train(o, 1);
    o.graphs = false, o.verify_every = 0, o.recompute.block_every = 1;
    check(train(o, 0) == replayed, "kernels: other bits");
}

TEST(check_resumed) {
    const Words words = {"--out", in_folder("resumed")};
    const Trained whole = train(masked_run(words), 0);
    saved_run(masked_run(words));
    const Words more = with(words, {"--resume", "auto"});
    Trainer again(masked_run(more), 0);
    check(again.warnings.find("document-mask") == std::string::npos, "the same mask: no warning");
    check(train(again).weights == whole.weights, "resumed: other bits");
    const Trainer other(small_run(more), 0);
    check(other.warnings.find("--document-mask was \"on\", is \"off\"") != std::string::npos,
          "resumed without the mask: " + other.warnings);
}

// Validation sees documents, samples are one document, and neither changes the steps that follow.
TEST(check_between_steps) {
    Trainer t(masked_run(), 0), plain(small_run(), 0);
    check(validate(t) != validate(plain) && validate(t) == validate(t), "validation is masked");
    const std::vector<int32_t> prompt = {9, 4, 7, 8, 3};  // with marks in it
    check(sample(t, prompt, 8, 0, 0) == sample(plain, prompt, 8, 0, 0), "samples are not masked");
    check(train(t) == train(masked_run(), 0), "validation and samples change no step");
}

// ---- what attention is given ----

TEST(check_every_call) {
    for (const char* recompute : {"none", "attention", "block"}) {
        Trainer t(masked_run({"--recompute", recompute}), 0);
        std::map<std::string, int> calls;
        int unmasked = 0;
        const Observer observer = observe_calls([&](const Call& call, const Variant&) {
            if (call.op->name.find("attention_") != 0) return;
            calls[call.op->name]++;
            const Tensor& first = call.operand("first");
            if (!first.data) return void(unmasked++);
            std::vector<int32_t> ids(64), found(64), expected(64);
            copy_bytes(ids.data(), t.model.activations.tokens.data, 4 * 64);
            copy_bytes(found.data(), first.data, first.bytes());
            find_documents(ids.data(), 4, 16, {4, 8}, expected.data());
            check(found == expected && found != std::vector<int32_t>(64, 0));
        });
        t.model.context.observer = &observer;
        t.start_step();
        t.finish_step();
        const bool again = std::string(recompute) != "none";
        check(unmasked == 0 && calls["attention_backward"] == 2 * 2 &&
                  calls["attention_forward"] == (again ? 2 : 1) * 2 * 2,
              std::string("every call of attention is masked, --recompute ") + recompute);
    }
}

// ---- memory ----

TEST(check_memory_table) {
    const auto tokens = [](const Options& o, int64_t ahead) {
        const Trainer t(o, ahead);
        for (const MemoryRow& row : memory_rows(t.model, true))
            if (row.group == "tokens") return row;
        return MemoryRow{};
    };
    for (const int64_t ahead : {0, 1}) {
        const MemoryRow with = tokens(masked_run(), ahead), without = tokens(small_run(), ahead);
        // Of a micro-batch, and of each step in flight.
        check(with.tensors == without.tensors + 2 + ahead, "the table has `first`");
        check(with.bytes == without.bytes + 4 * (64 + (1 + ahead) * 128), "the table has its bytes");
    }
}

// ---- refused ----

TEST(check_refused) {
    const auto run = [](const std::string& tokenizer) {
        Trainer t(small_run({"--document-mask", "on", "--tokenizer", tokenizer}), 0);
    };
    refused("no tokenizer", {"--document-mask on", "expected the tokenizer of the data", "--tokenizer FILE"},
            [&] { run("none"); });
    refused("no marks", {"none.vocab: --document-mask on", "bos, eos", "found neither"},
            [&] { run(vocabulary("none.vocab", no_token, no_token)); });
    const std::string wide =
        put("wide.vocab", vocabulary_file(std::vector<std::string>(300, "x"), 0, 3, 299));
    refused("a mark that the model does not have",
            {"wide.vocab: --document-mask on", "vocabulary of 128", "found 299"}, [&] { run(wide); });
    run(vocabulary("ends.vocab", no_token, 8));  // one of them is enough
}

}  // namespace
}  // namespace documents_checks
