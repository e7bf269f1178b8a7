"""What sparse attention loses by head, against dense attention in matrices."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from problems import same
from torch import Tensor, nn

from sbm_pyg import (
    AttentionConv,
    AttentionGraph,
    Rotary,
    SBMAttentionConv,
    SBMMultiheadAttention,
    Sparsifier,
    make_attention,
    patterns,
)
from sbm_pyg.analysis import Head, compare_heads, record_attention

PTR = torch.tensor([0, 5, 12])
X = torch.randn(12, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@torch.no_grad()
def by_matrices(conv: AttentionConv, graph: AttentionGraph, x: Tensor, is_causal: bool = False) -> list[Any]:
    """Density, kept and possible part, and error of each head, as means over all queries."""
    query, key, value = (
        lin(x).view(len(x), conv.heads, -1).transpose(0, 1) for lin in (conv.lin_query, conv.lin_key, conv.lin_value)
    )
    same = torch.repeat_interleave(PTR.diff())[:, None] == torch.repeat_interleave(PTR.diff())
    allowed = same.tril() if is_causal else same
    mask = torch.zeros(conv.heads, len(x), len(x), dtype=torch.bool)
    mask[graph.edge_head, graph.edge_index[1], graph.edge_index[0]] = True
    scores = (query @ key.mT * conv.scale).masked_fill(~allowed, -torch.inf)
    weight = scores.softmax(-1)
    sparse = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0)
    found = []
    for head in range(conv.heads):
        best = sum(
            float(row.sort(descending=True).values[: int(kept.sum())].sum())
            for row, kept in zip(weight[head], mask[head], strict=True)
        )
        dense, error = weight[head] @ value[head], (sparse[head] - weight[head]) @ value[head]
        kept = float((weight[head] * mask[head]).sum()) / len(x)
        found.append([kept, best / len(x), float(error.norm() / dense.norm())])
    return found


@pytest.mark.parametrize("is_causal", [False, True])
def test_numbers_are_those_of_matrices(is_causal: bool) -> None:
    torch.manual_seed(0)
    conv = SBMAttentionConv(8, 4, 2, num_clusters=3, target_density=0.3, is_causal=is_causal).double().eval()
    with compare_heads(conv, rows=math.inf) as table:
        graph = conv(9 * X, ptr=PTR, seed=3, return_graph=True)[1]
    for head, wanted in zip(table.heads, by_matrices(conv, graph, 9 * X, is_causal), strict=True):
        torch.testing.assert_close([head.kept, head.possible, head.error], wanted)
        assert head.density == pytest.approx(float(graph.density[:, head.head].mean()))
        assert head.kept < head.possible


def test_outputs_are_what_they_are_without_the_context() -> None:
    torch.manual_seed(0)
    conv = SBMAttentionConv(8, 4, 2, num_clusters=3, target_density=0.3).double()
    wanted = conv(X, ptr=PTR, seed=3)
    with compare_heads(conv) as table:
        assert torch.equal(conv(X, ptr=PTR, seed=3), wanted)
        out, graph, choice, (_, alpha) = conv(
            X, ptr=PTR, seed=3, return_graph=True, return_choice=True, return_attention_weights=True
        )
        assert torch.equal(out, wanted)
        assert graph is choice.graph
        assert alpha.shape == (graph.num_edges,)
        assert out.requires_grad
    assert len(table.heads) == 2
    assert "attend" not in vars(conv)
    with pytest.raises(RuntimeError), compare_heads(conv):
        raise RuntimeError
    assert "attend" not in vars(conv)


def test_calls_add_up_and_a_sample_of_rows_is_near_to_all() -> None:
    torch.manual_seed(0)
    conv = AttentionConv(8, 4, 2, patterns.PatternSource(patterns.window, size=3)).double()
    x = 3 * torch.randn(400, 8, dtype=torch.float64)
    with compare_heads(conv, rows=math.inf) as every:
        conv(x)
    with compare_heads(conv, rows=1.0) as few:
        for _ in range(20):
            conv(x)
    for one, two in zip(every.heads, few.heads, strict=True):
        assert two.kept == pytest.approx(one.kept, rel=0.15)
        assert two.error == pytest.approx(one.error, rel=0.15)
        assert two.density == pytest.approx(one.density)


def test_dense_attention_loses_nothing() -> None:
    conv = SBMAttentionConv(8, 4, 2, num_clusters=3).double()
    Sparsifier(conv, 0.3, 10)
    with compare_heads(conv) as table:
        conv(X, ptr=PTR)
    assert table.heads == [Head("", head, 1.0, 1.0, 1.0, 0.0) for head in range(2)]
    full = AttentionConv(8, 4, 2, patterns.PatternSource(patterns.full), normalizer="entmax15").double()
    with compare_heads(full, rows=math.inf) as table:
        full(X, ptr=PTR)
    for head in table.heads:
        torch.testing.assert_close([*head[2:]], [1.0, 1.0, 1.0, 0.0], atol=1e-9, rtol=0)


def test_dense_and_sparse_calls_count_alike() -> None:
    torch.manual_seed(0)
    conv = SBMAttentionConv(8, 4, 2, num_clusters=3).double()
    Sparsifier(conv, 0.3, 10)
    with compare_heads(conv, rows=math.inf) as both:
        conv(X, ptr=PTR, seed=0)
        with compare_heads(conv.eval(), rows=math.inf) as sparse:
            conv(X, ptr=PTR, seed=0)
    for mean, one in zip(both.heads, sparse.heads, strict=True):
        wanted = [(1 + part) / 2 for part in one[2:5]] + [one.error / 2**0.5]
        torch.testing.assert_close([*mean[2:]], wanted)


def test_padding_and_masks_are_not_pairs() -> None:
    torch.manual_seed(0)
    attention = SBMMultiheadAttention(8, 2, batch_first=True, num_clusters=3, window=1, dtype=torch.float64)
    x, padding = X[:10].view(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    mask = torch.ones(5, 5, dtype=torch.bool).triu(2)
    with compare_heads(attention, rows=math.inf) as table:
        attention(x, x, x, padding, attn_mask=mask, need_weights=False, seed=0)
    assert {head.layer for head in table.heads} == {"conv"}
    cast(Any, attention.conv).source = patterns.PatternSource(patterns.full)
    with compare_heads(attention, rows=math.inf) as table:
        attention(x, x, x, padding, attn_mask=mask, need_weights=False)
    assert all(head.kept == pytest.approx(1) and head.error < 1e-12 for head in table.heads)


def test_diffuse_heads_are_named() -> None:
    conv = AttentionConv(8, 4, 2, patterns.PatternSource(patterns.self_loops)).double()
    with torch.no_grad():
        conv.lin_query.weight[4:] = 0  # the second head attends to all tokens alike
        conv.lin_query.bias.zero_()
        conv.lin_query.weight[:4] *= 30
        conv.lin_key.weight[:4] = conv.lin_query.weight[:4]
        conv.lin_key.bias.zero_()
    with compare_heads(nn.Sequential(conv), rows=math.inf) as table:
        conv(X)
    assert [head.head for head in table.diffuse(0.2)] == [1]
    assert table.heads[1].possible == pytest.approx(1 / 12)
    lines = str(table).splitlines()
    assert lines[0].split() == ["layer", "head", "density,", "%", "kept,", "%", "possible,", "%", "error"]
    assert lines[2].split()[:3] == ["0", "1", "8.3"]
    with pytest.raises(ValueError, match="Expected 'least'"):
        table.diffuse(2.0)


# ------------------------------------------------------------------ attention weights


@pytest.mark.parametrize("how", ["sampled", "dense", "given", "blocks", "rotary", "entmax"])
def test_recorded_weights_are_those_of_the_layer(how: str) -> None:
    torch.manual_seed(0)
    options: dict[str, dict[str, Any]] = {
        "dense": {"target_density": 1.0}, "blocks": {"block_size": 2}, "rotary": {"rotary": Rotary(4)},
        "entmax": {"normalizer": "entmax15"},
    }  # fmt: skip
    conv = make_attention("sbm", 8, 4, 2, num_clusters=3, **options.get(how, {})).double().eval()
    given: tuple[Any, ...] = (patterns.window(None, 2, ptr=PTR),) if how == "given" else ()
    out, graph, (_, weight) = conv(X, *given, ptr=PTR, seed=1, return_graph=True, return_attention_weights=True)
    with record_attention(nn.ModuleDict({"layer": conv})) as calls, compare_heads(conv) as table:
        again = conv(X, *given, ptr=PTR, seed=1)
        conv(X, *given, ptr=PTR, seed=2)
    assert torch.equal(again, conv(X, *given, ptr=PTR, seed=1))
    assert "attend" not in conv.__dict__
    torch.testing.assert_close(again, out)
    assert len(table.heads) == 2
    assert [call.layer for call in calls] == ["layer", "layer"]
    first = calls[0]
    assert first.graph.heads == 2
    assert same(first.graph, graph.expand_tokens().expand(2))
    torch.testing.assert_close(first.weight, weight if weight.dim() == 1 else weight.T.flatten())
    sums = torch.zeros(24, dtype=torch.float64).index_add_(0, first.graph.edge_row, first.weight)
    torch.testing.assert_close(
        sums[first.graph.degree.flatten() > 0], torch.ones_like(sums)[first.graph.degree.flatten() > 0]
    )


def test_weights_of_padded_layers_are_those_of_real_tokens() -> None:
    torch.manual_seed(0)
    layer = SBMMultiheadAttention(8, 2, batch_first=True, source=None).double().eval()
    x, padding = X[:10].view(2, 5, 8), torch.arange(5) >= torch.tensor([[5], [3]])
    with record_attention(layer) as calls:
        _, weights = layer(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    (call,) = calls
    assert call.layer == "conv"
    assert call.graph.query_ptr.tolist() == [0, 5, 8]
    assert float(call.weight.sum()) == pytest.approx(2 * 8)
    dense = weights.to_dense() if weights.layout != torch.strided else weights
    torch.testing.assert_close(call.weight.sort().values, dense[dense > 0].sort().values)


def test_errors() -> None:
    with pytest.raises(TypeError, match="Expected 'model' to be a module"), compare_heads("model"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="to have AttentionConv layers"), record_attention(nn.Linear(2, 2)):
        pass
    with pytest.raises(ValueError, match="Expected 'rows'"), compare_heads(SBMAttentionConv(8, 4), rows=0.0):
        pass
    conv, edges = AttentionConv(8, 4, edge_dim=3).double(), torch.tensor([[0, 1], [1, 2]])
    with record_attention(conv), pytest.raises(ValueError, match="without 'edge_attr'"):
        conv(X, edges, edge_attr=torch.ones(2, 3, dtype=torch.float64))
