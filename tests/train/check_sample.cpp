// Generation: with the cache the same tokens as by whole passes, what a choice leaves, and what is refused.
#include <atomic>
#include <cmath>
#include <memory>
#include <new>
#include <numeric>

#include "small_run.h"
#include "train/inference.h"
#include "train/sample.h"

using namespace llamac;

namespace {

std::atomic<int64_t> large_allocations = 0;
constexpr size_t large = 4096;  // smaller than the logits of `wide`

}  // namespace

__attribute__((noinline)) void* operator new(size_t bytes) {
    if (bytes >= large) large_allocations++;
    if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
    throw std::bad_alloc();
}
// std::stable_sort's; a sanitizer has one of its own, which does not fit the operator below.
__attribute__((noinline)) void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
    if (bytes >= large) large_allocations++;
    return std::malloc(bytes ? bytes : 1);
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
    std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept {
    std::free(memory);
}

namespace {

// A directory with the weights of a run that has not begun: of grouped queries, with a vocabulary of 2048.
std::string wide() {
    const std::string directory = in_folder("wide");
    if (fs::exists(directory)) return directory;
    std::string text = model_json;
    text.replace(text.find("128"), 3, "2048");
    text.replace(text.find("\"num_attention_heads\": 2"), 24, "\"num_attention_heads\": 4");
    fs::create_directories(in_folder("shape"));
    put("shape/config.json", text);
    Trainer trainer(small_run({"--model", in_folder("shape")}));
    save_to(trainer, directory);
    return directory;
}

std::vector<int32_t> walk(int64_t length, int32_t step) {
    std::vector<int32_t> ids(static_cast<size_t>(length));
    for (size_t i = 0; i < ids.size(); i++) ids[i] = static_cast<int32_t>((i * i * 13 + 7) * step % 2048);
    return ids;
}

InferenceOptions inference(int64_t sequences, int64_t positions = 64, DType dtype = DType::f32) {
    return {wide(), dtype, 4, 16, {sequences, positions}, {}};
}

// Of prompts that begin below and end above the trained length, in any case.
TEST(check_cached_samples) {
    for (const Words& precision : {precisions[0], precisions[1]}) {
        Trainer cached(small_run(precision)), whole(small_run(with(precision, {"--sample-every", "0"})));
        check(cached.model.cache && !whole.model.cache, "a cache where samples are made");
        for (const double temperature : {0.0, 0.7})
            for (const int64_t length : {1, 5, 16, 20}) {
                std::vector<int32_t> prompt(static_cast<size_t>(length));
                std::iota(prompt.begin(), prompt.end(), 3);
                check(sample(cached, prompt, 24, temperature, 9) == sample(whole, prompt, 24, temperature, 9),
                      "the same tokens after " + std::to_string(length));
            }
    }
    const Words fp8 = {"--matmul-dtype", "fp8"};
    check(!model_options(small_run(fp8)).cache.positions, "no cache in fp8: the scales would be others");
}

// The memory of a model that is not trained.
TEST(check_memory_of_inference) {
    const Inference model(inference(1));
    const Parameters& p = model.model.parameters;
    check(p.weights.data && !p.gradients.data && !p.m.data && !p.v.data && !p.master.data, "weights alone");
    const auto& blocks = model.model.activations.blocks;
    check(blocks[0].gate_up.data == blocks[1].gate_up.data, "one memory for all layers");
    check(!model.model.activations.dqkv.data, "no gradients");
}

using Prompts = std::vector<std::vector<int32_t>>;

// All prompts with one sampling; each draws numbers of its own.
Prompts continue_alike(Model& model, const Prompts& prompts, const Ending& ending, const Sampling& sampling,
                       const std::function<bool(size_t, int32_t)>& made = {}) {
    std::vector<Sampling> samplings(prompts.size(), sampling);
    for (size_t p = 0; p < prompts.size(); p++) samplings[p].step += static_cast<uint32_t>(p);
    return generate_all(model, prompts, ending, samplings, made);
}

// A prompt longer than a pass, several of different lengths at once, and the kernels that a device would take.
TEST(check_batches) {
    const std::vector<std::vector<int32_t>> prompts = {walk(5, 1), walk(33, 3), walk(16, 5), walk(1, 7),
                                                       walk(17, 9)};
    const Sampling sampling{0.9, 40, 11, 0, 0.95};
    Inference one(inference(1)), three(inference(3));
    const auto alone = continue_alike(one.model, prompts, {20}, sampling);
    check(alone == continue_alike(three.model, prompts, {20}, sampling), "the same in batches");
    for (size_t p = 0; p < prompts.size(); p++) {
        Sampling own = sampling;
        own.step = static_cast<uint32_t>(p);
        check(continue_alike(one.model, {prompts[p]}, {20}, own)[0] == alone[p], "and each by itself");
        check(alone[p].size() == 20, "as many as were wanted");
    }
    const std::vector<Sampling> several = {{0}, {1.2, 5, 3}, sampling, {0}, {0.7, 0, 9, 4, 0.5}};
    const Prompts mixed = generate_all(three.model, prompts, {20}, several);
    for (size_t p = 0; p < prompts.size(); p++)
        check(mixed[p] == continue_alike(one.model, {prompts[p]}, {20}, several[p])[0],
              "samplings of their own");
    if (one.model.context.backend == Backend::device) return;
    InferenceOptions kernels = inference(3);
    kernels.kernels = all_kernels();
    Inference emulated(kernels);
    check(continue_alike(emulated.model, prompts, {3}, {0, 0, 0}) ==
          continue_alike(three.model, prompts, {3}, {0, 0, 0}));
}

// Greedy: the tokens that the device finds and reads by itself are those that the host picks among all logits; replayed or
// launched, and with two passes under way.
TEST(check_likeliest) {
    const std::vector<std::vector<int32_t>> prompts = {walk(5, 1), walk(33, 3), walk(16, 5), walk(1, 7)};
    Inference replayed(inference(3)), launched(inference(3));
    launched.model.hook = [](const std::string&, const Tensor&) {};
    const auto found = continue_alike(replayed.model, prompts, {20}, {0});
    check(found == continue_alike(replayed.model, prompts, {20}, {1, 1}), "the host's choice");
    check(found == continue_alike(launched.model, prompts, {20}, {0}), "launched, without a graph");
    check(replayed.model.cache->replay.graph && !launched.model.cache->replay.graph, "one is replayed");
    check(found == continue_alike(replayed.model, prompts, {20}, {0}));

    Model& m = launched.model;
    const auto length = static_cast<int64_t>(prompts[0].size());
    std::vector<float> logits;
    std::vector<int32_t> first(1), second(1);
    begin_sequences(m, {&length, 1});
    prefill(m, 0, prompts[0], logits);
    queue_argmax(m, {found[0].data(), 1});
    queue_argmax(m);
    finish_argmax(m, first);
    finish_argmax(m, second);
    check(first[0] == found[0][1] && second[0] == found[0][2], "two passes under way");
    queue_argmax(m);
    begin_sequences(m, {&length, 1});
    check(m.cache->pending->finished == m.cache->pending->queued, "a pass that nobody waits for is left");
}

TEST(check_endings) {
    Inference model(inference(2));
    const std::vector<std::vector<int32_t>> prompts = {walk(3, 1), walk(9, 3)};
    const Sampling greedy{0};
    const auto whole = continue_alike(model.model, prompts, {12}, greedy);
    const int32_t stop = whole[0][4];
    const auto at = std::find(whole[0].begin(), whole[0].end(), stop) - whole[0].begin() + 1;
    const auto stopped = continue_alike(model.model, prompts, {12, {stop}}, greedy);
    check(stopped[0] == std::vector(whole[0].begin(), whole[0].begin() + at));
    std::vector<std::vector<int32_t>> told(2);
    const auto cut = continue_alike(model.model, prompts, {12}, greedy, [&](size_t p, int32_t token) {
        told[p].push_back(token);
        return p == 0 || told[p].size() < 2;
    });
    check(told == cut && cut[0] == whole[0] && cut[1].size() == 2, "told of each, ended by who is told");
    check(continue_alike(model.model, {walk(40, 1)}, {25}, greedy)[0].size() == 25, "to the cache's end");
    refused("a prompt beyond the cache", {"prompt 2", "room for 26", "context of 64", "40 tokens"},
            [&] { continue_alike(model.model, {walk(1, 1), walk(40, 1)}, {26}, greedy); });
    refused("an empty prompt", {"prompt 1", "at least one token"},
            [&] { continue_alike(model.model, {{}}, {2}, greedy); });
    refused("a context beyond the model's", {"at most 64", "found 65"},
            [] { Inference wrong(inference(1, 65)); });
}

TEST(check_allocations) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
        Inference model(inference(2, 64, dtype));
        if (model.model.context.backend == Backend::device) return;  // logits pass through memory of the host
        std::vector<int64_t> counts;
        const auto count = [&](size_t, int32_t) {
            counts.push_back(large_allocations);
            return true;
        };
        continue_alike(model.model, {walk(4, 1), walk(6, 3)}, {30}, {0.8, 0, 1, 0, 0.9}, count);
        check(counts.size() == 60 && counts[4] == counts.back(), "no memory per token");
        check(counts[0] > 0, "what is allocated before is counted");
    }
}

// ---- the choice of a token

int32_t pick(const std::vector<float>& logits, const Sampling& sampling, double u) {
    TokenChoice choice;
    return choice.pick(logits, sampling, u);
}

// The probabilities are 1/2, 1/4, 1/8, 1/8 of tokens 2, 0, 1, 3.
TEST(check_choices) {
    const std::vector<float> logits = {std::log(2.0f), 0, std::log(4.0f), 0};
    const auto picked = [&](const Sampling& s, std::vector<double> places) {
        std::vector<int32_t> ids;
        for (const double u : places) ids.push_back(pick(logits, s, u));
        return ids;
    };
    using Ids = std::vector<int32_t>;
    check(picked({1}, {0.01, 0.49, 0.51, 0.74, 0.76, 0.87, 0.88, 0.999}) == Ids{2, 2, 0, 0, 1, 1, 3, 3});
    check(picked({0}, {0.01, 0.999}) == Ids{2, 2}, "temperature 0");
    check(picked({1, 2}, {0.01, 0.66, 0.67, 0.999}) == Ids{2, 2, 0, 0}, "top_k");
    check(picked({1, 0, 0, 0, 0.7}, {0.66, 0.67, 0.999}) == Ids{2, 0, 0});
    check(picked({1, 0, 0, 0, 0.1}, {0.01, 0.999}) == Ids{2, 2}, "top_p: at least one");
    check(picked({1, 3, 0, 0, 0.9}, {0.9, 0.999}) == Ids{1, 1}, "top_p: of those that top_k leaves");
    check(picked({0.5}, {0.72, 0.73, 0.9, 0.91}) == Ids{2, 0, 0, 1}, "temperature");
    // Thousands, of which the likeliest come in portions: as if all had been sorted.
    std::vector<float> many(5000);
    for (size_t i = 0; i < many.size(); i++) many[i] = static_cast<float>(i * 2654435761u % 5000) / 5000;
    std::vector<int32_t> order(many.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return many[a] > many[b]; });
    double sum = 0, below = 0;
    for (const float logit : many) sum += std::exp(double{logit});
    bool same = true;
    for (size_t i = 0; i < order.size(); i += i < 600 ? 1 : 97) {
        below = 0;
        for (size_t j = 0; j < i; j++) below += std::exp(double{many[order[j]]});
        same &= pick(many, {1}, (below + 0.5 * std::exp(double{many[order[i]]})) / sum) == order[i];
    }
    check(same, "of thousands");
}

// Losses are those of validation; the likeliest are those that generation takes.
TEST(check_scores) {
    Inference model(inference(0, 0));
    const std::vector<int32_t> ids = walk(4 * 17, 3);
    std::vector<int32_t> tokens, targets;
    for (int64_t row = 0; row < 4; row++) {
        tokens.insert(tokens.end(), ids.begin() + row * 17, ids.begin() + row * 17 + 16);
        targets.insert(targets.end(), ids.begin() + row * 17 + 1, ids.begin() + row * 17 + 17);
    }
    Inference greedy(inference(1));
    std::vector<float> losses(64), again(64);
    const auto likeliest = std::make_unique<bool[]>(64);
    targets[5] = continue_alike(greedy.model, {{tokens.begin(), tokens.begin() + 6}}, {1}, {0})[0][0];
    targets[63] = -100;
    model.score(tokens.data(), targets.data(), 4, 16, losses, {likeliest.get(), 64});
    model.score(tokens.data(), targets.data(), 4, 16, again, {});
    check(losses == again, "the same losses with and without the likeliest");
    check(likeliest[5] && !likeliest[63] && std::count(likeliest.get(), likeliest.get() + 64, true) < 32);
    check(losses[63] == 0 && losses[62] > 0, "a target that does not count");
    Trainer trainer(small_run({"--model", wide(), "--batch-size", "4"}));
    targets[63] = ids.back();
    model.score(tokens.data(), targets.data(), 4, 16, losses, {});
    const double mean_of = mean_loss_of(trainer, 4, 16, [&](int64_t, int64_t, int32_t* to, int32_t* next) {
        std::copy(tokens.begin(), tokens.end(), to);
        std::copy(targets.begin(), targets.end(), next);
    });
    check(mean(losses.data(), 64) == mean_of, "the trainer's loss");
}

}  // namespace

int main(int argc, char** argv) {
    return run_checks(argc, argv);
}
