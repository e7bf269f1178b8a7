"""What the ops refuse before a kernel touches memory: shapes, types and names that do not fit together, and forward-mode derivatives.

In: the arguments of an op. Out: nothing, or an error. No value of a tensor is looked at, so that a check costs microseconds: that keys lie in range is
for :meth:`sbm_pyg.AttentionGraph.validate` to say. Nothing is checked in code that is being compiled, where numbers of edges are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

INTEGERS = (torch.int32, torch.int64)


def shape(name: str, x: Any, wanted: Sequence[int | None], symbols: str, way_out: str) -> None:
    """Refuse what is no tensor of a shape, in which None is any number; None itself passes, for arguments that may be absent."""
    if x is None or torch.compiler.is_compiling():
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"Expected '{name}' to be a tensor {symbols} (got {type(x).__name__}). {way_out}")
    if x.dim() != len(wanted) or any(size is not None and size != mine for size, mine in zip(wanted, x.shape, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in wanted)
        raise ValueError(f"Expected '{name}' to be {symbols} = [{sizes}] (got {list(x.shape)}). {way_out}")


def edges(
    rowptr: Tensor, col: Tensor, query: Tensor, *, key: Tensor, value: Tensor | None = None, prefix: str = "", **per_edge: Tensor | None
) -> None:
    """Refuse rows, tokens and numbers per edge that are not of one graph; ``prefix`` names a second graph over the same tokens."""
    if torch.compiler.is_compiling():
        return
    shape("query", query, (None, None, None), "[H, N, C]", "Heads come first.")
    heads, num_queries, channels = query.shape
    shape("key", key, (heads, None, channels), "[H, M, C]", "It has the heads and channels of 'query'.")
    shape("value", value, (heads, key.size(1), None), "[H, M, C']", "It has the heads and tokens of 'key'.")
    shape(f"{prefix}rowptr", rowptr, (heads * num_queries + 1,), "[H*N+1]", "It holds one row per head and query, heads outermost.")
    shape(f"{prefix}col", col, (None,), "[E]", "It holds the key of each edge.")
    if rowptr.dtype != torch.int64 or col.dtype not in INTEGERS:
        raise TypeError(
            f"Expected '{prefix}rowptr' to be int64 and '{prefix}col' int32 or int64 (got {rowptr.dtype} and {col.dtype}). Convert them."
        )
    for name, numbers in per_edge.items():
        shape(name, numbers, (col.size(0),), "[E]", "It holds one number per edge.")
    same_device("query", query, **{"key": key, "value": value, f"{prefix}rowptr": rowptr, f"{prefix}col": col}, **per_edge)
    no_tangent(query, key, value, *per_edge.values())


def same_device(first: str, like: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors that are elsewhere than the first; None passes."""
    for name, x in others.items():
        if x is not None and x.device != like.device:
            raise ValueError(
                f"Expected '{name}' on {like.device}, as '{first}' is (got {x.device}). Move it, or the graph, with `.to(device)`."
            )


def one_of(name: str, choice: str, options: Sequence[str]) -> None:
    """Refuse a name that is none of several."""
    if choice not in options:
        raise ValueError(f"Expected '{name}' to be one of {[*options]} (got {choice!r}).")


def no_tangent(*tensors: Tensor | None) -> None:
    """Refuse forward-mode differentiation, which custom ops of torch do not have: it would find derivatives of zero.

    Raises:
        NotImplementedError: A tensor carries a tangent.
    """
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level >= 0 and any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "Expected reverse-mode differentiation (got a tangent, from torch.func.jvp, jacfwd, hessian or forward_ad). Use `backward` or `torch.autograd.grad`."
        )
