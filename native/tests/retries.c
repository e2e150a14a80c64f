/* retries.c: what is made of answers that are short, empty, interrupted or wrong. */
#include "check.h"

enum { LENGTH = 16 * PAGE };

static void start(struct rig *rig, uint32_t source, const akv_fault *faults, uint32_t fault_count)
{
    rig_make(rig, source);
    rig->options.faults = faults;
    rig->options.fault_count = fault_count;
    rig_start(rig);
}

static akv_fault rule(int32_t kind, uint32_t action, int32_t value, uint32_t times)
{
    return (akv_fault){.kind = kind, .action = action, .value = value, .every = 1, .times = times};
}

/* One read in each placement; the pieces of the vectored one differ in size and lie elsewhere. */
static void read_all_ways(struct rig *rig, int32_t code)
{
    uint8_t *memory = new_memory(LENGTH);
    const akv_copy pieces[] = {copy_of(memory + 10 * PAGE, 0, 5 * PAGE), copy_of(memory + 15 * PAGE, 5 * PAGE, PAGE),
                               copy_of(memory, 6 * PAGE, 2 * PAGE), copy_of(memory + 2 * PAGE, 8 * PAGE, 8 * PAGE)};
    const akv_copy whole = copy_of(memory, 0, LENGTH);
    akv_result direct = op_run(rig, AKV_READ, direct_op(0, LENGTH, memory, LENGTH), NULL, 0);
    CHECK_EQ(direct.code, code);
    CHECK_EQ(direct.nbytes == LENGTH, code == 0);
    if (code == 0)
        CHECK(holds(memory, 0, LENGTH, LENGTH));
    memset(memory, 0xa5, LENGTH);
    CHECK_EQ(op_run(rig, AKV_READ, copied_op(AKV_STAGED, 1, 0, LENGTH, 0, 1), &whole, 1).code, code);
    CHECK(code ? is_all(memory, 0xa5, LENGTH) : holds(memory, 1, 0, LENGTH));
    memset(memory, 0xa5, LENGTH);
    CHECK_EQ(op_run(rig, AKV_READ, copied_op(AKV_VECTORED, 1, 0, LENGTH, 0, 4), pieces, 4).code, code);
    if (code == 0) {
        CHECK(holds(memory + 10 * PAGE, 1, 0, 6 * PAGE));
        CHECK(holds(memory, 1, 6 * PAGE, 2 * PAGE));
        CHECK(holds(memory + 2 * PAGE, 1, 8 * PAGE, 8 * PAGE));
    }
    free(memory);
}

static void write_and_check(struct rig *rig, uint64_t offset)
{
    uint8_t *memory = new_memory(LENGTH), *found = new_memory(LENGTH);
    fill(memory, 5, offset, LENGTH);
    const akv_copy whole = copy_of(memory, 0, LENGTH);
    CHECK_EQ(op_run(rig, AKV_WRITE, direct_op(0, offset, memory, LENGTH), NULL, 0).code, 0);
    CHECK_EQ(op_run(rig, AKV_WRITE, copied_op(AKV_STAGED, 1, offset, LENGTH, 0, 1), &whole, 1).code, 0);
    for (uint32_t file = 0; file < FILES; file++) {
        CHECK_EQ(pread(rig->fds[file], found, LENGTH, offset), LENGTH);
        CHECK(memcmp(found, memory, LENGTH) == 0);
    }
    free(memory);
    free(found);
}

static void short_answers_resume(uint32_t source)
{
    const int32_t sizes[] = {PAGE, 3 * PAGE, LENGTH - PAGE};
    for (uint32_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const akv_fault fault = rule(-1, AKV_FAULT_SHORT, sizes[i], UINT32_MAX);
        struct rig rig;
        start(&rig, source, &fault, 1);
        read_all_ways(&rig, 0);
        write_and_check(&rig, 2 * LENGTH);
        CHECK_EQ(rig_statistics(&rig).resumed_ops, 5 * ((LENGTH - 1) / sizes[i]));
        CHECK_EQ(rig_statistics(&rig).retried_ops, 0);
        rig_end(&rig);
    }
}

/* A short answer at an odd place: a direct file takes no such length, so a buffered one gives it. The next ask starts
 * at the boundary before it, and the overlap comes twice. */
static void odd_answers_resume_at_a_boundary(uint32_t source)
{
    const akv_fault fault = rule(-1, AKV_FAULT_SHORT, PAGE + 700, UINT32_MAX);
    struct rig rig;
    rig_make(&rig, source);
    for (uint32_t file = 0; file < FILES; file++) {
        CHECK_EQ(close(rig.fds[file]), 0);
        rig.fds[file] = open_file(file, false);
    }
    rig.options.offset_alignment = PAGE;
    rig.options.faults = &fault;
    rig.options.fault_count = 1;
    rig_start(&rig);
    read_all_ways(&rig, 0);
    write_and_check(&rig, 3 * LENGTH);
    CHECK_EQ(rig_statistics(&rig).resumed_ops, 5 * 15); /* a page at a time, the last ask is whole */
    rig_end(&rig);
}

/* Answers that bring nothing new do not go on for ever. */
static void stutter_ends(uint32_t source)
{
    const akv_fault fault = {.kind = -1, .action = AKV_FAULT_SHORT, .value = 700, .every = 1, .times = UINT32_MAX};
    struct rig rig;
    rig_make(&rig, source);
    for (uint32_t file = 0; file < FILES; file++) {
        CHECK_EQ(close(rig.fds[file]), 0);
        rig.fds[file] = open_file(file, false);
    }
    rig.options.offset_alignment = PAGE;
    rig.options.faults = &fault;
    rig.options.fault_count = 1;
    rig_start(&rig);
    uint8_t *memory = new_memory(PAGE);
    akv_result result = op_run(&rig, AKV_READ, direct_op(0, 0, memory, PAGE), NULL, 0);
    CHECK_EQ(result.code, -ENODATA);
    CHECK_EQ(result.nbytes, 700);
    CHECK_EQ(op_run(&rig, AKV_WRITE, direct_op(0, 0, memory, PAGE), NULL, 0).code, -EIO);
    CHECK_EQ(rig_statistics(&rig).retried_ops, 16);
    rig_end(&rig);
    free(memory);
}

static void interruptions_are_repeated(uint32_t source)
{
    const int32_t codes[] = {-EINTR, -EAGAIN};
    for (uint32_t i = 0; i < 2; i++)
        for (uint32_t times = 1; times <= 9; times += 8) { /* one too many for the first op, and none for the others */
            const akv_fault fault = rule(AKV_READ, AKV_FAULT_ERROR, codes[i], times);
            struct rig rig;
            start(&rig, source, &fault, 1);
            uint8_t *memory = new_memory(PAGE);
            CHECK_EQ(op_run(&rig, AKV_READ, direct_op(0, 0, memory, PAGE), NULL, 0).code, times == 9 ? codes[i] : 0);
            CHECK_EQ(rig_statistics(&rig).retried_ops, times == 9 ? 8 : 1);
            read_all_ways(&rig, 0);
            CHECK_EQ(rig_statistics(&rig).faults, times);
            rig_end(&rig);
            free(memory);
        }
}

static void errors_come_through(uint32_t source)
{
    const int32_t codes[] = {-EIO, -ENOSPC, -ENXIO, 0};
    for (uint32_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        const akv_fault fault = rule(-1, AKV_FAULT_ERROR, codes[i], UINT32_MAX);
        struct rig rig;
        start(&rig, source, &fault, 1);
        read_all_ways(&rig, codes[i] ? codes[i] : -ENODATA);
        uint8_t *memory = new_memory(PAGE);
        CHECK_EQ(op_run(&rig, AKV_WRITE, direct_op(0, 0, memory, PAGE), NULL, 0).code, codes[i] ? codes[i] : -EIO);
        CHECK_EQ(op_run(&rig, AKV_SYNC, direct_op(0, 0, NULL, 0), NULL, 0).code, codes[i]);
        CHECK_EQ(rig_statistics(&rig).failed_ops, codes[i] ? 5 : 4);
        rig_end(&rig);
        free(memory);
    }
}

/* Only the op that the fault met is told to have failed. */
static void one_failure_among_many(uint32_t source)
{
    const akv_fault fault = {.kind = AKV_READ, .action = AKV_FAULT_ERROR, .value = -EIO, .every = 10, .phase = 3,
                             .times = 3};
    struct rig rig;
    struct load load;
    start(&rig, source, &fault, 1);
    load_make_direct(&load, 64, 0, PAGE);
    akv_completion done = load_run(&rig, &load, AKV_READ);
    CHECK_EQ(done.status, -EIO);
    CHECK_EQ(done.failed, 3);
    for (uint32_t i = 0; i < 64; i++) {
        CHECK_EQ(load.results[i].code, i == 3 || i == 13 || i == 23 ? -EIO : 0);
        CHECK(load.results[i].code || holds(load.memory + (uint64_t)i * PAGE, 0, (uint64_t)i * PAGE, PAGE));
    }
    rig_end(&rig);
    load_free(&load);
}

static void end_of_file(uint32_t source)
{
    struct rig rig;
    start(&rig, source, NULL, 0);
    uint8_t *memory = new_memory(LENGTH);
    akv_result past = op_run(&rig, AKV_READ, direct_op(0, FILE_NBYTES, memory, PAGE), NULL, 0);
    CHECK_EQ(past.code, -ENODATA);
    CHECK_EQ(past.nbytes, 0);
    akv_result across = op_run(&rig, AKV_READ, direct_op(0, FILE_NBYTES - 2 * PAGE, memory, LENGTH), NULL, 0);
    CHECK_EQ(across.code, -ENODATA);
    CHECK_EQ(across.nbytes, 2 * PAGE);
    CHECK(holds(memory, 0, FILE_NBYTES - 2 * PAGE, 2 * PAGE));
    CHECK_EQ(ftruncate(rig.fds[0], FILE_NBYTES - PAGE - 100), 0); /* an end inside a page */
    across = op_run(&rig, AKV_READ, direct_op(0, FILE_NBYTES - 4 * PAGE, memory, LENGTH), NULL, 0);
    CHECK_EQ(across.code, -ENODATA);
    CHECK_EQ(across.nbytes, 3 * PAGE - 100);
    CHECK_EQ(op_run(&rig, AKV_WRITE, direct_op(0, FILE_NBYTES, memory, LENGTH), NULL, 0).code, 0); /* files may grow */
    rig_end(&rig);
    free(memory);
}

/* Answers in another order than the asks: each still finds its own op. */
static void reordered_answers(uint32_t source)
{
    const akv_fault fault = rule(-1, AKV_FAULT_REORDER, 3000, UINT32_MAX);
    struct rig rig;
    struct load load;
    rig_make(&rig, source);
    rig.options.faults = &fault;
    rig.options.fault_count = 1;
    rig.options.fault_seed = 42;
    rig_start(&rig);
    load_make_direct(&load, 256, 1, PAGE);
    CHECK_EQ(load_run(&rig, &load, AKV_READ).status, 0);
    for (uint32_t i = 0; i < 256; i++)
        CHECK(holds(load.memory + (uint64_t)i * PAGE, 1, (uint64_t)i * PAGE, PAGE));
    CHECK_EQ(rig_statistics(&rig).faults, 256);
    rig_end(&rig);
    load_free(&load);
}

int main(void)
{
    const struct test tests[] = {
        {"short answers resume", short_answers_resume},
        {"odd answers resume at a boundary", odd_answers_resume_at_a_boundary},
        {"stutter ends", stutter_ends},
        {"interruptions are repeated", interruptions_are_repeated},
        {"errors come through", errors_come_through},
        {"one failure among many", one_failure_among_many},
        {"end of file", end_of_file},
        {"reordered answers", reordered_answers},
        {0},
    };
    return run_tests(tests);
}
