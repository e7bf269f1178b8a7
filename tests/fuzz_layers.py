"""What the fuzz driver calls beyond graphs: estimators, layers, models, analysis, plots and helpers; see ``fuzz_cases``, whose table this fills."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import math
import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fuzz_cases import (
    DATA,
    DATA_NAMES,
    TABLE,
    Case,
    Draw,
    a_sequence,
    attention_inputs,
    case,
    expect,
    fields,
    function,
    lengths_of,
    method,
    pointer,
    segments,
)  # fmt: skip
from problems import NAMED
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
    gradients,
    info,
    make_attention,
    mask_tokens,
    models,
    sparsefinder,
)
from sbm_pyg.analysis import plots
from sbm_pyg.graphs import ragged  # fmt: skip
from sbm_pyg.graphs.rows import CompressedRows
from sbm_pyg.layers.attention import Returns
from sbm_pyg.sources import indexer, patterns, selectors
from sbm_pyg.sparsefinder import ground_truth, predictors


def batch_of(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(pointer(lengths).diff())


def float_tokens(d: Draw, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=d.torch)


# ------------------------------------------------------------------ estimators


def of_graph(d: Draw, **more: Callable[[AttentionGraph], Any]) -> dict[str, Any]:
    """A graph, a model over its tokens, and what else is made for the graph."""
    g = d.graph()
    return {"probability": d.model(g), "graph": g} | {name: make(g) for name, make in more.items()}


def _temperature(result: Tensor, temperature: Any, **_: Any) -> None:
    expect(not math.isnan(temperature) and temperature > 0, "a temperature that is not positive was taken")


function("gradients.straight_through", 3, gradients.straight_through,
         lambda d: of_graph(d, forced=lambda g: d.maybe(d.whole(2, g.num_edges) > 0)))  # fmt: skip
function("gradients.score_function", 3, gradients.score_function,
         lambda d: of_graph(d, loss=lambda g: d.real(g.num_sequences)) | {"exploration": 0.1})  # fmt: skip
function("gradients.relaxed_bias", 3, gradients.relaxed_bias, lambda d: of_graph(d) | {"exploration": 0.1})
function(
    "gradients.concrete_bias", 4, gradients.concrete_bias,
    lambda d: of_graph(d) | {"temperature": d.uniform(0.1, 2), "seed": d.getrandbits(60), "exploration": 0.1}, check=_temperature,
)  # fmt: skip


@case("gradients.draw_probes", 5)
def _draw_probes(d: Draw) -> Case:
    g = d.graph()
    arguments = {"graph": g, "per_query": d.choice((0.0, 1.5, math.inf)), "seed": d.getrandbits(60)}
    return Case(gradients.draw_probes, arguments | {"sequence_ids": d.maybe(d.whole(9, g.num_sequences))})


@case("gradients.attach_local_expectation", 6)
def _local(d: Draw) -> Case:
    graph, x = attention_inputs(d, d.randint(1, 2))
    sbm, probes = d.model(graph), d.graph(graph.heads, *lengths_of(graph))
    y, z, block_matrix = (each.to(d.dtype) for each in (sbm.query_membership, sbm.key_membership, sbm.block_matrix))
    sbm = SBM(y.requires_grad_(), z, block_matrix, sbm.query_ptr, sbm.key_ptr)
    out = d.real(graph.heads, graph.num_queries, x["value"].size(2))
    arguments: dict[str, Any] = {"out": out, **x, "probability": sbm, "graph": graph, "probes": probes, "scale": 0.5}
    arguments |= {"chance": d.unit(graph.num_queries), "bias": d.maybe(d.real(graph.num_edges))}
    arguments |= {"probe_bias": d.maybe(d.real(probes.num_edges)), "exploration": d.choice((0.0, 0.1))}
    return Case(gradients.attach_local_expectation, arguments | {"forced": d.maybe(d.whole(2, graph.num_edges) > 0)})


# ------------------------------------------------------------------ layers


@case("SBMAttentionConv", 24)
def _conv(d: Draw) -> Case:
    """A training step of a layer of any options."""
    lengths = d.lengths()
    options: dict[str, Any] = {"in_channels": 4, "out_channels": d.randint(1, 3), "heads": d.randint(1, 3)}
    options |= {"num_clusters": d.randint(1, 4), "concat": d.random() < 0.7, "bias": d.random() < 0.7}
    options |= {"is_causal": d.random() < 0.2, "estimator": d.maybe(d.choice([*estimators.ESTIMATORS]))}
    options |= {"window": d.choice((None, 0, 1)), "normalizer": "softmax", "target_density": d.maybe(0.4)}
    if d.random() < 0.2:
        options |= {"normalizer": d.choice(("entmax15", "sparsemax", "entmax"))}
        options |= {"estimator": d.choice(("mask", "none"))}

    def call(in_channels: Any, **options: Any) -> Any:
        layer = SBMAttentionConv(in_channels, **options)
        x = torch.randn(sum(lengths), 4 if in_channels == -1 else in_channels, requires_grad=True)
        out = layer(x, ptr=pointer(lengths), seed=0)
        (out.sum() + auxiliary_loss(layer)).backward()
        return out, x.grad, [parameter.grad for parameter in layer.parameters()]

    def check(result: Any, heads: Any, out_channels: Any, concat: Any, **_: Any) -> None:
        expect(result[0].shape == (sum(lengths), out_channels * (heads if concat else 1)), "another shape")

    return Case(call, options | {"dropout": d.choice((0.0, 0.2))}, check)


function(
    "Entmax",
    4,
    Entmax,
    lambda d: {"heads": d.randint(1, 3), "alpha": d.choice((1.2, 1.5, 1.9)), "learnable": d.random() < 0.7},
)
function(
    "Entmax.forward", 4, lambda src, **given: Entmax(src.size(-1), 1.4)(src, **given),
    lambda d: (of := segments(d)) | {"src": of["src"][:, None].repeat(1, d.randint(1, 3))}, unchecked=("index", "ptr"),
)  # fmt: skip


def two_sides(d: Draw, heads: int, queries: int, keys: int) -> dict[str, Any]:
    return {"query": float_tokens(d, heads, queries, 3), "key": float_tokens(d, heads, keys, 3)}


@case("AttentionConv.forward", 30)
def _conv_forward(d: Draw) -> Case:
    lengths = d.lengths()
    g = d.graph(None, lengths, lengths)
    x, how = float_tokens(d, sum(lengths), 4), d.choice(("graph", "edges", "typed", "sample", "pair"))
    edge_attr = d.maybe(float_tokens(d, g.num_edges, 2)) if how in ("graph", "typed") else None
    edge_dim = None if edge_attr is None else 2
    channels = d.randint(1, 3)
    source = SBMSource(SBMHead(channels, g.heads, 3))
    conv = AttentionConv(4, channels, g.heads, source, estimator=estimators.Local(2.0), edge_dim=edge_dim)
    conv.train(d.random() < 0.5)
    given = {"graph": g, "edges": g.edge_index, "typed": g.edge_index, "sample": None, "pair": None}[how]
    arguments: dict[str, Any] = {
        "x": (x, float_tokens(d, sum(lengths), 4)) if how == "pair" else x,
        "edge_index": given,
    }
    arguments |= d.choice(({"ptr": pointer(lengths), "batch": None}, {"ptr": None, "batch": batch_of(lengths)}))
    arguments |= {
        "edge_attr": edge_attr,
        "edge_head": g.edge_head if how == "typed" else None,
        "seed": d.getrandbits(60),
    }
    arguments |= {"sequence_ids": d.maybe(d.whole(9, len(lengths))) if given is None else None, "return_graph": True}

    def call(**arguments: Any) -> Any:
        conv.zero_grad()
        result = conv(**arguments)
        ((result[0] if isinstance(result, tuple) else result).sum() + auxiliary_loss(conv)).backward()
        return result, [parameter.grad for parameter in conv.parameters()]

    free = ("return_graph",) if given is None else ("return_graph", "sequence_ids")  # a given graph draws nothing
    names: dict[str, tuple[str, ...]] = {"x": ("x[0]", "x[1]", "query_membership", "key_membership")}
    return Case(call, arguments, free=free, names=names | {"ptr": ("sequence_ids",), "batch": ("sequence_ids",)})


@case("AttentionConv.attend", 10)
def _attend(d: Draw) -> Case:
    n = [d.randint(1, 6) for _ in range(d.randint(1, 2))]
    g, channels = d.graph(None, n, d.choice((n, [2 for _ in n]))), d.randint(1, 4)
    conv = make_attention("sbm", 4, channels, g.heads, num_clusters=3, probes=2.0).eval()
    sides = {"query": g.num_queries, "key": g.num_keys, "value": g.num_keys}
    arguments: dict[str, Any] = {side: float_tokens(d, g.heads, count, channels) for side, count in sides.items()}
    arguments |= {"ptr": (g.key_ptr, g.query_ptr), "edge_index": d.choice((g, None)), "bipartite": True}
    arguments |= {"seed": d.getrandbits(60), "returns": Returns(graph=True)}
    arguments |= {"edge_filter": d.maybe(lambda graph: graph.edge_index[0] % 2 == 0)}
    return Case(conv.attend, arguments, names={"query": ("query_membership",), "key": ("key_membership",)})


def shares(sbm: SBM, **_: Any) -> None:
    for sequence in range(sbm.num_sequences):
        p = sbm.edge_prob_dense(sequence)
        expect(bool(((p >= 0) & (p <= 1 + 1e-5)).all()), "a probability outside of [0, 1]")


@case("SBMHead", 10)
def _head_options(d: Draw) -> Case:
    options: dict[str, Any] = {"channels": d.randint(1, 4), "heads": d.randint(1, 3), "num_clusters": d.randint(1, 4)}
    options |= {
        "cluster_init": d.choice(("kaiming", "orthogonal")),
        "degree_corrected": d.random() < 0.5,
        "tied": False,
    }
    options |= {"parameterization": d.choice(("paper", "mixed", "assortative", "overlapping")), "groups": 1}
    if options["parameterization"] in ("assortative", "overlapping"):
        options["groups"] = d.randint(1, 3)
        options["num_clusters"] **= options["groups"]

    def call(**options: Any) -> SBM:
        head = SBMHead(**options)
        return head(Tokens(torch.randn(head.heads, 5, head.channels)))

    return Case(call, options | {"initial_density": 0.25, "temperature": 1.0}, shares)


def of_tokens(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called with the fields of its tokens."""

    def call(**given: Any) -> Any:
        fields = {each.name: given.pop(each.name) for each in dataclasses.fields(Tokens) if each.name in given}
        return function(Tokens(**fields), **given)

    return call


@case("SBMHead.forward", 6)
def _head_forward(d: Draw) -> Case:
    lengths, head = d.lengths(), SBMHead(3, 2, 4, tied=d.random() < 0.3)
    keys = lengths if head.tied else [d.randint(1, 6) for _ in lengths]
    arguments = two_sides(d, 2, sum(lengths), sum(keys)) | {"query_ptr": pointer(lengths), "key_ptr": pointer(keys)}
    return Case(of_tokens(head), arguments | {"bipartite": not head.tied})


def method_of(make: Callable[[], Any], arguments: Callable[[Draw], dict[str, Any]]) -> Callable[[Draw], Case]:
    """A method of a module that is made anew for each call."""
    return lambda d: Case(make(), arguments(d))


TABLE["SBMHead.degrees"] = (
    2,
    method_of(lambda: SBMHead(3, 2, 4, degree_corrected=True).degrees, lambda d: two_sides(d, 2, 5, 4)),
)
TABLE["DCMMBias.predict"] = 4, method_of(lambda: DCMMBias(3, 2, 4, tied=False).predict, lambda d: two_sides(d, 2, 5, 4))
TABLE["ALiBi.dense_bias"] = 1, method_of(
    lambda: ALiBi(2).dense_bias, lambda d: {"num_queries": d.randint(1, 5), "num_keys": d.randint(1, 5)})  # fmt: skip
TABLE["BlockPool.forward"] = 2, method_of(
    lambda: BlockPool(5, 2), lambda d: {"tokens": float_tokens(d, 2, 3, 4, 5), "there": torch.ones(3, 4, dtype=torch.bool)})  # fmt: skip


def _dcmm(d: Draw) -> dict[str, Any]:
    options: dict[str, Any] = {"channels": d.randint(1, 4), "heads": d.randint(1, 3), "num_clusters": d.randint(1, 4)}
    options |= {"degree": d.choice(("relu", "sigmoid", "softplus")), "squash": d.random() < 0.5, "symmetric": False}
    return options | {"tied": d.random() < 0.5, "scale": 10.0, "entropy_weight": d.choice((0.0, 0.1))}


@case("DCMMBias.forward", 4)
def _dcmm_forward(d: Draw) -> Case:
    graph = d.graph()
    tied = graph.num_queries == graph.num_keys and d.random() < 0.5
    bias = DCMMBias(3, graph.heads, 2, tied=tied, degree=d.choice(("relu", "sigmoid", "softplus")))
    return Case(bias.forward, two_sides(d, graph.heads, graph.num_queries, graph.num_keys) | {"graph": graph})


@case("ALiBi.forward", 3)
def _alibi_forward(d: Draw) -> Case:
    graph = d.graph()
    arguments = two_sides(d, graph.heads, graph.num_queries, graph.num_keys) | {"graph": graph}
    return Case(ALiBi(graph.heads).forward, arguments)


@case("Rotary.forward", 3)
def _rotary_forward(d: Draw) -> Case:
    count = d.randint(1, 6)
    return Case(
        Rotary().forward, {"x": float_tokens(d, 2, count, 4), "position": torch.randperm(count, generator=d.torch)}
    )


function("DCMMBias", 6, DCMMBias, _dcmm)
function("ALiBi", 1, ALiBi, lambda d: {"heads": d.randint(1, 20)})
function("BlockPool", 2, BlockPool, lambda d: {"channels": d.randint(1, 4), "heads": d.randint(1, 3)})
function(
    "Rotary",
    1,
    Rotary,
    lambda d: {"base": d.choice((10000.0, 2.5)), "channels": d.choice((None, 2, 8)), "for_source": d.random() < 0.5},
)


def block_graph(d: Draw) -> BlockGraph:
    """Blocks of up to three tokens of some sequences."""
    block_size, lengths = d.randint(1, 3), d.lengths()
    counts = [-(-length // block_size) for length in lengths]
    return BlockGraph(d.graph(queries=counts, keys=counts), block_size, query_ptr=pointer(lengths))


function(
    "BlockGraph",
    4,
    BlockGraph,
    lambda d: (
        fields(graph := block_graph(d), "blocks", "block_size", "query_ptr") | {"key_ptr": d.maybe(graph.key_ptr)}
    ),
)


@case("ops.block_attention", 4)
def _block_attention(d: Draw) -> Case:
    graph = block_graph(d)
    sizes = {"query": graph.num_queries, "key": graph.num_keys, "value": graph.num_keys}
    arguments: dict[str, Any] = {name: d.real(graph.heads, count, 3) for name, count in sizes.items()}
    arguments |= {"rows": graph.blocks.rows, "ptrs": (graph.query_ptr, graph.key_ptr), "block_size": graph.block_size}
    arguments |= {"is_causal": False, "scale": d.uniform(0.1, 1.5)}
    names = {"rows": ("rowptr", "col")}
    return Case(lambda **given: sbm_pyg.ops.block_attention(**given)[0], arguments, unchecked=("rows",), names=names)


@case("SBMMultiheadAttention", 8)
def _multihead(d: Draw) -> Case:
    heads = d.randint(1, 3)
    options: dict[str, Any] = {"embed_dim": 2 * heads, "num_heads": heads, "dropout": 0.0, "bias": True}
    options |= {
        "add_bias_kv": False,
        "add_zero_attn": False,
        "kdim": d.maybe(5),
        "vdim": d.maybe(3),
        "batch_first": True,
    }
    options |= {
        "device": None,
        "dtype": d.choice((None, torch.float64)),
        "num_clusters": d.randint(1, 4),
        "budget": d.maybe(2.0),
    }

    def call(embed_dim: Any, num_heads: Any, kdim: Any, vdim: Any, **options: Any) -> Any:
        layer = SBMMultiheadAttention(embed_dim, num_heads, kdim=kdim, vdim=vdim, **options)
        widths = (embed_dim, embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim)
        return layer(*(torch.randn(2, 4, width, dtype=options["dtype"]) for width in widths), seed=0)[0]

    return Case(call, options)


@case("SBMMultiheadAttention.forward", 16)
def _multihead_forward(d: Draw) -> Case:
    heads, length, keys, batch = d.randint(1, 2), d.randint(1, 4), d.randint(1, 4), d.randint(1, 3)
    full = d.random() < 0.5
    torchs = nn.MultiheadAttention(4, heads, batch_first=True)
    layer = SBMMultiheadAttention.from_torch(torchs, source=None if full else 3).eval()
    padding = torch.arange(keys) >= torch.tensor([[d.randint(1, keys)] for _ in range(batch)])
    arguments: dict[str, Any] = {
        side: float_tokens(d, batch, count, 4) for side, count in (("query", length), ("key", keys), ("value", keys))
    }
    arguments |= {"key_padding_mask": d.maybe(padding), "need_weights": d.random() < 0.5, "average_attn_weights": True}
    arguments |= {"attn_mask": d.maybe(torch.ones(length, keys, dtype=torch.bool).triu(1)), "is_causal": False}
    arguments |= {"seed": d.getrandbits(60), "sequence_ids": None if full else d.maybe(d.whole(9, batch))}
    return Case(layer, arguments, free=("sequence_ids",) if full else ())


@case("SBMMultiheadAttention.from_torch", 4)
def _from_torch(d: Draw) -> Case:
    arguments = {"attention": nn.MultiheadAttention(4, d.randint(1, 2), batch_first=True), "source": None}
    layers: list[tuple[str, str, Callable[[], Any]]] = [
        ("a Linear", "value", lambda: nn.Linear(4, 4)), ("with bias_k", "value", lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True)),
        ("ours", "value", lambda: SBMMultiheadAttention(4, 2)), ("zero_attn", "value", lambda: nn.MultiheadAttention(4, 2, add_zero_attn=True)),
    ]  # fmt: skip
    names = {"attention": ("add_bias_kv", "add_zero_attn")}
    return Case(SBMMultiheadAttention.from_torch, arguments, more={"attention": layers}, names=names)


@case("SparseGPSConv", 6)
def _gps(d: Draw) -> Case:
    lengths, attn = d.lengths(), SBMAttentionConv(4, 2, d.randint(1, 3), num_clusters=3)
    norm = d.maybe("batch_norm")  # an unknown name gets PyG's own error

    def call(channels: Any, **options: Any) -> Tensor:
        layer = SparseGPSConv(channels, norm=norm, **options).eval()
        return layer(torch.randn(sum(lengths), channels), None, batch_of(lengths))

    return Case(call, {"channels": 4, "conv": None, "attn": attn, "dropout": d.choice((0.0, 0.3))})


@case("SparseGPSConv.forward", 8)
def _gps_forward(d: Draw) -> Case:
    lengths, attn = d.lengths(), AttentionConv(4, 2, d.randint(1, 3), patterns.PatternSource(patterns.full))
    arguments = {"x": float_tokens(d, sum(lengths), 4), "edge_index": None, "batch": batch_of(lengths)}
    arguments |= {"attn_kwargs": d.maybe({"seed": d.getrandbits(60)})}
    return Case(SparseGPSConv(4, None, attn, norm=None), arguments, free=("edge_index",))


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

    return Case(call, options)


@case("FullAttention.forward", 5)
def _dense_forward(d: Draw) -> Case:
    lengths = d.lengths()
    arguments = {"x": float_tokens(d, sum(lengths), 4), "ptr": pointer(lengths), "seed": 3, "sequence_ids": None}
    return Case(FullAttention(4, 3, d.randint(1, 3)), arguments, free=("seed", "sequence_ids"))


TABLE["FullAttention"] = 4, partial(_dense_layer, pattern=False)
TABLE["AttentionConv"] = 4, partial(_dense_layer, pattern=True)


# ------------------------------------------------------------------ models


def encoder_options(d: Draw) -> dict[str, Any]:
    attention = d.choice((*NAMED,))
    extra = {"sbm": {"num_clusters": 3}, "window": {"size": 1}, "bigbird": {"num_random": 1}, "top_k": {"k": 2}}
    options: dict[str, Any] = {"num_tokens": 9, "channels": 4, "num_layers": d.randint(1, 2), "heads": d.randint(1, 2)}
    options |= {
        "head_channels": d.maybe(2),
        "ffn_channels": d.maybe(5),
        "max_length": 8,
        "dropout": d.choice((0.0, 0.1)),
    }
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
    arguments: Any = model._hub_mixin_config
    draws = arguments["attention"] in ("sbm", "bigbird")
    return ("return_trace",) if draws else ("return_trace", "sequence_ids")


def check_trace(result: Any, **_: Any) -> None:
    """Of what came with a trace, and of the output alone where a hostile ``return_trace`` counts as False."""
    if not isinstance(result, Tensor):
        density = result[1].density
        expect(bool(((density >= 0) & (density <= 1)).all()), "a density outside of [0, 1]")


@case("SequenceEncoder", 16)
def _encoder(d: Draw) -> Case:
    inputs = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 2, 5])
    return Case(
        lambda **given: SequenceEncoder(**given)(*inputs, seed=0, return_trace=True), encoder_options(d), check_trace
    )


def _model_forward(d: Draw, kind: Any) -> Case:
    """A model, which has an output for each token, or for each sequence."""
    inner = encoder(d)
    free = ("return_trace",) if kind is SequenceClassifier else ignored(inner)
    return Case(kind(inner, 3) if kind else inner, tokens(d), check_trace, free=free)


def _classifier(d: Draw, kind: Any) -> Case:
    pooled = {} if kind is TokenClassifier else {"pool_length": d.maybe(4)}
    x, ptr = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 3])
    inputs: Any = ((x, x), (ptr, ptr)) if kind is PairClassifier else (x, ptr)

    def check(result: Tensor, num_classes: Any, **_: Any) -> None:
        expect(result.size(1) == num_classes, "another shape")

    arguments = {"encoder": encoder(d), "num_classes": 3, **pooled}
    return Case(lambda **options: kind(**options)(*inputs, seed=0), arguments, check)


TABLE["SequenceEncoder.forward"] = 16, partial(_model_forward, kind=None)
TABLE["SequenceClassifier.forward"] = 8, partial(_model_forward, kind=SequenceClassifier)
TABLE["TokenClassifier.forward"] = 5, partial(_model_forward, kind=TokenClassifier)
for _kind in (SequenceClassifier, TokenClassifier, PairClassifier):
    TABLE[_kind.__name__] = 3, partial(_classifier, kind=_kind)


def _language_model(encoder: Any) -> Tensor:
    return MaskedLM(encoder)(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 3]), seed=0)


function("MaskedLM", 3, _language_model, lambda d: {"encoder": encoder(d)})


@case("MaskedLM.forward", 5)
def _masked_lm_forward(d: Draw) -> Case:
    inner, arguments = encoder(d), tokens(d)
    arguments["asked"] = d.maybe(torch.rand(len(arguments["tokens"]), generator=d.torch) < 0.5)
    return Case(MaskedLM(inner), arguments, check_trace, free=ignored(inner))


def _mask_tokens(d: Draw) -> dict[str, Any]:
    arguments: dict[str, Any] = {"tokens": d.whole(9, d.randint(1, 8)), "mask_token": 9, "num_tokens": 9}
    arguments |= {"probability": d.choice((0.15, 1.0)), "masked": 0.8, "random": d.choice((0.0, 0.1, 0.2))}
    return arguments | {"special": d.maybe(torch.tensor([99])), "seed": d.getrandbits(60)}


function("mask_tokens", 3, mask_tokens, _mask_tokens)


@case("PairClassifier.forward", 10)
def _pair_forward(d: Draw) -> Case:
    sides = [d.lengths(1) for _ in range(2)]
    arguments: dict[str, Any] = {
        "tokens": tuple(d.whole(9, sum(side)) for side in sides),
        "ptr": tuple(map(pointer, sides)),
    }
    arguments |= {"batch": None, "positions": None, "seed": d.getrandbits(60), "sequence_ids": d.maybe(d.whole(9, 1))}
    arguments |= {"return_trace": True}
    return Case(PairClassifier(encoder(d), 3), arguments, check_trace, free=("return_trace",))


def record_of(d: Draw) -> EncoderTrace:
    g = d.graph(2)
    return EncoderTrace((Choice(g, d.model(g)), None), (g.num_sequences, 2))


@case("EncoderTrace", 3)
def _trace(d: Draw) -> Case:
    def call(**fields: Any) -> Any:
        trace = EncoderTrace(**fields)
        return trace.density, trace.expected_density

    return Case(
        call, fields(record_of(d), "choices", "shape") | {"device": None}, free=("device",)
    )  # where no layer has a graph


function(
    "EncoderTrace.density_loss",
    3,
    lambda floor: record_of(Draw(0, 0)).density_loss(floor),
    lambda d: {"floor": d.choice((0.0, 0.2))},
)
function("SequenceEncoder.check_tokens", 4, lambda tokens: SequenceEncoder(9, 4, heads=1, attention="full").check_tokens(tokens),
         lambda d: {"tokens": d.whole(9, 5)})  # fmt: skip


def written(path: str, content: bytes) -> str:
    Path(path).write_bytes(content)
    return path


# ------------------------------------------------------------------ sources


def choice_of(d: Draw, heads: int | None = None) -> Choice:
    g = d.graph(heads)
    return Choice(g, d.model(g), d.maybe(d.whole(2, g.num_edges) > 0))


def shared_choice(d: Draw) -> Choice:
    """A choice of one head, without probabilities."""
    made = choice_of(d, 1)
    return Choice(made.graph, forced=made.forced)


function(
    "Choice",
    3,
    Choice,
    lambda d: fields(choice_of(d), "graph", "probability", "forced") | {"exploration": 0.1},
    free=("probability",),
)
method(
    "Choice.select", 3, choice_of, lambda d, c: {"kept": d.whole(2, c.graph.num_edges) > 0}, names={"kept": ("mask",)}
)
method("Choice.causal", 2, choice_of)
method("Choice.expand", 2, shared_choice, lambda d, c: {"heads": d.randint(1, 3)})
method(
    "Choice.force",
    3,
    choice_of,
    lambda d, c: {"pattern": d.graph(c.graph.heads, *lengths_of(c.graph))},
    names={"pattern": ("other",)},
)


def token_fields(d: Draw, heads: int = 2, channels: int = 3) -> dict[str, Any]:
    lengths = d.lengths()
    arguments: dict[str, Any] = {side: d.real(heads, sum(lengths), channels) for side in ("query", "key")}
    arguments |= {"query_ptr": pointer(lengths), "key_ptr": pointer(lengths), "bipartite": False}
    return arguments | {
        "is_causal": d.random() < 0.5,
        "seed": d.getrandbits(60),
        "sequence_ids": d.maybe(d.whole(9, len(lengths))),
    }


def _allowed(result: Tokens, **_: Any) -> None:
    expect(bool((result.allowed_keys > 0).all()), "a query without keys")


function("Tokens", 8, Tokens, token_fields, check=_allowed, names={"query": ("key",), "query_ptr": ("key_ptr",)})
method("Tokens.with_vectors", 2, lambda d: Tokens(**token_fields(d)),
       lambda d, t: {"query": d.real(2, t.num_queries, 5), "key": d.real(2, t.num_keys, 5)}, free=("query", "key"))  # fmt: skip


def _source_call(d: Draw, source: Callable[[Draw], Any]) -> Case:
    arguments = token_fields(d, channels=4)
    del arguments["is_causal"]
    arguments["query"] = arguments["key"] = arguments["query"].float()
    names = {"query": ("query_membership", "key"), "key": ("key_membership",), "bipartite": ("rule",)}
    names |= {"query_ptr": ("ptr", "key_ptr"), "key_ptr": ("ptr",)}
    return Case(lambda **given: of_tokens(source(d))(**given).graph, arguments, names=names)


SOURCES: dict[str, Callable[[Draw], Any]] = {
    "LearnedSource.forward": lambda d: SBMSource(
        SBMHead(4, 2, 3), block_size=d.choice((1, 1, 3)), target_density=d.choice((None, 0.3, 1.0))),
    "patterns.PatternSource.forward": lambda d: patterns.PatternSource(patterns.bigbird, size=1, num_global=1, num_random=1),
    "sparsefinder.SparsefinderSource.forward": lambda d: sparsefinder.SparsefinderSource(
        sparsefinder.Projection(4, 2, 2), predictors.distance, threshold=1.0),
    "selectors.SelectorSource.forward": lambda d: selectors.SelectorSource(selectors.block_top_k, k=2, block_size=2),
    "DensitySource.forward": lambda d: selectors.TopKSource(**d.choice(({"k": 2}, {"target_density": 0.3}, {})), window=d.maybe(1)),
    "selectors.RoutingSource.forward": lambda d: selectors.RoutingSource(4, 2, 3).train(d.random() < 0.5),
    "indexer.IndexerSource.choose": lambda d: indexer.IndexerSource(
        _indexer(d), **d.choice(({"k": 2}, {"target_density": 0.3}, {"select": "bernoulli", "target_density": d.maybe(0.3)}))).train(d.random() < 0.5),
}  # fmt: skip
for _name, _source in SOURCES.items():
    TABLE[_name] = 4, partial(_source_call, source=_source)


def _sbm_source(d: Draw) -> dict[str, Any]:
    arguments = {"head": SBMHead(4, 2, 3), "method": "bernoulli", "exploration": 0.1, "budget": d.maybe(2.0)}
    arguments |= {"window": d.choice((None, 0, 1)), "block_size": d.randint(1, 4), "pool": "mean"}
    arguments |= {"candidates": 3 if arguments["block_size"] == 1 else 1}
    return arguments | {"detach": d.random() < 0.5}


def _rule(module: Any, name: str, options: Callable[[Draw, int], dict[str, Any]]) -> Callable[[Draw], Case]:
    def make(d: Draw) -> Case:
        heads = d.randint(1, 2)
        arguments = token_fields(d, heads) | options(d, heads)
        arguments["is_causal"] &= name not in ("bucketing", "block_bigbird")
        names = {"query_ptr": ("query", "key", "key_ptr"), "key_ptr": ("query_ptr", "key"), "key": ("key_ptr", "query")}
        names |= {"query": ("query_ptr", "key", "centroids"), "bipartite": ("block_window", "global_blocks")}
        return Case(of_tokens(getattr(module, name)), arguments, free=("seed", "bipartite"), names=names)

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
        "centroids": d.real(heads, 2, 3), "k": d.randint(1, 3), "block_size": d.randint(1, 3), "by": d.choice(("nearest", "shared")),
        "block_window": d.maybe(1), "global_blocks": d.randint(0, 1),
    },
}  # fmt: skip
for _name, _options in (SELECTORS | PREDICTED).items():
    _module = selectors if _name in SELECTORS else ground_truth if _name == "ground_truth_graph" else predictors
    TABLE[f"{_module.__name__.rpartition('.')[2]}.{_name}"] = 4, _rule(_module, _name, _options)


@case("predictors.buckets", 4)
def _buckets(d: Draw) -> Case:
    lengths = d.lengths()
    arguments = {"x": d.real(d.randint(1, 2), sum(lengths), 2), "num_buckets": d.randint(1, 3), "ptr": pointer(lengths)}
    return Case(predictors.buckets, arguments, names={"ptr": ("x",), "x": ("ptr",)})


@case("predictors.clusters", 4)
def _clusters(d: Draw) -> Case:
    heads = d.randint(1, 2)
    arguments = {"x": d.real(heads, 4, 3), "centroids": d.real(heads, 2, 3), "top": d.randint(1, 2)}
    return Case(predictors.clusters, arguments, names={"x": ("centroids",), "centroids": ("x",)})


@case("ground_truth.group_entropy", 4)
def _group_entropy(d: Draw) -> Case:
    graph, count = d.graph(), d.randint(1, 3)
    arguments = {"group": d.whole(count, graph.heads, graph.num_keys), "num_groups": count, "graph": d.maybe(graph)}
    return Case(ground_truth.group_entropy, arguments, names={"group": ("graph",), "graph": ("group",)})


@case("ground_truth.compare", 4)
def _compare(d: Draw) -> Case:
    used = d.graph()
    return Case(ground_truth.compare, {"ground_truth": used, "graph": d.choice((used, used.select(used.col % 2 == 0)))})


@case("sparsefinder.projection_loss", 4)
def _projection_loss(d: Draw) -> Case:
    g = d.graph()
    arguments = {
        "query": d.real(g.heads, g.num_queries, 2),
        "key": d.real(g.heads, g.num_keys, 2),
        "graph": g,
        "margin": 1.0,
    }
    names = {"query": ("graph", "key"), "key": ("graph", "query"), "graph": ("query", "key")}
    return Case(
        sparsefinder.projection_loss,
        arguments | {"per": d.choice(("query", "pair")), "seed": 3},
        free=("seed",),
        names=names,
    )


def _indexer(d: Draw) -> indexer.Indexer:
    return indexer.Indexer(4, 2, index_heads=d.randint(1, 3), index_channels=3)


function("SBMSource", 4, SBMSource, _sbm_source, free=("head",))
function(
    "patterns.PatternSource", 4, patterns.PatternSource, lambda d: {"rule": patterns.window, "size": 1}, free=("size",)
)
function(
    "sparsefinder.Projection", 3, sparsefinder.Projection,
    lambda d: {"channels": 3, "heads": 2, "dim": 2, "hidden": d.maybe(4), "shared": d.random() < 0.5},
)  # fmt: skip
TABLE["sparsefinder.Projection.forward"] = (
    3,
    method_of(lambda: sparsefinder.Projection(3, 2, 2), lambda d: two_sides(d, 2, 4, 4)),
)
function(
    "sparsefinder.SparsefinderSource", 4, sparsefinder.SparsefinderSource,
    lambda d: {"projection": sparsefinder.Projection(4, 2, 2), "rule": predictors.bucketing, "num_buckets": 2, "window": d.maybe(1), "num_global": 1},
    free=("projection", "rule", "num_buckets"),  # the rule looks at its options when it is called
)  # fmt: skip
function(
    "selectors.SelectorSource", 4, selectors.SelectorSource, lambda d: {"rule": selectors.top_k, "k": 2}, free=("k",)
)
function(
    "selectors.TopKSource",
    4,
    selectors.TopKSource,
    lambda d: {"k": d.maybe(2), "target_density": None, "window": d.maybe(1)},
)
function(
    "selectors.RoutingSource", 4, selectors.RoutingSource,
    lambda d: {"channels": 3, "heads": d.randint(1, 2), "num_clusters": 2, "size": d.maybe(2), "decay": 0.5},
)  # fmt: skip
function(
    "indexer.Indexer", 4, indexer.Indexer, lambda d: {"channels": 3, "heads": 2, "index_heads": 2, "index_channels": 4}
)
function("indexer.KeyScorer", 2, indexer.KeyScorer, lambda d: {"channels": 3, "heads": 2, "hidden": 5})
TABLE["indexer.Indexer.forward"] = 2, method_of(lambda: indexer.Indexer(3, 2), lambda d: two_sides(d, 2, 5, 3))
TABLE["indexer.KeyScorer.forward"] = 2, method_of(lambda: indexer.KeyScorer(3, 2), lambda d: two_sides(d, 2, 5, 3))
function(
    "indexer.IndexerSource", 4, indexer.IndexerSource,
    lambda d: {"scorer": _indexer(d), "select": "bernoulli", "target_density": d.maybe(0.3), "initial_density": 0.5, "window": d.maybe(1)},
    free=("scorer",),
)  # fmt: skip


@case("indexer.IndexProbability", 4)
def _index_probability(d: Draw) -> Case:
    tokens = Tokens(d.real(2, 6, 1), query_ptr=d.maybe(torch.tensor([0, 2, 6])), is_causal=d.random() < 0.5)
    arguments = {"tokens": tokens, "query": d.real(2, 6, 3, 2), "weight": d.real(2, 6, 3), "key": d.real(2, 6, 2)}
    arguments |= {"degree": d.maybe(torch.ones(6)), "bias": d.maybe(torch.zeros(2))}
    return Case(indexer.IndexProbability, arguments, free=("degree",))


def _index_record(d: Draw) -> indexer.IndexProbability:
    degree = torch.ones(6) if d.random() < 0.5 else None
    tokens = Tokens(d.real(2, 6, 1), query_ptr=torch.tensor([0, 2, 6]))
    return indexer.IndexProbability(tokens, d.real(2, 6, 3, 2), d.real(2, 6, 3), d.real(2, 6, 2), degree=degree)


for _name in ("on", "log_on", "score", "check"):
    method(f"indexer.IndexProbability.{_name}", 2, _index_record, lambda d, r: {"graph": r.top_k(2)})
method("indexer.IndexProbability.top_k", 4, _index_record, lambda d, r: {"k": 2})
method(
    "indexer.IndexProbability.sample", 4, _index_record,
    lambda d, r: {"exploration": 0.1, "seed": d.maybe(3), "sequence_ids": d.maybe(torch.tensor([4, 2]))}, free=("seed",),
)  # fmt: skip
function(
    "SourceGraph", 2, SourceGraph,
    lambda d: {"source": selectors.SelectorSource(selectors.top_k, k=2), "heads": 2, "is_causal": d.random() < 0.5, "seed": d.maybe(3)},
    free=("heads", "seed"),
)  # fmt: skip


@case("SourceGraph.forward", 8)
def _source_graph_forward(d: Draw) -> Case:
    n, reads = d.randint(2, 6), d.random() < 0.5
    one = patterns.PatternSource(patterns.random, num_keys_per_query=1)
    made = SourceGraph(selectors.SelectorSource(selectors.top_k, k=1) if reads else one, heads=2)
    data = Data(x=d.real(n, 6)) if reads else Data(num_nodes=n)
    return Case(made.forward, {"data": data}, more={"data": DATA}, names={"data": (*DATA_NAMES, "query")})


# ------------------------------------------------------------------ analysis


def one_sequence(d: Draw, count: int) -> list[AttentionGraph]:
    n = d.randint(1, 6)
    return [d.graph(None, [n], [n]) for _ in range(count)]


def _statistics(d: Draw) -> Case:
    g = d.graph()
    labels = d.maybe((d.whole(3, g.heads, g.num_queries), d.whole(3, g.heads, g.num_keys)))
    bipartite = d.maybe(d.random() < 0.5 if lengths_of(g)[0] == lengths_of(g)[1] else True)
    arguments = {"graph": g, "communities": d.choice((None, labels, d.model(g))), "spectral_gap": d.random() < 0.5}

    def check(result: Any, graph: AttentionGraph, **_: Any) -> None:
        expect(str(result) and len(result.rows()) == graph.num_sequences * graph.heads, "another number of rows")

    return Case(analysis.graph_statistics, arguments | {"bipartite": bipartite}, check, free=("bipartite",))


@case("analysis.hamiltonian_path", 12)
def _hamiltonian(d: Draw) -> Case:
    arguments = {"graph": one_sequence(d, 1)[0], "time_limit": 5.0, "seed": d.randrange(99)}
    return Case(analysis.hamiltonian_path, arguments, lambda result, **_: expect(str(result), "no words"))


@case("analysis.is_hamiltonian_path", 5)
def _is_path(d: Draw) -> Case:
    (g,) = one_sequence(d, 1)
    return Case(analysis.is_hamiltonian_path, {"graph": g, "path": d.sample(range(g.num_queries), g.num_queries)})


@case("analysis.universality", 8)
def _universality(d: Draw) -> Case:
    given = one_sequence(d, d.randint(1, 3))
    arguments = {"patterns": d.choice((given, given[0])), "threshold": 0.5, "self_loops": d.random() < 0.5}
    arguments |= {"time_limit": 5.0, "seed": 0}
    return Case(analysis.universality, arguments, lambda result, **_: expect(str(result), "no words"))


@case("analysis.to_networkx", 6)
def _analysis_networkx(d: Draw) -> Case:
    g = d.graph()
    square = lengths_of(g)[0] == lengths_of(g)[1]
    arguments = a_sequence(d, g) | {
        "graph": g,
        "head": d.choice(("all", d.randrange(g.heads))),
        "sbm": d.maybe(d.model(g)),
    }
    return Case(
        analysis.to_networkx, arguments | {"view": d.choice(("tokens", "bipartite")) if square else "bipartite"}
    )


def _in_range(result: Any, n: Any, p: Any) -> None:
    expect(int(n) == n and n >= 1 and 0 <= p <= 1, "a number out of range was taken")


def _lemma2_s(d: Draw) -> Case:
    n = d.randint(1, 7)
    return Case(analysis.lemma2(n, d.randint(1, n)).s, {"order": tuple(d.sample((1, 2, 3), 3))})


def a_chance(d: Draw) -> dict[str, Any]:
    return {"n": d.randint(2, 9), "p": d.uniform(0.1, 1)}


TABLE |= {
    "analysis.graph_statistics": (10, _statistics),
    "analysis.GraphStatistics.rows": (2, _statistics),
    "analysis.Lemma2.s": (3, _lemma2_s),
}
function(
    "analysis.spread_steps",
    5,
    analysis.spread_steps,
    lambda d: {"patterns": one_sequence(d, d.randint(1, 3)), "time_limit": 5.0},
)
function(
    "analysis.expected_graph", 4, analysis.expected_graph, lambda d: {"sbm": d.sbm(), "threshold": d.choice((0.0, 0.3))}
)
function("analysis.communities_of", 2, analysis.communities_of, lambda d: {"sbm": d.sbm()})
function(
    "analysis.lemma2", 4, analysis.lemma2, lambda d: {"n": (n := d.randint(1, 8)), "num_clusters": d.randint(1, n)}
)
function(
    "analysis.lemma1", 4, analysis.lemma1,
    lambda d: {"n": d.randint(3, 6), "probabilities": d.maybe([0.2, 0.8]), "samples": d.randint(1, 3), "seed": 0, "time_limit": 1.0,
               "progress": False},
    check=lambda result, **_: expect(str(result), "no words"),
)  # fmt: skip
function("analysis.log10_cycles", 3, analysis.log10_cycles, a_chance, check=_in_range)
function("analysis.path_probability", 3, analysis.path_probability, a_chance, check=_in_range)


# ------------------------------------------------------------------ plots


def drawn(result: Any, /, **_: Any) -> None:
    expect(type(result).__name__ == "Figure" and len(result.get_label()) > 20, "no figure with a caption")


def _plot_graph(d: Draw, name: str) -> Case:
    g = d.graph()
    arguments = {
        "graph": g,
        "sbm": d.maybe(d.model(g)) if name == "plot_mask" else d.model(g),
        "title": d.choice(("a", "")),
    }
    return Case(
        getattr(plots, name), arguments | a_sequence(d, g) | {"head": d.randrange(g.heads)}, drawn, free=("title",)
    )


def _extremes(result: Any, density: Any, count: Any) -> None:
    expect(bool(density.isfinite().all()), "a density that is not finite was taken")
    expect(
        len(result[0]) == len(result[1]) == min(operator.index(count), max(density.size(1) // 2, 1)),
        "another number of inputs",
    )


def _many(d: Draw, name: str) -> Case:
    count = d.randint(1, 3)
    layers = [d.graph(d.randint(1, 2), [4] * count, [4] * count) for _ in range(2)]
    arguments: dict[str, Any] = {"graphs": d.choice((layers, [layers[0], None])), "titles": d.maybe(["a"] * count)}
    if name != "plot_inputs":
        arguments["images"] = torch.rand(count, 2, 2)
    arguments |= {"count": 1} if name == "plot_extremes" else {"sequences": d.maybe([0]), "notes": ""}
    return Case(getattr(plots, name), arguments, drawn, free=("titles", "notes"))


for _name in ("plot_mask", "plot_communities"):
    TABLE[f"plots.{_name}"] = 2, partial(_plot_graph, name=_name)
for _name in ("plot_inputs", "plot_pixel_attention", "plot_extremes"):
    TABLE[f"plots.{_name}"] = 1, partial(_many, name=_name)
function(
    "plots.plot_density", 2, plots.plot_density,
    lambda d: {"density": d.choice((d.unit(2, 3, 2), {"a": d.unit(1, 2, 2), "b": d.unit(2, 1, 1)}, record_of(d))), "ax": None}, check=drawn,
)  # fmt: skip
function(
    "plots.plot_lemma1",
    1,
    plots.plot_lemma1,
    lambda d: {"result": analysis.lemma1(4, [0.3, 0.6], samples=2), "ax": None},
    check=drawn,
)
function(
    "plots.density_extremes", 4, plots.density_extremes, lambda d: {"density": d.unit(2, d.randint(1, 6), 2), "count": d.randint(1, 3)},
    check=_extremes,
)  # fmt: skip


@case("plots.plot_training_density", 2)
def _plot_training(d: Draw) -> Case:
    path = Path(d.folder()) / "log.csv"
    path.write_text("step,density_layer0_head0\n0,0.1\n5,0.2\n")
    logs: list[tuple[str, str, Callable[[], Any]]] = [
        ("no file", "value", lambda: "/no/such/file.csv"), ("a folder", "value", lambda: str(path.parent)),
        ("rows of text", "value", lambda: ["a"]), ("rows without a column", "value", lambda: [{"step": 1}]),
    ]  # fmt: skip
    texts = ("", "step\n", "a,b\n1,2\n", "step,density_layer0_head0\n0,x\n", "step,density_layer0_head0\n0\n\n")
    logs += [(f"csv {text!r:.24}", "value", partial(written, str(path), text.encode())) for text in texts]
    given = d.choice((str(path), path, [{"step": 0, "density_layer0_head0": 0.3}]))
    names = {"log": ("step", "density_layer0_head0")}
    return Case(plots.plot_training_density, {"log": given, "ax": None}, drawn, more={"log": logs}, names=names)


# ------------------------------------------------------------------ ragged batches, and what runs here


def _unpad(d: Draw) -> dict[str, Any]:
    mask = d.whole(2, 3, 4) > 0
    mask[:, 0] = True
    return {"x": d.real(3, 4, *d.choice(((), (2,)))), "mask": mask}


def _resolve(d: Draw) -> dict[str, Any]:
    lengths = d.lengths()
    ptr, batch = d.choice(((pointer(lengths), None), (None, batch_of(lengths)), (None, None)))
    return {"total": sum(lengths), "ptr": ptr, "batch": batch, "device": d.maybe(torch.device("cpu"))}


def _main(json: bool) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return info.main(["--json"] if json else [])


function(
    "pad",
    8,
    ragged.pad,
    lambda d: {"x": d.real(sum(n := d.lengths()), 2), "ptr": pointer(n), "fill_value": d.choice((0.0, -1.0))},
)
function("unpad", 8, ragged.unpad, _unpad)
function("ragged.resolve_ptr", 10, ragged.resolve_ptr, _resolve, free=("name",))
function("ragged.offsets", 3, ragged.offsets, lambda d: {"counts": torch.tensor(d.lengths())})
function("ragged.check_tensor", 2, ragged.check_tensor, lambda d: {"x": d.real(2), "name": "x"}, free=("name",), names={"x": ("name",)},
         check=lambda result, x, name: expect(x is None or isinstance(x, Tensor), "a value that is not a tensor passed"))  # fmt: skip
function("info.collect", 2, info.collect, lambda d: {"test": False})
function("info.self_test", 1, info.self_test, lambda d: {})
function("info.main", 1, _main, lambda d: {"json": d.random() < 0.5})


# ------------------------------------------------------------------ what has no arguments

RECORDS: dict[str, tuple[Callable[[Draw], Any], str]] = {  # class -> an instance, and its properties and methods without arguments
    "AttentionGraph": (
        Draw.graph, "num_edges num_sequences device edge_row edge_index edge_head degree edges_per_sequence density later lag "
        "pairs_per_sequence block_size blocks expand_tokens"),
    "BlockGraph": (block_graph, "block_size blocks device num_edges col expand_tokens"),
    "BlockPool": (lambda d: BlockPool(4), "extra_repr reset_parameters"),
    "SBM": (Draw.sbm, "heads num_queries num_keys num_clusters num_sequences factors causal"),
    "Tokens": (lambda d: Tokens(**token_fields(d)), "heads num_queries num_keys first_key"),
    "EncoderTrace": (record_of, "density expected_density graphs"),
    "SBMMultiheadAttention": (lambda d: SBMMultiheadAttention(6, 3), "dropout head_dim in_proj_weight reset_parameters"),
    "SBMAttentionConv": (lambda d: SBMAttentionConv(4, 2), "sbm"),
    "Entmax": (lambda d: Entmax(2), "alpha extra_repr reset_parameters"),
    "AttentionConv": (lambda d: AttentionConv(4, 2), "reset_parameters"),
    "SBMSource": (lambda d: SBMSource(SBMHead(4, 2)), "extra_repr reset_parameters"),
    "DensitySource": (lambda d: SBMSource(SBMHead(4, 2), target_density=0.5, window=1), "target_density"),
    "Choice": (choice_of, "shape density"),
    "patterns.PatternSource": (lambda d: patterns.PatternSource(patterns.full), "extra_repr"),
    "sparsefinder.Projection": (lambda d: sparsefinder.Projection(4), "extra_repr reset_parameters"),
    "sparsefinder.SparsefinderSource": (
        lambda d: sparsefinder.SparsefinderSource(sparsefinder.Projection(4), predictors.bucketing, num_buckets=2), "extra_repr"),
    "selectors.SelectorSource": (lambda d: selectors.SelectorSource(selectors.top_k, k=2), "extra_repr"),
    "selectors.TopKSource": (lambda d: selectors.TopKSource(2), "extra_repr"),
    "selectors.RoutingSource": (lambda d: selectors.RoutingSource(4), "extra_repr reset_parameters"),
    "indexer.Indexer": (lambda d: indexer.Indexer(4), "extra_repr reset_parameters"),
    "indexer.KeyScorer": (lambda d: indexer.KeyScorer(4), "extra_repr reset_parameters"),
    "indexer.IndexerSource": (lambda d: indexer.IndexerSource(indexer.Indexer(4), select="bernoulli"), "extra_repr reset_parameters"),
    "indexer.IndexProbability": (_index_record, "log_total expected_degree expected_density"),
    "DCMMBias": (lambda d: DCMMBias(4, 2), "reset_parameters extra_repr"),
    "ALiBi": (lambda d: ALiBi(3), "extra_repr"),
    "Rotary": (lambda d: Rotary(), "extra_repr"),
    "SBMHead": (lambda d: SBMHead(4, 2), "reset_parameters extra_repr"),
    "analysis.Lemma1": (lambda d: analysis.lemma1(4, [0.3, 0.6], samples=2), "log10_cycles share interval limit lemma"),
    "analysis.Universality": (lambda d: analysis.universality(patterns.window(4, 1)), "hamiltonian_path hamiltonian_status holds"),
}  # fmt: skip


def _member(d: Draw, make: Callable[[Draw], Any], name: str) -> Case:
    record = make(d)

    def call() -> Any:
        value = getattr(record, name)
        return value() if inspect.ismethod(value) else value

    return Case(call, {})


for _owner, (_make, _members) in RECORDS.items():
    for _name in _members.split():
        TABLE[f"{_owner}.{_name}"] = 1, partial(_member, make=_make, name=_name)


# ------------------------------------------------------------------ all public names

MODULES = {
    "": sbm_pyg, "ops": sbm_pyg.ops, "patterns": patterns, "indexer": indexer, "selectors": selectors, "ground_truth": ground_truth,
    "predictors": predictors, "sparsefinder": sparsefinder, "analysis": analysis, "plots": plots, "estimators": estimators, "gradients": gradients,
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
    **dict.fromkeys(("Sparsifier", *(f"Sparsifier.{name}" for name in ("step", "state_dict", "load_state_dict", "losses", "next_density", "passes", "scaler"))),
                    "a schedule of a model, see test_sparsifier.py"),
    **dict.fromkeys(("LearnedSource.predict", "LearnedSource.choose_among", "SBMSource.choose", "SBMSource.predict", "indexer.IndexerSource.predict",
                     "DensitySource.choose", "selectors.TopKSource.choose"),
                    "called by LearnedSource.forward, by LearnedGraph and by losses"),
    **dict.fromkeys(("Sparsifier.is_sparse", "Sparsifier.set_density", "plots.plot_losses"), "see test_sparsifier.py and test_plots.py"),
    **dict.fromkeys(("LearnedGraph", *(f"LearnedGraph.{name}" for name in ("extra_repr", "forward", "reset_parameters"))), "a source for layers of PyG, see test_learned_graph.py"),
    "register_source": "it changes what later calls know, see test_named.py",
    **dict.fromkeys(("replace_attention", "restore_attention"), "they change a model in place, see test_multihead.py and test_gps.py"),
    **dict.fromkeys(("SBMMultiheadAttention.to_torch", "SparseGPSConv.to_gps"), "see test_multihead.py"),
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
    "ground_truth.Match": "a record that the library makes and users read",
    "ground_truth.record": "it listens to a model, see test_ground_truth.py",
    **dict.fromkeys(("sparsefinder.fit_projection", "sparsefinder.fit_centroids"), "they train, see test_sparsefinder.py"),
    **dict.fromkeys(("gradients.distillation", "gradients.row_distillation"), "losses over what a layer computes, compared with their definitions in test_learned.py"),
    "auxiliary_loss": "it takes what layers keep, whose cases and scenarios call it",
    "sync_statistics": "it needs processes, see test_auxiliary.py",
    **dict.fromkeys(("HeadParallel", *(f"HeadParallel.{name}" for name in ("extra_repr", "forward", "own_heads", "processes", "reset_parameters"))), "it needs processes, see test_distributed.py"),
    "Pretrained": "a base class, called through its models",
    **{f"Pretrained.{name}": "of huggingface_hub, see test_pretrained.py" for name in ("save_pretrained", "from_pretrained")},
    **dict.fromkeys(
        ("EdgeProbability", "EdgeProbability.check", "EdgeProbability.expected_degree", "EdgeProbability.expected_density", "EdgeProbability.factors", "EdgeProbability.gate",
         "EdgeProbability.on", "GraphSource", "GraphSource.forward", "GraphSource.reset_parameters", "EdgeProbability.log_on", "DensitySource", "LearnedSource"), "an abstract class, called through SBM and SBMSource"),
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
