"""AttentionGraph against masks: every property, conversion and combination is compared with dense boolean matrices built by plain loops."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, cast

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import pointer as offsets
from problems import refuses
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData

from sbm_pyg import AttentionGraph, pad, unpad
from sbm_pyg.graphs.ragged import resolve_ptr
from sbm_pyg.graphs.rows import check_sizes, index_type
from sbm_pyg.ops import checks
from sbm_pyg.ops.values import can_read
from sbm_pyg.sources import patterns


def says(message: str) -> str:
    return re.escape(message)


# ------------------------------------------------------------------------------------------------ graphs to test with


def build(masks: list[Tensor], dtype: torch.dtype = torch.int64) -> AttentionGraph:
    """The graph of one mask ``[H, n, m]`` per sequence, row by row."""
    heads = masks[0].size(0)
    rowptr, col = [0], []
    for head in range(heads):
        first_key = 0
        for mask in masks:
            for row in mask[head].tolist():
                col += [first_key + key for key, edge in enumerate(row) if edge]
                rowptr.append(len(col))
            first_key += mask.size(2)
    query_ptr, key_ptr = offsets([mask.size(1) for mask in masks]), offsets([mask.size(2) for mask in masks])
    return AttentionGraph(
        torch.tensor(rowptr), torch.tensor(col, dtype=dtype), int(query_ptr[-1]), int(key_ptr[-1]), heads, query_ptr,
        key_ptr,
    )  # fmt: skip


def whole(masks: list[Tensor]) -> Tensor:
    """One mask ``[H, N, M]`` of all sequences."""
    return torch.stack(
        [torch.block_diag(*[mask[head].int() for mask in masks]).bool() for head in range(masks[0].size(0))]
    )


def edges(masks: list[Tensor]) -> list[tuple[int, int, int]]:
    """Edges as (head, query, key), in order."""
    return [tuple(edge) for edge in whole(masks).nonzero().tolist()]


def draw_masks(seed: int, shapes: list[tuple[int, int]], heads: int, density: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(heads, n, m, generator=generator) < density for n, m in shapes]


SEEDS, HEADS, DENSITIES = st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([0.0, 0.2, 0.6, 1.0])
SHAPES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4)
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)
MASKS = st.builds(draw_masks, SEEDS, SHAPES, HEADS, DENSITIES)
SQUARE_MASKS = st.builds(
    lambda seed, lengths, heads, density: draw_masks(seed, [(n, n) for n in lengths], heads, density), SEEDS, LENGTHS,
    HEADS, DENSITIES,
)  # fmt: skip
DTYPES = st.sampled_from([torch.int32, torch.int64])

RAGGED = draw_masks(0, [(2, 3), (4, 4), (1, 2)], heads=2, density=0.5)
SQUARE = draw_masks(1, [(3, 3), (2, 2)], heads=2, density=0.5)
NO_EDGES = [torch.zeros(2, 3, 3, dtype=torch.bool)]


def test_the_examples_have_what_they_are_for() -> None:
    degree = build(RAGGED).degree
    assert (degree == 0).any()  # rows without edges
    assert (degree > 1).any()
    assert not torch.equal(RAGGED[1][0], RAGGED[1][1])
    assert not torch.equal(SQUARE[0], SQUARE[0].transpose(1, 2))  # or a transposed graph would pass


# ------------------------------------------------------------------------------------------------ resolve_ptr, pad, unpad


def test_resolve_ptr_of_one_sequence() -> None:
    ptr = resolve_ptr(5)
    assert ptr.tolist() == [0, 5]
    assert ptr.dtype == torch.int64
    assert resolve_ptr(5, device=torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_resolve_ptr_takes_both_integer_types(dtype: torch.dtype) -> None:
    for ptr in (
        resolve_ptr(5, torch.tensor([0, 2, 5], dtype=dtype)),
        resolve_ptr(5, batch=torch.tensor([0, 0, 1, 1, 1], dtype=dtype)),
    ):
        assert ptr.tolist() == [0, 2, 5]
        assert ptr.dtype == torch.int64


@given(LENGTHS)
def test_resolve_ptr_from_batch(lengths: list[int]) -> None:
    batch = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    assert resolve_ptr(sum(lengths), batch=batch).tolist() == offsets(lengths).tolist()


@pytest.mark.parametrize(
    ("total", "ptr", "batch", "error", "message"),
    [(3, None, [0, 0], ValueError, "Expected 'batch' to be [3], one sequence number per token (got [2])"),
     (2, None, [0.0, 1.0], TypeError, "Expected 'batch' to be int64 (got torch.float32)"),
     (2, None, [1, 0], ValueError, "Expected 'batch' to be sorted, from 0 (got another order)"),
     (2, None, [-1, 0], ValueError, "Expected 'batch' to be sorted, from 0 (got another order)"),
     (2, [1, 2], None, ValueError, "Expected 'ptr' to run from 0 to 2, the number of tokens (got 1 to 2)"),
     (2, [[0, 2]], None, ValueError, "Expected 'ptr' to be [B+1] (got [1, 2])")],
)  # fmt: skip
def test_resolve_ptr_errors(total: int, ptr: Any, batch: Any, error: type[Exception], message: str) -> None:
    tensors = [
        None if value is None else torch.tensor(value) if value else torch.tensor(value, dtype=torch.int64)
        for value in (ptr, batch)
    ]
    refuses(lambda: resolve_ptr(total, *tensors), message, error)


def test_sequences_may_have_no_tokens() -> None:
    assert resolve_ptr(0).tolist() == [0, 0]
    assert (
        resolve_ptr(0, torch.tensor([0])).tolist()
        == resolve_ptr(0, batch=torch.tensor([], dtype=torch.int64)).tolist()
        == [0]
    )
    assert resolve_ptr(3, torch.tensor([0, 0, 3, 3])).tolist() == [0, 0, 3, 3]
    assert resolve_ptr(4, batch=torch.tensor([1, 1, 4, 5])).tolist() == [0, 0, 2, 2, 2, 3, 4]
    assert resolve_ptr(2, [0, 2]).tolist() == [0, 2]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected 'batch' to ask for no more than memory holds"):
        resolve_ptr(2, batch=torch.tensor([0, 10**12]))
    for ptr in ([0], [0, 0], [0, 0, 2, 2, 5]):
        x = torch.arange(1, ptr[-1] + 1)
        padded, mask = pad(x, torch.tensor(ptr))
        again, offsets_again = unpad(padded, mask)
        assert again.tolist() == x.tolist()
        assert offsets_again.tolist() == ptr


@pytest.mark.parametrize("sizes", [(0, 0), (3, 0), (0, 3)])
def test_a_graph_may_have_no_tokens(sizes: tuple[int, int]) -> None:
    edges = torch.empty(2, 0, dtype=torch.int64)
    graph = AttentionGraph.from_edge_index(edges, *sizes, heads=2)
    assert graph == AttentionGraph(graph.rowptr, graph.col, *sizes, heads=2)
    assert (graph.num_queries, graph.num_keys, graph.density.tolist()) == (*sizes, [[0.0, 0.0]])
    assert (graph | graph) == graph == graph.select(torch.ones(0, dtype=torch.bool))
    assert graph.edge_index.shape == (2, 0)
    assert graph.to_dense().shape == (2, *sizes)
    assert AttentionGraph.from_data(AttentionGraph.from_edge_index(edges, 3, 3).to_data()).num_queries == 3
    assert AttentionGraph.from_edge_index(edges).num_queries == 0


def test_resolve_ptr_copies_and_looks_each_time() -> None:
    """For numpy writes into tensors of the CPU, and no version tells."""
    ptr = torch.tensor([0, 2, 5])
    kept = resolve_ptr(5, ptr)
    ptr.numpy()[1] = 7
    assert kept.tolist() == [0, 2, 5]
    refuses(lambda: resolve_ptr(5, ptr), "Expected 'ptr' to be ascending")


@given(LENGTHS, st.sampled_from([(), (3,), (2, 2)]), st.sampled_from([torch.float64, torch.int64]))
def test_unpad_inverts_pad(lengths: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.arange(sum(lengths) * int(np.prod(shape))).view(-1, *shape) + 1).to(dtype)
    padded, mask = pad(x, offsets(lengths), fill_value=-7)
    assert padded.shape == (len(lengths), max(lengths), *shape)
    assert mask.tolist() == [[place < length for place in range(max(lengths))] for length in lengths]
    assert (padded[~mask] == -7).all()
    assert padded.dtype == dtype
    ragged, ptr = unpad(padded, mask)
    assert torch.equal(ragged, x)
    assert torch.equal(ptr, offsets(lengths))


def test_unpad_takes_padding_anywhere() -> None:
    x, ptr = unpad(torch.tensor([[9, 1, 2], [3, 9, 4]]), torch.tensor([[False, True, True], [True, False, True]]))
    assert x.tolist() == [1, 2, 3, 4]
    assert ptr.tolist() == [0, 2, 4]


@pytest.mark.parametrize("fill_value", [0.5, math.nan, math.inf, -1, 256])
def test_pad_fills_with_values_of_the_type(fill_value: float) -> None:
    x, ptr = torch.arange(3, dtype=torch.uint8), torch.tensor([0, 1, 3])
    with pytest.raises(
        ValueError, match=says(f"Expected 'fill_value' to be a value of torch.uint8, as 'x' is (got {fill_value})")
    ):
        pad(x, ptr, fill_value)
    assert pad(x, ptr, 255.0)[0].tolist() == [[0, 255], [1, 2]]
    assert pad(x > 0, ptr, 1)[0].tolist() == [[False, True], [True, True]]


def test_pad_looks_at_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available", lambda device: 2**30)
    with pytest.raises(
        ValueError, match=says("Expected 'ptr' to ask for no more than memory holds (got 1,920,480,000 numbers")
    ):
        pad(torch.zeros(50_000, 16), torch.tensor([*range(0, 20_001, 5), 50_000]))


# ------------------------------------------------------------------------------------------------ the record


def test_constructor_fills_in_the_offsets() -> None:
    square = AttentionGraph(torch.tensor([0, 1, 1]), torch.tensor([1]), 2, 2)
    assert square.query_ptr.tolist() == square.key_ptr.tolist() == [0, 2]
    wide = AttentionGraph(torch.tensor([0, 1, 1]), torch.tensor([4]), 2, 5)
    assert (wide.query_ptr.tolist(), wide.key_ptr.tolist()) == ([0, 2], [0, 5])
    tall = AttentionGraph(torch.tensor([0, 1, 1]), torch.tensor([4]), 2, 5, query_ptr=torch.tensor([0, 2]))
    assert tall.key_ptr.tolist() == [0, 5]
    shared = AttentionGraph(torch.tensor([0, 1, 1]), torch.tensor([0]), 2, 2, query_ptr=torch.tensor([0, 1, 2]))
    assert shared.key_ptr.tolist() == [0, 1, 2]


GOOD: dict[str, Any] = {
    "rowptr": torch.tensor([0, 2, 3, 4]), "col": torch.tensor([0, 1, 0, 2]), "num_queries": 3, "num_keys": 3, "heads": 1,
    "query_ptr": torch.tensor([0, 2, 3]), "key_ptr": torch.tensor([0, 2, 3]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rowptr": torch.tensor([0, 2, 3, 4], dtype=torch.int32)}, TypeError, "Expected 'rowptr' to be int64 (got torch.int32)"),
        ({"col": torch.tensor([0.0, 1, 0, 2])}, TypeError, "Expected 'col' to be int32 or int64 (got torch.float32)"),
        ({"heads": 0}, ValueError, "Expected 'heads' to be at least 1 (got 0)"),
        ({"heads": 2}, ValueError, "Expected 'rowptr' to be [H*N+1] = [7] (got [4])"),
        ({"col": torch.tensor([[0, 1, 0, 2]])}, ValueError, "Expected 'col' to be [E] (got [1, 4])"),
        ({"num_keys": 5, "key_ptr": None}, ValueError,
         "Expected 'key_ptr' for several sequences with N = 3 queries and M = 5 keys (got None)"),
        ({"key_ptr": torch.tensor([0, 3])}, ValueError, "Expected 'query_ptr' and 'key_ptr' to be [B+1] both (got [3] and [2])"),
        ({"rowptr": GOOD["rowptr"].to("meta")}, ValueError, "Expected 'rowptr' on the device of 'col' (got meta and cpu)"),
        ({"query_ptr": GOOD["query_ptr"].to("meta")}, ValueError, "Expected 'query_ptr' on the device of 'col' (got meta and cpu)"),
        ({"key_ptr": GOOD["key_ptr"].to("meta")}, ValueError, "Expected 'key_ptr' on the device of 'col' (got meta and cpu)"),
    ],
)  # fmt: skip
def test_constructor_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    AttentionGraph(**GOOD)
    refuses(lambda: AttentionGraph(**(GOOD | change)), message, error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_ptr": torch.tensor([0, 2, 4])},
         "Expected 'query_ptr' to run from 0 to 3, the number of tokens (got 0 to 4)"),
        ({"key_ptr": torch.tensor([1, 2, 3])},
         "Expected 'key_ptr' to run from 0 to 3, the number of tokens (got 1 to 3)"),
        ({"rowptr": torch.tensor([1, 2, 3, 4])}, "Expected 'rowptr' to rise from 0 to E = 4 (got 1 to 4"),
        ({"rowptr": torch.tensor([0, 2, 3, 5])}, "Expected 'rowptr' to rise from 0 to E = 4 (got 0 to 5"),
        ({"rowptr": torch.tensor([0, 2, 1, 4])},
         "Expected 'rowptr' to rise from 0 to E = 4 (got 0 to 4, and 2 to 1 in row 1)"),
        ({"col": torch.tensor([0, 1, 0, 3])}, "(got key 3 of query 2, whose sequence has keys 2 to 2)"),
        ({"col": torch.tensor([-1, 1, 0, 2])}, "(got key -1 of query 0, whose sequence has keys 0 to 1)"),
        ({"col": torch.tensor([0, 1, 2, 2])}, "(got key 2 of query 1, whose sequence has keys 0 to 1)"),
        ({"col": torch.tensor([0, 1, 0, 1])}, "(got key 1 of query 2, whose sequence has keys 2 to 2)"),
        ({"col": torch.tensor([1, 0, 0, 2])},
         "to hold the keys of each row ascending, without repeats (got 1 before 0 in row 0)"),
        ({"col": torch.tensor([1, 1, 0, 2])},
         "to hold the keys of each row ascending, without repeats (got 1 before 1 in row 0)"),
    ],
)  # fmt: skip
def test_no_graph_is_made_of_wrong_values(change: dict[str, Any], message: str) -> None:
    good = AttentionGraph(**GOOD)
    assert good.validate() is good
    refuses(lambda: dataclasses.replace(good, **change), message)
    refuses(lambda: AttentionGraph._trusted(**(GOOD | change)).validate(), message)


def is_valid(rowptr: list[int], col: list[int], query_ptr: list[int], key_ptr: list[int], heads: int) -> bool:
    """The definition, row by row."""
    if rowptr[0] != 0 or rowptr[-1] != len(col) or any(b < a for a, b in pairwise(rowptr)):
        return False
    for row, (first, end) in enumerate(pairwise(rowptr)):
        query = row % query_ptr[-1]
        sequence = next(b for b, stop in enumerate(query_ptr[1:]) if query < stop)
        keys = col[first:end]
        if keys != sorted({*keys}) or any(not key_ptr[sequence] <= key < key_ptr[sequence + 1] for key in keys):
            return False
    return True


@given(MASKS, DTYPES, st.data())
def test_exactly_the_valid_graphs_are_made(masks: list[Tensor], dtype: torch.dtype, data: st.DataObject) -> None:
    graph = build(masks, dtype)
    rowptr, col = graph.rowptr.clone(), graph.col.clone()
    for _ in range(data.draw(st.integers(0, 2))):
        target = rowptr if data.draw(st.booleans()) or not len(col) else col
        place = data.draw(st.integers(0, len(target) - 1))
        target[place] = int(target[place]) + data.draw(st.integers(-2, 2))
    sizes = (graph.num_queries, graph.num_keys, graph.heads, graph.query_ptr, graph.key_ptr)
    if is_valid(rowptr.tolist(), col.tolist(), graph.query_ptr.tolist(), graph.key_ptr.tolist(), graph.heads):
        assert AttentionGraph(rowptr, col, *sizes).num_edges == len(col)
    else:
        with pytest.raises(ValueError, match=r"Expected '(rowptr|col)' to"):
            AttentionGraph(rowptr, col, *sizes)


def test_makers_of_valid_rows_do_not_look_at_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph is checked once, where it comes in."""
    graph = build(RAGGED)
    monkeypatch.setattr(AttentionGraph, "validate", lambda self: pytest.fail("checked once more"))
    union = graph.to("cpu") | graph.select(graph.col > 0) | graph.head(0)
    assert AttentionGraph.concatenate([union.sequence(0), union.sequence(1).head(1).expand(2)]).num_sequences == 2
    assert AttentionGraph.from_dense(torch.ones(2, 2)) == AttentionGraph.from_edge_index(
        torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]])
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_keys": 2**62},
         "Expected 'heads', 'num_queries' and 'num_keys' with a product below 2**63 (got 1 * 3 * 4611686018427387904)"),
        ({"num_keys": 2**63}, "Expected 'heads', 'num_queries' and 'num_keys' with a product below 2**63"),
        ({"num_queries": 2**40, "num_keys": 3}, "Expected 'num_queries' to ask for no more than memory holds (got 1,099,511,627,776 rows"),
        ({"heads": 2**40}, "Expected 'heads' to ask for no more than memory holds"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_are_refused_by_arithmetic(sizes: dict[str, Any], message: str) -> None:
    refuses(lambda: AttentionGraph.from_edge_index(torch.tensor([[0], [1]]), **({"num_queries": 3} | sizes)), message)
    refuses(lambda: build(RAGGED).head(0).expand(2**40), "Expected 'heads' to ask for no more than memory holds")


def test_a_dense_mask_that_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = AttentionGraph.from_edge_index(torch.tensor([[0], [1]]), 10_000)
    monkeypatch.setattr(checks, "available", lambda device: 10**8 - 1)
    refuses(
        lambda: graph.to_dense(),
        "Expected 'sequence' to ask for no more than memory holds (got 100,000,000 pairs, 0.1 GiB",
    )
    monkeypatch.setattr(checks, "available", lambda device: 10**8)
    assert graph.to_dense().sum() == 1


@given(MASKS, DTYPES)
def test_properties(masks: list[Tensor], dtype: torch.dtype) -> None:
    graph = build(masks, dtype)
    mask, triples = whole(masks), edges(masks)
    num_queries = mask.size(1)
    assert graph.validate() is graph
    assert graph.col.dtype == dtype
    assert graph.device == torch.device("cpu")
    assert (graph.num_edges, graph.num_sequences, graph.heads) == (len(triples), len(masks), mask.size(0))
    assert (graph.num_queries, graph.num_keys) == mask.shape[1:]
    assert graph.edge_row.tolist() == [head * num_queries + query for head, query, _ in triples]
    assert graph.edge_head.tolist() == [head for head, _, _ in triples]
    assert graph.edge_index.tolist() == [[key for _, _, key in triples], [query for _, query, _ in triples]]
    assert graph.edge_index.dtype == graph.edge_head.dtype == torch.int64
    assert torch.equal(graph.degree, mask.sum(2))
    assert torch.equal(graph.edges_per_sequence, torch.stack([one.sum((1, 2)) for one in masks]))
    assert torch.equal(graph.density, torch.stack([one.double().mean((1, 2)) for one in masks]))
    for sequence, one in enumerate(masks):
        assert graph.to_dense(sequence).dtype == torch.bool
        assert torch.equal(graph.to_dense(sequence), one)


def test_repr() -> None:
    assert (
        repr(build(RAGGED))
        == f"AttentionGraph(3 sequences, 2 heads, 7 queries, 9 keys, {len(edges(RAGGED))} edges, density {100 * len(edges(RAGGED)) / 48:.1f}%)"
    )
    assert (
        repr(build([torch.ones(1, 1, 1)]))
        == "AttentionGraph(1 sequence, 1 head, 1 query, 1 key, 1 edge, density 100.0%)"
    )
    assert repr(build(NO_EDGES)) == "AttentionGraph(1 sequence, 2 heads, 3 queries, 3 keys, 0 edges, density 0.0%)"
    assert (
        repr(AttentionGraph.from_dense(torch.ones(40, 50)))
        == "AttentionGraph(1 sequence, 1 head, 40 queries, 50 keys, 2,000 edges, density 100.0%)"
    )
    edge = torch.tensor([[0], [0]])
    for size, density in ((1000, "0.0001%"), (40, "0.062%"), (10, "1.0%")):
        assert f"1 edge, density {density})" in repr(AttentionGraph.from_edge_index(edge, size, size))


def test_equality() -> None:
    graph = AttentionGraph(**GOOD)
    same = AttentionGraph(**(GOOD | {"col": GOOD["col"].int(), "key_ptr": None}))
    assert graph == same
    assert hash(graph) == hash(same)
    others: list[dict[str, Any]] = [
        {"col": torch.tensor([0, 1, 1, 2])}, {"rowptr": torch.tensor([0, 1, 3, 4]), "col": torch.tensor([0, 0, 1, 2])},
        {"query_ptr": torch.tensor([0, 3]), "key_ptr": torch.tensor([0, 3])}, {"num_keys": 4, "key_ptr": torch.tensor([0, 2, 4])},
        {"col": GOOD["col"][:3], "rowptr": torch.tensor([0, 2, 3, 3])},
    ]  # fmt: skip
    for change in others:
        assert graph != AttentionGraph(**(GOOD | change)), change
    assert graph != graph.expand(2)
    assert graph != "a graph"
    few = GOOD | {"rowptr": torch.tensor([0, 1, 1, 2]), "col": torch.tensor([0, 2])}
    for name in ("query_ptr", "key_ptr"):
        assert AttentionGraph(**few) != AttentionGraph(**(few | {name: torch.tensor([0, 1, 3])})), name


def test_a_graph_without_edges_is_not_false() -> None:
    assert build(NO_EDGES)


def test_the_record_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        AttentionGraph(**GOOD).heads = 2  # type: ignore[misc]


def test_to_moves_every_tensor() -> None:
    graph = build(RAGGED)
    moved = graph.to("meta")
    assert {getattr(moved, name).device.type for name in ("rowptr", "col", "query_ptr", "key_ptr")} == {"meta"}
    assert graph.to("cpu", non_blocking=True) == graph


# ------------------------------------------------------------------------------------------------ graphs from graphs


@given(MASKS, DTYPES)
def test_sequence_head_and_concatenate(masks: list[Tensor], dtype: torch.dtype) -> None:
    graph, heads = build(masks, dtype), masks[0].size(0)
    parts = [graph.sequence(sequence) for sequence in range(len(masks))]
    assert parts == [build([mask]) for mask in masks]
    assert all(part.col.dtype == dtype for part in parts)
    assert graph.sequence(-1) == parts[-1]
    assert AttentionGraph.concatenate(parts) == graph
    assert AttentionGraph.concatenate([graph, graph]) == build(masks + masks)
    assert [graph.head(head) for head in range(heads)] == [
        build([mask[head : head + 1] for mask in masks]) for head in range(heads)
    ]
    assert graph.head(-1) == graph.head(heads - 1)
    assert graph.head(0).expand(3) == build([mask[[0, 0, 0]] for mask in masks])
    assert graph.expand(heads) is graph


@given(SEEDS, SHAPES, HEADS, HEADS, DENSITIES, DENSITIES, DTYPES, DTYPES)
def test_union(
    seed: int, shapes: list[tuple[int, int]], heads: int, other_heads: int, density: float, other_density: float,
    dtype: torch.dtype, other_dtype: torch.dtype,
) -> None:  # fmt: skip
    if heads != other_heads and 1 not in (heads, other_heads):
        other_heads = heads
    masks, others = draw_masks(seed, shapes, heads, density), draw_masks(seed + 1, shapes, other_heads, other_density)
    graph, other = build(masks, dtype), build(others, other_dtype)
    union, from_other = graph.union(other)
    assert union == build([a | b for a, b in zip(masks, others, strict=True)])
    assert union.validate() is union
    assert graph | other == union
    assert union.col.dtype == torch.promote_types(dtype, other_dtype)
    head, (key, query) = union.edge_head, union.edge_index
    assert from_other.dtype == torch.bool
    assert torch.equal(from_other, whole(others).expand(union.heads, -1, -1)[head, query, key])
    assert graph == build(masks)  # neither is changed
    assert other == build(others)


@given(MASKS, DTYPES)
def test_select_and_find(masks: list[Tensor], dtype: torch.dtype) -> None:
    graph = build(masks, dtype)
    every_third = torch.arange(graph.num_edges) % 3 == 1
    chosen = graph.select(every_third).validate()
    assert chosen.col.dtype == dtype
    assert torch.equal(chosen.edge_index, graph.edge_index[:, every_third])
    assert torch.equal(chosen.edge_head, graph.edge_head[every_third])
    assert torch.equal(graph.find(chosen.edge_index, chosen.edge_head), every_third.nonzero()[:, 0])
    assert chosen | graph == graph


@pytest.mark.parametrize(
    "other",
    [build(draw_masks(0, [(2, 3), (4, 4), (1, 2)], heads=3, density=0.5)),
     build(draw_masks(0, [(2, 3), (4, 4), (1, 3)], heads=2, density=0.5)),
     build(draw_masks(0, [(2, 3), (4, 4), (2, 2)], heads=2, density=0.5)),
     build(draw_masks(0, [(2, 3), (5, 6)], heads=2, density=0.5)),
     build(draw_masks(0, [(3, 3), (3, 4), (1, 2)], heads=2, density=0.5)),
     build(draw_masks(0, [(2, 4), (4, 3), (1, 2)], heads=2, density=0.5))],
)  # fmt: skip
def test_union_errors(other: AttentionGraph) -> None:
    graph = build(RAGGED)
    with pytest.raises(
        ValueError, match=says(f"Expected 'other' over the same tokens, heads and sequences (got {other} for {graph})")
    ):
        graph.union(other)


def test_offsets_are_compared_where_they_may_be_read() -> None:
    graph = build(RAGGED)
    same, other = (torch.tensor(ptr, device=graph.device) for ptr in ([0, 2, 6, 7], [0, 3, 6, 7]))
    assert graph.same_offsets(graph.query_ptr, graph.key_ptr)
    assert graph.same_offsets(same, graph.key_ptr)
    assert not graph.same_offsets(other, graph.key_ptr)
    assert not graph.same_offsets(same[1:], graph.key_ptr)
    assert graph.same_offsets(other.to("meta"), graph.key_ptr)
    known = torch.func.vmap(lambda ptr: torch.tensor(graph.same_offsets(ptr, graph.key_ptr)))(
        torch.stack([same, other])
    )
    assert known.tolist() == [True, True]
    per_sample = torch.func.vmap(torch.func.grad(lambda x: x.sum() if not can_read(x * x) else x.new_zeros(())))
    assert per_sample(torch.ones(2, 3)).tolist() == [[1.0] * 3] * 2


# ------------------------------------------------------------------------------------------------ from other forms


@given(MASKS, SEEDS)
def test_from_edge_index_sorts_and_drops_repeats(masks: list[Tensor], seed: int) -> None:
    graph = build(masks)
    order = torch.randperm(2 * graph.num_edges, generator=torch.Generator().manual_seed(seed)) % max(graph.num_edges, 1)
    sizes: dict[str, Any] = {"heads": graph.heads, "query_ptr": graph.query_ptr, "key_ptr": graph.key_ptr}
    for dtype in (torch.int32, torch.int64):
        edge_index, edge_head = graph.edge_index[:, order].to(dtype), graph.edge_head[order].to(dtype)
        assert AttentionGraph.from_edge_index(edge_index, edge_head=edge_head, **sizes) == graph
        assert (
            AttentionGraph.from_edge_index(edge_index, graph.num_queries, graph.num_keys, edge_head=edge_head, **sizes)
            == graph
        )


def test_from_edge_index_finds_the_sizes() -> None:
    edge_index = torch.tensor([[0, 4], [2, 1]])
    graph = AttentionGraph.from_edge_index(edge_index)
    assert (graph.num_queries, graph.num_keys, graph.heads) == (3, 5, 1)
    assert graph.edge_index.tolist() == [[4, 0], [1, 2]]
    square = AttentionGraph.from_edge_index(edge_index.flip(0))
    assert (square.num_queries, square.num_keys) == (5, 5)
    fixed = AttentionGraph.from_edge_index(edge_index, num_queries=7, num_keys=6)
    assert (fixed.num_queries, fixed.num_keys) == (7, 6)
    assert AttentionGraph.from_edge_index(edge_index, size=(6, 7)) == fixed
    empty = AttentionGraph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), num_queries=3)
    assert (empty.num_queries, empty.num_keys, empty.num_edges) == (3, 3, 0)


@pytest.mark.parametrize(
    ("edge_index", "options", "error", "message"),
    [
        (torch.zeros(3, 2, dtype=torch.int64), {}, ValueError, "Expected 'edge_index' to be [2, E] (got [3, 2])"),
        (torch.zeros(2, 2), {}, TypeError, "Expected 'edge_index' to be int64 (got torch.float32)"),
        (torch.tensor([[0, 1], [0, 1]]), {"edge_head": torch.tensor([0])}, ValueError, "Expected 'edge_head' to be [2] (got [1])"),
        (torch.tensor([[-1, 1], [0, 1]]), {}, ValueError, "Expected 'edge_index[0]' in 0..1 (got -1 to 1)"),
        (torch.tensor([[0, 1], [0, 4]]), {"num_queries": 4}, ValueError, "Expected 'edge_index[1]' in 0..3 (got 0 to 4)"),
        (torch.eye(3).to_sparse(), {"num_queries": 0}, ValueError, "Expected 'edge_index[1]' in 0..-1 (got 0 to 2)"),
        (torch.tensor([[0], [0]]), {"size": (1, 1), "num_keys": 1}, ValueError, "Expected 'size' or 'num_queries' and 'num_keys'"),
        (torch.tensor([[0], [0]]), {"size": 3}, TypeError, "Expected 'size' to be the pair (M, N) of keys and queries (got 3)"),
        (torch.tensor([[0], [0]]), {"num_queries": 2.0}, TypeError, "Expected 'num_queries' to be an int (got float)"),
        (torch.tensor([[0], [0]]), {"query_ptr": torch.tensor([])}, ValueError, "Expected 'query_ptr' to be [B+1] int64 (got [0]"),
    ],
)  # fmt: skip
def test_from_edge_index_errors(
    edge_index: Tensor, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    refuses(lambda: AttentionGraph.from_edge_index(edge_index, **options), message, error)


@given(MASKS)
def test_edge_index_of_pyg_round_trip(masks: list[Tensor]) -> None:
    graph = build(masks)
    for head in range(graph.heads):
        adjacency = graph.to_edge_index(head)
        assert isinstance(adjacency, EdgeIndex)
        assert adjacency.validate() is adjacency  # the order and the sizes it claims
        assert (adjacency.is_sorted_by_col, adjacency.sparse_size()) == (True, (graph.num_keys, graph.num_queries))
        assert AttentionGraph.from_edge_index(
            adjacency, query_ptr=graph.query_ptr, key_ptr=graph.key_ptr
        ) == graph.head(head)
    every = graph.to_edge_index()
    assert every.validate() is every
    assert torch.equal(every.as_tensor(), graph.edge_index)
    assert (
        AttentionGraph.from_edge_index(
            every, edge_head=graph.edge_head, heads=graph.heads, query_ptr=graph.query_ptr, key_ptr=graph.key_ptr
        )
        == graph
    )


def test_edge_index_of_pyg_gives_the_sizes() -> None:
    graph = AttentionGraph.from_edge_index(EdgeIndex([[0], [0]], sparse_size=(4, 3)))
    assert (graph.num_queries, graph.num_keys) == (3, 4)
    unknown = AttentionGraph.from_edge_index(EdgeIndex([[1], [0]]))
    assert (unknown.num_queries, unknown.num_keys) == (1, 2)


def test_keys_are_int32_if_all_numbers_of_keys_fit() -> None:
    assert [index_type(keys) for keys in (0, 2**31 - 1, 2**31)] == [torch.int32, torch.int32, torch.int64]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_from_torch_sparse(layout: torch.layout) -> None:
    for mask in (RAGGED[0][0], RAGGED[1][1], NO_EDGES[0][0], torch.eye(2, 4).bool(), torch.eye(4, 2).bool()):
        assert AttentionGraph.from_edge_index(mask.float().to_sparse(layout=layout)) == build([mask[None]])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_a_sparse_adjacency_whose_entries_are_vectors_gives_the_sizes() -> None:
    edges, values = torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 3)
    for adjacency in (
        torch.sparse_coo_tensor(edges, values, (5, 4, 3)),
        torch.sparse_csr_tensor(torch.tensor([0, 1, 2, 2, 2, 2]), edges[1], values, (5, 4, 3)),
    ):
        graph = AttentionGraph.from_edge_index(adjacency)
        assert (graph.num_queries, graph.num_keys) == (5, 4)
        assert graph.edge_index.tolist() == [[1, 0], [0, 1]]


def test_a_sparse_adjacency_of_other_tokens_is_refused() -> None:
    adjacency = torch.eye(4, 5).to_sparse()
    assert AttentionGraph.over(adjacency, 4, 5).num_edges == 4
    for num_queries, num_keys in ((5, 5), (4, 6), (5, 4)):
        message = f"Expected 'edge_index' over N = {num_queries} queries and M = {num_keys} keys (got a sparse adjacency [4, 5])"
        refuses(partial(AttentionGraph.over, adjacency, num_queries, num_keys), message)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_from_torch_sparse_leaves_the_tensor_alone() -> None:
    repeated = torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.ones(2), (2, 2))
    graph = AttentionGraph.from_edge_index(repeated)
    assert graph.edge_index.tolist() == [[1], [0]]
    assert not repeated.is_coalesced()


@given(
    SEEDS, st.integers(1, 3), HEADS, st.integers(1, 4), st.integers(1, 4),
    st.sampled_from([torch.bool, torch.float32, torch.int64]),
)  # fmt: skip
def test_dense_round_trip(seed: int, batch: int, heads: int, n: int, m: int, dtype: torch.dtype) -> None:
    masks = draw_masks(seed, [(n, m)] * batch, heads, 0.5)
    graph = AttentionGraph.from_dense(
        -3 * torch.stack(masks).int().to(dtype) if dtype != torch.bool else torch.stack(masks)
    )
    assert graph == build(masks)
    assert torch.equal(torch.stack([graph.to_dense(sequence) for sequence in range(batch)]), torch.stack(masks))
    assert AttentionGraph.from_dense(masks[0]) == build(masks[:1])
    assert AttentionGraph.from_dense(masks[0][0]) == build([masks[0][:1]])


MASK, META = torch.ones(2, 2, dtype=torch.bool), build(RAGGED).to("meta")
UNLIKE = build(draw_masks(0, [(3, 5), (7, 5)], heads=1, density=0.5))
REFUSED: list[tuple[Callable[[], Any], Any, str]] = [
    (lambda: unpad(torch.zeros(2, 3, 4), torch.ones(2, 3)), ValueError,
     "Expected 'mask' to be bool [2, 3], as 'x' is [B, L, ...] (got torch.float32 [2, 3])"),
    (lambda: unpad(torch.zeros(2, 3, 4), MASK), ValueError,
     "Expected 'mask' to be bool [2, 3], as 'x' is [B, L, ...] (got torch.bool [2, 2])"),
    (lambda: pad(torch.zeros(3, 1, device="meta"), torch.tensor([0, 3])), ValueError, "Expected 'x' to hold values"),
    *((lambda shape=shape: AttentionGraph.from_dense(torch.ones(shape)), ValueError,
       f"Expected 'mask' to be [N, M], [H, N, M] or [B, H, N, M] (got {[*shape]})")
      for shape in ((3,), (1, 1, 1, 1, 1), (0, 3), (3, 0), (0, 1, 2, 2))),
    (lambda: build(RAGGED).head(1.5), TypeError, "Expected 'head' to be an int (got float)"),  # type: ignore[arg-type]
    (lambda: build(RAGGED).head(True), TypeError, "Expected 'head' to be an int (got bool)"),
    (lambda: build(RAGGED).head(2**70), ValueError, "Expected 'head' in 0..1 (got 1180591620717411303424)"),
    (lambda: build(RAGGED).head(0).expand(-1), ValueError, "Expected 'heads' to be at least 1 (got -1)"),
    (lambda: build(RAGGED) | 1, TypeError, "unsupported operand"),  # type: ignore[operator]
    (lambda: AttentionGraph.concatenate([UNLIKE, build(RAGGED)]), ValueError, "graphs with the same heads (got [1, 2])"),
    (lambda: UNLIKE.to_data(), ValueError,
     "(got N = 10, M = 10 and sequences of other lengths). Use `to_hetero_data()`."),
    (lambda: build(RAGGED).to_networkx(0, 0, bipartite=False), ValueError,
     "Expected 'bipartite' to be True or None if queries and keys differ in number (got False, 2 and 3)"),
    *((call, ValueError, "Expected 'graph' to hold values (got a meta tensor)")
      for call in (lambda: META.head(0), lambda: META.sequence(0), lambda: META.to_dense(0))),
    *((lambda make=make, ones=ones: AttentionGraph.from_edge_index(make(ones)), ValueError,
       f"Expected 'edge_index' to be a sparse adjacency [N, M] (got {[*ones.shape]})")
      for make, ones in ((Tensor.to_sparse, torch.ones(3)), (Tensor.to_sparse, torch.ones(2, 3, 3)),
                         (Tensor.to_sparse_csr, torch.ones(2, 3, 3)))),
    *((lambda make=make: AttentionGraph.from_edge_index(make(torch.eye(4), (2, 2))), TypeError,
       f"Expected 'edge_index' to store single entries (got torch.sparse_{name}). Convert it with `to_sparse_csr`")
      for name, make in (("bsr", Tensor.to_sparse_bsr), ("bsc", Tensor.to_sparse_bsc))),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse (CSR|BS[RC]) tensor support is in beta:UserWarning")
@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_refusals(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    refuses(call, message, error)


# ------------------------------------------------------------------------------------------------ to other forms


@given(MASKS, DTYPES)
def test_to_scipy(masks: list[Tensor], dtype: torch.dtype) -> None:
    graph = build(masks, dtype)
    for head in range(graph.heads):
        matrix = graph.to_scipy(head)
        assert matrix.dtype == bool
        assert np.array_equal(matrix.toarray(), whole(masks)[head].numpy())
        for sequence, mask in enumerate(masks):
            assert np.array_equal(graph.to_scipy(head, sequence).toarray(), mask[head].numpy())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_changes_to_a_scipy_array_leave_the_graph_alone(dtype: torch.dtype) -> None:
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    graph = build([mask], dtype)
    array = graph.to_scipy()
    array.setdiag(False)
    array.eliminate_zeros()  # moves the keys of the rows within their array
    assert np.array_equal(array.toarray(), ~np.eye(3, dtype=bool))
    assert graph.validate() == build([mask])


@given(SQUARE_MASKS, DTYPES)
def test_data_round_trip(masks: list[Tensor], dtype: torch.dtype) -> None:
    graph = build(masks, dtype)
    data = graph.to_data()
    assert data.validate()
    assert data.num_nodes == graph.num_queries
    assert data.batch.tolist() == [sequence for sequence, mask in enumerate(masks) for _ in range(mask.size(1))]
    assert (
        AttentionGraph.from_edge_index(data.edge_index, edge_head=data.edge_type, heads=graph.heads, query_ptr=data.ptr)
        == graph
    )


def test_a_batch_of_data_is_the_concatenated_graph() -> None:
    graph = build(SQUARE)
    parts = [graph.sequence(sequence).to_data() for sequence in range(2)]
    batch = Batch.from_data_list(
        [Data(edge_index=part.edge_index, edge_type=part.edge_type, num_nodes=part.num_nodes) for part in parts]
    )
    assert (
        AttentionGraph.from_edge_index(batch.edge_index, edge_head=batch.edge_type, heads=2, query_ptr=batch.ptr)
        == graph
    )


def test_a_batch_of_hetero_data_with_other_edges_separates() -> None:
    edge, pair = ("a", "to", "b"), torch.tensor([[0, 1, 2], [0, 0, 1]])
    one = HeteroData({"a": {"x": torch.ones(3, 1)}, "b": {"x": torch.ones(2, 1)}})
    one[edge].edge_index, one[edge].edge_attr, one[edge].time = pair, torch.ones(3, 2), torch.ones(3)
    batch = Batch.from_data_list([one, one])
    AttentionGraph.from_data(batch).replace_edges(batch, edge)
    for part in batch.to_data_list():
        assert torch.equal(part[edge].edge_index, pair)
        assert {*part[edge].keys()} == {"edge_index"}


@given(MASKS)
def test_hetero_data_round_trip(masks: list[Tensor]) -> None:
    graph = build(masks)
    data = graph.to_hetero_data()
    assert data.validate()
    assert (data["query"].num_nodes, data["key"].num_nodes) == (graph.num_queries, graph.num_keys)
    for name, axis in (("query", 1), ("key", 2)):
        assert data[name].batch.tolist() == [
            sequence for sequence, mask in enumerate(masks) for _ in range(mask.size(axis))
        ]
    store = data["key", "to", "query"]
    again = AttentionGraph.from_edge_index(
        store.edge_index, edge_head=store.edge_head, heads=graph.heads, query_ptr=data["query"].ptr,
        key_ptr=data["key"].ptr,
    )  # fmt: skip
    assert again == graph


@given(SQUARE_MASKS)
def test_networkx_of_tokens(masks: list[Tensor]) -> None:
    graph = build(masks)
    for sequence, mask in enumerate(masks):
        for head in range(graph.heads):
            result = graph.to_networkx(sequence, head)
            assert type(result) is nx.DiGraph
            assert list(result) == list(range(mask.size(1)))
            assert np.array_equal(
                nx.to_numpy_array(result).T.astype(bool), mask[head].numpy()
            )  # networkx: rows are sources


@given(MASKS)
def test_networkx_bipartite(masks: list[Tensor]) -> None:
    graph = build(masks)
    for sequence, mask in enumerate(masks):
        for head in range(graph.heads):
            result = graph.to_networkx(sequence, head, bipartite=True)
            assert {node for node, side in result.nodes(data="bipartite") if side == 0} == {
                ("key", j) for j in range(mask.size(2))
            }
            assert {node for node, side in result.nodes(data="bipartite") if side == 1} == {
                ("query", i) for i in range(mask.size(1))
            }
            assert set(result.edges) == {(("key", j), ("query", i)) for i, j in mask[head].nonzero().tolist()}
            assert nx.is_bipartite(result)


@given(MASKS)
def test_networkx_of_all_heads(masks: list[Tensor]) -> None:
    graph = build(masks)
    for sequence, mask in enumerate(masks):
        result = graph.to_networkx(sequence, "all", bipartite=True)
        assert type(result) is nx.MultiDiGraph
        expected = {(("key", j), ("query", i), h) for h, i, j in mask.nonzero().tolist()}
        assert set(result.edges(keys=True)) == expected
        assert {(s, t, h) for s, t, h in result.edges(data="head")} == expected
        assert result.number_of_edges() == int(mask.sum())


def test_networkx_chooses_the_view() -> None:
    graph = build(RAGGED)
    assert list(graph.to_networkx(1, 0)) == [0, 1, 2, 3]
    assert ("key", 2) in graph.to_networkx(0, 0)
    assert set(graph.to_networkx(1, "all").edges(keys=True)) == {(j, i, h) for h, i, j in RAGGED[1].nonzero().tolist()}


def test_nobody_is_shown_the_first_of_several_unasked() -> None:
    several, one = build(RAGGED), build(RAGGED[1:2]).head(0)
    asks: list[Any] = [several.to_networkx, several.to_dense]
    for ask in asks:
        refuses(ask, "Expected 'sequence' in 0..2 (got None). Pass sequence=0")
    asks = [several.sequence(1).to_networkx, several.to_scipy]
    for ask in asks:
        refuses(ask, "Expected 'head' in 0..1 (got None). Pass head=0")
    assert one.to_networkx().number_of_edges() == one.to_scipy().nnz == one.to_dense().sum() == one.num_edges


@given(MASKS, SEEDS)
def test_find_knows_what_is_there(masks: list[Tensor], seed: int) -> None:
    graph = build(masks)
    order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(graph.find(graph.edge_index[:, order], graph.edge_head[order]), order)
    pairs = torch.cartesian_prod(*(torch.arange(-1, size + 1) for size in (graph.heads, *every_size(graph)[:2])))
    edges = {*zip(graph.edge_head.tolist(), *graph.edge_index.flip(0).tolist(), strict=True)}
    assert graph.contains(pairs[:, 1:].flip(1).mT, pairs[:, 0]).tolist() == [
        (*pair,) in edges for pair in pairs.tolist()
    ]
    every = AttentionGraph.from_dense(torch.ones(graph.heads, graph.num_queries, graph.num_keys))
    strange = every.select(~every.union(AttentionGraph(graph.rowptr, graph.col, *every_size(graph)))[1])
    for edge in range(0, strange.num_edges, 5):
        with pytest.raises(ValueError, match="Expected 'edge_index' to hold edges of the graph"):
            graph.find(strange.edge_index[:, edge : edge + 1], strange.edge_head[edge : edge + 1])
    for key, query, head in (
        (-1, 0, 0), (graph.num_keys, 0, 0), (0, graph.num_queries, 0), (0, 0, graph.heads), (0, -1, 0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"Expected 'edge_(index' to hold edges of the graph|head' in 0\.\.)"):
            graph.find(torch.tensor([[key], [query]]), torch.tensor([head]))
    refuses(lambda: graph.find(cast(Any, None)), "Expected 'edge_index' to be a tensor (got NoneType)", TypeError)


def every_size(graph: AttentionGraph) -> tuple[int, int, int]:
    return graph.num_queries, graph.num_keys, graph.heads


# ------------------------------------------------------------------------------------------------ and back


@given(SQUARE_MASKS)
def test_from_data_inverts_to_data(masks: list[Tensor]) -> None:
    graph = build(masks)
    data = graph.to_data()
    assert AttentionGraph.from_data(data, heads=graph.heads) == graph
    del data.ptr
    assert AttentionGraph.from_data(data, heads=graph.heads) == graph  # by `batch`
    del data.edge_type
    assert AttentionGraph.from_data(data).to_dense(0).shape[0] == 1


@given(MASKS)
def test_from_data_inverts_to_hetero_data(masks: list[Tensor]) -> None:
    graph = build(masks)
    data = graph.to_hetero_data()
    assert AttentionGraph.from_data(data, heads=graph.heads) == graph
    assert AttentionGraph.from_data(data, ("key", "to", "query"), heads=graph.heads) == graph


@pytest.mark.filterwarnings("ignore:Sparse")
def test_from_data_reads_batches_and_transposed_adjacencies() -> None:
    single = [
        Data(edge_index=torch.tensor([[0, 1], [1, 1]]), num_nodes=2),
        Data(edge_index=torch.tensor([[2], [0]]), num_nodes=3),
    ]
    batch = Batch.from_data_list(single)
    graph = AttentionGraph.from_data(batch)
    assert graph.query_ptr.tolist() == [0, 2, 5]
    assert graph.edge_index.tolist() == [[0, 1, 4], [1, 1, 2]]
    transposed = Data(adj_t=torch.eye(3).to_sparse_csr(), num_nodes=3)
    assert AttentionGraph.from_data(transposed) == AttentionGraph.from_dense(torch.eye(3))


@pytest.mark.parametrize(
    ("data", "edge_type", "error", "message"),
    [
        (torch.tensor([[0], [0]]), None, TypeError, "Expected 'data' to be Data or HeteroData (got Tensor)"),
        (Data(num_nodes=3), None, ValueError, "Expected 'data' to have edges (got neither 'edge_index' nor 'adj_t')"),
        (Data(num_nodes=3), ("a", "to", "b"), ValueError, "Expected no 'edge_type' with Data"),
        (HeteroData(), None, ValueError, "Expected 'edge_type' to be one of [] (got None)"),
        (Data(num_nodes=3, edge_index="a"), None, TypeError, "Expected 'edge_index' to be a tensor (got str)"),
    ],
)  # fmt: skip
def test_from_data_errors(data: Any, edge_type: Any, error: type[Exception], message: str) -> None:
    refuses(lambda: AttentionGraph.from_data(data, edge_type), message, error)


@given(MASKS)
def test_from_networkx_inverts_to_networkx(masks: list[Tensor]) -> None:
    graph = build(masks)
    for sequence in range(len(masks)):
        one = graph.sequence(sequence)
        for bipartite in (None, True):
            assert (
                AttentionGraph.from_networkx(graph.to_networkx(sequence, "all", bipartite=bipartite), heads=graph.heads)
                == one
            )
            for head in range(graph.heads):
                assert AttentionGraph.from_networkx(graph.to_networkx(sequence, head, bipartite=bipartite)) == one.head(
                    head
                )


def test_from_networkx_of_other_graphs() -> None:
    path = AttentionGraph.from_networkx(nx.path_graph(4))
    assert path.edge_index.tolist() == [[1, 0, 2, 1, 3, 2], [0, 1, 1, 2, 2, 3]]
    named = nx.DiGraph([("the", "cat"), ("cat", "sat")])
    assert AttentionGraph.from_networkx(named).edge_index.tolist() == [[0, 1], [1, 2]]
    shuffled = nx.DiGraph()
    shuffled.add_nodes_from([2, 0, 1])
    shuffled.add_edge(2, 0)
    assert AttentionGraph.from_networkx(shuffled).edge_index.tolist() == [[2], [0]]  # tokens keep their numbers
    counted = nx.DiGraph([(0, 1, {"head": np.int64(1)})])
    assert AttentionGraph.from_networkx(counted).edge_head.tolist() == [1]
    davis = nx.davis_southern_women_graph()
    graph = AttentionGraph.from_networkx(davis)
    keys, queries = nx.bipartite.sets(davis)
    assert {graph.num_keys, graph.num_queries} == {len(keys), len(queries)}
    assert graph.num_edges == davis.number_of_edges()


def _bipartite(*sides: Any) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from((node, {"bipartite": side}) for node, side in enumerate(sides))
    return graph


@pytest.mark.parametrize(
    ("graph", "error", "message"),
    [
        ([(0, 1)], TypeError, "Expected 'graph' to be a networkx graph (got list)"),
        (nx.DiGraph(), ValueError, "Expected 'graph' to have keys and queries (got 0 and 0)"),
        (nx.complete_bipartite_graph(2, 2).to_directed(), ValueError,
         "Expected each edge of 'graph' to run from a key to a query (got (2, 0)"),
        (nx.DiGraph([(0, 1, {"head": "a"})]), ValueError, "Expected the attribute 'head' of each edge of 'graph' to be an int (got 'a')"),
        (_bipartite([1], 0), ValueError, "Expected the attribute 'bipartite' of each node of 'graph' to be 0 or 1 (got [1])"),
    ],
)  # fmt: skip
def test_from_networkx_errors(graph: Any, error: type[Exception], message: str) -> None:
    for heads in (1, None):
        refuses(partial(AttentionGraph.from_networkx, graph, heads=heads), message, error)


def test_a_batch_or_a_union_is_causal_where_both_are() -> None:
    causal, other = patterns.full(3, is_causal=True), patterns.full(3)
    for both in ([causal, causal], [causal, other], [other, causal], [other, other]):
        wanted = all(graph is causal for graph in both)
        joined, united = AttentionGraph.concatenate(both), both[0] | both[1]
        assert joined.is_causal is united.is_causal is wanted
        for graph in (joined, united):
            graph.validate()
            assert bool(graph.later.any()) is not wanted


def test_pairs_are_numbered_below_two_to_63() -> None:
    assert check_sizes(2**31, 2**31, 1) == (2**31, 2**31, 1)
    refuses(lambda: check_sizes(2**31, 2**31, 2), "with a product below 2**63")
