"""What tests share: named cases with known answers, and the comparison of nests of tensors."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sbm_pyg import SBM, AttentionGraph
from sbm_pyg.layers.named import source_names

REQUIRED = {  # options of named sources without a default
    "random": {"num_keys_per_query": 2}, "global_tokens": {"num_global": 1}, "block_diagonal": {"num_blocks": 2},
    "relay_keys": {"num_relays": 1}, "relay_queries": {"num_relays": 1},
}  # fmt: skip
NAMED: dict[str, dict[str, Any]] = {
    name: {"target_density": 0.5} if name in ("indexer", "key_selection") else {}
    for name in (*source_names(), "dcmm") if name not in REQUIRED
}  # fmt: skip
"""Attention of encoders by name, with options that make it sparse."""


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def draw32(seed: int, *shape: int) -> Tensor:
    """In float32 from the first: other numbers than those of ``draw``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def refuses(call: Callable[[], Any], message: str, error: Any = ValueError) -> None:
    """Asserts that the call raises this error, and that its words contain the message."""
    with pytest.raises(error, match=re.escape(message)):
        call()


def pointer(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def random_graph(
    heads: int, queries: int, keys: int, density: float, seed: int = 0, sequences: int = 1
) -> AttentionGraph:
    """A Bernoulli graph by dense coins, independent of the library's samplers."""
    generator = torch.Generator().manual_seed(seed)
    return AttentionGraph.from_dense(torch.rand(sequences, heads, queries, keys, generator=generator) < density)


def _rows(degrees: list[int], keys: int) -> AttentionGraph:
    mask = torch.arange(keys) < torch.tensor(degrees)[:, None]
    return AttentionGraph.from_dense(mask[:, torch.randperm(keys, generator=torch.Generator().manual_seed(1))])


GRAPHS: dict[str, AttentionGraph] = {
    "one edge": AttentionGraph.from_dense(torch.ones(1, 1)), "no edges": AttentionGraph.from_dense(torch.zeros(2, 3, 4)),
    "full": AttentionGraph.from_dense(torch.ones(2, 5, 5)), "bipartite": random_graph(3, 7, 11, 0.4),
    "ragged": AttentionGraph.concatenate([random_graph(2, 4, 4, 0.5, 1), random_graph(2, 9, 9, 0.3, 2), random_graph(2, 1, 1, 1.0)]),
    "rows of 0, 1, 63, 1000": _rows([0, 1, 63, 1000, 0], 1000), "one row has all edges": _rows([0, 0, 40, 0], 40),
    "rows around a vector": _rows([15, 16, 17, 31, 32, 33, 2], 50),
}  # fmt: skip


def in_a_fork(work: Callable[[], object]) -> str:
    """What a function returns, or the error that it raises, in a copy of this process, whose limits it may change."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: this process has threads
        child = os.fork()
    if not child:
        try:
            os.write(write, str(work()).encode())
        except Exception as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as said:
        found = said.read()
    os.waitpid(child, 0)
    return found


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def dense_mask(graph: AttentionGraph) -> Tensor:
    """Which pairs are edges, of all sequences, ``[H, N, M]``."""
    mask = torch.zeros(graph.heads, graph.num_queries, graph.num_keys, dtype=torch.bool)
    mask[graph.edge_head, graph.edge_index[1], graph.edge_index[0]] = True
    return mask


class LargestStorage(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any op makes in its context."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
        self.size = max([self.size, *(x.untyped_storage().nbytes() for x in found)])
        return out


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, graph: AttentionGraph, gate: Tensor | None, bias: Tensor | None,
    scale: float, gate_form: str,
) -> Tensor:  # fmt: skip
    """Masked dense softmax attention, in plain differentiable torch; written apart from the library's reference."""
    heads, queries = query.shape[:2]
    keys = key.size(1)
    mask = torch.zeros(heads * queries, keys, dtype=torch.bool)
    place = (graph.edge_row, graph.col.long())
    mask[place] = True
    logits = (query @ key.mT * scale).flatten(0, 1)
    if gate is not None:
        dense = torch.ones_like(logits).index_put(place, gate)
        logits = logits * dense if gate_form == "score" else logits + dense.log()
    if bias is not None:
        logits = logits + torch.zeros_like(logits).index_put(place, bias)
    weights = torch.where(mask, (logits - logits.detach().amax(1, keepdim=True)).exp(), 0)
    total = weights.sum(1, keepdim=True)
    weights = torch.where(total > 0, weights / torch.where(total > 0, total, 1), 0)
    return weights.view(heads, queries, keys) @ value


def held_karp(arcs: np.ndarray) -> bool:
    """Whether there is a Hamiltonian path: for each set of nodes, the nodes at which a path through that set can end."""
    n = len(arcs)
    into = [sum(1 << i for i in range(n) if arcs[i, j] and i != j) for j in range(n)]
    ends = [0] * (1 << n)
    for node in range(n):
        ends[1 << node] = 1 << node
    for visited in range(1, 1 << n):
        if ends[visited]:
            for node in range(n):
                if not visited >> node & 1 and ends[visited] & into[node]:
                    ends[visited | 1 << node] |= 1 << node
    return ends[-1] != 0


def brute_force(masks: Sequence[Tensor]) -> float:
    """s by boolean matrix products, until the state at the end of a cycle comes again."""
    reach, step, seen = masks[0].clone(), 1, set()
    while not reach.all():
        if step % len(masks) == 0:
            state = reach.numpy().tobytes()
            if state in seen:
                return math.inf
            seen.add(state)
        reach = masks[step % len(masks)].float() @ reach.float() > 0
        step += 1
    return step


def small_sbms() -> dict[str, SBM]:
    """Models of few pairs, for joint laws: 3 x 3 and N != M, with block matrices that are not symmetric."""
    y = torch.tensor([[0.9, 0.1], [0.2, 0.7], [0.5, 0.5]])
    z = torch.tensor([[0.8, 0.1], [0.3, 0.6], [0.1, 0.9]])
    off_diagonal = torch.tensor([[0.05, 0.9], [0.3, 0.1]])
    busy, wanted = torch.tensor([0.9, 0.2, 0.6]), torch.tensor([0.3, 1.0, 0.5])
    return {
        "3 x 3, diagonal": SBM(y[None], z[None], torch.diag(torch.tensor([0.9, 0.6]))[None]),
        "3 x 3, off-diagonal": SBM(y[None], z[None], off_diagonal[None]),
        "3 x 3, degrees": SBM((busy[:, None] * y)[None], (wanted[:, None] * z)[None], off_diagonal[None]),
        "2 x 4": SBM(y[None, :2], torch.cat([z, y[:1]])[None], off_diagonal[None]),
        "4 x 2": SBM(torch.cat([y, z[2:]])[None], z[None, :2], off_diagonal[None]),
    }


LAW_CASES = pytest.mark.parametrize(
    ("name", "exploration"),
    [("2 x 4", 0.0), ("3 x 3, off-diagonal", 0.05), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("3 x 3, diagonal", 0.05), ("3 x 3, degrees", 0.0), ("4 x 2", 0.05)))],
)  # fmt: skip
"""Each of these models, with exploration or without. One square and one that is not are enough for the inner loop."""


def copies(sbm: SBM, count: int) -> SBM:
    """That many copies of a model's sequences in one batch: as many independent draws in one call."""
    query_ptr = key_ptr = pointer(sbm.query_ptr.diff().tolist() * count)
    if not torch.equal(sbm.query_ptr, sbm.key_ptr):
        key_ptr = pointer(sbm.key_ptr.diff().tolist() * count)
    query, key = (x.repeat(1, count, 1) for x in (sbm.query_membership, sbm.key_membership))
    return replace(sbm, query_membership=query, key_membership=key, query_ptr=query_ptr, key_ptr=key_ptr)


def pair_counts(graph: AttentionGraph, queries: int, keys: int) -> Tensor:
    """How often each pair of a model is an edge of a graph over its copies, ``[H, N, M]``."""
    key, query = graph.edge_index
    found = torch.zeros(graph.heads, queries, keys, dtype=torch.float64)
    return found.index_put(
        (graph.edge_head, query % queries, key % keys), torch.ones(1, dtype=torch.float64), accumulate=True
    )


def same(one: Any, other: Any) -> bool:
    """Says whether two nests of dictionaries, lists, tensors and numbers are equal in every bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return one == other
