"""Queries, and probes at equal distances, in plain torch: ``sample_queries``, ``sample_systematic``, ``sample_probes``.

In and out: the tensors of these ops in :mod:`sbm_pyg.ops.schemas`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..random_words import SYSTEMATIC, philox, query_words, split_ids
from ..segments import allowed_keys, edge_row
from .sampling import check_keys


def sample_queries(query_ptr: Tensor, sequence_ids: Tensor, num_queries: int, part: float, seed: int) -> Tensor:
    """A random part of the queries, each independently with the same probability, ``[N]`` bool. Cost O(N).

    What is drawn for a sequence depends on its number and the seed alone.
    """
    shift = torch.stack([split_ids(sequence_ids)[0], query_ptr[:-1]])
    sequence_id, first = torch.repeat_interleave(shift, query_ptr.diff(), dim=1, output_size=num_queries)
    position = torch.arange(num_queries, device=query_ptr.device) - first
    return query_words(position, sequence_id, seed) < round(part * 2**32)


def cut_chance(chance: Tensor) -> Tensor:
    """Probabilities in float64, cut to [0, 1]; NaN counts as 0."""
    return chance.detach().double().nan_to_num(0.0).clamp(0, 1)


def sample_systematic(
    chance: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, heads: int, seed: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    r"""Each query takes keys of its sequence at equal distances from a random start, with equal probabilities.

    With this probability :math:`\eta_i`, cut to [0, 1], and one random :math:`u` per row, uniform in [0, 1), the keys
    are :math:`\lfloor (t + u) / \eta_i \rfloor` for t = 0, 1, ... Their number differs by less than one from
    :math:`\eta_i m`, with m the keys of the sequence, or those that are not later. Rows are independent; keys of a row
    are not. Random words are those of ``sample_sbm``. Cost O(N + E).

    Reference: Madow and Madow, "On the Theory of Systematic Sampling, I", Annals of Mathematical Statistics 1944.
    """
    chance = cut_chance(chance)
    queries = query_ptr.diff()
    batch = torch.repeat_interleave(queries, output_size=chance.numel())
    position = torch.arange(chance.numel(), device=chance.device) - query_ptr[batch]
    sequence_id, first_head = split_ids(sequence_ids[batch])
    head = first_head + torch.arange(heads, device=chance.device)[:, None] | SYSTEMATIC  # [H, N]
    start = (philox(0, position, sequence_id, head, seed)[0].double() / 2**32).flatten()  # [H*N]
    allowed = allowed_keys(query_ptr, key_ptr, chance.numel(), is_causal)
    spacing, shift, keys = (x.repeat(heads) for x in (1 / chance, key_ptr[batch], allowed))
    counts = (keys * chance.repeat(heads) - start).ceil().clamp(min=0).long()
    rowptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    num_keys, num_edges = torch.stack([key_ptr[-1], rowptr[-1]]).tolist()
    check_keys(num_keys)
    row = edge_row(rowptr, num_edges)
    number = torch.arange(num_edges, device=row.device) - rowptr[row]
    key = ((number + start[row]) * spacing[row]).long()
    return rowptr, (shift[row] + torch.minimum(key, keys[row] - 1)).int()


def sample_probes(
    query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, queries: Tensor | None, num_queries: int, heads: int,
    per_query: float, seed: int, is_causal: bool, *, sample: Callable[..., tuple[Tensor, Tensor]] = sample_systematic,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``sample_systematic`` of so many keys for each query of a mask ``[N]``, and their chance ``[N]`` float32."""
    allowed = allowed_keys(query_ptr, key_ptr, num_queries, is_causal).clamp(min=1)
    chance = (per_query / allowed.double()).clamp(max=1).float()
    chance = chance if queries is None else chance.masked_fill_(~queries, 0)
    return *sample(chance, query_ptr, key_ptr, sequence_ids, heads, seed, is_causal), chance
