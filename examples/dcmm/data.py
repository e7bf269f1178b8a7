"""Images of some classes: digits of scikit-learn, CIFAR-10, or folders; with labels, for training, validation and test."""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn.functional import interpolate

from examples.common.command import require
from examples.common.releases import IMAGE, read_batch
from sbm_pyg.progress import tqdm

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ENDINGS = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
LEAST = 3  # images of a class: one for each split


@dataclasses.dataclass(frozen=True)
class Images:
    """Images ``[N, channels, size, size]`` uint8, and their labels ``[N]``; last those of the test."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]


def split(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of the images to learn from, and of a share that is held out; classes have the same share of both."""
    sizes, held_out = torch.bincount(labels), round(share * len(labels))
    least = int(sizes.min())
    require(least >= LEAST, f"'data' with at least {LEAST} images of each class", least, "Add some.")
    words = f"'validation' to hold out an image or more of each of {len(sizes)} classes and to leave as many"
    enough = len(sizes) <= held_out <= len(labels) - len(sizes)
    require(enough, words, f"{share} of {len(labels)}", "Take 0.15, or give more images.")
    parts = train_test_split(np.arange(len(labels)), test_size=share, stratify=labels.numpy(), random_state=seed)
    train_places, held_out_places = (torch.from_numpy(part).sort().values for part in parts)
    return train_places, held_out_places


def load(data: str, size: int | None = None) -> Images:
    """The images that "digits" or a folder stands for; a ``size`` in pixels resizes them (images in folders: 64 unless given).

    A folder is that of CIFAR-10 as it is unpacked, or ``train/CLASS/*.png`` and ``test/CLASS/*.png``, or ``CLASS/*.png``. A split ``val``
    is joined to ``train``. Where there is no test set, a sixth of each class is held out for it, always the same images.
    """
    folder = Path(data)
    if data == "digits":
        digits = load_digits()
        images = torch.from_numpy((digits.images * 255 / 16).round().astype(np.uint8))[:, None]
        data_set = _held_out(images, torch.from_numpy(digits.target).long(), tuple("0123456789"))
    elif not folder.is_dir():
        raise ValueError(f"Expected 'data' to be 'digits' or a folder of images (got {data!r}). See --help.")
    elif any((place / IMAGE.parts[0]).exists() for place in (folder, *(folder / name for name in IMAGE.folders))):
        root = IMAGE.find(folder)
        parts = [read_batch(root / part) for part in IMAGE.parts]
        pixels = [torch.from_numpy(images.reshape(-1, 3, 32, 32)) for images, _ in parts]
        labels = [torch.from_numpy(labels) for _, labels in parts]
        data_set = Images(torch.cat(pixels[:-1]), torch.cat(labels[:-1]), pixels[-1], labels[-1], CIFAR)
    else:
        data_set = _read(folder, size or 64)
    if size in (None, data_set.train.size(-1)):
        return data_set
    sized = [interpolate(x.float(), size, mode="bilinear", antialias=True) for x in (data_set.train, data_set.test)]
    train, test = (x.round().clamp(0, 255).byte() for x in sized)
    return dataclasses.replace(data_set, train=train, test=test)


def _held_out(images: Tensor, labels: Tensor, classes: tuple[str, ...]) -> Images:
    train_places, held_out_places = split(labels, 1 / 6, 0)
    return Images(images[train_places], labels[train_places], images[held_out_places], labels[held_out_places], classes)


def _read(folder: Path, size: int) -> Images:
    """Images of all classes, RGB, resized to a square."""
    roots = [folder / part for part in ("train", "val", "test")] if (folder / "train").is_dir() else [folder]
    paths = [path for root in roots for path in sorted(root.glob("*/*")) if path.suffix.lower() in ENDINGS]
    tested = torch.tensor([path.parent.parent in roots[2:] for path in paths], dtype=torch.bool)
    classes = sorted({path.parent.name for path in paths if path.parent.parent not in roots[2:]})
    got = f"{len(classes)} in {roots[0]}"
    require(len(classes) >= 2, "'data' with images of two classes or more", got, "See --help.")
    unknown = sorted({path.parent.name for path in paths} - {*classes})
    words = "'data' to have the classes of test in train"
    require(not unknown, words, f"{unknown} in test alone", "Add them, or remove them from test.")
    images = torch.empty(len(paths), 3, size, size, dtype=torch.uint8)
    for number, path in enumerate(tqdm(paths, f"Reading {folder}", unit=" images")):
        try:
            with Image.open(path) as image:
                small = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
        except (OSError, SyntaxError, ValueError) as error:  # the last two of damaged chunks
            raise ValueError(f"Expected {path} to be an image (got {error}). Copy it again, or delete it.") from None
        images[number] = torch.from_numpy(np.array(small)).permute(2, 0, 1)
    labels = torch.tensor([classes.index(path.parent.name) for path in paths])
    if not tested.any():
        return _held_out(images, labels, tuple(classes))
    return Images(images[~tested], labels[~tested], images[tested], labels[tested], tuple(classes))
