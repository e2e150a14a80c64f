/* engine.c: what callers see: open, submit, drain, cancel, stop, free. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "internal.h"

static bool is_device_sound(const akv_device *d)
{
    return d->context && d->ctx_get_current && d->ctx_set_current && d->stream_is_capturing && d->pointer_get_attribute &&
           d->pointer_get_attributes && d->thread_exchange_capture_mode && d->event_create && d->event_destroy &&
           d->event_record && d->event_query && d->stream_create && d->stream_destroy && d->stream_wait_event &&
           d->memcpy_htod_async && d->memcpy_dtoh_async && d->mem_host_register && d->mem_host_unregister &&
           d->mem_host_get_device_pointer && (d->launch_kernel || (!d->gather && !d->scatter)) && d->kernel_blocks >= 1 &&
           d->kernel_blocks <= 65535 && d->kernel_threads >= 32 && d->kernel_threads <= 1024 && d->copy_streams >= 1 &&
           d->copy_streams <= AKV_STREAMS_MAX;
}

static int check_options(const akv_options *o)
{
    bool is_sound = o && o->source <= AKV_SOURCE_THREADS && o->rings >= 1 && o->rings <= 64 && o->queue_depth >= 1 &&
                    o->queue_depth <= 4096 && o->threads <= 256 && o->max_batches >= 1 && o->max_batches <= 65536 &&
                    o->max_requests >= 1 && o->small_nbytes >= 512 && o->small_nbytes <= o->max_op_nbytes &&
                    o->max_op_nbytes <= (64u << 20) && o->memory_alignment >= 1 && o->offset_alignment >= 1 &&
                    o->bulk_nbytes >= 1 && o->staging_nbytes >= AKV_HUGE && o->staging_nbytes <= (1ull << 40) &&
                    o->fd_count >= 1 && o->fd_count <= 65536 && o->fds && (o->fault_count == 0 || o->faults) &&
                    (o->source == AKV_SOURCE_URING || o->threads >= 1) && o->spin_us <= 10000;
    /* One registration holds the whole slab: no copy may cross from one to the next. */
    if (!is_sound || (o->device && (!is_device_sound(o->device) || o->staging_nbytes > AKV_PIECE)))
        return -EINVAL;
    for (uint32_t i = 0; i < o->fault_count; i++)
        if (o->faults[i].every == 0 || o->faults[i].action > AKV_FAULT_REORDER ||
            (o->faults[i].action == AKV_FAULT_SHORT && o->faults[i].value <= 0) ||
            (o->faults[i].action == AKV_FAULT_ERROR && o->faults[i].value > 0) ||
            (o->faults[i].action >= AKV_FAULT_DELAY && o->faults[i].value < 0))
            return -EINVAL;
    return 0;
}

static int reactor_allocate(struct akv_reactor *r)
{
    const akv_options *o = &r->engine->options;
    r->source = o->source == AKV_SOURCE_URING ? &akv_source_uring : &akv_source_threads;
    r->next_deadline_ns = INT64_MAX;
    r->fault_random = o->fault_seed + r->index;
    r->flights = calloc(o->queue_depth, sizeof *r->flights);
    r->iovs = calloc((size_t)o->queue_depth * AKV_IOV_MAX, sizeof *r->iovs);
    r->fault_used = calloc(o->fault_count + 1, sizeof *r->fault_used);
    r->pool.threads = calloc(o->threads + 1, sizeof *r->pool.threads);
    if (!r->flights || !r->iovs || !r->fault_used || !r->pool.threads)
        return -ENOMEM;
    for (uint32_t i = o->queue_depth; i-- > 0;) {
        r->flights[i].iov = r->iovs + (size_t)i * AKV_IOV_MAX;
        r->flights[i].next = r->free_flights;
        r->free_flights = &r->flights[i];
    }
    return akv_staging_open(&r->slab, o);
}

static int engine_allocate(akv_engine *e, const akv_options *options)
{
    e->options = *options;
    e->pid = getpid();
    e->done_fd = -1;
    e->fds = malloc(options->fd_count * sizeof *e->fds);
    e->faults = calloc(options->fault_count + 1, sizeof *e->faults);
    e->batches = calloc(options->max_batches, sizeof *e->batches);
    e->reactors = calloc(options->rings, sizeof *e->reactors);
    if (!e->fds || !e->faults || !e->batches || !e->reactors)
        return -ENOMEM;
    memcpy(e->fds, options->fds, options->fd_count * sizeof *e->fds);
    if (options->device) {
        e->device = *options->device;
        e->options.device = &e->device;
    }
    if (options->fault_count)
        memcpy(e->faults, options->faults, options->fault_count * sizeof *e->faults);
    for (uint32_t i = options->max_batches; i-- > 0;) {
        e->batches[i].index = i;
        e->batches[i].next = e->free_batches;
        e->free_batches = &e->batches[i];
    }
    for (uint32_t i = 0; i < options->rings; i++) {
        e->reactors[i].engine = e;
        e->reactors[i].index = i;
        e->reactors[i].wake_fd = -1;
        pthread_mutex_init(&e->reactors[i].pool.lock, NULL);
        pthread_cond_init(&e->reactors[i].pool.work, NULL);
        e->reactor_count = i + 1;
        int code = reactor_allocate(&e->reactors[i]);
        if (code)
            return code;
    }
    return 0;
}

static int open_eventfds(akv_engine *e)
{
    e->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (e->done_fd < 0)
        return -errno;
    for (uint32_t i = 0; i < e->reactor_count; i++) {
        e->reactors[i].wake_fd = eventfd(0, EFD_CLOEXEC);
        if (e->reactors[i].wake_fd < 0)
            return -errno;
    }
    return 0;
}

static void engine_release(akv_engine *e)
{
    for (uint32_t i = 0; i < e->reactor_count; i++) {
        struct akv_reactor *r = &e->reactors[i];
        akv_staging_close(&r->slab);
        if (r->wake_fd >= 0)
            close(r->wake_fd);
        pthread_mutex_destroy(&r->pool.lock);
        pthread_cond_destroy(&r->pool.work);
        free(r->device.events); /* not earlier: draining gives them back after the reactor has ended */
        free(r->pool.threads);
        free(r->fault_used);
        free(r->iovs);
        free(r->flights);
    }
    if (e->done_fd >= 0)
        close(e->done_fd);
    free(e->reactors);
    free(e->batches);
    free(e->faults);
    free(e->fds);
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->started);
    free(e);
}

/* Signals stay with the threads of Python: the reactor and its workers inherit a full mask. */
static int start_threads(akv_engine *e, int32_t *where)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = 0;
    *where = AKV_AT_THREAD;
    for (uint32_t i = 0; i < e->reactor_count && code == 0; i++) {
        struct akv_reactor *r = &e->reactors[i];
        code = -pthread_create(&r->thread, NULL, akv_reactor_main, r);
        r->has_thread = code == 0;
        if (r->has_thread) {
            struct sched_param none = {0};
            pthread_setname_np(r->thread, "akv-reactor");
            if (e->options.flags & AKV_SCHED_BATCH)
                pthread_setschedparam(r->thread, SCHED_BATCH, &none);
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_mutex_lock(&e->lock);
    for (uint32_t i = 0; i < e->reactor_count; i++) {
        struct akv_reactor *r = &e->reactors[i];
        while (r->has_thread && !r->is_started)
            pthread_cond_wait(&e->started, &e->lock);
        if (code == 0 && r->start_code) {
            code = r->start_code;
            *where = r->start_where;
        }
    }
    pthread_mutex_unlock(&e->lock);
    return code;
}

static void join_all(akv_engine *e)
{
    for (uint32_t i = 0; i < e->reactor_count; i++)
        if (e->reactors[i].has_thread) {
            pthread_join(e->reactors[i].thread, NULL);
            e->reactors[i].has_thread = false;
        }
}

akv_engine *akv_engine_open(const akv_options *options, int32_t *code, int32_t *where)
{
    *where = AKV_AT_OPTIONS;
    *code = check_options(options);
    if (*code)
        return NULL;
    akv_engine *e = calloc(1, sizeof *e);
    *where = AKV_AT_MEMORY;
    *code = -ENOMEM;
    if (!e)
        return NULL;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->started, NULL);
    *code = engine_allocate(e, options);
    if (*code == 0) {
        *where = AKV_AT_EVENTFD;
        *code = open_eventfds(e);
    }
    if (*code == 0) {
        *code = start_threads(e, where);
        if (*code == 0)
            return e;
        akv_engine_stop(e);
        join_all(e);
    }
    engine_release(e);
    return NULL;
}

static bool is_foreign(const akv_engine *e)
{
    return getpid() != e->pid;
}

int akv_engine_fileno(akv_engine *e)
{
    return is_foreign(e) ? -ECHILD : e->done_fd;
}

/* Takes a record; -EAGAIN says that the engine holds as much as it may, and nothing was taken. */
static int take_batch(akv_engine *e, uint32_t op_count, struct akv_batch **out)
{
    int code = 0;
    pthread_mutex_lock(&e->lock);
    struct akv_batch *b = e->free_batches;
    if (e->is_stopping)
        code = -ESHUTDOWN;
    else if (!b || op_count > e->options.max_requests - e->held_requests)
        code = -EAGAIN;
    else {
        e->free_batches = b->next;
        e->held_requests += op_count;
        b->is_live = true;
        b->generation = (b->generation + 1) & 0x7fffffff;
        b->tail = NULL;
        b->ticket = ((int64_t)b->generation << 32) | b->index;
        atomic_store(&b->cancel_requested, 0);
        *out = b;
    }
    pthread_mutex_unlock(&e->lock);
    return code;
}

/* Gives the record of a batch back; called with the lock. Its tail event may be used again from here on. */
static void give_back(akv_engine *e, struct akv_batch *b)
{
    if (b->tail)
        atomic_fetch_sub_explicit(&b->tail->shares, 1, memory_order_release);
    b->tail = NULL;
    e->held_requests -= b->op_count;
    b->is_live = false;
    b->next = e->free_batches;
    e->free_batches = b;
}

/* The push happens under the lock that stop takes: a reactor that has been told to stop gets nothing more. */
static int64_t push(akv_engine *e, struct akv_batch *b)
{
    struct akv_reactor *r = &e->reactors[b->ring];
    int64_t ticket = b->ticket; /* once pushed, the record may be drained and taken again at any moment */
    pthread_mutex_lock(&e->lock);
    if (e->is_stopping) {
        give_back(e, b);
        ticket = -ESHUTDOWN;
    } else {
        struct akv_batch *head = atomic_load_explicit(&r->intake, memory_order_relaxed);
        do
            b->next = head;
        while (!atomic_compare_exchange_weak(&r->intake, &head, b));
    }
    pthread_mutex_unlock(&e->lock);
    if (ticket >= 0)
        akv_reactor_wake(r);
    return ticket;
}

/* A batch without I/Os: an order about memory, or an event to wait for. */
static void clear_batch(struct akv_batch *b, uint32_t ring, uint32_t kind)
{
    b->ring = ring;
    b->kind = kind;
    b->priority = 0;
    b->deadline_ns = 0;
    b->ops = NULL;
    b->copies = NULL;
    b->results = NULL;
    b->op_count = b->copy_count = 0;
    b->has_order = false;
    b->fence = NULL;
}

int64_t akv_engine_submit(akv_engine *e, uint32_t ring, uint32_t kind, uint32_t priority, int64_t deadline_ns,
                          const akv_op *ops, uint32_t op_count, const akv_copy *copies, uint32_t copy_count,
                          akv_result *results, const akv_order *order)
{
    struct akv_batch *b;
    if (is_foreign(e))
        return -ECHILD;
    if (ring >= e->reactor_count || (kind > AKV_SYNC && akv_has_file(kind)) || kind > AKV_SAVE || priority >= AKV_PRIORITIES || op_count == 0 || !ops || !results ||
        (copy_count && !copies) || deadline_ns < 0)
        return -EINVAL;
    if (order && !e->options.device)
        return -ENODEV;
    if (!order && !akv_has_file(kind))
        return -EINVAL;
    if (op_count > e->options.max_requests)
        return -E2BIG;
    int code = take_batch(e, op_count, &b);
    if (code)
        return code;
    b->ring = ring;
    b->kind = kind;
    b->priority = priority;
    b->deadline_ns = deadline_ns;
    b->ops = ops;
    b->op_count = op_count;
    b->copies = copies;
    b->copy_count = copy_count;
    b->results = results;
    b->has_order = order != NULL;
    b->fence = order ? order->fence : NULL;
    b->stream_key = order ? order->stream_key : 0;
    return push(e, b);
}

int64_t akv_engine_watch(akv_engine *e, uint32_t ring, void *event)
{
    struct akv_batch *b;
    if (is_foreign(e))
        return -ECHILD;
    if (ring >= e->reactor_count || !event || !e->options.device)
        return -EINVAL;
    int code = take_batch(e, 0, &b);
    if (code)
        return code;
    clear_batch(b, ring, AKV_EVENT);
    b->fence = event;
    return push(e, b);
}

int64_t akv_engine_region(akv_engine *e, uint32_t ring, uint32_t kind, uint64_t address, uint64_t nbytes,
                          uint64_t device_address)
{
    struct akv_batch *b;
    if (is_foreign(e))
        return -ECHILD;
    if (ring >= e->reactor_count || (kind != AKV_REGION_ADD && kind != AKV_REGION_REMOVE))
        return -EINVAL;
    int code = take_batch(e, 0, &b);
    if (code)
        return code;
    clear_batch(b, ring, kind);
    b->region_address = address;
    b->region_nbytes = nbytes;
    b->region_device = device_address;
    return push(e, b);
}

/* Notices in the order in which they were pushed. Called with the lock. The stack and `notified` are two variables in one
 * protocol: weaker orders than the sequential one would let each side miss the other's store. */
static void take_done(akv_engine *e)
{
    struct akv_notice *stack = atomic_exchange(&e->done, NULL), *first = NULL;
    struct akv_notice **end = &e->leftovers;
    while (stack) {
        struct akv_notice *next = stack->next;
        stack->next = first;
        first = stack;
        stack = next;
    }
    while (*end)
        end = &(*end)->next;
    *end = first;
}

int akv_engine_drain(akv_engine *e, akv_completion *out, uint32_t max)
{
    uint64_t value;
    uint32_t count = 0;
    if (is_foreign(e))
        return -ECHILD;
    if (!out && max)
        return -EINVAL;
    pthread_mutex_lock(&e->lock);
    if (read(e->done_fd, &value, sizeof value) < 0)
        value = 0; /* nothing written yet, or the writer is about to: then the next drain finds the stack empty */
    atomic_store(&e->notified, 0); /* before the stack is taken: what is pushed later writes the eventfd again */
    take_done(e);
    while (e->leftovers && count < max) {
        struct akv_notice *notice = e->leftovers;
        struct akv_batch *b = notice->batch;
        e->leftovers = notice->next;
        out[count++] = (akv_completion){
            .ticket = b->ticket,
            .event = b->tail ? (uintptr_t)b->tail->handle : 0,
            .status = notice->status,
            .failed = notice->failed,
            .stage = notice->stage,
        };
        if (notice->stage == AKV_DONE)
            give_back(e, b);
    }
    if (e->leftovers)
        akv_engine_notify(e);
    pthread_mutex_unlock(&e->lock);
    return count;
}

int akv_engine_rouse(akv_engine *e, uint32_t ring)
{
    if (is_foreign(e))
        return -ECHILD;
    if (ring >= e->reactor_count)
        return -EINVAL;
    struct akv_reactor *r = &e->reactors[ring];
    if (e->options.spin_us == 0 || !atomic_load(&r->sleeping))
        return 0; /* awake: it sees the order by itself, and this would only disturb it */
    atomic_store(&r->roused, 1);
    akv_reactor_wake(r);
    return 0;
}

/* While it spins, `notified` is set by this side, so that the reactor saves itself the eventfd: the caller looks. */
int akv_engine_poll(akv_engine *e, uint32_t microseconds)
{
    if (is_foreign(e))
        return -ECHILD;
    int64_t until = akv_now_ns() + (int64_t)microseconds * 1000;
    int was_notified = atomic_exchange(&e->notified, 1);
    int has_done = 0;
    do {
        has_done = atomic_load_explicit(&e->done, memory_order_acquire) != NULL;
        akv_pause();
    } while (!has_done && akv_now_ns() < until);
    if (!was_notified)
        atomic_store(&e->notified, 0);
    /* What was pushed between the last look and that store woke nobody: look once more. */
    return has_done || atomic_load(&e->done) != NULL;
}

int akv_engine_cancel(akv_engine *e, int64_t ticket)
{
    uint64_t index = (uint64_t)ticket & 0xffffffff;
    if (is_foreign(e))
        return -ECHILD;
    if (ticket < 0 || index >= e->options.max_batches)
        return -EINVAL;
    struct akv_batch *b = &e->batches[index];
    struct akv_reactor *r = NULL;
    pthread_mutex_lock(&e->lock);
    if (b->is_live && b->ticket == ticket) {
        r = &e->reactors[b->ring];
        atomic_store(&b->cancel_requested, 1);
        atomic_store(&r->cancels, 1);
    }
    pthread_mutex_unlock(&e->lock);
    if (!r)
        return -ENOENT;
    akv_reactor_wake(r);
    return 0;
}

/* Refuses new batches and drops what has not started; the reactors end when the device has answered the rest. */
int akv_engine_stop(akv_engine *e)
{
    if (is_foreign(e))
        return -ECHILD;
    pthread_mutex_lock(&e->lock);
    e->is_stopping = true;
    pthread_mutex_unlock(&e->lock);
    for (uint32_t i = 0; i < e->reactor_count; i++) {
        atomic_store(&e->reactors[i].stop, 1);
        akv_reactor_wake(&e->reactors[i]);
    }
    return 0;
}

int akv_engine_stopped(akv_engine *e)
{
    if (is_foreign(e))
        return -ECHILD;
    return atomic_load(&e->stopped_reactors) == (int)e->reactor_count;
}

int akv_engine_statistics(akv_engine *e, uint32_t ring, akv_statistics *out)
{
    if (is_foreign(e))
        return -ECHILD;
    if (ring >= e->reactor_count || !out)
        return -EINVAL;
    uint64_t *values = (uint64_t *)out;
    for (size_t i = 0; i < AKV_COUNTERS; i++)
        values[i] = atomic_load_explicit(&e->reactors[ring].counters.value[i], memory_order_relaxed);
    return 0;
}

int akv_engine_ring_info(akv_engine *e, uint32_t ring, akv_ring_info *out)
{
    if (is_foreign(e))
        return -ECHILD;
    if (ring >= e->reactor_count || !out)
        return -EINVAL;
    const struct akv_reactor *r = &e->reactors[ring];
    *out = (akv_ring_info){
        .setup_flags = r->setup_flags,
        .files_registered = r->files_registered,
        .sparse_buffers = r->sparse_buffers,
        .register_errno = r->register_errno,
        .staging_nbytes = r->slab.nbytes,
        .registered_nbytes = r->slab.registered,
    };
    return 0;
}

/* Joins the reactors and gives everything back. -EBUSY while one of them still runs: its memory is the kernel's. */
int akv_engine_free(akv_engine *e)
{
    if (is_foreign(e))
        return -ECHILD;
    if (!akv_engine_stopped(e))
        return -EBUSY;
    join_all(e);
    engine_release(e);
    return 0;
}
