"""Pictures of attention graphs, each with axes, units and a caption that can be understood alone.

In: graphs, models, densities or the answers of ``analysis``. Out: a matplotlib ``Figure``; nothing is shown or saved,
pyplot and its global state are not touched. Not here: numbers (``analysis``).

A function that takes ``ax`` draws there, and then leaves the caption to whoever owns the figure; in any case it is
``figure.get_label()``. matplotlib, from the ``[analysis]`` extra, is imported when a figure is made.
"""

from __future__ import annotations

import csv
import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..graph import AttentionGraph, check_graph, resolve_index
from ..models import EncoderTrace
from ..ops import checks
from ..ops.values import require_values
from ..ragged import check_tensor
from ..sources.sbm import SBM, check_model
from .conditions import Lemma1, path_probability
from .statistics import blocks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "density_extremes", "plot_blocks", "plot_density", "plot_extremes", "plot_inputs", "plot_lemma1", "plot_mask",
    "plot_pixel_attention",
    "plot_training_density",
]  # fmt: skip

COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6a4c93", "#3d3d3d")
MASK, HEAT = "magma_r", "viridis"
PIXELS = 400  # more cells than this along an axis are averaged, or single edges would vanish between the pixels

Graphs = EncoderTrace | Sequence[AttentionGraph | None]


def plot_mask(
    graph: AttentionGraph, sbm: SBM | None = None, *, sequence: int = 0, head: int = 0, title: str = ""
) -> Figure:
    """One sampled mask, beside its expectation where the model is given.

    The mask costs O(E) time and memory, its expectation O(NM).

    Args:
        graph: Any graph.
        sbm: Model over the same tokens, or blocks of tokens, and heads; or None.
        sequence: Which sequence.
        head: Which head.
        title: What to write above all, e.g. the layer.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The sequence or head does not exist, or the model is over other tokens.

    Example:
        >>> figure = plot_mask(AttentionGraph.from_dense(torch.eye(8)))
        >>> print(figure.get_label()[:62])
        Which query (row) attends to which key (column), head 0, 8 que
    """
    check_graph(graph)
    if sbm is not None:
        check_model(sbm)
        sbm.check(graph.blocks)
    one = _one(graph, sequence, head)
    shape = _shape(one)
    figure = _figure(9.2 if sbm is not None else 5.4, 5.2, title)
    panels = figure.subplots(1, 1 if sbm is None else 2, sharex=True, sharey=True, squeeze=False)[0]
    pictures = [_mask(one)]
    titles = [f"sampled mask: {one.num_edges:,} edges, density {_density(one)}"]
    if sbm is not None:
        p = sbm.edge_prob_dense(sequence)[head].detach().cpu().double()
        rows, columns = graph.sequence(sequence).to("cpu").over_tokens(*(torch.arange(n)[None] for n in p.shape))
        p = p[rows[0]][:, columns[0]]
        chance = (p.tril() if sbm.is_causal else p).numpy()
        pictures.append(_shrink(chance))
        titles.append(f"expectation: {chance.sum():,.0f} edges, density {_percent(chance.mean())}")
    top = max(float(picture.max()) for picture in pictures) or 1.0
    for axes, picture, title in zip(panels, pictures, titles, strict=True):
        image = _picture(axes, picture, shape, cmap=MASK, vmin=0, vmax=top)
        axes.set_title(title, fontsize=10)
    figure.colorbar(
        image, ax=list(panels), label=f"probability of an edge; in a mask, 0 or 1{_cells(shape)}", shrink=0.85
    )
    beside = (
        ""
        if sbm is None
        else " Left, one sample; right, the probability of each edge under the model that it was drawn from."
    )
    return _caption(
        figure,
        f"Which query (row) attends to which key (column), head {head}, "
        f"{shape[0]:,} queries and {shape[1]:,} keys.{beside}",
    )


def plot_density(density: Tensor | EncoderTrace | Mapping[str, Tensor], *, ax: Axes | None = None) -> Figure:
    """Density per layer and head: Figure 5 of Cho et al.

    Args:
        density: ``[L, B, H]`` of L layers, B inputs and H heads, as :attr:`EncoderTrace.density`; or one for each named
            task or model.
        ax: Where to draw.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: A density is not ``[L, B, H]``.
    """
    named = (
        density
        if isinstance(density, Mapping)
        else {"": density.density if isinstance(density, EncoderTrace) else density}
    )
    if not named:
        raise ValueError("Expected 'density' to hold one (got none). Name at least one task or model.")
    for value in named.values():
        check_tensor(value, "density", optional=False)
        require_values(value, "density")
        if value.dim() != 3 or value.numel() == 0:
            raise ValueError(
                f"Expected 'density' to be [L, B, H] (got {list(value.shape)}). `EncoderTrace.density` is."
            )
    figure, axes = _axes(ax, 1.6 + 1.1 * sum(value.size(0) for value in named.values()), 4.2)
    ticks: list[str] = []
    place = 0.0
    for name, value in named.items():
        share = 100 * value.detach().cpu().double()
        first = place
        for layer in range(share.size(0)):
            per_input = share[layer].mean(1)
            spread = float(per_input.std()) if len(per_input) > 1 else 0.0
            axes.bar(place, float(per_input.mean()), 0.72, color=COLOURS[layer % len(COLOURS)], alpha=0.75)
            low = min(spread, float(per_input.mean()))  # a share is never negative
            axes.errorbar(place, float(per_input.mean()), [[low], [spread]], color="0.15", capsize=4, lw=1.2)
            heads = share[layer].mean(0)
            axes.plot(
                np.linspace(place - 0.22, place + 0.22, len(heads)) if len(heads) > 1 else [place],
                heads,
                "D",
                color="white",
                mec="0.15",
                ms=5,
            )
            ticks.append(f"layer {layer}")
            place += 1
        if name:
            axes.text(
                (first + place - 1) / 2,
                1.01,
                name,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize=9,
            )
        place += 0.6
    spots = [float(bar.get_x() + bar.get_width() / 2) for bar in axes.patches]  # type: ignore[attr-defined]
    axes.set_xticks(spots, ticks)
    axes.set_ylim(bottom=0)
    _bare(axes, "", "density of masks (% of query-key pairs)")
    inputs = max(value.size(1) for value in named.values())
    words = (
        f"Density of the sampled masks in each layer. Bars: mean over heads and {inputs:,} inputs; whiskers: "
        "standard deviation over inputs; diamonds: single heads."
    )
    return _caption(figure, words, ax is None)


def density_extremes(density: Tensor | EncoderTrace, count: int = 3) -> tuple[list[int], list[int]]:
    """The inputs of lowest and of highest mean density over layers and heads, ascending.

    Args:
        density: ``[L, B, H]``, or a trace.
        count: Number of each, at least 1; at most half of the inputs are taken.

    Raises:
        TypeError: ``density`` is no tensor or ``count`` no int.
        ValueError: The number is below 1, or a density is not ``[L, B, H]`` or not finite.

    Example:
        >>> density_extremes(torch.tensor([0.2, 0.1, 0.9, 0.5])[None, :, None], 1)
        ([1], [2])
    """
    count = checks.integer("count", count, 1, "It is the number of inputs at each end.")
    density = density.density if isinstance(density, EncoderTrace) else density
    checks.tensors(density=density)
    require_values(density, "density")
    if density.dim() != 3 or density.numel() == 0 or not bool(density.isfinite().all()):
        raise ValueError(
            f"Expected 'density' to be finite, [L, B, H] (got {list(density.shape)}). `EncoderTrace.density` is."
        )
    mean = density.detach().cpu().double().mean((0, 2))
    order = mean.argsort(stable=True).tolist()
    count = min(count, max(len(order) // 2, 1))
    return order[:count], order[-count:]


def plot_pixel_attention(
    graphs: Graphs,
    images: Tensor,
    *,
    sequences: Sequence[int] | None = None,
    titles: Sequence[str] | None = None,
    notes: str = "",
) -> Figure:
    """How much attention each pixel of an image gets, per layer and head: Figures 7 and 8 of Cho et al.

    Args:
        graphs: A trace, or the graph of each layer; None (full attention) is left out. Tokens are pixels, row by row.
        images: ``[B, height, width]``, one for each sequence of the graphs.
        sequences: Which sequences to draw, in this order; the first four if None.
        titles: What to write above each image drawn, e.g. its label.
        notes: More for the caption.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There is no graph, or pixels and tokens differ in number.
    """
    layers = _layers(graphs)
    checks.tensors(images=images)
    chosen, titles = _chosen(layers, sequences, titles)
    if images.dim() != 3 or len(images) != layers[0][1].num_sequences:
        raise ValueError(
            f"Expected 'images' to be [{layers[0][1].num_sequences}, height, width], one for each sequence "
            f"(got {list(images.shape)}). Turn colours into grey first."
        )
    height, width = images.shape[1:]
    columns = []  # per layer and head: title, and a map for each image with its density
    for number, graph in layers:
        parts = [graph.sequence(sequence).to("cpu") for sequence in chosen]
        if any(part.num_keys != height * width for part in parts):
            raise ValueError(
                f"Expected 'graphs' with as many tokens as 'images' have pixels, {height} x {width} "
                f"(got {[part.num_keys for part in parts]}). Drop special tokens from the graph first."
            )
        for head in range(graph.heads):
            maps = []
            for part in parts:
                read = torch.bincount(part.head(head).col.long(), minlength=part.num_keys)
                maps.append((100 * read.cpu().double() / part.num_queries).view(height, width).numpy())
            columns.append((f"layer {number}, head {head}", maps))
    figure = _figure(1.9 * (1 + len(columns)), 1.95 * len(chosen) + 1.2)
    panels = figure.subplots(len(chosen), 1 + len(columns), squeeze=False)
    for row, sequence in enumerate(chosen):
        axes = panels[row, 0]
        grey = axes.imshow(
            images[sequence].detach().cpu().double().numpy(),
            cmap="gray",
            interpolation="nearest",
            vmin=float(images.min()),
            vmax=float(images.max()),
        )
        axes.set_title(titles[row] if titles is not None else f"input {sequence}", fontsize=9)
        axes.set_ylabel("row (pixels)", fontsize=8)
    figure.colorbar(grey, ax=panels[:, 0].tolist(), location="bottom", label="intensity", shrink=0.9, pad=0.03)
    for column, (name, maps) in enumerate(columns, 1):
        top = max(float(values.max()) for values in maps) or 1.0
        for row, values in enumerate(maps):
            heat = panels[row, column].imshow(values, cmap=HEAT, vmin=0, vmax=top, interpolation="nearest")
            above = f"{name}\n" if row == 0 else ""
            panels[row, column].set_title(f"{above}density {_percent(values.mean() / 100)}", fontsize=9)
        figure.colorbar(
            heat,
            ax=panels[:, column].tolist(),
            location="bottom",
            label="% of pixels\nthat attend here",
            shrink=0.9,
            pad=0.03,
        )
    for axes in panels.flat:
        axes.tick_params(labelsize=6, length=2)
        axes.label_outer()
    for axes in panels[-1]:
        axes.set_xlabel("column (pixels)", fontsize=8)
    words = (
        "Attention that each pixel gets. First column: the image. "
        "Other columns: one layer and head each; the colour of a pixel says what share of all pixels attend to it "
        "(own scale for each column), the number above is the mean, which is the density of the mask."
    )
    return _caption(figure, f"{words} {notes}".strip())


def plot_inputs(
    graphs: Graphs, *, sequences: Sequence[int] | None = None, titles: Sequence[str] | None = None, notes: str = ""
) -> Figure:
    """The masks of single inputs, one row for each and one column for each layer and head.

    Args:
        graphs, sequences, titles, notes: As in :func:`plot_pixel_attention`; titles stand beside the rows.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There is no graph.
    """
    layers = _layers(graphs)
    chosen, titles = _chosen(layers, sequences, titles)
    columns = [(number, head, graph) for number, graph in layers for head in range(graph.heads)]
    figure = _figure(2.3 * len(columns) + 1.2, 2.35 * len(chosen) + 1.0)
    panels = figure.subplots(len(chosen), len(columns), squeeze=False)
    for row, sequence in enumerate(chosen):
        for column, (number, head, graph) in enumerate(columns):
            one = _one(graph, sequence, head)
            axes = panels[row, column]
            heat = _picture(axes, _mask(one), _shape(one), cmap=MASK, vmin=0, vmax=1)
            name = f"layer {number}, head {head}\n" if row == 0 else ""
            axes.set_title(f"{name}density {_density(one)}", fontsize=9)
            axes.tick_params(labelsize=6, length=2)
            beside = titles[row] if titles is not None else f"input {sequence}"
            axes.set_xlabel("key (token)" if row == len(chosen) - 1 else "", fontsize=8)
            axes.set_ylabel(f"{beside}\nquery (token)" if column == 0 else "", fontsize=8)
    figure.colorbar(
        heat, ax=panels.ravel().tolist(), label="edge, 0 or 1 (a share, where many tokens share a pixel)", shrink=0.6
    )
    return _caption(
        figure, f"Which query (row) attends to which key (column): sampled masks of single inputs. {notes}".strip()
    )


def plot_extremes(
    graphs: Graphs, images: Tensor | None = None, *, count: int = 2, titles: Sequence[str] | None = None
) -> Figure:
    """Inputs to which a model gives its sparsest and its densest attention.

    Args:
        graphs: A trace, or the graph of each layer; None is left out.
        images: ``[B, height, width]`` if the inputs are images; attention is then drawn per pixel, else as masks.
        count: Inputs of lowest and of highest density, each, at least 1.
        titles: What to write at each input of the batch, ``[B]``, e.g. its label.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: As :func:`plot_pixel_attention` and :func:`density_extremes`.
    """
    layers = _layers(graphs)
    low, high = density_extremes(torch.stack([graph.density.mean(1, keepdim=True) for _, graph in layers]), count)
    titles = _chosen(layers, range(layers[0][1].num_sequences), titles)[1]
    chosen = low + [sequence for sequence in high if sequence not in low]
    words = (
        f"Rows: the {len(low)} inputs of lowest and the {len(chosen) - len(low)} of highest mean density among "
        f"{layers[0][1].num_sequences:,}."
    )
    beside = [titles[sequence] if titles is not None else f"input {sequence}" for sequence in chosen]
    if images is None:
        return plot_inputs(graphs, sequences=chosen, titles=beside, notes=words)
    return plot_pixel_attention(graphs, images, sequences=chosen, titles=beside, notes=words)


def plot_blocks(graph: AttentionGraph, sbm: SBM, *, sequence: int = 0, head: int = 0, title: str = "") -> Figure:
    """The blocks of a model: the mask as it stands, the mask with tokens sorted by block, and the block matrix.

    Costs O(E) time and memory.

    Args:
        graph: Any graph.
        sbm: Model over the same tokens, or blocks of tokens, and heads; a token belongs to the block of the model in
            which its membership is largest.
        sequence: Which sequence.
        head: Which head.
        title: What to write above all, e.g. the layer.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The sequence or head does not exist, or the model is over other tokens.
    """
    check_graph(graph)
    check_model(sbm)
    sbm.check(graph.blocks)
    one = _one(graph, sequence, head)
    shape = _shape(one)
    parts = [slice(*[*pairwise(ptr.tolist())][sequence]) for ptr in (graph.query_ptr, graph.key_ptr)]
    largest = sbm.query_membership.detach().amax(-1), sbm.key_membership.detach().amax(-1)
    sides, strength = (
        [x[head, part].cpu().numpy() for x, part in zip(graph.over_tokens(*pair), parts, strict=True)]
        for pair in (blocks_of(sbm), largest)
    )
    orders = [np.lexsort((-weight, block)) for weight, block in zip(strength, sides, strict=True)]
    used = [np.unique(block) for block in sides]
    figure = _figure(13.2, 4.9, title)
    left, middle, right = figure.subplots(1, 3)
    shown, ordered = _mask(one), _mask(one, orders)
    top = max(float(shown.max()), float(ordered.max())) or 1.0
    _picture(left, shown, shape, cmap=MASK, vmin=0, vmax=top)
    left.set_title(f"as the tokens stand: density {_density(one)}", fontsize=10)
    heat = _picture(middle, ordered, shape, cmap=MASK, vmin=0, vmax=top)
    for draw, block in ((middle.axhline, sides[0]), (middle.axvline, sides[1])):
        for end in np.bincount(block).cumsum()[:-1]:
            draw(end - 0.5, color="#1b6ca8", lw=0.5, alpha=0.7)
    middle.set_title(f"sorted by block: {len(used[0])} of queries, {len(used[1])} of keys", fontsize=10)
    middle.set(xlabel="key (token, sorted by block)", ylabel="query (token, sorted by block)")
    figure.colorbar(heat, ax=[left, middle], label=f"edge, 0 or 1{_cells(shape)}", shrink=0.8)
    block = sbm.block_matrix[head].detach().cpu().double().numpy()[np.ix_(*used)]
    low, high = float(block.min()), float(block.max())
    matrix = right.imshow(
        block, cmap=HEAT, interpolation="nearest", aspect="auto", vmin=low if low < high else 0.0, vmax=high or 1.0
    )
    right.set_box_aspect(1)
    for axis, side in ((right.yaxis, used[0]), (right.xaxis, used[1])):
        spots = np.unique(np.linspace(0, len(side) - 1, min(len(side), 12)).round().astype(int))
        axis.set_ticks(spots, [str(side[spot]) for spot in spots])
    right.set(xlabel="key block", ylabel="query block")
    right.set_title(f"block matrix S, {sbm.num_blocks} blocks, those in use", fontsize=10)
    figure.colorbar(
        matrix, ax=right, label=f"weight between two blocks\n(colours span {low:.4g} to {high:.4g})", shrink=0.8
    )
    words = (
        f"Blocks of head {head}: a token belongs to the block in which its membership is largest "
        "(lines separate blocks; within a block the surest tokens come first). "
        "If the blocks explained the mask, the middle panel would be a patchwork of even tones, "
        "those of the block matrix on the right, whose colours go from its least to its largest weight."
    )
    return _caption(figure, words)


def plot_training_density(log: str | Path | Sequence[Mapping[str, float]], *, ax: Axes | None = None) -> Figure:
    """Density of each layer and head over the course of training.

    Args:
        log: A CSV file with a column ``step`` and columns ``density_layer0_head0``, ..., as ``examples/lra.py`` writes;
            or its rows.
        ax: Where to draw.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: A column is missing.
    """
    if isinstance(log, str | Path):
        if not Path(log).is_file():
            raise ValueError(
                f"Expected 'log' to be a CSV file (got {str(log)!r}, which is none). "
                "`examples/lra.py` writes train.csv and val.csv."
            )
        with open(log, newline="") as file:
            read: list[dict[str, Any]] = list(csv.DictReader(file))
        # a killed run may leave half a row
        rows: list[Mapping[str, Any]] = [row for row in read if None not in row.values()]
    elif not isinstance(log, str) and isinstance(log, Sequence) and all(isinstance(row, Mapping) for row in log):
        rows = [row for row in log if isinstance(row, Mapping)]
    else:
        raise TypeError(
            f"Expected 'log' to be a file or its rows (got {type(log).__name__}). "
            "Rows are mappings from columns to numbers."
        )
    names = sorted(
        (int(match[1]), int(match[2]), name)
        for name in (rows[0] if rows else ())
        if (match := re.fullmatch(r"density_layer(\d+)_head(\d+)", name))
    )
    if not names or "step" not in rows[0]:
        raise ValueError(
            "Expected 'log' with columns 'step' and 'density_layer0_head0', ... "
            f"(got {list(rows[0]) if rows else 'no rows'}). `examples/lra.py` writes train.csv and val.csv."
        )
    figure, axes = _axes(ax, 7.2, 4.4)
    steps = [float(row["step"]) for row in rows]
    for layer, head, name in names:
        values = [100 * float(row[name]) for row in rows]
        style = ("-", "--", ":", "-.")[head % 4]
        axes.plot(
            steps, values, style, color=COLOURS[layer % len(COLOURS)], lw=1.4, label=f"layer {layer}, head {head}"
        )
    axes.set_ylim(bottom=0)
    _bare(axes, "optimiser step", "density of masks (% of query-key pairs)")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    words = (
        "Density of the sampled masks over the course of training: colours are layers, line styles heads; "
        "each point is a mean over inputs."
    )
    return _caption(figure, words, ax is None)


def plot_lemma1(result: Lemma1, *, ax: Axes | None = None) -> Figure:
    """Expected number of Hamiltonian cycles in G(n, p), beside the probability of a Hamiltonian path.

    Args:
        result: From :func:`sbm_pyg.analysis.lemma1`.
        ax: Where to draw the probabilities; the expectation gets an axis on its right.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if not isinstance(result, Lemma1):
        raise TypeError(f"Expected 'result' to be a Lemma1 (got {type(result).__name__}). `analysis.lemma1` makes one.")
    figure, axes = _axes(ax, 7.6, 4.8)
    p = result.probabilities
    low, high = result.interval
    smooth = np.linspace(float(p.min()), float(p.max()), 200)
    axes.plot(smooth, path_probability(result.n, smooth), color=COLOURS[0], lw=1.2, label="path, limit for large n")
    bars = np.maximum([result.share - low, high - result.share], 0)
    axes.errorbar(
        p,
        result.share,
        bars,
        fmt="o",
        color=COLOURS[0],
        ms=4.5,
        capsize=3,
        label=f"path, share of {result.samples:,} graphs",
    )
    axes.axvline(result.lemma, color=COLOURS[1], lw=1, ls=":")
    axes.annotate(
        "p of the lemma", (result.lemma, 0.62), rotation=90, ha="right", va="center", fontsize=8, color=COLOURS[1]
    )
    axes.axvline(np.log(result.n) / result.n, color=COLOURS[0], lw=1, ls=":")
    axes.annotate(
        "ln n / n",
        (np.log(result.n) / result.n, 0.9),
        rotation=90,
        ha="right",
        va="center",
        fontsize=8,
        color=COLOURS[0],
    )
    axes.set_ylim(-0.03, 1.03)
    _bare(axes, f"edge probability p of G({result.n}, p)", "probability of a Hamiltonian path")
    right = axes.twinx()
    right.plot(p, result.log10_cycles, "s--", color=COLOURS[1], ms=4, lw=1.2, label="cycles, expected number")
    right.axhline(0, color=COLOURS[1], lw=0.7)
    right.set_ylabel("expected number of Hamiltonian cycles\n(decimal logarithm; line: one cycle)", color=COLOURS[1])
    right.spines[["top"]].set_visible(False)
    lines = [part for each in (axes, right) for part in each.get_legend_handles_labels()[0]]
    axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False, fontsize=8, loc="center right")
    at = float(path_probability(result.n, result.lemma))
    words = (
        f"Random directed graphs of {result.n} tokens. At the p of Lemma 1 one expects at least one Hamiltonian cycle "
        f"(red), yet in the limit {_percent(at)} of the graphs have as much as a path (blue; bars: 95 % intervals): "
        "the expectation is carried by rare graphs with very many cycles."
    )
    return _caption(figure, words, ax is None)


# --------------------------------------------------------------------------------------------------------------- parts


def _chosen(
    layers: list[tuple[int, AttentionGraph]], sequences: Sequence[int] | None, titles: Sequence[str] | None
) -> tuple[list[int], Sequence[str] | None]:
    """The sequences to draw, the first four if None, and a title for each or None."""
    there = layers[0][1].num_sequences
    if sequences is not None and (
        not isinstance(sequences, Sequence) or isinstance(sequences, str) or len(sequences) == 0
    ):
        raise TypeError(
            f"Expected 'sequences' to be a list of numbers, not empty (got {sequences!r}). None draws the first four."
        )
    chosen = (
        [*range(min(4, there))]
        if sequences is None
        else [resolve_index(number, there, "sequences") for number in sequences]
    )
    if titles is not None and (not isinstance(titles, Sequence) or len(titles) < len(chosen)):
        raise TypeError(
            f"Expected 'titles' to be {len(chosen)} texts, one for each input that is drawn (got {titles!r})."
        )
    return chosen, titles


def _figure(width: float, height: float, title: str = "") -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            f"Expected 'matplotlib' to be installed (it is not). Run {checks.install('analysis')}."
        ) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _axes(ax: Axes | None, width: float, height: float) -> tuple[Figure, Axes]:
    if ax is None:
        figure = _figure(width, height)
        return figure, figure.subplots()
    if not hasattr(ax, "get_figure") or isinstance(ax, type):
        raise TypeError(
            f"Expected 'ax' to be axes of matplotlib (got {type(ax).__name__}). `figure.subplots()` makes some."
        )
    owner = ax.get_figure(root=True)
    if owner is None:
        raise ValueError(
            "Expected 'ax' to belong to a figure (got one that was removed). Make it with `figure.subplots()`."
        )
    return owner, ax


def _caption(figure: Figure, words: str, draw: bool = True) -> Figure:
    figure.set_label(words)
    if draw:
        lines = textwrap.fill(words, int(14.5 * figure.get_figwidth()))
        figure.supxlabel(lines, x=0.01, ha="left", fontsize=8.5, color="0.25")
    return figure


def _bare(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel=xlabel, ylabel=ylabel)


def _picture(axes: Axes, picture: np.ndarray, shape: tuple[int, ...], **options: Any) -> Any:
    """A matrix of queries and keys, in units of tokens whatever its cells."""
    from matplotlib.ticker import MaxNLocator

    image = axes.imshow(
        picture, interpolation="nearest", extent=(-0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5), **options
    )
    axes.set(xlabel="key (token)", ylabel="query (token)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(7, integer=True))
    return image


def _one(graph: AttentionGraph, sequence: int, head: int) -> AttentionGraph:
    """One sequence and head on the CPU."""
    require_values(graph.col, "graph")
    return graph.head(head).sequence(sequence).to("cpu")


def _shape(graph: AttentionGraph) -> tuple[int, int]:
    return graph.num_queries, graph.num_keys


def _cell(shape: tuple[int, ...]) -> int:
    """The side of a square cell with which at most ``PIXELS`` are left along each axis."""
    return -(-max(shape) // PIXELS)


def _mask(graph: AttentionGraph, orders: Sequence[np.ndarray] | None = None) -> np.ndarray:
    """Share of the pairs in each cell that are edges, with queries and keys in those orders."""
    key, query = graph.edge_index.numpy()
    if orders is not None:
        query, key = orders[0].argsort()[query], orders[1].argsort()[key]
    shape = _shape(graph)
    cell = _cell(shape)
    rows, columns = (-(-size // cell) for size in shape)
    edges = np.bincount(query // cell * columns + key // cell, minlength=rows * columns).reshape(rows, columns)
    return _mean(edges, shape)


def _shrink(matrix: np.ndarray) -> np.ndarray:
    """Means over the same cells of a dense matrix."""
    rows, columns = (np.arange(0, size, _cell(matrix.shape)) for size in matrix.shape)
    return _mean(np.add.reduceat(np.add.reduceat(matrix, rows, axis=0), columns, axis=1), matrix.shape)


def _mean(sums: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sums over cells divided by the pairs in them; the last of a row or column may have fewer."""
    cell = _cell(shape)
    rows, columns = (np.minimum(size - np.arange(0, size, cell), cell) for size in shape)
    return sums / np.outer(rows, columns)


def _density(graph: AttentionGraph) -> str:
    return _percent(graph.num_edges / (graph.num_queries * graph.num_keys))


def _cells(shape: tuple[int, ...]) -> str:
    cell = _cell(shape)
    return "" if cell == 1 else f"\n(mean over cells of {cell} x {cell} pairs)"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _layers(graphs: Graphs) -> list[tuple[int, AttentionGraph]]:
    found = graphs.graphs if isinstance(graphs, EncoderTrace) else graphs
    if not isinstance(found, Sequence) or not all(
        graph is None or isinstance(graph, AttentionGraph) for graph in found
    ):
        raise TypeError(
            f"Expected 'graphs' to be a trace, or the graph or None of each layer (got {type(graphs).__name__})."
        )
    layers = [(number, graph) for number, graph in enumerate(found) if graph is not None]
    if not layers:
        raise ValueError(
            "Expected 'graphs' to hold the graph of a layer (got none). Full attention has no graph to draw."
        )
    counts = [graph.num_sequences for _, graph in layers]
    if len({*counts}) > 1:
        raise ValueError(
            f"Expected 'graphs' of the same sequences (got {counts} in the layers). They are those of one batch."
        )
    return layers
