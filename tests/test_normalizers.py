"""Entmax with an alpha that learns: the module, the layers that take it, and graphs of a block model under it."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from entmax import entmax_bisect
from problems import dense_mask, random_graph
from torch import Tensor
from torch_geometric.explain import AttentionExplainer, Explainer

from sbm_pyg import (
    AttentionConv,
    Entmax,
    SBMAttentionConv,
    SBMMultiheadAttention,
    SequenceClassifier,
    SequenceEncoder,
    make_attention,
)
from sbm_pyg.sources import patterns


def tokens(count: int = 30) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def dense(conv: Any, x: Tensor, graph: Any) -> Tensor:
    """Each row and head by the entmax package."""
    rows = []
    q, k, v = (lin(x).view(-1, conv.heads, conv.out_channels) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
    edges = graph.expand(conv.heads)
    mask_of = dense_mask(edges)
    for head, alpha in enumerate(conv.normalizer.alpha):
        for row, mask in enumerate(mask_of[head]):
            p = entmax_bisect((k[mask, head] @ q[row, head]) * conv.scale, alpha[None], n_iter=200)
            rows.append(p @ v[mask, head])
    return torch.stack(rows).view(conv.heads, -1, conv.out_channels).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("fuse", [True, False])
def test_each_head_has_the_entmax_of_its_own_alpha(fuse: bool) -> None:
    torch.manual_seed(0)
    conv: Any = AttentionConv(6, 4, 3, normalizer=Entmax(3, [1.05, 1.4, 1.9])).double()
    conv.fuse = fuse
    x, graph = 3 * tokens(), random_graph(3, 30, 30, 0.4)
    assert (graph.degree > 0).all()
    out, wanted = conv(x, graph), dense(conv, x, graph)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-10)
    parameters = [p for p in conv.parameters() if not torch.equal(p, conv.lin_key.bias)]  # shifts scores: no gradient
    found = [torch.autograd.grad(each.sin().sum(), parameters) for each in (out, wanted)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_gradcheck_through_the_layer(fuse: bool, shared: bool) -> None:
    torch.manual_seed(0)
    conv: Any = AttentionConv(6, 2, 2, normalizer=Entmax(2, [1.3, 1.7])).double()
    conv.fuse = fuse
    graph = patterns.window(5, 2) if shared else random_graph(2, 5, 5, 0.6)
    names = [name for name, _ in conv.named_parameters()]
    assert "normalizer.raw_alpha" in names

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(conv, dict(zip(names, parameters, strict=True)), (x, graph))

    given = [tokens(5).requires_grad_(), *(p.detach().requires_grad_() for p in conv.parameters())]
    assert torch.autograd.gradcheck(call, given)


def test_a_module_of_its_own() -> None:
    module: Any = Entmax(2, alpha=[1.2, 1.9]).double()
    torch.testing.assert_close(module.alpha, torch.tensor([1.2, 1.9]).double(), rtol=1e-6, atol=1e-6)
    src, ptr = tokens(9)[:, :2].clone(), torch.tensor([0, 4, 9])
    out = module(src, ptr=ptr)
    torch.testing.assert_close(out, module(src, torch.repeat_interleave(ptr.diff())))
    for (start, end), (head, alpha) in [(s, a) for s in pairwise(ptr) for a in enumerate(module.alpha)]:
        expected = entmax_bisect(src[start:end, head], alpha.detach()[None], n_iter=200)
        torch.testing.assert_close(out[start:end, head], expected, rtol=0, atol=1e-10)
    assert torch.equal(Entmax(1, 2.0, learnable=False)(src[:, 0], ptr=ptr), Entmax(1, 2, False)(src, ptr=ptr)[:, 0])
    assert repr(module) == "Entmax(2, alpha=[1.2, 1.9], learnable=True)"
    with torch.no_grad():
        module.raw_alpha.copy_(torch.tensor([-1e4, 1e4]))
    assert module.alpha.tolist() == pytest.approx([1.01, 2])
    torch.testing.assert_close(module(src, ptr=ptr).sum(0), torch.full((2,), 2.0, dtype=torch.float64))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        low, high = module.to(dtype).alpha.tolist()
        assert 1 < low < high <= 2
    module.reset_parameters()
    assert module.alpha.tolist() == pytest.approx([1.2, 1.9], abs=0.01)


def test_a_layer_keeps_its_alphas() -> None:
    conv: Any = SBMAttentionConv(6, 4, 2, 3, normalizer="entmax")
    assert "normalizer.raw_alpha" in conv.state_dict()
    assert repr(conv).endswith("source=SBMSource, normalizer=Entmax(2, alpha=1.5, learnable=True))")
    with torch.no_grad():
        conv.normalizer.raw_alpha.fill_(0.7)
    again: Any = SBMAttentionConv(6, 4, 2, 3, normalizer="entmax")
    again.load_state_dict(conv.state_dict())
    assert torch.equal(again.normalizer.alpha, conv.normalizer.alpha)
    assert torch.equal(copy.deepcopy(conv).normalizer.alpha, conv.normalizer.alpha)
    conv.reset_parameters()
    torch.testing.assert_close(conv.normalizer.alpha, torch.full((2,), 1.5))
    fixed: Any = AttentionConv(6, 4, 2, normalizer=Entmax(2, 1.5, learnable=False))
    named: Any = AttentionConv(6, 4, 2, normalizer="entmax15")
    named.load_state_dict(fixed.state_dict(), strict=False)
    assert torch.equal(named(tokens().float(), patterns.full(30)), fixed(tokens().float(), patterns.full(30)))


@pytest.mark.parametrize("parameterization", ["paper", "assortative"])
def test_a_sampled_graph_under_entmax_trains_graph_and_alpha(parameterization: str) -> None:
    torch.manual_seed(0)
    options = {"parameterization": parameterization}
    conv: Any = make_attention("sbm", 6, 4, 2, num_clusters=3, normalizer="entmax", **options).double()
    x, ptr = 3 * tokens(), torch.tensor([0, 12, 30])
    out, graph, (_, weight) = conv(x, ptr=ptr, seed=1, return_graph=True, return_attention_weights=True)
    torch.testing.assert_close(out, conv(x, graph), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out, dense(conv, x, graph), rtol=0, atol=1e-10)
    assert 0 < int((weight == 0).sum()) < graph.num_edges
    out.sin().sum().backward()
    assert conv.normalizer.raw_alpha.grad.ne(0).all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in conv.parameters())


def test_every_layer_and_model_takes_it(tmp_path: Path) -> None:
    x = tokens(10).float()[:, None]
    attention: Any = SBMMultiheadAttention(6, 2, num_clusters=3, normalizer=Entmax(2, 1.3))
    attention(x, x, x, seed=0)[0].sum().backward()
    assert attention.conv.normalizer.raw_alpha.grad.isfinite().all()
    encoder: Any = SequenceEncoder(9, 8, attention_options={"num_clusters": 3, "normalizer": "entmax"})
    first, second = (block.attention.normalizer for block in encoder.layers)
    assert first is not second
    model: Any = SequenceClassifier(encoder, 2).eval()
    words = torch.arange(9)
    with torch.no_grad():
        first.raw_alpha.fill_(0.3)
    model.save_pretrained(tmp_path / "model")
    again: Any = SequenceClassifier.from_pretrained(tmp_path / "model")
    assert torch.equal(again(words, seed=0), model(words, seed=0))
    SequenceEncoder(9, 8, attention="window", attention_options={"normalizer": Entmax(2)})(words).sum().backward()


def test_hooks_explainers_and_autocast() -> None:
    conv: Any = AttentionConv(6, 4, 2, normalizer="entmax")
    x, edges = 3 * tokens().float(), patterns.window(30, 3).edge_index
    explanation = Explainer(
        conv.eval(), AttentionExplainer(), explanation_type="model", edge_mask_type="object",
        model_config={"mode": "regression", "task_level": "node"},
    )(x, edges)  # fmt: skip
    _, (_, weight) = conv(x, edges, return_attention_weights=True)
    torch.testing.assert_close(explanation.edge_mask, weight.amax(1))
    plain, seen = conv(x, edges), []
    hook = conv.register_message_forward_hook(lambda module, inputs, out: seen.append(out[0].shape))
    conv.explain = False
    torch.testing.assert_close(conv(x, edges), plain)
    assert seen
    hook.remove()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = conv(x, edges)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), plain, rtol=0, atol=0.1)
    out.float().sum().backward()
    assert conv.normalizer.raw_alpha.grad.isfinite().all()
    half: Any = copy.deepcopy(conv).bfloat16()
    half(x.bfloat16(), edges).sum().backward()
    assert half.normalizer.raw_alpha.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Entmax(0), ValueError, "Expected 'heads' to be at least 1"),
        (lambda: Entmax(2, 2.0), ValueError, r"Expected 'alpha' in \(1.01, 2\) \(got 2.0\). With learnable=False"),
        (lambda: Entmax(2, 5.0, learnable=False), ValueError, r"Expected 'alpha' in \(1, 4\] \(got 5.0\)"),
        (lambda: Entmax(2, [1.2, 1.3, 1.4]), ValueError, r"Expected 'alpha' to be a number or 2 \(got 3\)"),
        (lambda: Entmax(2, "1.5"), TypeError, "Expected 'alpha' to be a number in"),  # type: ignore[arg-type]
        (lambda: Entmax(2, learnable=None), TypeError, "Expected 'learnable' to be a bool"),  # type: ignore[arg-type]
        (lambda: Entmax(2)(torch.ones(4), ptr=torch.tensor([0, 4])), ValueError, r"Expected 'src' to be \[E, 2\]"),
        (lambda: AttentionConv(6, 4, 2, normalizer=Entmax(3)), ValueError, "Expected 'normalizer' of 2 heads"),
        (
            lambda: SBMAttentionConv(6, 4, 2, normalizer=cast(Any, 1.5)),
            TypeError,
            "Expected 'normalizer' to be a name or an Entm",
        ),
        (lambda: SBMAttentionConv(6, 4, 2, normalizer=Entmax(2), estimator="local"), ValueError, "derived for softmax"),
    ],
)
def test_errors(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()
