"""ListOps: nested lists of digits under MIN, MAX, MED and SM (sum modulo 10), labelled with their value.

In: parameters and a seed, or a folder in the layout of the Long Range Arena (LRA). Out: that very layout, or rows of
token numbers. Not here: batches and the table of tasks (``tasks.py``).

A tree is written as LRA writes it, a binary tree in which every application has its brackets: ``[MAX 4 [SM 7 8 ] ]``
becomes ``( ( ( [MAX 4 ) ( ( ( [SM 7 ) 8 ) ] ) ) ] )``. The round brackets carry nothing and are dropped when reading.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from examples.lra.data import files
from examples.lra.data.batches import Rows
from examples.lra.data.files import Release, checksum, malformed, places

SPLITS = ("train", "val", "test")
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
#: The fixed vocabulary; token number 0 is never used, it is padding in LRA.
VOCABULARY = (*(str(digit) for digit in range(10)), *OPERATORS, "]")
TOKEN_NUMBER = {word: number for number, word in enumerate(VOCABULARY, start=1)}
DIGIT, OPERATOR, END = TOKEN_NUMBER["0"], TOKEN_NUMBER[OPERATORS[0]], TOKEN_NUMBER["]"]

CHOICES = {"release": "as released or generated (96,000/2,000/2,000 of the whole release)"}
HEADER = "Source\tTarget"
RELEASE = Release(
    name="ListOps",
    folders=places("listops-1000", "listops"),
    parts=tuple(f"basic_{split}.tsv" for split in SPLITS),
    part="split",
    source="Generate it with 'python -m examples.lra prepare --task listops --generate --data FOLDER'; the original is part of "
    "lra_release.gz (8 GB), see https://github.com/google-research/long-range-arena.",
    picture=f"""\
        basic_train.tsv    first line: {HEADER!r}
        basic_val.tsv      then one line a tree, such as '( ( ( [MAX 4 ) 7 ) ] )\\t7'
        basic_test.tsv""",
    way_out="Copy it there, or generate a data set with: python -m examples.lra prepare --task listops --generate --data FOLDER",
)


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
        for name, least in (
            ("train", 1),
            ("val", 1),
            ("test", 1),
            ("max_depth", 2),
            ("max_args", 2),
            ("min_length", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(
                    f"Expected '{name}' to be at least {least} (got {getattr(self, name)}). Give a larger number."
                )
        if self.max_length < max(self.min_length + 2, 5):
            raise ValueError(
                f"Expected 'max_length' to leave room above 'min_length' = {self.min_length} and to be at least 5, as both "
                f"bounds are exclusive and the smallest tree has 4 tokens (got {self.max_length}). Give a larger number."
            )
        if not 0.0 < self.operator_probability <= 1.0:
            raise ValueError(
                f"Expected 'operator_probability' to be in (0, 1] (got {self.operator_probability}). LRA uses 0.25."
            )


@dataclasses.dataclass(frozen=True)
class Trees:
    """Some trees in ragged form: tree t is ``tokens[ptr[t]:ptr[t + 1]]``.

    Args:
        tokens: Token numbers, [N] uint8.
        arguments: Number of arguments where the token is an operator, 0 elsewhere, [N].
        ptr: [T + 1] int64.
        labels: Value of each tree, [T] int64.
    """

    tokens: np.ndarray
    arguments: np.ndarray
    ptr: np.ndarray
    labels: np.ndarray


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
        grows = np.where(
            length[tree] < parameters.max_length, arguments, 0
        )  # too long already: never mind its children
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

    >>> max_of_4_and_7 = np.array([TOKEN_NUMBER[word] for word in ("[MAX", "4", "7", "]")])
    >>> source_of(max_of_4_and_7, np.array([2, 0, 0, 0]))
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
    """Writes a ListOps data set in LRA's layout, whole or not at all; see :func:`examples.lra.data.files.generate`.

    The same seed and parameters give the same files (with the same version of numpy). A ValueError says if there are too few
    distinct trees of that law.
    """
    return files.generate(
        folder, "listops", parameters, seed, lambda draft: _write_splits(draft, parameters, seed, progress)
    )


def _write_splits(folder: Path, parameters: Parameters, seed: int, progress: bool) -> dict[str, dict]:
    rows = _distinct_rows(parameters, np.random.default_rng(seed))
    entries = {}
    total = sum(getattr(parameters, split) for split in SPLITS)
    with tqdm(total=total, desc="Generating ListOps", unit="tree", disable=not progress) as bar:
        for split in SPLITS:
            path = folder / f"basic_{split}.tsv"
            count = getattr(parameters, split)
            with path.open("w", newline="") as file:
                writer = csv.writer(file, delimiter="\t")  # ends its lines with CRLF, as LRA's files do
                writer.writerow(HEADER.split("\t"))
                for _ in range(count):
                    writer.writerow(next(rows))
                    bar.update()
                file.flush()
                os.fsync(file.fileno())
            entries[path.name] = {"rows": count, "sha256": checksum(path)}
    return entries


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


def open_splits(root: Path, *, split: str = "release") -> dict[str, Rows]:
    """Finds the trees of each split; ``root`` is a folder like ``RELEASE``, and ``split`` only "release".

    Raises:
        ValueError: If files are missing.
    """
    folder = RELEASE.find(root)
    return {
        name: Rows([folder / file], partial(read_rows, folder / file))
        for name, file in zip(SPLITS, RELEASE.parts, strict=True)
    }


def read_rows(path: Path) -> Iterator[tuple[np.ndarray, int]]:
    """Yields token numbers and label of each row of one file.

    Args:
        path: A file with LRA's header and one tree a line; CRLF and LF both end a line.

    Yields:
        Token numbers, [n] uint8, and the label, 0 to 9, which is the value of the tree.

    Raises:
        ValueError: If a row is malformed, or its label is not the value of its tree; the message names file and line.
    """

    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        header = file.readline().rstrip("\r\n")
        if header != HEADER:
            raise malformed(
                path, 1, f"be the header {HEADER!r}", repr(header[:80]), "Use the file as LRA's script writes it."
            )
        for line, text in enumerate(file, start=2):
            columns = text.rstrip("\r\n").split("\t")
            if len(columns) != 2:
                raise malformed(
                    path,
                    line,
                    "have two columns, a tree and its value",
                    f"{len(columns)}",
                    "Look for a cut or merged line.",
                )
            source, target = columns
            if target not in VOCABULARY[:10]:
                raise malformed(
                    path, line, "end in a label from 0 to 9", repr(target[:80]), "Look for swapped or damaged columns."
                )
            words = source.replace("(", "").replace(")", "").split()
            try:
                tokens = bytes(map(TOKEN_NUMBER.__getitem__, words))
            except KeyError as error:
                raise malformed(
                    path,
                    line,
                    f"hold the tokens {' '.join(VOCABULARY)}",
                    repr(error.args[0]),
                    "Is this a file of another task?",
                ) from None
            try:
                value = value_of(tokens)
            except ValueError as error:
                raise malformed(path, line, "be one whole tree", error, "Look for a cut or merged line.") from None
            if value != int(target):
                raise malformed(
                    path,
                    line,
                    f"end in {value}, the value of its tree",
                    repr(target),
                    "Look for swapped or damaged lines.",
                )
            yield np.frombuffer(tokens, dtype=np.uint8), value


def value_of(tokens: bytes) -> int:
    """Returns the value of a tree, which it parses on the way.

    >>> value_of(bytes(TOKEN_NUMBER[word] for word in "[MED 4 [SM 7 8 ] 9 2 ]".split()))
    4

    Raises:
        ValueError: If the tokens are not one whole tree; it says what they are instead.
    """
    above: list[tuple[int, list[int]]] = []  # operators whose lists are open, and the values beside each
    values: list[int] = []
    for place, token in enumerate(tokens, start=1):
        if token < OPERATOR:
            values.append(token - DIGIT)
        elif token < END:
            above.append((token, values))
            values = []
        elif not above:
            raise ValueError(f"a ']' that ends nothing, token {place} of {len(tokens)}")
        elif not values:
            raise ValueError(
                f"{VOCABULARY[above[-1][0] - 1]} without arguments, which ends at token {place} of {len(tokens)}"
            )
        else:
            operator, beside = above.pop()
            beside.append(OPERATIONS[operator](values))
            values = beside
    if above:
        raise ValueError(f"{len(above)} operators without their ']'")
    if len(values) != 1:
        raise ValueError(f"{len(values)} trees")
    return values[0]


def _median(values: list[int]) -> int:
    values.sort()
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) // 2


OPERATIONS: dict[int, Callable[[list[int]], int]] = {
    TOKEN_NUMBER["[MIN"]: min,
    TOKEN_NUMBER["[MAX"]: max,
    TOKEN_NUMBER["[MED"]: _median,
    TOKEN_NUMBER["[SM"]: lambda values: sum(values) % 10,
}
