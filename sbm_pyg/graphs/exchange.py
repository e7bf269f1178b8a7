"""Graphs in files, in other processes and in exported programs.

In: a graph. Out: pickled bytes or a node of :mod:`torch.export`, and the same graph again, checked. Importing this
module registers graphs with pickle, :func:`torch.load` and :mod:`torch.export`. Not here: models in folders
(``pretrained``).
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from ..ops.values import can_read
from .blocks import BlockGraph
from .graph import AttentionGraph

__all__: list[str] = []

KINDS: dict[type[AttentionGraph], tuple[tuple[str, ...], tuple[str, ...]]] = {
    AttentionGraph: (("rowptr", "col"), ("heads", "is_causal")),
    BlockGraph: (("blocks",), ("block_size",)),
}
"""The inputs of a program that make a graph with its offsets and sizes, and its constants."""
SIDES = ("query_ptr", "num_queries", "key_ptr", "num_keys")


def restore(name: str, inputs: Iterable[Any], constants: Iterable[Any]) -> AttentionGraph:
    """Construct a graph from a pickle, with all checks, from copies of its tensors that share no memory."""
    kind = {kind.__name__: kind for kind in KINDS}[name]
    copies = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    blocks = copies[0]
    has_values = kind is AttentionGraph or not isinstance(blocks, AttentionGraph) or blocks.device.type != "meta"
    return _make(kind, copies, constants, is_checked=has_values)


def _make(
    kind: type[AttentionGraph], inputs: Iterable[Any], constants: Iterable[Any], is_checked: bool
) -> AttentionGraph:
    """The inverse of :func:`_inputs` and :func:`_constants`."""
    names, names_of_constants = KINDS[kind]
    values = [*inputs]
    sides = values[len(names) :]
    fields = dict(zip(names + names_of_constants, [*values[: len(names)], *constants], strict=True))
    fields |= dict(zip(SIDES, (*sides[:2], *sides[-2:]), strict=True))
    if kind is BlockGraph and is_checked:
        return BlockGraph(**{name: value for name, value in fields.items() if not name.startswith("num")})
    if kind is BlockGraph:
        return BlockGraph._trusted_blocks(
            *(fields[name] for name in ("blocks", "block_size", *SIDES[::2], *SIDES[1::2]))
        )
    if is_checked:
        return AttentionGraph(**fields)
    graph = object.__new__(AttentionGraph)
    for name, value in fields.items():
        object.__setattr__(graph, name, value)
    return graph


def _inputs(graph: AttentionGraph) -> dict[str, Any]:
    """Tensors and sizes for an exported program; key offsets and size are left out if queries are the keys."""
    is_one_side = graph.key_ptr is graph.query_ptr and graph.num_keys == graph.num_queries
    return {name: getattr(graph, name) for name in (*KINDS[type(graph)][0], *SIDES[: 2 if is_one_side else 4])}


def _constants(graph: AttentionGraph) -> tuple[Any, ...]:
    return tuple(getattr(graph, name) for name in KINDS[type(graph)][1])


def _unflatten(inputs: Iterable[Any], constants: tuple[Any, ...], kind: type[AttentionGraph]) -> AttentionGraph:
    """Make a graph from inputs, which are checked if they hold values: a trace may pass symbols or other objects."""
    values = [*inputs]

    def has_value(name: str, x: Any) -> bool:
        if name.startswith("num"):
            return type(x) is int
        return isinstance(x, AttentionGraph) or (isinstance(x, Tensor) and can_read(x))

    is_checked = all(map(has_value, (*KINDS[kind][0], *SIDES), values))
    return _make(kind, values, constants, is_checked)


for _graph_type in KINDS:
    copyreg.pickle(
        _graph_type, lambda graph: (restore, (type(graph).__name__, [*_inputs(graph).values()], _constants(graph)))
    )
    register_pytree_node(
        _graph_type,
        lambda graph: ([*_inputs(graph).values()], _constants(graph)),
        partial(_unflatten, kind=_graph_type),
        serialized_type_name=f"sbm_pyg.{_graph_type.__name__}",
        to_dumpable_context=list,
        from_dumpable_context=tuple,
        flatten_with_keys_fn=lambda graph: (
            [(GetAttrKey(name), value) for name, value in _inputs(graph).items()],
            _constants(graph),
        ),
    )
# The function, not the classes: `torch.load(weights_only=True)` then makes only graphs that were checked.
torch.serialization.add_safe_globals([restore])
