"""The results of a training run: the memory that it took, a table, and plots of its curves."""

import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from examples.common.pictures import bare, save_figure

RESULTS = "results.json"
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # of Linux


def peak_memory() -> dict[str, Any]:
    """Returns where memory peaked and at how many bytes: the CUDA device if one was used, else this process."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return {"peak_memory_bytes": torch.cuda.max_memory_allocated(), "peak_memory_of": "device"}
    if STATUS.exists() and (peak := re.search(r"VmHWM:\s*(\d+) kB", STATUS.read_text())):
        return {"peak_memory_bytes": 1024 * int(peak[1]), "peak_memory_of": "process"}
    import resource  # absent on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    bytes_ = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"peak_memory_bytes": bytes_, "peak_memory_of": "process"}


def reset_peak_memory() -> None:
    """Forgets the peak of what came before in this process, where the system can."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        RESET.write_text("5")


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


def plot_curves(path: Path, curves: Mapping[str, Sequence[Mapping[str, float]]], majority: float) -> None:
    """Draws loss and accuracy of two curves over the steps, and the accuracy of the majority class as a line."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for rows, look in (
            (curves["train"], {"alpha": 0.5, "lw": 1, "label": "training"}),
            (curves["val"], {"marker": "o", "ms": 3, "label": "validation"}),
        ):
            axes.plot([row["step"] for row in rows], [row[name] for row in rows], **look)
        if name == "accuracy":
            axes.axhline(majority, color="gray", lw=1, ls=":", label="majority class")
        bare(axes)
        axes.set(xlabel="step", ylabel=name)
        axes.legend(frameon=False)
    save_figure(path, figure, dpi=150)
