"""Callbacks for Lightning and Hugging Face: from dense to sparse, states in checkpoints, evaluation at the target density."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from sbm_pyg import LearnedSource, SBMAttentionConv, replace_attention
from sbm_pyg.integrations.hugging_face import SparsifierCallback as HuggingFaceCallback
from sbm_pyg.integrations.lightning import SparsifierCallback as LightningCallback

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the libraries' own remarks


def densities(model: torch.nn.Module) -> set[float | None]:
    return {module.target_density for module in model.modules() if isinstance(module, LearnedSource)}


# ------------------------------------------------------------------ Lightning


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = SBMAttentionConv(8, 4, heads=2, num_clusters=4)
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
    callback = callback or LightningCallback(0.2, trial_interval=2, total_steps=20, dense_part=0.5)
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
    assert callback.sparsifier.passes == 2


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
    for accumulate, steps in ((4, 3), (1, 10)):
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


class Scored(Module):
    """With a score that is the same for the same weights and density; skips every second batch if told so."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.skips = skips

    def training_step(self, batch: Tensor, number: int) -> Any:
        loss = super().training_step(batch, number)
        return None if self.skips and number % 2 else -loss

    def validation_step(self, batch: Tensor, number: int) -> None:
        super().validation_step(batch, number)
        self.log("score", self.conv(batch[0], seed=0).square().mean())

    test_step = validation_step


def trainer_of(folder: Path, *callbacks: Any, **options: Any) -> Any:
    return lightning.Trainer(
        default_root_dir=folder, callbacks=[*callbacks], logger=False, accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip


def batches(count: int = 8) -> Any:
    """So many batches of one sequence."""
    return DataLoader(torch.linspace(-1, 1, count * 20 * 8).view(count, 20, 8), shuffle=False)  # type: ignore[arg-type]


def test_lightning_tests_the_best_checkpoint_at_the_density_that_chose_it(tmp_path: Path) -> None:
    """It was written in the dense phase."""
    module = Scored()
    best = ModelCheckpoint(tmp_path, monitor="score")
    trainer = trainer_of(tmp_path, LightningCallback(0.3, trial_interval=3), best, max_epochs=4)
    trainer.fit(module, batches(), batches(1))
    for model in (module, Scored.load_from_checkpoint(best.best_model_path)):
        path = "best" if model is module else None
        (found,) = trainer.test(model, batches(1), ckpt_path=path, verbose=False, weights_only=False)
        assert found["score"] == pytest.approx(float(cast(Any, best.best_model_score)), rel=1e-5)
        assert model.seen[-1] == (False, {0.3})


def test_lightning_follows_the_step_of_the_trainer(tmp_path: Path) -> None:
    """Skipped batches are steps; a second training goes on from the first, and keeps a sparse model sparse."""
    module, callback = Scored(skips=True), LightningCallback(0.3, trial_interval=3)
    trainer_of(tmp_path, callback, max_steps=12, enable_checkpointing=False).fit(module, batches())
    assert callback.sparsifier is not None
    assert callback.sparsifier.steps == 12
    assert densities(module) == {0.3}
    module, callback = Scored(), LightningCallback(0.3, trial_interval=3)
    trainer = trainer_of(tmp_path, callback, max_epochs=2, enable_checkpointing=False)
    trainer.fit(module, batches())
    assert densities(module) == {0.3}
    trainer.fit_loop.max_epochs = 4
    module.seen.clear()
    trainer.fit(module, batches())
    assert callback.sparsifier is not None
    assert (callback.sparsifier.steps, callback.sparsifier.total_steps) == (32, 32)
    assert module.seen == [(True, {0.3})] * 16
    again = trainer_of(tmp_path, callback, max_epochs=1, enable_checkpointing=False)
    again.fit(module, batches())
    assert module.seen == [(True, {0.3})] * 24


def test_lightning_interrupted_between_goes_on(tmp_path: Path) -> None:
    """Of 8 steps each: the second training begins where the first one was, with its losses."""
    module, callback = Scored(), LightningCallback(0.3, total_steps=16, trial_interval=3)
    trainer = trainer_of(tmp_path, callback, max_epochs=1, enable_checkpointing=False)
    with pytest.warns(UserWarning, match="Training ended after 8 of 16 steps and was dense until then"):
        trainer.fit(module, batches())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches())
    assert callback.sparsifier is not None
    assert [row.step for row in callback.sparsifier.history] == [3, 6, 9, 12, 15]
    assert densities(module) == {0.3}


class Failure(lightning.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise RuntimeError("of a test")


@pytest.mark.parametrize("how", ["early stopping", "an error", "time"])
def test_lightning_warns_if_training_ends_dense(how: str, tmp_path: Path) -> None:
    stops = {"early stopping": EarlyStopping("score", patience=1), "an error": Failure()}
    others = [stops[how]] if how in stops else []
    options: dict[str, Any] = {"max_time": {"milliseconds": 200}} if how == "time" else {}
    module, callback = Scored(), LightningCallback(0.3, trial_interval=3)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.0)  # type: ignore[method-assign]
    trainer = trainer_of(tmp_path, callback, *others, max_epochs=10_000, enable_checkpointing=False, **options)
    errors: Any = pytest.raises(RuntimeError, match="of a test") if how == "an error" else nullcontext()
    with pytest.warns(UserWarning, match="Pass `total_steps=` if fewer steps run, or a smaller `dense_part=`"), errors:
        trainer.fit(module, batches(), batches(1))
    assert callback.sparsifier is not None
    assert not callback.sparsifier.is_sparse


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.linspace(-1, 1, 10 * 20 * 8).view(10, 20, 8))


def test_lightning_needs_a_number_of_steps(tmp_path: Path) -> None:
    data: Any = DataLoader(Stream())
    trainer = trainer_of(tmp_path, LightningCallback(0.3), max_epochs=2, enable_checkpointing=False)
    with pytest.raises(ValueError, match="Expected 'total_steps' for a trainer that does not know how many steps"):
        trainer.fit(Module(), data)
    callback = LightningCallback(0.3, total_steps=20)
    trainer_of(tmp_path, callback, max_epochs=2, enable_checkpointing=False).fit(Module(), data)
    assert callback.sparsifier is not None
    assert callback.sparsifier.steps == 20


@pytest.mark.parametrize(("data", "told"), [(batches(10), [4] * 8 + [2] * 2), (DataLoader(Stream()), [None] * 10)])
def test_lightning_tells_the_number_of_backward_passes(data: Any, told: list[int | None], tmp_path: Path) -> None:
    """Also of the last batches of an epoch, which are fewer, if the data have a length."""
    module, callback = Module(), LightningCallback(0.3, total_steps=3)
    seen: list[int | None] = []
    module.on_after_backward = lambda: seen.append(cast(Any, callback.sparsifier).passes)  # type: ignore[method-assign]
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 1, "enable_checkpointing": False}
    trainer_of(tmp_path, callback, **options).fit(module, data)
    assert seen == told


def test_lightning_follows_batches_where_the_module_steps_by_itself(tmp_path: Path) -> None:
    """After every fourth batch; some of these steps are trial steps."""

    class Manual(Module):
        automatic_optimization = False

        def training_step(self, batch: Tensor, number: int) -> Any:
            loss = super().training_step(batch, number)
            self.manual_backward(loss / 4)
            if number % 4 == 3:
                cast(Any, self.optimizers()).step()
                cast(Any, self.optimizers()).zero_grad()
            return loss

    module, callback = Manual(), LightningCallback(0.3, trial_interval=2, dense_part=0.5)
    trainer_of(tmp_path, callback, max_epochs=5, enable_checkpointing=False).fit(module, batches())
    assert callback.sparsifier is not None
    assert (callback.sparsifier.steps, callback.sparsifier.total_steps) == (40, 40)
    assert [row.step for row in callback.sparsifier.history] == [8, 16, 24, 32, 40]
    assert [density for _, each in module.seen for density in each][::4] == [1.0, 0.3] * 2 + [1.0] + [0.3] * 5


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
    replace_attention(model, num_clusters=4)
    return model


def train(folder: Path, steps: int, resume: bool = False, **options: Any) -> tuple[Any, Any, Trainer]:
    torch.manual_seed(0)
    model = small_bert()
    callback = HuggingFaceCallback(0.2, trial_interval=2, total_steps=12, dense_part=0.5)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, save_steps=5, logging_steps=2,
        use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=1e-3, lr_scheduler_type="constant", **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Sentences(), eval_dataset=Sentences(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-5") if resume else None)
    return model, next(c for c in trainer.callback_handler.callbacks if isinstance(c, HuggingFaceCallback)), trainer


@pytest.mark.parametrize("restores", [False, True])
def test_hugging_face_trains_from_dense_to_sparse_and_resumes(restores: bool, tmp_path: Path) -> None:
    """Whether or not the trainer restores callbacks, as the state is in the checkpoint."""
    model, callback, trainer = train(tmp_path, 12)
    assert callback.sparsifier.steps == 12
    assert densities(model) == {0.2}
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs
    assert not model._forward_hooks
    resumed, other, _ = train(tmp_path, 12, resume=True, restore_callback_states_from_checkpoint=restores)
    assert other.sparsifier.state_dict() == callback.sparsifier.state_dict()
    for one, two in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


def test_hugging_face_evaluates_at_the_target_density(tmp_path: Path) -> None:
    model, _, trainer = train(tmp_path, 3, eval_strategy="steps", eval_steps=1)
    seen: list[tuple[bool, set[float | None]]] = []
    model.register_forward_hook(lambda *_: seen.append((model.training, densities(model))))
    with pytest.warns(UserWarning, match="Training ended after 3 of 12 steps and was dense until then"):
        trainer.train()
    assert [density for training, density in seen if training] == [{1.0}, {0.2}, {1.0}]
    assert {*map(str, (density for training, density in seen if not training))} == {"{0.2}"}


def test_hugging_face_loads_the_best_model_at_the_density_that_chose_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 5, "load_best_model_at_end": True}
    model, _, trainer = train(tmp_path, 5, seed=1, **options)  # in the dense phase
    best = BertForSequenceClassification.from_pretrained(trainer.state.best_model_checkpoint)
    assert densities(best.eval()) == densities(model.eval()) == {0.2}
    values = []
    for each in (model, best):
        trainer.model = each
        torch.manual_seed(0)
        values.append(trainer.evaluate()["eval_loss"])
    assert values[0] == values[1]


def test_hugging_face_keeps_a_sparse_model_sparse_in_a_second_training(tmp_path: Path) -> None:
    model, _, trainer = train(tmp_path, 12)
    seen: list[set[float | None]] = []
    model.register_forward_hook(lambda *_: seen.append(densities(model)))
    trainer.train()
    assert seen == [{0.2}] * 12


@pytest.mark.parametrize(("accumulate", "told"), [(3, [3, 3, 2, 3, 3, 2]), (1, [1] * 6)])
def test_hugging_face_tells_the_number_of_backward_passes(accumulate: int, told: list[int], tmp_path: Path) -> None:
    """Of eight batches an epoch."""
    seen: list[int | None] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            seen.append(cast(Any, callback.sparsifier).passes)

    callback = HuggingFaceCallback(0.2)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=8, gradient_accumulation_steps=accumulate,
        use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    Trainer(small_bert(), arguments, train_dataset=Sentences(), callbacks=[callback, Look()]).train()
    assert seen == told


def test_hugging_face_logs_both_losses_and_the_density(tmp_path: Path) -> None:
    """To callbacks that were added before, as those of TensorBoard are; and no loss before there is one."""
    reported: list[dict[str, float]] = []

    class Report(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            reported.append(dict(logs))

    model = small_bert()
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=8, logging_steps=1, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    callbacks = [Report(), HuggingFaceCallback(0.2, trial_interval=2, dense_part=0.5)]
    trainer = Trainer(model, arguments, train_dataset=Sentences(), callbacks=callbacks)
    trainer.train()
    for logs in (trainer.state.log_history, reported):
        training = [entry for entry in logs if "loss" in entry]
        assert ["loss_sparse" in entry for entry in training] == [False, True, True, True]
        assert [entry["target_density"] for entry in training] == [0.2] * 4  # of a trial step, and of sparse steps
        assert training[0]["loss_dense"] == pytest.approx(training[0]["loss"], rel=1e-4)
        assert not any(math.isnan(value) for entry in logs for value in entry.values())


def test_hugging_face_needs_a_loss(tmp_path: Path) -> None:
    model = small_bert()
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=8, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = Trainer(
        model, arguments, train_dataset=Sentences(), callbacks=[HuggingFaceCallback(0.2)],
        compute_loss_func=lambda outputs, labels, **others: outputs.logits.square().mean(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="Expected 'model' to return its loss in training"):
        trainer.train()


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
            replace_attention(model, num_clusters=4)
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
    trainer.train()
    assert callback.sparsifier is not None
    assert callback.sparsifier.steps == 2
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not callback._losses
