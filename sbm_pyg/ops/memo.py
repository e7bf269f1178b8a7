"""What is made of a tensor once and kept for as long as the tensor lives, such as the order of a graph's edges by key.

In: the tensor, and how to make it. Out: what was made. Not here: what is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.weak import WeakIdKeyDictionary

from .values import captured

T = TypeVar("T")


def _writable(x: Tensor) -> bool:
    """Whether numpy may write into a tensor: it lies on the CPU and has values of its own."""
    return x.device.type == "cpu" and not is_fake(x) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _seen(x: Tensor) -> Any:
    """What tells later whether a tensor was written into: its values, for numpy counts no version, or the version."""
    return x.clone() if _writable(x) else x._version


def _unchanged(x: Tensor, seen: Any) -> bool:
    return torch.equal(x, seen) if isinstance(seen, Tensor) else x._version == seen


class Kept:
    """Something of one kind, for each tensor that it was made of, until the tensor is written into.

    Nothing is kept of tensors of ``torch.inference_mode``, which do not tell whether they were written into, nor while
    a CUDA graph is captured.
    """

    def __init__(self) -> None:
        self._found: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def get(self, make: Callable[..., T], x: Tensor, *given: Any) -> T:
        """``make(x, *given)``, or what it made before of this tensor and the same other arguments.

        Args:
            make: Makes it. What it makes must not hold ``x`` itself, which would live as long as it.
            x: The tensor.
            given: Tensors, which are the same where they are one object, unchanged, and numbers.
        """
        tensors = [each for each in given if isinstance(each, Tensor)]
        if any(each.is_inference() for each in (x, *tensors)) or captured(x.device):
            return make(x, *given)
        numbers = [None if isinstance(each, Tensor) else each for each in given]
        if (kept := self._found.get(x)) is not None:
            others, then, seen, found = kept
            same = then == numbers and [*map(id, others)] == [*map(id, tensors)]
            if same and all(map(_unchanged, (x, *tensors), seen)):
                return found
        seen = [*map(_seen, (x, *tensors))]
        found = make(x, *given)
        self._found[x] = tensors, numbers, seen, found
        return found
