/* batch.c: a batch inside its reactor. It is live from the intake until its last op has a result; then it is pushed
 * to the engine's done stack and may be gone the moment after: nothing may touch it past akv_batch_finish. */
#include <errno.h>

#include "internal.h"

void akv_batch_finish(struct akv_reactor *r, struct akv_batch *b)
{
    struct akv_engine *e = r->engine;
    if (b->live_prev)
        b->live_prev->live_next = b->live_next;
    else
        r->live = b->live_next;
    if (b->live_next)
        b->live_next->live_prev = b->live_prev;
    struct akv_batch *head = atomic_load_explicit(&e->done, memory_order_relaxed);
    do
        b->next = head;
    while (!atomic_compare_exchange_weak(&e->done, &head, b));
    r->must_notify = true;
}

void akv_batch_op_done(struct akv_reactor *r, struct akv_batch *b, uint32_t op_index, int32_t code, uint32_t nbytes)
{
    b->results[op_index] = (akv_result){code, nbytes};
    if (code) {
        if (b->failed++ == 0)
            b->status = code;
        AKV_COUNT(r, failed_ops, 1);
    }
    if (--b->remaining == 0)
        akv_batch_finish(r, b);
}

/* Ops of `lane` from its cursor on have not started. */
static void drop_lane(struct akv_reactor *r, struct akv_batch *b, uint32_t lane, int32_t code)
{
    uint32_t small_nbytes = r->engine->options.small_nbytes;
    if (b->lane[lane].left == 0)
        return;
    for (uint32_t i = b->lane[lane].cursor; i < b->op_count; i++)
        if ((b->ops[i].nbytes > small_nbytes) == (lane == AKV_BULK))
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
    akv_lanes_enter(r, b);
    if (atomic_load(&b->cancel_requested)) { /* the order overtook its batch */
        akv_batch_drop_pending(r, b, -ECANCELED);
        return;
    }
    if (b->deadline_ns && b->deadline_ns < r->next_deadline_ns)
        r->next_deadline_ns = b->deadline_ns;
}
