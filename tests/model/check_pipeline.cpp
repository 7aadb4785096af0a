// The order of a pipeline's passes, played with transfers that block, and the layers of its stages.
#include "checkpoint/config_json.h"
#include "model/pipeline.h"
#include "small_run.h"

using namespace llamac;

namespace pipeline_checks {
namespace {

// What a stage does, and what its memory holds: outputs by the part of the model and the micro-batch that they are of.
struct Player {
    std::vector<PipelineStep> steps;
    size_t next = 0;
    bool has_passed = false;  // the pass of the next step is done, its transfers are not
    double clock = 0;
    std::set<std::pair<int64_t, int64_t>> kept =
        {};  // (chunk, micro-batch): forward passes whose backward is to come
    std::set<std::pair<int64_t, int64_t>> slots = {};         // (chunk, memory) of these
    std::map<std::pair<int64_t, int64_t>, bool> inputs = {};  // (chunk, micro-batch): received
    // (part, micro-batch) that the gradient in use is the output of; of the one to be sent, which several chunks keep apart.
    std::pair<int64_t, int64_t> gradient = {-1, -1}, outgoing = gradient;
};

struct Play {
    const int64_t stages, micro_batches, chunks;
    std::vector<Player> players;
    std::string wrong;  // the first thing

    Play(int64_t of, int64_t micro, int64_t parts) : stages(of), micro_batches(micro), chunks(parts) {
        for (int64_t rank = 0; rank < stages; rank++)
            players.push_back({pipeline_schedule({rank, stages}, micro_batches, chunks)});
    }
    void expect(bool good, const std::string& what) {
        if (!good && wrong.empty()) wrong = what;
    }
    int64_t last_part() const { return stages * chunks - 1; }

    // With a forward pass of 1 and a backward pass of 2.
    void pass(int64_t rank) {
        Player& p = players[rank];
        p.has_passed = true;
        if (!p.steps[p.next].pass) return;
        const PipelinePass pass = *p.steps[p.next].pass;
        const int64_t part = pass.chunk * stages + rank;
        const std::pair key{pass.chunk, pass.micro_batch};
        const std::pair slot{pass.chunk,
                             pass.micro_batch % kept_micro_batches({rank, stages}, micro_batches, chunks)};
        if (!pass.backward) {
            expect(part == 0 || p.inputs[key], "a forward pass has its input");
            expect(p.kept.insert(key).second, "a forward pass runs once");
            expect(p.slots.insert(slot).second, "a micro-batch has memory of its own");
            p.clock += 1;
        } else {
            p.slots.erase(slot);
            expect(p.kept.erase(key) == 1, "a backward pass follows its forward pass, once");
            expect(part == last_part() || p.gradient == std::pair(part + 1, pass.micro_batch),
                   "a backward pass has its gradient");
            p.gradient = p.outgoing = {part, pass.micro_batch};
            p.clock += 2;
        }
    }
    bool matches(int64_t rank, const PipelineTransfer& t) const {
        const Player& peer = players[t.peer];
        if (!peer.has_passed || peer.next >= peer.steps.size()) return false;
        return std::ranges::any_of(peer.steps[peer.next].transfers, [&](const PipelineTransfer& other) {
            const auto part = [&](int64_t of, const PipelineTransfer& each) {
                return each.pass.chunk * stages + of;
            };
            const int64_t from = t.incoming ? part(t.peer, other) : part(rank, t),
                          to = t.incoming ? part(rank, t) : part(t.peer, other);
            return other.peer == rank && other.incoming != t.incoming &&
                   other.pass.backward == t.pass.backward && other.pass.micro_batch == t.pass.micro_batch &&
                   to == from + (t.pass.backward ? -1 : 1);
        });
    }
    // Messages are sent from memory as it is before the group.
    void transfer(const std::vector<bool>& together) {
        std::vector<std::pair<int64_t, int64_t>> sent;
        for (const Player& p : players) sent.push_back(chunks > 1 ? p.outgoing : p.gradient);
        double clock = 0;
        for (int64_t rank = 0; rank < stages; rank++)
            if (together[rank]) clock = std::max(clock, players[rank].clock);
        for (int64_t rank = 0; rank < stages; rank++) {
            if (!together[rank]) continue;
            Player& p = players[rank];
            for (const PipelineTransfer& t : p.steps[p.next].transfers) {
                if (!t.incoming) {
                    if (t.pass.backward)
                        expect(sent[rank] == std::pair(t.pass.chunk * stages + rank, t.pass.micro_batch),
                               "the gradient that is sent has not been replaced");
                    continue;
                }
                if (t.pass.backward)
                    p.gradient = sent[t.peer];
                else
                    p.inputs[{t.pass.chunk, t.pass.micro_batch}] = true;
            }
            p.clock = clock;
            p.next++, p.has_passed = false;
        }
    }
    // Those that wait for one another, directly or not, go on together, if all are there.
    bool advance() {
        bool moved = false;
        for (int64_t rank = 0; rank < stages; rank++) {
            Player& p = players[rank];
            if (p.next < p.steps.size() && !p.has_passed) pass(rank), moved = true;
        }
        for (int64_t rank = 0; rank < stages; rank++) {
            std::vector<bool> together(static_cast<size_t>(stages));
            std::vector<int64_t> open = {rank};
            bool all_there = true;
            while (!open.empty() && all_there) {
                const int64_t each = open.back();
                open.pop_back();
                if (together[each]) continue;
                together[each] = true;
                const Player& p = players[each];
                all_there = p.has_passed && p.next < p.steps.size();
                if (!all_there) break;
                for (const PipelineTransfer& t : p.steps[p.next].transfers) {
                    all_there = all_there && matches(each, t);
                    open.push_back(t.peer);
                }
            }
            if (all_there) transfer(together), moved = true;
        }
        return moved;
    }
    void run() {
        while (advance()) {
        }
        for (const Player& p : players) {
            expect(p.next == p.steps.size(), "no stage waits forever");
            int64_t passes = 0;
            for (const PipelineStep& each : p.steps) passes += each.pass.has_value();
            expect(passes == 2 * micro_batches * chunks && p.kept.empty(), "every pass runs");
        }
    }
    double time() const {
        double longest = 0;
        for (const Player& p : players) longest = std::max(longest, p.clock);
        return longest;
    }
};

// Whether all stages can stop before any tick: what one sends or receives in a tick, the other one does in the same tick.
bool can_stop(const Play& play) {
    const size_t ticks = play.players[0].steps.size();
    for (int64_t rank = 0; rank < play.stages; rank++) {
        const std::vector<PipelineStep>& own = play.players[rank].steps;
        if (own.size() != ticks) return false;
        for (size_t tick = 0; tick < ticks; tick++)
            for (const PipelineTransfer& t : own[tick].transfers) {
                const auto answers = [&](const PipelineTransfer& other) {
                    return other.peer == rank && other.incoming != t.incoming &&
                           other.pass.backward == t.pass.backward &&
                           other.pass.micro_batch == t.pass.micro_batch;
                };
                if (!std::ranges::any_of(play.players[t.peer].steps[tick].transfers, answers)) return false;
            }
    }
    return true;
}

std::string name_of(int64_t stages, int64_t micro_batches, int64_t chunks) {
    return std::to_string(stages) + " stages, " + std::to_string(micro_batches) + " micro-batches, " +
           std::to_string(chunks) + " chunks: ";
}

// Every pass runs, none waits forever, and the stages wait as little as they can.
TEST(check_schedule) {
    for (const int64_t chunks : {1, 2, 3})
        for (int64_t stages = 2; stages <= 6; stages++)
            for (int64_t micro = 1; micro <= 18; micro++) {
                if (chunks > 1 && micro % stages != 0) continue;
                Play play(stages, micro, chunks);
                play.run();
                const std::string name = name_of(stages, micro, chunks);
                check(play.wrong.empty(), name + play.wrong);
                check(can_stop(play), name + "all stages can stop before a tick");
                const double alone = 3.0 * static_cast<double>(micro * chunks), idle = play.time() - alone;
                check(idle == 3.0 * static_cast<double>(stages - 1),
                      name + "found a wait of " + std::to_string(idle));
                check(std::abs(idle / play.time() - bubble(stages, micro, chunks)) < 1e-12, name + "bubble");
            }
}

// With one chunk, stage s of S keeps S - s micro-batches.
TEST(check_kept) {
    for (int64_t stages = 2; stages <= 6; stages++)
        for (int64_t rank = 0; rank < stages; rank++)
            for (const int64_t micro : {1, 3, 20})
                check(kept_micro_batches({rank, stages}, micro) == std::min(stages - rank, micro));
    check(kept_micro_batches({0, 4}, 16, 2) == 8 && kept_micro_batches({3, 4}, 16, 2) == 5,
          "of two chunks, the first keeps more");
}

Config model_of(int64_t layers, int64_t vocabulary, bool tied) {
    put("config.json", R"({"model_type": "llama", "vocab_size": )" + std::to_string(vocabulary) +
                           R"(, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": )" +
                           std::to_string(layers) + R"(, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "max_position_embeddings": 64, "tie_word_embeddings": )" +
                           (tied ? "true" : "false") + "}");
    return load_config(in_folder("config.json"));
}
std::vector<int64_t> sizes(const Config& config, int64_t stages, int64_t chunks = 1) {
    ModelOptions o;
    o.seq_len = 16, o.pipeline = {0, stages}, o.micro_batches_per_step = 8, o.chunks = chunks;
    std::vector<int64_t> found;
    int64_t end = 0;
    for (const LayerRange& part : parts_of(config, o)) {
        check(part.first == end && part.end > part.first, "consecutive layers");
        found.push_back(part.end - part.first), end = part.end;
    }
    check(end == config.L, "all layers");
    return found;
}

TEST(check_parts) {
    using Sizes = std::vector<int64_t>;
    // A layer has 31,000 parameters that are multiplied, and attention of 16 tokens.
    check(sizes(model_of(8, 8, false), 4) == Sizes{2, 2, 2, 2}, "a small head");
    check(sizes(model_of(8, 980, false), 2) == Sizes{5, 3}, "a head of two layers");
    check(sizes(model_of(5, 8, false), 4) == Sizes{1, 1, 2, 1}, "a later stage keeps fewer micro-batches");
    check(sizes(model_of(4, 9000, true), 4) == Sizes{1, 1, 1, 1}, "a large head");
    check(sizes(model_of(9, 980, false), 2, 2) == Sizes{2, 3, 3, 1}, "chunks");
    refused("more stages than layers", {"--pp 4", "one layer per stage", "found 3"},
            [] { sizes(model_of(3, 8, false), 4); });
    refused("more chunks than layers", {"--pp-chunks 2", "one layer per chunk"},
            [] { sizes(model_of(3, 8, false), 2, 2); });
}

}  // namespace
}  // namespace pipeline_checks
