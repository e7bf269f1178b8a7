"""The seam between choosing a graph and attending over it: a source that knows nothing of block models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
from problems import draw, refuses
from torch import Tensor
from torch_geometric.data import Batch, Data

from sbm_pyg import (
    SBM,
    AttentionConv,
    AttentionGraph,
    BlockGraph,
    Choice,
    EdgeProbability,
    GraphSource,
    SBMHead,
    SBMSource,
    SequenceEncoder,
    SourceGraph,
    Tokens,
    auxiliary_loss,
    ops,
    sparsefinder,
)
from sbm_pyg.sources import indexer, patterns, selectors
from sbm_pyg.sparsefinder import ground_truth, predictors
from sbm_pyg.training.estimators import ESTIMATORS, Estimator, Local
from sbm_pyg.training.gradients import attach_local_expectation, draw_probes, score_function


class FreeProbability(EdgeProbability):
    """A number for each pair of each head, ``[H, N, M]``, of one sequence."""

    def __init__(self, p: Tensor) -> None:
        self.p = p

    def on(self, graph: AttentionGraph) -> Tensor:
        return self.p[graph.edge_head, graph.edge_index[1], graph.edge_index[0]]

    def expected_density(self) -> Tensor:
        return self.p.mean((1, 2))[None]

    def expected_degree(self) -> Tensor:
        return self.p.sum(2)


class FreeSource(GraphSource):
    """Draws each edge with a probability of its own, whatever the tokens hold."""

    def __init__(self, heads: int, tokens: int, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.logit = torch.nn.Parameter(torch.randn(heads, tokens, tokens, generator=random))

    def forward(self, tokens: Tokens) -> Choice:
        p = self.logit.sigmoid()
        coins = torch.rand(p.shape, generator=torch.Generator().manual_seed(tokens.seed))
        return Choice(AttentionGraph.from_dense((coins < p).float()), FreeProbability(p))


# ------------------------------------------------------------------ the gradient, by enumeration


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eta", "exploration", "forced"), [(0.3, 0.0, False), (1.0, 0.0, True), (0.3, 0.05, True), (0.0, 0.2, False)]
)
def test_local_expectation_is_unbiased_for_a_free_matrix(eta: float, exploration: float, forced: bool) -> None:
    """Two heads, one query and two keys each: 16 graphs, and as many sets of probes."""
    query, key, value, weight = draw(1, 2, 1, 3), draw(2, 2, 2, 3), draw(3, 2, 2, 2), draw(4, 2, 1, 2)
    start = torch.tensor([[[0.1, 0.5]], [[0.7, 0.6]]], dtype=torch.float64)
    drawn = (start + exploration).clamp(max=1)
    graphs = [AttentionGraph.from_dense(torch.tensor(bits).view(2, 1, 2)) for bits in product([0.0, 1.0], repeat=4)]
    first = torch.zeros(2, 1, 2, dtype=torch.bool)
    first[:, :, 0] = forced  # the first key of each head is there in any case
    chance = torch.tensor([eta], dtype=torch.float64)

    def chances(p: Tensor) -> Tensor:
        masks = torch.stack([graph.to_dense().view(2, 1, 2) for graph in graphs]).to(p.dtype)
        return (masks * p + (1 - masks) * (1 - p)).flatten(1).prod(1)

    def out(graph: AttentionGraph) -> Tensor:
        return ops.edge_attention(query, key, value, graph.rows, scale=0.5)[0]

    fixed = torch.where(first, 1.0, drawn)
    mean = torch.zeros_like(start)
    for graph, share in zip(graphs, chances(fixed), strict=True):
        for probes, probe_share in zip(graphs, chances(torch.full_like(start, eta)), strict=True):
            if share * probe_share == 0:
                continue
            p = start.clone().requires_grad_()
            always = first[graph.edge_head, graph.edge_index[1], graph.edge_index[0]]
            got = attach_local_expectation(out(graph), query, key, value, FreeProbability(p), graph, probes, chance,
                                    forced=always, scale=0.5, exploration=exploration)  # fmt: skip
            assert torch.equal(got, out(graph))
            mean += share * probe_share * torch.autograd.grad((got * weight).sum(), p)[0]
    moved = fixed.clone().requires_grad_()
    losses = torch.stack([(out(graph) * weight).sum() for graph in graphs])
    exact = torch.autograd.grad((chances(moved) * losses).sum(), moved)[0]
    if eta == 0 or not forced:  # a probe of a pair that is forced finds it among the edges
        torch.testing.assert_close(mean, torch.where(first, 0, exact), rtol=1e-10, atol=1e-12)
    else:
        torch.testing.assert_close(mean[..., 1:], exact[..., 1:], rtol=1e-10, atol=1e-12)
        assert not mean[..., 0].any()


@pytest.mark.parametrize("exploration", [0.0, 0.1])
def test_free_probabilities_and_factors_of_the_same_numbers_agree(exploration: float) -> None:
    """The fused path, which computes probabilities from factors, against the one that is given them."""
    heads, n, m = 2, 7, 9
    p = (draw(1, heads, n, m).sigmoid() / 2).requires_grad_()
    eye = torch.eye(m, dtype=torch.float64).expand(heads, -1, -1)
    sbm, free = SBM(p, eye, eye), FreeProbability(p)
    graph = AttentionGraph.from_dense((draw(2, heads, n, m) < 0).float())
    query, key, value = draw(3, heads, n, 4), draw(4, heads, m, 4), draw(5, heads, m, 4)
    out, _ = ops.edge_attention(query, key, value, graph.rows)
    probes, chance = draw_probes(graph, 3.0, seed=1)
    forced = torch.arange(graph.num_edges) % 3 == 0
    grads = []
    for probability in (sbm, free):
        got = attach_local_expectation(out, query, key, value, probability, graph, probes, chance, forced=forced,
                                exploration=exploration)  # fmt: skip
        grads.append(torch.autograd.grad((got * draw(6, *got.shape)).sum(), p, retain_graph=True)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)
    assert grads[0].any()
    terms = [torch.autograd.grad(score_function(each, graph, draw(7, 1)), p)[0] for each in (sbm, free)]
    torch.testing.assert_close(*terms)


# ------------------------------------------------------------------ the layer over it


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_trains_a_free_matrix(estimator: str) -> None:
    torch.manual_seed(0)
    conv = AttentionConv(6, 4, 2, FreeSource(2, 9), estimator=estimator)
    x = draw(1, 9, 6, dtype=torch.float32)
    out, choice = conv(x, seed=1, return_choice=True)
    assert out.shape == (9, 8)
    assert (choice.graph.num_edges == 162) == (estimator in ("relaxed", "concrete"))  # all pairs, or a sample
    (out.square().sum() + auxiliary_loss(conv)).backward()
    grad = cast(Any, conv.source).logit.grad
    assert (grad is None) == (estimator == "none")
    if grad is not None:
        assert grad.isfinite().all()
        assert grad.abs().max() > 0
    assert torch.equal(conv(x, seed=1, return_graph=True)[0], out)


@pytest.mark.slow
def test_a_free_matrix_learns_which_token_to_attend_to() -> None:
    """Each query is to return the value of one certain key: the probabilities of all others must fall."""
    torch.manual_seed(0)
    tokens = 8
    conv = AttentionConv(tokens, tokens, 1, FreeSource(1, tokens), estimator=Local(probes=4))
    with torch.no_grad():  # scores say nothing, so that the graph alone decides
        for name in ("lin_query", "lin_key"):
            getattr(conv, name).weight.zero_()
            getattr(conv, name).bias.zero_()
        conv.lin_value.weight.copy_(torch.eye(tokens))
        conv.lin_value.bias.zero_()
    wanted = (torch.arange(tokens) + 3) % tokens
    x = torch.eye(tokens)
    source = cast(FreeSource, conv.source)
    optimizer = torch.optim.Adam([source.logit], lr=0.1)
    for step in range(300):
        optimizer.zero_grad()
        (conv(x, seed=step) - x[wanted]).square().sum().backward()
        optimizer.step()
    p = source.logit.detach().sigmoid()[0]
    assert p[torch.arange(tokens), wanted].min() > 0.8
    assert p.sum(1).max() < 2  # of eight


def test_the_trace_of_a_model_reports_a_source() -> None:
    torch.manual_seed(0)

    def layer(channels: int, head_channels: int, heads: int) -> AttentionConv:
        return AttentionConv(channels, head_channels, heads, FreeSource(heads, 6))

    model = SequenceEncoder(5, 8, num_layers=2, attention=layer)
    _, trace = model(torch.randint(5, (6,)), seed=0, return_trace=True)
    sources: list[Any] = [cast(Any, block).attention.source for block in model.layers]
    by_hand = torch.stack([source.logit.sigmoid().mean((1, 2))[None] for source in sources])
    torch.testing.assert_close(trace.expected_density, by_hand)
    assert trace.density.shape == (2, 1, 2)
    trace.density_loss().backward()
    assert all(source.logit.grad.abs().max() > 0 for source in sources)


def test_a_given_graph_takes_the_place_of_the_source() -> None:
    conv, x = AttentionConv(6, 4, 2, FreeSource(2, 9)), draw(1, 9, 6, dtype=torch.float32)
    graph = patterns.window(9, 1)
    out, choice = conv(x, graph, return_choice=True)
    assert choice.probability is None
    assert choice.graph == graph.expand(2)
    plain = AttentionConv(6, 4, 2)
    plain.load_state_dict({name: p for name, p in conv.state_dict().items() if not name.startswith("source")})
    assert torch.equal(plain(x, graph), out)


def test_later_counts_places_within_sequences() -> None:
    query_ptr, key_ptr = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 5])
    edges = torch.tensor([[0, 2, 3, 4, 3], [0, 1, 2, 2, 4]])
    graph = AttentionGraph.from_edge_index(edges, 5, 5, query_ptr=query_ptr, key_ptr=key_ptr)
    assert dict(zip(map(tuple, graph.edge_index.T.tolist()), graph.later.tolist(), strict=True)) == {
        (0, 0): False, (2, 1): True, (3, 2): False, (4, 2): True, (3, 4): False,
    }  # fmt: skip


# ------------------------------------------------------------------ the records


def test_forced_edges_are_those_of_the_pattern() -> None:
    graph = AttentionGraph.from_dense(torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, 1]]))
    choice = Choice(graph).force(patterns.self_loops(3))
    assert choice.graph.edge_index[:, choice.forced].tolist() == [[0, 1, 2], [0, 1, 2]]
    twice = choice.force(patterns.global_tokens(3, 1))
    assert twice.forced is not None
    assert int(twice.forced.sum()) == 7  # all but those that the graph had by itself
    kept = twice.select(~twice.graph.later)
    assert kept.forced is not None
    assert kept.forced.numel() == kept.graph.num_edges


class Doubtful(GraphSource):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, tokens: Tokens) -> Any:
        return self.answer


def test_a_choice_holds_a_stored_graph() -> None:
    choice = Choice(patterns.window(5, 1))
    assert choice.is_stored is True
    assert choice.stored() is choice


def test_forced_edges_of_one_head_serve_all() -> None:
    class Pattern(GraphSource):
        def forward(self, tokens: Tokens) -> Choice:
            ptr = tokens.query_ptr
            return Choice(patterns.window(None, 1, ptr=ptr)).force(patterns.global_tokens(None, 1, ptr=ptr))

    choice = AttentionConv(4, 4, 3, Pattern())(torch.randn(9, 4), ptr=torch.tensor([0, 4, 9]), return_choice=True)[1]
    ptr = torch.tensor([0, 4, 9])
    wide = patterns.global_tokens(None, 1, ptr=ptr)
    assert choice.graph == (patterns.window(None, 1, ptr=ptr) | wide).expand(3)
    assert choice.graph.select(choice.forced) == wide.expand(3)
    assert choice.expand(3) is choice


def test_errors() -> None:
    x, graph = draw(1, 9, 6, dtype=torch.float32), patterns.full(9)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: AttentionConv(6, 4, source=cast(Any, graph)), TypeError,
         r"Expected 'source' to be a GraphSource \(got Att"),
        (lambda: AttentionConv(6, 4)(x), ValueError,
         r"Expected 'edge_index' \(got None, and the layer has no source\)"),
        (lambda: AttentionConv(6, 4, source=Doubtful(graph))(x), TypeError, "Expected 'source' to return a Choice"),
        (lambda: AttentionConv(6, 4, 3, Doubtful(Choice(graph.expand(2))))(x), ValueError, "have 1 or 3 heads"),
        (lambda: AttentionConv(6, 4, estimator="loud"), ValueError, "Expected 'estimator' to be one of"),
        (lambda: AttentionConv(6, 4, estimator=cast(Any, 3)), TypeError,
         "Expected 'estimator' to be an Estimator or a name"),
        (lambda: AttentionConv(6, 4, causal=True), TypeError, r"AttentionConv got unknown arguments \['causal'\]"),
        (lambda: Choice(cast(Any, x)), TypeError, r"Expected 'graph' to be an AttentionGraph \(got Tensor\)"),
        (lambda: Choice(graph, cast(Any, x)), TypeError,
         r"Expected 'probability' to be an EdgeProbability \(got Tensor\)"),
        (lambda: Choice(graph, forced=torch.ones(3) > 0), ValueError, r"Expected 'forced' to be \[E\] = \[81\]"),
        (lambda: patterns.PatternSource(patterns.window, reach=2), TypeError,
         r"Expected options of 'rule' .*\['reach'\]"),
        (lambda: patterns.PatternSource(patterns.window), TypeError,
         r"Expected 'size' among the options of 'rule' \(got \[\]\)\. Give `size=\.\.\.`"),
        (lambda: cast(Any, GraphSource)(), TypeError, "abstract"),
    ]  # fmt: skip
    for action, error, message in cases:
        with pytest.raises(error, match=message):
            action()


def test_an_estimator_of_ones_own_is_called() -> None:
    calls: list[str] = []

    class Watch(Estimator):
        def attach(self, out: Tensor, attended: Any) -> Tensor:
            calls.append(str(attended.choice.graph))
            return out

    conv, x = AttentionConv(6, 4, 2, FreeSource(2, 9), estimator=Watch()), draw(1, 9, 6, dtype=torch.float32)
    conv(x)
    conv(x, patterns.full(9))  # no probabilities, nothing to estimate
    assert len(calls) == 1


PAIRED: dict[str, Any] = {  # all that takes queries, keys and the offsets of both
    "Tokens": lambda q, k, ptr: Tokens(q, k, query_ptr=ptr[1], key_ptr=ptr[0]),
    "over": lambda q, k, ptr: AttentionGraph.over(torch.tensor([[0], [0]]), q.size(1), k.size(1), ptr=ptr),
    "AttentionConv": lambda q, k, ptr: AttentionConv(
        6, 3, 2, selectors.SelectorSource(selectors.lsh, num_buckets=2, chunk_size=2)
    )((k.transpose(0, 1).flatten(1), q.transpose(0, 1).flatten(1)), ptr=ptr),
}


@pytest.mark.parametrize("name", PAIRED)
def test_queries_and_keys_of_unlike_batches_are_refused(name: str) -> None:
    """Sequence b of the queries attends to sequence b of the keys, so there are as many."""
    query, key = draw(1, 2, 9, 3, dtype=torch.float32), draw(2, 2, 9, 3, dtype=torch.float32)
    two, one = torch.tensor([0, 4, 9]), torch.tensor([0, 9])
    PAIRED[name](query, key, (two, two.clone()))
    ptr = "key_ptr" if name == "Tokens" else "ptr"
    for keys, queries, found in ((two, one, "2 and 1"), (one, two, "1 and 2"), (two, None, "2 and 1")):
        message = rf"'{ptr}' to hold as many sequences of keys as of queries \(got {found}\)"
        with pytest.raises(ValueError, match=message):
            PAIRED[name](query, key, (keys, queries))


RULES: dict[str, Any] = {
    "top_k": lambda tokens: selectors.top_k(tokens, 2),
    "block_top_k": lambda tokens: selectors.block_top_k(tokens, 2, 2),
    "lsh": lambda tokens: selectors.lsh(tokens, 2, 2),
    "routing": lambda tokens: selectors.routing(tokens, torch.ones(2, 3, 3)),
    "bucketing": lambda tokens: predictors.bucketing(tokens, 2),
    "clustering": lambda tokens: predictors.clustering(tokens, torch.ones(2, 3, 3)),
    "distance": lambda tokens: predictors.distance(tokens, 1.0),
    "block_bigbird": lambda tokens: predictors.block_bigbird(tokens, torch.ones(2, 3, 3), 1, 2),
    "ground_truth_graph": lambda tokens: ground_truth.ground_truth_graph(tokens),
    "IndexProbability": lambda tokens: indexer.IndexProbability(
        tokens, *(torch.ones(2, 9, *shape) for shape in ((1, 3), (1,), (3,)))
    ).top_k(2),
    "SBMHead": lambda tokens: SBMHead(3, 2, 4)(tokens),
    "a source": lambda tokens: patterns.PatternSource(patterns.window, size=1)(tokens),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_and_sources_take_tokens_alone(name: str) -> None:
    x = draw(1, 2, 9, 3, dtype=torch.float32)
    RULES[name](Tokens(x, query_ptr=torch.tensor([0, 4, 9])))
    for other in (x, None, (x, x)):
        with pytest.raises(TypeError, match=r"Expected 'tokens' to be Tokens \(got (Tensor|NoneType|tuple)"):
            RULES[name](other)


TRANSFORMED: dict[str, Any] = {
    "block model": lambda: SBMSource(SBMHead(3, heads=2, num_clusters=4)),
    "indexer": lambda: indexer.IndexerSource(indexer.Indexer(3, 2), select="top_k", k=3),
    "key selection": lambda: indexer.IndexerSource(indexer.KeyScorer(3, 2), select="bernoulli", target_density=0.5),
    "routing": lambda: selectors.RoutingSource(3, 2, num_clusters=2),
    "distance": lambda: sparsefinder.SparsefinderSource(
        sparsefinder.Projection(3, 2, 2), predictors.distance, threshold=1.0
    ),
    "pattern": lambda: patterns.PatternSource(patterns.window, size=1),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_any_source_is_a_transform(name: str, is_causal: bool) -> None:
    """The edges of a batch are those that the source chooses for its layer, head by head."""
    torch.manual_seed(0)
    source, sizes = TRANSFORMED[name]().eval(), (5, 9, 4)
    batch = Batch.from_data_list([Data(x=torch.randn(size, 6)) for size in sizes])
    batch.edge_index = torch.tensor([[0, 1], [1, 0]])
    found = AttentionGraph.from_data(SourceGraph(source, heads=2, is_causal=is_causal, seed=7)(batch.clone()), heads=2)
    query = batch.x.unflatten(1, (2, 3)).transpose(0, 1)
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    graph = source(Tokens(query, query_ptr=ptr, is_causal=is_causal, seed=7)).graph
    assert torch.equal(found.to_edge_index()[0], graph.expand(2).to_edge_index()[0])
    assert graph.num_edges > 0
    if is_causal:
        assert not (found.edge_index[0] > found.edge_index[1]).any()


def test_tokens_are_checked_when_they_are_made() -> None:
    x, ptr = draw(1, 2, 9, 3, dtype=torch.float32), torch.tensor([0, 4, 9])
    given: dict[str, Any] = {"query": x, "key": x, "query_ptr": ptr, "key_ptr": ptr, "seed": -1}
    Tokens(**given)
    Tokens(**given | {"query_ptr": ptr.int(), "seed": 2**63 - 1, "sequence_ids": torch.tensor([7, 3])})
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"query_ptr": torch.tensor([0, 2**31, 9])}, ValueError, r"'query_ptr' .* ascending \(got a decrease"),
        ({"query_ptr": torch.tensor([0, -(2**31), 9])}, ValueError, r"'query_ptr' .* ascending \(got a decrease"),
        ({"key_ptr": torch.tensor([0, 4, 2**31])}, ValueError,
         r"'key_ptr' to run from 0 to 9, .* \(got 0 to 2147483648"),
        ({"query_ptr": torch.tensor([0, 4, 20])}, ValueError, r"'query_ptr' to run from 0 to 9, .* \(got 0 to 20\)"),
        ({"key_ptr": torch.tensor([0, 9])}, ValueError, r"'key_ptr' to hold as many sequences .* \(got 1 and 2\)"),
        ({"key": x[:, :5], "key_ptr": None}, ValueError, r"'key_ptr' to run from 0 to 5, .* \(got 0 to 9\)"),
        ({"key_ptr": ptr.double()}, TypeError, r"'key_ptr' to be int64 \(got torch.float64\)"),
        ({"query": x[0]}, ValueError, r"'query' to be \[H, N, C\] = .* \(got \[9, 3\]\)"),
        ({"query": x[:0], "key": x[:0]}, ValueError, r"'query' of at least one head \(got \[0, 9, 3\]"),
        ({"key": x[:1]}, ValueError, r"'key' to be \[H, M, C\] = \[2, any, 3\] \(got \[1, 9, 3\]\)"),
        ({"key": x.double()}, TypeError, r"'key' to be torch.float32, as 'query' is \(got torch.float64\)"),
        ({"key": x.to("meta")}, ValueError, r"'key' on cpu, as 'query' is \(got meta\)"),
        ({"seed": 2**63}, ValueError, r"Expected 'seed' in -2\*\*63 .. 2\*\*63-1"),
        ({"bipartite": False, "key": x[:, :5], "key_ptr": torch.tensor([0, 2, 5])}, ValueError,
         r"'bipartite' to be True if sequences .* \(got False, N = 9, M = 5\). Pass bipartite=True"),
        ({"bipartite": False, "key_ptr": torch.tensor([0, 3, 9])}, ValueError, r"\(got False, N = 9, M = 9\)"),
        ({"sequence_ids": torch.arange(3)}, ValueError, r"Expected 'sequence_ids' to be \[2\] int64"),
    ]  # fmt: skip
    for changed, error, message in cases:
        with pytest.raises(error, match=message):
            Tokens(**given | changed)


def test_tokens_fill_in_what_they_are_not_given() -> None:
    x, y, ptr = draw(1, 2, 9, 3), draw(2, 2, 9, 3), torch.tensor([0, 4, 9])
    alone, pair = Tokens(x, query_ptr=ptr), Tokens(x, y)
    assert (alone.key is x, alone.bipartite, alone.key_ptr is alone.query_ptr) == (True, False, True)
    assert (pair.bipartite, Tokens(x, y, bipartite=False).bipartite, Tokens(x, x).bipartite) == (True, False, False)
    assert pair.query_ptr.tolist() == pair.key_ptr.tolist() == [0, 9]
    ptr[1] = 6  # offsets are a copy
    assert alone.query_ptr.tolist() == [0, 4, 9]


@pytest.mark.parametrize("is_causal", [False, True])
def test_tokens_know_their_positions_and_allowed_keys(is_causal: bool) -> None:
    tokens = Tokens(
        draw(1, 2, 5, 3), draw(2, 2, 4, 3), torch.tensor([0, 2, 5]), torch.tensor([0, 3, 4]), True, is_causal
    )
    for made in (tokens, tokens.with_vectors(draw(3, 2, 5, 1), draw(4, 2, 4, 1)), dataclasses.replace(tokens, seed=3)):
        assert (made.heads, made.num_queries, made.num_keys) == (2, 5, 4)
        assert made.query_sequence.tolist() == [0, 0, 1, 1, 1]
        assert made.key_sequence.tolist() == [0, 0, 0, 1]
        assert made.query_position.tolist() == [0, 1, 0, 1, 2]
        assert made.key_position.tolist() == [0, 1, 2, 0]
        assert made.allowed_keys.tolist() == ([1, 2, 1, 1, 1] if is_causal else [3, 3, 1, 1, 1])
        assert made.first_key.tolist() == [0, 0, 3, 3, 3, 4, 4, 7, 7, 7]


def test_a_layer_refuses_a_graph_over_other_tokens() -> None:
    """Kernels trust a graph: one over more keys than there are would read memory of others."""
    x, y, ptr = torch.randn(9, 4), torch.randn(5, 4), torch.tensor([0, 4, 9])
    conv = AttentionConv(4, 4, source=Doubtful(Choice(patterns.full(9))))
    conv(x)
    refuses(lambda: conv((y, x)), "'source' to return a graph over N = 9 queries and M = 5 keys")
    refuses(lambda: conv(x, ptr=ptr), "and over their sequences (got AttentionGraph(1 sequence, 1 head, 9 q")
    conv.source = patterns.PatternSource(patterns.window, size=1)
    with pytest.raises(ValueError, match=r"'bipartite' to be True .* or a layer a pair .keys, queries.\."):
        conv(x, ptr=(torch.tensor([0, 5, 9]), ptr))  # the rule would know the queries' offsets alone


def test_a_transform_draws_anew_without_a_seed_and_refuses_what_does_not_fit() -> None:
    data = Data(x=torch.randn(30, 4))
    transform = SourceGraph(SBMSource(SBMHead(4, num_clusters=4)))
    torch.manual_seed(0)
    first, second = (transform(data.clone()).edge_index for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(transform(data.clone()).edge_index, first)
    refuses(lambda: SourceGraph(cast(Any, selectors.top_k)), "'source' to be a GraphSource", TypeError)
    refuses(lambda: SourceGraph(transform.source, heads=0), "'heads' to be at least 1")
    refuses(lambda: SourceGraph(transform.source, heads=3)(data), "features `x` [N, H*C] for 3 heads (got [30, 4])")
    assert transform(Data(x=torch.randn(0, 4))).edge_index.shape == (2, 0)
    refuses(lambda: transform(cast(Any, 3)), "'data' to be Data", TypeError)


def test_what_is_forced_of_blocks_is_causal_with_them() -> None:
    """A mask of the edges of blocks, not of tokens."""
    blocks = patterns.full(3)
    forced = torch.zeros(9, dtype=torch.bool).index_fill_(0, torch.tensor([1, 3, 8]), True)  # one of them is later
    choice = Choice(BlockGraph(blocks, 4, query_ptr=torch.tensor([0, 10])), forced=forced).causal()
    assert choice.graph.is_causal
    assert choice.graph.blocks == blocks.causal()
    assert choice.forced is not None
    assert choice.forced.tolist() == [False, True, False, False, False, True]


@pytest.mark.parametrize("is_causal", [False, True])
def test_probabilities_refuse_graphs_over_other_sequences_or_that_are_not_causal(is_causal: bool) -> None:
    x, ptr = draw(1, 2, 9, 4), torch.tensor([0, 4, 9])
    sbm = SBM(x.sigmoid() / 4, x.sigmoid(), query_ptr=ptr, is_causal=is_causal)
    index = indexer.IndexProbability(
        Tokens(x, query_ptr=ptr, is_causal=is_causal), *indexer.Indexer(4, 2).double()(x, x)
    )
    for probability in (sbm, index):
        right = patterns.full(None, ptr=ptr, is_causal=is_causal).expand(2)
        assert probability.on(right).shape == (right.num_edges,)
        for other in (torch.tensor([0, 5, 9]), torch.tensor([0, 9]), torch.tensor([0, 2, 4, 9])):
            with pytest.raises(ValueError, match="Expected 'graph' over the sequences of this"):
                probability.on(patterns.full(None, ptr=other, is_causal=is_causal).expand(2))
        both = patterns.full(None, ptr=ptr).expand(2)
        if is_causal:
            refuses(partial(probability.on, both), "Expected 'graph' to be causal, as this")
        else:
            probability.on(both.causal())


# ------------------------------------------------------------------ NaN


def attention(source: GraphSource | None = None, **options: Any) -> AttentionConv:
    return AttentionConv(8, 4, 2, source, **options)


def predicted(rule: Any, **options: Any) -> AttentionConv:
    return attention(sparsefinder.SparsefinderSource(sparsefinder.Projection(4, 2), rule, **options))


CENTROIDS = draw(5, 2, 3, 4).float()
CHOOSING: dict[str, Callable[[], AttentionConv]] = {
    "top_k": lambda: attention(selectors.TopKSource(k=2)),
    "top_k of a density": lambda: attention(selectors.TopKSource(target_density=0.3)),
    "block_top_k": lambda: attention(selectors.SelectorSource(selectors.block_top_k, k=1, block_size=3)),
    "lsh": lambda: attention(selectors.SelectorSource(selectors.lsh, num_buckets=4, chunk_size=2)),
    "routing": lambda: attention(selectors.RoutingSource(4, 2, 3)),
    "indexer": lambda: attention(indexer.IndexerSource(indexer.Indexer(4, 2), k=2)),
    "indexer that draws": lambda: attention(indexer.IndexerSource(indexer.Indexer(4, 2), select="bernoulli")),
    "indexer of a density": lambda: attention(
        indexer.IndexerSource(indexer.Indexer(4, 2), select="bernoulli", target_density=0.3)
    ),
    "scores of keys": lambda: attention(indexer.IndexerSource(indexer.KeyScorer(4, 2), k=2)),
    "scores of keys that draw": lambda: attention(indexer.IndexerSource(indexer.KeyScorer(4, 2), select="bernoulli")),
    "block model": lambda: attention(SBMSource(SBMHead(4, 2, 3))),
    "block model of a density": lambda: attention(SBMSource(SBMHead(4, 2, 3), target_density=0.3, candidates=2)),
    "distance": lambda: predicted(predictors.distance, threshold=1.0),
    "nearest": lambda: predicted(predictors.distance, threshold=1.0, cap=2),
    "bucketing": lambda: predicted(predictors.bucketing, num_buckets=3),
    "clustering": lambda: predicted(predictors.clustering, centroids=CENTROIDS),
    "capped clustering": lambda: predicted(predictors.clustering, centroids=CENTROIDS, cap=1),
    "BigBird": lambda: predicted(predictors.block_bigbird, centroids=CENTROIDS, k=1, block_size=2),
    "BigBird of centroids": lambda: predicted(
        predictors.block_bigbird, centroids=CENTROIDS, k=1, block_size=2, by="nearest"
    ),
}
RANKED_LATER = ("bucketing", "capped", "BigBird")  # not for causal attention
WRONG = ("query", "key", "tokens", "token", "source")


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CHOOSING)
def test_nan_shows_as_in_dense_attention(name: str, is_causal: bool, wrong: str) -> None:
    """In the sequence that has it, and where attention is causal not before it; or an error names it."""
    if is_causal and name.startswith(RANKED_LATER):
        return
    torch.manual_seed(0)
    conv, x, ptr = CHOOSING[name](), draw(1, 40, 8).float(), torch.tensor([0, 12, 32, 40])
    conv.is_causal, first, last = is_causal, 0, 40
    made = {
        "query": [conv.lin_query.weight],
        "key": [conv.lin_key.weight],
        "source": [*cast(GraphSource, conv.source).parameters()],
    }
    with torch.no_grad():
        for parameter in made.get(wrong, []):
            parameter.fill_(torch.nan)
    if wrong == "tokens":
        x.fill_(torch.nan)
    if wrong == "token":
        x[17] = torch.nan
        first, last = 17 if is_causal else 12, 32
    if wrong == "source" and not made["source"]:
        return
    if wrong == "source" or name.startswith("block model"):
        refuses(lambda: conv(x, ptr=ptr, seed=0), "finite")
        return
    out = conv(x, ptr=ptr, seed=0)
    bad = torch.zeros(40, dtype=torch.bool)
    bad[first:last] = True
    assert bool(out[bad].isnan().all())
    assert bool(out[~bad].isfinite().all())


TOO_LARGE: dict[str, Callable[[int], Any]] = {
    "block model": SBMHead, "communities": lambda size: SBMHead(8, 1, size),
    "free entries": lambda size: SBMHead(8, 1, size // 10**5, parameterization="mixed"),
    "heads": lambda size: SBMHead(8, size), "indexer": indexer.Indexer,
    "small heads": lambda size: indexer.Indexer(8, 1, size), "scores of keys": indexer.KeyScorer,
    "hidden": lambda size: indexer.KeyScorer(8, 1, size), "projection": sparsefinder.Projection,
    "dimensions": lambda size: sparsefinder.Projection(8, 1, size),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LARGE)
def test_modules_that_no_memory_holds_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"Expected '\w+' to ask for no more than memory holds \(got .* parameters"):
        TOO_LARGE[name](10**12)
