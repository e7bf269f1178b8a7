"""Chunked iteration over pairs of queries and keys, and graphs of the pairs that a rule keeps.

In: :class:`~sbm_pyg.Tokens`. Out: pairs, and their graph. Not here: the rules (``selectors``, ``predictors``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..graphs.graph import AttentionGraph
from ..graphs.ragged import Tokens, check_record, count_pairs, offsets
from ..graphs.rows import index_type
from ..ops import checks, schemas, values
from ..ops.segments import EDGES_PER_CHUNK, compress, cuts, runs
from ..ops.tiles import PairRule, PairTile, best_of, pair_tiles
from ..ops.values import require_values

__all__ = [
    "Score", "check_centroids", "check_vectors", "detached", "dot_product", "expand_ranges",
    "graph_of_best", "graph_of_pairs", "graph_of_ranges", "graph_of_rows", "grouped", "keep_top_k", "number_of_keys",
    "select_pairs", "show_nan",
]  # fmt: skip


def detached(tokens: Tokens) -> Tokens:
    """Detach the tokens, for a rule that reads their values.

    Raises:
        TypeError, ValueError: The argument is not :class:`~sbm_pyg.Tokens`, or does not hold values.
    """
    check_record(tokens)
    require_values(tokens.query, "query")
    return tokens.detached()


def grouped(tokens: Tokens, query_group: Tensor, key_group: Tensor, groups: int) -> tuple[Tensor, ...]:
    """Sort keys by head, sequence, group and position, and find the range of each query's group among them.

    Args:
        query_group, key_group: ``[H, N]`` and ``[H, M]`` in ``0 .. groups-1``; or ``[H, N, m]`` and ``[H, M, m]``
            if each token is in m groups.

    Returns:
        The sorted keys, ``[H*M*m]``; and four indices into them for each query, ``[H*N*m]``: the start of its group,
        the first key at its position or later, the first key after its position, and the end of its group.
    """
    span = 1 + int(torch.maximum(tokens.query_ptr.diff().max(), tokens.key_ptr.diff().max()))
    if tokens.heads * tokens.query_ptr.numel() * span * groups >= 2**62:
        raise ValueError(f"Expected 'num_buckets' so that int64 numbers groups and tokens (got {groups}). Take fewer.")
    head = torch.arange(tokens.heads, device=query_group.device)[:, None, None]

    def code(group: Tensor, sequence: Tensor) -> Tensor:  # [H, N, m]
        group = group.view(*group.shape[:2], -1)
        return ((head * (tokens.query_ptr.numel() - 1) + sequence[:, None]) * groups + group) * span

    key_code = code(key_group, tokens.key_sequence)
    keys, order = (key_code + tokens.key_position[:, None]).flatten().sort()
    low = code(query_group, tokens.query_sequence)
    here = low + tokens.query_position[:, None]
    bounds = (torch.searchsorted(keys, bound.flatten()) for bound in (low, here, here + 1, low + span))
    return order // key_code.size(2) % tokens.num_keys, *bounds


def show_nan(tokens: Tokens, graph: AttentionGraph) -> AttentionGraph:
    """Add edges to tokens that are not finite, for a rule that may choose no edges to or from these tokens.

    Dense attention returns NaN for such tokens, while a sparse layer might hide them. So each non-finite query attends
    to its first key, and each query attends to the first non-finite key that it may attend to.

    Args:
        graph: The graph of the rule.
    """
    bad = [~x.sum(-1, dtype=torch.promote_types(x.dtype, torch.float32)).isfinite() for x in (tokens.query, tokens.key)]
    if not bool(bad[0].any() | bad[1].any()):
        return graph
    first, keys = tokens.first_key, bad[1].flatten().nonzero().flatten()
    end = first + tokens.allowed_keys.repeat(tokens.heads)
    nearest = torch.searchsorted(keys, first).clamp(max=max(0, keys.numel() - 1))
    key = keys[nearest] if keys.numel() else end
    key = torch.where((key >= first) & (key < end), key, torch.where(bad[0].flatten(), first, end))
    row = (key < end).nonzero().flatten()
    return graph | graph_of_pairs(tokens, row, key[row] % tokens.num_keys)


def graph_of_rows(tokens: Tokens, rowptr: Tensor, col: Tensor) -> AttentionGraph:
    """The graph of compressed rows with ascending keys."""
    sizes = (tokens.num_queries, tokens.num_keys, tokens.heads, tokens.query_ptr, tokens.key_ptr)
    return AttentionGraph._trusted(rowptr, col.to(index_type(tokens.num_keys)), *sizes, tokens.has_causal_graph)


def graph_of_best(tokens: Tokens, k: int | Tensor, query: Tensor, weight: Tensor | None, key: Tensor) -> AttentionGraph:
    """The graph in which each query attends to the keys of its k largest scores, by the op ``index_top_k``.

    Args:
        k: Keys of each query, at least 1; one number, ``[N]`` or ``[H, N]`` int64.
        query, weight, key: As in the op ``index_top_k``.
    """
    if not isinstance(k, Tensor):
        k = min(checks.integer("k", k, 1, "It is the number of keys of each query."), tokens.num_keys)
        k = torch.full_like(tokens.query_position, k)
    checks.require(k.dtype == torch.int64, "k", "to be int64", k.dtype, "It counts keys.", TypeError)
    shape = (tokens.heads, tokens.num_queries)
    is_valid = k.dim() < 3 and k.shape in (torch.Size(), shape[1:], shape)
    what = f"to be one number, [N] = [{shape[1]}] or [H, N] = {[*shape]}"
    checks.require(is_valid, "k", what, [*k.shape], "It is the number of keys of each query.")
    k = k.expand(shape)
    checks.same_device("query", query, k=k)
    if values.can_read(k):
        if k.numel() and int(k.min()) < 1:
            raise ValueError(f"Expected 'k' to be at least 1 (got {int(k.min())}). Each query has a key.")
        edges = int(torch.minimum(k, tokens.allowed_keys).sum())
        checks.memory("k", edges, 8, query.device, "Choose fewer keys, or fewer sequences at once.")
    ptrs = (tokens.query_ptr, tokens.key_ptr)
    return graph_of_rows(tokens, *schemas.index_top_k(query, weight, key, *ptrs, k, tokens.allowed_keys))


def graph_of_pairs(tokens: Tokens, row: Tensor, col: Tensor) -> AttentionGraph:
    """The graph of pairs in any order; repeated pairs count once. Row ``h * N + i`` is query i of head h."""
    return graph_of_rows(tokens, *_unique_rows(row, col, tokens.heads * tokens.num_queries, tokens.num_keys))


def graph_of_ranges(
    tokens: Tokens, row: Tensor, first: Tensor, end: Tensor, keys: Tensor | None = None
) -> AttentionGraph:
    """The graph in which each row has all keys of its ranges; repeated keys count once. Works on chunks of rows.

    Args:
        row: ``[r]``, in any order; a row may have any number of ranges.
        first, end: The ranges ``first .. end-1`` of keys, or of indices into ``keys``, ``[r]``.
        keys: Keys that the ranges refer to. None: the ranges are keys.
    """
    order = row.argsort()
    row, first, count = row[order], first[order], (end - first).clamp(min=0)[order]
    rows = tokens.heads * tokens.num_queries
    pairs = tokens.heads * int(count_pairs(tokens.query_ptr, tokens.key_ptr, False).sum())
    most, width = min(int(count.sum()), pairs), index_type(tokens.num_keys)
    way_out = "Choose fewer keys, or fewer sequences at once."
    checks.memory("query", most, 2 * width.itemsize, row.device, way_out)  # twice if keys repeat
    before = offsets(torch.zeros(rows, dtype=torch.int64, device=row.device).index_add_(0, row, count))
    range_ptr = offsets(torch.bincount(row, minlength=rows))
    columns, degree, total = torch.empty(most, dtype=width, device=row.device), [], 0
    for low, high, begin, stop in cuts(before, EDGES_PER_CHUNK):
        part = slice(*range_ptr[[low, high]].tolist())
        at = runs(first[part], count[part], stop - begin)
        of = torch.repeat_interleave(row[part] - low, count[part], output_size=stop - begin)
        rowptr, col = _unique_rows(of, at if keys is None else keys[at], high - low, tokens.num_keys)
        columns[total : total + col.numel()] = col
        degree.append(rowptr.diff())
        total += col.numel()
    return graph_of_rows(tokens, offsets(torch.cat(degree)), columns if total == most else columns[:total].clone())


def _unique_rows(row: Tensor, col: Tensor, rows: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """Compressed rows of pairs in any order; repeated pairs count once."""
    number = torch.unique(row * num_keys + col)
    degree = torch.bincount(torch.div(number, num_keys, rounding_mode="floor"), minlength=rows)
    return offsets(degree), (number % num_keys).to(index_type(num_keys))


def expand_ranges(row: Tensor, first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Pair each row with all integers of its range."""
    count = (end - first).clamp(min=0)
    total = int(count.sum())
    checks.memory("query", total, 40, row.device, "Choose fewer keys, or fewer sequences at once.")
    return torch.repeat_interleave(row, count, output_size=total), runs(first, count, total)


def check_centroids(centroids: Tensor, x: Tensor, name: str = "query", width: str = "C") -> Tensor:
    """Check the heads and width of centroids, and return centroids for each head in the dtype of the tokens."""
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


def check_vectors(query: Tensor, key: Tensor, heads: int, channels: int) -> None:
    """Check that queries and keys have the heads and channels of a module."""
    checks.tensors(query=query, key=key)
    checks.floating(query=query, key=key)
    for name, x in (("query", query), ("key", key)):
        checks.shape(
            name, x, (heads, None, channels), "[H, N, C]", "The module was made with these heads and channels."
        )


Score = Callable[[Tensor, Tensor], Tensor]
"""From queries ``[H, b, r, C]`` and keys ``[H, b, L, C']`` to scores ``[H, b, r, L]``."""


def dot_product(query: Tensor, key: Tensor) -> Tensor:
    """The dot products of queries and keys."""
    return query @ key.mT


def select_pairs(
    tokens: Tokens,
    keep: PairRule,
    score: Score = dot_product,
    most: int | Tensor | None = None,
    among: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The pairs that a rule keeps by their scores, computed tile by tile.

    The check of memory counts ``most`` keys per query, or the pairs found so far if ``most`` is None.

    Args:
        keep: The rule.
        score: Computes the scores.
        most: Largest number of keys that the rule keeps for a query, one number or ``[N]``; None if it is unknown.
        among: Vectors in place of the keys ``[H, M', C]``, their offsets, and the number of first vectors that each
            query may choose, ``[N]``. None: the keys.

    Returns:
        Compressed rows, ``[H*N+1]`` and ``[E]``: the keys of each query, ascending.
    """
    key, key_ptr, limit = among or (tokens.key, tokens.key_ptr, tokens.allowed_keys)
    width, way_out = index_type(key.size(1)), "Choose fewer keys, or fewer sequences at once."
    if most is not None:
        count = tokens.heads * int(limit.clamp(max=most).sum())
        checks.memory("k", count, 2 * width.itemsize, key.device, way_out)  # tiles, and their concatenation
    query, edges = tokens.query.to(key.dtype), 0
    row = torch.arange(tokens.heads * tokens.num_queries, device=key.device).view(tokens.heads, -1)
    parts: list[tuple[Tensor, ...]] = []
    for tile in pair_tiles(tokens.heads, tokens.query_ptr, key_ptr, limit):
        scores = score(query[:, tile.query], key[:, tile.key.clamp(min=0)])
        parts.append(tile.select(scores, keep, row, width))
        edges += parts[-1][2].numel()
        checks.memory("query", edges, 2 * width.itemsize, key.device, way_out)
    rowptr, col = compress(parts, row.numel())
    return rowptr, col


def number_of_keys(k: int | None, density: float | Tensor | None, allowed: Tensor) -> int | Tensor:
    """Keys of each query: k, or ``max(k, ceil(density * allowed))``, in the shape of ``allowed`` or broadcast.

    The product is first corrected for floating-point error, so that density 0.55 of 100 keys gives 55 keys.

    Args:
        k: Number of keys, at least 1. None: 1.
        density: Fraction of the keys that a query may attend to, in (0, 1], one number or ``[H, 1]`` for the heads.
            None: k keys.
        allowed: Number of keys that each query may attend to, ``[N]`` int64.
    """
    least = 1 if k is None else k
    if density is None:
        return least
    wide = checks.widest(allowed.device)
    return (density * allowed.to(wide) * (1 - 4 * torch.finfo(wide).eps)).ceil().long().clamp(min=least)


def keep_top_k(k: int | Tensor, own_key: Tensor | None = None) -> PairRule:
    """The rule that keeps the k largest scores of each query; the lower key wins a tie.

    Args:
        k: Keys of each query, at least 1; one number or ``[N]``.
        own_key: Query i always keeps key ``own_key[i]`` of its sequence, ``[N]``. None: no such key.
    """

    def keep(scores: Tensor, possible: Tensor, tile: PairTile) -> Tensor:
        if own_key is not None:
            key = torch.arange(scores.size(-1), device=scores.device)
            here = tile.possible & (key == own_key[tile.query][..., None])
            scores.clamp_(max=torch.finfo(scores.dtype).max).masked_fill_(here, torch.inf)
            possible = possible | here
        return best_of(scores, possible, k if isinstance(k, int) else k[tile.query])

    return keep
