"""The bias of the DCMM-Transformer against an independent dense one, over all pairs and over edges."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from problems import LargestStorage, dense_mask, draw, random_graph
from torch import Tensor

from sbm_pyg import (
    AttentionConv,
    AttentionGraph,
    DCMMBias,
    GraphSource,
    SBMAttentionConv,
    SequenceEncoder,
    auxiliary_loss,
)
from sbm_pyg.ops import all_pairs
from sbm_pyg.sources import patterns
from sbm_pyg.sources.dense import DenseChoice

CHANNELS, HEADS, BLOCKS = 4, 3, 5
OPTIONS: list[dict[str, Any]] = [
    {}, {"degree": "sigmoid", "squash": False}, {"degree": "softplus", "symmetric": True}, {"tied": False},
    {"tied": False, "degree": "sigmoid", "symmetric": True, "squash": False, "scale": -3.0},
]  # fmt: skip


def published(bias: DCMMBias, query: Tensor, key: Tensor) -> Tensor:
    """The bias of all pairs, [H, N, M], one head and pair after another, from the parameters alone."""
    own = dict(bias.named_parameters())

    def side(x: Tensor, prefix: str) -> tuple[Tensor, Tensor]:
        logits = torch.stack([x @ row for row in own[f"{prefix}group.weight"]], -1) + own[f"{prefix}group.bias"]
        powers = logits.exp()
        raw = (x * own[f"{prefix}degree.weight"][0]).sum(-1) + own[f"{prefix}degree.bias"]
        degree = {"relu": raw * (raw > 0), "sigmoid": 1 / (1 + (-raw).exp()), "softplus": (1 + raw.exp()).log()}[
            bias.degree
        ]
        return powers / powers.sum(-1, keepdim=True), degree

    pi, theta = side(query, "lin_")
    rho, eta = (pi, theta) if bias.tied else side(key, "lin_key_")
    free: Tensor = own["affinity"]
    free = (free + free.transpose(1, 2)) / 2 if bias.symmetric else free
    strength = torch.einsum("hik,hkl,hjl->hij", pi, 1 / (1 + (-free).exp()), rho)
    strength = (1 - (-2 * strength).exp()) / (1 + (-2 * strength).exp()) if bias.squash else strength
    return own["scale"] * torch.einsum("hi,hj,hij->hij", theta, eta, strength)


def attention(conv: Any, x: Any, mask: Tensor) -> Tensor:
    """The output of a layer, from dense scores and biases; rows without an edge are 0."""
    keys, queries = x if isinstance(x, tuple) else (x, x)
    q, k, v = (
        lin(each).view(-1, conv.heads, conv.out_channels).transpose(0, 1)
        for lin, each in ((conv.lin_query, queries), (conv.lin_key, keys), (conv.lin_value, keys))
    )
    scores = torch.einsum("hic,hjc->hij", q, k) / math.sqrt(conv.out_channels) + published(conv.score_bias, q, k)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0)
    return torch.einsum("hij,hjc->ihc", weights, v).flatten(1)


def graphs() -> dict[str, AttentionGraph]:
    ptr = torch.tensor([0, 5, 6, 14])
    return {
        "random": random_graph(HEADS, 14, 14, 0.3), "full": patterns.full(14).expand(HEADS),
        "ragged": patterns.full(None, ptr=ptr).expand(HEADS), "causal": patterns.window(None, 4, ptr=ptr, is_causal=True).expand(HEADS),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["full", "ragged", "causal", "random"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("fuse", [True, False])
def test_output_and_every_gradient_are_those_of_the_published_formulas(
    name: str, options: dict[str, Any], fuse: bool
) -> None:
    torch.manual_seed(1)
    conv: Any = AttentionConv(6, CHANNELS, HEADS, score_bias=DCMMBias(CHANNELS, HEADS, BLOCKS, **options)).double()
    conv.fuse = fuse
    x = draw(0, 14, 6).requires_grad_()
    graph = graphs()[name]
    mask = dense_mask(graph)
    out, wanted = conv(x, graph), attention(conv, x, mask)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-10)
    inputs = [x, *conv.parameters()]
    found = [torch.autograd.grad(each.sin().sum(), inputs) for each in (out, wanted)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    learns = dict(zip(["x", *dict(conv.named_parameters())], found[0], strict=True))
    for part in ("lin_group.weight", "lin_degree.weight", "affinity", "scale"):
        assert learns[f"score_bias.{part}"].abs().max() > 1e-6


@pytest.mark.parametrize("ptr", [[0, 30], [0, 10, 20, 30], [0, 0, 3, 22, 30]])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_dense_attention_is_that_of_the_published_formulas(
    options: dict[str, Any], is_causal: bool, ptr: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all pairs, without edges, in steps of few rows, and in steps of several sequences."""
    torch.manual_seed(1)
    bias = DCMMBias(CHANNELS, HEADS, BLOCKS, **options)
    source = patterns.PatternSource(patterns.full)
    conv: Any = AttentionConv(6, CHANNELS, HEADS, source, is_causal=is_causal, score_bias=bias).double()
    x, offsets = draw(0, 30, 6).requires_grad_(), torch.tensor(ptr)
    graph = patterns.full(None, ptr=offsets, is_causal=is_causal).expand(HEADS)
    wanted = attention(conv, x, dense_mask(graph))
    inputs = [x, *conv.parameters()]
    exact = torch.autograd.grad(wanted.sin().sum(), inputs)
    for pairs in (7, 250, 2**19):
        monkeypatch.setitem(all_pairs.PAIRS_PER_STEP, "cpu", pairs)
        out, choice = conv(x, ptr=offsets, return_choice=True)
        assert not choice.is_stored
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-10)
        for one, other in zip(torch.autograd.grad(out.sin().sum(), inputs), exact, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("squash", [True, False])
def test_dense_attention_makes_no_array_of_all_pairs(squash: bool) -> None:
    n, k = 2**12, 8
    source = patterns.PatternSource(patterns.full)
    conv = AttentionConv(8, 8, 1, source, score_bias=DCMMBias(8, 1, k, squash=squash))
    x = torch.randn(n, 8, requires_grad=True)
    conv(x[:64]).sum().backward()  # what kernels need at their first call
    with LargestStorage() as largest:
        conv(x).square().sum().backward()
    assert largest.size <= 4 * all_pairs.PAIRS_PER_STEP["cpu"] < 4 * n * n  # bytes


def test_dropout_over_all_pairs_is_that_of_the_same_weights_in_the_backward_pass() -> None:
    torch.manual_seed(3)
    bias = DCMMBias(CHANNELS, 1, BLOCKS, degree="softplus")
    conv: Any = AttentionConv(6, CHANNELS, 1, patterns.PatternSource(patterns.full), dropout=0.5, score_bias=bias)
    conv = conv.double()
    x = draw(0, 8, 6)
    out = []
    for step in (0.0, 1e-6, -1e-6):
        torch.manual_seed(0)
        moved = (x + step * draw(1, 8, 6)).requires_grad_()
        out.append((conv(moved).sin().sum(), moved))
    (grad,) = torch.autograd.grad(*out[0])
    slope = (out[1][0] - out[2][0]).detach() / 2e-6
    torch.testing.assert_close((grad * draw(1, 8, 6)).sum(), slope, rtol=1e-7, atol=1e-9)
    kept = torch.stack([conv(x) for _ in range(500)]).detach()
    torch.testing.assert_close(
        kept.mean(0), conv.eval()(x).detach(), rtol=0, atol=6 * float(kept.std(0).max()) / 500**0.5
    )


def test_sequences_without_keys_get_zeros_and_others_stay_apart() -> None:
    bias = DCMMBias(CHANNELS, HEADS, BLOCKS, tied=False)
    conv: Any = AttentionConv((3, 6), CHANNELS, HEADS, score_bias=bias).double()
    conv.source = type("All", (GraphSource,), {"forward": lambda self, tokens: DenseChoice(tokens)})()
    keys, queries = draw(1, 9, 3), draw(2, 14, 6)
    ptr = torch.tensor([0, 0, 2, 9]), torch.tensor([0, 4, 9, 14])
    out = conv((keys, queries), ptr=ptr)
    assert bool((out[:4] == 0).all())
    keys[:2] = math.nan
    apart = conv((keys, queries), ptr=ptr)
    assert bool(apart[4:9].isnan().all())
    assert torch.equal(apart[9:], out[9:])


def test_keys_of_other_tokens_have_memberships_of_their_own() -> None:
    torch.manual_seed(2)
    conv: Any = AttentionConv((3, 6), CHANNELS, HEADS, score_bias=DCMMBias(CHANNELS, HEADS, BLOCKS, tied=False))
    conv = conv.double()
    x, graph = (draw(1, 9, 3), draw(2, 14, 6)), random_graph(HEADS, 14, 9, 0.4)
    mask = dense_mask(graph)
    torch.testing.assert_close(conv(x, graph), attention(conv, x, mask), rtol=0, atol=1e-10)
    tied = DCMMBias(CHANNELS, HEADS, BLOCKS)
    with pytest.raises(ValueError, match="Expected 'key' of 14 tokens, as 'query' has \\(got 9\\)"):
        tied(draw(3, HEADS, 14, CHANNELS).float(), draw(4, HEADS, 9, CHANNELS).float(), graph)


def test_a_fresh_layer_is_nearly_plain_attention() -> None:
    """The start of the authors' code, with queries as small as there: entropy 4.599, products 0.5, bias 0.008."""
    found = []
    for seed in range(20):
        torch.manual_seed(seed)
        bias = DCMMBias(64, 6)
        query = 0.15 * torch.randn(6, 197, 64)
        model = bias.predict(query, query)
        strength = model.query_membership @ model.block_matrix @ model.key_membership.mT
        graph = patterns.full(197).expand(6)
        found.append(torch.stack([model.entropy, strength.mean(), bias(query, query, graph).mean()]))
        assert bias.scale == 10
        assert (model.query_degree == 0).float().mean() > 0.05  # the dead zone of relu
    entropy, strength, added = torch.stack(found).mean(0).tolist()
    assert abs(entropy - 4.599) < 2e-3 < math.log(100) - entropy
    assert abs(strength - 0.5) < 2e-3
    assert 0 < added < 0.03


@pytest.mark.parametrize("tied", [True, False])
def test_the_regulariser_adds_the_gradient_of_the_mean_entropy(tied: bool) -> None:
    torch.manual_seed(3)
    conv: Any = AttentionConv(6, CHANNELS, HEADS, score_bias=DCMMBias(CHANNELS, HEADS, BLOCKS, tied=tied)).double()
    other = copy.deepcopy(conv)
    other.score_bias.entropy_weight = 0.3
    x, graph = draw(5, 12, 6), random_graph(HEADS, 12, 12, 0.5)
    query, key = (lin(x).view(12, HEADS, CHANNELS).transpose(0, 1) for lin in (conv.lin_query, conv.lin_key))
    entropy = conv.score_bias.predict(query, key).entropy
    logits = [conv.score_bias.lin_group(query)] + ([] if tied else [conv.score_bias.lin_key_group(key)])
    by_hand = torch.stack([-(p * p.log()).sum(-1).mean() for p in (each.softmax(-1) for each in logits)]).mean()
    torch.testing.assert_close(entropy, by_hand, rtol=0, atol=1e-6)  # theirs has 1e-8 inside the logarithm
    (conv(x, graph).square().sum() + 0.3 * entropy).backward()
    (other(x, graph).square().sum() + auxiliary_loss(other)).backward()
    for (name, one), two in zip(conv.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=1e-10, msg=name)
    torch.testing.assert_close(other(x, graph), conv(x, graph), rtol=0, atol=0)
    other.eval().zero_grad()
    conv.zero_grad()
    for each in (conv, other):
        each(x, graph).square().sum().backward()
    assert torch.equal(conv.score_bias.lin_group.weight.grad, other.score_bias.lin_group.weight.grad)


@pytest.mark.parametrize("estimator", ["local", "mask", "distill"])
def test_over_sampled_edges_both_models_learn(estimator: str) -> None:
    torch.manual_seed(4)
    bias = DCMMBias(CHANNELS, HEADS, BLOCKS, degree="softplus")
    conv: Any = SBMAttentionConv(6, CHANNELS, HEADS, num_clusters=4, estimator=estimator, score_bias=bias).double()
    x = draw(6, 20, 6)
    out, graph = conv(x, seed=1, return_graph=True)
    mask = dense_mask(graph)
    torch.testing.assert_close(out, attention(conv, x, mask), rtol=0, atol=1e-10)
    auxiliary_loss(conv)  # is left out here
    found = torch.autograd.grad(out.sin().sum(), [*bias.parameters(), conv.source.head.clusters], retain_graph=True)
    assert all(bool(each.abs().max() > 0) for each in found)
    wanted = torch.autograd.grad(attention(conv, x, mask).sin().sum(), [*bias.parameters()])
    for one, other in zip(found, wanted, strict=False):  # probes and gates send it nothing
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_nothing_of_all_pairs_is_made_over_few_edges() -> None:
    n = 2**13
    bias = DCMMBias(8, 1, 16)
    query = torch.randn(1, n, 8)
    graph = patterns.window(n, 8)
    with LargestStorage() as largest:
        bias(query, query, graph).sum().backward()
    assert largest.size <= max(8 * graph.num_edges, 4 * n * 16) < n * n


def test_it_is_drawn_anew_with_its_layer_and_copied() -> None:
    bias = DCMMBias(CHANNELS, HEADS, BLOCKS, tied=False, scale=2.0)
    conv = AttentionConv(6, CHANNELS, HEADS, score_bias=bias)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.fill_(7.0)
    torch.manual_seed(0)
    conv.reset_parameters()
    assert bias.scale == 2
    assert not any((parameter == 7).any() for parameter in conv.parameters())
    again = copy.deepcopy(conv)
    x, graph = torch.randn(9, 6), random_graph(HEADS, 9, 9, 0.5)
    assert torch.equal(again(x, graph), conv(x, graph))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_close(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    bias = DCMMBias(CHANNELS, HEADS, BLOCKS)
    query, graph = torch.randn(HEADS, 12, CHANNELS), random_graph(HEADS, 12, 12, 0.5)
    wanted = bias(query, query, graph)
    got = copy.deepcopy(bias).to(dtype)(query.to(dtype), query.to(dtype), graph)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), wanted, rtol=0.1, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(bias(query, query, graph), wanted, rtol=0.1, atol=0.1)


def test_errors_name_the_argument() -> None:
    for options, words in (
        ({"degree": "tanh"}, "Expected 'degree' to be one of"), ({"squash": 1}, "Expected 'squash'"),
        ({"scale": math.nan}, "Expected 'scale'"), ({"entropy_weight": -1.0}, "Expected 'entropy_weight'"),
        ({"num_clusters": 0}, "Expected 'num_clusters'"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=words):
            DCMMBias(4, **options)
    bias = DCMMBias(CHANNELS, HEADS, BLOCKS)
    query = torch.randn(HEADS, 9, CHANNELS)
    for heads, tokens in itertools.product((1, HEADS), (9, 10)):
        if (heads, tokens) != (HEADS, 9):
            with pytest.raises(ValueError, match="Expected 'graph' over 3 heads, 9 queries and 9 keys"):
                bias(query, query, random_graph(heads, tokens, tokens, 0.5))
    with pytest.raises(ValueError, match="Expected 'query' to be"):
        bias(query[:1], query, random_graph(HEADS, 9, 9, 0.5))


def test_an_encoder_takes_it_by_name() -> None:
    encoder: Any = SequenceEncoder(9, 8, attention="dcmm", attention_options={"num_clusters": 6, "degree": "softplus"})
    out, trace = encoder(torch.randint(9, (30,)), torch.tensor([0, 12, 30]), return_trace=True)
    assert out.shape == (30, 8)
    assert bool((trace.density == 1).all())
    assert encoder.layers[0].attention.score_bias.num_clusters == 6
    assert encoder.layers[0].attention.score_bias.degree == "softplus"


def test_the_entropy_is_the_mean_over_the_tokens_of_both_sides() -> None:
    """Also where there are more keys than queries."""
    bias = DCMMBias(CHANNELS, HEADS, BLOCKS, tied=False).double()
    model = bias.predict(draw(1, HEADS, 3, CHANNELS), draw(2, HEADS, 7, CHANNELS))
    each = [-(side * side.log()).sum(2).mean(0) for side in (model.query_membership, model.key_membership)]
    torch.testing.assert_close(model.entropy, torch.cat(each).mean(), rtol=1e-6, atol=0)
