/* copies.c: one group of copies between staging slots and device memory, queued on a copy stream.
 *
 * How a run of bytes goes is decided by its size, as measured on an H200: a single asynchronous copy costs 1.5 to 2.6 us
 * whatever its size, so 4 KiB ones reach 1.6 GB/s; a batch call brings that to 6; a kernel that reads pinned memory
 * reaches 50. From about 32 KiB on the copy engine is as fast and leaves the multiprocessors alone. Neighbours that
 * touch on both sides are merged first. */
#include <errno.h>

#include "internal.h"

struct run {
    uint64_t device;
    uint8_t *host;
    uint64_t nbytes;
    uint64_t device_shift; /* of the host side */
};

static int copy_single(struct akv_reactor *r, struct akv_copy_stream *s, const struct run *run, bool is_read)
{
    AKV_COUNT(r, single_copies, 1);
    if (is_read)
        return AKV_CUDA(r, memcpy_htod_async, run->device, run->host, run->nbytes, s->handle);
    return AKV_CUDA(r, memcpy_dtoh_async, run->host, run->device, run->nbytes, s->handle);
}

static void add_kernel_copy(struct akv_reactor *r, struct akv_copy_group *g, const struct run *run, bool is_read)
{
    struct akv_device_state *d = &r->device;
    uint64_t host = (uintptr_t)run->host + run->device_shift;
    g->list[d->kernel_count++] = (akv_kernel_copy){
        .target = is_read ? run->device : host,
        .source = is_read ? host : run->device,
        .nbytes = run->nbytes,
    };
    AKV_COUNT(r, kernel_copies, 1);
}

static void add_batch_copy(struct akv_reactor *r, const struct run *run, bool is_read)
{
    struct akv_device_state *d = &r->device;
    uint64_t host = (uintptr_t)run->host;
    d->batch_targets[d->batch_count] = is_read ? run->device : host;
    d->batch_sources[d->batch_count] = is_read ? host : run->device;
    d->batch_sizes[d->batch_count++] = run->nbytes;
    AKV_COUNT(r, batch_copies, 1);
}

static int add_run(struct akv_reactor *r, struct akv_copy_stream *s, struct akv_copy_group *g, const struct run *run,
                   bool is_read)
{
    struct akv_device_state *d = &r->device;
    const akv_device *api = d->api;
    if (run->nbytes == 0)
        return 0;
    if (is_read)
        AKV_COUNT(r, bytes_to_device, run->nbytes);
    else
        AKV_COUNT(r, bytes_from_device, run->nbytes);
    bool has_kernel = is_read ? api->gather != NULL : api->scatter != NULL;
    if (has_kernel && run->nbytes <= api->kernel_nbytes_max && d->kernel_count < g->capacity)
        add_kernel_copy(r, g, run, is_read);
    else if (api->memcpy_batch_async && run->nbytes <= api->batch_nbytes_max && d->batch_count < AKV_LIST_MAX)
        add_batch_copy(r, run, is_read);
    else
        return copy_single(r, s, run, is_read);
    return 0;
}

/* Memory is registered with CUDA in pieces, and a copy must not reach from one into the next. */
static int add_pieces(struct akv_reactor *r, struct akv_copy_stream *s, struct akv_copy_group *g, struct run run,
                      uint64_t base, bool is_read)
{
    int code = 0;
    while (run.nbytes && code == 0) {
        uint64_t left = AKV_PIECE - ((uintptr_t)run.host - base) % AKV_PIECE;
        struct run piece = run;
        if (piece.nbytes > left)
            piece.nbytes = left;
        code = add_run(r, s, g, &piece, is_read);
        run.device += piece.nbytes;
        run.host += piece.nbytes;
        run.nbytes -= piece.nbytes;
    }
    return code;
}

static int add_flight(struct akv_reactor *r, struct akv_copy_stream *s, struct akv_copy_group *g, struct akv_flight *f)
{
    bool is_read = akv_is_load(f->batch->kind);
    const akv_copy *copies = f->batch->copies + f->op.copy_first;
    uint64_t unit = akv_unit(&f->op);
    uint64_t base = f->region ? f->region->address : (uintptr_t)r->slab.base;
    struct run run = {.device_shift = f->device_shift};
    for (uint32_t i = 0; i < f->op.copy_count; i++) {
        akv_copy copy = copies[i];
        uint64_t at = copy.op_offset * unit;
        if (at + copy.nbytes > f->op.nbytes * unit)
            continue; /* changed since it was checked: never past the slot */
        uint8_t *host = f->base + at;
        if (run.nbytes && run.device + run.nbytes == copy.address && run.host + run.nbytes == host) {
            run.nbytes += copy.nbytes;
            continue;
        }
        int code = add_pieces(r, s, g, run, base, is_read);
        if (code)
            return code;
        run = (struct run){copy.address, host, copy.nbytes, f->device_shift};
    }
    return add_pieces(r, s, g, run, base, is_read);
}

static int launch(struct akv_reactor *r, struct akv_copy_stream *s, struct akv_copy_group *g, void *kernel)
{
    const akv_device *api = r->device.api;
    uint32_t count = r->device.kernel_count;
    void *parameters[] = {&g->list_device, &count};
    uint32_t blocks = count < api->kernel_blocks ? count : api->kernel_blocks;
    AKV_COUNT(r, kernel_launches, 1);
    return AKV_CUDA(r, launch_kernel, kernel, blocks, 1, 1, api->kernel_threads, 1, 1, 0, s->handle, parameters, NULL);
}

static int copy_batch(struct akv_reactor *r, struct akv_copy_stream *s, bool is_read)
{
    struct akv_device_state *d = &r->device;
    if (d->batch_count == 1) {
        struct run run = {
            .device = is_read ? d->batch_targets[0] : d->batch_sources[0],
            .host = (uint8_t *)(uintptr_t)(is_read ? d->batch_sources[0] : d->batch_targets[0]),
            .nbytes = d->batch_sizes[0],
        };
        return copy_single(r, s, &run, is_read);
    }
    akv_copy_attributes attributes = {.source_access_order = 1}; /* CU_MEMCPY_SRC_ACCESS_ORDER_STREAM */
    size_t first = 0;
    return AKV_CUDA(r, memcpy_batch_async, d->batch_targets, d->batch_sources, d->batch_sizes, d->batch_count,
                    &attributes, &first, 1, s->handle);
}

/* A fence was recorded in the caller's submitting call; whether it holds anything back is asked first, because a wait
 * costs the stream and a query does not. */
static int ask_fence(struct akv_reactor *r, struct akv_batch *b)
{
    if (b->has_passed_fence || !b->fence)
        return 0;
    int code = AKV_CUDA(r, event_query, b->fence);
    b->has_passed_fence = code == 0;
    return code;
}

static int wait_for_fence(struct akv_reactor *r, struct akv_copy_stream *s, struct akv_copy_group *g, struct akv_batch *b)
{
    b->has_passed_fence = true;
    g->fence = b->fence;
    return AKV_CUDA(r, stream_wait_event, s->handle, b->fence, 0);
}

static void move_to_group(struct akv_copy_stream *s, struct akv_copy_group *g)
{
    struct akv_flight *f = s->pending_head;
    s->pending_head = f->next;
    if (!s->pending_head)
        s->pending_tail = NULL;
    f->next = g->flights;
    g->flights = f;
}

/* Queues the copies of pending flights of one direction, as many as fit in the group, and the event behind them. A group
 * waits for one fence at most, and ends before the next: what was collected so far must not wait for that one. On an
 * error the group holds every flight whose copies may have been queued. */
int akv_copies_queue(struct akv_reactor *r, struct akv_copy_stream *s, struct akv_copy_group *g)
{
    struct akv_device_state *d = &r->device;
    bool is_read = akv_is_load(s->pending_head->batch->kind);
    d->kernel_count = d->batch_count = 0;
    g->flights = NULL;
    g->fence = NULL;
    int code = 0;
    while (s->pending_head && code == 0) {
        struct akv_flight *f = s->pending_head;
        bool is_full = d->kernel_count + f->op.copy_count > g->capacity || d->batch_count + f->op.copy_count > AKV_LIST_MAX;
        if (akv_is_load(f->batch->kind) != is_read || (is_full && g->flights))
            break;
        code = ask_fence(r, f->batch);
        if (code == AKV_NOT_READY && g->flights) {
            code = 0;
            break;
        }
        move_to_group(s, g);
        if (code == AKV_NOT_READY)
            code = wait_for_fence(r, s, g, f->batch);
        if (code == 0)
            code = add_flight(r, s, g, f);
    }
    if (code == 0 && d->kernel_count)
        code = launch(r, s, g, is_read ? d->api->gather : d->api->scatter);
    if (code == 0 && d->batch_count)
        code = copy_batch(r, s, is_read);
    if (code == 0)
        code = AKV_CUDA(r, event_record, g->event->handle, s->handle);
    return code;
}
