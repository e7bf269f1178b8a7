"""A :class:`~sbm_pyg.Sparsifier` as a callback of Lightning.

In: a ``LightningModule`` whose layers have learned graph sources. Out: its training, from dense attention to sparse.
Needs the package ``lightning``.
"""

from __future__ import annotations

from typing import Any

import lightning
from torch import Tensor

from ..sparsifier import Sparsifier

__all__ = ["SparsifierCallback"]


class SparsifierCallback(lightning.Callback):
    """Trains a model with dense attention first and with sparse graphs later, by a :class:`~sbm_pyg.Sparsifier`.

    The number of steps and the scaler of float16 are those of the trainer. ``loss_dense``, ``loss_sparse`` and
    ``target_density`` are logged and in the progress bar, validation runs at the target density, and checkpoints
    contain the state.

    Args:
        density: Target density in (0, 1).
        **options: Options of :class:`~sbm_pyg.Sparsifier`. With several optimizers and ``max_steps``, ``total_steps``
            is needed: the number of batches.

    Example:
        >>> import lightning
        >>> callback = SparsifierCallback(density=0.05)
        >>> trainer = lightning.Trainer(max_steps=1000, callbacks=[callback], logger=False)  # doctest: +SKIP
    """

    def __init__(self, density: float = 0.05, **options: Any) -> None:
        self.density, self.options = density, options
        self.sparsifier: Sparsifier | None = None
        """Made when training starts."""
        self._state: dict[str, Any] = {}
        self._losses: list[Tensor] = []
        self._steps = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the sparsifier."""
        steps = self.options.get("total_steps", trainer.estimated_stepping_batches)
        if steps == float("inf"):
            raise ValueError(
                "Expected 'total_steps' for a trainer without an end (got none). Pass it, or `max_steps` or "
                "`max_epochs` to the trainer."
            )
        if "total_steps" not in self.options and steps == trainer.max_steps and len(trainer.optimizers) > 1:
            raise ValueError(
                f"Expected 'total_steps' with 'max_steps' and {len(trainer.optimizers)} optimizers (got none). The "
                "trainer counts the steps of each optimizer: pass the number of batches."
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        usual: dict[str, Any] = {"total_steps": int(steps), "scaler": scaler}
        self.sparsifier = Sparsifier(pl_module, self.density, **usual | self.options)
        self._losses.clear()  # of a training that was interrupted

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue from the state of a checkpoint, which some strategies load only now, and note the first step."""
        self._steps = trainer.global_step
        self._restore()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the state of a checkpoint after which there was nothing to train."""
        self._restore()

    def _restore(self) -> None:
        if self._state:
            assert self.sparsifier is not None
            self.sparsifier.load_state_dict(self._state)
            self._state = {}  # another training begins anew

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the state of a checkpoint that was tested or validated."""
        self._state = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Call :meth:`Sparsifier.step <sbm_pyg.Sparsifier.step>` after each step of the optimizer."""
        assert self.sparsifier is not None
        loss = outputs.get("loss") if outputs else None
        if loss is not None:
            self._losses.append(loss)
        elif not pl_module.automatic_optimization:
            raise ValueError(
                "Expected 'training_step' to return its loss with manual optimization (got none). Return it, as in "
                "`return loss`."
            )
        if trainer.global_step == self._steps:  # gradients are accumulated
            return
        self._steps = trainer.global_step
        if not self._losses:  # the training step returned None, to skip its batch
            return
        loss = sum(self._losses) / len(self._losses) * trainer.accumulate_grad_batches  # by which each is divided
        density = self.sparsifier.step(loss)
        self._losses.clear()
        last = self.sparsifier.losses
        pl_module.log_dict({"loss_dense": last.dense, "loss_sparse": last.sparse}, prog_bar=True)
        pl_module.log("target_density", density)

    def state_dict(self) -> dict[str, Any]:
        """State of the sparsifier, for checkpoints."""
        return self._state if self.sparsifier is None else self.sparsifier.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts."""
        self._state = state_dict
