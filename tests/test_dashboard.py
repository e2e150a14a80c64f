"""The Grafana dashboard asks for what is exported, and for all parts of it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aio_kv.metrics import TABLE, FamilyKind, families

DASHBOARD = json.loads(
    (Path(__file__).resolve().parent.parent / "docs" / "grafana" / "aio_kv.json").read_text()
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
FAMILY_OF = {family.sample_name: family for family in families()}
NAME = re.compile(r"\baio_kv_[a-z_]+")
UNITS = {"Bps", "bytes", "iops", "none", "ops", "percentunit", "s"}


def expressions() -> Iterator[tuple[str, str]]:
    """Title of the panel and query."""
    for panel in PANELS:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])


def test_every_name_is_exported() -> None:
    asked = {name for _, query in expressions() for name in NAME.findall(query)}
    assert asked <= set(FAMILY_OF), asked - set(FAMILY_OF)


def test_every_part_is_shown() -> None:
    asked = {name.split("_")[2] for _, query in expressions() for name in NAME.findall(query)}
    assert asked == {part.prefix for part in TABLE.values()}


@pytest.mark.parametrize(("title", "query"), list(expressions()))
def test_counters_are_rates_and_gauges_are_not(title: str, query: str) -> None:
    """A counter as it is means nothing after a restart; a rate of a gauge means nothing at all."""
    for found in NAME.finditer(query):
        is_rate = re.search(r"(rate|increase)\($", query[: found.start()]) is not None
        assert is_rate == (FAMILY_OF[found[0]].kind is FamilyKind.COUNTER), title
        assert query[found.end() :].startswith('{job=~"$job",name=~"$name"}'), title
    assert query.count("(") == query.count(")")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    queries = [target["expr"] for target in panel["targets"]]
    assert len(queries) == len(set(queries))
    is_bytes = panel["fieldConfig"]["defaults"]["unit"] in ("Bps", "bytes")
    assert is_bytes == all("_bytes" in query for query in queries)


def test_panels_have_their_own_place() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for one, two in itertools.combinations(places, 2):
        is_beside = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        is_above = one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
        assert is_beside or is_above, (one, two)
    assert all(place["x"] + place["w"] <= 24 for place in places)
