"""Figures: what they show, that each can be understood alone, and that nothing global is touched."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from problems import GRAPHS, random_graph, refuses

from sbm_pyg import SBM, AttentionGraph, EncoderTrace, SBMAttentionConv, SequenceEncoder, analysis, sample_edges
from sbm_pyg.analysis import plots
from sbm_pyg.sources import patterns
from sbm_pyg.training.sparsifier import Loss

LENGTHS = (16, 9, 16, 25)


def model(tokens: int = 24, blocks: int = 4, heads: int = 2) -> SBM:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.rand(heads, tokens, blocks, generator=generator) for _ in range(2))
    block = 0.1 + 0.3 * torch.eye(blocks).expand(heads, -1, -1)
    return SBM(query, key, block / blocks)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trace() -> EncoderTrace:
    torch.manual_seed(0)
    encoder = SequenceEncoder(10, 8, attention_options={"num_clusters": 4})
    with torch.no_grad():
        return encoder(torch.arange(64) % 10, torch.tensor([0, 16, 32, 48, 64]), seed=0, return_trace=True)[1]


def losses() -> list[Loss]:
    """Dense at first, sparse from step 30 on."""
    return [Loss(step, 1.0, 2.0 - step / 100, step >= 30) for step in range(10, 60, 10)]


def heads() -> analysis.HeadTable:
    """Two layers, of which the second has fewer heads."""
    torch.manual_seed(0)
    layers = [SBMAttentionConv(16, 16 // count, count, num_clusters=4, target_density=0.25) for count in (4, 2)]
    model = torch.nn.Sequential(*layers)
    with torch.no_grad(), analysis.compare_heads(model) as table:
        model(torch.randn(40, 16))
    return table


def figures(trace: EncoderTrace) -> dict[str, Figure]:
    sbm = model()
    graph = sample_edges(sbm, seed=0)
    return {
        "mask": plots.plot_mask(graph, sbm, head=1), "mask alone": plots.plot_mask(GRAPHS["bipartite"], head=2, title="Layer 3"),
        "mask of many tokens": plots.plot_mask(random_graph(1, 900, 500, 0.01)), "empty mask": plots.plot_mask(GRAPHS["no edges"]),
        "density": plots.plot_density(trace),
        "densities of tasks": plots.plot_density({"ListOps": trace.density, "Text": trace.density[:1, :1]}),
        "blocks": plots.plot_communities(graph, sbm), "losses": plots.plot_losses(losses()),
        "heads": plots.plot_heads(heads()), "heads by density": plots.plot_heads(heads(), "density"),
    }  # fmt: skip


@pytest.mark.slow
def test_every_figure_has_labels_and_a_caption_and_renders(trace: EncoderTrace) -> None:
    for name, figure in figures(trace).items():
        assert isinstance(figure, Figure)
        caption = figure.get_supxlabel().replace("\n", " ")
        assert caption == figure.get_label(), name
        assert len(caption) > 60, name
        for axes in figure.axes:
            is_bar = axes.get_label() == "<colorbar>"
            labels = (axes.get_xlabel(), axes.get_ylabel())
            place = axes.get_subplotspec()
            inner = place is not None and not (place.is_first_col() and place.is_last_row())
            if name.startswith("densit"):
                assert axes.get_ylabel(), name  # layers are named at the ticks
                assert all(tick.get_text().startswith("layer ") for tick in axes.get_xticklabels())
            else:
                assert any(labels) if is_bar else (all(labels) or inner), (name, labels)
        images = sum(bool(axes.images) for axes in figure.axes)
        bars = sum(axes.get_label() == "<colorbar>" for axes in figure.axes)
        has_scale = images > 0 and name not in ("mask alone", "empty mask")  # two colors
        assert bars >= has_scale, name
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=40)  # warnings are errors here
        assert data.getvalue().startswith(b"\x89PNG")


@pytest.mark.slow
def test_no_global_state_of_pyplot_is_touched() -> None:
    code = """
import io, sys, torch
from sbm_pyg import AttentionGraph
from sbm_pyg.analysis import plots
plots.plot_mask(AttentionGraph.from_dense(torch.eye(3))).savefig(io.BytesIO())
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True)


def test_mask_and_expectation_are_shown_as_they_are() -> None:
    sbm = model()
    graph = sample_edges(sbm, seed=0)
    left, right = plots.plot_mask(graph, sbm, head=1).axes[:2]
    np.testing.assert_array_equal(np.asarray(left.images[0].get_array()), graph.to_dense()[1])
    np.testing.assert_allclose(np.asarray(right.images[0].get_array()), sbm.edge_prob_dense()[1], atol=1e-6)
    assert f"{int(graph.degree[1].sum()):,} edges" in left.get_title()
    assert f"{float(sbm.expected_edges()[0, 1]):,.0f} edges" in right.get_title()


def test_ticks_of_a_mask_are_tokens() -> None:
    axes = plots.plot_mask(patterns.full(3)).axes[0]
    assert all(tick == round(tick) for tick in (*axes.get_xticks(), *axes.get_yticks()))


def test_expectations_at_a_target_density_are_those_of_drawn_graphs() -> None:
    sbm = model().with_density(0.8)  # some products exceed 1: such pairs are certain edges
    assert float(sbm.edge_prob_dense().max()) > 1.1
    right = plots.plot_mask(sample_edges(sbm, clamp=True, seed=0), sbm).axes[1]
    picture = np.asarray(right.images[0].get_array())
    np.testing.assert_allclose(picture, sbm.edge_prob_dense()[0].clamp(max=1), atol=1e-6)
    assert right.images[0].get_clim() == (0, 1)
    assert right.get_title().endswith(f"density {100 * float(sbm.cut_density()[0, 0]):.3g} %")


def test_masks_of_many_tokens_keep_their_density() -> None:
    graph = random_graph(1, 1001, 903, 0.01)
    axes = plots.plot_mask(graph).axes[0]
    shown = np.asarray(axes.images[0].get_array())
    assert max(shown.shape) <= plots.PIXELS
    mask = graph.to_dense()[0].double().numpy()
    assert shown[0, 0] == mask[:3, :3].mean()
    assert shown[-1, -1] == mask[999:, 900:].mean()
    assert axes.images[0].get_extent() == [-0.5, 902.5, 1000.5, -0.5]


def cell_means(mask: np.ndarray, cell: int) -> np.ndarray:
    """Mean of each cell, one after the other."""
    rows, columns = (range(0, size, cell) for size in mask.shape)
    return np.array([[mask[i : i + cell, j : j + cell].mean() for j in columns] for i in rows])


@pytest.mark.parametrize("pixels", [400, 40, 39, 13, 7, 1])
def test_pictures_of_sparse_masks_are_those_of_dense_ones(monkeypatch: pytest.MonkeyPatch, pixels: int) -> None:
    """Pictures, axes and words equal those from a dense mask, which is never made."""
    monkeypatch.setattr(plots, "PIXELS", pixels)
    member = torch.rand(2, 40, 3, generator=torch.Generator().manual_seed(0))
    square = SBM(member, member, torch.full((2, 3, 3), 0.1))
    wide = SBM(member, torch.rand(2, 31, 3, generator=torch.Generator().manual_seed(1)), torch.full((2, 3, 3), 0.1))
    graphs = [sample_edges(sbm, seed=0) for sbm in (square, wide)]
    masks = [graph.to_dense()[1].double().numpy() for graph in graphs]
    monkeypatch.setattr(AttentionGraph, "to_dense", None)
    cell = -(-40 // pixels)
    for sbm, graph, mask in zip((square, wide), graphs, masks, strict=True):
        blocks = [side[1].numpy() for side in analysis.communities_of(sbm)]
        surest = [side[1].amax(-1).numpy() for side in (sbm.query_membership, sbm.key_membership)]
        order = [np.lexsort((-weight, block)) for weight, block in zip(surest, blocks, strict=True)]
        alone, pair, sorted_ = (
            plots.plot_mask(graph, head=1).axes,
            plots.plot_mask(graph, sbm, head=1).axes,
            plots.plot_communities(graph, sbm, head=1).axes,
        )
        for axes in (alone[0], pair[0], sorted_[0]):
            np.testing.assert_array_equal(np.asarray(axes.images[0].get_array()), cell_means(mask, cell))
        ordered = cell_means(mask[np.ix_(*order)], cell)
        np.testing.assert_array_equal(np.asarray(sorted_[1].images[0].get_array()), ordered)
        p = sbm.edge_prob_dense()[1].double().numpy()
        np.testing.assert_allclose(np.asarray(pair[1].images[0].get_array()), cell_means(p, cell))
        for axes in (alone[0], *pair[:2], *sorted_[:2]):
            assert axes.images[0].get_extent() == [-0.5, mask.shape[1] - 0.5, mask.shape[0] - 0.5, -0.5]
        assert alone[0].images[0].get_clim() == (0, cell_means(mask, cell).max())
        share = f"density {100 * mask.mean():.3g} %"
        assert alone[0].get_title() == f"sampled mask: {int(mask.sum()):,} edges, {share}"
        assert sorted_[0].get_title() == f"in the order of the tokens: {share}"
        assert [f"{cell} x {cell} pairs" in axes.get_ylabel() for axes in alone[1:]] == [True] * (cell > 1)


def test_densities_of_causal_masks_count_allowed_pairs() -> None:
    graph, ones = patterns.full(4, is_causal=True), torch.ones(1, 4, 1)
    sbm = SBM(ones, ones, 0.5 * ones[:, :1], is_causal=True)
    drawn, expected = plots.plot_mask(graph, sbm).axes[:2]
    assert drawn.get_title() == "sampled mask: 10 edges, density 100 %"
    assert expected.get_title() == "expectation: 5 edges, density 50 %"


def test_density_bars_are_means_and_deviations_over_inputs() -> None:
    density = torch.tensor([[[0.1, 0.3], [0.2, 0.4]], [[0.0, 0.0], [0.0, 0.2]]])  # [L, B, H]
    axes: Any = plots.plot_density(density).axes[0]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([25.0, 5.0])
    segments = [container.lines[2][0].get_segments()[0] for container in axes.containers if hasattr(container, "lines")]
    deviation = [100 * float(layer.mean(1).std()) for layer in density.double()]
    assert segments[0][:, 1] == pytest.approx([25 - deviation[0], 25 + deviation[0]])
    assert segments[1][:, 1] == pytest.approx([0, 5 + deviation[1]])  # cut: no share is negative
    heads = [line.get_ydata() for line in axes.lines if line.get_marker() == "D"]
    assert heads[0] == pytest.approx([15.0, 35.0])
    assert axes.get_ylim()[0] == 0


def test_a_mask_without_edges_has_the_colors_of_0_to_1() -> None:
    figure = plots.plot_mask(patterns.full(6).select(torch.zeros(36, dtype=torch.bool)))
    assert figure.axes[0].images[0].get_clim() == (0, 1)


def test_sorting_makes_communities_visible() -> None:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    member = torch.eye(4).repeat_interleave(10, 0)[order][None]
    sbm = SBM(member, member, torch.eye(4)[None])
    graph = sample_edges(sbm, seed=0)
    left, middle, right = plots.plot_communities(graph, sbm).axes[:3]
    np.testing.assert_array_equal(np.asarray(left.images[0].get_array()), graph.to_dense()[0])
    np.testing.assert_array_equal(
        np.asarray(middle.images[0].get_array()), patterns.block_diagonal(40, 4).to_dense()[0]
    )
    np.testing.assert_array_equal(np.asarray(right.images[0].get_array()), np.eye(4))
    assert left.images[0].get_clim() == middle.images[0].get_clim() == (0, 1)


def test_colors_of_the_block_matrix_span_its_weights() -> None:
    """At the paper's start, all weights are within some percent of each other."""
    member = torch.eye(3).repeat_interleave(4, 0)[None]
    sbm = SBM(member, member, 0.11 + 0.001 * torch.arange(9.0).view(1, 3, 3))
    figure = plots.plot_communities(sample_edges(sbm, seed=0), sbm)
    assert figure.axes[2].images[0].get_clim() == pytest.approx((0.11, 0.118))
    assert "(colors span 0.11 to 0.118)" in figure.axes[-1].get_ylabel()
    even = SBM(member, member, torch.full((1, 3, 3), 0.2))
    assert plots.plot_communities(sample_edges(even, seed=0), even).axes[2].images[0].get_clim() == pytest.approx(
        (0.0, 0.2)
    )


def test_figures_go_where_they_are_told() -> None:
    figure = Figure()
    first, second = figure.subplots(1, 2)
    assert plots.plot_density(torch.rand(2, 3, 2), ax=first) is figure
    assert plots.plot_losses(losses(), ax=second) is figure
    assert first.patches
    assert len(second.lines) == 4
    assert not figure.get_supxlabel()  # the caption is up to whoever made the figure
    assert str(figure.get_label()).startswith("Running losses of training")


def test_losses_show_when_training_became_sparse() -> None:
    axes = plots.plot_losses(losses()).axes[0]
    dense, trials, sparse, change = axes.lines
    assert [*dense.get_xdata()] == [*trials.get_xdata()] == [10, 20, 30]  # type: ignore[misc]
    assert [*sparse.get_xdata()] == [30, 40, 50]  # type: ignore[misc]
    assert set(change.get_xdata()) == {30}  # type: ignore[arg-type]
    assert len(plots.plot_losses(losses()[:1]).axes[0].lines) == 2
    refuses(lambda: plots.plot_losses([]), "Expected 'history' to hold losses")
    with pytest.raises(TypeError, match="Expected 'history' to be a list of losses"):
        plots.plot_losses([1.0])  # type: ignore[list-item]


def test_errors(monkeypatch: pytest.MonkeyPatch, trace: EncoderTrace) -> None:
    removed, graph = Figure().subplots(), patterns.full(24, heads=2)
    removed.remove()
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: plots.plot_density(torch.rand(2, 3)),
         "Expected 'density' to be [L, B, H] (got [2, 3]). `EncoderTrace.density` is."),
        (lambda: plots.plot_mask(graph, model(), head=5), "Expected 'head' in 0..1 (got 5). Count from 0."),
        (lambda: plots.plot_communities(graph, model(), head=5), "Expected 'head' in 0..1 (got 5). Count from 0."),
        (lambda: plots.plot_mask(graph, model(), sequence=1), "Expected 'sequence' in 0..0 (got 1). Count from 0."),
        (lambda: plots.plot_communities(graph, model(), sequence=1), "Expected 'sequence' in 0..0 (got 1)."),
        (lambda: plots.plot_density(torch.rand(1, 1, 1), ax=removed),
         "Expected 'ax' to belong to a figure (got one that was removed)."),
    ]  # fmt: skip
    for call, message in cases:
        refuses(call, message)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ImportError,
        match=r"Expected 'matplotlib' to be installed \(it is not\). Run `pip install -e ...analysis..` in the root of a",
    ):
        plots.plot_mask(patterns.full(3))


def test_heads_are_the_cells_of_a_picture() -> None:
    table = heads()
    figure = plots.plot_heads(table)
    picture: Any = figure.axes[0].images[0].get_array()
    assert picture.shape == (2, 4)
    for head in table.heads:
        assert picture[int(head.layer), head.head] == pytest.approx(100 * head.kept)
    assert picture.mask.tolist() == [[False] * 4, [False, False, True, True]]
    density: Any = plots.plot_heads(table, "density").axes[0].images[0].get_array()
    np.testing.assert_allclose(density.compressed(), [100 * head.density for head in table.heads])
    owner = Figure()
    assert plots.plot_heads(table, "error", ax=owner.subplots()) is owner
    refuses(lambda: plots.plot_heads(table, "weight"), "Expected 'number' to be")
    rows: Any = table.heads
    refuses(lambda: plots.plot_heads(rows), "Expected 'table' to be a HeadTable", TypeError)
    refuses(lambda: plots.plot_heads(analysis.HeadTable()), "Expected 'table' to have heads")
