"""What the fuzz driver calls: for each public name a maker of valid arguments, and an oracle that knows what the result must be.

In: a :class:`Draw`, which is a function of the seed and the number of a call. Out: a :class:`Case`. Oracles compute apart from the library: dense
masks, networkx, brute force; or by the references of its kernels, which their own tests hold against definitions. Not here: hostile values, and verdicts (``fuzz.py``).
"""

from __future__ import annotations

import itertools
import operator
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from problems import pointer, reference_attention, small_sbms
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from sbm_pyg import SBM, AttentionGraph, SBMGraph, ops, sample_edges
from sbm_pyg.ops.reference import effects, reach, systematic, validate
from sbm_pyg.sources import patterns


class Wrong(Exception):
    """What an oracle finds wrong with a result."""


def expect(truth: Any, words: str) -> None:
    if not bool(truth):
        raise Wrong(words)


@dataclass
class Case:
    """A valid call: what is called, with what, and what the result must be; ``check(result, **arguments)`` raises :class:`Wrong`."""

    call: Callable[..., Any]
    arguments: dict[str, Any]
    check: Callable[..., None] = lambda result, **arguments: None
    free: tuple[
        str, ...
    ] = ()  # arguments where any object may stand, and those of which the library says that it ignores them
    unchecked: tuple[
        str, ...
    ] = ()  # tensors whose values the library says it does not check: only their types and shapes are mutated
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # what else an argument is called in messages
    more: dict[str, list[tuple[str, str, Callable[[], Any]]]] = field(
        default_factory=dict
    )  # hostile values of an argument's own


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


def dense(graph: AttentionGraph) -> Tensor:
    """Mask ``[H, N, M]``, read row by row."""
    rowptr, col, n = graph.rowptr.tolist(), graph.col.tolist(), graph.num_queries
    mask = torch.zeros(graph.heads, n, graph.num_keys, dtype=torch.bool)
    for row in range(graph.heads * n):
        for key in col[rowptr[row] : rowptr[row + 1]]:
            mask[row // n, row % n, key] = True
    return mask


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
            ptr[0] == 0 and ptr[-1] == total and all(a < b for a, b in itertools.pairwise(ptr)),
            "offsets do not fit the tokens",
        )
    expect(len(query_ptr) == len(key_ptr), "queries and keys have other numbers of sequences")
    for row in range(graph.heads * n):
        keys = col[rowptr[row] : rowptr[row + 1]]
        expect(all(a < b for a, b in itertools.pairwise(keys)), "a row is unsorted or repeats a key")
        b = sum(end <= row % n for end in query_ptr[1:])
        expect(all(key_ptr[b] <= key < key_ptr[b + 1] for key in keys), "an edge leaves its sequence")


def tame(*values: Any) -> bool:
    """Whether all tensors and numbers among them are finite and of a size whose products are."""
    floats = [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]
    plain = all(not isinstance(x, int | float) or abs(x) < 1e6 for x in values)
    return plain and all(not x.is_meta and bool((x.detach().abs() < 1e6).all()) for x in floats)


def close(found: Tensor, wanted: Tensor, words: str, dtype: torch.dtype | None = None, least: float = 0.0) -> None:
    """Equal to about the precision of the dtype, or that share at least, relative to the largest value."""
    expect(found.shape == wanted.shape, f"{words}: shape {list(found.shape)}, not {list(wanted.shape)}")
    if found.numel():
        error = float((found.detach().double() - wanted.detach().double()).abs().max())
        scale = max(float(wanted.detach().double().abs().max()), 0.1)
        narrow = torch.finfo(dtype or found.dtype if found.is_floating_point() else torch.float64).eps
        expect(error <= max(2000 * narrow, least) * scale, f"{words}: off by {error:.3g}")


# ------------------------------------------------------------------ the table

Maker = Callable[[Draw], Case]
TABLE: dict[str, tuple[int, Maker]] = {}  # public name -> how often it is called, and its maker


def case(name: str, weight: int = 6) -> Callable[[Maker], Maker]:
    def add(maker: Maker) -> Maker:
        TABLE[name] = weight, maker
        return maker

    return add


def function(
    name: str,
    weight: int,
    call: Callable[..., Any],
    arguments: Callable[[Draw], dict[str, Any]],
    check: Any,
    **options: Any,
) -> None:
    """A case whose check looks at nothing but the result and the arguments."""
    TABLE[name] = weight, lambda d: Case(call, arguments(d), check, **options)


def method(
    name: str, weight: int, record: Callable[[Draw], Any], arguments: Callable[[Draw, Any], dict[str, Any]], meaning: Callable[..., Any],
    read: Callable[[Any], Any] = lambda result: result, **options: Any,
) -> None:  # fmt: skip
    """A case of a method of a record; ``meaning(record, **arguments)`` is what it returns, of which ``read`` may take a part."""

    def make(d: Draw) -> Case:
        owner = record(d)

        def check(result: Any, **given: Any) -> None:
            agrees(read(result), meaning(owner, **given))

        return Case(getattr(owner, name.rpartition(".")[2]), arguments(d, owner), check, **options)

    TABLE[name] = weight, make


def agrees(found: Any, wanted: Any) -> None:
    """A graph has the edges of a dense mask, a tensor is another, and anything else is equal; ``None``: whatever it is."""
    if isinstance(wanted, Tensor):
        close(dense(found) if isinstance(found, AttentionGraph) else found, wanted, "another value")
    elif isinstance(wanted, tuple):
        for one, other in zip(found, wanted, strict=True):
            agrees(one, other)
    else:
        expect(wanted is None or found is wanted or found == wanted, "another value")


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.view(len(x), heads, -1).transpose(0, 1)


# ------------------------------------------------------------------ ops


def attention_inputs(d: Draw, sequences: int = 1) -> tuple[AttentionGraph, dict[str, Tensor]]:
    graph = d.graph(None, [d.randint(1, 6) for _ in range(sequences)])
    channels, values = d.randint(1, 5), d.randint(1, 5)
    query, key = d.real(graph.heads, graph.num_queries, channels), d.real(graph.heads, graph.num_keys, channels)
    return graph, {"query": query, "key": key, "value": d.real(graph.heads, graph.num_keys, values)}


ROWS = {"rows": ("rowptr", "col", "bias"), "probes": ("probe_rowptr", "probe_col", "probe_bias")}  # names in messages


def ends(rowptr: Tensor, col: Tensor, queries: int) -> tuple[list[int], list[int], list[int]]:
    """Head, query and key of each edge."""
    row = [i for i, count in enumerate(rowptr.diff().tolist()) for _ in range(count)]
    return [i // queries for i in row], [i % queries for i in row], col.tolist()


@case("ops.edge_dot")
def _edge_dot(d: Draw) -> Case:
    graph, x = attention_inputs(d)

    def check(result: Tensor, query: Tensor, key: Tensor, rows: Any) -> None:
        if tame(query, key):
            head, i, j = ends(rows[0], rows[1], query.size(1))
            close(result, (query[head, i].double() * key[head, j].double()).sum(-1), "dot products")

    arguments = {"query": x["query"], "key": x["key"], "rows": graph.rows}
    return Case(ops.edge_dot, arguments, check, unchecked=("rows",), names=ROWS)


@case("ops.edge_gate")
def _edge_gate(d: Draw) -> Case:
    graph, x = attention_inputs(d)

    def check(result: Tensor, **_: Any) -> None:
        expect(result.is_meta or bool((result == 1).all()), "a gate is not 1")

    arguments = {"rate": x["query"], "member": x["key"], "rows": graph.rows}
    return Case(ops.edge_gate, arguments, check, unchecked=("rows",), names=ROWS)


@case("ops.edge_attention", 12)
def _edge_attention(d: Draw) -> Case:
    graph, x = attention_inputs(d)
    x = {name: tensor.requires_grad_() for name, tensor in x.items()}
    edges = graph.rows._replace(bias=d.maybe(d.real(graph.num_edges)))
    options: dict[str, Any] = {"gate": d.maybe(d.unit(graph.num_edges) + 0.5), "rows": edges}
    options |= {
        "scale": d.uniform(0.1, 1.5),
        "gate_form": d.choice(("score", "weight")),
        "dropout": d.choice((0.0, 0.0, 0.3)),
    }

    def check(result: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, rows: Any, **o: Any) -> None:
        rowptr, col, bias = rows
        if not tame(query, key, value, o["gate"], bias, o["scale"]) or (
            o["gate"] is not None and bool((o["gate"] <= 0).any())
        ):
            return
        expect(result[0].isfinite().all(), "output is not finite")
        if o["dropout"] == 0:
            record = AttentionGraph(rowptr, col, query.size(1), key.size(1), query.size(0))
            wide = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
            extra = [x if x is None else x.detach().double() for x in (o["gate"], bias)]
            wanted = reference_attention(
                wide[0], wide[1], wide[2], record, extra[0], extra[1], o["scale"], o["gate_form"]
            )
            close(result[0], wanted, "attention")
            if all(tensor.requires_grad and tensor.is_leaf for tensor in (query, key, value)):
                found = torch.autograd.grad(result[0].sum(), (query, key, value))
                for mine, theirs in zip(found, torch.autograd.grad(wanted.sum(), wide), strict=True):
                    close(mine, theirs, "gradient", query.dtype)

    arguments = {**x, **options, "seed": d.randrange(99)}
    return Case(ops.edge_attention, arguments, check, unchecked=("rows",), names=ROWS)


@case("ops.edge_entmax", 8)
def _edge_entmax(d: Draw) -> Case:
    graph, x = attention_inputs(d)
    edges = graph.rows._replace(bias=d.maybe(d.real(graph.num_edges)))
    options: dict[str, Any] = {"gate": d.maybe(d.unit(graph.num_edges) + 0.5), "rows": edges}
    options |= {"scale": d.uniform(0.1, 1.5), "gate_form": d.choice(("score", "weight")), "dropout": 0.0}
    options |= {"alpha": d.choice((1.2, 1.5, 2.0, 1.3 + 0.5 * d.unit(graph.heads)))}

    def check(result: Tensor, query: Tensor, key: Tensor, value: Tensor, rows: Any, **o: Any) -> None:
        rowptr, col, bias = rows
        numbers = [query, key, value, o["gate"], bias, o["scale"]]
        if not tame(*numbers) or (o["gate"] is not None and bool((o["gate"] <= 0).any())) or o["dropout"]:
            return
        expect(result.isfinite().all(), "output is not finite")
        wide: list[Any] = [x if x is None else x.double() for x in numbers[:5]]
        logit = ops.edge_dot(wide[0], wide[1], ops.Rows(rowptr, col)) * o["scale"]
        if wide[3] is not None:
            logit = logit * wide[3] if o["gate_form"] == "score" else logit + wide[3].log()
        logit = logit if wide[4] is None else logit + wide[4]
        alpha = torch.as_tensor(o["alpha"], dtype=torch.float64).expand(query.size(0)).repeat_interleave(query.size(1))
        weight = ops.segment_entmax(logit, ptr=rowptr, alpha=alpha)
        head, i, j = (torch.tensor(x, dtype=torch.int64) for x in ends(rowptr, col, query.size(1)))
        wanted = torch.zeros(result.shape, dtype=torch.float64)
        wanted.index_put_((head, i), weight[:, None] * wide[2][head, j], accumulate=True)
        close(
            result, wanted, "attention", query.dtype, 4e-12
        )  # the last step to the root may move it by 1e-12 of itself

    arguments = {**x, **options, "seed": d.randrange(99)}
    return Case(ops.edge_entmax, arguments, check, unchecked=("rows",), names=ROWS)


def in_double(rows: Any) -> tuple[Any, ...]:
    """Rows whose bias is in float64, as the reference takes them."""
    return rows[0], rows[1], None if rows[2] is None else rows[2].double()


@case("ops.edge_effect")
def _edge_effect(d: Draw) -> Case:
    graph, x = attention_inputs(d)
    probes = d.graph(graph.heads, [graph.num_queries], [graph.num_keys])
    arguments: dict[str, Any] = {"grad_out": d.real(graph.heads, graph.num_queries, x["value"].size(2)), **x}
    arguments |= {
        name: each.rows._replace(bias=d.maybe(d.real(each.num_edges)))
        for name, each in (("rows", graph), ("probes", probes))
    }
    arguments |= {"scale": d.uniform(0.1, 1.5), "rate": None, "member": None, "chance": None}
    if d.random() < 0.5:
        sbm = d.model(graph)
        sides = {
            "rate": sbm.rate.to(d.dtype),
            "member": sbm.key_membership.to(d.dtype),
            "chance": d.unit(graph.num_queries),
        }
        arguments |= {**sides, "exploration": d.choice((0.0, 0.1))}

    def check(
        result: tuple[Tensor, Tensor], grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, **o: Any
    ) -> None:
        sides = grad_out, query, key, value
        if o["rate"] is None and tame(*sides, o["rows"][2], o["probes"][2], o["scale"]):
            meant: Any = effects.edge_effect
            rows = (*in_double(o["rows"]), *in_double(o["probes"]))
            wanted = meant(*(x.double() for x in sides), *rows, o["scale"], None, None, None, 0.0)
            for mine, theirs, name in zip(result, wanted, ("edges", "probes"), strict=True):
                close(mine, theirs, f"effects of {name}")

    return Case(ops.edge_effect, arguments, check, unchecked=("rows", "probes"), names=ROWS)


@case("ops.local_expectation")
def _local_expectation(d: Draw) -> Case:
    graph, x = attention_inputs(d)
    probes, sbm = d.graph(graph.heads, [graph.num_queries], [graph.num_keys]), d.model(graph)
    leaves = [sbm.rate.to(d.dtype).requires_grad_(), sbm.key_membership.to(d.dtype).requires_grad_()]
    out = d.real(graph.heads, graph.num_queries, x["value"].size(2))
    pairs = {"rows": graph.rows, "probes": probes.rows}
    more = {
        "chance": d.unit(graph.num_queries),
        "forced": d.maybe(d.whole(2, graph.num_edges) > 0),
        "scale": 0.5,
        "exploration": 0.0,
    }

    def check(result: Tensor, out: Tensor, factors: Any, **o: Any) -> None:
        rate, member = factors
        if tame(out):
            close(result, out, "what came in")
        if (
            rate.requires_grad
            and member.requires_grad
            and result.requires_grad
            and tame(rate, member, *o.values(), out)
        ):
            grads = torch.autograd.grad(result.square().sum(), (rate, member))
            expect(all(bool(grad.isfinite().all()) for grad in grads), "a gradient is not finite")

    names = {"factors": ("rate", "member"), **ROWS}
    arguments = {"out": out, "factors": tuple(leaves), **x, **pairs, **more}
    return Case(ops.local_expectation, arguments, check, unchecked=("rows", "probes"), names=names)


def sampled(result: Any, queries: Tensor, keys: Tensor, heads: int) -> AttentionGraph:
    """Rows and columns of a sampler as a graph that is valid."""
    graph = AttentionGraph(result[0], result[1], int(queries[-1]), int(keys[-1]), heads, queries, keys)
    valid(graph)
    return graph


@case("ops.sample_sbm")
def _sample_sbm(d: Draw) -> Case:
    sbm = d.sbm()
    query = torch.where(d.unit(sbm.heads, sbm.num_queries, 1) < 0.3, torch.zeros(()), sbm.rate).to(sbm.rate.dtype)
    arguments: dict[str, Any] = {
        "rate": query,
        "member": sbm.key_membership,
        "query_ptr": sbm.query_ptr,
        "key_ptr": sbm.key_ptr,
    }
    arguments |= {
        "sequence_ids": d.whole(9, sbm.num_sequences),
        "seed": d.getrandbits(60),
        "method": d.choice(("bernoulli", "fastrg")),
    }

    def check(
        result: Any, rate: Tensor, member: Tensor, query_ptr: Tensor, key_ptr: Tensor, exploration: float, **o: Any
    ) -> None:
        graph = sampled(result, query_ptr, key_ptr, rate.size(0))
        expect(not (o["is_causal"] and bool(graph.later.any())), "an edge from a later key")
        if tame(rate, member) and exploration == 0:
            p = rate.double() @ member.double().mT
            expect(not bool((dense(graph) & (p <= 0)).any()), "an edge of probability 0")

    arguments |= {"exploration": d.choice((0.0, 0.0, 0.2)), "clamp": d.random() < 0.5, "is_causal": d.random() < 0.3}
    return Case(ops.sample_sbm, arguments, check, unchecked=("query_ptr", "key_ptr"))


@case("ops.sample_queries")
def _sample_queries(d: Draw) -> Case:
    sbm = d.sbm()
    arguments: dict[str, Any] = {"query_ptr": sbm.query_ptr, "sequence_ids": d.whole(9, sbm.num_sequences)}
    arguments |= {"num_queries": sbm.num_queries, "part": d.random(), "seed": d.getrandbits(60)}

    def check(result: Any, **given: Any) -> None:
        expect(torch.equal(result, systematic.sample_queries(**given)), "other queries")

    return Case(ops.sample_queries, arguments, check, unchecked=("query_ptr",))


@case("ops.sample_systematic")
def _sample_systematic(d: Draw) -> Case:
    sbm = d.sbm()
    arguments: dict[str, Any] = {"chance": d.unit(sbm.num_queries), "query_ptr": sbm.query_ptr, "key_ptr": sbm.key_ptr}
    arguments |= {"sequence_ids": d.whole(9, sbm.num_sequences), "heads": sbm.heads, "seed": d.getrandbits(60)}
    arguments |= {"is_causal": d.random() < 0.3}

    def check(
        result: Any, chance: Tensor, query_ptr: Tensor, key_ptr: Tensor, heads: int, is_causal: Any, **_: Any
    ) -> None:
        graph = sampled(result, query_ptr, key_ptr, heads)
        expect(not (is_causal and bool(graph.later.any())), "an edge from a later key")
        sizes = torch.repeat_interleave(key_ptr.diff(), query_ptr.diff())
        if is_causal:
            place = torch.cat([torch.arange(1, n + 1) for n in query_ptr.diff().tolist()])
            sizes = torch.minimum(place, sizes)
        sizes = sizes * chance.double().nan_to_num(0).clamp(0, 1)
        expect(
            bool(((graph.degree - sizes).abs() < 1 + 1e-6).all()),
            "a number of keys that is not the probability times the keys",
        )

    return Case(ops.sample_systematic, arguments, check, unchecked=("query_ptr", "key_ptr"))


@case("ops.reach_dot")
def _reach_dot(d: Draw) -> Case:
    sbm = d.sbm()
    arguments: dict[str, Any] = {"query": sbm.rate, "key": sbm.key_membership, "query_ptr": sbm.query_ptr}
    arguments |= {"key_ptr": sbm.key_ptr, "is_causal": d.random() < 0.5}
    arguments |= {"is_strict": arguments["is_causal"] and d.random() < 0.5}

    def check(result: Tensor, query: Tensor, key: Tensor, **o: Any) -> None:
        if tame(query, key):
            wanted = reach.reach_dot(query.double(), key.double(), **o)
            expect(bool(torch.allclose(result.double(), wanted, rtol=1e-2, atol=1e-4)), "another sum")

    return Case(ops.reach_dot, arguments, check, unchecked=("query_ptr", "key_ptr"))


@case("ops.invalid_row")
def _invalid_row(d: Draw) -> Case:
    g = d.graph()
    arguments = {"rowptr": g.rowptr, "col": g.col, "query_ptr": g.query_ptr, "key_ptr": g.key_ptr, "heads": g.heads}

    def check(result: Tensor, **given: Any) -> None:
        expect(int(result) == int(validate.invalid_row(**given)), "another row")

    return Case(ops.invalid_row, arguments, check, unchecked=("query_ptr", "key_ptr"))


@case("ops.segment_entmax")
def _segment_entmax(d: Draw) -> Case:
    lengths = d.lengths()
    segment = torch.repeat_interleave(torch.tensor(lengths))
    by_index, order = d.random() < 0.5, torch.randperm(sum(lengths), generator=d.torch)

    def check(result: Tensor, src: Tensor, index: Any, ptr: Any, alpha: float, **_: Any) -> None:
        if not tame(src) or not src.is_floating_point():
            return
        expect(bool((result >= 0).all()), "a negative share")
        place = torch.repeat_interleave(ptr.diff()) if index is None else index
        narrow = 100 * torch.finfo(src.dtype).eps
        for number in place.unique().tolist():
            p, x = result[place == number].double(), src[place == number].double()
            expect(abs(float(p.sum()) - 1) < narrow, "shares do not sum to 1")
            level = (alpha - 1) * x - p ** (alpha - 1)  # the same for all that have a share, and no less for the others
            loose = narrow**0.5 * (1 + float(x.abs().max()))
            expect(float(level[p > 0].max() - level[p > narrow**0.5].min()) < loose, "shares follow no threshold")
            expect(bool(((alpha - 1) * x[p == 0] <= level[p > 0].max() + loose).all()), "a large value without a share")

    index, ptr = (segment[order], None) if by_index else (None, pointer(lengths))
    arguments = {
        "src": d.real(sum(lengths)),
        "index": index,
        "ptr": ptr,
        "num_nodes": len(lengths) if by_index else None,
    }
    return Case(
        ops.segment_entmax, {**arguments, "alpha": d.choice((1.2, 1.5, 2.0, 4.0))}, check, unchecked=("index", "ptr")
    )


# ------------------------------------------------------------------ graphs


@case("AttentionGraph", 30)
def _graph(d: Draw) -> Case:
    g = d.graph()
    arguments = {
        name: getattr(g, name) for name in ("rowptr", "col", "num_queries", "num_keys", "heads", "query_ptr", "key_ptr")
    }

    def check(result: AttentionGraph, rowptr: Tensor, col: Tensor, **_: Any) -> None:
        expect(
            result.rowptr.tolist() == rowptr.tolist() and result.col.tolist() == col.tolist(),
            "other edges than those given",
        )

    return Case(AttentionGraph, arguments, check)


@case("AttentionGraph.from_dense", 8)
def _from_dense(d: Draw) -> Case:
    shape = [d.randint(1, 4) for _ in range(d.randint(2, 4))]

    def check(result: AttentionGraph, mask: Tensor) -> None:
        full = (mask != 0).reshape(
            -1 if mask.dim() == 4 else 1, mask.shape[-3] if mask.dim() > 2 else 1, *mask.shape[-2:]
        )
        for number, wanted in enumerate(full):
            n, m = wanted.shape[1:]
            found = dense(result)[:, number * n : (number + 1) * n, number * m : (number + 1) * m]
            expect(torch.equal(found, wanted), "other edges than those of the mask")
        expect(result.num_edges == int(full.sum()), "more edges than those of the mask")

    return Case(AttentionGraph.from_dense, {"mask": d.unit(*shape) < 0.5}, check)


@case("AttentionGraph.from_edge_index", 16)
def _from_edge_index(d: Draw) -> Case:
    g = d.graph()
    order = torch.randint(g.num_edges, (g.num_edges + 2,), generator=d.torch) if g.num_edges else torch.arange(0)
    edge_index, head = g.edge_index[:, order], g.edge_head[order]
    sizes = {"num_queries": g.num_queries, "num_keys": g.num_keys, "edge_head": head, "heads": g.heads}

    def check(
        result: AttentionGraph, edge_index: Tensor, edge_head: Any, num_queries: Any, num_keys: Any, **_: Any
    ) -> None:
        key, query = edge_index.tolist()
        heads = [0] * len(key) if edge_head is None else edge_head.tolist()
        found = {*zip(*ends(result.rowptr, result.col, result.num_queries), strict=True)}
        expect(found == {*zip(heads, query, key, strict=True)}, "other edges than those given")
        expect(num_queries is None or result.num_queries == num_queries, "another number of queries")
        expect(num_keys is None or result.num_keys == num_keys, "another number of keys")

    arguments = {"edge_index": edge_index, **sizes, "query_ptr": g.query_ptr, "key_ptr": g.key_ptr}
    return Case(AttentionGraph.from_edge_index, arguments, check)


GraphCheck = Callable[[AttentionGraph, Any], None]


def part(graph: AttentionGraph, sequence: Any) -> Tensor:
    """Dense mask ``[H, n, m]`` of one sequence."""
    expect(sequence is not None or graph.num_sequences == 1, "the first of several sequences was shown unasked")
    b = operator.index(sequence or 0) % graph.num_sequences
    queries, keys = graph.query_ptr.tolist(), graph.key_ptr.tolist()
    return dense(graph)[:, queries[b] : queries[b + 1], keys[b] : keys[b + 1]]


def by_sequence(graph: AttentionGraph, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Dense mask of a graph whose sequences are changed."""
    parts = [change(part(graph, b)).float() for b in range(graph.num_sequences)]
    return torch.stack([torch.block_diag(*each) for each in zip(*parts, strict=True)]) > 0


def one_head(graph: AttentionGraph | Tensor, head: Any) -> Tensor:
    """Dense mask ``[1, N, M]`` of one head of a graph, or of a mask."""
    mask = graph if isinstance(graph, Tensor) else dense(graph)
    expect(head is not None or len(mask) == 1, "the first of several heads was shown unasked")
    return mask[operator.index(head or 0)][None]


def edges_in(graph: AttentionGraph) -> list[tuple[int, ...]]:
    """Head, query and key of each edge."""
    return sorted(zip(*ends(graph.rowptr, graph.col, graph.num_queries), strict=True))


def pairs_of(edge_index: Tensor, edge_head: Tensor) -> list[tuple[int, ...]]:
    key, query = edge_index.tolist()
    return [*zip(edge_head.tolist(), query, key, strict=True)]


def edges_of(data: Any, name: str = "edge_type") -> list[tuple[int, ...]]:
    """The same of what PyG stores, in whose absence of a type all is of the first head."""
    return sorted(pairs_of(data.edge_index, data[name] if name in data else torch.zeros_like(data.edge_index[0])))


def some_edges(d: Draw, g: AttentionGraph) -> dict[str, Tensor]:
    order = d.whole(max(g.num_edges, 1), 4) if g.num_edges else torch.arange(0)
    return {"edge_index": g.edge_index[:, order], "edge_head": g.edge_head[order]}


def twin(d: Draw, g: AttentionGraph) -> AttentionGraph:
    """Another graph over the same tokens, of as many heads or one."""
    return d.graph(d.choice((1, g.heads)), g.query_ptr.diff().tolist(), g.key_ptr.diff().tolist())


@case("AttentionGraph.from_data", 6)
def _from_data(d: Draw) -> Case:
    g = d.graph()
    square = g.num_queries == g.num_keys and torch.equal(g.query_ptr, g.key_ptr)
    data = g.to_data() if square and d.random() < 0.5 else g.to_hetero_data()

    def check(result: AttentionGraph, data: Any, **_: Any) -> None:
        if isinstance(data, Data):
            expect(edges_in(result) == sorted({*edges_of(data)}), "other edges")
        else:
            expect(edges_in(result) == edges_in(g), "other edges")

    edge_type = None if isinstance(data, Data) else d.maybe(("key", "to", "query"))
    arguments = {"data": data, "edge_type": edge_type, "heads": d.maybe(g.heads)}
    names = {"data": (*DATA_NAMES, "edge_index", "edge_head", "num_queries", "num_keys"), "heads": ("edge_head",)}
    return Case(AttentionGraph.from_data, arguments, check, more={"data": DATA}, names=names)


@case("AttentionGraph.from_networkx", 6)
def _from_networkx(d: Draw) -> Case:
    g = d.graph(None, [d.randint(1, 5)], [d.randint(1, 5)])

    def check(result: AttentionGraph, graph: Any, heads: Any) -> None:
        expect(edges_in(result) == edges_in(g), "other edges")

    arguments = {"graph": g.to_networkx(0, "all"), "heads": d.maybe(g.heads)}
    return Case(AttentionGraph.from_networkx, arguments, check, names={"heads": ("edge_head",)})


method("AttentionGraph.sequence", 6, Draw.graph, lambda d, g: {"sequence": d.randrange(g.num_sequences)}, part)
method("AttentionGraph.to_dense", 6, Draw.graph, lambda d, g: {"sequence": d.randrange(g.num_sequences)}, part)
method("AttentionGraph.head", 6, Draw.graph, lambda d, g: {"head": d.randrange(g.heads)}, one_head)
method("AttentionGraph.causal", 2, Draw.graph, lambda d, g: {}, lambda g: by_sequence(g, lambda mask: mask.tril()))
method(
    "AttentionGraph.expand", 6, lambda d: d.graph(1), lambda d, g: {"heads": d.randint(1, 4)},
    lambda g, heads: dense(g).expand(operator.index(heads), -1, -1),
)  # fmt: skip
method(
    "AttentionGraph.union", 8, Draw.graph, lambda d, g: {"other": twin(d, g)},
    lambda g, other: ((both := dense(g) | dense(other)), dense(other).expand_as(both)[both]),
)  # fmt: skip
method(
    "AttentionGraph.select", 6, Draw.graph, lambda d, g: {"mask": d.whole(2, g.num_edges) > 0},
    lambda g, mask: dense(g).masked_scatter(dense(g), mask != 0),
)  # fmt: skip
method(
    "AttentionGraph.find", 6, Draw.graph, some_edges,
    lambda g, **asked: torch.tensor([edges_in(g).index(pair) if pair in edges_in(g) else -1 for pair in pairs_of(**asked)], dtype=torch.int64),
)  # fmt: skip
method(
    "AttentionGraph.contains", 6, Draw.graph,
    lambda d, g: {"edge_index": torch.stack([d.whole(g.num_keys, 5), d.whole(g.num_queries, 5)]), "edge_head": d.whole(g.heads, 5)},
    lambda g, **asked: torch.tensor([pair in edges_in(g) for pair in pairs_of(**asked)], dtype=torch.bool),
)  # fmt: skip
method(
    "AttentionGraph.to", 3, Draw.graph, lambda d, g: {"device": d.choice(("cpu", torch.device("cpu"))), "non_blocking": False},
    lambda g, **_: g,
)  # fmt: skip
method("AttentionGraph.validate", 3, Draw.graph, lambda d, g: {}, lambda g: g)
method(
    "AttentionGraph.to_edge_index", 6, Draw.graph, lambda d, g: {"head": d.maybe(d.randrange(g.heads))},
    lambda g, head: sorted((dense(g) if head is None else one_head(g, head)).nonzero()[:, [2, 1]].tolist()),
    read=lambda result: sorted(result.as_tensor().T.tolist()),
)  # fmt: skip
method(
    "AttentionGraph.to_scipy", 6, Draw.graph,
    lambda d, g: {"head": d.randrange(g.heads), "sequence": d.maybe(d.randrange(g.num_sequences))},
    lambda g, head, sequence: one_head(g if sequence is None else part(g, sequence), head)[0],
    read=lambda result: torch.from_numpy(result.toarray()),
)  # fmt: skip
method(
    "AttentionGraph.to_sparse_tensor", 3, Draw.graph, lambda d, g: {"head": d.randrange(g.heads), "value": d.maybe(d.real(g.num_edges))},
    lambda g, head, value: one_head(g, head or 0)[0] if value is None else None, read=lambda result: result.to_dense() != 0,
)  # fmt: skip
method(
    "AttentionGraph.to_data", 3, lambda d: d.graph(None, n := d.lengths(), n), lambda d, g: {}, edges_in, read=edges_of
)
method(
    "AttentionGraph.to_hetero_data", 3, Draw.graph, lambda d, g: {}, edges_in,
    read=lambda data: edges_of(data["key", "to", "query"], "edge_head"),
)  # fmt: skip


function(
    "AttentionGraph.concatenate", 6, AttentionGraph.concatenate,
    lambda d: {"graphs": [d.graph(heads) for heads in [d.randint(1, 3)] * d.randint(1, 3)]},
    lambda result, graphs: agrees(result, torch.stack([torch.block_diag(*each) for each in zip(*(dense(g).float() for g in graphs), strict=True)])),
)  # fmt: skip


@case("AttentionGraph.same_offsets")
def _same_offsets(d: Draw) -> Case:
    g, other = d.graph(), d.graph()
    query_ptr, key_ptr = d.choice(((g.query_ptr.clone(), g.key_ptr.clone()), (other.query_ptr, other.key_ptr)))

    def check(result: bool, query_ptr: Tensor, key_ptr: Tensor) -> None:
        truth = (
            query_ptr.is_meta
            or key_ptr.is_meta
            or (query_ptr.tolist(), key_ptr.tolist()) == (g.query_ptr.tolist(), g.key_ptr.tolist())
        )
        expect(result == truth or query_ptr.is_meta or key_ptr.is_meta, f"{result}, where the truth is {truth}")

    return Case(g.same_offsets, {"query_ptr": query_ptr, "key_ptr": key_ptr}, check)


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


@case("AttentionGraph.replace_edges", 3)
def _replace_edges(d: Draw) -> Case:
    lengths = d.lengths()
    g = d.graph(None, lengths, lengths)
    data = Data(num_nodes=g.num_queries, edge_attr=torch.ones(3), ptr=g.query_ptr)

    def check(result: Data, data: Any, **_: Any) -> None:
        expect(edges_of(result) == edges_in(g) and "edge_attr" not in result, "other edges")
        expect(result.num_nodes == g.num_queries, "edges of a graph over other nodes")

    return Case(
        g.replace_edges, {"data": data, "edge_type": None}, check, more={"data": DATA}, names={"data": DATA_NAMES}
    )


def networkx_edges(result: Any, mask: Tensor, head: Any, split: bool) -> None:
    """Edges of a networkx graph against a dense mask of one sequence."""
    expect(head is not None or len(mask) == 1, "the first of several heads was shown unasked")
    heads = range(len(mask)) if head == "all" else [operator.index(head or 0)]
    wanted = Counter(
        ((("key", j), ("query", i)) if split else (j, i)) for h in heads for i, j in mask[h].nonzero().tolist()
    )
    expect(Counter(edge[:2] for edge in result.edges) == wanted, "other edges")


@case("AttentionGraph.to_networkx", 8)
def _to_networkx(d: Draw) -> Case:
    g = d.graph()

    def check(result: Any, sequence: Any, head: Any, bipartite: Any) -> None:
        mask = part(g, sequence)
        networkx_edges(result, mask, head, mask.size(1) != mask.size(2) if bipartite is None else bool(bipartite))

    arguments = {
        "sequence": d.randrange(g.num_sequences),
        "head": d.choice(("all", d.randrange(g.heads))),
        "bipartite": d.maybe(True),
    }
    return Case(g.to_networkx, arguments, check, free=("bipartite",))


# ------------------------------------------------------------------ models of graphs


@case("SBM", 16)
def _sbm(d: Draw) -> Case:
    s = d.sbm()

    def check(result: SBM, query_membership: Tensor, block_matrix: Tensor, **_: Any) -> None:
        expect(result.query_membership.shape == query_membership.shape, "other shapes")
        expect(result.query_ptr.numel() == result.key_ptr.numel(), "other sequences")
        if tame(query_membership, block_matrix):
            close(result.rate, query_membership.double() @ block_matrix.double(), "rate")

    names = ("query_membership", "key_membership", "block_matrix", "query_ptr", "key_ptr")
    return Case(SBM, {name: getattr(s, name) for name in names}, check)


def chances(s: SBM) -> Tensor:
    """Probabilities ``[H, N, M]`` by the definition, 0 across sequences."""
    lengths = [side.diff().tolist() for side in (s.query_ptr, s.key_ptr)]
    inside = torch.block_diag(*(torch.ones(n, m, dtype=torch.float64) for n, m in zip(*lengths, strict=True)))
    return (
        s.query_membership.detach().double()
        @ s.block_matrix.detach().double()
        @ s.key_membership.detach().double().mT
        * inside
    )


def chances_of_sequence(s: SBM, sequence: Any) -> Tensor:
    b = operator.index(sequence) % s.num_sequences
    queries, keys = s.query_ptr.tolist(), s.key_ptr.tolist()
    return chances(s)[:, queries[b] : queries[b + 1], keys[b] : keys[b + 1]]


def of_sequence(s: SBM, table: Tensor) -> Tensor:
    """Sums ``[B, H]`` of a table ``[H, N, M]`` over the pairs of each sequence."""
    batch = torch.repeat_interleave(s.query_ptr.diff())
    return torch.zeros(s.num_sequences, s.heads, dtype=torch.float64).index_add(0, batch, table.sum(2).T)


def fitting(d: Draw, s: SBM) -> dict[str, AttentionGraph]:
    return {"graph": d.graph(s.heads, s.query_ptr.diff().tolist(), s.key_ptr.diff().tolist())}


method("SBM.check", 3, Draw.sbm, fitting, lambda s, graph: None)
method("SBM.on", 6, Draw.sbm, fitting, lambda s, graph: chances(s)[dense(graph)])
method("SBM.gate", 3, Draw.sbm, fitting, lambda s, graph: [1.0] * graph.num_edges, read=lambda result: result.tolist())
method("SBM.validate", 2, Draw.sbm, lambda d, s: {}, lambda s: s)
method("SBM.edge_prob_dense", 6, Draw.sbm, lambda d, s: {"sequence": d.randrange(s.num_sequences)}, chances_of_sequence)


def at_most(result: SBM, keys: Any) -> None:
    expect(bool((chances(result).sum(2) <= keys * 1.001 + 1e-9).all()), "more expected keys than asked for")


@case("SBM.limit")
def _limit(d: Draw) -> Case:
    s = d.sbm()
    return Case(s.limit, {"budget": d.uniform(0.1, 5)}, lambda result, budget: at_most(result, float(budget)))


@case("SBM.with_density")
def _share(d: Draw) -> Case:
    s = d.sbm()
    keys = torch.repeat_interleave(s.key_ptr.diff(), s.query_ptr.diff())
    return Case(
        s.with_density,
        {"density": d.uniform(0.01, 1)},
        lambda result, density: at_most(result, (float(density) * keys).clamp(min=1)),
    )


SUMS: dict[str, Callable[[SBM], Tensor]] = {
    "expected_degree": lambda s: chances(s).sum(2),
    "expected_edges": lambda s: of_sequence(s, chances(s)),
    "expected_density": lambda s: of_sequence(s, chances(s)) / (s.query_ptr.diff() * s.key_ptr.diff())[:, None],
    "cut_density": lambda s: of_sequence(s, chances(s).clamp(max=1)) / (s.query_ptr.diff() * s.key_ptr.diff())[:, None],
}
for _name, _meaning in SUMS.items():

    @case(f"SBM.{_name}", 2)
    def _expected(d: Draw, name: str = _name, meaning: Callable[[SBM], Tensor] = _meaning) -> Case:
        s = d.sbm()
        return Case(getattr(s, name), {}, lambda result: close(result, meaning(s), name))


@case("sample_edges", 24)
def _sample_edges(d: Draw) -> Case:
    sbm = d.sbm()
    arguments = {
        "sbm": sbm,
        "method": d.choice(("bernoulli", "fastrg")),
        "exploration": d.choice((0.0, 0.1)),
        "budget": d.maybe(1.5),
    }
    arguments |= {"clamp": d.random() < 0.5, "seed": d.getrandbits(60), "generator": None}
    arguments |= {"sequence_ids": d.maybe(d.whole(9, sbm.num_sequences))}

    def check(result: AttentionGraph, sbm: SBM, exploration: Any, **_: Any) -> None:
        expect(
            (result.heads, result.num_queries, result.num_keys) == (sbm.heads, sbm.num_queries, sbm.num_keys),
            "other tokens",
        )
        expect(exploration > 0 or not bool((dense(result) & (chances(sbm) <= 0)).any()), "an edge of probability 0")

    return Case(sample_edges, arguments, check)


def sbm_graph(d: Draw) -> Case:
    n, heads, blocks = d.randint(1, 6), d.randint(1, 3), d.randint(1, 3)
    y = torch.rand(n, heads, blocks) / blocks
    data = Data(query_membership=y, key_membership=y, block_matrix=torch.rand(heads, blocks, blocks), num_nodes=n)
    broken = d.choice((None, None, "query_membership", "key_membership", "block_matrix", "num_nodes"))
    more = [(f"without {broken}", "value", lambda: Data(**{k: v for k, v in data.to_dict().items() if k != broken}))]
    more += [("num_nodes of others", "value", lambda: Data(**(data.to_dict() | {"num_nodes": n + 3})))]
    more += [
        (
            "memberships of more rows",
            "value",
            lambda: Data(**(data.to_dict() | {"query_membership": y.repeat(2, 1, 1)})),
        )
    ]
    arguments = {
        "data": data,
        "edge_type": ("key", "to", "query"),
        "method": "bernoulli",
        "exploration": 0.0,
        "budget": d.maybe(1.0),
    }
    arguments |= {"clamp": True, "seed": d.getrandbits(60)}

    def check(result: Data, **_: Any) -> None:
        nodes = result.num_nodes
        expect(
            result.edge_index.numel() == 0 or int(result.edge_index.max()) < nodes, "edges to nodes that there are not"
        )

    return Case(lambda data, **options: SBMGraph(**options)(data), arguments, check, more={"data": DATA + (more if broken else more[1:])},
                names={"data": DATA_NAMES}, free=("edge_type",))  # fmt: skip


TABLE |= {"SBMGraph": (10, sbm_graph), "SBMGraph.forward": (4, sbm_graph)}


# ------------------------------------------------------------------ patterns

Place = Callable[..., bool]
# ranges of options, and whether query i attends to key j among n tokens
PATTERNS: dict[str, tuple[dict[str, tuple[int, int]], Place]] = {
    "full": ({}, lambda i, j, n: True),
    "window": ({"size": (0, 4)}, lambda i, j, n, size: abs(i - j) <= size),
    "global_tokens": ({"num_global": (0, 3)}, lambda i, j, n, num_global: i < num_global or j < num_global),
    "random": ({"num_keys_per_query": (0, 5)}, lambda i, j, n, **_: True),
    "bigbird": ({"size": (0, 2), "num_global": (0, 2), "num_random": (0, 3)}, lambda i, j, n, **_: True),
    "block_diagonal": ({"num_blocks": (1, 4)}, lambda i, j, n, num_blocks: i * num_blocks // n == j * num_blocks // n),
    "relay_keys": ({"num_relays": (1, 4)}, lambda i, j, n, num_relays: j >= n - num_relays),
    "relay_queries": ({"num_relays": (1, 4)}, lambda i, j, n, num_relays: i >= n - num_relays),
    "self_loops": ({}, lambda i, j, n: i == j),
}


def check_pattern(name: str, mask: Tensor, lengths: Sequence[int], options: dict[str, Any]) -> None:
    """A dense mask ``[H, N, N]`` against the definition."""
    is_causal = options.get("is_causal", False)
    options = {
        key: operator.index(value) for key, value in options.items() if key in PATTERNS[name][0] and value is not None
    }
    start = 0
    for n in lengths:
        found = mask[:, start : start + n, start : start + n]
        if name == "random":
            reach = torch.arange(1, n + 1) if is_causal else torch.full((n,), n)
            wanted = reach.clamp(max=min(options["num_keys_per_query"], n))
            expect(bool((found.sum(2) == wanted).all()), "another number of keys")
        elif name == "bigbird":
            least = torch.tensor(
                [
                    [abs(i - j) <= options["size"] or min(i, j) < options["num_global"] for j in range(n)]
                    for i in range(n)
                ]
            )
            least = least.tril() if is_causal else least
            extra = (found & ~least).sum(2)
            expect(
                bool((found | ~least).all()) and bool((extra <= min(options["num_random"], 2**40)).all()),
                "other edges than those of the definition",
            )
        else:
            wanted = torch.tensor([[PATTERNS[name][1](i, j, n, **options) for j in range(n)] for i in range(n)])
            wanted = wanted.tril() if is_causal else wanted
            expect(bool((found == wanted).all()), "other edges than those of the definition")
        expect(not (is_causal and bool(found.triu(1).any())), "an edge from a later key")
        start += n
    expect(start == mask.size(1), "another number of tokens")


def pattern_options(d: Draw, name: str) -> dict[str, Any]:
    options: dict[str, Any] = {option: d.randint(*bounds) for option, bounds in PATTERNS[name][0].items()} | {
        "heads": d.randint(1, 3)
    }
    options |= {"is_causal": d.random() < 0.3}
    return options | ({"seed": d.getrandbits(60), "generator": None} if name in ("random", "bigbird") else {})


def _pattern(d: Draw, name: str) -> Case:
    lengths = d.lengths()
    which = d.choice(("n", "ptr", "both"))
    lengths = lengths[:1] if which == "n" else lengths
    arguments = {"n": None if which == "ptr" else sum(lengths), "ptr": None if which == "n" else pointer(lengths)}
    arguments |= pattern_options(d, name) | {"device": d.maybe("cpu")}
    arguments |= {"sequence_ids": d.maybe(d.whole(9, len(lengths)))} if name in ("random", "bigbird") else {}

    def check(result: AttentionGraph, n: Any, ptr: Any, heads: Any, **options: Any) -> None:
        sizes = [operator.index(n)] if ptr is None else ptr.diff().tolist()
        expect(result.heads == heads and result.query_ptr.diff().tolist() == sizes, "other heads or sequences")
        check_pattern(name, dense(result), sizes, options)

    return Case(getattr(patterns, name), arguments, check)


for _name in PATTERNS:
    TABLE[f"patterns.{_name}"] = 9, partial(_pattern, name=_name)
