"""Auxiliary losses, which some layers minimise in addition to the task's loss.

In: a scalar from a layer in training. Out: their sum over a model, for the training loop to add to the loss. Not here:
the losses themselves (``estimators``, ``dcmm``).
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

__all__ = ["AuxiliaryLosses", "auxiliary_loss", "in_backward", "mean_weights"]


def auxiliary_loss(model: torch.nn.Module) -> Tensor:
    """Sum of the auxiliary losses of a model's forward passes since the last call, a scalar; 0 without such layers.

    The estimators ``"distill"`` and ``"imitate"`` and the entropy of :class:`~sbm_pyg.DCMMBias` have one in training.
    A :class:`~sbm_pyg.Sparsifier` adds them by itself, and then this is 0. Without one, add it to the loss of the task
    before that is scaled, averaged or divided: ``loss = task_loss + auxiliary_loss(model)``. It is a mean over
    sequences, like the losses of most tasks, so gradient accumulation, several processes and
    :class:`torch.amp.GradScaler` treat both alike.

    A backward pass through such a layer raises RuntimeError if its loss was not taken by this function. Other
    estimators have a loss only while the target density is 1, and then a backward pass without it warns: attention
    trains, and its source does not. Compiled code checks nothing and adds up the losses of its calls. Without this
    function the backward pass of the next step then goes through the last one again, for which torch raises an error.

    Args:
        model: Module whose submodules are searched.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> from sbm_pyg import SBMAttentionConv
        >>> conv = SBMAttentionConv(16, 8, heads=2, num_blocks=4, estimator="distill")
        >>> loss = conv(torch.randn(30, 16)).square().mean() + auxiliary_loss(conv)
        >>> loss.backward()
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"Expected 'model' to be a module (got {type(model).__name__}). Its submodules are searched.")
    kept = (getattr(module, "auxiliary_losses", None) for module in model.modules())
    found = [loss for each in kept if isinstance(each, AuxiliaryLosses) for loss in each.take()]
    if found:
        total = found[0]
        for loss in found[1:]:
            total = total + loss.to(total.device)
        return total
    some = next(model.parameters(), None)
    return torch.zeros((), device=None if some is None else some.device)


def in_backward() -> bool:
    """True in a backward pass of autograd, in which activation checkpointing repeats calls."""
    return torch._C._current_graph_task_id() >= 0


class AuxiliaryLosses:
    """The auxiliary losses of one module's calls, until :func:`auxiliary_loss` takes them.

    A loss lives as long as the output of its call, whose backward pass checks that it was taken. Copies and pickles of
    the module start without losses, and join later ones as the module does.
    """

    def __init__(self, weight: float | None = None, scaled: bool = False) -> None:
        self.calls: WeakValueDictionary[int, _Call] = WeakValueDictionary()
        self.count = 0
        self.compiled: Tensor | None = None
        self.weight = weight
        """Weight with which losses join the backward pass of their calls. None: :func:`auxiliary_loss` takes them."""
        self.scaled = scaled
        """Whether the weight follows a GradScaler."""
        self.passes = 0
        """Backward passes of calls that had a loss, since it was set to 0; in compiled code, the calls."""

    def __reduce__(self) -> tuple[type[AuxiliaryLosses], tuple[float | None, bool]]:
        return AuxiliaryLosses, (self.weight, self.scaled)

    def add(self, out: Tensor, loss: Tensor | None, whose: str, is_needed: bool = True) -> Tensor:
        """Store the loss of a call, if there is one, and return its output.

        A backward pass raises an error if the loss was not taken; it names the module, ``whose`` loss it is. It warns
        if the loss is not needed. A loss without a gradient, as of frozen sources, is not stored.
        """
        if loss is None or not loss.requires_grad:
            return out
        if self.weight is not None:
            return self._join(out, loss)
        if torch.compiler.is_compiling():  # its backward pass cannot check the loss
            self.compiled = loss if self.compiled is None or not is_needed else self.compiled + loss
            return out
        call = _Call(loss, whose, is_needed)
        if not in_backward():  # a repeated call of checkpointing: the first call stored its loss
            self.count += 1
            self.calls[self.count] = call
        # if attention is frozen, the output requires a gradient only because of the loss, and keeps the call alive
        reminded: Tensor = _Reminder.apply(out, call, None if out.requires_grad else loss)
        return reminded

    def _join(self, out: Tensor, loss: Tensor) -> Tensor:
        device = out.device.type
        if not self.scaled and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            raise ValueError(
                "Expected 'scaler' with autocast to float16 (got None). Pass the GradScaler of the loss: "
                "`Sparsifier(model, density, total_steps, scaler=scaler)`."
            )
        is_compiled = torch.compiler.is_compiling()  # a compiled backward pass does not count itself
        if is_compiled and not in_backward():
            self.passes += 1
        joined: Tensor = _Join.apply(out, loss, self.weight, None if is_compiled else self)
        return joined

    def take(self) -> list[Tensor]:
        """Remove and return the losses of the calls."""
        found = [call.take() for _, call in sorted(self.calls.items())]
        found += [] if self.compiled is None else [self.compiled]
        self.calls.clear()
        self.compiled = None
        return found


class _Join(torch.autograd.Function):
    """Identity of an output whose backward pass is also that of a loss, times a weight, and is counted."""

    @staticmethod
    def forward(out: Tensor, loss: Tensor, weight: float, counted: AuxiliaryLosses | None) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float, Any], output: Tensor) -> None:
        _, loss, ctx.weight, ctx.counted = inputs
        ctx.loss = loss.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.counted is not None:
            ctx.counted.passes += 1
        return grad, torch.full_like(ctx.loss, ctx.weight), None, None


class _Call:
    """The auxiliary loss of one call; None after it was taken."""

    def __init__(self, loss: Tensor, whose: str, is_needed: bool) -> None:
        self.loss: Tensor | None = loss
        self.whose, self.is_needed = whose, is_needed

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
                f"Expected the loss to hold the auxiliary loss of {ctx.call.whose} (got a backward pass without it). "
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

    It is :math:`1 / (B N_b)` in sequence b. The mean over a batch is then that of the means over equal parts of it.

    Args:
        ptr: Offsets of the sequences in the tokens, ``[B+1]``.
        count: Number of tokens N, or of rows.
        dtype: Type of the weights.
        rows: Offsets of the sequences in rows that stand for several tokens each, such as blocks. None: one for each.
    """
    each = ((ptr.numel() - 1) * ptr.diff()).clamp(min=1).to(dtype).reciprocal()
    return each.repeat_interleave((ptr if rows is None else rows).diff(), output_size=count)
