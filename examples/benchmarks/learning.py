"""The study of docs/learning.md: which gradient and which block model learn, over seeds, with the raw numbers kept.

In: nothing but a folder. Out: one small CSV per run, and tables and plots over all that are there. Restartable: a run whose CSV is there is
not run again, and one that was stopped goes on from its last checkpoint. Not here: the tasks and their training (``repeated_tokens.py``,
``lra.py``)::

    python examples/learning_study.py run                       # everything that is missing; hours on two cores
    python examples/learning_study.py run --only local mask     # some of it
    python examples/learning_study.py listops                   # the same question on short ListOps, through lra.py; an hour
    python examples/learning_study.py average                   # those runs tested over eight graphs per example
    python examples/learning_study.py gradients                 # bias and variance by enumeration, a minute
    python examples/learning_study.py report                    # tables and plots of what is there
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import csv
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lra_files import path_argument


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="The study of docs/learning.md.")
    parser.add_argument("action", choices=("run", "listops", "average", "gradients", "report"), help="what to do")
    parser.add_argument(
        "--folder", type=path_argument, default=Path("docs/learning"), help="of the CSV files and plots (default: docs/learning)"
    )
    parser.add_argument("--only", nargs="+", metavar="RUN", help="runs by name (default: all)")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument(
        "--data", type=path_argument, default=Path("data/listops-study"), help="of 'listops'; generated if absent (%(default)s)"
    )
    parser.add_argument("--graphs", type=int, default=8, help="graphs per example that 'average' averages over (default: 8)")
    parser.add_argument(
        "--work", type=path_argument, default=Path("runs/learning"), help="where 'listops' keeps its whole runs (%(default)s)"
    )
    given = parser.parse_args(arguments)
    if min(given.seeds, given.threads, given.graphs) < 1:
        parser.error(f"Expected 'seeds', 'threads' and 'graphs' to be at least 1 (got {given.seeds}, {given.threads} and {given.graphs}).")
    given.fail = parser.error
    return given


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import numpy as np
import torch
from scipy.stats import t
from torch import Tensor
from tqdm.auto import tqdm

from analyse_graphs import open_run
from lra_batches import LengthBuckets
from lra_report import append_row
from repeated_tokens import COLUMNS, Settings, plot, read_curve, train
from sbm_pyg import AttentionGraph, ops

SEEDS = 5
LISTOPS_RESULTS, LISTOPS_GRAPHS = "listops.csv", "listops_graphs.csv"
SMALL = Settings(tokens=64, batch_size=32, num_blocks=32, steps=1000, learning_rate=3e-3, decay=1, evaluate_every=50)
LONG = replace(SMALL, steps=2000, evaluate_every=100, position_scale=1.0)
SORTED: dict[str, Any] = {"parameterization": "assortative", "clusters": "orthogonal", "temperature": 0.3, "tied": 1}
RUNS: dict[str, Settings] = {
    "full": replace(SMALL, attention="full"),
    "local": SMALL,
    "mask": replace(SMALL, estimator="mask", exploration=0.01),
    "paper": replace(SMALL, estimator="paper", exploration=0.01),
    "none": replace(SMALL, estimator="none"),
    "relaxed": replace(SMALL, estimator="relaxed"),
    "concrete": replace(SMALL, estimator="concrete"),
    "score function": replace(SMALL, estimator="score-function", exploration=0.01),
    "local, all pairs": replace(SMALL, probes=float("inf")),
    "local, orthogonal": replace(SMALL, clusters="orthogonal"),
    "local, mixed": replace(SMALL, parameterization="mixed"),
    "mask, mixed": replace(SMALL, estimator="mask", exploration=0.01, parameterization="mixed"),
    "full, long": replace(LONG, attention="full"),
    "local, long, assortative, 0.1": replace(LONG, density_weight=0.1, **SORTED),
    "mask, long, assortative, 0.1": replace(LONG, estimator="mask", exploration=0.01, density_weight=0.1, **SORTED),
    "local, long, assortative": replace(LONG, **SORTED),
    "local, longer, 64 blocks, 0.1": replace(LONG, steps=4000, density_weight=0.1, **{**SORTED, "num_blocks": 64}),
    "local, longer, 64 blocks, 0.3": replace(LONG, steps=4000, density_weight=0.3, **{**SORTED, "num_blocks": 64}),
}
SHORT = ("--task", "listops", "--preset", "laptop")
PRICED = "--density-weight"
TWICE = ("--steps", "1600")
ASSORTATIVE = ("--parameterization", "assortative", "--clusters", "orthogonal", "--temperature", "0.3", "--tied", "1", "--num-blocks", "32")
LISTOPS: dict[str, tuple[str, ...]] = {  # by name, how a run differs from the laptop preset
    "full": ("--attention", "full"),
    "itself alone": ("--attention", "window", "--window", "0"),
    "local": (),
    "local, 0.03": (PRICED, "0.03"),
    "local, 0.035": (PRICED, "0.035"),
    "local, 0.04": (PRICED, "0.04"),
    "local, 0.05": (PRICED, "0.05"),
    "local, 0.1": (PRICED, "0.1"),
    "local, 0.3": (PRICED, "0.3"),
    "local, 0.5": (PRICED, "0.5"),
    "local, 32 blocks, 0.4": ("--num-blocks", "32", PRICED, "0.4"),
    "mask": ("--estimator", "mask", "--exploration", "0.01"),
    "mask, 0.03": ("--estimator", "mask", "--exploration", "0.01", PRICED, "0.03"),
    "paper": ("--estimator", "paper", "--exploration", "0.01"),
    "none": ("--estimator", "none"),
    "relaxed": ("--estimator", "relaxed"),
    "concrete": ("--estimator", "concrete"),
    "local, orthogonal, 0.1": ("--clusters", "orthogonal", PRICED, "0.1"),
    "local, mixed, 0.1": ("--parameterization", "mixed", PRICED, "0.1"),
    "local, assortative, 0.1": (*ASSORTATIVE, PRICED, "0.1"),
    "local, assortative, 0.2": (*ASSORTATIVE, PRICED, "0.2"),
    "full, long": ("--attention", "full", *TWICE),
    "local, long, 0.05": (*TWICE, PRICED, "0.05"),
    "local, long, 0.3": (*TWICE, PRICED, "0.3"),
}


def file_name(name: str, seed: int) -> str:
    """Stem of a run's files."""
    return f"{name.replace(', ', '_').replace(' ', '-')}_{seed}"


def run(folder: Path, names: Iterable[str], seeds: int) -> None:
    """Trains what is missing, seed by seed, so that a study that is stopped has something of everything."""
    todo = [(seed, name) for seed in range(seeds) for name in names if not finished(folder, name, seed)]
    for seed, name in tqdm(todo, desc="Runs", unit="run"):
        train(folder, file_name(name, seed), replace(RUNS[name], seed=seed), progress=False)
        (folder / f"{file_name(name, seed)}.ckpt").unlink()


def finished(folder: Path, name: str, seed: int) -> bool:
    """Whether the run's curve is complete."""
    path = folder / f"{file_name(name, seed)}.csv"
    return path.exists() and read_curve(path)[-1]["step"] == RUNS[name].steps


# ------------------------------------------------------------------ short ListOps


def listops(folder: Path, names: Iterable[str], seeds: int, data: Path, work: Path, threads: int) -> None:
    """Trains what is missing through ``lra.py``, and keeps of each run its validation curve and a row of results.

    Args:
        folder: Of the CSV files that stay.
        names: Keys of ``LISTOPS``.
        seeds: Number of seeds.
        data: Folder of ListOps; generated by the laptop preset's law, with 10,000 trees to test on, if it is absent.
        work: Folder of the runs themselves, with checkpoints and plots.
        threads: CPU threads.
    """
    programs = Path(__file__).parent
    if not data.exists():
        command = ["lra_tasks.py", "generate", "--task", "listops", "--preset", "laptop", "--test", "10000", "--out", str(data)]
        subprocess.run([sys.executable, str(programs / command[0]), *command[1:]], check=True)
    done = {(row["run"], int(row["seed"])) for row in read_results(folder)}
    todo = [(seed, name) for seed in range(seeds) for name in names if (name, seed) not in done]
    for seed, name in tqdm(todo, desc="Runs", unit="run"):
        run = work / file_name(name, seed)
        options = ("--output", str(run), "--threads", str(threads))
        started = (run / "settings.json").is_file()
        chosen = ("--resume",) if started else (*SHORT, "--data", str(data), "--seed", str(seed), *LISTOPS[name])
        subprocess.run([sys.executable, str(programs / "lra.py"), *chosen, *options], check=True, stdout=subprocess.DEVNULL)
        results = json.loads((run / "results.json").read_text())
        densities = np.array(results["density"]["tested"])
        row = {"run": name, "seed": seed, **{key: results["test"][key] for key in ("accuracy", "loss", "examples")}}
        row |= {"density": densities.mean(), "tokens_per_second": results["tokens_per_second"]}
        row |= {f"density_layer{layer}_head{head}": density for (layer, head), density in np.ndenumerate(densities)}
        shutil.copyfile(run / "val.csv", folder / f"listops_{file_name(name, seed)}.csv")
        append_row(folder / LISTOPS_RESULTS, _rounded(row))


@torch.no_grad()
def average(folder: Path, names: Iterable[str], seeds: int, data: Path, work: Path, graphs: int) -> None:
    """Tests runs that :func:`listops` finished again, with probabilities averaged over several sampled graphs per example.

    Args:
        folder: Of the CSV files that stay; ``listops_graphs.csv`` gets a row for each run that is not in it.
        names: Keys of ``LISTOPS``.
        seeds: Number of seeds.
        data: Folder of ListOps.
        work: Folder of the runs.
        graphs: Number of graphs to average over.
    """
    done = {(row["run"], int(row["seed"]), int(row["graphs"])) for row in read_results(folder, LISTOPS_GRAPHS)}
    pairs = [(name, seed) for name in names for seed in range(seeds) if LISTOPS[name][:1] != ("--attention",)]
    todo = [(name, seed) for name, seed in pairs if (work / file_name(name, seed) / "results.json").exists()]
    for name, seed in tqdm([pair for pair in todo if (*pair, graphs) not in done], desc="Runs", unit="run"):
        _, module, splits, _ = open_run(work / file_name(name, seed), "best.ckpt", data)
        test, right = splits["test"], np.zeros(2, dtype=np.int64)
        for examples in LengthBuckets(test.lengths, token_budget=8192):
            batch = test.__getitems__(examples)
            right += [int((module.average(batch, number)[0].argmax(-1) == batch.labels).sum()) for number in (1, graphs)]
        one, many = (right / len(test)).tolist()
        row = {"run": name, "seed": seed, "graphs": graphs, "one_graph": one, "accuracy": many}
        append_row(folder / LISTOPS_GRAPHS, _rounded(row))


def report_graphs(folder: Path) -> str:
    """A Markdown table of what averaging over graphs gains."""
    rows = read_results(folder, LISTOPS_GRAPHS)
    full = {int(row["seed"]): 100 * float(row["accuracy"]) for row in read_results(folder) if row["run"] == "full"}
    lines = [
        "| run | seeds | graphs | one graph, % | averaged, % | averaged less full attention, points (95 %) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, graphs in dict.fromkeys((row["run"], row["graphs"]) for row in rows):
        found = [row for row in rows if (row["run"], row["graphs"]) == (name, graphs) and int(row["seed"]) in full]
        if len(found) < 2:
            continue
        one, many = (np.array([100 * float(row[column]) for row in found]) for column in ("one_graph", "accuracy"))
        gain = _interval(many - np.array([full[int(row["seed"])] for row in found]))
        lines.append(f"| {name} | {len(found)} | {graphs} | {_spread(one, 2)} | {_spread(many, 2)} | {gain} |")
    return "\n".join(lines)


def _interval(differences: np.ndarray) -> str:
    """Mean and half the width of its 95 % interval, by Student's t."""
    half = float(t.ppf(0.975, len(differences) - 1)) * differences.std(ddof=1) / len(differences) ** 0.5
    return f"{differences.mean():+.2f} ± {half:.2f}"


def read_results(folder: Path, name: str = LISTOPS_RESULTS) -> list[dict[str, str]]:
    """The rows of results of the runs on ListOps that are finished."""
    path = folder / name
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}


def report_listops(folder: Path) -> str:
    """A Markdown table over the finished runs: means, extremes, and the paired difference to full attention with its interval."""
    rows = read_results(folder)
    found = {name: {int(row["seed"]): row for row in rows if row["run"] == name} for name in LISTOPS}
    lines = [
        "| run | seeds | test accuracy, % | less full attention, points (95 %) | density, % | densest head, % |",
        "|---|---:|---:|---:|---:|---:|",
    ]

    def values(name: str, column: str, seeds: Iterable[int]) -> np.ndarray:
        return np.array([float(found[name][seed][column]) for seed in seeds])

    for name, runs in found.items():
        both = sorted(runs.keys() & found["full"].keys())
        if len(both) < 2:
            continue
        accuracy, density = 100 * values(name, "accuracy", both), 100 * values(name, "density", both)
        heads = [column for column in runs[both[0]] if column.startswith("density_")]
        densest = 100 * np.max([values(name, column, both) for column in heads], axis=0)
        gain = accuracy - 100 * values("full", "accuracy", both)
        shown = [_spread(accuracy, 2), _interval(gain), _spread(density, 1), _spread(densest, 1)]
        lines.append(f"| {name} | {len(both)} | {' | '.join(shown)} |")
    return "\n".join(lines)


# ------------------------------------------------------------------ tables and plots


def report(folder: Path) -> str:
    """A Markdown table over all finished runs, and a plot of mean curves; returns the table."""
    lines = [
        "| run | seeds | accuracy, % | density, % | p, equal tokens | p, other tokens | steps to 99 % |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    means = {}
    for name in RUNS:
        curves = [read_curve(folder / f"{file_name(name, seed)}.csv") for seed in range(SEEDS) if finished(folder, name, seed)]
        if not curves:
            continue
        last = {column: np.array([curve[-1][column] for curve in curves]) for column in COLUMNS}
        reached = [next((row["step"] for row in curve if row["accuracy"] >= 0.99), None) for curve in curves]
        hits = [step for step in reached if step is not None]
        when = f"{int(np.median(hits)):,} ({len(hits)} of {len(curves)})" if hits else "never"
        shown = [
            _spread(100 * last["accuracy"], 2),
            _spread(100 * last["density"], 1),
            _spread(last["p_equal"], 3),
            _spread(last["p_other"], 3),
        ]
        lines.append(f"| {name} | {len(curves)} | {' | '.join(shown)} | {when} |")
        means[name] = [
            {column: float(np.mean([curve[i][column] for curve in curves])) for column in COLUMNS} for i in range(min(map(len, curves)))
        ]
    groups = {
        "estimators": ["full", "local", "mask", "paper", "relaxed", "concrete", "score function", "none"],
        "models": ["full, long", "local, long, assortative", "local, long, assortative, 0.1", "mask, long, assortative, 0.1"],
    }
    for group, names in groups.items():
        if any(name in means for name in names):
            plot(folder / f"{group}.png", {name: means[name] for name in names if name in means})
    return "\n".join(lines)


def _spread(values: np.ndarray, digits: int) -> str:
    """Mean, smallest and largest."""
    return f"{values.mean():.{digits}f} ({values.min():.{digits}f} to {values.max():.{digits}f})"


# ------------------------------------------------------------------ bias and variance by enumeration


def gradient_errors(
    p0: float, sharpness: float, chance: float, cases: int = 200, keys: int = 8, channels: int = 8
) -> dict[str, dict[str, float]]:
    """Bias and standard deviation of each estimator, relative to the norm of the true gradient, and agreement of signs.

    One query attends to ``keys`` keys; the loss is a cross-entropy behind a tanh, so it is not linear. All graphs are enumerated, one row each.

    Args:
        p0: Edge probabilities are around this.
        sharpness: Standard deviation of the scores.
        chance: Probability that a pair is a probe.
        cases: Number of random cases.
        keys: Number of keys.
        channels: Channels of a value.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    bits = torch.tensor(list(itertools.product([0.0, 1.0], repeat=keys)), dtype=torch.float64)  # [S, M]
    rows, present = len(bits), bits > 0
    graph, everything = AttentionGraph.from_dense(bits), AttentionGraph.from_dense(torch.ones(rows, keys))
    sums: dict[str, np.ndarray] = {}
    for _ in range(cases):
        score, value, readout, residual = sharpness * draw(keys), draw(1, keys, channels), 2 * draw(2, channels), draw(channels)
        p = (p0 + 0.2 * min(p0, 1 - p0) * draw(keys)).clamp(0.01, 0.99)
        query, key = torch.ones(1, rows, 1, dtype=torch.float64), score[None, :, None]
        out = ops.edge_attention(query, key, value, graph.rowptr, graph.col)[0].requires_grad_()
        logits = torch.tanh(out[0] + residual) @ readout.T
        loss = torch.logsumexp(logits, 1) - logits[:, 0]
        (grad_out,) = torch.autograd.grad(loss.sum(), out)
        loss = loss.detach()
        here, there = ops.edge_effect(grad_out, query, key, value, graph.rowptr, graph.col, None, everything.rowptr, everything.col)
        effect = there.view(rows, keys).clone()
        effect[present] = here
        weight = torch.where(present, score.exp(), 0)
        weight = weight / weight.sum(1, keepdim=True).clamp(min=1e-300)
        gain = grad_out[0] @ value[0].T
        mask = weight * (gain - (weight * gain).sum(1, keepdim=True))
        chances = (bits * p + (1 - bits) * (1 - p)).prod(1)[:, None]  # [S, 1]
        mean_loss = (chances[:, 0] * loss).sum()
        score_function = torch.where(present, 1 / p, -1 / (1 - p)) * (loss - mean_loss)[:, None]
        true = (chances * score_function).sum(0)
        balance = p / (p + chance * (1 - p))  # share of the side with the edge by the balance heuristic
        share = torch.maximum(balance.clamp(max=0.5), p)
        probe = torch.where(present, 1.0, chance)  # probability that the pair is looked at, its state given
        looked: dict[str, tuple[Tensor, Any]] = {  # what a pair contributes where it is looked at, and how often it is
            "paper": (mask * score, 1.0),
            "mask": (mask, 1.0),
            "local, all pairs": (effect, 1.0),
            "local, edges over p": (torch.where(present, effect / p, 0), 1.0),
            "local, non-edges over their chance": (torch.where(present, effect, effect / chance), probe),
            "local, balance heuristic": (effect * balance / p, probe),
            "local, half and half": (torch.where(present, effect / (2 * p), effect / (2 * chance * (1 - p))), probe),
            "local": (torch.where(present, effect * share / p, effect * (1 - share) / (chance * (1 - p))), probe),
            "score function": (score_function, 1.0),
        }
        for name, (amount, share) in looked.items():
            mean = (chances * amount * share).sum(0)
            second = (chances * amount**2 * share).sum(0)
            new = [
                float(((mean - true) ** 2).sum()),
                float((second - mean**2).sum()),
                float((true**2).sum()),
                float((mean.sign() == true.sign()).double().mean()) / cases,
            ]
            sums[name] = sums.get(name, np.zeros(4)) + np.array(new)
    return {name: {"bias": (a[0] / a[2]) ** 0.5, "deviation": (a[1] / a[2]) ** 0.5, "signs": float(a[3])} for name, a in sums.items()}


def gradients(folder: Path) -> str:
    """The table of :func:`gradient_errors` over several settings, as Markdown and as CSV."""
    header = "| p | scores | estimator | bias | standard deviation | signs that agree |\n|---:|---:|---|---:|---:|---:|"
    lines, rows = [header], []
    for p0, sharpness in tqdm(list(itertools.product((0.05, 0.25, 0.8), (1.0, 3.0))), desc="Settings", unit="setting"):
        for name, found in gradient_errors(p0, sharpness, chance=0.25).items():
            rows.append({"p": p0, "sharpness": sharpness, "estimator": name, **found})
            lines.append(f"| {p0} | {sharpness:g} | {name} | {found['bias']:.2f} | {found['deviation']:.2f} | {found['signs']:.1%} |")
    with (folder / "gradients.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; ``--help`` explains it."""
    given = parse(arguments)
    known = LISTOPS if given.action in ("listops", "average") else RUNS
    if unknown := [name for name in given.only or () if name not in known]:
        given.fail(f"Expected 'only' to name runs of '{given.action}' (got {unknown}). Choose from: {'; '.join(known)}.")
    torch.set_num_threads(given.threads)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.action == "run":
        run(given.folder, given.only or RUNS, given.seeds)
    elif given.action == "listops":
        listops(given.folder, given.only or LISTOPS, given.seeds, given.data, given.work, given.threads)
    elif given.action == "average":
        average(given.folder, given.only or LISTOPS, given.seeds, given.data, given.work, given.graphs)
    elif given.action == "gradients":
        print(gradients(given.folder))
    else:
        print("\n\n".join(table(given.folder) for table in (report, report_listops, report_graphs)))


if __name__ == "__main__":
    main(sys.argv[1:])
