"""Figures as files, styles and names of curves, and bars and curves for a narrow page."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from examples.common.runs import write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Bar = tuple[str, Sequence[float], str]
Curve = tuple[str, Mapping[float, Sequence[float]], str, str]

KINDS = {"full": "full attention", "dcmm": "full attention + DCMM bias", "sbm": "block model", "top-k": "top-k of all scores",
         "bigbird": "BigBird", "lsh": "LSH (Reformer)", "blocks": "blocks (MoBA)", "routing": "routing", "key-selection": "key selection",
         "dcsbm": "block model with degrees", "dcmm-sbm": "block model + DCMM bias"}  # fmt: skip
PACE = ("threshold", "rate")  # options that say how fast shares fall
PLAIN = ("estimator", "select", "control", "parameterization")  # whose values say enough


def save_figure(path: Path, figure: Any, colors: int = 0, **options: Any) -> None:
    """Writes a figure of matplotlib as PNG, whole or not at all; a few colors make a file of a quarter of the size."""
    data = io.BytesIO()
    figure.savefig(data, format="png", **options)
    if colors:
        from PIL import Image

        image, data = Image.open(data).convert("RGB").quantize(colors), io.BytesIO()
        image.save(data, format="png", optimize=True)
    write(path, data.getvalue())


def style(number: int) -> dict[str, Any]:
    """Color and marker of a curve."""
    from matplotlib import colormaps

    return {"color": colormaps["tab10"](number % 10), "marker": "osD^vXP*<>"[number % 10]}


def bare(*many: Any) -> None:
    """Takes the frame off the top and the right of axes."""
    for axes in many:
        axes.spines[["top", "right"]].set_visible(False)


def plot_extent(axes: Any, points: Iterable[tuple[float, Sequence[float]]], **look: Any) -> None:
    """A line through the means of the values at each place; a bar goes from the least of them to the largest."""
    places, values = zip(*points, strict=True)
    means = [fmean(samples) for samples in values]
    around = [[max(0, mean - min(x)), max(0, max(x) - mean)] for mean, x in zip(means, values, strict=True)]  # rounding
    axes.errorbar(places, means, yerr=[*zip(*around, strict=True)], capsize=3, **look)


def plain(method: str) -> tuple[str, str]:
    """Kind and options of a method in words; what only sets the pace of a schedule is left out.

    >>> plain("indexer:select=top_k,estimator=imitate,rate=0.004")
    ('indexer', 'top-k, imitate')
    """
    kind, _, text = method.partition(":")
    pairs = [pair.split("=") for pair in text.split(",") if pair and pair.split("=")[0] not in PACE]
    words = [value if name in PLAIN else f"{name} {value}" for name, value in pairs]
    return KINDS.get(kind, kind), ", ".join(words).replace("_", "-").replace("share", "share at once")


def name_of(run: str) -> str:
    """The name of a run in words.

    >>> name_of("sbm:estimator=local 5 %")
    'block model (local) 5 %'
    """
    method, _, ending = run.partition(" ")
    kind, options = plain(method)
    return " ".join([kind, *([f"({options})"] if options else []), *([ending] if ending else [])])


COLORS = {"learned": "#1b62a5", "control": "#9a9a9a", "dense": "#222222"}
"""Colors of what learns its edges, of controls and rules, and of attention over all pairs."""
WIDE = 4.6  # inches: text of nine points can be read where a phone shows the whole width


def draw_bars(panels: Mapping[str, Sequence[Bar]], labels: Sequence[str], digits: int = 1) -> Figure:
    """Horizontal bars one below the other, a panel for each title, with the mean as a number and single runs as dots.

    Args:
        panels: Bars by the title of their panel, each a name, the values of its runs, and a key of :data:`COLORS`.
        labels: What the axis of each panel measures.
        digits: Digits of the numbers after the point.
    """
    from matplotlib.figure import Figure

    heights = [len(bars) + 1.6 for bars in panels.values()]
    figure = Figure(figsize=(WIDE, 0.3 + 0.25 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (heading, bars), label in zip(grid, panels.items(), labels, strict=True):
        values = [value for _, samples, _ in bars for value in samples]
        low, high = min(0, *values), max(values)
        span = high - low
        for place, (_, samples, kind) in enumerate(reversed(bars)):
            mean = fmean(samples)
            axes.barh(place, mean, height=0.68, color=COLORS[kind])
            if len(samples) > 1:
                axes.plot(samples, [place] * len(samples), "o", ms=2.6, mfc="white", mec="black", mew=0.6)
            text = f"{mean:.{digits}f}".replace("-", "\N{MINUS SIGN}")
            axes.text(max(0, *samples) + 0.02 * span, place, text, va="center", fontsize=8.5)
        axes.set_yticks(range(len(bars)), [name for name, *_ in reversed(bars)])
        axes.set(xlim=(low - 0.03 * span * (low < 0), high + 0.2 * span), ylim=(-0.6, len(bars) - 0.4))
        axes.set_xlabel(label, fontsize=9)
        axes.set_title(heading, fontsize=9.5, loc="left", fontweight="bold")
        axes.tick_params(labelsize=9)
        bare(axes)
    return figure


def draw_curves(curves: Sequence[Curve], label: str, measure: str, **scales: Any) -> Figure:
    """Lines through means, from the least run to the largest at each place; a line's name stands in the legend below.

    Args:
        curves: A name, the values of runs at each place, a key of :data:`COLORS`, and a style such as ``"o-"``.
        label: The axis from left to right.
        measure: The axis upward.
        scales: Settings of the axes, such as ``xscale="log"``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDE, 3.6 + 0.1 * len(curves)), layout="constrained")
    axes = figure.subplots()
    for name, points, kind, look in curves:
        hollow = {"mfc": "white"} if "--" in look else {}
        plot_extent(axes, sorted(points.items()), fmt=look, color=COLORS[kind], label=name, ms=5.5, lw=1.6, **hollow)
    axes.set(**scales)
    ticks = sorted({place for _, points, *_ in curves for place in points})
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.1f}" if axes.get_ylim()[1] < 3 else "{x:,.0f}")
    axes.set_xlabel(label, fontsize=9)
    axes.set_ylabel(measure, fontsize=9)
    axes.tick_params(labelsize=9)
    bare(axes)
    ncols = 1 if max(len(name) for name, *_ in curves) > 32 else 2
    figure.legend(loc="outside lower center", ncols=ncols, frameon=False, fontsize=8.5)
    return figure
