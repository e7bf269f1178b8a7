"""What the package does, once for each part, on a device that the caller chooses: the cases of ``test_devices.py``.

In: a device. Out: what was computed there, which must be the same on every device. Inputs are drawn on the CPU and carried over.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import calls
import torch
from problems import NAMED
from torch import Tensor, nn
from torch.nn import functional as F

from sbm_pyg import (
    SBM,
    AttentionConv,
    AttentionGraph,
    Choice,
    DCMMBias,
    GraphSource,
    SBMAttentionConv,
    SBMHead,
    SBMMultiheadAttention,
    SequenceClassifier,
    SequenceEncoder,
    Tokens,
    TransformerConv,
    auxiliary_loss,
    estimators,
    make_attention,
    ops,
    sparsefinder,
)
from sbm_pyg.ops import checks
from sbm_pyg.sources import indexer, patterns, selectors
from sbm_pyg.sparsefinder import ground_truth, predictors

Device = torch.device
Case = Callable[[Device], Any]

CASES: dict[str, Case] = {}
PTR = torch.tensor([0, 5, 12, 40])
KEY_PTR = torch.tensor([0, 4, 10, 30])


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def cases(
    prefix: str, variants: dict[str, Any]
) -> Callable[[Callable[[Device, Any], Any]], Callable[[Device, Any], Any]]:
    """Registers a function of device and variant, once for each variant."""

    def register(function: Callable[[Device, Any], Any]) -> Callable[[Device, Any], Any]:
        for name, variant in variants.items():
            CASES[f"{prefix}-{name}"] = lambda device, variant=variant: function(device, variant)  # type: ignore[misc]
        return function

    return register


def leaves(result: Any) -> Iterator[Any]:
    """Tensors and numbers of a result, graphs and block models taken apart."""
    if isinstance(result, Choice):
        result = result.graph
    if isinstance(result, AttentionGraph):
        result = (result.rowptr, result.col, result.query_ptr, result.key_ptr)
    elif isinstance(result, SBM):
        result = (result.query_membership, result.key_membership, result.block_matrix, result.query_ptr, result.key_ptr)
    if isinstance(result, list | tuple):
        for part in result:
            yield from leaves(part)
    elif isinstance(result, Tensor | int | float):
        yield result


def compare(result: Any, expected: Any, device: Device) -> None:
    """Raise AssertionError unless all tensors are on the device and everything equals, to rounding in float32, what was expected."""
    for got, want in zip(leaves(result), leaves(expected), strict=True):
        if isinstance(want, Tensor):
            assert got.device.type == device.type
            got, want = got.detach().cpu(), want.detach()
            got = got.to(want.dtype) if got.dtype == torch.float32 == checks.widest(device) else got
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5, equal_nan=True)


def normal(device: Device, *size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device)


def words(device: Device) -> Tensor:
    return torch.randint(11, (40,), generator=torch.Generator().manual_seed(0)).to(device)


def on(device: Device, make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make().to(device)


def block_model(device: Device) -> SBM:
    head, ptr = on(device, lambda: SBMHead(8, heads=2, num_clusters=4)), PTR.to(device)
    return head(
        Tokens(normal(device, 2, 40, 8, seed=1), normal(device, 2, 40, 8, seed=2), query_ptr=ptr, bipartite=False)
    )


def with_gradients(out: Tensor, module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    (out.sin().sum() + auxiliary_loss(module)).backward()
    return [out, *(x.grad for x in (*inputs, *module.parameters()) if x.grad is not None)]


# ------------------------------------------------------------------ layers


@cases(
    "layer",
    {name: {"estimator": name} for name in estimators.ESTIMATORS}
    | {
        "fastrg": {"method": "fastrg"}, "budget": {"budget": 5.0}, "exploration": {"exploration": 0.01},
        "window": {"window": 2}, "no probes": {"probes": 0}, "dropout": {"dropout": 0.3},
        "mean of heads": {"concat": False}, "entmax": {"normalizer": "entmax15"},
        "sparsemax": {"normalizer": "sparsemax"}, "mixed": {"parameterization": "mixed"},
        "assortative": {"parameterization": "assortative"},
        "degrees": {"degree_corrected": True},
        "score bias": {"score_bias": lambda query, key, graph: -graph.col.float() / 40},
    },
)  # fmt: skip
def layer(device: Device, variant: dict[str, Any]) -> Any:
    conv = on(device, lambda: make_attention("sbm", 16, 8, 2, num_clusters=4, **variant))
    x = normal(device, 40, 16).requires_grad_()
    out, graph, (_, alpha) = conv(x, ptr=PTR.to(device), seed=3, return_graph=True, return_attention_weights=True)
    drawn = variant.get("estimator") == "concrete"  # by the device's own generator
    return out.shape if drawn else (with_gradients(out, conv, x), graph, alpha)


@cases(
    "chooser",
    {
        "top_k": ("none", lambda: selectors.TopKSource(3, window=1)),
        "block_top_k": ("none", lambda: selectors.SelectorSource(selectors.block_top_k, k=2, block_size=3)),
        "lsh": ("none", lambda: selectors.SelectorSource(selectors.lsh, num_buckets=4, chunk_size=3, rounds=2)),
        "routing": ("none", lambda: selectors.RoutingSource(8, 2, 3)),
        "distance": ("none", lambda: sparsefinder.SparsefinderSource(projection(), predictors.distance, threshold=1.0)),
        "buckets": ("none", lambda: sparsefinder.SparsefinderSource(projection(), predictors.bucketing, num_buckets=3)),
        "clusters": ("none", lambda: sparsefinder.SparsefinderSource(
            projection(), predictors.clustering, centroids=torch.eye(3)[None], cap=3, num_global=1)),
        "coins": ("distill", lambda: indexer.IndexerSource(indexer.Indexer(8, 2), select="bernoulli", target_density=0.3)),
        "coins apart": ("local", lambda: indexer.IndexerSource(indexer.Indexer(8, 2), select="bernoulli", window=1)),
        "ranks": ("imitate", lambda: indexer.IndexerSource(indexer.KeyScorer(8, 2), select="top_k", k=3)),
    },
)  # fmt: skip
def chooser(device: Device, variant: tuple[str, Callable[[], GraphSource]]) -> Any:
    estimator, source = variant
    conv = on(device, lambda: AttentionConv(16, 8, 2, source(), estimator=estimator))
    x = normal(device, 40, 16).requires_grad_()
    out, graph = conv(x, ptr=PTR.to(device), seed=3, return_graph=True)
    return with_gradients(out, conv, x), graph, ground_truth.compare(graph, graph).sparsity


def projection() -> sparsefinder.Projection:
    return sparsefinder.Projection(8, 2, 3)


@case
def layer_with_the_bias_of_a_block_model(device: Device) -> Any:
    def make() -> SBMAttentionConv:
        return SBMAttentionConv(16, 8, heads=2, num_clusters=4, score_bias=DCMMBias(8, 2, 4, entropy_weight=0.1))

    conv = on(device, make)
    x = normal(device, 40, 16).requires_grad_()
    out, graph = conv(x, ptr=PTR.to(device), seed=3, return_graph=True)
    return with_gradients(out, conv, x), graph


@case
def layer_between_two_sets(device: Device) -> Any:
    conv = on(device, lambda: SBMAttentionConv((12, 16), 8, heads=2, num_clusters=4))
    x = normal(device, 30, 12).requires_grad_(), normal(device, 40, 16).requires_grad_()
    out, graph = conv(
        x, ptr=(KEY_PTR.to(device), PTR.to(device)), seed=3, sequence_ids=torch.tensor([2, 0, 1]).to(device),
        return_graph=True,
    )  # fmt: skip
    return with_gradients(out, conv, *x), graph


@case
def layer_with_edge_features(device: Device) -> Any:
    conv = on(device, lambda: TransformerConv(16, 8, heads=2, edge_dim=5))
    x, edge_attr = normal(device, 40, 16).requires_grad_(), normal(device, 90, 5, seed=1).requires_grad_()
    edge_index = torch.randint(40, (2, 90), generator=torch.Generator().manual_seed(0)).to(device)
    out, (_, alpha) = conv(x, edge_index, edge_attr, return_attention_weights=True)
    return with_gradients(out, conv, x, edge_attr), alpha


@case
def layer_of_offsets_from_the_cpu(device: Device) -> Any:
    """PyG's batches have theirs there, unless features are on CUDA."""
    conv = on(device, lambda: SBMAttentionConv(16, 8, heads=2, num_clusters=4))
    x, batch, sequence_ids = (
        normal(device, 40, 16), torch.repeat_interleave(torch.arange(3), PTR.diff()), torch.tensor([2, 0, 1]),
    )  # fmt: skip
    return conv(x, ptr=PTR, seed=3, sequence_ids=sequence_ids), conv(x, batch=batch, seed=3, return_graph=True)


@case
def layer_over_a_graph(device: Device) -> Any:
    conv = on(device, lambda: AttentionConv(16, 8, heads=2))
    x, ptr = normal(device, 40, 16).requires_grad_(), PTR.to(device)
    graph = patterns.window(None, 2, ptr=ptr)
    batch = torch.repeat_interleave(torch.arange(3), PTR.diff()).to(device)
    over_edges = conv(x, graph.edge_index, batch=batch)
    hook = conv.register_message_forward_hook(lambda module, inputs, out: 2 * out)  # the path by messages
    by_messages = conv(x, graph.edge_index)
    hook.remove()
    return with_gradients(conv(x, graph, ptr=ptr), conv, x), over_edges, by_messages


@cases("multihead", {"dense": {"source": None}, "sampled": {"num_clusters": 4}})
def multihead(device: Device, variant: dict[str, Any]) -> Any:
    layer = on(device, lambda: SBMMultiheadAttention(16, 2, batch_first=True, **variant)).eval()
    x, padding = normal(device, 3, 10, 16), (torch.arange(10) >= torch.tensor([[4], [10], [7]])).to(device)
    future = torch.ones(10, 10, dtype=torch.bool).triu(1).to(device)
    torch.manual_seed(0)  # sampled layers draw their seed
    masked = layer(x, x, x, key_padding_mask=padding, attn_mask=future, need_weights=False)[0]
    return masked, layer(
        x, x, x, key_padding_mask=padding.float().masked_fill(padding, -torch.inf), need_weights=False
    )[0]


# ------------------------------------------------------------------ models


def encoder(attention: str = "sbm") -> SequenceEncoder:
    named: dict[str, Any] = {"attention": attention, "attention_options": NAMED[attention]}
    return SequenceEncoder(11, channels=16, num_layers=2, heads=2, ffn_channels=32, max_length=64, **named)


@cases("model", {name: name for name in NAMED})
def model(device: Device, variant: str) -> Any:
    classifier = on(device, lambda: SequenceClassifier(encoder(variant), 3)).eval()
    logits, trace = classifier(
        words(device), PTR.to(device), seed=1, sequence_ids=torch.tensor([4, 1, 2]).to(device), return_trace=True
    )
    loss = F.cross_entropy(logits, torch.tensor([0, 1, 2]).to(device)) + 0.1 * trace.density_loss(0.02)
    return with_gradients(loss, classifier), logits, trace.density, trace.expected_density


@cases("baseline", {name: name for name in ("linear", "linformer", "performer", "nystromformer", "reformer")})
def baseline(device: Device, variant: str) -> Any:
    from examples.lra.baselines import BASELINES

    sizes = {
        "linformer_rank": 12, "hash_rounds": 2, "hash_chunk": 16, "random_features": 32, "landmarks": 16,
        "value_kernel": 7,
    }  # fmt: skip
    settings: Any = SimpleNamespace(max_length=40, attention_dropout=0.0, **sizes)
    layer = on(device, lambda: BASELINES[variant](settings, 16, 8, 2))
    x = normal(device, 40, 16).requires_grad_()
    out = layer(x, ptr=PTR.to(device), seed=1)
    return (
        out.shape if variant == "reformer" else with_gradients(out, layer, x)
    )  # its hashes are drawn by the device's own generator


# ------------------------------------------------------------------ ops, and calls of examples


@case
def edge_ops(device: Device) -> Any:
    graph = patterns.window(None, 2, heads=2, ptr=PTR.to(device))
    query, key, value = (normal(device, 2, 40, 8, seed=seed).requires_grad_() for seed in (1, 2, 3))
    gate, bias = (normal(device, graph.num_edges, seed=seed).sigmoid().requires_grad_() for seed in (4, 5))
    dots = ops.edge_dot(query, key, graph.rows)
    attended, lse = ops.edge_attention(
        query, key, value, graph.rows._replace(bias=bias), gate=gate, dropout=0.2, seed=7
    )
    entmax = ops.segment_entmax(dots, ptr=graph.rowptr, alpha=1.5)
    (attended.sin().sum() + entmax.square().sum()).backward()
    return dots, attended, lse, entmax, [x.grad for x in (query, key, value, gate, bias)]


def moved(value: Any, device: Device) -> Any:
    """A copy whose tensors are on the device, in float32 where it has no float64."""

    def copied(x: Tensor, memo: dict[int, Any]) -> Tensor:
        here = x.detach().clone()
        here = here.to(checks.widest(device)) if x.dtype == torch.float64 else here
        here = here.to(device)
        return memo.setdefault(
            id(x),
            nn.Parameter(here, x.requires_grad)
            if isinstance(x, nn.Parameter)
            else here.requires_grad_(x.requires_grad),
        )

    with mock.patch.object(Tensor, "__deepcopy__", copied), mock.patch.object(nn.Parameter, "__deepcopy__", copied):
        return copy.deepcopy(value)


def example(device: Device, name: str) -> Any:
    """A call of a public name, as ``calls`` has it."""
    call = moved(calls.recorded()[name][0], device)
    if name.startswith("patterns.") and "device" in call.arguments:
        call.arguments["device"] = device
    torch.manual_seed(0)
    return call.function(**call.arguments)


LEFT_OUT = {  # their results are on the CPU, unless a device is named, or no example calls them
    "AttentionGraph.from_networkx", "AttentionGraph.to", "ragged.resolve_ptr", "AttentionGraph.to_sparse_tensor",
    "gradients.attach_local_expectation",
}  # fmt: skip
for _name in calls.public_names():
    if _name not in calls.EXEMPT | dict.fromkeys(LEFT_OUT) and not calls.takes_nothing(_name):
        CASES[f"call-{_name}"] = partial(example, name=_name)
