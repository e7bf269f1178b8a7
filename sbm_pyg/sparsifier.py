"""From dense attention to sparse: the schedule of a model's target densities during training.

In: a model whose layers have learned graph sources, and the loss of each step. Out: target densities of the sources.
Not here: dense attention and what sources learn from it (``sources.learned``, ``estimators``).
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .auxiliary import AuxiliaryLosses
from .estimators import Distill, Local
from .layers.attention import AttentionConv
from .ops import checks
from .sources.learned import DensitySource, LearnedSource

__all__ = ["Loss", "Sparsifier"]

NUMBERS = itertools.count()  # of Sparsifiers: a source is set by the last one that was made for it
UNMOVED_STEPS = 10  # without a change of the sources, before a warning
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
    """Whether the step was after the dense ones."""


class Sparsifier:
    r"""Trains a model with dense attention first and with sparse graphs later.

    While attention is dense, torch's kernel computes it, and each source learns its probabilities by distillation on a
    sample of query rows. Every few steps a *trial step* runs at the target density, gradients included, so that the
    loss at the target density is known. After ``dense_part`` of the steps, all steps run at the target density.

    Call :meth:`step` after each step of the optimizer. In place of the estimator :class:`~sbm_pyg.estimators.Local`,
    layers get :class:`~sbm_pyg.estimators.Distill`, and sources are detached while attention is dense: then their loss
    trains no queries and keys. Auxiliary losses join the backward pass by themselves, with weight 1 over the number of
    forward passes between two steps, so do not add :func:`~sbm_pyg.auxiliary_loss`.

    Args:
        model: Module with sources that are a :class:`~sbm_pyg.DensitySource`. Their target densities become 1.
        density: Target density in (0, 1): the part of all allowed pairs that each head attends to. Sources with a
            number of keys ``k`` keep at least so many for each query.
        total_steps: Number of training steps.
        dense_part: Part of the steps that are dense, in [0, 1].
        every: Number of steps from one trial step to the next, at least 2.
        keep_dense: Names of modules whose attention stays dense, as in ``model.named_modules()``.
        scaler: The :class:`torch.amp.GradScaler` of the loss. Needed for float16.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range, or the model has no source with a target
            density.

    Example:
        >>> from sbm_pyg import SBMAttentionConv
        >>> conv = SBMAttentionConv(16, 8, heads=2, num_blocks=4, self_loops=True)
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
        every: int = 10,
        keep_dense: Iterable[str] = (),
        scaler: Any = None,
    ) -> None:
        checks.kind("model", model, torch.nn.Module, "a module", "Its sources are set.")
        checks.number("density", density, "(0, 1)", "It is a part of the pairs; leave the Sparsifier out for all.")
        total_steps = checks.integer("total_steps", total_steps, 1, "It is the number of training steps.")
        checks.number("dense_part", dense_part, "[0, 1]", "It is a part of the training steps.")
        every = checks.integer("every", every, 2, "One of so many steps is a trial step.")
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise TypeError(f"Expected 'scaler' to be a GradScaler (got {type(scaler).__name__}). Leave it out.")
        self.sources, kept = self._find_sources(model, keep_dense)
        if not self.sources:
            raise ValueError(
                "Expected 'model' to have a source with a target density (got none). Give its layers one, e.g. "
                "SBMAttentionConv; `sbm_pyg.replace_attention` does it for models of torch, and that of "
                "`sbm_pyg.integrations.hugging_face` for models of transformers. Fixed patterns have none."
            )
        self._number = next(NUMBERS)
        for source in self.sources:
            source._sparsifier = self._number
        for source in kept:
            source.target_density = 1.0
        self.density, self.total_steps, self.every = float(density), total_steps, every
        self.dense_steps = math.ceil(dense_part * total_steps * (1 - 1e-12))  # 0.55 of 100 is 55
        """Number of steps before all steps run at the target density."""
        self.scaler = scaler
        self.steps = 0
        """Number of steps that are over."""
        self.history: list[Loss] = []
        """Running losses after each trial step, and after each ``every``-th sparse step."""
        self._dense = self._sparse = math.nan
        self._contexts = 0  # of `sparse`, one in the other
        for layer in model.modules():
            if isinstance(layer, AttentionConv) and layer.source in self.sources and type(layer.estimator) is Local:
                layer.estimator = Distill(probes=layer.estimator.probes, rows=layer.estimator.rows)
        found = (getattr(part, "auxiliary_losses", None) for part in model.modules())
        self._losses = [each for each in found if isinstance(each, AuxiliaryLosses)]
        self._passes = [1] * len(self._losses)  # calls of each layer in the last step
        self._join_losses()
        trained = [each for each in model.parameters() if each.requires_grad and not is_lazy(each)]
        trained = [each for each in trained if not each.is_inference()]  # which have no versions
        of_sources = {id(each) for source in self.sources for each in source.parameters()}
        self._own = [each for each in trained if id(each) in of_sources]
        self._others = [each for each in trained if id(each) not in of_sources]
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
        if unknown or not several:
            raise ValueError(
                f"Expected 'keep_dense' to be names of modules of 'model' (got {unknown or keep_dense!r}). Pass a list "
                "of names as in `model.named_modules()`."
            )
        inside = {name: [each for each in modules[name].modules() if isinstance(each, DensitySource)] for name in names}
        kept = [source for sources in inside.values() for source in sources]
        found = (each for each in modules.values() if isinstance(each, DensitySource))
        return [source for source in found if source not in kept], kept

    # ------------------------------------------------------------------ the schedule

    @torch.no_grad()
    def step(self, loss: float | Tensor) -> float:
        """Record the loss of a training step, and return the target density of the next one.

        Args:
            loss: The loss of the task, one number.

        Raises:
            TypeError, ValueError: The loss is not one number, or not finite.
            RuntimeError: Another Sparsifier has been made for the same sources, or :meth:`sparse` has not ended.
        """
        if any(source._sparsifier != self._number for source in self.sources):
            raise RuntimeError(
                "Expected one Sparsifier for a source (got a step of one after another was made for the same model). "
                "Step the last one, and make a new one for each training."
            )
        if self._contexts:
            raise RuntimeError(
                "Expected a step outside of `sparse()` (got one inside). Evaluate inside, and train outside; a "
                "Sparsifier with dense_part=0 trains sparse from the first step."
            )
        value = checks.scalar("loss", loss, "Take the mean of several losses.")
        if not math.isfinite(value):
            raise ValueError(f"Expected 'loss' to be finite (got {value}). Look for a step that diverged.")
        self._check_optimizer()
        was_trial, was_sparse = self._is_trial, self.is_sparse
        self.steps += 1
        self._passes = [losses.passes for losses in self._losses]
        self._join_losses()
        if was_trial or was_sparse:
            self._sparse = _mix(self._sparse, value, MOMENTUM if was_sparse else TRIAL_MOMENTUM)
        else:
            self._dense = _mix(self._dense, value, min(MOMENTUM, 1 - 1 / self.steps))
        if was_trial or (was_sparse and self.steps % self.every == 0):
            self.history.append(Loss(self.steps, self._dense, self._sparse, was_sparse))
        self.set_density()
        return self.next_density

    @property
    def is_sparse(self) -> bool:
        """Whether the next step and all later ones run at the target density."""
        return self.steps >= self.dense_steps

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
        """Target density of the next step; 1 while attention is dense."""
        return self.density if self.is_sparse or self._is_trial else 1.0

    def set_density(self, density: float | None = None) -> None:
        """Set the target density of all sources, e.g. for an evaluation, without a change of the schedule.

        Args:
            density: The density in (0, 1]; None: that of the next training step. A trial step is for training mode
                alone: in evaluation mode attention is dense until training is sparse.
        """
        usual = self.density if self.is_sparse else 1.0
        for source in self.sources:
            source.target_density = usual if density is None else density
            if density is None and self._is_trial:
                source.trial_density = self.density
            if isinstance(source, LearnedSource):
                source._teach(not self.is_sparse)

    @contextmanager
    def sparse(self) -> Iterator[None]:
        """Context in which the model runs at the target density, e.g. to evaluate it before training is sparse."""
        self._contexts += 1
        self.set_density(self.density)
        try:
            yield
        finally:
            self._contexts -= 1
            self.set_density(self.density if self._contexts else None)

    def _read_versions(self) -> list[list[int]]:
        """How often parameters of the sources, and all others, have been written."""
        return [[each._version for each in some] for some in (self._own, self._others)]

    def _check_optimizer(self) -> None:
        """Warn once if the optimizer changes other parameters, but none of the sources, which have gradients."""
        before, self._versions = self._versions, self._read_versions()
        moved, others_moved = (old != new for old, new in zip(before, self._versions, strict=True))
        learns = any(each.grad is not None for each in self._own)
        self._unmoved = self._unmoved + 1 if learns and others_moved and not moved else 0
        if self._unmoved == UNMOVED_STEPS:
            warnings.warn(
                f"The optimizer has not changed the graph sources in {UNMOVED_STEPS} steps. Make it of the parameters "
                "of the whole model, after `replace_attention`.",
                UserWarning,
                stacklevel=4,  # the caller of step, which no_grad wraps
            )

    def _join_losses(self) -> None:
        """Set the weight of auxiliary losses: that of the loss in one of the backward passes of a step."""
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        for losses, passes in zip(self._losses, self._passes, strict=True):
            losses.weight, losses.scaled, losses.passes = scale / max(1, passes), self.scaler is not None, 0

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The state that :meth:`load_state_dict` continues from, for a checkpoint. Means of no loss yet are None."""
        state = {name: _none_if_nan(getattr(self, name)) for name in STATE}
        return state | {"history": [tuple(map(_none_if_nan, each)) for each in self.history]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. A model that was sparse stays sparse, also with other ``total_steps``.

        Raises:
            TypeError: The state is not a dict, or a number in it has another type.
            ValueError: The state lacks a number, or is that of a model with other layers.
        """
        checks.kind("state", state, Mapping, "a dict", "It is the `state_dict()` of a Sparsifier.")
        missing = [name for name in (*STATE, "history") if name not in state]
        if missing:
            raise ValueError(f"Expected 'state' of a Sparsifier (got none of {missing}). Save its `state_dict()`.")
        what = "It is a part of `state_dict()`."
        for name in ("_passes", "history"):
            checks.kind(name, state[name], list | tuple, "a list", what)
        if len(state["_passes"]) != len(self._losses):
            raise ValueError(
                f"Expected 'state' of a model with {len(self._losses)} layers that have auxiliary losses (got one with "
                f"{len(state['_passes'])}). Make the model and its attention as they were when it was saved."
            )
        for name in ("steps", "dense_steps"):
            checks.integer(name, state[name], 0, what)
        for count in state["_passes"]:
            checks.integer("_passes", count, 0, what)
        for each in state["history"]:
            if not isinstance(each, list | tuple) or len(each) != len(Loss._fields):
                raise ValueError(f"Expected 'history' of {len(Loss._fields)} numbers a step (got {each!r}). {what}")
        for name in ("_dense", "_sparse"):
            if state[name] is not None:
                checks.number(name, state[name], "[-inf, inf]", what)
        dense_steps = self.dense_steps
        for name in STATE:
            setattr(self, name, math.nan if state[name] is None else state[name])
        self.dense_steps = min(dense_steps, self.steps) if self.is_sparse else dense_steps  # sparse models stay so
        self._join_losses()
        self.history = [Loss._make(math.nan if x is None else x for x in each) for each in state["history"]]
        self.set_density()

    def __str__(self) -> str:
        """Progress: the running losses, the number of steps, and when training becomes sparse."""
        losses = "no loss yet" if math.isnan(self._dense) else f"dense {self._dense:.4g}"
        losses += "" if math.isnan(self._sparse) else f", at {100 * self.density:.3g} % {self._sparse:.4g}"
        return f"{losses}, {self.steps:,} steps, {'sparse' if self.is_sparse else f'dense until {self.dense_steps:,}'}"

    def __repr__(self) -> str:
        sources = f"{len(self.sources)} source{'' if len(self.sources) == 1 else 's'}"
        return f"{type(self).__name__}({sources}, density={self.density}, {self})"


STATE = ("steps", "dense_steps", "_dense", "_sparse", "_passes")
"""Attributes of a state."""


def _mix(old: float, new: float, momentum: float) -> float:
    """A running mean after one more number; the number itself if there was none."""
    return new if math.isnan(old) else momentum * old + (1 - momentum) * new


def _none_if_nan(value: Any) -> Any:
    """The value, or None for NaN, which equals nothing when states are compared."""
    return None if isinstance(value, float) and math.isnan(value) else value
