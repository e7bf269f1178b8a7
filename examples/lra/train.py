"""Trains a transformer with sparse, sampled attention on a task of the Long Range Arena, and reports what came of it.

In: a task, a preset, any setting that should differ, and data (generated if none is given). Out: a folder with curves,
checkpoints, results and plots. Not here: the command line and settings (``settings.py``), tasks (``data/tasks.py``), model and loss
(``model.py``), files of curves and plots (``report.py``), what makes runs survive (``checkpoints.py``)::

    python examples/lra.py --task listops --preset laptop
    python -m examples.lra train --task listops --preset paper --data lra_release --precision bf16-mixed --accumulate 4
    python -m examples.lra train --output runs/listops-laptop-1 --resume
    torchrun --nproc-per-node 2 -m examples.lra train

Everything random is a function of the seed and of the number of the step, never of what ran before. So a run that was
killed and resumed ends with the very weights of one that was not (bit for bit on the CPU), neither accumulating nor several
processes change which graphs are sampled, and an example is evaluated alike in whatever batch it comes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import itertools
import logging
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from examples.lra import checkpoints, processes, report
from examples.lra.checkpoints import BEST, Checkpoints, Signals
from examples.lra.data.batches import LengthBuckets, Split, by_length, random_word
from examples.lra.data.files import check_folder
from examples.lra.data.tasks import TASKS, Task, data_folder, open_data
from examples.lra.model import Classifier
from examples.lra.report import RESULTS
from examples.lra.settings import BASELINES, Plan, Settings, resolve
from sbm_pyg.ops import threads


class Data(LightningDataModule):
    """Batches for the trainer, of which each process gets its equal part; see ``checkpoints.py`` for what an epoch is here.

    The order of the examples is a function of their lengths and the seed, and not of processes, workers or parts.

    Args:
        splits: Training, validation and test examples.
        settings: Sizes and seed.
        workers: Processes that gather batches; 0 leaves it to the one that trains.

    Raises:
        ValueError: If there are fewer examples than a batch or the processes need.
    """

    def __init__(self, splits: Mapping[str, Split], settings: Settings, workers: int = 0) -> None:
        super().__init__()
        self.splits, self.settings, self.workers = splits, settings, workers
        lengths = splits["train"].lengths
        self.buckets = LengthBuckets(lengths, batch_size=settings.batch_size, seed=settings.seed)
        self.parts = settings.accumulate * processes.count()
        if settings.batch_size % self.parts:
            raise ValueError(
                f"Expected processes times 'accumulate' to divide 'batch-size' = {settings.batch_size} (got {self.parts}). The parts "
                "of a batch must be equal for the gradient to be that of the whole."
            )
        for name in ("val", "test"):
            if len(self.evaluated(name)) < processes.count():
                raise ValueError(
                    f"Expected at most as many processes as '{name}' has examples (got {processes.count()}). Use fewer."
                )
        # No more tokens at a time than in training, so what could be trained can be evaluated.
        self.token_budget = int(lengths.mean() * (settings.batch_size // self.parts))

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        done = self.trainer.global_step
        parts = self.buckets.stream(done, Checkpoints.boundary(self.settings, done) - done, parts=self.parts)
        return self._loader("train", list(itertools.islice(parts, processes.rank(), None, processes.count())))

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
        """The examples that this process evaluates: no example twice, and alike lengths for all processes."""
        chosen, lengths = self.evaluated(split), self.splits[split].lengths
        order = chosen[np.argsort(lengths[chosen], kind="stable")]
        share = order[processes.rank() :: processes.count()]
        return [share[batch].tolist() for batch in by_length(lengths[share], self.token_budget)]

    def _loader(self, split: str, batches: Any) -> DataLoader:
        data: Any = self.splits[split]
        return DataLoader(data, batch_sampler=batches, collate_fn=_as_it_is, num_workers=self.workers)


def _as_it_is(batch: Any) -> Any:
    return batch


class Memory(Callback):
    """Gives freed memory back to the system after a step that leaves the process with several times what a step needs.

    Batches of all sizes leave holes in the heap of the C library, and few tensors of the next batch fit into them: a process that
    needs 1 GiB for a step may hold 12 after an hour. What a step needs is taken to be the most that the process held after its
    first step and after the steps that followed such a return. Only on Linux with the GNU C library; elsewhere it does nothing.

    Args:
        slack: How many times what a step needs a process may hold.
    """

    def __init__(self, slack: float = 3.0) -> None:
        self.slack, self.needed, self.fresh = slack, 0, True
        self.give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.give_back is None:
            return
        held = held_bytes()
        if self.fresh:
            self.needed = max(self.needed, held)
        self.fresh = held > self.slack * self.needed
        if self.fresh:
            self.give_back(0)


def held_bytes() -> int:
    """Returns how much memory this process holds, on Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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


def train(
    folder: Path,
    plan: Plan,
    splits: Mapping[str, Split],
    accelerator: str,
    export: Path | None = None,
    *,
    start: Path | None = None,
    signals: Signals | None = None,
    workers: int = 0,
) -> dict[str, Any]:
    """Trains, or goes on from a checkpoint of the folder; tests the best one; writes results and plots.

    Args:
        folder: Of the run.
        plan: Of the run.
        splits: The data.
        accelerator: As Lightning names it.
        export: Where the tested model is saved with :meth:`sbm_pyg.Pretrained.save_pretrained`, or None.
        start: The checkpoint to go on from; None for the newest, if there is one.
        signals: Who may ask to stop; None if nobody may.
        workers: Processes that gather batches.

    Returns:
        The results, as in ``results.json``.

    Raises:
        checkpoints.CheckpointError: If a checkpoint cannot be read or written.
        checkpoints.DivergenceError: If loss or weights are no longer finite.
        SystemExit: If the run was asked to stop.
    """
    settings, task = plan.settings, TASKS[plan.task]
    torch.manual_seed(random_word(settings.seed, 2))
    module, data, files = Classifier(task, settings), Data(splits, settings, workers), checkpoints.SafeIO()
    signals = Signals() if signals is None else signals
    keeper = Checkpoints(folder, settings, signals, lambda: module.latest["val"]["accuracy"], files)
    start = start or checkpoints.newest(folder)
    state = checkpoints.read_checkpoint(start) if start else None
    done = state["global_step"] if state else None
    module.earlier = state["row"]["elapsed"] if state else 0.0
    first = processes.rank() == 0
    board = (
        TensorBoardLogger(folder, name=None, version="tensorboard", purge_step=None if done is None else done + 1)
        if first
        else None
    )
    trainer = Trainer(
        max_epochs=-1,  # the checkpoints know when to stop
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.clip_norm or None,
        precision=settings.precision,  # type: ignore[arg-type]
        accelerator=accelerator,
        devices=processes.on_this_machine(),
        num_nodes=processes.count() // processes.on_this_machine(),
        # Nothing of the model is synchronised but gradients, and without an estimator the block model gets none.
        strategy=DDPStrategy(broadcast_buffers=False, find_unused_parameters=settings.estimator == "none")
        if processes.count() > 1
        else "auto",
        use_distributed_sampler=False,
        plugins=[files],
        logger=[report.CurveLogger(folder, done), board] if board else False,
        callbacks=[keeper, Memory(), *([report.Guard(), report.Progress()] if first else [])],
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if state is None:
        trainer.validate(module, data, verbose=False)  # the densities before the first step
    if state is None or not state["callbacks"]["Checkpoints"]["finished"]:
        try:
            trainer.fit(module, data, ckpt_path=start, weights_only=True)
        except Exception as error:  # as the sampler's at NaN, before a loss was looked at
            diverged = not module.finite() or (
                isinstance(error, ValueError) and "to be finite" in str(error)
            )  # as sbm_pyg says it
            if checkpoints.failure(error) is None and diverged:
                raise checkpoints.DivergenceError("activations", trainer.global_step) from error
            raise
        if signals.number:
            raise SystemExit(128 + signals.number)
    trainer.test(module, data, ckpt_path=folder / BEST, weights_only=True, verbose=False)
    if not first:
        return {}
    saved = checkpoints.read_checkpoint(folder / BEST)["callbacks"]["Checkpoints"]
    pipeline, sizes = task.pipeline(settings, splits), (settings.layers, settings.heads)
    train_rows, val_rows = (report.read_curves(folder / f"{phase}.csv") for phase in ("train", "val"))
    results: dict[str, Any] = {
        "test": {
            "accuracy": module.tested["accuracy"],
            "interval_95": report.wilson_interval(module.correct, module.examples),
            "loss": module.tested["loss"],
            "examples": module.examples,
            "majority": splits["test"].majority(data.evaluated("test")),
        },
        "best": {name: saved[name] for name in ("accuracy", "step")},
        "pipeline": pipeline,
        "density": {
            "first": report.densities(val_rows[0], *sizes),
            "last": report.densities(val_rows[-1], *sizes),
            "tested": report.densities(module.tested, *sizes),
        },
        "tokens_per_second": float(np.median([row["tokens_per_second"] for row in train_rows])),
        "seconds": module.spent(),
        **report.peak_memory(folder / RESULTS),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "device": str(trainer.strategy.root_device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
        },
    }
    report.write_json(folder / RESULTS, results)
    report.plot_curves(folder / "curves.png", train_rows, val_rows, splits["val"].majority(data.evaluated("val")))
    report.plot_densities(folder / "density.png", train_rows)
    draw_masks(folder / "masks.png", module, splits["test"], task.words)
    if export is not None:
        metric = {"test accuracy": module.tested["accuracy"], "validation accuracy": saved["accuracy"]}
        told = f"{task.name} ({'; '.join(f'{name}: {words}' for name, words in pipeline.items())})"
        module.model.save_pretrained(export, task=told, metric=metric, density=results["density"]["tested"])
    return results


@torch.no_grad()
def draw_masks(path: Path, module: Classifier, split: Split, words: tuple[str, ...], length: int = 256) -> None:
    """Draws the graphs of the example whose length is nearest to the median, or to ``length`` if that is shorter.

    Of a pair, those of its first sequence are drawn.
    """
    wanted = min(float(np.median(split.lengths)), length)
    example = int(np.abs(split.lengths - wanted).argmin())
    batch = module.transfer_batch_to_device(split.__getitems__([example]), module.device, 0)
    _, trace = module.eval().classify(batch, seed=module.settings.seed)
    if any(graph is None for graph in trace.graphs):  # full attention has no graph to draw
        return
    layers = module.settings.layers
    masks = [graph.to_dense(0).cpu().numpy() for graph in trace.graphs[:layers]]
    models = [choice.probability for choice in trace.choices[:layers]]
    chances = [None if sbm is None else sbm.edge_prob_dense(0).cpu().numpy() for sbm in models]
    report.plot_masks(path, masks, chances, [words[token] for token in batch.tokens.tolist()] if words else [])


def check(given: argparse.Namespace, folder: Path, plan: Plan) -> None:
    """Refuses what cannot be trained as far as that shows without reading data; nothing is written.

    Raises:
        ValueError: If anything of the command line, the model, this machine or the place of the data does not fit.
    """
    task, settings, count = TASKS[plan.task], plan.settings, processes.count()
    if plan.fingerprint and plan.processes != count:
        raise ValueError(
            f"Expected as many processes as the run to resume has, {plan.processes} (got {count}). Its results depend on how many share a "
            f"batch: use torchrun --nproc-per-node {plan.processes}, or start a new run."
        )
    if plan.minutes is not None and count > 1:
        raise ValueError(f"Expected one process with 'minutes' (got {count}). Their steps are not timed: give --steps.")
    _check_export(vars(given).get("export"), folder, settings)
    here = processes.on_this_machine()
    found = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(
        given.accelerator, here
    )
    if found < here:
        raise ValueError(
            f"Expected 'accelerator' to be one of which there is one for each process (got {given.accelerator!r}, of which this machine has "
            f"{found}). Leave it out for what there is."
        )
    options = task.options_of(settings)
    try:
        _check_memory(task, settings)
        Classifier(task, settings)
    except ImportError as error:  # of the package of a baseline
        raise ValueError(str(error)) from None
    if plan.data is not None or task.generate is None:
        try:
            task.open(data_folder(plan), **options)
        except OSError as error:
            raise ValueError(
                f"Expected 'data' to be readable (got: {error}). Copy it again, or change its rights."
            ) from error


def _check_export(export: Path | None, folder: Path, settings: Settings) -> None:
    """Refuses a place where the tested model could not be saved."""
    if export is None:
        return
    if settings.attention in BASELINES:
        raise ValueError(
            f"Expected no 'export' with {settings.attention!r} attention (got {export}). Baselines are of the examples alone; copy the "
            "folder of the run."
        )
    if folder.resolve().is_relative_to(export.resolve()):
        raise ValueError(
            f"Expected 'export' to be a folder without that of the run, {folder} (got {export}). Choose another one."
        )
    if export.is_dir() and any(export.iterdir()):
        raise ValueError(
            f"Expected 'export' to be a new or empty folder (got {export}, which has content). Choose another one."
        )
    check_folder("export", export)


def _check_memory(task: Task, settings: Settings) -> None:
    """Refuses a model whose weights, gradients and optimiser alone are above the memory of this machine, before they are made."""
    with torch.device("meta"):  # shapes without memory; layers are alike
        one, two = (
            sum(
                weight.numel() for weight in Classifier(task, dataclasses.replace(settings, layers=layers)).parameters()
            )
            for layers in (1, 2)
        )
    needed, there = (
        16 * (one + (settings.layers - 1) * (two - one)),
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
    if needed > there:
        raise ValueError(
            f"Expected 'layers', 'heads', 'channels', 'head-channels', 'ffn-channels', 'num-blocks' and 'max-length' to give a model that fits "
            f"into the {there / 2**30:,.1f} GiB of this machine (got one of {needed / 2**30:,.1f} GiB). Lower what is above the preset."
        )


def _check_files(folder: Path, settings: Settings, start: Path | None) -> None:
    """Refuses a run that lacks something beside the checkpoint that it goes on from, or in which that is damaged."""
    if start is None:
        return
    saved = checkpoints.read_checkpoint(start)
    first = min(settings.log_every, settings.validate_every, settings.steps)  # step of the first row
    report.check_curves(folder, ["val"] + ["train"] * (saved["global_step"] >= first), saved["global_step"])
    if saved["callbacks"]["Checkpoints"]["step"] and not (folder / BEST).is_file():
        raise ValueError(
            f"Expected {folder / BEST} to be there, which is what is tested (got no such file). Take it from a backup, or start a new run."
        )


def read(given: argparse.Namespace, plan: Plan) -> tuple[dict[str, Split], Plan]:
    """Reads the data of a run, after which its plan is complete, but for steps that are planned from a time.

    Raises:
        ValueError: If data do not fit.
    """
    splits, fingerprint = open_data(plan, progress=processes.rank() == 0)
    number = vars(given).get("threads", TASKS[plan.task].presets[plan.preset].threads)
    if number is not None:
        torch.set_num_threads(number)
    Data(splits, plan.settings)  # refuses what cannot be trained before anything is written
    return splits, dataclasses.replace(plan, fingerprint=fingerprint, processes=processes.count())


def open_run(
    folder: Path, checkpoint: str = BEST, data: Path | None = None, graphs: bool = False
) -> tuple[Plan, Classifier, dict[str, Split]]:
    """Opens a run to look at it: its plan, its model with the weights of a checkpoint, and its data.

    Args:
        folder: Of the run.
        checkpoint: Name of a file in it.
        data: Where the data are now; None for where the run had them.
        graphs: Whether its attention has to have graphs.

    Raises:
        ValueError: If something is missing or damaged, or if the data are not the run's.
    """
    if not all(os.path.isfile(folder / name) for name in ("settings.json", checkpoint)):
        raise ValueError(
            f"Expected 'run' to be a folder with settings.json and {checkpoint} (got {folder}). Give the folder of a run, or another "
            "--checkpoint."
        )
    plan = Plan.read(folder / "settings.json")
    if graphs and plan.settings.attention in ("full", *BASELINES):
        raise ValueError(
            f"Expected a run whose attention has graphs (got attention {plan.settings.attention!r}). It attends without one; there is nothing to see."
        )
    state = checkpoints.read_checkpoint(folder / checkpoint, "Give another --checkpoint, or take it from a backup.")
    splits, _ = open_data(plan if data is None else dataclasses.replace(plan, data=str(data.absolute()), prepared=None))
    with torch.random.fork_rng(devices=[]):  # its initial weights are thrown away
        module = Classifier(TASKS[plan.task], plan.settings)
    module.load_state_dict(state["state_dict"])
    return plan, module.eval(), splits


def hint(given: argparse.Namespace, folder: Path) -> str:
    """Writes the command that goes on with a run on the same machine, in the same number of processes."""
    count, here = processes.count(), processes.on_this_machine()
    words = ["python"] if count == 1 else ["torchrun", "--nnodes", str(count // here), "--nproc-per-node", str(here)]
    words += [sys.argv[0]] if Path(sys.argv[0]).name == "lra.py" else ["-m", "examples.lra", "train"]
    words += ["--output", str(folder), "--resume"]
    usual = {"accelerator": "auto", "workers": 0}
    for name in ("data", "prepared", "export", "accelerator", "workers", "threads"):
        value = vars(given).get(name)
        if value is not None and value != usual.get(name):
            words += ["--" + name, str(value)]
    return shlex.join(words)


def run(given: argparse.Namespace) -> None:
    """Trains as the command line says, in each of the processes of a run."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # gathering a ragged batch is cheap
    for words in (".*LeafSpec.*", ".*broadcast_buffers.*"):  # Lightning's own affairs
        warnings.filterwarnings("ignore", message=words + "is deprecated.*")
    with processes.together(), Signals() as signals, contextlib.ExitStack() as held:
        _run(given, signals, held)


def _run(given: argparse.Namespace, signals: Signals, held: contextlib.ExitStack) -> None:
    options, first = vars(given), processes.rank() == 0
    new, export = "resume" not in options and "resume_from" not in options, options.get("export")

    def take() -> Path:
        taken, lock = checkpoints.claim(folder, plan, new=new, move="output" not in options)
        held.enter_context(lock)
        return taken

    try:
        folder, plan = processes.of_first(lambda: resolve(given))
        processes.of_first(lambda: check(given, folder, plan))
        splits, plan = processes.in_turn(lambda: read(given, plan))
        if new and plan.minutes is not None:
            from examples.lra import cost  # which knows how long a step takes

            plan = processes.of_first(lambda: cost.planned(plan, splits, given.accelerator))
        folder = processes.of_first(take)
        start = processes.in_turn(lambda: checkpoints.newest(folder, options.get("resume_from", "last")))
        processes.of_first(lambda: _check_files(folder, plan.settings, start))
    except ValueError as error:
        if not first:
            raise SystemExit(2) from None
        given.fail(str(error))
    say = print if first else lambda *words: None
    for name, split in splits.items():
        if split.truncated:
            say(f"{name}: cut {split.truncated:,} of {len(split):,} sequences to {plan.settings.max_length} tokens")
    say(
        f"{plan.task}, {plan.preset} preset, {plan.settings.attention} attention, {len(splits['train']):,} examples -> {folder}"
    )
    held.enter_context(flushed_subnormals())
    try:
        results = train(
            folder, plan, splits, given.accelerator, export, start=start, signals=signals, workers=given.workers
        )
    except SystemExit:
        say(f"\nStopped. Go on with: {hint(given, folder)}")
        raise
    except (checkpoints.CheckpointError, checkpoints.DivergenceError, OSError) as error:
        words = checkpoints.failure(error)
        if words is None:
            raise
        raise SystemExit(f"\n{words}" if first else 1) from None
    if first:
        print(f"\n{report.results_table(results)}\n\nSettings, curves, checkpoints, results and plots are in {folder}")
    if first and export is not None:
        print(f"The model is in {export}; `sbm_pyg.Pretrained.from_pretrained` reads it.")
