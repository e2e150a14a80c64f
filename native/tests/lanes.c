/* lanes.c: which op goes first. Ops are made slow by faults, so that what waits and what flies is known. */
#include "check.h"

enum { BULK = 131072, BULK_COUNT = 32 };

static akv_fault slow(int32_t kind, int32_t microseconds)
{
    return (akv_fault){.kind = kind, .action = AKV_FAULT_DELAY, .value = microseconds, .every = 1, .times = UINT32_MAX};
}

static void start(struct rig *rig, uint32_t source, const akv_fault *faults, uint32_t fault_count)
{
    rig_make(rig, source);
    rig->options.faults = faults;
    rig->options.fault_count = fault_count;
}

/* The order in which tickets come out of drain, told as their index in `tickets`. */
static void wait_all(struct rig *rig, const int64_t *tickets, uint32_t count, uint32_t *order)
{
    for (uint32_t n = 0; n < count; n++) {
        while (rig->done_count == 0)
            rig_collect(rig);
        uint32_t index = 0;
        while (index < count && tickets[index] != rig->done[0].ticket)
            index++;
        CHECK(index < count);
        CHECK_EQ(rig_wait(rig, tickets[index]).status, 0);
        order[n] = index;
    }
}

static void bulk_stays_below_its_cap(uint32_t source)
{
    const akv_fault fault = slow(-1, 500);
    const uint32_t caps[] = {1 << 20, BULK, BULK / 2, 300000};
    for (uint32_t n = 0; n < sizeof caps / sizeof *caps; n++) {
        struct rig rig;
        struct load reads, writes;
        start(&rig, source, &fault, 1);
        rig.options.bulk_nbytes = caps[n];
        rig_start(&rig);
        load_make_direct(&reads, BULK_COUNT, 0, BULK);
        load_make_direct(&writes, BULK_COUNT, 0, BULK / 2);
        int64_t first = load_submit(&rig, &reads, AKV_READ), second = load_submit(&rig, &writes, AKV_WRITE);
        CHECK_EQ(rig_wait(&rig, first).status, 0);
        CHECK_EQ(rig_wait(&rig, second).status, 0);
        uint64_t most = rig_statistics(&rig).bulk_nbytes_max;
        CHECK_EQ(most, caps[n] < BULK ? BULK : caps[n] / (BULK / 2) * (BULK / 2)); /* one op is always let through */
        rig_end(&rig);
        load_free(&reads);
        load_free(&writes);
    }
}

static void small_read_passes_bulk(uint32_t source)
{
    const akv_fault fault = slow(-1, 4000);
    struct rig rig;
    struct load bulk, one;
    start(&rig, source, &fault, 1);
    rig_start(&rig);
    load_make_direct(&bulk, BULK_COUNT, 0, BULK);
    load_make_direct(&one, 1, 0, PAGE);
    int64_t large = load_submit(&rig, &bulk, AKV_READ);
    int64_t began = now_ns(), small = load_submit(&rig, &one, AKV_READ);
    CHECK_EQ(rig_wait(&rig, small).status, 0);
    int64_t took = now_ns() - began;
    CHECK(holds(one.memory, 0, 0, PAGE));
    CHECK_EQ(rig.done_count, 0); /* the bulk read, which came first, is not done */
    CHECK_EQ(rig_wait(&rig, large).status, 0);
    CHECK(took < now_ns() - began);
    rig_end(&rig);
    load_free(&bulk);
    load_free(&one);
}

/* One flight: what is waiting when it comes free goes in the order of priority, then reads before writes. */
static void order_of_classes(uint32_t source)
{
    enum { CLASSES = 6 };
    const akv_fault fault = slow(-1, 30000);
    struct rig rig;
    struct load loads[CLASSES + 1];
    int64_t tickets[CLASSES + 1];
    uint32_t order[CLASSES + 1];
    start(&rig, source, &fault, 1);
    rig.options.queue_depth = 1;
    rig_start(&rig);
    for (uint32_t i = 0; i <= CLASSES; i++) { /* the first keeps the flight busy while the others come in, worst first */
        load_make_direct(&loads[i], 1, 0, PAGE);
        loads[i].priority = i == 0 ? 0 : (CLASSES - i) / 2;
        tickets[i] = load_submit(&rig, &loads[i], i == 0 || (CLASSES - i) % 2 == 0 ? AKV_READ : AKV_WRITE);
    }
    wait_all(&rig, tickets, CLASSES + 1, order);
    for (uint32_t n = 0; n <= CLASSES; n++)
        CHECK_EQ(order[n], n == 0 ? 0 : CLASSES + 1 - n);
    rig_end(&rig);
    for (uint32_t i = 0; i <= CLASSES; i++)
        load_free(&loads[i]);
}

/* A flood in the best queue starves none of the others, not even with a single flight. */
static void nobody_starves(uint32_t source)
{
    enum { FLOOD = 3000, OTHERS = 4 };
    const uint32_t kinds[OTHERS] = {AKV_READ, AKV_WRITE, AKV_READ, AKV_WRITE}, priorities[OTHERS] = {0, 0, 1, 2};
    for (uint32_t depth = 1; depth <= 4; depth += 3) {
        struct rig rig;
        struct load flood, others[OTHERS];
        int64_t tickets[OTHERS + 1];
        uint32_t order[OTHERS + 1];
        start(&rig, source, NULL, 0);
        rig.options.queue_depth = depth;
        rig.options.spin_us = depth == 1 ? 0 : 20;
        rig_start(&rig);
        load_make_direct(&flood, FLOOD, 0, PAGE);
        tickets[0] = load_submit(&rig, &flood, AKV_READ);
        for (uint32_t i = 0; i < OTHERS; i++) {
            load_make_direct(&others[i], 4, 0, BULK);
            others[i].priority = priorities[i];
            tickets[i + 1] = load_submit(&rig, &others[i], kinds[i]);
        }
        wait_all(&rig, tickets, OTHERS + 1, order);
        CHECK_EQ(order[OTHERS], 0);
        rig_end(&rig);
        load_free(&flood);
        for (uint32_t i = 0; i < OTHERS; i++)
            load_free(&others[i]);
    }
}

/* While a demand read is in flight, the lower priorities keep to a quarter of the depth, even if no other one waits. */
static void background_keeps_to_a_quarter(uint32_t source)
{
    enum { DEPTH = 16 };
    const akv_fault faults[] = {
        {.kind = AKV_READ, .action = AKV_FAULT_DELAY, .value = 300000, .every = 1, .times = 1},
        slow(-1, 1000),
    };
    struct rig rig;
    struct load background, demand;
    start(&rig, source, faults, 2);
    rig.options.queue_depth = DEPTH;
    rig_start(&rig);
    load_make_direct(&demand, 1, 0, PAGE);
    load_make_direct(&background, 256, 0, PAGE);
    background.priority = 2;
    int64_t first = load_submit(&rig, &demand, AKV_READ);
    while (rig_statistics(&rig).in_flight == 0)
        pause_us(50);
    int64_t second = load_submit(&rig, &background, AKV_READ);
    while (rig_statistics(&rig).ops < 24)
        pause_us(50);
    CHECK_EQ(rig_statistics(&rig).in_flight_max, 1 + DEPTH / 4);
    CHECK_EQ(rig_wait(&rig, first).status, 0);
    CHECK_EQ(rig_wait(&rig, second).status, 0);
    CHECK_EQ(load_run(&rig, &background, AKV_READ).status, 0);
    CHECK_EQ(rig_statistics(&rig).in_flight_max, DEPTH); /* alone they may have all of it */
    rig_end(&rig);
    load_free(&demand);
    load_free(&background);
}

int main(void)
{
    const struct test tests[] = {
        {"bulk stays below its cap", bulk_stays_below_its_cap},
        {"a small read passes bulk", small_read_passes_bulk},
        {"order of classes", order_of_classes},
        {"nobody starves", nobody_starves},
        {"background keeps to a quarter", background_keeps_to_a_quarter},
        {0},
    };
    return run_tests(tests);
}
