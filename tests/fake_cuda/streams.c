/*
 * Queues of work, the threads that carry it out when they may, events. See fake_cuda.h.
 *
 * A stream is a first-in first-out queue and a thread. The thread takes the first op when it may:
 *
 *   eager  at once
 *   lazy   when somebody has asked for it: `demand(stream, seq)` lets ops up to seq go, and with them, wherever there is
 *          a wait among them, the work of the other stream that it waits for. Nothing else ever runs. A missing wait in
 *          the caller's code therefore leaves its copy undone, every time.
 *   late   when somebody has asked for it, or some milliseconds after it was issued
 *
 * Synchronising asks and waits. Querying never waits: in lazy mode the first FAKE_CUDA_POLLS queries that find work
 * undone say "not ready" and move nothing; further ones ask, so that a loop that polls comes to an end.
 *
 * A point on a stream is (slot, generation, seq): passed when seq ops of that stream are done, or the stream is gone.
 */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { EAGER, LAZY, LATE };

static struct stream {
    unsigned generation;
    bool live, closing, threaded, legacy;
    CUcontext context;
    unsigned flags;
    int priority;
    uint64_t issued, done, allowed; /* counts of ops; op number i is carried out when i <= allowed */
    struct op *head, *tail;
    bool running; /* the head */
    int polls;
} streams[MAX_STREAMS];

static struct event {
    unsigned generation;
    bool live;
    CUcontext context;
    unsigned flags;
    struct mark mark;
    uint64_t time_ns;
    int polls;
} events[MAX_EVENTS];

static int mode = -1;
static int poll_limit;
static uint64_t delay_ns;
static unsigned next_event;

uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void read_mode(void)
{
    if (mode >= 0)
        return;
    const char *name = getenv("FAKE_CUDA_MODE");
    mode = !name || !strcmp(name, "lazy") ? LAZY : !strcmp(name, "late") ? LATE : EAGER;
    delay_ns = setting("FAKE_CUDA_DELAY_MS", 2) * 1000000;
    poll_limit = (int)setting("FAKE_CUDA_POLLS", 1);
}

/* ---- carrying out */

static bool passed(struct mark mark)
{
    const struct stream *stream = &streams[mark.slot];
    return !mark.seq || stream->generation != mark.generation || stream->done >= mark.seq;
}

static void demand(struct mark mark)
{
    struct stream *stream = &streams[mark.slot];
    if (passed(mark) || stream->allowed >= mark.seq)
        return;
    uint64_t before = stream->allowed;
    stream->allowed = mark.seq;
    for (struct op *op = stream->head; op && op->seq <= mark.seq; op = op->next)
        if (op->seq > before && op->kind == OP_WAIT)
            demand(op->mark);
    pthread_cond_broadcast(&changed);
}

static void await(struct mark mark)
{
    demand(mark);
    while (!passed(mark))
        pthread_cond_wait(&changed, &lock);
}

static struct mark last_of(const struct stream *stream)
{
    return (struct mark){(unsigned)(stream - streams), stream->generation, stream->issued};
}

static bool may_run(const struct stream *stream)
{
    const struct op *op = stream->head;
    return op->seq <= stream->allowed || mode == EAGER || (mode == LATE && now_ns() >= op->due_ns);
}

static void pause_for(const struct stream *stream)
{
    if (!stream->head || mode != LATE) {
        pthread_cond_wait(&changed, &lock);
        return;
    }
    uint64_t due = stream->head->due_ns;
    struct timespec until = {(time_t)(due / 1000000000), (long)(due % 1000000000)};
    pthread_cond_timedwait(&changed, &lock, &until);
}

static struct event *event_at(CUevent handle);

static void run_head(struct stream *stream)
{
    struct op *op = stream->head;
    stream->running = true;
    if (op->kind == OP_WAIT) {
        while (!passed(op->mark))
            pthread_cond_wait(&changed, &lock);
    } else if (op->kind == OP_RECORD) {
        struct event *event = event_at(op->event);
        if (event && event->mark.seq == op->seq && event->mark.slot == (unsigned)(stream - streams))
            event->time_ns = now_ns();
    } else if (!stream->context->error) { /* in a broken context nothing moves any more */
        CUresult error = perform(op, stream->context);
        if (error)
            stream->context->error = error;
    }
    stream->running = false;
    stream->head = op->next;
    stream->done = op->seq;
    free(op);
    pthread_cond_broadcast(&changed);
}

static void *work(void *argument)
{
    struct stream *stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        if (!stream->head && stream->closing) {
            stream->closing = stream->live = false;
            stream->generation++;
            pthread_cond_broadcast(&changed);
        }
        if (stream->head && may_run(stream))
            run_head(stream);
        else
            pause_for(stream);
    }
    return NULL;
}

/* ---- handles: what kind, generation, slot */

static void *handle(uintptr_t kind, unsigned generation, size_t slot)
{
    return (void *)(kind << 48 | (uintptr_t)generation << 16 | slot);
}

static struct stream *legacy_stream(CUcontext context);

/* The stream, or NULL. NULL, 1 and 2 are the current context's default stream. */
static struct stream *stream_at(CUstream value)
{
    uintptr_t bits = (uintptr_t)value;
    if (bits <= 2)
        return current_context() ? legacy_stream(current_context()) : NULL;
    struct stream *stream = &streams[bits & 0xffff & (MAX_STREAMS - 1)];
    bool good = stream->live && !stream->closing && !stream->legacy &&
                value == handle(0x57, stream->generation, (size_t)(stream - streams));
    if (!good)
        violation(INVALID_HANDLE, "no such stream %p, or it was destroyed", value);
    return good ? stream : NULL;
}

static struct event *event_at(CUevent value)
{
    struct event *event = &events[(uintptr_t)value & (MAX_EVENTS - 1)];
    return event->live && value == handle(0xE7, event->generation, (size_t)(event - events)) ? event : NULL;
}

static struct event *good_event(CUevent value)
{
    struct event *event = event_at(value);
    if (!event)
        violation(INVALID_HANDLE, "no such event %p, or it was destroyed", value);
    return event;
}

/* ---- streams */

static struct stream *new_stream(CUcontext context, unsigned flags, int priority)
{
    read_mode();
    for (struct stream *stream = streams; stream < streams + MAX_STREAMS; stream++) {
        if (stream->live)
            continue;
        if (!stream->threaded) {
            sigset_t all, before;
            pthread_t thread;
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
            stream->threaded = !pthread_create(&thread, NULL, work, stream) && !pthread_detach(thread);
            pthread_sigmask(SIG_SETMASK, &before, NULL);
            if (!stream->threaded)
                return NULL;
        }
        *stream = (struct stream){.generation = stream->generation + 1, .live = true, .threaded = true,
                                  .context = context, .flags = flags, .priority = priority};
        return stream;
    }
    return NULL;
}

static struct stream *legacy_stream(CUcontext context)
{
    for (struct stream *stream = streams; stream < streams + MAX_STREAMS; stream++)
        if (stream->live && stream->legacy && stream->context == context)
            return stream;
    struct stream *stream = new_stream(context, 0, 0);
    if (stream)
        stream->legacy = true;
    return stream;
}

int live_streams(void)
{
    int count = 0;
    for (int i = 0; i < MAX_STREAMS; i++)
        count += streams[i].live && !streams[i].closing && !streams[i].legacy;
    return count;
}

static void close_stream(struct stream *stream)
{
    demand(last_of(stream)); /* destroyed with work left, a stream finishes it */
    stream->closing = true;
    pthread_cond_broadcast(&changed);
}

static CUresult create_stream(CUstream *result, unsigned flags, int priority)
{
    if (flags & ~(unsigned)STREAM_NON_BLOCKING)
        return INVALID_VALUE;
    struct stream *stream = new_stream(current_context(), flags, priority);
    if (!stream)
        return OUT_OF_MEMORY;
    *result = handle(0x57, stream->generation, (size_t)(stream - streams));
    return SUCCESS;
}

API cuStreamCreate(CUstream *result, unsigned flags)
{
    BEGIN(CURRENT, "(%u)", flags);
    END(create_stream(result, flags, 0));
}

API cuStreamCreateWithPriority(CUstream *result, unsigned flags, int priority)
{
    BEGIN(CURRENT, "(%u, %d)", flags, priority);
    END(create_stream(result, flags, priority));
}

API cuStreamDestroy_v2(CUstream value)
{
    BEGIN(CURRENT, "(%p)", value);
    struct stream *stream = (uintptr_t)value > 2 ? stream_at(value) : NULL;
    if (!stream)
        END(INVALID_HANDLE);
    close_stream(stream);
    END(SUCCESS);
}

int drop_context_streams(CUcontext context)
{
    int dropped = 0;
    for (struct stream *stream = streams; stream < streams + MAX_STREAMS; stream++) {
        if (!stream->live || stream->context != context)
            continue;
        dropped += !stream->legacy && !stream->closing;
        unsigned generation = stream->generation;
        close_stream(stream);
        while (stream->generation == generation)
            pthread_cond_wait(&changed, &lock);
    }
    for (struct event *event = events; event < events + MAX_EVENTS; event++)
        if (event->live && event->context == context)
            event->live = false;
    return dropped;
}

CUresult synchronize_stream(CUstream value)
{
    struct stream *stream = stream_at(value);
    if (!stream)
        return INVALID_HANDLE;
    CUcontext context = stream->context;
    await(last_of(stream));
    return take_error(context);
}

API cuStreamSynchronize(CUstream value)
{
    BEGIN(CURRENT, "(%p)", value);
    END(synchronize_stream(value));
}

static CUresult synchronize_context(CUcontext context)
{
    for (struct stream *stream = streams; stream < streams + MAX_STREAMS; stream++)
        if (stream->live && stream->context == context)
            demand(last_of(stream));
    for (struct stream *stream = streams; stream < streams + MAX_STREAMS; stream++)
        if (stream->live && stream->context == context)
            await(last_of(stream));
    return take_error(context);
}

API cuCtxSynchronize(void)
{
    BEGIN(CURRENT, "()");
    END(synchronize_context(current_context()));
}

API cuCtxSynchronize_v2(CUcontext context)
{
    BEGIN(MEMORY, "(%p)", (void *)context);
    context = context ? context : current_context();
    END(is_context(context) ? synchronize_context(context) : INVALID_CONTEXT);
}

static CUresult query(struct mark mark, int *polls, CUcontext context)
{
    if (passed(mark))
        return take_error(context);
    if (mode == LAZY && (poll_limit < 0 || (*polls)++ < poll_limit))
        return NOT_READY;
    demand(mark);
    return NOT_READY;
}

API cuStreamQuery(CUstream value)
{
    BEGIN(CURRENT, "(%p)", value);
    struct stream *stream = stream_at(value);
    END(stream ? query(last_of(stream), &stream->polls, stream->context) : INVALID_HANDLE);
}

API cuStreamGetFlags(CUstream value, unsigned *flags)
{
    BEGIN(CURRENT, "(%p)", value);
    struct stream *stream = stream_at(value);
    *flags = stream ? stream->flags : 0;
    END(stream ? SUCCESS : INVALID_HANDLE);
}

API cuStreamGetPriority(CUstream value, int *priority)
{
    BEGIN(CURRENT, "(%p)", value);
    struct stream *stream = stream_at(value);
    *priority = stream ? stream->priority : 0;
    END(stream ? SUCCESS : INVALID_HANDLE);
}

API cuStreamGetCtx(CUstream value, CUcontext *context)
{
    BEGIN(CURRENT, "(%p)", value);
    struct stream *stream = stream_at(value);
    *context = stream ? stream->context : NULL;
    END(stream ? SUCCESS : INVALID_HANDLE);
}

API cuStreamGetCtx_v2(CUstream value, CUcontext *context, void **green)
{
    if (green)
        *green = NULL;
    return cuStreamGetCtx(value, context);
}

API cuStreamGetId(CUstream value, unsigned long long *id)
{
    BEGIN(CURRENT, "(%p)", value);
    struct stream *stream = stream_at(value);
    *id = stream ? (uintptr_t)handle(0, stream->generation, (size_t)(stream - streams)) : 0;
    END(stream ? SUCCESS : INVALID_HANDLE);
}

int stream_device(CUstream value)
{
    struct stream *stream = stream_at(value);
    return stream ? stream->context->device : -1;
}

API cuStreamGetDevice(CUstream value, CUdevice *device)
{
    BEGIN(CURRENT, "(%p)", value);
    *device = stream_device(value);
    END(*device < 0 ? INVALID_HANDLE : SUCCESS);
}

API cuStreamIsCapturing(CUstream value, int *status)
{
    BEGIN(CURRENT, "(%p)", value);
    *status = 0;
    END(stream_at(value) ? SUCCESS : INVALID_HANDLE);
}

/* ---- issuing */

static uint64_t append(struct stream *stream, const struct op *op)
{
    struct op *own = malloc(sizeof *own);
    if (!own)
        abort();
    *own = *op;
    own->seq = ++stream->issued;
    own->due_ns = now_ns() + delay_ns;
    own->next = NULL;
    if (stream->head)
        stream->tail->next = own;
    else
        stream->head = own;
    stream->tail = own;
    stream->polls = 0;
    pthread_cond_broadcast(&changed);
    return own->seq;
}

static void append_wait(struct stream *stream, struct mark mark)
{
    if (!passed(mark))
        append(stream, &(struct op){.kind = OP_WAIT, .mark = mark});
}

/* The default stream and the blocking ones wait for one another. */
static void order_with_legacy(struct stream *stream)
{
    if (stream->flags & STREAM_NON_BLOCKING)
        return;
    for (struct stream *other = streams; other < streams + MAX_STREAMS; other++)
        if (other != stream && other->live && other->context == stream->context &&
            !(other->flags & STREAM_NON_BLOCKING) && (other->legacy || stream->legacy))
            append_wait(stream, last_of(other));
}

CUresult issue(CUstream value, const struct op *op)
{
    struct stream *stream = stream_at(value);
    if (!stream)
        return INVALID_HANDLE;
    if (stream->context->error)
        return stream->context->error;
    while (stream->issued - stream->done >= MAX_QUEUED) {
        struct mark first = last_of(stream);
        first.seq = stream->done + 1;
        await(first);
    }
    order_with_legacy(stream);
    append(stream, op);
    return SUCCESS;
}

static bool touches(const struct op *op, uintptr_t start, size_t nbytes)
{
    bool writes = op->kind != OP_RECORD && op->kind != OP_WAIT && op->kind != OP_CALL && op->kind != OP_SUM;
    bool reads = op->kind == OP_COPY || op->kind == OP_SUM;
    return (writes && op->dst < start + nbytes && start < op->dst + op->nbytes) ||
           (reads && op->src < start + nbytes && start < op->src + op->nbytes);
}

const struct op *in_use(uintptr_t start, size_t nbytes)
{
    for (struct stream *stream = streams; stream < streams + MAX_STREAMS; stream++)
        for (const struct op *op = stream->head; op; op = op->next)
            if (touches(op, start, nbytes))
                return op;
    return NULL;
}

void await_running(uintptr_t start, size_t nbytes)
{
    for (struct stream *stream = streams; stream < streams + MAX_STREAMS; stream++)
        while (stream->running && touches(stream->head, start, nbytes))
            pthread_cond_wait(&changed, &lock);
}

/* ---- events */

int live_events(void)
{
    int count = 0;
    for (int i = 0; i < MAX_EVENTS; i++)
        count += events[i].live;
    return count;
}

API cuEventCreate(CUevent *result, unsigned flags)
{
    BEGIN(CURRENT, "(%u)", flags);
    if (flags & ~(unsigned)EVENT_KNOWN)
        END(INVALID_VALUE);
    for (int tries = 0; tries < MAX_EVENTS; tries++) {
        struct event *event = &events[next_event++ % MAX_EVENTS];
        if (event->live)
            continue;
        *event = (struct event){.generation = event->generation + 1, .live = true, .context = current_context(),
                                .flags = flags};
        *result = handle(0xE7, event->generation, (size_t)(event - events));
        END(SUCCESS);
    }
    END(OUT_OF_MEMORY);
}

API cuEventDestroy_v2(CUevent value)
{
    BEGIN(CURRENT, "(%p)", value);
    struct event *event = good_event(value);
    if (!event)
        END(INVALID_HANDLE);
    event->live = false;
    END(SUCCESS);
}

static CUresult record(CUevent value, CUstream where)
{
    struct event *event = good_event(value);
    struct stream *stream = stream_at(where);
    if (!event || !stream)
        return INVALID_HANDLE;
    if (event->context != stream->context)
        return violation(INVALID_HANDLE, "event %p recorded on a stream of another context", value);
    CUresult result = issue(where, &(struct op){.kind = OP_RECORD, .event = value});
    if (result)
        return result;
    event->mark = last_of(stream);
    event->time_ns = 0;
    event->polls = 0;
    return SUCCESS;
}

API cuEventRecord(CUevent value, CUstream where)
{
    BEGIN(CURRENT, "(%p, %p)", value, where);
    END(record(value, where));
}

API cuEventRecordWithFlags(CUevent value, CUstream where, unsigned flags)
{
    BEGIN(CURRENT, "(%p, %p, %u)", value, where, flags);
    END(flags > 1 ? INVALID_VALUE : record(value, where));
}

API cuStreamWaitEvent(CUstream where, CUevent value, unsigned flags)
{
    BEGIN(CURRENT, "(%p, %p, %u)", where, value, flags);
    struct event *event = good_event(value);
    if (!event || !stream_at(where))
        END(INVALID_HANDLE);
    if (flags > 1)
        END(INVALID_VALUE);
    END(passed(event->mark) ? SUCCESS : issue(where, &(struct op){.kind = OP_WAIT, .mark = event->mark}));
}

API cuEventQuery(CUevent value)
{
    BEGIN(CURRENT, "(%p)", value);
    struct event *event = good_event(value);
    END(event ? query(event->mark, &event->polls, event->context) : INVALID_HANDLE);
}

API cuEventSynchronize(CUevent value)
{
    BEGIN(CURRENT, "(%p)", value);
    struct event *event = good_event(value);
    if (!event)
        END(INVALID_HANDLE);
    CUcontext context = event->context;
    await(event->mark);
    END(take_error(context));
}

API cuEventElapsedTime_v2(float *milliseconds, CUevent from, CUevent to)
{
    BEGIN(CURRENT, "(%p, %p)", from, to);
    struct event *first = good_event(from), *second = good_event(to);
    if (!first || !second || (first->flags | second->flags) & EVENT_DISABLE_TIMING || !first->mark.seq ||
        !second->mark.seq)
        END(INVALID_HANDLE);
    if (!passed(first->mark) || !passed(second->mark))
        END(NOT_READY);
    *milliseconds = (float)((double)(int64_t)(second->time_ns - first->time_ns) / 1e6);
    END(SUCCESS);
}

/* ---- for tests, through ctypes */

/* 0: eager, 1: lazy, 2: late. */
CONTROL void fake_cuda_mode(int wanted)
{
    pthread_mutex_lock(&lock);
    read_mode();
    mode = wanted;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* How long after being issued work begins in late mode, if nobody asks. */
CONTROL void fake_cuda_delay(unsigned milliseconds)
{
    pthread_mutex_lock(&lock);
    read_mode();
    delay_ns = milliseconds * 1000000ull;
    pthread_mutex_unlock(&lock);
}

/* How many queries in lazy mode find undone work undone before they ask for it; -1: all. */
CONTROL void fake_cuda_polls(int count)
{
    pthread_mutex_lock(&lock);
    read_mode();
    poll_limit = count;
    pthread_mutex_unlock(&lock);
}

/* Ops issued to a stream and not yet done; -1: no such stream, which counts as its use. */
CONTROL int fake_cuda_pending(CUstream value)
{
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_at(value);
    int count = stream ? (int)(stream->issued - stream->done) : -1;
    pthread_mutex_unlock(&lock);
    return count;
}

/* Let the next ops of a stream run, and what they wait for, and wait for them: how many ran, or -1. */
CONTROL int fake_cuda_step(CUstream value, int count)
{
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_at(value);
    int ran = -1;
    if (stream && count >= 0) {
        uint64_t before = stream->done;
        struct mark mark = last_of(stream);
        if (mark.seq - before > (uint64_t)count)
            mark.seq = before + (uint64_t)count;
        ran = (int)(mark.seq - before);
        await(mark);
    }
    pthread_mutex_unlock(&lock);
    return ran;
}
