"""The model of a task for the trainer: its loss, its optimizer, and the rows of its curves."""

import dataclasses
import math
import time
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, distributed
from torch.nn.functional import cross_entropy

from examples.common.command import require
from examples.common.runs import RunError, random_word
from examples.lra import report
from examples.lra.baselines import BASELINES
from examples.lra.checkpoints import Checkpoints
from examples.lra.data.batches import Batch
from examples.lra.data.tasks import Task
from examples.lra.settings import Settings
from sbm_pyg import (
    PairClassifier,
    SBMSource,
    SequenceClassifier,
    SequenceEncoder,
    Sparsifier,
    auxiliary_loss,
    sync_statistics,
)


def grid_positions(side: int, channels: int) -> Tensor:
    """Position embeddings of a square image [side * side, channels], pixels row by row: sines and cosines of row and of column.

    Wavelengths go geometrically from 4 to almost 80 pixels. The mean square is 1, as that of random embeddings. Vaswani et al. 2017,
    section 3.5, for both axes as in He et al., "Masked Autoencoders Are Scalable Vision Learners", CVPR 2022; here they are trained.
    """
    words = "'channels' to be a multiple of 4 for positions on a grid"
    require(channels % 4 == 0, words, channels, "Take random positions.")
    waves = 20.0 ** (-torch.arange(channels // 4) / (channels // 4))
    angles = torch.arange(side)[:, None] * waves * (math.pi / 2)
    axis = math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], dim=1)  # [side, channels / 2]
    rows, columns = axis[:, None].expand(-1, side, -1), axis[None].expand(side, -1, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1)


def smooth_values(count: int, channels: int) -> Tensor:
    """Embeddings of values on a scale [count, channels], like values alike: sines and cosines of at most one period, of mean square 1."""
    require(channels % 2 == 0, "'channels' to be even for smooth values", channels, "Take random values.")
    rates = torch.arange(1, channels // 2 + 1) / (channels // 2)
    angles = 2 * math.pi * torch.linspace(0, 1, count)[:, None] * rates
    return math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], dim=1)


class Classifier(LightningModule):
    """The model of a task, its loss, its optimizer, and the record of its loss, accuracy and densities."""

    def __init__(self, task: Task, settings: Settings) -> None:
        super().__init__()
        self.settings, self.arity = settings, task.arity
        options: dict[str, Any] = {"dropout": settings.attention_dropout}
        if settings.attention == "sbm":
            names: tuple[str, ...] = ("num_clusters", "estimator", "probes", "exploration", "block_size")
            options |= {name: getattr(settings, name) for name in names}
            options["row_group"] = settings.row_group or None
            names = ("cluster_init", "parameterization", "temperature", "initial_density")
            options |= {name: getattr(settings, name) for name in names}
            options |= {name: bool(getattr(settings, name)) for name in ("tied", "degree_corrected")}
            options |= {"target_density": settings.target_density or None, "window": None}
            if settings.target_density and not settings.exploration:  # the square of the target density
                del options["exploration"]
        elif settings.attention in ("indexer", "key_selection"):
            by_rank = settings.estimator in ("imitate", "none")  # the others are for edges that are drawn
            options |= {"estimator": settings.estimator, "target_density": settings.target_density or None}
            options |= {"select": "top_k" if by_rank else "bernoulli"}
        elif settings.attention == "top_k" and not settings.target_density:
            options["k"] = 16
        elif settings.attention == "dcmm":
            options["num_clusters"] = settings.num_clusters
        elif settings.attention == "window":
            options["size"] = settings.window
        attention: Any = settings.attention
        if settings.attention in BASELINES:
            attention, options = partial(BASELINES[settings.attention], settings), {}
        names = ("channels", "heads", "head_channels", "ffn_channels", "max_length", "dropout")
        sizes = {name: getattr(settings, name) for name in names} | {"num_layers": settings.layers}
        encoder = SequenceEncoder(task.num_tokens, **sizes, attention=attention, attention_options=options or None)
        with torch.no_grad():
            if settings.values == "smooth":
                encoder.token.weight[1:] = smooth_values(task.num_tokens - 1, settings.channels)
            if settings.positions == "grid":
                grid = grid_positions(task.side, settings.channels)[: settings.max_length]
                encoder.position.weight[: len(grid)] = grid
        pooled = settings.max_length if settings.compat == "nystromformer" else None
        kind = SequenceClassifier if task.arity == 1 else PairClassifier
        self.model = kind(encoder, task.num_classes, pool_length=pooled)
        self.rows: dict[str, list[dict[str, float]]] = {"train": [], "val": []}  # the curves
        self.sources = [part for part in self.modules() if isinstance(part, SBMSource) and settings.target_density]
        self.sparsifier = None
        if settings.target_density:
            # the learning rate falls in a straight line, and sparse attention needs some of it
            self.sparsifier = Sparsifier(self.model, settings.target_density, settings.steps, dense_part=0.4)
        self.losses: list[Tensor] = []  # of the parts of a step
        self.sums: dict[str, Tensor] = {}  # of which the next row is the mean
        self.began = time.perf_counter()
        self.start_clock()

    def configure_optimizers(self) -> Any:
        chosen = self.settings
        rate, warmup = chosen.learning_rate, chosen.warmup / chosen.steps if chosen.warmup > 1 else 0.0
        optimizer = torch.optim.AdamW(self.parameters(), lr=rate, eps=1e-6, weight_decay=chosen.weight_decay)
        law: dict[str, Any] = {"total_steps": chosen.steps, "pct_start": warmup, "anneal_strategy": "linear"}
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, **law)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def classify(self, batch: Batch, seed: int) -> tuple[Tensor, Any]:
        """Returns logits [B, classes] and the trace, graphs being sampled from one random stream per sequence."""
        known = {"positions": batch.positions, "sequence_ids": batch.examples}
        return self.model(batch.tokens, batch.ptr, **known, seed=seed, return_trace=True)

    def average(self, batch: Batch, graphs: int) -> tuple[Tensor, Any]:
        """Logarithms of probabilities [B, classes], averaged over so many sampled graphs, and the trace of the first graphs."""
        logits, trace = self.classify(batch, seed=self.settings.seed)
        if graphs == 1:
            return logits, trace
        more = [self.classify(batch, seed=self.settings.seed + graph)[0] for graph in range(1, graphs)]
        return torch.stack([logits, *more]).float().log_softmax(-1).logsumexp(0) - math.log(graphs), trace

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        seed, step, turns = self.settings.seed, self.global_step, self.settings.accumulate
        part = (step * turns + batch_idx % turns) * self.trainer.world_size + self.global_rank
        torch.manual_seed(random_word(seed, 0, part))  # dropout
        logits, trace = self.classify(batch, seed=random_word(seed, 1, step))
        loss = cross_entropy(logits.float(), batch.labels)
        self.add(batch, logits, loss, trace)
        self.tokens += batch.num_tokens
        self.losses.append(loss.detach())
        return self.objective(loss, trace)

    def objective(self, loss: Tensor, trace: Any) -> Tensor:
        """The loss of the task, plus those of layers, plus the price of the expected density if there is one."""
        weight, floor = self.settings.density_weight, self.settings.density_floor
        loss = loss + auxiliary_loss(self.model)
        return loss + weight * trace.density_loss(floor) if weight else loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits, trace = self.classify(batch, seed=self.settings.seed)
        self.add(batch, logits, cross_entropy(logits.float(), batch.labels), trace)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        logits, trace = self.average(batch, self.settings.test_graphs)
        self.add(batch, logits, cross_entropy(logits.float(), batch.labels), trace)

    def add(self, batch: Batch, logits: Tensor, loss: Tensor, trace: Any) -> None:
        """Adds a batch to the sums of which the next row is the mean."""
        density = trace.density.detach().unflatten(0, (self.arity, -1))  # [arity, layers, B, heads]
        new = {
            "examples": torch.tensor(len(batch.labels), device=loss.device),
            "loss": loss.detach().double() * len(batch.labels),
            "correct": (logits.argmax(-1) == batch.labels).sum(),
            "density": density.double().mean((0, 2)) * len(batch.labels),  # [layers, heads]
        }
        old = self.sums
        self.sums = {name: value + old[name].to(value.device) if old else value for name, value in new.items()}

    @staticmethod
    def total(sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the sums over all processes of a run, which call this together."""
        if distributed.is_initialized():
            sums = {name: value.clone() for name, value in sums.items()}
            for value in sums.values():
                distributed.all_reduce(value)
        return sums

    def finish_row(self, phase: str = "") -> dict[str, float]:
        """Turns the sums into a row of means, and starts new sums; the row of a phase goes to its curve and to the loggers."""
        sums, self.sums = self.total(self.sums | {"tokens": torch.tensor(self.tokens, device=self.device)}), {}
        self.correct, self.examples = int(sums["correct"]), int(sums["examples"])
        row = {"loss": sums["loss"].item() / self.examples, "accuracy": self.correct / self.examples}
        for layer, heads in enumerate((sums["density"] / self.examples).tolist()):
            row |= {report.density_name(layer, head): density for head, density in enumerate(heads)}
        if not math.isfinite(row["loss"]):
            raise self.diverged(f"{phase} loss".strip())
        if phase == "train":
            row["tokens_per_second"] = int(sums["tokens"]) / (time.perf_counter() - self.clock)
        if phase:
            self.rows[phase].append({"step": self.global_step, **row})
            for logger in self.loggers:
                logger.log_metrics({f"{phase}/{name}": value for name, value in row.items()}, step=self.global_step)
        self.start_clock()
        return row

    def diverged(self, what: str) -> RunError:
        """Returns the error of a run whose loss or weights are no longer finite numbers."""
        return RunError(
            f"Expected the {what} to stay finite (got NaN or inf at step {self.global_step:,}): training has diverged. Start a new run "
            "with a lower --learning-rate, or with --clip-norm 1. The checkpoints before it are whole, but going on from them ends here."
        )

    def finite(self) -> bool:
        """Whether all weights are finite numbers; waits for the device once."""
        return bool(torch.stack([parameter.detach().sum().isfinite() for parameter in self.parameters()]).all())

    def start_clock(self) -> None:
        """Starts to count the tokens per second of the next row."""
        self.tokens, self.clock = 0, time.perf_counter()

    def seconds(self) -> float:
        """Returns how long the run has taken, without what was lost when it was killed."""
        return time.perf_counter() - self.began

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not self.finite():  # so that no checkpoint holds them
            raise self.diverged("weights")
        checkpoint["curves"] = {"rows": self.rows, "sums": self.total(self.sums), "seconds": self.seconds()}
        checkpoint["run"] = dataclasses.asdict(self.settings)
        checkpoint["sparsifier"] = self.sparsifier and self.sparsifier.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["curves"]
        self.rows, self.sums = saved["rows"], {} if self.global_rank else saved["sums"]
        self.began = time.perf_counter() - saved["seconds"]
        if self.sparsifier:
            self.sparsifier.load_state_dict(checkpoint["sparsifier"])

    def on_train_start(self) -> None:
        if self.trainer.world_size > 1:
            sync_statistics(self.model)
        self.start_clock()

    @property
    def settled(self) -> bool:
        """Whether graphs are as sparse as they will be."""
        return self.sparsifier is None or self.sparsifier.is_sparse

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if (batch_idx + 1) % self.settings.accumulate == 0:
            for source in self.sources:  # what all processes have seen in this step
                source.seen.copy_(self.total({"seen": source.seen})["seen"])
            if self.sparsifier:
                self.sparsifier.step(torch.stack(self.losses).mean())
            self.losses.clear()
        due = self.global_step % self.settings.log_every == 0 or Checkpoints.validates(self.settings, self.global_step)
        if due and (batch_idx + 1) % self.settings.accumulate == 0:
            self.finish_row("train")

    def on_validation_epoch_end(self) -> None:
        self.finish_row("val")

    def on_test_epoch_end(self) -> None:
        self.tested = self.finish_row()
