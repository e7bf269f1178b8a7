"""What the flop counter says of our ops, against counts by hand and against dense attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count

from sbm_pyg import SBM, SequenceEncoder, make_attention, ops
from sbm_pyg.ops import flops, segments
from sbm_pyg.sources import patterns

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, N, C, V, K = 2, 24, 8, 12, 5
PTR = torch.tensor([0, 9, 24])
GRAPH = patterns.random(None, 4, ptr=PTR, heads=HEADS, seed=0)
E = GRAPH.num_edges


def counted(action: Callable[[], Any]) -> dict[str, int]:
    """Counts by name, of ours and of torch's."""
    with FlopCounterMode(display=False) as counter:
        action()
    return {
        str(op).removeprefix("sbm_pyg."): count for op, count in counter.get_flop_counts().get("Global", {}).items()
    }


def random(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def test_every_op_with_products_has_a_formula() -> None:
    known = {*ops.schemas.KERNELS}
    without = {
        "entmax_support",
        "segment_entmax",
        "segment_entmax_backward",
        "segment_top_k",
        "union_rows",
        "add_loops",
        "select_rows",
        "sample_probes",
        "sample_queries",
        "sample_systematic",
        "invalid_row",
        "weigh_effect",
        "edge_cross_entropy_backward",
        "sort_edges",
    }  # no products over channels or blocks
    assert {*flops.FORMULAS} == known - without
    for name in flops.FORMULAS:
        assert getattr(torch.ops.sbm_pyg, name) in flop_registry


def test_dot_and_gate() -> None:
    query, key = random(HEADS, N, K), random(HEADS, N, K)
    out: list[Tensor] = []
    assert counted(lambda: out.append(ops.edge_dot(query, key, GRAPH.rows))) == {"edge_dot": 2 * E * K}
    assert counted(lambda: out[0].sum().backward()) == {"edge_dot_backward": 4 * E * K}
    one_side = ops.edge_dot(query, key.detach(), GRAPH.rows)
    assert counted(lambda: one_side.sum().backward()) == {"edge_dot_backward": 2 * E * K}
    assert counted(lambda: out.append(ops.schemas.EdgeGate.apply(query, key, *GRAPH.rows[:2]))) == {}
    assert counted(lambda: out[1].sum().backward()) == {"edge_dot_backward": 4 * E * K}


def test_index_top_k() -> None:
    ptr, count, pairs = torch.tensor([0, N - 3, N]), torch.full((HEADS, N), 2), HEADS * ((N - 3) * (N - 2) // 2 + 6)
    given = (
        random(HEADS, N, 3, 4), random(HEADS, N, 3), random(HEADS, N, 4), ptr, ptr, count,
        segments.allowed_keys(ptr, ptr, N, True),
    )  # fmt: skip
    assert counted(lambda: ops.schemas.index_top_k(*given)) == {"index_top_k": 2 * 3 * 4 * pairs}
    assert counted(lambda: ops.schemas.index_top_k(given[0], None, *given[2:])) == {"index_top_k": 2 * 4 * pairs}


def test_imitation() -> None:
    leaves, log_p = (random(HEADS, N, 3, 4), random(HEADS, N, 3), random(HEADS, N, 4)), random(E)
    out: list[Tensor] = []
    assert counted(lambda: out.append(ops.schemas.index_score(*leaves, *GRAPH.rows[:2]))) == {"index_score": 2 * E * 12}
    assert counted(lambda: out[0].sum().backward()) == {"index_score_backward": 6 * E * 12}
    given = (random(HEADS, N, K), random(HEADS, N, K), log_p, *GRAPH.rows, 1.0)
    assert counted(lambda: out.append(ops.schemas.edge_cross_entropy(*given)[0])) == {"edge_cross_entropy": 2 * E * K}
    assert counted(lambda: out[1].sum().backward()) == {}


def test_attention() -> None:
    query, key, value = random(HEADS, N, C), random(HEADS, N, C), random(HEADS, N, V)
    out: list[Tensor] = []
    count = counted(lambda: out.append(ops.edge_attention(query, key, value, GRAPH.rows, dropout=0.1)[0]))
    assert count == {"edge_attention": 2 * E * (C + V)}
    assert counted(lambda: out[0].sum().backward()) == {"edge_attention_backward": 2 * E * (3 * C + 2 * V)}


def test_attention_over_a_full_graph_counts_as_dense_attention() -> None:
    graph = patterns.full(None, ptr=torch.tensor([0, N])).expand(HEADS)
    query, key, value = random(HEADS, N, C), random(HEADS, N, C), random(HEADS, N, V)
    ours: list[Tensor] = []
    dense: list[Tensor] = []
    forward = counted(lambda: ours.append(ops.edge_attention(query, key, value, graph.rows)[0]))
    with sdpa_kernel(SDPBackend.MATH):  # the products one by one; the fused kernel of the CPU is counted as nothing
        products = counted(lambda: dense.append(scaled_dot_product_attention(query[None], key[None], value[None])))
    assert sum(forward.values()) == sum(products.values()) == 2 * HEADS * N * N * (C + V)
    backward = sum(counted(lambda: ours[0].sum().backward()).values())
    shapes = [(1, HEADS, N, width) for width in (V, C, C, V)]
    assert backward == sdpa_backward_flop_count(*shapes)  # with the scores computed again, as fused kernels do


def test_effects_of_edges_and_probes() -> None:
    query, key, value = random(HEADS, N, C), random(HEADS, N, C), random(HEADS, N, V)
    rate, member = random(HEADS, N, K), random(HEADS, N, K)
    probes = patterns.window(None, 1, ptr=PTR).expand(HEADS)
    out, _ = ops.edge_attention(query.detach(), key.detach(), value.detach(), GRAPH.rows)
    fixed = [x.detach() for x in (query, key, value)]
    rows, more = (*GRAPH.rows, *probes.rows), (torch.ones(N), None, None, None, None, False, 1.0, 0.0, 1.0)
    out = ops.schemas.Expectation.apply(out.requires_grad_(), rate, member, None, None, *fixed, *rows, *more)
    both = E + probes.num_edges
    assert counted(lambda: out.sum().backward()) == {"effect_gradients": 2 * both * (C + V + K) + 4 * both * K}
    plain = (random(HEADS, N, V), query, key, value, *rows, 1.0, None, None, None, 0.0)
    assert counted(lambda: ops.schemas.edge_effect(*plain)) == {"edge_effect": 2 * both * (C + V)}


@pytest.mark.parametrize("method", ["bernoulli", "fastrg"])
@pytest.mark.parametrize("device", ["real", "meta"])
def test_sampling_by_coins_looks_at_all_pairs(method: str, device: str) -> None:
    """Where a quarter of the pairs are edges, coins are cheapest."""
    sbm = SBM(
        torch.full((HEADS, N, K), 0.5), torch.full((HEADS, N, K), 0.5), torch.eye(K).expand(HEADS, K, K) * 0.2,
        query_ptr=PTR,
    )  # fmt: skip
    sequence_ids = torch.arange(2)
    found: list[Any] = []
    if device == "real":
        count = counted(
            lambda: found.append(ops.sample_sbm(sbm.rate, sbm.key_membership, PTR, PTR, sequence_ids, 0, method))
        )
        pairs = HEADS * (9 * 9 + 15 * 15)
    else:  # nothing to plan by: only the edges
        plan = SimpleNamespace(
            rate=sbm.rate.to("meta"), member=sbm.key_membership.to("meta"), query_ptr=PTR, key_ptr=PTR, method=method,
            exploration=0.0, is_causal=False, out_val=(GRAPH.rowptr, GRAPH.col),
        )  # fmt: skip
        count = {"sample_sbm": flops.FORMULAS["sample_sbm"](plan)}
        pairs = E
    assert count == {"sample_sbm": 2 * K * (2 * HEADS * N + pairs)}


def test_sampling_of_a_sparse_model_counts_its_proposals() -> None:
    """Few edges: the count follows the expected edges, not the pairs, and is that of the seed's graph within its noise."""
    tokens, blocks, density = 2000, 4, 1e-3
    ptr = torch.tensor([0, tokens])
    sbm = SBM(
        torch.full((1, tokens, blocks), 0.5), torch.full((1, tokens, blocks), 0.5), torch.eye(blocks)[None] * density
    )
    assert float(sbm.expected_density()) == pytest.approx(density, rel=1e-4)
    found: list[Any] = []
    count = counted(
        lambda: found.append(
            ops.sample_sbm(sbm.rate, sbm.key_membership, ptr, ptr, torch.zeros(1, dtype=torch.int64), 0)
        )
    )
    edges = found[0][1].numel()
    tried = count["sample_sbm"] / (2 * blocks) - 2 * tokens
    assert abs(tried - edges) < 6 * edges**0.5  # equal rates: nearly nothing that is proposed is turned down
    free = counted(
        lambda: ops.sample_sbm(sbm.rate, sbm.key_membership, ptr, ptr, torch.zeros(1, dtype=torch.int64), 0, "fastrg")
    )
    assert free == {"sample_sbm": 2 * blocks * 2 * tokens}


def test_a_layer_is_the_sum_of_its_parts() -> None:
    paper = {"parameterization": "paper"}
    conv = make_attention("sbm", 16, C, HEADS, num_clusters=K, estimator="mask", **paper)
    x = torch.randn(N, 16)
    graph: list[Any] = []
    with torch.no_grad():
        count = counted(lambda: graph.append(conv(x, ptr=PTR, seed=0, return_graph=True)[1]))
    assert count.pop("edge_attention") == 4 * graph[0].num_edges * C
    assert (
        count.pop("aten.addmm") == 2 * N * 16 * HEADS * C * 3 + 2 * 2 * HEADS * N * C * C
    )  # projections; first layer of the perceptron, twice
    assert count.pop("aten.baddbmm") == 2 * 2 * HEADS * N * C * K  # its second layer with the clusters, twice
    assert {*count} == {"sample_sbm", "aten.bmm", "aten.mm"}


def test_denser_graphs_cost_more() -> None:
    torch.manual_seed(0)
    counts = []
    for density in (0.02, 0.25):
        options = {"num_clusters": K, "initial_density": density}
        encoder = SequenceEncoder(15, 16, max_length=200, attention_options=options)
        counts.append(sum(counted(partial(encoder, torch.randint(15, (200,)), seed=0)).values()))
    assert counts[0] < counts[1]


def test_blocks_of_a_full_graph_count_as_all_pairs() -> None:
    ptr, block_size = torch.tensor([0, 24]), 8
    blocks = patterns.full(3).expand(HEADS)
    query, key, value = random(HEADS, 24, C), random(HEADS, 24, C), random(HEADS, 24, V)
    rows, layout, pairs = blocks.rows, ((ptr, ptr), block_size), HEADS * 24**2
    out: list[Tensor] = []
    count = counted(lambda: out.append(ops.block_attention(query, key, value, rows, *layout)[0]))
    assert count == {"block_attention": 2 * pairs * (C + V)}
    assert counted(lambda: out[0].sum().backward()) == {"block_attention_backward": 2 * pairs * (3 * C + 2 * V)}
    whole = (ptr, ptr, block_size, False, 1.0)
    count = counted(lambda: ops.schemas.block_effect(random(HEADS, 24, V), query, key, value, *rows, *rows, *whole))
    assert count == {"block_effect": 2 * 2 * (pairs * (C + V) + pairs // block_size * V)}
    assert counted(lambda: ops.schemas.block_weight(query, key, *rows, *whole)) == {"block_weight": 2 * pairs * C}
