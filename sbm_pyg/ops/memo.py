"""A cache of values that are computed from a tensor, such as the order of a graph's edges by key.

In: the tensor, and how to compute the value. Out: the value, which is dropped with the tensor. Not here: what is
computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.weak import WeakIdKeyDictionary

from .values import is_capturing

Value = TypeVar("Value")


def _writable(x: Tensor) -> bool:
    """True if numpy can write into a tensor: it lies on the CPU and has values of its own."""
    return x.device.type == "cpu" and not is_fake(x) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _snapshot(x: Tensor) -> Any:
    """Copy a tensor that numpy can write into, since numpy counts no versions; else return the version."""
    return x.clone() if _writable(x) else x._version


def _is_unchanged(x: Tensor, snapshot: Any) -> bool:
    return torch.equal(x, snapshot) if isinstance(snapshot, Tensor) else x._version == snapshot


class TensorMemo:
    """Values of one kind, one for each tensor, kept until the tensor is changed or deleted.

    Nothing is kept of tensors of ``torch.inference_mode``, which have no version, nor while a CUDA graph is captured.
    """

    def __init__(self) -> None:
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def get(self, compute: Callable[..., Value], x: Tensor, *arguments: Any) -> Value:
        """Return ``compute(x, *arguments)``, or the kept value for the same tensor and the same other arguments.

        Args:
            compute: Computes the value, which must not refer to ``x``: the tensor would never be deleted.
            x: The tensor.
            arguments: Numbers, and tensors. A tensor is the same if it is the same object and unchanged.
        """
        tensors = [y for y in arguments if isinstance(y, Tensor)]
        if any(y.is_inference() for y in (x, *tensors)) or is_capturing(x.device):
            return compute(x, *arguments)
        numbers = [None if isinstance(y, Tensor) else y for y in arguments]
        if (entry := self._values.get(x)) is not None:
            old_tensors, old_numbers, snapshots, value = entry
            same = old_numbers == numbers and [*map(id, old_tensors)] == [*map(id, tensors)]
            if same and all(map(_is_unchanged, (x, *tensors), snapshots)):
                return value
        snapshots = [*map(_snapshot, (x, *tensors))]
        value = compute(x, *arguments)
        self._values[x] = tensors, numbers, snapshots, value
        return value
