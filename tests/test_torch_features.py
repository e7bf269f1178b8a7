"""At home in torch: compiled without a break, exported, in low precision, on meta tensors, called with other parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from test_ops import _samples
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

from sbm_pyg import (
    ALiBi,
    AttentionConv,
    AttentionGraph,
    SBMAttentionConv,
    SBMMultiheadAttention,
    SequenceClassifier,
    SequenceEncoder,
    Tokens,
    make_attention,
    ops,
)
from sbm_pyg.graphs import ragged
from sbm_pyg.ops.reference import edges as reference_edges
from sbm_pyg.sources import patterns, selectors

pytestmark = pytest.mark.slow

PTR = torch.tensor([0, 10, 17, 30])


def layer(source: str | None = "sbm", **options: Any) -> AttentionConv:
    torch.manual_seed(0)
    return make_attention(source, 16, 8, 2, **({"num_clusters": 4} if source == "sbm" else {}) | options)


def classifier(**options: Any) -> SequenceClassifier:
    torch.manual_seed(0)
    return SequenceClassifier(
        SequenceEncoder(
            15, 16, num_layers=1, dropout=0.0, max_length=64, attention_options={"num_clusters": 4, **options}
        ),
        10,
    )


def tokens(n: int = 30, seed: int = 1) -> Tensor:
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(seed))


def words(n: int, seed: int = 1) -> Tensor:
    return torch.randint(15, (n,), generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ compiled


@pytest.fixture
def compile_whole() -> Iterator[Callable[..., Any]]:
    """Compiles without a break, with sizes left open, and lets nothing be compiled again after the first call."""
    torch._dynamo.reset()
    counters.clear()

    def whole(module: torch.nn.Module, backend: Any = aot_eager) -> Any:
        compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
        first: list[bool] = []

        def call(*arguments: Any, **options: Any) -> Any:
            stance = "fail_on_recompile" if first else "default"
            first.append(True)
            with torch.compiler.set_stance(stance):
                return compiled(*arguments, **options)

        return call

    yield whole
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def equal_with_gradients(compiled: Any, eager: Any, parameters: list[Tensor], own: list[Tensor] | None = None) -> None:
    """Of these parameters, or of a copy's own."""
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.sin().sum(), own or parameters, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(eager.sin().sum(), parameters, allow_unused=True, materialize_grads=True),
    )


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch's tracer reads it
def test_inductor_over_an_adjacency_with_breaks_of_the_graph() -> None:
    torch._dynamo.reset()
    conv = layer()
    compiled = torch.compile(conv)
    for n in (10, 17, 33):
        x = tokens(n).requires_grad_()
        edge_index = patterns.random(n, 3, seed=n).edge_index
        pair = (torch.cat([x, x[:2]]), x)
        equal_with_gradients(compiled(pair, edge_index), conv(pair, edge_index), [x, conv.lin_key.weight])
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["heads share the edges", "edges of each head", "edge_index"])
def test_one_graph_for_five_numbers_of_edges(kind: str, compile_whole: Callable[..., Any]) -> None:
    conv = layer()
    compiled = compile_whole(conv)
    edge_numbers = set()
    for reach, n in ((1, 30), (2, 30), (4, 31), (7, 38), (3, 21)):
        x, graph = tokens(n).requires_grad_(), patterns.window(n, reach)
        edge_numbers.add(graph.num_edges)
        forms: dict[str, Any] = {
            "heads share the edges": graph, "edges of each head": graph.expand(2), "edge_index": graph.edge_index,
        }  # fmt: skip
        adjacency = forms[kind]
        equal_with_gradients(compiled(x, adjacency), conv(x, adjacency), [x, conv.lin_key.weight])
    assert len(edge_numbers) == 5
    if kind == "edge_index":  # no kernel sees a key that does not exist
        with pytest.raises(RuntimeError, match=r"Expected 'edge_index\[0\]' to be at least 0"):
            compiled(x, adjacency + 1)


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated:DeprecationWarning")
def test_one_graph_for_entmax_with_any_support(compile_whole: Callable[..., Any]) -> None:
    conv: Any = layer(normalizer="entmax", estimator="none", dropout=0.2)
    compiled = compile_whole(conv)
    for n, reach in ((30, 3), (31, 5), (22, 9)):
        x, graph = (3 * tokens(n)).requires_grad_(), patterns.window(n, reach)
        parameters = [x, conv.lin_key.weight, conv.normalizer.raw_alpha]
        equal_with_gradients(compiled(x, graph, seed=n), conv(x, graph, seed=n), parameters)


@pytest.mark.filterwarnings("ignore")  # dynamo's own, where it resumes after the break
@pytest.mark.parametrize("estimator", ["local", "mask"])
def test_a_block_model_trains_where_sampling_breaks_the_graph(estimator: str) -> None:
    """As ``torch.compile`` does without ``fullgraph=True``: what follows on the sampler is a graph of its own."""
    conv, x = layer(estimator=estimator), tokens()
    torch._dynamo.reset()
    compiled: Any = torch.compile(conv, backend=aot_eager)
    equal_with_gradients(compiled(x, ptr=PTR, seed=1), conv(x, ptr=PTR, seed=1), [*conv.parameters()])
    assert all(
        bool(grad.any())
        for grad in torch.autograd.grad(
            compiled(x, ptr=PTR, seed=1).sin().sum(), [*cast(Any, conv.source).head.parameters()]
        )
    )
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # dynamo's own, of the breaks
@pytest.mark.parametrize(
    ("attention", "options"),
    [("sbm", {"num_clusters": 4, "target_density": 0.3}), ("top_k", {"k": 4}), ("indexer", {"select": "bernoulli"}),
     *(pytest.param(*case, marks=pytest.mark.long) for case in (
         ("sbm", {"num_clusters": 4, "target_density": 0.3, "candidates": 2}),
         ("sbm", {"num_clusters": 4, "block_size": 4}), ("full", {}), ("window", {"size": 3}), ("lsh", {}),
         ("dcmm", {"num_clusters": 4})))],
)  # fmt: skip
def test_sources_that_look_at_values_break_the_graph(attention: str, options: dict[str, Any]) -> None:
    """And are no worse for it; asked for one graph, torch says where it breaks."""
    torch.manual_seed(0)
    encoder: Any = SequenceEncoder(15, 16, num_layers=1, dropout=0.0, attention=attention, attention_options=options)
    again, given = copy.deepcopy(encoder), (words(30), PTR)
    torch._dynamo.reset()
    compiled: Any = torch.compile(encoder, backend="eager")
    equal_with_gradients(
        compiled(*given, seed=1), again(*given, seed=1), [*again.parameters()], [*encoder.parameters()]
    )
    torch._dynamo.reset()
    with pytest.raises((Unsupported, UserError)):
        torch.compile(encoder, backend="eager", fullgraph=True, dynamic=True)(*given, seed=1)
    torch._dynamo.reset()


def test_one_graph_for_ragged_batches_and_options(compile_whole: Callable[..., Any]) -> None:
    conv = layer(dropout=0.2, concat=False, score_bias=lambda query, key, graph: graph.edge_index.sum(0).float().sin())
    compiled = compile_whole(conv)
    for n in (30, 40, 25):
        x, ptr = tokens(n), torch.tensor([0, 10, 17, n])
        graph = patterns.window(None, 2, ptr=ptr)
        arguments: dict[str, Any] = {"ptr": ptr, "seed": n, "return_graph": True, "return_attention_weights": True}
        (out, used, (_, alpha)), (expected, wanted, (_, weights)) = (
            compiled(x, graph, **arguments),
            conv(x, graph, **arguments),
        )
        equal_with_gradients(out, expected, [*conv.lin_value.parameters()])
        torch.testing.assert_close(alpha, weights)
        assert used == wanted


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # torch's own, of any autograd function it traces
@pytest.mark.parametrize("options", [{}, {"candidates": 2}], ids=["sampled", "candidates"])
def test_one_graph_for_a_whole_model(compile_whole: Callable[..., Any], options: dict[str, Any]) -> None:
    """Sampling is an op of the graph: its number of edges is not known before it runs."""
    model = classifier(**options)
    compiled = compile_whole(model)
    for n in (30, 40, 25):
        arguments = (words(n), torch.tensor([0, 10, 17, n]))
        equal_with_gradients(compiled(*arguments, seed=n), model(*arguments, seed=n), [*model.parameters()])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_one_graph_with_forced_edges(compile_whole: Callable[..., Any]) -> None:
    conv = layer(window=2, budget=5.0, estimator="mask")
    compiled = compile_whole(conv)
    for n in (30, 40, 25):
        arguments: dict[str, Any] = {"ptr": torch.tensor([0, 7, n]), "seed": n}
        equal_with_gradients(compiled(tokens(n), **arguments), conv(tokens(n), **arguments), [*conv.parameters()])
    with pytest.raises(RuntimeError, match="Expected 'ptr' to run from 0 to the number of tokens"):
        compiled(tokens(30), ptr=torch.tensor([0, 7, 31]), seed=1)


def padded(**options: Any) -> SBMMultiheadAttention:
    torch.manual_seed(0)
    usual: dict[str, Any] = {} if "source" in options else {"num_clusters": 4}
    return SBMMultiheadAttention(16, 2, batch_first=True, **usual | options)


def padded_call(kind: str, n: int) -> dict[str, Any]:
    """Three sequences, padded to n tokens, without weights: torch does not trace sparse tensors."""
    lengths = torch.tensor([n, n - 3, 4])
    padding, causal = torch.arange(n) >= lengths[:, None], torch.ones(n, n, dtype=torch.bool).triu(1)
    arguments: dict[str, Any] = {"key_padding_mask": padding, "need_weights": False, "seed": n}
    if kind == "boolean masks":
        arguments["attn_mask"] = causal
    elif kind == "floating masks":
        arguments["attn_mask"] = torch.zeros(n, n).masked_fill(causal, -torch.inf)
        arguments["key_padding_mask"] = torch.zeros(3, n).masked_fill(padding, -torch.inf)
    elif kind == "a graph":
        arguments |= {"graph": patterns.window(None, 1, ptr=ragged.offsets(lengths)), "is_causal": True}
    elif kind == "no padding":
        del arguments["key_padding_mask"]
    return arguments


def equal_over_padded_batches(compiled: Any, attention: SBMMultiheadAttention, kind: str, cross: bool = False) -> None:
    for n in (10, 13, 8):
        x = tokens(3 * n).view(3, n, 16).requires_grad_()
        query, arguments = tokens(15, seed=2).view(3, 5, 16) if cross else x, padded_call(kind, n)
        out, expected = (layer(query, x, x, **arguments)[0] for layer in (compiled, attention))
        equal_with_gradients(out, expected, [x, *attention.parameters()])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "num_clusters"),
    [("boolean masks", 4), ("floating masks", None),
     *(pytest.param(kind, 4, marks=pytest.mark.long) for kind in ("floating masks", "a graph", "no padding"))],
)  # fmt: skip
def test_one_graph_for_padded_batches(kind: str, num_clusters: int | None, compile_whole: Callable[..., Any]) -> None:
    attention = padded(**({"source": None} if num_clusters is None else {}))
    equal_over_padded_batches(compile_whole(attention), attention, kind)


def test_one_graph_for_padded_memories(compile_whole: Callable[..., Any]) -> None:
    attention = padded(source=None)
    equal_over_padded_batches(compile_whole(attention), attention, "key padding", cross=True)


def test_compiled_code_checks_masks_when_it_runs(compile_whole: Callable[..., Any]) -> None:
    layer, x = padded().eval(), tokens(30).view(3, 10, 16)
    compiled, call = compile_whole(layer), padded_call("floating masks", 10)
    padding, mask = call["key_padding_mask"], call["attn_mask"]
    with torch.no_grad():
        compiled(x, x, x, **call)
        for name, wrong, message in (
            ("key_padding_mask", padding + 1, "Expected 'key_padding_mask' to hold 0 and minus infinity alone"),
            ("attn_mask", mask * torch.nan, "Expected 'attn_mask' to hold 0 and minus infinity alone"),
        ):
            with pytest.raises(RuntimeError, match=message):
                compiled(x, x, x, **{**call, name: wrong})
        call["key_padding_mask"] = padding.index_fill(0, torch.tensor([1]), -torch.inf)  # a sequence of padding alone
        torch.testing.assert_close(compiled(x, x, x, **call)[0], layer(x, x, x, **call)[0])


def test_compiled_code_checks_sizes_when_it_runs(compile_whole: Callable[..., Any]) -> None:
    compiled, x = compile_whole(padded().eval()), tokens(30).view(3, 10, 16)
    call = padded_call("a graph", 10)
    with torch.no_grad():
        compiled(x, x, x, **call)
        for ends in ([0, 10, 17, 22], [0, 9, 17, 21]):  # another number of tokens, other sequences
            wrong = patterns.window(None, 1, ptr=torch.tensor(ends))
            with pytest.raises(RuntimeError, match="Expected 'graph' over the sequences of the real tokens"):
                compiled(x, x, x, **{**call, "graph": wrong})


def test_a_seed_may_be_drawn_inside(compile_whole: Callable[..., Any]) -> None:
    conv = layer().eval()
    conv.eval_seed = None
    compiled = compile_whole(conv)
    state = torch.get_rng_state()
    with torch.no_grad():
        torch.manual_seed(1)
        first = compiled(tokens())
        second = compiled(tokens())
    torch.set_rng_state(state)
    assert not torch.equal(first, second)


def test_inductor_over_a_graph(compile_whole: Callable[..., Any]) -> None:
    conv = layer()
    compiled = compile_whole(conv, "inductor")
    for n, reach in ((30, 1), (35, 4)):
        x, graph = tokens(n).requires_grad_(), patterns.window(n, reach)
        equal_with_gradients(compiled(x, graph), conv(x, graph), [x, conv.lin_key.weight])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_inductor_of_a_model_that_samples(compile_whole: Callable[..., Any]) -> None:
    """Forward alone, for compilers of C++ take their time; `test_one_graph_for_a_whole_model` has the gradients."""
    model = classifier().eval()
    compiled = compile_whole(model, "inductor")
    with torch.no_grad():
        for n in (30, 40):
            arguments = (words(n), torch.tensor([0, 10, 17, n]))
            torch.testing.assert_close(compiled(*arguments, seed=n), model(*arguments, seed=n))


class Twice(torch.nn.Module):
    """Two layers in sequence, called alike."""

    def __init__(self, make: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([make(), make()])

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        for layer in self.layers:
            padded = isinstance(layer, SBMMultiheadAttention)
            x = layer(x, x, x, **options)[0] if padded else layer(x, *arguments, **options)
        return x


def encoder(num_clusters: int) -> torch.nn.TransformerEncoder:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    made = torch.nn.TransformerEncoder(layer, 2)
    for each in made.layers:
        each.self_attn = SBMMultiheadAttention.from_torch(each.self_attn, num_clusters=num_clusters)
    return made


STACKS: dict[str, Callable[[], torch.nn.Module]] = {
    "key padding": lambda: Twice(padded), "boolean masks": lambda: Twice(lambda: padded(source=None)),
    "no padding": lambda: Twice(lambda: padded(source=None)), "a graph": lambda: Twice(lambda: padded(source=None)),
    "edge_index": lambda: Twice(lambda: layer(source=None)), "encoder": lambda: encoder(4),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "training", "dynamic"),
    [("encoder", True, True), ("key padding", False, None),
     *(pytest.param(kind, True, True, marks=pytest.mark.long) for kind in [*STACKS][:-1]),
     pytest.param("encoder", False, None, marks=pytest.mark.long)],
)  # fmt: skip
def test_inductor_of_layers_over_one_mask(kind: str, training: bool, dynamic: bool | None) -> None:
    """Each layer knows the sizes that depend on its values, though torch merges what two of them compute alike."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = STACKS[kind]().train(training)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for n in (10, 13):
        x, arguments, options = tokens(3 * n).view(3, n, 16), [], padded_call(kind, n)
        if kind == "edge_index":
            x, arguments, options = tokens(n), [patterns.window(n, 2).edge_index], {}
        elif kind == "encoder":
            options = {"src_key_padding_mask": options["key_padding_mask"]}
        elif kind in ("a graph", "no padding"):
            options["attn_mask"] = torch.ones(n, n, dtype=torch.bool).triu(1)
        x.requires_grad_()
        outs = []
        for call in (compiled, model):
            torch.manual_seed(n)  # of the seeds that an encoder lets its layers draw
            outs.append(call(x, *arguments, **options))
        equal_with_gradients(outs[0], outs[1], [x, *model.parameters()])
    torch._dynamo.reset()


# ------------------------------------------------------------------ exported


def test_export_with_dynamic_length() -> None:
    model = classifier().eval()
    length, batch = torch.export.Dim("length", min=2, max=64), torch.export.Dim("batch", min=3)
    shapes = {"tokens": {0: length}, "ptr": {0: batch}, "seed": None}
    with torch.no_grad():
        program = torch.export.export(model, (words(30), PTR), {"seed": 5}, dynamic_shapes=shapes).module()
        for n in (30, 50, 26):
            ptr = torch.tensor([0, 4, 10, 17, n])
            torch.testing.assert_close(program(words(n), ptr, seed=5), model(words(n), ptr, seed=5))
        with pytest.raises(
            AssertionError, match=r"Guard failed: ptr.size\(\)\[0\] >= 3"
        ):  # one sequence is a program of its own
            program(words(30), PTR[[0, 3]], seed=5)
        with pytest.raises(AssertionError, match=r"Guard failed: tokens.size\(\)\[0\] <= 64"):
            program(words(70), torch.tensor([0, 30, 70]), seed=5)
        one = torch.export.export(
            model, (words(30),), {"seed": 5}, dynamic_shapes={"tokens": {0: length}, "seed": None}
        ).module()
        torch.testing.assert_close(one(words(41), seed=5), model(words(41), seed=5))
        with pytest.raises(torch._dynamo.exc.UserError, match=r"batch = Dim\('batch', min=3\)"):
            torch.export.export(
                model, (words(30), PTR), {"seed": 5},
                dynamic_shapes={**shapes, "ptr": {0: torch.export.Dim("batch", min=2)}},
            )  # fmt: skip


@pytest.mark.parametrize(("attention", "is_causal"), [("full", False), ("sbm", True)])
def test_dense_attention_exports_with_dynamic_lengths(attention: str, is_causal: bool) -> None:
    options = {"num_clusters": 4, "target_density": 1.0} if attention == "sbm" else {}
    made = SequenceEncoder(15, 8, attention=attention, attention_options=options, is_causal=is_causal, max_length=64)
    model = SequenceClassifier(made, 3).eval()
    shapes = {"tokens": {0: torch.export.Dim("length", min=2, max=64)}, "ptr": {0: torch.export.Dim("batch", min=3)}}
    with torch.no_grad():
        program = torch.export.export(model, (words(30), PTR), dynamic_shapes=shapes).module()
        for ptr in (torch.tensor([0, 4, 30]), torch.tensor([0, 10, 11, 17, 50])):
            tokens = words(int(ptr[-1]))
            torch.testing.assert_close(program(tokens, ptr), model(tokens, ptr))


class Cross(torch.nn.Module):
    """A layer over a pair of tokens, with positional arguments alone."""

    def __init__(self, conv: SBMAttentionConv) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, key: Tensor, query: Tensor, key_ptr: Tensor, query_ptr: Tensor) -> Tensor:
        return self.conv((key, query), ptr=(key_ptr, query_ptr), seed=0)


@pytest.mark.parametrize(("is_causal", "biased"), [(False, True), (True, False)])
def test_dense_cross_attention_exports_with_positions_of_each_side(is_causal: bool, biased: bool) -> None:
    model = Cross(layer(target_density=1.0, is_causal=is_causal, score_bias=ALiBi(2) if biased else None)).eval()
    given = tokens(14), tokens(9, seed=2), torch.tensor([0, 8, 14]), torch.tensor([0, 4, 9])
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(model, given).module()(*given), model(*given))


def test_export_without_a_seed_has_the_one_of_the_model_or_draws_one_in_each_call() -> None:
    model = classifier().eval()
    outputs = []
    for model.encoder.eval_seed in (0, None):
        with torch.no_grad():
            program = torch.export.export(model, (words(30),)).module()
            for seed in (1, 1, 2):
                torch.manual_seed(seed)
                outputs.append(program(words(30)))
    model.encoder.eval_seed = 0
    torch.testing.assert_close(outputs[0], model(words(30)))
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[3], outputs[4])
    assert not torch.equal(outputs[3], outputs[5])


def test_second_derivatives_edge_by_edge_are_those_of_dense_attention() -> None:
    conv, graph = SBMAttentionConv(16, 8, 2, num_clusters=4).double(), patterns.window(30, 2)
    x = tokens().double().requires_grad_()

    def dense(x: Tensor) -> Tensor:
        lins = (conv.lin_query, conv.lin_key, conv.lin_value)
        query, key, value = (lin(x).unflatten(1, (2, 8)).transpose(0, 1) for lin in lins)
        weights = (query @ key.mT * conv.scale).masked_fill(~graph.to_dense(0), -torch.inf).softmax(2)
        return (weights @ value).transpose(0, 1).flatten(1)

    def penalty(attend: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        (grad,) = torch.autograd.grad(attend(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, conv.lin_query.weight, conv.lin_value.weight])

    with pytest.raises(RuntimeError, match=r"Trying to backward through sbm_pyg\.edge_attention_backward"):
        penalty(lambda x: conv(x, graph))  # as docs/guides/compile.md says
    conv.fuse = False
    torch.testing.assert_close(penalty(lambda x: conv(x, graph)), penalty(dense))


# ------------------------------------------------------------------ low precision


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.bfloat16, {}), (torch.float16, {"estimator": "mask"}), (torch.bfloat16, {"block_size": 4}),
     (torch.float16, {"estimator": "mask", "normalizer": "entmax15"})],
)  # fmt: skip
def test_autocast(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Against the same graph in single precision, within a few units in the last place of the largest value."""
    conv, x = layer(**options), tokens()
    with torch.autocast("cpu", dtype=dtype):
        out, graph = conv(x, ptr=PTR, seed=1, return_graph=True)
    assert out.dtype == dtype
    bound = 8 * torch.finfo(dtype).eps * float(conv.lin_value(x).detach().abs().max())
    torch.testing.assert_close(out.float(), conv(x, graph), rtol=0, atol=bound)
    out.float().sin().sum().backward()
    grads = {name: parameter.grad for name, parameter in conv.named_parameters()}
    assert all(grad is not None and grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads.values())
    projections = [conv.lin_query.weight, conv.lin_key.weight, conv.lin_value.weight]
    single = torch.autograd.grad(conv(x, graph).sin().sum(), projections)
    with torch.autocast("cpu", dtype=dtype):
        out = conv(x, graph)
    for grad, wanted in zip(torch.autograd.grad(out.float().sin().sum(), projections), single, strict=True):
        assert (grad - wanted).norm() < 16 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_a_model(dtype: torch.dtype) -> None:
    model = classifier()
    with torch.autocast("cpu", dtype=dtype):
        logits, trace = model(words(30), PTR, seed=1, return_trace=True)
        loss = F.cross_entropy(logits, torch.tensor([0, 1, 2])) + trace.density_loss()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# ------------------------------------------------------------------ no values, other parameters


def test_meta_tensors() -> None:
    conv, x, graph = layer().to("meta"), tokens().to("meta"), patterns.window(None, 2, ptr=PTR).to("meta")
    out, (edge_index, alpha) = conv(x, graph, ptr=PTR.to("meta"), return_attention_weights=True)
    assert (out.shape, out.device.type, edge_index.shape, alpha.shape) == (
        (30, 16), "meta", (2, 2 * graph.num_edges), (2 * graph.num_edges,),
    )  # fmt: skip


def test_fake_tensors() -> None:
    """Shapes without memory; the number of edges of a sampled graph is a symbol."""
    conv, graph = layer(), patterns.window(30, 2)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        assert conv(tokens(), graph).shape == (30, 16)
        out, sampled = conv(tokens(), seed=1, return_graph=True)
        assert out.shape == (30, 16)
        assert sampled.rowptr.shape == (61,)
        assert isinstance(sampled.col.size(0), torch.SymInt)


def test_functional_call() -> None:
    conv, x, graph = layer(), tokens(), patterns.window(30, 2)
    doubled = {name: (2 * parameter).detach().requires_grad_() for name, parameter in conv.named_parameters()}
    out = torch.func.functional_call(conv, doubled, (x, graph))
    other = layer()
    other.load_state_dict({name: parameter.detach() for name, parameter in doubled.items()})
    assert torch.equal(out, other(x, graph))
    assert not torch.equal(out, conv(x, graph))
    (grad,) = torch.autograd.grad(out.sin().sum(), doubled["lin_value.weight"])
    assert torch.equal(grad, torch.autograd.grad(other(x, graph).sin().sum(), other.lin_value.weight)[0])
    sampled = torch.func.functional_call(conv, doubled, (x,), {"seed": 1})
    assert torch.equal(sampled, other(x, seed=1))


def test_vmap_over_what_decides_the_number_of_edges_is_refused() -> None:
    """Each of the many would have a size of its own."""
    graph, x = patterns.window(30, 2), torch.stack([tokens(seed=seed) for seed in range(3)])
    mask = torch.ones(3, 30, 30)
    choosers: list[tuple[Callable[..., Any], Tensor, str]] = [
        (lambda x: selectors.top_k(Tokens(x[None]), 3).col, x, "query"),
        (lambda rate: ops.sample_sbm(rate, rate, PTR, PTR, torch.arange(3), 1)[1], x.sigmoid()[:, None], "rate"),
        (lambda mask: AttentionGraph.from_dense(mask).col, mask, "mask"),
        (lambda kept: graph.select(kept).col, torch.ones(3, graph.num_edges, dtype=torch.bool), "mask"),
        (lambda ends: AttentionGraph.from_edge_index(ends, 30).col, torch.stack([graph.edge_index] * 3), "edge_index"),
    ]
    sampling: list[dict[str, Any]] = [{}, {"block_size": 4}, {"target_density": 0.2}]
    made: list[Any] = [layer(**options) for options in sampling]
    choosers += [(partial(each, seed=1), x, "query") for each in made]
    for choose, many, name in choosers:
        with pytest.raises(ValueError, match=rf"Expected '{name}' outside of `torch.vmap`.*as `ptr`"):
            torch.func.vmap(choose)(many)


def test_vmap_over_tokens_without_a_seed_is_refused_alike() -> None:
    many, conv = torch.randn(2, 10, 6), SBMAttentionConv(6, 4, 2, num_clusters=3)
    for randomness in ("error", "different"):
        with pytest.raises(ValueError, match=r"Expected 'query' outside of `torch.vmap`"):
            torch.func.vmap(conv, randomness=randomness)(many)


def test_vmap_over_tokens() -> None:
    graph, x = patterns.window(30, 2), torch.stack([tokens(seed=seed) for seed in range(3)])
    conv: Any = layer()
    found = torch.func.vmap(partial(conv, seed=1), in_dims=(0, None))(x, graph)
    torch.testing.assert_close(found, torch.stack([conv(each, graph, seed=1) for each in x]))


@pytest.mark.parametrize("options", [{}, {"target_density": 0.3}, {"block_size": 4}])
def test_blocks_under_fully_sharded_data_parallel(options: dict[str, Any], tmp_path: Path) -> None:
    """Each returns tokens alone, of which FSDP has nothing to warn."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, plain = classifier(**options), classifier(**options)
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for block in model.encoder.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        outs = [each(words(30), PTR, seed=1) for each in (model, plain)]
        torch.testing.assert_close(*outs)
        for out in outs:
            out.sin().sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(cast(Any, mine.grad).full_tensor(), theirs.grad)
    finally:
        torch.distributed.destroy_process_group()


def test_every_op_is_checked_against_the_dispatcher() -> None:
    """``test_ops.test_opcheck`` runs `torch.library.opcheck` over this table."""
    declared = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("sbm_pyg::")}
    assert {name.split(".")[0] for name in declared} == {*_samples()}


def test_forbidden_edges_are_no_edges() -> None:
    """A score bias of minus infinity, in the kernel and in the reference, even where it takes all edges of a query."""
    graph = AttentionGraph.from_dense(torch.ones(2, 3, 4))
    query, key, value = (torch.randn(2, n, 8, dtype=torch.float64, requires_grad=True) for n in (3, 4, 4))
    bias = torch.zeros(24, dtype=torch.float64)
    bias[:4] = bias[6] = bias[20] = -torch.inf
    left = graph.select(bias == 0)
    expected, lse = ops.edge_attention(query, key, value, left.rows)
    wanted = torch.autograd.grad(expected.sin().sum(), [query, key, value])
    arguments = (query, key, value, graph.rowptr, graph.col, None, bias)
    options = (1.0, "score", 0.0, 0)
    out, log_sum = ops.schemas.edge_attention(*arguments, *options)
    torch.testing.assert_close((out, log_sum), (expected, lse))
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), [query, key, value]), wanted)
    with torch.no_grad():
        torch.testing.assert_close(reference_edges.edge_attention(*arguments, *options), (expected, lse))
        grads = reference_edges.edge_attention_backward(
            expected.cos(), *arguments, expected, lse, *options, False, False
        )
    torch.testing.assert_close(grads[:3], wanted)


@pytest.mark.parametrize("fuse", [True, False])
def test_a_score_bias_may_forbid_edges(fuse: bool) -> None:
    graph, x = patterns.window(30, 2, heads=2), tokens().double().requires_grad_()
    bias = torch.zeros(graph.num_edges, dtype=torch.float64)
    bias[:3] = bias[7] = bias[-1] = -torch.inf  # all three edges of the first query
    left = graph.select(bias == 0)
    conv = layer(
        score_bias=lambda query, key, given: bias if given.num_edges == graph.num_edges else bias[bias == 0]
    ).double()
    conv.fuse = fuse
    out, (_, alpha) = conv(x, graph, return_attention_weights=True)
    expected, (_, weights) = conv(x, left, return_attention_weights=True)
    torch.testing.assert_close(out, expected)
    assert out[0, :8].eq(0).all()
    torch.testing.assert_close(alpha[bias == 0], weights)
    assert alpha[bias != 0].eq(0).all()
    grads = (torch.autograd.grad(y.sin().sum(), x)[0] for y in (out, expected))
    torch.testing.assert_close(*grads)
