"""Readers of the releases, the Pathfinder generator, and prepared data with its faults."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from examples.lra.__main__ import main
from examples.lra.data import files, pathfinder, readers, snakes
from examples.lra.data import prepare as preparing
from examples.lra.data.batches import Split
from examples.lra.data.prepare import load, prepare, splits_digest
from examples.lra.data.tasks import TASKS, data_folder, open_data
from examples.lra.settings import Plan

ROOT = Path(preparing.__file__).parents[3]
LEVEL = {"level": "curv_baseline"}


def make_text(folder: Path) -> None:
    for part, count in (("train", 20), ("test", 4)):
        for name in ("neg", "pos"):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                (folder / part / name / f"{number}_{9 if name == 'pos' else 2}.txt").write_bytes(
                    f"{part} {name} {number} é\n".encode()
                )
    (folder / "train" / "unsup").mkdir()


def make_retrieval(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 6), ("eval", 3), ("test", 2)):
        lines = [f"{row % 2}.0\tP{row}\tQ{row}\tb'first \"{row}\\n'\tb\"it's {row}\"\n" for row in range(count)]
        (folder / f"new_aan_pairs.{name}.tsv").write_text("".join(lines), newline="")


def make_image(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for name in (*readers.TRAIN, readers.TEST):
        images = rng.integers(0, 256, (8, 3072), dtype=np.uint8)
        content = {b"batch_label": b"batch", b"labels": [*range(8)], b"data": images, b"filenames": [b"a.png"] * 8}
        (folder / name).write_bytes(pickle.dumps(content, protocol=4))


def make_pathfinder(folder: Path) -> None:
    pathfinder.generate(folder, pathfinder.Parameters("curv_baseline", 40, per_folder=25), seed=1, progress=False)


MAKE: dict[str, tuple[Callable[[Path], None], str]] = {
    "text": (make_text, "aclImdb"),
    "retrieval": (make_retrieval, "tsv_data"),
    "image": (make_image, "cifar-10-batches-py"),
    "pathfinder": (make_pathfinder, "pathfinder32"),
}
SIZES = {"text": [36, 4, 8], "retrieval": [6, 3, 2], "image": [36, 4, 8], "pathfinder": [32, 4, 4]}


def options(task: str) -> dict[str, str]:
    return LEVEL if task == "pathfinder" else {}


def sequences(split: Split) -> list[bytes]:
    return [bytes((split.tokens[a:b] - 1).astype(np.uint8)) for a, b in zip(split.ptr[:-1], split.ptr[1:], strict=True)]


@pytest.mark.parametrize("task", MAKE)
@pytest.mark.parametrize("above", ["", "{name}", "lra_release/{name}", "lra_release/lra_release/{name}"])
def test_a_release_is_found_as_it_lies(task: str, above: str, tmp_path: Path) -> None:
    make, name = MAKE[task]
    make(tmp_path / "root" / above.format(name=name))
    splits = load(TASKS[task], tmp_path / "root", max_length=1024, options=options(task))
    assert [len(splits[split]) for split in ("train", "val", "test")] == SIZES[task]
    assert all(isinstance(split.tokens, np.memmap) for split in splits.values())


@pytest.mark.parametrize("name", ["tsv_data", "aan", "pathfinder", "pathfinder32", "cifar10", "listops"])
def test_renamed_folders_are_known(name: str) -> None:
    known = [place for task in TASKS.values() for place in task.release.folders]
    assert f"lra_release/{name}" in known


@pytest.mark.parametrize("task", TASKS)
def test_a_wrong_folder_shows_the_tree_and_an_archive_how_to_unpack_it(task: str, tmp_path: Path) -> None:
    tree = TASKS[task].release.tree.splitlines()[1].strip()
    with pytest.raises(ValueError, match=rf"(?s)\(got no such folder\).*{re.escape(tree)}"):
        prepare(TASKS[task], tmp_path / "nowhere")
    with pytest.raises(ValueError, match=rf"(?s)\(got other files\).*{re.escape(tree)}"):
        prepare(TASKS[task], tmp_path)
    archive = tmp_path / "release.tar.gz"
    with tarfile.open(archive, "w:gz"):
        pass
    for root in (tmp_path, archive):
        with pytest.raises(
            ValueError,
            match=rf"(?s)got an archive, release.tar.gz\)\. Unpack it with: tar -xzf {archive} -C {tmp_path}\n.*{re.escape(tree)}",
        ):
            prepare(TASKS[task], root)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("lra_release.gz", "tar -xzf '{0}/lra_release.gz' -C '{0}'"),
        ("basic_train.tsv.gz", "gunzip -k '{0}/basic_train.tsv.gz'"),
        ("it's.zip", """unzip '{0}/it'"'"'s.zip' -d '{0}'"""),
    ],
)
def test_the_advice_for_an_archive_can_be_pasted(tmp_path: Path, name: str, command: str) -> None:
    folder = tmp_path / "my data"
    folder.mkdir()
    (folder / name).touch()
    with pytest.raises(ValueError, match=re.escape(f"Unpack it with: {command.format(folder)}\n")):
        prepare(TASKS["listops"], folder)


@pytest.mark.parametrize("task", ["text", "retrieval", "image", "listops"])
def test_a_missing_part_is_named(task: str, tmp_path: Path) -> None:
    parts = {
        "text": "train/neg",
        "retrieval": "new_aan_pairs.eval.tsv",
        "image": "data_batch_3",
        "listops": "basic_val.tsv",
    }
    whole = {"text": make_text, "retrieval": make_retrieval, "image": make_image}
    if task == "listops":
        for name in ("train", "test"):
            (tmp_path / f"basic_{name}.tsv").touch()
    else:
        whole[task](tmp_path)
        (tmp_path / parts[task]).rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"to hold every \w+ \(got no {parts[task]}\)"):
        prepare(TASKS[task], tmp_path)


# Text


def test_text_is_bytes_plus_one_and_holds_out_the_highest_numbers(tmp_path: Path) -> None:
    make_text(tmp_path)
    splits = load(TASKS["text"], tmp_path, max_length=3072)
    held_out = [f"train {name} {number} é\n".encode() for name in ("neg", "pos") for number in (18, 19)]
    assert sequences(splits["val"]) == held_out
    assert splits["val"].labels.tolist() == [0, 0, 1, 1]
    assert not set(held_out) & set(sequences(splits["train"]))
    assert b"test pos 3 \xc3\xa9\n" in sequences(splits["test"])
    theirs = load(TASKS["text"], tmp_path, max_length=3072, options={"split": "lra"})
    assert sequences(theirs["val"]) == sequences(theirs["test"]) == sequences(splits["test"])
    assert len(theirs["train"]) == 40
    assert {path.name for path in (tmp_path / "prepared").iterdir() if path.is_dir()} == {"text-held-out", "text-lra"}


def test_text_refuses_what_is_not_of_the_release(tmp_path: Path) -> None:
    make_text(tmp_path)
    (tmp_path / "train" / "pos" / ".DS_Store").touch()
    (tmp_path / "train" / "pos" / "7_8.txt").touch()
    with pytest.raises(ValueError, match=r"train/pos/7_8\.txt' to hold a review \(got an empty file\)"):
        prepare(TASKS["text"], tmp_path)
    (tmp_path / "train" / "pos" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"train/pos/notes\.txt' to be named NUMBER_STARS\.txt"):
        prepare(TASKS["text"], tmp_path)


# Retrieval


def test_retrieval_takes_literals_as_they_stand(tmp_path: Path) -> None:
    make_retrieval(tmp_path)
    val = load(TASKS["retrieval"], tmp_path, max_length=4096)["val"]
    assert sequences(val)[2:4] == [b"b'first \"1\\n'", b'b"it\'s 1"']
    assert val.labels.tolist() == [0, 1, 0]
    assert val.arity == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"1.0\ta\tb\ttext", r"eval\.tsv:2' to have five columns, label, two ids and two texts \(got 4\)"),
        (b"1.0\ta\tb\tone\ttwo\tthree", r"eval\.tsv:2' to have five columns.*\(got 6\)"),
        (b"a\t1.0\tb\tone\ttwo", r"eval\.tsv:2' to start with the label 0\.0 or 1\.0 \(got 'a'\)"),
        (b"2\ta\tb\tone\ttwo", r"eval\.tsv:2' to start with the label .*\(got '2'\)"),
        (b"nan\ta\tb\tone\ttwo", r"eval\.tsv:2' to start with the label .*\(got 'nan'\)"),
        (b"inf\ta\tb\tone\ttwo", r"eval\.tsv:2' to start with the label .*\(got 'inf'\)"),
        (b"1\ta\tb\t\ttwo", r"eval\.tsv:2' to hold two texts \(got an empty one\)"),
    ],
)
def test_retrieval_names_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    make_retrieval(tmp_path)
    (tmp_path / "new_aan_pairs.eval.tsv").write_bytes(b"1.0\ta\tb\tone \x0b\x85 \xff\ttwo\r\n" + line + b"\r\n")
    with pytest.raises(ValueError, match=message):
        prepare(TASKS["retrieval"], tmp_path)


# Image


def test_image_is_grey_as_tensorflow_computes_it(tmp_path: Path) -> None:
    make_image(tmp_path)
    splits = load(TASKS["image"], tmp_path, max_length=1024)
    assert splits["train"].labels.tolist() == [*range(8)] * 4 + [0, 1, 2, 3]
    assert splits["val"].labels.tolist() == [4, 5, 6, 7]
    colours, _ = readers.read_batch(tmp_path / "data_batch_5")
    red, green, blue = colours[4].reshape(3, 1024).astype(float)
    wanted = np.floor(255.5 * (0.2989 * red + 0.587 * green + 0.114 * blue) / 255)
    found = np.frombuffer(sequences(splits["val"])[0], dtype=np.uint8)
    assert np.abs(found - wanted).max() <= 1  # float32 may fall on the other side of a whole number
    assert (found == wanted).mean() > 0.99


def test_black_pixels_are_tokens(tmp_path: Path) -> None:
    make_image(tmp_path)
    content = {b"data": np.zeros((8, 3072), dtype=np.uint8), b"labels": [0] * 8}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content, protocol=4))
    test = load(TASKS["image"], tmp_path, max_length=1024)["test"]
    assert (np.asarray(test.tokens) == 1).all()
    assert (test.lengths == 1024).all()


def python_2_pickle(images: np.ndarray, labels: list[int]) -> bytes:
    """Writes a batch as Python 2 did in 2009, by hand: protocol 2, byte strings, numpy.core."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    dtype = (
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\x00K\x01\x87R(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    shape = b"K" + bytes([len(images)]) + b"M\x00\x0c\x86"
    body = b"T" + len(images.tobytes()).to_bytes(4, "little") + images.tobytes()
    array += b"(K\x01" + shape + dtype + b"\x89" + body + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def test_the_official_pickles_of_python_2_are_read(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 3072), dtype=np.uint8)
    (tmp_path / "batch").write_bytes(python_2_pickle(images, [3, 1, 4, 1, 5]))
    found, labels = readers.read_batch(tmp_path / "batch")
    assert (found == images).all()
    assert labels.tolist() == [3, 1, 4, 1, 5]


class Payload:
    def __init__(self, function: Callable, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.call


def test_a_pickle_that_runs_a_program_is_refused_before_it_runs(tmp_path: Path) -> None:
    make_image(tmp_path)
    trace = tmp_path / "trace"
    for function, arguments in (
        (os.system, (f"touch {trace}",)),
        (eval, (f"open({str(trace)!r}, 'w')",)),
        (np.load, (str(trace),)),
    ):
        (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Payload(function, *arguments)}))
        with pytest.raises(
            ValueError,
            match=r"data_batch_1' to be a pickle of arrays and nothing else \(got it asks for (posix|nt|builtins|numpy)\.",
        ):
            prepare(TASKS["image"], tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"to be a pickle of arrays and nothing else"),
        (pickle.dumps({b"data": 1})[:-5], r"to be a pickle of arrays and nothing else"),
        (pickle.dumps([1, 2]), r'to hold b"data" \[n, 3072\] uint8 \(got NoneType\)'),
        (pickle.dumps({b"data": [0]}), r'to hold b"data" .* \(got list\)'),
        (pickle.dumps({b"data": np.zeros((2, 3)), b"labels": [1]}, 4), r'to hold b"data" .* \(got float64 \[2, 3\]\)'),
        (
            pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, 4),
            r'to hold b"labels", a list of 2 \(got 1\)',
        ),
        (
            pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": [1]}, 4),
            r'to hold b"labels", a list of 1 \(got NoneType\)',
        ),
        (
            pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 10]}, 4),
            r"a label from 0 to 9 in row 1 \(got 10\)",
        ),
    ],
)
def test_image_refuses_other_contents(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        readers.read_batch(tmp_path / "batch")


@pytest.mark.parametrize("protocol", [2, 4])
def test_no_damaged_length_of_a_pickle_asks_for_memory(tmp_path: Path, protocol: int) -> None:
    whole = pickle.dumps({b"data": np.full((2, 3072), 7, np.uint8), b"labels": [1, 9]}, protocol)
    pixels = whole.index(b"\7" * 99)
    path = tmp_path / "batch"
    for place in [*range(pixels), *range(pixels + 2 * 3072, len(whole))]:
        for bit in (0, 3, 7):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            with contextlib.suppress(ValueError):
                readers.read_batch(path)
    path.write_bytes(b"\x80\x02]r" + (2**32 - 1).to_bytes(4, "little") + b".")
    with pytest.raises(
        ValueError, match=r"a pickle of arrays and nothing else \(got it counts to 4,294,967,295 in 9 bytes\)"
    ):
        readers.read_batch(path)


# Pathfinder


def test_generated_images_have_the_layout_of_the_release(tmp_path: Path) -> None:
    make_pathfinder(tmp_path)
    level = tmp_path / "curv_baseline"
    assert sorted(path.name for path in (level / "metadata").iterdir()) == ["0.npy", "1.npy"]
    lines = [line for batch in "01" for line in (level / "metadata" / f"{batch}.npy").read_text().splitlines()]
    assert len(lines) == 40
    for number, line in enumerate(lines):
        batch, row = divmod(number, 25)
        assert re.fullmatch(rf"imgs/{batch} sample_{row}\.png {row} [01] 1\.0 6 2 2 0\.5 1 1", line)
        with Image.open(level / f"imgs/{batch}/sample_{row}.png") as image:
            assert (image.size, image.mode) == ((32, 32), "L")
            assert np.asarray(image).max() == 255
    assert sum(int(line.split()[3]) for line in lines) == 20
    assert json.loads((tmp_path / "manifest.json").read_text())["parameters"]["images"] == 40


def test_an_image_is_a_function_of_seed_and_number(tmp_path: Path) -> None:
    images = [snakes.draw(9, seed=5, number=number) for number in range(12)]
    again = [snakes.draw(9, seed=5, number=number) for number in reversed(range(12))][::-1]
    assert all((a == c).all() and b == d for (a, b), (c, d) in zip(images, again, strict=True))
    assert len({image.tobytes() for image, _ in images}) == 12
    assert len({snakes.draw(9, seed=seed, number=0)[0].tobytes() for seed in range(12)}) == 12
    assert sum(label for _, label in images) == 6
    for seed in range(2):
        make = pathfinder.Parameters("curv_baseline", 10)
        for name in ("a", "b"):
            pathfinder.generate(tmp_path / f"{name}{seed}", make, seed=seed, progress=False)
    digests = {
        name: hashlib.sha256(b"".join(path.read_bytes() for path in sorted((tmp_path / name).rglob("*.png")))).digest()
        for name in ("a0", "b0", "a1", "b1")
    }
    assert digests["a0"] == digests["b0"] != digests["a1"] == digests["b1"]


def test_labels_are_independent_from_image_to_image() -> None:
    labels = np.array([snakes.draw(6, seed=0, number=number)[1] for number in range(0, 4000, 2)])
    assert abs(labels.mean() - 0.5) < 5 * 0.5 / 2000**0.5
    assert abs(np.mean(labels[1:] == labels[:-1]) - 0.5) < 5 * 0.5 / 2000**0.5


def test_generating_pathfinder_again_does_nothing_and_an_interruption_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pathfinder(tmp_path / "whole")
    small = pathfinder.Parameters("curv_baseline", 40, per_folder=25)
    assert not pathfinder.generate(tmp_path / "whole", small, seed=1, progress=False)
    with pytest.raises(ValueError, match=r"or the data set asked for \(got one made with seed 1"):
        pathfinder.generate(tmp_path / "whole", small, seed=2, progress=False)
    draw = snakes.draw

    def impatient(contour: int, *, seed: int, number: int) -> tuple[np.ndarray, int]:
        if number > 30:
            raise KeyboardInterrupt
        return draw(contour, seed=seed, number=number)

    monkeypatch.setattr(snakes, "draw", impatient)
    with pytest.raises(KeyboardInterrupt):
        pathfinder.generate(tmp_path / "part", small, progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"whole", ".whole.lock", ".part.lock"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": "easy"}, r"'level' to be one of curv_baseline"),
        ({"images": 9}, r"'images' to be at least 10 \(got 9\)"),
    ],
)
def test_parameters_of_pathfinder_are_checked(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pathfinder.Parameters(**change)


def test_an_empty_image_is_left_out_and_counted(tmp_path: Path) -> None:
    make_pathfinder(tmp_path)
    (tmp_path / "curv_baseline/imgs/0/sample_8.png").write_bytes(b"")  # the first of the validation split
    splits = load(TASKS["pathfinder"], tmp_path, max_length=1024, options=LEVEL)
    assert len(splits["val"]) == 3
    manifest = json.loads((tmp_path / "prepared/pathfinder-80-10-10-curv_baseline/manifest.json").read_text())
    assert {name: entry["skipped"] for name, entry in manifest["splits"].items()} == {"train": 0, "val": 1, "test": 0}
    with Image.open(tmp_path / "curv_baseline/imgs/0/sample_9.png") as image:  # the first of the test split
        assert sequences(splits["test"])[0] == image.tobytes()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "metadata/1.npy",
            b"imgs/1 sample_0.png 0 1 1.0 6 2 2 0.5 1\n",
            r"metadata/1\.npy:1' to have eleven fields \(got 10\)",
        ),
        (
            "metadata/1.npy",
            b"imgs/1 sample_0.png 0 2 1.0 6 2 2 0.5 1 1\n",
            r"metadata/1\.npy:1' to have the label 0 or 1 .*\(got '2'\)",
        ),
        (
            "metadata/1.npy",
            b"imgs/1 sample_0.png 0 1 1.0 14 4 2 0.5 1 1\n",
            r"metadata/1\.npy:1' to have 6, the length of this level",
        ),
        (
            "metadata/1.npy",
            b"../../x sample_0.png 0 1 1.0 6 2 2 0.5 1 1\n",
            r"metadata/1\.npy:1' to start with a folder imgs/NUMBER",
        ),
        (
            "metadata/1.npy",
            b"imgs/1 sample_99.png 0 1 1.0 6 2 2 0.5 1 1\n",
            r"imgs/1/sample_99\.png' to be an image, as metadata says",
        ),
        (
            "metadata/1.npy",
            b"\x93NUMPY",
            r"metadata/1\.npy' to be plain text, as LRA released it \(got an array of numpy\)",
        ),
        ("imgs/0/sample_3.png", b"no image", r"imgs/0/sample_3\.png' to be an image in PNG"),
    ],
)
def test_pathfinder_names_file_and_line(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    make_pathfinder(tmp_path)
    (tmp_path / "curv_baseline" / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare(TASKS["pathfinder"], tmp_path, options=LEVEL)


def test_pathfinder_refuses_larger_images_and_missing_levels(tmp_path: Path) -> None:
    make_pathfinder(tmp_path)
    Image.new("RGB", (128, 128)).save(tmp_path / "curv_baseline/imgs/0/sample_3.png")
    with pytest.raises(ValueError, match=r"to have 32 x 32 grey pixels, uint8 \(got 128 x 128 x 3, uint8\)"):
        prepare(TASKS["pathfinder"], tmp_path, options=LEVEL)
    with pytest.raises(
        ValueError,
        match=r"to hold the level curv_contour_length_14 \(got curv_baseline\)\. Choose one of those with --level",
    ):
        prepare(TASKS["pathfinder"], tmp_path)


def statistics_of(images: np.ndarray) -> dict[str, np.ndarray]:
    """Figures of images: their ink, connected parts, shares of brightnesses, and how far their discs are apart."""
    disc = snakes.stamps().disc > 0.5
    parts, apart = [], []
    for image in images:
        parts.append(ndimage.label(image > 60, structure=np.ones((3, 3)))[1])
        match = ndimage.correlate(np.minimum(image / image.max(), 0.8), disc.astype(float), mode="constant")
        y, x = np.unravel_index(match.argmax(), match.shape)
        match[max(0, y - 3) : y + 4, max(0, x - 3) : x + 4] = 0
        b, a = np.unravel_index(match.argmax(), match.shape)
        apart.append(np.hypot(y - b, x - a))
    shares = np.histogram(images, bins=[0, 1, 32, 64, 96, 128, 160, 192, 224, 255, 256])[0] / images.size
    return {"ink": images.mean((1, 2)), "parts": np.array(parts), "apart": np.array(apart), "shares": shares}


@pytest.mark.needs_data
@pytest.mark.parametrize("level", pathfinder.LEVELS)
def test_generated_images_look_like_those_of_the_published_generator(
    level: str, tmp_path: Path, sample: Callable[..., Path]
) -> None:
    with tarfile.open(sample("pathfinder/pathfinder32_generated.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    splits = load(TASKS["pathfinder"], tmp_path, max_length=1024, options={"level": level})
    images = (
        np.concatenate([np.array(split.tokens) - 1 for split in splits.values()])
        .reshape(-1, 32, 32)
        .astype(np.uint8)[:400]
    )
    labels = np.concatenate([split.labels for split in splits.values()])
    theirs = statistics_of(images)
    ours = statistics_of(
        np.stack([snakes.draw(pathfinder.LEVELS[level], seed=7, number=number)[0] for number in range(400)])
    )
    assert ours["ink"].mean() == pytest.approx(theirs["ink"].mean(), rel=0.05)
    assert ours["ink"].std() == pytest.approx(theirs["ink"].std(), rel=0.25)
    assert ours["parts"].mean() == pytest.approx(theirs["parts"].mean(), rel=0.25)
    assert ours["apart"].mean() == pytest.approx(theirs["apart"].mean(), rel=0.15)
    assert np.abs(ours["shares"] - theirs["shares"]).max() < 0.015
    assert abs(labels.mean() - 0.5) < 0.06


# Samples of the releases


@pytest.mark.needs_data
@pytest.mark.parametrize(
    ("task", "place", "parts", "sizes"),
    [
        ("text", "imdb/aclImdb_sample.tar.gz", (), [1800, 200, 1000]),
        ("retrieval", "retrieval", readers.PAIRS.values(), [360, 60, 60]),
        (
            "image",
            "cifar10",
            [f"cifar-10-batches-py/{name}" for name in (*readers.TRAIN, readers.TEST)],
            [900, 100, 300],
        ),
    ],
)
def test_samples_of_the_releases_are_read(
    task: str, place: str, parts: Sequence[str], sizes: list[int], tmp_path: Path, sample: Callable[..., Path]
) -> None:
    root = sample(place, *parts)
    if root.is_file():
        with tarfile.open(root) as archive:
            archive.extractall(tmp_path, filter="data")
        root = tmp_path
    splits = load(TASKS[task], root, max_length=4096, prepared=tmp_path / "prepared")
    assert [len(split) for split in splits.values()] == sizes
    assert all(split.tokens.min() > 0 and split.tokens.max() < TASKS[task].num_tokens for split in splits.values())
    assert all(split.majority() < 0.6 for split in splits.values())
    if task == "retrieval":
        pair = splits["test"].__getitems__([0])
        assert bytes((pair.tokens[0][:2] - 1).tolist()) in (b"b'", b'b"')


def test_a_folder_of_other_samples_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: Callable[..., Path]
) -> None:
    monkeypatch.setitem(sample.__globals__, "SAMPLES", tmp_path)
    (tmp_path / "retrieval").mkdir()
    assert sample("retrieval") == tmp_path / "retrieval"
    with pytest.raises(
        pytest.skip.Exception,
        match=r"no sample data in .*retrieval/a.tsv; set SBM_PYG_DATA to a folder that holds retrieval/a.tsv",
    ):
        sample("retrieval", "a.tsv")


@pytest.mark.parametrize("split", readers.TEXT_SPLITS)
def test_reviews_that_no_split_reads_are_refused(text: Path, split: str) -> None:
    (text / "unsup_notes").mkdir()  # holds no reviews
    assert sum(len([*rows.read()]) for rows in readers.open_text(text, split=split).values()) == (
        48 if split == "held-out" else 56
    )
    for name in ("neg", "pos"):
        (text / "val" / name).mkdir(parents=True)
        (text / "train" / name / f"19_{9 if name == 'pos' else 2}.txt").rename(text / "val" / name / "19_5.txt")
    with pytest.raises(
        ValueError,
        match=r"aclImdb' to hold reviews in train and test alone \(got more in val\)\. Move those of val back",
    ):
        load(TASKS["text"], text, max_length=100, options={"split": split})


def test_a_part_of_a_release_is_described_by_what_is_there(text: Path, capsys: pytest.CaptureFixture) -> None:
    main(["prepare", "--task", "text", "--data", str(text)])
    told = capsys.readouterr().out
    assert "(22,500/2,500/25,000 of the whole release)" in told
    assert "\n examples: 36/4/8\n" in told


# Prepared data


@pytest.fixture
def text(tmp_path: Path) -> Path:
    make_text(tmp_path / "aclImdb")
    return tmp_path / "aclImdb"


def state(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_preparing_twice_does_nothing(text: Path) -> None:
    folder, written = prepare(TASKS["text"], text)
    assert written
    before = state(folder)
    assert prepare(TASKS["text"], text) == (folder, False)
    assert state(folder) == before
    assert not [path for path in folder.parent.iterdir() if "partial" in path.name]


def test_the_manifest_counts_and_hashes(text: Path) -> None:
    folder, _ = prepare(TASKS["text"], text)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["options"] == {"split": "held-out"}
    assert manifest["splits"]["train"]["labels"] == {"0": 18, "1": 18}
    entry = manifest["splits"]["val"]
    assert entry["examples"] == 4
    assert entry["tokens"] == np.load(folder / "val_tokens.npy").size == np.load(folder / "val_ptr.npy")[-1]
    assert entry["arrays"]["tokens"]["sha256"] == hashlib.sha256((folder / "val_tokens.npy").read_bytes()).hexdigest()


def test_the_length_is_chosen_when_arrays_are_mapped(text: Path) -> None:
    long, short = (load(TASKS["text"], text, max_length=length)["train"] for length in (100, 5))
    assert long.truncated == 0
    assert short.truncated == 36
    assert (short.lengths == 5).all()
    assert short.digest == long.digest
    assert splits_digest({"train": short}) != splits_digest({"train": long})


@pytest.mark.parametrize("array", ["train_tokens.npy", "val_ptr.npy", "test_labels.npy"])
def test_a_flipped_byte_is_named_with_the_way_out(text: Path, array: str) -> None:
    folder, _ = prepare(TASKS["text"], text)
    content = bytearray((folder / array).read_bytes())
    content[-1] ^= 1
    (folder / array).write_bytes(content)
    with pytest.raises(
        ValueError,
        match=rf"{array}' to be as it was prepared.* It is damaged: remove {folder}, and it is prepared anew",
    ):
        load(TASKS["text"], text, max_length=100)
    (folder / array).unlink()
    with pytest.raises(ValueError, match=rf"{array}' to be as it was prepared.*\(got no such file\)"):
        load(TASKS["text"], text, max_length=100)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=rf"manifest\.json' to be the manifest of prepared data.*Remove {folder}"):
        load(TASKS["text"], text, max_length=100)


def test_no_flipped_byte_of_a_manifest_ends_in_a_traceback(text: Path) -> None:
    folder, _ = prepare(TASKS["text"], text)
    content, whole = (folder / "manifest.json").read_bytes(), files.read_manifest(folder, "prepared data")
    refused = []
    for place in range(0, len(content), 3):
        (folder / "manifest.json").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            manifest = files.read_manifest(folder, "prepared data")
        except ValueError as error:
            refused.append(str(error))
            continue
        assert manifest == whole  # a change of white space
    assert len(refused) > 200
    assert all(
        re.search(r"manifest\.json' to be the manifest of prepared data .* Remove ", message) for message in refused
    )
    (folder / "manifest.json").write_bytes(content.replace(b'"splits"', b'"rplits"'))
    with pytest.raises(ValueError, match=r"to be the manifest of prepared data \(got a damaged one\)\. Remove "):
        load(TASKS["text"], text, max_length=100)


def test_links_to_nothing_are_named(text: Path, tmp_path: Path) -> None:
    (text / "train" / "neg" / "99_1.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match=r"99_1\.txt' to be readable \(got: .*No such file or directory.*\)\. Copy it again"
    ):
        prepare(TASKS["text"], text)
    make_pathfinder(tmp_path / "snakes")
    (tmp_path / "snakes" / "curv_baseline" / "imgs" / "0").rename(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match=r"imgs/0' to be readable \(got: .*No such file or directory.*\)\. Copy it again"
    ):
        prepare(TASKS["pathfinder"], tmp_path / "snakes", options=LEVEL)


def test_a_changed_source_is_prepared_again(text: Path) -> None:
    before = load(TASKS["text"], text, max_length=100)
    (text / "train" / "pos" / "3_9.txt").write_bytes(b"another text, so another length and time")
    after = load(TASKS["text"], text, max_length=100)
    assert b"another text, so another length and time" in sequences(after["train"])
    assert b"another text, so another length and time" not in sequences(
        before["train"]
    )  # still mapped, and still whole
    assert after["train"].digest != before["train"].digest
    assert after["test"].digest == before["test"].digest


def test_prepared_data_are_read_where_nothing_can_be_written(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = prepare(TASKS["text"], text)
    above = text / "prepared"

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system", str(above))

    monkeypatch.setattr(files, "FileLock", refused)
    assert prepare(TASKS["text"], text) == (folder, False)
    assert len(load(TASKS["text"], text, max_length=100)["train"]) == 36
    with pytest.raises(
        ValueError, match=r"to be a place for prepared data \(got: .*Read-only .*give another with --prepared DIR"
    ):
        prepare(TASKS["text"], text, prepared=above / "other")


def test_a_folder_that_is_not_ours_is_never_replaced(text: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "text-held-out").mkdir(parents=True)
    (tmp_path / "out" / "text-held-out" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"to be the manifest of prepared data \(got no such file\)"):
        prepare(TASKS["text"], text, prepared=tmp_path / "out")
    assert (tmp_path / "out" / "text-held-out" / "thesis.tex").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"to be a place for prepared data.*or give another with --prepared DIR"):
        prepare(TASKS["text"], text, prepared=tmp_path / "file")


def test_unknown_options_are_refused(text: Path) -> None:
    with pytest.raises(
        ValueError, match=r"Expected 'split' of text to be one of held-out, lra \(got 'release'\)\. Choose one of them"
    ):
        prepare(TASKS["text"], text, options={"split": "release"})
    with pytest.raises(ValueError, match=r"Expected 'level' of text to be one of none \(got 'curv_baseline'\)"):
        prepare(TASKS["text"], text, options=LEVEL)


KILLED = """
import os, signal, sys
from pathlib import Path
from examples.lra.data import prepare as preparing
from examples.lra.data.tasks import TASKS
append, calls = preparing._Array.append, []
def doomed(self, piece):
    calls.append(0)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, piece)
preparing._Array.append = doomed
preparing.prepare(TASKS["text"], Path(sys.argv[1]))
"""


def run(program: str, *arguments: object) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)], env=environment)


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_nothing_half_done(text: Path) -> None:
    assert run(KILLED, text, 60).wait() == -signal.SIGKILL
    folder = text / "prepared" / "text-held-out"
    assert not folder.exists()
    assert prepare(TASKS["text"], text) == (folder, True)
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f".{folder.name}.lock"}
    assert [len(split) for split in load(TASKS["text"], text, max_length=100).values()] == SIZES["text"]


REPLACING = """
import os, shutil, signal, sys
from pathlib import Path
from examples.lra.data.prepare import prepare
from examples.lra.data.tasks import TASKS
calls = []
def watch(module, name):
    done = getattr(module, name)
    def watched(path, *rest, **options):
        manifest = Path(path) / "manifest.json"
        if manifest.exists():
            calls.append(name)
            if len(calls) == int(sys.argv[2]):
                if name == "rmtree":
                    manifest.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return done(path, *rest, **options)
    setattr(module, name, watched)
watch(shutil, "rmtree")
watch(os, "replace")
prepare(TASKS["text"], Path(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_kill_while_old_arrays_are_replaced_leaves_nothing_half_done(text: Path, moment: int) -> None:
    """Before the old ones are moved, before the new ones get their name, and in the middle of removing the old ones."""
    folder, _ = prepare(TASKS["text"], text)
    (text / "train" / "pos" / "3_9.txt").write_bytes(b"another text, so another length and time")
    assert run(REPLACING, text, moment).wait() == -signal.SIGKILL
    assert prepare(TASKS["text"], text) == (folder, moment < 3)
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f".{folder.name}.lock"}
    assert b"another text, so another length and time" in sequences(load(TASKS["text"], text, max_length=100)["train"])


@pytest.mark.slow
def test_processes_that_prepare_at_once_agree(text: Path) -> None:
    program = "import sys; from pathlib import Path; from examples.lra.data.tasks import TASKS, prepare; "
    program += "print(prepare(TASKS['text'], Path(sys.argv[1])))"
    assert [process.wait() for process in [run(program, text) for _ in range(2)]] == [0, 0]
    assert [len(split) for split in load(TASKS["text"], text, max_length=100).values()] == SIZES["text"]


def test_pixels_are_never_cut(tmp_path: Path) -> None:
    make_image(tmp_path)
    with pytest.raises(
        ValueError, match=r"Expected 'train' example 0 to have at most 1000 tokens \(got 1024\)\. Raise --max-length"
    ):
        load(TASKS["image"], tmp_path, max_length=1000)


def test_older_conventions_leave_out_black_pixels_and_keep_places(tmp_path: Path) -> None:
    make_pathfinder(tmp_path)
    black = np.zeros((32, 32), dtype=np.uint8)
    Image.fromarray(black).save(tmp_path / "curv_baseline/imgs/0/sample_8.png")
    ours, theirs = (
        load(TASKS["pathfinder"], tmp_path, max_length=1024, options=LEVEL, masked=masked)["val"]
        for masked in (None, 1)
    )
    assert ours.lengths.tolist() == [1024] * 4
    batch, whole = theirs.__getitems__([2, 0]), ours.__getitems__([2, 0])
    assert batch.ptr.diff().tolist() == theirs.lengths[[2, 0]].tolist()
    lit = whole.tokens[:1024] != 1
    assert batch.tokens[:-1].tolist() == whole.tokens[:1024][lit].tolist()
    assert batch.positions[:-1].tolist() == lit.nonzero()[:, 0].tolist()
    assert (batch.tokens[-1], batch.positions[-1]) == (1, 0)  # of the black image, one pixel is kept
    assert splits_digest({"val": ours}) != splits_digest({"val": theirs})


# The table and its command line


TABLE_7 = {  # length, batch size, learning rate, steps, classes
    "listops": (2048, 128, 5e-4, 5000, 10),
    "text": (3072, 128, 5e-4, 20000, 2),
    "retrieval": (4096, 32, 1e-4, 30000, 2),
    "image": (1024, 1024, 5e-4, 35000, 10),
    "pathfinder": (1024, 1024, 5e-4, 62400, 2),
}


@pytest.mark.parametrize("task", TASKS)
def test_presets_of_the_paper_are_table_7(task: str) -> None:
    settings = TASKS[task].presets["paper"].settings
    found = (settings.max_length, settings.batch_size, settings.learning_rate, settings.steps, TASKS[task].num_classes)
    assert found == TABLE_7[task]
    assert (settings.layers, settings.heads, settings.channels, settings.ffn_channels, settings.head_channels) == (
        2,
        2,
        64,
        128,
        32,
    )
    assert (settings.dropout, settings.attention_dropout, settings.num_blocks, settings.weight_decay) == (
        0.1,
        0.1,
        128,
        0.0,
    )


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("preset", ["paper", "laptop"])
def test_every_preset_says_what_its_number_depends_on(task: str, preset: str) -> None:
    settings = TASKS[task].presets[preset].settings
    words = TASKS[task].pipeline(settings)
    assert words["tokeniser"] == TASKS[task].tokeniser
    assert words["split"].startswith(settings.split)
    assert ("level" in words) == (task == "pathfinder")
    assert (TASKS[task].presets[preset].data is not None) == (TASKS[task].generate is not None)


def plan(task: str, **changes: Any) -> Plan:
    return Plan(
        task=task,
        preset="laptop",
        settings=dataclasses.replace(TASKS[task].presets["laptop"].settings, **changes),
        directory="",
    )


@pytest.mark.parametrize("task", ["text", "retrieval", "image"])
def test_without_data_the_origin_and_the_tree_are_told(task: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)\(got none\)\. Give --data DIR\. It is .*https://.*<folder>/"):
        data_folder(plan(task))


def test_generated_data_has_the_level_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = TASKS["pathfinder"]
    small = dataclasses.replace(task.presets["laptop"], data=pathfinder.Parameters("curv_baseline", 20))
    monkeypatch.setitem(TASKS, "pathfinder", dataclasses.replace(task, presets={"laptop": small}))
    assert data_folder(plan("pathfinder")) == Path("data/pathfinder-laptop")
    splits, _ = open_data(plan("pathfinder"), progress=False)
    assert [len(split) for split in splits.values()] == [16, 2, 2]
    other = plan("pathfinder", level="curv_contour_length_9")
    open_data(other, progress=False)
    folder = data_folder(other)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"curv_contour_length_9", "prepared"}


def test_command_line_prepares_describes_and_generates(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["prepare", "--task", "text", "--data", str(text), "--prepared", str(tmp_path / "out")]
    main(words)
    shown = capsys.readouterr().out
    assert "text-held-out: written\n" in shown
    assert re.search(r" train: 36 examples, .* labels {'0': 18, '1': 18}, majority class 50.00%\n", shown)
    main(words)
    assert "already there, nothing to do" in capsys.readouterr().out
    main([*words, "--split", "lra"])
    shown = capsys.readouterr().out
    assert "split: lra: LRA's own" in shown
    assert "or --split held-out" in shown
    assert "train: 40 examples" in shown
    make = ["prepare", "--generate", "--task", "pathfinder", "--data", str(tmp_path / "new"), "--images", "20"]
    main([*make, "--level", "curv_contour_length_9"])
    assert (tmp_path / "new" / "curv_contour_length_9" / "imgs" / "0" / "sample_19.png").exists()
    assert "level: curv_contour_length_9" in capsys.readouterr().out
    for again, message in (
        ([*make, "--max-depth", "3"], "Expected 'max-depth' to be left out for pathfinder (got 3)"),
        (
            ["prepare", "--images", "20", "--task", "pathfinder", "--data", str(text)],
            "Expected 'images' to be left out without 'generate'",
        ),
        (
            ["prepare", "--generate", "--task", "text", "--data", str(text)],
            "Expected no 'generate' for text, which nobody can generate",
        ),
        (["prepare", "--task", "image", "--data", str(text)], "data_batch_1"),
        ([*words, "--level", "curv_baseline"], "Expected 'level' of text to be one of none (got 'curv_baseline')"),
    ):
        with pytest.raises(SystemExit):
            main(again)
        assert message in capsys.readouterr().err


def test_prepared_headers_have_room_to_grow(tmp_path: Path) -> None:
    array = preparing._Array(tmp_path / "array.npy", np.uint16)
    array.append(np.arange(70_000) % 300)
    array.append([7])
    array.close()
    assert np.load(tmp_path / "array.npy", mmap_mode="r").tolist() == [*(np.arange(70_000) % 300).tolist(), 7]
