/* caller.c: what a submitting call does in its own thread, in one step: the checks, the record and the hand-over of the
 * smallest transfers, which are what latency is measured by.
 *
 * These only ever say that all is well. What is wrong, and in which words, is for the caller to find out by taking the
 * same steps one by one. */
#include <errno.h>
#include <stddef.h>
#include <unistd.h>

#include "internal.h"

enum { MEMORY_TYPE = 2, DEVICE_ORDINAL = 9, RANGE_START = 11, RANGE_NBYTES = 12, IS_MAPPED = 13, TYPE_DEVICE = 2 };

static const akv_device *device_of(akv_engine *e)
{
    return e->options.device && getpid() == e->pid ? &e->device : NULL;
}

/* Makes the device's context current; `before` is what was, to be given to `leave`. */
static int enter(const akv_device *d, void **before)
{
    *before = NULL;
    int code = d->ctx_get_current(before);
    if (code == 0 && *before != d->context)
        code = d->ctx_set_current(d->context);
    return code;
}

static void leave(const akv_device *d, void *before)
{
    if (before != d->context)
        d->ctx_set_current(before);
}

/* 1: `nbytes` at `address` are memory of this device, mapped, within one allocation. */
int akv_engine_is_device_memory(akv_engine *e, uint64_t address, uint64_t nbytes, int32_t ordinal)
{
    const akv_device *d = device_of(e);
    static const int asked[] = {MEMORY_TYPE, DEVICE_ORDINAL, RANGE_START, RANGE_NBYTES};
    struct {
        uint32_t type;
        int32_t ordinal;
        uint64_t start, nbytes;
    } found = {0};
    void *places[] = {&found.type, &found.ordinal, &found.start, &found.nbytes};
    int is_mapped = 0;
    void *before;
    if (!d || nbytes == 0 || address + nbytes < address)
        return 0;
    int code = enter(d, &before);
    if (code == 0)
        code = d->pointer_get_attributes(4, (int *)asked, places, address);
    if (code == 0)
        code = d->pointer_get_attribute(&is_mapped, IS_MAPPED, address + nbytes - 1);
    leave(d, before);
    return code == 0 && found.type == TYPE_DEVICE && found.ordinal == ordinal && is_mapped &&
           address >= found.start && address - found.start <= found.nbytes &&
           nbytes <= found.nbytes - (address - found.start);
}

/* 1: `event` has been recorded on `stream`, which is not being captured into a graph. */
int akv_engine_fence(akv_engine *e, void *stream, void *event)
{
    const akv_device *d = device_of(e);
    int capture = 0;
    void *before;
    if (!d || !event)
        return 0;
    int code = enter(d, &before);
    if (code == 0)
        code = d->stream_is_capturing(stream, &capture);
    if (code == 0 && capture == 0)
        code = d->event_record(event, stream);
    leave(d, before);
    return code == 0 && capture == 0;
}

int64_t akv_engine_read_one(akv_engine *e, uint32_t ring, uint32_t priority, uint32_t file, uint64_t file_offset,
                            uint32_t nbytes, void *into, uint32_t into_nbytes, void *record, size_t record_nbytes)
{
    akv_op *op = record;
    akv_result *result = (akv_result *)(op + 1);
    akv_copy *copy = (akv_copy *)(result + 1);
    if (!into || into_nbytes == 0 || into_nbytes > nbytes || !record || record_nbytes < sizeof *op + sizeof *result + sizeof *copy)
        return -EINVAL;
    bool does_land = nbytes == into_nbytes && (uintptr_t)into % e->options.memory_alignment == 0;
    *copy = (akv_copy){.address = (uintptr_t)into, .nbytes = into_nbytes};
    *result = (akv_result){0};
    *op = (akv_op){.file_offset = file_offset,
                   .address = does_land ? (uintptr_t)into : 0,
                   .nbytes = nbytes,
                   .file = file,
                   .copy_count = !does_land,
                   .placement = does_land ? AKV_DIRECT : AKV_STAGED};
    return akv_engine_submit(e, ring, AKV_READ, priority, 0, op, 1, copy, !does_land, result, NULL);
}

int64_t akv_engine_copy_pinned(akv_engine *e, uint32_t ring, uint32_t kind, uint32_t priority, int32_t ordinal,
                               uint64_t region, uint64_t region_nbytes, const int64_t *offsets, uint64_t device,
                               uint64_t device_nbytes, const int64_t *places, uint32_t count, uint32_t nbytes,
                               uint64_t stream, uint64_t event, void *record, size_t record_nbytes)
{
    uint64_t op_count = ((uint64_t)count + AKV_PINNED_COPIES - 1) / AKV_PINNED_COPIES;
    if (akv_has_file(kind) || count == 0 || !record ||
        record_nbytes < op_count * (sizeof(akv_op) + sizeof(akv_result)) + (uint64_t)count * sizeof(akv_copy))
        return -EINVAL;
    akv_op *ops = record;
    akv_result *results = (akv_result *)(ops + op_count);
    akv_copy *copies = (akv_copy *)(results + op_count);
    void *fence = (void *)(uintptr_t)event;
    uint32_t unit = region_nbytes > AKV_BYTES_MAX ? AKV_PAGE : 1;
    if (!akv_pinned_copies(copies, count, offsets, region_nbytes, device, device_nbytes, places, nbytes, unit) ||
        !akv_engine_is_device_memory(e, device, device_nbytes, ordinal) ||
        (event && !akv_engine_fence(e, (void *)(uintptr_t)stream, fence)))
        return -EDOM;
    for (uint32_t i = 0; i < op_count; i++) {
        uint32_t first = i * AKV_PINNED_COPIES;
        results[i] = (akv_result){0};
        ops[i] = (akv_op){.file_offset = unit,
                          .address = region,
                          .nbytes = region_nbytes / unit,
                          .copy_first = first,
                          .copy_count = count - first < AKV_PINNED_COPIES ? count - first : AKV_PINNED_COPIES,
                          .placement = AKV_PINNED};
    }
    akv_order order = {.fence = fence, .stream_key = event ? (stream ? stream : 1) : 0};
    return akv_engine_submit(e, ring, kind, priority, 0, ops, op_count, copies, count, results, &order);
}

/* A CUDA host function that tells an eventfd: the other way to learn of an event, for the benchmark to compare. */
void akv_host_function(void *eventfd)
{
    uint64_t one = 1;
    if (write((int)(intptr_t)eventfd, &one, sizeof one) < 0)
        return; /* nobody to tell it to: the driver's thread takes no answer */
}

/* 1: `copies` has been filled, one for each of `count` pieces of `nbytes` between a region (`offsets` in it) and device
 * memory (`places` in it, or packed where that is NULL), and every piece lies within both, at whole units of the region. */
int akv_pinned_copies(akv_copy *copies, uint32_t count, const int64_t *offsets, uint64_t region_nbytes, uint64_t device,
                      uint64_t device_nbytes, const int64_t *places, uint32_t nbytes, uint32_t unit)
{
    if (!copies || !offsets || nbytes == 0 || unit == 0 || region_nbytes < nbytes || region_nbytes / unit > AKV_BYTES_MAX ||
        device_nbytes < nbytes || (!places && device_nbytes != (uint64_t)count * nbytes))
        return 0;
    uint64_t last_offset = region_nbytes - nbytes, last_place = device_nbytes - nbytes;
    for (uint32_t i = 0; i < count; i++) { /* as unsigned, what is negative is too large */
        uint64_t offset = offsets[i], place = places ? (uint64_t)places[i] : (uint64_t)i * nbytes;
        if (offset > last_offset || place > last_place || (unit > 1 && offset % unit))
            return 0;
        copies[i] = (akv_copy){.address = device + place, .op_offset = offset / unit, .nbytes = nbytes};
    }
    return 1;
}
