"""The drop-in for torch's layer: equal to it on the full graph, blind to padding, and at home in torch's and Hugging Face's encoders."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
from problems import refuses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GPSConv
from torch_geometric.nn.aggr import SetTransformerAggregation

from sbm_pyg import (
    AttentionGraph,
    SBMMultiheadAttention,
    Sparsifier,
    analysis,
    pad,
    replace_attention,
    restore_attention,
    unpad,
)
from sbm_pyg.sources import patterns

PADDING = torch.arange(7) >= torch.tensor([[7], [5], [2]])
MASKS = [None, "shared", "per head", "floating"]


def torch_layer(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 2, **options).double()
    if layer.in_proj_bias is not None:
        nn.init.normal_(layer.in_proj_bias)
        nn.init.normal_(layer.out_proj.bias)
    return layer


def sampling_layer(**options: Any) -> SBMMultiheadAttention:
    torch.manual_seed(0)
    return SBMMultiheadAttention(16, 2, batch_first=True, num_clusters=4, dtype=torch.float64, **options)


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def forbidden_pairs(kind: str | None, batch: int, length: int, keys: int) -> Tensor | None:
    """A mask that leaves each query its first key."""
    if kind is None:
        return None
    shape = (batch * 2, length, keys) if kind == "per head" else (length, keys)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.3
    mask[..., 0] = False
    return torch.zeros(shape, dtype=torch.float64).masked_fill(mask, -torch.inf) if kind == "floating" else mask


def nested(x: Tensor, lengths: tuple[int, ...] = (7, 5, 2)) -> Tensor:
    return torch.nested.as_nested_tensor([row[:length] for row, length in zip(x, lengths, strict=True)])


# ------------------------------------------------------------------ torch's layer


@pytest.mark.parametrize(("batch_first", "mask", "average"), [*product([True, False], MASKS, [True, False])])
def test_self_attention_equals_torch(batch_first: bool, mask: str | None, average: bool) -> None:
    theirs = torch_layer(batch_first=batch_first)
    ours = SBMMultiheadAttention.from_torch(theirs, source=None)
    x = draw(3, 7, 16) if batch_first else draw(3, 7, 16).transpose(0, 1)
    arguments: dict[str, Any] = {"attn_mask": forbidden_pairs(mask, 3, 7, 7), "average_attn_weights": average}
    padding = torch.zeros(3, 7, dtype=torch.float64).masked_fill(PADDING, -torch.inf) if mask == "floating" else PADDING
    results = []
    for layer in (theirs, ours):
        leaf = x.clone().requires_grad_()
        out, weights = layer(leaf, leaf, leaf, key_padding_mask=padding, **arguments)
        out, weights = out if batch_first else out.transpose(0, 1), weights.to_dense() if weights.is_sparse else weights
        real = weights if average else weights.transpose(1, 2)
        out, real = out[~PADDING], real[~PADDING]  # rows of padded queries mean nothing
        results.append((out, real, *torch.autograd.grad(out.sin().sum() + real.square().sum(), leaf)))
    assert weights.shape == ((3, 7, 7) if average else (3, 2, 7, 7))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("batch_first", "bias", "sizes"),
    [*product([True, False], [True, False], [{}, {"kdim": 12}, {"kdim": 12, "vdim": 10}])],
)
def test_cross_attention_equals_torch(batch_first: bool, bias: bool, sizes: dict[str, int]) -> None:
    theirs = torch_layer(batch_first=batch_first, bias=bias, **sizes)
    ours = SBMMultiheadAttention.from_torch(theirs, source=None)
    query, key, value = (
        draw(3, 4, 16), draw(3, 7, sizes.get("kdim", 16), seed=2), draw(3, 7, sizes.get("vdim", 16), seed=3),
    )  # fmt: skip
    if not batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    expected, expected_weights = theirs(query, key, value, key_padding_mask=PADDING)
    out, weights = ours(query, key, value, key_padding_mask=PADDING)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights.to_dense(), expected_weights, rtol=0, atol=1e-12)


def test_single_precision_equals_torch() -> None:
    theirs, x = torch_layer(batch_first=True).float(), draw(3, 7, 16).float()
    ours = SBMMultiheadAttention.from_torch(theirs, source=None)
    expected, _ = theirs(x, x, x, key_padding_mask=PADDING)
    out, _ = ours(x, x, x, key_padding_mask=PADDING)
    torch.testing.assert_close(out[~PADDING], expected[~PADDING], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("mask", "average"), [*product(MASKS, [True, False])])
def test_one_sequence_has_no_batch_dimension(mask: str | None, average: bool) -> None:
    theirs, query, memory = torch_layer(), draw(4, 16), draw(7, 16, seed=2)
    ours = SBMMultiheadAttention.from_torch(theirs, source=None)
    arguments: dict[str, Any] = {"attn_mask": forbidden_pairs(mask, 1, 4, 7), "average_attn_weights": average}
    padding = (
        torch.zeros(7, dtype=torch.float64).masked_fill(PADDING[1], -torch.inf) if mask == "floating" else PADDING[1]
    )
    results = (layer(query, memory, memory, padding, **arguments) for layer in (ours, theirs))
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine.to_dense() if mine.is_sparse else mine, expected, rtol=0, atol=1e-12)


def test_causality_without_a_mask() -> None:
    theirs, x = torch_layer(batch_first=True), draw(2, 7, 16)
    ours = SBMMultiheadAttention.from_torch(theirs, source=None)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected, _ = theirs(x, x, x, attn_mask=mask, is_causal=True)
    for arguments in ({"is_causal": True}, {"is_causal": True, "attn_mask": mask}):
        torch.testing.assert_close(ours(x, x, x, **arguments)[0], expected, rtol=0, atol=1e-12)


def test_a_causal_mask_with_its_hint_makes_the_graph_causal() -> None:
    layer, x = sampling_layer(window=7), draw(2, 7, 16)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    floating = torch.zeros(7, 7, dtype=torch.float64).masked_fill(mask, -torch.inf)
    for each in (mask, floating):
        assert layer(x, x, x, attn_mask=each, is_causal=True, return_graph=True)[2].is_causal
    other = mask.clone()
    other[3, 0] = True
    for each, hint in ((other, True), (mask, False), (mask.tril(5), True)):
        graph = layer(x, x, x, attn_mask=each, is_causal=hint, return_graph=True)[2]
        assert not graph.is_causal
        assert not bool((graph.to_dense(sequence=0).bool() & each).any())


def test_a_model_without_layers_to_replace_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"Expected 'model' to contain torch.nn.MultiheadAttention or TransformerConv layers \(got none\)",
    ):
        replace_attention(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="Expected 'model' to be a module"):
        replace_attention("model")  # type: ignore[arg-type]


def restorable() -> nn.ModuleDict:
    """Layers of all kinds, one of which is shared."""
    torch.manual_seed(0)
    shared = nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True)
    pair = nn.ModuleList([shared, shared])
    sizes = nn.MultiheadAttention(16, 2, bias=False, kdim=12, vdim=10)
    gps = GPSConv(16, None, heads=2, attn_kwargs={"dropout": 0.1})
    model = nn.ModuleDict({"pair": pair, "sizes": sizes, "gps": gps, "small": nn.MultiheadAttention(8, 2).bfloat16()})
    sizes.k_proj_weight.requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def test_restored_layers_are_those_of_torch_and_pyg() -> None:
    model = restorable()
    kinds, expected = [type(part) for part in model.modules()], copy.deepcopy(model.state_dict())
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    names = replace_attention(model, num_clusters=3)
    assert restore_attention(model) == names == ["pair.0", "sizes", "gps", "small"]
    assert [type(part) for part in model.modules()] == kinds
    pair = cast(Any, model["pair"])
    assert pair[0] is pair[1]
    assert (pair[0].dropout, cast(Any, model["gps"]).attn.dropout, cast(Any, model["sizes"]).batch_first) == (
        0.3, 0.1, False,
    )  # fmt: skip
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen
    assert not any(part.training for part in model.modules())


@pytest.mark.filterwarnings("ignore:Attention is dense")  # and stays so
def test_restored_layers_keep_what_was_trained() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    replace_attention(layer, num_clusters=3)
    x = draw(3, 7, 16).float()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(x).square().sum().backward()
    optimizer.step()
    expected = layer(x)
    restore_attention(layer)
    torch.testing.assert_close(layer(x), expected)


def test_a_second_call_replaces_the_sources_alone() -> None:
    model, again = restorable(), restorable()
    replace_attention(model, num_clusters=3)
    before = {name: value for name, value in model.state_dict().items() if ".source." not in name}
    refuses(lambda: replace_attention(model, num_bloks=3), "num_bloks", TypeError)
    assert replace_attention(model, source="top_k", k=2) == replace_attention(again, source="top_k", k=2)
    after = model.state_dict()
    assert after.keys() == again.state_dict().keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    pair = cast(Any, model["pair"])
    assert pair[0] is pair[1]


def test_what_cannot_be_restored_is_named() -> None:
    layer = sampling_layer()
    for model, message in [
        (nn.Linear(2, 2), r"Expected 'model' to contain .* \(got none\)"),
        (layer, r"\(got a layer itself\). Use its `to_torch`"),
        (nn.Sequential(sampling_layer(is_causal=True)), r"Expected '0' to compute .* \(got {'is_causal': True}\)"),
        (nn.Sequential(sampling_layer(normalizer="entmax15")), r"\(got {'normalizer': 'entmax15'}\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            restore_attention(model)
    layer.register_forward_hook(lambda *call: None)
    for change in (restore_attention, replace_attention):
        refuses(partial(change, nn.Sequential(layer)), "Expected '0' to have no hooks")
    assert type(layer.to_torch()) is nn.MultiheadAttention


def test_layers_of_one_model_are_replaced_where_they_are() -> None:
    model = encoder().eval()
    names = replace_attention(model, num_clusters=4, window=2)
    assert names == ["layers.0.self_attn", "layers.1.self_attn"]
    assert all(cast(Any, model.get_submodule(name)).conv.source.window == 2 for name in names)
    assert not any(module.training for module in model.modules())


def test_a_shared_layer_stays_shared() -> None:
    attention = torch_layer()
    model = nn.ModuleDict({"one": attention, "two": attention, "other": torch_layer()})
    assert replace_attention(model, num_clusters=4) == ["one", "other"]
    assert isinstance(model["one"], SBMMultiheadAttention)
    assert model["one"] is model["two"] is not model["other"]
    layer = nn.TransformerEncoderLayer(16, 2)
    assert replace_attention(nn.ModuleList([layer, layer]), num_clusters=4) == ["0.self_attn"]
    assert isinstance(layer.self_attn, SBMMultiheadAttention)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
@pytest.mark.parametrize("part", ["self_attn", "self_attn.out_proj"])
def test_layers_with_hooks_are_refused(register: str, part: str) -> None:
    """Their copies would have none."""
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    hook = getattr(layer.get_submodule(part), register)(lambda *_: None)
    refuses(lambda: replace_attention(layer), "Expected 'self_attn' to have no hooks")
    assert isinstance(layer.self_attn, nn.MultiheadAttention)
    hook.remove()
    assert replace_attention(layer) == ["self_attn"]


class Scaled(nn.MultiheadAttention):
    def forward(self, query: Tensor, *rest: Any, **options: Any) -> Any:
        return super().forward(2 * query, *rest, **options)


class Renamed(nn.MultiheadAttention):
    pass


class OwnGPS(GPSConv):
    def forward(self, x: Tensor, *rest: Any, **options: Any) -> Tensor:
        return 2 * super().forward(x, *rest, **options)


@pytest.mark.parametrize("layer", [Scaled(16, 2), OwnGPS(16, None, 2)])
def test_layers_that_compute_something_else_are_refused(layer: nn.Module) -> None:
    model, kind = nn.Sequential(layer), type(layer).__name__
    with pytest.raises(
        ValueError, match=rf"Expected '0' to call the forward method of \w+ \(got a {kind} with its own"
    ):
        replace_attention(model)
    assert model[0] is layer
    assert replace_attention(nn.Sequential(Renamed(16, 2))) == ["0"]


@pytest.mark.parametrize("part", ["self_attn", "self_attn.out_proj"])
def test_parametrized_layers_are_refused(part: str) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    name = "weight" if "out" in part else "in_proj_weight"
    nn.utils.parametrizations.weight_norm(layer.get_submodule(part), name)
    refuses(lambda: replace_attention(layer), "Expected 'self_attn' to have no parametrizations")
    nn.utils.parametrize.remove_parametrizations(layer.get_submodule(part), name)
    assert replace_attention(layer) == ["self_attn"]


class Wrapper(nn.Module):
    """As an adapter that adds to a projection."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.inner(x))


def test_projections_may_be_wrapped() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval()
    replace_attention(encoder, num_clusters=4)
    x, attention = draw(2, 5, 16).float(), cast(Any, encoder.layers[0].self_attn)
    with torch.no_grad():
        wanted = encoder(x)
        attention.conv.lin_query = Wrapper(attention.conv.lin_query)
        assert torch.equal(encoder(x), wanted)


def test_what_users_of_the_layer_of_torch_set_and_call() -> None:
    """PyG's aggregations call ``_reset_parameters``."""
    model = SetTransformerAggregation(16, 2, 2, 2, heads=2)
    names = replace_attention(model, num_clusters=4)
    before = [each.clone() for each in model.get_submodule(names[0]).parameters()]
    model.reset_parameters()
    changed = [not torch.equal(*pair) for pair in zip(before, model.get_submodule(names[0]).parameters(), strict=True)]
    assert any(changed)
    layer = SBMMultiheadAttention(16, 2, dropout=0.5, num_clusters=4)
    layer.dropout = 0.25
    assert layer.conv.dropout == layer.dropout == 0.25


def test_layers_that_share_weights_with_others_are_refused() -> None:
    """Copies would be trained apart."""
    model = nn.ModuleDict({"one": torch_layer(), "other": torch_layer(), "last": nn.Linear(16, 16)})
    one, other, last = (cast(Any, each) for each in model.values())
    other.in_proj_weight = one.in_proj_weight
    refuses(lambda: replace_attention(model), "Expected 'one' to have weights of its own (got ['in_proj_weight']")
    del model["one"]
    last.weight = other.out_proj.weight
    refuses(lambda: replace_attention(model), "Expected 'other' to have weights of its own (got ['out_proj.weight']")
    assert model["other"] is other
    last.weight = nn.Parameter(last.weight.detach().clone())
    assert replace_attention(model) == ["other"]


def test_copies_of_frozen_projections_are_frozen() -> None:
    def frozen(theirs: nn.MultiheadAttention, *names: str) -> set[str]:
        for name, parameter in theirs.named_parameters():
            parameter.requires_grad_(name not in names)
        with torch.no_grad():  # which is not to freeze others
            ours = SBMMultiheadAttention.from_torch(theirs, num_clusters=4)
        return {name for name, parameter in ours.named_parameters() if not parameter.requires_grad}

    same, other = nn.MultiheadAttention(16, 2), nn.MultiheadAttention(16, 2, kdim=12, vdim=8)
    all_three = [f"conv.lin_{name}" for name in ("query", "key", "value")]
    assert frozen(same) == set()
    assert frozen(same, "in_proj_weight", "out_proj.bias") == {*(f"{lin}.weight" for lin in all_three), "out_proj.bias"}
    assert frozen(other, "in_proj_bias") == {f"{lin}.bias" for lin in all_three}
    assert frozen(other, "k_proj_weight", "out_proj.weight") == {"conv.lin_key.weight", "out_proj.weight"}


def test_replaced_layers_are_dense_at_first() -> None:
    model, x = encoder().eval(), draw(2, 7, 16)
    wanted = model(x)
    replace_attention(model, num_clusters=4)
    torch.testing.assert_close(model(x), wanted)
    model = encoder().eval()
    replace_attention(model, num_clusters=4, target_density=0.2)
    assert not torch.allclose(model(x), wanted, atol=1e-3)


def test_dropout_acts_in_training_only() -> None:
    layer, x = sampling_layer(dropout=0.5), draw(2, 7, 16)
    graph = patterns.full(None, ptr=torch.tensor([0, 7, 14]))
    whole = layer.eval()(x, x, x, graph=graph, seed=1)[0]
    assert torch.equal(layer(x, x, x, graph=graph, seed=2)[0], whole)
    assert not torch.equal(layer.train()(x, x, x, graph=graph, seed=1)[0], whole)
    assert layer.dropout == 0.5


# ------------------------------------------------------------------ sampling and padding


@pytest.mark.slow
@pytest.mark.parametrize("bipartite", [False, True])
def test_padding_changes_nothing(bipartite: bool) -> None:
    """Graphs, outputs and gradients are the same to the bit, whatever padded places hold; padded queries give zeros."""
    layer, x, queries = sampling_layer(), draw(3, 7, 16), draw(3, 4, 16, seed=5)
    results = []
    for filling in (0.0, 1e30, torch.nan):
        leaf = x.masked_fill(PADDING[..., None], filling).requires_grad_()
        out, weights, graph = layer(queries if bipartite else leaf, leaf, leaf, PADDING, seed=3, return_graph=True)
        (grad,) = torch.autograd.grad(out.sin().sum(), leaf)
        assert not grad[PADDING].any()
        if not bipartite:
            assert not out[PADDING].any()
        results.append((out, weights, graph.col, grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_padded_batch_is_the_ragged_batch_of_the_layer_inside() -> None:
    layer, padded = sampling_layer(window=1), draw(3, 7, 16)
    out, weights, graph = layer(padded, padded, padded, PADDING, seed=3, return_graph=True)
    x, ptr = unpad(padded, ~PADDING)
    expected, sampled, (edge_index, alpha) = layer.conv(
        (x, x), ptr=ptr, seed=3, return_graph=True, return_attention_weights=True
    )
    assert graph == sampled
    assert graph == graph | patterns.window(None, 1, ptr=ptr)
    torch.testing.assert_close(out, pad(layer.out_proj(expected), ptr)[0], rtol=1e-12, atol=1e-14)
    total = (
        torch.zeros(14, dtype=torch.float64).index_add(0, edge_index[1], alpha) / 2
    )  # weights of the two heads, averaged
    torch.testing.assert_close(weights.to_dense().sum(2)[~PADDING], total)


@pytest.mark.parametrize("options", [{}, {"window": 1}])
def test_checkpointing_computes_self_attention_again(options: dict[str, Any]) -> None:
    """Though it hands each argument over by itself, detached."""
    layer, found = sampling_layer(**options), []
    for saved in (False, True):
        x = draw(3, 7, 16).requires_grad_()
        call, arguments = partial(layer, seed=0), (x, x, x, PADDING, False)
        out, _ = checkpoint(call, *arguments, use_reentrant=True) if saved else call(*arguments)
        out.square().sum().backward()
        found.append([out.detach(), x.grad, *(each.grad for each in layer.parameters())])
        layer.zero_grad()
    for mine, meant in zip(*found, strict=True):
        torch.testing.assert_close(mine, meant)


def test_tokens_that_are_equal_are_not_the_same() -> None:
    layer, x = sampling_layer(), draw(3, 7, 16)
    same, other, part = (layer(x, key, key, PADDING, seed=0)[0] for key in (x, x.clone(), x.view(3, 7, 16)))
    assert torch.equal(same, part)
    assert not torch.equal(same, other)  # padded queries attend, too


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_weights_are_dense_unless_sparse_ones_are_requested(average: bool, batched: bool) -> None:
    layer, x = sampling_layer(), draw(3, 7, 16).requires_grad_()
    tokens, padding = (x, PADDING) if batched else (x[1], PADDING[1])
    options: dict[str, Any] = {"average_attn_weights": average, "seed": 3}
    results = []
    for is_sparse in (False, True):
        _, weights = layer(tokens, tokens, tokens, padding, sparse_weights=is_sparse, **options)
        assert weights.is_sparse is is_sparse
        weights = weights.to_dense()
        results.append((weights, *torch.autograd.grad(weights.square().sum(), x)))
    assert weights.shape == (3,) * batched + (2,) * (not average) + (7, 7)
    assert weights.any()
    for dense, from_sparse in zip(*results, strict=True):
        torch.testing.assert_close(dense, from_sparse, rtol=0, atol=1e-15)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_torch_work_on_the_layer(register: str) -> None:
    layer, x, shapes = sampling_layer(), draw(3, 7, 16).requires_grad_(), []
    getattr(layer, register)(lambda module, *gradients: shapes.append([grad.shape for grad in gradients[-1]]))
    out, weights = layer(x, x, x, PADDING, seed=3)
    (out.sum() + weights.square().sum()).backward()
    assert shapes == [[out.shape, weights.shape]]


def test_sparse_weights_store_edges_and_are_differentiable() -> None:
    layer, x = sampling_layer(), draw(3, 7, 16).requires_grad_()
    options: dict[str, Any] = {"average_attn_weights": False, "seed": 3, "return_graph": True}
    _, weights, graph = layer(x, x, x, PADDING, sparse_weights=True, **options)
    assert weights.is_sparse
    assert weights._nnz() == graph.num_edges
    dense = torch.stack([pad_square(graph.sequence(b).to_dense()) for b in range(3)])
    assert torch.equal(weights.to_dense() != 0, dense)
    (grad,) = torch.autograd.grad(weights.coalesce().values().square().sum(), x)
    assert grad.any()
    out, nothing = layer(x, x, x, PADDING, need_weights=False, seed=3)
    assert nothing is None
    assert torch.equal(out, layer(x, x, x, PADDING, seed=3)[0])


def pad_square(mask: Tensor) -> Tensor:
    return nn.functional.pad(mask, (0, 7 - mask.size(2), 0, 7 - mask.size(1)))


def test_a_mask_removes_edges_that_were_sampled() -> None:
    layer, x = sampling_layer(exploration=0.3, window=1), draw(3, 7, 16).requires_grad_()
    mask = forbidden_pairs("per head", 3, 7, 7)
    assert mask is not None
    free = layer(x, x, x, PADDING, seed=3, return_graph=True)[2]
    out, weights, graph = layer(x, x, x, PADDING, attn_mask=mask, average_attn_weights=False, seed=3, return_graph=True)
    assert 0 < graph.num_edges < free.num_edges
    assert graph | free == free
    assert not weights.to_dense()[mask.view(3, 2, 7, 7)].any()
    torch.autograd.grad(out.sin().sum(), x)
    over_it = layer(x, x, x, PADDING, graph=graph)[0]
    torch.testing.assert_close(over_it, out, rtol=1e-12, atol=1e-14)


def test_a_given_graph() -> None:
    layer, x = sampling_layer(), draw(3, 7, 16)
    graph = patterns.window(None, 1, ptr=torch.tensor([0, 7, 12, 14]))
    _, weights = layer(x, x, x, PADDING, graph=graph)
    near = (torch.arange(7)[:, None] - torch.arange(7)).abs() <= 1
    assert torch.equal(weights.to_dense() != 0, near & ~PADDING[:, None] & ~PADDING[:, :, None])
    assert layer(x, x, x, PADDING, graph=graph, return_graph=True)[2] == graph.expand(2)


def test_a_query_without_keys_gives_the_bias() -> None:
    layer, x = sampling_layer(), draw(1, 3, 16)
    graph = AttentionGraph.from_dense(torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 1]]))
    assert torch.equal(layer(x, x, x, graph=graph)[0][0, 1], layer.out_proj.bias)


def test_state_copies_and_reset() -> None:
    layer, x = sampling_layer(), draw(2, 7, 16)
    out = layer(x, x, x, seed=1)[0]
    other = SBMMultiheadAttention(16, 2, batch_first=True, num_clusters=4, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    for clone in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(clone(x, x, x, seed=1)[0], out)
    layer.reset_parameters()
    assert not torch.equal(layer(x, x, x, seed=1)[0], out)
    assert {p.device.type for p in SBMMultiheadAttention(16, 2, device="meta").parameters()} == {"meta"}


# ------------------------------------------------------------------ inside other people's models


def counted(function: Callable[..., Any], calls: list[bool]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(True)
        return function(*arguments, **options)

    return call


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, **{"dropout": 0.0, "batch_first": True, **options})
    nested = layer.self_attn.batch_first and not layer.norm_first  # else torch warns that it cannot
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).double()


def count_calls(model: nn.Module) -> list[bool]:
    calls: list[bool] = []
    for module in model.modules():
        if isinstance(module, SBMMultiheadAttention):
            module.conv.attend = counted(module.conv.attend, calls)  # type: ignore[method-assign]  # a hook would switch the bypass off
    return calls


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own way around its layers
@pytest.mark.parametrize(("batch_first", "norm_first"), [*product([True, False], repeat=2)])
@pytest.mark.parametrize("mask", ["padding", "both", None])
def test_transformer_encoder(batch_first: bool, norm_first: bool, mask: str | None) -> None:
    """In evaluation without gradients torch bypasses the forward pass of a layer it knows, and makes padded batches nested: not of this one."""
    theirs = encoder(batch_first=batch_first, norm_first=norm_first)
    ours = copy.deepcopy(theirs)
    assert len(replace_attention(ours, source=None)) == 2
    x = draw(3, 7, 16) if batch_first else draw(3, 7, 16).transpose(0, 1)
    arguments: dict[str, Any] = {"src_key_padding_mask": PADDING if mask else None}
    arguments["mask"] = forbidden_pairs("shared", 3, 7, 7) if mask == "both" else None
    calls = count_calls(ours)
    expected, trained = theirs(x, **arguments), ours(x, **arguments)
    ours.eval()
    with torch.no_grad():
        evaluated = ours(x, **arguments)
    frozen = ours.requires_grad_(False)(x, **arguments)
    assert len(calls) == 6
    assert trained.isfinite().all()
    real = torch.ones_like(PADDING) if mask is None else ~PADDING
    real = real if batch_first else real.T
    torch.testing.assert_close(trained[real], expected[real], rtol=0, atol=1e-12)
    assert torch.equal(evaluated, trained)
    assert torch.equal(frozen, trained)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("which", [0, 1])
def test_an_encoder_with_a_layer_of_either_kind(which: int) -> None:
    """An encoder whose first layer is torch's gives nested tensors to the others."""
    theirs = encoder().eval()
    ours, x = copy.deepcopy(theirs), draw(3, 7, 16)
    layer: Any = ours.layers[which]
    layer.self_attn = SBMMultiheadAttention.from_torch(layer.self_attn, source=None)
    calls, inputs = count_calls(ours), [x, nested(x)]
    with torch.no_grad():
        for tokens in inputs:
            mask = None if tokens.is_nested else PADDING
            expected, out = (model(tokens, src_key_padding_mask=mask) for model in (theirs, ours))
            if out.is_nested:
                expected, out = (torch.cat(result.unbind()) for result in (expected, out))
            else:
                expected, out = expected[~PADDING], out[~PADDING]
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert len(calls) == 2


def test_an_encoder_of_layers_that_sample() -> None:
    """Made of a layer whose attention is replaced already; in evaluation over the same graphs as in training."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = sampling_layer()  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
        model = nn.TransformerEncoder(layer, 2)
    for part in model.modules():
        if isinstance(part, SBMMultiheadAttention):
            part.conv.eval_seed = None  # draw as in training
    x, results = draw(3, 7, 16), []
    for train in (True, False):
        torch.manual_seed(1)
        with torch.set_grad_enabled(train):
            results.append(model.train(train)(x, src_key_padding_mask=PADDING))
    assert torch.equal(*results)
    assert results[0].isfinite().all()


def test_the_projection_that_encoders_see_is_the_layer_s_own() -> None:
    layer = sampling_layer()
    assert layer.in_proj_weight.requires_grad
    nn.init.zeros_(layer.in_proj_weight)
    assert not layer.conv.lin_query.weight.any()
    assert "in_proj_weight" not in layer.state_dict()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but")  # torch's, of a model that is not batch_first
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer(batch_first: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=batch_first, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    assert len(replace_attention(ours, source=None)) == 3
    source, target = (x if batch_first else x.transpose(0, 1) for x in (draw(3, 7, 16), draw(3, 5, 16, seed=2)))
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    padding = torch.zeros(3, 7, dtype=torch.float64).masked_fill(PADDING, -torch.inf)
    arguments = {"tgt_mask": mask, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    expected = theirs(source, target, **arguments)
    for train in (True, False):
        with torch.set_grad_enabled(train):
            out = ours.train(train)(source, target, **arguments)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_a_transformer_with_a_window_becomes_sparse() -> None:
    """The window is one of self-attention; cross attention has the pairs that are drawn."""
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    replace_attention(model, num_clusters=4, window=1)
    sparsifier = Sparsifier(model, density=0.5, total_steps=4, dense_part=0.5, trial_interval=2)
    source, target = draw(3, 12, 16).float(), draw(3, 8, 16, seed=2).float()
    for _ in range(4):  # dense, a trial step, sparse
        loss = model(source, target).square().mean()
        loss.backward()
        sparsifier.step(loss)
    with analysis.record_attention(model.eval()) as calls:
        model(source, target)
    assert len(calls) == 3
    for call in calls:
        near = patterns.window(None, 1, ptr=call.graph.query_ptr) if "self_attn" in call.layer else None
        assert near is None or call.graph.contains(near.edge_index).all()
        assert call.graph.num_edges < call.graph.heads * 3 * 12 * 12


def test_transformer_decoder_layer() -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True).double()
    ours = copy.deepcopy(theirs)
    assert len(replace_attention(ours, source=None)) == 2
    arguments = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64),
        "tgt_is_causal": True,
    }
    padding = torch.zeros(3, 7, dtype=torch.float64).masked_fill(PADDING, -torch.inf)
    expected, out = (
        model(draw(3, 5, 16), draw(3, 7, 16, seed=2), **arguments, memory_key_padding_mask=padding)
        for model in (theirs, ours)
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


# ------------------------------------------------------------------ errors


def refused(call: Callable[..., Any], arguments: dict[str, Any], error: type[Exception], name: str, got: str) -> None:
    with pytest.raises(error) as caught:
        call(**arguments)
    message = str(caught.value)
    assert type(caught.value) is error
    assert re.fullmatch(r"Expected .+ \(got .+\)\. .+\.", message), message
    assert f"'{name}'" in message.split(" (got ")[0], message
    assert got in message, message


@pytest.mark.parametrize(
    ("options", "error", "name", "got"),
    [({"num_heads": 3}, ValueError, "embed_dim", "got 16 and 3"), ({"embed_dim": 0}, ValueError, "embed_dim", "got 0"),
     ({"kdim": False}, TypeError, "kdim", "got bool"), ({"dropout": 1.0}, ValueError, "dropout", "got 1.0"),
     ({"batch_first": "False"}, TypeError, "batch_first", "got str"),
     ({"add_bias_kv": 0}, TypeError, "add_bias_kv", "got int"), ({"concat": False}, ValueError, "concat", "got False"),
     ({"device": "nonsense"}, ValueError, "device", "got 'nonsense'"),
     ({"dtype": torch.int64}, TypeError, "dtype", "got torch.int64")],
)  # fmt: skip
def test_option_errors(options: dict[str, Any], error: type[Exception], name: str, got: str) -> None:
    refused(SBMMultiheadAttention, {"embed_dim": 16, "num_heads": 2, **options}, error, name, got)


def test_layers_that_cannot_be_copied() -> None:
    for name in ("add_bias_kv", "add_zero_attn"):
        theirs = nn.MultiheadAttention(16, 2, **{name: True})
        refused(SBMMultiheadAttention.from_torch, {"attention": theirs}, ValueError, name, "got True")


SQUARE = torch.zeros(7, 7, dtype=torch.float64)


@pytest.mark.parametrize(
    ("arguments", "error", "name", "got"),
    [
        *(({name: None}, TypeError, name, "got NoneType") for name in ("query", "key", "value")),
        ({"key": draw(3, 7, 16).float()}, TypeError, "key", "got torch.float32"),
        *(
            ({name: draw(3, 7, 16).to_sparse()}, TypeError, name, "got torch.sparse_coo")
            for name in ("query", "key", "value")
        ),
        *(({name: draw(3, 7, 16).to("meta")}, ValueError, name, "got meta") for name in ("query", "key", "value")),
        *(({name: draw(3, 7, 15)}, ValueError, name, "got [3, 7, 15]") for name in ("query", "key", "value")),
        ({"key": draw(1, 3, 7, 16)}, ValueError, "key", "got 4"),
        ({"key": draw(3, 0, 16)}, ValueError, "value", "got [3, 7, 16]"),
        ({"key": draw(2, 7, 16)}, ValueError, "key", "got [2, 7, 16]"),
        ({"value": draw(3, 6, 16)}, ValueError, "value", "got [3, 6, 16]"),
        ({"key_padding_mask": PADDING[:2]}, ValueError, "key_padding_mask", "got [2, 7]"),
        ({"key_padding_mask": PADDING.long()}, TypeError, "key_padding_mask", "got torch.int64"),
        ({"key_padding_mask": PADDING.double()}, ValueError, "key_padding_mask", "got other values"),
        ({"attn_mask": torch.ones(7, 7)}, ValueError, "attn_mask", "option `score_bias`"),
        ({"attn_mask": SQUARE + torch.inf}, ValueError, "attn_mask", "got other values"),
        ({"attn_mask": SQUARE[:, :6]}, ValueError, "attn_mask", "got [7, 6]"),
        ({"attn_mask": SQUARE.expand(3, 7, 7)}, ValueError, "attn_mask", "got [3, 7, 7]"),
        ({"need_weights": PADDING}, TypeError, "need_weights", "got Tensor"),
        ({"graph": patterns.full(20)}, ValueError, "graph", "20 queries"),
        ({"graph": patterns.full(21)}, ValueError, "graph", "1 sequence"),
        ({"graph": patterns.full(None, ptr=torch.tensor([0, 7, 14, 21])).expand(3)}, ValueError, "graph", "got 3"),
        ({"graph": patterns.full(21).to("meta")}, ValueError, "graph", "got meta"),
        ({"sequence_ids": torch.arange(2)}, ValueError, "sequence_ids", "got [2]"),
    ],
)
def test_call_errors(arguments: dict[str, Any], error: type[Exception], name: str, got: str) -> None:
    x = draw(3, 7, 16)
    refused(sampling_layer(), {"query": x, "key": x, "value": x, **arguments}, error, name, got)


def test_streams_of_a_layer_without_blocks() -> None:
    x, layer = draw(3, 7, 16), SBMMultiheadAttention(16, 2, batch_first=True, source=None, dtype=torch.float64)
    refused(
        layer, {"query": x, "key": x, "value": x, "sequence_ids": torch.arange(3)}, ValueError, "sequence_ids",
        "source=None",
    )  # fmt: skip


def test_autocast_takes_what_it_converts() -> None:
    layer, x = SBMMultiheadAttention(16, 2, batch_first=True, num_clusters=4), draw(3, 7, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x.bfloat16(), x.float(), x.half(), seed=0)[0].dtype == torch.bfloat16
        refused(layer, {"query": x, "key": x, "value": x}, TypeError, "query", "got torch.float64")


@pytest.mark.parametrize(
    "options", [{"source": None}, {"num_clusters": 3}, {"source": "top_k", "k": 2}, {"source": "indexer"}]
)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (3, 0), (0, 0)])
def test_empty_batches_have_the_shapes_of_torch(
    batch: int, length: int, batch_first: bool, options: dict[str, Any]
) -> None:
    theirs = torch_layer(batch_first=batch_first)
    ours = SBMMultiheadAttention.from_torch(theirs, **options)
    x, memory = draw(batch, length, 16).requires_grad_(), draw(batch, 4, 16)
    x, memory = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
    for tokens in ((x, x, x), (x, memory, memory)):
        for average in (True, False):
            expected, expected_weights = theirs(*tokens, average_attn_weights=average)
            out, weights = ours(*tokens, average_attn_weights=average)
            assert out.shape == expected.shape
            assert weights.shape == expected_weights.shape
            out.sum().backward()
    out, weights = ours(memory, x, x)  # queries without keys
    torch.testing.assert_close(out, ours.out_proj.bias.expand_as(out))
    assert not weights.any()


@pytest.mark.parametrize("options", [{"source": None}, {"num_clusters": 3}, {"source": "top_k", "k": 2}])
def test_a_sequence_may_be_all_padding(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, x = (
        SBMMultiheadAttention(16, 2, batch_first=True, **options).double().eval(),
        draw(3, 7, 16).requires_grad_(),
    )
    padding = PADDING.clone()
    padding[1] = True
    out, weights = layer(x, x, x, padding)
    number = {} if layer.conv.source is None else {"sequence_ids": torch.tensor([0, 2])}
    part = x[::2]
    expected, expected_weights = layer(part, part, part, PADDING[::2], **number)
    torch.testing.assert_close(out[::2], expected)
    torch.testing.assert_close(weights[::2], expected_weights)
    assert not out[1].any()
    assert not weights[1].any()
    (grad,) = torch.autograd.grad(out.sin().sum(), x)
    assert grad.isfinite().all()
    queries = draw(3, 4, 16, seed=5)
    out, _ = layer(queries, x, x, padding)
    torch.testing.assert_close(out[1], layer.out_proj.bias.expand(4, 16))
    assert not layer(x, x, x, torch.ones(3, 7, dtype=torch.bool))[0].any()


def test_evaluation_of_a_replaced_model_repeats() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 3, enable_nested_tensor=False)
    replace_attention(model, num_clusters=4, target_density=0.4)
    layers = [part for part in model.modules() if isinstance(part, SBMMultiheadAttention)]
    assert [layer.conv.eval_seed for layer in layers] == [0, 1, 2]
    x = torch.randn(2, 7, 16)
    model(x)  # the running means
    model.eval()
    assert torch.equal(model(x), model(x))
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(model(x), again(x))
    assert not torch.equal(layers[0](x, x, x)[1], layers[0](x, x, x, seed=5)[1])
    layers[0].conv.eval_seed = None
    assert not torch.equal(model(x), model(x))


# ------------------------------------------------------------------ nested tensors


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("batch_first", [True, False])  # of no account to nested tensors
def test_a_nested_tensor_is_a_padded_one(batch_first: bool) -> None:
    layer, x, results = sampling_layer(), draw(3, 7, 16).requires_grad_(), []
    for tokens, mask in ((x, PADDING), (nested(x), None)):
        layer.batch_first = batch_first or tokens is x
        out, weights, graph = layer(tokens, tokens, tokens, mask, is_causal=True, seed=3, return_graph=True)
        real = torch.cat(out.unbind()) if out.is_nested else out[~PADDING]
        results.append((real, weights.to_dense(), graph.col, *torch.autograd.grad(real.sin().sum(), x)))
    assert out.is_nested
    assert [row.size(0) for row in out.unbind()] == [7, 5, 2]
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_queries_or_keys() -> None:
    layer, x, memory = sampling_layer(), draw(3, 7, 16), draw(3, 7, 16, seed=2)
    expected = layer(x, memory, memory, PADDING, seed=3)
    for wanted, got in zip(expected, layer(x, *[nested(memory)] * 2, seed=3), strict=True):
        assert torch.equal(got.to_dense(), wanted.to_dense())
    dense = SBMMultiheadAttention.from_torch(torch_layer(batch_first=True), source=None)
    out = torch.cat(dense(nested(x), memory, memory, PADDING)[0].unbind())
    torch.testing.assert_close(out, dense(x, memory, memory, PADDING)[0][~PADDING], rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_may_hold_a_sequence_without_tokens() -> None:
    layer, x = sampling_layer().eval(), draw(3, 7, 16)
    out, weights = layer(*[nested(x, (7, 0, 2))] * 3)
    expected, expected_weights = layer(x, x, x, torch.arange(7) >= torch.tensor([[7], [0], [2]]))
    assert [part.shape for part in out.unbind()] == [(7, 16), (0, 16), (2, 16)]
    torch.testing.assert_close(torch.cat(out.unbind()), torch.cat([expected[0], expected[2, :2]]))
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_errors() -> None:
    layer, x = sampling_layer(), draw(3, 7, 16)
    jagged = torch.nested.nested_tensor([draw(3, 16), draw(5, 16)], layout=torch.jagged)
    refused(layer, {"query": jagged, "key": jagged, "value": jagged}, ValueError, "query", "got layout torch.jagged")
    for name, tokens, got in (
        ("key", torch.nested.as_nested_tensor([draw(7, 16), draw(5, 8), draw(2, 16)]), "got (16, 8, 16)"),
        ("value", nested(x, (7, 4, 2)), "got other lengths"),
        ("value", nested(x, (6, 4, 2)), "got [3, 6, 16]"),
        ("value", x, "got other lengths"),
        ("key_padding_mask", PADDING, "got both"),
        ("key_padding_mask", nested(x), "got a nested tensor"),
        ("attn_mask", nested(x), "got a nested tensor"),
    ):
        arguments = {"query": x, "key": nested(x), "value": nested(x), name: tokens}
        refused(layer, arguments, TypeError if got == "got a nested tensor" else ValueError, name, got)


def test_causality_among_other_tokens_counts_places_with_padding() -> None:
    theirs, query, memory = torch_layer(batch_first=True), draw(2, 7, 16), draw(2, 7, 16, seed=2)
    ours = SBMMultiheadAttention.from_torch(theirs, source=None)
    padding, later = torch.zeros(2, 7, dtype=torch.bool), torch.ones(7, 7, dtype=torch.bool).triu(1)
    padding[:, 2], padding[1, 4] = True, True  # not at the end, or places would be the same
    expected, _ = theirs(query, memory, memory, padding, attn_mask=later)
    found, _ = ours(query, memory, memory, padding, is_causal=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", [None, "shared", "per head"])
@pytest.mark.parametrize("source", [{"source": None}, {"source": "top_k", "k": 9}, {"source": "full"}])
def test_a_causal_layer_is_causal_where_padding_shifts_keys(source: dict[str, Any], mask: str | None) -> None:
    theirs, query, memory = torch_layer(batch_first=True).eval(), draw(3, 7, 16), draw(3, 7, 16, seed=2)
    ours = SBMMultiheadAttention.from_torch(theirs, is_causal=True, **source)
    padding, pairs = torch.zeros(3, 7, dtype=torch.bool), forbidden_pairs(mask, 3, 7, 7)
    padding[1, :3], padding[2, 1] = True, True
    forbidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected, _ = theirs(query, memory, memory, padding, attn_mask=forbidden if pairs is None else pairs | forbidden)
    is_real = expected.isfinite()  # torch gives NaN to queries whose keys are all padding or later
    assert is_real[0].all()
    assert is_real[1].any()
    if source != {"source": "full"}:  # patterns are for self-attention alone
        found, _ = ours(query, memory, memory, padding, attn_mask=pairs)
        torch.testing.assert_close(found[is_real], expected[is_real], rtol=0, atol=1e-12)
    whole, _ = ours(memory, memory, memory, padding, attn_mask=pairs)
    expected, _ = theirs(memory, memory, memory, padding, attn_mask=forbidden if pairs is None else pairs | forbidden)
    is_real = expected.isfinite() & ~padding[..., None]
    torch.testing.assert_close(whole[is_real], expected[is_real], rtol=0, atol=1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_a_layer_made_of_torchs_is_in_its_mode(training: bool) -> None:
    made = SBMMultiheadAttention.from_torch(torch_layer().train(training), num_clusters=4)
    assert all(module.training is training for module in made.modules())
