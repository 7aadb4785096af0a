#include <unistd.h>

#include <algorithm>
#include <boost/context/fiber.hpp>
#include <boost/context/fixedsize_stack.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "platform/hip.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(LLAMAC_RACES)
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_ignore_thread_begin(void);
void __tsan_ignore_thread_end(void);
}
#endif

constinit thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace llamac::emulation {
namespace {

namespace context = boost::context;

constexpr size_t stack_bytes = 128 << 10;
constexpr int max_threads_per_block = 1024;
Order current_order = Order::forward;

// Annotations for ThreadSanitizer. This file is compiled without it (cpu.cmake), because the scheduler is not checked.
#if defined(LLAMAC_RACES)
constexpr bool races = true;
void* this_fiber() {
    return __tsan_get_current_fiber();
}
void* new_fiber() {
    return __tsan_create_fiber(0);
}
void enter(void* fiber) {
    constexpr unsigned no_order = 1;  // else a switch would order all that was before it
    __tsan_switch_to_fiber(fiber, no_order);
}
void acquire(void* address) {
    __tsan_acquire(address);
}
void release(void* address) {
    __tsan_release(address);
}
struct Unseen {  // the allocator and memset are seen wherever they are called
    Unseen() { __tsan_ignore_thread_begin(); }
    ~Unseen() { __tsan_ignore_thread_end(); }
};
#else
constexpr bool races = false;
void* this_fiber() {
    return nullptr;
}
void* new_fiber() {
    return nullptr;
}
void enter(void*) {}
void acquire(void*) {}
void release(void*) {}
struct Unseen {
    Unseen() {}  // not trivial: an unused variable otherwise
};
#endif

// AddressSanitizer has to know on which stack it is.
struct Stack {
    const void* bottom = nullptr;
    size_t bytes = 0;
    void* fake = nullptr;
};
#if defined(__SANITIZE_ADDRESS__)
void leave_stack(Stack& from, const Stack& to) {
    __sanitizer_start_switch_fiber(&from.fake, to.bottom, to.bytes);
}
void arrive_at_stack(const Stack& here, Stack* from) {
    __sanitizer_finish_switch_fiber(here.fake, from ? &from->bottom : nullptr, from ? &from->bytes : nullptr);
}
#else
void leave_stack(Stack&, const Stack&) {}
void arrive_at_stack(const Stack&, Stack*) {}
#endif

// A fiber with its stack. It runs one GPU thread after another; those that do not wait share one, whose
// stack stays in the cache.
struct Worker {
    context::fiber fiber, scheduler;
    Stack stack;
    void* race_fiber = nullptr;
};

enum class State : uint8_t { ready, at_warp_operation, at_barrier, done };
struct Thread {
    State state;
    dim3 index;
    Worker* worker;
    Collective operation;
    void* argument;
    Site site;
};

// LDS: allocated for each block anew and exactly, so that AddressSanitizer sees its end and ThreadSanitizer
// no earlier block's accesses.
struct Shared {
    const void* type;  // null: the dynamic part
    size_t bytes;
    std::unique_ptr<char[]> memory;
};

// Addresses that order accesses before and after a barrier. Two, because a thread may reach the next barrier before another
// leaves this one; new ones per block, because blocks have no order.
struct Fences {
    int64_t barrier[2];
};

// The state of one host thread.
struct Block {
    std::vector<Thread> threads;
    std::vector<std::unique_ptr<Worker>> workers;
    std::vector<Worker*> idle;
    std::vector<Shared> shared;
    size_t dynamic_bytes = 0;
    std::unique_ptr<Fences> fences;
    int count = 0;         // threads of the block
    int64_t blocks = 0;    // so far
    int64_t barriers = 0;  // of this block so far
    Thread* running = nullptr;
    Stack scheduler_stack;
    void* race_fiber = nullptr;
    uint32_t random = 12345;
    Site launch_site{};
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
};
thread_local Block* block = nullptr;

char* new_shared(const void* type, size_t bytes) {
    const Unseen unseen;
    size_t all = bytes;
    for (const Shared& s : block->shared) all += s.bytes;
    if (static_cast<int64_t>(all) > device_properties().shared_bytes)
        die(block->launch_site, "a block has more LDS than there is");
    block->shared.push_back({type, bytes, std::unique_ptr<char[]>(new char[bytes])});
    std::memset(block->shared.back().memory.get(), 0xff, bytes);
    return block->shared.back().memory.get();
}

void suspend() {
    Worker& w = *block->running->worker;
    enter(block->race_fiber);
    leave_stack(w.stack, block->scheduler_stack);
    w.scheduler = std::move(w.scheduler).resume();
    arrive_at_stack(w.stack, &block->scheduler_stack);
}

context::fiber work(Worker& w, context::fiber&& scheduler) {
    w.scheduler = std::move(scheduler);
    arrive_at_stack({}, &block->scheduler_stack);
    for (;;) {
        block->body(block->argument);
        block->running->state = State::done;
        suspend();
    }
}

Worker* new_worker() {
    block->workers.push_back(std::make_unique<Worker>());
    Worker& w = *block->workers.back();
    w.race_fiber = new_fiber();
    const context::stack_context memory = context::fixedsize_stack(stack_bytes).allocate();
    w.stack.bottom = static_cast<char*>(memory.sp) - memory.size;
    w.stack.bytes = memory.size;
    w.fiber = context::fiber(std::allocator_arg, context::preallocated(memory.sp, memory.size, memory),
                             context::fixedsize_stack(stack_bytes),
                             [&w](context::fiber&& scheduler) { return work(w, std::move(scheduler)); });
    return &w;
}

Worker* idle_worker() {
    if (block->idle.empty()) return new_worker();
    Worker* w = block->idle.back();
    block->idle.pop_back();
    return w;
}

void resume(Thread& t) {
    if (!t.worker) t.worker = idle_worker();
    Worker& w = *t.worker;
    block->running = &t;
    threadIdx = t.index;
    enter(w.race_fiber);
    leave_stack(block->scheduler_stack, w.stack);
    w.fiber = std::move(w.fiber).resume();
    arrive_at_stack(block->scheduler_stack, nullptr);
    if (t.state == State::done && !races) block->idle.push_back(std::exchange(t.worker, nullptr));
}

// In which order n lanes, or warps, run in a round.
struct Sequence {
    uint8_t at[64];
};
Sequence sequence(int n) {
    Sequence s;
    std::iota(s.at, s.at + n, uint8_t{0});
    if (current_order == Order::reversed) std::reverse(s.at, s.at + n);
    for (int i = n - 1; i > 0 && current_order == Order::shuffled; i--) {
        block->random = block->random * 1664525u + 1013904223u;
        std::swap(s.at[i], s.at[(block->random >> 8) % static_cast<uint32_t>(i + 1)]);
    }
    return s;
}

bool same(Site a, Site b) {
    return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

// Runs a warp's lanes until each has returned or waits at a barrier.
void run_warp(Thread* lanes, int count) {
    for (;;) {
        const Sequence order = sequence(count);
        for (int k = 0; k < count; k++) {
            Thread& t = lanes[order.at[k]];
            if (t.state == State::ready) resume(t);
        }
        const auto waits = [](const Thread& t) { return t.state == State::at_warp_operation; };
        Thread* first = std::find_if(lanes, lanes + count, waits);
        if (first == lanes + count) return;
        void* arguments[warp_size] = {};
        for (int l = 0; l < count; l++) {
            Thread& t = lanes[l];
            if (t.state == State::done) continue;
            if (!waits(t) || t.operation != first->operation || !same(t.site, first->site))
                die(first->site, "a warp operation that not all lanes of the warp reach", t.site);
            arguments[l] = t.argument;
        }
        {
            const Unseen unseen;
            first->operation(arguments, first->site);
        }
        for (int l = 0; l < count; l++)
            if (arguments[l]) lanes[l].state = State::ready;
    }
}

// Lets the block's threads pass the barrier at which they wait; false: all have returned.
bool pass_barrier() {
    Thread *begin = block->threads.data(), *end = begin + block->count;
    const auto waits = [](const Thread& t) { return t.state == State::at_barrier; };
    const Thread* first = std::find_if(begin, end, waits);
    if (first == end) return false;
    for (Thread* t = begin; t < end; t++) {
        if (t->state == State::done)
            die(first->site, "__syncthreads after threads of the block have returned");
        if (!same(t->site, first->site))
            die(first->site, "__syncthreads that not all threads of the block reach", t->site);
        t->state = State::ready;
    }
    block->barriers++;
    return true;
}

// Accesses on one fiber never race. So where races are looked for, the threads of a block have a fiber each,
// and those of equal index in neighboring blocks different ones: there is one fiber more than threads.
Worker* worker_of(int thread) {
    if (!races) return nullptr;
    return block->workers[(thread + block->blocks) % (block->count + 1)].get();
}

void start_threads() {
    dim3 index(0, 0, 0);
    for (int i = 0; i < block->count; i++) {
        block->threads[i] = {State::ready, index, worker_of(i), nullptr, nullptr, {}};
        if (++index.x == blockDim.x) index.x = 0, index.y++;
        if (index.y == blockDim.y) index.y = 0, index.z++;
    }
}

void run_block(dim3 index) {
    blockIdx = index;
    {
        const Unseen unseen;
        block->shared.clear();
        block->fences = std::make_unique<Fences>();
    }
    new_shared(nullptr, block->dynamic_bytes);
    block->barriers = 0;
    start_threads();
    const int warps = (block->count + warp_size - 1) / warp_size;
    do {
        const Sequence order = sequence(warps);
        for (int k = 0; k < warps; k++) {
            const int first = order.at[k] * warp_size;
            run_warp(&block->threads[first], std::min(warp_size, block->count - first));
        }
    } while (pass_barrier());
    block->blocks++;
}

void prepare(dim3 blocks, dim3 threads, size_t shared_bytes, Site site, void (*body)(void*), void* argument) {
    if (!block) block = new Block;  // lives as long as its host thread: the fibers are used again
    gridDim = blocks;
    blockDim = threads;
    block->count = static_cast<int>(threads.x * threads.y * threads.z);
    if (block->threads.size() < static_cast<size_t>(block->count)) block->threads.resize(block->count);
    block->dynamic_bytes = shared_bytes;
    block->race_fiber = this_fiber();
    block->launch_site = site;
    block->body = body;
    block->argument = argument;
    while (races && block->workers.size() <= static_cast<size_t>(block->count)) new_worker();
    release(block);
    for (int i = 0; races && i <= block->count; i++) {  // the launch follows earlier accesses
        enter(block->workers[i]->race_fiber);
        acquire(block);
        enter(block->race_fiber);
    }
}

// The accesses of a grid precede those after it.
void finish() {
    for (int i = 0; races && i <= block->count; i++) {
        enter(block->workers[i]->race_fiber);
        release(block);
        enter(block->race_fiber);
    }
    acquire(block);
}

}  // namespace

void set_order(Order order) {
    current_order = order;
}

void die(Site site, const char* what, Site other) {
    const Site from = block->launch_site;
    std::fprintf(stderr, "emulated kernel: %s:%d: %s", site.file, site.line, what);
    if (other.file && !same(site, other))
        std::fprintf(stderr, "; another thread is at %s:%d", other.file, other.line);
    std::fprintf(stderr, " (block %u,%u,%u of the launch at %s:%d)\n", blockIdx.x, blockIdx.y, blockIdx.z,
                 from.file, from.line);
    std::abort();
}

void collective(Collective operation, void* argument, Site site) {
    Thread& t = *block->running;
    t.operation = operation;
    t.argument = argument;
    t.site = site;
    t.state = State::at_warp_operation;
    suspend();
}

void barrier(Site site) {
    Thread& t = *block->running;
    t.site = site;
    t.state = State::at_barrier;
    int64_t* fence = &block->fences->barrier[block->barriers % 2];
    release(fence);
    suspend();
    acquire(fence);
}

int lane() {
    return static_cast<int>(block->running - block->threads.data()) % warp_size;
}

void* shared_object(const void* type, size_t bytes) {
    for (const Shared& s : block->shared)
        if (s.type == type) return s.memory.get();
    return new_shared(type, bytes);
}

char* dynamic_shared_memory() {
    return block->shared.front().memory.get();
}

void run_grid(dim3 blocks, dim3 threads, size_t shared_bytes, Site site, void (*body)(void*),
              void* argument) {
    const int64_t count = int64_t{blocks.x} * blocks.y * blocks.z;
    const int64_t size = int64_t{threads.x} * threads.y * threads.z;
    // AMD: fewer than 2^32 threads in a dimension.
    if (count < 1 || blocks.x > 0x7fffffff || int64_t{blocks.x} * threads.x >= int64_t{1} << 32 ||
        blocks.y > 65535 || blocks.z > 65535 || size < 1 || size > max_threads_per_block ||
        static_cast<int64_t>(shared_bytes) > device_properties().shared_bytes) {
        std::fprintf(stderr,
                     "emulated kernel: %s:%d: a grid of %ld blocks of %ld threads with %zu bytes of LDS\n",
                     site.file, site.line, static_cast<long>(count), static_cast<long>(size), shared_bytes);
        std::abort();
    }
    const bool backwards = current_order == Order::reversed;
    // Fewer threads are run before another host thread is there; ThreadSanitizer does not understand libgomp.
#pragma omp parallel if (count > 1 && count * size >= 4096 && !races)
    {
        prepare(blocks, threads, shared_bytes, site, body, argument);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) {
            const int64_t b = backwards ? count - 1 - i : i;
            run_block(dim3(static_cast<unsigned>(b % blocks.x),
                           static_cast<unsigned>(b / blocks.x % blocks.y),
                           static_cast<unsigned>(b / blocks.x / blocks.y)));
        }
        finish();
    }
}

}  // namespace llamac::emulation

hipError_t hipMalloc(void** p, size_t bytes) {
    constexpr size_t alignment = 256, piece = 1 << 20;
    *p = nullptr;
    size_t free = 0, total = 0;
    static_cast<void>(hipMemGetInfo(&free, &total));
    if (bytes > total || posix_memalign(p, alignment, bytes) != 0) return hipErrorOutOfMemory;
    char* memory = static_cast<char*>(*p);
#pragma omp parallel for if (bytes > piece && !llamac::emulation::races)
    for (size_t at = 0; at < bytes; at += piece) std::memset(memory + at, 0xff, std::min(piece, bytes - at));
    return hipSuccess;
}

hipError_t hipMemGetInfo(size_t* free, size_t* total) {
    *total = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    *free = *total;
    return hipSuccess;
}

struct llamac::emulation::Event {
    std::chrono::steady_clock::time_point recorded;
};
hipError_t hipEventCreate(hipEvent_t* event) {
    *event = new llamac::emulation::Event;
    return hipSuccess;
}
hipError_t hipEventDestroy(hipEvent_t event) {
    delete event;
    return hipSuccess;
}
hipError_t hipEventRecord(hipEvent_t event, hipStream_t) {
    event->recorded = std::chrono::steady_clock::now();
    return hipSuccess;
}
hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t begin, hipEvent_t end) {
    *milliseconds = std::chrono::duration<float, std::milli>(end->recorded - begin->recorded).count();
    return hipSuccess;
}

namespace llamac {

int current_device() {
    return 0;
}
int device_count() {
    return 1;
}
void use_device(int) {}  // there is one
const DeviceProperties& device_properties() {
    // Few multiprocessors, so that grids sized by them have to loop at the tests' sizes. LDS and threads of a grid: what
    // MI300X has, and H100.
    static const DeviceProperties properties{"emulated block on the CPU",
                                             warp_size,
                                             3,
                                             (warp_size == 64 ? 64 : 227) << 10,
                                             1 << 20,
                                             int64_t{1} << 34,
                                             true,
                                             false,
                                             warp_size == 64,
                                             Fp8Units::both,
                                             int64_t{1} << (warp_size == 64 ? 32 : 41)};
    return properties;
}

}  // namespace llamac
