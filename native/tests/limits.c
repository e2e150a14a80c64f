/* limits.c: the engine holds so much and no more, says so, and tells of every end: bounds, drain, poll, wakes. */
#include "check.h"

/* A batch that is answered as soon as the reactor sees it: its file does not exist. */
static void load_make_instant(struct load *load)
{
    load_make(load, 1, 0);
    load->ops[0].file = FILES;
}

static void bounds(uint32_t source)
{
    enum { BATCHES = 4, OPS = 8 };
    const akv_fault late = {.kind = -1, .action = AKV_FAULT_DELAY, .value = 20000, .every = 1, .times = UINT32_MAX};
    struct rig rig;
    struct load loads[BATCHES], large, small;
    int64_t tickets[BATCHES];
    rig_make(&rig, source);
    rig.options.max_batches = BATCHES;
    rig.options.max_requests = 3 * OPS + 2;
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig_start(&rig);
    load_make_direct(&large, 3 * OPS + 3, 0, PAGE);
    load_make_direct(&small, 1, 0, PAGE);
    for (uint32_t i = 0; i < BATCHES; i++)
        load_make_direct(&loads[i], i == 3 ? 2 : OPS, 0, PAGE);
    CHECK_EQ(load_submit(&rig, &large, AKV_READ), -E2BIG);
    for (int again = 0; again < 2; again++) {
        for (uint32_t i = 0; i < 3; i++)
            tickets[i] = load_submit(&rig, &loads[i], AKV_READ);
        CHECK_EQ(load_submit(&rig, &loads[2], AKV_READ), -EAGAIN); /* too many ops */
        tickets[3] = load_submit(&rig, &loads[3], AKV_READ);
        CHECK_EQ(load_submit(&rig, &small, AKV_READ), -EAGAIN); /* too many batches, and ops */
        CHECK_EQ(akv_engine_region(rig.engine, 0, AKV_REGION_ADD, (uintptr_t)small.memory, PAGE, 0), -EAGAIN);
        CHECK_EQ(rig_wait(&rig, tickets[0]).status, 0);
        CHECK_EQ(rig_wait(&rig, load_submit(&rig, &small, AKV_READ)).status, 0); /* a refusal took nothing */
        for (uint32_t i = 1; i < BATCHES; i++)
            CHECK_EQ(rig_wait(&rig, tickets[i]).status, 0);
    }
    rig_end(&rig);
    for (uint32_t i = 0; i < BATCHES; i++)
        load_free(&loads[i]);
    load_free(&large);
    load_free(&small);
}

/* Ends come in the order in which they happened, and what one drain leaves keeps the descriptor readable. */
static void drained_in_parts(uint32_t source)
{
    enum { BATCHES = 7 };
    struct rig rig;
    struct load load;
    akv_completion found;
    rig_make(&rig, source);
    rig_start(&rig);
    load_make_instant(&load);
    struct pollfd ready = {.fd = akv_engine_fileno(rig.engine), .events = POLLIN};
    CHECK_EQ(poll(&ready, 1, 0), 0);
    int64_t tickets[BATCHES];
    for (uint32_t i = 0; i < BATCHES; i++)
        tickets[i] = load_submit(&rig, &load, AKV_SYNC);
    for (uint32_t i = 0; i < BATCHES; i++) {
        CHECK_EQ(poll(&ready, 1, WAIT_MS), 1);
        while (akv_engine_drain(rig.engine, &found, 1) == 0)
            CHECK_EQ(poll(&ready, 1, WAIT_MS), 1);
        CHECK_EQ(found.ticket, tickets[i]);
        CHECK_EQ(found.status, -EINVAL);
    }
    CHECK_EQ(akv_engine_drain(rig.engine, &found, 1), 0);
    rig_end(&rig);
    load_free(&load);
}

static void poll_looks_for_ends(uint32_t source)
{
    const akv_fault late = {.kind = -1, .action = AKV_FAULT_DELAY, .value = 30000, .every = 1, .times = 2};
    struct rig rig;
    struct load load;
    akv_completion found;
    rig_make(&rig, source);
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig_start(&rig);
    load_make_direct(&load, 1, 0, PAGE);
    struct pollfd ready = {.fd = akv_engine_fileno(rig.engine), .events = POLLIN};
    int64_t began = now_ns();
    CHECK_EQ(akv_engine_poll(rig.engine, 2000), 0);
    CHECK(now_ns() - began >= 2000000);
    CHECK(load_submit(&rig, &load, AKV_READ) >= 0);
    CHECK_EQ(akv_engine_poll(rig.engine, 0), 0); /* late: not yet */
    CHECK_EQ(akv_engine_poll(rig.engine, 5000000), 1);
    CHECK_EQ(akv_engine_drain(rig.engine, &found, 1), 1);
    CHECK(load_submit(&rig, &load, AKV_READ) >= 0);
    CHECK_EQ(akv_engine_poll(rig.engine, 10), 0); /* an end after a poll that saw none is told by the descriptor */
    do /* the first end may be told once more, too late */
        CHECK_EQ(poll(&ready, 1, WAIT_MS), 1);
    while (akv_engine_drain(rig.engine, &found, 1) == 0);
    rig_end(&rig);
    load_free(&load);
}

/* The reactor is met in every state, from spinning to asleep. A lost wake of it shows as the wait of a tick (1 s), a lost
 * wake of ours as a timeout; a loaded machine alone does not keep a thread away for so long. */
static void no_wake_is_lost(uint32_t source)
{
    enum { ROUNDS = 6000, AHEAD = 2 };
    struct rig rig;
    struct load load;
    rig_make(&rig, source);
    for (uint32_t spin_us = 0; spin_us <= 20; spin_us += 20) {
        uint32_t random = 1, ahead = 0;
        rig.options.spin_us = spin_us;
        rig_start(&rig);
        load_make_instant(&load);
        struct pollfd ready = {.fd = akv_engine_fileno(rig.engine), .events = POLLIN};
        for (uint32_t round = 0; round < ROUNDS || ahead;) {
            akv_completion found[AHEAD];
            while (round < ROUNDS && ahead < AHEAD) { /* few: a further end would tell of the one not told */
                CHECK(load_submit(&rig, &load, AKV_SYNC) >= 0);
                round++;
                ahead++;
            }
            int64_t began = now_ns();
            if (round % 3 == 0)
                akv_engine_poll(rig.engine, round % 5 * 3);
            else
                CHECK_EQ(poll(&ready, 1, 5000), 1);
            ahead -= akv_engine_drain(rig.engine, found, AHEAD);
            CHECK(now_ns() - began < 800000000);
            random = random * 1664525 + 1013904223; /* Knuth and Lewis */
            for (volatile uint32_t idle = random >> 20; idle > 0; idle--)
                ;
        }
        load_free(&load);
        rig_close(&rig);
    }
    rig_close_files(&rig);
}

enum { ENDS = 1500 };

struct waiter {
    struct rig *rig;
    struct load load;
    uint32_t ring;
};

static void *submit_and_pause(void *argument)
{
    struct waiter *self = argument;
    for (uint32_t round = 0; round < ENDS;) {
        int64_t ticket = akv_engine_submit(self->rig->engine, self->ring, AKV_SYNC, 0, 0, self->load.ops, 1, NULL, 0,
                                           self->load.results, NULL);
        CHECK(ticket >= 0 || ticket == -EAGAIN);
        round += ticket >= 0;
        pause_us(round % 7 * 10);
    }
    return NULL;
}

/* Ends from two rings at once: their notices may fall together, and none may fall between. */
static void two_rings_tell(uint32_t source)
{
    struct rig rig;
    struct waiter waiters[2];
    pthread_t threads[2];
    rig_make(&rig, source);
    rig.options.rings = 2;
    rig_start(&rig);
    for (uint32_t i = 0; i < 2; i++) {
        waiters[i] = (struct waiter){.rig = &rig, .ring = i};
        load_make_instant(&waiters[i].load);
        CHECK_EQ(pthread_create(&threads[i], NULL, submit_and_pause, &waiters[i]), 0);
    }
    struct pollfd ready = {.fd = akv_engine_fileno(rig.engine), .events = POLLIN};
    akv_completion found[8];
    for (uint64_t drained = 0; drained < 2 * ENDS;) {
        CHECK_EQ(poll(&ready, 1, 5000), 1);
        int count = akv_engine_drain(rig.engine, found, 8);
        CHECK(count >= 0);
        drained += count;
    }
    for (uint32_t i = 0; i < 2; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    rig_end(&rig);
    for (uint32_t i = 0; i < 2; i++)
        load_free(&waiters[i].load);
}

int main(void)
{
    const struct test tests[] = {
        {"bounds", bounds},
        {"drained in parts", drained_in_parts},
        {"poll looks for ends", poll_looks_for_ends},
        {"no wake is lost", no_wake_is_lost},
        {"two rings tell", two_rings_tell},
        {0},
    };
    return run_tests(tests);
}
