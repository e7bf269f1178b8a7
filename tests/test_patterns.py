"""Patterns against their definitions, pair by pair; random keys against the uniform law; the transform against the functions."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import pointer as offsets
from problems import refuses
from torch import Tensor
from torch.utils.data.datapipes.iter import IterableWrapper
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.transforms import Compose

from sbm_pyg import SourceGraph
from sbm_pyg.graphs.graph import AttentionGraph
from sbm_pyg.ops import checks
from sbm_pyg.ops.random_words import philox
from sbm_pyg.sources import patterns

FALSE_ALARM = 1e-6
FULL_GRAPH = SourceGraph(patterns.PatternSource(patterns.full))


class Case(NamedTuple):
    function: Callable[..., AttentionGraph]
    is_edge: Callable[..., bool]  # of n, query position, key position and the arguments
    arguments: dict[str, Any]

    def __call__(self, n: int | None, **options: Any) -> AttentionGraph:
        return self.function(n, **self.arguments, **options)

    def transform(self, heads: int = 1) -> SourceGraph:
        return SourceGraph(patterns.PatternSource(self.function, **self.arguments, heads=heads), heads=heads)

    def dense(self, n: int) -> Tensor:
        return torch.tensor([[self.is_edge(n, i, j, **self.arguments) for j in range(n)] for i in range(n)])


def cases() -> list[Case]:
    def in_window(n: int, i: int, j: int, size: int, is_causal: bool = False, num_sinks: int = 0) -> bool:
        return (abs(i - j) <= size or j < num_sinks) and not (is_causal and j > i)

    def add(function: Callable[..., AttentionGraph], is_edge: Callable[..., bool], *choices: dict[str, Any]) -> None:
        result.extend(Case(function, is_edge, arguments) for arguments in choices)

    result: list[Case] = []
    add(patterns.full, lambda n, i, j: True, {})
    add(patterns.self_loops, lambda n, i, j: i == j, {})
    sizes = [{"size": size, **causal} for size in (0, 1, 3, sys.maxsize) for causal in ({}, {"is_causal": True})]
    add(patterns.window, in_window, *sizes, *(of | {"num_sinks": n} for of in sizes for n in (1, 2, sys.maxsize)))
    numbers = [{"num_global": number} for number in (0, 1, 3, sys.maxsize)]
    add(patterns.global_tokens, lambda n, i, j, num_global: i < num_global or j < num_global, *numbers)
    blocks = [{"num_blocks": number} for number in (1, 2, 3, 5, sys.maxsize)]
    add(patterns.block_diagonal, lambda n, i, j, num_blocks: i * num_blocks // n == j * num_blocks // n, *blocks)
    relays = [{"num_relays": number} for number in (1, 2, 3, 5, sys.maxsize)]
    add(patterns.relay_keys, lambda n, i, j, num_relays: j >= n - num_relays, *relays)
    add(patterns.relay_queries, lambda n, i, j, num_relays: i >= n - num_relays, *relays)
    return result


def name(case: Case) -> str:
    return "-".join([case.function.__name__, *map(str, case.arguments.values())])


CASES = cases()
RANDOM_CASES = [
    Case(patterns.random, bool, {"num_keys_per_query": 2, "seed": 3}),
    Case(patterns.bigbird, bool, {"size": 1, "num_global": 1, "num_random": 2, "seed": 3}),
]
every_case = pytest.mark.parametrize("case", CASES, ids=map(name, CASES))
every_case_and_random = pytest.mark.parametrize("case", CASES + RANDOM_CASES, ids=map(name, CASES + RANDOM_CASES))
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


# ------------------------------------------------------------------------------------------------ definitions


@every_case
def test_definition(case: Case) -> None:
    for n in range(1, 10):
        graph = case(n).validate()
        assert (graph.num_queries, graph.num_keys, graph.heads, graph.num_sequences) == (n, n, 1, 1)
        assert torch.equal(graph.to_dense()[0], case.dense(n)), n
        causal = case.function(n, **case.arguments | {"is_causal": True}).validate()
        assert causal == graph.causal()
        assert causal.is_causal


def test_larger_blocks() -> None:
    for n, blocks in ((100, 7), (64, 8), (31, 30), (50, 51)):
        graph = patterns.block_diagonal(n, blocks)
        block = torch.arange(n) * blocks // n
        assert torch.equal(graph.to_dense()[0], block[:, None] == block)
        assert set(graph.degree.unique().tolist()) <= {max(n // blocks, 1), n // blocks + 1}


@every_case
@given(lengths=LENGTHS, heads=st.integers(1, 3))
def test_each_sequence_gets_its_own_pattern(case: Case, lengths: list[int], heads: int) -> None:
    graph = case(None, ptr=offsets(lengths), heads=heads)
    assert graph == AttentionGraph.concatenate([case(n, heads=heads) for n in lengths])
    assert graph.validate() == case(sum(lengths), ptr=offsets(lengths).int()).expand(heads)


@pytest.mark.parametrize(
    ("graph", "keys"),
    [(lambda n: patterns.self_loops(n), 1), (lambda n: patterns.window(n, 3), 7),
     (lambda n: patterns.window(n, 3, is_causal=True), 4), (lambda n: patterns.global_tokens(n, 2), 4),
     (lambda n: patterns.random(n, 4, seed=0), 4), (lambda n: patterns.bigbird(n, 2, 2, 2, seed=0), 11),
     (lambda n: patterns.block_diagonal(n, n // 5), 5), (lambda n: patterns.relay_keys(n, 3), 3),
     (lambda n: patterns.relay_queries(n, 3), 3)],
)  # fmt: skip
def test_cost_is_that_of_the_edges(graph: Callable[[int], AttentionGraph], keys: int) -> None:
    """Anything ``n x n`` would need 10^10 entries here, which no machine of the tests has."""
    n = 100_000
    assert 0.99 * keys * n < graph(n).validate().num_edges <= keys * n


def test_the_options_reach_every_function() -> None:
    for case in CASES + RANDOM_CASES:
        parameters = inspect.signature(case.function).parameters
        assert next(iter(parameters)) == "n"
        assert [parameters[option].default for option in ("heads", "ptr", "device")] == [1, None, None]
        assert case(4, device="cpu").device.type == "cpu"
        assert case(4, ptr=torch.tensor([0, 4]), device=torch.device("cpu")) == case(4)


# ------------------------------------------------------------------------------------------------ random keys


def subsets(graph: AttentionGraph, k: int) -> Tensor:
    """The set of keys of each row, ``[H*N]``, as a bit mask of positions in the sequence."""
    assert (graph.degree == k).all()
    first_key = graph.key_ptr[torch.bucketize(graph.edge_index[1], graph.query_ptr[1:], right=True)]
    return (2 ** (graph.edge_index[0] - first_key)).view(-1, k).sum(1)


def numbered(sets: Tensor, n: int, k: int) -> Tensor:
    """Bit masks as numbers of subsets; fails on one that is no k-subset of n."""
    known = torch.tensor(sorted(sum(2**j for j in chosen) for chosen in combinations(range(n), k)))
    number = torch.searchsorted(known, sets).clamp(max=known.numel() - 1)
    assert torch.equal(known[number], sets)
    return number


def p_value(counts: Tensor) -> float:
    """Of the hypothesis that all cells are equally likely."""
    assert counts.sum() >= 20 * counts.numel()
    return float(scipy.stats.chisquare(counts.numpy()).pvalue)


@pytest.mark.parametrize(
    ("n", "k"), [(5, 1), (5, 2), (6, 3), (5, 3), (5, 4), (7, 3)]
)  # k > n/2 draws the keys left out
def test_all_sets_of_keys_are_equally_likely(n: int, k: int) -> None:
    batch = 3000
    sets = numbered(subsets(patterns.random(None, k, ptr=n * torch.arange(batch + 1), heads=2, seed=0), k), n, k).view(
        2, batch, n
    )
    number = int(sets.max()) + 1
    assert p_value(torch.bincount(sets.flatten(), minlength=number)) > FALSE_ALARM
    for position in range(n):  # a query is not treated differently for where it stands
        assert p_value(torch.bincount(sets[:, :, position].flatten(), minlength=number)) > FALSE_ALARM
    for one, two in (
        (sets[0], sets[1]),
        (sets[:, :, 0], sets[:, :, 1]),
        (sets[:, :-1], sets[:, 1:]),
    ):  # heads, queries, sequences
        pairs = torch.bincount((one * number + two).flatten(), minlength=number**2)
        if pairs.sum() >= 20 * number**2:
            assert p_value(pairs) > FALSE_ALARM


def test_the_test_of_sets_has_power() -> None:
    """Negative control: filling up repeats with the least absent key is found out."""
    generator = torch.Generator().manual_seed(0)
    sets = []
    for row in torch.randint(5, (30_000, 2), generator=generator).tolist():
        keys = set(row)
        keys |= {min(set(range(5)) - keys)} if len(keys) < 2 else set()
        sets.append(sum(2**key for key in keys))
    assert p_value(torch.bincount(numbered(torch.tensor(sets), 5, 2))) < FALSE_ALARM


def test_sets_are_uniform_where_lengths_differ() -> None:
    lengths = [5, 6, 2] * 3000  # 3 keys: of 5 left out, of 6 drawn, of 2 all
    graph = patterns.random(None, 3, ptr=offsets(lengths), seed=1).validate()
    queries = torch.repeat_interleave(torch.tensor(lengths), torch.tensor(lengths))
    assert torch.equal(graph.degree[0], queries.clamp(max=3))
    for n in (5, 6):
        parts = graph.edge_index[0][torch.repeat_interleave(queries == n, graph.degree[0])].view(-1, 3)
        start = torch.repeat_interleave(graph.query_ptr[:-1], torch.tensor(lengths))[queries == n]
        sets = numbered((2 ** (parts - start[:, None])).sum(1), n, 3)
        assert p_value(torch.bincount(sets)) > FALSE_ALARM


@pytest.mark.parametrize("k", [7, 40])
def test_keys_are_drawn_alike_in_long_sequences(k: int) -> None:
    n, heads = 50, 200
    times = torch.bincount(patterns.random(n, k, heads=heads, seed=0).col, minlength=n).double()
    share = k / n
    deviation = (times - n * heads * share) ** 2 / (
        n * heads * share * (1 - share) * n / (n - 1)
    )  # keys of a row exclude each other
    assert scipy.stats.chi2.sf(deviation.sum().item(), n - 1) > FALSE_ALARM
    assert scipy.stats.chi2.cdf(deviation.sum().item(), n - 1) > FALSE_ALARM


@given(LENGTHS, st.integers(0, 12), st.integers(1, 3), st.integers(0, 2**63 - 1))
def test_random_has_the_exact_number_of_keys(lengths: list[int], k: int, heads: int, seed: int) -> None:
    graph = patterns.random(None, k, ptr=offsets(lengths), heads=heads, seed=seed).validate()
    assert torch.equal(graph.degree, torch.tensor([min(k, n) for n in lengths for _ in range(n)]).expand(heads, -1))


def test_random_keys_of_some_heads_are_those_of_all() -> None:
    ptr, ids = torch.tensor([0, 20, 50]), torch.tensor([4, 2**32 - 1])
    whole = patterns.random(None, 3, ptr=ptr, heads=3, seed=5, sequence_ids=ids)
    some = patterns.random(None, 3, ptr=ptr, heads=2, seed=5, sequence_ids=ids + (1 << 32))
    assert all(some.head(head) == whole.head(head + 1) for head in range(2))


def test_random_keys_have_words_of_their_own() -> None:
    """The first key of a query is a word of Philox at (0, its place, its stream, its head and, in the top byte, what the word is for: 8)."""
    graph = patterns.random(None, 1, ptr=torch.tensor([0, 50, 100]), heads=2, seed=5)
    place, stream, head = (
        torch.arange(50).repeat(4), torch.tensor([0, 1]).repeat_interleave(50).repeat(2), torch.arange(200) // 100,
    )  # fmt: skip
    word = philox(torch.zeros(200, dtype=torch.int64), place, stream, head + 0x08000000, 5)[0]
    assert torch.equal(graph.col.long(), 50 * stream + (50 * word >> 32))


@pytest.mark.parametrize("case", RANDOM_CASES, ids=map(name, RANDOM_CASES))
def test_seeds_and_generators(case: Case) -> None:
    def draw(**options: Any) -> AttentionGraph:
        return case.function(40, **({key: value for key, value in case.arguments.items() if key != "seed"} | options))

    before = torch.get_rng_state()
    assert draw(seed=5) == draw(seed=5)
    assert draw(seed=5) != draw(seed=6)
    one, two = (torch.Generator().manual_seed(5) for _ in range(2))
    assert draw(generator=one) == draw(generator=two)
    assert draw(generator=one) != draw(generator=torch.Generator().manual_seed(5))  # a generator moves on
    assert torch.equal(torch.get_rng_state(), before)  # and torch's own does not
    try:
        torch.manual_seed(7)
        third = draw()
        assert draw() != third
        torch.manual_seed(7)
        assert draw() == third
    finally:
        torch.set_rng_state(before)
    head_0, head_1 = (draw(seed=5, heads=2).head(head) for head in range(2))
    assert head_0 != head_1
    refuses(lambda: draw(seed=5, generator=one), "Expected 'seed' or 'generator' (got both).")


@pytest.mark.parametrize("case", RANDOM_CASES, ids=map(name, RANDOM_CASES))
def test_a_sequence_keeps_its_keys_in_any_batch(case: Case) -> None:
    """By its stream; another stream gets other keys."""
    lengths, sequence_ids = [9, 40, 17], torch.tensor([2**32 - 1, 5, 0])
    together = case.function(None, ptr=offsets(lengths), heads=2, sequence_ids=sequence_ids, **case.arguments)
    for sequence, n in enumerate(lengths):
        alone = case.function(n, heads=2, sequence_ids=sequence_ids[sequence : sequence + 1], **case.arguments)
        assert torch.equal(alone.to_dense(), together.to_dense(sequence))
    numbered = case.function(None, ptr=offsets(lengths), heads=2, sequence_ids=torch.arange(3), **case.arguments)
    assert numbered == case.function(None, ptr=offsets(lengths), heads=2, **case.arguments)
    assert numbered != together
    with pytest.raises(ValueError, match=re.escape("Expected 'sequence_ids' to be [3] int64")):
        case.function(None, ptr=offsets(lengths), sequence_ids=sequence_ids[:2], **case.arguments)


@given(LENGTHS, st.integers(1, 3), st.integers(0, 2), st.integers(0, 2), st.integers(0, 3), st.integers(0, 100))
def test_bigbird_is_the_union(
    lengths: list[int], heads: int, size: int, num_global: int, num_random: int, seed: int
) -> None:
    options: dict[str, Any] = {"ptr": offsets(lengths), "heads": heads}
    graph = patterns.bigbird(None, size, num_global, num_random, seed=seed, **options).validate()
    drawn = patterns.random(None, num_random, seed=seed, **options)
    for sequence, n in enumerate(lengths):
        fixed = torch.tensor(
            [[abs(i - j) <= size or i < num_global or j < num_global for j in range(n)] for i in range(n)]
        )
        assert torch.equal(graph.to_dense(sequence), fixed | drawn.to_dense(sequence))


# ------------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize("size", [2**63, 2**64 + 1, 10**100, np.uint64(2**63)])
def test_sizes_beyond_int64_are_those_of_the_whole_sequence(size: Any) -> None:
    calls: list[Callable[..., AttentionGraph]] = [
        patterns.window, patterns.global_tokens, partial(patterns.random, seed=0), patterns.block_diagonal, patterns.relay_keys,
    ]  # fmt: skip
    for call in (*calls, patterns.relay_queries):
        assert call(4, size) == call(4, 4)
    assert patterns.bigbird(4, size, size, size, seed=0) == patterns.full(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: patterns.full(200_000),
         "Expected 'n' to ask for no more than memory holds (got 40,000,000,000 edges, 149.0 GiB of 1.0 GiB)."),
        (lambda: patterns.full(None, ptr=torch.tensor([0, 10, 200_010])),
         "Expected 'n' to ask for no more than memory holds (got 40,000,000,100"),
        (lambda: patterns.window(10**6, 10**6), "Expected 'n' to ask for no more than memory holds (got 1,000,000,000,000 edges"),
        (lambda: patterns.window(10**6, 10**6, is_causal=True),
         "Expected 'n' to ask for no more than memory holds (got 500,000,500,000 edges"),
        (lambda: patterns.global_tokens(10**6, 1000), "Expected 'n' to ask for no more than memory holds (got 1,999,000,000 edges"),
        (lambda: patterns.random(10**6, 1000, seed=0), "Expected 'n' to ask for no more than memory holds (got 1,000,000,000 edges"),
        (lambda: patterns.random(10**5, 10**5 - 1, seed=0), "Expected 'n' to ask for no more than memory holds (got 10,000,000,000 edges"),
        (lambda: patterns.bigbird(10**5, 1, 1, 1000, seed=0), "Expected 'n' to ask for no more than memory holds (got 100,000,000 edges"),
        (lambda: patterns.random(10**6, 1000, heads=2, seed=0), "Expected 'n' to ask for no more than memory holds (got 2,000,000,000 edges"),
        (lambda: patterns.bigbird(10**5, 2, 2, 0, heads=100), "Expected 'heads' to ask for no more than memory holds"),
        (lambda: patterns.block_diagonal(200_000, 1), "Expected 'n' to ask for no more than memory holds (got 40,000,000,000 edges"),
        (lambda: patterns.relay_keys(10**6, 10**6), "Expected 'n' to ask for no more than memory holds (got 1,000,000,000,000 edges"),
        (lambda: patterns.relay_queries(10**6, 10**6), "Expected 'n' to ask for no more than memory holds (got 1,000,000,000,000 edges"),
        (lambda: patterns.self_loops(2**62), "Expected 'n' to ask for no more than memory holds (got 4,611,686,018,427,387,904 tokens"),
        (lambda: patterns.self_loops(2**64), "Expected 'n' to ask for no more than memory holds (got more than 2**63 tokens"),
        (lambda: patterns.self_loops(2, heads=2**31), "Expected 'heads' to ask for no more than memory holds (got 4,294,967,296 rows"),
        (lambda: patterns.random(2, 1, heads=2**31), "Expected 'heads' to ask for no more than memory holds (got 4,294,967,296 rows"),
        (lambda: patterns.full(2000, heads=1000), "Expected 'heads' to ask for no more than memory holds (got 4,000,000,000 edges"),
        (lambda: FULL_GRAPH(Data(num_nodes=200_000)), "Expected 'graph' to ask for no more than memory holds (got 40,000,000,000 edges"),
    ],
)  # fmt: skip
def test_what_memory_does_not_hold_is_refused(
    call: Callable[[], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "available", lambda device: 2**30)
    refuses(lambda: call(), message)


def test_large_patterns_that_fit_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available", lambda device: 2**30)
    assert patterns.window(10**6, 5).num_edges == 11 * 10**6 - 30
    assert patterns.full(2000, heads=2).num_edges == 8_000_000


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: patterns.full(None), ValueError, "Expected 'n' or 'ptr' (got neither)."),
        (lambda: patterns.full(-1), ValueError, "Expected 'n' to be at least 0 (got -1)."),
        (lambda: patterns.full(cast(int, 2.0)), TypeError, "Expected 'n' to be an int (got float)."),
        (lambda: patterns.full(None, ptr=torch.tensor([0.0, 2.0])), TypeError, "Expected 'ptr' to be int64 (got torch.float32)"),
        (lambda: patterns.full(None, ptr=torch.tensor([], dtype=torch.int64)), ValueError,
         "Expected 'ptr' to be [B+1] (got [0])"),
        (lambda: patterns.full(None, ptr=cast(Tensor, [0, 2])), TypeError, "Expected 'ptr' to be a tensor (got list)."),
    ],
)  # fmt: skip
def test_errors(call: Callable[[], AttentionGraph], error: type[Exception], message: str) -> None:
    refuses(lambda: call(), message, error)


# ------------------------------------------------------------------------------------------------ transforms


@every_case_and_random
@pytest.mark.parametrize("heads", [1, 2])
def test_transform_of_data(case: Case, heads: int) -> None:
    data = Data(x=torch.randn(6, 2), y=torch.tensor([1]), edge_index=torch.tensor([[0], [1]]))
    result = case.transform(heads)(data)
    graph = case(6, heads=heads)
    assert result.validate()
    assert (
        AttentionGraph.from_edge_index(result.edge_index, 6, 6, edge_head=result.get("edge_type"), heads=heads) == graph
    )
    assert torch.equal(result.edge_index, graph.edge_index)
    assert ("edge_type" in result) == (heads > 1)
    assert result.x is data.x
    assert result.y is data.y
    assert data.edge_index.tolist() == [[0], [1]]  # the input keeps its edges


@every_case_and_random
@pytest.mark.parametrize("heads", [1, 2])
def test_transform_of_a_batch(case: Case, heads: int) -> None:
    lengths = [4, 1, 6]
    batch = Batch.from_data_list(
        [
            Data(x=torch.randn(n, 2), y=torch.tensor([n]), edge_index=torch.zeros(2, n, dtype=torch.int64))
            for n in lengths
        ]
    )
    before = [data.edge_index for data in batch.to_data_list()]
    result = case.transform(heads)(batch)
    graph = case(None, ptr=batch.ptr, heads=heads)
    assert (
        AttentionGraph.from_edge_index(
            result.edge_index, edge_head=result.get("edge_type"), heads=heads, query_ptr=result.ptr
        )
        == graph
    )
    for sequence, data in enumerate(result.to_data_list()):
        one = graph.sequence(sequence)
        assert torch.equal(data.edge_index, one.edge_index)
        assert torch.equal(data.get("edge_type", one.edge_head), one.edge_head)
        assert data.y.tolist() == [lengths[sequence]]
    after = [data.edge_index for data in batch.to_data_list()]  # the input still separates as it did
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_transform_of_a_batch_without_edges_separates() -> None:
    batch = Batch.from_data_list([Data(num_nodes=2), Data(num_nodes=3)])
    parts = SourceGraph(patterns.PatternSource(patterns.window, size=1), heads=2)(batch).to_data_list()
    assert [part.edge_index.tolist() for part in parts] == [
        patterns.window(n, 1, heads=2).edge_index.tolist() for n in (2, 3)
    ]
    assert [part.edge_type.tolist() for part in parts] == [
        patterns.window(n, 1, heads=2).edge_head.tolist() for n in (2, 3)
    ]


def test_transform_replaces_the_former_edges() -> None:
    data = Data(
        x=torch.ones(3, 1), edge_index=torch.tensor([[0], [1]]), edge_attr=torch.ones(1, 2), edge_weight=torch.ones(1),
        edge_type=torch.zeros(1, dtype=torch.int64), edge_label=torch.ones(1), adj_t=torch.eye(3),
        edge_time=torch.ones(1), edge_names=["bond"], e_id=torch.ones(1), y=torch.ones(1),
    )  # fmt: skip
    before = {*data.keys()}
    result = SourceGraph(patterns.PatternSource(patterns.self_loops))(data)
    assert set(result.keys()) == {"x", "edge_index", "edge_label", "y"}
    assert {*data.keys()} == before


def test_transform_reads_batch_where_there_is_no_ptr() -> None:
    result = FULL_GRAPH(Data(x=torch.ones(3, 1), batch=torch.tensor([0, 1, 1])))
    assert result.edge_index.tolist() == [[0, 1, 2, 1, 2], [0, 1, 1, 2, 2]]


@pytest.mark.parametrize(
    "data", [HeteroData(), Batch.from_data_list([HeteroData(), HeteroData()]), torch.ones(3, 2)], ids=type
)
def test_transform_of_something_else(data: Any) -> None:
    refuses(lambda: FULL_GRAPH(data), f"Expected 'data' to be Data (got {type(data).__name__}).", TypeError)


@pytest.mark.filterwarnings("ignore:Unable to accurately infer 'num_nodes':UserWarning")
def test_transform_of_data_without_nodes() -> None:
    refuses(lambda: FULL_GRAPH(Data()), "Expected 'data' to have nodes (got None).")


def test_a_transform_takes_one_node() -> None:
    assert FULL_GRAPH(Data(num_nodes=1)).edge_index.tolist() == [[0], [0]]


@every_case_and_random
def test_transform_by_its_functional_name(case: Case) -> None:
    """On a data pipe, in a Compose, and after pickling (as data loader workers do)."""
    data, transform = Data(num_nodes=5), case.transform()
    expected = case(5).edge_index
    (piped,) = IterableWrapper([data]).source_graph(transform.source)
    for result in (piped, Compose([transform])(data), pickle.loads(pickle.dumps(transform))(data)):
        assert torch.equal(result.edge_index, expected)


def test_transform_draws_by_its_seed_for_each_head() -> None:
    data, source = Data(num_nodes=50), patterns.PatternSource(patterns.random, num_keys_per_query=3, heads=2)
    result = SourceGraph(source, heads=2, seed=4)(data)
    assert AttentionGraph.from_data(result, heads=2) == patterns.random(50, 3, seed=4, heads=2)
    torch.manual_seed(0)
    first, second = (SourceGraph(source, heads=2)(data).edge_index for _ in range(2))
    assert not torch.equal(first, second)


def test_transform_needs_no_features_and_takes_any() -> None:
    transform = SourceGraph(patterns.PatternSource(patterns.window, size=1), heads=2, is_causal=True)
    expected = patterns.window(4, 1, is_causal=True, heads=2)
    for x in (None, torch.ones(4), torch.ones(4, 3), torch.ones(4, 2, dtype=torch.int64)):
        assert AttentionGraph.from_data(transform(Data(x=x, num_nodes=4)), heads=2) == expected


def test_public_names() -> None:
    assert sorted(patterns.__all__) == list(patterns.__all__)
    functions = {case.function.__name__ for case in CASES + RANDOM_CASES}
    assert set(patterns.__all__) == functions | {"PatternSource"}
