/* control.c: the test's side of the fake, as far as it is not one file's own business. */
#include <stdio.h>
#include <string.h>

#include "control.h"

API void fake_reset(uint64_t seed)
{
    fake_lock();
    fake_captures_reset();
    fake_streams_reset();
    fake_handles_reset();
    fake_regions_reset();
    fake_calls_reset();
    uint64_t epoch = fake.epoch, serials = fake.region_serials;
    bool initialised = fake.initialised; /* a process initialises CUDA once */
    memset(&fake, 0, sizeof fake);
    fake.epoch = epoch + 1;
    fake.region_serials = serials;
    fake.initialised = initialised;
    fake.seed = seed;
    fake.devices = 1;
    fake.driver_version = 13000;
    fake.queries_max = 3;
    fake.wait_limit_ms = 10000;
    fake.device_limit = 1ull << 30;
    fake.fault_after = -1;
    for (int i = 0; i < DEVICES_MAX; i++)
        fake.contexts[i].device = i;
    fake_changed();
    fake_unlock();
}

#define SETTER(assignment) \
    do {                   \
        fake_lock();       \
        assignment;        \
        fake_unlock();     \
    } while (0)

API int fake_set_devices(int count)
{
    if (count < 0 || count > DEVICES_MAX)
        return -1;
    SETTER(fake.devices = count);
    return 0;
}

API void fake_set_driver_version(int version)
{
    SETTER(fake.driver_version = version);
}

API void fake_set_plain_addresses(int plain)
{
    SETTER(fake.plain_addresses = plain != 0);
}

API void fake_set_wait_limit(uint32_t milliseconds)
{
    SETTER(fake.wait_limit_ms = milliseconds);
}

API void fake_set_policy(uint32_t queries_min, uint32_t queries_max)
{
    SETTER((fake.queries_min = queries_min,
            fake.queries_max = queries_max < queries_min ? queries_min : queries_max));
}

API void fake_set_memory_limit(uint64_t device_nbytes, uint64_t pinned_nbytes)
{
    SETTER((fake.device_limit = device_nbytes, fake.pinned_limit = pinned_nbytes));
}

API void fake_fail_execution(uint64_t nth, int result)
{
    SETTER((fake.fault_after = (int64_t)nth, fake.fault_result = result));
}

API int fake_hide(const char *name)
{
    int entry = fake_entry_of(name);
    if (entry >= 0)
        SETTER(fake_hidden[entry] = true);
    return entry < 0 ? -1 : 0;
}

static int set_held(CUstream handle, bool held)
{
    fake_lock();
    struct stream *stream = fake_stream_of(handle);
    if (stream)
        stream->held = held;
    fake_changed();
    fake_unlock();
    return stream ? 0 : -1;
}

API int fake_hold_stream(CUstream stream)
{
    return set_held(stream, true);
}

API int fake_release_stream(CUstream stream)
{
    return set_held(stream, false);
}

API uint64_t fake_run_everything(void)
{
    fake_lock();
    uint64_t count = fake_thread()->running_host_function ? 0 : fake_run_all();
    fake_unlock();
    return count;
}

static int64_t live_contexts(void)
{
    int64_t count = 0;
    for (int i = 0; i < DEVICES_MAX; i++)
        count += fake.contexts[i].retained;
    return count;
}

static int64_t live_captures(void)
{
    int64_t count = 0;
    for (struct capture *c = fake.captures; c; c = c->next)
        count++;
    return count;
}

static int64_t live(const char *kind)
{
    static const struct {
        const char *name;
        int tag;
    } handles[] = {{"streams", TAG_STREAM}, {"events", TAG_EVENT}, {"modules", TAG_MODULE}, {"graphs", TAG_GRAPH}};
    static const char *const regions[] = {"device", "pinned", "registered"};
    for (size_t i = 0; i < sizeof handles / sizeof *handles; i++)
        if (strcmp(kind, handles[i].name) == 0)
            return fake_handles_live(handles[i].tag);
    for (int i = 0; i < 3; i++)
        if (strcmp(kind, regions[i]) == 0)
            return fake_regions_live((enum region_kind)i);
    if (strcmp(kind, "contexts") == 0)
        return live_contexts();
    return strcmp(kind, "captures") == 0 ? live_captures() : -1;
}

API int64_t fake_live(const char *kind)
{
    fake_lock();
    int64_t count = live(kind);
    fake_unlock();
    return count;
}

static uint64_t read_locked(const uint64_t *counter)
{
    fake_lock();
    uint64_t value = *counter;
    fake_unlock();
    return value;
}

API uint64_t fake_pending(void)
{
    return read_locked(&fake.pending);
}

API uint64_t fake_executed(void)
{
    return read_locked(&fake.executed);
}

API uint64_t fake_captures_invalidated(void)
{
    return read_locked(&fake.captures_invalidated);
}

API int fake_sticky(void)
{
    fake_lock();
    int sticky = fake.sticky;
    fake_unlock();
    return sticky;
}

API uint64_t fake_violations(char *last, uint64_t nbytes)
{
    fake_lock();
    if (last && nbytes)
        snprintf(last, nbytes, "%s", fake.violation);
    uint64_t count = fake.violations;
    fake_unlock();
    return count;
}

/* Under the lock. */
static uint8_t *bytes_at(uint64_t address, uint64_t nbytes)
{
    struct place place;
    if (!address || fake_place(address, nbytes, &place) != CUDA_SUCCESS)
        return NULL;
    return place.host;
}

API void *fake_bytes_at(uint64_t address, uint64_t nbytes)
{
    fake_lock();
    uint8_t *bytes = bytes_at(address, nbytes);
    fake_unlock();
    return bytes;
}

API int fake_peek(uint64_t address, void *out, uint64_t nbytes)
{
    fake_lock();
    const uint8_t *bytes = bytes_at(address, nbytes);
    if (bytes)
        memcpy(out, bytes, nbytes);
    fake_unlock();
    return bytes ? 0 : -1;
}

API int fake_poke(uint64_t address, const void *bytes, uint64_t nbytes)
{
    fake_lock();
    uint8_t *target = bytes_at(address, nbytes);
    if (target)
        memcpy(target, bytes, nbytes);
    fake_unlock();
    return target ? 0 : -1;
}
