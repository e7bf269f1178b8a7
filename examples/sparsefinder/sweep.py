"""Extracts the heads of a trained model, fits sources to them, and adds a row to ``rows.csv`` for each head, setting and seed."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from examples.common.command import option
from examples.common.runs import read_state, write_checkpoint
from examples.common.tables import Row, add, read
from examples.sparsefinder.model import Texts, cut, hide, layers, predict, set_sources, test_model
from examples.sparsefinder.sources import ALONE, GRIDS, Learned, learn, make, make_learned
from sbm_pyg import GraphSource, TokenClassifier, Tokens
from sbm_pyg.progress import tqdm
from sbm_pyg.sources.patterns import PatternSource, full
from sbm_pyg.sparsefinder import Sample
from sbm_pyg.sparsefinder.ground_truth import compare, group_entropy, record
from sbm_pyg.sparsefinder.predictors import buckets, clusters

BATCH = 2  # sequences that are extracted at once, a sample each
TESTED = 16  # sequences that are tested at once


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What decides the rows of a model."""

    seed: int
    hidden: float
    fit_sequences: int = option(64, "training sequences that sources are fitted to", least=1)
    test_sequences: int = option(32, "test sequences that sources are measured on", least=1)
    dim: int = option(4, "dimensions of the projections", least=1)
    epochs: int = option(8, "passes over the sequences in fitting", least=1)


def settings(names: Sequence[str], windows: Sequence[int], stride: int) -> Iterator[tuple[str, float, int]]:
    """Source, knob and window: every so many of a grid, with each window where the source takes one."""
    for name in names:
        for knob in GRIDS[name][::stride]:
            for window in (0,) if name in ALONE else windows:
                yield name, knob, window


def extract(
    model: TokenClassifier, tokens: Tensor, hidden: float, batch: int, seed: int, words: str
) -> list[list[Sample]]:
    """Samples of each layer: queries, keys and true graphs of sequences some of whose words are hidden."""
    set_sources(model, [PatternSource(full)] * len(layers(model)))
    with record(model) as samples, torch.no_grad():
        for at, part in enumerate(tqdm(tokens.split(batch), desc=words)):
            predict(model, *hide(part, hidden, seed + at))
    set_sources(model, [None] * len(layers(model)))
    return [*samples.values()]


def load_or_learn(model: TokenClassifier, tokens: Tensor, sweep: Sweep, path: Path) -> list[Learned]:
    """What was learned of each layer, from its file if there is one."""
    about = dataclasses.asdict(sweep)
    if state := read_state(path, about):
        fits = []
        for layer, part in zip(layers(model), state["layers"], strict=True):
            projection, sbm = make_learned(layer.out_channels, layer.heads, sweep.dim)
            projection.load_state_dict(part.pop("projection"))
            sbm.load_state_dict(part.pop("sbm"))
            fits.append(Learned(projection=projection, sbm=sbm, **part))
        return fits
    samples = extract(model, tokens[: sweep.fit_sequences], sweep.hidden, BATCH, 10**6 * (1 + sweep.seed), "extract")
    fits = [learn(part, sweep.dim, sweep.epochs, sweep.seed, f"layer {number}") for number, part in enumerate(samples)]
    write_checkpoint(path, {"run": about, "layers": [fit.state() for fit in fits]})
    return fits


@torch.no_grad()
def measure_task(model: TokenClassifier, tokens: Tensor, hidden: float, sources: Sequence[GraphSource | None]) -> Row:
    """Accuracy and bits on hidden words with attention over the graphs of some sources, and sparsity of these graphs."""
    set_sources(model, sources)
    shares: list[float] = []
    with ExitStack() as after:
        after.callback(set_sources, model, [None] * len(sources))
        for source in filter(None, sources):
            hook = source.register_forward_hook(lambda _, inputs, out: shares.append(float(out.graph.density.mean())))
            after.callback(hook.remove)
        row = test_model(model, tokens, hidden, TESTED)
    return row | {"sparsity_used": 1 - fmean(shares) if shares else 0.0}


@torch.no_grad()
def measure_heads(source: GraphSource, samples: Sequence[Sample]) -> list[Row]:
    """How well a source predicts the true graphs, a row for each head: means over samples."""
    scores = []
    for at, (query, key, ground_truth) in enumerate(samples):
        graph = source(Tokens(query, key, ground_truth.query_ptr, ground_truth.key_ptr, bipartite=False, seed=at)).graph
        match = compare(ground_truth, graph.expand(ground_truth.heads))
        scores.append(torch.stack([match.recall, match.precision, match.sparsity, match.exact], 1))
    names = ("recall", "precision", "sparsity", "exact")
    return [dict(zip(names, head, strict=True)) for head in torch.stack(scores).mean(0).tolist()]


@torch.no_grad()
def measure_groups(name: str, knob: float, layer: Learned, samples: Sequence[Sample]) -> list[Row]:
    """Entropies of buckets or clusters for each head: of all keys, and of the keys that a query uses."""
    entropies = []
    for query, key, ground_truth in samples:
        x = layer.projection(query, key)[1]
        if name == "buckets":
            group = buckets(x, int(knob), ptr=ground_truth.key_ptr)
        elif name == "clusters":
            group = clusters(x, layer.centroids[int(knob)])
        else:
            return [{"entropy": "", "ground_truth_entropy": ""}] * ground_truth.heads
        both = (group_entropy(group, int(knob), graph).mean(1) for graph in (None, ground_truth))
        entropies.append(torch.stack([*both], 1))
    return [{"entropy": all_, "ground_truth_entropy": used} for all_, used in torch.stack(entropies).mean(0).tolist()]


def run(
    model: TokenClassifier, texts: Texts, sweep: Sweep, grid: Sequence[tuple[str, float, int]], folder: Path
) -> list[Learned]:
    """Measures what ``rows.csv`` does not have of the settings that are wanted; returns what was learned of each layer."""
    path, test = folder / "rows.csv", texts.test[: sweep.test_sequences]
    learned = load_or_learn(model, cut(texts.train, test.size(1)), sweep, folder / f"learnt-{sweep.seed}.pt")
    measured = {(row["source"], row["knob"], row["window"]) for row in read(path) if row["seed"] == sweep.seed}
    missing = [setting for setting in [("all", 0.0, 0), *grid] if setting not in measured]
    if not missing:
        return learned
    ground_truth = extract(model, test, sweep.hidden, TESTED, 0, "ground truth")
    with tqdm(missing, desc="sweep", unit="setting") as bar:
        for name, knob, window in bar:
            bar.set_postfix_str(f"{name} {knob:g}, window {window}")
            if name == "all":
                sources: list[Any] = [None] * len(learned)
                heads = [measure_all(samples) for samples in ground_truth]
            else:
                sources = [make(name, knob, window, layer) for layer in learned]
                heads = [measure_heads(source, samples) for source, samples in zip(sources, ground_truth, strict=True)]
            task = measure_task(model, test, sweep.hidden, sources)
            rows = []
            for number, (head_rows, layer, samples) in enumerate(zip(heads, learned, ground_truth, strict=True)):
                groups = measure_groups(name, knob, layer, samples)
                about = {"seed": sweep.seed, "source": name, "knob": knob, "window": window, "layer": number}
                both = enumerate(zip(head_rows, groups, strict=True))
                rows += [{**about, "head": head, **row, **group, **task} for head, (row, group) in both]
            add(path, rows)
    return learned


def measure_all(samples: Sequence[Sample]) -> list[Row]:
    """The row of dense attention; its sparsity is that of the true graphs, below which no edge can be spared."""
    sparsity = 1 - torch.stack([graph.density.mean(0) for _, _, graph in samples]).mean(0)
    return [{"recall": 1.0, "precision": 1.0, "sparsity": share, "exact": 1.0} for share in sparsity.tolist()]
