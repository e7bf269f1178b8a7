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
from sbm_pyg.ops import checks, schemas

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = Path(sbm_pyg.__file__).parent.parent


@pytest.fixture(scope="module", params=[[], ["--single"]], ids=["float64", "no float64"])
def pretended(request: pytest.FixtureRequest) -> dict[str, str]:
    """What went wrong in each case; computed in a process of its own, which the device stays registered with.

    On a device with numbers of 64 bits, and on one without, as Apple's are.
    """
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"torch {torch.__version__} takes no devices that are written in Python")
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, HERE / "pretend.py", *request.param], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcome: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return outcome


@pytest.mark.parametrize("name", CASES)
def test_nothing_leaves_a_pretended_device(name: str, pretended: dict[str, str]) -> None:
    assert not pretended[name]


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="there is no MPS device")
@pytest.mark.parametrize("name", CASES)
def test_mps_computes_the_same(name: str) -> None:
    device = torch.device("mps")
    compare(CASES[name](device), CASES[name](torch.device("cpu")), device)


def test_every_kernel_of_the_cpu_serves_devices_without_float64() -> None:
    for name in (name for name, (_, kernels) in schemas.KERNELS.items() if "cpu" in kernels):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sbm_pyg::{name}", "MPS")
    assert checks.widest(torch.device("cpu")) == torch.float64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_cuda_computes_the_same(name: str) -> None:
    device = torch.device("cuda")
    compare(CASES[name](device), CASES[name](torch.device("cpu")), device)
