"""Makes a trained dense model sparse: what does it lose, and how much of that do random graphs or a window lose?

    python examples/dense_to_sparse.py                                     a masked language model of Python's standard library
    python examples/dense_to_sparse.py --model recall --density 0.05

A model with torch's attention is trained. Then attention keeps its largest scores alone, and nothing is trained ("at-once"); or the model
is trained for a fifth of the steps again: as it is ("dense"), with its largest scores ("top-k"), with block models that learn from dense
attention in the first half of these steps and are sparse in the second ("sparse"), likewise with block models that draw four times as
many edges, of which the largest scores are kept ("candidates"), with indexers, which score all pairs and choose by rank ("indexer"), with
block models that do not learn ("random"), or with a window of the same density ("window"). The table has the loss of each on test data; a
file next to each checkpoint has what its layers and heads lose. Two hours on a core of a busy machine. The same command goes on after a
kill, and skips what is in rows.csv.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

if __package__ in (None, ""):  # run as a file: the root of the clone holds the package `examples`
    sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.common.command import Command, fields_of, option, program
from examples.common.corpus import Texts, encode, read_files, stdlib_files
from examples.common.fit import file_name, fit, make_optimizer, train_missing
from examples.common.runs import checksums, read_state, settings_of, write_text
from examples.common.tables import Row, deviation, finished, groups, markdown
from examples.common.tasks import TASKS
from sbm_pyg import Sparsifier, replace_attention
from sbm_pyg.analysis import HeadTable, compare_heads

ARMS = ("trained", "dense", "at-once", "top-k", "sparse", "candidates", "indexer", "random", "window")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    command = Command(None, __doc__)
    command.option("model", "language", "what is trained", choices=("language", "recall"))
    command.option("arms", [*ARMS[1:]], choices=ARMS[1:])
    command.option("density", 0.1, "part of the pairs, beyond self-loops", above=0, below=1)
    command.option("seeds", [0], least=0)
    command.option("vocabulary", 1024, above=0)
    command.fields(Run)
    command.option("threads", 1, above=0)
    command.option("output", Path("runs/dense_to_sparse"))
    args = command.read(arguments)
    words = "'length' of at least 32 for recall, eight pairs and places of eight questions"
    command.require(args.model != "recall" or args.length >= 32, words, args.length)
    return args


MASKED, RECALLED = 0.15, 8  # part of the tokens to guess; questions of a sequence
PART = 5  # steps of the dense model for each step of the others
SOURCE_RATE = 5.0  # of block models, which are new, relative to the learning rate of the trained model


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of a run, apart from the texts."""

    task: str
    method: str
    density: float
    seed: int
    steps: int = option(2000, "of the dense model; the others have a fifth", above=0)
    length: int = option(256, above=0)
    batch_size: int = option(16, above=0)
    channels: int = option(128, above=0)
    layers: int = option(4, above=0)
    heads: int = option(4, above=0)
    num_clusters: int = option(64, above=0)
    learning_rate: float = option(1e-3, above=0)
    weight_decay: float = 0.1
    evaluations: int = 1

    @property
    def identity(self) -> Row:
        return {"task": self.task, "run": self.method, "density": self.density, "seed": self.seed}

    @property
    def file(self) -> str:
        return file_name(self.task, self.method, self.density, self.seed)


class Model(nn.Module):
    """Torch's encoder between an embedding and a distribution over tokens."""

    def __init__(self, num_tokens: int, run: Run) -> None:
        super().__init__()
        width = run.channels
        layer = nn.TransformerEncoderLayer(width, run.heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.token, self.position = nn.Embedding(num_tokens, width), nn.Embedding(run.length, width)
        self.near = nn.Conv1d(width, width, 3, groups=width)  # binds a token to the ones before it
        self.encoder = nn.TransformerEncoder(layer, run.layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, num_tokens)
        nn.init.normal_(self.token.weight, std=0.5)
        nn.init.normal_(self.position.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.size(1)]
        x = x + self.near(nn.functional.pad(x.mT, (2, 0))).mT
        return self.head(self.encoder(x))


Batch = Callable[[int], tuple[Tensor, Tensor, Tensor]]
"""From a number to tokens, a mask of questions, and answers, ``[B, L]`` each."""


def language(run: Run, texts: Texts) -> tuple[int, Batch, Batch, int]:
    """Masked tokens of texts. Number of tokens, batches to train on, batches to test on, and how many of these."""
    mask = len(texts[2])

    def batch(source: Tensor, seed: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
        random = torch.Generator().manual_seed(2**32 * seed + number)
        start = torch.randint(len(source) - run.length, (run.batch_size, 1), generator=random)
        tokens = source[start + torch.arange(run.length)]
        is_question = torch.rand(tokens.shape, generator=random) < MASKED
        kind = torch.rand(tokens.shape, generator=random)
        other = torch.randint(mask, tokens.shape, generator=random)
        shown = torch.where(kind < 0.8, mask, torch.where(kind < 0.9, other, tokens))
        return torch.where(is_question, shown, tokens), is_question, tokens

    return mask + 1, partial(batch, texts[0], run.seed + 1), partial(batch, texts[1], 0), 20


def recall(run: Run) -> tuple[int, Batch, Batch, int]:
    """Values of keys, by associative recall."""
    task = TASKS["mqar-small"]

    def batch(split: str, seed: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
        random = torch.Generator().manual_seed(2**32 * seed + 2 * number + (split == "test"))
        size = (run.length, RECALLED)
        tokens, places, answers, _ = task.make(*size, task.num_tokens, run.batch_size, random)
        is_question = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, places, True)
        return tokens, is_question, torch.zeros_like(tokens).scatter(1, places, answers)

    return task.num_tokens, partial(batch, "train", run.seed + 1), partial(batch, "test", 0), 20


def make_model(run: Run, num_tokens: int, trained: Path | None) -> nn.Module:
    """The model of a run, with the weights of the trained one."""
    torch.manual_seed(run.seed)
    model = Model(num_tokens, run)
    if trained is not None:
        model.load_state_dict(read_state(trained, dataclasses.asdict(trained_run(run)), needed=True)["model"])
    if run.method in ("sparse", "candidates", "random"):
        estimator, candidates = "none" if run.method == "random" else None, 4 if run.method == "candidates" else 1
        replace_attention(model, num_clusters=run.num_clusters, estimator=estimator, candidates=candidates)
    elif run.method == "indexer":
        replace_attention(model, source="indexer", window=0)
    elif run.method in ("at-once", "top-k"):
        replace_attention(model, source="top_k", target_density=run.density, window=0)
    elif run.method == "window":  # pairs beyond self-loops, as of the others
        replace_attention(model, source="window", size=max(1, round(run.density * run.length / 2)))
    return model


def trained_run(run: Run) -> Run:
    """The run whose end is the start of this one."""
    return dataclasses.replace(run, method="trained", density=1.0, steps=PART * run.steps)


def train(run: Run, texts: Texts | None, folder: Path) -> list[Row]:
    """Trains one model, or goes on from its checkpoint; returns its row."""
    num_tokens, batch, test, count = recall(run) if texts is None else language(run, texts)
    model = make_model(run, num_tokens, None if run.method == "trained" else folder / trained_run(run).file)
    has_source = run.method in ("top-k", "sparse", "candidates", "indexer", "random")
    dense_part = 0.0 if run.method == "top-k" else 0.5  # sources have to learn first
    sparsifier = Sparsifier(model, run.density, run.steps, dense_part=dense_part) if has_source else None

    def answer(part: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of a batch."""
        tokens, is_question, answers = part
        logits = model(tokens)[is_question]
        accuracy = (logits.argmax(1) == answers[is_question]).double().mean()
        return cross_entropy(logits, answers[is_question]), accuracy

    def measure() -> list[Row]:
        torch.manual_seed(0)  # of graphs
        is_torch = run.method in ("trained", "dense")
        with nullcontext(HeadTable()) if is_torch else compare_heads(model) as table:
            results = [answer(test(number)) for number in range(count)]
        heads = table.heads
        if heads:
            write_text(folder / f"{run.file}.txt", f"{table}\n")
        density = sum(head.density for head in heads) / len(heads) if heads else 1.0
        loss, accuracy = (float(torch.stack(column).mean()) for column in zip(*results, strict=True))
        return [run.identity | {"test_loss": loss, "accuracy": accuracy, "density_of_graphs": density}]

    def losses(step: int) -> Tensor:
        return answer(batch(step))[0]

    if run.method == "at-once":
        model.eval()
        with torch.no_grad():
            return [{**row, "step": 0, "loss": row["test_loss"], "seconds": 0.0} for row in measure()]
    return fit(
        model,
        sparsifier,
        run,
        folder / run.file,
        losses,
        measure,
        optimizer=make_optimizer(model, run, source_rate=SOURCE_RATE),
    )


def report(rows: list[Row]) -> str:
    """A table: means over seeds, and what is lost against dense attention, seed by seed."""
    dense = {(row["task"], row["seed"]): row["test_loss"] for row in rows if row["run"] == "dense"}
    lines = []
    for task, name, run_rows in groups(rows, "task", "run"):
        lost = [row["test_loss"] - dense[task, row["seed"]] for row in run_rows if (task, row["seed"]) in dense]
        loss, accuracy, density = (
            fmean(row[key] for row in run_rows) for key in ("test_loss", "accuracy", "density_of_graphs")
        )
        more = deviation(lost, 4, "+") if lost else ""
        lines.append([task, name, len(run_rows), f"{loss:.4f}", more, f"{100 * accuracy:.2f}", f"{100 * density:.1f}"])
    header = ["model", "run", "seeds", "test loss", "more than dense", "accuracy, %", "density, %"]
    return markdown(header, lines)


def work(args: argparse.Namespace) -> Iterator[Path]:
    options = fields_of(Run, args)
    options |= {"task": args.model}
    texts, input_checksums = None, {}
    if args.model == "language":
        args.train, args.test = stdlib_files()
        input_checksums = checksums(train=args.train, test=args.test)
        texts = encode(read_files(args.train), read_files(args.test), args.vocabulary)
    options |= {"steps": max(1, args.steps // PART)}
    runs = []
    for seed in args.seeds:
        others = [Run(**options | {"method": arm, "seed": seed}) for arm in args.arms]
        runs += [trained_run(others[0]), *others]
    settings = settings_of(runs[0], args.model) | input_checksums
    train_missing(args.output, "dense_to_sparse", settings, runs, lambda run: train(run, texts, args.output))
    print(report(finished(args.output)))
    yield from args.output.glob("*.txt")


main = program(parse, work)

if __name__ == "__main__":
    main()
