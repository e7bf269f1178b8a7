"""What cases of the fuzz driver are made of: random arguments, and the table of makers by public name.

In: a :class:`Draw`, which is a function of the seed and the number of a call. Out: a :class:`Case`. Not here: hostile values and verdicts (``fuzz.py``),
and what the right results are, which the tests of each module hold against definitions.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from problems import pointer, small_sbms
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from sbm_pyg import SBM, AttentionGraph


class Wrong(Exception):
    """What is wrong with a result."""


def expect(truth: Any, words: str) -> None:
    if not bool(truth):
        raise Wrong(words)


@dataclass
class Case:
    """A valid call: what is called, with what, and what hostile values may not be taken for; ``check(result, **arguments)`` raises :class:`Wrong`."""

    call: Callable[..., Any]
    arguments: dict[str, Any]
    check: Callable[..., None] = lambda result, **arguments: None
    free: tuple[
        str, ...
    ] = ()  # where any object may stand, and arguments of which the library says that it ignores them
    unchecked: tuple[
        str, ...
    ] = ()  # tensors whose values the library does not check: their types and shapes are mutated
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # what else an argument is called in messages
    more: dict[str, list[tuple[str, str, Callable[[], Any]]]] = field(default_factory=dict)  # hostile values of its own


class Draw(random.Random):
    """Random small arguments: a function of the seed and the number of the call."""

    def __init__(self, seed: int, number: int) -> None:
        super().__init__(f"{seed}/{number}")
        self.torch = torch.Generator().manual_seed(self.getrandbits(48))
        self.dtype = self.choice((torch.float32, torch.float64))

    def real(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.torch, dtype=self.dtype)

    def unit(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.torch, dtype=self.dtype)

    def whole(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self.torch)

    def maybe(self, value: Any) -> Any:
        return self.choice((None, value))

    def lengths(self, most: int = 3) -> list[int]:
        return [self.randint(1, 6) for _ in range(self.randint(1, most))]

    def graph(
        self, heads: int | None = None, queries: list[int] | None = None, keys: list[int] | None = None
    ) -> AttentionGraph:
        """A graph with independent edges, of ragged sequences; built by hand, apart from the library's makers."""
        heads = self.randint(1, 3) if heads is None else heads
        queries = self.lengths() if queries is None else queries
        keys = self.choice((queries, [self.randint(1, 6) for _ in queries])) if keys is None else keys
        inside = torch.block_diag(*(torch.ones(n, m) for n, m in zip(queries, keys, strict=True))) > 0
        mask = inside & (self.unit(heads, *inside.shape) < self.choice((0.2, 0.5, 0.5, 1.0)))
        rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(-1).flatten().cumsum(0)])
        col = mask.nonzero()[:, 2].to(self.choice((torch.int32, torch.int64)))
        return AttentionGraph(rowptr, col, sum(queries), sum(keys), heads, pointer(queries), pointer(keys))

    def sbm(self, heads: int | None = None, queries: list[int] | None = None, keys: list[int] | None = None) -> SBM:
        heads, queries = self.randint(1, 3) if heads is None else heads, self.lengths() if queries is None else queries
        keys, blocks = [self.randint(1, 6) for _ in queries] if keys is None else keys, self.randint(1, 4)
        y, z = (self.unit(heads, sum(side), blocks) / blocks for side in (queries, keys))
        return SBM(y, z, self.unit(heads, blocks, blocks), pointer(queries), pointer(keys))

    def model(self, graph: AttentionGraph) -> SBM:
        """A model over the tokens of a graph."""
        return self.sbm(graph.heads, graph.query_ptr.diff().tolist(), graph.key_ptr.diff().tolist())


def valid(graph: AttentionGraph) -> None:
    """What the library promises of every graph, checked apart from it."""
    if graph.col.is_meta:
        return
    rowptr, col, n, m = graph.rowptr.tolist(), graph.col.tolist(), graph.num_queries, graph.num_keys
    query_ptr, key_ptr = graph.query_ptr.tolist(), graph.key_ptr.tolist()
    expect(graph.heads >= 1 and len(rowptr) == graph.heads * n + 1, "rowptr has another length than H*N+1")
    expect(rowptr[0] == 0 and rowptr[-1] == len(col) and rowptr == sorted(rowptr), "rowptr does not rise from 0 to E")
    for ptr, total in ((query_ptr, n), (key_ptr, m)):
        expect(
            ptr[0] == 0 and ptr[-1] == total and all(a <= b for a, b in itertools.pairwise(ptr)),
            "offsets do not fit the tokens",
        )
    expect(len(query_ptr) == len(key_ptr), "queries and keys have other numbers of sequences")
    for row in range(graph.heads * n):
        keys = col[rowptr[row] : rowptr[row + 1]]
        expect(all(a < b for a, b in itertools.pairwise(keys)), "a row is unsorted or repeats a key")
        b = sum(end <= row % n for end in query_ptr[1:])
        expect(all(key_ptr[b] <= key < key_ptr[b + 1] for key in keys), "an edge leaves its sequence")


# ------------------------------------------------------------------ the table

Maker = Callable[[Draw], Case]
TABLE: dict[str, tuple[int, Maker]] = {}  # public name -> how often it is called, and its maker


def case(name: str, weight: int = 6) -> Callable[[Maker], Maker]:
    def add(maker: Maker) -> Maker:
        TABLE[name] = weight, maker
        return maker

    return add


def attention_inputs(d: Draw, sequences: int = 1) -> tuple[AttentionGraph, dict[str, Tensor]]:
    graph = d.graph(None, [d.randint(1, 6) for _ in range(sequences)])
    channels, values = d.randint(1, 5), d.randint(1, 5)
    query, key = d.real(graph.heads, graph.num_queries, channels), d.real(graph.heads, graph.num_keys, channels)
    return graph, {"query": query, "key": key, "value": d.real(graph.heads, graph.num_keys, values)}


def lengths_of(g: AttentionGraph | SBM) -> tuple[list[int], list[int]]:
    return g.query_ptr.diff().tolist(), g.key_ptr.diff().tolist()


DATA: list[tuple[str, str, Callable[[], Any]]] = [
    ("Data()", "value", Data), ("HeteroData()", "value", HeteroData), ("of 50 nodes", "other", lambda: Data(num_nodes=50)),
    ("x of one dimension", "value", lambda: Data(x=torch.ones(3))), ("num_nodes=0", "value", lambda: Data(num_nodes=0)),
    ("num_nodes negative", "value", lambda: Data(num_nodes=-3)), ("a model", "value", lambda: small_sbms()["2 x 4"]),
    ("a bad ptr", "value", lambda: Data(num_nodes=3, ptr=torch.tensor([0, 5]))), ("a bad batch", "value", lambda: Data(num_nodes=3, batch=torch.tensor([1, 0, 5]))),
    ("a list", "value", lambda: [Data(num_nodes=3)]), ("a dict", "value", lambda: {"x": torch.ones(3, 2)}),
]  # fmt: skip
DATA_NAMES = (
    "data", "query_membership", "key_membership", "block_matrix", "x", "ptr", "batch", "num_nodes", "edge_type", "query", "key", "block",
    "edge_index", "edge_head", "num_queries", "num_keys",
)  # fmt: skip
