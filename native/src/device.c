/* device.c: the CUDA side of a reactor: copy streams, pooled events, and what waits for them.
 *
 *   read    at the disk -> arrived: pending on its copy stream -> copies queued, event recorded -> event done: slot back
 *   write   slot lent: pending -> copies queued, event recorded -> event done: at the disk -> slot back
 *
 * The streams are ours and non-blocking; nothing is ever called on a caller's stream from here. All calls are made in
 * RELAXED capture mode: in the default mode an event query from this thread would break a graph capture that any other
 * thread of the process has under way. The host never waits for the device: events are queried, oldest first. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { NON_BLOCKING = 1, DISABLE_TIMING = 2, PORTABLE_AND_MAPPED = 1 | 2, CAPTURE_RELAXED = 2 };
enum { ALREADY_REGISTERED = 712 };

void akv_cuda_called(struct akv_reactor *r, int64_t began_ns)
{
    uint64_t took_ns = akv_now_ns() - began_ns;
    AKV_MAX(r, cuda_call_ns_max, took_ns);
    AKV_COUNT(r, cuda_calls, 1);
    if (took_ns > 50000)
        AKV_COUNT(r, cuda_calls_slow, 1);
}

static int pin(struct akv_reactor *r, uint8_t *base, uint64_t nbytes)
{
    for (uint64_t at = 0; at < nbytes; at += AKV_PIECE) {
        uint64_t piece = nbytes - at < AKV_PIECE ? nbytes - at : AKV_PIECE;
        int code = AKV_CUDA(r, mem_host_register, base + at, piece, PORTABLE_AND_MAPPED);
        if (code && code != ALREADY_REGISTERED)
            return code;
    }
    return 0;
}

static void unpin(struct akv_reactor *r, uint8_t *base, uint64_t nbytes)
{
    for (uint64_t at = 0; at < nbytes; at += AKV_PIECE)
        AKV_CUDA(r, mem_host_unregister, base + at);
}

static int open_lists(struct akv_reactor *r)
{
    struct akv_device_state *d = &r->device;
    const uint64_t list_nbytes = AKV_LIST_MAX * sizeof(akv_kernel_copy);
    uint64_t device = 0;
    int code = pin(r, d->lists, AKV_GROUPS_MAX * list_nbytes);
    if (code == 0)
        code = AKV_CUDA(r, mem_host_get_device_pointer, &device, d->lists, 0);
    for (uint32_t i = 0; i < AKV_GROUPS_MAX; i++) {
        struct akv_copy_group *g = &d->groups[i];
        g->list = (akv_kernel_copy *)(d->lists + i * list_nbytes);
        g->list_device = device + i * list_nbytes;
        g->next = d->free_groups;
        d->free_groups = g;
    }
    return code;
}

static int open_streams(struct akv_reactor *r)
{
    struct akv_device_state *d = &r->device;
    int code = 0;
    for (uint32_t i = 0; i < AKV_EVENTS_MAX && code == 0; i++)
        code = AKV_CUDA(r, event_create, &d->events[i].handle, DISABLE_TIMING);
    while (d->stream_count < d->api->copy_streams && code == 0) {
        code = AKV_CUDA(r, stream_create, &d->streams[d->stream_count].handle, NON_BLOCKING);
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
    d->lists = akv_slab_new(AKV_GROUPS_MAX * AKV_LIST_MAX * sizeof(akv_kernel_copy));
    d->batch_targets = calloc(AKV_LIST_MAX, sizeof(uint64_t));
    d->batch_sources = calloc(AKV_LIST_MAX, sizeof(uint64_t));
    d->batch_sizes = calloc(AKV_LIST_MAX, sizeof(size_t));
    if (!d->lists || !d->batch_targets || !d->batch_sources || !d->batch_sizes)
        return -ENOMEM;
    int mode = CAPTURE_RELAXED;
    int code = AKV_CUDA(r, ctx_set_current, d->api->context);
    if (code == 0)
        code = AKV_CUDA(r, thread_exchange_capture_mode, &mode);
    if (code == 0)
        code = pin(r, r->slab.base, r->slab.nbytes);
    if (code == 0)
        code = AKV_CUDA(r, mem_host_get_device_pointer, &d->slab_device, r->slab.base, 0);
    if (code == 0)
        code = open_lists(r);
    if (code == 0)
        code = open_streams(r);
    if (code == 0)
        code = warm_up(r);
    d->is_open = true;
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
    if (!d->is_open)
        return;
    if (d->error) {
        r->slab.base = NULL;
        return;
    }
    for (uint32_t i = 0; i < d->stream_count; i++)
        AKV_CUDA(r, stream_destroy, d->streams[i].handle);
    for (uint32_t i = 0; i < AKV_EVENTS_MAX; i++)
        if (d->events[i].handle)
            AKV_CUDA(r, event_destroy, d->events[i].handle);
    unpin(r, d->lists, AKV_GROUPS_MAX * AKV_LIST_MAX * sizeof(akv_kernel_copy));
    unpin(r, r->slab.base, r->slab.nbytes);
    akv_slab_free(d->lists, AKV_GROUPS_MAX * AKV_LIST_MAX * sizeof(akv_kernel_copy));
}

bool akv_device_is_busy(const struct akv_reactor *r)
{
    return r->device.groups_out || r->device.watched;
}

/* A batch with an order gets its copy stream; a batch that is an event is watched from now on. */
void akv_device_take(struct akv_reactor *r, struct akv_batch *b)
{
    struct akv_device_state *d = &r->device;
    b->has_passed_fence = false;
    b->unqueued = b->op_count;
    if (b->kind == AKV_EVENT) {
        b->watch_next = d->watched;
        d->watched = b;
        d->poll_ns = AKV_POLL_NS_MIN;
    } else if (b->has_order && d->stream_count) {
        uint64_t key = (b->stream_key >> 4) * 0x9e3779b97f4a7c15ull; /* handles are pointers: their low bits say nothing */
        b->copy_stream = &d->streams[(key >> 32) % d->stream_count];
    }
}

/* While a fence behind a caller's kernel holds a stream back, its flights may hold a quarter of the slots at most. */
bool akv_device_may_stage(struct akv_reactor *r, struct akv_batch *b, uint32_t lane)
{
    struct akv_copy_stream *s = b->copy_stream;
    if (!b->has_order || r->device.error || s->slots[lane] < (r->slab.slot_count[lane] + 3) / 4)
        return true;
    void *fence = b->has_passed_fence ? s->fence : b->fence ? b->fence : s->fence;
    if (!fence)
        return true;
    if (AKV_CUDA(r, event_query, fence) == AKV_NOT_READY)
        return false;
    if (fence == s->fence)
        s->fence = NULL;
    return true;
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
    for (uint32_t i = 0; i < AKV_EVENTS_MAX; i++) {
        struct akv_device_event *event = &d->events[d->event_next++ % AKV_EVENTS_MAX];
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

static bool flush_stream(struct akv_reactor *r, struct akv_copy_stream *s)
{
    struct akv_device_state *d = &r->device;
    struct akv_copy_group *g = d->free_groups;
    struct akv_device_event *event = g ? take_event(d) : NULL;
    if (!event)
        return false; /* the groups in flight bring one back */
    d->free_groups = g->next;
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
    for (uint32_t i = 0; i < d->stream_count; i++)
        while (d->streams[i].pending_head && !d->error)
            if (!flush_stream(r, &d->streams[i]))
                break;
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
    g->next = d->free_groups;
    d->free_groups = g;
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
        int code = atomic_load(&b->cancel_requested) ? -1 : AKV_CUDA(r, event_query, b->fence);
        if (code == AKV_NOT_READY) {
            link = &b->watch_next;
            continue;
        }
        *link = b->watch_next;
        b->status = code == -1 ? -ECANCELED : code ? -(AKV_CUDA_ERROR + code) : 0;
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
}
