/* storm.c: many threads on one engine. Meant for ThreadSanitizer; and for every reader's bytes.
 *
 * TSan does not see what the kernel writes, so a race on a read's destination shows only on the threads source. */
#include "check.h"

enum { SUBMITTERS = 2, ROUNDS = 120, OPS = 24, RING_COUNT = 2, SLOTS = 64 };

struct storm {
    struct rig rig;
    pthread_mutex_t lock; /* done */
    pthread_cond_t changed;
    akv_completion done[SLOTS];
    uint32_t done_count;
    _Atomic int64_t tickets[SUBMITTERS]; /* what the canceller aims at */
    _Atomic bool is_over;
    uint64_t cancelled;
};

struct worker {
    struct storm *storm;
    uint32_t index;
};

/* One thread drains for all and hands the completions round. */
static void *drainer(void *argument)
{
    struct storm *storm = argument;
    akv_completion found[4];
    while (!storm->is_over) {
        struct pollfd ready = {.fd = akv_engine_fileno(storm->rig.engine), .events = POLLIN};
        poll(&ready, 1, 10);
        int count = akv_engine_drain(storm->rig.engine, found, 4); /* few at a time: the rest must be told again */
        CHECK(count >= 0);
        pthread_mutex_lock(&storm->lock);
        for (int i = 0; i < count; i++)
            storm->done[storm->done_count++] = found[i];
        pthread_cond_broadcast(&storm->changed);
        pthread_mutex_unlock(&storm->lock);
    }
    return NULL;
}

static akv_completion wait_done(struct storm *storm, int64_t ticket)
{
    akv_completion found = {.ticket = -1};
    pthread_mutex_lock(&storm->lock);
    while (found.ticket != ticket) {
        for (uint32_t i = 0; i < storm->done_count; i++)
            if (storm->done[i].ticket == ticket) {
                found = storm->done[i];
                storm->done[i] = storm->done[--storm->done_count];
            }
        if (found.ticket != ticket)
            pthread_cond_wait(&storm->changed, &storm->lock);
    }
    pthread_mutex_unlock(&storm->lock);
    return found;
}

static void check_bytes(const struct load *load)
{
    for (uint32_t i = 0; i < load->op_count; i++) {
        const akv_op *op = &load->ops[i];
        const uint8_t *place = load->memory + (uint64_t)i * 32768;
        CHECK(load->results[i].code == -ECANCELED || load->results[i].code == 0);
        CHECK(load->results[i].code || holds(place, op->file, op->file_offset, op->nbytes));
        CHECK(load->results[i].code == 0 || is_all(place, 0xa5, op->nbytes));
    }
}

static void *submitter(void *argument)
{
    struct worker *self = argument;
    struct storm *storm = self->storm;
    uint64_t random = self->index + 1;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        struct load load;
        load_make(&load, OPS, OPS);
        load.memory = new_memory((uint64_t)OPS * 32768);
        for (uint32_t i = 0; i < OPS; i++) {
            random = random * 6364136223846793005ull + 1442695040888963407ull;
            uint8_t *place = load.memory + (uint64_t)i * 32768;
            uint32_t nbytes = random >> 40 & 1 ? 32768 : PAGE, file = random >> 41 & 1;
            uint64_t offset = (random >> 42) % 200 * 32768;
            load.ops[i] = random >> 33 & 1 ? copied_op(AKV_STAGED, file, offset, nbytes, i, 1)
                                           : direct_op(file, offset, place, nbytes);
            load.copies[i] = copy_of(place, 0, nbytes);
        }
        int64_t ticket;
        do
            ticket = akv_engine_submit(storm->rig.engine, random >> 20 & 1, AKV_READ, round % 3, 0, load.ops, OPS,
                                       load.copies, OPS, load.results, NULL);
        while (ticket == -EAGAIN);
        CHECK(ticket >= 0);
        storm->tickets[self->index] = ticket;
        akv_completion done = wait_done(storm, ticket);
        CHECK(done.status == 0 || done.status == -ECANCELED);
        check_bytes(&load);
        load_free(&load);
    }
    return NULL;
}

static void *canceller(void *argument)
{
    struct storm *storm = argument;
    while (!storm->is_over)
        for (uint32_t i = 0; i < SUBMITTERS; i++) {
            int code = akv_engine_cancel(storm->rig.engine, storm->tickets[i]);
            CHECK(code == 0 || code == -ENOENT);
            storm->cancelled += code == 0;
            if ((storm->cancelled & 3) == 0)
                pause_us(200);
        }
    return NULL;
}

static void *observer(void *argument)
{
    struct storm *storm = argument;
    uint32_t look = 0;
    akv_ring_info info;
    while (!storm->is_over) {
        CHECK(rig_statistics(&storm->rig).in_flight <= RING_COUNT * 32);
        CHECK_EQ(akv_engine_ring_info(storm->rig.engine, 1, &info), 0);
        CHECK(akv_engine_poll(storm->rig.engine, 50) >= 0);
        CHECK_EQ(akv_engine_rouse(storm->rig.engine, look++ % RING_COUNT), 0);
        CHECK_EQ(akv_engine_stopped(storm->rig.engine), 0);
        pause_us(300);
    }
    return NULL;
}

static void cancel_storm(uint32_t source)
{
    struct storm storm = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    struct worker workers[SUBMITTERS];
    pthread_t submitters[SUBMITTERS], others[3];
    rig_make(&storm.rig, source);
    storm.rig.options.rings = RING_COUNT;
    storm.rig.options.max_batches = SUBMITTERS;
    rig_start(&storm.rig);
    void *(*const roles[])(void *) = {drainer, canceller, observer};
    for (uint32_t i = 0; i < 3; i++)
        CHECK_EQ(pthread_create(&others[i], NULL, roles[i], &storm), 0);
    for (uint32_t i = 0; i < SUBMITTERS; i++) {
        workers[i] = (struct worker){&storm, i};
        CHECK_EQ(pthread_create(&submitters[i], NULL, submitter, &workers[i]), 0);
    }
    for (uint32_t i = 0; i < SUBMITTERS; i++)
        CHECK_EQ(pthread_join(submitters[i], NULL), 0);
    storm.is_over = true;
    for (uint32_t i = 0; i < 3; i++)
        CHECK_EQ(pthread_join(others[i], NULL), 0);
    CHECK(storm.cancelled > 0);
    CHECK_EQ(storm.done_count, 0);
    rig_end(&storm.rig);
}

int main(void)
{
    const struct test tests[] = {{"cancel storm", cancel_storm}, {0}};
    return run_tests(tests);
}
