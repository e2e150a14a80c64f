"""Plans, carried out on made-up memory and files: every byte goes where it should, and no rule of the device is broken.

`python tests/test_plan.py` prints what planning costs; tests do not measure time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aio_kv import GroupLayout, KvKind, LayoutError
from aio_kv.plan import COPY_DTYPE, OP_DTYPE, IoLimits, Placement, Plan, plan_groups

BASE = 1 << 30  # where the made-up memory begins
KINDS = [(KvKind.K, KvKind.V), (KvKind.LATENT,), (KvKind.V,)]


@dataclass(frozen=True)
class Case:
    """Arguments of a plan."""

    layout: GroupLayout
    ids: np.ndarray[Any, np.dtype[np.int64]]
    addresses: np.ndarray[Any, np.dtype[np.int64]]
    limits: IoLimits
    memory_nbytes: int

    def plan(self, *, is_write: bool, is_device: bool = False) -> Plan:
        return plan_groups(
            self.layout, self.ids, self.addresses, self.limits, is_write=is_write, is_device=is_device
        )


@st.composite
def layouts(draw: st.DrawFn) -> GroupLayout:
    """Payloads that are multiples of nothing, of a sector, of a page; small, and above one I/O."""
    payload = draw(st.sampled_from([1, 105, 512, 1536, 4000, 4096, 5000, 8192, 65536, 70_000, 131_072]))
    return GroupLayout(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 3)),
        1,
        payload,
        1,
        kinds=draw(st.sampled_from(KINDS)),
        alignment=draw(st.sampled_from([512, 4096])),
    )


@st.composite
def limits_for(draw: st.DrawFn, layout: GroupLayout) -> IoLimits:
    """What files ask for: nothing (buffered), sectors, pages; with the smallest and the usual largest I/O."""
    choices = [(1, 1), (512, 512), (4096, 512)]
    if layout.alignment % 4096 == 0:
        choices.append((4096, 4096))
    memory, offset = draw(st.sampled_from(choices))
    op_nbytes_max = draw(st.sampled_from([4096, 8192, 20_480, 131_072, 524_288]))
    return IoLimits(memory, offset, op_nbytes_max, iov_max=draw(st.sampled_from([2, 3, 128])))


@st.composite
def cases(draw: st.DrawFn, *, twins: bool) -> Case:
    layout = draw(layouts())
    numbers = st.integers(0, layout.num_groups - 1)
    ids = draw(st.lists(numbers, min_size=1, max_size=24, unique=not twins))
    if draw(st.booleans()):
        first = draw(numbers)
        ids = list(range(first, min(first + draw(st.integers(1, 24)), layout.num_groups)))
    count = len(ids)
    # Slots one after the other or with gaps, aligned or not, in order or not: no two of them overlap.
    unit = draw(
        st.sampled_from([layout.payload_nbytes, layout.stride, layout.stride + 4096, layout.stride + 7])
    )
    shift = draw(st.sampled_from([0, 0, 0, 1, 512, 4095]))
    slots = np.arange(count)
    if draw(st.booleans()):
        slots = np.array(draw(st.permutations(range(count))), dtype=np.int64)
    addresses = BASE + shift + slots * unit
    memory_nbytes = shift + count * unit + layout.stride
    return Case(layout, np.array(ids, np.int64), addresses, draw(limits_for(layout)), memory_nbytes)


class Machine:
    """Files and memory of a case, and a device that follows its rules."""

    def __init__(self, case: Case) -> None:
        self.case = case
        layout = case.layout
        random = np.random.default_rng(1)
        self.files = random.integers(0, 256, (layout.num_layers, layout.nbytes_per_layer), dtype=np.uint8)
        self.memory = random.integers(0, 256, case.memory_nbytes, dtype=np.uint8)

    def place(self, address: int, nbytes: int) -> slice:
        start = int(address) - BASE
        assert 0 <= start <= start + nbytes <= len(self.memory), "outside of the caller's memory"
        return slice(start, start + nbytes)

    def carry_out(self, plan: Plan, *, is_write: bool) -> None:
        ops = np.frombuffer(plan.ops, OP_DTYPE)
        copies = np.empty(0, COPY_DTYPE) if plan.copies is None else np.frombuffer(plan.copies, COPY_DTYPE)
        assert (len(ops), len(copies)) == (plan.op_count, plan.copy_count)
        for op in ops:
            self.check_op(op)
            first, count = int(op["copy_first"]), int(op["copy_count"])
            self.move(op, copies[first : first + count], is_write)
        is_copied = ops["placement"] != Placement.DIRECT
        assert ops["copy_count"].sum() == len(copies)
        assert (ops["copy_count"][~is_copied] == 0).all()

    def check_op(self, op: Any) -> None:
        limits, layout = self.case.limits, self.case.layout
        assert 0 < op["nbytes"] <= limits.op_nbytes_max
        assert op["file_offset"] % limits.offset_alignment == 0
        assert op["nbytes"] % limits.offset_alignment == 0
        assert op["file_offset"] + op["nbytes"] <= layout.nbytes_per_layer

    def move(self, op: Any, copies: Any, is_write: bool) -> None:
        limits = self.case.limits
        start, nbytes = int(op["file_offset"]), int(op["nbytes"])
        stored = self.files[int(op["file"])][start : start + nbytes]
        pieces = [(int(c["address"]), int(c["op_offset"]), int(c["nbytes"])) for c in copies]
        if op["placement"] == Placement.DIRECT:
            assert op["address"] % limits.memory_alignment == 0
            pieces = [(int(op["address"]), 0, nbytes)]
        elif op["placement"] == Placement.VECTORED:
            assert len(pieces) <= limits.iov_max
            ends = np.cumsum([length for _, _, length in pieces])
            assert ends[-1] == nbytes, "a vectored op covers all of itself"
            assert [offset for _, offset, _ in pieces] == [0, *ends[:-1]], "without gaps and in order"
            for address, _, length in pieces:
                assert address % limits.memory_alignment == 0
                assert length % limits.offset_alignment == 0
        if is_write:
            stored[:] = 0
        for address, offset, length in pieces:
            assert offset + length <= nbytes, "a copy passes the end of its op"
            memory = self.memory[self.place(address, length)]
            if is_write:
                stored[offset : offset + length] = memory
            else:
                memory[:] = stored[offset : offset + length]


def expected_read(machine: Machine) -> np.ndarray[Any, Any]:
    case = machine.case
    memory = machine.memory.copy()
    for group, address in zip(case.ids.tolist(), case.addresses.tolist(), strict=True):
        layer, index = divmod(group, case.layout.groups_per_layer)
        start = index * case.layout.stride
        payload = case.layout.payload_nbytes
        memory[machine.place(address, payload)] = machine.files[layer][start : start + payload]
    return memory


def expected_write(machine: Machine) -> np.ndarray[Any, Any]:
    case = machine.case
    files = machine.files.copy()
    for group, address in zip(case.ids.tolist(), case.addresses.tolist(), strict=True):
        layer, index = divmod(group, case.layout.groups_per_layer)
        start, payload = index * case.layout.stride, case.layout.payload_nbytes
        files[layer][start : start + case.layout.stride] = 0
        files[layer][start : start + payload] = machine.memory[machine.place(address, payload)]
    return files


def check_ranges(case: Case, plan: Plan, *, is_write: bool) -> None:
    """Ops go through the files in order and do not overlap; those of a request cover its group."""
    ops = np.frombuffer(plan.ops, OP_DTYPE)
    starts = ops["file"].astype(np.int64) * case.layout.nbytes_per_layer + ops["file_offset"].astype(np.int64)
    ends = starts + ops["nbytes"]
    assert (starts[1:] >= ends[:-1]).all()
    wanted = case.layout.stride if is_write else case.layout.payload_nbytes
    for group, first in zip(case.ids.tolist(), plan.first_ops(len(case.ids)).tolist(), strict=True):
        last = first + plan.ops_per_request - 1
        begin = group * case.layout.stride
        assert starts[first] <= begin
        assert ends[last] >= begin + wanted
        assert (ends[first:last] == starts[first + 1 : last + 1]).all()


@pytest.mark.slow
@settings(max_examples=250)
@given(cases(twins=True))
def test_a_read_brings_every_byte_and_no_other(case: Case) -> None:
    machine = Machine(case)
    expected, files = expected_read(machine), machine.files.copy()
    plan = case.plan(is_write=False)
    machine.carry_out(plan, is_write=False)
    assert (machine.memory == expected).all()
    assert (machine.files == files).all()
    check_ranges(case, plan, is_write=False)


@pytest.mark.slow
@settings(max_examples=250)
@given(cases(twins=False))
def test_a_write_stores_every_byte_and_no_other(case: Case) -> None:
    machine = Machine(case)
    expected, memory = expected_write(machine), machine.memory.copy()
    plan = case.plan(is_write=True)
    machine.carry_out(plan, is_write=True)
    assert (machine.files == expected).all()
    assert (machine.memory == memory).all()
    check_ranges(case, plan, is_write=True)


@pytest.mark.slow
@settings(max_examples=80)
@given(cases(twins=True))
def test_device_memory_is_never_read_by_the_disk(case: Case) -> None:
    """For memory on a GPU everything is staged; what is moved is the same."""
    machine = Machine(case)
    expected = expected_read(machine)
    plan = case.plan(is_write=False, is_device=True)
    assert set(np.frombuffer(plan.ops, OP_DTYPE)["placement"]) == {Placement.STAGED}
    machine.carry_out(plan, is_write=False)
    assert (machine.memory == expected).all()


@pytest.mark.slow
@settings(max_examples=100)
@given(cases(twins=False), st.booleans(), st.booleans())
def test_one_run_is_planned_as_any_other(case: Case, is_write: bool, is_device: bool) -> None:
    """What `_one_run` and `_groups_apart` answer without many arrays is what the general way would have answered."""
    quick = case.plan(is_write=is_write, is_device=is_device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aio_kv.plan._one_run", lambda *arguments: None)
        patch.setattr("aio_kv.plan._groups_apart", lambda *arguments: None)
        slow = case.plan(is_write=is_write, is_device=is_device)
    assert quick.op_count == slow.op_count
    for name in OP_DTYPE.names or ():
        if name != "copy_first" or quick.copy_count:
            assert ops_array(quick)[name].tolist() == ops_array(slow)[name].tolist(), name
    assert quick.copy_count == slow.copy_count
    if quick.copy_count:
        assert (
            np.frombuffer(quick.copies, COPY_DTYPE).tolist()
            == np.frombuffer(slow.copies, COPY_DTYPE).tolist()
        )
    count = len(case.ids)
    assert quick.first_ops(count).tolist() == slow.first_ops(count).tolist()


def ops_array(plan: Plan) -> np.ndarray[Any, Any]:
    return np.frombuffer(plan.ops, OP_DTYPE)


@pytest.mark.parametrize("alignment", [512, 4096])
@pytest.mark.parametrize("middle", [(2, 1), (1, 1), (2, 2), (3, 0)])
def test_a_run_with_a_muddled_middle_is_none(middle: tuple[int, int], alignment: int) -> None:
    """The first and the last group are where they would be in a run, and so is their number."""
    layout = GroupLayout(1, 4, 1, 1, 4096, 1)
    ids, addresses = np.array([0, *middle, 3]), BASE + np.arange(4) * 4096
    case = Case(layout, ids, addresses, IoLimits(alignment, 512, 512 << 10), 5 * 4096)
    machine = Machine(case)
    expected = expected_read(machine)
    machine.carry_out(case.plan(is_write=False), is_write=False)
    assert (machine.memory == expected).all()
    if len(set(ids.tolist())) < len(ids):
        with pytest.raises(LayoutError, match="twice in one write"):
            case.plan(is_write=True)


@given(cases(twins=False), st.data())
def test_twins_in_a_write_are_refused(case: Case, data: st.DataObject) -> None:
    twin = data.draw(st.sampled_from(case.ids.tolist()))
    place = data.draw(st.integers(0, len(case.ids)))
    ids = np.insert(case.ids, place, twin)
    addresses = np.insert(case.addresses, place, BASE)
    with pytest.raises(LayoutError, match=f"group {twin} .* is twice in one write"):
        plan_groups(case.layout, ids, addresses, case.limits, is_write=True)


def ops_of(
    layout: GroupLayout, ids: Any, addresses: Any, limits: IoLimits, **options: Any
) -> list[tuple[int, str]]:
    plan = plan_groups(
        layout, np.asarray(ids), np.asarray(addresses), limits, **{"is_write": False, **options}
    )
    ops = np.frombuffer(plan.ops, OP_DTYPE)
    return [(int(op["nbytes"]), Placement(int(op["placement"])).name) for op in ops]


LIMITS = IoLimits(512, 512, 512 << 10)


@pytest.mark.parametrize("is_write", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("payload", [4096, 4000])
def test_a_whole_block_is_one_io(payload: int, shift: int, is_write: bool) -> None:
    """All heads, K and V: directly where the memory is packed and aligned and without padding, else through a slot."""
    layout = GroupLayout(32, 64, 8, 1, payload, 1)
    first = layout.block_group_id(7, 9)
    ids = np.arange(first, first + layout.groups_per_block)
    ops = ops_of(layout, ids, BASE + shift + np.arange(len(ids)) * payload, LIMITS, is_write=is_write)
    placement = "DIRECT" if payload == 4096 and shift == 0 else "STAGED"
    assert ops == [(16 * 4096, placement)]


def test_neighbours_are_merged_up_to_the_largest_io() -> None:
    layout = GroupLayout(1, 64, 8, 1, 4096, 1)
    ids = np.arange(300)
    assert ops_of(layout, ids, BASE + ids * 4096, LIMITS) == [(524_288, "DIRECT")] * 2 + [
        (44 * 4096, "DIRECT")
    ]
    scattered = BASE + np.random.default_rng(1).permutation(300) * 4096
    assert ops_of(layout, ids, scattered, LIMITS)[0] == (524_288, "VECTORED")
    assert ops_of(layout, ids, scattered + 8, LIMITS)[0] == (524_288, "STAGED")


def test_layers_are_never_merged() -> None:
    layout = GroupLayout(3, 1, 1, 1, 4096, 1)
    assert ops_of(layout, np.arange(6), BASE + np.arange(6) * 4096, LIMITS) == [(8192, "DIRECT")] * 3


def test_large_scattered_groups_stay_apart() -> None:
    """From 64 KiB on a group of its own can use a registered buffer, which a vectored I/O cannot."""
    layout = GroupLayout(1, 4, 1, 1, 65_536, 1)
    addresses = BASE + np.array([3, 1, 2, 0, 7, 6, 5, 4]) * 65_536
    assert ops_of(layout, np.arange(8), addresses, LIMITS) == [
        (65_536, "DIRECT"),
        (131_072, "DIRECT"),
        *[(65_536, "DIRECT")] * 5,
    ]


def test_a_large_group_is_cut() -> None:
    layout = GroupLayout(1, 2, 1, 1, 1_200_001, 1)
    assert ops_of(layout, [1], [BASE], LIMITS) == [(524_288, "STAGED")] * 2 + [(151_552, "STAGED")]
    plan = plan_groups(layout, np.array([1]), np.array([BASE]), LIMITS, is_write=True)
    assert (plan.ops_per_request, plan.op_count) == (3, 3)


def test_a_twin_is_read_once() -> None:
    layout = GroupLayout(1, 64, 8, 1, 4096, 1)
    plan = plan_groups(layout, np.array([5, 9, 5, 5]), BASE + np.arange(4) * 4096, LIMITS, is_write=False)
    assert (plan.op_count, plan.copy_count) == (2, 3)
    assert plan.first_ops(4).tolist() == [0, 1, 0, 0]


def cost_of(work: Callable[[], object], repeats: int = 15) -> float:
    """The median time of `work` in milliseconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return sorted(times)[repeats // 2] * 1000


def print_costs() -> None:
    """What 100,000 group numbers cost in Python and NumPy, from the numbers to the plan. The bar is 30 ms."""
    layout = GroupLayout(32, 4096, 8, 16, 128, 2)
    count = 100_000
    random = np.random.default_rng(1)
    apart = random.permutation(layout.num_groups // 2)[:count] * 2
    for name, ids in (("in file order", np.arange(count)), ("random, no two touch", apart)):
        addresses = BASE + np.arange(count) * layout.payload_nbytes
        for what, place in (("aligned", addresses), ("unaligned", addresses + 8)):

            def work(ids: Any = ids, place: Any = place) -> object:
                return plan_groups(layout, layout.check_ids(ids), place, LIMITS, is_write=False)

            print(f"{count} groups, {name}, {what}: {cost_of(work):.1f} ms")


if __name__ == "__main__":
    print_costs()
