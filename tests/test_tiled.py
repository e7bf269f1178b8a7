"""Attention over graphs that nobody stores is attention over the same graphs, stored."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from sbm_pyg import (
    SBM,
    AttentionGraph,
    Choice,
    GraphSource,
    PairClassifier,
    SBMAttentionConv,
    SequenceClassifier,
    SequenceEncoder,
    ShareSchedule,
    TokenClassifier,
    Tokens,
    ops,
)
from sbm_pyg.estimators import attach_local_expectation, draw_probes
from sbm_pyg.ops import schemas
from sbm_pyg.ops.reference import tiled as reference_tiled
from sbm_pyg.sources.interface import TiledChoice

SCALE, EXPLORATION, SEED = 0.4, 0.02, 7
EDGES: Any = reference_tiled.sampled_edges
CASES = {
    "one sequence": ([9], [9]),
    "ragged": ([7, 1, 20], [7, 1, 20]),
    "bipartite": ([3, 12, 5], [8, 2, 30]),
    "no queries, no keys": ([4, 0, 3], [2, 5, 0]),
}


def ptr_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def problem(name: str, blocks: int = 4, channels: int = 5, heads: int = 2) -> tuple[Any, Any]:
    """Queries, keys, values, rates and memberships; offsets of both sides, and numbers of the sequences."""
    queries, keys = CASES[name]
    random = torch.Generator().manual_seed(0)
    n, m = sum(queries), sum(keys)
    sizes = (n, channels), (m, channels), (m, channels + 1), (n, blocks), (m, blocks)
    tokens = [torch.rand(heads, *size, generator=random, dtype=torch.float64) for size in sizes]
    tokens = [*((x - 0.5) * 4 for x in tokens[:3]), tokens[3] / 2, tokens[4]]
    return [x.requires_grad_() for x in tokens], [ptr_of(queries), ptr_of(keys), torch.arange(len(keys)) * 3]


def attend(tokens: Any, law: Any, **options: Any) -> Tensor:
    call: Any = ops.sampled_attention
    return call(*tokens, *law, SEED, scale=SCALE, exploration=EXPLORATION, **options)


def graph_of(tokens: Any, law: Any, is_causal: bool, window: int | None) -> tuple[AttentionGraph, Tensor]:
    rate, member = (x.detach() for x in tokens[3:])
    reach = -1 if window is None else window
    rowptr, col, forced = EDGES(rate, member, *law, SEED, EXPLORATION, is_causal, reach)
    sides: Any = (rate.size(1), member.size(1), rate.size(0), *law[:2])
    return AttentionGraph(rowptr, col, *sides, is_causal=is_causal), forced


@pytest.mark.parametrize("window", [None, 0, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", [*CASES][:3])
def test_it_is_attention_over_the_graph_with_every_pair_a_probe(
    name: str, is_causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, law = problem(name)
    graph, forced = graph_of(tokens, law, is_causal, window)
    query, key, value, rate, member = tokens
    identity = torch.eye(rate.size(2), dtype=torch.float64).expand(rate.size(0), -1, -1)
    sbm = SBM(rate, member, identity, *law[:2], is_causal=is_causal)
    over, _ = ops.edge_attention(query, key, value, graph.rows, scale=SCALE)
    probes, chance = draw_probes(graph, math.inf, seed=0)
    over = attach_local_expectation(
        over, query, key, value, sbm, graph, probes, chance, forced=forced, scale=SCALE, exploration=EXPLORATION
    )
    weight = torch.randn(over.shape, generator=torch.Generator().manual_seed(1), dtype=over.dtype)
    wanted = torch.autograd.grad((over * weight).sum(), tokens)
    for room in (2**26, 2**10):  # all queries together, or a few at a time
        monkeypatch.setitem(reference_tiled.MAX_PAIR_BYTES, "cpu", room)
        out = attend(tokens, law, is_causal=is_causal, window=window)
        torch.testing.assert_close(out, over, rtol=1e-10, atol=1e-10)
        found = torch.autograd.grad((out * weight).sum(), tokens)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
def test_edges_are_those_of_rows_that_toss_coins(is_causal: bool) -> None:
    tokens, law = problem("ragged")
    rate, member = tokens[3].detach() * 2, tokens[4].detach() + 0.5
    given: Any = (rate, member, *law, SEED)
    sample: Any = ops.sample_sbm
    rowptr, col = sample(*given, exploration=EXPLORATION, clamp=True, is_causal=is_causal)
    rows, keys, _ = EDGES(*given, EXPLORATION, is_causal, -1)
    found, wanted = (
        [each[at[row] : at[row + 1]].tolist() for row in range(len(at) - 1)]
        for each, at in ((keys, rows), (col, rowptr))
    )
    same = [one == other for one, other in zip(found, wanted, strict=True)]
    tossing = (rate @ member.mT).masked_fill(~pairs_of(law, is_causal), 0).amax(-1).flatten() >= 1  # no bound helps
    assert tossing.sum() >= 20
    assert all(one for one, coins in zip(same, tossing.tolist(), strict=True) if coins)


def pairs_of(law: list[Tensor], is_causal: bool) -> Tensor:
    """Which pairs may be edges, ``[N, M]``."""
    sides = [torch.repeat_interleave(torch.arange(len(ptr) - 1), ptr.diff()) for ptr in law[:2]]
    place = [torch.arange(len(side)) - ptr[side] for side, ptr in zip(sides, law, strict=False)]
    pairs = sides[0][:, None] == sides[1]
    return pairs & (place[1] <= place[0][:, None]) if is_causal else pairs


def test_edges_have_their_probabilities() -> None:
    """In many sequences with the same memberships."""
    tokens, _ = problem("one sequence")
    draws, (rate, member) = 3000, (x.detach() for x in tokens[3:])
    ptr = torch.arange(draws + 1) * 9
    given = (rate.repeat(1, draws, 1), member.repeat(1, draws, 1), ptr, ptr, torch.arange(draws))
    rowptr, col, _ = EDGES(*given, SEED, EXPLORATION, False, -1)
    row = torch.repeat_interleave(rowptr.diff())
    count = torch.zeros(2 * 81, dtype=torch.float64)
    pair = row // (9 * draws) * 81 + row % 9 * 9 + col % 9
    count.index_add_(0, pair, torch.ones(len(col), dtype=torch.float64))
    p = (rate @ member.mT + EXPLORATION).clamp(max=1).flatten()
    assert ((count / draws - p).abs() <= 5 * (p * (1 - p) / draws).sqrt() + 1e-12).all()


def test_the_heaviest_edge_may_outweigh_all_others() -> None:
    """Its effect is not the small difference of two large sums."""
    tokens, law = problem("one sequence")
    query, key, value, rate, member = (x.detach() for x in tokens)
    key[:, 3] += 60 * query.mean(1) / query.mean(1).square().sum(-1, keepdim=True)
    query = query.mean(1, keepdim=True).expand_as(query).contiguous()
    ones = rate.new_ones(rate.shape) / rate.size(2), torch.ones_like(member).requires_grad_()
    out = attend([query, key, value, *ones], law)
    out[..., 0].sum().backward()
    assert ones[1].grad is not None
    assert not ones[1].grad.any()  # certain: nothing learns
    half = ones[0] * 0.97
    member = torch.ones_like(member).requires_grad_()
    out, rest, lse, best = schemas.sampled_attention(query, key, value, half, member, *law, SEED, 0.02, 1.0, False, -1)
    assert (best == 3).any()
    gain = value[:, :, :1] - rest[..., :1].mT  # [H, N, 1] - [H, 1, N]
    weight = (query @ key.mT - lse[..., None]).exp()
    for head, row in (best == 3).nonzero().tolist():
        assert weight[head, row, 3] > 1 - 1e-9
        effect = schemas.sampled_attention_backward(
            torch.zeros_like(out).index_put((torch.tensor(head), torch.tensor(row), torch.tensor(0)), torch.tensor(1.0, dtype=out.dtype)),
            query, key, value, half, member, *law, out, rest, lse, best, SEED, 0.02, 1.0, False, -1, True,
        )[4][head, 3, 0] / half[head, row, 0]  # fmt: skip
        torch.testing.assert_close(effect.detach(), gain[head, 3, row].detach(), rtol=1e-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_types_are_as_exact_as_they_can_be(dtype: torch.dtype) -> None:
    tokens, law = problem("bipartite")
    given = [x.detach().to(dtype) for x in tokens[:3]] + [x.detach().float() for x in tokens[3:]]
    wanted = attend([*(x.double() for x in given[:3]), *given[3:]], law)
    torch.testing.assert_close(attend(given, law).double(), wanted, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_nothing_comes_from_nothing() -> None:
    tokens, law = problem("no queries, no keys")
    out = attend(tokens, law)
    assert not out[:, 4:].any()  # queries of a sequence without keys
    empty = [x[:, :0] for x in tokens]
    assert attend(empty, [torch.tensor([0, 0]), torch.tensor([0, 0]), torch.tensor([0])]).shape == (2, 0, 6)
    zero = [*tokens[:3], tokens[3] * 0, tokens[4]]
    call: Any = ops.sampled_attention
    out = call(*zero, *law, SEED)
    assert not out.any()
    (gradient,) = torch.autograd.grad(out.sum(), tokens[4], allow_unused=True)
    assert gradient is not None
    assert gradient.isfinite().all()


def test_nan_stays_where_it_is() -> None:
    tokens, law = problem("ragged")
    given = [x.detach().clone() for x in tokens]
    given[3][0, 2, 1] = torch.nan
    out = attend(given, law)
    assert out[0, 2].isnan().all()
    assert int(out.isnan().sum()) == out.size(2)
    given = [x.detach().clone() for x in tokens]
    given[2][0, 9] = torch.nan  # of the last sequence
    out = attend([*given[:3], *tokens[3:]], law)
    assert not out[:, :8].isnan().any()
    gradients = torch.autograd.grad(out[1].sum() + out[0, :8].sum(), tokens[3:])
    assert not any(grad[:, :8].isnan().any() for grad in gradients)


def test_a_sequence_is_the_same_in_any_batch() -> None:
    tokens, law = problem("ragged")
    alone = [x[:, 8:].detach() for x in tokens]
    out = attend(alone, [ptr_of([20]), ptr_of([20]), law[2][2:]])
    torch.testing.assert_close(out, attend(tokens, law)[:, 8:].detach(), rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------ the layer


def layer(**options: Any) -> SBMAttentionConv:
    torch.manual_seed(0)
    return SBMAttentionConv(8, 4, heads=2, num_blocks=3, tiled=True, **options).double()


@pytest.mark.parametrize(
    "options", [{}, {"window": 1}, {"self_loops": True, "is_causal": True}, {"share": 0.5}], ids=str
)
def test_the_layer_learns_as_over_the_stored_graph_with_all_probes(options: dict[str, Any]) -> None:
    conv, ptr = layer(**options), ptr_of([9, 1, 14])
    x = torch.randn(24, 8, dtype=torch.float64)
    out, choice = conv(x, ptr=ptr, seed=3, return_choice=True)
    assert isinstance(choice, TiledChoice)
    assert "TiledChoice(SBM(" in repr(choice)
    assert "_drawn" not in vars(choice)  # nothing was drawn to be shown
    mine = torch.autograd.grad(out.square().sum(), [*conv.parameters()])
    conv.load_state_dict(layer(**options).state_dict())  # the running mean of shares, too
    stored = choice.stored()
    assert type(stored) is Choice
    over = conv(x, choice.graph)
    torch.testing.assert_close(out, over)
    assert choice.graph.is_causal == options.get("is_causal", False)
    if "window" in options or "self_loops" in options:
        assert choice.forced is not None
        assert choice.graph.density.isfinite().all()

    probed = layer(probes=math.inf, **options)
    source = probed.source
    assert source is not None
    forward = source.forward

    def chosen(*arguments: Any, **given: Any) -> Choice:
        found = forward(*arguments, **given)
        assert isinstance(found, TiledChoice)
        return found.stored()

    source.forward = chosen  # type: ignore[method-assign]
    again = probed(x, ptr=ptr, seed=3)
    theirs = torch.autograd.grad(again.square().sum(), [*probed.parameters()])
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_the_source_may_change_its_way_between_calls() -> None:
    conv, x = layer(), torch.randn(12, 8, dtype=torch.float64)
    source: Any = conv.source
    source.tiled = False
    choice = conv(x, seed=0, return_choice=True)[1]
    assert not isinstance(choice, TiledChoice)
    source.tiled = True
    _, choice = conv(x, seed=0, return_choice=True)
    assert isinstance(choice, TiledChoice)
    assert "tiled" in repr(source)


def test_weights_and_filters_store_the_graph() -> None:
    conv, x = layer(), torch.randn(12, 8, dtype=torch.float64)
    out, graph, (edges, alpha) = conv(x, seed=0, return_graph=True, return_attention_weights=True)
    torch.testing.assert_close(out, conv(x, seed=0))
    assert torch.equal(edges, graph.edge_index)
    assert alpha.shape == (graph.num_edges,)
    conv.fuse = False
    torch.testing.assert_close(out, conv(x, seed=0))


@pytest.mark.parametrize(
    ("name", "value"), [("dropout", 0.1), ("normalizer", "entmax15"), ("estimator", "distill"), ("estimator", "mask")]
)
def test_what_needs_edges_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"Expected '{name}' that needs no stored edges"):
        layer(**{name: value})(torch.randn(5, 8, dtype=torch.float64))


class _NotCausal(GraphSource):
    """A source that forgets that the layer is causal."""

    def __init__(self, source: GraphSource) -> None:
        super().__init__()
        self.source = source

    def forward(self, tokens: Tokens) -> Choice:
        return self.source(replace(tokens, is_causal=False))


def test_a_causal_layer_cuts_later_keys_of_a_model_that_is_not_causal() -> None:
    conv = layer(is_causal=True)
    conv.source = _NotCausal(cast(GraphSource, conv.source))
    x = torch.randn(12, 8, dtype=torch.float64)
    out = conv(x, seed=0)
    changed = torch.cat([x[:6], torch.randn(6, 8, dtype=torch.float64)])
    torch.testing.assert_close(conv(changed, seed=0)[:6], out[:6])
    torch.testing.assert_close(conv(x, seed=0, return_attention_weights=True)[0], out)


@pytest.mark.parametrize("options", [{"block_size": 4}, {"method": "fastrg"}], ids=str)
def test_blocks_and_fastrg_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Expected 'tiled' with method='bernoulli' and block_size=1"):
        layer(**options)


def test_a_window_between_different_tokens_is_refused() -> None:
    conv = layer(window=1)
    with pytest.raises(ValueError, match="Expected the same tokens"):
        conv((torch.randn(5, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": -1}, "Expected 'window'"),
        ({"exploration": 2.0}, "Expected 'exploration' in"),
        ({"seed": "one"}, "Expected 'seed'"),
        ({"member": torch.ones(2, 3, 4)}, "Expected 'member' to be"),
        ({"value": torch.ones(2, 3, 4)}, "Expected 'value' to be"),
        ({"sequence_ids": torch.arange(2)}, "Expected 'sequence_ids' to be"),
    ],
    ids=str,
)
def test_errors(change: dict[str, Any], message: str) -> None:
    tokens, law = problem("ragged")
    names = ("query", "key", "value", "rate", "member", "query_ptr", "key_ptr", "sequence_ids")
    given: dict[str, Any] = dict(zip(names, (*tokens, *law), strict=True)) | {"seed": SEED}
    with pytest.raises((TypeError, ValueError), match=message):
        ops.sampled_attention(**(given | change))


def test_an_encoder_trains_by_tiles_and_ends_with_stored_graphs() -> None:
    torch.manual_seed(0)
    options = {"num_blocks": 4, "tiled": True, "share": 1.0}
    model = SequenceEncoder(20, 16, num_layers=2, heads=2, attention_options=options, dropout=0.0, attention="sbm")
    schedule = ShareSchedule(model, final=0.3, threshold=math.inf, rate=0.5)
    tokens, ptr = torch.randint(20, (30,)), ptr_of([10, 20])
    for step in range(3):
        model.zero_grad()
        out, trace = model(tokens, ptr=ptr, seed=step, return_trace=True)
        assert trace.expected_density.isfinite().all()
        loss = out.square().mean()
        loss.backward()
        schedule.step(loss)
    assert all(p.grad is not None for p in model.parameters())
    for source in schedule.sources:
        source.tiled = False
    assert all(type(choice) is Choice for choice in model(tokens, ptr=ptr, return_trace=True)[1].choices)


@pytest.mark.parametrize("task", [SequenceClassifier, PairClassifier, TokenClassifier])
def test_models_store_no_graph_that_nobody_asks_for(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a price on the expected density."""

    def drawn(*law: Any) -> Any:
        raise AssertionError("the graph was stored")

    monkeypatch.setattr("sbm_pyg.sources.sampling.sampled_edges", drawn)
    options = {"num_blocks": 4, "tiled": True}
    model = task(SequenceEncoder(9, 8, num_layers=2, attention_options=options), 3)
    batch = torch.randint(9, (12,)), torch.tensor([0, 5, 12])
    given: Any = zip(batch, batch, strict=True) if task is PairClassifier else batch
    out, trace = model(*given, seed=1, return_trace=True)
    (out.square().sum() + trace.density_loss()).backward()
    with pytest.raises(AssertionError, match="the graph was stored"):
        trace.density.sum()


def test_it_compiles() -> None:
    conv, x = layer(), torch.randn(12, 8, dtype=torch.float64)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, seed=1), conv(x, seed=1))


def test_what_is_stored_of_a_tiled_choice_knows_its_exploration() -> None:
    """By which estimators weigh edges."""
    source, q = layer(exploration=0.25).source, torch.randn(2, 12, 4, dtype=torch.float64)
    assert source is not None
    choice = source(Tokens(q, query_ptr=ptr_of([12])))
    assert isinstance(choice, TiledChoice)
    assert choice.stored().exploration == choice.exploration == 0.25
    assert choice.causal().exploration == 0.25
