/* batch.c: a batch inside its reactor. It is live from the intake until its last op has a result; then it is pushed
 * to the engine's done stack and may be gone the moment after: nothing may touch it past akv_batch_finish. */
#include <errno.h>

#include "internal.h"

static void tell(struct akv_reactor *r, struct akv_batch *b, uint32_t stage)
{
    struct akv_engine *e = r->engine;
    struct akv_notice *notice = &b->notices[stage];
    notice->batch = b;
    notice->stage = stage;
    notice->status = b->status;
    notice->failed = b->failed;
    struct akv_notice *head = atomic_load_explicit(&e->done, memory_order_relaxed);
    do
        notice->next = head;
    while (!atomic_compare_exchange_weak(&e->done, &head, notice));
    r->must_notify = true;
}

/* One op's copies are on the copy stream, `tail` behind them. The last of a batch tells its caller, whose own stream can
 * then be made to wait for that event: streams work in order, so it stands for all earlier copies too. */
void akv_batch_op_queued(struct akv_reactor *r, struct akv_batch *b, struct akv_device_event *tail)
{
    if (--b->unqueued)
        return;
    b->tail = tail;
    if (tail)
        atomic_fetch_add_explicit(&tail->shares, 1, memory_order_relaxed);
    tell(r, b, AKV_ENQUEUED);
}

/* Ops that will never have copies: failed or dropped. What was queued before them has the newest group behind it. */
static void ops_skipped(struct akv_reactor *r, struct akv_batch *b, uint32_t count)
{
    if (!b->has_order || count == 0)
        return;
    b->unqueued -= count - 1;
    struct akv_copy_group *newest = b->copy_stream ? b->copy_stream->newest : NULL;
    akv_batch_op_queued(r, b, newest && !r->device.error ? newest->event : NULL);
}

void akv_batch_finish(struct akv_reactor *r, struct akv_batch *b)
{
    if (b->live_prev)
        b->live_prev->live_next = b->live_next;
    else
        r->live = b->live_next;
    if (b->live_next)
        b->live_next->live_prev = b->live_prev;
    akv_device_leave(b);
    tell(r, b, AKV_DONE);
}

/* `is_skipped`: the op ends without copies ever having been queued for it. */
void akv_batch_op_done(struct akv_reactor *r, struct akv_batch *b, uint32_t op_index, int32_t code, uint32_t nbytes,
                       bool is_skipped)
{
    b->results[op_index] = (akv_result){code, nbytes};
    if (code) {
        /* An error of the device outweighs others: it says that memory may still be written to. */
        if (b->failed++ == 0 || code <= -AKV_CUDA_ERROR)
            b->status = code;
        AKV_COUNT(r, failed_ops, 1);
    }
    if (is_skipped)
        ops_skipped(r, b, 1);
    if (--b->remaining == 0)
        akv_batch_finish(r, b);
}

/* Ops of `lane` from its cursor on have not started. */
static void drop_lane(struct akv_reactor *r, struct akv_batch *b, uint32_t lane, int32_t code)
{
    if (b->lane[lane].left == 0)
        return;
    for (uint32_t i = b->lane[lane].cursor; i < b->op_count; i++)
        if (akv_lane_of(r, b, b->ops[i].nbytes) == lane)
            b->results[i] = (akv_result){code, 0};
}

/* Answers every op that has not started with `code`. Those at the device are waited for. */
void akv_batch_drop_pending(struct akv_reactor *r, struct akv_batch *b, int32_t code)
{
    uint32_t left = b->lane[AKV_SMALL].left + b->lane[AKV_BULK].left;
    if (left == 0)
        return;
    for (uint32_t lane = 0; lane < AKV_LANES; lane++)
        drop_lane(r, b, lane, code);
    akv_lanes_leave(r, b);
    if (b->failed == 0)
        b->status = code;
    b->failed += left;
    AKV_COUNT(r, dropped_ops, left);
    ops_skipped(r, b, left);
    b->remaining -= left;
    if (b->remaining == 0)
        akv_batch_finish(r, b);
}

void akv_batch_accept(struct akv_reactor *r, struct akv_batch *b)
{
    b->live_prev = NULL;
    b->live_next = r->live;
    if (r->live)
        r->live->live_prev = b;
    r->live = b;
    b->status = 0;
    b->failed = 0;
    b->remaining = b->op_count;
    b->lane[AKV_SMALL] = b->lane[AKV_BULK] = (struct akv_lane_link){0};
    AKV_COUNT(r, batches, 1);
    if (b->kind == AKV_REGION_ADD || b->kind == AKV_REGION_REMOVE) {
        akv_region_command(r, b);
        return;
    }
    akv_device_take(r, b);
    if (b->kind == AKV_EVENT)
        return;
    akv_lanes_enter(r, b);
    if (atomic_load(&b->cancel_requested)) { /* the order overtook its batch */
        akv_batch_drop_pending(r, b, -ECANCELED);
        return;
    }
    if (b->deadline_ns && b->deadline_ns < r->next_deadline_ns)
        r->next_deadline_ns = b->deadline_ns;
}
