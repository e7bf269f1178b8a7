"""Writes ``graphs.html``, a report with figures and tables on the graphs that a trained model samples, which needs no other file.

    python -m examples.lra graphs --run runs/listops-laptop-1 --split test --examples 500 --structure 50

Graphs are those of the trainer's evaluation: a function of the run's seed and of the number of the example.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.common.command import require
from examples.common.pictures import page, picture, table, title, words
from examples.common.runs import write_text
from examples.lra.data.batches import Batch, Split, by_length
from examples.lra.data.tasks import TASKS, Task
from examples.lra.model import Classifier
from examples.lra.settings import BASELINES
from examples.lra.train import block_model, open_run
from sbm_pyg import SBM, AttentionGraph, Choice, analysis, patterns
from sbm_pyg.analysis import plots
from sbm_pyg.info import tqdm


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Results of a run's model for some examples."""

    examples: np.ndarray  # [n], their numbers in the split
    lengths: np.ndarray  # [n], tokens of each
    labels: np.ndarray  # [n]
    guesses: np.ndarray  # [n], of the model
    loss: float  # mean cross-entropy
    density: Tensor  # [L, n, H]; for pairs the mean of both sequences


@torch.no_grad()
def choices(module: Classifier, batch: Batch) -> tuple[Tensor, list[Any]]:
    """Logits, and for each sequence of the examples (one, or two of a pair) the graphs and models of all layers."""
    logits, trace = module.classify(batch, seed=module.settings.seed)
    layers = module.settings.layers
    return logits, [trace.choices[side * layers : (side + 1) * layers] for side in range(module.arity)]


def evaluate(module: Classifier, split: Split, examples: np.ndarray) -> Evaluated:
    """Runs the model over examples, a few thousand tokens at a time."""
    lengths, settings = split.lengths[examples], module.settings
    guesses, loss = np.zeros(len(examples), np.int64), 0.0
    density = torch.zeros(settings.layers, len(examples), settings.heads, dtype=torch.float64)
    for chosen in tqdm(by_length(lengths, max(4096, int(lengths.max()))), "Running the model", unit=" batches"):
        batch = split.__getitems__(examples[chosen].tolist())
        logits, sides = choices(module, batch)
        guesses[chosen] = logits.argmax(-1).numpy()
        loss += float(cross_entropy(logits, batch.labels, reduction="sum"))
        parts = [torch.stack([choice.graph.density for choice in side]) for side in sides]
        density[:, chosen] = torch.stack(parts).mean(0)  # [L, b, H]
    return Evaluated(examples, lengths, split.labels[examples], guesses, loss / len(examples), density)


def densities(done: Evaluated, folder: Path) -> Iterator[str]:
    """Density per layer and head, over inputs and over training."""
    yield title("Density")
    yield picture(plots.plot_density(done.density))
    rows = []
    for layer, by_layer in enumerate(done.density):
        for head, values in enumerate(by_layer.T.numpy()):
            varied = values.std() > 0 and done.lengths.std() > 0
            related = f"{np.corrcoef(values, done.lengths)[0, 1]:.2f}" if varied else "–"
            numbers = [f"{100 * function(values):.4g}" for function in (np.mean, np.std, np.min, np.max)]
            rows.append([f"layer {layer}, head {head}", *numbers, related])
    yield table(["", "mean %", "deviation", "least", "most", "correlation with length"], rows)
    if (folder / "train.csv").is_file():
        yield picture(plots.plot_training_density(folder / "train.csv"))


def inputs(task: Task, module: Classifier, split: Split, done: Evaluated) -> Iterator[str]:
    """Inputs of low and of high density, and the masks of the median one."""
    yield title("Inputs of low and of high density")
    low, high = plots.density_extremes(done.density, 2)
    places = list(dict.fromkeys(low + high))
    batch = split.__getitems__(done.examples[places].tolist())
    graphs = [choice.graph for choice in choices(module, batch)[1][0]]
    names = [f"example {done.examples[at]}\nclass {done.labels[at]}, said {done.guesses[at]}" for at in places]
    notes = f"Rows: inputs of lowest, then of highest mean density among {len(done.examples):,}."
    options: Any = {"sequences": range(len(places)), "titles": names, "notes": notes}
    if task.side and (done.lengths == task.side**2).all():  # masked ones would leave holes
        images = batch.tokens.view(len(places), task.side, task.side).float()
        yield picture(plots.plot_pixel_attention(graphs, images, **options))
    else:
        yield picture(plots.plot_inputs(graphs, **options))
    if task.words:
        for name, example in zip(names, done.examples[places], strict=True):
            tokens = split.__getitems__([int(example)]).tokens[:60].tolist()
            text = " ".join(task.words[token] for token in tokens)
            yield words(name.replace("\n", ": ") + "\n" + text, "pre")
    yield title("Masks and blocks")
    median = done.density.mean((0, 2)).argsort()[len(done.examples) // 2]
    example = int(done.examples[median])
    yield words(f"Example {example}, the one of median density, {done.lengths[median]:,} tokens.")
    for layer, choice in enumerate(choices(module, split.__getitems__([example]))[1][0]):
        for head in range(module.settings.heads):
            name = f"Example {example}, layer {layer}, head {head}"
            blocks = block_model(choice)
            yield picture(plots.plot_mask(choice.graph, blocks, head=head, title=name))
            if blocks is not None:
                yield picture(plots.plot_communities(choice.graph, blocks, head=head, title=name))


def structure(module: Classifier, split: Split, examples: np.ndarray) -> Iterator[str]:
    """Statistics of the sampled graphs per layer and head."""
    yield title("Structure of the sampled graphs")
    found: dict[str, list[dict[str, float]]] = {}
    for example in tqdm(examples, "Statistics", unit=" examples"):
        for side in choices(module, split.__getitems__([int(example)]))[1]:
            for layer, choice in enumerate(side):
                for record in analysis.graph_statistics(choice.graph, communities=block_model(choice)).rows():
                    found.setdefault(f"layer {layer}, head {int(record['head'])}", []).append(record)
    rows = []
    for name in [name for name in next(iter(found.values()))[0] if name not in ("sequence", "head")]:
        row = [name.replace("_", " ")]
        for records in found.values():
            values = np.array([record[name] for record in records])
            finite = values[np.isfinite(values)]
            share = "" if len(finite) == len(values) else f" ({len(finite)} of {len(values)})"
            row.append(f"{finite.mean():.3g} ± {finite.std():.2g}{share}" if len(finite) else "none finite")
        rows.append(row)
    yield words(
        f"Mean ± standard deviation over {len(examples):,} examples. Where a value is not defined or infinite for some graphs, the numbers in brackets say "
        "for how many it is finite. Blocks are those of the largest membership."
    )
    yield table(["", *found], rows)


def expectation(choice: Choice) -> AttentionGraph | SBM | None:
    """The expectation of a sampled graph: its model, or, over blocks of tokens, the pairs of blocks with p > 0.5."""
    model = block_model(choice)
    if model is None or choice.graph.block_size == 1:
        return model
    return choice.graph.with_blocks(analysis.expected_graph(model))


def universality(module: Classifier, split: Split, examples: np.ndarray, limit: float) -> Iterator[str]:
    """The three conditions for each layer and for the stack, on samples, on samples with self-loops, and on expectations."""
    yield title("Conditions of universal approximation")
    yield words(
        "Conditions of Yun et al. (2020): 1, every token attends to itself; 2, the union of the patterns has a Hamiltonian path; 3, after s steps through the "
        f"patterns every token has information from every other. Over {len(examples):,} examples; the heads of a layer count as one pattern. Expected patterns hold the "
        "pairs with p > 0.5. Self-loops are what the paper's proof adds and its experiments leave out."
    )
    found: dict[str, list[analysis.Universality]] = {}
    for example in tqdm(examples, "Universality", unit=" examples"):
        for side in choices(module, split.__getitems__([int(example)]))[1]:
            graphs = [choice.graph for choice in side]
            looped = [graph | patterns.self_loops(graph.num_queries) for graph in graphs]
            sets: dict[str, list[Any]] = {}
            for name, kind in (("sampled", graphs), ("sampled, self-loops added", looped)):
                sets |= {f"layer {layer}, {name}": [graph] for layer, graph in enumerate(kind)}
                sets[f"stack, {name}"] = [*kind]
            if all(expected := [expectation(choice) for choice in side]):
                sets["stack, expected"] = expected
            for name, members in sets.items():
                found.setdefault(name, []).append(analysis.universality(members, time_limit=limit))
    rows = []
    for name, answers in found.items():
        steps = [answer.s for answer in answers if answer.s is not None and answer.s < math.inf]
        paths = [answer.hamiltonian_status for answer in answers]
        looped_share = np.mean([not any(answer.missing_self_loops) for answer in answers])
        hold = np.mean([answer.holds is True for answer in answers])
        counts = " / ".join(str(paths.count(status)) for status in ("FOUND", "ABSENT", "UNKNOWN"))
        ends = (f"{len(steps) / len(answers):.0%}", f"{np.median(steps):g}" if steps else "–")
        rows.append([name, f"{hold:.0%}", f"{looped_share:.0%}", counts, *ends])
    path = "2. path: found / absent / unknown"
    yield table(["patterns", "all hold", "1. self-loops", path, "3. s finite", "median s"], rows)
    yield words(f"The pages of example {examples[0]}:")
    for name in found:
        if name.startswith("stack"):
            yield words(f"{name}\n{found[name][0]}", "pre")


def run(given: argparse.Namespace) -> Path:
    """Writes the report that the command line asks for, and returns where it is."""
    try:
        out = _report(given)
    except ValueError as error:
        given.fail(str(error))
    print(f"Wrote {out}")
    return out


def _report(given: argparse.Namespace) -> Path:
    plan, module, splits = open_run(given.run, data=given.data)
    settings, task, split = plan.settings, TASKS[plan.task], splits[given.split]
    has_graphs, got = settings.attention not in ("full", *BASELINES), f"attention {settings.attention!r}"
    require(has_graphs, "a run whose attention has graphs", got, "There is nothing to see.")
    random = np.random.default_rng(0)
    examples = np.sort(random.permutation(len(split))[: given.examples])
    some = random.permutation(examples)[: given.structure]
    done = evaluate(module, split, examples)
    name = f"Graphs of {given.run.name}: {task.name}, {settings.attention} attention"
    facts = {"accuracy on these examples": f"{(done.guesses == done.labels).mean():.2%}"}
    facts |= {"majority class": f"{split.majority(examples):.2%}", "loss": f"{done.loss:.4f}"}
    facts |= {"mean density": f"{float(done.density.mean()):.2%}"}
    parts = [
        words(
            f"{settings.layers} layers, {settings.heads} heads, {plan.preset} preset; {len(examples):,} of {len(split):,} examples of "
            f"{given.split}, {done.lengths.mean():.1f} tokens on average ({done.lengths.min():,} to {done.lengths.max():,})."
        ),
        table(["", ""], [*facts.items()]),
        *densities(done, given.run),
        *inputs(task, module, split, done),
        *structure(module, split, some),
        *universality(module, split, some, given.time_limit),
        title("Settings"),
        words(json.dumps(dataclasses.asdict(plan), indent=2), "pre"),
    ]
    out = given.run / "graphs.html"
    write_text(out, page(name, parts))
    return out
