/* stop.c: closing with everything in flight, and how long an op may wait: stop, free, deadlines. */
#include "check.h"

/* Everything ends with an answer, what had begun with its bytes; afterwards nothing is written. */
static void stop_with_everything_in_flight(uint32_t source)
{
    enum { BATCHES = 12, OPS = 64 };
    const akv_fault late = {.kind = -1, .action = AKV_FAULT_REORDER, .value = 8000, .every = 1, .times = UINT32_MAX};
    struct rig rig;
    struct load loads[BATCHES];
    int64_t tickets[BATCHES];
    rig_make(&rig, source);
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig.options.rings = 2;
    rig_start(&rig);
    for (uint32_t i = 0; i < BATCHES; i++) {
        load_make_direct(&loads[i], OPS, i % FILES, i % 3 ? PAGE : 32768);
        for (uint32_t n = 0; i % 2 && n < OPS; n++) { /* half of them staged */
            akv_op *op = &loads[i].ops[n];
            loads[i].copies = realloc(loads[i].copies, OPS * sizeof(akv_copy));
            loads[i].copies[n] = copy_of((void *)(uintptr_t)op->address, 0, op->nbytes);
            *op = copied_op(AKV_STAGED, op->file, op->file_offset, op->nbytes, n, 1);
            loads[i].copy_count = OPS;
        }
    }
    for (uint32_t i = 0; i < BATCHES; i++)
        tickets[i] = akv_engine_submit(rig.engine, i % 2, AKV_READ, i % 3, 0, loads[i].ops, OPS, loads[i].copies,
                                       loads[i].copy_count, loads[i].results, NULL);
    pause_us(1000);
    CHECK_EQ(akv_engine_stop(rig.engine), 0);
    CHECK_EQ(load_submit(&rig, &loads[0], AKV_READ), -ESHUTDOWN);
    CHECK_EQ(akv_engine_region(rig.engine, 0, AKV_REGION_ADD, PAGE, PAGE, 0), -ESHUTDOWN);
    if (!akv_engine_stopped(rig.engine))
        CHECK_EQ(akv_engine_free(rig.engine), -EBUSY);
    for (uint32_t i = 0; i < BATCHES; i++) {
        akv_completion done = rig_wait(&rig, tickets[i]);
        for (uint32_t n = 0; n < OPS; n++) {
            akv_result result = loads[i].results[n];
            const uint8_t *place = loads[i].memory + (uint64_t)n * loads[i].ops[n].nbytes;
            CHECK(result.code == 0 || result.code == -ECANCELED);
            CHECK(result.code ? is_all(place, 0xa5, loads[i].ops[n].nbytes)
                              : holds(place, i % FILES, loads[i].ops[n].file_offset, loads[i].ops[n].nbytes));
            done.failed -= result.code != 0;
        }
        CHECK_EQ(done.failed, 0);
        load_free(&loads[i]); /* at once: a sanitizer sees whoever still writes there */
    }
    CHECK(rig_statistics(&rig).dropped_ops > 0);
    rig_end(&rig);
}

/* Real writes of a real device, stopped half way: each op is there as a whole or not at all. */
static void stop_in_the_middle_of_writes(uint32_t source)
{
    enum { OPS = 60, NBYTES = 131072 };
    struct rig rig;
    struct load load;
    rig_make(&rig, source);
    rig_start(&rig);
    load_make_direct(&load, OPS, 0, NBYTES);
    fill(load.memory, 6, 0, (uint64_t)OPS * NBYTES);
    int64_t ticket = load_submit(&rig, &load, AKV_WRITE);
    while (rig_statistics(&rig).bytes_written == 0)
        pause_us(20);
    CHECK_EQ(akv_engine_stop(rig.engine), 0);
    rig_wait(&rig, ticket);
    uint8_t *found = new_memory(NBYTES);
    uint32_t written = 0;
    for (uint32_t n = 0; n < OPS; n++) {
        CHECK_EQ(pread(rig.fds[0], found, NBYTES, (uint64_t)n * NBYTES), NBYTES);
        CHECK(holds(found, load.results[n].code ? 0 : 6, (uint64_t)n * NBYTES, NBYTES));
        written += load.results[n].code == 0;
    }
    CHECK(written > 0);
    rig_end(&rig);
    free(found);
    load_free(&load);
}

/* Opened, used for a moment and closed, over and over: nothing hangs, whatever the moment. */
static void many_short_lives(uint32_t source)
{
    struct rig rig;
    rig_make(&rig, source);
    for (uint32_t life = 0; life < 60; life++) {
        struct load load;
        rig.options.queue_depth = 1 + life % 8;
        rig.options.spin_us = life % 2 ? 0 : 50;
        rig_start(&rig);
        load_make_direct(&load, 16, 0, life % 3 ? PAGE : 131072);
        int64_t ticket = life % 4 ? load_submit(&rig, &load, AKV_READ) : 0;
        CHECK(ticket >= 0);
        if (life % 5 == 4)
            CHECK_EQ(akv_engine_cancel(rig.engine, ticket), life % 4 ? 0 : -ENOENT);
        if (life % 5 > 2)
            pause_us(life * 10);
        rig_close(&rig); /* drains what is left */
        load_free(&load);
    }
    rig_close_files(&rig);
}

struct hammer {
    struct rig *rig;
    struct load load;
    _Atomic uint32_t taken;
};

static void *submit_until_refused(void *argument)
{
    struct hammer *self = argument;
    for (;;) {
        int64_t ticket = load_submit(self->rig, &self->load, AKV_SYNC); /* all write one result, nobody reads it */
        CHECK(ticket >= 0 || ticket == -EAGAIN || ticket == -ESHUTDOWN);
        if (ticket == -ESHUTDOWN)
            return NULL;
        self->taken += ticket >= 0;
    }
}

/* Every batch that was taken comes out again, also those that came in while the engine stopped. */
static void stop_while_others_submit(uint32_t source)
{
    const akv_fault instant = {.kind = AKV_SYNC, .action = AKV_FAULT_ERROR, .value = -EIO, .every = 1,
                               .times = UINT32_MAX};
    struct rig rig;
    rig_make(&rig, source);
    rig.options.max_batches = 8;
    rig.options.faults = &instant;
    rig.options.fault_count = 1;
    for (uint32_t round = 0; round < 60; round++) {
        struct hammer hammers[2];
        pthread_t threads[2];
        uint32_t drained = 0;
        akv_completion found[16];
        rig_start(&rig);
        for (uint32_t i = 0; i < 2; i++) {
            hammers[i] = (struct hammer){.rig = &rig};
            load_make(&hammers[i].load, 1, 0);
            CHECK_EQ(pthread_create(&threads[i], NULL, submit_until_refused, &hammers[i]), 0);
        }
        for (int64_t until = now_ns() + 1000000; now_ns() < until;)
            drained += akv_engine_drain(rig.engine, found, 16);
        CHECK_EQ(akv_engine_stop(rig.engine), 0);
        for (uint32_t i = 0; i < 2; i++)
            CHECK_EQ(pthread_join(threads[i], NULL), 0);
        while (!akv_engine_stopped(rig.engine))
            pause_us(50);
        for (int count; (count = akv_engine_drain(rig.engine, found, 16)) > 0;)
            drained += count;
        CHECK_EQ(drained, hammers[0].taken + hammers[1].taken);
        rig_close(&rig);
        for (uint32_t i = 0; i < 2; i++)
            load_free(&hammers[i].load);
    }
    rig_close_files(&rig);
}

/* What has not begun by its deadline is answered then, also when nothing else wakes the reactor. */
static void deadlines(uint32_t source)
{
    enum { OPS = 40 };
    const akv_fault late = {.kind = -1, .action = AKV_FAULT_DELAY, .value = 400000, .every = 1, .times = UINT32_MAX};
    struct rig rig;
    struct load load, patient;
    rig_make(&rig, source);
    rig.options.queue_depth = 8;
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig_start(&rig);
    load_make_direct(&load, OPS, 0, PAGE);
    load_make_direct(&patient, OPS / 4, 1, PAGE);
    load.deadline_ns = now_ns() + 30000000;
    patient.deadline_ns = now_ns() + 3600ll * 1000000000;
    int64_t first = load_submit(&rig, &load, AKV_READ), second = load_submit(&rig, &patient, AKV_READ);
    while (rig_statistics(&rig).dropped_ops == 0)
        pause_us(100);
    CHECK(now_ns() - load.deadline_ns < 300000000); /* at the time, not when the next answer happens to come */
    akv_completion done = rig_wait(&rig, first);
    CHECK_EQ(done.status, -ETIME);
    CHECK_EQ(done.failed, OPS - 8);
    CHECK(now_ns() - load.deadline_ns < 2000000000ll); /* those in flight were waited for, and nothing longer */
    for (uint32_t i = 0; i < OPS; i++) {
        CHECK_EQ(load.results[i].code, i < 8 ? 0 : -ETIME);
        CHECK_EQ(load.results[i].nbytes, i < 8 ? PAGE : 0);
        CHECK(i < 8 ? holds(load.memory + i * PAGE, 0, i * PAGE, PAGE) : is_all(load.memory + i * PAGE, 0xa5, PAGE));
    }
    CHECK_EQ(rig_wait(&rig, second).status, 0);
    load.deadline_ns = 1; /* long past: nothing begins */
    CHECK_EQ(load_run(&rig, &load, AKV_READ).failed, OPS);
    CHECK_EQ(rig_statistics(&rig).dropped_ops, OPS - 8 + OPS);
    rig_end(&rig);
    load_free(&load);
    load_free(&patient);
}

int main(void)
{
    const struct test tests[] = {
        {"stop with everything in flight", stop_with_everything_in_flight},
        {"stop in the middle of writes", stop_in_the_middle_of_writes},
        {"many short lives", many_short_lives},
        {"stop while others submit", stop_while_others_submit},
        {"deadlines", deadlines},
        {0},
    };
    return run_tests(tests);
}
