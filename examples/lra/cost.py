"""The cost of each method on the Long Range Arena: FLOPs, memory and time, relative to full attention, as in Table 3 of the paper.

    python -m examples.lra cost --tasks listops text --methods full sbm sbm:initial-density=0.012 --batch 4 --output runs/cost
    python -m examples.lra cost --runs runs/hour/runs/listops-full-0 runs/hour/runs/listops-sbm-0 --threads 2 --output runs/time

**Methods** need no data: sequences are random tokens as long as the preset's ``max_length``, the model is that of the trainer before its
first step, and ``sbm`` has the density that it starts with. Each is measured in a process of its own.

* **FLOPs** are counted as they run, by torch's counter, ours by the formulas of ``sbm_pyg.ops.flops``: products with channels,
  a multiplication and its addition being 2. Padding is counted where it is computed. Sampling is counted, and shown separately.
* **Memory** is the peak of the process (on a GPU, of its allocator) beyond that after a short sequence: activations
  and workspace, no weights, no libraries.
* **Time** is the median of some repeats. *Forward* is inference without gradients, *step* is a step of the trainer.

**Runs** are timed side by side with their trained weights: each training batch goes through all models in turn, the order changing from
batch to batch, and ratios are those of the same batch.

A **gate** comes first: the attention of the first layer is that of plain torch over the same graph, and
a baseline gives to a sequence alone the result that it gives in a batch. A method that fails is named, not measured, and the program ends with 1.
"""

import argparse
import dataclasses
import itertools
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from examples.common.command import require
from examples.common.gate import Rejected
from examples.common.gate import compare as agree
from examples.common.runs import read_record, write_record, write_text
from examples.common.tables import Row, by, markdown, write_csv
from examples.lra.baselines import BASELINES
from examples.lra.data.batches import Batch, Split
from examples.lra.data.tasks import TASKS, Task
from examples.lra.model import Classifier
from examples.lra.report import peak_memory
from examples.lra.settings import Plan, Settings, method_words, parse, resolve
from examples.lra.train import Data, make_sparsifier, open_run
from sbm_pyg import auxiliary_loss, patterns
from sbm_pyg.ops.cpu.threads import flushed_subnormals
from sbm_pyg.progress import tqdm

SHORT = 64  # tokens
PARTS = ("forward", "backward", "update")
UNITS = {"GFLOP": ("flops", 1e9), "MiB": ("bytes", 2**20), "ms": ("seconds", 1e-3)}

# torch's counter has these formulas for its fused attention on a GPU, and counts that on the CPU as nothing.
ATEN = torch.ops.aten
FUSED = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: lambda *qkv, **_: sdpa_flop_count(*qkv[:3]),
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda *qkv, **_: sdpa_backward_flop_count(*qkv[:4]),
}


def random_batch(task: Task, lengths: Sequence[int], device: torch.device) -> Batch:
    """Random tokens and labels in the shapes of a task, one example for each length (both sides of a pair have it)."""
    generator = torch.Generator().manual_seed(0)
    ptr = torch.tensor([0, *lengths]).cumsum(0).to(device)
    size, most = (sum(lengths),), task.num_tokens
    sides = [torch.randint(1, most, size, generator=generator).to(device) for _ in range(task.arity)]  # 0 is padding
    labels = torch.randint(task.num_classes, (len(lengths),), generator=generator).to(device)
    examples = torch.arange(len(lengths), device=device)
    pair = task.arity == 2
    return Batch(tuple(sides) if pair else sides[0], (ptr, ptr) if pair else ptr, labels, examples)


@torch.no_grad()
def gate(module: Classifier) -> None:
    """Compares the first layer's attention, for each sequence of a small batch, with a softmax over the dense mask of its graph.

    A baseline, whose method is a package's, is compared with itself for the sequence alone.
    """
    attention: Any = module.eval().model.encoder.layers[0].attention
    settings, device = module.settings, module.device
    places = [0, SHORT, SHORT + 17, SHORT + 57]
    x = torch.randn(places[-1], settings.channels, generator=torch.Generator().manual_seed(0)).to(device)
    out, choice = attention(x, ptr=torch.tensor(places, device=device), seed=1, return_choice=True)
    true = []
    for number, (start, end) in enumerate(itertools.pairwise(places)):
        alone = x[start:end]
        if settings.attention in BASELINES:
            true.append(attention(alone, ptr=torch.tensor([0, end - start], device=device), seed=1))
            continue
        linear = (attention.lin_query, attention.lin_key, attention.lin_value)
        heads = (lin(alone).unflatten(1, (settings.heads, -1)) for lin in linear)
        query, key, value = (x.transpose(0, 1) for x in heads)  # [H, L, C]
        scores = query @ key.mT / math.sqrt(settings.head_channels)
        if getattr(attention, "score_bias", None) is not None:
            all_pairs = patterns.full(len(alone)).expand(settings.heads)
            scores = scores + attention.score_bias(query, key, all_pairs).view_as(scores)
        if choice is not None:
            scores = scores.masked_fill(~choice.graph.to_dense(number), -torch.inf)
        weights = scores.softmax(-1).nan_to_num()  # nothing where a query has no edge
        true.append((weights @ value).transpose(0, 1).flatten(1))
    agree({f"attention {settings.attention!r}": (out, torch.cat(true))})


def clock(device: torch.device) -> float:
    """Reads the clock when a device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(device: torch.device, action: Callable[..., Any], *args: Any) -> float:
    start = clock(device)
    action(*args)
    return clock(device) - start


@torch.no_grad()
def forward(module: Classifier, batch: Batch) -> Tensor:
    """Infers, in the precision of the run."""
    module.eval()
    with torch.autocast(module.device.type, torch.bfloat16, enabled=module.settings.precision == "bf16-mixed"):
        return module.classify(batch, seed=module.settings.seed)[0]


def timed_step(
    module: Classifier, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], number: int = 0
) -> dict[str, float]:
    """Trains on the parts of a batch; returns seconds of each of ``PARTS``, and the mean density of the graphs (1 without graphs)."""
    module.train()
    device, seconds, density = module.device, np.zeros(len(PARTS)), 0.0
    optimizer.zero_grad()
    for batch in batches:
        start = clock(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=module.settings.precision == "bf16-mixed"):
            logits, trace = module.classify(batch, seed=number)
            loss = cross_entropy(logits.float(), batch.labels) + auxiliary_loss(module) + module.price(trace)
        middle = clock(device)
        (loss / len(batches)).backward()
        seconds[:2] += np.diff([start, middle, clock(device)])
        density += float(trace.density.mean()) * len(batch.labels)
    start = clock(device)
    if module.settings.clip_norm:
        torch.nn.utils.clip_grad_norm_(module.parameters(), module.settings.clip_norm)
    optimizer.step()
    seconds[2] = clock(device) - start
    times = dict(zip(PARTS, seconds.tolist(), strict=True))
    return times | {"density": density / sum(len(batch.labels) for batch in batches)}


def plan_steps(per_step: float, per_validation: float, minutes: float, validate_every: int) -> int:
    """The number of steps that fit into a time, with their validations: one before them, one after every so many, and one in the end.

    >>> plan_steps(1.0, 10.0, minutes=1, validate_every=20)
    30
    >>> plan_steps(1.0, 10.0, minutes=0.5, validate_every=100)
    10
    """
    rounds, seconds_left = divmod(60 * minutes - per_validation, validate_every * per_step + per_validation)
    steps = int(rounds) * validate_every + max(0, int((seconds_left - per_validation) / per_step))
    require(steps >= 2, "'minutes' to be enough for two steps and their validations", minutes, "Give more.")
    return steps


def planned(plan: Plan, splits: Mapping[str, Split], accelerator: str) -> Plan:
    """Plans as many steps as fit into the minutes of a run, by timing batches from short to long; the warm-up keeps its part of them."""
    cuda = accelerator in ("auto", "cuda") and torch.cuda.is_available()
    device, settings = torch.device("cuda" if cuda else "cpu"), plan.settings
    data, module = Data(splits, settings), Classifier(TASKS[plan.task], settings).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    make_sparsifier(module)  # attention is dense at first

    def mean(action: Callable[[list[Batch]], Any], name: str, batches: Sequence[Any], count: int, parts: int) -> float:
        """Mean seconds over batches at equal distances in the order of their numbers of tokens."""
        batches = sorted(batches, key=lambda batch: splits[name].lengths[batch].sum())
        places = ((np.arange(count) + 0.5) / count * len(batches)).astype(int)
        seconds = []
        for place in [-1, count // 2, *places]:  # first what only happens once, memory for the longest included
            batch = [splits[name].__getitems__(part.tolist()) for part in np.split(np.asarray(batches[place]), parts)]
            batch = move_data_to_device(batch, device)
            seconds.append(timed(device, action, batch))
        return statistics.fmean(seconds[2:])

    step = mean(partial(timed_step, module, optimizer), "train", data.buckets.epoch(0), 5, settings.accumulate)
    validations = data.batches("val")
    validation = mean(lambda batch: forward(module, batch[0]), "val", validations, 3, 1) * len(validations)
    assert plan.minutes is not None
    steps = plan_steps(step, validation, plan.minutes, settings.validate_every)
    warmup = settings.warmup * steps // settings.steps
    return dataclasses.replace(plan, settings=dataclasses.replace(settings, steps=steps, warmup=warmup))


def settings_of(task: str, method: str, preset: str) -> Settings:
    """Returns the settings of a method, as the trainer's command line has them."""
    return resolve(parse(["--task", task, "--preset", preset, *method_words(method)]))[1].settings


def measure(
    task: Task, method: str, preset: str, length: int | None, batch_size: int, repeats: int, threads: int = 1
) -> dict[str, Any]:
    """Measures one method on one task, in this process: a row of FLOPs, bytes and seconds, and the density of the graphs (None without)."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    settings = settings_of(task.name, method, preset)
    length = settings.max_length if length is None else length
    settings = dataclasses.replace(settings, max_length=max(length, SHORT))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = Classifier(task, settings).to(device)
    gate(module)
    step = partial(timed_step, module, torch.optim.AdamW(module.parameters(), lr=1e-4))
    short, batch = random_batch(task, [SHORT], device), random_batch(task, [length] * batch_size, device)
    row: dict[str, Any] = {"task": task.name, "method": method, "preset": preset, "length": length, "batch": batch_size}
    actions = {"forward": lambda batch: forward(module, batch), "step": lambda batch: step([batch])}
    for action in actions.values():  # compiles, allocates optimizer state
        action(short)
    clock(device)
    base = torch.cuda.memory_allocated() if device.type == "cuda" else peak_memory()["peak_memory_bytes"]
    for name, action in actions.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        action(batch)
        row[f"{name}_bytes"] = max(peak_memory()["peak_memory_bytes"] - base, 0)
    for name, action in actions.items():
        row[f"{name}_seconds"] = statistics.median(timed(device, action, batch) for _ in range(repeats))
        with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
            action(batch)
        counts = {str(op): count for op, count in counter.get_flop_counts().get("Global", {}).items()}
        row[f"{name}_flops"] = sum(counts.values())
        row[f"{name}_sampling_flops"] = counts.get("sbm_pyg.sample_sbm", 0)
    with torch.no_grad():
        trace = module.eval().classify(batch, seed=0)[1]
    row["density"] = None if trace.graphs[0] is None else float(trace.density.mean())
    row["device"], row["threads"] = device.type, torch.get_num_threads()
    return row


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Writes the tables as Markdown, one for each task."""
    first = rows[0]
    parts = [
        "# Cost on the Long Range Arena",
        f"One run on {first['device']} with {first['threads']} thread(s), random tokens, models before their first step. In brackets: "
        "relative to full attention of the same task. No memory: less than the process had needed before.",
    ]
    columns = [(unit, part) for unit in UNITS for part in ("forward", "step")]
    header = ["method", "density", "sampling", *(f"{unit} {part}" for unit, part in columns)]
    for task, group in by(rows, "task").items():
        full: Row = next((row for row in group if row["method"] == "full"), {})

        def cell(row: dict[str, Any], unit: str, part: str, full: dict[str, Any] = full) -> str:
            name, value = f"{part}_{UNITS[unit][0]}", row[f"{part}_{UNITS[unit][0]}"] / UNITS[unit][1]
            share = f" ({row[name] / full[name]:.2f})" if full.get(name) else ""
            return (f"{value:,.0f}" if value >= 100 else f"{value:.3g}") + share if value else "–"

        body = []
        for row in group:
            density = "–" if row["density"] is None else f"{row['density']:.2%}"
            share = f"{row['forward_sampling_flops'] / row['forward_flops']:.0%}"
            body.append([row["method"], density, share, *(cell(row, *column) for column in columns)])
        sides = ", two sides" if TASKS[task].arity == 2 else ""
        parts += [f"## {task}, {group[0]['batch']} x {group[0]['length']:,} tokens{sides}", markdown(header, body)]
    return "\n\n".join(parts) + "\n"


def compare(folders: Sequence[Path], data: Path | None, steps: int) -> list[dict[str, Any]]:
    """Times steps of runs on training batches of the first: a row for each batch and run."""
    runs = [open_run(folder, data=data) for folder in folders]
    plan, _, splits = runs[0]
    task = TASKS[plan.task]
    steppers = []
    for folder, (other, module, _) in zip(folders, runs, strict=True):
        alike = (other.task, task.pipeline(other.settings)) == (plan.task, task.pipeline(plan.settings))
        got = f"{folder}, which differs from the first"
        require(alike, "'runs' that take examples in one form", got, "Compare them apart.")
        gate(module)
        steppers.append(partial(timed_step, module, torch.optim.AdamW(module.parameters(), lr=0.0)))
    epoch = Data(splits, plan.settings).buckets.epoch(0)
    rows: list[dict[str, Any]] = []
    for number, chosen in enumerate(tqdm(epoch[: steps + 1], "Timing", unit="batch")):
        for turn in range(len(folders)):
            place = (turn + number) % len(folders)
            parts = np.array_split(chosen, min(runs[place][0].settings.accumulate, len(chosen)))
            batch = [splits["train"].__getitems__(part.tolist()) for part in parts]
            torch.manual_seed(number)
            times = steppers[place](batch, number)
            columns = {"run": folders[place].name, "place": place, "batch": number}
            columns |= {"tokens": sum(part.num_tokens for part in batch), "step": sum(times[part] for part in PARTS)}
            rows += [{**columns, **times}] if number else []  # the first one compiles
    return rows


def comparison(rows: Sequence[dict[str, Any]]) -> str:
    """Writes a Markdown table of medians over the batches; the ratio, which is taken batch by batch, with its quartiles."""
    first = {row["batch"]: row["step"] for row in rows if row["place"] == 0}
    lines = []
    for run in dict(sorted(by(rows, "place").items())).values():
        times = [f"{1e3 * statistics.median(row[part] for row in run):,.0f} ms" for part in (*PARTS, "step")]
        density = statistics.median(row["density"] for row in run)
        speed = sum(row["tokens"] for row in run) / sum(row["step"] for row in run)
        low, ratio, high = np.percentile([first[row["batch"]] / row["step"] for row in run], (25, 50, 75))
        lines.append([run[0]["run"], f"{density:.2%}", *times, f"{speed:,.0f}", f"{ratio:.2f} ({low:.2f}–{high:.2f})"])
    return markdown(["run", "density", *PARTS, "step", "tokens/s", "times as fast as the first"], lines) + "\n"


def run(args: argparse.Namespace) -> None:
    """Measures what the command line asks for. Rows of methods that are there already are not measured again."""
    try:
        text = _compare(args) if args.runs else _measure(args)
    except ValueError as error:
        args.fail(str(error))
    except Rejected as error:
        raise SystemExit(f"Not measured: {error}.") from None
    print(text)


def _compare(args: argparse.Namespace) -> str:
    torch.set_num_threads(args.threads)
    with flushed_subnormals():
        rows = compare(args.runs, args.data, args.repeats)
    count = len({row["batch"] for row in rows})  # the data may have fewer than were asked for
    text = f"{count} batches, {args.threads} thread(s), medians; quartiles of the ratio.\n\n{comparison(rows)}"
    args.output.mkdir(parents=True, exist_ok=True)
    write_csv(args.output / "steps.csv", rows)
    write_text(args.output / "time.md", text)
    return text


def _measure(args: argparse.Namespace) -> str:
    pairs = [(task, method) for task in args.tasks for method in args.methods]
    for task, method in pairs:
        settings_of(task, method, args.preset)  # all mistakes before the first measurement
    rows, rejected = list[dict[str, Any]](), list[str]()
    fixed = [getattr(args, name) for name in ("preset", "length", "batch", "repeats", "threads")]
    (args.output / "rows").mkdir(parents=True, exist_ok=True)
    with tqdm(pairs, desc="Cost", unit="row") as bar:
        for task, method in bar:
            bar.set_description(f"{task}, {method}")
            path = args.output / "rows" / f"{'-'.join(map(str, (task, method, *fixed)))}.json"
            if not path.exists():  # in a process of its own, whose memory nothing else has used
                try:
                    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                        write_record(path, pool.submit(measure, TASKS[task], method, *fixed).result())
                except Rejected as error:
                    rejected.append(f"{task}, {method}: {error}")
                    continue
            rows.append(read_record(path))
            write_csv(args.output / "cost.csv", rows)
            write_text(args.output / "cost.md", report(rows))
    if rejected:
        print(report(rows) if rows else "")
        raise Rejected("; ".join(rejected))
    return report(rows)
