/* staging.c: staging slots are lent to one op at a time, from before its I/O until after its copy. */
#include "check.h"

enum { SMALL = 4096, BULK = 131072 };

/* Slots are few and each answer is late, so a slot that came back too early would be another op's by the time of the
 * copy. The slab of 2 MiB holds 32 small and 14 bulk slots at most. */
static void more_ops_than_slots(uint32_t source)
{
    enum { COUNT = 320 };
    const akv_fault late = {.kind = -1, .action = AKV_FAULT_REORDER, .value = 2000, .every = 1, .times = UINT32_MAX};
    struct rig rig;
    struct load load;
    rig_make(&rig, source);
    rig.options.queue_depth = 64;
    rig.options.bulk_nbytes = 1 << 30;
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig_start(&rig);
    load_make(&load, COUNT, COUNT);
    load.memory = new_memory((uint64_t)COUNT * SMALL);
    for (uint32_t i = 0; i < COUNT; i++) {
        uint32_t nbytes = i % 4 ? SMALL : BULK;
        load.ops[i] = copied_op(AKV_STAGED, i % FILES, (uint64_t)(i % 60) * BULK, nbytes, i, 1);
        load.copies[i] = copy_of(load.memory + (uint64_t)i * SMALL, nbytes - SMALL, SMALL);
    }
    CHECK_EQ(load_run(&rig, &load, AKV_READ).status, 0);
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK(holds(load.memory + (uint64_t)i * SMALL, i % FILES,
                    (uint64_t)(i % 60) * BULK + load.ops[i].nbytes - SMALL, SMALL));
    akv_statistics end = rig_statistics(&rig);
    CHECK_EQ(end.slots_leased, 0);
    CHECK_EQ(end.bytes_staged, (uint64_t)COUNT * SMALL);
    rig_end(&rig);
    load_free(&load);
}

/* A write's slot holds its bytes until the device has them. */
static void writes_share_slots(uint32_t source)
{
    enum { COUNT = 128 };
    const akv_fault faults[] = {
        {.kind = AKV_WRITE, .action = AKV_FAULT_ERROR, .value = -EAGAIN, .every = 3, .times = UINT32_MAX},
        {.kind = AKV_WRITE, .action = AKV_FAULT_REORDER, .value = 1000, .every = 1, .times = UINT32_MAX},
    };
    struct rig rig;
    struct load load;
    rig_make(&rig, source);
    rig.options.faults = faults;
    rig.options.fault_count = 2;
    rig_start(&rig);
    load_make(&load, COUNT, COUNT);
    load.memory = new_memory((uint64_t)COUNT * SMALL);
    fill(load.memory, 7, 0, (uint64_t)COUNT * SMALL);
    for (uint32_t i = 0; i < COUNT; i++) {
        load.ops[i] = copied_op(AKV_STAGED, 0, (uint64_t)i * 2 * SMALL, SMALL, i, 1);
        load.copies[i] = copy_of(load.memory + (uint64_t)i * SMALL, 0, SMALL);
    }
    CHECK_EQ(load_run(&rig, &load, AKV_WRITE).status, 0);
    uint8_t *found = new_memory(2 * SMALL);
    for (uint32_t i = 0; i < COUNT; i++) {
        CHECK_EQ(pread(rig.fds[0], found, 2 * SMALL, (uint64_t)i * 2 * SMALL), 2 * SMALL);
        CHECK(holds(found, 7, (uint64_t)i * SMALL, SMALL));
        CHECK(holds(found + SMALL, 0, (uint64_t)(i * 2 + 1) * SMALL, SMALL));
    }
    rig_end(&rig);
    free(found);
    load_free(&load);
}

/* Failed, cancelled and late ops give their slots back as well. */
static void every_end_returns_its_slot(uint32_t source)
{
    enum { COUNT = 200, ROUNDS = 12 };
    const akv_fault faults[] = {
        {.kind = -1, .action = AKV_FAULT_ERROR, .value = -EIO, .every = 5, .times = UINT32_MAX},
        {.kind = -1, .action = AKV_FAULT_ERROR, .value = 0, .every = 7, .times = UINT32_MAX},
        {.kind = -1, .action = AKV_FAULT_ERROR, .value = -EINTR, .every = 3, .times = UINT32_MAX},
        {.kind = -1, .action = AKV_FAULT_DELAY, .value = 100, .every = 1, .times = UINT32_MAX},
    };
    struct rig rig;
    rig_make(&rig, source);
    rig.options.faults = faults;
    rig.options.fault_count = 4;
    rig_start(&rig);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        struct load load;
        load_make(&load, COUNT, COUNT);
        load.memory = new_memory((uint64_t)COUNT * 512);
        for (uint32_t i = 0; i < COUNT; i++) {
            load.ops[i] = copied_op(AKV_STAGED, 0, (uint64_t)(i % 32) * BULK, i % 2 ? SMALL : BULK, i, 1);
            load.copies[i] = copy_of(load.memory + i * 512, 0, 512);
        }
        load.copies[17].op_offset = BULK; /* refused at its start */
        load.deadline_ns = round % 3 == 1 ? now_ns() + 1000000 : 0;
        int64_t ticket = load_submit(&rig, &load, round % 2 ? AKV_READ : AKV_WRITE);
        if (round % 3 == 2)
            CHECK_EQ(akv_engine_cancel(rig.engine, ticket), 0);
        CHECK(rig_wait(&rig, ticket).failed > 0);
        akv_statistics now = rig_statistics(&rig);
        CHECK_EQ(now.slots_leased, 0);
        CHECK_EQ(now.in_flight, 0);
        load_free(&load);
    }
    rig_end(&rig);
}

/* Slots beyond the registered part of the slab, and a slab the ring does not know at all, work the same. */
static void smallest_slab(uint32_t source)
{
    struct rig rig;
    struct load load;
    rig_make(&rig, source);
    rig.options.max_op_nbytes = 1 << 20;
    rig.options.queue_depth = 8;
    rig_start(&rig);
    load_make(&load, 16, 16);
    load.memory = new_memory(16 * SMALL);
    for (uint32_t i = 0; i < 16; i++) { /* a single bulk slot */
        load.ops[i] = copied_op(AKV_STAGED, i % FILES, (uint64_t)(i % 7) << 20, 1 << 20, i, 1);
        load.copies[i] = copy_of(load.memory + i * SMALL, i * SMALL, SMALL);
    }
    CHECK_EQ(load_run(&rig, &load, AKV_READ).status, 0);
    for (uint32_t i = 0; i < 16; i++)
        CHECK(holds(load.memory + i * SMALL, i % FILES, ((uint64_t)(i % 7) << 20) + i * SMALL, SMALL));
    rig_end(&rig);
    load_free(&load);
}

int main(void)
{
    const struct test tests[] = {
        {"more ops than slots", more_ops_than_slots},
        {"writes share slots", writes_share_slots},
        {"every end returns its slot", every_end_returns_its_slot},
        {"smallest slab", smallest_slab},
        {0},
    };
    return run_tests(tests);
}
