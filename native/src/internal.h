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
    AKV_STREAMS_MAX = 16,   /* copy streams */
    AKV_PAGE = 4096,
    AKV_UNIT_MAX = 1 << 20, /* of a pinned op, in bytes */
    AKV_LIST_MAX = 4096,    /* kernel copies in a copy group with a long list */
    AKV_LONG_LISTS = 32,
    AKV_SHORT_LIST = 128,   /* what one I/O has at most; there are as many short lists as I/Os, and never too few */
    AKV_EVENTS_SPARE = 1024, /* beyond one for each group: those that batches keep until they are drained */
    AKV_NOT_READY = 600, /* CUDA_ERROR_NOT_READY */
    AKV_POLL_NS_MIN = 20000, /* between two looks at pending events */
    AKV_POLL_NS_MAX = 1000000,
};
#define AKV_PIECE (1ull << 30) /* io_uring's own limit for one registered buffer */
#define AKV_HUGE (2ull << 20)
#define AKV_BYTES_MAX (1ull << 31) /* of a pinned region, in units */
#define AKV_TICK_NS 1000000000ll /* an eventfd is a hint: look again at least this often */

struct akv_reactor;
struct akv_source;

/* One entry of the done stack: a batch is told of once, or, with device memory, twice. */
struct akv_notice {
    struct akv_notice *next;
    struct akv_batch *batch;
    uint32_t stage, failed;
    int32_t status; /* of the batch, as far as it was known then */
};

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
    uint64_t region_address, region_nbytes, region_device;
    int64_t deadline_ns;
    uint32_t kind, priority, op_count, copy_count, ring;
    bool has_order; /* its copies are the device's */
    void *fence;    /* the fence of the order, or the event of an AKV_EVENT batch */
    uint64_t stream_key;
    int64_t ticket;
    uint32_t index, generation; /* lock */
    bool is_live;               /* lock: taken and not drained */
    _Atomic int cancel_requested;
    struct akv_batch *next; /* free list (lock), intake stack: one at a time */
    struct akv_notice notices[2]; /* by stage; on the done stack, then drain's leftovers (lock) */
    struct akv_device_event *tail; /* set before AKV_ENQUEUED is told, let go of when AKV_DONE is drained */
    /* Reactor only. */
    struct akv_copy_stream *copy_stream;
    struct akv_batch *watch_next; /* AKV_EVENT batches */
    uint32_t unqueued;            /* ops whose copies are not on the copy stream yet */
    bool has_passed_fence;
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
    uint8_t *base; /* first byte of a direct, staged or pinned op */
    uint64_t device_shift; /* the device's address of pinned memory less the host's */
    struct iovec *iov;
    uint32_t op_index, lane, slot;
    uint32_t from, arrived, asked, attempts; /* this ask starts at `from` and wants `asked`; `arrived` are there */
    int32_t buffer; /* index in the ring's buffer table, or -1 */
    int32_t result;
    bool is_late; /* on the delayed list: an answer that waits (true) or an ask that waits (false) */
    int64_t due_ns;
    const akv_fault *fault;
    bool is_queued; /* its copies are on the copy stream, or it has none */
    struct akv_flight *next; /* free list, worker queue, worker's done stack, delayed list, copy stream, copy group */
};

/* Pooled; a copy group holds one share while it is not done, a batch one from AKV_ENQUEUED until it is drained. */
struct akv_device_event {
    void *handle;
    _Atomic uint32_t shares;
};

/* Copies queued on one stream together, and the event behind them. Done in the order of queueing. */
struct akv_copy_group {
    struct akv_device_event *event;
    struct akv_flight *flights;
    akv_kernel_copy *list; /* pinned; the kernel reads it until the event */
    uint64_t list_device;
    uint32_t capacity;
    void *fence; /* what its stream was made to wait for before it; NULL: nothing, or it has passed */
    struct akv_copy_group *next; /* free list, or the queue of its stream */
};

struct akv_copy_stream {
    void *handle;
    uint64_t key;   /* of the caller that it was last given to */
    uint32_t users; /* batches that have not ended */
    struct akv_flight *pending_head, *pending_tail; /* arrived (reads) or holding a slot (writes), copies not queued */
    struct akv_copy_group *oldest, *newest;
    uint32_t flights[AKV_LANES];
    bool is_refused[AKV_LANES]; /* asked for more than its share in this turn, behind a fence */
};

/* The device side of a reactor; all of it the reactor's. `error` is the CUresult that ended the device path, or 0. */
struct akv_device_state {
    const akv_device *api;
    int error;
    bool has_backlog; /* copies wait for an event to record behind them */
    uint64_t slab_pinned, lists_pinned; /* bytes */
    uint8_t *lists;
    uint64_t slab_device; /* device address of the staging slab */
    uint32_t stream_count, event_count, event_next, groups_out;
    struct akv_copy_stream streams[AKV_STREAMS_MAX];
    struct akv_copy_group *groups, *free_short, *free_long;
    struct akv_device_event *events;
    struct akv_batch *watched;
    uint64_t *batch_targets, *batch_sources; /* scratch of one memcpy_batch_async */
    size_t *batch_sizes;
    uint32_t kernel_count, batch_count;
    int64_t poll_ns; /* how long to sleep between looks at events: growing */
};

struct akv_region {
    uint64_t address, nbytes;
    uint64_t device_address; /* 0: not pinned */
    bool is_registered;      /* with the ring */
    bool is_lost;            /* a fault of the device has left copies on it that may still run */
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

enum { AKV_SPIN_IDLE, AKV_SPIN_DISK, AKV_SPIN_GPU, AKV_SPIN_ANNOUNCED, AKV_SPINS };

struct akv_reactor {
    struct akv_engine *engine;
    const struct akv_source *source;
    uint32_t index;
    pthread_t thread;
    bool has_thread;
    /* Shared with submitters. */
    _Atomic(struct akv_batch *) intake;
    _Atomic int sleeping, cancels, stop, roused;
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
    struct akv_device_state device;
    struct akv_region regions[AKV_REGIONS_MAX];
    uint32_t in_flight, in_flight_lane[AKV_LANES], background_in_flight;
    uint64_t in_flight_nbytes, bulk_in_flight_nbytes;
    uint32_t picks, turn, region_count; /* turn: the queue that the next pick for fairness begins with */
    int64_t next_deadline_ns; /* INT64_MAX: none */
    int64_t busy_until_ns; /* spin until then */
    uint32_t spins[AKV_SPINS], spin_misses[AKV_SPINS]; /* by what is waited for */
    bool must_notify, has_seen_stop, is_announced; /* the last: an order is on its way (akv_engine_rouse) */
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
    struct akv_batch *batches, *free_batches;
    struct akv_notice *leftovers;
    akv_device device;
    uint32_t held_requests;
    bool is_stopping;
    _Atomic(struct akv_notice *) done;
    _Atomic int notified, stopped_reactors;
    int done_fd;
    uint32_t reactor_count;
    struct akv_reactor *reactors;
};

int64_t akv_now_ns(void);

/* Whether bytes go towards memory (or the device): loads go before stores. */
static inline bool akv_is_load(uint32_t kind)
{
    return kind == AKV_READ || kind == AKV_LOAD;
}

static inline bool akv_has_file(uint32_t kind)
{
    return kind != AKV_LOAD && kind != AKV_SAVE;
}

/* How many bytes `nbytes` and the op_offsets of an op count. */
static inline uint64_t akv_unit(const akv_op *op)
{
    return op->placement == AKV_PINNED && op->file_offset ? op->file_offset : 1;
}

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
uint32_t akv_lane_of(const struct akv_reactor *r, const struct akv_batch *b, uint32_t nbytes);
void akv_lanes_enter(struct akv_reactor *r, struct akv_batch *b);
void akv_lanes_leave(struct akv_reactor *r, struct akv_batch *b);
void akv_lanes_issue(struct akv_reactor *r);

/* flight.c: one op from start to result */
bool akv_flight_can_start(const struct akv_reactor *r, const akv_op *op, uint32_t lane);
void akv_flight_start(struct akv_reactor *r, struct akv_batch *b, uint32_t op_index, const akv_op *op, uint32_t lane);
void akv_flight_answer(struct akv_reactor *r, struct akv_flight *f, int32_t result);
void akv_flight_release_due(struct akv_reactor *r, int64_t now_ns);
void akv_flight_copied(struct akv_reactor *r, struct akv_flight *f);
void akv_flight_fail(struct akv_reactor *r, struct akv_flight *f, int32_t code, bool keeps_slot);
int akv_flight_iov(const struct akv_flight *f, struct iovec *iov);

/* copy.c: the one seam through which bytes go between a staging slot and memory */
int akv_copy_check(const struct akv_batch *b, const akv_op *op, uint32_t alignment);
void akv_copy_out(struct akv_reactor *r, struct akv_flight *f);
void akv_copy_in(struct akv_reactor *r, struct akv_flight *f);
void akv_copy_blank(struct akv_flight *f);

/* batch.c: a batch inside the reactor */
void akv_batch_accept(struct akv_reactor *r, struct akv_batch *b);
void akv_batch_drop_pending(struct akv_reactor *r, struct akv_batch *b, int32_t code);
void akv_batch_op_done(struct akv_reactor *r, struct akv_batch *b, uint32_t op_index, int32_t code, uint32_t nbytes,
                       bool is_skipped);
void akv_batch_op_queued(struct akv_reactor *r, struct akv_batch *b, struct akv_device_event *tail);
void akv_batch_finish(struct akv_reactor *r, struct akv_batch *b);

/* device.c: the CUDA side of a reactor; copies.c: one group of copies */
int akv_device_open(struct akv_reactor *r);
void akv_device_close(struct akv_reactor *r);
void akv_device_take(struct akv_reactor *r, struct akv_batch *b);
void akv_device_add(struct akv_reactor *r, struct akv_flight *f);
void akv_device_leave(struct akv_batch *b);
void akv_device_next_turn(struct akv_reactor *r);
bool akv_device_may_start(struct akv_reactor *r, struct akv_batch *b, uint32_t lane);
void akv_device_flush(struct akv_reactor *r);
bool akv_device_poll(struct akv_reactor *r);
bool akv_device_is_busy(const struct akv_reactor *r);
void akv_device_fail(struct akv_reactor *r, int code);
int akv_copies_queue(struct akv_reactor *r, struct akv_copy_stream *s, struct akv_copy_group *g);
void akv_cuda_called(struct akv_reactor *r, int64_t began_ns);

/* Every CUDA call of the engine, timed. */
#define AKV_CUDA(r, entry, ...)                                                                                       __extension__({                                                                                                       int64_t began_ns_ = akv_now_ns();                                                                                 int code_ = (r)->device.api->entry(__VA_ARGS__);                                                                  akv_cuda_called((r), began_ns_);                                                                                  code_;                                                                                                        })

/* region.c */
void akv_region_command(struct akv_reactor *r, struct akv_batch *b);
struct akv_region *akv_region_pinned(struct akv_reactor *r, uint64_t address, uint64_t nbytes);
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
