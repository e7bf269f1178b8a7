"""Counter-based random words: the same for every backend, any number of threads, and any batch.

In: counters and a seed. Out: words of 32 bits, and the pairs that dropout keeps by them. Not here: the same words in
kernels of the CPU (:mod:`sbm_pyg.ops.cpu.random_simd`).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
WORD_MASK = 0xFFFFFFFF
MIX = (0x7FEB352D, 0x846CA68B)
"""Factors of the permutation of words by which dropout decides, and by which queries are sampled."""
MIX16 = (0x88B5, 0xDB2D)
"""Factors of the permutation of 16-bit words by which the words of groups and keys meet."""
GOLDEN = 0x9E3779B97F4A7C15
"""The golden ratio in 64 bits, whose multiples are far apart and so separate seeds of layers and of first heads."""
QUERY_STEP = _WEYL[0]
"""Distance of two sequences in the words by which queries are sampled."""

# Purposes of random words. The purpose is added to the head in the fourth counter, so no two uses share a word.
BERNOULLI_BYTE, BERNOULLI_REST, PROPOSAL_COUNT, PROPOSAL = (number << 24 for number in range(1, 5))
DROPOUT, GAP, SYSTEMATIC, RANDOM_KEY, GENERATOR, PAIR, SHARED, TARGET = (number << 24 for number in range(5, 13))


def split_ids(sequence_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Number of each sequence, the lower 32 bits; and the number of head 0 in the random words, the upper 32 bits.

    Numbers of heads are added to that of head 0. It is 0 unless the heads of a layer are divided among processes.
    """
    return sequence_ids & WORD_MASK, sequence_ids >> 32


def philox(c0: Tensor | int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int, seed: int) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., SC 2011): four random 32-bit words for each counter.

    Args:
        c0, c1, c2, c3: Counter words in ``0 .. 2**32-1``, int64 tensors that broadcast (at least one is a tensor).
        seed: Key, 64 bits.

    Returns:
        Four int64 tensors of words in ``0 .. 2**32-1``.
    """
    like = next(c for c in (c0, c1, c2, c3) if isinstance(c, Tensor))
    words = (c if isinstance(c, Tensor) else torch.full((), c, device=like.device) for c in (c0, c1, c2, c3))
    first, second, third, fourth = _scramble(torch.stack(torch.broadcast_tensors(*words)), seed)
    return first, second, third, fourth


def head_generator(head: int, seed: int) -> torch.Generator:
    """A generator on the CPU for one head of a call, independent of the number of heads."""
    high, low, *_ = philox(torch.zeros((), dtype=torch.int64, device="cpu"), 0, 0, head | GENERATOR, seed)
    return torch.Generator().manual_seed(int(high >> 1) << 32 | int(low))


def _scramble(counters: Tensor, seed: int) -> Tensor:
    """Replace counters ``[4, ...]``, contiguous and int64, by their random words of Philox, in place."""
    key = [[(seed >> 32 * part) + step * weyl & WORD_MASK for part, weyl in enumerate(_WEYL)] for step in range(10)]
    twice = [[x << 32 | y for x, y in zip(*key[step : step + 2], strict=True)] for step in range(0, 10, 2)]
    signed = [[(x ^ 2**63) - 2**63 for x in two] for two in [_MULTIPLIER, *twice]]
    multiplier, *keys = torch.tensor(signed, device=counters.device)[..., None].unbind()
    even = counters.view(2, 2, -1)[:, 0]
    halves = counters.view(torch.int32).view(2, 2, -1, 2)[..., 0]  # the lower ones; all others are and stay 0
    odd = halves[:, 1]
    for step in range(10):
        product = (even.expand(2, *even.shape) * multiplier).flatten(0, 1)[1:3]  # the second, and then the first
        if step % 2 == 0:
            product ^= keys[step // 2]  # upper halves enter this round, lower ones the next
        low, high = product.view(torch.int32).view(2, -1, 2).unbind(-1)
        if torch.compiler.is_compiling():  # which knows no results with gaps
            halves[:, 0] = high ^ odd
        else:
            torch.bitwise_xor(high, odd, out=halves[:, 0])
        odd = low
    halves[:, 1] = odd
    return counters


def _mixed(word: Tensor) -> Tensor:
    """A permutation of 32-bit words in which each bit depends on all (lowbias32, Wellons 2018)."""
    word = ((word ^ word >> 16) * MIX[0]) & WORD_MASK
    word = ((word ^ word >> 15) * MIX[1]) & WORD_MASK
    return word ^ word >> 16


def _mixed16(word: Tensor) -> Tensor:
    """A permutation of the lower 16 bits in which each bit depends on all (hash-prospector, Wellons 2018)."""
    word = word & 0xFFFF
    word = ((word ^ word >> 8) * MIX16[0]) & 0xFFFF
    word = ((word ^ word >> 7) * MIX16[1]) & 0xFFFF
    return word ^ word >> 9


def shared_words(group: Tensor, key: Tensor, sequence_id: int, head: Tensor, seed: int) -> Tensor:
    """A random word for each pair of a group of queries and a key, int64; groups, keys and heads broadcast.

    Both sides have two words of their own, that is four halves of 16 bits. Two halves of the group and of the key make
    the upper half of the pair's word, and the other two its lower half. So the words of a group with all keys are
    independent, and so are any three pairs.

    Args:
        group: Numbers of groups of queries.
        key: Positions of keys.
        sequence_id, head: As in :func:`split_ids`.
        seed: 64 bits.
    """
    queries, keys = (philox(x, side, sequence_id, head | SHARED, seed)[:2] for x, side in ((group, 1), (key, 0)))
    upper, lower = (
        _mixed16(_mixed16((query_word >> 16) + (key_word >> 16)) ^ (query_word + key_word & 0xFFFF))
        for query_word, key_word in zip(queries, keys, strict=True)
    )
    return upper << 16 | lower


def query_words(position: Tensor, sequence_id: Tensor, seed: int) -> Tensor:
    """A random word for each position of a sequence, int64, by their numbers in ``0 .. 2**32-1``, which broadcast."""
    return _mixed((sequence_id * QUERY_STEP + position + query_start(seed)) & WORD_MASK)


def query_start(seed: int) -> int:
    """The 32-bit number that :func:`query_words` adds to all positions."""
    return seed * GOLDEN >> 32 & WORD_MASK


def dropout_words(
    heads: int, num_queries: int, num_keys: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A random word for each query and for each key of a head, ``[H, N]`` and ``[H, M]`` int64, by its number.

    Word j of a side is word ``j // 16 % 4`` of counter ``16 (j // 64) + j % 16``.
    """
    side, head = torch.arange(2, device=device)[:, None, None], torch.arange(heads, device=device)[:, None]
    block = torch.arange(16 * ((max(num_queries, num_keys) + 63) // 64), device=device)
    words = torch.stack(philox(block, side, 0, head | DROPOUT, seed), dim=-2)  # [2, H, 4, blocks]
    query, key = words.unflatten(-1, (-1, 16)).transpose(-3, -2).flatten(2)  # [H, .] each
    return query[:, :num_queries], key[:, :num_keys]


def dropout_keeps(query_word: Tensor, key_word: Tensor, dropout: float) -> Tensor:
    """True for pairs that dropout keeps: the mixed exclusive or of their words is compared with a threshold.

    Each pair is dropped with the same probability, and any three pairs independently. No pair depends on another one.
    """
    return _mixed(query_word ^ key_word) >= round(float(dropout) * 2**32)
