"""The layer: equal to dense attention on a full graph, to each sequence alone on a ragged batch. PyG's and torch's wishes are tested in
``test_conformance`` and ``test_torch_features``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from typing import Any, cast

import pytest
import torch
from problems import refuses
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.nn import TransformerConv
from torch_geometric.utils import coalesce

from sbm_pyg import (
    ALiBi,
    AttentionConv,
    AttentionGraph,
    BlockPool,
    DCMMBias,
    FullAttention,
    GraphSource,
    Rotary,
    SBMAttentionConv,
    SBMHead,
    SBMMultiheadAttention,
    SBMSource,
    Tokens,
    auxiliary_loss,
    estimators,
    make_attention,
    sample_edges,
)
from sbm_pyg.sources import indexer, patterns, selectors
from sbm_pyg.sources.indexer import Indexer, IndexerSource
from sbm_pyg.sparsefinder import Projection

PTR = torch.tensor([0, 10, 17, 30])


def layer(heads: int = 2, **options: Any) -> AttentionConv:
    torch.manual_seed(0)
    return make_attention("sbm", 16, 8, heads, **{"num_clusters": 4, **options}).double()


def tokens(n: int = 30, seed: int = 1) -> Tensor:
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projections(conv: SBMAttentionConv, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        lin(x).view(-1, conv.heads, conv.out_channels).transpose(0, 1)
        for lin in (conv.lin_query, conv.lin_key, conv.lin_value)
    )
    return q, k, v


# ------------------------------------------------------------------ what it equals


@pytest.mark.parametrize("fuse", [True, False])
def test_full_graph_is_dense_attention(fuse: bool) -> None:
    conv, x = layer(), tokens()
    conv.fuse = fuse
    expected = F.scaled_dot_product_attention(*projections(conv, x)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(conv(x, patterns.full(30)), expected, rtol=0, atol=1e-10)


def test_full_ragged_graph_is_dense_attention_in_each_sequence() -> None:
    conv, x = layer(), tokens()
    out = conv(x, patterns.full(None, ptr=PTR), ptr=PTR)
    for start, end in pairwise(PTR):
        expected = F.scaled_dot_product_attention(*projections(conv, x[start:end])).transpose(0, 1).flatten(1)
        torch.testing.assert_close(out[start:end], expected, rtol=0, atol=1e-10)


def test_block_diagonal_graph_is_separate_sequences() -> None:
    conv, x = layer(), tokens()
    joined = conv(x, patterns.block_diagonal(30, 3))
    apart = conv(x, patterns.full(None, ptr=torch.tensor([0, 10, 20, 30])))
    assert torch.equal(joined, apart)


@pytest.mark.parametrize("estimator", ["paper", "mask", "none"])
def test_ragged_batch_equals_its_sequences_exactly(estimator: str) -> None:
    """Weights and tokens in eighths make the projections exact in any order, so graphs, outputs and gradients must agree to the bit."""
    conv, x = layer(estimator=estimator), tokens()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_((parameter * 8).round() / 8)
    x = (x * 8).round() / 8
    x.requires_grad_()
    sequence_ids = torch.tensor([5, 0, 9])
    out, graph = conv(x, ptr=PTR, seed=3, sequence_ids=sequence_ids, return_graph=True)
    (grad,) = torch.autograd.grad(out.sin().sum(), x)
    for sequence, (start, end) in enumerate(pairwise(PTR)):
        part = x.detach()[start:end].clone().requires_grad_()
        alone, alone_graph = conv(part, seed=3, sequence_ids=sequence_ids[sequence : sequence + 1], return_graph=True)
        assert alone_graph == graph.sequence(sequence)
        assert torch.equal(alone, out[start:end])
        torch.testing.assert_close(
            torch.autograd.grad(alone.sin().sum(), part)[0], grad[start:end], rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize(
    ("estimator", "dropout", "window", "biased"),
    [*product(["paper", "mask", "none"], [0.0, 0.3], [None, 1], [False, True])],
)
def test_fused_equals_message_passing(estimator: str, dropout: float, window: int | None, biased: bool) -> None:
    conv = layer(
        estimator=estimator, dropout=dropout, window=window,
        score_bias=(lambda q, k, graph: graph.edge_index.sum(0).double().sin()) if biased else None,
    )  # fmt: skip
    results = []
    for fuse in (True, False):
        conv.fuse = fuse
        conv.zero_grad()
        x = tokens().requires_grad_()
        out, graph, (edge_index, alpha) = conv(x, ptr=PTR, seed=3, return_graph=True, return_attention_weights=True)
        assert torch.equal(edge_index, graph.edge_index)
        out.sin().sum().backward()
        results.append([out, alpha, x.grad, *(p.grad for p in conv.parameters() if p.grad is not None)])
    assert len(results[0]) == (9 if estimator == "none" else 14)
    for fused, eager in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sample", [True, False])
def test_bipartite(sample: bool) -> None:
    torch.manual_seed(0)
    conv = SBMAttentionConv((12, 16), 8, heads=2, num_clusters=4).double()
    keys, queries = torch.randn(20, 12, dtype=torch.float64), tokens(9)
    ptr = (torch.tensor([0, 15, 20]), torch.tensor([0, 4, 9]))
    given = None if sample else AttentionGraph.from_dense(torch.ones(9, 20))
    out, graph = conv((keys, queries), given, ptr=ptr if sample else None, seed=1, return_graph=True)
    assert out.shape == (9, 16)
    assert (graph.num_queries, graph.num_keys) == (9, 20)
    graph.validate()
    if not sample:
        q = conv.lin_query(queries).view(9, 2, 8).transpose(0, 1)
        k, v = (lin(keys).view(20, 2, 8).transpose(0, 1) for lin in (conv.lin_key, conv.lin_value))
        torch.testing.assert_close(
            out, F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1), rtol=0, atol=1e-10
        )


# ------------------------------------------------------------------ estimators


@pytest.mark.parametrize("estimator", ["paper", "mask", "none"])
@pytest.mark.parametrize("exploration", [0.0, 0.1])
def test_estimators_equal_their_closed_forms(estimator: str, exploration: float) -> None:
    """dL/dp = P (g - gbar) for "mask", times the score for "paper", on sampled edges; then dY = G Z S^T and so on."""
    paper: Any = {"parameterization": "paper", "cluster_init": "kaiming"}
    conv, x = layer(estimator=estimator, exploration=exploration, **paper, window=None), tokens()
    out, graph, choice = conv(x, seed=2, return_graph=True, return_choice=True)
    sbm = choice.probability
    weight = torch.randn(30, 16, dtype=torch.float64)
    memberships = (sbm.query_membership, sbm.key_membership, sbm.block_matrix)
    grads = torch.autograd.grad((out * weight).sum(), memberships, retain_graph=True, allow_unused=True)
    if estimator == "none":
        assert all(grad is None for grad in grads)
        return
    q, k, v = projections(conv, x)
    mask = graph.to_dense()
    score = q @ k.mT / 8**0.5
    alpha = score.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0)
    gain = weight.view(30, 2, 8).transpose(0, 1) @ v.mT
    g = alpha * (gain - (alpha * gain).sum(-1, keepdim=True))
    g = g * score if estimator == "paper" else g
    y, z, s = memberships
    torch.testing.assert_close(grads, (g @ z @ s.mT, g.mT @ y @ s, y.mT @ g @ z), rtol=1e-9, atol=1e-12)


def test_the_gate_does_not_change_the_output() -> None:
    x = tokens()
    outs = [layer(estimator=estimator)(x, seed=2) for estimator in ("paper", "mask", "none")]
    assert torch.equal(outs[0], outs[2])
    torch.testing.assert_close(outs[1], outs[2], rtol=1e-14, atol=1e-15)


def test_edges_that_are_forced_send_no_gradient_to_their_probability() -> None:
    conv, x = layer(window=29, exploration=0.0), tokens()
    out, graph, choice = conv(x, seed=1, return_graph=True, return_choice=True)
    sbm = choice.probability
    assert float(graph.density.min()) == 1  # the window forces every edge
    grad = torch.autograd.grad(out.sin().sum(), sbm.key_membership, allow_unused=True)[0]
    assert grad is None or not grad.any()


# ------------------------------------------------------------------ options


def test_exploration_in_training_only() -> None:
    conv, x = layer(exploration=1.0), tokens()
    assert conv(x, seed=1, return_graph=True)[1].num_edges == 2 * 900
    assert conv.eval()(x, seed=1, return_graph=True)[1].num_edges < 2 * 450


def test_self_loops_and_window_are_always_there() -> None:
    x = tokens()
    for options, pattern in (
        ({"window": 0}, patterns.self_loops(None, ptr=PTR)),
        ({"window": 2}, patterns.window(None, 2, ptr=PTR)),
    ):
        conv = layer(**options)
        graph = conv(x, ptr=PTR, seed=1, return_graph=True)[1].validate()
        plain = layer(window=None)(x, ptr=PTR, seed=1, return_graph=True)[1]
        assert graph == plain | pattern
        assert graph != plain


@pytest.mark.parametrize("estimator", ["relaxed", "concrete"])
def test_forced_edges_have_probability_one_in_a_soft_mask(estimator: str) -> None:
    """So where all edges are forced, training is full attention, as evaluation is."""
    conv, x = layer(estimator=estimator, window=30), tokens()
    full = conv(x, patterns.full(None, ptr=PTR))
    torch.testing.assert_close(conv(x, ptr=PTR, seed=1), full)
    torch.testing.assert_close(conv.eval()(x, ptr=PTR, seed=1), full)
    some = layer(estimator=estimator, window=0)
    none = layer(estimator=estimator, window=None)
    assert not torch.allclose(some(x, ptr=PTR, seed=1), none(x, ptr=PTR, seed=1))
    pair = (x, tokens(seed=2))
    assert torch.equal(some(pair, seed=1), none(pair, seed=1))


def test_the_default_estimator_is_one_for_the_law() -> None:
    options: tuple[dict[str, Any], ...] = ({}, {"method": "fastrg"}, {"normalizer": "sparsemax"})
    kinds = [type(layer(**option).estimator) for option in options]
    assert kinds == [estimators.Local, estimators.Mask, estimators.Mask]


@pytest.mark.parametrize("step", ["message", "propagate", "aggregate"])
def test_hooks_of_a_step_are_called(step: str) -> None:
    conv, x, calls = layer(), tokens(), []
    plain = conv(x, patterns.window(30, 2))
    getattr(conv, f"register_{step}_forward_hook")(lambda module, inputs, output: calls.append(step))
    conv.explain = False
    torch.testing.assert_close(conv(x, patterns.window(30, 2)), plain)
    assert calls == [step]


def test_hooks_of_the_fused_step_are_called() -> None:
    conv, x, graph = layer(), tokens(), patterns.window(30, 2)
    plain, calls = conv(x, graph), []
    before = conv.register_message_and_aggregate_forward_pre_hook(lambda module, inputs: calls.append(inputs[0]))
    conv.register_message_and_aggregate_forward_hook(lambda module, inputs, out: 2 * out)
    torch.testing.assert_close(conv(x, graph), 2 * plain)
    assert calls == [graph.expand(conv.heads)]
    before.remove()
    conv.register_message_and_aggregate_forward_pre_hook(
        lambda module, inputs: (patterns.full(30).expand(conv.heads), *inputs[1:])
    )
    torch.testing.assert_close(conv(x, graph), 2 * conv(x, patterns.full(30)) / 2)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("estimator", ["local", "mask", "none"])
def test_an_activation_in_place_may_follow(estimator: str, heads: int) -> None:
    conv, x = layer(heads=heads, estimator=estimator), tokens()
    expected = torch.autograd.grad(torch.relu(conv(x, seed=1)).sum(), [*conv.parameters()], allow_unused=True)
    found = torch.autograd.grad(torch.relu_(conv(x, seed=1)).sum(), [*conv.parameters()], allow_unused=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("make", [SBMAttentionConv, partial(SBMAttentionConv, target_density=1.0), FullAttention])
def test_an_activation_in_place_may_follow_where_the_output_is_a_view(make: Any, heads: int, length: int) -> None:
    """That of dense attention over sequences of one length, and that of one token."""
    torch.manual_seed(0)
    layer = make(16, 8, heads).double()
    x, ptr = tokens(length).requires_grad_(), torch.tensor([0, length])
    layer.requires_grad_(False)  # so that no auxiliary loss makes the output another tensor
    (wanted,) = torch.autograd.grad(torch.relu(layer(x, ptr=ptr, seed=1)).sum(), x)
    (found,) = torch.autograd.grad(layer(x, ptr=ptr, seed=1).relu_().sum(), x)
    assert torch.equal(found, wanted)


def test_threads_that_share_a_layer_get_their_own_weights() -> None:
    conv = layer(normalizer="entmax15")
    cases = [tokens(30, seed) for seed in range(3)]
    graph = patterns.full(30)
    expected = [conv(x, graph, return_attention_weights=True)[1][1] for x in cases]
    wrong = []

    def work(case: int) -> None:
        for _ in range(20):
            weights = conv(cases[case], graph, return_attention_weights=True)[1][1]
            if not torch.allclose(weights, expected[case], atol=1e-5):  # threads may round projections otherwise
                wrong.append(case)

    threads = [threading.Thread(target=work, args=(case,)) for case in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tokens_of_one_channel_are_tokens() -> None:
    assert SBMAttentionConv(1, 8, 2, 3)(torch.randn(5, 1), seed=0).shape == (5, 16)
    assert SBMAttentionConv((2, 1), 8, 2, 3)((torch.randn(4, 2), torch.randn(5, 1)), seed=0).shape == (5, 16)


def test_budget_reaches_the_sampler() -> None:
    graph = layer(budget=1.0, exploration=0.0, row_group=1)(tokens(), seed=1, return_graph=True)[1]
    assert graph.num_edges < 120


def test_queries_without_edges_give_zeros() -> None:
    mask = torch.ones(30, 30)
    mask[4] = 0
    out = layer()(tokens(), AttentionGraph.from_dense(mask))
    assert out[4].eq(0).all()
    assert out[5].ne(0).all()


@pytest.mark.parametrize("normalizer", ["entmax15", "sparsemax"])
def test_entmax_normalizers(normalizer: str) -> None:
    conv, x = layer(normalizer=normalizer), tokens()
    out, (_edge_index, alpha) = conv(x * 4, ptr=PTR, seed=1, return_attention_weights=True)
    assert out.shape == (30, 16)
    assert alpha.eq(0).any()
    graph = conv(x * 4, ptr=PTR, seed=1, return_graph=True)[1]
    sums = torch.zeros(60, dtype=torch.float64).index_add(0, graph.edge_row, alpha)
    assert torch.allclose(sums[graph.degree.flatten() > 0], torch.ones(1, dtype=torch.float64))
    out.sum().backward()
    assert conv.lin_key.weight.grad.isfinite().all()


def test_concat_or_mean() -> None:
    graph = patterns.window(30, 2)
    together, mean = layer()(tokens(), graph), layer(concat=False)(tokens(), graph)
    torch.testing.assert_close(mean, together.view(30, 2, 8).mean(1))


def test_offsets_and_sequence_numbers_may_be_lists() -> None:
    conv, x = SBMAttentionConv(16, 8, heads=2, num_clusters=4).eval(), torch.randn(30, 16)
    expected = conv(x, ptr=torch.tensor([0, 10, 30]))
    assert torch.equal(conv(x, ptr=[0, 10, 30]), expected)
    assert torch.equal(conv(x, batch=[0] * 10 + [1] * 20), expected)
    assert torch.equal(conv(x, ptr=[0, 30]), conv(x))
    pair = conv((x, x[:20]), ptr=([0, 10, 30], [0, 5, 20]))
    assert torch.equal(pair, conv((x, x[:20]), ptr=(torch.tensor([0, 10, 30]), torch.tensor([0, 5, 20]))))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore::torch.jit.TracerWarning")
def test_calls_as_other_libraries_have_them_are_told_the_way() -> None:
    conv, x = SBMAttentionConv(16, 8, heads=2, num_clusters=4), torch.randn(30, 16)
    parts = [x[:10], x[10:20], x[20:]]
    calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, r"'edge_index' to be \[2, E\], or a graph \(got \[30\]\). .*`batch=`",
         lambda: conv(x, torch.zeros(30, dtype=torch.int64))),
        (TypeError, r"got list\). .*`torch.cat\(x\)`", lambda: conv(cast(Any, parts))),
        (TypeError, r"a nested tensor\). .*unbind", lambda: conv(torch.nested.nested_tensor(parts))),
        (TypeError, r"a nested tensor\). .*offsets\(\)",
         lambda: conv(torch.nested.nested_tensor(parts, layout=torch.jagged))),
        (TypeError, r"`torch.jit.trace` follows", lambda: torch.jit.trace(conv, (x,))),
        (TypeError, r"unknown arguments \['beta'\]. .*mix the output", lambda: AttentionConv(8, 4, beta=True)),
        (ValueError, r"'aggr_kwargs' to be None", lambda: AttentionConv(8, 4, aggr_kwargs={"p": 2})),
        (ValueError, r"'x' of at least one channel", lambda: AttentionConv(-1, 4)(x[:, :0], patterns.full(30))),
    ]  # fmt: skip
    for error, message, call in calls:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(
    ("build", "name"),
    [(lambda n: AttentionConv(n, 4), "in_channels"), (lambda n: AttentionConv((4, n), 4), "in_channels"),
     (lambda n: AttentionConv(4, n), "out_channels"), (lambda n: AttentionConv(4, 4, n), "heads"),
     (lambda n: AttentionConv(4, 4, edge_dim=n), "edge_dim"),
     (lambda n: SBMAttentionConv(4, 4, num_clusters=n), "num_clusters"),
     (lambda n: SBMMultiheadAttention(n, 2), "embed_dim"), (lambda n: SBMMultiheadAttention(4, 2, vdim=n), "vdim"),
     (lambda n: FullAttention(4, 4, n), "heads"), (lambda n: SBMHead(n), "channels"),
     (lambda n: SBMHead(4, n), "heads"), (lambda n: BlockPool(n), "channels"),
     (lambda n: indexer.Indexer(n), "channels"), (lambda n: indexer.Indexer(4, index_heads=n), "index_heads"),
     (lambda n: indexer.KeyScorer(4, hidden=n), "hidden"), (lambda n: Projection(4, n), "heads")],
)  # fmt: skip
def test_sizes_above_memory_are_named(build: Callable[[int], object], name: str) -> None:
    refuses(lambda: build(10**12), f"Expected '{name}' to ask for no more than memory holds")


def test_evaluation_repeats_without_a_seed() -> None:
    conv, x = SBMAttentionConv(16, 8, heads=2, num_clusters=4), torch.randn(30, 16)
    assert conv(x, return_graph=True)[1] != conv(x, return_graph=True)[1]
    graphs = [conv.eval()(x, return_graph=True, **seed)[1] for seed in ({}, {}, {"seed": 0}, {"seed": 1})]
    assert graphs[0] == graphs[1] == graphs[2] != graphs[3]
    conv.eval_seed = 1
    assert conv(x, return_graph=True)[1] == graphs[3]
    conv.eval_seed = None
    assert conv(x, return_graph=True)[1] != conv(x, return_graph=True)[1]
    assert "eval_seed" not in conv.state_dict()


def test_seeds() -> None:
    conv, x = layer(dropout=0.2), tokens()
    assert torch.equal(conv(x, seed=1), conv(x, seed=1))
    assert not torch.equal(conv(x, seed=1), conv(x, seed=2))
    torch.manual_seed(5)
    first = conv(x)
    torch.manual_seed(5)
    assert torch.equal(conv(x), first)


@pytest.mark.parametrize("fuse", [True, False])
def test_what_nan_in_a_token_that_no_edge_touches_reaches(fuse: bool) -> None:
    """No output and no gradient of a token; the parameters of the projections, which are applied to every token."""
    conv, x = layer(), tokens()
    conv.fuse = fuse
    apart = torch.arange(30) == 4
    graph = patterns.full(30).select(~(apart[patterns.full(30).edge_index]).any(0))
    expected = conv(x, graph)
    broken = torch.where(apart[:, None], torch.nan, x).requires_grad_()
    out = conv(broken, graph)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)
    out.sum().backward()
    assert broken.grad is not None
    assert not broken.grad.isnan().any()
    for lin in (conv.lin_query, conv.lin_key, conv.lin_value):
        assert lin.weight.grad.isnan().any()


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("options", "message"),
    [({"method": "exact"}, r"Expected 'method' to be one of"),
     ({"exploration": -0.1}, r"Expected 'exploration' in \[0, 1\] \(got -0.1\)"),
     ({"aggr": "mean"}, r"Expected 'aggr' to be 'add' \(got 'mean'\)"),
     ({"flow": "target_to_source"}, r"Expected 'flow' to be 'source_to_target' \(got 'target_to_source'\)"),
     ({"decomposed_layers": 2}, r"Expected 'decomposed_layers' to be 1 \(got 2\)")],
)  # fmt: skip
def test_option_errors(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(**options)


@pytest.mark.parametrize(
    ("source", "usual"),
    [(lambda: SBMSource(SBMHead(8, 2, 4)), "Local"), (lambda: SBMSource(SBMHead(8, 2, 4), method="fastrg"), "Mask"),
     (lambda: IndexerSource(Indexer(8, 2), select="bernoulli", target_density=0.5), "Local"),
     (lambda: IndexerSource(Indexer(8, 2), target_density=0.5, select="top_k"), "Imitate")],
)  # fmt: skip
def test_the_estimator_is_derived_for_the_law_of_the_source(source: Callable[[], GraphSource], usual: str) -> None:
    """Edges of another law would train in silence on a gradient that is not theirs."""
    conv = AttentionConv(16, 8, 2, source=source())
    assert type(conv.estimator).__name__ == usual
    assert type(AttentionConv(16, 8, 2, source=source(), normalizer="entmax15").estimator).__name__ == "Mask"
    for name in ("local", "distill"):
        if usual == "Local":
            AttentionConv(16, 8, 2, source=source(), estimator=name)
        else:
            with pytest.raises(ValueError, match="Expected 'estimator' to support method"):
                AttentionConv(16, 8, 2, source=source(), estimator=name)


@pytest.mark.parametrize("node_dim", [0, -2])
def test_the_axis_of_tokens_is_the_one_of_pyg(node_dim: int) -> None:
    conv, same = layer(node_dim=node_dim), layer()
    assert conv.node_dim == same.node_dim
    torch.testing.assert_close(conv(tokens(), patterns.full(30)), same(tokens(), patterns.full(30)))


@pytest.mark.parametrize(("x", "weight"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_autocast_leaves_float64_alone(x: torch.dtype, weight: torch.dtype) -> None:
    conv = layer().to(weight)
    message = rf"Expected 'x' to be {weight}, .* \(got {x}\)\. .* which leaves float64 alone"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=message):
        conv(tokens().to(x), patterns.full(30))


def test_a_window_forces_nothing_between_different_tokens() -> None:
    """As in cross attention: the output is that of a layer without a window."""
    pair = (tokens(), tokens(seed=2))
    outs = [layer(window=window, target_density=0.3)(pair, seed=0, return_choice=True) for window in (None, 0, 3)]
    assert all(torch.equal(out, outs[0][0]) and choice.forced is None for out, choice in outs)


def test_each_token_keeps_its_own_key() -> None:
    """Without forced edges, a density of 5 % leaves many of 30 queries without any key."""
    x = tokens()
    for options in ({}, {"is_causal": True}, {"block_size": 3}):
        conv = layer(target_density=0.05, **options)
        graph = conv(x, ptr=PTR, seed=0, return_graph=True)[1]
        assert graph.contains(patterns.self_loops(30).edge_index).all()
        assert not graph.degree.eq(0).any()
    assert layer(target_density=0.05, window=None)(x, ptr=PTR, seed=0, return_graph=True)[1].degree.eq(0).any()


def test_call_errors() -> None:
    conv, x = layer(), tokens()
    refuses(lambda: conv(x, patterns.full(20)), "over N = 30 queries and M = 30 keys (got AttentionGraph")
    refuses(lambda: conv(x, torch.tensor([[0, 30], [0, 1]])), "Expected 'edge_index[0]' in 0..29 (got 0 to 30)")
    refuses(lambda: SBMAttentionConv(16, 0), "Expected 'out_channels' to be at least 1 (got 0)")


def test_tokens_of_another_width_or_type_are_named() -> None:
    pair, x, narrow = SBMAttentionConv((12, 16), 8).double(), tokens(), torch.zeros(30, 12).double()
    refuses(lambda: pair((x, narrow)), "Expected 'x' to be [N, 12], as 'in_channels' says (got [30, 16])")


def test_streams_of_a_given_graph_are_refused() -> None:
    with pytest.raises(ValueError, match="Expected no 'sequence_ids' with a given 'edge_index'"):
        layer()(tokens(), patterns.full(None, ptr=PTR), sequence_ids=torch.arange(3))


@pytest.mark.parametrize("shape", [(16,), (3, 10, 16), (1, 3, 10, 16)])
def test_padded_tokens_are_refused(shape: tuple[int, ...]) -> None:
    """They would be one sequence, in which every example sees every other."""
    with pytest.raises(ValueError, match=r"Expected 'x' to be \[N, C_in\] \(got .*`sbm_pyg.unpad`"):
        layer()(torch.zeros(shape, dtype=torch.float64))


def test_a_graph_of_other_sequences_is_refused() -> None:
    conv, x = layer(), tokens()
    batch = torch.repeat_interleave(torch.arange(3), PTR.diff())
    for offsets in ({"ptr": PTR}, {"batch": batch}):
        refuses(
            partial(cast(Any, conv), x, patterns.full(30), **offsets),
            "Expected 'edge_index' over the sequences of 'ptr' or 'batch' (got AttentionGraph(1 sequence",
        )
        conv(x, patterns.full(None, ptr=PTR.clone()), **offsets)
    conv(x, patterns.full(None, ptr=PTR))  # whose own sequences count


def test_a_graph_that_leaves_its_tokens_is_refused() -> None:
    """A kernel would read what lies beyond its arrays."""
    conv, x = layer(), tokens()
    rowptr = torch.arange(31)
    for key in (-1, 30, 10**7):
        col = torch.zeros(30, dtype=torch.int32).index_fill(0, torch.tensor(3), key)
        with pytest.raises(ValueError, match=r"Expected 'col' to hold keys of the sequence of their query"):
            conv(x, AttentionGraph(rowptr, col, 30, 30, 1))
    for offsets in (rowptr + 1, rowptr * 2, rowptr.index_fill(0, torch.tensor(5), 10**7)):
        with pytest.raises(ValueError, match="Expected 'rowptr' to rise from 0 to E = 30"):
            conv(x, AttentionGraph(offsets, torch.zeros(30, dtype=torch.int32), 30, 30, 1))


@pytest.mark.parametrize(
    "wrong", [lambda graph: torch.zeros(1), lambda graph: torch.zeros(graph.num_edges, 1), lambda graph: 0.0]
)
@pytest.mark.parametrize("fuse", [True, False])
def test_a_score_bias_of_another_shape_is_refused(wrong: Callable[[AttentionGraph], object], fuse: bool) -> None:
    conv = layer(score_bias=lambda query, key, graph: wrong(graph))
    conv.fuse = fuse
    refuses(lambda: conv(tokens(), patterns.full(30)), "Expected 'score_bias' to be ", (TypeError, ValueError))


def test_the_sampled_graph_is_that_of_sample_edges() -> None:
    for row_group in (1, 16):
        conv, x = layer(exploration=0.03, window=None, row_group=row_group), tokens()
        _, choice = conv(x, ptr=PTR, seed=4, return_choice=True)
        assert choice.graph == sample_edges(choice.probability, exploration=0.03, seed=4, row_group=row_group)


# ------------------------------------------------------------------ what is written into meanwhile


def _writes_by_torch(x: Tensor, values: list[int]) -> None:
    x.copy_(torch.tensor(values))


def _writes_by_numpy(x: Tensor, values: list[int]) -> None:
    x.numpy()[:] = values  # which counts no version


def over(source: Callable[[], GraphSource], estimator: str = "none", biased: bool = False) -> AttentionConv:
    torch.manual_seed(0)
    bias = DCMMBias(8, 2, 2, entropy_weight=0.3) if biased else None
    return AttentionConv(16, 8, 2, source(), estimator=estimator, score_bias=bias).double()


def coins(select: str = "bernoulli") -> IndexerSource:
    return IndexerSource(Indexer(8, 2), select=select, target_density=0.3)


SAMPLING: dict[str, Callable[[], AttentionConv]] = {
    "tokens": layer, "share": lambda: layer(target_density=0.3), "causal": lambda: layer(is_causal=True, estimator="distill"),
    "blocks": lambda: layer(block_size=4), "blocks, causal": lambda: layer(block_size=4, is_causal=True, pool="learned"),
    "coins": lambda: over(coins, "local"), "coins, distilled": lambda: over(coins, "distill"),
    "ranks": lambda: over(lambda: coins(select="top_k"), "imitate"), "routing": lambda: over(lambda: selectors.RoutingSource(8, 2, 3)),
    "lsh": lambda: over(lambda: selectors.SelectorSource(selectors.lsh, num_buckets=4, chunk_size=2)),
    "bias": lambda: over(coins, "local", biased=True),
}  # fmt: skip


@pytest.mark.parametrize("write", [_writes_by_torch, _writes_by_numpy])
@pytest.mark.parametrize("kind", SAMPLING)
def test_writing_into_offsets_after_a_call_changes_no_gradient(kind: str, write: Callable[..., None]) -> None:
    def gradients(written: bool) -> list[Tensor]:
        conv, x = SAMPLING[kind](), tokens().requires_grad_()
        ptr, ids = PTR.clone(), torch.tensor([4, 5, 6])
        loss = conv(x, ptr=ptr, seed=1, sequence_ids=ids).square().sum() + auxiliary_loss(conv)
        if written:
            write(ptr, [0, 2, 28, 30])
            write(ids, [7, 8, 9])
        loss.backward()
        return [x.grad, *(parameter.grad for parameter in conv.parameters() if parameter.grad is not None)]

    kept, changed = gradients(False), gradients(True)
    assert len(kept) == len(changed)
    assert all(map(torch.equal, kept, changed))


@pytest.mark.parametrize("write", [_writes_by_torch, _writes_by_numpy])
@pytest.mark.parametrize("kind", SAMPLING)
def test_offsets_that_were_written_into_are_looked_at_again(kind: str, write: Callable[..., None]) -> None:
    conv, x, ptr, ids = SAMPLING[kind]().eval(), tokens(), PTR.clone(), torch.tensor([4, 5, 6])
    conv(x, ptr=ptr, seed=1, sequence_ids=ids)
    write(ptr, [0, 2, 28, 30])
    write(ids, [7, 8, 9])
    fresh = conv(x, ptr=torch.tensor([0, 2, 28, 30]), seed=1, sequence_ids=torch.tensor([7, 8, 9]))
    assert torch.equal(conv(x, ptr=ptr, seed=1, sequence_ids=ids), fresh)
    write(ptr, [0, -1, 17, 30])
    refuses(lambda: conv(x, ptr=ptr, seed=1), "Expected 'ptr' to be ascending")


@pytest.mark.parametrize("write", [_writes_by_torch, _writes_by_numpy])
def test_a_graph_of_blocks_keeps_its_offsets(write: Callable[..., None]) -> None:
    """Of a source that is called by itself, too."""
    source, q, ptr = layer(block_size=4).source, torch.randn(2, 30, 8, dtype=torch.float64), PTR.clone()
    assert source is not None
    graph = source(Tokens(q, query_ptr=ptr, seed=1)).graph
    write(ptr, [0, 2, 28, 30])
    assert graph.query_ptr.tolist() == PTR.tolist()
    assert graph == source(Tokens(q, query_ptr=PTR, seed=1)).graph


# ------------------------------------------------------------------ edge features


def edge_problem(edges: int = 150, **options: Any) -> tuple[AttentionConv, Tensor, Tensor, Tensor]:
    """A layer with edge features, tokens, unsorted distinct edges, and their features."""
    random = torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    conv = AttentionConv(16, 8, 2, edge_dim=5, **options).double()
    edge_index = coalesce(torch.randint(30, (2, edges), generator=random))
    edge_index = edge_index[:, torch.randperm(edge_index.size(1), generator=random)]
    edge_attr = torch.randn(edge_index.size(1), 5, generator=random, dtype=torch.float64)
    return conv, tokens(), edge_index, edge_attr


def equal_with_gradients(first: Any, second: Any, *leaves: Tensor) -> None:
    """Two calls give the same output, and the same gradients for the leaves."""
    found = []
    for call in (first, second):
        out = call()
        found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("concat", [True, False])
def test_edge_features_are_those_of_transformer_conv(fuse: bool, concat: bool) -> None:
    conv, x, edge_index, edge_attr = edge_problem(concat=concat)
    conv.fuse = fuse
    pyg = TransformerConv(16, 8, 2, concat=concat, edge_dim=5, root_weight=False).double()
    names = ("lin_query", "lin_key", "lin_value", "lin_edge")
    for name in names:
        getattr(pyg, name).load_state_dict(getattr(conv, name).state_dict())
    x.requires_grad_()
    edge_attr.requires_grad_()
    results = []
    for layer, call in ((conv, {"edge_attr": edge_attr}), (pyg, {"edge_attr": edge_attr})):
        out, (edges, alpha) = layer(x, edge_index, return_attention_weights=True, **call)
        assert torch.equal(edges, edge_index)
        leaves = [x, edge_attr, *(getattr(layer, name).weight for name in names)]
        results.append([out, alpha, *torch.autograd.grad(out.sin().sum(), leaves)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_edge_features_in_every_form_of_a_graph() -> None:
    conv, x, edge_index, edge_attr = edge_problem()
    expected = conv(x, edge_index, edge_attr=edge_attr)
    order = (30 * edge_index[1] + edge_index[0]).argsort()
    graph = AttentionGraph.from_edge_index(edge_index, 30)
    equal = torch.testing.assert_close
    equal(conv(x, graph, edge_attr=edge_attr[order]), expected)
    equal(conv(x, graph.expand(2), edge_attr=edge_attr[order].repeat(2, 1)), expected)
    sparse = torch.sparse_coo_tensor(
        edge_index.flip(0), torch.ones(edge_index.size(1)), (30, 30), check_invariants=True
    )
    equal(conv(x, sparse, edge_attr=edge_attr[order]), expected)
    both, head = edge_index.repeat(1, 2), torch.arange(2).repeat_interleave(edge_index.size(1))
    mixed = torch.randperm(both.size(1), generator=torch.Generator().manual_seed(4))
    given = {"edge_attr": edge_attr.repeat(2, 1)[mixed], "edge_head": head[mixed]}
    out, (_, alpha) = conv(x, both[:, mixed], return_attention_weights=True, **given)
    equal(out, expected)
    equal(alpha, conv(x, edge_index, edge_attr=edge_attr, return_attention_weights=True)[1][1].T.flatten()[mixed])
    for number, out in enumerate(expected.unflatten(1, (2, 8)).unbind(1)):  # a head without edges gives zeros
        one = conv(x, edge_index, edge_attr=edge_attr, edge_head=torch.full_like(edge_index[0], number))
        equal(one.unflatten(1, (2, 8))[:, number], out)
        assert not one.unflatten(1, (2, 8))[:, 1 - number].any()
    none = conv(x, edge_index[:, :0], edge_attr=edge_attr[:0])
    assert none.shape == expected.shape
    assert not none.any()


@pytest.mark.parametrize("options", [{"dropout": 0.4}, {"normalizer": "entmax"}, {"is_causal": True, "score_bias": 2}])
def test_edge_features_with_other_options(options: dict[str, Any]) -> None:
    if "score_bias" in options:
        options |= {"score_bias": ALiBi(2)}
    conv, x, edge_index, edge_attr = edge_problem(**options)
    edge_attr.requires_grad_()
    if conv.is_causal:  # the same as without the edges from later keys
        kept = edge_index[0] <= edge_index[1]
        head = torch.arange(edge_index.size(1)) % 2
        for heads in (None, head):
            given = {"edge_attr": edge_attr, "edge_head": heads}
            fewer = {"edge_attr": edge_attr[kept], "edge_head": None if heads is None else heads[kept]}
            less = conv(x, edge_index[:, kept], **fewer)
            torch.testing.assert_close(conv(x, edge_index, **given), less, rtol=1e-10, atol=1e-12)

    def call(fuse: bool) -> Tensor:
        conv.fuse = fuse
        return conv(x, edge_index, edge_attr=edge_attr, seed=3)

    assert conv.lin_edge is not None
    leaves = (edge_attr, conv.lin_edge.weight, conv.lin_key.weight)
    equal_with_gradients(lambda: call(True), lambda: call(False), *leaves)


def test_hooks_of_the_projection_of_edge_features_are_called() -> None:
    conv, x, edge_index, edge_attr = edge_problem()
    expected, seen = conv(x, edge_index, edge_attr=edge_attr), []
    assert conv.lin_edge is not None
    conv.lin_edge.register_forward_hook(lambda layer, inputs, out: seen.append(out.shape))
    torch.testing.assert_close(conv(x, edge_index, edge_attr=edge_attr), expected, rtol=1e-10, atol=1e-12)
    assert seen == [(edge_index.size(1), 16)]


def test_edge_features_between_two_sides_and_in_a_batch() -> None:
    conv, x, *_ = edge_problem()
    edges, attr = torch.tensor([[3, 0, 3, 2], [0, 1, 1, 0]]), torch.randn(4, 5, dtype=torch.float64)
    one = conv((x[:4], x[:2]), edges, edge_attr=attr)
    ptrs = (torch.tensor([0, 4, 8]), torch.tensor([0, 2, 4]))
    two = conv((x[[0, 1, 2, 3] * 2], x[[0, 1] * 2]), torch.cat([edges, edges + torch.tensor([[4], [2]])], 1),
               edge_attr=attr.repeat(2, 1), ptr=ptrs)  # fmt: skip
    torch.testing.assert_close(two, one.repeat(2, 1))


def test_a_filter_may_keep_other_edges_with_features_in_each_head() -> None:
    conv, x, edge_index, edge_attr = edge_problem()
    graph = AttentionGraph.from_edge_index(edge_index, 30).expand(2)
    kept = (graph.edge_index.sum(0) + graph.edge_head) % 2 == 0
    order = (30 * edge_index[1] + edge_index[0]).argsort()
    expected = conv(x, graph.select(kept), edge_attr=edge_attr[order].repeat(2, 1)[kept])
    query, key, value = (
        lin(x).view(30, 2, 8).transpose(0, 1).contiguous() for lin in (conv.lin_query, conv.lin_key, conv.lin_value)
    )
    out = conv.attend(query, key, value, edge_index, edge_attr=edge_attr, edge_filter=lambda given: kept)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_edge_features_compile_as_one_graph() -> None:
    conv, x, edge_index, edge_attr = edge_problem(edges=20)
    weight = cast(Any, conv.lin_edge).weight
    edge_attr.requires_grad_()
    compiled: Any = torch.compile(conv, fullgraph=True, backend="aot_eager")
    graph, head = AttentionGraph.from_edge_index(edge_index, 30), torch.arange(edge_index.size(1)) % 2
    for edges, number in ((edge_index, None), (edge_index, head), (graph, None)):
        given: dict[str, Any] = {"edge_attr": edge_attr, "edge_head": number}
        first, second = (partial(each, x, edges, **given) for each in (cast(Any, conv), compiled))
        equal_with_gradients(first, second, edge_attr, weight)
    with pytest.raises(RuntimeError, match="Expected 'edge_index' to hold each edge once"):
        compiled(x, edge_index[:, [0, *range(edge_index.size(1) - 1)]], edge_attr=edge_attr)


def test_an_explainer_sees_edges_with_features() -> None:
    conv, x, edge_index, edge_attr = edge_problem()
    expected, mask = conv(x, edge_index, edge_attr=edge_attr), torch.ones(edge_index.size(1), dtype=torch.float64)
    set_masks(conv, mask.mul_(torch.arange(mask.numel()) != 7), edge_index, apply_sigmoid=False)
    out = conv(x, edge_index, edge_attr=edge_attr)
    clear_masks(conv)
    changed = (out - expected).abs().sum(1) > 1e-9
    assert changed.nonzero().flatten().tolist() == [int(edge_index[1, 7])]


def test_edge_features_that_do_not_fit_are_refused() -> None:
    conv, x, edge_index, edge_attr = edge_problem(source=patterns.PatternSource(patterns.full))
    plain = AttentionConv(16, 8, 2).double()
    blocks = layer(block_size=2)(x, return_graph=True)[1]
    calls: list[tuple[str, Callable[[], Any]]] = [
        (r"'edge_attr' if the layer has an 'edge_dim', .*got none.* one\)", lambda: conv(x, edge_index)),
        (r"'edge_attr' if .*got some.* none\)", lambda: plain(x, edge_index, edge_attr=edge_attr)),
        (r"'edge_index' with 'edge_attr' \(got None\).*chooses", lambda: conv(x, edge_attr=edge_attr)),
        (r"'edge_attr' to be \[E, D\]", lambda: conv(x, edge_index, edge_attr=edge_attr[:, :4])),
        (r"'edge_attr' to be .*each once", lambda: conv(x, edge_index, edge_attr=edge_attr[1:])),
        (r"'edge_attr' to be .*coalesce", lambda: conv(x, edge_index[:, [0, 0]], edge_attr=edge_attr[:2])),
        (r"'edge_attr' to be .*coalesce", lambda: conv(x, edge_index[:, [0, 0]], edge_attr=edge_attr[:1])),
        (r"'edge_index' to be a graph of tokens", lambda: conv(x, blocks, edge_attr=edge_attr)),
        (r"'edge_attr' to be torch.float64", lambda: conv(x, edge_index, edge_attr=edge_attr.float())),
        (r"'edge_dim' to be an int", lambda: AttentionConv(16, 8, edge_dim=2.5)),  # type: ignore[arg-type]
        (r"no 'rotary' with an 'edge_dim'", lambda: AttentionConv(16, 8, edge_dim=2, rotary=Rotary())),
    ]
    for message, call in calls:
        with pytest.raises((TypeError, ValueError), match=f"^Expected {message}"):
            call()
