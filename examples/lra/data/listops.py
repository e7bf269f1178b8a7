"""ListOps generated: nested lists of digits under MIN, MAX, MED and SM (sum modulo 10), labelled with their value.

In: parameters and a seed. Out: a folder in the layout of the Long Range Arena (LRA). Not here: how the folder is read (``readers.py``).

A tree is written as LRA writes it, a binary tree in which every application has its brackets: ``[MAX 4 [SM 7 8 ] ]``
becomes ``( ( ( [MAX 4 ) ( ( ( [SM 7 ) 8 ) ] ) ) ] )``.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from examples.lra.data.files import make_folder

SPLITS = ("train", "val", "test")
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
#: The fixed vocabulary; tokens are numbered from 1, and 0 is never used, it is padding in LRA.
VOCABULARY = (*(str(digit) for digit in range(10)), *OPERATORS, "]")
DIGIT, OPERATOR, END = 1, 11, 15  # token numbers of the first digit, of the first operator and of the bracket
HEADER = "Source\tTarget"


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The law of the trees, and how many of them; the defaults are those of LRA.

    The root has depth 1. Above ``max_depth`` a node is an operator with probability ``operator_probability`` (``VALUE_P``
    in LRA's script, which is not the probability of a value), else a digit; at ``max_depth`` it is a digit. An operator is
    uniform over the four and has 2 to ``max_args`` arguments, uniformly. A tree is kept if it is new and has more than
    ``min_length`` and fewer than ``max_length`` tokens, round brackets not counted.

    Args:
        train, val, test: Numbers of trees; all of them are distinct, within and across the splits.
        max_depth: At least 2.
        max_args: At least 2.
        min_length: Exclusive, at least 1, so that every tree has an operator.
        max_length: Exclusive.
        operator_probability: In (0, 1].

    Raises:
        ValueError: If a parameter is out of its range.
    """

    train: int = 96_000
    val: int = 2_000
    test: int = 2_000
    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2_000
    operator_probability: float = 0.25

    def __post_init__(self) -> None:
        least = {"train": 1, "val": 1, "test": 1, "max_depth": 2, "max_args": 2, "min_length": 1}
        least["max_length"] = max(self.min_length + 2, 5)  # the smallest tree has 4 tokens
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(
                    f"Expected '{name}' to be at least {bound} (got {getattr(self, name)}). Give a larger number."
                )
        if not 0.0 < self.operator_probability <= 1.0:
            raise ValueError(
                f"Expected 'operator_probability' to be in (0, 1] (got {self.operator_probability}). LRA uses 0.25."
            )


class Trees(NamedTuple):
    """Some trees in ragged form: tree t is ``tokens[ptr[t]:ptr[t + 1]]``."""

    tokens: np.ndarray  # [N] uint8
    arguments: np.ndarray  # [N], of operators; 0 elsewhere
    ptr: np.ndarray  # [T + 1] int64
    labels: np.ndarray  # [T] int64, the value of each tree


def draw_trees(parameters: Parameters, draws: int, rng: np.random.Generator) -> Trees:
    """Draws trees and keeps those whose length is allowed, evaluated.

    Breadth first: all nodes of one depth, over all trees, are one array. Downwards it is drawn which nodes are operators
    and how many arguments they have (a tree that is already too long is dropped, so no tree ever grows without bound);
    upwards, lengths and values are sums, minima, maxima and medians over siblings, which are neighbours in the array;
    downwards again, a node's place is its parent's place plus the lengths of its elder siblings. The law is that of the
    recursive generator. Cost: O(nodes drawn), some 20 array operations a depth.

    Args:
        parameters: The law of the trees.
        draws: Number of trees to draw, before any is discarded.
        rng: The source of randomness.

    Returns:
        The trees kept, in the order in which they were drawn.
    """
    levels: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    tree, parent = np.arange(draws), np.zeros(draws, dtype=np.int64)
    length = np.zeros(draws, dtype=np.int64)
    for depth in range(1, parameters.max_depth + 1):
        nodes = len(tree)
        branches = rng.random(nodes) < parameters.operator_probability
        branches &= depth < parameters.max_depth
        arguments = np.where(branches, rng.integers(2, parameters.max_args + 1, nodes), 0)
        symbol = np.where(branches, rng.integers(0, len(OPERATORS), nodes), rng.integers(0, 10, nodes))
        levels.append((tree, parent, arguments, symbol))
        length += np.bincount(tree, weights=1 + branches, minlength=draws).astype(np.int64)
        grows = np.where(length[tree] < parameters.max_length, arguments, 0)  # too long: never mind its children
        parent = np.repeat(np.arange(nodes), grows)
        tree = tree[parent]
    kept = (length > parameters.min_length) & (length < parameters.max_length)

    place_of_tree = np.cumsum(kept) - 1
    place = np.zeros(0, dtype=np.int64)
    for depth, (tree, parent, arguments, symbol) in enumerate(levels):
        stays = kept[tree]
        parent = place[parent[stays]] if depth else np.zeros(0, dtype=np.int64)
        levels[depth] = (place_of_tree[tree[stays]], parent, arguments[stays], symbol[stays])
        place = np.cumsum(stays) - 1
    return _assemble(levels, length[kept])


def _assemble(levels: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]], length: np.ndarray) -> Trees:
    """Evaluates complete levels of (tree, parent, arguments, symbol) and writes their tokens depth first."""
    sizes: list[np.ndarray] = []
    values = np.zeros(0, dtype=np.int64)
    for _, _, arguments, symbol in reversed(levels):
        branches = arguments > 0
        size = 1 + branches.astype(np.int64)
        value = symbol.copy()
        if branches.any():
            count = arguments[branches]
            first = np.cumsum(count) - count
            size[branches] += np.add.reduceat(sizes[-1], first)
            ordered = values[np.lexsort((values, np.repeat(np.arange(len(count)), count)))]
            median = (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) // 2  # int(median)
            outcomes = (ordered[first], ordered[first + count - 1], median, np.add.reduceat(values, first) % 10)
            value[branches] = np.choose(symbol[branches], outcomes)
        sizes.append(size)
        values = value
    sizes.reverse()

    ptr = np.concatenate([[0], np.cumsum(length)])
    tokens = np.zeros(ptr[-1], dtype=np.uint8)
    written_arguments = np.zeros(ptr[-1], dtype=np.int64)
    start = ptr[:-1]
    for depth, (_, parent, arguments, symbol) in enumerate(levels):
        branches = arguments > 0
        if depth:
            elder = np.cumsum(sizes[depth]) - sizes[depth]
            count = levels[depth - 1][2]
            eldest = (np.cumsum(count) - count)[parent]
            start = start[parent] + 1 + elder - elder[eldest]
        tokens[start] = symbol + np.where(branches, OPERATOR, DIGIT)
        written_arguments[start] = arguments
        tokens[(start + sizes[depth] - 1)[branches]] = END
    return Trees(tokens, written_arguments, ptr, values)


def source_of(tokens: np.ndarray, arguments: np.ndarray) -> str:
    """Writes one tree as LRA does, round brackets included.

    >>> source_of(np.array([12, 5, 8, 15]), np.array([2, 0, 0, 0]))
    '( ( ( [MAX 4 ) 7 ) ] )'
    """
    words = [
        "( " * (count + 1) + VOCABULARY[token - 1]
        if count
        else VOCABULARY[token - 1] + (" ) )" if token == END else " )")
        for token, count in zip(tokens.tolist(), arguments.tolist(), strict=True)
    ]
    return " ".join(words).removesuffix(" )")  # nobody takes the root as an argument


def generate(folder: Path, parameters: Parameters, *, seed: int = 0, progress: bool = True) -> bool:
    """Writes a ListOps data set in LRA's layout, whole or not at all; see :func:`examples.lra.data.files.make_folder`.

    The same seed and parameters give the same files (with the same version of numpy). Returns False if the data set is there. A
    ValueError says if there are too few distinct trees of that law.
    """
    wanted = {"task": "listops", "seed": seed, "parameters": dataclasses.asdict(parameters)}

    def write(draft: Path) -> dict[str, Any]:
        rows = _distinct_rows(parameters, np.random.default_rng(seed))
        for split in SPLITS:
            with (draft / f"basic_{split}.tsv").open("w", newline="\r\n") as file:  # as LRA's files have it
                file.write(f"{HEADER}\n")
                numbers = range(getattr(parameters, split))
                for _ in tqdm(numbers, f"Generating ListOps, {split}", unit=" trees", disable=not progress):
                    source, label = next(rows)
                    file.write(f"{source}\t{label}\n")
        return {}

    return make_folder(folder, "generated data", wanted, write, replace=False)


def _distinct_rows(parameters: Parameters, rng: np.random.Generator, patience: int = 200) -> Iterator[tuple[str, int]]:
    """Yields (source, label) of distinct trees until ``patience`` rounds of draws in a row bring nothing new."""
    seen: set[bytes] = set()
    dry = 0
    while dry < patience:
        before = len(seen)
        trees = draw_trees(parameters, 2048, rng)
        for tree, label in enumerate(trees.labels.tolist()):
            place = slice(trees.ptr[tree], trees.ptr[tree + 1])
            key = hashlib.blake2b(trees.tokens[place].tobytes(), digest_size=16).digest()
            if key not in seen:
                seen.add(key)
                yield source_of(trees.tokens[place], trees.arguments[place]), label
        dry = dry + 1 if len(seen) == before else 0
    wanted = parameters.train + parameters.val + parameters.test
    raise ValueError(
        f"Expected 'train' + 'val' + 'test' to be at most the number of distinct trees (got {wanted}, but "
        f"{patience * 2048:,} draws in a row brought nothing beyond {len(seen)}). Ask for fewer trees, or widen 'max_depth', "
        "'max_args' or the lengths."
    )
