"""Attention in PyG's graph transformer layer: over full graphs it equals that of PyG, and it never leaves a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GINConv, GPSConv, SGFormer
from torch_geometric.nn.attention import SGFormerAttention

from sbm_pyg import (
    AttentionConv,
    SBMAttentionConv,
    SBMMultiheadAttention,
    SparseGPSConv,
    Sparsifier,
    auxiliary_loss,
    patterns,
    replace_attention,
)

LENGTHS = torch.tensor([5, 1, 12, 7])
BATCH = torch.arange(4).repeat_interleave(LENGTHS)
PTR = torch.tensor([0, 5, 6, 18, 25])
EDGES = torch.tensor([[0, 1, 2, 6, 7, 20, 24], [1, 2, 4, 9, 17, 21, 18]])


def gps(**options: Any) -> GPSConv:
    torch.manual_seed(0)
    return GPSConv(16, GINConv(nn.Linear(16, 16)), **{"heads": 4, **options}).double()


def nodes(seed: int = 1) -> Tensor:
    return torch.randn(25, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def full(heads: int = 4) -> AttentionConv:
    return AttentionConv(16, 4, heads, patterns.PatternSource(patterns.full)).double()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", ["batch_norm", "graph_norm", "layer_norm", None])
@pytest.mark.parametrize("form", ["full", "density", "edges", "one graph"])
def test_full_graphs_are_gps_conv(training: bool, norm: str | None, form: str) -> None:
    theirs = gps(norm=norm).train(training)
    options: dict[str, Any] = {"source": None} if form != "density" else {"num_clusters": 3, "target_density": 1.0}
    ours = SparseGPSConv.from_gps(copy.deepcopy(theirs), **options)
    assert isinstance(ours, GPSConv)
    assert ours.training is training
    given: dict[str, Any] = {"edge_index": patterns.full(None, ptr=PTR)} if form == "edges" else {}
    batch = None if form == "one graph" else BATCH
    results = []
    for layer, more in ((theirs, {}), (ours, {"attn_kwargs": given | {"seed": 0}})):
        x = nodes().requires_grad_()
        out = layer(x, EDGES, batch, **more)
        loss = out.sin().sum() + (0 * auxiliary_loss(layer) if layer is ours else 0)
        loss.backward()
        grads = [p.grad for p in (*layer.conv.parameters(), *layer.mlp.parameters())]
        results.append([out, x.grad, *grads])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_layer_over_a_batch_compiles_as_one_graph() -> None:
    layer = SparseGPSConv(16, GINConv(nn.Linear(16, 16)), SBMAttentionConv(16, 4, 4, num_clusters=3)).double()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for batch in (BATCH, BATCH.int().clamp(max=2), 2 * BATCH):
        out, expected = (each(nodes(), EDGES, batch, attn_kwargs={"seed": 0}) for each in (compiled, layer))
        torch.testing.assert_close(out, expected)
    with pytest.raises(RuntimeError, match="Expected 'batch' to be sorted, from 0"):
        compiled(nodes(), EDGES, BATCH.flip(0), attn_kwargs={"seed": 0})


def test_a_graph_of_a_batch_knows_nothing_of_the_others() -> None:
    layer = SparseGPSConv(16, None, SBMAttentionConv(16, 4, 4, num_clusters=3), norm=None).double().eval()
    x = nodes()
    out = layer(x, EDGES, BATCH, attn_kwargs={"seed": 0})
    other = torch.where(BATCH[:, None] == 2, x, nodes(2))
    assert torch.equal(layer(other, EDGES, BATCH, attn_kwargs={"seed": 0})[BATCH == 2], out[BATCH == 2])
    assert torch.equal(layer(x, EDGES, attn_kwargs={"seed": 0, "ptr": PTR, "batch": None}), out)
    assert not torch.equal(layer(x, EDGES, BATCH, attn_kwargs={"seed": 1}), out)


@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm", None])
@pytest.mark.parametrize("batch", [[0, 0, 2, 2, 4], [1, 1, 1, 1, 1], []])
def test_graphs_without_nodes_are_those_of_pyg(batch: list[int], norm: str | None) -> None:
    theirs = gps(norm=norm).eval()
    x, edge_index = nodes()[: len(batch)], EDGES[:, : min(len(batch), 2)]
    number = torch.tensor(batch, dtype=torch.int64)
    for options in ({"source": None}, {"num_clusters": 3}, {"source": "top_k", "k": 2}):
        ours = SparseGPSConv.from_gps(theirs, **options).eval()
        if norm == "layer_norm" and not batch:
            continue  # PyG's norm of graphs asks for the largest of their numbers
        out = ours(x, edge_index, number)
        assert out.shape == x.shape
        if batch and options == {"source": None}:
            torch.testing.assert_close(out, theirs(x, edge_index, number))


def test_a_whole_model_is_replaced_and_made_sparse() -> None:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict(
        {"convs": nn.ModuleList([gps(), gps()]), "other": nn.TransformerEncoderLayer(16, 4)}
    ).float()
    parameters = {*model["convs"][0].mlp.parameters(), *model["convs"][0].conv.parameters()}
    assert replace_attention(model, num_clusters=4) == ["convs.0", "convs.1", "other.self_attn"]
    assert parameters < {*model.parameters()}
    layers = model["convs"]
    sparsifier = Sparsifier(layers, density=0.4, total_steps=8, dense_part=0.5)
    optimizer = torch.optim.Adam(layers.parameters(), 1e-2)
    for _ in range(8):
        x = nodes().float()
        for layer in layers:
            x = layer(x, EDGES, BATCH)
        loss = x.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sparsifier.step(loss)
    assert sparsifier.is_sparse
    assert layers[0].attn.source.head.clusters.grad.abs().sum() > 0
    graph = layers[0].attn(nodes().float(), batch=BATCH, return_graph=True)[1]
    assert 0 < float(graph.density.mean()) < 0.8


def test_parameters_are_drawn_anew() -> None:
    layer = SparseGPSConv(16, GINConv(nn.Linear(16, 16)), full()).double()
    before = {name: each.clone() for name, each in layer.named_parameters() if each.dim() == 2}
    layer.reset_parameters()
    assert len(before) == 7
    assert not any(torch.equal(before[name], each) for name, each in layer.named_parameters() if name in before)
    assert repr(layer) == "SparseGPSConv(16, conv=GINConv(nn=Linear(in_features=16, out_features=16, bias=True)), heads=4, attn_type=AttentionConv)"  # fmt: skip


class PaddedAttention(SBMMultiheadAttention):
    """The form of ``torch_geometric.nn.attention``, as in docs/guides/graph_transformer.md."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        padding = None if mask is None else ~mask
        return super().forward(x, x, x, key_padding_mask=padding, need_weights=False)[0]


def test_attention_of_other_models_of_pyg() -> None:
    torch.manual_seed(0)
    model = SGFormer(16, 16, 3, trans_num_layers=2)
    assert all(isinstance(each, SGFormerAttention) for each in model.trans_conv.attns)
    model.trans_conv.attns = nn.ModuleList(PaddedAttention(16, 2, batch_first=True, num_clusters=4) for _ in range(2))
    model.reset_parameters()
    model(nodes().float(), EDGES, BATCH).sum().backward()
    assert model.trans_conv.attns[0].conv.source.head.clusters.grad.abs().sum() > 0


def test_attention_is_described_as_that_of_pyg() -> None:
    torch.manual_seed(0)
    layer = SparseGPSConv(16, None, heads=4, attn_kwargs={"num_clusters": 3, "dropout": 0.1})
    torch.manual_seed(0)
    same = SparseGPSConv(16, None, SBMAttentionConv(16, 4, 4, num_clusters=3, dropout=0.1))
    assert layer.attn.dropout == 0.1
    x = nodes().float()
    same.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x, EDGES, BATCH), same.eval()(x, EDGES, BATCH))
    assert SparseGPSConv(16, None, heads=2, attn_type="top_k", attn_kwargs={"k": 3}).attn.source.k == 3  # type: ignore[union-attr]
    theirs = gps(attn_type="multihead").eval()
    ours = SparseGPSConv(16, theirs.conv, heads=4, attn_type="multihead").double().eval()
    restored = ours.to_gps()
    torch.testing.assert_close(ours(nodes(), EDGES, BATCH), restored(nodes(), EDGES, BATCH))


def test_wrong_arguments_are_refused() -> None:
    layer = SparseGPSConv(16, None, full()).double()
    calls: list[tuple[str, Callable[[], Any]]] = [
        (r"'attn' to be an AttentionConv", lambda: SparseGPSConv(16, None, cast(Any, nn.MultiheadAttention(16, 4)))),
        (r"'conv' to be a layer of PyG, or None \(got type\)", lambda: SparseGPSConv(16, cast(Any, nn.Linear), full())),
        (r"'attn' to take 8 channels", lambda: SparseGPSConv(8, None, full())),
        (r"'dropout'", lambda: SparseGPSConv(16, None, full(), dropout=2)),
        (r"'heads' to divide 'channels' \(got 3 and 16\)", lambda: SparseGPSConv(16, None, heads=3)),
        (r"no options of attention with an 'attn'", lambda: SparseGPSConv(16, None, full(), heads=4)),
        (r"'attn' to be an AttentionConv \(got int\). .*`heads=`", lambda: SparseGPSConv(16, None, cast(Any, 4))),
        (r"'source' to be one of", lambda: SparseGPSConv(16, None, attn_type="performer")),
        (r"'attn' with concatenated heads of 16", lambda: SparseGPSConv(16, None, SBMAttentionConv(16, 3, 2)).to_gps()),
        (r"'gps' to be a GPSConv", lambda: SparseGPSConv.from_gps(cast(Any, nn.Linear(2, 2)))),
        (r"'gps.attn' to be .*multihead", lambda: SparseGPSConv.from_gps(gps(attn_type="performer"))),
        (r"'attn_kwargs' to be a dict", lambda: layer(nodes(), EDGES, attn_kwargs=cast(Any, 3))),
        (r"'attn_kwargs' without extra", lambda: layer(nodes(), EDGES, attn_kwargs={"return_graph": True})),
        (r"'model' to contain .*from_gps", lambda: replace_attention(gps())),
    ]
    for message, call in calls:
        with pytest.raises((TypeError, ValueError), match=f"^Expected {message}"):
            call()
