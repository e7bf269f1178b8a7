"""The table of tasks of the Long Range Arena (LRA): how each is read; and the data of a run."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from examples.common.command import require
from examples.common.releases import REVIEWS, Release
from examples.lra.data import listops, pathfinder, readers
from examples.lra.data.batches import Rows, Split
from examples.lra.data.files import read_manifest
from examples.lra.data.prepare import KIND, load, prepare, splits_digest
from examples.lra.settings import PRESETS, Plan, Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One row of the table of tasks."""

    name: str  # as on the command line
    tokeniser: str  # in words, how text or pixels become token numbers
    num_tokens: int = 257  # the unused padding number 0 included
    num_classes: int = 2
    arity: Literal[1, 2] = 1  # sequences per example
    options: Mapping[str, Mapping[str, str]]  # of `open`: for each its choices, the default first, and what they mean
    open: Callable[..., Mapping[str, Rows]]  # finds the splits in a folder, given (folder, **options)
    release: Release
    # Writes a folder that `open` reads, given (folder, parameters, seed, progress); False if it is there.
    generate: Callable[..., bool] | None = None
    words: tuple[str, ...] = ()  # what token numbers stand for, where that is worth reading
    side: int = 0  # of the square images whose pixels are the tokens, value plus one, row by row; 0: no pixels

    def complete(self, options: Mapping[str, str]) -> dict[str, str]:
        """Returns options of the reader with defaults for those that are not given."""
        for name, value in options.items():
            choices = self.options.get(name, {"none": ""})
            words = f"'{name}' of {self.name} to be one of {', '.join(choices)}"
            require(value in choices, words, repr(value), "Choose one of them.")
        return {name: options.get(name, next(iter(choices))) for name, choices in self.options.items()}

    def options_of(self, settings: Settings) -> dict[str, str]:
        """Returns the options of the reader that settings name."""
        for name, allowed in (("mask_dark", [-1]), ("positions", ["random", "rotary"]), ("values", ["random"])):
            value = getattr(settings, name)
            words = f"'{name.replace('_', '-')}' to be {' or '.join(map(str, allowed))} for {self.name}"
            require(self.side or value in allowed, words, value, "Its tokens are no pixels.")
        words = f"'max-length' to be at least the {self.side**2:,} pixels of an image of {self.name}"
        require(settings.max_length >= self.side**2, words, settings.max_length, "Raise --max-length.")
        return self.complete({"split": settings.split, "level": settings.level})

    def masked(self, settings: Settings) -> int | None:
        """Returns the highest token number that settings leave out, or None."""
        darkest = max(settings.mask_dark, 0 if settings.compat == "nystromformer" else -1)
        return None if not self.side or darkest < 0 else darkest + 1

    def pipeline(self, settings: Settings, splits: Mapping[str, Split] | None = None) -> dict[str, str]:
        """The data of a result in words: tokenizer, length and split, and the numbers of examples."""
        masked = self.masked(settings)
        cut = "whole" if self.side else f"cut to {settings.max_length:,} tokens"
        words = {"tokeniser": self.tokeniser, "length": f"sequences {cut}, never padded"}
        if masked is not None:
            words["mask"] = f"pixels up to {masked - 1} of 255 left out, the others in their places"
        if settings.compat != "none":
            words["compat"] = f"{settings.compat}: {COMPAT}"
        words |= {name: f"{value}: {self.options[name][value]}" for name, value in self.options_of(settings).items()}
        if splits:
            words["examples"] = "/".join(f"{len(splits[name]):,}" for name in ("train", "val", "test"))
        return words


BYTES = "bytes, numbered from 1; nothing is removed"
COMPAT = "black pixels left out, as if they were padding; sums over tokens divided by the maximum length"
PIXELS = "numbered from 1 by value, rows of the image one after the other; black is a token like any other"
TREES = "words; round brackets dropped; 10 digits, 4 operators and the closing bracket, numbered from 1"
GRAYS = f"1,024 gray pixels, floor(255.5 (0.2989 R + 0.587 G + 0.114 B) / 255), {PIXELS}"
PATHFINDER_LEVELS = {
    "curv_contour_length_14": "long snakes of 14 paddles, the hard level, which LRA uses",
    "curv_contour_length_9": "long snakes of 9 paddles, the middle level",
    "curv_baseline": "long snakes of 6 paddles, the easy level",
}
TASKS = {
    "listops": Task(
        name="listops", tokeniser=TREES, num_tokens=len(listops.VOCABULARY) + 1, num_classes=10,
        options={"split": readers.LISTOPS_SPLITS}, open=partial(readers.open_files, readers.LISTOPS, readers.read_trees),
        release=readers.LISTOPS, generate=listops.generate, words=("padding", *listops.VOCABULARY),
    ),
    "text": Task(
        name="text", tokeniser=BYTES, options={"split": readers.TEXT_SPLITS}, open=readers.open_text, release=REVIEWS,
    ),
    "retrieval": Task(
        name="retrieval", tokeniser=f"{BYTES}, the texts being Python literals b'...' as they stand", arity=2,
        options={"split": readers.RETRIEVAL_SPLITS}, open=partial(readers.open_files, readers.RETRIEVAL, readers.read_pairs),
        release=readers.RETRIEVAL,
    ),
    "image": Task(
        name="image", tokeniser=GRAYS, num_classes=10, options={"split": readers.IMAGE_SPLITS}, open=readers.open_image,
        release=readers.IMAGE, side=32,
    ),
    "pathfinder": Task(
        name="pathfinder", tokeniser=f"1,024 gray pixels, {PIXELS}",
        options={"split": readers.PATHFINDER_SPLITS, "level": PATHFINDER_LEVELS}, open=readers.open_pathfinder,
        release=readers.PATHFINDER, generate=pathfinder.generate, side=32,
    ),
}  # fmt: skip


def data_folder(plan: Plan) -> Path:
    """Settles where the data of a run are: the folder that was given, or one in "data" where the run was started (here, if that is gone)."""
    task, folder = TASKS[plan.task], plan.place("data")
    if folder is not None:
        return folder
    if task.generate is None:
        words = f"Expected 'data' to be a folder of {task.name}, which has no generator (got none). Give --data DIR."
        raise ValueError(f"{words} {task.release.source} {task.release.tree}")
    is_usual = getattr(PRESETS[plan.task][plan.preset].data, "level", plan.settings.level) == plan.settings.level
    start = Path(plan.directory) if Path(plan.directory).is_dir() else Path()
    name = f"{task.name}-{PRESETS[plan.task][plan.preset].folder}"
    return start / "data" / (name if is_usual else f"{name}-{plan.settings.level}")


def open_data(plan: Plan) -> tuple[dict[str, Split], str]:
    """Finds or generates the data of a run, and maps the splits "train", "val" and "test"; returns them, and their fingerprint."""
    task, settings, root = TASKS[plan.task], plan.settings, data_folder(plan)
    options = task.options_of(settings)
    if plan.data is None and task.generate is not None:
        law: Any = PRESETS[plan.task][plan.preset].data
        law = dataclasses.replace(law, level=settings.level) if hasattr(law, "level") else law
        task.generate(root, law)
    kwargs: dict[str, Any] = {"options": options, "prepared": plan.place("prepared"), "masked": task.masked(settings)}
    splits = load(task, root, max_length=settings.max_length, **kwargs)
    fingerprint = splits_digest(splits)
    words, got = "'data' to be what the run was started with", f"other examples in {root}"
    require(plan.fingerprint in ("", fingerprint), words, got, "Give its folder with --data.")
    return splits, fingerprint


def run(args: argparse.Namespace) -> None:
    """Generates a data set if the command line asks for it, prepares it, and describes it."""
    try:
        _describe(args)
    except ValueError as error:
        args.fail(str(error))


def _describe(args: argparse.Namespace) -> None:
    task, words = TASKS[args.task], vars(args)
    preset = PRESETS[args.task][args.preset]
    status = {True: "written", False: "already there, nothing to do"}
    law = [field.name for field in dataclasses.fields(preset.data)] if preset.data and args.generate else []
    allowed = {"task", "preset", "data", "prepared", "generate", "seed", "fail", *task.options, *law}
    if unknown := [name for name in words if name not in allowed]:
        name = unknown[0]
        got = f"'{name.replace('_', '-')}' to be left out (got {words[name]})"
        raise ValueError(f"Expected {got}. It belongs to another task, or to --generate.")
    if args.generate:
        if task.generate is None or preset.data is None:
            raise ValueError(f"Expected no 'generate' for {task.name} (got it). {task.release.source}")
        parameters = dataclasses.replace(preset.data, **{name: words[name] for name in law if name in words})
        print(f"{args.data}: {status[task.generate(args.data, parameters, seed=args.seed)]}")
    options = task.complete({name: words.get(name, getattr(preset.settings, name)) for name in task.options})
    chosen: Any = options
    settings = dataclasses.replace(preset.settings, **chosen)
    folder, written = prepare(task, args.data, options=options, prepared=args.prepared)
    print(f"{folder}: {status[written]}")
    splits = load(task, args.data, max_length=settings.max_length, options=options, prepared=args.prepared)
    for name, sentence in task.pipeline(settings, splits).items():
        print(f"{name:>9}: {sentence}")
    for name, choices in task.options.items():
        for choice in set(choices) - {options[name]}:
            print(f"{'':>9}  or --{name} {choice}: {choices[choice]}")
    for name, entry in read_manifest(folder, KIND)["splits"].items():
        split, left_out = splits[name], f", {entry['skipped']} broken ones left out" if entry["skipped"] else ""
        print(
            f"{name:>9}: {len(split):,} examples, {split.lengths.mean():.1f} tokens on average, {split.lengths.max():,} at most, "
            f"{split.truncated:,} truncated{left_out}; labels {np.bincount(split.labels).tolist()}, majority class {split.majority():.2%}"
        )
