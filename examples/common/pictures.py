"""Figures as files, styles of curves, and pages in HTML that need no other file."""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from examples.common.runs import write

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 1040px; margin: 2em auto; padding: 0 1em; color: #222 }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2em; border-bottom: 1px solid #ccc }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid #eee }
th { border-bottom: 1px solid #888 } td:first-child, th:first-child { text-align: left }
figure { margin: 1.5em 0 } img { max-width: 100% } pre { background: #f6f6f6; padding: .8em; overflow-x: auto }"""

KINDS = {"full": "full attention", "dcmm": "full attention + DCMM bias", "sbm": "block model", "top-k": "top-k of all scores",
         "bigbird": "BigBird", "lsh": "LSH (Reformer)", "blocks": "blocks (MoBA)", "routing": "routing", "key-selection": "key selection",
         "dcsbm": "block model with degrees", "dcmm-sbm": "block model + DCMM bias"}  # fmt: skip
PACE = ("threshold", "rate")  # options that say how fast shares fall
PLAIN = ("estimator", "select", "control", "parameterization")  # whose values say enough


def save_figure(path: Path, figure: Any, **options: Any) -> None:
    """Writes a figure of matplotlib as PNG, whole or not at all."""
    write(path, _png(figure, **options))


def _png(figure: Any, **options: Any) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", **options)
    return data.getvalue()


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
    around = [[mean - min(samples), max(samples) - mean] for mean, samples in zip(means, values, strict=True)]
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


def title(text: str, level: int = 2) -> str:
    return f"<h{level}>{html.escape(text)}</h{level}>"


def words(text: str, tag: str = "p") -> str:
    """A paragraph, or a text as it stands in a tag "pre"."""
    return f"<{tag}>{html.escape(text)}</{tag}>"


def picture(figure: Any) -> str:
    """A figure as PNG inside the page; the caption is in the picture, and its label is the alternative text."""
    code = base64.b64encode(_png(figure, dpi=110)).decode()
    return f'<figure><img alt="{html.escape(figure.get_label())}" src="data:image/png;base64,{code}"></figure>'


def page(name: str, parts: Iterable[str]) -> str:
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(name)}</title><style>{STYLE}</style>"
    return "\n".join([head, title(name, 1), *parts]) + "\n"
