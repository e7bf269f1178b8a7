"""Sequence models: what they return, what a batch must not change, and that they learn."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from problems import refuses
from torch import Tensor, nn
from torch.nn import functional as F

from sbm_pyg import (
    SBM,
    AttentionConv,
    Choice,
    EncoderTrace,
    FullAttention,
    MaskedLM,
    PairClassifier,
    SequenceClassifier,
    SequenceEncoder,
    TokenClassifier,
    mask_tokens,
    ops,
)
from sbm_pyg.sources import patterns

PTR = torch.tensor([0, 10, 17, 30])
TOKENS = torch.randint(0, 15, (30,), generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, dict] = {
    "sbm": {"num_clusters": 4, "dropout": 0.1}, "full": {"dropout": 0.1}, "window": {"size": 2},
    "bigbird": {"num_random": 1, "dropout": 0.1}, "top_k": {"k": 3, "dropout": 0.1}, "block_top_k": {"k": 2, "block_size": 4},
    "lsh": {"chunk_size": 4}, "routing": {"num_clusters": 3}, "indexer": {"index_heads": 2, "target_density": 0.5},
    "key_selection": {"hidden": 4, "target_density": 0.3}, "dcmm": {"num_clusters": 4, "dropout": 0.1},
}  # fmt: skip


def encoder(attention: str = "sbm", **options: object) -> SequenceEncoder:
    torch.manual_seed(0)
    return SequenceEncoder(15, 16, attention=attention, attention_options=OPTIONS[attention], max_length=40, **options)  # type: ignore[arg-type]


def test_only_density_above_the_floor_costs() -> None:
    """Two heads of constant probabilities, one below the floor and one above it."""
    chance = torch.tensor([0.1, 0.5], requires_grad=True)
    sbm = SBM(
        chance[:, None, None].expand(2, 6, 1), torch.ones(2, 6, 1), torch.ones(2, 1, 1), torch.tensor([0, 6]),
        torch.tensor([0, 6]),
    )  # fmt: skip
    trace = EncoderTrace((Choice(patterns.full(6, heads=2), sbm),), (1, 2))
    for floor, loss, gradient in [(0.0, 0.3, [0.5, 0.5]), (0.2, 0.15, [0.0, 0.5]), (0.6, 0.0, [0.0, 0.0])]:
        found = trace.density_loss(floor)
        assert found.item() == pytest.approx(loss)
        assert torch.autograd.grad(found, chance, retain_graph=True)[0].tolist() == pytest.approx(gradient)
    refuses(lambda: trace.density_loss(2), "Expected 'floor' in [0, 1] (got 2)")


@pytest.mark.parametrize("attention", OPTIONS)
def test_trace_and_shapes(attention: str) -> None:
    model = SequenceClassifier(encoder(attention), 10).eval()
    logits, trace = model(TOKENS, PTR, seed=1, return_trace=True)
    assert logits.shape == (3, 10)
    assert isinstance(trace, EncoderTrace)
    assert trace.density.shape == trace.expected_density.shape == (2, 3, 2)
    assert torch.equal(model(TOKENS, PTR, seed=1), logits)
    if attention == "sbm":
        by_hand = [cast(Any, choice).probability.expected_density() for choice in trace.choices]
        torch.testing.assert_close(trace.density_loss(), torch.stack(by_hand).mean())
        trace.density_loss().backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        assert grads["encoder.layers.0.attention.source.head.clusters"].any()  # type: ignore[union-attr]
        torch.testing.assert_close(
            trace.density, torch.stack([graph.density for graph in trace.graphs if graph is not None])
        )
    else:
        known = {choice is not None and choice.probability is not None for choice in trace.choices}
        assert known == {attention in ("indexer", "key_selection")}
    if attention == "full":
        assert trace.graphs == (None, None)
        assert trace.density.eq(1).all()


@pytest.mark.parametrize("attention", OPTIONS)
def test_a_sequence_is_encoded_alike_in_any_batch(attention: str) -> None:
    model = encoder(attention).eval().double()
    sequence_ids = torch.tensor([7, 2, 11])
    together = model(TOKENS, PTR, seed=3, sequence_ids=sequence_ids)
    for number, (start, end) in enumerate(itertools.pairwise(PTR)):
        alone = model(TOKENS[start:end], seed=3, sequence_ids=sequence_ids[number : number + 1])
        torch.testing.assert_close(alone, together[start:end], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_full_attention_takes_sequences_of_other_lengths_apart(
    is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    dense = FullAttention(16, 8, 2, is_causal=is_causal).double()
    lengths = torch.tensor([4] * 30 + [200] + [3] * 30)
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    x = torch.randn(int(ptr[-1]), 16, dtype=torch.float64, requires_grad=True)
    sizes: list[int] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, *rest: Any, **options: Any) -> Tensor:
        sizes.append(query.size(0) * query.size(2))
        return attention(query, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    out = dense(x, ptr=ptr)
    assert sizes == [60 * 4, 200]
    alone = torch.cat(
        [dense(x[start:end], ptr=torch.tensor([0, end - start])) for start, end in itertools.pairwise(ptr)]
    )
    torch.testing.assert_close(out, alone, rtol=1e-12, atol=1e-12)
    conv = AttentionConv(16, 8, 2).double()
    conv.load_state_dict(dense.state_dict())
    torch.testing.assert_close(
        out, conv(x, patterns.full(None, ptr=ptr, is_causal=is_causal), ptr=ptr), rtol=1e-12, atol=1e-12
    )
    grads = [torch.autograd.grad(each.sin().sum(), [x, *dense.parameters()]) for each in (out, alone)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_layers_sample_apart_and_seeds_fix_them() -> None:
    model = encoder().eval()
    _, trace = model(TOKENS, PTR, seed=1, return_trace=True)
    _, again = model(TOKENS, PTR, seed=1, return_trace=True)
    assert trace.graphs[0] == again.graphs[0]
    assert trace.graphs[0] != trace.graphs[1]
    same = trace.graphs[0].to_dense(0) == trace.graphs[1].to_dense(0)
    assert float(same.double().mean()) < 0.9  # p = 1/4 twice: agreement by chance is 0.63


def test_evaluation_of_a_model_repeats_and_its_layers_draw_apart() -> None:
    encoder = SequenceEncoder(15, 16, attention_options={"num_clusters": 4}).eval()
    tokens = torch.randint(15, (30,))
    first, second = (encoder(tokens, return_trace=True)[1].choices for _ in range(2))
    assert [choice.graph for choice in first] == [choice.graph for choice in second]
    seeds: list[int | None] = []
    for layer in cast(Any, encoder.layers):
        layer.attention.register_forward_pre_hook(lambda *call: seeds.append(call[2]["seed"]), with_kwargs=True)
    encoder(tokens)
    assert len({*seeds}) == 2
    encoder.eval_seed = None
    assert encoder(tokens, return_trace=True)[1].graphs != encoder(tokens, return_trace=True)[1].graphs
    encoder.train()
    seeds.clear()
    encoder(tokens)
    assert seeds == [None, None]


@pytest.mark.parametrize("attention", ["sbm", "full", "dcmm", "window", "top_k", "indexer"])
@pytest.mark.parametrize("encoding", ["learned", "rotary"])
def test_texts_may_be_empty(attention: str, encoding: str) -> None:
    torch.manual_seed(0)
    options = {"num_clusters": 3} if attention in ("sbm", "dcmm") else {}
    encoder = SequenceEncoder(15, 16, attention=attention, attention_options=options, position_encoding=encoding).eval()
    heads = SequenceClassifier(encoder, 3).eval(), TokenClassifier(encoder, 3).eval(), MaskedLM(encoder).eval()
    tokens, ptr, ids = torch.randint(15, (9,)), torch.tensor([0, 0, 4, 4, 9]), torch.tensor([1, 3])
    for head in heads:
        out, trace = head(tokens, ptr, return_trace=True)
        expected = head(tokens, torch.tensor([0, 4, 9]), sequence_ids=ids)
        torch.testing.assert_close(out[[1, 3]] if head is heads[0] else out, expected)
        assert out.isfinite().all()
        assert trace.density.shape == (2, 4, 2)
        (out.sin().sum() + trace.density_loss()).backward()
        for nothing in (torch.tensor([0]), torch.tensor([0, 0, 0]), None):
            out = head(tokens[:0], nothing)
            sequences = 1 if nothing is None else nothing.numel() - 1
            assert out.shape == (sequences if head is heads[0] else 0, head.num_classes)
            assert out.isfinite().all()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in encoder.parameters())
    pair = PairClassifier(encoder, 3).eval()
    assert pair((tokens, tokens[:4]), (ptr, torch.tensor([0, 1, 1, 1, 4]))).isfinite().all()
    assert pair((tokens[:0], tokens[:0]), (torch.tensor([0]), torch.tensor([0]))).shape == (0, 3)


def test_pair_classifier() -> None:
    model = PairClassifier(encoder(), 2).eval()
    logits, trace = model((TOKENS, TOKENS), (PTR, PTR), seed=1, sequence_ids=torch.tensor([0, 1, 2]), return_trace=True)
    assert logits.shape == (3, 2)
    assert len(trace.graphs) == 4
    assert trace.graphs[0] != trace.graphs[2]  # the two sides of a pair do not share their random stream
    x0 = model.encoder(TOKENS, PTR, seed=1, sequence_ids=torch.tensor([0, 2, 4]))
    x1 = model.encoder(TOKENS, PTR, seed=1, sequence_ids=torch.tensor([1, 3, 5]))
    m0, m1 = (torch.stack([x[a:b].mean(0) for a, b in itertools.pairwise(PTR)]) for x in (x0, x1))
    torch.testing.assert_close(logits, model.classifier(torch.cat([m0, m1, m0 * m1, m0 - m1], 1)))
    with pytest.raises(ValueError, match=r"as many second as first sequences \(got 3 and 1\)"):
        model((TOKENS, TOKENS), (PTR, torch.tensor([0, 30])))


def test_the_sides_of_a_pair_sample_apart_without_streams_too() -> None:
    model = PairClassifier(encoder(), 2).eval()
    pair = (TOKENS, TOKENS), (PTR, PTR)
    logits, trace = model(*pair, seed=1, return_trace=True)
    same = trace.graphs[0].to_dense(0) == trace.graphs[2].to_dense(0)
    assert float(same.double().mean()) < 0.9
    assert torch.equal(logits, model(*pair, seed=1, sequence_ids=torch.arange(3, dtype=torch.int32)))
    assert not torch.equal(logits, model(*pair, seed=1, sequence_ids=torch.tensor([2**31 - 1, 2**31 - 2, 2**31 - 3])))
    with pytest.raises(ValueError, match=r"Expected 'sequence_ids' in 0 .. 2\*\*31-1 \(got 0 to 2147483648\)"):
        model(*pair, seed=1, sequence_ids=torch.tensor([0, 1, 2**31]))


def test_seeds_of_an_encoder() -> None:
    model = encoder().eval()
    assert torch.equal(model(TOKENS, PTR, seed=np.int64(2**62)), model(TOKENS, PTR, seed=2**62))


@pytest.mark.slow
def test_token_classifier_learns_to_copy_a_neighbor() -> None:
    """The label of a token is the parity of the one before it: needs attention by position, which a window gives."""
    torch.manual_seed(0)
    model = TokenClassifier(
        SequenceEncoder(
            8, 32, num_layers=1, max_length=12, dropout=0.0, attention="sbm",
            attention_options={"num_clusters": 8, "window": 1},
        ),
        2,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ptr = torch.arange(0, 12 * 33, 12)
    generator = torch.Generator().manual_seed(1)
    for _ in range(250):
        tokens = torch.randint(8, (32, 12), generator=generator)
        labels = tokens.roll(1, 1) % 2
        loss = F.cross_entropy(model(tokens.flatten(), ptr), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.1


def test_a_factory_makes_the_layers() -> None:
    class Mean(nn.Module):
        def __init__(self, channels: int, head_channels: int, heads: int) -> None:
            super().__init__()
            self.lin = nn.Linear(channels, heads * head_channels)

        def forward(self, x: Tensor, **_: object) -> tuple:
            return self.lin(x.mean(0, keepdim=True)).expand(len(x), -1), None

    model = SequenceEncoder(15, 16, attention=Mean, max_length=40)
    out, trace = model(TOKENS, PTR, return_trace=True)
    assert out.shape == (30, 16)
    assert float(trace.density_loss()) == 1


@pytest.mark.parametrize("attention", OPTIONS)
def test_models_copy_and_pickle(attention: str) -> None:
    model = SequenceClassifier(encoder(attention), 3).eval()
    expected = model(TOKENS, PTR, seed=1)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(clone(TOKENS, PTR, seed=1), expected)


def test_embeddings_start_at_unit_spread() -> None:
    model = SequenceEncoder(5000, 32)
    assert float(model.token.weight.detach().std()) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "ptr", "error", "message"),
    [
        (torch.tensor([0, 15]), None, ValueError, r"Expected 'tokens' in 0..14, the vocabulary \(got 0 to 15\)"),
        (torch.tensor([-1, 3]), None, ValueError, r"Expected 'tokens' in 0..14, the vocabulary \(got -1 to 3\)"),
        (torch.zeros(41, dtype=torch.long), None, ValueError,
         r"Expected sequences of at most max_length = 40 tokens \(got 41\)"),
    ],
)  # fmt: skip
def test_input_errors(tokens: Tensor, ptr: Tensor | None, error: type[Exception], message: str) -> None:
    for model in (encoder(), SequenceClassifier(encoder(), 2), TokenClassifier(encoder(), 2)):
        with pytest.raises(error, match=message):
            model(tokens, ptr)


def test_features_have_the_channels_of_the_encoder() -> None:
    features = SequenceEncoder(None, 8, in_channels=3)
    assert (features.num_tokens, features.in_channels) == (None, 3)
    with pytest.raises(ValueError, match=r"Expected 'tokens' to be \[N, in_channels\] .* They are features"):
        features(torch.zeros(4, 2))
    words = SequenceEncoder(9, 8)
    assert (words.num_tokens, words.in_channels) == (9, None)


@pytest.mark.parametrize("name", ["tokens", "ptr", "batch", "positions"])
def test_pairs_are_pairs(name: str) -> None:
    given: dict[str, Any] = {"tokens": (TOKENS, TOKENS), "ptr": (PTR, PTR)}
    with pytest.raises(
        TypeError, match=rf"Expected '{name}' to be a pair, of first and second sequences \(got Tensor\)"
    ):
        PairClassifier(encoder(), 2)(**given | {name: TOKENS})


X, PTR3, FULL = torch.ones(3, 4), torch.tensor([0, 3]), FullAttention(4, 2, 2)
ENCODERS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_tokens": None}, ValueError, r"Expected one of 'num_tokens' and 'in_channels' \(got neither\)"),
    ({"num_tokens": None, "in_channels": 0}, ValueError, r"Expected 'in_channels' to be at least 1 \(got 0\)"),
    ({"channels": True}, TypeError, r"Expected 'channels' to be an int \(got bool\)"),
    ({"channels": -2}, ValueError, r"Expected 'channels' to be at least 1 \(got -2\)"),
    ({"heads": 0}, ValueError, r"Expected 'heads' to be at least 1 \(got 0\)"),
    ({"heads": 128}, ValueError, r"Expected 'heads' to divide 'channels' \(got 128 and 64\)"),
    ({"heads": "2"}, TypeError, r"Expected 'heads' to be an int \(got str\)"),
    ({"num_layers": 2.0}, TypeError, r"Expected 'num_layers' to be an int \(got float\)"),
    ({"ffn_channels": -1}, ValueError, r"Expected 'ffn_channels' to be at least 1 \(got -1\)"),
    ({"max_length": 0}, ValueError, r"Expected 'max_length' to be at least 1 \(got 0\)"),
    ({"dropout": math.nan}, ValueError, r"Expected 'dropout' in \[0, 1\) \(got nan\)"),
    ({"dropout": None}, TypeError, r"Expected 'dropout' to be a number in \[0, 1\) \(got NoneType\)"),
    ({"attention": None}, TypeError, r"Expected 'attention' to be a name or a factory \(got NoneType\)"),
    ({"attention_options": [1]}, TypeError, r"Expected 'attention_options' to be a dict \(got list\)"),
    ({"attention_options": {"density": 0.1}}, ValueError, r"got \['density'\]\)\. Give the density to a Sparsifier\."),
    ({"attention": "full", "attention_options": {"num_clusters": 3}}, ValueError,
     r"Expected 'attention_options' of 'full' to be known \(got \['num_clusters'\]\)"),
    ({"attention": "bigbird", "attention_options": {"num_random": 1.5}}, TypeError,
     r"Expected 'num_random' to be an int \(got float\)"),
    ({"num_layers": 10**9}, ValueError,
     r"Expected 'num_layers' to ask for no more than memory holds \(got [\d,]+ parameters"),
    ({"num_layers": 10**7, "channels": 1, "heads": 1}, ValueError, r"Expected 'num_layers' .* \(got 10,000,000 layers"),
    ({"num_layers": 0}, ValueError, r"Expected 'num_layers' to be at least 1 \(got 0\)"),
    ({"attention": "window", "attention_options": {"blocks": 3}}, ValueError,
     r"Expected 'attention_options' of 'window' to be known \(got \['blocks'\]\)"),
    ({"attention": "linear"}, ValueError,
     r"Expected 'attention' to be one of \['sbm', .*'full', .*'window', .*'dcmm'\] or a factory \(got 'linear'\)"),
]  # fmt: skip
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *((lambda options=options: SequenceEncoder(**{"num_tokens": 15} | options), error, message)
      for options, error, message in ENCODERS),
    *((lambda kind=kind: kind(None, 2), TypeError, r"Expected 'encoder' to be a SequenceEncoder \(got NoneType\)")
      for kind in (SequenceClassifier, PairClassifier, TokenClassifier)),
    *((lambda kind=kind: kind(encoder(), None), TypeError, r"Expected 'num_classes' to be an int \(got NoneType\)")
      for kind in (SequenceClassifier, PairClassifier, TokenClassifier)),
    *((lambda kind=kind: kind(encoder(), 2, pool_length=1.5), TypeError,
       r"Expected 'pool_length' to be an int \(got float\)")
      for kind in (SequenceClassifier, PairClassifier)),
    (lambda: SequenceClassifier(encoder(), 0), ValueError, r"Expected 'num_classes' to be at least 1 \(got 0\)"),
    (lambda: EncoderTrace(cast(Any, [None]), (1, 2)), TypeError, "Expected 'choices' to be a tuple of Choice or None"),
    (lambda: EncoderTrace((), (1, 2)), ValueError, "Expected 'choices' to hold one Choice or None per layer"),
    (lambda: EncoderTrace((None,), cast(Any, [1, 2])), TypeError,
     "Expected 'shape' to be the numbers of sequences and heads"),
    (lambda: EncoderTrace((None, Choice(patterns.full(6, heads=2))), (1, 3)), ValueError,
     r"Expected 'choices' of 'shape' \(1, 3\) \(got \(1, 2\)\)"),
    (lambda: FULL(X[:, :3], ptr=PTR3), ValueError,
     r"Expected 'x' to be \[N, channels\] = \[any, 4\] \(got \[3, 3\]\)"),
    (lambda: FULL(X.long(), ptr=PTR3), TypeError, r"Expected 'x' to be floating point \(got torch.int64\)"),
    (lambda: FULL(X.bfloat16(), ptr=PTR3), TypeError,
     r"Expected 'x' to be torch.float32, as the layer's parameters are \(got torch.bfloat16\)"),
    (lambda: FULL(None, ptr=PTR3), TypeError, r"Expected 'x' to be a tensor \(got NoneType\)"),
    (lambda: FULL(X, ptr=None), TypeError, r"Expected 'ptr' to be a tensor \(got NoneType\)"),
    (lambda: AttentionConv(4, 2, 2, patterns.PatternSource(cast(Any, lambda n, ptr: None)))(X, ptr=PTR3), TypeError,
     r"Expected 'graph' to be an AttentionGraph \(got NoneType\)"),
    (lambda: patterns.PatternSource(cast(Any, 3)), TypeError, r"Expected 'rule' to be callable \(got int\)"),
    (lambda: FullAttention(4, 0, 2), ValueError, r"Expected 'head_channels' to be at least 1 \(got 0\)"),
    (lambda: FullAttention(4, 2, cast(Any, None)), TypeError, r"Expected 'heads' to be an int \(got NoneType\)"),
    (lambda: FullAttention(4, 2, 2, math.nan), ValueError, r"Expected 'dropout' in \[0, 1\) \(got nan\)"),
    (lambda: encoder()(TOKENS, PTR, positions=cast(Any, [0])), TypeError,
     r"Expected 'positions' to be a tensor \(got list\)"),
    (lambda: encoder()(TOKENS > 3), TypeError, r"Expected 'tokens' to be \[N\] int64 \(got \[30\] torch.bool\)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_refusals(
    call: Callable[[], Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops.checks, "available", lambda device: 2**34)
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("attention", "options"),
    [("routing", {"num_clusters": 2, "size": 3, "decay": 0.5, "window": 1}), ("top_k", {"k": 2, "window": 1}),
     ("block_top_k", {"k": 1, "block_size": 2, "window": 1}), ("lsh", {"num_buckets": 2, "rounds": 1, "window": 1})],
)  # fmt: skip
def test_options_of_a_source(attention: str, options: dict[str, Any]) -> None:
    model = SequenceEncoder(15, 16, attention=attention, attention_options={"bias": False, **options})
    source = cast(Any, model.layers[0]).attention.source
    held = {"window", "size", "decay"} & {*options}  # the rest belongs to the rule
    assert {name: getattr(source, name) for name in held} == {name: options[name] for name in held}
    _, trace = model(TOKENS, PTR, seed=0, return_trace=True)
    assert int(trace.graphs[0].degree.min()) >= 2  # the window is there


def test_places_and_pool_length_are_those_of_zeroed_padding() -> None:
    """Tokens left out, with places kept and a fixed divisor, equal masked tokens in a padded batch that is averaged over its length."""
    torch.manual_seed(0)
    encoder = SequenceEncoder(9, 8, max_length=12, dropout=0.0, attention="full")
    model = SequenceClassifier(encoder, 3, pool_length=12).eval()
    tokens = torch.randint(1, 9, (2, 12))
    kept = torch.rand(2, 12) < 0.6
    kept[:, 3] = True
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(1).cumsum(0)])
    positions = torch.arange(12).expand(2, 12)[kept]
    logits = model(tokens[kept], ptr, positions=positions)

    x = (
        encoder.token(tokens) + encoder.position.weight
    )  # the older way: nothing is removed, keys are masked, the rest is zeroed
    layers: Any = encoder.layers
    for block in layers:
        layer, hidden = block.attention, block.norm1(x)
        query, key, value = (
            lin(hidden).unflatten(2, (2, -1)).transpose(1, 2)
            for lin in (layer.lin_query, layer.lin_key, layer.lin_value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=kept[:, None, None])
        x = x + block.lin_out(attended.transpose(1, 2).flatten(2))
        x = x + block.ffn(block.norm2(x))
    pooled = (encoder.norm(x) * kept[..., None]).mean(1)
    torch.testing.assert_close(logits, model.classifier(pooled))


def test_sums_over_the_tokens_do_not_overflow_in_16_bits() -> None:
    torch.manual_seed(0)
    encoder = SequenceEncoder(
        9, 8, num_layers=1, attention="window", attention_options={"size": 1}, position_encoding="none"
    )
    model = SequenceClassifier(encoder, 3).eval()
    nn.init.constant_(encoder.norm.bias, 5.0)
    tokens = torch.randint(9, (20_000,))
    with torch.no_grad():
        wanted, found = model(tokens), model.half()(tokens)
    torch.testing.assert_close(found.float(), wanted, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("kind", [SequenceClassifier, TokenClassifier])
def test_classifiers_show_the_arguments_of_the_encoder(kind: type[nn.Module]) -> None:
    assert inspect.signature(kind.forward) == inspect.signature(SequenceEncoder.forward)
    assert "return_trace" in inspect.signature(kind.forward).parameters


@pytest.mark.parametrize("kind", [SequenceClassifier, PairClassifier, TokenClassifier])
def test_classifiers_take_a_batch_vector_and_places(kind: Any) -> None:
    model = kind(encoder(), 2).eval()
    batch = torch.repeat_interleave(PTR.diff())
    counted = torch.arange(30) - PTR[batch]

    def both(x: Tensor) -> Any:
        return (x, x) if kind is PairClassifier else x

    want = model(both(TOKENS), both(PTR), seed=1)
    assert torch.equal(model(both(TOKENS), batch=both(batch), positions=both(counted), seed=1), want)
    assert not torch.equal(model(both(TOKENS), batch=both(batch), positions=both(counted + 1), seed=1), want)


def test_places_are_checked() -> None:
    encoder = SequenceEncoder(9, 8, max_length=4)
    tokens = torch.tensor([1, 2])
    refuses(lambda: encoder(tokens, positions=torch.tensor([0, 4])), "Expected 'positions' in 0..3 (got 0 to 4)")
    with pytest.raises(
        ValueError, match=r"Expected 'positions' to be \[2\] int64, one for each token \(got \[1\] torch\.int64\)"
    ):
        encoder(tokens, positions=torch.tensor([0]))
    torch.testing.assert_close(encoder.eval()(tokens, seed=0), encoder(tokens, positions=torch.tensor([0, 1]), seed=0))
    refuses(lambda: SequenceClassifier(encoder, 2, pool_length=0), "Expected 'pool_length' to be at least 1 (got 0)")


def test_dcmm_is_the_score_bias_of_its_layers() -> None:
    """So there is no room for another."""
    with pytest.raises(
        ValueError, match=r"Expected 'attention_options' of 'dcmm' to be known \(got \['score_bias'\]\)"
    ):
        SequenceEncoder(9, 8, attention="dcmm", attention_options={"score_bias": lambda query, key, graph: None})


def test_each_head_of_bigbird_draws_keys_of_its_own() -> None:
    options = {"size": 0, "num_global": 0, "num_random": 3}
    encoder = SequenceEncoder(9, 8, num_layers=1, heads=2, attention="bigbird", attention_options=options)
    _, trace = encoder(torch.arange(40) % 9, seed=0, return_trace=True)
    graph = trace.graphs[0]
    assert graph is not None
    assert graph.heads == 2
    assert graph.head(0) != graph.head(1)


def test_masked_tokens_are_drawn_by_their_law() -> None:
    """A part is asked for; of these, parts are masked, drawn at random or left. Others stay, and special ones always."""
    tokens = torch.arange(100_000) % 50
    special = torch.tensor([3, 7])
    inputs, target_mask = mask_tokens(tokens, 50, 50, probability=0.2, masked=0.7, random=0.2, special=special, seed=5)
    assert torch.equal(inputs[~target_mask], tokens[~target_mask])
    assert not target_mask[torch.isin(tokens, special)].any()
    count = int((~torch.isin(tokens, special)).sum())
    found = inputs[target_mask]
    parts = (found == 50).float(), ((found != 50) & (found != tokens[target_mask])).float()
    for share, wanted, total in (
        (target_mask.sum() / count, 0.2, count),
        (parts[0].mean(), 0.7, len(found)),
        (parts[1].mean(), 0.2 * 49 / 50, len(found)),  # a random token may be the same
    ):
        assert abs(float(share) - wanted) < 6 * math.sqrt(wanted * (1 - wanted) / total)
    assert found.unique().numel() == 51
    again = mask_tokens(tokens, 50, 50, probability=0.2, masked=0.7, random=0.2, special=special, seed=5)
    assert torch.equal(inputs, again[0])
    assert torch.equal(target_mask, again[1])
    assert not torch.equal(mask_tokens(tokens, 50, 50, seed=6)[1], mask_tokens(tokens, 50, 50, seed=7)[1])
    assert mask_tokens(tokens.view(100, 1000), 50, 50)[0].shape == (100, 1000)


def test_masks_of_a_sequence_are_the_same_in_any_batch() -> None:
    """And drawn by the same law; each sequence has one at least, unless all of its tokens are special."""
    tokens, ptr = torch.arange(90_000) % 50, torch.tensor([0, 30_000, 30_000, 60_000, 90_000])
    law: dict[str, Any] = {"probability": 0.2, "masked": 0.7, "random": 0.2, "seed": 5}
    inputs, target_mask = mask_tokens(tokens, 50, 50, **law, ptr=ptr, sequence_ids=torch.tensor([7, 9, 2**34 + 7, 3]))
    found = inputs[target_mask]
    for share, wanted, total in (
        (target_mask.double().mean(), 0.2, 90_000), ((found == 50).double().mean(), 0.7, len(found)),
        (((found != 50) & (found != tokens[target_mask])).double().mean(), 0.2 * 49 / 50, len(found)),
    ):  # fmt: skip
        assert abs(float(share) - wanted) < 6 * math.sqrt(wanted * (1 - wanted) / total)
    assert found.unique().numel() == 51
    parts = target_mask.double().view(3, -1)
    assert (
        torch.corrcoef(parts).fill_diagonal_(0).abs().max() < 6 / 30_000**0.5
    )  # the first two differ in the upper half
    assert abs(torch.corrcoef(torch.stack([parts[0, 1:], parts[0, :-1]]))[0, 1]) < 6 / 30_000**0.5
    alone = mask_tokens(tokens[60_000:], 50, 50, **law, ptr=torch.tensor([0, 30_000]), sequence_ids=torch.tensor([3]))
    assert torch.equal(alone[0], inputs[60_000:])
    assert torch.equal(alone[1], target_mask[60_000:])
    short, pointer = torch.tensor([1, 2, 1, 1, 2]), torch.tensor([0, 2, 2, 4, 5])
    rare: dict[str, Any] = {"probability": 1e-9, "ptr": pointer, "seed": 0}
    assert mask_tokens(short, 9, 9, **rare)[1].split([2, 2, 1])[2].tolist() == [True]
    assert [int(part.sum()) for part in mask_tokens(short, 9, 9, **rare)[1].split([2, 2, 1])] == [1, 1, 1]
    assert mask_tokens(short, 9, 9, **rare, special=torch.tensor([1]))[1].tolist() == [False, True, False, False, True]
    with pytest.raises(ValueError, match=r"Expected 'ptr' with 'sequence_ids' \(got none\)"):
        mask_tokens(short, 9, 9, sequence_ids=torch.tensor([3]))
    with pytest.raises(ValueError, match=r"Expected 'tokens' to be \[N\] with 'ptr' \(got \[1, 5\]\)"):
        mask_tokens(short[None], 9, 9, ptr=pointer)


def test_tokens_to_mask_hold_values() -> None:
    with pytest.raises(ValueError, match="Expected 'tokens' to hold values"):
        mask_tokens(torch.zeros(5, dtype=torch.int64, device="meta"), 3, 3)


def test_one_token_at_least_is_masked() -> None:
    counts = [int(mask_tokens(torch.tensor([4, 5]), 9, 9, probability=1e-6, seed=seed)[1].sum()) for seed in range(20)]
    assert counts == [1] * 20
    refuses(lambda: mask_tokens(torch.tensor([1.0]), 9, 9), "Expected 'tokens' to be int64 (got torch.float32)")
    assert [x.numel() for x in mask_tokens(TOKENS[:0], 9, 9)] == [0, 0]
    with pytest.raises(ValueError, match=r"Expected 'masked' \+ 'random' of at most 1 \(got 0.8 \+ 0.3\)"):
        mask_tokens(TOKENS, 15, 15, random=0.3)
    with pytest.raises(ValueError, match=r"Expected 'tokens' that are not all in 'special'"):
        mask_tokens(torch.tensor([1, 1]), 9, 9, special=torch.tensor([1]))


def test_masked_lm_predicts_with_the_embeddings_of_its_encoder() -> None:
    model = MaskedLM(encoder()).eval()
    x = model.encoder(TOKENS, PTR, seed=1)
    hidden = F.layer_norm(F.gelu(model.dense(x)), (16,), model.norm.weight, model.norm.bias)
    wanted = hidden @ model.encoder.token.weight.T / 4 + model.bias
    logits, trace = model(TOKENS, PTR, seed=1, return_trace=True)
    torch.testing.assert_close(logits, wanted)
    assert trace.density.shape == (2, 3, 2)
    target_mask = TOKENS % 3 == 0
    torch.testing.assert_close(model(TOKENS, PTR, seed=1, target_mask=target_mask), wanted[target_mask])
    names = {name for name, _ in model.named_parameters() if not name.startswith("encoder.")}
    assert names == {"dense.weight", "dense.bias", "norm.weight", "norm.bias", "bias"}  # no embeddings of its own
    with pytest.raises(ValueError, match=r"Expected 'target_mask' to be \[30\] bool \(got \[2\] torch.int64\)"):
        model(TOKENS, PTR, target_mask=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"Expected 'encoder' with 'num_tokens' \(got one of features\)"):
        MaskedLM(SequenceEncoder(None, 8, in_channels=3))


def test_masked_lm_is_saved_with_its_embeddings_tied(tmp_path: Any) -> None:
    model = MaskedLM(encoder()).eval()
    model.save_pretrained(tmp_path)
    again = MaskedLM.from_pretrained(tmp_path).eval()
    assert torch.equal(model(TOKENS, PTR, seed=1), again(TOKENS, PTR, seed=1))
    again.encoder.token.weight.data.zero_()
    torch.testing.assert_close(again(TOKENS, PTR, seed=1), again.bias.expand(30, -1))


def test_masked_lm_learns_from_the_tokens_around() -> None:
    """Each token of a sequence is the one before it plus 1, so any masked token follows from its neighbors."""
    torch.manual_seed(0)
    model = MaskedLM(SequenceEncoder(9, 32, attention="full", position_encoding="rotary", dropout=0.0))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    ptr, losses = torch.arange(0, 33 * 16, 16), []
    for step in range(150):
        tokens = ((torch.randint(8, (32, 1)) + torch.arange(16)) % 8).flatten()
        inputs, target_mask = mask_tokens(tokens, 8, 8, seed=step)
        loss = F.cross_entropy(model(inputs, ptr, target_mask=target_mask), tokens[target_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 1.5
    assert sum(losses[-10:]) / 10 < 0.5
