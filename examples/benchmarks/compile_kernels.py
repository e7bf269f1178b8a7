"""Compiles every Triton kernel for NVIDIA GPUs, on any machine, and shows the registers and the memory that each needs.

python -m examples.benchmarks.compile_kernels                 a table in Markdown, as in docs/kernels/registers.csv
python -m examples.benchmarks.compile_kernels --json FILE     the same as JSON, one row per kernel, width and GPU

Kernels are compiled as the ops start them: each op is called on tensors of the CPU, and the kernels that it would have started are
compiled instead. So block sizes are those of a GPU. Exit status 1 if a kernel spills registers.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from examples.common.command import Command
from examples.common.runs import write_text
from examples.common.tables import Rows, markdown
from sbm_pyg.ops.cuda import blocks as cuda_blocks
from sbm_pyg.ops.cuda import edges as cuda_edges
from sbm_pyg.ops.cuda import effects as cuda_effects
from sbm_pyg.ops.cuda import entmax as cuda_entmax
from sbm_pyg.ops.cuda import graph_attention as cuda_graph_attention
from sbm_pyg.ops.cuda import rows as cuda_rows
from sbm_pyg.ops.cuda import sampling as cuda_sampling
from sbm_pyg.ops.cuda import systematic as cuda_systematic

TARGETS = (80, 90, 100)
WIDTHS = (16, 32, 64, 100, 128, 256)
LENGTHS = (64, 1024)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def with_long_rows(calls: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Calls, and the same with some rows that are so long that several programs share them."""

    def shared(call: Callable[[], Any]) -> None:
        with patch.object(cuda_rows, "MAX_EDGES_PER_PROGRAM", 4):
            call()

    return calls | {f"{name}, long rows": partial(shared, call) for name, call in calls.items()}


def ops(width: int, dtype: torch.dtype, col: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Calls that start every kernel, with everything that it can take."""
    x, edges, rows = torch.zeros(2, 4, width, dtype=dtype), torch.zeros(6, dtype=dtype), torch.arange(9) * 6 // 8
    graph, lse = (rows, torch.arange(6).to(col) % 4), torch.zeros(2, 4, dtype=cuda_rows.accumulate_dtype(x))

    def attention(form: str) -> None:
        cuda_edges.edge_attention(x, x, x, *graph, edges, edges, 0.5, form, 0.1, 1)
        cuda_edges.edge_attention_backward(x, x, x, x, *graph, edges, edges, x, lse, 0.5, form, 0.1, 1, True, True)

    def with_features() -> None:
        tokens, features, numbers = x.transpose(0, 1), edges[:, None].expand(-1, width), edges[:, None].expand(-1, 2)
        alone = torch.arange(5) * 6 // 4, graph[1]  # the rows of all heads
        out, mean, weight = cuda_graph_attention.graph_attention(
            tokens, tokens, tokens, tokens, features, numbers, numbers, *alone, 0.5
        )
        cuda_graph_attention.graph_attention_backward(
            out, mean, weight, tokens, tokens, tokens, tokens, features, numbers, *alone, weight, 0.5, True
        )

    def over_blocks(block_size: int, biased: bool, dropout: float) -> None:
        tokens, ptr = torch.zeros(2, 4 * block_size, width, dtype=dtype), torch.tensor([0, 4 * block_size])
        bias = torch.zeros(6, block_size, block_size, dtype=dtype) if biased else None
        operands = (*graph, ptr, ptr, block_size, True, bias, 0.5, dropout, 1)
        out, sums = cuda_blocks.block_attention(tokens, tokens, tokens, *operands)
        layout, options = (*graph, ptr, ptr, bias, out, sums), (block_size, True, 0.5, dropout, 1, biased)
        cuda_blocks.block_attention_backward(tokens, tokens, tokens, tokens, *layout, *options)
        sets = *graph, bias, *graph, bias
        cuda_blocks.block_effect(tokens, tokens, tokens, tokens, *sets, ptr, ptr, block_size, True, 0.5)

    def sampling(method: str, is_causal: bool, row_group: int = 1) -> None:
        ptr = torch.tensor([0, 4])
        cuda_sampling.sample_sbm(x, x, ptr, ptr, ptr[:1], 1, method, 0.1, True, is_causal, row_group)

    first = x[0, :, 0].contiguous()
    over_edges = {
        "edge_dot": lambda: cuda_edges.edge_dot(x, x, *graph),
        "edge_dot, backward": lambda: cuda_edges.edge_dot_backward(edges, x, x, *graph, True, True),
        "edge_attention, score": lambda: attention("score"),
        "edge_attention, weight": lambda: attention("weight"),
        "graph_attention": with_features,
        "edge_effect": lambda: cuda_effects.edge_effect(
            x, x, x, x, *graph, edges, *graph, edges, 0.5, x, x, first, 0.1
        ),
        "weigh_effect": lambda: cuda_effects.weigh_effect(edges, edges, rows, first, edges > 0, 0.1, True),
    }
    return with_long_rows(over_edges) | {
        "block_attention": lambda: over_blocks(64, False, 0.0),
        "block_attention, biased": lambda: over_blocks(64, True, 0.1),
        "sample_sbm": lambda: sampling("bernoulli", True),
        "sample_sbm, fastrg": lambda: sampling("fastrg", False),
        "sample_sbm, shared": lambda: sampling("bernoulli", True, 16),
    }


def row_ops(length: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """The same for kernels over rows of numbers of such a length, which have no channels."""
    x, rows = torch.zeros(1, length, dtype=dtype), torch.tensor([0, length])
    alpha, ptr = torch.ones(1, 1, dtype=torch.float64), torch.tensor([0, 0])  # no counts: none are computed
    over_rows = {
        "segment_entmax": lambda: cuda_entmax.segment_entmax(x, rows, alpha),
        "segment_entmax, backward": lambda: cuda_entmax.segment_entmax_backward(x, x, rows, alpha, True),
    }
    return with_long_rows(over_rows) | {
        "sample_queries": lambda: cuda_systematic.sample_queries(rows, rows[:1], length, 0.5, 1),
        "sample_systematic": lambda: cuda_systematic.sample_systematic(x[0, :0], ptr, ptr, rows[:1], 2, 1, True),
    }


def started(call: Callable[[], Any]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The kernels that a call starts, with their arguments; none runs."""
    launches = []

    def record(program: Any, count: Any, *arguments: Any, **options: Any) -> None:
        launches.append((program, arguments, options))

    with ExitStack() as changed:
        for module in [*sys.modules.values()]:
            if vars(module).get("launch") is cuda_rows.launch and module is not cuda_rows:
                changed.enter_context(patch.object(module, "launch", record))
        changed.enter_context(patch.object(cuda_rows, "launch", record))
        call()
    return launches


def absent(target: int) -> Any:
    """Stands where Triton looks for a GPU: one of a kind, whose number is its compute capability."""
    return SimpleNamespace(
        get_current_device=lambda: target,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", target, 32),
    )


def compiled(program: Any, arguments: tuple[Any, ...], options: dict[str, Any], target: int) -> Any:
    """A kernel as Triton compiles it for these arguments when it is first started on such a GPU."""
    triton.runtime.driver.set_active(absent(target))
    return program.warmup(*arguments, grid=(1,), **cuda_rows.LAUNCH_OPTIONS | options)


def usage(binary: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack, which is where registers spill to; by the tool that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text.stdout)}


def compile_all(
    widths: Sequence[int] = WIDTHS, dtypes: Sequence[str] = ("bfloat16",), targets: Sequence[int] = TARGETS
) -> Rows:
    """One row for each kernel, way to call it, width, type and GPU; a kernel without channels has its rows' length."""
    rows: Rows = []
    for dtype in dtypes:
        of_width = [(width, ops(width, DTYPES[dtype], torch.int32)) for width in widths]
        for width, calls in (*of_width, *((length, row_ops(length, DTYPES[dtype])) for length in LENGTHS)):
            for (op, call), target in product(calls.items(), targets):
                for program, arguments, options in started(call):
                    made = compiled(program, arguments, options, target)
                    used = usage(made.asm["cubin"])
                    rows.append({
                        "op": op, "kernel": program.__name__, "dtype": dtype, "width": width, "target": target,
                        "edges": options.get("EDGES", options.get("TOKENS", "")), "warps": options["num_warps"], "registers": used["REG"],
                        "shared": made.metadata.shared, "spilled": used["STACK"] + used["LOCAL"],
                        "fused": made.asm["ptx"].count("fma.rn.f64"),
                    })  # fmt: skip
    return rows


def table(rows: Rows) -> str:
    """A line for each kernel and width, the most that any way to call it takes; widths that take the same share one."""
    targets = sorted({row["target"] for row in rows})
    resources: dict[tuple[Any, ...], dict[int, list[tuple[int, ...]]]] = {}
    for row in rows:
        case = (f"`{row['kernel']}`", row["dtype"], row["edges"], row["warps"], row["width"])
        usage = (row["registers"], row["shared"], row["spilled"])
        resources.setdefault(case, {}).setdefault(row["target"], []).append(usage)
    lines: dict[tuple[Any, ...], list[int]] = {}
    for (*which, width), of in resources.items():
        most = (", ".join(str(max(x)) for x in zip(*of[target], strict=True)) for target in targets)
        lines.setdefault((*which, *most), []).append(width)
    names = ("kernel", "type", "width", "edges", "warps", *(f"sm_{target}" for target in targets))
    shown = ((*line[:2], ", ".join(map(str, widths)), *line[2:]) for line, widths in lines.items())
    return markdown(names, shown)


def main(arguments: Sequence[str] | None = None) -> int:
    command = Command("python -m examples.benchmarks.compile_kernels", __doc__)
    command.option("widths", [*WIDTHS], "channels")
    command.option("dtypes", ["bfloat16"], choices=DTYPES)
    command.option("targets", [*TARGETS], "GPUs")
    command.add_argument("--json", type=Path, metavar="FILE", help="also write all rows there")
    options = command.read(arguments)
    rows = compile_all(options.widths, options.dtypes, options.targets)
    if options.json:
        write_text(options.json, json.dumps(rows))
    print(table(rows))
    return int(any(row["spilled"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
