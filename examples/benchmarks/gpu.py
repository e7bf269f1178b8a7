"""Everything that is to be known of a GPU, in slices of some minutes: run it again until it says that nothing is left.

python -m examples.benchmarks.gpu                             tests, sizes of tiles, attention, layers and ListOps; nine minutes of them
python -m examples.benchmarks.gpu --only attention --tokens 4096 --densities 1 5
python -m examples.benchmarks.gpu --markdown                  tables of what is there

Tests come first: what computes otherwise than on the CPU is not worth timing. Each peer of attention must then give the results of
plain torch in float64 on a few tokens, or it is not timed. Whatever ends, or fails, adds a line of JSON to results.jsonl in the output
folder, and is not run again; delete the line to have it once more. A slice that is killed loses the item it was at, and what two
slices were killed at is given up. `--device cpu` tries all of it without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

KINDS = ("tests", "tuning", "attention", "layers", "listops")
ATTENTION = ("sdpa", "varlen", "flex", "edges", "blocks", "sparse", "pyg", "pyg-compiled")
LAYERS = ("dense", "tokens", "tiles", "blocks", "sampling")
DENSE = ("sdpa", "varlen", "dense")
TILES = tuple(itertools.product((1024, 2048, 4096), (1, 2, 4)))
"""Words of the tiles that a program of an edge kernel holds, and its warps."""
ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/test_devices.py", "tests/triton_edges.py", "tests/triton_graphs.py")


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing to measure; a density of 0 stands for all pairs, or for what has no density."""

    kind: str
    peer: str
    tokens: int = 0
    density: float = 0.0
    dtype: str = ""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m examples.benchmarks.gpu", description=__doc__, formatter_class=formatter
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=[*KINDS], help="(default: all)")
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    words = "after which nothing new begins, and ListOps stops (default: %(default)s)"
    parser.add_argument("--minutes", type=float, default=9.0, metavar="M", help=words)
    tokens = [2**n for n in range(10, 18)]
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens, metavar="N", help="(default: 2^10 .. 2^17)")
    densities = [0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0]
    words = f"(default: {' '.join(f'{x:g}' for x in densities)})"
    parser.add_argument("--densities", type=float, nargs="+", default=densities, metavar="PERCENT", help=words)
    words = "keys of a query, beside the densities (default: %(default)s)"
    parser.add_argument("--degrees", type=int, nargs="*", default=[256], metavar="D", help=words)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="(default: %(default)s)"
    )
    parser.add_argument("--heads", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--channels", type=int, default=32, help="of a head (default: %(default)s)")
    parser.add_argument("--grain", type=int, default=64, help="tokens of a block (default: %(default)s)")
    parser.add_argument(
        "--peers", nargs="+", choices=(*ATTENTION, *LAYERS), default=[*ATTENTION, *LAYERS], help="(default: all)"
    )
    words = "what takes longer for one call is not timed (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help=words)
    parser.add_argument("--steps", type=int, help="of ListOps (default: those of the preset `paper`)")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="measure nothing")
    given = parser.parse_args(arguments)
    for name in ("minutes", "heads", "channels", "grain", "seconds", "steps"):
        value = getattr(given, name)
        if value is not None and value <= 0:
            parser.error(f"Expected '{name}' to be above 0 (got {value}). See --help.")
    if min(given.tokens) < given.grain or any(count % given.grain for count in given.tokens):
        parser.error(f"Expected 'tokens' to be multiples of the grain, {given.grain} (got {given.tokens}).")
    if not 0 < min(given.densities) <= max(given.densities) <= 100 or min([1, *given.degrees]) < 1:
        parser.error("Expected 'densities' in (0, 100] percent and 'degrees' of at least 1 (got others).")
    given.fail = parser.error
    return given


def items(given: argparse.Namespace) -> Iterator[Item]:
    """What is to be measured, in the order in which it is worth most."""
    if "tests" in given.only:
        yield from (Item("tests", name) for name in TESTS if (ROOT / name).is_file())
    if "tuning" in given.only and given.device.startswith("cuda"):  # the CPU's kernels have no tiles
        tokens = min(given.tokens, key=lambda count: abs(count - 2**14))
        for (words, warps), density in itertools.product(TILES, (0.01, 0.05)):
            yield Item("tuning", f"{words} words, {warps} warps", tokens, density, given.dtype)
    for tokens in given.tokens:
        shares = sorted({x / 100 for x in given.densities} | {d / tokens for d in given.degrees if d < tokens})
        for kind, peers in (("attention", ATTENTION), ("layers", LAYERS)):
            if kind in given.only:
                for peer, density in itertools.product(peers, shares):
                    if peer in given.peers and (peer not in DENSE or density == shares[0]):
                        yield Item(kind, peer, tokens, 0.0 if peer in DENSE else density, given.dtype)
    if "listops" in given.only:
        yield Item("listops", "paper")


# ------------------------------------------------------------------ attention


class Inputs:
    """Tokens of all heads, and a graph whose rows have equal numbers of random keys, or of random blocks of keys.

    Every device gets the same; a graph is made where it is used, since the CPU takes minutes for some hundred million edges.
    """

    def __init__(self, given: argparse.Namespace, tokens: int, density: float, dtype: str, in_blocks: bool) -> None:
        import torch

        from sbm_pyg import BlockGraph, patterns

        random = torch.Generator().manual_seed(0)
        shape = (given.heads, tokens, given.channels)
        self.query, self.key, self.value, self.grad = (
            torch.randn(shape, generator=random).to(given.device, getattr(torch, dtype)) for _ in range(4)
        )
        self.scale, self.grain = given.channels**-0.5, given.grain
        count = tokens // given.grain if in_blocks else tokens
        degree = max(1, round(density * count))
        graph = patterns.random(count, degree, heads=given.heads, seed=0, device=given.device)
        self.graph = (BlockGraph(graph, given.grain) if in_blocks else graph).to(given.device)

    @property
    def leaves(self) -> list[Any]:
        """Query, key and value, which get gradients."""
        return [x.requires_grad_() for x in (self.query, self.key, self.value)]


Forward = Callable[..., Any]  # from query, key and value to the output, all [H, N, C]


def _sdpa(inputs: Inputs) -> Forward:
    from torch.nn.functional import scaled_dot_product_attention

    attend: Any = scaled_dot_product_attention
    return lambda *leaves: attend(*(x[None] for x in leaves), scale=inputs.scale)[0]


def _varlen(inputs: Inputs) -> Forward:
    """All heads as heads of one sequence."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    attend: Any = varlen_attn
    count = inputs.query.size(1)
    ends = torch.tensor([0, count], dtype=torch.int32, device=inputs.query.device)

    def forward(*leaves: Any) -> Any:
        parts = (x.transpose(0, 1).contiguous() for x in leaves)
        return attend(*parts, ends, ends, count, count, scale=inputs.scale).transpose(0, 1)

    return forward


def _flex(inputs: Inputs) -> Forward:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    graph: Any = inputs.graph
    mask, device = graph.to_block_mask(), inputs.query.device
    attend: Any = torch.compile(flex_attention) if device.type == "cuda" else flex_attention
    return lambda *leaves: attend(*(x[None] for x in leaves), block_mask=mask, scale=inputs.scale)[0]


def _edges(inputs: Inputs) -> Forward:
    from sbm_pyg import ops

    graph = inputs.graph
    return lambda query, key, value: ops.edge_attention(query, key, value, graph.rows, scale=inputs.scale)[0]


def _blocks(inputs: Inputs) -> Forward:
    from sbm_pyg import ops

    graph = inputs.graph
    blocks, ptrs = graph.blocks, (graph.query_ptr, graph.key_ptr)
    return lambda query, key, value: ops.block_attention(
        query, key, value, blocks.rows, ptrs, inputs.grain, scale=inputs.scale
    )[0]


def _sparse(inputs: Inputs) -> Forward:
    """torch's own sparse softmax and product, in coordinates."""
    import torch

    heads, count, _ = inputs.query.shape
    row, col = inputs.graph.edge_row, inputs.graph.col.long()
    index = torch.stack([row, col + row // count * count])

    def forward(query: Any, key: Any, value: Any) -> Any:
        flat = [x.flatten(0, 1) for x in (query, key, value)]
        score = (flat[0][index[0]] * flat[1][index[1]]).sum(1) * inputs.scale
        weight = torch.sparse.softmax(
            torch.sparse_coo_tensor(index, score, (heads * count,) * 2, is_coalesced=True, check_invariants=False), 1
        )
        return torch.sparse.mm(weight, flat[2]).view_as(value)

    return forward


def _pyg(inputs: Inputs, compiled: bool = False) -> Forward:
    import torch

    from examples.benchmarks.kernels import Propagate

    count = inputs.query.size(1)
    row, col = inputs.graph.edge_row, inputs.graph.col.long()
    index = torch.stack([col + row // count * count, row])
    module: Any = Propagate(inputs.query.size(2))
    module = torch.compile(module) if compiled else module
    gate = inputs.query.new_ones(row.numel())
    return lambda *leaves: module(index, *(x.flatten(0, 1) for x in leaves), gate).view_as(leaves[0])


BUILD: dict[str, Callable[[Inputs], Forward]] = {
    "sdpa": _sdpa, "varlen": _varlen, "flex": _flex, "edges": _edges, "blocks": _blocks, "sparse": _sparse, "pyg": _pyg,
    "pyg-compiled": lambda inputs: _pyg(inputs, compiled=True),
}  # fmt: skip
OVER_BLOCKS = ("flex", "blocks")


def _step(forward: Forward, inputs: Inputs) -> list[Any]:
    """Output, and gradients of query, key and value."""
    import torch

    leaves = inputs.leaves
    out = forward(*leaves)
    return [out, *torch.autograd.grad(out, leaves, inputs.grad)]


@cache
def _check(words: str, peer: str) -> float:
    """Largest error of output and gradients over a few tokens, relative to the largest value of plain torch in float64."""
    import torch

    given = argparse.Namespace(**json.loads(words))
    inputs = Inputs(given, 8 * given.grain, 0.0 if peer in DENSE else 0.3, given.dtype, peer in OVER_BLOCKS)
    found = [x.detach().double().cpu() for x in _step(BUILD[peer](inputs), inputs)]
    query, key, value = (x.detach().double().cpu().requires_grad_() for x in inputs.leaves)
    kept = torch.ones(1, 1, dtype=torch.bool) if peer in DENSE else inputs.graph.to("cpu").to_dense()
    weight = (query @ key.mT * inputs.scale).masked_fill(~kept, -torch.inf).softmax(-1)
    out = weight @ value
    true = [out.detach(), *torch.autograd.grad(out, (query, key, value), inputs.grad.double().cpu())]
    error = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, true, strict=True))
    limit = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}[given.dtype]
    if not error <= limit:
        raise ValueError(f"Expected results within {limit:g} of plain torch in float64 (got {error:.2g}).")
    return error


def measure_attention(item: Item, given: argparse.Namespace) -> dict[str, Any]:
    """Times and memory of a peer, forward and with all gradients, after its check."""
    import torch

    words = {name: getattr(given, name) for name in ("heads", "channels", "grain", "device")} | {"dtype": item.dtype}
    error = _check(json.dumps(words), item.peer)
    inputs = Inputs(given, item.tokens, item.density, item.dtype, item.peer in OVER_BLOCKS)
    forward = BUILD[item.peer](inputs)

    def infer() -> None:
        with torch.no_grad():
            forward(inputs.query, inputs.key, inputs.value)

    calls = {"forward": infer, "step": lambda: _step(forward, inputs)}
    return {"error": error, "edges": inputs.graph.num_edges} | measure_calls(calls, given)


def measure_tuning(item: Item, given: argparse.Namespace) -> dict[str, Any]:
    """The same of our edge kernels with tiles of another size, given as "2048 words, 1 warps"."""
    from sbm_pyg.ops.cuda import rows as cuda_rows

    words, _, warps, _ = item.peer.split()
    default = cuda_rows.TILE_WORDS, cuda_rows.TILE_WARPS
    cuda_rows.TILE_WORDS, cuda_rows.TILE_WARPS = int(words), int(warps)
    _check.cache_clear()  # of each size
    try:
        return measure_attention(dataclasses.replace(item, peer="edges"), given)
    finally:
        cuda_rows.TILE_WORDS, cuda_rows.TILE_WARPS = default


def measure_calls(calls: dict[str, Callable[[], Any]], given: argparse.Namespace) -> dict[str, Any]:
    """Median milliseconds of each call, and the memory that the last one needs beyond what was there, in MiB."""
    import torch
    from torch.utils.benchmark import Timer

    found: dict[str, Any] = {}
    on_gpu = torch.device(given.device).type == "cuda"
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
            found[f"{name}_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        if (took := time.perf_counter() - start) > given.seconds:
            found |= {f"{name}_ms": 1e3 * took, "remark": f"{name} timed once"}
            continue
        timed = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        measured = timed.blocked_autorange(min_run_time=min(0.5, given.seconds))
        found |= {f"{name}_ms": 1e3 * measured.median, f"{name}_iqr_ms": 1e3 * measured.iqr}
    return found


# ------------------------------------------------------------------ layers, tests and ListOps


def measure_layers(item: Item, given: argparse.Namespace) -> dict[str, Any]:
    """A training step of a whole layer: projections, block model, sampling, attention, and gradients to everything."""
    import torch

    from sbm_pyg import FullAttention, SBMAttentionConv, Tokens

    torch.manual_seed(0)
    width, ptr = given.heads * given.channels, torch.tensor([0, item.tokens])
    layer: torch.nn.Module
    if item.peer == "dense":
        layer = FullAttention(width, given.channels, given.heads)
    else:
        grain = given.grain if item.peer == "blocks" else 1
        layer = SBMAttentionConv(
            width, given.channels, given.heads, sbm_options={"initial_density": item.density}, exploration=0.0, grain=grain,
            tiled=item.peer == "tiles",
        )  # fmt: skip
    layer.to(given.device)
    kind = torch.device(given.device).type
    x = torch.randn(item.tokens, width, device=given.device, requires_grad=True)
    half = torch.autocast(kind, getattr(torch, item.dtype), enabled=item.dtype != "float32")

    def infer() -> None:
        with torch.no_grad(), half:
            layer(x, ptr=ptr)

    def step() -> None:
        layer.zero_grad()
        with half:
            out = layer(x, ptr=ptr)
        out.float().square().mean().backward()

    if item.peer != "sampling":
        return measure_calls({"forward": infer, "step": step}, given)
    with torch.no_grad():
        source: Any = layer.source
        query, key = (torch.randn(given.heads, item.tokens, given.channels, device=given.device) for _ in range(2))
        ends = ptr.to(given.device)
        return measure_calls({"forward": lambda: source(Tokens(query, key, ends, bipartite=False))}, given)


def measure_tests(item: Item, given: argparse.Namespace) -> dict[str, Any]:
    """What pytest says of a file of tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", item.peer]
    if find_spec("xdist"):  # most of the time goes into compiling kernels
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"passed": done.returncode == 0, "said": lines[-1], "failed": failed[:50]}


def measure_listops(item: Item, given: argparse.Namespace) -> dict[str, Any] | None:
    """ListOps with the settings of the paper, for as long as the slice lasts; None where it is to go on in the next one."""
    folder = given.output / "listops"
    command = [sys.executable, "-m", "examples.lra", "train", "--output", str(folder.resolve())]
    if (folder / "settings.json").exists():
        command += ["--resume"]
    else:
        command += ["--task", "listops", "--preset", item.peer, "--accelerator", str(given.device).partition(":")[0]]
        command += [] if given.steps is None else ["--steps", str(given.steps)]
    try:
        done = subprocess.run(command, cwd=ROOT, check=False, timeout=max(30.0, given.until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None  # what it has saved is where the next slice goes on
    from examples.common.runs import read_record

    result = folder / "results.json"
    if done.returncode or not result.exists():
        return {"remark": f"the trainer ended with {done.returncode}: see {folder}"}
    return read_record(result)


MEASURE: dict[str, Callable[[Item, argparse.Namespace], dict[str, Any] | None]] = {
    "tests": measure_tests, "tuning": measure_tuning, "attention": measure_attention, "layers": measure_layers,
    "listops": measure_listops,
}  # fmt: skip


# ------------------------------------------------------------------ slices and tables


def read(path: Path) -> list[dict[str, Any]]:
    """All results; a line that was cut by a kill counts as none."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def run(given: argparse.Namespace) -> int:
    """Measures until the slice is over; returns how many items are left."""
    import torch

    from sbm_pyg.info import tqdm

    path, begun = given.output / "results.jsonl", given.output / "begun.txt"
    given.output.mkdir(parents=True, exist_ok=True)
    ended = {json.dumps(row["item"], sort_keys=True) for row in read(path)}
    todo = [item for item in items(given) if json.dumps(dataclasses.asdict(item), sort_keys=True) not in ended]
    tries = Counter(begun.read_text().splitlines() if begun.exists() else [])
    given.until, left = time.monotonic() + 60 * given.minutes, len(todo)
    on_gpu = torch.device(given.device).type == "cuda"
    device = torch.cuda.get_device_name(given.device) if on_gpu else "CPU"
    with torch.cuda.device(given.device) if on_gpu else nullcontext():
        for item in tqdm(todo, desc="items", unit="item"):
            if time.monotonic() > given.until:
                break
            if tries[str(item)] < 2 or item.kind == "listops":  # which goes on where it was killed
                with begun.open("a") as file:
                    file.write(f"{item}\n")
                found = attempt(item, given)
            else:
                found = {"remark": "two slices were killed at it"}
            if found is None:
                break
            row = {"item": dataclasses.asdict(item), "device": device, "torch": torch.__version__, **found}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            left -= 1
            if on_gpu:
                torch.cuda.synchronize()  # after an invalid access nothing works but a new process: it ends here
                torch.cuda.empty_cache()
    return left


def attempt(item: Item, given: argparse.Namespace) -> dict[str, Any] | None:
    """What was measured, or why nothing was."""
    try:
        return MEASURE[item.kind](item, given)
    except Exception as error:  # a peer may fail in any way it likes, and Triton's errors are no RuntimeErrors
        return {"remark": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def even(ours: dict[float, float], dense: float) -> float | None:
    """The density at which a peer takes as long as dense attention, between those that were measured; None beyond them.

    >>> round(even({0.01: 1.0, 0.04: 4.0}, 2.0), 6)
    0.02
    """
    known = sorted(ours.items())
    for (low, fast), (high, slow) in itertools.pairwise(known):
        if fast <= dense <= slow and fast < slow:
            part = math.log(dense / fast) / math.log(slow / fast)
            return math.exp(math.log(low) + part * math.log(high / low))
    return None


def tuning(rows: list[dict[str, Any]]) -> list[str]:
    """A table of the sizes of tiles."""
    from examples.benchmarks.tables import markdown as table

    lines = []
    for row in rows:
        took = (f"{row[name]:.4g}" if name in row else "" for name in ("forward_ms", "step_ms"))
        lines.append([row["item"]["peer"], f"{100 * row['item']['density']:g}", *took, row.get("remark", "")])
    names = ["tiles", "density, %", "forward, ms", "step, ms", "remarks"]
    return ["", f"## Sizes of tiles, N = {rows[0]['item']['tokens']:,}", "", table(names, lines)] if rows else []


def markdown(rows: list[dict[str, Any]]) -> str:
    """Tables of times over those of dense attention, where both are even, and what tests and ListOps came to."""
    from examples.benchmarks.tables import markdown as table

    page = [f"* {device}" for device in dict.fromkeys(f"{row['device']}, torch {row['torch']}" for row in rows)]
    page += [
        f"* {row['item']['peer']}: {row['said']}" for row in rows if row["item"]["kind"] == "tests" and "said" in row
    ]
    page += tuning([row for row in rows if row["item"]["kind"] == "tuning"])
    for kind, base in (("attention", "sdpa"), ("layers", "dense")):
        mine = [row for row in rows if row["item"]["kind"] == kind]
        for tokens in sorted({row["item"]["tokens"] for row in mine}):
            some = [row for row in mine if row["item"]["tokens"] == tokens]
            for stage in ("forward", "step"):
                dense = next(
                    (row[f"{stage}_ms"] for row in some if row["item"]["peer"] == base and f"{stage}_ms" in row), None
                )
                lines, curves = [], dict[str, dict[float, float]]()
                for row in some:
                    peer, density, took = row["item"]["peer"], row["item"]["density"], row.get(f"{stage}_ms")
                    if took is not None and density:
                        curves.setdefault(peer, {})[density] = took
                    if took is None and "remark" not in row:
                        continue
                    ratio = f"{dense / took:.3g}" if dense and took else ""
                    memory = f"{row[f'{stage}_mib']:.3g}" if f"{stage}_mib" in row else ""
                    cells = [peer, f"{100 * (density or 1):.3g}", "" if took is None else f"{took:.4g}", ratio, memory]
                    lines.append([*cells, row.get("remark", "")])
                names = ["peer", "density, %", "ms", "dense over it", "MiB", "remarks"]
                page += (
                    ["", f"## {kind.capitalize()}, {stage}, N = {tokens:,}", "", table(names, lines)] if lines else []
                )
                for peer, curve in curves.items():
                    if dense and (point := even(curve, dense)) is not None:
                        page += ["", f"{peer} is even with dense attention at {100 * point:.2g} %."]
    page += [
        "",
        *(
            f"* ListOps: {json.dumps({k: v for k, v in row.items() if k != 'item'})}"
            for row in rows
            if row["item"]["kind"] == "listops"
        ),
    ]
    return "\n".join(page).rstrip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures a slice, or makes the page."""
    given = parse(arguments)
    if given.markdown:
        rows = read(given.output / "results.jsonl")
        if not rows:
            given.fail(f"Expected 'output' to hold results (got none in {given.output}). Leave out --markdown.")
        print(markdown(rows))
        return
    import torch

    if torch.device(given.device).type == "cuda" and not torch.cuda.is_available():
        given.fail("Expected 'device' to be there (got no CUDA). Try it with --device cpu --tokens 128 --seconds 1.")
    left = run(given)
    print(f"{left} items are left: run it again." if left else "Nothing is left; --markdown makes the page.")


if __name__ == "__main__":
    main()
