"""Graphs of a stochastic block model in plain torch, row by row: what ``sample_sbm`` means.

In and out: the tensors of :func:`sbm_pyg.ops.sample_sbm`. Not here: checks of the arguments, attention, and speed. A
row takes about a millisecond. Kernels draw the same edges, so this code runs in tests, and on a CPU without numba.

A row holds the keys of one query in one head. Its edges are drawn in one of three ways, which all have the same law:

* ``PROPOSALS`` draws a Poisson number of candidates: a block by the edges expected from it, and a key by its membership
  in that block. Repeated candidates are dropped. The others are kept with the probability that makes the law exact.
* ``GAPS`` jumps from candidate to candidate by geometric gaps, as if each probability were the largest of the row, and
  keeps a candidate with the quotient of its own probability and the largest.
* ``PAIRS`` makes one Bernoulli draw for each key.

:func:`plan_rows` chooses the cheapest way for each row. Queries of a group may share their draws instead:
:func:`_sample_groups` compares each pair with one random word.

Shapes: N queries, M keys, E edges, H heads, K blocks, B sequences; m keys that a row may attend to.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..random_words import (
    BERNOULLI_BYTE,
    BERNOULLI_REST,
    GAP,
    PROPOSAL,
    PROPOSAL_COUNT,
    philox,
    shared_words,
    split_ids,
)

PROPOSALS, GAPS, PAIRS = range(3)
"""The ways to draw a row."""
PROPOSAL_COST, GAP_COST = 64.0, 11.0
"""Cost of one candidate by the first two ways, in Bernoulli draws. The costs decide which way a row takes."""
MAX_PROB = 1 + 1e-5
"""Probabilities up to this count as 1 that was rounded."""
KEYS_PER_PANEL = 64
"""Keys that lie together in the tables of kernels. Each sequence begins in a panel of its own."""
PAIRS_AT_ONCE = 2**22
"""Pairs that are compared with their words at a time, about, where queries share draws."""


class Law(NamedTuple):
    """Options of the distribution."""

    seed: Any
    is_fastrg: bool
    exploration: float
    clamp: bool


def sample_sbm(
    rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, seed: int, method: str,
    exploration: float, clamp: bool, is_causal: bool, row_group: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draw one row after the other, or groups of rows that share their draws."""
    rows, num_keys = rate.size(0) * rate.size(1), member.size(1)
    dtype = torch.int32 if num_keys < 2**31 else torch.int64
    if not rows * num_keys:
        return query_ptr.new_zeros(rows + 1), query_ptr.new_empty(0, dtype=dtype)
    law = Law(seed, method == "fastrg", exploration, clamp)
    arguments = (rate.detach(), member.detach(), query_ptr, key_ptr, sequence_ids, law, is_causal)
    edges = _sample_rows(*arguments) if row_group == 1 else _sample_groups(*arguments, row_group)
    starts = torch.arange(0, rows * num_keys + 1, num_keys, device=edges.device)
    return torch.searchsorted(edges, starts), (edges % num_keys).to(dtype)


# ------------------------------------------------------------------ the way of a row


class Plan(NamedTuple):
    """The method by which each row is drawn, and the expected number of candidates of each method."""

    way: Tensor
    """The cheapest of the three."""
    stretch: Tensor
    """Factor of the Poisson rates."""
    slope: Tensor
    """``log(1 - bound)``, by which exponential random numbers are divided to get gaps between candidates."""
    proposals: Tensor
    """Expected number of proposals."""
    landings: Tensor
    """Expected number of candidates by gaps."""


def plan_rows(expected: Tensor, bound: Tensor, num_keys: Tensor | int, method: str) -> Plan:
    """Choose how each row is drawn.

    With ``bound`` >= every probability of the row, rates ``c p`` with ``c = -log(1 - bound) / bound`` propose every
    pair often enough for thinning to reach p exactly. All numbers are float64, so that every backend decides alike.

    Args:
        expected: Expected number of edges of each row, float64.
        bound: Bound on the probabilities of each row, float64.
        num_keys: Number of keys that the row may attend to.
        method: ``"bernoulli"`` or ``"fastrg"``.
    """
    minus, landings = -bound, bound * num_keys
    slope = torch.log1p(minus.clamp(min=1e-12 - 1))
    if method == "fastrg":
        way = torch.where(expected * PROPOSAL_COST < num_keys, PROPOSALS, PAIRS)
        return Plan(way, torch.ones_like(bound), slope, expected, landings)
    stretch = (slope / minus).nan_to_num(1.0)  # 1 where the bound is 0
    proposals = expected * stretch
    pairs = torch.where(bound <= 1 - 1e-12, num_keys, 0)
    costs = torch.stack([pairs, landings * GAP_COST, proposals * PROPOSAL_COST])
    way = PAIRS - costs.min(0).indices  # ten times as fast as `argmin`
    return Plan(way, stretch, slope, proposals, landings)


# ------------------------------------------------------------------ one row after the other


def _sample_rows(
    rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, law: Law, is_causal: bool
) -> Tensor:
    """Draw each row from its own rates, the keys that it may attend to, and its own random words.

    Exploration is one block more, of which each key is a member. Returns the numbers of all edges, ``row * M + key``,
    ascending. It costs O(H N M K), and a row by proposals O(M) for each candidate.
    """
    (heads, num_queries, _), num_keys = rate.shape, member.size(1)
    rate = torch.nn.functional.pad(rate.double(), (0, 1), value=law.exploration)  # [H, N, K+1]
    member = torch.nn.functional.pad(member.double(), (0, 1), value=1.0)  # [H, M, K+1]
    ids, first_heads = (x.tolist() for x in split_ids(sequence_ids))
    query_starts, key_starts, edges = query_ptr.tolist(), key_ptr.tolist(), [query_ptr.new_empty(0)]
    for head in range(heads):
        for sequence, (sequence_id, first_head) in enumerate(zip(ids, first_heads, strict=True)):
            first, last = key_starts[sequence : sequence + 2]
            for query in range(query_starts[sequence], query_starts[sequence + 1]):
                position = query - query_starts[sequence]
                allowed = min(position + 1, last - first) if is_causal else last - first
                if allowed:
                    # Draw the row from its own rates, keys and random words.
                    stream = _Stream(position, sequence_id, head + first_head, law.seed)
                    keys = _draw_row(rate[head, query], member[head, first : first + allowed], law, stream)
                    edges.append((head * num_queries + query) * num_keys + first + keys)
    return torch.cat(edges)


class _Stream(NamedTuple):
    """The random words of one row."""

    position: int
    sequence_id: int
    head: int
    seed: Any

    def words(self, purpose: int, number: Tensor) -> tuple[Tensor, ...]:
        """Four random words for each ``number``, ``[n]`` int64 each."""
        return philox(number, self.position, self.sequence_id, self.head | purpose, self.seed)


def _draw_row(rate: Tensor, member: Tensor, law: Law, stream: _Stream) -> Tensor:
    """Draw the keys of one row, ascending.

    Args:
        rate: Rates of the query, ``[K+1]`` float64.
        member: Memberships of the keys that it may attend to, ``[m, K+1]`` float64.
        law: Options of the distribution.
        stream: Random words of the row.
    """
    # Sum up the expected edges by block, and bound the probabilities.
    sums = member.cumsum(0)  # [m, K+1]
    mass = rate * sums[-1]  # [K+1], expected edges by block
    bound = (rate * member.amax(0)).sum()
    check_expected(mass.sum())
    # Take the cheapest way.
    plan = plan_rows(mass.sum(), bound, len(member), "fastrg" if law.is_fastrg else "bernoulli")
    if plan.way == PAIRS:
        return _draw_pairs(member @ rate, law, stream)
    if plan.way == GAPS:
        key, uniform = _draw_gaps(len(member), plan, stream)
        return key[uniform * bound < member[key] @ rate]
    key, uniform = _draw_proposals(mass, sums, plan, stream)
    # Of equal candidates the first one counts; thin the others to the exact probability.
    key, order = key.sort(stable=True)
    keep = key.diff(prepend=key.new_tensor([-1])) > 0
    if not law.is_fastrg:
        p = member[key] @ rate
        keep &= uniform[order] * -torch.expm1(-plan.stretch * p) < p
    return key[keep]


def _draw_pairs(p: Tensor, law: Law, stream: _Stream) -> Tensor:
    """Make one Bernoulli draw for each key, by its probability ``p``, ``[m]``."""
    if law.is_fastrg:
        p = -torch.expm1(-p)
    elif not law.clamp and float(p.max()) > MAX_PROB + law.exploration:
        raise ValueError(probability_error(float(p.max()) - law.exploration))
    threshold = (p.clamp(max=1) * 2.0**32).long()
    position = threshold.new_tensor(stream.position)
    return bernoulli_draws(threshold, position, stream.sequence_id, stream.head, stream.seed).nonzero()[:, 0]


def _draw_gaps(num_keys: int, plan: Plan, stream: _Stream) -> tuple[Tensor, Tensor]:
    """Draw each key as a candidate with probability ``bound``; return candidates, ascending, and uniform numbers.

    The number of keys between two candidates is geometric: ``log(u) / log(1 - bound)`` of a uniform u, rounded down.
    """
    number = torch.arange(num_keys, device=plan.slope.device)
    words = stream.words(GAP, number)
    gap = ((_in_unit(words) + 2.0**-53).log() * plan.slope.reciprocal()).fmin(plan.slope.new_tensor(num_keys)).long()
    key = number + gap.cumsum(0)
    exists = key < num_keys
    return key[exists], words[2][exists].double() * 2.0**-32


def _draw_proposals(mass: Tensor, sums: Tensor, plan: Plan, stream: _Stream) -> tuple[Tensor, Tensor]:
    """Draw a Poisson number of candidates, in the order of their words, and a uniform number for each.

    A candidate is a block, drawn by its ``mass``, ``[K+1]``, and a key, drawn by its membership in that block. The key
    is the first one whose running sum, of ``sums``, ``[m, K+1]``, exceeds a uniform share of the last.
    """
    # Draw the number of candidates, in parts of at most 256.
    rate, (num_keys, blocks) = float(plan.proposals), sums.shape
    parts = torch.arange(math.ceil(rate / 256), device=sums.device)  # exp(-256) is a normal number
    uniforms = _in_unit(stream.words(PROPOSAL_COUNT, parts)).tolist()
    count = sum(_invert_poisson(rate / len(uniforms), uniform) for uniform in uniforms)
    words = stream.words(PROPOSAL, torch.arange(count, device=sums.device))
    unit = [word.double() * 2.0**-32 for word in words]
    # Draw the block of each candidate by inversion.
    share = mass.cumsum(0) / mass.sum()
    block = (share[:, None] < unit[0] + 2.0**-32).sum(0).clamp(max=blocks - 1)
    # Draw its key by inversion of the running sums of the block.
    target = (unit[1] + 2.0**-33) * sums[-1, block]
    key = (sums[:, block] <= target).sum(0).clamp(max=num_keys - 1)
    return torch.where(block < blocks - 1, key, words[1] * num_keys >> 32), unit[2]


def _in_unit(words: tuple[Tensor, ...]) -> Tensor:
    """Uniform numbers in [0, 1), float64 with 53 random bits, from the first two of four words."""
    high, low = words[:2]
    return ((high << 21) + (low >> 11)).double() * 2.0**-53


def _invert_poisson(rate: float, uniform: float) -> int:
    """Draw a Poisson number by inversion of its distribution function."""
    count, term = 0, math.exp(-rate)
    left = uniform - term
    while left >= 0 and term > 0:
        count += 1
        term *= rate / count
        left -= term
    return count


def bernoulli_draws(
    threshold: Tensor, position: Tensor, sequence_id: Tensor | int, head: Tensor | int, seed: int
) -> Tensor:
    """Bernoulli draws of pairs: whether the random word of each pair is less than a threshold, ``[..., m]`` bool.

    The first byte of the word of key j is byte ``j % 4`` of word ``j // 64 % 4`` of counter ``16 (j // 256) + j // 4 %
    16``, an order in which sixteen counters at a time are written in a row. The other 24 bits come from a counter of
    their own. So a byte is drawn for every pair, and the rest only for the one pair in 256 whose byte does not decide.

    Args:
        threshold: ``[..., m]`` int64 in ``0 .. 2**32``.
        position: Position of the query in its sequence, ``[...]``.
        sequence_id, head: Of the query, ``[...]`` or a number for all. As in :func:`.random_words.split_ids`.
        seed: 64 bits.
    """
    query = [
        torch.as_tensor(x, device=threshold.device).expand(threshold.shape[:-1]) for x in (position, sequence_id, head)
    ]
    query[1], first_head = split_ids(query[1])
    query[2] = query[2] + first_head
    num_keys = threshold.size(-1)
    # Draw the first byte of each word, and bring bytes into the order of keys.
    number = torch.arange(16 * ((num_keys + 255) // 256), device=threshold.device)
    i, sequence_id, head = (x[..., None] for x in query)
    words = torch.stack(philox(number, i, sequence_id, head | BERNOULLI_BYTE, seed), dim=-2)
    words = words.unflatten(-1, (-1, 16)).transpose(-3, -2)[..., None]  # [..., m / 256, 4, 16, 1]
    byte = torch.cat([words & 255, *(words >> 8 * part & 255 for part in (1, 2, 3))], dim=-1).flatten(-4)
    byte = byte[..., :num_keys].to(torch.int16)
    # Compare bytes with those of the thresholds.
    first = (threshold >> 24).to(torch.int16)
    is_below, is_open = byte < first, byte == first
    # Draw the other 24 bits where the bytes are equal.
    j = is_open.nonzero()[:, -1]
    i, sequence_id, head = (x[..., None].expand_as(is_open)[is_open] for x in query)
    words = torch.stack(philox(j >> 2, i, sequence_id, head | BERNOULLI_REST, seed), dim=-1)
    low_bits = words[torch.arange(len(j), device=j.device), j % 4] >> 8
    is_below[is_open] = low_bits < threshold[is_open] & 0xFFFFFF
    return is_below


# ------------------------------------------------------------------ rows that share their draws


def _sample_groups(
    rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, law: Law, is_causal: bool,
    row_group: int,
) -> Tensor:  # fmt: skip
    """Numbers of all edges, ascending: the pairs whose group and key have a word below p 2^32.

    A group is ``row_group`` consecutive queries of a sequence, by position. This is all that shared draws mean. Kernels
    skip pairs in ways of their own, which cannot change the graph. Cost O(N M K).
    """
    (heads, num_queries, _), num_keys = rate.shape, member.size(1)
    head = torch.arange(heads, device=rate.device)[:, None, None]
    ids, first_heads = (x.tolist() for x in split_ids(sequence_ids))
    ends, edges = [(ptr[:-1].tolist(), ptr[1:].tolist()) for ptr in (query_ptr, key_ptr)], [query_ptr.new_empty(0)]
    for begin, end, first, last, sequence_id, first_head in zip(*ends[0], *ends[1], ids, first_heads, strict=True):
        key = torch.arange(last - first, device=rate.device)
        # Take some queries at a time, about `PAIRS_AT_ONCE` pairs.
        step = max(1, PAIRS_AT_ONCE // (heads * max(1, len(key))))
        for start in range(0, end - begin, step):
            position = torch.arange(start, min(start + step, end - begin), device=rate.device)[:, None]
            # Compute the probabilities of all pairs of these queries.
            p = rate[:, begin + position[:, 0]].double() @ member[:, first:last].double().mT + law.exploration
            p = p.masked_fill(key > position, 0) if is_causal else p  # [H, n, m]
            check_expected(p.sum(2))
            if not law.clamp and p.numel() and float(p.amax()) > MAX_PROB + law.exploration:
                raise ValueError(probability_error(float(p.amax()) - law.exploration))
            # Compare them with the words of their groups and keys.
            words = shared_words(position // row_group, key, sequence_id, head + first_head, law.seed)  # [H, n, m]
            is_edge = words < (p.clamp(max=1) * 2.0**32).long()
            edges.append((((head * num_queries + begin + position) * num_keys) + first + key)[is_edge])
    return torch.cat(edges).sort().values


# ------------------------------------------------------------------ errors


def check_expected(expected: Tensor) -> None:
    """Refuse rates whose expected number of edges is NaN or infinite."""
    if not bool(expected.isfinite().all()):
        raise ValueError(
            "Expected 'rate' and 'member' to be finite (got NaN or infinity as the expected number of edges of a row). "
            "Look for NaN in the queries and keys that they are made from."
        )


def probability_error(p: float) -> str:
    """Message for a block model with an edge probability above 1."""
    return (
        f"Expected edge probabilities in [0, 1] (got {p:.4g}). "
        "Scale the memberships or the block matrix, or pass clamp=True to cut probabilities at 1."
    )


def check_keys(num_keys: int) -> None:
    """Raise ValueError if ``col`` in int32 cannot number the keys."""
    if num_keys > 2**31:
        raise ValueError(
            f"Expected at most 2^31 keys in a batch, whose numbers fit int32 (got {num_keys:,}). "
            "Sample fewer sequences at once."
        )
