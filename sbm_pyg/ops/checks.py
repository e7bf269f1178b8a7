"""What the ops refuse before a kernel touches memory: shapes, types and names that do not fit together, and forward-mode derivatives.

In: the arguments of an op. Out: nothing, or an error. No value of a tensor is looked at, so that a check costs microseconds: that keys lie in range is
for :meth:`sbm_pyg.AttentionGraph.validate` to say. Nothing is checked in code that is being compiled, where numbers of edges are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.autograd import forward_ad

INTEGERS = (torch.int32, torch.int64)
CGROUP = Path("/sys/fs/cgroup")


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


def memory(name: str, count: int, bytes_each: int, device: torch.device, way_out: str, noun: str = "edges") -> None:
    """Refuse what cannot fit, by arithmetic, before anything is allocated. Below 64 MiB nothing is asked.

    Args:
        name: The argument to blame.
        count: How many edges, rows or pairs there will be.
        bytes_each: What each of them takes at the least.
        device: Where they will lie.
        way_out: What to do instead.
        noun: What is counted.

    Raises:
        ValueError: They take more than is free.
    """
    if torch.compiler.is_compiling() or not isinstance(count, int) or count * bytes_each <= 2**26 or detect_fake_mode():
        return
    free = free_memory(device)
    if free is not None and count * bytes_each > free:
        wanted, there = count * bytes_each / 2**30, free / 2**30
        raise ValueError(
            f"Expected '{name}' to make what memory can hold (got {count:,} {noun} of {bytes_each} bytes, {wanted:,.1f} GiB, where {there:,.1f} GiB are free). {way_out}"
        )


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device, within the limits of a container; None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:
        meminfo = Path("/proc/meminfo").read_text()
        free = int(meminfo.split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, LookupError, ValueError):
        return None
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        with suppress(OSError, ValueError):  # no such limit
            free = min(free, int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text()))
    return free
