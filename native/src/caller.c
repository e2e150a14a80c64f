/* caller.c: what a submitting call asks of CUDA in its own thread, in one step each instead of one per driver function.
 *
 * These only ever say that all is well. What is wrong, and in which words, is for the caller to find out by asking the
 * driver again, function by function. */
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

/* A CUDA host function that tells an eventfd: the other way to learn of an event, for the benchmark to compare. */
void akv_host_function(void *eventfd)
{
    uint64_t one = 1;
    if (write((int)(intptr_t)eventfd, &one, sizeof one) < 0)
        return; /* nobody to tell it to: the driver's thread takes no answer */
}

/* 1: `copies` has been filled, one for each of `count` pieces of `nbytes` between a region (`offsets` in it) and device
 * memory (`places` in it, or packed where that is NULL), and every piece lies within both. */
int akv_pinned_copies(akv_copy *copies, uint32_t count, const int64_t *offsets, uint64_t region_nbytes, uint64_t device,
                      uint64_t device_nbytes, const int64_t *places, uint32_t nbytes)
{
    if (!copies || !offsets || nbytes == 0 || region_nbytes < nbytes || region_nbytes > 1ull << 31 ||
        device_nbytes < nbytes || (!places && device_nbytes != (uint64_t)count * nbytes))
        return 0;
    uint64_t last_offset = region_nbytes - nbytes, last_place = device_nbytes - nbytes;
    for (uint32_t i = 0; i < count; i++) { /* as unsigned, what is negative is too large */
        uint64_t offset = offsets[i], place = places ? (uint64_t)places[i] : (uint64_t)i * nbytes;
        if (offset > last_offset || place > last_place)
            return 0;
        copies[i] = (akv_copy){.address = device + place, .op_offset = offset, .nbytes = nbytes};
    }
    return 1;
}
