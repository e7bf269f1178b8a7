"""Pathfinder32 generated: images of 32 x 32 pixels, labeled 1 if two discs are joined by a dashed line, in the layout of LRA."""

import dataclasses
from pathlib import Path
from typing import Any

from PIL import Image

from examples.common.command import require
from examples.lra.data.files import make_folder

SIDE = 32
#: Paddles of the long snakes.
LEVELS = {"curv_baseline": 6, "curv_contour_length_9": 9, "curv_contour_length_14": 14}


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Which images, and how many of them, at least 10 and half of them with label 1; the defaults are those of LRA."""

    level: str = "curv_contour_length_14"
    images: int = 200_000
    per_folder: int = 1_000

    def __post_init__(self) -> None:
        require(self.level in LEVELS, f"'level' to be one of {', '.join(LEVELS)}", repr(self.level), "Choose one.")
        for name, least in (("images", 10), ("per_folder", 1)):
            value = getattr(self, name)
            require(value >= least, f"'{name}' to be at least {least}", value, "Give a larger number.")


def generate(folder: Path, parameters: Parameters, *, seed: int = 0, progress: bool = True) -> bool:
    """Writes a Pathfinder data set in LRA's layout, whole or not at all; see :func:`examples.lra.data.files.make_folder`.

    An image is a function of level, seed and its number (with the same version of pillow). Returns False if the data set is there.
    """
    recipe = {"task": "pathfinder", "seed": seed, "parameters": dataclasses.asdict(parameters)}

    def write(draft: Path) -> dict[str, Any]:
        from examples.lra.data import snakes  # with numba, which reading need not wait for
        from sbm_pyg.progress import tqdm  # comes with torch, for which --help does not wait

        contour, level = LEVELS[parameters.level], draft / parameters.level
        facts = f"1.0 {contour} {contour // 3} {snakes.LENGTH} {snakes.THICKNESS} {snakes.MARGIN} 1"
        (level / "metadata").mkdir(parents=True)
        for number in tqdm(range(parameters.images), "Generating Pathfinder", unit=" images", disable=not progress):
            batch, place = divmod(number, parameters.per_folder)
            images = level / "imgs" / str(batch)
            images.mkdir(parents=True, exist_ok=True)
            pixels, label = snakes.draw(contour, seed=seed, number=number)
            Image.fromarray(pixels).save(images / f"sample_{place}.png")
            with (level / "metadata" / f"{batch}.npy").open("a") as file:
                file.write(f"imgs/{batch} sample_{place}.png {place} {label} {facts}\n")
        return {}

    return make_folder(folder, "generated data", recipe, write, replace=False)
