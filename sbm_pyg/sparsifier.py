"""From dense attention to sparse: the schedule of a model's target densities during training.

In: a model whose layers have learned graph sources, and the loss of each step. Out: target densities of the sources.
Not here: dense attention and what sources learn from it (``sources.learned``, ``estimators``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from .attention import AttentionConv
from .auxiliary import AuxiliaryLosses
from .estimators import Distill, Local
from .ops import checks
from .sources.learned import LearnedSource

__all__ = ["Loss", "Sparsifier"]

FIRST = 10  # steps whose mean loss is the loss at the start
PATIENCE = 30  # trial steps without progress after which the model becomes sparse
PROGRESS = 0.05  # relative reduction of the gap that counts as progress
MIN_TRIALS = 50  # if the number of steps is unknown
MOMENTUM, TRIAL_MOMENTUM = 0.95, 0.7  # of running means of losses, and of those of trial steps


class Loss(NamedTuple):
    """Running means of the loss at a step."""

    step: int
    """Steps that are over."""
    dense: float
    """With dense attention."""
    sparse: float
    """At the target density; NaN before the first such step."""
    is_sparse: bool
    """Whether training has become sparse."""


class Sparsifier:
    r"""Trains a model with dense attention first and with sparse graphs later, without a threshold to choose.

    While attention is dense, torch's kernel computes it, and each source learns its probabilities by distillation on a
    sample of query rows. Every few steps a *trial step* runs at the target density, gradients included. Training
    becomes sparse when the running loss of trial steps is close to that of dense steps, or no longer comes closer, or
    the largest number of dense steps is over. If the loss then rises, training is dense again for a while.

    Call :meth:`step` after each step of the optimizer. In place of the estimator :class:`~sbm_pyg.estimators.Local`,
    layers get :class:`~sbm_pyg.estimators.Distill`, and sources are detached while attention is dense: then their loss
    trains no queries and keys. Auxiliary losses join the backward pass by themselves, with weight 1 over the number of
    forward passes between two steps, so do not add :func:`~sbm_pyg.auxiliary_loss`.

    Args:
        model: Model with sources that are a :class:`~sbm_pyg.LearnedSource`. Their target densities become 1.
        density: Target density in (0, 1): the part of all allowed pairs that each head attends to.
        total_steps: Number of training steps, which ``min_dense`` and ``max_dense`` are parts of. None: attention is
            dense for at least 50 trial steps, and may stay so.
        min_dense: Part of the steps that are dense at least, in [0, 1].
        max_dense: Part of the steps that are dense at most, in [0, 1].
        every: Number of steps from one trial step to the next, at least 2.
        tolerance: Largest gap between both losses at which training becomes sparse, relative to the loss of the first
            steps.
        keep_dense: Names of modules whose attention stays dense, as in ``model.named_modules()``.
        scaler: The :class:`torch.amp.GradScaler` of the loss. Needed for float16.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range, or the model has no source with a target
            density.

    Example:
        >>> from sbm_pyg import SBMAttentionConv
        >>> conv = SBMAttentionConv(16, 8, heads=2, num_blocks=4, self_loops=True)
        >>> optimizer = torch.optim.Adam(conv.parameters())
        >>> sparsifier = Sparsifier(conv, density=0.1, total_steps=20, max_dense=0.5)
        >>> for _ in range(20):
        ...     loss = conv(torch.randn(40, 16)).square().mean()
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        ...     density = sparsifier.step(loss)
        >>> density, sparsifier.is_sparse
        (0.1, True)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        density: float = 0.05,
        *,
        total_steps: int | None = None,
        min_dense: float = 0.4,
        max_dense: float = 0.7,
        every: int = 10,
        tolerance: float = 0.01,
        keep_dense: Collection[str] = (),
        scaler: Any = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"Expected 'model' to be a module (got {type(model).__name__}). Its sources are set.")
        checks.number("density", density, "(0, 1)", "It is a part of the pairs; leave the Sparsifier out for all.")
        if total_steps is not None:
            total_steps = checks.integer("total_steps", total_steps, 1, "It is the number of training steps.")
        for name, part in (("min_dense", min_dense), ("max_dense", max_dense)):
            checks.number(name, part, "[0, 1]", "It is a part of the training steps.")
        if min_dense > max_dense:
            raise ValueError(
                f"Expected 'min_dense' to be at most 'max_dense' = {max_dense} (got {min_dense}). Lower one of them."
            )
        checks.number("tolerance", tolerance, "[0, inf]", "It is a part of the loss of the first steps.")
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise TypeError(f"Expected 'scaler' to be a GradScaler (got {type(scaler).__name__}). Leave it out.")
        self.sources = self._find_sources(model, keep_dense)
        if not self.sources:
            raise ValueError(
                "Expected 'model' to have a source with a target density (got none). Give its layers one, e.g. "
                "SBMAttentionConv. Fixed patterns have none, nor do ranks with a number of keys 'k'."
            )
        self.every = checks.integer("every", every, 2, "One of so many steps is a trial step.")
        self.density, self.total_steps = density, total_steps
        self.min_dense, self.max_dense, self.tolerance, self.scaler = min_dense, max_dense, tolerance, scaler
        self.steps = 0
        self.is_sparse = False
        self.is_final = False
        """Whether attention can no longer become dense again."""
        self.history: list[Loss] = []
        """Running losses after each trial step, and after each ``every``-th sparse step."""
        self.gap = math.nan
        """Running mean of the loss at the target density minus that of dense attention; NaN before the first trial."""
        self._dense = self._sparse = self._start = math.nan
        self._recent, self._recent_steps = 0.0, 0  # mean loss and number of dense steps since the last trial step
        self._since = self._trials_without_progress = 0
        self._best_gap = math.inf
        self._accepted = 0.0
        for layer in model.modules():
            if isinstance(layer, AttentionConv) and layer.source in self.sources and type(layer.estimator) is Local:
                layer.estimator = Distill(probes=layer.estimator.probes)
        found = (getattr(part, "auxiliary_losses", None) for part in model.modules())
        self._losses = [each for each in found if isinstance(each, AuxiliaryLosses)]
        self._passes = [1] * len(self._losses)  # calls of each layer in the last step
        self._join_losses()
        self._detach = [source.detach for source in self.sources]
        self.set_density()

    @staticmethod
    def _find_sources(model: torch.nn.Module, keep_dense: Collection[str]) -> list[LearnedSource]:
        """The sources with a target density; those that stay dense get theirs here, and are left out."""
        modules = dict(model.named_modules())
        unknown = [keep_dense] if isinstance(keep_dense, str) else [name for name in keep_dense if name not in modules]
        if unknown:
            raise ValueError(f"Expected 'keep_dense' to be names of modules of 'model' (got {unknown}).")
        kept = [each for name in keep_dense for each in modules[name].modules() if isinstance(each, LearnedSource)]
        for source in kept:
            source.target_density = 1.0
        found = (each for each in modules.values() if isinstance(each, LearnedSource) and each.can_change_density)
        return [source for source in found if source not in kept]

    # ------------------------------------------------------------------ the schedule

    @torch.no_grad()
    def step(self, loss: float | Tensor) -> float:
        """Record the loss of a training step, and return the target density of the next one.

        If ``torch.distributed`` is initialized, the loss is averaged over all processes, which then decide alike.

        Args:
            loss: The loss of the task, one number.

        Raises:
            TypeError, ValueError: The loss is not one number, or not finite.
        """
        value = self._mean_over_processes(checks.scalar("loss", loss, "Take the mean of several losses."))
        if not math.isfinite(value):
            raise ValueError(f"Expected 'loss' to be finite (got {value}). Look for a step that diverged.")
        was_trial = self._is_trial
        self.steps += 1
        self._since += 1
        self._passes = [losses.passes for losses in self._losses]
        self._join_losses()
        if self.steps <= FIRST:
            self._start = _mix(self._start, value, 1 - 1 / self.steps)
        if self.is_sparse:
            self._sparse = _mix(self._sparse, value, MOMENTUM)
            self.gap = self._sparse - self._dense
        elif was_trial:  # compared with the dense steps since the last one, as the loss may fall fast
            self._sparse = _mix(self._sparse, value, TRIAL_MOMENTUM)
            self.gap = _mix(self.gap, value - self._recent, TRIAL_MOMENTUM)
            self._recent, self._recent_steps = 0.0, 0
        else:
            self._dense = _mix(self._dense, value, min(MOMENTUM, 1 - 1 / self.steps))
            self._recent_steps += 1
            self._recent += (value - self._recent) / self._recent_steps
        over = self.total_steps is not None and self.steps >= self.max_dense * self.total_steps
        if was_trial or (self.is_sparse and self.steps % self.every == 0) or (over and not self.is_sparse):
            self._decide(over)
            self.history.append(self.losses)
        self.set_density()
        return self.next_density

    @property
    def losses(self) -> Loss:
        """The running losses now."""
        return Loss(self.steps, self._dense, self._sparse, self.is_sparse)

    @property
    def _is_trial(self) -> bool:
        """Whether the next step is a trial step."""
        return not self.is_sparse and self.steps % self.every == self.every - 1

    @property
    def next_density(self) -> float:
        """Target density of the next step: 1 while attention is dense."""
        return self.density if self.is_sparse or self._is_trial else 1.0

    def _decide(self, over: bool) -> None:
        """Change between dense and sparse training; ``over`` is True after the largest number of dense steps."""
        allowed = self.tolerance * abs(self._start)
        if self.is_sparse:
            rises = self.gap > 2 * max(allowed, self._accepted) and self._since >= 10 * self.every
            if rises and not (self.is_final or over):
                self._change(False)
            return
        progress = self.gap < (1 - PROGRESS) * self._best_gap
        self._best_gap = min(self._best_gap, self.gap) if progress else self._best_gap
        self._trials_without_progress = 0 if progress else self._trials_without_progress + 1
        least = MIN_TRIALS * self.every if self.total_steps is None else self.min_dense * self.total_steps
        stuck = self._trials_without_progress >= PATIENCE
        close = self.gap <= allowed
        if over or (self.steps >= least and (stuck or close)):
            self.is_final = self.is_final or over or not close
            self._accepted = max(0.0, self.gap)  # 0 if there was no trial step
            self._change(True)

    def _change(self, is_sparse: bool) -> None:
        self.is_sparse, self._since = is_sparse, 0
        self._trials_without_progress, self._best_gap = 0, math.inf

    def set_density(self, density: float | None = None) -> None:
        """Set the target density of all sources, e.g. for an evaluation, without a change of the schedule.

        Args:
            density: The density in (0, 1]; None: that of the next training step.
        """
        density = self.next_density if density is None else density
        for source, detach in zip(self.sources, self._detach, strict=True):
            source.target_density = density
            source.detach = detach or not self.is_sparse

    @contextmanager
    def sparse(self) -> Iterator[None]:
        """Context in which the model runs at the target density, e.g. to evaluate it before training is sparse."""
        self.set_density(self.density)
        try:
            yield
        finally:
            self.set_density()

    def _join_losses(self) -> None:
        """Set the weight of auxiliary losses: that of the loss in one of the backward passes of a step."""
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        for losses, passes in zip(self._losses, self._passes, strict=True):
            losses.weight, losses.scaled, losses.passes = scale / max(1, passes), self.scaler is not None, 0

    @staticmethod
    def _mean_over_processes(loss: float) -> float:
        if not (distributed.is_available() and distributed.is_initialized()):
            return loss
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        total = torch.tensor(loss, dtype=torch.float64, device=device)
        distributed.all_reduce(total)
        return float(total) / distributed.get_world_size()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The state that :meth:`load_state_dict` continues from, for a checkpoint. Means of no loss yet are None."""
        state = {name: _none_if_nan(getattr(self, name)) for name in STATE}
        return state | {"history": [tuple(map(_none_if_nan, each)) for each in self.history]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ValueError: The state lacks a number.
        """
        missing = [name for name in (*STATE, "history") if name not in state]
        if missing:
            raise ValueError(f"Expected 'state' of a Sparsifier (got none of {missing}). Save its `state_dict()`.")
        for name in STATE:
            setattr(self, name, math.nan if state[name] is None else state[name])
        self._join_losses()
        self.history = [Loss._make(math.nan if x is None else x for x in each) for each in state["history"]]
        self.set_density()

    def __str__(self) -> str:
        """Progress: the running losses, and the number of steps."""
        losses = "no loss yet" if math.isnan(self._dense) else f"dense {self._dense:.4g}"
        losses += "" if math.isnan(self._sparse) else f", at {100 * self.density:g} % {self._sparse:.4g}"
        return f"{losses}, {self.steps:,} steps{', sparse' if self.is_sparse else ''}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.sources)} sources, density={self.density}, {self})"


STATE = (
    "steps", "is_sparse", "is_final", "gap", "_dense", "_sparse", "_start", "_recent", "_recent_steps", "_since",
    "_trials_without_progress", "_best_gap", "_accepted", "_passes",
)  # fmt: skip
"""Attributes of a state."""


def _mix(old: float, new: float, momentum: float) -> float:
    """A running mean after one more number; the number itself if there was none."""
    return new if math.isnan(old) else momentum * old + (1 - momentum) * new


def _none_if_nan(value: Any) -> Any:
    """The value, or None for NaN, which equals nothing when states are compared."""
    return None if isinstance(value, float) and math.isnan(value) else value
