"""One run in several processes: how they agree and share work.

In: the environment that torchrun gives to each process. Out: its rank, and calls in which all take part; with a single process
they cost nothing and change nothing. Not here: gradients, which Lightning averages (``train.py``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def rank() -> int:
    """Returns the number of this process; the first, 0, is the one that writes."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """Returns the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def on_this_machine() -> int:
    """Returns the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", count())) if count() > 1 else 1


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Lets the processes of a run meet, and part in the end."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group()  # gloo for tensors on the CPU, nccl for those on GPUs
    try:
        yield
    finally:
        dist.destroy_process_group()


def of_first(action: Callable[[], T]) -> T:
    """Returns in every process what an action returns in the first, and raises in all a ``ValueError`` that it raises there."""
    answer: list[Any] = [None, None]
    if rank() == 0:
        try:
            answer[0] = action()
        except ValueError as error:
            if count() == 1:
                raise
            answer[1] = str(error)
    if count() > 1:
        dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise ValueError(answer[1])
    return answer[0]


def in_turn(action: Callable[[], T]) -> T:
    """Runs an action in the first process and then in the others, which find what it has made; errors as in ``of_first``."""
    made: list[T] = []
    of_first(lambda: made.append(action()))
    return made[0] if rank() == 0 else action()


def highest(number: int) -> int:
    """Returns the highest of the processes' numbers."""
    if count() == 1:
        return number
    numbers = torch.tensor(number)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return int(numbers)


def total(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the sums over all processes, in all of them, of tensors that each has under the same names."""
    if count() == 1:
        return sums
    sums = {name: value.clone() for name, value in sums.items()}
    for value in sums.values():
        dist.all_reduce(value)
    return sums
