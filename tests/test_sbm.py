"""The stochastic block model: probabilities, expectations, and the module that predicts it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from problems import copies, random_graph, refuses
from torch import Tensor
from torch.nn.utils import prune

from sbm_pyg import SBM, AttentionGraph, SBMSource, Tokens, ops, sample_edges
from sbm_pyg import SBMHead as Head
from sbm_pyg.sources import patterns

Y = torch.rand(2, 6, 3)
Z = torch.rand(2, 8, 3)
S = torch.rand(2, 3, 3) / 9


def SBMHead(*sizes: Any, **options: Any) -> Head:
    """A head with the form and the start of the paper where a test asks for no others."""
    return Head(
        *sizes, **{"parameterization": "paper", **({} if len(sizes) > 3 else {"cluster_init": "kaiming"}), **options}
    )


def ragged() -> SBM:
    generator = torch.Generator().manual_seed(0)
    y, z, s = (
        torch.rand(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 9, 3), (2, 7, 3), (2, 3, 3))
    )
    return SBM(y, z, s, torch.tensor([0, 4, 9]), torch.tensor([0, 5, 7]))


def test_expectations_equal_the_dense_sums() -> None:
    sbm = ragged()
    dense = [sbm.edge_prob_dense(sequence) for sequence in range(2)]
    assert [tuple(p.shape) for p in dense] == [(2, 4, 5), (2, 5, 2)]
    by_hand = torch.einsum("hnk,hkl,hml->hnm", sbm.query_membership, sbm.block_matrix, sbm.key_membership)
    torch.testing.assert_close(dense[1], by_hand[:, 4:, 5:])
    edges = torch.stack([p.sum((1, 2)) for p in dense])
    torch.testing.assert_close(sbm.expected_edges(), edges)
    torch.testing.assert_close(sbm.expected_density(), torch.stack([p.mean((1, 2)) for p in dense]))
    torch.testing.assert_close(sbm.expected_degree(), torch.cat([p.sum(2) for p in dense], dim=1))


def test_blocks_that_link_to_themselves_alone_multiply_nothing() -> None:
    sbm = ragged()
    y, z, identity = sbm.query_membership, sbm.key_membership, torch.eye(3).double().expand(2, -1, -1)
    plain = SBM(y, z, query_ptr=sbm.query_ptr, key_ptr=sbm.key_ptr)
    by_hand = SBM(y, z, identity, sbm.query_ptr, sbm.key_ptr)
    assert torch.equal(plain.block_matrix, by_hand.block_matrix)
    assert plain.rate is y
    for one, other in (
        (plain, by_hand), (plain.limit(1.5), by_hand.limit(1.5)), (plain.with_density(0.3), by_hand.with_density(0.3)),
    ):  # fmt: skip
        assert one.rate is one.query_membership
        assert torch.equal(one.rate, other.rate)
        leaves = (torch.autograd.grad(each.expected_edges().sum(), (y, z), retain_graph=True) for each in (one, other))
        for mine, theirs in zip(*leaves, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_rates_that_are_scaled_are_those_of_scaled_memberships() -> None:
    sbm = ragged()
    for scaled in (sbm.limit(1.5), sbm.with_density(0.3)):
        torch.testing.assert_close(scaled.rate, scaled.query_membership @ scaled.block_matrix)
        assert not torch.equal(scaled.rate, sbm.rate)


def test_expected_density_is_differentiable() -> None:
    sbm = ragged()
    assert torch.autograd.gradcheck(
        lambda y, z, s: SBM(y, z, s, sbm.query_ptr, sbm.key_ptr).expected_density(),
        (sbm.query_membership, sbm.key_membership, sbm.block_matrix),
    )


def test_gates_of_a_strict_model_are_one_and_have_the_gradient_of_its_probabilities() -> None:
    y, z = (torch.rand(2, 6, 3, dtype=torch.float64).requires_grad_() for _ in range(2))
    sbm, graph = SBM(y, z).strict(), patterns.full(6, heads=2, is_causal=True)
    gate, probability = sbm.gate(graph), sbm.on(graph)
    assert torch.equal(gate, torch.ones_like(gate))
    weight = torch.rand(graph.num_edges, dtype=torch.float64)
    wanted = torch.autograd.grad(probability, (y, z), weight)
    torch.testing.assert_close(torch.autograd.grad(gate, (y, z), weight), wanted)


@pytest.mark.parametrize("kind", ["full", "causal", "strict"])
def test_cut_density_is_that_of_graphs_that_are_drawn(kind: str) -> None:
    """And expected density is more where probabilities exceed 1, as under a share."""
    random, ptr = torch.Generator().manual_seed(0), torch.tensor([0, 30, 70])
    y, z = torch.rand(2, 2, 70, 3, generator=random, dtype=torch.float64).pow(6).requires_grad_().unbind()
    sbm = SBM(y, z, query_ptr=ptr, key_ptr=ptr)
    sbm = {"full": sbm, "causal": sbm.causal(), "strict": sbm.strict()}[kind].with_density(0.4)
    cut, expected = sbm.cut_density().detach(), sbm.expected_density().detach()
    assert bool((cut < 0.95 * expected).all())
    edges = sample_edges(copies(sbm, 200), clamp=True, seed=0).edges_per_sequence.view(200, 2, 2).double()
    lengths = ptr.diff()[:, None]
    pairs = {"full": lengths**2, "causal": lengths * (lengths + 1) // 2, "strict": lengths * (lengths - 1) // 2}[kind]
    error = edges.std(0) / pairs / 200**0.5
    assert bool(((edges.mean(0) / pairs - cut).abs() < 5 * error).all())


def test_cut_density_is_differentiable_and_the_same_below_one() -> None:
    sbm = ragged()
    parts = (sbm.query_membership, sbm.key_membership, sbm.block_matrix)

    def cut(factor: float, *parts: Tensor) -> Tensor:
        y, z, s = parts
        return SBM(factor * y, z, s, sbm.query_ptr, sbm.key_ptr).cut_density()

    dense = torch.cat([sbm.edge_prob_dense(each).detach().flatten() for each in range(2)])
    low, high = 0.9 / float(dense.max()), 1.01 / float(dense.median())  # half of the pairs above 1
    for factor in (low, high):
        assert torch.autograd.gradcheck(lambda *parts: cut(factor, *parts), parts)  # noqa: B023
    torch.testing.assert_close(cut(low, *parts), low * sbm.expected_density())


def test_edge_prob_and_its_gradients() -> None:
    """dY = G Z S^T, dS = Y^T G Z, dZ = G^T Y S."""
    generator = torch.Generator().manual_seed(0)
    y, z, s = (
        torch.rand(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 6, 3), (2, 8, 3), (2, 3, 3))
    )
    sbm = SBM(y, z, s)
    graph = random_graph(2, 6, 8, 0.5)
    prob = sbm.on(graph)
    torch.testing.assert_close(prob, sbm.edge_prob_dense()[graph.to_dense()])
    weight = torch.rand(graph.num_edges, generator=generator, dtype=torch.float64)
    gate = sbm.gate(graph)
    assert torch.equal(gate, torch.ones_like(gate))
    g = torch.zeros(2, 6, 8, dtype=torch.float64)
    g[graph.to_dense()] = weight
    closed = (g @ z @ s.mT, g.mT @ y @ s, y.mT @ g @ z)
    for result in (prob, gate):
        torch.testing.assert_close(torch.autograd.grad(result, (y, z, s), weight, retain_graph=True), closed)


@pytest.mark.parametrize(("cluster_init", "ratio"), [("kaiming", 1.016), ("orthogonal", math.e)])
def test_head_starts_as_documented(cluster_init: str, ratio: float) -> None:
    torch.manual_seed(0)
    head = SBMHead(32, heads=2, num_clusters=128, cluster_init=cluster_init).requires_grad_(False)
    sbm = head(Tokens(torch.randn(2, 50, 32), torch.randn(2, 60, 32)))
    prob = sbm.edge_prob_dense()
    assert prob.shape == (2, 50, 60)
    assert float(prob.mean()) == pytest.approx(0.25, abs=0.005)
    torch.testing.assert_close(sbm.block_matrix.sum((1, 2)), torch.ones(2))
    off = ~torch.eye(128, dtype=torch.bool)
    assert float(sbm.block_matrix.diagonal(dim1=1, dim2=2).mean() / sbm.block_matrix[:, off].mean()) == pytest.approx(
        ratio, rel=0.03
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_orthogonal_clusters_begin_in_any_default_dtype(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        clusters = SBMHead(8, heads=2, num_clusters=5, cluster_init="orthogonal").clusters.detach()
    finally:
        torch.set_default_dtype(before)
    assert clusters.dtype == dtype
    product = clusters.double() @ clusters.double().mT
    torch.testing.assert_close(product, torch.eye(5).double().expand(2, 5, 5), rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("parameterization", ["paper", "mixed", "overlapping"])
def test_a_head_with_degrees_starts_as_one_without(parameterization: str) -> None:
    """All degrees are equal, and the density is the one asked for; then they are factors that learn."""
    torch.manual_seed(0)
    head = SBMHead(
        16, 2, 8, "orthogonal", parameterization=parameterization, initial_density=0.1, degree_corrected=True
    )
    query, key = torch.randn(2, 50, 16), torch.randn(2, 60, 16)
    sbm = head(Tokens(query, key))
    assert float(sbm.expected_density().mean().detach()) == pytest.approx(0.1, rel=0.2)
    theta, eta = head.degrees(query, key)
    assert theta.shape == (2, 50)
    assert eta.shape == (2, 60)
    torch.testing.assert_close(theta, torch.full_like(theta, 0.1**0.25))
    with torch.no_grad():
        head.degree_weight.normal_()
    theta, eta = head.degrees(query, key)
    by_hand = torch.sigmoid(torch.einsum("hnc,hc->hn", key, head.degree_weight[:, 1]) + head.degree_bias[:, 1, None])
    torch.testing.assert_close(eta, by_hand)
    prob = head(Tokens(query, key)).edge_prob_dense()
    head.degree_corrected = False
    plain = head(Tokens(query, key)).edge_prob_dense()
    torch.testing.assert_close(prob, theta[:, :, None] * plain * eta[:, None])
    assert bool((prob < plain).all())
    prob.sum().backward()
    assert head.degree_weight.grad is not None
    assert bool(head.degree_weight.grad.all())


@pytest.mark.parametrize("degree_corrected", [False, True])
@pytest.mark.parametrize("parameterization", ["paper", "mixed", "assortative", "overlapping"])
def test_heads_know_how_large_memberships_can_be(parameterization: str, degree_corrected: bool) -> None:
    """So nobody waits for a device to learn it."""
    head = SBMHead(8, 2, 4, parameterization=parameterization, degree_corrected=degree_corrected)
    query = 100 * torch.randn(2, 30, 8)
    made = head(Tokens(query, query_ptr=torch.tensor([0, 10, 30])))
    for sbm in (made, made.with_density(0.9), made.strict().with_density(0.9).limit(1e9), made.causal().limit(0.1)):
        assert sbm._membership_bound is not None
        assert 0 <= sbm.query_membership.min() <= sbm.query_membership.max() <= sbm._membership_bound
        for x in (sbm.key_membership, sbm.block_matrix):
            assert 0 <= x.min() <= x.max() <= 1
    assert replace(made, query_membership=-query[..., :4])._membership_bound is None


@pytest.mark.parametrize("parameterization", ["assortative", "overlapping"])
@pytest.mark.parametrize(("groups", "side"), [(2, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_with_groups_is_the_product_of_small_heads(
    parameterization: str, groups: int, side: int, tied: bool
) -> None:
    """Probabilities and gradients are those of the product, whether layers are watched or not."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"parameterization": parameterization, "temperature": 0.6, "tied": tied}
    more: dict[str, Any] = {"initial_density": 0.3, "degree_corrected": True, "groups": groups}
    head = SBMHead(5, 2, side**groups, "orthogonal", **options, **more).double()
    torch.nn.init.normal_(head.degree_weight)
    query, key = torch.randn(2, 2, 7, 5, dtype=torch.float64, requires_grad=True)
    tokens = Tokens(query, key, bipartite=not tied)
    theta, eta = head.degrees(query, query if tied else key)
    prob = theta[:, :, None] * eta[:, None]
    for number in range(groups):
        small = SBMHead(5, 2, side, **options, initial_density=0.3 ** (0.5 / groups)).double()
        small.mlp = head.mlp
        del small.clusters
        small.clusters = cast(Any, head.clusters[:, number * side : (number + 1) * side])
        prob = prob * small(tokens).edge_prob_dense()
    learnt = [query, head.clusters, head.degree_weight, *head.mlp.parameters()]
    weight = torch.randn(2, 7, 7, dtype=torch.float64)
    want = torch.autograd.grad((weight * prob).sum(), learnt, retain_graph=True)
    for _ in range(2):
        sbm = head(tokens)
        assert sbm.num_clusters == side**groups
        torch.testing.assert_close(sbm.edge_prob_dense(), prob, rtol=1e-12, atol=1e-12)
        got = torch.autograd.grad((weight * sbm.edge_prob_dense()).sum(), learnt)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        head.mlp.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(("parameterization", "density"), [("assortative", 1 / 64), ("overlapping", 0.1)])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_head_with_groups_starts_as_one_without(parameterization: str, density: float, groups: int) -> None:
    torch.manual_seed(0)
    head = SBMHead(16, 2, 64, parameterization=parameterization, initial_density=0.1, groups=groups).requires_grad_(
        False
    )
    found = head(Tokens(torch.randn(2, 50, 16), torch.randn(2, 60, 16))).expected_density()
    assert float(found.mean()) == pytest.approx(density, rel=0.1)
    assert head.clusters.shape == (2, {1: 64, 2: 16, 3: 12}[groups], 16)


def test_degrees_of_a_head_without() -> None:
    with pytest.raises(ValueError, match=r"Expected an SBMHead with degrees \(got one without\)"):
        SBMHead(4).degrees(torch.randn(1, 3, 4), torch.randn(1, 3, 4))


def test_head_is_equations_5_to_7() -> None:
    head = SBMHead(4, heads=2, num_clusters=3)
    q, k = torch.randn(2, 5, 4), torch.randn(2, 6, 4)
    sbm = head(Tokens(q, k))
    for h in range(2):
        c = head.clusters[h]
        torch.testing.assert_close(sbm.block_matrix[h], torch.softmax((c @ c.T).flatten(), 0).view(3, 3))
        torch.testing.assert_close(sbm.query_membership[h], torch.sigmoid(head.mlp(q[h]) @ c.T))
        torch.testing.assert_close(sbm.key_membership[h], torch.sigmoid(head.mlp(k[h]) @ c.T))


@pytest.mark.parametrize("parameterization", ["paper", "mixed"])
def test_head_calls_layers_that_someone_watches(parameterization: str) -> None:
    """A hook changes nothing but what it sees, and no later layer writes over that."""
    head = SBMHead(4, 2, 3, parameterization=parameterization, temperature=0.7)
    q, k = torch.randn(2, 5, 4), torch.randn(2, 6, 4)
    plain, seen = head(Tokens(q, k)), []
    for layer in (head.mlp[0], head.mlp[2]):
        layer.register_forward_hook(lambda module, inputs, output: seen.append((module, *inputs, output)))
    watched = head(Tokens(q, k))
    torch.testing.assert_close(watched.edge_prob_dense(), plain.edge_prob_dense())
    assert len(seen) == 2  # one pass for queries and keys
    for module, x, out in seen:
        torch.testing.assert_close(out, torch.nn.functional.linear(x, module.weight, module.bias))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("change", ["weight_norm", "prune", "replace"])
def test_head_trains_with_changed_layers(change: str) -> None:
    class Scaled(torch.nn.Module):
        """Stands for adapters: a layer around a layer, with a parameter of its own."""

        def __init__(self, layer: torch.nn.Linear) -> None:
            super().__init__()
            self.layer, self.weight, self.bias = layer, layer.weight, layer.bias
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale

    head = SBMHead(4, 2, 3)
    layer: Any = head.mlp[2]
    if change == "weight_norm":
        torch.nn.utils.weight_norm(layer)
    elif change == "prune":
        prune.random_unstructured(layer, "weight", amount=0.5)
    else:
        head.mlp[2] = Scaled(layer)
    q = torch.randn(2, 5, 4)
    for _ in range(2):
        head.zero_grad()
        head(Tokens(q)).expected_density().sum().backward()
        assert all(p.grad is not None for p in head.parameters())


def test_repr_and_sizes() -> None:
    assert repr(ragged()) == "SBM(2 sequences, 2 heads, 9 queries, 7 keys, 3 blocks)"
    assert repr(SBM(Y[:1, :1, :1], Z[:1, :1, :1], S[:1, :1, :1])) == "SBM(1 sequence, 1 head, 1 query, 1 key, 1 block)"
    assert "num_clusters=3" in repr(SBMHead(4, 2, 3))
    assert "groups" not in repr(SBMHead(4, 2, 3))
    assert "block_size" not in repr(SBMSource(SBMHead(4, 2, 3)))
    assert "block_size=2" in repr(SBMSource(SBMHead(4, 2, 3), block_size=2))
    assert "groups=2" in repr(SBMHead(4, 2, 9, parameterization="assortative", groups=2))


def made(make: Callable[..., Any], *rows: tuple[Any, type[Exception], str]) -> list[tuple[Callable[[], Any], Any, str]]:
    """Refusals of calls with these arguments."""
    return [(partial(make, arguments), error, message) for arguments, error, message in rows]


REFUSED = [
    *made(lambda arguments: SBM(*arguments),
        ((Y.int(), Z, S), TypeError, r"Expected 'query_membership' to be a floating tensor \(got torch.int32\)"),
        ((Y, Z.double(), S), TypeError, r"Expected 'key_membership' to be torch.float32, as 'query_membership' is \(got torch.float64\)"),
        ((Y, Z, S.to("meta")), ValueError, r"Expected 'block_matrix' on cpu, as 'query_membership' is \(got meta\)"),
        ((Y[0], Z, S), ValueError, r"Expected 'query_membership' to have three dimensions \(got \[6, 3\]\)"),
        ((Y[..., :0], Z[..., :0], S[:, :0, :0]), ValueError, r"at least one head and one block \(got H = 2, K = 0\)"),
        ((Y, Z[:1], S), ValueError, r"Expected 'key_membership' to be \[2, M, 3\] \(got \[1, 8, 3\]\)"),
        ((Y, Z, S[:, :2]), ValueError, r"Expected 'block_matrix' to be \[2, 3, 3\] \(got \[2, 2, 3\]\)"),
        ((Y, Z, S, torch.tensor([0, 3, 6])), ValueError, r"Expected 'key_ptr' where N != M"),
        ((Y, Z, S, torch.tensor([0.0, 6.0])), TypeError, r"Expected 'query_ptr' to be int64 \(got torch.float32\)"),
        ((None, Z, S), TypeError, r"Expected 'query_membership' to be a tensor \(got NoneType\)"),
        ((Y, Z.tolist(), S), TypeError, r"Expected 'key_membership' to be a tensor \(got list\)"),
        ((Y, Z, S > 0), TypeError, r"Expected 'block_matrix' to be a floating tensor \(got torch.bool\)")),
    *made(lambda options: SBMHead(**{"channels": 4} | options),
        ({"heads": True}, TypeError, r"Expected 'heads' to be an int \(got bool\)"),
        ({"heads": -1}, ValueError, r"Expected 'heads' to be at least 1 \(got -1\)"),
        ({"channels": None}, TypeError, r"Expected 'channels' to be an int \(got NoneType\)"),
        ({"num_clusters": 2.5}, TypeError, r"Expected 'num_clusters' to be an int \(got float\)"),
        ({"initial_density": math.nan}, ValueError, r"Expected 'initial_density\' in \(0, 1\) \(got nan\)"),
        ({"initial_density": "0.5"}, TypeError, r"Expected 'initial_density\' to be a number in \(0, 1\) \(got str\)"),
        ({"temperature": 0}, ValueError, r"Expected 'temperature' in \[1e-06, inf\] \(got 0\)"),
        ({"tied": 1}, TypeError, r"Expected 'tied' to be a bool \(got int\)"),
        ({"degree_corrected": None}, TypeError, r"Expected 'degree_corrected' to be a bool \(got NoneType\)"),
        ({"parameterization": None}, ValueError, r"Expected 'parameterization' to be one of .* \(got None\)"),
        ({"groups": 2.0}, TypeError, r"Expected 'groups' to be an int \(got float\)"),
        ({"groups": 0}, ValueError, r"Expected 'groups' to be at least 1 \(got 0\)"),
        ({"groups": 17}, ValueError, r"Expected 'groups' in \[1, 16\] \(got 17\)"),
        ({"groups": 2}, ValueError,
         r"Expected 'parameterization' to be 'assortative' or 'overlapping' with groups=2 \(got 'paper'\)"),
        ({"groups": 3, "num_clusters": 100, "parameterization": "overlapping"}, ValueError,
         r"power of groups=3 \(got 100\). Take 64 = 4\*\*3 or 125 = 5\*\*3"),
        ({"groups": 2, "num_clusters": 48, "parameterization": "assortative"}, ValueError,
         r"Take 36 = 6\*\*2 or 49 = 7\*\*2"),
        ({"num_clusters": 0}, ValueError, r"Expected 'num_clusters' to be at least 1 \(got 0\)"),
        ({"cluster_init": "normal"}, ValueError, r"Expected 'cluster_init' to be 'kaiming' or 'orthogonal' \(got 'normal'\)")),
    *made(lambda vectors: SBMHead(4, 2, 3)(Tokens(*vectors)),
        ((torch.ones(2, 5, 4), [1.0]), TypeError, r"Expected 'key' to be a tensor \(got list\)"),
        ((torch.ones(2, 5, 4).double(), torch.ones(2, 5, 4).double()), TypeError,
         r"Expected 'query' to be torch.float32, as the SBMHead is"),
        ((torch.ones(2, 5, 3), None), ValueError,
         r"Expected 'query' to be \[H, N, C\] = \[2, any, 4\] \(got \[2, 5, 3\]\)")),
    (lambda: SBM(Y, Z, S).limit(-1), ValueError, r"Expected 'budget' in \(0, inf\] \(got -1\)"),
    (lambda: ragged().edge_prob_dense(cast(Any, 0.0)), TypeError, r"Expected 'sequence' to be an int \(got float\)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_refusals(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_sequences_count_from_the_end_too() -> None:
    assert torch.equal(ragged().edge_prob_dense(-1), ragged().edge_prob_dense(1))


def test_pairs_that_memory_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.checks, "available", lambda device: 2**30)
    ones = torch.ones(2, 200_000, 1)
    message = (
        r"Expected 'sequence' to ask for no more than memory holds \(got 80,000,000,000 pairs, 298.0 GiB of 1.0 GiB\)"
    )
    with pytest.raises(ValueError, match=message):
        SBM(ones, ones, ones[:, :1]).edge_prob_dense()
    assert SBM(ones, ones, ones[:, :1], torch.tensor([0, 10, 200_000])).edge_prob_dense(0).shape == (2, 10, 10)


def test_probabilities_are_of_this_models_edges_alone() -> None:
    """A pair across sequences has none."""
    sbm = ragged()
    whole = patterns.full(sbm.num_queries, heads=sbm.heads)
    other = AttentionGraph(whole.rowptr, whole.col, sbm.num_queries, sbm.num_queries, sbm.heads)
    square = SBM(sbm.query_membership, sbm.query_membership, sbm.block_matrix, sbm.query_ptr)
    for ask in (square.on, square.gate):
        ask(patterns.full(None, heads=sbm.heads, ptr=sbm.query_ptr))
        refuses(partial(ask, other), "Expected 'graph' over the sequences of this SBM")
        refuses(partial(ask, cast(Any, other.edge_index)), "AttentionGraph", TypeError)


def test_a_half_model_whose_product_fits_is_sampled() -> None:
    eye = torch.eye(128, dtype=torch.float16)[None]
    assert sample_edges(SBM(1000 * eye, eye / 2048, eye), seed=0).num_edges > 0
    with pytest.raises(ValueError, match="Expected 'query_membership @ block_matrix' to be finite"):
        sample_edges(SBM(60_000 * eye, eye / 60_000, 2 * eye), seed=0)


@pytest.mark.parametrize("change", ["deeper", "shallower", "no bias", "one layer", "compiled", "another activation"])
def test_head_calls_a_perceptron_of_another_kind(change: str) -> None:
    head, linear = SBMHead(4, 2, 3), torch.nn.Linear(4, 4)
    changes: dict[str, Any] = {
        "deeper": torch.nn.Sequential(*head.mlp, torch.nn.ReLU(), linear), "shallower": torch.nn.Sequential(linear),
        "no bias": torch.nn.Sequential(head.mlp[0], torch.nn.ReLU(), torch.nn.Linear(4, 4, bias=False)), "one layer": linear,
        "compiled": torch.compile(head.mlp, backend="eager"),
        "another activation": torch.nn.Sequential(head.mlp[0], torch.nn.GELU(), head.mlp[2]),
    }  # fmt: skip
    head.mlp = changes[change]
    q = torch.randn(2, 5, 4)
    expected = (head.mlp(q) @ head.clusters.mT + head.shift).sigmoid()
    torch.testing.assert_close(head(Tokens(q)).query_membership, expected)


def test_validate_passes_a_good_model() -> None:
    sbm = SBM(Y, Z, S)
    assert sbm.validate() is sbm
