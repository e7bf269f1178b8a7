"""The output of a training run: a progress bar, warnings, a table of results, and plots of its curves."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure

from examples.common.pictures import bare, save_figure
from sbm_pyg.info import tqdm

RESULTS = "results.json"
ADVICE = "Lower --density-weight, raise --exploration or the density at the start; see docs/learning.md."


class Progress(Callback):
    """One bar over all steps, with loss, accuracy and density per layer; a line for every validation; a warning for every empty head."""

    def __init__(self) -> None:
        self.warned: set[str] = set()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.bar = tqdm(total=pl_module.settings.steps, initial=trainer.global_step, desc="Training", unit="step")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.bar.update(trainer.global_step - self.bar.n)
        if pl_module.rows["train"]:
            row = pl_module.rows["train"][-1]
            self.bar.set_postfix_str(self.words(pl_module, row), refresh=False)
            self.warn(row)

    def warn(self, row: Mapping[str, float]) -> None:
        """Warns, once for each head, when its density has collapsed."""
        empty = [name for name, value in row.items() if name.startswith("density") and value < 1e-3]
        for name in empty:
            if name not in self.warned:
                self.warned.add(name)
                warnings.warn(f"Step {row['step']}: {name} is {row[name]:.2%}, an empty head. {ADVICE}", stacklevel=2)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        words = self.words(pl_module, pl_module.rows["val"][-1])
        tqdm.write(f"step {trainer.global_step:>6,}  validation {words}", file=sys.stderr)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.bar.close()

    @staticmethod
    def words(module: Any, row: Mapping[str, float]) -> str:
        layers = np.mean(densities(row, module.settings.layers, module.settings.heads), axis=1)
        shares = " ".join(f"{share:.3f}" for share in layers)
        return f"loss {row['loss']:.3f}, accuracy {row['accuracy']:.3f}, density {shares}"


def peak_memory() -> dict[str, Any]:
    """Returns where memory peaked and at how many bytes: the CUDA device if one was used, else this process."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return {"peak_memory_bytes": torch.cuda.max_memory_allocated(), "peak_memory_of": "device"}
    import resource  # absent on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"peak_memory_bytes": peak, "peak_memory_of": "process"}


def density_name(layer: int, head: int) -> str:
    """Returns the column that holds the density of a head."""
    return f"density_layer{layer}_head{head}"


def densities(row: Mapping[str, float], layers: int, heads: int) -> list[list[float]]:
    """Collects the densities of a row of curves, [layers][heads]."""
    return [[row[density_name(layer, head)] for head in range(heads)] for layer in range(layers)]


def results_table(results: Mapping[str, Any]) -> str:
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


Curve = Sequence[Mapping[str, float]]


def plot_curves(path: Path, train: Curve, val: Curve, majority: float) -> None:
    """Draws loss and accuracy of two curves over the steps, and the accuracy of the majority class as a line."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for rows, style in (
            (train, {"alpha": 0.5, "lw": 1, "label": "training"}),
            (val, {"marker": "o", "ms": 3, "label": "validation"}),
        ):
            axes.plot([row["step"] for row in rows], [row[name] for row in rows], **style)
        if name == "accuracy":
            axes.axhline(majority, color="gray", lw=1, ls=":", label="majority class")
        bare(axes)
        axes.set(xlabel="step", ylabel=name)
        axes.legend(frameon=False)
    save_figure(path, figure, dpi=150)
