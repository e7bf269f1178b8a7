"""Block models with linear memberships, and starts from the queries and keys of a trained layer."""

import math
from typing import Any

import pytest
import torch

from sbm_pyg import SBM, AttentionGraph, SBMSource, Tokens, gradients, indexer, make_attention
from sbm_pyg.sources import starts
from sbm_pyg.sources.linear_sbm import LinearSBMHead


def planted(heads: int = 2, tokens: int = 240, channels: int = 8, groups: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of groups of tokens that score their own group high, with an offset that all keys share."""
    random = torch.Generator().manual_seed(0)
    centers = 3 * torch.eye(channels)[:groups].repeat(tokens // groups, 1)
    noise = 0.1 * torch.randn(2, heads, tokens, channels, generator=random)
    return centers + noise[0], centers + noise[1] + 2


def test_probabilities_are_those_of_the_formula() -> None:
    head = LinearSBMHead(3, heads=2, num_clusters=4)
    query, key = torch.randn(2, 5, 3), torch.randn(2, 7, 3)
    sbm = head(Tokens(query, key, bipartite=True))
    rows = (query @ head.query_map + head.query_bias[:, None]).softmax(2)
    columns = (key @ head.key_map + head.key_bias[:, None]).sigmoid()
    assert isinstance(sbm, SBM)
    every_pair = AttentionGraph.from_edge_index(torch.cartesian_prod(torch.arange(7), torch.arange(5)).T, 5, 7).expand(
        2
    )
    torch.testing.assert_close(sbm.on(every_pair), (rows @ columns.mT).flatten())


def test_a_new_head_has_the_initial_density() -> None:
    head = LinearSBMHead(8, heads=2, num_clusters=4, initial_density=0.1)
    sbm = head(Tokens(0.01 * torch.randn(2, 100, 8)))
    torch.testing.assert_close(sbm.expected_density(), torch.full((1, 2), 0.1), rtol=0.05, atol=0)


def test_clusters_of_queries_are_those_that_were_planted() -> None:
    query, key = planted()
    centers = starts.clusters_of_queries(query, key, 12, torch.Generator().manual_seed(1))
    nearest = torch.cdist(query, centers).argmin(2)  # [H, N]
    group = torch.arange(query.size(1)) % 4
    for of_head in nearest:
        for cluster in of_head.unique():
            assert group[of_head == cluster].unique().numel() == 1


def test_there_may_be_fewer_queries_than_clusters() -> None:
    head = LinearSBMHead(8, heads=2, num_clusters=16)
    query, key = planted(tokens=4)
    head.start_from(query, key, scale=1.0, density=0.25)
    assert all(parameter.isfinite().all() for parameter in head.parameters())


@pytest.mark.parametrize("density", [0.01, 0.3, 0.9])
def test_thresholds_give_each_community_its_part_of_the_keys(density: float) -> None:
    score = 10 * torch.randn(2, 500, 3)
    mean = (score + starts.thresholds(score, density)[:, None]).sigmoid().mean(1)
    torch.testing.assert_close(mean, torch.full((2, 3), density), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_scores_of_low_rank_are_the_best_in_the_mean_square(rank: int) -> None:
    query, key = torch.randn(2, 40, 5) + 1, torch.randn(2, 60, 5) @ torch.diag(torch.arange(1.0, 6)) + 2
    of_query, of_key = starts.low_rank_scores(query, key, rank)
    key = key - key.mean(1, keepdim=True)
    error = (query @ of_query @ (key @ of_key).mT - query @ key.mT).square().sum((1, 2))
    best = torch.linalg.svdvals(query @ key.mT)[:, rank:].square().sum(1)  # Eckart and Young
    torch.testing.assert_close(error, best, rtol=1e-3, atol=1e-2)


def kept(source: torch.nn.Module, query: torch.Tensor, key: torch.Tensor) -> float:
    """Part of the attention on the edges of a source."""
    weight = (query @ key.mT).softmax(2)
    graph = source(Tokens(query, key, seed=0)).graph.expand(len(query))
    return float(weight[graph.edge_head, graph.edge_index[1], graph.edge_index[0]].sum() / weight.sum())


def test_a_block_model_starts_with_the_attention_of_the_layer() -> None:
    query, key = planted()
    source = SBMSource(LinearSBMHead(8, heads=2, num_clusters=4), target_density=0.25, window=None).eval()
    source.settle([Tokens(query, key)])
    at_random = kept(source, query, key)
    source.start_from(query, key, scale=1.0)
    source.settle([Tokens(query, key)])
    assert at_random < 0.5
    assert kept(source, query, key) > 0.8


@pytest.mark.parametrize("sharpness", [1.0, 20.0])
def test_settled_graphs_have_the_target_density(sharpness: float) -> None:
    source = SBMSource(LinearSBMHead(8, heads=2, num_clusters=4, initial_density=0.01), target_density=0.6, window=None)
    tokens = [Tokens(sharpness * torch.randn(2, 400, 8), seed=seed) for seed in range(3)]
    source.eval().settle(tokens)
    density = torch.stack([source(part).graph.density[0] for part in tokens]).mean(0)
    torch.testing.assert_close(density, torch.full((2,), 0.6).double(), rtol=0.1, atol=0)
    mean = torch.stack([source.predict(part).expected_density()[0] for part in tokens]).mean(0)
    assert (source.running_mean <= 1.05 * mean).all()
    assert sharpness == 1 or (source.running_mean < 0.9 * mean).all()  # many probabilities are cut at 1


def test_a_block_model_starts_at_densities_below_the_smallest_divisor() -> None:
    query, key = torch.randn(2, 1, 4_000, 8)
    source = SBMSource(LinearSBMHead(8, num_clusters=4), target_density=3e-4, window=None).eval()
    source.start_from(query, key, scale=0.25)
    source.settle([Tokens(query, key)])
    density = source(Tokens(query, key, seed=0)).graph.density
    torch.testing.assert_close(density, torch.full_like(density, 3e-4), rtol=0.1, atol=0)


@pytest.mark.parametrize("index_heads", [1, 2, 3])
def test_an_indexer_starts_with_the_main_directions(index_heads: int) -> None:
    query, key = planted()
    scorer = indexer.Indexer(8, heads=2, index_heads=index_heads, index_channels=4)
    source = indexer.IndexerSource(scorer, target_density=0.25).eval()
    source.start_from(query, key, scale=1.0)
    assert kept(source, query, key) > 0.9
    if index_heads > 1:  # scores are linear then, and those of the layer but for what all keys of a query share
        probability = source.predict(Tokens(query, key))
        score = probability.score(probability.top_k(240)).view(2, 240, 240)
        torch.testing.assert_close(
            score - score.mean(2, keepdim=True), query @ (key - key.mean(1, keepdim=True)).mT, rtol=0.1, atol=1.0
        )


def test_more_directions_than_channels_are_left_out() -> None:
    query, key = planted()
    scorer = indexer.Indexer(8, heads=2, index_channels=12)
    scorer.start_from(query, key, scale=0.5)
    small, weight, small_key = scorer(query, key)
    score = (torch.einsum("hnsd,hmd->hnsm", small, small_key).relu() * weight[..., None]).sum(2)
    torch.testing.assert_close(score, 0.5 * query @ key.mT, rtol=1e-3, atol=1e-2)


def test_a_name_and_options_make_it() -> None:
    conv = make_attention("sbm", 16, 8, 2, parameterization="linear", num_clusters=4, initial_density=0.5)
    assert isinstance(conv.source, SBMSource)
    assert isinstance(conv.source.head, LinearSBMHead)
    assert (conv.source.head.num_clusters, conv.source.head.initial_density) == (4, 0.5)
    with pytest.raises(TypeError, match="tied"):
        make_attention("sbm", 16, 8, 2, parameterization="linear", tied=True)


def test_it_learns_by_the_task() -> None:
    conv: Any = make_attention("sbm", 16, 8, 2, parameterization="linear", num_clusters=4, target_density=0.3)
    conv(torch.randn(30, 16)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in conv.source.head.parameters())


def expected_to_be_kept(p: torch.Tensor, weight: torch.Tensor, density: float, learnable: torch.Tensor) -> torch.Tensor:
    """The formula of `kept_attention` over all pairs ``[H, N, M]``, its factor by bisection."""
    parts = []
    for head in range(len(p)):
        low, high = torch.zeros(()).double(), torch.tensor(1e9).double()
        for _ in range(200):
            middle = (low + high) / 2
            mean = (middle * p[head]).clamp(max=1)[learnable[head]].sum() / learnable[head].numel()
            low, high = (middle, high) if mean < density else (low, middle)
        parts.append((weight[head] * (low * p[head]).clamp(max=1))[learnable[head]].sum())
    return torch.stack(parts).sum() / weight[learnable].sum()


@pytest.mark.parametrize(("density", "window"), [(0.1, None), (0.5, None), (0.2, 1)])
def test_kept_attention_is_that_of_the_formula_and_so_is_its_gradient(density: float, window: int | None) -> None:
    torch.manual_seed(0)
    source: Any = SBMSource(LinearSBMHead(3, heads=2, num_clusters=4), window=window).double()
    query, key = 4 * torch.randn(2, 2, 20, 3).double()
    tokens = Tokens(query, key, bipartite=False)
    kept_of_graphs = gradients.kept_attention(source, tokens, density, scale=0.5, rows=math.inf)
    p = (query @ source.head.query_map).softmax(2) @ (
        key @ source.head.key_map + source.head.key_bias[:, None]
    ).sigmoid().mT
    place = torch.arange(20)
    learnable = (place[:, None] - place).abs() > (-1 if window is None else window)
    learnable = learnable.expand(2, 20, 20)
    weight = (0.5 * query @ key.mT).softmax(2)
    expected = expected_to_be_kept(p.detach(), weight, density, learnable)
    torch.testing.assert_close(kept_of_graphs, expected)
    kept_of_graphs.backward()
    for parameter in (source.head.query_map, source.head.key_bias):
        slopes, step = [], 1e-6
        for sign in (1, -1):
            with torch.no_grad():
                parameter[1, 0] += sign * step
                slopes.append(gradients.kept_attention(source, tokens, density, scale=0.5, rows=math.inf))
                parameter[1, 0] -= sign * step
        slope = (slopes[0] - slopes[1]) / (2 * step)
        torch.testing.assert_close(slope, parameter.grad[1, 0].sum(), rtol=1e-3, atol=1e-7)
