"""ListOps generated: nested lists of digits under MIN, MAX, MED and SM (sum modulo 10), labeled with their value, in the layout of LRA.

A tree is written as LRA writes it, a binary tree in which every application has its brackets: ``[MAX 4 [SM 7 8 ] ]``
becomes ``( ( ( [MAX 4 ) ( ( ( [SM 7 ) 8 ) ] ) ) ] )``.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from examples.common.command import require
from examples.lra.data.files import make_folder

SPLITS = ("train", "val", "test")
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
#: The fixed vocabulary; tokens are numbered from 1, and 0 is never used, it is padding in LRA.
VOCABULARY = (*(str(digit) for digit in range(10)), *OPERATORS, "]")
HEADER = "Source\tTarget"


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The law of the trees, and how many of them; the defaults are those of LRA.

    The root has depth 1. Above ``max_depth`` a node is an operator with probability ``operator_probability`` (``VALUE_P``
    in LRA's script, which is not the probability of a value), else a digit; at ``max_depth`` it is a digit. An operator is
    uniform over the four and has 2 to ``max_args`` arguments, uniformly. A tree is kept if it is new, within and across the splits, and has
    more than ``min_length`` and fewer than ``max_length`` tokens, round brackets not counted.
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
            value = getattr(self, name)
            require(value >= bound, f"'{name}' to be at least {bound}", value, "Give a larger number.")
        value = self.operator_probability
        require(0.0 < value <= 1.0, "'operator_probability' to be in (0, 1]", value, "LRA uses 0.25.")


def draw_trees(parameters: Parameters, draws: int, rng: np.random.Generator) -> Iterator[tuple[str, int]]:
    """Draws trees, and yields source and value of those whose length is allowed, in the order in which they were drawn.

    Breadth first: all nodes of one depth, over all trees, are one array, in which siblings are neighbors. A tree that is already too long is
    dropped, so no tree ever grows without bound. The law is that of the recursive generator.
    """
    levels: list[tuple[list[int], list[int], list[int]]] = []  # arguments, symbol and first argument of each node
    tree = np.arange(draws)
    length = np.zeros(draws, dtype=np.int64)
    for depth in range(1, parameters.max_depth + 1):
        nodes = len(tree)
        branches = rng.random(nodes) < parameters.operator_probability
        branches &= depth < parameters.max_depth
        arguments = np.where(branches, rng.integers(2, parameters.max_args + 1, nodes), 0)
        symbol = np.where(branches, rng.integers(0, len(OPERATORS), nodes), rng.integers(0, 10, nodes))
        length += np.bincount(tree, weights=1 + branches, minlength=draws).astype(np.int64)
        grows = np.where(length[tree] < parameters.max_length, arguments, 0)  # too long: never mind its children
        levels.append((arguments.tolist(), symbol.tolist(), (np.cumsum(grows) - grows).tolist()))
        tree = tree[np.repeat(np.arange(nodes), grows)]
    for root in np.flatnonzero((length > parameters.min_length) & (length < parameters.max_length)).tolist():
        yield _write(levels, 0, root)


def _write(levels: list[tuple[list[int], list[int], list[int]]], depth: int, node: int) -> tuple[str, int]:
    """The source of a node as LRA writes it, round brackets included, and its value.

    >>> max_of_4_and_7 = [([2], [1], [0]), ([0, 0], [4, 7], [0, 0])]
    >>> _write(max_of_4_and_7, 0, 0)
    ('( ( ( [MAX 4 ) 7 ) ] )', 7)
    """
    arguments, symbol, eldest = levels[depth]
    if not (count := arguments[node]):
        return str(symbol[node]), symbol[node]
    first = eldest[node]
    parts = [_write(levels, depth + 1, child) for child in range(first, first + count)]
    source = f"{'( ' * (count + 1)}{OPERATORS[symbol[node]]} {' ) '.join([part[0] for part in parts])} ) ] )"
    values = sorted([part[1] for part in parts])
    median = (values[(count - 1) // 2] + values[count // 2]) // 2
    return source, (values[0], values[-1], median, sum(values) % 10)[symbol[node]]


def generate(folder: Path, parameters: Parameters, *, seed: int = 0, progress: bool = True) -> bool:
    """Writes a ListOps data set in LRA's layout, whole or not at all; see :func:`examples.lra.data.files.make_folder`.

    The same seed and parameters give the same files (with the same version of numpy). Returns False if the data set is there.
    """
    recipe = {"task": "listops", "seed": seed, "parameters": dataclasses.asdict(parameters)}

    def write(draft: Path) -> dict[str, Any]:
        from sbm_pyg.progress import tqdm  # comes with torch, for which --help does not wait

        rows = _distinct_rows(parameters, np.random.default_rng(seed))
        for split in SPLITS:
            with (draft / f"basic_{split}.tsv").open("w", newline="\r\n") as file:  # as LRA's files have it
                file.write(f"{HEADER}\n")
                numbers = range(getattr(parameters, split))
                for _ in tqdm(numbers, f"Generating ListOps, {split}", unit=" trees", disable=not progress):
                    source, label = next(rows)
                    file.write(f"{source}\t{label}\n")
        return {}

    return make_folder(folder, "generated data", recipe, write, replace=False)


def _distinct_rows(parameters: Parameters, rng: np.random.Generator, patience: int = 200) -> Iterator[tuple[str, int]]:
    """Yields (source, label) of distinct trees until ``patience`` rounds of draws in a row bring nothing new."""
    seen: set[bytes] = set()
    dry = 0
    while dry < patience:
        before = len(seen)
        for source, label in draw_trees(parameters, 2048, rng):
            key = hashlib.blake2b(source.encode(), digest_size=16).digest()
            if key not in seen:
                seen.add(key)
                yield source, label
        dry = dry + 1 if len(seen) == before else 0
    count = parameters.train + parameters.val + parameters.test
    raise ValueError(
        f"Expected 'train' + 'val' + 'test' to be at most the number of distinct trees (got {count}, but "
        f"{patience * 2048:,} draws in a row brought nothing beyond {len(seen)}). Ask for fewer trees, or widen 'max_depth', "
        "'max_args' or the lengths."
    )
