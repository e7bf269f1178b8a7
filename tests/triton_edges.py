"""Attention, dot products and effects of edges and of blocks, in Triton's interpreter or on a GPU; see ``triton_contract.py``."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import test_blocks
import test_estimators
import test_ops
import test_transformer_conv
import torch
from problems import GRAPHS, random_graph
from triton_contract import DEVICE, MODULES_BY_NAME, QUIET, SMALL, Kernels, contract
from triton_contract import kernels as kernels

from sbm_pyg import ops
from sbm_pyg.ops import schemas
from sbm_pyg.ops.reference import edges as reference_edges

pytestmark = QUIET


# ------------------------------------------------------------------ attention

ALL = ("score", True, True, 0.4)
WIDTHS = (5, 7), (64, 16), (16, 128), (100, 256)

test_attention = contract(
    test_ops.test_attention_equals_the_reference, *(("bipartite", *option, (16, 48)) for option in test_ops.OPTIONS),
    *(("one row has all edges", *option, (1, 3)) for option in test_ops.OPTIONS[1::3]), *((name, *ALL, (32, 32)) for name in SMALL),
    *(("rows around a vector", *ALL, widths) for widths in WIDTHS),
)  # fmt: skip
test_precision = contract(
    test_ops.test_attention_is_as_accurate_as_torch_in_float32, *product(["bipartite"], ["score", "weight"])
)
test_both_passes_weigh_alike = contract(
    test_ops.test_the_backward_pass_weighs_as_the_forward_pass, (5, False, False), (32, True, False), (100, True, True)
)
test_half_precision = contract(
    test_ops.test_attention_takes_half_precision_through_float32, (torch.bfloat16,), (torch.float16,)
)
test_strides = contract(test_ops.test_attention_takes_any_strides_and_index_type, ())
test_nan = contract(test_ops.test_nan_stays_where_it_is_touched, (0.0,), (0.3,))
test_extremes = contract(test_ops.test_extreme_scores_do_not_overflow, ("score",), ("weight",))
test_index_scores = contract(
    test_ops.test_the_scores_of_edges_are_those_of_all_pairs, ("bipartite", 2, 8, torch.float32), ("one row has all edges", 1, 1, torch.float64),
)  # fmt: skip
test_cross_entropy = contract(
    test_ops.test_the_cross_entropy_of_edges_is_that_of_its_definition, ("bipartite", True, 8, torch.float32),
    ("one row has all edges", True, 40, torch.float64),
)  # fmt: skip
test_every_element = contract(test_ops.test_every_output_element_is_written, ("edge_dot",), ("edge_attention",))


@pytest.mark.parametrize(("words", "edges"), [(256, 8), (4096, 128)])
def test_tiles_may_have_any_size(words: int, edges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the benchmark of a GPU tries them."""
    rows = MODULES_BY_NAME["rows"]
    monkeypatch.setattr(rows, "TILE_WORDS", words)
    assert rows.tile_options(torch.float32, 32)["EDGES"] == edges
    test_ops.test_attention_equals_the_reference("bipartite", *ALL, (16, 48))
    test_estimators.test_effect_equals_the_reference("bipartite", True, (16, 48))


# ------------------------------------------------------------------ rows that several programs share

test_long_rows = contract(
    test_ops.test_attention_equals_the_reference, *(("bipartite", *option, (16, 48)) for option in test_ops.OPTIONS[::2]),
    *((name, *ALL, (3, 5)) for name in SMALL), long=2,
)  # fmt: skip
test_long_rows_in_half_precision = contract(
    test_ops.test_attention_takes_half_precision_through_float32, (torch.bfloat16,), long=3
)
test_dots_of_long_rows = contract(
    test_ops.test_dot_equals_the_reference, *product(["no edges", "bipartite", "one row has all edges"], [3]), long=2
)
test_effects_of_long_rows = contract(
    test_estimators.test_effects_count_by_the_chance_to_see_them, *product(SMALL, [3], [0.0], [schemas]), long=2
)
test_heavy_edges_of_long_rows = contract(
    test_estimators.test_effect_of_an_edge_that_dominates_its_row_is_accurate_in_float32, (), long=2
)
test_infinite_scores_of_long_rows = contract(
    test_estimators.test_effect_knows_infinite_scores_and_ignores_tokens_that_nothing_touches, (), long=1
)
test_weights_of_long_rows = contract(
    test_estimators.test_weighing_effects_equals_the_reference, *product(SMALL, [torch.float64], [0.1], [True]), long=2
)


@pytest.mark.parametrize("long", [1, 3, 2048])
def test_no_piece_of_a_long_row_is_left_out(long: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows at the bound and around it; and as many programs as any rows of so many edges may need."""
    rows = MODULES_BY_NAME["rows"]
    monkeypatch.setattr(rows, "MAX_EDGES_PER_PROGRAM", long)
    lengths = torch.tensor([0, long, long + 1, 0, 5 * long, 1, long - 1, 2 * long + 1])
    ptr = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(DEVICE)
    work, pieces = rows.SplitRows(ptr, int(ptr[-1]), torch.empty(0)), -(-lengths // long)
    assert (
        work.piece_ends.cpu().diff(prepend=torch.zeros(1)).tolist() == torch.where(lengths > long, pieces, 0).tolist()
    )
    assert work.programs >= work.piece_ends[-1]
    assert rows.SplitRows(ptr, int(ptr[-1]), torch.empty(0)).piece_ends is work.piece_ends
    assert rows.SplitRows(ptr, long, torch.empty(0)).piece_ends is None
    with torch.inference_mode():
        assert torch.equal(rows.SplitRows(ptr.clone(), int(ptr[-1]), torch.empty(0)).piece_ends, work.piece_ends)


def test_a_long_row_is_united_from_its_parts(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys: three kernels more, and no wait; the pieces are counted once for each side."""
    monkeypatch.setattr(MODULES_BY_NAME["rows"], "MAX_EDGES_PER_PROGRAM", 16)
    graph = random_graph(2, 20, 20, 0.9)
    query, key, value = torch.randn(3, 2, 20, 4, requires_grad=True).unbind()
    waits = kernels.waits
    out, _ = ops.edge_attention(query, key, value, graph.rows)
    out.sum().backward()
    forward = ["_count_pieces_kernel", "_edge_attention_kernel", "_merge_kernel"]
    assert kernels.started == [
        *forward, "_edge_attention_backward_kernel", "_merge_kernel", "_count_pieces_kernel",
        *["_gather_kernel", "_merge_kernel"] * 2,
    ]  # fmt: skip
    assert kernels.waits == waits


# ------------------------------------------------------------------ attention with features of edges

DOUBLE, SINGLE = torch.float64, torch.float32
with_features = test_transformer_conv.test_the_kernel_and_its_gradient_are_those_of_plain_torch
test_graph_attention = contract(
    with_features, (3, 5, 20, 3, DOUBLE, True, True), (1, 5, 5, None, SINGLE, False, False),
    (2, 4, 6, 3, SINGLE, True, False), (1, 16, 130, 33, DOUBLE, False, True),
)  # fmt: skip
test_graph_attention_over_long_rows = contract(
    with_features, (2, 3, 5, 3, DOUBLE, True, True), (1, 3, 3, None, SINGLE, True, False), long=3
)
test_graph_attention_in_half_precision = contract(
    test_transformer_conv.test_half_precision_of_any_strides_goes_through_float32, (torch.bfloat16,), (torch.float16,)
)


@pytest.mark.parametrize(("long", "features"), [(2048, False), (2048, True), (4, True)])
def test_graph_attention_starts_few_kernels(
    long: int, features: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three forward, and four or five backward; long rows are counted once for each side and merged; nothing waits."""
    monkeypatch.setattr(MODULES_BY_NAME["rows"], "MAX_EDGES_PER_PROGRAM", long)
    inputs = test_transformer_conv.problem(1, 2, 2, 2 if features else None, SINGLE, False, False)
    waits, kernels.started = kernels.waits, []
    sum(x.square().sum() for x in schemas.graph_attention(*inputs)).backward()
    counted, merged = ["_count_pieces_kernel"] * (long == 4), ["_merge_kernel"] * (long == 4)
    rows = ["_graph_dot_kernel", "_graph_weights_kernel", "_graph_sum_kernel", *(1 + features) * merged]
    by_key = [*counted, *2 * ["_graph_sum_kernel", *merged]]
    assert kernels.started == [*counted, *rows, *rows, *by_key, *["_graph_feature_kernel"] * features]
    assert kernels.waits == waits


def test_graph_attention_of_wide_vectors_takes_plain_torch(kernels: Kernels) -> None:
    inputs = test_transformer_conv.problem(1, 513, 2, 2, SINGLE, False, False)
    schemas.graph_attention(*inputs)[0].sum().backward()
    assert not kernels.started


# ------------------------------------------------------------------ attention over blocks


def over_blocks(test: Callable[..., None], names: list[str], *cases: tuple[Any, ...]) -> Callable[..., None]:
    """A test of blocks, on some graphs of them."""

    def run(name: str, *case: Any) -> None:
        test(test_blocks.make(**test_blocks.CASES[name]), *case)

    return contract(run, *((name, *case) for name in names for case in cases), only="block")


BLOCKS = [*test_blocks.CASES]
test_block_attention = over_blocks(
    test_blocks.test_block_attention_is_attention_over_the_tokens, BLOCKS, ("cpu", True, 3, 0.0)
)
test_block_attention_without_a_bias = over_blocks(
    test_blocks.test_block_attention_is_attention_over_the_tokens,
    ["ragged", "causal, cross", "long"],
    ("cpu", False, 5, 0.0),
)
test_a_bias_may_leave_a_query_without_a_key = contract(
    test_blocks.test_a_bias_may_leave_a_query_without_a_key, ("cpu",), only="block"
)
test_dropout_over_blocks = over_blocks(
    test_blocks.test_block_attention_is_attention_over_the_tokens,
    ["ragged", "causal, cross", "long"],
    ("cpu", True, 3, 0.4),
)
test_block_effect = over_blocks(
    test_blocks.test_block_effects_are_those_of_having_a_block_and_not, BLOCKS, ("cpu", True)
)
test_block_weight = over_blocks(
    test_blocks.test_weights_of_blocks_are_sums_of_those_of_tokens, ["ragged", "causal, cross", "long"], ()
)
test_blocks_in_low_precision = contract(
    test_blocks.test_low_precision_is_no_worse_than_that_of_torch,
    *((torch.float32, 7), (torch.float16, 64), (torch.bfloat16, 7), (torch.bfloat16, 64)),
    only="block",
)


@pytest.mark.parametrize("width", [0, 130])
def test_blocks_that_fit_no_registers_take_plain_torch(width: int, kernels: Kernels) -> None:
    graph = test_blocks.make([7, 4], 4)
    parts = [x.requires_grad_() for x in test_blocks.tokens(graph, torch.float32, width, width)]
    test_blocks.block_attention(*parts, *test_blocks.rows(graph))[0].sum().backward()
    assert not kernels.started


@pytest.mark.parametrize("seed", range(12))
def test_random_cases(seed: int) -> None:
    draw = random.Random(seed)
    sizes = (draw.randint(1, 3), draw.randint(1, 8), draw.randint(1, 20), draw.choice([0.0, 0.05, 0.3, 0.9, 1.0]))
    inner = test_ops.test_attention_on_random_cases.hypothesis.inner_test  # type: ignore[attr-defined]
    inner(*sizes, (draw.randint(1, 33), draw.randint(1, 33)), draw.choice(test_ops.OPTIONS), seed)


@pytest.mark.parametrize("seed", [7, -1, 2**40 + 5])
@pytest.mark.parametrize("dropout", [0.1, 1 - 1e-12])
def test_dropout_takes_the_words_of_the_reference(seed: int, dropout: float) -> None:
    """Bit by bit: each column of the output is one edge."""
    graph = random_graph(2, 6, 70, 0.9)
    query, value = torch.zeros(2, 6, 1), torch.eye(70).expand(2, -1, -1)
    out, _ = ops.edge_attention(query, value[..., :1], value, graph.rows, dropout=dropout, seed=seed)
    found = out.flatten(0, 1)[graph.edge_row, graph.col.long()] != 0
    assert torch.equal(found, reference_edges.dropout_mask(graph.rowptr, graph.col, 2, 70, dropout, seed))


# ------------------------------------------------------------------ dot products of edges

test_dot = contract(
    test_ops.test_dot_equals_the_reference, *product(["bipartite"], [1, 16, 128, 130]), *product(SMALL, [3])
)


def test_indices_of_any_strides() -> None:
    graph = GRAPHS["full"]
    query, key = (x.requires_grad_() for x in test_ops.tensors(graph, 4, 1, False, False)[:2])
    rows = [torch.stack([x, x - 1], 1)[:, 0] for x in (graph.rowptr, graph.col)]
    assert not rows[0].is_contiguous()
    found, wanted = (ops.edge_dot(query, key, given) for given in (ops.Rows(*rows), graph.rows))
    assert torch.equal(found, wanted)
    grads = [torch.autograd.grad(out.sin().sum(), [query, key]) for out in (found, wanted)]
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


# ------------------------------------------------------------------ the effect of an edge

test_effect = contract(
    test_estimators.test_effect_equals_the_reference,
    *product(["bipartite"], [False, True], [(1, 3), (16, 48)]),
    *product(GRAPHS, [True], [(32, 32)]),
)
test_what_effects_are = contract(test_estimators.test_effect_is_the_difference_of_two_losses, ("bipartite", schemas))
test_heavy_edges = contract(test_estimators.test_effect_of_an_edge_that_dominates_its_row_is_accurate_in_float32, ())
test_infinite_scores = contract(
    test_estimators.test_effect_knows_infinite_scores_and_ignores_tokens_that_nothing_touches, ()
)
test_what_effects_count_for = contract(
    test_estimators.test_effects_count_by_the_chance_to_see_them,
    *product(SMALL, [3], [0.0], [schemas]),
    ("bipartite", 48, 0.05, schemas),
)
test_weighing_effects = contract(
    test_estimators.test_weighing_effects_equals_the_reference,
    *product(SMALL, [torch.float64, torch.bfloat16], [0.1], [False, True]),
)
test_probes_that_cannot_be = contract(test_estimators.test_a_probe_that_cannot_be_counts_nothing, (schemas,))
