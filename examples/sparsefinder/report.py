"""Tables and figures of the sweep: recall of the edges that attention uses, and results of the task, at equal sparsity; maps of heads."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from entmax import entmax15
from matplotlib import colormaps
from matplotlib.figure import Figure

from examples.common.pictures import bare, save_figure
from examples.common.tables import Row, add, by, markdown
from examples.sparsefinder.model import Texts, hide
from examples.sparsefinder.sources import COUNTS, GRIDS, LEARNED, ORACLES, Learned, make
from examples.sparsefinder.sweep import TESTED, Sweep, extract
from sbm_pyg import TokenClassifier, Tokens
from sbm_pyg.sparsefinder.predictors import clusters

LEVELS = (0.5, 0.7, 0.8, 0.9, 0.95)
MEASURES = (  # over which sparsity, what, its factor in tables, and digits
    ("sparsity", "recall", "Recall of the ground-truth edges, %", 100, 1),
    ("sparsity", "exact", "Queries with all that they use, %", 100, 1),
    ("sparsity_used", "accuracy", "Accuracy on hidden words, %", 100, 1),
    ("sparsity_used", "saved", "Bits of a hidden word", -1, 3),
)
AXES = {
    "recall": "share of the ground-truth edges that are predicted",
    "exact": "share of the queries",
    "accuracy": "share of the hidden words that are the first guess",
    "saved": "bits of a hidden word (fewer is better: above)",
}
MAPS = 3  # heads that are drawn
SHOWN = 40  # words of a map
Point = tuple[float, float]


def settings(rows: Sequence[Row]) -> dict[str, dict[float, list[Row]]]:
    """Means over heads and layers of each setting, by source and seed."""
    numbers = ("sparsity", "recall", "precision", "exact", "accuracy", "bits", "sparsity_used")

    def mean(rows: Sequence[Row]) -> Row:
        means = {key: fmean(row[key] for row in rows) for key in numbers}
        return means | {"saved": -means["bits"]}  # so that more is better, as of the others

    return {
        name: {seed: [mean(rows) for knob in knobs.values() for rows in knob.values()] for seed, knobs in seeds.items()}
        for name, seeds in by(rows, "source", "seed", "knob", "window").items()
    }


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both, by falling sparsity."""
    best_points: list[Point] = []
    for x, y in sorted(points, reverse=True):
        if not best_points or y > best_points[-1][1]:
            best_points.append((x, y))
    return best_points


def best(points: Sequence[Point], level: float) -> float:
    """The largest second number of points whose first is at least a level; NaN without such points."""
    return max((y for x, y in points if x >= level), default=math.nan)


def tables(rows: Sequence[Row]) -> str:
    """The best setting of each source at a sparsity or more; means over seeds."""
    means, parts = settings(rows), []
    dense = [row for seed in means.get("all", {}).values() for row in seed]
    if dense:
        accuracy, bits, sparsity = (fmean(row[key] for row in dense) for key in ("accuracy", "bits", "sparsity"))
        words = f"All pairs: accuracy {100 * accuracy:.1f} %, {bits:.3f} bits a hidden word."
        parts.append(f"{words} Entmax itself leaves out {100 * sparsity:.1f} % of the pairs.")
    for x, y, title, factor, digits in MEASURES:
        lines = []
        for name in [name for name in GRIDS if name in means]:
            points = [[(row[x], row[y]) for row in seed] for seed in means[name].values()]
            values = [factor * fmean(best(seed_points, level) for seed_points in points) for level in LEVELS]
            lines.append([name, *("" if math.isnan(value) else f"{value:.{digits}f}" for value in values)])
        lines.sort(key=lambda line: factor * float(line[4] or factor * -99), reverse=True)  # by the last but one level
        parts.append(f"## {title}\n\n" + markdown(["method", *(f"sparsity {level:g}" for level in LEVELS)], lines))
    return "\n\n".join(parts)


def _style(name: str) -> dict[str, Any]:
    """Sources that learn are full lines, fixed ones broken, oracles dotted and black."""
    number = [*GRIDS].index(name)
    line = ":" if name in ORACLES else "-" if name in LEARNED else "--"
    color = "black" if name in ORACLES else colormaps["tab20"]((2 * number) % 20 + number // 10)
    return {"linestyle": line, "color": color, "marker": "osD^vXP*<>hpd8"[number], "markersize": 4, "label": name}


def _curves(axes: Any, points: dict[str, list[Point]]) -> None:
    for name, source_points in points.items():
        style = _style(name)
        axes.plot(*zip(*source_points, strict=True), ".", color=style["color"], alpha=0.25, markersize=3)
        axes.plot(*zip(*frontier(source_points), strict=True), **style)
    bare(axes)


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Pareto curves, in the mean and for each head of the first seed; points are all settings."""
    means = settings(rows)
    figure = Figure(figsize=(13, 10), layout="constrained")
    for axes, (x, y, words, _, _) in zip(figure.subplots(2, 2).flat, MEASURES, strict=True):
        rows_of = {name: itertools.chain(*means[name].values()) for name in GRIDS if name in means}
        points = {name: [(row[x], row[y]) for row in source_rows] for name, source_rows in rows_of.items()}
        _curves(axes, points)
        for row in (row for seed in means.get("all", {}).values() for row in seed):
            axes.plot(row["sparsity"], row[y], "k*", ms=12)
            axes.axhline(row[y], color="k", lw=0.5)
        of = {"sparsity": "layers and heads, on true graphs", "sparsity_used": "the model while it reads"}[x]
        axes.set(xlabel=f"sparsity: share of the pairs left out ({of})", ylabel=AXES[y])
        axes.set_title(words.partition(",")[0], fontsize="medium")
        axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):.2g}" if abs(value) < 1 else f"{abs(value):.1f}")
    words = "lines join the best settings, dots show all; the star and its line are entmax over all pairs"
    figure.suptitle(f"Predicted edges of entmax heads: {words}")
    title = "source of the graph\n(full: learned, broken: fixed,\ndotted: sees all scores)"
    figure.legend(*axes.get_legend_handles_labels(), title=title, loc="outside right center", frameon=False)
    save_figure(folder / "pareto.png", figure, dpi=110)
    first = [row for row in rows if row["seed"] == rows[0]["seed"]]
    places = sorted({(row["layer"], row["head"]) for row in first})
    across = max(1, int(max(head for _, head in places)) + 1)
    figure = Figure(figsize=(1.6 + 3.2 * across, 2.8 * math.ceil(len(places) / across)), layout="constrained")
    grid = figure.subplots(math.ceil(len(places) / across), across, squeeze=False, sharex=True, sharey=True)
    for axes, (layer, head) in zip(grid.flat, places, strict=False):
        head_rows = [row for row in first if (row["layer"], row["head"]) == (layer, head)]
        rows_of = by([row for row in head_rows if row["source"] in GRIDS], "source")
        _curves(axes, {name: [(row["sparsity"], row["recall"]) for row in curve] for name, curve in rows_of.items()})
        axes.axvline(next((row["sparsity"] for row in head_rows if row["source"] == "all"), 1.0), color="k", lw=0.5)
        axes.set_title(f"layer {layer:g}, head {head:g}", fontsize="small")
    figure.supxlabel("sparsity (line: that of entmax itself)")
    figure.supylabel("recall: share of the ground-truth edges that are predicted")
    figure.suptitle("Recall of each head")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    save_figure(folder / "heads.png", figure, dpi=90)
    return [folder / "pareto.png", folder / "heads.png"]


def draw_heads(
    model: TokenClassifier, learned: Sequence[Learned], texts: Texts, plan: Sweep, folder: Path
) -> list[Path]:
    """Maps of heads over the start of a test sequence, and the graphs that clusters predict; and the words of each cluster."""
    count, tokens = COUNTS[3], texts.test[:1]
    samples = extract(model, tokens, plan.hidden, 1, 0, "maps")
    names = [texts.vocabulary[word] for word in hide(tokens, plan.hidden, 0)[0][0, :SHOWN].tolist()]
    # heads that are neither full nor empty say most
    heads = [
        (abs(float(graph.density[0, head]) - 0.1), number, head)
        for number, ((_, _, graph),) in enumerate(samples)
        for head in range(graph.heads)
    ]
    figure = Figure(figsize=(15, 5 * MAPS), layout="constrained")
    for line, (_, number, head) in zip(figure.subplots(MAPS, 3, squeeze=False), sorted(heads), strict=False):
        ((query, key, ground_truth),) = samples[number]
        source = make("clusters", count, 3, learned[number])
        pair = Tokens(query, key, ground_truth.query_ptr, ground_truth.key_ptr, bipartite=False)
        predicted = source(pair).graph.to_dense()[head]
        scores = query[head] @ key[head].T * query.size(2) ** -0.5
        left = entmax15(scores.masked_fill(~predicted, -1e9), dim=1) > 0
        titles = (
            "ground truth",
            f"predicted by {count} clusters and a window of 3",
            "1.5-entmax over the predicted edges",
        )
        for axes, mask, title in zip(line, (ground_truth.to_dense()[head], predicted, left), titles, strict=True):
            axes.imshow(mask[:SHOWN, :SHOWN].numpy(), cmap="Greys", interpolation="nearest")
            axes.set_title(f"layer {number}, head {head}: {title}", fontsize="small")
            axes.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
            axes.set_yticks(range(len(names)), names, fontsize=6)
            axes.set(xlabel="key: word that is attended to", ylabel="query: word that attends")
    words = f"the first {len(names)} words of a test sequence, of {MAPS} heads that are neither full nor empty"
    figure.suptitle(f"Edges among {words}")
    save_figure(folder / f"maps-{plan.seed}.png", figure, dpi=80)
    rows = list_words(model, learned, texts, plan, count)
    path = folder / f"words-{plan.seed}.csv"
    path.unlink(missing_ok=True)
    add(path, rows)
    return [folder / f"maps-{plan.seed}.png", path]


def list_words(model: TokenClassifier, learned: Sequence[Learned], texts: Texts, plan: Sweep, count: int) -> list[Row]:
    """The words that each cluster of each head attracts most: those whose share in it is largest next to their share in the text."""
    tokens = texts.test[: plan.test_sequences]
    rows = []
    for number, samples in enumerate(extract(model, tokens, plan.hidden, TESTED, 0, "words")):
        word = torch.cat([hide(part, plan.hidden, at)[0].flatten() for at, part in enumerate(tokens.split(TESTED))])
        counts = torch.bincount(word, minlength=len(texts.vocabulary))
        sides = zip(*(learned[number].projection(query, key) for query, key, _ in samples), strict=True)
        groups = [clusters(torch.cat(side, 1), learned[number].centroids[count])[..., 0] for side in sides]
        for head, cluster in itertools.product(range(len(groups[0])), range(count)):
            row: Row = {"seed": plan.seed, "layer": number, "head": head, "cluster": cluster}
            for name, group in zip(("queries", "keys"), groups, strict=True):
                inside = torch.bincount(word[group[head] == cluster], minlength=len(counts))
                lift = inside / counts.clamp(min=1) * (inside >= min(5, int(inside.max())))
                top = [texts.vocabulary[at] for at in lift.topk(8).indices.tolist() if lift[at] > 0]
                row |= {f"share_{name}": float((group[head] == cluster).double().mean()), name: " ".join(top)}
            rows.append(row)
    return rows
