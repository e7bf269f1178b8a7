"""torch-sparse: ``SparseTensor`` in and out of graphs and layers, equal to every other form, and what happens without the package."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.typing
from problems import GRAPHS, dense_mask, random_graph
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GATConv, Sequential, TransformerConv
from torch_geometric.typing import SparseTensor

from sbm_pyg import AttentionConv, AttentionGraph, SBMAttentionConv, ops, replace_attention, restore_attention

needs_torch_sparse = pytest.mark.skipif(
    not torch_geometric.typing.WITH_TORCH_SPARSE, reason="torch-sparse is not installed"
)
BETA = ["ignore:Sparse CS[RC] tensor support is in beta:UserWarning", "ignore:Sparse invariant checks:UserWarning"]
pytestmark = [pytest.mark.torch_sparse, *(pytest.mark.filterwarnings(text) for text in BETA)]

FORMS: dict[str, Callable[[AttentionGraph], Any]] = {
    "graph": lambda graph: graph,
    "edge_index": lambda graph: graph.edge_index[:, torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(0))],
    "EdgeIndex": lambda graph: graph.to_edge_index(0), "torch coo": lambda graph: graph.to_dense()[0].float().to_sparse_coo(),
    "torch csr": lambda graph: graph.to_dense()[0].float().to_sparse_csr(),
    "torch csc": lambda graph: graph.to_dense()[0].float().to_sparse_csc(), "SparseTensor": lambda graph: graph.to_sparse_tensor(),
    "SparseTensor with values": lambda graph: graph.to_sparse_tensor(value=torch.rand(graph.num_edges)),
}  # fmt: skip
NAMES = [pytest.param(name, marks=[needs_torch_sparse] if "SparseTensor" in name else []) for name in FORMS]
SHAPES = {"square": (30, 30), "bipartite": (20, 33), "no edges": (5, 7)}


def shared_graph(shape: str) -> AttentionGraph:
    return random_graph(1, *SHAPES[shape], density=0.0 if shape == "no edges" else 0.3, seed=4)


def step(conv: SBMAttentionConv, adjacency: Any, queries: Tensor, keys: Tensor, **options: Any) -> list[Tensor]:
    """Output and every gradient, of tokens and of parameters."""
    queries, keys = (tokens.detach().clone().requires_grad_() for tokens in (queries, keys))
    conv.zero_grad()
    out = conv((keys, queries), adjacency, seed=3, **options)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    grads = [parameter.grad for name, parameter in conv.named_parameters()]
    assert queries.grad is not None
    assert keys.grad is not None
    return [out.detach(), queries.grad, keys.grad, *(grad.clone() for grad in grads if grad is not None)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("normalizer", ["softmax", "entmax15"])
def test_every_adjacency_gives_the_same_output_and_gradients(
    name: str, shape: str, fuse: bool, normalizer: str
) -> None:
    torch.manual_seed(0)
    graph = shared_graph(shape)
    queries, keys = (torch.randn(count, 6, dtype=torch.float64) for count in (graph.num_queries, graph.num_keys))
    conv = AttentionConv(6, 4, heads=2, normalizer=normalizer, dropout=0.2).double()
    conv.fuse = fuse
    wanted = step(conv, graph, queries, keys)
    found = step(conv, FORMS[name](graph), queries, keys)
    assert len(found) == 9  # output, two kinds of tokens, three weights, three biases
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    dense = torch.nn.functional.scaled_dot_product_attention  # and a peer that has no graph, without dropout
    if normalizer == "softmax" and shape != "no edges":
        conv.eval()
        query, key, value = (
            lin(tokens).view(-1, 2, 4).transpose(0, 1)
            for lin, tokens in ((conv.lin_query, queries), (conv.lin_key, keys), (conv.lin_value, keys))
        )
        masked = dense(query, key, value, attn_mask=graph.to_dense()).transpose(0, 1).flatten(1)
        torch.testing.assert_close(conv((keys, queries), FORMS[name](graph)), masked.nan_to_num(0))


@needs_torch_sparse
@pytest.mark.parametrize("name", GRAPHS)
def test_round_trip_of_every_head(name: str) -> None:
    graph = GRAPHS[name]
    value = torch.rand(graph.num_edges, 2)
    for head in range(graph.heads):
        adjacency = graph.to_sparse_tensor(head, value)
        assert adjacency.sparse_sizes() == (graph.num_queries, graph.num_keys)
        row, col, held = adjacency.coo()
        mine = graph.edge_head == head
        assert torch.equal(torch.stack([col, row]), graph.edge_index[:, mine])
        assert torch.equal(held, value[mine])
        assert graph.to_sparse_tensor(head).storage.value() is None
        assert torch.equal(graph.to_sparse_tensor(head).to_dense().bool(), dense_mask(graph)[head])
        assert AttentionGraph.from_edge_index(
            adjacency, query_ptr=graph.query_ptr, key_ptr=graph.key_ptr
        ) == graph.head(head)


@needs_torch_sparse
def test_unsorted_and_repeated_entries_count_once() -> None:
    row, col = torch.tensor([2, 0, 2, 1, 2]), torch.tensor([1, 3, 1, 0, 0])
    adjacency = SparseTensor(row=row, col=col, sparse_sizes=(3, 4))
    graph = AttentionGraph.from_edge_index(adjacency)
    assert graph.edge_index.tolist() == [[3, 0, 0, 1], [0, 1, 2, 2]]
    assert (graph.num_queries, graph.num_keys) == (3, 4)


@needs_torch_sparse
def test_gradients_reach_the_values() -> None:
    """Attention by hand: softmax of edge scores as the values of a ``SparseTensor``, times the tokens' values."""
    torch.manual_seed(0)
    graph = random_graph(2, 12, 15, 0.4, seed=1)
    query, key, value = (torch.randn(2, count, 5, dtype=torch.float64, requires_grad=True) for count in (12, 15, 15))
    weights = torch_geometric.utils.softmax(ops.edge_dot(query, key, graph.rows), ptr=graph.rowptr)
    weights.retain_grad()
    by_hand = torch.stack([graph.to_sparse_tensor(head, weights) @ value[head] for head in range(2)])
    grad = torch.randn_like(by_hand)
    found = torch.autograd.grad(by_hand, [query, key, value, weights], grad, retain_graph=True)
    out, _ = ops.edge_attention(query, key, value, graph.rows)
    torch.testing.assert_close(by_hand, out)
    for one, other in zip(found, torch.autograd.grad(out, [query, key, value], grad), strict=False):
        torch.testing.assert_close(one, other)
    source, target = graph.edge_index
    torch.testing.assert_close(
        found[3], (grad[graph.edge_head, target] * value[graph.edge_head, source]).sum(1).detach()
    )


@needs_torch_sparse
@pytest.mark.parametrize("fuse", [True, False])
def test_attention_weights_come_back_as_values(fuse: bool) -> None:
    """As PyG's own attention layers do it, and differentiable."""
    torch.manual_seed(0)
    graph = shared_graph("square")
    adjacency, x = graph.to_sparse_tensor(), torch.randn(30, 6)
    conv = AttentionConv(6, 4, heads=2)
    conv.fuse = fuse
    out, weighted = conv(x, adjacency, return_attention_weights=True)
    _, peer = GATConv(6, 4, heads=2, add_self_loops=False)(x, adjacency, return_attention_weights=True)
    assert type(weighted) is type(peer) is SparseTensor
    assert weighted.sizes() == peer.sizes() == [30, 30, 2]
    edge_index = graph.edge_index
    expected, (_, alpha) = conv(x, edge_index, return_attention_weights=True)
    assert torch.equal(out, expected)
    torch.testing.assert_close(weighted.storage.value(), alpha)
    degree = graph.degree[0]
    torch.testing.assert_close(weighted.sum(dim=1), (degree > 0).float()[:, None].expand(-1, 2))
    (weighted.storage.value() ** 2).sum().backward()
    grad = conv.lin_query.weight.grad
    assert grad is not None
    assert grad.abs().sum() > 0


@needs_torch_sparse
def test_it_goes_to_the_other_forms() -> None:
    graph = shared_graph("bipartite")
    assert isinstance(graph.to_edge_index(0), EdgeIndex)
    row, col, _ = graph.to_sparse_tensor().coo()
    assert torch.equal(torch.stack([col, row]), graph.to_edge_index(0).as_tensor())


@needs_torch_sparse
@pytest.mark.parametrize("value", [torch.ones(()), torch.ones(3)])
def test_values_must_be_those_of_all_edges(value: Tensor) -> None:
    graph = shared_graph("square")
    with pytest.raises(
        ValueError, match=re.escape(f"Expected 'value' to be [{graph.num_edges}, ...] (got {list(value.shape)})")
    ):
        graph.to_sparse_tensor(value=value)


def test_without_the_package_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SPARSE", False)
    with pytest.raises(ImportError, match=re.escape("Expected 'torch-sparse' to be installed")):
        shared_graph("square").to_sparse_tensor()


@needs_torch_sparse
@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib':UserWarning")
def test_neighbors_that_a_loader_samples_have_their_features() -> None:
    torch.manual_seed(0)
    data = Data(torch.randn(60, 5), torch.randint(0, 60, (2, 400)), torch.randn(400, 3))
    call = "x, edge_index, edge_attr"
    layers = [(TransformerConv(5 if not n else 8, 4, heads=2, edge_dim=3), f"{call} -> x") for n in range(2)]
    model = Sequential(call, layers)
    loader = NeighborLoader(data, num_neighbors=[4, 3], batch_size=10)
    batches = [(batch.x, batch.edge_index, batch.edge_attr) for batch in loader]
    assert len(batches) == 6
    assert all(x.size(0) < 60 and edges.size(1) < 400 for x, edges, _ in batches)
    expected = [model(*batch) for batch in batches]
    assert len(replace_attention(model)) == 2
    torch.testing.assert_close([model(*batch) for batch in batches], expected)
    restore_attention(model)
    assert type(model[0]) is TransformerConv
