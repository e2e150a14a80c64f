/* wakes.c: nobody sleeps through news, whatever the moment at which it comes.
 *
 * The windows in which a wake could be lost are some nanoseconds wide. Each test widens one, or aims at it very often. A
 * lost wake of the reactor shows as the wait of a tick (1 s), one of the caller as a timeout. */
#include "check.h"

#include <sched.h>
#include <sys/syscall.h>

enum { TICK_NS = 800000000, LOST_MS = 5000 };

static _Thread_local uint32_t clock_us; /* how long this thread's clock takes to answer */

/* In the place of libc's: what the engine calls between its last look and the end of akv_engine_poll. */
int clock_gettime(clockid_t clock, struct timespec *now)
{
    struct timespec pause = {0, clock_us * 1000l};
    if (clock_us)
        nanosleep(&pause, NULL);
    return syscall(SYS_clock_gettime, clock, now);
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525 + 1013904223; /* Knuth and Lewis */
    return *state >> 16;
}

static void idle(uint32_t steps)
{
    for (volatile uint32_t left = steps; left > 0; left--)
        ;
}

/* The reactor goes to sleep as soon as it has told of an end. The next batch comes just then: sometimes after it has
 * looked for orders and before it says that it sleeps. */
static void on_the_way_to_sleep(uint32_t source)
{
    enum { ROUNDS = 80000 };
    struct rig rig;
    struct load load;
    akv_completion found;
    uint32_t random = 1;
    rig_make(&rig, source);
    rig.options.spin_us = 0;
    rig_start(&rig);
    load_make_instant(&load, 1);
    int64_t until = now_ns() + 2000000000;
    for (uint32_t round = 0; round < ROUNDS && now_ns() < until; round++) {
        int64_t began = now_ns();
        CHECK(load_submit(&rig, &load, AKV_SYNC) >= 0);
        for (uint32_t looks = 1; akv_engine_drain(rig.engine, &found, 1) == 0; looks++) {
            CHECK(now_ns() - began < TICK_NS);
            if (looks % 256 == 0)
                sched_yield(); /* there may be a single processor */
        }
        idle(next_random(&random) % 2000);
    }
    load_free(&load);
    rig_end(&rig);
}

/* Asleep for good, waited for with and without a poll; a poll that has seen nothing leaves the rest to the descriptor. */
static void asleep(uint32_t source)
{
    enum { ROUNDS = 3000 };
    struct rig rig;
    struct load load;
    akv_completion found;
    uint32_t random = 1;
    rig_make(&rig, source);
    for (uint32_t spin_us = 0; spin_us <= 20; spin_us += 20) {
        rig.options.spin_us = spin_us;
        rig_start(&rig);
        load_make_instant(&load, 1);
        struct pollfd ready = {.fd = akv_engine_fileno(rig.engine), .events = POLLIN};
        for (uint32_t round = 0; round < ROUNDS; round++) {
            int64_t began = now_ns();
            CHECK(load_submit(&rig, &load, AKV_SYNC) >= 0);
            bool has_seen = round % 2 && akv_engine_poll(rig.engine, round % 16) == 1;
            do
                CHECK(has_seen || poll(&ready, 1, LOST_MS) == 1);
            while (akv_engine_drain(rig.engine, &found, 1) == 0);
            CHECK(now_ns() - began < TICK_NS);
            idle(next_random(&random) % 20000);
        }
        load_free(&load);
        rig_close(&rig);
    }
    rig_close_files(&rig);
}

/* A poll keeps the reactor from writing the descriptor. What ends after its last look must not be lost with that. */
static void after_the_last_look(uint32_t source)
{
    enum { ROUNDS = 300 };
    struct rig rig;
    struct load load;
    akv_completion found;
    rig_make(&rig, source);
    rig_start(&rig);
    load_make_direct(&load, 1, 0, PAGE);
    struct pollfd ready = {.fd = akv_engine_fileno(rig.engine), .events = POLLIN};
    for (uint32_t round = 0; round < ROUNDS; round++) {
        CHECK(load_submit(&rig, &load, AKV_READ) >= 0);
        clock_us = 1 + round % 300;
        bool has_seen = akv_engine_poll(rig.engine, 0) == 1;
        clock_us = 0;
        do
            CHECK(has_seen || poll(&ready, 1, LOST_MS) == 1);
        while (akv_engine_drain(rig.engine, &found, 1) == 0);
    }
    load_free(&load);
    rig_end(&rig);
}

/* ThreadSanitizer is slow enough to need fewer for the same time. */
enum { CROWD = IS_THREAD_SANITIZED ? 4000 : 50000, PLUG = 10 * CROWD };

struct straggler {
    struct rig *rig;
    struct load load;
    uint64_t wakes; /* the reactor's count before the crowd ended */
    uint32_t delay;
};

static void *follow_the_crowd(void *argument)
{
    struct straggler *self = argument;
    while (rig_statistics(self->rig).wakes == self->wakes)
        sched_yield();
    idle(self->delay);
    CHECK(load_submit(self->rig, &self->load, AKV_SYNC) >= 0);
    return NULL;
}

/* Taking the ends of a crowd takes long. One more end falls into that time, when the notice of the others has been read
 * and the list already taken. */
static void behind_a_crowd(uint32_t source)
{
    enum { ROUNDS = 24 };
    struct rig rig;
    struct load plug, crowd;
    uint32_t random = 1;
    rig_make(&rig, source);
    rig.options.max_batches = 65536;
    rig.options.max_requests = 1 << 20;
    rig.options.spin_us = 1000;
    rig_start(&rig);
    load_make_instant(&plug, PLUG);
    load_make_instant(&crowd, 1);
    akv_completion *found = calloc(CROWD + 2, sizeof *found);
    struct pollfd ready = {.fd = akv_engine_fileno(rig.engine), .events = POLLIN};
    for (uint32_t round = 0; round < ROUNDS; round++) {
        struct straggler self = {.rig = &rig, .wakes = rig_statistics(&rig).wakes};
        pthread_t thread;
        load_make_instant(&self.load, 1);
        self.delay = next_random(&random) % 65536;
        CHECK_EQ(pthread_create(&thread, NULL, follow_the_crowd, &self), 0);
        CHECK(load_submit(&rig, &plug, AKV_SYNC) >= 0); /* while it is worked off the crowd gathers */
        for (uint32_t i = 0; i < CROWD; i++)
            CHECK(load_submit(&rig, &crowd, AKV_SYNC) >= 0);
        for (uint32_t drained = 0; drained < CROWD + 2;) {
            CHECK_EQ(poll(&ready, 1, LOST_MS), 1);
            drained += akv_engine_drain(rig.engine, found, CROWD + 2);
        }
        CHECK_EQ(pthread_join(thread, NULL), 0);
        load_free(&self.load);
    }
    rig_end(&rig);
    load_free(&plug);
    load_free(&crowd);
    free(found);
}

enum { ENDS = 1500 };

struct waiter {
    struct rig *rig;
    struct load load;
    uint32_t ring;
};

static void *submit_and_pause(void *argument)
{
    struct waiter *self = argument;
    for (uint32_t round = 0; round < ENDS;) {
        int64_t ticket = akv_engine_submit(self->rig->engine, self->ring, AKV_SYNC, 0, 0, self->load.ops, 1, NULL, 0,
                                           self->load.results, NULL);
        CHECK(ticket >= 0 || ticket == -EAGAIN);
        round += ticket >= 0;
        pause_us(round % 7 * 10);
    }
    return NULL;
}

/* Ends from two rings at once: their notices may fall together, and none may fall between. */
static void two_rings_tell(uint32_t source)
{
    struct rig rig;
    struct waiter waiters[2];
    pthread_t threads[2];
    rig_make(&rig, source);
    rig.options.rings = 2;
    rig_start(&rig);
    for (uint32_t i = 0; i < 2; i++) {
        waiters[i] = (struct waiter){.rig = &rig, .ring = i};
        load_make_instant(&waiters[i].load, 1);
        CHECK_EQ(pthread_create(&threads[i], NULL, submit_and_pause, &waiters[i]), 0);
    }
    struct pollfd ready = {.fd = akv_engine_fileno(rig.engine), .events = POLLIN};
    akv_completion found[8];
    for (uint64_t drained = 0; drained < 2 * ENDS;) {
        CHECK_EQ(poll(&ready, 1, 5000), 1);
        int count = akv_engine_drain(rig.engine, found, 8);
        CHECK(count >= 0);
        drained += count;
    }
    for (uint32_t i = 0; i < 2; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    rig_end(&rig);
    for (uint32_t i = 0; i < 2; i++)
        load_free(&waiters[i].load);
}

/* A reactor that was told of an order to come waits for it awake; without an order it goes back to sleep. */
static void roused(uint32_t source)
{
    enum { SPIN_US = 10000, TRIES = 12 };
    struct rig rig;
    struct load load;
    akv_completion found;
    rig_make(&rig, source);
    rig.options.spin_us = SPIN_US;
    rig_start(&rig);
    load_make_instant(&load, 1);
    bool was_awake = false;
    for (uint32_t i = 0; i < TRIES && !was_awake; i++) { /* on a busy machine it may be late now and then */
        pause_us(3 * SPIN_US);
        uint64_t sleeps = rig_statistics(&rig).sleeps;
        CHECK_EQ(akv_engine_rouse(rig.engine, 0), 0);
        pause_us(500);
        CHECK(load_submit(&rig, &load, AKV_SYNC) >= 0);
        for (int64_t until = now_ns() + TICK_NS; akv_engine_drain(rig.engine, &found, 1) == 0;)
            CHECK(now_ns() < until);
        was_awake = rig_statistics(&rig).sleeps == sleeps;
    }
    CHECK(was_awake);
    pause_us(3 * SPIN_US);
    uint64_t sleeps = rig_statistics(&rig).sleeps;
    CHECK_EQ(akv_engine_rouse(rig.engine, 0), 0);
    pause_us(3 * SPIN_US);
    CHECK_EQ(rig_statistics(&rig).sleeps, sleeps + 1);
    CHECK_EQ(akv_engine_rouse(rig.engine, 1), -EINVAL);
    load_free(&load);
    rig_end(&rig);
}

int main(void)
{
    const struct test tests[] = {
        {"roused", roused},
        {"on the way to sleep", on_the_way_to_sleep},
        {"asleep", asleep},
        {"after the last look", after_the_last_look},
        {"behind a crowd", behind_a_crowd},
        {"two rings tell", two_rings_tell},
        {0},
    };
    return run_tests(tests);
}
