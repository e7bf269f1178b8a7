"""The command line of a program: options, their checks, and how a program ends."""

import argparse
import dataclasses
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from examples.common.runs import check_file, check_folder

BOUNDS = {"above": ("above", operator.gt), "least": ("at least", operator.ge), "below": ("below", operator.lt)}


class Command(argparse.ArgumentParser):
    """Options with usual values and bounds.

    Args:
        program: As it is called, or None for the name of the file.
        about: Text of the help, printed as it stands.
    """

    def __init__(self, program: str | None, about: str | None, **options: Any) -> None:
        super().__init__(program, description=about, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.bounds: list[tuple[str, str, Callable[..., bool], float]] = []

    def option(self, name: str, usual: Any, words: str = "", **more: Any) -> None:
        """Adds ``--name`` of the type of its usual value, several values if that is a list, within bounds if there are any.

        A type in place of a usual value leaves the option None unless it is given.
        """
        self.bounds += [(name, *BOUNDS[bound], more.pop(bound)) for bound in BOUNDS if bound in more]
        if isinstance(usual, type):
            more, usual, shown = {"type": usual} | more, None, None
        elif isinstance(usual, list):
            more = {"nargs": "+", "type": type(usual[0]), "metavar": name[0].upper()} | more
            shown = " ".join(f"{x:g}" if isinstance(x, float) else str(x) for x in usual)
        else:
            more, shown = {"type": type(usual)} | ({"metavar": "DIR"} if name == "output" else {}) | more, "%(default)s"
        words = words if shown is None or "(default" in words else f"{words} (default: {shown})".strip()
        self.add_argument(f"--{name}", default=usual, help=words, **more)

    def fields(self, kind: type) -> None:
        """Adds an option for each field of a dataclass that :func:`option` made."""
        for field in dataclasses.fields(kind):
            if "usual" in field.metadata:
                self.option(field.name.replace("_", "-"), **field.metadata)

    def folder(self, output: str, words: str = "of rows.csv and checkpoints") -> None:
        """Adds the options of a program that makes many runs, and reports what is in their folder."""
        self.option("seeds", [0], least=0)
        self.option("threads", 1, "of the CPU", above=0)
        self.option("output", Path(output), words)
        self.add_argument("--report", action="store_true", help="train nothing, report what is there")

    def read(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """The options of a command line; its ``fail`` ends the program with an error, and ``require`` does if a condition is not met."""
        sys.excepthook = stopped
        args = self.parse_args(arguments)
        args.fail = self.error
        for name, word, inside, bound in self.bounds:
            value = getattr(args, name.replace("-", "_"))
            for number in value if isinstance(value, list) else [value]:
                if number is not None and not inside(number, bound):  # NaN is not
                    self.error(f"Expected '{name}' to be {word} {bound:g} (got {value}). See --help.")
        channels, heads = (getattr(args, name, None) for name in ("channels", "heads"))
        if channels and heads:
            self.require(channels % heads == 0, f"'heads' to divide 'channels' = {channels}", heads, "Take 1, 2 or 4.")
        for name, check in (("save", check_folder), ("csv", check_file), ("json", check_file)):  # written at the end
            if isinstance(path := getattr(args, name, None), Path):
                self.attempt(check, name, path)
        return args

    def attempt(self, check: Callable[..., None], *args: Any) -> None:
        """Ends the program with an error if a check raises a ``ValueError``."""
        try:
            check(*args)
        except ValueError as error:
            self.error(str(error))

    def require(self, met: Any, words: str, got: Any, way_out: str = "See --help.") -> None:
        """Ends the program with an error unless a condition is met."""
        self.attempt(require, met, words, got, way_out)

    def require_files(self, **files: Sequence[Path]) -> None:
        """Ends the program unless all options name files of text."""
        missing = [str(path) for paths in files.values() for path in paths if not path.is_file()]
        missing += [f"no {name}" for name, paths in files.items() if not paths]
        names = " and ".join(f"'{name}'" for name in files)
        words, way_out = f"{names} to be files of text", "Give their paths, as in --help."
        self.require(not missing, words, ", ".join(missing), way_out)


def option(usual: Any, words: str = "", **more: Any) -> Any:
    """A field of a dataclass that is an option of :meth:`Command.option`; a type in place of a usual value is no default."""
    default = {} if isinstance(usual, type) else {"default": usual}
    return dataclasses.field(**default, metadata={"usual": usual, "words": words, **more})


def stopped(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An exception hook: Ctrl-C prints one line, with the notes of the exception, and exits with status 130. Other errors are shown as usual."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print("\nStopped.", *getattr(error, "__notes__", ()), file=sys.stderr)
    raise SystemExit(130)


def require(met: Any, words: str, got: Any, way_out: str) -> None:
    """Raises a ``ValueError`` in words for the user unless a condition is met."""
    if not met:
        raise ValueError(f"Expected {words} (got {got}). {way_out}")


def program(
    parse: Callable[..., argparse.Namespace], work: Callable[[argparse.Namespace], Iterable[Path]]
) -> Callable[..., None]:
    """The ``main`` of a program that yields the files that it writes; a ``ValueError`` ends it as a wrong option does.

    It works with as many threads as the option ``threads`` says, if there is one.
    """

    def main(arguments: Sequence[str] | None = None) -> None:
        args = parse(arguments)
        if "threads" in args:
            torch.set_num_threads(args.threads)
        try:
            paths = [*work(args)]
        except ValueError as error:
            args.fail(str(error))
        for path in paths:
            print(f"wrote {path}", file=sys.stderr)

    return main


def fields_of(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """The options that a dataclass has fields for, by their names."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(kind) if hasattr(args, field.name)}


def read_method(method: str, methods: Sequence[str], usual: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Kind and options of a method as text, with usual values for options that it leaves out.

    >>> read_method("sbm:probes=8", ("full", "sbm"), {"sbm": {"probes": 16.0, "estimator": "local"}})
    ('sbm', {'probes': 8.0, 'estimator': 'local'})
    """
    kind, _, pairs = method.partition(":")
    require(kind in methods, f"'methods' among {', '.join(methods)}", repr(kind), "See --help.")
    options = dict(usual.get(kind, {}))
    for pair in filter(None, pairs.split(",")):
        name, _, value = pair.partition("=")
        if name not in options or not value:
            choices = ", ".join(f"{name}={value}" for name, value in options.items()) or "none"
            raise ValueError(f"Expected options of {kind!r} in 'methods' among {choices} (got {method!r}).")
        try:
            options[name] = type(options[name])(value)
        except ValueError:
            text = f"Expected option {name!r} of 'methods' to be a number (got {value!r}). See --help."
            raise ValueError(text) from None
    return kind, options
