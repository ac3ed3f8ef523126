/* Reserved addresses, physical handles, mappings, and their export by file descriptor. See fake_cuda.h. */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const char MEMORY_NAME[] = "fake-cuda-physical";

/* Alive as long as a handle or a mapping refers to it. A handle is a slot and its generation. */
static struct physical {
    unsigned generation;
    int handles, mappings;
    int fd, device;
    size_t nbytes;
    bool exportable, imported;
} table[MAX_HANDLES];
static unsigned next_slot;

int live_handles(void)
{
    int count = 0;
    for (int i = 0; i < MAX_HANDLES; i++)
        count += table[i].handles;
    return count;
}

static struct physical *physical_of(CUmemGenericAllocationHandle handle, const char *what)
{
    struct physical *physical = &table[handle % MAX_HANDLES];
    if (handle >> 48 == 0x9417 && physical->handles > 0 && physical->generation == (unsigned)(handle >> 16 & 0xffffffff))
        return physical;
    violation(INVALID_VALUE, "%s: no such handle %#llx, or it was released", what, handle);
    return NULL;
}

static CUmemGenericAllocationHandle handle_of(const struct physical *physical)
{
    return 0x9417ull << 48 | (CUmemGenericAllocationHandle)physical->generation << 16 |
           (CUmemGenericAllocationHandle)(physical - table);
}

static struct physical *new_physical(int fd, int device, size_t nbytes)
{
    for (int tries = 0; tries < MAX_HANDLES; tries++) {
        struct physical *physical = &table[next_slot++ % MAX_HANDLES];
        if (physical->handles || physical->mappings)
            continue;
        *physical = (struct physical){.generation = physical->generation + 1, .handles = 1, .fd = fd,
                                      .device = device, .nbytes = nbytes};
        return physical;
    }
    return NULL;
}

static void forget_unused(struct physical *physical)
{
    if (physical->handles || physical->mappings)
        return;
    close(physical->fd);
    if (!physical->imported)
        used_nbytes[physical->device] -= physical->nbytes;
}

static size_t granularity(void)
{
    static size_t nbytes;
    if (!nbytes)
        nbytes = setting("FAKE_CUDA_GRANULARITY", 2 << 20);
    return nbytes;
}

static bool aligned(uintptr_t start, size_t nbytes)
{
    return nbytes && start % granularity() == 0 && nbytes % granularity() == 0;
}

static bool usable(const CUmemAllocationProp *prop)
{
    return prop->type == TYPE_PINNED && prop->location.type == LOCATION_DEVICE && prop->location.id >= 0 &&
           prop->location.id < device_count;
}

API cuMemGetAllocationGranularity(size_t *nbytes, const CUmemAllocationProp *prop, int option)
{
    BEGIN(MEMORY, "(%d)", option);
    if (!usable(prop) || option < 0 || option > 1)
        END(INVALID_VALUE);
    *nbytes = granularity();
    END(SUCCESS);
}

/* ---- addresses */

static void *reserve(uintptr_t hint, size_t nbytes, size_t alignment)
{
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (hint && hint % alignment == 0) {
        void *at = mmap((void *)hint, nbytes, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
        if (at == (void *)hint)
            return at;
        if (at != MAP_FAILED)
            munmap(at, nbytes);
    }
    char *wide = mmap(NULL, nbytes + alignment, PROT_NONE, flags, -1, 0);
    if (wide == MAP_FAILED)
        return NULL;
    size_t before = (alignment - (uintptr_t)wide % alignment) % alignment;
    if (before)
        munmap(wide, before);
    if (alignment - before)
        munmap(wide + before + nbytes, alignment - before);
    return wide + before;
}

API cuMemAddressReserve(CUdeviceptr *pointer, size_t nbytes, size_t alignment, CUdeviceptr hint,
                        unsigned long long flags)
{
    BEGIN(MEMORY, "(%zu, %zu, %#llx)", nbytes, alignment, hint);
    alignment = alignment < granularity() ? granularity() : alignment;
    if (!aligned(0, nbytes) || alignment & (alignment - 1) || flags)
        END(INVALID_VALUE);
    void *address = reserve(hint, nbytes, alignment);
    if (!address)
        END(OUT_OF_MEMORY);
    add_region(&reservations, (uintptr_t)address, nbytes, RESERVED);
    *pointer = (CUdeviceptr)(uintptr_t)address;
    END(SUCCESS);
}

API cuMemAddressFree(CUdeviceptr pointer, size_t nbytes)
{
    BEGIN(MEMORY, "(%#llx, %zu)", pointer, nbytes);
    struct region *range = find_region(&reservations, pointer);
    if (!range || range->start != pointer || range->nbytes != nbytes)
        END(violation(INVALID_VALUE, "freeing addresses %#llx+%zu that were not reserved so", pointer, nbytes));
    if (overlaps_region(&regions, pointer, nbytes))
        END(violation(INVALID_VALUE, "freeing addresses %#llx+%zu with memory mapped", pointer, nbytes));
    munmap((void *)range->start, nbytes);
    remove_region(&reservations, range);
    END(SUCCESS);
}

/* ---- physical memory */

/* A granule's file says by its mode whose memory it is: not by its name, because a process that nobody may look into
   cannot read its own /proc/self/fd. The sticky bit marks ours. */
static mode_t mode_of(int device)
{
    return S_ISVTX | S_IRUSR | S_IWUSR | (mode_t)device; /* MAX_DEVICES is 16: the bits of group and others hold it */
}

/* The device whose memory the descriptor is; -1 if it is not one of ours. */
static int device_of(int fd)
{
    struct stat file;
    if (fstat(fd, &file) || !S_ISREG(file.st_mode))
        return -1;
    for (int device = 0; device < device_count; device++)
        if ((file.st_mode & 07777) == mode_of(device))
            return device;
    return -1;
}

API cuMemCreate(CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *prop,
                unsigned long long flags)
{
    BEGIN(MEMORY, "(%zu, device %d)", nbytes, prop->location.id);
    if (!usable(prop) || !aligned(0, nbytes) || flags || prop->win32HandleMetaData)
        END(INVALID_VALUE);
    if (prop->requestedHandleTypes & ~HANDLE_POSIX_FD)
        END(NOT_SUPPORTED);
    int device = prop->location.id;
    if (nbytes > free_nbytes(device))
        END(OUT_OF_MEMORY);
    int fd = device_memory(MEMORY_NAME, device, nbytes);
    if (fd >= 0)
        fchmod(fd, mode_of(device));
    struct physical *physical = fd < 0 ? NULL : new_physical(fd, device, nbytes);
    if (!physical) {
        if (fd >= 0)
            close(fd);
        END(OUT_OF_MEMORY);
    }
    physical->exportable = prop->requestedHandleTypes & HANDLE_POSIX_FD;
    used_nbytes[device] += nbytes;
    *handle = handle_of(physical);
    END(SUCCESS);
}

API cuMemRelease(CUmemGenericAllocationHandle handle)
{
    BEGIN(MEMORY, "(%#llx)", handle);
    struct physical *physical = physical_of(handle, "release");
    if (!physical)
        END(INVALID_VALUE);
    physical->handles--;
    forget_unused(physical);
    END(SUCCESS);
}

API cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *pointer)
{
    BEGIN(MEMORY, "(%p)", pointer);
    struct region *region = find_region(&regions, (uintptr_t)pointer);
    if (!region || region->kind != MAPPED)
        END(INVALID_VALUE);
    table[region->phys % MAX_HANDLES].handles++;
    *handle = region->phys;
    END(SUCCESS);
}

API cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    BEGIN(MEMORY, "(%#llx)", handle);
    struct physical *physical = physical_of(handle, "properties");
    if (!physical)
        END(INVALID_VALUE);
    *prop = (CUmemAllocationProp){.type = TYPE_PINNED, .requestedHandleTypes = physical->exportable,
                                  .location = {LOCATION_DEVICE, physical->device}};
    END(SUCCESS);
}

API cuMemExportToShareableHandle(void *descriptor, CUmemGenericAllocationHandle handle, int type,
                                 unsigned long long flags)
{
    BEGIN(MEMORY, "(%#llx, %d)", handle, type);
    struct physical *physical = physical_of(handle, "export");
    if (!physical || type != HANDLE_POSIX_FD || flags || !physical->exportable)
        END(INVALID_VALUE);
    int fd = fcntl(physical->fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0)
        END(OUT_OF_MEMORY);
    memcpy(descriptor, &fd, sizeof fd);
    END(SUCCESS);
}

API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *descriptor, int type)
{
    BEGIN(MEMORY, "(%zd, %d)", (ssize_t)(intptr_t)descriptor, type);
    struct stat file;
    int device = device_of((int)(intptr_t)descriptor);
    if (type != HANDLE_POSIX_FD || device < 0)
        END(INVALID_VALUE);
    int fd = fcntl((int)(intptr_t)descriptor, F_DUPFD_CLOEXEC, 3);
    struct physical *physical = fd < 0 || fstat(fd, &file) ? NULL : new_physical(fd, device, (size_t)file.st_size);
    if (!physical) {
        if (fd >= 0)
            close(fd);
        END(OUT_OF_MEMORY);
    }
    physical->imported = physical->exportable = true;
    *handle = handle_of(physical);
    END(SUCCESS);
}

/* ---- mappings */

API cuMemMap(CUdeviceptr pointer, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long flags)
{
    BEGIN(MEMORY, "(%#llx, %zu, %zu, %#llx)", pointer, nbytes, offset, handle);
    struct physical *physical = physical_of(handle, "map");
    struct region *range = find_region(&reservations, pointer);
    if (!physical || !range || !aligned(pointer, nbytes) || nbytes > range->start + range->nbytes - pointer)
        END(INVALID_VALUE);
    if (offset || flags || nbytes != physical->nbytes) /* a handle is mapped whole */
        END(INVALID_VALUE);
    if (overlaps_region(&regions, pointer, nbytes))
        END(violation(INVALID_VALUE, "mapping over %#llx+%zu, which is mapped", pointer, nbytes));
    if (mmap((void *)(uintptr_t)pointer, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->fd, 0) == MAP_FAILED)
        END(OUT_OF_MEMORY);
    struct region *region = add_region(&regions, pointer, nbytes, MAPPED);
    region->device = physical->device;
    region->phys = handle;
    physical->mappings++;
    END(SUCCESS);
}

/* Whether the range consists of whole mappings without holes. */
static bool whole_mappings(uintptr_t start, size_t nbytes)
{
    uintptr_t at = start;
    while (at < start + nbytes) {
        struct region *region = find_region(&regions, at);
        if (!region || region->kind != MAPPED || region->start != at)
            return false;
        at += region->nbytes;
    }
    return nbytes && at == start + nbytes;
}

API cuMemUnmap(CUdeviceptr pointer, size_t nbytes)
{
    BEGIN(MEMORY, "(%#llx, %zu)", pointer, nbytes);
    if (!whole_mappings(pointer, nbytes))
        END(violation(INVALID_VALUE, "unmapping %#llx+%zu, which is not whole mappings", pointer, nbytes));
    if (in_use(pointer, nbytes))
        END(violation(ILLEGAL_STATE, "unmapping %#llx+%zu under queued work", pointer, nbytes));
    if (mmap((void *)(uintptr_t)pointer, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
             -1, 0) == MAP_FAILED)
        END(OUT_OF_MEMORY);
    for (uintptr_t at = pointer; at < pointer + nbytes;) {
        struct region *region = find_region(&regions, at);
        struct physical *physical = &table[region->phys % MAX_HANDLES];
        at += region->nbytes;
        remove_region(&regions, region);
        physical->mappings--;
        forget_unused(physical);
    }
    END(SUCCESS);
}

/* What the process may do is what any device may: tensors on the CPU stand for the devices' work. */
static CUresult protect(struct region *region)
{
    int access = 0;
    for (int device = 0; device < device_count; device++)
        access |= region->access[device];
    int protection = (access & ACCESS_READ ? PROT_READ : 0) | (access == ACCESS_READWRITE ? PROT_WRITE : 0);
    return mprotect((void *)region->start, region->nbytes, protection) ? OUT_OF_MEMORY : SUCCESS;
}

API cuMemSetAccess(CUdeviceptr pointer, size_t nbytes, const CUmemAccessDesc *descriptions, size_t count)
{
    BEGIN(MEMORY, "(%#llx, %zu, %zu: %d on device %d)", pointer, nbytes, count, count ? descriptions->flags : -1,
          count ? descriptions->location.id : -1);
    if (!whole_mappings(pointer, nbytes) || !count)
        END(INVALID_VALUE);
    await_running(pointer, nbytes);
    for (uintptr_t at = pointer; at < pointer + nbytes;) {
        struct region *region = find_region(&regions, at);
        for (size_t i = 0; i < count; i++) {
            const CUmemAccessDesc *wish = &descriptions[i];
            int device = wish->location.id;
            if (wish->location.type != LOCATION_DEVICE || device < 0 || device >= device_count ||
                !peers_reachable(device, region->device))
                END(INVALID_DEVICE);
            if (wish->flags != 0 && wish->flags != ACCESS_READ && wish->flags != ACCESS_READWRITE)
                END(INVALID_VALUE);
            region->access[device] = (uint8_t)wish->flags;
        }
        CUresult result = protect(region);
        if (result)
            END(result);
        at += region->nbytes;
    }
    END(SUCCESS);
}

API cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer)
{
    BEGIN(MEMORY, "(%#llx)", pointer);
    struct region *region = find_region(&regions, pointer);
    if (!region || region->kind != MAPPED || location->type != LOCATION_DEVICE || location->id < 0 ||
        location->id >= device_count)
        END(INVALID_VALUE);
    *flags = region->access[location->id];
    END(SUCCESS);
}
