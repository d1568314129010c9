// A stand-in for libcuda.so.1, so that the real cuda-bindings package can be called without a GPU.
//
// "Device" memory is host memory, work runs when it is queued (or is recorded, while a stream is captured), kernels are
// handed to a callback. Checked: a context is current, handles belong to it, copies lie inside one allocation, shared
// memory was opted in to. Behaviour by environment: FAKE_CUDA_DEVICES, _VERSION, _CC, _MEMORY (bytes), _GRAPHS
// (executables there is memory for), _REGISTER (0: host memory cannot be registered).
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
enum { OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
       INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, CAPTURE_UNSUPPORTED = 900, LAUNCH_FAILED = 719 };
typedef int (*Launcher)(const char*, unsigned, unsigned, unsigned, unsigned, unsigned, void**);
typedef struct { int device, references; } Context;
typedef struct Op { int kind; uint64_t a, b; size_t n; struct Function* f; unsigned grid[3], block, shared; uint64_t* words; struct Op* next; } Op;
typedef struct { Context* context; Op *first, *last; int capturing; } Stream;
typedef struct { Context* context; int timing, recorded; } Event;
typedef struct { Op* first; Context* context; } Graph;
typedef struct Function { char name[128]; int n_params; int size[64]; int shared; struct Function* next; Context* context; } Function;
typedef struct { Function* first; Context* context; } Module;
typedef struct Block { uint64_t address; size_t size; int device; struct Block* next; } Block;

static int initialised;
static Context contexts[8];
static __thread Context* current;
static Block *blocks, *pinned;
static Launcher launcher;
static int sticky;
static long counts[8];  // live: 0 memory, 1 pinned, 2 streams, 3 events, 4 modules, 5 graphs, 6 executables, 7 registered

static long setting(const char* name, long otherwise) { const char* v = getenv(name); return v ? atol(v) : otherwise; }
static int n_devices(void) { const char* v = getenv("CUDA_VISIBLE_DEVICES"); return v && (!*v || *v == '-') ? 0 : (int)setting("FAKE_CUDA_DEVICES", 1); }

void fake_set_launcher(Launcher f) { launcher = f; }
long fake_count(int what) { return counts[what]; }

#define NEED_CONTEXT if (!initialised) return NOT_INITIALIZED; if (!current) return INVALID_CONTEXT; if (sticky) return sticky
#define MINE(x) if (!(x) || (x)->context != current) return INVALID_HANDLE

static Result init(unsigned flags) { if (flags) return INVALID_VALUE; if (!n_devices()) return NO_DEVICE; initialised = 1; return OK; }
static Result version(int* v) { *v = (int)setting("FAKE_CUDA_VERSION", 13000); return OK; }
static Result count(int* n) { *n = n_devices(); return OK; }
static Result get(int* device, int i) { if (i < 0 || i >= n_devices()) return INVALID_DEVICE; *device = i; return OK; }
static Result name_of(char* name, int n, int device) { memset(name, 0, n); snprintf(name, n, "Fake GPU %d", device); return OK; }
static Result attribute(int* v, int which, int device) {
  (void)device;
  int cc = (int)setting("FAKE_CUDA_CC", 90);
  switch (which) {
    case 75: *v = cc / 10; return OK;
    case 76: *v = cc % 10; return OK;
    case 16: *v = 132; return OK;
    case 97: *v = 232448; return OK;
    case 38: *v = 60 << 20; return OK;
  }
  return INVALID_VALUE;
}
static size_t total_bytes(void) { return (size_t)setting("FAKE_CUDA_MEMORY", 1L << 30); }
static Result total_mem(size_t* n, int device) { (void)device; *n = total_bytes(); return OK; }
static Result retain(Context** c, int device) { contexts[device].device = device; contexts[device].references++; *c = &contexts[device]; return OK; }
static Result release(int device) { return contexts[device].references-- > 0 ? OK : INVALID_CONTEXT; }
static Result set_current(Context* c) { if (c && c->references <= 0) return INVALID_CONTEXT; current = c; return OK; }
static Result ctx_synchronize(void) { NEED_CONTEXT; return OK; }
static size_t used(int device) { size_t n = 0; for (Block* b = blocks; b; b = b->next) if (b->device == device) n += b->size; return n; }
static Result mem_info(size_t* f, size_t* t) { NEED_CONTEXT; *t = total_bytes(); *f = *t - used(current->device); return OK; }

static Result take(Block** list, uint64_t* address, size_t n, int what) {
  Block* b = malloc(sizeof *b);
  b->address = (uint64_t)aligned_alloc(256, (n + 255) / 256 * 256);
  memset((void*)b->address, 0x7f, n);
  b->size = n;
  b->device = current->device;
  b->next = *list;
  *list = b;
  *address = b->address;
  counts[what]++;
  return OK;
}
static Result drop(Block** list, uint64_t address, int what) {
  for (; *list; list = &(*list)->next)
    if ((*list)->address == address && (what == 1 || (*list)->device == current->device)) {
      Block* b = *list;
      *list = b->next;
      free((void*)b->address);
      free(b);
      counts[what]--;
      return OK;
    }
  return INVALID_VALUE;
}
static Result mem_alloc(uint64_t* p, size_t n) {
  NEED_CONTEXT;
  if (!n) return INVALID_VALUE;
  if (used(current->device) + n > total_bytes()) return NO_MEMORY;
  return take(&blocks, p, n, 0);
}
static Result mem_free(uint64_t p) { NEED_CONTEXT; return drop(&blocks, p, 0); }
static Result host_alloc(void** p, size_t n, unsigned flags) { NEED_CONTEXT; if (flags != 1) return INVALID_VALUE; return take(&pinned, (uint64_t*)p, n, 1); }
static Result host_register(void* p, size_t n, unsigned flags) { NEED_CONTEXT; if (flags != 9 || (uint64_t)p % 4096 || n % 4096) return INVALID_VALUE; if (setting("FAKE_CUDA_REGISTER", 1) == 0) return 801; counts[7]++; return OK; }
static Result host_unregister(void* p) { NEED_CONTEXT; (void)p; if (!counts[7]) return INVALID_VALUE; counts[7]--; return OK; }
static Result host_free(void* p) { NEED_CONTEXT; return drop(&pinned, (uint64_t)p, 1); }
static int inside(uint64_t p, size_t n) {
  for (Block* b = blocks; b; b = b->next) if (b->device == current->device && p >= b->address && p + n <= b->address + b->size) return 1;
  return 0;
}

static Result run(Op* op) {
  switch (op->kind) {
    case 0: memcpy((void*)op->a, (void*)op->b, op->n); return OK;
    case 1: memset((void*)op->a, (int)op->b, op->n); return OK;
    case 2: {
      void* params[64];
      for (int i = 0; i < op->f->n_params; i++) params[i] = op->words + i;
      int code = launcher ? launcher(op->f->name, op->grid[0], op->grid[1], op->grid[2], op->block, op->shared, params) : OK;
      if (code) sticky = code;
      return OK;  // as on a GPU: the failure shows later
    }
    case 3: ((Event*)op->a)->recorded = 1; return OK;
  }
  return OK;
}
static Result queue(Stream* s, Op op) {
  if (!s->capturing) { Result r = run(&op); free(op.words); return r; }
  Op* kept = malloc(sizeof op);
  *kept = op;
  kept->next = NULL;
  if (s->last) s->last->next = kept; else s->first = kept;
  s->last = kept;
  return OK;
}
static Result stream_create(Stream** s, unsigned flags, int priority) { (void)priority; NEED_CONTEXT; if (flags != 1) return INVALID_VALUE; *s = calloc(1, sizeof **s); (*s)->context = current; counts[2]++; return OK; }
static Result stream_destroy(Stream* s) { NEED_CONTEXT; MINE(s); free(s); counts[2]--; return OK; }
static Result stream_synchronize(Stream* s) { NEED_CONTEXT; MINE(s); return s->capturing ? CAPTURE_UNSUPPORTED : OK; }
static Result event_create(Event** e, unsigned flags) { NEED_CONTEXT; if (flags & ~2u) return INVALID_VALUE; *e = calloc(1, sizeof **e); (*e)->context = current; (*e)->timing = !flags; counts[3]++; return OK; }
static Result event_destroy(Event* e) { NEED_CONTEXT; MINE(e); free(e); counts[3]--; return OK; }
static Result event_record(Event* e, Stream* s) { NEED_CONTEXT; MINE(e); MINE(s); return queue(s, (Op){.kind = 3, .a = (uint64_t)e}); }
static Result event_query(Event* e) { NEED_CONTEXT; MINE(e); return OK; }
static Result stream_wait(Stream* s, Event* e, unsigned flags) { NEED_CONTEXT; MINE(s); return !e || flags ? INVALID_VALUE : OK; }
static Result elapsed(float* ms, Event* a, Event* b) { NEED_CONTEXT; MINE(a); MINE(b); if (!a->timing || !b->timing || !a->recorded || !b->recorded) return INVALID_HANDLE; *ms = 1.5f; return OK; }
static Result to_device(uint64_t d, const void* h, size_t n, Stream* s) { NEED_CONTEXT; MINE(s); if (!inside(d, n)) return INVALID_VALUE; return queue(s, (Op){.kind = 0, .a = d, .b = (uint64_t)h, .n = n}); }
static Result to_host(void* h, uint64_t d, size_t n, Stream* s) { NEED_CONTEXT; MINE(s); if (!inside(d, n)) return INVALID_VALUE; return queue(s, (Op){.kind = 0, .a = (uint64_t)h, .b = d, .n = n}); }
static Result on_device(uint64_t a, uint64_t b, size_t n, Stream* s) { NEED_CONTEXT; MINE(s); if (!inside(a, n) || !inside(b, n)) return INVALID_VALUE; return queue(s, (Op){.kind = 0, .a = a, .b = b, .n = n}); }
static Result set8(uint64_t a, unsigned char v, size_t n, Stream* s) { NEED_CONTEXT; MINE(s); if (!inside(a, n)) return INVALID_VALUE; return queue(s, (Op){.kind = 1, .a = a, .b = v, .n = n}); }

static Result load(Module** m, const void* image) {
  NEED_CONTEXT;
  const char* at = image;
  if (!strstr(at, ".version ")) return 218;
  *m = calloc(1, sizeof **m);
  (*m)->context = current;
  while ((at = strstr(at, ".visible .entry "))) {
    Function* f = calloc(1, sizeof *f);
    at += 16;
    sscanf(at, "%127[A-Za-z0-9_]", f->name);
    const char* end = strchr(at, ')');
    while ((at = strstr(at, ".param .")) && at < end) {
      at += 8;
      f->size[f->n_params++] = strncmp(at + 1, "64", 2) ? 4 : 8;
    }
    at = end;
    f->shared = 49152;
    f->context = current;
    f->next = (*m)->first;
    (*m)->first = f;
  }
  counts[4]++;
  return OK;
}
static Result unload(Module* m) { NEED_CONTEXT; MINE(m); counts[4]--; return OK; }
static Result function(Function** f, Module* m, const char* name) {
  NEED_CONTEXT;
  MINE(m);
  for (*f = m->first; *f; *f = (*f)->next) if (!strcmp((*f)->name, name)) return OK;
  return NOT_FOUND;
}
static Result set_attribute(Function* f, int which, int v) { NEED_CONTEXT; MINE(f); if (which == 9) return v == 100 ? OK : INVALID_VALUE; if (which != 8 || v > 232448) return INVALID_VALUE; f->shared = v; return OK; }
static Result launch(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, Stream* s, void** params, void** extra) {
  NEED_CONTEXT;
  MINE(f);
  MINE(s);
  if (!gx || !gy || !gz || by != 1 || bz != 1 || extra || (int)shared > f->shared || bx > 1024) return INVALID_VALUE;
  Op op = {.kind = 2, .f = f, .grid = {gx, gy, gz}, .block = bx, .shared = shared};
  op.words = calloc(64, 8);
  for (int i = 0; i < f->n_params; i++) memcpy(op.words + i, params[i], f->size[i]);
  return queue(s, op);
}
static Result begin(Stream* s, int mode) { NEED_CONTEXT; MINE(s); if (s->capturing || mode != 1) return INVALID_VALUE; s->capturing = 1; s->first = s->last = NULL; return OK; }
static Result end(Stream* s, Graph** g) {
  NEED_CONTEXT;
  MINE(s);
  if (!s->capturing) return 901;
  s->capturing = 0;
  *g = calloc(1, sizeof **g);
  (*g)->first = s->first;
  (*g)->context = current;
  counts[5]++;
  return OK;
}
static Result instantiate(Graph** e, Graph* g, unsigned long long flags) { NEED_CONTEXT; MINE(g); if (flags) return INVALID_VALUE; if (counts[6] >= setting("FAKE_CUDA_GRAPHS", 1000)) return NO_MEMORY; *e = calloc(1, sizeof **e); **e = *g; counts[6]++; return OK; }
static Result graph_launch(Graph* e, Stream* s) {
  NEED_CONTEXT;
  MINE(e);
  MINE(s);
  for (Op* op = e->first; op; op = op->next) { Result r = run(op); if (r) return r; }
  return OK;
}
static Result exec_destroy(Graph* e) { NEED_CONTEXT; MINE(e); counts[6]--; free(e); return OK; }
static Result graph_destroy(Graph* g) { NEED_CONTEXT; MINE(g); counts[5]--; free(g); return OK; }
static Result error_name(int code, const char** text) { *text = code == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : code == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR"; return OK; }
static Result error_string(int code, const char** text) { *text = code == LAUNCH_FAILED ? "unspecified launch failure" : "an error of the stand-in"; return OK; }

static const struct { const char* name; void* f; } table[] = {
    {"cuInit", init}, {"cuDriverGetVersion", version}, {"cuDeviceGetCount", count}, {"cuDeviceGet", get},
    {"cuDeviceGetName", name_of}, {"cuDeviceGetAttribute", attribute}, {"cuDeviceTotalMem", total_mem},
    {"cuDevicePrimaryCtxRetain", retain}, {"cuDevicePrimaryCtxRelease", release}, {"cuCtxSetCurrent", set_current},
    {"cuCtxSynchronize", ctx_synchronize}, {"cuMemGetInfo", mem_info}, {"cuMemAlloc", mem_alloc}, {"cuMemFree", mem_free},
    {"cuMemHostAlloc", host_alloc}, {"cuMemFreeHost", host_free}, {"cuMemHostRegister", host_register}, {"cuMemHostUnregister", host_unregister}, {"cuStreamCreateWithPriority", stream_create},
    {"cuStreamDestroy", stream_destroy}, {"cuStreamSynchronize", stream_synchronize}, {"cuEventCreate", event_create},
    {"cuEventDestroy", event_destroy}, {"cuEventRecord", event_record}, {"cuEventQuery", event_query},
    {"cuStreamWaitEvent", stream_wait}, {"cuEventElapsedTime", elapsed}, {"cuMemcpyHtoDAsync", to_device},
    {"cuMemcpyDtoHAsync", to_host}, {"cuMemcpyDtoDAsync", on_device}, {"cuMemsetD8Async", set8}, {"cuModuleLoadData", load},
    {"cuModuleUnload", unload}, {"cuModuleGetFunction", function}, {"cuFuncSetAttribute", set_attribute},
    {"cuLaunchKernel", launch}, {"cuStreamBeginCapture", begin}, {"cuStreamEndCapture", end},
    {"cuGraphInstantiateWithFlags", instantiate}, {"cuGraphLaunch", graph_launch}, {"cuGraphExecDestroy", exec_destroy},
    {"cuGraphDestroy", graph_destroy}, {"cuGetErrorName", error_name}, {"cuGetErrorString", error_string}};

Result cuGetProcAddress_v2(const char* name, void** f, int wanted, uint64_t flags, int* status) {
  (void)wanted;
  (void)flags;
  *f = NULL;
  for (size_t i = 0; i < sizeof table / sizeof *table; i++) if (!strcmp(table[i].name, name)) *f = table[i].f;
  if (!strcmp(name, "cuGetProcAddress")) *f = cuGetProcAddress_v2;
  if (status) *status = *f ? 0 : 1;
  return *f ? OK : NOT_FOUND;
}
