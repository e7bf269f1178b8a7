"""Trains a transformer with sparse, sampled attention on a task of the Long Range Arena, and writes a folder with its results.

    python examples/lra.py --task listops --preset laptop
    python -m examples.lra train --task listops --preset paper --data lra_release --precision bf16-mixed --accumulate 4
    python -m examples.lra train --output runs/listops-laptop-1 --resume
    torchrun --nproc-per-node 2 -m examples.lra train --output runs/two

Everything random is a function of the seed and of the number of the step. So a run that was killed and resumed ends with the very weights
of one that was not (bit for bit on the CPU), neither accumulation nor several processes change the sampled graphs, and an example is
evaluated alike in any batch. The loop is Lightning's and not ``common.fit``, because it brings accumulation, mixed precision, several
processes and TensorBoard. Its checkpoints are those of ``common.runs`` all the same.
"""

import argparse
import contextlib
import dataclasses
import itertools
import logging
import os
import platform
import shlex
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import torch
from lightning import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from scipy.stats import binomtest
from torch.utils.data import DataLoader

from examples.common.command import require
from examples.common.pictures import save_figure
from examples.common.runs import RunError, check_folder, hold, random_word, read_record, write_record
from examples.lra import report
from examples.lra.checkpoints import BEST, LAST, Checkpoints, SafeIO, Signals, read_state
from examples.lra.data.batches import LengthBuckets, Split, by_length
from examples.lra.data.tasks import TASKS, open_data
from examples.lra.model import Classifier
from examples.lra.report import RESULTS
from examples.lra.settings import BASELINES, PRESETS, SETTINGS, Plan, Settings, resolve
from sbm_pyg import SBM, Choice
from sbm_pyg.analysis import plots
from sbm_pyg.ops.cpu.threads import flushed_subnormals

T = TypeVar("T")


class Data(LightningDataModule):
    """Batches for the trainer, of which process ``rank`` of ``count`` gets its equal part; see ``checkpoints.py`` for an epoch.

    The order of the examples is a function of their lengths and the seed, and not of processes or of the parts of a batch.
    """

    def __init__(self, splits: Mapping[str, Split], settings: Settings, rank: int = 0, count: int = 1) -> None:
        super().__init__()
        self.splits, self.settings, self.rank, self.count = splits, settings, rank, count
        lengths, self.parts = splits["train"].lengths, settings.accumulate * count
        self.buckets = LengthBuckets(lengths, batch_size=settings.batch_size, seed=settings.seed)
        most = min(len(self.evaluated(split)) for split in ("val", "test"))
        right, got = settings.batch_size % self.parts == 0 and count <= most, f"{count} processes, {self.parts} parts"
        words = (
            f"'nproc-per-node' to be at most {most}, an example of each split for each process, and times 'accumulate' "
        )
        words += f"to divide 'batch-size' = {settings.batch_size}"
        require(right, words, got, "Take fewer, or other batches.")
        # No more tokens at a time than in training, so what could be trained can be evaluated.
        self.token_budget = int(lengths.mean() * (settings.batch_size // self.parts))

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        done = self.trainer.global_step
        parts = self.buckets.stream(done, Checkpoints.boundary(self.settings, done) - done, parts=self.parts)
        return self._loader("train", list(itertools.islice(parts, self.rank, None, self.count)))

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
        """The examples that count and are for this process, in batches of alike lengths."""
        chosen, lengths = self.evaluated(split), self.splits[split].lengths
        order = chosen[np.argsort(lengths[chosen], kind="stable")][self.rank :: self.count]
        return [order[batch].tolist() for batch in by_length(lengths[order], self.token_budget)]

    def _loader(self, split: str, batches: list[list[int]]) -> DataLoader:
        data: Any = self.splits[split]
        return DataLoader(data, batch_sampler=batches, collate_fn=lambda batch: batch)


def machine(accelerator: str) -> dict[str, Any]:
    """Lightning's options for the processes of torchrun, or for this one alone."""
    devices, nodes = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    return {"accelerator": accelerator, "devices": devices, "num_nodes": nodes}


def of_first(fabric: Fabric, action: Callable[[], T]) -> T:
    """Returns in all processes what an action returns in the first, and raises in all a ``ValueError`` that it raises there."""
    answer: Any = None
    if fabric.is_global_zero:
        try:
            answer = action()
        except ValueError as error:
            answer = error
    answer = fabric.broadcast(answer)
    if isinstance(answer, ValueError):
        raise answer
    return answer


def train(folder: Path, plan: Plan, data: Data, accelerator: str, signals: Signals) -> dict[str, Any]:
    """Trains, or goes on from the last checkpoint; tests the best one; writes results, which the first process returns, and plots."""
    settings, task, splits = plan.settings, TASKS[plan.task], data.splits
    torch.manual_seed(random_word(settings.seed, 2))
    module, keeper = Classifier(task, settings), Checkpoints(folder, settings, signals)
    start = folder / LAST if (folder / LAST).exists() else None
    state: dict[str, Any] = read_state(start, settings) if start else {"global_step": -1}
    first = state["global_step"] + 1 if start else None  # step of what is logged anew
    # Buffers are alike, and evaluation has other numbers of batches; without an estimator the block model gets no gradient.
    several = DDPStrategy(broadcast_buffers=False, find_unused_parameters=settings.estimator == "none")
    strategy: Any = several if data.count > 1 else "auto"
    trainer = Trainer(
        max_epochs=-1,  # the checkpoints know when to stop
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.clip_norm or None,
        precision=settings.precision,  # type: ignore[arg-type]
        **machine(accelerator),
        strategy=strategy,
        use_distributed_sampler=False, plugins=[SafeIO()], reload_dataloaders_every_n_epochs=1,
        logger=TensorBoardLogger(folder, name=None, version="tensorboard", purge_step=first),
        callbacks=[keeper, *([] if data.rank else [report.Progress()])],
        num_sanity_val_steps=0, log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    if start is None:
        trainer.validate(module, data, verbose=False)  # the densities before the first step
    if state["global_step"] == settings.steps:  # killed between training and test
        module.on_load_checkpoint(state)
        keeper.load_state_dict(state["callbacks"]["Checkpoints"])
        if not data.rank:
            keeper.write_curves(module.rows)  # the kill may have come before them
    else:
        try:
            trainer.fit(module, data, ckpt_path=start, weights_only=True)
        except ValueError as error:
            if isinstance(error, RunError) or ("to be finite" not in str(error) and module.finite()):
                raise
            raise module.diverged("activations") from error  # the sampler has met them before a loss was looked at
    if keeper.asked(trainer):
        raise SystemExit(128 + signals.number)
    module.load_state_dict(read_state(folder / BEST, settings)["state_dict"])
    trainer.test(module, data, verbose=False)
    if data.rank:
        return {}
    rows, sizes = module.rows, (settings.layers, settings.heads)
    density = {"first": rows["val"][0], "last": rows["val"][-1], "tested": module.tested}
    results: dict[str, Any] = {
        "test": {
            "accuracy": module.tested["accuracy"],
            "interval_95": binomtest(module.correct, module.examples).proportion_ci(method="wilson"),
            "loss": module.tested["loss"],
            "examples": module.examples,
            "majority": splits["test"].majority(data.evaluated("test")),
        },
        "best": keeper.best,
        "pipeline": task.pipeline(settings, splits),
        "density": {name: report.densities(row, *sizes) for name, row in density.items()},
        "tokens_per_second": float(np.median([row["tokens_per_second"] for row in rows["train"]])),
        "seconds": module.seconds(),
        **report.peak_memory(),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "device": str(trainer.strategy.root_device),
        "versions": {name: version(name) for name in ("torch", "lightning")} | {"python": platform.python_version()},
    }
    report.plot_curves(folder / "curves.png", rows["train"], rows["val"], splits["val"].majority(data.evaluated("val")))
    save_figure(folder / "density.png", plots.plot_training_density(rows["train"]), dpi=150)
    if module.sparsifier and module.sparsifier.history:
        save_figure(folder / "losses.png", plots.plot_losses(module.sparsifier.history), dpi=150)
    draw_masks(folder, module, splits["test"])
    write_record(folder / RESULTS, results)
    return results


def block_model(choice: Choice) -> SBM | None:
    """The block model that a graph was sampled from, or None."""
    return choice.probability if isinstance(choice.probability, SBM) else None


@torch.no_grad()
def draw_masks(folder: Path, module: Classifier, split: Split, length: int = 256) -> None:
    """Draws sampled mask and expectation of each layer and head, for an example of median length or ``length``; the first sequence of a pair."""
    wanted = min(float(np.median(split.lengths)), length)
    example = int(np.abs(split.lengths - wanted).argmin())
    batch = module.transfer_batch_to_device(split.__getitems__([example]), module.device, 0)
    _, trace = module.eval().classify(batch, seed=module.settings.seed)
    for layer, choice in enumerate(trace.choices[: module.settings.layers]):
        for head in range(module.settings.heads if choice else 0):  # full attention has no graph to draw
            figure = plots.plot_mask(choice.graph, block_model(choice), head=head, title=f"layer {layer}, head {head}")
            save_figure(folder / f"mask-layer{layer}-head{head}.png", figure, dpi=150)


def load_best(folder: Path, plan: Plan) -> Classifier:
    """Returns the model of a run with the weights of its best checkpoint."""
    with torch.random.fork_rng(devices=[]):  # its initial weights are thrown away
        module = Classifier(TASKS[plan.task], plan.settings)
    module.load_state_dict(read_state(folder / BEST, plan.settings)["state_dict"])
    return module.eval()


def open_run(folder: Path, data: Path | None = None) -> tuple[Plan, Classifier, dict[str, Split]]:
    """Opens a run to look at it: its plan, its best model, and its data, which may have moved."""
    there = all((folder / name).is_file() for name in (SETTINGS, BEST))
    require(there, f"'run' to be a folder with {SETTINGS} and {BEST}", folder, "Give that of a run.")
    plan = Plan.read(folder / SETTINGS)
    moved = plan if data is None else dataclasses.replace(plan, data=str(data.absolute()), prepared=None)
    splits, _ = open_data(moved)
    return plan, load_best(folder, plan), splits


def export_model(folder: Path, plan: Plan, results: Mapping[str, Any], export: Path) -> None:
    """Saves the tested model with its card; ``from_pretrained`` reads it."""
    numbers = {"test accuracy": results["test"]["accuracy"], "validation accuracy": results["best"]["accuracy"]}
    numbers |= {f"density of layer {layer}": fmean(heads) for layer, heads in enumerate(results["density"]["tested"])}
    summary = f"{plan.task} ({'; '.join(f'{name}: {words}' for name, words in results['pipeline'].items())})"
    model = load_best(folder, plan).model
    model.save_pretrained(export, model_card_kwargs={"task": summary, "results": numbers})


def read(given: argparse.Namespace, plan: Plan) -> tuple[dict[str, Split], str]:
    """Opens the data of a run, with as many threads as this process has from now on."""
    number = given.threads or PRESETS[plan.task][plan.preset].threads
    if number is not None:
        torch.set_num_threads(number)
    return open_data(plan)


def prepare(given: argparse.Namespace, count: int = 1) -> tuple[Path, Plan, dict[str, Split]]:
    """Settles folder, plan and data of a run in so many processes, and refuses what cannot be trained before anything is written."""
    folder, plan = resolve(given)
    export = vars(given).get("export")
    if export is not None:
        attention, way_out = plan.settings.attention, "Baselines are of the examples alone; copy the folder of the run."
        require(attention not in BASELINES, f"no 'export' with {attention!r} attention", export, way_out)
        empty = not export.is_dir() or not any(export.iterdir())
        require(empty, "'export' to be a new or empty folder", export, "Choose another one.")
        check_folder("export", export)
    way_out = "Their steps are not timed: give --steps."
    require(plan.minutes is None or count == 1, "one process with 'minutes'", count, way_out)
    try:
        Classifier(TASKS[plan.task], plan.settings)
    except ImportError as error:  # of the package of a baseline
        raise ValueError(str(error)) from None
    splits, fingerprint = read(given, plan)
    Data(splits, plan.settings, count=count)
    if plan.minutes is not None and not plan.fingerprint:  # a new run
        from examples.lra import cost  # imports this module

        plan = cost.planned(plan, splits, given.accelerator)
    return folder, dataclasses.replace(plan, fingerprint=fingerprint), splits


def run(given: argparse.Namespace) -> None:
    """Trains as the command line says, in each of the processes of a run."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for words in ("does not have many workers", "LeafSpec.*is deprecated", "broadcast_buffers.*is deprecated"):
        warnings.filterwarnings("ignore", message=f".*{words}")  # Lightning's own affairs
    export = vars(given).get("export")
    with Signals() as signals, contextlib.ExitStack() as held:
        try:
            fabric = Fabric(**machine(given.accelerator))
        except (RuntimeError, MisconfigurationException) as error:
            words = f"(got {given.accelerator!r}: {str(error).rstrip('.')}). Leave it out for the default."
            given.fail(f"Expected 'accelerator' to be one that this machine has, for each process {words}")
        fabric.launch()  # lets the processes meet
        rank, count, ready = fabric.global_rank, fabric.world_size, list[dict[str, Split]]()

        def begin() -> tuple[Path, Plan]:
            folder, plan, splits = prepare(given, count)
            ready.append(splits)
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold(folder))
            if not (folder / SETTINGS).exists():
                plan.write(folder / SETTINGS)
            return folder, plan

        try:
            folder, plan = of_first(fabric, begin)
        except ValueError as error:
            if rank:
                raise SystemExit(2) from None
            given.fail(str(error))
        except SystemExit:
            fabric.print("\nStopped before training.", flush=True)
            raise
        splits = ready[0] if ready else read(given, plan)[0]
        for name, split in splits.items():
            if split.truncated:
                words = f"cut {split.truncated:,} of {len(split):,} sequences to {plan.settings.max_length} tokens"
                fabric.print(f"{name}: {words}")
        about = f"{plan.task}, {plan.preset} preset, {plan.settings.attention} attention"
        fabric.print(f"{about}, {len(splits['train']):,} examples -> {folder}")
        try:
            if (folder / RESULTS).exists():
                results = read_record(folder / RESULTS)
            else:
                with flushed_subnormals():
                    results = train(folder, plan, Data(splits, plan.settings, rank, count), given.accelerator, signals)
        except RunError as error:
            raise SystemExit(f"\n{error}") from None
        except SystemExit:
            program = "python" if count == 1 else f"torchrun --nproc-per-node {count}"
            resume = f"{program} -m examples.lra train --output {shlex.quote(str(folder))} --resume"
            fabric.print(f"\nStopped. Go on with: {resume}", flush=True)  # torchrun may end other processes
            raise
    if rank:
        return
    print(f"\n{report.results_table(results)}\n\nSettings, curves, checkpoints, results and plots are in {folder}")
    if export is not None:
        export_model(folder, plan, results, export)
        print(f"The model is in {export}; `from_pretrained` reads it.")
