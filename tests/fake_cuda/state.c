/* state.c: the one lock and what every call passes through: counting, injected faults, sticky errors, the demands that
 * entries.h states, the log. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "control.h"
#include "fake.h"

struct state fake = {
    .epoch = 1,
    .devices = 1,
    .driver_version = 13000,
    .queries_max = 3,
    .wait_limit_ms = 10000,
    .device_limit = 1ull << 30,
    .fault_after = -1,
};

const char *const fake_entry_names[ENTRY_COUNT] = {
#define X(name, symbol, since, rules) #name,
    FAKE_ENTRIES(X)
#undef X
};

static const int entry_rules[ENTRY_COUNT] = {
#define X(name, symbol, since, rules) rules,
    FAKE_ENTRIES(X)
#undef X
};

enum { FAULTS_MAX = 64, LOG_MAX = 1 << 16 };
struct fault {
    int entry;
    uint64_t nth;
    int result;
    uint64_t times;
};

static pthread_mutex_t lock;
static pthread_cond_t changed;
static _Thread_local struct thread_state thread_state;
static uint64_t calls[ENTRY_COUNT];
static struct fault faults[FAULTS_MAX];
static int fault_count;
static struct fake_call log_calls[LOG_MAX];
static uint64_t log_count;
bool fake_hidden[ENTRY_COUNT];

__attribute__((constructor)) static void open_lock(void)
{
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&lock, &kind);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &clock);
    for (int i = 0; i < DEVICES_MAX; i++)
        fake.contexts[i].device = i;
}

void fake_lock(void)
{
    pthread_mutex_lock(&lock);
}

void fake_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

/* False when `until` has passed. */
bool fake_wait_for_change(const struct timespec *until)
{
    return pthread_cond_timedwait(&changed, &lock, until) != ETIMEDOUT;
}

void fake_changed(void)
{
    pthread_cond_broadcast(&changed);
}

struct thread_state *fake_thread(void)
{
    struct thread_state *t = &thread_state;
    if (t->epoch != fake.epoch) {
        memset(t, 0, sizeof *t);
        t->epoch = fake.epoch;
        t->id = (uint64_t)syscall(SYS_gettid);
    }
    return t;
}

struct fake_context *fake_current(void)
{
    struct thread_state *t = fake_thread();
    return t->depth ? t->stack[t->depth - 1] : NULL;
}

uint64_t fake_mix(uint64_t value)
{
    value += 0x9e3779b97f4a7c15ull;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ value >> 27) * 0x94d049bb133111ebull;
    return value ^ value >> 31;
}

uint64_t fake_draw(uint64_t bound)
{
    return bound < 2 ? 0 : fake_mix(fake.seed ^ fake_mix(++fake.draws)) % bound;
}

void fake_violate(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fake.violations++;
    vsnprintf(fake.violation, sizeof fake.violation, format, arguments);
    va_end(arguments);
}

void *fake_allocate(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size);
    if (!memory)
        abort(); /* the fake has no answer to that, and tests need none */
    return memory;
}

int fake_entry_of(const char *name)
{
    for (int i = 0; name && i < ENTRY_COUNT; i++)
        if (strcmp(name, fake_entry_names[i]) == 0)
            return i;
    return -1;
}

/* After these the driver's context is of no further use: every later call gets the same answer. */
bool fake_is_sticky(int result)
{
    switch (result) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
        return true;
    default:
        return result >= CUDA_ERROR_HARDWARE_STACK_ERROR && result <= CUDA_ERROR_LAUNCH_FAILED;
    }
}

static CUresult injected(int entry)
{
    for (int i = 0; i < fault_count; i++) {
        struct fault *fault = &faults[i];
        if (fault->entry != entry || (fault->nth > 1 && fault->nth--))
            continue;
        int result = fault->result;
        if (fault->times && --fault->times == 0)
            *fault = faults[--fault_count];
        if (fake_is_sticky(result))
            fake.sticky = result;
        return result;
    }
    return CUDA_SUCCESS;
}

CUresult fake_enter(enum fake_entry entry)
{
    fake_lock();
    struct thread_state *t = fake_thread();
    int rules = entry_rules[entry];
    calls[entry]++;
    t->waited = false;
    if (t->running_host_function)
        return CUDA_ERROR_NOT_PERMITTED;
    CUresult code = injected(entry);
    if (code || rules & ALWAYS)
        return code;
    if (fake.sticky)
        return fake.sticky;
    if (!fake.initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (rules & CONTEXT) {
        struct fake_context *context = fake_current();
        if (!context)
            return CUDA_ERROR_INVALID_CONTEXT;
        if (context->retained == 0)
            return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    return rules & UNSAFE ? fake_capture_prohibits() : CUDA_SUCCESS;
}

/* A poller's "not yet" would drown everything else, so it is counted but not logged. */
CUresult fake_leave(enum fake_entry entry, CUstream stream, CUresult code)
{
    struct thread_state *t = fake_thread();
    if (code != CUDA_ERROR_NOT_READY && log_count++ < LOG_MAX) {
        struct fake_call *call = &log_calls[log_count - 1];
        call->name = fake_entry_names[entry];
        call->thread = t->id;
        call->stream = (uint64_t)stream;
        call->result = code;
        call->waited = t->waited || entry_rules[entry] & WAITS;
    }
    fake_unlock();
    return code;
}

void fake_calls_reset(void)
{
    memset(calls, 0, sizeof calls);
    memset(fake_hidden, 0, sizeof fake_hidden);
    fault_count = 0;
    log_count = 0;
}

API int64_t fake_calls(const char *name)
{
    int entry = fake_entry_of(name);
    fake_lock();
    int64_t count = entry < 0 ? -1 : (int64_t)calls[entry];
    fake_unlock();
    return count;
}

API uint64_t fake_log_count(void)
{
    fake_lock();
    uint64_t count = log_count < LOG_MAX ? log_count : LOG_MAX;
    fake_unlock();
    return count;
}

API int fake_log_at(uint64_t index, struct fake_call *out)
{
    fake_lock();
    bool found = index < log_count && index < LOG_MAX;
    if (found)
        *out = log_calls[index];
    fake_unlock();
    return found ? 0 : -1;
}

API void fake_log_clear(void)
{
    fake_lock();
    log_count = 0;
    fake_unlock();
}

API int fake_fail(const char *name, uint64_t nth, int result, uint64_t times)
{
    int entry = fake_entry_of(name);
    fake_lock();
    bool accepted = entry >= 0 && nth > 0 && fault_count < FAULTS_MAX;
    if (accepted)
        faults[fault_count++] = (struct fault){entry, nth, result, times};
    fake_unlock();
    return accepted ? 0 : -1;
}

API void fake_clear_faults(void)
{
    fake_lock();
    fault_count = 0;
    fake.fault_after = -1;
    fake_unlock();
}
