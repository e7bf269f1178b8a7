"""Tables of accuracy, or of bits per token of text, and of paired gains over frozen twins; one picture for each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from examples.arena.methods import FROZEN, is_own, twin_of
from examples.arena.tasks import is_text
from examples.common.command import require
from examples.common.pictures import bare, name_of, plot_extent, save_figure, style
from examples.common.tables import Row, Rows, by, extent, groups, interval, last, markdown

HEADER = ("method", "start", "asked, %", "seeds", "accuracy, %", "over the frozen twin, points", "densities of layers, %",
          "edge to the answer, %", "training, ms a step", "inference, ms a sequence")  # fmt: skip
OF_TEXT = {"accuracy, %": "bits per token", "over the frozen twin, points": "below the frozen twin, bits",
           "edge to the answer, %": "bits per recalled token"}  # fmt: skip
NAMES = {"dsa": "DSA", "dash": "DashAttention", "hsa": "HSA", "gates": "straight-through gates", "concrete": "concrete edges",
         "indexer": "indexer (local)"}  # fmt: skip
Key = tuple[str, str, float]  # method, start and density
Ends = dict[Key, dict[int, list[Row]]]  # the last rows of each run, one of each size, by seed


def select(rows: Rows, values_of: Mapping[str, Sequence[Any]]) -> Rows:
    """The rows whose cells are among those that are wanted; full attention comes with every start and density."""

    def fits(row: Row) -> bool:
        free = ("start", "density") if row["method"] == "full" else ()
        return all(row[cell] in values for cell, values in values_of.items() if cell not in free)

    selected = [row for row in rows if fits(row)]
    words = ", ".join(f"{cell} {' or '.join(map(str, values))}" for cell, values in values_of.items())
    require(
        selected,
        "'output' to hold finished runs of what --report is asked for",
        f"none with {words}",
        "Leave out --report to make them.",
    )
    return selected


def ends_of(rows: Sequence[Row]) -> Ends:
    """The last rows of each run of one task."""
    ends: Ends = {}
    for method, start, density, seed, run in groups(rows, "method", "start", "density", "seed"):
        ends.setdefault((method, start, density), {})[int(seed)] = last(run)
    return ends


def _score(rows: Sequence[Row]) -> float:
    """Of the first size of the test, the one that is trained: accuracy in percent, or bits per token of text."""
    return float(rows[0]["bits"] if is_text(rows[0]["task"]) else 100 * rows[0]["accuracy"])


def _digits(task: str) -> int:
    """Digits of a score."""
    return 3 if is_text(task) else 1


def gain(ends: Ends, key: Key) -> tuple[float, float, int] | None:
    """Points of accuracy over the frozen twin on the same seeds, or bits below it, half of their interval, and the number of seeds.

    None without a twin.
    """
    twin = twin_of(key[0])
    other = ends.get((twin, *key[1:]), {}) if twin else {}
    pairs = [_score(rows) - _score(other[seed]) for seed, rows in ends.get(key, {}).items() if seed in other]
    if not pairs:
        return None
    mean, half = interval(pairs)
    return -mean if is_text(next(iter(other.values()))[0]["task"]) else mean, half, len(pairs)


def _gain_text(estimate: tuple[float, float, int] | None, digits: int) -> str:
    if estimate is None:
        return ""
    mean, half, count = estimate
    return f"{mean:+.{digits}f} (one seed)" if count < 2 else f"{mean:+.{digits}f} ± {half:.{digits}f}"


def _name(method: str) -> str:
    """A method in plain words."""
    parts = method.split(":", 2) if is_own(method) else ["", *method.split(":", 1)]
    kind, options = parts[1], parts[2] if len(parts) > 2 else ""
    if options == FROZEN:
        return f"{NAMES.get(kind, name_of(kind))}, frozen"
    return NAMES.get(kind, kind) if kind in NAMES or is_own(method) else name_of(method)


def _label(key: Key) -> str:
    """A method with its density and start."""
    return "full attention" if key[0] == "full" else f"{_name(key[0])}, {100 * key[2]:g} %, {key[1]} at first"


def tables(rows: Sequence[Row]) -> str:
    """One table in Markdown for each task; several sizes of a test stand in one cell, from the first to the last."""
    parts = []
    for task, task_rows in by(rows, "task").items():
        ends, lines, digits = ends_of(task_rows), [], _digits(task)
        for key, seeds in ends.items():
            runs = [*seeds.values()]
            sizes = zip(*([row["accuracy"] for row in run] for run in runs), strict=True)
            several = " / ".join(f"{100 * fmean(accuracies):.1f}" for accuracies in sizes)
            shown = extent([_score(run) for run in runs], digits) if len(runs[0]) == 1 else several
            layers = sorted(name for name in runs[0][0] if name.startswith("density_"))
            first = [run[0] for run in runs]
            cost = [f"{fmean(row[name] for row in first):.3g}" for name in ("train_ms", "infer_ms")]
            lines.append([
                key[0], "" if key[0] == "full" else key[1], f"{100 * key[2]:g}", len(runs), shown,
                _gain_text(gain(ends, key), digits),
                " / ".join(f"{100 * fmean(row[layer] for row in first):.1f}" for layer in layers),
                extent([row["bits_recalled"] for row in first], 3) if is_text(task)
                else f"{100 * fmean(row['answer_any'] for row in first):.1f}", *cost,
            ])  # fmt: skip
        header = [OF_TEXT.get(name, name) for name in HEADER] if is_text(task) else HEADER
        parts.append(f"## {task}\n\n{markdown(header, lines)}")
    return "\n\n".join(filter(None, [*parts, overview(rows)]))


def overview(rows: Sequence[Row]) -> str:
    """Two tables over all tasks for each start: mean scores at each density, and gains over frozen twins at the density in the middle."""
    tasks = {task: ends_of(task_rows) for task, task_rows in by(rows, "task").items()}
    keys = [key for ends in tasks.values() for key in ends]
    densities = sorted({density for method, _, density in keys if method != "full"})
    if len(tasks) < 2 or not densities:
        return ""
    percents, middle = " / ".join(f"{100 * density:g}" for density in densities), densities[len(densities) // 2]
    methods = [*dict.fromkeys(method for method, *_ in keys if not method.endswith(FROZEN))]
    header = ["method", *(f"{task}, bits" if is_text(task) else task for task in tasks)]
    parts = []
    for start in dict.fromkeys(start for method, start, _ in keys if method != "full"):
        shown, gains = [], []
        for m in methods:
            shown.append([m, *(_scores(task, ends, m, start, densities) for task, ends in tasks.items())])
            gains.append([m, *(_gain_text(gain(ends, (m, start, middle)), _digits(t)) for t, ends in tasks.items())])
        gains = [line for line in gains if any(line[1:])]
        parts.append(f"## {', '.join(tasks)}: accuracy in percent, {percents} % of the pairs asked, {start} at first")
        parts.append(markdown(header, shown))
        if gains:
            parts.append(f"Points over the frozen twin at {100 * middle:g} %:\n\n{markdown(header, gains)}")
    return "\n\n".join(parts)


def _scores(task: str, ends: Ends, method: str, start: str, densities: Sequence[float]) -> str:
    """Mean score at each density, or that of full attention; nothing where the method has no run."""
    keys = [key for key in ends if key[0] == "full"] if method == "full" else [(method, start, d) for d in densities]
    means = [f"{fmean(map(_score, ends[key].values())):.{_digits(task)}f}" if key in ends else "" for key in keys]
    return " / ".join(means) if any(means) else ""


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """One picture for each task, and one of the experiment with tokens that serve, if it is there."""
    figures: dict[str, Figure] = {}
    served: dict[int, Ends] = {}
    for task, task_rows in by(rows, "task").items():
        ends, lengths = ends_of(task_rows), {row["length"] for row in task_rows}
        if task.startswith("served-"):
            served[int(task.partition("-")[2])] = ends
        else:
            figures[task] = _lengths(task, ends) if len(lengths) > 1 else _ranks(task, ends)
    if served:
        figures["served"] = _served(served)
    for name, figure in figures.items():
        save_figure(folder / f"{Path(name).name}.png", figure, dpi=110)
    return [folder / f"{Path(name).name}.png" for name in figures]


def _ranks(task: str, ends: Ends) -> Figure:
    """Score of each method, a panel for each start and density; hollow marks are frozen twins, and light ones single seeds."""
    panels = [*dict.fromkeys(key[1:] for key in ends if key[0] != "full")] or [("dense", 1.0)]
    methods = [*dict.fromkeys(method for method, _, _ in ends)]
    names = [method for method in methods if not method.endswith(FROZEN)]
    names += [method for method in methods if method not in names and method not in map(twin_of, names)]
    full = next((seeds for (method, _, _), seeds in ends.items() if method == "full"), {})
    figure = Figure(figsize=(3.2 + 3.6 * len(panels), 1.2 + 0.3 * len(names)), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)
    for axes, (start, density) in zip(grid[0], panels, strict=True):
        for place, name in enumerate(reversed(names)):
            seeds = ends.get((name, start, density)) or (full if name == "full" else {})
            values = [_score(run) for run in seeds.values()]
            twin = [_score(run) for run in ends.get((twin_of(name) or "", start, density), {}).values()]
            if values and twin:
                axes.plot([fmean(twin), fmean(values)], [place, place], color="0.7", lw=2, zorder=1)
            for scores, look in ((twin, {"mfc": "white"}), (values, {})):
                if scores:
                    axes.plot(scores, [place] * len(scores), "o", color="tab:blue", alpha=0.25, ms=4, zorder=2)
                    axes.plot(fmean(scores), place, "o", color="tab:blue", ms=8, zorder=3, **look)
        axes.set_yticks(range(len(names)), [_name(name) for name in reversed(names)])
        title = f"{task}: {100 * density:g} % of the pairs, {start} at first"
        axes.set(
            title=title,
            **{"xlabel": "bits per token"} if is_text(task) else {"xlim": (-3, 103), "xlabel": "accuracy (%)"},
        )
        axes.grid(axis="x", alpha=0.3)
        bare(axes)
    figure.supxlabel("hollow: the frozen twin", fontsize="small")
    return figure


def _lengths(task: str, ends: Ends) -> Figure:
    """Accuracy over the length of the test; means over seeds."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, (key, seeds) in enumerate(ends.items()):
        sizes = [fmean(100 * row["accuracy"] for row in rows) for rows in zip(*seeds.values(), strict=True)]
        axes.plot([row["length"] for row in next(iter(seeds.values()))], sizes, label=_label(key), **style(number))
    axes.set(xscale="log", xlabel="tokens of a test sequence", ylabel="accuracy (%)", ylim=(-3, 103), title=task)
    bare(axes)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


def _served(tasks: dict[int, Ends]) -> Figure:
    """Accuracy over the number of tokens that can answer a question; a bar goes from the worst seed to the best."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    keys = [*dict.fromkeys(key for ends in tasks.values() for key in ends)]
    for number, key in enumerate(keys):
        ends_of_numbers = [(number, ends[key]) for number, ends in sorted(tasks.items()) if key in ends]
        points = [(number, [_score(run) for run in seeds.values()]) for number, seeds in ends_of_numbers]
        look: dict[str, Any] = style(number) | {"linestyle": "--" if key[0].endswith(FROZEN) else "-"}
        plot_extent(axes, points, label=_label(key), **look)
    words = f"stored values that answer a question, of {max(tasks)}"
    axes.set(xscale="log", xlabel=words, ylabel="accuracy (%)", ylim=(-3, 103))
    axes.set_xticks([*sorted(tasks)], map(str, sorted(tasks)))
    axes.minorticks_off()
    bare(axes)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure
