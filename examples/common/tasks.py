"""Tasks of recall: which value came with this key, somewhere before?

* **MQAR**, multi-query associative recall (Arora et al., "Zoology", 2023): pairs of key and value, all keys different and
  all values different; then the same keys again, at positions that a power law draws, among random tokens. The answer to a key
  is its value. The law is that of their code, ``zoology/data/multiquery_ar.py``; the random numbers are ours.
* **Joint recall** (Zhan et al., "Overcoming Long-Context Limitations of State-Space Models", 2025): the same key has another
  value in each context. A sequence lists each context, a token of its own and then its pairs; then it goes through contexts and
  keys again in another order. The code follows their description; how the orders are drawn is ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

POWER = 0.01  # of the law of the places of questions in MQAR
NEAR = 16  # tokens; what stood before, but not so near, must be looked for


class Examples(NamedTuple):
    """Sequences of one length, S of them with Q questions each."""

    tokens: Tensor  # [S, L] int64
    places: Tensor  # [S, Q], of the questions
    answers: Tensor  # [S, Q], the token to be predicted there
    sources: (
        Tensor  # [S, Q], places of the values that tell the answers, -1 for none; [S, Q, R] if each of R values does
    )

    def take(self, chosen: Tensor) -> Examples:
        return Examples(*(part[chosen] for part in self))


@dataclasses.dataclass(frozen=True)
class Task:
    """A task: how an example is made, and at which sizes. Batches of training have one size each, and are drawn anew at each step."""

    make: Callable[..., Examples]
    num_tokens: int
    train: dict[tuple[int, ...], int]  # sizes, and parts of the batches that have them
    test: dict[tuple[int, ...], int]  # sizes, and numbers of examples
    batch_size: int
    steps: int
    learning_rate: float
    width: int = 3  # of the short convolution
    slots: int = 0  # questions at one token, which a decoder tells apart

    def tests(self) -> dict[tuple[int, ...], Examples]:
        """All examples of the test, by their size."""
        tests = {}
        for number, (size, count) in enumerate(self.test.items()):
            random = torch.Generator().manual_seed(2 * number + 1)
            tests[size] = self.make(*size, self.num_tokens, count, random)
        return tests


def distinct(rows: int, count: int, below: int, random: torch.Generator) -> Tensor:
    """Different numbers in random order, ``[rows, count]``; a row with repeats is drawn anew."""
    drawn = torch.randint(below, (rows, count), generator=random)
    while len(again := (drawn.sort(1).values.diff(dim=1) == 0).any(1).nonzero()[:, 0]):
        few = 4 * count >= below
        fresh = torch.rand(len(again), below, generator=random).argsort(1)[:, :count] if few else None
        drawn[again] = torch.randint(below, (len(again), count), generator=random) if fresh is None else fresh
    return drawn


def mqar(length: int, pairs: int, num_tokens: int, count: int, random: torch.Generator, fillers: int = 0) -> Examples:
    """Examples of MQAR: keys are the lower half of the tokens without 0, values the upper half.

    What is left of a sequence are any tokens, or the last ``fillers`` of them, which then are no keys nor values.
    """
    num_symbols = num_tokens - fillers
    keys = 1 + distinct(count, pairs, num_symbols // 2 - 1, random)
    values = num_symbols // 2 + distinct(count, pairs, num_symbols - num_symbols // 2, random)
    law = POWER * torch.arange(1, (length - 2 * pairs) // 2 + 1, dtype=torch.float64) ** (POWER - 1)
    places = 2 * pairs + 2 * torch.multinomial(law.expand(count, -1), pairs, generator=random)
    tokens = torch.randint(num_symbols if fillers else 0, num_tokens, (count, length), generator=random)
    tokens[:, : 2 * pairs] = torch.stack([keys, values], 2).flatten(1)
    sources = torch.arange(1, 2 * pairs, 2).expand(count, -1)
    return Examples(tokens.scatter(1, places, keys), places, values, sources)


def joint_recall(contexts: int, keys: int, num_tokens: int, count: int, random: torch.Generator) -> Examples:
    """Examples of joint recall over so many contexts and keys, each with 16 values to choose from.

    Tokens are two marks, then 16 values, then keys, then contexts.
    """

    def orders(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=random).argsort(-1)

    value = torch.randint(2, 18, (count, contexts, keys), generator=random)
    last, half = 18 + (num_tokens - 18) // 2, contexts * (1 + 2 * keys)
    key, context = 18 + orders(last - 18)[:, :keys], last + orders(num_tokens - last)[:, :contexts]
    tokens, stored = torch.empty(count, 2, half, dtype=torch.int64), []
    for side in range(2):  # first stored, then queried
        outer, inner = orders(contexts), orders(contexts, keys)
        mixed = value.gather(1, outer[..., None].expand(-1, -1, keys)).gather(2, inner)
        pair = torch.stack([key[:, None].expand(-1, contexts, -1).gather(2, inner), mixed], 3).flatten(2)
        tokens[:, side] = torch.cat([context.gather(1, outer)[..., None], pair], 2).flatten(1)
        # the place of each key in this half, by its context and number
        place = (1 + 2 * keys) * outer.argsort(1)[..., None] + 1 + 2 * _inverse(outer, inner)
        stored.append(place.flatten(1))
    marks = torch.tensor([0, 1]).expand(count, -1)
    whole = torch.cat([marks[:, :1], tokens[:, 0], marks[:, 1:], tokens[:, 1]], 1)
    return Examples(whole, stored[1] + half + 2, value.flatten(1), stored[0] + 2)


def _inverse(outer: Tensor, inner: Tensor) -> Tensor:
    """Where each key stands in its context, given which context and which keys stand where."""
    ranks = inner.argsort(2)  # of the contexts in the order in which they stand
    return ranks.gather(1, outer.argsort(1)[..., None].expand_as(ranks))


def recalled(tokens: Tensor) -> Tensor:
    """Where the last token stood that ended the same pair of tokens, ``[S, L]`` of tokens ``[S, L]``, or -1.

    -1 are also pairs that ended within the last ``NEAR`` tokens, where a window finds them.
    """
    pair = tokens[:, :-1] * 2**32 + tokens[:, 1:]
    length = pair.size(1)
    before = torch.ones(length, length, dtype=torch.bool).tril(-1) & (pair[:, :, None] == pair[:, None])
    last = (before * torch.arange(1, length + 1)).amax(2)  # 0 for none
    far = torch.where(torch.arange(1, length + 1) - last > NEAR, last, 0)
    return torch.cat([torch.full((len(tokens), 1), -1), torch.where(far > 0, far, -1)], 1)
