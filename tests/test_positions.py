"""Rotary embeddings and linear score biases: their laws, and their place in layers, sources and models."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch
from problems import draw, pointer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sbm_pyg import (
    ALiBi,
    AttentionConv,
    AttentionGraph,
    FullAttention,
    LearnedSource,
    Rotary,
    SequenceClassifier,
    SequenceEncoder,
    Tokens,
    make_attention,
    patterns,
)
from sbm_pyg.analysis import compare_heads
from sbm_pyg.ops import segments
from sbm_pyg.training.gradients import row_distillation

LENGTHS = [4, 9, 1, 20]
PTR = pointer(LENGTHS)
COUNT = int(PTR[-1])
PLACES = torch.cat([torch.arange(length) for length in LENGTHS])


def rotated(x: Tensor, position: Tensor, base: float = 10000.0) -> Tensor:
    """By complex numbers: channels c and c + C/2 are the real and the imaginary part of a number."""
    half = x.size(-1) // 2
    angle = position.double()[:, None] * base ** -(torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
    return torch.cat([turned.real, turned.imag], -1)


def distances(heads: int, slopes: list[float], queries: int, keys: int) -> Tensor:
    lag = torch.arange(queries)[:, None] - torch.arange(keys)
    return -torch.tensor(slopes).double()[:heads, None, None] * lag.abs()


class Spy(LearnedSource):
    """Remembers what it saw, and is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.target_density = 1.0
        self.seen: Tokens | None = None

    def predict(self, tokens: Tokens) -> Any:
        raise AssertionError

    choose = predict

    def forward(self, tokens: Tokens) -> Any:
        self.seen = tokens
        return super().forward(tokens)


# ------------------------------------------------------------------ laws


@pytest.mark.parametrize(("base", "channels"), [(10000.0, None), (100.0, None), (10000.0, 4)])
def test_pairs_of_channels_are_rotated(base: float, channels: int | None) -> None:
    x, position = draw(1, 2, 5, 6), torch.tensor([0, 3, 1, 100, 7])
    found = Rotary(base, channels)(x, position)
    width = 6 if channels is None else channels
    torch.testing.assert_close(found[..., :width], rotated(x[..., :width], position, base))
    assert torch.equal(found[..., width:], x[..., width:])
    assert torch.equal(Rotary(base, channels)(x, torch.zeros(5)), x)


def test_scores_of_rotated_vectors_depend_on_relative_positions() -> None:
    query, key, rotary = draw(1, 1, 6, 8), draw(2, 1, 6, 8), Rotary()
    places = torch.tensor([0, 5, 2, 9, 30, 31])
    scores = [rotary(query, places + shift) @ rotary(key, places + shift).mT for shift in (0, 17)]
    torch.testing.assert_close(*scores)
    assert not torch.allclose(scores[0], query @ key.mT)


def test_on_a_grid_scores_depend_on_displacements_of_row_and_column() -> None:
    """Half of the pairs of channels turns by the row, and the other half by the column."""
    width, rotary = 5, Rotary(100.0, 8, grid_width=5)
    query, key = draw(1, 1, 1, 10), draw(2, 1, 1, 10)
    rows, columns = torch.arange(30) // width, torch.arange(30) % width
    found = rotary(query.expand(1, 30, 10), torch.arange(30))
    pairs = [[0, 1, 4, 5], [2, 3, 6, 7]]  # channels c and c + D / 2
    for channels, place in zip(pairs, (rows, columns), strict=True):
        torch.testing.assert_close(found[..., channels], rotated(query[..., channels].expand(1, 30, 4), place, 100.0))
    assert torch.equal(found[..., 8:], query[..., 8:].expand(1, 30, 2))
    scores = (found @ rotary(key.expand(1, 30, 10), torch.arange(30)).mT)[0].view(6, width, 6, width)
    torch.testing.assert_close(scores[1, 2, 3, 4], scores[2, 1, 4, 3])  # two rows down, two columns right
    assert not torch.isclose(scores[0, 4, 1, 0], scores[0, 3, 0, 4])  # the next token in both
    line = Rotary(100.0, 8)
    assert not torch.allclose(found, line(query.expand(1, 30, 10), torch.arange(30)))
    assert torch.equal(Rotary(grid_width=40)(query[..., :8], torch.tensor([0])), query[..., :8])


def test_rotation_in_half_precision_is_computed_in_float32() -> None:
    x, position = draw(1, 2, 5, 8).half(), torch.tensor([0, 5000, 12000, 16000, 16383])
    found = Rotary()(x, position)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, Rotary()(x.float(), position).half())


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]), (2, [2**-4, 2**-8]), (8, [2**-k for k in range(1, 9)]),
        (3, [2**-4, 2**-8, 2**-2]), (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),  # as published code gives them
    ],
)  # fmt: skip
@pytest.mark.parametrize("key_lengths", [LENGTHS, [7, 3, 5, 11]])
def test_alibi_subtracts_the_distance(heads: int, slopes: list[float], key_lengths: list[int]) -> None:
    key_ptr, alibi = pointer(key_lengths), ALiBi(heads)
    of_query, of_key = (torch.arange(4).repeat_interleave(torch.tensor(each)) for each in (LENGTHS, key_lengths))
    rows = [torch.arange(int(key_ptr[b]), int(key_ptr[b + 1])) for b in of_query.tolist()] * heads
    rowptr = pointer([len(row) for row in rows])
    graph = AttentionGraph(rowptr, torch.cat(rows), COUNT, len(of_key), heads, PTR, key_ptr)
    bias = torch.zeros(heads, COUNT, len(of_key)).double()
    found = alibi(draw(1, heads, COUNT, 4), draw(2, heads, len(of_key), 4), graph)
    bias[graph.edge_head, graph.edge_row % COUNT, graph.col.long()] = found
    for number, (queries, keys) in enumerate(zip(LENGTHS, key_lengths, strict=True)):
        part = bias[:, of_query == number][:, :, of_key == number]
        torch.testing.assert_close(part, distances(heads, slopes, queries, keys))
        torch.testing.assert_close(alibi.dense_bias(queries, keys).double(), part)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_slopes_are_the_same_in_every_dtype(dtype: torch.dtype) -> None:
    """So a model that is loaded, whose slopes are made anew, has those of the one that was saved."""
    alibi, wanted = ALiBi(12).to(dtype), ALiBi(12)
    assert torch.equal(alibi.slope, wanted.slope)
    assert torch.equal(alibi.dense_bias(300, 300), wanted.dense_bias(300, 300))
    slopes = [2 ** -(k + 1) for k in range(8)] + [2 ** -(0.5 + k) for k in range(4)]
    assert alibi.slope.tolist() == pytest.approx(slopes, rel=1e-14)


def test_slopes_are_there_after_a_start_on_no_device() -> None:
    with torch.device("meta"):
        alibi = ALiBi(3)
    assert torch.equal(alibi.to_empty(device="cpu").slope, ALiBi(3).slope)


# ------------------------------------------------------------------ layers


def options(kind: str) -> dict[str, Any]:
    return {"rotary": Rotary()} if kind == "rotary" else {"score_bias": ALiBi(2)}


@pytest.mark.parametrize("kind", ["rotary", "alibi"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_layers_attend_by_relative_positions(kind: str, is_causal: bool) -> None:
    """Dense by torch's kernel, over a full graph that is given, and full attention: all as by hand."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"is_causal": is_causal, **options(kind)}
    conv = make_attention("sbm", 6, 4, 2, num_clusters=3, target_density=1.0, window=None, **more).double()
    full = FullAttention(6, 4, 2, **more).double()
    shared = {name: each for name, each in conv.state_dict().items() if name.startswith("lin_")}
    full.load_state_dict(shared)
    x = draw(3, COUNT, 6)
    query, key, value = (
        lin(x).view(COUNT, 2, 4).transpose(0, 1) for lin in (conv.lin_query, conv.lin_key, conv.lin_value)
    )
    if kind == "rotary":
        query, key = rotated(query, PLACES), rotated(key, PLACES)
    parts = []
    for start, end in zip(PTR[:-1].tolist(), PTR[1:].tolist(), strict=True):
        mask = torch.ones(end - start, end - start, dtype=torch.bool)
        mask = torch.zeros_like(mask).double().masked_fill(~mask.tril(), -math.inf) if is_causal else mask.double() * 0
        if kind == "alibi":
            mask = mask + distances(2, [2**-4, 2**-8], end - start, end - start)
        q, k, v = (each[:, start:end] for each in (query, key, value))
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).flatten(1))
    wanted = torch.cat(parts)
    out, choice = conv(x, ptr=PTR, seed=0, return_choice=True)
    assert "graph" not in vars(choice)  # no edge was stored
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(conv(x, patterns.full(None, ptr=PTR, is_causal=is_causal)), wanted)
    torch.testing.assert_close(full(x, ptr=PTR), wanted)
    even = full(x[:24], ptr=torch.tensor([0, 12, 24]))  # sequences of one length are not padded
    torch.testing.assert_close(conv(x[:24], ptr=torch.tensor([0, 12, 24])), even)


def test_full_attention_in_groups_of_lengths_keeps_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    full, x = FullAttention(6, 4, 2, rotary=Rotary()).double(), draw(3, COUNT, 6)
    places = torch.arange(COUNT) * 3 % 50
    found = [full(x, ptr=PTR), full(x, ptr=PTR, positions=places)]
    monkeypatch.setattr(segments, "FEW_PAIRS", 0)
    torch.testing.assert_close(full(x, ptr=PTR), found[0])
    torch.testing.assert_close(full(x, ptr=PTR, positions=places), found[1])
    assert not torch.allclose(*found)


@pytest.mark.parametrize("given", [False, True])
def test_positions_may_be_given(given: bool) -> None:
    """Without the tokens between them, tokens attend as if these were there."""
    torch.manual_seed(0)
    conv = AttentionConv(6, 4, 2, patterns.PatternSource(patterns.full), rotary=Rotary()).double()
    x, kept = draw(3, 20, 6), torch.tensor([0, 3, 4, 11, 19])
    graph = AttentionGraph.from_dense(torch.zeros(20, 20).index_fill(1, kept, 1))
    few = patterns.full(5) if given else None
    found = conv(x[kept], few, positions=kept)
    torch.testing.assert_close(found, conv(x, graph)[kept])
    assert not torch.allclose(found, conv(x[kept], few))
    cross = conv((x, x[kept]), AttentionGraph.from_dense(torch.ones(5, 20)), positions=(torch.arange(20), kept))
    torch.testing.assert_close(cross, conv(x)[kept])


@pytest.mark.parametrize("for_source", [True, False])
def test_the_source_sees_positions_or_not(for_source: bool) -> None:
    torch.manual_seed(0)
    spy = Spy()
    conv = AttentionConv(6, 4, 2, spy, rotary=Rotary(for_source=for_source), estimator="none").double()
    x = draw(3, COUNT, 6)
    conv(x, ptr=PTR)
    query = conv.lin_query(x).view(COUNT, 2, 4).transpose(0, 1)
    assert spy.seen is not None
    torch.testing.assert_close(spy.seen.query, rotated(query, PLACES) if for_source else query)


@pytest.mark.parametrize("kind", ["rotary", "alibi"])
def test_a_source_learns_the_weights_that_attention_has(kind: str) -> None:
    """Distillation while attention is dense: rotations and biases are in the weights."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"rotary": Rotary(for_source=False)} if kind == "rotary" else options(kind)
    conv = make_attention("sbm", 6, 4, 2, num_clusters=3, target_density=1.0, window=None, **more).double()
    x = draw(3, 20, 6)
    query, key = (lin(x).view(20, 2, 4).transpose(0, 1).detach() for lin in (conv.lin_query, conv.lin_key))
    tokens, scored = Tokens(query, key, bipartite=False), {}
    if kind == "rotary":
        place = torch.arange(20)
        scored = {"scored": Tokens(rotated(query, place), rotated(key, place))}
    assert isinstance(conv.source, LearnedSource)
    how: dict[str, Any] = {"scale": conv.scale, "rows": math.inf, "part": 1.0}
    weights = scored["scored"] if scored else tokens
    score = weights.query @ weights.key.mT * conv.scale
    score = score + (distances(2, [2**-4, 2**-8], 20, 20) if kind == "alibi" else 0)
    full = patterns.full(20).expand(2)
    p = conv.source.predict(tokens).log_on(full).view(2, 20, 20).log_softmax(-1)
    wanted = -(score.softmax(-1) * p).sum() / 40
    found = row_distillation(conv.source, tokens, **scored, score_bias=conv.score_bias, **how)
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(found, row_distillation(conv.source, tokens, **how), rtol=1e-6)
    # the layer passes them on
    torch.manual_seed(0)
    out = conv(x, seed=5)  # which keeps its loss alive
    (loss,) = conv.auxiliary_losses.take()
    same = row_distillation(
        conv.source, replace(tokens, seed=5), scale=conv.scale, score_bias=conv.score_bias, **scored
    )
    torch.testing.assert_close(loss, same)
    assert out.requires_grad


@pytest.mark.parametrize("kind", ["rotary", "alibi"])
def test_blocks_of_tokens_have_positions(kind: str) -> None:
    torch.manual_seed(0)
    more = {"target_density": 0.5, "block_size": 4, "is_causal": True, **options(kind)}
    conv = make_attention("sbm", 6, 4, 2, num_clusters=3, **more).double().eval()
    x = draw(3, COUNT, 6)
    out, graph = conv(x, ptr=PTR, seed=0, return_graph=True)
    torch.testing.assert_close(out, conv(x, graph.expand_tokens()))


@pytest.mark.parametrize("kind", ["rotary", "alibi"])
def test_a_sparse_layer_trains_and_repeats(kind: str) -> None:
    torch.manual_seed(0)
    conv = make_attention("sbm", 6, 4, 2, num_clusters=3, target_density=0.5, is_causal=True, **options(kind)).double()
    x = draw(3, COUNT, 6).requires_grad_()
    out = conv(x, ptr=PTR, seed=1)
    out.square().sum().backward()
    assert all(bool(each.grad.any()) for each in (x, conv.lin_query.weight, *conv.source.parameters()))
    assert torch.equal(conv(x, ptr=PTR, seed=1), out)
    moved = conv.eval()(
        torch.cat([x[:4], x[:4]]), ptr=torch.tensor([0, 4, 8]), sequence_ids=torch.zeros(2).long(), seed=1
    )
    assert torch.allclose(moved[:4], moved[4:])  # positions start anew in each sequence


def test_what_heads_lose_is_measured_with_positions() -> None:
    """Heads that attend to the token before them by rotation lose nothing over a window, and all without it."""
    width, count = 32, 40
    conv = AttentionConv(width, width, 1, patterns.PatternSource(patterns.window, size=1), rotary=Rotary(100.0))
    with torch.no_grad():
        conv.lin_query.weight.zero_(), conv.lin_key.weight.zero_()
        conv.lin_key.bias[:] = 8 * torch.ones(width)
        conv.lin_query.bias[:] = Rotary(100.0)(8 * torch.ones(1, 1, width), torch.tensor([-1]))[0, 0]
    with compare_heads(conv, rows=math.inf) as table:
        conv(torch.randn(count, width))
    assert table.heads[0].kept > 0.95


def test_layers_compile_over_a_given_graph() -> None:
    torch.manual_seed(0)
    conv = AttentionConv(6, 4, 2, rotary=Rotary(), score_bias=ALiBi(2))
    x, graph = torch.randn(COUNT, 6), patterns.window(COUNT, 2, ptr=PTR)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, graph), conv(x, graph))


# ------------------------------------------------------------------ models


@pytest.mark.parametrize("encoding", ["rotary", "alibi", "none"])
@pytest.mark.parametrize("attention", ["sbm", "full", "window", "indexer", "dcmm"])
def test_encoders_have_relative_positions(encoding: str, attention: str) -> None:
    if (encoding, attention) == ("alibi", "dcmm"):
        with pytest.raises(
            ValueError, match=r"Expected 'position_encoding' other than 'alibi' with another score bias"
        ):
            SequenceEncoder(9, 16, attention=attention, position_encoding=encoding)
        return
    torch.manual_seed(0)
    chosen: dict[str, Any] = {"num_clusters": 3} if attention in ("sbm", "dcmm") else {}
    chosen |= {"size": 4} if attention == "window" else {"target_density": 0.5} if attention == "indexer" else {}
    encoder = SequenceEncoder(
        9, 16, max_length=5, attention=attention, attention_options=chosen, position_encoding=encoding
    ).eval()
    assert encoder.position is None
    tokens = torch.randint(9, (COUNT,))  # longer than max_length, which is that of learned positions
    out = encoder(tokens, PTR, seed=0)
    assert out.shape == (COUNT, 16)
    if attention == "full":  # of these encodings, rotation alone tells forward from backward
        backward = encoder(tokens.flip(0), pointer(LENGTHS[::-1])).flip(0)
        assert torch.allclose(out, backward, atol=1e-5) == (encoding != "rotary")


@pytest.mark.parametrize(
    ("encoding", "attention"),
    [*product(["learned", "none"], ["full", "window", "factory"]), ("rotary", "full"), ("rotary", "window")],
)
def test_positions_reach_each_layer_that_rotates(encoding: str, attention: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"attention": attention, "attention_options": {"rotary": Rotary()}}
    if attention == "factory":
        options = {"attention": lambda *sizes: FullAttention(*sizes, rotary=Rotary())}
    encoder = SequenceEncoder(9, 16, max_length=60, num_layers=1, position_encoding=encoding, **options).eval()
    tokens, positions = torch.randint(9, (6,)), torch.tensor([0, 1, 2, 50, 51, 55])
    out = encoder(tokens, positions=positions)
    x = encoder.token(tokens) if encoder.position is None else encoder.token(tokens) + encoder.position(positions)
    layer = cast(Any, encoder.layers[0])
    x = x + layer.lin_out(layer.attention(layer.norm1(x), ptr=torch.tensor([0, 6]), positions=positions))
    torch.testing.assert_close(out, encoder.norm(x + layer.ffn(layer.norm2(x))))


def test_rotary_encoders_take_positions(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = SequenceClassifier(
        SequenceEncoder(9, 16, attention="full", position_encoding="rotary", is_causal=True), 3
    ).eval()
    tokens = torch.randint(9, (6,))
    counted = model(tokens)
    assert torch.equal(model(tokens, positions=torch.arange(6)), counted)
    assert not torch.allclose(model(tokens, positions=torch.tensor([0, 1, 2, 50, 51, 5000])), counted)
    torch.testing.assert_close(model(tokens, positions=torch.arange(6) + 40), counted, atol=1e-4, rtol=1e-4)
    model.save_pretrained(tmp_path)
    assert torch.equal(SequenceClassifier.from_pretrained(tmp_path).eval()(tokens), counted)


# ------------------------------------------------------------------ errors


def test_wrong_arguments_are_refused() -> None:
    x = torch.randn(5, 6)
    for build, message in [
        (lambda: Rotary(1.0), r"Expected 'base' in \(1, inf\) \(got 1.0\)"),
        (lambda: Rotary(channels=3), r"Expected 'channels' to be even \(got 3\)"),
        (lambda: AttentionConv(6, 6, rotary=Rotary(grid_width=4)), r"Expected a multiple of 4 channels .* \(got 6\)"),
        (lambda: AttentionConv(6, 3, 2, rotary=Rotary()), r"Expected heads of an even number of channels \(got 3\)"),
        (lambda: FullAttention(6, 3, 2, rotary=Rotary()), r"Expected heads of an even number of channels \(got 3\)"),
        (lambda: SequenceEncoder(9, 6, position_encoding="rotary"), r"Expected heads of an even number of channels"),
        (lambda: Rotary(channels=8)(torch.randn(1, 5, 6), torch.arange(5)), r"Expected heads of at least 8 channels"),
        (lambda: Rotary()(torch.randn(1, 5, 6), torch.arange(4)), r"Expected 'position' of one number per token"),
        (lambda: AttentionConv(6, 4)(x, patterns.full(5), positions=torch.arange(5)), r"Expected no 'positions'"),
        (lambda: AttentionConv(6, 4, rotary=Rotary())(x, patterns.full(5), positions=cast(Any, (torch.arange(5),))),
         r"Expected 'positions' to be \[N\], or a pair for keys and queries \(got 1 of them\)"),
        (lambda: ALiBi(3)(x, x, patterns.full(5).expand(2)), r"Expected 'graph' of 3 heads, over the tokens"),
        (lambda: ALiBi(2)(x[None], x[None, :4], patterns.full(5).expand(2)), r"Expected 'graph' of 2 heads, over"),
        (lambda: FullAttention(6, 4, 2, score_bias=ALiBi(3)), r"Expected 'score_bias' of 2 heads \(got 3\)"),
        (lambda: SequenceEncoder(9, attention=FullAttention, position_encoding="rotary"), r"with a factory"),
        (lambda: SequenceEncoder(9, position_encoding="none")(torch.tensor([1, 2]), positions=torch.arange(2)),
         r"Expected no 'positions' with position_encoding='none'"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            build()
    for wrong in (lambda: AttentionConv(6, 4, rotary=True), lambda: FullAttention(6, 4, 2, score_bias=Rotary())):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"Expected '(rotary|score_bias)' to be an? (Rotary|ALiBi)"):
            wrong()
