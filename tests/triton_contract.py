"""The contract of ``test_ops.py``, kept by the Triton kernels: in Triton's interpreter, on tensors of the CPU.

Not collected by itself: ``test_triton.py`` runs it in a process of its own, since Triton decides when it is imported
whether it interprets. By hand: ``TRITON_INTERPRET=1 pytest tests/triton_contract.py``. Tests are those of the contract,
on their smaller cases, with our ops sent to the kernels; a program of a kernel takes some milliseconds here.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import test_blocks
import test_estimators
import test_ops
import torch
import triton.language as tl
from problems import GRAPHS, random_graph
from test_launches import PlainTorch, model, plain_torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from sbm_pyg import SBMAttentionConv, ops
from sbm_pyg.ops import cuda, reference, sampled, samplers

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of infinities and NaN
MODULES_BY_NAME = {
    name: import_module(f"sbm_pyg.ops.{name}") for name in ("cuda_rows", *sorted({*cuda.MODULES.values()}))
}
MODULES = [*MODULES_BY_NAME.values()]
SMALL = [name for name in GRAPHS if "1000" not in name]


class Kernels(PlainTorch):
    """In it, our ops are computed as on a CUDA device, and what they ask of the device is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []
        self.only = ""  # what the names of ops that go to kernels begin with

    def module(self, name: str) -> Any:
        ours = name in cuda.MODULES and name.startswith(self.only)
        return import_module(f"sbm_pyg.ops.{cuda.MODULES[name]}") if ours else super().module(name)


def rounded(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Rounds to the nearest bfloat16, as GPUs do; the interpreter cuts."""

    def call(builder: Any, x: Any, kind: Any) -> Any:
        if (x.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, x, kind)
        return TensorHandle(torch.tensor(x.data).bfloat16().view(torch.uint16).numpy(), tl.bfloat16)

    return call


def multiplied(dot: Callable[..., Any]) -> Callable[..., Any]:
    """Multiplies numbers in bfloat16, of which the interpreter multiplies the bits."""

    def call(builder: Any, *given: Any) -> Any:
        factors = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in given[:2])
        return dot(builder, *factors, *given[2:])

    return call


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """All ops go to the kernels; each counts as one operation, whatever the interpreter does."""
    counted, launch = Kernels(), MODULES[0].launch

    def count(program: Any, *arguments: Any, **options: Any) -> None:
        launches, allocations = counted.launches, counted.allocations
        launch(program, *arguments, **options)
        counted.launches, counted.allocations = launches + 1, allocations
        counted.started.append(program.__name__)

    for module in MODULES:
        monkeypatch.setattr(module, "launch", count)
    monkeypatch.setattr(MODULES_BY_NAME["cuda_blocks"], "DOUBLES", True)  # in the interpreter with any version
    for name, change in (("cast_impl", rounded), ("create_dot", multiplied)):
        monkeypatch.setattr(InterpreterBuilder, name, change(getattr(InterpreterBuilder, name)))
    with plain_torch(counted):
        yield counted


def contract(test: Callable[..., None], *cases: tuple[Any, ...], only: str = "", long: int = 0) -> Callable[..., None]:
    """A test of the contract, on some cases; each has to start a kernel.

    ``only`` ops whose names begin so go to kernels, as what they are compared with would take long in the interpreter.
    Rows of more than ``long`` edges are shared by several programs.
    """

    def run(case: tuple[Any, ...], kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
        kernels.only = only
        if long:
            monkeypatch.setattr(MODULES_BY_NAME["cuda_rows"], "LONG", long)
        test(*case)
        assert kernels.started

    return pytest.mark.parametrize("case", cases, ids=str)(run)


# ------------------------------------------------------------------ attention

ALL = ("score", True, True, 0.4)
WIDTHS = (5, 7), (64, 16), (16, 128), (100, 256)

test_attention = contract(
    test_ops.test_attention_equals_the_reference,
    *(("bipartite", *option, (16, 48)) for option in test_ops.OPTIONS),
    *(("one row has all edges", *option, (1, 3)) for option in test_ops.OPTIONS[1::3]),
    *((name, *ALL, (32, 32)) for name in SMALL),
    *(("rows around a vector", *ALL, widths) for widths in WIDTHS),
)
test_precision = contract(
    test_ops.test_attention_is_as_accurate_as_torch_in_float32, *product(["bipartite"], ["score", "weight"])
)
test_both_passes_weigh_alike = contract(
    test_ops.test_the_backward_pass_weighs_as_the_forward_pass, *product([5, 32, 100], [False, True], [False, True])
)
test_half_precision = contract(
    test_ops.test_attention_takes_half_precision_through_float32, (torch.bfloat16,), (torch.float16,)
)
test_strides = contract(test_ops.test_attention_takes_any_strides_and_index_type, ())
test_nan = contract(test_ops.test_nan_stays_where_it_is_touched, (0.0,), (0.3,))
test_extremes = contract(test_ops.test_extreme_scores_do_not_overflow, ("score",), ("weight",))
test_every_element = contract(test_ops.test_every_output_element_is_written, ("edge_dot",), ("edge_attention",))


@pytest.mark.parametrize(("words", "edges"), [(256, 8), (4096, 128)])
def test_tiles_may_have_any_size(words: int, edges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the benchmark of a GPU tries them."""
    rows = MODULES_BY_NAME["cuda_rows"]
    monkeypatch.setattr(rows, "WORDS", words)
    assert rows.tiles(torch.float32, 32)["EDGES"] == edges
    test_ops.test_attention_equals_the_reference("bipartite", *ALL, (16, 48))
    test_estimators.test_effect_equals_the_reference("bipartite", True, (16, 48))


# ------------------------------------------------------------------ rows that several programs share

test_long_rows = contract(
    test_ops.test_attention_equals_the_reference,
    *(("bipartite", *option, (16, 48)) for option in test_ops.OPTIONS[::2]),
    *((name, *ALL, (3, 5)) for name in SMALL),
    long=2,
)
test_long_rows_in_half_precision = contract(
    test_ops.test_attention_takes_half_precision_through_float32, (torch.bfloat16,), long=3
)
test_dots_of_long_rows = contract(test_ops.test_dot_equals_the_reference, *product(SMALL, [3]), long=2)
test_effects_of_long_rows = contract(
    test_estimators.test_effects_count_by_the_chance_to_see_them, *product(SMALL, [3], [0.0], [ops]), long=2
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
    rows = MODULES_BY_NAME["cuda_rows"]
    monkeypatch.setattr(rows, "LONG", long)
    lengths = torch.tensor([0, long, long + 1, 0, 5 * long, 1, long - 1, 2 * long + 1])
    ptr = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    work, pieces = rows.Shared(ptr, int(ptr[-1]), torch.empty(0)), -(-lengths // long)
    assert work.more.diff(prepend=torch.zeros(1)).tolist() == torch.where(lengths > long, pieces, 0).tolist()
    assert work.programs >= work.more[-1]
    assert rows.Shared(ptr, int(ptr[-1]), torch.empty(0)).more is work.more
    assert rows.Shared(ptr, long, torch.empty(0)).more is None


def test_a_long_row_is_united_from_its_parts(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys: three kernels more, and no wait; the pieces are counted once for each side."""
    monkeypatch.setattr(MODULES_BY_NAME["cuda_rows"], "LONG", 16)
    graph = random_graph(2, 20, 20, 0.9)
    query, key, value = torch.randn(3, 2, 20, 4, requires_grad=True).unbind()
    waits = kernels.waits
    out, _ = ops.edge_attention(query, key, value, graph.rowptr, graph.col)
    out.sum().backward()
    forward = ["_count", "_attention", "_unite"]
    assert kernels.started == [*forward, "_attention_backward", "_unite", "_count", *["_gather", "_unite"] * 2]
    assert kernels.waits == waits


# ------------------------------------------------------------------ attention over blocks


def over_blocks(test: Callable[..., None], names: list[str], *cases: tuple[Any, ...]) -> Callable[..., None]:
    """A test of blocks, on some graphs of them."""

    def run(name: str, *case: Any) -> None:
        test(test_blocks.make(**test_blocks.CASES[name]), *case)

    return contract(run, *((name, *case) for name in names for case in cases), only="block")


BLOCKS = [*test_blocks.CASES]
test_block_attention = over_blocks(
    test_blocks.test_block_attention_is_attention_over_the_tokens, BLOCKS, ("cpu", False, 5), ("cpu", True, 3)
)
test_a_bias_may_leave_a_query_without_a_key = contract(
    test_blocks.test_a_bias_may_leave_a_query_without_a_key, ("cpu",), only="block"
)
test_dropout_over_blocks = over_blocks(
    test_blocks.test_dropout_drops_the_pairs_that_it_drops_of_tokens, ["ragged", "causal, cross", "long"], (True,)
)
test_block_effect = over_blocks(
    test_blocks.test_block_effects_are_those_of_having_a_block_and_not, BLOCKS, ("cpu", True)
)
test_block_weight = over_blocks(
    test_blocks.test_weights_of_blocks_are_sums_of_those_of_tokens, ["ragged", "causal, cross", "long"], ()
)
test_blocks_in_low_precision = contract(
    test_blocks.test_low_precision_is_no_worse_than_that_of_torch,
    *product([torch.float32, torch.float16, torch.bfloat16], [7, 64]),
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
    inner(*sizes, draw.randint(1, 33), draw.choice(test_ops.OPTIONS), seed)


@pytest.mark.parametrize("seed", [7, -1, 2**40 + 5])
@pytest.mark.parametrize("dropout", [0.1, 1 - 1e-12])
def test_dropout_takes_the_words_of_the_reference(seed: int, dropout: float) -> None:
    """Bit by bit: each column of the output is one edge."""
    graph = random_graph(2, 6, 70, 0.9)
    query, value = torch.zeros(2, 6, 1), torch.eye(70).expand(2, -1, -1)
    out, _ = ops.edge_attention(query, value[..., :1], value, graph.rowptr, graph.col, dropout=dropout, seed=seed)
    found = out.flatten(0, 1)[graph.edge_row, graph.col.long()] != 0
    assert torch.equal(found, reference.dropout_mask(graph.rowptr, graph.col, 2, 70, dropout, seed))


# ------------------------------------------------------------------ dot products of edges

test_dot = contract(
    test_ops.test_dot_equals_the_reference, *product(["bipartite"], [1, 3, 16, 32, 128, 130]), *product(SMALL, [3])
)


def test_indices_of_any_strides() -> None:
    graph = GRAPHS["full"]
    query, key = (x.requires_grad_() for x in test_ops.tensors(graph, 4, 1, False, False)[:2])
    rows = [torch.stack([x, x - 1], 1)[:, 0] for x in (graph.rowptr, graph.col)]
    assert not rows[0].is_contiguous()
    found, wanted = (ops.edge_dot(query, key, *given) for given in (rows, (graph.rowptr, graph.col)))
    assert torch.equal(found, wanted)
    grads = [torch.autograd.grad(out.sin().sum(), [query, key]) for out in (found, wanted)]
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


# ------------------------------------------------------------------ the effect of an edge

test_effect = contract(
    test_estimators.test_effect_equals_the_reference,
    *product(["bipartite"], [False, True], [(1, 3), (16, 48)]),
    *product(GRAPHS, [True], [(32, 32)]),
)
test_what_effects_are = contract(
    test_estimators.test_effect_is_the_difference_of_two_losses, ("bipartite", ops.edge_effect)
)
test_heavy_edges = contract(test_estimators.test_effect_of_an_edge_that_dominates_its_row_is_accurate_in_float32, ())
test_infinite_scores = contract(
    test_estimators.test_effect_knows_infinite_scores_and_ignores_tokens_that_nothing_touches, ()
)
test_what_effects_count_for = contract(
    test_estimators.test_effects_count_by_the_chance_to_see_them,
    *product(SMALL, [3], [0.0], [ops]),
    ("bipartite", 48, 0.05, ops),
)
test_weighing_effects = contract(
    test_estimators.test_weighing_effects_equals_the_reference,
    *product(SMALL, [torch.float64, torch.bfloat16], [0.1], [False, True]),
)
test_probes_that_cannot_be = contract(test_estimators.test_a_probe_that_cannot_be_counts_nothing, (ops,))

# ------------------------------------------------------------------ entmax

ALPHAS = 1.05, 1.3, 1.5, 2.0, 3.0, 4.0
FLOATS = torch.float32, torch.float64

test_entmax = contract(
    test_ops.test_entmax_equals_the_dense_one_row_by_row, *product(ALPHAS, [0.1, 30.0]), (1.5, 0.0), (1.5, 1.0)
)
test_gradients_of_entmax = contract(
    test_ops.test_entmax_and_its_gradient_are_those_of_the_dense_one,
    *product(ALPHAS[:4], [(0, 1, 2, 15, 16, 17, 0, 300, 4)]),
    (1.5, (1, 100_000)),
)
test_values_of_entmax = contract(test_ops.test_entmax_kernels_equal_the_reference, *((dtype,) for dtype in FLOATS))
test_forbidden_values = contract(
    test_ops.test_entmax_of_forbidden_values_is_zero, *product([1.5, 2.0, 3.0], [torch.float32])
)
test_support = contract(test_ops.test_the_support_is_where_shares_are, ())


test_entmax_of_long_rows = contract(
    test_ops.test_entmax_and_its_gradient_are_those_of_the_dense_one,
    *product(ALPHAS[:4], [(0, 1, 2, 15, 16, 17, 0, 40, 4)]),
    long=15,
)
test_values_of_long_rows = contract(
    test_ops.test_entmax_kernels_equal_the_reference, *((dtype,) for dtype in FLOATS), long=200
)
test_forbidden_values_of_long_rows = contract(
    test_ops.test_entmax_of_forbidden_values_is_zero, *product([1.5, 2.0, 3.0], [torch.float32]), long=1
)
test_support_of_long_rows = contract(test_ops.test_the_support_is_where_shares_are, (), long=200)


@pytest.mark.parametrize(("long", "more"), [(2048, []), (10, ["_count", "_near", "_tilt"])])
def test_long_rows_of_entmax_take_a_kernel_more(
    long: int, more: list[str], kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULES_BY_NAME["cuda_rows"], "LONG", long)
    src, ptr = test_ops.ragged(5, 0, 30)
    ops.segment_entmax(src.requires_grad_(), ptr=ptr, alpha=1.4).sum().backward()
    assert sorted(kernels.started) == sorted(["_entmax", "_entmax_backward", *more])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_entmax_in_half_precision(dtype: torch.dtype) -> None:
    src, ptr = test_ops.ragged(5, 0, 30)
    given = src.to(dtype).requires_grad_()
    wide = given.detach().double().requires_grad_()
    out, wanted = (ops.segment_entmax(x, ptr=ptr, alpha=1.4) for x in (given, wide))
    torch.testing.assert_close(out, wanted.to(dtype))
    grad = torch.linspace(-1, 1, 35, dtype=torch.float64)
    found = torch.autograd.grad(out, given, grad.to(dtype))[0]
    torch.testing.assert_close(found.double(), torch.autograd.grad(wanted, wide, grad)[0], rtol=0.02, atol=0.02)


# ------------------------------------------------------------------ probes

test_probes = contract(
    test_estimators.test_systematic_samples_are_those_of_the_reference, (0.3, torch.float64), (7.0, torch.float32)
)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seed", [3, -1, 2**40 + 5])
def test_probes_are_those_of_the_reference_to_the_bit(seed: int, is_causal: bool) -> None:
    chance = torch.tensor([2.0, math.nan, -1.0, 0.0, 1.0, 1e-9, *torch.linspace(0.01, 0.99, 34).tolist()])
    given = (chance, torch.tensor([0, 9, 9, 40]), torch.tensor([0, 300, 301, 500]), torch.tensor([7, 2**32 - 1, 0]))
    found = ops.sample_systematic(*given, 2, seed, is_causal)
    for mine, wanted in zip(found, samplers.sample_systematic(*given, 2, seed, is_causal), strict=True):
        assert torch.equal(mine, wanted)


# ------------------------------------------------------------------ graphs of a block model

WAYS = {"proposals": (0.0, math.inf), "gaps": (math.inf, 0.0), "coins": (math.inf, math.inf), "any": (64.0, 11.0)}
"""What a proposal and a gap are taken to cost, by the way that rows then take."""


def agree(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The same edges as those of plain torch, which are returned."""
    found, wanted = ops.sample_sbm(*given), samplers.sample_sbm(*given)
    for mine, meant in zip(found, wanted, strict=True):
        assert mine.dtype == meant.dtype
        assert torch.equal(mine, meant)
    return wanted


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> Iterator[str]:
    proposal_cost, gap_cost = WAYS[request.param]
    monkeypatch.setattr(samplers, "PROPOSAL_COST", proposal_cost)
    monkeypatch.setattr(samplers, "GAP_COST", gap_cost)
    yield request.param
    assert {"_panels", "_join", "_plan", "_proposals", "_coins"} <= {*kernels.started}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("blocks", "keys", "method", "exploration", "seed"),
    [(6, 100, "bernoulli", 0.0, 1), (18, 150, "bernoulli", 0.0625, 2**63 - 1), (6, 100, "fastrg", 0.03125, -3)],
)
def test_graphs_are_those_of_plain_torch(
    blocks: int, keys: int, method: str, exploration: float, seed: int, is_causal: bool, way: str
) -> None:
    """Memberships in sixteenths, whose sums are exact in any order; a sequence has no query, another no key."""
    random = torch.Generator().manual_seed(5)
    y = torch.randint(0, 17, (2, 14, blocks), generator=random) / 16 / (8 if blocks < 10 else 32)
    z = torch.randint(0, 17, (2, keys, blocks), generator=random) / 16
    y[:, ::2] /= blocks
    y[:, 3] = 0
    ptrs = torch.tensor([0, 5, 5, 7, 14]), torch.tensor([0, 3, 20, 20, keys])
    streams = torch.tensor([3, 0, 9, 2**32 - 1])
    _, col = agree(y, z, *ptrs, streams, seed, method, exploration, True, is_causal)
    assert len(col) > 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_graphs_of_any_type_and_strides(dtype: torch.dtype, way: str) -> None:
    random = torch.Generator().manual_seed(6)
    y, z = (torch.rand(17, n, 3, generator=random).div(4).to(dtype).permute(2, 1, 0) for n in (3, 75))
    ptrs = (torch.stack([x, x], 1)[:, 0] for x in (torch.tensor([0, 1, 3]), torch.tensor([0, 66, 75])))
    agree(y, z, *ptrs, torch.tensor([1, 0]), 7, "bernoulli", 0.01, True, False)


@pytest.mark.parametrize(("scale", "part"), [(2**-1, 0.98), (2**-5, 1.02)])
def test_numbers_that_half_precision_rounds_the_most(scale: float, part: float, way: str) -> None:
    rate, member = (torch.full((1, count, 1), 1 + part * 2.0**-8) for count in (3, 200))
    ptrs = (torch.tensor([0, count]) for count in (3, 200))
    agree(scale * rate, member, *ptrs, torch.tensor([0]), 0, "bernoulli", 0.0, False, False)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_all_ways_in_one_batch(is_causal: bool) -> None:
    """At the costs that decide by default. A causal row has few keys here, and tosses for them."""
    y, z, _, key_ptr, streams, *law = model("all", 2, 600, 2)
    given = (y[:, :6], z, torch.tensor([0, 3, 6]), key_ptr, streams, *law[:-1], is_causal)
    sizes = (given[0].double() @ part[:, :, None].double() for part in (z[:, :600].sum(1), z[:, :600].amax(1)))
    expected, bound = (x.flatten() for x in sizes)
    ways = samplers.plan_rows(expected, bound, 600, "bernoulli")[1]
    assert {*ways.tolist()} == {samplers.PROPOSALS, samplers.GAPS, samplers.COINS}
    agree(*given)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_many_panels_and_many_proposals(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More panels than are joined at once, and more proposals than one Poisson count draws; rows share one scratch."""
    monkeypatch.setattr(samplers, "PROPOSAL_COST", 0.0)
    monkeypatch.setattr(samplers, "GAP_COST", math.inf)
    monkeypatch.setattr(MODULES_BY_NAME["cuda_sampling"], "ROOM", 1)
    monkeypatch.setattr(MODULES_BY_NAME["cuda_sampling"], "JOINED", 2)
    random = torch.Generator().manual_seed(8)
    y, z = torch.zeros(1, 160, 2), torch.randint(12, 17, (1, 160, 2), generator=random) / 16
    y[:, -1] = 0.48
    ptrs = torch.tensor([0, 160]), torch.tensor([0, 160])
    rowptr, _ = agree(y, z, *ptrs, torch.tensor([0]), 3, "bernoulli", 0.0, False, is_causal)
    assert rowptr[-1] > 100  # of about 300 proposals


def test_a_sequence_has_its_graph_in_any_batch(way: str) -> None:
    random = torch.Generator().manual_seed(9)
    y, z, ptr = (
        torch.rand(1, 9, 3, generator=random) / 4,
        torch.rand(1, 9, 3, generator=random),
        torch.tensor([0, 4, 9]),
    )
    law = (11, "bernoulli", 0.0, False, True)
    rowptr, col = ops.sample_sbm(y, z, ptr, ptr, torch.tensor([5, 2]), *law)
    mine, keys = ops.sample_sbm(y[:, 4:], z[:, 4:], torch.tensor([0, 5]), torch.tensor([0, 5]), torch.tensor([2]), *law)
    assert torch.equal(mine, rowptr[4:] - rowptr[4])
    assert torch.equal(keys + 4, col[rowptr[4] :])


def test_graphs_that_cannot_be() -> None:
    ptr, stream, ones = torch.tensor([0, 3]), torch.tensor([0]), torch.ones(1, 3, 2)
    for value in (math.nan, math.inf):
        rate = ones.index_fill(1, torch.tensor([1]), value)
        with pytest.raises(ValueError, match="Expected 'rate' and 'member' to be finite"):
            ops.sample_sbm(rate, ones, ptr, ptr, stream, 0, "bernoulli", 0.0, True, False)
    with pytest.raises(ValueError, match=r"Expected edge probabilities in \[0, 1\] \(got 2\)"):
        ops.sample_sbm(ones, ones, ptr, ptr, stream, 0, "bernoulli", 0.25, False, False)
    assert len(agree(ones, ones, ptr, ptr, stream, 0, "bernoulli", 0.25, True, False)[1]) == 9
    agree(ones, ones, ptr, ptr, stream, 0, "fastrg", 0.25, False, False)


def test_coins_that_only_float64_decides(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    """A word is a coin that falls if word + 1 <= 2^32 p. Of two keys one has just that, the next a little less."""
    monkeypatch.setattr(samplers, "PROPOSAL_COST", math.inf)
    monkeypatch.setattr(samplers, "GAP_COST", math.inf)
    word, first = torch.zeros(130, dtype=torch.int64), torch.tensor(0)
    for bit in reversed(range(32)):
        above = word + 2**bit
        word = torch.where(samplers.toss(above, first, 3, 0, 5), word, above)
    least = (word + 1).double()
    least[1::2] -= 2**-10
    ptrs = torch.tensor([0, 1]), torch.tensor([0, 130])
    rate, member = torch.ones(1, 1, 1).double(), (least / 2**32).view(1, 130, 1)
    _, col = agree(rate, member, *ptrs, torch.tensor([3]), 5, "bernoulli", 0.0, False, False)
    assert col.tolist() == [*range(0, 130, 2)]
    assert "_coins" in kernels.started


def test_models_without_blocks_keys_or_queries_take_the_reference(kernels: Kernels) -> None:
    for queries, keys, blocks in ((2, 3, 0), (0, 3, 2), (2, 0, 2)):
        y, z, ptrs = (
            torch.ones(1, queries, blocks),
            torch.ones(1, keys, blocks),
            (torch.tensor([0, n]) for n in (queries, keys)),
        )
        agree(y, z, *ptrs, torch.tensor([0]), 0, "bernoulli", 0.5, False, False)
    assert not kernels.started


@pytest.mark.parametrize("method", ["bernoulli", "fastrg"])
def test_sampling_takes_few_launches_and_one_wait(method: str, kernels: Kernels) -> None:
    given = model("coins", 1, 3, 1, blocks=4)
    before, waits = kernels.launches, kernels.waits
    torch.ops.sbm_pyg.sample_sbm(*given[:6], method, *given[7:])
    draws = ["_gaps", "_proposals", "_coins"] if method == "bernoulli" else ["_proposals", "_coins"]
    assert kernels.started == ["_panels", "_join", "_plan", *draws, *draws]
    assert kernels.launches - before == len(kernels.started) + 13
    assert kernels.waits - waits <= 1


# ------------------------------------------------------------------ what kernels do not take


@pytest.mark.parametrize("width", [0, 513])
def test_vectors_that_fit_no_tile_take_the_reference(width: int, kernels: Kernels) -> None:
    graph = random_graph(1, 3, 4, 0.7)
    query, key, value = (torch.randn(1, n, c, dtype=torch.float64) for n, c in ((3, width), (4, width), (4, 2)))
    leaves, rows = [query.requires_grad_(), key.requires_grad_()], (graph.rowptr, graph.col)
    out, _ = ops.edge_attention(query, key, value, *rows, None, None, 0.1)
    meant, _ = reference.edge_attention(query, key, value, *rows, None, None, 0.1, "score", 0.0, 0)
    torch.testing.assert_close(out, meant)
    losses = (
        out.sum() + ops.edge_dot(query, key, *rows).sum(),
        meant.sum() + reference.edge_dot(query, key, *rows).sum(),
    )
    for mine, wanted in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        torch.testing.assert_close(mine, wanted)
    given: Any = (torch.ones_like(out), query.detach(), key.detach(), value, *rows, None, *rows, None, 0.1)
    assert all(torch.equal(*pair) for pair in zip(ops.edge_effect(*given), reference.edge_effect(*given), strict=True))
    assert not kernels.started


# ------------------------------------------------------------------ what is asked of the device


def attended(heads: int, tokens: int, dropout: float) -> None:
    graph = random_graph(heads, tokens, tokens, 0.3)
    leaves = test_ops.tensors(graph, 4, 4, True, True, torch.float32)
    out, _ = test_ops.attend(leaves, graph, "score", dropout)
    test_ops.gradients(out, leaves)


BACKWARD = ["_attention_backward", "_gather", "_gather"]


@pytest.mark.parametrize(("heads", "tokens"), [(1, 3), (2, 9)])
def test_attention_takes_few_launches(heads: int, tokens: int, kernels: Kernels) -> None:
    attended(heads, tokens, 0.0)
    assert kernels.started == ["_attention", *BACKWARD]
    kernels.started.clear()
    attended(heads, tokens, 0.1)
    fill = ["_fill", "_fill"]
    assert kernels.started == [*fill, "_attention", *fill, *BACKWARD]


def test_attention_asks_for_nothing_but_kernels_and_memory(kernels: Kernels) -> None:
    """Forward and backward, over a graph whose keys are in order already: each kernel, and what holds its results."""
    graph = random_graph(2, 5, 6, 0.5)
    query, key, value = (torch.randn(2, n, 4) for n in (5, 6, 6))
    given = (query, key, value, graph.rowptr, graph.col, None, None)
    reference.by_key(graph.rowptr, graph.col, 2, 6)
    before, waits = kernels.launches, kernels.waits
    out, lse = torch.ops.sbm_pyg.edge_attention(*given, 0.5, "score", 0.0, 0)
    torch.ops.sbm_pyg.edge_attention_backward(out, *given, out, lse, 0.5, "score", 0.0, 0, False, False)
    assert len(kernels.started) == 4
    assert kernels.launches - before == 4 + 8
    assert kernels.waits == waits


@pytest.mark.parametrize(("is_causal", "most"), [(False, 159), (True, 163)])
def test_a_training_step_takes_few_launches(is_causal: bool, most: int, kernels: Kernels) -> None:
    """Of the default layer. Most are for projections and their gradients."""
    torch.manual_seed(0)
    conv, x = SBMAttentionConv(8, 4, heads=2, num_blocks=4, is_causal=is_causal), torch.randn(14, 8, requires_grad=True)
    ptr, grad = torch.tensor([0, 5, 14]), torch.randn(14, 8)
    launches, allocations, waits = kernels.launches, kernels.allocations, kernels.waits
    conv(x, ptr=ptr, seed=1).backward(grad)
    effects = ["_measure", "_measure", "_effect", *["_gather"] * 4]  # gradients of memberships, for edges and probes
    sampled = ["_panels", "_join", "_plan", *["_gaps", "_proposals", "_coins"] * 2]
    assert kernels.started == [*sampled, "_attention", "_start", "_step", *effects, *BACKWARD]
    assert kernels.launches - launches <= most
    assert kernels.launches - launches - (kernels.allocations - allocations) <= 138
    assert kernels.waits - waits <= 4


def test_long_rows_take_few_launches_more(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the default layer: eight kernels unite rows, and pieces are counted for both sides of edges and of probes."""
    monkeypatch.setattr(MODULES_BY_NAME["cuda_rows"], "LONG", 8)
    torch.manual_seed(0)
    conv, x = SBMAttentionConv(8, 4, heads=2, num_blocks=4), torch.randn(14, 8, requires_grad=True)
    ptr, grad = torch.tensor([0, 5, 14]), torch.randn(14, 8)
    launches, allocations, waits = kernels.launches, kernels.allocations, kernels.waits
    conv(x, ptr=ptr, seed=1).backward(grad)
    assert (kernels.started.count("_unite"), kernels.started.count("_count")) == (8, 4)
    assert kernels.launches - launches - (kernels.allocations - allocations) <= 150
    assert kernels.waits - waits <= 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("widths", "causal", "window", "exploration"),
    [
        ((5, 7, 4), False, -1, 0.0),
        ((16, 32, 20), True, 1, 0.0),
        ((64, 64, 80), False, 0, 0.0),
        ((64, 64, 80), False, -1, 0.03),
        ((16, 32, 20), True, 1, 0.6),  # where some pairs are certain
    ],
)
def test_edges_are_drawn_beside_scores(
    widths: tuple[int, int, int], causal: bool, window: int, exploration: float, dtype: torch.dtype, kernels: Kernels
) -> None:
    """More than one tile of queries and of keys, empty sequences, and rows without edges: the edges of plain torch, and
    at most twice its error and two units of the largest number. The backward passes start from the same output.
    """
    random = torch.Generator().manual_seed(0)
    queries, keys = [70, 0, 1, 20], [70, 0, 1, 20] if causal else [9, 3, 1, 130]
    ptrs = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (queries, keys)]
    (n, m), (channels, wide, blocks) = (int(ptr[-1]) for ptr in ptrs), widths
    sizes = (n, channels), (m, channels), (m, wide), (n, blocks), (m, blocks)
    tokens = [torch.randn(2, *size, generator=random).to(dtype) for size in sizes[:3]]
    rate, member = (torch.rand(2, *size, generator=random) for size in sizes[3:])
    rate = rate * 2 / blocks
    rate[:, :3] = 0
    given: Any = (*tokens, rate, member, *ptrs, torch.arange(4))
    law: Any = (7, exploration, 0.4, causal, window)
    grad = torch.randn(*tokens[0].shape[:2], wide, generator=random).to(dtype)
    mine: Any = torch.ops.sbm_pyg.sampled_attention(*given, *law)
    results = [(*mine, *torch.ops.sbm_pyg.sampled_attention_backward(grad, *given, *mine, *law, True))]
    plain: Any = sampled
    for of in ((grad, *given, *mine), [x.double() if x.is_floating_point() else x for x in (grad, *given, *mine)]):
        inputs = of[1 : len(given) + 1]
        results.append((*plain.sampled_attention(*inputs, *law), *plain.sampled_attention_backward(*of, *law, True)))
    for number, (found, peer, want) in enumerate(zip(*results, strict=True)):
        assert found.dtype == peer.dtype
        if number == 3:  # the heaviest edge of each query
            assert torch.equal(found, peer)
            continue
        error, other = (torch.where(x == want, 0, x.double() - want).abs().max() for x in (found, peer))
        assert error <= 2 * other + 2 * torch.finfo(found.dtype).eps * want[want.isfinite()].abs().max()
    assert kernels.started == ["_sampled", "_sampled_queries", "_sampled_keys"]


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_nan_of_a_model_stays_in_its_row_beside_scores() -> None:
    x, ptr = torch.ones(1, 70, 16), torch.tensor([0, 70])
    rate = torch.full((1, 70, 2), 0.2)
    rate[0, 3, 1] = torch.nan
    out = torch.ops.sbm_pyg.sampled_attention(
        x, x, x, rate, rate.nan_to_num(0.2), ptr, ptr, ptr[:1], 1, 0.0, 1.0, False, -1
    )
    assert [*dict.fromkeys(out[0].isnan().nonzero()[:, 1].tolist())] == [3]


def test_a_training_step_beside_scores_waits_for_nothing(kernels: Kernels) -> None:
    """So a CUDA graph can capture it, coins and all."""
    torch.manual_seed(0)
    conv, x = SBMAttentionConv(8, 4, heads=2, num_blocks=4, tiled=True), torch.randn(14, 8, requires_grad=True)
    launches, allocations, waits = kernels.launches, kernels.allocations, kernels.waits
    conv(x, seed=1).square().sum().backward()
    assert kernels.started == ["_sampled", "_sampled_queries", "_sampled_keys"]
    assert kernels.launches - launches - (kernels.allocations - allocations) <= 100
    assert kernels.waits == waits


@pytest.mark.parametrize(("is_causal", "most", "waits"), [(False, 227, 5), (True, 314, 7)])
def test_a_training_step_over_blocks_takes_few_launches(
    is_causal: bool, most: int, waits: int, kernels: Kernels
) -> None:
    torch.manual_seed(0)
    conv = SBMAttentionConv(8, 4, heads=2, num_blocks=4, is_causal=is_causal, grain=2)
    x, ptr, grad = torch.randn(14, 8, requires_grad=True), torch.tensor([0, 5, 14]), torch.randn(14, 8)
    launches, waited = kernels.launches, kernels.waits
    conv(x, ptr=ptr, seed=1).backward(grad)
    assert [name for name in kernels.started if name.startswith("_block")] == [
        "_block_attention", *["_block_gains"] * 2, "_block_effect", "_block_queries", "_block_keys",
    ]  # fmt: skip
    assert kernels.launches - launches <= most
    assert kernels.waits - waited <= waits


@pytest.mark.parametrize(("option", "most", "waits"), [({"self_loops": True}, 213, 5), ({"window": 3}, 232, 6)])
def test_edges_that_are_always_there_take_few_launches(
    option: dict[str, Any], most: int, waits: int, kernels: Kernels
) -> None:
    torch.manual_seed(0)
    conv, ptr = SBMAttentionConv(8, 4, heads=2, num_blocks=4, **option), torch.tensor([0, 5, 14])
    x, grad = torch.randn(14, 8, requires_grad=True), torch.randn(14, 8)
    launches, waited = kernels.launches, kernels.waits
    conv(x, ptr=ptr, seed=1).backward(grad)
    assert kernels.launches - launches <= most
    assert kernels.waits - waited <= waits
