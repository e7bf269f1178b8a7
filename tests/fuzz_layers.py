"""What the fuzz driver calls beyond graphs: training steps of layers and models of any options, and all that examples call.

Layers and models are called with random options. Every other public name is called as the examples of the docstrings
call it, or as ``LINES`` do: :mod:`calls` records these calls with all of their arguments, of which hostile values then take the places.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from calls import EXEMPT, Call, public_names, recorded, takes_nothing
from fuzz_cases import DATA, DATA_NAMES, TABLE, Case, Draw, attention_inputs, case, expect, lengths_of, pointer
from problems import NAMED
from torch import Tensor, nn

from sbm_pyg import (
    SBM,
    AttentionConv,
    PairClassifier,
    SBMAttentionConv,
    SBMHead,
    SBMMultiheadAttention,
    SBMSource,
    SequenceClassifier,
    SequenceEncoder,
    TokenClassifier,
    Tokens,
    auxiliary_loss,
    estimators,
    gradients,
    make_attention,
)
from sbm_pyg.layers.attention import Returns


def float_tokens(d: Draw, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=d.torch)


def batch_of(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(pointer(lengths).diff())


# ------------------------------------------------------------------ layers


@case("gradients.attach_local_expectation", 6)
def _local(d: Draw) -> Case:
    graph, x = attention_inputs(d, d.randint(1, 2))
    sbm, probes = d.model(graph), d.graph(graph.heads, *lengths_of(graph))
    y, z, block_matrix = (part.to(d.dtype) for part in (sbm.query_membership, sbm.key_membership, sbm.block_matrix))
    sbm = SBM(y.requires_grad_(), z, block_matrix, sbm.query_ptr, sbm.key_ptr)
    out = d.real(graph.heads, graph.num_queries, x["value"].size(2))
    arguments: dict[str, Any] = {"out": out, **x, "probability": sbm, "graph": graph, "probes": probes, "scale": 0.5}
    arguments |= {"chance": d.unit(graph.num_queries), "bias": d.maybe(d.real(graph.num_edges))}
    arguments |= {"probe_bias": d.maybe(d.real(probes.num_edges)), "exploration": d.choice((0.0, 0.1))}
    return Case(gradients.attach_local_expectation, arguments | {"forced": d.maybe(d.whole(2, graph.num_edges) > 0)})


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
    edge_index = {"graph": g, "edges": g.edge_index, "typed": g.edge_index, "sample": None, "pair": None}[how]
    arguments: dict[str, Any] = {"x": (x, float_tokens(d, sum(lengths), 4)) if how == "pair" else x}
    arguments |= d.choice(({"ptr": pointer(lengths), "batch": None}, {"ptr": None, "batch": batch_of(lengths)}))
    arguments |= {
        "edge_index": edge_index, "edge_attr": edge_attr, "edge_head": g.edge_head if how == "typed" else None,
    }  # fmt: skip
    arguments |= {"sequence_ids": d.maybe(d.whole(9, len(lengths))) if edge_index is None else None}
    arguments |= {"seed": d.getrandbits(60), "return_graph": True}

    def call(**arguments: Any) -> Any:
        conv.zero_grad()
        result = conv(**arguments)
        ((result[0] if isinstance(result, tuple) else result).sum() + auxiliary_loss(conv)).backward()
        return result, [parameter.grad for parameter in conv.parameters()]

    free = ("return_graph",) if edge_index is None else ("return_graph", "sequence_ids")  # a given graph draws nothing
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


@case("SBMMultiheadAttention.forward", 16)
def _multihead_forward(d: Draw) -> Case:
    heads, length, keys, batch = d.randint(1, 2), d.randint(1, 4), d.randint(1, 4), d.randint(1, 3)
    full = d.random() < 0.5
    torchs = nn.MultiheadAttention(4, heads, batch_first=True)
    layer = SBMMultiheadAttention.from_torch(torchs, **({"source": None} if full else {"num_clusters": 3})).eval()
    padding = torch.arange(keys) >= torch.tensor([[d.randint(1, keys)] for _ in range(batch)])
    sides = {"query": length, "key": keys, "value": keys}
    arguments: dict[str, Any] = {side: float_tokens(d, batch, count, 4) for side, count in sides.items()}
    arguments |= {"key_padding_mask": d.maybe(padding), "need_weights": d.random() < 0.5, "average_attn_weights": True}
    arguments |= {"attn_mask": d.maybe(torch.ones(length, keys, dtype=torch.bool).triu(1)), "is_causal": False}
    arguments |= {"seed": d.getrandbits(60), "sequence_ids": None if full else d.maybe(d.whole(9, batch))}
    return Case(layer, arguments, free=("sequence_ids",) if full else ())


# ------------------------------------------------------------------ models


def encoder_options(d: Draw) -> dict[str, Any]:
    attention = d.choice((*NAMED,))
    extra = {"sbm": {"num_clusters": 3}, "window": {"size": 1}, "bigbird": {"num_random": 1}, "top_k": {"k": 2}}
    options: dict[str, Any] = {"num_tokens": 9, "channels": 4, "num_layers": d.randint(1, 2), "heads": d.randint(1, 2)}
    options |= {"head_channels": d.maybe(2), "ffn_channels": d.maybe(5), "max_length": 8}
    options |= {"dropout": d.choice((0.0, 0.1)), "position_encoding": d.choice(("learned", "rotary"))}
    return options | {"attention": attention, "attention_options": extra.get(attention)}


def encoder(d: Draw) -> SequenceEncoder:
    return SequenceEncoder(**encoder_options(d)).train(d.random() < 0.5)


def check_trace(result: Any, **_: Any) -> None:
    """Of what came with a trace, and of the output alone where a hostile ``return_trace`` counts as False."""
    if not isinstance(result, Tensor):
        density = result[1].density
        expect(bool(((density >= 0) & (density <= 1)).all()), "a density outside of [0, 1]")


@case("SequenceEncoder", 16)
def _encoder(d: Draw) -> Case:
    inputs = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 2, 5])
    return Case(
        lambda **options: SequenceEncoder(**options)(*inputs, seed=0, return_trace=True),
        encoder_options(d),
        check_trace,
    )


def _model_forward(d: Draw, kind: Any) -> Case:
    """A model, which has an output for each token, or for each sequence."""
    inner, lengths = encoder(d), d.lengths()
    positions = torch.cat([torch.arange(n) for n in lengths])
    arguments: dict[str, Any] = {"tokens": d.whole(9, sum(lengths)), "ptr": pointer(lengths), "batch": None}
    arguments |= {"positions": d.maybe(positions), "seed": d.getrandbits(60), "return_trace": True}
    arguments |= {"sequence_ids": d.maybe(d.whole(9, len(lengths)))}
    config: Any = inner._hub_mixin_config
    draws = kind is SequenceClassifier or config["attention"] in ("sbm", "bigbird")
    free = ("return_trace",) if draws else ("return_trace", "sequence_ids")
    names: dict[str, tuple[str, ...]] = {"ptr": ("sequence_ids",), "batch": ("sequence_ids",)}
    return Case(kind(inner, 3) if kind else inner, arguments, check_trace, free=free, names=names)


TABLE["SequenceEncoder.forward"] = 16, partial(_model_forward, kind=None)
TABLE["SequenceClassifier.forward"] = 8, partial(_model_forward, kind=SequenceClassifier)
TABLE["TokenClassifier.forward"] = 5, partial(_model_forward, kind=TokenClassifier)


@case("PairClassifier.forward", 10)
def _pair_forward(d: Draw) -> Case:
    sides = [d.lengths(1) for _ in range(2)]
    words, offsets = (d.whole(9, sum(sides[0])), d.whole(9, sum(sides[1]))), (pointer(sides[0]), pointer(sides[1]))
    arguments: dict[str, Any] = {
        "tokens": words, "ptr": offsets, "batch": None, "positions": None, "return_trace": True,
    }  # fmt: skip
    arguments |= {"seed": d.getrandbits(60), "sequence_ids": d.maybe(d.whole(9, 1))}
    return Case(PairClassifier(encoder(d), 3), arguments, check_trace, free=("return_trace",))


# ------------------------------------------------------------------ calls of examples


def _temperature(result: Any, temperature: Any, **_: Any) -> None:
    expect(not math.isnan(temperature) and temperature > 0, "a temperature that is not positive was taken")


def _drawn(result: Any, /, **_: Any) -> None:
    expect(type(result).__name__ == "Figure" and len(result.get_label()) > 20, "no figure with a caption")


ATTENTIONS: list[tuple[str, str, Callable[[], Any]]] = [
    ("a Linear", "value", lambda: nn.Linear(4, 4)), ("with bias_k", "value", lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True)),
    ("ours", "value", lambda: SBMMultiheadAttention(4, 2)), ("zero_attn", "value", lambda: nn.MultiheadAttention(4, 2, add_zero_attn=True)),
]  # fmt: skip
ROWS: dict[str, Any] = {"unchecked": ("rows",), "names": {"rows": ("rowptr", "col", "bias")}}
DETAILS: dict[str, dict[str, Any]] = {  # fields of cases, where they are not those of every call
    "AttentionConv": {"free": ("score_bias",)},
    "AttentionGraph.over": {"free": ("heads", "edge_head")},
    "AttentionGraph.from_data": {"names": {"heads": ("edge_head",)}},
    "AttentionGraph.to_networkx": {"free": ("bipartite",)},
    "AttentionGraph.from_networkx": {"names": {"heads": ("edge_head",)}},
    "Choice.expand": {"names": {"heads": ("graph",)}},
    "Choice.force": {"names": {"pattern": ("other",)}},
    "Choice.select": {"names": {"kept": ("mask",)}},
    "FullAttention.forward": {"free": ("seed", "sequence_ids")},
    "SBMMultiheadAttention.from_torch": {"more": {"attention": ATTENTIONS}, "names": {"attention": ("add_bias_kv", "add_zero_attn")}},
    "SparseGPSConv.forward": {"names": {"x": ("rate",)}},
    "Tokens.with_vectors": {"free": ("query", "key")},
    "SBMGraph": {"free": ("exploration", "clamp", "seed")},  # which its calls check
    "patterns.PatternSource": {"free": ("size",)},
    "sparsefinder.SparsefinderSource": {"free": ("num_buckets",)},
    "Tokens": {"names": {"query": ("key",), "query_ptr": ("key_ptr",)}},
    "analysis.graph_statistics": {"free": ("bipartite",)},
    "indexer.IndexProbability.sample": {"free": ("seed",)},
    "ops.edge_attention": ROWS,
    "ops.edge_dot": ROWS,
    "ops.sample_sbm": {"unchecked": ("query_ptr", "key_ptr")},
    "ops.segment_entmax": {"unchecked": ("index", "ptr")},
    "ops.block_attention": {"names": {"rows": ("rowptr", "col")}},
    "gradients.concrete_bias": {"check": _temperature},
    "selectors.SelectorSource": {"free": ("k", "num_buckets")},
}  # fmt: skip
FIXED = {"name", "norm", "norm_kwargs", "act", "act_kwargs", "title", "titles", "notes"}  # words, and what PyG checks
TOKEN_NAMES: dict[str, tuple[str, ...]] = {  # what sources and rules call the fields of their tokens
    "query": ("query_membership", "query_ptr", "key", "centroids", "rate"), "key": ("key_membership", "key_ptr", "query"),
    "query_ptr": ("ptr", "query", "key", "key_ptr"), "key_ptr": ("ptr", "query_ptr", "key"), "bipartite": ("rule", "block_window", "global_blocks"),
}  # fmt: skip


def _recorded_case(d: Draw, name: str) -> Case:
    """A call of an example; what it takes as ``Tokens`` is made of its fields, which are arguments of the case."""
    call: Call = copy.deepcopy(d.choice(recorded()[name]))
    left = FIXED | ({"edge_index", "edge_attr"} if name.startswith("SparseGPSConv") else set())
    fixed = {key: value for key, value in call.arguments.items() if key in left}
    arguments = {key: value for key, value in call.arguments.items() if key not in left}
    first = name == "ops.edge_attention"  # its second output is minus infinity in rows without edges
    function = (lambda **given: call.function(**given)[0]) if first else partial(call.function, **fixed)
    case = Case(function, arguments, **DETAILS.get(name, {}))
    if name.startswith("plots.plot_"):
        case.check = _drawn
    if "name" in fixed:
        case.names = dict.fromkeys(arguments, (fixed["name"],))
    if "data" in arguments:
        return dataclasses.replace(case, more={"data": DATA}, names={**case.names, "data": (*DATA_NAMES, "query")})
    for key, tokens in arguments.items():
        fields = {field.name: getattr(tokens, field.name, None) for field in dataclasses.fields(Tokens)}
        if isinstance(tokens, Tokens) and not fields.keys() & arguments.keys():
            others = {other: value for other, value in arguments.items() if other != key}
            return Case(partial(_of_tokens, case.call, key), fields | others, free=("seed",), names=TOKEN_NAMES)
    return case


def _of_tokens(function: Callable[..., Any], argument: str, **options: Any) -> Any:
    fields = {field.name: options.pop(field.name) for field in dataclasses.fields(Tokens) if field.name in options}
    return function(**{argument: Tokens(**fields)}, **options)


for _name in public_names():
    if _name not in TABLE and _name not in EXEMPT:
        TABLE[_name] = 1 if takes_nothing(_name) else 4, partial(_recorded_case, name=_name)
