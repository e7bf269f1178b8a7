"""The CUDA kernels, under the names of the ops they implement.

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`, on a CUDA device. Kernels are written in Triton, which
comes with CUDA builds of torch. It is imported with the first call, never before. What it cannot compile for takes the
reference: a device before NVIDIA's Ampere, AMD's, and any where Triton is not installed. The modules of the kernels say
which arguments they leave to the reference. No kernel here has run on a GPU yet (docs/kernels.md).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import blocks, reference, sampled, samplers

MODULES = {
    "block_attention": "cuda_blocks",
    "block_attention_backward": "cuda_blocks",
    "block_effect": "cuda_blocks",
    "block_weight": "cuda_blocks",
    "edge_attention": "cuda_edges",
    "edge_attention_backward": "cuda_edges",
    "edge_dot": "cuda_edges",
    "edge_dot_backward": "cuda_edges",
    "edge_effect": "cuda_effects",
    "entmax_support": "cuda_entmax",
    "sample_sbm": "cuda_sampling",
    "sample_systematic": "cuda_probes",
    "sampled_attention": "cuda_sampled",
    "sampled_attention_backward": "cuda_sampled",
    "segment_entmax": "cuda_entmax",
    "segment_entmax_backward": "cuda_entmax",
    "weigh_effect": "cuda_effects",
}
"""Where each kernel is."""


def installed() -> bool:
    """Whether Triton is there, for NVIDIA's devices; it is not imported."""
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


@cache
def compiles(device: torch.device) -> bool:
    """Whether Triton is there, and compiles for this device."""
    return installed() and torch.cuda.get_device_capability(device) >= (8, 0)


def kernel(name: str) -> Callable[..., Any]:
    """The op of this name on a CUDA device."""

    def call(*arguments: Any) -> Any:
        device = next(x.device for x in arguments if isinstance(x, Tensor))
        meaning = next(each for each in (reference, samplers, sampled, blocks) if hasattr(each, name))
        found = importlib.import_module(f".{MODULES[name]}", __package__) if compiles(device) else meaning
        return getattr(found, name)(*arguments)

    return call
