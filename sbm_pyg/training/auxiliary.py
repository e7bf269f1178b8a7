"""Auxiliary losses, which some layers minimize in addition to the loss of the task.

In: a scalar from a layer in training. Out: their sum over a model, for the training loop to add to the loss. Not here:
the losses themselves (``estimators``, ``dcmm``).
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..ops import checks
from ..ops.values import in_backward

__all__ = ["AuxiliaryLosses", "Passes", "auxiliary_loss", "mean_weights"]

UNRECORDED_STEPS = 64  # before a warning; LBFGS resets gradients up to 25 times a step


def auxiliary_loss(model: torch.nn.Module) -> Tensor:
    """Sum of the auxiliary losses of a model's forward passes since the last call, a scalar; 0 without such layers.

    The estimators ``"distill"`` and ``"imitate"`` and the entropy of :class:`~sbm_pyg.DCMMBias` add such a loss in
    training. A :class:`~sbm_pyg.Sparsifier` adds auxiliary losses by itself, and this function then returns 0. Without
    a Sparsifier, add the result to the loss of the task before that loss is scaled, averaged or divided: ``loss =
    task_loss + auxiliary_loss(model)``. The result is a mean over sequences, like most task losses, so gradient
    accumulation, several processes and :class:`torch.amp.GradScaler` treat both losses alike.

    A backward pass through such a layer raises RuntimeError if its loss was not taken by this function. Other
    estimators use a loss only while the target density is 1; a backward pass without this loss then warns that
    attention trains and its source does not. Compiled code checks nothing and sums the losses of its calls. Without
    this function, the backward pass of the next step then runs through the graph of the last step again, and torch
    raises an error.

    Args:
        model: Module whose submodules are searched.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> from sbm_pyg import SBMAttentionConv
        >>> conv = SBMAttentionConv(16, 8, heads=2, num_clusters=4, estimator="distill")
        >>> loss = conv(torch.randn(30, 16)).square().mean() + auxiliary_loss(conv)
        >>> loss.backward()
    """
    checks.kind("model", model, torch.nn.Module, "a module", "Its submodules are searched.")
    stores = (getattr(module, "auxiliary_losses", None) for module in model.modules())
    losses = [loss for store in stores if isinstance(store, AuxiliaryLosses) for loss in store.take()]
    if losses:
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss.to(total.device)
        return total
    parameter = next(model.parameters(), None)
    return torch.zeros((), device=None if parameter is None else parameter.device)


class Passes:
    """Counts the backward passes of a training step, in which losses of sources are minimized. All layers share one.

    Copies share the scaler, which the training loop updates; pickles leave it out.
    """

    def __init__(self, scaler: Any = None) -> None:
        self.scaler = scaler
        """The :class:`torch.amp.GradScaler` of the loss, or None. Each backward pass reads its scale."""
        self.per_step: int | None = None
        """Number of passes of a step, if it is known."""
        self.last = 1.0
        """Passes that were counted in the last step; where their number was known, for each of these, at least 1.
        Reentrant checkpointing makes more than one: a pass for each call."""

    def know(self, per_step: int | None) -> None:
        """Set the number of passes of a step, or None to count them."""
        if per_step is None and self.per_step is not None:
            self.last *= self.per_step
        elif per_step is not None and self.per_step is None:
            self.last = 1.0
        self.per_step = per_step

    def end_step(self, counted: int) -> None:
        """Record the number of passes of the step that ended; after 0 passes, the previous number is kept."""
        if counted:
            self.last = float(counted) if self.per_step is None else max(1.0, counted / self.per_step)

    def __deepcopy__(self, memo: dict[int, Any]) -> Passes:
        other = Passes(self.scaler)
        other.per_step, other.last = self.per_step, self.last
        return other

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"scaler": None}


class AuxiliaryLosses:
    """Auxiliary losses of the calls of one module, until :func:`auxiliary_loss` takes them or the calls join them.

    A loss lives as long as the output of its call, whose backward pass checks that the loss was taken. Copies and
    pickles of the module start without losses, and join later losses as the module does.
    """

    def __init__(self) -> None:
        self.passes: Passes | None = None
        """Backward passes that losses join. None: :func:`auxiliary_loss` takes them."""
        self.source: torch.nn.Module | None = None
        """Module that the losses train."""
        self.shared: list[AuxiliaryLosses] = []
        """Those of all layers with the same source."""
        self._clear()

    def _clear(self) -> None:
        self.calls: WeakValueDictionary[int, _Call] = WeakValueDictionary()
        self.count = 0
        self.compiled: Tensor | None = None
        self._nodes: WeakSet[Any] = WeakSet()  # of joined calls in autograd's graph
        self.end_step()

    def end_step(self) -> None:
        """Count the passes of another step."""
        self.counted = 0
        """Backward passes of this step that have accumulated gradients of the loss."""
        self._task, self._weight, self._resets = -1, 1.0, 0

    def __getstate__(self) -> dict[str, Any]:
        return {"passes": self.passes, "source": self.source, "shared": self.shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._clear()

    def add(self, out: Tensor, loss: Tensor | None, owner: str, is_needed: bool = True) -> Tensor:
        """Store the loss of a call, if there is one, and return its output.

        If the loss was not taken, a backward pass raises an error, or warns if the loss is optional; ``owner`` names
        the module that computed the loss. A loss without a gradient, as of frozen sources, is not stored.
        """
        if loss is None or not loss.requires_grad:
            return out
        if self.passes is not None:
            return self._join(out, loss)
        if torch.compiler.is_compiling():  # its backward pass cannot check the loss
            self.compiled = loss if self.compiled is None or not is_needed else self.compiled + loss
            return out
        call = _Call(loss, owner, is_needed)
        if not in_backward():  # a repeated call of checkpointing: the first call stored its loss
            self.count += 1
            self.calls[self.count] = call
        # if attention is frozen, the output requires a gradient only because of the loss, and keeps the call alive
        reminded: Tensor = _Reminder.apply(out, call, None if out.requires_grad else loss)
        return reminded

    @torch.compiler.disable  # a compiled backward pass would keep the weight of its first run
    def _join(self, out: Tensor, loss: Tensor) -> Tensor:
        assert self.passes is not None
        device = out.device.type
        is_half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        what = "with autocast to float16"
        way_out = "Pass the GradScaler of the loss: `Sparsifier(model, density, total_steps, scaler=scaler)`."
        checks.require(self.passes.scaler is not None or not is_half, "scaler", what, "None", way_out)
        joined: Tensor = _Join.apply(out, loss, self)
        if joined.grad_fn is not None:
            self._nodes.add(joined.grad_fn)
        return joined

    def weight(self) -> float:
        """Weight of the loss of a call in the running backward pass: 1 divided by the passes of the step."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._weight = task, self._begin_pass()
        return self._weight

    def _begin_pass(self) -> float:
        """Count a backward pass, return its weight, and rescale gradients that are the mean over earlier passes.

        Calls of one pass share its weight. The number of passes is the known number, or that of the last step. While
        attention is dense, parameters of the source get gradients only from this loss, so these gradients stay the mean
        over all passes even if there are more passes than expected.
        """
        assert self.passes is not None
        assert self.source is not None
        calls = max(1, sum(map(_will_run, self._nodes)))
        parameters = [parameter for parameter in self.source.parameters() if parameter.requires_grad]
        least = self.passes.per_step or 0
        usual = 1 / (calls * (least or 1) * self.passes.last)
        if not any(_will_run(get_gradient_edge(parameter).node) for parameter in parameters):
            return usual  # `torch.autograd.grad` accumulates no gradients
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.counted and not gradients:  # they have been reset
            self._note_reset()
            for losses in self.shared:
                losses.counted = 0
        before = max(losses.counted for losses in self.shared)
        self.counted += 1
        if getattr(self.source, "target_density", None) != 1:
            return usual
        if self.counted > max(before, least) and before:
            with torch.no_grad():
                for gradient in gradients:
                    gradient.mul_(before / self.counted)
        return 1 / (calls * max(before, self.counted, least))

    def _note_reset(self) -> None:
        """Warn once if gradients are reset again and again, but no step is recorded, and so training stays dense."""
        self._resets += 1
        schedule = getattr(self.source, "schedule", None)
        if self._resets == UNRECORDED_STEPS and schedule is not None and schedule.density is not None:
            warnings.warn(
                f"Gradients were reset {UNRECORDED_STEPS} times without `sparsifier.step(loss)`, so training stays "
                "dense. Call it after each step of the optimizer.",
                UserWarning,
                stacklevel=1,  # a backward pass has no caller of the library's
            )

    def take(self) -> list[Tensor]:
        """Remove and return the losses of the calls."""
        losses = [call.take() for _, call in sorted(self.calls.items())]
        losses += [] if self.compiled is None else [self.compiled]
        self.calls.clear()
        self.compiled = None
        return losses


def _will_run(node: Any) -> bool:
    """True if the current backward pass reaches a node; False at a leaf whose gradient is only returned."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # which torch raises for leaves that are inputs of `torch.autograd.grad`
        return False


class _Join(torch.autograd.Function):
    """Return an output unchanged; its backward pass also runs that of a loss, times a weight and the loss scale."""

    @staticmethod
    def forward(out: Tensor, loss: Tensor, losses: AuxiliaryLosses) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, AuxiliaryLosses], output: Tensor) -> None:
        _, loss, ctx.losses = inputs
        ctx.loss = loss.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weight = torch.full_like(ctx.loss, ctx.losses.weight())
        scaler = ctx.losses.passes.scaler
        return grad, weight if scaler is None else scaler.scale(weight), None


class _Call:
    """The auxiliary loss of one call; None after it was taken."""

    def __init__(self, loss: Tensor, owner: str, is_needed: bool) -> None:
        self.loss: Tensor | None = loss
        self.owner, self.is_needed = owner, is_needed

    def take(self) -> Tensor:
        loss, self.loss = self.loss, None
        assert loss is not None
        return loss


class _Reminder(torch.autograd.Function):
    """Identity whose backward pass raises an error, or warns, if the auxiliary loss of the call was not taken."""

    @staticmethod
    def forward(out: Tensor, call: _Call, loss: Tensor | None) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Call, Tensor | None], output: Tensor) -> None:
        ctx.call = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.call.loss is not None and ctx.call.is_needed:
            raise RuntimeError(
                f"Expected the loss to hold the auxiliary loss of {ctx.call.owner} (got a backward pass without it). "
                "Add it, `loss = task_loss + sbm_pyg.auxiliary_loss(model)`, or train with a Sparsifier, which does; "
                "activation checkpointing needs `use_reentrant=False`."
            )
        if ctx.call.loss is not None:
            warnings.warn(
                "Attention is dense (target_density=1), and its graph source learns nothing: no Sparsifier trains it. "
                "Make one, `Sparsifier(model, density, total_steps)`, or set another target density.",
                UserWarning,
                stacklevel=1,
            )
        return grad, None, None


def mean_weights(ptr: Tensor, count: int, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """Weight of each token in a mean over sequences of the means over their tokens, ``[N]``.

    The weight is :math:`1 / (B N_b)` in sequence b. So a mean over a batch is the mean over its equal parts.

    Args:
        ptr: Offsets of the sequences in the tokens, ``[B+1]``.
        count: Number of tokens N, or of rows.
        dtype: Type of the weights.
        rows: Offsets of the sequences in rows that stand for several tokens each, such as blocks. None: one for each.
    """
    weight = ((ptr.numel() - 1) * ptr.diff()).clamp(min=1).to(dtype).reciprocal()
    return weight.repeat_interleave((ptr if rows is None else rows).diff(), output_size=count)
