"""From dense attention to sparse: the schedule of a model's target densities during training.

In: a model whose layers have learned graph sources, and the loss of each step. Out: target densities of the sources.
Not here: dense attention and the losses of sources (``sources.dense``, ``estimators``).
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..ops import checks
from ..sources.learned import DensitySource, Schedule
from .auxiliary import AuxiliaryLosses, Passes
from .estimators import Distill, Local

__all__ = ["Loss", "Sparsifier"]

NUMBERS = itertools.count()  # of Sparsifiers: a source is set by the last one that was made for it
UNMOVED_STEPS = 10  # without a change of the sources, before a warning
MOMENTUM, TRIAL_MOMENTUM = 0.95, 0.7  # of running means of losses, and of those of trial steps


class Loss(NamedTuple):
    """Running means of the loss at a step."""

    step: int
    """Number of finished steps."""
    dense: float
    """Running mean of the loss with dense attention."""
    sparse: float
    """Running mean of the loss at the target density; NaN before the first step at this density."""
    is_sparse: bool
    """Whether the step was after the dense phase."""


class Sparsifier:
    r"""Trains a model with dense attention first and with sparse graphs later.

    Evaluation mode always uses the target density, and so does a saved model. In training mode the schedule decides:
    while attention is dense, torch's kernel computes it, and each source learns its probabilities by distillation on a
    sample of query rows. Every few steps a *trial step* runs at the target density, gradients included, so that the
    loss at the target density is known. After ``dense_part`` of the steps, all steps run at the target density.

    Call :meth:`step` after each step of the optimizer. In place of the estimator
    :class:`~sbm_pyg.training.estimators.Local`, layers get :class:`~sbm_pyg.training.estimators.Distill`, and sources
    are detached while attention is dense, so that their loss does not train queries and keys. Auxiliary losses join the
    backward pass by themselves, so do not add :func:`~sbm_pyg.auxiliary_loss`. The weight of these losses is 1 divided
    by the number of backward passes of the step, see :attr:`passes`.

    Args:
        model: Module with sources that are a :class:`~sbm_pyg.DensitySource`.
        density: Target density in (0, 1): the part of all allowed pairs that each head attends to. Sources with a ``k``
            keep at least ``k`` keys for each query.
        total_steps: Number of training steps.
        dense_part: Part of the steps that are dense, in [0, 1].
        trial_interval: Number of steps from one trial step to the next, at least 2.
        keep_dense: Names of modules whose attention stays dense, as in ``model.named_modules()``.
        scaler: The :class:`torch.amp.GradScaler` of the loss, which float16 needs.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range, or the model has no source with a target
            density.

    Example:
        >>> from sbm_pyg import SBMAttentionConv
        >>> conv = SBMAttentionConv(16, 8, heads=2, num_clusters=4)
        >>> optimizer = torch.optim.Adam(conv.parameters())
        >>> sparsifier = Sparsifier(conv, density=0.1, total_steps=20)
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
        density: float,
        total_steps: int,
        *,
        dense_part: float = 0.7,
        trial_interval: int = 10,
        keep_dense: Iterable[str] = (),
        scaler: Any = None,
    ) -> None:
        checks.kind("model", model, torch.nn.Module, "a module", "Its sources are set.")
        checks.number("density", density, "(0, 1)", "It is a part of the pairs; leave the Sparsifier out for all.")
        total_steps = checks.integer("total_steps", total_steps, 1, "It is the number of training steps.")
        checks.number("dense_part", dense_part, "[0, 1]", "It is a part of the training steps.")
        trial_interval = checks.integer("trial_interval", trial_interval, 2, "One of so many steps is a trial step.")
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise TypeError(f"Expected 'scaler' to be a GradScaler (got {type(scaler).__name__}). Leave it out.")
        self.sources, dense_sources = self._find_sources(model, keep_dense)
        if not self.sources:
            raise ValueError(
                "Expected 'model' to have a source with a target density (got none). Give its layers one, e.g. "
                "SBMAttentionConv; `sbm_pyg.replace_attention` does it for models of torch, and that of "
                "`sbm_pyg.integrations.hugging_face` for models of transformers. Fixed patterns have none."
            )
        self._number = next(NUMBERS)
        schedules = [source.schedule for source in self.sources]
        self._was_sparse = any(schedule is not None and not schedule.is_dense_phase for schedule in schedules)
        for source in dense_sources:
            source.target_density, source.schedule = 1.0, None
        self.density, self.total_steps, self.trial_interval = float(density), total_steps, trial_interval
        self.dense_steps = math.ceil(dense_part * total_steps * (1 - 1e-12))  # 0.55 of 100 is 55
        """Number of steps before all steps run at the target density."""
        self.steps = 0
        """Number of steps that are over. A trainer that counts steps itself sets it before :meth:`step`."""
        self.history: list[Loss] = []
        """Running losses after each trial step, and after every ``trial_interval`` sparse steps."""
        self._dense = self._sparse = math.nan
        self._since_trial = 0  # steps, or since the last row of the history
        parts: Iterable[Any] = model.modules()
        for layer in parts:
            estimator = getattr(layer, "estimator", None)
            if type(estimator) is Local and getattr(layer, "source", None) in self.sources:
                layer.estimator = Distill(probes=estimator.probes, rows=estimator.rows)
        self._passes = Passes(scaler)
        self._losses = self._join_losses(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad and not is_lazy(parameter)]
        trained = [parameter for parameter in trained if not parameter.is_inference()]  # which have no versions
        of_sources = {id(parameter) for source in self.sources for parameter in source.parameters()}
        self._own = [parameter for parameter in trained if id(parameter) in of_sources]
        self._others = [parameter for parameter in trained if id(parameter) not in of_sources]
        self._versions, self._unmoved = self._read_versions(), 0
        self.set_density()

    @staticmethod
    def _find_sources(
        model: torch.nn.Module, keep_dense: Iterable[str]
    ) -> tuple[list[DensitySource], list[DensitySource]]:
        """The sources whose target density changes, and those that stay dense."""
        modules = dict(model.named_modules())
        several = isinstance(keep_dense, Iterable) and not isinstance(keep_dense, str)
        names = [*keep_dense] if several else [keep_dense]
        unknown = [name for name in names if name not in modules]
        what, way_out = "to be names of modules of 'model'", "Pass a list of names as in `model.named_modules()`."
        checks.require(not unknown and several, "keep_dense", what, repr(unknown or keep_dense), way_out)
        inside = {
            name: [module for module in modules[name].modules() if isinstance(module, DensitySource)] for name in names
        }
        dense = [source for sources in inside.values() for source in sources]
        density_sources = (module for module in modules.values() if isinstance(module, DensitySource))
        return [source for source in density_sources if source not in dense], dense

    def _join_losses(self, model: torch.nn.Module) -> list[AuxiliaryLosses]:
        """Attach the auxiliary losses of all layers to the passes of this training, and return their stores."""
        of_source: dict[torch.nn.Module, list[AuxiliaryLosses]] = {}
        for part in model.modules():
            losses = getattr(part, "auxiliary_losses", None)
            if isinstance(losses, AuxiliaryLosses):
                losses.passes, losses.source = self._passes, getattr(part, "source", None) or part
                losses.shared = of_source.setdefault(losses.source, [])
                losses.shared.append(losses)
                losses.end_step()
        return [losses for shared in of_source.values() for losses in shared]

    # ------------------------------------------------------------------ the schedule

    @property
    def passes(self) -> int | None:
        """Number of backward passes of a step, e.g. with gradient accumulation. None, the default, counts them.

        In dense steps the count is exact. In trial steps and sparse steps it is the count of the previous step, so set
        the number, or None, before steps with a different number of passes.
        """
        return self._passes.per_step

    @passes.setter
    def passes(self, passes: int | None) -> None:
        way_out = "It is the number of parts of a batch; None counts them."
        self._passes.know(None if passes is None else checks.integer("passes", passes, 1, way_out))

    @property
    def scaler(self) -> Any:
        """The scaler of the loss, or None."""
        return self._passes.scaler

    @torch.no_grad()
    def step(self, loss: float | Tensor) -> float:
        """Record the loss of a training step, and return the target density of the next step.

        Args:
            loss: The loss of the task, one number.

        Raises:
            TypeError, ValueError: The loss is not one number, or not finite.
            RuntimeError: Another Sparsifier has been made for the same sources.
        """
        if any(source.schedule is None or source.schedule.sparsifier != self._number for source in self.sources):
            raise RuntimeError(
                "Expected one Sparsifier for a source (got a step of one after another was made for the same model). "
                "Step the last one, and make a new one for each training."
            )
        value = checks.scalar("loss", loss, "Take the mean of several losses.")
        checks.require(math.isfinite(value), "loss", "to be finite", value, "Look for a step that diverged.")
        self._check_optimizer()
        was_trial, was_sparse = self._is_trial, self.is_sparse
        if self._was_sparse and not was_sparse:
            warnings.warn(
                f"The model was sparse, and a second Sparsifier trains it dense until step {self.dense_steps:,}. Pass "
                "`dense_part=0` to go on sparse, or load the state of the first one.",
                UserWarning,
                stacklevel=3,  # the caller of step, which no_grad wraps
            )
        self._was_sparse = False
        self.steps += 1
        self._passes.end_step(max((losses.counted for losses in self._losses), default=0))
        for losses in self._losses:
            losses.end_step()
        if was_trial or was_sparse:
            self._sparse = _mix(self._sparse, value, MOMENTUM if was_sparse else TRIAL_MOMENTUM)
        else:
            self._dense = _mix(self._dense, value, min(MOMENTUM, 1 - 1 / self.steps))
        self._since_trial += 1
        if self._since_trial >= self.trial_interval:
            self._since_trial = 0
            self.history.append(Loss(self.steps, self._dense, self._sparse, was_sparse))
        self.set_density()
        return self.next_density

    @property
    def is_sparse(self) -> bool:
        """Whether the next step and all later steps run at the target density."""
        return self.steps >= self.dense_steps

    @property
    def losses(self) -> Loss:
        """The running losses now."""
        return Loss(self.steps, self._dense, self._sparse, self.is_sparse)

    @property
    def _is_trial(self) -> bool:
        """Whether the next step is a trial step."""
        return not self.is_sparse and self._since_trial >= self.trial_interval - 1

    @property
    def next_density(self) -> float:
        """Target density of the next training step; 1 while attention is dense."""
        return self.density if self.is_sparse or self._is_trial else 1.0

    def set_density(self, density: float | None = None) -> None:
        """Set the density at which the model is evaluated and saved, until the next step; training keeps its schedule.

        Args:
            density: The density in (0, 1], e.g. 1 for dense attention; None: the target density.
        """
        of_training = None if density is None and self.is_sparse else self.next_density
        for source in self.sources:
            source.target_density = self.density if density is None else density
            source.schedule = Schedule(self._number, of_training, not self.is_sparse)

    def _read_versions(self) -> list[list[int]]:
        """Count the writes to parameters of the sources, and the writes to other parameters."""
        return [[parameter._version for parameter in parameters] for parameters in (self._own, self._others)]

    def _check_optimizer(self) -> None:
        """Warn once if the optimizer changes other parameters, but not the sources, although these get gradients."""
        before, self._versions = self._versions, self._read_versions()
        moved, others_moved = (old != new for old, new in zip(before, self._versions, strict=True))
        learns = any(parameter.grad is not None for parameter in self._own)
        self._unmoved = self._unmoved + 1 if learns and others_moved and not moved else 0
        if self._unmoved == UNMOVED_STEPS:
            warnings.warn(
                f"The optimizer has not changed the graph sources in {UNMOVED_STEPS} steps. Make it of the parameters "
                "of the whole model, after `replace_attention`.",
                UserWarning,
                stacklevel=4,  # the caller of step, which no_grad wraps
            )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The state that :meth:`load_state_dict` continues from, for a checkpoint. Means of no loss yet are None."""
        return {
            "steps": self.steps,
            "is_sparse": self.is_sparse,
            "dense": _none_if_nan(self._dense),
            "sparse": _none_if_nan(self._sparse),
            "since_trial": self._since_trial,
            "passes": self._passes.last,
            "history": [tuple(map(_none_if_nan, row)) for row in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. A model that was sparse stays sparse, even with different ``total_steps``.

        Raises:
            TypeError: The state is not a dict, or a part of it has another type.
            ValueError: The state lacks a part, or a number is out of range.
        """
        checks.kind("state", state, Mapping, "a dict", "It is the `state_dict()` of a Sparsifier.")
        missing = [name for name in self.state_dict() if name not in state]
        checks.require(not missing, "state", "of a Sparsifier", f"none of {missing}", "Save its `state_dict()`.")
        what = "It is a part of `state_dict()`."
        for name in ("steps", "since_trial"):
            checks.integer(name, state[name], 0, what)
        checks.number("passes", state["passes"], "[1, inf)", what)
        checks.flag("is_sparse", state["is_sparse"], what)
        for name in ("dense", "sparse"):
            if state[name] is not None:
                checks.number(name, state[name], "[-inf, inf]", what)
        checks.kind("history", state["history"], list | tuple, "a list", what)
        for row in state["history"]:
            if not isinstance(row, list | tuple) or len(row) != len(Loss._fields):
                raise ValueError(f"Expected 'history' of {len(Loss._fields)} numbers a step (got {row!r}). {what}")
        self.steps, self._since_trial = state["steps"], state["since_trial"]
        self._dense, self._sparse = (math.nan if state[name] is None else state[name] for name in ("dense", "sparse"))
        self.dense_steps = 0 if state["is_sparse"] else self.dense_steps
        self._passes.last = state["passes"]
        self.history = [Loss._make(math.nan if x is None else x for x in row) for row in state["history"]]
        self.set_density()

    # ------------------------------------------------------------------ what callbacks share

    def _follow(self, previous: Sparsifier | None, has_begun: bool) -> None:
        """Continue from the Sparsifier of an earlier training of the same sources, if sparse or interrupted."""
        if previous is not None and previous.sources == self.sources and (has_begun or previous.is_sparse):
            self.load_state_dict(previous.state_dict())

    def _move_to(self, steps: int, passes: int | None) -> None:
        """Set the count of steps to the trainer's, before a step of ``passes`` backward passes."""
        self.steps, self.passes = steps, passes
        self.set_density()

    def _logs(self) -> dict[str, float]:
        """Return the values that a trainer logs: the losses measured so far, and the density of training."""
        losses = {"loss_dense": self._dense, "loss_sparse": self._sparse}
        return {name: x for name, x in losses.items() if not math.isnan(x)} | {"target_density": self.next_density}

    def _warn_if_dense(self) -> None:
        """Warn at the end of a training that has not become sparse."""
        if not self.is_sparse:
            warnings.warn(
                f"Training ended after {self.steps:,} of {self.total_steps:,} steps and was dense until then, but "
                f"evaluation runs at a density of {self.density}, for which it was to begin to train at step "
                f"{self.dense_steps:,}. Pass `total_steps=` if fewer steps run, or a smaller `dense_part=`.",
                UserWarning,
                stacklevel=2,
            )

    def __str__(self) -> str:
        """Progress: the running losses, the number of steps, and when training becomes sparse."""
        losses = "no loss yet" if math.isnan(self._dense) else f"dense {self._dense:.4g}"
        losses += "" if math.isnan(self._sparse) else f", at {100 * self.density:.3g} % {self._sparse:.4g}"
        return f"{losses}, {self.steps:,} steps, {'sparse' if self.is_sparse else f'dense until {self.dense_steps:,}'}"

    def __repr__(self) -> str:
        sources = f"{len(self.sources)} source{'' if len(self.sources) == 1 else 's'}"
        return f"{type(self).__name__}({sources}, density={self.density}, {self})"


def _mix(old: float, new: float, momentum: float) -> float:
    """Update a running mean with one more number; the first number becomes the mean."""
    return new if math.isnan(old) else momentum * old + (1 - momentum) * new


def _none_if_nan(value: Any) -> Any:
    """The value, or None for NaN, since NaN differs from itself when states are compared."""
    return None if isinstance(value, float) and math.isnan(value) else value
