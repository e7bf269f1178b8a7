"""Looks at the graphs that a trained model samples, and writes a report with figures and tables.

In: the folder of a run and a split of its data. Out: one HTML file that needs no other. Not here: training (``train.py``)::

    python -m examples.lra graphs --run runs/listops-laptop-1
    python -m examples.lra graphs --run runs/listops-laptop-1 --split test --examples 500 --structure 50 --out report.html

Graphs are those of the trainer's evaluation: a function of the run's seed and of the number of the example.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import html
import io
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from examples.lra.data.batches import Batch, Split, by_length
from examples.lra.data.files import check_folder, write_text
from examples.lra.data.tasks import TASKS, Task
from examples.lra.model import Classifier
from examples.lra.train import open_run
from sbm_pyg import SBM, AttentionGraph, analysis, patterns, plots

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 1040px; margin: 2em auto; padding: 0 1em; color: #222 }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2em; border-bottom: 1px solid #ccc }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid #eee }
th { border-bottom: 1px solid #888 } td:first-child, th:first-child { text-align: left }
figure { margin: 1.5em 0 } img { max-width: 100% } pre { background: #f6f6f6; padding: .8em; overflow-x: auto }"""


@dataclass(frozen=True)
class Evaluated:
    """What a run's model does with some examples.

    Args:
        examples: Their numbers in the split, ``[n]``.
        lengths: Tokens of each, ``[n]``.
        labels: Their classes, ``[n]``.
        guesses: What the model says, ``[n]``.
        loss: Mean cross-entropy.
        density: Of each layer, example and head, ``[L, n, H]``; for pairs the mean of both sequences.
    """

    examples: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    guesses: np.ndarray
    loss: float
    density: Tensor


class Report:
    """Collects the sections of a page."""

    def __init__(self, title: str) -> None:
        self.parts = [
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
        ]
        self.parts.append(f"<h1>{html.escape(title)}</h1>")

    def head(self, text: str) -> None:
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def page(self, text: str) -> None:
        self.parts.append(f"<pre>{html.escape(text)}</pre>")

    def figure(self, figure: Any) -> None:
        """A figure as PNG inside the page; its caption is in the picture, and its text for those who cannot see it."""
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=110)
        code = base64.b64encode(data.getvalue()).decode()
        self.parts.append(
            f'<figure><img alt="{html.escape(figure.get_label())}" src="data:image/png;base64,{code}"></figure>'
        )

    def table(self, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        cells = ["".join(f"<td>{html.escape(_cell(value))}</td>" for value in row) for row in rows]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        self.parts.append(f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")

    def write(self, path: Path) -> None:
        """Writes the page, whole or not at all."""
        write_text(path, "\n".join(self.parts) + "\n")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def layers_of(module: Classifier, batch: Batch) -> tuple[Tensor, list[tuple[list[AttentionGraph], list[SBM | None]]]]:
    """Logits, and for each sequence of the examples (one, or two of a pair) the graphs and models of all layers."""
    with torch.no_grad():
        logits, trace = module.classify(batch, seed=module.settings.seed)
    layers = len(trace.choices) // module.arity
    parts = [slice(side * layers, (side + 1) * layers) for side in range(module.arity)]
    return logits, [
        ([choice.graph for choice in trace.choices[part]], [choice.probability for choice in trace.choices[part]])
        for part in parts
    ]


def evaluate(module: Classifier, split: Split, examples: np.ndarray) -> Evaluated:
    """Runs the model over examples, a few thousand tokens at a time."""
    lengths = split.lengths[examples]
    batches = by_length(lengths, max(4096, int(lengths.max())))
    guesses, density, loss = np.zeros(len(examples), np.int64), None, 0.0
    for chosen in tqdm(batches, "Running the model", unit=" batches"):
        batch = split.__getitems__(examples[chosen].tolist())
        logits, sides = layers_of(module, batch)
        guesses[chosen] = logits.argmax(-1).numpy()
        loss += float(cross_entropy(logits, batch.labels, reduction="sum"))
        part = torch.stack([torch.stack([graph.density for graph in graphs]) for graphs, _ in sides]).mean(
            0
        )  # [L, b, H]
        density = (
            torch.zeros(part.size(0), len(examples), part.size(2), dtype=torch.float64) if density is None else density
        )
        density[:, chosen] = part
    assert density is not None
    return Evaluated(examples, lengths, split.labels[examples], guesses, loss / len(examples), density)


def write_densities(report: Report, done: Evaluated, folder: Path) -> None:
    """Density per layer and head, over inputs and over training."""
    report.head("Density")
    report.figure(plots.plot_density(done.density))
    rows: list[list[Any]] = []
    mean = done.density.mean((0, 2)).numpy()
    for layer, by_layer in enumerate(done.density):
        for head, values in enumerate(by_layer.T.numpy()):
            related = (
                np.corrcoef(values, done.lengths)[0, 1] if values.std() > 0 and done.lengths.std() > 0 else math.nan
            )
            rows.append(
                [
                    f"layer {layer}, head {head}",
                    *(100 * float(f(values)) for f in (np.mean, np.std, np.min, np.max)),
                    float(related),
                ]
            )
    report.table(["", "mean %", "deviation", "least", "most", "correlation with length"], rows)
    right = done.guesses == done.labels
    order = mean.argsort(kind="stable")
    half = len(order) // 2
    if half:
        sparse, dense = (100 * right[part].mean() for part in (order[:half], order[half:]))
        report.text(
            f"Accuracy on the half of the inputs with the sparser attention: {sparse:.1f} %; on the other half: {dense:.1f} %."
        )
    log = folder / "train.csv"
    if log.is_file():
        report.figure(plots.plot_training_density(log))


def write_inputs(report: Report, task: Task, module: Classifier, split: Split, done: Evaluated) -> None:
    """Inputs of low and of high density, and the masks of the median one."""
    report.head("Inputs of low and of high density")
    low, high = plots.density_extremes(done.density, 2)
    places = low + [place for place in high if place not in low]
    batch = split.__getitems__(done.examples[places].tolist())
    graphs, _ = layers_of(module, batch)[1][0]
    titles = [
        f"example {done.examples[place]}\nclass {done.labels[place]}, said {done.guesses[place]}" for place in places
    ]
    notes = f"Rows: the {len(low)} inputs of lowest and the {len(places) - len(low)} of highest mean density among {len(done.examples):,}."
    if task.side and (done.lengths == task.side**2).all():  # masked ones would leave holes
        images = batch.tokens.view(len(places), task.side, task.side).float()
        report.figure(
            plots.plot_pixel_attention(graphs, images, sequences=range(len(places)), titles=titles, notes=notes)
        )
    else:
        report.figure(plots.plot_inputs(graphs, sequences=range(len(places)), titles=titles, notes=notes))
    if task.words:
        for title, example in zip(titles, done.examples[places], strict=True):
            one = split.__getitems__([int(example)])
            tokens = (one.tokens if task.arity == 1 else one.tokens[0])[:60].tolist()
            report.page(
                f"{title.replace(chr(10), ': ')}\n{' '.join(task.words[token] for token in tokens)}{' ...' if len(tokens) == 60 else ''}"
            )

    report.head("Masks and blocks")
    median = done.density.mean((0, 2)).argsort()[len(done.examples) // 2]
    graphs, sbms = layers_of(module, split.__getitems__([int(done.examples[median])]))[1][0]
    report.text(f"Example {done.examples[median]}, the one of median density, {done.lengths[median]:,} tokens.")
    for layer, (graph, sbm) in enumerate(zip(graphs, sbms, strict=True)):
        for head in range(graph.heads):
            title = f"Example {done.examples[median]}, layer {layer}, head {head}"
            report.figure(plots.plot_mask(graph, sbm, head=head, title=title))
            if sbm is not None:
                report.figure(plots.plot_blocks(graph, sbm, head=head, title=title))


def write_structure(report: Report, module: Classifier, split: Split, examples: np.ndarray) -> None:
    """Statistics of the sampled graphs per layer and head."""
    report.head("Structure of the sampled graphs")
    found: dict[tuple[int, int], list[dict[str, float]]] = {}
    for example in tqdm(examples, "Statistics", unit=" examples"):
        for graphs, sbms in layers_of(module, split.__getitems__([int(example)]))[1]:
            for layer, (graph, sbm) in enumerate(zip(graphs, sbms, strict=True)):
                for record in analysis.graph_statistics(graph, blocks=sbm).rows():
                    found.setdefault((layer, int(record["head"])), []).append(record)
    places = sorted(found)
    names = [name for name in found[places[0]][0] if name not in ("sequence", "head")]
    rows = []
    for name in names:
        row: list[Any] = [name.replace("_", " ")]
        for place in places:
            values = np.array([one[name] for one in found[place]])
            finite = values[np.isfinite(values)]
            share = "" if len(finite) == len(values) else f" ({len(finite)} of {len(values)})"
            row.append(f"{finite.mean():.3g} ± {finite.std():.2g}{share}" if len(finite) else "none finite")
        rows.append(row)
    report.text(
        f"Mean ± standard deviation over {len(examples):,} examples. Where a value is not defined or infinite for some graphs, the numbers in brackets say "
        "for how many it is finite. Blocks are those of the largest membership."
    )
    report.table(["", *(f"layer {layer}, head {head}" for layer, head in places)], rows)


def write_universality(
    report: Report, module: Classifier, split: Split, examples: np.ndarray, threshold: float, limit: float, seed: int
) -> None:
    """The three conditions for each layer and for the stack, on samples, on samples with self-loops, and on expectations."""
    report.head("Conditions of universal approximation")
    report.text(
        "Conditions of Yun et al. (2020): 1, every token attends to itself; 2, the union of the patterns has a Hamiltonian path; 3, after s steps through the "
        f"patterns every token has heard of every other. Over {len(examples):,} examples; the heads of a layer count as one pattern. Expected patterns hold the "
        f"pairs with p > {threshold:g}. Self-loops are what the paper's proof adds and its experiments leave out."
    )
    counts: dict[str, list[analysis.Universality]] = {}
    for example in tqdm(examples, "Universality", unit=" examples"):
        for graphs, sbms in layers_of(module, split.__getitems__([int(example)]))[1]:
            looped = [graph | patterns.self_loops(graph.num_queries) for graph in graphs]
            sets: dict[str, list[Any]] = {}
            for name, kind in (("sampled", graphs), ("sampled, self-loops added", looped)):
                sets |= {f"layer {layer}, {name}": [graph] for layer, graph in enumerate(kind)}
                sets[f"stack, {name}"] = list(kind)
            if all(sbm is not None for sbm in sbms):
                sets["stack, expected"] = list(sbms)
            for name, members in sets.items():
                answer = analysis.universality(members, threshold=threshold, time_limit=limit, seed=seed)
                counts.setdefault(name, []).append(answer)
    rows = []
    for name, answers in counts.items():
        steps = [float(answer.s) for answer in answers if answer.s is not None and answer.s < math.inf]
        paths = [answer.hamiltonian_status for answer in answers]
        rows.append(
            [
                name,
                f"{100 * np.mean([answer.holds is True for answer in answers]):.0f} %",
                f"{100 * np.mean([not any(answer.missing_self_loops) for answer in answers]):.0f} %",
                " / ".join(str(paths.count(status)) for status in ("FOUND", "ABSENT", "UNKNOWN")),
                f"{100 * len(steps) / len(answers):.0f} %",
                float(np.median(steps)) if steps else math.nan,
            ]
        )
    report.table(
        ["patterns", "all hold", "1. self-loops", "2. path: found / absent / unknown", "3. s finite", "median s"], rows
    )
    report.text(f"The pages of example {examples[0]}:")
    for name in ("stack, sampled", "stack, sampled, self-loops added", "stack, expected"):
        if name in counts:
            report.page(f"{name}\n{counts[name][0]}")


def run(given: argparse.Namespace) -> Path:
    """Writes the report that the command line asks for, and returns where it is."""
    out = given.out or given.run / "graphs.html"
    try:
        if given.out is not None and (out.is_dir() or not out.parent.is_dir()):
            raise ValueError(
                f"Expected 'out' to be a file in a folder that is there (got {out}). Make the folder, or choose another name."
            )
        check_folder("out", out.parent)
        plan, module, splits = open_run(given.run, given.checkpoint, given.data, graphs=True)
    except ValueError as error:
        given.fail(str(error))
    start = time.perf_counter()
    split, settings, task = splits[given.split], plan.settings, TASKS[plan.task]
    random = np.random.default_rng(given.seed)
    examples = np.sort(random.permutation(len(split))[: given.examples])
    some = random.permutation(examples)[: given.structure]
    done = evaluate(module, split, examples)
    report = Report(f"Graphs of {given.run.name}: {task.name}, {settings.attention} attention")
    report.text(
        f"{settings.layers} layers, {settings.heads} heads, {given.checkpoint} of {plan.preset} preset; {len(examples):,} of {len(split):,} "
        f"examples of {given.split}, {done.lengths.mean():.1f} tokens on average ({done.lengths.min():,} to {done.lengths.max():,})."
    )
    facts = {
        "accuracy on these examples": f"{100 * float((done.guesses == done.labels).mean()):.2f} %",
        "majority class": f"{100 * split.majority(examples):.2f} %",
        "loss": f"{done.loss:.4f}",
        "mean density": f"{100 * float(done.density.mean()):.2f} %",
    }
    report.table(["", ""], [*facts.items()])
    write_densities(report, done, given.run)
    write_inputs(report, task, module, split, done)
    write_structure(report, module, split, some)
    write_universality(report, module, split, some, given.threshold, given.time_limit, given.seed)
    report.head("Settings")
    report.page(json.dumps(dataclasses.asdict(plan), indent=2))
    seconds = time.perf_counter() - start
    report.text(
        f"Made in {seconds:.0f} seconds with seed {given.seed}; {len(some):,} examples for structure and universality."
    )
    report.write(out)
    print(f"Wrote {out}")
    return out
