"""A :class:`~sbm_pyg.Sparsifier` as a callback of Hugging Face's ``Trainer``.

In: a model whose layers have learned graph sources. Out: its training, from dense attention to sparse. Needs the
packages ``transformers`` and ``accelerate``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..sparsifier import Sparsifier

__all__ = ["SparsifierCallback"]


class SparsifierCallback(TrainerCallback, ExportableState):
    """Trains a model with dense attention first and with sparse graphs later, by a :class:`~sbm_pyg.Sparsifier`.

    The number of steps and the scaler of float16 are those of the trainer. ``loss_dense``, ``loss_sparse`` and
    ``target_density`` are in its logs, and evaluation runs at the target density. Checkpoints contain the state, which
    ``TrainingArguments(restore_callback_states_from_checkpoint=True)`` restores.

    Args:
        density: Target density in (0, 1).
        **options: Options of :class:`~sbm_pyg.Sparsifier`, other than ``scaler``.

    Example:
        >>> from transformers import Trainer
        >>> trainer = Trainer(model, arguments, callbacks=[SparsifierCallback(0.05)])  # doctest: +SKIP
    """

    def __init__(self, density: float = 0.05, **options: Any) -> None:
        self.density, self.options = density, options
        self.sparsifier: Sparsifier | None = None
        """Made when training starts."""
        self.saved: dict[str, Any] = {}
        self._losses: list[Tensor] = []
        self._hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        """Make the sparsifier, and continue from the state of a checkpoint."""
        usual = {"total_steps": state.max_steps, "scaler": getattr(given.get("optimizer"), "scaler", None)}
        self.sparsifier = Sparsifier(model, self.density, **usual | self.options)
        if self.saved:
            self.sparsifier.load_state_dict(self.saved)
        self._hooks = [model.register_forward_pre_hook(self._before), model.register_forward_hook(self._after)]

    def _before(self, model: torch.nn.Module, inputs: Any) -> None:
        """Set the density of a forward pass."""
        assert self.sparsifier is not None
        self.sparsifier.set_density(None if model.training else self.density)

    def _after(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Note the loss of a forward pass in training."""
        if model.training and getattr(output, "loss", None) is not None:
            self._losses.append(output.loss.detach())

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Call :meth:`Sparsifier.step <sbm_pyg.Sparsifier.step>`."""
        assert self.sparsifier is not None
        if not self._losses:
            raise ValueError(
                "Expected 'model' to return its loss in training (got none). Pass labels, and no function that "
                "computes another loss."
            )
        self.sparsifier.step(torch.stack(self._losses).mean())
        self._losses.clear()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """Add the running losses to the logs."""
        if self.sparsifier is not None and logs is not None:
            last = self.sparsifier.losses
            logs |= {"loss_dense": last.dense, "loss_sparse": last.sparse}
            logs["target_density"] = self.sparsifier.next_density

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Remove the hooks from the model, and leave it at the density of the last step."""
        assert self.sparsifier is not None
        for hook in self._hooks:
            hook.remove()
        self.sparsifier.set_density()

    def state(self) -> dict[str, Any]:
        """Arguments of the constructor and the state of the sparsifier, for checkpoints."""
        saved = self.saved if self.sparsifier is None else self.sparsifier.state_dict()
        return {"args": {"density": self.density, **self.options}, "attributes": {"saved": saved}}
