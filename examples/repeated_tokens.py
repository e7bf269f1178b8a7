"""Finding repeated tokens (Cho et al. 2022, section 5.1 and figure 4): does sampled attention find the pairs that it needs?

In: settings. Out: a folder with the curves of each model as CSV, checkpoints, results and the figure. Not here: the study over estimators
and seeds (``learning_study.py``), which calls :func:`train`::

    python examples/repeated_tokens.py --quick          # 64 tokens, two minutes
    python examples/repeated_tokens.py                  # the paper's size: 256 tokens, 2,000 steps of 256 sequences
    python examples/repeated_tokens.py --sparse --models sbm
    python examples/repeated_tokens.py --output runs/repeated-tokens-1 --resume

Each of N tokens is drawn from N numbers; the label of a token is whether its number occurs again. One layer with one head must compare each
token with all others. Batches are made on the fly; batch and graphs are functions of the seed and the step, so that a resumed run ends with
the bits of one that never stopped.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import os
import sys
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lra_batches import random_word
from lra_files import path_argument


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """One run. The defaults are the paper's, where it states them."""

    attention: str = _setting("sbm", "sbm or full")
    tokens: int = _setting(256, "tokens of a sequence N, and numbers to draw from")
    batch_size: int = _setting(256, "sequences per step")
    steps: int = _setting(2000, "optimiser steps")
    learning_rate: float = _setting(1e-3, "of Adam")
    decay: int = _setting(0, "1: the learning rate falls linearly to nothing")
    sbm_rate: float = _setting(1.0, "learning rate of the block model, as a multiple")
    channels: int = _setting(32, "width of the only layer and head")
    position_scale: float = _setting(0.1, "standard deviation of position embeddings at the start; that of tokens is 1")
    num_blocks: int = _setting(128, "blocks K")
    estimator: str = _setting("local", "gradient of edge probabilities; see sbm_pyg.estimators, or score-function")
    probes: float = _setting(16.0, "pairs per token looked at beside the edges (local)")
    exploration: float = _setting(0.0, "added to each probability in training")
    exploration_until: float = _setting(0.0, "exploration falls linearly to nothing in this share of the steps; 0: it stays")
    parameterization: str = _setting("paper", "paper, mixed or assortative")
    clusters: str = _setting("kaiming", "start of the clusters: kaiming or orthogonal")
    density: float = _setting(0.25, "edge probability at the start (paper, mixed)")
    temperature: float = _setting(1.0, "of softmax memberships (mixed, assortative)")
    tied: int = _setting(0, "1: keys take their memberships from queries")
    density_weight: float = _setting(0.0, "weight of the expected density in the loss")
    seed: int = _setting(0, "of everything random")
    evaluate_every: int = _setting(100, "steps between two rows of the curve")

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_size", "steps", "channels", "num_blocks", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"Expected '{name.replace('_', '-')}' to be at least 1 (got {getattr(self, name)}).")
        if self.attention not in ("sbm", "full"):
            raise ValueError(f"Expected 'attention' to be 'sbm' or 'full' (got {self.attention!r}).")


QUICK = Settings(tokens=64, batch_size=32, steps=2000, learning_rate=3e-3, decay=1, num_blocks=32)
SPARSE: dict[str, Any] = {
    "parameterization": "assortative",
    "clusters": "orthogonal",
    "temperature": 0.3,
    "tied": 1,
    "density_weight": 0.1,
    "decay": 1,
    "position_scale": 1.0,
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line; settings that are not given are absent from the result."""
    parser = argparse.ArgumentParser(
        description="Trains on the repeated-token task and draws loss and density.", argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--quick", action="store_true", help="64 tokens, 32 sequences, 32 blocks: two minutes")
    parser.add_argument("--sparse", action="store_true", help=f"a block model that can solve it sparsely: {SPARSE}")
    parser.add_argument("--models", nargs="+", choices=("full", "sbm"), default=["full", "sbm"], help="(default: both)")
    parser.add_argument("--output", type=path_argument, metavar="DIR", help="folder of the run (default: a new one in runs/)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --output; its settings are known")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: as torch chooses)")
    group = parser.add_argument_group("settings")
    for setting in fields(Settings):
        if setting.name != "attention":
            kind = {"int": int, "float": float, "str": str}[str(setting.type)]
            text = f"{setting.metadata['help']} ({setting.default}; quick: {getattr(QUICK, setting.name)})"
            group.add_argument("--" + setting.name.replace("_", "-"), type=kind, help=text)
    parsed = parser.parse_args(arguments)
    parsed.fail = parser.error
    return parsed


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm.auto import tqdm

from density_guard import DensityGuard
from sbm_pyg import SBMAttentionConv, SequenceEncoder, TokenClassifier
from sbm_pyg.estimators import score_function

COLUMNS = ("step", "train_loss", "loss", "accuracy", "density", "expected_density", "p_equal", "p_other", "empty_rows", "seconds")
TRIAL, VALIDATION = 0, 1  # what a random word is for


def make_batch(sequences: int, tokens: int, word: int) -> tuple[Tensor, Tensor]:
    """Numbers and labels, each ``[sequences, tokens]``: int64 in ``0 .. tokens-1``, and float 1 where the number occurs again."""
    numbers = torch.randint(tokens, (sequences, tokens), generator=torch.Generator().manual_seed(word))
    counts = torch.zeros(sequences, tokens).scatter_add_(1, numbers, torch.ones(sequences, tokens))
    return numbers, (counts.gather(1, numbers) > 1).float()


def make_model(settings: Settings) -> TokenClassifier:
    """One layer, one head, one logit per token."""
    torch.manual_seed(random_word(settings.seed, 2))
    options: dict[str, Any] = {}
    if settings.attention == "sbm":
        options = {name: getattr(settings, name) for name in ("num_blocks", "probes", "exploration", "clusters")}
        options["estimator"] = "none" if settings.estimator == "score-function" else settings.estimator
        names = ("parameterization", "density", "temperature")
        options["sbm_options"] = {name: getattr(settings, name) for name in names} | {"tied": bool(settings.tied)}
    encoder = SequenceEncoder(
        settings.tokens, settings.channels, num_layers=1, heads=1, max_length=settings.tokens, dropout=0.0, attention=settings.attention,
        attention_options=options,
    )  # fmt: skip
    torch.nn.init.normal_(encoder.position.weight, std=settings.position_scale)
    return TokenClassifier(encoder, 1)


def call(model: TokenClassifier, numbers: Tensor, seed: int) -> tuple[Tensor, Any]:
    """Logits ``[B, N]`` and the trace."""
    ptr = torch.arange(0, numbers.numel() + 1, numbers.size(1))
    logits, trace = model(numbers.flatten(), ptr, seed=seed, return_trace=True)
    return logits.view(numbers.shape), trace


@torch.no_grad()
def evaluate(model: TokenClassifier, settings: Settings) -> dict[str, float]:
    """Loss, accuracy, densities and the mean probabilities of edges between equal and between other tokens, on fresh sequences."""
    model.eval()
    sequences = max(1, 16384 // settings.tokens)
    numbers, labels = make_batch(sequences, settings.tokens, random_word(settings.seed, VALIDATION, 0))
    logits, trace = call(model, numbers, settings.seed)
    model.train()
    row = {
        "loss": float(binary_cross_entropy_with_logits(logits, labels)),
        "accuracy": float(((logits > 0) == (labels > 0)).float().mean()),
        "density": float(trace.density.mean()),
        "expected_density": float(trace.expected_density.mean()),
        "p_equal": 1.0,
        "p_other": 1.0,
        "empty_rows": 0.0,
    }
    if trace.sbms[0] is not None:
        equal = numbers[:8, :, None] == numbers[:8, None]
        itself = torch.eye(settings.tokens, dtype=torch.bool)
        p = torch.stack([trace.sbms[0].edge_prob_dense(b)[0] for b in range(len(equal))])
        row["p_equal"] = float(p[equal & ~itself].mean())
        row["p_other"] = float(p[~equal].mean())
        row["empty_rows"] = float((trace.graphs[0].degree == 0).float().mean())
    return row


def step_loss(model: TokenClassifier, settings: Settings, step: int) -> tuple[Tensor, Tensor, Any]:
    """What is minimised, the task's loss in it, and the trace."""
    numbers, labels = make_batch(settings.batch_size, settings.tokens, random_word(settings.seed, TRIAL, step))
    layer = model.encoder.get_submodule("blocks.0.attention")
    if isinstance(layer, SBMAttentionConv):
        if settings.exploration_until:
            layer.exploration = settings.exploration * max(0.0, 1 - step / (settings.exploration_until * settings.steps))
        layer.temperature = max(0.1, 1 - step / settings.steps)  # of the estimator "concrete"
    logits, trace = call(model, numbers, random_word(settings.seed, 3, step))
    losses = binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)  # [B]
    loss = total = losses.mean()
    if settings.density_weight and settings.attention == "sbm":
        total = total + settings.density_weight * trace.density_loss()
    if settings.estimator == "score-function" and settings.attention == "sbm":
        total = total + score_function(trace.sbms[0], trace.graphs[0], losses / settings.batch_size, settings.exploration)
    return total, loss, trace


def train(folder: Path, name: str, settings: Settings, *, progress: bool = True) -> list[dict[str, float]]:
    """Trains one model, or goes on from its last checkpoint, and returns its curve, which is also in ``<name>.csv``.

    Args:
        folder: Of the run; made if it is absent.
        name: Of the model's files.
        settings: How.
        progress: Whether to show a bar.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, table = folder / f"{name}.ckpt", folder / f"{name}.csv"
    model = make_model(settings)
    rates = {False: settings.learning_rate, True: settings.learning_rate * settings.sbm_rate}
    groups: list[dict[str, Any]] = [
        {"params": [p for key, p in model.named_parameters() if (".sbm." in key) == own], "lr": rate} for own, rate in rates.items()
    ]
    optimizer = torch.optim.Adam(groups)
    for group in optimizer.param_groups:
        group["initial"] = group["lr"]
    rows: list[dict[str, float]] = []
    done, before, guard = 0, 0.0, DensityGuard()
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["settings"] != dataclasses.asdict(settings):
            different = [key for key, value in dataclasses.asdict(settings).items() if state["settings"].get(key) != value]
            raise ValueError(f"Expected the settings of {checkpoint} (got other {', '.join(different)}). Use another --output.")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        rows, done = state["rows"], state["step"]
        before = rows[-1]["seconds"]
    start, losses = time.perf_counter(), []
    with tqdm(total=settings.steps, initial=done, desc=name, unit="step", disable=not progress) as bar:
        for step in range(done + 1, settings.steps + 1):
            total, loss, trace = step_loss(model, settings, step)
            for group in optimizer.param_groups:
                group["lr"] = group["initial"] * (1 - (step - 1) / settings.steps if settings.decay else 1)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            losses.append(loss.detach())
            bar.update()
            if step % settings.evaluate_every == 0 or step == settings.steps:
                guard.check(trace, step)
                row = {"step": step, "train_loss": float(torch.stack(losses).mean()), **evaluate(model, settings)}
                row["seconds"] = before + time.perf_counter() - start
                losses = []
                rows.append(row)
                bar.set_postfix_str(f"loss {row['loss']:.4f}, accuracy {row['accuracy']:.4f}, density {row['density']:.3f}")
                state = {
                    "model": model.state_dict(), "optimizer": optimizer.state_dict(), "rows": rows, "step": step,
                    "settings": dataclasses.asdict(settings),
                }  # fmt: skip
                torch.save(state, checkpoint.with_suffix(".partial"))
                os.replace(checkpoint.with_suffix(".partial"), checkpoint)
                write_curve(table, rows)
    return rows


def write_curve(path: Path, rows: list[dict[str, float]]) -> None:
    """Writes a curve as CSV, whole or not at all."""
    draft = path.with_suffix(".partial")
    with draft.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([[f"{row[column]:.6g}" for column in COLUMNS] for row in rows])
    os.replace(draft, path)


def read_curve(path: Path) -> list[dict[str, float]]:
    """Reads what :func:`write_curve` wrote."""
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def plot(path: Path, curves: dict[str, list[dict[str, float]]]) -> None:
    """Loss and density over the steps, one line a model: figure 4 of the paper."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, rows in curves.items():
        steps = [row["step"] for row in rows]
        left.plot(steps, [row["loss"] for row in rows], label=name)
        right.plot(steps, [row["density"] for row in rows], label=name)
    left.set(xlabel="step", ylabel="loss", ylim=(0, None))
    right.set(xlabel="step", ylabel="mask density", ylim=(0, 1.02))
    left.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; ``--help`` explains it."""
    given = parse(arguments)
    options = vars(given)
    try:
        folder: Path | None = options.get("output")
        if "resume" in options:
            if folder is None or not (folder / "settings.json").is_file():
                raise ValueError(f"Expected 'output' to be the folder of a run to resume (got {folder}). It holds a settings.json.")
            plan = json.loads((folder / "settings.json").read_text())
            settings, models = Settings(**plan["settings"]), plan["models"]
        else:
            if folder is not None and folder.exists() and any(folder.iterdir()):
                raise ValueError(f"Expected 'output' to be a new or empty folder (got {folder}, which has content). Add --resume to go on.")
            changes = SPARSE if "sparse" in options else {}
            chosen = {f.name: options[f.name] for f in fields(Settings) if f.name in options}
            settings, models = replace(QUICK if "quick" in options else Settings(), **{**changes, **chosen}), given.models
        if options.get("threads", 1) < 1:
            raise ValueError(f"Expected 'threads' to be at least 1 (got {options['threads']}). Leave it out for the default.")
        make_model(settings)  # refuses what cannot be trained before anything is written
    except ValueError as error:
        given.fail(str(error))
    if "threads" in options:
        torch.set_num_threads(options["threads"])
    if folder is None:
        folder = next(p for p in (Path("runs") / f"repeated-tokens-{n}" for n in itertools.count(1)) if not p.exists())
    folder.mkdir(parents=True, exist_ok=True)
    plan = {"settings": dataclasses.asdict(settings), "models": models}
    (folder / "settings.json").write_text(json.dumps(plan, indent=2) + "\n")
    curves = {name: train(folder, name, replace(settings, attention=name)) for name in models}
    plot(folder / "curves.png", curves)
    (folder / "results.json").write_text(json.dumps({name: rows[-1] for name, rows in curves.items()}, indent=2) + "\n")
    print(f"{'model':<6} {'loss':>8} {'accuracy':>9} {'density':>8} {'p equal':>8} {'p other':>8} {'minutes':>8}")
    for name, rows in curves.items():
        row = rows[-1]
        print(
            f"{name:<6} {row['loss']:>8.4f} {row['accuracy']:>9.4f} {row['density']:>8.3f} {row['p_equal']:>8.3f} {row['p_other']:>8.3f} "
            f"{row['seconds'] / 60:>8.1f}"
        )
    print(f"curves, figure and checkpoints: {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
