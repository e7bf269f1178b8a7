"""What the fuzz driver calls: for each public name a maker of valid arguments.

In: a :class:`Draw`, which is a function of the seed and the number of a call. Out: a :class:`Case`. Not here: hostile values and verdicts (``fuzz.py``),
and what the right results are, which the tests of each module hold against definitions.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from problems import pointer, small_sbms
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from sbm_pyg import SBM, AttentionGraph, SBMGraph, ops, sample_edges
from sbm_pyg.sources import patterns


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
        self.folders: list[str] = []

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

    def square(self, heads: int | None = None, most: int = 7) -> AttentionGraph:
        """A graph of one sequence whose queries and keys are the same tokens."""
        n = self.randint(1, most)
        return self.graph(heads, [n], [n])

    def sbm(self, heads: int | None = None, queries: list[int] | None = None, keys: list[int] | None = None) -> SBM:
        heads, queries = self.randint(1, 3) if heads is None else heads, self.lengths() if queries is None else queries
        keys, blocks = [self.randint(1, 6) for _ in queries] if keys is None else keys, self.randint(1, 4)
        y, z = (self.unit(heads, sum(side), blocks) / blocks for side in (queries, keys))
        return SBM(y, z, self.unit(heads, blocks, blocks), pointer(queries), pointer(keys))

    def model(self, graph: AttentionGraph) -> SBM:
        """A model over the tokens of a graph."""
        return self.sbm(graph.heads, graph.query_ptr.diff().tolist(), graph.key_ptr.diff().tolist())

    def folder(self) -> str:
        self.folders.append(tempfile.mkdtemp())
        return self.folders[-1]


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


def function(
    name: str, weight: int, call: Callable[..., Any], arguments: Callable[[Draw], dict[str, Any]], **options: Any
) -> None:
    TABLE[name] = weight, lambda d: Case(call, arguments(d), **options)


def method(
    name: str, weight: int, record: Callable[[Draw], Any],
    arguments: Callable[[Draw, Any], dict[str, Any]] = lambda d, owner: {}, **options: Any,
) -> None:  # fmt: skip
    """A method of a record, whose arguments may depend on it."""

    def make(d: Draw) -> Case:
        owner = record(d)
        return Case(getattr(owner, name.rpartition(".")[2]), arguments(d, owner), **options)

    TABLE[name] = weight, make


# ------------------------------------------------------------------ ops


def fields(record: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def attention_inputs(d: Draw, sequences: int = 1) -> tuple[AttentionGraph, dict[str, Tensor]]:
    graph = d.graph(None, [d.randint(1, 6) for _ in range(sequences)])
    channels, values = d.randint(1, 5), d.randint(1, 5)
    query, key = d.real(graph.heads, graph.num_queries, channels), d.real(graph.heads, graph.num_keys, channels)
    return graph, {"query": query, "key": key, "value": d.real(graph.heads, graph.num_keys, values)}


ROWS = {"rows": ("rowptr", "col", "bias")}  # names in messages
PTRS = ("query_ptr", "key_ptr")


def pair_inputs(d: Draw) -> dict[str, Any]:
    graph, x = attention_inputs(d)
    return {"query": x["query"], "key": x["key"], "rows": graph.rows}


function("ops.edge_dot", 6, ops.edge_dot, pair_inputs, unchecked=("rows",), names=ROWS)


@case("ops.edge_attention", 12)
def _edge_attention(d: Draw) -> Case:
    graph, x = attention_inputs(d)
    arguments: dict[str, Any] = {**x, "rows": graph.rows._replace(bias=d.maybe(d.real(graph.num_edges)))}
    arguments |= {"gate": d.maybe(d.unit(graph.num_edges) + 0.5), "gate_form": d.choice(("score", "weight"))}
    arguments |= {"scale": d.uniform(0.1, 1.5), "dropout": d.choice((0.0, 0.0, 0.3)), "seed": d.randrange(99)}
    return Case(lambda **given: ops.edge_attention(**given)[0], arguments, unchecked=("rows",), names=ROWS)


def sequences(sbm: SBM, d: Draw) -> dict[str, Any]:
    ids, seed = d.whole(9, sbm.num_sequences), d.getrandbits(60)
    return {"query_ptr": sbm.query_ptr, "key_ptr": sbm.key_ptr, "sequence_ids": ids, "seed": seed}


@case("ops.sample_sbm")
def _sample_sbm(d: Draw) -> Case:
    sbm = d.sbm()
    rate = torch.where(d.unit(sbm.heads, sbm.num_queries, 1) < 0.3, torch.zeros(()), sbm.rate).to(sbm.rate.dtype)
    arguments = {"rate": rate, "member": sbm.key_membership, **sequences(sbm, d), "clamp": d.random() < 0.5}
    arguments |= {"method": d.choice(("bernoulli", "fastrg")), "exploration": d.choice((0.0, 0.0, 0.2))}
    arguments |= {"row_group": d.choice((1, 3, 16)) if arguments["method"] == "bernoulli" else 1}
    return Case(ops.sample_sbm, arguments | {"is_causal": d.random() < 0.3}, unchecked=PTRS)


def segments(d: Draw) -> dict[str, Any]:
    """Values of segments by number, shuffled, or by offsets."""
    lengths = d.lengths()
    number, order = torch.repeat_interleave(torch.tensor(lengths)), torch.randperm(sum(lengths), generator=d.torch)
    of = {"index": number[order], "ptr": None, "num_nodes": len(lengths)}
    return {"src": d.real(sum(lengths)), **d.choice((of, {"index": None, "ptr": pointer(lengths), "num_nodes": None}))}


function(
    "ops.segment_entmax", 6, ops.segment_entmax, lambda d: segments(d) | {"alpha": d.choice((1.2, 1.5, 2.0, 4.0))},
    unchecked=("index", "ptr"),
)  # fmt: skip


# ------------------------------------------------------------------ graphs

GRAPH = ("rowptr", "col", "num_queries", "num_keys", "heads", "query_ptr", "key_ptr")
function("AttentionGraph", 30, AttentionGraph, lambda d: fields(d.graph(), *GRAPH))
function(
    "AttentionGraph.from_dense", 8, AttentionGraph.from_dense,
    lambda d: {"mask": d.unit(*[d.randint(1, 4) for _ in range(d.randint(2, 4))]) < 0.5},
)  # fmt: skip


@case("AttentionGraph.from_edge_index", 16)
def _from_edge_index(d: Draw) -> Case:
    g = d.graph()
    order = torch.randint(g.num_edges, (g.num_edges + 2,), generator=d.torch) if g.num_edges else torch.arange(0)
    arguments = {"edge_index": g.edge_index[:, order], "edge_head": g.edge_head[order]}
    return Case(AttentionGraph.from_edge_index, arguments | fields(g, "num_queries", "num_keys", "heads", *PTRS))


def some_edges(d: Draw, g: AttentionGraph) -> dict[str, Tensor]:
    order = d.whole(max(g.num_edges, 1), 4) if g.num_edges else torch.arange(0)
    return {"edge_index": g.edge_index[:, order], "edge_head": g.edge_head[order]}


def some_pairs(d: Draw, g: AttentionGraph) -> dict[str, Tensor]:
    ends = torch.stack([d.whole(g.num_keys, 5), d.whole(g.num_queries, 5)])
    return {"edge_index": ends, "edge_head": d.whole(g.heads, 5)}


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
)  # fmt: skip


@case("AttentionGraph.from_data", 6)
def _from_data(d: Draw) -> Case:
    g = d.graph()
    square = g.num_queries == g.num_keys and torch.equal(g.query_ptr, g.key_ptr)
    data = g.to_data() if square and d.random() < 0.5 else g.to_hetero_data()
    edge_type = None if isinstance(data, Data) else d.maybe(("key", "to", "query"))
    names = {"data": (*DATA_NAMES, "edge_index", "edge_head", "num_queries", "num_keys"), "heads": ("edge_head",)}
    arguments = {"data": data, "edge_type": edge_type, "heads": d.maybe(g.heads)}
    return Case(AttentionGraph.from_data, arguments, more={"data": DATA}, names=names)


def a_sequence(d: Draw, g: Any) -> dict[str, Any]:
    return {"sequence": d.randrange(g.num_sequences)}


def a_head(d: Draw, g: Any) -> dict[str, Any]:
    return {"head": d.randrange(g.heads)}


method("AttentionGraph.sequence", 6, Draw.graph, a_sequence)
method("AttentionGraph.to_dense", 6, Draw.graph, a_sequence)
method("AttentionGraph.head", 6, Draw.graph, a_head)
method("AttentionGraph.expand", 6, lambda d: d.graph(1), lambda d, g: {"heads": d.randint(1, 4)})
method("AttentionGraph.union", 8, Draw.graph, lambda d, g: {"other": d.graph(d.choice((1, g.heads)), *lengths_of(g))})
method("AttentionGraph.select", 6, Draw.graph, lambda d, g: {"mask": d.whole(2, g.num_edges) > 0})
method("AttentionGraph.find", 6, Draw.graph, some_edges)
method("AttentionGraph.contains", 6, Draw.graph, some_pairs)
method("AttentionGraph.to_edge_index", 6, Draw.graph, lambda d, g: {"head": d.maybe(d.randrange(g.heads))})
method(
    "AttentionGraph.to_sparse_tensor", 3, Draw.graph,
    lambda d, g: a_head(d, g) | {"value": d.maybe(d.real(g.num_edges))},
)  # fmt: skip
method(
    "AttentionGraph.to_networkx", 8, Draw.graph,
    lambda d, g: a_sequence(d, g) | {"head": d.choice(("all", d.randrange(g.heads))), "bipartite": d.maybe(True)}, free=("bipartite",),
)  # fmt: skip
function(
    "AttentionGraph.concatenate", 6, AttentionGraph.concatenate,
    lambda d: {"graphs": [d.graph(heads) for heads in [d.randint(1, 3)] * d.randint(1, 3)]},
)  # fmt: skip


# ------------------------------------------------------------------ models of graphs


def over_tokens(d: Draw, s: SBM) -> dict[str, AttentionGraph]:
    return {"graph": d.graph(s.heads, *lengths_of(s))}


def at_most(result: SBM, keys: Any) -> None:
    expected = (result.edge_prob_dense(sequence).double().sum(2) for sequence in range(result.num_sequences))
    expect(bool((torch.cat([*expected], 1) <= keys * 1.001 + 1e-9).all()), "more expected keys than asked for")


@case("SBM.with_density")
def _with_density(d: Draw) -> Case:
    s = d.sbm()
    keys = torch.repeat_interleave(s.key_ptr.diff(), s.query_ptr.diff())

    def check(result: SBM, density: Any) -> None:
        at_most(result, (float(density) * keys).clamp(min=1))

    return Case(s.with_density, {"density": d.uniform(0.01, 1)}, check)


MODEL = ("query_membership", "key_membership", "block_matrix", "query_ptr", "key_ptr")
function("SBM", 16, SBM, lambda d: fields(d.sbm(), *MODEL))
method("SBM.check", 3, Draw.sbm, over_tokens)
method("SBM.on", 6, Draw.sbm, over_tokens)
method("SBM.gate", 3, Draw.sbm, over_tokens)
method("SBM.edge_prob_dense", 6, Draw.sbm, a_sequence)
method(
    "SBM.limit", 6, Draw.sbm, lambda d, s: {"budget": d.uniform(0.1, 5)},
    check=lambda result, budget: at_most(result, float(budget)),
)  # fmt: skip


def sample_options(d: Draw) -> dict[str, Any]:
    sbm = d.sbm()
    options: dict[str, Any] = {
        "sbm": sbm, "method": d.choice(("bernoulli", "fastrg")), "exploration": d.choice((0.0, 0.1)),
    }  # fmt: skip
    options |= {"budget": d.maybe(1.5), "clamp": d.random() < 0.5, "seed": d.getrandbits(60), "generator": None}
    return options | {"sequence_ids": d.maybe(d.whole(9, sbm.num_sequences))}


function("sample_edges", 24, sample_edges, sample_options)


def sbm_graph(d: Draw) -> Case:
    n, heads, blocks = d.randint(1, 6), d.randint(1, 3), d.randint(1, 3)
    y = torch.rand(n, heads, blocks) / blocks
    data = Data(query_membership=y, key_membership=y, block_matrix=torch.rand(heads, blocks, blocks), num_nodes=n)

    def changed(**changes: Any) -> Callable[[], Data]:
        return lambda: Data(**{key: value for key, value in (data.to_dict() | changes).items() if value is not None})

    hostile = [(f"without {name}", "value", changed(**{name: None})) for name in data.to_dict()]
    hostile += [("num_nodes of others", "value", changed(num_nodes=n + 3))]
    hostile += [("memberships of more rows", "value", changed(query_membership=y.repeat(2, 1, 1)))]
    arguments = {"data": data, "edge_type": ("key", "to", "query"), "method": "bernoulli", "exploration": 0.0}
    arguments |= {"budget": d.maybe(1.0), "clamp": True, "seed": d.getrandbits(60)}
    return Case(
        lambda data, **options: SBMGraph(**options)(data), arguments, more={"data": DATA + hostile}, names={"data": DATA_NAMES},
        free=("edge_type",),
    )  # fmt: skip


TABLE |= {"SBMGraph": (10, sbm_graph), "SBMGraph.forward": (4, sbm_graph)}


# ------------------------------------------------------------------ patterns

PATTERNS: dict[str, dict[str, tuple[int, int]]] = {  # ranges of options
    "full": {}, "window": {"size": (0, 4)}, "global_tokens": {"num_global": (0, 3)}, "random": {"num_keys_per_query": (0, 5)},
    "bigbird": {"size": (0, 2), "num_global": (0, 2), "num_random": (0, 3)}, "block_diagonal": {"num_blocks": (1, 4)},
    "relay_keys": {"num_relays": (1, 4)}, "relay_queries": {"num_relays": (1, 4)}, "self_loops": {},
}  # fmt: skip


def _pattern(d: Draw, name: str) -> Case:
    lengths, which = d.lengths(), d.choice(("n", "ptr", "both"))
    lengths = lengths[:1] if which == "n" else lengths
    arguments: dict[str, Any] = {option: d.randint(*bounds) for option, bounds in PATTERNS[name].items()}
    arguments |= {"n": None if which == "ptr" else sum(lengths), "ptr": None if which == "n" else pointer(lengths)}
    arguments |= {"heads": d.randint(1, 3), "is_causal": d.random() < 0.3, "device": d.maybe("cpu")}
    if name in ("random", "bigbird"):
        arguments |= {"seed": d.getrandbits(60), "generator": None, "sequence_ids": d.maybe(d.whole(9, len(lengths)))}
    return Case(getattr(patterns, name), arguments)


for _name in PATTERNS:
    TABLE[f"patterns.{_name}"] = 9, partial(_pattern, name=_name)
