"""At home in PyTorch Geometric: adjacencies, containers, explainers, batches and copies, as any of its own layers."""

from __future__ import annotations

import copy
import pickle
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex, seed_everything
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GPSConv, Sequential, summary, to_hetero
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.testing import assert_module
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csc_tensor, to_torch_csr_tensor

from sbm_pyg import (
    AttentionConv,
    AttentionGraph,
    SBMAttentionConv,
    SBMHead,
    SBMSource,
    SequenceEncoder,
    SourceGraph,
    Tokens,
    make_attention,
    sample_edges,
)
from sbm_pyg.sources import patterns

PTR = torch.tensor([0, 10, 17, 30])


def layer(in_channels: int | tuple[int, int] = 16, **options: Any) -> AttentionConv:
    torch.manual_seed(0)
    return make_attention("sbm", in_channels, 8, 2, num_clusters=4, **options).double()


def tokens(n: int = 30, channels: int = 16, seed: int = 1) -> Tensor:
    return torch.randn(n, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def edges(keys: int = 30, queries: int = 30, count: int = 100) -> Tensor:
    """Distinct edges in no order."""
    number = torch.randperm(keys * queries, generator=torch.Generator().manual_seed(0))[:count]
    return torch.stack([number % keys, number // keys])


# ------------------------------------------------------------------ adjacencies


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("fuse", [True, False])
def test_assert_module(fuse: bool) -> None:
    conv = layer()
    conv.fuse = fuse
    assert_module(conv, tokens(), edges(), expected_size=(30, 16))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_assert_module_of_a_bipartite_pair() -> None:
    conv = layer((12, 16))
    assert_module(conv, (tokens(20, 12), tokens(9)), edges(20, 9), expected_size=(9, 16))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_all_layouts_give_the_same() -> None:
    conv, x, edge_index = layer(), (tokens(20), tokens(9)), edges(20, 9)
    expected = conv(x, edge_index)
    transposed = edge_index.flip(0)  # rows are targets
    layouts = [
        EdgeIndex(edge_index, sparse_size=(20, 9)),
        *(
            convert(transposed, size=(9, 20))
            for convert in (to_torch_coo_tensor, to_torch_csr_tensor, to_torch_csc_tensor)
        ),
        AttentionGraph.from_edge_index(edge_index, 9, 20),
        edge_index[:, [*range(100), 3, 3, 5]],  # repeated edges count once
    ]
    for adjacency in layouts:
        torch.testing.assert_close(conv(x, adjacency), expected, rtol=1e-12, atol=1e-14)


def weights_by_hand(conv: SBMAttentionConv, x: Tensor, edge_index: Tensor) -> Tensor:
    """``[E, H]``, dense."""
    query, key = (lin(x).view(-1, 2, 8) for lin in (conv.lin_query, conv.lin_key))
    score = torch.einsum("nhc,mhc->hnm", query, key) / 8**0.5
    mask = torch.zeros(30, 30, dtype=torch.bool).index_put((edge_index[1], edge_index[0]), torch.tensor(True))
    return score.masked_fill(~mask, -torch.inf).softmax(-1)[:, edge_index[1], edge_index[0]].T


@pytest.mark.parametrize("fuse", [True, False])
def test_attention_weights_come_in_the_order_of_the_edges(fuse: bool) -> None:
    conv, x, edge_index = layer(), tokens(), edges()
    conv.fuse = fuse
    out, (index, alpha) = conv(x, edge_index, return_attention_weights=True)
    assert index is edge_index
    torch.testing.assert_close(alpha, weights_by_hand(conv, x, edge_index))
    value = conv.lin_value(x).view(30, 2, 8)
    again = torch.zeros(30, 2, 8, dtype=torch.float64).index_add(0, index[1], alpha[..., None] * value[index[0]])
    torch.testing.assert_close(again.flatten(1), out)
    twice = conv(x, edge_index.repeat(1, 2), return_attention_weights=True)[1][1]
    torch.testing.assert_close(twice, alpha.repeat(2, 1))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("convert", [to_torch_coo_tensor, to_torch_csr_tensor, to_torch_csc_tensor])
def test_attention_weights_are_the_values_of_a_sparse_adjacency(convert: Any) -> None:
    conv, x, edge_index = layer(), tokens(), edges()
    adjacency = convert(edge_index.flip(0), size=(30, 30))
    _, (weighted, alpha) = conv(x, adjacency, return_attention_weights=True)
    assert weighted.layout == adjacency.layout
    assert weighted.shape == (30, 30, 2)
    assert alpha.shape == (100, 2)
    dense = torch.zeros(30, 30, 2, dtype=torch.float64)
    dense[edge_index[1], edge_index[0]] = weights_by_hand(conv, x, edge_index)
    indices = weighted if convert is to_torch_coo_tensor else adjacency.to_sparse_coo().coalesce()
    if convert is not to_torch_csc_tensor:
        row, column = indices.indices()
        torch.testing.assert_close(dense[row, column], weighted.values())
    else:
        column = torch.repeat_interleave(weighted.ccol_indices().diff())
        torch.testing.assert_close(dense[weighted.row_indices(), column], weighted.values())


@pytest.mark.parametrize("fuse", [True, False])
def test_edges_of_each_head_as_pyg_writes_them(fuse: bool) -> None:
    conv, x = layer(), tokens()
    conv.fuse = fuse
    expected, graph, (_, alpha) = conv(x, ptr=PTR, seed=1, return_graph=True, return_attention_weights=True)
    order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(3))
    index, head = graph.edge_index[:, order], graph.edge_head[order]
    out, used, (same, shuffled) = conv(
        x, index, edge_head=head, ptr=PTR, return_graph=True, return_attention_weights=True
    )
    assert used == graph
    assert same is index
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(shuffled, alpha[order], rtol=1e-12, atol=1e-14)
    assert torch.equal(graph.find(index, head), order)
    with pytest.raises(
        ValueError, match=r"Expected 'edge_head' with an 'edge_index' tensor alone \(got it with AttentionGraph\)"
    ):
        conv(x, graph, edge_head=head)
    with pytest.raises(ValueError, match=r"Expected 'edge_head' in 0..1 \(got 0 to 2\)"):
        conv(x, index, edge_head=head.clone().fill_(2).index_fill_(0, torch.tensor([0]), 0))


# ------------------------------------------------------------------ parameters and copies


@pytest.mark.parametrize("in_channels", [-1, (-1, -1), (-1, 16)])
def test_sizes_are_inferred(in_channels: Any) -> None:
    lazy = SBMAttentionConv(in_channels, 8, heads=2, num_clusters=4)
    lazy.reset_parameters()
    untouched, unpickled = copy.deepcopy(lazy), pickle.loads(pickle.dumps(lazy))
    x = tokens().float() if in_channels == -1 else (tokens(20, 12).float(), tokens().float())
    graph = edges() if in_channels == -1 else edges(20, 30)
    out = lazy(x, graph)
    assert lazy.lin_query.weight.shape == (16, 16)
    assert lazy.lin_key.in_channels == (16 if in_channels == -1 else 12)
    for clone in (untouched, unpickled):
        assert clone(x, graph).shape == out.shape
        clone.load_state_dict(lazy.state_dict())
        assert torch.equal(clone(x, graph), out)
    fresh = SBMAttentionConv(in_channels, 8, heads=2, num_clusters=4)
    fresh.load_state_dict(lazy.state_dict())  # into sizes not known yet
    assert torch.equal(fresh(x, graph), out)


def test_copies_state_and_repr() -> None:
    conv, x = layer(), tokens()
    out = conv(x, seed=1)
    other = SBMAttentionConv(16, 8, heads=2, num_clusters=4).double()
    other.load_state_dict(conv.state_dict())
    for clone in (other, copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert torch.equal(clone(x, seed=1), out)
    assert repr(conv) == "AttentionConv(16, 8, heads=2, source=SBMSource)"
    assert repr(layer((12, 16))) == "AttentionConv((12, 16), 8, heads=2, source=SBMSource)"
    before = {name: value.clone() for name, value in conv.state_dict().items()}
    conv.reset_parameters()
    assert [name for name, value in conv.state_dict().items() if torch.equal(value, before[name])] == []


def test_batch_vector_is_ptr() -> None:
    conv, x = layer(), tokens()
    batch = Batch.from_data_list([Data(num_nodes=n) for n in (10, 7, 13)])
    assert torch.equal(conv(x, batch=batch.batch, seed=1), conv(x, ptr=PTR, seed=1))


def test_seed_everything_fixes_everything() -> None:
    def everything() -> list[Tensor]:
        seed_everything(3)
        conv = SBMAttentionConv(16, 8, heads=2, num_clusters=4, dropout=0.2)
        out, graph = conv(tokens().float(), ptr=PTR, return_graph=True)
        model = SequenceEncoder(15, 16, attention_options={"num_clusters": 4, "dropout": 0.1})
        sbm = cast(Any, conv.source).head(Tokens(torch.randn(2, 30, 8), torch.randn(2, 30, 8)))
        return [
            out, graph.col, model(torch.randint(15, (30,)), PTR), sample_edges(sbm, clamp=True).col,
            patterns.random(30, 3).col,
        ]  # fmt: skip

    state = torch.get_rng_state()
    first, second = everything(), everything()
    torch.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ------------------------------------------------------------------ inside PyG's containers


def test_sequential() -> None:
    first, second = layer(), layer()
    model = Sequential("x, edge_index", [(first, "x, edge_index -> x"), nn.ReLU(), (second, "x, edge_index -> x")])
    x, edge_index = tokens(), edges()
    assert torch.equal(model(x, edge_index), second(first(x, edge_index).relu(), edge_index))
    sampling = Sequential(
        "x, ptr, seed", [(first, "x, ptr=ptr, seed=seed -> x"), (second, "x, ptr=ptr, seed=seed -> x")]
    )
    assert torch.equal(sampling(x, PTR, 5), second(first(x, ptr=PTR, seed=5), ptr=PTR, seed=5))


def test_gps_conv() -> None:
    """GPSConv hands its keyword arguments to the local layer, `ptr` among them; `batch` it keeps for its own dense attention."""
    conv, x, edge_index = layer(), tokens(), edges()
    model = GPSConv(16, conv, heads=2).double().eval()
    assert model(x, edge_index).shape == (30, 16)
    inside: list[tuple[Tensor, Tensor]] = []
    conv.register_forward_hook(lambda module, arguments, out: inside.append((arguments[0], out)))
    batch = torch.repeat_interleave(torch.arange(3), PTR.diff())
    model(x, None, batch=batch, ptr=PTR, seed=1)
    ((given, out),) = inside
    assert torch.equal(out, conv(given, ptr=PTR, seed=1))


class Net(BasicGNN):
    """A family of models as PyG builds its own."""

    supports_edge_weight = supports_edge_attr = False
    supports_norm_batch: bool

    def init_conv(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> SBMAttentionConv:
        return make_attention("sbm", in_channels, out_channels // 2, 2, num_clusters=4, **kwargs)


def test_basic_gnn() -> None:
    torch.manual_seed(0)
    model = Net(16, 32, num_layers=3, out_channels=6, norm="layer", jk="cat").double()
    out = model(tokens(), edges())
    assert out.shape == (30, 6)
    out.sum().backward()
    assert all(conv.lin_value.weight.grad.any() for conv in model.convs)


def test_to_hetero() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = AttentionConv((-1, -1), 8, heads=2)
            self.second = AttentionConv((-1, -1), 4, heads=2)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(10, 16), torch.randn(7, 12)
    data["author", "writes", "paper"].edge_index = edges(7, 10, 20)
    data["paper", "cited", "paper"].edge_index = edges(10, 10, 20)
    data["paper", "by", "author"].edge_index = edges(10, 7, 20)
    model = to_hetero(Two(), data.metadata(), aggr="sum")
    out = model(data.x_dict, data.edge_index_dict)
    assert {kind: x.shape for kind, x in out.items()} == {"paper": (10, 8), "author": (7, 8)}
    (conv,) = [child for name, child in model.first.items() if "by" in name]
    alone = conv((data["paper"].x, data["author"].x), data["paper", "by", "author"].edge_index)
    again = {
        "paper": model.first["author__writes__paper"](
            (data["author"].x, data["paper"].x), data["author", "writes", "paper"].edge_index
        )
    }
    again["paper"] = again["paper"] + model.first["paper__cited__paper"](
        data["paper"].x, data["paper", "cited", "paper"].edge_index
    )
    expected = model.second["paper__by__author"](
        (again["paper"].relu(), alone.relu()), data["paper", "by", "author"].edge_index
    )
    torch.testing.assert_close(out["author"], expected)


def test_summary() -> None:
    pytest.importorskip("tabulate", reason="torch_geometric.nn.summary needs tabulate")
    conv = layer()
    table = summary(conv, tokens(), edges(), leaf_module=None)
    for line in (
        "AttentionConv", "lin_query", "[30, 16], [2, 100]", f"{sum(p.numel() for p in conv.parameters()):,}",
    ):  # fmt: skip
        assert line in table


# ------------------------------------------------------------------ explainers


class Explained(nn.Module):
    """Two layers over the edges that are given; the second shares them between its heads."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = make_attention("sbm", 16, 8, 2, num_clusters=4, **options).double()
        self.second = AttentionConv(16, 2, heads=2).double()

    def forward(self, x: Tensor, edge_index: Tensor, edge_head: Tensor | None = None) -> Tensor:
        return self.second(self.first(x, edge_index, edge_head=edge_head).relu(), edge_index, edge_head=edge_head)


def explain(model: nn.Module, algorithm: Any, x: Tensor, edge_index: Tensor, **kwargs: Any) -> Any:
    masks = {
        "edge_mask_type": "object",
        "node_mask_type": None if isinstance(algorithm, AttentionExplainer) else "attributes",
    }
    config = {"mode": "regression", "task_level": "node", "return_type": "raw"}
    state = torch.get_rng_state()
    torch.manual_seed(0)
    explanation = Explainer(model=model, algorithm=algorithm, explanation_type="model", model_config=config, **masks)(
        x, edge_index, index=3, **kwargs
    )
    torch.set_rng_state(state)
    return explanation


@pytest.mark.parametrize("biased", [False, True])
def test_gnn_explainer(biased: bool) -> None:
    model = Explained(score_bias=(lambda query, key, graph: graph.edge_index.sum(0).double().sin()) if biased else None)
    x, edge_index = tokens(), edges()
    explanation = explain(model, GNNExplainer(epochs=3), x, edge_index)
    assert explanation.edge_mask.shape == (100,)
    near = edge_index[1] == 3
    assert explanation.edge_mask[near].ne(0).all()  # every edge into the query counts, and its mask moved
    assert explanation.edge_mask.eq(0).any()  # edges further than two steps away do not
    assert model.first.explain is None


def test_explainers_of_a_class_whose_base_was_made_before() -> None:
    """PyG compiles each class at its first instance; a subclass must not take what its base compiled for the original."""

    class Later(SBMAttentionConv):
        pass

    torch.manual_seed(0)
    SBMAttentionConv(8, 8)
    layer = Later(16, 3, heads=1).double()
    explanation = explain(layer, GNNExplainer(epochs=3), tokens(), edges())
    assert explanation.edge_mask.shape == (edges().size(1),)
    assert explanation.edge_mask.any()


def test_a_mask_of_an_explainer_is_over_the_edges_that_were_given() -> None:
    """One edge masked: the output is that of the weights with this edge's message left out."""
    conv, x, edge_index = layer(), tokens(), edges()
    _, (_, alpha) = conv(x, edge_index, return_attention_weights=True)
    value = conv.lin_value(x).view(30, 2, 8)
    mask = torch.ones(100, dtype=torch.float64)
    mask[17] = 0
    conv.explain, conv._edge_mask, conv._loop_mask, conv._apply_sigmoid = (
        True, mask, edge_index[0] != edge_index[1], False,
    )  # fmt: skip
    message = mask[:, None, None] * alpha[..., None] * value[edge_index[0]]
    expected = torch.zeros(30, 2, 8, dtype=torch.float64).index_add(0, edge_index[1], message)
    torch.testing.assert_close(conv(x, edge_index), expected.flatten(1))
    with pytest.raises(ValueError, match=r"without repeated edges to be explained \(got 200 edges, 100 distinct\)"):
        conv(x, edge_index.repeat(1, 2))


def test_attention_explainer() -> None:
    model, x, edge_index = Explained(), tokens(), edges()
    explanation = explain(model, AttentionExplainer(reduce="mean"), x, edge_index)
    hidden, (_, first) = model.first(x, edge_index, return_attention_weights=True)
    _, (_, second) = model.second(hidden.relu(), edge_index, return_attention_weights=True)
    expected = torch.stack([first.mean(1), second.mean(1)], 1).mean(1)
    seen = explanation.edge_mask != 0
    assert seen[edge_index[1] == 3].all()
    torch.testing.assert_close(explanation.edge_mask[seen], expected[seen].detach())
    assert not model.first._message_hooks


@pytest.mark.parametrize("algorithm", [GNNExplainer(epochs=3), AttentionExplainer()])
def test_explainers_of_a_graph_that_was_sampled(algorithm: Any) -> None:
    """The way out that the error names: sample first, explain over these edges and their heads."""
    model, x = Explained(), tokens()
    graph = model.first(x, seed=1, return_graph=True)[1]
    explanation = explain(model, algorithm, x, graph.edge_index, edge_head=graph.edge_head)
    assert explanation.edge_mask.shape == (graph.num_edges,)
    assert explanation.edge_mask[graph.edge_index[1] == 3].ne(0).all()
    if isinstance(algorithm, AttentionExplainer):
        hidden, (_, first) = model.first(x, graph, return_attention_weights=True)
        _, (_, second) = model.second(hidden.relu(), graph, return_attention_weights=True)
        seen = explanation.edge_mask != 0
        torch.testing.assert_close(explanation.edge_mask[seen], torch.maximum(first, second)[seen].detach())


@pytest.mark.parametrize("algorithm", [GNNExplainer(epochs=3), AttentionExplainer()])
def test_explainers_of_a_layer_that_samples_are_refused(algorithm: Any) -> None:
    """Their masks would be over edges that nothing attends to."""

    class Blind(nn.Module):
        def __init__(self, graph: AttentionGraph | None) -> None:
            super().__init__()
            self.conv, self.graph = layer(), graph

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, self.graph)

    for graph, got in ((None, "None, so the source would choose its own"), (patterns.window(30, 1), "AttentionGraph")):
        with pytest.raises(
            ValueError, match=rf"Expected 'edge_index' to be \[2, E\], the edges to explain \(got {got}\). Sample first"
        ):
            explain(Blind(graph), algorithm, tokens(), edges())
    blind, seen = layer(), layer()
    blind.explain = False  # the other way out: leave this layer out

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blind, self.seen = blind, seen

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.seen(self.blind(x, seed=1), edge_index)

    assert explain(Both(), algorithm, tokens(), edges()).edge_mask.shape == (100,)


# ------------------------------------------------------------------ batches of graphs


def parts() -> list[AttentionGraph]:
    """Graphs over sequences of 4, 7 and 5 tokens, two heads; the last has no edge in its second head."""
    graphs = [patterns.random(n, 2, heads=2, seed=n) for n in (4, 7)]
    last = torch.zeros(2, 5, 5)
    last[0, 1:, 2] = 1
    return [*graphs, AttentionGraph.from_dense(last)]


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_of_graphs_as_data(workers: int) -> None:
    """``to_data`` writes attributes that PyG increments; the layer takes the batch, per head, and it separates into its graphs."""
    graphs = parts()
    items = []
    for number, graph in enumerate(graphs):
        data = graph.to_data()
        data.x = tokens(graph.num_queries, seed=number)
        items.append(data)
    (batch,) = DataLoader(items, batch_size=3, num_workers=workers)
    assert batch.ptr.tolist() == [0, 4, 11, 16]
    joined = AttentionGraph.from_edge_index(
        batch.edge_index, 16, 16, edge_head=batch.edge_type, heads=2, query_ptr=batch.ptr
    )
    assert joined == AttentionGraph.concatenate(graphs)
    conv = layer()
    out, used = conv(batch.x, batch.edge_index, edge_head=batch.edge_type, ptr=batch.ptr, return_graph=True)
    assert used == joined
    for number, (item, graph) in enumerate(zip(batch.to_data_list(), graphs, strict=True)):
        assert (
            AttentionGraph.from_edge_index(item.edge_index, item.num_nodes, edge_head=item.edge_type, heads=2) == graph
        )
        alone = conv(item.x, graph)
        torch.testing.assert_close(out[batch.batch == number], alone, rtol=1e-12, atol=1e-14)


def test_loader_of_graphs_as_attributes() -> None:
    """PyG keeps objects that it does not know as a list; ``concatenate`` makes one graph of it, on whatever device the batch is."""
    graphs = parts()
    items = [Data(x=tokens(graph.num_queries), graph=graph) for graph in graphs]
    (batch,) = DataLoader(items, batch_size=3)
    assert AttentionGraph.concatenate(batch.graph) == AttentionGraph.concatenate(graphs)
    assert torch.equal(AttentionGraph.concatenate(batch.graph).query_ptr, batch.ptr)
    assert {graph.device.type for graph in batch.to("meta").graph} == {"meta"}
    assert [
        item.graph == graph for item, graph in zip(Batch.from_data_list(items).to_data_list(), graphs, strict=True)
    ] == [True] * 3


def test_loader_of_hetero_data_with_query_and_key_nodes() -> None:
    graphs = [
        AttentionGraph.from_dense(torch.rand(2, n, m, generator=torch.Generator().manual_seed(n)) < 0.4)
        for n, m in ((4, 6), (3, 2))
    ]
    items = []
    for graph in graphs:
        data = graph.to_hetero_data()
        data["query"].x, data["key"].x = tokens(graph.num_queries), tokens(graph.num_keys, 12)
        items.append(data)
    (batch,) = DataLoader(items, batch_size=2)
    store, ptr = batch["key", "to", "query"], (batch["key"].ptr, batch["query"].ptr)
    conv = layer((12, 16))
    x = (batch["key"].x, batch["query"].x)
    out, used = conv(x, store.edge_index, edge_head=store.edge_head, ptr=ptr, return_graph=True)
    assert used == AttentionGraph.concatenate(graphs)
    torch.testing.assert_close(out, conv(x, AttentionGraph.concatenate(graphs)), rtol=1e-12, atol=1e-14)


def test_a_graph_of_many_sequences_is_not_one_item() -> None:
    """A batch of batches would lose the inner offsets, which PyG overwrites: each sequence is an item."""
    graph = AttentionGraph.concatenate(parts())
    whole = graph.to_data()
    assert torch.equal(whole.ptr, graph.query_ptr)
    batch = Batch.from_data_list([graph.sequence(number).to_data() for number in range(3)])
    assert torch.equal(batch.ptr, graph.query_ptr)
    assert torch.equal(batch.batch, whole.batch)


def test_transform_loader_and_layer_in_a_row() -> None:
    """Features in a data set, a graph by the transform, a batch by the loader, attention over it per head."""
    transform = SourceGraph(SBMSource(SBMHead(8, heads=2, num_clusters=4)), heads=2, seed=3)
    items = [Data(x=tokens(n).float()) for n in (4, 7)]
    (batch,) = DataLoader([transform(item) for item in items], batch_size=2)
    conv = layer().float()
    out, graph = conv(batch.x, batch.edge_index, edge_head=batch.edge_type, batch=batch.batch, return_graph=True)
    assert out.shape == (11, 16)
    assert graph.num_edges == batch.num_edges
    assert graph.density.shape == (2, 2)
