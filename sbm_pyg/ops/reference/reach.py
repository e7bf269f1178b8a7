"""Products of queries with sums over the keys that they may attend to, in plain torch.

In and out: the tensors of ``reach_dot`` in :mod:`sbm_pyg.ops.schemas`, and of its backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..segments import segments, upcast


def _reach_sums(x: Tensor, ptr: Tensor, other_ptr: Tensor, lag: int | None, end: int) -> Tensor:
    """Sum of the allowed tokens of its sequence for each token of the other side, ``[H, end, K]`` in float32 or better.

    With a ``lag``, of those at places before its own plus ``lag`` alone, in float64.
    """
    batch = torch.repeat_interleave(other_ptr.diff(), output_size=end)
    if lag is None:
        return segments(upcast(x).transpose(0, 1), ptr).transpose(0, 1)[:, batch]
    position = torch.arange(end, device=ptr.device) - other_ptr[batch] + lag
    before = torch.nn.functional.pad(x.double().cumsum(1), (0, 0, 1, 0))
    first = ptr[batch]
    return before[:, first + torch.minimum(position, ptr.diff()[batch])] - before[:, first]


def reach_dot(
    query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, is_causal: bool, is_strict: bool
) -> Tensor:
    """Dot product of each query with the sum of the keys that it may attend to, ``[H, N]`` in float32 or better.

    It is the sum of ``edge_dot`` over all allowed pairs: for a block model, the expected number of edges of each row.
    With ``is_causal``, later keys are left out; with ``is_strict`` the key at the position of the query, too. Cost
    O((N + M) K).
    """
    total = _reach_sums(key, key_ptr, query_ptr, 1 - is_strict if is_causal else None, query.size(1))
    return (upcast(query) * total.to(upcast(query).dtype)).sum(-1)


def reach_dot_backward(
    grad: Tensor, query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, is_causal: bool, is_strict: bool,
    need_query: bool, need_key: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    d_query, d_key, weight = query.new_empty(0, 0, 0), key.new_empty(0, 0, 0), upcast(grad)[..., None]
    if need_query:
        lag = 1 - is_strict if is_causal else None
        d_query = (weight * _reach_sums(key, key_ptr, query_ptr, lag, query.size(1))).to(query.dtype)
    if need_key:  # all queries of the sequence, less those before
        terms = weight.double() * query if is_causal else weight * query
        d_key = _reach_sums(terms, query_ptr, key_ptr, None, key.size(1))
        if is_causal:
            d_key = d_key - _reach_sums(terms, query_ptr, key_ptr, int(is_strict), key.size(1))
        d_key = d_key.to(key.dtype)
    return d_query, d_key
