"""How much of a gradient's noise comes from sampled graphs or their probes, and how much from the batch: on trained models of recall.

    python -m examples.recall --methods full sbm sbm:estimator=local --output runs/recall
    python -m examples.recall.spread runs/recall
    python -m examples.recall.spread runs/recall --probes --draws 16 --csv runs/trained.csv

Each checkpoint is taken as it ended, and as it began but with the density that it was to reach. Gradients are taken of 32 batches, with
two graphs each. Half of the mean squared difference of the two is the variance that graphs make; the variance over batches has both. They
are summed over the parameters. Expect 0 where nothing is sampled. The time is the median of a gradient. Half a minute a checkpoint.
With --probes, block models alone, with 1, 4, 16 and all probes; runs that the table has are not measured again.
"""

import argparse
from pathlib import Path

from examples.common.command import Command


def parse(arguments: list[str] | None) -> argparse.Namespace:
    command = Command("python -m examples.recall.spread", __doc__)
    command.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="with checkpoints (*.pt) of recall")
    command.option("draws", 32, "batches", least=2)
    command.add_argument("--probes", action="store_true", help="compare numbers of probes of block models")
    command.option("csv", Path("spread.csv"), "where to write")
    given = command.read(arguments)
    pattern = "*sbm*.pt" if given.probes else "*.pt"
    given.files = sorted(path for folder in given.folders for path in folder.glob(pattern))
    there = given.files or (given.probes and given.csv.exists())
    command.require(there, "'folders' with checkpoints", ", ".join(map(str, given.folders)), "Train first.")
    return given


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.common.hybrid import Recaller
from examples.common.runs import RunError, read_checkpoint
from examples.common.tables import Row, Rows, add, by, groups, markdown, read
from examples.recall.train import Batches, Run, make_model
from sbm_pyg import auxiliary_loss
from sbm_pyg.info import tqdm
from sbm_pyg.training.estimators import Local


def gradients(model: Recaller, batches: Batches, draws: list[tuple[int, int]]) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients for pairs of (batch, seed of the graphs), ``[len(draws), parameters]``: of block models, and of the rest; and their seconds."""
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
    """The run of a checkpoint; and its model at the "start", with the density that it was to reach, and at the "end"."""
    try:
        state = read_checkpoint(path)
    except RunError as error:
        raise SystemExit(str(error)) from None
    run = Run(**state["run"])

    def each() -> Iterator[tuple[str, Recaller]]:
        for when in ("start", "end"):
            model, sparsifier = make_model(run)
            if when == "end":
                model.load_state_dict(state["model"])
            if sparsifier:  # which then trains at the target density
                sparsifier.steps = run.steps
                sparsifier.set_density()
            yield when, model.train()

    return run, each()


def twice(model: Recaller, batches: Batches, draws: int) -> tuple[list[dict[str, Tensor]], float]:
    """Gradients of so many batches, with two graphs each; and the median of their seconds."""
    pairs = [gradients(model, batches, [(step, 2 * step + which) for step in range(draws)]) for which in range(2)]
    return [found for found, _ in pairs], statistics.median(pairs[0][1] + pairs[1][1])


def noise(one: Tensor, other: Tensor) -> Row:
    """Variances over batches that have two gradients each: the part that "graphs" make, and in "total"."""
    graphs = float((one - other).square().sum(1).mean() / 2)
    return {"graphs": graphs, "total": float((one.var(0) + other.var(0)).sum() / 2)}


def measure(path: Path, draws: int) -> Rows:
    run, both = models(path)
    batches, rows = Batches(run), []
    for when, model in both:
        (first, second), seconds = twice(model, batches, draws)
        for name, one in first.items():
            norm = float(((one + second[name]) / 2).mean(0).square().sum())
            known: Row = {"run": run.name, "seed": run.seed, "when": when, "part": name}
            rows.append({**known, **noise(one, second[name]), "norm2": norm, "ms": 1e3 * seconds})
    return rows


def measure_probes(path: Path, draws: int, known: Rows) -> Rows:
    """Rows of a checkpoint for each number of probes; none of a run that the table has."""
    run, both = models(path)
    if any((row["run"], row["seed"]) == (run.name, run.seed) for row in known):
        return []
    batches, rows = Batches(run), []
    for when, model in both:
        for probes in (1, 4, 16, 64):
            for layer in model.modules():
                if isinstance(estimator := getattr(layer, "estimator", None), Local):
                    estimator.probes = probes
            one, other = (found["block model"] for found in twice(model, batches, draws)[0])
            name: Row = {"run": run.name, "seed": run.seed, "when": when, "probes": probes}
            rows.append(name | noise(one, other))
    return rows


def report(rows: Rows) -> str:
    """The part of the variance that graphs make."""
    table = []
    for name, when, part, own in groups(rows, "run", "when", "part"):
        share = [row["graphs"] / row["total"] if row["total"] else 0.0 for row in own]
        milliseconds = statistics.mean(row["ms"] for row in own)
        cells = (len(own), f"{100 * sum(share) / len(own):.1f} %", f"{milliseconds:.0f}")
        table.append([name, when, part, *cells])
    return markdown(["run", "when", "parameters", "seeds", "variance that graphs make", "ms"], table)


def report_probes(rows: Rows) -> str:
    """Variances relative to those at 16 probes, from the least seed to the largest; and the part of graphs and probes in these."""
    lines = []
    for name, when, some in groups(rows, "run", "when"):
        seeds = by(some, "seed", "probes").values()
        part = [100 * each[16][0]["graphs"] / each[16][0]["total"] for each in seeds]
        line = [name, when, str(len(seeds)), f"{min(part):.0f} to {max(part):.0f}"]
        for probes in (1, 4, 64):
            ratio = [each[probes][0]["total"] / each[16][0]["total"] for each in seeds]
            line.append(f"{min(ratio):.2f} to {max(ratio):.2f}")
        lines.append(line)
    names = ["run", "when", "seeds", "of graphs and 16 probes, %", "variance, 1 probe", "4 probes", "all pairs"]
    return markdown(names, lines)


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    torch.set_num_threads(1)
    rows: Rows = []
    for path in tqdm(given.files, unit="checkpoint"):
        found = measure_probes(path, given.draws, read(given.csv)) if given.probes else measure(path, given.draws)
        rows += found
        if found:
            add(given.csv, found)
    print(report_probes(read(given.csv)) if given.probes else report(rows))


if __name__ == "__main__":
    main()
