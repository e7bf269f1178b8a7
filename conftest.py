"""Modules that are not collected: what needs a package that is missing, and the contract with nothing to run on."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

collect_ignore_glob = [] if find_spec("triton") else ["sbm_pyg/ops/cuda_*.py"]
runs = os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()
if not (find_spec("triton") and runs):  # `tests/test_triton*.py` interpret them apart
    collect_ignore_glob += ["tests/triton_*.py"]
if not find_spec("cosmic_ray"):
    collect_ignore_glob.append("tests/mutation.py")
