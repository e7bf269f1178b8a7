"""Masked language models with sampled attention, pretrained on your texts and fine-tuned on GLUE, by the trainer of `transformers`.

    python -m examples.glue pretrain --texts imdb.txt.gz --methods full sbm
    python -m examples.glue finetune --glue GLUE --tasks sst2 --methods full sbm --seeds 0 1 2
    python -m examples.glue table

Texts are files, plain or gzip, with an empty line between documents. GLUE is a folder with SST-2, QQP, QNLI and MNLI as released. The
encoder is EuroBERT, which has rotary positions. Methods are full; sbm; random (block models that do not learn); window; bigbird; lsh and
routing. sbm and random have a window too; --density is that of their sampled edges. Fine-tuned models are folders of `transformers` with
predictions of the dev and test sets. The same command goes on after a kill, and skips what is in rows.csv.
"""

import argparse
import dataclasses
import itertools
import math
import random
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import transformers
from sklearn.metrics import accuracy_score, f1_score
from tokenizers.processors import TemplateProcessing
from transformers.trainer_utils import get_last_checkpoint

from examples.common.command import Command, fields_of, option, program, require
from examples.common.corpus import read_lines, train_tokenizer
from examples.common.fit import file_name, train_missing
from examples.common.runs import check_folder, checksums, settings_of, write_text
from examples.common.tables import Row, deviation, groups, markdown, read
from sbm_pyg import replace_attention
from sbm_pyg.analysis import compare_heads
from sbm_pyg.integrations.hugging_face import SparsifierCallback

PROGRAM = "python -m examples.glue"
PRESETS: dict[str, dict[str, Any]] = {
    "small": {"vocabulary": 4000, "length": 128, "steps": 600, "batch_size": 16, "channels": 128, "layers": 2, "heads": 2, "window": 8, "learning_rate": 1e-3, "masking": 0.4, "epochs": 1, "tuning_rate": 5e-4},
    "laptop": {"vocabulary": 4000, "length": 256, "steps": 3000, "batch_size": 16, "channels": 128, "layers": 4, "heads": 2, "window": 8, "learning_rate": 1e-3, "masking": 0.4, "epochs": 3, "tuning_rate": 5e-4},
    "paper": {"vocabulary": 50265, "length": 512, "steps": 500_000, "batch_size": 256, "channels": 512, "layers": 4, "heads": 8, "window": 64, "learning_rate": 1e-4, "masking": 0.15, "epochs": 5, "tuning_rate": 3e-5},
}  # fmt: skip
"""Sizes; "paper" is Table 7 of Cho et al. Short runs learn far more with rotary positions and more masks (Wettig et al., "Should You Mask
15% in Masked Language Modeling?", 2023); test texts always have 15 %."""
LEARNED = {"source": "sbm", "num_clusters": 32, "parameterization": "overlapping"}
METHODS: dict[str, dict[str, Any]] = {
    "full": {}, "sbm": LEARNED, "random": LEARNED | {"estimator": "none"}, "window": {"source": "window"},
    "bigbird": {"source": "bigbird", "num_global": 2, "num_random": 3},
    "lsh": {"source": "lsh", "num_buckets": 16, "chunk_size": 16}, "routing": {"source": "routing", "num_clusters": 8},
}  # fmt: skip
SAMPLED = ("sbm", "random")  # have a target density
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
HELD_OUT = 100  # one document of so many is tested on
MASKED, EVALUATIONS, TUNED = 0.15, 10, 32  # masks of test texts, evaluations, examples of a step of fine-tuning


class Task(NamedTuple):
    """One task of GLUE: its folder, columns and classes, as in the official release."""

    folder: str
    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    dev: tuple[str, ...] = ("dev",)


TASKS = {
    "sst2": Task("SST-2", ("sentence",), "label", ("0", "1")),
    "qqp": Task("QQP", ("question1", "question2"), "is_duplicate", ("0", "1")),
    "qnli": Task("QNLI", ("question", "sentence"), "label", ("entailment", "not_entailment")),
    "mnli": Task("MNLI", ("sentence1", "sentence2"), "gold_label", ("entailment", "neutral", "contradiction"), ("dev_matched", "dev_mismatched")),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of a run, apart from the files; a task makes it one of fine-tuning."""

    method: str
    seed: int
    vocabulary: int = option(int, "(default: that of the preset)", least=300)
    length: int = option(int, "of a piece of text", above=3)
    steps: int = option(int, "of pretraining", above=0)
    batch_size: int = option(int, "pieces of a step of pretraining", above=0)
    channels: int = option(int, above=0)
    layers: int = option(int, above=0)
    heads: int = option(int, above=0)
    window: int = option(int, "tokens to either side", least=0)
    learning_rate: float = option(float, "of pretraining", above=0)
    masking: float = option(float, "part of the tokens to predict", above=0, below=1)
    epochs: int = option(int, "of fine-tuning", above=0)
    tuning_rate: float = option(float, "learning rate of fine-tuning", above=0)
    density: float = option(0.1, "of sampled edges", above=0, below=1)
    task: str = ""
    scratch: bool = False

    @property
    def identity(self) -> Row:
        name = f"{self.method} {100 * self.density:g} %" if self.method in SAMPLED else self.method
        start = {"task": self.task, "start": "scratch" if self.scratch else "pretrained"} if self.task else {}
        return start | {"run": name, "seed": self.seed}

    @property
    def folder(self) -> str:
        return file_name(*self.identity.values()).removesuffix(".pt")


def read_documents(paths: Sequence[Path]) -> Iterator[str]:
    """Documents of files of text, which empty lines separate."""
    for path in paths:
        for is_text, lines in itertools.groupby(read_lines(path), lambda line: bool(line.strip())):
            if is_text:
                yield "\n".join(lines)


def make_tokenizer(documents: Iterator[str], vocabulary: int, length: int) -> Any:
    """A byte-level tokenizer of transformers, learned from documents; a start, then each text and a separator."""
    pad, unknown, start, end, mask = SPECIAL
    tokenizer = train_tokenizer(documents, vocabulary, SPECIAL, add_prefix_space=True)
    special = [(token, tokenizer.token_to_id(token)) for token in (start, end)]
    single, pair = f"{start} $A {end}", f"{start} $A {end} $B {end}"
    tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=special)
    names: Any = {"pad_token": pad, "unk_token": unknown, "cls_token": start, "sep_token": end, "mask_token": mask}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **names)


def read_glue(path: Path, task: Task, has_labels: bool = True) -> tuple[list[list[str]], list[int]]:
    """Texts of a file of GLUE, whose columns are found by their names, and classes, which are 0 without labels."""
    way_out, lines = "Take the official files.", read_lines(path)
    names = next(lines, "").lstrip("\ufeff").split("\t")
    columns = [*task.texts, *([task.label] if has_labels else [])]
    require({*columns} <= {*names}, f"'{path}' to have the columns {', '.join(columns)}", names, way_out)
    texts, classes = [], []
    for number, line in enumerate(lines, 2):
        row = dict(zip(names, line.split("\t"), strict=False))
        label = row.get(task.label, "none") if has_labels else task.classes[0]
        fits = line.count("\t") == len(names) - 1 and label in task.classes
        require(
            fits, f"line {number} of '{path}' to have {len(names)} cells and a label of the task", line[:99], way_out
        )
        texts.append([row[name] for name in task.texts])
        classes.append(task.classes.index(label))
    require(texts, f"'{path}' to have examples", "none", way_out)
    return texts, classes


def read_task(folder: Path, task: Task, tokenizer: Any) -> dict[str, list[Row]]:
    """Examples of "train", of the dev sets and of the test sets that are there; a tenth of train is held out where there is no dev set.

    Longer pairs lose the end of their longest text.
    """
    sets: dict[str, list[Row]] = {}
    for name in ("train", *task.dev, *(name.replace("dev", "test") for name in task.dev)):
        if name == "train" or (folder / task.folder / f"{name}.tsv").exists():
            has_labels = not name.startswith("test")
            texts, classes = read_glue(folder / task.folder / f"{name}.tsv", task, has_labels)
            tokens = tokenizer(*map(list, zip(*texts, strict=True)), truncation="longest_first").input_ids
            sets[name] = [{"input_ids": ids, "labels": label} for ids, label in zip(tokens, classes, strict=True)]
    if task.dev[0] not in sets:
        random.Random(0).shuffle(sets["train"])
        count = max(1, len(sets["train"]) // 10)
        print(f"{task.folder} has no dev file: {count:,} examples of train are held out to test on")
        sets |= {"train": sets["train"][count:], task.dev[0]: sets["train"][:count]}
    return sets


def make_model(kind: str, run: Run, tokenizer: Any, **options: Any) -> Any:
    """A model of transformers with the attention of a method."""
    torch.manual_seed(run.seed)
    config = transformers.EuroBertConfig(
        vocab_size=len(tokenizer), hidden_size=run.channels, intermediate_size=4 * run.channels, num_hidden_layers=run.layers,
        num_attention_heads=run.heads, max_position_embeddings=run.length, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id, eos_token_id=tokenizer.sep_token_id, mask_token_id=tokenizer.mask_token_id,
        **options,
    )  # fmt: skip
    model = getattr(transformers, f"EuroBertFor{kind}")(config)
    if run.method != "full":
        sizes = {"window": run.window} if run.method in SAMPLED else {"size": run.window}
        replace_attention(model, **METHODS[run.method] | ({} if run.method in ("lsh", "routing") else sizes))
    return model


@torch.no_grad()
def density_of(model: Any, batch: dict[str, Any]) -> float:
    """The mean density of the graphs of a batch; 1 without graphs."""
    if getattr(model.config, "sbm", None) is None:
        return 1.0
    with compare_heads(model.eval()) as table:
        model(**{name: value.to(model.device) for name, value in batch.items()})
    return fmean(head.density for head in table.heads)


def make_trainer(model: Any, run: Run, folder: Path, dense_part: float, data: Sequence[Any], **options: Any) -> Any:
    """The trainer of a run after its training, which began from its last checkpoint, if there was one.

    Args:
        dense_part: Part of the steps of which attention is dense.
        data: What makes batches, examples to learn from and to test on, and numbers of a prediction.
        options: Arguments of the trainer.
    """
    place = str(folder / run.folder)
    settings = transformers.TrainingArguments(
        place, seed=run.seed, use_cpu=not torch.cuda.is_available(), save_total_limit=1, report_to=[],
        warmup_steps=0.05, weight_decay=0.01, **options,
    )  # fmt: skip
    callbacks: Any = [SparsifierCallback(run.density, dense_part=dense_part)] if run.method in SAMPLED else []
    collator, train, test, numbers = data
    trainer = transformers.Trainer(model, settings, collator, train, test, compute_metrics=numbers, callbacks=callbacks)
    last = get_last_checkpoint(place) if Path(place).is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    return trainer


def pretrain(run: Run, tokenizer: Any, texts: Sequence[Sequence[Row]], folder: Path) -> list[Row]:
    """Pretrains a model on masked tokens, and saves it; returns its row."""
    hide = partial(transformers.DataCollatorForLanguageModeling, tokenizer)
    data = (hide(mlm_probability=run.masking), *texts, None)
    interval = max(1, run.steps // EVALUATIONS)
    trainer = make_trainer(
        make_model("MaskedLM", run, tokenizer), run, folder, 0.4, data, max_steps=run.steps, learning_rate=run.learning_rate,
        per_device_train_batch_size=run.batch_size, save_steps=interval, logging_steps=interval,
    )  # fmt: skip
    trainer.data_collator = hide(mlm_probability=MASKED, seed=0)  # the same tokens are hidden in all runs
    bits = trainer.evaluate()["eval_loss"] / math.log(2)
    density = density_of(trainer.model, trainer.data_collator([*texts[1][:8]]))
    return [run.identity | {"bits_per_token": bits, "density": density}]


def score(result: Any) -> Row:
    """Accuracy and F1 as GLUE defines them, of the second class of two; of more classes, the mean over them."""
    guessed = result.predictions.argmax(1)
    f1 = f1_score(result.label_ids, guessed, average="binary" if result.predictions.shape[1] == 2 else "macro")
    return {"accuracy": accuracy_score(result.label_ids, guessed), "f1": f1}


def finetune(run: Run, tokenizer: Any, sets: dict[str, list[Row]], start: Path | None, folder: Path) -> list[Row]:
    """Trains a classifier, and saves its best epoch and its predictions; returns its row. ``start`` is a pretrained model."""
    task = TASKS[run.task]
    options: dict[str, Any] = {"num_labels": len(task.classes), "classifier_pooling": "mean"}
    if start is None:
        model = make_model("SequenceClassification", run, tokenizer, **options)
    else:
        way_out = "Pretrain it, or pass --scratch."
        require((start / "config.json").is_file(), f"a pretrained model in {start}", "none", way_out)
        model = transformers.EuroBertForSequenceClassification.from_pretrained(start, **options)
    collator = transformers.DataCollatorWithPadding(tokenizer)
    trainer = make_trainer(
        model, run, folder, 0.0 if start else 0.4, (collator, sets["train"], sets[task.dev[0]], score), num_train_epochs=run.epochs,
        learning_rate=run.tuning_rate, per_device_train_batch_size=TUNED, eval_strategy="epoch", save_strategy="epoch",
        logging_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="accuracy",
    )  # fmt: skip
    tokenizer.save_pretrained(folder / run.folder)
    row = dict(run.identity)
    for name in [name for name in sets if name != "train"]:
        result = trainer.predict(sets[name])
        lines = [f"{number}\t{task.classes[guess]}" for number, guess in enumerate(result.predictions.argmax(1))]
        write_text(folder / run.folder / f"{name}.tsv", "\n".join(["index\tprediction", *lines]) + "\n")
        if name in task.dev:
            row |= {f"{name}_{number}": result.metrics[f"test_{number}"] for number in ("accuracy", "f1")}
    return [row | {"density": density_of(trainer.model, collator(sets[task.dev[0]][:TUNED]))}]


def tables(folder: Path) -> str:
    """Means over seeds of what has ended."""
    parts = []
    for path in sorted(folder.glob("*/rows.csv")):
        header = [name for name in read(path)[0] if name not in ("seed", "run", "task", "start")]
        lines = []
        for *names, rows in groups(read(path), *(name for name in ("start", "run") if name in read(path)[0])):
            cells = [deviation([row[name] for row in rows], 3) for name in header]
            lines.append([" ".join(reversed(names)), len(rows), *cells])
        parts.append(f"## {path.parent.name}\n\n{markdown(['run', 'seeds', *header], lines)}")
    require(parts, "'output' to hold finished runs", f"none in {folder}", "Pretrain a model first.")
    return "\n\n".join(parts)


def parse(stage: str, arguments: Sequence[str]) -> argparse.Namespace:
    command = Command(f"{PROGRAM} {stage}", __doc__)
    command.option("output", Path("runs/glue"), "of all stages: tokenizer, models, tables")
    if stage == "table":
        return command.read(arguments)
    if stage == "pretrain":
        command.add_argument("--texts", type=Path, nargs="+", required=True, metavar="FILE", help="to learn from")
    else:
        command.add_argument("--glue", type=Path, required=True, metavar="DIR", help="folder of the tasks")
        command.option("tasks", ["sst2"], f"of {', '.join(TASKS)}", choices=tuple(TASKS), metavar="TASK")
        command.add_argument("--scratch", action="store_true", help="start without pretraining")
        command.option("pretrained-seed", 0, "of the pretrained model", least=0)
    command.option("preset", "small", "of sizes, which other options override", choices=tuple(PRESETS))
    command.option("methods", ["full", "sbm"], f"of {', '.join(METHODS)}", choices=tuple(METHODS), metavar="METHOD")
    command.option("seeds", [0], least=0)
    command.option("threads", 1, "of the CPU", above=0)
    command.fields(Run)
    args = command.read(arguments)
    command.attempt(check_folder, "output", args.output)
    for name, usual in PRESETS[args.preset].items():
        setattr(args, name, usual if getattr(args, name) is None else getattr(args, name))
    command.require(args.channels % args.heads == 0, "'heads' to divide 'channels'", args.heads)
    if stage == "pretrain":
        command.require_files(texts=args.texts)
    else:
        command.require(args.glue.is_dir(), "'glue' to be a folder", args.glue, "Give the folder of GLUE.")
    return args


def work_pretrain(args: argparse.Namespace) -> Iterator[Path]:
    documents, folder = [*read_documents(args.texts)], args.output / "pretrain"
    few = len(documents) < HELD_OUT
    require(not few, f"'texts' of {HELD_OUT} documents or more", len(documents), "Empty lines separate them.")
    train = [text for number, text in enumerate(documents) if number % HELD_OUT != HELD_OUT - 1]
    tokenizer = make_tokenizer(iter(train), args.vocabulary, args.length)
    tokenizer.save_pretrained(args.output / "tokenizer")

    def pieces(texts: list[str]) -> list[Row]:
        cut = tokenizer(texts, truncation=True, return_overflowing_tokens=True, return_special_tokens_mask=True)
        names = ("input_ids", "special_tokens_mask")
        return [dict(zip(names, piece, strict=True)) for piece in zip(*(cut[name] for name in names), strict=True)]

    texts = pieces(train), pieces(documents[HELD_OUT - 1 :: HELD_OUT])
    runs = [Run(method, seed, **fields_of(Run, args)) for seed in args.seeds for method in args.methods]
    settings = settings_of(runs[0]) | checksums(texts=args.texts)
    train_missing(folder, "glue pretrain", settings, runs, lambda run: pretrain(run, tokenizer, texts, folder))
    yield folder
    yield from work_table(args)


def work_finetune(args: argparse.Namespace) -> Iterator[Path]:
    place = args.output / "tokenizer"
    require(place.is_dir(), f"'output' with {place}", "none", "Pretrain a model into this --output first.")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    for task in args.tasks:
        sets, folder = read_task(args.glue, TASKS[task], tokenizer), args.output / task
        options = fields_of(Run, args) | {"task": task}
        runs = [Run(method, seed, **options) for seed in args.seeds for method in args.methods]

        def train(run: Run, sets: dict[str, list[Row]] = sets, folder: Path = folder) -> list[Row]:
            before = dataclasses.replace(run, task="", seed=args.pretrained_seed).folder
            start = None if run.scratch else args.output / "pretrain" / before
            return finetune(run, tokenizer, sets, start, folder)

        settings = settings_of(runs[0], named=("method", "seed", "density", "scratch", "task"))
        train_missing(folder, "glue finetune", settings, runs, train)
        yield folder
    yield from work_table(args)


def work_table(args: argparse.Namespace) -> Iterator[Path]:
    print(tables(args.output))
    yield from ()


STAGES = {"pretrain": work_pretrain, "finetune": work_finetune, "table": work_table}


def main(arguments: Sequence[str] | None = None) -> None:
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    if not words or words[0] not in STAGES:
        command = Command(PROGRAM, __doc__)
        command.add_argument("stage", choices=tuple(STAGES), help="what to do; each has --help")
        command.parse_args(words[:1])
    program(partial(parse, words[0]), STAGES[words[0]])(words[1:])


if __name__ == "__main__":
    main()
