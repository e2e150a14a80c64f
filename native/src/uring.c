/* uring.c: the io_uring source.
 *
 * DEFER_TASKRUN: completions appear only after the owning thread enters the kernel with GETEVENTS, and TASKRUN_FLAG
 * is how user space learns that some are waiting; spinning without that flag would spin for nothing. The eventfd
 * that wakes the reactor is read by an SQE of the ring itself, so that sleeping is one system call that also submits.
 * user_data 0 is that read; every other value is a flight. */
#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

enum { AKV_ENTRIES = 64, AKV_IO_WORKERS = 16, AKV_MEMLOCK_TRIES = 6 };

static void back_off(int attempt)
{
    struct timespec pause = {0, 5000000l << attempt}; /* 5 ms, doubling */
    nanosleep(&pause, NULL);
}

/* Kernels refuse flags they do not know with EINVAL: take off one layer at a time. A ring that has just been closed
 * gives its locked memory back late, so ENOMEM is tried again. */
static int make_ring(struct akv_reactor *r)
{
    const uint32_t base = IORING_SETUP_CQSIZE | IORING_SETUP_SUBMIT_ALL;
    const uint32_t coop = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
    uint32_t ladder[] = {
        base | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG,
        base | coop,
        base,
        IORING_SETUP_CQSIZE,
        0,
    };
    uint32_t flags = r->engine->options.flags;
    int code = -EINVAL;
    for (uint32_t i = flags & AKV_NO_COOP ? 2 : flags & AKV_NO_DEFER ? 1 : 0; i < 5 && code == -EINVAL; i++) {
        for (int attempt = 0; attempt < AKV_MEMLOCK_TRIES; attempt++) {
            struct io_uring_params params = {.flags = ladder[i]};
            params.cq_entries = 2 * (r->engine->options.queue_depth + AKV_ENTRIES);
            code = io_uring_queue_init_params(AKV_ENTRIES, &r->ring, &params);
            if (code != -ENOMEM)
                break;
            back_off(attempt);
        }
        r->setup_flags = ladder[i];
    }
    r->has_ring = code == 0;
    return code;
}

static int try_nop(struct akv_reactor *r)
{
    struct io_uring_cqe *cqe;
    io_uring_prep_nop(io_uring_get_sqe(&r->ring));
    int code = io_uring_submit_and_wait(&r->ring, 1);
    if (code < 0)
        return code;
    code = io_uring_peek_cqe(&r->ring, &cqe);
    if (code < 0)
        return code;
    code = cqe->res;
    io_uring_cqe_seen(&r->ring, cqe);
    return code;
}

static int put_buffer(struct akv_reactor *r, uint32_t index, uint64_t address, uint64_t nbytes)
{
    struct iovec iov = {(void *)(uintptr_t)address, nbytes};
    __u64 tag = 0;
    int code = io_uring_register_buffers_update_tag(&r->ring, index, &iov, &tag, 1);
    return code < 0 ? code : code == 1 ? 0 : -EAGAIN; /* a short count is a failure too */
}

static bool take_buffers(struct akv_reactor *r, uint32_t count, uint32_t *first)
{
    for (uint32_t i = 0, run = 0; i < AKV_BUFFERS_MAX; i++) {
        run = r->buffer_used[i] ? 0 : run + 1;
        if (run == count) {
            *first = i + 1 - count;
            memset(r->buffer_used + *first, 1, count);
            return true;
        }
    }
    return false;
}

static void drop_buffers(struct akv_reactor *r, uint32_t first, uint32_t done, uint32_t count)
{
    for (uint32_t i = 0; i < done; i++)
        put_buffer(r, first + i, 0, 0);
    memset(r->buffer_used + first, 0, count);
}

static int uring_region_add(struct akv_reactor *r, struct akv_region *region)
{
    if (!r->sparse_buffers)
        return -EOPNOTSUPP;
    uint32_t count = (region->nbytes + AKV_PIECE - 1) / AKV_PIECE, first;
    if (region->nbytes / AKV_PIECE >= AKV_BUFFERS_MAX || !take_buffers(r, count, &first))
        return -ENOSPC;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t at = i * AKV_PIECE, left = region->nbytes - at;
        int code = put_buffer(r, first + i, region->address + at, left < AKV_PIECE ? left : AKV_PIECE);
        if (code) {
            drop_buffers(r, first, i, count);
            return code;
        }
    }
    region->buffer_first = first;
    region->buffer_count = count;
    return 0;
}

static void uring_region_remove(struct akv_reactor *r, struct akv_region *region)
{
    drop_buffers(r, region->buffer_first, region->buffer_count, region->buffer_count);
}

/* As much of the staging slab as RLIMIT_MEMLOCK allows, halving; the rest is used unregistered. */
static void register_staging(struct akv_reactor *r)
{
    struct akv_region *region = &r->regions[0];
    uint64_t nbytes = r->slab.nbytes;
    int code = -ENOMEM;
    for (int attempt = 0; nbytes >= AKV_HUGE && code == -ENOMEM; attempt++) {
        *region = (struct akv_region){.address = (uintptr_t)r->slab.base, .nbytes = nbytes};
        code = uring_region_add(r, region);
        if (code == -ENOMEM && attempt < 2)
            back_off(attempt);
        else if (code == -ENOMEM)
            nbytes = nbytes / 2 / AKV_HUGE * AKV_HUGE;
    }
    region->is_open = region->is_registered = code == 0;
    r->register_errno = code ? code : nbytes < r->slab.nbytes ? -ENOMEM : 0;
    r->slab.registered = code ? 0 : nbytes;
    r->region_count = 1;
}

static int uring_open(struct akv_reactor *r, int32_t *where)
{
    const akv_options *options = &r->engine->options;
    const uint32_t needed = IORING_FEAT_EXT_ARG | IORING_FEAT_SUBMIT_STABLE | IORING_FEAT_NODROP;
    int code = make_ring(r);
    if (code)
        return code;
    if ((r->ring.features & needed) != needed) {
        io_uring_queue_exit(&r->ring);
        return -ENOSYS;
    }
    *where = AKV_AT_NOP;
    code = try_nop(r);
    if (code < 0) {
        io_uring_queue_exit(&r->ring);
        return code;
    }
    io_uring_ring_dontfork(&r->ring);
    unsigned workers[2] = {AKV_IO_WORKERS, AKV_IO_WORKERS};
    io_uring_register_iowq_max_workers(&r->ring, workers);
    r->files_registered = io_uring_register_files(&r->ring, r->engine->fds, options->fd_count) == 0;
    r->register_errno = -EOPNOTSUPP;
    if (!(options->flags & AKV_NO_FIXED)) {
        int sparse = io_uring_register_buffers_sparse(&r->ring, AKV_BUFFERS_MAX);
        r->sparse_buffers = sparse == 0;
        r->register_errno = sparse;
        if (r->sparse_buffers)
            register_staging(r);
    }
    return 0;
}

static struct io_uring_sqe *next_sqe(struct akv_reactor *r)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&r->ring);
    while (!sqe) { /* the ring holds a slice and the wake read; only a refused submit can fill it */
        io_uring_submit_and_get_events(&r->ring);
        r->queued = io_uring_sq_ready(&r->ring);
        sqe = io_uring_get_sqe(&r->ring);
    }
    return sqe;
}

static void prepare(struct io_uring_sqe *sqe, struct akv_flight *f, int fd)
{
    uint64_t at = f->op.file_offset + f->from;
    void *memory = f->base + f->from;
    bool is_read = f->batch->kind == AKV_READ;
    if (f->batch->kind == AKV_SYNC)
        io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
    else if (f->op.placement == AKV_VECTORED && is_read)
        io_uring_prep_readv(sqe, fd, f->iov, akv_flight_iov(f, f->iov), at);
    else if (f->op.placement == AKV_VECTORED)
        io_uring_prep_writev(sqe, fd, f->iov, akv_flight_iov(f, f->iov), at);
    else if (f->buffer >= 0 && is_read)
        io_uring_prep_read_fixed(sqe, fd, memory, f->asked, at, f->buffer);
    else if (f->buffer >= 0)
        io_uring_prep_write_fixed(sqe, fd, memory, f->asked, at, f->buffer);
    else if (is_read)
        io_uring_prep_read(sqe, fd, memory, f->asked, at);
    else
        io_uring_prep_write(sqe, fd, memory, f->asked, at);
}

static void uring_queue(struct akv_reactor *r, struct akv_flight *f)
{
    struct io_uring_sqe *sqe = next_sqe(r);
    bool is_fixed = r->files_registered;
    prepare(sqe, f, is_fixed ? (int)f->op.file : r->engine->fds[f->op.file]);
    if (is_fixed)
        sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(sqe, f);
    r->queued++;
}

static void uring_submit(struct akv_reactor *r)
{
    if (r->queued == 0)
        return;
    AKV_COUNT(r, submits, 1);
    io_uring_submit_and_get_events(&r->ring); /* a refusal leaves the SQEs queued: the next call takes them */
    r->queued = io_uring_sq_ready(&r->ring);
}

static uint32_t ring_flags(struct akv_reactor *r)
{
    return IO_URING_READ_ONCE(*r->ring.sq.kflags);
}

static bool uring_has_news(struct akv_reactor *r)
{
    return io_uring_cq_ready(&r->ring) > 0 || (ring_flags(r) & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW));
}

static void take_cqe(struct akv_reactor *r, struct io_uring_cqe *cqe)
{
    struct akv_flight *f = io_uring_cqe_get_data(cqe);
    if (f)
        akv_flight_answer(r, f, cqe->res);
    else
        r->wake_armed = false;
}

static void uring_reap(struct akv_reactor *r)
{
    struct io_uring_cqe *cqes[AKV_ENTRIES];
    uint32_t flags = ring_flags(r);
    if (flags & IORING_SQ_CQ_OVERFLOW) /* in-flight never exceeds the CQ; if it says so all the same, count it */
        AKV_COUNT(r, overflows, 1);
    if (flags & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW))
        io_uring_get_events(&r->ring);
    for (;;) {
        unsigned count = io_uring_peek_batch_cqe(&r->ring, cqes, AKV_ENTRIES);
        if (count == 0)
            return;
        for (unsigned i = 0; i < count; i++) {
            struct io_uring_cqe cqe = *cqes[i];
            take_cqe(r, &cqe);
        }
        io_uring_cq_advance(&r->ring, count);
    }
}

static void uring_sleep(struct akv_reactor *r, int64_t timeout_ns)
{
    if (!r->wake_armed) {
        struct io_uring_sqe *sqe = next_sqe(r);
        io_uring_prep_read(sqe, r->wake_fd, &r->wake_value, sizeof r->wake_value, 0);
        io_uring_sqe_set_data(sqe, NULL);
        r->wake_armed = true;
    }
    struct __kernel_timespec timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    struct io_uring_cqe *cqe;
    AKV_COUNT(r, submits, 1);
    io_uring_submit_and_wait_timeout(&r->ring, &cqe, 1, &timeout, NULL);
    r->queued = io_uring_sq_ready(&r->ring);
}

/* Nothing is in flight now but the wake read; it ends before the ring does, because closing a ring cancels nothing
 * that its thread could still wait for, and the read writes into the reactor. Buffers and files are given back by name:
 * the kernel ends a ring late, and not at all while a forked child still has its descriptor. */
static void uring_close(struct akv_reactor *r)
{
    uint64_t one = 1;
    if (r->wake_armed && write(r->wake_fd, &one, sizeof one) == sizeof one)
        while (r->wake_armed) {
            io_uring_submit_and_wait(&r->ring, 1);
            uring_reap(r);
        }
    if (r->sparse_buffers)
        io_uring_unregister_buffers(&r->ring);
    if (r->files_registered)
        io_uring_unregister_files(&r->ring);
    io_uring_queue_exit(&r->ring);
    r->has_ring = false;
}

const struct akv_source akv_source_uring = {
    .open = uring_open,
    .queue = uring_queue,
    .submit = uring_submit,
    .has_news = uring_has_news,
    .reap = uring_reap,
    .sleep = uring_sleep,
    .region_add = uring_region_add,
    .region_remove = uring_region_remove,
    .close = uring_close,
};
