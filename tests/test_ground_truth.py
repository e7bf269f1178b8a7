"""What is recorded of a model is what its entmax layers use, and the numbers that compare graphs are their definitions."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import entmax
import pytest
import torch
from problems import draw32 as draw
from torch import Tensor, nn

from sbm_pyg import AttentionConv, AttentionGraph, SBMMultiheadAttention, SequenceEncoder, TokenClassifier, Tokens
from sbm_pyg.sources import patterns
from sbm_pyg.sparsefinder import Projection, fit_projection, predictors
from sbm_pyg.sparsefinder.ground_truth import compare, ground_truth_graph, group_entropy, record

PTR = torch.tensor([0, 6, 17])


def make_layer(channels: int, head_channels: int, heads: int, **options: Any) -> AttentionConv:
    source = patterns.PatternSource(patterns.full)
    conv = AttentionConv(channels, head_channels, heads, source, **{"normalizer": "entmax15", **options})
    with torch.no_grad():
        conv.lin_query.weight.mul_(8)
    return conv


def make_model() -> TokenClassifier:
    torch.manual_seed(0)
    return TokenClassifier(SequenceEncoder(20, 16, num_layers=2, heads=2, attention=make_layer), 5).eval()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [-2.0, 0.0, 2.0])
def test_a_scale_of_any_sign_leaves_keys_out_that_are_not_there(scale: float, is_causal: bool) -> None:
    query, key = draw(1, 2, 13, 4), draw(2, 2, 13, 4)
    graph = ground_truth_graph(Tokens(query, key, query_ptr=torch.tensor([0, 5, 13]), is_causal=is_causal), scale=scale)
    for sequence, (start, end) in enumerate(((0, 5), (5, 13))):  # the first is padded
        scores = scale * query[:, start:end] @ key[:, start:end].mT
        later = torch.ones(end - start, end - start, dtype=torch.bool).triu(1) & is_causal
        wanted = entmax.entmax15(scores.masked_fill(later, -1e4), dim=-1) > 0
        assert torch.equal(graph.to_dense(sequence), wanted)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("normalizer", ["entmax15", "sparsemax"])
def test_a_record_is_what_dense_entmax_uses(normalizer: str, is_causal: bool) -> None:
    torch.manual_seed(0)
    conv, x = make_layer(8, 4, 2, normalizer=normalizer, is_causal=is_causal).eval(), draw(1, 17, 8)
    with record(conv) as found:
        out = conv(x, ptr=PTR)
        conv(x[:5])
    (query, key, graph), (_, _, other) = found[""]
    assert not query.requires_grad
    assert (graph.num_sequences, other.num_queries, graph.is_causal) == (2, 5, is_causal)
    wanted = ground_truth_graph(
        Tokens(query, key, query_ptr=PTR, is_causal=is_causal), alpha=1.5 if normalizer == "entmax15" else 2.0
    )
    assert graph == wanted
    dense = entmax.entmax15 if normalizer == "entmax15" else entmax.sparsemax
    value = conv.lin_value(x).view(17, 2, 4).transpose(0, 1)
    for b, (start, end) in enumerate(itertools.pairwise(PTR.tolist())):
        scores = query[:, start:end] @ key[:, start:end].mT / 2
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
        weight = dense(scores, dim=-1)
        assert torch.equal(graph.to_dense(b), weight > 1e-9)
        assert 0.1 < float((weight > 0).double().mean()) < 0.9
        expected = (weight @ value[:, start:end]).transpose(0, 1).flatten(1)
        torch.testing.assert_close(out[start:end], expected, rtol=1e-4, atol=1e-5)
    assert conv.score_bias is None
    assert torch.equal(conv(x, ptr=PTR), out)


def test_a_model_gives_samples_of_each_layer_that_projections_are_fitted_to() -> None:
    model, tokens = make_model(), torch.randint(20, (17,), generator=torch.Generator().manual_seed(0))
    before = model(tokens, PTR)
    with record(model) as found:
        assert torch.equal(model(tokens, PTR), before)
        model(tokens.flip(0), PTR)
    names = [f"encoder.layers.{number}.attention" for number in range(2)]
    assert [*found] == names
    assert all(len(samples) == 2 for samples in found.values())
    losses = fit_projection(Projection(8, 2, 3), found[names[1]], epochs=30, learning_rate=1e-2, progress=False)
    assert losses[-1] < losses[0]
    with record(model, [names[1]]) as found:
        model(tokens, PTR)
    assert [*found] == names[1:]


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor, key: Tensor, graph: AttentionGraph) -> Tensor:
        return -3 * self.weight * (graph.edge_index[0] - graph.edge_index[1]).abs().float()


@pytest.mark.parametrize("as_module", [False, True])
def test_score_biases_count_and_stay(as_module: bool) -> None:
    torch.manual_seed(0)
    bias = Bias() if as_module else Bias().forward
    conv, plain = (make_layer(8, 4, 2, score_bias=each).eval() for each in (bias, None))
    plain.load_state_dict(conv.state_dict(), strict=False)
    names, x = [*conv.state_dict()], draw(1, 17, 8)
    before = conv(x, ptr=PTR)
    with record(conv) as found, record(plain) as without:
        assert torch.equal(conv(x, ptr=PTR), before)
        plain(x, ptr=PTR)
    assert [*conv.state_dict()] == names
    assert conv.score_bias is bias or conv.score_bias == bias
    ((_, _, near),), ((_, _, far),) = found[""], without[""]
    reach = [float((graph.edge_index[0] - graph.edge_index[1]).abs().max()) for graph in (near, far)]
    assert reach[0] < reach[1]


def test_a_given_graph_and_padding_count_as_in_the_layer() -> None:
    torch.manual_seed(0)
    conv, x = make_layer(8, 4, 2).eval(), draw(1, 17, 8)
    near = patterns.window(None, 2, ptr=PTR)
    with record(conv) as found:
        conv(x, near)
    ((query, key, graph),) = found[""]
    assert bool(near.expand(2).contains(graph.edge_index, graph.edge_head).all())
    assert graph.num_edges < 2 * near.num_edges
    assert not bool(ground_truth_graph(Tokens(query, key, query_ptr=PTR)).num_edges == graph.num_edges)
    padded = SBMMultiheadAttention(8, 2, batch_first=True, num_clusters=2, normalizer="entmax15").eval()
    tokens, mask = draw(2, 2, 6, 8), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with record(padded) as found:
        padded(tokens, tokens, tokens, key_padding_mask=mask)
    ((query, _, graph),) = found["conv"]
    assert query.shape == (2, 10, 4)
    assert graph.query_ptr.tolist() == [0, 6, 10]


def test_layers_are_as_they_were_after_an_error() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="vocabulary"), record(model):
        model(torch.tensor([99]))
    assert all(layer.score_bias is None for layer in model.modules() if isinstance(layer, AttentionConv))


@pytest.mark.parametrize(
    ("model", "layers", "error", "message"),
    [
        (3, None, TypeError, r"Expected 'model' to be a module \(got int\)"),
        (nn.Linear(2, 2), None, ValueError, "Expected 'model' to have AttentionConv layers"),
        (AttentionConv(4, 2).eval(), None, ValueError,
         "Expected 'model' with sparse normalizers .got softmax in layer ''"),
        (make_layer(4, 2, 1), None, ValueError, "Expected 'model' to be in evaluation"),
        (make_layer(4, 2, 1, edge_dim=3).eval(), None, ValueError,
         r"Expected 'model' without edge features \(got an 'edge_dim' in layer ''\)"),
        (make_model(), ["x"], ValueError, r"Expected 'layers' among \['encoder.layers.0"),
        (make_model(), "x", TypeError, "Expected 'layers' to be a collection of names"),
    ],
)  # fmt: skip
def test_errors_of_record(model: Any, layers: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), record(model, layers):
        pass


# ------------------------------------------------------------------------------------------------ numbers


def brute_entropy(shares: list[float], groups: int) -> float:
    return -sum(share * math.log(share) for share in shares if share) / math.log(groups)


def test_entropies_are_their_definitions() -> None:
    random = torch.Generator().manual_seed(0)
    group = torch.randint(5, (2, 17), generator=random)
    for head, found in enumerate(group_entropy(group, 5).tolist()):
        counts = torch.bincount(group[head], minlength=5).tolist()
        assert found == pytest.approx(brute_entropy([count / 17 for count in counts], 5))
    graph = ground_truth_graph(Tokens(2 * draw(1, 2, 17, 4), draw(2, 2, 17, 4), query_ptr=PTR))
    graph = graph.select(graph.edge_index[1] != 3)  # a query without edges does not count
    mask = graph.to_dense(0), graph.to_dense(1)
    for head, found in enumerate(group_entropy(group, 5, graph).tolist()):
        each = []
        for b, start in enumerate(PTR[:-1].tolist()):
            for row in mask[b][head]:
                chosen = group[head, start : start + len(row)][row]
                if len(chosen):
                    shares = torch.bincount(chosen, minlength=5).double() / len(chosen)
                    each.append(brute_entropy(shares.tolist(), 5))
        assert len(each) == 16
        assert found == pytest.approx(sum(each) / 16)
    columns = torch.stack([group, torch.zeros_like(group)], 2)
    found = group_entropy(columns, 5, graph)
    assert torch.equal(found[:, 0], group_entropy(group, 5, graph))
    assert found[:, 1].tolist() == [0, 0]
    assert group_entropy(torch.zeros(2, 4, dtype=torch.int64), 1).tolist() == [0, 0]


def test_entropy_tells_balance_and_concentration() -> None:
    x, far = draw(1, 1, 64, 2), torch.tensor([[[-9.0, 0.0], [0.0, 0.0], [9.0, 0.0]]])
    assert group_entropy(predictors.buckets(x, 8), 8).tolist() == [pytest.approx([1, 1])]
    assert float(group_entropy(predictors.clusters(x, far)[..., 0], 3)) < 0.3
    near = predictors.distance(Tokens(x), 0.3)
    assert float(group_entropy(predictors.buckets(x, 8), 8, near).max()) < 0.3


@pytest.mark.parametrize(
    ("group", "count", "graph", "message"),
    [(torch.zeros(2, 4), 2, None, r"Expected 'group' to be \[H, M\] or \[H, M, m\] int64"),
     (torch.full((2, 4), 2), 2, None, r"Expected 'group' in 0..1 \(got 2 to 2\)"),
     (torch.zeros(2, 4, dtype=torch.int64), 0, None, "Expected 'num_groups' to be at least 1"),
     (torch.zeros(2, 4, dtype=torch.int64), 2, patterns.full(4), "Expected 'graph' of 2 heads and 4 keys")],
)  # fmt: skip
def test_errors_of_entropies(group: Tensor, count: int, graph: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_entropy(group, count, graph)


def test_metrics_by_hand() -> None:
    ground_truth = AttentionGraph.from_dense(torch.tensor([[[1, 1, 0], [0, 1, 0], [0, 0, 0]]]) > 0)
    graph = AttentionGraph.from_dense(torch.tensor([[[1, 0, 0], [1, 1, 1], [0, 0, 0]]]) > 0)
    match = compare(ground_truth, graph)
    found = [float(x) for x in (match.recall, match.precision, match.sparsity, match.exact)]
    assert found == pytest.approx([2 / 3, 2 / 4, 5 / 9, 2 / 3])
    with pytest.raises(ValueError, match="Expected 'graph' over the tokens and heads of 'ground_truth'"):
        compare(ground_truth, patterns.full(4))
    assert cast(Any, match).recall.dtype == torch.float64


def test_a_graph_without_edges_misses_nothing_precisely() -> None:
    ground_truth, none = (
        patterns.self_loops(4),
        AttentionGraph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 4, 4),
    )
    found, other = compare(ground_truth, none), compare(none, ground_truth)
    assert (float(found.precision), float(found.recall), float(found.exact)) == (1, 0, 0)
    assert (float(other.precision), float(other.recall), float(other.exact)) == (0, 1, 1)
