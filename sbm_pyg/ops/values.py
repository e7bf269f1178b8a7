"""Functions that report if the values of a tensor can be read, with or without waiting, and if autograd is running.

In: tensors or a device. Out: a flag, or an error if values are needed and cannot be read. Not here: checks of values
(:mod:`.checks`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import is_fake

__all__ = [
    "can_read", "can_read_without_sync", "in_backward", "is_batched", "is_capturing", "require_unbatched",
    "require_values",
]  # fmt: skip

OUTSIDE_OF_VMAP = (
    "Expected '{}' outside of `torch.vmap` where it decides how many edges there are (got one tensor that stands for "
    "many). Join the batch to one of many sequences, with their offsets as `ptr`."
)
"""Error of a tensor of :func:`torch.vmap` whose values size a result, by its name."""


def is_capturing(device: torch.device) -> bool:
    """True while a CUDA graph is captured, which computes nothing before it is replayed."""
    return device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def in_backward() -> bool:
    """True in a backward pass of autograd, in which activation checkpointing repeats calls."""
    return torch._C._current_graph_task_id() >= 0


def is_batched(x: Tensor) -> bool:
    """True if a tensor stands for a batch of tensors, as in :func:`torch.vmap`."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):  # as by `grad` inside of `vmap`
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def _is_plain(x: Tensor) -> bool:
    """True if a tensor is no subclass but a parameter, and no mode and no transform of torch is active.

    It answers in a microsecond what the questions below otherwise take twenty for.
    """
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and TracingContext.try_get() is None
    )


def are_watched() -> bool:
    """True if a compiler, or checkpointing that keeps some results, records the calls of torch."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def can_read(x: Tensor) -> bool:
    """True if the values of a tensor can be read.

    They cannot in compiled code, nor of meta and fake tensors, of any tensor where new ones are fake, and of tensors of
    :func:`torch.vmap`.
    """
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    return _is_plain(x) or not (is_fake(x) or detect_fake_mode() or is_batched(x))


def can_read_without_sync(*tensors: Tensor) -> bool:
    """True if the values of tensors can be read without waiting for a device."""
    if torch.compiler.is_compiling() or any(x.device.type != "cpu" for x in tensors):
        return False
    return all(map(_is_plain, tensors)) or not (any(map(is_batched, tensors)) or detect_fake_mode(tensors))


def require_unbatched(**arguments: Tensor | None) -> None:
    """Refuse tensors of :func:`torch.vmap`, because the size of the result depends on their values; None passes."""
    if torch.compiler.is_compiling():
        return
    for name, x in arguments.items():
        if isinstance(x, Tensor) and is_batched(x):
            raise ValueError(OUTSIDE_OF_VMAP.format(name))


def require_values(x: Tensor, name: str) -> None:
    """Raise ValueError for meta tensors and tensors of :func:`torch.vmap`, whose values cannot size the result."""
    require_unbatched(**{name: x})
    if x.is_meta:
        raise ValueError(f"Expected '{name}' to hold values (got a meta tensor). Move it to a device that has memory.")
