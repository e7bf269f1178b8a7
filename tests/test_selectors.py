"""Rules that choose by what tokens hold: each against its definition, pair by pair, in ragged and causal batches."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from problems import LargestStorage, pointer
from problems import draw32 as draw
from torch import Tensor
from torch.nn.functional import normalize
from torch_geometric.data import Batch, Data

from sbm_pyg import (
    AttentionConv,
    AttentionGraph,
    FullAttention,
    SBMHead,
    SBMSource,
    SequenceEncoder,
    SourceGraph,
    Sparsifier,
    Tokens,
)  # fmt: skip
from sbm_pyg.ops import segments, tiles
from sbm_pyg.ops.random_words import head_generator
from sbm_pyg.sources import patterns, selectors
from sbm_pyg.sources.indexer import Indexer, IndexerSource
from sbm_pyg.sources.selectors import RoutingSource, SelectorSource, TopKSource, block_top_k, lsh, routing, top_k

HEADS, CHANNELS = 2, 6
LENGTHS = [([9], [9]), ([1, 7, 12, 3], [1, 7, 12, 3]), ([5, 2, 9], [8, 11, 4]), ([40, 3], [2, 6])]
CENTROIDS = torch.randn(HEADS, 3, CHANNELS, generator=torch.Generator().manual_seed(5))
Rule = Callable[..., AttentionGraph]


# ------------------------------------------------------------------ definitions: one head of one sequence, to sets of keys


def best(scores: list[float], k: int) -> set[int]:
    """The k largest, equal ones by the lower place."""
    return set(sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:k])


def define_top_k(q: Tensor, z: Tensor, head: int, is_causal: bool, k: int) -> list[set[int]]:
    scores = (q @ z.T).tolist()
    return [best(row[: i + 1] if is_causal else row, k) for i, row in enumerate(scores)]


def define_block_top_k(
    q: Tensor, z: Tensor, head: int, is_causal: bool, k: int, block_size: int, is_pair: bool
) -> list[set[int]]:
    blocks, rows = [*range(0, len(z), block_size)], []
    for i in range(len(q)):
        gates = []
        for start in blocks:
            inside = start <= i < start + block_size and (is_causal or not is_pair)
            gates.append(float("inf") if inside else float(q[i] @ z[start : start + block_size].mean(0)))
        open_blocks = [b for b, start in enumerate(blocks) if not is_causal or start <= i]
        chosen = best([gates[b] for b in open_blocks], k)
        keys = {j for b in chosen for j in range(blocks[b], min(blocks[b] + block_size, len(z)))}
        rows.append({j for j in keys if j <= i or not is_causal})
    return rows


def define_lsh(
    q: Tensor, z: Tensor, head: int, is_causal: bool, num_buckets: int, chunk_size: int, rounds: int
) -> list[set[int]]:
    random, rows = head_generator(head, 3), [set[int]() for _ in q]
    for _ in range(rounds):
        matrix = torch.randn(CHANNELS, num_buckets // 2, generator=random)
        mine, theirs = (torch.cat([x @ matrix, -x @ matrix], 1).argmax(1).tolist() for x in (q, z))
        for i, bucket in enumerate(mine):
            if is_causal:
                members = [j for j, other in enumerate(theirs) if other == bucket]
                chunk = sum(j < i for j in members) // chunk_size
                rows[i] |= {j for rank, j in enumerate(members) if j <= i and rank // chunk_size in (chunk - 1, chunk)}
            else:
                order = sorted(range(len(z)), key=lambda j: (theirs[j], j))
                rank = min(sum((theirs[j], j) < (bucket, i) for j in order), len(z) - 1)
                chunk = rank // chunk_size
                rows[i] |= {
                    j
                    for place, j in enumerate(order)
                    if theirs[j] == bucket and place // chunk_size in (chunk - 1, chunk)
                }
    return rows


def define_routing(q: Tensor, z: Tensor, head: int, is_causal: bool, size: int | None = None) -> list[set[int]]:
    near = [(normalize(x, dim=1) @ normalize(CENTROIDS[head], dim=1).T) for x in (q, z)]
    if is_causal:
        mine, seen = near[0].argmax(1).tolist(), [near[1][: i + 1] for i in range(len(q))]
        counts = [-(-len(x) // 3) if size is None else size for x in seen]
        return [best(x[:, c].tolist(), count) for x, c, count in zip(seen, mine, counts, strict=True)]
    found = [set[int]() for _ in q]
    for centroid in range(len(CENTROIDS[head])):
        taken = [best(x[:, centroid].tolist(), -(-len(x) // 3) if size is None else size) for x in near]
        for i in taken[0]:
            found[i] |= taken[1]
    return found


CASES: dict[str, tuple[Rule, Callable[..., list[set[int]]], dict[str, Any], dict[str, Any]]] = {
    "top_k 1": (top_k, define_top_k, {"k": 1}, {}),
    "top_k 4": (top_k, define_top_k, {"k": 4}, {}),
    "block_top_k 2 of 2": (block_top_k, define_block_top_k, {"k": 2, "block_size": 2}, {}),
    "block_top_k 3 of 3": (block_top_k, define_block_top_k, {"k": 3, "block_size": 3}, {}),
    "block_top_k 1 of 5": (block_top_k, define_block_top_k, {"k": 1, "block_size": 5}, {}),
    "lsh": (lsh, define_lsh, {"num_buckets": 4, "chunk_size": 2, "rounds": 1}, {}),
    "lsh of three rounds": (lsh, define_lsh, {"num_buckets": 2, "chunk_size": 3, "rounds": 3}, {}),
    "routing": (routing, define_routing, {}, {"centroids": CENTROIDS}),
    "routing of two": (routing, define_routing, {"size": 2}, {"centroids": CENTROIDS}),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", LENGTHS, ids=["one sequence", "ragged", "cross", "few keys"])
@pytest.mark.parametrize("name", CASES)
def test_rules_are_their_definitions(
    name: str, sizes: tuple[list[int], list[int]], is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, define, options, more = CASES[name]
    ptr, key_ptr = map(pointer, sizes)
    q, z = draw(1, HEADS, sum(sizes[0]), CHANNELS), draw(2, HEADS, sum(sizes[1]), CHANNELS)
    tokens = Tokens(q, z, ptr, key_ptr, bipartite=sizes[0] != sizes[1], is_causal=is_causal, seed=3)
    expected = torch.zeros(HEADS, q.size(1), z.size(1), dtype=torch.bool)
    for head, b in itertools.product(range(HEADS), range(len(sizes[0]))):
        start, first = int(ptr[b]), int(key_ptr[b])
        both = q[head, start : ptr[b + 1]], z[head, first : key_ptr[b + 1]]
        own = {"is_pair": tokens.bipartite} if rule is block_top_k else {}
        rows = define(*both, head, is_causal, **options, **own)
        for i, keys in enumerate(rows):
            expected[head, start + i, [first + j for j in keys]] = True
    for chunk in (2**23, 40):  # all rows of all sequences at once, and few of sequences of similar length
        monkeypatch.setitem(tiles.SCORES_PER_TILE, "cpu", chunk)
        monkeypatch.setattr(segments, "FEW_PAIRS", 1000 if chunk > 40 else 0)
        monkeypatch.setattr(selectors, "LEAST_BLOCK", chunk % 37)  # blocks of five keys, and of three
        graph = rule(tokens, **options, **more).validate()
        found = torch.zeros_like(expected)
        found[graph.edge_head, graph.edge_index[1], graph.edge_index[0]] = True
        assert torch.equal(found, expected)
        assert graph.num_edges == int(expected.sum()) > 0
        assert graph.is_causal is is_causal


def test_equal_scores_go_to_the_lower_key_and_nan_counts_as_infinity() -> None:
    q = torch.ones(1, 2, 1)
    z = torch.tensor([2.0, torch.nan, 3, 2, 2, -torch.inf]).view(1, 6, 1)
    assert top_k(Tokens(q, z), 3).to_dense()[0, 0].int().tolist() == [1, 1, 1, 0, 0, 0]
    assert top_k(Tokens(q, z), 9).to_dense()[0, 0].int().tolist() == [1] * 6
    assert top_k(Tokens(q * torch.nan, z), 3).to_dense()[0, 1].int().tolist() == [1, 1, 1, 0, 0, 0]
    assert (
        block_top_k(Tokens(q, z[:, [0, 3, 4, 0, 3, 4]], bipartite=True), 2, 2).to_dense()[0, 1].tolist()
        == [True] * 4 + [False] * 2
    )
    many = torch.randint(0, 3, (2, 50, 3), generator=torch.Generator().manual_seed(0)).float()
    graph = top_k(Tokens(many), 7)
    for head, i in itertools.product(range(2), range(50)):
        row = graph.head(head).to_dense()[0, i].nonzero()[:, 0].tolist()
        assert set(row) == best((many[head] @ many[head, i]).tolist(), 7)


def test_tokens_without_channels_have_equal_scores() -> None:
    assert top_k(Tokens(torch.ones(2, 4, 0)), 2).to_dense().int().tolist() == [[[1, 1, 0, 0]] * 4] * 2


def test_a_block_is_chosen_in_cross_attention_by_its_mean_alone() -> None:
    q, z = torch.ones(1, 4, 1), torch.tensor([0.0, 0, 9, 9, 1, 1]).view(1, 6, 1)
    graph = block_top_k(Tokens(q, z, bipartite=True), 1, 2)
    assert graph.to_dense()[0].int().tolist() == [[0, 0, 1, 1, 0, 0]] * 4
    same = block_top_k(Tokens(q, z[:, :4], bipartite=False), 1, 2)
    assert same.to_dense()[0, 0].int().tolist() == [1, 1, 0, 0]  # the block at its own place


@pytest.mark.parametrize("worst", [torch.nan, torch.inf, -torch.inf])
def test_the_block_at_its_own_place_is_chosen_whatever_tokens_hold(worst: float) -> None:
    x = draw(0, 2, 12, 4)
    plain = block_top_k(Tokens(x, is_causal=True), 1, 4)
    for at in (3, 7, 11):  # a later token of the block, to most of its queries
        changed = x.clone()
        changed[:, at] = worst
        found = block_top_k(Tokens(x, changed, bipartite=False, is_causal=True), 1, 4).to_dense()
        wanted, later = plain.to_dense(), slice(at + 1, None)
        if worst != worst:  # which shows in all later queries
            wanted[:, later, at - 3 : at + 1] = True
        else:  # whose scores may be NaN as well
            wanted[:, later, at - 3 : at + 1] |= found[:, later, at - 3 : at + 1]
        assert torch.equal(found, wanted)
        assert block_top_k(Tokens(x, changed, bipartite=False), 1, 4).contains(patterns.self_loops(12).edge_index).all()


@pytest.mark.parametrize("worst", [torch.nan, torch.inf])
def test_centroids_take_tokens_without_a_direction_last_and_no_others(worst: float) -> None:
    x, ptr = draw(0, HEADS, 15, CHANNELS), pointer([7, 8])
    x[:, [2, 9, 10]] = worst
    tokens = Tokens(x, query_ptr=ptr)
    assert routing(tokens, CENTROIDS, size=8).validate() == patterns.full(15, ptr=ptr, heads=HEADS)
    few = routing(tokens, CENTROIDS, size=5).validate()
    kept = {(2, 2), (9, 9)} | {(2, query) for query in range(7)} | {(9, query) for query in range(7, 15)}
    assert {(key, query) for key, query in few.edge_index.T.tolist() if {key, query} & {2, 9, 10}} == kept | {(9, 10)}


@pytest.mark.parametrize("forced", [{"window": 1}, {"window": 1, "num_sinks": 2}, {"num_sinks": 3}])
def test_a_window_and_sinks_stand_beside_a_rule(forced: dict[str, Any]) -> None:
    x, ptr = draw(1, 2, 20, 4), torch.tensor([0, 8, 20])
    first = patterns.global_tokens(None, forced.get("num_sinks", 0), is_causal=True, ptr=ptr)
    near = first | patterns.window(None, 1, is_causal=True, ptr=ptr) if "window" in forced else first
    chosen: tuple[Any, ...] = (
        SelectorSource(top_k, k=2, **forced), RoutingSource(4, 2, 3, **forced).eval(), TopKSource(2, **forced),
        IndexerSource(Indexer(4, 2), k=2, **forced), SBMSource(SBMHead(4, 2, 3), **{"window": None, **forced}).eval(),
    )  # fmt: skip
    for source in chosen:
        alone = copy.deepcopy(source)
        alone.window, alone.num_sinks = None, 0
        with_it, without = (each(Tokens(x, query_ptr=ptr, is_causal=True)).graph for each in (source, alone))
        assert with_it == without | near
        assert with_it != without
        assert all(f"{name}={value}" in repr(source) for name, value in forced.items())
        pair = Tokens(x, query_ptr=ptr, bipartite=True)
        assert source(pair).graph == alone(pair).graph
    with pytest.raises(ValueError, match="Expected 'window' to be at least 0"):
        SelectorSource(top_k, k=2, window=-1)
    with pytest.raises(ValueError, match="Expected 'num_sinks' to be at least 0"):
        TopKSource(2, num_sinks=-1)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_ranks_keep_a_part_of_the_keys_of_each_query(lengths: tuple[list[int], list[int]], is_causal: bool) -> None:
    query_ptr, key_ptr = (pointer(each) for each in lengths)
    q, z = (draw(seed, HEADS, sum(each), CHANNELS) for seed, each in enumerate(lengths))
    tokens = Tokens(q, z, query_ptr, key_ptr, bipartite=True, is_causal=is_causal)
    for density in (0.05, 0.3):
        graph = TopKSource(target_density=density)(tokens).graph.validate()
        count = [max(1, math.ceil(density * n - 1e-9)) for n in tokens.allowed_keys.tolist()]
        assert graph == top_k(tokens, torch.tensor(count))
        assert graph.degree.view(HEADS, -1).tolist() == [count] * HEADS
    assert TopKSource(2)(tokens).graph == top_k(tokens, 2)


def test_heads_have_densities_of_their_own() -> None:
    tokens, budgets = Tokens(draw(0, 2, 40, 4), query_ptr=torch.tensor([0, 10, 40])), torch.tensor([0.5, 3.0])
    ranks, indexer = TopKSource(target_density=0.2), IndexerSource(Indexer(4, 2), target_density=0.2)
    for source in (ranks, indexer):
        source.head_budgets = budgets
        assert source(tokens).graph.density[0].tolist() == pytest.approx([0.1, 0.6])
        source.head_budgets = 9 * budgets
        torch.testing.assert_close(
            source(tokens).graph.density, torch.tensor([[0.9, 1.0], [0.9, 1.0]], dtype=torch.float64)
        )
        loaded = copy.deepcopy(source)
        loaded.head_budgets = None
        loaded.load_state_dict(source.state_dict())
        assert loaded(tokens).graph == source(tokens).graph
    drawn = IndexerSource(Indexer(4, 2), select="bernoulli", target_density=0.2)
    drawn.head_budgets = budgets
    expected = drawn.predict(tokens).expected_density()
    torch.testing.assert_close(expected, torch.tensor([[0.1, 0.6], [0.1, 0.6]]))


@pytest.mark.parametrize("make", [TopKSource, partial(IndexerSource, Indexer(4))])
def test_a_loaded_state_decides_between_a_number_of_keys_and_a_density(make: Callable[..., Any]) -> None:
    tokens = Tokens(draw(1, 1, 20, 4))
    for saved, density in ((make(k=3), None), (make(k=3, target_density=0.5), 0.5)):
        for other in (make(k=3), make(k=3, target_density=0.3)):
            other.load_state_dict(saved.state_dict())
            assert other.target_density == density
            assert other(tokens).graph.num_edges == 20 * (3 if density is None else 10)
    with pytest.raises(ValueError, match=r"'target_density' to be a number in \(0, 1\] without a 'k'"):
        make(target_density=0.3).load_state_dict(make(k=3).state_dict())
    assert make(k=3).load_state_dict(saved.state_dict()).missing_keys == []


def test_attention_to_the_largest_scores_begins_dense_and_a_sparsifier_makes_it_sparse() -> None:
    torch.manual_seed(0)
    conv = AttentionConv(8, 4, HEADS, TopKSource(), is_causal=True)
    dense = FullAttention(8, 4, HEADS, is_causal=True)
    dense.load_state_dict({key: value for key, value in conv.state_dict().items() if "source" not in key})
    x, ptr = draw(2, 40, 8), torch.tensor([0, 15, 40])
    torch.testing.assert_close(conv(x, ptr=ptr), dense(x, ptr=ptr), rtol=0, atol=1e-5)
    sparsifier = Sparsifier(conv, density=0.2, total_steps=10, trial_interval=2)
    optimizer, found = torch.optim.SGD(conv.parameters(), 0.1), []
    for _ in range(10):
        out, choice = conv(x, ptr=ptr, return_choice=True)
        found.append(float(choice.density.mean()))
        loss = (out - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sparsifier.step(loss)
    trials, ends = found[1:7:2], found[7:]
    assert found[:7:2] == [1.0] * 4
    assert all(0.2 < each < 0.3 for each in trials + ends)  # at least one key of a few
    again = TopKSource()
    again.load_state_dict(cast(TopKSource, conv.source).state_dict())
    assert again.target_density == 0.2
    assert repr(again) == "TopKSource(target_density=0.2)"


def test_all_scores_give_the_gradients_of_dense_attention() -> None:
    """A target density just below 1 keeps all pairs, as a graph."""
    torch.manual_seed(0)
    conv = AttentionConv(8, 4, HEADS, TopKSource(target_density=0.999), is_causal=True).double()
    dense = FullAttention(8, 4, HEADS, is_causal=True).double()
    dense.load_state_dict({key: value for key, value in conv.state_dict().items() if "source" not in key})
    x, found = draw(2, 40, 8).double(), []
    for layer in (conv, dense):
        out = layer(x, ptr=torch.tensor([0, 15, 40]))
        out.square().sum().backward()
        found.append([out, *(p.grad for _, p in sorted(layer.named_parameters()))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


SOURCES: dict[str, Callable[[], Any]] = {
    "top_k": lambda: SelectorSource(top_k, k=3), "block_top_k": lambda: SelectorSource(block_top_k, k=2, block_size=3),
    "lsh": lambda: SelectorSource(lsh, num_buckets=4, chunk_size=3, rounds=2), "routing": lambda: RoutingSource(4, 2, 3),
    "routing of three": lambda: RoutingSource(4, 2, 3, size=3),
}  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_a_sequence_has_one_graph_in_any_batch_and_layers_train_over_it(name: str, is_causal: bool) -> None:
    torch.manual_seed(0)
    conv = AttentionConv(8, 4, 2, SOURCES[name](), is_causal=is_causal).eval()
    x = draw(1, 40, 8).requires_grad_()
    both = conv(x, ptr=torch.tensor([0, 17, 40]), seed=4, return_graph=True)[1]
    assert both.sequence(1) == conv(x[17:], seed=4, return_graph=True)[1]
    conv.train()(x, ptr=torch.tensor([0, 17, 40]), seed=4).square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0


def test_centroids_follow_the_tokens_in_training_alone() -> None:
    source = RoutingSource(4, 1, 2, decay=0.5)
    where = normalize(torch.tensor([[1.0, 0.2, 0, 0], [0, 0, 1, 0.5]]), dim=1)
    tokens, ptr = where.repeat(20, 1)[None], torch.tensor([0, 40])
    with torch.no_grad():
        source.centroids.copy_(torch.tensor([[[1.0, 1, 0, 0], [0, 0, 1, 1]]]))
    start = source.centroids.clone()
    source.eval()(Tokens(tokens, query_ptr=ptr))
    assert torch.equal(source.centroids, start)
    for seed in range(30):
        source.train()(Tokens(tokens, query_ptr=ptr, seed=seed))
    torch.testing.assert_close(source.centroids[0], where, rtol=1e-4, atol=1e-4)
    lone = RoutingSource(4, 1, 3)
    with torch.no_grad():
        lone.centroids.copy_(torch.cat([where, -where[:1]])[None])
    for seed in range(2):
        lone(Tokens(tokens, query_ptr=ptr, seed=seed))
    torch.testing.assert_close(lone.centroids[0, 2], -where[0])  # nobody is near it
    assert "centroids" in lone.state_dict()


def test_memory_grows_with_the_edges_and_not_with_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of more than a few million numbers is made for 2^17 tokens, whose pairs are 2^34."""
    n = 2**14
    x = draw(0, 1, n, 4)
    with LargestStorage() as largest:
        block_top_k(Tokens(x, is_causal=True), 2, 2**9)
        lsh(Tokens(x, seed=0), 2**7, 2**6)
        routing(Tokens(x), draw(1, 1, 2**7, 4))
    assert largest.size < 8 * n * 2**11  # bytes; a mask of all pairs alone has 2^28
    monkeypatch.setitem(tiles.SCORES_PER_TILE, "cpu", 2**20)
    with LargestStorage() as largest:
        top_k(Tokens(x[:, : 2**12], x, query_ptr=torch.tensor([0, 2**12]), key_ptr=torch.tensor([0, n])), 4)
    assert largest.size <= 8 * 2**20


def test_encoders_and_transforms_take_the_rules() -> None:
    for name, options in (
        ("top_k", {"k": 3}), ("block_top_k", {"k": 2, "block_size": 4}),
        ("lsh", {"num_buckets": 4, "chunk_size": 4, "rounds": 2}), ("routing", {"num_clusters": 3}),
    ):  # fmt: skip
        encoder = SequenceEncoder(9, 8, attention=name, attention_options=options, is_causal=True)
        out, trace = encoder(torch.randint(9, (30,)), torch.tensor([0, 12, 30]), seed=0, return_trace=True)
        assert out.shape == (30, 8)
        assert trace.choices[0].graph.is_causal
        assert trace.density.shape == (2, 2, 2)
    data = [Data(x=draw(seed, 5 + seed, 3)) for seed in range(3)]
    transform = SourceGraph(SelectorSource(top_k, k=2))
    batch = transform(Batch.from_data_list(data))
    assert batch.num_edges == 2 * batch.num_nodes
    for one, part in zip(data, batch.to_data_list(), strict=True):
        assert torch.equal(transform(one).edge_index, part.edge_index)
    assert repr(transform) == "SourceGraph(SelectorSource(top_k, k=2))"


X = torch.ones(2, 5, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: top_k(Tokens(X), 0), ValueError, r"Expected 'k' to be at least 1 \(got 0\)"),
        (lambda: top_k(Tokens(X.to("meta")), 2), ValueError, "Expected 'query' to hold values"),
        (lambda: top_k(Tokens(X), torch.ones(5)), TypeError, r"Expected 'k' to be int64 \(got torch.float32\)"),
        (lambda: top_k(Tokens(X), torch.ones(4, dtype=torch.int64)), ValueError, r"Expected 'k' to be one number, \[N\] = \[5\] or \[H, N\] = \[2, 5\] \(got \[4\]\)"),
        (lambda: lsh(Tokens(X), 3, 2), ValueError, r"Expected 'num_buckets' to be even \(got 3\)"),
        (lambda: lsh(Tokens(X), 4, 2, rounds=2**40), ValueError, "Expected 'rounds'"),
        (lambda: routing(Tokens(X), torch.ones(3, 2, 3)), ValueError, r"Expected 'centroids' to be \[2, K, C\] or"),
        (lambda: routing(Tokens(X), torch.ones(2, 2, 4)), ValueError, r"Expected 'centroids' to be \[H, K, C\]"),
        (lambda: RoutingSource(4, decay=2), ValueError, r"Expected 'decay' in \[0, 1\] \(got 2\)"),
        (lambda: SelectorSource(top_k, size=3), TypeError, r"Expected options of 'rule' \(got \['size'\]\)"),
        (lambda: SelectorSource(top_k, window=1), TypeError, r"Expected 'k' among the options of 'rule' \(got \[\]\)"),
        (lambda: SelectorSource(routing, size=2), TypeError, r"Expected 'centroids' among the options of 'rule'"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_causal_query_has_a_block_of_its_own_among_other_tokens_too() -> None:
    """The block at its place, and with k=1 no other; else it has none where queries and keys are different tokens."""
    query, key = draw(1, HEADS, 8, CHANNELS), draw(2, HEADS, 8, CHANNELS)
    graph = block_top_k(Tokens(query, key, bipartite=True, is_causal=True), 1, 2)
    place = torch.arange(8)
    wanted = (place[:, None] // 2 == place // 2) & (place <= place[:, None])
    assert torch.equal(graph.to_dense(), wanted.expand(HEADS, -1, -1))
    assert not torch.equal(block_top_k(Tokens(query, key, bipartite=True), 1, 2).causal().to_dense(), graph.to_dense())


def test_a_centroid_without_tokens_stays_where_it_is() -> None:
    """Even where batches leave nothing of what it was."""
    source, x, ptr = RoutingSource(2, num_clusters=2, decay=0.0), torch.tensor([[[2.0, 0.1], [1.0, 0.0]]]), pointer([2])
    start = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    source.centroids.copy_(start)
    for seed in range(2):
        source(Tokens(x, query_ptr=ptr, seed=seed))
    assert torch.equal(source.centroids[0, 1], start[0, 1])
    assert not torch.equal(source.centroids[0, 0], start[0, 0])


@pytest.mark.parametrize("size", [1, 20])
def test_equal_keys_of_a_long_causal_sequence_are_taken_in_their_order(size: int) -> None:
    x = torch.ones(1, 3000, 2)
    graph = routing(Tokens(x, is_causal=True), torch.ones(1, 1, 2), size)
    assert torch.equal(graph.degree[0], torch.arange(1, 3001).clamp(max=size))
    assert torch.equal(graph.col.long(), torch.cat([torch.arange(min(each, size)) for each in range(1, 3001)]))


def test_sources_of_one_tensor_load_centroids_of_their_own() -> None:
    """As the layers of a new model, before it takes the centroids of each from a file."""
    sources = [SelectorSource(routing, centroids=draw(seed, HEADS, 3, CHANNELS)) for seed in range(2)]
    start = torch.zeros(HEADS, 3, CHANNELS)
    again = [SelectorSource(routing, centroids=start) for _ in sources]
    for source, other in zip(sources, again, strict=True):
        other.load_state_dict(source.state_dict())
    tokens = Tokens(draw(2, HEADS, 30, CHANNELS))
    assert all(source(tokens).graph == other(tokens).graph for source, other in zip(sources, again, strict=True))
    assert not bool(start.any())


def test_k_may_be_a_tensor_of_one_number() -> None:
    tokens = Tokens(torch.randn(2, 10, 4))
    assert selectors.top_k(tokens, torch.tensor(3)) == selectors.top_k(tokens, 3)
    assert selectors.SelectorSource(selectors.top_k, k=torch.tensor(3))(tokens).graph == selectors.top_k(tokens, 3)
