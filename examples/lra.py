"""Trains a transformer with sparse, sampled attention on a task of the Long Range Arena, and reports what came of it.

In: a task, a preset, any setting that should differ, and data (generated if none is given). Out: a folder with curves,
checkpoints, results and plots. Not here: tasks and presets (``lra_tasks.py``), tables and plots (``lra_report.py``)::

    python examples/lra.py --task listops --preset laptop
    python examples/lra.py --task listops --preset paper --data lra_release --precision bf16-mixed --accumulate 4
    python examples/lra.py --output runs/listops-laptop-0 --resume

Everything random is a function of the seed and of the number of the step, never of what ran before. So a run that was
killed and resumed ends with the very weights of one that was not (bit for bit on the CPU), accumulating does not change
which graphs are sampled, and an example is evaluated alike in whatever batch it comes.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import logging
import platform
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

import lra_report as report
from density_guard import DensityGuard
from lra_tasks import TASKS, Batch, LengthBuckets, Settings, Split, Task, load, random_word
from sbm_pyg import PairClassifier, SequenceClassifier, SequenceEncoder

SETTINGS, RESULTS, LAST, BEST = "settings.json", "results.json", "last.ckpt", "best.ckpt"
PRESETS = ("laptop", "paper")


class Classifier(LightningModule):
    """The model of a task, its loss, its optimiser, and the record of its loss, accuracy and densities.

    Args:
        task: What to learn.
        settings: How.
    """

    def __init__(self, task: Task, settings: Settings) -> None:
        super().__init__()
        self.settings, self.arity = settings, task.arity
        options: dict[str, Any] = {"dropout": settings.attention_dropout}
        if settings.attention == "sbm":
            options |= {name: getattr(settings, name) for name in ("num_blocks", "estimator", "probes", "exploration", "clusters")}
            options["sbm_options"] = {
                "parameterization": settings.parameterization,
                "density": settings.initial_density,
                "temperature": settings.temperature,
                "tied": bool(settings.tied),
            }
        elif settings.attention == "window":
            options["window"] = settings.window
        encoder = SequenceEncoder(
            task.num_tokens,
            settings.channels,
            num_layers=settings.layers,
            heads=settings.heads,
            head_channels=settings.head_channels,
            ffn_channels=settings.ffn_channels,
            max_length=settings.max_length,
            dropout=settings.dropout,
            attention=settings.attention,
            attention_options=options,
        )
        self.model = (SequenceClassifier if task.arity == 1 else PairClassifier)(encoder, task.num_classes)
        self.sums: dict[str, Tensor] = {}
        self.latest: dict[str, dict[str, float]] = {}  # the last row of each phase

    def configure_optimizers(self) -> Any:
        chosen = self.settings
        optimizer = torch.optim.AdamW(self.parameters(), lr=chosen.learning_rate, eps=1e-6, weight_decay=chosen.weight_decay)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=chosen.learning_rate,
            total_steps=chosen.steps,
            pct_start=chosen.warmup / chosen.steps if chosen.warmup > 1 else 0.0,
            anneal_strategy="linear",
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def classify(self, batch: Batch, seed: int) -> tuple[Tensor, Any]:
        """Returns logits [B, classes] and the trace, graphs being sampled from one random stream per sequence."""
        return self.model(batch.tokens, batch.ptr, seed=seed, streams=batch.examples, return_trace=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        seed, parts = self.settings.seed, self.settings.accumulate
        part = self.current_epoch * self.settings.validate_every * parts + batch_idx
        torch.manual_seed(random_word(seed, 0, part))  # dropout
        logits, trace = self.classify(batch, seed=random_word(seed, 1, part // parts))
        loss = cross_entropy(logits.float(), batch.labels)
        self.add(batch, logits, loss, trace)
        self.graphs = dataclasses.replace(trace, sbms=(None,) * len(trace.sbms))
        return loss + self.settings.density_weight * trace.density_loss() if self.settings.density_weight else loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits, trace = self.classify(batch, seed=self.settings.seed)
        self.add(batch, logits, cross_entropy(logits.float(), batch.labels), trace)

    test_step = validation_step

    def add(self, batch: Batch, logits: Tensor, loss: Tensor, trace: Any) -> None:
        """Adds a batch to the sums of which the next row is the mean."""
        density = trace.density.detach().unflatten(0, (self.arity, -1))  # [arity, layers, B, heads]
        new = {
            "examples": torch.tensor(len(batch.labels)),
            "tokens": torch.tensor(batch.tokens.numel() if self.arity == 1 else sum(side.numel() for side in batch.tokens)),
            "loss": loss.detach().double() * len(batch.labels),
            "correct": (logits.argmax(-1) == batch.labels).sum(),
            "density": density.double().mean((0, 2)) * len(batch.labels),  # [layers, heads]
        }
        self.sums = {name: self.sums[name] + value for name, value in new.items()} if self.sums else new

    def finish_row(self) -> dict[str, float]:
        """Turns the sums into a row of means, and starts new sums."""
        sums, self.sums = self.sums, {}
        examples = int(sums["examples"])
        self.tokens, self.correct, self.examples = int(sums["tokens"]), int(sums["correct"]), examples
        row = {"loss": sums["loss"].item() / examples, "accuracy": self.correct / examples}
        for layer, heads in enumerate((sums["density"] / examples).tolist()):
            row |= {report.density_name(layer, head): density for head, density in enumerate(heads)}
        return row

    def record(self, phase: str, row: Mapping[str, float]) -> None:
        """Hands a row to the loggers."""
        self.latest[phase] = dict(row)
        for logger in self.loggers:
            logger.log_metrics({f"{phase}/{name}": value for name, value in row.items()}, step=self.global_step)

    def on_train_epoch_start(self) -> None:
        self.clock = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        parts, round_ends = self.settings.accumulate, batch_idx + 1 == self.trainer.num_training_batches
        if (batch_idx + 1) % parts == 0 and (self.global_step % self.settings.log_every == 0 or round_ends):
            row = self.finish_row()
            now = time.perf_counter()
            row["tokens_per_second"] = self.tokens / (now - self.clock)
            self.clock = now
            self.record("train", row)

    def on_validation_epoch_end(self) -> None:
        self.record("val", self.finish_row())

    def on_test_epoch_end(self) -> None:
        self.tested = self.finish_row()


class Data(LightningDataModule):
    """Batches for the trainer; one of its epochs is a round, the steps between two validations, not a pass over the data.

    Args:
        splits: Training, validation and test examples.
        settings: Sizes and seed.

    Raises:
        ValueError: If there are fewer training examples than a batch needs.
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
        done = self.trainer.current_epoch * self.settings.validate_every
        count = min(self.settings.validate_every, self.settings.steps - done)
        return self._loader("train", list(self.buckets.stream(done, count, parts=self.settings.accumulate)))

    def val_dataloader(self) -> DataLoader:
        return self._loader("val", LengthBuckets(self.splits["val"].lengths, token_budget=self.token_budget))

    def test_dataloader(self) -> DataLoader:
        return self._loader("test", LengthBuckets(self.splits["test"].lengths, token_budget=self.token_budget))

    def _loader(self, split: str, batches: Any) -> DataLoader:
        return DataLoader(self.splits[split], batch_sampler=batches, collate_fn=lambda batch: batch)  # type: ignore[arg-type]


class Checkpoints(Checkpoint):
    """Keeps the last state and the best one by validation accuracy; every file is written whole or not at all.

    Args:
        folder: Of the two files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.best: dict[str, float] = {"accuracy": -1.0, "step": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.best)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = dict(state_dict)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        accuracy = pl_module.latest["val"]["accuracy"]  # a round ends with its validation
        if accuracy > self.best["accuracy"]:
            self.best = {"accuracy": accuracy, "step": trainer.global_step}
            trainer.save_checkpoint(self.folder / BEST)
        trainer.save_checkpoint(self.folder / LAST)


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
    folder: Path, task: Task, settings: Settings, splits: Mapping[str, Split], accelerator: str, export: Path | None = None
) -> dict[str, Any]:
    """Trains, or goes on from the folder's last checkpoint; tests the best one; writes results and plots.

    Args:
        folder: Of the run.
        task: What to learn.
        settings: How.
        splits: The data.
        accelerator: As Lightning names it.
        export: Where the tested model is saved with :meth:`sbm_pyg.Pretrained.save_pretrained`, or None.

    Returns:
        The results, as in ``results.json``.
    """
    torch.manual_seed(random_word(settings.seed, 2))
    module, data, checkpoints = Classifier(task, settings), Data(splits, settings), Checkpoints(folder)
    last = folder / LAST if (folder / LAST).exists() else None
    done = int(torch.load(last, map_location="cpu", weights_only=True)["global_step"]) if last else None
    trainer = Trainer(
        max_epochs=-(-settings.steps // settings.validate_every),
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.clip_norm or None,
        precision=settings.precision,  # type: ignore[arg-type]
        accelerator=accelerator,
        devices=1,
        logger=[
            report.CurveLogger(folder, done),
            TensorBoardLogger(folder, name=None, version="tensorboard", purge_step=None if done is None else done + 1),
        ],
        callbacks=[checkpoints, Guard(), Progress()],
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if last is None:
        trainer.validate(module, data, verbose=False)  # the densities before the first step
    if done != settings.steps:
        trainer.fit(module, data, ckpt_path=last, weights_only=True)
    best = torch.load(folder / BEST, map_location="cpu", weights_only=True)["callbacks"]["Checkpoints"]
    trainer.test(module, data, ckpt_path=folder / BEST, weights_only=True, verbose=False)

    train_rows, val_rows = (report.read_curves(folder / f"{phase}.csv") for phase in ("train", "val"))
    place, peak = report.peak_memory()
    sizes = (settings.layers, settings.heads)
    results = {
        "test": {
            "accuracy": module.tested["accuracy"],
            "interval_95": report.wilson_interval(module.correct, module.examples),
            "loss": module.tested["loss"],
            "examples": module.examples,
            "majority": splits["test"].majority,
        },
        "best": best,
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
    report.plot_curves(folder / "curves.png", train_rows, val_rows, splits["val"].majority)
    report.plot_densities(folder / "density.png", train_rows, *sizes)
    draw_masks(folder / "masks.png", module, splits["test"], task.words)
    if export is not None:
        metric = {"test accuracy": module.tested["accuracy"], "validation accuracy": best["accuracy"]}
        module.model.save_pretrained(export, task=task.name, metric=metric, density=results["density"]["tested"])
    return results


@torch.no_grad()
def draw_masks(path: Path, module: Classifier, split: Split, words: tuple[str, ...], length: int = 256) -> None:
    """Draws the graphs of the example whose length is nearest to the median, or to ``length`` if that is shorter."""
    wanted = min(float(np.median(split.lengths)), length)
    example = int(np.abs(split.lengths - wanted).argmin())
    batch = Batch(*(tensor.to(module.device) for tensor in split.__getitems__([example])))
    _, trace = module.eval().classify(batch, seed=module.settings.seed)
    if any(graph is None for graph in trace.graphs):  # full attention has no graph to draw
        return
    masks = [graph.to_dense(0).cpu().numpy() for graph in trace.graphs]
    chances = [None if sbm is None else sbm.edge_prob_dense(0).cpu().numpy() for sbm in trace.sbms]
    report.plot_masks(path, masks, chances, [words[token] for token in batch.tokens.tolist()] if words else [])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line; settings that are not given are absent from the result."""
    parser = argparse.ArgumentParser(description="Trains on a task of the Long Range Arena.", argument_default=argparse.SUPPRESS)
    parser.add_argument("--task", choices=tuple(TASKS), help="what to learn (default: listops)")
    parser.add_argument("--preset", choices=PRESETS, help="where all other settings come from (default: laptop)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder of the task; by default one is generated in data/")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the run (default: a new one in runs/)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --output; its settings are known")
    parser.add_argument("--export", type=Path, metavar="DIR", help="save the tested model there, with its card, for `from_pretrained`")
    parser.add_argument("--accelerator", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="(default: auto)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: 1 for laptop, as torch chooses for paper)")
    group = parser.add_argument_group("settings", "each overrides the preset; values are those of laptop | paper")
    for field in dataclasses.fields(Settings):
        kind = {"int": int, "float": float, "str": str}[str(field.type)]
        values = " | ".join(str(getattr(TASKS["listops"].presets[name].settings, field.name)) for name in PRESETS)
        option = "--" + field.name.replace("_", "-")
        help_text = f"{field.metadata['help']} ({values})"
        group.add_argument(option, type=kind, choices=field.metadata["choices"] or None, help=help_text)
    parsed = parser.parse_args(arguments)
    parsed.fail = parser.error
    return parsed


def resolve(given: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Settles folder and settings of a run: those that a resumed run was started with, else preset and command line.

    Returns:
        The folder, and the content of its ``settings.json``.

    Raises:
        ValueError: If settings are out of range, or if folder and settings do not fit together.
    """
    options = vars(given)
    chosen = {f.name: options[f.name] for f in dataclasses.fields(Settings) if f.name in options}
    if "resume" in options:
        folder = options.get("output")
        if folder is None or not (folder / SETTINGS).is_file():
            raise ValueError(
                f"Expected 'output' to be the folder of a run to resume (got {folder}). Give --output the folder that holds its "
                f"{SETTINGS}, or start a new run without --resume."
            )
        plan = json.loads((folder / SETTINGS).read_text())
        known = {"task": plan["task"], "preset": plan["preset"], **plan["settings"]}
        for name, value in {name: options[name] for name in known if name in options}.items():
            if value != known[name]:
                raise ValueError(
                    f"Expected '{name.replace('_', '-')}' to be {known[name]!r} as in the run to resume (got {value!r}). Leave it "
                    "out, or start a new run."
                )
        return folder, plan | {"data": str(options["data"])} if "data" in options else plan

    name, preset = options.get("task", "listops"), options.get("preset", "laptop")
    settings = TASKS[name].presets[preset].settings
    if "steps" in chosen and "warmup" not in chosen:
        chosen["warmup"] = settings.warmup * chosen["steps"] // settings.steps
    settings = dataclasses.replace(settings, **chosen)
    folder = options.get("output")
    if folder is None:
        names = (Path("runs") / f"{name}-{preset}-{number}" for number in itertools.count(1))
        folder = next(path for path in names if not path.exists())
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"Expected 'output' to be a new or empty folder (got {folder}, which has content). Choose another one, or add --resume."
        )
    data = str(options["data"]) if "data" in options else None
    return folder, {"task": name, "preset": preset, "data": data, "settings": dataclasses.asdict(settings)}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; ``--help`` explains it."""
    given = parse(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # gathering a ragged batch is cheap
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")  # Lightning's own affair
    try:
        folder, plan = resolve(given)
        task, settings = TASKS[plan["task"]], Settings(**plan["settings"])
        root = Path(plan["data"] or f"data/{task.name}-{plan['preset']}")
        if plan["data"] is None and task.generate(root, task.presets[plan["preset"]].data):
            print(f"Generated {root}")
        splits = load(task, root, max_length=settings.max_length, progress=True)
        fingerprint = hashlib.sha256(b"".join(a.tobytes() for s in splits.values() for a in (s.tokens, s.ptr, s.labels)))
        if plan.get("fingerprint", fingerprint.hexdigest()) != fingerprint.hexdigest():
            raise ValueError(f"Expected 'data' to be what the run was started with (got other examples in {root}). Give its folder.")
        threads = vars(given).get("threads", task.presets[plan["preset"]].threads)
        if threads is not None:
            if threads < 1:
                raise ValueError(f"Expected 'threads' to be at least 1 (got {threads}). Leave it out for the default.")
            torch.set_num_threads(threads)
        Data(splits, settings)  # refuses what cannot be trained before anything is written
        export: Path | None = vars(given).get("export")
        if export is not None and export.exists() and (not export.is_dir() or any(export.iterdir())):
            raise ValueError(f"Expected 'export' to be a new or empty folder (got {export}, which has content). Choose another one.")
    except ValueError as error:
        given.fail(str(error))
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / SETTINGS).exists():
        report.write_json(folder / SETTINGS, {**plan, "fingerprint": fingerprint.hexdigest()})
    for name, split in splits.items():
        if split.truncated:
            print(f"{name}: cut {split.truncated:,} of {len(split):,} sequences to {settings.max_length} tokens")
    print(f"{task.name}, {plan['preset']} preset, {settings.attention} attention, {len(splits['train']):,} examples -> {folder}")
    try:
        results = train(folder, task, settings, splits, given.accelerator, export)
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the first into the second
        print(f"\nStopped. Go on with: python {sys.argv[0]} --output {folder} --resume")
        raise
    print(f"\n{report.results_table(results)}\n\nSettings, curves, checkpoints, results and plots are in {folder}")
    if export is not None:
        print(f"The model is in {export}; `sbm_pyg.Pretrained.from_pretrained` reads it.")


if __name__ == "__main__":
    main()
