"""The command line of all programs for the Long Range Arena: ``python -m examples.lra train|pretrain|prepare|table|cost``."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from examples.common.command import Command
from examples.common.runs import check_folder
from examples.lra import cost, table, train
from examples.lra.data import tasks
from examples.lra.data.files import path_argument
from examples.lra.settings import METHODS, NAMES, PRESETS, parse_pretrain
from examples.lra.settings import parse as parse_train

PROGRAM = "python -m examples.lra"
Words = Sequence[str]


def _finish(command: Command, arguments: Words) -> argparse.Namespace:
    """Parses, and refuses a folder of output that cannot be made."""
    args = command.read(arguments)
    if "output" in args:
        command.attempt(check_folder, "output", args.output)
    return args


def _several(command: Command, name: str, values: Iterable[str], default: list[str], **more: Any) -> None:
    """Adds an option with one or more of some values, which its help lists."""
    words = f"of {', '.join(values)} (default: {' '.join(default)})"
    command.option(name, default, words, metavar=name[:-1].upper(), **more)


def parse_prepare(arguments: Words) -> argparse.Namespace:
    """Reads the command line of ``prepare``; laws of generators that are not given are absent from the result."""
    absent: dict[str, Any] = {"default": argparse.SUPPRESS}
    about = "Parses a data set once into arrays, and describes it; generates it first if asked to."
    command = Command(f"{PROGRAM} prepare", about)
    command.option("task", "listops", choices=tuple(PRESETS))
    command.add_argument("--data", type=path_argument, required=True, metavar="DIR", help="folder of the data")
    words = "where arrays go (default: 'prepared' in --data)"
    command.add_argument("--prepared", type=path_argument, metavar="DIR", help=words)
    command.add_argument("--split", help="examples of 'val' (default: that of the preset)", **absent)
    command.option("preset", "paper", "of lengths, splits and laws", choices=NAMES)
    words = "write the data first, in the layout of their release; new or empty folder"
    command.add_argument("--generate", action="store_true", help=words)
    command.option("seed", 0, "of generated data", least=0)
    for task, presets in PRESETS.items():
        if presets["paper"].data is not None:
            words = "each overrides the preset; --level is also that to read"
            law = command.add_argument_group(f"law of {task}, to generate", words)
            for field in dataclasses.fields(presets["paper"].data):
                kind, name = type(field.default), field.name.replace("_", "-")
                law.add_argument(f"--{name}", type=kind, help=f"(paper: {field.default})", **absent)
    return _finish(command, arguments)


def parse_table(arguments: Words) -> argparse.Namespace:
    """Reads the command line of ``table``; what stands after ``--`` is for the trainer."""

    def pair(text: str) -> tuple[str, Path]:
        task, equals, folder = text.partition("=")
        if not equals or task not in PRESETS:
            raise argparse.ArgumentTypeError(f"expected TASK=DIR with one of {', '.join(PRESETS)} (got {text!r})")
        return task, path_argument(folder)

    words = [*arguments]
    cut = words.index("--") if "--" in words else len(words)
    last = f"Settings for all runs follow after --, as the trainer takes them: {PROGRAM} table ... -- --max-length 1024"
    about = "Runs tasks x methods x seeds of the Long Range Arena and writes the tables."
    command = Command(f"{PROGRAM} table", about, epilog=last)
    _several(command, "tasks", PRESETS, ["listops"], choices=tuple(PRESETS))
    _several(command, "methods", (*METHODS, "or with settings after a colon"), ["sbm", "full"])
    command.option("seeds", [0], metavar="N")
    command.option("preset", "laptop", choices=NAMES)
    command.add_argument("--steps", type=int, help="equal steps for all (default: the preset's)")
    first = "train encoders on hidden tokens first, one for each task and seed, which all its methods begin with; N steps (default: the preset's)"
    command.add_argument("--pretrain", type=int, nargs="?", const=0, metavar="N", help=first)
    command.add_argument("--minutes", type=float, help="equal time for all: training and validation, without the test")
    folders = "folders of tasks that are not generated"
    command.add_argument("--data", nargs="+", type=pair, default=[], metavar="TASK=DIR", help=folders)
    command.option("accelerator", "auto", choices=("auto", "cpu", "cuda", "mps"))
    command.option("threads", int, "CPU threads (default: as the preset says)", metavar="N", least=1)
    command.add_argument("--output", type=path_argument, required=True, metavar="DIR", help="folder of all runs")
    command.add_argument("--report", action="store_true", help="make the tables again from the runs that are there")
    args = _finish(command, words[:cut])
    args.train_words = words[cut + 1 :]
    return args


def parse_cost(arguments: Words) -> argparse.Namespace:
    about = "Measures FLOPs, memory and time per task and method, or times steps of trained models side by side."
    command = Command(f"{PROGRAM} cost", about)
    _several(command, "tasks", PRESETS, [*PRESETS], choices=tuple(PRESETS))
    _several(command, "methods", (*METHODS, "or with settings after a colon"), [*METHODS])
    command.option("preset", "paper", choices=NAMES)
    command.option("length", int, "tokens per sequence (default: the preset's max-length)", least=1)
    command.option("batch", 1, "sequences at a time", least=1)
    command.option("repeats", 5, "of each timing; of runs, batches", least=1)
    command.option("threads", 1, "CPU threads", least=1)
    command.add_argument("--output", type=path_argument, required=True, metavar="DIR", help="folder of the tables")
    words = "time trained models of these folders instead; ratios are to the first"
    command.add_argument("--runs", nargs="+", type=path_argument, default=[], metavar="RUN", help=words)
    command.add_argument("--data", type=path_argument, metavar="DIR", help="where the data of the runs are now")
    return _finish(command, arguments)


COMMANDS: dict[str, tuple[Callable[[Words], argparse.Namespace], Callable[..., Any], str]] = {
    "train": (parse_train, train.run, "train on a task, or go on with a run"),
    "pretrain": (parse_pretrain, train.run, "learn hidden tokens of a task's examples, for `train --pretrained`"),
    "prepare": (parse_prepare, tasks.run, "generate, parse and describe a data set"),
    "table": (parse_table, table.run, "many runs, and the tables of the paper from them"),
    "cost": (parse_cost, cost.run, "FLOPs, memory and time of methods"),
}


def main(arguments: Words | None = None) -> Any:
    """Runs a command; ``--help`` explains them. Returns the result of its ``run``."""
    words = sys.argv[1:] if arguments is None else arguments
    listed = "\n".join(f"  {name:8} {text}" for name, (_, _, text) in COMMANDS.items())
    command = Command(PROGRAM, f"commands:\n{listed}")
    command.add_argument("command", choices=tuple(COMMANDS), help="each has its own --help")
    parse, run, _ = COMMANDS[command.parse_args(words[:1]).command]
    return run(parse(words[1:]))


if __name__ == "__main__":
    main()
