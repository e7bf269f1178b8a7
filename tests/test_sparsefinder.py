"""Sparsefinder: rules and loss against their definitions, and that a graph which holds the ground truth changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import entmax
import pytest
import torch
from problems import draw32 as draw
from problems import pointer
from torch import Tensor

from sbm_pyg import AttentionConv, AttentionGraph, Tokens, sparsefinder
from sbm_pyg.ops import tiles
from sbm_pyg.sources import patterns
from sbm_pyg.sparsefinder import Projection, SparsefinderSource, fit_centroids, fit_projection, projection_loss
from sbm_pyg.sparsefinder.ground_truth import compare, ground_truth_graph
from sbm_pyg.sparsefinder.predictors import block_bigbird, bucketing, buckets, clustering, clusters, distance

HEADS = 2
CENTROIDS = torch.randn(HEADS, 4, 3, generator=torch.Generator().manual_seed(5))
LENGTHS = [([9], [9]), ([1, 7, 12, 3], [1, 7, 12, 3]), ([5, 2, 9], [8, 11, 4])]


def by_distance(far: Tensor) -> Callable[[int], tuple[float, int]]:
    """The order of tokens, of equal ones by their number."""
    return lambda token: (float(far[token]), token)


def define_distance(q: Tensor, z: Tensor, head: int, threshold: float, cap: int | None, causal: bool) -> Tensor:
    far = (q[:, None] - z[None]).square().sum(2).sqrt()
    allowed = torch.ones(far.shape, dtype=torch.bool).tril() if causal else torch.ones(far.shape, dtype=torch.bool)
    near = (far <= threshold) & allowed
    if cap is not None:
        for row, distances in zip(near, far, strict=True):
            inside = sorted(row.nonzero()[:, 0].tolist(), key=by_distance(distances))
            row[inside[cap:]] = False
    return near


def define_bucketing(q: Tensor, z: Tensor, head: int, num_buckets: int, causal: bool) -> Tensor:
    found = torch.zeros(len(q), len(z), dtype=torch.bool)
    for dim in range(q.size(1)):
        bucket = []
        for x in (q, z):
            values = x[:, dim].tolist()
            ranks = [sum((other, j) < (value, i) for j, other in enumerate(values)) for i, value in enumerate(values)]
            bucket.append(torch.tensor([rank * num_buckets // len(x) for rank in ranks]))
        found |= bucket[0][:, None] == bucket[1][None]
    return found


def define_blocks(q: Tensor, z: Tensor, head: int, causal: bool, **o: Any) -> Tensor:
    size, k, window, wide = (o[name] for name in ("block_size", "k", "block_window", "global_blocks"))
    means = [torch.stack([part.mean(0) for part in x.split(size)]) for x in (q, z)]
    far = [(x[:, None] - CENTROIDS[head][None]).square().sum(2).sqrt() for x in means]
    rows, cols = (range(len(x)) for x in means)
    held = {(a, b) for a in rows for b in cols if (window is not None and abs(a - b) <= window) or min(a, b) < wide}
    found = set(held)
    if o["by"] == "nearest":
        for c in range(4):
            near = [sorted(range(wide, len(x)), key=by_distance(x[:, c]))[:k] for x in far]
            found |= {(a, b) for a in near[0] for b in near[1]}
    else:
        for a in range(wide, len(means[0])):
            c = int(far[0][a].argmin())
            others = [b for b in range(wide, len(means[1])) if int(far[1][b].argmin()) == c and (a, b) not in held]
            found |= {(a, b) for b in sorted(others, key=by_distance(far[1][:, c]))[:k]}
    mask = torch.zeros(len(q), len(z), dtype=torch.bool)
    for a, b in found:
        mask[a * size : (a + 1) * size, b * size : (b + 1) * size] = True
    return mask


def define_clustering(q: Tensor, z: Tensor, head: int, top: int, cap: int | None, causal: bool) -> Tensor:
    far = [(x[:, None] - CENTROIDS[head][None]).square().sum(2).sqrt() for x in (q, z)]
    mine, theirs = ([set(row.argsort(stable=True)[:top].tolist()) for row in x] for x in far)
    found = torch.zeros(len(q), len(z), dtype=torch.bool)
    for cluster in range(4):
        members = [j for j in range(len(z)) if cluster in theirs[j]]
        if cap is not None:
            members = sorted(members, key=by_distance(far[1][:, cluster]))[:cap]
        for i in range(len(q)):
            if cluster in mine[i]:
                found[i, [j for j in members if j <= i or not causal]] = True
    return found


CASES: dict[str, tuple[Callable[..., AttentionGraph], Callable[..., Tensor], dict[str, Any], dict[str, Any]]] = {
    "distance": (distance, define_distance, {"threshold": 1.5, "cap": None}, {}),
    "distance, capped": (distance, define_distance, {"threshold": 2.5, "cap": 2}, {}),
    "bucketing": (bucketing, define_bucketing, {"num_buckets": 3}, {}),
    "clustering": (clustering, define_clustering, {"top": 1, "cap": None}, {"centroids": CENTROIDS}),
    "clustering, two": (clustering, define_clustering, {"top": 2, "cap": None}, {"centroids": CENTROIDS}),
    **{
        f"blocks, {by}, {k} of {size}, {window}, {wide}": (
            block_bigbird, define_blocks,
            {"by": by, "k": k, "block_size": size, "block_window": window, "global_blocks": wide},
            {"centroids": CENTROIDS},
        )
        for by,
        k, size, window,
        wide in (
            ("nearest", 1, 2, None, 0), ("nearest", 2, 3, 0, 1), ("nearest", 9, 1, None, 0), ("shared", 1, 2, None, 0),
            ("shared", 2, 1, 1, 1), ("shared", 1, 3, 0, 0),
        )
    },
    "clustering, capped": (clustering, define_clustering, {"top": 2, "cap": 2}, {"centroids": CENTROIDS}),
}  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", LENGTHS, ids=["one sequence", "ragged", "cross"])
@pytest.mark.parametrize("name", CASES)
def test_rules_are_their_definitions(
    name: str, sizes: tuple[list[int], list[int]], is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, define, options, more = CASES[name]
    ptr, key_ptr = map(pointer, sizes)
    if sizes[0] != sizes[1]:
        options = {**options, **({"block_window": None, "global_blocks": 0} if rule is block_bigbird else {})}
    q, z = draw(1, HEADS, sum(sizes[0]), 3), draw(2, HEADS, sum(sizes[1]), 3)
    tokens = Tokens(q, z, ptr, key_ptr, bipartite=sizes[0] != sizes[1], is_causal=is_causal)
    if is_causal and (rule in (bucketing, block_bigbird) or name == "clustering, capped"):
        with pytest.raises(ValueError, match=r"depend on later tokens|hold later tokens"):
            rule(tokens, **options, **more)
        return
    expected = torch.zeros(HEADS, q.size(1), z.size(1), dtype=torch.bool)
    for head, b in itertools.product(range(HEADS), range(len(sizes[0]))):
        rows, cols = slice(ptr[b], ptr[b + 1]), slice(key_ptr[b], key_ptr[b + 1])
        expected[head, rows, cols] = define(q[head, rows], z[head, cols], head, causal=is_causal, **options)
    for chunk in (2**23, 40):
        monkeypatch.setitem(tiles.SCORES_PER_TILE, "cpu", chunk)
        graph = rule(tokens, **options, **more).validate()
        found = torch.zeros_like(expected)
        found[graph.edge_head, graph.edge_index[1], graph.edge_index[0]] = True
        assert torch.equal(found, expected)
        assert graph.num_edges == int(expected.sum()) > 0
        assert graph.is_causal is is_causal


def test_buckets_bound_the_edges_whatever_the_tokens_hold() -> None:
    same = torch.zeros(1, 64, 2)
    assert bucketing(Tokens(same), 8).num_edges == 64 * 8  # both dimensions rank alike
    assert bucketing(Tokens(draw(0, 1, 64, 2), draw(1, 1, 64, 2)), 8).num_edges <= 2 * 64 * 8
    assert clustering(Tokens(same), torch.zeros(1, 1, 2), cap=5).num_edges == 64 * 5


def test_groups_are_those_of_the_rules() -> None:
    ptr = torch.tensor([0, 5, 17])
    x, z = draw(1, HEADS, 17, 3), draw(2, HEADS, 17, 3)
    same = torch.block_diag(torch.ones(5, 5), torch.ones(12, 12)) > 0
    mine, theirs = (buckets(each, 3, ptr=ptr) for each in (x, z))
    shared = (mine[:, :, None] == theirs[:, None]).any(3) & same
    graph = bucketing(Tokens(x, z, query_ptr=ptr), 3)
    assert bool(shared[graph.edge_head, graph.edge_index[1], graph.edge_index[0]].all())
    assert graph.num_edges == int(shared.sum())
    mine, theirs = (clusters(each, CENTROIDS, 2) for each in (x, z))
    shared = (mine[:, :, None, :, None] == theirs[:, None, :, None]).any(4).any(3) & same
    graph = clustering(Tokens(x, z, query_ptr=ptr), CENTROIDS, top=2)
    assert bool(shared[graph.edge_head, graph.edge_index[1], graph.edge_index[0]].all())
    assert graph.num_edges == int(shared.sum())
    assert torch.equal(
        clusters(x, CENTROIDS[:1])[..., 0], torch.cdist(x, CENTROIDS[:1].expand(HEADS, -1, -1)).argmin(2)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_the_graphs_of_its_numbers(dtype: torch.dtype) -> None:
    x, z, centroids = (each.to(dtype) for each in (draw(1, HEADS, 17, 3), draw(2, HEADS, 17, 3), CENTROIDS))
    q, k, c = x.float(), z.float(), centroids.float()
    assert distance(Tokens(x, z), 1.5) == distance(Tokens(q, k), 1.5)
    assert clustering(Tokens(x, z), centroids, top=2, cap=3) == clustering(Tokens(q, k), c, top=2, cap=3)
    for by in ("nearest", "shared"):
        assert block_bigbird(Tokens(x, z), centroids, 2, 3, by=by) == block_bigbird(Tokens(q, k), c, 2, 3, by=by)


def test_shared_blocks_bound_the_edges_and_skip_what_is_there() -> None:
    same, one = torch.zeros(1, 64, 2), torch.zeros(1, 1, 2)
    wide = {"block_window": 1, "global_blocks": 1}
    graph = block_bigbird(Tokens(same), one, 2, 4, **wide)  # type: ignore[arg-type]
    fixed = block_bigbird(Tokens(same), one + 9, 1, 4, **wide)  # type: ignore[arg-type]
    assert graph.num_edges <= fixed.num_edges + 2 * 64 * 4
    alone = block_bigbird(Tokens(same), one, 2, 4)
    assert alone.degree.unique().tolist() == [8]
    assert graph.degree[0, 32:36].tolist() == [4 * (3 + 1 + 2)] * 4  # a window of three, a global one, and two more


def test_centroids_of_blocks_are_those_of_their_means() -> None:
    torch.manual_seed(0)
    projection, data = Projection(16, HEADS, 2), samples(2, 0)
    centroids = fit_centroids(projection, data, 3, block_size=8)
    points = []
    for query, key, graph in data:
        for x in projection(query, key):
            points += [
                part.mean(1) for side in x.split(graph.query_ptr.diff().tolist(), 1) for part in side.split(8, 1)
            ]
    x = torch.stack(points, 1)
    nearest = torch.cdist(x, centroids).argmin(2)
    for head, k in itertools.product(range(HEADS), range(3)):
        torch.testing.assert_close(centroids[head, k], x[head, nearest[head] == k].mean(0), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="Expected 'samples' with graphs for 'block_size'"):
        fit_centroids(projection, [(query, key)], 3, block_size=8)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_the_ground_truth_is_the_support_of_dense_entmax(
    alpha: float, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiles.SCORES_PER_TILE, "cpu", 100)
    query, key, ptr = draw(1, HEADS, 30, 6).double(), draw(2, HEADS, 30, 6).double(), torch.tensor([0, 11, 30])
    graph = ground_truth_graph(Tokens(query, key, query_ptr=ptr, is_causal=is_causal), alpha=alpha, scale=0.9)
    for b, head in itertools.product(range(2), range(HEADS)):
        part = slice(ptr[b], ptr[b + 1])
        scores = 0.9 * query[head, part] @ key[head, part].T
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
        dense = (entmax.entmax15 if alpha == 1.5 else entmax.sparsemax)(scores, dim=1)
        assert torch.equal(graph.to_dense(b)[head], dense > 1e-12)


def brute_loss(x: Tensor, z: Tensor, graph: AttentionGraph, per: str, seed: int) -> Tensor:
    share = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(seed))
    terms: dict[tuple[int, int], list[Tensor]] = {}
    for e, (key, query) in enumerate(graph.edge_index.T.tolist()):
        head, b = int(graph.edge_head[e]), int((graph.query_ptr <= query).sum()) - 1
        start, end = graph.key_ptr[b : b + 2].tolist()
        drawn = start + int(share[e] * (end - start))
        near, far = ((x[head, query] - z[head, k]).square().sum() for k in (key, drawn))
        terms.setdefault((head, query) if per == "query" else (e, 0), []).append(near - far)
    return torch.stack([(1 + torch.stack(each).sum()).clamp(min=0) for each in terms.values()]).mean()


@pytest.mark.parametrize("per", ["query", "pair"])
def test_the_loss_is_its_definition(per: str) -> None:
    ptr = torch.tensor([0, 5, 12])
    x, z = (draw(seed, HEADS, 12, 3).double().requires_grad_() for seed in (1, 2))
    graph = ground_truth_graph(Tokens(draw(3, HEADS, 12, 4), draw(4, HEADS, 12, 4), query_ptr=ptr))
    graph = graph.select(graph.edge_index[1] != 3)  # a query without edges does not count
    loss = projection_loss(x, z, graph, per=per, seed=7)
    expected = brute_loss(x, z, graph, per, 7)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(loss, (x, z)), torch.autograd.grad(expected, (x, z)), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("per", ["query", "pair"])
def test_a_graph_without_edges_has_no_loss(per: str) -> None:
    x = draw(1, HEADS, 5, 3).requires_grad_()
    loss = projection_loss(x, x, patterns.full(5).select(torch.zeros(25, dtype=torch.bool)), per=per, seed=7)
    assert float(loss.detach()) == 0
    loss.backward()
    assert x.grad is not None
    assert not x.grad.any()


def test_projections_have_four_channels_by_default() -> None:
    assert Projection(8, 2)(draw(1, 2, 5, 8), draw(2, 2, 6, 8))[1].shape == (2, 6, 4)


def samples(count: int, seed: int) -> list[Any]:
    """Heads whose scores see four of sixteen channels alone."""
    seen = torch.zeros(16).index_fill_(0, torch.arange(4), 6.0)
    made = []
    for number in range(count):
        query, key = draw(seed + number, 2, HEADS, 48, 16)
        ptr = torch.tensor([0, 20, 48])
        made.append((query, key, ground_truth_graph(Tokens(query * seen, key * seen, query_ptr=ptr), scale=0.06)))
    return made


@pytest.mark.parametrize("options", [{}, {"hidden": 16}, {"shared": True}])
def test_a_fitted_projection_finds_what_attention_uses(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    projection, (test,) = Projection(16, HEADS, 4, **options), samples(1, 900)
    query, key, ground_truth = test

    def recall(edges: int = 8) -> float:
        x, z = projection(query, key)
        match = compare(ground_truth, distance(Tokens(x, z, query_ptr=ground_truth.query_ptr), 1e9, cap=edges))
        assert float(match.sparsity.min()) > 0.6
        return float(match.recall.mean())

    before = recall()
    losses = fit_projection(projection, samples(40, 0), epochs=8, learning_rate=1e-2, progress=False)
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert recall() > max(before, 0.34) + 0.1  # as many keys at random hold a third
    state = projection.state_dict()
    torch.manual_seed(0)
    again = Projection(16, HEADS, 4, **options)
    fit_projection(again, samples(40, 0), epochs=8, learning_rate=1e-2, progress=False)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in state.items())


def test_centroids_are_those_of_k_means_and_the_source_keeps_them() -> None:
    torch.manual_seed(0)
    projection, data = Projection(16, HEADS, 2), samples(3, 0)
    centroids = fit_centroids(projection, data, 5, seed=1)
    assert centroids.shape == (HEADS, 5, 2)
    assert torch.equal(centroids, fit_centroids(projection, data, 5, seed=1))
    half = [tuple(x.bfloat16() if x.is_floating_point() else x for x in sample[:2]) for sample in data]
    assert fit_centroids(projection, half, 5, seed=1).dtype == torch.bfloat16  # which numpy does not have
    x = torch.cat([torch.cat(projection(q, z), 1) for q, z, _ in data], 1)
    nearest = torch.cdist(x, centroids).argmin(2)
    for head, k in itertools.product(range(HEADS), range(5)):
        torch.testing.assert_close(centroids[head, k], x[head, nearest[head] == k].mean(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(fit_centroids(projection, data, 1)[:, 0], x.mean(1), rtol=1e-3, atol=1e-3)
    source = SparsefinderSource(projection, clustering, window=1, num_global=1, centroids=centroids)
    assert torch.equal(source.state_dict()["rule.centroids"], centroids)
    assert "clustering, window=1, num_global=1" in repr(source)
    query, key, ground_truth = data[0]
    graph = source(
        Tokens(query, key, query_ptr=ground_truth.query_ptr, key_ptr=ground_truth.key_ptr, bipartite=False)
    ).graph
    ptr, (x, z) = ground_truth.query_ptr, projection(query, key)
    alone = clustering(Tokens(x, z, query_ptr=ptr), centroids)
    assert graph == alone | patterns.window(None, 1, ptr=ptr) | patterns.global_tokens(None, 1, ptr=ptr)


RULES: dict[str, dict[str, Any]] = {
    "distance": {"rule": distance, "threshold": 2.0}, "bucketing": {"rule": bucketing, "num_buckets": 6},
    "clustering": {"rule": clustering, "centroids": CENTROIDS[..., :2]},
    "block_bigbird": {"rule": block_bigbird, "centroids": CENTROIDS[..., :2], "k": 1, "block_size": 3, "block_window": 1, "global_blocks": 1},
    "union": {"rule": clustering, "centroids": CENTROIDS[..., :2], "window": 2, "num_global": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_a_graph_that_holds_the_ground_truth_gives_the_output_of_dense_entmax(name: str) -> None:
    torch.manual_seed(0)
    source = SparsefinderSource(Projection(6, HEADS, 2), **RULES[name])
    conv = AttentionConv(8, 6, HEADS, source, normalizer="entmax15").double().eval()
    x, ptr = 3 * draw(1, 40, 8).double(), torch.tensor([0, 17, 40])
    query, key, value = (
        lin(x).view(40, HEADS, 6).transpose(0, 1) for lin in (conv.lin_query, conv.lin_key, conv.lin_value)
    )
    ground_truth = ground_truth_graph(Tokens(query, key, query_ptr=ptr))
    predicted = conv(x, ptr=ptr, seed=0, return_graph=True)[1]
    match = compare(ground_truth, predicted)
    assert 0 < float(match.recall.min()) < 1
    joined = predicted | ground_truth
    assert float(compare(ground_truth, joined).recall.min()) == float(compare(ground_truth, joined).exact.min()) == 1
    assert joined.num_edges < patterns.full(None, heads=HEADS, ptr=ptr).num_edges
    dense = []
    for start, end in itertools.pairwise(ptr.tolist()):
        q, k, v = (part[:, start:end] for part in (query, key, value))
        dense.append(entmax.entmax15(q @ k.mT * 6**-0.5, dim=-1) @ v)
    expected = torch.cat(dense, 1).transpose(0, 1).flatten(1)
    torch.testing.assert_close(conv(x, joined), expected, rtol=1e-10, atol=1e-10)
    off = (conv(x, predicted) - expected).abs().unflatten(1, (HEADS, 6)).amax(2).T  # [H, N]
    missed = joined.degree > predicted.degree
    assert off[~missed].max() < 1e-10
    assert off[missed].max() > 1e-3  # the control: what is not foretold is missed
    assert torch.equal((~missed).double().mean(1), match.exact)


X = torch.ones(2, 5, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: distance(Tokens(X), -1), ValueError, r"Expected 'threshold' in \[0, inf\] \(got -1\)"),
        (lambda: distance(Tokens(X), 1, cap=0), ValueError, "Expected 'cap' to be at least 1"),
        (lambda: clustering(Tokens(X), torch.ones(2, 3, 4)), ValueError, r"Expected 'centroids' to be \[H, K, r\]"),
        (lambda: clustering(Tokens(X), torch.ones(3, 3, 3)), ValueError, r"Expected 'centroids' to be \[2, K, r\] or"),
        (lambda: clustering(Tokens(X), CENTROIDS, top=5), ValueError, r"Expected 'top' to be at most 4"),
        (lambda: block_bigbird(Tokens(X), CENTROIDS, 1, 2, by="x"), ValueError, "Expected 'by' to be one of"),
        (lambda: block_bigbird(Tokens(X, bipartite=True), CENTROIDS, 1, 2, block_window=1), ValueError, "with 'block_window' .got a pair"),
        (lambda: block_bigbird(Tokens(X, X[:, :4]), CENTROIDS, 1, 2, global_blocks=1), ValueError, "with 'global_blocks' .got a pair"),
        (lambda: buckets(X[0], 2), ValueError, r"Expected 'x' to be \[H, N, r\]"),
        (lambda: Projection(4)(X, X), ValueError, r"Expected 'query' to be \[H, N, C\] = \[1, any, 4\]"),
        (lambda: projection_loss(X, X, patterns.full(4)), ValueError, r"Expected 'query' to be \[H, N, r\]"),
        (lambda: fit_projection(Projection(3), []), ValueError, r"Expected 'samples' to be at least one"),
        (lambda: fit_projection(Projection(3), cast(Any, iter([]))), TypeError, r"Expected 'samples' to be a sequence \(got list_iterator\)"),
        (lambda: fit_projection(Projection(3, 2), cast(Any, [(X, X)])), TypeError, r"Expected 'samples\[0\]' to be query, key and graph \(got 2 parts\)"),
        (lambda: fit_projection(cast(Any, 3), [(X, X, patterns.full(5))]), TypeError, "Expected 'projection' to be a"),
        (lambda: fit_centroids(cast(Any, 3), [(X, X)], 2), TypeError, "Expected 'projection' to be a module"),
        (lambda: fit_centroids(Projection(3, 2), [(X, X, 3)], 2, block_size=2), TypeError, r"Expected 'graph of samples\[0\]' to be an AttentionGraph"),
        (lambda: fit_centroids(Projection(3, 2), [(X, X, patterns.full(4))], 2, block_size=2), ValueError, r"Expected 'samples\[0\]' with a graph over 5 queries and 5 keys"),
        (lambda: SparsefinderSource(Projection(3), distance, size=3), TypeError, "Expected options of 'rule'"),
        (lambda: SparsefinderSource(Projection(3), distance, num_global=-1), ValueError, "Expected 'num_global' to be"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_pair_has_no_window_and_no_global_tokens() -> None:
    tokens, projection = Tokens(X, query_ptr=torch.tensor([0, 5]), bipartite=True), Projection(3, 2)
    added, plain = (
        SparsefinderSource(projection, bucketing, num_buckets=2, **more)(tokens).graph
        for more in ({"window": 1, "num_global": 1}, {})
    )
    assert added == plain


def test_a_projection_starts_as_torchs_linear_layers() -> None:
    """With bounds by the width that a layer reads."""
    torch.manual_seed(0)
    projection = Projection(400, HEADS, dim=2, hidden=100)
    for weight, bias, bound in zip(projection.weights, projection.biases, (400**-0.5, 100**-0.5), strict=True):
        for drawn in (weight, bias):
            assert float(drawn.detach().abs().max()) < 1.0001 * bound
        assert float(weight.detach().abs().max()) > 0.9 * bound


def test_the_relu_stands_behind_the_hidden_layer() -> None:
    projection, x = Projection(5, HEADS, dim=2, hidden=7), draw(1, HEADS, 6, 5)
    for side, found in enumerate(projection(x, x)):
        hidden = (x @ projection.weights[0][side] + projection.biases[0][side]).relu()
        torch.testing.assert_close(found, hidden @ projection.weights[1][side] + projection.biases[1][side])


def noted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, keyword: str) -> list[int]:
    """What a function of a module is given as a keyword from now on."""
    found: list[int] = []
    inner = getattr(module, name)

    def call(*arguments: Any, **options: Any) -> Any:
        found.append(options[keyword])
        return inner(*arguments, **options)

    monkeypatch.setattr(module, name, call)
    return found


def test_each_step_draws_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = noted(monkeypatch, sparsefinder.projection, "projection_loss", "seed")
    x = draw(1, HEADS, 6, 5)
    samples = [(x, x, patterns.self_loops(6).expand(HEADS))] * 3
    fit_projection(Projection(5, HEADS, dim=2), samples, epochs=4, seed=9, progress=False)
    assert sorted(seeds) == list(range(9, 21))
    seeds.clear()
    fit_projection(Projection(5, HEADS, dim=2), samples, progress=False)
    assert sorted(seeds) == list(range(15))  # five passes from seed 0, if nothing else is asked for
    seeds.clear()
    fit_projection(Projection(5, HEADS, dim=2), samples, epochs=1, seed=2**63 - 1, progress=False)
    assert sorted(seeds) == [0, 1, 2**63 - 1]  # the largest seed and the first ones


def test_samples_of_any_mode_are_fitted_to_and_get_no_gradients() -> None:
    linear, x, losses = torch.nn.Linear(5, 5), draw(1, HEADS, 6, 5), []
    with torch.inference_mode():
        of_inference = linear(x), patterns.window(6, 1)
    for sample, graph in (
        (linear(x).detach(), patterns.window(6, 1)), (linear(x), patterns.window(6, 1)), of_inference,
    ):  # fmt: skip
        torch.manual_seed(0)
        projection = Projection(5, HEADS, dim=2)
        losses.append(fit_projection(projection, [(sample, sample, graph)], epochs=3, progress=False))
    assert losses == losses[:1] * 3
    assert linear.weight.grad is None


def test_k_means_takes_seeds_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = noted(monkeypatch, pytest.importorskip("sklearn.cluster"), "KMeans", "random_state")
    x = draw(1, HEADS, 6, 5)
    for seed in (3, 2**31 + 3, 2**32 + 4):
        fit_centroids(Projection(5, HEADS, dim=2), [(x, x)], 2, seed=seed)
    assert sorted({*found}) == [3, 4, 2**31 + 3]
    found.clear()
    fit_centroids(Projection(5, HEADS, dim=2), [(x, x)], 2)
    assert {*found} == {0}


def test_blocks_of_queries_and_keys_are_cut_by_offsets_of_their_own() -> None:
    """As many centroids as points are the points."""
    pytest.importorskip("sklearn")
    projection, q, z = Projection(5, HEADS, dim=2), draw(1, HEADS, 6, 5), draw(2, HEADS, 6, 5)
    query_ptr, key_ptr, none = torch.tensor([0, 1, 6]), torch.tensor([0, 4, 6]), torch.zeros(7, dtype=torch.int64)
    graph = AttentionGraph(none, none[:0], 6, 6, query_ptr=query_ptr, key_ptr=key_ptr)
    found = fit_centroids(projection, [(q, z, graph)], 7, block_size=2)
    x, y = projection(q, z)
    cuts = [(x, [(0, 1), (1, 3), (3, 5), (5, 6)]), (y, [(0, 2), (2, 4), (4, 6)])]
    means = torch.stack([side[:, start:end].mean(1) for side, parts in cuts for start, end in parts], 1).detach()
    for head in range(HEADS):
        order = [each[head][each[head][:, 0].argsort()] for each in (found, means)]
        torch.testing.assert_close(*order)


def test_global_tokens_of_a_causal_source_are_causal() -> None:
    source, x, ptr = (
        SparsefinderSource(Projection(5, HEADS), distance, num_global=2, threshold=0.1), draw(1, HEADS, 9, 5), pointer([4, 5]),
    )  # fmt: skip
    graph = source(Tokens(x, query_ptr=ptr, is_causal=True)).graph
    assert graph.is_causal
    assert not graph.later.any()
    assert bool(graph.contains(torch.tensor([[0, 1], [3, 3]])).all())


def test_a_distance_of_zero_is_near() -> None:
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]])
    assert distance(Tokens(x), 0.0).to_dense()[0].int().tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
