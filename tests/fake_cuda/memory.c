/* Which addresses are memory, and of whom: allocations, host memory, legacy IPC, attributes. See fake_cuda.h. */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct regions regions, reservations;
size_t used_nbytes[MAX_DEVICES];

size_t free_nbytes(int device)
{
    size_t held = used_nbytes[device] + of_machine(device, "taken") + context_nbytes(device);
    return held < device_nbytes ? device_nbytes - held : 0;
}

size_t page_up(size_t nbytes) { return (nbytes + 4095) & ~(size_t)4095; }

/* ---- the tables */

/* The first that ends after the address. */
static size_t position(const struct regions *table, uintptr_t address)
{
    size_t low = 0, high = table->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table->items[middle]->start + table->items[middle]->nbytes <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct region *find_region(const struct regions *table, uintptr_t address)
{
    size_t i = position(table, address);
    return i < table->count && table->items[i]->start <= address ? table->items[i] : NULL;
}

bool overlaps_region(const struct regions *table, uintptr_t start, size_t nbytes)
{
    size_t i = position(table, start);
    return i < table->count && table->items[i]->start < start + nbytes;
}

struct region *add_region(struct regions *table, uintptr_t start, size_t nbytes, enum kind kind)
{
    if (table->count == table->room) {
        table->room = table->room ? 2 * table->room : 64;
        table->items = realloc(table->items, table->room * sizeof *table->items);
    }
    struct region *region = calloc(1, sizeof *region);
    if (!region || !table->items)
        abort();
    *region = (struct region){.start = start, .nbytes = nbytes, .kind = kind, .fd = -1, .device = -1};
    size_t i = position(table, start);
    memmove(table->items + i + 1, table->items + i, (table->count++ - i) * sizeof *table->items);
    table->items[i] = region;
    return region;
}

void remove_region(struct regions *table, struct region *region)
{
    size_t i = position(table, region->start);
    memmove(table->items + i, table->items + i + 1, (--table->count - i) * sizeof *table->items);
    free(region);
}

bool accessible(uintptr_t start, size_t nbytes, enum side side, int device, bool write, bool pageable)
{
    struct region *region = find_region(&regions, start);
    bool host = region ? region->kind >= HOST_REGISTERED : side != DEVICE_SIDE;
    if ((side == HOST_SIDE && !host) || (side == DEVICE_SIDE && host))
        return false;
    if (!region) /* pageable: nobody knows whether it is there; copying will tell */
        return host && pageable && !overlaps_region(&regions, start, nbytes);
    if (region->kind != MAPPED) /* unlike mappings, neighbouring allocations and registrations do not join */
        return nbytes <= region->start + region->nbytes - start &&
               !(write && region->kind == HOST_REGISTERED && region->flags & REGISTER_READ_ONLY);
    for (uintptr_t at = start; at < start + nbytes; at = region->start + region->nbytes) {
        region = find_region(&regions, at);
        int wanted = write ? ACCESS_READWRITE : ACCESS_READ;
        if (!region || region->kind != MAPPED || (region->access[device] & wanted) != wanted)
            return false;
    }
    return true;
}

/* ---- allocations */

int device_memory(const char *name, int device, size_t nbytes)
{
    char label[64];
    snprintf(label, sizeof label, "%s-%d", name, device);
    int fd = memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && (ftruncate(fd, (off_t)nbytes) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))) {
        close(fd);
        fd = -1;
    }
    return fd;
}

API cuMemGetInfo_v2(size_t *nbytes, size_t *total)
{
    BEGIN(CURRENT, "()");
    *total = device_nbytes;
    *nbytes = free_nbytes(current_context()->device);
    END(SUCCESS);
}

API cuMemAlloc_v2(CUdeviceptr *pointer, size_t nbytes)
{
    BEGIN(CURRENT, "(%zu)", nbytes);
    CUcontext context = current_context();
    if (!nbytes)
        END(INVALID_VALUE);
    if (nbytes > device_nbytes || page_up(nbytes) > free_nbytes(context->device))
        END(OUT_OF_MEMORY);
    int fd = device_memory("fake-cuda-allocation", context->device, page_up(nbytes));
    void *address = fd < 0 ? MAP_FAILED : mmap(NULL, page_up(nbytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED)
        END(OUT_OF_MEMORY);
    struct region *region = add_region(&regions, (uintptr_t)address, nbytes, ALLOCATED);
    region->context = context;
    region->device = context->device;
    region->fd = fd;
    used_nbytes[region->device] += page_up(nbytes);
    *pointer = (CUdeviceptr)(uintptr_t)address;
    END(SUCCESS);
}

static void drop(struct region *region)
{
    if (region->kind != HOST_REGISTERED)
        munmap((void *)region->start, page_up(region->nbytes));
    if (region->kind == ALLOCATED)
        used_nbytes[region->device] -= page_up(region->nbytes);
    if (region->fd >= 0)
        close(region->fd);
    unpin(region->pins);
    remove_region(&regions, region);
}

int drop_context_memory(CUcontext context)
{
    int dropped = 0;
    for (size_t i = regions.count; i-- > 0;)
        if (regions.items[i]->context == context) {
            drop(regions.items[i]);
            dropped++;
        }
    return dropped;
}

/* Give up the region that starts here, if it is of this kind and no queued work needs it. */
static CUresult give_up(uintptr_t start, enum kind kind, CUresult unknown, const char *what)
{
    struct region *region = find_region(&regions, start);
    if (!region || region->start != start || region->kind != kind)
        return violation(unknown, "%s: nothing of this kind starts at %#zx", what, (size_t)start);
    const struct op *op = in_use(start, region->nbytes);
    if (op)
        return violation(ILLEGAL_STATE, "%s of %#zx+%zu under queued work", what, (size_t)start, region->nbytes);
    drop(region);
    return SUCCESS;
}

API cuMemFree_v2(CUdeviceptr pointer)
{
    BEGIN(CURRENT, "(%#llx)", pointer);
    END(pointer ? give_up(pointer, ALLOCATED, INVALID_VALUE, "free") : SUCCESS);
}

/* ---- host memory */

static CUresult host_alloc(void **pointer, size_t nbytes, unsigned flags)
{
    if (!nbytes || flags > 7)
        return INVALID_VALUE;
    void *address = mmap(NULL, page_up(nbytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED)
        return OUT_OF_MEMORY;
    struct region *region = add_region(&regions, (uintptr_t)address, nbytes, HOST_ALLOCATED);
    region->context = current_context();
    region->device = region->context->device;
    region->flags = flags;
    *pointer = address;
    return SUCCESS;
}

API cuMemHostAlloc(void **pointer, size_t nbytes, unsigned flags)
{
    BEGIN(CURRENT, "(%zu, %u)", nbytes, flags);
    END(host_alloc(pointer, nbytes, flags));
}

API cuMemAllocHost_v2(void **pointer, size_t nbytes)
{
    BEGIN(CURRENT, "(%zu)", nbytes);
    END(host_alloc(pointer, nbytes, 0));
}

API cuMemFreeHost(void *pointer)
{
    BEGIN(CURRENT, "(%p)", pointer);
    END(give_up((uintptr_t)pointer, HOST_ALLOCATED, INVALID_VALUE, "host free"));
}

/* Whether every page is mapped, and with these rights ("r", "rw"). */
static bool host_mapped(uintptr_t start, size_t nbytes, bool write)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps)
        return true;
    uintptr_t reached = start;
    unsigned long low, high;
    char rights[5], line[512];
    while (reached < start + nbytes && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx %4s", &low, &high, rights) != 3 || high <= reached)
            continue;
        if (low > reached || rights[0] != 'r' || (write && rights[1] != 'w'))
            break;
        reached = high;
    }
    fclose(maps);
    return reached >= start + nbytes;
}

API cuMemHostRegister_v2(void *pointer, size_t nbytes, unsigned flags)
{
    BEGIN(CURRENT, "(%p, %zu, %u)", pointer, nbytes, flags);
    uintptr_t start = (uintptr_t)pointer;
    if (!pointer || !nbytes || flags & ~(unsigned)REGISTER_KNOWN)
        END(INVALID_VALUE);
    if (overlaps_region(&regions, start, nbytes))
        END(ALREADY_REGISTERED);
    if (!host_mapped(start, nbytes, !(flags & REGISTER_READ_ONLY)))
        END(violation(INVALID_VALUE, "registering %p+%zu, which is not mapped so", pointer, nbytes));
    struct pins *pins = setting("FAKE_CUDA_PINS", 0) ? pin(start, nbytes) : NULL;
    if (!pins && setting("FAKE_CUDA_PINS", 0))
        END(OUT_OF_MEMORY);
    struct region *region = add_region(&regions, start, nbytes, HOST_REGISTERED);
    region->context = current_context();
    region->device = region->context->device;
    region->flags = flags;
    region->pins = pins;
    END(SUCCESS);
}

API cuMemHostUnregister(void *pointer)
{
    BEGIN(CURRENT, "(%p)", pointer);
    END(give_up((uintptr_t)pointer, HOST_REGISTERED, NOT_REGISTERED, "unregistering"));
}

API cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *pointer, unsigned flags)
{
    BEGIN(CURRENT, "(%p, %u)", pointer, flags);
    struct region *region = find_region(&regions, (uintptr_t)pointer);
    if (flags || !region || region->kind < HOST_REGISTERED)
        END(INVALID_VALUE);
    *device = (uintptr_t)pointer;
    END(SUCCESS);
}

API cuMemHostGetFlags(unsigned *flags, void *pointer)
{
    BEGIN(CURRENT, "(%p)", pointer);
    struct region *region = find_region(&regions, (uintptr_t)pointer);
    if (!region || region->kind < HOST_REGISTERED)
        END(INVALID_VALUE);
    *flags = region->flags;
    END(SUCCESS);
}

/* ---- legacy IPC: the importer opens the exporter's descriptor, so nothing is left behind by a killed process */

struct ipc_handle {
    char magic[8];
    int pid, fd, device;
    uint64_t inode, nbytes;
};
_Static_assert(sizeof(struct ipc_handle) <= sizeof(CUipcMemHandle), "fits");

API cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer)
{
    BEGIN(CURRENT, "(%#llx)", pointer);
    struct region *region = find_region(&regions, pointer);
    struct stat file;
    if (!region || region->kind != ALLOCATED || fstat(region->fd, &file))
        END(INVALID_VALUE);
    struct ipc_handle exported = {.magic = "fakeipc", .pid = getpid(), .fd = region->fd, .device = region->device,
                                  .inode = file.st_ino, .nbytes = region->nbytes};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &exported, sizeof exported);
    END(SUCCESS);
}

API cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags)
{
    BEGIN(CURRENT, "(flags %u)", flags);
    struct ipc_handle exported;
    memcpy(&exported, &handle, sizeof exported);
    if (flags != 1 || memcmp(exported.magic, "fakeipc", 8))
        END(INVALID_VALUE);
    if (exported.pid == getpid())
        END(INVALID_CONTEXT);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", exported.pid, exported.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat file;
    if (fd < 0 || fstat(fd, &file) || file.st_ino != exported.inode) {
        if (fd >= 0)
            close(fd);
        END(INVALID_HANDLE);
    }
    for (size_t i = 0; i < regions.count; i++) {
        struct region *old = regions.items[i];
        struct stat opened;
        if (old->kind == IMPORTED && !fstat(old->fd, &opened) && opened.st_ino == file.st_ino) {
            close(fd);
            old->opens++;
            *pointer = old->start;
            END(SUCCESS);
        }
    }
    void *address = mmap(NULL, page_up(exported.nbytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) {
        close(fd);
        END(MAP_FAILED_ERROR);
    }
    struct region *region = add_region(&regions, (uintptr_t)address, exported.nbytes, IMPORTED);
    region->context = current_context();
    region->device = exported.device;
    region->fd = fd;
    region->opens = 1;
    *pointer = (CUdeviceptr)(uintptr_t)address;
    END(SUCCESS);
}

API cuIpcCloseMemHandle(CUdeviceptr pointer)
{
    BEGIN(CURRENT, "(%#llx)", pointer);
    struct region *region = find_region(&regions, pointer);
    if (region && region->kind == IMPORTED && region->start == pointer && region->opens > 1) {
        region->opens--;
        END(SUCCESS);
    }
    END(give_up(pointer, IMPORTED, INVALID_VALUE, "closing an import"));
}

/* ---- what an address is */

API cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes, CUdeviceptr pointer)
{
    BEGIN(CURRENT, "(%#llx)", pointer);
    struct region *region = find_region(&regions, pointer);
    if (!region || region->kind >= HOST_REGISTERED)
        END(NOT_FOUND);
    if (base)
        *base = region->start;
    if (nbytes)
        *nbytes = region->nbytes;
    END(SUCCESS);
}

static CUresult attribute_of(void *data, int attribute, uintptr_t pointer)
{
    struct region *region = find_region(&regions, pointer);
    struct region *range = region ? region : find_region(&reservations, pointer);
    bool host = region && region->kind >= HOST_REGISTERED;
    switch (attribute) {
    case 8: *(int *)data = 0; return range ? SUCCESS : INVALID_VALUE; /* managed */
    case 13: *(int *)data = region != NULL; return range ? SUCCESS : INVALID_VALUE; /* mapped */
    }
    if (!region)
        return INVALID_VALUE;
    switch (attribute) {
    case 1: *(CUcontext *)data = region->context ? region->context : &contexts[region->device]; return SUCCESS;
    case 2: *(int *)data = host ? 1 : 2; return SUCCESS; /* memory type */
    case 3: *(uintptr_t *)data = pointer; return SUCCESS; /* device pointer */
    case 4: *(uintptr_t *)data = pointer; return host ? SUCCESS : INVALID_VALUE; /* host pointer */
    case 9: *(int *)data = region->device; return SUCCESS;
    case 10: *(int *)data = region->kind == ALLOCATED; return SUCCESS; /* legacy IPC */
    case 11: *(uintptr_t *)data = region->start; return SUCCESS;
    case 12: *(size_t *)data = region->nbytes; return SUCCESS;
    case 14: *(uint64_t *)data = region->kind == MAPPED; return SUCCESS; /* handle types: POSIX descriptors */
    case 16: *(int *)data = region->kind == MAPPED ? region->access[region->device] : ACCESS_READWRITE; return SUCCESS;
    default: return NOT_SUPPORTED;
    }
}

API cuPointerGetAttribute(void *data, int attribute, CUdeviceptr pointer)
{
    BEGIN(CURRENT, "(%d, %#llx)", attribute, pointer);
    END(attribute_of(data, attribute, pointer));
}

/* Unknown pointers are no error here: their attributes are zero. */
API cuPointerGetAttributes(unsigned count, int *attributes, void **data, CUdeviceptr pointer)
{
    BEGIN(CURRENT, "(%u, %#llx)", count, pointer);
    for (unsigned i = 0; i < count; i++) {
        bool wide = attributes[i] == 1 || attributes[i] == 3 || attributes[i] == 4 || attributes[i] == 11 ||
                    attributes[i] == 12 || attributes[i] == 14;
        if (attribute_of(data[i], attributes[i], pointer) != SUCCESS)
            memset(data[i], 0, wide ? 8 : 4);
        if (attributes[i] == 9 && !find_region(&regions, pointer))
            *(int *)data[i] = -2; /* no device */
    }
    END(SUCCESS);
}
