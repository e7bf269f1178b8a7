"""Measures a GPU in slices of some minutes: run it again until nothing is left.

python -m examples.benchmarks.gpu                             tests, layers, attention and ListOps; nine minutes of them
python -m examples.benchmarks.gpu --only attention --tokens 4096 --densities 1 5
python -m examples.benchmarks.gpu --markdown                  tables of what is there

The first five minutes measure what matters most: the contract of the kernels, a minute for each file of tests; operations
of a step; layers of 4,096 and 16,384 tokens, fresh and trained, and dense ones; the block kernel; and the same layers as
CUDA graphs. Everything else follows. Each peer of attention must give the results of plain torch in float64 on a few
tokens, or it is not timed. Whatever ends, or fails, adds a line of JSON to results.jsonl in the output folder, and is not
run again; delete the line to have it once more. A slice that is killed loses the item it was at, and what two slices were
killed at is given up. `--device cpu` tries all of it without a GPU.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from examples.benchmarks.kernels import Propagate
from examples.benchmarks.operations import count_step
from examples.benchmarks.report import TRAINED
from examples.benchmarks.samplers import dense_twin
from examples.benchmarks.trained import take
from examples.common.command import Command
from examples.common.runs import check_folder, read_record, resumable
from examples.common.tables import Row, Rows, by
from examples.common.tables import markdown as table
from sbm_pyg import BlockGraph, FullAttention, Tokens, auxiliary_loss, make_attention, ops, patterns
from sbm_pyg.progress import tqdm

KINDS = ("contract", "operations", "layers", "attention", "tests", "listops")
ATTENTION = ("sdpa", "varlen", "flex", "edges", "blocks", "sparse", "pyg", "pyg-compiled")
LAYERS = ("dense", "dense-phase", "tokens", "blocks", "sampling")
AS_TRAINED = (*TRAINED, *(f"{name}-dense" for name in TRAINED))
FIRST_LAYERS = ("dense", "tokens", "blocks", "recall-1-dense", "recall-1", "recall-2-dense", "recall-2")
DENSE = ("sdpa", "varlen", "dense", "dense-phase", *AS_TRAINED)  # their densities are not chosen
GRAPH = "-graph"  # end of the name of a layer whose steps are a CUDA graph
FIRST_SIZES, FIRST_DENSITY = (4096, 16384), 0.05
ROOT = Path(__file__).resolve().parents[2]
# files, and what names of their tests have
TESTS = {"tests/triton_edges.py": "", "tests/triton_graphs.py": "", "tests/test_devices.py": "cuda"}
CONTRACT = (*TESTS,)[:2]
CONTRACT_SECONDS = 60.0  # of each file, after which its tests wait until all else is measured


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing to measure; a density of 0 stands for all pairs, or for what has no density."""

    kind: str
    peer: str
    tokens: int = 0
    density: float = 0.0
    dtype: str = ""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = Command("python -m examples.benchmarks.gpu", __doc__)
    command.option("only", [*KINDS], "(default: all)", choices=KINDS, metavar=None)
    command.option("device", "cuda")
    command.option("minutes", 9.0, "after which nothing new begins, and ListOps stops", metavar="M", above=0)
    command.option("tokens", [2**n for n in range(10, 18)], "(default: 2^10 .. 2^17)", metavar="N")
    command.option("densities", [0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0], metavar="PERCENT")
    command.option("degrees", [256], "keys of a query, in addition to the densities", nargs="*", least=1)
    command.option("dtype", "bfloat16", choices=("bfloat16", "float16", "float32"))
    command.option("heads", 2, above=0)
    command.option("channels", 32, "of a head", above=0)
    command.option("block-size", 64, "tokens of a block", above=0)
    layers = (*LAYERS, *AS_TRAINED)
    peers = (*ATTENTION, *layers, *(f"{name}{GRAPH}" for name in layers if name != "sampling"))
    command.option("peers", [*peers], "(default: all)", choices=peers, metavar=None)
    command.option("seconds", 5.0, "limit of one call, above which it is timed once", metavar="S", above=0)
    command.option("steps", int, "of ListOps (default: those of the preset `paper`)", above=0)
    command.option("output", Path("runs/gpu"))
    command.add_argument("--markdown", action="store_true", help="measure nothing")
    args = command.read(arguments)
    whole = min(args.tokens) >= args.block_size and not any(count % args.block_size for count in args.tokens)
    command.require(whole, f"'tokens' to be multiples of the block size, {args.block_size}", args.tokens)
    is_valid = 0 < min(args.densities) <= max(args.densities) <= 100
    command.require(is_valid, "'densities' in (0, 100] percent", args.densities)
    if not args.markdown:
        command.attempt(check_folder, "output", args.output)
    return args


def items(args: argparse.Namespace) -> Iterator[Item]:
    """The items to be measured, the most useful ones first."""
    listed = [Item("contract", name) for name in CONTRACT if (ROOT / name).is_file()]
    listed += [Item("operations", "step", density=density) for density in (FIRST_DENSITY, 1.0)]
    ends = ("", GRAPH) if args.device.startswith("cuda") else ("",)
    first = [tokens for tokens in args.tokens if tokens in FIRST_SIZES]
    for end, tokens in itertools.product(ends, first):
        listed += [_timed("layers", peer, tokens, FIRST_DENSITY, args.dtype, end) for peer in FIRST_LAYERS]
        blocks = () if end else ("sdpa", "blocks")
        listed += [_timed("attention", peer, tokens, FIRST_DENSITY, args.dtype) for peer in blocks]
    for tokens in args.tokens:
        shares = sorted({x / 100 for x in args.densities} | {d / tokens for d in args.degrees if d < tokens})
        for kind, peers in (("attention", ATTENTION), ("layers", (*LAYERS, *AS_TRAINED))):
            listed += [_timed(kind, peer, tokens, share, args.dtype) for peer in peers for share in shares]
    listed += [Item("tests", name) for name in TESTS if (ROOT / name).is_file()]
    listed += [Item("listops", "paper")]
    for item in dict.fromkeys(listed):
        if item.kind in args.only and (item.peer in args.peers or item.kind not in ("attention", "layers")):
            yield item


def _timed(kind: str, peer: str, tokens: int, density: float, dtype: str, end: str = "") -> Item:
    return Item(kind, f"{peer}{end}", tokens, 0.0 if peer in DENSE else density, dtype)


class Inputs:
    """Tokens of all heads, and a graph whose rows have equal numbers of random keys, or of random blocks of keys.

    Every device gets the same; a graph is made where it is used, since the CPU takes minutes for some hundred million edges.
    """

    def __init__(self, args: argparse.Namespace, tokens: int, density: float, dtype: str, in_blocks: bool) -> None:
        random = torch.Generator().manual_seed(0)
        shape = (args.heads, tokens, args.channels)
        drawn = (torch.randn(shape, generator=random) for _ in range(4))
        self.query, self.key, self.value, self.grad = (x.to(args.device, getattr(torch, dtype)) for x in drawn)
        self.scale, self.block_size = args.channels**-0.5, args.block_size
        count = tokens // args.block_size if in_blocks else tokens
        degree = max(1, round(density * count))
        graph = patterns.random(count, degree, heads=args.heads, seed=0, device=args.device)
        self.graph = (BlockGraph(graph, args.block_size) if in_blocks else graph).to(args.device)

    @property
    def leaves(self) -> list[Any]:
        return [x.requires_grad_() for x in (self.query, self.key, self.value)]


Forward = Callable[..., Any]  # from query, key and value to the output, all [H, N, C]


def _sdpa(inputs: Inputs) -> Forward:
    attend: Any = scaled_dot_product_attention
    return lambda *leaves: attend(*(x[None] for x in leaves), scale=inputs.scale)[0]


def _varlen(inputs: Inputs) -> Forward:
    """All heads as heads of one sequence."""
    attend: Any = varlen_attn
    count = inputs.query.size(1)
    ends = torch.tensor([0, count], dtype=torch.int32, device=inputs.query.device)

    def forward(*leaves: Any) -> Any:
        parts = (x.transpose(0, 1).contiguous() for x in leaves)
        return attend(*parts, ends, ends, count, count, scale=inputs.scale).transpose(0, 1)

    return forward


def _flex(inputs: Inputs) -> Forward:
    graph: Any = inputs.graph
    mask, device = graph.to_block_mask(), inputs.query.device
    attend: Any = torch.compile(flex_attention) if device.type == "cuda" else flex_attention
    # within our blocks
    tiles = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32}
    how: dict[str, Any] = {"kernel_options": tiles if device.type == "cuda" else None}
    return lambda *leaves: attend(*(x[None] for x in leaves), block_mask=mask, scale=inputs.scale, **how)[0]


def _edges(inputs: Inputs) -> Forward:
    attend: Any = ops.edge_attention
    return lambda *leaves: attend(*leaves, inputs.graph.rows, scale=inputs.scale)[0]


def _blocks(inputs: Inputs) -> Forward:
    graph: Any = inputs.graph
    attend: Any = ops.block_attention
    layout = (graph.blocks.rows, (graph.query_ptr, graph.key_ptr), inputs.block_size)
    return lambda *leaves: attend(*leaves, *layout, scale=inputs.scale)[0]


def _sparse(inputs: Inputs) -> Forward:
    """torch's own sparse softmax and product, in coordinates."""
    heads, count, _ = inputs.query.shape
    row, col = inputs.graph.edge_row, inputs.graph.col.long()
    index = torch.stack([row, col + row // count * count])

    def forward(query: Any, key: Any, value: Any) -> Any:
        flat = [x.flatten(0, 1) for x in (query, key, value)]
        score = (flat[0][index[0]] * flat[1][index[1]]).sum(1) * inputs.scale
        layout: Any = {"size": (heads * count,) * 2, "is_coalesced": True, "check_invariants": False}
        weight = torch.sparse.softmax(torch.sparse_coo_tensor(index, score, **layout), 1)
        return torch.sparse.mm(weight, flat[2]).view_as(value)

    return forward


def _pyg(inputs: Inputs, compiled: bool = False) -> Forward:
    count = inputs.query.size(1)
    row, col = inputs.graph.edge_row, inputs.graph.col.long()
    index = torch.stack([col + row // count * count, row])
    module: Any = Propagate(inputs.query.size(2))
    module = torch.compile(module) if compiled else module
    gate = inputs.query.new_ones(row.numel())
    return lambda *leaves: module(index, *(x.flatten(0, 1) for x in leaves), gate).view_as(leaves[0])


BUILD: dict[str, Callable[[Inputs], Forward]] = {
    "sdpa": _sdpa, "varlen": _varlen, "flex": _flex, "edges": _edges, "blocks": _blocks, "sparse": _sparse, "pyg": _pyg,
    "pyg-compiled": partial(_pyg, compiled=True),
}  # fmt: skip
OVER_BLOCKS = ("flex", "blocks")


def _step(forward: Forward, inputs: Inputs) -> list[Any]:
    """Output, and gradients of query, key and value."""
    leaves = inputs.leaves
    out = forward(*leaves)
    return [out, *torch.autograd.grad(out, leaves, inputs.grad)]


@cache
def _check(words: str, peer: str) -> float:
    """Largest error of output and gradients over a few tokens, relative to the largest value of plain torch in float64."""
    args = argparse.Namespace(**json.loads(words))
    inputs = Inputs(args, 8 * args.block_size, 0.0 if peer in DENSE else 0.3, args.dtype, peer in OVER_BLOCKS)
    results = [x.detach().double().cpu() for x in _step(BUILD[peer](inputs), inputs)]
    query, key, value = (x.detach().double().cpu().requires_grad_() for x in inputs.leaves)
    is_edge = torch.ones(1, 1, dtype=torch.bool) if peer in DENSE else inputs.graph.to("cpu").to_dense()
    weight = (query @ key.mT * inputs.scale).masked_fill(~is_edge, -torch.inf).softmax(-1)
    out = weight @ value
    true = [out.detach(), *torch.autograd.grad(out, (query, key, value), inputs.grad.double().cpu())]
    error = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(results, true, strict=True))
    limit = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}[args.dtype]
    if not error <= limit:
        raise ValueError(f"Expected results within {limit:g} of plain torch in float64 (got {error:.2g}).")
    return error


def measure_attention(item: Item, args: argparse.Namespace) -> dict[str, Any]:
    """Times and memory of a peer, forward and with all gradients, after its check."""
    words = {name: getattr(args, name) for name in ("heads", "channels", "block_size", "device")}
    error = _check(json.dumps(words | {"dtype": item.dtype}), item.peer)
    inputs = Inputs(args, item.tokens, item.density, item.dtype, item.peer in OVER_BLOCKS)
    forward = BUILD[item.peer](inputs)

    def infer() -> None:
        with torch.no_grad():
            forward(inputs.query, inputs.key, inputs.value)

    calls = {"forward": infer, "step": lambda: _step(forward, inputs)}
    return {"error": error, "edges": inputs.graph.num_edges} | measure_calls(calls, args)


def measure_calls(calls: dict[str, Callable[[], Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Median milliseconds of each call, and the memory that the last one needs beyond what was there, in MiB."""
    measures: dict[str, Any] = {}
    on_gpu = torch.device(args.device).type == "cuda"
    for name, call in calls.items():
        call()  # compiles
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
            measures[f"{name}_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        if (took := time.perf_counter() - start) > args.seconds:
            measures |= {f"{name}_ms": 1e3 * took, "remark": f"{name} timed once"}
            continue
        timed = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        measured = timed.blocked_autorange(min_run_time=min(0.5, args.seconds))
        measures |= {f"{name}_ms": 1e3 * measured.median, f"{name}_iqr_ms": 1e3 * measured.iqr}
    return measures


def measure_layers(item: Item, args: argparse.Namespace) -> dict[str, Any]:
    """An evaluation and a training step of a whole layer, with projections, block model, sampling and attention.

    As a :class:`~sbm_pyg.Sparsifier` trains it: in the dense phase, or at the target density. Trained layers are causal
    and get the tokens of their models. A CUDA graph is captured after three calls, and its replays are timed.
    """
    torch.manual_seed(0)
    peer, ptr = item.peer.removesuffix(GRAPH), torch.tensor([0, item.tokens], device=args.device)
    layer, x = _make_layer(peer, item, args)
    x = x.detach().requires_grad_()
    half = torch.autocast(torch.device(args.device).type, getattr(torch, item.dtype), enabled=item.dtype != "float32")
    seed = {"seed": 1}  # the running mean stays as it is

    def infer() -> None:
        layer.eval()
        with torch.no_grad(), half:
            layer(x, ptr=ptr, **seed)

    def step() -> None:
        layer.train().zero_grad()
        with half:
            out = layer(x, ptr=ptr, **seed)
        (out.float().square().mean() + auxiliary_loss(layer)).backward()

    if peer == "sampling":
        query, key = (torch.randn(args.heads, item.tokens, args.channels, device=args.device) for _ in range(2))
        tokens = Tokens(query, key, ptr, bipartite=False)
        with torch.no_grad():
            return measure_calls({"forward": lambda: layer.source(tokens)}, args)
    calls: dict[str, Callable[[], Any]] = {"forward": infer, "step": step}
    if peer != item.peer:
        calls = {name: _captured(call) for name, call in calls.items()}
    return measure_calls(calls, args)


def _make_layer(peer: str, item: Item, args: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    """A layer on the device, and its tokens."""
    if peer in AS_TRAINED:
        conv, x = take(peer.removesuffix("-dense"), item.tokens, device=args.device)
        return (dense_twin(conv) if peer.endswith("-dense") else conv), x
    width = args.heads * args.channels
    layer: Any
    if peer == "dense":
        layer = FullAttention(width, args.channels, args.heads)
    else:
        block_size = args.block_size if peer == "blocks" else 1
        layer = make_attention("sbm", width, args.channels, args.heads, block_size=block_size, window=None)
        layer.source.target_density = item.density or 1.0
    return layer.to(args.device), torch.randn(item.tokens, width, device=args.device)


def _captured(call: Callable[[], Any]) -> Callable[[], None]:
    """A call as one CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure_operations(item: Item, args: argparse.Namespace) -> dict[str, Any]:
    """Operations and reads of a step of a small layer; on a GPU also the waits of three steps, within our ops too."""
    counts: dict[str, Any] = dict(count_step(item.density, args.device))
    if torch.device(args.device).type == "cuda":
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                count_step(item.density, args.device)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts["waits of three steps"] = len(waits)
    return counts


def measure_tests(item: Item, args: argparse.Namespace, limit: float | None = None) -> dict[str, Any]:
    """The result of a file of tests, stopped after so many seconds; what pytest writes is in the output folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", item.peer, "--tb=short", "-p", "no:cacheprovider"]
    command += ["-k", TESTS[item.peer]] if TESTS.get(item.peer) else []
    if find_spec("xdist"):  # most of the time goes into compiling kernels
        command += ["-n", str(min(16, os.cpu_count() or 1)), "--dist", "load"]
    log = args.output / f"{Path(item.peer).stem}.log"
    with log.open("w") as file:
        tests = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            passed = tests.wait(limit) == 0
        except subprocess.TimeoutExpired:
            tests.send_signal(signal.SIGINT)  # pytest then says what has failed
            tests.wait()
            passed = False  # whatever its status is: an interruption while it starts may end with 0
    lines = log.read_text().strip().splitlines() or [""]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"passed": passed, "said": lines[-1], "failed": failed[:50]}


def measure_listops(item: Item, args: argparse.Namespace) -> dict[str, Any] | None:
    """ListOps with the settings of the paper, for as long as the slice lasts; None where it is to go on in the next one."""
    folder = args.output / "listops"
    command = [sys.executable, "-m", "examples.lra", "train", "--output", str(folder.resolve())]
    if (folder / "settings.json").exists():
        command += ["--resume"]
    else:
        command += ["--task", "listops", "--preset", item.peer, "--accelerator", str(args.device).partition(":")[0]]
        command += [] if args.steps is None else ["--steps", str(args.steps)]
    try:
        done = subprocess.run(command, cwd=ROOT, check=False, timeout=max(30.0, args.until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None  # the next slice continues from what was saved
    result = folder / "results.json"
    if done.returncode or not result.exists():
        return {"remark": f"the trainer ended with {done.returncode}: see {folder}"}
    return read_record(result)


MEASURE: dict[str, Callable[[Item, argparse.Namespace], dict[str, Any] | None]] = {
    "contract": partial(measure_tests, limit=CONTRACT_SECONDS), "operations": measure_operations, "layers": measure_layers,
    "attention": measure_attention, "tests": measure_tests, "listops": measure_listops,
}  # fmt: skip


def read(path: Path) -> Rows:
    """All results; a line that was cut by a kill is skipped."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def run(args: argparse.Namespace) -> int:
    """Measures until the slice is over; returns how many items are left."""
    path, begun = args.output / "results.jsonl", args.output / "begun.txt"
    args.output.mkdir(parents=True, exist_ok=True)
    ended = {json.dumps(row["item"], sort_keys=True) for row in read(path)}
    todo = [item for item in items(args) if json.dumps(dataclasses.asdict(item), sort_keys=True) not in ended]
    tries = Counter(begun.read_text().splitlines() if begun.exists() else [])
    args.until, left = time.monotonic() + 60 * args.minutes, len(todo)
    on_gpu = torch.device(args.device).type == "cuda"
    device = torch.cuda.get_device_name(args.device) if on_gpu else "CPU"
    with torch.cuda.device(args.device) if on_gpu else nullcontext():
        for item in tqdm(todo, desc="items", unit="item"):
            if time.monotonic() > args.until:
                break
            if tries[str(item)] < 2 or item.kind == "listops":  # which goes on where it was killed
                with begun.open("a") as file:
                    file.write(f"{item}\n")
                result = attempt(item, args)
            else:
                result = {"remark": "two slices were killed at it"}
            if result is None:
                break
            row = {"item": dataclasses.asdict(item), "device": device, "torch": torch.__version__, **result}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            left -= 1
            if on_gpu:
                torch.cuda.synchronize()  # after an invalid access nothing works but a new process: it ends here
                torch.cuda.empty_cache()
    return left


def attempt(item: Item, args: argparse.Namespace) -> dict[str, Any] | None:
    """A measurement, or the error that prevented it."""
    try:
        return MEASURE[item.kind](item, args)
    except Exception as error:  # a peer may fail in any way it likes, and Triton's errors are not RuntimeErrors
        return {"remark": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def even(ours: dict[float, float], dense: float) -> float | None:
    """The density at which a peer takes as long as dense attention, between those that were measured; None beyond them.

    >>> round(even({0.01: 1.0, 0.04: 4.0}, 2.0), 6)
    0.02
    """
    times = sorted(ours.items())
    for (low, fast), (high, slow) in itertools.pairwise(times):
        if fast <= dense <= slow and fast < slow:
            part = math.log(dense / fast) / math.log(slow / fast)
            return math.exp(math.log(low) + part * math.log(high / low))
    return None


def _cells(row: Row, stage: str) -> list[str]:
    """Milliseconds and memory of a stage, if they are known."""
    values = {form: row.get(f"{stage}_{unit}") for unit, form in (("ms", ".4g"), ("mib", ".3g"))}
    return ["" if value is None else f"{value:{form}}" for form, value in values.items()]


def comparison(kind: str, base: str, stage: str, tokens: int, rows: Rows) -> list[str]:
    """A table of times next to those of dense attention, and the densities at which both take as long."""
    key = f"{stage}_ms"
    dense = next((row[key] for row in rows if row["peer"] == base and key in row), None)
    lines, page, curves = [], list[str](), dict[str, dict[float, float]]()
    for row in (row for row in rows if key in row or "remark" in row):
        ms, mib = _cells(row, stage)
        if ms and row["density"]:
            curves.setdefault(row["peer"], {})[row["density"]] = row[key]
        ratio = f"{dense / row[key]:.3g}" if dense and ms else ""
        lines.append([row["peer"], f"{100 * (row['density'] or 1):.3g}", ms, ratio, mib, row.get("remark", "")])
    names = ["peer", "density, %", "ms", "dense over it", "MiB", "remarks"]
    if lines:
        page += ["", f"## {kind.capitalize()}, {stage}, N = {tokens:,}", "", table(names, lines)]
    for peer, curve in curves.items():
        if dense and (point := even(curve, dense)) is not None:
            page += ["", f"{peer} is even with dense attention at {100 * point:.2g} %."]
    return page


def markdown(results: Rows) -> str:
    kinds = by(({**row["item"], **row} for row in results), "kind")
    page = [f"* {device}" for device in dict.fromkeys(f"{row['device']}, torch {row['torch']}" for row in results)]
    page += [
        f"* {row['peer']}: {row['said']}" for row in kinds.get("contract", []) + kinds.get("tests", []) if "said" in row
    ]
    for kind, base in (("attention", "sdpa"), ("layers", "dense")):
        for tokens, rows in sorted(by(kinds.get(kind, []), "tokens").items()):
            for stage in ("forward", "step"):
                page += comparison(kind, base, stage, tokens, rows)
    listops = [row for row in results if row["item"]["kind"] == "listops"]
    page += ["", *(f"* ListOps: {json.dumps({k: v for k, v in row.items() if k != 'item'})}" for row in listops)]
    return "\n".join(page).rstrip()


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.markdown:
        rows = read(args.output / "results.jsonl")
        if not rows:
            args.fail(f"Expected 'output' to hold results (got none in {args.output}). Leave out --markdown.")
        print(markdown(rows))
        return
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        args.fail("Expected 'device' to be there (got no CUDA). Try it with --device cpu --tokens 128 --seconds 1.")
    with resumable(args.output):
        left = run(args)
    print(f"{left} items are left: run it again." if left else "Nothing is left; --markdown makes the page.")


if __name__ == "__main__":
    main()
