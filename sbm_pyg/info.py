"""Information for bug reports (versions, kernels, devices, a self-test of the kernels).

``python -m sbm_pyg.info`` prints a report as text, or as JSON with ``--json``; the exit status is 1 if the self-test
fails. Not here: benchmarks (``examples/benchmarks``), and the test suite.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch_geometric.typing

from . import __version__, ops
from .ops import cpu, cuda
from .ops.cpu import threads
from .ops.reference import edges as reference_edges
from .ops.reference import sampling as reference_sampling

__all__ = ["collect", "main", "self_test"]

CORE = ("torch", "torch-geometric", "numpy", "networkx", "numba", "llvmlite", "safetensors", "huggingface_hub")
OPTIONAL = ("triton", "torch-sparse", "scipy", "ortools", "matplotlib", "lightning", "torchmetrics", "scikit-learn")
ENVIRONMENT = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
VECTORS = ("avx512f", "avx2", "avx", "sse2", "sve", "neon")
TOLERANCE = 1e-4  # of float32 kernels against float64 formulas, relative to the largest value


def collect(test: bool = True) -> dict[str, Any]:
    """The report as plain data.

    Args:
        test: Also run :func:`self_test`.
    """
    machine = _machine()  # before the self-test adds to the load
    tested = self_test() if test else None  # loads the kernels, whose caches are listed below
    return {
        "versions": {
            "sbm_pyg": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in CORE},
        },
        "machine": machine,
        "kernels": {
            "cpu": "numba" if cpu.INSTALLED else "plain torch",
            "cuda": "triton" if cuda.installed() else "plain torch",
            **_processor(),
        },
        "threads": {
            "torch": torch.get_num_threads(),
            "interop": torch.get_num_interop_threads(),
            "pool": "OpenMP team of torch" if threads._fork_team is not None else "python threads",
            "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            "advice": _advice(machine, torch.get_num_threads()),
        },
        "cuda": {
            "torch": torch.version.cuda,
            "available": torch.cuda.is_available(),
            "devices": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        },
        "optional": {name: _version(name) for name in OPTIONAL} | {"torch-sparse": _torch_sparse()},
        "caches": _caches(),
        "self_test": tested,
    }


def self_test() -> dict[str, Any]:
    """Compare the kernels with their reference in plain torch, on one small problem per device.

    It takes about a second, most of it to load compiled kernels, and some seconds more if they are not cached yet.

    Returns:
        For each device, the verdict and the largest errors relative to the largest value. ``passed`` is True if all
        devices passed.
    """
    start = time.perf_counter()
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    result: dict[str, Any] = {device: _test_device(torch.device(device)) for device in devices}
    passed = all(result[device]["verdict"] == "passed" for device in devices)
    seconds = round(time.perf_counter() - start, 3)
    return {"passed": passed, **result, "seconds": seconds}


def _test_device(device: torch.device) -> dict[str, Any]:
    sample: Any = ops.sample_sbm
    attend: Any = ops.edge_attention
    reference: Any = reference_edges
    random = torch.Generator().manual_seed(0)
    heads, tokens, blocks, channels = 2, 100, 8, 16
    rate, member = (torch.rand(heads, tokens, blocks, generator=random) / 4 for _ in range(2))
    ptr, sequence_ids = torch.tensor([0, 40, tokens]), torch.arange(2)
    law = (rate, member, ptr, ptr, sequence_ids)
    expected = reference_sampling.sample_sbm(*law, 7, "bernoulli", 0.0, False, False)
    rowptr, col = sample(*(tensor.to(device) for tensor in law), 7)
    same = torch.equal(rowptr.cpu(), expected[0]) and torch.equal(col.cpu().long(), expected[1].long())

    graph = (expected[0], expected[1])
    inputs = [torch.randn(heads, tokens, channels, generator=random) for _ in range(3)]
    gate = torch.rand(expected[1].numel(), generator=random) + 0.5
    grad = torch.randn(heads, tokens, channels, generator=random)
    options = (None, channels**-0.5, "score", 0.0, 0)
    wide = [tensor.double() for tensor in (*inputs, gate)]
    out, lse = reference.edge_attention(*wide[:3], *graph, wide[3], *options)
    saved = (*wide[:3], *graph, wide[3], None, out, lse, *options[1:], True, False)
    grads = reference.edge_attention_backward(grad.double(), *saved)[:4]
    leaves = [tensor.to(device).requires_grad_() for tensor in (*inputs, gate)]
    rows = ops.Rows(*(tensor.to(device) for tensor in graph))
    attended, _ = attend(*leaves[:3], rows, leaves[3], *options[1:])
    attended.backward(grad.to(device))
    errors = {"attention": _error(attended, out)}
    errors["gradients"] = max(_error(leaf.grad, expected) for leaf, expected in zip(leaves, grads, strict=True))
    verdict = "passed" if same and max(errors.values()) < TOLERANCE else "FAILED"
    return {"verdict": verdict, "edges": col.numel(), "same_edges": same, **errors}


def _error(result: Any, expected: torch.Tensor) -> float:
    error = float((result.detach().double().cpu() - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


def _machine() -> dict[str, Any]:
    """The system, the cores that this process may use, and the load: how many processes ran in the last minute."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # not on Windows
    return {"system": platform.platform(), "processor": platform.machine(), "cores": cores, "load": load}


def _advice(machine: dict[str, Any], threads: int) -> str | None:
    """Advice on the number of threads, if other processes leave fewer cores than torch has threads."""
    busy, passive = round(machine["load"] or 0), os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    if threads == 1 or passive or busy + threads <= machine["cores"]:
        return None
    return (
        f"{threads} threads and a load of {machine['load'] or 0:.1f} share {machine['cores']} cores: threads that wait "
        "keep a core busy, and a step can take 25 times as long. Run `export OMP_WAIT_POLICY=passive` before you start "
        "Python"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_sparse() -> str | None:
    """Version of torch-sparse if it can be loaded; a build for another torch cannot."""
    return _version("torch-sparse") if torch_geometric.typing.WITH_TORCH_SPARSE else None


def _processor() -> dict[str, Any]:
    """Name of the processor and, if numba is installed, the vector instructions that it compiles for."""
    if not cpu.INSTALLED:
        return {"processor": platform.machine(), "instructions": "unknown"}
    import llvmlite.binding
    from numba.core import config

    chosen = getattr(config, "CPU_FEATURES", None)
    if chosen is not None:
        features = {name[1:] for name in chosen.split(",") if name.startswith("+")}
    else:
        features = {name for name, present in llvmlite.binding.get_host_cpu_features().items() if present}
    name = getattr(config, "CPU_NAME", None) or llvmlite.binding.get_host_cpu_name()
    widest = next((name for name in VECTORS if name in features), "scalar")
    return {"processor": name, "instructions": widest}


def _caches() -> dict[str, Any]:
    """Folders of compiled kernels: the package's own, or the user's cache folder if that is not writable."""
    folders: dict[str, Any] = {}
    for kernel in threads._kernels:
        path = kernel.stats.cache_path
        if path is not None and path not in folders:
            files = [file.stat().st_size for file in Path(path).glob("*.nb?")]
            folders[path] = {"writable": os.access(path, os.W_OK), "files": len(files), "bytes": sum(files)}
    if not folders and cpu.INSTALLED:
        folders["none"] = (
            "no folder is writable, so every process compiles its kernels; set NUMBA_CACHE_DIR to a folder that only "
            "you can write to (the cache holds pickles, which run code when they are loaded)"
        )
    return folders


def _text(value: Any, indent: str = "") -> str:
    """Nested dicts as text, a line for each entry."""
    if not isinstance(value, dict):
        return f" {'none' if value in (None, []) else value}"
    return "".join(f"\n{indent}{name:<18}{_text(entry, f'{indent}  ')}" for name, entry in value.items())


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    description = "Print versions, kernels and devices, and test the kernels."
    parser = argparse.ArgumentParser(prog="python -m sbm_pyg.info", description=description)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-test", action="store_true", help="leave the self-test out")
    chosen = parser.parse_args(arguments)
    info = collect(test=not chosen.no_test)
    print(json.dumps(info, indent=2) if chosen.json else _text(info).lstrip())
    return 0 if info["self_test"] is None or info["self_test"]["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
