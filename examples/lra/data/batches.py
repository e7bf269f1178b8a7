"""Examples in ragged arrays, batches of them without padding, and their order: a function of (lengths, seed, epoch)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from examples.common.command import require

Row = tuple[Any, int]  # (token numbers [n], label), or ((token numbers, token numbers), label) for a pair


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one split as they lie in files, to be read once or many times."""

    files: Sequence[Path]  # files or folders: when one of them changes, the rows may
    read: Callable[[], Iterator[Row | None]]  # None is an example that is broken in the release, and is left out


class Batch(NamedTuple):
    """Some examples as tensors, sequences one after the other, without padding; for pairs, tokens and ptr are pairs."""

    tokens: Any  # [N] int64
    ptr: Any  # [B + 1] int64
    labels: torch.Tensor  # [B] int64
    examples: torch.Tensor  # [B] int64, their numbers in the split
    positions: Any = None  # [N] int64, of each token in its sequence; None counts them

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, of both sides of pairs."""
        sides = self.tokens if isinstance(self.tokens, tuple) else (self.tokens,)
        return sum(side.numel() for side in sides)


@dataclasses.dataclass(frozen=True)
class Split:
    """All examples of a split in one array, in memory or mapped; as a data set, it is indexed by many examples at once.

    Tokens up to ``masked`` are left out, and the others keep their places; a sequence of nothing else keeps its first token.
    """

    tokens: np.ndarray  # [N], numbers of all sequences, whole
    ptr: np.ndarray  # [arity * n + 1] int64; sequence s is tokens[ptr[s]:ptr[s + 1]]
    labels: np.ndarray  # [n] int64
    arity: int = 1  # sequences per example
    max_length: int | None = None  # longer sequences are cut as they are taken
    digest: str = ""  # of the three arrays, if they come from prepared files
    masked: int | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per example, after cutting and leaving out, [n] int64."""
        sizes = np.diff(self.ptr) if self.max_length is None else np.minimum(np.diff(self.ptr), self.max_length)
        if self.masked is not None:  # images, of which nothing is cut
            sizes = np.maximum(np.add.reduceat(self.tokens > self.masked, self.ptr[:-1], dtype=np.int64), 1)
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
        index = np.asarray(examples, dtype=np.int64)
        sides = [self._gather(index * self.arity + side) for side in range(self.arity)]
        tokens, ptr, positions = sides[0] if self.arity == 1 else zip(*sides, strict=True)
        return Batch(tokens, ptr, torch.from_numpy(np.array(self.labels[index])), torch.from_numpy(index), positions)

    def _gather(self, sequences: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns tokens, ptr and places of some sequences."""
        lengths = self.ptr[sequences + 1] - self.ptr[sequences]
        lengths = lengths if self.max_length is None else np.minimum(lengths, self.max_length)
        ptr = np.concatenate([[0], np.cumsum(lengths)])
        places = np.arange(ptr[-1]) - np.repeat(ptr[:-1], lengths)
        tokens = np.asarray(self.tokens[places + np.repeat(self.ptr[sequences], lengths)]).astype(np.int64)
        if self.masked is not None:
            is_kept = tokens > self.masked
            counts = np.diff(np.concatenate([[0], np.cumsum(is_kept)])[ptr])
            is_kept[ptr[:-1][counts == 0]] = True
            tokens, places = tokens[is_kept], places[is_kept]
            ptr = np.concatenate([[0], np.cumsum(np.maximum(counts, 1))])
        return torch.from_numpy(tokens), torch.from_numpy(ptr), torch.from_numpy(places)


def by_length(lengths: np.ndarray, token_budget: int) -> list[np.ndarray]:
    """Cuts examples into batches for evaluation, shortest first, of at most so many tokens together, but at least one example."""
    order = np.argsort(lengths, kind="stable")
    cuts, tokens = [], 0
    for place, length in enumerate(lengths[order].tolist()):
        tokens += length
        if tokens > token_budget and place:
            cuts.append(place)
            tokens = length
    return np.split(order, cuts)


class LengthBuckets:
    """Batches of examples of similar length for training, a pure function of (lengths, seed, number of the epoch).

    An epoch shuffles the examples, cuts them into pools, sorts each pool by length, cuts it into batches and shuffles the batches:
    neighbors in a batch are similar, and yet every epoch mixes anew. Random examples that would not fill a batch wait for another epoch.
    """

    def __init__(self, lengths: np.ndarray, *, batch_size: int, seed: int, pool: int = 4096) -> None:
        words = f"'batch-size' to be at most the number of examples, {len(lengths)}"
        require(len(lengths) >= batch_size, words, batch_size, "Take smaller batches or more data.")
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.number, self.batches = -1, list[np.ndarray]()  # of the epoch of the last step
        self.pool = pool - pool % batch_size if pool > batch_size else batch_size

    def epoch(self, number: int) -> list[np.ndarray]:
        """Returns the batches of one epoch, each an array of example numbers."""
        rng, size = np.random.default_rng([self.seed, number]), self.batch_size
        order = rng.permutation(len(self.lengths))
        order = order[: len(order) - len(order) % size]
        batches: list[np.ndarray] = []
        for start in range(0, len(order), self.pool):
            pool = order[start : start + self.pool]
            pool = pool[np.argsort(self.lengths[pool], kind="stable")]
            batches += [pool[place : place + size] for place in range(0, len(pool), size)]
        return [batches[place] for place in rng.permutation(len(batches))]

    def batch(self, step: int) -> np.ndarray:
        """The batch of a step in the endless sequence of epochs."""
        number, place = divmod(step, len(self.lengths) // self.batch_size)
        if number != self.number:
            self.number, self.batches = number, self.epoch(number)
        return self.batches[place]
