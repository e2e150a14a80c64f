/* reactor.c: the loop of the one thread that owns a ring.
 *
 * Sleeping without losing a wake: the reactor writes sleeping = 1, then looks at everything a submitter may have
 * changed, then sleeps; a submitter changes first, then exchanges sleeping for 0 and writes the eventfd if it was 1.
 * Both are sequentially consistent, so at least one of the two sees the other.
 *
 * Spinning: a wake-up of an idle core costs more than a 4 KiB read. The reactor spins for spin_us while little is in
 * flight or something has just ended; with many flights the next completion is near and sleeping costs less CPU.
 * A spin that ends for nothing was a mistake: the device is slower than that, or the cores are taken, and a thread
 * that has just spun is woken late (4 KiB reads at 150 us instead of 48 on two busy cores). After a few such misses
 * it spins only now and then, to find out whether that has changed.
 *
 * Rousing: a submitter that is about to prepare an order says so, and this thread wakes up meanwhile, not after. */
#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

enum { AKV_SPIN_FLIGHTS = 4, AKV_SPIN_NBYTES = 256 << 10, AKV_SPIN_MISSES = 4, AKV_SPIN_RETRY = 64 };

int64_t akv_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void tell(int eventfd)
{
    uint64_t one = 1;
    while (write(eventfd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

void akv_reactor_wake(struct akv_reactor *r)
{
    if (atomic_load(&r->sleeping) && atomic_exchange(&r->sleeping, 0))
        tell(r->wake_fd);
}

/* The loop clears `notified` before it takes the done stack (akv_engine_drain): the order loses no wake. */
void akv_engine_notify(struct akv_engine *e)
{
    if (atomic_exchange(&e->notified, 1) == 0)
        tell(e->done_fd);
}

static void take_intake(struct akv_reactor *r, int64_t now_ns)
{
    if (!atomic_load_explicit(&r->intake, memory_order_relaxed))
        return;
    if (!r->is_announced && now_ns < r->busy_until_ns) /* soon after the last end: a spin would have met it */
        r->spin_misses[AKV_SPIN_IDLE] = 0;
    struct akv_batch *stack = atomic_exchange_explicit(&r->intake, NULL, memory_order_acquire), *first = NULL;
    while (stack) { /* a stack is last in first out: turn it round */
        struct akv_batch *next = stack->next;
        stack->next = first;
        first = stack;
        stack = next;
    }
    r->is_announced = false;
    while (first) {
        struct akv_batch *next = first->next;
        akv_batch_accept(r, first);
        first = next;
    }
}

/* An order within spin_us: spin for it. The announcement is kept until an order comes or the spin has ended. */
static void take_announcement(struct akv_reactor *r, int64_t now_ns)
{
    if (!atomic_load_explicit(&r->roused, memory_order_relaxed))
        return;
    atomic_store(&r->roused, 0);
    r->is_announced = true;
    r->busy_until_ns = now_ns + r->engine->options.spin_us * 1000ll;
}

static void take_cancels(struct akv_reactor *r)
{
    if (!atomic_load_explicit(&r->cancels, memory_order_relaxed) || !atomic_exchange(&r->cancels, 0))
        return;
    for (struct akv_batch *b = r->live, *next; b; b = next) {
        next = b->live_next;
        if (atomic_load(&b->cancel_requested))
            akv_batch_drop_pending(r, b, -ECANCELED);
    }
}

static void drop_everything(struct akv_reactor *r)
{
    for (struct akv_batch *b = r->live, *next; b; b = next) {
        next = b->live_next;
        akv_batch_drop_pending(r, b, -ECANCELED);
    }
}

static void expire(struct akv_reactor *r, int64_t now_ns)
{
    if (now_ns < r->next_deadline_ns)
        return;
    r->next_deadline_ns = INT64_MAX;
    for (struct akv_batch *b = r->live, *next; b; b = next) {
        next = b->live_next;
        if (!b->deadline_ns || b->lane[AKV_SMALL].left + b->lane[AKV_BULK].left == 0)
            continue;
        if (b->deadline_ns <= now_ns)
            akv_batch_drop_pending(r, b, -ETIME);
        else if (b->deadline_ns < r->next_deadline_ns)
            r->next_deadline_ns = b->deadline_ns;
    }
}

static bool has_orders(struct akv_reactor *r)
{
    return atomic_load(&r->intake) || atomic_load(&r->cancels) ||
           (atomic_load(&r->stop) && !(r->has_seen_stop && r->live)); /* while it drains, the order is old news */
}

/* Copies on the GPU are worth a spin however many they are: nothing else tells of their end. */
static bool spin(struct akv_reactor *r, int64_t now_ns)
{
    bool has_copies = akv_device_is_busy(r);
    bool is_light = r->in_flight <= AKV_SPIN_FLIGHTS && r->in_flight_nbytes <= AKV_SPIN_NBYTES;
    int64_t until = r->in_flight || has_copies ? now_ns + r->engine->options.spin_us * 1000ll : r->busy_until_ns;
    if (!(is_light || has_copies) || r->engine->options.spin_us == 0 || r->delayed || now_ns >= until)
        return false;
    int waits_for = has_copies        ? AKV_SPIN_GPU
                    : r->in_flight    ? AKV_SPIN_DISK
                    : r->is_announced ? AKV_SPIN_ANNOUNCED
                                      : AKV_SPIN_IDLE;
    r->is_announced = false;
    if (r->spin_misses[waits_for] >= AKV_SPIN_MISSES && ++r->spins[waits_for] % AKV_SPIN_RETRY)
        return false;
    r->source->submit(r);
    bool is_hit = false;
    while (!(is_hit = r->source->has_news(r) || has_orders(r) || (has_copies && akv_device_poll(r))) &&
           akv_now_ns() < until)
        akv_pause();
    r->spin_misses[waits_for] = is_hit ? 0 : r->spin_misses[waits_for] + 1;
    if (waits_for == AKV_SPIN_ANNOUNCED)
        r->busy_until_ns = 0; /* what came was announced: it says nothing about spins without that */
    return is_hit;
}

static int64_t time_to_sleep_ns(struct akv_reactor *r, int64_t now_ns)
{
    int64_t until = now_ns + AKV_TICK_NS;
    if (r->next_deadline_ns < until)
        until = r->next_deadline_ns;
    for (struct akv_flight *f = r->delayed; f; f = f->next)
        if (f->due_ns < until)
            until = f->due_ns;
    if (akv_device_is_busy(r)) { /* nothing wakes us when an event is done: look again, ever more rarely */
        struct akv_device_state *d = &r->device;
        if (now_ns + d->poll_ns < until)
            until = now_ns + d->poll_ns;
        d->poll_ns += d->poll_ns / 4; /* so it learns of an end at most a quarter late */
        if (d->poll_ns > AKV_POLL_NS_MAX)
            d->poll_ns = AKV_POLL_NS_MAX;
    }
    return until > now_ns ? until - now_ns : 0;
}

static void rest(struct akv_reactor *r)
{
    int64_t now_ns = akv_now_ns();
    if (spin(r, now_ns) || r->source->has_news(r) || has_orders(r))
        return;
    atomic_store(&r->sleeping, 1);
    if (!has_orders(r) && !r->source->has_news(r)) {
        AKV_COUNT(r, sleeps, 1);
        r->source->sleep(r, time_to_sleep_ns(r, akv_now_ns()));
    }
    atomic_store(&r->sleeping, 0);
}

static void turn(struct akv_reactor *r)
{
    uint32_t before = r->in_flight;
    bool is_stopping = atomic_load(&r->stop);
    r->source->reap(r);
    if (akv_device_is_busy(r))
        akv_device_poll(r);
    int64_t now_ns = akv_now_ns();
    take_announcement(r, now_ns); /* before the intake: an order that is here already is not waited for */
    take_intake(r, now_ns);
    take_cancels(r);
    if (is_stopping)
        drop_everything(r);
    r->has_seen_stop = is_stopping;
    expire(r, now_ns);
    if (r->delayed)
        akv_flight_release_due(r, now_ns);
    akv_lanes_issue(r);
    akv_device_flush(r);
    if (r->in_flight < before || r->must_notify)
        r->busy_until_ns = now_ns + r->engine->options.spin_us * 1000ll;
    if (r->must_notify) {
        r->must_notify = false;
        AKV_COUNT(r, wakes, 1);
        akv_engine_notify(r->engine);
    }
}

static void run(struct akv_reactor *r)
{
    for (;;) {
        turn(r);
        if (atomic_load(&r->stop) && !r->live && !atomic_load(&r->intake))
            return;
        if (r->queued >= AKV_SLICE || (r->queued && r->source->has_news(r)))
            r->source->submit(r);
        else
            rest(r);
    }
}

static void report_started(struct akv_reactor *r, int code, int where)
{
    pthread_mutex_lock(&r->engine->lock);
    r->start_code = code;
    r->start_where = where;
    r->is_started = 1;
    pthread_cond_broadcast(&r->engine->started);
    pthread_mutex_unlock(&r->engine->lock);
}

void *akv_reactor_main(void *argument)
{
    struct akv_reactor *r = argument;
    int32_t where = AKV_AT_SETUP;
    int code = r->source->open(r, &where); /* here, because a SINGLE_ISSUER ring belongs to the thread that made it */
    bool has_source = code == 0;
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0); /* a 20 us sleep is not to last 70 */
    if (code == 0) {
        where = AKV_AT_CUDA;
        code = akv_device_open(r);
    }
    report_started(r, code, where);
    if (code == 0)
        run(r);
    akv_device_close(r);
    if (has_source)
        r->source->close(r);
    atomic_fetch_add(&r->engine->stopped_reactors, 1);
    tell(r->engine->done_fd); /* the last word is said whether or not an earlier one was heard */
    return NULL;
}
