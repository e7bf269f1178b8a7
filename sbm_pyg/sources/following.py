"""State of sources that is updated once per training batch: running means and centroids.

In: the statistics and the seed of a call of a source. Out: the state that the call uses. Not here: the meaning of the
state (``sampling``, ``selectors``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from ..ops import checks
from ..ops.values import in_backward

__all__ = ["FollowingSource", "sync_statistics"]

MAX_REMEMBERED_CALLS = 64
"""Number of seeds whose state is kept, so that activation checkpointing can repeat their calls."""
_SEEDS = 2**63 - 1  # an int64 holds a seed modulo it


def sync_statistics(model: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
    """Synchronize the running statistics of a model's sources across processes.

    In training, each call of an :class:`~sbm_pyg.SBMSource` with a target density, or of a
    :class:`~sbm_pyg.sources.selectors.RoutingSource`, then sums its statistics over the processes. The state is that of
    one process with the whole batch. All processes must make the same calls, as with :class:`~torch.nn.SyncBatchNorm`.
    Without synchronization each process keeps its own state, or gets the state of the first process if
    :class:`~torch.nn.parallel.DistributedDataParallel` copies buffers.

    Args:
        model: Module whose sources are synchronized, in place.
        process_group: Processes to sum over. None: all of them.

    Returns:
        The same module.

    Raises:
        TypeError: ``model`` is not a module.
    """
    checks.kind("model", model, torch.nn.Module, "a module", "Its sources are set.")
    for module in model.modules():
        if isinstance(module, FollowingSource):
            module.synced, module.process_group = True, process_group
    return model


class FollowingSource(torch.nn.Module):
    """A source with a state that follows the training batches.

    Statistics of calls with the same seed, which are parts of one batch, are summed. They update the state when the
    next seed arrives, so all parts of a batch use the same state. A call during a backward pass is a repetition by
    activation checkpointing: it uses the state of the first call, and its statistics do not count. The state, ``seen``
    and ``last_seed`` are buffers; training and loading keep the first two in at least 32 bits, in any model.
    """

    state_name: str
    """Name of the buffer that holds the state."""
    synced = False
    process_group: Any = None
    seen: Tensor
    last_seed: Tensor

    def _follow_by(self, seen: Tensor) -> None:
        """Register the buffers; ``seen`` holds zeros in the shape of the statistics of one call."""
        self.register_buffer("seen", seen)
        self.register_buffer("last_seed", torch.zeros((), dtype=torch.int64, device=seen.device))
        self._states: dict[int, Tensor] = {}  # by seed

    def _widen(self) -> None:
        """Keep state and statistics in 32 bits: 16 bits hold neither many pairs nor small steps."""
        for name in (self.state_name, "seen"):
            buffer = self._buffers.get(name)
            if buffer is not None and buffer.element_size() < 4:
                buffer.data = buffer.float()

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._widen()  # of a new model in 16 bits, before it takes those of a trained one
        super()._load_from_state_dict(*arguments)

    def _moved(self, state: Tensor, seen: Tensor, counts: Tensor) -> Tensor:
        """Return a new tensor, the state after an update with the given statistics.

        The state stays unchanged where the statistics are empty, and where ``counts``, ``[]`` bool, is False.
        """
        raise NotImplementedError

    @torch.compiler.disable  # a compiled backward pass would recompute the state from updated buffers
    @torch.no_grad()
    def _state_for(self, seed: int) -> Tensor:
        """The state that a call uses; in training, updated with the statistics of earlier seeds."""
        state = getattr(self, self.state_name)
        if not self.training:
            return state
        seed %= _SEEDS
        if in_backward():
            if seed not in self._states:
                raise RuntimeError(
                    "Expected a call in a backward pass to repeat a forward call with one of the last "
                    f"{MAX_REMEMBERED_CALLS} seeds (got a new one). Call the layer outside of the backward pass, or in "
                    "evaluation mode; under activation checkpointing leave `preserve_rng_state` True, or pass a seed."
                )
            return self._states[seed]
        self._widen()
        later = self.last_seed != seed
        moved = self._moved(state, self.seen, later)
        state.copy_(moved)
        self.seen.masked_fill_(later, 0)
        self.last_seed.fill_(seed)
        if self._states.pop(seed, None) is None and len(self._states) >= MAX_REMEMBERED_CALLS:
            del self._states[next(iter(self._states))]
        self._states[seed] = moved
        return moved

    @property
    def _counts(self) -> bool:
        """True if the statistics of a call update the state."""
        return self.training and not in_backward()

    @torch.compiler.disable
    @torch.no_grad()
    def _note(self, saw: Tensor) -> None:
        """Add the finite statistics of a call to those of its seed."""
        if self.synced and distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(saw, group=self.process_group)
        self.seen.add_(saw)
