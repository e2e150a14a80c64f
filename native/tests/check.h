/* check.h: what the C tests share: checks, an engine on temporary files of known content, and waiting for tickets.
 *
 * A test is one program: status 0 is success, 77 "cannot run here" with the reason printed, anything else a failure.
 * Each topic runs on both sources; where the system refuses io_uring it runs on threads alone and says so. */
#ifndef AKV_CHECK_H
#define AKV_CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "akv.h"

#define CHECK(condition) check_that((condition), #condition, __FILE__, __LINE__)
#define CHECK_EQ(found, wanted) check_equal((int64_t)(found), (int64_t)(wanted), #found, __FILE__, __LINE__)
#define UNUSED __attribute__((unused))

#if defined(__SANITIZE_THREAD__)
#define IS_THREAD_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define IS_THREAD_SANITIZED 1
#endif
#endif
#ifndef IS_THREAD_SANITIZED
#define IS_THREAD_SANITIZED 0
#endif

enum { FILES = 2, FILE_NBYTES = 8 << 20, PAGE = 4096, SKIPPED = 77, WAIT_MS = 20000 };

static UNUSED void check_that(bool is_true, const char *text, const char *file, int line)
{
    if (!is_true) {
        fflush(stdout);
        fprintf(stderr, "%s:%d: not true: %s\n", file, line, text);
        _exit(1);
    }
}

static UNUSED void check_equal(int64_t found, int64_t wanted, const char *text, const char *file, int line)
{
    if (found != wanted) {
        fflush(stdout);
        fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", file, line, text, (long long)found, (long long)wanted);
        _exit(1);
    }
}

static UNUSED int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static UNUSED void pause_us(long microseconds)
{
    struct timespec pause = {microseconds / 1000000, microseconds % 1000000 * 1000};
    while (nanosleep(&pause, &pause))
        ;
}

/* The content of the files: every eight bytes (little-endian) tell their file and place. splitmix64, public domain (S. Vigna). */
static UNUSED uint64_t word_at(uint32_t file, uint64_t index)
{
    uint64_t z = (index + 1) * 0x9e3779b97f4a7c15ull + file;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static UNUSED void fill(void *memory, uint32_t file, uint64_t offset, uint64_t nbytes)
{
    uint8_t *bytes = memory;
    for (uint64_t i = 0; i < nbytes;) {
        uint64_t word = word_at(file, (offset + i) / 8), skip = (offset + i) % 8;
        uint64_t count = nbytes - i < 8 - skip ? nbytes - i : 8 - skip;
        memcpy(bytes + i, (uint8_t *)&word + skip, count);
        i += count;
    }
}

static UNUSED bool holds(const void *memory, uint32_t file, uint64_t offset, uint64_t nbytes)
{
    uint8_t *wanted = malloc(nbytes);
    fill(wanted, file, offset, nbytes);
    bool is_same = memcmp(memory, wanted, nbytes) == 0;
    free(wanted);
    return is_same;
}

static UNUSED bool is_all(const void *memory, uint8_t value, uint64_t nbytes)
{
    const uint8_t *bytes = memory;
    for (uint64_t i = 0; i < nbytes; i++)
        if (bytes[i] != value)
            return false;
    return true;
}

static UNUSED void *new_memory(uint64_t nbytes)
{
    void *memory = aligned_alloc(PAGE, nbytes);
    CHECK(memory);
    memset(memory, 0xa5, nbytes);
    return memory;
}

/* An engine, its files, and the completions that nobody has asked for yet. */
struct rig {
    akv_engine *engine;
    akv_options options;
    int fds[FILES];
    akv_completion *done;
    uint32_t done_count;
};

/* What a file holds at first; made once, since every test wants it. */
static const uint8_t *content_of(uint32_t file)
{
    static uint8_t *contents[FILES];
    if (!contents[file]) {
        contents[file] = new_memory(FILE_NBYTES);
        fill(contents[file], file, 0, FILE_NBYTES);
    }
    return contents[file];
}

/* -1: the file system has no direct I/O. The flag alone proves nothing, the first transfer decides; and past the page
 * cache a file is made without waiting for the journal. */
static int open_file(uint32_t file, bool is_direct)
{
    char path[4096];
    const char *folder = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/akv-test-XXXXXX", folder ? folder : "/tmp");
    int fd = mkostemp(path, O_CLOEXEC);
    CHECK(fd >= 0);
    CHECK_EQ(unlink(path), 0);
    bool is_ready = !is_direct || fcntl(fd, F_SETFL, O_DIRECT) == 0;
    if (is_ready && pwrite(fd, content_of(file), FILE_NBYTES, 0) == FILE_NBYTES)
        return fd;
    CHECK(is_direct);
    CHECK_EQ(close(fd), 0);
    return -1;
}

/* Direct files where the file system has them, else buffered ones; then `rig_start`, after changes to the options. */
static UNUSED void rig_make(struct rig *rig, uint32_t source)
{
    memset(rig, 0, sizeof *rig);
    uint32_t alignment = PAGE;
    for (uint32_t file = 0; file < FILES; file++) {
        rig->fds[file] = open_file(file, alignment > 1);
        if (rig->fds[file] < 0) {
            CHECK_EQ(file, 0);
            alignment = 1;
            rig->fds[file] = open_file(file, false);
        }
    }
    rig->options = (akv_options){
        .source = source,
        .rings = 1,
        .queue_depth = 32,
        .threads = 4,
        .max_batches = 256,
        .max_requests = 4096,
        .small_nbytes = 16384,
        .max_op_nbytes = 131072,
        .memory_alignment = alignment == 1 ? 1 : 512,
        .offset_alignment = alignment,
        .spin_us = 20,
        .bulk_nbytes = 1 << 20,
        .staging_nbytes = 2 << 20,
        .fds = rig->fds,
        .fd_count = FILES,
    };
}

static UNUSED void rig_start(struct rig *rig)
{
    int32_t code = 0, where = 0;
    rig->engine = akv_engine_open(&rig->options, &code, &where);
    if (!rig->engine)
        fprintf(stderr, "open failed: %d at %d\n", code, where);
    CHECK(rig->engine);
    rig->done = calloc(rig->options.max_batches, sizeof *rig->done);
    CHECK(rig->done);
}

/* Waits until the eventfd says something, and collects; the wait is long enough to be a failure when it ends. */
static UNUSED void rig_collect(struct rig *rig)
{
    struct pollfd ready = {.fd = akv_engine_fileno(rig->engine), .events = POLLIN};
    CHECK_EQ(poll(&ready, 1, WAIT_MS), 1);
    int count = akv_engine_drain(rig->engine, rig->done + rig->done_count, rig->options.max_batches - rig->done_count);
    CHECK(count >= 0);
    rig->done_count += count;
}

static UNUSED akv_completion rig_wait(struct rig *rig, int64_t ticket)
{
    CHECK(ticket >= 0);
    for (;;) {
        for (uint32_t i = 0; i < rig->done_count; i++)
            if (rig->done[i].ticket == ticket) {
                akv_completion found = rig->done[i];
                memmove(rig->done + i, rig->done + i + 1, (--rig->done_count - i) * sizeof *rig->done);
                return found;
            }
        rig_collect(rig);
    }
}

static UNUSED akv_statistics rig_statistics(struct rig *rig)
{
    akv_statistics total = {0}, one;
    uint64_t *sum = (uint64_t *)&total, *part = (uint64_t *)&one;
    for (uint32_t ring = 0; ring < rig->options.rings; ring++) {
        CHECK_EQ(akv_engine_statistics(rig->engine, ring, &one), 0);
        for (size_t i = 0; i < sizeof one / sizeof *part; i++)
            sum[i] += part[i];
    }
    return total;
}

static UNUSED void rig_wait_stopped(struct rig *rig)
{
    akv_completion ignored[64];
    int64_t until = now_ns() + WAIT_MS * 1000000ll;
    CHECK_EQ(akv_engine_stop(rig->engine), 0);
    while (!akv_engine_stopped(rig->engine)) {
        struct pollfd ready = {.fd = akv_engine_fileno(rig->engine), .events = POLLIN};
        CHECK(now_ns() < until);
        CHECK_EQ(poll(&ready, 1, WAIT_MS), 1);
        CHECK(akv_engine_drain(rig->engine, ignored, 64) >= 0);
    }
    while (akv_engine_drain(rig->engine, ignored, 64) > 0)
        ;
}

/* Closes the engine in the right order; whatever happened, nothing may be lent out at the end. */
static UNUSED void rig_close(struct rig *rig)
{
    rig_wait_stopped(rig);
    akv_statistics end = rig_statistics(rig);
    CHECK_EQ(end.in_flight, 0);
    CHECK_EQ(end.slots_leased, 0);
    CHECK_EQ(end.overflows, 0);
    CHECK_EQ(akv_engine_free(rig->engine), 0);
    free(rig->done);
    rig->done = NULL;
    rig->done_count = 0;
}

static UNUSED void rig_close_files(struct rig *rig)
{
    for (uint32_t file = 0; file < FILES; file++)
        CHECK_EQ(close(rig->fds[file]), 0);
}

static UNUSED void rig_end(struct rig *rig)
{
    rig_close(rig);
    rig_close_files(rig);
}

/* A batch: arrays that live until it has ended. */
struct load {
    akv_op *ops;
    akv_copy *copies;
    akv_result *results;
    uint8_t *memory; /* freed with the rest, if there is any */
    uint32_t op_count, copy_count;
    uint32_t priority;
    int64_t deadline_ns;
};

static UNUSED void load_make(struct load *load, uint32_t op_count, uint32_t copy_count)
{
    memset(load, 0, sizeof *load);
    load->ops = calloc(op_count, sizeof *load->ops);
    load->copies = calloc(copy_count + 1, sizeof *load->copies);
    load->results = malloc(op_count * sizeof *load->results);
    CHECK(load->ops && load->copies && load->results);
    memset(load->results, 0x5a, op_count * sizeof *load->results);
    load->op_count = op_count;
    load->copy_count = copy_count;
}

static UNUSED void load_free(struct load *load)
{
    free(load->ops);
    free(load->copies);
    free(load->results);
    free(load->memory);
}

static akv_op direct_op(uint32_t file, uint64_t offset, const void *memory, uint32_t nbytes)
{
    return (akv_op){.file = file, .file_offset = offset, .nbytes = nbytes, .address = (uintptr_t)memory};
}

static UNUSED akv_op copied_op(uint32_t placement, uint32_t file, uint64_t offset, uint32_t nbytes, uint32_t first,
                               uint32_t count)
{
    return (akv_op){.file = file, .file_offset = offset, .nbytes = nbytes, .placement = placement, .copy_first = first,
                    .copy_count = count};
}

static UNUSED akv_copy copy_of(const void *memory, uint32_t op_offset, uint32_t nbytes)
{
    return (akv_copy){.address = (uintptr_t)memory, .op_offset = op_offset, .nbytes = nbytes};
}

/* Ops of one size one behind the other in the file (round and round), each with memory of its own. */
static UNUSED void load_make_direct(struct load *load, uint32_t op_count, uint32_t file, uint32_t nbytes)
{
    load_make(load, op_count, 0);
    load->memory = new_memory((uint64_t)op_count * nbytes);
    for (uint32_t i = 0; i < op_count; i++)
        load->ops[i] = direct_op(file, (uint64_t)i * nbytes % FILE_NBYTES, load->memory + (uint64_t)i * nbytes, nbytes);
}

/* A batch that is answered as soon as the reactor sees it: its files do not exist. */
static UNUSED void load_make_instant(struct load *load, uint32_t op_count)
{
    load_make(load, op_count, 0);
    for (uint32_t i = 0; i < op_count; i++)
        load->ops[i].file = FILES;
}

static UNUSED int64_t load_submit(struct rig *rig, struct load *load, uint32_t kind)
{
    return akv_engine_submit(rig->engine, 0, kind, load->priority, load->deadline_ns, load->ops, load->op_count,
                             load->copies, load->copy_count, load->results, NULL);
}

static UNUSED akv_completion load_run(struct rig *rig, struct load *load, uint32_t kind)
{
    return rig_wait(rig, load_submit(rig, load, kind));
}

/* One op to its result. */
static UNUSED akv_result op_run(struct rig *rig, uint32_t kind, akv_op op, const akv_copy *copies, uint32_t copy_count)
{
    akv_result result = {.code = 1};
    int64_t ticket = akv_engine_submit(rig->engine, 0, kind, 0, 0, &op, 1, copies, copy_count, &result, NULL);
    akv_completion done = rig_wait(rig, ticket);
    CHECK_EQ(done.status, result.code);
    CHECK_EQ(done.failed, result.code != 0);
    return result;
}

static UNUSED bool has_uring(void)
{
    int32_t code, where;
    struct rig rig;
    rig_make(&rig, AKV_SOURCE_URING);
    rig.engine = akv_engine_open(&rig.options, &code, &where);
    bool is_there = rig.engine != NULL;
    if (is_there)
        rig_close(&rig);
    else
        printf("skipped on io_uring: %s at step %d\n", strerror(-code), where);
    rig_close_files(&rig);
    return is_there;
}

/* Runs each test on each source; a test without a name ends the list. */
struct test {
    const char *name;
    void (*run)(uint32_t source);
};

static UNUSED void run_tests_on(uint32_t source, const struct test *tests)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (const struct test *test = tests; test->name; test++) {
        int64_t start = now_ns();
        test->run(source);
        printf("  %-7s %s (%lld ms)\n", source == AKV_SOURCE_URING ? "uring" : "threads", test->name,
               (long long)(now_ns() - start) / 1000000);
    }
}

static UNUSED int run_tests(const struct test *tests)
{
    if (has_uring())
        run_tests_on(AKV_SOURCE_URING, tests);
    run_tests_on(AKV_SOURCE_THREADS, tests);
    return 0;
}

#endif
