"""What the package does on the CPU it does on other devices: on CUDA where there is one, and everywhere on a pretended device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from device_cases import CASES, compare
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

import sbm_pyg
from sbm_pyg.ops import checks, schemas

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = Path(sbm_pyg.__file__).parent.parent


@pytest.fixture(scope="module")
def pretended() -> dict[str, dict[str, str]]:
    """What went wrong in each case; computed in a process of its own, which the device stays registered with."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"torch {torch.__version__} takes no devices that are written in Python")
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command, environment = [sys.executable, str(HERE / "pretend.py")], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    outcome: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return outcome


@pytest.mark.parametrize("kind", ["float64", "no float64"])  # Apple's devices have none
@pytest.mark.parametrize("name", CASES)
def test_nothing_leaves_a_pretended_device(name: str, kind: str, pretended: dict[str, dict[str, str]]) -> None:
    """But the rates and memberships of ``sample_sbm``, which the CPU computes for devices without a kernel.

    For devices without float64 the CPU computes all of our ops.
    """
    assert not pretended[kind][name]


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


# ------------------------------------------------------------------ autocast

NAMES = (
    "__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cdist cosh "
    "cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm kl_div l1_loss "
    "layer_norm log log10 log1p log2 log_softmax mse_loss nll_loss norm normalize pow prod reciprocal renorm "
    "rsqrt sinh smooth_l1_loss softmax softmin softplus sum tan"
)
SINGLE = frozenset(NAMES.split())
"""Functions that autocast computes in float32 on CUDA, from the documentation of ``torch.amp``; on the CPU it leaves most as they are."""


class CudaAutocast(TorchFunctionMode):
    """Autocast on the CPU converts, with this mode, what it converts on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in SINGLE and kwargs.get("dtype") is None and torch.is_autocast_enabled("cpu"):
            with torch._C.DisableTorchFunction():
                args, kwargs = tree_map_only(Tensor, single, (args, kwargs))
        return func(*args, **kwargs)


def single(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def test_softmax_of_half_precision_is_single_under_the_autocast_of_cuda() -> None:
    half = torch.ones(2, 3, dtype=torch.bfloat16)
    with CudaAutocast(), torch.autocast("cpu", torch.bfloat16):
        assert half.softmax(-1).dtype == torch.float32
        assert half.softmax(-1, dtype=torch.bfloat16).dtype == half.sigmoid().dtype == torch.bfloat16


@pytest.mark.parametrize("name", CASES)
def test_everything_runs_under_the_autocast_of_cuda(name: str) -> None:
    """A GPU failed here: one side of a block model had memberships in float32, the other one in bfloat16."""
    with CudaAutocast(), torch.autocast("cpu", torch.bfloat16):
        CASES[name](torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_everything_runs_under_autocast_on_cuda(name: str) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        CASES[name](torch.device("cuda"))
