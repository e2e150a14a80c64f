/* What a test says to the fake, beside the driver's own entry points. Any thread may call any of it. Functions that
 * take a name or a handle answer -1 when they do not know it. */
#ifndef FAKE_CONTROL_H
#define FAKE_CONTROL_H

#include "fake.h"

/* A new machine, with a new seed: every handle, allocation, fault and count of the old one is gone. */
API void fake_reset(uint64_t seed);
API int fake_set_devices(int count);
API void fake_set_driver_version(int version);
/* Leaves `name` out of what cuGetProcAddress finds, as an older driver would. */
API int fake_hide(const char *name);
/* Addresses that the device knows and the host can use, too. Off: the host dies of using a device address, and a kernel
 * of using the host address of registered memory. Applies to memory obtained later. */
API void fake_set_plain_addresses(int plain);

/* How often a query says "not yet" before it says "done": drawn for each record between the two, inclusive. */
API void fake_set_policy(uint32_t queries_min, uint32_t queries_max);
/* A held stream does nothing, and what depends on it neither; who waits for it waits for its release. */
API int fake_hold_stream(CUstream stream);
API int fake_release_stream(CUstream stream);
/* A host wait on a held stream gives up after so long, with CUDA_ERROR_TIMEOUT. */
API void fake_set_wait_limit(uint32_t milliseconds);
/* Carries out all that is not held, after a sticky error too; tells how much that was. */
API uint64_t fake_run_everything(void);

/* The nth call from now of `name` does nothing and answers `result`; so do the next ones, `times` in all (0: always). */
API int fake_fail(const char *name, uint64_t nth, int result, uint64_t times);
/* The nth copy or kernel from now is accepted, and fails when its time comes. */
API void fake_fail_execution(uint64_t nth, int result);
API void fake_clear_faults(void);
/* Bytes on one device, and bytes of pinned and registered host memory; 0: no limit. */
API void fake_set_memory_limit(uint64_t device_nbytes, uint64_t pinned_nbytes);

API int64_t fake_calls(const char *name);
/* The first 65536 calls, without queries that said "not yet". */
API uint64_t fake_log_count(void);
API int fake_log_at(uint64_t index, struct fake_call *out);
API void fake_log_clear(void);
/* streams, events, modules, graphs, contexts (retained), captures, device, pinned, registered */
API int64_t fake_live(const char *kind);
API uint64_t fake_pending(void);
API uint64_t fake_executed(void);
API int fake_sticky(void);
API uint64_t fake_captures_invalidated(void);
/* Work that met memory which had been freed or unregistered before it ran. */
API uint64_t fake_violations(char *last, uint64_t nbytes);

/* Bytes as they are at this moment: carries nothing out. */
API int fake_peek(uint64_t address, void *out, uint64_t nbytes);
API int fake_poke(uint64_t address, const void *bytes, uint64_t nbytes);
/* Where the host finds what is at `address`, or NULL. */
API void *fake_bytes_at(uint64_t address, uint64_t nbytes);

#endif
