"""What the package does on the CPU it does on other devices: on CUDA where there is one, and everywhere on a pretended device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device_cases import CASES, compare
from torch.utils import backend_registration

import sbm_pyg

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = Path(sbm_pyg.__file__).parent.parent


@pytest.fixture(scope="module")
def pretended() -> dict[str, str]:
    """What went wrong in each case; computed in a process of its own, which the device stays registered with."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"torch {torch.__version__} takes no devices that are written in Python")
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, HERE / "pretend.py"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    outcome: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return outcome


@pytest.mark.parametrize("name", CASES)
def test_nothing_leaves_a_pretended_device(name: str, pretended: dict[str, str]) -> None:
    assert not pretended[name]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_cuda_computes_the_same(name: str) -> None:
    device = torch.device("cuda")
    compare(CASES[name](device), CASES[name](torch.device("cpu")), device)
