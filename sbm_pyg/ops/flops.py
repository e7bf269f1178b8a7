"""Floating point operations of each op, for the counter of torch.

That counter, ``torch.utils.flop_counter.FlopCounterMode``, knows torch's own ops alone. In: the arguments of an op, by
their names in its schema, and its result as ``out_val``. Out: floating point operations. Not here: time and memory.

The conventions are torch's: a multiplication and its addition are 2; exponentials, comparisons, random words, and what
is done once per token or once per edge without a sum over channels, are 0 (so ``segment_entmax`` is 0, as softmax is).
Attention over a full graph therefore counts as much as the matrix products of dense attention do, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from . import segments as reference_segments
from .reference import sampling as reference_sampling

__all__ = ["FORMULAS", "formula_of"]


def formula_of(name: str, declared: Signature) -> Callable[..., int]:
    """The formula of an op, as the counter of torch calls it: with the arguments of the op, and with its result."""

    def count(*arguments: Any, out_val: Any = None, **options: Any) -> int:
        bound = declared.bind(*arguments, **options)
        bound.apply_defaults()
        return FORMULAS[name](SimpleNamespace(**bound.arguments, out_val=out_val))

    return count


def _effects(of: Any) -> int:
    """Operations for the score and the gain of each edge and probe, and for its probability if factors are passed."""
    width = of.query.size(-1) + of.value.size(-1) + (0 if of.rate is None else of.rate.size(-1))
    return 2 * (of.col.numel() + of.probe_col.numel()) * width


def _all_scores(of: Any) -> int:
    """Operations of the scores of all allowed pairs; of the chosen pairs, if fake tensors hide the offsets."""
    heads, _, small, channels = of.query.shape
    pairs = of.out_val[1].numel() if is_fake(of.query) or of.query.is_meta else heads * int(of.allowed.sum())
    return 2 * (1 if of.weight is None else small) * channels * pairs


def _sampling(of: Any) -> int:
    """2 K for each pair whose probability is computed, and 4 H N K for the plan of the rows.

    The plan tells, before anything is drawn, for how many pairs that is: all keys of rows by pairs, else the expected
    number of candidates (none with ``"fastrg"``, which takes proposals as they come). Where there are no values to plan
    by (fake tensors), or rows share draws, only the edges count, which is the least it can be.
    """
    heads, num_queries, clusters = of.rate.shape
    if is_fake(of.rate) or of.rate.is_meta or of.row_group > 1:
        return 2 * clusters * (2 * heads * num_queries + of.out_val[1].numel())
    pairs, allowed = 0.0, reference_segments.allowed_keys(of.query_ptr, of.key_ptr, num_queries, of.is_causal)
    ends = (ptr[part].tolist() for ptr in (of.query_ptr, of.key_ptr) for part in (slice(-1), slice(1, None)))
    for start, end, first, last in zip(*ends, strict=True):
        keys, rates = allowed[start:end], of.rate[:, start:end].detach().double()
        members = of.member[:, first:last].detach().double()
        bound = (rates * members.cummax(1).values[:, keys - 1]).sum(-1) + of.exploration
        expected = (rates * members.cumsum(1)[:, keys - 1]).sum(-1) + of.exploration * keys
        plan = reference_sampling.plan_rows(expected, bound, keys, of.method)
        proposals = torch.zeros_like(expected) if of.method == "fastrg" else plan.proposals
        candidates = torch.where(plan.way == reference_sampling.GAPS, plan.landings, proposals)
        pairs += float(torch.where(plan.way == reference_sampling.PAIRS, keys.double(), candidates).sum())
    return 2 * clusters * (2 * heads * num_queries + round(pairs))


def _over_graph(of: Any, tokens: int, features: int) -> int:
    """Operations for so many products of an edge with its key and its value, and so many with its features."""
    width = tokens * (of.query.size(-1) + of.value.size(-1))
    width += 0 if of.feature is None else features * of.feature.size(-1)
    return 2 * of.col.numel() * of.query.size(1) * width


FORMULAS: dict[str, Callable[[Any], int]] = {
    "edge_dot": lambda of: 2 * of.col.numel() * of.query.size(-1),
    "edge_dot_backward": lambda of: FORMULAS["edge_dot"](of) * (of.need_query + of.need_key),
    "edge_cross_entropy": lambda of: FORMULAS["edge_dot"](of),
    "edge_attention": lambda of: 2 * of.col.numel() * (of.query.size(-1) + of.value.size(-1)),
    "edge_attention_backward": lambda of: 2 * of.col.numel() * (3 * of.query.size(-1) + 2 * of.value.size(-1)),
    "edge_effect": _effects,
    "effect_gradients": lambda of: _effects(of)
    + 2 * (of.col.numel() + of.probe_col.numel()) * of.rate.size(-1) * (of.need_rate + of.need_member),
    "block_attention": lambda of: of.block_size**2 * FORMULAS["edge_attention"](of),
    "block_attention_backward": lambda of: of.block_size**2 * FORMULAS["edge_attention_backward"](of),
    "block_effect": lambda of: 2 * (of.col.numel() + of.probe_col.numel()) * of.block_size
    * (of.block_size * (of.query.size(-1) + of.value.size(-1)) + of.value.size(-1)),
    "block_weight": lambda of: of.block_size**2 * FORMULAS["edge_dot"](of),
    "graph_attention": lambda of: _over_graph(of, 1, 2),
    "graph_attention_backward": lambda of: _over_graph(of, 2, 2 + 2 * of.need_feature),
    "index_score": lambda of: 2 * of.col.numel() * of.query.size(-2) * of.query.size(-1),
    "index_score_backward": lambda of: 3 * FORMULAS["index_score"](of),
    "index_top_k": _all_scores,
    "reach_dot": lambda of: 2 * of.query.numel(),
    "reach_dot_backward": lambda of: 2 * of.query.numel() * (of.need_query + of.need_key),
    "scale_to_density": lambda of: 2 * of.rate.numel(),
    "scale_to_density_backward": lambda of: 2 * of.rate.numel() * (1 + of.need_rate + of.need_member),
    "sample_sbm": _sampling,
}  # fmt: skip
"""The floating point operations of each op that has a product over channels or clusters."""
