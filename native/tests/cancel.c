/* cancel.c: drop and drain. A cancelled batch ends only when nothing of it is in flight, and its ticket dies with it. */
#include "check.h"

enum { COUNT = 256, LATE_US = 15000 };

/* After its ticket has been drained no byte of a batch's memory changes. The answers are late and the copies with them,
 * so an engine that let go at once would write afterwards. */
static void memory_is_quiet_after_the_ticket(uint32_t source, uint32_t placement)
{
    const akv_fault late = {.kind = AKV_READ, .action = AKV_FAULT_DELAY, .value = LATE_US, .every = 1, .times = 32};
    struct rig rig;
    struct load load;
    rig_make(&rig, source);
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig_start(&rig);
    load_make(&load, COUNT, COUNT);
    load.memory = new_memory((uint64_t)COUNT * PAGE);
    for (uint32_t i = 0; i < COUNT; i++) {
        load.ops[i] = placement == AKV_DIRECT ? direct_op(0, i * PAGE, load.memory + (uint64_t)i * PAGE, PAGE)
                                              : copied_op(placement, 0, i * PAGE, PAGE, i, 1);
        load.copies[i] = copy_of(load.memory + (uint64_t)i * PAGE, 0, PAGE);
    }
    int64_t ticket = load_submit(&rig, &load, AKV_READ);
    while (rig_statistics(&rig).in_flight == 0)
        pause_us(50);
    CHECK_EQ(akv_engine_cancel(rig.engine, ticket), 0);
    akv_completion done = rig_wait(&rig, ticket);
    CHECK_EQ(done.status, -ECANCELED);
    CHECK_EQ(rig_statistics(&rig).in_flight, 0);
    uint32_t dropped = 0;
    for (uint32_t i = 0; i < COUNT; i++) {
        bool has_bytes = holds(load.memory + (uint64_t)i * PAGE, 0, (uint64_t)i * PAGE, PAGE);
        CHECK(load.results[i].code == 0 ? has_bytes : is_all(load.memory + (uint64_t)i * PAGE, 0xa5, PAGE));
        CHECK(load.results[i].code == 0 || load.results[i].code == -ECANCELED);
        dropped += load.results[i].code != 0;
    }
    CHECK_EQ(dropped, done.failed);
    CHECK(dropped > 0 && dropped < COUNT);
    CHECK_EQ(rig_statistics(&rig).dropped_ops, dropped);
    memset(load.memory, 0x3c, (uint64_t)COUNT * PAGE);
    pause_us(3 * LATE_US);
    CHECK(is_all(load.memory, 0x3c, (uint64_t)COUNT * PAGE));
    rig_end(&rig);
    load_free(&load);
}

static void quiet_direct(uint32_t source)
{
    memory_is_quiet_after_the_ticket(source, AKV_DIRECT);
}

static void quiet_staged(uint32_t source)
{
    memory_is_quiet_after_the_ticket(source, AKV_STAGED);
}

/* The same without faults: real reads of a real device, in memory that is freed at once, where a sanitizer looks. */
static void memory_may_be_freed(uint32_t source)
{
    struct rig rig;
    rig_make(&rig, source);
    rig.options.queue_depth = 64;
    rig.options.bulk_nbytes = 1 << 30;
    rig_start(&rig);
    for (uint32_t round = 0; round < 12; round++) {
        struct load load;
        load_make_direct(&load, 60, round % FILES, 131072);
        int64_t ticket = load_submit(&rig, &load, AKV_READ);
        if (round % 2)
            pause_us(100 * round);
        CHECK_EQ(akv_engine_cancel(rig.engine, ticket), 0);
        rig_wait(&rig, ticket);
        for (uint32_t i = 0; i < load.op_count; i++)
            CHECK(load.results[i].code || holds(load.memory + (uint64_t)i * 131072, round % FILES,
                                                (uint64_t)i * 131072 % FILE_NBYTES, 131072));
        load_free(&load);
    }
    rig_end(&rig);
}

/* A ticket names one batch for ever: the record behind it serves others, which an old ticket does not reach. */
static void old_tickets_reach_nobody(uint32_t source)
{
    enum { ROUNDS = 64 };
    const akv_fault late = {.kind = AKV_READ, .action = AKV_FAULT_DELAY, .value = 200, .every = 1, .times = UINT32_MAX};
    int64_t tickets[ROUNDS];
    struct rig rig;
    struct load load;
    rig_make(&rig, source);
    rig.options.max_batches = 1;
    rig.options.queue_depth = 2;
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig_start(&rig);
    load_make_direct(&load, 8, 0, PAGE);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        tickets[round] = load_submit(&rig, &load, AKV_READ);
        CHECK(tickets[round] >= 0);
        for (uint32_t old = 0; old < round; old++) {
            CHECK(tickets[old] != tickets[round]);
            CHECK_EQ(akv_engine_cancel(rig.engine, tickets[old]), -ENOENT);
        }
        CHECK_EQ(rig_wait(&rig, tickets[round]).status, 0);
        CHECK_EQ(akv_engine_cancel(rig.engine, tickets[round]), -ENOENT);
    }
    CHECK_EQ(akv_engine_cancel(rig.engine, -1), -EINVAL);
    CHECK_EQ(akv_engine_cancel(rig.engine, 1), -EINVAL); /* no such record */
    CHECK_EQ(akv_engine_cancel(rig.engine, INT64_MAX), -EINVAL);
    rig_end(&rig);
    load_free(&load);
}

/* Cancelling one batch leaves its neighbours alone, and cancelling it again changes nothing. */
static void neighbours_go_on(uint32_t source)
{
    enum { BATCHES = 8, OPS = 40 };
    const akv_fault late = {.kind = -1, .action = AKV_FAULT_DELAY, .value = 3000, .every = 1, .times = UINT32_MAX};
    struct rig rig;
    struct load loads[BATCHES];
    int64_t tickets[BATCHES];
    rig_make(&rig, source);
    rig.options.queue_depth = 16;
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig_start(&rig);
    for (uint32_t i = 0; i < BATCHES; i++) {
        load_make_direct(&loads[i], OPS, i % FILES, i % 2 ? PAGE : 32768);
        loads[i].priority = i % 3;
    }
    for (uint32_t i = 0; i < BATCHES; i++)
        tickets[i] = load_submit(&rig, &loads[i], AKV_READ);
    for (uint32_t i = 1; i < BATCHES; i += 3)
        for (int again = 0; again < 3; again++)
            CHECK_EQ(akv_engine_cancel(rig.engine, tickets[i]), 0);
    for (uint32_t i = 0; i < BATCHES; i++) {
        akv_completion done = rig_wait(&rig, tickets[i]);
        CHECK_EQ(done.status, i % 3 == 1 ? -ECANCELED : 0);
        for (uint32_t n = 0; n < OPS; n++) {
            uint32_t nbytes = loads[i].ops[n].nbytes;
            CHECK(loads[i].results[n].code == -ECANCELED ||
                  holds(loads[i].memory + (uint64_t)n * nbytes, i % FILES, (uint64_t)n * nbytes, nbytes));
        }
        load_free(&loads[i]);
    }
    rig_end(&rig);
}

/* An order to cancel may be seen before its batch is: the reactor is busy taking in a large one, and looks for orders
 * when that is done. It must still know when it comes to the batch. */
static void orders_overtake_their_batch(uint32_t source)
{
    enum { ROUNDS = 12, LARGE = IS_THREAD_SANITIZED ? 20000 : 200000 };
    const akv_fault late = {.kind = AKV_READ, .action = AKV_FAULT_DELAY, .value = 40000, .every = 1, .times = UINT32_MAX};
    struct rig rig;
    struct load large, small;
    rig_make(&rig, source);
    rig.options.queue_depth = 1;
    rig.options.max_requests = LARGE + 2;
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig_start(&rig);
    load_make_instant(&large, LARGE);
    load_make_direct(&small, 2, 0, PAGE);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        int64_t first = load_submit(&rig, &large, AKV_SYNC);
        pause_us(round * 20); /* from here on the reactor counts ops, for about half a millisecond */
        int64_t second = load_submit(&rig, &small, AKV_READ);
        CHECK_EQ(akv_engine_cancel(rig.engine, second), 0);
        CHECK_EQ(rig_wait(&rig, first).status, -EINVAL);
        akv_completion done = rig_wait(&rig, second);
        CHECK_EQ(done.status, -ECANCELED);
        CHECK_EQ(small.results[1].code, -ECANCELED); /* the other one may have begun; this one had no flight */
    }
    rig_end(&rig);
    load_free(&large);
    load_free(&small);
}

int main(void)
{
    const struct test tests[] = {
        {"memory is quiet after the ticket, direct", quiet_direct},
        {"memory is quiet after the ticket, staged", quiet_staged},
        {"memory may be freed", memory_may_be_freed},
        {"old tickets reach nobody", old_tickets_reach_nobody},
        {"neighbours go on", neighbours_go_on},
        {"orders overtake their batch", orders_overtake_their_batch},
        {0},
    };
    return run_tests(tests);
}
