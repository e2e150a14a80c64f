/* A CUDA driver without a GPU, for tests: what its files share.
 *
 * THE RULE. An asynchronous operation is only queued. It is carried out as late as stream and event order allow: when
 * the host waits for it, or when a query is answered with "done", and then together with exactly those operations that
 * must have come before it. Sources, and the lists that kernels read, are looked at then and not earlier. Whoever
 * reuses memory before CUDA has said that it may is therefore caught, every time.
 *
 * ORDER. An operation comes after: its predecessor on the stream; the record that a wait on its stream named; and what
 * the legacy stream's rule adds. Dependencies point backwards in time only, so there is always something to run.
 *
 * LOCK. One recursive mutex, taken by fake_enter and given back by fake_leave, guards everything. Host functions run
 * under it, on the thread that carries the operation out.
 *
 * HANDLES of streams, events, modules and graphs are numbers with a generation, not addresses: a destroyed one is
 * recognised for ever. */
#ifndef FAKE_H
#define FAKE_H

#include <pthread.h>
#include <stdbool.h>

#include "driver.h"
#include "entries.h"

enum { DEVICES_MAX = 4, CONTEXT_STACK_MAX = 16 };
enum { KERNEL_GATHER = 1, KERNEL_SCATTER, KERNEL_FILL, KERNEL_SLOW };
enum { TAG_STREAM = 0x11, TAG_EVENT, TAG_MODULE, TAG_GRAPH, TAG_FUNCTION };
#define SLOW_UNTIL_FORCED UINT32_MAX

struct fake_context {
    int device;
    int retained;
    struct stream *legacy;
};

enum region_kind { REGION_DEVICE, REGION_PINNED, REGION_REGISTERED };
struct region {
    uint64_t serial; /* never used twice: what an operation remembers of the memory it will touch */
    enum region_kind kind;
    unsigned flags;
    uint8_t *host;   /* where the bytes are */
    uint64_t device; /* the address that the device knows them by */
    uint64_t nbytes;
    struct fake_context *context;
};

/* An end of a copy. Pageable memory has no region. */
struct place {
    uint64_t region;
    enum region_kind kind;
    uint8_t *host;
};

struct transfer {
    struct place target;
    struct place source;
    uint64_t nbytes;
    uint8_t *snapshot; /* the source's bytes, where CUDA reads them during the call; owned */
    bool is_set;
    uint8_t value;
};

struct kernel {
    int kind;
    uint64_t address;
    uint64_t count; /* entries of a list, bytes of a fill */
    uint32_t value;
};

enum op_kind { OP_TRANSFERS, OP_KERNEL, OP_RECORD, OP_WAIT, OP_HOST_FUNCTION, OP_NOTHING };
struct op {
    enum op_kind kind;
    struct stream *stream;
    struct op *next;
    uint32_t references; /* the queue, events, and later operations that wait for this one */
    bool done;
    uint64_t position; /* on its stream */
    uint64_t serial;   /* among all operations */
    uint64_t mark;     /* the pass that needs it */
    int64_t queries_left; /* below 0: not drawn yet */
    uint32_t slow_left;
    struct op **needs;
    uint32_t need_count;
    struct transfer *transfers;
    uint64_t transfer_count;
    struct kernel kernel;
    CUhostFn function;
    void *data;
};

struct stream {
    uint64_t id;
    CUstream handle;
    struct fake_context *context;
    unsigned flags;
    bool legacy;
    bool held;
    bool destroyed; /* the handle is gone, the queued work is not */
    struct op *head, *tail;
    struct op *marker; /* legacy stream: what a query asks after; may be done */
    struct op *marked; /* the last operation of the current pass */
    uint64_t marked_pass;
    uint64_t issued;
    struct capture *capture;
    bool unjoined;
    uint64_t captured; /* operations of the capture so far */
    struct stream *next;
};

struct event {
    struct op *record; /* NULL: never recorded, or captured */
    uint64_t capture;  /* id of the capture that it was last recorded in, or 0 */
    uint64_t captured_on; /* id of the stream, and how far its part of the capture was */
    uint64_t captured_at;
    struct fake_context *context;
};

struct capture {
    uint64_t id;
    int mode;
    uint64_t thread;
    bool invalidated;
    struct stream *origin;
    struct capture *next;
};

struct thread_state {
    uint64_t epoch; /* of the fake that the rest belongs to */
    uint64_t id;
    struct fake_context *stack[CONTEXT_STACK_MAX]; /* the last one is current */
    int depth;
    int capture_mode;
    bool waited; /* during this call */
    int running_host_function;
    struct stream *per_thread[DEVICES_MAX];
};

struct fake_call {
    const char *name;
    uint64_t thread;
    uint64_t stream;
    int32_t result;
    int32_t waited;
};

struct state {
    uint64_t seed, draws, epoch;
    bool initialised;
    bool plain_addresses;
    int devices;
    int driver_version;
    int sticky;
    uint32_t queries_min, queries_max;
    uint32_t wait_limit_ms;
    struct fake_context contexts[DEVICES_MAX];
    struct stream *streams;
    struct capture *captures;
    uint64_t stream_ids, capture_ids, region_serials, issues;
    uint64_t device_limit, pinned_limit, device_nbytes, pinned_nbytes;
    uint64_t pending, executed, violations, captures_invalidated;
    int64_t fault_after; /* operations until one fails when carried out; below 0: never */
    int fault_result;
    char violation[160];
};
extern struct state fake;
extern const char *const fake_entry_names[ENTRY_COUNT];
extern bool fake_hidden[ENTRY_COUNT];

/* state.c */
CUresult fake_enter(enum fake_entry entry);
CUresult fake_leave(enum fake_entry entry, CUstream stream, CUresult code);
void fake_lock(void);
void fake_unlock(void);
bool fake_wait_for_change(const struct timespec *until);
void fake_changed(void);
struct thread_state *fake_thread(void);
struct fake_context *fake_current(void);
uint64_t fake_mix(uint64_t value);
uint64_t fake_draw(uint64_t bound);
void fake_violate(const char *format, ...) __attribute__((format(printf, 1, 2)));
void *fake_allocate(size_t count, size_t size);
int fake_entry_of(const char *name);
bool fake_is_sticky(int result);
void fake_calls_reset(void);

/* handles.c */
void *fake_handle_new(int tag, void *object);
void *fake_handle_get(int tag, const void *handle);
void fake_handle_drop(const void *handle);
int64_t fake_handles_live(int tag);
void fake_handles_each(int tag, void (*visit)(void *object));
void fake_handles_reset(void);

/* memory.c */
CUresult fake_place(uint64_t address, uint64_t nbytes, struct place *out);
uint8_t *fake_place_bytes(const struct place *place);
uint8_t *fake_kernel_bytes(uint64_t address, uint64_t nbytes);
int64_t fake_regions_live(enum region_kind kind);
void fake_regions_reset(void);

/* schedule.c */
struct op *fake_op_new(enum op_kind kind, struct stream *stream);
void fake_op_keep(struct op *op);
void fake_op_drop(struct op *op);
void fake_op_needs(struct op *op, struct op *needed);
void fake_op_issue(struct op *op);
CUresult fake_force(struct op **goals, uint32_t count);
CUresult fake_force_stream(struct stream *stream);
CUresult fake_force_context(struct fake_context *context);
CUresult fake_query(struct op *goal);
CUresult fake_query_stream(struct stream *stream);
uint64_t fake_run_all(void);
bool fake_is_blocking(const struct stream *stream);
void fake_queue_clear(struct stream *stream);

/* work.c */
CUresult fake_op_work(struct op *op);

/* streams.c */
struct stream *fake_stream_new(struct fake_context *context, unsigned flags);
struct stream *fake_stream_of(CUstream handle);
void fake_stream_reap(struct stream *stream);
void fake_streams_reset(void);

/* lookup.c */
const void *fake_address_of(int entry, int version);

/* capture.c: what fake_admit answers when the operation has become a graph's */
enum { ADMIT_CAPTURED = -1 };
CUresult fake_admit(struct stream *stream);
CUresult fake_capture_prohibits(void);
CUresult fake_capture_conflicts(struct stream *stream);
struct capture *fake_capture_of(uint64_t id);
void fake_capture_invalidate(struct capture *capture);
void fake_capture_leave(struct stream *stream);
void fake_captures_reset(void);

/* The body of an entry point: count, check, do, log. */
#define ENTRY(name, stream, expression)                         \
    do {                                                        \
        CUresult code_ = fake_enter(ENTRY_##name);              \
        if (code_ == CUDA_SUCCESS)                              \
            code_ = (expression);                               \
        return fake_leave(ENTRY_##name, (CUstream)(stream), code_); \
    } while (0)

#endif
