"""Plots of a report, drawn by matplotlib: each as SVG in the colour of the text around it, or together as one PNG."""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Sequence
from typing import Any

from aio_kv.cli.benches.report_panels import Bars, Curves, Facet, Panel
from aio_kv.errors import UnavailableError

__all__ = ["check_plots", "png_of", "svg_of"]

_INK = "#010203"  # in an SVG it becomes the colour of the text around
_OURS, _OTHERS = "#2f81c7", "#8b949e"  # both are seen on white and on black
_CURVES = (_OURS, "#d9822b", "#3a9d5d", "#b565c4", _OTHERS)
_COLUMNS = 4
_WIDTH = 11.0  # inches
_ROW_HEIGHT = 0.26
_FRAME_HEIGHT = 0.95
_CURVES_HEIGHT = 3.6
_HEAD_HEIGHT = 0.9
_DPI = 110
_LINE_CHARACTERS = 150


def check_plots() -> None:
    """Raise `UnavailableError` where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError(
            "a report needs matplotlib, which is not installed", hint="pip install 'aio-kv[bench]'"
        )


def svg_of(panel: Panel, salt: str) -> str:
    """One panel as an SVG element; `salt` makes its inner names differ from those of the others on the page."""
    matplotlib = importlib.import_module("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure = _figure(_height_of(panel))
        _draw(figure, panel)
        data = io.StringIO()
        figure.savefig(data, format="svg", transparent=True, metadata={"Date": None})
    text = data.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


def png_of(panels: Sequence[Panel], title: str, facts: str) -> bytes:
    """All panels below each other, with a title and the facts about the machine, on white."""
    heights = [_height_of(panel) for panel in panels]
    figure = _figure(sum(heights) + _HEAD_HEIGHT)
    parts = figure.subfigures(len(panels) + 1, 1, height_ratios=[_HEAD_HEIGHT, *heights], squeeze=False)
    head, *rest = (row[0] for row in parts)
    head.text(0.01, 0.95, title, ha="left", va="top", fontsize=13, fontweight="bold")
    lines = [facts[i : i + _LINE_CHARACTERS] for i in range(0, len(facts), _LINE_CHARACTERS)]
    head.text(0.01, 0.62, "\n".join(lines), ha="left", va="top", fontsize=7)
    for part, panel in zip(rest, panels, strict=True):
        _draw(part, panel)
    data = io.BytesIO()
    figure.savefig(data, format="png", facecolor="white", dpi=_DPI)
    return data.getvalue()


def _figure(height: float) -> Any:
    # Not through pyplot, which keeps figures and wants a screen.
    figure = importlib.import_module("matplotlib.figure").Figure
    return figure(figsize=(_WIDTH, height), layout="constrained")


def _height_of(panel: Panel) -> float:
    if isinstance(panel, Curves):
        return _CURVES_HEIGHT
    rows = [panel.facets[i : i + _COLUMNS] for i in range(0, len(panel.facets), _COLUMNS)]
    return sum(max(len(facet.bars) for facet in row) * _ROW_HEIGHT + _FRAME_HEIGHT for row in rows) + 0.3


def _draw(figure: Any, panel: Panel) -> None:
    figure.suptitle(f"{panel.title}  [{panel.unit}]", x=0.01, ha="left", fontsize=10, color=_INK)
    if isinstance(panel, Curves):
        _draw_curves(figure.subplots(), panel)
    else:
        _draw_bars(figure, panel)


def _draw_bars(figure: Any, panel: Bars) -> None:
    columns = min(_COLUMNS, len(panel.facets))
    rows = -(-len(panel.facets) // columns)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, facet in zip(grid, panel.facets, strict=False):
        _draw_facet(axes, facet, panel.unit.partition(";")[0])
    for axes in grid[len(panel.facets) :]:
        axes.set_visible(False)


def _draw_facet(axes: Any, facet: Facet, unit: str) -> None:
    values = [bar.value for bar in facet.bars]
    colors = [_OURS if bar.is_ours else _OTHERS for bar in facet.bars]
    places = range(len(facet.bars))
    bars = axes.barh(places, values, color=colors, height=0.7)
    axes.bar_label(bars, [_figure_text(value) for value in values], padding=3, fontsize=7, color=_INK)
    axes.set_yticks(places, [bar.label for bar in facet.bars], fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_title(facet.title, fontsize=8, color=_INK)
    if facet.target is not None:
        axes.axvline(facet.target, color=_INK, linestyle="--", linewidth=0.8)
    axes.set_xlabel(unit, fontsize=7, color=_INK)
    _style(axes)


def _draw_curves(axes: Any, panel: Curves) -> None:
    for index, (name, points) in enumerate(panel.curves.items()):
        across, values = zip(*points, strict=True)
        axes.plot(across, values, label=name, color=_CURVES[index % len(_CURVES)], marker=".")
    axes.set_xscale("log")
    axes.set_xlabel(panel.across, fontsize=8, color=_INK)
    axes.set_ylabel(panel.unit, fontsize=8, color=_INK)
    axes.legend(fontsize=7, frameon=False, labelcolor=_INK)
    _style(axes)


def _style(axes: Any) -> None:
    axes.tick_params(which="both", colors=_INK, labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_INK)
    axes.patch.set_visible(False)


def _figure_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
