/* regions.c: landing regions: added and removed while I/O is in flight, and everything that is refused. */
#include "check.h"

enum { REGION = 64 * PAGE };

static int32_t command(struct rig *rig, uint32_t kind, const void *memory, uint64_t nbytes)
{
    return rig_wait(rig, akv_engine_region(rig->engine, 0, kind, (uintptr_t)memory, nbytes, 0)).status;
}

static void refused_on_threads(uint32_t source)
{
    struct rig rig;
    rig_make(&rig, source);
    rig_start(&rig);
    uint8_t *memory = new_memory(REGION);
    CHECK_EQ(command(&rig, AKV_REGION_ADD, memory, REGION), -EOPNOTSUPP);
    CHECK_EQ(command(&rig, AKV_REGION_REMOVE, memory, REGION), -ENOENT);
    CHECK_EQ(op_run(&rig, AKV_READ, direct_op(0, 0, memory, PAGE), NULL, 0).code, 0);
    CHECK(holds(memory, 0, 0, PAGE));
    rig_end(&rig);
    free(memory);
}

static void read_at(struct rig *rig, uint8_t *place, uint64_t offset, uint32_t nbytes, uint64_t fixed_ops)
{
    uint64_t before = rig_statistics(rig).fixed_ops;
    memset(place, 0xa5, nbytes);
    CHECK_EQ(op_run(rig, AKV_READ, direct_op(1, offset, place, nbytes), NULL, 0).code, 0);
    CHECK(holds(place, 1, offset, nbytes));
    CHECK_EQ(rig_statistics(rig).fixed_ops - before, fixed_ops);
}

static void lands_in_registered_memory(uint32_t source)
{
    struct rig rig;
    rig_make(&rig, source);
    rig_start(&rig);
    uint8_t *memory = new_memory(4 * REGION), *region = memory + REGION;
    read_at(&rig, region, 0, PAGE, 0);
    CHECK_EQ(command(&rig, AKV_REGION_ADD, region, REGION), 0);
    CHECK_EQ(command(&rig, AKV_REGION_ADD, region + REGION, REGION), 0);
    read_at(&rig, region, 0, PAGE, 1);
    read_at(&rig, region + REGION - PAGE, PAGE, PAGE, 1);
    read_at(&rig, region + REGION - PAGE, 2 * PAGE, 2 * PAGE, 0); /* in two regions: neither covers it */
    read_at(&rig, region - PAGE, 4 * PAGE, 2 * PAGE, 0);
    read_at(&rig, region + 2 * REGION - PAGE, PAGE, 2 * PAGE, 0);
    read_at(&rig, region + 2 * REGION, PAGE, PAGE, 0);
    fill(region + PAGE, 8, 0, PAGE);
    CHECK_EQ(op_run(&rig, AKV_WRITE, direct_op(0, 0, region + PAGE, PAGE), NULL, 0).code, 0);
    CHECK_EQ(op_run(&rig, AKV_READ, direct_op(0, 0, region, PAGE), NULL, 0).code, 0);
    CHECK(holds(region, 8, 0, PAGE));
    CHECK_EQ(command(&rig, AKV_REGION_REMOVE, region, REGION), 0);
    read_at(&rig, region, 0, PAGE, 0);
    read_at(&rig, region + REGION, 0, PAGE, 1);
    CHECK_EQ(command(&rig, AKV_REGION_REMOVE, region + REGION, REGION), 0);
    CHECK_EQ(command(&rig, AKV_REGION_REMOVE, region + REGION, REGION), -ENOENT);
    rig_end(&rig);
    free(memory);
}

static void refused(uint32_t source)
{
    enum { ROOM = 255, RING_ROOM = 1024 };
    struct rig rig;
    rig_make(&rig, source);
    rig_start(&rig);
    uint8_t *memory = new_memory((uint64_t)(ROOM + 1) * PAGE);
    CHECK_EQ(command(&rig, AKV_REGION_ADD, NULL, PAGE), -EINVAL);
    CHECK_EQ(command(&rig, AKV_REGION_ADD, memory, 0), -EINVAL);
    CHECK_EQ(command(&rig, AKV_REGION_ADD, memory, UINT64_MAX), -EINVAL);
    CHECK_EQ(command(&rig, AKV_REGION_ADD, memory, UINT64_MAX - (uintptr_t)memory), -ENOSPC);
    CHECK_EQ(command(&rig, AKV_REGION_ADD, memory, (uint64_t)RING_ROOM << 30), -ENOSPC);
    CHECK_EQ(command(&rig, AKV_REGION_ADD, (void *)PAGE, PAGE), -EFAULT);
    CHECK_EQ(command(&rig, AKV_REGION_ADD, (void *)PAGE, 5ull << 30), -EFAULT); /* in pieces, none of them kept */
    for (int again = 0; again < 2; again++) { /* every place can be used again */
        for (uint32_t i = 0; i < ROOM; i++)
            CHECK_EQ(command(&rig, AKV_REGION_ADD, memory + i * PAGE, PAGE), 0);
        CHECK_EQ(command(&rig, AKV_REGION_ADD, memory, PAGE), -EEXIST);
        CHECK_EQ(command(&rig, AKV_REGION_ADD, memory + ROOM * PAGE, PAGE), -ENOSPC);
        CHECK_EQ(command(&rig, AKV_REGION_REMOVE, memory, 2 * PAGE), -ENOENT);
        read_at(&rig, memory + (ROOM - 1) * PAGE, 0, PAGE, 1);
        for (uint32_t i = 0; i < ROOM; i++)
            CHECK_EQ(command(&rig, AKV_REGION_REMOVE, memory + i * PAGE, PAGE), 0);
    }
    rig_end(&rig);
    free(memory);
}

/* REMOVE waits for what is in flight on its region, and for nothing else; meanwhile the region lends no more. */
static void removal_waits(uint32_t source)
{
    const akv_fault late = {.kind = AKV_READ, .action = AKV_FAULT_DELAY, .value = 40000, .every = 1, .times = 1};
    struct rig rig;
    rig_make(&rig, source);
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig_start(&rig);
    uint8_t *memory = new_memory(2 * REGION);
    akv_op op = direct_op(0, 0, memory, PAGE);
    akv_result result;
    CHECK_EQ(command(&rig, AKV_REGION_ADD, memory, REGION), 0);
    CHECK_EQ(command(&rig, AKV_REGION_ADD, memory + REGION, REGION), 0);
    int64_t read = akv_engine_submit(rig.engine, 0, AKV_READ, 0, 0, &op, 1, NULL, 0, &result, NULL);
    while (rig_statistics(&rig).in_flight == 0)
        pause_us(50);
    int64_t remove = akv_engine_region(rig.engine, 0, AKV_REGION_REMOVE, (uintptr_t)memory, REGION, 0);
    CHECK_EQ(command(&rig, AKV_REGION_REMOVE, memory + REGION, REGION), 0);
    CHECK_EQ(rig.done_count, 0); /* the other region went at once */
    CHECK_EQ(command(&rig, AKV_REGION_REMOVE, memory, REGION), -ENOENT);
    CHECK_EQ(akv_engine_cancel(rig.engine, remove), 0); /* not to be cancelled: it has begun */
    read_at(&rig, memory + PAGE, PAGE, PAGE, 0);
    CHECK_EQ(rig.done_count, 0);
    CHECK_EQ(command(&rig, AKV_REGION_ADD, memory, REGION), 0); /* a new one, before the old one is gone */
    CHECK_EQ(rig.done_count, 0);
    while (rig.done_count < 2)
        rig_collect(&rig);
    CHECK_EQ(rig.done[0].ticket, read);
    CHECK_EQ(rig.done[1].ticket, remove);
    CHECK_EQ(rig.done[1].status, 0);
    CHECK(holds(memory, 0, 0, PAGE));
    read_at(&rig, memory, 0, PAGE, 1);
    rig_end(&rig); /* an open region does not keep the engine from closing */
    free(memory);
}

/* Regions come and go under the reads of others and their own, in whatever order the two are begun. */
static void churn(uint32_t source)
{
    enum { ROUNDS = 60, OPS = 16, AHEAD = 4 };
    const akv_fault late = {.kind = AKV_READ, .action = AKV_FAULT_REORDER, .value = 500, .every = 2,
                            .times = UINT32_MAX};
    struct rig rig;
    struct load loads[AHEAD];
    int64_t reads[AHEAD], removals[AHEAD];
    rig_make(&rig, source);
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig_start(&rig);
    for (uint32_t round = 0; round < ROUNDS + AHEAD; round++) {
        struct load *load = &loads[round % AHEAD];
        if (round >= AHEAD) {
            CHECK_EQ(rig_wait(&rig, removals[round % AHEAD]).status, 0);
            CHECK_EQ(rig_wait(&rig, reads[round % AHEAD]).status, 0);
            for (uint32_t i = 0; i < OPS; i++)
                CHECK(holds(load->memory + i * PAGE, 1, i * PAGE, PAGE));
            load_free(load);
        }
        if (round >= ROUNDS)
            continue;
        load_make_direct(load, OPS, 1, PAGE);
        int64_t add = akv_engine_region(rig.engine, 0, AKV_REGION_ADD, (uintptr_t)load->memory, OPS * PAGE, 0);
        uint64_t begun = rig_statistics(&rig).ops;
        reads[round % AHEAD] = load_submit(&rig, load, AKV_READ);
        while (round % 2 && rig_statistics(&rig).ops == begun) /* every other removal meets a read under way */
            pause_us(20);
        removals[round % AHEAD] =
            akv_engine_region(rig.engine, 0, AKV_REGION_REMOVE, (uintptr_t)load->memory, OPS * PAGE, 0);
        CHECK_EQ(rig_wait(&rig, add).status, 0);
    }
    CHECK(rig_statistics(&rig).fixed_ops > 0);
    rig_end(&rig);
}

/* A stop answers a removal that still waits. */
static void stop_answers_removals(uint32_t source)
{
    const akv_fault late = {.kind = AKV_READ, .action = AKV_FAULT_DELAY, .value = 20000, .every = 1, .times = 4};
    struct rig rig;
    struct load load;
    rig_make(&rig, source);
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig_start(&rig);
    load_make_direct(&load, 4, 0, PAGE);
    CHECK_EQ(command(&rig, AKV_REGION_ADD, load.memory, 4 * PAGE), 0);
    int64_t read = load_submit(&rig, &load, AKV_READ);
    while (rig_statistics(&rig).in_flight < 4)
        pause_us(50);
    int64_t remove = akv_engine_region(rig.engine, 0, AKV_REGION_REMOVE, (uintptr_t)load.memory, 4 * PAGE, 0);
    CHECK_EQ(akv_engine_stop(rig.engine), 0);
    CHECK_EQ(rig_wait(&rig, remove).status, 0);
    CHECK_EQ(rig_wait(&rig, read).status, 0);
    rig_end(&rig);
    load_free(&load);
}

/* Registered memory is charged to RLIMIT_MEMLOCK, which may be tiny. */
static bool may_register(void)
{
    struct rig rig;
    rig_make(&rig, AKV_SOURCE_URING);
    rig_start(&rig);
    uint8_t *memory = new_memory(2 << 20);
    int32_t code = command(&rig, AKV_REGION_ADD, memory, 2 << 20);
    rig_end(&rig);
    free(memory);
    if (code)
        printf("skipped: registering 2 MiB beside the staging memory: %s (ulimit -l)\n", strerror(-code));
    return code == 0;
}

int main(void)
{
    const struct test refusal[] = {{"refused on threads", refused_on_threads}, {0}};
    const struct test tests[] = {
        {"lands in registered memory", lands_in_registered_memory},
        {"refused", refused},
        {"removal waits", removal_waits},
        {"churn", churn},
        {"stop answers removals", stop_answers_removals},
        {0},
    };
    run_tests_on(AKV_SOURCE_THREADS, refusal);
    if (!has_uring() || !may_register())
        return SKIPPED;
    run_tests_on(AKV_SOURCE_URING, tests);
    return 0;
}
