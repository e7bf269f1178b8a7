"""Graphs in files, in other processes and in exported programs.

In: a graph. Out: pickled bytes or a node of :mod:`torch.export`, and the same graph again, checked. Importing this
module registers graphs with pickle, :func:`torch.load` and :mod:`torch.export`. Not here: models in folders
(``pretrained``).
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from .blocks import BlockGraph
from .graph import AttentionGraph, check_graph
from .ops.values import can_read

__all__: list[str] = []

# ------------------------------------------------------------------ pickle


def restore_graph(
    rowptr: Tensor,
    col: Tensor,
    num_queries: int,
    num_keys: int,
    heads: int,
    query_ptr: Tensor,
    key_ptr: Tensor,
    is_causal: bool,
) -> AttentionGraph:
    """Construct a graph from a pickle, with all checks, of copies that no other tensor of the file shares."""
    rowptr, col, *ptrs = _copies(rowptr, col, query_ptr, key_ptr)
    return AttentionGraph(rowptr, col, num_queries, num_keys, heads, *ptrs, is_causal=is_causal)


def restore_block_graph(
    blocks: AttentionGraph, block_size: int, query_ptr: Tensor, key_ptr: Tensor, num_queries: int, num_keys: int
) -> BlockGraph:
    """As :func:`restore_graph`; meta tensors have no values to check."""
    check_graph(blocks, "blocks")
    query_ptr, key_ptr = _copies(query_ptr, key_ptr)
    if blocks.device.type == "meta":
        return BlockGraph._trusted_blocks(blocks, block_size, query_ptr, key_ptr, num_queries, num_keys)
    return BlockGraph(blocks, block_size, query_ptr=query_ptr, key_ptr=key_ptr)


def _copies(*tensors: Tensor) -> list[Tensor]:
    """A copy of each tensor; one copy of a tensor that occurs twice."""
    copies = {id(x): x.clone() if isinstance(x, Tensor) else x for x in tensors}
    return [copies[id(x)] for x in tensors]


def _reduce_graph(graph: AttentionGraph) -> tuple[Any, ...]:
    sizes = (graph.num_queries, graph.num_keys, graph.heads)
    return restore_graph, (graph.rowptr, graph.col, *sizes, graph.query_ptr, graph.key_ptr, graph.is_causal)


def _reduce_block_graph(graph: BlockGraph) -> tuple[Any, ...]:
    sizes = (graph.num_queries, graph.num_keys)
    return restore_block_graph, (graph.blocks, graph.block_size, graph.query_ptr, graph.key_ptr, *sizes)


copyreg.pickle(AttentionGraph, _reduce_graph)
copyreg.pickle(BlockGraph, _reduce_block_graph)
# The functions, not the classes: `torch.load(weights_only=True)` then makes only graphs that were checked.
torch.serialization.add_safe_globals([restore_graph, restore_block_graph])


# ------------------------------------------------------------------ graphs in exported programs


def _offsets_and_sizes(graph: AttentionGraph) -> dict[str, Any]:
    """Offsets and sizes, of the queries alone if the keys are the same tokens."""
    found = {"query_ptr": graph.query_ptr, "num_queries": graph.num_queries}
    if graph.key_ptr is graph.query_ptr and graph.num_keys == graph.num_queries:
        return found
    return found | {"key_ptr": graph.key_ptr, "num_keys": graph.num_keys}


def _flatten_graph(graph: AttentionGraph) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The inputs of an exported program, and its constants."""
    return {"rowptr": graph.rowptr, "col": graph.col, **_offsets_and_sizes(graph)}, (graph.heads, graph.is_causal)


def _flatten_block_graph(graph: BlockGraph) -> tuple[dict[str, Any], tuple[Any, ...]]:
    return {"blocks": graph.blocks, **_offsets_and_sizes(graph)}, (graph.block_size,)


def _unflatten_graph(leaves: Iterable[Any], context: tuple[Any, ...]) -> AttentionGraph:
    (rowptr, col, *rest), (heads, is_causal) = leaves, context
    (query_ptr, num_queries), (key_ptr, num_keys) = rest[:2], rest[-2:]
    known = {"rowptr": rowptr, "col": col, "num_queries": num_queries, "num_keys": num_keys, "heads": heads}
    known |= {"query_ptr": query_ptr, "key_ptr": key_ptr, "is_causal": is_causal}
    if _have_values([rowptr, col, query_ptr, key_ptr], [num_queries, num_keys]):
        return AttentionGraph(**known)
    graph = object.__new__(AttentionGraph)
    for name, value in known.items():
        object.__setattr__(graph, name, value)
    return graph


def _unflatten_block_graph(leaves: Iterable[Any], context: tuple[Any, ...]) -> BlockGraph:
    (blocks, *rest), (block_size,) = leaves, context
    (query_ptr, num_queries), (key_ptr, num_keys) = rest[:2], rest[-2:]
    if _have_values([query_ptr, key_ptr], [num_queries, num_keys]):
        return BlockGraph(blocks, block_size, query_ptr=query_ptr, key_ptr=key_ptr)
    return BlockGraph._trusted_blocks(blocks, block_size, query_ptr, key_ptr, num_queries, num_keys)


def _have_values(tensors: Iterable[Any], sizes: Iterable[Any]) -> bool:
    """True if the leaves can be checked: a trace passes symbols, and functions over trees pass any object."""
    return all(isinstance(x, Tensor) and can_read(x) for x in tensors) and all(type(size) is int for size in sizes)


def _register(kind: type, flatten: Callable[[Any], tuple[dict[str, Any], tuple[Any, ...]]], unflatten: Any) -> None:
    """Register a class of graphs as a node of torch's trees."""

    def plain(graph: Any) -> tuple[list[Any], tuple[Any, ...]]:
        named, context = flatten(graph)
        return [*named.values()], context

    def with_keys(graph: Any) -> tuple[list[Any], tuple[Any, ...]]:
        named, context = flatten(graph)
        return [(GetAttrKey(name), leaf) for name, leaf in named.items()], context

    dumped: dict[str, Any] = {"to_dumpable_context": list, "from_dumpable_context": tuple}
    dumped |= {"serialized_type_name": f"sbm_pyg.{kind.__name__}", "flatten_with_keys_fn": with_keys}
    register_pytree_node(kind, plain, unflatten, **dumped)


_register(AttentionGraph, _flatten_graph, _unflatten_graph)
_register(BlockGraph, _flatten_block_graph, _unflatten_block_graph)
