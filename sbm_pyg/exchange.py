"""How graphs go to files, to other processes and into programs of :mod:`torch.export`, and come back checked.

In: a graph. Out: its tensors and sizes, as pickle and torch's trees take them, and the graph made of them again. Not
here: models (``pretrained``) and other libraries' graphs (``graph``). Importing this module registers all of it.
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

# ------------------------------------------------------------------ files and processes


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
    """The graph of these parts, checked. It has copies of them: nothing else in a file can write into it later."""
    rowptr, col, *ptrs = _copies(rowptr, col, query_ptr, key_ptr)
    return AttentionGraph(rowptr, col, num_queries, num_keys, heads, *ptrs, is_causal=is_causal)


def restore_blocks(
    blocks: AttentionGraph, grain: int, query_ptr: Tensor, key_ptr: Tensor, num_queries: int, num_keys: int
) -> BlockGraph:
    """As :func:`restore_graph`. Without values there is nothing to check, and nothing to compute."""
    check_graph(blocks, "blocks")
    query_ptr, key_ptr = _copies(query_ptr, key_ptr)
    if blocks.device.type == "meta":
        return BlockGraph._trusted_blocks(blocks, grain, query_ptr, key_ptr, num_queries, num_keys)
    return BlockGraph(blocks, grain, query_ptr=query_ptr, key_ptr=key_ptr)


def _copies(*tensors: Tensor) -> list[Tensor]:
    """A copy of each tensor; one copy of what is there twice. The graph refuses what is no tensor."""
    copies = {id(x): x.clone() if isinstance(x, Tensor) else x for x in tensors}
    return [copies[id(x)] for x in tensors]


def _graph_parts(graph: AttentionGraph) -> tuple[Any, ...]:
    sizes = (graph.num_queries, graph.num_keys, graph.heads)
    return restore_graph, (graph.rowptr, graph.col, *sizes, graph.query_ptr, graph.key_ptr, graph.is_causal)


def _block_parts(graph: BlockGraph) -> tuple[Any, ...]:
    sizes = (graph.num_queries, graph.num_keys)
    return restore_blocks, (graph.blocks, graph.grain, graph.query_ptr, graph.key_ptr, *sizes)


copyreg.pickle(AttentionGraph, _graph_parts)
copyreg.pickle(BlockGraph, _block_parts)
# The two functions, not the classes: `torch.load(weights_only=True)` may make graphs only where they are checked.
torch.serialization.add_safe_globals([restore_graph, restore_blocks])


# ------------------------------------------------------------------ programs


def _sides(graph: AttentionGraph) -> dict[str, Any]:
    """Offsets and sizes, of the queries alone where the keys are the same tokens."""
    sides = {"query_ptr": graph.query_ptr, "num_queries": graph.num_queries}
    if graph.key_ptr is graph.query_ptr and graph.num_keys == graph.num_queries:
        return sides
    return sides | {"key_ptr": graph.key_ptr, "num_keys": graph.num_keys}


def _graph_tree(graph: AttentionGraph) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """What a program is given anew in each call, and what it takes for granted."""
    return {"rowptr": graph.rowptr, "col": graph.col, **_sides(graph)}, (graph.heads, graph.is_causal)


def _block_tree(graph: BlockGraph) -> tuple[dict[str, Any], tuple[Any, ...]]:
    return {"blocks": graph.blocks, **_sides(graph)}, (graph.grain,)


def _graph_of(parts: Iterable[Any], context: tuple[Any, ...]) -> AttentionGraph:
    (rowptr, col, *sides), (heads, is_causal) = parts, context
    (query_ptr, num_queries), (key_ptr, num_keys) = sides[:2], sides[-2:]
    known = {"rowptr": rowptr, "col": col, "num_queries": num_queries, "num_keys": num_keys, "heads": heads}
    known |= {"query_ptr": query_ptr, "key_ptr": key_ptr, "is_causal": is_causal}
    if _are_values([rowptr, col, query_ptr, key_ptr], [num_queries, num_keys]):
        return AttentionGraph(**known)
    graph = object.__new__(AttentionGraph)
    for name, value in known.items():
        object.__setattr__(graph, name, value)
    return graph


def _blocks_of(parts: Iterable[Any], context: tuple[Any, ...]) -> BlockGraph:
    (blocks, *sides), (grain,) = parts, context
    (query_ptr, num_queries), (key_ptr, num_keys) = sides[:2], sides[-2:]
    if _are_values([query_ptr, key_ptr], [num_queries, num_keys]):
        return BlockGraph(blocks, grain, query_ptr=query_ptr, key_ptr=key_ptr)
    return BlockGraph._trusted_blocks(blocks, grain, query_ptr, key_ptr, num_queries, num_keys)


def _are_values(tensors: Iterable[Any], sizes: Iterable[Any]) -> bool:
    """Whether these can be checked: a trace has symbols in their place, and functions over trees what they please."""
    return all(isinstance(x, Tensor) and can_read(x) for x in tensors) and all(type(size) is int for size in sizes)


def _register(kind: type, parts: Callable[[Any], tuple[dict[str, Any], tuple[Any, ...]]], make: Any) -> None:
    """Let torch take graphs of a class apart and put them together."""

    def flatten(graph: Any) -> tuple[list[Any], tuple[Any, ...]]:
        named, context = parts(graph)
        return [*named.values()], context

    def flatten_with_keys(graph: Any) -> tuple[list[Any], tuple[Any, ...]]:
        named, context = parts(graph)
        return [(GetAttrKey(name), part) for name, part in named.items()], context

    register_pytree_node(
        kind,
        flatten,
        make,
        serialized_type_name=f"sbm_pyg.{kind.__name__}",
        to_dumpable_context=list,
        from_dumpable_context=tuple,
        flatten_with_keys_fn=flatten_with_keys,
    )


_register(AttentionGraph, _graph_tree, _graph_of)
_register(BlockGraph, _block_tree, _blocks_of)
