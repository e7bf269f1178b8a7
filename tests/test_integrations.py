"""Callbacks for Lightning and Hugging Face: from dense to sparse, states in checkpoints, evaluation at the target density."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import lightning
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from sbm_pyg import LearnedSource, SBMAttentionConv, Sparsifier
from sbm_pyg.integrations.hugging_face import SparsifierCallback as HuggingFaceCallback
from sbm_pyg.integrations.hugging_face import replace_attention
from sbm_pyg.integrations.lightning import SparsifierCallback as LightningCallback

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the libraries' own remarks


def densities(model: torch.nn.Module) -> set[float | None]:
    return {module.target_density for module in model.modules() if isinstance(module, LearnedSource)}


# ------------------------------------------------------------------ Lightning


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = SBMAttentionConv(8, 4, heads=2, num_blocks=4, self_loops=True)
        self.seen: list[tuple[bool, set[float | None]]] = []

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        self.seen.append((self.training, densities(self)))
        return self.conv(batch[0], seed=number).square().mean()

    def validation_step(self, batch: Tensor, number: int) -> None:
        self.seen.append((self.training, densities(self)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(
    folder: Path, steps: int, checkpoint: Path | None = None, accumulate: int = 1, module: Module | None = None,
    callback: Any = None, **options: Any,
) -> tuple[Module, Any, Any]:  # fmt: skip
    module = module or Module()
    callback = callback or LightningCallback(0.2, every=2, total_steps=20, dense_part=0.5)
    loader: Any = DataLoader(torch.linspace(-1, 1, 10 * 20 * 8).view(10, 20, 8), shuffle=False)  # type: ignore[arg-type]
    trainer = lightning.Trainer(
        default_root_dir=folder, max_steps=steps, callbacks=[callback], logger=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=accumulate,
        enable_checkpointing=False, num_sanity_val_steps=1, val_check_interval=10, **options,
    )  # fmt: skip
    trainer.fit(module, loader, loader, ckpt_path=checkpoint, weights_only=False)
    return module, callback, trainer


def test_lightning_trains_from_dense_to_sparse(tmp_path: Path) -> None:
    module, callback, trainer = fit(tmp_path, 20)
    trained = [each for training, each in module.seen if training]
    assert trained[:4] == [{1.0}, {0.2}, {1.0}, {0.2}]
    assert trained[-3:] == [{0.2}] * 3
    assert {0.2} == {density for training, each in module.seen if not training for density in each}
    assert callback.sparsifier.steps == 20
    assert {"loss_dense", "loss_sparse", "target_density"} <= {*trainer.callback_metrics}


def test_lightning_resumes_to_the_same_end(tmp_path: Path) -> None:
    whole, callback, _ = fit(tmp_path, 20)
    _, _, trainer = fit(tmp_path, 10)  # an epoch, after which the loader starts again
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, other, _ = fit(tmp_path, 20, tmp_path / "half.ckpt")
    assert callback.state_dict() == other.state_dict()
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


def test_lightning_counts_steps_of_the_optimizer(tmp_path: Path) -> None:
    module, callback, _ = fit(tmp_path, 10, accumulate=2)
    assert callback.sparsifier.steps == 10
    assert [density for training, each in module.seen if training for density in each][:8] == [1, 1, 0.2, 0.2] * 2


class Constant(Module):
    """With a loss of 3, except that it skips a batch."""

    returns_loss = True

    def training_step(self, batch: Tensor, number: int) -> Any:
        loss = 0 * super().training_step(batch, number) + 3
        if not self.automatic_optimization:
            self.manual_backward(loss)
            cast(Any, self.optimizers()).step()
        return loss if self.returns_loss and number != 1 else None


def test_lightning_notes_the_mean_of_accumulated_losses(tmp_path: Path) -> None:
    """Also of the last batches of an epoch, which are fewer, and where one of them is skipped."""
    for accumulate, steps in ((4, 3), (1, 9)):
        _, callback, _ = fit(tmp_path, 10, accumulate=accumulate, module=Constant(), max_epochs=1)
        assert callback.sparsifier.steps == steps
        assert callback.sparsifier.losses[1:3] == pytest.approx((3, 3))


def test_lightning_with_manual_optimization_needs_the_loss(tmp_path: Path) -> None:
    module = Constant()
    module.automatic_optimization = module.returns_loss = False
    with pytest.raises(ValueError, match="Expected 'training_step' to return its loss with manual optimization"):
        fit(tmp_path, 10, module=module)


def test_lightning_with_two_optimizers_needs_the_number_of_batches(tmp_path: Path) -> None:
    """Of whose steps the trainer counts both."""

    class Two(Constant):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(some, 1e-2) for some in (self.conv.parameters(), [torch.zeros(1)])]

    module = Two()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"Expected 'total_steps' with 'max_steps' and 2 optimizers \(got none\)"):
        fit(tmp_path, 10, module=module, callback=LightningCallback(0.2))


def test_lightning_continues_once_from_a_checkpoint(tmp_path: Path) -> None:
    _, callback, trainer = fit(tmp_path, 3)
    trainer.save_checkpoint(tmp_path / "early.ckpt")
    _, callback, _ = fit(tmp_path, 6, tmp_path / "early.ckpt")
    assert callback.sparsifier.steps == 6
    fit(tmp_path, 4, callback=callback)
    assert callback.sparsifier.steps == 4


def test_lightning_begins_anew_after_the_test_of_a_checkpoint(tmp_path: Path) -> None:
    module, callback, trainer = fit(tmp_path, 20)
    trainer.save_checkpoint(tmp_path / "sparse.ckpt")
    trainer.validate(module, torch.zeros(1, 1), ckpt_path=tmp_path / "sparse.ckpt", weights_only=False, verbose=False)
    module, callback, _ = fit(tmp_path, 4, callback=callback)
    assert callback.sparsifier.steps == 4
    assert module.seen[1] == (True, {1.0})  # after the validation before training


def test_lightning_keeps_the_state_of_a_training_that_was_over(tmp_path: Path) -> None:
    _, callback, trainer = fit(tmp_path, 20)
    trainer.save_checkpoint(tmp_path / "over.ckpt")
    for strategy in ("auto", LateStrategy()):
        module, resumed, _ = fit(tmp_path, 20, tmp_path / "over.ckpt", strategy=strategy)
        assert not module.seen
        assert densities(module) == {0.2}
        assert resumed.state_dict() == callback.state_dict()


class LateStrategy(SingleDeviceStrategy):
    """Loads checkpoints after it has set up the model, as FSDP does."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True


def test_lightning_continues_where_a_strategy_loads_late(tmp_path: Path) -> None:
    _, _, trainer = fit(tmp_path, 12)
    trainer.save_checkpoint(tmp_path / "sparse.ckpt")
    module, callback, _ = fit(tmp_path, 14, tmp_path / "sparse.ckpt", strategy=LateStrategy())
    assert callback.sparsifier.steps == 14
    assert [each for training, each in module.seen if training] == [{0.2}] * 2


# ------------------------------------------------------------------ Hugging Face


class Sentences(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens = torch.randint(1, 16, (24,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens[0] % 2}


def small_bert() -> Any:
    """A classifier of two layers with block models."""
    sizes: Any = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(**sizes, attention_probs_dropout_prob=0.0))
    replace_attention(model, num_blocks=4)
    return model


def train(folder: Path, steps: int, resume: bool = False, **options: Any) -> tuple[Any, Any, Trainer]:
    torch.manual_seed(0)
    model = small_bert()
    callback = HuggingFaceCallback(0.2, every=2, total_steps=12, dense_part=0.5)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, save_steps=5, logging_steps=2,
        use_cpu=True, report_to=[], disable_tqdm=True, restore_callback_states_from_checkpoint=True,
        learning_rate=1e-3, lr_scheduler_type="constant", **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Sentences(), eval_dataset=Sentences(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-5") if resume else None)
    return model, next(c for c in trainer.callback_handler.callbacks if isinstance(c, HuggingFaceCallback)), trainer


def test_hugging_face_trains_from_dense_to_sparse_and_resumes(tmp_path: Path) -> None:
    model, callback, trainer = train(tmp_path, 12)
    assert callback.sparsifier.steps == 12
    assert densities(model) == {0.2}
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs
    assert not model._forward_hooks
    resumed, other, _ = train(tmp_path, 12, resume=True)
    assert other.sparsifier.state_dict() == callback.sparsifier.state_dict()
    for one, two in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


def test_hugging_face_evaluates_at_the_target_density(tmp_path: Path) -> None:
    model, _, trainer = train(tmp_path, 3, eval_strategy="steps", eval_steps=1)
    seen: list[set[float | None]] = []
    model.register_forward_hook(lambda *_: seen.append(densities(model)))
    trainer.train()
    dense = [each for each in seen if each == {1.0}]
    assert len(dense) == 2  # of three training steps, the second of which is a trial
    assert seen.count({0.2}) > 3 * 8


def test_hugging_face_logs_both_losses_and_the_density() -> None:
    callback, logs = HuggingFaceCallback(0.2), {"loss": 1.0}
    callback.on_log(None, None, None, logs=logs)
    assert logs == {"loss": 1.0}  # before training
    callback.sparsifier = Sparsifier(small_bert(), 0.2, total_steps=4, dense_part=0.0)
    callback.sparsifier.step(1.5)
    callback.on_log(None, None, None, logs=logs)
    assert (logs["loss_sparse"], logs["target_density"]) == (1.5, 0.2)
    assert "loss_dense" in logs


def test_hugging_face_needs_a_loss(tmp_path: Path) -> None:
    callback = HuggingFaceCallback(0.2)
    model = small_bert()
    callback.on_train_begin(None, cast(Any, type("State", (), {"max_steps": 4})), None, model)
    with pytest.raises(ValueError, match="Expected 'model' to return its loss in training"):
        callback.on_step_end(None, None, None)


class Completions(Sentences):
    def __getitem__(self, number: int) -> dict[str, Tensor]:
        found = super().__getitem__(number)
        return found | {"labels": found["input_ids"]}


@pytest.mark.parametrize("accumulate", [1, 4])
def test_hugging_face_notes_the_loss_of_the_trainer(accumulate: int, tmp_path: Path) -> None:
    """Language models divide it by the tokens of all passes of a step, and classifiers by those of one."""
    sizes: Any = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    for kind in (LlamaForCausalLM, BertForSequenceClassification):
        is_llama = kind is LlamaForCausalLM
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)) if is_llama else small_bert()
        if is_llama:
            replace_attention(model, num_blocks=4)
        callback = HuggingFaceCallback(0.2, total_steps=10)
        arguments = TrainingArguments(
            str(tmp_path), max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=accumulate,
            logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        data = Completions() if is_llama else Sentences()
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
        trainer.train()
        assert callback.sparsifier is not None
        assert callback.sparsifier.losses.dense == pytest.approx(trainer.state.log_history[0]["loss"], rel=1e-4)


class Interruption(TrainerCallback):
    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        raise KeyboardInterrupt


def test_hugging_face_trains_again_after_an_interruption(tmp_path: Path) -> None:
    model, callback = small_bert(), HuggingFaceCallback(0.2, total_steps=4)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=8, gradient_accumulation_steps=2, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Sentences(), callbacks=[callback, Interruption()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert callback._losses
    trainer.remove_callback(Interruption)
    callback.saved = Sparsifier(small_bert(), 0.2, 4).state_dict() | {"steps": 1}  # as of a checkpoint
    for steps in (3, 2):  # the second training does not continue from it
        trainer.train()
        assert callback.sparsifier is not None
        assert callback.sparsifier.steps == steps
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not callback._losses
