"""The figures of a run show the densities of its rows, and how many pixels attend to each pixel."""

from typing import Any

import numpy as np
import torch

from examples.lra import figures
from sbm_pyg import AttentionGraph


def test_densities_are_those_of_the_rows() -> None:
    rows = [
        {"step": 10.0 * step, "loss": 1.0, "density_layer0_head0": 0.2, "density_layer1_head0": 0.01 * step}
        for step in range(5)
    ]
    axes: Any = figures.plot_densities(rows).axes[0]
    assert [line.get_label() for line in axes.lines] == ["layer 0, head 0", "layer 1, head 0"]
    np.testing.assert_allclose(axes.lines[1].get_xydata(), [[10 * step, step] for step in range(5)])


def test_pixels_show_how_many_attend_to_them_in_the_sparsest_and_the_densest_images() -> None:
    random = torch.Generator().manual_seed(0)
    masks = torch.rand(5, 2, 6, 6, generator=random) < torch.tensor([0.5, 0.1, 0.9, 0.3, 0.7]).view(5, 1, 1, 1)
    graph, images = AttentionGraph.from_dense(masks), torch.rand(5, 2, 3, generator=random)
    assert figures.extremes([graph], 2) == [1, 3, 4, 2]
    assert figures.extremes([graph], 50) == [1, 3, 4, 2]
    assert figures.extremes([graph.sequence(0)], 2) == [0]
    axes: Any = figures.plot_pixels([graph], images, count=1).axes
    assert [panel.get_ylabel() for panel in axes[:6:3]] == ["image 1", "image 2"]
    np.testing.assert_allclose(axes[3].images[0].get_array(), images[2])
    np.testing.assert_allclose(axes[5].images[0].get_array(), 100 * masks[2, 1].double().mean(0).view(2, 3))
    assert axes[5].get_title() == f"layer 0, head 1\ndensity {100 * float(masks[2, 1].double().mean()):.3g} %"
