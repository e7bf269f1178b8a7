"""Fuzz driver: numbered calls of every public name, with valid and with hostile arguments, each with a verdict.

In: a seed and a number of calls. Out: how many calls ended in what, the failures by call number, and exit status 1 if there is a crash, a hang, a wrong
result, an exception that blames the library, or a share of refusals without the argument's name of 0.5 % or more. Not here: the tests (``test_fuzz.py``).

``python tests/fuzz.py --calls 20000`` runs the calls in forked children, which are replaced when they crash or hang. Call ``n`` is a function of the
seed and ``n`` alone: ``--only n`` makes it in this process and shows its arguments.

A refusal is a ValueError, a TypeError, an ImportError, the NotImplementedError of forward-mode derivatives, or the error with which torch refuses to
allocate the parameters of a module. It has the argument's name if a word in quotes is that name; torch's error needs none. A value that is at odds with
another argument and wrong in nothing else (a size, a number, a dtype, a graph over other tokens) may be refused by the name of the other argument. All
other exceptions count as refusals without the name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import fuzz_children
import fuzz_scenarios  # noqa: F401 - which adds to the table
import networkx as nx
import numpy as np
import torch
from calls import recorded
from fuzz_cases import Case, Draw, Wrong, expect, valid
from fuzz_layers import TABLE
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import sbm_pyg
from sbm_pyg import SBM, AttentionGraph

LIMIT = 20.0  # seconds of CPU that a call may take
REFUSALS = (ValueError, TypeError, ImportError)
TOO_LARGE = re.compile("can't allocate memory|Storage size calculation overflowed|Overflow when unpacking long")
RELATIONS = {"size", "number", "dtype", "other"}  # kinds of hostile values that only another argument makes wrong
HARMLESS = {"view"}  # kinds whose values are those of the plain argument: the same result, if any
RECORDS = {
    "graph": ("graph", "rowptr", "col", "query_ptr", "key_ptr", "edge_index"),
    "sbm": ("sbm", "probability", "query_membership", "key_membership", "block_matrix"),
}


# ------------------------------------------------------------------ hostile values


def swap(x: Tensor, place: int, value: Any) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    x.view(-1)[place] = torch.tensor(value, dtype=torch.float64).to(x.dtype) if x.is_floating_point() else value
    return x


Hostile = tuple[str, str, Callable[[], Any]]  # label, kind, maker

JUNK: list[Hostile] = [
    ("None", "none", lambda: None), ("'nonsense'", "junk", lambda: "nonsense"), ("{}", "junk", dict), ("object()", "junk", object),
]  # fmt: skip
NUMBERS: dict[str, Any] = {
    str(x): x for x in (True, -1, 0, 1, 0.5, 2.5, -1.0, 1e-45, 1e39, math.nan, math.inf, -math.inf, 1j)
}
NUMBERS |= {"2**31": 2**31, "2**62": 2**62, "2**63": 2**63, "2**64": 2**64, "-2**63": -(2**63), "10**400": 10**400}


def always(value: Any) -> Callable[[], Any]:
    return lambda: value


def replaced(value: Any, place: int, make: Callable[[], Any]) -> Any:
    changed = [*value[:place], make(), *value[place + 1 :]]
    return changed if isinstance(value, list) else tuple(changed)


def mutations(value: Any, trusted: bool, draw: Draw) -> list[Hostile]:
    """Hostile values in place of a valid one."""
    if isinstance(value, Tensor):
        return tensors(value, trusted, draw)
    if isinstance(value, bool):
        flags: list[Any] = [None, 0, 1, 2.5, "nonsense", [], float("nan"), np.bool_(value)]
        return [(repr(x), "flag", always(x)) for x in flags]
    if isinstance(value, int | float):
        kind = type(value)
        result = JUNK + [(name, "number" if type(x) is kind else "value", always(x)) for name, x in NUMBERS.items()]
        changed = {"value + 1": value + 1, "value - 1": value - 1, "-value": -value}
        result += [(name, "number", always(x)) for name, x in changed.items()]
        same: list[Any] = [np.float64(value)] if kind is float else []
        same += [np.int64(value), np.int32(value)] if kind is int and abs(value) < 2**31 else []
        result += [(f"numpy {type(x).__name__}", "view", always(x)) for x in same]
        other: dict[str, Any] = {
            "text": str(value), "[]": [], "list": [value], "float16": np.float16(0.5), "bytes": b"1",
        }  # fmt: skip
        result += [(name, "value", always(x)) for name, x in other.items()]
        return result + of_kind("value", tensor=lambda: torch.tensor(value), tensor_of_two=lambda: torch.tensor([1, 2]))
    if isinstance(value, str):
        plain: list[Any] = [3, "", [], b"bytes", True, math.nan, "\0"]
        others = {repr(x): x for x in plain}
        others |= {"upper case": value.upper(), "with a line feed": value + "\n", "300 characters": "x" * 300}
        return JUNK + [(name, "value", always(x)) for name, x in others.items()]
    if isinstance(value, AttentionGraph):
        return graphs(value, draw)
    if isinstance(value, SBM):
        return models(value, draw)
    if isinstance(value, tuple | list) and value:
        sequence: Any = value
        make, place = list if isinstance(value, list) else tuple, draw.randrange(len(value))
        inner = mutations(value[place], trusted, draw)
        result = [(f"[{place}] {name}", kind, partial(replaced, value, place, f)) for name, kind, f in inner]
        whole: list[Hostile] = [
            ("empty", "size", make), ("shorter", "size", lambda: sequence[:-1]), ("longer", "size", lambda: sequence + sequence[:1]),
        ]  # fmt: skip
        whole += [("iterator", "value", lambda: iter(value)), ("3", "value", lambda: 3)]
        return [*draw.sample(result, min(len(result), 16)), *JUNK, *whole]
    return [
        *JUNK, ("3", "value", lambda: 3), ("-1.5", "value", lambda: -1.5), ("[]", "value", list), ("class", "junk", lambda: type(value)),
    ]  # fmt: skip


def tensors(x: Tensor, trusted: bool, draw: Draw) -> list[Hostile]:
    """Hostile tensors; ``trusted``: of types and shapes alone."""
    floating, dim, count = x.is_floating_point(), x.dim(), x.numel()
    result = [
        *list(JUNK), ("3", "value", lambda: 3), ("[]", "value", list), ("nested list", "value", x.tolist),
        ("numpy array", "view", x.detach().numpy),
    ]  # fmt: skip
    dtypes = (
        torch.bool, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    )  # fmt: skip
    result += [(str(dtype), "dtype", partial(x.to, dtype)) for dtype in dtypes if dtype != x.dtype]
    result += [("rank + 1", "rank", lambda: x[None]), ("scalar tensor", "rank", lambda: torch.ones((), dtype=x.dtype))]
    result += [("rank - 1", "rank", lambda: x[0])] if dim and len(x) else []
    result += [("meta", "device", lambda: x.to("meta")), ("sparse", "layout", lambda: x.to_sparse())] if dim else []
    result += [("nested", "layout", lambda: torch.nested.nested_tensor([x]))] if dim and floating else []
    result += [("strided view", "view", lambda: torch.stack([x, x], -1)[..., 0])]
    result += [("transposed view", "view", lambda: x.mT.contiguous().mT)] if dim > 1 else []
    if floating:
        result += of_kind(
            "view", requires_grad=lambda: x.clone().requires_grad_(), negative_view=lambda: torch._neg_view(-x)
        )
    if trusted:
        return result
    for axis in range(dim):
        more = [x, x.narrow(axis, 0, min(1, x.size(axis)))]
        result.append((f"axis {axis} + 1", "size", partial(torch.cat, more, axis)))
        if x.size(axis):
            result.append((f"axis {axis} - 1", "size", partial(x.narrow, axis, 0, x.size(axis) - 1)))
            result.append((f"axis {axis} empty", "size", partial(x.narrow, axis, 0, 0)))
    if not count:
        return result
    place = draw.randrange(count)
    if floating:
        for value in (float("nan"), float("inf"), -float("inf"), 1e-45, 1e39, -1.0, 1.5):
            result += [(f"one is {value}", "value", partial(swap, x, place, value))]
        result += of_kind("value", all_NaN=lambda: x * torch.nan, all_tiny=lambda: torch.full_like(x, 1e-45))
        result += of_kind("value", expanded=lambda: x.reshape(-1)[place].expand(x.shape), all_0=lambda: x * 0)
    elif x.dtype == torch.bool:
        result += [("all False", "value", lambda: x & False), ("all True", "value", lambda: x | True)]
    else:
        large = (2**31, 2**62, 2**63 - 1, -(2**63)) if x.dtype == torch.int64 else ()
        for value in (-1, 2**31 - 1, -(2**31), *large):
            result += [(f"one is {value}", "value", partial(swap, x, place, value))]
        result += [("one larger", "value", lambda: swap(x, place, int(x.max()) + 1)), ("all 0", "value", lambda: x * 0)]
        before = int(x.reshape(-1)[place - 1])
        result += of_kind("value", reversed=lambda: x.flip(0), repeated=lambda: swap(x, place, before)) if dim else []
        result += of_kind("value", expanded=lambda: x.reshape(-1)[place].expand(x.shape))
    return result


def of_kind(kind: str, **makers: Callable[[], Any]) -> list[Hostile]:
    """Hostile values of one kind by label, in which an underscore is a space."""
    return [(label.replace("_", " ").strip(), kind, make) for label, make in makers.items()]


def graphs(graph: AttentionGraph, draw: Draw) -> list[Hostile]:
    """What is no graph, graphs over other tokens, and what no graph may be: built by hand, which may refuse it already."""
    n, m, heads, rowptr, col = graph.num_queries, graph.num_keys, graph.heads, graph.rowptr, graph.col

    def build(**changes: Any) -> AttentionGraph:
        fields = ("rowptr", "col", "num_queries", "num_keys", "heads", "query_ptr", "key_ptr")
        return AttentionGraph(**({name: getattr(graph, name) for name in fields} | changes))

    result = [
        *JUNK, *of_kind("device", on_meta=lambda: graph.to("meta")),
        *of_kind("value", _3=lambda: 3, tensor=lambda: col, networkx=nx.DiGraph, tuple_of_tensors=lambda: (rowptr, col)),
        *of_kind(
            "other", over_other_tokens=lambda: draw.graph(heads), of_other_heads=lambda: draw.graph(heads + 1),
            of_other_heads_over_the_same_tokens=lambda: draw.graph(heads + 1, [n], [m]),
            without_edges=lambda: build(rowptr=rowptr * 0, col=col[:0])),
        *of_kind(
            "value", rowptr_from_1=lambda: build(rowptr=rowptr.clamp(min=1)),
            rowptr_past_E=lambda: build(rowptr=swap(rowptr, -1, graph.num_edges + 1)),
            rowptr_decreasing=lambda: build(rowptr=swap(rowptr, -2, graph.num_edges + 2**31)),
            rowptr_negative=lambda: build(rowptr=swap(rowptr, -2, -5))),
    ]  # fmt: skip
    if graph.num_edges:
        place = draw.randrange(graph.num_edges)
        for value, label in ((-1, "-1"), (m, "M"), (2**31 - 1, "2**31 - 1")):
            result += [(f"col has {label}", "value", partial(build, col=swap(col, place, value)))]
        if graph.num_sequences > 1:
            result += of_kind("value", edges_leave_their_sequence=lambda: build(col=torch.full_like(col, m - 1)))
        if int(rowptr.diff().max()) > 1:
            row = int(rowptr.diff().argmax())
            first, end = rowptr[row : row + 2].tolist()
            flipped = torch.cat([col[:first], col[first:end].flip(0), col[end:]])
            repeated = swap(col, first + 1, int(col[first]))
            result += of_kind("value", unsorted=lambda: build(col=flipped), repeated=lambda: build(col=repeated))
    return result


def models(sbm: SBM, draw: Draw) -> list[Hostile]:
    """What is no model, models over other tokens, and models of values out of range."""
    parts = {name: getattr(sbm, name) for name in ("query_membership", "key_membership", "block_matrix")}

    def build(**changes: Any) -> SBM:
        return SBM(**(parts | {"query_ptr": sbm.query_ptr, "key_ptr": sbm.key_ptr} | changes))

    result = [
        *JUNK, *of_kind("value", _3=lambda: 3, tensor=lambda: sbm.query_membership, tuple=lambda: (*parts.values(),)),
        *of_kind("other", over_other_tokens=lambda: draw.sbm(sbm.heads), of_other_heads=lambda: draw.sbm(sbm.heads + 1)),
    ]  # fmt: skip
    for name, x in parts.items():
        for value in (float("nan"), float("inf"), -0.5, 1e39, 1e-45, 50.0):
            result += [(f"{name} has {value}", "value", partial(build, **{name: swap(x, 0, value)}))]
        result += [(f"all of {name} 1e-45", "value", partial(build, **{name: torch.full_like(x, 1e-45)}))]
    for dtype in (torch.float16, torch.bfloat16):
        result += [(str(dtype), "dtype", partial(build, **{name: x.to(dtype) for name, x in parts.items()}))]
    return result


def same(a: Any, b: Any) -> bool:
    """Whether two results of the same call are equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.layout != torch.strided or a.is_meta:
            return a.shape == b.shape
        return a.shape == b.shape and torch.allclose(
            a.detach().double(), b.detach().double(), rtol=1e-4, atol=1e-5, equal_nan=True
        )
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, AttentionGraph):
        return isinstance(b, AttentionGraph) and a == b
    if isinstance(a, Data | HeteroData):
        return same([*a.to_dict().values()], [*b.to_dict().values()])
    return bool(a == b) or a != a if isinstance(a, int | float | str) else True


def walk(result: Any) -> Iterator[Any]:
    """What a result consists of."""
    if isinstance(result, tuple | list):
        for part in result:
            yield from walk(part)
    else:
        yield result


def named(message: str, names: Sequence[str]) -> bool:
    """Whether one of the names stands in quotes, alone or as part of what is quoted: ``'ptr'``, ``'ptr[0]'``."""
    quoted = re.findall(r"(?<!\w)'([^']{1,400})'(?!\w)", message)
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", words) for name in names for words in quoted)


# ------------------------------------------------------------------ one call


@cache
def _schedule(seed: int, names: tuple[str, ...]) -> list[str]:
    """The names of one round: each name once, then again as its weight has it."""
    once, more = [*names], [name for name in names for _ in range(TABLE[name][0] - 1)]
    shuffle = random.Random(seed).shuffle
    shuffle(once)
    shuffle(more)
    return once + more


def plan(seed: int, number: int) -> tuple[str, Case, dict[str, Hostile], Draw]:
    """What call ``number`` is: its name, valid arguments, and what is put in place of some. About one call in four is valid."""
    name, draw = _schedule(seed, tuple(TABLE))[number % sum(weight for weight, _ in TABLE.values())], Draw(seed, number)
    torch.manual_seed(number)
    case = TABLE[name][1](draw)
    chosen: dict[str, Hostile] = {}
    if case.arguments and draw.random() < 0.8:
        for argument in draw.sample([*case.arguments], min(len(case.arguments), draw.choice((1, 1, 1, 1, 2)))):
            special = case.more.get(argument, [])
            options = mutations(case.arguments[argument], argument in case.unchecked, draw)
            chosen[argument] = draw.choice(special if special and draw.random() < 0.6 else options)
    return name, case, chosen, draw


def judge(seed: int, number: int) -> dict[str, Any]:
    """Make a call and judge it."""
    name, case, chosen, _ = plan(seed, number)
    mutated = [[argument, label] for argument, (label, _, _) in chosen.items()]
    verdict: dict[str, Any] = {"number": number, "name": name, "mutated": mutated, "verdict": "returned", "detail": ""}
    related = any(kind in RELATIONS for _, kind, _ in chosen.values())
    words = {name: (name, *case.names.get(name, ()), *records(value)) for name, value in case.arguments.items()}
    names = [word for argument in (words if related else chosen) for word in words[argument]]
    start = time.perf_counter()
    arguments = dict(case.arguments)
    try:
        arguments |= {argument: make() for argument, (_, _, make) in chosen.items()}
        torch.manual_seed(number)
        result = case.call(**arguments)
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {error}"
        forward = isinstance(error, NotImplementedError) and "reverse-mode" in message
        too_large = is_module(name) and bool(TOO_LARGE.search(message))
        refused = (isinstance(error, REFUSALS) and not isinstance(error, UnicodeError)) or forward or too_large
        if not chosen and not (isinstance(error, ImportError) and "to be installed" in message):
            kind = "wrong"
            message = f"valid arguments refused: {message}"
        elif refused:
            has_name = named(message, names) or "to be installed" in message or too_large
            kind = "refused" if has_name else "unnamed"
        else:
            kind = "other"
        last = traceback.extract_tb(error.__traceback__)[-1]
        verdict |= {
            "verdict": kind, "detail": message[:300], "where": f"{Path(last.filename).name}:{last.lineno}", "type": type(error).__name__,
        }  # fmt: skip
    else:
        complaint = review(seed, number, case, chosen, arguments, result)
        if complaint:
            verdict |= {"verdict": "wrong", "detail": complaint[:300]}
    return verdict | {"seconds": round(time.perf_counter() - start, 3)}


def is_module(name: str) -> bool:
    """Whether a public name is that of a module."""
    thing: Any = sbm_pyg
    for part in name.split("."):
        thing = getattr(thing, part, None)
    return isinstance(thing, type) and issubclass(thing, torch.nn.Module)


def records(value: Any) -> tuple[str, ...]:
    if isinstance(value, tuple | list) and value:
        return records(value[0])
    return RECORDS["graph"] if isinstance(value, AttentionGraph) else RECORDS["sbm"] if isinstance(value, SBM) else ()


def review(
    seed: int, number: int, case: Case, chosen: dict[str, Hostile], arguments: dict[str, Any], result: Any
) -> str:
    """What is wrong with a result, or nothing."""
    try:
        for argument, (label, kind, _) in chosen.items():
            empty = label == "{}" and argument in ("attention_options", "attn_kwargs", "metric")  # as good as none
            expect(kind != "junk" or empty or argument in case.free, f"{label} was taken for '{argument}'")
        for part in walk(result):
            if isinstance(part, AttentionGraph):
                valid(part)
            elif isinstance(part, Tensor) and part.layout == torch.strided and not chosen:
                expect(part.isfinite().all(), "a valid call gives a number that is not finite")
        case.check(result, **arguments)
        if all(kind in HARMLESS for _, kind, _ in chosen.values()) and number % 2:  # also: equal calls, equal results
            again = plan(seed, number)[1]
            torch.manual_seed(number)
            expect(same(again.call(**again.arguments), result), "another result than that of the plain call")
    except Wrong as wrong:
        return str(wrong)
    except Exception as error:  # a hostile value that the oracle cannot read is left unjudged
        return "" if chosen else f"the oracle fails: {traceback.format_exc(limit=-2)} {error}"
    return ""


def show(seed: int, number: int) -> None:
    """Print the arguments of call ``number``, make it, and print the verdict."""
    name, case, chosen, _ = plan(seed, number)
    print(f"call {number} of seed {seed}: {name}")
    for argument, value in case.arguments.items():
        print(f"    {argument} = {value!r}" + (f", hostile: {chosen[argument][0]}" if argument in chosen else ""))
    print(json.dumps(judge(seed, number), indent=2), flush=True)


# ------------------------------------------------------------------ many calls


def _judge_apart(seed: int, memory: float, number: int) -> dict[str, Any]:
    """Judges a call in a child, in a folder for what hostile paths write, with this many GiB of addresses."""
    resource.setrlimit(resource.RLIMIT_AS, (int(memory * 2**30),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    sys.argv = sys.argv[:1]
    with tempfile.TemporaryDirectory() as home, contextlib.chdir(home):
        return judge(seed, number)


def run(numbers: Sequence[int], seed: int, jobs: int, limit: float, memory: float) -> list[dict[str, Any]]:
    """Verdicts of these calls."""
    from tqdm import tqdm

    recorded()  # once for all children
    tqdm.monitor_interval = 0  # no thread beside forks
    calls, verdicts = fuzz_children.run(numbers, partial(_judge_apart, seed, memory), jobs, limit, most=50), []
    with contextlib.suppress(KeyboardInterrupt):  # a report of what there is
        for number, verdict in tqdm(calls, total=len(numbers), file=sys.stderr, smoothing=0.02, mininterval=1.0):
            if isinstance(verdict, int):
                kind = "hang" if verdict in fuzz_children.LATE else "crash"
                verdict = describe(seed, number, kind, f"exit status {verdict}")
            verdicts.append(verdict)
    return sorted(verdicts, key=lambda verdict: verdict["number"])


def describe(seed: int, number: int, verdict: str, detail: str) -> dict[str, Any]:
    name, _, chosen, _ = plan(seed, number)
    mutated = [[argument, label] for argument, (label, _, _) in chosen.items()]
    return {"number": number, "name": name, "mutated": mutated, "verdict": verdict, "detail": detail, "seconds": 0.0}


# ------------------------------------------------------------------ the report

BLAME = {"AssertionError", "SystemError", "SystemExit", "RecursionError", "NameError", "UnboundLocalError"}
"""Errors that are the library's fault, not the caller's."""


def share(verdicts: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Refusals without the argument's name, and all refusals."""
    counts = Counter(verdict["verdict"] for verdict in verdicts)
    without = counts["unnamed"] + counts["other"]
    return without, without + counts["refused"]


def faults(verdicts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What no call may end in."""
    kinds = ("crash", "hang", "wrong")
    return [verdict for verdict in verdicts if verdict["verdict"] in kinds or verdict.get("type") in BLAME]


def report(verdicts: Sequence[dict[str, Any]]) -> str:
    counts = Counter(call["verdict"] for call in verdicts)
    lines = [", ".join(f"{verdict} {count:,}" for verdict, count in sorted(counts.items()))]
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for call in verdicts:
        if call["verdict"] not in ("returned", "refused"):
            what = ", ".join(f"{argument} <- {label}" for argument, label in call["mutated"]) or "valid"
            groups[call["verdict"], call["name"], what, call["detail"].split("\n")[0][:140]].append(call["number"])
    order = {"crash": 0, "hang": 1, "wrong": 2, "other": 3, "unnamed": 4}
    lines += ["", "failures: call numbers, public name, what was hostile, how it ended"]
    for (verdict, name, what, detail), numbers in sorted(
        groups.items(), key=lambda group: (order[group[0][0]], group[0][1:])
    ):
        lines.append(
            f"{verdict:<8}{', '.join(map(str, numbers[:4]))}{', ...' if len(numbers) > 4 else ''}  {name}: {what}: {detail}"
        )
    without, refusals = share(verdicts)
    lines += [
        "",
        f"{without:,} of {refusals:,} refusals ({100 * without / max(refusals, 1):.2f} %) without the argument's name",
    ]
    return "\n".join(
        [*lines, f"{len(faults(verdicts)):,} crashes, hangs, wrong results and exceptions that blame the library"]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz every public name; see the docstring of this file.")
    parser.add_argument("--calls", type=int, default=20_000, help="number of calls")
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--seed", type=int, default=0, help="seed of the calls")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of children")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of CPU that a call may take")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB of address space of a child")
    parser.add_argument("--only", type=int, help="make this one call here, and show its arguments")
    parser.add_argument("--json", type=Path, help="where to write all verdicts")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have ignored for what runs behind it
    if options.only is not None:
        show(options.seed, options.only)
        return 0
    verdicts = run(
        range(options.first, options.first + options.calls), options.seed, options.jobs, options.limit, options.memory
    )
    if options.json:
        options.json.write_text(json.dumps(verdicts, indent=1))
    print(report(verdicts))
    without, refusals = share(verdicts)
    return int(bool(faults(verdicts)) or without * 200 >= max(refusals, 1))


if __name__ == "__main__":
    raise SystemExit(main())
