"""State that follows the batches of training: running means and centroids, each batch once.

In: what a call of a source saw, and its seed. Out: the state that the call is made with. Not here: what the state means
(``sampling``, ``selectors``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from ..auxiliary import in_backward

__all__ = ["FollowingSource", "sync_statistics"]

MAX_REMEMBERED_CALLS = 64
"""States of so many seeds are kept for calls that a backward pass makes once more."""
_SEEDS = 2**63 - 1  # an int64 holds a seed modulo it


def sync_statistics(model: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
    """Let the sources of a model that follow batches see those of all processes.

    In training, each call of a :class:`~sbm_pyg.SBMSource` with a share, and of a
    :class:`~sbm_pyg.sources.selectors.RoutingSource`, then adds up over processes what it saw, so that their states are
    those of one process with the whole batch. All processes must make the same calls, as under
    :class:`~torch.nn.SyncBatchNorm`. Without it each process has states of its own, or those of the first one where
    :class:`~torch.nn.parallel.DistributedDataParallel` copies buffers.

    Args:
        model: Module whose sources are set.
        process_group: Processes to add up over; None takes all of them.

    Returns:
        The same module.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"Expected 'model' to be a module (got {type(model).__name__}). Its sources are set.")
    for module in model.modules():
        if isinstance(module, FollowingSource):
            module.synced, module.process_group = True, process_group
    return model


class FollowingSource(torch.nn.Module):
    """A part of a source whose state moves with the batches that it sees in training.

    What calls see is added up by seed, and moves the state when the next seed comes: all calls with one seed, which are
    parts of one batch, are made with the same state. A call in a backward pass is one of before, which activation
    checkpointing makes again: it is made with the state it was made with, and counts no more. The state, ``seen`` and
    ``last_seed`` are buffers.
    """

    state_name: str
    """Name of the buffer that follows."""
    synced = False
    process_group: Any = None
    seen: Tensor
    last_seed: Tensor

    def _follow_by(self, seen: Tensor) -> None:
        """Add the buffers: ``seen`` has the shape of what a call sees, and is zero."""
        self.register_buffer("seen", seen)
        self.register_buffer("last_seed", torch.zeros((), dtype=torch.int64, device=seen.device))
        self._states: dict[int, Tensor] = {}  # by seed

    def _moved(self, state: Tensor, seen: Tensor) -> Tensor:
        """The state after calls that saw this; itself where they saw nothing."""
        raise NotImplementedError

    @torch.compiler.disable  # a compiled backward would compute the state again, from buffers that have moved on
    @torch.no_grad()
    def _state_for(self, seed: int) -> Tensor:
        """The state that a call is made with; in training, after what the calls with other seeds before it saw."""
        state = getattr(self, self.state_name)
        if not self.training:
            return state
        seed %= _SEEDS
        if in_backward():
            if seed not in self._states:
                raise RuntimeError(
                    "Expected a call in a backward pass to repeat a forward call with one of the last "
                    f"{MAX_REMEMBERED_CALLS} seeds (got a new one). Call the layer outside of the backward pass, or in "
                    "evaluation mode."
                )
            return self._states[seed]
        later = self.last_seed != seed
        state.copy_(torch.where(later, self._moved(state, self.seen), state))
        self.seen.mul_(~later)
        self.last_seed.fill_(seed)
        if self._states.pop(seed, None) is None and len(self._states) >= MAX_REMEMBERED_CALLS:
            del self._states[next(iter(self._states))]
        self._states[seed] = state.clone()
        return self._states[seed]

    @property
    def _counts(self) -> bool:
        """Whether what a call sees moves the state."""
        return self.training and not in_backward()

    @torch.compiler.disable
    @torch.no_grad()
    def _note(self, saw: Tensor) -> None:
        """Add what a call that counts saw, which is finite, to what those with its seed did."""
        if self.synced and distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(saw, group=self.process_group)
        self.seen.add_(saw)
