"""The table of tasks of the Long Range Arena (LRA), and the program that generates, prepares and describes their data.

In: a folder in the layout of a task's release, or the parameters of a generator. Out: ``TASKS``, and all names that a user of
the data needs. Not here: settings and presets (``lra_settings.py``), formats (``lra_listops.py`` and its siblings), prepared arrays
(``lra_prepare.py``), batches (``lra_batches.py``), the trainer (``lra.py``). As a program::

    python examples/lra_tasks.py generate --task pathfinder --preset laptop --out data/pathfinder
    python examples/lra_tasks.py prepare --task text --data aclImdb
    python examples/lra_tasks.py describe --task text --data aclImdb
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import lra_image
import lra_listops
import lra_pathfinder
import lra_retrieval
import lra_text
from lra_batches import Batch, LengthBuckets, Row, Rows, Split, random_word
from lra_files import path_argument
from lra_prepare import load, prepare, read_manifest, splits_digest
from lra_settings import PRESETS, Preset, Settings

__all__ = [
    "TASKS", "Batch", "LengthBuckets", "Preset", "Row", "Rows", "Settings", "Split", "Task", "data_folder", "load", "prepare", "random_word",
    "splits_digest",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Task:
    """One row of the table of tasks.

    Args:
        name: As on the command line.
        tokeniser: In words, how text or pixels become token numbers.
        num_tokens: Size of the vocabulary, the unused padding number 0 included.
        num_classes: Number of labels.
        arity: Sequences per example: 1, or 2 for a pair.
        overflow: What becomes of sequences above the maximum length: "truncate" keeps their beginning and counts them,
            "error" refuses them.
        options: Of ``open``: for each its choices, the default first, and what they mean.
        open: Finds the splits "train", "val" and "test" in a folder, given (folder, **options).
        source: In words, where the data comes from.
        tree: What a folder of it looks like.
        presets: By name.
        generate: Writes a folder that ``open`` reads, given (folder, parameters, seed, progress); False if it is there. None
            for a task that is not synthetic.
        words: What token numbers stand for, for plots; empty where that is not worth reading.
        side: Of the square images whose pixels are the tokens, value plus one, row by row; 0 where tokens are no pixels.
    """

    name: str
    tokeniser: str
    num_tokens: int
    num_classes: int
    arity: Literal[1, 2]
    overflow: Literal["truncate", "error"]
    options: Mapping[str, Mapping[str, str]]
    open: Callable[..., Mapping[str, Rows]]
    source: str
    tree: str
    presets: Mapping[str, Preset]
    generate: Callable[..., bool] | None = None
    words: tuple[str, ...] = ()
    side: int = 0

    def complete(self, options: Mapping[str, str]) -> dict[str, str]:
        """Returns options of the reader with defaults for those that are not given.

        Raises:
            ValueError: If an option is unknown to the task or has no such choice.
        """
        for name, value in options.items():
            choices = self.options.get(name, {"none": ""})
            if value not in choices:
                raise ValueError(f"Expected '{name}' of {self.name} to be one of {', '.join(choices)} (got {value!r}). Choose one of them.")
        return {name: options.get(name, next(iter(choices))) for name, choices in self.options.items()}

    def options_of(self, settings: Settings) -> dict[str, str]:
        """Returns the options of the reader that settings name.

        Raises:
            ValueError: As :meth:`complete`, if settings are about pixels, and the task has none, or if its images have more than a sequence may.
        """
        for name, absent in (("mask_dark", -1), ("positions", "random"), ("values", "random")):
            if not self.side and getattr(settings, name) != absent:
                raise ValueError(
                    f"Expected '{name.replace('_', '-')}' to be {absent} for {self.name} (got {getattr(settings, name)}). Its tokens are no pixels."
                )
        if settings.max_length < self.side**2:
            raise ValueError(
                f"Expected 'max-length' to be at least the {self.side**2:,} pixels of an image of {self.name} (got {settings.max_length}). "
                "Raise --max-length."
            )
        return self.complete({"split": settings.split, "level": settings.level})

    def masked(self, settings: Settings) -> int | None:
        """Returns the highest token number that settings leave out, or None."""
        darkest = max(settings.mask_dark, 0 if settings.compat == "nystromformer" else -1)
        return None if not self.side or darkest < 0 else darkest + 1

    def load(self, settings: Settings, root: Path, *, prepared: Path | None = None, progress: bool = False) -> dict[str, Split]:
        """Maps all splits as settings want them; see :func:`lra_prepare.load`, also for errors."""
        chosen, masked = self.options_of(settings), self.masked(settings)
        return load(self, root, max_length=settings.max_length, options=chosen, prepared=prepared, masked=masked, progress=progress)

    def pipeline(self, settings: Settings, splits: Mapping[str, Split] | None = None) -> dict[str, str]:
        """Says in words what a result depends on beside the model: tokeniser, length and split, and how many examples were there."""
        chosen = self.options_of(settings)
        masked = self.masked(settings)
        cut = f"cut to {settings.max_length:,} tokens" if self.overflow == "truncate" else "whole"
        return {
            "tokeniser": self.tokeniser,
            "length": f"sequences {cut}, never padded",
            **({} if masked is None else {"mask": f"pixels up to {masked - 1} of 255 left out, the others in their places"}),
            **({"compat": settings.compat + ": " + COMPAT} if settings.compat != "none" else {}),
            **{name: f"{value}: {self.options[name][value]}" for name, value in chosen.items()},
            **({"examples": "/".join(f"{len(splits[name]):,}" for name in ("train", "val", "test"))} if splits else {}),
        }


BYTES = "bytes, numbered from 1; nothing is removed"
COMPAT = "black pixels left out, as if they were padding; sums over tokens divided by the maximum length"
PIXELS = "numbered from 1 by value, rows of the image one after the other; black is a token like any other"
TASKS = {
    "listops": Task(
        name="listops",
        tokeniser="words; round brackets dropped; 10 digits, 4 operators and the closing bracket, numbered from 1",
        num_tokens=len(lra_listops.VOCABULARY) + 1,
        num_classes=10,
        arity=1,
        overflow="truncate",  # as LRA does; its own trees have fewer than 2,000 tokens
        options={"split": lra_listops.SPLIT_CHOICES},
        open=lra_listops.open_splits,
        source=lra_listops.SOURCE,
        tree=lra_listops.EXPECTED_TREE,
        presets=PRESETS["listops"],
        generate=lra_listops.generate,
        words=("padding", *lra_listops.VOCABULARY),
    ),
    "text": Task(
        name="text",
        tokeniser=BYTES,
        num_tokens=257,
        num_classes=2,
        arity=1,
        overflow="truncate",
        options={"split": lra_text.SPLITS},
        open=lra_text.open_splits,
        source=lra_text.SOURCE,
        tree=lra_text.EXPECTED_TREE,
        presets=PRESETS["text"],
    ),
    "retrieval": Task(
        name="retrieval",
        tokeniser=f"{BYTES}, the texts being Python literals b'...' as they stand",
        num_tokens=257,
        num_classes=2,
        arity=2,
        overflow="truncate",
        options={"split": lra_retrieval.SPLITS},
        open=lra_retrieval.open_splits,
        source=lra_retrieval.SOURCE,
        tree=lra_retrieval.EXPECTED_TREE,
        presets=PRESETS["retrieval"],
    ),
    "image": Task(
        name="image",
        tokeniser=f"1,024 grey pixels, floor(255.5 (0.2989 R + 0.587 G + 0.114 B) / 255), {PIXELS}",
        num_tokens=257,
        num_classes=10,
        arity=1,
        overflow="error",
        options={"split": lra_image.SPLITS},
        open=lra_image.open_splits,
        source=lra_image.SOURCE,
        tree=lra_image.EXPECTED_TREE,
        presets=PRESETS["image"],
        side=32,
    ),
    "pathfinder": Task(
        name="pathfinder",
        tokeniser=f"1,024 grey pixels, {PIXELS}",
        num_tokens=257,
        num_classes=2,
        arity=1,
        overflow="error",
        options={
            "split": lra_pathfinder.SPLITS,
            "level": {
                "curv_contour_length_14": "long snakes of 14 paddles, the hard level, which LRA uses",
                "curv_contour_length_9": "long snakes of 9 paddles, the middle level",
                "curv_baseline": "long snakes of 6 paddles, the easy level",
            },
        },
        open=lra_pathfinder.open_splits,
        source=lra_pathfinder.SOURCE,
        tree=lra_pathfinder.EXPECTED_TREE,
        presets=PRESETS["pathfinder"],
        generate=lra_pathfinder.generate,
        side=32,
    ),
}


def data_folder(
    task: Task, preset: str, settings: Settings, given: Path | None, *, start: Path = Path(), progress: bool = True
) -> tuple[Path, bool]:
    """Settles where the data of a run is, and generates it if it was not given.

    Args:
        task: What to learn.
        preset: Whose law the generated data has.
        settings: Of the run; the level of Pathfinder is theirs.
        given: The folder that the user gave, or None.
        start: Where the run was started, in whose "data" it is generated; here, if that is no longer there.
        progress: Whether to show a progress bar.

    Returns:
        The folder, and whether it was written now.

    Raises:
        ValueError: If none was given and the task has no generator.
    """
    if given is not None:
        return given, False
    if task.generate is None:
        raise ValueError(
            f"Expected 'data' to be a folder of {task.name}, which nobody can generate (got none). Give --data DIR. {task.source} The "
            f"folder looks like this:\n{task.tree}"
        )
    parameters, folder = task.presets[preset].data, f"{task.name}-{preset}"
    if hasattr(parameters, "level") and parameters.level != settings.level:
        parameters, folder = dataclasses.replace(parameters, level=settings.level), f"{folder}-{settings.level}"
    root = (start if start.is_dir() else Path()) / "data" / folder
    return root, task.generate(root, parameters, progress=progress)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generates, prepares and describes the data of the Long Range Arena.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("generate", help="write a data set in the layout of its release", argument_default=argparse.SUPPRESS)
    make.add_argument(
        "--task", choices=[name for name, task in TASKS.items() if task.generate], default="listops", help="(default: %(default)s)"
    )
    make.add_argument("--out", type=path_argument, required=True, metavar="DIR", help="folder to write; new or empty")
    make.add_argument("--preset", choices=("paper", "laptop"), default="paper", help="of the law (default: %(default)s)")
    make.add_argument("--seed", type=int, default=0, help="of the data (default: %(default)s)")
    for name, task in TASKS.items():
        if task.generate:
            law = make.add_argument_group(f"law of {name}", "each overrides the preset")
            for field in dataclasses.fields(task.presets["paper"].data):
                kind = {"int": int, "float": float, "str": str}[str(field.type)]
                law.add_argument("--" + field.name.replace("_", "-"), type=kind, help=f"(paper: {field.default})")
    for name, text in (("prepare", "parse a data set once into arrays"), ("describe", "print what is in a data set")):
        show = commands.add_parser(name, help=text)
        show.add_argument("--task", choices=tuple(TASKS), default="listops", help="(default: %(default)s)")
        show.add_argument("--data", type=path_argument, required=True, metavar="DIR", help="folder to read")
        where = ("--out", "--prepared") if name == "prepare" else ("--prepared",)
        show.add_argument(
            *where, type=path_argument, metavar="DIR", dest="prepared", help="where prepared arrays go (default: 'prepared' in --data)"
        )
        show.add_argument("--split", help="who is in 'val' (default: the first that `describe` lists)", default=argparse.SUPPRESS)
        show.add_argument("--level", help="of Pathfinder (default: curv_contour_length_14)", default=argparse.SUPPRESS)
        if name == "describe":
            show.add_argument("--max-length", type=int, help="longest sequence (default: that of the paper)")
    parsed = parser.parse_args(arguments)
    parsed.fail = parser.error
    return parsed


def _generate(task: Task, given: argparse.Namespace) -> None:
    parameters, names = task.presets[given.preset].data, {name for other in TASKS.values() if other.generate for name in _law(other)}
    law = {name: value for name, value in vars(given).items() if name in names}
    unknown = [name for name in law if name not in _law(task)]
    if unknown:
        option = unknown[0].replace("_", "-")
        raise ValueError(f"Expected '{option}' to be left out for {task.name} (got {law[unknown[0]]}). It belongs to another task.")
    assert task.generate is not None
    written = task.generate(given.out, dataclasses.replace(parameters, **law), seed=given.seed)
    print(f"{given.out}: " + ("written" if written else "already there, nothing to do"))


def _law(task: Task) -> list[str]:
    return [field.name for field in dataclasses.fields(task.presets["paper"].data)]


def _describe(task: Task, given: argparse.Namespace, options: Mapping[str, str]) -> None:
    settings = task.presets["paper"].settings
    changes: dict[str, Any] = {"max_length": settings.max_length if given.max_length is None else given.max_length, **options}
    settings = dataclasses.replace(settings, **changes)
    splits = load(task, given.data, max_length=settings.max_length, options=options, prepared=given.prepared, progress=True)
    for name, words in task.pipeline(settings, splits).items():
        print(f"{name:>9}: {words}")
    for name, choices in task.options.items():
        for choice in set(choices) - {options[name]}:
            print(f"{'':>9}  or --{name} {choice}: {choices[choice]}")
    for name, split in splits.items():
        print(
            f"{name:>9}: {len(split):,} examples, {split.lengths.mean():.1f} tokens on average, {split.lengths.max():,} at "
            f"most, {split.truncated:,} truncated, majority class {split.majority():.2%}"
        )


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; ``--help`` explains it."""
    given = _parse(arguments)
    task = TASKS[given.task]
    try:
        if given.command == "generate":
            return _generate(task, given)
        options = task.complete({name: getattr(given, name) for name in ("split", "level") if name in given})
        if given.command == "describe":
            return _describe(task, given, options)
        folder, written = prepare(task, given.data, options=options, prepared=given.prepared, progress=True)
        print(f"{folder}: " + ("written" if written else "already there, nothing to do"))
        for name, entry in read_manifest(folder)["splits"].items():
            left_out = f", {entry['skipped']} broken ones left out" if entry["skipped"] else ""
            print(f"{name:>9}: {entry['examples']:,} examples, {entry['tokens']:,} tokens{left_out}; labels {entry['labels']}")
    except ValueError as error:
        given.fail(str(error))


if __name__ == "__main__":
    main()
