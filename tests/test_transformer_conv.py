"""Attention over given edges with features: the kernels against plain torch, and the layer against PyG's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from problems import refuses
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import EdgeIndex
from torch_geometric.data import HeteroData
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from torch_geometric.nn import GPSConv, HeteroConv, to_hetero
from torch_geometric.nn import TransformerConv as PyGTransformerConv

from sbm_pyg import SparseGPSConv, TransformerConv, replace_attention, restore_attention
from sbm_pyg.layers.edge_features import rows_of
from sbm_pyg.ops import schemas
from sbm_pyg.ops.reference import graph_attention as reference

OPTIONS = ("beta", "root_weight", "concat", "bias")


def edges(sources: int = 11, targets: int = 9, count: int = 40, seed: int = 0) -> Tensor:
    """Unsorted edges, some of them repeated; the last target has none."""
    random = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(end, (count,), generator=random) for end in (sources, targets - 1)])


def problem(
    heads: int, channels: int, values: int, depth: int | None, dtype: torch.dtype, biased: bool, dropped: bool
) -> tuple[Any, ...]:
    """Inputs of the op, over 13 queries and 17 keys."""
    random = torch.Generator().manual_seed(channels)
    given = edges(17, 13, 60)
    rowptr, order = schemas.sort_edges(given[1], 13)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64).to(dtype).requires_grad_()

    query, key, value = normal(13, heads, channels), normal(17, heads, channels), normal(17, heads, values)
    of_edges = (None, None) if depth is None else (normal(13, heads, depth), normal(60, depth))
    bias = normal(60, heads) if biased else None
    if bias is not None:  # -inf forbids an edge; all edges of one query, in one head
        bias.data[::7], bias.data[rowptr[3] : rowptr[4], 0] = -torch.inf, -torch.inf
    keep = (torch.rand(60, heads, generator=random) < 0.7).to(dtype) / 0.7 if dropped else None
    return query, key, value, *of_edges, bias, keep, rowptr, given[0][order], 0.4


# ------------------------------------------------------------------ the op


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("heads", "channels", "values", "depth", "dtype"),  # each a set of kernels, which takes seconds to compile
    [(1, 5, 5, None, torch.float64), (3, 20, 48, 3, torch.float64), (4, 32, 16, 32, torch.float32)],
)
def test_the_kernel_and_its_gradient_are_those_of_plain_torch(
    heads: int, channels: int, values: int, depth: int | None, dtype: torch.dtype, biased: bool, dropped: bool
) -> None:
    inputs = problem(heads, channels, values, depth, dtype, biased, dropped)
    leaves = [x for x in inputs[:6] if x is not None]
    outputs, gradients = [], []
    for op in (schemas.graph_attention, reference.graph_attention):
        out = op(*inputs)
        outputs.append(out)
        gradients.append(torch.autograd.grad(torch.cat([(x.sin() * (x + 2)).flatten() for x in out]).sum(), leaves))
    bound = 1e-10 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(outputs[0], outputs[1], rtol=bound, atol=bound)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=bound, atol=bound)  # of autograd in plain torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_of_any_strides_goes_through_float32(dtype: torch.dtype) -> None:
    """So results are those of the same numbers in float32, rounded. Keys may be int32."""
    inputs = problem(2, 5, 3, 4, dtype, True, True)
    wide: list[Any] = [x.detach().float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    results = []
    half: list[Any] = [torch.stack([x.detach(), x.detach() + 1], -1)[..., 0] for x in (*inputs[:8], inputs[8].int())]
    assert not any(x.is_contiguous() for x in half)
    for sides in ([*half, 0.4], wide):
        leaves = [x.detach().requires_grad_() for x in sides[:6]]
        out, mean, weight = schemas.graph_attention(*leaves, *sides[6:])
        loss = out.float().square().sum() + mean.float().square().sum() + weight.square().sum()
        results.append([out, mean, weight, *torch.autograd.grad(loss, leaves)])
    assert results[0][2].dtype == torch.float32
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-5, atol=1e-6)
    bound = 0.02 if dtype == torch.bfloat16 else 0.003
    for rounded, single in zip(*results, strict=True):
        assert rounded.dtype == dtype or rounded is results[0][2]
        torch.testing.assert_close(rounded.float(), single, rtol=bound, atol=bound)


@pytest.mark.parametrize("depth", [None, 3])
def test_the_gradient_in_plain_torch_is_that_of_autograd(depth: int | None) -> None:
    inputs = problem(2, 4, 6, depth, torch.float64, True, True)
    out, mean, weight = reference.graph_attention(*inputs)
    grads = out.detach().cos(), mean.detach().cos() if depth else None, weight.detach().cos()
    leaves = [x for x in inputs[:6] if x is not None]
    outputs = [(x, grad) for x, grad in zip((out, mean, weight), grads, strict=True) if grad is not None]
    expected = torch.autograd.grad([x for x, _ in outputs], leaves, [grad for _, grad in outputs])
    query, key, value, edge_query, feature, _, keep, *rows, scale = inputs
    arguments = (*grads, query, key, value, edge_query, feature, keep, *rows, weight, scale, depth is not None)
    with torch.no_grad():
        gradients = reference.graph_attention_backward(*arguments)
    needed = [grad for grad, x in zip(gradients, inputs[:6], strict=True) if x is not None]
    torch.testing.assert_close(needed, [*expected], rtol=1e-10, atol=1e-12)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    random, before, results = torch.Generator().manual_seed(0), torch.get_num_threads(), []
    given = torch.randint(500, (2, 20_000), generator=random)
    x, feature = torch.randn(500, 64, generator=random), torch.randn(20_000, 8, generator=random)
    conv = TransformerConv(64, 16, 4, edge_dim=8)
    query, key, value = (lin(x).view(-1, 4, 16).detach() for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
    rowptr, order = schemas.sort_edges(given[1], 500)
    sides = [y.requires_grad_() for y in (query, key, value, query[..., :8].clone().detach(), feature[order])]
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            out, mean, _ = schemas.graph_attention(*sides, None, None, rowptr, given[0][order], 0.25)
            results.append([out, mean, *torch.autograd.grad(out.sin().sum() + mean.sin().sum(), sides)])
    finally:
        torch.set_num_threads(before)
    for one, two, four in zip(*results, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, four)


@pytest.mark.parametrize("kernel", [schemas.sort_edges, reference.sort_edges])
def test_edges_are_sorted_stably(kernel: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> None:
    rowptr, order = kernel(torch.tensor([3, 0, 3, 1, 0]), 5)
    assert rowptr.tolist() == [0, 2, 3, 3, 5, 5]
    assert order.tolist() == [1, 4, 3, 0, 2]
    assert [x.tolist() for x in kernel(torch.empty(0, dtype=torch.int64), 2)] == [[0, 0, 0], []]


# ------------------------------------------------------------------ the layer against PyG's


def pair(in_channels: Any, depth: int | None, **options: Any) -> tuple[PyGTransformerConv, TransformerConv]:
    torch.manual_seed(0)
    pyg = PyGTransformerConv(in_channels, 5, 3, edge_dim=depth, **options).double()
    ours = TransformerConv(in_channels, 5, 3, edge_dim=depth, **options).double()
    ours.load_state_dict(pyg.state_dict())
    return pyg, ours


def results(conv: Any, x: Any, edge_index: Any, edge_attr: Tensor | None) -> list[Tensor]:
    """Output, weights and all gradients of a call with a seed."""
    torch.manual_seed(3)
    out, (_, alpha) = conv(x, edge_index, edge_attr, return_attention_weights=True)
    nodes = x if isinstance(x, tuple) else (x,)
    leaves = [y for y in (*nodes, edge_attr, *conv.parameters()) if y is not None and y.requires_grad]
    grads = torch.autograd.grad(out.sin().sum() + alpha.cos().sum(), leaves, allow_unused=True)
    return [out, alpha, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("depth", [None, 1, 5])
@pytest.mark.parametrize("bipartite", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_it_computes_what_the_layer_of_pyg_does(depth: int | None, bipartite: bool, dropout: float) -> None:
    random = torch.Generator().manual_seed(1)
    x, other = (torch.randn(n, c, generator=random, dtype=torch.float64) for n, c in ((11, 6), (9, 7)))
    nodes = (x.requires_grad_(), other.requires_grad_()) if bipartite else x[:9].detach().requires_grad_()
    feature = None if depth is None else torch.randn(40, depth, generator=random, dtype=torch.float64).requires_grad_()
    every = [*itertools.product((False, True), repeat=4)]
    for values in every if depth == 5 and dropout else (every[0], every[-1]):
        options = dict(zip(OPTIONS, values, strict=True))
        both = pair((6, 7) if bipartite else 6, depth, dropout=dropout, **options)
        given = edges(11 if bipartite else 9)
        expected, out = (results(conv, nodes, given, feature) for conv in both)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
        assert both[0].state_dict().keys() == both[1].state_dict().keys()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("form", ["sorted", "by source", "by target", "int32", "csr", "values"])
def test_every_form_of_edges_is_taken(form: str) -> None:
    pyg, ours = pair(6, 2)
    random = torch.Generator().manual_seed(1)
    x, feature = (torch.randn(n, c, generator=random, dtype=torch.float64) for n, c in ((9, 6), (40, 2)))
    given = edges(9)
    if form in ("csr", "values"):  # which cannot repeat edges
        given = torch.unique(given.flip(0), dim=1).flip(0)
        feature = feature[: given.size(1)]
    expected = pyg(x, given, feature)
    if form == "sorted":
        order = given[1].argsort(stable=True)
        given, feature = given[:, order], feature[order]
        assert rows_of(given, 9, 9)[2] is None
    elif form.startswith("by"):
        given, order = EdgeIndex(given, sparse_size=(9, 9)).sort_by("row" if form == "by source" else "col")
        feature = feature[order]
        assert (rows_of(given, 9, 9)[2] is None) == (form == "by target")
    elif form == "int32":
        given = given.int()
    elif form == "csr":
        matrix = torch.zeros(9, 9)
        matrix[given[1], given[0]] = 1
        given = matrix.to_sparse_csr()
    else:
        given = torch.sparse_coo_tensor(given.flip(0), feature, (9, 9, 2), check_invariants=True).coalesce()
    call = (x, given) if form == "values" else (x, given, feature)
    torch.testing.assert_close(ours(*call), expected, rtol=1e-10, atol=1e-12)


def test_graphs_without_edges_or_nodes() -> None:
    pyg, ours = pair(6, 2)
    for nodes in (3, 0):
        call = torch.randn(nodes, 6).double(), torch.empty(2, 0, dtype=torch.int64), torch.empty(0, 2).double()
        torch.testing.assert_close(ours(*call), pyg(*call))


def test_a_changed_edge_index_is_sorted_again() -> None:
    pyg, ours = pair(6, None)
    x, given = torch.randn(9, 6).double(), edges(9)
    first = ours(x, given)
    assert rows_of(given, 9, 9)[0] is rows_of(given, 9, 9)[0]
    given[1] = given[1].flip(0)
    torch.testing.assert_close(ours(x, given), pyg(x, given), rtol=1e-10, atol=1e-12)
    assert not torch.equal(ours(x, given), first)


class Largest(TorchDispatchMode):
    """Notes the most numbers that a result of any operation has."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            self.numbers = max(self.numbers, x.numel() if isinstance(x, Tensor) else 0)
        return out


def test_no_tensor_has_a_number_for_each_edge_and_channel() -> None:
    counts = []
    for kind in (PyGTransformerConv, TransformerConv):
        conv, x = kind(8, 16, 4, edge_dim=16), torch.randn(20, 8, requires_grad=True)
        given, feature = torch.randint(20, (2, 3000)), torch.randn(3000, 16, requires_grad=True)
        with Largest() as largest:
            conv(x, given, feature).sum().backward()
        counts.append(largest.numbers)
    assert counts == [3000 * 4 * 16, 3000 * 16]


def test_equal_messages_leave_queries_without_gradients_in_bfloat16() -> None:
    """PyG's softmax rounds the weights, so they do not add up to one, and queries get what is missing."""
    torch.manual_seed(0)
    largest = []
    for kind in (PyGTransformerConv, TransformerConv):
        conv = kind(32, 32, 4, edge_dim=8, root_weight=False).bfloat16()
        x, given = torch.randn(32).bfloat16().expand(50, 32), torch.randint(50, (2, 3000))
        queries: list[Tensor] = []
        conv.lin_query.register_forward_hook(lambda module, inputs, out, queries=queries: queries.append(out))
        out = conv(x, given, torch.ones(3000, 8).bfloat16())
        largest.append(float(torch.autograd.grad((out * 100).sum(), queries)[0].abs().max()))
    assert largest[1] < 1e-3 < 0.1 < largest[0]


def test_what_does_not_fit_is_refused() -> None:
    conv, x, feature = TransformerConv(6, 5, 3, edge_dim=2), torch.randn(9, 6), torch.randn(40, 2)
    given, make = edges(9), cast(Any, TransformerConv)
    refuses(lambda: conv(x, given + 5, feature), "Expected 'edge_index[0]' in 0..8")
    refuses(lambda: conv(x, given - 1, feature), "Expected 'edge_index[0]' in 0..8")
    refuses(lambda: conv(x, given[:1], feature), "Expected 'edge_index' to be [2, E]")
    refuses(lambda: conv(x, given), "Expected 'edge_attr' to be a tensor", TypeError)
    refuses(lambda: conv(x, given, feature[1:]), "Expected 'edge_attr' to be [E, D]")
    refuses(lambda: conv(x, given, feature[:, :1]), "Expected 'edge_attr' to be [E, D]")
    refuses(lambda: conv(x, given, feature.long()), "Expected 'edge_attr' to be a floating tensor", TypeError)
    refuses(lambda: conv(x.double(), given, feature), "Expected 'x' to be torch.float32", TypeError)
    refuses(lambda: conv((x, x[:, 1:]), given, feature), "Expected 'x' to be [N, 6]")
    refuses(lambda: make(6, 0.5), "Expected 'out_channels' to be an int", TypeError)
    refuses(lambda: make(6, 5, edge_dim="2"), "Expected 'edge_dim' to be an int", TypeError)
    refuses(lambda: make(6, 5, beta=1), "Expected 'beta' to be a bool", TypeError)
    refuses(lambda: TransformerConv.from_pyg(nn.Linear(2, 2)), "Expected 'conv' to be", TypeError)


# ------------------------------------------------------------------ what PyG does with layers


def test_explainers_see_the_messages_of_pyg() -> None:
    x, given, masks = torch.randn(9, 6).double(), edges(9), []
    both = pair(6, None, concat=False)
    for conv in both:
        for algorithm in (AttentionExplainer(), GNNExplainer(epochs=3)):
            torch.manual_seed(0)
            explainer = Explainer(
                conv, algorithm, explanation_type="model", edge_mask_type="object",
                node_mask_type=None if isinstance(algorithm, AttentionExplainer) else "attributes",
                model_config={"mode": "regression", "task_level": "node", "return_type": "raw"},
            )  # fmt: skip
            masks.append(explainer(x, given).edge_mask)
    torch.testing.assert_close(masks[:2], masks[2:])
    assert masks[0].unique().numel() > 5
    torch.testing.assert_close(both[1](x, given), both[0](x, given))  # and afterwards it is fast again


@pytest.mark.parametrize("options", [{"aggr": "max"}, {"flow": "target_to_source"}, {"decomposed_layers": 5}])
def test_unusual_options_run_the_code_of_pyg(options: dict[str, Any]) -> None:
    pyg, ours = pair(6, None, **options)
    x, given = torch.randn(9, 6).double(), edges(9)
    torch.testing.assert_close(ours(x, given), pyg(x, given))


def test_hooks_see_messages_and_projections_of_features() -> None:
    _, conv = pair(6, 2)
    x, given, feature, seen = torch.randn(9, 6).double(), edges(9), torch.randn(40, 2).double(), []
    expected = conv(x, given, feature)
    for register in (conv.register_message_forward_hook, conv.lin_edge.register_forward_hook):
        handle = register(lambda layer, inputs, out: seen.append(out.shape))
        torch.testing.assert_close(conv(x, given, feature), expected)
        handle.remove()
    torch.testing.assert_close(conv(x, given, feature), expected)
    assert seen == [(40, 3, 5), (40, 15)]


def test_widths_are_inferred() -> None:
    conv = TransformerConv(-1, 5, 3, edge_dim=-1)
    x, given, feature = torch.randn(9, 6), edges(9), torch.randn(40, 2)
    torch.testing.assert_close(conv(x, given, feature), conv(x, given, feature))
    assert conv.lin_edge.weight.shape == (15, 2)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [None, 2])
def test_it_compiles_as_one_graph(depth: int | None) -> None:
    _, conv = pair(6, depth)
    x, given = torch.randn(9, 6).double().requires_grad_(), edges(9)
    feature = None if depth is None else torch.randn(40, depth).double()
    compiled = torch.compile(conv, fullgraph=True)
    expected, out = conv(x, given, feature), compiled(x, given, feature)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (expected, out)]
    torch.testing.assert_close(*grads)


class Net(nn.Module):
    """Two layers with edge features, the first of which has a name in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([PyGTransformerConv(6, 4, 2, edge_dim=2), PyGTransformerConv(8, 3, edge_dim=2)])

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index, edge_attr).relu()
        return x


def test_layers_of_a_model_are_replaced_and_restored() -> None:
    torch.manual_seed(0)
    model, call = Net(), (torch.randn(9, 6), edges(9), torch.randn(40, 2))
    expected, state, parameters = model(*call), copy.deepcopy(model.state_dict()), [*model.parameters()]
    assert replace_attention(model) == ["convs.0", "convs.1"]
    assert all(type(conv) is TransformerConv for conv in model.convs)
    torch.testing.assert_close(model(*call), expected)
    convs = [*model.convs]
    assert replace_attention(model) == ["convs.0", "convs.1"]  # again: they stay
    assert all(x is y for x, y in zip(model.convs, convs, strict=True))
    assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))  # an optimizer goes on
    model.load_state_dict(state)
    torch.testing.assert_close(copy.deepcopy(model)(*call), expected)
    assert restore_attention(model) == ["convs.0", "convs.1"]
    assert all(type(conv) is PyGTransformerConv for conv in model.convs)
    torch.testing.assert_close(model(*call), expected)


def test_models_whose_edges_are_given_take_no_options() -> None:
    refuses(lambda: replace_attention(Net(), num_clusters=4), "Expected 'options' with layers that take a", TypeError)
    refuses(lambda: replace_attention(PyGTransformerConv(6, 4)), "a layer itself")
    refuses(lambda: restore_attention(TransformerConv(6, 4)), "a layer itself")


def test_both_kinds_of_layers_of_a_graph_transformer_are_replaced() -> None:
    torch.manual_seed(0)
    gps = GPSConv(8, PyGTransformerConv(8, 4, 2, edge_dim=2), heads=2)
    model, batch = nn.ModuleList([gps]).eval(), torch.tensor([0] * 4 + [1] * 5)
    call = (torch.randn(9, 8), torch.randint(4, (2, 10)), batch)
    feature = torch.randn(10, 2)
    expected = gps(*call, edge_attr=feature)
    assert replace_attention(model, source="full") == ["0", "0.conv"]
    assert isinstance(model[0], SparseGPSConv)
    assert type(model[0].conv) is TransformerConv
    torch.testing.assert_close(model[0](*call, edge_attr=feature), expected, rtol=1e-4, atol=1e-5)
    assert restore_attention(model) == ["0", "0.conv"]
    assert type(model[0].conv) is PyGTransformerConv
    torch.testing.assert_close(model[0](*call, edge_attr=feature), expected, rtol=1e-4, atol=1e-5)


def test_models_of_several_types_of_edges() -> None:
    torch.manual_seed(0)
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(9, 6), torch.randn(11, 6)
    data["author", "writes", "paper"].edge_index = edges()
    data["paper", "cites", "paper"].edge_index = edges(9)
    data["paper", "names", "author"].edge_index = edges(9, 11)
    convs = {kind: PyGTransformerConv((6, 6), 4, 2) for kind in data.edge_types}
    model = HeteroConv(convs)
    expected = model(data.x_dict, data.edge_index_dict)
    assert len(replace_attention(model)) == 3
    torch.testing.assert_close(model(data.x_dict, data.edge_index_dict), expected)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = TransformerConv((-1, -1), 4)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index)

    out = to_hetero(Plain(), data.metadata())(data.x_dict, data.edge_index_dict)
    assert out["paper"].shape == (9, 4)
