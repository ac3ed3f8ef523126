/*
 * A libcuda.so.1 without a GPU, for tests: what its C files share. It decides nothing.
 *
 * control.c  entering and leaving every call: lock, context, injected failures, log, violations
 * driver.c   devices, contexts, errors' names, and the lookup of functions by name and version
 * memory.c   which addresses are memory, and of whom: allocations, registered host memory, legacy IPC, attributes
 * vmm.c      reserved addresses, physical handles, mappings, and their export by file descriptor
 * streams.c  queues of work, the threads that carry it out when they may, events
 * copies.c   what can be queued: copies, fills, values, host functions
 * pins.c     the pages of registered host memory, held although the mapping may lose them
 *
 * "Device memory" is memory of the process at the address that the device pointer says. One lock guards everything;
 * it is released while a stream moves bytes or calls a host function.
 *
 * Building it is build.py's; loading and steering it, harness.py's. It must be loaded before anything asks for libcuda
 * (its SONAME makes later loads find it), so each group of tests runs in a process of its own.
 *
 * cuInit does what a driver does at first and a sandbox may refuse; no process can use what its parent has begun.
 *
 * What it is for: code that forgets a wait, takes memory away under queued work, copies from memory that is not
 * registered, goes on with a broken context or uses a dead handle must fail, every time. Four rules are stricter than a
 * driver's: cuMemUnmap, cuMemFree, cuMemFreeHost and cuMemHostUnregister refuse while queued work needs the memory;
 * asynchronous copies refuse unregistered host memory; one copy does not span two registrations; and a context is
 * released only when nothing but events is left in it (it goes all the same, with a violation). There are no kernels
 * (fake_cuda_sum stands for one), graphs, memory pools, capture, IPC events or textures.
 *
 * Environment: FAKE_CUDA_DEVICES (1), FAKE_CUDA_MEMORY (bytes per device, 1 GiB; counted per process),
 * FAKE_CUDA_GRANULARITY (2 MiB), FAKE_CUDA_PEER (1; 0: no device reaches another), FAKE_CUDA_MODE (lazy | eager | late),
 * FAKE_CUDA_DELAY_MS (2, for late), FAKE_CUDA_POLLS (1), FAKE_CUDA_FAIL (function:nth:code[:sticky],...),
 * FAKE_CUDA_PINS (0; 1: hold the pages of what is registered), FAKE_CUDA_MACHINE: a file, read whenever it matters,
 * with lines "DEVICE error CODE" (it gives no context), "DEVICE taken BYTES" (other processes hold them), "DEVICE name
 * TEXT".
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- the driver's own types and numbers, as far as they are needed */

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct context *CUcontext;
typedef void *CUstream;
typedef void *CUevent;
typedef void (*CUhostFn)(void *);
typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef struct { int type; int id; } CUmemLocation;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct { unsigned char compressionType, gpuDirectRDMACapable; unsigned short usage; unsigned char reserved[4]; } allocFlags;
} CUmemAllocationProp;

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, MAP_FAILED_ERROR = 205, PEER_ACCESS_UNSUPPORTED = 217, OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
    PEER_ACCESS_ALREADY_ENABLED = 704, PEER_ACCESS_NOT_ENABLED = 705, CONTEXT_IS_DESTROYED = 709,
    ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_PERMITTED = 800, NOT_SUPPORTED = 801,
};
enum { LOCATION_DEVICE = 1, TYPE_PINNED = 1, HANDLE_POSIX_FD = 1, ACCESS_READ = 1, ACCESS_READWRITE = 3 };
enum { REGISTER_READ_ONLY = 8, REGISTER_KNOWN = 15, STREAM_NON_BLOCKING = 1, EVENT_DISABLE_TIMING = 2, EVENT_KNOWN = 7 };

#define API __attribute__((visibility("default"))) CUresult
#define CONTROL __attribute__((visibility("default")))

/* ---- bounds: a test that reaches one is a runaway */

enum {
    MAX_DEVICES = 16,
    MAX_STREAMS = 256,
    MAX_EVENTS = 1 << 16,
    MAX_HANDLES = 1 << 16,
    MAX_QUEUED = 1 << 16, /* per stream; beyond, issuing waits, as it does in a real driver */
    MAX_LOG = 1 << 13,
    MAX_VIOLATIONS = 64,
    MAX_RULES = 16,
    LINE = 200,
};

/* ---- control.c */

struct context {
    int device;
    int retained;
    CUresult error; /* sticky: every later call in this context returns it */
    CUresult late;  /* an asynchronous error that the next call returns, once */
    bool peers[MAX_DEVICES];
};

enum level {
    ANYTIME, /* also before cuInit and with a broken context */
    READY,   /* after cuInit; a broken current context does not matter */
    MEMORY,  /* after cuInit, no context needed, but a broken one is reported */
    CURRENT, /* needs a current context that is alive */
};

struct call {
    const char *name;
    char text[LINE];
    CUresult result;
};

/* Take the lock and judge whether the call may go on; nonzero if not, and call->result says why. */
bool begin(struct call *call, const char *name, enum level level, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Log the call and release the lock. */
CUresult end(struct call *call, CUresult result);

#define BEGIN(level, ...)                                                                                              \
    struct call call;                                                                                                  \
    if (begin(&call, __func__, level, __VA_ARGS__))                                                                    \
    return end(&call, call.result)
#define END(result) return end(&call, (result))

extern pthread_mutex_t lock;
extern pthread_cond_t changed; /* anything that a stream thread or a waiting call may be waiting for */
extern __thread bool in_host_function;

void note(const char *format, ...) __attribute__((format(printf, 1, 2)));      /* one line of the log */
CUresult violation(CUresult result, const char *format, ...) __attribute__((format(printf, 2, 3)));
CUresult injected(const char *point, bool *sticky); /* the failure that was ordered for here, or SUCCESS */
unsigned long long setting(const char *name, unsigned long long otherwise);
unsigned long long of_machine(int device, const char *word);
size_t context_nbytes(int device);

/* ---- driver.c */

extern int device_count;
extern size_t device_nbytes;
extern struct context contexts[MAX_DEVICES];
bool initialized(void);
CUcontext current_context(void);
bool is_context(CUcontext context);
bool peers_reachable(int device, int peer);
/* What is wrong with the context, once if it is not sticky. */
CUresult take_error(CUcontext context);

/* ---- memory.c: `lock` held */

enum kind { ALLOCATED, IMPORTED, MAPPED, HOST_REGISTERED, HOST_ALLOCATED, RESERVED };

struct region {
    uintptr_t start;
    size_t nbytes;
    enum kind kind;
    CUcontext context; /* of ALLOCATED, IMPORTED and HOST_*: goes with it */
    int device;
    int fd;                            /* ALLOCATED, IMPORTED */
    unsigned flags;                    /* HOST_* */
    struct pins *pins;                 /* HOST_REGISTERED, if they are held */
    int opens;                         /* IMPORTED */
    CUmemGenericAllocationHandle phys; /* MAPPED */
    uint8_t access[MAX_DEVICES];       /* MAPPED: ACCESS_* by device */
};

struct regions { /* disjoint, by address */
    struct region **items;
    size_t count, room;
};
extern struct regions regions, reservations;
extern size_t used_nbytes[MAX_DEVICES];
size_t free_nbytes(int device);

struct region *find_region(const struct regions *table, uintptr_t address);
struct region *add_region(struct regions *table, uintptr_t start, size_t nbytes, enum kind kind);
void remove_region(struct regions *table, struct region *region);
bool overlaps_region(const struct regions *table, uintptr_t start, size_t nbytes);
int device_memory(const char *name, int device, size_t nbytes); /* a descriptor, or -1 */
size_t page_up(size_t nbytes);
int drop_context_memory(CUcontext context); /* how many regions */

enum side { DEVICE_SIDE, HOST_SIDE, EITHER_SIDE };
/* Whether a copy on behalf of a device may read (or write) all of these bytes. */
bool accessible(uintptr_t start, size_t nbytes, enum side side, int device, bool write, bool pageable);

/* ---- streams.c: `lock` held */

enum op_kind { OP_COPY, OP_SET, OP_RECORD, OP_WAIT, OP_CALL, OP_SUM, OP_WRITE_VALUE, OP_WAIT_VALUE };

struct mark { /* a point on a stream; never reached points do not exist: seq 0 is passed by everything */
    unsigned slot, generation;
    uint64_t seq;
};

struct op {
    enum op_kind kind;
    uint64_t seq;
    uintptr_t dst, src;
    size_t nbytes;
    enum side dst_side, src_side;
    int dst_device, src_device;
    bool pageable; /* a synchronous copy: the host's memory need not be registered, its caller is waiting */
    uint64_t value;
    unsigned flags, width; /* OP_SET: bytes of the pattern; OP_*_VALUE: bytes of the word */
    CUevent event;
    struct mark mark;
    CUhostFn function;
    void *argument;
    uint64_t due_ns;
    struct op *next;
};

CUresult issue(CUstream stream, const struct op *op); /* copies the op */
CUresult synchronize_stream(CUstream stream);
int stream_device(CUstream stream); /* -1: no such stream */
/* A queued or running op that refers to these bytes, or NULL. */
const struct op *in_use(uintptr_t start, size_t nbytes);
void await_running(uintptr_t start, size_t nbytes);
int drop_context_streams(CUcontext context); /* how many, beside the legacy one */
uint64_t now_ns(void);
int live_streams(void);
int live_events(void);

/* ---- copies.c */

/* Carry it out; called with the lock, which it releases while bytes move. Nonzero: the context is broken. */
CUresult perform(struct op *op, CUcontext context);

/* ---- pins.c */

struct pins *pin(uintptr_t start, size_t nbytes); /* NULL: it cannot be done */
void unpin(struct pins *pins);
bool read_pinned(struct pins *pins, uintptr_t src, uintptr_t dst, size_t nbytes);
bool write_pinned(struct pins *pins, uintptr_t dst, uintptr_t src, size_t nbytes);

/* ---- vmm.c: `lock` held */

int live_handles(void);

#endif
