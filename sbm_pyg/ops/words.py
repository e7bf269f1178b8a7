"""Counter-based random words: the same for every backend, any number of threads, and any batch.

In: counters and a seed. Out: words of 32 bits, and what dropout makes of them. Not here: how CPU kernels make
the same words (``bits``).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
_MIX = (0x7FEB352D, 0x846CA68B)

# What a random word is for; the purpose is part of its counter, so no two uses ever share a word.
COIN_BYTE, COIN_REST, COUNT, PROPOSAL, DROPOUT, GAP, SYSTEMATIC, RANDOM_KEY = range(1, 9)


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
    first, second, third, fourth = torch.broadcast_tensors(*words)
    even, odd = scramble(torch.stack([first, third]), torch.stack([second, fourth]), seed)
    return even[0], odd[0], even[1], odd[1]


def scramble(even: Tensor, odd: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Philox of counters whose first and third words are ``even`` ``[2, ...]``, and their others ``odd``."""
    shape, device = (2, *[1] * (even.dim() - 1)), even.device
    keys = [[(seed >> 32 * part) + step * weyl & WORD for part, weyl in enumerate(_WEYL)] for step in range(10)]
    multiplier = torch.tensor(_MULTIPLIER, device=device).view(shape)
    odd = odd.to(torch.int32)
    for key in torch.tensor(keys, device=device).to(torch.int32).view(10, *shape):
        low, high = (even * multiplier).flip(0).view(torch.int32).unflatten(-1, (-1, 2)).unbind(-1)
        even, odd = high.bitwise_xor(odd).bitwise_xor_(key).view(torch.uint32).long(), low
    return even, odd.view(torch.uint32).long()


def _mixed(word: Tensor) -> Tensor:
    """A permutation of 32-bit words in which each bit depends on all (lowbias32, Wellons 2018)."""
    word = ((word ^ word >> 16) * _MIX[0]) & WORD
    word = ((word ^ word >> 15) * _MIX[1]) & WORD
    return word ^ word >> 16


def dropout_words(
    heads: int, num_queries: int, num_keys: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A random word for each query and for each key of a head, ``[H, N]`` and ``[H, M]`` int64, by its number.

    Word j of a side is word ``j // 16 % 4`` of counter ``16 (j // 64) + j % 16``.
    """
    side, head = torch.arange(2, device=device)[:, None, None], torch.arange(heads, device=device)[:, None]
    block = torch.arange(16 * ((max(num_queries, num_keys) + 63) // 64), device=device)
    words = torch.stack(philox(block, side, 0, head | DROPOUT << 24, seed), dim=-2)  # [2, H, 4, blocks]
    query, key = words.unflatten(-1, (-1, 16)).transpose(-3, -2).flatten(2)  # [H, .] each
    return query[:, :num_queries], key[:, :num_keys]


def dropout_keeps(query_word: Tensor, key_word: Tensor, dropout: float) -> Tensor:
    """Whether dropout keeps the pairs of these words, bool: it looks at both, joined by exclusive or and mixed.

    So each pair is dropped with the same probability, any three independently, and whether one is depends on no other.
    """
    return _mixed(query_word ^ key_word) >= round(dropout * 2**32)
