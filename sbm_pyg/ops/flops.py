"""Floating point operations of each op, for the counter of torch.

That counter, ``torch.utils.flop_counter.FlopCounterMode``, knows torch's own ops alone. In: the arguments of an op, by
their names in its schema. Out: floating point operations, for each op of the same name. Not here: time and memory.

The conventions are torch's: a multiplication and its addition are 2; exponentials, comparisons, random words, and what
is done once per token or once per edge without a sum over channels, are 0 (so ``segment_entmax`` is 0, as softmax is).
Attention over a full graph therefore counts as much as the matrix products of dense attention do, forward and backward.
E counts the edges of the given graph.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from .reference import sampling as reference_sampling
from .reference import segments as reference_segments

__all__ = [
    "block_attention", "block_attention_backward", "block_effect", "block_weight", "edge_attention",
    "edge_attention_backward", "edge_cross_entropy", "edge_dot", "edge_dot_backward", "edge_effect", "effect_gradients",
    "index_score", "index_score_backward", "index_top_k", "reach_dot", "reach_dot_backward", "sample_sbm",
    "scale_to_density", "scale_to_density_backward",
]  # fmt: skip


def formula_of(name: str, declared: Signature) -> Callable[..., int]:
    """The formula of an op, as the counter of torch calls it: with the arguments of the op, and with its result."""

    def count(*given: Any, out_val: Any = None, **named: Any) -> int:
        bound = declared.bind(*given, **named)
        bound.apply_defaults()
        return globals()[name](SimpleNamespace(**bound.arguments, out_val=out_val))

    return count


def edge_dot(of: Any) -> int:
    """2 E K."""
    return 2 * of.col.numel() * of.query.size(-1)


def edge_dot_backward(of: Any) -> int:
    """2 E K for each side that needs its gradient."""
    return edge_dot(of) * (of.need_query + of.need_key)


def edge_cross_entropy(of: Any) -> int:
    """2 E C: the scores of attention."""
    return edge_dot(of)


def index_score(of: Any) -> int:
    """2 E S D."""
    return 2 * of.col.numel() * of.query.size(-2) * of.query.size(-1)


def index_score_backward(of: Any) -> int:
    """6 E S D: products again, gradients to queries and keys."""
    return 3 * index_score(of)


def index_top_k(of: Any) -> int:
    """2 S D for each pair that a query may attend to, S being 1 without weights.

    Without values to read it counts the pairs that are chosen.
    """
    heads, num_queries, small, channels = of.query.shape
    small = small if of.weight is not None else 1
    if is_fake(of.query) or of.query.is_meta:
        return 2 * small * channels * of.out_val[1].numel()
    allowed = reference_segments.allowed_keys(of.query_ptr, of.key_ptr, num_queries, of.is_causal)
    return 2 * small * channels * heads * int(allowed.sum())


def reach_dot(of: Any) -> int:
    """2 H N K; sums over tokens alone are 0."""
    return 2 * of.query.numel()


def reach_dot_backward(of: Any) -> int:
    """2 H N K for each side that needs its gradient."""
    return reach_dot(of) * (of.need_query + of.need_key)


def scale_to_density(of: Any) -> int:
    """2 H N K, for the expected numbers of keys."""
    return 2 * of.rate.numel()


def scale_to_density_backward(of: Any) -> int:
    """2 H N K for the factors, and for each side that needs its gradient."""
    return scale_to_density(of) * (1 + of.need_rate + of.need_member)


def edge_attention(of: Any) -> int:
    """2 E (C + C'): scores, and the sum of values."""
    return 2 * of.col.numel() * (of.query.size(-1) + of.value.size(-1))


def edge_attention_backward(of: Any) -> int:
    """2 E (3 C + 2 C'): scores again, gradients to queries and keys; gains, gradients to values."""
    return 2 * of.col.numel() * (3 * of.query.size(-1) + 2 * of.value.size(-1))


def block_attention(of: Any) -> int:
    """2 E block_size^2 (C + C'): all tokens of two blocks, and slots without a token."""
    return of.block_size**2 * edge_attention(of)


def block_attention_backward(of: Any) -> int:
    """2 E block_size^2 (3 C + 2 C')."""
    return of.block_size**2 * edge_attention_backward(of)


def block_effect(of: Any) -> int:
    """2 (E + E') block_size (block_size (C + C') + C'): attention of each pair of blocks, and the gains of its rows."""
    each = of.block_size * (of.query.size(-1) + of.value.size(-1)) + of.value.size(-1)
    return 2 * (of.col.numel() + of.probe_col.numel()) * of.block_size * each


def block_weight(of: Any) -> int:
    """2 E block_size^2 C."""
    return of.block_size**2 * edge_dot(of)


def edge_effect(of: Any) -> int:
    """2 (E + E') (C + C'): score and gain of each edge and each probe; with factors 2 (E + E') K more."""
    width = of.query.size(-1) + of.value.size(-1) + (0 if of.rate is None else of.rate.size(-1))
    return 2 * (of.col.numel() + of.probe_col.numel()) * width


def effect_gradients(of: Any) -> int:
    """That of ``edge_effect``, and 2 (E + E') K for each side that needs its gradient."""
    pairs = of.col.numel() + of.probe_col.numel()
    return edge_effect(of) + 2 * pairs * of.rate.size(-1) * (of.need_rate + of.need_member)


def sample_sbm(of: Any) -> int:
    """2 K for each pair whose probability is computed, and 4 H N K for the plan of the rows.

    The plan needs expected degrees and bounds. It tells, before anything is drawn, for how many pairs a probability is
    computed: all keys of rows by pairs, else the expected number of proposals (none with ``"fastrg"``, which
    takes proposals as they come). Where there are no values to plan by (fake tensors), or rows share draws, only the
    edges count, which is the least it can be.
    """
    rate, member, query_ptr, key_ptr, exploration = of.rate, of.member, of.query_ptr, of.key_ptr, of.exploration
    heads, num_queries, blocks = rate.shape
    if is_fake(rate) or rate.is_meta or of.row_group > 1:
        return 2 * blocks * (2 * heads * num_queries + of.out_val[1].numel())
    pairs = 0.0
    allowed = reference_segments.allowed_keys(query_ptr, key_ptr, num_queries, of.is_causal)
    offsets = zip(query_ptr.tolist(), query_ptr.tolist()[1:], key_ptr.tolist(), key_ptr.tolist()[1:], strict=False)
    for start, end, first, last in offsets:
        rates, members = rate[:, start:end].detach().double(), member[:, first:last].detach().double()
        keys = allowed[start:end]
        bound = (rates * members.cummax(1).values[:, keys - 1]).sum(-1) + exploration
        expected = (rates * members.cumsum(1)[:, keys - 1]).sum(-1) + exploration * keys
        plan = reference_sampling.plan_rows(expected, bound, keys, of.method)
        proposals = torch.zeros_like(expected) if of.method == "fastrg" else plan.proposals
        tried = torch.where(plan.way == reference_sampling.GAPS, plan.landings, proposals)
        pairs += float(torch.where(plan.way == reference_sampling.PAIRS, keys.double(), tried).sum())
    return 2 * blocks * (2 * heads * num_queries + round(pairs))
