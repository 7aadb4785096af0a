#if defined(LLAMAC_CPU)
#include <boost/context/fiber.hpp>
#include <boost/context/fixedsize_stack.hpp>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "platform/hip.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
// The scheduler's own accesses are no part of the program that is checked.
#define UNCHECKED __attribute__((no_sanitize("thread"), noinline))
#else
#define UNCHECKED
#endif

namespace llamac::emulation {
namespace {

namespace context = boost::context;

constexpr size_t stack_bytes = 128 << 10;
constexpr int most_threads = 1024;
Order current_order = Order::forward;

#if defined(__SANITIZE_THREAD__)
constexpr bool fiber_per_thread = true;  // two GPU threads on one fiber would be ordered, and never race
void* this_fiber() {
    return __tsan_get_current_fiber();
}
void* new_fiber() {
    return __tsan_create_fiber(0);
}
void enter(void* fiber, bool ordered) {
    __tsan_switch_to_fiber(fiber, ordered ? 0 : 1);
}
void acquire(void* address) {
    __tsan_acquire(address);
}
void release(void* address) {
    __tsan_release(address);
}
#else
constexpr bool fiber_per_thread = false;
void* this_fiber() {
    return nullptr;
}
void* new_fiber() {
    return nullptr;
}
void enter(void*, bool) {}
void acquire(void*) {}
void release(void*) {}
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

struct SharedObject {
    const void* type;
    std::unique_ptr<char[]> memory;
    size_t bytes;
    bool fresh;  // filled for this block
};

// What one host thread works on.
struct Block {
    std::vector<Thread> threads;
    std::vector<std::unique_ptr<Worker>> workers;
    std::vector<Worker*> idle;
    std::vector<SharedObject> shared;
    std::unique_ptr<char[]> dynamic;
    size_t dynamic_bytes = 0;
    int count = 0;  // threads of the block
    Thread* running = nullptr;
    Stack scheduler_stack;
    void* race_fiber = nullptr;
    uint32_t random = 12345;
    Site launch_site{};
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
};
thread_local Block* block = nullptr;

// Volatile: a call of memset would be an access that the sanitizers see.
UNCHECKED void fill_with_nan(char* memory, size_t bytes) {
    volatile char* p = memory;
    for (size_t i = 0; i < bytes; i++) p[i] = static_cast<char>(0xff);
}

UNCHECKED void suspend() {
    Worker& w = *block->running->worker;
    enter(block->race_fiber, false);
    leave_stack(w.stack, block->scheduler_stack);
    w.scheduler = std::move(w.scheduler).resume();
    arrive_at_stack(w.stack, &block->scheduler_stack);
}

UNCHECKED context::fiber work(Worker& w, context::fiber&& scheduler) {
    w.scheduler = std::move(scheduler);
    arrive_at_stack({}, &block->scheduler_stack);
    for (;;) {
        block->body(block->argument);
        release(block);
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

UNCHECKED void resume(Thread& t) {
    if (!t.worker) {
        if (block->idle.empty()) block->idle.push_back(new_worker());
        t.worker = block->idle.back();
        block->idle.pop_back();
    }
    Worker& w = *t.worker;
    block->running = &t;
    threadIdx = t.index;
    enter(w.race_fiber, false);
    leave_stack(block->scheduler_stack, w.stack);
    w.fiber = std::move(w.fiber).resume();
    arrive_at_stack(block->scheduler_stack, nullptr);
    if (t.state == State::done && !fiber_per_thread) block->idle.push_back(std::exchange(t.worker, nullptr));
}

UNCHECKED uint32_t next_random() {
    return (block->random = block->random * 1664525u + 1013904223u) >> 8;
}
// The k-th of n in the current order; start is the same for a whole round.
UNCHECKED int ordered(int k, int n, uint32_t start) {
    if (current_order == Order::reversed) return n - 1 - k;
    // 7 shares no factor with a warp: every lane once.
    return current_order == Order::shuffled
               ? static_cast<int>((static_cast<uint32_t>(k) * 7 + start) % static_cast<uint32_t>(n))
               : k;
}

UNCHECKED bool same(Site a, Site b) {
    return a.line == b.line && std::strcmp(a.file, b.file) == 0;
}

// Runs a warp's lanes until each has returned or waits at a barrier.
UNCHECKED void run_warp(Thread* lanes, int count) {
    for (;;) {
        const uint32_t start = next_random();
        const bool any_order = count % 7 != 0;
        for (int k = 0; k < count; k++) {
            Thread& t = lanes[any_order ? ordered(k, count, start) : k];
            if (t.state == State::ready) resume(t);
        }
        void* arguments[warp_size] = {};
        Thread* first = nullptr;
        for (int l = 0; l < count; l++)
            if (lanes[l].state == State::at_warp_operation && !first) first = &lanes[l];
        if (!first) return;
        for (int l = 0; l < count; l++) {
            Thread& t = lanes[l];
            if (t.state == State::done) continue;
            if (t.state != State::at_warp_operation || t.operation != first->operation ||
                !same(t.site, first->site))
                die(first->site, "not all lanes of the warp take part in a warp operation");
            arguments[l] = t.argument;
        }
        first->operation(arguments, first->site);
        for (int l = 0; l < count; l++)
            if (arguments[l]) lanes[l].state = State::ready;
    }
}

// Lets the block's threads pass the barrier at which they wait; false: all have returned.
UNCHECKED bool pass_barrier() {
    Thread* first = nullptr;
    for (int i = 0; i < block->count; i++)
        if (block->threads[i].state == State::at_barrier && !first) first = &block->threads[i];
    if (!first) return false;
    for (int i = 0; i < block->count; i++) {
        Thread& t = block->threads[i];
        if (t.state == State::done)
            die(first->site, "__syncthreads after threads of the block have returned");
        if (!same(t.site, first->site))
            die(first->site, "__syncthreads that not all threads of the block reach");
        t.state = State::ready;
    }
    return true;
}

UNCHECKED void start_threads() {
    dim3 index(0, 0, 0);
    for (int i = 0; i < block->count; i++) {
        Thread& t = block->threads[i];
        t.state = State::ready;
        t.index = index;
        if (fiber_per_thread && !t.worker) t.worker = new_worker();
        if (t.worker) {  // what was before the block is before its threads
            enter(t.worker->race_fiber, true);
            enter(block->race_fiber, true);
        }
        if (++index.x == blockDim.x) index.x = 0, index.y++;
        if (index.y == blockDim.y) index.y = 0, index.z++;
    }
}

UNCHECKED void run_block(dim3 index) {
    blockIdx = index;
    for (SharedObject& s : block->shared) s.fresh = false;
    fill_with_nan(block->dynamic.get(), block->dynamic_bytes);
    start_threads();
    const int warps = (block->count + warp_size - 1) / warp_size;
    do {
        const uint32_t start = next_random();
        for (int k = 0; k < warps; k++) {
            const int w = warps % 7 ? ordered(k, warps, start) : k, first = w * warp_size;
            run_warp(&block->threads[first], std::min(warp_size, block->count - first));
        }
    } while (pass_barrier());
    acquire(block);  // what its threads did is before what follows
}

void prepare(dim3 blocks, dim3 threads, size_t shared_bytes, Site site, void (*body)(void*), void* argument) {
    if (!block) block = new Block;  // lives as long as its host thread: the fibers are used again
    gridDim = blocks;
    blockDim = threads;
    block->count = static_cast<int>(threads.x * threads.y * threads.z);
    if (block->threads.size() < static_cast<size_t>(block->count)) block->threads.resize(block->count);
    block->dynamic.reset(new char[shared_bytes]);  // exactly: AddressSanitizer sees its end
    block->dynamic_bytes = shared_bytes;
    block->race_fiber = this_fiber();
    block->launch_site = site;
    block->body = body;
    block->argument = argument;
}

}  // namespace

void set_order(Order order) {
    current_order = order;
}

void die(Site site, const char* what) {
    const Site from = block->launch_site;
    std::fprintf(stderr, "emulated kernel: %s:%d: %s (block %u,%u,%u of the launch at %s:%d)\n", site.file,
                 site.line, what, blockIdx.x, blockIdx.y, blockIdx.z, from.file, from.line);
    std::abort();
}

UNCHECKED void collective(Collective operation, void* argument, Site site) {
    Thread& t = *block->running;
    t.operation = operation;
    t.argument = argument;
    t.site = site;
    t.state = State::at_warp_operation;
    void* warp = &block->threads[static_cast<size_t>(&t - block->threads.data()) / warp_size * warp_size];
    release(warp);
    suspend();
    acquire(warp);
}

UNCHECKED void barrier(Site site) {
    Thread& t = *block->running;
    t.site = site;
    t.state = State::at_barrier;
    release(&block->count);
    suspend();
    acquire(&block->count);
}

UNCHECKED int lane() {
    return static_cast<int>(block->running - block->threads.data()) % warp_size;
}

UNCHECKED void* shared_object(const void* type, size_t bytes) {
    SharedObject* found = nullptr;
    for (SharedObject& s : block->shared)
        if (s.type == type) found = &s;
    if (!found) {
        block->shared.push_back({type, std::unique_ptr<char[]>(new char[bytes]), bytes, false});
        found = &block->shared.back();
    }
    if (!found->fresh) fill_with_nan(found->memory.get(), bytes);
    found->fresh = true;
    return found->memory.get();
}

UNCHECKED char* dynamic_shared_memory() {
    return block->dynamic.get();
}

void run_grid(dim3 blocks, dim3 threads, size_t shared_bytes, Site site, void (*body)(void*),
              void* argument) {
    const int64_t count = int64_t{blocks.x} * blocks.y * blocks.z;
    const int64_t size = int64_t{threads.x} * threads.y * threads.z;
    if (count < 1 || blocks.y > 65535 || blocks.z > 65535 || size < 1 || size > most_threads ||
        static_cast<int64_t>(shared_bytes) > device_properties().shared_bytes) {
        std::fprintf(stderr,
                     "emulated kernel: %s:%d: a grid of %ld blocks of %ld threads with %zu bytes of LDS\n",
                     site.file, site.line, static_cast<long>(count), static_cast<long>(size), shared_bytes);
        std::abort();
    }
#pragma omp parallel
    {
        prepare(blocks, threads, shared_bytes, site, body, argument);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++)
            run_block(dim3(static_cast<unsigned>(i % blocks.x),
                           static_cast<unsigned>(i / blocks.x % blocks.y),
                           static_cast<unsigned>(i / blocks.x / blocks.y)));
    }
}

}  // namespace llamac::emulation

hipError_t hipMalloc(void** p, size_t bytes) {
    constexpr size_t alignment = 256, piece = 1 << 20;
    *p = nullptr;
    if (posix_memalign(p, alignment, bytes) != 0) return hipErrorOutOfMemory;
    char* memory = static_cast<char*>(*p);
#pragma omp parallel for
    for (size_t at = 0; at < bytes; at += piece) std::memset(memory + at, 0xff, std::min(piece, bytes - at));
    return hipSuccess;
}
#endif
