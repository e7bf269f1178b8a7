"""The drop-in for torch's layer: equal to it on the full graph, blind to padding, and at home in torch's and Hugging Face's encoders."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_encoder
from sbm_pyg import AttentionGraph, SBMMultiheadAttention, pad, patterns, unpad

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
    return SBMMultiheadAttention(16, 2, batch_first=True, num_blocks=4, dtype=torch.float64, **options)


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
    ours = SBMMultiheadAttention.from_torch(theirs, num_blocks=None)
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
    ("batch_first", "bias", "sizes"), [*product([True, False], [True, False], [{}, {"kdim": 12}, {"kdim": 12, "vdim": 10}])]
)
def test_cross_attention_equals_torch(batch_first: bool, bias: bool, sizes: dict[str, int]) -> None:
    theirs = torch_layer(batch_first=batch_first, bias=bias, **sizes)
    ours = SBMMultiheadAttention.from_torch(theirs, num_blocks=None)
    query, key, value = draw(3, 4, 16), draw(3, 7, sizes.get("kdim", 16), seed=2), draw(3, 7, sizes.get("vdim", 16), seed=3)
    if not batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    expected, expected_weights = theirs(query, key, value, key_padding_mask=PADDING)
    out, weights = ours(query, key, value, key_padding_mask=PADDING)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights.to_dense(), expected_weights, rtol=0, atol=1e-12)


def test_single_precision_equals_torch() -> None:
    theirs, x = torch_layer(batch_first=True).float(), draw(3, 7, 16).float()
    ours = SBMMultiheadAttention.from_torch(theirs, num_blocks=None)
    expected, _ = theirs(x, x, x, key_padding_mask=PADDING)
    out, _ = ours(x, x, x, key_padding_mask=PADDING)
    torch.testing.assert_close(out[~PADDING], expected[~PADDING], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("mask", "average"), [*product(MASKS, [True, False])])
def test_one_sequence_has_no_batch_dimension(mask: str | None, average: bool) -> None:
    theirs, query, memory = torch_layer(), draw(4, 16), draw(7, 16, seed=2)
    ours = SBMMultiheadAttention.from_torch(theirs, num_blocks=None)
    arguments: dict[str, Any] = {"attn_mask": forbidden_pairs(mask, 1, 4, 7), "average_attn_weights": average}
    padding = torch.zeros(7, dtype=torch.float64).masked_fill(PADDING[1], -torch.inf) if mask == "floating" else PADDING[1]
    results = (layer(query, memory, memory, padding, **arguments) for layer in (ours, theirs))
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine.to_dense() if mine.is_sparse else mine, expected, rtol=0, atol=1e-12)


def test_causality_without_a_mask() -> None:
    theirs, x = torch_layer(batch_first=True), draw(2, 7, 16)
    ours = SBMMultiheadAttention.from_torch(theirs, num_blocks=None)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected, _ = theirs(x, x, x, attn_mask=mask, is_causal=True)
    for arguments in ({"is_causal": True}, {"is_causal": True, "attn_mask": mask}):
        torch.testing.assert_close(ours(x, x, x, **arguments)[0], expected, rtol=0, atol=1e-12)


def test_dropout_acts_in_training_only() -> None:
    layer, x = sampling_layer(dropout=0.5), draw(2, 7, 16)
    graph = patterns.full(None, ptr=torch.tensor([0, 7, 14]))
    whole = layer.eval()(x, x, x, graph=graph, seed=1)[0]
    assert torch.equal(layer(x, x, x, graph=graph, seed=2)[0], whole)
    assert not torch.equal(layer.train()(x, x, x, graph=graph, seed=1)[0], whole)
    assert layer.dropout == 0.5


# ------------------------------------------------------------------ sampling and padding


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
        results.append((out, weights.indices(), weights.values(), graph.col, grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_padded_batch_is_the_ragged_batch_of_the_layer_inside() -> None:
    layer, padded = sampling_layer(window=1), draw(3, 7, 16)
    out, weights, graph = layer(padded, padded, padded, PADDING, seed=3, return_graph=True)
    x, ptr = unpad(padded, ~PADDING)
    expected, sampled, (edge_index, alpha) = layer.conv((x, x), ptr=ptr, seed=3, return_graph=True, return_attention_weights=True)
    assert graph == sampled
    assert graph == graph | patterns.window(None, 1, ptr=ptr)
    torch.testing.assert_close(out, pad(layer.out_proj(expected), ptr)[0], rtol=1e-12, atol=1e-14)
    total = torch.zeros(14, dtype=torch.float64).index_add(0, edge_index[1], alpha) / 2  # weights of the two heads, averaged
    torch.testing.assert_close(weights.to_dense().sum(2)[~PADDING], total)


def test_weights_are_sparse_and_differentiable() -> None:
    layer, x = sampling_layer(), draw(3, 7, 16).requires_grad_()
    _, weights, graph = layer(x, x, x, PADDING, average_attn_weights=False, seed=3, return_graph=True)
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
    other = SBMMultiheadAttention(16, 2, batch_first=True, num_blocks=4, dtype=torch.float64)
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
    assert transformer_encoder.replace_attention(ours, num_blocks=None) == 2
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
    layer.self_attn = SBMMultiheadAttention.from_torch(layer.self_attn, num_blocks=None)
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
    assert transformer_encoder.replace_attention(ours, num_blocks=None) == 3
    source, target = (x if batch_first else x.transpose(0, 1) for x in (draw(3, 7, 16), draw(3, 5, 16, seed=2)))
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    padding = torch.zeros(3, 7, dtype=torch.float64).masked_fill(PADDING, -torch.inf)
    arguments = {"tgt_mask": mask, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    expected = theirs(source, target, **arguments)
    for train in (True, False):
        with torch.set_grad_enabled(train):
            out = ours.train(train)(source, target, **arguments)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_transformer_decoder_layer() -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True).double()
    ours = copy.deepcopy(theirs)
    assert transformer_encoder.replace_attention(ours, num_blocks=None) == 2
    arguments = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64), "tgt_is_causal": True}
    padding = torch.zeros(3, 7, dtype=torch.float64).masked_fill(PADDING, -torch.inf)
    expected, out = (
        model(draw(3, 5, 16), draw(3, 7, 16, seed=2), **arguments, memory_key_padding_mask=padding) for model in (theirs, ours)
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_the_recipe_for_torch(capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    transformer_encoder.main(["--steps", "60"])
    torch.set_rng_state(state)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("replaced 2 layers")
    assert float(first.split(" by ")[1].split()[0]) < 1e-6
    assert float(second.split("accuracy ")[1].split()[0]) > 70


def test_the_recipe_for_hugging_face(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    import hugging_face

    state = torch.get_rng_state()
    torch.manual_seed(0)
    model, tokens = hugging_face.small_bert().double().eval(), torch.randint(1, 16, (3, 7))
    expected = model(tokens, attention_mask=(~PADDING).long())
    assert hugging_face.attach(model, num_blocks=None) == 2
    out = model(tokens, attention_mask=(~PADDING).long())
    torch.testing.assert_close(out.logits, expected.logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(model(tokens[:1]).logits, out.logits[:1], rtol=0, atol=1e-12)  # the first sequence has no padding
    with torch.no_grad():
        sampling = hugging_face.small_bert().double().eval()
        hugging_face.attach(sampling, num_blocks=4)
        first = []
        for filling in (0, 5):
            torch.manual_seed(1)
            first.append(sampling(tokens.masked_fill(PADDING, filling), attention_mask=(~PADDING).long()).logits)
        assert torch.equal(*first)
    hugging_face.main(["--steps", "40"])
    torch.set_rng_state(state)
    lines = capsys.readouterr().out.splitlines()
    assert float(lines[0].split(" by ")[1].split()[0]) < 1e-5
    loss, at_first = (float(lines[1].split(word)[1].split(")")[0].split()[0]) for word in ("loss ", "at first: "))
    assert loss < at_first / 2


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
    dense = SBMMultiheadAttention.from_torch(torch_layer(batch_first=True), num_blocks=None)
    out = torch.cat(dense(nested(x), memory, memory, PADDING)[0].unbind())
    torch.testing.assert_close(out, dense(x, memory, memory, PADDING)[0][~PADDING], rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, r"Expected 'embed_dim' to be a multiple of 'num_heads' \(got 16 and 3\)"),
        ({"add_bias_kv": True}, r"Expected 'add_bias_kv' to be False \(got True\)"),
        ({"add_zero_attn": True}, r"Expected 'add_zero_attn' to be False \(got True\)"),
        ({"concat": False}, r"Expected no 'concat' \(got False\)"),
        ({"dropout": 1.0}, r"Expected 'dropout' in \[0, 1\) \(got 1.0\)"),
    ],
)
def test_option_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SBMMultiheadAttention(**{"embed_dim": 16, "num_heads": 2, **options})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"key_padding_mask": PADDING[:2]}, ValueError, r"Expected 'key_padding_mask' to be \[3, 7\] \(got \[2, 7\]\)"),
        ({"key_padding_mask": PADDING.long()}, TypeError, r"Expected 'key_padding_mask' to be boolean or floating \(got torch.int64\)"),
        (
            {"key_padding_mask": torch.ones(3, 7, dtype=torch.bool)},
            ValueError,
            "Expected 'key_padding_mask' to leave a real key in each sequence",
        ),
        ({"attn_mask": torch.ones(7, 7)}, ValueError, r"Expected 'attn_mask' to hold 0 and minus infinity alone .* option `score_bias`"),
        (
            {"attn_mask": torch.ones(7, 6, dtype=torch.bool)},
            ValueError,
            r"Expected 'attn_mask' to be \[7, 7\] or \[6, 7, 7\] \(got \[7, 6\]\)",
        ),
        ({"graph": patterns.full(20)}, ValueError, r"over the sequences of N = 21 real queries and M = 21 real keys"),
        ({"value": draw(3, 6, 16)}, ValueError, r"Expected 'value' to be \[B, length, 16\]"),
        ({"key": draw(2, 7, 16)}, ValueError, r"Expected 'key' to be \[B, length, 16\]"),
    ],
)
def test_call_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    x = draw(3, 7, 16)
    with pytest.raises(error, match=message):
        sampling_layer()(**{"query": x, "key": x, "value": x, **arguments})
