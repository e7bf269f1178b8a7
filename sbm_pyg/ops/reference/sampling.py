"""Sampling in plain torch, all rows of all heads and sequences at once: the meaning, and what other devices run.

In and out: as :func:`sbm_pyg.ops.sample_sbm` and :func:`sbm_pyg.ops.sample_systematic`. There are few operations, and
few waits for the device (docs/kernels.md). Not here: checks of what comes in, and attention (``reference``).

Shapes: N queries, M keys, E edges, H heads, K blocks, B sequences; row ``r = h * N + i``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .random_words import COIN_BYTE, COIN_REST, COUNT, GAP, PROPOSAL, WORD, philox, scramble
from .segments import segments

PROPOSALS, GAPS, COINS = range(3)
"""The ways to sample a row: Poisson proposals by block and key, keys at random gaps, thinned, or one coin per key."""
PROPOSAL_COST, GAP_COST = 64.0, 11.0
"""How many coins one proposal of the other two ways is worth; decides row by row which way is taken."""

PANEL = 64
"""Keys that lie together: each sequence begins in a panel of its own, and sums over keys are taken panel by panel."""
MARGIN = 1.0
"""Factor of the room for random words beyond the expected number; smaller ones cost more attempts."""
DENSE = 32
"""How many pairs one by one cost as much as one that is looked at alone."""
ROOM = {"cpu": 2**23}
"""Bytes of the largest tensors that rows are drawn with at a time, by kind of device: what the caches of a CPU hold."""
WIDE = 2**30
"""The same on other devices, where few large operations are fastest."""
UNIT = {bits: torch.tensor(2.0**-bits, dtype=torch.float64, device="cpu") for bits in (32, 53)}
"""What words of so many bits are multiplied with; a tensor, so that the product is float64."""


def _running(x: Tensor, ptr: Tensor, longest: int, panel: int = PANEL, before: int = 0) -> Tensor:
    """Running sums of the numbers of each sequence, ``x[0]``, and running maxima, ``x[1]`` if there is one.

    They are taken inside of panels of 64 numbers of a sequence, and joined with those over the panels before, which are
    taken likewise: in an order that depends on no other sequence, and with few additions one after the other.

    Args:
        x: Numbers, not negative, ``[1 or 2, H, M, K]`` in float64.
        ptr: Offsets of the sequences, ``[B+1]``.
        longest: No sequence has more numbers.
        panel: Size of a panel; those of panels are twice as large, so two steps do for 8,192 numbers.
        before: 0: up to each number. 1: over the numbers before it.
    """
    total, length = x.size(2), ptr.diff()
    panels = total // panel + length.numel()  # at least as many as there are
    count = (length + (panel - 1 + before)) // panel
    begin = count.cumsum(0) - count
    shift = torch.repeat_interleave(ptr[:-1].sub(begin, alpha=panel), length, output_size=total)
    place = torch.arange(total, device=ptr.device) - shift
    flat = x.new_zeros(*x.shape[:2], panels * panel, x.size(3))
    flat[:, :, before:][:, :, place] = x
    held = flat.unflatten(2, (panels, panel))
    held[0].cumsum_(2)
    for tops in held[1:]:
        tops.copy_(tops.cummax(2).values)
    if longest > panel:
        ends = torch.nn.functional.pad(begin, (0, 1), value=panels)
        carried = _running(held[:, :, :, -1], ends, -(-longest // panel), 2 * panel, 1)
        held[0].add_(carried[0, :, :, None])
        for tops, top in zip(held[1:], carried[1:], strict=True):
            torch.maximum(tops, top[:, :, None], out=tops)
    return flat[:, :, place]


class _Law(NamedTuple):
    """What the graph is drawn by."""

    seed: int
    method: str
    exploration: float
    clamp: bool


class _Model(NamedTuple):
    """Numbers in float64. Exploration is one block more, of which all keys are wholly members."""

    rate: Tensor
    """``[n, K+1]`` of some rows."""
    key: Tensor
    """``[H*M, K+1]``."""
    mass: Tensor
    """Expected edges of some rows by block, ``[n, K+1]``."""
    sums: Callable[[int], Tensor]
    """Makes the running sums of ``key``, of sequences that are not longer."""
    tile: tuple[int, int]
    """Rows and keys whose probabilities are computed together."""


class _Rows(NamedTuple):
    """What is known of each of some consecutive rows."""

    word: Tensor
    """``[3, n]``: its place in its sequence, the stream of that, and its head: counters of its random words."""
    number: Tensor
    """``[6, n]``: how many keys it may attend to; the first and the last of them among those of all heads; what makes
    such a number of a key that of a pair among all pairs; the first of these rows that is of its head and sequence; and
    the tiles that the keys of its sequence take."""
    value: Tensor
    """``[7, n]``: a bound on its probabilities, the factor of its rates, how many proposals, keys at gaps and edges to
    expect, the factor of its gaps, and how many keys it may attend to."""
    way: Tensor


def sample_sbm(
    query: Tensor,
    key: Tensor,
    query_ptr: Tensor,
    key_ptr: Tensor,
    sequence_ids: Tensor,
    seed: int,
    method: str,
    exploration: float,
    clamp: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """All rows at once, each by the way that is cheapest for it.

    The host waits for the device twice: to learn how many random words are needed, and how many edges there are. Where
    memory does not hold all rows at once, it waits so often for each part of them.
    """
    rows, num_keys = query.size(0) * query.size(1), key.size(1)
    dtype = torch.int32 if num_keys < 2**31 else torch.int64
    if not rows * num_keys:
        return query_ptr.new_zeros(rows + 1), query_ptr.new_empty(0, dtype=dtype)
    law = _Law(seed, method, exploration, clamp)
    plan = _plan(query.detach(), key.detach(), query_ptr, key_ptr, sequence_ids, law, is_causal)
    pair = _sample_rows(*plan, law)  # row * M + key, rising
    starts = torch.arange(0, rows * num_keys + 1, num_keys, device=pair.device)
    return torch.searchsorted(pair, starts), (pair % num_keys).to(dtype)


def _plan(
    query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, law: _Law, is_causal: bool
) -> tuple[_Model, _Rows]:
    """What rows are drawn by, and which way each takes. All that decides on a row comes from keys that it may reach."""
    (heads, num_queries, _), (num_keys, sequences) = query.shape, (key.size(1), key_ptr.numel() - 1)
    tile = (64, 256) if num_keys >= 128 * sequences else (16, 64)
    table = torch.stack([query_ptr[:-1], key_ptr[:-1], key_ptr.diff(), sequence_ids & WORD])
    batch = torch.repeat_interleave(query_ptr.diff(), output_size=num_queries)
    begin, shift, length, stream = table[:, batch]  # [N]
    row = torch.arange(heads * num_queries, device=key.device).view(heads, num_queries)
    head, place = torch.arange(heads, device=key.device)[:, None], row[0] - begin
    reach = torch.minimum(place + 1, length) if is_causal else length
    first = torch.add(shift, head, alpha=num_keys)
    last = first + reach - 1
    per_row = (
        place,
        stream,
        head,
        reach,
        first,
        last,
        (row - head) * num_keys,
        row - place,
        (length + (tile[1] - 1)) // tile[1],
    )
    number = torch.stack(torch.broadcast_tensors(*per_row)).flatten(1)
    reach, last = number[3], number[5]

    rate = torch.nn.functional.pad(query.double(), (0, 1), value=law.exploration).flatten(0, 1)
    keys = torch.nn.functional.pad(key.double(), (0, 1), value=1.0)
    if is_causal:
        running = _running(keys.expand(2, -1, -1, -1), key_ptr, num_keys).flatten(1, 2)
        ends = running[:, last]
        sums = cache(lambda longest: running[0])
    else:
        sums = cache(lambda longest: _running(keys[None], key_ptr, longest)[0].flatten(0, 1))
        flat = keys.transpose(0, 1).flatten(1)  # [M, H*(K+1)]
        parts = torch.stack([segments(flat, key_ptr, kind) for kind in ("sum", "max")])
        ends = parts.unflatten(2, (heads, -1)).transpose(1, 2)[:, :, batch].flatten(1, 2)
    mass = rate * ends  # [2, H*N, K+1]
    expected, bound = mass.sum(2)
    plan = plan_rows(expected, bound, reach, law.method)
    value = torch.stack([bound, plan.stretch, plan.proposals, plan.landings, expected, plan.slope.reciprocal(), reach])
    return _Model(rate, keys.flatten(0, 1), mass[0], sums, tile), _Rows(number[:3], number[3:], value, plan.way)


class _Needs(NamedTuple):
    """How much there is to do, as the host knows after the first wait."""

    rows: list[int]
    """How many go each way."""
    words: list[int]
    """Random words: for numbers of proposals, for proposals, and for gaps."""
    room: list[int]
    """For what comes of them: proposals, keys at gaps, and edges that the first byte of a coin decides."""
    terms: int
    """Room for the proposals that one word counts."""
    longest: int
    """No row with proposals may attend to more keys."""
    tiles: list[int]
    """Of rows by gaps, none where their probabilities are computed one by one, and of rows by coins."""


class _Words(NamedTuple):
    """What each random word is for."""

    row: Tensor
    begin: Tensor  # the first word of the row
    number: Tensor  # how many words of the row come before
    end: Tensor  # behind the last word of each row


class _Tiles(NamedTuple):
    """Probabilities of pairs, some rows by some keys of their sequence at a time."""

    p: Tensor  # [T, rows, keys]; 0 for what is no pair
    row: Tensor  # [T, rows]
    begin: Tensor  # the first key, [T]


Drawn = tuple[Tensor, Tensor, Tensor]
"""Pairs, whether they are edges, and whether there was too little room, in several places."""


def _sample_rows(model: _Model, rows: _Rows, law: _Law, spare: int = 1) -> Tensor:
    """Numbers of the edges of some consecutive rows, among all pairs, in rising order.

    Room for random words is made before it is known how many are needed: for ``spare`` times what is almost certainly
    enough. Where it was not, all is done again with more.
    """
    n, (few, wide), device = rows.way.numel(), model.tile, rows.way.device
    ways = rows.way == torch.arange(3, device=device)[:, None]
    hoped, reach = rows.value[2:5], rows.value[6]
    amounts = torch.stack([_enough(hoped, spare).ceil(), hoped, reach.expand(3, n)]) * ways
    parts = (amounts[1, :1] / 256).ceil()  # of the proposals of a row
    before = torch.nn.functional.pad(ways.flatten(), (1, 0))[:-1].cumsum(0).view(3, n)  # rows, one way after another
    lane = (before[1:] - before[1:, rows.number[4]]) % few
    tiles = rows.number[5] * (ways[1:] & (lane == 0))  # that begin with a row
    table = torch.cat([parts, amounts.flatten(0, 1), ways, tiles])  # [1 + 9 + 3 + 2, n]
    known = torch.cat([table.sum(1), table[4:8].amax(1)]).tolist()
    if not math.isfinite(sum(known)):
        check_expected(hoped[0])
    needs = _needs(known, spare)
    if 8 * max(sum(needs.tiles) * few * wide, 4 * sum(needs.words[1:])) > ROOM.get(device.type, WIDE) and n > few:
        return torch.cat([_sample_rows(*half, law, spare) for half in _halves(model, rows)])

    asked: list[tuple[Tensor, Callable[[Tensor], Drawn]]] = []  # counters, and what draws with their words
    looked, tops = None, []
    if any(needs.tiles):
        tiled, end = _tile(model, rows, needs, ways, before, tiles)
        if needs.tiles[0]:
            looked = tiled.p, torch.add(lane[0], end[:n] - rows.number[5], alpha=few) * wide
        if needs.tiles[1]:
            tossed = _Tiles(*(x[needs.tiles[0] :] for x in tiled))
            if law.method == "fastrg":
                tossed.p.neg_().expm1_().neg_()
            tops.append(tossed.p.amax())
            asked.append((_bytes(rows, tossed), partial(_toss, rows, law, needs.room[2], tossed, spare)))
    if any(needs.words):
        some = _spread(table[:3].flatten().long(), sum(needs.words))
        some = some._replace(row=some.row % n)
        counters = torch.cat([some.number[None], rows.word[:, some.row]])
        for head, purpose in zip(counters[3].split(needs.words), (COUNT, PROPOSAL, GAP), strict=True):
            head |= purpose << 24
        land = partial(_land, model, rows, law, needs, some, parts[0], ways[PROPOSALS], before[PROPOSALS], looked)
        asked.append((counters, land))
    if not asked:
        return rows.way.new_empty(0)
    words = scramble(torch.cat([counters for counters, _ in asked], 1), law.seed)
    words = words.split([counters.size(1) for counters, _ in asked], 1)
    drawn = [draw(some) for (_, draw), some in zip(asked, words, strict=True)]
    pair, keep, short = (torch.cat(each) for each in zip(*drawn, strict=True))
    edges, failed, *highest = torch.stack([keep.sum(), short.any(), *tops]).tolist()
    if law.method == "bernoulli" and not law.clamp and highest and highest[0] > 1 + 1e-5 + law.exploration:
        raise ValueError(over_one(highest[0] - law.exploration))
    if failed:
        return _sample_rows(model, rows, law, 4 * spare)
    return pair[_first(keep, int(edges))].sort().values


def _needs(known: list[float], spare: int) -> _Needs:
    """What follows from the sums of the table of :func:`_sample_rows`, and some maxima.

    Its rows are parts; words, what is expected of them, and keys, each by way; rows by way; tiles.
    """
    counts, slots, gaps, _, proposed, skipped, hits, _, reached, _, *rows, looked, tossed, most, _, _, longest = known
    room = [int(_enough(x, spare)) for x in (proposed, skipped, hits)]
    return _Needs(
        rows=[int(x) for x in rows],
        words=[int(counts), int(slots), int(gaps)],
        room=[x if some else 0 for x, some in zip(room, (slots, gaps, tossed), strict=True)],
        terms=1 + int(_enough(min(most, 256), spare)),
        longest=int(longest),
        tiles=[int(looked) if gaps * DENSE > reached else 0, int(tossed)],
    )


def _halves(model: _Model, rows: _Rows) -> Iterator[tuple[_Model, _Rows]]:
    """The first rows, and the others."""
    middle = rows.way.numel() // 2
    for part, begin in ((slice(middle), 0), (slice(middle, None), middle)):
        word, number, value, way = (x[..., part] for x in rows)
        number = torch.cat([number[:4], (number[4:5] - begin).clamp_(min=0), number[5:]])
        yield model._replace(rate=model.rate[part], mass=model.mass[part]), _Rows(word, number, value, way)


def _enough(expected: Any, spare: int) -> Any:
    """More than a sum of many rare chances ever is: beyond it lies less than 1 in 10^11 of it."""
    return expected + 7 * spare * MARGIN * (expected**0.5 + 1)


def _first(mask: Tensor, count: int) -> Tensor:
    """The first so many places where a mask is true; -1 behind them, where there are fewer."""
    return torch.nonzero_static(mask, size=count)[:, 0]


def _spread(sizes: Tensor, total: int) -> _Words:
    """One after the other, so many of each."""
    of = torch.repeat_interleave(sizes, output_size=total)
    end = sizes.cumsum(0)
    begin = (end - sizes)[of]
    return _Words(of, begin, torch.arange(total, device=of.device) - begin, end)


def _tile(
    model: _Model, rows: _Rows, needs: _Needs, ways: Tensor, before: Tensor, tiles: Tensor
) -> tuple[_Tiles, Tensor]:
    """Probabilities of some rows with all keys of their sequence, and how many tiles begin with a row or before it.

    Args:
        model, rows, needs: As :func:`_sample_rows` has them.
        ways: Which rows go each way, ``[3, n]``.
        before: How many rows come before each, where those of one way follow those of another.
        tiles: How many tiles begin with each row, ``[2, n]``: of rows by gaps, and of rows by coins.
    """
    few, wide = model.tile
    way = GAPS if needs.tiles[0] else COINS
    skipped = sum(needs.rows[:way])
    of, _, number, end = _spread(tiles[way - 1 :].flatten(), sum(needs.tiles))
    picked = torch.nonzero_static(ways[way:], size=sum(needs.rows[way:]) + few)[:, 1]  # -1 behind them
    slot = before[way:].flatten()[of][:, None] + torch.arange(-skipped, few - skipped, device=of.device)
    row, begin = picked[slot], number * wide  # [T, few], [T]
    reach, first, _, _, lead, _ = rows.number[:, row]
    there = (row >= 0) & (lead == lead[:, :1])
    key = begin[:, None] + torch.arange(wide, device=of.device)  # [T, wide]
    where = (first[:, :1] + key).clamp_(max=model.key.size(0) - 1)
    p = torch.bmm(model.rate[row], model.key[where].mT)
    p.masked_fill_(key[:, None] >= (reach * there)[..., None], 0)
    return _Tiles(p, row, begin), end


def _piecewise(work: Callable[..., Tensor], width: int, *given: Tensor) -> Tensor:
    """Do something to numbers that each make so many, a part of them at a time."""
    size = max(1, ROOM.get(given[0].device.type, WIDE // 4) // (8 * width))
    done = [work(*some) for some in zip(*(x.split(size) for x in given), strict=True)]
    return done[0] if len(done) == 1 else torch.cat(done)


def _land(
    model: _Model, rows: _Rows, law: _Law, needs: _Needs, some: _Words, parts: Tensor, proposing: Tensor, rank: Tensor,
    looked: tuple[Tensor, Tensor] | None, words: Tensor,
) -> Drawn:  # fmt: skip
    """Proposals, and keys at gaps, each kept with the probability that makes that of its pair exact.

    Args:
        model, rows, law, needs: As :func:`_sample_rows` has them.
        some: What the words are for: numbers of proposals, proposals, and gaps.
        parts: In how many parts the proposals of each row are counted.
        proposing, rank: Which rows have proposals, and how many such rows come before each.
        looked: Probabilities of rows by gaps, and where those of each row begin, if they are computed for all keys.
        words: The words, ``[4, .]``.
    """
    (counts, slots, _), (proposed, skipped, _) = needs.words, needs.room
    u = torch.add(words[1] >> 11, words[0], alpha=2**21) * UNIT[53]
    row, begin, number = (x[counts:] for x in some[:3])
    inside, full = [], []
    if proposed:
        count, more = _counts(rows, some.row[:counts], parts, u[:counts], needs.terms)
        inside.append(number[:slots] < count[row[:slots]])
        full.append(more)
    if skipped:
        factor, reach = rows.value[5:, row[slots:]]
        gap = torch.fmin((u[counts + slots :] + 2.0**-53).log() * factor, reach).long()
        total = gap.cumsum(0)
        place = number[slots:] + (total - (total - gap)[begin[slots:] - (counts + slots)])
        inside.append(place < reach)
    landed, last = torch.cat(inside), some.end[proposing.numel() :] - (counts + 1)
    at = torch.cat([_first(landed[:slots], proposed), _first(landed[slots:], skipped)])
    there = at >= 0
    short = torch.cat([*full, landed[last], there[proposed - 1 : proposed], there[-1:]])
    at.clamp_(min=0)  # where nothing is, the first word stands in
    step = place[at[proposed:]] * there[proposed:] if skipped else at[proposed:]
    at[proposed:].add_(slots)

    row, words = row[at], words[:3, counts:][:, at]
    number, (bound, stretch) = rows.number[:4, row], rows.value[:2, row]
    unit, first = words * UNIT[32], number[1]
    key = first[proposed:] + step
    if proposed:
        mass = model.mass[_first(proposing, needs.rows[PROPOSALS])]
        some_rows = (x[..., :proposed] for x in (rank[row], number, unit, words))
        key = torch.cat([_propose(model, mass, needs.longest, *some_rows), key])
    pair, keep = number[3] + key, there
    if law.method == "bernoulli":
        near = slice(None if looked is None else proposed)  # whose probabilities are not at hand
        p = _piecewise(lambda i, j: (model.rate[i] * model.key[j]).sum(1), model.key.size(1), row[near], key[near])
        if looked is not None:
            (few, wide), (known, begin) = model.tile, looked
            place = begin[row[proposed:]] + step.add(step // wide, alpha=(few - 1) * wide)
            p = torch.cat([p, known.flatten()[place]])
        most = torch.cat([-torch.expm1(-stretch[:proposed] * p[:proposed]), bound[proposed:]])
        keep = there & (unit[2] * most < p)
    if proposed:  # of equal pairs the first counts
        rising, order = torch.where(there, pair, 2**63 - 1)[:proposed].sort(stable=True)
        keep[:proposed].logical_and_(there[:proposed].scatter(0, order[1:], rising[1:] != rising[:-1]))
    return pair, keep, short


def _counts(rows: _Rows, row: Tensor, parts: Tensor, u: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """Poisson numbers of proposals by inversion, ``[n]``, and whether more ``terms`` are needed.

    They are drawn in equal parts of at most 256, as many as the rate needs: exp(-256) is normal.
    """
    rate = (rows.value[2] / parts)[row]
    inverse = torch.arange(1, terms, dtype=rate.dtype, device=rate.device).reciprocal()
    term = torch.cat([-torch.exp(-rate)[None], rate * inverse[:, None]]).cumprod(0)
    left = torch.cat([u[None], term]).cumsum(0)[1:]  # [terms, .]; along the first axis, every device adds one by one
    more = (left >= 0) & (term < 0)
    return torch.zeros_like(rows.way).index_add_(0, row, more.sum(0)), more[-1]


def _propose(
    model: _Model, mass: Tensor, longest: int, rank: Tensor, number: Tensor, unit: Tensor, words: Tensor
) -> Tensor:
    """Keys of proposals: a block by its share of the expected edges of the row, and a key by its share of the block.

    Args:
        model: What rows are drawn by.
        mass: Expected edges of the rows with proposals, by block.
        longest: No row may attend to more keys.
        rank: Which of these rows each proposal is of.
        number: What is known of the rows of the proposals, as in :class:`_Rows`.
        unit: Random words, ``[3, .]``, times 2**-32.
        words: The words.
    """
    (reach, first, last, _), blocks, sums = number, mass.size(1) - 1, model.sums(1 << (longest - 1).bit_length())
    share = mass.T.cumsum(0)  # [K+1, .]; along the first axis, every device adds one by one
    share = share * share[-1].reciprocal()
    above = unit[0] + 2.0**-32
    block = _piecewise(lambda of, word: (share[:, of] < word).sum(0), blocks, rank, above)

    # the first key whose running sum lies above the word's share of all; no such sum holds a later key
    known, end = block.clamp(max=blocks - 1)[:, None], last[:, None]
    target = (unit[1, :, None] + 2.0**-33) * sums[end, known]
    key, bits = first[:, None], (longest - 1).bit_length()
    rounds = max(1, -(-bits // 7))  # of at most 127 probes each
    fan = 2 ** -(-bits // rounds)
    for step in (fan**level for level in reversed(range(rounds))):
        probe = key + torch.arange(step - 1, (fan - 1) * step, step, device=key.device)
        below = sums[torch.minimum(probe, end), known] <= target
        key = key.add(below.sum(1, keepdim=True), alpha=step)
    found = torch.minimum(key, end)[:, 0]
    return torch.where(block < blocks, found, first + (words[1] * reach >> 32))


def _bytes(rows: _Rows, tiled: _Tiles) -> Tensor:
    """Counters of the first bytes of the coins of tiles, ``[4, T * rows * 16]``."""
    lane = torch.arange(16, device=tiled.begin.device)
    number = lane.add((tiled.begin // 256)[:, None, None], alpha=16)
    place, stream, head = rows.word[:, tiled.row][..., None]  # [T, rows, 1]
    return torch.stack(torch.broadcast_tensors(number, place, stream, head | COIN_BYTE << 24)).flatten(1)


def _toss(rows: _Rows, law: _Law, room: int, tiled: _Tiles, spare: int, words: Tensor) -> Drawn:
    """One coin for each pair of tiles: edge iff its 32-bit word lies below p * 2**32, see :func:`toss`.

    Only where the first byte of a word does not decide, the others are made.
    """
    p, row, begin = tiled
    (tiles, few, wide), size = p.shape, p.numel()
    some = words.view(4, tiles, few, 16).permute(1, 2, 0, 3)
    if wide < 256:
        some = some.take_along_dim((begin // 64 % 4)[:, None, None, None], 2)
    byte = some.view(torch.uint8).unflatten(-1, (16, 8))[..., :4].reshape(p.shape)
    first = (p * 256).clamp_(max=256).to(torch.int16)
    open_room, hit_room = int(_enough(size / 256, spare)), min(room, size + 1)
    close = torch.nonzero_static(byte == first, size=open_room)
    tile, lane, column = torch.cat([close, torch.nonzero_static(byte < first, size=hit_room)]).unbind(1)
    there = tile >= 0
    short = torch.cat([there[open_room - 1 : open_room], there[-1:]])
    local, key = row[tile, lane], begin[tile] + column

    undecided = slice(open_room)
    counters = torch.cat([key[None, undecided] >> 2, rows.word[:, local[undecided]]])
    counters[3].bitwise_or_(COIN_REST << 24)
    rest = scramble(counters, law.seed).gather(0, key[None, undecided] & 3)[0] >> 8
    below = rest < ((p[tile[undecided], lane[undecided], column[undecided]] * 2.0**32).long() & 0xFFFFFF)
    _, start, _, offset, _, _ = rows.number[:, local]
    there[undecided].logical_and_(below)
    return start + offset + key, there, short


def check_expected(expected: Tensor) -> None:
    """Refuse rates without a number of edges to expect."""
    if not bool(expected.isfinite().all()):
        raise ValueError(
            "Expected 'rate' and 'member' to be finite (got NaN or infinity as the expected number of edges of a row). "
            "Look for NaN in the queries and keys that they are made from."
        )


class Plan(NamedTuple):
    """How rows are sampled, and what there is to do by each way."""

    way: Tensor
    """The cheapest of the three."""
    stretch: Tensor
    """Factor of the Poisson rates."""
    slope: Tensor
    """``log(1 - bound)``: gaps between keys are exponential numbers divided by it."""
    proposals: Tensor
    """How many to expect."""
    landings: Tensor
    """How many keys to expect at gaps."""


def plan_rows(expected: Tensor, bound: Tensor, num_keys: Tensor | int, method: str) -> Plan:
    """How each row is sampled.

    With ``bound`` >= every probability of the row, rates ``c p`` with ``c = -log(1 - bound) / bound`` propose every
    pair often enough for thinning to reach p exactly. All in float64, so that every backend decides alike.

    Args:
        expected: Expected number of keys of each row, float64.
        bound: Bound on the probabilities of each row, float64.
        num_keys: Keys that the row may attend to.
        method: ``"bernoulli"`` or ``"fastrg"``.
    """
    minus, landings = -bound, bound * num_keys
    slope = torch.log1p(minus.clamp(min=1e-12 - 1))
    if method == "fastrg":
        way = torch.where(expected * PROPOSAL_COST < num_keys, PROPOSALS, COINS)
        return Plan(way, torch.ones_like(bound), slope, expected, landings)
    stretch = (slope / minus).nan_to_num(1.0)  # 1 where the bound is 0
    proposals = expected * stretch
    coins = torch.where(bound <= 1 - 1e-12, num_keys, 0)
    costs = torch.stack([coins, landings * GAP_COST, proposals * PROPOSAL_COST])
    return Plan(COINS - costs.argmin(0), stretch, slope, proposals, landings)


def toss(threshold: Tensor, place: Tensor, stream: Tensor | int, head: Tensor | int, seed: int) -> Tensor:
    """Whether the random word of each pair lies below a threshold, ``[..., m]`` bool.

    Key j looks at byte ``j % 4`` of word ``j // 64 % 4`` of counter ``16 (j // 256) + j // 4 % 16``, an order in which
    sixteen counters at a time are written in a row.

    The word's top byte and its other 24 bits come from different counters, so that a byte is drawn for every pair and
    the rest only for the one pair in 256 whose byte does not decide.

    Args:
        threshold: ``[..., m]`` int64 in ``0 .. 2**32``.
        place: Number of the query in its sequence, ``[...]``.
        stream, head: Of the query, ``[...]`` or a number for all.
        seed: 64 bits.
    """
    row = [torch.as_tensor(x, device=threshold.device).expand(threshold.shape[:-1]) for x in (place, stream, head)]
    num_keys = threshold.size(-1)
    block = torch.arange(16 * ((num_keys + 255) // 256), device=threshold.device)
    i, stream, head = (x[..., None] for x in row)
    words = torch.stack(philox(block, i, stream & WORD, head | COIN_BYTE << 24, seed), dim=-2)  # [..., 4, blocks]
    words = words.unflatten(-1, (-1, 16)).transpose(-3, -2)[..., None]  # [..., m / 256, 4, 16, 1]
    byte = torch.cat([words & 255, *(words >> 8 * part & 255 for part in (1, 2, 3))], dim=-1).flatten(-4)
    byte = byte[..., :num_keys].to(torch.int16)
    first = (threshold >> 24).to(torch.int16)
    hit, close = byte < first, byte == first
    j = close.nonzero()[:, -1]
    i, stream, head = (x[..., None].expand_as(close)[close] for x in row)
    words = torch.stack(philox(j >> 2, i, stream & WORD, head | COIN_REST << 24, seed), dim=-1)
    hit[close] = words[torch.arange(len(j), device=j.device), j % 4] >> 8 < threshold[close] & 0xFFFFFF
    return hit


def over_one(p: float) -> str:
    """Message for an SBM whose edge probability exceeds one."""
    return (
        f"Expected edge probabilities in [0, 1] (got {p:.4g}). "
        "Scale the memberships or the block matrix, or pass clamp=True to cut probabilities at 1."
    )


def check_keys(num_keys: int) -> None:
    """Raise ValueError where ``col`` in int32 cannot number the keys."""
    if num_keys > 2**31:
        raise ValueError(
            f"Expected at most 2^31 keys in a batch, whose numbers fit int32 (got {num_keys:,}). "
            "Sample fewer sequences at once."
        )
