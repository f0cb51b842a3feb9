// The threads of a block as fibers of one CPU thread: barriers, warps, and what goes wrong with them.
#pragma once

extern "C" void standin_switch(void** save, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.hidden standin_switch
.globl standin_switch
.type standin_switch, @function
standin_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size standin_switch, .-standin_switch
)");
#else
#error "the stand-in's fibers are written for x86-64"
#endif

extern "C" void* memcpy(void*, const void*, size_t);
extern "C" void* memset(void*, int, size_t);

namespace standin {

// What Python passes for one launch; its twin is in _raw.py.
struct Launch {
    unsigned int grid[3], block[3];
    size_t shared_bytes;
    char* shared;
    char* stacks;
    size_t stack_bytes;
    char* error;
    size_t error_bytes;
};

struct Fiber { void* sp; bool done; };
struct Warp { int arrived; unsigned int mask; int generation; char value[32][16]; };
struct Block {
    Fiber fibers[1024];
    Warp warps[32];
    int threads, current, arrived, line, generation, idle;
    bool failed;
    void* main;
    void (*body)(void*);
    void* context;
    Launch* launch;
};
static thread_local Block* now;

inline int lane() { return now->current % 32; }

inline void copy_text(const char* text) {
    size_t i = 0;
    for (; text[i] && i + 1 < now->launch->error_bytes; ++i) now->launch->error[i] = text[i];
    now->launch->error[i] = 0;
}

inline void set_thread(int index) {
    now->current = index;
    threadIdx.x = index % blockDim.x;
    threadIdx.y = index / blockDim.x % blockDim.y;
    threadIdx.z = index / blockDim.x / blockDim.y;
}

inline void yield() {
    const int own = now->current;
    standin_switch(&now->fibers[own].sp, now->main);
    set_thread(own);
}

inline void fail(const char* text) {
    if (!now->failed) copy_text(text);
    now->failed = true;
    for (;;) yield();
}

inline void sync_block(int line) {
    Block& b = *now;
    if (b.arrived == 0) b.line = line;
    if (b.line != line) fail("threads of one block stand at different __syncthreads()");
    const int generation = b.generation;
    b.idle = 0;
    if (++b.arrived == b.threads) { b.arrived = 0; ++b.generation; return; }
    while (b.generation == generation) { ++b.idle; yield(); }
    b.idle = 0;
}

inline void sync_warp(unsigned int mask) {
    Block& b = *now;
    Warp& w = b.warps[b.current / 32];
    if (!(mask >> lane() & 1u)) fail("a thread calls a warp operation whose mask leaves it out");
    const int lanes = b.threads - b.current / 32 * 32;
    if (lanes < 32 && mask >> lanes) fail("a warp operation's mask names lanes that the block does not have");
    if (w.arrived == 0) w.mask = mask;
    if (w.mask != mask) fail("threads of one warp call a warp operation with different masks");
    const int generation = w.generation;
    b.idle = 0;
    if (++w.arrived == __builtin_popcount(mask)) { w.arrived = 0; ++w.generation; return; }
    while (w.generation == generation) { ++b.idle; yield(); }
    b.idle = 0;
}

template <class T> T exchange(unsigned int mask, T v, int from) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 2, "CUDA shuffles 2, 4 and 8 bytes");
    Warp& w = now->warps[now->current / 32];
    if (from < 0 || from > 31 || !(mask >> from & 1u)) fail("a shuffle reads a lane that its mask leaves out");
    memcpy(w.value[lane()], &v, sizeof(T));
    sync_warp(mask);
    T out;
    memcpy(&out, w.value[from], sizeof(T));
    sync_warp(mask);
    return out;
}

inline char* dynamic_shared() { return now->launch->shared; }

static void fiber_main() {
    now->body(now->context);
    now->fibers[now->current].done = true;
    now->idle = 0;
    for (;;) yield();
}

inline void run_block(bool reverse) {
    Block& b = *now;
    memset(b.warps, 0, sizeof(b.warps));
    b.arrived = b.generation = b.idle = 0;
    memset(b.launch->shared, 0xff, b.launch->shared_bytes);
    for (int i = 0; i < b.threads; ++i) {
        void** top = (void**)(b.launch->stacks + (size_t)(i + 1) * b.launch->stack_bytes);
        *--top = 0;
        *--top = (void*)fiber_main;
        for (int r = 0; r < 6; ++r) *--top = 0;
        b.fibers[i].sp = top;
        b.fibers[i].done = false;
    }
    for (int alive = b.threads; alive && !b.failed;) {
        for (int step = 0; step < b.threads && !b.failed; ++step) {
            const int i = reverse ? b.threads - 1 - step : step;
            if (b.fibers[i].done) continue;
            set_thread(i);
            standin_switch(&b.main, b.fibers[i].sp);
            if (b.fibers[i].done) --alive;
        }
        if (alive && b.idle > 2 * b.threads) {
            copy_text("threads wait at a barrier that others of their block or warp have left or never reach");
            b.failed = true;
        }
    }
}

inline int run(void (*body)(void*), void* context, Launch* launch) {
    Block* block = (Block*)launch->stacks;  // the first stacks' room is for the block's own state
    launch->stacks += (sizeof(Block) + 4095) / 4096 * 4096;
    now = block;
    block->failed = false;
    block->body = body;
    block->context = context;
    block->launch = launch;
    block->threads = launch->block[0] * launch->block[1] * launch->block[2];
    gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
    blockDim = {launch->block[0], launch->block[1], launch->block[2]};
    const size_t blocks = (size_t)gridDim.x * gridDim.y * gridDim.z;
    for (size_t n = 0; n < blocks && !block->failed; ++n) {
        blockIdx = {(unsigned int)(n % gridDim.x), (unsigned int)(n / gridDim.x % gridDim.y),
                    (unsigned int)(n / gridDim.x / gridDim.y)};
        run_block(n % 2);  // every other block backwards, so that a missing __syncthreads shows
    }
    return block->failed;
}

// -- a kernel's parameters, as text: P/C pointer to mutable/const, S scalar, then kind and bytes ---------
template <class T> struct kind { static const char value = 's'; };
template <> struct kind<void> { static const char value = 'v'; };
template <> struct kind<bool> { static const char value = '?'; };
#define STANDIN_KIND(T, c) template <> struct kind<T> { static const char value = c; };
STANDIN_KIND(char, 'i') STANDIN_KIND(signed char, 'i') STANDIN_KIND(unsigned char, 'u') STANDIN_KIND(short, 'i')
STANDIN_KIND(unsigned short, 'u') STANDIN_KIND(int, 'i') STANDIN_KIND(unsigned int, 'u') STANDIN_KIND(long, 'i')
STANDIN_KIND(unsigned long, 'u') STANDIN_KIND(long long, 'i') STANDIN_KIND(unsigned long long, 'u')
STANDIN_KIND(float, 'f') STANDIN_KIND(double, 'f')
template <class T> struct bytes { static const int value = sizeof(T); };
template <> struct bytes<void> { static const int value = 1; };
template <class T> struct describe {
    static void put(char*& out) { *out++ = 'S'; *out++ = kind<T>::value; *out++ = '0' + bytes<T>::value; }
};
template <class T> struct describe<T*> {
    static void put(char*& out) { *out++ = 'P'; *out++ = kind<T>::value; *out++ = '0' + bytes<T>::value; }
};
template <class T> struct describe<const T*> {
    static void put(char*& out) { *out++ = 'C'; *out++ = kind<T>::value; *out++ = '0' + bytes<T>::value; }
};

template <int... I> struct indices {};
template <class F> struct call;
template <class... A> struct call<void (*)(A...)> {
    struct Context { void (*f)(A...); void** args; };
    template <int... I> static void go(Context* c, indices<I...>) { c->f(*(A*)c->args[I]...); }
    static void body(void* context) { go((Context*)context, indices<__integer_pack(sizeof...(A))...>()); }
    static int launch(void (*f)(A...), void** args, Launch* l) {
        Context context = {f, args};
        return run(body, &context, l);
    }
    static void signature(char* out) {
        (describe<A>::put(out), ...);
        *out = 0;
    }
};
template <class... A> call<void (*)(A...)> call_of(void (*)(A...)) { return {}; }

}  // namespace standin
