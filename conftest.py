"""Modules that are not collected: those that need Triton where it is missing, and the contract that it interprets."""

from __future__ import annotations

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["sbm_pyg/ops/cuda_*.py"]
if os.environ.get("TRITON_INTERPRET") != "1":  # `tests/test_triton*.py` run them apart
    collect_ignore_glob += ["tests/triton_*.py"]
