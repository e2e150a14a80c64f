"""Statistics as Prometheus metrics, through the library itself: registries, its exposition and its parsers."""

from __future__ import annotations

import ast
import gc
import importlib
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest
from backends import make_backend
from expert_arenas import SIZES, arena_on, use
from expert_files import memory_model
from loops import every_loop, on_one_loop
from prometheus_client import REGISTRY, CollectorRegistry, Gauge, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from slow_devices import PADDED, filled, memory_backend, unaligned

import aio_kv
from aio_kv import CascadeBackend, ClosedError, LayoutError, PosixBackend, UnavailableError
from aio_kv.engine import EngineStatistics
from aio_kv.metrics import TABLE, FamilyKind, families, register

PACKAGE = Path(aio_kv.__file__).parent
ROOT = Path(__file__).resolve().parent.parent


STATISTICS = EngineStatistics(ops=3, cuda_call_ns_max=1500)


@dataclass(eq=False)
class Source:
    """Something that has statistics."""

    value: EngineStatistics = STATISTICS
    is_open: bool = True

    def statistics(self) -> EngineStatistics:
        return self.value


def classes_of_statistics() -> Iterator[type]:
    """Every class of the package that is called ...Statistics."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Statistics"):
                module = ".".join(("aio_kv", *path.relative_to(PACKAGE).with_suffix("").parts))
                yield getattr(importlib.import_module(module), node.name)


def values_in(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """What a scrape gives, by sample name and tier."""
    return {
        (sample.name, sample.labels["tier"]): sample.value
        for family in parse_text(generate_latest(registry).decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("kind", list(classes_of_statistics()), ids=lambda kind: kind.__name__)
def test_every_field_of_every_statistics_has_its_place_in_the_table(kind: type) -> None:
    """A new field, or a new class, is exported or this fails."""
    assert is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert kind in TABLE, f"{kind.__name__}: add a Part to aio_kv/metrics/table.py"
    assert list(TABLE[kind].fields) == [field.name for field in fields(kind)]


def test_names_follow_the_conventions() -> None:
    """https://prometheus.io/docs/practices/naming: base units last, `_total` for counters and for nothing else."""
    everything = families()
    names = [family.sample_name for family in everything]
    assert len(names) == len(set(names))
    assert len({family.name for family in everything}) == len(everything)
    for family in everything:
        assert re.fullmatch(r"aio_kv(_[a-z]+)+", family.name), family.name
        assert not re.search(r"nbytes|_(ns|us|ms|kb|mb|total|count|sum|info)(_|$)", family.name), family.name
        assert family.sample_name.endswith("_total") == (family.kind is FamilyKind.COUNTER)
        assert ("bytes" in family.name) == (family.unit == "bytes"), family.name
        assert family.help[0].isupper()
        assert family.help.endswith("."), family.help


@every_loop
async def test_each_number_of_a_backend_and_what_is_below_arrives() -> None:
    registry = CollectorRegistry(auto_describe=True)
    payload = PADDED.payload_nbytes
    below = memory_backend(PADDED)
    async with CascadeBackend(below, capacity_bytes=8 * payload, slot="group") as cascade:
        register(cascade, registry, name="kv")
        await filled(below, 1)
        await cascade.write_groups([1, 2, 3], unaligned(PADDED, 3))
        await cascade.read_groups([2, 3, 9], unaligned(PADDED, 3))
        said, values = cascade.statistics(), values_in(registry)
        assert said is not None
        assert said.hits == 2
        parts = [(said, "0"), (said.backing, "1"), (said.backing.engine, "1"), (said.backing.transfers, "1")]
        seen = 2  # the two info samples
        for part, tier in parts:
            table = TABLE[type(part)]
            for field in fields(part):
                value, export = getattr(part, field.name), table.fields[field.name]
                if not isinstance(value, int):
                    continue
                name = f"aio_kv_{table.prefix}_{export.name}"
                found = {suffix: values.get((name + suffix, tier)) for suffix in ("", "_total")}
                assert float(value) * export.scale in found.values(), (field.name, found)
                seen += 1
        seen += 1  # the length of `refusals`
        assert seen == len(values)
    assert values["aio_kv_cascade_hits_total", "0"] == 2
    assert values["aio_kv_cascade_slab_pinned", "0"] == 0


@every_loop
async def test_text_becomes_labels_of_the_info_families() -> None:
    registry = CollectorRegistry()
    async with CascadeBackend(memory_backend(PADDED), capacity_bytes=1 << 20, policy="arc") as cascade:
        register(cascade, registry, name="kv", shard="3")
        shared = {"name": "kv", "shard": "3"}
        assert registry.get_sample_value("aio_kv_cascade_info", {**shared, "tier": "0", "policy": "arc"}) == 1
        below = {**shared, "tier": "1", "backend": "MemoryBackend", "rung": "memory-buffered"}
        assert registry.get_sample_value("aio_kv_backend_info", below) == 1


@on_one_loop
async def test_experts() -> None:
    registry = CollectorRegistry()
    model = memory_model(SIZES)
    async with arena_on(model, 3) as (arena, reader):
        register(arena, registry, name="arena")
        register(reader, registry, name="reader")
        await use(arena, model, 0, [1, 2])
        await use(arena, model, 0, [2])
        values = values_in(registry)
        assert values["aio_kv_arena_hits_total", "0"] == 1
        assert values["aio_kv_arena_misses_total", "0"] == 2
        assert values["aio_kv_arena_leases", "0"] == 0
        assert values["aio_kv_arena_read_bytes_total", "0"] == arena.statistics().bytes_read > 0
        assert values["aio_kv_transfers_accepted_total", "0"] == reader.statistics().transfers.transfers
    assert not values_in(registry), "both are closed"


def test_the_library_reads_back_both_formats() -> None:
    registry, source = CollectorRegistry(), Source()
    register(source, registry, name='say "kv"\n')
    for text, parse in (
        (generate_latest(registry).decode(), parse_text),
        (generate_openmetrics(registry).decode(), parse_openmetrics),
    ):
        samples = {
            sample.name: sample for family in parse(text) for sample in family.samples if family.name != "#"
        }
        assert len(samples) == len(fields(EngineStatistics))
        assert samples["aio_kv_engine_ops_total"].value == 3
        assert samples["aio_kv_engine_ops_total"].labels == {"name": 'say "kv"\n', "tier": "0"}
        assert samples["aio_kv_engine_cuda_call_max_seconds"].value == pytest.approx(1.5e-6)
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", generate_latest(registry).decode(), re.MULTILINE))
    assert types["aio_kv_engine_ops_total"] == "counter"
    assert types["aio_kv_engine_in_flight_ops"] == "gauge"
    assert "# UNIT aio_kv_engine_read_bytes bytes" in generate_openmetrics(registry).decode()


def test_the_registry_of_the_process_is_the_default() -> None:
    source = Source()
    with register(source):
        assert REGISTRY.get_sample_value("aio_kv_engine_ops_total", {"tier": "0"}) == 3
    assert REGISTRY.get_sample_value("aio_kv_engine_ops_total", {"tier": "0"}) is None


def test_two_backends_share_one_family() -> None:
    registry, one, two = CollectorRegistry(auto_describe=True), Source(), Source(EngineStatistics(ops=5))
    register(one, registry, name="one")
    register(two, registry, name="two")
    text = generate_latest(registry).decode()
    assert text.count("# TYPE aio_kv_engine_ops_total counter") == 1
    assert 'aio_kv_engine_ops_total{name="one",tier="0"} 3.0' in text
    assert 'aio_kv_engine_ops_total{name="two",tier="0"} 5.0' in text


def test_registries_know_nothing_of_each_other() -> None:
    source, one, two = Source(), CollectorRegistry(), CollectorRegistry()
    first = register(source, one)
    register(source, two)
    first.close()
    assert not values_in(one)
    assert values_in(two)


def test_a_closed_registration_exports_nothing_and_gives_its_names_back() -> None:
    registry, one, two = CollectorRegistry(), Source(), Source()
    first, second = register(one, registry, name="one"), register(two, registry, name="two")
    first.close()
    first.close()
    assert 'name="one"' not in generate_latest(registry).decode()
    with pytest.raises(ValueError, match="aio_kv_engine_in_flight_ops"):
        Gauge("aio_kv_engine_in_flight_ops", "Somebody else's.", registry=registry)
    second.close()
    assert not values_in(registry)
    Gauge("aio_kv_engine_in_flight_ops", "Somebody else's.", registry=registry)
    with pytest.raises(ValueError, match="aio_kv_engine_in_flight_ops"):
        register(one, registry)


def test_a_backend_is_not_kept_alive() -> None:
    registry, source = CollectorRegistry(), Source()
    register(source, registry)
    assert values_in(registry)
    del source
    gc.collect()
    assert not values_in(registry)
    Gauge("aio_kv_engine_in_flight_ops", "The collector has left.", registry=registry)


def test_a_registry_is_not_kept_alive() -> None:
    registry, source = CollectorRegistry(), Source()
    register(source, registry)
    gone = weakref.ref(registry)
    del registry
    gc.collect()
    assert gone() is None


@every_loop
async def test_closing_a_backend_ends_its_registration() -> None:
    registry = CollectorRegistry()
    for _ in range(2):  # the labels are free again
        async with memory_backend(PADDED) as backend:
            register(backend, registry, name="kv")
            assert values_in(registry)
        assert not values_in(registry)
    Gauge("aio_kv_engine_in_flight_ops", "The collector has left.", registry=registry)


def test_labels_of_what_was_closed_are_free_without_a_scrape_in_between() -> None:
    registry, one, two = CollectorRegistry(), Source(), Source(EngineStatistics(ops=5))
    register(one, registry)
    one.is_open = False
    register(two, registry)
    assert values_in(registry)["aio_kv_engine_ops_total", "0"] == 5


def test_what_closes_while_it_is_scraped_is_left_out() -> None:
    class Closing(Source):
        def statistics(self) -> EngineStatistics:
            if self.is_asked:
                raise ClosedError("closed meanwhile")
            self.is_asked = True
            return self.value

        is_asked = False

    registry, source = CollectorRegistry(), Closing()
    register(source, registry)
    assert not values_in(registry)


def test_labels_must_tell_backends_apart_and_be_labels() -> None:
    registry, source = CollectorRegistry(), Source()
    register(source, registry, name="kv")
    with pytest.raises(LayoutError, match="add one that tells them apart"):
        register(Source(), registry, name="kv")
    for labels in ({"tier": "0"}, {"rung": "x"}, {"__name__": "x"}, {"a-b": "x"}, {"": "x"}):
        with pytest.raises(LayoutError, match="must be a Prometheus label name"):
            register(source, registry, **labels)
    with pytest.raises(LayoutError, match="must be text"):
        register(source, registry, shard=3)  # type: ignore[arg-type]


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="object has no statistics"):
        register(object())
    with (
        PosixBackend(tmp_path, PADDED, create=True) as oracle,
        pytest.raises(LayoutError, match="PosixBackend has no statistics"),
    ):
        register(oracle)
    with pytest.raises(LayoutError, match="are int: must be one of Statistics,"):
        register(Source(value=7))  # type: ignore[arg-type]
    for backend in (memory_backend(PADDED), CascadeBackend(memory_backend(PADDED), capacity_bytes=1 << 20)):
        with pytest.raises(ClosedError, match="register it after opening it"):
            register(backend)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UnavailableError, match=r"pip install 'aio-kv\[metrics\]'"):
        register(Source())


@on_one_loop
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uring", "python"])
async def test_scrapes_from_another_thread_while_backends_come_and_go(kind: str, tmp_path: Path) -> None:
    """Prometheus asks in a thread of its HTTP server, at any moment of a backend's life."""
    registry, is_over, errors = CollectorRegistry(), threading.Event(), []

    def scrape() -> None:
        while not is_over.is_set():
            try:
                generate_latest(registry)
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        for _ in range(3):
            async with (
                make_backend(kind, tmp_path)(PADDED) as below,
                CascadeBackend(below, capacity_bytes=1 << 16) as cascade,
            ):
                register(cascade, registry)
                for _ in range(20):
                    await cascade.read_groups(np.arange(8), bytearray(8 * PADDED.payload_nbytes))
    finally:
        is_over.set()
        thread.join()
    assert not errors


def test_the_reference_lists_what_there_is() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    listed = [line for line in page.splitlines() if line.startswith("| `aio_kv_")]
    wanted = [f"| `{family.sample_name}` | {family.kind.value} | {family.help} |" for family in families()]
    assert sorted(listed) == sorted(wanted)
