/* limits.c: the engine holds so much and no more, and says so; drain and poll give what has ended. */
#include "check.h"

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
    load_make_instant(&load, 1);
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

int main(void)
{
    const struct test tests[] = {
        {"bounds", bounds},
        {"drained in parts", drained_in_parts},
        {"poll looks for ends", poll_looks_for_ends},
        {0},
    };
    return run_tests(tests);
}
