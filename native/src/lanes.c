/* lanes.c: which op goes to the device next.
 *
 * Twelve queues: priority, then reads before writes, then small before bulk. Batches wait in call order; the first
 * queue whose head may start wins. Bulk is capped in bytes: a 4 KiB read behind unlimited 1 MiB reads waited 25 to
 * 50 ms, because the queue is in the device, where no later choice helps. Prefetch and background keep to a quarter
 * of the depth while demand is there. One pick in 64 goes round the queues instead, so that none starves for ever. */
#include <errno.h>

#include "internal.h"

/* Copies that need no disk have nothing to wait for behind bulk I/O. */
uint32_t akv_lane_of(const struct akv_reactor *r, const struct akv_batch *b, uint32_t nbytes)
{
    return !akv_has_file(b->kind) || nbytes <= r->engine->options.small_nbytes ? AKV_SMALL : AKV_BULK;
}

static uint32_t class_of(const struct akv_batch *b, uint32_t lane)
{
    return (b->priority * 2 + !akv_is_load(b->kind)) * AKV_LANES + lane;
}

static void skip_other_lane(struct akv_reactor *r, struct akv_batch *b, uint32_t lane)
{
    struct akv_lane_link *link = &b->lane[lane];
    while (link->cursor < b->op_count && akv_lane_of(r, b, b->ops[link->cursor].nbytes) != lane)
        link->cursor++;
}

static void link_last(struct akv_reactor *r, struct akv_batch *b, uint32_t lane)
{
    uint32_t class = class_of(b, lane);
    struct akv_batch *last = r->queue_tail[class];
    b->lane[lane].prev = last;
    b->lane[lane].next = NULL;
    if (last)
        last->lane[lane].next = b;
    else
        r->queue_head[class] = b;
    r->queue_tail[class] = b;
}

static void unlink_lane(struct akv_reactor *r, struct akv_batch *b, uint32_t lane)
{
    uint32_t class = class_of(b, lane);
    struct akv_lane_link *link = &b->lane[lane];
    if (link->prev)
        link->prev->lane[lane].next = link->next;
    else
        r->queue_head[class] = link->next;
    if (link->next)
        link->next->lane[lane].prev = link->prev;
    else
        r->queue_tail[class] = link->prev;
    link->prev = link->next = NULL;
    link->left = 0;
}

void akv_lanes_enter(struct akv_reactor *r, struct akv_batch *b)
{
    for (uint32_t i = 0; i < b->op_count; i++)
        b->lane[akv_lane_of(r, b, b->ops[i].nbytes)].left++;
    for (uint32_t lane = 0; lane < AKV_LANES; lane++) {
        if (b->lane[lane].left == 0)
            continue;
        skip_other_lane(r, b, lane);
        link_last(r, b, lane);
    }
}

/* Takes the batch out of its queues; ops that have not started stay without a result. */
void akv_lanes_leave(struct akv_reactor *r, struct akv_batch *b)
{
    for (uint32_t lane = 0; lane < AKV_LANES; lane++)
        if (b->lane[lane].left)
            unlink_lane(r, b, lane);
}

static bool may_start(const struct akv_reactor *r, uint32_t class, uint32_t nbytes)
{
    const akv_options *options = &r->engine->options;
    uint32_t lane = class % AKV_LANES;
    uint32_t background = r->background_in_flight;
    bool has_demand = r->in_flight > background;
    for (uint32_t c = 0; c < 2 * AKV_LANES && !has_demand; c++)
        has_demand = r->queue_head[c] != NULL;
    if (class >= 2 * AKV_LANES && has_demand && background >= (options->queue_depth + 3) / 4)
        return false;
    if (lane == AKV_SMALL || r->in_flight_lane[AKV_BULK] == 0)
        return true;
    return r->bulk_in_flight_nbytes + nbytes <= options->bulk_nbytes &&
           r->in_flight_lane[AKV_BULK] < (options->queue_depth * 3 + 3) / 4;
}

/* Starts the head of one queue if it may. Batches whose copies a fence holds back are passed over once they have their
 * share: whoever stands behind them has other kernels to wait for. */
static bool issue_from(struct akv_reactor *r, uint32_t class)
{
    struct akv_batch *b = r->queue_head[class];
    uint32_t lane = class % AKV_LANES;
    while (b && !akv_device_may_start(r, b, lane))
        b = b->lane[lane].next;
    if (!b)
        return false;
    struct akv_lane_link *link = &b->lane[lane];
    if (link->cursor >= b->op_count) { /* the caller changed ops it had handed over */
        akv_batch_drop_pending(r, b, -EINVAL);
        return true;
    }
    uint32_t index = link->cursor;
    akv_op op = b->ops[index]; /* read once: everything after works on this copy */
    if (!may_start(r, class, op.nbytes) || !akv_flight_can_start(r, &op, lane))
        return false;
    link->cursor++;
    if (--link->left == 0)
        unlink_lane(r, b, lane);
    else
        skip_other_lane(r, b, lane);
    akv_flight_start(r, b, index, &op, lane); /* may finish the batch: not touched after this */
    return true;
}

/* Only a pick that starts something counts: with one flight every second pick finds nothing free, and if the 64th were
 * always one of those, fairness would never have its turn. */
static bool issue_one(struct akv_reactor *r)
{
    bool is_turned = (r->picks & 63) == 63;
    uint32_t first = is_turned ? r->turn : 0;
    for (uint32_t i = 0; i < AKV_CLASSES; i++) {
        uint32_t class = (first + i) % AKV_CLASSES;
        if (!issue_from(r, class))
            continue;
        r->picks++;
        if (is_turned)
            r->turn = class + 1;
        return true;
    }
    return false;
}

void akv_lanes_issue(struct akv_reactor *r)
{
    akv_device_next_turn(r);
    while (r->queued < AKV_SLICE && issue_one(r))
        ;
}
