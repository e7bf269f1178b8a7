"""Readers of the releases, the Pathfinder generator, and prepared data with its faults."""

import dataclasses
import errno
import hashlib
import json
import os
import pickle
import re
import signal
import sys
import tarfile
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image
from problems import in_a_fork
from scipy import ndimage

from examples.lra.__main__ import main
from examples.lra.data import files, pathfinder, readers, snakes
from examples.lra.data.batches import Split
from examples.lra.data.prepare import load, prepare, splits_digest
from examples.lra.data.tasks import TASKS, data_folder, open_data
from examples.lra.settings import PRESETS, Plan

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
    for name in readers.IMAGE.parts:
        images = rng.integers(0, 256, (8, 3072), dtype=np.uint8)
        content = {b"batch_label": b"batch", b"labels": [*range(8)], b"data": images, b"filenames": [b"a.png"] * 8}
        (folder / name).write_bytes(pickle.dumps(content, protocol=4))


def make_pathfinder(folder: Path) -> None:
    pathfinder.generate(folder, pathfinder.Parameters("curv_baseline", 40, per_folder=25), seed=1, progress=False)


MAKE: dict[str, tuple[Callable[[Path], None], str]] = {
    "text": (make_text, "aclImdb"), "retrieval": (make_retrieval, "tsv_data"), "image": (make_image, "cifar-10-batches-py"),
    "pathfinder": (make_pathfinder, "pathfinder32"),
}  # fmt: skip
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


@pytest.mark.parametrize("task", TASKS)
def test_a_wrong_folder_is_told_what_it_should_hold_and_where_that_comes_from(task: str, tmp_path: Path) -> None:
    release = TASKS[task].release
    words = rf"{re.escape(release.source)} Its folder, the one given or {release.folders[0]} .*holds {release.parts[0]}"
    with pytest.raises(ValueError, match=rf"to hold {release.name}.* \(got no such folder\)\. {words}"):
        prepare(TASKS[task], tmp_path / "nowhere")
    with pytest.raises(ValueError, match=rf"\(got other files\)\. {words}"):
        prepare(TASKS[task], tmp_path)
    (tmp_path / release.parts[0]).mkdir(parents=True)
    options = {"level": "curv_baseline"} if task == "pathfinder" else {}
    with pytest.raises(ValueError, match=rf"to hold all of {release.name} \(got no {release.parts[1]}"):
        prepare(TASKS[task], tmp_path, options=options)


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
        (b"1.0\ta\tb\ttext", r"eval\.tsv:2' to have 5 columns \(got 4\)"),
        (b"a\t1.0\tb\tone\ttwo", r"eval\.tsv:2' to have a label from 0 to 1 in column 1 \(got b'a'\)"),
        (b"2\ta\tb\tone\ttwo", r"eval\.tsv:2' to have a label .*\(got b'2'\)"),
        (b"nan\ta\tb\tone\ttwo", r"eval\.tsv:2' to have a label .*\(got b'nan'\)"),
        (b"1\ta\tb\t\ttwo", r"eval\.tsv:2' to hold two texts \(got an empty one\)"),
    ],
)
def test_retrieval_names_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    make_retrieval(tmp_path)
    (tmp_path / "new_aan_pairs.eval.tsv").write_bytes(b"1.0\ta\tb\tone \x0b\x85 \xff\ttwo\r\n" + line + b"\r\n")
    with pytest.raises(ValueError, match=message):
        prepare(TASKS["retrieval"], tmp_path)


# Image


def test_image_is_gray_as_tensorflow_computes_it(tmp_path: Path) -> None:
    make_image(tmp_path)
    splits = load(TASKS["image"], tmp_path, max_length=1024)
    assert splits["train"].labels.tolist() == [*range(8)] * 4 + [0, 1, 2, 3]
    assert splits["val"].labels.tolist() == [4, 5, 6, 7]
    colors, _ = readers.read_batch(tmp_path / "data_batch_5")
    red, green, blue = colors[4].reshape(3, 1024).astype(float)
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
            match=r"data_batch_1' to be a pickle of arrays and nothing else, .* \(got it asks for (posix|nt|builtins|numpy)\.",
        ):
            prepare(TASKS["image"], tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        pickle.dumps({b"data": 1})[:-5],
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": [0]}),
        pickle.dumps({b"data": np.zeros((2, 3072)), b"labels": [1, 1]}, 4),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, 4),
        pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": [1]}, 4),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 10]}, 4),
        b"\x80\x02}r\xff\xff\xff\x01.",  # number 2**25 - 1 of the memo, an array of so many pointers in C
        b"\x80\x02}\xfe.",
    ],
)
def test_image_refuses_other_contents(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "batch").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"batch' to be a pickle of arrays and nothing else, .* \(got .+\)\. Copy"):
        readers.read_batch(tmp_path / "batch")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**25


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


def test_labels_are_independent_from_image_to_image() -> None:
    labels = np.array([snakes.draw(6, seed=0, number=number)[1] for number in range(0, 4000, 2)])
    assert abs(labels.mean() - 0.5) < 5 * 0.5 / 2000**0.5
    assert abs(np.mean(labels[1:] == labels[:-1]) - 0.5) < 5 * 0.5 / 2000**0.5


DRAWN = {  # sha256 of 100 images and their labels, seed 7
    6: "22558b11f46d0e28257ba42e01f585bef42c2d3710211d36ab5ce600e4fcff92",
    9: "c948ea458fdbb47c277c3cf48bb1fb0877912fba5ea149121dd16612ad5d378b",
    14: "1030813d532610a7a8a93ba8971459896f6ebef52f03b2a9f88771a5e361728d",
}


@pytest.mark.parametrize("contour", DRAWN)
def test_images_are_those_of_every_version(contour: int) -> None:
    """A data set that is generated again is the same, bit for bit, and its images differ from each other."""
    images = {number: snakes.draw(contour, seed=7, number=number) for number in reversed(range(100))}
    content = b"".join(images[number][0].tobytes() + bytes([images[number][1]]) for number in range(100))
    assert hashlib.sha256(content).hexdigest() == DRAWN[contour]
    assert len({image.tobytes() for image, _ in images.values()}) == 100
    assert len({snakes.draw(contour, seed=seed, number=0)[0].tobytes() for seed in range(12)}) == 12
    assert sum(label for _, label in images.values()) == 50


def test_what_is_wrong_in_a_folder_of_pathfinder_is_named(tmp_path: Path) -> None:
    make_pathfinder(tmp_path)
    level = tmp_path / "curv_baseline"
    with pytest.raises(ValueError, match=r"to hold Pathfinder32, level curv_contour_length_14 \(got other files\)"):
        prepare(TASKS["pathfinder"], tmp_path)
    Image.new("RGB", (128, 128)).save(level / "imgs/0/sample_3.png")
    with pytest.raises(ValueError, match=r"to have 32 x 32 gray pixels, uint8 \(got \[128, 128, 3\], uint8\)"):
        prepare(TASKS["pathfinder"], tmp_path, options=LEVEL)
    (level / "imgs/0/sample_3.png").unlink()
    with pytest.raises(ValueError, match=r"^Expected '.*sample_3\.png' to be an image in PNG \(got .*No such file"):
        prepare(TASKS["pathfinder"], tmp_path, options=LEVEL)
    (level / "metadata" / "1.npy").write_text("imgs/1 sample_0.png 0 2 1.0 6 2 2 0.5 1 1\n")
    with pytest.raises(ValueError, match=r"metadata/1\.npy:1' to have a label from 0 to 1 in column 4 \(got b'2'\)"):
        prepare(TASKS["pathfinder"], tmp_path, options=LEVEL)


@pytest.mark.parametrize("kept", [40, 150, -1])
def test_a_damaged_image_of_pathfinder_is_named(kept: int, tmp_path: Path) -> None:
    pathfinder.generate(tmp_path, pathfinder.Parameters(level="curv_baseline", images=10), progress=False)
    path = tmp_path / "curv_baseline/imgs/0/sample_3.png"
    content = path.read_bytes()
    path.write_bytes(content[:kept] if kept > 0 else content[:60] + bytes(9) + content[69:])
    with pytest.raises(
        ValueError, match=r"^Expected '.*sample_3\.png' to be an image in PNG \(got .*generate it again"
    ):
        prepare(TASKS["pathfinder"], tmp_path, options={"level": "curv_baseline"})


@pytest.mark.parametrize(("task", "name"), [("text", "train/neg/1_3"), ("pathfinder", "curv_baseline/metadata/0")])
def test_a_file_that_a_file_manager_copied_is_named(task: str, name: str, tmp_path: Path) -> None:
    options = {}
    if task == "text":
        make_text(tmp_path / "aclImdb")
        name = f"aclImdb/{name}"
    else:
        options = {"level": "curv_baseline"}
        pathfinder.generate(tmp_path, pathfinder.Parameters(level="curv_baseline", images=10), progress=False)
    kind = ".txt" if task == "text" else ".npy"
    (tmp_path / f"{name} (copy){kind}").write_bytes(b"a film")
    with pytest.raises(ValueError, match=r"^Expected '.* \(copy\)\.[a-z]*' to have numbers alone in its name"):
        prepare(TASKS[task], tmp_path, options=options)


def test_an_empty_image_is_left_out_and_counted(tmp_path: Path) -> None:
    make_pathfinder(tmp_path)
    (tmp_path / "curv_baseline/imgs/0/sample_8.png").write_bytes(b"")  # the first of the validation split
    splits = load(TASKS["pathfinder"], tmp_path, max_length=1024, options=LEVEL)
    assert len(splits["val"]) == 3
    manifest = json.loads((tmp_path / "prepared/pathfinder-80-10-10-curv_baseline/manifest.json").read_text())
    assert {name: entry["skipped"] for name, entry in manifest["splits"].items()} == {"train": 0, "val": 1, "test": 0}
    with Image.open(tmp_path / "curv_baseline/imgs/0/sample_9.png") as image:  # the first of the test split
        assert sequences(splits["test"])[0] == image.tobytes()


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
        ("retrieval", "retrieval", readers.RETRIEVAL.parts, [360, 60, 60]),
        ("image", "cifar10", [f"cifar-10-batches-py/{name}" for name in readers.IMAGE.parts], [900, 100, 300]),
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


def test_the_manifest_says_how_arrays_were_made_and_hashes_them(text: Path) -> None:
    folder, _ = prepare(TASKS["text"], text)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["options"] == {"split": "held-out"}
    for name, sha256 in manifest["splits"]["val"]["sha256"].items():
        assert sha256 == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert {"val_tokens.bin", "val_ptr.npy", "val_labels.npy"} == set(manifest["splits"]["val"]["sha256"])


def test_the_length_is_chosen_when_arrays_are_mapped(text: Path) -> None:
    long, short = (load(TASKS["text"], text, max_length=length)["train"] for length in (100, 5))
    assert long.truncated == 0
    assert short.truncated == 36
    assert (short.lengths == 5).all()
    assert short.digest == long.digest
    assert splits_digest({"train": short}) != splits_digest({"train": long})


@pytest.mark.parametrize("array", ["train_tokens.bin", "val_ptr.npy", "test_labels.npy"])
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
        ValueError,
        match=r"to be a place for prepared data \(got: .*Read-only .*choose another place with .*--prepared DIR",
    ):
        prepare(TASKS["text"], text, prepared=above / "other")


def test_a_folder_that_is_not_ours_is_never_replaced(text: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "text-held-out").mkdir(parents=True)
    (tmp_path / "out" / "text-held-out" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"to be the manifest of prepared data \(got no such file\)"):
        prepare(TASKS["text"], text, prepared=tmp_path / "out")
    assert (tmp_path / "out" / "text-held-out" / "thesis.tex").exists()
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"to be a place for prepared data.*or choose another place with .*--prepared DIR"
    ):
        prepare(TASKS["text"], text, prepared=tmp_path / "file")


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
    settings = PRESETS[task]["paper"].settings
    found = (settings.max_length, settings.batch_size, settings.learning_rate, settings.steps, TASKS[task].num_classes)
    assert found == TABLE_7[task]
    assert (settings.layers, settings.heads, settings.channels, settings.ffn_channels, settings.head_channels) == (
        2, 2, 64, 128, 32,
    )  # fmt: skip
    assert (settings.dropout, settings.attention_dropout, settings.num_clusters, settings.weight_decay) == (
        0.1, 0.1, 128, 0.0,
    )  # fmt: skip


def plan(task: str, **changes: Any) -> Plan:
    return Plan(
        task=task, preset="laptop", settings=dataclasses.replace(PRESETS[task]["laptop"].settings, **changes),
        directory="",
    )  # fmt: skip


def test_generated_data_has_the_level_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    presets = PRESETS["pathfinder"]
    small = dataclasses.replace(presets["laptop"], data=pathfinder.Parameters("curv_baseline", 20))
    monkeypatch.setitem(presets, "laptop", small)
    assert data_folder(plan("pathfinder")) == Path("data/pathfinder-laptop")
    splits, _ = open_data(plan("pathfinder"))
    assert [len(split) for split in splits.values()] == [16, 2, 2]
    other = plan("pathfinder", level="curv_contour_length_9")
    open_data(other)
    folder = data_folder(other)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"curv_contour_length_9", "prepared"}


def test_command_line_prepares_describes_and_generates(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["prepare", "--task", "text", "--data", str(text), "--prepared", str(tmp_path / "out")]
    main(words)
    shown = capsys.readouterr().out
    assert "text-held-out: written\n" in shown
    assert re.search(r" train: 36 examples, .* labels \[18, 18\], majority class 50.00%\n", shown)
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
        ([*make, "--max-depth", "3"], "Expected 'max-depth' to be left out (got 3)"),
        (
            ["prepare", "--images", "20", "--task", "pathfinder", "--data", str(text)],
            "Expected 'images' to be left out (got 20)",
        ),
        (["prepare", "--generate", "--task", "text", "--data", str(text)], "Expected no 'generate' for text (got it)"),
        (["prepare", "--task", "image", "--data", str(text)], "data_batch_1"),
        ([*words, "--level", "curv_baseline"], "Expected 'level' to be left out (got curv_baseline)"),
    ):
        with pytest.raises(SystemExit):
            main(again)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("moment", [2, 10, 11])
def test_a_kill_while_old_arrays_are_replaced_leaves_nothing_half_done(text: Path, moment: int) -> None:
    """In the midst of writing, before the old arrays are moved, and before the new ones get their name."""
    folder, _ = prepare(TASKS["text"], text)
    (text / "train" / "pos" / "3_9.txt").write_bytes(b"another text, so another length and time")
    calls = []

    def watched(name: str, done: Callable[..., Any]) -> Callable[..., Any]:
        def act(path: Any, *rest: Any, **options: Any) -> Any:
            if (Path(path) / "manifest.json").exists() or name == "checksum":
                calls.append(name)
                if len(calls) == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
            return done(path, *rest, **options)

        return act

    def killed() -> None:
        module = sys.modules["examples.lra.data.prepare"]
        with (
            patch.object(os, "replace", watched("replace", os.replace)),
            patch.object(module, "checksum", watched("checksum", module.checksum)),
        ):
            prepare(TASKS["text"], text)
        raise AssertionError("it was not killed")

    assert in_a_fork(killed) == ""
    assert prepare(TASKS["text"], text) == (folder, True)
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f".{folder.name}.lock"}
    assert b"another text, so another length and time" in sequences(load(TASKS["text"], text, max_length=100)["train"])
