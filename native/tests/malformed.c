/* malformed.c: whatever a caller hands over, the answer is an errno and no byte is written where it should not be. */
#include "check.h"

enum { GUARD = 4 * PAGE, TARGET = 16 * PAGE, MANY = 129 };

struct bad {
    akv_op op;
    int32_t code;
};

static void refused_calls(uint32_t source)
{
    struct rig rig;
    struct load load;
    akv_completion done;
    rig_make(&rig, source);
    rig_start(&rig);
    load_make_direct(&load, 2, 0, PAGE);
    akv_engine *e = rig.engine;
    CHECK_EQ(akv_engine_submit(e, 1, AKV_READ, 0, 0, load.ops, 2, NULL, 0, load.results, NULL), -EINVAL);
    CHECK_EQ(akv_engine_submit(e, 0, AKV_REGION_ADD, 0, 0, load.ops, 2, NULL, 0, load.results, NULL), -EINVAL);
    CHECK_EQ(akv_engine_submit(e, 0, UINT32_MAX, 0, 0, load.ops, 2, NULL, 0, load.results, NULL), -EINVAL);
    CHECK_EQ(akv_engine_submit(e, 0, AKV_READ, 3, 0, load.ops, 2, NULL, 0, load.results, NULL), -EINVAL);
    CHECK_EQ(akv_engine_submit(e, 0, AKV_READ, 0, -1, load.ops, 2, NULL, 0, load.results, NULL), -EINVAL);
    CHECK_EQ(akv_engine_submit(e, 0, AKV_READ, 0, 0, load.ops, 0, NULL, 0, load.results, NULL), -EINVAL);
    CHECK_EQ(akv_engine_submit(e, 0, AKV_READ, 0, 0, NULL, 2, NULL, 0, load.results, NULL), -EINVAL);
    CHECK_EQ(akv_engine_submit(e, 0, AKV_READ, 0, 0, load.ops, 2, NULL, 0, NULL, NULL), -EINVAL);
    CHECK_EQ(akv_engine_submit(e, 0, AKV_READ, 0, 0, load.ops, 2, NULL, 1, load.results, NULL), -EINVAL);
    CHECK_EQ(akv_engine_submit(e, 0, AKV_READ, 0, 0, load.ops, 4097, NULL, 0, load.results, NULL), -E2BIG);
    uint8_t record[sizeof(akv_op) + sizeof(akv_result) + sizeof(akv_copy)];
    CHECK_EQ(akv_engine_read_one(e, 0, 0, 0, 0, PAGE, NULL, PAGE, record, sizeof record), -EINVAL);
    CHECK_EQ(akv_engine_read_one(e, 0, 0, 0, 0, PAGE, load.memory, 0, record, sizeof record), -EINVAL);
    CHECK_EQ(akv_engine_read_one(e, 0, 0, 0, 0, PAGE, load.memory, PAGE + 1, record, sizeof record), -EINVAL);
    CHECK_EQ(akv_engine_read_one(e, 0, 0, 0, 0, PAGE, load.memory, PAGE, NULL, sizeof record), -EINVAL);
    CHECK_EQ(akv_engine_read_one(e, 0, 0, 0, 0, PAGE, load.memory, PAGE, record, sizeof record - 1), -EINVAL);
    CHECK_EQ(akv_engine_read_one(e, 1, 0, 0, 0, PAGE, load.memory, PAGE, record, sizeof record), -EINVAL);
    CHECK_EQ(akv_engine_read_one(e, 0, 3, 0, 0, PAGE, load.memory, PAGE, record, sizeof record), -EINVAL);
    CHECK_EQ(akv_engine_region(e, 1, AKV_REGION_ADD, PAGE, PAGE, 0), -EINVAL);
    CHECK_EQ(akv_engine_region(e, 0, AKV_READ, PAGE, PAGE, 0), -EINVAL);
    CHECK_EQ(akv_engine_drain(e, NULL, 1), -EINVAL);
    CHECK_EQ(akv_engine_drain(e, NULL, 0), 0);
    CHECK_EQ(akv_engine_drain(e, &done, 1), 0);
    CHECK_EQ(akv_engine_statistics(e, 1, &(akv_statistics){0}), -EINVAL);
    CHECK_EQ(akv_engine_statistics(e, 0, NULL), -EINVAL);
    CHECK_EQ(akv_engine_ring_info(e, 1, &(akv_ring_info){0}), -EINVAL);
    CHECK_EQ(akv_engine_ring_info(e, 0, NULL), -EINVAL);
    CHECK_EQ(rig_statistics(&rig).batches, 0);
    rig_end(&rig);
    load_free(&load);
}

/* Each bad op between two good ones, which must not notice. */
static void run_bad_ops(struct rig *rig, uint32_t kind, const struct bad *bad, uint32_t count, const akv_copy *copies,
                        uint32_t copy_count)
{
    struct load load;
    load_make(&load, 2 * count + 1, 0);
    load.memory = new_memory((uint64_t)(count + 1) * PAGE);
    for (uint32_t i = 0; i <= count; i++) {
        bool is_sync = kind == AKV_SYNC;
        load.ops[2 * i] = direct_op(0, is_sync ? 0 : i * PAGE, load.memory + i * PAGE, is_sync ? 0 : PAGE);
        if (i < count)
            load.ops[2 * i + 1] = bad[i].op;
    }
    if (kind == AKV_WRITE)
        fill(load.memory, 0, 0, (uint64_t)(count + 1) * PAGE);
    int64_t ticket = akv_engine_submit(rig->engine, 0, kind, 0, 0, load.ops, load.op_count, copies, copy_count,
                                       load.results, NULL);
    CHECK_EQ(rig_wait(rig, ticket).failed, count);
    for (uint32_t i = 0; i <= count; i++) {
        CHECK_EQ(load.results[2 * i].code, 0);
        CHECK(kind == AKV_SYNC || holds(load.memory + i * PAGE, 0, i * PAGE, PAGE));
        if (i < count && load.results[2 * i + 1].code != bad[i].code)
            fprintf(stderr, "bad op %u of kind %u: ", i, kind);
        if (i < count)
            CHECK_EQ(load.results[2 * i + 1].code, bad[i].code);
    }
    load_free(&load);
}

static void refused_ops(uint32_t source)
{
    struct rig rig;
    rig_make(&rig, source);
    rig_start(&rig);
    uint8_t *memory = new_memory(GUARD + TARGET + GUARD), *target = memory + GUARD;
    akv_copy copies[4 + MANY] = {
        copy_of(target, 0, PAGE), copy_of(target + PAGE, 2 * PAGE, PAGE), /* a gap between them */
        copy_of(target, PAGE, PAGE), copy_of(target + PAGE, UINT32_MAX, UINT32_MAX),
    };
    for (uint32_t i = 0; i < MANY; i++)
        copies[4 + i] = copy_of(target + i * 512, i * 512, 512);
    const struct bad bad[] = {
        {direct_op(FILES, 0, target, PAGE), -EINVAL},
        {direct_op(UINT32_MAX, 0, target, PAGE), -EINVAL},
        {direct_op(0, 0, target, 0), -EINVAL},
        {direct_op(0, 0, target, 131072 + PAGE), -EINVAL},
        {direct_op(0, 0, target, UINT32_MAX / PAGE * PAGE), -EINVAL},
        {direct_op(0, UINT64_MAX / PAGE * PAGE, target, PAGE), -EINVAL},
        {direct_op(0, INT64_MAX / PAGE * PAGE, target, 2 * PAGE), -EINVAL},
        {direct_op(0, 0, NULL, PAGE), -EFAULT},
        {copied_op(3, 0, 0, PAGE, 0, 1), -EINVAL},
        {copied_op(AKV_STAGED, 0, 0, PAGE, 1, 1), -EINVAL},
        {copied_op(AKV_STAGED, 0, 0, PAGE, 3, 1), -EINVAL},
        {copied_op(AKV_STAGED, 0, 0, PAGE, 4 + MANY, 1), -EINVAL},
        {copied_op(AKV_STAGED, 0, 0, PAGE, 0, UINT32_MAX), -EINVAL},
        {copied_op(AKV_STAGED, 0, 0, PAGE, UINT32_MAX, 2), -EINVAL}, /* 1 in 32 bits */
        {copied_op(AKV_VECTORED, 0, 0, PAGE, 0, 0), -EINVAL},
        {copied_op(AKV_VECTORED, 0, 0, 3 * PAGE, 0, 2), -EINVAL}, /* with a gap */
        {copied_op(AKV_VECTORED, 0, 0, PAGE, 2, 1), -EINVAL}, /* not from the start */
        {copied_op(AKV_VECTORED, 0, 0, 2 * PAGE, 0, 1), -EINVAL}, /* not to the end */
        {copied_op(AKV_VECTORED, 0, 0, MANY * 512 - 512, 4, MANY), -EINVAL},
        {copied_op(AKV_VECTORED, 0, 0, MANY * 512 / PAGE * PAGE, 4, MANY), -EINVAL},
        {copied_op(AKV_VECTORED, 0, 0, PAGE, 3, 1), -EINVAL},
    };
    run_bad_ops(&rig, AKV_READ, bad, sizeof bad / sizeof *bad, copies, 4 + MANY);
    run_bad_ops(&rig, AKV_WRITE, bad, sizeof bad / sizeof *bad, copies, 4 + MANY);
    const struct bad bad_syncs[] = {
        {direct_op(FILES, 0, NULL, 0), -EINVAL},
        {direct_op(0, 0, target, PAGE), -EINVAL},
        {copied_op(AKV_STAGED, 0, 0, 0, 0, 0), -EINVAL},
    };
    run_bad_ops(&rig, AKV_SYNC, bad_syncs, 3, copies, 4 + MANY);
    if (rig.options.offset_alignment > 1) {
        const akv_copy odd[] = {copy_of(target + 1, 0, PAGE)};
        const struct bad misaligned[] = {
            {direct_op(0, 512, target, PAGE), -EINVAL},
            {direct_op(0, 0, target, 512), -EINVAL},
            {direct_op(0, 0, target + 1, PAGE), -EINVAL},
            {copied_op(AKV_STAGED, 0, 0, PAGE + 512, 0, 0), -EINVAL},
            {copied_op(AKV_VECTORED, 0, 0, PAGE, 0, 1), -EINVAL},
        };
        run_bad_ops(&rig, AKV_READ, misaligned, 5, odd, 1);
        run_bad_ops(&rig, AKV_WRITE, misaligned, 5, odd, 1);
    }
    CHECK(is_all(memory, 0xa5, GUARD + TARGET + GUARD));
    uint8_t *found = new_memory(FILE_NBYTES);
    CHECK_EQ(pread(rig.fds[0], found, FILE_NBYTES, 0), FILE_NBYTES);
    CHECK(holds(found, 0, 0, FILE_NBYTES));
    rig_end(&rig);
    free(found);
    free(memory);
}

/* The engine reads an op once and trusts none of what it reads again: changing ops and copies while they are in use
 * may spoil the caller's own bytes, but never the engine. The addresses stay good. */
static void ops_that_change_under_way(uint32_t source)
{
    enum { OPS = 64, NBYTES = 32768 };
    const akv_fault late = {.kind = -1, .action = AKV_FAULT_REORDER, .value = 300, .every = 2, .times = UINT32_MAX};
    struct rig rig;
    if (IS_THREAD_SANITIZED) /* it is a race, on purpose */
        return;
    rig_make(&rig, source);
    rig.options.queue_depth = 4;
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig_start(&rig);
    for (uint32_t round = 0; round < 12; round++) {
        struct load load;
        load_make(&load, OPS, OPS);
        load.memory = new_memory((uint64_t)OPS * NBYTES);
        for (uint32_t i = 0; i < OPS; i++) {
            load.ops[i] = copied_op(AKV_STAGED, 0, 0, i % 2 ? PAGE : NBYTES, i, 1);
            load.copies[i] = copy_of(load.memory + (uint64_t)i * NBYTES, 0, load.ops[i].nbytes);
        }
        int64_t ticket = load_submit(&rig, &load, round % 2 ? AKV_READ : AKV_WRITE);
        for (uint32_t i = 0; i < 40 * OPS; i++) {
            uint32_t victim = i * 7 % OPS;
            __atomic_store_n(&load.ops[victim].nbytes, i % 3 ? NBYTES : PAGE, __ATOMIC_RELAXED);
            __atomic_store_n(&load.copies[victim].op_offset, i % 5 * PAGE, __ATOMIC_RELAXED);
        }
        if (round % 3 == 0)
            CHECK_EQ(akv_engine_cancel(rig.engine, ticket), 0);
        rig_wait(&rig, ticket);
        CHECK_EQ(rig_statistics(&rig).slots_leased, 0);
        CHECK_EQ(rig_statistics(&rig).in_flight, 0);
        load_free(&load);
    }
    rig_end(&rig);
}

/* A copy list that is spoilt between its check and its use is not followed out of the slot. */
static void copies_that_change_under_way(uint32_t source)
{
    const akv_fault late = {.kind = -1, .action = AKV_FAULT_DELAY, .value = 10000, .every = 1, .times = UINT32_MAX};
    struct rig rig;
    if (IS_THREAD_SANITIZED) /* it is a race, on purpose */
        return;
    rig_make(&rig, source);
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig_start(&rig);
    uint8_t *memory = new_memory(PAGE);
    akv_copy copy = copy_of(memory, 0, PAGE);
    akv_op op = copied_op(AKV_STAGED, 0, 0, PAGE, 0, 1);
    akv_result result;
    int64_t ticket = akv_engine_submit(rig.engine, 0, AKV_READ, 0, 0, &op, 1, &copy, 1, &result, NULL);
    while (rig_statistics(&rig).in_flight == 0)
        pause_us(50);
    __atomic_store_n(&copy.op_offset, 3u << 30, __ATOMIC_RELAXED);
    CHECK_EQ(rig_wait(&rig, ticket).status, 0);
    CHECK(is_all(memory, 0xa5, PAGE));
    rig_end(&rig);
    free(memory);
}

int main(void)
{
    const struct test tests[] = {
        {"refused calls", refused_calls},
        {"refused ops", refused_ops},
        {"ops that change under way", ops_that_change_under_way},
        {"copies that change under way", copies_that_change_under_way},
        {0},
    };
    return run_tests(tests);
}
