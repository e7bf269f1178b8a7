"""How much of a gradient's noise comes from sampled graphs, and how much from the batch: on models that `python -m examples.recall` trained.

    python -m examples.recall --methods full sbm sbm:estimator=local --output runs/recall
    python -m examples.benchmarks.spread runs/recall

For each checkpoint, as it was left, and as it began but with the share of the keys that it was to reach, gradients are taken of 32 batches, with two graphs
each. Half of the mean squared difference of the two is the variance that graphs make; the variance over batches has both. They are summed over the
parameters. Expect 0 where nothing is sampled. The time is that of a gradient, the
median of all. Half a minute a checkpoint.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
from pathlib import Path


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="with checkpoints (*.pt) of recall")
    parser.add_argument("--draws", type=int, default=32, help="batches (default: %(default)s)")
    parser.add_argument("--csv", type=Path, default=Path("spread.csv"), help="where to write (default: %(default)s)")
    given = parser.parse_args(arguments)
    given.files = sorted(path for folder in given.folders for path in folder.glob("*.pt"))
    if not given.files:
        parser.error(f"Expected 'folders' with checkpoints (got {', '.join(map(str, given.folders))}). Train first.")
    if given.draws < 2:
        parser.error(f"Expected 'draws' to be at least 2 (got {given.draws}). A variance needs two.")
    return given


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.benchmarks.tables import Row, add, markdown
from examples.common.runs import RunError, read_checkpoint
from examples.recall.model import Recaller
from examples.recall.train import Batches, Run, make_model
from sbm_pyg import auxiliary_loss
from sbm_pyg.info import tqdm


def gradients(model: Recaller, batches: Batches, draws: list[tuple[int, int]]) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients for pairs of (batch, seed of the graphs), ``[len(draws), parameters]``: of the block models, and of the rest; and their seconds."""
    found: dict[str, list[Tensor]] = {"block model": [], "rest": []}
    seconds = []
    for step, seed in draws:
        tokens, places, answers, _ = batches(step)
        model.zero_grad()
        start = time.perf_counter()
        loss = cross_entropy(model(tokens, places, seed=seed)[0].flatten(0, 1), answers.flatten())
        (loss + auxiliary_loss(model)).backward()
        seconds.append(time.perf_counter() - start)
        parts: dict[str, list[Tensor]] = {"block model": [], "rest": []}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                own = ".source." in name or ".score_bias." in name
                parts["block model" if own else "rest"].append(parameter.grad.flatten().double())
        for name, each in parts.items():
            found[name].append(torch.cat(each) if each else torch.zeros(1, dtype=torch.float64))
    return {name: torch.stack(each) for name, each in found.items()}, seconds


def models(path: Path) -> tuple[Run, Iterator[tuple[str, Recaller]]]:
    """The run of a checkpoint; and its model at the "start", with the share that it was to reach, and at the "end"."""
    try:
        state = read_checkpoint(path)
    except RunError as error:
        raise SystemExit(str(error)) from None
    run = Run(**state["run"])

    def each() -> Iterator[tuple[str, Recaller]]:
        for when in ("start", "end"):
            model, schedule = make_model(run)
            if when == "end":
                model.load_state_dict(state["model"])
            if schedule is not None:
                begun = {"share": run.density, "running": None}
                schedule.load_state_dict(begun if when == "start" else state["schedule"])
            yield when, model.train()

    return run, each()


def twice(model: Recaller, batches: Batches, draws: int) -> tuple[list[dict[str, Tensor]], float]:
    """Gradients of so many batches, with two graphs each; and the median of their seconds."""
    pairs = [gradients(model, batches, [(step, 2 * step + which) for step in range(draws)]) for which in range(2)]
    return [found for found, _ in pairs], statistics.median(pairs[0][1] + pairs[1][1])


def noise(one: Tensor, other: Tensor) -> Row:
    """Variances over batches that have two gradients each: what "graphs" make, and in "total"."""
    graphs = float((one - other).square().sum(1).mean() / 2)
    return {"graphs": graphs, "total": float((one.var(0) + other.var(0)).sum() / 2)}


def measure(path: Path, draws: int) -> list[Row]:
    """Rows of a checkpoint."""
    run, both = models(path)
    batches, rows = Batches(run), []
    for when, model in both:
        (first, second), seconds = twice(model, batches, draws)
        for name, one in first.items():
            norm = float(((one + second[name]) / 2).mean(0).square().sum())
            known: Row = {"run": run.name, "seed": run.seed, "when": when, "part": name}
            rows.append({**known, **noise(one, second[name]), "norm2": norm, "ms": 1e3 * seconds})
    return rows


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for path in tqdm(given.files, unit="checkpoint"):
        rows += (found := measure(path, given.draws))
        add(given.csv, found)
    table = []
    for key in dict.fromkeys((row["run"], row["when"], row["part"]) for row in rows):
        own = [row for row in rows if (row["run"], row["when"], row["part"]) == key]
        share = [row["graphs"] / row["total"] if row["total"] else 0.0 for row in own]
        milliseconds = statistics.mean(row["ms"] for row in own)
        table.append([*key, len(own), f"{100 * sum(share) / len(own):.1f} %", f"{milliseconds:.0f}"])
    print(markdown(["run", "when", "parameters", "seeds", "variance that graphs make", "ms"], table))


if __name__ == "__main__":
    main()
