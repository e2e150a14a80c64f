/* round_trip.c: what is written can be read again, on both sources, in every placement. */
#include "check.h"

enum { COUNT = 24, STEP = 40960 }; /* a gap between ops, so that a stray byte hits a place that is looked at */

static void read_direct(uint32_t source)
{
    struct rig rig;
    struct load load;
    rig_make(&rig, source);
    rig_start(&rig);
    uint8_t *memory = new_memory((uint64_t)COUNT * STEP);
    load_make(&load, COUNT, 0);
    for (uint32_t i = 0; i < COUNT; i++) /* both lanes, both files */
        load.ops[i] = direct_op(i % FILES, (uint64_t)i * STEP, memory + i * STEP, i % 3 ? PAGE : 32768);
    akv_completion done = load_run(&rig, &load, AKV_READ);
    CHECK_EQ(done.status, 0);
    CHECK_EQ(done.failed, 0);
    for (uint32_t i = 0; i < COUNT; i++) {
        uint32_t nbytes = load.ops[i].nbytes;
        CHECK_EQ(load.results[i].code, 0);
        CHECK_EQ(load.results[i].nbytes, nbytes);
        CHECK(holds(memory + i * STEP, i % FILES, (uint64_t)i * STEP, nbytes));
        CHECK(is_all(memory + i * STEP + nbytes, 0xa5, STEP - nbytes));
    }
    akv_statistics now = rig_statistics(&rig);
    CHECK_EQ(now.ops, COUNT);
    CHECK_EQ(now.bytes_read, 8 * 32768 + 16 * PAGE);
    CHECK_EQ(now.bytes_staged, 0);
    rig_end(&rig);
    load_free(&load);
    free(memory);
}

static void read_staged(uint32_t source)
{
    struct rig rig;
    struct load load;
    rig_make(&rig, source);
    rig_start(&rig);
    uint8_t *memory = new_memory((uint64_t)COUNT * STEP);
    load_make(&load, COUNT, 2 * COUNT);
    for (uint32_t i = 0; i < COUNT; i++) { /* two odd pieces of each op, the later one first */
        load.ops[i] = copied_op(AKV_STAGED, i % FILES, (uint64_t)i * STEP, i % 3 ? PAGE : 32768, 2 * i, 2);
        load.copies[2 * i] = copy_of(memory + i * STEP + 5000, 1501, 999);
        load.copies[2 * i + 1] = copy_of(memory + i * STEP + 3, 7, 1000);
    }
    CHECK_EQ(load_run(&rig, &load, AKV_READ).status, 0);
    for (uint32_t i = 0; i < COUNT; i++) {
        uint8_t *place = memory + i * STEP;
        uint64_t offset = (uint64_t)i * STEP;
        CHECK(holds(place + 3, i % FILES, offset + 7, 1000));
        CHECK(holds(place + 5000, i % FILES, offset + 1501, 999));
        CHECK(is_all(place, 0xa5, 3) && is_all(place + 1003, 0xa5, 3997) && is_all(place + 5999, 0xa5, STEP - 5999));
    }
    CHECK_EQ(rig_statistics(&rig).bytes_staged, COUNT * 1999);
    rig_end(&rig);
    load_free(&load);
    free(memory);
}

static void read_vectored(uint32_t source)
{
    enum { PIECES = 128, PIECE = 1024 };
    struct rig rig;
    struct load load;
    rig_make(&rig, source);
    rig_start(&rig);
    uint8_t *memory = new_memory(2 * PIECES * PIECE);
    load_make(&load, 1, PIECES);
    load.ops[0] = copied_op(AKV_VECTORED, 1, PAGE, PIECES * PIECE, 0, PIECES);
    for (uint32_t i = 0; i < PIECES; i++) /* scattered backwards */
        load.copies[i] = copy_of(memory + (uint64_t)(PIECES - 1 - i) * 2 * PIECE, i * PIECE, PIECE);
    CHECK_EQ(load_run(&rig, &load, AKV_READ).status, 0);
    for (uint32_t i = 0; i < PIECES; i++) {
        uint8_t *place = memory + (uint64_t)(PIECES - 1 - i) * 2 * PIECE;
        CHECK(holds(place, 1, PAGE + (uint64_t)i * PIECE, PIECE));
        CHECK(is_all(place + PIECE, 0xa5, PIECE));
    }
    rig_end(&rig);
    load_free(&load);
    free(memory);
}

static void check_file(struct rig *rig, uint32_t file, uint64_t offset, const uint8_t *wanted, uint64_t nbytes)
{
    uint8_t *found = new_memory(nbytes);
    CHECK_EQ(pread(rig->fds[file], found, nbytes, offset), nbytes);
    CHECK(memcmp(found, wanted, nbytes) == 0);
    free(found);
}

/* What no copy covers becomes zeros, in whatever order the copies come; the bytes around the op stay. */
static void write_staged(uint32_t source)
{
    struct rig rig;
    rig_make(&rig, source);
    rig_start(&rig);
    uint8_t *memory = new_memory(PAGE), *wanted = new_memory(4 * PAGE);
    fill(memory, 9, 0, PAGE);
    fill(wanted, 0, PAGE, PAGE);
    memset(wanted + PAGE, 0, 2 * PAGE);
    fill(wanted + 3 * PAGE, 0, 4 * PAGE, PAGE);
    memcpy(wanted + PAGE + 5000, memory, 1000);
    memcpy(wanted + PAGE + 100, memory + 1000, 200);
    memcpy(wanted + PAGE + 250, memory + 1200, 200); /* over the end of the one before */
    const akv_copy copies[] = {copy_of(memory, 5000, 1000), copy_of(memory + 1000, 100, 200),
                               copy_of(memory + 1200, 250, 200)};
    for (int round = 0; round < 8; round++) { /* slots hold other bytes by then */
        CHECK_EQ(op_run(&rig, AKV_WRITE, copied_op(AKV_STAGED, 0, 2 * PAGE, 2 * PAGE, 0, 3), copies, 3).code, 0);
        check_file(&rig, 0, PAGE, wanted, 4 * PAGE);
        akv_copy whole = copy_of(memory, 0, PAGE);
        CHECK_EQ(op_run(&rig, AKV_WRITE, copied_op(AKV_STAGED, 1, 0, PAGE, 0, 1), &whole, 1).code, 0);
        check_file(&rig, 1, 0, memory, PAGE);
    }
    CHECK_EQ(op_run(&rig, AKV_WRITE, copied_op(AKV_STAGED, 0, 2 * PAGE, 2 * PAGE, 0, 0), NULL, 0).code, 0);
    memset(wanted + PAGE, 0, 2 * PAGE);
    check_file(&rig, 0, PAGE, wanted, 4 * PAGE);
    rig_end(&rig);
    free(wanted);
    free(memory);
}

static void write_direct_and_vectored(uint32_t source)
{
    struct rig rig;
    rig_make(&rig, source);
    rig_start(&rig);
    uint8_t *memory = new_memory(8 * PAGE), *wanted = new_memory(8 * PAGE);
    fill(memory, 9, 0, 8 * PAGE);
    fill(wanted, 1, 0, PAGE);
    memcpy(wanted + PAGE, memory, 2 * PAGE);
    memcpy(wanted + 3 * PAGE, memory + 6 * PAGE, PAGE);
    memcpy(wanted + 4 * PAGE, memory + 4 * PAGE, 2 * PAGE);
    fill(wanted + 6 * PAGE, 1, 6 * PAGE, 2 * PAGE);
    const akv_copy copies[] = {copy_of(memory + 6 * PAGE, 0, PAGE), copy_of(memory + 4 * PAGE, PAGE, 2 * PAGE)};
    CHECK_EQ(op_run(&rig, AKV_WRITE, direct_op(1, PAGE, memory, 2 * PAGE), NULL, 0).code, 0);
    CHECK_EQ(op_run(&rig, AKV_WRITE, copied_op(AKV_VECTORED, 1, 3 * PAGE, 3 * PAGE, 0, 2), copies, 2).code, 0);
    CHECK_EQ(op_run(&rig, AKV_SYNC, direct_op(1, 0, NULL, 0), NULL, 0).code, 0);
    check_file(&rig, 1, 0, wanted, 8 * PAGE);
    CHECK_EQ(rig_statistics(&rig).bytes_written, 5 * PAGE);
    rig_end(&rig);
    free(wanted);
    free(memory);
}

/* Every flag that takes something away from the ring leaves one that works, spinning or not. */
static void flags(uint32_t source)
{
    const uint32_t sets[] = {0, AKV_NO_FIXED, AKV_NO_DEFER, AKV_NO_COOP, AKV_SCHED_BATCH, AKV_NO_COOP | AKV_NO_FIXED};
    struct rig rig;
    rig_make(&rig, source);
    uint8_t *memory = new_memory(PAGE);
    akv_copy copy = copy_of(memory, 0, PAGE);
    for (uint32_t i = 0; i < 2 * sizeof sets / sizeof *sets; i++) {
        rig.options.flags = sets[i / 2];
        rig.options.spin_us = i % 2 * 50;
        rig_start(&rig);
        for (uint32_t n = 0; n < 20; n++) {
            akv_op op = copied_op(AKV_STAGED, n % FILES, (uint64_t)n * PAGE, PAGE, 0, 1);
            CHECK_EQ(op_run(&rig, AKV_READ, op, &copy, 1).code, 0);
            CHECK(holds(memory, n % FILES, (uint64_t)n * PAGE, PAGE));
        }
        akv_ring_info info;
        CHECK_EQ(akv_engine_ring_info(rig.engine, 0, &info), 0);
        CHECK(info.registered_nbytes == 0 || !(rig.options.flags & AKV_NO_FIXED));
        rig_close(&rig);
    }
    rig_close_files(&rig);
    free(memory);
}

/* A batch larger than the flights, the submission queue and the completion queue, on several rings at once. */
static void more_than_fits(uint32_t source)
{
    enum { RINGS = 2, MANY = 2000 };
    struct rig rig;
    struct load loads[RINGS];
    int64_t tickets[RINGS];
    rig_make(&rig, source);
    rig.options.rings = RINGS;
    rig_start(&rig);
    uint8_t *memory = new_memory((uint64_t)MANY * 512);
    for (uint32_t ring = 0; ring < RINGS; ring++) {
        load_make(&loads[ring], MANY / RINGS, MANY / RINGS);
        for (uint32_t i = 0; i < MANY / RINGS; i++) {
            uint32_t at = i * RINGS + ring;
            loads[ring].ops[i] = copied_op(AKV_STAGED, at % FILES, (uint64_t)(at % 1024) * PAGE, PAGE, i, 1);
            loads[ring].copies[i] = copy_of(memory + (uint64_t)at * 512, 16, 512);
        }
        tickets[ring] = akv_engine_submit(rig.engine, ring, AKV_READ, 0, 0, loads[ring].ops, loads[ring].op_count,
                                          loads[ring].copies, loads[ring].copy_count, loads[ring].results, NULL);
    }
    for (uint32_t ring = 0; ring < RINGS; ring++)
        CHECK_EQ(rig_wait(&rig, tickets[ring]).status, 0);
    for (uint32_t at = 0; at < MANY; at++)
        CHECK(holds(memory + (uint64_t)at * 512, at % FILES, (uint64_t)(at % 1024) * PAGE + 16, 512));
    CHECK(rig_statistics(&rig).in_flight_max <= RINGS * rig.options.queue_depth);
    rig_end(&rig);
    for (uint32_t ring = 0; ring < RINGS; ring++)
        load_free(&loads[ring]);
    free(memory);
}

int main(void)
{
    const struct test tests[] = {
        {"read direct", read_direct},
        {"read staged", read_staged},
        {"read vectored", read_vectored},
        {"write staged", write_staged},
        {"write direct and vectored", write_direct_and_vectored},
        {"flags", flags},
        {"more than fits", more_than_fits},
        {0},
    };
    return run_tests(tests);
}
