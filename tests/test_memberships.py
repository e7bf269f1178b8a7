"""Rows of the last tokens from kept memberships: they are those of the sampled graph of the whole sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sbm_pyg import SBM, patterns, sample_edges
from sbm_pyg.ops import cpu

if not cpu.INSTALLED:
    pytest.skip("kernels need numba", allow_module_level=True)
from sbm_pyg.ops.cpu.memberships import KeyMemberships


def rows_of_graph(sbm: SBM, number: int, count: int, window: int | None, num_sinks: int, **how: Any) -> list[Tensor]:
    """Keys of the last queries of each head of one sequence, by its number in the batch."""
    graph = sample_edges(sbm, clamp=True, sequence_ids=torch.tensor([number]), **how)
    if window is not None or num_sinks:
        size, heads = sbm.num_keys, sbm.heads
        if window is not None:
            graph = graph | patterns.window(size, window, heads=heads, is_causal=True)
        sinks = torch.ones(size, size).tril()
        sinks[:, num_sinks:] = 0
        graph = graph | type(graph).from_dense(sinks.expand(heads, -1, -1).bool()).causal()
    keys = graph.to_dense()[:, sbm.num_queries - count :]  # [H, count, M]
    return [row.nonzero()[:, 0] for row in keys.flatten(0, 1)]


@settings(max_examples=60, deadline=None)
@given(
    length=st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 300, 700]), blocks=st.sampled_from([1, 3, 4, 16, 64, 70]),
    sharpness=st.sampled_from([0.0, 1.0, 8.0, 60.0]), scale=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    padding=st.integers(0, 40), row_group=st.sampled_from([2, 5, 16, 40]), window=st.sampled_from([None, 0, 3, 1000]),
    num_sinks=st.sampled_from([0, 2, 50]), count=st.integers(1, 40), seed=st.integers(-(2**63), 2**63 - 1),
)  # fmt: skip
def test_rows_are_those_of_the_sampled_graph(
    length: int, blocks: int, sharpness: float, scale: float, padding: int, row_group: int, window: int | None,
    num_sinks: int, count: int, seed: int,
) -> None:  # fmt: skip
    """Of two sequences, of which the first is padded at the left; keys arrive in three parts."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    heads, lengths = 2, (length, length + padding)
    count = min(count, length)
    rates, members, expected = [], [], []
    for number, size in enumerate(lengths):
        rate = (sharpness * torch.randn(heads, size, blocks, generator=generator)).softmax(-1) * scale
        member = torch.randn(heads, size, blocks, generator=generator).mul(3).sigmoid()
        sbm = SBM(rate, member, is_causal=True)
        expected += rows_of_graph(sbm, number, count, window, num_sinks, seed=seed, row_group=row_group)
        rates.append(rate[:, -count:])
        members.append(torch.cat([torch.rand(heads, lengths[1] - size, blocks), member], 1))
    member = torch.stack(members)  # [B, H, S, K]
    kept = KeyMemberships(2, heads, blocks)
    for part in member.split(-(-lengths[1] // 3), 2):
        kept.append(part.transpose(0, 1).flatten(1, 2))
    places = np.broadcast_to(np.arange(lengths[1] - count, lengths[1]), (2, count))
    starts = np.array([padding, 0])
    for _ in range(2):  # with random words that are drawn, and with those that are kept
        rowptr, col = kept.draw(torch.stack(rates), starts, places, seed, row_group, window, num_sinks)
        for row, keys in enumerate(expected):
            got = col[rowptr[row] : rowptr[row + 1]] - starts[row // (heads * count)]
            assert got.tolist() == keys.tolist()
