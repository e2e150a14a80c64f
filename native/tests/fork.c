/* fork.c: a child gets -ECHILD from every call, none of the engine's memory, and leaves the parent undisturbed. */
#include "check.h"

#include <sys/mman.h>
#include <sys/wait.h>

enum { SLAB = 6 << 20 };

static bool is_mapped(const void *address)
{
    unsigned char state;
    return mincore((void *)address, PAGE, &state) == 0;
}

static int child(struct rig *rig, struct load *load, int64_t ticket, const uint8_t *slab)
{
    akv_completion found;
    akv_statistics statistics;
    akv_ring_info info;
    uint8_t record[64];
    akv_engine *e = rig->engine;
    const int64_t answers[] = {
        load_submit(rig, load, AKV_READ),
        akv_engine_region(e, 0, AKV_REGION_ADD, (uintptr_t)load->memory, PAGE, 0),
        akv_engine_drain(e, &found, 1),
        akv_engine_poll(e, 1000),
        akv_engine_rouse(e, 0),
        akv_engine_read_one(e, 0, 0, 0, 0, PAGE, load->memory, PAGE, record, sizeof record),
        akv_engine_cancel(e, ticket),
        akv_engine_stop(e),
        akv_engine_stopped(e),
        akv_engine_statistics(e, 0, &statistics),
        akv_engine_ring_info(e, 0, &info),
        akv_engine_fileno(e),
        akv_engine_free(e),
    };
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++)
        if (answers[i] != -ECHILD)
            return 10 + i;
    for (uint32_t at = 0; at < SLAB; at += 2 << 20)
        if (is_mapped(slab + at))
            return 9;
    return 0;
}

static void fork_with_reads_in_flight(uint32_t source)
{
    const akv_fault late = {.kind = -1, .action = AKV_FAULT_DELAY, .value = 5000, .every = 1, .times = UINT32_MAX};
    struct rig rig;
    struct load load;
    rig_make(&rig, source);
    rig.options.faults = &late;
    rig.options.fault_count = 1;
    rig_start(&rig);
    load_make_direct(&load, 64, 0, PAGE);
    uint8_t *slab = akv_slab_new(SLAB);
    CHECK(slab);
    slab[SLAB - 1] = 1;
    for (uint32_t round = 0; round < 5; round++) {
        memset(load.memory, 0xa5, 64 * PAGE);
        int64_t ticket = load_submit(&rig, &load, AKV_READ);
        while (rig_statistics(&rig).in_flight == 0)
            pause_us(50);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0)
            _exit(child(&rig, &load, ticket, slab));
        int status;
        CHECK_EQ(waitpid(pid, &status, 0), pid);
        CHECK(WIFEXITED(status));
        CHECK_EQ(WEXITSTATUS(status), 0);
        CHECK_EQ(rig_wait(&rig, ticket).status, 0);
        CHECK(holds(load.memory, 0, 0, 64 * PAGE));
    }
    CHECK(is_mapped(slab) && slab[SLAB - 1] == 1);
    CHECK_EQ(akv_slab_free(slab, SLAB), 0);
    rig_end(&rig);
    load_free(&load);
}

static void pinned_nbytes(uint64_t *nbytes)
{
    char line[256];
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status);
    *nbytes = 0;
    while (fgets(line, sizeof line, status)) {
        unsigned long long kib;
        if (sscanf(line, "VmPin: %llu kB", &kib) == 1)
            *nbytes = kib * 1024;
    }
    fclose(status);
}

/* A child holds a copy of the ring's descriptor. Closing must unpin the memory all the same. */
static void close_while_a_child_lives(uint32_t source)
{
    struct rig rig;
    uint64_t before, open, after;
    int pipes[2];
    rig_make(&rig, source);
    pinned_nbytes(&before);
    rig_start(&rig);
    pinned_nbytes(&open);
    CHECK_EQ(pipe(pipes), 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        char byte;
        CHECK_EQ(close(pipes[1]), 0);
        CHECK_EQ(read(pipes[0], &byte, 1), 0); /* until the parent has looked */
        _exit(0);
    }
    rig_end(&rig);
    pinned_nbytes(&after);
    if (open == before)
        printf("  nothing is pinned here, nothing to see\n");
    CHECK_EQ(after, before);
    CHECK_EQ(close(pipes[0]) | close(pipes[1]), 0);
    CHECK_EQ(waitpid(pid, NULL, 0), pid);
}

int main(void)
{
    const struct test tests[] = {
        {"fork with reads in flight", fork_with_reads_in_flight},
        {"close while a child lives", close_while_a_child_lives},
        {0},
    };
    return run_tests(tests);
}
