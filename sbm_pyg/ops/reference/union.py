"""The union of the edges of two graphs, in plain torch: reference of :func:`sbm_pyg.ops.union_rows`.

In and out: the tensors of that function. Not here: whether both graphs are over the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .segments import edge_row


def union_rows(
    rowptr: Tensor, col: Tensor, other_rowptr: Tensor, other_col: Tensor, num_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    pairs, other_pairs = (
        edge_row(ptr, keys.numel()).mul_(num_keys).add_(keys)
        for ptr, keys in ((rowptr, col), (other_rowptr, other_col))
    )  # numbers of pairs, ascending
    position = torch.searchsorted(pairs, other_pairs)
    is_new = torch.cat([pairs, pairs.new_full((1,), -1)])[position] != other_pairs
    new_before = torch.nn.functional.pad(is_new.cumsum(0), (1, 0))
    slot = position + new_before[:-1]  # in the union, of each edge of the other graph
    new = is_new.nonzero()[:, 0]
    size, new_slot = pairs.numel() + new.numel(), slot[new]
    from_other, from_other_alone = (
        torch.zeros(size, dtype=torch.bool, device=col.device).index_fill_(0, slots, True) for slots in (slot, new_slot)
    )
    dtype = torch.promote_types(col.dtype, other_col.dtype)
    union = col.new_empty(size, dtype=dtype).masked_scatter(~from_other_alone, col.to(dtype))
    union = union.index_copy(0, new_slot, other_col[new].to(dtype))
    return rowptr + new_before[other_rowptr], union, from_other
