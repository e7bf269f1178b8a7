"""Whole encoders over one long document, by its length: time and peak memory of a training step and of inference.

    python -m examples.benchmarks.documents                          1,024 to 16,384 tokens, on one thread
    python -m examples.benchmarks.documents --tokens 4096 --arms full sbm --rounds 3

Encoders of this library (a classifier) have full attention, a window, or a block model at the density of the window; those of Hugging Face
are BERT with torch's SDPA, BERT over the same block model, and Longformer, whose window has as many keys. All have the same number of
layers, heads and channels, learned positions, and no dropout of attention. First, the encoder of the block model must agree with full
attention over a graph of all pairs. Each turn is a process of its own, warmed up on a short document; OMP_NUM_THREADS sets its threads.
Memory is the peak beyond what the process held before (Linux).
"""

import argparse
from pathlib import Path
from typing import Any

from examples.common.command import Command

ARMS = {
    "full": "full attention", "window": "window", "sbm": "block model", "sbm-blocks": "block model, blocks of 16 tokens",
    "hf-sdpa": "BERT, SDPA", "hf-sbm": "BERT, block model", "longformer": "Longformer",
}  # fmt: skip
"""Arms and their names in tables."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    command = Command("python -m examples.benchmarks.documents", __doc__)
    command.option("tokens", [1024, 2048, 4096, 8192, 16_384], "of a document", least=64)
    command.option("arms", [*ARMS], "(default: all)", choices=[*ARMS], metavar="A")
    command.option("density", 0.05, "of graphs and windows", above=0, below=1)
    for name, usual in (("channels", 128), ("layers", 2), ("heads", 2), ("vocabulary", 8000), ("rounds", 3)):
        command.option(name, usual, above=0)
    command.option("csv", Path("documents.csv"), "where to write")
    given = command.read(arguments)
    command.require(given.channels % given.heads == 0, "'heads' to divide 'channels'", given.heads)
    return given


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import time
import warnings
from functools import partial
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from examples.benchmarks.turns import measure_turns, medians, memory
from examples.common.tables import Rows, by, markdown
from sbm_pyg import SequenceClassifier, SequenceEncoder, Sparsifier, patterns

WARM = 512  # tokens of the document that a process begins with
BLOCKS = 64  # of block models
MEASURED = ("inference", "inference MiB", "step", "step MiB")  # seconds, and peaks


class Encoder(nn.Module):
    """A model of Hugging Face with a linear layer on the mean of its tokens."""

    def __init__(self, model: nn.Module, channels: int) -> None:
        super().__init__()
        self.model, self.classifier = model, nn.Linear(channels, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classifier(self.model(input_ids=tokens[None]).last_hidden_state.mean(1))


def build(arm: str, tokens: int, given: argparse.Namespace) -> nn.Module:
    """The classifier of an arm for documents of so many tokens."""
    torch.manual_seed(0)
    if arm.startswith(("hf", "longformer")):
        return _hugging_face(arm, tokens, given)
    options: dict[str, Any] = {}
    if arm == "window":
        options = {"size": _keys(given.density, tokens) // 2}
    if arm.startswith("sbm"):
        options = {"num_clusters": BLOCKS, "block_size": 16 if arm == "sbm-blocks" else 1, "window": None}
    encoder = SequenceEncoder(
        given.vocabulary, given.channels, num_layers=given.layers, heads=given.heads, ffn_channels=4 * given.channels,
        max_length=max(tokens, WARM), attention="sbm" if arm.startswith("sbm") else arm, attention_options=options,
    )  # fmt: skip
    return SequenceClassifier(encoder, 2)


def _keys(density: float, tokens: int) -> int:
    """Keys of each query in a window; an even number, as Longformer needs it."""
    return max(2, 2 * round(density * tokens / 2))


def _hugging_face(arm: str, tokens: int, given: argparse.Namespace) -> nn.Module:
    from transformers import BertConfig, BertModel, LongformerConfig, LongformerModel

    bert: Any = BertConfig
    sizes: dict[str, Any] = {"vocab_size": given.vocabulary, "hidden_size": given.channels}
    sizes |= {"intermediate_size": 4 * given.channels, "num_hidden_layers": given.layers}
    sizes |= {"num_attention_heads": given.heads, "max_position_embeddings": max(tokens, WARM) + 4}
    sizes |= {"attention_probs_dropout_prob": 0.0}  # with dropout, SDPA stores all pairs on a CPU
    if arm == "longformer":
        window = [_keys(given.density, tokens)] * given.layers
        return Encoder(LongformerModel(LongformerConfig(attention_window=window, **sizes), False), given.channels)
    if arm == "hf-sdpa":
        return Encoder(BertModel(bert(attn_implementation="sdpa", **sizes), False), given.channels)
    import_module("sbm_pyg.integrations.hugging_face")  # registers "sbm"
    options = {"num_clusters": BLOCKS, "window": None}
    return Encoder(BertModel(bert(attn_implementation="sbm", sbm=options, **sizes), False), given.channels)


def turn(arm: str, tokens: int, given: argparse.Namespace) -> dict[str, float]:
    """Seconds and MiB of a training step and of inference over one document, after some over a short one."""
    model, found = build(arm, tokens, given), {}
    optimizer = torch.optim.AdamW(model.parameters())
    # sparse from the first step, as a model is after its dense steps
    sparsifier = Sparsifier(model, given.density, 10**6, dense_part=0.0) if "sbm" in arm else None
    torch.manual_seed(0)
    for stage in ("inference", "step"):  # in the order of their peaks
        model.train(stage == "step")
        for length in (WARM, WARM, tokens):
            document = torch.randint(given.vocabulary, (length,))
            before, start = memory("VmRSS"), time.perf_counter()
            with torch.set_grad_enabled(stage == "step"):
                logits = model(document)
            if stage == "step":
                optimizer.zero_grad()
                loss = cross_entropy(logits, torch.zeros(1, dtype=torch.int64))
                loss.backward()
                optimizer.step()
                if sparsifier:
                    sparsifier.step(loss)
            found[stage] = time.perf_counter() - start
        found[f"{stage} MiB"] = memory("VmHWM") - before
    return found


def gate() -> None:
    """Refuses to go on unless the block model's encoder, over a given graph of all pairs, has the outputs of full attention."""
    given = parse(["--channels", "32", "--vocabulary", "50"])
    full, sparse = build("full", 64, given).eval(), build("sbm", 64, given).eval()
    sparse.load_state_dict(full.state_dict(), strict=False)
    tokens = torch.randint(50, (64,), generator=torch.Generator().manual_seed(0))
    graph = patterns.full(64, heads=given.heads)
    torch.testing.assert_close(sparse(tokens, edge_index=graph), full(tokens), rtol=1e-4, atol=1e-5)


def table(rows: Rows) -> str:
    """Medians over rounds: milliseconds next to the ratio to full attention, or to BERT with SDPA, and MiB of a step."""
    arms = by(rows, "arm", "tokens")
    found = {arm: {n: medians(some, MEASURED) for n, some in own.items()} for arm, own in arms.items()}
    lengths = sorted({row["tokens"] for row in rows})
    lines = []
    for arm, own in found.items():
        dense = "hf-sdpa" if arm.startswith(("hf", "longformer")) else "full"
        for key in ("step", "inference"):
            others = {tokens: each[key] for tokens, each in found.get(dense, {}).items() if arm != dense}
            ratios = {tokens: f" ({own[tokens][key] / other:.2f})" for tokens, other in others.items() if tokens in own}
            cells = [f"{1e3 * own[n][key]:,.0f}{ratios.get(n, '')}" if n in own else "" for n in lengths]
            lines.append([ARMS[arm], f"{key}, ms", *cells])
        lines.append([ARMS[arm], "step, MiB", *(f"{own[n]['step MiB']:,.0f}" if n in own else "" for n in lengths)])
    return markdown(["encoder", "", *(f"{n:,.0f} tokens" for n in lengths)], lines)


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    warnings.simplefilter("ignore")
    gate()
    names = ("density", "channels", "layers", "heads", "vocabulary")
    sizes = argparse.Namespace(**{name: getattr(given, name) for name in names})
    turns = [{"arm": arm, "tokens": n} for n in given.tokens for _ in range(given.rounds) for arm in given.arms]
    print(table(measure_turns(partial(turn, given=sizes), turns, MEASURED, given.csv)))


if __name__ == "__main__":
    main()
