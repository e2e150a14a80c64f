/* What Python may see of the engine. Read both by the C compiler (through akv.h) and by cffi, so it holds
 * declarations only: no preprocessor lines.
 *
 * Results are zero, a count, or a negative errno. Nothing here calls back into Python.
 *
 * OWNERSHIP. `ops`, `copies`, `results` and every address they name belong to the engine from a successful
 * akv_engine_submit until the batch's ticket has come out of akv_engine_drain: the caller keeps them alive and
 * leaves them alone until then, whether the batch was cancelled or not. The engine reads each op once, when it
 * starts it, and checks it then; it writes `results` and read destinations only while it owns them.
 *
 * THREADS. Any thread may call any function; akv_engine_free is called once, after akv_engine_stopped says 1 and
 * nothing else uses the engine. One reactor thread per ring does all the work and never touches Python.
 * After fork() every call in the child answers -ECHILD and does nothing.
 */

typedef struct akv_engine akv_engine;

enum { AKV_SOURCE_URING = 0, AKV_SOURCE_THREADS = 1 };
enum { AKV_READ = 0, AKV_WRITE = 1, AKV_SYNC = 2, AKV_REGION_ADD = 3, AKV_REGION_REMOVE = 4, AKV_EVENT = 5,
       AKV_LOAD = 6, AKV_SAVE = 7 };
enum { AKV_DIRECT = 0, AKV_STAGED = 1, AKV_VECTORED = 2, AKV_PINNED = 3 };
enum { AKV_NO_FIXED = 1, AKV_NO_DEFER = 2, AKV_SCHED_BATCH = 4, AKV_NO_COOP = 8 };

/* One I/O of at most max_op_nbytes.
 *   direct:   `address` is where the bytes go to or come from.
 *   staged:   the engine lends a staging slot; `copies` move the pieces between the slot and memory. What a staged
 *             write does not cover with copies is written as zeros.
 *   vectored: `copies`, in order and without gaps, are the memory of one scattered read or gathered write.
 *   pinned:   for AKV_LOAD and AKV_SAVE, which have no file: `address` lies in a region that is pinned, and `copies` move
 *             the pieces between its `nbytes` and device memory. `nbytes` and each op_offset count units of `file_offset`
 *             bytes (0: of one byte), so that a region may be larger than 4 GiB.
 * `nbytes_owed`: of a direct or staged read that is rounded up for direct I/O, how many of its first bytes have to come; what
 * is behind them may be past the end of the file, and no copy reaches there. 0: all of them. */
typedef struct {
    uint64_t file_offset;
    uint64_t address;
    uint32_t nbytes;
    uint32_t file;
    uint32_t copy_first;
    uint32_t copy_count;
    uint32_t placement;
    uint32_t nbytes_owed;
} akv_op;

typedef struct {
    uint64_t address;
    uint32_t op_offset;
    uint32_t nbytes;
} akv_copy;

enum { AKV_PINNED_COPIES = 1024 }; /* copies of one op in what akv_engine_copy_pinned records */

enum { AKV_CUDA_ERROR = 10000 };

/* code: 0, -errno, or -(AKV_CUDA_ERROR + CUresult); -ENODATA is end of file, -ECANCELED dropped before the start, -ETIME past its deadline.
 * nbytes: how much of the op had arrived. */
typedef struct {
    int32_t code;
    uint32_t nbytes;
} akv_result;

/* What happened to a batch. A batch with an order is told of twice:
 *   stage AKV_ENQUEUED  every copy has been queued on the copy stream (or its op has failed); `event`, recorded behind the
 *                       last of them, is valid until the batch's AKV_DONE has been drained
 *   stage AKV_DONE      nothing will touch its memory any more */
enum { AKV_DONE = 0, AKV_ENQUEUED = 1 };
typedef struct {
    int64_t ticket;
    uint64_t event;
    int32_t status;
    uint32_t failed;
    uint32_t stage;
    uint32_t reserved;
} akv_completion;

enum { AKV_FAULT_ERROR = 0, AKV_FAULT_SHORT = 1, AKV_FAULT_DELAY = 2, AKV_FAULT_REORDER = 3 };

/* Faults are for tests: they act below the engine's logic, where the kernel's answer would come from.
 * A rule applies to every `every`-th op (counting from `phase`) of `kind` (-1: any), at most `times` times.
 *   ERROR:   no I/O, the op is answered with `value` (a negative errno, or 0 for end of file)
 *   SHORT:   at most `value` bytes are asked of the device
 *   DELAY:   the answer comes `value` microseconds late;   REORDER: up to `value` microseconds late, at random */
typedef struct {
    int32_t kind;
    uint32_t action;
    int32_t value;
    uint32_t every;
    uint32_t phase;
    uint32_t times;
} akv_fault;

/* CUDA, handed over at open: the engine links against nothing of it, and tests hand over a fake. The types are the
 * driver API's (CUresult is int; CUcontext, CUstream, CUevent and CUfunction are pointers; CUdeviceptr is 64 bits).
 * Everything is required but memcpy_batch_async (its CUDA 13 form), gather and scatter, which may be NULL: then the
 * next way of copying serves. An error other than CUDA_ERROR_NOT_READY ends the device path for good: what was queued
 * keeps its slots, because the hardware may still read or write them. */
typedef struct {
    uint32_t source_access_order;
    uint32_t source_location_type;
    int32_t source_location_id;
    uint32_t target_location_type;
    int32_t target_location_id;
    uint32_t flags;
} akv_copy_attributes; /* CUmemcpyAttributes */

/* One entry of the list that the kernels read: gather moves from pinned host memory to the device, scatter back. */
typedef struct {
    uint64_t target;
    uint64_t source;
    uint64_t nbytes;
} akv_kernel_copy;

typedef struct {
    void *context;
    int (*ctx_get_current)(void **context);
    int (*ctx_set_current)(void *context);
    int (*thread_exchange_capture_mode)(int *mode);
    int (*event_create)(void **event, unsigned int flags);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*stream_create)(void **stream, unsigned int flags, int priority);
    int (*stream_destroy)(void *stream);
    int (*stream_is_capturing)(void *stream, int *status);
    int (*stream_wait_event)(void *stream, void *event, unsigned int flags);
    int (*memcpy_htod_async)(uint64_t target, const void *source, size_t nbytes, void *stream);
    int (*memcpy_dtoh_async)(void *target, uint64_t source, size_t nbytes, void *stream);
    int (*memcpy_batch_async)(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count,
                              akv_copy_attributes *attributes, size_t *attribute_indices, size_t attribute_count,
                              void *stream);
    int (*launch_kernel)(void *function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                         unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_nbytes,
                         void *stream, void **parameters, void **extra);
    int (*mem_host_register)(void *memory, size_t nbytes, unsigned int flags);
    int (*mem_host_unregister)(void *memory);
    int (*mem_host_get_device_pointer)(uint64_t *device, void *memory, unsigned int flags);
    int (*pointer_get_attribute)(void *value, int attribute, uint64_t address);
    int (*pointer_get_attributes)(unsigned int count, int *attributes, void **values, uint64_t address);
    void *gather; /* kernel(const akv_kernel_copy *list, uint32_t count) */
    void *scatter;
    uint32_t kernel_blocks;
    uint32_t kernel_threads;
    uint32_t kernel_nbytes_max; /* copies up to this size go by kernel */
    uint32_t batch_nbytes_max;  /* from there up to this size by memcpy_batch_async, when there are several */
    uint32_t copy_streams;
    int32_t stream_priority; /* of the copy streams; lower numbers go first */
} akv_device;

/* How a batch with device memory is ordered. `fence` (a recorded event, or NULL) holds its copies back; `stream_key`
 * chooses the copy stream, so that a fence behind a long kernel holds up only its own caller. */
typedef struct {
    void *fence;
    uint64_t stream_key;
} akv_order;

typedef struct {
    uint32_t source;
    uint32_t flags;
    uint32_t rings;
    uint32_t queue_depth;
    uint32_t threads;
    uint32_t max_batches;
    uint32_t max_requests;
    uint32_t small_nbytes;
    uint32_t max_op_nbytes;
    uint32_t memory_alignment;
    uint32_t offset_alignment;
    uint32_t spin_us;
    uint64_t bulk_nbytes;
    uint64_t staging_nbytes;
    const int *fds;
    uint32_t fd_count;
    uint32_t fault_count;
    const akv_fault *faults;
    uint64_t fault_seed;
    const akv_device *device; /* NULL: host memory only */
} akv_options;

/* Where akv_engine_open failed. */
enum { AKV_AT_CUDA = 6 };
enum { AKV_AT_OPTIONS = 0, AKV_AT_MEMORY = 1, AKV_AT_THREAD = 2, AKV_AT_SETUP = 3, AKV_AT_NOP = 4, AKV_AT_EVENTFD = 5 };

typedef struct {
    uint64_t batches;
    uint64_t ops;
    uint64_t submits;
    uint64_t sleeps;
    uint64_t wakes;
    uint64_t bytes_read;
    uint64_t bytes_written;
    uint64_t bytes_staged;
    uint64_t fixed_ops;
    uint64_t resumed_ops;
    uint64_t retried_ops;
    uint64_t failed_ops;
    uint64_t dropped_ops;
    uint64_t faults;
    uint64_t in_flight_max;
    uint64_t bulk_nbytes_max;
    uint64_t in_flight;
    uint64_t slots_leased;
    uint64_t overflows;
    uint64_t kernel_launches;
    uint64_t kernel_copies;
    uint64_t batch_copies;
    uint64_t single_copies;
    uint64_t copy_groups;
    uint64_t bytes_to_device;
    uint64_t bytes_from_device;
    uint64_t cuda_calls;
    uint64_t cuda_calls_slow;
    uint64_t cuda_call_ns_max;
    uint64_t slots_leaked;
    uint64_t device_error; /* the CUresult that ended the device path, or 0 */
} akv_statistics;

typedef struct {
    uint32_t setup_flags;
    uint32_t files_registered;
    uint32_t sparse_buffers;
    int32_t register_errno;
    uint64_t staging_nbytes;
    uint64_t registered_nbytes;
} akv_ring_info;

akv_engine *akv_engine_open(const akv_options *options, int32_t *code, int32_t *where);
int akv_engine_fileno(akv_engine *engine);
int64_t akv_engine_submit(akv_engine *engine, uint32_t ring, uint32_t kind, uint32_t priority, int64_t deadline_ns,
                          const akv_op *ops, uint32_t op_count, const akv_copy *copies, uint32_t copy_count,
                          akv_result *results, const akv_order *order);
/* A batch that is done when `event`, which the caller has recorded and keeps, is. */
int64_t akv_engine_watch(akv_engine *engine, uint32_t ring, void *event);
/* `device_address`: where the device sees memory that the caller has pinned; 0 if it has not. */
int64_t akv_engine_region(akv_engine *engine, uint32_t ring, uint32_t kind, uint64_t address, uint64_t nbytes,
                          uint64_t device_address);
/* A batch for this ring will be submitted within microseconds: its thread wakes up now, while the caller prepares it. A
 * hint, which costs a moment of spinning if none comes. */
int akv_engine_rouse(akv_engine *engine, uint32_t ring);
int akv_engine_drain(akv_engine *engine, akv_completion *out, uint32_t max);
/* Spins until something can be drained (1) or `microseconds` have passed (0). After a 1 the caller has to drain: the
 * descriptor may not have been told. */
int akv_engine_poll(akv_engine *engine, uint32_t microseconds);
/* The smallest transfers, checked, recorded and submitted in one step: the ticket, or a negative errno as
 * akv_engine_submit has it. `record` is the caller's, and the engine's until the ticket has been drained: an akv_op, an
 * akv_result, then the akv_copy entries. read_one needs one of each; copy_pinned `count` copies, and ops and results for
 * every 1024 of them.
 *   read_one:    `nbytes` of a file for `into_nbytes` of memory, directly where sizes and alignment let it
 *   copy_pinned: a load or save, fenced by `event` recorded on `stream` (no fence: event 0). In a region of more than 2 GiB
 *                `offsets` must be whole pages;
 *                arguments otherwise those of akv_pinned_copies. -EDOM: something is wrong, ask step by step. */
int64_t akv_engine_read_one(akv_engine *engine, uint32_t ring, uint32_t priority, uint32_t file, uint64_t file_offset,
                            uint32_t nbytes, void *into, uint32_t into_nbytes, void *record, size_t record_nbytes);
int64_t akv_engine_copy_pinned(akv_engine *engine, uint32_t ring, uint32_t kind, uint32_t priority, int32_t ordinal,
                               uint64_t region, uint64_t region_nbytes, const int64_t *offsets, uint64_t device,
                               uint64_t device_nbytes, const int64_t *places, uint32_t count, uint32_t nbytes,
                               uint64_t stream, uint64_t event, void *record, size_t record_nbytes);
/* For a submitting call with device memory, in its own thread. Each answers 1 when all is well; on a 0 the caller asks the
 * driver itself what is wrong. */
int akv_engine_is_device_memory(akv_engine *engine, uint64_t address, uint64_t nbytes, int32_t ordinal);
int akv_engine_fence(akv_engine *engine, void *stream, void *event);
int akv_pinned_copies(akv_copy *copies, uint32_t count, const int64_t *offsets, uint64_t region_nbytes, uint64_t device,
                      uint64_t device_nbytes, const int64_t *places, uint32_t nbytes, uint32_t unit);
void akv_host_function(void *eventfd);
int akv_engine_cancel(akv_engine *engine, int64_t ticket);
int akv_engine_stop(akv_engine *engine);
int akv_engine_stopped(akv_engine *engine);
int akv_engine_statistics(akv_engine *engine, uint32_t ring, akv_statistics *out);
int akv_engine_ring_info(akv_engine *engine, uint32_t ring, akv_ring_info *out);
int akv_engine_free(akv_engine *engine);

/* Private, huge-page, DONTFORK, touched memory: the only kind the engine stages in. NULL: no memory. */
void *akv_slab_new(uint64_t nbytes);
int akv_slab_free(void *slab, uint64_t nbytes);
/* Copies between rows of `row_nbytes` in `memory` and as many bytes at each of `places` (addresses): to the rows when
 * `inward`, else from them. The two must not overlap, and rows that are written are each named once. -ERANGE: a row outside of the
 * memory, or a place of 0; then nothing has been copied. */
int akv_copy_rows(void *memory, uint64_t memory_nbytes, uint64_t row_nbytes, const int64_t *rows, const int64_t *places,
                  uint64_t count, int inward);
