/* The pages of registered memory, held as a driver holds them: whatever becomes of the mapping, copies go to these.
 * A pipe holds references to pages that were spliced into it; tee() reads them and leaves them there. What a copy writes
 * to a page that the mapping has lost, nobody ever sees. Asked for by FAKE_CUDA_PINS: it takes a pipe for each MiB. */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PAGE = 4096, PIPE = 1 << 20 }; /* what a pipe may hold without privileges: 256 pages */

struct pins {
    uintptr_t start;
    size_t count;
    int (*pipes)[2];
    int copy[2]; /* to which pages are tee'd to be read */
    pthread_mutex_t looking;
};

static bool hold(int ends[2], uintptr_t start, size_t nbytes)
{
    struct iovec pages = {(void *)start, nbytes};
    return !pipe2(ends, O_CLOEXEC | O_NONBLOCK) && fcntl(ends[1], F_SETPIPE_SZ, PIPE) >= PIPE &&
           vmsplice(ends[1], &pages, 1, 0) == (ssize_t)nbytes;
}

struct pins *pin(uintptr_t start, size_t nbytes)
{
    struct pins *pins = calloc(1, sizeof *pins);
    size_t most = (nbytes + PIPE - 1) / PIPE;
    pins->start = start;
    pthread_mutex_init(&pins->looking, NULL);
    pins->pipes = calloc(most, sizeof *pins->pipes);
    bool good = !pipe2(pins->copy, O_CLOEXEC | O_NONBLOCK) && fcntl(pins->copy[1], F_SETPIPE_SZ, PIPE) >= PIPE;
    for (; good && pins->count < most; pins->count++) {
        size_t left = nbytes - pins->count * PIPE;
        good = hold(pins->pipes[pins->count], start + pins->count * PIPE, left < PIPE ? left : PIPE);
    }
    if (good)
        return pins;
    unpin(pins);
    return NULL;
}

void unpin(struct pins *pins)
{
    if (!pins)
        return;
    for (size_t i = 0; i < pins->count; i++) {
        close(pins->pipes[i][0]);
        close(pins->pipes[i][1]);
    }
    close(pins->copy[0]);
    close(pins->copy[1]);
    free(pins->pipes);
    free(pins);
}

/* The pages of one pipe as they are now. */
static bool look(struct pins *pins, size_t index, char *into)
{
    pthread_mutex_lock(&pins->looking);
    ssize_t there = tee(pins->pipes[index][0], pins->copy[1], PIPE, SPLICE_F_NONBLOCK), taken = 0, got = 1;
    for (; taken < there && got > 0; taken += got)
        got = read(pins->copy[0], into + taken, (size_t)(there - taken));
    pthread_mutex_unlock(&pins->looking);
    return there > 0 && got > 0;
}

static size_t least(size_t one, size_t other) { return one < other ? one : other; }

bool read_pinned(struct pins *pins, uintptr_t src, uintptr_t dst, size_t nbytes)
{
    char *held = malloc(PIPE);
    bool good = held != NULL;
    while (good && nbytes) {
        size_t offset = src - pins->start, inside = offset % PIPE, part = least(nbytes, PIPE - inside);
        good = look(pins, offset / PIPE, held);
        memcpy((void *)dst, held + inside, part);
        src += part, dst += part, nbytes -= part;
    }
    free(held);
    return good;
}

/* A page is the mapping's own if it shows what is written there. */
bool write_pinned(struct pins *pins, uintptr_t dst, uintptr_t src, size_t nbytes)
{
    char *held = malloc(PIPE);
    bool good = held != NULL;
    while (good && nbytes) {
        size_t offset = dst - pins->start, inside = offset % PIPE, part = least(nbytes, PAGE - dst % PAGE);
        volatile char *first = (char *)dst;
        char before = *first;
        *first = (char)~before;
        good = look(pins, offset / PIPE, held);
        if (held[inside] == (char)~before)
            memcpy((void *)dst, (const void *)src, part);
        else
            *first = before;
        src += part, dst += part, nbytes -= part;
    }
    free(held);
    return good;
}
