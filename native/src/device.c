/* device.c: the CUDA side of a reactor: copy streams, pooled events, and what waits for them.
 *
 *   read    at the disk -> arrived: pending on its copy stream -> copies queued, event recorded -> event done: slot back
 *   write   slot lent: pending -> copies queued, event recorded -> event done: at the disk -> slot back
 *
 * The streams are ours and non-blocking, of the highest priority: streams of one priority share hardware queues, where
 * copies could get stuck behind kernels that have nothing to do with them. Nothing is ever called on a caller's stream from here. All calls are made in
 * RELAXED capture mode: in the default mode an event query from this thread would break a graph capture that any other
 * thread of the process has under way. The host never waits for the device: events are queried, oldest first. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { NON_BLOCKING = 1, DISABLE_TIMING = 2, PORTABLE_AND_MAPPED = 1 | 2, CAPTURE_RELAXED = 2 };

void akv_cuda_called(struct akv_reactor *r, int64_t began_ns)
{
    uint64_t took_ns = akv_now_ns() - began_ns;
    AKV_MAX(r, cuda_call_ns_max, took_ns);
    AKV_COUNT(r, cuda_calls, 1);
    if (took_ns > 50000)
        AKV_COUNT(r, cuda_calls_slow, 1);
}

static int pin(struct akv_reactor *r, uint8_t *base, uint64_t nbytes, uint64_t *pinned)
{
    for (uint64_t at = 0; at < nbytes; at += AKV_PIECE) {
        uint64_t piece = nbytes - at < AKV_PIECE ? nbytes - at : AKV_PIECE;
        int code = AKV_CUDA(r, mem_host_register, base + at, piece, PORTABLE_AND_MAPPED);
        if (code)
            return code;
        *pinned = at + piece;
    }
    return 0;
}

/* False: CUDA still knows the memory, which must then not be freed. */
static bool unpin(struct akv_reactor *r, uint8_t *base, uint64_t pinned)
{
    int code = 0;
    for (uint64_t at = 0; at < pinned && code == 0; at += AKV_PIECE)
        code = AKV_CUDA(r, mem_host_unregister, base + at);
    return code == 0;
}

static uint64_t lists_nbytes(const struct akv_reactor *r)
{
    uint64_t entries = AKV_LONG_LISTS * AKV_LIST_MAX + (uint64_t)r->engine->options.queue_depth * AKV_SHORT_LIST;
    return entries * sizeof(akv_kernel_copy);
}

static void give_group(struct akv_device_state *d, struct akv_copy_group *g)
{
    struct akv_copy_group **list = g->capacity > AKV_SHORT_LIST ? &d->free_long : &d->free_short;
    g->next = *list;
    *list = g;
}

static int open_lists(struct akv_reactor *r)
{
    struct akv_device_state *d = &r->device;
    uint64_t device = 0, at = 0;
    int code = pin(r, d->lists, lists_nbytes(r), &d->lists_pinned);
    if (code == 0)
        code = AKV_CUDA(r, mem_host_get_device_pointer, &device, d->lists, 0);
    for (uint32_t i = 0; i < AKV_LONG_LISTS + r->engine->options.queue_depth; i++) {
        struct akv_copy_group *g = &d->groups[i];
        g->capacity = i < AKV_LONG_LISTS ? AKV_LIST_MAX : AKV_SHORT_LIST;
        g->list = (akv_kernel_copy *)(d->lists + at);
        g->list_device = device + at;
        at += g->capacity * sizeof(akv_kernel_copy);
        give_group(d, g);
    }
    return code;
}

static int open_streams(struct akv_reactor *r)
{
    struct akv_device_state *d = &r->device;
    int code = 0;
    for (uint32_t i = 0; i < d->event_count && code == 0; i++)
        code = AKV_CUDA(r, event_create, &d->events[i].handle, DISABLE_TIMING);
    while (d->stream_count < d->api->copy_streams && code == 0) {
        code = AKV_CUDA(r, stream_create, &d->streams[d->stream_count].handle, NON_BLOCKING, d->api->stream_priority);
        d->stream_count += code == 0;
    }
    return code;
}

/* The first launch of a kernel loads its code, which takes milliseconds and a lock: here, not in a request. */
static int warm_up(struct akv_reactor *r)
{
    struct akv_device_state *d = &r->device;
    uint32_t count = 0;
    void *kernels[] = {d->api->gather, d->api->scatter};
    void *parameters[] = {&d->groups[0].list_device, &count};
    void *stream = d->streams[0].handle;
    int code = 0;
    for (int i = 0; i < 2 && code == 0; i++)
        if (kernels[i])
            code = AKV_CUDA(r, launch_kernel, kernels[i], 1, 1, 1, d->api->kernel_threads, 1, 1, 0, stream, parameters, NULL);
    if (code == 0)
        code = AKV_CUDA(r, event_record, d->events[0].handle, stream);
    int64_t until = akv_now_ns() + 10000000000ll;
    while (code == 0 && (code = AKV_CUDA(r, event_query, d->events[0].handle)) == AKV_NOT_READY && akv_now_ns() < until)
        code = 0;
    return code;
}

int akv_device_open(struct akv_reactor *r)
{
    struct akv_device_state *d = &r->device;
    if (!r->engine->options.device)
        return 0;
    d->api = &r->engine->device;
    d->poll_ns = AKV_POLL_NS_MIN;
    d->event_count = r->engine->options.queue_depth + AKV_EVENTS_SPARE;
    d->lists = akv_slab_new(lists_nbytes(r));
    d->groups = calloc(AKV_LONG_LISTS + r->engine->options.queue_depth, sizeof *d->groups);
    d->events = calloc(d->event_count, sizeof *d->events);
    d->batch_targets = calloc(AKV_LIST_MAX, sizeof(uint64_t));
    d->batch_sources = calloc(AKV_LIST_MAX, sizeof(uint64_t));
    d->batch_sizes = calloc(AKV_LIST_MAX, sizeof(size_t));
    if (!d->lists || !d->groups || !d->events || !d->batch_targets || !d->batch_sources || !d->batch_sizes)
        return -ENOMEM;
    int mode = CAPTURE_RELAXED;
    int code = AKV_CUDA(r, ctx_set_current, d->api->context);
    if (code == 0)
        code = AKV_CUDA(r, thread_exchange_capture_mode, &mode);
    if (code == 0)
        code = pin(r, r->slab.base, r->slab.nbytes, &d->slab_pinned);
    if (code == 0)
        code = AKV_CUDA(r, mem_host_get_device_pointer, &d->slab_device, r->slab.base, 0);
    if (code == 0)
        code = open_lists(r);
    if (code == 0)
        code = open_streams(r);
    if (code == 0)
        code = warm_up(r);
    AKV_STORE(r, cuda_calls, 0); /* what a request costs begins here */
    AKV_STORE(r, cuda_calls_slow, 0);
    AKV_STORE(r, cuda_call_ns_max, 0);
    return code ? -(AKV_CUDA_ERROR + code) : 0;
}

/* After a fault the hardware may still write where it was told to: then everything it knows is leaked. */
void akv_device_close(struct akv_reactor *r)
{
    struct akv_device_state *d = &r->device;
    free(d->batch_targets);
    free(d->batch_sources);
    free(d->batch_sizes);
    free(d->groups);
    if (d->error) {
        r->slab.base = NULL;
        return;
    }
    for (uint32_t i = 0; i < d->stream_count; i++)
        AKV_CUDA(r, stream_destroy, d->streams[i].handle);
    for (uint32_t i = 0; d->events && i < d->event_count; i++)
        if (d->events[i].handle)
            AKV_CUDA(r, event_destroy, d->events[i].handle);
    if (unpin(r, d->lists, d->lists_pinned))
        akv_slab_free(d->lists, lists_nbytes(r));
    if (!unpin(r, r->slab.base, d->slab_pinned))
        r->slab.base = NULL;
}

bool akv_device_is_busy(const struct akv_reactor *r)
{
    return r->device.groups_out || r->device.watched || r->device.has_backlog;
}

/* Whether what the stream has to do next waits for a fence. */
static bool is_held_back(struct akv_reactor *r, struct akv_copy_stream *s)
{
    struct akv_copy_group *g = s->oldest;
    if (!g || !g->fence)
        return false;
    if (AKV_CUDA(r, event_query, g->fence) == AKV_NOT_READY)
        return true;
    g->fence = NULL;
    return false;
}

/* A caller keeps its copy stream while anything of it is under way; else it gets one that nobody uses. When there are
 * more callers than streams it shares one that no fence holds back, if there is such a one. */
static struct akv_copy_stream *choose_stream(struct akv_reactor *r, uint64_t key)
{
    struct akv_device_state *d = &r->device;
    struct akv_copy_stream *chosen = NULL;
    for (uint32_t i = 0; i < d->stream_count; i++) {
        struct akv_copy_stream *s = &d->streams[i];
        if (s->users && s->key == key)
            return s;
        if (!s->users && (!chosen || s->key == key))
            chosen = s;
    }
    if (chosen) {
        chosen->key = key;
        return chosen;
    }
    uint32_t first = ((key >> 4) * 0x9e3779b97f4a7c15ull >> 32) % d->stream_count; /* the low bits of pointers say nothing */
    for (uint32_t i = 0; i < d->stream_count; i++) {
        struct akv_copy_stream *s = &d->streams[(first + i) % d->stream_count];
        if (!is_held_back(r, s))
            return s;
    }
    return &d->streams[first];
}

/* A batch with an order gets its copy stream; a batch that is an event is watched from now on. */
void akv_device_take(struct akv_reactor *r, struct akv_batch *b)
{
    struct akv_device_state *d = &r->device;
    b->copy_stream = NULL;
    b->has_passed_fence = false;
    b->unqueued = b->op_count;
    if (b->kind == AKV_EVENT) {
        b->watch_next = d->watched;
        d->watched = b;
        d->poll_ns = AKV_POLL_NS_MIN;
    } else if (b->has_order && d->stream_count) {
        b->copy_stream = choose_stream(r, b->stream_key);
        b->copy_stream->users++;
    }
}

void akv_device_leave(struct akv_batch *b)
{
    if (b->has_order && b->copy_stream)
        b->copy_stream->users--;
}

void akv_device_next_turn(struct akv_reactor *r)
{
    for (uint32_t i = 0; i < r->device.stream_count; i++)
        for (uint32_t lane = 0; lane < AKV_LANES; lane++)
            r->device.streams[i].is_refused[lane] = false;
}

/* A quarter of everything that its flights hold, of which there may be least: slots, I/Os, bytes in the bulk lane. */
static uint32_t share_of(const struct akv_reactor *r, uint32_t lane)
{
    const akv_options *options = &r->engine->options;
    uint32_t most = r->slab.slot_count[lane];
    if (options->queue_depth < most)
        most = options->queue_depth;
    if (lane == AKV_BULK && options->bulk_nbytes / options->max_op_nbytes < most)
        most = options->bulk_nbytes / options->max_op_nbytes;
    return (most + 3) / 4;
}

/* While a fence behind a caller's kernel holds its copies back, its flights keep to their share. */
bool akv_device_may_start(struct akv_reactor *r, struct akv_batch *b, uint32_t lane)
{
    struct akv_copy_stream *s = b->copy_stream;
    if (!b->has_order || !s || r->device.error || s->flights[lane] < share_of(r, lane))
        return true;
    if (!s->is_refused[lane]) /* one question a turn, however many batches wait */
        s->is_refused[lane] = is_held_back(r, s) || (b->fence && !b->has_passed_fence &&
                                                     AKV_CUDA(r, event_query, b->fence) == AKV_NOT_READY);
    return !s->is_refused[lane];
}

void akv_device_add(struct akv_reactor *r, struct akv_flight *f)
{
    struct akv_copy_stream *s = f->batch->copy_stream;
    f->next = NULL;
    if (s->pending_tail)
        s->pending_tail->next = f;
    else
        s->pending_head = f;
    s->pending_tail = f;
}

static struct akv_device_event *take_event(struct akv_device_state *d)
{
    for (uint32_t i = 0; i < d->event_count; i++) {
        struct akv_device_event *event = &d->events[d->event_next++ % d->event_count];
        if (atomic_load_explicit(&event->shares, memory_order_acquire) == 0) {
            atomic_store_explicit(&event->shares, 1, memory_order_relaxed);
            return event;
        }
    }
    return NULL;
}

static void note_queued(struct akv_reactor *r, struct akv_copy_group *g)
{
    for (struct akv_flight *f = g->flights; f; f = f->next) {
        f->is_queued = true;
        akv_batch_op_queued(r, f->batch, g->event);
    }
}

/* One with a list that is long enough, if there still is one. Every group holds a flight at least, so a short one is
 * always there. */
static struct akv_copy_group *take_group(struct akv_device_state *d, const struct akv_copy_stream *s)
{
    uint32_t copies = 0;
    for (struct akv_flight *f = s->pending_head; f && copies <= AKV_SHORT_LIST; f = f->next)
        copies += f->op.copy_count;
    struct akv_copy_group **list = copies > AKV_SHORT_LIST && d->free_long ? &d->free_long : &d->free_short;
    struct akv_copy_group *g = *list;
    *list = g->next;
    return g;
}

static bool flush_stream(struct akv_reactor *r, struct akv_copy_stream *s)
{
    struct akv_device_state *d = &r->device;
    struct akv_device_event *event = take_event(d);
    if (!event)
        return false; /* all lent to batches that nobody has drained yet */
    struct akv_copy_group *g = take_group(d, s);
    g->event = event;
    g->next = NULL;
    int code = akv_copies_queue(r, s, g);
    if (s->newest)
        s->newest->next = g;
    else
        s->oldest = g;
    s->newest = g;
    d->groups_out++;
    d->poll_ns = AKV_POLL_NS_MIN;
    AKV_COUNT(r, copy_groups, 1);
    if (code) {
        akv_device_fail(r, code);
        return false;
    }
    note_queued(r, g);
    return true;
}

void akv_device_flush(struct akv_reactor *r)
{
    struct akv_device_state *d = &r->device;
    d->has_backlog = false;
    for (uint32_t i = 0; i < d->stream_count && !d->error; i++) {
        struct akv_copy_stream *s = &d->streams[i];
        while (s->pending_head && flush_stream(r, s))
            ;
        d->has_backlog |= s->pending_head != NULL;
    }
}

static void end_group(struct akv_reactor *r, struct akv_copy_stream *s)
{
    struct akv_device_state *d = &r->device;
    struct akv_copy_group *g = s->oldest;
    s->oldest = g->next;
    if (!s->oldest)
        s->newest = NULL;
    struct akv_flight *f = g->flights;
    atomic_fetch_sub_explicit(&g->event->shares, 1, memory_order_release);
    g->flights = NULL;
    give_group(d, g);
    d->groups_out--;
    while (f) {
        struct akv_flight *next = f->next;
        akv_flight_copied(r, f);
        f = next;
    }
}

static bool poll_watched(struct akv_reactor *r)
{
    bool has_news = false;
    struct akv_batch **link = &r->device.watched;
    while (*link) {
        struct akv_batch *b = *link;
        int code = AKV_CUDA(r, event_query, b->fence);
        bool is_unwanted = atomic_load(&b->cancel_requested) || atomic_load(&r->stop);
        if (code == AKV_NOT_READY && !is_unwanted) {
            link = &b->watch_next;
            continue;
        }
        *link = b->watch_next;
        b->status = code == AKV_NOT_READY ? -ECANCELED : code ? -(AKV_CUDA_ERROR + code) : 0;
        akv_batch_finish(r, b);
        has_news = true;
    }
    return has_news;
}

/* Looks at the oldest group of every stream and at every watched event. True if something has ended. */
bool akv_device_poll(struct akv_reactor *r)
{
    struct akv_device_state *d = &r->device;
    bool has_news = false;
    for (uint32_t i = 0; i < d->stream_count && !d->error; i++)
        while (d->streams[i].oldest && !d->error) {
            int code = AKV_CUDA(r, event_query, d->streams[i].oldest->event->handle);
            if (code == AKV_NOT_READY)
                break;
            has_news = true;
            if (code)
                akv_device_fail(r, code);
            else
                end_group(r, &d->streams[i]);
        }
    if (d->watched)
        has_news |= poll_watched(r);
    if (has_news)
        d->poll_ns = AKV_POLL_NS_MIN;
    return has_news;
}

static void fail_list(struct akv_reactor *r, struct akv_flight *f, int32_t code, bool keeps_slot)
{
    while (f) {
        struct akv_flight *next = f->next;
        akv_flight_fail(r, f, code, keeps_slot);
        f = next;
    }
}

/* Ends the device path. Flights whose copies may have been queued answer with the error but keep their slots, events
 * and lists: the hardware may still be reading or writing them. */
void akv_device_fail(struct akv_reactor *r, int code)
{
    struct akv_device_state *d = &r->device;
    if (d->error)
        return;
    d->error = code;
    AKV_STORE(r, device_error, code);
    int32_t answer = -(AKV_CUDA_ERROR + code);
    for (uint32_t i = 0; i < d->stream_count; i++) {
        struct akv_copy_stream *s = &d->streams[i];
        struct akv_flight *pending = s->pending_head;
        s->pending_head = s->pending_tail = NULL;
        for (struct akv_copy_group *g = s->oldest; g; g = g->next) {
            struct akv_flight *queued = g->flights;
            g->flights = NULL;
            fail_list(r, queued, answer, true);
        }
        fail_list(r, pending, answer, false);
        s->oldest = s->newest = NULL;
    }
    d->groups_out = 0;
    d->has_backlog = false;
}
