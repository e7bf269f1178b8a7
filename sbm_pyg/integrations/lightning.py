"""A :class:`~sbm_pyg.Sparsifier` as a callback of Lightning.

In: a ``LightningModule`` whose layers have learned graph sources. Out: its training, from dense attention to sparse.
Needs the package ``lightning``.
"""

from __future__ import annotations

import math
from typing import Any

import lightning
from torch import Tensor

from ..ops import checks
from ..training.sparsifier import Sparsifier

__all__ = ["SparsifierCallback"]


class SparsifierCallback(lightning.Callback):
    """Trains a model with dense attention first and with sparse graphs later, by a :class:`~sbm_pyg.Sparsifier`.

    The callback takes the number of steps, the current step and the scaler of float16 from the trainer, so a second
    ``fit`` of one trainer continues where the first one ended. Validation and tests run at the target density.
    The callback logs ``loss_dense``, ``loss_sparse`` and ``target_density``, also to the progress bar, and saves its
    state in checkpoints. A warning is raised if training ends before the model is sparse.

    Args:
        density: Target density in (0, 1).
        **options: Options of :class:`~sbm_pyg.Sparsifier`. ``total_steps`` is needed for data without a length and
            ``max_epochs``, for a training without an end, and, as the number of batches, for several optimizers and
            ``max_steps``.

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
        self._global_step = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the sparsifier."""
        steps = self.options.get("total_steps")
        if steps is None:
            steps = trainer.estimated_stepping_batches
            what = "for a trainer that does not know how many steps it will take"
            way_out = "Pass it, or `max_steps` to the trainer; `max_epochs` is enough for data with a length."
            checks.require(0 < steps < math.inf, "total_steps", what, "none", way_out)
            if steps == trainer.max_steps and len(trainer.optimizers) > 1:
                raise ValueError(
                    f"Expected 'total_steps' with 'max_steps' and {len(trainer.optimizers)} optimizers (got none). The "
                    "trainer counts the steps of each optimizer: pass the number of batches."
                )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        options = {"scaler": scaler, **self.options, "total_steps": steps}
        previous, self.sparsifier = self.sparsifier, Sparsifier(pl_module, self.density, **options)
        self.sparsifier._follow(previous, trainer.global_step > 0)
        self._losses.clear()  # of a training that was interrupted

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue from the state of a checkpoint, which some strategies load only now, and note the first step."""
        self._global_step = trainer.global_step
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

    def _steps(self, trainer: Any, pl_module: Any, is_over: bool) -> int:
        """Count the optimizer's steps before a batch or after it; count batches if these end a manual training."""
        assert self.sparsifier is not None
        ends_by_steps = len(trainer.optimizers) == 1 and self.sparsifier.total_steps == trainer.max_steps
        if pl_module.automatic_optimization or ends_by_steps:
            return int(trainer.global_step)
        return int(trainer.fit_loop.total_batch_idx + is_over)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Set the density of the step of a batch, and the number of its backward passes."""
        assert self.sparsifier is not None
        turns = trainer.accumulate_grad_batches
        if batch_idx % turns == 0:
            left = trainer.num_training_batches - batch_idx
            is_known = pl_module.automatic_optimization and (turns == 1 or left < math.inf)
            steps = self._steps(trainer, pl_module, is_over=False)
            self.sparsifier._move_to(steps, min(turns, left) if is_known else None)

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
        if trainer.global_step == self._global_step:  # gradients are accumulated
            return
        self._global_step = trainer.global_step
        self.sparsifier.steps = self._steps(trainer, pl_module, is_over=True)
        if not self._losses:  # the training step returned None, to skip its batch
            return
        loss = sum(self._losses) / len(self._losses) * trainer.accumulate_grad_batches  # by which each is divided
        self.sparsifier.steps -= 1
        self.sparsifier.step(loss)
        self._losses.clear()
        pl_module.log_dict(self.sparsifier._logs(), prog_bar=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Warn if training has not become sparse."""
        if self.sparsifier is not None:
            self.sparsifier._warn_if_dense()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Warn if training was interrupted before it has become sparse."""
        if trainer.training:
            self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """State of the sparsifier, for checkpoints."""
        return self._state if self.sparsifier is None else self.sparsifier.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts."""
        self._state = state_dict
