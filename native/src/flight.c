/* flight.c: one op from its start to its result.
 *
 * The kernel's promise is weak: a completion may be short, zero, -EINTR or -EAGAIN. What is made of it:
 *   short     ask again for the rest, from an aligned boundary (a direct read at an odd offset is -EINVAL), so the
 *             overlap is read twice; an ask that brings nothing new counts as an attempt
 *   zero      end of file: -ENODATA for a read, -EIO for a write
 *   -EINTR, -EAGAIN   ask again a little later, AKV_ATTEMPTS_MAX times
 * A flight keeps its slot, its region and its batch until its answer is final. */
#include <errno.h>
#include <string.h>

#include "internal.h"

/* How much of an op has to come: a read that was rounded up for direct I/O may end with the file. */
static uint32_t owed_of(const akv_op *op)
{
    return op->nbytes_owed ? op->nbytes_owed : op->nbytes;
}

static int check_op(const struct akv_reactor *r, const struct akv_batch *b, const akv_op *op, uint32_t lane)
{
    const akv_options *options = &r->engine->options;
    if (b->has_order && r->device.error)
        return -(AKV_CUDA_ERROR + r->device.error);
    if (!akv_has_file(b->kind))
        return op->placement == AKV_PINNED && b->copy_stream ? akv_copy_check(b, op, 1) : -EINVAL;
    if (op->file >= options->fd_count || op->placement > AKV_VECTORED)
        return -EINVAL;
    if (b->has_order && (op->placement != AKV_STAGED || !b->copy_stream))
        return -EINVAL;
    if (b->kind == AKV_SYNC)
        return op->nbytes == 0 && op->placement == AKV_DIRECT ? 0 : -EINVAL;
    if (op->nbytes == 0 || op->nbytes > options->max_op_nbytes || op->nbytes > r->slab.slot_nbytes[lane])
        return -EINVAL;
    if (op->file_offset > (uint64_t)INT64_MAX - op->nbytes || op->file_offset % options->offset_alignment ||
        op->nbytes % options->offset_alignment)
        return -EINVAL;
    if (op->nbytes_owed && (b->kind != AKV_READ || op->placement == AKV_VECTORED || op->nbytes_owed > op->nbytes))
        return -EINVAL;
    return akv_copy_check(b, op, options->memory_alignment);
}

bool akv_flight_can_start(const struct akv_reactor *r, const akv_op *op, uint32_t lane)
{
    if (!r->free_flights)
        return false;
    return op->placement != AKV_STAGED || r->slab.free_count[lane] > 0;
}

static void count_in_flight(struct akv_reactor *r, const struct akv_flight *f, int sign)
{
    r->in_flight += sign;
    r->in_flight_lane[f->lane] += sign;
    r->in_flight_nbytes += (int64_t)sign * f->op.nbytes;
    if (f->lane == AKV_BULK)
        r->bulk_in_flight_nbytes += (int64_t)sign * f->op.nbytes;
    if (f->batch->priority > 0)
        r->background_in_flight += sign;
    AKV_STORE(r, in_flight, r->in_flight);
    if (sign > 0) {
        AKV_MAX(r, in_flight_max, r->in_flight);
        AKV_MAX(r, bulk_nbytes_max, r->bulk_in_flight_nbytes);
    }
}

/* Puts the flight on the list of things to do later, at `due_ns`: the soonest first, and in the order of the delays. */
static void delay(struct akv_reactor *r, struct akv_flight *f, int64_t due_ns, bool is_late)
{
    f->is_late = is_late;
    f->due_ns = due_ns;
    struct akv_flight **place = &r->delayed;
    while (*place && (*place)->due_ns <= due_ns)
        place = &(*place)->next;
    f->next = *place;
    *place = f;
}

/* Asks the source for what is missing. */
static void ask(struct akv_reactor *r, struct akv_flight *f)
{
    f->from = f->arrived - f->arrived % r->engine->options.offset_alignment;
    f->asked = f->op.nbytes - f->from;
    f->fault = r->engine->options.fault_count ? akv_fault_pick(r, f->batch->kind) : NULL;
    if (f->fault && f->fault->action == AKV_FAULT_ERROR) {
        f->result = f->fault->value;
        f->fault = NULL;
        delay(r, f, 0, true);
        return;
    }
    if (f->fault && f->fault->action == AKV_FAULT_SHORT && f->asked > (uint32_t)f->fault->value)
        f->asked = f->fault->value;
    r->source->queue(r, f);
}

void akv_flight_start(struct akv_reactor *r, struct akv_batch *b, uint32_t op_index, const akv_op *op, uint32_t lane)
{
    int code = check_op(r, b, op, lane);
    if (code) {
        akv_batch_op_done(r, b, op_index, code, 0, true);
        return;
    }
    struct akv_flight *f = r->free_flights;
    r->free_flights = f->next;
    f->batch = b;
    f->op = *op;
    f->op_index = op_index;
    f->lane = lane;
    f->arrived = f->attempts = 0;
    f->is_queued = !b->has_order;
    f->buffer = -1;
    f->region = NULL;
    f->device_shift = r->device.slab_device - (uintptr_t)r->slab.base;
    f->base = (uint8_t *)(uintptr_t)op->address;
    if (op->placement == AKV_STAGED) {
        f->base = akv_slot_take(&r->slab, lane, &f->slot);
        AKV_COUNT(r, slots_leased, 1);
    }
    if (b->has_order)
        b->copy_stream->flights[lane]++;
    if (op->placement == AKV_PINNED) {
        f->region = akv_region_pinned(r, op->address, op->nbytes * akv_unit(op));
        f->device_shift = f->region ? f->region->device_address - f->region->address : 0;
    } else if (op->placement != AKV_VECTORED && b->kind != AKV_SYNC)
        f->region = akv_region_find(r, (uintptr_t)f->base, op->nbytes, &f->buffer);
    count_in_flight(r, f, 1);
    AKV_COUNT(r, ops, 1);
    if (f->buffer >= 0)
        AKV_COUNT(r, fixed_ops, 1);
    if (op->placement == AKV_PINNED && !f->region) {
        akv_flight_fail(r, f, -EFAULT, false);
        return;
    }
    if (b->has_order && b->kind != AKV_READ) { /* a write has to fetch its bytes first; a load or save has nothing else */
        if (b->kind == AKV_WRITE)
            akv_copy_blank(f);
        akv_device_add(r, f);
        return;
    }
    if (b->kind == AKV_WRITE && op->placement == AKV_STAGED)
        akv_copy_in(r, f);
    ask(r, f);
}

/* The memory of the next ask: one entry, or what is left of a vectored op's list. */
int akv_flight_iov(const struct akv_flight *f, struct iovec *iov)
{
    if (f->op.placement != AKV_VECTORED) {
        iov[0] = (struct iovec){f->base + f->from, f->asked};
        return 1;
    }
    const akv_copy *copies = f->batch->copies + f->op.copy_first;
    uint32_t begin = f->from, end = f->from + f->asked;
    int count = 0;
    for (uint32_t i = 0, at = 0; i < f->op.copy_count && at < end; i++) {
        akv_copy copy = copies[i];
        uint32_t next = at + copy.nbytes;
        if (next > begin && next > at) {
            uint32_t skip = begin > at ? begin - at : 0;
            uint32_t stop = next > end ? end - at : copy.nbytes;
            iov[count++] = (struct iovec){(uint8_t *)(uintptr_t)copy.address + skip, stop - skip};
        }
        at = next;
    }
    return count;
}

static void end(struct akv_reactor *r, struct akv_flight *f, int32_t code, bool keeps_slot)
{
    struct akv_batch *b = f->batch;
    if (code == 0 && b->kind == AKV_READ)
        AKV_COUNT(r, bytes_read, f->arrived);
    if (code == 0 && b->kind == AKV_WRITE)
        AKV_COUNT(r, bytes_written, f->op.nbytes);
    count_in_flight(r, f, -1);
    if (f->op.placement == AKV_STAGED) {
        if (keeps_slot)
            AKV_COUNT(r, slots_leaked, 1);
        else
            akv_slot_return(&r->slab, f->lane, f->slot);
        AKV_COUNT(r, slots_leased, -1);
    }
    if (b->has_order)
        b->copy_stream->flights[f->lane]--;
    struct akv_region *region = f->region;
    uint32_t op_index = f->op_index, arrived = f->arrived;
    f->batch = NULL;
    f->next = r->free_flights;
    r->free_flights = f;
    akv_batch_op_done(r, b, op_index, code, arrived, !f->is_queued);
    if (region) {
        region->is_lost |= keeps_slot;
        akv_region_release(r, region);
    }
}

/* The I/O of a flight has ended. Bytes for device memory still have to be copied there. */
static void finish(struct akv_reactor *r, struct akv_flight *f, int32_t code)
{
    bool has_bytes = code == 0 && f->batch->kind == AKV_READ && f->op.placement == AKV_STAGED;
    if (has_bytes && f->batch->has_order && !r->device.error) {
        akv_device_add(r, f);
        return;
    }
    if (has_bytes && f->batch->has_order)
        code = -(AKV_CUDA_ERROR + r->device.error);
    else if (has_bytes)
        akv_copy_out(r, f);
    end(r, f, code, false);
}

/* The copies of a flight are done: a read is complete, a write has its bytes in the slot and goes to the disk. */
void akv_flight_copied(struct akv_reactor *r, struct akv_flight *f)
{
    if (f->batch->kind == AKV_WRITE)
        ask(r, f);
    else
        end(r, f, 0, false);
}

void akv_flight_fail(struct akv_reactor *r, struct akv_flight *f, int32_t code, bool keeps_slot)
{
    end(r, f, code, keeps_slot);
}

static void retry(struct akv_reactor *r, struct akv_flight *f, int32_t code)
{
    if (++f->attempts > AKV_ATTEMPTS_MAX) {
        finish(r, f, code);
        return;
    }
    AKV_COUNT(r, retried_ops, 1);
    delay(r, f, akv_now_ns() + (20000ll << f->attempts), false); /* 40 us, doubling: 10 ms in all */
}

static void judge(struct akv_reactor *r, struct akv_flight *f, int32_t result)
{
    if (result == -EINTR || result == -EAGAIN) {
        retry(r, f, result);
    } else if (result < 0) {
        finish(r, f, result);
    } else if (f->batch->kind == AKV_SYNC) {
        finish(r, f, 0);
    } else if ((uint32_t)result > f->asked) {
        finish(r, f, -EOVERFLOW);
    } else if (result == 0) {
        finish(r, f, f->batch->kind == AKV_READ ? -ENODATA : -EIO);
    } else if (f->from + result <= f->arrived) { /* the overlap again and nothing more: the end, or a stutter */
        retry(r, f, f->batch->kind == AKV_READ ? -ENODATA : -EIO);
    } else {
        f->arrived = f->from + result;
        if (f->arrived >= owed_of(&f->op)) {
            finish(r, f, 0);
            return;
        }
        AKV_COUNT(r, resumed_ops, 1);
        ask(r, f);
    }
}

/* The source's answer to the last ask. */
void akv_flight_answer(struct akv_reactor *r, struct akv_flight *f, int32_t result)
{
    const akv_fault *fault = f->fault;
    f->fault = NULL;
    if (fault && fault->action >= AKV_FAULT_DELAY) {
        f->result = result;
        delay(r, f, akv_now_ns() + akv_fault_delay_ns(r, fault), true);
        return;
    }
    judge(r, f, result);
}

/* Answers and asks whose time has come. What is delayed again meanwhile waits its turn. */
void akv_flight_release_due(struct akv_reactor *r, int64_t now_ns)
{
    struct akv_flight *due = r->delayed, **end = &r->delayed;
    while (*end && (*end)->due_ns <= now_ns)
        end = &(*end)->next;
    if (end == &r->delayed)
        return;
    r->delayed = *end;
    *end = NULL;
    while (due) {
        struct akv_flight *f = due;
        due = f->next;
        if (f->is_late)
            judge(r, f, f->result);
        else
            ask(r, f);
    }
}
