/* internal.h: every structure of the engine, with its owner and its thread.
 *
 *   submitter  any thread inside akv_engine_submit / cancel / drain; serialised by engine->lock where noted
 *   reactor    the one thread of its ring; everything not marked otherwise below is its alone
 *   worker     a thread of the `threads` source: reads a flight, does one system call, hands the flight back
 *
 * A batch record is taken from the free list by submit (lock), given to a reactor through its intake stack,
 * given back through engine->done, and returned to the free list by drain (lock). Nothing is allocated after open.
 */
#ifndef AKV_INTERNAL_H
#define AKV_INTERNAL_H

#include <liburing.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "akv.h"

enum {
    AKV_PRIORITIES = 3,
    AKV_LANES = 2, /* small, bulk */
    AKV_SMALL = 0,
    AKV_BULK = 1,
    AKV_CLASSES = AKV_PRIORITIES * AKV_LANES * 2, /* priority, then reads before writes, then lane */
    AKV_SLICE = 32,                              /* SQEs per io_uring_enter: 512 at once stall for milliseconds */
    AKV_IOV_MAX = 128,
    AKV_ATTEMPTS_MAX = 8,
    AKV_REGIONS_MAX = 256,
    AKV_BUFFERS_MAX = 1024, /* entries of the ring's buffer table, each at most AKV_PIECE bytes */
};
#define AKV_PIECE (1ull << 30) /* io_uring's own limit for one registered buffer */
#define AKV_HUGE (2ull << 20)
#define AKV_TICK_NS 1000000000ll /* an eventfd is a hint: look again at least this often */

struct akv_reactor;
struct akv_source;

struct akv_lane_link {
    struct akv_batch *prev, *next;
    uint32_t cursor; /* next op to look at */
    uint32_t left;   /* ops of this lane not started yet */
};

struct akv_batch {
    /* Written by the submitter before the push, read by the reactor after it. */
    const akv_op *ops;
    const akv_copy *copies;
    akv_result *results;
    uint64_t region_address, region_nbytes;
    int64_t deadline_ns;
    uint32_t kind, priority, op_count, copy_count, ring;
    int64_t ticket;
    uint32_t index, generation; /* lock */
    bool is_live;               /* lock: taken and not drained */
    _Atomic int cancel_requested;
    struct akv_batch *next; /* free list (lock), intake stack, done stack: one at a time */
    /* Reactor only. */
    struct akv_batch *live_prev, *live_next;
    struct akv_lane_link lane[AKV_LANES];
    uint32_t remaining; /* ops without a result */
    uint32_t failed;
    int32_t status;
};

/* One op at the device. The reactor owns it, except between akv_source.queue and the moment it is reaped. */
struct akv_flight {
    struct akv_batch *batch;
    struct akv_region *region;
    akv_op op;
    uint8_t *base; /* first byte of a direct or staged op */
    struct iovec *iov;
    uint32_t op_index, lane, slot;
    uint32_t from, arrived, asked, attempts; /* this ask starts at `from` and wants `asked`; `arrived` are there */
    int32_t buffer; /* index in the ring's buffer table, or -1 */
    int32_t result;
    bool is_late; /* on the delayed list: an answer that waits (true) or an ask that waits (false) */
    int64_t due_ns;
    const akv_fault *fault;
    struct akv_flight *next; /* free list, worker queue, worker's done stack, delayed list */
};

struct akv_region {
    uint64_t address, nbytes;
    uint32_t buffer_first, buffer_count;
    uint32_t in_flight;
    bool is_open;
    struct akv_batch *remover; /* waits for in_flight == 0 */
};

struct akv_slab {
    uint8_t *base;
    uint64_t nbytes;
    uint64_t registered; /* bytes from base known to the ring */
    uint32_t slot_nbytes[AKV_LANES], slot_count[AKV_LANES];
    uint8_t *lane_base[AKV_LANES];
    uint32_t *free_slots[AKV_LANES]; /* stacks */
    uint32_t free_count[AKV_LANES];
};

/* The single-writer counters: the reactor stores, anyone may load. */
#define AKV_COUNTERS (sizeof(akv_statistics) / sizeof(uint64_t))
struct akv_counters {
    _Atomic uint64_t value[AKV_COUNTERS];
};
#define AKV_COUNTER(r, field) (&(r)->counters.value[offsetof(akv_statistics, field) / sizeof(uint64_t)])
#define AKV_LOAD(r, field) atomic_load_explicit(AKV_COUNTER(r, field), memory_order_relaxed)
#define AKV_STORE(r, field, n) atomic_store_explicit(AKV_COUNTER(r, field), (n), memory_order_relaxed)
#define AKV_COUNT(r, field, n) AKV_STORE(r, field, AKV_LOAD(r, field) + (n)) /* one writer: no locked add needed */
#define AKV_MAX(r, field, n) ((n) > AKV_LOAD(r, field) ? AKV_STORE(r, field, (n)) : (void)0)

/* An I/O source: the ring, or native threads. Called by the reactor only. */
struct akv_source {
    int (*open)(struct akv_reactor *r, int32_t *where);
    void (*queue)(struct akv_reactor *r, struct akv_flight *f);
    void (*submit)(struct akv_reactor *r);
    bool (*has_news)(struct akv_reactor *r);
    void (*reap)(struct akv_reactor *r);
    void (*sleep)(struct akv_reactor *r, int64_t timeout_ns);
    int (*region_add)(struct akv_reactor *r, struct akv_region *region);
    void (*region_remove)(struct akv_reactor *r, struct akv_region *region);
    void (*close)(struct akv_reactor *r);
};
extern const struct akv_source akv_source_uring, akv_source_threads;

struct akv_pool { /* the threads source */
    pthread_t *threads;
    uint32_t count;
    pthread_mutex_t lock; /* head, tail, stop */
    pthread_cond_t work;
    struct akv_flight *head, *tail;
    bool stop;
    _Atomic(struct akv_flight *) done;
    struct akv_flight *queued_head, *queued_tail; /* reactor: not yet handed over */
};

struct akv_reactor {
    struct akv_engine *engine;
    const struct akv_source *source;
    uint32_t index;
    pthread_t thread;
    bool has_thread;
    /* Shared with submitters. */
    _Atomic(struct akv_batch *) intake;
    _Atomic int sleeping, cancels, stop;
    int wake_fd;
    /* Start-up hand-shake: engine->lock and engine->started. */
    int start_code, start_where, is_started;
    /* The ring. */
    struct io_uring ring;
    bool has_ring, wake_armed, files_registered, sparse_buffers;
    uint32_t setup_flags, queued;
    int register_errno;
    uint64_t wake_value;
    uint8_t buffer_used[AKV_BUFFERS_MAX];
    struct akv_pool pool;
    /* Work. */
    struct akv_batch *live; /* every batch taken in and not finished */
    struct akv_batch *queue_head[AKV_CLASSES], *queue_tail[AKV_CLASSES];
    struct akv_flight *flights, *free_flights, *delayed;
    struct iovec *iovs;
    struct akv_slab slab;
    struct akv_region regions[AKV_REGIONS_MAX];
    uint32_t in_flight, in_flight_lane[AKV_LANES], background_in_flight;
    uint64_t in_flight_nbytes, bulk_in_flight_nbytes;
    uint32_t picks, turn, region_count; /* turn: the queue that the next pick for fairness begins with */
    int64_t next_deadline_ns; /* INT64_MAX: none */
    int64_t busy_until_ns; /* spin until then */
    uint32_t spins[2], spin_misses[2]; /* waiting for an order, waiting for the device */
    bool must_notify, has_seen_stop;
    uint64_t fault_sequence[3], fault_random;
    uint32_t *fault_used;
    struct akv_counters counters;
};

struct akv_engine {
    akv_options options;
    int *fds;
    akv_fault *faults;
    pid_t pid;
    pthread_mutex_t lock; /* free list, generations, held ops, leftovers of drain */
    pthread_cond_t started;
    struct akv_batch *batches, *free_batches, *leftovers;
    uint32_t held_requests;
    bool is_stopping;
    _Atomic(struct akv_batch *) done;
    _Atomic int notified, stopped_reactors;
    int done_fd;
    uint32_t reactor_count;
    struct akv_reactor *reactors;
};

int64_t akv_now_ns(void);

static inline void akv_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* slab.c */
int akv_staging_open(struct akv_slab *slab, const akv_options *options);
void akv_staging_close(struct akv_slab *slab);
uint8_t *akv_slot_take(struct akv_slab *slab, uint32_t lane, uint32_t *slot);
void akv_slot_return(struct akv_slab *slab, uint32_t lane, uint32_t slot);

/* lanes.c: which op goes next */
void akv_lanes_enter(struct akv_reactor *r, struct akv_batch *b);
void akv_lanes_leave(struct akv_reactor *r, struct akv_batch *b);
void akv_lanes_issue(struct akv_reactor *r);

/* flight.c: one op from start to result */
bool akv_flight_can_start(struct akv_reactor *r, const akv_op *op, uint32_t lane);
void akv_flight_start(struct akv_reactor *r, struct akv_batch *b, uint32_t op_index, const akv_op *op, uint32_t lane);
void akv_flight_answer(struct akv_reactor *r, struct akv_flight *f, int32_t result);
void akv_flight_release_due(struct akv_reactor *r, int64_t now_ns);
int akv_flight_iov(const struct akv_flight *f, struct iovec *iov);

/* copy.c: the one seam through which bytes go between a staging slot and memory */
int akv_copy_check(const struct akv_batch *b, const akv_op *op, uint32_t alignment);
void akv_copy_out(struct akv_reactor *r, struct akv_flight *f);
void akv_copy_in(struct akv_reactor *r, struct akv_flight *f);

/* batch.c: a batch inside the reactor */
void akv_batch_accept(struct akv_reactor *r, struct akv_batch *b);
void akv_batch_drop_pending(struct akv_reactor *r, struct akv_batch *b, int32_t code);
void akv_batch_op_done(struct akv_reactor *r, struct akv_batch *b, uint32_t op_index, int32_t code, uint32_t nbytes);
void akv_batch_finish(struct akv_reactor *r, struct akv_batch *b);

/* region.c */
void akv_region_command(struct akv_reactor *r, struct akv_batch *b);
struct akv_region *akv_region_find(struct akv_reactor *r, uint64_t address, uint32_t nbytes, int32_t *buffer);
void akv_region_release(struct akv_reactor *r, struct akv_region *region);

/* fault.c */
const akv_fault *akv_fault_pick(struct akv_reactor *r, uint32_t kind);
int64_t akv_fault_delay_ns(struct akv_reactor *r, const akv_fault *fault);

/* reactor.c */
void *akv_reactor_main(void *reactor);
void akv_reactor_wake(struct akv_reactor *r);
void akv_engine_notify(struct akv_engine *e);

#endif
