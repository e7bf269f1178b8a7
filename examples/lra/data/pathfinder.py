"""Pathfinder32: images of 32 x 32 pixels, labelled 1 if two discs are joined by a dashed line.

In: parameters and a seed, or a folder in the layout of the Long Range Arena (LRA). Out: that very layout, or rows of token
numbers. Not here: how images are drawn (``snakes.py``), batches and the table of tasks (``tasks.py``).

A token is a pixel's value plus one; 0 is never used, so black is not padding. The files ``metadata/<b>.npy`` are plain text in
spite of their name, one line an image: folder, file, number, label, continuity, paddles of the long and of the short snakes, length,
thickness and margin of a paddle, number of contrasts.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from examples.lra.data import files
from examples.lra.data.batches import Row, Rows
from examples.lra.data.files import Release, checksum, malformed, places

SIDE = 32
#: Paddles of the long snakes.
LEVELS = {"curv_baseline": 6, "curv_contour_length_9": 9, "curv_contour_length_14": 14}
SPLITS = {
    "80-10-10": "of every ten images in the order of the files, eight are for training, the ninth for validation, the tenth for testing"
}
RELEASE = Release(
    name="Pathfinder32",
    folders=places("pathfinder32", "pathfinder"),
    parts=("imgs", "metadata"),
    part="part",
    source="Generate it with 'python -m examples.lra prepare --task pathfinder --generate --data FOLDER'; the original is part of "
    "lra_release.gz (8 GB), see https://github.com/google-research/long-range-arena.",
    picture=f"""\
        curv_contour_length_14/    or one of the easier levels, {" and ".join(list(LEVELS)[:2])}
            imgs/0/sample_0.png    32 x 32 pixels, grey
            metadata/0.npy         plain text, a line for each image of imgs/0""",
    way_out="Copy or generate it again.",
)


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Which images, and how many of them; the defaults are those of LRA.

    Args:
        level: One of ``LEVELS``.
        images: For all splits together; half of them have label 1 (give or take one half).
        per_folder: Images in one folder.

    Raises:
        ValueError: If a parameter is out of its range.
    """

    level: str = "curv_contour_length_14"
    images: int = 200_000
    per_folder: int = 1_000

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(
                f"Expected 'level' to be one of {', '.join(LEVELS)} (got {self.level!r}). Choose one of them."
            )
        for name, least in (("images", 10), ("per_folder", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"Expected '{name}' to be at least {least} (got {getattr(self, name)}). Give a larger number."
                )


def generate(folder: Path, parameters: Parameters, *, seed: int = 0, progress: bool = True) -> bool:
    """Writes a Pathfinder data set in LRA's layout, whole or not at all; see :func:`examples.lra.data.files.generate`.

    An image is a function of level, seed and its number (with the same version of pillow).
    """
    return files.generate(
        folder, "pathfinder", parameters, seed, lambda draft: _write_images(draft, parameters, seed, progress)
    )


def _write_images(folder: Path, parameters: Parameters, seed: int, progress: bool) -> dict[str, dict]:
    from examples.lra.data import snakes  # with numba, which reading need not wait for

    contour = LEVELS[parameters.level]
    facts = f"1.0 {contour} {contour // 3} {snakes.LENGTH} {snakes.THICKNESS} {snakes.MARGIN} 1"
    entries = {}
    with tqdm(total=parameters.images, desc="Generating Pathfinder", unit="image", disable=not progress) as bar:
        for batch, start in enumerate(range(0, parameters.images, parameters.per_folder)):
            images = folder / parameters.level / "imgs" / str(batch)
            metadata = folder / parameters.level / "metadata" / f"{batch}.npy"
            images.mkdir(parents=True)
            metadata.parent.mkdir(exist_ok=True)
            lines = []
            for number in range(min(parameters.per_folder, parameters.images - start)):
                pixels, label = snakes.draw(contour, seed=seed, number=start + number)
                Image.fromarray(pixels).save(images / f"sample_{number}.png")
                lines.append(f"imgs/{batch} sample_{number}.png {number} {label} {facts}\n")
                bar.update()
            with metadata.open("w") as file:
                file.write("".join(lines))
                file.flush()
                os.fsync(file.fileno())
            entries[f"{parameters.level}/metadata/{batch}.npy"] = {"images": len(lines), "sha256": checksum(metadata)}
    return entries


def open_splits(root: Path, *, split: str = "80-10-10", level: str = "curv_contour_length_14") -> dict[str, Rows]:
    """Finds the images of each split.

    Args:
        root: A folder like ``RELEASE``.
        split: Only "80-10-10".
        level: One of ``LEVELS``.

    Raises:
        ValueError: If files are missing, or if metadata is malformed; the message names file and line.
    """
    others = [name for name in LEVELS for place in RELEASE.folders if (root / place / name).is_dir()]
    if others and level not in others:
        raise ValueError(
            f"Expected '{root}' to hold the level {level} (got {', '.join(others)}). Choose one of those with --level, or generate "
            f"this one with: python -m examples.lra prepare --task pathfinder --level {level} --generate --data FOLDER"
        )
    folder = RELEASE.find(root, level)
    listed = [path for path in (folder / "metadata").iterdir() if re.fullmatch(r"\d+\.npy", path.name)]
    metadata = sorted(listed, key=lambda path: int(path.stem))
    if not metadata:
        raise ValueError(
            f"Expected '{folder / 'metadata'}' to hold files 0.npy, 1.npy ... (got none). Copy or generate it again."
        )
    images = [image for path in metadata for image in _read_metadata(path, LEVELS[level])]
    # Folders change when an image comes, goes or is replaced; 200,000 images are too many to look at each of them every time.
    sources = [*metadata, *sorted({path.parent for path, _ in images})]

    def part(places: set[int]) -> Rows:
        chosen = [image for number, image in enumerate(images) if number % 10 in places]
        return Rows(sources, lambda: map(_read_image, chosen))

    return {"train": part(set(range(8))), "val": part({8}), "test": part({9})}


def _read_metadata(path: Path, contour: int) -> Iterator[tuple[Path, int]]:
    """Yields path and label of each image that a file of metadata lists."""
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise malformed(
                path,
                None,
                "be plain text, as LRA released it",
                "an array of numpy",
                "Write it with numpy.savetxt(..., fmt='%s').",
            )
    for line, text in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        fields = text.split()
        if len(fields) != 11:
            raise malformed(path, line, "have eleven fields", len(fields), "Look for a cut or merged line.")
        folder, name, _, label, _, length, *_ = fields
        if not (re.fullmatch(r"imgs/\d+", folder) and re.fullmatch(r"sample_\d+\.png", name)):
            raise malformed(
                path,
                line,
                "start with a folder imgs/NUMBER and a file sample_NUMBER.png",
                repr(text[:80]),
                "Copy it again.",
            )
        if label not in ("0", "1"):
            raise malformed(
                path, line, "have the label 0 or 1 in its fourth field", repr(label[:80]), "Look for damaged fields."
            )
        if length != str(contour):
            raise malformed(
                path,
                line,
                f"have {contour}, the length of this level, in its sixth field",
                repr(length[:80]),
                "Is this another level?",
            )
        yield path.parents[1] / folder / name, int(label)


def _read_image(image: tuple[Path, int]) -> Row | None:
    """Reads one image; None if its file is empty, as one of the release is."""
    path, label = image
    if not path.is_file():
        raise malformed(path, None, "be an image, as metadata says", "no such file", "Copy or generate the data again.")
    if path.stat().st_size == 0:
        return None
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            pixels = np.asarray(picture)
    except (OSError, SyntaxError, ValueError) as error:
        raise malformed(path, None, "be an image in PNG", error, "Copy or generate the data again.") from None
    if pixels.shape != (SIDE, SIDE) or pixels.dtype != np.uint8:
        got = f"{' x '.join(map(str, pixels.shape))}, {pixels.dtype}"
        raise malformed(
            path, None, f"have {SIDE} x {SIDE} grey pixels, uint8", got, "Is this Pathfinder128 or another task?"
        )
    return pixels.reshape(-1).astype(np.uint16) + 1, label
