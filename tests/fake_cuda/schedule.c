/* schedule.c: when queued work is carried out. A pass marks what its goals need, goal by goal and stream by stream, and
 * then carries out exactly the marked operations; where order leaves a choice between streams, the seed chooses. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake.h"

struct pass {
    uint64_t number;
    bool held;       /* something needed is on a held stream */
    bool slow;       /* something needed is a kernel that wants more queries */
    bool any;        /* something needed has not been done */
};

static uint64_t passes;
static struct op **work_list;
static uint64_t work_count, work_room;

struct op *fake_op_new(enum op_kind kind, struct stream *stream)
{
    struct op *op = fake_allocate(1, sizeof *op);
    op->kind = kind;
    op->stream = stream;
    op->references = 1;
    op->queries_left = -1;
    return op;
}

void fake_op_keep(struct op *op)
{
    op->references++;
}

static void op_release_needs(struct op *op)
{
    for (uint32_t i = 0; i < op->need_count; i++)
        fake_op_drop(op->needs[i]);
    free(op->needs);
    op->needs = NULL;
    op->need_count = 0;
}

/* An operation that is done has let go of what it needed, so this recurses no deeper than one step. */
void fake_op_drop(struct op *op)
{
    if (!op || --op->references)
        return;
    op_release_needs(op);
    for (uint64_t i = 0; i < op->transfer_count; i++)
        free(op->transfers[i].snapshot);
    free(op->transfers);
    free(op);
}

void fake_op_needs(struct op *op, struct op *needed)
{
    if (!needed || needed->done)
        return;
    op->needs = realloc(op->needs, (op->need_count + 1) * sizeof *op->needs);
    if (!op->needs)
        abort();
    op->needs[op->need_count++] = needed;
    fake_op_keep(needed);
}

bool fake_is_blocking(const struct stream *stream)
{
    return !stream->legacy && !(stream->flags & CU_STREAM_NON_BLOCKING);
}

/* The legacy stream waits for all blocking streams of its context, and they for it. */
static void add_legacy_order(struct op *op)
{
    struct stream *stream = op->stream;
    if (fake_is_blocking(stream) && stream->context->legacy)
        fake_op_needs(op, stream->context->legacy->tail);
    if (!stream->legacy)
        return;
    for (struct stream *s = fake.streams; s; s = s->next)
        if (s->context == stream->context && fake_is_blocking(s))
            fake_op_needs(op, s->tail);
}

/* The queue takes over the caller's reference. */
void fake_op_issue(struct op *op)
{
    struct stream *stream = op->stream;
    add_legacy_order(op);
    op->position = ++stream->issued;
    op->serial = ++fake.issues;
    if (stream->tail)
        stream->tail->next = op;
    else
        stream->head = op;
    stream->tail = op;
    fake.pending++;
}

static void queue_pop(struct stream *stream)
{
    struct op *op = stream->head;
    stream->head = op->next;
    if (!stream->head)
        stream->tail = NULL;
    if (stream->marked == op)
        stream->marked = NULL;
    op->next = NULL;
    op->done = true;
    op_release_needs(op);
    fake.pending--;
    fake_op_drop(op);
}

void fake_queue_clear(struct stream *stream)
{
    while (stream->head)
        queue_pop(stream);
}

static void work_push(struct op *op)
{
    if (work_count == work_room) {
        work_room = work_room ? 2 * work_room : 256;
        work_list = realloc(work_list, work_room * sizeof *work_list);
        if (!work_list)
            abort();
    }
    work_list[work_count++] = op;
}

static void mark_one(struct pass *pass, struct op *op)
{
    op->mark = pass->number;
    pass->any = true;
    pass->held |= op->stream->held;
    pass->slow |= op->slow_left > 0;
    for (uint32_t i = 0; i < op->need_count; i++)
        work_push(op->needs[i]);
}

/* Marks `goal`, all before it on its stream, and what any of these need. A stream remembers how far it is marked. */
static void mark(struct pass *pass, struct op *goal)
{
    work_count = 0;
    work_push(goal);
    while (work_count) {
        struct op *op = work_list[--work_count];
        if (op->done || op->mark == pass->number)
            continue;
        struct stream *stream = op->stream;
        if (stream->marked_pass != pass->number)
            stream->marked = NULL;
        stream->marked_pass = pass->number;
        struct op *next = stream->marked ? stream->marked->next : stream->head;
        while (stream->marked != op) {
            mark_one(pass, next);
            stream->marked = next;
            next = next->next;
        }
    }
}

static struct pass pass_over(struct op **goals, uint32_t count)
{
    struct pass pass = {.number = ++passes};
    for (uint32_t i = 0; i < count; i++)
        if (goals[i])
            mark(&pass, goals[i]);
    return pass;
}

static bool is_runnable(const struct op *op, uint64_t pass)
{
    if (!op || op->mark != pass || op->stream->held)
        return false;
    for (uint32_t i = 0; i < op->need_count; i++)
        if (!op->needs[i]->done)
            return false;
    return true;
}

/* One of the runnable heads, each as likely as the others. */
static struct stream *choose(uint64_t pass)
{
    struct stream *chosen = NULL;
    uint64_t seen = 0;
    for (struct stream *s = fake.streams; s; s = s->next)
        if (is_runnable(s->head, pass) && fake_draw(++seen) == 0)
            chosen = s;
    return chosen;
}

static bool is_work(const struct op *op)
{
    return op->kind == OP_TRANSFERS || op->kind == OP_KERNEL;
}

static CUresult carry_out(struct op *op)
{
    if (is_work(op) && fake.fault_after > 0 && --fake.fault_after == 0)
        return fake.fault_result;
    return fake_op_work(op);
}

/* A failure ends the device. What is still queued stays queued: hardware that has faulted may or may not get to it, and
 * fake_run_everything is how a test says that it does (`regardless`). */
static uint64_t carry_out_marked(uint64_t pass, bool regardless)
{
    uint64_t count = 0;
    struct stream *stream;
    while ((regardless || !fake.sticky) && (stream = choose(pass))) {
        CUresult code = carry_out(stream->head);
        if (code && !fake.sticky)
            fake.sticky = code;
        fake.executed++;
        count++;
        queue_pop(stream);
        fake_stream_reap(stream);
    }
    return count;
}

static struct timespec deadline_after(uint32_t milliseconds)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    now.tv_sec += milliseconds / 1000;
    now.tv_nsec += (long)(milliseconds % 1000) * 1000000;
    if (now.tv_nsec >= 1000000000) {
        now.tv_sec++;
        now.tv_nsec -= 1000000000;
    }
    return now;
}

/* Until nothing that the goals need is held. The lock is free meanwhile, so goals may be done by somebody else, and a
 * reset may take the whole machine away. */
static CUresult wait_until_released(struct op **goals, uint32_t count, struct pass *pass)
{
    struct timespec until = deadline_after(fake.wait_limit_ms);
    uint64_t epoch = fake.epoch;
    *pass = pass_over(goals, count);
    while (pass->held) {
        bool in_time = fake_wait_for_change(&until);
        if (fake.epoch != epoch)
            return CUDA_ERROR_DEINITIALIZED;
        *pass = pass_over(goals, count);
        if (!in_time && pass->held)
            return CUDA_ERROR_TIMEOUT;
    }
    return CUDA_SUCCESS;
}

/* The host waits for the goals. */
CUresult fake_force(struct op **goals, uint32_t count)
{
    fake_thread()->waited = true;
    for (uint32_t i = 0; i < count; i++)
        if (goals[i])
            fake_op_keep(goals[i]);
    struct pass pass;
    CUresult code = wait_until_released(goals, count, &pass);
    if (code == CUDA_SUCCESS) {
        carry_out_marked(pass.number, false);
        code = fake.sticky;
    }
    for (uint32_t i = 0; i < count; i++)
        fake_op_drop(goals[i]);
    return code;
}

/* The legacy stream's end is also the end of every blocking stream: a marker there has that order. The last one serves
 * as long as nothing has been queued behind it. */
static struct op *legacy_marker(struct stream *legacy)
{
    bool serves = legacy->marker && legacy->tail == legacy->marker;
    for (struct stream *s = fake.streams; s && serves; s = s->next)
        if (s->context == legacy->context && fake_is_blocking(s) && s->tail)
            serves = s->tail->serial < legacy->marker->serial;
    if (!serves) {
        fake_op_drop(legacy->marker);
        legacy->marker = fake_op_new(OP_NOTHING, legacy);
        fake_op_keep(legacy->marker);
        fake_op_issue(legacy->marker);
    }
    return legacy->marker;
}

static struct op *end_of(struct stream *stream)
{
    return stream->legacy ? legacy_marker(stream) : stream->tail;
}

CUresult fake_force_stream(struct stream *stream)
{
    struct op *goal = end_of(stream);
    return fake_force(&goal, 1);
}

CUresult fake_force_context(struct fake_context *context)
{
    uint32_t count = 0;
    for (struct stream *s = fake.streams; s; s = s->next)
        count++;
    struct op **goals = fake_allocate(count, sizeof *goals);
    count = 0;
    for (struct stream *s = fake.streams; s; s = s->next)
        if (s->context == context)
            goals[count++] = s->tail;
    CUresult code = fake_force(goals, count);
    free(goals);
    return code;
}

/* A slow kernel takes notice of each query of something behind it. */
static void pass_time(uint64_t pass)
{
    for (struct stream *s = fake.streams; s; s = s->next)
        for (struct op *op = s->head; op && op->mark == pass; op = op->next)
            if (op->slow_left && op->slow_left != SLOW_UNTIL_FORCED)
                op->slow_left--;
}

/* The number depends on the seed and on the record's place, not on which thread asks first. */
static int64_t queries_drawn(const struct op *op)
{
    uint64_t place = fake_mix(op->stream->id) ^ op->position;
    uint64_t span = (uint64_t)fake.queries_max - fake.queries_min + 1;
    return (int64_t)(fake.queries_min + fake_mix(fake.seed ^ fake_mix(place)) % span);
}

CUresult fake_query(struct op *goal)
{
    if (!goal || goal->done)
        return CUDA_SUCCESS;
    struct pass pass = pass_over(&goal, 1);
    if (pass.held)
        return CUDA_ERROR_NOT_READY;
    if (pass.slow) {
        pass_time(pass.number);
        return CUDA_ERROR_NOT_READY;
    }
    if (goal->queries_left < 0)
        goal->queries_left = queries_drawn(goal);
    if (goal->queries_left > 0) {
        goal->queries_left--;
        return CUDA_ERROR_NOT_READY;
    }
    carry_out_marked(pass.number, false);
    return fake.sticky;
}

CUresult fake_query_stream(struct stream *stream)
{
    return fake_query(end_of(stream));
}

uint64_t fake_run_all(void)
{
    uint64_t pass = ++passes;
    for (struct stream *s = fake.streams; s; s = s->next)
        for (struct op *op = s->head; op; op = op->next)
            op->mark = pass;
    return carry_out_marked(pass, true);
}
