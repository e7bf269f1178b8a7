"""Trains a transformer with sparse, sampled attention on a task of the Long Range Arena, and reports what came of it.

In: a task, a preset, any setting that should differ, and data (generated if none is given). Out: a folder with curves,
checkpoints, results and plots. Not here: the command line and settings (``settings.py``), tasks (``data/tasks.py``), model and loss
(``model.py``), bar and tables (``report.py``), what makes runs survive (``checkpoints.py``)::

    python examples/lra.py --task listops --preset laptop
    python -m examples.lra train --task listops --preset paper --data lra_release --precision bf16-mixed --accumulate 4
    python -m examples.lra train --output runs/listops-laptop-1 --resume

Everything random is a function of the seed and of the number of the step, never of what ran before. So a run that was
killed and resumed ends with the very weights of one that was not (bit for bit on the CPU), accumulating does not change which
graphs are sampled, and an example is evaluated alike in whatever batch it comes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import platform
import shlex
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from examples.lra import report
from examples.lra.checkpoints import BEST, LAST, Checkpoints, RunError, SafeIO, Signals, hold, read_checkpoint
from examples.lra.data.batches import LengthBuckets, Split, by_length, random_word
from examples.lra.data.tasks import TASKS, open_data
from examples.lra.model import Classifier
from examples.lra.report import RESULTS
from examples.lra.settings import BASELINES, SETTINGS, Plan, Settings, resolve
from sbm_pyg import plots
from sbm_pyg.ops import threads


class Data(LightningDataModule):
    """Batches for the trainer; see ``checkpoints.py`` for what an epoch is here.

    The order of the examples is a function of their lengths and the seed, and not of the parts in which a batch is processed.

    Args:
        splits: Training, validation and test examples.
        settings: Sizes and seed.

    Raises:
        ValueError: If there are fewer examples than a batch needs.
    """

    def __init__(self, splits: Mapping[str, Split], settings: Settings) -> None:
        super().__init__()
        self.splits, self.settings = splits, settings
        lengths = splits["train"].lengths
        self.buckets = LengthBuckets(lengths, batch_size=settings.batch_size, seed=settings.seed)
        # No more tokens at a time than in training, so what could be trained can be evaluated.
        self.token_budget = int(lengths.mean() * (settings.batch_size // settings.accumulate))

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        done = self.trainer.global_step
        count = Checkpoints.boundary(self.settings, done) - done
        return self._loader("train", list(self.buckets.stream(done, count, parts=self.settings.accumulate)))

    def val_dataloader(self) -> DataLoader:
        return self._loader("val", self.batches("val"))

    def test_dataloader(self) -> DataLoader:
        return self._loader("test", self.batches("test"))

    def evaluated(self, split: str) -> np.ndarray:
        """Numbers of the examples that count, all or at equal distances."""
        total = len(self.splits[split])
        count = min(total, self.settings.evaluate or total)
        return np.arange(count) * total // count

    def batches(self, split: str) -> list[list[int]]:
        """The examples that count, in batches of alike lengths."""
        chosen, lengths = self.evaluated(split), self.splits[split].lengths
        order = chosen[np.argsort(lengths[chosen], kind="stable")]
        return [order[batch].tolist() for batch in by_length(lengths[order], self.token_budget)]

    def _loader(self, split: str, batches: list[list[int]]) -> DataLoader:
        data: Any = self.splits[split]
        return DataLoader(data, batch_sampler=batches, collate_fn=lambda batch: batch)


@contextlib.contextmanager
def flushed_subnormals() -> Iterator[None]:
    """Takes numbers below 1e-38 as zero, on every thread that computes.

    They cost processors up to a hundred times as long as others, and gradients of a trained model with sparse graphs are full of them.
    """
    threads.on_each(lambda: torch.set_flush_denormal(True))
    try:
        yield
    finally:
        threads.on_each(lambda: torch.set_flush_denormal(False))


def train(folder: Path, plan: Plan, splits: Mapping[str, Split], accelerator: str, signals: Signals) -> dict[str, Any]:
    """Trains, or goes on from the last checkpoint of the folder; tests the best one; writes results and plots.

    Args:
        folder: Of the run.
        plan: Of the run.
        splits: The data.
        accelerator: As Lightning names it.
        signals: Which may ask to stop.

    Returns:
        The results, as in ``results.json``.

    Raises:
        RunError: If a checkpoint cannot be read or written, or if loss or weights are no longer finite.
        SystemExit: If the run was asked to stop.
    """
    settings, task = plan.settings, TASKS[plan.task]
    torch.manual_seed(random_word(settings.seed, 2))
    module, data, keeper = Classifier(task, settings), Data(splits, settings), Checkpoints(folder, settings, signals)
    start = folder / LAST if (folder / LAST).exists() else None
    state: dict[str, Any] = read_checkpoint(start) if start else {"global_step": -1}
    first = state["global_step"] + 1 if start else None  # step of what is logged anew
    trainer = Trainer(
        max_epochs=-1,  # the checkpoints know when to stop
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.clip_norm or None,
        precision=settings.precision,  # type: ignore[arg-type]
        accelerator=accelerator,
        devices=1,
        plugins=[SafeIO()],
        logger=TensorBoardLogger(folder, name=None, version="tensorboard", purge_step=first),
        callbacks=[keeper, report.Progress()],
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if start is None:
        trainer.validate(module, data, verbose=False)  # the densities before the first step
    if state["global_step"] == settings.steps:  # killed between training and test
        module.on_load_checkpoint(state)
        keeper.load_state_dict(state["callbacks"]["Checkpoints"])
    else:
        try:
            trainer.fit(module, data, ckpt_path=start, weights_only=True)
        except ValueError as error:
            if isinstance(error, RunError) or ("to be finite" not in str(error) and module.finite()):
                raise
            raise module.diverged("activations") from error  # the sampler has met them before a loss was looked at
    if signals.number:
        raise SystemExit(128 + signals.number)
    module.load_state_dict(read_checkpoint(folder / BEST)["state_dict"])
    trainer.test(module, data, verbose=False)
    rows, sizes = module.rows, (settings.layers, settings.heads)
    results: dict[str, Any] = {
        "test": {
            "accuracy": module.tested["accuracy"],
            "interval_95": report.wilson_interval(module.correct, module.examples),
            "loss": module.tested["loss"],
            "examples": module.examples,
            "majority": splits["test"].majority(data.evaluated("test")),
        },
        "best": keeper.best,
        "pipeline": task.pipeline(settings, splits),
        "density": {
            "first": report.densities(rows["val"][0], *sizes),
            "last": report.densities(rows["val"][-1], *sizes),
            "tested": report.densities(module.tested, *sizes),
        },
        "tokens_per_second": float(np.median([row["tokens_per_second"] for row in rows["train"]])),
        "seconds": module.seconds(),
        **report.peak_memory(),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "device": str(trainer.strategy.root_device),
        "versions": {name: package.__version__ for name, package in (("torch", torch), ("lightning", lightning))}
        | {"python": platform.python_version()},
    }
    report.plot_curves(folder / "curves.png", rows["train"], rows["val"], splits["val"].majority(data.evaluated("val")))
    plots.plot_training_density(rows["train"]).savefig(folder / "density.png", dpi=150)
    draw_masks(folder, module, splits["test"])
    report.write_json(folder / RESULTS, results)
    return results


@torch.no_grad()
def draw_masks(folder: Path, module: Classifier, split: Split, length: int = 256) -> None:
    """Draws the graphs of the example whose length is nearest to the median, or to ``length`` if that is shorter.

    Each layer and head has a picture, the sampled mask beside its expectation; of a pair, the first sequence is drawn.
    """
    wanted = min(float(np.median(split.lengths)), length)
    example = int(np.abs(split.lengths - wanted).argmin())
    batch = module.transfer_batch_to_device(split.__getitems__([example]), module.device, 0)
    _, trace = module.eval().classify(batch, seed=module.settings.seed)
    for layer, choice in enumerate(trace.choices[: module.settings.layers]):
        for head in range(module.settings.heads if choice else 0):  # full attention has no graph to draw
            figure = plots.plot_mask(choice.graph, choice.probability, head=head, title=f"layer {layer}, head {head}")
            figure.savefig(folder / f"mask-layer{layer}-head{head}.png", dpi=150)


def load_best(folder: Path, plan: Plan) -> Classifier:
    """Returns the model of a run with the weights of its best checkpoint."""
    with torch.random.fork_rng(devices=[]):  # its initial weights are thrown away
        module = Classifier(TASKS[plan.task], plan.settings)
    module.load_state_dict(read_checkpoint(folder / BEST)["state_dict"])
    return module.eval()


def open_run(folder: Path, data: Path | None = None) -> tuple[Plan, Classifier, dict[str, Split]]:
    """Opens a run to look at it: its plan, its best model, and its data, which may have moved.

    Raises:
        ValueError: If something is missing or damaged, or if the data are not the run's.
    """
    if not all((folder / name).is_file() for name in (SETTINGS, BEST)):
        raise ValueError(
            f"Expected 'run' to be a folder with {SETTINGS} and {BEST} (got {folder}). Give that of a run."
        )
    plan = Plan.read(folder / SETTINGS)
    splits, _ = open_data(plan if data is None else dataclasses.replace(plan, data=str(data.absolute()), prepared=None))
    return plan, load_best(folder, plan), splits


def export_model(folder: Path, plan: Plan, results: Mapping[str, Any], export: Path) -> None:
    """Saves the tested model with what is known of it; :meth:`sbm_pyg.Pretrained.from_pretrained` reads it."""
    metric = {"test accuracy": results["test"]["accuracy"], "validation accuracy": results["best"]["accuracy"]}
    told = f"{plan.task} ({'; '.join(f'{name}: {words}' for name, words in results['pipeline'].items())})"
    model = load_best(folder, plan).model
    model.save_pretrained(export, task=told, metric=metric, density=results["density"]["tested"])


def prepare(given: argparse.Namespace) -> tuple[Path, Plan, dict[str, Split]]:
    """Settles folder, plan and data of a run, and refuses what cannot be trained before anything of the run is written.

    Raises:
        ValueError: If anything of the command line, the model, this machine or the data does not fit.
    """
    options = vars(given)
    folder, plan = resolve(given)
    export = options.get("export")
    if export is not None and plan.settings.attention in BASELINES:
        raise ValueError(
            f"Expected no 'export' with {plan.settings.attention!r} attention (got {export}). Baselines are of the examples alone; copy "
            "the folder of the run."
        )
    if export is not None and export.is_dir() and any(export.iterdir()):
        raise ValueError(f"Expected 'export' to be a new or empty folder (got {export}). Choose another one.")
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(given.accelerator, True):
        raise ValueError(
            f"Expected 'accelerator' to be one that this machine has (got {given.accelerator!r}). Leave it out for what there is."
        )
    try:
        Classifier(TASKS[plan.task], plan.settings)
    except ImportError as error:  # of the package of a baseline
        raise ValueError(str(error)) from None
    splits, fingerprint = open_data(plan)
    number = options.get("threads", TASKS[plan.task].presets[plan.preset].threads)
    if number is not None:
        torch.set_num_threads(number)
    Data(splits, plan.settings)
    if plan.minutes is not None and not plan.fingerprint:  # a new run
        from examples.lra import cost  # which knows how long a step takes

        plan = cost.planned(plan, splits, given.accelerator)
    return folder, dataclasses.replace(plan, fingerprint=fingerprint), splits


def run(given: argparse.Namespace) -> None:
    """Trains as the command line says."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for words in (".*does not have many workers.*", ".*LeafSpec.*is deprecated.*"):  # Lightning's own affairs
        warnings.filterwarnings("ignore", message=words)
    export = vars(given).get("export")
    with Signals() as signals, contextlib.ExitStack() as held:
        try:
            folder, plan, splits = prepare(given)
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold(folder))
        except ValueError as error:
            given.fail(str(error))
        if not (folder / SETTINGS).exists():
            plan.write(folder / SETTINGS)
        for name, split in splits.items():
            if split.truncated:
                cut = f"cut {split.truncated:,} of {len(split):,} sequences"
                print(f"{name}: {cut} to {plan.settings.max_length} tokens")
        about = f"{plan.task}, {plan.preset} preset, {plan.settings.attention} attention"
        print(f"{about}, {len(splits['train']):,} examples -> {folder}")
        try:
            if (folder / RESULTS).exists():
                results = json.loads((folder / RESULTS).read_text())
            else:
                with flushed_subnormals():
                    results = train(folder, plan, splits, given.accelerator, signals)
        except RunError as error:
            raise SystemExit(f"\n{error}") from None
        except SystemExit:
            print(f"\nStopped. Go on with: python -m examples.lra train --output {shlex.quote(str(folder))} --resume")
            raise
    print(f"\n{report.results_table(results)}\n\nSettings, curves, checkpoints, results and plots are in {folder}")
    if export is not None:
        export_model(folder, plan, results, export)
        print(f"The model is in {export}; `sbm_pyg.Pretrained.from_pretrained` reads it.")
