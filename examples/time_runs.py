"""How long the steps of trained models take, side by side: the same batches, the same process, one after the other.

In: folders of runs of ``lra.py`` on one task. Out: a table, and with ``--output`` ``time.md`` and all times in ``steps.csv``. Not here: models
before training (``cost_lra.py``), whole runs and their accuracy (``reproduce_lra.py``)::

    python examples/time_runs.py runs/hour/runs/listops-full-0 runs/hour/runs/listops-sbm-0 --threads 2

The steps that a run logs say how fast it went on a machine that did other things besides, with another batch at every step. Here each
batch goes through all models in turn, the order changing from batch to batch, and ratios are those of the same batch. A step is what the
trainer does: forward, backward, clipping and the optimiser, in the run's precision and its parts of a batch, at a learning rate of 0, with
subnormal numbers flushed. Before it is timed, each model passes the gate of ``cost_lra.py``.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lra_files import check_writable, path_argument


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Times steps of trained models side by side, batch by batch.")
    parser.add_argument("runs", nargs="+", type=path_argument, metavar="RUN", help="folders of runs of lra.py; ratios are to the first")
    parser.add_argument("--checkpoint", metavar="NAME", help="whose weights are taken (default: those of the best validation)")
    parser.add_argument("--data", type=path_argument, metavar="DIR", help="where the data are now, if not where the runs had them")
    parser.add_argument("--steps", type=int, default=20, help="batches at most, after one that is not counted (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument("--output", type=path_argument, metavar="DIR", help="folder for the table and the times of all steps")
    given = parser.parse_args(arguments)
    given.fail = parser.error
    for name in ("steps", "threads"):
        if getattr(given, name) < 1:
            parser.error(f"Expected '{name}' to be at least 1 (got {getattr(given, name)}). Leave it out for the default.")
    if len({folder.name for folder in given.runs}) < len(given.runs):
        parser.error("Expected 'runs' whose folders have different names (got some twice). They name the rows; rename one.")
    return given


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

import lra
import lra_tables as tables
from analyse_graphs import open_run
from cost_lra import gate
from lra_checkpoints import BEST
from lra_report import write_text
from lra_tasks import Batch, LengthBuckets
from lra_upkeep import flushed_subnormals

PARTS = ("forward", "backward", "update")


def timed_step(module: lra.Classifier, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], number: int) -> dict[str, float]:
    """Trains on the parts of a batch without learning anything.

    Returns:
        Seconds of each of ``PARTS``, and the mean density of the graphs (1 without graphs).
    """
    seconds, density = np.zeros(len(PARTS)), 0.0
    optimizer.zero_grad()
    for batch in batches:
        clock = [time.perf_counter()]
        with torch.autocast("cpu", torch.bfloat16, enabled=module.settings.precision == "bf16-mixed"):
            logits, trace = module.classify(batch, seed=number)
            loss = module.objective(cross_entropy(logits.float(), batch.labels), trace) / len(batches)
        clock.append(time.perf_counter())
        loss.backward()
        clock.append(time.perf_counter())
        seconds[:2] += np.diff(clock)
        density += float(trace.density.mean()) * len(batch.labels)
    start = time.perf_counter()
    if module.settings.clip_norm:
        torch.nn.utils.clip_grad_norm_(module.parameters(), module.settings.clip_norm)
    optimizer.step()
    seconds[2] = time.perf_counter() - start
    return {**dict(zip(PARTS, seconds.tolist(), strict=True)), "density": density / sum(len(batch.labels) for batch in batches)}


def measure(folders: Sequence[Path], checkpoint: str, data: Path | None, steps: int) -> list[dict[str, Any]]:
    """Times steps of runs on the training batches of the first.

    Returns:
        A row for each batch and run.

    Raises:
        ValueError: If a run cannot be read, is of another task or takes its examples in another form, if its model fails the gate, or if
            there are no two batches.
    """
    runs = [open_run(folder, checkpoint, data, graphs=False) for folder in folders]
    task, _, splits, _ = runs[0]
    modules, optimizers = [], []
    form = task.pipeline(runs[0][1].settings)
    for folder, (its_task, module, _, _) in zip(folders, runs, strict=True):
        if its_task is not task:
            raise ValueError(
                f"Expected 'runs' of one task, {task.name} as the first (got {its_task.name} in {folder}). Compare them apart."
            )
        its_form = task.pipeline(module.settings)
        for name in dict.fromkeys([*form, *its_form]):
            one, other = form.get(name, "none"), its_form.get(name, "none")
            if one != other:
                raise ValueError(
                    f"Expected 'runs' that take examples in one form, {name}: {one}, as the first (got {other!r} in {folder}). Its steps "
                    "would be timed on batches that it never had; compare them apart."
                )
        gate(module, task, torch.device("cpu"))
        modules.append(module.train())
        optimizers.append(torch.optim.AdamW(module.parameters(), lr=0.0))
    batches = LengthBuckets(splits["train"].lengths, batch_size=modules[0].settings.batch_size, seed=modules[0].settings.seed)
    rows: list[dict[str, Any]] = []
    epoch = [*batches.epoch(0)]
    if len(epoch) < 2:
        raise ValueError(
            f"Expected 'data' of at least two training batches (got {len(epoch)}). The first one is not timed; give more examples."
        )
    for number, chosen in enumerate(tqdm(epoch[: steps + 1], "Timing", unit="batch")):
        for place in range(len(folders)):
            run = (place + number) % len(folders)
            parts = np.array_split(chosen, min(modules[run].settings.accumulate, len(chosen)))  # equal ones, if the batch is the run's own
            batch = [splits["train"].__getitems__(part.tolist()) for part in parts]
            torch.manual_seed(number)
            times = timed_step(modules[run], optimizers[run], batch, number)
            if number:  # the first one compiles and allocates
                rows.append(
                    {
                        "run": folders[run].name,
                        "place": run,
                        "batch": number,
                        "tokens": sum(part.num_tokens for part in batch),
                        "step": sum(times[p] for p in PARTS),
                        **times,
                    }
                )
    return rows


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Writes a Markdown table of medians over the batches; the ratio, which is taken batch by batch, with its quartiles."""
    names = list(dict.fromkeys(row["run"] for row in sorted(rows, key=lambda row: row["place"])))
    first = {row["batch"]: row["step"] for row in rows if row["run"] == names[0]}
    lines = []
    for name in names:
        mine = [row for row in rows if row["run"] == name]
        middle = {part: statistics.median(row[part] for row in mine) for part in (*PARTS, "step", "density")}
        speed = sum(row["tokens"] for row in mine) / sum(row["step"] for row in mine)
        low, ratio, high = np.percentile([first[row["batch"]] / row["step"] for row in mine], (25, 50, 75))
        times = [f"{1e3 * middle[part]:,.0f} ms" for part in (*PARTS, "step")]
        lines.append([name, f"{middle['density']:.2%}", *times, f"{speed:,.0f}", f"{ratio:.2f} ({low:.2f}–{high:.2f})"])
    return tables.markdown(["run", "density", *PARTS, "step", "tokens/s", "times as fast as the first"], lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; ``--help`` explains it."""
    given = parse(arguments)
    before = torch.get_num_threads()
    torch.set_num_threads(given.threads)
    try:
        if given.output is not None:
            check_writable("output", given.output)
        with flushed_subnormals():
            rows = measure(given.runs, given.checkpoint or BEST, given.data, given.steps)
    except ValueError as error:
        given.fail(str(error))
    finally:
        torch.set_num_threads(before)
    count = len({row["batch"] for row in rows})  # the data may have fewer than were asked for
    words = f"{count} batches, {given.threads} thread(s), medians; quartiles of the ratio.\n\n{report(rows)}"
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        tables.write_csv(given.output / "steps.csv", rows)
        write_text(given.output / "time.md", words)
    print(words)


if __name__ == "__main__":
    main()
