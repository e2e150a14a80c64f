"""Counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineStatistics", "RingInfo"]


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counters since the engine opened, summed over its rings; the `_max` ones are the largest of any ring.

    `ops` counts I/Os begun (a coalesced run is one), `submits` system calls that handed I/Os over, `fixed_ops` those
    on registered buffers, `resumed_ops` continuations after a short completion, `retried_ops` repeats after EINTR or
    EAGAIN, `dropped_ops` cancelled or past their deadline before they began. `bytes_staged` went through a staging
    slot. `kernel_copies`, `batch_copies` and `single_copies` count runs of bytes by the way they went to or from a GPU;
    `cuda_calls_slow` are the CUDA calls above 50 us. `slots_leaked` were given up after a device fault, and
    `device_error` is its CUresult. `in_flight` and `slots_leased` are momentary and zero when the engine rests.
    """

    batches: int = 0
    ops: int = 0
    submits: int = 0
    sleeps: int = 0
    wakes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_staged: int = 0
    fixed_ops: int = 0
    resumed_ops: int = 0
    retried_ops: int = 0
    failed_ops: int = 0
    dropped_ops: int = 0
    faults: int = 0
    in_flight_max: int = 0
    bulk_nbytes_max: int = 0
    in_flight: int = 0
    slots_leased: int = 0
    overflows: int = 0
    kernel_launches: int = 0
    kernel_copies: int = 0
    batch_copies: int = 0
    single_copies: int = 0
    copy_groups: int = 0
    bytes_to_device: int = 0
    bytes_from_device: int = 0
    cuda_calls: int = 0
    cuda_calls_slow: int = 0
    cuda_call_ns_max: int = 0
    slots_leaked: int = 0
    device_error: int = 0


@dataclass(frozen=True, slots=True)
class RingInfo:
    """What a ring got: flags the kernel accepted, what is registered, and the errno that kept it from more."""

    setup_flags: int
    files_registered: bool
    sparse_buffers: bool
    register_errno: int
    staging_nbytes: int
    registered_nbytes: int
