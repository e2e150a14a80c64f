/* threads.c: the source for places where io_uring is refused: a bounded pool of threads doing preadv and pwritev on
 * the same memory. Lanes, caps, retries, cancellation and results are the reactor's and the same for both. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "internal.h"

static int32_t do_io(const struct akv_engine *e, struct akv_flight *f)
{
    int fd = e->fds[f->op.file];
    int64_t at = f->op.file_offset + f->from;
    ssize_t n;
    if (f->batch->kind == AKV_SYNC)
        n = fdatasync(fd);
    else if (f->batch->kind == AKV_READ)
        n = preadv(fd, f->iov, akv_flight_iov(f, f->iov), at);
    else
        n = pwritev(fd, f->iov, akv_flight_iov(f, f->iov), at);
    return n < 0 ? -errno : (int32_t)n;
}

static void hand_back(struct akv_reactor *r, struct akv_flight *f)
{
    struct akv_flight *head = atomic_load_explicit(&r->pool.done, memory_order_relaxed);
    do
        f->next = head;
    while (!atomic_compare_exchange_weak(&r->pool.done, &head, f));
    akv_reactor_wake(r);
}

static void *worker(void *argument)
{
    struct akv_reactor *r = argument;
    struct akv_pool *pool = &r->pool;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->head && !pool->stop)
            pthread_cond_wait(&pool->work, &pool->lock);
        struct akv_flight *f = pool->head;
        if (!f)
            break;
        pool->head = f->next;
        pthread_mutex_unlock(&pool->lock);
        f->result = do_io(r->engine, f);
        hand_back(r, f);
        pthread_mutex_lock(&pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static void stop_workers(struct akv_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->count; i++)
        pthread_join(pool->threads[i], NULL);
    pool->count = 0;
}

static int threads_open(struct akv_reactor *r, int32_t *where)
{
    struct akv_pool *pool = &r->pool;
    *where = AKV_AT_THREAD;
    for (uint32_t i = 0; i < r->engine->options.threads; i++) {
        int code = pthread_create(&pool->threads[i], NULL, worker, r);
        if (code) {
            stop_workers(pool);
            return -code;
        }
        pool->count++;
    }
    r->register_errno = -EOPNOTSUPP;
    return 0;
}

static void threads_queue(struct akv_reactor *r, struct akv_flight *f)
{
    f->next = NULL;
    if (r->pool.queued_tail)
        r->pool.queued_tail->next = f;
    else
        r->pool.queued_head = f;
    r->pool.queued_tail = f;
    r->queued++;
}

static void threads_submit(struct akv_reactor *r)
{
    struct akv_pool *pool = &r->pool;
    if (r->queued == 0)
        return;
    AKV_COUNT(r, submits, 1);
    pthread_mutex_lock(&pool->lock);
    if (pool->head)
        pool->tail->next = pool->queued_head;
    else
        pool->head = pool->queued_head;
    pool->tail = pool->queued_tail;
    if (r->queued == 1)
        pthread_cond_signal(&pool->work);
    else
        pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    pool->queued_head = pool->queued_tail = NULL;
    r->queued = 0;
}

static bool threads_has_news(struct akv_reactor *r)
{
    return atomic_load(&r->pool.done) != NULL;
}

static void threads_reap(struct akv_reactor *r)
{
    struct akv_flight *f = atomic_exchange(&r->pool.done, NULL);
    while (f) {
        struct akv_flight *next = f->next;
        akv_flight_answer(r, f, f->result);
        f = next;
    }
}

static void threads_sleep(struct akv_reactor *r, int64_t timeout_ns)
{
    threads_submit(r);
    struct pollfd poll_fd = {.fd = r->wake_fd, .events = POLLIN};
    struct timespec timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    uint64_t value;
    if (ppoll(&poll_fd, 1, &timeout, NULL) > 0 && read(r->wake_fd, &value, sizeof value) < 0)
        return; /* somebody else's wake: the loop looks at everything anyway */
}

static int threads_region_add(struct akv_reactor *r, struct akv_region *region)
{
    return -EOPNOTSUPP; /* nothing to register with: reads and writes land there all the same */
}

static void threads_region_remove(struct akv_reactor *r, struct akv_region *region)
{
}

static void threads_close(struct akv_reactor *r)
{
    stop_workers(&r->pool);
}

const struct akv_source akv_source_threads = {
    .open = threads_open,
    .queue = threads_queue,
    .submit = threads_submit,
    .has_news = threads_has_news,
    .reap = threads_reap,
    .sleep = threads_sleep,
    .region_add = threads_region_add,
    .region_remove = threads_region_remove,
    .close = threads_close,
};
