// Emulation of a CUDA block on the CPU, for tests: the kernel sources themselves compile with g++ -DIK_EMU.
//
// Every thread is a fiber. A thread runs until a barrier or a warp operation; the last one to arrive at a warp operation
// computes it for all 32 lanes. The order of threads, warps and blocks is random but seeded. Shared memory starts as NaN
// patterns with guarded margins, cp.async poisons its target when issued and lands only at its wait, vector accesses must
// be aligned (-fsanitize=alignment), and threads that leave, or wait at different barriers, are an error.
#pragma once
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>
#include <ucontext.h>

typedef uint8_t u8;
typedef int8_t i8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef long long i64;

using std::isinf;
using std::isnan;

#define DI static inline
#define __device__
#ifdef IK_EMU_SCAN
#define __global__ ik_entry_mark
#define __launch_bounds__(...) ik_bounds_mark(__VA_ARGS__)
#else
#define __global__
#define __launch_bounds__(...)
#endif
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __align__(n) alignas(n)
#define __constant__

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) longlong2 { long long x, y; };
DI float2 make_float2(float x, float y) { return {x, y}; }
DI float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
DI uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
DI uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
DI int2 make_int2(int x, int y) { return {x, y}; }
DI int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
template <class T> DI T min(T a, T b) { return b < a ? b : a; }
template <class T> DI T max(T a, T b) { return a < b ? b : a; }

namespace emu {

struct dim3 { unsigned x = 1, y = 1, z = 1; };
constexpr int kMaxThreads = 1024, kMaxWarps = 32;
constexpr size_t kStack = 128 << 10, kPage = 4096, kMaxShared = 256 << 10, kMaxStatic = 48 << 10, kGuard = 64;

// ---- fibers -------------------------------------------------------------------------------------------------------
#if defined(__x86_64__)
typedef void* Context;
extern "C" void ik_emu_switch(Context* save, Context load) __attribute__((visibility("hidden")));
asm(R"(
.text
.p2align 4
.type ik_emu_switch,@function
ik_emu_switch:
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
.size ik_emu_switch, .-ik_emu_switch
)");
inline void switch_to(Context& save, Context& load) { ik_emu_switch(&save, load); }
inline void prepare(Context& c, u8* stack, void (*start)()) {
  void** top = (void**)(stack + kStack);
  top[-1] = nullptr;
  top[-2] = (void*)start;
  memset(top - 8, 0, 6 * sizeof(void*));
  c = top - 8;
}
#else
typedef ucontext_t Context;
inline void switch_to(Context& save, Context& load) { swapcontext(&save, &load); }
inline void prepare(Context& c, u8* stack, void (*start)()) {
  getcontext(&c);
  c.uc_stack.ss_sp = stack;
  c.uc_stack.ss_size = kStack;
  c.uc_link = nullptr;
  makecontext(&c, start, 0);
}
#endif

struct Copy { void* dst; const void* src; int n; bool pred; int group; };
struct Thread {
  Context context;
  u8* stack;
  int barrier;             // line of the barrier it waits at, 0: none
  int op;                  // line of the warp operation it waits at, 0: none
  int group;               // cp.async groups committed
  bool done;
  std::vector<Copy> copies;
};
struct Slot { u64 in[8]; u64 out[4]; };

static Thread threads[kMaxThreads];
static Slot slots[kMaxWarps][32];
static int warp_waiting[kMaxWarps];
static int ready[kMaxThreads + 1], ready_head, ready_tail;  // ring of runnable threads
static int n_threads, n_done, n_barrier, current, barrier_line;
static int named_count[16], named_wait[kMaxThreads];
static u8* stacks;  // the first n_stacks can be used: every one is two of the mappings that a process may have
static int n_stacks;
static std::vector<u8*> free_stacks;
static u8 *shared_map, *shared, *statics;
static size_t shared_bytes;
static int static_used = 0;
static std::vector<int> static_guards;
static Context main_context;
static sigjmp_buf escape;
static bool failed;
static char message[512];
static u64 seed;
static dim3 grid_dim, block_dim, block_index;
static void (*entry)(const u64*);
static const u64* entry_args;
static u64 n_barriers, n_warp_ops;

inline u64 random() {
  seed ^= seed << 13;
  seed ^= seed >> 7;
  seed ^= seed << 17;
  return seed;
}
inline int lane() { return current & 31; }
inline int warp() { return current >> 5; }

[[noreturn]] inline void fail(const char* format, ...) {
  va_list list;
  va_start(list, format);
  int n = snprintf(message, sizeof message, "block (%u,%u,%u) thread %d: ", block_index.x, block_index.y, block_index.z,
                   current);
  vsnprintf(message + n, sizeof message - n, format, list);
  va_end(list);
  failed = true;
  siglongjmp(escape, 1);
}

inline void make_ready(int t) {
  ready[ready_tail] = t;
  ready_tail = ready_tail == kMaxThreads ? 0 : ready_tail + 1;
}

inline void thread_start();

// Leave the current thread for the next runnable one, or for the scheduler when there is none.
inline void yield() {
  int self = current;
  if (ready_head == ready_tail) {
    switch_to(threads[self].context, main_context);
    return;
  }
  int next = ready[ready_head];
  ready_head = ready_head == kMaxThreads ? 0 : ready_head + 1;
  if (next == self) return;
  Thread& t = threads[next];
  if (!t.stack) {
    if (free_stacks.empty()) fail("no fiber stack left");
    t.stack = free_stacks.back();
    free_stacks.pop_back();
    prepare(t.context, t.stack, thread_start);
  }
  current = next;
  switch_to(threads[self].context, t.context);
}

inline void thread_start() {
  entry(entry_args);
  Thread& t = threads[current];
  t.done = true;
  n_done++;
  if (n_barrier) fail("left the kernel while others wait at the barrier of line %d", barrier_line);
  if (warp_waiting[warp()]) fail("left the kernel while lanes of its warp wait in a warp operation");
  for (;;) {
    // A fresh thread next: let it take this stack. It starts from the top, nothing here is needed again.
    switch_to(t.context, main_context);
  }
}

// Every thread of the block; threads are released in a random order of warps and a random rotation of lanes.
inline void barrier(int line) {
  n_barriers++;
  if (n_done) fail("reached the barrier of line %d after threads left the kernel", line);
  if (n_barrier && barrier_line != line) fail("barriers of lines %d and %d are mixed", barrier_line, line);
  barrier_line = line;
  if (++n_barrier < n_threads) {
    threads[current].barrier = line;
    yield();
    return;
  }
  n_barrier = 0;
  int n_warps = n_threads / 32, order[kMaxWarps];
  for (int i = 0; i < n_warps; i++) {
    int j = random() % (i + 1);
    order[i] = order[j];
    order[j] = i;
  }
  int turn = random() & 31;
  for (int i = 0; i < n_warps; i++)
    for (int l = 0; l < 32; l++) {
      int t = order[i] * 32 + ((l + turn) & 31);
      threads[t].barrier = 0;
      make_ready(t);
    }
  yield();
}

// bar.sync id, n: the first n threads that arrive (whole warps).
inline void named_barrier(int id, int n, int line) {
  n_barriers++;
  if (id < 1 || id > 15 || n % 32 || n > n_threads) fail("bad named barrier %d of %d threads", id, n);
  threads[current].barrier = line;
  named_wait[current] = id;
  if (++named_count[id] < n) return yield();
  named_count[id] = 0;
  for (int t = 0; t < n_threads; t++)
    if (named_wait[t] == id) {
      named_wait[t] = 0;
      threads[t].barrier = 0;
      make_ready(t);
    }
  yield();
}

// All 32 lanes; the last one to arrive runs f(slots of the warp).
template <class F> inline void warp_op(int line, F f) {
  int w = warp();
  n_warp_ops++;
  threads[current].op = line;
  if (++warp_waiting[w] < 32) {
    yield();
    return;
  }
  warp_waiting[w] = 0;
  for (int l = 0; l < 32; l++) {
    Thread& t = threads[w * 32 + l];
    if (t.op != line) fail("lanes of a warp are in the warp operations of lines %d and %d", t.op, line);
    t.op = 0;
  }
  f(slots[w]);
  int turn = random() & 31;
  for (int l = 0; l < 32; l++)
    if (int t = w * 32 + ((l + turn) & 31); t != current) make_ready(t);
}

// ---- memory --------------------------------------------------------------------------------------------------------
inline void poison(void* p, size_t n) {
  u16* h = (u16*)p;
  for (size_t i = 0; i < n / 2; i++) h[i] = 0x7fff;  // NaN as f16, bf16 and f32, a huge number as int
  if (n & 1) ((u8*)p)[n - 1] = 0xff;
}
inline bool poisoned(const void* p, size_t n) {
  for (size_t i = 0; i < n / 2; i++)
    if (((const u16*)p)[i] != 0x7fff) return false;
  return true;
}
inline int static_shared(size_t bytes, size_t align) {
  size_t at = (static_used + align - 1) / align * align;
  if (at + bytes + kGuard > kMaxStatic) fail("more than 48 KB of static shared memory");
  poison(statics + at, bytes + kGuard);
  static_guards.push_back((int)(at + bytes));
  static_used = at + bytes + kGuard;
  return (int)at;
}
inline void check_shared(const void* p, size_t n, size_t align) {
  const u8* b = (const u8*)p;
  bool dynamic = b >= shared && b + n <= shared + shared_bytes;
  bool fixed = b >= statics && b + n <= statics + kMaxStatic;
  if (!dynamic && !fixed) fail("shared address out of range: offset %ld of %zu bytes", (long)(b - shared), shared_bytes);
  if ((uintptr_t)p % align) fail("shared address not aligned to %zu bytes", align);
}
inline void check_global(const void* p, size_t align) {
  if ((uintptr_t)p % align) fail("global address not aligned to %zu bytes", align);
  if ((const u8*)p >= shared_map && (const u8*)p < shared_map + kMaxShared + 6 * kPage) fail("a shared address where a global one is needed");
}

// ---- launch --------------------------------------------------------------------------------------------------------
inline void set_up() {
  if (stacks) return;
  size_t step = kStack + kPage;
  stacks = (u8*)mmap(nullptr, step * kMaxThreads, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  shared_map = (u8*)mmap(nullptr, kMaxShared + 6 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(shared_map + kPage, kMaxShared + 4 * kPage, PROT_READ | PROT_WRITE);
  poison(shared_map + kPage, kMaxShared + 4 * kPage);
  statics = (u8*)aligned_alloc(128, kMaxStatic);
  poison(statics, kMaxStatic);
}

inline void run_block(int threads_per_block) {
  n_threads = threads_per_block;
  n_done = n_barrier = ready_head = ready_tail = 0;
  memset(warp_waiting, 0, sizeof warp_waiting);
  memset(named_count, 0, sizeof named_count);
  size_t step = kStack + kPage;
  if ((int)free_stacks.size() != n_stacks) {
    free_stacks.clear();
    for (int i = n_stacks; i--;) free_stacks.push_back(stacks + step * i + kPage);
  }
  for (; n_stacks < n_threads; n_stacks++) {
    u8* stack = stacks + step * n_stacks + kPage;
    if (mprotect(stack, kStack, PROT_READ | PROT_WRITE)) fail("no memory for the stacks of %d threads", n_threads);
    free_stacks.push_back(stack);
  }
  if (shared_bytes) poison(shared, shared_bytes);
  if (static_used) poison(statics, static_used);
  int turn = random() % n_threads;
  bool up = random() & 1;
  for (int i = 0; i < n_threads; i++) {
    Thread& t = threads[i];
    t.stack = nullptr;
    t.barrier = t.op = t.group = 0;
    t.done = false;
    named_wait[i] = 0;
    if (!t.copies.empty()) t.copies.clear();
  }
  for (int i = 0; i < n_threads; i++) {
    int t = turn + (up ? i : n_threads - i);
    make_ready(t % n_threads);
  }
  while (n_done < n_threads) {
    if (ready_head == ready_tail) {
      for (current = 0; threads[current].done; current++) {}
      for (int t = 0; t < n_threads; t++)
        if (!threads[t].done && threads[t].op) fail("lane waits in the warp operation of line %d for lanes that never come", threads[t].op);
      fail("waits at the barrier of line %d for threads that never come", threads[current].barrier);
    }
    int next = ready[ready_head];
    ready_head = ready_head == kMaxThreads ? 0 : ready_head + 1;
    Thread& t = threads[next];
    if (!t.stack) {
      t.stack = free_stacks.back();
      free_stacks.pop_back();
      prepare(t.context, t.stack, thread_start);
    }
    current = next;
    switch_to(main_context, t.context);
    Thread& last = threads[current];
    if (last.done && last.stack) {
      free_stacks.push_back(last.stack);
      last.stack = nullptr;
    }
  }
  current = 0;
  for (int at : static_guards)
    if (!poisoned(statics + at, kGuard)) fail("wrote past a static shared array");
  if (!poisoned(shared - kPage, kPage)) fail("wrote in front of shared memory");
  if (!poisoned(shared + shared_bytes, kPage)) fail("wrote past the %zu bytes of shared memory", shared_bytes);
}

inline void on_signal(int number, siginfo_t* info, void* state) {
  size_t at = 0;  // of the instruction, for addr2line
#if defined(__x86_64__)
  Dl_info file;
  void* pc = (void*)((ucontext_t*)state)->uc_mcontext.gregs[REG_RIP];
  if (dladdr(pc, &file)) at = (u8*)pc - (u8*)file.dli_fbase;
#endif
  if (number == SIGILL) fail("misaligned vector access [+%#zx]", at);
  if (number == SIGFPE) fail("integer division by zero [+%#zx]", at);
  fail("access outside of memory at %p [+%#zx]", info->si_addr, at);
}

inline int launch(void (*f)(const u64*), const unsigned* grid, int block, size_t shared_size, const u64* args, u64 start) {
  set_up();
  entry = f;
  entry_args = args;
  seed = start * 0x9E3779B97F4A7C15ull | 1;
  for (int i = 0; i < 4; i++) random();
  grid_dim = {grid[0], grid[1], grid[2]};
  block_dim = {(unsigned)block, 1, 1};
  shared_bytes = shared_size;
  shared = shared_map + 2 * kPage;
  failed = false;
  message[0] = 0;
  n_barriers = n_warp_ops = 0;
  static u8 alternate[64 << 10];
  stack_t mine = {}, old_stack;
  mine.ss_sp = alternate;
  mine.ss_size = sizeof alternate;
  sigaltstack(&mine, &old_stack);
  struct sigaction action = {}, old[4];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  const int signals[4] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  for (int i = 0; i < 4; i++) sigaction(signals[i], &action, &old[i]);
  u64 n = (u64)grid[0] * grid[1] * grid[2], first = n ? random() % n : 0;
  bool up = random() & 1;
  if (!sigsetjmp(escape, 1)) {
    for (u64 i = 0; i < n; i++) {
      u64 b = ((up ? i : n - 1 - i) + first) % n;
      block_index = {(unsigned)(b % grid[0]), (unsigned)(b / grid[0] % grid[1]), (unsigned)(b / grid[0] / grid[1])};
      run_block(block);
    }
  } else {
    free_stacks.clear();
    poison(shared_map + kPage, kMaxShared + 4 * kPage);
  }
  for (int i = 0; i < 4; i++) sigaction(signals[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  if (!failed && shared_bytes) poison(shared, shared_bytes);
  return failed;
}

// ---- entries: argument types from the signature --------------------------------------------------------------------
template <class A> constexpr char arg_type() {
  static_assert(std::is_pointer_v<A> || std::is_integral_v<A> || std::is_same_v<A, float>, "kernel arguments are flat scalars");
  static_assert(sizeof(A) == 4 || sizeof(A) == 8, "kernel arguments have 4 or 8 bytes");
  return std::is_same_v<A, float> ? 'f' : sizeof(A) == 8 ? 'q' : 'i';
}
template <class F> struct Signature;
template <class... A> struct Signature<void(A...)> {
  static constexpr char text[] = {arg_type<A>()..., 0};
  template <class T> static T get(const u64* word) {
    T value;
    memcpy(&value, word, sizeof value);
    return value;
  }
  template <void (*F)(A...), size_t... I> static void unpack(const u64* args, std::index_sequence<I...>) { F(get<A>(args + I)...); }
  template <void (*F)(A...)> static void call(const u64* args) { unpack<F>(args, std::index_sequence_for<A...>{}); }
};
struct Entry { const char* name; const char* types; void (*call)(const u64*); int max_threads; };
#define IK_EMU_ENTRY(name, bound) {#name, emu::Signature<decltype(name)>::text, emu::Signature<decltype(name)>::call<&name>, bound}
}  // namespace emu

#define threadIdx (emu::dim3{(unsigned)emu::current, 0, 0})
#define blockIdx emu::block_index
#define blockDim emu::block_dim
#define gridDim emu::grid_dim
#define warpSize 32
#define __syncthreads() emu::barrier(__LINE__)
#define SMEM_DECL u8* const smem_raw = emu::shared;
#define IK_SHARED(type, name, count)                                                       \
  static const int name##_at = emu::static_shared(sizeof(type) * (count), alignof(type)); \
  type* const name = (type*)(emu::statics + name##_at);

// ---- primitives, in the order of prims.cuh --------------------------------------------------------------------------
DI void bar_sync_at(int id, int n, int line) { emu::named_barrier(id, n, line); }
#define bar_sync(id, n) bar_sync_at(id, n, __LINE__)
DI void warp_sync() { emu::warp_op(1, [](emu::Slot*) {}); }
#define __syncwarp() warp_sync()
DI void cp_async(void* d, const void* s, bool pred, int n) {
  emu::check_shared(d, n, n);
  emu::check_global(s, n);
  emu::poison(d, n);
  auto& t = emu::threads[emu::current];
  t.copies.push_back({d, s, n, pred, t.group});
}
DI void cp16(void* d, const void* s, bool pred) { cp_async(d, s, pred, 16); }
DI void cp8(void* d, const void* s, bool pred) { cp_async(d, s, pred, 8); }
DI void cp4(void* d, const void* s, bool pred) { cp_async(d, s, pred, 4); }
DI void cp_commit() { emu::threads[emu::current].group++; }
template <int N> DI void cp_wait() {
  auto& t = emu::threads[emu::current];
  size_t kept = 0;
  for (auto& c : t.copies)
    if (c.group < t.group - N) {
      if (c.pred) memcpy(c.dst, c.src, c.n);
      else memset(c.dst, 0, c.n);
    } else t.copies[kept++] = c;
  t.copies.resize(kept);
}
template <int N, bool TR> DI void emu_ldsm(u32 (&r)[N], const void* p) {
  auto& mine = emu::slots[emu::warp()][emu::lane()];
  if (emu::lane() < 8 * N) emu::check_shared(p, 16, 16);
  mine.in[0] = (u64)p;
  emu::warp_op(N * 2 + TR + 100, [](emu::Slot* s) {
    for (int l = 0; l < 32; l++)
      for (int m = 0; m < N; m++) {
        u32 v = 0;
        for (int e = 0; e < 2; e++) {
          int row = TR ? (l % 4) * 2 + e : l / 4, col = TR ? l / 4 : (l % 4) * 2 + e;
          v |= (u32)((const u16*)s[m * 8 + row].in[0])[col] << (16 * e);
        }
        s[l].out[m] = v;
      }
  });
  for (int m = 0; m < N; m++) r[m] = (u32)mine.out[m];
}
DI void ldsm4(u32 (&r)[4], const void* p) { emu_ldsm<4, false>(r, p); }
DI void ldsm4t(u32 (&r)[4], const void* p) { emu_ldsm<4, true>(r, p); }
DI void ldsm2(u32 (&r)[2], const void* p) { emu_ldsm<2, false>(r, p); }
DI void ldsm2t(u32 (&r)[2], const void* p) { emu_ldsm<2, true>(r, p); }

DI float f16f(u16 h) {
  _Float16 x;
  memcpy(&x, &h, 2);
  return (float)x;
}
DI u16 f2h(float f) {
  if (f != f) return 0x7fff;
  _Float16 x = (_Float16)f;
  u16 h;
  memcpy(&h, &x, 2);
  return h;
}
DI float bf16f(u16 h) {
  u32 u = (u32)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
DI u16 f2b(float f) {
  if (f != f) return 0x7fff;
  u32 u;
  memcpy(&u, &f, 4);
  return (u16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
template <bool BF> DI float emu_half(u32 h) { return BF ? bf16f((u16)h) : f16f((u16)h); }
template <bool BF> DI u32 pack2(float lo, float hi) {
  return BF ? (f2b(lo) | (u32)f2b(hi) << 16) : (f2h(lo) | (u32)f2h(hi) << 16);
}
DI float2 unpack_f16(u32 v) { return {f16f((u16)v), f16f((u16)(v >> 16))}; }
DI float2 unpack_bf16(u32 v) { return {bf16f((u16)v), bf16f((u16)(v >> 16))}; }

template <bool BF> __attribute__((noinline, optimize("O3"))) static void emu_mma16816(emu::Slot* s) {
  float a[16][16], b[16][8];
  for (int l = 0; l < 32; l++)
    for (int e = 0; e < 2; e++) {
      for (int i = 0; i < 4; i++) a[l / 4 + 8 * (i & 1)][(l % 4) * 2 + e + 8 * (i >> 1)] = emu_half<BF>((u32)s[l].in[i] >> (16 * e));
      for (int i = 0; i < 2; i++) b[(l % 4) * 2 + e + 8 * i][l / 4] = emu_half<BF>((u32)s[l].in[4 + i] >> (16 * e));
    }
  for (int r = 0; r < 16; r++) {
    double x[8];
    for (int n = 0; n < 8; n++) {
      float c;
      memcpy(&c, (u8*)&s[(r % 8) * 4 + n / 2].in[6 + r / 8] + 4 * (n & 1), 4);
      x[n] = c;
    }
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 8; n++) x[n] += (double)a[r][k] * (double)b[k][n];
    for (int n = 0; n < 8; n++) {
      float c = (float)x[n];
      memcpy((u8*)&s[(r % 8) * 4 + n / 2].out[r / 8] + 4 * (n & 1), &c, 4);
    }
  }
}
template <bool BF> DI void mma16816(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  auto& mine = emu::slots[emu::warp()][emu::lane()];
  for (int i = 0; i < 4; i++) mine.in[i] = a[i];
  mine.in[4] = b0;
  mine.in[5] = b1;
  memcpy(&mine.in[6], c, 16);
  emu::warp_op(120 + BF, emu_mma16816<BF>);
  memcpy(c, mine.out, 16);
}
__attribute__((noinline, optimize("O3"))) static void emu_mma16832(emu::Slot* s) {
  int a[16][32], b[32][8];
  for (int l = 0; l < 32; l++)
    for (int e = 0; e < 4; e++) {
      for (int i = 0; i < 4; i++) a[l / 4 + 8 * (i & 1)][(l % 4) * 4 + e + 16 * (i >> 1)] = (i8)(s[l].in[i] >> (8 * e));
      for (int i = 0; i < 2; i++) b[(l % 4) * 4 + e + 16 * i][l / 4] = (i8)(s[l].in[4 + i] >> (8 * e));
    }
  for (int r = 0; r < 16; r++)
    for (int n = 0; n < 8; n++) {
      u32 x;
      memcpy(&x, (u8*)&s[(r % 8) * 4 + n / 2].in[6 + r / 8] + 4 * (n & 1), 4);
      for (int k = 0; k < 32; k++) x += (u32)(a[r][k] * b[k][n]);
      memcpy((u8*)&s[(r % 8) * 4 + n / 2].out[r / 8] + 4 * (n & 1), &x, 4);
    }
}
DI void mma16832(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  auto& mine = emu::slots[emu::warp()][emu::lane()];
  for (int i = 0; i < 4; i++) mine.in[i] = a[i];
  mine.in[4] = b0;
  mine.in[5] = b1;
  memcpy(&mine.in[6], c, 16);
  emu::warp_op(130, emu_mma16832);
  memcpy(c, mine.out, 16);
}
DI void mma16832(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, const int4& zero) {
  memcpy(c, &zero, 16);
  mma16832(c, a, b0, b1);
}
DI void mma16816i(int (&c)[4], u32 a0, u32 a1, u32 b, const int4& zero) {
  auto& mine = emu::slots[emu::warp()][emu::lane()];
  mine.in[0] = a0;
  mine.in[1] = a1;
  mine.in[2] = mine.in[3] = mine.in[5] = 0;
  mine.in[4] = b;
  memcpy(&mine.in[6], &zero, 16);
  emu::warp_op(131, emu_mma16832);
  memcpy(c, mine.out, 16);
}
__attribute__((noinline, optimize("O3"))) static void emu_mma1688(emu::Slot* s) {
  float a[16][8], b[8][8];
  auto value = [](u64 bits) {
    u32 u = (u32)bits & 0xffffe000u;
    float f;
    memcpy(&f, &u, 4);
    return f;
  };
  for (int l = 0; l < 32; l++) {
    for (int i = 0; i < 4; i++) a[l / 4 + 8 * (i & 1)][l % 4 + 4 * (i >> 1)] = value(s[l].in[i]);
    for (int i = 0; i < 2; i++) b[l % 4 + 4 * i][l / 4] = value(s[l].in[4 + i]);
  }
  for (int r = 0; r < 16; r++)
    for (int n = 0; n < 8; n++) {
      float c;
      memcpy(&c, (u8*)&s[(r % 8) * 4 + n / 2].in[6 + r / 8] + 4 * (n & 1), 4);
      double x = c;
      for (int k = 0; k < 8; k++) x += (double)a[r][k] * (double)b[k][n];
      c = (float)x;
      memcpy((u8*)&s[(r % 8) * 4 + n / 2].out[r / 8] + 4 * (n & 1), &c, 4);
    }
}
DI void mma1688(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  auto& mine = emu::slots[emu::warp()][emu::lane()];
  for (int i = 0; i < 4; i++) mine.in[i] = a[i];
  mine.in[4] = b0;
  mine.in[5] = b1;
  memcpy(&mine.in[6], c, 16);
  emu::warp_op(132, emu_mma1688);
  memcpy(c, mine.out, 16);
}
DI u32 tf32(float x) {
  u32 u;
  memcpy(&u, &x, 4);
  if ((u & 0x7f800000u) == 0x7f800000u) return u;
  return (u + 0x1000u) & 0xffffe000u;
}
DI float emu_ftz(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.f, x) : x; }
DI float ex2(float x) { return emu_ftz(exp2f(emu_ftz(x))); }
DI float lg2(float x) { return log2f(emu_ftz(x)); }
DI float rcp(float x) { return 1.f / x; }
DI float tanh_fast(float x) { return tanhf(x); }
DI float rsqrtf(float x) { return 1.f / sqrtf(x); }
#define __expf(x) expf(x)  // libm declares these names
#define __logf(x) logf(x)
DI float __fdividef(float a, float b) { return a / b; }
DI float __frcp_rn(float x) { return 1.f / x; }
DI float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
DI float __fmul_rn(float a, float b) { return a * b; }
DI float __fadd_rn(float a, float b) { return a + b; }
DI float __fsub_rn(float a, float b) { return a - b; }
DI float __fdiv_rn(float a, float b) { return a / b; }
DI float __fsqrt_rn(float x) { return sqrtf(x); }
DI int __float2int_rn(float x) { return (int)nearbyintf(x); }
DI int __float2int_rz(float x) { return (int)x; }
DI float __int2float_rn(int x) { return (float)x; }
template <class T, class U> DI T emu_cast(U x) {
  T r;
  memcpy(&r, &x, sizeof r);
  return r;
}
DI int __float_as_int(float x) { return emu_cast<int>(x); }
DI u32 __float_as_uint(float x) { return emu_cast<u32>(x); }
DI float __int_as_float(int x) { return emu_cast<float>(x); }
DI float __uint_as_float(u32 x) { return emu_cast<float>(x); }
DI int __popc(u32 x) { return __builtin_popcount(x); }
DI int __clz(int x) { return x ? __builtin_clz((u32)x) : 32; }
DI int __ffs(int x) { return __builtin_ffs(x); }
DI u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }

template <class F> DI u32 emu_shuffle(u32 v, int key, F source) {
  auto& mine = emu::slots[emu::warp()][emu::lane()];
  mine.in[0] = v;
  mine.in[1] = (u64)source(emu::lane());
  emu::warp_op(140 + key, [](emu::Slot* s) {
    for (int l = 0; l < 32; l++) s[l].out[0] = s[s[l].in[1] & 31].in[0];
  });
  return (u32)mine.out[0];
}
DI u32 shx_u32(u32 v, int m) { return emu_shuffle(v, 0, [m](int l) { return l ^ m; }); }
DI float shx(float v, int m) { return emu_cast<float>(shx_u32(emu_cast<u32>(v), m)); }
DI u32 shfl_u32(u32 v, int from) { return emu_shuffle(v, 1, [from](int) { return from & 31; }); }
DI float shfl(float v, int from) { return emu_cast<float>(shfl_u32(emu_cast<u32>(v), from)); }
DI u32 shup_u32(u32 v, int d) { return emu_shuffle(v, 2, [d](int l) { return l < d ? l : l - d; }); }
DI u32 ballot(bool p) {
  auto& mine = emu::slots[emu::warp()][emu::lane()];
  mine.in[0] = p;
  emu::warp_op(150, [](emu::Slot* s) {
    u32 bits = 0;
    for (int l = 0; l < 32; l++) bits |= (u32)(s[l].in[0] != 0) << l;
    for (int l = 0; l < 32; l++) s[l].out[0] = bits;
  });
  return (u32)mine.out[0];
}
DI u32 prmt(u32 a, u32 b, u32 s) {
  u64 x = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    u32 n = s >> (4 * i), v = (u32)(x >> (8 * (n & 7))) & 0xff;
    if (n & 8) v = v & 0x80 ? 0xff : 0;
    r |= v << (8 * i);
  }
  return r;
}
DI u32 hadd2(u32 a, u32 b) { return pack2<false>(f16f((u16)a) + f16f((u16)b), f16f((u16)(a >> 16)) + f16f((u16)(b >> 16))); }
DI u32 hsub2(u32 a, u32 b) { return pack2<false>(f16f((u16)a) - f16f((u16)b), f16f((u16)(a >> 16)) - f16f((u16)(b >> 16))); }
DI u32 hmul2(u32 a, u32 b) { return pack2<false>(f16f((u16)a) * f16f((u16)b), f16f((u16)(a >> 16)) * f16f((u16)(b >> 16))); }
DI u32 hfma2(u32 a, u32 b, u32 c) {  // one rounding: the product of two f16 is exact in double, and so is its rounding path
  auto one = [](u32 x, u32 y, u32 z) {
    double v = (double)f16f((u16)x) * f16f((u16)y) + f16f((u16)z);
    if (v != v) return (u32)0x7fff;
    _Float16 h = (_Float16)v;
    return (u32)emu_cast<u16>(h);
  };
  return one(a, b, c) | one(a >> 16, b >> 16, c >> 16) << 16;
}
DI int dp4a(u32 a, u32 b, int c) {
  for (int i = 0; i < 4; i++) c += (i8)(a >> (8 * i)) * (i8)(b >> (8 * i));
  return c;
}
DI int dp4a_us(u32 a, u32 b, int c) {
  for (int i = 0; i < 4; i++) c += (int)(u8)(a >> (8 * i)) * (i8)(b >> (8 * i));
  return c;
}
DI u32 vsub4(u32 a, u32 b) {
  u32 r = 0;
  for (int i = 0; i < 32; i += 8) r |= (u32)(u8)((a >> i) - (b >> i)) << i;
  return r;
}
DI void pin(u32&) {}
DI void pin(int4&) {}
DI void pin(float&) {}
DI uint4 ldg16(const void* p) {
  emu::check_global(p, 16);
  return *(const uint4*)p;
}
DI uint2 ldg8(const void* p) {
  emu::check_global(p, 8);
  return *(const uint2*)p;
}
DI u32 ldg4(const void* p) {
  emu::check_global(p, 4);
  return *(const u32*)p;
}
DI u16 ldg2(const void* p) {
  emu::check_global(p, 2);
  return *(const u16*)p;
}
DI int atomicAdd(int* p, int v) {
  int old = *p;
  *p = old + v;
  return old;
}
