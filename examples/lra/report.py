"""What a training run says and leaves behind: a progress bar, warnings, curves as CSV files, one table, plots.

In: rows of numbers and graphs while a run lasts, and its test result in the end. Out: lines on the screen, and files in the run's folder.
Not here: training (``train.py``).
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from tqdm.auto import tqdm

from examples.lra.data.files import write_text
from sbm_pyg import plots

RESULTS = "results.json"

PHASES = ("train", "val")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file, whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


class Guard(Callback):
    """Warns, once for each head, when its density collapses or half of its queries are left without any edge."""

    ADVICE = (
        "Lower --density-weight, raise --exploration or the density at the start, or take the estimator 'local' with more probes; "
        "see docs/learning.md."
    )

    def __init__(self) -> None:
        self.told: set[tuple[int, int]] = set()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % pl_module.settings.log_every == 0:
            self.check(pl_module.graphs, trainer.global_step)

    def check(self, trace: Any, step: int) -> None:
        """Warns of what is new in the :class:`sbm_pyg.EncoderTrace` of a step."""
        for layer, graph in enumerate(trace.graphs):
            if graph is None:
                continue
            pairs = max(float((graph.query_ptr.diff() * graph.key_ptr.diff()).sum()), 1.0)
            for head, degree in enumerate(graph.degree.double()):
                density, alone = float(degree.sum()) / pairs, float((degree == 0).double().mean())
                if (density < 1e-3 or alone > 0.5) and (layer, head) not in self.told:
                    self.told.add((layer, head))
                    found = f"has a density of {density:.2%} and leaves {alone:.0%} of its queries without any edge"
                    warnings.warn(f"Step {step}: layer {layer}, head {head} {found}. {self.ADVICE}", stacklevel=2)


class Progress(Callback):
    """One bar over all steps, with loss, accuracy and density per layer, and a line for every validation."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.bar = tqdm(total=pl_module.settings.steps, initial=trainer.global_step, desc="Training", unit="step")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.bar.update(trainer.global_step - self.bar.n)
        if "train" in pl_module.latest:
            self.bar.set_postfix_str(self.words(pl_module, "train"), refresh=False)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        tqdm.write(f"step {trainer.global_step:>6,}  validation {self.words(pl_module, 'val')}", file=sys.stderr)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.bar.close()

    @staticmethod
    def words(module: Any, phase: str) -> str:
        """Writes the latest row of a phase in one line."""
        row, sizes = module.latest[phase], module.settings
        layers = np.mean(densities(row, sizes.layers, sizes.heads), axis=1)
        shares = " ".join(f"{share:.3f}" for share in layers)
        return f"loss {row['loss']:.3f}, accuracy {row['accuracy']:.3f}, density {shares}"


class CurveLogger(Logger):
    """Appends rows to ``train.csv`` and ``val.csv``, one column per number; the part before the slash names the file.

    A resumed run forgets the rows after the checkpoint that it resumes from, and so continues the curves as if it had never
    stopped.

    Args:
        folder: Of the files.
        step: Rows after this step are dropped; None starts new files.
    """

    def __init__(self, folder: Path, step: int | None = None) -> None:
        super().__init__()
        self.folder = folder
        for path in filter(Path.exists, (folder / f"{phase}.csv" for phase in PHASES)):
            rows = [] if step is None else [row for row in read_rows(path) if float(row["step"]) <= step]
            draft = path.with_name(path.name + ".partial")
            draft.unlink(missing_ok=True)
            for row in rows:
                append_row(draft, row)
            if rows:
                os.replace(draft, path)
            else:
                path.unlink()

    @property
    def name(self) -> str:
        return "curves"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Settings have a file of their own."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Appends one row; all names share the part before the slash."""
        (phase,) = {name.partition("/")[0] for name in metrics}
        row = {"step": step, **{name.partition("/")[2]: value for name, value in metrics.items()}}
        append_row(self.folder / f"{phase}.csv", row)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Appends a row to a CSV file, which begins with its header if it is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Reads one file of curves as text; a last row that a killed run left unfinished is dropped."""
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def read_curves(path: Path) -> list[dict[str, float]]:
    """Reads one file of curves as numbers; see :func:`read_rows`."""
    return [{name: float(value) for name, value in row.items()} for row in read_rows(path)]


def check_curves(folder: Path, needed: Sequence[str], step: float) -> None:
    """Looks whether the curves of a run can be gone on with.

    Args:
        folder: Of the run.
        needed: Phases of which there are rows.
        step: Rows after this one do not count; a kill may have left them unfinished.

    Raises:
        ValueError: If a file is missing or damaged.
    """
    for path in (folder / f"{phase}.csv" for phase in PHASES):
        if not path.exists() and path.stem not in needed:
            continue
        try:
            rows = [row for row in read_rows(path) if float(row["step"]) <= step]
            for value in (value for row in rows for value in row.values()):
                float(value)
            found = "" if rows or path.stem not in needed else "no rows"
        except FileNotFoundError:
            found = "no such file"
        except KeyError as error:
            found = f"no column {error}"
        except (ValueError, TypeError, csv.Error) as error:
            found = str(error)
        if found:
            raise ValueError(
                f"Expected {path} to be as it was written (got: {found}). Take it from a backup, or start a new run."
            )


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Writes a Markdown table, the first column to the left and the others to the right.

    >>> print(markdown(["a", "b"], [["x", "1"]]))
    | a | b |
    |---|--:|
    | x | 1 |
    """
    lines = ["| " + " | ".join(header) + " |", "|---|" + "--:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows with a header, whole or not at all; columns in the order in which they first occur."""
    draft = path.with_name(path.name + ".partial")
    with draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(draft, path)


def wilson_interval(correct: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Returns the 95 % score interval of a proportion (Wilson, 1927).

    >>> [round(bound, 4) for bound in wilson_interval(8, 10)]
    [0.4902, 0.9433]
    """
    share, widening = correct / count, z * z / count
    centre = (share + widening / 2) / (1 + widening)
    half = z / (1 + widening) * math.sqrt(share * (1 - share) / count + widening / (4 * count))
    return centre - half, centre + half


def peak_memory(path: Path | None = None) -> dict[str, Any]:
    """Returns where memory peaked and at how many bytes: the CUDA device if one was used, else this process.

    Args:
        path: Of the results of a finished run, of which only the test was done again: then its peak counts too.
    """
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        place, peak = "device", torch.cuda.max_memory_allocated()
    else:
        import resource  # absent on Windows, where peak memory is not known

        place, peak = (
            "process",
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        )
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # damaged ones are about to be written anew
        old = json.loads(path.read_text()) if path is not None else {}
        peak = max(peak, old["peak_memory_bytes"]) if old["peak_memory_of"] == place else peak
    return {"peak_memory_bytes": peak, "peak_memory_of": place}


def density_name(layer: int, head: int) -> str:
    """Returns the column that holds the density of a head."""
    return f"density_layer{layer}_head{head}"


def densities(row: Mapping[str, float], layers: int, heads: int) -> list[list[float]]:
    """Collects the densities of a row of curves, [layers][heads]."""
    return [[row[density_name(layer, head)] for head in range(heads)] for layer in range(layers)]


def results_table(results: Mapping[str, Any]) -> str:
    """Writes the results as people read them."""
    test, density, speed = results["test"], results["density"], results["tokens_per_second"]
    low, high = test["interval_95"]
    gain = 100 * (test["accuracy"] - test["majority"])
    lines = [
        f"test accuracy      {test['accuracy']:.2%}   95 % interval {low:.2%} to {high:.2%}, {test['examples']:,} examples",
        f"majority class     {test['majority']:.2%}   {gain:+.1f} points",
        f"best checkpoint    step {results['best']['step']:,}, validation accuracy {results['best']['accuracy']:.2%}",
        f"tokens per second  {speed:,.0f}" if speed else "tokens per second  unknown",
        f"peak memory        {results['peak_memory_bytes'] / 2**20:,.0f} MiB ({results['peak_memory_of']})",
        f"parameters         {results['parameters']:,}",
        "",
        "density             at first     last   tested",
    ]
    for layer, heads in enumerate(density["tested"]):
        for head, tested in enumerate(heads):
            first, last = density["first"][layer][head], density["last"][layer][head]
            lines.append(f"  layer {layer}, head {head}  {first:8.2%} {last:8.2%} {tested:8.2%}")
    return "\n".join(lines)


def plot_curves(
    path: Path, train: Sequence[Mapping[str, float]], val: Sequence[Mapping[str, float]], majority: float
) -> None:
    """Draws loss and accuracy over the steps, training against validation.

    Args:
        path: Of the picture.
        train: Rows of ``train.csv``.
        val: Rows of ``val.csv``.
        majority: Accuracy of the majority class, drawn as a line.
    """
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for rows, style in (
            (train, {"alpha": 0.5, "lw": 1, "label": "training"}),
            (val, {"marker": "o", "ms": 3, "label": "validation"}),
        ):
            axes.plot([row["step"] for row in rows], [row[name] for row in rows], **style)
        if name == "accuracy":
            axes.axhline(majority, color="grey", lw=1, ls=":", label="majority class")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xlabel="step", ylabel=name)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def plot_densities(path: Path, train: Sequence[Mapping[str, float]]) -> None:
    """Draws the density of the sampled graphs over the steps, for each layer and head."""
    plots.plot_training_density(train).savefig(path, dpi=150)


def plot_masks(
    path: Path, masks: Sequence[np.ndarray], chances: Sequence[np.ndarray | None], words: Sequence[str]
) -> None:
    """Draws one sampled mask beside its edge probabilities, per layer and head.

    Args:
        path: Of the picture.
        masks: Per layer, [H, n, n] booleans; rows are queries.
        chances: Per layer, [H, n, n] probabilities, or None where the graph is a fixed pattern.
        words: The tokens, [n], to write along the axes if they are few; empty to write nothing.
    """
    rows = [(layer, head) for layer, mask in enumerate(masks) for head in range(len(mask))]
    figure = Figure(figsize=(7.4, 3.3 * len(rows) + 0.4), layout="constrained")
    panels = figure.subplots(len(rows), 2, squeeze=False)
    for (layer, head), (left, right) in zip(rows, panels, strict=True):
        mask, chance = masks[layer][head], chances[layer]
        left.imshow(mask, cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
        left.set_title(f"layer {layer}, head {head}: sampled, density {mask.mean():.1%}", fontsize=9)
        if chance is None:
            right.axis("off")
            right.text(0.5, 0.5, "fixed pattern", ha="center", va="center", color="grey", transform=right.transAxes)
            continue
        picture = right.imshow(chance[head], cmap="viridis", vmin=0, interpolation="nearest")
        right.set_title(f"probability, mean {chance[head].mean():.1%}", fontsize=9)
        figure.colorbar(picture, ax=right, shrink=0.8, label="probability of an edge")
    for axes in panels.flat:
        axes.set(xlabel="key (token)", ylabel="query (token)")
        if 0 < len(words) <= 48:
            axes.set_xticks(range(len(words)), words, rotation=90, fontsize=4)
            axes.set_yticks(range(len(words)), words, fontsize=4)
            axes.tick_params(length=0, pad=1)
    edges = [
        Patch(facecolor=colour, edgecolor="black", label=name)
        for colour, name in (("black", "edge"), ("white", "no edge"))
    ]
    figure.legend(
        handles=edges,
        loc="outside upper left",
        ncols=2,
        frameon=False,
        title="sampled masks",
        fontsize=8,
        title_fontsize=8,
    )
    figure.savefig(path, dpi=150)
