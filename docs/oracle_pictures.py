"""The pictures of the notebook `oracle_comparison`. Mid-tones on no background suit light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.ticker import FuncFormatter, LogLocator
from matplotlib_inline.backend_inline import set_matplotlib_formats
from oracle_measures import Compared, Floats

from aio_kv.cli.heartbeat import lag_of

__all__ = ["plain_style", "show_bars", "show_curves", "show_lags", "show_latencies", "show_maps"]

_GREY = "#808080"
_STEPS = (1.0, 2.0, 5.0)
_COLOURS = {
    "PosixBackend": "#d0643c",
    "PosixBackend, on the loop": "#d0643c",
    "PosixBackend, in a thread": "#c9952c",
    "UringBackend": "#3d85c6",
    "ThreadedBackend": "#8e6fc1",
    "CascadeBackend": "#3c9d6b",
    "fio": _GREY,
    "idle loop": _GREY,
}
_MARKERS = dict(zip(_COLOURS, "osv^DXPd", strict=True))


def plain_style() -> None:
    """Draw on nothing, in grey, into PNG."""
    set_matplotlib_formats("png", facecolor="none", dpi=110)
    plt.rcParams.update(
        {
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "savefig.facecolor": "none",
            "legend.frameon": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
        | dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"),
            _GREY,
        )
    )


def show_maps(compared: Sequence[Compared]) -> Any:
    """One map for each comparison: a point for each group, by layer and place in the layer."""
    figure, axes = plt.subplots(
        len(compared),
        figsize=(9, 0.6 + 1.3 * len(compared)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    colours = ListedColormap(["#d0643c", "#3c9d6b"])
    for row, (one, ax) in enumerate(zip(compared, axes[:, 0], strict=True)):
        layers, groups = one.is_equal.shape
        ax.imshow(one.is_equal, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        for layer, group in np.argwhere(~one.is_equal)[:20]:
            ax.plot(group, layer, "o", markersize=14, markerfacecolor="none", markeredgecolor="#d0643c")
        verdict = f"{layers * groups:,} groups compared, {one.differing:,} differ"
        ax.set_title(f"{one.name}: {verdict}", loc="left", fontsize=10)
        ax.set_ylabel("layer")
        ax.grid(False)
        if row == len(compared) - 1:
            ax.set_xlabel("group in its layer (block, kind, head)")
    return figure


def show_curves(panels: Mapping[str, Mapping[str, Mapping[int, float]]], xlabel: str) -> Any:
    """Panels side by side, by the labels of their y axes: a curve for each contender over sizes or depths."""
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 4), squeeze=False, layout="constrained")
    for ax, (ylabel, curves) in zip(axes[0], panels.items(), strict=True):
        for name, points in curves.items():
            if len(points) == 1:
                ((_, value),) = points.items()
                ax.axhline(value, color=_COLOURS[name], linestyle="--", label=f"{name}, always one")
            else:
                ax.plot(*zip(*sorted(points.items()), strict=True), **_line(name))
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter(FuncFormatter(_short))
        _plain_decades(ax.yaxis, _STEPS)
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def _line(name: str) -> dict[str, Any]:
    return {"color": _COLOURS[name], "marker": _MARKERS[name], "markersize": 5, "label": name}


def _short(value: float, position: int) -> str:
    for unit, step in (("Mi", 1 << 20), ("Ki", 1 << 10)):
        if value >= step:
            return f"{value / step:g} {unit}"
    return f"{value:g}"


def _plain_decades(axis: Any, steps: tuple[float, ...] = (1.0,)) -> None:
    """Plain numbers at the `steps` of each decade."""
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axis.set_minor_formatter(FuncFormatter(lambda value, position: ""))


def show_latencies(latencies: Mapping[str, Floats]) -> Any:
    """For each backend the share of reads that took longer than so many microseconds."""
    figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
    for name, values in latencies.items():
        ordered = np.sort(values)
        share = 100 * (1 - np.arange(len(ordered)) / len(ordered))
        label = f"{name}: p50 {np.median(ordered):,.0f} us, p99 {np.percentile(ordered, 99):,.0f} us"
        ax.step(ordered, share, color=_COLOURS[name], label=label, where="post")
    ax.set_xscale("log")
    ax.set_yscale("log")
    _plain_decades(ax.xaxis, _STEPS)
    _plain_decades(ax.yaxis)
    ax.set_xlabel("latency of one read of 4 KiB [us]")
    ax.set_ylabel("reads that took longer [%]")
    ax.legend()
    return figure


def show_lags(lags: Mapping[str, Floats], period_ms: float = 1.0) -> Any:
    """For each way of reading how late each beat was, over the time; all on the same scales."""
    figure, axes = plt.subplots(
        len(lags),
        figsize=(9, 1.35 * len(lags)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for ax, (name, values) in zip(axes[:, 0], lags.items(), strict=True):
        moments = np.cumsum(values + period_ms) / 1e3
        ax.vlines(moments, 0.01, np.maximum(values, 0.01), color=_COLOURS[name], linewidth=1)
        ax.plot(moments, np.maximum(values, 0.01), ".", color=_COLOURS[name], markersize=2)
        ax.set_yscale("log")
        _plain_decades(ax.yaxis)
        lag = lag_of((values / 1e3).tolist())  # which counts the beats that a stall swallowed
        worst = f"p50 {lag.p50_ms:.2f} ms, p99 {lag.p99_ms:.1f} ms, worst {values.max():.1f} ms"
        ax.set_title(f"{name}: {worst}", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("time [s]")
    figure.supylabel("how late each beat was [ms]", color=_GREY, fontsize=10)
    return figure


def show_bars(values: Mapping[str, Mapping[int, float]], ylabel: str, xlabel: str) -> Any:
    """Bars for each contender, grouped by size."""
    figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
    points = sorted({point for bars in values.values() for point in bars})
    width = 0.8 / len(values)
    for index, (name, bars) in enumerate(values.items()):
        places = [points.index(point) + (index - (len(values) - 1) / 2) * width for point in bars]
        ax.bar(places, list(bars.values()), width * 0.92, color=_COLOURS[name], label=name)
    ax.set_xticks(range(len(points)), [_short(point, 0) for point in points])
    ax.set_yscale("log")
    _plain_decades(ax.yaxis, _STEPS)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.grid(False, axis="x")
    figure.legend(loc="outside lower center", ncols=5)
    return figure
