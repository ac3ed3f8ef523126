/* What can be queued: copies, fills, values, sums, host functions; checked when issued and again when carried out. */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* Move bytes, and notice instead of crashing that an address is not there: the kernel does the copying. */
static bool move(uintptr_t dst, uintptr_t src, size_t nbytes)
{
    while (nbytes) {
        struct iovec to = {(void *)dst, nbytes}, from = {(void *)src, nbytes};
        ssize_t moved = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
        if (moved < 0 && (errno == EPERM || errno == ENOSYS)) { /* forbidden here: copy and take the chance */
            memmove((void *)dst, (void *)src, nbytes);
            return true;
        }
        if (moved <= 0)
            return false;
        dst += (size_t)moved;
        src += (size_t)moved;
        nbytes -= (size_t)moved;
    }
    return true;
}

/* The pinned pages of host memory, if they are held; what a queued op uses is not given up meanwhile. */
static struct pins *pinned(uintptr_t address)
{
    struct region *region = find_region(&regions, address);
    return region ? region->pins : NULL;
}

static bool copy_bytes(const struct op *op, struct pins *from, struct pins *to)
{
    if (from)
        return read_pinned(from, op->src, op->dst, op->nbytes);
    return to ? write_pinned(to, op->dst, op->src, op->nbytes) : move(op->dst, op->src, op->nbytes);
}

static bool good(const struct op *op)
{
    bool reads = op->kind == OP_COPY || op->kind == OP_SUM;
    bool writes = op->kind != OP_SUM;
    return (!reads || accessible(op->src, op->nbytes, op->src_side, op->src_device, false, op->pageable)) &&
           (!writes || accessible(op->dst, op->nbytes, op->dst_side, op->dst_device, true, op->pageable));
}

/* ---- carrying out */

static uint64_t load(const struct op *op)
{
    return op->width == 8 ? __atomic_load_n((uint64_t *)op->dst, __ATOMIC_ACQUIRE)
                          : __atomic_load_n((uint32_t *)op->dst, __ATOMIC_ACQUIRE);
}

static void store(const struct op *op)
{
    if (op->width == 8)
        __atomic_store_n((uint64_t *)op->dst, op->value, __ATOMIC_RELEASE);
    else
        __atomic_store_n((uint32_t *)op->dst, (uint32_t)op->value, __ATOMIC_RELEASE);
}

static bool holds(const struct op *op)
{
    uint64_t now = load(op), difference = now - op->value;
    switch (op->flags) {
    case 0: return op->width == 8 ? (int64_t)difference >= 0 : (int32_t)difference >= 0;
    case 1: return now == op->value;
    case 2: return (now & op->value) != 0;
    default: return op->width == 8 ? ~(now | op->value) != 0 : (uint32_t) ~(now | op->value) != 0;
    }
}

static void fill(const struct op *op)
{
    if (op->width == 1) {
        memset((void *)op->dst, (int)op->value, op->nbytes);
        return;
    }
    uint32_t word = (uint32_t)op->value;
    for (size_t i = 0; i < op->nbytes; i += 4)
        memcpy((char *)op->dst + i, &word, 4);
}

static void sum(const struct op *op)
{
    uint64_t total = 0;
    for (size_t i = 0; i < op->nbytes; i++)
        total += ((const unsigned char *)op->src)[i];
    *(uint64_t *)op->argument = total;
}

/* By polling: nobody says when memory changes. */
static void wait_for_value(const struct op *op, CUcontext context)
{
    while (!holds(op) && !context->error) {
        pthread_mutex_unlock(&lock);
        usleep(200);
        pthread_mutex_lock(&lock);
    }
}

CUresult perform(struct op *op, CUcontext context)
{
    static const char *const names[] = {"copy", "set", "record", "wait", "call", "sum", "write value", "wait value"};
    note("> %s %#zx %#zx +%zu", names[op->kind], (size_t)op->dst, (size_t)op->src, op->nbytes);
    if (op->kind == OP_WAIT_VALUE) {
        wait_for_value(op, context);
        return SUCCESS;
    }
    if (op->kind != OP_CALL && !good(op))
        return violation(ILLEGAL_ADDRESS, "%s %#zx %#zx +%zu: memory gone or without access when carried out",
                         names[op->kind], (size_t)op->dst, (size_t)op->src, op->nbytes);
    bool sticky = false, there = true;
    CUresult ordered = op->kind == OP_COPY ? injected("copy", &sticky) : SUCCESS;
    if (ordered) {
        if (!sticky)
            context->late = ordered;
        return sticky ? ordered : SUCCESS;
    }
    struct pins *from = pinned(op->src), *to = pinned(op->dst);
    pthread_mutex_unlock(&lock);
    switch (op->kind) {
    case OP_COPY: there = copy_bytes(op, from, to); break;
    case OP_SET: fill(op); break;
    case OP_SUM: sum(op); break;
    case OP_WRITE_VALUE: store(op); break;
    case OP_CALL:
        in_host_function = true;
        op->function(op->argument);
        in_host_function = false;
        break;
    default: break;
    }
    pthread_mutex_lock(&lock);
    if (!there)
        return violation(ILLEGAL_ADDRESS, "copy %#zx %#zx +%zu: unmapped under the driver", (size_t)op->dst,
                         (size_t)op->src, op->nbytes);
    return SUCCESS;
}

/* ---- copies */

static CUresult copy(CUdeviceptr dst, enum side dst_side, CUdeviceptr src, enum side src_side, size_t nbytes,
                     CUstream stream, bool pageable)
{
    int device = stream_device(stream);
    if (device < 0)
        return INVALID_HANDLE;
    struct op op = {.kind = OP_COPY, .dst = dst, .dst_side = dst_side, .dst_device = device, .src = src,
                    .src_side = src_side, .src_device = device, .nbytes = nbytes, .pageable = pageable};
    if (!nbytes)
        return SUCCESS;
    if (dst < src + nbytes && src < dst + nbytes)
        return violation(INVALID_VALUE, "copy %#llx from %#llx +%zu overlaps itself", dst, src, nbytes);
    if (!good(&op))
        return violation(INVALID_VALUE, "copy %#llx from %#llx +%zu: not memory that was registered, or is mapped "
                         "with this access", dst, src, nbytes);
    return issue(stream, &op);
}

/* On the default stream, and to its end. */
static CUresult copy_now(CUdeviceptr dst, enum side dst_side, CUdeviceptr src, enum side src_side, size_t nbytes)
{
    CUresult result = copy(dst, dst_side, src, src_side, nbytes, NULL, true);
    return result ? result : synchronize_stream(NULL);
}

#define ASYNC_TEXT "(%#llx, %#llx, %zu, %p)"
#define SYNC_TEXT "(%#llx, %#llx, %zu)"

API cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t nbytes, CUstream stream)
{
    BEGIN(CURRENT, ASYNC_TEXT, dst, (CUdeviceptr)(uintptr_t)src, nbytes, stream);
    END(copy(dst, DEVICE_SIDE, (uintptr_t)src, HOST_SIDE, nbytes, stream, false));
}

API cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t nbytes, CUstream stream)
{
    BEGIN(CURRENT, ASYNC_TEXT, (CUdeviceptr)(uintptr_t)dst, src, nbytes, stream);
    END(copy((uintptr_t)dst, HOST_SIDE, src, DEVICE_SIDE, nbytes, stream, false));
}

API cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t nbytes, CUstream stream)
{
    BEGIN(CURRENT, ASYNC_TEXT, dst, src, nbytes, stream);
    END(copy(dst, DEVICE_SIDE, src, DEVICE_SIDE, nbytes, stream, false));
}

API cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t nbytes, CUstream stream)
{
    BEGIN(CURRENT, ASYNC_TEXT, dst, src, nbytes, stream);
    END(copy(dst, EITHER_SIDE, src, EITHER_SIDE, nbytes, stream, false));
}

API cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t nbytes)
{
    BEGIN(CURRENT, SYNC_TEXT, dst, (CUdeviceptr)(uintptr_t)src, nbytes);
    END(copy_now(dst, DEVICE_SIDE, (uintptr_t)src, HOST_SIDE, nbytes));
}

API cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t nbytes)
{
    BEGIN(CURRENT, SYNC_TEXT, (CUdeviceptr)(uintptr_t)dst, src, nbytes);
    END(copy_now((uintptr_t)dst, HOST_SIDE, src, DEVICE_SIDE, nbytes));
}

/* Between devices' memory "synchronous" promises the host nothing: it is only issued. */
API cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t nbytes)
{
    BEGIN(CURRENT, SYNC_TEXT, dst, src, nbytes);
    END(copy(dst, DEVICE_SIDE, src, DEVICE_SIDE, nbytes, NULL, false));
}

API cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t nbytes)
{
    BEGIN(CURRENT, SYNC_TEXT, dst, src, nbytes);
    END(copy_now(dst, EITHER_SIDE, src, EITHER_SIDE, nbytes));
}

static CUresult copy_peer(CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, size_t nbytes,
                          CUstream stream)
{
    if (!is_context(to) || !is_context(from))
        return INVALID_CONTEXT;
    struct op op = {.kind = OP_COPY, .dst = dst, .dst_side = DEVICE_SIDE, .dst_device = to->device, .src = src,
                    .src_side = DEVICE_SIDE, .src_device = from->device, .nbytes = nbytes};
    if (!nbytes)
        return SUCCESS;
    if (dst < src + nbytes && src < dst + nbytes)
        return violation(INVALID_VALUE, "peer copy %#llx from %#llx +%zu overlaps itself", dst, src, nbytes);
    if (!good(&op))
        return violation(INVALID_VALUE, "peer copy %#llx from %#llx +%zu: not memory mapped with this access", dst,
                         src, nbytes);
    struct region *target = find_region(&regions, dst), *origin = find_region(&regions, src);
    if (target->device != to->device || origin->device != from->device)
        return violation(INVALID_VALUE, "peer copy %#llx from %#llx names the wrong contexts", dst, src);
    return issue(stream, &op);
}

API cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, size_t nbytes, CUstream stream)
{
    BEGIN(CURRENT, "(%#llx, %p, %#llx, %p, %zu, %p)", dst, (void *)to, src, (void *)from, nbytes, stream);
    END(copy_peer(dst, to, src, from, nbytes, stream));
}

API cuMemcpyPeer(CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, size_t nbytes)
{
    BEGIN(CURRENT, "(%#llx, %p, %#llx, %p, %zu)", dst, (void *)to, src, (void *)from, nbytes);
    END(copy_peer(dst, to, src, from, nbytes, NULL));
}

API cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, const void *attributes,
                          size_t *indices, size_t attribute_count, CUstream stream)
{
    BEGIN(CURRENT, "(%zu copies, %zu attributes, %p)", count, attribute_count, stream);
    if (!count || !attributes || !attribute_count || attribute_count > count || indices[0] || (uintptr_t)stream <= 2)
        END(INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        CUresult result = copy(dsts[i], EITHER_SIDE, srcs[i], EITHER_SIDE, sizes[i], stream, false);
        if (result)
            END(result);
    }
    END(SUCCESS);
}

/* ---- fills and values */

static CUresult set(enum op_kind kind, CUdeviceptr dst, uint64_t value, unsigned width, size_t nbytes, CUstream stream,
                    unsigned flags)
{
    int device = stream_device(stream);
    if (device < 0)
        return INVALID_HANDLE;
    struct op op = {.kind = kind, .dst = dst, .dst_side = kind == OP_SET ? DEVICE_SIDE : EITHER_SIDE,
                    .dst_device = device, .value = value, .width = width, .nbytes = nbytes, .flags = flags};
    if (!nbytes)
        return SUCCESS;
    if (dst % width)
        return INVALID_VALUE;
    if (!good(&op))
        return violation(INVALID_VALUE, "set %#llx +%zu: not memory mapped with this access", dst, nbytes);
    return issue(stream, &op);
}

API cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream)
{
    BEGIN(CURRENT, "(%#llx, %u, %zu, %p)", dst, value, count, stream);
    END(set(OP_SET, dst, value, 1, count, stream, 0));
}

API cuMemsetD8_v2(CUdeviceptr dst, unsigned char value, size_t count)
{
    BEGIN(CURRENT, "(%#llx, %u, %zu)", dst, value, count);
    END(set(OP_SET, dst, value, 1, count, NULL, 0));
}

API cuMemsetD32Async(CUdeviceptr dst, unsigned value, size_t count, CUstream stream)
{
    BEGIN(CURRENT, "(%#llx, %u, %zu, %p)", dst, value, count, stream);
    END(set(OP_SET, dst, value, 4, 4 * count, stream, 0));
}

API cuMemsetD32_v2(CUdeviceptr dst, unsigned value, size_t count)
{
    BEGIN(CURRENT, "(%#llx, %u, %zu)", dst, value, count);
    END(set(OP_SET, dst, value, 4, 4 * count, NULL, 0));
}

#define VALUE_TEXT "(%p, %#llx, %llu, %u)"

API cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr dst, uint32_t value, unsigned flags)
{
    BEGIN(CURRENT, VALUE_TEXT, stream, dst, (unsigned long long)value, flags);
    END(flags > 1 ? INVALID_VALUE : set(OP_WRITE_VALUE, dst, value, 4, 4, stream, flags));
}

API cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr dst, uint64_t value, unsigned flags)
{
    BEGIN(CURRENT, VALUE_TEXT, stream, dst, (unsigned long long)value, flags);
    END(flags > 1 ? INVALID_VALUE : set(OP_WRITE_VALUE, dst, value, 8, 8, stream, flags));
}

API cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr dst, uint32_t value, unsigned flags)
{
    BEGIN(CURRENT, VALUE_TEXT, stream, dst, (unsigned long long)value, flags);
    END(flags > 3 ? INVALID_VALUE : set(OP_WAIT_VALUE, dst, value, 4, 4, stream, flags));
}

API cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr dst, uint64_t value, unsigned flags)
{
    BEGIN(CURRENT, VALUE_TEXT, stream, dst, (unsigned long long)value, flags);
    END(flags > 3 ? INVALID_VALUE : set(OP_WAIT_VALUE, dst, value, 8, 8, stream, flags));
}

/* ---- host functions, and what stands for a kernel */

API cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument)
{
    BEGIN(CURRENT, "(%p)", stream);
    if (!function)
        END(INVALID_VALUE);
    END(issue(stream, &(struct op){.kind = OP_CALL, .function = function, .argument = argument}));
}

/* Queue a "kernel": when the stream comes to it, *result becomes the sum of these bytes of device memory. What it saw
   shows which copies the stream had waited for; while it is queued the memory is in use. */
API fake_cuda_sum(CUstream stream, CUdeviceptr src, size_t nbytes, uint64_t *result)
{
    BEGIN(CURRENT, "(%p, %#llx, %zu)", stream, src, nbytes);
    int device = stream_device(stream);
    if (device < 0)
        END(INVALID_HANDLE);
    struct op op = {.kind = OP_SUM, .src = src, .src_side = DEVICE_SIDE, .src_device = device, .dst_device = device,
                    .nbytes = nbytes, .argument = result};
    if (!good(&op))
        END(violation(INVALID_VALUE, "sum of %#llx +%zu: not memory mapped with this access", src, nbytes));
    END(issue(stream, &op));
}
