"""Graphs of a stochastic block model in plain torch: the reference of ``sample_sbm``, which runs on any device.

In and out: the tensors of :func:`sbm_pyg.ops.sample_sbm`. Not here: checks of the arguments, and attention.

A row holds the keys of one query in one head. Its edges are drawn in one of three ways, which all have the same law:

* ``PROPOSALS`` draws a Poisson number of candidates: a block by the edges expected from it, and a key by its membership
  in that block. Repeated candidates are dropped. The others are kept with the probability that makes the law exact.
* ``GAPS`` jumps from candidate to candidate by geometric gaps, as if each probability were the largest of the row, and
  keeps a candidate with the quotient of its own probability and the largest.
* ``PAIRS`` makes one Bernoulli draw for each key.

Queries of a group may share their draws instead: :func:`_sample_groups` compares each pair with one random word.

:func:`plan_rows` chooses the cheapest way for each row. All rows of all heads and sequences are then drawn together, in
few operations (docs/kernels.md). The host waits for the device twice: for the number of random words, and for that of
edges.

Shapes: N queries, M keys, E edges, H heads, K blocks, B sequences; row ``r = h * N + i``, and n rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .random_words import (
    BERNOULLI_BYTE,
    BERNOULLI_REST,
    GAP,
    PROPOSAL,
    PROPOSAL_COUNT,
    philox,
    scramble,
    shared_words,
    split_ids,
)
from .segments import segments

PROPOSALS, GAPS, PAIRS = range(3)
"""The ways to draw a row."""
PROPOSAL_COST, GAP_COST = 64.0, 11.0
"""Cost of one candidate by the first two ways, in Bernoulli draws. The costs decide which way a row takes."""
PAIR_COST = 32
"""Cost of the probability of a single pair, in probabilities that are computed by a product of matrices."""
MAX_PROB = 1 + 1e-5
"""Probabilities up to this count as 1 that was rounded."""

KEYS_PER_PANEL = 64
"""Keys that lie together. Each sequence begins in a panel of its own, and sums over keys are taken panel by panel."""
MARGIN = 1.0
"""Factor of the room for random words beyond the expected number. A smaller one costs more attempts."""
MAX_TENSOR_BYTES = {"cpu": 2**23}
"""Bytes of the largest tensors, by kind of device, above which rows are drawn in parts: what caches of a CPU hold."""
MAX_TENSOR_BYTES_ELSEWHERE = 2**30
"""The same for other devices, where few large operations are fastest."""
PAIRS_AT_ONCE = 2**22
"""Pairs that are compared with their words at a time, about, where queries share draws."""
WORD_UNIT = {bits: torch.tensor(2.0**-bits, dtype=torch.float64, device="cpu") for bits in (32, 53)}
"""Factor that takes words of so many bits to [0, 1); a tensor, so that the product is float64."""


# ------------------------------------------------------------------ what is known of rows


class Law(NamedTuple):
    """Options of the distribution."""

    seed: Any
    is_fastrg: bool
    exploration: float
    clamp: bool


class _Model(NamedTuple):
    """Rates and memberships in float64. Exploration is one block more, in which the membership of each key is 1."""

    rate: Tensor
    """Rates of the rows, ``[n, K+1]``."""
    member: Tensor
    """Memberships of the keys of all heads, ``[H*M, K+1]``."""
    mass: Tensor
    """Expected edges of the rows by block, ``[n, K+1]``."""
    member_sums: Callable[[int], Tensor]
    """From the length of the longest sequence to the running sums of ``member``, ``[H*M, K+1]``."""
    tile_rows: int
    tile_keys: int
    """Rows and keys whose probabilities are one product of matrices."""


class _Counters(NamedTuple):
    """Counters of the random words of rows."""

    position: Tensor
    sequence_id: Tensor
    head: Tensor


class _RowKeys(NamedTuple):
    """The keys that rows may attend to."""

    allowed: Tensor
    """Number of keys."""
    first_key: Tensor
    last_key: Tensor
    """The first and the last key, among the keys of all heads."""
    pair_offset: Tensor
    """Added to such a key it gives the number of the pair, ``row * M + key``."""
    first_row: Tensor
    """First row of the same head and sequence, among the given rows."""
    num_tiles: Tensor
    """Tiles that all keys of the sequence take."""


class _Rows(NamedTuple):
    """Consecutive rows. Numbers that are read together are rows of one tensor, so that one operation gathers them."""

    counters: Tensor
    """``[3, n]``: :class:`_Counters`."""
    keys: Tensor
    """``[6, n]``: :class:`_RowKeys`."""
    thinning: Tensor
    """``[2, n]``: a bound on the probabilities, and the factor of the Poisson rates."""
    expected: Tensor
    """``[3, n]``: expected number of proposals, of candidates by gaps, and of edges."""
    gaps: Tensor
    """``[2, n]``: the factor of the gaps, and the number of allowed keys, in float64."""
    way: Tensor
    """``[n]``."""

    def keys_of(self, row: Tensor) -> _RowKeys:
        """Gather :class:`_RowKeys` of some rows."""
        return _RowKeys(*self.keys[:, row])


class Plan(NamedTuple):
    """How rows are drawn, and how many candidates each way has."""

    way: Tensor
    """The cheapest of the three."""
    stretch: Tensor
    """Factor of the Poisson rates."""
    slope: Tensor
    """``log(1 - bound)``: gaps between candidates are exponential numbers divided by it."""
    proposals: Tensor
    """Expected number of proposals."""
    landings: Tensor
    """Expected number of candidates by gaps."""


def sample_sbm(
    rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, seed: int, method: str,
    exploration: float, clamp: bool, is_causal: bool, row_group: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draw all rows together. If memory does not hold all of them, the host waits twice for each part."""
    rows, num_keys = rate.size(0) * rate.size(1), member.size(1)
    dtype = torch.int32 if num_keys < 2**31 else torch.int64
    if not rows * num_keys:
        return query_ptr.new_zeros(rows + 1), query_ptr.new_empty(0, dtype=dtype)
    law = Law(seed, method == "fastrg", exploration, clamp)
    given = (rate.detach(), member.detach(), query_ptr, key_ptr, sequence_ids, law, is_causal)
    pair = _sample_rows(*_prepare(*given), law) if row_group == 1 else _sample_groups(*given, row_group)
    starts = torch.arange(0, rows * num_keys + 1, num_keys, device=pair.device)
    return torch.searchsorted(pair, starts), (pair % num_keys).to(dtype)


def _prepare(
    rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, law: Law, is_causal: bool
) -> tuple[_Model, _Rows]:
    """Compute what rows are drawn from, and plan them. A row depends on the keys alone that it may attend to."""
    (heads, num_queries, _), (num_keys, sequences) = rate.shape, (member.size(1), key_ptr.numel() - 1)
    tile_rows, tile_keys = (64, 256) if num_keys >= 128 * sequences else (16, 64)
    sequence_id, first_head = split_ids(sequence_ids)
    table = torch.stack([query_ptr[:-1], key_ptr[:-1], key_ptr.diff(), sequence_id, first_head])
    batch = torch.repeat_interleave(query_ptr.diff(), output_size=num_queries)
    begin, key_begin, length, sequence_id, first_head = table[:, batch]  # [N]
    row = torch.arange(heads * num_queries, device=member.device).view(heads, num_queries)
    head, position = torch.arange(heads, device=member.device)[:, None], row[0] - begin
    allowed = torch.minimum(position + 1, length) if is_causal else length
    first_key = torch.add(key_begin, head, alpha=num_keys)
    counters = _Counters(position, sequence_id, first_head + head)
    keys = _RowKeys(
        allowed=allowed,
        first_key=first_key,
        last_key=first_key + allowed - 1,
        pair_offset=(row - head) * num_keys,
        first_row=row - position,
        num_tiles=(length + (tile_keys - 1)) // tile_keys,
    )
    integers = torch.stack(torch.broadcast_tensors(*counters, *keys)).flatten(1)  # [9, H*N]
    keys = _RowKeys(*integers[3:])

    rates = torch.nn.functional.pad(rate.double(), (0, 1), value=law.exploration).flatten(0, 1)
    members = torch.nn.functional.pad(member.double(), (0, 1), value=1.0)
    if is_causal:
        running = _running(members.expand(2, -1, -1, -1), key_ptr, num_keys).flatten(1, 2)
        ends = running[:, keys.last_key]
        member_sums = cache(lambda longest: running[0])
    else:
        member_sums = cache(lambda longest: _running(members[None], key_ptr, longest)[0].flatten(0, 1))
        flat = members.transpose(0, 1).flatten(1)  # [M, H*(K+1)]
        sums_and_maxima = torch.stack([segments(flat, key_ptr, kind) for kind in ("sum", "max")])
        ends = sums_and_maxima.unflatten(2, (heads, -1)).transpose(1, 2)[:, :, batch].flatten(1, 2)
    mass = rates * ends  # [2, H*N, K+1]
    expected, bound = mass.sum(2)
    plan = plan_rows(expected, bound, keys.allowed, "fastrg" if law.is_fastrg else "bernoulli")
    numbers = [bound, plan.stretch, plan.proposals, plan.landings, expected]
    floats = torch.stack([*numbers, plan.slope.reciprocal(), keys.allowed])
    rows = _Rows(integers[:3], integers[3:], floats[:2], floats[2:5], floats[5:], plan.way)
    return _Model(rates, members.flatten(0, 1), mass[0], member_sums, tile_rows, tile_keys), rows


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


def _running(x: Tensor, ptr: Tensor, longest: int, panel: int = KEYS_PER_PANEL, before: int = 0) -> Tensor:
    """Running sums of the numbers of each sequence, ``x[0]``, and running maxima, ``x[1]`` if it is given.

    Both are taken inside of panels of a sequence, and joined with those over the panels before, which are taken
    likewise. So the order of additions depends on no other sequence, and few additions follow one another.

    Args:
        x: Numbers, not negative, ``[1 or 2, H, M, K]`` in float64.
        ptr: Offsets of the sequences, ``[B+1]``.
        longest: Upper bound on the length of a sequence.
        panel: Size of a panel. Panels of panels are twice as large, so two steps do for 8,192 numbers.
        before: 0 includes the number itself, 1 takes only those before it.
    """
    total, length = x.size(2), ptr.diff()
    max_panels = total // panel + length.numel()
    num_panels = (length + (panel - 1 + before)) // panel  # of each sequence
    begin = num_panels.cumsum(0) - num_panels
    shift = torch.repeat_interleave(ptr[:-1].sub(begin, alpha=panel), length, output_size=total)
    slot = torch.arange(total, device=ptr.device) - shift
    flat = x.new_zeros(*x.shape[:2], max_panels * panel, x.size(3))
    flat[:, :, before:][:, :, slot] = x
    panels = flat.unflatten(2, (max_panels, panel))
    panels[0].cumsum_(2)
    for maxima in panels[1:]:
        maxima.copy_(maxima.cummax(2).values)
    if longest > panel:
        ends = torch.nn.functional.pad(begin, (0, 1), value=max_panels)
        carried = _running(panels[:, :, :, -1], ends, -(-longest // panel), 2 * panel, 1)
        panels[0].add_(carried[0, :, :, None])
        for maxima, carried_maxima in zip(panels[1:], carried[1:], strict=True):
            torch.maximum(maxima, carried_maxima[:, :, None], out=maxima)
    return flat[:, :, slot]


# ------------------------------------------------------------------ rows that share their draws


def _sample_groups(
    rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, law: Law, is_causal: bool,
    row_group: int,
) -> Tensor:  # fmt: skip
    """An edge exists where the word of its group and key is less than p 2^32: the numbers of all edges, ascending.

    A group is ``row_group`` consecutive queries of a sequence, by position. This is all that shared draws mean. Kernels
    skip pairs in ways of their own, which cannot change the graph. Cost O(N M K).
    """
    (heads, num_queries, _), num_keys = rate.shape, member.size(1)
    head = torch.arange(heads, device=rate.device)[:, None, None]
    ids, first_heads = (x.tolist() for x in split_ids(sequence_ids))
    ends, edges = [(ptr[:-1].tolist(), ptr[1:].tolist()) for ptr in (query_ptr, key_ptr)], [query_ptr.new_empty(0)]
    for begin, end, first, last, sequence_id, first_head in zip(*ends[0], *ends[1], ids, first_heads, strict=True):
        key = torch.arange(last - first, device=rate.device)
        step = max(1, PAIRS_AT_ONCE // (heads * max(1, len(key))))
        for start in range(0, end - begin, step):
            position = torch.arange(start, min(start + step, end - begin), device=rate.device)[:, None]
            p = rate[:, begin + position[:, 0]].double() @ member[:, first:last].double().mT + law.exploration
            p = p.masked_fill(key > position, 0) if is_causal else p  # [H, n, m]
            check_expected(p.sum(2))
            if not law.clamp and p.numel() and float(p.amax()) > MAX_PROB + law.exploration:
                raise ValueError(probability_error(float(p.amax()) - law.exploration))
            words = shared_words(position // row_group, key, sequence_id, head + first_head, law.seed)  # [H, n, m]
            is_edge = words < (p.clamp(max=1) * 2.0**32).long()
            edges.append((((head * num_queries + begin + position) * num_keys) + first + key)[is_edge])
    return torch.cat(edges).sort().values


# ------------------------------------------------------------------ how much there is to draw


class _WordCounts(NamedTuple):
    """Numbers of random words."""

    counts: int
    """For the numbers of proposals."""
    proposals: int
    gaps: int


class _Room(NamedTuple):
    """Upper bounds on what random words lead to."""

    proposals: int
    landings: int
    """Candidates by gaps."""
    hits: int
    """Pairs that the first byte of their Bernoulli draw makes edges."""


class _Tilings(NamedTuple):
    """Numbers of tiles."""

    gaps: int
    """Tiles of rows by gaps, 0 if the probabilities of their candidates are computed one by one."""
    pairs: int


class _Workload(NamedTuple):
    """How much there is to do, which the host knows after the first wait."""

    rows: list[int]
    """Number of rows by way."""
    words: _WordCounts
    room: _Room
    terms: int
    """Upper bound on the proposals that one random word counts."""
    longest: int
    """Upper bound on the keys that a row by proposals may attend to."""
    tiles: _Tilings


class _WordUse(NamedTuple):
    """The use of each random word."""

    row: Tensor
    begin: Tensor
    """The first word of the row."""
    number: Tensor
    """Number of words of the row before this one."""
    end: Tensor
    """For each row the word behind its last one."""


class _Tiles(NamedTuple):
    """Probabilities of pairs, by tiles of ``tile_rows`` rows and ``tile_keys`` keys of one head and sequence."""

    p: Tensor
    """``[T, tile_rows, tile_keys]``; 0 where there is no pair."""
    row: Tensor
    """``[T, tile_rows]``."""
    begin: Tensor
    """Position of the first key, ``[T]``."""


class _GapTiles(NamedTuple):
    """Probabilities of all pairs of the rows by gaps."""

    p: Tensor
    begin: Tensor
    """For each row by gaps, where its probabilities begin in ``p``, ``[n]``."""


class _Drawn(NamedTuple):
    """Candidate pairs."""

    pair: Tensor
    """``row * M + key``."""
    keep: Tensor
    """True if the candidate is an edge."""
    short: Tensor
    """True, in any of several places, if the room was too small."""


def _sample_rows(model: _Model, rows: _Rows, law: Law, retry_factor: int = 1) -> Tensor:
    """Draw the edges of consecutive rows: their numbers among all pairs, ascending.

    Tensors are allocated before it is known how many random words are needed, for a number that is almost certainly
    enough. If it is not, the rows are drawn again with four times the ``retry_factor``.
    """
    n, tile_rows, device = rows.way.numel(), model.tile_rows, rows.way.device
    ways = rows.way == torch.arange(3, device=device)[:, None]  # [3, n]
    upper_bound = _upper_bound(rows.expected, retry_factor).ceil()
    amounts = torch.stack([upper_bound, rows.expected, rows.gaps[1].expand(3, n)]) * ways
    parts = (amounts[1, :1] / 256).ceil()  # [1, n], of the proposals of a row
    rank = torch.nn.functional.pad(ways.flatten(), (1, 0))[:-1].cumsum(0).view(3, n)  # rows before, way after way
    keys = _RowKeys(*rows.keys)
    lane = (rank[1:] - rank[1:, keys.first_row]) % tile_rows
    new_tiles = keys.num_tiles * (ways[1:] & (lane == 0))  # [2, n], tiles that begin with the row
    table = torch.cat([parts, amounts.flatten(0, 1), ways, new_tiles])  # [1 + 9 + 3 + 2, n]
    totals = torch.cat([table.sum(1), table[4:8].amax(1)]).tolist()  # the first wait
    if not math.isfinite(sum(totals)):
        check_expected(rows.expected[PROPOSALS])
    workload = _workload(totals, retry_factor)
    pairs_of_tiles = sum(workload.tiles) * tile_rows * model.tile_keys
    largest_bytes = 8 * max(pairs_of_tiles, 4 * sum(workload.words[1:]))
    if largest_bytes > MAX_TENSOR_BYTES.get(device.type, MAX_TENSOR_BYTES_ELSEWHERE) and n > tile_rows:
        return torch.cat([_sample_rows(*half, law, retry_factor) for half in _halves(model, rows)])

    draws: list[tuple[Tensor, Callable[[Tensor], _Drawn]]] = []  # counters, and what draws with their words
    gap_tiles, highest_prob = None, []
    if any(workload.tiles):
        tiles, end = _probability_tiles(model, rows, workload, ways, rank, new_tiles)
        if workload.tiles.gaps:
            begin = torch.add(lane[0], end[:n] - keys.num_tiles, alpha=tile_rows) * model.tile_keys
            gap_tiles = _GapTiles(tiles.p, begin)
        if workload.tiles.pairs:
            pair_tiles = _Tiles(*(x[workload.tiles.gaps :] for x in tiles))
            if law.is_fastrg:
                pair_tiles.p.neg_().expm1_().neg_()
            highest_prob.append(pair_tiles.p.amax())
            draw = partial(_draw_pairs, rows, law, workload.room.hits, pair_tiles, retry_factor)
            draws.append((_byte_counters(rows, pair_tiles), draw))
    if any(workload.words):
        word_use = _flatten_counts(table[:3].flatten().long(), sum(workload.words))
        word_use = word_use._replace(row=word_use.row % n)
        counters = torch.cat([word_use.number[None], rows.counters[:, word_use.row]])
        for head, purpose in zip(counters[3].split(workload.words), (PROPOSAL_COUNT, PROPOSAL, GAP), strict=True):
            head |= purpose
        proposing = ways[PROPOSALS], rank[PROPOSALS]
        draw = partial(_draw_proposals_and_gaps, model, rows, law, workload, word_use, parts[0], proposing, gap_tiles)
        draws.append((counters, draw))
    if not draws:
        return rows.way.new_empty(0)
    words = scramble(torch.cat([counters for counters, _ in draws], 1), law.seed)
    words = words.split([counters.size(1) for counters, _ in draws], 1)
    drawn = [draw(its_words) for (_, draw), its_words in zip(draws, words, strict=True)]
    pair, keep, short = (torch.cat(each) for each in zip(*drawn, strict=True))
    num_edges, failed, *highest = torch.stack([keep.sum(), short.any(), *highest_prob]).tolist()  # the second wait
    if not (law.is_fastrg or law.clamp) and highest and highest[0] > MAX_PROB + law.exploration:
        raise ValueError(probability_error(highest[0] - law.exploration))
    if failed:
        return _sample_rows(model, rows, law, 4 * retry_factor)
    return pair[_first_true(keep, int(num_edges))].sort().values


def _workload(totals: list[float], retry_factor: int) -> _Workload:
    """Read the sums over the table of :func:`_sample_rows`, and the maxima of four of its rows."""
    (counts,), words, expected, allowed, rows, tiles, (most_proposals, _, _, longest) = (
        totals[begin:end] for begin, end in pairwise((0, 1, 4, 7, 10, 13, 15, 19))
    )
    room = [int(_upper_bound(x, retry_factor)) for x in expected]
    gaps = words[GAPS]
    needed = words[PROPOSALS], gaps, tiles[1]
    return _Workload(
        rows=[int(x) for x in rows],
        words=_WordCounts(int(counts), int(words[PROPOSALS]), int(gaps)),
        room=_Room(*(x if need else 0 for x, need in zip(room, needed, strict=True))),
        terms=1 + int(_upper_bound(min(most_proposals, 256), retry_factor)),
        longest=int(longest),
        tiles=_Tilings(int(tiles[0]) if gaps * PAIR_COST > allowed[GAPS] else 0, int(tiles[1])),
    )


def _halves(model: _Model, rows: _Rows) -> Iterator[tuple[_Model, _Rows]]:
    """Cut the rows into two parts."""
    middle = rows.way.numel() // 2
    for part, begin in ((slice(middle), 0), (slice(middle, None), middle)):
        some = _Rows(*(x[..., part] for x in rows))
        keys = _RowKeys(*some.keys)
        keys = keys._replace(first_row=(keys.first_row - begin).clamp_(min=0))
        yield model._replace(rate=model.rate[part], mass=model.mass[part]), some._replace(keys=torch.stack(keys))


def _upper_bound(expected: Any, retry_factor: int) -> Any:
    """Upper bound on a sum of many rare events: seven standard deviations above its mean, exceeded with p < 1e-11."""
    return expected + 7 * retry_factor * MARGIN * (expected**0.5 + 1)


def _first_true(mask: Tensor, count: int) -> Tensor:
    """Indices of the first ``count`` true entries, padded with -1."""
    return torch.nonzero_static(mask, size=count)[:, 0]


def _flatten_counts(sizes: Tensor, total: int) -> _WordUse:
    """Number ``total`` words of which each row has ``sizes``, row after row."""
    row = torch.repeat_interleave(sizes, output_size=total)
    end = sizes.cumsum(0)
    begin = (end - sizes)[row]
    return _WordUse(row, begin, torch.arange(total, device=row.device) - begin, end)


def _in_chunks(compute: Callable[..., Tensor], width: int, *given: Tensor) -> Tensor:
    """Compute something of tensors ``[n]`` that takes ``width`` numbers for each entry, a chunk of them at a time."""
    room = MAX_TENSOR_BYTES.get(given[0].device.type, MAX_TENSOR_BYTES_ELSEWHERE // 4)
    size = max(1, room // (8 * width))
    done = [compute(*chunk) for chunk in zip(*(x.split(size) for x in given), strict=True)]
    return done[0] if len(done) == 1 else torch.cat(done)


def _probability_tiles(
    model: _Model, rows: _Rows, workload: _Workload, ways: Tensor, rank: Tensor, new_tiles: Tensor
) -> tuple[_Tiles, Tensor]:
    """Compute the probabilities of rows with all keys of their sequence; and count tiles up to and with each row.

    Args:
        model, rows, workload: As in :func:`_sample_rows`.
        ways: True for the rows of each way, ``[3, n]``.
        rank: Number of rows before each one, where rows of one way follow those of another, ``[3, n]``.
        new_tiles: Number of tiles that begin with each row, by gaps and by pairs, ``[2, n]``.
    """
    tile_rows, tile_keys = model.tile_rows, model.tile_keys
    way = GAPS if workload.tiles.gaps else PAIRS
    skipped = sum(workload.rows[:way])
    use = _flatten_counts(new_tiles[way - 1 :].flatten(), sum(workload.tiles))
    num_rows = sum(workload.rows[way:]) + tile_rows
    picked = torch.nonzero_static(ways[way:], size=num_rows)[:, 1]  # padded with -1
    lane = torch.arange(-skipped, tile_rows - skipped, device=use.row.device)
    row, begin = picked[rank[way:].flatten()[use.row][:, None] + lane], use.number * tile_keys  # [T, tile_rows], [T]
    keys = rows.keys_of(row)
    exists = (row >= 0) & (keys.first_row == keys.first_row[:, :1])
    position = begin[:, None] + torch.arange(tile_keys, device=row.device)  # [T, tile_keys]
    key = (keys.first_key[:, :1] + position).clamp_(max=model.member.size(0) - 1)
    p = torch.bmm(model.rate[row], model.member[key].mT)
    p.masked_fill_(position[:, None] >= (keys.allowed * exists)[..., None], 0)
    return _Tiles(p, row, begin), use.end


# ------------------------------------------------------------------ rows by proposals and by gaps


def _draw_proposals_and_gaps(
    model: _Model,
    rows: _Rows,
    law: Law,
    workload: _Workload,
    word_use: _WordUse,
    parts: Tensor,
    proposing: tuple[Tensor, Tensor],
    gap_tiles: _GapTiles | None,
    words: Tensor,
) -> _Drawn:
    """Draw candidates by proposals and by gaps, and thin them to the exact law.

    Args:
        model, rows, law, workload: As in :func:`_sample_rows`.
        word_use: Use of the words: first numbers of proposals, then proposals, then gaps.
        parts: Number of parts in which the proposals of each row are counted, ``[n]``.
        proposing: True for the rows by proposals, and the number of such rows before each one, ``[n]`` each.
        gap_tiles: Probabilities of the rows by gaps, or None if they are computed one by one.
        words: Random words, ``[4, .]``.
    """
    (num_counts, slots, _), (max_proposals, max_landings, _) = workload.words, workload.room
    is_proposing, rank = proposing
    uniform = torch.add(words[1] >> 11, words[0], alpha=2**21) * WORD_UNIT[53]
    row, begin, number = (x[num_counts:] for x in word_use[:3])
    valid, full = [], []  # candidates; whether room was too small
    if max_proposals:
        count, more = _count_proposals(rows, word_use.row[:num_counts], parts, uniform[:num_counts], workload.terms)
        valid.append(number[:slots] < count[row[:slots]])
        full.append(more)
    if max_landings:
        factor, allowed = rows.gaps[:, row[slots:]]
        gap = torch.fmin((uniform[num_counts + slots :] + 2.0**-53).log() * factor, allowed).long()
        total = gap.cumsum(0)
        position = number[slots:] + (total - (total - gap)[begin[slots:] - (num_counts + slots)])
        valid.append(position < allowed)
    is_candidate, last = torch.cat(valid), word_use.end[is_proposing.numel() :] - (num_counts + 1)
    proposal, landing = slice(max_proposals), slice(max_proposals, None)
    by_proposals, by_gaps = is_candidate[:slots], is_candidate[slots:]
    word = torch.cat([_first_true(by_proposals, max_proposals), _first_true(by_gaps, max_landings)])
    exists = word >= 0
    short = torch.cat([*full, is_candidate[last], exists[max_proposals - 1 : max_proposals], exists[-1:]])
    word.clamp_(min=0)  # the first word stands in for candidates that do not exist
    step = position[word[landing]] * exists[landing] if max_landings else word[landing]
    word[landing].add_(slots)

    row, words = row[word], words[:3, num_counts:][:, word]
    keys, (bound, stretch) = rows.keys_of(row), rows.thinning[:, row]
    unit = words * WORD_UNIT[32]
    key = keys.first_key[landing] + step
    if max_proposals:
        mass = model.mass[_first_true(is_proposing, workload.rows[PROPOSALS])]
        its_keys = _RowKeys(*(x[proposal] for x in keys))
        its_rank, its_unit, its_words = (x[..., proposal] for x in (rank[row], unit, words))
        key = torch.cat([_propose(model, mass, workload.longest, its_rank, its_keys, its_unit, its_words), key])
    pair, keep = keys.pair_offset + key, exists
    if not law.is_fastrg:
        single = slice(None) if gap_tiles is None else proposal  # probabilities that are computed one by one
        width = model.member.size(1)
        p = _in_chunks(lambda i, j: (model.rate[i] * model.member[j]).sum(1), width, row[single], key[single])
        if gap_tiles is not None:
            skipped = (model.tile_rows - 1) * model.tile_keys
            slot = gap_tiles.begin[row[landing]] + step.add(step // model.tile_keys, alpha=skipped)
            p = torch.cat([p, gap_tiles.p.flatten()[slot]])
        candidate_prob = torch.cat([-torch.expm1(-stretch[proposal] * p[proposal]), bound[landing]])
        keep = exists & (unit[2] * candidate_prob < p)
    if max_proposals:  # of equal pairs the first one counts
        rising, order = torch.where(exists, pair, 2**63 - 1)[proposal].sort(stable=True)
        is_new = exists[proposal].scatter(0, order[1:], rising[1:] != rising[:-1])
        keep[proposal].logical_and_(is_new)
    return _Drawn(pair, keep, short)


def _count_proposals(rows: _Rows, row: Tensor, parts: Tensor, uniform: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """Draw Poisson numbers of proposals by inversion, ``[n]``; and whether more ``terms`` are needed.

    A number is the sum of equal parts with rates of at most 256, since exp(-256) is a normal number.
    """
    rate = (rows.expected[PROPOSALS] / parts)[row]
    inverse = torch.arange(1, terms, dtype=rate.dtype, device=rate.device).reciprocal()
    minus_term = torch.cat([-torch.exp(-rate)[None], rate * inverse[:, None]]).cumprod(0)
    left = torch.cat([uniform[None], minus_term]).cumsum(0)[1:]  # [terms, .]; devices add along the first axis in order
    more = (left >= 0) & (minus_term < 0)
    return torch.zeros_like(rows.way).index_add_(0, row, more.sum(0)), more[-1]


def _propose(
    model: _Model, mass: Tensor, longest: int, rank: Tensor, keys: _RowKeys, unit: Tensor, words: Tensor
) -> Tensor:
    """Draw the keys of proposals: a block by its expected edges in the row, and a key by its membership in the block.

    Args:
        model: As in :func:`_sample_rows`.
        mass: Expected edges of the rows by proposals, by block.
        longest: Upper bound on the keys that a row may attend to.
        rank: Number of the row of each proposal among these rows.
        keys: Of the row of each proposal.
        unit: Random words, ``[3, .]``, times 2**-32.
        words: Random words.
    """
    blocks, sums = mass.size(1) - 1, model.member_sums(1 << (longest - 1).bit_length())
    share = mass.T.cumsum(0)  # [K+1, .]; devices add along the first axis in order
    share = share * share[-1].reciprocal()
    above = unit[0] + 2.0**-32
    block = _in_chunks(lambda row, word: (share[:, row] < word).sum(0), blocks, rank, above)

    # The key is the first one whose running sum exceeds the word's share of the sum of all allowed keys.
    known, end = block.clamp(max=blocks - 1)[:, None], keys.last_key[:, None]
    target = (unit[1, :, None] + 2.0**-33) * sums[end, known]
    key, bits = keys.first_key[:, None], (longest - 1).bit_length()
    rounds = max(1, -(-bits // 7))  # of at most 127 probes each
    fan = 2 ** -(-bits // rounds)
    for step in (fan**level for level in reversed(range(rounds))):
        probe = key + torch.arange(step - 1, (fan - 1) * step, step, device=key.device)
        below = sums[torch.minimum(probe, end), known] <= target
        key = key.add(below.sum(1, keepdim=True), alpha=step)
    found = torch.minimum(key, end)[:, 0]
    return torch.where(block < blocks, found, keys.first_key + (words[1] * keys.allowed >> 32))


# ------------------------------------------------------------------ rows by pairs


def _byte_counters(rows: _Rows, tiles: _Tiles) -> Tensor:
    """Counters of the first bytes of the Bernoulli draws of tiles, ``[4, T * tile_rows * 16]``."""
    lane = torch.arange(16, device=tiles.begin.device)
    number = lane.add((tiles.begin // 256)[:, None, None], alpha=16)
    position, sequence_id, head = rows.counters[:, tiles.row][..., None]  # [T, tile_rows, 1]
    return torch.stack(torch.broadcast_tensors(number, position, sequence_id, head | BERNOULLI_BYTE)).flatten(1)


def _draw_pairs(rows: _Rows, law: Law, room: int, tiles: _Tiles, retry_factor: int, words: Tensor) -> _Drawn:
    """Make one Bernoulli draw for each pair of tiles: an edge if its word is less than p * 2**32.

    The lower 24 bits of a word are made only where its first byte does not decide; see :func:`bernoulli_draws`.
    """
    p, row, begin = tiles
    (num_tiles, tile_rows, tile_keys), size = p.shape, p.numel()
    panels = words.view(4, num_tiles, tile_rows, 16).permute(1, 2, 0, 3)
    if tile_keys < 256:
        panels = panels.take_along_dim((begin // 64 % 4)[:, None, None, None], 2)
    byte = panels.view(torch.uint8).unflatten(-1, (16, 8))[..., :4].reshape(p.shape)
    first = (p * 256).clamp_(max=256).to(torch.int16)
    open_room, hit_room = int(_upper_bound(size / 256, retry_factor)), min(room, size + 1)
    is_open = torch.nonzero_static(byte == first, size=open_room)
    tile, lane, column = torch.cat([is_open, torch.nonzero_static(byte < first, size=hit_room)]).unbind(1)
    exists = tile >= 0
    short = torch.cat([exists[open_room - 1 : open_room], exists[-1:]])
    its_row, position = row[tile, lane], begin[tile] + column

    undecided = slice(open_room)
    counters = torch.cat([position[None, undecided] >> 2, rows.counters[:, its_row[undecided]]])
    counters[3].bitwise_or_(BERNOULLI_REST)
    rest = scramble(counters, law.seed).gather(0, position[None, undecided] & 3)[0] >> 8
    below = rest < ((p[tile[undecided], lane[undecided], column[undecided]] * 2.0**32).long() & 0xFFFFFF)
    keys = rows.keys_of(its_row)
    exists[undecided].logical_and_(below)
    return _Drawn(keys.first_key + keys.pair_offset + position, exists, short)


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
    number = torch.arange(16 * ((num_keys + 255) // 256), device=threshold.device)
    i, sequence_id, head = (x[..., None] for x in query)
    words = torch.stack(philox(number, i, sequence_id, head | BERNOULLI_BYTE, seed), dim=-2)
    words = words.unflatten(-1, (-1, 16)).transpose(-3, -2)[..., None]  # [..., m / 256, 4, 16, 1]
    byte = torch.cat([words & 255, *(words >> 8 * part & 255 for part in (1, 2, 3))], dim=-1).flatten(-4)
    byte = byte[..., :num_keys].to(torch.int16)
    first = (threshold >> 24).to(torch.int16)
    is_below, is_open = byte < first, byte == first
    j = is_open.nonzero()[:, -1]
    i, sequence_id, head = (x[..., None].expand_as(is_open)[is_open] for x in query)
    words = torch.stack(philox(j >> 2, i, sequence_id, head | BERNOULLI_REST, seed), dim=-1)
    rest = words[torch.arange(len(j), device=j.device), j % 4] >> 8
    is_below[is_open] = rest < threshold[is_open] & 0xFFFFFF
    return is_below


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
