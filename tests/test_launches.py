"""What plain torch asks of a device: how many operations, and how often the host waits for an answer.

Both are counted on the CPU, by sending our ops to the reference that every other device takes. They depend neither on
the machine nor on the size of the batch. Graphs of a block model are left to the CPU: that counts as the copies of five
arguments, for each of which the host waits, and of two results. ``python tests/test_launches.py`` prints the counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from sbm_pyg import AttentionConv, AttentionGraph, BlockGraph, SBMAttentionConv, make_attention
from sbm_pyg.ops import checks, memo, schemas, segments, tiles, values
from sbm_pyg.sources import patterns

WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"}
"""Ops whose answer the host needs before it can go on."""


class PlainTorch(TorchDispatchMode):
    """In it, our ops are computed by the reference, whatever the device, and what they ask of the device is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.allocations = self.waits = 0  # allocations are among what is launched

    def module(self, name: str) -> Any:
        """Which has the function that computes this op."""
        if name == "sample_sbm":
            return self
        return import_module(f"sbm_pyg.ops.reference.{schemas.KERNELS[name][0]}")

    def sample_sbm(self, *arguments: Any) -> Any:
        """The graph as the CPU draws it, of which the copies alone are counted."""
        self.launches, self.waits = self.launches + 7, self.waits + 5
        with _disable_current_modes():
            return torch.ops.sbm_pyg.sample_sbm(*arguments)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op.namespace == "sbm_pyg":
            with self:
                return getattr(self.module(op._opname), op._opname)(*args, **kwargs)
        name, out = op._opname, op(*args, **kwargs)
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = {x.untyped_storage()._cdata for x in tree_leaves(out) if isinstance(x, Tensor)}
        self.launches += op._schema.is_mutable or not made <= given  # a view launches nothing
        self.allocations += "empty" in name
        self.waits += name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        if name in ("index", "index_put", "index_put_"):
            self.waits += any(index is not None and index.dtype == torch.bool for index in args[1])
        return out


@contextmanager
def plain_torch(counted: PlainTorch | None = None) -> Iterator[PlainTorch]:
    """Count on the CPU as on a device, where lists of values are waited for, too."""
    counted, tolist = counted or PlainTorch(), Tensor.tolist

    def wait(x: Tensor) -> Any:
        counted.waits += 1
        return tolist(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "SCORES_PER_TILE", {})
        patch.setattr(values, "can_read_without_sync", lambda *_: False)
        patch.setattr(memo, "_writable", lambda *_: False)
        patch.setattr(Tensor, "tolist", wait)
        with counted:
            yield counted


def trained(sequences: int, tokens: int, **options: Any) -> tuple[int, int]:
    """Of a training step of the whole layer, forward and backward."""
    torch.manual_seed(0)
    conv, x = make_attention("sbm", 32, 16, 2, **options), torch.randn(sequences * tokens, 32, requires_grad=True)
    ptr = torch.arange(sequences + 1) * tokens
    with plain_torch() as counted:
        conv(x, ptr=ptr, seed=1).square().sum().backward()
    return counted.launches, counted.waits


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("window", "expected"), [(None, 8), (0, 9)])
def test_a_training_step_takes_few_operations_and_waits(window: int | None, expected: int, is_causal: bool) -> None:
    """Waits are for the offsets, five for the graph, for edges of the queries that the estimator takes, and for probes.

    With a window, one more is for its edges that were not drawn.
    """
    for sequences, tokens in ((1, 64), (4, 256)):
        launches, waits = trained(sequences, tokens, is_causal=is_causal, window=window)
        assert launches <= 525
        assert waits == expected


def test_nan_is_found_without_waiting_for_memberships() -> None:
    conv, x = SBMAttentionConv(32, 16, heads=2), torch.randn(20, 32)
    x[3, 4] = torch.nan
    with plain_torch(), pytest.raises(ValueError, match="Expected 'rate' and 'member' to be finite"):
        conv(x, seed=1)


def test_offsets_are_waited_for_once() -> None:
    """By the first layer of a model."""
    torch.manual_seed(0)
    layers, x, ptr = (
        [SBMAttentionConv(32, 16, heads=2) for _ in range(2)], torch.randn(96, 32), torch.tensor([0, 40, 96]),
    )  # fmt: skip
    counts = []
    with plain_torch() as counted:
        for layer in layers:
            x = layer(x, ptr=ptr, seed=1)
            counts.append(counted.waits)
        x.square().sum().backward()
    assert counts == [9, 17]
    assert counted.waits == 17


def test_a_training_step_over_blocks_waits_once_more() -> None:
    """For the number of blocks."""
    launches, waits = trained(4, 250, block_size=16, window=None)
    assert launches <= 655
    assert waits == 9


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("block_size", [1, 16])
def test_a_training_step_over_a_given_graph_waits_for_nothing(block_size: int, dropout: float) -> None:
    """So it can be captured as a CUDA graph."""
    conv, x = AttentionConv(32, 16, heads=2, dropout=dropout), torch.randn(250, 32, requires_grad=True)
    tokens = patterns.random(250 // block_size + (block_size > 1), 5, heads=2, seed=0)
    graph: AttentionGraph = (
        BlockGraph(tokens, block_size, query_ptr=torch.tensor([0, 250])) if block_size > 1 else tokens
    )
    with plain_torch() as counted:
        conv(x, graph, seed=1).square().sum().backward()
    assert counted.waits == 0


def test_sampling_says_why_it_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    checks.not_captured(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    checks.not_captured(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="known only once they are drawn"):
        checks.not_captured(torch.device("cuda"))


@pytest.mark.parametrize("tokens", [100, 4096])
def test_ranks_of_sixteen_million_pairs_take_one_tile(tokens: int) -> None:
    """Four of the waits, and half of the operations, are for a tile."""
    query, key = torch.randn(1, tokens, 2, 4), torch.randn(1, tokens, 4)
    ptr, count = torch.tensor([0, tokens]), torch.full((1, tokens), 5)
    with plain_torch() as counted:
        torch.ops.sbm_pyg.index_top_k(query, torch.ones(1, tokens, 2), key, ptr, ptr, count, 1 + torch.arange(tokens))
    assert counted.launches <= 110
    assert counted.waits == 8


def test_probes_take_one_wait() -> None:
    ptr = torch.arange(5) * 100
    with plain_torch() as counted:
        torch.ops.sbm_pyg.sample_systematic(torch.full((400,), 0.1), ptr, ptr, torch.arange(4), 3, 5, False)
    assert counted.launches <= 150
    assert counted.waits == 1


def test_the_root_of_entmax_is_found_without_waiting() -> None:
    """One wait is for the check of the offsets."""
    src, ptr = torch.randn(1, 200), torch.tensor([0, 50, 50, 200])
    with plain_torch() as counted:
        torch.ops.sbm_pyg.segment_entmax(src, ptr, torch.full((1, 3), 1.5))
    assert counted.waits == 1


def test_backward_passes_share_the_order_of_keys() -> None:
    rowptr, col = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1])
    first = segments.by_key(rowptr, col, 1, 2)
    assert [x.tolist() for x in first] == [[0, 1, 2], [0, 1, 3], [0, 0, 1]]
    assert segments.by_key(rowptr, col, 1, 2) is first
    col[0] = 1
    col[1] = 0
    assert [x.tolist() for x in segments.by_key(rowptr, col, 1, 2)] == [[1, 0, 2], [0, 1, 3], [0, 0, 1]]


def main() -> None:
    for is_causal in (False, True):
        print(f"a training step, {is_causal = }: {trained(4, 256, is_causal=is_causal)}")


if __name__ == "__main__":
    main()
