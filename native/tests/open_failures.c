/* open_failures.c: an engine that cannot start leaves nothing behind: no descriptor, no thread, no memory. */
#include "check.h"

#include <dirent.h>
#include <sys/resource.h>

enum { ROUNDS = 200 };

static uint32_t count_entries(const char *path)
{
    uint32_t count = 0;
    DIR *folder = opendir(path);
    CHECK(folder);
    while (readdir(folder))
        count++;
    CHECK_EQ(closedir(folder), 0);
    return count;
}

static uint64_t mapped_nbytes(void)
{
    unsigned long long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%llu", &pages) == 1);
    fclose(file);
    return pages * PAGE;
}

static void refused(struct rig *rig, int32_t code, int32_t where)
{
    int32_t found_code = 1, found_where = -1;
    CHECK(!akv_engine_open(&rig->options, &found_code, &found_where));
    CHECK_EQ(found_code, code);
    CHECK_EQ(found_where, where);
}

/* The limit that leaves `room` free descriptors. */
static rlim_t limit_with_room(uint32_t room)
{
    int fd = 0;
    for (uint32_t free_fds = 0; free_fds <= room; fd++)
        free_fds += fcntl(fd, F_GETFD) < 0;
    return fd - 1;
}

/* With room for 0, 1, 2, ... descriptors each step of opening is the one that fails in its turn. */
static void without_descriptors(uint32_t source)
{
    struct rig rig;
    struct rlimit before, lowered;
    uint32_t wheres[8] = {0}, opened = 0;
    rig_make(&rig, source);
    rig.options.rings = 2;
    rig.options.threads = 2;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    uint32_t fds = count_entries("/proc/self/fd"), tasks = count_entries("/proc/self/task");
    uint64_t mapped = 0;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        int32_t code = 0, where = 0;
        lowered = (struct rlimit){limit_with_room(round % 6), before.rlim_max};
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &lowered), 0);
        akv_engine *engine = akv_engine_open(&rig.options, &code, &where);
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
        if (engine) {
            rig.engine = engine;
            rig_close(&rig);
            opened++;
        } else {
            CHECK_EQ(code, -EMFILE);
            wheres[where]++;
        }
        CHECK_EQ(count_entries("/proc/self/fd"), fds);
        if (round == ROUNDS / 2)
            mapped = mapped_nbytes(); /* by then allocators and sanitizers have what they want */
    }
    CHECK(wheres[AKV_AT_EVENTFD] > ROUNDS / 3 && opened > 0); /* a sanitizer may want a descriptor of its own, too */
    CHECK_EQ(wheres[AKV_AT_SETUP] > 0, source == AKV_SOURCE_URING);
    CHECK_EQ(count_entries("/proc/self/task"), tasks);
    CHECK(mapped_nbytes() < mapped + (32 << 20)); /* a slab each would be 200 MiB */
    rig_close_files(&rig);
}

static void bad_options(uint32_t source)
{
    struct rig rig;
    rig_make(&rig, source);
    const akv_options good = rig.options;
    const akv_fault faults[] = {
        {.every = 0, .times = 1},
        {.every = 1, .action = 4},
        {.every = 1, .action = AKV_FAULT_SHORT, .value = 0},
        {.every = 1, .action = AKV_FAULT_ERROR, .value = 5},
        {.every = 1, .action = AKV_FAULT_DELAY, .value = -5},
    };
    for (uint32_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        rig.options.faults = &faults[i];
        rig.options.fault_count = 1;
        refused(&rig, -EINVAL, AKV_AT_OPTIONS);
    }
#define REFUSED(field, value)                          \
    do {                                               \
        rig.options = good;                            \
        rig.options.field = (value);                   \
        refused(&rig, -EINVAL, AKV_AT_OPTIONS);        \
    } while (0)
    REFUSED(source, 2);
    REFUSED(rings, 0);
    REFUSED(rings, 65);
    REFUSED(queue_depth, 0);
    REFUSED(queue_depth, 4097);
    REFUSED(threads, source == AKV_SOURCE_THREADS ? 0 : 257);
    REFUSED(max_batches, 0);
    REFUSED(max_batches, 65537);
    REFUSED(max_requests, 0);
    REFUSED(small_nbytes, 511);
    REFUSED(small_nbytes, good.max_op_nbytes + 1);
    REFUSED(max_op_nbytes, (64 << 20) + 1);
    REFUSED(offset_alignment, 0);
    REFUSED(memory_alignment, 0);
    REFUSED(bulk_nbytes, 0);
    REFUSED(staging_nbytes, (2 << 20) - 1);
    REFUSED(staging_nbytes, (1ull << 40) + 1);
    REFUSED(fd_count, 0);
    REFUSED(fd_count, 65537);
    REFUSED(fds, NULL);
    REFUSED(fault_count, 1);
    REFUSED(spin_us, 10001);
    rig.options = good;
    rig.options.max_op_nbytes = 32 << 20; /* more than the slab */
    refused(&rig, -ENOMEM, AKV_AT_MEMORY);
    rig_close_files(&rig);
}

static void slab_sizes(uint32_t source)
{
    CHECK(!akv_slab_new(0));
    CHECK(!akv_slab_new(UINT64_MAX));
    CHECK(!akv_slab_new((1ull << 46) + 1));
    CHECK_EQ(akv_slab_free(NULL, 4096), -EINVAL);
    for (uint64_t nbytes = 1; nbytes < 10 << 20; nbytes = nbytes * 3 + 1) {
        uint8_t *slab = akv_slab_new(nbytes);
        CHECK(slab && (uintptr_t)slab % (2 << 20) == 0);
        CHECK(is_all(slab, 0, nbytes));
        slab[nbytes - 1] = 1;
        CHECK_EQ(akv_slab_free(slab, nbytes), 0);
    }
}

int main(void)
{
    const struct test tests[] = {
        {"without descriptors", without_descriptors},
        {"bad options", bad_options},
        {"slab sizes", slab_sizes},
        {0},
    };
    return run_tests(tests);
}
