#include "model/pipeline_schedule.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "platform/error.h"

namespace llamac {
namespace {

// The passes of a stage, in their order.
std::vector<PipelinePass> order_of(const Axis& stage, int64_t micro_batches, int64_t chunks) {
    const int64_t all = micro_batches * chunks, later = stage.ranks - 1 - stage.rank;
    const int64_t warm_up = std::min(all, chunks == 1 ? later : 2 * later + (chunks - 1) * stage.ranks);
    // With several chunks, each takes as many micro-batches as there are stages before the next one does.
    const auto pass = [&](bool backward, int64_t i) {
        const int64_t turn = chunks == 1 ? 1 : stage.ranks, in_round = i % (turn * chunks);
        const int64_t chunk = backward ? chunks - 1 - in_round / turn : in_round / turn;
        return PipelinePass{backward, i / (turn * chunks) * turn + in_round % turn, chunk};
    };
    std::vector<PipelinePass> order;
    for (int64_t i = 0; i < all + warm_up; i++) {
        if (i < all) order.push_back(pass(false, i));
        if (i >= warm_up) order.push_back(pass(true, i - warm_up));
    }
    return order;
}

// All stages, in ticks: each pass takes one.
struct Simulation {
    struct Stage {
        std::vector<PipelinePass> order;
        size_t next = 0;
        std::vector<PipelineStep> steps;
    };
    const int64_t chunks;
    std::vector<Stage> stages;
    std::map<std::tuple<bool, int64_t, int64_t>, int64_t>
        done;  // (backward, part of the model, micro-batch): tick

    Simulation(int64_t ranks, int64_t micro_batches, int64_t of_chunks) : chunks(of_chunks) {
        for (int64_t rank = 0; rank < ranks; rank++)
            stages.push_back({order_of({rank, ranks}, micro_batches, chunks), 0, {}});
    }
    int64_t ranks() const { return static_cast<int64_t>(stages.size()); }
    int64_t part_of(int64_t rank, const PipelinePass& pass) const { return pass.chunk * ranks() + rank; }

    // The part of the model whose pass makes the input of this one; -1: it has none.
    int64_t source_of(int64_t rank, const PipelinePass& pass) const {
        const int64_t part = part_of(rank, pass), last = ranks() * chunks - 1;
        return !pass.backward ? part - 1 : part < last ? part + 1 : -1;
    }
    bool is_ready(int64_t rank, const PipelinePass& pass, int64_t tick) const {
        const auto is_done = [&](bool backward, int64_t part) {
            const auto found = done.find({backward, part, pass.micro_batch});
            return found != done.end() && found->second < tick;
        };
        const int64_t source = source_of(rank, pass);
        return (source < 0 || is_done(pass.backward, source)) &&
               (!pass.backward || is_done(false, part_of(rank, pass)));
    }
    // With several chunks, two stages exchange something after every tick. All compute passes of the same kind then, so that none
    // waits for another's longer one.
    bool has_turn(const PipelinePass& pass, int64_t tick) const {
        return chunks == 1 || pass.backward == (tick % 2 == 1);
    }
    void run(int64_t rank, const PipelinePass& pass, int64_t tick) {
        stages[rank].steps[tick].pass = pass;
        stages[rank].next++;
        done[{pass.backward, part_of(rank, pass), pass.micro_batch}] = tick;
        const int64_t source = source_of(rank, pass);
        if (source < 0) return;
        // Just before it is needed: the memory of what comes is in use until then.
        const int64_t peer = source % ranks();
        stages[rank].steps[tick - 1].transfers.push_back({pass, peer, true});
        stages[peer].steps[tick - 1].transfers.push_back(
            {{pass.backward, pass.micro_batch, source / ranks()}, rank, false});
    }
    bool is_over() const {
        return std::ranges::all_of(stages, [](const Stage& s) { return s.next == s.order.size(); });
    }
};

}  // namespace

std::vector<PipelineStep> pipeline_schedule(const Axis& stage, int64_t micro_batches, int64_t chunks) {
    CHECK(chunks == 1 || micro_batches % stage.ranks == 0);
    Simulation all(stage.ranks, micro_batches, chunks);
    for (int64_t tick = 0; !all.is_over(); tick++) {
        for (Simulation::Stage& each : all.stages) each.steps.emplace_back();
        std::vector<std::optional<PipelinePass>> ready;
        for (int64_t rank = 0; rank < stage.ranks; rank++) {
            const Simulation::Stage& own = all.stages[rank];
            if (own.next == own.order.size()) {
                ready.emplace_back();
                continue;
            }
            const PipelinePass& next = own.order[own.next];
            const bool runs = all.is_ready(rank, next, tick) && all.has_turn(next, tick);
            ready.push_back(runs ? std::optional(next) : std::nullopt);
        }
        for (int64_t rank = 0; rank < stage.ranks; rank++)
            if (ready[rank]) all.run(rank, *ready[rank], tick);
    }
    return all.stages[stage.rank].steps;
}

int64_t kept_micro_batches(const Axis& stage, int64_t micro_batches, int64_t chunks) {
    std::vector<int64_t> kept(static_cast<size_t>(chunks));
    int64_t most = 0;
    for (const PipelinePass& pass : order_of(stage, micro_batches, chunks)) {
        kept[pass.chunk] += pass.backward ? -1 : 1;
        most = std::max(most, kept[pass.chunk]);
    }
    return most;
}

}  // namespace llamac
