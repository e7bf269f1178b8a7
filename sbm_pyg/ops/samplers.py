"""Sampling in plain torch, all rows of all heads and sequences at once: the meaning, and what other devices run.

In and out: as :func:`sbm_pyg.ops.sample_sbm` and :func:`sbm_pyg.ops.sample_systematic`. There are few operations, and
few waits for the device (docs/kernels.md). Not here: checks of what comes in, and attention (``reference``).

Shapes: N queries, M keys, E edges, H heads, K blocks, B sequences; row ``r = h * N + i``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .reference import edge_row, reach, segments
from .words import COIN_BYTE, COIN_REST, COUNT, GAP, PROPOSAL, SYSTEMATIC, WORD, philox, scramble

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
ROOM = {"cpu": 2**21}
"""Bytes of the largest tensors that rows are drawn with at a time, by kind of device: what the caches of a CPU hold."""
WIDE = 2**30
"""The same on other devices, where few large operations are fastest."""


Scan = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
SUMS: Scan = lambda x: x.cumsum(2), torch.add
TOPS: Scan = lambda x: x.cummax(2).values, torch.maximum


def _running(given: list[tuple[Tensor, Scan]], ptr: Tensor, longest: int) -> list[Tensor]:
    """Running sums, or maxima, of the numbers of each sequence, ``[H, M, K]`` in float64.

    They are taken inside of panels of 64 numbers of a sequence, and joined with those over the panels before, which are
    taken likewise: in an order that depends on no other sequence, and with few additions one after the other.

    Args:
        given: Numbers, not negative, ``[H, M, K]``, and what is taken of them.
        ptr: Offsets of the sequences, ``[B+1]``.
        longest: No sequence has more numbers.
    """
    total, ends = given[0][0].size(1), ((ptr.diff() + (PANEL - 1)) // PANEL).cumsum(0)
    starts = torch.nn.functional.pad(ends, (1, 0))
    panels = total // PANEL + ends.numel()
    batch = torch.searchsorted(ends, torch.arange(panels, device=ptr.device), right=True).clamp_(max=ends.numel() - 1)
    number = torch.arange(panels * PANEL, device=ptr.device).view(panels, PANEL)
    number = number + (ptr - starts * PANEL)[batch][:, None]  # which numbers a panel holds
    beyond = number >= ptr[1:][batch][:, None]
    held = number.clamp(max=total - 1)
    found = [inside(x[:, held].double().masked_fill_(beyond[..., None], 0)) for x, (inside, _) in given]
    if longest > PANEL:
        lone = number[:, :1] == ptr[batch][:, None]  # panels that none comes before
        above = [(x[:, :, -1], scan) for x, (_, scan) in zip(found, given, strict=True)]
        for place, upper in enumerate(_running(above, starts, -(-longest // PANEL))):
            join = given[place][1][1]
            found[place] = join(found[place], upper.roll(1, 1).masked_fill_(lone, 0)[:, :, None])
    number.masked_fill_(beyond, total)
    running = []
    for x in found:
        out = x.new_empty(x.size(0), total + 1, x.size(3))
        out[:, number] = x
        running.append(out[:, :total])
    return running


class _Law(NamedTuple):
    """What the graph is drawn by."""

    seed: int
    method: str
    exploration: float
    clamp: bool


class _Model(NamedTuple):
    """Rates ``[R, K]``, memberships ``[H*M, K]``, and what makes their running sums, all in float64."""

    rate: Tensor
    key: Tensor
    sums: Callable[[], Tensor]
    tile: tuple[int, int]  # rows and keys whose probabilities are computed together


class _Rows(NamedTuple):
    """What is known of each of some rows."""

    number: Tensor
    """``[6, n]``: its number; how many keys it may attend to; the number of the first of them among those of all heads,
    and that of the pair among all pairs; the first row of its head and sequence; the keys of its sequence."""
    word: Tensor
    """``[3, n]``: its place in its sequence, the stream of that, and its head."""
    value: Tensor
    """``[3, n]``: a bound on its probabilities, the factor of its rates, and how many proposals are to be expected."""
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
    pair = torch.cat(_sample_rows(*plan, law))  # row * M + key, rising
    starts = torch.arange(rows + 1, device=pair.device) * num_keys
    return torch.searchsorted(pair, starts), (pair % num_keys).to(dtype)


def _plan(
    query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, law: _Law, is_causal: bool
) -> tuple[_Model, _Rows]:
    """What rows are drawn by, and which way each takes. All that decides on a row comes from keys that it may reach."""
    (heads, num_queries, blocks), (num_keys, sequences) = query.shape, (key.size(1), key_ptr.numel() - 1)
    table = torch.stack([query_ptr[:-1], key_ptr[:-1], key_ptr.diff(), sequence_ids & WORD])
    batch = torch.repeat_interleave(query_ptr.diff(), output_size=num_queries)
    begin, shift, length, stream = table[:, batch].repeat(1, heads)
    row = torch.arange(heads * num_queries, device=key.device)
    head = row // num_queries
    place = row - head * num_queries - begin
    reach = torch.minimum(place + 1, length) if is_causal else length
    first = head * num_keys + shift

    keys = key.double()
    if is_causal:
        running = [x.flatten(0, 1) for x in _running([(keys, SUMS), (keys, TOPS)], key_ptr, num_keys)]
        ends = [x[first + reach - 1] for x in running]
        sums = cache(lambda: running[0])
    else:
        sums = cache(lambda: _running([(keys, SUMS)], key_ptr, num_keys)[0].flatten(0, 1))
        flat = keys.transpose(0, 1).flatten(1)  # [M, H*K]
        parts = (segments(flat, key_ptr, kind).view(sequences, heads, blocks) for kind in ("sum", "max"))
        ends = [x.transpose(0, 1)[:, batch].flatten(0, 1) for x in parts]
    tile = (64, 256) if num_keys >= 128 * sequences else (16, 64)
    model = _Model(query.double().flatten(0, 1), keys.flatten(0, 1), sums, tile)
    expected, bound = ((model.rate * end).sum(1) for end in ends)
    expected, bound = expected + law.exploration * reach, bound + law.exploration
    stretch, way = plan_rows(expected, bound, reach, law.method)
    return model, _Rows(
        torch.stack([row, reach, first, row * num_keys + shift, row - place, length]),
        torch.stack([place, stream, head]),
        torch.stack([bound, stretch, expected * stretch]),
        way,
    )


class _Tiles(NamedTuple):
    """Probabilities of pairs, some rows by some keys of their sequence at a time."""

    p: Tensor  # [T, rows, keys]; 0 for what is no pair
    row: Tensor  # [T, rows]
    begin: Tensor  # the first key, [T]
    at: Tensor  # where those of each row begin in `p`, [n]


class _Ask(NamedTuple):
    """Random words: their numbers, of which rows, and what for."""

    number: Tensor
    row: Tensor
    purpose: Tensor | int


Way = Generator[_Ask, tuple[Tensor, ...], tuple[Tensor, Tensor, Tensor]]
"""Draws some rows: asks for random words, and returns pairs, whether they are edges, and whether words were too few."""


def _sample_rows(model: _Model, rows: _Rows, law: _Law, spare: int = 1) -> list[Tensor]:
    """Numbers of the edges of some consecutive rows, among all pairs, in rising order, in parts.

    Room for random words is made before it is known how many are needed: for ``spare`` times what is almost certainly
    enough. Where it was not, all is done again with more.
    """
    row, reach, _, _, lead, length = rows.number
    bound, _, proposals = rows.value
    few, wide = model.tile
    ways = rows.way == torch.arange(3, device=row.device)[:, None]
    amounts = ways.double()
    parts = (proposals / 256).ceil().clamp(min=1)
    likely = bound * reach
    slots, draws = _enough(torch.stack([proposals, likely]), spare).ceil()
    draws = torch.minimum(draws, reach + 1)
    proposed = torch.stack([parts, slots, proposals, proposals / parts]) * amounts[0]
    skipped = torch.stack([draws, likely, reach]) * amounts[1]
    # rows whose probabilities are computed for all keys
    whole = ways[COINS] | (ways[GAPS] & (skipped[0].sum() * DENSE > skipped[2].sum()))
    before = whole.cumsum(0) - whole.long()
    rank = before - before[(lead - row[0]).clamp_(min=0)]
    tiles = (length + (wide - 1)) // wide * (whole & (rank % few == 0))
    sums = torch.cat([amounts, proposed, skipped, torch.stack([whole, tiles, ~proposals.isfinite()])]).sum(1)
    *needs, wrong, most, longest = torch.cat([sums, torch.stack([proposed[3], reach]).amax(1)]).tolist()
    if wrong:
        check_expected(proposals)
    proposing, skipping, tossing, *proposed_sums, _, draws_sum, landings, _, whole_rows, tiles_sum = map(int, needs)
    n, room = row.numel(), ROOM.get(row.device.type, WIDE)
    if 8 * max(tiles_sum * few * wide, 4 * (draws_sum + proposed_sums[1])) > room and n > few:
        halves = (_Rows(*(x[..., part] for x in rows)) for part in (slice(n // 2), slice(n // 2, n)))
        return [edge for half in halves for edge in _sample_rows(model, half, law, spare)]

    order = rows.way.argsort(stable=True)
    tiled = _tile(model, rows, law, whole, before, rank, tiles, whole_rows, tiles_sum) if tiles_sum else None
    started: list[Way] = []
    if proposing:
        picked, sizes = order[:proposing], [*proposed_sums[:2], int(_enough(proposed_sums[2], spare))]
        terms = 1 + int(_enough(most, spare))
        started.append(_propose(model, rows, picked, law, slots[picked].long(), sizes, terms, int(longest)))
    if skipping:
        picked, at = order[proposing : proposing + skipping], tiled if whole_rows > tossing else None
        landings = int(_enough(landings, spare))
        started.append(_skip(model, rows, picked, law, draws[picked].long(), draws_sum, landings, at))
    hit, top = row.new_empty(0, dtype=torch.bool), 0 * bound[0]
    if tiled is not None and tossing:
        if law.method == "fastrg":
            tiled.p.neg_().expm1_().neg_()
        top, hit = tiled.p.amax(), torch.empty(tiled.p.shape, dtype=torch.bool, device=row.device)
        started.append(_flip(rows, tiled, ways[COINS] if whole_rows > tossing else None, hit, spare))
    pair, keep, short = _together(started, rows, law.seed)
    edges, hits, failed, highest = torch.stack([keep.sum(), hit.sum(), short, top]).tolist()
    if law.method == "bernoulli" and not law.clamp and highest > 1 + 1e-5 + law.exploration:
        raise ValueError(over_one(highest - law.exploration))
    if failed:
        return _sample_rows(model, rows, law, 4 * spare)
    pair = pair[_first(keep, int(edges))]
    if tiled is not None and hits:
        pair = torch.cat([pair, _named(rows, tiled, _first(hit.flatten(), int(hits)))])
    return [pair.sort().values]


def _enough(expected: Any, spare: int) -> Any:
    """More than a sum of many rare chances ever is: beyond it lies less than 1 in 10^11 of it."""
    return expected + spare * MARGIN * (7 * expected**0.5 + 7)


def _first(mask: Tensor, count: int) -> Tensor:
    """The first so many places where a mask is true; -1 behind them, where there are fewer."""
    return torch.nonzero_static(mask, size=count)[:, 0]


def _tile(
    model: _Model, rows: _Rows, law: _Law, whole: Tensor, before: Tensor, rank: Tensor, tiles: Tensor, whole_rows: int,
    tiles_sum: int,
) -> _Tiles:  # fmt: skip
    """Probabilities of some rows with all keys of their sequence.

    Args:
        model, rows, law: As :func:`_sample_rows` has them.
        whole: Which rows, ``[n]`` bool.
        before, rank: How many of them come before each row, at all and in its sequence.
        tiles: How many tiles begin with each row.
        whole_rows, tiles_sum: How many rows and tiles there are.
    """
    few, wide = model.tile
    ends, picked = tiles.cumsum(0), _first(whole, whole_rows)
    starts, tile = ends - tiles, torch.arange(tiles_sum, device=tiles.device)
    lead = torch.searchsorted(ends, tile, right=True)  # the row that a tile begins with
    begin = (tile - starts[lead]) * wide
    slot = before[lead][:, None] + torch.arange(few, device=tiles.device)
    row = picked[slot.clamp(max=whole_rows - 1)]  # [T, few]
    number, reach, first, _, sequence, _ = rows.number[:, row]
    there = (slot < whole_rows) & (sequence == rows.number[4, lead][:, None])
    key = begin[:, None] + torch.arange(wide, device=tiles.device)  # [T, wide]
    where = (first[:, :1] + key).clamp_(max=model.key.size(0) - 1)
    p = torch.bmm(model.rate[number], model.key[where].mT).add_(law.exploration)
    p.masked_fill_(key[:, None] >= (reach * there)[..., None], 0)
    # the row that the first tile of a row begins with
    mine = picked[(before - rank % few).clamp_(min=0, max=whole_rows - 1)]
    return _Tiles(p, row, begin, starts[mine] * (few * wide) + rank % few * wide)


def _together(ways: list[Way], rows: _Rows, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """What several ways return, joined. They run side by side, so that all words they ask for are made at once."""
    asked, ends = [(way, next(way)) for way in ways], []
    while asked:
        number, row = (torch.cat(each) for each in ([ask.number for _, ask in asked], [ask.row for _, ask in asked]))
        place, stream, head = rows.word[:, row]
        sizes = [ask.row.numel() for _, ask in asked]
        for part, (_, ask) in zip(head.split(sizes), asked, strict=True):
            part |= ask.purpose << 24
        words = scramble(torch.stack([number, stream]), torch.stack([place, head]), seed)
        going = []
        for (way, _), even, odd in zip(asked, *(each.split(sizes, 1) for each in words), strict=True):
            try:
                going.append((way, way.send((even[0], odd[0], even[1], odd[1]))))
            except StopIteration as end:
                ends.append(end.value)
        asked = going
    pairs, keep, short = zip(*ends, strict=True)
    return torch.cat(pairs), torch.cat(keep), torch.stack(short).any()


def _products(model: _Model, row: Tensor, key: Tensor) -> Tensor:
    """Probabilities of some pairs, without exploration."""
    size = max(1, ROOM.get(row.device.type, WIDE // 4) // (8 * model.rate.size(1)))
    parts = zip(row.split(size), key.split(size), strict=True)
    return torch.cat([(model.rate[i] * model.key[j]).sum(1) for i, j in parts])


def _propose(
    model: _Model, rows: _Rows, picked: Tensor, law: _Law, slots: Tensor, sizes: list[int], terms: int, longest: int
) -> Way:
    """Poisson proposals in each of these rows, without repeats, thinned to the exact probability."""
    (parts_sum, slots_sum, landings), blocks = sizes, model.rate.size(1)
    arange = partial(torch.arange, device=picked.device)
    table = rows.number[:4, picked]
    row, reach, first, _ = table
    _, stretch, proposals = rows.value[:, picked]
    sums = model.sums()
    total = sums[first + reach - 1]
    mass = torch.cat([model.rate[row] * total, (law.exploration * reach)[:, None]], 1)
    cumulative = mass.T.cumsum(0)  # [K+1, n]; along the first axis, every device adds one by one

    # Poisson counts by inversion, in equal parts of at most 256, as many as the rate needs: exp(-256) is normal.
    parts = (proposals / 256).ceil().clamp(min=1).long()
    asks = []
    for size, room, purpose in ((parts, parts_sum, COUNT), (slots, slots_sum, PROPOSAL)):
        of = torch.repeat_interleave(size, output_size=room)
        asks.append((arange(room) - (size.cumsum(0) - size)[of], of, torch.full_like(of, purpose)))
    number, local, purposes = (torch.cat(each) for each in zip(*asks, strict=True))
    words = yield _Ask(number, picked[local], purposes)
    of, number, local = local[:parts_sum], number[parts_sum:], local[parts_sum:]
    u = (words[0][:parts_sum] << 21 | words[1][:parts_sum] >> 11).double() * 2.0**-53
    rate = (cumulative[-1] * stretch / parts)[of]
    term = torch.cat([torch.exp(-rate)[None], rate * (1 / arange(1.0, terms, dtype=rate.dtype))[:, None]]).cumprod(0)
    left = torch.cat([u[None], -term]).cumsum(0)[1:]  # [terms, .]
    count = ((left >= 0) & (term > 0)).sum(0)
    counts = torch.zeros_like(parts).index_add_(0, of, count)

    taken = number < counts[local]
    short = (counts > slots).any() | (counts.sum() > landings) | (count == terms).any()
    at = _first(taken, landings)
    there, at = at >= 0, at.clamp_(min=0)
    local, words = local[at], tuple(word[parts_sum:][at] for word in words[:3])

    # the block: inverse CDF in 32-bit fixed point
    bounds = (cumulative * (2.0**32 / cumulative[-1])).nan_to_num(2.0**32).long()
    bounds[-1] = 2**32
    bounds = bounds.T + (arange(picked.numel()) << 32)[:, None]
    block = torch.searchsorted(bounds.flatten(), words[0] + (local << 32), right=True) - local * (blocks + 1)

    # the key: the first whose running sum lies above the word's share of all; no such sum holds a later key
    row, reach, first, pair = table[:, local]
    known, start, last = (x[:, None] for x in (block.clamp(max=blocks - 1), first, reach - 1))
    target = (words[1].double() + 0.5)[:, None] * 2.0**-32 * total[local].gather(1, known)
    key, step = torch.zeros_like(last), PANEL ** (max(0, (longest - 1).bit_length() - 1) // 6)
    while step:
        probe = key + arange(step - 1, (PANEL - 1) * step, step)
        below = sums[start + torch.minimum(probe, last), known] <= target
        key, step = key + step * below.sum(1, keepdim=True), step // PANEL
    key = torch.where(block < blocks, torch.minimum(key, last)[:, 0], words[1] * reach >> 32)

    pair, order = torch.where(there, pair + key, 2**63 - 1).sort(stable=True)
    keep = there[order] & (pair.diff(prepend=pair.new_full((1,), -1)) != 0)
    if law.method == "bernoulli":
        p = _products(model, row[order], (first + key)[order]) + law.exploration
        keep &= words[2][order].double() * -torch.expm1(-stretch[local[order]] * p) < p * 2.0**32
    return pair, keep, short


def _skip(
    model: _Model, rows: _Rows, picked: Tensor, law: _Law, draws: Tensor, draws_sum: int, landings: int,
    tiled: _Tiles | None,
) -> Way:  # fmt: skip
    """Keys at geometric distances, as if every p were the row's bound, each kept with probability p / bound."""
    (few, wide), reach = model.tile, rows.number[1, picked]
    bound = rows.value[0, picked]
    of = torch.repeat_interleave(draws, output_size=draws_sum)
    ends = draws.cumsum(0)
    begins = ends - draws
    words = yield _Ask(torch.arange(draws_sum, device=of.device) - begins[of], picked[of], GAP)
    u = ((words[0] << 21 | words[1] >> 11) + 1).double() * 2.0**-53
    step = torch.fmin(u.log() * (1 / torch.log1p(-bound))[of], reach[of]).long() + 1
    place = step.cumsum(0)
    place = place - (place - step + 1)[begins][of]
    inside = place < reach[of]
    short = (inside.sum() > landings) | inside[ends - 1].any()

    at = _first(inside, landings)
    there, at = at >= 0, at.clamp_(min=0)
    of, place = of[at], place[at]
    local = picked[of]
    row, _, first, pair = rows.number[:4, local]
    if tiled is None:
        p = _products(model, row, first + place) + law.exploration
    else:
        p = tiled.p.flatten()[tiled.at[local] + place // wide * (few * wide) + place % wide]
    return pair + place, there & (words[2][at] * bound[of] < p * 2.0**32), short


def _flip(rows: _Rows, tiled: _Tiles, tossing: Tensor | None, hit: Tensor, spare: int) -> Way:
    """One coin for each pair of the rows of tiles: edge iff its 32-bit word lies below p * 2**32, see :func:`toss`.

    It fills ``hit``, which says of all pairs whether the first byte of their word makes them edges, and returns those
    whose first byte does not decide. Where ``tossing`` does not say which rows of the tiles are meant, all are.
    """
    p, wide, begin, row = tiled.p, tiled.p.size(2), tiled.begin, tiled.row
    number = (begin // 256 * 16)[:, None, None] + torch.arange(16, device=p.device)
    number, of = torch.broadcast_tensors(number, row[..., None])
    words = yield _Ask(number.flatten(), of.flatten(), COIN_BYTE)
    some = torch.stack(words).view(4, *number.shape).permute(1, 2, 0, 3)  # [T, rows, 4, 16]
    if wide < 256:
        some = some.take_along_dim((begin // 64 % 4)[:, None, None, None], 2)
    byte = some.contiguous().view(torch.uint8).unflatten(-1, (16, 8))[..., :4].reshape(p.shape)
    first = (p * 256).clamp_(max=256).to(torch.int16)
    first = first if tossing is None else first.masked_fill_(~tossing[row][..., None], -1)
    close = (byte == first).flatten()
    torch.lt(byte, first, out=hit)

    at = _first(close, int(_enough(p.numel() / 256, spare)))
    there, at = at >= 0, at.clamp_(min=0)
    local, key = row.flatten()[at // wide], begin[at // (p.size(1) * wide)] + at % wide
    words = yield _Ask(key >> 2, local, COIN_REST)
    rest = torch.stack(words).gather(0, (key & 3)[None])[0] >> 8
    keep = there & (rest < ((p.flatten()[at].clamp_(max=1) * 2.0**32).long() & 0xFFFFFF))
    return rows.number[3, local] + key, keep, close.sum() > at.numel()


def _named(rows: _Rows, tiled: _Tiles, at: Tensor) -> Tensor:
    """Numbers of pairs, given by their places in tiles, among all pairs."""
    wide = tiled.p.size(2)
    return rows.number[3, tiled.row.flatten()[at // wide]] + tiled.begin[at // tiled.p[0].numel()] + at % wide


def check_expected(expected: Tensor) -> None:
    """Refuse rates without a number of edges to expect."""
    if not bool(expected.isfinite().all()):
        raise ValueError(
            "Expected 'rate' and 'member' to be finite (got NaN or infinity as the expected number of edges of a row). "
            "Look for NaN in the queries and keys that they are made from."
        )


def plan_rows(expected: Tensor, bound: Tensor, num_keys: Tensor | int, method: str) -> tuple[Tensor, Tensor]:
    """How each row is sampled: the factor of its Poisson rates, and the cheapest of the three ways.

    With ``bound`` >= every probability of the row, rates ``c p`` with ``c = -log(1 - bound) / bound`` propose every
    pair often enough for thinning to reach p exactly. All in float64, so that every backend decides alike.

    Args:
        expected: Expected number of keys of each row, float64.
        bound: Bound on the probabilities of each row, float64.
        num_keys: Keys that the row may attend to.
        method: ``"bernoulli"`` or ``"fastrg"``.
    """
    if method == "fastrg":
        return torch.ones_like(bound), torch.where(expected * PROPOSAL_COST < num_keys, PROPOSALS, COINS)
    stretch = (torch.log1p(-bound.clamp(max=1 - 1e-12)) / -bound).nan_to_num(1.0)  # 1 where the bound is 0
    proposals, gaps = expected * stretch * PROPOSAL_COST, bound * num_keys * GAP_COST
    way = (gaps <= proposals).long()  # PROPOSALS or GAPS
    few = (bound <= 1 - 1e-12) & (torch.minimum(gaps, proposals) < num_keys)
    return stretch, way.masked_fill_(~few, COINS)


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


def cut_chance(chance: Tensor) -> Tensor:
    """Probabilities in float64, cut to [0, 1]; NaN counts as 0."""
    return chance.detach().double().nan_to_num(0.0).clamp(0, 1)


def check_keys(num_keys: int) -> None:
    """Raise ValueError where ``col`` in int32 cannot number the keys."""
    if num_keys > 2**31:
        raise ValueError(
            f"Expected at most 2^31 keys in a batch, whose numbers fit int32 (got {num_keys:,}). "
            "Sample fewer sequences at once."
        )


def sample_systematic(
    chance: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, heads: int, seed: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    chance = cut_chance(chance)
    queries = query_ptr.diff()
    batch = torch.repeat_interleave(queries, output_size=chance.numel())
    place = torch.arange(chance.numel(), device=chance.device) - query_ptr[batch]
    head = torch.arange(heads, device=chance.device)[:, None] | SYSTEMATIC << 24
    start = (philox(0, place, sequence_ids[batch] & WORD, head, seed)[0].double() / 2**32).flatten()  # [H*N]
    allowed = reach(query_ptr, key_ptr, chance.numel(), is_causal)
    spacing, shift, keys = (x.repeat(heads) for x in (1 / chance, key_ptr[batch], allowed))
    counts = (keys * chance.repeat(heads) - start).ceil().clamp(min=0).long()
    rowptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    num_keys, num_edges = torch.stack([key_ptr[-1], rowptr[-1]]).tolist()
    check_keys(num_keys)
    row = edge_row(rowptr, num_edges)
    number = torch.arange(num_edges, device=row.device) - rowptr[row]
    key = ((number + start[row]) * spacing[row]).long()
    return rowptr, (shift[row] + torch.minimum(key, keys[row] - 1)).int()
