"""What each method costs on the Long Range Arena, relative to full attention, as Table 3 of the paper: FLOPs, memory, time.

In: tasks, methods, a preset. Out: ``cost.md`` and ``cost.csv`` in a folder. Not here: accuracy (``reproduce_lra.py``), and
kernels by themselves (``benchmark.py``)::

    python examples/cost_lra.py --output runs/cost
    python examples/cost_lra.py --tasks listops text --methods full sbm sbm:initial-density=0.012 --batch 4 --output runs/cost

No data are needed: sequences are random tokens as long as the preset's ``max_length``, the model is that of the trainer before its
first step, and ``sbm`` has the density that it starts with (a method's own settings follow a colon). Each method is measured
in a process of its own, after it has passed a test: outputs finite, the same for the same seed and for a sequence alone;
over a full graph, ``sbm`` equal to full attention.

* **FLOPs** are counted as they run, by torch's counter, ours by the formulas of ``sbm_pyg.ops.flops``: products with channels,
  a multiplication and its addition being 2. What pads is counted, for it is computed. Sampling is counted, and shown by itself.
* **Memory** is what the process (on a GPU, its allocator) had at most beyond what it had after a short sequence: activations
  and workspace, no weights, no libraries.
* **Time** is the median of some repeats. *Forward* is inference without gradients, *step* is forward, backward and optimiser.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lra_files import check_writable, file_above, path_argument
from lra_settings import NAMES
from lra_tasks import TASKS, Batch, Task

METHODS = ("full", "linear", "reformer", "performer", "linformer", "nystromformer", "window", "bigbird", "sbm")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Measures FLOPs, memory and time per task and method, relative to full attention.")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS), metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD", help=f"of {', '.join(METHODS)}, or with settings")
    parser.add_argument("--preset", choices=NAMES, default="paper", help="(default: %(default)s)")
    parser.add_argument("--length", type=int, help="tokens per sequence (default: the preset's max-length)")
    parser.add_argument("--batch", type=int, default=1, help="sequences at a time (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each timing (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument("--output", type=path_argument, required=True, metavar="DIR", help="folder of the tables")
    parser.add_argument("--row", type=path_argument, help=argparse.SUPPRESS)  # measure in this process, and write the row there
    given = parser.parse_args(arguments)
    given.fail = parser.error
    for name in ("batch", "repeats", "threads"):
        if getattr(given, name) < 1:
            parser.error(f"Expected '{name}' to be at least 1 (got {getattr(given, name)}). Leave it out for the default.")
    file = file_above(given.output)
    if file is not None:
        parser.error(f"Expected 'output' to be a folder (got {given.output}, but {file} is a file). Choose another name.")
    if given.length is not None and given.length < 1:
        parser.error(f"Expected 'length' to be at least 1 (got {given.length}). Leave it out for the preset's.")
    return given


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from tqdm.auto import tqdm

import lra
import lra_tables as tables
from lra_report import peak_memory, write_json, write_text
from lra_runs import Plan, read_json
from sbm_pyg import SBMAttentionConv, patterns
from sbm_pyg.models import FullAttention

SHORT = 64  # tokens

# Cho et al., 2022, Table 3, per example and relative to full attention: FLOPs and peak memory of inference, in the order of
# ``lra_tables.TASKS``. Theirs of `sbm` is of models trained with density weight 0.1.
PUBLISHED = {
    "full": ((1.00, 1.00, 1.00, 1.00, 1.00), (1.00, 1.00, 1.00, 1.00, 1.00)),
    "linear": ((0.02, 0.01, 0.02, 0.04, 0.04), (0.18, 0.16, 0.12, 0.42, 0.42)),
    "reformer": ((0.05, 0.03, 0.05, 0.10, 0.10), (0.39, 0.31, 0.18, 0.72, 0.72)),
    "performer": ((0.18, 0.12, 0.18, 0.36, 0.36), (0.76, 0.70, 0.60, 0.96, 0.96)),
    "linformer": ((0.33, 0.22, 0.33, 0.66, 0.66), (0.26, 0.22, 0.14, 0.34, 0.34)),
    "nystromformer": ((1.09, 0.70, 1.09, 2.37, 2.37), (0.34, 0.27, 0.16, 0.70, 0.70)),
    "sbm": ((0.07, 0.23, 0.08, 0.27, 0.29), (0.19, 1.01, 0.19, 0.39, 0.48)),
}

MEASURES = ("forward_flops", "step_flops", "forward_bytes", "step_bytes", "forward_seconds", "step_seconds")


def _fused(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _fused_backward(grad: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


# torch's counter has these formulas for its fused attention on a GPU, and counts that on the CPU as nothing.
FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _fused,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward,
}


def flops(action: Callable[[], Any]) -> dict[str, int]:
    """Counts the FLOPs of an action, by name of the op."""
    with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
        action()
    return {str(op): count for op, count in counter.get_flop_counts().get("Global", {}).items()}


def random_batch(task: Task, lengths: Sequence[int], device: torch.device, seed: int = 0) -> Batch:
    """Random tokens and labels in the shapes of a task, one example for each length (both sides of a pair have it)."""
    generator = torch.Generator().manual_seed(seed)
    ptr = torch.tensor([0, *lengths]).cumsum(0).to(device)
    sides = [torch.randint(1, task.num_tokens, (sum(lengths),), generator=generator).to(device) for _ in range(task.arity)]  # 0 is padding
    labels = torch.randint(task.num_classes, (len(lengths),), generator=generator).to(device)
    examples = torch.arange(len(lengths), device=device)
    return Batch(sides[0], ptr, labels, examples) if task.arity == 1 else Batch(tuple(sides), (ptr,) * task.arity, labels, examples)


@torch.no_grad()
def gate(module: lra.Classifier, task: Task, device: torch.device) -> None:
    """Refuses a method whose numbers would mean nothing.

    Raises:
        ValueError: If outputs are not finite, of another shape, random for one seed, or depend on the rest of the batch.
    """
    method, lengths = module.settings.attention, [min(length, module.settings.max_length) for length in (SHORT, 17, 40)]
    module.eval()
    batch = random_batch(task, lengths, device)
    logits = module.classify(batch, seed=1)[0]
    if logits.shape != (len(lengths), task.num_classes) or not bool(logits.isfinite().all()):
        raise ValueError(
            f"Expected {method!r} to give finite logits [{len(lengths)}, {task.num_classes}] (got {list(logits.shape)}, finite: "
            f"{bool(logits.isfinite().all())}). It cannot be measured."
        )
    problems = {"with the same seed": float((module.classify(batch, seed=1)[0] - logits).abs().max())}
    sides = [batch.tokens] if task.arity == 1 else list(batch.tokens)
    alone = [side[: lengths[0]] for side in sides]
    ptr = torch.tensor([0, lengths[0]], device=device)
    single = Batch(alone[0], ptr, batch.labels[:1], batch.examples[:1])
    if task.arity == 2:
        single = single._replace(tokens=tuple(alone), ptr=(ptr, ptr))
    problems["alone"] = float((module.classify(single, seed=1)[0] - logits[:1]).abs().max())
    if method == "sbm":
        conv: Any = module.model.encoder.blocks[0].attention
        assert isinstance(conv, SBMAttentionConv)
        dense = FullAttention(module.settings.channels, module.settings.head_channels, module.settings.heads).to(device)
        dense.load_state_dict({name: value for name, value in conv.state_dict().items() if name in dense.state_dict()})
        x, ptr = torch.randn(sum(lengths), module.settings.channels, device=device), random_batch(TASKS["listops"], lengths, device).ptr
        error = (conv(x, patterns.full(None, ptr=ptr), ptr=ptr) - dense.eval()(x, ptr=ptr)).abs().max()
        problems["over a full graph, against full attention,"] = float(error)
    for words, error in problems.items():
        if not error < 1e-4:
            raise ValueError(f"Expected {method!r} {words} to give the same (got a difference of {error:.2g}). It cannot be measured.")


def measure(task: Task, method: str, preset: str, length: int | None, batch_size: int, repeats: int) -> dict[str, Any]:
    """Measures one method on one task, in this process.

    Returns:
        A row: what was measured, in FLOPs, bytes and seconds, and the density of the graphs (None without graphs).
    """
    torch.manual_seed(0)
    given = Plan(task.name, method, 0, ["--preset", preset], None).settle()["settings"]
    length = given["max_length"] if length is None else length
    settings = lra.Settings(**{**given, "max_length": max(length, SHORT)})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = lra.Classifier(task, settings).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    gate(module, task, device)

    def forward(batch: Batch) -> Tensor:
        module.eval()
        with torch.no_grad():
            return module.classify(batch, seed=0)[0]

    def step(batch: Batch) -> None:
        module.train()
        optimizer.zero_grad()
        logits, trace = module.classify(batch, seed=0)
        loss = cross_entropy(logits.float(), batch.labels)
        module.objective(loss, trace).backward()
        optimizer.step()

    short, batch = random_batch(task, [SHORT], device), random_batch(task, [length] * batch_size, device)
    row: dict[str, Any] = {"task": task.name, "method": method, "preset": preset, "length": length, "batch": batch_size}
    for action in (forward, step):  # compiles, allocates optimiser state
        action(short)
    if device.type == "cuda":
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
    else:
        base = peak_memory()[1]
    for name, action in (("forward", forward), ("step", step)):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        action(batch)
        row[f"{name}_bytes"] = max(peak_memory()[1] - base, 0)
    for name, action in (("forward", forward), ("step", step)):
        seconds = []
        for _ in range(repeats):
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            action(batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        row[f"{name}_seconds"] = statistics.median(seconds)
        counts = flops(partial(action, batch))
        row[f"{name}_flops"] = sum(counts.values())
        row[f"{name}_sampling_flops"] = counts.get("sbm_pyg.sample_sbm", 0)
    module.eval()
    with torch.no_grad():
        trace = module.classify(batch, seed=0)[1]
    row["density"] = None if trace.graphs[0] is None else float(trace.density.mean())
    row["device"], row["threads"] = device.type, torch.get_num_threads()
    return row


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Writes the tables as Markdown, one for each task."""
    first = rows[0]
    parts = [
        "# Cost on the Long Range Arena",
        f"One run on {first['device']} with {first['threads']} thread(s), random tokens, models before their first step. In brackets: "
        "relative to full attention of the same task. *Published* is Table 3 of Cho et al., 2022: FLOPs and memory of inference; "
        "theirs of sbm is of trained, regularised models, whose densities are 1.2, 10.6, 2.5, 1.3 and 2.6 per cent. A dash for memory: less than "
        "the process had needed before.",
    ]
    for task in dict.fromkeys(row["task"] for row in rows):
        group = [row for row in rows if row["task"] == task]
        full = next((row for row in group if row["method"] == "full"), None)

        def cell(row: dict[str, Any], name: str, scale: float, full: dict[str, Any] | None = full) -> str:
            if name.endswith("bytes") and not row[name]:
                return "–"
            value = row[name] / scale
            text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            return text if full is None or not full[name] else f"{text} ({row[name] / full[name]:.2f})"

        header = ["method", "density", "GFLOP forward", "sampling", "GFLOP step", "MiB forward", "MiB step", "ms forward", "ms step"]
        scales = {"flops": 1e9, "bytes": 2**20, "seconds": 1e-3}
        body = []
        for row in group:
            columns = [cell(row, name, scales[name.split("_")[1]]) for name in MEASURES]
            density = "–" if row["density"] is None else f"{row['density']:.2%}"
            share = f"{row['forward_sampling_flops'] / row['forward_flops']:.0%}" if row["forward_sampling_flops"] else "–"
            line = [row["method"], density, columns[0], share, *columns[1:]]
            if task in tables.TASKS and row["method"] in PUBLISHED:
                work, memory = (numbers[tables.TASKS.index(task)] for numbers in PUBLISHED[row["method"]])
                line += [f"{work:.2f}", f"{memory:.2f}"]
            else:
                line += ["–", "–"]
            body.append(line)
        examples = f"{group[0]['batch']} x {group[0]['length']:,} tokens" + (", two sides" if TASKS[task].arity == 2 else "")
        parts += [f"## {task}, {examples}", tables.markdown([*header, "FLOPs, published", "memory, published"], body)]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; ``--help`` explains it. Rows that are there already are not measured again."""
    given = parse(arguments)
    if given.row is not None:
        torch.set_num_threads(given.threads)
        (task,), (method,) = given.tasks, given.methods
        write_json(given.row, measure(TASKS[task], method, given.preset, given.length, given.batch, given.repeats))
        return
    try:
        for task in given.tasks:
            for method in given.methods:
                Plan(task, method, 0, ["--preset", given.preset], None).settle()
        check_writable("output", given.output)
    except ValueError as error:
        given.fail(str(error))
    given.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    fixed = {name: getattr(given, name) for name in ("preset", "length", "batch", "repeats", "threads")}
    options = [word for name, value in fixed.items() if value is not None for word in (f"--{name}", str(value))]
    pairs = [(task, method) for task in given.tasks for method in given.methods]
    failed = []
    with tqdm(pairs, desc="Cost", unit="row") as bar:
        for task, method in bar:
            bar.set_description(f"{task}, {method}")
            key = Plan(task, method, 0, [], None).name + "".join(f"-{value}" for value in fixed.values())
            path = given.output / "rows" / f"{key}.json"
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                command = [sys.executable, __file__, "--tasks", task, "--methods", method, *options]
                done = subprocess.run([*command, "--output", str(given.output), "--row", str(path)], capture_output=True, text=True)
                if done.returncode:
                    failed.append((task, method))
                    tqdm.write(f"{task}, {method} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
                    continue
            try:
                rows.append(read_json(path, "Remove it, and give the same command again, which measures this row again.", MEASURES))
            except ValueError as error:
                given.fail(str(error))
            tables.write_csv(given.output / "cost.csv", rows)
            write_text(given.output / "cost.md", report(rows))
    if rows:
        print(report(rows))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
