"""Checks of arguments: shapes, types, numbers, names, and sizes that memory can hold.

In: the arguments of an op, or of its caller. Out: nothing, or an error. Of the values of tensors only the first and the
last offset are read, so each check costs microseconds; :class:`sbm_pyg.AttentionGraph` checks the range of keys.
Nothing is checked in compiled code, where numbers of edges are unknown.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from numbers import Integral, Real
from operator import index
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from . import values
from .tiles import cut_blocks

INTEGERS = (torch.int32, torch.int64)
INT64 = 2**63 - 1
MIN_CHECKED_BYTES = 2**26
"""Requests of fewer bytes are not compared with the available memory."""


def require(
    condition: Any, name: str, what: str, got: Any, way_out: str, error: type[Exception] = ValueError
) -> None:  # fmt: skip
    """Raise ``Expected '<name>' <what> (got <got>). <way_out>`` unless a condition holds.

    Args:
        condition: What must hold.
        name: Name of the argument.
        what: What is expected of it, as ``"to be [E]"``.
        got: What came instead; a shape, a type or a number, but no tensor, whose values a device may hold.
        way_out: What to do about it.
        error: Class of the error.
    """
    if not condition:
        refuse(name, what, got, way_out, error)


def refuse(name: str, what: str, got: Any, way_out: str, error: type[Exception] = ValueError) -> NoReturn:
    """Raise the error of :func:`require`, for a condition that the caller has tested, as checks of each call do."""
    got = list(got) if isinstance(got, torch.Size) else got
    raise error(f"Expected '{name}' {what} (got {got}). {way_out}")


# ------------------------------------------------------------------ tensors


def tensors(**arguments: Any) -> None:
    """Raise TypeError unless every argument is a dense tensor."""
    if torch.compiler.is_compiling():
        return
    for name, x in arguments.items():
        dense(name, x)


def kind(name: str, x: Any, kinds: Any, what: str, way_out: str) -> None:
    """Raise TypeError for anything that is not of a class, or of one of several, as :func:`isinstance` takes them."""
    if not isinstance(x, kinds):
        refuse(name, f"to be {what}", type(x).__name__, way_out, TypeError)


def dense(name: str, x: Any) -> None:
    """Refuse anything that is not a tensor, and sparse and nested tensors."""
    if isinstance(x, Tensor) and not x.is_nested and x.layout == torch.strided:
        return
    kind(name, x, Tensor, "a tensor", "Convert it with `torch.as_tensor`.")
    layout = "a nested tensor" if x.is_nested else x.layout
    refuse(name, "to be dense", layout, "Convert it with `to_dense`.", TypeError)


def floating(**arguments: Tensor | None) -> None:
    """Refuse integers, bools and complex numbers, which a kernel would cut; None passes."""
    for name, x in arguments.items():
        if x is not None and not x.is_floating_point():
            raise TypeError(f"Expected '{name}' to be a floating tensor (got {x.dtype}). Convert it with `.float()`.")


def shape(name: str, x: Any, sizes: Sequence[int | None], symbols: str, way_out: str) -> None:
    """Refuse anything that is not a tensor of this shape, in which None is any number.

    None itself passes, for arguments that may be absent.
    """
    if x is None or torch.compiler.is_compiling():
        return
    kind(name, x, Tensor, f"a tensor {symbols}", way_out)
    dense(name, x)
    if x.dim() != len(sizes) or any(size not in (None, length) for size, length in zip(sizes, x.shape, strict=True)):
        text = ", ".join("any" if size is None else str(size) for size in sizes)
        raise ValueError(f"Expected '{name}' to be {symbols} = [{text}] (got {list(x.shape)}). {way_out}")


def check_query_key(module: torch.nn.Module, query: Any, key: Any, heads: int, channels: int) -> None:
    """Raise an error unless queries ``[H, N, C]`` and keys ``[H, M, C]`` have these heads and channels."""
    owner, like = type(module).__name__, next(module.parameters())
    sizes = (heads, channels)
    if _fit(query, key, key) and query.shape[::2] == sizes and (query.dtype, query.device) == (like.dtype, like.device):
        return
    tensors(query=query, key=key)
    floating(query=query, key=key)
    for name, x, symbols in (("query", query, "[H, N, C]"), ("key", key, "[H, M, C]")):
        shape(name, x, (heads, None, channels), symbols, f"It has the heads and channels of the {owner}.")
        what = f"on {like.device}, as the {owner} is"
        require(x.device == like.device, name, what, x.device, "Move one of them with `.to`.")
        fits = x.dtype == like.dtype or torch.is_autocast_enabled(x.device.type)
        require(fits, name, f"to be {like.dtype}, as the {owner} is", x.dtype, "Convert one of them.", TypeError)


def forced(forced: Tensor | None, col: Tensor) -> None:
    """Raise an error unless ``forced`` is None or a bool mask ``[E]`` of the edges."""
    if forced is None:
        return
    shape("forced", forced, (col.size(0),), "[E]", "It holds one bool per edge.")
    same_device("col", col, forced=forced)
    way_out = "It marks edges that do not depend on p."
    require(forced.dtype == torch.bool, "forced", "to be bool", forced.dtype, way_out, TypeError)


def check_tuple(name: str, x: Any, parts: str, count: int) -> None:
    """Refuse anything that is not a tuple of ``count`` parts."""
    is_tuple, got = isinstance(x, tuple) and len(x) == count, type(x).__name__
    require(is_tuple, name, f"to be a tuple of {parts}", got, "See the docstring.", TypeError)


def attention_tokens(query: Tensor, key: Tensor, value: Tensor | None = None) -> None:
    """Raise an error unless queries, keys and values have fitting shapes, one floating dtype and one device."""
    if torch.compiler.is_compiling() or (value is not None and _fit(query, key, value)):
        return
    tensors(query=query, key=key)
    floating(query=query, key=key, value=value)
    if value is not None and not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            "Expected 'query', 'key' and 'value' to be of one dtype "
            f"(got {query.dtype}, {key.dtype} and {value.dtype}). Convert them to one."
        )
    shape("query", query, (None, None, None), "[H, N, C]", "Heads come first.")
    shape("key", key, (query.size(0), None, query.size(2)), "[H, M, C]", "It has heads and channels of 'query'.")
    shape("value", value, (query.size(0), key.size(1), None), "[H, M, C']", "It has heads and tokens of 'key'.")
    same_device("query", query, key=key, value=value)


def _fit(query: Any, key: Any, value: Any) -> bool:
    """True if the tokens fit together: a fast check, before slower ones find a faulty argument."""
    parts = (query, key, value)
    return (
        all(isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and x.dim() == 3 for x in parts)
        and query.is_floating_point()
        and query.dtype == key.dtype == value.dtype
        and query.device == key.device == value.device
        and query.shape[::2] == key.shape[::2]
        and key.shape[:2] == value.shape[:2]
    )


def per_edge(like: Tensor, symbols: str, **numbers: Tensor | None) -> None:
    """Refuse numbers that are not floating, one for each edge of a graph whose keys are ``like``; None passes."""
    for name, x in numbers.items():
        if x is not None:
            shape(name, x, like.shape, symbols, "It holds one number for each edge.")
            floating(**{name: x})
            same_device("graph", like, **{name: x})


def spans(name: str, ptr: Tensor, total: int, things: str) -> None:
    """Raise an error unless offsets run from 0 to ``total``, if reading them does not wait for a device."""
    if values.can_read_without_sync(ptr):
        ends = [int(ptr[0]), int(ptr[-1])] if ptr.numel() else [0]
        if ends != [0, total]:
            got, what = " to ".join(map(str, ends)) if ptr.numel() else "[0]", f"to run from 0 to {total}"
            raise ValueError(f"Expected '{name}' {what}, the number of {things} (got {got}). It holds their offsets.")


def edge_rows(
    rowptr: Tensor, col: Tensor, query: Tensor, *, key: Tensor, value: Tensor | None = None, **per_edge: Tensor | None
) -> None:
    """Raise an error unless rows, tokens and numbers per edge fit each other."""
    if torch.compiler.is_compiling():
        return
    attention_tokens(query, key, value)
    _check_rows(rowptr, col, ("[H*N+1]", query.size(0) * query.size(1) + 1), query, ("[E]", ()), per_edge)


def _check_rows(
    rowptr: Tensor, col: Tensor, rows: tuple[str, int | None], query: Tensor, numbers: tuple[str, tuple[int, ...]],
    per_edge: Mapping[str, Tensor | None],
) -> None:  # fmt: skip
    """Raise an error unless compressed rows, and the numbers per edge, fit each other.

    Args:
        rows: Shape of the offsets, and their number, None where it is not known.
        query: A tensor on whose device all others must be.
        numbers: Symbols of the shape of numbers of an edge, and its sizes behind the first.
        per_edge: Numbers of each edge, by their names.
    """
    tensors(rowptr=rowptr, col=col)
    block = "" if numbers[1] == () else " block"
    shape("rowptr", rowptr, rows[1:], rows[0], f"It holds one row per head and query{block}, heads outermost.")
    shape("col", col, (None,), "[E]", f"It holds the key{block} of each edge.")
    if rowptr.dtype != torch.int64 or col.dtype not in INTEGERS:
        raise TypeError(
            "Expected 'rowptr' to be int64 and 'col' int32 or int64 "
            f"(got {rowptr.dtype} and {col.dtype}). Convert them."
        )
    for name, x in per_edge.items():
        shape(name, x, (col.size(0), *numbers[1]), numbers[0], "It holds the numbers of each edge in 'rows'.")
    floating(**per_edge)
    same_device("query", query, rowptr=rowptr, col=col, **per_edge)
    spans("rowptr", rowptr, col.size(0), "edges in 'col'")


def block_rows(
    rows: tuple[Tensor, Tensor, Tensor | None], query: Tensor, key: Tensor, value: Tensor, ptrs: tuple[Tensor, Tensor],
    block_size: int,
) -> int:  # fmt: skip
    """Raise an error unless rows over blocks, tokens, offsets and numbers per pair of tokens fit each other.

    Returns:
        The block size.
    """
    check_tuple("ptrs", ptrs, "offsets of queries and of keys", 2)
    if torch.compiler.is_compiling():
        return block_size
    attention_tokens(query, key, value)
    ends = dict(zip(("ptrs[0]", "ptrs[1]"), ptrs, strict=True))
    tensors(**ends)
    same_device("query", query, **ends)
    block_size = integer("block_size", block_size, 1, "It is a number of tokens.")
    memory("block_size", block_size, 8 * (query.size(2) + 64), query.device, "Take smaller blocks.", "rows")
    for (name, ptr), tokens in zip(ends.items(), (query, key), strict=True):
        shape(name, ptr, (None,), "[B+1]", "It holds the offsets of the sequences.")
        is_valid, got = ptr.dtype == torch.int64 and ptr.shape == ptrs[0].shape, f"{list(ptr.shape)} {ptr.dtype}"
        what, way_out = "to be [B+1] int64, as long on both sides", "It holds the offsets of the sequences."
        require(is_valid and ptr.numel() >= 1, name, what, got, way_out)
        spans(name, ptr, tokens.size(1), "tokens")
    count = None
    if values.can_read_without_sync(*ptrs):  # the cut is cached for attention
        cut, _ = cut_blocks((query.size(1), key.size(1)), ptrs, block_size)
        count = query.size(0) * cut.count + 1
    numbers = ("[E, block_size, block_size]", (block_size, block_size))
    _check_rows(rows[0], rows[1], ("[H*n+1]", count), query, numbers, {"bias": rows[2]})
    return block_size


def same_device(first: str, like: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors on another device than the first; None passes."""
    for name, x in others.items():
        if x is not None and x.device != like.device:
            raise ValueError(
                f"Expected '{name}' on {like.device}, as '{first}' is (got {x.device}). "
                "Move it, or the graph, with `.to(device)`."
            )


def widest(device: torch.device) -> torch.dtype:
    """The widest floating dtype of a device: float64, or float32 on Apple's GPUs."""
    if device.type not in ("cpu", "cuda", "meta"):
        try:
            torch.empty(0, dtype=torch.float64, device=device)
        except TypeError:
            return torch.float32
    return torch.float64


def not_captured(where: torch.device) -> None:
    """Refuse to sample while a CUDA graph is captured, which takes no memory of a size that values decide."""
    if not values.is_capturing(where):
        return
    raise RuntimeError(
        "Expected no sampling while a CUDA graph is captured (got one: the number of edges is known only once they are "
        "drawn). Sample before the capture, with `return_choice=True`, and capture the step over the graph that is "
        "given."
    )


# ------------------------------------------------------------------ numbers and names


def integer(name: str, value: Any, least: int, way_out: str) -> int:
    """Return an int of Python or numpy; refuse anything else, bools too, and what is too small.

    It is cut at what int64 holds, which no number of things reaches. In compiled code a symbol is returned as it is.
    """
    if torch.compiler.is_compiling():
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        refuse(name, "to be an int", type(value).__name__, way_out, TypeError)
    if value < least:
        refuse(name, f"to be at least {least}", value, way_out)
    return min(int(value), INT64)


def number(name: str, value: Any, span: str, way_out: str) -> None:
    """Refuse anything that is not a real number in an interval such as ``"[0, 1)"``; NaN is in no interval."""
    if torch.compiler.is_compiling():
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"Expected '{name}' to be a number in {span} (got {type(value).__name__}). {way_out}")
    if isinstance(value, int) and abs(value) >= 2**63:  # which no tensor holds
        raise ValueError(f"Expected '{name}' in {span}, below 2**63 if whole (got more). {way_out}")
    low, high = _bounds(span)
    x: Any = value  # mypy knows no order of numbers.Real
    if not low <= x <= high or (x == low and span[0] == "(") or (x == high and span[-1] == ")"):
        raise ValueError(f"Expected '{name}' in {span} (got {value}). {way_out}")


def scalar(name: str, value: Any, way_out: str) -> float:
    """Return a number as a float, also from a tensor with one element; raise TypeError for anything else."""
    if isinstance(value, Tensor):
        dense(name, value)
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            where = " on meta" if value.is_meta else ""
            raise ValueError(
                f"Expected '{name}' to be one real number (got {list(value.shape)} {value.dtype}{where}). {way_out}"
            )
        return float(value.detach())
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"Expected '{name}' to be a number, or a tensor of one (got {type(value).__name__}). {way_out}")
    try:
        return float(value)
    except OverflowError:  # an integer that no float holds
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def flag(name: str, value: Any, way_out: str, optional: bool = False) -> None:
    """Refuse anything that is not a bool, or None if it is optional."""
    is_flag, what = isinstance(value, bool) or (optional and value is None), "to be a bool" + " or None" * optional
    require(is_flag, name, what, type(value).__name__, way_out, TypeError)


def device(value: Any) -> torch.device:
    """The device of this name. Raises an error for a device that this installation of torch lacks."""
    try:
        if isinstance(value, bool):
            raise TypeError
        torch_device = torch.device(value)
        torch.empty(0, device=torch_device)
    except (RuntimeError, TypeError, AssertionError):
        raise ValueError(
            f"Expected 'device' to be one that torch has here (got {value!r}). Try 'cpu' or 'cuda:0'."
        ) from None
    return torch_device


@cache
def _bounds(span: str) -> tuple[float, float]:
    low, high = span[1:-1].split(", ")
    return float(low), float(high)


def seed(value: Any) -> int:
    """Return the seed as an int of 64 bits; refuse anything else.

    In compiled code a symbol is returned as it is.
    """
    if torch.compiler.is_compiling():
        return value
    try:
        value = index(value)  # numpy's integers too
    except TypeError:
        raise TypeError(f"Expected 'seed' to be an integer (got {value!r}). Convert it with `int`.") from None
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"Expected 'seed' in -2**63 .. 2**63-1 (got {value}). Take it modulo 2**63.")
    return value


def one_of(name: str, choice: str, options: Sequence[str]) -> None:
    """Refuse a name that is not one of the options."""
    if choice not in options:
        raise ValueError(f"Expected '{name}' to be one of {[*options]} (got {choice!r}).")


def row_group(value: Any, method: str) -> int:
    """The number of queries that share their draws, as an int; more than one needs ``"bernoulli"``."""
    value = integer("row_group", value, 1, "It is a number of queries that share their draws.")
    what, way_out = f"to be 1 with method={method!r}", "Only 'bernoulli' shares draws."
    require(value == 1 or method == "bernoulli", "row_group", what, value, way_out)
    return value


def imported(module: str, extra: str) -> Any:
    """The module of an optional package. An ImportError names the extra that installs the package."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ImportError(f"Expected '{package}' to be installed (it is not). Run {install(extra)}.") from None


def install(extra: str, options: str = "") -> str:
    """The command that installs an extra: from the clone, or for the distribution that is installed already."""
    if (Path(__file__).parents[2] / "pyproject.toml").exists():
        return f'`pip install {options}-e ".[{extra}]"` in the root of a clone'
    return f"`pip install {options}sbm_pyg[{extra}]`"


# ------------------------------------------------------------------ memory


def memory(name: str, count: int, bytes_each: int, device: torch.device, way_out: str, what: str = "edges") -> None:
    """Raise ValueError if memory cannot hold the elements that an argument asks for, before any is allocated.

    ``bytes_each`` are those that one takes while it is made.
    """
    if fits(count, bytes_each, device):
        return
    needed, free = (f"{min(size, 2**100) / 2**30:,.1f} GiB" for size in (count * bytes_each, available(device)))
    got = f"{count:,} {what}" if count < INT64 else f"more than 2**63 {what}"
    raise ValueError(
        f"Expected '{name}' to ask for no more than memory holds (got {got}, {needed} of {free}). {way_out}"
    )


def parameters(name: str | Mapping[str, int], count: int, way_out: str = "Build a smaller model.") -> None:
    """Refuse more parameters, of torch's default type and on its default device, than memory holds.

    Args:
        name: Name of the size in the error, or sizes by their names, of which the largest is named.
    """
    name = name if isinstance(name, str) else max(name, key=name.__getitem__)
    memory(name, count, torch.get_default_dtype().itemsize, torch.get_default_device(), way_out, "parameters")


def fits(count: int, bytes_each: int, device: torch.device) -> bool:
    """True if memory holds ``count`` elements.

    True for small requests, and where it is unknown: in compiled code, for fake tensors and for symbolic counts.
    """
    if torch.compiler.is_compiling() or isinstance(count, torch.SymInt) or count * bytes_each <= MIN_CHECKED_BYTES:
        return True
    return detect_fake_mode() is not None or count * bytes_each <= available(device)


def available(device: torch.device) -> float:
    """Bytes that are available on a device now; inf if it is unknown.

    Those of the CPU are without swap, and within ``ulimit -v``.
    """
    if device.type == "cuda":
        free, stats = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_stats_as_nested_dict(device)
        reserved, allocated = (stats[f"{kind}_bytes"]["all"]["current"] for kind in ("reserved", "allocated"))
        return free + reserved - allocated  # `memory_reserved` and `memory_allocated` each flatten all statistics
    if device.type != "cpu":
        return math.inf
    return max(min(_system(), _address_space()), 0)


def _system() -> float:
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return 1024 * int(line.split()[1])
    names = getattr(os, "sysconf_names", {})  # none on Windows
    pages = next((name for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in names), None)
    return math.inf if pages is None else os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _address_space() -> float:
    """Bytes that ``ulimit -v`` leaves to this process."""
    if not os.path.exists("/proc/self/statm"):
        return math.inf
    import resource  # which Windows has not

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return limit - int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
