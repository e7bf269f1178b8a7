"""Modules whose doctests cannot be collected here."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["sbm_pyg/ops/cuda_*.py"]
