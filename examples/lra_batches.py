"""Examples in ragged arrays, batches of them, and the order in which they come.

In: rows of token numbers, or arrays that are mapped from files. Out: batches (tokens, ptr, labels, examples) without a single
padded token, in an order that is a function of (lengths, seed, epoch). Not here: formats and files (``lra_prepare.py``). torch is
imported where tensors are made, so that command lines, which need the tasks, are read without it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

Row = tuple[Any, int]  # (token numbers [n], label), or ((token numbers, token numbers), label) for a pair


def random_word(*key: int) -> int:
    """Mixes integers into one random word of 62 bits, a pure function of the key."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 2)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one split as they lie in files, to be read once or many times.

    Args:
        files: What the rows are read from, files or folders: when one of them changes, the rows may.
        read: Starts reading. None instead of a row is an example that is known to be broken in the release, and is left out.
        count: Returns how many rows there are, before they are read.
    """

    files: Sequence[Path]
    read: Callable[[], Iterator[Row | None]]
    count: Callable[[], int]

    def __iter__(self) -> Iterator[Row | None]:
        return self.read()

    def __len__(self) -> int:
        return self.count()


class Batch(NamedTuple):
    """Some examples as tensors, sequences one after the other, without padding; for pairs, tokens and ptr are pairs."""

    tokens: Any  # [N] int64
    ptr: Any  # [B + 1] int64
    labels: torch.Tensor  # [B] int64
    examples: torch.Tensor  # [B] int64, their numbers in the split
    places: Any = None  # [N] int64, of each token in its sequence; None counts them

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, both sides of pairs together."""
        sides = self.tokens if isinstance(self.tokens, tuple) else (self.tokens,)
        return sum(side.numel() for side in sides)


@dataclasses.dataclass(frozen=True)
class Split:
    """All examples of a split in one array, in memory or mapped; as a data set, it is indexed by many examples at once.

    Args:
        tokens: Token numbers of all sequences, whole, [N].
        ptr: Sequence s is ``tokens[ptr[s]:ptr[s + 1]]``, [arity * n + 1] int64.
        labels: [n] int64.
        arity: Sequences per example.
        max_length: Longer sequences are cut to this length as they are taken; None cuts nothing.
        digest: Of the three arrays, if they come from prepared files.
        masked: Tokens up to this number are left out, and the others keep their places; a sequence of nothing else keeps its first
            token. None leaves out nothing.
    """

    tokens: np.ndarray
    ptr: np.ndarray
    labels: np.ndarray
    arity: int = 1
    max_length: int | None = None
    digest: str = ""
    masked: int | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per example, after cutting and leaving out, [n] int64."""
        if self.masked is not None:
            parts = np.array_split(np.arange(len(self.ptr) - 1), len(self.tokens) // 2**24 + 1)
            sizes = np.concatenate([np.diff(self._gather(part)[1].numpy()) for part in parts])
        else:
            sizes = np.diff(self.ptr)
            sizes = sizes if self.max_length is None else np.minimum(sizes, self.max_length)
        return sizes.reshape(-1, self.arity).sum(1)

    @property
    def truncated(self) -> int:
        """Number of sequences that are cut."""
        return 0 if self.max_length is None else int((np.diff(self.ptr) > self.max_length).sum())

    def majority(self, examples: np.ndarray | slice = slice(None)) -> float:
        """Share of the most frequent label of some examples, or of all: the accuracy of knowing nothing else."""
        labels = self.labels[examples]
        return float(np.bincount(labels).max() / len(labels))

    def __getitems__(self, examples: list[int]) -> Batch:
        import torch

        index = np.asarray(examples, dtype=np.int64)
        sides = [self._gather(index * self.arity + side) for side in range(self.arity)]
        tokens, ptr, places = sides[0] if self.arity == 1 else zip(*sides, strict=True)
        return Batch(tokens, ptr, torch.from_numpy(np.array(self.labels[index])), torch.from_numpy(index), places)

    def _gather(self, sequences: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns tokens, ptr and places of some sequences."""
        import torch

        lengths = self.ptr[sequences + 1] - self.ptr[sequences]
        lengths = lengths if self.max_length is None else np.minimum(lengths, self.max_length)
        ptr = np.concatenate([[0], np.cumsum(lengths)])
        places = np.arange(ptr[-1]) - np.repeat(ptr[:-1], lengths)
        tokens = np.asarray(self.tokens[places + np.repeat(self.ptr[sequences], lengths)]).astype(np.int64)
        if self.masked is not None:
            kept = tokens > self.masked
            counts = np.diff(np.concatenate([[0], np.cumsum(kept)])[ptr])
            kept[ptr[:-1][counts == 0]] = True
            tokens, places = tokens[kept], places[kept]
            ptr = np.concatenate([[0], np.cumsum(np.maximum(counts, 1))])
        return torch.from_numpy(tokens), torch.from_numpy(ptr), torch.from_numpy(places)


class LengthBuckets:
    """Batches of examples of similar length, a pure function of (lengths, seed, number of the epoch).

    With a seed, an epoch shuffles the examples, cuts them into pools, sorts each pool by length, cuts it into batches and
    shuffles the batches: neighbours in a batch are similar, and yet every epoch mixes anew. Random examples that would not
    fill a batch wait for another epoch. Without a seed every example comes exactly once, shortest first, as evaluation wants it.

    Args:
        lengths: Tokens per example, [n].
        batch_size: Examples per batch. Give this or ``token_budget``.
        token_budget: As many examples as have at most so many tokens together (but at least one).
        seed: Of the order; None for evaluation.
        pool: Examples per pool.

    Raises:
        ValueError: If there are fewer examples than a batch needs, or unless exactly one size is given.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        batch_size: int | None = None,
        token_budget: int | None = None,
        seed: int | None = None,
        pool: int = 4096,
    ) -> None:
        if (batch_size is None) == (token_budget is None):
            raise ValueError(
                f"Expected exactly one of 'batch_size' and 'token_budget' to be given (got {batch_size} and {token_budget}). Give one."
            )
        if seed is not None and batch_size is not None and len(lengths) < batch_size:
            raise ValueError(
                f"Expected 'batch-size' to be at most the number of examples, {len(lengths)} (got {batch_size}). Take smaller "
                "batches or more data."
            )
        self.lengths = np.asarray(lengths)
        self.batch_size, self.token_budget, self.seed = batch_size, token_budget, seed
        self.pool = pool - pool % batch_size if batch_size and pool > batch_size else max(pool, batch_size or 1)

    def epoch(self, number: int) -> list[np.ndarray]:
        """Returns the batches of one epoch, each an array of example numbers."""
        if self.seed is None:
            return self._cut(np.argsort(self.lengths, kind="stable"))
        rng = np.random.default_rng([self.seed, number])
        order = rng.permutation(len(self.lengths))
        order = order[: len(order) - len(order) % (self.batch_size or 1)]
        batches: list[np.ndarray] = []
        for start in range(0, len(order), self.pool):
            pool = order[start : start + self.pool]
            batches += self._cut(pool[np.argsort(self.lengths[pool], kind="stable")])
        return [batches[place] for place in rng.permutation(len(batches))]

    def _cut(self, order: np.ndarray) -> list[np.ndarray]:
        if self.batch_size is not None:
            return [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        assert self.token_budget is not None
        cuts, tokens = [], 0
        for place, length in enumerate(self.lengths[order].tolist()):
            tokens += length
            if tokens > self.token_budget and place:
                cuts.append(place)
                tokens = length
        return np.split(order, cuts)

    def stream(self, first: int, count: int, *, parts: int = 1) -> Iterator[list[int]]:
        """Yields ``count`` batches of the endless sequence of epochs, from batch ``first`` on, each in equal parts."""
        number = 0
        while count:
            batches = self.epoch(number)
            if self.batch_size is not None:  # every epoch is as long as this one
                number, first = number + first // len(batches), first % len(batches)
                batches = self.epoch(number)
            taken = batches[first : first + count]
            for batch in taken:
                yield from (part.tolist() for part in np.split(batch, parts))
            first, count, number = max(0, first - len(batches)), count - len(taken), number + 1

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.epoch(0))

    def __len__(self) -> int:
        return len(self.epoch(0))
