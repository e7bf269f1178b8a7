"""Choosers that learn: scores, probabilities and graphs against dense definitions, and what trains them."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from problems import LargestStorage, draw, pointer
from problems import dense_mask as dense
from scipy.stats import chisquare
from torch import Tensor, nn

from sbm_pyg import AttentionConv, AttentionGraph, Choice, GraphSource, SequenceEncoder, Tokens, auxiliary_loss
from sbm_pyg.ops import tiles
from sbm_pyg.ops.random_words import BERNOULLI_BYTE, BERNOULLI_REST, philox
from sbm_pyg.ops.reference.sampling import bernoulli_draws
from sbm_pyg.sources import pairs, patterns
from sbm_pyg.sources.indexer import Indexer, IndexerSource, IndexProbability, KeyScorer
from sbm_pyg.training.estimators import Imitate
from sbm_pyg.training.gradients import distillation, draw_probes

HEADS, CHANNELS = 2, 5
SIZES = [([9], [9]), ([1, 7, 12, 3], [1, 7, 12, 3]), ([5, 2, 9], [8, 11, 4])]
SCORERS: dict[str, Callable[[], nn.Module]] = {
    "indexer": lambda: Indexer(CHANNELS, HEADS, index_heads=3, index_channels=4),
    "keys": lambda: KeyScorer(CHANNELS, HEADS, hidden=6),
}
each_scorer = pytest.mark.parametrize("scorer", SCORERS)
each_size = pytest.mark.parametrize("sizes", SIZES, ids=["one sequence", "ragged", "cross"])
each_causal = pytest.mark.parametrize("is_causal", [False, True])


def make(scorer: str) -> nn.Module:
    torch.manual_seed(0)
    return SCORERS[scorer]().double()


def define(scorer: nn.Module, q: Tensor, z: Tensor) -> Tensor:
    """Scores of all pairs, ``[H, N, M]``, as the docstrings have them."""
    if isinstance(scorer, KeyScorer):
        u = torch.relu(z @ scorer.weight + scorer.bias) @ scorer.out_weight
        return u.mT.expand(-1, q.size(1), -1)
    assert isinstance(scorer, Indexer)
    small = (q @ scorer.query_weight).unflatten(2, (3, 4)) / 2
    products = torch.einsum("hnsd,hmd->hnms", small, z @ scorer.key_weight)
    return (products.relu() * (q @ scorer.head_weight + scorer.head_bias)[:, :, None]).sum(3)


def allowed(ptr: Tensor, key_ptr: Tensor, is_causal: bool) -> Tensor:
    """Pairs within a sequence, ``[N, M]``, no later key in a causal graph."""
    mask = torch.zeros(int(ptr[-1]), int(key_ptr[-1]), dtype=torch.bool)
    for (start, end), (first, last) in zip(itertools.pairwise(ptr), itertools.pairwise(key_ptr), strict=True):
        block = torch.ones(int(end - start), int(last - first), dtype=torch.bool)
        mask[start:end, first:last] = block.tril() if is_causal else block
    return mask


def probabilities(
    scorer: str, sizes: tuple[list[int], list[int]], is_causal: bool, apart: bool
) -> tuple[IndexProbability, Tensor, Tensor]:
    """The record, and densely its scores and probabilities, with gradients to what was drawn."""
    module, (ptr, key_ptr) = make(scorer), map(pointer, sizes)
    q, z = draw(1, HEADS, sum(sizes[0]), CHANNELS), draw(2, HEADS, sum(sizes[1]), CHANNELS)
    degree = None if apart else torch.linspace(0.5, 3, q.size(1), dtype=torch.float64)
    bias = torch.tensor([0.3, -1.0], dtype=torch.float64) if apart else None
    given = IndexProbability(Tokens(q, z, ptr, key_ptr, is_causal=is_causal), *module(q, z), degree=degree, bias=bias)
    mask, scores = allowed(ptr, key_ptr, is_causal), define(module, q, z)
    if degree is None or bias is not None:
        p = torch.sigmoid(scores + bias[:, None, None]) * mask  # type: ignore[index]
    else:
        p = scores.masked_fill(~mask, -torch.inf).softmax(2) * degree[:, None]
    return given, scores, p


@each_scorer
@each_size
@each_causal
@pytest.mark.parametrize("apart", [False, True])
def test_probabilities_are_their_definition(
    scorer: str, sizes: tuple[list[int], list[int]], is_causal: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chunk in (2**23, 40):  # all rows at once, and few
        monkeypatch.setitem(tiles.SCORES_PER_TILE, "cpu", chunk)
        given, scores, p = probabilities(scorer, sizes, is_causal, apart)
        ptr, key_ptr = map(pointer, sizes)
        every, _ = draw_probes(given.top_k(1), torch.inf, seed=0)
        at = (every.edge_head, every.edge_index[1], every.edge_index[0])
        assert every.num_edges == HEADS * int(allowed(ptr, key_ptr, is_causal).sum())
        torch.testing.assert_close(given.score(every), scores[at], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(given.on(every), p[at], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(given.expected_degree(), p.sum(2), rtol=1e-10, atol=1e-10)
        for b, ((start, end), (first, last)) in enumerate(
            zip(itertools.pairwise(ptr), itertools.pairwise(key_ptr), strict=True)
        ):
            count = allowed(ptr, key_ptr, is_causal)[start:end, first:last].sum()
            expected = p[:, start:end, first:last].sum((1, 2)) / count
            torch.testing.assert_close(given.expected_density()[b], expected, rtol=1e-10, atol=1e-10)


@each_scorer
@pytest.mark.parametrize("apart", [False, True])
def test_gradients_are_those_of_the_dense_definition(scorer: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles.SCORES_PER_TILE, "cpu", 40)  # parts, computed anew in the backward pass
    module, ptr, key_ptr = make(scorer), pointer([5, 2, 9]), pointer([8, 11, 4])
    q, z = draw(1, HEADS, 16, CHANNELS).requires_grad_(), draw(2, HEADS, 23, CHANNELS).requires_grad_()
    degree = None if apart else torch.linspace(0.5, 3, 16, dtype=torch.float64)
    given = IndexProbability(Tokens(q, z, ptr, key_ptr, is_causal=True), *module(q, z), degree=degree)
    graph = given.top_k(2)
    weight = draw(3, graph.num_edges)
    inputs = [q, z, *module.parameters()]
    found = torch.autograd.grad(
        (given.on(graph) * weight).sum() + given.expected_density().square().sum(), inputs, allow_unused=True
    )
    mask, scores = allowed(ptr, key_ptr, True), define(module, q, z)
    p = (
        scores.sigmoid() * mask
        if degree is None
        else scores.masked_fill(~mask, -torch.inf).softmax(2) * degree[:, None]
    )
    at = (graph.edge_head, graph.edge_index[1], graph.edge_index[0])
    sums = torch.stack([p[:, ptr[b] : ptr[b + 1], key_ptr[b] : key_ptr[b + 1]].sum((1, 2)) for b in range(3)])
    count = torch.stack([mask[ptr[b] : ptr[b + 1], key_ptr[b] : key_ptr[b + 1]].sum() for b in range(3)])
    expected = torch.autograd.grad(
        (p[at] * weight).sum() + (sums / count[:, None]).square().sum(), inputs, allow_unused=True
    )
    assert any(each is not None and each.abs().max() > 1e-3 for each in expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            torch.zeros(1) if one is None else one, torch.zeros(1) if other is None else other, rtol=1e-9, atol=1e-10,
            check_dtype=False,
        )  # fmt: skip


@each_scorer
@each_size
@each_causal
def test_top_k_takes_the_largest_scores(scorer: str, sizes: tuple[list[int], list[int]], is_causal: bool) -> None:
    given, scores, _ = probabilities(scorer, sizes, is_causal, apart=True)
    ptr, key_ptr = map(pointer, sizes)
    mask, ranked = allowed(ptr, key_ptr, is_causal), scores.detach().tolist()
    count = 1 + torch.arange(len(mask)) % 4
    for k in (3, count):
        found = dense(given.top_k(k).validate())
        for head, i in itertools.product(range(HEADS), range(len(mask))):
            keys = mask[i].nonzero()[:, 0].tolist()
            most = 3 if isinstance(k, int) else int(count[i])
            best = sorted(keys, key=lambda j: (-ranked[head][i][j], j))[:most]
            assert found[head, i].nonzero()[:, 0].tolist() == sorted(best)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("exploration", [0.0, 0.1])
def test_each_pair_is_a_coin_of_its_own(apart: bool, exploration: float) -> None:
    """Two queries and two keys: how often each of the 16 graphs comes, over 4,000 sequences."""
    count, module = 4000, make("indexer")
    q, z = draw(1, HEADS, 2, CHANNELS), draw(2, HEADS, 2, CHANNELS)
    ptr = torch.arange(count + 1) * 2
    tokens = Tokens(q.repeat(1, count, 1), z.repeat(1, count, 1), ptr)
    degree = None if apart else torch.full((2 * count,), 0.8, dtype=torch.float64)
    given = IndexProbability(tokens, *module(tokens.query, tokens.key), degree=degree)
    graph = given.sample(exploration=exploration, seed=7)
    scores = define(module, q, z).detach()
    p = (scores.sigmoid() if apart else 0.8 * scores.softmax(2)) + exploration
    bits = torch.zeros(HEADS, count, 4, dtype=torch.long)
    key, query = graph.edge_index
    bits[graph.edge_head, query // 2, query % 2 * 2 + key % 2] = 1
    for head in range(HEADS):
        number = (bits[head] * torch.tensor([8, 4, 2, 1])).sum(1)
        chance = [
            float(torch.where(torch.tensor(each, dtype=torch.bool), p[head].flatten(), 1 - p[head].flatten()).prod())
            for each in itertools.product([0, 1], repeat=4)
        ]
        assert chisquare(torch.bincount(number, minlength=16), count * torch.tensor(chance)).pvalue > 1e-4


@each_scorer
@pytest.mark.parametrize("select", ["bernoulli", "top_k"])
def test_a_row_depends_on_no_other_sequence(scorer: str, select: str) -> None:
    torch.manual_seed(0)
    source = IndexerSource(SCORERS[scorer](), select=select, target_density=0.3)
    x, ptr = draw(1, HEADS, 30, CHANNELS).float(), torch.tensor([0, 12, 30])
    whole = source(Tokens(x, query_ptr=ptr, is_causal=True, seed=3)).graph
    one = source(Tokens(x[:, 12:], is_causal=True, seed=3, sequence_ids=torch.tensor([1]))).graph
    found = dense(whole)
    assert torch.equal(found[:, 12:, 12:], dense(one))
    again = dense(source(Tokens(x, query_ptr=ptr, is_causal=True, seed=4)).graph)
    assert torch.equal(found, again) is (select == "top_k")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "estimator", "full"),
    [({"target_density": 0.25}, "local", 0), ({"target_density": 0.25}, "distill", 0),
     ({"select": "top_k", "target_density": 0.25}, Imitate(over="all"), 200),
     ({"select": "top_k", "target_density": 0.25}, "imitate", 30)],
)  # fmt: skip
def test_it_finds_the_right_key_of_eight(options: dict[str, Any], estimator: Any, full: int) -> None:
    """The key that holds a query's mark also holds what is asked for; attention itself can see marks.

    Ranks see no key that is not there, so they begin with dense attention; what the task itself trains does not need one.
    Keys that share with the selected ones alone are found again when these turn out to be useless.
    """
    degree, found = train_on_eight(options, estimator, full)
    assert degree < 4
    assert found > 0.9


@pytest.mark.slow
def test_ranks_that_imitate_over_all_keys_find_none_again() -> None:
    """Why it is not the default: what is not selected is pushed down."""
    assert train_on_eight({"select": "top_k", "target_density": 0.25}, Imitate(over="all"), 30)[1] < 0.6


def train_on_eight(options: dict[str, Any], estimator: Any, full: int) -> tuple[float, float]:
    """The expected number of keys of a query, and the mean probability of the right one, cut at 1.

    Args:
        full: Steps of dense attention, before graphs are sparse.
    """
    torch.manual_seed(0)
    scorer = Indexer(16, index_heads=4, index_channels=16)
    source = IndexerSource(scorer, exploration=0.05, **{"select": "bernoulli", **options})
    layer = AttentionConv(24, 16, 1, source, estimator=estimator)
    read = nn.Linear(16, 8)
    optimizer = torch.optim.Adam([*layer.parameters(), *read.parameters()], 5e-3)
    random, ptr, one = torch.Generator().manual_seed(1), 8 * torch.arange(33), nn.functional.one_hot

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        marks = torch.stack([torch.randperm(8, generator=random) for _ in range(32)])
        held, asked = (torch.randint(8, (32, 8), generator=random) for _ in range(2))
        x = torch.cat([one(marks, 8), one(held, 8), one(asked, 8)], 2).float().flatten(0, 1)
        where = (marks[:, None] == asked[..., None]).long().argmax(2)  # [B, 8]
        return x, held.gather(1, where).flatten(), (where + ptr[:-1, None]).flatten()

    for step in range(300):
        if full:
            source.target_density = 1.0 if step < full else 0.25
        x, answer, where = batch()
        out, choice = layer(x, ptr=ptr, seed=step, return_choice=True)
        loss = nn.functional.cross_entropy(read(out), answer)
        loss = loss if options else loss + 0.003 * choice.probability.expected_degree().mean()
        optimizer.zero_grad()
        (loss + auxiliary_loss(layer)).backward()
        optimizer.step()
    with torch.no_grad():
        x, _, where = batch()
        choice = layer.eval()(x, ptr=ptr, seed=0, return_choice=True)[1]
        right = AttentionGraph.over(torch.stack([where, torch.arange(256)]), 256, 256, 1, ptr=ptr)
        degree = float(choice.probability.expected_degree().mean())
        found = float(choice.probability.on(right).clamp(max=1).mean())
    return degree, found


@pytest.mark.parametrize("over", ["selected", "all"])
def test_imitation_is_the_divergence_from_attention_and_detached_scores_keep_it(over: str) -> None:
    """Equation 4 of DeepSeek-V3.2 over the selected keys, equation 3 where these are all."""
    torch.manual_seed(0)
    source = IndexerSource(Indexer(4, 2), select="top_k", k=3, detach=True)
    layer = AttentionConv(6, 4, 2, source, estimator=Imitate(over=over)).double()
    x, ptr = draw(1, 14, 6), torch.tensor([0, 5, 14])
    out, choice = layer(x, ptr=ptr, seed=0, return_choice=True)
    (out.sum() + auxiliary_loss(layer)).backward()
    found = [p.grad.clone() for p in source.parameters() if p.grad is not None]
    assert len(found) == 4
    layer.zero_grad()
    query, key = (lin(x).view(-1, 2, 4).transpose(0, 1) for lin in (layer.lin_query, layer.lin_key))
    scores = define_any(source.scorer, query.detach(), key.detach())
    kept = dense(choice.graph)
    mask = kept if over == "selected" else allowed(ptr, ptr, False)
    share = scores.masked_fill(~mask, -torch.inf).log_softmax(2)
    teacher = (query @ key.mT / 2).masked_fill(~kept, -torch.inf).softmax(2).detach()
    each = (teacher * share.masked_fill(~mask, 0)).sum((0, 2))  # [N]
    expected = torch.autograd.grad(-(each[:5].mean() + each[5:].mean()) / 4, [*source.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    frozen = copy.deepcopy(layer)
    frozen.estimator = Imitate(weight=0.0)
    layer.zero_grad()
    for model in (layer, frozen):
        (model(x, ptr=ptr, seed=0).square().sum() + auxiliary_loss(model)).backward()
    for name in ("lin_query", "lin_key", "lin_value"):
        torch.testing.assert_close(getattr(layer, name).weight.grad, getattr(frozen, name).weight.grad)
    layer.eval()
    layer.zero_grad()
    layer(x, ptr=ptr, seed=0).sum().backward()
    assert all(p.grad is None for p in source.parameters())  # evaluation teaches nothing


def define_any(scorer: nn.Module, q: Tensor, z: Tensor) -> Tensor:
    small, weight, key = scorer(q, z)
    return (torch.einsum("hnsd,hmd->hnms", small, key).relu() * weight[:, :, None]).sum(3)


def test_a_part_of_the_keys_is_rounded_up_exactly() -> None:
    """Of shares as people write them; single precision has 15.000001 for 0.15 of 100."""
    counts = torch.arange(1, 513)
    for thousandths in (*range(1, 1001, 7), *range(50, 1001, 50)):
        wanted = -(-thousandths * counts // 1000)
        assert torch.equal(cast(Tensor, pairs.number_of_keys(None, thousandths / 1000, counts)), wanted)


def test_ranks_take_a_part_of_the_keys() -> None:
    source, x = IndexerSource(Indexer(4, 2), select="top_k", target_density=0.15), torch.randn(2, 100, 4)
    for ptr, degree in ((pointer([100]), [15] * 100), (pointer([3, 97]), [1] * 3 + [15] * 97)):
        assert source(Tokens(x, query_ptr=ptr)).graph.degree.tolist() == [degree] * 2
    causal = source(Tokens(x, is_causal=True)).graph
    assert causal.degree[0].tolist() == [max(1, -(-15 * reach // 100)) for reach in range(1, 101)]


@pytest.mark.parametrize("select", ["bernoulli", "top_k"])
def test_graphs_follow_the_target_density(select: str) -> None:
    source = IndexerSource(Indexer(4, 2), select=select, target_density=0.5, window=0)
    tokens = Tokens(draw(1, 2, 20, 4).float(), query_ptr=torch.tensor([0, 8, 20]), is_causal=True)
    densities = []
    for density in (1.0, 0.5, 0.25, 0.1):
        source.target_density = density
        choice = source(tokens)
        densities.append(float(choice.density.mean()))
        loops = patterns.self_loops(20).edge_index.repeat(1, 2)
        assert choice.graph.contains(loops, torch.arange(40) // 20).all()
        assert density == 1 or choice.independent is (select == "bernoulli")
    assert densities[0] == 1
    assert densities == sorted(densities, reverse=True)
    assert 0.1 < densities[-1] < 0.5  # one key at least, and the self-loop


def test_encoders_take_them_by_name() -> None:
    for name, options in (
        ("indexer", {"index_heads": 2, "target_density": 0.5}),
        ("indexer", {"k": 2, "dropout": 0.1}),
        ("key_selection",
         {"hidden": 4, "target_density": 0.3, "window": 1, "select": "bernoulli", "estimator": "distill"}),
        ("key_selection", {"select": "bernoulli"}),
    ):  # fmt: skip
        encoder = SequenceEncoder(9, 8, attention=name, attention_options=options, is_causal=True)
        out, trace = encoder(torch.randint(9, (30,)), torch.tensor([0, 12, 30]), seed=0, return_trace=True)
        assert trace.choices[0].graph.is_causal
        (out.sum() + trace.density_loss() + auxiliary_loss(encoder)).backward()
        assert all(p.grad is not None for p in encoder.parameters())
    with pytest.raises(ValueError, match=r"Expected 'attention_options' of 'indexer' to be known \(got \['size'\]\)"):
        SequenceEncoder(9, 8, attention="indexer", attention_options={"size": 3})


def test_no_array_of_all_pairs_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles.SCORES_PER_TILE, "cpu", 2**16)
    n = 2**11
    layer = AttentionConv(
        8, 8, 1, IndexerSource(Indexer(8), select="bernoulli", target_density=2**-8), estimator="distill",
        is_causal=True,
    )  # fmt: skip
    with LargestStorage() as largest:
        (layer(draw(0, n, 8).float(), seed=0).sum() + auxiliary_loss(layer)).backward()
    assert (
        largest.size <= 2**20 < n * n / 2
    )  # bytes: 2**16 scores at a time; queries of all small heads have 68 channels


def test_a_step_leaves_nothing_behind() -> None:
    """Sums that are kept for later calls do not keep themselves alive."""
    layer = AttentionConv(
        8, 8, 1, IndexerSource(Indexer(8), select="bernoulli", target_density=0.5), estimator="distill"
    )
    gc.disable()
    try:
        out, choice = layer(draw(0, 20, 8).float(), seed=0, return_choice=True)
        (out.sum() + auxiliary_loss(layer)).backward()
        alive = weakref.ref(choice.probability)
        del out, choice
        assert alive() is None
    finally:
        gc.enable()


def test_scores_of_nan_are_edges() -> None:
    """Of each query one; of a query that is NaN the first."""
    x = draw(1, HEADS, 6, CHANNELS)
    x[:, 2] = torch.nan
    for degree in (None, torch.full((6,), 0.01, dtype=x.dtype)):
        given = IndexProbability(Tokens(x), *make("indexer")(x, x), degree=degree)
        for graph in (given.top_k(1), given.sample(seed=0)):
            dense = graph.to_dense()
            assert bool(dense[:, [0, 1, 3, 4, 5], 2].all())
            assert dense[:, 2].int().tolist() == [[1, 0, 0, 0, 0, 0]] * HEADS


def test_words_are_those_of_block_models() -> None:
    """A coin is the same whoever tosses it, in whatever shape."""
    threshold = (torch.rand(3, 4, 70, generator=torch.Generator().manual_seed(0)) * 2.0**32).long()
    place, stream, head = torch.arange(4).expand(3, 4), torch.tensor([5, 0, 2])[:, None], torch.tensor(1)
    whole = bernoulli_draws(threshold, place, stream, head, 9)
    for b, i in itertools.product(range(3), range(4)):
        one = bernoulli_draws(threshold[b, i : i + 1], place[b, i : i + 1], int(stream[b]), 1, 9)
        assert torch.equal(one[0], whole[b, i])
    assert not bernoulli_draws(torch.zeros_like(threshold), place, stream, head, 9).any()
    assert bernoulli_draws(torch.full_like(threshold, 2**32), place, stream, head, 9).all()


def test_a_pair_is_drawn_if_its_whole_word_is_less() -> None:
    keys, seed = 300, 9
    word = torch.empty(keys, dtype=torch.int64)
    for j in range(keys):
        of_bytes, of_rest = torch.tensor(16 * (j // 256) + j // 4 % 16), torch.tensor(j // 4)
        byte = int(philox(of_bytes, 2, 3, 1 | BERNOULLI_BYTE, seed)[j // 64 % 4]) >> 8 * (j % 4) & 255
        word[j] = byte << 24 | int(philox(of_rest, 2, 3, 1 | BERNOULLI_REST, seed)[j % 4]) >> 8
    for above, drawn in ((0, False), (1, True)):  # the first byte alone never decides
        found = bernoulli_draws(word[None] + above, torch.tensor([2]), 3, 1, seed)
        assert bool((found == drawn).all())


X = torch.ones(2, 5, 3)


class OwnRanks(GraphSource):
    """A source of a user that says in its choice alone that edges are not drawn."""

    def forward(self, tokens: Tokens) -> Choice:
        return IndexerSource(Indexer(3, 2), select="top_k", k=2)(tokens)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Indexer(0), ValueError, r"Expected 'channels' to be at least 1 \(got 0\)"),
        (lambda: KeyScorer(3, hidden=cast(int, 2.5)), TypeError, "Expected 'hidden' to be an int"),
        (lambda: IndexerSource(cast(nn.Module, "indexer"), select="bernoulli"), TypeError, r"Expected 'scorer' to be a module such as Indexer \(got str\)"),
        (lambda: IndexerSource(Indexer(3), select="most"), ValueError, "Expected 'select' to be one of"),
        (lambda: IndexerSource(Indexer(3), select="bernoulli", k=3), ValueError, "Expected 'k' with select='top_k' alone"),
        (lambda: IndexerSource(Indexer(3), select="bernoulli", initial_density=1), ValueError, r"Expected 'initial_density' in \(0, 1\)"),
        (lambda: IndexerSource(Indexer(3), select="bernoulli", detach=cast(bool, 1)), TypeError, "Expected 'detach' to be a bool"),
        (lambda: IndexProbability(Tokens(X), X, X, X), ValueError, r"Expected 'query' to be \[H, N, S, D\]"),
        (
            lambda: IndexProbability(Tokens(X), X[..., None], X, X[..., :1], degree=torch.ones(4)),
            ValueError,
            r"Expected 'degree' to be \[N\] = \[5\]",
        ),
        (
            lambda: IndexProbability(Tokens(X), X[..., None], X, X[..., :1]).on(patterns.self_loops(4)),
            ValueError,
            r"Expected 'graph' with \(heads, queries, keys\) = \(2, 5, 5\)",
        ),
        (
            lambda: AttentionConv(3, 3, 2, OwnRanks(), estimator="local")(X[0]),
            ValueError,
            "Expected 'estimator' other than Local with a source that selects edges by rank",
        ),
        (
            lambda: AttentionConv(3, 3, 2, IndexerSource(Indexer(3, 2), select="bernoulli"), estimator="imitate", normalizer="entmax15"),
            ValueError,
            r"Expected 'estimator' to be 'mask', 'paper' or 'none' with normalizer='entmax15' \(got Imitate\)",
        ),
    ],
)  # fmt: skip
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_no_estimator_is_asked_without_gradients() -> None:
    with torch.no_grad():
        assert AttentionConv(3, 3, 2, OwnRanks(), estimator="local")(X[0]).shape == (5, 6)


def test_a_full_graph_selects_all_keys() -> None:
    """The published warm-up and what comes after it are one loss."""
    given, _, _ = probabilities("indexer", ([4, 5], [4, 5]), True, apart=False)
    graph = patterns.full(None, ptr=pointer([4, 5]), is_causal=True).expand(HEADS)
    query, key = draw(3, HEADS, 9, 4), draw(4, HEADS, 9, 4)
    one, other = (distillation(query, key, given, graph, over=over) for over in ("selected", "all"))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_distillation_sees_the_sums_of_all_keys() -> None:
    """With a full graph the divergence is least where shares are the attention's weights."""
    given, scores, _ = probabilities("indexer", ([9], [9]), False, apart=False)
    graph = patterns.full(9).expand(HEADS)
    query, key = draw(3, HEADS, 9, 4), draw(4, HEADS, 9, 4)
    weight, share = (query @ key.mT).softmax(2), scores.log_softmax(2)
    expected = -(weight * share).sum() / (9 * HEADS)
    torch.testing.assert_close(distillation(query, key, given, graph), expected, rtol=1e-10, atol=1e-10)


def test_writing_into_the_offsets_of_a_probability_is_refused() -> None:
    """Also on a device, where they are no copy."""
    scorer, x = make("indexer"), draw(1, HEADS, 9, CHANNELS)
    probability = IndexProbability(Tokens(x, query_ptr=pointer([2, 7])), *scorer(x, x))
    loss = probability.expected_degree().square().sum()
    probability.tokens.query_ptr[1] = 6
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_bias_beside_degrees_has_no_effect_and_no_gradient() -> None:
    scorer, x, bias = (
        make("indexer"), draw(1, HEADS, 9, CHANNELS), torch.ones(HEADS, dtype=torch.float64).requires_grad_(),
    )  # fmt: skip
    degree, graph = torch.full((9,), 2.0, dtype=torch.float64), patterns.full(9).expand(HEADS)
    with_bias, without = (
        IndexProbability(Tokens(x), *scorer(x, x), degree=degree, bias=each).on(graph) for each in (bias, None)
    )
    assert torch.equal(with_bias, without)
    with_bias.square().sum().backward()
    assert bias.grad is None or not bias.grad.any()


def test_coins_expect_a_key_of_each_query_at_least() -> None:
    """However few keys there are to share out."""
    source, x, ptr = (
        IndexerSource(Indexer(4, 2), select="bernoulli", target_density=0.1), torch.randn(2, 33, 4), pointer([3, 30]),
    )  # fmt: skip
    degree = cast(Any, source(Tokens(x, query_ptr=ptr))).probability.expected_degree()
    torch.testing.assert_close(degree, torch.tensor([1.0] * 3 + [3.0] * 30).expand(2, -1))
