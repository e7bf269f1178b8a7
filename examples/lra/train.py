"""Trains a transformer with sparse, sampled attention on a task of the Long Range Arena, and writes a folder with its results.

    python examples/lra.py --task listops --preset laptop
    python -m examples.lra train --task listops --preset paper --data lra_release --precision bf16-mixed --accumulate 4
    python -m examples.lra train --output runs/listops-laptop-1 --resume
    torchrun --nproc-per-node 2 -m examples.lra train --output runs/two
    python -m examples.lra pretrain --task listops --preset modern-laptop --output runs/pretraining
    python -m examples.lra train --task listops --preset modern-laptop --pretrained runs/pretraining

`pretrain` trains the same encoder to predict hidden tokens of the training examples, and otherwise works alike.

Everything random is a function of the seed and of the number of the step. So a run that was killed and resumed ends with the very weights
of one that was not (bit for bit on the CPU), neither accumulation nor several processes change the sampled graphs, and an example is
evaluated alike in any batch.
"""

import argparse
import contextlib
import dataclasses
import math
import platform
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scipy.stats import binomtest
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.common import runs
from examples.common.command import require
from examples.common.fit import Parts, Recorder, fit, make_fabric
from examples.common.runs import RunError, check_folder, hold, random_word, read_record, read_state, write_record
from examples.common.tables import Row, write_csv
from examples.lra import figures, report
from examples.lra.baselines import BASELINES
from examples.lra.data.batches import Batch, LengthBuckets, Split, by_length
from examples.lra.data.tasks import TASKS, open_data
from examples.lra.model import Classifier, Reconstructor, TaskModel, hide
from examples.lra.report import RESULTS
from examples.lra.settings import PRESETS, SETTINGS, Plan, Settings, resolve
from sbm_pyg import Sparsifier
from sbm_pyg.ops.cpu.threads import flushed_subnormals
from sbm_pyg.progress import tqdm

T = TypeVar("T")
LAST, BEST = "last.ckpt", "best.ckpt"
WAY_OUT = f"It is damaged: take it from a backup, copy {BEST} to {LAST} and resume from there, or start a new run."
ADVICE = "Lower --density-weight, raise --exploration or the density at the start; see docs/learning.md."
THREADS = torch.get_num_threads()


class Data:
    """Batches of a run, of which process ``rank`` of ``count`` evaluates its equal part.

    The order of the examples is a function of their lengths and the seed, and not of processes or of the parts of a batch.
    """

    def __init__(self, splits: Mapping[str, Split], settings: Settings, rank: int = 0, count: int = 1) -> None:
        self.splits, self.settings, self.rank, self.count = splits, settings, rank, count
        lengths, self.num_parts = splits["train"].lengths, settings.accumulate * count
        self.buckets = LengthBuckets(lengths, batch_size=settings.batch_size, seed=settings.seed)
        most = min(len(self.evaluated(split)) for split in ("val", "test"))
        divides, got = settings.batch_size % self.num_parts == 0, f"{count} processes, {self.num_parts} parts"
        words = f"'nproc-per-node' to be at most {most}, an example of each split for each process, and times 'accumulate' to divide "
        require(
            divides and count <= most,
            f"{words}'batch-size' = {settings.batch_size}",
            got,
            "Take fewer, or other batches.",
        )
        # No more tokens at a time than in training, so what could be trained can be evaluated.
        self.token_budget = int(lengths.mean() * (settings.batch_size // self.num_parts))

    def parts(self, step: int) -> list[list[int]]:
        """The examples of a step, counted from 0, in the equal parts of all processes."""
        return [part.tolist() for part in np.split(self.buckets.batch(step), self.num_parts)]

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


class Curves(Recorder):
    """Means of loss, accuracy and densities over labels, in rows of training and of validation."""

    def __init__(self, module: TaskModel, folder: Path, fabric: Fabric) -> None:
        self.settings, self.arity, self.folder, self.fabric = module.settings, module.arity, folder, fabric
        self.rows: dict[str, list[Row]] = {"train": [], "val": []}
        self.sums: dict[str, Tensor] = {}  # of which the next row is the mean
        self.step, self.tokens, self.clock = 0, 0, time.perf_counter()
        self.warned: set[str] = set()

    def add(self, batch: Batch, logits: Tensor, loss: Tensor, trace: Any) -> None:
        """Adds a batch to the sums of which the next row is the mean."""
        density = trace.density.detach().unflatten(0, (self.arity, -1))  # [arity, layers, B, heads]
        new = {
            "examples": torch.tensor(len(batch.labels), device=loss.device),
            "loss": loss.detach().double() * len(batch.labels),
            "correct": (logits.argmax(-1) == batch.labels).sum(),
            "density": density.double().mean((0, 2)) * len(batch.labels),  # [layers, heads]
        }
        old, self.tokens = self.sums, self.tokens + batch.num_tokens
        self.sums = {name: value + old[name].to(value.device) if old else value for name, value in new.items()}

    def total(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sums over all processes, which call this together."""
        if self.fabric.world_size == 1:
            return sums
        return {name: self.fabric.all_reduce(value.clone(), reduce_op="sum") for name, value in sums.items()}  # type: ignore[misc]

    def finish(self, phase: str = "") -> Row:
        """Turns the sums into a row of means, and starts new sums; the row of a phase goes to its curve."""
        sums = self.total(self.sums | {"tokens": torch.tensor(self.tokens, device=self.fabric.device)})
        self.correct, self.examples = int(sums["correct"]), int(sums["examples"])
        row = {"loss": sums["loss"].item() / self.examples, "accuracy": self.correct / self.examples}
        for layer, heads in enumerate((sums["density"] / self.examples).tolist()):
            row |= {report.density_name(layer, head): density for head, density in enumerate(heads)}
        if phase == "train":
            row["tokens_per_second"] = int(sums["tokens"]) / (time.perf_counter() - self.clock)
        if phase:
            self.rows[phase].append({"step": self.step, **row})
        self.sums, self.tokens, self.clock = {}, 0, time.perf_counter()
        return row

    def words(self, row: Mapping[str, float]) -> str:
        layers = np.mean(report.densities(row, self.settings.layers, self.settings.heads), axis=1)
        shares = " ".join(f"{share:.3f}" for share in layers)
        return f"loss {row['loss']:.3f}, accuracy {row['accuracy']:.3f}, density {shares}"

    def warn(self, row: Mapping[str, float]) -> None:
        """Warns, once for each head, when its density has collapsed."""
        for name in {name for name, value in row.items() if name.startswith("density") and value < 1e-3} - self.warned:
            self.warned.add(name)
            warnings.warn(f"Step {self.step}: {name} is {row[name]:.2%}, an empty head. {ADVICE}", stacklevel=2)

    def after_step(self, step: int) -> str:
        self.step = step
        if step % self.settings.log_every and step % self.settings.validate_every and step < self.settings.steps:
            return ""
        row = self.finish("train")
        if self.fabric.is_global_zero:
            self.warn(row)
        return self.words(row)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "sums": self.total(self.sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self.sums = state["rows"], state["sums"] if self.fabric.is_global_zero else {}
        self.clock = time.perf_counter()

    def after_save(self) -> None:
        for phase, rows in self.rows.items():
            write_csv(self.folder / f"{phase}.csv", rows)


def make_model(plan: Plan) -> TaskModel:
    """The model of a run with its initial weights; those of `pretrain` are not read."""
    kind = Reconstructor if plan.is_pretraining else Classifier
    return kind(TASKS[plan.task], plan.settings)


def read_encoder(plan: Plan, module: TaskModel) -> str:
    """Gives a model the encoder that its run begins with; returns where that comes from, in words, with its checksum.

    Raises:
        ValueError: The folder has no pretrained encoder, or that of another task, of other examples or of other settings.
    """
    folder = plan.place("pretrained")
    assert folder is not None
    is_run = all((folder / name).is_file() for name in (SETTINGS, BEST))
    way_out = "Make one with `python -m examples.lra pretrain`."
    require(is_run, f"'pretrained' to be a folder with {SETTINGS} and {BEST}", folder, way_out)
    other = Plan.read(folder / SETTINGS)
    require(other.is_pretraining, "'pretrained' to be a run of `pretrain`", f"one of `{other.program}`", way_out)
    require(other.task == plan.task, f"'pretrained' to be of {plan.task}", f"one of {other.task}", way_out)
    is_same = other.fingerprint == plan.fingerprint
    require(
        is_same, "'pretrained' to be of the examples of this run", f"others in {folder}", "Give both the same --data."
    )
    path, prefix = folder / BEST, "model.encoder."
    saved = runs.read_checkpoint(path, "It is damaged: take it from a backup, or pretrain again.")
    weights = {
        name.removeprefix(prefix): value
        for name, value in saved["model"].items()
        if name.startswith(prefix) and ".source." not in name
    }
    names = ("layers", "heads", "channels", "head_channels", "ffn_channels", "max_length", "positions")
    changed = [
        f"{name.replace('_', '-')} = {getattr(other.settings, name)}"
        for name in names
        if getattr(other.settings, name) != getattr(plan.settings, name)
    ]
    got = f"one with {', '.join(changed)}"
    require(
        not changed, "'pretrained' to have the sizes and positions of this run", got, "Give both the same settings."
    )
    _, unknown = module.model.encoder.load_state_dict(weights, strict=False)
    kind = f"'pretrained' to be of an attention that {plan.settings.attention!r} can begin with"
    require(not unknown, kind, other.settings.attention, "Pretrain with --attention full, or with the same.")
    hidden = f"{other.settings.mask_ratio:.0%} of the tokens hidden"
    return f"step {saved['step']:,} of {other.settings.steps:,}, {hidden}, checksum {runs.fingerprint([path.read_bytes()])}"


def make_optimizer(module: TaskModel) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW with one cycle of the learning rate, linear."""
    settings = module.settings
    rate, warmup = settings.learning_rate, settings.warmup / settings.steps if settings.warmup > 1 else 0.0
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, eps=1e-6, weight_decay=settings.weight_decay)
    law: dict[str, Any] = {"total_steps": settings.steps, "pct_start": warmup, "anneal_strategy": "linear"}
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, **law)


def make_sparsifier(module: TaskModel) -> Sparsifier | None:
    """What takes a model to its target density, if it has one."""
    density, steps = module.settings.target_density, module.settings.steps
    # the learning rate falls in a straight line, and sparse attention needs some of it
    return Sparsifier(module.model, density, steps, dense_part=0.4) if density else None


def train(folder: Path, plan: Plan, data: Data, fabric: Fabric) -> dict[str, Any]:
    """Trains, or resumes from the last checkpoint; tests the best one; writes results, which the first process returns, and plots."""
    settings, task, splits = plan.settings, TASKS[plan.task], data.splits
    torch.manual_seed(random_word(settings.seed, 2))
    module = make_model(plan)
    if plan.pretrained is not None and not (folder / LAST).exists():
        read_encoder(plan, module)
    sparsifier = make_sparsifier(module)
    curves = Curves(module, folder, fabric)

    def read(split: str, examples: list[int], seed: int) -> Batch:
        batch = splits[split].__getitems__(examples)
        return fabric.to_device(hide(batch, settings.mask_ratio, seed) if plan.is_pretraining else batch)

    def majority(split: str) -> float:
        """The accuracy of the most frequent class, or token."""
        chosen = data.evaluated(split)
        if not plan.is_pretraining:
            return splits[split].majority(chosen)
        tokens = splits[split].__getitems__(chosen.tolist()).tokens
        counts = torch.bincount(torch.cat(tokens) if isinstance(tokens, tuple) else tokens)
        return float(counts.max() / counts.sum())

    def losses(step: int) -> Parts:
        def compute(number: int, examples: list[int]) -> Tensor:
            batch = read("train", examples, random_word(settings.seed, 3, step))
            torch.manual_seed(random_word(settings.seed, 0, step * data.num_parts + number))  # dropout
            logits, trace = module.classify(batch, seed=random_word(settings.seed, 1, step))
            loss = cross_entropy(logits.float(), batch.labels)
            curves.add(batch, logits, loss, trace)
            return loss + module.price(trace)

        return [partial(compute, number, examples) for number, examples in enumerate(data.parts(step))]

    def evaluate(split: str, graphs: int, phase: str = "") -> Row:
        for examples in data.batches(split):
            batch = read(split, examples, random_word(settings.seed, 4))
            logits, trace = module.average(batch, graphs)
            curves.add(batch, logits, cross_entropy(logits.float(), batch.labels), trace)
        return curves.finish(phase)

    def measure() -> list[Row]:
        row = evaluate("val", 1, "val")
        if fabric.is_global_zero:
            tqdm.write(f"step {curves.step:>6,}  validation {curves.words(row)}", file=sys.stderr)
        return [{"accuracy": row["accuracy"]}]

    def score(row: Row) -> float:
        return row["accuracy"] if sparsifier is None or sparsifier.is_sparse else -math.inf

    rows = fit(
        module, sparsifier, settings, folder / LAST, losses, measure, optimizer=make_optimizer(module), score=score,
        best_path=folder / BEST, evaluate_every=settings.validate_every, measure_first=True, save_every=settings.save_every,
        clip_norm=settings.clip_norm, recorder=curves, fabric=fabric, title="Training", way_out=WAY_OUT,
    )  # fmt: skip
    best = load_state(module, folder)["rows"][-1]
    began = time.perf_counter()
    with torch.no_grad(), fabric.autocast():
        tested = evaluate("test", settings.test_graphs)
    if data.rank:
        return {}
    curves.after_save()  # a kill may have come before it
    density = {"first": curves.rows["val"][0], "last": curves.rows["val"][-1], "tested": tested}
    results: dict[str, Any] = {
        "test": {
            "accuracy": tested["accuracy"],
            "interval_95": binomtest(curves.correct, curves.examples).proportion_ci(method="wilson"),
            "loss": tested["loss"],
            "examples": curves.examples,
            "majority": majority("test"),
        },
        "best": {name: best[name] for name in ("accuracy", "step")},
        "pipeline": task.pipeline(settings, splits) | ({"pretrained": plan.beginning} if plan.beginning else {}),
        "density": {name: report.densities(row, settings.layers, settings.heads) for name, row in density.items()},
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in curves.rows["train"]),
        "seconds": rows[-1]["seconds"] + time.perf_counter() - began,
        **report.peak_memory(),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "device": str(fabric.device),
        "versions": {name: version(name) for name in ("torch", "lightning")} | {"python": platform.python_version()},
    }
    report.plot_curves(folder / "curves.png", curves.rows, majority("val"))
    if isinstance(module, Classifier):
        figures.draw(folder, module, splits["test"], curves.rows["train"])
    write_record(folder / RESULTS, results)
    return results


def load_state(module: TaskModel, folder: Path) -> dict[str, Any]:
    """Gives a model the weights of the best checkpoint of its run, which is returned, and sets it to evaluation."""
    way_out = "It is damaged: take it from a backup, or start a new run."
    state = read_state(folder / BEST, dataclasses.asdict(module.settings), way_out, needed=True)
    module.load_state_dict(state["model"])
    module.eval()
    return state


def load_best(folder: Path, plan: Plan) -> Classifier:
    """Returns the model of a run with the weights of its best checkpoint."""
    with torch.random.fork_rng(devices=[]):  # its initial weights are thrown away
        module = Classifier(TASKS[plan.task], plan.settings)
    load_state(module, folder)
    return module


def open_run(folder: Path, data: Path | None = None) -> tuple[Plan, Classifier, dict[str, Split]]:
    """Opens a run to look at it: its plan, its best model, and its data, which may have moved."""
    is_run = all((folder / name).is_file() for name in (SETTINGS, BEST))
    require(is_run, f"'run' to be a folder with {SETTINGS} and {BEST}", folder, "Give that of a run.")
    plan = Plan.read(folder / SETTINGS)
    require(not plan.is_pretraining, "'run' to be one of `train`", "one of `pretrain`", "It has no classifier.")
    moved = plan if data is None else dataclasses.replace(plan, data=str(data.absolute()), prepared=None)
    splits, _ = open_data(moved)
    return plan, load_best(folder, plan), splits


def export_model(folder: Path, plan: Plan, results: Mapping[str, Any], export: Path) -> None:
    """Saves the tested model with its card; ``from_pretrained`` reads it."""
    numbers = {"test accuracy": results["test"]["accuracy"], "validation accuracy": results["best"]["accuracy"]}
    densities = enumerate(results["density"]["tested"])
    numbers |= {f"density of layer {layer}": statistics.fmean(heads) for layer, heads in densities}
    summary = f"{plan.task} ({'; '.join(f'{name}: {words}' for name, words in results['pipeline'].items())})"
    model = load_best(folder, plan).model
    model.save_pretrained(export, model_card_kwargs={"task": summary, "results": numbers})


def read(args: argparse.Namespace, plan: Plan) -> tuple[dict[str, Split], str]:
    """Opens the data of a run, with as many threads as this process has from now on."""
    torch.set_num_threads(args.threads or PRESETS[plan.task][plan.preset].threads or THREADS)
    return open_data(plan)


def prepare(args: argparse.Namespace, count: int = 1) -> tuple[Path, Plan, dict[str, Split]]:
    """Settles folder, plan and data of a run in so many processes, and refuses what cannot be trained before anything is written."""
    folder, plan = resolve(args)
    export = vars(args).get("export")
    if export is not None:
        attention, way_out = plan.settings.attention, "Baselines are of the examples alone; copy the folder of the run."
        require(attention not in BASELINES, f"no 'export' with {attention!r} attention", export, way_out)
        empty = not export.is_dir() or not any(export.iterdir())
        require(empty, "'export' to be a new or empty folder", export, "Choose another one.")
        check_folder("export", export)
    way_out = "Their steps are not timed: give --steps."
    require(plan.minutes is None or count == 1, "one process with 'minutes'", count, way_out)
    TASKS[plan.task].options_of(plan.settings)
    try:
        module = make_model(plan)
    except ImportError as error:  # of the package of a baseline
        raise ValueError(str(error)) from None
    splits, digest = read(args, plan)
    Data(splits, plan.settings, count=count)
    if plan.minutes is not None and not plan.fingerprint:  # a new run
        from examples.lra import cost  # imports this module

        plan = cost.planned(plan, splits, args.accelerator)
    plan = dataclasses.replace(plan, fingerprint=digest)
    if plan.pretrained is not None and not (folder / LAST).exists():
        beginning = read_encoder(plan, module)
        words = f"'pretrained' to be what the run was started with, {plan.beginning}"
        require(plan.beginning in ("", beginning), words, beginning, "Give its folder with --pretrained.")
        plan = dataclasses.replace(plan, beginning=beginning)
    return folder, plan, splits


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


def run(args: argparse.Namespace) -> None:
    """Trains as the command line says, in each of the processes of a run."""
    export = vars(args).get("export")
    report.reset_peak_memory()
    with contextlib.ExitStack() as held:
        try:
            fabric = make_fabric(args.accelerator)
        except (RuntimeError, MisconfigurationException) as error:
            words = f"(got {args.accelerator!r}: {str(error).rstrip('.')}). Leave it out for the default."
            args.fail(f"Expected 'accelerator' to be one that this machine has, for each process {words}")
        fabric.launch()  # lets the processes meet
        rank, count, ready = fabric.global_rank, fabric.world_size, list[dict[str, Split]]()

        def begin() -> tuple[Path, Plan]:
            folder, plan, splits = prepare(args, count)
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
            args.fail(str(error))
        splits = ready[0] if ready else read(args, plan)[0]
        for name, split in splits.items():
            if split.truncated:
                words = f"cut {split.truncated:,} of {len(split):,} sequences to {plan.settings.max_length} tokens"
                fabric.print(f"{name}: {words}")
        about = f"{plan.task}, {plan.preset} preset, {plan.settings.attention} attention"
        about += f", encoder of {plan.place('pretrained')}" if plan.pretrained else ""
        fabric.print(f"{about}, {len(splits['train']):,} examples -> {folder}")
        try:
            if (folder / RESULTS).exists():
                results = read_record(folder / RESULTS)
            else:
                fabric = make_fabric(args.accelerator, plan.settings.precision)
                fabric.launch()
                with flushed_subnormals():
                    results = train(folder, plan, Data(splits, plan.settings, rank, count), fabric)
        except RunError as error:
            raise SystemExit(f"\n{error}") from None
        except (KeyboardInterrupt, SystemExit):
            program = "python" if count == 1 else f"torchrun --nproc-per-node {count}"
            resume = f"{program} -m examples.lra {plan.program} --output {shlex.quote(str(folder))} --resume"
            fabric.print(f"\nStopped. Go on with: {resume}", flush=True)
            fabric.barrier()  # torchrun ends the others after the first
            raise
    if rank:
        return
    print(f"\n{report.results_table(results)}\n\nSettings, curves, checkpoints, results and plots are in {folder}")
    if plan.is_pretraining:
        words = f"python -m examples.lra train --task {plan.task} --preset {plan.preset} --pretrained"
        print(f"Train on the labels with: {words} {shlex.quote(str(folder))}")
    if export is not None:
        export_model(folder, plan, results, export)
        print(f"The model is in {export}; `from_pretrained` reads it.")
