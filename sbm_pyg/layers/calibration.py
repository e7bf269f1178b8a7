"""Calibration: sources of a trained model learn from its dense attention, while other parameters are frozen.

In: a model whose attention has sources, and a few batches. Out: the same model, with sources that have learned, and the
density of each head. Not here: how attention gets sources (``replace``), the loss (``gradients``), and training with a
task (``sparsifier``).
"""

from __future__ import annotations

import copy
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..graphs.graph import AttentionGraph
from ..graphs.ragged import Tokens, count_pairs
from ..ops import checks
from ..progress import tqdm
from ..sources.dense import sample_rows
from ..sources.learned import DensitySource, LearnedSource
from ..sources.sampling import SBMSource
from ..training.estimators import AttentionCall, Estimator
from ..training.gradients import kept_attention, row_distillation, without_forced
from .attention import AttentionConv
from .normalizers import normalize

__all__ = ["CalibratedSource", "calibrate"]

TOKENS_OF_STEP = 1024
PAIRS_OF_STEP = 2**16
"""Largest number of pairs of a head in a step, unless its rows are longer."""
TOKENS_OF_START = 8192
MEASURED_ROWS = 4.0
"""Rows of a sequence in a measurement, in units of the square root of its length."""
MEASURED_PAIRS = 2**19
"""Largest number of pairs of a head in a measurement."""
LEAST_BUDGET = 0.05
"""Least density of a head, as a multiple of the target density."""
DENSITIES = torch.tensor([
    0, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1
])  # fmt: skip
"""Densities between which that of a head is interpolated."""


class CalibratedSource(NamedTuple):
    """Result of the calibration of one source, measured on the last batch."""

    layer: str
    """Name of the first layer with the source, as in ``model.named_modules()``."""
    loss_before: float
    """The loss before calibration. For a block model it is the part of the attention outside of forced edges that its
    graphs are expected to lose; for other learned sources, the cross-entropy between dense attention and normalized
    probabilities; for sources without parameters, NaN."""
    loss: float
    """The same afterwards."""
    kept_before: float
    """Part of the dense attention weights on edges of graphs of the target density, before calibration."""
    kept: float
    """The same afterwards."""


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    density: float | None = None,
    by_head: bool | None = None,
    steps: int = 200,
    learning_rate: float = 1e-2,
    forward: Callable[[Any], Any] | None = None,
    directory: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> list[CalibratedSource]:
    """Fit the sources of a trained model to the keys that its dense attention attends to.

    The model is frozen and needs no labels. It runs densely once over the batches, and queries and keys of each layer
    are stored. From these the target density is divided among the heads of the whole model, so that the largest weights
    of all heads together keep most of the attention: heads that attend to many keys get more edges. Each learned source
    is then initialized by :meth:`~sbm_pyg.LearnedSource.start_from`, and trained by Adam on the stored queries and
    keys: block models raise :func:`~sbm_pyg.gradients.kept_attention` at the density of each head, other sources lower
    :func:`~sbm_pyg.gradients.row_distillation`. So a step costs a part of one layer, and not a forward and a backward
    pass of the model. Afterwards the model attends sparsely.

    Args:
        model: A module with :class:`AttentionConv` layers, such as a model of transformers, PyG or torch after
            :func:`replace_attention`. The model is changed in place, and stays in training or evaluation mode.
        batches: Inputs of the model: a dict is passed as ``model(**batch)``, a tuple or list as ``model(*batch)``, any
            other object as ``model(batch)``. Some 8,000 tokens of typical text or graphs are enough, in sequences of
            the typical length: a block model that is calibrated on 1,024 tokens may draw two to five times its density
            of edges at 2,048. The last batch measures and does not train, unless it is the only one.
        density: Target density of the sources afterwards, in (0, 1). None: each source keeps its own density.
        by_head: Whether to divide the density among the heads, by :attr:`~sbm_pyg.DensitySource.head_budgets`. None:
            True for sources that rank keys by scores of pairs, which are ``"top_k"``, indexers and block models with
            ``candidates``; False for sources that only draw edges, which did not gain by it.
        steps: Steps of each source, on some 1,024 tokens each. 0: sources are initialized and not trained.
        learning_rate: Largest rate of Adam, which rises and falls in one cycle.
        forward: Function that calls the model with a batch, in place of the rules above.
        directory: Folder with a file for each finished source; a call with the same model, batches and options
            continues from these files, and gives the same bits on the same machine. Tokens that do not fit into half of
            the available memory are also stored there during the call. None: no files are kept, and these tokens are
            stored in the system's folder of temporary files.
        seed: Seed of the order, the rows and the clusters.
        progress: Show progress bars, with the part of the attention that graphs of the target density keep.

    Returns:
        A row for each source, in the order of the model.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The model has no source to fit, or a source without a target density below 1; there are no batches,
            or a source is never called on them; a number is out of range; or the directory belongs to another
            calibration.

    Example:
        >>> import torch
        >>> from sbm_pyg import calibrate, replace_attention
        >>> model = torch.nn.TransformerEncoderLayer(32, nhead=2, batch_first=True)  # in place of a trained model
        >>> names = replace_attention(model, source="sbm", parameterization="linear", num_clusters=8)
        >>> rows = calibrate(model, [torch.randn(4, 40, 32) for _ in range(3)], density=0.2, steps=5, progress=False)
        >>> rows[0].layer, model.self_attn.conv.source.target_density
        ('self_attn.conv', 0.2)
    """
    checks.kind("model", model, nn.Module, "a module", "Pass a model of torch.")
    steps = checks.integer("steps", steps, 0, "It is a number of steps of each source.")
    checks.number("learning_rate", learning_rate, "(0, inf)", "It is the largest rate of Adam.")
    if density is not None:
        checks.number("density", density, "(0, 1)", "It is the target density afterwards.")
    if by_head is not None:
        checks.flag("by_head", by_head, "It says whether heads have densities of their own.")
    seed = checks.seed(seed)
    layers = {name: part for name, part in model.named_modules() if isinstance(part, AttentionConv)}
    layers = {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer.source, LearnedSource) or _divides(layer.source, by_head)
    }
    way_out = "Call `replace_attention` first, with source='sbm', 'indexer' or 'top_k'."
    checks.require(layers, "model", "to have layers with a source to fit", "none", way_out)
    names: dict[DensitySource, str] = {}
    for name, layer in layers.items():
        assert isinstance(layer.source, DensitySource)
        names.setdefault(layer.source, name)
    dense = [name for source, name in names.items() if density is None and source.target_density == 1]
    checks.require(not dense, "density", "to be a number", f"None, and {dense[:1]} is dense", "Pass one, as 0.05.")
    folder = None if directory is None else Path(directory)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    rows: list[CalibratedSource] = []
    with tempfile.TemporaryDirectory(prefix="calibrate-", dir=folder) as storage:
        store = _Store([*names], Path(storage))
        _record(model, [*layers.values()], batches, forward, store, progress)
        unreached = [name for source, name in names.items() if not store.calls[source]]
        checks.require(not unreached, "batches", "to reach each source", f"none for {unreached[:3]}", "Pass others.")
        settings = {"sources": [*names.values()], "density": density, "by_head": by_head, "steps": steps}
        settings["learning_rate"] = learning_rate
        if folder is not None:
            _check_settings(folder / "settings.json", settings | {"seed": seed, "batches": store.marks()})
        divided = {source: calls for source, calls in store.calls.items() if _divides(source, by_head)}
        budgets = _divide_density(divided, density, progress)
        with tqdm(total=len(names) * max(steps, 1), desc="calibrate", unit="step", disable=not progress) as bar:
            for number, (source, name) in enumerate(names.items()):
                path = None if folder is None else folder / f"{number:03d}.safetensors"
                if path is None or not path.exists():
                    how = (density, budgets.get(source), steps, learning_rate, seed, bar)
                    state, numbers = _calibrated(source, store.calls[source], *how)
                    if path is not None:
                        _save(path, state, numbers)
                else:
                    state, numbers = load_file(path), json.loads(path.with_suffix(".json").read_text())
                    bar.update(max(steps, 1))
                if density is not None:
                    source.target_density, source.schedule = density, None
                source.load_state_dict(state, strict=False)
                rows.append(CalibratedSource(name, *numbers))
                bar.set_postfix_str(f"{name} keeps {rows[-1].kept:.3f} of attention, before {rows[-1].kept_before:.3f}")
    return rows


def _divides(source: object, by_head: bool | None) -> bool:
    """Whether the density of a source is divided among its heads."""
    if by_head is False or not getattr(source, "has_head_budgets", False):
        return False
    draws = source.candidates == 1 if isinstance(source, SBMSource) else getattr(source, "select", "") == "bernoulli"
    return by_head is True or not draws


# ------------------------------------------------------------------ what the model does


class _StoredCall(NamedTuple):
    """A stored call of a layer: the tokens of its source, and the inputs of its scores."""

    vectors: tuple[Tensor, ...] | Path  # queries and keys, and those of the scores if they are others
    layout: tuple[Any, ...]  # of Tokens
    scale: float
    score_bias: Any

    def read(self, seed: int) -> tuple[Tokens, dict[str, Any]]:
        """The tokens in float32, and the arguments of the loss."""
        vectors = torch.load(self.vectors, mmap=True) if isinstance(self.vectors, Path) else self.vectors
        query, key, *others = (x.float() for x in vectors)
        query_ptr, key_ptr, bipartite, is_causal = self.layout
        tokens = Tokens._trusted(query, key, query_ptr, key_ptr, bipartite, is_causal, seed, None)
        scored = tokens.with_vectors(*others) if others else None
        return tokens, {"scale": self.scale, "scored": scored, "score_bias": self.score_bias}


class _Store:
    """The calls of each source. Vectors are stored on disk once they fill half of the memory."""

    def __init__(self, sources: list[DensitySource], folder: Path) -> None:
        self.calls: dict[DensitySource, list[_StoredCall]] = {source: [] for source in sources}
        self.folder, self.free, self.count = folder, -1.0, 0

    def add(self, call: AttentionCall) -> None:
        """Store a call of a layer."""
        tokens, source = call.tokens, call.source
        assert tokens is not None
        assert isinstance(source, DensitySource)
        vectors: tuple[Tensor, ...] = tokens.query, tokens.key
        if call.query is not tokens.query or call.key is not tokens.key:
            vectors += (call.query, call.key)
        vectors = tuple(x.detach().contiguous() for x in vectors)
        self.free = checks.available(vectors[0].device) / 2 if self.free < 0 else self.free
        self.free -= sum(x.nbytes for x in vectors)
        self.count += 1
        path = self.folder / f"{self.count}.pt"
        if self.free < 0:
            self.free = 0
            torch.save(tuple(x.clone() for x in vectors), path)
        layout = (tokens.query_ptr, tokens.key_ptr, tokens.bipartite, tokens.is_causal)
        self.calls[source].append(_StoredCall(path if path.exists() else vectors, layout, call.scale, call.score_bias))

    def marks(self) -> list[float]:
        """One number from each call of the first source, by which batches are recognized."""
        calls = next(iter(self.calls.values()))
        return [float(call.read(0)[0].query[:, -1].double().sum()) for call in calls]


class _Recorder(Estimator):
    """Stores dense calls of a layer, in place of its estimator."""

    def __init__(self, store: _Store) -> None:
        self.store = store

    def learns(self, training: bool) -> bool:
        return True

    def dense_loss(self, call: AttentionCall) -> Tensor | None:
        self.store.add(call)
        return None


@torch.no_grad()
def _record(
    model: nn.Module, layers: list[AttentionConv], batches: Iterable[Any], forward: Any, store: _Store, progress: bool
) -> None:
    """Call the model with each batch, densely and in evaluation mode."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    count = 0
    with (
        _attending_densely(model, layers, _Recorder(store)),
        tqdm(batches, "record", unit="batch", disable=not progress) as bar,
    ):
        for batch in bar:
            count += 1
            batch = batch.to(device) if hasattr(batch, "to") else tree_map_only(Tensor, lambda x: x.to(device), batch)
            if forward is not None:
                forward(batch)
            elif isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, tuple | list):
                model(*batch)
            else:
                model(batch)
    checks.require(count, "batches", "to be at least one", "none", "An iterator that is used up has none: make a list.")


@contextmanager
def _attending_densely(model: nn.Module, layers: list[AttentionConv], recorder: Estimator) -> Iterator[None]:
    """A context in which the model is in evaluation mode, and its layers attend densely with another estimator."""
    modes = {module: module.training for module in model.modules()}
    estimators = [layer.estimator for layer in layers]
    sources = {layer.source for layer in layers if isinstance(layer.source, DensitySource)}
    densities = {source: (source._density, source.schedule) for source in sources}
    try:
        model.eval()
        for layer in layers:
            layer.estimator = recorder
        for source in sources:
            source.schedule, source._density = None, 1.0
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for layer, estimator in zip(layers, estimators, strict=True):
            layer.estimator = estimator
        for source, (density, schedule) in densities.items():
            source._density, source.schedule = density, schedule


# ------------------------------------------------------------------ the density of each head


@torch.no_grad()
def _divide_density(
    calls: Mapping[DensitySource, list[_StoredCall]], density: float | None, progress: bool
) -> dict[DensitySource, Tensor]:
    """Budgets of the heads of each source, ``[H]``, for which the largest weights keep most attention.

    The attention that the largest weights of a head keep is a concave function of their number. So the best division
    takes the steepest parts of the functions of all heads.
    """
    sources = [source for source in calls if density or source.target_density]
    curves = []
    for source in tqdm(sources, "divide the density", unit="source", disable=not progress):
        examples = calls[source][:-1] or calls[source]
        curves.append(torch.stack([_kept_by_density(source, call) for call in examples]).sum(0))  # [H, 1 + G]
    if not curves:
        return {}
    on_cpu = torch.cat([curve.cpu() for curve in curves])
    pairs, kept = (x.double() for x in on_cpu.split([1, len(DENSITIES)], 1))  # [H of all, 1], [H of all, G]
    targets = torch.cat([
        torch.full((len(curve), 1), density or source.target_density or 1.0)
        for source, curve in zip(sources, curves, strict=True)
    ])  # fmt: skip
    width = DENSITIES.diff() * pairs  # edges of each part of a function
    gain = kept.diff(dim=1) / width.clamp(min=1e-9)
    least = LEAST_BUDGET * targets
    free = ((targets - least) * pairs).sum()
    order = gain.flatten().argsort(descending=True, stable=True)
    edges = width.flatten()[order]
    edges = (free - (edges.cumsum(0) - edges)).clamp(min=0).minimum(edges)  # the parts that are taken
    taken = torch.zeros_like(gain).flatten().index_copy(0, order, edges).view_as(gain).sum(1, keepdim=True)
    budgets = ((least + taken / pairs.clamp(min=1)) / targets)[:, 0].float()
    parts = budgets.split([len(curve) for curve in curves])
    return {source: part.to(curve.device) for source, part, curve in zip(sources, parts, curves, strict=True)}


def _kept_by_density(source: DensitySource, call: _StoredCall) -> Tensor:
    """Pairs of some rows of a call, and the attention that the largest weights outside of forced edges keep.

    ``[H, 1 + G]``, for the G densities.
    """
    tokens, weight, graph = _weights_of_rows(call, 1.0)
    weight = without_forced(weight, 0.0, source, tokens, graph)
    order = weight.argsort(descending=True, stable=True)
    order = order[graph.edge_row[order].argsort(stable=True)]  # by row, then the largest first
    total = torch.cat([weight.new_zeros(1, dtype=torch.float64), weight[order].double().cumsum(0)])
    size = graph.rowptr.diff()
    count = (DENSITIES.to(size.device) * size[:, None]).round().long()  # [H*N, G]
    kept = total[graph.rowptr[:-1, None] + count] - total[graph.rowptr[:-1, None]]
    return torch.cat([size[:, None].double(), kept], 1).view(graph.heads, graph.num_queries, -1).sum(1)


def _weights_of_rows(call: _StoredCall, rows: float) -> tuple[Tokens, Tensor, AttentionGraph]:
    """The tokens of a call, the graph of some full rows, and the attention weights of its edges, ``[E]``."""
    tokens, how = call.read(0)
    scored = how["scored"] or tokens
    graph = sample_rows(tokens, min(rows, MEASURED_PAIRS / _pairs_of_rows(tokens)))
    bias = None if call.score_bias is None else call.score_bias(scored.query, scored.key, graph)
    logits = graph._logits(scored.query, scored.key, bias, call.scale)
    return tokens, normalize("softmax", logits[:, None], ptr=graph.rowptr)[:, 0], graph


# ------------------------------------------------------------------ what a source learns


def _calibrated(
    source: DensitySource,
    calls: list[_StoredCall],
    density: float | None,
    budgets: Tensor | None,
    steps: int,
    rate: float,
    seed: int,
    bar: Any,
) -> tuple[dict[str, Tensor], list[float]]:
    """The state of a calibrated copy of a source, and the values of its row of results."""
    source = copy.deepcopy(source).float().eval()
    source.schedule = None
    if density is not None:
        source.target_density = density
    examples, held_out = calls[:-1] or calls, calls[-1]
    _settle(source, examples)
    before = _held_out_numbers(source, held_out)
    if budgets is not None:
        source.head_budgets = budgets
    if isinstance(source, LearnedSource):
        _train(source, examples, steps, rate, seed, bar)
    else:
        bar.update(max(steps, 1))
    _settle(source, examples)
    after = _held_out_numbers(source, held_out)
    state = {name: x for name, x in source.state_dict().items() if not name.endswith("target_density")}
    return state, [number for pair in zip(before, after, strict=True) for number in pair]


def _train(source: LearnedSource, examples: list[_StoredCall], steps: int, rate: float, seed: int, bar: Any) -> None:
    """Initialize a source from the queries and keys of some calls, and train it by Adam."""
    _start(source, examples, seed)
    random = torch.Generator().manual_seed(seed % 2**63)
    parameters = [parameter.requires_grad_() for parameter in source.parameters()]
    optimizer = torch.optim.Adam(parameters, rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, max(steps, 1) + 1, pct_start=0.1)
    with torch.enable_grad():
        for _ in range(steps):
            at, draw = (int(torch.randint(most, (), generator=random)) for most in (len(examples), 2**62))
            optimizer.zero_grad()
            _loss(source, examples[at], draw).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            bar.update()
    bar.update(0 if steps else 1)


def _loss(source: LearnedSource, call: _StoredCall, seed: int) -> Tensor:
    """Loss over some rows of about 1,024 tokens of a call; for a block model, the attention that is lost."""
    tokens, how = call.read(seed)
    part = min(1.0, TOKENS_OF_STEP / max(tokens.num_keys, 1))
    if getattr(call.score_bias, "is_of_batch", False):  # it reads numbers of tokens, which a part of them lacks
        part = 1.0
    sequences = tokens.query_ptr.numel() - 1
    share = math.ceil(part * sequences) / sequences
    rows = min(1.0, PAIRS_OF_STEP / (share * _pairs_of_rows(tokens)))
    how |= {"rows": rows * share, "part": part}
    density = source._drawn_densities if isinstance(source, SBMSource) and source.block_size == 1 else None
    if density is not None:
        density = density[:, 0].clamp(max=0.999) if isinstance(density, Tensor) else min(density, 0.999)
        return 1 - kept_attention(source, tokens, density, **how)
    return row_distillation(source, tokens, **how)


def _pairs_of_rows(tokens: Tokens) -> float:
    """All pairs of sampled rows of each sequence; their number is the square root of its length, at least 1."""
    length = tokens.query_ptr.diff()
    pairs = count_pairs(tokens.query_ptr, tokens.key_ptr, tokens.is_causal) / length.clamp(min=1).sqrt()
    return max(float(pairs.sum()), 1.0)


@torch.no_grad()
def _start(source: LearnedSource, calls: list[_StoredCall], seed: int) -> None:
    """Initialize a source from the queries and keys of the first tokens."""
    sides: list[tuple[Tensor, Tensor]] = []
    for call in calls:
        tokens, _ = call.read(0)
        sides.append((tokens.query, tokens.key))
        if sum(query.size(1) for query, _ in sides) >= TOKENS_OF_START:
            break
    query, key = (torch.cat(parts, 1) for parts in zip(*sides, strict=True))
    source.start_from(query, key, scale=calls[0].scale, seed=seed)


def _settle(source: DensitySource, calls: list[_StoredCall]) -> None:
    if isinstance(source, LearnedSource):
        source.settle(call.read(0)[0] for call in calls)


@torch.no_grad()
def _held_out_numbers(source: DensitySource, call: _StoredCall) -> tuple[float, float]:
    """The loss of a call, and the part of the attention weights of some rows that its graphs keep."""
    loss = _loss(source, call, 0) if isinstance(source, LearnedSource) else math.nan
    tokens, weight, pairs = _weights_of_rows(call, MEASURED_ROWS)
    graph = source(tokens).graph.expand_tokens().expand(tokens.heads)
    kept = weight[graph.contains(pairs.edge_index, pairs.edge_head)].sum() / weight.sum().clamp(min=1e-9)
    return float(loss), float(kept)


# ------------------------------------------------------------------ files


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a calibration, or compare them with settings that were written before."""
    if not path.exists():
        _write(path, json.dumps(settings, indent=1))
        return
    before = json.loads(path.read_text())
    of_batches = before.pop("batches"), (settings := {**settings}).pop("batches")
    same = len(of_batches[0]) == len(of_batches[1])
    same = same and all(math.isclose(*pair, rel_tol=1e-2, abs_tol=1e-2) for pair in zip(*of_batches, strict=True))
    changed = [name for name in settings if settings[name] != before.get(name)] + ([] if same else ["batches"])
    way_out = "Pass the same ones in the same order to go on, or another folder."
    checks.require(not changed, "directory", "to be that of this calibration", f"another {changed}", way_out)


def _save(path: Path, state: Mapping[str, Tensor], numbers: list[float]) -> None:
    """Write the files of a source; the file that marks the source as finished is written last."""
    _write(path.with_suffix(".json"), json.dumps(numbers))
    draft = path.with_suffix(".draft")
    save_file({name: x.contiguous() for name, x in state.items()}, draft)
    draft.replace(path)


def _write(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)
