"""How rules look at pairs of queries and keys without forming all of them at once.

In: queries and keys of each head, and the offsets of their sequences. Out: pairs, and the graph of them. Not here: the
rules (``selectors``, ``predictors``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..graph import AttentionGraph
from ..ops import checks
from ..ops.reference.segments import EDGES_PER_CHUNK, allowed_keys, compress, cuts, like_lengths, runs
from ..ops.values import require_values
from ..ragged import count_pairs, offsets, resolve_sides
from ..rows import index_type

__all__ = [
    "Keep", "Part", "Ptr", "Score", "Sides", "block_means", "check_centroids", "largest", "parts", "product", "ranges",
    "share_of", "streamed",
]  # fmt: skip

CHUNK = 2**23  # scores at a time
Ptr = Tensor | tuple[Tensor, Tensor] | None
"""Offsets of the sequences, ``[B+1]`` int64, or the pair (keys, queries); None for one sequence."""


@dataclass(frozen=True)
class Sides:
    """Queries and keys, the sequences that they are in, and where."""

    query: Tensor  # [H, N, C]
    key: Tensor  # [H, M, C]
    query_ptr: Tensor  # [B+1]
    key_ptr: Tensor
    is_causal: bool

    @classmethod
    def of(cls, query: Tensor, key: Tensor, ptr: Ptr, is_causal: bool) -> Sides:
        checks.tensors(query=query, key=key)
        checks.floating(query=query, key=key)
        checks.shape("query", query, (None, None, None), "[H, N, C]", "Heads come first.")
        wanted = (query.size(0), None, query.size(2))
        checks.shape("key", key, wanted, "[H, M, C]", "It has the heads and channels of 'query'.")
        checks.same_device("query", query, key=key)
        if key.dtype != query.dtype:
            raise TypeError(f"Expected 'key' to be {query.dtype}, as 'query' is (got {key.dtype}). Convert it.")
        checks.flag("is_causal", is_causal, "It says whether edges to later tokens are left out.")
        require_values(query, "query")
        if min(query.shape[:2]) < 1 or key.size(1) < 1:
            raise ValueError(
                f"Expected 'query' and 'key' of at least one head and token (got {list(query.shape)} and "
                f"{list(key.shape)}). A graph has tokens on both sides."
            )
        return cls(
            query.detach(), key.detach(), *resolve_sides(query.size(1), key.size(1), ptr, None, query.device), is_causal
        )

    @property
    def heads(self) -> int:
        return self.query.size(0)

    @property
    def num_queries(self) -> int:
        return self.query.size(1)

    @property
    def num_keys(self) -> int:
        return self.key.size(1)

    @cached_property
    def query_sequence(self) -> Tensor:
        return _sequence(self.query_ptr, self.num_queries)  # [N]

    @cached_property
    def key_sequence(self) -> Tensor:
        return _sequence(self.key_ptr, self.num_keys)  # [M]

    @cached_property
    def query_place(self) -> Tensor:
        return torch.arange(self.num_queries, device=self.query.device) - self.query_ptr[self.query_sequence]  # [N]

    @cached_property
    def key_place(self) -> Tensor:
        return torch.arange(self.num_keys, device=self.key.device) - self.key_ptr[self.key_sequence]  # [M]

    @cached_property
    def allowed_keys(self) -> Tensor:
        """Keys that a query may attend to, which are the first ones of its sequence, ``[N]``."""
        return allowed_keys(self.query_ptr, self.key_ptr, self.num_queries, self.is_causal)

    @property
    def first_key(self) -> Tensor:
        """Where the sequence of each query begins among the keys of all heads, ``[H*N]``."""
        head = self.num_keys * torch.arange(self.heads, device=self.key.device)
        return (head[:, None] + self.key_ptr[self.query_sequence]).flatten()

    def grouped(self, query_group: Tensor, key_group: Tensor, groups: int) -> tuple[Tensor, ...]:
        """Sorts keys by head, sequence, group and place, and finds what each query meets there.

        Args:
            query_group, key_group: ``[H, N]`` and ``[H, M]`` in ``0 .. groups-1``; or ``[H, N, m]`` and ``[H, M, m]``
                where a token is in m groups.

        Returns:
            The keys in this order, ``[H*M*m]``; and for each query ``[H*N*m]`` where its group begins among them, how
            many come before its place, before the next place, and where its group ends.
        """
        span = 1 + int(torch.maximum(self.query_ptr.diff().max(), self.key_ptr.diff().max()))
        if self.heads * self.query_ptr.numel() * span * groups >= 2**62:
            raise ValueError(
                f"Expected 'num_buckets' so that int64 numbers all groups and tokens (got {groups}). Take fewer groups."
            )
        head = torch.arange(self.heads, device=query_group.device)[:, None, None]

        def code(group: Tensor, sequence: Tensor) -> Tensor:  # [H, N, m]
            group = group.view(*group.shape[:2], -1)
            return ((head * (self.query_ptr.numel() - 1) + sequence[:, None]) * groups + group) * span

        theirs = code(key_group, self.key_sequence)
        keys, order = (theirs + self.key_place[:, None]).flatten().sort()
        low = code(query_group, self.query_sequence)
        here = low + self.query_place[:, None]
        bounds = (torch.searchsorted(keys, bound.flatten()) for bound in (low, here, here + 1, low + span))
        return order // theirs.size(2) % self.num_keys, *bounds

    def rows(self, rowptr: Tensor, col: Tensor) -> AttentionGraph:
        """The graph of compressed rows, whose keys ascend."""
        sides = (self.num_queries, self.num_keys, self.heads, self.query_ptr, self.key_ptr)
        return AttentionGraph._trusted(rowptr, col.to(index_type(self.num_keys)), *sides, self.is_causal)

    def graph(self, row: Tensor, col: Tensor) -> AttentionGraph:
        """The graph of these pairs, in any order, repeats counted once; row h N + i is query i of head h."""
        return self.rows(*_distinct(row, col, self.heads * self.num_queries, self.num_keys))

    def united(self, row: Tensor, first: Tensor, end: Tensor, keys: Tensor | None = None) -> AttentionGraph:
        """The graph of rows with all keys of their ranges, repeats counted once. Some rows are made at a time.

        Args:
            row: ``[r]``, in any order; a row may have several ranges, or none.
            first, end: Keys ``first .. end-1``, or those that stand there among others, ``[r]``.
            keys: The others.
        """
        order = row.argsort(stable=True)
        row, first, count = row[order], first[order], (end - first).clamp(min=0)[order]
        rows = self.heads * self.num_queries
        pairs = self.heads * int(count_pairs(self.query_ptr, self.key_ptr, False).sum())
        most, width = min(int(count.sum()), pairs), index_type(self.num_keys)
        way_out = "Choose fewer keys, or fewer sequences at once."
        checks.memory("query", most, 2 * width.itemsize, row.device, way_out)  # once more if there are repeats
        before = offsets(torch.zeros(rows, dtype=torch.int64, device=row.device).index_add_(0, row, count))
        range_ptr = offsets(torch.bincount(row, minlength=rows))
        kept, degree, total = torch.empty(most, dtype=width, device=row.device), [], 0
        for low, high, begin, stop in cuts(before, EDGES_PER_CHUNK):
            mine = slice(*range_ptr[[low, high]].tolist())
            at = runs(first[mine], count[mine], stop - begin)
            of = torch.repeat_interleave(row[mine] - low, count[mine], output_size=stop - begin)
            rowptr, col = _distinct(of, at if keys is None else keys[at], high - low, self.num_keys)
            kept[total : total + col.numel()] = col
            degree.append(rowptr.diff())
            total += col.numel()
        return self.rows(offsets(torch.cat(degree)), kept if total == most else kept[:total].clone())


def _distinct(row: Tensor, col: Tensor, rows: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """Compressed rows of pairs in any order, repeats counted once."""
    number = torch.unique(row * num_keys + col)
    degree = torch.bincount(torch.div(number, num_keys, rounding_mode="floor"), minlength=rows)
    return offsets(degree), (number % num_keys).to(index_type(num_keys))


def _sequence(ptr: Tensor, count: int) -> Tensor:
    """The sequence of each token."""
    return torch.repeat_interleave(torch.arange(ptr.numel() - 1, device=ptr.device), ptr.diff(), output_size=count)


def ranges(row: Tensor, first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of each row with all numbers of its range."""
    count = (end - first).clamp(min=0)
    total = int(count.sum())
    checks.memory("query", total, 40, row.device, "Choose fewer keys, or fewer sequences at once.")
    return torch.repeat_interleave(row, count, output_size=total), runs(first, count, total)


def block_means(x: Tensor, ptr: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means of the blocks into which each sequence is cut; the last one may be smaller.

    Args:
        x: ``[H, N, C]``.
        ptr: ``[B+1]``.
        size: Tokens of a block.

    Returns:
        The means ``[H, n, C]``, in float32 at least; offsets of the blocks ``[B+1]``; and the block of each token
        ``[N]``.
    """
    sequence = _sequence(ptr, x.size(1))
    block_ptr = offsets((ptr.diff() + size - 1) // size)
    block = block_ptr[sequence] + (torch.arange(x.size(1), device=x.device) - ptr[sequence]) // size
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    total = x.new_zeros(x.size(0), int(block_ptr[-1]), x.size(2)).index_add_(1, block, x)
    return total / torch.bincount(block, minlength=total.size(1))[:, None], block_ptr, block


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


def parts(sides: Sides, key_ptr: Tensor, limit: Tensor) -> Iterator[Part]:
    """All pairs, in parts that memory holds: some rows of all sequences of like length at a time.

    Args:
        key_ptr: Offsets of the sequences of keys, or of what stands for them, ``[B+1]``.
        limit: How many of the first keys of its sequence a query may have, ``[N]``.
    """
    for queries, keys, _ in like_lengths(sides.query_ptr, key_ptr):
        place = torch.arange(keys.size(1), device=keys.device)
        for part in queries.split(max(1, CHUNK // (sides.heads * keys.numel())), dim=1):
            there, token = part >= 0, part.clamp(min=0)
            yield Part(token, keys, there, (place < limit[token][..., None]) & there[..., None])


def streamed(
    sides: Sides,
    key: Tensor,
    key_ptr: Tensor,
    limit: Tensor,
    keep: Keep,
    score: Score = product,
    most: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pairs that a rule keeps by their scores, a part at a time.

    Memory is asked for all of them where the rule says how many there are, else for those that are found so far.

    Args:
        key: ``[H, M', C]``, the keys or what stands for them.
        key_ptr, limit: As :func:`parts`.
        keep: The rule; scores that are NaN or not possible are minus infinity.
        score: Of the pairs.
        most: How many keys of a query the rule keeps at most, or of each, ``[N]``; None where nobody knows.

    Returns:
        Compressed rows, ``[H*N+1]`` and ``[E]``: the keys of each query, ascending.
    """
    width, way_out = index_type(key.size(1)), "Choose fewer keys, or fewer sequences at once."
    if most is not None:
        count = sides.heads * int(limit.clamp(max=most).sum())
        checks.memory("k", count, 2 * width.itemsize, key.device, way_out)  # in parts, and joined
    query, edges = sides.query.to(key.dtype), 0
    row = torch.arange(sides.heads * sides.num_queries, device=key.device).view(sides.heads, -1)
    found: list[tuple[Tensor, ...]] = [(row[:0, 0], row[:0, 0], row[:0, 0].to(width))]
    for part in parts(sides, key_ptr, limit):
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
