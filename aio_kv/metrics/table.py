"""What each field of the statistics is as a metric: one table, from which everything that is exported is made.

Names follow the Prometheus conventions: base units (bytes, seconds) at the end, `_total` behind counters. A *counter*
only grows while its object is open; a *gauge* says how things are now, or the largest value so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from aio_kv.backends.statistics import Statistics
from aio_kv.cascade.statistics import CascadeStatistics
from aio_kv.engine import EngineStatistics
from aio_kv.experts.arena_statistics import ArenaStatistics
from aio_kv.transfer.dispatcher import DispatcherStatistics

__all__ = ["TABLE", "Export", "Family", "FamilyKind", "Part", "Sample", "families", "samples_of"]

_UNITS = ("bytes", "seconds")


class FamilyKind(Enum):
    """What a family of samples is to Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    INFO = "info"


class _Role(Enum):
    COUNTER = 0
    GAUGE = 1
    LABEL = 2  # text: a label of the part's info family
    LENGTH = 3  # a tuple, of which the length is exported
    PART = 4  # statistics of a part of the object
    BELOW = 5  # statistics of the object one tier below


@dataclass(frozen=True, slots=True)
class Export:
    """What becomes of one field: its name as a metric, what it means, and the factor to its unit."""

    role: _Role
    name: str = ""
    help: str = ""
    scale: float = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One class of statistics: the prefix of its metrics, and what becomes of each of its fields."""

    prefix: str
    fields: Mapping[str, Export]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `name` is without the suffix that Prometheus adds; `sample_name` has it."""

    name: str
    kind: FamilyKind
    help: str

    @property
    def unit(self) -> str:
        """Its base unit; empty for plain numbers."""
        unit = self.name.rpartition("_")[2]
        return unit if unit in _UNITS else ""

    @property
    def sample_name(self) -> str:
        """The name that queries use."""
        suffix = {FamilyKind.COUNTER: "_total", FamilyKind.INFO: "_info", FamilyKind.GAUGE: ""}
        return self.name + suffix[self.kind]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a family, with the labels that statistics give it."""

    family: Family
    labels: Mapping[str, str]
    value: float


def _counter(name: str, help: str) -> Export:
    return Export(_Role.COUNTER, name, help)


def _gauge(name: str, help: str, scale: float = 1) -> Export:
    return Export(_Role.GAUGE, name, help, scale)


_ENGINE = Part(
    "engine",
    {
        "batches": _counter("batches", "Batches handed to the engine."),
        "ops": _counter("ops", "I/Os begun; a coalesced run of groups is one."),
        "submits": _counter("submits", "System calls that handed I/Os to the kernel."),
        "sleeps": _counter("sleeps", "Times that a reactor went to sleep."),
        "wakes": _counter("wakes", "Times that a reactor woke the event loop."),
        "bytes_read": _counter("read_bytes", "Bytes read from files, padding included."),
        "bytes_written": _counter("written_bytes", "Bytes written to files, padding included."),
        "bytes_staged": _counter("staged_bytes", "Bytes that went through a staging slot."),
        "fixed_ops": _counter("fixed_ops", "I/Os on registered buffers."),
        "resumed_ops": _counter("resumed_ops", "Continuations after a short completion."),
        "retried_ops": _counter("retried_ops", "Repeats after EINTR or EAGAIN."),
        "failed_ops": _counter("failed_ops", "I/Os that failed."),
        "dropped_ops": _counter("dropped_ops", "I/Os cancelled or late before they began."),
        "faults": _counter("injected_faults", "Faults that a test injected."),
        "in_flight_max": _gauge("in_flight_ops_max", "Most I/Os that were at the device at once."),
        "bulk_nbytes_max": _gauge(
            "bulk_in_flight_max_bytes", "Most bytes of large I/Os at the device at once."
        ),
        "in_flight": _gauge("in_flight_ops", "I/Os at the device now."),
        "slots_leased": _gauge("leased_staging_slots", "Staging slots in use now."),
        "overflows": _counter("completion_overflows", "Times that the completion queue overflowed."),
        "kernel_launches": _counter("copy_kernel_launches", "Copy kernels launched."),
        "kernel_copies": _counter("kernel_copies", "Runs of bytes copied to or from a GPU by kernel."),
        "batch_copies": _counter("batch_copies", "Runs of bytes copied to or from a GPU by batched copy."),
        "single_copies": _counter("single_copies", "Runs of bytes copied to or from a GPU one by one."),
        "copy_groups": _counter("copy_groups", "Sets of GPU copies that share one event."),
        "bytes_to_device": _counter("to_device_bytes", "Bytes copied to a GPU."),
        "bytes_from_device": _counter("from_device_bytes", "Bytes copied from a GPU."),
        "cuda_calls": _counter("cuda_calls", "CUDA calls made."),
        "cuda_calls_slow": _counter("slow_cuda_calls", "CUDA calls that took more than 50 us."),
        "cuda_call_ns_max": _gauge("cuda_call_max_seconds", "Longest CUDA call.", 1e-9),
        "slots_leaked": _counter("leaked_staging_slots", "Staging slots given up after a device fault."),
        "device_error": _gauge(
            "device_error_code", "CUresult of the fault that ended the device; 0 is none."
        ),
    },
)

_TRANSFERS = Part(
    "transfers",
    {
        "transfers": _counter("accepted", "Transfers accepted."),
        "failed": _counter("failed", "Transfers of which a request failed, was cancelled or came late."),
        "cancelled": _counter("cancelled", "Transfers cancelled by a call."),
        "held": _counter("held", "Transfers held behind an earlier one on the same groups."),
        "refused": _counter("refused", "Transfers refused for want of room."),
        "unobserved_failures": _counter("unobserved_failures", "Failed transfers that nobody awaited."),
        "active": _gauge("active", "Transfers that have not ended."),
    },
)

_BACKEND = Part(
    "backend",
    {
        "backend": Export(_Role.LABEL, "backend"),
        "rung": Export(_Role.LABEL, "rung"),
        "refusals": Export(
            _Role.LENGTH, "refused_rungs", "Better rungs that are not in force; the log says why at open."
        ),
        "staging_nbytes": _gauge("staging_bytes", "Staging memory."),
        "registered_nbytes": _gauge("registered_staging_bytes", "Staging memory registered with the ring."),
        "landing_regions": _gauge("landing_regions", "Landing regions registered now."),
        "transfers": Export(_Role.PART),
        "engine": Export(_Role.PART),
    },
)

_CASCADE = Part(
    "cascade",
    {
        "policy": Export(_Role.LABEL, "policy"),
        "slots": _gauge("slots", "Slots that there are."),
        "slot_nbytes": _gauge("slot_bytes", "Payload of one slot."),
        "slab_nbytes": _gauge("slab_bytes", "Memory that holds the slots."),
        "registered_nbytes": _gauge("registered_slab_bytes", "Memory of the slots registered with the backing."),
        "is_pinned": _gauge("slab_pinned", "Whether the memory of the slots is pinned for the GPU: 1 or 0."),
        "hits": _counter("hits", "Groups read from the cascade."),
        "misses": _counter("misses", "Groups read from below."),
        "hit_nbytes": _counter("hit_bytes", "Payload bytes read from the cascade."),
        "written_groups": _counter("written_groups", "Groups written to the cascade."),
        "written_nbytes": _counter("written_bytes", "Payload bytes written to the cascade."),
        "promoted_groups": _counter("promoted_groups", "Groups brought up from below."),
        "flushes": _counter("flushes", "Writes of dirty slots to below."),
        "failed_flushes": _counter("failed_flushes", "Writes of dirty slots that failed."),
        "flushed_groups": _counter("flushed_groups", "Groups written to below."),
        "evicted_slots": _counter("evicted_slots", "Slots given up for other keys."),
        "superseded_slots": _counter("superseded_slots", "Slots whose key moved to another while they were in use."),
        "resident_slots": _gauge("resident_slots", "Slots that hold something now."),
        "dirty_slots": _gauge("dirty_slots", "Slots that hold more than is below now."),
        "leases": _gauge("leases", "Copies that read slots now."),
        "quarantined_slots": _gauge("quarantined_slots", "Slots that a lost device may still write to."),
        "waits_for_room": _counter("waits_for_room", "Transfers that waited for a slot."),
        "waits_for_order": _counter("waits_for_order", "Transfers that waited for an earlier one."),
        "waits_for_backing": _counter("waits_for_backing", "Transfers that waited for room below."),
        "transfers": _counter("transfers", "Transfers of the cascade; those that went past it are counted below."),
        "failed": _counter("failed_transfers", "Transfers of which a request failed, was cancelled or came late."),
        "cancelled": _counter("cancelled_transfers", "Transfers cancelled by a call."),
        "refused": _counter("refused_transfers", "Transfers refused for want of room."),
        "unobserved_failures": _counter("unobserved_failures", "Failed transfers that nobody awaited."),
        "backing": Export(_Role.BELOW),
    },
)  # fmt: skip

_ARENA = Part(
    "arena",
    {
        "slots": _gauge("slots", "Slots that there are."),
        "slot_nbytes": _gauge("slot_bytes", "Size of one slot."),
        "resident": _gauge("resident_experts", "Experts that are there now."),
        "filling": _gauge("filling_slots", "Slots being filled now."),
        "leases": _gauge("leases", "Leases held now."),
        "waiting": _gauge("waiting_demands", "Calls that wait for slots now."),
        "demands": _counter("demands", "Calls that got their slots."),
        "hits": _counter("hits", "Experts asked for that were there."),
        "joined": _counter("joined", "Experts asked for that were on their way for somebody else."),
        "misses": _counter("misses", "Experts asked for that had to be read."),
        "evictions": _counter("evictions", "Experts that made room for others."),
        "failures": _counter("failed_fills", "Fills that failed."),
        "cancelled": _counter("cancelled_fills", "Fills given up because nobody waited any more."),
        "bytes_demanded": _counter("demanded_bytes", "Bytes of all experts that were asked for."),
        "bytes_read": _counter("read_bytes", "Bytes of fills that were begun for somebody who waited."),
        "prefetches": _counter("prefetches", "Experts that prefetch was asked for."),
        "prefetches_refused": _counter("refused_prefetches", "Those beyond the bound, or there already."),
        "prefetches_dropped": _counter("dropped_prefetches", "Those given up because a demand came."),
        "prefetches_used": _counter("used_prefetches", "Those that were there, or on their way, when asked for."),
        "prefetches_wasted": _counter("wasted_prefetches", "Those that were read and never used."),
        "bytes_prefetched": _counter("prefetched_bytes", "Bytes read ahead of any demand."),
    },
)  # fmt: skip

TABLE: Final[Mapping[type, Part]] = MappingProxyType(
    {
        Statistics: _BACKEND,
        DispatcherStatistics: _TRANSFERS,
        EngineStatistics: _ENGINE,
        CascadeStatistics: _CASCADE,
        ArenaStatistics: _ARENA,
    }
)
_KINDS = {
    _Role.COUNTER: FamilyKind.COUNTER,
    _Role.GAUGE: FamilyKind.GAUGE,
    _Role.LENGTH: FamilyKind.GAUGE,
}


def _info_of(part: Part) -> Family:
    return Family(f"aio_kv_{part.prefix}", FamilyKind.INFO, f"What the {part.prefix} is.")


def _families_of(part: Part) -> dict[str, Family]:
    """The family of each field that has one."""
    return {
        field: Family(f"aio_kv_{part.prefix}_{export.name}", _KINDS[export.role], export.help)
        for field, export in part.fields.items()
        if export.role in _KINDS
    }


_FAMILIES: Final = {kind: _families_of(part) for kind, part in TABLE.items()}
_INFOS: Final = {
    kind: _info_of(part)
    for kind, part in TABLE.items()
    if any(export.role is _Role.LABEL for export in part.fields.values())
}


def families() -> tuple[Family, ...]:
    """Every metric that may be exported."""
    return (*_INFOS.values(), *(family for part in _FAMILIES.values() for family in part.values()))


def samples_of(statistics: Any, tier: int = 0) -> Iterator[Sample]:
    """The values of one object's statistics and of all below it; label `tier` is 0 for the object, 1 below it.

    Statistics of a class that the table does not have give nothing.
    """
    part = TABLE.get(type(statistics))
    if part is None:
        return
    labels = {"tier": str(tier)}
    texts: dict[str, str] = {}
    for field in fields(statistics):
        value, export = getattr(statistics, field.name), part.fields[field.name]
        if export.role is _Role.LABEL:
            texts[export.name] = value
        elif export.role is _Role.PART:
            yield from samples_of(value, tier)
        elif export.role is _Role.BELOW:
            yield from samples_of(value, tier + 1)
        else:
            number = len(value) if export.role is _Role.LENGTH else value
            yield Sample(_FAMILIES[type(statistics)][field.name], labels, number * export.scale)
    if texts:
        yield Sample(_INFOS[type(statistics)], labels | texts, 1)
