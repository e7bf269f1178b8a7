"""What the fuzz driver calls beyond graphs: estimators, layers, models, analysis, plots and helpers; see ``fuzz_cases``, whose table this fills."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import torch
from fuzz_cases import (
    DATA,
    DATA_NAMES,
    TABLE,
    Case,
    Draw,
    agrees,
    attention_inputs,
    case,
    chances,
    check_pattern,
    close,
    dense,
    expect,
    function,
    method,
    networkx_edges,
    part,
    pointer,
    split_heads,
    tame,
    valid,
)
from problems import brute_force, held_karp, reference_attention
from torch import Tensor, nn
from torch_geometric.data import Data

import sbm_pyg
from sbm_pyg import (
    SBM,
    ALiBi,
    AttentionConv,
    AttentionGraph,
    BlockGraph,
    BlockPool,
    Choice,
    DCMMBias,
    EncoderTrace,
    Entmax,
    FullAttention,
    MaskedLM,
    PairClassifier,
    Rotary,
    SBMAttentionConv,
    SBMHead,
    SBMMultiheadAttention,
    SBMSource,
    SequenceClassifier,
    SequenceEncoder,
    SourceGraph,
    SparseGPSConv,
    TokenClassifier,
    Tokens,
    analysis,
    auxiliary_loss,
    estimators,
    info,
    mask_tokens,
    models,
    ragged,
    sparsefinder,
)
from sbm_pyg.analysis import plots
from sbm_pyg.layers.attention import Returns
from sbm_pyg.rows import CompressedRows
from sbm_pyg.sources import indexer, patterns, selectors
from sbm_pyg.sparsefinder import ground_truth, predictors

# ------------------------------------------------------------------ estimators


def of_graph(d: Draw, **more: Callable[[AttentionGraph], Any]) -> dict[str, Any]:
    """A graph, a model over its tokens, and what else is made for the graph."""
    g = d.graph()
    return {"probability": d.model(g), "graph": g} | {name: make(g) for name, make in more.items()}


def tame_model(sbm: SBM, *more: Any) -> bool:
    return tame(sbm.query_membership, sbm.key_membership, sbm.block_matrix, *more)


function("estimators.straight_through", 3, estimators.straight_through, lambda d: of_graph(d, forced=lambda g: d.maybe(d.whole(2, g.num_edges) > 0)),
         lambda result, **_: expect((result == 1).all(), "a gate is not 1"))  # fmt: skip
function("estimators.score_function", 3, estimators.score_function,
         lambda d: of_graph(d, loss=lambda g: d.real(g.num_sequences)) | {"exploration": 0.1},
         lambda result, **_: expect(result.dim() == 0 and (bool(result == 0) or bool(result.isnan())), "a value that is not 0"))  # fmt: skip


@case("estimators.draw_probes", 5)
def _draw_probes(d: Draw) -> Case:
    g = d.graph()
    arguments = {"graph": g, "per_query": d.choice((0.0, 1.5, math.inf)), "seed": d.getrandbits(60)}
    arguments |= {"sequence_ids": d.maybe(d.whole(9, g.num_sequences))}

    def check(result: tuple[AttentionGraph, Tensor], graph: AttentionGraph, per_query: Any, **_: Any) -> None:
        keys = torch.repeat_interleave(graph.key_ptr.diff(), graph.query_ptr.diff())
        wanted = (float(per_query) / keys).clamp(max=1)
        close(result[1], wanted, "chances")
        expect(bool(((result[0].degree - wanted * keys).abs() < 1 + 1e-4).all()), "another number of probes")

    return Case(estimators.draw_probes, arguments, check)


@case("estimators.attach_local_expectation", 6)
def _local(d: Draw) -> Case:
    graph, x = attention_inputs(d, d.randint(1, 2))
    sbm, probes = d.model(graph), d.graph(graph.heads, graph.query_ptr.diff().tolist(), graph.key_ptr.diff().tolist())
    y, z, block_matrix = (each.to(d.dtype) for each in (sbm.query_membership, sbm.key_membership, sbm.block_matrix))
    sbm = SBM(y.requires_grad_(), z, block_matrix, sbm.query_ptr, sbm.key_ptr)
    arguments = {
        "out": d.real(graph.heads, graph.num_queries, x["value"].size(2)), **x, "probability": sbm, "graph": graph, "probes": probes,
    }  # fmt: skip
    arguments |= {"chance": d.unit(graph.num_queries), "bias": d.maybe(d.real(graph.num_edges)), "scale": 0.5}
    arguments |= {"probe_bias": d.maybe(d.real(probes.num_edges)), "exploration": d.choice((0.0, 0.1))}
    arguments |= {"forced": d.maybe(d.whole(2, graph.num_edges) > 0)}

    def check(result: Tensor, out: Tensor, probability: SBM, **o: Any) -> None:
        y = probability.query_membership
        if tame(out):
            close(result, out, "what came in")
        if y.requires_grad and result.requires_grad and tame_model(probability, out, *o.values()):
            expect(torch.autograd.grad(result.square().sum(), y)[0].isfinite().all(), "a gradient is not finite")

    return Case(estimators.attach_local_expectation, arguments, check)


def _relaxed(result: Tensor, probability: SBM, graph: AttentionGraph, exploration: Any) -> None:
    if tame_model(probability):
        wide = max(result.dtype, torch.float32, key=lambda dtype: torch.finfo(dtype).eps)
        close(result, (chances(probability)[dense(graph)] + exploration).clamp(1e-9, 1).log(), "logarithms", wide)


def _concrete(result: Tensor, probability: SBM, temperature: Any, **_: Any) -> None:
    expect(not math.isnan(temperature) and temperature > 0, "a temperature that is not positive was taken")
    expect(not tame_model(probability) or bool((result <= 0).all()), "the logarithm of a coin is above 0")


function("estimators.relaxed_bias", 3, estimators.relaxed_bias, lambda d: of_graph(d) | {"exploration": 0.1}, _relaxed)
function(
    "estimators.concrete_bias", 4, estimators.concrete_bias,
    lambda d: of_graph(d) | {"temperature": d.uniform(0.1, 2), "seed": d.getrandbits(60), "exploration": 0.1}, _concrete,
)  # fmt: skip


# ------------------------------------------------------------------ layers


def layer_options(d: Draw) -> dict[str, Any]:
    options: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": d.randint(1, 3),
        "heads": d.randint(1, 3),
        "num_blocks": d.randint(1, 4),
    }
    options |= {
        "concat": d.random() < 0.7,
        "bias": d.random() < 0.7,
        "is_causal": d.random() < 0.2,
        "sbm_options": None,
    }
    options |= {
        "estimator": d.maybe(d.choice([*estimators.ESTIMATORS])),
        "probes": 4.0,
        "exploration": d.maybe(0.1),
        "method": "bernoulli",
    }
    options |= {"budget": d.maybe(2.0), "self_loops": d.random() < 0.3, "window": d.maybe(1), "normalizer": "softmax"}
    return options | {"dropout": d.choice((0.0, 0.2))}


def finite(result: Any) -> None:
    expect(result.is_meta or result.isfinite().all(), "output is not finite")


def finite_gradients(layer: nn.Module) -> None:
    expect(all(p.grad is None or bool(p.grad.isfinite().all()) for p in layer.parameters()), "a gradient is not finite")


@case("SBMAttentionConv", 24)
def _conv(d: Draw) -> Case:
    lengths = d.lengths()
    options = layer_options(d)
    if d.random() < 0.2:
        options |= {
            "normalizer": d.choice(("entmax15", "sparsemax", "entmax")),
            "estimator": d.choice(("mask", "none")),
        }

    def call(in_channels: Any, **options: Any) -> Any:
        layer = SBMAttentionConv(in_channels, **options)
        x = torch.randn(sum(lengths), 4 if in_channels == -1 else in_channels, requires_grad=True)
        out = layer(x, ptr=pointer(lengths), seed=0)
        (out.sum() + auxiliary_loss(layer)).backward()
        return out, x.grad, layer

    def check(result: Any, heads: Any, out_channels: Any, concat: Any, **_: Any) -> None:
        out, grad, layer = result
        expect(out.shape == (sum(lengths), out_channels * (heads if concat else 1)), "another shape")
        finite(out)
        finite(grad)
        finite_gradients(layer)

    return Case(call, options, check, free=("sbm_options",))


def _entmax(result: Entmax, heads: int, alpha: Any, learnable: bool) -> None:
    expect(result.alpha.shape == (heads,) and result.alpha.requires_grad == learnable, "another alpha")
    expect(bool(((result.alpha.double() - torch.as_tensor(alpha)).abs() < 1e-5).all()), "another start")


function(
    "Entmax", 4, Entmax,
    lambda d: {"heads": d.randint(1, 3), "alpha": d.choice((1.2, 1.5, 1.9)), "learnable": d.random() < 0.7}, _entmax,
)  # fmt: skip


@case("Entmax.forward", 4)
def _entmax_forward(d: Draw) -> Case:
    lengths, heads = d.lengths(), d.randint(1, 3)
    by_index = d.random() < 0.5
    segment = {"index": torch.repeat_interleave(pointer(lengths).diff()), "ptr": None, "num_nodes": len(lengths)}
    segment = segment if by_index else {"index": None, "ptr": pointer(lengths), "num_nodes": None}

    def check(result: Tensor, src: Tensor, index: Any, ptr: Any, **_: Any) -> None:
        if tame(src) and src.is_floating_point():
            place = torch.repeat_interleave(ptr.diff()) if index is None else index
            sums = torch.zeros(int(place.max()) + 1, *src.shape[1:]).index_add_(0, place, result.float())[place]
            expect(bool((result >= 0).all() and (sums - 1).abs().max() < 0.1), "no shares")

    return Case(Entmax(heads, 1.4), {"src": d.real(sum(lengths), heads), **segment}, check, unchecked=("index", "ptr"))


def float_tokens(d: Draw, count: int, channels: int) -> Tensor:
    return torch.randn(count, channels, generator=d.torch)


def two_sides(d: Draw, heads: int, queries: int, keys: int) -> dict[str, Any]:
    return {
        "query": torch.randn(heads, queries, 3, generator=d.torch),
        "key": torch.randn(heads, keys, 3, generator=d.torch),
    }


@case("AttentionConv.forward", 30)
def _conv_forward(d: Draw) -> Case:
    lengths = d.lengths()
    g = d.graph(None, lengths, lengths)
    x, how = float_tokens(d, sum(lengths), 4), d.choice(("graph", "edges", "typed", "sample", "pair"))
    edge_attr = d.maybe(float_tokens(d, g.num_edges, 2)) if how in ("graph", "typed") else None
    edge_dim = None if edge_attr is None else 2
    conv = SBMAttentionConv(4, d.randint(1, 3), g.heads, 3, probes=2.0, edge_dim=edge_dim).train(d.random() < 0.5)
    given = {"graph": g, "edges": g.edge_index, "typed": g.edge_index, "sample": None, "pair": None}[how]
    head = g.edge_head if how == "typed" else None
    by_batch = d.random() < 0.4
    ptr, batch = (None, torch.repeat_interleave(pointer(lengths).diff())) if by_batch else (pointer(lengths), None)
    tokens = (x, float_tokens(d, sum(lengths), 4)) if how == "pair" else x
    arguments = {
        "x": tokens,
        "edge_index": given,
        "edge_attr": edge_attr,
        "edge_head": head,
        "ptr": ptr,
        "batch": batch,
        "seed": d.getrandbits(60),
    }
    arguments |= {"sequence_ids": d.maybe(d.whole(9, len(lengths))) if given is None else None, "return_graph": True}

    def check(result: Any, x: Any, **o: Any) -> None:
        out, graph = result
        keys, queries = x if isinstance(x, tuple) else (x, x)
        if not tame(keys, queries):
            return
        if o["edge_attr"] is not None:
            conv.fuse = False
            close(out, conv(x, **o)[0], "message passing", torch.float32)
            conv.fuse = True
            return
        finite(out)
        q, k, v = (
            split_heads(lin(y), conv.heads)
            for lin, y in ((conv.lin_query, queries), (conv.lin_key, keys), (conv.lin_value, keys))
        )
        wanted = reference_attention(q.double(), k.double(), v.double(), graph, None, None, conv.scale, "score")
        close(out, wanted.transpose(0, 1).flatten(1), "attention", torch.float32)
        if how in ("graph", "edges", "typed") and isinstance(o["edge_index"], AttentionGraph | Tensor):
            kept = dense(graph)
            mine = dense(g) if how != "edges" else dense(g).any(0, keepdim=True).expand_as(kept)
            same_edges = o["edge_index"] is g or (
                isinstance(o["edge_index"], Tensor) and o["edge_index"].tolist() == g.edge_index.tolist()
            )
            expect(
                torch.equal(kept, mine) or not same_edges or o["edge_head"] is not head, "other edges than those given"
            )
        conv.zero_grad()
        (out.sum() + auxiliary_loss(conv)).backward()
        finite_gradients(conv)

    free = ("return_graph",) if given is None else ("return_graph", "sequence_ids")  # a given graph draws nothing
    names: dict[str, tuple[str, ...]] = {"x": ("x[0]", "x[1]", "query_membership", "key_membership")}
    names |= {"ptr": ("sequence_ids",), "batch": ("sequence_ids",)}
    return Case(conv, arguments, check, free=free, names=names)


@case("AttentionConv.attend", 10)
def _attend(d: Draw) -> Case:
    n = [d.randint(1, 6) for _ in range(d.randint(1, 2))]
    g = d.graph(None, n, d.choice((n, [2 for _ in n])))
    channels = d.randint(1, 4)
    conv = SBMAttentionConv(4, channels, g.heads, 3, probes=2.0).eval()
    q, k, v = (
        torch.randn(g.heads, count, channels, generator=d.torch) for count in (g.num_queries, g.num_keys, g.num_keys)
    )
    arguments: dict[str, Any] = {"query": q, "key": k, "value": v, "edge_index": d.choice((g, None)), "bipartite": True}
    arguments |= {"ptr": (g.key_ptr, g.query_ptr), "seed": d.getrandbits(60), "returns": Returns(graph=True)}
    arguments |= {"edge_filter": d.maybe(lambda graph: graph.edge_index[0] % 2 == 0)}

    def check(result: Any, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> None:
        if tame(query, key, value):
            wanted = reference_attention(
                query.double(), key.double(), value.double(), result[1], None, None, conv.scale, "score"
            )
            close(result[0], wanted.transpose(0, 1).flatten(1), "attention", torch.float32)

    names = {"query": ("query_membership",), "key": ("key_membership",)}
    return Case(conv.attend, arguments, check, names=names)


@case("SBMHead", 10)
def _head_options(d: Draw) -> Case:
    options: dict[str, Any] = {
        "channels": d.randint(1, 4),
        "heads": d.randint(1, 3),
        "num_blocks": d.randint(1, 4),
        "groups": 1,
    }
    options |= {
        "cluster_init": d.choice(("kaiming", "orthogonal")),
        "degree_corrected": d.random() < 0.5,
        "tied": False,
    }
    options |= {
        "parameterization": d.choice(("paper", "mixed", "assortative", "overlapping")),
        "initial_density": 0.25,
        "temperature": 1.0,
    }
    if options["parameterization"] in ("assortative", "overlapping"):
        options["groups"] = d.randint(1, 3)
        options["num_blocks"] **= options["groups"]

    def call(**options: Any) -> Any:
        head = SBMHead(**options)
        return head(Tokens(torch.randn(head.heads, 5, head.channels)))

    return Case(call, options, lambda result, **_: shares(result))


def shares(sbm: SBM) -> None:
    p = chances(sbm)
    expect(bool(((p >= 0) & (p <= 1 + 1e-5)).all()), "a probability outside of [0, 1]")


@case("SBMHead.forward", 6)
def _head_forward(d: Draw) -> Case:
    lengths, keys = d.lengths(), None
    head = SBMHead(3, 2, 4, tied=d.random() < 0.3)
    keys = lengths if head.tied else [d.randint(1, 6) for _ in lengths]
    arguments = two_sides(d, 2, sum(lengths), sum(keys)) | {"query_ptr": pointer(lengths), "key_ptr": pointer(keys)}

    def check(result: SBM, query: Tensor, key: Tensor, **_: Any) -> None:
        if tame(query, key):
            shares(result)

    return Case(of_tokens(head), arguments, check)


def _head_degrees(result: Any, query: Tensor, key: Tensor) -> None:
    for degree, x in zip(result, (query, key), strict=True):
        expect(degree.shape == x.shape[:2], "other tokens")
        expect(not tame(x) or bool(((degree > 0) & (degree < 1)).all()), "a degree outside of (0, 1)")


TABLE["SBMHead.degrees"] = (
    2,
    lambda d: Case(SBMHead(3, 2, 4, degree_corrected=True).degrees, two_sides(d, 2, 5, 4), _head_degrees),
)


@case("DCMMBias", 6)
def _dcmm(d: Draw) -> Case:
    options: dict[str, Any] = {"channels": d.randint(1, 4), "heads": d.randint(1, 3), "num_blocks": d.randint(1, 4)}
    options |= {"degree": d.choice(("relu", "sigmoid", "softplus")), "squash": d.random() < 0.5, "symmetric": False}
    options |= {"tied": d.random() < 0.5, "scale": 10.0, "entropy_weight": d.choice((0.0, 0.1))}

    def check(result: DCMMBias, scale: Any, **given: Any) -> None:
        expect(result.affinity.shape == (given["heads"], given["num_blocks"], given["num_blocks"]), "other sizes")
        expect(abs(float(result.scale.detach()) - scale) <= 1e-5 * abs(scale), "another scale")

    return Case(DCMMBias, options, check)


@case("DCMMBias.forward", 4)
def _dcmm_forward(d: Draw) -> Case:
    graph = d.graph()
    tied = graph.num_queries == graph.num_keys and d.random() < 0.5
    bias = DCMMBias(3, graph.heads, 2, tied=tied, degree=d.choice(("relu", "sigmoid", "softplus")))

    def check(result: Tensor, query: Tensor, key: Tensor, graph: AttentionGraph) -> None:
        expect(result.shape == graph.col.shape and result.dtype == query.dtype, "other edges")
        expect(not tame(query, key) or bool((result >= 0).all()), "a negative bias")

    return Case(bias.forward, two_sides(d, graph.heads, graph.num_queries, graph.num_keys) | {"graph": graph}, check)


def _dcmm_predict(result: Any, query: Tensor, key: Tensor) -> None:
    if tame(query, key):
        sums = result.query_membership.sum(-1), result.key_membership.sum(-1)
        expect(all(bool(((x - 1).abs() < 1e-3).all()) for x in sums), "no shares")
        expect(bool(result.entropy <= math.log(4) + 1e-3), "more than the most")


TABLE["DCMMBias.predict"] = (
    4,
    lambda d: Case(DCMMBias(3, 2, 4, tied=False).predict, two_sides(d, 2, 5, 4), _dcmm_predict),
)


@case("ALiBi", 1)
def _alibi(d: Draw) -> Case:
    def check(result: ALiBi, heads: Any) -> None:
        expect(result.slope.shape == (heads,) and bool(((result.slope > 0) & (result.slope < 1)).all()), "other slopes")

    return Case(ALiBi, {"heads": d.randint(1, 20)}, check)


@case("ALiBi.forward", 3)
def _alibi_forward(d: Draw) -> Case:
    graph = d.graph()

    def check(result: Tensor, query: Tensor, key: Tensor, graph: AttentionGraph) -> None:
        expect(result.shape == graph.col.shape and result.dtype == query.dtype, "other edges")
        expect(bool((result <= 0).all()) and bool((result[graph.lag == 0] == 0).all()), "a wrong bias")

    arguments = two_sides(d, graph.heads, graph.num_queries, graph.num_keys) | {"graph": graph}
    return Case(ALiBi(graph.heads).forward, arguments, check)


@case("ALiBi.dense_bias", 1)
def _alibi_dense(d: Draw) -> Case:
    def check(result: Tensor, num_queries: Any, num_keys: Any) -> None:
        expect(result.shape == (2, num_queries, num_keys), "another shape")

    return Case(ALiBi(2).dense_bias, {"num_queries": d.randint(1, 5), "num_keys": d.randint(1, 5)}, check)


@case("Rotary", 1)
def _rotary(d: Draw) -> Case:
    options = {"base": d.choice((10000.0, 2.5)), "channels": d.choice((None, 2, 8)), "for_source": d.random() < 0.5}
    return Case(Rotary, options, lambda result, base, **given: expect(result.base == base, "another base"))


@case("Rotary.forward", 3)
def _rotary_forward(d: Draw) -> Case:
    count = d.randint(1, 6)
    x, position = torch.randn(2, count, 4, generator=d.torch), torch.randperm(count, generator=d.torch)

    def check(result: Tensor, x: Tensor, position: Tensor) -> None:
        if tame(x):
            close(result.norm(dim=-1), x.norm(dim=-1), "another length")

    return Case(Rotary().forward, {"x": x, "position": position}, check)


def block_graph(d: Draw) -> BlockGraph:
    """Blocks of up to three tokens of some sequences."""
    block_size, lengths = d.randint(1, 3), d.lengths()
    counts = [-(-length // block_size) for length in lengths]
    return BlockGraph(d.graph(queries=counts, keys=counts), block_size, query_ptr=pointer(lengths))


@case("BlockGraph", 4)
def _block_graph(d: Draw) -> Case:
    graph = block_graph(d)
    arguments = {
        "blocks": graph.blocks,
        "block_size": graph.block_size,
        "query_ptr": graph.query_ptr,
        "key_ptr": d.maybe(graph.key_ptr),
    }
    return Case(BlockGraph, arguments, lambda result, **_: valid(result.expand_tokens()))


function("BlockPool", 2, BlockPool, lambda d: {"channels": d.randint(1, 4), "heads": d.randint(1, 3)},
         lambda result, channels, heads: expect(result.weight.shape == (heads, channels), "other sizes"))  # fmt: skip


def _block_pool_forward(result: Tensor, tokens: Tensor, there: Tensor) -> None:
    if tame(tokens) and bool(there.any(1).all()):
        expect(result.shape == (2, 3, 5), "other sizes")


TABLE["BlockPool.forward"] = 2, lambda d: Case(
    BlockPool(5, 2),
    {"tokens": torch.randn(2, 3, 4, 5, generator=d.torch), "there": torch.ones(3, 4, dtype=torch.bool)}, _block_pool_forward,
)  # fmt: skip


@case("ops.block_attention", 4)
def _block_attention(d: Draw) -> Case:
    graph = block_graph(d)
    sizes = {"query": graph.num_queries, "key": graph.num_keys, "value": graph.num_keys}
    arguments: dict[str, Any] = {name: d.real(graph.heads, count, 3) for name, count in sizes.items()}
    arguments |= {"rows": graph.blocks.rows, "ptrs": (graph.query_ptr, graph.key_ptr), "block_size": graph.block_size}
    arguments |= {"is_causal": False, "scale": d.uniform(0.1, 1.5)}

    def check(result: Any, query: Tensor, key: Tensor, value: Tensor, scale: Any, **_: Any) -> None:
        if tame(query, key, value, scale):
            wanted = sbm_pyg.ops.edge_attention(query, key, value, graph.rows, scale=float(scale))
            close(result[0], wanted[0], "attention over the tokens")

    return Case(sbm_pyg.ops.block_attention, arguments, check, unchecked=("rows",), names={"rows": ("rowptr", "col")})


@case("SBMMultiheadAttention", 8)
def _multihead(d: Draw) -> Case:
    heads = d.randint(1, 3)
    options: dict[str, Any] = {
        "embed_dim": 2 * heads, "num_heads": heads, "dropout": 0.0, "bias": True, "add_bias_kv": False, "add_zero_attn": False,
    }  # fmt: skip
    options |= {
        "kdim": d.maybe(5),
        "vdim": d.maybe(3),
        "batch_first": True,
        "device": None,
        "dtype": d.choice((None, torch.float64)),
    }
    options |= {"num_blocks": d.randint(1, 4), "budget": d.maybe(2.0)}

    def call(embed_dim: Any, num_heads: Any, kdim: Any, vdim: Any, **options: Any) -> Any:
        layer = SBMMultiheadAttention(embed_dim, num_heads, kdim=kdim, vdim=vdim, **options)
        widths = (embed_dim, embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim)
        return layer(*(torch.randn(2, 4, width, dtype=options["dtype"]) for width in widths), seed=0)[0]

    return Case(call, options, lambda result, **_: finite(result))


@case("SBMMultiheadAttention.forward", 16)
def _multihead_forward(d: Draw) -> Case:
    heads, length, keys, batch = d.randint(1, 2), d.randint(1, 4), d.randint(1, 4), d.randint(1, 3)
    old = nn.MultiheadAttention(4, heads, batch_first=True)
    full = d.random() < 0.5
    layer = SBMMultiheadAttention.from_torch(old, num_blocks=None if full else 3).eval()
    q, k, v = (torch.randn(batch, count, 4, generator=d.torch) for count in (length, keys, keys))
    padding = torch.arange(keys) >= torch.tensor([[d.randint(1, keys)] for _ in range(batch)])
    arguments: dict[str, Any] = {
        "query": q,
        "key": k,
        "value": v,
        "key_padding_mask": d.maybe(padding),
        "need_weights": d.random() < 0.5,
    }
    arguments |= {
        "attn_mask": d.maybe(torch.ones(length, keys, dtype=torch.bool).triu(1)), "average_attn_weights": True, "is_causal": False,
    }  # fmt: skip
    arguments |= {"seed": d.getrandbits(60), "sequence_ids": None if full else d.maybe(d.whole(9, batch))}

    def check(result: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: Any, **o: Any) -> None:
        if not tame(query, key, value):
            return
        finite(result[0])
        if full and not is_causal and query is not key:
            wanted = old(query, key, value, key_padding_mask=o["key_padding_mask"], attn_mask=o["attn_mask"])[0]
            finite_rows = wanted.isfinite()
            close(result[0][finite_rows], wanted[finite_rows], "torch's attention", torch.float32)

    return Case(layer, arguments, check, free=("sequence_ids",) if full else ())


@case("SBMMultiheadAttention.from_torch", 4)
def _from_torch(d: Draw) -> Case:
    arguments = {"attention": nn.MultiheadAttention(4, d.randint(1, 2), batch_first=True), "num_blocks": None}
    layers: list[tuple[str, str, Callable[[], Any]]] = [
        ("a Linear", "value", lambda: nn.Linear(4, 4)), ("with bias_k", "value", lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True)),
        ("ours", "value", lambda: SBMMultiheadAttention(4, 2)), ("zero_attn", "value", lambda: nn.MultiheadAttention(4, 2, add_zero_attn=True)),
    ]  # fmt: skip

    def check(result: SBMMultiheadAttention, attention: nn.MultiheadAttention, num_blocks: Any) -> None:
        x = torch.randn(2, 3, 4)
        if num_blocks is None and attention.batch_first:
            close(result(x, x, x)[0], attention(x, x, x)[0], "torch's attention", torch.float32)

    names = {"attention": ("add_bias_kv", "add_zero_attn")}
    return Case(SBMMultiheadAttention.from_torch, arguments, check, more={"attention": layers}, names=names)


@case("SparseGPSConv", 6)
def _gps(d: Draw) -> Case:
    heads, lengths = d.randint(1, 3), d.lengths()
    options: dict[str, Any] = {"channels": 4, "conv": None, "attn": SBMAttentionConv(4, 2, heads, num_blocks=3)}
    options |= {"dropout": d.choice((0.0, 0.3))}
    norm = d.maybe("batch_norm")  # an unknown name gets PyG's own error

    def call(channels: Any, **options: Any) -> Tensor:
        batch = torch.repeat_interleave(pointer(lengths).diff())
        return SparseGPSConv(channels, norm=norm, **options).eval()(torch.randn(sum(lengths), channels), None, batch)

    return Case(call, options, lambda result, **_: finite(result))


@case("SparseGPSConv.forward", 8)
def _gps_forward(d: Draw) -> Case:
    lengths, heads = d.lengths(), d.randint(1, 3)
    attn = AttentionConv(4, 2, heads, patterns.PatternSource(patterns.full))
    layer = SparseGPSConv(4, None, attn, norm=None)
    x, batch = float_tokens(d, sum(lengths), 4), torch.repeat_interleave(pointer(lengths).diff())
    arguments = {"x": x, "edge_index": None, "batch": batch, "attn_kwargs": d.maybe({"seed": d.getrandbits(60)})}

    def check(result: Tensor, x: Tensor, batch: Any, **_: Any) -> None:
        if tame(x):
            wanted = x + layer.lin_out(attn(x, batch=batch))
            close(result, wanted + layer.mlp(wanted), "attention and its residuals", torch.float32)

    return Case(layer, arguments, check, free=("edge_index",))


# ------------------------------------------------------------------ models


def encoder_options(d: Draw) -> dict[str, Any]:
    attention = d.choice(models.ATTENTION)
    extra = {"sbm": {"num_blocks": 3}, "window": {"size": 1}, "bigbird": {"num_random": 1}, "top_k": {"k": 2}}
    options = {
        "num_tokens": 9,
        "channels": 4,
        "num_layers": d.randint(1, 2),
        "heads": d.randint(1, 2),
        "head_channels": d.maybe(2),
    }
    options |= {"ffn_channels": d.maybe(5), "max_length": 8, "dropout": d.choice((0.0, 0.1))}
    options |= {"position_encoding": d.choice(("learned", "rotary"))}
    return options | {"attention": attention, "attention_options": extra.get(attention)}


def encoder(d: Draw) -> SequenceEncoder:
    return SequenceEncoder(**encoder_options(d)).train(d.random() < 0.5)


def tokens(d: Draw) -> dict[str, Any]:
    lengths = d.lengths()
    positions = torch.cat([torch.arange(n) for n in lengths])
    arguments = {
        "tokens": d.whole(9, sum(lengths)),
        "ptr": pointer(lengths),
        "batch": None,
        "positions": d.maybe(positions),
    }
    return arguments | {
        "seed": d.getrandbits(60),
        "sequence_ids": d.maybe(d.whole(9, len(lengths))),
        "return_trace": True,
    }


def ignored(model: SequenceEncoder) -> tuple[str, ...]:
    """What an encoder does not look at: sequence_ids, where its attention draws nothing."""
    return (
        ("return_trace",)
        if model.constructor_options()["attention"] in ("sbm", "bigbird")
        else ("return_trace", "sequence_ids")
    )


def check_trace(result: Any, rows: int, width: int) -> None:
    """Of what came with a trace, and of the output alone where a hostile ``return_trace`` counts as False."""
    out, trace = (result, None) if isinstance(result, Tensor) else result
    expect(out.shape == (rows, width), "another shape")
    finite(out)
    expect(trace is None or bool(((trace.density >= 0) & (trace.density <= 1)).all()), "a density outside of [0, 1]")


@case("SequenceEncoder", 16)
def _encoder(d: Draw) -> Case:
    def call(**options: Any) -> Any:
        return SequenceEncoder(**options)(
            torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 2, 5]), seed=0, return_trace=True
        )

    return Case(call, encoder_options(d), lambda result, channels, **_: check_trace(result, 5, channels))


def _model_forward(d: Draw, kind: Any) -> Case:
    """A model, which has an output for each token, or for each sequence."""
    inner, arguments = encoder(d), tokens(d)
    model = kind(inner, 3) if kind else inner

    def check(result: Any, tokens: Tensor, ptr: Any, **_: Any) -> None:
        sequences = 1 if ptr is None else len(ptr) - 1
        check_trace(result, sequences if kind is SequenceClassifier else len(tokens), 3 if kind else 4)

    return Case(model, arguments, check, free=("return_trace",) if kind is SequenceClassifier else ignored(inner))


MODELS = {
    "SequenceEncoder": (16, None),
    "SequenceClassifier": (8, SequenceClassifier),
    "TokenClassifier": (5, TokenClassifier),
}
for _name, (_weight, _model) in MODELS.items():
    TABLE[f"{_name}.forward"] = _weight, partial(_model_forward, kind=_model)


def _classifier(d: Draw, kind: Any) -> Case:
    pooled = {} if kind is TokenClassifier else {"pool_length": d.maybe(4)}

    def call(**options: Any) -> Any:
        x, ptr = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 3])
        return kind(**options)(*(((x, x), (ptr, ptr)) if kind is PairClassifier else (x, ptr)), seed=0)

    def check(result: Tensor, num_classes: Any, **_: Any) -> None:
        expect(result.shape == (3 if kind is TokenClassifier else 2, num_classes), "another shape")
        finite(result)

    return Case(call, {"encoder": encoder(d), "num_classes": 3, **pooled}, check)


@case("MaskedLM", 3)
def _masked_lm(d: Draw) -> Case:
    def call(**options: Any) -> Any:
        return MaskedLM(**options)(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 3]), seed=0)

    return Case(call, {"encoder": encoder(d)}, lambda result, **_: finite(result))


@case("MaskedLM.forward", 5)
def _masked_lm_forward(d: Draw) -> Case:
    inner, arguments = encoder(d), tokens(d)
    asked = torch.rand(len(arguments["tokens"]), generator=d.torch) < 0.5
    arguments |= {"asked": d.maybe(asked)}

    def check(result: Any, tokens: Tensor, asked: Any, **_: Any) -> None:
        check_trace(result, len(tokens) if asked is None else int(asked.sum()), 9)

    return Case(MaskedLM(inner), arguments, check, free=ignored(inner))


@case("mask_tokens", 3)
def _mask_tokens(d: Draw) -> Case:
    arguments: dict[str, Any] = {"tokens": d.whole(9, d.randint(1, 8)), "mask_token": 9, "num_tokens": 9}
    arguments |= {"probability": d.choice((0.15, 1.0)), "masked": 0.8, "random": d.choice((0.0, 0.1, 0.2))}
    arguments |= {"special": d.maybe(torch.tensor([99])), "seed": d.getrandbits(60)}

    def check(result: Any, tokens: Tensor, **_: Any) -> None:
        inputs, asked = result
        expect(inputs.shape == asked.shape == tokens.shape and bool(asked.any()), "another shape")
        expect(torch.equal(inputs[~asked], tokens[~asked]), "other tokens changed")

    return Case(mask_tokens, arguments, check)


for _kind in (SequenceClassifier, TokenClassifier, PairClassifier):
    TABLE[_kind.__name__] = 3, partial(_classifier, kind=_kind)


@case("PairClassifier.forward", 10)
def _pair_forward(d: Draw) -> Case:
    sides = [d.lengths(1) for _ in range(2)]
    arguments: dict[str, Any] = {
        "tokens": tuple(d.whole(9, sum(side)) for side in sides),
        "ptr": tuple(map(pointer, sides)),
    }
    arguments |= {
        "batch": None,
        "positions": None,
        "seed": d.getrandbits(60),
        "sequence_ids": d.maybe(d.whole(9, 1)),
        "return_trace": True,
    }
    return Case(
        PairClassifier(encoder(d), 3), arguments, lambda result, **_: check_trace(result, 1, 3), free=("return_trace",)
    )


def _dense_layer(d: Draw, pattern: bool) -> Case:
    lengths = d.lengths()
    options: dict[str, Any] = {
        "channels": 4,
        "head_channels": d.randint(1, 3),
        "heads": d.randint(1, 3),
        "dropout": 0.0,
    }
    if pattern:
        options = {"in_channels": 4, "out_channels": options["head_channels"], "heads": options["heads"]}
        options |= {"source": patterns.PatternSource(patterns.window, size=1), "is_causal": d.random() < 0.5}

    def call(**options: Any) -> Any:
        layer: Any = (AttentionConv if pattern else FullAttention)(**options)
        width = options["in_channels" if pattern else "channels"]
        return layer(torch.randn(sum(lengths), 4 if width == -1 else width), ptr=pointer(lengths), seed=0)

    return Case(call, options, lambda result, **_: finite(result))


TABLE["FullAttention"] = 4, lambda d: _dense_layer(d, False)
TABLE["AttentionConv"] = 4, lambda d: _dense_layer(d, True)


def _dense_forward(d: Draw) -> Case:
    lengths, heads = d.lengths(), d.randint(1, 3)
    layer: Any = FullAttention(4, 3, heads)
    lins = [getattr(layer, f"lin_{name}") for name in ("query", "key", "value")]

    def check(result: Tensor, x: Tensor, ptr: Tensor, **_: Any) -> None:
        if tame(x):
            q, k, v = (split_heads(lin(x), heads).double() for lin in lins)
            wanted = reference_attention(
                q, k, v, patterns.full(None, ptr=ptr, heads=heads), None, None, 3**-0.5, "score"
            )
            close(result, wanted.transpose(0, 1).flatten(1), "attention", torch.float32)

    arguments = {"x": float_tokens(d, sum(lengths), 4), "ptr": pointer(lengths), "seed": 3, "sequence_ids": None}
    return Case(layer, arguments, check, free=("seed", "sequence_ids"))


TABLE["FullAttention.forward"] = 5, _dense_forward


def choice_of(d: Draw, heads: int | None = None) -> Choice:
    g = d.graph(heads)
    return Choice(g, d.model(g), d.maybe(d.whole(2, g.num_edges) > 0))


def shared_choice(d: Draw) -> Choice:
    """A choice of one head, without probabilities."""
    made = choice_of(d, 1)
    return Choice(made.graph, forced=made.forced)


def chosen(choice: Choice) -> tuple[AttentionGraph, bool]:
    """Its graph, and whether its mask of forced edges, if any, has that graph's size."""
    return choice.graph, choice.forced is None or choice.forced.numel() == choice.graph.num_edges


@case("Choice", 3)
def _choice(d: Draw) -> Case:
    made = choice_of(d)
    arguments = {"graph": made.graph, "probability": made.probability, "forced": made.forced, "exploration": 0.1}
    return Case(
        Choice,
        arguments,
        lambda result, graph, **_: expect(result.graph is graph, "another graph"),
        free=("probability",),
    )


method("Choice.select", 3, choice_of, lambda d, c: {"kept": d.whole(2, c.graph.num_edges) > 0}, lambda c, kept: int(kept.sum()),
       read=lambda result: result.graph.num_edges, names={"kept": ("mask",)})  # fmt: skip
method("Choice.causal", 2, choice_of, lambda d, c: {}, lambda c: (c.graph.causal(), True), read=chosen)
method(
    "Choice.expand",
    2,
    shared_choice,
    lambda d, c: {"heads": d.randint(1, 3)},
    lambda c, heads: (c.graph.expand(heads), True),
    read=chosen,
)


@case("Choice.force", 3)
def _choice_force(d: Draw) -> Case:
    made = choice_of(d)
    g = made.graph
    other = d.graph(g.heads, g.query_ptr.diff().tolist(), g.key_ptr.diff().tolist())

    def check(result: Choice, pattern: AttentionGraph) -> None:
        expect(result.graph == made.graph.union(pattern)[0], "no union")
        expect(result.forced is not None and int(result.forced.sum()) >= pattern.num_edges, "too few forced")

    return Case(made.force, {"pattern": other}, check, names={"pattern": ("other",)})


def of_tokens(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called with the fields of its tokens."""

    def call(**given: Any) -> Any:
        fields = {each.name: given.pop(each.name) for each in dataclasses.fields(Tokens) if each.name in given}
        return function(Tokens(**fields), **given)

    return call


def token_fields(d: Draw, heads: int = 2) -> dict[str, Any]:
    lengths = d.lengths()
    query, key = (d.real(heads, sum(lengths), 3) for _ in range(2))
    arguments = {
        "query": query,
        "key": key,
        "query_ptr": pointer(lengths),
        "key_ptr": pointer(lengths),
        "bipartite": False,
    }
    return arguments | {
        "is_causal": d.random() < 0.5,
        "seed": d.getrandbits(60),
        "sequence_ids": d.maybe(d.whole(9, len(lengths))),
    }


@case("Tokens", 8)
def _tokens(d: Draw) -> Case:
    def check(result: Tokens, query: Tensor, **_: Any) -> None:
        expect(result.query is query and result.num_keys == result.key.size(1), "other tokens")
        expect(
            int(result.query_ptr[-1]) == result.num_queries and int(result.key_ptr[-1]) == result.num_keys,
            "other offsets",
        )
        expect(bool((result.allowed_keys > 0).all()), "a query without keys")

    return Case(Tokens, token_fields(d), check, names={"query": ("key",), "query_ptr": ("key_ptr",)})


@case("Tokens.with_vectors", 2)
def _with_vectors(d: Draw) -> Case:
    tokens = Tokens(**token_fields(d))
    arguments = {"query": d.real(2, tokens.num_queries, 5), "key": d.real(2, tokens.num_keys, 5)}

    def check(result: Tokens, query: Tensor, key: Tensor) -> None:
        expect(result.query is query and result.key is key and result.query_ptr is tokens.query_ptr, "other tokens")

    return Case(tokens.with_vectors, arguments, check, free=("query", "key"))


def source_arguments(d: Draw, source: Callable[[Draw], Any]) -> Case:
    lengths = d.lengths()
    tokens = torch.randn(2, sum(lengths), 4, generator=d.torch)
    arguments = {
        "query": tokens,
        "key": tokens,
        "query_ptr": pointer(lengths),
        "key_ptr": pointer(lengths),
        "bipartite": False,
    }
    arguments |= {"seed": d.getrandbits(60), "sequence_ids": d.maybe(d.whole(9, len(lengths)))}
    names = {
        "query": ("query_membership", "key"),
        "key": ("key_membership",),
        "query_ptr": ("ptr", "key_ptr"),
        "key_ptr": ("ptr",),
    }
    names |= {"bipartite": ("self_loops", "rule")}
    return Case(of_tokens(source(d)), arguments, lambda result, **_: valid(result.graph), names=names)


@case("SBMSource", 4)
def _sbm_source(d: Draw) -> Case:
    arguments = {
        "head": SBMHead(4, 2, 3),
        "method": "bernoulli",
        "exploration": 0.1,
        "budget": d.maybe(2.0),
        "self_loops": False,
    }
    arguments |= {"window": d.maybe(1), "block_size": d.randint(1, 4), "pool": "mean", "detach": d.random() < 0.5}
    return Case(
        SBMSource, arguments, lambda result, head, **_: expect(result.head is head, "another head"), free=("head",)
    )


SOURCES: dict[str, Callable[[Draw], Any]] = {
    "LearnedSource.forward": lambda d: SBMSource(
        SBMHead(4, 2, 3), block_size=d.choice((1, 1, 3)), target_density=d.choice((None, 0.3, 1.0))),
    "patterns.PatternSource.forward": lambda d: patterns.PatternSource(patterns.bigbird, size=1, num_global=1, num_random=1),
    "sparsefinder.SparsefinderSource.forward": lambda d: sparsefinder.SparsefinderSource(
        sparsefinder.Projection(4, 2, 2), predictors.distance, threshold=1.0),
    "selectors.SelectorSource.forward": lambda d: selectors.SelectorSource(selectors.block_top_k, k=2, block_size=2),
    "selectors.RoutingSource.forward": lambda d: selectors.RoutingSource(4, 2, 3).train(d.random() < 0.5),
    "indexer.IndexerSource.choose": lambda d: indexer.IndexerSource(
        _indexer(d), **d.choice(({"select": "top_k", "k": 2}, {"target_density": d.maybe(0.3)}))).train(d.random() < 0.5),
}  # fmt: skip
for _name, _source in SOURCES.items():
    TABLE[_name] = 4, partial(source_arguments, source=_source)


function("patterns.PatternSource", 4, patterns.PatternSource, lambda d: {"rule": patterns.window, "size": 1},
         lambda result, **_: expect(result.rule.options, "no options"), free=("size",))  # fmt: skip


def _rule(module: Any, name: str, options: Callable[[Draw, int], dict[str, Any]]) -> Callable[[Draw], Case]:
    def make(d: Draw) -> Case:
        heads = d.randint(1, 2)
        arguments = token_fields(d, heads) | options(d, heads)
        arguments["is_causal"] &= name not in ("bucketing", "block_bigbird")
        query = arguments["query"]
        if "centroids" in arguments:
            arguments["centroids"] = arguments["centroids"].to(query.dtype)

        def check(result: AttentionGraph, **_: Any) -> None:
            valid(result)
            expect(result.num_queries == query.size(1) and result.heads == heads, "a graph over other tokens")

        # a token may hold any number
        names = {
            "query_ptr": ("query", "key", "key_ptr"),
            "key_ptr": ("query_ptr", "key"),
            "query": ("query_ptr", "key", "centroids"),
        }
        names |= {"key": ("key_ptr", "query"), "bipartite": ("block_window", "global_blocks")}
        return Case(of_tokens(getattr(module, name)), arguments, check, free=("seed", "bipartite"), names=names)

    return make


SELECTORS: dict[str, Callable[[Draw, int], dict[str, Any]]] = {
    "top_k": lambda d, heads: {"k": d.randint(1, 3)},
    "block_top_k": lambda d, heads: {"k": d.randint(1, 3), "block_size": d.randint(1, 3)},
    "lsh": lambda d, heads: {"num_buckets": 4, "chunk_size": 2, "rounds": d.randint(1, 2)},
    "routing": lambda d, heads: {"centroids": d.real(heads, 2, 3), "size": d.maybe(2)},
}
PREDICTED: dict[str, Callable[[Draw, int], dict[str, Any]]] = {
    "ground_truth_graph": lambda d, heads: {"alpha": d.choice((1.5, 2.0)), "scale": d.maybe(0.5)},
    "distance": lambda d, heads: {"threshold": 1.5, "cap": d.maybe(2)},
    "bucketing": lambda d, heads: {"num_buckets": d.randint(1, 3)},
    "clustering": lambda d, heads: {"centroids": d.real(heads, 2, 3), "top": d.randint(1, 2)},
    "block_bigbird": lambda d, heads: {
        "centroids": d.real(heads, 2, 3),
        "k": d.randint(1, 3),
        "block_size": d.randint(1, 3),
        "by": d.choice(("nearest", "shared")),
        "block_window": d.maybe(1),
        "global_blocks": d.randint(0, 1),
    },
}
for _name, _options in (SELECTORS | PREDICTED).items():
    _module = selectors if _name in SELECTORS else ground_truth if _name == "ground_truth_graph" else predictors
    TABLE[f"{_module.__name__.rpartition('.')[2]}.{_name}"] = 4, _rule(_module, _name, _options)


@case("predictors.buckets", 4)
def _buckets(d: Draw) -> Case:
    lengths, count = d.lengths(), d.randint(1, 3)
    x = d.real(d.randint(1, 2), sum(lengths), 2)

    def check(result: Tensor, x: Tensor, num_buckets: int, **_: Any) -> None:
        expect(result.shape == x.shape and bool((result >= 0).all()), "no buckets")
        expect(int(result.max()) < num_buckets, "more buckets")

    return Case(
        predictors.buckets,
        {"x": x, "num_buckets": count, "ptr": pointer(lengths)},
        check,
        names={"ptr": ("x",), "x": ("ptr",)},
    )


@case("predictors.clusters", 4)
def _clusters(d: Draw) -> Case:
    heads = d.randint(1, 2)
    arguments = {"x": d.real(heads, 4, 3), "centroids": d.real(heads, 2, 3), "top": d.randint(1, 2)}

    def check(result: Tensor, top: int, **_: Any) -> None:
        expect(result.size(2) == top and bool((result.sort(2).values.diff(dim=2) > 0).all()), "no clusters")

    return Case(predictors.clusters, arguments, check, names={"x": ("centroids",), "centroids": ("x",)})


@case("ground_truth.group_entropy", 4)
def _group_entropy(d: Draw) -> Case:
    graph, count = d.graph(), d.randint(1, 3)
    group = d.whole(count, graph.heads * graph.num_keys).view(graph.heads, -1)

    def check(result: Tensor, **_: Any) -> None:
        expect(bool(((result >= 0) & (result <= 1 + 1e-9)).all()), "no share of the largest entropy")

    names = {"group": ("graph",), "graph": ("group",)}
    return Case(
        ground_truth.group_entropy, {"group": group, "num_groups": count, "graph": d.maybe(graph)}, check, names=names
    )


@case("ground_truth.compare", 4)
def _compare(d: Draw) -> Case:
    used = d.graph()
    graph = d.choice((used, used.select(used.col % 2 == 0)))

    def check(result: Any, ground_truth: AttentionGraph, graph: AttentionGraph) -> None:
        a, b = dense(ground_truth), dense(graph)
        wanted = torch.where(a.sum((1, 2)) > 0, (a & b).sum((1, 2)) / a.sum((1, 2)).clamp(min=1), 1.0)
        close(result.recall, wanted.double(), "recall", torch.float32)

    return Case(ground_truth.compare, {"ground_truth": used, "graph": graph}, check)


function(
    "sparsefinder.Projection", 3, sparsefinder.Projection,
    lambda d: {"channels": 3, "heads": 2, "dim": 2, "hidden": d.maybe(4), "shared": d.random() < 0.5},
    lambda result, **_: expect(result.weights, "no weights"),
)  # fmt: skip


TABLE["sparsefinder.Projection.forward"] = 3, lambda d: Case(
    sparsefinder.Projection(3, 2, 2), two_sides(d, 2, 4, 4), lambda result, **_: expect(result[0].shape[2] == 2, "another width"))  # fmt: skip


@case("sparsefinder.projection_loss", 4)
def _projection_loss(d: Draw) -> Case:
    g = d.graph()
    arguments = {
        "query": d.real(g.heads, g.num_queries, 2),
        "key": d.real(g.heads, g.num_keys, 2),
        "graph": g,
        "margin": 1.0,
    }
    arguments |= {"per": d.choice(("query", "pair")), "seed": 3}
    names = {"query": ("graph", "key"), "key": ("graph", "query"), "graph": ("query", "key")}
    return Case(sparsefinder.projection_loss, arguments, lambda result, **_: expect(result.dim() == 0, "no scalar"),
                free=("seed",), names=names)  # fmt: skip


function(
    "sparsefinder.SparsefinderSource", 4, sparsefinder.SparsefinderSource,
    lambda d: {"projection": sparsefinder.Projection(4, 2, 2), "rule": predictors.bucketing, "num_buckets": 2, "window": d.maybe(1), "num_global": 1},
    lambda result, projection, **_: expect(result.projection is projection, "another projection"),
    free=("projection", "rule", "num_buckets"),  # the rule looks at its options when it is called
)  # fmt: skip


def _selector_source(result: Any, k: Any, **_: Any) -> None:
    expect(k is result.k if isinstance(k, Tensor) else result.rule.options == {"k": k}, "another option")


function(
    "selectors.SelectorSource",
    4,
    selectors.SelectorSource,
    lambda d: {"rule": selectors.top_k, "k": 2},
    _selector_source,
    free=("k",),
)


function(
    "selectors.RoutingSource", 4, selectors.RoutingSource,
    lambda d: {"channels": 3, "heads": d.randint(1, 2), "num_clusters": 2, "size": d.maybe(2), "decay": 0.5},
    lambda result, heads, num_clusters, channels, **_: expect(result.centroids.shape == (int(heads), int(num_clusters), int(channels)), "other centroids"),
)  # fmt: skip


def _indexer(d: Draw) -> indexer.Indexer:
    return indexer.Indexer(4, 2, index_heads=d.randint(1, 3), index_channels=3)


def _indexer_module(result: Any, heads: Any, channels: Any, index_heads: Any, index_channels: Any) -> None:
    expect(result.query_weight.shape == (heads, channels, index_heads * index_channels), "other sizes")


function(
    "indexer.Indexer",
    4,
    indexer.Indexer,
    lambda d: {"channels": 3, "heads": 2, "index_heads": 2, "index_channels": 4},
    _indexer_module,
)
function("indexer.KeyScorer", 2, indexer.KeyScorer, lambda d: {"channels": 3, "heads": 2, "hidden": 5},
         lambda result, channels, heads, hidden: expect(result.weight.shape == (heads, channels, hidden), "other sizes"))  # fmt: skip


def _projected(d: Draw, kind: Any) -> Case:
    def check(result: Any, query: Tensor, key: Tensor) -> None:
        expect([len(x) for x in result] == [2] * 3, "other heads")
        expect(result[0].size(1) == query.size(1) and result[2].size(1) == key.size(1), "other tokens")

    return Case(kind(4, 2).forward, {"query": d.real(2, 5, 4), "key": d.real(2, 3, 4)}, check)


TABLE["indexer.Indexer.forward"] = 2, partial(_projected, kind=indexer.Indexer)
TABLE["indexer.KeyScorer.forward"] = 2, partial(_projected, kind=indexer.KeyScorer)


function(
    "indexer.IndexerSource", 4, indexer.IndexerSource,
    lambda d: {"scorer": _indexer(d), "select": "bernoulli", "target_density": d.maybe(0.3), "initial_density": 0.5, "window": d.maybe(1)},
    lambda result, scorer, **_: expect(result.scorer is scorer, "another scorer"), free=("scorer",),
)  # fmt: skip


@case("indexer.IndexProbability", 4)
def _index_probability(d: Draw) -> Case:
    tokens = Tokens(d.real(2, 6, 1), query_ptr=d.maybe(torch.tensor([0, 2, 6])), is_causal=d.random() < 0.5)
    arguments = {"tokens": tokens, "query": d.real(2, 6, 3, 2), "weight": d.real(2, 6, 3), "key": d.real(2, 6, 2),
                 "degree": d.maybe(torch.ones(6)), "bias": d.maybe(torch.zeros(2))}  # fmt: skip
    return Case(
        indexer.IndexProbability,
        arguments,
        lambda result, **_: expect(result.tokens.heads == 2, "other heads"),
        free=("degree",),
    )


def _index_record(d: Draw) -> indexer.IndexProbability:
    degree = torch.ones(6) if d.random() < 0.5 else None
    tokens = Tokens(d.real(2, 6, 1), query_ptr=torch.tensor([0, 2, 6]))
    return indexer.IndexProbability(tokens, d.real(2, 6, 3, 2), d.real(2, 6, 3), d.real(2, 6, 2), degree=degree)


for _name in ("on", "log_on", "score", "check"):
    method(
        f"indexer.IndexProbability.{_name}", 2, _index_record, lambda d, r: {"graph": r.top_k(2)},
        lambda r, graph, name=_name: "nothing" if name == "check" else [graph.num_edges],
        read=lambda result: "nothing" if result is None else [*result.shape],
    )  # fmt: skip
method(
    "indexer.IndexProbability.top_k",
    4,
    _index_record,
    lambda d, r: {"k": 2},
    lambda r, k: None,
    read=lambda result: valid(result),
)
method(
    "indexer.IndexProbability.sample", 4, _index_record,
    lambda d, r: {"exploration": 0.1, "seed": d.maybe(3), "sequence_ids": d.maybe(torch.tensor([4, 2]))}, lambda r, **_: None, free=("seed",),
)  # fmt: skip


function(
    "SourceGraph", 2, SourceGraph,
    lambda d: {"source": selectors.SelectorSource(selectors.top_k, k=2), "heads": 2, "is_causal": d.random() < 0.5, "seed": d.maybe(3)},
    lambda result, source, **_: expect(result.source is source, "another"), free=("heads", "seed"),
)  # fmt: skip


@case("SourceGraph.forward", 8)
def _source_graph_forward(d: Draw) -> Case:
    n, reads = d.randint(2, 6), d.random() < 0.5
    one = patterns.PatternSource(patterns.random, num_keys_per_query=1)
    made = SourceGraph(selectors.SelectorSource(selectors.top_k, k=1) if reads else one, heads=2)
    return Case(made.forward, {"data": Data(x=d.real(n, 6)) if reads else Data(num_nodes=n)},
                lambda result, **_: expect(result.num_edges == 2 * result.num_nodes, "other edges"),
                more={"data": DATA}, names={"data": (*DATA_NAMES, "query")})  # fmt: skip


@case("AttentionGraph.over", 4)
def _over(d: Draw) -> Case:
    lengths = d.lengths()
    g = d.graph(None, lengths, lengths)
    arguments: dict[str, Any] = {
        "edge_index": d.choice((g, g.edge_index)),
        "num_queries": g.num_queries,
        "num_keys": g.num_keys,
    }
    arguments |= {"heads": g.heads, "ptr": g.query_ptr, "batch": None}
    return Case(AttentionGraph.over, arguments, lambda result, **_: valid(result), free=("heads",))


TABLE["SequenceEncoder.check_tokens"] = 4, lambda d: Case(
    SequenceEncoder(9, 4, heads=1, attention="full").check_tokens, {"tokens": d.whole(9, 5)},
    lambda result, **_: expect(result.dim() == 1, "another shape"))  # fmt: skip


def record_of(d: Draw) -> EncoderTrace:
    g = d.graph(2)
    return EncoderTrace((Choice(g, d.model(g)), None), (g.num_sequences, 2))


@case("EncoderTrace", 3)
def _trace(d: Draw) -> Case:
    g = d.graph(2)
    arguments = {"choices": (Choice(g, d.model(g)), None), "shape": (g.num_sequences, 2), "device": None}

    def call(**fields: Any) -> Any:
        trace = EncoderTrace(**fields)
        return trace.density, trace.expected_density

    def check(result: Any, choices: Any, **_: Any) -> None:
        expect(result[0].shape[0] == len(choices) and bool(((result[0] >= 0) & (result[0] <= 1)).all()), "densities")

    return Case(call, arguments, check, free=("device",))  # used where no layer has a graph


@case("EncoderTrace.density_loss", 3)
def _density_loss(d: Draw) -> Case:
    trace = record_of(d)

    def check(result: Tensor, floor: Any) -> None:
        close(result, (trace.expected_density.double() - float(floor)).relu().mean(), "loss", torch.float32)

    return Case(trace.density_loss, {"floor": d.choice((0.0, 0.2))}, check)


@case("Pretrained.save_pretrained", 6)
def _save(d: Draw) -> Case:
    model = SequenceClassifier(encoder(d), 3)
    arguments = {
        "folder": f"{d.folder()}/model",
        "task": d.maybe("words"),
        "metric": d.maybe({"accuracy": 0.5}),
        "density": d.maybe(0.2),
    }

    def check(result: None, folder: Any, density: Any, **_: Any) -> None:
        expect(
            density is None or 0 <= torch.as_tensor(density).min() <= torch.as_tensor(density).max() <= 1,
            "a density outside of [0, 1]",
        )
        again = SequenceClassifier.from_pretrained(folder).state_dict()
        expect(all(torch.equal(x, again[name]) for name, x in model.state_dict().items()), "other weights come back")

    return Case(model.save_pretrained, arguments, check, free=("folder", "task"))


def written(path: str, content: bytes) -> str:
    Path(path).write_bytes(content)
    return path


@case("Pretrained.from_pretrained", 6)
def _load(d: Draw) -> Case:
    """Of a whole folder, and of what is none; damaged ones stand in ``test_pretrained.py``."""
    folder = f"{d.folder()}/model"
    model = SequenceClassifier(encoder(d), 3)
    model.save_pretrained(folder)
    hostile: list[tuple[str, str, Callable[[], Any]]] = [
        ("a file", "value", lambda: f"{folder}/config.json"), ("a long name", "value", lambda: "x" * 300), ("zero byte", "value", lambda: "a\0b"),
    ]  # fmt: skip

    def check(result: nn.Module, folder: Any, **_: Any) -> None:
        state = result.state_dict()
        expect(all(torch.equal(x, state[name]) for name, x in model.state_dict().items()), "other weights come back")

    kind: Any = d.choice((sbm_pyg.Pretrained, SequenceClassifier))
    arguments, names = {"folder": folder, "device": "cpu"}, {"folder": ("config.json",)}
    return Case(kind.from_pretrained, arguments, check, more={"folder": hostile}, names=names, free=("folder",))


# ------------------------------------------------------------------ analysis


@case("analysis.graph_statistics", 10)
def _statistics(d: Draw) -> Case:
    g = d.graph()
    labels = d.maybe((d.whole(3, g.heads, g.num_queries), d.whole(3, g.heads, g.num_keys)))
    square = g.query_ptr.tolist() == g.key_ptr.tolist()
    arguments = {"graph": g, "communities": d.choice((None, labels, d.model(g))), "spectral_gap": d.random() < 0.5}
    arguments |= {"bipartite": d.maybe(True if not square else d.random() < 0.5)}

    def check(result: Any, graph: AttentionGraph, bipartite: Any, **_: Any) -> None:
        split = graph.query_ptr.tolist() != graph.key_ptr.tolist() if bipartite is None else bool(bipartite)
        for b, h in itertools.product(range(graph.num_sequences), range(graph.heads)):
            mask = part(graph, b)[h]
            n, m = mask.shape
            wanted: Any = nx.DiGraph()
            wanted.add_nodes_from(
                [*((0, i) for i in range(n)), *((1, j) for j in range(m))] if split else [(0, i) for i in range(n)]
            )
            wanted.add_edges_from(((1 if split else 0, j), (0, i)) for i, j in mask.nonzero().tolist())
            values = {
                "density": mask.double().mean().item(), "weak_components": nx.number_weakly_connected_components(wanted),
                "strong_components": nx.number_strongly_connected_components(wanted),
                "self_loops": nx.number_of_selfloops(wanted) / len(wanted), "empty_queries": (mask.sum(1) == 0).double().mean().item(),
                "unread_keys": (mask.sum(0) == 0).double().mean().item(),
            }  # fmt: skip
            values |= {"reciprocity": nx.overall_reciprocity(wanted)} if wanted.number_of_edges() else {}
            for name, value in values.items():
                expect(abs(float(getattr(result, name)[b, h]) - value) < 1e-9, f"{name} is not that of networkx")
            if nx.is_strongly_connected(wanted):
                least, most = float(result.diameter_least[b, h]), float(result.diameter_most[b, h])
                expect(least <= nx.diameter(wanted) <= most, "bounds do not hold the diameter")
        str(result)
        expect(len(result.rows()) == graph.num_sequences * graph.heads, "another number of rows")

    return Case(analysis.graph_statistics, arguments, check, free=("bipartite",))


TABLE["analysis.GraphStatistics.rows"] = (2, _statistics)


@case("analysis.hamiltonian_path", 12)
def _hamiltonian(d: Draw) -> Case:
    g = d.square()

    def check(result: Any, graph: AttentionGraph, **_: Any) -> None:
        truth = held_karp(dense(graph).any(0).T.numpy())
        expect(result.status != "FOUND" or truth, "FOUND, and there is none")
        expect(result.status != "ABSENT" or not truth, "ABSENT, and there is one")
        str(result)

    return Case(analysis.hamiltonian_path, {"graph": g, "time_limit": 5.0, "seed": d.randrange(99)}, check)


@case("analysis.is_hamiltonian_path", 5)
def _is_path(d: Draw) -> Case:
    g = d.square()
    path = d.sample(range(g.num_queries), g.num_queries)

    def check(result: bool, graph: AttentionGraph, path: Any) -> None:
        mask, positions = dense(graph).any(0), [operator.index(token) for token in path]
        truth = sorted(positions) == list(range(len(mask))) and all(
            bool(mask[i, j]) for j, i in itertools.pairwise(positions)
        )
        expect(bool(result) == truth, f"{result}, where the truth is {truth}")

    return Case(analysis.is_hamiltonian_path, {"graph": g, "path": path}, check)


@case("analysis.universality", 8)
def _universality(d: Draw) -> Case:
    n = d.randint(1, 6)
    given = [d.graph(None, [n], [n]) for _ in range(d.randint(1, 3))]
    arguments = {
        "patterns": d.choice((given, given[0])),
        "threshold": 0.5,
        "self_loops": d.random() < 0.5,
        "time_limit": 5.0,
        "seed": 0,
    }

    def check(result: Any, patterns: Any, self_loops: Any, **_: Any) -> None:
        graphs = [patterns] if isinstance(patterns, AttentionGraph) else list(patterns)
        masks = [dense(graph).any(0) | (torch.eye(graph.num_queries) * bool(self_loops) > 0) for graph in graphs]
        path, s = held_karp(torch.stack(masks).any(0).T.numpy()), brute_force(masks)
        loops = all(bool(mask.diagonal().all()) for mask in masks)
        expect(result.s is None or result.s == s, f"s is {result.s}, not {s}")
        expect(result.holds is None or result.holds == (loops and path and s < math.inf), f"holds is {result.holds}")
        str(result)

    return Case(analysis.universality, arguments, check)


@case("analysis.spread_steps", 5)
def _spread(d: Draw) -> Case:
    n = d.randint(1, 6)

    def check(result: Any, patterns: Any, **_: Any) -> None:
        s = brute_force([dense(graph).any(0) for graph in patterns])
        expect(result is None or result == s, f"{result}, not {s}")

    given = [d.graph(None, [n], [n]) for _ in range(d.randint(1, 3))]
    return Case(analysis.spread_steps, {"patterns": given, "time_limit": 5.0}, check)


def _expected_graph(result: AttentionGraph, sbm: SBM, threshold: Any) -> None:
    p = chances(sbm)
    sure = (p - float(threshold)).abs() > 1e-3
    expect(torch.equal(dense(result)[sure], (p > float(threshold))[sure]), "other pairs than those above the threshold")


function(
    "analysis.expected_graph",
    4,
    analysis.expected_graph,
    lambda d: {"sbm": d.sbm(), "threshold": d.choice((0.0, 0.3))},
    _expected_graph,
)
function("analysis.communities_of", 2, analysis.communities_of, lambda d: {"sbm": d.sbm()},
         lambda result, sbm: agrees(result, (sbm.query_membership.argmax(-1), sbm.key_membership.argmax(-1))))  # fmt: skip


@case("analysis.to_networkx", 6)
def _analysis_networkx(d: Draw) -> Case:
    g = d.graph()
    square = g.query_ptr.tolist() == g.key_ptr.tolist()
    arguments = {"graph": g, "sequence": d.randrange(g.num_sequences), "head": d.choice(("all", d.randrange(g.heads)))}
    arguments |= {"view": d.choice(("tokens", "bipartite")) if square else "bipartite", "sbm": d.maybe(d.model(g))}

    def check(result: Any, graph: AttentionGraph, sequence: Any, head: Any, view: str, sbm: Any) -> None:
        networkx_edges(result, part(graph, sequence), head, view == "bipartite")
        if sbm is not None and tame_model(sbm) and bool(((chances(sbm) >= 0) & (chances(sbm) <= 1)).all()):
            expect(
                all(0 <= p <= 1.001 for _, _, p in result.edges(data="probability")), "an edge without its probability"
            )

    return Case(analysis.to_networkx, arguments, check)


def _lemma2(result: Any, n: Any, num_blocks: Any) -> None:
    rules = ("block_diagonal", "relay_keys", "relay_queries"), ("num_blocks", "num_relays", "num_relays")
    for graph, name, option in zip(result.graphs, *rules, strict=True):
        bare = dense(graph)
        if name != "block_diagonal":
            bare = dense(getattr(patterns, name)(n, num_blocks))
            expect(torch.equal(dense(graph), bare | (torch.eye(n) > 0)), "another pattern")
        check_pattern(name, bare, [n], {option: num_blocks})
    union = torch.stack([dense(graph)[0] for graph in result.graphs]).any(0)
    path = all(bool(union[i, j]) for j, i in itertools.pairwise(result.path))
    expect(sorted(result.path) == list(range(n)) and path, "no path")


function(
    "analysis.lemma2",
    4,
    analysis.lemma2,
    lambda d: {"n": (n := d.randint(1, 8)), "num_blocks": d.randint(1, n)},
    _lemma2,
)


@case("analysis.Lemma2.s", 3)
def _lemma2_s(d: Draw) -> Case:
    n = d.randint(1, 7)
    lemma = analysis.lemma2(n, d.randint(1, n))

    def check(result: Any, order: Any) -> None:
        expect(result == brute_force([dense(lemma.graphs[number - 1])[0] for number in order]), "another s")

    return Case(lemma.s, {"order": tuple(d.sample((1, 2, 3), 3))}, check)


def _lemma1(result: Any, samples: Any, **_: Any) -> None:
    expect(bool((result.found + result.absent <= samples).all()), "more graphs than were drawn")
    low, high = result.interval
    expect(bool(((low <= result.share + 1e-9) & (result.share <= high + 1e-9)).all()), "an interval without its share")
    str(result)


def _cycles(result: Any, n: Any, p: Any) -> None:
    expect(int(n) == n and n >= 1 and 0 <= p <= 1, "a number out of range was taken")
    if not isinstance(p, np.float16) and p != 0:
        expect(
            abs(float(result) - (n * math.log10(p) + math.lgamma(n) / math.log(10))) < 1e-6 * (1 + abs(float(result))),
            "another number",
        )


def _path_probability(result: Any, n: Any, p: Any) -> None:
    expect(int(n) == n and n >= 1 and 0 <= p <= 1, "a number out of range was taken")
    rate = n * (1 - float(p)) ** (n - 1)
    expect(abs(float(result) - ((1 + rate) * math.exp(-rate)) ** 2) < 1e-9, "another probability")


function(
    "analysis.lemma1", 4, analysis.lemma1,
    lambda d: {"n": d.randint(3, 6), "probabilities": d.maybe([0.2, 0.8]), "samples": d.randint(1, 3), "seed": 0, "time_limit": 1.0}, _lemma1,
)  # fmt: skip
function(
    "analysis.log10_cycles", 3, analysis.log10_cycles, lambda d: {"n": d.randint(2, 9), "p": d.uniform(0.1, 1)}, _cycles
)
function(
    "analysis.path_probability",
    3,
    analysis.path_probability,
    lambda d: {"n": d.randint(2, 9), "p": d.uniform(0.1, 1)},
    _path_probability,
)


# ------------------------------------------------------------------ plots


def drawn(result: Any, /, **_: Any) -> None:
    expect(type(result).__name__ == "Figure" and len(result.get_label()) > 20, "no figure with a caption")


def _plot_graph(d: Draw, name: str) -> Case:
    g = d.graph()
    model = d.maybe(d.model(g)) if name == "plot_mask" else d.model(g)
    arguments = {
        "graph": g, "sbm": model, "sequence": d.randrange(g.num_sequences), "head": d.randrange(g.heads), "title": d.choice(("a", "")),
    }  # fmt: skip
    return Case(getattr(plots, name), arguments, drawn, free=("title",))


for _name in ("plot_mask", "plot_communities"):
    TABLE[f"plots.{_name}"] = 2, partial(_plot_graph, name=_name)


function(
    "plots.plot_density", 2, plots.plot_density,
    lambda d: {"density": d.choice((d.unit(2, 3, 2), {"a": d.unit(1, 2, 2), "b": d.unit(2, 1, 1)}, record_of(d))), "ax": None}, drawn,
)  # fmt: skip
function(
    "plots.plot_lemma1",
    1,
    plots.plot_lemma1,
    lambda d: {"result": analysis.lemma1(4, [0.3, 0.6], samples=2), "ax": None},
    drawn,
)


def _extremes(result: Any, density: Any, count: Any) -> None:
    mean = density.double().mean((0, 2))
    count = min(operator.index(count), max(len(mean) // 2, 1))
    expect(not bool(mean.isnan().any()), "a density that is no number was taken")
    expect(bool(density.isfinite().all()), "a density that is not finite was taken")
    expect(len(result[0]) == len(result[1]) == count, "another number of inputs")
    least, most = (mean[torch.tensor(side)].sum() for side in result)
    off = abs(float(least - mean.sort().values[:count].sum())) + abs(float(most - mean.sort().values[-count:].sum()))
    expect(off < 1e-9, "other inputs")


function(
    "plots.density_extremes", 4, plots.density_extremes, lambda d: {"density": d.unit(2, d.randint(1, 6), 2), "count": d.randint(1, 3)},
    _extremes,
)  # fmt: skip


def _many(d: Draw, name: str) -> Case:
    count = d.randint(1, 3)
    layers = [d.graph(d.randint(1, 2), [4] * count, [4] * count) for _ in range(2)]
    images = torch.rand(count, 2, 2)
    arguments: dict[str, Any] = {"graphs": d.choice((layers, [layers[0], None]))}
    if name == "plot_extremes":
        arguments |= {"images": d.maybe(images), "count": 1, "titles": d.maybe(["a"] * count)}
    else:
        arguments |= {"images": images} if name == "plot_pixel_attention" else {}
        arguments |= {"sequences": d.maybe([0]), "titles": d.maybe(["a"] * count), "notes": ""}
    return Case(getattr(plots, name), arguments, drawn, free=("titles", "notes"))


for _name in ("plot_inputs", "plot_pixel_attention", "plot_extremes"):
    TABLE[f"plots.{_name}"] = 1, partial(_many, name=_name)


@case("plots.plot_training_density", 2)
def _plot_training(d: Draw) -> Case:
    path = Path(d.folder()) / "log.csv"
    path.write_text("step,density_layer0_head0\n0,0.1\n5,0.2\n")
    logs: list[tuple[str, str, Callable[[], Any]]] = [
        ("no file", "value", lambda: "/no/such/file.csv"),
        ("a folder", "value", lambda: str(path.parent)),
    ]
    texts = ("", "step\n", "a,b\n1,2\n", "step,density_layer0_head0\n0,x\n", "step,density_layer0_head0\n0\n\n")
    logs += [(f"csv {text!r:.24}", "value", partial(written, str(path), text.encode())) for text in texts]
    logs += [("rows of text", "value", lambda: ["a"]), ("rows without a column", "value", lambda: [{"step": 1}])]
    given, names = (
        d.choice((str(path), path, [{"step": 0, "density_layer0_head0": 0.3}])),
        {"log": ("step", "density_layer0_head0")},
    )
    return Case(plots.plot_training_density, {"log": given, "ax": None}, drawn, more={"log": logs}, names=names)


# ------------------------------------------------------------------ ragged batches, and what runs here


@case("pad", 8)
def _pad(d: Draw) -> Case:
    lengths = d.lengths()

    def check(result: Any, x: Tensor, ptr: Tensor, fill_value: Any) -> None:
        padded, mask = result
        for b, (first, end) in enumerate(zip(ptr.tolist(), ptr.tolist()[1:], strict=False)):
            expect(torch.equal(padded[b, : end - first].nan_to_num(), x[first:end].nan_to_num()), "other tokens")
            expect(mask[b].tolist() == [place < end - first for place in range(mask.size(1))], "a wrong mask")
            if end - first < mask.size(1):
                filled = torch.full_like(padded[b, end - first :], float(fill_value))
                expect(
                    torch.equal(padded[b, end - first :].nan_to_num(7), filled.nan_to_num(7)),
                    "something else stands in the padding",
                )

    return Case(
        ragged.pad, {"x": d.real(sum(lengths), 2), "ptr": pointer(lengths), "fill_value": d.choice((0.0, -1.0))}, check
    )


@case("unpad", 8)
def _unpad(d: Draw) -> Case:
    mask = d.whole(2, 3, 4) > 0
    mask[:, 0] = True

    def check(result: Any, x: Tensor, mask: Tensor) -> None:
        expect(torch.equal(result[0].nan_to_num(), x[mask].nan_to_num()), "other tokens")
        expect(result[1].tolist() == [0, *mask.sum(1).cumsum(0).tolist()], "other offsets")

    return Case(ragged.unpad, {"x": d.real(3, 4, *d.choice(((), (2,)))), "mask": mask}, check)


function("ragged.offsets", 3, ragged.offsets, lambda d: {"counts": torch.tensor(d.lengths())},
         lambda result, counts: expect(result.tolist() == [0, *np.cumsum(counts.long().tolist()).tolist()], "other offsets"))  # fmt: skip
function("ragged.check_tensor", 2, ragged.check_tensor, lambda d: {"x": d.real(2), "name": "x"},
         lambda result, x, name: expect(x is None or isinstance(x, Tensor), "what is no tensor passed"), free=("name",), names={"x": ("name",)})  # fmt: skip
function("info.collect", 2, info.collect, lambda d: {"test": False},
         lambda result, test: expect(bool(test) == (result["self_test"] is not None), "no self-test"))  # fmt: skip
function("info.self_test", 1, info.self_test, lambda d: {}, lambda result: expect(result["passed"], "it fails"))


@case("ragged.resolve_ptr", 10)
def _resolve(d: Draw) -> Case:
    lengths = d.lengths()
    ptr, batch = d.choice(
        ((pointer(lengths), None), (None, torch.repeat_interleave(pointer(lengths).diff())), (None, None))
    )

    def check(result: Tensor, total: Any, ptr: Any, batch: Any, **_: Any) -> None:
        if not result.is_meta:
            wanted = (
                ptr.tolist()
                if ptr is not None
                else [0, total]
                if batch is None
                else [0, *torch.bincount(batch).cumsum(0).tolist()]
            )
            expect(result.tolist() == wanted and result.dtype == torch.int64 and wanted[-1] == total, "other offsets")

    arguments = {"total": sum(lengths), "ptr": ptr, "batch": batch, "device": d.maybe(torch.device("cpu"))}
    return Case(ragged.resolve_ptr, arguments, check, free=("name",))


def _main(json: bool) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return info.main(["--json"] if json else [])


function(
    "info.main", 1, _main, lambda d: {"json": d.random() < 0.5}, lambda result, json: expect(result == 0, "it fails")
)


# ------------------------------------------------------------------ what has no arguments

Meaning = Callable[[Any], Any]
RECORDS: dict[str, tuple[Callable[[Draw], Any], dict[str, Meaning]]] = {  # class -> an instance, and what its properties are (None: whatever)
    "AttentionGraph": (Draw.graph, {
        "num_edges": lambda g: int(dense(g).sum()), "num_sequences": lambda g: len(g.query_ptr) - 1, "device": lambda g: g.col.device,
        "edge_row": lambda g: torch.stack(dense(g).nonzero(as_tuple=True)[:2]).T.matmul(torch.tensor([g.num_queries, 1])),
        "edge_index": lambda g: dense(g).nonzero()[:, [2, 1]].T, "edge_head": lambda g: dense(g).nonzero()[:, 0], "degree": lambda g: dense(g).sum(2),
        "edges_per_sequence": lambda g: torch.stack([part(g, b).sum((1, 2)) for b in range(g.num_sequences)]),
        "density": lambda g: torch.stack([part(g, b).double().mean((1, 2)) for b in range(g.num_sequences)]),
        "later": lambda g: None, "lag": lambda g: None, "pairs_per_sequence": lambda g: g.query_ptr.diff() * g.key_ptr.diff(),
        "block_size": lambda g: 1, "blocks": lambda g: g, "expand_tokens()": lambda g: g,
    }),
    "BlockGraph": (lambda d: block_graph(d), {
        "block_size": lambda g: None, "blocks": lambda g: None, "device": lambda g: g.blocks.device,
        "num_edges": lambda g: int(dense(g).sum()), "col": lambda g: g.expand_tokens().col, "expand_tokens()": lambda g: g,
    }),
    "BlockPool": (lambda d: BlockPool(4), {"extra_repr()": lambda a: "channels=4, heads=1", "reset_parameters()": lambda a: None}),
    "SBM": (Draw.sbm, {
        "heads": lambda s: len(s.query_membership), "num_queries": lambda s: s.query_membership.size(1), "num_keys": lambda s: s.key_membership.size(1),
        "num_blocks": lambda s: s.block_matrix.size(1), "num_sequences": lambda s: len(s.query_ptr) - 1,
        "factors": lambda s: None, "causal()": lambda s: None,
    }),
    "Tokens": (lambda d: Tokens(**token_fields(d)), {
        "heads": lambda t: 2, "num_queries": lambda t: t.query.size(1), "num_keys": lambda t: t.key.size(1),
        "first_key": lambda t: torch.cat([head * t.num_keys + t.key_ptr[t.query_sequence] for head in range(2)]),
    }),
    "EncoderTrace": (record_of, {"density": lambda t: torch.stack([t.graphs[0].density, torch.ones(t.shape)]), "expected_density": lambda t: None,
                                 "graphs": lambda t: None}),
    "SBMMultiheadAttention": (lambda d: SBMMultiheadAttention(6, 3), {
        "dropout": lambda a: 0.0, "head_dim": lambda a: 2, "in_proj_weight": lambda a: a.conv.lin_query.weight, "reset_parameters()": lambda a: None,
    }),
    "SBMAttentionConv": (lambda d: SBMAttentionConv(4, 2), {"sbm": lambda a: a.source.head}),
    "Entmax": (lambda d: Entmax(2), {"alpha": lambda e: torch.full((2,), 1.5), "extra_repr()": lambda e: "2, alpha=1.5, learnable=True", "reset_parameters()": lambda e: None}),
    "AttentionConv": (lambda d: AttentionConv(4, 2), {"reset_parameters()": lambda a: None}),
    "SBMSource": (lambda d: SBMSource(SBMHead(4, 2)), {"extra_repr()": lambda a: None, "reset_parameters()": lambda a: None}),
    "LearnedSource": (lambda d: SBMSource(SBMHead(4, 2), target_density=0.5, window=1), {
        "target_density": lambda a: 0.5, "can_change_density": lambda a: True, "forced_distance": lambda a: 1,
    }),
    "Choice": (choice_of, {"shape": lambda c: (len(c.graph.query_ptr) - 1, c.graph.heads), "density": lambda c: c.graph.density}),
    "patterns.PatternSource": (lambda d: patterns.PatternSource(patterns.full), {"extra_repr()": lambda a: None}),
    "sparsefinder.Projection": (lambda d: sparsefinder.Projection(4), {"extra_repr()": lambda a: None, "reset_parameters()": lambda a: None}),
    "sparsefinder.SparsefinderSource": (
        lambda d: sparsefinder.SparsefinderSource(sparsefinder.Projection(4), predictors.bucketing, num_buckets=2), {"extra_repr()": lambda a: None},
    ),
    "selectors.SelectorSource": (lambda d: selectors.SelectorSource(selectors.top_k, k=2), {"extra_repr()": lambda a: None}),
    "selectors.RoutingSource": (lambda d: selectors.RoutingSource(4), {"extra_repr()": lambda a: None, "reset_parameters()": lambda a: None}),
    "indexer.Indexer": (lambda d: indexer.Indexer(4), {"extra_repr()": lambda a: None, "reset_parameters()": lambda a: None}),
    "indexer.KeyScorer": (lambda d: indexer.KeyScorer(4), {"extra_repr()": lambda a: None, "reset_parameters()": lambda a: None}),
    "indexer.IndexerSource": (lambda d: indexer.IndexerSource(indexer.Indexer(4)), {"can_change_density": lambda a: True, "extra_repr()": lambda a: None, "reset_parameters()": lambda a: None}),
    "indexer.IndexProbability": (_index_record, {
        "log_total": lambda r: None, "expected_degree()": lambda r: None, "expected_density()": lambda r: None,
    }),
    "DCMMBias": (lambda d: DCMMBias(4, 2), {"reset_parameters()": lambda a: None, "extra_repr()": lambda a: None}),
    "ALiBi": (lambda d: ALiBi(3), {"extra_repr()": lambda a: "heads=3"}),
    "Rotary": (lambda d: Rotary(), {"extra_repr()": lambda a: None}),
    "SBMHead": (lambda d: SBMHead(4, 2), {"reset_parameters()": lambda a: None, "extra_repr()": lambda a: None}),
    "SequenceEncoder": (encoder, {"constructor_options()": lambda m: None}),
    "MaskedLM": (lambda d: MaskedLM(encoder(d)), {"constructor_options()": lambda m: {"encoder": m.encoder}}),
    "analysis.Lemma1": (lambda d: analysis.lemma1(4, [0.3, 0.6], samples=2), {
        "log10_cycles": lambda r: None, "share": lambda r: None, "interval": lambda r: None, "limit": lambda r: None, "lemma": lambda r: None,
    }),
    "analysis.Universality": (lambda d: analysis.universality(patterns.window(4, 1)), {
        "hamiltonian_path": lambda r: (0, 1, 2, 3), "hamiltonian_status": lambda r: "FOUND", "holds": lambda r: True,
    }),
}  # fmt: skip
for _owner, (_make, _meanings) in RECORDS.items():
    for _member, _meaning in _meanings.items():

        @case(f"{_owner}.{_member.removesuffix('()')}", 1)
        def _property(d: Draw, make: Any = _make, member: str = _member, meaning: Meaning = _meaning) -> Case:
            record = make(d)

            def call() -> Any:
                value = getattr(record, member.removesuffix("()"))
                return value() if member.endswith("()") else value

            def check(result: Any) -> None:
                wanted = meaning(record)
                if isinstance(wanted, Tensor):
                    close(result, wanted, member)
                else:
                    expect(wanted is None or result == wanted, "another value")

            return Case(call, {}, check)


# ------------------------------------------------------------------ all public names

MODULES = {
    "": sbm_pyg, "ops": sbm_pyg.ops, "patterns": patterns, "indexer": indexer, "selectors": selectors, "ground_truth": ground_truth,
    "predictors": predictors, "sparsefinder": sparsefinder, "analysis": analysis, "plots": plots, "estimators": estimators,
    "models": models, "ragged": ragged, "info": info,
}  # fmt: skip
ESTIMATOR_NAMES = [
    f"estimators.{name}" + (f".{method}" if method else "") for name in estimators.__all__ if isinstance(getattr(estimators, name), type)
    for method in ("", *(key for key, value in vars(getattr(estimators, name)).items() if callable(value) and not key.startswith("_")))
]  # fmt: skip
EXEMPT: dict[str, str] = {  # public names that are not called, and why
    "estimators.ESTIMATORS": "a constant",
    **dict.fromkeys(("info.tqdm", "info.tqdm.refresh"), "a progress bar, see test_progress.py"),
    "sparsefinder.Sample": "a type",
    **dict.fromkeys(("Sparsifier", *(f"Sparsifier.{name}" for name in ("step", "sparse", "state_dict", "load_state_dict", "losses", "next_density"))),
                    "a schedule of a model, see test_sparsifier.py"),
    **dict.fromkeys(("LearnedSource.choose", "LearnedSource.predict", "SBMSource.choose", "SBMSource.predict", "indexer.IndexerSource.predict"),
                    "called by LearnedSource.forward and by losses"),
    **dict.fromkeys(("Sparsifier.is_sparse", "Sparsifier.set_density", "plots.plot_losses"), "see test_sparsifier.py and test_plots.py"),
    **dict.fromkeys(("LearnedGraph", *(f"LearnedGraph.{name}" for name in ("extra_repr", "forward", "reset_parameters"))), "a source for layers of PyG, see test_learned_graph.py"),
    "replace_attention": "it changes a model in place, see test_multihead.py and test_gps.py",
    **dict.fromkeys(("SparseGPSConv.from_gps", "SparseGPSConv.reset_parameters"), "it takes a layer of PyG, and draws anew, see test_gps.py"),
    **dict.fromkeys(("analysis.Attention", "analysis.Head", "analysis.HeadTable", "analysis.HeadTable.diffuse", "analysis.HeadTable.heads", "analysis.compare_heads", "analysis.record_attention"), "it listens to a model, see test_heads.py"),
    **dict.fromkeys(("Tokens.detached", "Tokens.first_head"), "for sources"),
    "patterns.PatternSource.take_heads": "for HeadParallel, see test_distributed.py",
    **dict.fromkeys(("Choice.attend", "Choice.check_tokens", "Choice.is_stored", "Choice.stored"), "for layers, see test_choice.py and test_learned.py"),
    **dict.fromkeys(("DCMM", "DCMM.entropy"), "a record that the library makes and users read"),
    **dict.fromkeys(("AttentionGraph.rows", "AttentionGraph.with_blocks", "AttentionGraph.spread", "AttentionGraph.over_tokens", "SBM.strict", "ops.Rows"), "for sources and layers, see test_blocks.py"),
    **{f"BlockGraph.{name}": "what an AttentionGraph has, compared with that of its tokens in test_blocks.py" for name in (
        "causal", "contains", "expand", "head", "over_tokens", "sequence", "spread", "edge_bias_to_blocks", "to", "to_block_mask", "union", "validate", "with_blocks")},
    **dict.fromkeys(("ops.Rows", "AttentionGraph.rows"), "a record of tensors, which ops check"),
    **dict.fromkeys(("ops.block_effect", "ops.block_expectation", "ops.block_weight"), "for estimators, compared with tokens in test_blocks.py"),
    "ground_truth.Match": "a record that the library makes and users read",
    "ground_truth.record": "it listens to a model, see test_ground_truth.py",
    **dict.fromkeys(("sparsefinder.fit_projection", "sparsefinder.fit_centroids"), "they train, see test_sparsefinder.py"),
    **dict.fromkeys(("estimators.distillation", "estimators.row_distillation"), "losses over what a layer computes, compared with their definitions in test_learned.py"),
    "auxiliary_loss": "it takes what layers keep, whose cases and scenarios call it",
    "sync_statistics": "it needs processes, see test_auxiliary.py",
    **dict.fromkeys(("HeadParallel", *(f"HeadParallel.{name}" for name in ("extra_repr", "forward", "own_heads", "processes", "reset_parameters"))), "it needs processes, see test_distributed.py"),
    "Pretrained": "a base class, called through its models",
    "Pretrained.constructor_options": "what subclasses define",
    **dict.fromkeys(
        ("EdgeProbability", "EdgeProbability.check", "EdgeProbability.expected_degree", "EdgeProbability.expected_density", "EdgeProbability.factors", "EdgeProbability.gate",
         "EdgeProbability.on", "GraphSource", "GraphSource.forward", "GraphSource.reset_parameters", "EdgeProbability.log_on", "LearnedSource"), "an abstract class, called through SBM and SBMSource"),
    **dict.fromkeys(("ragged.count_pairs", "ragged.draw_seed", "ragged.resolve_sequence_ids", "ragged.resolve_sides"), "called by layers and samplers"),
    **dict.fromkeys(ESTIMATOR_NAMES, "called by the layer, whose cases draw every estimator"),
    **{f"analysis.{name}": "a record that the library makes and users read" for name in
       ("Certificate", "GraphStatistics", "HamiltonianPath", "Lemma1", "Lemma2", "Universality")},
}  # fmt: skip


def public_names() -> list[str]:
    """Every public name, with the public methods and properties of the classes; by the first module that lists it."""
    found: dict[int, str] = {}
    names: list[str] = []
    for prefix, module in MODULES.items():
        for name in module.__all__:
            thing = getattr(module, name)
            full = f"{prefix}.{name}" if prefix else name
            if id(thing) in found or isinstance(thing, type(sbm_pyg)):
                continue
            found[id(thing)] = full
            names.append(full)
            if isinstance(thing, type):
                members = {
                    key: value
                    for key, value in (
                        vars(CompressedRows) | vars(thing) if thing is AttentionGraph else vars(thing)
                    ).items()
                    if not key.startswith("_")
                    and key != "pattern"
                    and not getattr(value, "__module__", "").endswith("_propagate")
                }  # MessagePassing writes `propagate` and `collect` of its own making into the class of its first instance
                calls = {
                    key
                    for key, value in members.items()
                    if callable(value) or isinstance(value, classmethod | staticmethod | property)
                }
                names += [f"{full}.{key}" for key in sorted(calls)]
    return names
