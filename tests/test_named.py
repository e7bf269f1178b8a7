"""Attention layers by the names of their sources, in an encoder and in models of torch."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from problems import REQUIRED, draw
from torch import Tensor, nn

from sbm_pyg import (
    AttentionConv,
    Choice,
    GraphSource,
    SBMMultiheadAttention,
    SBMSource,
    SequenceEncoder,
    Sparsifier,
    Tokens,
    auxiliary_loss,
    patterns,
    register_source,
    replace_attention,
)
from sbm_pyg.layers import named
from sbm_pyg.sources.indexer import Indexer, IndexerSource, KeyScorer
from sbm_pyg.training.estimators import Imitate, Local

SPARSE = {"top_k": {"k": 2}, "indexer": {"k": 2}, "key_selection": {"k": 2}, "block_top_k": {"k": 2, "block_size": 2}}


class Even(GraphSource):
    """Keys at even positions."""

    def __init__(self, channels: int, heads: int, every: int = 2) -> None:
        super().__init__()
        self.every = every

    def forward(self, tokens: Tokens) -> Choice:
        graph = patterns.full(None, ptr=tokens.query_ptr, is_causal=tokens.is_causal)
        return Choice(graph.select(graph.edge_index[0] % self.every == 0)).expand(tokens.heads)


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "_OWN", {})


def torch_model() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def convs(model: nn.Module) -> list[AttentionConv]:
    return [module for module in model.modules() if isinstance(module, AttentionConv)]


@pytest.mark.parametrize("name", named.source_names())
def test_every_name_makes_a_layer_that_attends(name: str) -> None:
    torch.manual_seed(0)
    conv = named.make_attention(name, 12, 4, 2, is_causal=True, **(REQUIRED | SPARSE).get(name, {})).eval()
    assert isinstance(conv.source, SBMSource) is (name == "sbm")
    out, graph = conv(draw(0, 30, 12).float(), ptr=torch.tensor([0, 10, 30]), seed=0, return_graph=True)
    assert out.shape == (30, 8)
    assert graph.is_causal
    assert graph.heads == 2
    first, second = (graph.head(h).col for h in range(2))
    assert torch.equal(first, second) is (not conv.source.reads_vectors and name not in ("random", "bigbird"))


@pytest.mark.parametrize("name", named.source_names())
def test_the_options_of_a_name_are_those_that_it_takes(name: str) -> None:
    known = named.options_of(name)
    assert known is not None
    assert known >= {"dropout", "score_bias", "bias", "flow"}
    assert named.required_options(name) == {*REQUIRED.get(name, {})}
    assert not known & {"heads", "source", "scorer", "ptr", "generator", "kwargs", "concat"}
    assert ("seed" in known) is (name in ("random", "bigbird"))
    with pytest.raises(TypeError, match="nothing"):
        named.make_attention(name, 12, 4, 2, nothing=1, **REQUIRED.get(name, {}))


@pytest.mark.parametrize("name", ["random", "bigbird"])
def test_a_seed_fixes_the_random_keys_of_a_model(name: str) -> None:
    model, x = torch_model(), draw(1, 3, 20, 16).float()
    replace_attention(model, source=name, seed=5, **REQUIRED.get(name, {}))
    layer: Any = model.layers[0].self_attn
    one, two = (layer(x, x, x, need_weights=False, return_graph=True)[2] for _ in range(2))
    assert one == two
    assert not torch.equal(one.head(0).col, one.head(1).col)


@pytest.mark.parametrize("name", ["window", "lsh", "routing", "bigbird"])
def test_sizes_have_usual_values_which_can_be_given(name: str) -> None:
    size, usual = next(iter(named.SOURCES[name].sizes.items()))
    for options, expected in (({}, usual), ({size: 4}, 4)):
        source: Any = named.make_attention(name, 12, 4, 2, **options).source
        found = source.centroids.size(1) if name == "routing" else source.rule.options[size]
        assert found == expected
    with pytest.raises(ValueError, match=f"Expected '{size}' to be at least 0"):
        named.make_attention(name, 12, 4, 2, **{size: -1})


def test_options_go_to_the_scorer_the_source_and_the_layer() -> None:
    conv = named.make_attention("indexer", 12, 4, 2, index_heads=3, k=5, window=1, dropout=0.1, bias=False)
    source = cast(IndexerSource, conv.source)
    assert isinstance(source.scorer, Indexer)
    assert (source.scorer.index_heads, source.k, source.window, conv.dropout) == (3, 5, 1, 0.1)
    assert conv.lin_key.bias is None
    assert isinstance(conv.estimator, Imitate)
    keys = named.make_attention("key_selection", 12, 4, 2, hidden=7, select="bernoulli")
    assert isinstance(cast(IndexerSource, keys.source).scorer, KeyScorer)
    assert isinstance(keys.estimator, Local)


@pytest.mark.parametrize("source", ["sbm", "indexer", "key_selection", "top_k"])
def test_a_model_of_torch_begins_dense_and_becomes_sparse(source: str) -> None:
    theirs = torch_model()
    ours, x = copy.deepcopy(theirs), draw(1, 3, 20, 16).float()
    assert replace_attention(ours, source=source) == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)
    sparsifier = Sparsifier(ours, density=0.25, total_steps=4)
    optimizer = torch.optim.AdamW(ours.parameters(), 1e-3)
    chosen = [p for conv in convs(ours) for p in cast(nn.Module, conv.source).parameters()]
    before = [p.detach().clone() for p in chosen]
    for _ in range(4):
        loss = ours(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sparsifier.step(loss)
    assert sparsifier.is_sparse
    assert len(chosen) == {"sbm": 10, "indexer": 8, "key_selection": 6, "top_k": 0}[source]
    assert all(not torch.equal(p, q) for p, q in zip(chosen, before, strict=True))
    _, graph = ours.eval().layers[0].self_attn(x, x, x, need_weights=False, return_graph=True)[1:]
    assert 0.1 < float(graph.density.mean()) < 0.4
    again = torch_model()
    replace_attention(again, source=source)
    again.load_state_dict(ours.state_dict())
    torch.manual_seed(2)
    expected = ours(x)
    torch.manual_seed(2)
    assert torch.equal(again.eval()(x), expected)


def test_patterns_and_rules_in_a_model_of_torch() -> None:
    x = draw(1, 3, 20, 16).float()
    for source, options, edges in (("window", {"size": 1}, 3 * 58 * 2), ("top_k", {"k": 4}, 3 * 20 * 4 * 2)):
        model = torch_model()
        replace_attention(model, source=source, **options)
        layer: Any = model.layers[0].self_attn
        assert layer(x, x, x, need_weights=False, return_graph=True)[2].num_edges == edges


def test_a_pattern_in_cross_attention_names_the_encoder() -> None:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    replace_attention(model, source="window")
    with pytest.raises(ValueError, match=r"\(got a pair, as in cross attention\).*replace_attention\(model\.encoder"):
        model(torch.randn(1, 5, 16), torch.randn(1, 4, 16))
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    assert replace_attention(model.encoder, source="window") == ["layers.0.self_attn"]
    assert model(torch.randn(1, 5, 16), torch.randn(1, 4, 16)).shape == (1, 4, 16)


def test_an_indexer_of_an_encoder_begins_dense() -> None:
    encoder = SequenceEncoder(9, 8, attention="indexer", dropout=0.0)
    full = SequenceEncoder(9, 8, attention="full", dropout=0.0)
    full.load_state_dict({k: v for k, v in encoder.state_dict().items() if ".source." not in k})
    words = torch.randint(9, (12,))
    torch.testing.assert_close(encoder(words), full(words), rtol=0, atol=1e-5)


def test_sources_of_users_are_known_wherever_names_are() -> None:
    register_source("even", Even)
    encoder = SequenceEncoder(9, 8, attention="even", attention_options={"every": 3, "dropout": 0.1})
    model = torch_model()
    replace_attention(model, source="even", every=3)
    for conv in convs(encoder) + convs(model):
        assert cast(Even, conv.source).every == 3
    assert named.source_names()[-1] == "even"
    assert named.options_of("even") is None
    register_source("even", lambda channels, heads: Even(channels, heads, 5))
    assert cast(Even, named.make_attention("even", 8, 4, 2).source).every == 5


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: replace_attention(torch_model(), density=0.1), TypeError, r"\(got \['density'\]\)\. Give the density to a Sp"),
        (lambda: replace_attention(torch_model(), edge_dim=4), TypeError,
         r"\(got \['edge_dim'\]\)\. An AttentionConv over a given graph has edge features\. They are \['aggr'"),
        (lambda: SequenceEncoder(9, 8, attention="top_k", attention_options={"k": 3, "edge_dim": 4}), ValueError, r"\(got \['edge_dim'\]\)"),
        (lambda: replace_attention(torch_model(), source="indexer", dropout=0.1, bias=True), TypeError,
         r"Expected 'options' without \['bias', 'dropout'\] \(got them\)\. The layer of torch sets them"),
        (lambda: replace_attention(torch_model(), source="block_diagonal", num_blocks=None), TypeError, "'num_blocks' to be an int"),
        (lambda: register_source(cast(str, 3), Even), TypeError, r"Expected 'name' to be a str"),
    ],
)  # fmt: skip
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_what_does_not_return_a_source_is_refused() -> None:
    register_source("wrong", lambda channels, heads: cast(GraphSource, nn.Identity()))
    with pytest.raises(TypeError, match=r"Expected 'source' to be a GraphSource, made by 'wrong' \(got Identity\)"):
        SBMMultiheadAttention(16, 2, source="wrong")


def test_a_name_that_no_longer_is_registered_is_named(tmp_path: Any) -> None:
    register_source("even", Even)
    SequenceEncoder(9, 8, attention="even").save_pretrained(tmp_path)
    words: Tensor = torch.randint(9, (12,))
    assert SequenceEncoder.from_pretrained(tmp_path)(words).shape == (12, 8)
    named._OWN.clear()
    with pytest.raises(ValueError, match=r"Expected 'attention' to be one of .*\(got 'even'\)"):
        SequenceEncoder.from_pretrained(tmp_path)


EMPTY: list[tuple[str, dict[str, Any]]] = [
    (name, REQUIRED.get(name, {}) | SPARSE.get(name, {})) for name in named.source_names()
]
EMPTY += [("sbm", {"estimator": name}) for name in ("mask", "paper", "relaxed", "none")]
EMPTY += [("sbm", {"target_density": share}) for share in (0.5, 1.0)]
EMPTY += [("sbm", {"block_size": 2}), ("sbm", {"candidates": 2.0, "window": 1}), ("sbm", {"normalizer": "entmax15"})]
EMPTY += [("sbm", {"method": "fastrg"}), ("indexer", {}), ("top_k", {})]


@pytest.mark.filterwarnings("ignore:Attention is dense")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("source", "options"), EMPTY)
def test_sequences_without_tokens_change_nothing(source: str, options: dict[str, Any], is_causal: bool) -> None:
    torch.manual_seed(0)
    if source == "sbm":
        options = {"num_clusters": 3} | options
    conv = named.make_attention(source, 8, 4, 2, is_causal=is_causal, **options)
    x, ptr, ids = torch.randn(10, 8), torch.tensor([0, 0, 4, 4, 10, 10]), torch.tensor([1, 3])
    draws_rows = source in ("indexer", "key_selection") or options.get("target_density") == 1.0  # among all sequences
    for training in (True, False):
        results = []
        for offsets, numbers in ((ptr, None), (torch.tensor([0, 4, 10]), ids)):
            layer, leaf = copy.deepcopy(conv).train(training), x.clone().requires_grad_()
            out, choice = layer(leaf, ptr=offsets, seed=1, sequence_ids=numbers, return_choice=True)
            loss = out.sin().sum() + auxiliary_loss(layer)
            loss = loss if choice.probability is None else loss + choice.probability.expected_density().sum()
            loss.backward()
            results.append([out, choice.density.sum(0), leaf.grad])
            assert all(x.grad is None or x.grad.isfinite().all() for x in layer.parameters())
            if not (draws_rows and training):
                results[-1] += [x.grad for x in layer.parameters() if x.grad is not None]
        for expected, found in zip(*reversed(results), strict=True):
            if not (expected is results[1][2] and draws_rows and training):
                torch.testing.assert_close(found, expected)
        assert choice.density.shape == (2, 2)
        for nothing in (None, torch.tensor([0]), torch.tensor([0, 0, 0])):
            leaf = x[:0].clone().requires_grad_()
            out, graph = conv.train(training)(leaf, ptr=nothing, return_graph=True)
            out.sum().backward()
            assert out.shape == (0, 8)
            assert graph.density.tolist() == [[0.0, 0.0]] * (1 if nothing is None else nothing.numel() - 1)


@pytest.mark.parametrize(
    ("source", "options"), [("sbm", {"num_clusters": 3}), ("top_k", {"k": 2}), ("indexer", {"k": 2})]
)
def test_queries_without_keys_give_zeros(source: str, options: dict[str, Any]) -> None:
    conv = named.make_attention(source, 8, 4, 2, **options)
    x, memory = torch.randn(10, 8), torch.randn(7, 8)
    out = conv((memory, x), ptr=([0, 3, 3, 3, 7], [0, 0, 4, 10, 10]))
    assert torch.equal(out, torch.zeros(10, 8))
    assert torch.equal(conv((memory[:0], x)), torch.zeros(10, 8))
    assert conv((memory, x[:0])).shape == (0, 8)
