/* Devices, contexts, errors' names, and the lookup of functions by name and version. See fake_cuda.h. */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_NESTED_CONTEXTS = 32 };

int device_count;
size_t device_nbytes;
struct context contexts[MAX_DEVICES];

static bool ready, peers_enabled;
static __thread CUcontext stack[MAX_NESTED_CONTEXTS]; /* a thread's current context is the last */
static __thread int depth;

bool initialized(void) { return ready; }
CUcontext current_context(void) { return depth ? stack[depth - 1] : NULL; }
bool is_context(CUcontext c) { return c >= contexts && c < contexts + device_count && c->retained > 0; }
static bool is_device(int device) { return device >= 0 && device < device_count; }
bool peers_reachable(int device, int peer) { return device == peer || peers_enabled; }

CUresult take_error(CUcontext context)
{
    CUresult error = context->error ? context->error : context->late;
    context->late = SUCCESS;
    return error;
}

/* What the file says of a device; false if nothing. */
static bool look_up(int device, const char *word, char *value, size_t room)
{
    const char *path = getenv("FAKE_CUDA_MACHINE");
    FILE *file = path ? fopen(path, "re") : NULL;
    char line[LINE];
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        char said[16];
        int number, start = 0;
        found = sscanf(line, "%d %15s %n", &number, said, &start) == 2 && number == device && !strcmp(said, word);
        if (found)
            snprintf(value, room, "%.*s", (int)strcspn(line + start, "\n"), line + start);
    }
    if (file)
        fclose(file);
    return found;
}

unsigned long long of_machine(int device, const char *word)
{
    char value[32];
    return look_up(device, word, value, sizeof value) ? strtoull(value, NULL, 0) : 0;
}

/* What this process's context takes. */
size_t context_nbytes(int device) { return contexts[device].retained ? of_machine(device, "context") : 0; }

/* What a driver does at first and a sandbox may refuse: it names a thread by a file, and makes a file in memory. */
static bool may_begin(void)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/comm", (int)gettid());
    int name = open(path, O_RDWR | O_CLOEXEC), file = memfd_create("fake-cuda-own", MFD_CLOEXEC);
    bool good = name >= 0 && file >= 0;
    if (name >= 0)
        close(name);
    if (file >= 0)
        close(file);
    return good;
}

API cuInit(unsigned flags)
{
    BEGIN(ANYTIME, "(%u)", flags);
    if (flags)
        END(INVALID_VALUE);
    if (!may_begin())
        END(OPERATING_SYSTEM);
    if (!ready) {
        unsigned long long count = setting("FAKE_CUDA_DEVICES", 1);
        device_count = count < MAX_DEVICES ? (int)count : MAX_DEVICES;
        device_nbytes = setting("FAKE_CUDA_MEMORY", 1ull << 30);
        peers_enabled = setting("FAKE_CUDA_PEER", 1) != 0;
        for (int i = 0; i < device_count; i++)
            contexts[i].device = i;
    }
    ready = device_count > 0;
    END(ready ? SUCCESS : NO_DEVICE);
}

API cuDriverGetVersion(int *version)
{
    BEGIN(ANYTIME, "()");
    *version = 13000;
    END(SUCCESS);
}

/* ---- devices */

API cuDeviceGetCount(int *count)
{
    BEGIN(READY, "()");
    *count = device_count;
    END(SUCCESS);
}

API cuDeviceGet(CUdevice *device, int ordinal)
{
    BEGIN(READY, "(%d)", ordinal);
    *device = ordinal;
    END(is_device(ordinal) ? SUCCESS : INVALID_DEVICE);
}

API cuDeviceGetName(char *name, int length, CUdevice device)
{
    BEGIN(READY, "(%d)", device);
    if (!is_device(device))
        END(INVALID_DEVICE);
    if (!look_up(device, "name", name, (size_t)length))
        snprintf(name, (size_t)length, "Fake GPU %d", device);
    END(SUCCESS);
}

API cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    BEGIN(READY, "(%d)", device);
    if (!is_device(device))
        END(INVALID_DEVICE);
    memcpy(uuid->bytes, "fake-cuda-gpu-#", 15);
    uuid->bytes[15] = (char)device;
    END(SUCCESS);
}

API cuDeviceTotalMem_v2(size_t *nbytes, CUdevice device)
{
    BEGIN(READY, "(%d)", device);
    *nbytes = device_nbytes;
    END(is_device(device) ? SUCCESS : INVALID_DEVICE);
}

API cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    BEGIN(READY, "(%d)", device);
    if (!is_device(device))
        END(INVALID_DEVICE);
    snprintf(text, (size_t)length, "0000:%02X:00.0", device + 1);
    END(SUCCESS);
}

API cuDeviceGetByPCIBusId(CUdevice *device, const char *text)
{
    BEGIN(READY, "(%s)", text);
    unsigned domain, bus;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2 || domain || !is_device((int)bus - 1))
        END(INVALID_DEVICE);
    *device = (int)bus - 1;
    END(SUCCESS);
}

API cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    static const int values[][2] = {
        {1, 1024},   /* threads per block */
        {10, 32},    /* warp size */
        {16, 132},   /* multiprocessors */
        {19, 1},     /* can map host memory */
        {31, 1},     /* concurrent kernels */
        {34, 0},     /* PCI device */
        {39, 2048},  /* threads per multiprocessor */
        {40, 3},     /* asynchronous engines */
        {41, 1},     /* unified addressing */
        {75, 9},     /* compute capability */
        {76, 0},
        {78, 1},     /* stream priorities */
        {91, 1},     /* registered host memory has one address */
        {99, 1},     /* host registration */
        {102, 1},    /* virtual memory management */
        {103, 1},    /* POSIX file descriptors */
        {113, 1},    /* read-only host registration */
        {134, -1},   /* host NUMA node: unknown */
    };
    BEGIN(READY, "(%d, %d)", attribute, device);
    if (!is_device(device))
        END(INVALID_DEVICE);
    *value = attribute == 33 ? device + 1 : 0; /* PCI bus */
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (values[i][0] == attribute)
            *value = values[i][1];
    END(attribute > 0 ? SUCCESS : INVALID_VALUE);
}

/* ---- contexts: only the primary ones, as the runtime and PyTorch use them */

API cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    BEGIN(READY, "(%d)", device);
    if (!is_device(device))
        END(INVALID_DEVICE);
    CUresult broken = (CUresult)of_machine(device, "error");
    if (broken)
        END(broken);
    contexts[device].retained++;
    *context = &contexts[device];
    END(SUCCESS);
}

/* How many streams and regions of memory it still had. */
static int destroy(CUcontext context)
{
    int device = context->device;
    int left = drop_context_streams(context) + drop_context_memory(context);
    memset(context, 0, sizeof *context);
    context->device = device;
    return left;
}

API cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    BEGIN(READY, "(%d)", device);
    if (!is_device(device))
        END(INVALID_DEVICE);
    if (!contexts[device].retained)
        END(violation(INVALID_CONTEXT, "context of device %d released too often", device));
    int left = --contexts[device].retained ? 0 : destroy(&contexts[device]);
    if (left)
        violation(SUCCESS, "context of device %d released with %d streams or regions of memory left", device, left);
    END(SUCCESS);
}

API cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    BEGIN(READY, "(%d)", device);
    if (!is_device(device))
        END(INVALID_DEVICE);
    int retained = contexts[device].retained;
    destroy(&contexts[device]);
    contexts[device].retained = retained;
    END(SUCCESS);
}

API cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    BEGIN(READY, "(%d, %u)", device, flags);
    END(is_device(device) ? SUCCESS : INVALID_DEVICE);
}

API cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    BEGIN(READY, "(%d)", device);
    if (!is_device(device))
        END(INVALID_DEVICE);
    *flags = 0;
    *active = contexts[device].retained > 0;
    END(SUCCESS);
}

API cuCtxSetCurrent(CUcontext context)
{
    BEGIN(READY, "(%p)", (void *)context);
    if (context && !is_context(context))
        END(INVALID_CONTEXT);
    if (!context)
        depth -= depth > 0;
    else
        stack[depth ? depth - 1 : depth++] = context;
    END(SUCCESS);
}

API cuCtxGetCurrent(CUcontext *context)
{
    BEGIN(READY, "()");
    *context = current_context();
    END(SUCCESS);
}

API cuCtxPushCurrent_v2(CUcontext context)
{
    BEGIN(READY, "(%p)", (void *)context);
    if (!is_context(context))
        END(INVALID_CONTEXT);
    if (depth == MAX_NESTED_CONTEXTS)
        END(INVALID_VALUE);
    stack[depth++] = context;
    END(SUCCESS);
}

API cuCtxPopCurrent_v2(CUcontext *context)
{
    BEGIN(READY, "()");
    if (!depth)
        END(INVALID_CONTEXT);
    depth--;
    if (context)
        *context = stack[depth];
    END(SUCCESS);
}

API cuCtxGetDevice(CUdevice *device)
{
    BEGIN(CURRENT, "()");
    *device = current_context()->device;
    END(SUCCESS);
}

API cuCtxGetDevice_v2(CUdevice *device, CUcontext context)
{
    BEGIN(READY, "(%p)", (void *)context);
    context = context ? context : current_context();
    if (!is_context(context))
        END(INVALID_CONTEXT);
    *device = context->device;
    END(SUCCESS);
}

API cuCtxGetId(CUcontext context, unsigned long long *id)
{
    BEGIN(READY, "(%p)", (void *)context);
    context = context ? context : current_context();
    if (!is_context(context))
        END(INVALID_CONTEXT);
    *id = 1 + (unsigned long long)context->device;
    END(SUCCESS);
}

API cuCtxGetFlags(unsigned *flags)
{
    BEGIN(CURRENT, "()");
    *flags = 0;
    END(SUCCESS);
}

API cuCtxGetApiVersion(CUcontext context, unsigned *version)
{
    BEGIN(READY, "(%p)", (void *)context);
    *version = 3020;
    END(SUCCESS);
}

API cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    BEGIN(CURRENT, "()");
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    END(SUCCESS);
}

/* ---- peers */

API cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    BEGIN(READY, "(%d, %d)", device, peer);
    if (!is_device(device) || !is_device(peer))
        END(INVALID_DEVICE);
    *can = device != peer && peers_enabled;
    END(SUCCESS);
}

API cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice device, CUdevice peer)
{
    BEGIN(READY, "(%d, %d, %d)", attribute, device, peer);
    if (!is_device(device) || !is_device(peer) || device == peer)
        END(INVALID_DEVICE);
    *value = peers_enabled && (attribute == 2 || attribute == 3); /* access, native atomics; rank 0 is the best */
    END(SUCCESS);
}

API cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
    BEGIN(CURRENT, "(%p, %u)", (void *)peer, flags);
    CUcontext context = current_context();
    if (flags)
        END(INVALID_VALUE);
    if (!is_context(peer))
        END(INVALID_CONTEXT);
    if (peer == context)
        END(INVALID_DEVICE);
    if (!peers_enabled)
        END(PEER_ACCESS_UNSUPPORTED);
    if (context->peers[peer->device])
        END(PEER_ACCESS_ALREADY_ENABLED);
    context->peers[peer->device] = true;
    END(SUCCESS);
}

API cuCtxDisablePeerAccess(CUcontext peer)
{
    BEGIN(CURRENT, "(%p)", (void *)peer);
    if (!is_context(peer))
        END(INVALID_CONTEXT);
    if (!current_context()->peers[peer->device])
        END(PEER_ACCESS_NOT_ENABLED);
    current_context()->peers[peer->device] = false;
    END(SUCCESS);
}

/* ---- errors */

static const struct { CUresult code; const char *name, *text; } errors[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no device is there"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {MAP_FAILED_ERROR, "CUDA_ERROR_MAP_FAILED", "mapping failed"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error"},
    {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "no access between these two devices"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "not valid in this state"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access"},
    {PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access was not enabled"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "the context is destroyed"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "host memory is already registered"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "host memory is not registered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "not permitted"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "not supported"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

/* Not logged, and never failing: error paths call them. */
static CUresult describe(CUresult code, const char **text, bool name)
{
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            *text = name ? errors[i].name : errors[i].text;
    return *text ? SUCCESS : INVALID_VALUE;
}

API cuGetErrorName(CUresult code, const char **text) { return describe(code, text, true); }
API cuGetErrorString(CUresult code, const char **text) { return describe(code, text, false); }

/* ---- lookup. A name without its suffix and the version that the caller was written for choose the function: the
   newest that is not newer than that version. */

#define FUNCTIONS(X)                                                                                                   \
    X(cuInit, 2000, ) X(cuDriverGetVersion, 2020, ) X(cuGetErrorName, 6000, ) X(cuGetErrorString, 6000, )              \
    X(cuDeviceGet, 2000, ) X(cuDeviceGetCount, 2000, ) X(cuDeviceGetName, 2000, ) X(cuDeviceGetUuid, 9020, _v2)        \
    X(cuDeviceTotalMem, 3020, _v2) X(cuDeviceGetAttribute, 2000, ) X(cuDeviceGetPCIBusId, 4010, )                      \
    X(cuDeviceGetByPCIBusId, 4010, ) X(cuDevicePrimaryCtxRetain, 7000, ) X(cuDevicePrimaryCtxRelease, 7000, _v2)       \
    X(cuDevicePrimaryCtxReset, 7000, _v2) X(cuDevicePrimaryCtxSetFlags, 7000, _v2)                                     \
    X(cuDevicePrimaryCtxGetState, 7000, ) X(cuCtxSetCurrent, 4000, ) X(cuCtxGetCurrent, 4000, )                        \
    X(cuCtxPushCurrent, 4000, _v2) X(cuCtxPopCurrent, 4000, _v2) X(cuCtxGetDevice, 2000, )                             \
    X(cuCtxGetDevice, 13000, _v2) X(cuCtxSynchronize, 2000, ) X(cuCtxSynchronize, 13000, _v2) X(cuCtxGetId, 12000, )   \
    X(cuCtxGetFlags, 7000, ) X(cuCtxGetApiVersion, 3020, ) X(cuCtxGetStreamPriorityRange, 5050, )                      \
    X(cuDeviceCanAccessPeer, 4000, ) X(cuDeviceGetP2PAttribute, 8000, ) X(cuCtxEnablePeerAccess, 4000, )               \
    X(cuCtxDisablePeerAccess, 4000, ) X(cuMemGetInfo, 3020, _v2) X(cuMemAlloc, 3020, _v2) X(cuMemFree, 3020, _v2)      \
    X(cuMemGetAddressRange, 3020, _v2) X(cuMemHostAlloc, 2020, ) X(cuMemAllocHost, 3020, _v2) X(cuMemFreeHost, 2000, ) \
    X(cuMemHostRegister, 4000, _v2) X(cuMemHostUnregister, 4000, ) X(cuMemHostGetDevicePointer, 3020, _v2)             \
    X(cuMemHostGetFlags, 2030, ) X(cuIpcGetMemHandle, 4010, ) X(cuIpcOpenMemHandle, 4010, _v2)                         \
    X(cuIpcCloseMemHandle, 4010, ) X(cuPointerGetAttribute, 4000, ) X(cuPointerGetAttributes, 7000, )                  \
    X(cuMemGetAllocationGranularity, 10020, ) X(cuMemAddressReserve, 10020, ) X(cuMemAddressFree, 10020, )             \
    X(cuMemCreate, 10020, ) X(cuMemRelease, 10020, ) X(cuMemRetainAllocationHandle, 11000, ) X(cuMemMap, 10020, )      \
    X(cuMemUnmap, 10020, ) X(cuMemSetAccess, 10020, ) X(cuMemGetAccess, 10020, )                                       \
    X(cuMemExportToShareableHandle, 10020, ) X(cuMemImportFromShareableHandle, 10020, )                                \
    X(cuMemGetAllocationPropertiesFromHandle, 10020, ) X(cuStreamCreate, 2000, )                                       \
    X(cuStreamCreateWithPriority, 5050, ) X(cuStreamDestroy, 4000, _v2) X(cuStreamQuery, 2000, )                       \
    X(cuStreamSynchronize, 2000, ) X(cuStreamWaitEvent, 3020, ) X(cuStreamGetFlags, 5050, )                            \
    X(cuStreamGetPriority, 5050, ) X(cuStreamGetCtx, 9020, ) X(cuStreamGetCtx, 12050, _v2) X(cuStreamGetId, 12000, )   \
    X(cuStreamGetDevice, 12080, ) X(cuStreamIsCapturing, 10000, ) X(cuEventCreate, 2000, ) X(cuEventRecord, 2000, )    \
    X(cuEventRecordWithFlags, 11010, ) X(cuEventQuery, 2000, ) X(cuEventSynchronize, 2000, )                           \
    X(cuEventDestroy, 4000, _v2) X(cuEventElapsedTime, 2000, _v2) X(cuMemcpy, 4000, ) X(cuMemcpyAsync, 4000, )         \
    X(cuMemcpyHtoD, 3020, _v2) X(cuMemcpyHtoDAsync, 3020, _v2) X(cuMemcpyDtoH, 3020, _v2)                              \
    X(cuMemcpyDtoHAsync, 3020, _v2) X(cuMemcpyDtoD, 3020, _v2) X(cuMemcpyDtoDAsync, 3020, _v2)                         \
    X(cuMemcpyPeer, 4000, ) X(cuMemcpyPeerAsync, 4000, ) X(cuMemcpyBatchAsync, 13000, _v2) X(cuMemsetD8, 3020, _v2)    \
    X(cuMemsetD8Async, 3020, ) X(cuMemsetD32, 3020, _v2) X(cuMemsetD32Async, 3020, ) X(cuLaunchHostFunc, 10000, )      \
    X(cuStreamWriteValue32, 11070, _v2) X(cuStreamWriteValue64, 11070, _v2) X(cuStreamWaitValue32, 11070, _v2)         \
    X(cuStreamWaitValue64, 11070, _v2) X(cuGetProcAddress, 11030, ) X(cuGetProcAddress, 12000, _v2)

#define DECLARE(name, since, suffix) void name##suffix##_untyped(void) __asm__(#name #suffix);
FUNCTIONS(DECLARE)
#define ENTRY(name, since, suffix) {#name, since, name##suffix##_untyped},
static const struct { const char *name; int since; void (*function)(void); } functions[] = {FUNCTIONS(ENTRY)};

API cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status)
{
    (void)flags; /* which default stream: there is one */
    int best = -1, known = 0;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (strcmp(functions[i].name, name))
            continue;
        known = 1;
        if (functions[i].since <= version && functions[i].since > best) {
            best = functions[i].since;
            memcpy(function, &functions[i].function, sizeof *function);
        }
    }
    if (best < 0)
        *function = NULL;
    if (status)
        *status = best >= 0 ? 0 : known ? 2 : 1; /* found, version not sufficient, no such symbol */
    return best >= 0 ? SUCCESS : NOT_FOUND;
}

API cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
