"""Fuzz driver of readers: damages valid files at random, reads them, and judges what happens.

In: a seed, and a number of calls or of seconds. Out: a table per reader, and each fault with the number of its call; exit status 1 if there is one.
Not here: the tests (``test_fuzz.py``) and calls of functions (``fuzz.py``).

``python tests/fuzz_files.py --seconds 3600`` damages the files of all readers in turn: bits, bytes, lines and numbers change, parts are cut, repeated
or moved, or a whole file goes. A reader may then

* refuse the file, by a ValueError with a message that names a file or folder ("Expected ..."), or by any exception where the reader is torch's; or
* return a result that is valid in itself, and, where a checksum guards the bytes, the same as before.

All else is a fault: other exceptions, crashes, more than ``LIMIT`` seconds or ``MEMORY`` MiB, and wrong results. Call ``n`` is a function of the seed and
``n``: ``--only n`` makes it in this process, and keeps its files.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: the root of the clone holds the packages
    sys.path.insert(0, str(Path(__file__).parent.parent))

import fuzz_children
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from examples.arena import tasks as arena
from examples.common import runs, tables
from examples.dcmm import data as vision
from examples.dcmm import model as vit
from examples.glue import __main__ as glue
from examples.graphs import data as graphs
from examples.lra.data import pathfinder, prepare, readers
from examples.lra.data.tasks import TASKS
from examples.sparsefinder import model as sparsefinder
from sbm_pyg import AttentionGraph, BlockGraph, SequenceClassifier, SequenceEncoder

LIMIT, MEMORY = 20.0, 1024  # seconds, and MiB above those of the start, that a call may take
CALLS_OF_A_CHILD = 200


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader of files.

    Args:
        make: Writes valid files into an empty folder.
        read: Reads the folder.
        guarded: Whether checksums guard what is read, so that it must be what was written.
        foreign: Whether errors are those of another library.
        under: The folder whose files are damaged, if not all.
    """

    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    guarded: bool = False
    foreign: bool = False
    under: str = ""


# ------------------------------------------------------------------ readers

TEXT = (
    "The film was long, and the end of it was not the best.\nA second line: \u00e9t\u00e9.\n\nAnother document, which is short.\n"
    * 12
)
LEVEL = "curv_baseline"


def expect(right: Any, words: str) -> None:
    assert right, f"wrong result: {words}"


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    model = SequenceClassifier(SequenceEncoder(20, 8, num_layers=1, attention_options={"num_clusters": 4}), 3)
    model.save_pretrained(folder / "model")


def read_model(folder: Path) -> dict[str, Tensor]:
    model = SequenceClassifier.from_pretrained(folder / "model")
    return dict(model.state_dict())


def make_graphs(folder: Path) -> None:
    mask = torch.rand(2, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.3
    graph = AttentionGraph.from_dense(mask)
    torch.save({"graph": graph, "blocks": BlockGraph(graph, 4)}, folder / "graph.pt")


def read_graphs(folder: Path) -> Any:
    found = torch.load(folder / "graph.pt", weights_only=True)
    for graph in (found["graph"], found["blocks"].blocks):
        expect(bool((graph.rowptr.diff() >= 0).all()), "negative degrees")
        expect(not len(graph.col) or 0 <= int(graph.col.min()) <= int(graph.col.max()) < graph.num_keys, "columns")


def make_rows(folder: Path) -> None:
    tables.add(folder / "rows.csv", [{"run": "full", "seed": 0, "accuracy": 0.5, "step": n} for n in range(6)])


def read_rows(folder: Path) -> Any:
    rows = tables.finished(folder)
    expect(all(row.keys() == rows[0].keys() for row in rows), "rows of other columns")


def make_run(folder: Path) -> None:
    runs.write_checkpoint(folder / "state.pt", {"run": {"seed": 0}, "weight": torch.arange(50.0), "step": 7})
    runs.write_record(folder / "settings.json", {"steps": 100, "name": "full", "rate": 1e-3})


def read_run(folder: Path) -> Any:
    return runs.read_state(folder / "state.pt", {"seed": 0}, needed=True), runs.read_record(folder / "settings.json")


def make_text(folder: Path) -> None:
    (folder / "plain.txt").write_text(TEXT)
    (folder / "packed.txt.gz").write_bytes(gzip.compress(TEXT.encode(), mtime=0))


def read_text(folder: Path) -> Any:
    for name in ("plain.txt", "packed.txt.gz"):
        lines = [line for text in glue.read_documents([folder / name]) for line in text.split("\n")]
        expect(all(line.strip() for line in lines), "an empty line within a document")
        texts = arena.own_text.__wrapped__(folder / name)
        expect(bool((torch.cat(texts[:2]) < arena.VOCABULARY).all()), "tokens")
        sparsefinder.read_texts([folder / name], [folder / name], 30, 4)


def make_glue(folder: Path) -> None:
    lines = [f"{'good' if n % 2 else 'bad'} film {n}\t{n % 2}" for n in range(12)]
    (folder / "train.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")


def read_glue(folder: Path) -> Any:
    texts, classes = glue.read_glue(folder / "train.tsv", glue.TASKS["sst2"])
    expect(len(texts) == len(classes) and {*classes} <= {0, 1}, "classes")


def make_reviews(folder: Path) -> None:
    for part in ("train", "test"):
        for name in ("neg", "pos"):
            (folder / part / name).mkdir(parents=True)
            for number in range(12):
                (folder / part / name / f"{number}_{9 if name == 'pos' else 2}.txt").write_text(
                    f"{part} {name} {number} \u00e9\n"
                )


def read_reviews(folder: Path) -> Any:
    read_rows_of("text")(folder)


def make_table(folder: Path) -> None:
    for name, count in (("train", 6), ("eval", 3), ("test", 2)):
        lines = [f"{row % 2}.0\tP{row}\tQ{row}\tb'first \"{row}\\n'\tb\"it's {row}\"\n" for row in range(count)]
        (folder / f"new_aan_pairs.{name}.tsv").write_text("".join(lines), newline="")


def make_trees(folder: Path) -> None:
    for name in readers.LISTOPS.parts:
        lines = [f"( ( [MAX {n} ) 3 ] )\t{max(n, 3)}\n" for n in range(9)]
        (folder / name).write_text("".join([readers.HEADER + "\n", *lines]), newline="")


def make_images(folder: Path) -> None:
    random_numbers = np.random.default_rng(0)
    for name in readers.IMAGE.parts:
        images = random_numbers.integers(0, 256, (4, 3072), dtype=np.uint8)
        content = {b"batch_label": b"batch", b"labels": [*range(4)], b"data": images, b"filenames": [b"a.png"] * 4}
        (folder / name).write_bytes(pickle.dumps(content, protocol=4))


def read_images(folder: Path) -> Any:
    read_rows_of("image")(folder)
    images = vision.load(str(folder))
    expect(0 <= int(images.train_labels.min()) <= int(images.train_labels.max()) < 10, "labels")


def make_pathfinder(folder: Path) -> None:
    pathfinder.generate(folder, pathfinder.Parameters(LEVEL, 10, per_folder=10), seed=1, progress=False)


def read_rows_of(name: str) -> Callable[[Path], Any]:
    """Reads all examples of a task of Long Range Arena."""
    task = TASKS[name]

    def read(folder: Path) -> None:
        options = {
            option: LEVEL if option == "level" else next(iter(values)) for option, values in task.options.items()
        }
        for rows in task.open(folder, **options).values():
            for row in rows.read():
                example, label = row or ((), 0)
                expect(0 <= label < task.num_classes, "label")
                for sequence in example if task.arity > 1 else (example,):
                    expect(
                        not len(sequence) or 0 < int(np.min(sequence)) <= int(np.max(sequence)) < task.num_tokens,
                        "tokens",
                    )

    return read


def make_prepared(folder: Path) -> None:
    make_trees(folder)
    prepare.prepare(TASKS["listops"], folder, prepared=folder / "prepared")


def read_prepared(folder: Path) -> Any:
    """What was prepared, from sources that are as they were."""
    splits = prepare.load(TASKS["listops"], folder, max_length=100, prepared=folder / "prepared")
    return {
        name: [np.array(part) for part in (split.tokens, split.ptr, split.labels)] for name, split in splits.items()
    }


def make_pictures(folder: Path) -> None:
    random_numbers = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for number, ending in enumerate(("png", "jpg", "png", "png", "png", "png")):
            Image.fromarray(random_numbers.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(
                folder / name / f"{number}.{ending}"
            )


def read_pictures(folder: Path) -> Any:
    images = vision.load(str(folder), 8)
    expect(images.train.shape[1:] == (3, 8, 8), "shape")


def make_weights(folder: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    state = {"norm.weight": torch.randn(8), "head.weight": torch.randn(2, 8)}
    save_file(state, folder / "weights.safetensors")
    torch.save(state, folder / "weights.pt")


def read_weights(folder: Path) -> Any:
    for name in ("weights.safetensors", "weights.pt"):
        expect(isinstance(vit.read_weights(str(folder / name)), dict), "no state")


def make_heterophilous(folder: Path) -> None:
    random_numbers = np.random.default_rng(0)
    masks = random_numbers.random((3, 10, 12)) < 0.5
    parts = dict(zip(("train_masks", "val_masks", "test_masks"), masks, strict=True))
    np.savez_compressed(
        folder / "tiny.npz", node_features=random_numbers.random((12, 4)), node_labels=random_numbers.integers(0, 2, 12),
        edges=random_numbers.integers(0, 12, (30, 2)), **parts,
    )  # fmt: skip


def read_heterophilous(folder: Path) -> Any:
    data = graphs.load(folder, "tiny")
    expect(
        not data.num_edges or 0 <= int(data.edge_index.min()) <= int(data.edge_index.max()) < data.num_nodes, "edges"
    )


READERS: Mapping[str, Reader] = {
    "model": Reader(make_model, read_model), "graph": Reader(make_graphs, read_graphs, foreign=True),
    "rows": Reader(make_rows, read_rows), "run": Reader(make_run, read_run, guarded=True),
    "text": Reader(make_text, read_text), "glue": Reader(make_glue, read_glue),
    "reviews": Reader(make_reviews, read_reviews), "listops": Reader(make_trees, read_rows_of("listops")),
    "retrieval": Reader(make_table, read_rows_of("retrieval")), "image": Reader(make_images, read_images),
    "pathfinder": Reader(make_pathfinder, read_rows_of("pathfinder")),
    "prepared": Reader(make_prepared, read_prepared, guarded=True, under="prepared"),
    "pictures": Reader(make_pictures, read_pictures), "weights": Reader(make_weights, read_weights),
    "graphs": Reader(make_heterophilous, read_heterophilous),
}  # fmt: skip

# ------------------------------------------------------------------ damage

NUMBERS = (
    b"0", b"-1", b"1e999", b"nan", b"99999999999999999999", b"2147483648", b"0.5", b"", b"true", b"[]", b"\xff", b"'",
)  # fmt: skip


def _cut(content: bytes, draw: random.Random) -> tuple[int, int]:
    """The ends of a part."""
    first = draw.randrange(len(content) + 1)
    return first, min(len(content), first + draw.choice((1, 2, 4, 16, 256, len(content))))


def _number(content: bytes, draw: random.Random) -> bytes:
    """Another number, or no number, in place of one."""
    places = [at for at in range(len(content)) if content[at : at + 1].isdigit() and not content[at - 1 : at].isdigit()]
    if not places:
        return content
    first = draw.choice(places)
    end = first
    while content[end : end + 1].isdigit():
        end += 1
    return content[:first] + draw.choice(NUMBERS) + content[end:]


def _bits(content: bytes, draw: random.Random) -> bytes:
    found = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8)) if found else 0):
        found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


def _bytes(content: bytes, draw: random.Random) -> bytes:
    first, end = _cut(content, draw)
    return (
        content[:first]
        + draw.choice((draw.randbytes(end - first), bytes(end - first), b"\xff" * (end - first)))
        + content[end:]
    )


def _moved(content: bytes, draw: random.Random) -> bytes:
    first, end = _cut(content, draw)
    part, rest = content[first:end], content[:first] + content[end:]
    place = draw.randrange(len(rest) + 1)
    return rest[:place] + part + rest[place:]


def _lines(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    if not lines:
        return content
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    kind = draw.randrange(4)
    if kind == 0:
        lines[at] = b"\n"
    elif kind == 1:
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == 2:
        lines.insert(at, lines[other])
    else:
        lines[at] = lines[at].replace(
            draw.choice((b"\t", b",", b"\n", b" ", b'"')), draw.choice((b"", b"\t\t", b"\r\n", b'"'))
        )
    return b"".join(lines)


DAMAGE: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _bits, _bytes, _number, _moved, _lines, lambda content, draw: content[: draw.randrange(len(content) + 1)],
    lambda content, draw: content + draw.choice((content, b"\0" * 64, draw.randbytes(32))),
    lambda content, draw: content[: (cut := _cut(content, draw))[0]] + content[cut[1] :],
    lambda content, draw: content[: (cut := _cut(content, draw))[1]] + content[cut[0] :],
)  # fmt: skip


def damage(folder: Path, draw: random.Random) -> str:
    """Changes one or two files of a folder, or removes one; returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    done = []
    for _ in range(draw.choice((1, 1, 1, 2))):
        path = draw.choice(files)
        name = str(path.relative_to(folder))
        if draw.random() < 0.02:
            path.unlink(missing_ok=True)
            done.append(f"{name} removed")
            continue
        old = path.read_bytes() if path.exists() else b""
        new = old
        for _ in range(draw.choice((1, 1, 2))):
            new = draw.choice(DAMAGE)(new, draw)
        state = path.stat() if path.exists() else None
        path.write_bytes(new)
        if state:  # a change that time alone would betray is not what is tried here
            os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
        done.append(f"{name}: {len(old)} bytes, now {len(new)}{', the same' if old == new else ''}")
    return "; ".join(done)


def fingerprint(value: Any) -> str:
    """A checksum of nested values, arrays and tensors by their bytes."""
    if isinstance(value, Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()
    if isinstance(value, Mapping):
        value = sorted((str(key), fingerprint(each)) for key, each in value.items())
    elif isinstance(value, list | tuple):
        value = [fingerprint(each) for each in value]
    return hashlib.sha256(repr(value).encode()).hexdigest()


# ------------------------------------------------------------------ calls

Found = dict[str, Any]


class Samples:
    """Valid files of each reader, made once in a folder, and what they hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole: dict[str, str] = {}

    def copy(self, name: str, target: Path) -> None:
        """Valid files of a reader, with their times."""
        source = self.folder / name
        if not source.exists():
            source.mkdir(parents=True)
            READERS[name].make(source)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        if name not in self.whole:
            self.whole[name] = fingerprint(READERS[name].read(target))


def judge(number: int, seed: int, samples: Samples, target: Path, names: Sequence[str]) -> Found:
    """Makes one call in this process."""
    draw = random.Random(seed * 10**9 + number)
    name = names[number % len(names)]
    reader = READERS[name]
    samples.copy(name, target)
    found: Found = {
        "number": number, "reader": name, "damage": damage(target / reader.under, draw), "verdict": "", "message": "",
    }  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = reader.read(target)
        same = fingerprint(result) == samples.whole[name] if result is not None else True
        found["verdict"] = "read" if same or not reader.guarded else "changed"
    except ValueError as error:
        named = str(error).startswith("Expected ")
        found |= {"verdict": "refused" if named or reader.foreign else "unclear", "message": str(error)}
    except AssertionError as error:
        wrong = str(error).startswith("wrong result") or not reader.foreign
        found |= {"verdict": "wrong" if wrong else "refused", "message": str(error) or traceback.format_exc()}
    except Exception as error:
        words = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        found |= {"verdict": "refused" if reader.foreign else "error", "message": words}
    found["seconds"] = time.perf_counter() - began
    found["mebibytes"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if found["mebibytes"] > MEMORY:
        found["verdict"] = "memory"
    return found


GOOD = ("read", "refused")


def run(numbers: Sequence[int], seed: int, names: Sequence[str], until: float = float("inf")) -> Iterator[Found]:
    """Makes calls in child processes and yields their verdicts."""
    with tempfile.TemporaryDirectory() as place:
        samples = Samples(Path(place, "samples"))

        def judge_apart(number: int) -> Found:
            torch.set_num_threads(1)
            return judge(number, seed, samples, Path(place, "call"), names)

        for number, verdict in fuzz_children.run(numbers, judge_apart, 1, LIMIT, CALLS_OF_A_CHILD):
            if isinstance(verdict, int):
                kind, words = "hang" if verdict in fuzz_children.LATE else "crash", f"exit status {verdict}"
                verdict = {
                    "number": number, "reader": names[number % len(names)], "damage": "", "verdict": kind,
                    "message": words,
                }  # fmt: skip
            yield verdict
            if time.monotonic() > until:
                break


def faults(found: Sequence[Found]) -> list[Found]:
    return [each for each in found if each["verdict"] not in GOOD]


def report(found: Sequence[Found]) -> str:
    """A line for each reader, then each fault."""
    lines = []
    for name in dict.fromkeys(each["reader"] for each in found):
        count = Counter(each["verdict"] for each in found if each["reader"] == name)
        lines.append(f"{name:>12}  " + "  ".join(f"{verdict} {number:,}" for verdict, number in sorted(count.items())))
    lines += [
        f"\n#{each['number']} {each['reader']}: {each['verdict']}\n{each['damage']}\n{each['message']}"
        for each in faults(found)
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seconds", type=float, help="go on for so long, in place of a number of calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--readers", nargs="+", choices=READERS, default=[*READERS], metavar="R", help=", ".join(READERS)
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there")
    parser.add_argument("--only", type=int, metavar="N", help="make one call in this process and keep its files")
    given = parser.parse_args()
    if given.only is not None:
        folder = Path(tempfile.mkdtemp())
        one = judge(given.only, given.seed, Samples(folder / "samples"), folder / "call", given.readers)
        print(json.dumps(one, indent=1), f"\nfiles: {folder / 'call'}")
        return int(bool(faults([one])))
    until = time.monotonic() + given.seconds if given.seconds else float("inf")
    found = []
    for each in run(range(10**6 if given.seconds else given.calls), given.seed, given.readers, until):
        found.append(each)
        if faults([each]):
            print(report([each]).partition("\n")[2], file=sys.stderr, flush=True)
    print(report(found))
    if given.json:
        given.json.write_text(json.dumps(found))
    return int(bool(faults(found)))


if __name__ == "__main__":
    sys.exit(main())
