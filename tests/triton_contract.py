"""What keeps the contract of ``test_ops.py`` by the Triton kernels: in Triton's interpreter, or on a GPU.

In: tests of the contract, and their smaller cases. Out: the same with our ops sent to the kernels, of which a program
takes some milliseconds when it is interpreted. The tests themselves are in ``triton_edges.py`` and
``triton_graphs.py``. They are not collected by themselves: ``test_triton.py`` and ``test_triton_graphs.py`` run each in
a process of its own, since Triton decides when it is imported whether it interprets. By hand:
``TRITON_INTERPRET=1 pytest tests/triton_edges.py``. Where there is a GPU, the same without ``TRITON_INTERPRET`` runs
on it: the tests have their tensors on the CPU, and each op carries them there and back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import triton.language as tl
from problems import GRAPHS
from test_launches import PlainTorch, plain_torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from sbm_pyg.ops import schemas

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
assert INTERPRETED or torch.cuda.is_available(), "set TRITON_INTERPRET=1"
ON_ONE_SIDE = pytest.mark.skipif(
    not INTERPRETED,
    reason="counts a sort of edges once; on a GPU the test and the kernel each make it, on their own device",
)
COUNTED = pytest.mark.skipif(
    not INTERPRETED, reason="counts operations; on a GPU each answer that the host waits for takes one more"
)
QUIET = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of infinities and NaN
ON_CUDA = {op: file for op, (file, kernels) in schemas.KERNELS.items() if "cuda" in kernels}
MODULES_BY_NAME = {name: import_module(f"sbm_pyg.ops.cuda.{name}") for name in ("rows", *sorted({*ON_CUDA.values()}))}
MODULES = [*MODULES_BY_NAME.values()]
SMALL = [name for name in GRAPHS if "1000" not in name]


_CARRIED: WeakIdKeyDictionary = WeakIdKeyDictionary()


def carried(x: Tensor) -> Tensor:
    """The tensor on the device: the same one whenever it is asked for, as what is known of a graph is kept with it."""
    kept, version = _CARRIED.get(x), None if x.is_inference() else x._version
    if kept is None or kept[0] != version:
        kept = _CARRIED[x] = version, x.detach().to(DEVICE)
    return kept[1]


class Carrier:
    """The functions of a module, from and to tensors of the CPU, computed on the device; what is carried is not counted."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def computed(*given: Any) -> Any:
            with _disable_current_modes():
                there = tree_map_only(Tensor, carried, given)
            found = getattr(self.module, name)(*there)
            with _disable_current_modes():
                return tree_map_only(Tensor, Tensor.cpu, found)

        return computed


class Kernels(PlainTorch):
    """In it, our ops are computed as on a CUDA device, and what they ask of the device is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []
        self.only = ""  # what the names of ops that go to kernels begin with

    def module(self, name: str) -> Any:
        ours = name in ON_CUDA and name.startswith(self.only)
        if not ours:
            return super().module(name)
        module = import_module(f"sbm_pyg.ops.cuda.{ON_CUDA[name]}")
        return module if INTERPRETED else Carrier(module)


def rounded(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Rounds to the nearest bfloat16, as GPUs do; the interpreter cuts."""

    def call(builder: Any, x: Any, kind: Any) -> Any:
        if (x.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, x, kind)
        return TensorHandle(torch.tensor(x.data).bfloat16().view(torch.uint16).numpy(), tl.bfloat16)

    return call


def multiplied(dot: Callable[..., Any]) -> Callable[..., Any]:
    """Multiplies numbers in bfloat16, of which the interpreter multiplies the bits."""

    def call(builder: Any, *given: Any) -> Any:
        factors = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in given[:2])
        return dot(builder, *factors, *given[2:])

    return call


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """All ops go to the kernels; each counts as one operation, whatever the interpreter does."""
    counted, launch = Kernels(), MODULES[0].launch

    def count(program: Any, *arguments: Any, **options: Any) -> None:
        launches, allocations = counted.launches, counted.allocations
        launch(program, *arguments, **options)
        counted.launches, counted.allocations = launches + 1, allocations
        counted.started.append(program.__name__)

    for module in MODULES:
        if hasattr(module, "launch"):  # not where kernels of another file are put together
            monkeypatch.setattr(module, "launch", count)
    if INTERPRETED:
        monkeypatch.setattr(MODULES_BY_NAME["blocks"], "HAS_FLOAT64_DOT", True)  # with any version
        for name, change in (("cast_impl", rounded), ("create_dot", multiplied)):
            monkeypatch.setattr(InterpreterBuilder, name, change(getattr(InterpreterBuilder, name)))
    with plain_torch(counted):
        yield counted


def contract(test: Callable[..., None], *cases: tuple[Any, ...], only: str = "", long: int = 0) -> Callable[..., None]:
    """A test of the contract, on some cases; each has to start a kernel.

    ``only`` ops whose names begin so go to kernels, as what they are compared with would take long in the interpreter.
    Rows of more than ``long`` edges are shared by several programs. On a GPU, blocks of float64 start none if this version
    of Triton multiplies no matrices of float64.
    """

    def run(case: tuple[Any, ...], kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
        kernels.only = only
        if long:
            monkeypatch.setattr(MODULES_BY_NAME["rows"], "MAX_EDGES_PER_PROGRAM", long)
        test(*case)
        assert kernels.started or (only == "block" and not MODULES_BY_NAME["blocks"].HAS_FLOAT64_DOT)

    return pytest.mark.parametrize("case", cases, ids=str)(run)
