"""The check of compressed rows in plain torch: the reference of ``invalid_row``.

In: rows, offsets of the sequences and heads. Out: the number of a row. Not here: shapes, types, and the first and last
offset, which :class:`sbm_pyg.AttentionGraph` checks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def invalid_row(rowptr: Tensor, col: Tensor, query_ptr: Tensor, key_ptr: Tensor, heads: int) -> Tensor:
    """The first row whose keys are not ascending, repeat, or leave the sequence of their query; -1 if there is none.

    A row whose offsets decrease or leave ``0 .. E`` is invalid too. Cost O(HN + E).
    """
    rows, num_edges = rowptr.numel() - 1, col.numel()
    number, starts, ends = torch.arange(rows, device=col.device), rowptr[:-1], rowptr[1:]
    wrong = (starts < 0) | (ends < starts) | (ends > num_edges)
    if num_edges:
        low, high = (
            torch.repeat_interleave(side, query_ptr.diff(), output_size=rows // heads).repeat(heads)
            for side in (key_ptr[:-1], key_ptr[1:])
        )
        first, last = starts.clamp(0, num_edges - 1), (ends - 1).clamp(0, num_edges - 1)
        # [E], among the edges up to this one
        descents = torch.cat([rowptr.new_zeros(1), (col[1:] <= col[:-1]).cumsum(0)])
        wrong |= (ends > starts) & ((col[first] < low) | (col[last] >= high) | (descents[last] > descents[first]))
    least = torch.where(wrong, number, rows).amin()
    return torch.where(least == rows, -1, least)
