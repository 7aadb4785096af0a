// Collectives between processes: test_communicator.py starts one of this program per rank. By itself it checks what one
// process can: the environment of launchers.
#include <chrono>
#include <cmath>
#include <cstring>

#include "check.h"
#include "core/collectives.h"
#include "platform/ranks/heartbeat.h"

namespace llamac::communicator_checks {
namespace {

using Setting = std::pair<const char*, const char*>;
using Settings = std::vector<Setting>;

struct Variables {
    Settings set;
    explicit Variables(const Settings& values) : set(values) {
        for (const char* each :
             {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
              "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "SLURM_STEP_ID"})
            unsetenv(each);
        for (const auto& [name, value] : set) setenv(name, value, 1);
    }
    Variables(const Variables&) = delete;
    ~Variables() {
        for (const auto& [name, value] : set) unsetenv(name);
    }
};
Launch launch_by(const Settings& values) {
    const Variables set(values);
    return find_launch();
}
Settings ranks(const char* rank, const char* size, const char* local_rank, const char* local_size) {
    return {
        {"RANK", rank}, {"WORLD_SIZE", size}, {"LOCAL_RANK", local_rank}, {"LOCAL_WORLD_SIZE", local_size}};
}
// Rank 1 of a step of srun; `more` wins.
Settings slurm(const Settings& more) {
    Settings all = {{"SLURM_PROCID", "1"},  {"SLURM_STEP_ID", "0"},         {"SLURM_NTASKS", "22"},
                    {"SLURM_LOCALID", "1"}, {"SLURM_STEP_NODELIST", "a,b"}, {"SLURM_JOB_ID", "4711"}};
    all.insert(all.end(), more.begin(), more.end());
    return all;
}

TEST(check_launchers) {
    const auto is = [](const Launch& l, Launcher launcher, int64_t rank, int64_t size, int64_t local_rank,
                       int64_t local_size, const std::string& address, int port) {
        return l.launcher == launcher && l.rank == rank && l.size == size && l.local_rank == local_rank &&
               l.local_size == local_size && l.address == address && l.port == port;
    };
    check(is(launch_by({}), Launcher::none, 0, 1, 0, 1, "", 0), "no launcher");
    Settings torchrun = ranks("5", "8", "1", "4");
    torchrun.insert(torchrun.end(), {{"MASTER_ADDR", "node1"}, {"MASTER_PORT", "29500"}});
    check(is(launch_by(torchrun), Launcher::torchrun, 5, 8, 1, 4, "node1", 21308), "torchrun");
    check(is(launch_by({{"OMPI_COMM_WORLD_RANK", "2"},
                        {"OMPI_COMM_WORLD_SIZE", "3"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
             Launcher::mpi, 2, 3, 0, 2, "", 0),
          "Open MPI");
    for (const auto& [list, first] :
         {Setting{"node[003-006,12],login", "node003"}, {"a,b", "a"}, {"single", "single"}, {"n[7,9]", "n7"}})
        check(is(launch_by(slurm({{"SLURM_TASKS_PER_NODE", "8(x2)"}, {"SLURM_STEP_NODELIST", list}})),
                 Launcher::slurm, 1, 22, 1, 8, first, 16384 + 615),
              std::string("srun on ") + list);
    const std::pair<const char*, int64_t> nodes[] = {{"0", 4}, {"1", 8}, {"2", 8}, {"3", 2}};
    for (const auto& [node, tasks] : nodes)
        check(launch_by(slurm({{"SLURM_NODEID", node}, {"SLURM_TASKS_PER_NODE", "4,8(x2),2"}})).local_size ==
                  tasks,
              std::string("tasks of node ") + node);

    const auto wrong = [&](const char* what, const std::vector<std::string>& words, const Settings& values) {
        refused(what, words, [&] { launch_by(values); });
    };
    for (const char* list : {"4,8(x2),2", "4(x", "many", ""})
        wrong(list, {"SLURM_TASKS_PER_NODE", "expected"},
              slurm({{"SLURM_NODEID", "4"}, {"SLURM_TASKS_PER_NODE", list}}));
    wrong("a rank that is too large", {"RANK", "from 0 to 1", "2"}, ranks("2", "2", "0", "1"));
    wrong("no WORLD_SIZE", {"WORLD_SIZE", "torchrun", "none"}, {{"RANK", "0"}});
    wrong("a word", {"WORLD_SIZE", "integer", "two"}, {{"RANK", "0"}, {"WORLD_SIZE", "two"}});
    wrong("no address", {"MASTER_ADDR"}, ranks("0", "2", "0", "1"));
    check(rendezvous_port(29500) != 29500 && rendezvous_port(1024) == 9216 && rendezvous_port(65535) == 57343,
          "ports");

    Launch second;
    second.size = second.local_size = 2, second.local_rank = 1;
    check(own_device(second, 2) == 1, "a device each");
    refused("one device of two", {"a device for each of the 2", "found 1"}, [&] { own_device(second, 1); });
    for (const char* name : {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"}) {
        const Variables one(Settings{{name, "1"}});
        check(own_device(second, 1) == 0, std::string("its own alone, by ") + name);
    }
}

// Element i of rank r's tensor: small integers, which every type holds exactly, also their sums.
double element(int64_t rank, int64_t i) {
    return static_cast<double>((i * 7 + rank * 3) % 11);
}

template <class T>
struct Values {
    std::vector<T> data;
    Tensor tensor;
    Values(DType dtype, int64_t count, int64_t rank) : data(static_cast<size_t>(count)) {
        for (int64_t i = 0; i < count; i++)
            data[static_cast<size_t>(i)] = T(static_cast<float>(element(rank, i)));
        tensor = make_tensor(data.data(), dtype, {count});
    }
    double at(int64_t i) const { return static_cast<double>(data[static_cast<size_t>(i)]); }
};

template <class T>
void check_type(Communicator& ranks, const Context& context, DType dtype, int64_t part) {
    const int64_t size = ranks.size, own = ranks.rank, count = size * part;
    const std::string name = std::string(llamac::name(dtype)) + " x " + std::to_string(part);
    const auto sum = [&](int64_t i) {
        double total = 0;
        for (int64_t r = 0; r < size; r++) total += element(r, i);
        return total;
    };
    const auto all = [&](const Values<T>& v, int64_t n, const auto& expected, const std::string& what) {
        bool good = true;
        for (int64_t i = 0; i < n; i++) good &= v.at(i) == expected(i);
        check(good, what + " " + name);
    };
    Values<T> x(dtype, count + 1, own);  // not a multiple of the ranks
    all_reduce(context, ranks, x.tensor);
    all(x, count + 1, sum, "all_reduce");
    Values<T> largest(dtype, count, own);
    all_reduce(context, ranks, largest.tensor, Reduction::max);
    all(
        largest, count,
        [&](int64_t i) {
            double most = 0;
            for (int64_t r = 0; r < size; r++) most = std::max(most, element(r, i));
            return most;
        },
        "max");
    const Values<T> in(dtype, count, own);
    Values<T> out(dtype, part, own);
    reduce_scatter(context, ranks, out.tensor, in.tensor);
    all(out, part, [&](int64_t i) { return sum(own * part + i); }, "reduce_scatter");
    Values<T> grouped(dtype, part, own), collected(dtype, count, own), sums(dtype, count, own);
    const Values<T> given(dtype, part, own);
    const Tensor own_sums = make_tensor(sums.data.data() + own * part, dtype, {part});
    ranks.begin_group();
    reduce_scatter(context, ranks, grouped.tensor, in.tensor);
    all_gather(context, ranks, collected.tensor, given.tensor);
    reduce_scatter(context, ranks, own_sums, sums.tensor);
    ranks.end_group();
    all(grouped, part, [&](int64_t i) { return out.at(i); }, "reduce_scatter in a group");
    all(collected, count, [&](int64_t i) { return element(i / part, i % part); }, "all_gather in a group");
    for (int64_t i = 0; i < part; i++)
        check(sums.at(own * part + i) == out.at(i), "reduce_scatter in place in a group " + name);
    Values<T> gathered(dtype, count, 0);
    const Values<T> mine(dtype, part, own);
    all_gather(context, ranks, gathered.tensor, mine.tensor);
    all(gathered, count, [&](int64_t i) { return element(i / part, i % part); }, "all_gather");
    Values<T> from_last(dtype, part, own);
    broadcast(context, ranks, from_last.tensor, size - 1);
    all(from_last, part, [&](int64_t i) { return element(size - 1, i); }, "broadcast");
    Values<T> ring(dtype, part, own);
    if (own % 2 == 0 && own + 1 < size) send(context, ranks, ring.tensor, own + 1);
    if (own % 2 == 1) {
        receive(context, ranks, ring.tensor, own - 1);
        all(ring, part, [&](int64_t i) { return element(own - 1, i); }, "receive");
    }
}

// Each rank sends to the next one and receives from the one before, more than a connection holds: none can wait for another.
void check_transfer(Communicator& ranks, const Context& context) {
    constexpr int64_t count = int64_t{4} << 20;
    const int64_t next = (ranks.rank + 1) % ranks.size, before = (ranks.rank + ranks.size - 1) % ranks.size;
    const Values<float> own(DType::f32, count, ranks.rank);
    Values<float> received(DType::f32, count, ranks.rank);
    const Transfer transfers[] = {{own.tensor, next, false}, {received.tensor, before, true}};
    transfer(context, ranks, transfers);
    bool good = true;
    for (int64_t i = 0; i < count; i++) good &= received.at(i) == element(before, i);
    check(good, "transfer");
}

// A call that throws inside a group: what comes behind is as if it had not been.
void check_dropped_group(Communicator& ranks, const Context& context) {
    Values<float> lost(DType::f32, 8, ranks.rank), sum(DType::f32, 8, ranks.rank);
    const std::string error = error_of([&] {
        grouped(context, ranks, "all_reduce", 0, [&] {
            all_reduce(context, ranks, lost.tensor);
            fail("inside");
        });
    });
    all_reduce(context, ranks, sum.tensor);
    double expected = 0;
    for (int64_t r = 0; r < ranks.size; r++) expected += element(r, 1);
    check(error == "inside" && lost.at(1) == element(ranks.rank, 1) && sum.at(1) == expected);
}

// What one rank alone gathers, or has met, all learn.
void check_gathers(Transport& channel) {
    const bool last = channel.rank == channel.size - 1;
    const std::string other = error_of([&] { channel.gather(last ? "loss" : "signal", "text"); });
    check(other.find("rank " + std::to_string(channel.size - 1) + ": expected message") == 0 &&
              other.find("(loss)") != other.npos && other.find("(signal)") != other.npos,
          "gathers of two kinds: " + other);
    const std::string long_error(1000, 'e');
    for (const std::string& error : {std::string("short"), long_error})
        check(error_of([&] { channel.gather(last ? "data" : "loss", last ? error : "1", last); }) == error);
    check(channel.gather("names", "again").size() == static_cast<size_t>(channel.size), "and they go on");
}

// A rank that has met an error and still runs: others wait for it no longer, and it sends nothing.
void check_announcement(const Launch& launch, Transport& others) {
    Heartbeat heartbeat(connect(launch, "heartbeat", 20), {});
    const std::unique_ptr<Transport> channel = [&] {
        auto made = connect(launch, "watched", 20);
        made->waiting = [&](int64_t, double) { heartbeat.check(); };
        return watched(std::move(made), heartbeat);
    }();
    others.barrier();  // a rank that still connects would fail by the announcing rank's end
    const std::string name = "rank " + std::to_string(launch.size - 1);
    const auto begin = std::chrono::steady_clock::now();
    if (launch.rank == launch.size - 1) heartbeat.announce();
    const std::string error = error_of([&] { channel->barrier(); });
    check(error.find(name) == 0, "an announced error: " + error);
    check(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5), "is learned of in time");
}

// Ranks 1 to 8 never answer, as those of a node without power.
struct SilentRanks : Transport {
    SilentRanks() : Transport(0, 9, 1) {}
    void exchange(std::span<const Message> messages) override {
        const auto begin = std::chrono::steady_clock::now();
        for (;;) {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
            wait_for(messages[0].peer, waited.count());
        }
    }
};

TEST(check_silent_node) {
    const auto begin = std::chrono::steady_clock::now();
    {
        Heartbeat heartbeat(std::make_unique<SilentRanks>(), {});
        while (error_of([&] { heartbeat.check(); }).empty())
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        const std::string error = error_of([&] { heartbeat.check(); });
        check(error.find("rank 1 did not answer in time") == 0, error);
    }
    check(std::chrono::steady_clock::now() - begin < std::chrono::seconds(6), "one limit for all its ranks");
}

// Pairs of neighbours, the last of an odd number alone: each sums and gathers its own.
void check_split(Communicator& ranks, const Context& context) {
    const int64_t first = ranks.rank / 2 * 2, last = std::min(first + 2, ranks.size), count = 1001;
    std::vector<int64_t> members;
    for (int64_t r = first; r < last; r++) members.push_back(r);
    const std::unique_ptr<Communicator> pair = ranks.split(members);
    check(pair->size == last - first && pair->rank == ranks.rank - first, "a part's ranks");
    Values<float> alone(DType::f32, count, ranks.rank), small(DType::f32, 1, ranks.rank),
        large(DType::f32, count, ranks.rank), gathered(DType::f32, pair->size, 0);
    const Values<float> own(DType::f32, 1, ranks.rank);
    all_reduce(context, *pair, alone.tensor);
    pair->begin_group();  // sums whose parts are of unequal sizes, one of them empty
    all_reduce(context, *pair, small.tensor);
    all_reduce(context, *pair, large.tensor);
    all_gather(context, *pair, gathered.tensor, own.tensor);
    pair->end_group();
    bool good = true, same = true;
    for (int64_t i = 0; i < count; i++) {
        double sum = 0;
        for (int64_t r = first; r < last; r++) sum += element(r, i);
        good &= alone.at(i) == sum;
        same &= large.at(i) == sum;
        if (i == 0) same &= small.at(0) == sum;
    }
    for (int64_t i = 0; i < pair->size; i++) same &= gathered.at(i) == element(first + i, 0);
    check(good, "all_reduce in a part");
    check(same, "all_reduce in a group, in a part");
}

// Sums that round: the same bits on every rank, and in all_reduce as in reduce_scatter.
void check_bits(Communicator& ranks, Transport& channel, const Context& context) {
    const int64_t part = 1001, count = ranks.size * part;
    std::vector<float> x(static_cast<size_t>(count)), out(static_cast<size_t>(part));
    for (int64_t i = 0; i < count; i++)
        x[static_cast<size_t>(i)] = std::sin(static_cast<float>(i + 1000 * ranks.rank)) * 1e3f;
    const std::vector<float> in = x;
    all_reduce(context, ranks, make_tensor(x.data(), DType::f32, {count}));
    reduce_scatter(context, ranks, make_tensor(out.data(), DType::f32, {part}),
                   make_tensor(const_cast<float*>(in.data()), DType::f32, {count}));
    check(std::memcmp(out.data(), x.data() + ranks.rank * part, out.size() * sizeof(float)) == 0);
    const std::string bits(reinterpret_cast<const char*>(x.data()), x.size() * sizeof(float));
    for (const std::string& theirs : channel.gather("bits", bits))
        check(theirs == bits, "the same bits on every rank");
}

TEST_OF_RANKS(check_collectives) {
    const Launch launch = find_launch();
    const char* seconds = std::getenv("LLAMAC_SECONDS");  // for a rank that waits in vain
    const std::unique_ptr<Transport> channel = connect(launch, "channel", seconds ? std::atof(seconds) : 20);
    const std::unique_ptr<Communicator> ranks = make_host_communicator(connect(launch, "collectives", 20));
    const Context context;
    for (const int64_t part : {1, 64, 4097}) {
        check_type<float>(*ranks, context, DType::f32, part);
        check_type<bf16>(*ranks, context, DType::bf16, part);
        check_type<double>(*ranks, context, DType::f64, part);
        check_type<int32_t>(*ranks, context, DType::i32, part);
    }
    check_type<float>(*ranks, context, DType::f32, 700001);  // more than a piece
    check_type<bf16>(*ranks, context, DType::bf16, 700001);
    check_bits(*ranks, *channel, context);
    check_split(*ranks, context);
    check_dropped_group(*ranks, context);
    check_transfer(*ranks, context);
    check_gathers(*channel);
    const std::vector<std::string> texts = channel->gather("names", "rank " + std::to_string(launch.rank));
    for (int64_t r = 0; r < launch.size; r++)
        check(texts[static_cast<size_t>(r)] == "rank " + std::to_string(r), "gather");
    int64_t word = launch.rank;
    channel->broadcast(&word, sizeof word, 0);
    check(word == 0, "broadcast on the host");
    channel->barrier();
    ranks->barrier(context.stream);
    if (launch.launcher != Launcher::mpi) check_announcement(launch, *channel);
    // The last rank goes without a word; the others find out which.
    if (std::getenv("LLAMAC_LAST_ENDS")) {
        if (launch.rank == launch.size - 1) std::_Exit(0);
        const std::string message = error_of([&] { ranks->barrier(context.stream); });
        check(message.find("rank " + std::to_string(launch.size - 1)) != message.npos,
              "a rank that ended: " + message);
    }
}

}  // namespace
}  // namespace llamac::communicator_checks
