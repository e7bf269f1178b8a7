"""The model of a task: where positions start, and what edges cost."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.lra import cost
from examples.lra.__main__ import main
from examples.lra.data.tasks import TASKS
from examples.lra.model import Classifier, grid_positions, smooth_values
from examples.lra.settings import PRESETS, Settings, parse, resolve


def settings(task: str = "pathfinder", **changes: Any) -> Settings:
    small: dict[str, Any] = {"layers": 1, "channels": 16, "head_channels": 8, "ffn_channels": 16, "num_clusters": 4}
    return dataclasses.replace(PRESETS[task]["laptop"].settings, **small, **changes)


def test_positions_on_a_grid_know_displacements_and_nothing_else() -> None:
    grid = grid_positions(8, 16).double().unflatten(0, (8, 8))
    assert grid.square().mean(2) == pytest.approx(torch.ones(8, 8), abs=1e-6)
    products = torch.einsum("yxc,vuc->yxvu", grid, grid)
    assert products[1, 2, 3, 5] == pytest.approx(products[4, 2, 6, 5])  # two rows down, three columns right
    assert products[0, 0, 0, 1] == pytest.approx(products[5, 3, 5, 4])
    assert products[0, 0, 0, 1] == pytest.approx(products[0, 0, 1, 0])
    distances = torch.cdist(grid.flatten(0, 1), grid.flatten(0, 1)).fill_diagonal_(torch.inf)
    assert distances.min() > 0.1  # no two pixels share a place
    assert products[0, 0, 0, 1] > products[0, 0, 0, 2] > products[0, 0, 0, 7]
    assert grid[0, 4, :8] == pytest.approx(grid[0, 0, :8])  # one half is the row
    assert grid[4, 0, 8:] == pytest.approx(grid[0, 0, 8:])  # the other one the column


def test_channels_of_a_grid_come_in_fours() -> None:
    with pytest.raises(ValueError, match=r"Expected 'channels' to be a multiple of 4 .* \(got 6\)"):
        grid_positions(8, 6)


def test_positions_start_on_the_grid_and_are_learned() -> None:
    torch.manual_seed(0)
    classifier = Classifier(TASKS["pathfinder"], settings(max_length=1030))
    position = classifier.model.encoder.position.weight
    assert torch.equal(position[:1024].detach(), grid_positions(32, 16))
    assert position[1024:].std().item() == pytest.approx(1, abs=0.3)  # beyond the image: at random
    assert any(position is parameter for parameter in classifier.parameters())
    other = Classifier(TASKS["pathfinder"], settings(positions="random")).model.encoder.position.weight
    assert not torch.equal(other.detach(), grid_positions(32, 16))


@pytest.mark.parametrize("task", ["image", "pathfinder"])
def test_images_longer_than_sequences_are_refused_before_anything_is_written(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(
            ["train", "--task", task, "--data", str(tmp_path), "--output", str(tmp_path / "run"), "--max-length", "512"]
        )
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert (
        f"Expected 'max-length' to be at least the 1,024 pixels of an image of {task} (got 512). Raise --max-length."
        in said
    )
    assert not (tmp_path / "run").exists()


def test_short_sequences_are_measured_on_the_first_rows_of_the_grid() -> None:
    small = {name: getattr(settings(), name) for name in ("layers", "channels", "head_channels", "ffn_channels")}
    method = "full:" + ",".join(f"{name.replace('_', '-')}={value}" for name, value in small.items())
    row = cost.measure(TASKS["pathfinder"], method, "laptop", 96, 1, 1)
    assert (row["length"], row["density"]) == (96, None)
    position = Classifier(TASKS["pathfinder"], settings(max_length=96)).model.encoder.position.weight
    assert torch.equal(position.detach(), grid_positions(32, 16)[:96])


def test_like_values_start_alike() -> None:
    values = smooth_values(256, 16)
    assert values.square().mean(1) == pytest.approx(torch.ones(256), abs=1e-5)
    likeness = values @ values.T
    assert likeness.diagonal(1) == pytest.approx(
        torch.full((255,), likeness[0, 1].item()), rel=1e-4
    )  # steps are equal everywhere
    assert likeness[100, 101] > likeness[100, 110] > likeness[100, 150]
    with pytest.raises(ValueError, match=r"Expected 'channels' to be even .* \(got 7\)"):
        smooth_values(256, 7)
    token = Classifier(TASKS["image"], settings("image")).model.encoder.token.weight.detach()
    assert torch.equal(token[1:], values)
    token = Classifier(TASKS["image"], settings("image", values="random")).model.encoder.token.weight.detach()
    assert not torch.equal(token[1:], values)


@pytest.mark.parametrize(("mask_dark", "compat", "highest"), [(-1, "none", None), (0, "none", 1), (-1, "nystromformer", 1), (8, "nystromformer", 9)])  # fmt: skip
def test_pixels_are_masked_up_to_a_value(mask_dark: int, compat: str, highest: int | None) -> None:
    chosen = settings(mask_dark=mask_dark, compat=compat)
    assert TASKS["pathfinder"].masked(chosen) == highest
    words = TASKS["pathfinder"].pipeline(chosen)
    assert words.get("mask") == (
        None if highest is None else f"pixels up to {highest - 1} of 255 left out, the others in their places"
    )


def test_edges_cost_as_in_the_paper_or_from_a_floor_on() -> None:
    tokens = torch.randint(1, 257, (40,), generator=torch.Generator().manual_seed(0))
    for weight, floor in [(0.0, 0.0), (0.5, 0.0), (0.5, 0.2)]:
        made = Classifier(TASKS["pathfinder"], settings(density_weight=weight, density_floor=floor))
        _, trace = made.model(tokens, torch.tensor([0, 15, 40]), seed=0, return_trace=True)
        excess = (trace.expected_density.detach() - floor).clamp(min=0)
        assert excess.max() > 0
        price = torch.as_tensor(made.price(trace)).detach()
        assert float(price) == pytest.approx(weight * excess.mean().item())


@pytest.mark.parametrize(
    ("words", "price"),
    [
        ([], 0.5), (["--attention", "full"], 0.0), (["--attention", "linear"], 0.0), (["--density-weight", "1"], 1.0),
        (["--target-density", "0.1"], 0.0),
    ],
)  # fmt: skip
def test_only_sampled_graphs_pay_what_a_preset_asks(words: list[str], price: float, tmp_path: Path) -> None:
    given = parse(["--task", "image", "--output", str(tmp_path / "run"), *words])
    assert resolve(given)[1].settings.density_weight == price
