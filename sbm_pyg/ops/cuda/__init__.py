"""Triton kernels for CUDA devices, in files named as those of plain torch (:mod:`sbm_pyg.ops.reference`).

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`, on a CUDA device. Triton comes with CUDA builds of
torch and is imported by the first call. A device that Triton cannot compile for takes plain torch, and the CPU samples
its graphs: one older than NVIDIA's Ampere, one of AMD, and any device where Triton is not installed. Each module states
which arguments it leaves to plain torch. docs/kernels.md says which kernels have run on a GPU.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


def installed() -> bool:
    """True if Triton is installed, for NVIDIA's devices; it is not imported."""
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


@cache
def compiles(device: torch.device) -> bool:
    """True if Triton is installed and compiles for this device."""
    return installed() and torch.cuda.get_device_capability(device) >= (8, 0)
