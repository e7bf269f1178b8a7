"""A device that is not there: tensors in this machine's memory that claim to be elsewhere, and refuse to meet those that do not.

What a GPU refuses is refused here: an op on tensors of two devices, kernels of the CPU, numpy. Ops of ours are computed as on any device without
kernels, and may carry nothing to the CPU, but for those in ``CARRIED``. So a machine without a GPU finds what would fail on one, but for speed,
precision and whatever torch's own kernels do. The device is torch's ``PrivateUse1`` and stays registered with the process, so that this module is
for processes of its own: as a program it runs the cases of ``device_cases.py`` and prints as JSON what went wrong in each.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import matplotlib
import numpy as np
import torch
from device_cases import CASES, compare
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from sbm_pyg.ops import schemas
from sbm_pyg.ops.cpu import edges as cpu_edges
from sbm_pyg.sources import patterns

DEVICE, CPU = torch.device("privateuseone", 0), torch.device("cpu")
aten = torch.ops.aten
DEVICES = {"float64": True, "no float64": False}
"""Whether the device has numbers of 64 bits; Apple's have none."""
CARRIED = ("sample_sbm",)
"""Ops that the CPU computes for devices without a kernel. All others stay on the device that has float64."""
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
"""Ops that take indices on the CPU whatever they index."""
MOVES = (aten._to_copy.default, aten.to.dtype_layout, aten.to.device)
"""Ops that carry a tensor to another device, at any depth of torch."""


class Remote(Tensor):
    """A tensor of the device: its values are those of ``here``."""

    here: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, here: Tensor) -> Remote:
        layout: dict[str, Any] = {
            "strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype,
        }  # fmt: skip
        out = torch.Tensor._make_wrapper_subclass(cls, here.size(), device=DEVICE, **layout)
        out.here = here
        return out

    def tolist(self) -> Any:
        return self.here.tolist()

    def numpy(self, **options: Any) -> Any:
        raise TypeError(
            f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        return self.numpy()

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run(op, args, kwargs or {})


class Pretend(TorchDispatchMode):
    """In it, tensors can be made on the device and carried there."""

    doubles = True
    op = ""  # of ours, which is being computed

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, args, kwargs or {})


def local(x: Any) -> Any:
    """The same on the CPU."""
    return x.here if isinstance(x, Remote) else CPU if isinstance(x, torch.device) else x


def copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Values go from anywhere to anywhere."""
    local(target).copy_(local(source))
    return target


def run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One op, on the device if its tensors are there or its ``device`` is."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    remote = any(isinstance(x, Remote) for x in tensors)
    if op is aten.copy_.default:
        return copy(args[1], args[0])
    moves = op in MOVES
    if remote and moves and Pretend.op not in ("", *CARRIED) and kwargs.get("device", DEVICE).type == CPU.type:
        raise RuntimeError(f"{Pretend.op} carries a tensor from {DEVICE} to the CPU")
    if remote and not moves:
        first_only = op in INDEXED and isinstance(args[0], Remote)
        strangers = [x for x in tensors if x.dim() and not isinstance(x, Remote)]
        if strangers and not first_only:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and cpu, in {op}"
            )
    if remote and op.namespace == "sbm_pyg" and Pretend.doubles:
        with Pretend():
            return within(op._opname, schemas.REFERENCES[op._opname], *args, **kwargs)
    device = kwargs.get("device")
    remote = remote if device is None else device.type == DEVICE.type
    out = op(*tree_map(local, args), **tree_map(local, kwargs))
    if not remote:
        return out
    if not Pretend.doubles and any(
        x.dtype in (torch.float64, torch.complex128) for x in tree_leaves(out) if isinstance(x, Tensor)
    ):
        raise TypeError(f"Cannot make a float64 tensor on {DEVICE}, in {op}")
    out = tree_map(lambda x: Remote(x) if isinstance(x, Tensor) else x, out)
    return out if moves or device is not None else return_and_correct_aliasing(op, args, kwargs, out)


def within(name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``call`` returns as a part of an op of ours."""
    Pretend.op = name
    try:
        return call(*args, **kwargs)
    finally:
        Pretend.op = ""


def empty(size: Any, stride: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    return Remote(torch.empty_strided(size, stride, dtype=dtype))


def register() -> torch.library.Library:
    """Makes the device known to torch, for the rest of the process. What is returned has to be kept."""
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    class Module(_DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

    _setup_privateuseone_for_python_backend("pretend", backend_module=Module())
    library = torch.library.Library("aten", "IMPL")  # what torch.tensor(..., device=...) calls beneath any mode
    library.impl("empty_strided", empty, "PrivateUse1")
    library.impl("_copy_from", copy, "PrivateUse1")
    return library


class _OnTheCPU(torch.Generator):
    """A generator of the CPU, for whatever device it is asked."""

    def __new__(cls, device: object = None) -> _OnTheCPU:
        return super().__new__(cls)


@contextlib.contextmanager
def pretending() -> Iterator[torch.device]:
    """The device, whose tensors can be made inside; its generators are the CPU's."""
    generator = torch.Generator
    torch.Generator = _OnTheCPU  # type: ignore[misc]
    try:
        with Pretend():
            yield DEVICE
    finally:
        torch.Generator = generator  # type: ignore[misc]


def refuses(device: torch.device) -> list[str]:
    """Which of the mistakes that a GPU refuses are refused."""
    far, near = torch.arange(6.0, device=device).view(2, 3), torch.ones(2, 3)
    graph = patterns.window(3, 1)
    mistakes = {
        "two devices": lambda: far + near, "indices elsewhere": lambda: near[far.long()], "writing elsewhere": lambda: near.add_(far),
        "an op of ours": lambda: torch.ops.sbm_pyg.edge_dot(far[None], near[None], graph.rowptr, graph.col),
        "numpy": lambda: np.asarray(far), "leaving it": lambda: within("edge_dot", far.cpu),
    }  # fmt: skip
    refused = []
    for name, mistake in mistakes.items():
        try:
            mistake()
        except (RuntimeError, TypeError):
            refused.append(name)
    return refused


def main() -> None:
    library = register()  # noqa: F841
    matplotlib.use("agg")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with pretending() as device:
        given = [torch.rand(1, 3, 4), torch.rand(1, 5, 4), torch.tensor([0, 2, 2, 5]), torch.tensor([0, 4, 1, 2, 3])]
        dots = schemas._carried(cpu_edges.edge_dot)(*(x.to(device) for x in given))
        assert dots.device == device
        assert torch.equal(dots.cpu(), cpu_edges.edge_dot(*given))
        refused = ["two devices", "indices elsewhere", "writing elsewhere", "an op of ours", "numpy", "leaving it"]
        assert refuses(device) == refused
    outcome: dict[str, dict[str, str]] = {kind: {} for kind in DEVICES}
    for name, case in CASES.items():
        expected = case(CPU)
        for kind, doubles in DEVICES.items():
            Pretend.doubles = doubles
            try:
                with pretending() as device:
                    compare(case(device), expected, device)
                outcome[kind][name] = ""
            except Exception:
                outcome[kind][name] = traceback.format_exc()
    json.dump(outcome, sys.stdout)


if __name__ == "__main__":
    main()
