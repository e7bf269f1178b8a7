"""The command line of all programs for the Long Range Arena: ``python -m examples.lra train|prepare|table|cost|graphs``.

In: words. Out: what they ask for, or an error that names the option, before any work. Not here: what the trainer's settings are
(``settings.py``), and what the programs do; they import torch, for which ``--help`` does not wait.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from examples.common.runs import check_folder
from examples.lra.data.files import path_argument
from examples.lra.settings import METHODS, NAMES, PRESETS
from examples.lra.settings import parse as parse_train

PROGRAM = "python -m examples.lra"
Words = Sequence[str]


def _parser(command: str, description: str, **options: Any) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(f"{PROGRAM} {command}", description=description, **options)


def _finish(parser: argparse.ArgumentParser, arguments: Words, **least: int) -> argparse.Namespace:
    """Parses, and refuses numbers below their least and a folder of output that cannot be made."""
    given = parser.parse_args(arguments)
    given.fail = parser.error
    if "output" in given:
        try:
            check_folder("output", given.output)
        except ValueError as error:
            parser.error(str(error))
    for name, bound in least.items():
        if getattr(given, name) is not None and getattr(given, name) < bound:
            parser.error(f"Expected '{name}' to be at least {bound} (got {getattr(given, name)}). See --help.")
    return given


def parse_prepare(arguments: Words) -> argparse.Namespace:
    """Reads the command line of ``prepare``; what is not given of a law is absent from the result."""
    absent: dict[str, Any] = {"default": argparse.SUPPRESS}
    about = "Parses a data set once into arrays, and says what is in it; generates it first if asked to."
    parser = _parser("prepare", about)
    parser.add_argument("--task", choices=tuple(PRESETS), default="listops", help="(default: %(default)s)")
    parser.add_argument("--data", type=path_argument, required=True, metavar="DIR", help="folder of the data")
    words = "where arrays go (default: 'prepared' in --data)"
    parser.add_argument("--prepared", type=path_argument, metavar="DIR", help=words)
    parser.add_argument("--split", help="who is in 'val' (default: that of the preset)", **absent)
    words = "of lengths, splits and laws (default: %(default)s)"
    parser.add_argument("--preset", choices=NAMES, default="paper", help=words)
    words = "write the data first, in the layout of their release; new or empty folder"
    parser.add_argument("--generate", action="store_true", help=words)
    parser.add_argument("--seed", type=int, default=0, help="of generated data (default: %(default)s)")
    for task, presets in PRESETS.items():
        if presets["paper"].data is not None:
            words = "each overrides the preset; --level is also that to read"
            law = parser.add_argument_group(f"law of {task}, to generate", words)
            for field in dataclasses.fields(presets["paper"].data):
                kind, name = {"int": int, "float": float, "str": str}[str(field.type)], field.name.replace("_", "-")
                law.add_argument(f"--{name}", type=kind, help=f"(paper: {field.default})", **absent)
    return _finish(parser, arguments, seed=0)


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
    parser = _parser("table", about, epilog=last)
    parser.add_argument("--tasks", choices=tuple(PRESETS), **_several(PRESETS, ["listops"], "TASK"))
    parser.add_argument(
        "--methods", **_several((*METHODS, "or with settings after a colon"), ["sbm", "full"], "METHOD")
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N", help="(default: 0)")
    parser.add_argument("--preset", choices=NAMES, default="laptop", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, help="equal steps for all (default: the preset's)")
    parser.add_argument("--minutes", type=float, help="equal time for all: training and validation, without the test")
    folders = "folders of tasks that are not generated"
    parser.add_argument("--data", nargs="+", type=pair, default=[], metavar="TASK=DIR", help=folders)
    parser.add_argument("--accelerator", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="(default: auto)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: as the preset says)")
    parser.add_argument("--output", type=path_argument, required=True, metavar="DIR", help="folder of all runs")
    parser.add_argument("--report", action="store_true", help="make the tables again from the runs that are there")
    given = _finish(parser, words[:cut], threads=1)
    given.rest = words[cut + 1 :]
    return given


def parse_cost(arguments: Words) -> argparse.Namespace:
    """Reads the command line of ``cost``."""
    about = "Measures FLOPs, memory and time per task and method, or times steps of trained models side by side."
    parser = _parser("cost", about)
    parser.add_argument("--tasks", choices=tuple(PRESETS), **_several(PRESETS, [*PRESETS], "TASK"))
    parser.add_argument("--methods", **_several((*METHODS, "or with settings after a colon"), [*METHODS], "METHOD"))
    parser.add_argument("--preset", choices=NAMES, default="paper", help="(default: %(default)s)")
    parser.add_argument("--length", type=int, help="tokens per sequence (default: the preset's max-length)")
    parser.add_argument("--batch", type=int, default=1, help="sequences at a time (default: %(default)s)")
    words = "of each timing; of runs, batches (default: %(default)s)"
    parser.add_argument("--repeats", type=int, default=5, help=words)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument("--output", type=path_argument, required=True, metavar="DIR", help="folder of the tables")
    words = "time trained models of these folders instead; ratios are to the first"
    parser.add_argument("--runs", nargs="+", type=path_argument, default=[], metavar="RUN", help=words)
    parser.add_argument("--data", type=path_argument, metavar="DIR", help="where the data of the runs are now")
    return _finish(parser, arguments, length=1, batch=1, repeats=1, threads=1)


def parse_graphs(arguments: Words) -> argparse.Namespace:
    """Reads the command line of ``graphs``."""
    parser = _parser("graphs", "Writes a report on the graphs that a trained model samples.")
    parser.add_argument("--run", type=path_argument, required=True, metavar="DIR", help="folder of a run")
    words = "folder of the data, if it is not where the run found it"
    parser.add_argument("--data", type=path_argument, metavar="DIR", help=words)
    parser.add_argument("--split", choices=("train", "val", "test"), default="val", help="(default: %(default)s)")
    words = "for densities; at random (default: %(default)s)"
    parser.add_argument("--examples", type=int, default=500, metavar="N", help=words)
    words = "of them, for structure and universality (default: %(default)s)"
    parser.add_argument("--structure", type=int, default=20, metavar="N", help=words)
    words = "seconds for each condition of each set (default: %(default)s)"
    parser.add_argument("--time-limit", type=float, default=5.0, metavar="S", help=words)
    return _finish(parser, arguments, examples=1, structure=1, time_limit=0)


def _several(values: Iterable[str], default: list[str], name: str) -> dict[str, Any]:
    """An option with one or more of some values, which its help tells."""
    words = f"of {', '.join(values)} (default: {' '.join(default)})"
    return {"nargs": "+", "default": default, "metavar": name, "help": words}


COMMANDS: dict[str, tuple[Callable[[Words], argparse.Namespace], str, str]] = {
    "train": (parse_train, "train", "train on a task, or go on with a run"),
    "prepare": (parse_prepare, "data.tasks", "generate, parse and describe a data set"),
    "table": (parse_table, "table", "many runs, and the tables of the paper from them"),
    "cost": (parse_cost, "cost", "FLOPs, memory and time of methods"),
    "graphs": (parse_graphs, "graphs", "a report on the graphs of a trained model"),
}


def main(arguments: Words | None = None) -> Any:
    """Runs a command; ``--help`` explains them. Returns what its ``run`` returns."""
    words = sys.argv[1:] if arguments is None else arguments
    told = "\n".join(f"  {name:8} {text}" for name, (_, _, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        PROGRAM, description=f"commands:\n{told}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=tuple(COMMANDS), help="each has its own --help")
    parse, module, _ = COMMANDS[parser.parse_args(words[:1]).command]
    given = parse(words[1:])
    return importlib.import_module(f"examples.lra.{module}").run(given)


if __name__ == "__main__":
    main()
