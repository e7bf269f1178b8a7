"""Graphs of a block model, for CUDA devices, in Triton: rows by gaps, by proposals, by pairs, or with shared draws.

In and out: the tensors of ``sample_sbm`` in :mod:`sbm_pyg.ops`, on one device. Same law and same random words as
:func:`.reference.sampling.sample_sbm`, and the same edges wherever float64 gives both the same numbers
(docs/kernels.md). Not here: parts that kernels share (:mod:`.rows`).

Memberships are summed up in panels of 64 keys. By these sums each row chooses its way. Then the kernel of each way
counts the edges of its rows, the counts are summed up, the host waits for the number of edges, and the same kernels run
again and write. Both runs are one compiled program, so they find the same edges. A row needs no memory in between, but
for proposals a bit for each key: some programs take these rows by turns and clear their own bits.

Decisions are made in float64, or in float32 where bounds on its errors leave no doubt. Multiplications and additions
are not fused. A model without blocks gets one of rate 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import random_words
from ..reference import sampling as reference_sampling
from .rows import float_bits, from_bits, launch, triton_kernel

_PURPOSE_BERNOULLI_BYTE = tl.constexpr(random_words.BERNOULLI_BYTE)
_PURPOSE_BERNOULLI_REST = tl.constexpr(random_words.BERNOULLI_REST)
_PURPOSE_PROPOSAL_COUNT = tl.constexpr(random_words.PROPOSAL_COUNT)
_PURPOSE_PROPOSAL, _PURPOSE_GAP = tl.constexpr(random_words.PROPOSAL), tl.constexpr(random_words.GAP)
_PURPOSE_SHARED = tl.constexpr(random_words.SHARED)
_MIX16_FIRST, _MIX16_SECOND = (tl.constexpr(factor) for factor in random_words.MIX16)
_BY_PROPOSALS, _BY_GAPS = tl.constexpr(reference_sampling.PROPOSALS), tl.constexpr(reference_sampling.GAPS)
_BY_PAIRS = tl.constexpr(reference_sampling.PAIRS)
_PANEL = tl.constexpr(reference_sampling.KEYS_PER_PANEL)
_LARGEST_BOUND = tl.constexpr(1 - 1e-12)
_WORD_RANGE = tl.constexpr(2.0**32)
PANELS_PER_STEP, PAIR_ROWS, SHARED_ROWS = 16, 8, 16
"""Panels, rows by pairs, and rows that share draws, that a program takes at once."""
GAP_WORDS, PROPOSAL_WORDS, KEYS_PER_SCAN = 32, 16, 16
"""Number of random words of a row, and of keys whose memberships are added, in one step of a program."""
MAX_REGISTERS, MAX_GAP_REGISTERS = 224, 96
"""Registers of a thread. Without the limit, the assembler spills some so that more programs run at once.

The kernel of gaps needs no more than 96. With 96 in place of 224, so that more rows are sampled at once, an H200 drew
5 % of 16,384 x 16,384 pairs in 8 heads in 16.6 ms instead of 22.2.
"""
MAX_PROPOSAL_BYTES = 2**26
"""Bytes for proposals, at most; more if one program, which needs two bits for each key, takes more."""

# ------------------------------------------------------------------ what rows share


@triton.jit
def _log1p(x):
    """Logarithm of 1 + x, in which the rounding error of 1 + x cancels."""
    y = 1 + x
    return tl.where(y == 1, x, tl.log(y) * (x / tl.where(y == 1, 1, y - 1)))


@triton.jit
def _expm1(x):
    """``exp(x) - 1`` for x <= 0."""
    y = tl.exp(x)
    few = (y == 1) | (y == 0)
    return tl.where(y == 1, x, tl.where(y == 0, -1, (y - 1) * (x / tl.log(tl.where(few, 2, y)))))


@triton.jit
def _row_words(seed, number, position, sequence_id, head):
    """Four random words of each row; :func:`.random_words.split_ids` documents the arguments."""
    head = (head + (sequence_id >> 32)).to(tl.uint32)
    return tl.philox(seed, number.to(tl.uint32), position.to(tl.uint32), sequence_id.to(tl.uint32), head)


@triton.jit
def _fraction(high, low):
    """The 53 bits of two words, as an integer in float64."""
    return (high.to(tl.int64) << 21 | low.to(tl.int64) >> 11).to(tl.float64)


@triton.jit
def _panel_of(ptr, slot, sequences, SIZE: tl.constexpr = _PANEL):
    """Sequence of a slot, and the number of the slot's panel in it.

    Sequence b has slots from ``ptr[b] // SIZE + b`` on, as many as it has panels of this size, or one more.
    """
    low, high = slot * 0, slot * 0 + sequences
    # Bisect the slots at which sequences begin.
    while high - low > 1:
        middle = (low + high) // 2
        below = tl.load(ptr + middle) // SIZE + middle <= slot
        low, high = tl.where(below, middle, low), tl.where(below, high, middle)
    return low, slot - (tl.load(ptr + low) // SIZE + low)


@triton.jit
def _load_matrix(source, rows, exists, first, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Some columns of some rows of a matrix, ``[rows, TILE]`` in float64; zeros where the mask is false."""
    block = first + tl.arange(0, TILE)
    inside = exists[:, None] & (block < BLOCKS)[None, :]
    return tl.load(source + rows[:, None] * BLOCKS + block[None, :], mask=inside, other=0).to(tl.float64)


@triton.jit
def _load_columns_of_row(source, row, end, first, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """The first columns of one row of a matrix, ``[TILE]`` in float64; zeros after the last column."""
    block = first + tl.arange(0, TILE)
    return tl.load(source + row * BLOCKS + block, mask=block < end, other=0).to(tl.float64)


@triton.jit
def _pair_probs(rate, row, member, ends, exists, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Probabilities of some pairs of a row, without exploration."""
    p = tl.zeros(ends.shape, tl.float64)
    for first in range(0, BLOCKS, TILE):
        y = _load_columns_of_row(rate, row, BLOCKS, first, BLOCKS, TILE)
        p += tl.sum(_load_matrix(member, ends, exists, first, BLOCKS, TILE) * y[None, :], 1)
    return p


@triton.jit
def _append_keys(col, used, key, keep, writing):
    """Append the keys that are kept, if ``writing``; returns the new end."""
    count = keep.to(tl.int64)
    tl.store(col + used + tl.cumsum(count, 0) - count, key.to(col.dtype.element_ty), mask=count * writing != 0)
    return used + tl.sum(count, 0)


@triton.jit
def _sampled_row(row, tasks, query_ptr, key_ptr, sequence_ids, queries, CAUSAL: tl.constexpr):
    """Sequence of a row, its position, its number of allowed keys and the first one, its sequence number, and head."""
    sequence, head = tl.load(tasks + row) // 4, row // queries
    position = row - head * queries - tl.load(query_ptr + sequence)
    shift = tl.load(key_ptr + sequence)
    allowed = tl.load(key_ptr + sequence + 1) - shift
    if CAUSAL:
        allowed = tl.minimum(allowed, position + 1)
    return sequence, position, allowed, shift, tl.load(sequence_ids + sequence), head


# ------------------------------------------------------------------ which way each row takes


@triton_kernel
def _panel_sums_kernel(
    member, key_ptr, sums, sequences: tl.int64, keys: tl.int64, count: tl.int64, BLOCKS: tl.constexpr,
    TILE: tl.constexpr
):  # fmt: skip
    """Sum and largest of the memberships of each panel, ``[2, H, count, K]``."""
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sequence, panel = _panel_of(key_ptr, slot, sequences)
    number = tl.load(key_ptr + sequence) + panel * _PANEL + tl.arange(0, _PANEL)
    exists = number < tl.load(key_ptr + sequence + 1)
    for first in range(0, BLOCKS, TILE):
        z = _load_matrix(member, head * keys + number, exists, first, BLOCKS, TILE)
        block = first + tl.arange(0, TILE)
        target = sums + (head * count + slot) * BLOCKS + block
        tl.store(target, tl.sum(z, 0), mask=block < BLOCKS)
        tl.store(target + tl.num_programs(1) * count * BLOCKS, tl.max(z, 0), mask=block < BLOCKS)


@triton_kernel
def _join_panels_kernel(
    sums, key_ptr, count: tl.int64, segments: tl.int64, BLOCKS: tl.constexpr, TILE: tl.constexpr,
    PANELS_PER_STEP: tl.constexpr
):  # fmt: skip
    """Replace sums and maxima of single panels by running sums and maxima over the panels of a sequence."""
    sequence, head_part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    parts: tl.constexpr = (BLOCKS + TILE - 1) // TILE
    head, first, begin = head_part // parts, head_part % parts * TILE, tl.load(key_ptr + sequence)
    panels = (tl.load(key_ptr + sequence + 1) - begin + _PANEL - 1) // _PANEL
    slot, step = head * count + begin // _PANEL + sequence, tl.arange(0, PANELS_PER_STEP)
    most = sums + segments * count * BLOCKS  # segments: heads
    total, top = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    # Take some panels at a time, and carry the sums and maxima of all before.
    for panel in range(0, panels, PANELS_PER_STEP):
        exists, block = panel + step < panels, first + tl.arange(0, TILE)
        position = (slot + panel + step)[:, None] * BLOCKS + block[None, :]
        inside = exists[:, None] & (block < BLOCKS)[None, :]
        x = tl.load(sums + position, mask=inside, other=0)
        tl.store(sums + position, tl.cumsum(x, 0) + total[None, :], mask=inside)
        total += tl.sum(x, 0)
        x = tl.load(most + position, mask=inside, other=0)
        before = step[:, None, None] >= step[None, :, None]
        tops = tl.maximum(tl.max(tl.where(before, x[None, :, :], 0), 1), top[None, :])
        tl.store(most + position, tops, mask=inside)
        top = tl.maximum(top, tl.max(x, 0))


@triton_kernel
def _plan_kernel(
    rate, member, sums, query_ptr, key_ptr, floats, tasks, sequences: tl.int64, queries: tl.int64, keys: tl.int64,
    count: tl.int64, exploration: tl.int64, proposal_cost: tl.int64, gap_cost: tl.int64, CAUSAL: tl.constexpr,
    FASTRG: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Choose how each row is drawn. Write its method and sequence, its bound, and the factor of its gaps or rates.

    See :func:`.reference.sampling.plan_rows`. Whose expected number of edges is no number takes no way, and infinity is
    noted.
    """
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sequence, panel = _panel_of(query_ptr, slot, sequences)
    # Take 64 queries of a sequence, and the number of keys that each may attend to.
    position = panel * _PANEL + tl.arange(0, _PANEL)
    query, begin = tl.load(query_ptr + sequence) + position, tl.load(key_ptr + sequence)
    exists, row = query < tl.load(query_ptr + sequence + 1), head * queries + query
    length = tl.load(key_ptr + sequence + 1) - begin
    # `before`: panels whose keys are all allowed
    allowed, before = position * 0 + length, (length + _PANEL - 1) // _PANEL
    if CAUSAL:
        allowed, before = tl.minimum(position + 1, length), tl.minimum(panel, before)
    # Read the running sums and maxima of the last panel whose keys are all allowed.
    last, seen = head * count + begin // _PANEL + sequence + before - 1, tl.where(before > 0, BLOCKS, 0)
    most = sums + tl.num_programs(1) * count * BLOCKS
    expected, bound = tl.zeros([_PANEL], tl.float64), tl.zeros([_PANEL], tl.float64)
    for first in range(0, BLOCKS, TILE):
        total = tl.zeros([_PANEL, TILE], tl.float64)
        top = total + _load_columns_of_row(most, last, seen, first, BLOCKS, TILE)[None, :]
        # Add the keys of the panel in which a causal row ends, one by one.
        if CAUSAL:
            for number in range(panel * _PANEL, tl.minimum(length, (panel + 1) * _PANEL)):
                z = _load_columns_of_row(member, head * keys + begin + number, BLOCKS, first, BLOCKS, TILE)
                z = tl.where((position >= number)[:, None], z[None, :], 0)
                total, top = total + z, tl.maximum(top, z)
        total += _load_columns_of_row(sums, last, seen, first, BLOCKS, TILE)[None, :]
        # Compute the expected number of edges, and a bound on the probabilities.
        y = _load_matrix(rate, row, exists, first, BLOCKS, TILE)
        expected, bound = expected + tl.sum(y * total, 1), bound + tl.sum(y * top, 1)

    eta, room = from_bits(exploration, tl.float64), allowed.to(tl.float64)
    expected, bound = expected + eta * room, bound + eta
    # Choose the cheapest way, in float64 as on the CPU.
    if FASTRG:
        factor = tl.full(bound.shape, 1, tl.float64)
        way = tl.where(expected * from_bits(proposal_cost, tl.float64) < room, _BY_PROPOSALS, _BY_PAIRS)
    else:
        sure = tl.full([], _LARGEST_BOUND, tl.float64)
        steps = _log1p(-tl.where(bound < sure, bound, sure))
        stretch = tl.where(bound == 0, 1, steps / -tl.where(bound == 0, 1, bound))
        proposals = expected * stretch * from_bits(proposal_cost, tl.float64)
        gaps = bound * room * from_bits(gap_cost, tl.float64)
        few = (bound <= sure) & (proposals == proposals) & (gaps == gaps) & ((gaps < room) | (proposals < room))
        way = tl.where(few, tl.where(gaps <= proposals, _BY_GAPS, _BY_PROPOSALS), _BY_PAIRS)
        factor = tl.where(way == _BY_GAPS, 1 / steps, stretch)
    # Write the way, the bound and the factor of each row.
    sound = expected < float("inf")
    segments = tl.num_programs(1) * queries
    tl.store(tasks + row, 4 * sequence + tl.where(sound, way, 3), mask=exists)
    tl.store(floats + row, bound, mask=exists)
    tl.store(floats + segments + row, factor, mask=exists)
    tl.store(floats + 2 * segments + row, tl.where(sound, eta * 0, float("inf")), mask=exists)


# ------------------------------------------------------------------ the ways


@triton_kernel
def _gaps_kernel(
    rate, member, floats, tasks, query_ptr, key_ptr, sequence_ids, ptr, col, segments: tl.int64, queries: tl.int64,
    keys: tl.int64, seed: tl.int64, exploration: tl.int64, writing: tl.int64, CAUSAL: tl.constexpr,
    BLOCKS: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Keys at geometric distances, as if every p were the row's bound, each kept with probability p / bound."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(tasks + row) % 4 == _BY_GAPS:
        _none, position, allowed, shift, sequence_id, head = _sampled_row(
            row, tasks, query_ptr, key_ptr, sequence_ids, queries, CAUSAL
        )
        bound, spread = tl.load(floats + row), tl.load(floats + segments + row)
        used = tl.load(ptr + row, mask=writing != 0, other=0)
        last, number = allowed * 0 - 1, allowed * 0
        # Draw geometric gaps until one passes the last key.
        while last < allowed:
            drawn = number + tl.arange(0, WORDS)
            one, two, three, _four = _row_words(seed, drawn, position, sequence_id, head | _PURPOSE_GAP)
            # Their running sum gives the positions.
            step = tl.log((_fraction(one, two) + 1) * 2.0**-53) * spread
            step = tl.where(step < allowed, step, allowed).to(tl.int64) + 1
            landing = last + tl.cumsum(step, 0)
            inside = landing < allowed
            # Thin the positions to the exact probability, and append those that stay.
            p = _pair_probs(rate, row, member, head * keys + shift + landing, inside, BLOCKS, TILE)
            p += from_bits(exploration, tl.float64)
            keep = inside & (three.to(tl.int64).to(tl.float64) * bound < p * _WORD_RANGE)
            used = _append_keys(col, used, shift + landing, keep, writing)
            last, number = tl.max(landing, 0), number + WORDS
        tl.store(ptr + row + 1, used, mask=writing == 0)


@triton.jit
def _poisson(rate, seed, position, sequence_id, head):
    """Poisson counts by inversion, in equal parts of at most 256, as many as the rate needs."""
    parts = tl.maximum(tl.ceil(rate / 256), 1).to(tl.int64)
    part_rate, count = rate / parts.to(tl.float64), parts * 0
    for part in range(parts):
        one, two, _three, _four = _row_words(
            seed, position * 0 + part, position, sequence_id, head | _PURPOSE_PROPOSAL_COUNT
        )
        term, number = tl.exp(-part_rate), parts.to(tl.float64) * 0
        left = _fraction(one, two) * 2.0**-53 - term
        while (left >= 0) & (term > 0):
            number += 1
            term *= part_rate * (1 / number)
            left -= term
        count += number.to(tl.int64)
    return count


@triton.jit
def _first_above(source, stride, count, target, scale):
    """Index of the first ascending number whose integer part, in units, exceeds each target; else ``count``."""
    low, high, size = (target * 0).to(tl.int64), (target * 0).to(tl.int64) + count, count
    # Bisect for all targets at once.
    while size > 0:
        middle, searching = (low + high) // 2, low < high
        number = tl.load(source + middle * stride, mask=searching, other=0)
        if scale is not None:
            number = tl.floor(number * scale)
        below = searching & (number <= target)
        low, high = tl.where(below, middle + 1, low), tl.where(below, high, middle)
        size //= 2
    return low


@triton_kernel
def _proposals_kernel(
    rate, member, floats, tasks, query_ptr, key_ptr, sequence_ids, ptr, col, sums, table, marks, segments: tl.int64,
    queries: tl.int64, keys: tl.int64, count: tl.int64, seed: tl.int64, exploration: tl.int64, writing: tl.int64,
    CAUSAL: tl.constexpr, FASTRG: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr,
    KEYS_PER_SCAN: tl.constexpr,
):  # fmt: skip
    """Poisson proposals in each row, by block and key, without repeats, thinned to the exact probability."""
    program, eta = tl.program_id(0).to(tl.int64), from_bits(exploration, tl.float64)
    whole, mass = table + 2 * program * BLOCKS, table + (2 * program + 1) * BLOCKS
    width = (keys + 31) // 32
    seen, taken = marks + 2 * program * width, marks + (2 * program + 1) * width
    for row in range(program, segments, tl.num_programs(0)):
        if tl.load(tasks + row) % 4 == _BY_PROPOSALS:
            sequence, position, allowed, shift, sequence_id, head = _sampled_row(
                row, tasks, query_ptr, key_ptr, sequence_ids, queries, CAUSAL
            )
            stretch, used = tl.load(floats + segments + row), tl.load(ptr + row, mask=writing != 0, other=0)
            panel, slot, first_member = (
                (allowed - 1) // _PANEL,
                head * count + shift // _PANEL + sequence,
                head * keys + shift,
            )

            # the mass of each block, up to each
            total_mass, within = tl.full([], 0, tl.float64), panel * _PANEL + tl.arange(0, _PANEL)
            for first in range(0, BLOCKS, TILE):
                if CAUSAL:
                    total = tl.sum(
                        _load_matrix(member, first_member + within, within < allowed, first, BLOCKS, TILE), 0
                    )
                    total += _load_columns_of_row(
                        sums, slot + panel - 1, tl.where(panel > 0, BLOCKS, 0), first, BLOCKS, TILE
                    )
                else:
                    total = _load_columns_of_row(sums, slot + panel, BLOCKS, first, BLOCKS, TILE)
                so_far = total_mass + tl.cumsum(total * _load_columns_of_row(rate, row, BLOCKS, first, BLOCKS, TILE), 0)
                block = first + tl.arange(0, TILE)
                tl.store(whole + block, total, mask=block < BLOCKS)
                tl.store(mass + block, so_far, mask=block < BLOCKS)
                total_mass = tl.max(so_far, 0)
            total_mass += eta * allowed.to(tl.float64)
            # Clear the bits of the row.
            for first in range(0, (allowed + 31) // 32, 32):
                word = first + tl.arange(0, 32)
                clear = (word * 0).to(tl.int32)
                tl.store(seen + word, clear, mask=word * 32 < allowed)
                tl.store(taken + word, clear, mask=word * 32 < allowed)
            tl.debug_barrier()

            # Draw a Poisson number of proposals, some at a time.
            drawn, scale = _poisson(total_mass * stretch, seed, position, sequence_id, head), _WORD_RANGE / total_mass
            for begin in range(0, drawn, WORDS):
                step = tl.arange(0, WORDS)
                exists = begin + step < drawn
                one, two, three, _four = _row_words(seed, begin + step, position, sequence_id, head | _PURPOSE_PROPOSAL)
                share = two.to(tl.int64)
                # Draw the block of each, then the panel of its key, by bisection in running sums.
                block = _first_above(mass, 1, allowed * 0 + BLOCKS, one.to(tl.int64).to(tl.float64), scale)
                cluster = tl.minimum(block, BLOCKS - 1)
                target = (share.to(tl.float64) + 0.5) * 2.0**-32 * tl.load(whole + cluster)
                here = _first_above(sums + slot * BLOCKS + cluster, BLOCKS, panel, target, None)
                base = tl.load(sums + (slot + here - 1) * BLOCKS + cluster, mask=here > 0, other=0)
                chosen = here * _PANEL
                # Find the key in the panel by running sums of its memberships.
                for offset in range(0, _PANEL, KEYS_PER_SCAN):
                    number = (here * _PANEL + offset)[:, None] + tl.arange(0, KEYS_PER_SCAN)[None, :]
                    inside = number < allowed
                    z = tl.load(member + (first_member + number) * BLOCKS + cluster[:, None], mask=inside, other=0).to(
                        tl.float64
                    )
                    below = inside & (tl.cumsum(z, 1) + base[:, None] <= target[:, None])
                    chosen += tl.sum(below.to(tl.int64), 1)
                    base += tl.sum(z, 1)
                chosen = tl.minimum(chosen, here * _PANEL + _PANEL - 1)
                chosen = tl.where(block < BLOCKS, tl.minimum(chosen, allowed - 1), share * allowed >> 32)

                # Drop repeats, among these proposals and by the bits of earlier ones.
                again = (chosen[:, None] == chosen[None, :]) & (step[:, None] > step[None, :])
                new = exists & (tl.sum(again.to(tl.int32), 1) == 0)
                bit = (chosen % 32).to(tl.int32)
                mark = tl.full(bit.shape, 1, tl.int32) << bit
                new &= (tl.atomic_or(seen + chosen // 32, mark, mask=new) >> bit & 1) == 0
                # Thin the others to the exact probability.
                if not FASTRG:
                    p = _pair_probs(rate, row, member, first_member + chosen, new, BLOCKS, TILE) + eta
                    new &= three.to(tl.int64).to(tl.float64) * -_expm1(-stretch * p) < p * _WORD_RANGE
                tl.atomic_or(taken + chosen // 32, mark, mask=new.to(tl.int64) * writing != 0)
                used += tl.sum(new.to(tl.int64), 0)
                tl.debug_barrier()
            tl.store(ptr + row + 1, used, mask=writing == 0)
            # Append the keys of the bits, in order.
            if writing != 0:
                used = tl.load(ptr + row)
                for first in range(0, (allowed + 31) // 32, 8):
                    word, step = first + tl.arange(0, 8), tl.arange(0, 32)
                    mark = tl.load(taken + word, mask=word * 32 < allowed, other=0, volatile=True)
                    keep = tl.reshape((mark[:, None] >> step[None, :] & 1) != 0, [256])
                    used = _append_keys(col, used, shift + 32 * first + tl.arange(0, 256), keep, writing)
            tl.debug_barrier()


@triton.jit
def _exact_probs(rate, real, queries, member, exists, keys, blocks, exploration, ROWS: tl.constexpr):
    """Probabilities of some rows with 64 keys in float64, from pointers to memberships in the first block."""
    p = tl.zeros([ROWS, 64], tl.float64)
    for block in range(blocks):
        y = tl.load(rate + block * queries, mask=real, other=0).to(tl.float64)
        z = tl.load(member + block * keys, mask=exists, other=0).to(tl.float64)
        p += y[:, None] * z[None, :]
    return p + from_bits(exploration, tl.float64)


@triton.jit
def _store_hits(hit, key, used, col, writing, ROWS: tl.constexpr):
    """Write the sampled keys, of 64, of each row from index ``used`` on, and return their number."""
    count = hit.to(tl.int64)
    target = col + used[:, None] + tl.cumsum(count, 1) - count
    edges = tl.broadcast_to(key[None, :].to(col.dtype.element_ty), [ROWS, 64])
    tl.store(target, edges, mask=count * writing != 0)
    return tl.sum(count, 1)


@triton.jit
def _bernoulli_words(seed, begin, position, sequence_id, head, ROWS: tl.constexpr):
    """Random words of pairs, ``[ROWS, 64]``, with 64 keys from ``begin`` on; see :func:`.bernoulli_draws`."""
    counter, part = tl.arange(0, 16)[None, :], begin // 64 % 4
    # Draw the first byte of each word, then the other 24 bits.
    one, two, three, four = _row_words(
        seed, begin // 256 * 16 + counter, position[:, None], sequence_id, head | _PURPOSE_BERNOULLI_BYTE
    )
    word = tl.where(part == 0, one, tl.where(part == 1, two, tl.where(part == 2, three, four)))
    byte = tl.reshape(word[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :] & 255, [ROWS, 64])
    one, two, three, four = _row_words(
        seed, begin // 4 + counter, position[:, None], sequence_id, head | _PURPOSE_BERNOULLI_REST
    )
    low_bits = tl.reshape(tl.join(tl.join(one, three), tl.join(two, four)), [ROWS, 64]) >> 8
    return byte << 24 | low_bits


@triton_kernel
def _pairs_kernel(
    rate, member, floats, tasks, query_ptr, key_ptr, sequence_ids, ptr, col, segments: tl.int64, queries: tl.int64,
    keys: tl.int64, seed: tl.int64, exploration: tl.int64, writing: tl.int64, limit: tl.int64, blocks: tl.int64,
    CAUSAL: tl.constexpr, FASTRG: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One Bernoulli draw for each pair of some rows and 64 keys: an edge if its word is less than p * 2**32; see
    :func:`.bernoulli_draws`.

    Bounds in float32 decide almost all of them. Where one is not sure, or a probability may exceed ``limit``, float64
    decides on all of these rows and keys. All terms of a probability are positive, so relative errors do not grow in
    sums; in addition to products and sums, factors, exploration, bounds and words are rounded. Rates and memberships
    have tokens last, ``[H, K, N]`` and ``[H, K, M]``.
    """
    error = (blocks + 16).to(tl.float32) * 2.0**-24
    slack: tl.constexpr = 2.0**-20 if FASTRG else 0.0  # of the exponential
    head, query = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = head * queries + query
    # Take those of the rows that go by pairs, sequence by sequence.
    task = tl.load(tasks + row, mask=query < queries, other=3)
    by_pairs, sequences = task % 4 == _BY_PAIRS, task // 4
    used = tl.load(ptr + row, mask=by_pairs.to(tl.int64) * writing != 0, other=0)
    highest = tl.zeros([ROWS], tl.float64)
    least, most = tl.min(tl.where(by_pairs, sequences, 2**62), 0), tl.max(tl.where(by_pairs, sequences, -1), 0)
    for sequence in range(least, most + 1):
        shift, sequence_id = tl.load(key_ptr + sequence), tl.load(sequence_ids + sequence)
        position, allowed = query - tl.load(query_ptr + sequence), tl.load(key_ptr + sequence + 1) - shift
        if CAUSAL:
            allowed = tl.minimum(allowed, position + 1)
        in_sequence = by_pairs & (sequences == sequence)
        allowed = tl.where(in_sequence, allowed, 0)
        # Compare 64 keys at a time with their words.
        for begin in range(0, tl.max(allowed, 0), 64):
            number = begin + tl.arange(0, 64)
            exists, inside = number < tl.max(allowed, 0), number[None, :] < allowed[:, None]
            word = _bernoulli_words(seed, begin, position, sequence_id, head, ROWS)
            # Sum up probabilities in float32.
            low = tl.zeros([ROWS, 64], tl.float32)
            for block in range(blocks):
                y = tl.load(rate + (head * blocks + block) * queries + query, mask=in_sequence, other=0).to(tl.float32)
                z = tl.load(member + (head * blocks + block) * keys + shift + number, mask=exists, other=0).to(
                    tl.float32
                )
                low += y[:, None] * z[None, :]
            low += from_bits(exploration, tl.float32)
            if FASTRG:
                low = 1 - tl.exp(-low)
            # An edge is sure if the lower bound passes its word, and ruled out if the upper does not.
            least_p, most_p = low * (1 - error) - slack, low * (1 + error) + slack
            needed = (word.to(tl.float32) + 1) * 2.0**-32
            hit = inside & (least_p >= needed)
            sure = (hit | (most_p < needed)) & (most_p <= from_bits(limit, tl.float32))
            # Decide in float64 where one pair is open.
            if tl.min(tl.where(inside, sure.to(tl.int32), 1)) == 0:
                p = _exact_probs(
                    rate + head * blocks * queries + query, in_sequence, queries,
                    member + head * blocks * keys + shift + number, exists, keys, blocks, exploration, ROWS,
                )  # fmt: skip
                if FASTRG:
                    p = -_expm1(-p)
                p = tl.where(inside, p, 0)
                highest = tl.maximum(highest, tl.max(p, 1))
                hit = inside & (word.to(tl.int64) < (tl.minimum(p, 1) * _WORD_RANGE).to(tl.int64))
            # Write the keys of the hits, or only count them.
            used += _store_hits(hit, shift + number, used, col, writing, ROWS)
    tl.store(ptr + row + 1, used, mask=by_pairs.to(tl.int64) > writing)
    tl.store(floats + 2 * segments + row, highest, mask=by_pairs.to(tl.int64) > writing)


# ------------------------------------------------------------------ rows that share draws


@triton.jit
def _mixed_halves(x):
    """A permutation of the lower 16 bits; see :mod:`.random_words`."""
    x = x & 0xFFFF
    x = ((x ^ (x >> 8)) * _MIX16_FIRST) & 0xFFFF
    x = ((x ^ (x >> 7)) * _MIX16_SECOND) & 0xFFFF
    return x ^ (x >> 9)


@triton.jit
def _shared_words(seed, group, number, sequence_id, head):
    """Random words of groups and keys, ``[groups, keys]``; see :func:`.random_words.shared_words`."""
    a, b, _c, _d = _row_words(seed, group, group * 0 + 1, sequence_id, head | _PURPOSE_SHARED)
    c, d, _e, _f = _row_words(seed, number, number * 0, sequence_id, head | _PURPOSE_SHARED)
    a, b, c, d = a[:, None], b[:, None], c[None, :], d[None, :]
    upper = _mixed_halves(_mixed_halves((a >> 16) + (c >> 16)) ^ (a + c))
    return upper << 16 | _mixed_halves(_mixed_halves((b >> 16) + (d >> 16)) ^ (b + d))


@triton_kernel
def _shared_kernel(
    rate, member, highest, query_ptr, key_ptr, sequence_ids, ptr, col, sequences: tl.int64, queries: tl.int64,
    keys: tl.int64, seed: tl.int64, exploration: tl.int64, writing: tl.int64, row_group: tl.int64, limit: tl.int64,
    blocks: tl.int64, CAUSAL: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Compare the pairs of some rows of a sequence with the words of their groups, as :func:`_pairs_kernel` does.

    ``GROUPS`` is 1 if all rows are in one group, whose words are then made once, and else ``ROWS``.
    """
    error = (blocks + 16).to(tl.float32) * 2.0**-24
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sequence, tile = _panel_of(query_ptr, slot, sequences, ROWS)
    shift, sequence_id = tl.load(key_ptr + sequence), tl.load(sequence_ids + sequence)
    # Take some rows of a sequence, and the number of keys that each may attend to.
    position = tile * ROWS + tl.arange(0, ROWS)
    query = tl.load(query_ptr + sequence) + position
    real, row = query < tl.load(query_ptr + sequence + 1), head * queries + query
    allowed = position * 0 + tl.load(key_ptr + sequence + 1) - shift
    if CAUSAL:
        allowed = tl.minimum(allowed, position + 1)
    allowed, top = tl.where(real, allowed, 0), tl.zeros([ROWS], tl.float64)
    used = tl.load(ptr + row, mask=real.to(tl.int64) * writing != 0, other=0)
    group = (tile * ROWS + tl.arange(0, GROUPS)) // row_group
    for begin in range(0, tl.max(allowed, 0), 64):
        number = begin + tl.arange(0, 64)
        exists, inside = number < tl.max(allowed, 0), number[None, :] < allowed[:, None]
        # Make the words of the groups and 64 keys.
        word = _shared_words(seed, group, number, sequence_id, head)
        # Sum up probabilities in float32.
        low = tl.zeros([ROWS, 64], tl.float32)
        for block in range(blocks):
            y = tl.load(rate + (head * blocks + block) * queries + query, mask=real, other=0).to(tl.float32)
            z = tl.load(member + (head * blocks + block) * keys + shift + number, mask=exists, other=0).to(tl.float32)
            low += y[:, None] * z[None, :]
        low += from_bits(exploration, tl.float32)
        # An edge is sure if the lower bound passes its word, and ruled out if the upper does not.
        needed = (word.to(tl.float32) + 1) * 2.0**-32
        hit = inside & (low * (1 - error) >= needed)
        sure = (hit | (low * (1 + error) < needed)) & (low * (1 + error) <= from_bits(limit, tl.float32))
        # Decide in float64 where one pair is open.
        if tl.min(tl.where(inside, sure.to(tl.int32), 1)) == 0:
            p = _exact_probs(
                rate + head * blocks * queries + query, real, queries,
                member + head * blocks * keys + shift + number, exists, keys, blocks, exploration, ROWS,
            )  # fmt: skip
            p = tl.where(inside, tl.where(p < float("inf"), p, float("inf")), 0)  # NaN, too
            top = tl.maximum(top, tl.max(p, 1))
            hit = inside & (word.to(tl.int64) < (tl.minimum(p, 1) * _WORD_RANGE).to(tl.int64))
        # Write the keys of the hits, or only count them.
        used += _store_hits(hit, shift + number, used, col, writing, ROWS)
    tl.store(ptr + row + 1, used, mask=real.to(tl.int64) > writing)
    tl.store(highest + row, top, mask=real.to(tl.int64) > writing)


def _sample_shared(
    rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, seed: int,
    exploration: float, clamp: bool, is_causal: bool, row_group: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (heads, queries, blocks), keys, sequences = rate.shape, member.size(1), query_ptr.numel() - 1
    turned, most = (rate.mT.contiguous(), member.mT.contiguous()), reference_sampling.MAX_PROB + exploration
    highest = torch.zeros(heads * queries, dtype=torch.float64, device=rate.device)
    grid, groups = (queries // SHARED_ROWS + sequences, heads), SHARED_ROWS if row_group % SHARED_ROWS else 1
    more = (sequences, queries, keys, seed, float_bits(exploration))
    limit = float_bits(1e38 if clamp else most)  # beyond 1e38, and for NaN, float64 decides

    def draw(ptr: Tensor, col: Tensor, writing: int) -> None:
        launch(
            _shared_kernel, grid, *turned, highest, query_ptr, key_ptr, sequence_ids, ptr, col, *more, writing,
            row_group, limit, blocks, CAUSAL=is_causal, ROWS=SHARED_ROWS, GROUPS=groups, num_warps=4,
            enable_fp_fusion=False, maxnreg=MAX_REGISTERS,
        )  # fmt: skip

    # Count the edges of each row, wait for their number, and run the same kernel to write them.
    dtype = torch.int32 if keys < 2**31 else torch.int64
    counts = query_ptr.new_zeros(heads * queries + 1)
    draw(counts, torch.empty(0, dtype=dtype, device=rate.device), 0)
    rowptr = counts.cumsum(0)
    edges, top = torch.stack([rowptr[-1], highest.amax()]).tolist()
    if top == float("inf"):
        reference_sampling.check_expected(highest)
    if not clamp and top > most:
        raise ValueError(reference_sampling.probability_error(top - exploration))
    col = torch.empty(int(edges), dtype=dtype, device=rate.device)
    draw(rowptr, col, 1)
    return rowptr, col


# ------------------------------------------------------------------ the op


def sample_sbm(
    rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, seed: int, method: str,
    exploration: float, clamp: bool, is_causal: bool, row_group: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if rate.size(2) == 0:
        rate, member = (torch.nn.functional.pad(x, (0, 1)) for x in (rate, member))
    (heads, queries, blocks), keys, sequences = rate.shape, member.size(1), query_ptr.numel() - 1
    rows, device = heads * queries, rate.device
    dtype = torch.int32 if keys < 2**31 else torch.int64
    if not rows * keys:
        return query_ptr.new_zeros(rows + 1), query_ptr.new_empty(0, dtype=dtype)
    query_ptr, key_ptr, sequence_ids = (x.contiguous() for x in (query_ptr, key_ptr, sequence_ids))
    rate, member, eta = rate.detach().contiguous(), member.detach().contiguous(), float_bits(exploration)
    if row_group > 1:
        options = (seed, exploration, clamp, is_causal, row_group)
        return _sample_shared(rate, member, query_ptr, key_ptr, sequence_ids, *options)
    # Sum up the memberships in panels, and let each row choose its way.
    slots, query_slots = (tokens // reference_sampling.KEYS_PER_PANEL + sequences for tokens in (keys, queries))
    sums = torch.empty(2, heads, slots, blocks, dtype=torch.float64, device=device)
    floats = torch.empty(3, rows, dtype=torch.float64, device=device)  # bounds, factors, largest probabilities
    tasks, counts = query_ptr.new_empty(rows), query_ptr.new_zeros(rows + 1)
    tile, law = {"BLOCKS": blocks, "TILE": 16}, {"CAUSAL": is_causal, "FASTRG": method == "fastrg"}
    two, four = ({"num_warps": warps, "enable_fp_fusion": False, "maxnreg": MAX_REGISTERS} for warps in (2, 4))
    one = four | {"num_warps": 1, "maxnreg": MAX_GAP_REGISTERS}
    launch(_panel_sums_kernel, (slots, heads), member, key_ptr, sums, sequences, keys, slots, **tile, **four)
    grid, step = (sequences, heads * triton.cdiv(blocks, tile["TILE"])), {"PANELS_PER_STEP": PANELS_PER_STEP}
    launch(_join_panels_kernel, grid, sums, key_ptr, slots, heads, **step, **tile, **four)
    costs = (float_bits(reference_sampling.PROPOSAL_COST), float_bits(reference_sampling.GAP_COST))
    launch(
        _plan_kernel, (query_slots, heads), rate, member, sums, query_ptr, key_ptr, floats, tasks, sequences, queries,
        keys, slots, eta, *costs, **law, **tile, **four,
    )  # fmt: skip

    # Proposals need a bit for each key, so a limited number of programs takes these rows by turns.
    marked = triton.cdiv(keys, 32)
    programs = max(1, min(rows, MAX_PROPOSAL_BYTES // (8 * marked + 16 * blocks)))
    table = torch.empty(programs, 2, blocks, dtype=torch.float64, device=device)
    marks = torch.empty(programs, 2, marked, dtype=torch.int32, device=device)
    arguments = (rate, member, floats, tasks, query_ptr, key_ptr, sequence_ids)
    turned = rate.mT.contiguous(), member.mT.contiguous()  # neighbors in memory are tokens
    sizes, most = (rows, queries, keys), reference_sampling.MAX_PROB + exploration
    limit = float_bits(1e38 if clamp or method == "fastrg" else most)  # beyond 1e38, and for NaN, float64 decides

    def draw(ptr: Tensor, col: Tensor, writing: int) -> None:
        ends = (seed, eta, writing)
        if method != "fastrg":
            step = {"CAUSAL": is_causal, "WORDS": GAP_WORDS}
            launch(_gaps_kernel, rows, *arguments, ptr, col, *sizes, *ends, **step, **tile, **one)
        launch(
            _proposals_kernel, programs, *arguments, ptr, col, sums, table, marks, *sizes, slots, *ends,
            WORDS=PROPOSAL_WORDS, KEYS_PER_SCAN=KEYS_PER_SCAN, **law, **tile, **two,
        )  # fmt: skip
        tiles = (triton.cdiv(queries, PAIR_ROWS), heads)
        launch(
            _pairs_kernel, tiles, *turned, *arguments[2:], ptr, col, *sizes, *ends, limit, blocks, ROWS=PAIR_ROWS,
            **law, **four
        )  # fmt: skip

    # Count the edges of each row, wait for their number, and run the same kernels to write them.
    draw(counts, torch.empty(0, dtype=dtype, device=device), 0)
    rowptr = counts.cumsum(0)
    edges, highest = torch.stack([rowptr[-1], floats[2].amax()]).tolist()
    if highest == float("inf"):
        reference_sampling.check_expected(floats[2])
    if method == "bernoulli" and not clamp and highest > most:
        raise ValueError(reference_sampling.probability_error(highest - exploration))
    col = torch.empty(int(edges), dtype=dtype, device=device)
    draw(rowptr, col, 1)
    return rowptr, col
