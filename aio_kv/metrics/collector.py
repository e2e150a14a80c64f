"""Statistics of open backends for `prometheus_client`: one collector per registry, since a family appears once.

Backends are held weakly and asked when they are scraped, in the thread that scrapes. One that has been closed or is
gone drops out; with the last one the collector leaves its registry.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from types import ModuleType, TracebackType
from typing import Any, Self

from aio_kv.errors import ClosedError, LayoutError, UnavailableError
from aio_kv.metrics.table import TABLE, Family, families, samples_of

__all__ = ["Registration", "register"]

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = {"tier", "backend", "rung", "policy"}
_lock = (
    threading.Lock()
)  # guards what is below and every collector's list; a registry's own lock comes after it
_collectors: weakref.WeakKeyDictionary[Any, _Collector] = weakref.WeakKeyDictionary()


class Registration:
    """One object whose statistics are exported. Ends with `close`, with the object, or when that is closed.

    A context manager; it need not be kept.
    """

    def __init__(self, source: Any, labels: Mapping[str, str], collector: _Collector) -> None:
        self._source = weakref.ref(source)
        self._collector = collector
        self.labels = labels

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Export nothing of it any more; again does nothing. From any thread."""
        with _lock:
            self._collector.remove(self)

    @property
    def is_over(self) -> bool:
        """Whether its object is closed or gone."""
        source = self._source()
        return source is None or not getattr(source, "is_open", True)

    def statistics(self) -> Any:
        """What its object says of itself; None where that is over."""
        source = self._source()
        if source is None or not getattr(source, "is_open", True):
            return None
        try:
            return source.statistics()
        except ClosedError:  # closed meanwhile, or in the child of a fork
            return None


class _Collector:
    """What a registry asks at each scrape."""

    def __init__(self, prometheus: ModuleType, registry: Any) -> None:
        self._metric = prometheus.Metric
        self._registry = weakref.ref(registry)
        self.registrations: list[Registration] = []

    def remove(self, registration: Registration) -> None:
        """Forget a registration, and leave the registry with the last. Under the lock."""
        if registration not in self.registrations:
            return
        self.registrations.remove(registration)
        registry = self._registry()
        if not self.registrations and registry is not None:
            del _collectors[registry]
            registry.unregister(self)

    def prune(self) -> None:
        """Forget what is over. Under the lock."""
        for registration in [one for one in self.registrations if one.is_over]:
            self.remove(registration)

    def describe(self) -> list[Any]:
        """All families without values: what other collectors may not be named."""
        return [self._empty(family) for family in families()]

    def collect(self) -> Iterator[Any]:
        """The families that have values now."""
        with _lock:
            self.prune()
            registrations = tuple(self.registrations)
        metrics: dict[Family, Any] = {}
        for registration in registrations:
            for sample in samples_of(registration.statistics()):
                family = sample.family
                if family not in metrics:
                    metrics[family] = self._empty(family)
                labels = {**registration.labels, **sample.labels}
                metrics[family].add_sample(family.sample_name, labels, sample.value)
        yield from metrics.values()

    def _empty(self, family: Family) -> Any:
        return self._metric(family.name, family.help, family.kind.value, family.unit)


def register(backend: Any, registry: Any = None, **labels: str) -> Registration:
    """Export the statistics of an open backend, reader or anything else that has them, until it is closed.

    Args:
        backend: open; anything whose `statistics()` are of a class in `aio_kv.metrics.TABLE`. Held weakly. Of a cascade
            everything below it is exported as well, told apart by the label `tier`.
        registry: a `prometheus_client.CollectorRegistry`; its `REGISTRY` by default.
        labels: put on every sample, to tell this backend from others in the registry.

    Returns the registration, which may be closed earlier. Scrapes are answered in whatever thread they come, without
    the event loop. Raises `UnavailableError` without prometheus_client, `ClosedError` for what is not open,
    `LayoutError` for what has no statistics and for labels that are wrong or taken.
    """
    prometheus = _prometheus_client()
    if not getattr(backend, "is_open", True):
        raise ClosedError(f"{type(backend).__name__} is not open: register it after opening it")
    _check_source(backend)
    _check_labels(labels)
    if registry is None:
        registry = prometheus.REGISTRY
    with _lock:
        collector = _collectors.get(registry)
        if collector is not None:
            collector.prune()
            collector = _collectors.get(registry)  # none if that were the last
        if collector is None:
            collector = _Collector(prometheus, registry)
            registry.register(collector)
            _collectors[registry] = collector
        elif any(other.labels == labels for other in collector.registrations):
            raise LayoutError(
                f"labels {labels}: those of another backend in this registry; add one that tells them apart, "
                "such as name='kv0'"
            )
        registration = Registration(backend, dict(labels), collector)
        collector.registrations.append(registration)
    return registration


def _prometheus_client() -> ModuleType:
    try:
        import prometheus_client
    except ImportError as error:
        raise UnavailableError(
            "prometheus_client is not installed", hint="pip install 'aio-kv[metrics]'"
        ) from error
    module: ModuleType = prometheus_client
    return module


def _check_source(backend: Any) -> None:
    ask = getattr(backend, "statistics", None)
    if not callable(ask):
        raise LayoutError(f"{type(backend).__name__} has no statistics() to export")
    kind = type(ask())
    if kind not in TABLE:
        known = ", ".join(each.__name__ for each in TABLE)
        raise LayoutError(
            f"statistics() of {type(backend).__name__} are {kind.__name__}: must be one of {known}"
        )


def _check_labels(labels: Mapping[str, str]) -> None:
    for name, value in labels.items():
        if name in _RESERVED or not _LABEL.fullmatch(name):
            raise LayoutError(
                f"label {name!r}: must be a Prometheus label name other than {', '.join(sorted(_RESERVED))}"
            )
        if not isinstance(value, str):
            raise LayoutError(f"label {name}={value!r}: must be text")
