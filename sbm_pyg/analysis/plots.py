"""Figures of attention graphs, with axes, units and a caption.

In: graphs, models, densities, or losses of training. Out: a matplotlib ``Figure``; nothing is shown or saved, and
pyplot's global state does not change. Not here: numbers (``analysis``).

A function with ``ax`` draws into these axes and adds no caption to the figure; the caption is always
``figure.get_label()``. Figures need matplotlib, from the ``[analysis]`` extra, and raise ImportError without it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..graphs.graph import AttentionGraph, check_graph
from ..graphs.ragged import count_pairs
from ..models.encoder import EncoderTrace
from ..ops import checks
from ..ops.values import require_values
from ..sources.sbm import SBM, check_model
from ..training.sparsifier import Loss
from .heads import HeadTable
from .statistics import communities_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "plot_communities", "plot_density", "plot_heads", "plot_losses", "plot_mask",
]  # fmt: skip

COLORS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6a4c93", "#3d3d3d")
MASK, HEAT = "magma_r", "viridis"
PIXELS = 400  # cells along an axis; more tokens are averaged, so that single edges stay visible

DENSITY = "density of masks (% of query-key pairs)"
OF_HEADS = {
    "kept": "dense attention that lies on edges (%)",
    "possible": "dense attention on the best edges, as many (%)",
    "density": "density of graphs (% of query-key pairs)",
    "error": "error of the output, over its norm",
}
"""Numbers of a head, and what they are."""


def plot_mask(
    graph: AttentionGraph, sbm: SBM | None = None, *, sequence: int = 0, head: int = 0, title: str = ""
) -> Figure:
    """A sampled mask, next to its expectation if a model is given.

    The mask costs O(E) time and memory, its expectation O(NM).

    Args:
        graph: Any graph.
        sbm: Model over the same tokens, or blocks of tokens, and heads; or None.
        sequence, head: Numbers of the sequence and of the head.
        title: Title of the figure, e.g. the layer.

    Raises:
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
        p = sbm.edge_prob_dense(sequence)[head].detach().cpu().double().clamp(max=1)  # more with a target density
        rows, columns = graph.sequence(sequence).to("cpu").over_tokens(*(torch.arange(n)[None] for n in p.shape))
        p = p[rows[0]][:, columns[0]]
        chance = (p.tril() if sbm.is_causal else p).numpy()
        pictures.append(_shrink(chance))
        share = _percent(chance.sum() / int(count_pairs(one.query_ptr, one.key_ptr, sbm.is_causal)))
        titles.append(f"expectation: {chance.sum():,.0f} edges, density {share}")
    has_scale = sbm is not None or _cell_size(shape) > 1
    top = (max(float(picture.max()) for picture in pictures) if has_scale else 1) or 1.0
    for axes, picture, title in zip(panels, pictures, titles, strict=True):
        image = _picture(axes, picture, shape, cmap=MASK if has_scale else "Blues", vmin=0, vmax=top)
        axes.set_title(title, fontsize=10)
    if has_scale:
        label = f"probability of an edge; in a mask, 0 or 1{_cells(shape)}"
        figure.colorbar(image, ax=list(panels), label=label, shrink=0.85)
    words = f"Which query (row) attends to which key (column), head {head}, {shape[0]:,} queries and {shape[1]:,} keys."
    if sbm is not None:
        words += " Left: one sample; right: the probability of each edge under the model."
    return _caption(figure, words)


def plot_density(density: Tensor | EncoderTrace | Mapping[str, Tensor], *, ax: Axes | None = None) -> Figure:
    """Density per layer and head: Figure 5 of Cho et al.

    Args:
        density: ``[L, B, H]`` of L layers, B inputs and H heads, as :attr:`EncoderTrace.density`; or a dict from the
            name of a task or model to such a tensor.
        ax: Axes to draw on.

    Raises:
        ValueError: A density is not ``[L, B, H]``.
    """
    densities = density if isinstance(density, Mapping) else {"": density}
    checks.require(densities, "density", "to hold one", "none", "Name at least one task or model.")
    named = {name: 100 * _density_of(value) for name, value in densities.items()}
    figure, axes = _axes(ax, 1.6 + 1.1 * sum(value.size(0) for value in named.values()), 4.2)
    at, ticks = 0.0, {}
    for name, value in named.items():
        first = at
        for layer, (per_input, heads) in enumerate(zip(value.mean(2), value.mean(1), strict=True)):
            mean = float(per_input.mean())
            deviation = float(per_input.std()) if len(per_input) > 1 else 0.0
            axes.bar(at, mean, 0.72, color=COLORS[layer % len(COLORS)], alpha=0.75)
            whiskers = [[min(deviation, mean)], [deviation]]  # a density is not negative
            axes.errorbar(at, mean, whiskers, color="0.15", capsize=4, lw=1.2)
            across = np.linspace(at - 0.22, at + 0.22, len(heads)) if len(heads) > 1 else [at]
            axes.plot(across, heads, "D", color="white", mec="0.15", ms=5)
            ticks[at] = f"layer {layer}"
            at += 1
        if name:
            top = axes.get_xaxis_transform()
            axes.text((first + at - 1) / 2, 1.01, name, transform=top, ha="center", va="bottom", fontsize=9)
        at += 0.6
    axes.set_xticks([*ticks], [*ticks.values()])
    axes.set_ylim(bottom=0)
    _label(axes, "", DENSITY)
    inputs = max(value.size(1) for value in named.values())
    words = (
        f"Density of the sampled masks in each layer. Bars: mean over heads and {inputs:,} inputs; whiskers: "
        "standard deviation over inputs; diamonds: single heads."
    )
    return _caption(figure, words, ax is None)


def plot_communities(graph: AttentionGraph, sbm: SBM, *, sequence: int = 0, head: int = 0, title: str = "") -> Figure:
    """The communities of a model: the mask, the mask with tokens sorted by community, and the block matrix.

    Costs O(E) time and memory.

    Args:
        graph: Any graph.
        sbm: Model over the same tokens, or blocks of tokens, and heads; the community of a token is that of its largest
            membership.
        sequence, head: Numbers of the sequence and of the head.
        title: Title of the figure, e.g. the layer.

    Raises:
        ValueError: The sequence or head does not exist, or the model is over other tokens.
    """
    check_graph(graph)
    check_model(sbm)
    sbm.check(graph.blocks)
    one = _one(graph, sequence, head)
    shape = _shape(one)
    ranges = [slice(*[*pairwise(ptr.tolist())][sequence]) for ptr in (graph.query_ptr, graph.key_ptr)]
    largest = [x.detach().amax(-1).float() for x in (sbm.query_membership, sbm.key_membership)]  # numpy has no bfloat16
    labels, strength = (
        [x[head, tokens].cpu().numpy() for x, tokens in zip(graph.over_tokens(*pair), ranges, strict=True)]
        for pair in (communities_of(sbm), largest)
    )
    orders = [np.lexsort((-weight, label)) for weight, label in zip(strength, labels, strict=True)]
    used = [np.unique(label) for label in labels]
    figure = _figure(13.2, 4.9, title)
    mask_axes, sorted_axes, block_axes = figure.subplots(1, 3)
    shown, ordered = _mask(one), _mask(one, orders)
    top = max(float(shown.max()), float(ordered.max())) or 1.0
    _picture(mask_axes, shown, shape, cmap=MASK, vmin=0, vmax=top)
    mask_axes.set_title(f"in the order of the tokens: density {_density(one)}", fontsize=10)
    heat = _picture(sorted_axes, ordered, shape, cmap=MASK, vmin=0, vmax=top)
    for draw, label in ((sorted_axes.axhline, labels[0]), (sorted_axes.axvline, labels[1])):
        for end in np.bincount(label).cumsum()[:-1]:
            draw(end - 0.5, color=COLORS[0], lw=0.5, alpha=0.7)
    sorted_axes.set_title(f"sorted by community: {len(used[0])} of queries, {len(used[1])} of keys", fontsize=10)
    sorted_axes.set(xlabel="key (token, sorted by community)", ylabel="query (token, sorted by community)")
    figure.colorbar(heat, ax=[mask_axes, sorted_axes], label=f"edge, 0 or 1{_cells(shape)}", shrink=0.8)
    block = sbm.block_matrix[head].detach().cpu().double().numpy()[np.ix_(*used)]
    low, high = float(block.min()), float(block.max())
    limits: dict[str, Any] = {"vmin": low if low < high else 0.0, "vmax": high or 1.0}
    matrix = block_axes.imshow(block, cmap=HEAT, interpolation="nearest", aspect="auto", **limits)
    block_axes.set_box_aspect(1)
    for axis, numbers in ((block_axes.yaxis, used[0]), (block_axes.xaxis, used[1])):
        spots = np.unique(np.linspace(0, len(numbers) - 1, min(len(numbers), 12)).round().astype(int))
        axis.set_ticks(spots, [str(numbers[spot]) for spot in spots])
    block_axes.set(xlabel="community of keys", ylabel="community of queries")
    block_axes.set_title(f"block matrix S, {sbm.num_clusters} communities, those in use", fontsize=10)
    span = f"weight between two communities\n(colors span {low:.4g} to {high:.4g})"
    figure.colorbar(matrix, ax=block_axes, label=span, shrink=0.8)
    words = (
        f"Communities of head {head}: the community of a token is that of its largest membership (lines separate "
        "communities; within each, tokens are sorted by membership). If the communities explained the mask, the middle "
        "panel would have even tones, those of the block matrix on the right, whose colors span its weights."
    )
    return _caption(figure, words)


def plot_heads(table: HeadTable, number: str = "kept", *, ax: Axes | None = None) -> Figure:
    """One measure of each head of a model: a row for each layer, a column for each head.

    Args:
        table: Table of :func:`~sbm_pyg.analysis.compare_heads`, after calls of the model.
        number: ``"kept"``, ``"possible"``, ``"density"`` or ``"error"`` of a :class:`~sbm_pyg.analysis.Head`.
        ax: Axes to draw on.

    Raises:
        TypeError, ValueError: ``table`` is no table or empty, or ``number`` is unknown.

    Example:
        >>> from sbm_pyg import SBMAttentionConv, analysis
        >>> conv = SBMAttentionConv(16, 8, heads=2, num_clusters=4, target_density=0.25)
        >>> with analysis.compare_heads(conv) as table:
        ...     out = conv(torch.randn(40, 16), seed=0)
        >>> print(plot_heads(table).get_label()[:48])
        Dense attention that lies on edges (%), in 1 lay
    """
    checks.kind("table", table, HeadTable, "a HeadTable", "`analysis.compare_heads` makes one.")
    checks.one_of("number", number, tuple(OF_HEADS))
    heads = table.heads
    checks.require(heads, "table", "to have heads", "none", "Call the model inside `compare_heads`.")
    layers = {name: row for row, name in enumerate(dict.fromkeys(head.layer for head in heads))}
    picture = np.full((len(layers), 1 + max(head.head for head in heads)), np.nan)
    for head in heads:
        picture[layers[head.layer], head.head] = getattr(head, number) * (1 if number == "error" else 100)
    width, height = (1.5 + 0.35 * max(6, size) for size in picture.shape[::-1])
    figure, axes = _axes(ax, 1.3 + width, height)
    image = _picture(axes, picture, picture.shape, cmap=HEAT, vmin=0, vmax=None if number == "error" else 100)
    axes.set(xlabel="head", ylabel="layer", aspect="auto")
    figure.colorbar(image, ax=axes, label=OF_HEADS[number])
    first, last = (list(layers)[end] or "the model" for end in (0, -1))
    words = f"{OF_HEADS[number].capitalize()}, in {len(layers)} layers from {first} to {last}. White: no such head."
    return _caption(figure, words, ax is None)


def plot_losses(history: Sequence[Loss], *, ax: Axes | None = None) -> Figure:
    """Running losses during training, with dense attention and at the target density.

    Args:
        history: The ``history`` of a :class:`~sbm_pyg.Sparsifier`.
        ax: Axes to draw on.

    Raises:
        TypeError, ValueError: ``history`` does not consist of losses, or is empty.

    Example:
        >>> from sbm_pyg import SBMAttentionConv, Sparsifier
        >>> sparsifier = Sparsifier(SBMAttentionConv(8, 4, num_clusters=4), 0.1, total_steps=100)
        >>> for step in range(100):
        ...     density = sparsifier.step(1 / (step + 1))
        >>> print(plot_losses(sparsifier.history).get_label()[:57])
        Running losses of training with dense attention, and at t
    """
    if not isinstance(history, Sequence) or not all(isinstance(loss, Loss) for loss in history):
        raise TypeError("Expected 'history' to be a list of losses (got another type). `Sparsifier.history` is one.")
    checks.require(history, "history", "to hold losses", "none", "It has one after the first trial step.")
    figure, axes = _axes(ax, 7.2, 4.4)
    change = next((at for at, loss in enumerate(history) if loss.is_sparse), len(history))
    dense = history[: change + 1]
    axes.plot([loss.step for loss in dense], [loss.dense for loss in dense], color=COLORS[0], label="dense attention")
    for part, style, label in ((dense, "--", "target density, trial steps"), (history[change:], "-", "target density")):
        if part:
            steps, losses = [loss.step for loss in part], [loss.sparse for loss in part]
            axes.plot(steps, losses, color=COLORS[1], ls=style, label=label)
    if change < len(history):
        axes.axvline(history[change].step, color="0.6", lw=1, ls=":")
    _label(axes, "optimizer step", "running loss of training")
    axes.legend(frameon=False, fontsize=8)
    words = (
        "Running losses of training with dense attention, and at the target density: of trial steps, and after the "
        "dotted line of all steps."
    )
    return _caption(figure, words, ax is None)


# --------------------------------------------------------------------------------------------------------------- parts


def _density_of(density: Any) -> Tensor:
    """A density ``[L, B, H]``, or that of a trace, in float64 on the CPU."""
    density = density.density if isinstance(density, EncoderTrace) else density
    checks.tensors(density=density)
    require_values(density, "density")
    if density.dim() != 3 or density.numel() == 0:
        raise ValueError(f"Expected 'density' to be [L, B, H] (got {list(density.shape)}). `EncoderTrace.density` is.")
    return density.detach().cpu().double()


def _figure(width: float, height: float, title: str = "") -> Figure:
    figure = checks.imported("matplotlib.figure", "analysis").Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _axes(ax: Axes | None, width: float, height: float) -> tuple[Figure, Axes]:
    if ax is None:
        figure = _figure(width, height)
        return figure, figure.subplots()
    if not hasattr(ax, "get_figure") or isinstance(ax, type):
        raise TypeError(f"Expected 'ax' to be axes of matplotlib (got {type(ax).__name__}). Call `figure.subplots()`.")
    owner: Any = ax.get_figure(root=True)
    way_out = "Make it with `figure.subplots()`."
    checks.require(owner is not None, "ax", "to belong to a figure", "one that was removed", way_out)
    return owner, ax


def _caption(figure: Figure, words: str, draw: bool = True) -> Figure:
    figure.set_label(words)
    if draw:
        lines = textwrap.fill(words, int(14.5 * figure.get_figwidth()))
        figure.supxlabel(lines, x=0.01, ha="left", fontsize=8.5, color="0.25")
    return figure


def _label(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel=xlabel, ylabel=ylabel)


def _picture(axes: Axes, picture: np.ndarray, shape: tuple[int, ...], **options: Any) -> Any:
    """Draw a matrix of queries and keys, with axes in tokens."""
    from matplotlib.ticker import MaxNLocator

    ends = (-0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5)
    image = axes.imshow(picture, interpolation="nearest", extent=ends, **options)
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


def _cell_size(shape: tuple[int, ...]) -> int:
    """Side, in tokens, of the squares of a picture with at most ``PIXELS`` squares per axis."""
    return -(-max(shape) // PIXELS)


def _mask(graph: AttentionGraph, orders: Sequence[np.ndarray] | None = None) -> np.ndarray:
    """Fraction of the pairs in each square of the picture that are edges, with queries and keys in these orders."""
    key, query = graph.edge_index.numpy()
    if orders is not None:
        query, key = orders[0].argsort()[query], orders[1].argsort()[key]
    shape = _shape(graph)
    cell = _cell_size(shape)
    rows, columns = (-(-size // cell) for size in shape)
    edges = np.bincount(query // cell * columns + key // cell, minlength=rows * columns).reshape(rows, columns)
    return _mean(edges, shape)


def _shrink(matrix: np.ndarray) -> np.ndarray:
    """Means of a dense matrix over the squares of the picture."""
    rows, columns = (np.arange(0, size, _cell_size(matrix.shape)) for size in matrix.shape)
    return _mean(np.add.reduceat(np.add.reduceat(matrix, rows, axis=0), columns, axis=1), matrix.shape)


def _mean(sums: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sums over squares, divided by the number of pairs in each; the last squares of an axis may be smaller."""
    cell = _cell_size(shape)
    rows, columns = (np.minimum(size - np.arange(0, size, cell), cell) for size in shape)
    return sums / np.outer(rows, columns)


def _density(graph: AttentionGraph) -> str:
    """The density of a graph of one sequence and head."""
    return _percent(float(graph.density))


def _cells(shape: tuple[int, ...]) -> str:
    cell = _cell_size(shape)
    return "" if cell == 1 else f"\n(mean over cells of {cell} x {cell} pairs)"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"
