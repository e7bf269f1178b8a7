"""Masked language models with sampled attention, pretrained on your texts and fine-tuned on GLUE.

    python -m examples.glue pretrain --texts imdb.txt.gz --methods full sbm
    python -m examples.glue finetune --glue GLUE --tasks sst2 --methods full sbm --seeds 0 1 2
    python -m examples.glue evaluate --glue GLUE --tasks sst2
    python -m examples.glue table

Texts are files, plain or gzip, with an empty line between documents, or a folder of `datasets`. GLUE is a folder with SST-2, QQP, QNLI
and MNLI as released. Methods are full, sbm, random (block models that do not learn), window, dcmm, bigbird, lsh and routing; options
follow a colon, as in sbm:num_clusters=64. sbm and random have a window too (--window, or sbm:window=0); --density is that of their
sampled edges. The same command goes on after a kill, and skips what is in rows.csv.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from examples.common.command import Command, fields_of, program, read_method
from examples.common.fit import train_missing
from examples.common.runs import fingerprint, settings_of, write_text
from examples.common.tables import markdown
from examples.glue import data, report, train

PROGRAM = "python -m examples.glue"
PRESETS: dict[str, dict[str, Any]] = {
    "small": {"vocabulary": 4000, "length": 128, "steps": 600, "batch_tokens": 2048, "channels": 128, "layers": 2, "heads": 2, "window": 8, "learning_rate": 4e-3, "masking": 0.4, "position_encoding": "rotary"},
    "laptop": {"vocabulary": 4000, "length": 256, "steps": 3000, "batch_tokens": 4096, "channels": 128, "layers": 4, "heads": 2, "window": 8, "learning_rate": 4e-3, "masking": 0.4, "position_encoding": "rotary"},
    "paper": {"vocabulary": 50265, "length": 512, "steps": 500_000, "batch_tokens": 131_072, "channels": 512, "layers": 4, "heads": 8, "window": 64, "learning_rate": 1e-4, "masking": 0.15, "position_encoding": "learned"},
}  # fmt: skip
"""Sizes; "paper" is Table 7 of Cho et al., in batches of 256 sequences of 512 tokens. Short runs learn far more with rotary positions and
more masks (Wettig et al., "Should You Mask 15% in Masked Language Modeling?", 2023); test texts always have 15 %."""
POSITIONS = ("learned", "rotary", "alibi", "none")
TUNING = {"small": (1, 32, 5e-4), "laptop": (3, 32, 5e-4), "paper": (5, 32, 3e-5)}
"""Epochs, batch size and learning rate of fine-tuning."""
TASKS = tuple(data.TASKS)


def _command(name: str, about: str) -> Command:
    command = Command(f"{PROGRAM} {name}", about)
    command.option("output", Path("runs/glue"), "of all stages: tokeniser, checkpoints, tables")
    return command


def _sizes(command: Command, but: Sequence[str] = ()) -> None:
    """Options that stages share, without some of them."""
    command.option("preset", "small", "of sizes, which other options override", choices=tuple(PRESETS))
    command.option("methods", ["full", "sbm"])
    command.option("density", 0.1, "of sampled edges", above=0, below=1)
    command.option("seeds", [0], least=0)
    command.option("threads", 1, "of the CPU", above=0)
    for name, usual in PRESETS["small"].items():
        if name not in but:
            option = name.replace("_", "-")
            limits: dict[str, Any] = {"least" if name == "window" else "above": 0}
            limits = {"choices": POSITIONS} if name == "position_encoding" else limits
            command.option(option, type(usual), "(default: that of the preset)", **limits)


def _read(command: Command, arguments: Sequence[str]) -> argparse.Namespace:
    """The options, with the sizes of the preset where none are given."""
    args = command.read(arguments)
    for name, usual in PRESETS[args.preset].items():
        if getattr(args, name, None) is None:
            setattr(args, name, usual)
    masking = getattr(args, "masking", 1.0)
    command.require(masking <= 1, "'masking' of at most 1", masking, "It is a part of the tokens.")
    command.require(args.channels % args.heads == 0, "'heads' to divide 'channels'", args.heads)
    words = "'vocabulary' of at least 300, 256 bytes and special tokens"
    command.require(args.vocabulary >= 300, words, args.vocabulary)
    return args


def _texts(command: Command) -> None:
    command.add_argument("--texts", type=Path, nargs="+", required=True, metavar="FILE", help="texts to learn from")
    words = "texts to test on (default: every hundredth document of --texts, which is not learned from)"
    command.add_argument("--test", type=Path, nargs="+", metavar="FILE", help=words)
    words = "tokenizer.json of a masked model (default: one is learned from --texts)"
    command.add_argument("--tokenizer", type=Path, metavar="FILE", help=words)


def _read_texts(command: Command, arguments: Sequence[str]) -> argparse.Namespace:
    """As :func:`_read`, with texts that are there."""
    args = _read(command, arguments)
    missing = [str(path) for path in (*args.texts, *(args.test or [])) if not path.exists()]
    command.require(not missing, "'texts' and 'test' to be files or folders", ", ".join(missing), "Give their paths.")
    return args


def _tasks(command: Command) -> None:
    command.add_argument("--glue", type=Path, required=True, metavar="DIR", help="with SST-2, QQP, QNLI and MNLI")
    command.option("tasks", ["sst2"], f"of {', '.join(TASKS)}", choices=TASKS, metavar="TASK")
    command.option("hold-out", 0.1, "part of train to test on where there is no dev file", above=0, below=1)
    command.add_argument("--skip-damaged", action="store_true", help="leave lines out that are no examples")


def _read_tasks(command: Command, args: argparse.Namespace) -> argparse.Namespace:
    command.require(args.glue.is_dir(), "'glue' to be a folder", args.glue, "Give the folder of GLUE.")
    return args


def parse_pretrain(arguments: Sequence[str]) -> argparse.Namespace:
    command = _command("pretrain", "Pretrains masked language models on texts.")
    _texts(command)
    _sizes(command)
    args = _read_texts(command, arguments)
    words = f"'batch-tokens' of at least length = {args.length}"
    command.require(args.batch_tokens >= args.length, words, args.batch_tokens, "A batch holds whole pieces.")
    return args


def parse_finetune(arguments: Sequence[str]) -> argparse.Namespace:
    command = _command("finetune", "Fine-tunes pretrained models, or trains from scratch, on tasks of GLUE.")
    _tasks(command)
    command.add_argument("--scratch", action="store_true", help="start without pretraining")
    command.option("pretrained-seed", 0, "of the pretrained model", least=0)
    for name, kind in (("epochs", int), ("batch-size", int), ("tuning-rate", float)):
        command.option(name, kind, "(default: that of the preset)", above=0)
    command.option("limit", int, "examples of train to take (default: all)", metavar="N", above=0)
    _sizes(command, but=("steps", "batch_tokens", "learning_rate", "masking"))
    args = _read_tasks(command, _read(command, arguments))
    for name, usual in zip(("epochs", "batch_size", "tuning_rate"), TUNING[args.preset], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, usual)
    return args


def parse_evaluate(arguments: Sequence[str]) -> argparse.Namespace:
    command = _command(
        "evaluate", "Scores the best model of each fine-tuning on dev sets, and predicts dev and test sets."
    )
    _tasks(command)
    command.option("threads", 1, "of the CPU", above=0)
    words = (
        "save each model in 16 bits to a folder in DIR, with its tokenizer, for `SequenceClassifier.from_pretrained`"
    )
    command.add_argument("--save", type=Path, metavar="DIR", help=words)
    args = _read_tasks(command, command.read(arguments))
    args.limit = 1  # examples of train, which are not evaluated
    return args


def parse_table(arguments: Sequence[str]) -> argparse.Namespace:
    return _command("table", "Prints the tables of what has ended, and draws the curves.").read(arguments)


def work_pretrain(args: argparse.Namespace) -> Iterator[Path]:
    for method in args.methods:
        read_method(method, train.METHODS, train.OPTIONS)  # mistakes before the first run
    tokenizer, texts = data.prepare(args)
    options = fields_of(train.Run, args)
    runs = [train.Run(method=method, seed=seed, **options) for seed in args.seeds for method in args.methods]
    settings = settings_of(runs[0]) | {"checksum of texts": fingerprint(x.numpy().tobytes() for x in texts["train"])}
    folder = args.output / "pretrain"
    test_tokens = texts["test"][0]
    bits = train.unigram_bits(test_tokens, tokenizer.get_vocab_size())
    counts = f"{len(texts['train'][0]):,} tokens to learn from, {len(test_tokens):,} to test on"
    print(f"{counts}; {bits:.2f} bits per token by frequency")
    train_missing(folder, "glue pretrain", settings, runs, lambda run: train.pretrain(run, texts, tokenizer, folder))
    yield folder / "rows.csv"
    yield from report.report(args.output)


def work_finetune(args: argparse.Namespace) -> Iterator[Path]:
    for method in args.methods:
        read_method(method, train.METHODS, train.OPTIONS)
    tokenizer = data.read_tokenizer(args.output, "Pretrain a model into this --output first.")
    for name in args.tasks:
        folder = args.output / "finetune" / name
        task = data.TASKS[name]
        examples = data.read_task(args, task, tokenizer)
        steps = args.epochs * -(-len(examples["train"]) // args.batch_size)
        options = fields_of(train.FineTune, args)
        options |= {"task": name, "steps": steps, "learning_rate": args.tuning_rate, "evaluations": args.epochs}
        kinds = [{"method": method, "seed": seed} for seed in args.seeds for method in args.methods]
        runs = [train.FineTune(**options | kind) for kind in kinds]
        shared = ("vocabulary", "length", "channels", "layers", "heads", "window", "position_encoding", "dropout")
        settings = settings_of(runs[0], f"{name}, scratch" if args.scratch else name, shared)
        parts = [(encoded.tokens, encoded.ptr, encoded.labels) for encoded in examples.values()]
        settings |= {f"checksum of {name}": fingerprint(x.numpy().tobytes() for part in parts for x in part)}
        settings |= {} if args.scratch else {f"pretrained-seed of {name}": args.pretrained_seed}
        of = {"task": task, "data": examples, "num_tokens": tokenizer.get_vocab_size(), "folder": folder}
        of |= {"pretrained": args.output / "pretrain", "pretrained_seed": args.pretrained_seed}
        train_missing(folder, "glue finetune", settings, runs, partial(train.finetune, **of))
        yield folder / "rows.csv"
    yield from report.report(args.output)


def work_evaluate(args: argparse.Namespace) -> Iterator[Path]:
    tokenizer = data.read_tokenizer(args.output, "Pretrain a model into this --output first.")
    lines = []
    for name in args.tasks:
        task, folder = data.TASKS[name], args.output / "finetune" / name
        if not (paths := sorted(folder.glob("*.best.pt"))):
            raise ValueError(f"Expected '{folder}' to hold fine-tuned models (got none). Fine-tune one first.")
        sets: dict[int, dict[str, data.Examples]] = {}  # by the length of the models
        for path in paths:
            run, model = train.load_best(path, task, tokenizer.get_vocab_size())
            title = path.name.removesuffix(".best.pt")
            scores: dict[str, Any] = {}  # rows of the dev sets
            if args.save:
                model = model.half().float()  # what is saved is what is evaluated
            if run.length not in sets:
                args.length = run.length
                sets[run.length] = data.read_task(args, task, tokenizer) | data.read_tests(args, task, tokenizer)
                del sets[run.length]["train"]
            for part, examples in sets[run.length].items():
                guessed, densities = train.predict(model, examples)
                if part in task.dev:
                    row = train.score(guessed, densities, examples, len(task.classes))
                    scores[part] = row
                    shares = (f"{100 * row[key]:.1f}" for key in ("accuracy", "f1", "density"))
                    lines.append([name, part, *map(str, list(run.identity.values())[1:]), len(examples), *shares])
                rows = (f"{number}\t{task.classes[guess]}" for number, guess in enumerate(guessed.tolist()))
                file = folder / "predictions" / f"{title}-{part}.tsv"
                file.parent.mkdir(exist_ok=True)
                write_text(file, "\n".join(["index\tprediction", *rows]) + "\n")
                yield file
            if args.save:
                start = "from random weights" if run.scratch else "after pretraining"
                command = f"python -m examples.glue finetune --tasks {name} --methods {run.method}"
                text = f"{task.folder}, {start}: `{command}`; the tokenizer makes one sequence of a text or a pair"
                results = {
                    f"{part}, {key}": row[key] for part, row in scores.items() for key in ("accuracy", "f1", "density")
                }
                yield data.save_model(args.save / title, model.half(), tokenizer, task=text, results=results)
    print(markdown(["task", "set", "run", "start", "seed", "examples", "accuracy, %", "F1, %", "density, %"], lines))


def work_table(args: argparse.Namespace) -> Iterator[Path]:
    yield from report.report(args.output)


STAGES = {
    "pretrain": program(parse_pretrain, work_pretrain),
    "finetune": program(parse_finetune, work_finetune),
    "evaluate": program(parse_evaluate, work_evaluate),
    "table": program(parse_table, work_table),
}


def main(arguments: Sequence[str] | None = None) -> None:
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    if not words or words[0] not in STAGES:
        command = Command(PROGRAM, __doc__)
        command.add_argument("stage", choices=tuple(STAGES), help="what to do; each has --help")
        command.parse_args(words[:1])
    STAGES[words[0]](words[1:])


if __name__ == "__main__":
    main()
