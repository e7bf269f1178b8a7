"""Chunked iteration over pairs of queries and keys, and graphs of the pairs that a rule keeps.

In: :class:`~sbm_pyg.Tokens`. Out: pairs, and the graph of them. Not here: the rules (``selectors``, ``predictors``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..graph import AttentionGraph
from ..ops import checks
from ..ops.reference.segments import EDGES_PER_CHUNK, compress, cuts, like_lengths, runs
from ..ops.values import require_values
from ..ragged import Tokens, check_record, count_pairs, offsets
from ..rows import index_type

__all__ = [
    "Keep", "Part", "Score", "check_centroids", "detached", "graph_of_pairs", "graph_of_ranges", "graph_of_rows",
    "grouped", "largest", "parts", "product", "ranges", "share_of", "streamed",
]  # fmt: skip

CHUNK = 2**23  # scores at a time


def detached(tokens: Tokens) -> Tokens:
    """The tokens without gradients, for a rule that looks at their values.

    Raises:
        TypeError, ValueError: They are no :class:`~sbm_pyg.Tokens`, or hold no values.
    """
    check_record(tokens)
    require_values(tokens.query, "query")
    return tokens.with_vectors(tokens.query.detach(), tokens.key.detach())


def grouped(tokens: Tokens, query_group: Tensor, key_group: Tensor, groups: int) -> tuple[Tensor, ...]:
    """Sorts keys by head, sequence, group and position, and finds what each query meets there.

    Args:
        query_group, key_group: ``[H, N]`` and ``[H, M]`` in ``0 .. groups-1``; or ``[H, N, m]`` and ``[H, M, m]``
            where a token is in m groups.

    Returns:
        The keys in this order, ``[H*M*m]``; and for each query ``[H*N*m]`` where its group begins among them, how many
        come before its position, before the next position, and where its group ends.
    """
    span = 1 + int(torch.maximum(tokens.query_ptr.diff().max(), tokens.key_ptr.diff().max()))
    if tokens.heads * tokens.query_ptr.numel() * span * groups >= 2**62:
        raise ValueError(
            f"Expected 'num_buckets' so that int64 numbers all groups and tokens (got {groups}). Take fewer groups."
        )
    head = torch.arange(tokens.heads, device=query_group.device)[:, None, None]

    def code(group: Tensor, sequence: Tensor) -> Tensor:  # [H, N, m]
        group = group.view(*group.shape[:2], -1)
        return ((head * (tokens.query_ptr.numel() - 1) + sequence[:, None]) * groups + group) * span

    theirs = code(key_group, tokens.key_sequence)
    keys, order = (theirs + tokens.key_position[:, None]).flatten().sort()
    low = code(query_group, tokens.query_sequence)
    here = low + tokens.query_position[:, None]
    bounds = (torch.searchsorted(keys, bound.flatten()) for bound in (low, here, here + 1, low + span))
    return order // theirs.size(2) % tokens.num_keys, *bounds


def graph_of_rows(tokens: Tokens, rowptr: Tensor, col: Tensor) -> AttentionGraph:
    """The graph of compressed rows, whose keys ascend."""
    sizes = (tokens.num_queries, tokens.num_keys, tokens.heads, tokens.query_ptr, tokens.key_ptr)
    return AttentionGraph._trusted(rowptr, col.to(index_type(tokens.num_keys)), *sizes, tokens.is_causal)


def graph_of_pairs(tokens: Tokens, row: Tensor, col: Tensor) -> AttentionGraph:
    """The graph of these pairs, in any order, repeats counted once; row h N + i is query i of head h."""
    return graph_of_rows(tokens, *_distinct(row, col, tokens.heads * tokens.num_queries, tokens.num_keys))


def graph_of_ranges(
    tokens: Tokens, row: Tensor, first: Tensor, end: Tensor, keys: Tensor | None = None
) -> AttentionGraph:
    """The graph of rows with all keys of their ranges, repeats counted once. Some rows are made at a time.

    Args:
        row: ``[r]``, in any order; a row may have several ranges, or none.
        first, end: Keys ``first .. end-1``, or those that stand there among others, ``[r]``.
        keys: The others.
    """
    order = row.argsort(stable=True)
    row, first, count = row[order], first[order], (end - first).clamp(min=0)[order]
    rows = tokens.heads * tokens.num_queries
    pairs = tokens.heads * int(count_pairs(tokens.query_ptr, tokens.key_ptr, False).sum())
    most, width = min(int(count.sum()), pairs), index_type(tokens.num_keys)
    way_out = "Choose fewer keys, or fewer sequences at once."
    checks.memory("query", most, 2 * width.itemsize, row.device, way_out)  # once more if there are repeats
    before = offsets(torch.zeros(rows, dtype=torch.int64, device=row.device).index_add_(0, row, count))
    range_ptr = offsets(torch.bincount(row, minlength=rows))
    kept, degree, total = torch.empty(most, dtype=width, device=row.device), [], 0
    for low, high, begin, stop in cuts(before, EDGES_PER_CHUNK):
        mine = slice(*range_ptr[[low, high]].tolist())
        at = runs(first[mine], count[mine], stop - begin)
        of = torch.repeat_interleave(row[mine] - low, count[mine], output_size=stop - begin)
        rowptr, col = _distinct(of, at if keys is None else keys[at], high - low, tokens.num_keys)
        kept[total : total + col.numel()] = col
        degree.append(rowptr.diff())
        total += col.numel()
    return graph_of_rows(tokens, offsets(torch.cat(degree)), kept if total == most else kept[:total].clone())


def _distinct(row: Tensor, col: Tensor, rows: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """Compressed rows of pairs in any order, repeats counted once."""
    number = torch.unique(row * num_keys + col)
    degree = torch.bincount(torch.div(number, num_keys, rounding_mode="floor"), minlength=rows)
    return offsets(degree), (number % num_keys).to(index_type(num_keys))


def ranges(row: Tensor, first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of each row with all numbers of its range."""
    count = (end - first).clamp(min=0)
    total = int(count.sum())
    checks.memory("query", total, 40, row.device, "Choose fewer keys, or fewer sequences at once.")
    return torch.repeat_interleave(row, count, output_size=total), runs(first, count, total)


def check_centroids(centroids: Tensor, x: Tensor, name: str = "query", width: str = "C") -> Tensor:
    """The centroids of each head, in the type of the tokens, if they are of the same heads and width."""
    checks.tensors(centroids=centroids)
    checks.shape("centroids", centroids, (None, None, x.size(2)), f"[H, K, {width}]", f"They are as wide as '{name}'.")
    checks.floating(centroids=centroids)
    checks.same_device(name, x, centroids=centroids)
    if centroids.size(0) not in (1, x.size(0)) or centroids.size(1) < 1:
        raise ValueError(
            f"Expected 'centroids' to be [{x.size(0)}, K, {width}] or [1, K, {width}] with K of at least 1 "
            f"(got {list(centroids.shape)}). Each head has its own, or all share them."
        )
    return centroids.to(x.dtype).expand(x.size(0), -1, -1)


Score = Callable[[Tensor, Tensor], Tensor]
"""From queries ``[H, b, r, C]`` and keys ``[H, b, L, C']`` to scores ``[H, b, r, L]``."""


def product(query: Tensor, key: Tensor) -> Tensor:
    """The score of a pair that is the product of its vectors."""
    return query @ key.mT


@dataclass(frozen=True)
class Part:
    """Some queries of sequences of like length, and all keys that stand beside them."""

    query: Tensor  # [b, r] tokens
    key: Tensor  # [b, L]; -1 is none
    there: Tensor  # [b, r], whether there is such a query
    possible: Tensor  # [b, r, L] pairs

    def rows(self, kept: Tensor, key: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What :func:`.segments.compress` takes.

        Args:
            kept: Which pairs are edges, ``[H, b, r, L]``.
            key: The keys of these, ``[e]``.
            row: Numbers of all rows, ``[H, N]``.
        """
        return row[:, self.query[self.there]].flatten(), kept.sum(-1)[:, self.there].flatten(), key


Keep = Callable[[Tensor, Tensor, Part], Tensor]
"""From scores ``[H, b, r, L]``, the possible ones among them and where they are to a mask of those to keep."""


def parts(tokens: Tokens, key_ptr: Tensor | None = None, limit: Tensor | None = None) -> Iterator[Part]:
    """All pairs, in parts that memory holds: some rows of all sequences of like length at a time.

    Args:
        key_ptr: Offsets of what stands for the keys, ``[B+1]``. None: those of the keys.
        limit: How many of the first keys of its sequence a query may have, ``[N]``. None: all that it may attend to.
    """
    key_ptr, limit = tokens.key_ptr if key_ptr is None else key_ptr, tokens.allowed_keys if limit is None else limit
    for queries, keys, _ in like_lengths(tokens.query_ptr, key_ptr):
        place = torch.arange(keys.size(1), device=keys.device)
        for part in queries.split(max(1, CHUNK // (tokens.heads * keys.numel())), dim=1):
            there, query = part >= 0, part.clamp(min=0)
            yield Part(query, keys, there, (place < limit[query][..., None]) & there[..., None])


def streamed(
    tokens: Tokens,
    keep: Keep,
    score: Score = product,
    most: int | Tensor | None = None,
    among: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Pairs that a rule keeps by their scores, a part at a time.

    Memory is asked for all of them where the rule says how many there are, else for those that are found so far.

    Args:
        keep: The rule; scores that are NaN or not possible are minus infinity.
        score: Of the pairs.
        most: Largest number of keys of a query that the rule keeps, or of each, ``[N]``; None if it is unknown.
        among: What stands for the keys ``[H, M', C]``, its offsets, and the limit of :func:`parts`. None: the keys.

    Returns:
        Compressed rows, ``[H*N+1]`` and ``[E]``: the keys of each query, ascending.
    """
    key, key_ptr, limit = among or (tokens.key, tokens.key_ptr, tokens.allowed_keys)
    width, way_out = index_type(key.size(1)), "Choose fewer keys, or fewer sequences at once."
    if most is not None:
        count = tokens.heads * int(limit.clamp(max=most).sum())
        checks.memory("k", count, 2 * width.itemsize, key.device, way_out)  # in parts, and joined
    query, edges = tokens.query.to(key.dtype), 0
    row = torch.arange(tokens.heads * tokens.num_queries, device=key.device).view(tokens.heads, -1)
    found: list[tuple[Tensor, ...]] = [(row[:0, 0], row[:0, 0], row[:0, 0].to(width))]
    for part in parts(tokens, key_ptr, limit):
        scores = score(query[:, part.query], key[:, part.key.clamp(min=0)])
        possible = part.possible & ~scores.isnan()
        kept = keep(scores.masked_fill_(~possible, -torch.inf), possible, part)
        found.append(part.rows(kept, part.key.to(width)[:, None].expand_as(kept)[kept], row))
        edges += found[-1][2].numel()
        checks.memory("query", edges, 2 * width.itemsize, key.device, way_out)
    rowptr, col = compress(found, row.numel())
    return rowptr, col


def share_of(share: float, count: Tensor) -> Tensor:
    """How many of each number of things, at least 1, a share in (0, 1] is, rounded up, int64.

    What rounding alone puts above a whole number is not rounded up: 0.55 of 100 are 55.
    """
    wide = checks.widest(count.device)
    return (share * count.to(wide) * (1 - 4 * torch.finfo(wide).eps)).ceil().long()


def largest(k: int | Tensor, own: Tensor | None = None) -> Keep:
    """The largest scores of each query, equal ones by the lower key.

    Args:
        k: How many, at least 1; or of each query, ``[N]``.
        own: Key ``own[i]`` of its sequence is among those of query i, whatever its score is, ``[N]``.
    """

    def keep(scores: Tensor, possible: Tensor, part: Part) -> Tensor:
        if own is not None:
            here = part.possible & (torch.arange(scores.size(-1), device=scores.device) == own[part.query][..., None])
            scores.clamp_(max=torch.finfo(scores.dtype).max).masked_fill_(here, torch.inf)
            possible = possible | here
        return best_of(scores, possible, k if isinstance(k, int) else k[part.query])

    return keep


def best_of(scores: Tensor, possible: Tensor, count: int | Tensor) -> Tensor:
    """Which of the possible scores along the last axis are the largest, equal ones by the lower place.

    Args:
        scores: ``[..., m]``, none of them NaN.
        possible: Which can be among them, ``[..., m]``; others score ``-inf``.
        count: How many, at least 1 or of each row, ``[...]``; all that are possible where these are fewer.
    """
    if not scores.size(-1):
        return torch.zeros_like(scores, dtype=torch.bool)
    count = torch.as_tensor(count, device=scores.device).clamp(max=scores.size(-1))
    best = scores.topk(int(count.max()), dim=-1).values
    least = best.gather(-1, (count - 1).expand(scores.shape[:-1])[..., None])
    above, equal = scores > least, (scores == least) & possible
    left = count[..., None] - above.sum(-1, keepdim=True, dtype=torch.int32)  # six times as fast as int64
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= left))
