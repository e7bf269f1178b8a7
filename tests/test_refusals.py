"""What is wrong is refused by its name and with a way out, not by whatever of torch or numba fails first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sbm_pyg import AttentionConv, AttentionGraph, BlockGraph, BlockPool, make_attention, ops, pad
from sbm_pyg.graphs import ragged
from sbm_pyg.sources import patterns
from sbm_pyg.sparsefinder import Projection, fit_projection, ground_truth, predictors, projection_loss
from sbm_pyg.training.estimators import Local

X, PTR = torch.rand(2, 9, 4) / 4, torch.tensor([0, 4, 9])
TOKENS, THERE = torch.rand(2, 3, 2, 4), torch.ones(3, 2, dtype=torch.bool)
GRAPH = patterns.full(9, heads=2)
MANY = (2**63 - 1, 2**63, 2**64, 10**400)


def check(call: Callable[..., Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^Expected {message}"):
        call()


def layers() -> list[AttentionConv]:
    return [
        AttentionConv(8, 4, 2, source=patterns.PatternSource(patterns.window, size=1)),
        *(make_attention("sbm", 8, 4, 2, num_clusters=3, block_size=size) for size in (1, 2)),
    ]


def test_tokens_on_another_device_than_the_layer() -> None:
    x = torch.randn(9, 8)
    for conv in layers():
        check(lambda: conv(x.to("meta")), r"'x' on cpu, as the layer is \(got meta\)")  # noqa: B023
        check(lambda: conv((x, x.to("meta"))), r"'x' on cpu, as the layer is \(got meta\)")  # noqa: B023
        check(lambda: conv.to("meta")(x), r"'x' on meta, as the layer is \(got cpu\)")  # noqa: B023


@pytest.mark.parametrize("many", MANY)
def test_sizes_that_int64_does_not_hold(many: int) -> None:
    x, ptrs = torch.randn(9, 8), (torch.tensor([0, 9]),) * 2
    rows, col = torch.tensor([0, 1, 2]), torch.tensor([0, 0])
    memory = "to ask for no more than memory holds"
    check(lambda: make_attention("sbm", 8, 4, 2, num_clusters=3, block_size=many)(x), rf"'block_size' {memory}")
    check(lambda: ops.block_attention(X, X, X, ops.Rows(rows, col), ptrs, many), rf"'block_size' {memory}")
    check(lambda: BlockGraph(patterns.full(3), many), "'query_ptr' ")
    check(lambda: patterns.window(many, 1, ptr=PTR), "'n' to be the last entry of 'ptr', 9")
    check(lambda: ragged.resolve_ptr(many, PTR), "'ptr' to run from 0 to ")
    check(
        lambda: ground_truth.group_entropy(torch.zeros(2, 9, dtype=torch.int64), many, GRAPH),
        "'num_groups' so that int64",
    )
    check(lambda: pad(torch.zeros(9), PTR, 10**400), "'fill_value' in ")
    assert Local(probes=2**63 - 1).probes == 2**63 - 1
    if many >= 2**63:
        check(lambda: Local(probes=many), r"'probes' in \[0, inf\], below 2\*\*63 if whole")
    # where all there are is a sensible answer, it is given
    ranks = X.argsort(1).argsort(1)
    largest = min(many, 2**63 - 1)
    assert predictors.buckets(X, many).tolist() == [
        [[rank * largest // 9 for rank in row] for row in head] for head in ranks.tolist()
    ]


@pytest.mark.parametrize(
    ("tokens", "is_real", "message"),
    [(TOKENS[0], THERE, r"'tokens' to be \[H, n, block_size, C\] = \[2, any, any, 4\] \(got \[3, 2, 4\]\)"),
     (TOKENS > 0, THERE, r"'tokens' to be a floating tensor \(got torch.bool\)"),
     (TOKENS, THERE[:2], r"'is_real' to be \[n, block_size\] = \[3, 2\] \(got \[2, 2\]\)"),
     (TOKENS, THERE.float(), r"'is_real' to be bool \(got torch.float32\)"),
     (TOKENS, THERE.to("meta"), r"'is_real' on cpu, as 'tokens' is \(got meta\)")],
)  # fmt: skip
def test_blocks_that_a_pool_does_not_take(tokens: Tensor, is_real: Tensor, message: str) -> None:
    check(lambda: BlockPool(4, 2)(tokens, is_real), message)


def test_fitting_without_gradients() -> None:
    def fit(projection: Projection) -> list[float]:
        return fit_projection(projection, [(X, X, GRAPH)], epochs=1, progress=False)

    assert len(fit(Projection(4, 2))) == 1
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            check(lambda: fit(Projection(4, 2)), "'projection' to have gradients")
    check(lambda: fit(Projection(4, 2).requires_grad_(False)), "'projection' to have gradients")


def test_a_loss_of_a_projection_of_other_tensors() -> None:
    check(lambda: projection_loss(X, X.double(), GRAPH), r"'key' to be torch.float32, as 'query' is")
    check(lambda: projection_loss(X.long(), X.long(), GRAPH), r"'query' to be a floating tensor \(got torch.int64\)")
    check(lambda: projection_loss(X.to("meta"), X, GRAPH), r"'key' on meta, as 'query' is \(got cpu\)")
    check(lambda: projection_loss(X, X, GRAPH.to("meta")), r"'graph' on cpu, as 'query' is \(got meta\)")


def test_graphs_on_meta() -> None:
    meta = GRAPH.to("meta")
    assert repr(meta) == "AttentionGraph(1 sequence, 2 heads, 9 queries, 9 keys, 162 edges, device='meta')"
    check(lambda: ground_truth.compare(GRAPH, meta), r"'graph' on cpu, as 'ground_truth' is \(got meta\)")
    check(lambda: ground_truth.compare(meta, GRAPH), "'ground_truth' to hold values")
    check(
        lambda: GRAPH.contains(torch.zeros(2, 3, dtype=torch.int64, device="meta")), r"'edge_index' on cpu, as 'graph'"
    )


@pytest.mark.parametrize("ptr", [torch.tensor([[0, 9]]), torch.tensor(9), torch.tensor([9, 4, 0])])
def test_offsets_of_blocks(ptr: Tensor) -> None:
    blocks = AttentionGraph.from_dense(torch.ones(3, 3))
    check(lambda: BlockGraph(blocks, 3, query_ptr=ptr), "'query_ptr' to ")


def test_products_of_edges_take_no_bias() -> None:
    x, rows = torch.ones(1, 2, 3), ops.Rows(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.zeros(2))
    with pytest.raises(ValueError, match=r"Expected 'rows' without a bias \(got Tensor\)"):
        ops.edge_dot(x, x, rows)
    assert ops.edge_dot(x, x, rows._replace(bias=None)).shape == (2,)
