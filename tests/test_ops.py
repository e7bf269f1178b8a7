"""The contract of the ops: every backend, every argument value, forward and every gradient."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from entmax import entmax15, entmax_bisect, sparsemax
from hypothesis import given
from hypothesis import strategies as st
from problems import GRAPHS, in_a_fork, on_threads, pointer, random_graph, reference_attention, refuses, same
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sbm_pyg import SBM, AttentionGraph, ops, sample_edges
from sbm_pyg.layers.normalizers import attend_by_entmax
from sbm_pyg.ops import checks, random_words, schemas, segments
from sbm_pyg.ops.cpu import threads as workers
from sbm_pyg.ops.reference import blocks as blocks_reference
from sbm_pyg.ops.reference import density as reference_density
from sbm_pyg.ops.reference import edges as reference_edges
from sbm_pyg.ops.reference import entmax as reference_entmax
from sbm_pyg.ops.reference import imitation as reference_imitation
from sbm_pyg.ops.reference import pairs as reference_pairs
from sbm_pyg.ops.reference import reach as reference_reach
from sbm_pyg.ops.reference import systematic as reference_systematic
from sbm_pyg.ops.reference import union as reference_union
from sbm_pyg.ops.reference import validate as reference_validate
from sbm_pyg.sources import patterns

OPTIONS = [  # gate_form, gated, biased, dropout; without a gate its form does not matter
    option for option in product(["score", "weight"], [False, True], [False, True], [0.0, 0.4])
    if option[1] or option[0] == "score" or option[2:] == (False, 0.0)
]  # fmt: skip


def tensors(
    graph: AttentionGraph, channels: int, values: int, gated: bool, biased: bool, dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[Any]:  # fmt: skip
    """Leaves for attention over a graph: query, key, value, gate, bias."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    heads, n, m = graph.heads, graph.num_queries, graph.num_keys
    gate = (
        (0.5 + torch.rand(graph.num_edges, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        if gated
        else None
    )
    return [
        draw(heads, n, channels), draw(heads, m, channels), draw(heads, m, values), gate,
        draw(graph.num_edges) if biased else None,
    ]  # fmt: skip


def attend(
    leaves: list[Any], graph: AttentionGraph, gate_form: str, dropout: float, scale: float = 0.3, seed: int = 7
) -> tuple[Tensor, Tensor]:
    query, key, value, gate, bias = leaves
    assert query is not None
    assert key is not None
    assert value is not None
    return ops.edge_attention(query, key, value, graph.rows._replace(bias=bias), gate, scale, gate_form, dropout, seed)


def gradients(out: Tensor, leaves: list[Any]) -> list[Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(out.dtype)
    return list(torch.autograd.grad((out * weight).sum(), [leaf for leaf in leaves if leaf is not None]))


# ------------------------------------------------------------------ attention


@pytest.mark.parametrize(
    ("name", "gate_form", "gated", "biased", "dropout", "channels"),
    [  # all options for two graphs, all graphs for two options; each pair of widths is compiled
        (name, *option, channels)
        for name, option, channels in product(GRAPHS, OPTIONS, [(1, 3), (20, 48)])
        if name in ("bipartite", "rows of 0, 1, 63, 1000") or option in (OPTIONS[0], OPTIONS[-1])
    ],
)
def test_attention_equals_the_reference(
    name: str, gate_form: str, gated: bool, biased: bool, dropout: float, channels: tuple[int, int]
) -> None:
    graph = GRAPHS[name]
    leaves = tensors(graph, *channels, gated, biased)
    arguments = (*leaves[:3], graph.rowptr, graph.col, *leaves[3:], 0.3, gate_form, dropout, 7)
    out, lse = ops.schemas.edge_attention(*arguments)
    with torch.no_grad():
        expected, expected_lse = reference_edges.edge_attention(*arguments)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-10, atol=1e-10)
        grad_out = torch.randn_like(out)
        wanted = reference_edges.edge_attention_backward(
            grad_out, *arguments[:7], out, lse, *arguments[7:], gated, biased
        )
    grads = torch.autograd.grad(out, [leaf for leaf in leaves if leaf is not None], grad_out)
    torch.testing.assert_close(
        grads, [w for w, leaf in zip(wanted, leaves, strict=True) if leaf is not None], rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("gate_form", "gated", "biased"), [*dict.fromkeys(option[:3] for option in OPTIONS)])
def test_attention_is_masked_softmax(name: str, gate_form: str, gated: bool, biased: bool) -> None:
    graph = GRAPHS[name]
    leaves = tensors(graph, 8, 5, gated, biased)
    out, _ = attend(leaves, graph, gate_form, 0.0)
    expected = reference_attention(*leaves[:3], graph, *leaves[3:], 0.3, gate_form)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients(out, leaves), gradients(expected, leaves), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("gate_form", "gated", "biased", "dropout"), OPTIONS)
def test_attention_gradcheck(gate_form: str, gated: bool, biased: bool, dropout: float) -> None:
    graph = random_graph(2, 3, 4, 0.6)
    leaves = tensors(graph, 3, 2, gated, biased)

    def function(*given: Tensor) -> Tensor:
        rest = iter(given)
        return attend([next(rest) if leaf is not None else None for leaf in leaves], graph, gate_form, dropout)[0]

    assert torch.autograd.gradcheck(function, [leaf for leaf in leaves if leaf is not None])


@pytest.mark.parametrize("gate_form", ["score", "weight"])
@pytest.mark.parametrize("name", ["bipartite", "rows of 0, 1, 63, 1000", "rows around a vector"])
def test_attention_is_as_accurate_as_torch_in_float32(name: str, gate_form: str) -> None:
    """As dense attention of torch, to twice its error and two units of the largest number, whose sums each processor
    takes in an order of its own: so the largest error of four draws counts, not the luck of one.
    """
    graph = GRAPHS[name]
    errors: list[list[float]] = []
    peers: list[list[float]] = []
    largest: list[list[float]] = []
    for seed in range(4):
        double = tensors(graph, 16, 16, True, True, seed=seed)
        exact_out = reference_attention(*double[:3], graph, *double[3:], 0.3, gate_form)
        exact = [x.detach() for x in (exact_out, *gradients(exact_out, double))]
        single = [leaf.detach().float().requires_grad_() for leaf in double]
        outs = (
            attend(single, graph, gate_form, 0.0)[0],
            reference_attention(*single[:3], graph, *single[3:], 0.3, gate_form),
        )
        for out, found in zip(outs, (errors, peers), strict=True):
            results = [x.detach().double() for x in (out, *gradients(out, single))]
            found.append([float((x - want).abs().max()) for x, want in zip(results, exact, strict=True)])
        largest.append([float(want.abs().max()) for want in exact])
    unit = torch.finfo(torch.float32).eps
    for mine, peer, size in zip(*(torch.tensor(x).amax(0).tolist() for x in (errors, peers, largest)), strict=True):
        assert mine <= 2 * peer + 2 * unit * size


@pytest.mark.parametrize("width", [5, 100])
@pytest.mark.parametrize(("gated", "biased"), [(False, False), (True, True)])
def test_the_backward_pass_weighs_as_the_forward_pass(width: int, gated: bool, biased: bool) -> None:
    """The only edge of a query weighs exactly 1. Scores that are rounded in two ways would give it another weight back,
    the further off the larger they are.
    """
    graph = AttentionGraph.from_dense(torch.eye(64).expand(2, -1, -1))
    leaves = tensors(graph, width, width, gated, biased, torch.float32)
    query, key, value, *edge = leaves
    out, lse = attend([10 * query, key, value, *edge], graph, "score", 0.0)
    grad = torch.linspace(-1, 1, out.numel()).view(out.shape)
    assert lse.abs().max() > 10
    assert torch.equal(out, value)
    assert torch.equal(torch.autograd.grad(out, value, grad)[0], grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_takes_half_precision_through_float32(dtype: torch.dtype) -> None:
    graph = GRAPHS["bipartite"]
    leaves = tensors(graph, 16, 16, True, True, dtype)
    out, lse = attend(leaves, graph, "score", 0.0)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    wide = [None if leaf is None else leaf.detach().float().requires_grad_() for leaf in leaves]
    expected = attend(wide, graph, "score", 0.0)[0]
    torch.testing.assert_close(out, expected.to(dtype))
    for got, want in zip(gradients(out, leaves), gradients(expected, wide), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want.to(dtype), rtol=0.05, atol=0.05)


def test_attention_takes_any_strides_and_index_type() -> None:
    graph = GRAPHS["ragged"]
    leaves = tensors(graph, 8, 8, False, False)
    expected = attend(leaves, graph, "score", 0.0)[0]
    strided: list[Any] = [
        None if leaf is None else leaf.detach().transpose(0, 1).contiguous().transpose(0, 1) for leaf in leaves
    ]
    assert not strided[0].is_contiguous()
    assert torch.equal(attend(strided, graph, "score", 0.0)[0], expected)
    assert graph.col.dtype == torch.int32
    query, key, value = leaves[:3]
    wide, _ = ops.edge_attention(query, key, value, ops.Rows(graph.rowptr, graph.col.long()), scale=0.3)
    assert torch.equal(wide, expected)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_nan_stays_where_it_is_touched(dropout: float) -> None:
    graph = AttentionGraph.from_dense(torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]]))
    leaves = tensors(graph, 8, 8, False, False)
    with torch.no_grad():
        for leaf in leaves[1:3]:
            assert leaf is not None
            leaf[0, 3] = math.nan  # no edge touches key 3
        leaves[0][0, 1] = math.nan  # query 1 has no edges
    out, _ = attend(leaves, graph, "score", dropout)
    assert out.isfinite().all()
    assert out[0, 1].eq(0).all()
    grads = gradients(out, leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[1][0, 3].eq(0).all()
    with torch.no_grad():
        leaves[1][0, 0] = math.nan  # an edge of query 0 alone
    out, _ = attend(leaves, graph, "score", 0.0)
    assert out[0, 0].isnan().all()
    assert out[0, 2].isfinite().all()


@pytest.mark.parametrize("gate_form", ["score", "weight"])
def test_extreme_scores_do_not_overflow(gate_form: str) -> None:
    graph = AttentionGraph.from_dense(torch.ones(1, 3))
    query = torch.tensor([[[1e4]]])
    key = torch.tensor([[[1.0], [-1.0], [0.999]]])
    value = torch.eye(3)[None]
    out, lse = ops.edge_attention(query, key, value, graph.rows, torch.ones(3), 1.0, gate_form)
    assert out[0, 0].tolist() == pytest.approx(
        [1 / (1 + math.exp(-10)), 0, math.exp(-10) / (1 + math.exp(-10))], rel=1e-2
    )
    assert lse.isfinite().all()


def test_dropout_is_deterministic_and_has_the_right_mean() -> None:
    graph = random_graph(1, 400, 500, 0.5)
    query = torch.zeros(1, 400, 4)
    value = torch.ones(1, 500, 1)
    arguments = (query, torch.zeros(1, 500, 4), value, graph.rowptr, graph.col, None, None, 1.0, "score", 0.25)
    first, second, other = (ops.schemas.edge_attention(*arguments, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert float(first.mean()) == pytest.approx(1, abs=6 * math.sqrt(0.25 / 0.75 / graph.num_edges))


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_of_an_edge_depends_on_no_other_edge(dropout: float) -> None:
    graph = random_graph(2, 60, 130, 0.5)
    keep = reference_edges.dropout_mask(graph.rowptr, graph.col, 2, 130, dropout, 5)
    some = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(1)) < 0.3
    few = graph.select(some)
    assert torch.equal(reference_edges.dropout_mask(few.rowptr, few.col, 2, 130, dropout, 5), keep[some])
    first = AttentionGraph.concatenate([graph, random_graph(2, 9, 7, 0.5)])
    more = reference_edges.dropout_mask(first.rowptr, first.col, 2, 137, dropout, 5)
    assert torch.equal(more[first.edge_index[1] < 60], keep)  # the same tokens in a larger batch
    seeds = [reference_edges.dropout_mask(graph.rowptr, graph.col, 2, 130, dropout, seed) for seed in (-1, 2**40 + 5)]
    assert not any(torch.equal(keep, other) for other in seeds)


def test_edges_are_dropped_independently() -> None:
    """Rates of rows and of keys, pairs of edges, and the parity of four that share two queries and two keys."""
    n = 512
    every = torch.arange(n + 1) * n, torch.arange(n).repeat(n)
    for dropout in (0.5, 0.1):
        drop = ~reference_edges.dropout_mask(*every, 1, n, dropout, 3).view(n, n)
        x = (drop.double() - dropout) / math.sqrt(dropout * (1 - dropout))  # mean 0, variance 1
        for axis in (0, 1):
            assert float(x.sum(axis).square().mean() / n) == pytest.approx(1, abs=5 * math.sqrt(2 / n))
            pairs = (x @ x.T if axis else x.T @ x).triu(1)[torch.ones(n, n).triu(1) > 0] / math.sqrt(n)
            assert float(pairs.square().mean()) == pytest.approx(1, abs=0.05)
        four = x[:, :-1] * x[:, 1:]
        assert abs(float((four[:-1] * four[1:]).mean())) * n < 6


# ------------------------------------------------------------------ dot products of edges


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("channels", [3, 48, 128])
def test_dot_equals_the_reference(name: str, channels: int) -> None:
    graph = GRAPHS[name]
    query, key = tensors(graph, channels, 1, False, False)[:2]
    assert query is not None
    assert key is not None
    out = ops.edge_dot(query, key, graph.rows)
    dense = (query @ key.mT).flatten(0, 1)[graph.edge_row, graph.col.long()]
    torch.testing.assert_close(out, dense, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(out)
    for needed in ([query], [key], [query, key]):
        torch.testing.assert_close(
            torch.autograd.grad(out, needed, grad, retain_graph=True), torch.autograd.grad(dense, needed, grad, retain_graph=True),
            rtol=1e-12, atol=1e-12,
        )  # fmt: skip
    gate = schemas.EdgeGate.apply(query, key, graph.rowptr, graph.col)
    assert torch.equal(gate, torch.ones_like(gate))
    torch.testing.assert_close(
        torch.autograd.grad(gate, [query, key], grad), torch.autograd.grad(dense, [query, key], grad), rtol=1e-12,
        atol=1e-12,
    )  # fmt: skip


# ------------------------------------------------------------------ entmax


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 30.0])
def test_entmax_equals_the_dense_one_row_by_row(alpha: float, spread: float) -> None:
    counts = torch.tensor([0, 1, 2, 7, 0, 200])
    ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    src = spread * torch.randn(int(ptr[-1]), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out = ops.segment_entmax(src, ptr=ptr, alpha=alpha)
    single = ops.segment_entmax(src.float(), ptr=ptr, alpha=alpha)
    for start, end in pairwise(ptr):
        if end > start:
            expected = entmax_bisect(src[start:end], alpha, n_iter=100)
            torch.testing.assert_close(out[start:end], expected, rtol=1e-7, atol=1e-9)
            peer = (entmax_bisect(src[start:end].float(), alpha) - expected).abs().max()
            mine = (single[start:end] - expected).abs().max()
            assert float(mine) <= 2 * float(peer) + 4 * torch.finfo(torch.float32).eps
    shuffled = torch.randperm(len(src), generator=torch.Generator().manual_seed(1))
    index = torch.repeat_interleave(counts)
    by_index = ops.segment_entmax(src[shuffled], index[shuffled], num_nodes=6, alpha=alpha)
    torch.testing.assert_close(by_index, out[shuffled], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.7, 3.0])
def test_entmax_of_the_reference_equals_that_of_the_kernels(alpha: float) -> None:
    counts = torch.tensor([0, 1, 2, 7, 0, 200, 2000])
    rowptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    src = torch.randn(2, int(rowptr[-1]), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alphas = torch.full((2, 7), alpha, dtype=torch.float64)
    wanted = ops.schemas.segment_entmax(src, rowptr, alphas)
    torch.testing.assert_close(reference_entmax.segment_entmax(src, rowptr, alphas), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_entmax_gradcheck(alpha: float) -> None:
    src = torch.randn(9, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    ptr = torch.tensor([0, 4, 4, 9])
    assert torch.autograd.gradcheck(lambda x: ops.segment_entmax(x, ptr=ptr, alpha=alpha), src)


def test_entmax_of_columns_with_an_alpha_each() -> None:
    """Values, and exact gradients for values and alpha, by finite differences; rows of one value and of ties among them."""
    random = torch.Generator().manual_seed(3)
    src = torch.randn(11, 2, 3, generator=random, dtype=torch.float64)
    src[5:8] = src[4]  # ties
    ptr, index = torch.tensor([0, 1, 1, 4, 11]), torch.repeat_interleave(torch.tensor([1, 0, 3, 7]))
    alpha = torch.tensor([1.1, 1.5, 1.9], dtype=torch.float64)
    out = ops.segment_entmax(src, ptr=ptr, alpha=alpha)
    for row, column in product(range(2), range(3)):
        alone = ops.segment_entmax(src[:, row, column].contiguous(), ptr=ptr, alpha=float(alpha[column]))
        assert torch.equal(out[:, row, column], alone)
    order = torch.randperm(11, generator=random)
    torch.testing.assert_close(ops.segment_entmax(src[order], index[order], num_nodes=4, alpha=alpha), out[order])
    assert torch.equal(ops.segment_entmax(src, ptr=ptr, alpha=1.5)[..., 1], out[..., 1])
    src.requires_grad_()
    for shape in (alpha, alpha[:1], alpha.expand(2, 3), alpha[1]):
        leaf = shape.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, a: ops.segment_entmax(x, ptr=ptr, alpha=a), (src, leaf))
    scalar = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    values = src[:, 0, 0].detach().contiguous().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, a: ops.segment_entmax(x, ptr=ptr, alpha=a), (values, scalar))
    assert ops.segment_entmax(src[:, :0], ptr=ptr, alpha=1.5).shape == (11, 0, 3)


def test_a_learnt_alpha_finds_the_sparsity_that_a_loss_asks_for() -> None:
    src = torch.randn(40, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    ptr, wanted = torch.tensor([0, 15, 40]), ops.segment_entmax(src, ptr=torch.tensor([0, 15, 40]), alpha=1.7)
    alpha = torch.tensor(1.2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([alpha], 0.05)
    for _ in range(200):
        loss = (ops.segment_entmax(src, ptr=ptr, alpha=alpha) - wanted).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(alpha.detach()) == pytest.approx(1.7, abs=1e-3)


def ragged(*counts: int, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """Values of rows of such lengths, some of them the same, and offsets."""
    src = spread * torch.randn(sum(counts), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    src[1::7] = src[0::7][: src[1::7].numel()]
    src[-3:] = src.max()
    return src, torch.tensor([0, *counts]).cumsum(0)


@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 1.75, 1.95, 2.0])
@pytest.mark.parametrize("counts", [(0, 1, 2, 15, 16, 17, 0, 300, 4), (1, 100_000)])
def test_entmax_and_its_gradient_are_those_of_the_dense_one(alpha: float, counts: tuple[int, ...]) -> None:
    src, ptr = ragged(*counts)
    grad = torch.randn(src.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alphas = torch.full((len(counts),), alpha, dtype=torch.float64, requires_grad=True)
    src.requires_grad_()
    out = ops.segment_entmax(src, ptr=ptr, alpha=alphas)
    dsrc, dalpha = torch.autograd.grad(out, (src, alphas), grad)
    for row, (start, end) in enumerate(pairwise(ptr)):
        if end > start:
            x, a = src[start:end].detach().requires_grad_(), torch.tensor([alpha], dtype=torch.float64)
            dense = {1.5: entmax15, 2.0: sparsemax}.get(alpha, lambda y: entmax_bisect(y, alpha, n_iter=200))(x)
            torch.testing.assert_close(out[start:end], dense, rtol=0, atol=1e-10)
            (wanted,) = torch.autograd.grad(dense, x, grad[start:end])
            torch.testing.assert_close(dsrc[start:end], wanted, rtol=0, atol=1e-10)
            bisected = entmax_bisect(x.detach(), a.requires_grad_(), n_iter=200)
            (wanted,) = torch.autograd.grad(bisected, a, grad[start:end])
            if end - start < 1000:  # longer sums lose more digits than these
                torch.testing.assert_close(dalpha[row : row + 1], wanted, rtol=1e-7, atol=1e-7)
        else:
            assert dalpha[row] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entmax_kernels_equal_the_reference(dtype: torch.dtype) -> None:
    src, ptr = ragged(0, 1, 2, 40, 63, 0, 500)
    src, grad = src.to(dtype).expand(2, -1).contiguous(), torch.randn(2, src.numel(), dtype=dtype)
    src[1] *= 0.3
    alpha = torch.tensor([1.05, 1.2, 1.5, 1.8, 2.0, 2.5, 4.0]).double().repeat(2, 1)
    narrow = {torch.float32: 2e-6, torch.float64: 1e-11}[dtype]
    out, wanted = torch.ops.sbm_pyg.segment_entmax(src, ptr, alpha), reference_entmax.segment_entmax(src, ptr, alpha)
    torch.testing.assert_close(out, wanted, rtol=0, atol=narrow)
    found = torch.ops.sbm_pyg.segment_entmax_backward(grad, out, ptr, alpha, True)
    torch.testing.assert_close(
        found, reference_entmax.segment_entmax_backward(grad, out, ptr, alpha, True), rtol=20 * narrow, atol=20 * narrow
    )


def test_no_row_of_entmax_depends_on_other_rows_or_on_threads() -> None:
    src, ptr = ragged(*range(200), spread=1.0)
    src, alpha = src.float(), torch.linspace(1.05, 2, 200)
    grad, found = torch.randn(src.shape), []
    for threads in (1, 3):
        with on_threads(threads):
            leaves = src.clone().requires_grad_(), alpha.clone().requires_grad_()
            out = ops.segment_entmax(leaves[0], ptr=ptr, alpha=leaves[1])
            found.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    for row, (start, end) in [*enumerate(pairwise(ptr))][::20]:
        alone = ops.segment_entmax(src[start:end], ptr=torch.tensor([0, end - start]), alpha=float(alpha[row]))
        assert torch.equal(alone, found[0][0][start:end])


def test_entmax_with_an_alpha_for_each_segment() -> None:
    src, ptr = ragged(3, 0, 5, 1)
    alpha = torch.tensor([1.2, 1.5, 1.9, 1.4], dtype=torch.float64)
    columns = torch.stack([src, 0.5 * src], 1)
    for values, alphas in ((src, alpha), (columns, alpha[:, None]), (columns, torch.stack([alpha, alpha.flip(0)], 1))):
        leaves = values.clone().requires_grad_(), alphas.clone().requires_grad_()
        out = ops.segment_entmax(leaves[0], ptr=ptr, alpha=leaves[1])
        for start, end, one in zip(ptr, ptr[1:], alphas.unbind(), strict=False):
            few = torch.tensor([0, end - start])
            assert torch.equal(out[start:end], ops.segment_entmax(values[start:end], ptr=few, alpha=one))
        rough = torch.randn(src.numel(), 1, dtype=torch.float64).expand(columns.shape)  # without ties
        values = rough[:, 0].contiguous() if values.dim() == 1 else rough * torch.tensor([1.0, 0.4])
        leaves = values.clone().requires_grad_(), alphas.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, a: ops.segment_entmax(x, ptr=ptr, alpha=a), leaves)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entmax_of_forbidden_values_is_zero(alpha: float, dtype: torch.dtype) -> None:
    src = torch.tensor([-math.inf, -math.inf, 0.0, -math.inf, 0.5, math.nan, 0.0], dtype=dtype, requires_grad=True)
    out = ops.segment_entmax(src, ptr=torch.tensor([0, 2, 5, 7]), alpha=alpha)
    assert out[:2].tolist() == [0, 0]
    torch.testing.assert_close(out[[2, 4]], ops.segment_entmax(src[[2, 4]], ptr=torch.tensor([0, 2]), alpha=alpha))
    assert out[3] == 0
    assert out[5:].isnan().all()
    (grad,) = torch.autograd.grad(out[:5].square().sum(), src, retain_graph=True)
    assert grad[[0, 1, 3]].tolist() == [0, 0, 0]
    assert grad[:5].isfinite().all()
    (grad,) = torch.autograd.grad(out.sum(), src)
    assert grad[5:].isnan().all()


def test_entmax_takes_floats() -> None:
    with pytest.raises(
        TypeError, match=r"Expected 'src' to be a floating tensor \(got torch.int64\). Convert it with `.float\(\)`"
    ):
        ops.segment_entmax(torch.arange(4), ptr=torch.tensor([0, 4]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ptr": torch.tensor([0, 2]), "alpha": 1.0}, r"Expected 'alpha' in \(1, 4\] \(got 1.0\)"),
        ({}, r"Expected one of 'index' and 'ptr' \(got neither\)"),
        ({"index": torch.tensor([0, 0]), "ptr": torch.tensor([0, 2])}, r"\(got both\)"),
        ({"ptr": torch.tensor([0, 2]), "alpha": torch.ones(3)},
         r"a shape that broadcasts to \[S, ...\] = \[1\] \(got \[3\]\)"),
    ],
)  # fmt: skip
def test_entmax_errors(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.segment_entmax(torch.zeros(2), **arguments)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("gate_form", "gated", "biased", "dropout"), OPTIONS)
def test_entmax_attention_is_its_definition(
    name: str, gate_form: str, gated: bool, biased: bool, dropout: float
) -> None:
    """Over all edges, one step after the other, with weights by the op that is tested above."""
    graph = GRAPHS[name]
    leaves = tensors(graph, 8, 5, gated, biased)
    alpha = torch.linspace(1.2, 1.9, graph.heads, dtype=torch.float64, requires_grad=True)
    query, key, value, gate, bias = leaves
    rows = graph.rows._replace(bias=bias)
    out = attend_by_entmax(query, key, value, rows, gate, 0.9, gate_form, dropout, 7, alpha)
    logit = 0.9 * ops.edge_dot(query, key, graph.rows)
    if gated:
        logit = logit * gate if gate_form == "score" else logit + gate.log()
    logit = logit + bias if biased else logit
    weight = ops.segment_entmax(logit, ptr=graph.rowptr, alpha=alpha.repeat_interleave(graph.num_queries))
    if dropout:
        kept = reference_edges.dropout_mask(*rows[:2], graph.heads, graph.num_keys, dropout, 7)
        weight = weight * kept / (1 - dropout)
    end = graph.col + graph.edge_head * graph.num_keys
    wanted = (
        torch.zeros_like(out).flatten(0, 1).index_add(0, graph.edge_row, weight[:, None] * value.flatten(0, 1)[end])
    )
    torch.testing.assert_close(out, wanted.view_as(out), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        gradients(out, [*leaves, alpha]), gradients(wanted.view_as(out), [*leaves, alpha]), rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize("gate_form", ["score", "weight"])
def test_entmax_attention_gradcheck(gate_form: str) -> None:
    graph = random_graph(2, 3, 4, 0.6)
    leaves = [*tensors(graph, 3, 2, True, True), torch.tensor([1.3, 1.8], dtype=torch.float64, requires_grad=True)]

    def function(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, bias: Tensor, alpha: Tensor) -> Tensor:
        rows = graph.rows._replace(bias=bias)
        return attend_by_entmax(query, key, value, rows, gate, 0.5, gate_form, 0.2, 3, alpha)

    assert torch.autograd.gradcheck(function, leaves)


def test_the_support_is_where_shares_are() -> None:
    src, ptr = ragged(0, 1, 2, 40, 63, 0, 500)
    src[50], src[70:72] = math.nan, -math.inf
    alpha = torch.tensor([1.05, 1.2, 1.5, 1.8, 2.0, 2.5, 4.0]).double()
    rows, place = torch.ops.sbm_pyg.entmax_support(src, ptr, alpha)
    assert same((rows, place), reference_entmax.entmax_support(src, ptr, alpha))
    assert torch.equal(place, ops.segment_entmax(src, ptr=ptr, alpha=alpha).nonzero()[:, 0])


# ------------------------------------------------------------------ what is refused


def arguments() -> dict[str, Any]:
    graph, x = GRAPHS["full"], torch.ones(2, 5, 4)
    edges = torch.ones(graph.num_edges)
    return {"query": x, "key": x, "value": x, "rowptr": graph.rowptr, "col": graph.col, "gate": edges, "bias": edges}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda x: x[0], r"Expected 'query' to be \[H, N, C\] = \[any, any, any\] \(got \[5, 4\]\)"),
        ("key", lambda x: x[:1], r"Expected 'key' to be \[H, M, C\] = \[2, any, 4\] \(got \[1, 5, 4\]\)"),
        ("key", lambda x: x[..., :3], r"Expected 'key' to be "),
        ("value", lambda x: x[:, :4], r"Expected 'value' to be \[H, M, C'\] = \[2, 5, any\]"),
        ("rowptr", lambda x: x[:-1], r"Expected 'rowptr' to be \[H\*N\+1\] = \[11\] \(got \[10\]\)"),
        ("rowptr", lambda x: x.int(), r"Expected 'rowptr' to be int64 and 'col' int32 or int64 \(got torch.int32"),
        ("col", lambda x: x[None], r"Expected 'col' to be \[E\]"),
        ("gate", lambda x: x[:3], r"Expected 'gate' to be \[E\] = \[50\] \(got \[3\]\)"),
        ("key", lambda x: x.to("meta"), r"Expected 'key' on cpu, as 'query' is \(got meta\)"),
        ("rowptr", lambda x: x.to("meta"), r"Expected 'rowptr' on cpu, as 'query' is \(got meta\)"),
        ("gate", lambda x: x.to("meta"), r"Expected 'gate' on cpu, as 'query' is \(got meta\)"),
        ("bias", lambda x: 1.0, r"Expected 'bias' to be a tensor \[E\] \(got float\)"),
        ("gate_form", lambda x: "wieght", r"Expected 'gate_form' to be one of \['score', 'weight'\] \(got 'wieght'\)"),
        ("dropout", lambda x: 1.0, r"Expected 'dropout' in \[0, 1\) \(got 1.0\)"),
        ("dropout", lambda x: "a", r"Expected 'dropout' to be a number in \[0, 1\) \(got str\)"),
        ("seed", lambda x: 1.5, r"Expected 'seed' to be an integer \(got 1.5\)"),
        ("query", lambda x: x.bool(), r"Expected 'query' to be a floating tensor \(got torch.bool\)"),
        ("value", lambda x: x.double(),
         r"'query', 'key' and 'value' to be of one dtype \(got torch.float32, torch.float32 and torch.float64\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(name: str, change: Callable[[Any], Any], message: str) -> None:
    def attend(rowptr: Any, col: Any, bias: Any, **others: Any) -> Any:
        return ops.edge_attention(rows=ops.Rows(rowptr, col, bias), **others)

    given = arguments()
    attend(**given)
    with pytest.raises((TypeError, ValueError), match=message):
        attend(**given | {name: change(given.get(name))})
    if name in ("query", "key", "rowptr", "col"):
        changed = given | {name: change(given[name])}
        rows = ops.Rows(changed["rowptr"], changed["col"])
        with pytest.raises((TypeError, ValueError), match=message):
            ops.edge_dot(changed["query"], changed["key"], rows)


X, ONES, PTR, IDS = torch.rand(2, 5, 4) / 4, torch.ones(5), torch.tensor([0, 5]), torch.tensor([0])
ROWS, COL = GRAPHS["full"].rowptr, GRAPHS["full"].col
BLOCKS = torch.tensor([0, 3, 6, 9, 12, 15, 18])  # three blocks of at most two tokens, in two heads
BLOCK = torch.arange(3).repeat(6)


@pytest.mark.parametrize(
    ("op", "name", "full"),
    [
        (lambda col: ops.edge_dot(X, X, ops.Rows(ROWS, col)), "rowptr", COL),
        (lambda col: ops.edge_attention(X, X, X, ops.Rows(ROWS, col)), "rowptr", COL),
        (lambda col: ops.block_attention(X, X, X, ops.Rows(BLOCKS, col), (PTR, PTR), 2), "rowptr", BLOCK),
    ],
)  # fmt: skip
def test_rows_run_over_the_edges_that_there_are(op: Callable[[Tensor], Any], name: str, full: Tensor) -> None:
    """Else kernels read beyond the last one."""
    op(full)
    for col in (full[:0], full[:-1], torch.cat([full, full[:1]])):
        end = rf"Expected '{name}' to run from 0 to {len(col)}, the number of edges in '.*col' \(got 0 to {len(full)}\)"
        with pytest.raises(ValueError, match=end):
            op(col)


@pytest.mark.parametrize(
    ("op", "sides"),
    [
        (lambda mine, theirs: ops.sample_sbm(X, X, mine, theirs, IDS, 0), ("query_ptr", "key_ptr")),
        (lambda mine, theirs: ops.block_attention(X, X, X, ops.Rows(BLOCKS, BLOCK), (mine, theirs), 2),
         (r"ptrs\[0\]", r"ptrs\[1\]")),
    ],
)  # fmt: skip
def test_offsets_run_over_the_tokens_that_there_are(op: Callable[..., Any], sides: tuple[str, ...]) -> None:
    op(PTR, PTR)
    for side, name in enumerate(sides):
        for wrong, found in ((torch.tensor([0, 9]), "0 to 9"), (torch.tensor([-1, 5]), "-1 to 5")):
            given = [wrong if at == side else PTR for at in range(2)]
            with pytest.raises(ValueError, match=rf"Expected '{name}' to run from 0 to 5, .* \(got {found}\)"):
                op(*given)


def test_sampling_and_entmax_refuse_what_does_not_fit() -> None:
    x, col = torch.ones(2, 5, 4), COL
    chance, ptr, sequence_ids = torch.ones(5), torch.tensor([0, 5]), torch.tensor([0])

    def sample(
        query: Any = x, *options: Any, sequence_ids: Tensor = sequence_ids, starts: Tensor = ptr, seed: Any = 0
    ) -> Any:
        return ops.sample_sbm(query, x, starts, starts, sequence_ids, seed, *options)

    sample(x / 4)
    for action, message in (
        (lambda: ops.sample_sbm(x, x, ptr, ptr, sequence_ids, 0, "bernuli"),
         r"Expected 'method' to be one of .* \(got 'bernuli'\)"),
        (lambda: ops.sample_sbm(x, x[..., :2], ptr, ptr, sequence_ids, 0), "Expected 'member' to be "),
        (lambda: ops.sample_sbm(x, x.to("meta"), ptr, ptr, sequence_ids, 0),
         r"Expected 'member' on cpu, as 'rate' is \(got meta\)"),
        (lambda: ops.segment_entmax(chance, ptr=ptr.to("meta")), r"Expected 'ptr' on cpu, as 'src' is \(got meta\)"),
        (lambda: ops.segment_entmax(chance, ptr=ptr[None]), r"Expected 'ptr' to be \[S\+1\]"),
        (lambda: ops.segment_entmax(chance, ptr=cast(Any, [0, 5])),
         r"Expected 'ptr' to be a tensor \[S\+1\] \(got list\)"),
        (lambda: ops.segment_entmax(chance, index=col[:3].long()),
         r"Expected 'index' to be \[E\] = \[5\] \(got \[3\]\)"),
        (lambda: ops.sample_sbm(x, x, ptr, ptr, sequence_ids.int(), 0),
         r"Expected 'sequence_ids' to be int64 \(got torch.int32\)"),
        (lambda: ops.sample_sbm(x, x, ptr, ptr, torch.arange(2), 0),
         r"Expected 'sequence_ids' to be \[B\] = \[1\] \(got \[2\]\)"),
        (lambda: sample(x.bool()), r"Expected 'rate' to be a floating tensor \(got torch.bool\)"),
        (lambda: sample(x, "bernoulli", math.nan), r"Expected 'exploration' in \[0, 1\] \(got nan\)"),
        (lambda: sample(starts=ptr[:1], sequence_ids=ptr[:0]),
         r"Expected 'query_ptr' to be \[B\+1\] with B >= 1 \(got \[1\]\)"),
        (lambda: sample(starts=ptr[:0], sequence_ids=ptr[:0]),
         r"Expected 'query_ptr' to be \[B\+1\] with B >= 1 \(got \[0\]\)"),
        (lambda: ops.segment_entmax(chance, ptr=ptr[:0]), r"Expected 'ptr' to be \[S\+1\] \(got \[0\]\)"),
        (lambda: ops.segment_entmax(chance, ptr=torch.tensor([0, 4])), "Expected 'ptr' to rise from 0 to E = 5"),
        (lambda: ops.segment_entmax(chance, ptr=torch.tensor([0, 4, 2, 5])), "Expected 'ptr' to rise from 0 to E = 5"),
        (lambda: ops.segment_entmax(chance, index=torch.arange(5) - 1), r"Expected 'index' to be 0 or more \(got -1\)"),
        (lambda: ops.segment_entmax(chance, index=torch.arange(5) + 2**60),
         "Expected 'index' to ask for no more than memory holds"),
        (lambda: ops.segment_entmax(chance, index=torch.arange(5), num_nodes=-1),
         "Expected 'num_nodes' to be at least 0"),
        (lambda: ops.segment_entmax(chance, ptr=ptr, alpha=cast(Any, None)),
         r"Expected 'alpha' to be a number in \(1, 4\] \(got NoneType\)"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            action()


def test_a_chance_outside_0_and_1_is_cut() -> None:
    ptr, sequence_ids = torch.tensor([0, 6]), torch.tensor([0])
    wild, cut = (
        torch.tensor([2.0, math.nan, -1.0, math.inf, -math.inf, 0.5]),
        torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.5]),
    )
    for sample in (schemas.sample_systematic, reference_systematic.sample_systematic):
        assert same(sample(wild, ptr, ptr, sequence_ids, 2, 3, False), sample(cut, ptr, ptr, sequence_ids, 2, 3, False))


# ------------------------------------------------------------------ memory


CPU = torch.device("cpu")


def test_what_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available", lambda device: 3 * 2**30)
    checks.memory("n", 3 * 2**28, 4, CPU, "Take fewer.")
    message = (
        "Expected 'n' to ask for no more than memory holds (got 805,306,369 edges, 3.0 GiB of 3.0 GiB). Take fewer."
    )
    refuses(lambda: checks.memory("n", 3 * 2**28 + 1, 4, CPU, "Take fewer."), message)
    refuses(lambda: checks.memory("n", 10**5000, 4, CPU, "Take fewer.", "rows"), "(got more than 2**63 rows, ")


def test_memory_is_not_looked_at_for_little_nor_for_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(device: torch.device) -> float:
        raise AssertionError("memory was read")

    monkeypatch.setattr(checks, "available", never)
    checks.memory("n", checks.MIN_CHECKED_BYTES, 1, CPU, "")
    with FakeTensorMode():
        checks.memory("n", 2**60, 1, CPU, "")

    def compiled(x: Tensor) -> Tensor:
        checks.memory("n", 2**60, 1, CPU, "")
        return x + 1

    torch.compile(compiled, backend="eager", fullgraph=True)(torch.ones(2))
    refuses(lambda: checks.memory("n", checks.MIN_CHECKED_BYTES + 1, 1, CPU, ""), "memory was read", AssertionError)


def test_what_is_available_is_less_than_what_there_is() -> None:
    assert 2**20 < checks.available(CPU) < 2**50
    assert checks.available(torch.device("meta")) == math.inf


def test_what_the_cache_of_a_gpu_holds_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {f"{kind}_bytes": {"all": {"current": size}} for kind, size in (("reserved", 70), ("allocated", 30))}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (500, 1000))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    assert checks.available(torch.device("cuda")) == 540


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits of the address space are read from /proc")
def test_a_limit_of_the_address_space_counts() -> None:
    def limited() -> object:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28,) * 2)
        assert checks.available(CPU) <= 2**28
        return patterns.full(12000)

    message = "ValueError: Expected 'n' to ask for no more than memory holds (got 144,000,000 edges, 0.5 GiB of 0."
    assert in_a_fork(limited).startswith(message)


@pytest.mark.parametrize("op", ["edge_attention", "edge_dot", "segment_entmax"])
@pytest.mark.parametrize("transform", [torch.func.jvp, torch.func.jacfwd])
def test_forward_mode_is_refused(op: str, transform: Any) -> None:
    """torch's custom ops have no forward mode, and answer with zeros."""
    given = arguments()

    def function(x: Tensor) -> Tensor:
        if op == "edge_attention":
            return ops.edge_attention(x, given["key"], given["value"], ops.Rows(given["rowptr"], given["col"]))[0]
        if op == "edge_dot":
            return ops.edge_dot(given["query"], x, ops.Rows(given["rowptr"], given["col"]))
        return ops.segment_entmax(x.flatten(), ptr=torch.tensor([0, 40]))

    x = given["query"]
    with pytest.raises(NotImplementedError, match="Expected reverse-mode differentiation"):
        transform(function, (x,), (x,)) if transform is torch.func.jvp else transform(function)(x)


# ------------------------------------------------------------------ random words


def test_philox_known_answers() -> None:
    """Test vectors of Random123 (kat_vectors, philox4x32 10)."""
    ones = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones, ones, ones, ones), ones << 32 | ones, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0 << 32 | 0xA4093822,
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]  # fmt: skip
    for counter, key, expected in cases:
        found = random_words.philox(*(torch.tensor(c) for c in counter), key)
        assert tuple(int(word) for word in found) == expected


# ------------------------------------------------------------------ the dispatcher's contract


def _samples() -> dict[str, tuple]:
    graph = random_graph(2, 3, 4, 0.6)
    query, key, value, gate, bias = tensors(graph, 3, 2, True, True)
    assert gate is not None
    rows = (graph.rowptr, graph.col)
    plain = [tensor.detach() for tensor in (query, key, value, gate, bias)]
    out, lse = reference_edges.edge_attention(*plain[:3], *rows, *plain[3:], 0.5, "score", 0.0, 0)
    p, alpha = torch.softmax(plain[3], 0), torch.tensor([[1.4]], requires_grad=True)
    src = gate.detach()[None].requires_grad_()
    ptr = torch.tensor([0, 3])
    memberships = torch.rand(2, 3, 2), torch.rand(2, 3, 2) / 2
    positive = [torch.rand(2, n, 4).requires_grad_() for n in (3, 4)]
    running = torch.tensor([0.0, 0.3])
    cuts = (torch.tensor([0, 3]), torch.tensor([0, 4]), 2)  # two blocks of queries, two of keys
    blocks = (torch.tensor([0, 2, 3, 3, 4]), torch.tensor([0, 1, 0, 1]))
    tile = torch.randn(4, 2, 2)
    small, weight = torch.randn(2, 3, 2, 3, requires_grad=True), torch.randn(2, 3, 2, requires_grad=True)
    seen, total = blocks_reference.block_attention(*plain[:3], *blocks, *cuts, False, tile, 0.5)
    effects = (
        torch.ones_like(out), *plain[:3], *rows, plain[4], *rows, plain[4], 0.5, *plain[:2], torch.full((3,), 0.5), 0.1,
    )  # fmt: skip
    tokens = [torch.randn(size) for size in ((3, 2, 3), (4, 2, 3), (4, 2, 5), (3, 2, 4), (3, 4))]
    ones, of_queries = torch.ones(3, 2), (torch.tensor([0, 2, 2, 3]), torch.tensor([1, 0, 3]))
    return {
        "graph_attention": (*(x.clone().requires_grad_() for x in tokens), ones, ones, *of_queries, 0.5),
        "graph_attention_backward": (
            torch.ones(3, 2, 5), torch.ones(3, 2, 4), ones, *tokens, ones, *of_queries, ones / 2, 0.5, True,
        ),
        "sort_edges": (torch.tensor([2, 0, 2]), 3),
        "block_attention": (query, key, value, *blocks, *cuts, False, tile.clone().requires_grad_(), 0.5, 0.2, 3),
        "block_attention_backward": (
            torch.ones_like(seen), *plain[:3], *blocks, *cuts[:2], tile, seen, total, 2, False, 0.5, 0.2, 3, True,
        ),
        "block_effect": (torch.ones_like(seen), *plain[:3], *blocks, tile, *blocks, None, *cuts, False, 0.5),
        "block_weight": (*plain[:2], *blocks, tile, *cuts, False, 0.5), "edge_dot": (query, key, *rows),
        "edge_dot_backward": (plain[3], plain[0], plain[1], *rows, True, True),
        "edge_attention": (query, key, value, *rows, gate, bias, 0.5, "weight", 0.2, 3),
        "edge_attention_backward": (
            torch.ones_like(out), *plain[:3], *rows, *plain[3:], out, lse, 0.5, "score", 0.0, 0, True, True,
        ),
        "edge_effect": effects,
        "weigh_effect": (plain[3], plain[3].abs(), graph.rowptr, torch.full((3,), 0.5), plain[4] > 0, 0.1, False),
        "invalid_row": (*rows, graph.query_ptr, graph.key_ptr, 2),
        "entmax_support": (plain[3], torch.tensor([0, graph.num_edges]), alpha[0].detach()),
        "reach_dot": (query, key, *cuts[:2], True, True),
        "reach_dot_backward": (torch.ones(2, 3), *plain[:2], *cuts[:2], False, False, True, True),
        "scale_to_density": (*positive, running, *cuts[:2], 0.5, None, True, True),
        "scale_to_density_backward": (
            torch.ones(2, 3, 4), torch.ones(2, 3), *(x.detach() for x in positive), running, *cuts[:2],
            torch.ones(2, 3), torch.ones(2, 3), False, False, True, True,
        ),
        "effect_gradients": (*effects, plain[4] > 0, 2.0, True, True),
        "segment_entmax": (src, torch.tensor([0, graph.num_edges]), alpha),
        "segment_entmax_backward": (p[None], p[None], torch.tensor([0, graph.num_edges]), alpha.detach(), True),
        "sample_sbm": (*memberships, ptr, ptr, torch.tensor([0]), 5, "bernoulli", 0.0, True, True),
        "index_top_k": (query[:, :, None], query[..., :1], key, *cuts[:2], torch.full((2, 3), 2), torch.ones(3, dtype=torch.int64)),
        "segment_top_k": (plain[3], graph.rowptr, torch.full((graph.rowptr.numel() - 1,), 2)),
        "union_rows": (*rows, graph.rowptr, graph.col, graph.num_keys),
        "add_loops": (torch.tensor([0, 1, 2]), torch.tensor([1, 1]), 2),
        "select_rows": (*rows, torch.tensor([True, False, True])), "index_score": (small, weight, key, *rows),
        "index_score_backward": (plain[3], small.detach(), weight.detach(), plain[1], *rows),
        "edge_cross_entropy": (*plain[:2], plain[3].clone().requires_grad_(), *rows, plain[4], 0.5),
        "edge_cross_entropy_backward": (torch.ones(2, 3), plain[3], graph.rowptr),
        "sample_queries": (ptr, torch.tensor([0]), 3, 0.5, 5),
        "sample_probes": (ptr, ptr, torch.tensor([0]), torch.tensor([True, False, True]), 3, 2, 2.0, 5, True),
        "sample_systematic": (torch.full((3,), 0.4), ptr, torch.tensor([0, 7]), torch.tensor([0]), 2, 5, True),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.14 looks at it
@pytest.mark.parametrize("name", _samples())
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.sbm_pyg, name).default, _samples()[name])


def test_plain_torch_inside_an_op_is_not_autocast() -> None:
    """Autocast has converted what goes in; products in the op keep that precision."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.mm(x, x).dtype is torch.bfloat16
        assert schemas._without_autocast(torch.mm)(x, x).dtype is torch.float32


@pytest.mark.parametrize("block_size", [1, 4])
def test_an_output_without_a_gradient_starts_no_backward_kernel(
    block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros for gradients that are none would be made and multiplied."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    graph, x = patterns.full(8 // block_size), torch.randn(3, 1, 8, 4, requires_grad=True)
    rows, ptr = graph.rows, torch.tensor([0, 8])
    out = ops.edge_attention(*x, rows) if block_size == 1 else ops.block_attention(*x, rows, (ptr, ptr), block_size)
    for name in ("edge_attention_backward", "block_attention_backward"):
        monkeypatch.setattr(schemas, name, None)
    (Stop.apply(out[0]).sum() + x.sum()).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("name", ["block_attention", "edge_dot", "edge_attention", "segment_entmax"])
def test_every_output_element_is_written(name: str) -> None:
    """Fresh memory holds NaN here, so an element that a kernel forgets shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        arguments = _samples()[name]
        out = getattr(torch.ops.sbm_pyg, name)(*arguments)
        out = out[0] if isinstance(out, tuple) else out
        leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
        assert out.isfinite().all()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("threads", [1, 2])
def test_invalid_row_finds_the_first_of_many_faults(dtype: torch.dtype, threads: int) -> None:
    """On rows enough for several pieces; the reference and the kernel agree on each."""
    graph = AttentionGraph.concatenate([random_graph(2, 900, 1200, 0.1, seed) for seed in range(2)])
    generator = torch.Generator().manual_seed(0)
    with on_threads(threads):
        for _ in range(20):
            col = graph.col.to(dtype, copy=True)
            rows = torch.randint(2 * graph.num_queries, (3,), generator=generator)
            for row, fault in zip(rows.tolist(), torch.randperm(3, generator=generator).tolist(), strict=True):
                start, end = graph.rowptr[row : row + 2].tolist()
                if fault == 0:
                    col[start + 1] = col[start]
                elif fault == 1:
                    col[end - 1] += 1200  # a key of the second sequence, or of none
                else:
                    col[start] -= 1200
            arguments = (graph.rowptr, col, graph.query_ptr, graph.key_ptr, 2)
            assert schemas.invalid_row(*arguments) == reference_validate.invalid_row(*arguments) == rows.min()
        good = (graph.rowptr, graph.col.to(dtype), graph.query_ptr, graph.key_ptr, 2)
        assert schemas.invalid_row(*good) == reference_validate.invalid_row(*good) == -1


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    graph = random_graph(3, 200, 300, 0.3)
    leaves = tensors(graph, 16, 16, True, False, torch.float32)
    results = []
    for threads in (1, 2):
        with on_threads(threads):
            out, _ = attend(leaves, graph, "weight", 0.1)
            results.append([out, *gradients(out, leaves)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert torch.equal(results[0][0], results[1][0])


def test_small_work_is_left_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done before another thread has woken up."""
    monkeypatch.setattr(workers, "MIN_STEPS_PER_TASK", 2**18)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert [workers.task_count(2**18 * pieces, 3) for pieces in (0, 1, 2, 100)] == [1, 1, 2, 12]
    seen: list[int] = []
    monkeypatch.setattr(workers, "_on_team", lambda work, threads: seen.append(threads))

    def attend_over(graph: AttentionGraph) -> None:
        leaves = tensors(graph, 16, 16, False, False, torch.float32)
        gradients(attend(leaves, graph, "score", 0.0)[0], leaves)

    attend_over(random_graph(2, 60, 60, 0.2))
    sample_edges(SBM(*torch.full((2, 2, 60, 3), 0.1), torch.ones(2, 3, 3)), seed=0)
    assert max(seen) == 1
    seen.clear()
    attend_over(random_graph(2, 400, 400, 0.5))
    assert seen == [4, 4]


@pytest.mark.parametrize(("edges_per_key", "same"), [(16, True), (100, False)])
def test_gradients_of_keys_are_the_same_bits_where_edges_are_few(edges_per_key: int, same: bool) -> None:
    graph = random_graph(1, 400, 400, edges_per_key / 400)
    leaves = tensors(graph, 16, 16, False, False, torch.float32)
    grads = []
    for threads in (1, 3, 3):
        with on_threads(threads):
            grads.append(gradients(attend(leaves, graph, "score", 0.0)[0], leaves))
    assert all(torch.equal(one, two) for one, two in zip(*grads[1:], strict=True))
    assert all(torch.equal(one, two) for one, two in zip(*grads[:2], strict=True)) == same


@given(
    heads=st.integers(1, 3), queries=st.integers(1, 12), keys=st.integers(1, 40),
    density=st.sampled_from([0.0, 0.05, 0.3, 0.9, 1.0]),
    widths=st.one_of(st.tuples(*[st.integers(1, 16)] * 2), st.tuples(st.integers(17, 32), st.integers(33, 48))), options=st.sampled_from(OPTIONS),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_attention_on_random_cases(
    heads: int, queries: int, keys: int, density: float, widths: tuple[int, int], options: tuple, seed: int
) -> None:
    graph = random_graph(heads, queries, keys, density, seed)
    gate_form, gated, biased, dropout = options
    leaves = tensors(graph, *widths, gated, biased, seed=seed)
    out, lse = attend(leaves, graph, gate_form, dropout)
    arguments = (*leaves[:3], graph.rowptr, graph.col, *leaves[3:])
    with torch.no_grad():
        expected, _ = reference_edges.edge_attention(*arguments, 0.3, gate_form, dropout, 7)
        grad_out = torch.ones_like(out)
        wanted = reference_edges.edge_attention_backward(
            grad_out, *arguments, out, lse, 0.3, gate_form, dropout, 7, gated, biased
        )
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    grads = iter(torch.autograd.grad(out.sum(), [leaf for leaf in leaves if leaf is not None]))
    for want, leaf in zip(wanted, leaves, strict=True):
        if leaf is not None:
            torch.testing.assert_close(next(grads), want, rtol=1e-9, atol=1e-9)


def test_tiles_of_keys_do_not_change_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_edges = pytest.importorskip("sbm_pyg.ops.cpu.edges")
    graph, channels = random_graph(2, 30, 200, 0.6, 0), 16
    leaves, sizes, found = tensors(graph, channels, channels, True, True, seed=0), (1, 2, 4), []
    for tiles in sizes:
        monkeypatch.setattr(cpu_edges, "CACHE_BYTES", -(-4 * graph.num_keys * channels * 8 // tiles))
        assert cpu_edges.count_key_tiles(graph.rowptr.numpy(), graph.num_keys, 4 * channels * 8) == tiles
        found.append(torch.autograd.grad(attend(leaves, graph, "score", 0.2)[0].square().sum(), leaves))
    for grads in found[1:]:
        for grad, whole in zip(grads, found[0], strict=True):
            torch.testing.assert_close(grad, whole, rtol=1e-12, atol=1e-12)


def test_weights_that_float32_does_not_notice_leave_no_subnormal_gradients() -> None:
    """Those of e^-50 and less; processors take a hundred times as long for the numbers that their products would be."""
    query, key, value = torch.ones(1, 1, 1), torch.tensor([[[0.0], [-50.0], [-85.0], [-3.0]]]), torch.randn(1, 4, 1)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    graph = AttentionGraph.from_dense(torch.ones(1, 4))
    out, _ = ops.edge_attention(*leaves, graph.rows)
    torch.testing.assert_close(out, (key[:, :, 0].softmax(-1)[..., None] * value).sum(1, keepdim=True))
    dquery, dkey, dvalue = torch.autograd.grad(1e-6 * out.sum(), leaves)
    assert dkey[0, :, 0].ne(0).tolist() == dvalue[0, :, 0].ne(0).tolist() == [True, False, False, True]
    assert dquery.item() == pytest.approx((dkey * key)[0, [0, 3]].sum().item())
    plain = [x.detach() for x in leaves]
    probes = AttentionGraph.from_dense(torch.tensor([[0.0, 1, 1, 0]]))
    few = AttentionGraph.from_dense(torch.tensor([[1.0, 0, 0, 1]]))
    inputs, model = (torch.ones(1, 1, 1), *plain), (1.0, None, None, None, 0.0)
    assert schemas.edge_effect(*inputs, *few.rows, *probes.rows, *model)[1].tolist() == [0, 0]
    effect, _ = schemas.edge_effect(*inputs, *graph.rows, *probes.rows, *model)
    assert effect.ne(0).tolist() == [True, False, False, True]


def test_effects_of_more_heads_than_tokens_are_those_of_plain_torch() -> None:
    from sbm_pyg.ops.cpu import effects as cpu_effects
    from sbm_pyg.ops.reference import effects as reference_effects

    graph = probes = AttentionGraph.from_dense(torch.ones(3, 1, 2))
    x = [torch.randn(3, n, 4, dtype=torch.float64) for n in (1, 1, 2, 2)]
    model = torch.rand(3, 1, 2, dtype=torch.float64), torch.rand(3, 2, 2, dtype=torch.float64), torch.full((1,), 0.25)
    arguments = (*x, graph.rowptr, graph.col, None, probes.rowptr, probes.col, None, 0.5, *model, 0.1)
    torch.testing.assert_close(cpu_effects.edge_effect(*arguments), reference_effects.edge_effect(*arguments))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("is_causal", "is_strict"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("keys", [[0, 5, 12, 40], [0, 9, 10, 33], [0, 0, 3, 50]])
def test_reach_dots_are_sums_over_allowed_pairs(
    keys: list[int], is_causal: bool, is_strict: bool, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(len(keys))
    query_ptr, key_ptr = torch.tensor([0, 5, 12, 40]), torch.tensor(keys)
    query, key = (torch.rand(2, n, 19, generator=random).to(dtype).requires_grad_() for n in (40, keys[-1]))
    places = [torch.cat([torch.arange(n) for n in x.diff().tolist()]) for x in (query_ptr, key_ptr)]
    batches = [torch.repeat_interleave(x.diff()) for x in (query_ptr, key_ptr)]
    meet = batches[0][:, None] == batches[1]
    meet &= not is_causal or places[1] + is_strict <= places[0][:, None]
    wanted = ((query.double() @ key.double().mT) * meet).sum(-1)
    grad = torch.rand(2, 40, generator=random, dtype=torch.promote_types(dtype, torch.float32))
    grads = torch.autograd.grad(wanted, (query, key), grad.double())
    plain = query.detach(), key.detach(), query_ptr, key_ptr, is_causal, is_strict
    out = schemas.reach_dot(query, key, *plain[2:])
    assert out.dtype == grad.dtype
    for found in (out, reference_reach.reach_dot(*plain)):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-10 if dtype == torch.float64 else 1e-5, atol=1e-10)
    for both in (
        torch.autograd.grad(out, (query, key), grad),
        reference_reach.reach_dot_backward(grad, *plain, True, True),
    ):
        torch.testing.assert_close(both, grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("is_causal", "is_strict"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("lengths", [(5, 7, 28), (0, 1, 39), (40,)])
@pytest.mark.parametrize(("needs", "by_head"), [((True, True), True), ((True, False), False), ((False, True), True)])
def test_rates_scaled_to_a_density(
    lengths: tuple[int, ...], is_causal: bool, is_strict: bool, dtype: torch.dtype, needs: tuple[bool, bool],
    by_head: bool,
) -> None:  # fmt: skip
    """Against a dense computation; one head has a running mean, the others have none, and one has tiny numbers."""
    random, ptr, density = torch.Generator().manual_seed(len(lengths)), pointer(lengths), 0.3
    rate, member = (torch.rand(3, 40, 11, generator=random).to(dtype) for _ in range(2))
    rate[2, ::2] *= 1e-5
    running = torch.tensor([0.02, 0.0, 0.0])
    leaves = [x.requires_grad_(need) for x, need in zip((rate, member), needs, strict=True)]
    wide = [x.detach().double().requires_grad_(need) for x, need in zip(leaves, needs, strict=True)]
    sequence = torch.repeat_interleave(ptr.diff())
    meet = sequence[:, None] == sequence
    meet &= torch.ones(40, 40, dtype=torch.bool).tril(-1 if is_strict else 0) if is_causal else meet
    degree, allowed = ((wide[0] @ wide[1].mT) * meet).sum(-1), meet.sum(-1).double()
    edges, pairs = (torch.stack([part.sum(-1) for part in x.split(lengths, -1)], -1) for x in (degree, allowed))
    mean = (edges / pairs.clamp(min=1)).clamp(min=1e-3)
    densities = torch.tensor([0.3, 0.1, 0.5]) if by_head else None
    of_heads = density if densities is None else densities[:, None].double()
    pooled = (of_heads / running.double().clamp(min=1e-3)[:, None] * mean.detach() / mean)[:, sequence]
    alone = (of_heads * allowed).clamp(min=1) / degree.maximum(1e-3 * allowed.clamp(min=1))
    factor = torch.where(running[:, None] > 0, pooled, alone)
    wanted = [wide[0] * factor[..., None], factor, degree, torch.stack([edges.sum(1), pairs.sum().expand(3)])]
    given = (running, ptr, ptr, density, densities, is_causal, is_strict)
    weights = torch.rand(3, 40, 11, generator=random).to(dtype), torch.rand(3, 40, generator=random).to(degree.dtype)
    weights = weights[0], weights[1].to(torch.promote_types(dtype, torch.float32))
    near = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-4}
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else near
    at = [x for x, need in zip(wide, needs, strict=True) if need]
    grads = torch.autograd.grad(wanted[:2], at, [x.double() for x in weights])
    out = schemas.scale_to_density(*leaves, *given)
    plain = [x.detach() for x in leaves]
    for found in (out, reference_density.scale_to_density(*plain, *given)):
        assert [x.dtype for x in found] == [dtype, *[weights[1].dtype] * 3]
        torch.testing.assert_close([x.double() for x in found], wanted, **near)
    saved = (*plain, running, ptr, ptr, *(x.detach() for x in out[1:3]), is_causal, is_strict, *needs)
    of_plain = reference_density.scale_to_density_backward(*weights, *saved)
    mine = torch.autograd.grad(out[:2], [x for x in leaves if x.requires_grad], weights)
    for both in (mine, [x for x, need in zip(of_plain, needs, strict=True) if need]):
        assert all(x.dtype == dtype for x in both)
        for x, meant in zip(both, grads, strict=True):
            torch.testing.assert_close(x.double() / meant.abs().max(), meant / meant.abs().max(), **near)


@pytest.mark.parametrize("running", [0.0, 0.1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sequence_that_is_not_finite_scales_no_other(value: float, running: float) -> None:
    rate, member = torch.rand(1, 6, 2), torch.rand(1, 6, 2)
    member[0, 4, 1] = value
    ptr = torch.tensor([0, 3, 6])
    given = (rate, member, torch.tensor([running]), ptr, ptr, 0.5, None, False, False)
    for scale in (schemas.scale_to_density, reference_density.scale_to_density):
        scaled, factor, degree, statistics = scale(*given)
        assert scaled[:, :3].isfinite().all()
        assert factor[:, :3].isfinite().all()
        assert statistics[1].tolist() == [9]
        torch.testing.assert_close(statistics[0], degree[:, :3].sum(1))
        if math.isnan(value) or running:
            assert factor[:, 3:].isnan().all()


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.sampled_from([1, 3, 40, 300]))
def test_loops_and_rows_of_some_queries(seed: int, heads: int, tokens: int) -> None:
    random = torch.Generator().manual_seed(seed)
    share, dtype = torch.rand(1, 1, 1, generator=random), (torch.int32, torch.int64)[seed % 2]
    mask = torch.rand(heads, tokens, tokens, generator=random) < share
    rowptr, col = pointer(mask.flatten(0, 1).sum(1).tolist()), mask.nonzero()[:, 2].to(dtype)
    loops, kept = torch.eye(tokens, dtype=torch.bool).expand_as(mask), torch.rand(tokens, generator=random) < 0.4
    with_loops = mask | loops
    for new_ptr, keys, is_loop in (
        ops.schemas.add_loops(rowptr, col, tokens),
        reference_union.add_loops(rowptr, col, tokens),
    ):
        assert new_ptr.tolist() == pointer(with_loops.flatten(0, 1).sum(1).tolist()).tolist()
        assert torch.equal(keys, with_loops.nonzero()[:, 2].to(dtype))
        assert torch.equal(is_loop, loops[with_loops])
    few = mask & kept[:, None]
    for select in (ops.schemas.select_rows, reference_union.select_rows):
        new_ptr, keys, edge = select(rowptr, col, kept)
        assert new_ptr.tolist() == pointer(few.flatten(0, 1).sum(1).tolist()).tolist()
        assert torch.equal(keys, few.nonzero()[:, 2].to(dtype))
        assert torch.equal(edge, few[mask].nonzero()[:, 0])


@pytest.mark.parametrize("per_query", [0.0, 2.5, 9.0, math.inf])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_probes_are_systematic_samples_of_a_number_of_keys(per_query: float, is_causal: bool, masked: bool) -> None:
    ptrs = torch.tensor([0, 9, 9, 40]), torch.tensor([0, 30, 31, 50])
    queries = torch.arange(40) % 3 > 0 if masked else None
    allowed = segments.allowed_keys(*ptrs, 40, is_causal)
    wanted = (per_query / allowed.double()).clamp(max=1).float()
    wanted = wanted if queries is None else wanted * queries
    ids = torch.tensor([7, 2**32 - 1, 5])
    rows = schemas.sample_systematic(wanted, *ptrs, ids, 2, 3, is_causal)
    for sample in (schemas.sample_probes, reference_systematic.sample_probes):
        assert same(sample(*ptrs, ids, queries, 40, 2, per_query, 3, is_causal), (*rows, wanted))


def best_keys(
    query: Tensor, weight: Tensor | None, key: Tensor, ptrs: list[Tensor], count: Tensor, is_causal: bool
) -> list[list[int]]:
    """The keys of each row by their definition: sorted by score, where NaN counts as infinity, then by number."""
    if weight is None:
        scores = query.sum(2) @ key.mT
    else:
        scores = (torch.einsum("hnsd,hmd->hnsm", query, key).relu() * weight[..., None]).sum(2)
    rows = []
    for head, i in product(*map(range, scores.shape[:2])):
        b = int(torch.searchsorted(ptrs[0], i, right=True)) - 1
        first, last = int(ptrs[1][b]), int(ptrs[1][b + 1])
        last = min(last, first + i - int(ptrs[0][b]) + 1) if is_causal else last
        row = scores[head, i].masked_fill(scores[head, i].isnan(), torch.inf).tolist()
        rows.append(sorted(sorted(range(first, last), key=lambda j: (-row[j], j))[: int(count[head, i])]))
    return rows


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.sampled_from([9, 60, 400]), st.booleans(), st.booleans())
def test_the_best_keys_are_those_of_the_largest_scores(
    seed: int, batch: int, most: int, is_causal: bool, weighted: bool
) -> None:
    """Whole numbers have exact scores and many ties. Rows fill up to seven panels of 64 keys."""
    random = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=random)

    lengths = [whole(1, 9, batch), whole(1, most, batch)]
    ptrs = [torch.cat([n.new_zeros(1), n.cumsum(0)]) for n in lengths]
    small, channels = whole(1, 6, 2).tolist()
    queries, keys = int(ptrs[0][-1]), int(ptrs[1][-1])
    sizes = (2, queries, small, channels), (2, queries, small), (2, keys, channels)
    dtype = (torch.float64, torch.float32, torch.bfloat16)[seed % 3]
    query, weight, key = (whole(-2, 2, *size).to(dtype) for size in sizes)
    key[torch.rand(2, keys, generator=random) < 0.1] = torch.nan if seed % 2 else torch.inf
    query[torch.rand(2, queries, generator=random) < 0.1] = torch.nan
    count = whole(1, 1 + most // (1 + seed % 9), 2, queries)
    allowed = segments.allowed_keys(*ptrs, queries, is_causal)
    given = (query, weight if weighted else None, key, *ptrs, count, allowed)
    weights = weight.double() if weighted else None
    wanted = best_keys(query.double(), weights, key.double(), ptrs, count, is_causal)
    for rowptr, col in (schemas.index_top_k(*given), reference_pairs.index_top_k(*given)):
        assert [part.tolist() for part in col.split(rowptr.diff().tolist())] == wanted


@given(st.integers(0, 2**32 - 1), st.integers(0, 5), st.sampled_from([1, 9, 70, 700]), st.integers(1, 40))
def test_the_largest_values_of_segments(seed: int, segments: int, most: int, distinct: int) -> None:
    """Few distinct values have many ties."""
    random = torch.Generator().manual_seed(seed)
    size = torch.randint(0, most + 1, (segments,), generator=random)
    ptr = torch.cat([size.new_zeros(1), size.cumsum(0)])
    dtype = (torch.float64, torch.float32, torch.bfloat16)[seed % 3]
    src = torch.randint(-distinct, distinct + 1, (int(ptr[-1]),), generator=random).to(dtype)
    src[torch.rand(src.numel(), generator=random) < 0.1] = (torch.nan, torch.inf, -torch.inf)[seed // 3 % 3]
    count = torch.randint(0, 2 + most // (1 + seed % 5), (segments,), generator=random)
    wanted = []
    for first, last, few in zip(ptr[:-1].tolist(), ptr[1:].tolist(), count.tolist(), strict=True):
        numbers = src.masked_fill(src.isnan(), torch.inf)
        wanted.append(sorted(sorted(range(first, last), key=lambda place: (-float(numbers[place]), place))[:few]))
    for kept_ptr, kept in (schemas.segment_top_k(src, ptr, count), reference_pairs.segment_top_k(src, ptr, count)):
        assert [part.tolist() for part in kept.split(kept_ptr.diff().tolist())] == wanted


@given(st.integers(0, 2**32 - 1), st.integers(0, 5), st.sampled_from([1, 3, 40, 700]))
def test_the_union_of_two_graphs_is_that_of_the_sets_of_keys(seed: int, rows: int, keys: int) -> None:
    random = torch.Generator().manual_seed(seed)
    shares = torch.rand(2, 1, 1, generator=random)
    masks = torch.rand(2, rows, keys, generator=random) < shares
    dtypes = [(torch.int32, torch.int32), (torch.int32, torch.int64), (torch.int64, torch.int64)][seed % 3]
    graphs = []
    for mask, dtype in zip(masks, dtypes, strict=True):
        graphs += [
            torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)]),
            mask.nonzero()[:, 1].to(dtype),
        ]
    union = masks.any(0)
    for rowptr, col, from_other in (schemas.union_rows(*graphs, keys), reference_union.union_rows(*graphs, keys)):
        assert rowptr.tolist() == [0, *union.sum(1).cumsum(0).tolist()]
        assert col.dtype == dtypes[1]
        assert col.tolist() == union.nonzero()[:, 1].tolist()
        assert torch.equal(from_other, masks[1][union])


def rows_of(graph: AttentionGraph) -> tuple[Tensor, Tensor]:
    return graph.rowptr, graph.col


def arguments_of_best_keys(weighted: bool) -> Any:
    ptr = torch.tensor([0, 700, 2000])
    query, weight, key = torch.randn(2, 2000, 4, 8), torch.randn(2, 2000, 4), torch.randn(2, 2000, 8)
    allowed = segments.allowed_keys(ptr, ptr, 2000, True)
    return query, weight if weighted else None, key, ptr, ptr, torch.full((2, 2000), 20), allowed


@pytest.mark.parametrize(
    ("op", "make"),
    [("add_loops", lambda: (*rows_of(patterns.random(3000, 300, heads=2, seed=1)), 3000)),
     ("select_rows", lambda: (*rows_of(patterns.random(3000, 300, heads=2, seed=1)), torch.arange(3000) % 3 > 0)),
     ("union_rows", lambda: (*rows_of(patterns.random(3000, 40)), *rows_of(patterns.random(3000, 9)), 3000)),
     ("segment_top_k", lambda: (torch.randn(60_000).round(decimals=1), torch.arange(0, 60_001, 100), torch.full((600,), 20))),
     ("index_top_k", lambda: arguments_of_best_keys(True)), ("index_top_k", lambda: arguments_of_best_keys(False))],
)  # fmt: skip
def test_rows_are_the_same_on_any_number_of_threads(op: str, make: Callable[[], Any]) -> None:
    arguments, results = make(), []
    for threads in (1, 4):
        with on_threads(threads):
            results.append(getattr(schemas, op)(*arguments))
    assert same(*results)


SCORED = ("bipartite", "rows of 0, 1, 63, 1000", "one row has all edges", "no edges")


def leaf(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize(
    ("small", "channels", "dtype"),
    [(1, 1, torch.float64), (2, 8, torch.float32), (2, 8, torch.bfloat16), (3, 40, torch.float64)],
)
@pytest.mark.parametrize("name", SCORED)
def test_the_scores_of_edges_are_those_of_all_pairs(name: str, small: int, channels: int, dtype: torch.dtype) -> None:
    graph = GRAPHS[name]
    heads, queries, keys = graph.heads, graph.num_queries, graph.num_keys
    sizes = (heads, queries, small, channels), (heads, queries, small), (heads, keys, channels)
    leaves = [leaf(seed, *size, dtype=dtype) for seed, size in enumerate(sizes)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    every = (torch.einsum("hnsd,hmd->hnsm", wide[0], wide[2]).relu() * wide[1][..., None]).sum(2).flatten(0, 1)
    row, col = graph.edge_row, graph.col.long()
    wanted, grad = every[row, col], leaf(9, graph.num_edges, dtype=dtype).detach()
    exact = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    out = schemas.index_score(*leaves, *graph.rows[:2])
    assert out.dtype == dtype
    plain = [x.detach() for x in leaves], (graph.rowptr, graph.col)
    for found in (out, reference_imitation.index_score(*plain[0], *plain[1])):
        torch.testing.assert_close(found.double(), wanted, rtol=exact, atol=exact * channels)
    expected = torch.autograd.grad(wanted, wide, grad.double())
    for grads in (
        torch.autograd.grad(out, leaves, grad),
        reference_imitation.index_score_backward(grad, *plain[0], *plain[1]),
    ):
        for one, other, like in zip(grads, expected, leaves, strict=True):
            assert one.dtype == dtype
            assert one.shape == like.shape
            torch.testing.assert_close(one.double(), other, rtol=exact, atol=exact * (1 + float(other.abs().max())))


def _cross_entropy_of_all_pairs(
    query: Tensor, key: Tensor, log_p: Tensor, graph: AttentionGraph, bias: Tensor | None, scale: float
) -> Tensor:
    """By its definition, with an array of all pairs."""
    at, shape = (graph.edge_row, graph.col.long()), (graph.heads * graph.num_queries, graph.num_keys)
    logit, known = (torch.full(shape, -torch.inf, dtype=torch.float64) for _ in range(2))
    scores = (query @ key.mT).flatten(0, 1)[at] * scale
    logit[at] = scores if bias is None else scores + bias
    known = known.index_put(at, log_p)
    weight = logit.softmax(1).nan_to_num(0.0)
    log_q = torch.where(known == -torch.inf, 0, known - known.logsumexp(1, keepdim=True))
    return -(weight * log_q).sum(1).view(query.shape[:2])


@pytest.mark.parametrize(
    ("biased", "channels", "dtype"),
    [(False, 1, torch.float64), (True, 8, torch.float32), (True, 8, torch.bfloat16), (True, 40, torch.float64)],
)
@pytest.mark.parametrize("name", SCORED)
def test_the_cross_entropy_of_edges_is_that_of_its_definition(
    name: str, biased: bool, channels: int, dtype: torch.dtype
) -> None:
    """A fifth of the edges have probability 0, and some a score of minus infinity."""
    graph = GRAPHS[name]
    query = leaf(0, graph.heads, graph.num_queries, channels, dtype=dtype)
    key = leaf(1, graph.heads, graph.num_keys, channels, dtype=dtype)
    chance = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(2))
    bias = leaf(3, graph.num_edges, dtype=dtype).detach().masked_fill(chance > 0.9, -torch.inf) if biased else None
    log_p = (5 * leaf(4, graph.num_edges, dtype=dtype).detach()).masked_fill(chance < 0.2, -torch.inf)
    wide, log_p = log_p.double().requires_grad_(), log_p.requires_grad_()
    plain = query.detach().double(), key.detach().double()
    wanted = _cross_entropy_of_all_pairs(*plain, wide, graph, None if bias is None else bias.double(), 0.3)
    out = schemas.edge_cross_entropy(query, key, log_p, graph.rowptr, graph.col, bias, 0.3)[0]
    assert out.dtype == torch.promote_types(dtype, torch.float32)
    exact = 1e-10 if dtype == torch.float64 else 1e-4
    with torch.no_grad():
        reference, slope = reference_imitation.edge_cross_entropy(query, key, log_p, graph.rowptr, graph.col, bias, 0.3)
    for found in (out, reference):
        torch.testing.assert_close(found.double(), wanted, rtol=exact, atol=exact)
    grad = leaf(5, *out.shape, dtype=out.dtype).detach()
    (expected,) = torch.autograd.grad(wanted, wide, grad.double())
    (of_op,) = torch.autograd.grad(out, log_p, grad)
    assert of_op.dtype == dtype
    for found in (of_op, reference_imitation.edge_cross_entropy_backward(grad, slope, graph.rowptr)):
        rough = 1e-2 if found.dtype == torch.bfloat16 else exact
        torch.testing.assert_close(found.double(), expected, rtol=rough, atol=rough)


def test_the_cross_entropy_stays_finite_for_extreme_numbers() -> None:
    graph = AttentionGraph.from_dense(torch.ones(1, 3))
    query, key = torch.full((1, 1, 2), 1e3), torch.tensor([[[1e3, 0.0], [0.0, 0.0], [0.0, -1e3]]])
    log_p = torch.tensor([-1e4, 1e4, 0.0], requires_grad=True)
    loss = schemas.edge_cross_entropy(query, key, log_p, *graph.rows, 1.0)[0]
    assert loss.tolist() == [[2e4]]
    loss.sum().backward()
    assert log_p.grad is not None
    assert log_p.grad.tolist() == [-1, 1, 0]


@pytest.mark.parametrize("kind", ["score", "cross-entropy"])
def test_imitation_on_several_threads(kind: str) -> None:
    graph = random_graph(2, 300, 300, 0.4)
    given = [
        leaf(seed, *size, dtype=torch.float32) for seed, size in enumerate([(2, 300, 2, 8), (2, 300, 2), (2, 300, 8)])
    ]
    log_p, results = leaf(7, graph.num_edges, dtype=torch.float32), []
    for threads in (1, 3):
        with on_threads(threads):
            if kind == "score":
                out, leaves = schemas.index_score(*given, *graph.rows[:2]), given
            else:
                out, leaves = schemas.edge_cross_entropy(given[2], given[2], log_p, *graph.rows, 1.0)[0], [log_p]
            results.append([out, *gradients(out, leaves)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="the processor cannot flush subnormal numbers")
@pytest.mark.parametrize("flushed", [False, True])
def test_kernels_take_subnormal_numbers_as_zero_and_leave_the_setting(flushed: bool) -> None:
    tiny, key = torch.full((1, 2**14, 16), 1e-39), torch.full((1, 2**14, 16), 1e3)
    rows, col = torch.arange(2**14 + 1), torch.arange(2**14)
    torch.set_flush_denormal(flushed)
    try:
        assert not ops.edge_dot(tiny, key, ops.Rows(rows, col)).any()  # 1.6e-35
        assert bool((tiny * 0.5).view(torch.int32).any()) != flushed
        with pytest.raises(ZeroDivisionError):
            workers.run(lambda x: 1 / x, [(0,), (0,)])
        with workers.flushed_subnormals():
            assert not (tiny * 0.5).view(torch.int32).any()
        assert bool((tiny * 0.5).view(torch.int32).any()) != flushed
    finally:
        workers.on_each(lambda: torch.set_flush_denormal(False))


# ------------------------------------------------------------------ processes and threads


def test_kernels_enclose_constants_alone() -> None:
    """A kernel in the closure of another is pickled anew by each process, and numba then finds no compiled one on disk."""
    from sbm_pyg.ops.cpu import edges as cpu_edges
    from sbm_pyg.ops.cpu import effects as cpu_effects

    for make, widths in (
        (cpu_effects._compile_edge_effect, (32, 32, 16)), (cpu_edges._compile_edge_attention, (32, 32)), (cpu_edges._compile_edge_attention_backward, (32, 32)),
        (cpu_edges._compile_edge_dot, (32,)), (cpu_edges._compile_edge_dot_backward, (32,)),
    ):  # fmt: skip
        make(*widths)
    enclosed = {
        (k.py_func.__name__, type(cell.cell_contents)) for k in workers._kernels for cell in k.py_func.__closure__ or ()
    }
    assert {kind for _, kind in enclosed} == {int}, enclosed


def test_kernels_of_other_sources_are_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba asks for the file of a kernel alone, and not for those of what the kernel calls."""
    file = tmp_path / "kernels.py"
    file.write_text("def double(x):\n    return x + x\n")
    hits = []
    for sources in ("one", "one", "other", "other"):
        monkeypatch.setattr(workers, "_sources", lambda sources=sources: sources)
        space: dict[str, Any] = {"__name__": "kernels", "__file__": str(file)}
        exec(compile(file.read_text(), str(file), "exec"), space)
        double: Any = workers.numba_kernel(space["double"])
        assert double(3) == 6
        hits.append(sum(double.stats.cache_hits.values()))
    assert hits == [0, 1, 0, 1]


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="the processor cannot flush subnormal numbers")
@pytest.mark.parametrize("threads", [1, 2])
def test_each_thread_that_computes_is_reached(threads: int) -> None:
    """Flushing subnormal numbers is a setting of each thread; a product on all of them shows who missed it."""
    tiny = torch.full((2**20,), 1e-39)
    with on_threads(threads):
        assert (tiny * 0.5).view(torch.int32).all()
        workers.on_each(lambda: torch.set_flush_denormal(True))
        assert not (tiny * 0.5).view(torch.int32).any()
        workers.on_each(lambda: torch.set_flush_denormal(False))
        assert (tiny * 0.5).view(torch.int32).all()


@pytest.mark.parametrize(
    "threads",
    [
        1,
        pytest.param(
            2, marks=pytest.mark.skipif(workers._fork_team is None, reason="torch's threads cannot be found here")
        ),
    ],
)
def test_an_error_on_any_thread_is_raised(threads: int) -> None:
    caller, calls = threading.get_ident(), []

    def refuse() -> None:
        calls.append(threading.get_ident())
        if threads == 1 or calls[-1] != caller:
            raise ValueError("of one thread")

    with on_threads(threads), pytest.raises(ValueError, match="of one thread"):
        workers.on_each(refuse)
    assert len(calls) == len(set(calls)) == threads


FORK = """
import multiprocessing, torch
from sbm_pyg import patterns, ops
torch.set_num_threads(2)
graph = patterns.full(200)
x = torch.randn(1, 200, 16, requires_grad=True)
def work(_=None):
    out, _ = ops.edge_attention(x, x, x, graph.rows)
    ops.sample_sbm(x.detach().abs() / 100, x.detach().abs() / 100, graph.query_ptr, graph.key_ptr, torch.tensor([0]), 1)
    return float(out.sum())
parent = work()
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert all(abs(child - parent) < 1e-3 for child in pool.map(work, range(4))), "children differ"
from threading import Thread
threads = [Thread(target=lambda: [work() for _ in range(20)]) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
print("alive")
"""


GENERIC = """
import torch
from problems import GRAPHS
from sbm_pyg import ops
from sbm_pyg.ops.reference import edges, effects, sampling, systematic
from sbm_pyg.ops.cpu.simd import WIDE
assert not WIDE
generator = torch.Generator().manual_seed(5)
y = torch.randint(0, 17, (2, 50, 6), generator=generator) / 16 / 8
z = torch.randint(0, 17, (2, 170, 6), generator=generator) / 16
ptr = torch.tensor([0, 20, 50]), torch.tensor([0, 40, 170])
arguments = (y, z, *ptr, torch.tensor([3, 9]), 1, "bernoulli", 0.0, True, False)
for ours, meant in zip(ops.sample_sbm(*arguments), sampling.sample_sbm(*arguments), strict=True):
    assert torch.equal(ours, meant)
graph = GRAPHS["rows around a vector"]
leaves = [torch.randn(1, n, 32, generator=generator).requires_grad_() for n in (graph.num_queries, graph.num_keys, graph.num_keys)]
out, _ = ops.edge_attention(*leaves, graph.rows, scale=0.3)
wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
meant, _ = edges.edge_attention(*wide, graph.rowptr, graph.col, None, None, 0.3, "score", 0.0, 0)
torch.testing.assert_close(out.double(), meant, rtol=1e-4, atol=1e-5)
grads = zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(meant.sum(), wide), strict=True)
for grad, want in grads:
    torch.testing.assert_close(grad.double(), want, rtol=1e-4, atol=1e-5)
shape = (graph.heads, graph.num_queries, 3), (graph.heads, graph.num_keys, 3), (graph.num_queries,)
rate, member, chance = (torch.rand(x, generator=generator) / 3 for x in shape)
rows = [*graph.rows] * 2
found = [
    op.edge_effect(torch.ones_like(x[0]), *(leaf.detach() for leaf in x), *rows, 0.3, rate, member, chance + 0.1, 0.0)
    for op, x in ((ops.schemas, leaves), (effects, wide))
]
torch.testing.assert_close(found[0][0].double(), found[1][0], rtol=1e-3, atol=1e-5)
probes = (chance, *(torch.tensor([0, length]) for length in (graph.num_queries, graph.num_keys)), torch.tensor([4]), 2, 9, False)
assert all(torch.equal(*pair) for pair in zip(ops.schemas.sample_systematic(*probes), systematic.sample_systematic(*probes), strict=True))
print("equal")
"""


@pytest.mark.slow
def test_kernels_compile_for_a_processor_without_wide_registers() -> None:
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GENERIC], capture_output=True, text=True, timeout=300, check=False,
        env=environment,
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.slow
def test_forked_workers_and_python_threads_survive() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "alive", done.stderr


# ------------------------------------------------------------------ segments


@pytest.mark.parametrize("kind", ["sum", "max"])
@pytest.mark.parametrize("size", [1, 7, 128])
@pytest.mark.parametrize("lengths", [(0, 5, 300, 0, 0, 1, 1000), (128, 256, 0), (2000,), (0, 0)])
def test_long_segments_are_reduced_in_pieces(lengths: tuple[int, ...], size: int, kind: str) -> None:
    """As on a GPU, where one thread would reduce each."""
    ptr = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.rand(int(ptr[-1]), 2, 3, dtype=torch.float64, requires_grad=True)
    found, wanted = segments._reduce_twice(x, ptr, kind, size), segments.segments(x, ptr, kind)
    torch.testing.assert_close(found, wanted)
    if kind == "sum":
        grad = torch.rand_like(wanted)
        mine, meant = (torch.autograd.grad(y, x, grad)[0] for y in (found, wanted))
        torch.testing.assert_close(mine, meant)


def test_log_softmax_of_segments_and_its_gradient() -> None:
    x, ptr = ragged(0, 1, 5, 30)
    x = x.double().requires_grad_()
    rows = [x[start:end].log_softmax(0) for start, end in pairwise(ptr.tolist())]
    torch.testing.assert_close(segments.segment_log_softmax(x, ptr), torch.cat(rows))
    assert torch.autograd.gradcheck(lambda x: segments.segment_log_softmax(x, ptr), x)
    assert torch.autograd.gradgradcheck(lambda x: segments.segment_log_softmax(x, ptr), x)
