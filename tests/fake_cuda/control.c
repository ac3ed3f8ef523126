/* Entering and leaving every call: lock, context, injected failures, the log of calls, violations. See fake_cuda.h. */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed;
__thread bool in_host_function;

static bool forked;

static struct {
    char lines[MAX_LOG][LINE];
    uint64_t count;
} history;

static struct {
    char lines[MAX_VIOLATIONS][LINE];
    int count;
} violations;

static struct rule {
    char function[64];
    long nth; /* 0: every call */
    CUresult code;
    bool sticky, armed;
} rules[MAX_RULES];

unsigned long long setting(const char *name, unsigned long long otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static void add_line(char *line, const char *format, va_list arguments)
{
    vsnprintf(line, LINE, format, arguments);
}

void note(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    add_line(history.lines[history.count++ % MAX_LOG], format, arguments);
    va_end(arguments);
}

CUresult violation(CUresult result, const char *format, ...)
{
    char *line = violations.lines[violations.count++ % MAX_VIOLATIONS];
    va_list arguments;
    va_start(arguments, format);
    add_line(line, format, arguments);
    va_end(arguments);
    note("! %.190s", line);
    return result;
}

/* "cuMemAlloc_v2" is asked for, counted and logged as "cuMemAlloc". */
static size_t plain_length(const char *name)
{
    size_t length = strlen(name);
    return length > 3 && name[length - 3] == '_' && name[length - 2] == 'v' ? length - 3 : length;
}

CUresult injected(const char *point, bool *sticky)
{
    size_t length = plain_length(point);
    for (struct rule *rule = rules; rule < rules + MAX_RULES; rule++) {
        if (!rule->armed || strlen(rule->function) != length || strncmp(rule->function, point, length))
            continue;
        if (rule->nth > 1) {
            rule->nth--;
            continue;
        }
        rule->armed = rule->nth == 0;
        *sticky = rule->sticky;
        return rule->code;
    }
    return SUCCESS;
}

static CUresult refused(const char *name, enum level level)
{
    if (forked)
        return NOT_INITIALIZED; /* a driver does not survive fork() */
    if (in_host_function)
        return violation(NOT_PERMITTED, "%s called from a host function", name);
    if (level != ANYTIME && !initialized())
        return NOT_INITIALIZED;
    CUcontext context = current_context();
    if (level == CURRENT && !context)
        return INVALID_CONTEXT;
    if (level == CURRENT && !context->retained)
        return violation(CONTEXT_IS_DESTROYED, "%s in a context that was released", name);
    if (level >= MEMORY && context) {
        CUresult error = take_error(context);
        if (error)
            return error;
    }
    bool sticky = false;
    CUresult code = injected(name, &sticky);
    if (code && sticky && context)
        context->error = code;
    return code;
}

bool begin(struct call *call, const char *name, enum level level, const char *format, ...)
{
    call->name = name;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(call->text, sizeof call->text, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&lock);
    call->result = refused(name, level);
    return call->result != SUCCESS;
}

CUresult end(struct call *call, CUresult result)
{
    note("%.*s%.120s = %d", (int)plain_length(call->name), call->name, call->text, result);
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- for tests, through ctypes */

/* The nth call from now of this function fails with this code and does nothing (0: every call from now; code 0: forget
   all rules for it). Sticky: so does every later call in the context. The point "copy" is not a call but the nth copy
   that a stream carries out: its bytes do not move, and the next call of any kind learns of it. */
CONTROL int fake_cuda_fail(const char *function, int nth, int code, int sticky)
{
    int result = -1;
    pthread_mutex_lock(&lock);
    for (struct rule *rule = rules; rule < rules + MAX_RULES; rule++) {
        if (!code) {
            rule->armed = rule->armed && strcmp(rule->function, function) != 0;
            result = 0;
        } else if (!rule->armed && strlen(function) < sizeof rule->function) {
            strcpy(rule->function, function);
            rule->nth = nth;
            rule->code = code;
            rule->sticky = sticky;
            rule->armed = true;
            result = 0;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static size_t print_ring(char *text, size_t room, const char *lines, uint64_t count, uint64_t bound)
{
    size_t length = 0;
    if (room)
        *text = 0;
    for (uint64_t i = count > bound ? count - bound : 0; i < count; i++) {
        const char *line = lines + i % bound * LINE;
        if (length + strlen(line) + 2 > room)
            break;
        length += (size_t)sprintf(text + length, "%s\n", line);
    }
    return length;
}

/* How many rules of use were broken since the last fake_cuda_forgive(), and the texts of the last 64, one a line. */
CONTROL int fake_cuda_violations(char *text, size_t room)
{
    pthread_mutex_lock(&lock);
    int count = violations.count;
    print_ring(text, room, violations.lines[0], (uint64_t)count, MAX_VIOLATIONS);
    pthread_mutex_unlock(&lock);
    return count;
}

CONTROL void fake_cuda_forgive(void)
{
    pthread_mutex_lock(&lock);
    violations.count = 0;
    pthread_mutex_unlock(&lock);
}

/* The last 8192 lines: "name(arguments) = code" for calls, "> ..." for work carried out, "! ..." for violations.
   The length of what was written; the buffer gets whole lines, oldest first. */
CONTROL size_t fake_cuda_log(char *text, size_t room)
{
    pthread_mutex_lock(&lock);
    size_t length = print_ring(text, room, history.lines[0], history.count, MAX_LOG);
    pthread_mutex_unlock(&lock);
    return length;
}

CONTROL void fake_cuda_log_clear(void)
{
    pthread_mutex_lock(&lock);
    history.count = 0;
    pthread_mutex_unlock(&lock);
}

/* How many there are: streams, events, handles, mappings, reservations, allocations, imports, registrations,
   host_allocations; -1 for another word. */
CONTROL int fake_cuda_live(const char *what)
{
    static const struct { const char *word; enum kind kind; } kinds[] = {
        {"mappings", MAPPED}, {"allocations", ALLOCATED}, {"imports", IMPORTED},
        {"registrations", HOST_REGISTERED}, {"host_allocations", HOST_ALLOCATED},
    };
    int count = -1;
    pthread_mutex_lock(&lock);
    if (!strcmp(what, "streams"))
        count = live_streams();
    else if (!strcmp(what, "events"))
        count = live_events();
    else if (!strcmp(what, "handles"))
        count = live_handles();
    else if (!strcmp(what, "reservations"))
        count = (int)reservations.count;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        if (strcmp(what, kinds[k].word))
            continue;
        count = 0;
        for (size_t i = 0; i < regions.count; i++)
            count += regions.items[i]->kind == kinds[k].kind;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

static void fail_from_environment(void)
{
    const char *rest = getenv("FAKE_CUDA_FAIL");
    while (rest && *rest) {
        char function[64], sticky[8] = "";
        int nth, code;
        if (sscanf(rest, "%63[^:]:%d:%d:%7[a-z1]", function, &nth, &code, sticky) < 3) {
            fprintf(stderr, "FAKE_CUDA_FAIL: not function:nth:code[:sticky]: %s\n", rest);
            abort();
        }
        fake_cuda_fail(function, nth, code, *sticky != 0);
        rest = strchr(rest, ',');
        rest = rest ? rest + 1 : NULL;
    }
}

static void after_fork(void)
{
    pthread_mutex_init(&lock, NULL); /* whoever held it is not in the child */
    forked = forked || initialized(); /* torch loads a driver long before it begins anything */
}

__attribute__((constructor)) static void load(void)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_atfork(NULL, NULL, after_fork);
    fail_from_environment();
}
