"""Settings of a training run, the presets of all tasks, the command line, and the plan of a run.

Presets are Table 7 of the paper, the published settings of self-pretraining, and ours for a laptop.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.common.command import Command, require
from examples.common.runs import SETTINGS, RunError, check_folder, read_record, write_record
from examples.lra.baselines import BASELINES
from examples.lra.data import listops, pathfinder
from examples.lra.data.files import path_argument
from sbm_pyg.layers import named
from sbm_pyg.sources import sbm
from sbm_pyg.training.estimators import ESTIMATORS

NAMES = ("laptop", "paper", "modern-laptop", "modern")
SPLITS = ("release", "held-out", "lra", "80-10-10")
SOURCES = tuple(name for name in named.source_names() if name != "full" and not named.required_options(name))
TARGETED = tuple(name for name in SOURCES if "target_density" in (named.options_of(name) or ()))
METHODS = ("full", "dcmm", *BASELINES, *SOURCES)
PLACES = ("data", "prepared", "pretrained")
INF = float("inf")
Words = Sequence[str]


def _option(help: str, least: float | None = None, most: float = INF, choices: Words = (), **default: Any) -> Any:
    """A field of `Settings`, with its help, choices and bounds."""
    return dataclasses.field(**default, metadata={"help": help, "choices": choices, "least": least, "most": most})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the outcome of a training run, apart from data and machine."""

    layers: int = _option("transformer layers", least=1)
    heads: int = _option("attention heads per layer", least=1)
    channels: int = _option("width of the model", least=1)
    head_channels: int = _option("width of a head", least=1)
    ffn_channels: int = _option("width inside the feed-forward blocks", least=1)
    max_length: int = _option("longest sequence, in tokens", least=1)
    split: str = _option("examples of 'val'; `prepare` explains those of a task", choices=SPLITS)
    compat: str = _option("older conventions; see docs/lra.md", choices=("none", "nystromformer"), default="none")
    mask_dark: int = _option("leave out pixels up to this value; -1 keeps all", least=-1, most=254, default=-1)
    positions: str = _option(
        "'random', 'grid' (by row, column): initial embeddings, learned; 'rotary', 'rotary-grid': queries and keys turn",
        choices=("random", "grid", "rotary", "rotary-grid"), default="random",
    )  # fmt: skip
    values: str = _option("initial tokens; 'smooth': alike grays", choices=("random", "smooth"), default="random")
    level: str = _option("of difficulty, for Pathfinder", choices=("none", *pathfinder.LEVELS))
    dropout: float = _option("dropout on embeddings and blocks", least=0.0, most=0.99)
    attention_dropout: float = _option("dropout on attention weights", least=0.0, most=0.99)

    attention: str = _option("kind of attention", choices=METHODS)
    estimator: str = _option(
        "gradient of 'sbm' and indexers; with imitate and none, indexers choose by rank", choices=tuple(ESTIMATORS)
    )
    probes: float = _option("pairs per query that the estimator 'local' looks at in addition to the edges", least=0.0)
    num_clusters: int = _option("blocks (clusters) of 'sbm', and of 'dcmm'", least=1)
    block_size: int = _option("tokens that 'sbm' chooses keys for, and among, together", least=1)
    row_group: int = _option(
        "consecutive queries of 'sbm' that share their draws; 0: the default of the layer", least=0, default=0
    )
    cluster_init: str = _option("initial cluster embeddings of 'sbm'", choices=sbm.CLUSTER_INITS)
    parameterization: str = _option("form of the block model of 'sbm'", choices=sbm.PARAMETERIZATIONS)
    initial_density: float = _option("edge probability of 'sbm' at the start ('paper', 'mixed')", least=0.0, most=1.0)
    temperature: float = _option("of softmax memberships of 'sbm' ('mixed', 'assortative')", least=0.0)
    tied: int = _option("1: keys of 'sbm' take their memberships from queries", least=0, most=1)
    degree_corrected: int = _option("1: tokens of 'sbm' have degrees", least=0, most=1, default=0)
    target_density: float = _option(
        f"density of {', '.join(map(repr, TARGETED))}; dense attention first; see docs/lra.md; 0: none",
        least=0.0, most=1.0, default=0.0,
    )  # fmt: skip
    exploration: float = _option("probability added to every edge of 'sbm' in training", least=0.0, most=1.0)
    window: int = _option("tokens on each side that 'window' attention reaches", least=0)
    density_weight: float = _option("weight of the expected density of 'sbm' in the loss (lambda)", least=0.0)
    density_floor: float = _option("expected density of a head that costs nothing", least=0.0, most=1.0, default=0.0)
    # Of the baselines: the caption of Table 7; chunk and kernel are those of the code that the paper took its baselines from.
    linformer_rank: int = _option("mixtures of keys in 'linformer'", least=1, default=256)
    hash_rounds: int = _option("rounds of hashing in 'reformer'", least=1, default=2)
    hash_chunk: int = _option("tokens per chunk in 'reformer'", least=1, default=64)
    random_features: int = _option("random features in 'performer'", least=1, default=256)
    landmarks: int = _option("landmarks in 'nystromformer'", least=1, default=256)
    value_kernel: int = _option("tokens under the convolution in 'nystromformer', odd; 0: none", least=0, default=35)

    mask_ratio: float = _option("part of the tokens that `pretrain` hides", least=0.01, most=0.99)
    batch_size: int = _option("sequences per optimizer step, however they are accumulated", least=1)
    accumulate: int = _option("equal parts in which a batch is processed, to save memory", least=1)
    steps: int = _option("optimizer steps", least=1)
    warmup: int = _option("steps until the learning rate peaks; keeps its share of --steps if not given", least=0)
    learning_rate: float = _option("peak learning rate of AdamW (one cycle, linear)", least=0.0)
    weight_decay: float = _option("weight decay of AdamW", least=0.0)
    clip_norm: float = _option("clip the gradient to this norm; 0 does not clip", least=0.0)
    precision: str = _option("arithmetic", choices=("32-true", "bf16-mixed"))
    seed: int = _option("of weights, order of data, dropout and sampled graphs", least=0, most=2**31 - 1)
    validate_every: int = _option("steps between validations", least=1)
    save_every: int = _option("steps between checkpoints; one follows every validation, too", least=1, default=50)
    evaluate: int = _option("validate and test on at most so many examples; 0 takes all", least=0, default=0)
    test_graphs: int = _option("sampled graphs over which the final test averages probabilities", least=1, default=1)
    log_every: int = _option("steps between rows of train.csv", least=1)

    def __post_init__(self) -> None:
        def need(option: str, met: bool, range_text: str, way_out: str) -> None:
            require(met, f"'{option}' to be {range_text}", getattr(self, option.replace("-", "_")), way_out)

        for field in dataclasses.fields(self):
            least, most = field.metadata["least"], field.metadata["most"]
            if least is not None:
                value = getattr(self, field.name)
                range_text = f"at least {least}" + (f" and at most {most}" if most < INF else "")
                need(field.name.replace("_", "-"), least <= value <= most and value < INF, range_text, "See --help.")
        need("warmup", self.warmup < self.steps, f"below 'steps' = {self.steps}", "Warm up for fewer steps.")
        equal = self.batch_size % self.accumulate == 0
        need("accumulate", equal, f"a divisor of 'batch-size' = {self.batch_size}", "Parts of a batch are equal.")
        free = self.density_weight == 0 or self.attention == "sbm"
        need("density-weight", free, f"0 for {self.attention!r} attention", "Only 'sbm' learns its density.")
        free = self.target_density == 0 or self.attention in TARGETED
        need("target-density", free, f"0 for {self.attention!r} attention", f"Only {', '.join(TARGETED)} have one.")
        free = self.target_density == 0 or self.density_weight == 0
        need("target-density", free, "0 with a 'density-weight'", "One of them decides how many edges there are.")
        need("target-density", self.target_density < 1, "below 1", "Dense attention is '--attention full'.")
        free = self.attention not in BASELINES or not self.positions.startswith("rotary")
        need("positions", free, f"random or grid for {self.attention!r} attention", "It has no queries to turn.")


@dataclasses.dataclass(frozen=True)
class Preset:
    """Settings of a training run, and what else depends on the preset."""

    settings: Settings
    data: Any = None  # parameters of the task's generator; None for a task without one
    threads: int | None = None  # of the CPU; None lets torch decide
    folder: str = ""  # name of the generated data, which presets share
    pretraining: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings of `pretrain` that differ


# Table 7 of the paper (Cho et al., 2022), LRA columns; "epochs" there are optimizer steps. Warm-up, weight decay, clipping,
# estimator and exploration are those of the published code. The authors validated every 50 steps; 250 costs a fifth and is ours.
# Splits are ours where theirs would choose the model on test data.
LISTOPS = Settings(
    layers=2, heads=2, channels=64, head_channels=32, ffn_channels=128, max_length=2048, split="release", level="none",
    dropout=0.1, attention_dropout=0.1,
    attention="sbm", estimator="mask", probes=16.0, num_clusters=128, block_size=1, row_group=1, cluster_init="kaiming",
    parameterization="paper", initial_density=0.25, temperature=1.0, tied=0, exploration=0.01, window=64, density_weight=0.0,
    batch_size=128, accumulate=1, steps=5000, warmup=1000, learning_rate=5e-4, weight_decay=0.0, clip_norm=0.0,
    precision="32-true", seed=0, validate_every=250, log_every=10, mask_ratio=0.15,
)  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "text": {"max_length": 3072, "split": "held-out", "steps": 20_000, "warmup": 8_000},
    "retrieval": {"max_length": 4096, "batch_size": 32, "learning_rate": 1e-4, "steps": 30_000, "warmup": 800},
    "image": {
        "max_length": 1024,
        "batch_size": 1024,
        "split": "held-out",
        "steps": 35_000,
        "warmup": 175,
        "mask_ratio": 0.5,
    },
    "pathfinder": {
        "max_length": 1024,
        "batch_size": 1024,
        "split": "80-10-10",
        "steps": 62_400,
        "warmup": 312,
        "mask_ratio": 0.5,
    },
}
OTHERS["pathfinder"]["level"] = "curv_contour_length_14"
TABLE_7 = {"listops": LISTOPS} | {name: dataclasses.replace(LISTOPS, **fields) for name, fields in OTHERS.items()}

# Ours: the model of the paper, short enough for two cores and a few minutes. ListOps without nesting needs attention and is learned
# within minutes (on nested lists, such short runs of 'sbm' gained less than two points over no attention). The others are cut short.
QUICK: dict[str, Any] = {
    "estimator": "local", "row_group": 0, "exploration": 0.0, "dropout": 0.0, "attention_dropout": 0.0, "learning_rate": 2e-3, "clip_norm": 1.0,
    "linformer_rank": 64, "random_features": 64, "landmarks": 64,
}  # fmt: skip
LONG: dict[str, Any] = {**QUICK, "num_clusters": 32, "initial_density": 0.05, "evaluate": 1_000}
BYTES: dict[str, Any] = {**LONG, "max_length": 512, "steps": 400, "warmup": 50, "validate_every": 200}
SMALL: dict[str, Any] = {"linformer_rank": 8, "landmarks": 8, "hash_chunk": 8, "value_kernel": 5, "window": 8}
LISTS: dict[str, Any] = {"max_length": 128, "batch_size": 64, "steps": 800, "warmup": 100, "validate_every": 100}
SNAKES: dict[str, Any] = {"batch_size": 64, "steps": 1500, "warmup": 150, "validate_every": 250, "learning_rate": 3e-3}
# Each of 900 sample images is seen nine times: hence the dropout, and few validations, whose 100 images would choose by chance.
IMAGE: dict[str, Any] = {"dropout": 0.3, "weight_decay": 0.05, "positions": "grid", "values": "smooth"}
PRICE: dict[str, Any] = {"initial_density": 0.02, "density_weight": 0.5, "density_floor": 0.02}
# Values up to 8 are halos around the strokes, more pixels than the strokes themselves. They hide the discs, which are learned first.
PATHFINDER: dict[str, Any] = {"level": "curv_baseline", "positions": "grid", "mask_dark": 8, "initial_density": 0.25}
LAPTOP = {
    task: dataclasses.replace(TABLE_7[task], **changes)
    for task, changes in {
        "listops": QUICK | SMALL | LISTS,
        "text": BYTES | {"batch_size": 16},
        "retrieval": BYTES | {"batch_size": 8},
        "image": LONG | IMAGE | PRICE | {"batch_size": 16, "steps": 500, "warmup": 60, "validate_every": 250},
        "pathfinder": LONG | SNAKES | PATHFINDER,
    }.items()
}

# Amos et al., "Never Train from Scratch", ICLR 2024: sizes, lengths, batches, epochs (here in steps), warm-up, weight decay and the learning
# rates of images are those of their published code for transformers, and so is the part of hidden pixels. For the other tasks, it has a
# learning rate of 0.05 and no part; ours replace them. The graph source, rotary positions, and the schedule of the learning rate are ours.
ATTENDED: dict[str, Any] = {
    "attention": "sbm", "target_density": 0.05, "density_weight": 0.0, "density_floor": 0.0, "estimator": "local", "exploration": 0.0,
    "row_group": 0, "num_clusters": 32, "positions": "rotary",
}  # fmt: skip
DEEP: dict[str, Any] = {
    "layers": 6, "heads": 8, "channels": 512, "head_channels": 64, "ffn_channels": 2048, "batch_size": 32,
    "dropout": 0.0, "attention_dropout": 0.0, "learning_rate": 5e-4, "warmup": 2_000,
}  # fmt: skip
WIDE: dict[str, Any] = {
    **DEEP, "layers": 4, "channels": 128, "head_channels": 16, "ffn_channels": 128, "warmup": 5_000,
}  # fmt: skip
PAIRS: dict[str, Any] = {"heads": 4, "head_channels": 32, "ffn_channels": 512, "max_length": 4000}
PIXELS: dict[str, Any] = {
    "layers": 3,
    "heads": 4,
    "channels": 64,
    "batch_size": 50,
    "learning_rate": 1e-3,
    "warmup": 2_000,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "listops": {**DEEP, "steps": 300_000, "validate_every": 3_000},
    "text": {**DEEP, "max_length": 4096, "steps": 45_700, "validate_every": 700, "weight_decay": 0.1},
    "retrieval": {**WIDE, **PAIRS, "steps": 147_000, "validate_every": 4_600},
    "image": {**WIDE, **PIXELS, "steps": 180_000, "validate_every": 900},
    "pathfinder": {**WIDE, "steps": 1_000_000, "validate_every": 5_000},
}
PRETRAINING: dict[str, dict[str, Any]] = {
    "listops": {}, "text": {"steps": 22_500, "warmup": 5_000}, "retrieval": {"warmup": 2_000},
    "image": {"batch_size": 32, "steps": 70_300, "warmup": 2_500}, "pathfinder": {"steps": 250_000, "warmup": 2_500},
}  # fmt: skip
DENSE: dict[str, Any] = {"attention": "full", "target_density": 0.0, "density_weight": 0.0, "density_floor": 0.0}
MODERN = {task: dataclasses.replace(TABLE_7[task], **ATTENDED | changes) for task, changes in PUBLISHED.items()}
MODERN_LAPTOP = {task: dataclasses.replace(settings, **ATTENDED) for task, settings in LAPTOP.items()}
for _task in ("image", "pathfinder"):
    MODERN_LAPTOP[_task] = dataclasses.replace(MODERN_LAPTOP[_task], positions="rotary-grid")
FLAT: dict[str, Any] = {"max_depth": 2, "max_args": 30, "min_length": 16, "max_length": 64, "operator_probability": 1.0}
LAWS: Mapping[str, tuple[Any, Any]] = {  # of generated data, paper and laptop
    "listops": (listops.Parameters(), listops.Parameters(train=20_000, val=1_000, test=2_000, **FLAT)),
    "pathfinder": (pathfinder.Parameters(), pathfinder.Parameters(level="curv_baseline", images=30_000)),
}
# Batches of the laptop's ListOps are so small that two threads are no faster, and ten times slower on a busy machine.
PRESETS: dict[str, dict[str, Preset]] = {}
for _task in TABLE_7:
    _paper, _laptop = LAWS.get(_task, (None, None))
    _large: dict[str, Any] = {"data": _paper, "folder": "paper"}
    _small: dict[str, Any] = {"data": _laptop, "folder": "laptop", "threads": 1 if _task == "listops" else None}
    PRESETS[_task] = {
        "laptop": Preset(LAPTOP[_task], **_small, pretraining=DENSE),
        "paper": Preset(TABLE_7[_task], **_large, pretraining=DENSE),
        "modern-laptop": Preset(MODERN_LAPTOP[_task], **_small, pretraining=DENSE),
        "modern": Preset(MODERN[_task], **_large, pretraining=DENSE | PRETRAINING[_task]),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A run as its ``settings.json`` has it."""

    task: str
    preset: str
    settings: Settings
    directory: str  # where the run was started, from which relative places start
    data: str | None = None  # as it was given
    prepared: str | None = None
    minutes: float | None = None  # the budget that the steps were planned from
    fingerprint: str = ""  # of the data; empty before they are read
    is_pretraining: bool = False  # the tokens of the examples are learned, and not their labels
    pretrained: str | None = None  # folder of the run of `pretrain` whose encoder it begins with, as it was given
    beginning: str = ""  # that encoder in words, with its checksum; empty before it is read

    @property
    def program(self) -> str:
        """The command that makes the run."""
        return "pretrain" if self.is_pretraining else "train"

    def place(self, name: str) -> Path | None:
        """Returns the folder "data", "prepared" or "pretrained", or None."""
        folder, here = getattr(self, name), self.directory == str(Path.cwd())
        return None if folder is None else Path(folder) if here else Path(self.directory, folder)

    def write(self, path: Path) -> None:
        write_record(path, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> Plan:
        way_out = "Take it from a backup, or start a new run."
        content = read_record(path, way_out)
        try:
            return cls(**content | {"settings": Settings(**content["settings"])})
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"Expected '{path}' to be the settings of a run (got {error}). {way_out}") from None


def flags(changes: Mapping[str, Any]) -> list[str]:
    """Writes settings as words of the command line.

    >>> flags({"batch_size": 8})
    ['--batch-size', '8']
    """
    return [word for name, value in changes.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def method_words(method: str) -> list[str]:
    """Reads the name of a method: a kind of attention, and after a colon settings of its own.

    >>> method_words("sbm:density-weight=0.1,num-clusters=64")
    ['--attention', 'sbm', '--density-weight', '0.1', '--num-clusters', '64']
    """
    attention, _, text = method.partition(":")
    require(attention in METHODS, f"'methods' among {', '.join(METHODS)}", repr(attention), "See --help.")
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    words = "'methods' to be names like sbm or sbm:density-weight=0.1"
    require(all(value for _, _, value in pairs), words, repr(method), "See --help.")
    return ["--attention", attention, *flags({name: value for name, _, value in pairs})]


def parse_pretrain(arguments: Words | None = None) -> argparse.Namespace:
    """Reads the command line of `pretrain`, which is that of the trainer without what needs labels."""
    return parse(arguments, is_pretraining=True)


def parse(arguments: Words | None = None, is_pretraining: bool = False) -> argparse.Namespace:
    """Reads the trainer's command line; options that are not given are absent, except for those of the machine."""
    about = "Trains on a task of the Long Range Arena."
    if is_pretraining:
        about = (
            "Trains an encoder to predict hidden tokens of the training examples of a task, for `train --pretrained`."
        )
    program = f"python -m examples.lra {'pretrain' if is_pretraining else 'train'}"
    command = Command(program, about, argument_default=argparse.SUPPRESS)
    command.set_defaults(is_pretraining=is_pretraining)
    command.add_argument("--task", choices=tuple(PRESETS), help="what to learn (default: listops)")
    command.add_argument("--preset", choices=NAMES, help="where all other settings come from (default: laptop)")
    places = {
        "data": "a folder of the task; by default one is generated in data/",
        "prepared": "where prepared arrays go (default: 'prepared' in the data's folder)",
        "output": "folder of the run (default: a new one in runs/)",
    }
    if not is_pretraining:
        places["pretrained"] = "begin with the encoder of this run of `pretrain`"
        places["export"] = "save the tested model there, with its card, for `from_pretrained`"
    for option, words in places.items():
        command.add_argument(f"--{option}", type=path_argument, metavar="DIR", help=words)
    words = "go on with the run in --output; its settings are known"
    command.add_argument("--resume", action="store_true", help=words)
    if not is_pretraining:
        words = "as many steps as fit into that time, with their validations"
        command.add_argument("--minutes", type=float, metavar="M", help=words)
    command.option("accelerator", "auto", choices=("auto", "cpu", "cuda", "mps"))
    words = "CPU threads (default: 1 for listops on a laptop, else as torch chooses)"
    command.option("threads", int, words, metavar="N", least=1)
    first = argparse.ArgumentParser(add_help=False)  # the task alone, whose values --help shows
    first.add_argument("--task", nargs="?")
    task = first.parse_known_args(arguments)[0].task
    task = task if task in PRESETS else "listops"
    words = f"each overrides the preset; values are those of {' | '.join(NAMES)} for {task}, or one for all"
    group = command.add_argument_group("settings", words)
    for field in dataclasses.fields(Settings):
        kind = {"int": int, "float": float, "str": str}[str(field.type)]
        by_preset = [str(getattr(preset_settings(task, name, is_pretraining), field.name)) for name in NAMES]
        values = " | ".join(by_preset if len({*by_preset}) > 1 else by_preset[:1])
        words, choices = f"{field.metadata['help']} ({values})", field.metadata["choices"] or None
        group.add_argument("--" + field.name.replace("_", "-"), type=kind, choices=choices, help=words)
    return command.read(arguments)


def preset_settings(task: str, preset: str, is_pretraining: bool = False) -> Settings:
    """Returns the settings of a preset, of `train` or of `pretrain`."""
    chosen = PRESETS[task][preset]
    return dataclasses.replace(chosen.settings, **chosen.pretraining) if is_pretraining else chosen.settings


def resolve(args: argparse.Namespace) -> tuple[Path, Plan]:
    """Settles folder and plan of a run: those that a resumed run was started with, else preset and command line."""
    options = vars(args)
    if "resume" in options:
        return _resumed(options)
    name, preset, minutes = options.get("task", "listops"), options.get("preset", "laptop"), options.get("minutes")
    is_valid = minutes is None or (0 < minutes < INF and "steps" not in options)
    words = "'minutes' to be positive and finite, without 'steps'"
    require(is_valid, words, minutes, "Steps are planned from --minutes.")
    chosen = {field.name: options[field.name] for field in dataclasses.fields(Settings) if field.name in options}
    settings = preset_settings(name, preset, args.is_pretraining)
    if "steps" in chosen and "warmup" not in chosen:
        chosen["warmup"] = settings.warmup * chosen["steps"] // settings.steps
    # only 'sbm' has what a preset prices, and a target density takes the place of a price, or a price that of a target
    attention = chosen.get("attention", settings.attention)
    if attention != "sbm" or chosen.get("target_density"):
        chosen.setdefault("density_weight", 0.0)
    if attention not in TARGETED or chosen.get("density_weight"):
        chosen.setdefault("target_density", 0.0)
    if attention in BASELINES and settings.positions.startswith("rotary"):  # which baselines do not have
        chosen.setdefault("positions", "random")
    settings = dataclasses.replace(settings, **chosen)
    folder = options.get("output") or next_folder(name, f"{preset}-pretraining" if args.is_pretraining else preset)
    full = folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir())
    got = f"{folder}, which has content"
    require(not full, "'output' to be a new or empty folder", got, "Choose another one, or add --resume.")
    check_folder("output", folder)
    fields: dict[str, Any] = {place: str(options[place]) for place in PLACES if place in options}
    fields |= {"minutes": minutes, "directory": str(Path.cwd()), "is_pretraining": args.is_pretraining}
    return folder, Plan(task=name, preset=preset, settings=settings, **fields)


def _resumed(options: Mapping[str, Any]) -> tuple[Path, Plan]:
    """Folder and plan of a run to go on with; settings that are given again have to be the same."""
    folder = options.get("output")
    if folder is None or not (folder / SETTINGS).exists():
        words = f"Expected 'output' to be the folder of a run to resume (got {folder}). Give --output the folder that holds its"
        raise ValueError(f"{words} {SETTINGS}, or start a new run without --resume.")
    plan = Plan.read(folder / SETTINGS)
    got = f"one of `{plan.program}`"
    program = "pretrain" if options["is_pretraining"] else "train"
    require(plan.program == program, f"'output' to be a run of `{program}`", got, "Call that command.")
    stored = {"task": plan.task, "preset": plan.preset, "minutes": plan.minutes, **dataclasses.asdict(plan.settings)}
    for name, value in stored.items():
        got, words = options.get(name, value), f"'{name.replace('_', '-')}' to be {value!r} as in the run to resume"
        require(got == value, words, repr(got), "Leave it out, or start a new run.")
    moved: dict[str, Any] = {name: str(options[name].absolute()) for name in PLACES if name in options}
    return folder, dataclasses.replace(plan, **moved)


def next_folder(task: str, preset: str) -> Path:
    """Returns the first folder in runs/ that there is not."""
    names = (Path("runs") / f"{task}-{preset}-{number}" for number in itertools.count(1))
    return next(path for path in names if not path.exists())
