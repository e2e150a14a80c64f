"""Checks of the conformance kit: what is written is what is read, by every way in and out."""

from __future__ import annotations

import numpy as np

from aio_kv.layout import GroupKey, GroupLayout
from aio_kv.memory import host_address
from aio_kv.positional import aligned_buffer
from aio_kv.protocols import Read, Scatter, Write
from aio_kv.testing.model import (
    FINE,
    LARGE,
    LAYOUTS,
    PADDED,
    PLAIN,
    MakeBackend,
    empty,
    every_id,
    fill,
    opened,
    payloads,
    require,
    require_contents,
    require_same,
    shuffled,
)


async def layout_is_the_given_one(make: MakeBackend) -> None:
    """`backend.layout` equals what the backend was made with."""
    async with opened(make, PADDED) as backend:
        require(backend.layout == PADDED, f"layout is {backend.layout}, must be {PADDED}")


async def round_trip_by_groups(make: MakeBackend) -> None:
    """`write_groups` and `read_groups` in any order, on every layout."""
    for layout in LAYOUTS:
        async with opened(make, layout) as backend:
            rows = payloads(layout, layout.num_groups, 1)
            order = shuffled(layout)
            await backend.write_groups(order, rows[order])
            other = shuffled(layout, seed=2)
            found = empty(layout, layout.num_groups)
            await backend.read_groups(other, found)
            require_same(found, rows[other], f"{layout}")


async def round_trip_by_requests(make: MakeBackend) -> None:
    """`write` and `read`, each group with its own memory; one request and many."""
    for layout in LAYOUTS:
        async with opened(make, layout) as backend:
            rows = payloads(layout, layout.num_groups, 3)
            keys = [layout.key(int(group)) for group in shuffled(layout)]
            writes = [Write(key, rows[layout.group_id(key)]) for key in keys]
            await backend.write([writes[0]])
            await backend.write(iter(writes[1:]))
            found = empty(layout, layout.num_groups)
            reads = [Read(key, found[layout.group_id(key)]) for key in reversed(keys)]
            await backend.read([reads[0]])
            await backend.read(iter(reads[1:]))
            require_same(found, rows, f"{layout}")


async def round_trip_by_blocks(make: MakeBackend) -> None:
    """`write_block` and `read_block`, packed in (kind, head) order without padding."""
    for layout in LAYOUTS:
        async with opened(make, layout) as backend:
            rows = payloads(layout, layout.num_groups, 4)
            count = layout.groups_per_block
            found = empty(layout, layout.num_groups)
            places = [
                (layer, block) for layer in range(layout.num_layers) for block in range(layout.num_blocks)
            ]
            for layer, block in places:
                first = layout.block_group_id(layer, block)
                await backend.write_block(layer, block, rows[first : first + count])
            for layer, block in reversed(places):
                first = layout.block_group_id(layer, block)
                await backend.read_block(layer, block, found[first : first + count])
            require_same(found, rows, f"{layout}")


async def blocks_and_groups_are_the_same_bytes(make: MakeBackend) -> None:
    """A block is its groups: kind slowest, then head; what one way writes the other reads."""
    for layout in (PLAIN, PADDED):
        async with opened(make, layout) as backend:
            rows = payloads(layout, layout.groups_per_block, 5)
            await backend.write_block(1, 2, rows)
            keys = [
                GroupKey(1, 2, head, kind) for kind in layout.kinds for head in range(layout.num_kv_heads)
            ]
            found = empty(layout, len(keys))
            await backend.read([Read(key, found[i]) for i, key in enumerate(keys)])
            require_same(found, rows, "groups of a written block")
            others = payloads(layout, len(keys), 6)
            await backend.write([Write(key, others[i]) for i, key in enumerate(keys)])
            await backend.read_block(1, 2, found)
            require_same(found, others, "a block of written groups")


async def scatter_places_each_group(make: MakeBackend) -> None:
    """`Scatter` gathers writes and scatters reads; bytes between the places stay as they were."""
    for layout in LAYOUTS:
        async with opened(make, layout) as backend:
            ids = shuffled(layout)[: layout.num_groups // 2]
            step = layout.payload_nbytes + 40
            offsets = np.random.default_rng(1).permutation(len(ids)).astype(np.int64) * step + 24
            source = payloads(layout, len(ids) + 1, 7).reshape(-1)
            source = np.resize(source, len(ids) * step + 64)
            await backend.write_groups(ids, Scatter(source, offsets))
            target = np.full(len(source), 0xA5, dtype=np.uint8)
            await backend.read_groups(ids, Scatter(target, offsets))
            is_inside = np.zeros(len(source), dtype=bool)
            for offset in offsets.tolist():
                is_inside[offset : offset + layout.payload_nbytes] = True
            require_same(target[is_inside], source[is_inside], f"scattered groups of {layout}")
            require((target[~is_inside] == 0xA5).all(), "a scattered read wrote between the groups")
            target[:] = 0xA5
            await backend.read_groups([int(ids[1])], Scatter(target, offsets[1:2]))
            start = int(offsets[1])
            place = slice(start, start + layout.payload_nbytes)
            require_same(target[place], source[place], f"a single scattered group of {layout}")
            require((target == 0xA5).sum() >= len(target) - layout.payload_nbytes, "and nothing beside it")


async def scattered_and_aligned(make: MakeBackend) -> None:
    """Neighbours in the file whose memory is aligned but lies in any order (a vectored I/O, where there is one)."""
    for layout in (PLAIN, FINE):
        async with opened(make, layout) as backend:
            rows = await fill(backend)
            offsets = np.random.default_rng(2).permutation(layout.num_groups) * layout.stride
            target = aligned_buffer(layout.num_groups * layout.stride)
            await backend.read_groups(every_id(layout), Scatter(target, offsets))
            found = np.frombuffer(target, np.uint8).reshape(layout.num_groups, layout.stride)
            require_same(found[offsets // layout.stride, : layout.payload_nbytes], rows, f"{layout}")
            await backend.write_groups(every_id(layout)[::-1], Scatter(target, offsets))
            await require_contents(backend, rows[::-1], f"written from aligned memory, {layout}")


async def twice_in_a_read(make: MakeBackend) -> None:
    """A group named several times in one read arrives in every place."""
    for layout in (*LAYOUTS, LARGE):
        async with opened(make, layout) as backend:
            rows = await fill(backend)
            ids = np.concatenate([shuffled(layout), shuffled(layout, seed=3), np.array([1, 1, 1])])
            found = empty(layout, len(ids))
            report = await backend.read_groups(ids, found)
            require_same(found, rows[ids], f"{layout}")
            require(
                report.loaded_prefix == len(ids), "the report must count every request, also the same ones"
            )


async def never_written_reads_as_zeros(make: MakeBackend) -> None:
    """Groups that nobody wrote, also beside written ones, are zeros."""
    for layout in LAYOUTS:
        async with opened(make, layout) as backend:
            nothing = np.zeros((layout.num_groups, layout.payload_nbytes), dtype=np.uint8)
            await require_contents(backend, nothing, "before any write")
            rows = payloads(layout, 2, 8)
            ids = [1, layout.num_groups - 2]
            await backend.write_groups(ids, rows)
            nothing[ids] = rows
            await require_contents(backend, nothing, "beside written groups")


async def last_write_stays(make: MakeBackend) -> None:
    """Overwriting replaces all of a group and nothing of its neighbours."""
    for layout in (PLAIN, PADDED):
        async with opened(make, layout) as backend:
            rows = await fill(backend, seed=9)
            for seed in (10, 11):
                ids = shuffled(layout, seed)[:5]
                rows[ids] = payloads(layout, len(ids), seed)
                await backend.write_groups(ids, rows[ids])
                await require_contents(backend, rows, f"after overwriting with seed {seed}")


async def odd_memory(make: MakeBackend) -> None:
    """Sources and destinations of any type and at any address; bytes beside a destination stay as they were."""
    layout = PLAIN
    payload = layout.payload_nbytes
    async with opened(make, layout) as backend:
        rows = payloads(layout, 6, 12)
        floats = rows[1].view(np.float32).reshape(4, -1)
        sources = [
            bytes(rows[0]),
            floats,
            bytearray(rows[2]),
            memoryview(rows[3].tobytes()),
            rows[4],
            rows[5],
        ]
        for group, source in enumerate(sources):
            await backend.write([Write(layout.key(group), source)])
        for shift in (0, 1, 3, 8, 511, 512, 513):
            guarded = bytearray(b"\x5a" * (6 * payload + 2 * 1024))
            start = 512 + shift
            view = memoryview(guarded)[start : start + 6 * payload]
            await backend.read_groups(range(6), view)
            require_same(view, rows, f"{shift} bytes from an aligned address")
            is_untouched = set(guarded[:start]) | set(guarded[start + 6 * payload :]) == {0x5A}
            require(is_untouched, f"a read at shift {shift} wrote outside of its destination")
        wide = np.zeros((2, 3, payload // 4), dtype=np.float32)
        await backend.read_groups(np.arange(6, dtype=np.int32), wide)
        require_same(wide, rows, "a float array of three dimensions")


async def source_may_be_read_only(make: MakeBackend) -> None:
    """A write takes read-only memory, and leaves its source alone."""
    async with opened(make, PADDED) as backend:
        rows = payloads(PADDED, 4, 13)
        before = rows.copy()
        rows.flags.writeable = False
        await backend.write_groups([3, 1, 4, 2], rows)
        require_same(rows, before, "the source of a write")
        found = empty(PADDED, 4)
        await backend.read_groups([3, 1, 4, 2], found)
        require_same(found, before, "written from read-only memory")


async def ids_may_change_after_the_call(make: MakeBackend) -> None:
    """The array of group numbers is the caller's again as soon as the call returns."""
    async with opened(make, PLAIN) as backend:
        rows = await fill(backend)
        ids = every_id(PLAIN)
        found = empty(PLAIN, len(ids))
        transfer = backend.read_groups(ids, found)
        ids[:] = 0
        await transfer
        require_same(found, rows, "read by an array that changed afterwards")


async def large_groups(make: MakeBackend) -> None:
    """Groups above the largest single I/O arrive whole, aligned or not."""
    layout = LARGE
    async with opened(make, layout) as backend:
        rows = await fill(backend, seed=14)
        await require_contents(backend, rows, "packed")
        target = aligned_buffer(layout.num_groups * layout.stride + 4096)
        require(host_address(target, writable=True, what="target").address % 4096 == 0, "unaligned buffer")
        for shift in (0, 1):
            offsets = np.arange(layout.num_groups)[::-1] * layout.stride + shift
            await backend.read_groups(every_id(layout), Scatter(target, offsets))
            for group, offset in enumerate(offsets.tolist()):
                place = target[offset : offset + layout.payload_nbytes]
                require_same(place, rows[group], f"group {group} at shift {shift}")


async def many_groups(make: MakeBackend) -> None:
    """A batch of thousands of groups."""
    layout = GroupLayout(2, 400, 4, 2, 64, 4, alignment=512)
    async with opened(make, layout) as backend:
        rows = payloads(layout, layout.num_groups, 15)
        order = shuffled(layout)
        await backend.write_groups(order, rows[order])
        await require_contents(backend, rows, "in file order")
        found = empty(layout, layout.num_groups)
        await backend.read_groups(order, found)
        require_same(found, rows[order], "in random order")


async def empty_batches(make: MakeBackend) -> None:
    """Nothing to move is a transfer that succeeds with an empty report."""
    async with opened(make, PLAIN) as backend:
        nothing = bytearray()
        transfers = [
            backend.read([]),
            backend.write([]),
            backend.read_groups([], nothing),
            backend.write_groups(np.empty(0, np.int64), nothing),
            backend.read_groups([], Scatter(bytearray(10), np.empty(0, np.int64))),
        ]
        for transfer in transfers:
            report = await transfer
            found = (len(report.outcomes), report.loaded_prefix, report.nbytes, report.errors)
            require(found == (0, 0, 0, ()), f"an empty batch reports {found}")


async def reports_count_what_moved(make: MakeBackend) -> None:
    """The report of a success: an outcome of 0 per request, all of them loaded, and their payload bytes."""
    for layout in (PLAIN, PADDED):
        async with opened(make, layout) as backend:
            await fill(backend)
            ids = shuffled(layout)[:7]
            report = await backend.read_groups(ids, empty(layout, 7))
            require(report.outcomes.dtype == np.int8, "outcomes must be int8")
            require(report.outcomes.tolist() == [0] * 7, f"outcomes are {report.outcomes}")
            require(report.loaded_prefix == 7 and report.is_complete, "loaded_prefix must count all requests")
            require(report.nbytes == 7 * layout.payload_nbytes, f"nbytes is {report.nbytes}")
            require(report.errors == (), "a success has no errors")


CHECKS = (
    layout_is_the_given_one,
    round_trip_by_groups,
    round_trip_by_requests,
    round_trip_by_blocks,
    blocks_and_groups_are_the_same_bytes,
    scatter_places_each_group,
    scattered_and_aligned,
    twice_in_a_read,
    never_written_reads_as_zeros,
    last_write_stays,
    odd_memory,
    source_may_be_read_only,
    ids_may_change_after_the_call,
    large_groups,
    many_groups,
    empty_batches,
    reports_count_what_moved,
)
