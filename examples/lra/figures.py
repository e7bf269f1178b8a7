"""Figures of the graphs of a run: densities over the steps, masks, and the attention that pixels get (Figures 7 and 8 of the paper)."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from matplotlib.figure import Figure
from torch import Tensor

from examples.common.pictures import bare, save_figure
from examples.lra.data.batches import Split
from examples.lra.model import Classifier
from sbm_pyg import SBM, AttentionGraph, Choice
from sbm_pyg.analysis import plots

IMAGES = 64  # of which the sparsest and the densest are drawn
COLORS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6a4c93", "#3d3d3d")


def block_model(choice: Choice) -> SBM | None:
    """The block model that a graph was sampled from, or None."""
    return choice.probability if isinstance(choice.probability, SBM) else None


def plot_densities(rows: Sequence[Mapping[str, float]]) -> Figure:
    """Density of each layer and head over the steps; colors are layers, line styles heads."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    for name in rows[0]:
        if match := re.fullmatch(r"density_layer(\d+)_head(\d+)", name):
            layer, head = map(int, match.groups())
            look: dict[str, Any] = {"color": COLORS[layer % len(COLORS)], "ls": ("-", "--", ":", "-.")[head % 4]}
            axes.plot(
                [row["step"] for row in rows],
                [100 * row[name] for row in rows],
                label=f"layer {layer}, head {head}",
                **look,
            )
    bare(axes)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="optimizer step", ylabel="density of masks (% of query-key pairs)")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return figure


def extremes(graphs: Sequence[AttentionGraph], count: int) -> list[int]:
    """The sequences of lowest and of highest mean density over layers and heads, ascending.

    >>> extremes([AttentionGraph.from_dense(torch.tensor([[[[1, 1]]], [[[1, 0]]], [[[0, 0]]]]))], 1)
    [2, 0]
    """
    order = torch.stack([graph.density.mean(1) for graph in graphs]).mean(0).argsort(stable=True).tolist()
    count = min(count, max(len(order) // 2, 1))
    return list(dict.fromkeys(order[:count] + order[-count:]))


def plot_pixels(graphs: Sequence[AttentionGraph], images: Tensor, count: int = 2) -> Figure:
    """The percentage of pixels that attend to each pixel, by layer and head, for the images of lowest and of highest density.

    Args:
        graphs: The graph of each layer; tokens are pixels, row by row.
        images: ``[B, height, width]``, one for each sequence.
        count: Images of lowest and of highest density, each.
    """
    chosen = extremes(graphs, count)
    heads = [(layer, head) for layer, graph in enumerate(graphs) for head in range(graph.heads)]
    figure = Figure(figsize=(1.9 * (1 + len(heads)), 1.95 * len(chosen) + 0.6), layout="constrained")
    panels = figure.subplots(len(chosen), 1 + len(heads), squeeze=False)
    for row, sequence in enumerate(chosen):
        panels[row, 0].imshow(images[sequence].cpu().numpy(), cmap="gray")
        panels[row, 0].set(ylabel=f"image {sequence}")
        for axes, (layer, head) in zip(panels[row, 1:], heads, strict=True):
            mask = graphs[layer].sequence(sequence).head(head).to("cpu")
            attending = torch.bincount(mask.col.long(), minlength=mask.num_keys).view_as(images[sequence])
            heat = axes.imshow((100 * attending / mask.num_queries).numpy())
            figure.colorbar(heat, ax=axes, location="bottom", label="% that attend here")
            axes.set_title(f"layer {layer}, head {head}\ndensity {100 * float(mask.density):.3g} %", fontsize=9)
    for axes in panels.flat:
        axes.tick_params(labelsize=6, length=2)
    return figure


@torch.no_grad()
def draw(
    folder: Path, module: Classifier, split: Split, rows: Sequence[Mapping[str, float]], length: int = 256
) -> None:
    """Draws densities, and for an example of median length or ``length`` the mask of each layer and head; for images, the attention that pixels get.

    Of a pair, the first sequence is drawn.
    """
    save_figure(folder / "density.png", plot_densities(rows), dpi=150)
    usual = min(float(np.median(split.lengths)), length)
    batch = split.__getitems__([int(np.abs(split.lengths - usual).argmin())])
    settings = module.eval().settings
    _, trace = module.classify(move_data_to_device(batch, module.device), seed=settings.seed)
    for layer, choice in enumerate(trace.choices[: settings.layers]):
        for head in range(settings.heads if choice else 0):  # full attention has no graph to draw
            figure = plots.plot_mask(choice.graph, block_model(choice), head=head, title=f"layer {layer}, head {head}")
            save_figure(folder / f"mask-layer{layer}-head{head}.png", figure, dpi=150)
    side, several = module.task.side, split.__getitems__([*range(min(IMAGES, len(split.lengths)))])
    if side and bool((split.lengths[: len(several.labels)] == side**2).all()):  # else pixels are left out
        _, trace = module.classify(move_data_to_device(several, module.device), seed=settings.seed)
        if graphs := [choice.graph for choice in trace.choices if choice]:
            save_figure(folder / "pixels.png", plot_pixels(graphs, (several.tokens - 1).view(-1, side, side)), dpi=150)
