"""Graphs in files, in other processes and in programs: they come back equal, and checked."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sbm_pyg import AttentionConv, AttentionGraph, BlockGraph
from sbm_pyg.graphs import exchange
from sbm_pyg.sources import patterns

PTR = torch.tensor([0, 4, 9])
BLOCKS = AttentionGraph.from_dense(torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]]))
GRAPHS = {
    "heads": patterns.random(9, 2, heads=2, seed=1), "causal sequences": patterns.window(None, 1, ptr=PTR, is_causal=True),
    "cross": AttentionGraph.from_dense(torch.ones(3, 4)), "blocks": BlockGraph(BLOCKS, 4, query_ptr=torch.tensor([0, 10])),
    "causal blocks": BlockGraph(BLOCKS.causal(), 4),
}  # fmt: skip


def saved(thing: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return file


def equal(found: AttentionGraph, graph: AttentionGraph) -> bool:
    one_side = [each.key_ptr is each.query_ptr for each in (found, graph)]
    kinds = [(type(each), each.block_size, each.is_causal) for each in (found, graph)]
    return found == graph and kinds[0] == kinds[1] and one_side[0] == one_side[1]


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_loaded_as_weights_are(name: str) -> None:
    graph = GRAPHS[name]
    found = torch.load(saved({"graph": graph, "again": [graph]}), weights_only=True)
    assert equal(found["graph"], graph)
    assert found["again"][0] is found["graph"]
    for copied in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph), copy.copy(graph)):
        assert equal(copied, graph)
    assert copy.deepcopy(graph.to("meta")).device.type == "meta"


class Forged:
    """What a file says is a graph."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


FORGED = {
    "a key that is no token": ("AttentionGraph", (PTR, torch.arange(9) + 1, PTR[[0, 1]] // 2, 2, PTR[[0, 2]], 9), (1, False)),
    "rows out of order": ("AttentionGraph", (PTR.flip(0), torch.arange(9), None, 2, None, 9), (1, False)),
    "other sizes": ("AttentionGraph", (PTR, torch.arange(9), None, 3, None, 9), (1, False)),
    "no size": ("AttentionGraph", (PTR, torch.arange(9), None, None, None, 9), (1, False)),
    "no tensors": ("AttentionGraph", ([0, 1], [0], None, 1), (1, False)),
    "no graph of blocks": ("BlockGraph", (torch.ones(2), None, 2), (4,)),
    "other tokens": ("BlockGraph", (BLOCKS, torch.tensor([0, 99]), 99), (4,)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_file_makes_no_graph_that_cannot_be(name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^Expected '"):
        torch.load(saved(Forged(exchange.restore, FORGED[name])), weights_only=True)


def test_a_file_reaches_no_class_and_no_tensor_of_a_graph() -> None:
    with pytest.raises(pickle.UnpicklingError, match="AttentionGraph"):  # which could be made without its constructor
        torch.load(saved(Forged(AttentionGraph, (PTR, torch.arange(9), 2, 9))), weights_only=True)
    graph = GRAPHS["heads"]
    found = torch.load(saved([graph.col, graph]), weights_only=True)
    found[0].fill_(99)
    assert found[1] == graph


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_trees(name: str) -> None:
    graph = GRAPHS[name]
    parts, spec = pytree.tree_flatten({"graph": graph})
    assert equal(pytree.tree_unflatten(parts, spec)["graph"], graph)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    assert {type(part) for part in parts} == {Tensor, int}
    assert type(pytree.tree_map(lambda _: None, graph)) is type(graph)  # as torch does with dimensions and symbols
    with pytest.raises(ValueError, match="Expected '"):
        pytree.tree_map_only(Tensor, lambda x: x + 1, graph)


@pytest.mark.slow
def test_a_graph_may_be_an_input_of_a_program() -> None:
    torch.manual_seed(0)
    conv = AttentionConv(16, 8, heads=2).eval()
    any_size = torch.export.Dim.AUTO
    graph, more = (
        {"rowptr": {0: any_size}, "col": {0: any_size}, "query_ptr": {0: any_size}, "num_queries": any_size},
        patterns.window(None, 2, ptr=torch.tensor([0, 4, 9, 14])),
    )
    shapes = {"x": {0: any_size}, "edge_index": [*graph.values()]}
    with torch.no_grad():
        program = torch.export.export(
            conv, (torch.randn(9, 16), patterns.window(None, 1, ptr=PTR)), dynamic_shapes=shapes
        )
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        x = torch.randn(14, 16)
        torch.testing.assert_close(torch.export.load(file).module()(x, more), conv(x, more))
        over_blocks = (torch.randn(10, 16), GRAPHS["blocks"])
        program = torch.export.export(conv, over_blocks)
        torch.testing.assert_close(program.module()(*over_blocks), conv(*over_blocks))
