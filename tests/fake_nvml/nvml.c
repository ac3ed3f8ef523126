/*
 * A libnvidia-ml.so.1 without a GPU, for tests: the calls of gpuserver/device/cuda/nvml.py, answered from the environment.
 *
 * FAKE_NVML_UUIDS     UUIDs of its GPUs in NVML's order, separated by spaces
 * FAKE_NVML_SWITCHES  the number of each one's PCIe switch; GPUs of switches 0 and 1, 2 and 3, ... share a host bridge
 * FAKE_NVML_NVLINKS   pairs of indices such as "01 23" that have NVLink
 * FAKE_NVML_FAIL      a call that gives NVML_ERROR_NO_PERMISSION (4)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default"))) int
enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NO_PERMISSION = 4, INSUFFICIENT_SIZE = 7 };
enum { INTERNAL = 0, SINGLE = 10, HOSTBRIDGE = 30, SYSTEM = 50 };
enum { P2P_OK = 0, P2P_NOT_SUPPORTED = 5, NVLINK = 2 };

static int sessions;

static const char *setting(const char *name)
{
    const char *text = getenv(name);
    return text ? text : "";
}

#define BEGIN(needs)                                                                                                   \
    if (!strcmp(setting("FAKE_NVML_FAIL"), __func__))                                                                  \
        return NO_PERMISSION;                                                                                          \
    if ((needs) && !sessions)                                                                                          \
        return UNINITIALIZED;

/* The word of a setting, with its end; NULL beyond the last. */
static const char *word(const char *name, unsigned index, size_t *length)
{
    const char *text = setting(name);
    for (;; index--) {
        text += strspn(text, " ");
        *length = strcspn(text, " ");
        if (!*length)
            return NULL;
        if (!index)
            return text;
        text += *length;
    }
}

static unsigned gpus(void)
{
    unsigned count = 0;
    size_t length;
    while (word("FAKE_NVML_UUIDS", count, &length))
        count++;
    return count;
}

/* A handle is the index and one, so that none is NULL. */
static int index_of(const void *device)
{
    size_t number = (size_t)device;
    return number && number <= gpus() ? (int)number - 1 : -1;
}

API nvmlInit_v2(void)
{
    BEGIN(0);
    sessions++;
    return SUCCESS;
}

API nvmlShutdown(void)
{
    BEGIN(1);
    sessions--;
    return SUCCESS;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(int code)
{
    return code == NO_PERMISSION ? "Insufficient Permissions" : "Some Error";
}

API nvmlDeviceGetCount_v2(unsigned *count)
{
    BEGIN(1);
    *count = gpus();
    return SUCCESS;
}

API nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    BEGIN(1);
    if (index >= gpus())
        return INVALID_ARGUMENT;
    *device = (void *)(size_t)(index + 1);
    return SUCCESS;
}

API nvmlDeviceGetUUID(void *device, char *uuid, unsigned nbytes)
{
    BEGIN(1);
    size_t length;
    if (index_of(device) < 0)
        return INVALID_ARGUMENT;
    const char *text = word("FAKE_NVML_UUIDS", (unsigned)index_of(device), &length);
    if (length >= nbytes)
        return INSUFFICIENT_SIZE;
    memcpy(uuid, text, length);
    uuid[length] = 0;
    return SUCCESS;
}

static int switch_of(int index)
{
    size_t length;
    const char *text = word("FAKE_NVML_SWITCHES", (unsigned)index, &length);
    return text ? atoi(text) : 100 + index;
}

API nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, int *level)
{
    BEGIN(1);
    int a = index_of(one), b = index_of(other);
    if (a < 0 || b < 0)
        return INVALID_ARGUMENT;
    int first = switch_of(a), second = switch_of(b);
    *level = a == b ? INTERNAL : first == second ? SINGLE : first / 2 == second / 2 ? HOSTBRIDGE : SYSTEM;
    return SUCCESS;
}

API nvmlDeviceGetP2PStatus(void *one, void *other, int capability, int *status)
{
    BEGIN(1);
    int a = index_of(one), b = index_of(other);
    if (a < 0 || b < 0 || a == b || capability != NVLINK)
        return INVALID_ARGUMENT;
    char pair[8], back[8];
    snprintf(pair, sizeof pair, "%d%d", a % 10, b % 10);
    snprintf(back, sizeof back, "%d%d", b % 10, a % 10);
    const char *links = setting("FAKE_NVML_NVLINKS");
    *status = strstr(links, pair) || strstr(links, back) ? P2P_OK : P2P_NOT_SUPPORTED;
    return SUCCESS;
}
