"""Tables of pretraining and of fine-tuning, means over seeds, and the curves of pretraining."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from examples.common.pictures import bare, save_figure, style
from examples.common.runs import write_text
from examples.common.tables import Row, Rows, by, deviation, groups, markdown, read


def report(folder: Path) -> Iterator[Path]:
    """Prints the tables of a folder of output, and writes them and the curves into it."""
    pretrained = read(folder / "pretrain" / "rows.csv")
    tuned = {path.parent.name: read(path) for path in sorted(folder.glob("finetune/*/rows.csv"))}
    if not pretrained and not tuned:
        raise ValueError(f"Expected 'output' to hold finished runs (got none in {folder}). Pretrain a model first.")
    parts = []
    if pretrained:
        parts.append(f"Masked tokens of the test texts:\n\n{pretraining(pretrained)}")
    for name, rows in tuned.items():
        about = f"{name}, {rows[0]['examples']:.0f} examples of dev, the best evaluation of each run:"
        parts.append(f"{about}\n\n{tuning(rows)}")
    text = "\n\n".join(parts)
    print(text)
    write_text(folder / "tables.md", text + "\n")
    yield folder / "tables.md"
    if pretrained:
        yield draw(pretrained, folder / "pretrain.png")


def pretraining(rows: Rows) -> str:
    """The last evaluation of each run, in means over seeds."""
    lines = []
    for name, seeds in by(rows, "run", "seed").items():
        ends = [seed_rows[-1] for seed_rows in seeds.values()]
        bits, perplexity = _mean(ends, "bits_per_token", 3), _mean(ends, "perplexity", 2)
        shares = [_mean(ends, key, 1, 100) for key in ("accuracy", "density", "sampled_density")]
        minutes = fmean(row["seconds"] for row in ends) / 60
        lines.append([name, len(ends), bits, perplexity, *shares, f"{minutes:.0f}"])
    return markdown(
        ["run", "seeds", "bits per masked token", "perplexity", "accuracy, %", "density, %", "sampled, %", "minutes"], lines
    )  # fmt: skip


def tuning(rows: Rows) -> str:
    """The best evaluation of each run by accuracy, in means over seeds; further dev sets at the same evaluation."""
    further = [key for key in rows[0] if key.startswith("accuracy_")]
    lines = []
    keys = ("accuracy", "f1", *further, "density", "sampled_density")
    for name, start, run_rows in groups(rows, "run", "start"):
        best = [max(seed_rows, key=lambda row: row["accuracy"]) for seed_rows in by(run_rows, "seed").values()]
        lines.append([name, start, len(best), *(_mean(best, key, 1, 100) for key in keys)])
    more = [f"{key.replace('_', ' (', 1)}), %" for key in further]
    return markdown(["run", "start", "seeds", "accuracy, %", "F1, %", *more, "density, %", "sampled, %"], lines)


def _mean(rows: list[Row], key: str, digits: int, factor: float = 1.0) -> str:
    return deviation([factor * row[key] for row in rows], digits)


def draw(rows: Rows, path: Path) -> Path:
    """Bits per masked token over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for number, (name, seeds) in enumerate(by(rows, "run", "seed").items()):
        for seed_rows in seeds.values():
            label = name if seed_rows is next(iter(seeds.values())) else None
            steps, bits = zip(*((row["step"], row["bits_per_token"]) for row in seed_rows), strict=True)
            axes.plot(steps, bits, label=label, **style(number))
    axes.set(xlabel="steps", ylabel="bits per masked token")
    axes.legend(frameon=False)
    bare(axes)
    save_figure(path, figure)
    return path
