"""Finding repeated tokens (Cho et al. 2022, section 5.1 and figure 4): does sampled attention find the pairs that it needs?

Each of N tokens is drawn from N numbers; its label says whether its number occurs again. One layer with one head must
compare all tokens. Out: curves.json, curves.png, checkpoints, with which the same command goes on after a kill, bit for bit.

    python examples/repeated_tokens.py --quick    # 64 tokens, 1.5 minutes: full attention 99.99 %, ours 99.88 % at a density of 99.8 %
    python examples/repeated_tokens.py --quick --sparse --models sbm --output runs/sparse    # 1 minute: 99.66 % at a density of 12.3 %
    python examples/repeated_tokens.py --output runs/literal    # the paper's size, 90 minutes: ours 99.2 % at 98 %
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

if __package__ in (None, ""):  # run as a file: the root of the clone holds the package `examples`
    sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.common.attention import layer_options
from examples.common.command import Command, program
from examples.common.pictures import save_figure
from examples.common.runs import claim, random_word, read_state, settings_of, write_checkpoint, write_text
from sbm_pyg import AttentionConv, SequenceEncoder, TokenClassifier, auxiliary_loss
from sbm_pyg.training.estimators import Concrete
from sbm_pyg.training.gradients import score_function


@dataclass(frozen=True)
class Settings:
    """One run. The defaults are the paper's, where it states them."""

    attention: str = "sbm"  # or "full"
    tokens: int = 256  # of a sequence N, and numbers to draw from
    batch_size: int = 256
    steps: int = 2000
    learning_rate: float = 1e-3  # of Adam
    decay: int = 0  # 1: the rate falls linearly to nothing
    sbm_rate: float = 1.0  # learning rate of the block model, as a multiple
    position_scale: float = 0.1  # standard deviation of position embeddings at the start; that of tokens is 1
    num_clusters: int = 128
    estimator: str = "local"  # see sbm_pyg.training.estimators, or "score-function"
    probes: float = 16.0  # pairs per token in addition to the edges ("local")
    exploration: float = 0.0  # added to each probability in training
    parameterization: str = "paper"  # or "mixed", "assortative"
    cluster_init: str = "kaiming"  # at the start, or "orthogonal"
    temperature: float = 1.0  # of softmax memberships ("mixed", "assortative")
    tied: int = 0  # 1: keys take their memberships from queries
    density_weight: float = 0.0  # of the expected density in the loss
    seed: int = 0
    evaluate_every: int = 100


QUICK = Settings(tokens=64, batch_size=32, learning_rate=3e-3, decay=1, num_clusters=32)
SORTED: Any = {"parameterization": "assortative", "cluster_init": "orthogonal", "temperature": 0.3, "tied": 1}
SPARSE: dict[str, Any] = {**SORTED, "density_weight": 0.1, "decay": 1, "position_scale": 1.0}

command = Command(None, __doc__)
command.add_argument("--quick", action="store_true", help="64 tokens, 32 sequences, 32 blocks")
command.add_argument("--sparse", action="store_true", help="a block model that can solve the task sparsely")
command.option("models", ["full", "sbm"], choices=("full", "sbm"))
command.option("steps", Settings.steps, "optimizer steps", above=0)
command.option("seed", 0, "of everything random", least=0)
command.option("output", Path("runs/repeated-tokens"))


def make_batch(sequences: int, tokens: int, word: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers and labels, each ``[sequences, tokens]``, 1 where the number occurs again; and where each sequence starts."""
    numbers = torch.randint(tokens, (sequences, tokens), generator=torch.Generator().manual_seed(word))
    counts = torch.zeros(sequences, tokens).scatter_add_(1, numbers, torch.ones(sequences, tokens))
    return numbers, (counts.gather(1, numbers) > 1).float(), torch.arange(0, numbers.numel() + 1, tokens)


def make_model(settings: Settings) -> TokenClassifier:
    """One layer, one head, one logit per token."""
    torch.manual_seed(random_word(settings.seed, 2))
    options: dict[str, Any] = {}
    if settings.attention == "sbm":
        names = (
            "num_clusters",
            "probes",
            "exploration",
            "cluster_init",
            "parameterization",
            "temperature",
            "tied",
            "estimator",
        )
        options = {name: getattr(settings, name) for name in names} | {"window": None}
        if settings.estimator == "score-function":  # needs the probability of the whole graph
            options |= {"estimator": "none", "row_group": 1}
    sizes: dict[str, Any] = {"channels": 32, "num_layers": 1, "heads": 1, "max_length": settings.tokens, "dropout": 0.0}
    encoder = SequenceEncoder(
        settings.tokens, **sizes, attention=settings.attention, attention_options=layer_options(options)
    )
    torch.nn.init.normal_(encoder.position.weight, std=settings.position_scale)
    return TokenClassifier(encoder, 1)


@torch.no_grad()
def evaluate(model: TokenClassifier, settings: Settings) -> dict[str, float]:
    """Loss, accuracy, densities and the mean probabilities of edges between equal and between other tokens, on fresh sequences."""
    word, count = random_word(settings.seed, 1, 0), max(1, 16384 // settings.tokens)
    numbers, labels, ptr = make_batch(count, settings.tokens, word)
    logits, trace = model.eval()(numbers.flatten(), ptr, seed=settings.seed, return_trace=True)
    model.train()
    logits = logits.view(labels.shape)
    loss, is_correct = binary_cross_entropy_with_logits(logits, labels), (logits > 0) == (labels > 0)
    row = {"loss": float(loss), "accuracy": float(is_correct.float().mean())}
    row |= {"density": float(trace.density.mean()), "expected_density": float(trace.expected_density.mean())}
    equal, apart = numbers[:8, :, None] == numbers[:8, None], ~torch.eye(settings.tokens).bool()
    p = torch.ones(equal.shape)
    if trace.choices[0]:
        p = torch.stack([trace.choices[0].probability.edge_prob_dense(sequence)[0] for sequence in range(len(equal))])
    return row | {"p_equal": float(p[equal & apart].mean()), "p_other": float(p[~equal].mean())}


def step_loss(model: TokenClassifier, settings: Settings, step: int) -> tuple[Tensor, Tensor]:
    """What is minimized, and the task's loss in it."""
    numbers, labels, ptr = make_batch(settings.batch_size, settings.tokens, random_word(settings.seed, 0, step))
    layer = model.encoder.get_submodule("layers.0.attention")
    if isinstance(layer, AttentionConv) and isinstance(layer.estimator, Concrete):
        layer.estimator.temperature = max(0.1, 1 - step / settings.steps)
    logits, trace = model(numbers.flatten(), ptr, seed=random_word(settings.seed, 3, step), return_trace=True)
    losses = binary_cross_entropy_with_logits(logits.view(labels.shape), labels, reduction="none").mean(1)  # [B]
    loss = total = losses.mean()
    chosen, shares = trace.choices[0], losses / settings.batch_size
    if chosen and settings.density_weight:
        total = total + settings.density_weight * trace.density_loss()
    if chosen and settings.estimator == "score-function":
        total = total + score_function(chosen.probability, chosen.graph, shares, settings.exploration)
    return total, loss


def train(checkpoint: Path, settings: Settings) -> list[dict[str, float]]:
    """Trains one model, or goes on from its checkpoint, and returns its curve."""
    model, rates = make_model(settings), (settings.learning_rate, settings.learning_rate * settings.sbm_rate)
    parameters = [[p for name, p in model.named_parameters() if (".source." in name) == sbm] for sbm in (False, True)]
    optimizer = torch.optim.Adam([{"params": part} for part in parameters])
    if state := read_state(checkpoint, asdict(settings)):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    rows: list[dict[str, float]] = state.get("rows", [])
    start, losses = time.perf_counter() - (rows[-1]["seconds"] if rows else 0), []
    for step in range(int(rows[-1]["step"]) + 1 if rows else 1, settings.steps + 1):
        for rate, group in zip(rates, optimizer.param_groups, strict=True):
            group["lr"] = rate * (1 - (step - 1) / settings.steps if settings.decay else 1)
        total, loss = step_loss(model, settings, step)
        optimizer.zero_grad()
        (total + auxiliary_loss(model)).backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % settings.evaluate_every == 0 or step == settings.steps:
            row = {"step": step, "train_loss": float(torch.stack(losses).mean()), **evaluate(model, settings)}
            rows, losses = [*rows, {**row, "seconds": time.perf_counter() - start}], []
            state = {"run": asdict(settings), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            write_checkpoint(checkpoint, state | {"rows": rows})
            shown = ", ".join(f"{name} {row[name]:.4f}" for name in [*row][2:])
            print(f"{checkpoint.stem:<4} step {step:>5}: {shown}; {rows[-1]['seconds']:.0f} s", flush=True)
    return rows


def work(args: argparse.Namespace) -> Iterator[Path]:
    chosen = {**(SPARSE if args.sparse else {}), "steps": args.steps, "seed": args.seed}
    settings = replace(QUICK if args.quick else Settings(), **chosen)
    with claim(args.output, "repeated_tokens", settings_of(settings)):
        kinds = {name: (args.output / f"{name}.ckpt", replace(settings, attention=name)) for name in args.models}
        curves = {name: train(*kind) for name, kind in kinds.items()}
        write_text(args.output / "curves.json", json.dumps(curves, indent=1) + "\n")
        save_figure(args.output / "curves.png", draw(curves), dpi=150)
    print(f"curves, figure and checkpoints: {args.output}")
    yield from ()


def draw(curves: dict[str, list[dict[str, float]]]) -> Any:  # figure 4 of the paper
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, column in zip(figure.subplots(1, 2), ("loss", "density"), strict=True):
        for name, rows in curves.items():
            axes.plot([row["step"] for row in rows], [row[column] for row in rows], label=name)
        axes.set(xlabel="step", ylabel=column, ylim=(0, None if column == "loss" else 1.02))
        axes.legend(frameon=False)
    return figure


main = program(command.read, work)

if __name__ == "__main__":
    main()
