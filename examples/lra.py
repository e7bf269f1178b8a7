"""Trains a transformer with sparse, sampled attention on a task of the Long Range Arena, and reports what came of it.

In: a task, a preset, any setting that should differ, and data (generated if none is given). Out: a folder with curves,
checkpoints, results and plots. Not here: tasks and presets (``lra_tasks.py``), model and loss (``lra_model.py``), tables and
plots (``lra_report.py``), what makes runs survive (``lra_checkpoints.py``), their folders (``lra_folders.py``), how processes
share one (``lra_processes.py``), memory (``lra_upkeep.py``)::

    python examples/lra.py --task listops --preset laptop
    python examples/lra.py --task listops --preset paper --data lra_release --precision bf16-mixed --accumulate 4
    python examples/lra.py --output runs/listops-laptop-0 --resume
    python examples/lra.py --devices 2

Everything random is a function of the seed and of the number of the step, never of what ran before. So a run that was
killed and resumed ends with the very weights of one that was not (bit for bit on the CPU), neither accumulating nor several
processes change which graphs are sampled, and an example is evaluated alike in whatever batch it comes.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import logging
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lra_files import check_place, check_writable, path_argument
from lra_settings import NAMES
from lra_tasks import TASKS, LengthBuckets, Settings, Split, Task, data_folder, random_word, splits_digest


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line; settings that are not given are absent from the result."""
    parser = argparse.ArgumentParser(description="Trains on a task of the Long Range Arena.", argument_default=argparse.SUPPRESS)
    parser.add_argument("--task", choices=tuple(TASKS), help="what to learn (default: listops)")
    parser.add_argument("--preset", choices=NAMES, help="where all other settings come from (default: laptop)")
    parser.add_argument("--data", type=path_argument, metavar="DIR", help="a folder of the task; by default one is generated in data/")
    parser.add_argument(
        "--prepared", type=path_argument, metavar="DIR", help="where prepared arrays go (default: 'prepared' in the data's folder)"
    )
    parser.add_argument("--output", type=path_argument, metavar="DIR", help="folder of the run (default: a new one in runs/)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --output; its settings are known")
    choices = ("last", "previous")
    parser.add_argument("--resume-from", choices=choices, help="the same; 'previous' if the last checkpoint is damaged (default: last)")
    parser.add_argument(
        "--export", type=path_argument, metavar="DIR", help="save the tested model there, with its card, for `from_pretrained`"
    )
    parser.add_argument("--accelerator", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="(default: auto)")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="processes that share each batch (default: 1)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that gather batches (default: 0)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: 1 for laptop, as torch chooses for paper)")
    first = argparse.ArgumentParser(add_help=False)  # the task alone, whose values --help shows
    first.add_argument("--task", nargs="?")
    task = first.parse_known_args(arguments)[0].task
    task = task if task in TASKS else "listops"
    group = parser.add_argument_group("settings", f"each overrides the preset; values are those of laptop | paper for {task}")
    for field in dataclasses.fields(Settings):
        kind = {"int": int, "float": float, "str": str}[str(field.type)]
        values = " | ".join(str(getattr(TASKS[task].presets[name].settings, field.name)) for name in NAMES)
        option = "--" + field.name.replace("_", "-")
        help_text = f"{field.metadata['help']} ({values})"
        group.add_argument(option, type=kind, choices=field.metadata["choices"] or None, help=help_text)
    parsed = parser.parse_args(arguments)
    parsed.fail = parser.error
    return parsed


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import lightning
import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

import lra_checkpoints as checkpoints
import lra_processes as processes
import lra_report as report
from density_guard import DensityGuard
from lra_checkpoints import BEST, LOCK, Checkpoints, Signals
from lra_folders import RESULTS, SETTINGS, check_export, check_files, claim, next_folder, read_plan
from lra_model import Classifier
from lra_upkeep import Memory, flushed_subnormals


class Data(LightningDataModule):
    """Batches for the trainer, of which each process gets its equal part; see ``lra_checkpoints`` for what an epoch is here.

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
                f"Expected 'devices' times 'accumulate' to divide 'batch-size' = {settings.batch_size} (got {self.parts}). The parts "
                "of a batch must be equal for the gradient to be that of the whole."
            )
        for name in ("val", "test"):
            if len(self.evaluated(name)) < processes.count():
                raise ValueError(f"Expected 'devices' to be at most the examples of '{name}' (got {processes.count()}). Use fewer.")
        # No more tokens at a time than in training, so what could be trained can be evaluated.
        self.token_budget = int(lengths.mean() * (settings.batch_size // self.parts))

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        done = self.trainer.global_step
        parts = self.buckets.stream(done, Checkpoints.boundary(self.settings, done) - done, parts=self.parts)
        return self._loader("train", list(itertools.islice(parts, processes.rank(), None, processes.count())))

    def val_dataloader(self) -> DataLoader:
        return self._whole("val")

    def test_dataloader(self) -> DataLoader:
        return self._whole("test")

    def evaluated(self, split: str) -> np.ndarray:
        """Numbers of the examples that count, all or at equal distances."""
        total = len(self.splits[split])
        count = min(total, self.settings.evaluate or total)
        return np.arange(count) * total // count

    def _whole(self, split: str) -> DataLoader:
        chosen, lengths = self.evaluated(split), self.splits[split].lengths
        order = chosen[np.argsort(lengths[chosen], kind="stable")]
        share = order[processes.rank() :: processes.count()]  # no example twice, and alike lengths
        batches = LengthBuckets(lengths[share], token_budget=self.token_budget)
        return self._loader(split, [share[batch].tolist() for batch in batches])

    def _loader(self, split: str, batches: Any) -> DataLoader:
        data: Any = self.splits[split]
        return DataLoader(data, batch_sampler=batches, collate_fn=_as_it_is, num_workers=self.workers)


def _as_it_is(batch: Any) -> Any:
    return batch


class Guard(Callback):
    """Warns when a head loses its edges; see :class:`density_guard.DensityGuard`."""

    def __init__(self) -> None:
        self.guard = DensityGuard()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, Classifier)
        if trainer.global_step % pl_module.settings.log_every == 0:
            self.guard.check(pl_module.graphs, trainer.global_step)


class Progress(Callback):
    """One bar over all steps, with loss, accuracy and density per layer, and a line for every validation."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        self.bar = tqdm(total=pl_module.settings.steps, initial=trainer.global_step, desc="Training", unit="step")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, Classifier)
        self.bar.update(trainer.global_step - self.bar.n)
        if "train" in pl_module.latest:
            self.bar.set_postfix_str(self.words(pl_module, "train"), refresh=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        tqdm.write(f"step {trainer.global_step:>6,}  validation {self.words(pl_module, 'val')}", file=sys.stderr)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.bar.close()

    @staticmethod
    def words(module: Classifier, phase: str) -> str:
        """Writes the latest row of a phase in one line."""
        row, sizes = module.latest[phase], module.settings
        layers = np.mean(report.densities(row, sizes.layers, sizes.heads), axis=1)
        shares = " ".join(f"{share:.3f}" for share in layers)
        return f"loss {row['loss']:.3f}, accuracy {row['accuracy']:.3f}, density {shares}"


def train(
    folder: Path,
    task: Task,
    settings: Settings,
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
        task: What to learn.
        settings: How.
        splits: The data.
        accelerator: As Lightning names it.
        export: Where the tested model is saved with :meth:`sbm_pyg.Pretrained.save_pretrained`, or None.
        start: The checkpoint to go on from; None for the newest, if there is one.
        signals: Who may ask to stop; None if nobody may.
        workers: Processes that gather batches.

    Returns:
        The results, as in ``results.json``.

    Raises:
        lra_checkpoints.CheckpointError: If a checkpoint cannot be read or written.
        lra_checkpoints.DivergenceError: If loss or weights are no longer finite.
        SystemExit: If the run was asked to stop.
    """
    torch.manual_seed(random_word(settings.seed, 2))
    module, data, files = Classifier(task, settings), Data(splits, settings, workers), checkpoints.SafeIO()
    signals = Signals() if signals is None else signals
    keeper = Checkpoints(folder, settings, signals, lambda: module.latest["val"]["accuracy"], files)
    start = start or checkpoints.newest(folder)
    state = checkpoints.read_checkpoint(start) if start else None
    done = state["global_step"] if state else None
    first = processes.rank() == 0
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
        logger=[
            report.CurveLogger(folder, done),
            TensorBoardLogger(folder, name=None, version="tensorboard", purge_step=None if done is None else done + 1),
        ]
        if first
        else False,
        callbacks=[keeper, Memory(), *([Guard(), Progress()] if first else [])],
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
            diverged = not module.finite() or (isinstance(error, ValueError) and "to be finite" in str(error))  # as sbm_pyg says it
            if checkpoints.failure(error) is None and diverged:
                raise checkpoints.DivergenceError("activations", trainer.global_step) from error
            raise
        if signals.number:
            raise SystemExit(128 + signals.number)
    trainer.test(module, data, ckpt_path=folder / BEST, weights_only=True, verbose=False)
    saved = checkpoints.read_checkpoint(folder / BEST)["callbacks"]["Checkpoints"]
    best = {name: saved[name] for name in ("accuracy", "step")}
    if not first:
        return {}

    train_rows, val_rows = (report.read_curves(folder / f"{phase}.csv") for phase in ("train", "val"))
    place, peak = report.peak_memory()
    old = report.read_results(folder / RESULTS)  # of a finished run, of which only the test was done again
    if old.get("peak_memory_of") == place:
        peak = max(peak, old["peak_memory_bytes"])
    sizes = (settings.layers, settings.heads)
    pipeline = task.pipeline(settings, splits)
    results: dict[str, Any] = {
        "test": {
            "accuracy": module.tested["accuracy"],
            "interval_95": report.wilson_interval(module.correct, module.examples),
            "loss": module.tested["loss"],
            "examples": module.examples,
            "majority": splits["test"].majority(data.evaluated("test")),
        },
        "best": best,
        "pipeline": pipeline,
        "density": {
            "first": report.densities(val_rows[0], *sizes),
            "last": report.densities(val_rows[-1], *sizes),
            "tested": report.densities(module.tested, *sizes),
        },
        "tokens_per_second": float(np.median([row["tokens_per_second"] for row in train_rows])),
        "peak_memory_bytes": peak,
        "peak_memory_of": place,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "device": str(trainer.strategy.root_device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "lightning": lightning.__version__},
    }
    report.write_json(folder / RESULTS, results)
    report.plot_curves(folder / "curves.png", train_rows, val_rows, splits["val"].majority(data.evaluated("val")))
    report.plot_densities(folder / "density.png", train_rows, *sizes)
    draw_masks(folder / "masks.png", module, splits["test"], task.words)
    if export is not None:
        metric = {"test accuracy": module.tested["accuracy"], "validation accuracy": best["accuracy"]}
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
    chances = [None if sbm is None else sbm.edge_prob_dense(0).cpu().numpy() for sbm in trace.sbms[:layers]]
    report.plot_masks(path, masks, chances, [words[token] for token in batch.tokens.tolist()] if words else [])


def resolve(given: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Settles folder and settings of a run: those that a resumed run was started with, else preset and command line.

    Returns:
        The folder, and the content of its ``settings.json``.

    Raises:
        ValueError: If settings are out of range, or if folder and settings do not fit together.
    """
    options = vars(given)
    chosen = {f.name: options[f.name] for f in dataclasses.fields(Settings) if f.name in options}
    if "resume" in options or "resume_from" in options:
        folder = options.get("output")
        if folder is None or not (folder / SETTINGS).is_file():
            raise ValueError(
                f"Expected 'output' to be the folder of a run to resume (got {folder}). Give --output the folder that holds its "
                f"{SETTINGS}, or start a new run without --resume."
            )
        plan = read_plan(folder / SETTINGS)
        known = {"task": plan["task"], "preset": plan["preset"], **plan["settings"]}
        for name, value in {name: options[name] for name in known if name in options}.items():
            if value != known[name]:
                raise ValueError(
                    f"Expected '{name.replace('_', '-')}' to be {known[name]!r} as in the run to resume (got {value!r}). Leave it "
                    "out, or start a new run."
                )
        return folder, plan | {name: str(options[name]) for name in ("data", "prepared") if name in options}

    name, preset = options.get("task", "listops"), options.get("preset", "laptop")
    settings = TASKS[name].presets[preset].settings
    if "steps" in chosen and "warmup" not in chosen:
        chosen["warmup"] = settings.warmup * chosen["steps"] // settings.steps
    if chosen.get("attention", "sbm") != "sbm":  # only 'sbm' has what the preset prices
        chosen.setdefault("density_weight", 0.0)
    if chosen.get("density_weight") == 0:  # then the preset's floor is that of nothing
        chosen.setdefault("density_floor", 0.0)
    settings = dataclasses.replace(settings, **chosen)
    folder = options.get("output")
    if folder is None:
        folder = next_folder(name, preset)
    elif folder.exists() and (not folder.is_dir() or any(path.name != LOCK and path.suffix != ".partial" for path in folder.iterdir())):
        raise ValueError(
            f"Expected 'output' to be a new or empty folder (got {folder}, which has content). Choose another one, or add --resume."
        )
    check_place("output", folder)
    if "prepared" in options:
        check_place("prepared", options["prepared"] / "prepared")
    places = {place: str(options[place]) if place in options else None for place in ("data", "prepared")}
    # Places are saved as given, to be compared with those of other calls, and so is the directory that they start from.
    return folder, {"task": name, "preset": preset, **places, "directory": str(Path.cwd()), "settings": dataclasses.asdict(settings)}


def check_accelerator(name: str) -> None:
    """Refuses an accelerator that this machine lacks, or has too few of for its processes.

    Raises:
        ValueError: If so.
    """
    found = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if found.get(name, processes.on_this_machine()) < processes.on_this_machine():
        raise ValueError(
            f"Expected 'accelerator' to be one of which there is one for each process (got {name!r}, of which this machine has "
            f"{found[name]}). Leave it out for what there is."
        )


def check_memory(task: Task, settings: Settings) -> None:
    """Refuses a model whose weights, gradients and optimiser alone are above the memory of this machine, before they are made.

    Raises:
        ValueError: If so.
    """
    with torch.device("meta"):  # shapes without memory; layers are alike
        one, two = (
            sum(weight.numel() for weight in Classifier(task, dataclasses.replace(settings, layers=layers)).parameters())
            for layers in (1, 2)
        )
    needed, there = 16 * (one + (settings.layers - 1) * (two - one)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ValueError(
            f"Expected 'layers', 'heads', 'channels', 'head-channels', 'ffn-channels', 'num-blocks' and 'max-length' to give a model that fits "
            f"into the {there / 2**30:,.1f} GiB of this machine (got one of {needed / 2**30:,.1f} GiB). Lower what is above the preset."
        )


def check_start(given: argparse.Namespace, plan: Mapping[str, Any]) -> None:
    """Refuses what cannot be trained as far as that shows without reading data; nothing is written.

    Raises:
        ValueError: If anything of the command line, the model, this machine or the place of the data does not fit.
    """
    task, settings = TASKS[plan["task"]], Settings(**plan["settings"])
    check_accelerator(given.accelerator)
    threads = vars(given).get("threads")
    if threads is not None and threads < 1:
        raise ValueError(f"Expected 'threads' to be at least 1 (got {threads}). Leave it out for the default.")
    if given.workers < 0:
        raise ValueError(f"Expected 'workers' to be at least 0 (got {given.workers}). Leave it out for the default.")
    options = task.options_of(settings)
    try:
        check_memory(task, settings)
        Classifier(task, settings)
    except ImportError as error:  # of the package of a baseline
        raise ValueError(str(error)) from None
    if plan["data"] is not None or task.generate is None:
        root, _ = data_folder(task, plan["preset"], settings, None if plan["data"] is None else Path(plan["data"]))
        try:
            task.open(root, **options)
        except OSError as error:
            raise ValueError(f"Expected 'data' to be readable (got: {error}). Copy it again, or change its rights.") from error


def read(given: argparse.Namespace, plan: dict[str, Any]) -> tuple[Task, Settings, dict[str, Split], str]:
    """Reads the data of a run, generates them if there are none, and checks all that can be checked before the run is touched.

    Returns:
        Task, settings, data, and a hash of the data.

    Raises:
        ValueError: If anything does not fit.
    """
    task, settings = TASKS[plan["task"]], Settings(**plan["settings"])
    count = plan.get("processes", processes.count())  # runs of before do not say
    if count != processes.count():
        raise ValueError(
            f"Expected 'devices' to be {count} as in the run to resume (got {processes.count()}). Its results depend on how many processes "
            f"share a batch: give --devices {count}, or start a new run."
        )
    check_start(given, plan)
    given_data = None if plan["data"] is None else Path(plan["data"])
    root, generated = data_folder(task, plan["preset"], settings, given_data, start=Path(plan.get("directory", "")))
    if generated:
        print(f"Generated {root}")
    prepared, first = Path(plan["prepared"]) if plan.get("prepared") else None, processes.rank() == 0
    splits = task.load(settings, root, prepared=prepared, progress=first)
    fingerprint = splits_digest(splits)
    if plan.get("fingerprint", fingerprint) != fingerprint:
        raise ValueError(f"Expected 'data' to be what the run was started with (got other examples in {root}). Give its folder.")
    threads = vars(given).get("threads", task.presets[plan["preset"]].threads)
    if threads is not None:
        torch.set_num_threads(threads)
    Data(splits, settings)  # refuses what cannot be trained before anything is written
    return task, settings, splits, fingerprint


def hint(given: argparse.Namespace, folder: Path) -> str:
    """Writes the command that goes on with a run on the same machine, in the same number of processes."""
    words = ["python", sys.argv[0]]
    if processes.count() > 1 and given.devices == 1:
        here = processes.on_this_machine()
        words = ["torchrun", "--nnodes", str(processes.count() // here), "--nproc-per-node", str(here), sys.argv[0]]
    words += ["--output", str(folder), "--resume"]
    usual = {"accelerator": "auto", "devices": 1, "workers": 0}
    for name in ("data", "prepared", "export", "accelerator", "devices", "workers", "threads"):
        value = vars(given).get(name)
        if value is not None and value != usual.get(name):
            words += ["--" + name, str(value)]
    return shlex.join(words)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; ``--help`` explains it."""
    given = parse(arguments)
    if given.devices < 1:
        given.fail(f"Expected 'devices' to be at least 1 (got {given.devices}). Leave it out for one.")
    if given.devices > 1 and processes.planned() == 1:
        code = processes.launch(__file__, sys.argv[1:] if arguments is None else arguments, given.devices)
        if code:
            raise SystemExit(code)
        return
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # gathering a ragged batch is cheap
    for words in (".*LeafSpec.*", ".*broadcast_buffers.*"):  # Lightning's own affairs
        warnings.filterwarnings("ignore", message=words + "is deprecated.*")
    with processes.together(), Signals() as signals:
        run(given, signals)


def run(given: argparse.Namespace, signals: Signals) -> None:
    """Trains as the command line says, in each of the processes of a run."""
    say = print if processes.rank() == 0 else lambda *words: None
    export: Path | None = vars(given).get("export")
    with contextlib.ExitStack() as held:

        def take() -> Path:
            taken, lock = claim(given, folder, {**plan, "processes": processes.count(), "fingerprint": fingerprint})
            held.enter_context(lock)
            return taken

        try:
            folder, plan = processes.of_first(lambda: resolve(given))
            processes.of_first(lambda: check_export(export, folder, Settings(**plan["settings"])))
            processes.of_first(lambda: check_writable("output", folder))
            task, settings, splits, fingerprint = processes.in_turn(lambda: read(given, plan))
            folder = processes.of_first(take)
            start = processes.in_turn(lambda: checkpoints.newest(folder, vars(given).get("resume_from", "last")))
            processes.of_first(lambda: check_files(folder, settings, start))
        except ValueError as error:
            if processes.rank():
                raise SystemExit(2) from None
            given.fail(str(error))
        for name, split in splits.items():
            if split.truncated:
                say(f"{name}: cut {split.truncated:,} of {len(split):,} sequences to {settings.max_length} tokens")
        say(f"{task.name}, {plan['preset']} preset, {settings.attention} attention, {len(splits['train']):,} examples -> {folder}")
        options: dict[str, Any] = {"start": start, "signals": signals, "workers": given.workers}
        held.enter_context(flushed_subnormals())
        try:
            results = train(folder, task, settings, splits, given.accelerator, export, **options)
        except SystemExit:
            say(f"\nStopped. Go on with: {hint(given, folder)}")
            raise
        except (checkpoints.CheckpointError, checkpoints.DivergenceError, OSError) as error:
            words = checkpoints.failure(error)
            if words is None:
                raise
            raise SystemExit(f"\n{words}" if processes.rank() == 0 else 1) from None
    if processes.rank():
        return
    print(f"\n{report.results_table(results)}\n\nSettings, curves, checkpoints, results and plots are in {folder}")
    if export is not None:
        print(f"The model is in {export}; `sbm_pyg.Pretrained.from_pretrained` reads it.")


if __name__ == "__main__":
    main()
