"""The Triton kernels, without a GPU: a quarter of their contract in Triton's interpreter, and what each asks of a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sbm_pyg
from sbm_pyg.ops import cuda, schemas
from sbm_pyg.ops.reference import edges as reference_edges

HERE = Path(__file__).parent
ROOT = Path(sbm_pyg.__file__).parent.parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own; this one's Triton compiles, if torch has imported it."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {**os.environ, "PYTHONPATH": path, **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)


PARTS = 8  # of each file, every eighth test: a minute, so that a busy machine shows that it gets on
EACH_PART = [pytest.param(part, marks=[pytest.mark.long] * (part > 0)) for part in range(PARTS)]  # seven of them weekly


def interpret(file: str, part: int) -> None:
    environment = {"TRITON_INTERPRET": "1", "SBM_PYG_PART": f"{part}/{PARTS}"}
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / file, **environment)
    assert done.returncode == 0, done.stdout


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("part", EACH_PART)
def test_edges_keep_their_contract_in_the_interpreter(part: int) -> None:
    interpret("triton_edges.py", part)


COMPILED = """
import sys
from examples.benchmarks.compile_kernels import compile_all
if "few" in sys.argv:  # the widest, which need most
    rows = [*compile_all([256], ["bfloat16"], [90]), *compile_all([512], ["float64"], [90])]
else:
    rows = [*compile_all([32, 64, 128, 256], ["bfloat16"]), *compile_all([16, 128], ["float32"], [90])]
    rows += compile_all([64, 512], ["float32", "float64"], [90])
print(*sorted({row["kernel"] for row in rows}))
print(*(row for row in rows if row["spilled"]), sep="\\n")
print(*(row for row in rows if row["kernel"] in ("_start_kernel", "_step_kernel", "_panel_sums_kernel", "_join_panels_kernel") and row["fused"]), sep="\\n")
"""
KERNELS = (
    "_block_attention_kernel _block_effect_kernel _block_gains_kernel _block_keys_kernel _block_queries_kernel _count_pieces_kernel _dropout_words_kernel _edge_attention_backward_kernel _edge_attention_kernel _edge_dot_kernel _edge_effect_kernel _entmax_backward_kernel _entmax_kernel _entmax_sums_kernel _gaps_kernel "
    "_gather_kernel _graph_dot_kernel _graph_feature_kernel _graph_sum_kernel _graph_weights_kernel _join_panels_kernel _measure_kernel _merge_kernel _near_kernel _pairs_kernel _panel_sums_kernel _plan_kernel _proposals_kernel _sample_queries_kernel _shared_kernel _start_kernel _step_kernel _weigh_kernel"
)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("asked", ["few", pytest.param("all", marks=pytest.mark.long)])
def test_no_kernel_spills_registers(asked: str, tmp_path: Path) -> None:
    """At the default sizes of blocks, on one or three kinds of GPU. And probes round as often as on the CPU."""
    done = run("-W", "error:TRITON", "-c", COMPILED, asked, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == KERNELS


@pytest.mark.parametrize("name", [name for name, (_, kernels) in schemas.KERNELS.items() if "cuda" in kernels])
def test_every_kernel_is_registered(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sbm_pyg::{name}", "CUDA")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sbm_pyg::{name}", "CPU")


@pytest.mark.parametrize(
    ("capability", "installed", "hip"), [((7, 5), True, None), ((9, 0), False, None), ((9, 4), True, "7.1")]
)
def test_devices_that_triton_does_not_serve_take_the_reference(
    capability: tuple[int, int], installed: bool, hip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    cuda.compiles.cache_clear()
    x, rows = torch.ones(1, 2, 3), (torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]))
    try:
        assert schemas._on_cuda("edge_dot", "edges", reference_edges.edge_dot)(x, x, *rows).tolist() == [3, 3, 3]
    finally:
        cuda.compiles.cache_clear()


@needs_triton
@pytest.mark.parametrize(("setting", "precision"), [("tf32", "tf32"), ("ieee", "ieee"), ("none", "ieee")])
def test_products_are_as_exact_as_torch_is_told(setting: str, precision: str) -> None:
    """By its newer setting, beside which torch refuses to read the older one."""
    from examples.benchmarks.compile_kernels import started
    from sbm_pyg.ops.cuda import blocks as cuda_blocks

    told = torch.backends.cuda.matmul
    x, graph, ptr = torch.zeros(1, 16, 8), (torch.tensor([0, 1]), torch.tensor([0])), torch.tensor([0, 16])
    before, told.fp32_precision = told.fp32_precision, setting
    try:
        ((_, _, options),) = started(
            lambda: cuda_blocks.block_attention(x, x, x, *graph, ptr, ptr, 16, False, None, 1.0)
        )
    finally:
        told.fp32_precision = before
    assert options["PRECISION"] == precision


@needs_triton
@pytest.mark.parametrize("block_size", [64, 2048, 8192])
def test_effects_of_large_blocks_fit_a_multiprocessor(block_size: int) -> None:
    """Which has 65,536 registers, and takes 32 warps of one program."""
    from examples.benchmarks.compile_kernels import started
    from sbm_pyg.ops.cuda import blocks as cuda_blocks

    x, graph, ptr = (
        torch.zeros(1, block_size, 8), (torch.tensor([0, 1]), torch.tensor([0]), None), torch.tensor([0, block_size]),
    )  # fmt: skip
    *_, (_, _, options) = started(
        lambda: cuda_blocks.block_effect(x, x, x, x, *graph, *graph, ptr, ptr, block_size, False, 1.0)
    )
    assert options["num_warps"] <= 32
    assert 32 * options["num_warps"] * options["maxnreg"] <= 65_536


@needs_triton
@pytest.mark.parametrize("count", [5, 6, 8])
def test_kernels_are_compiled_once_for_any_number_of_edges(count: int) -> None:
    """Triton compiles anew for what does not begin at a multiple of 16 bytes."""
    from examples.benchmarks.compile_kernels import started
    from sbm_pyg.ops.cuda import edges as cuda_edges
    from sbm_pyg.ops.cuda import effects as cuda_effects

    x, lse, chance = torch.zeros(1, 8, 8), torch.zeros(1, 8), torch.zeros(8)
    ptr, col = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, count]), torch.arange(count)

    def call() -> None:
        cuda_edges.edge_attention_backward(x, x, x, x, ptr, col, None, None, x, lse, 1.0, "score", 0.0, 0, False, False)
        cuda_effects.edge_effect(x, x, x, x, ptr, col, None, ptr, col, None, 1.0, x, x, chance, 0.0)

    for _, arguments, _ in started(call):
        assert all(given.data_ptr() % 16 == 0 for given in arguments if isinstance(given, torch.Tensor))
