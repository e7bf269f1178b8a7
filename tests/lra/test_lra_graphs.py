"""The report on a trained model's graphs, from the folder of a run."""

import base64
import dataclasses
import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch

from examples.common.runs import read_checkpoint, write_checkpoint
from examples.lra import graphs, train
from examples.lra.__main__ import main
from examples.lra.data import listops
from examples.lra.data.batches import Split
from examples.lra.data.prepare import splits_digest
from examples.lra.data.tasks import TASKS
from examples.lra.model import Classifier
from examples.lra.settings import PRESETS, Plan, parse
from sbm_pyg import analysis
from sbm_pyg.analysis import plots

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # Lightning's own


@pytest.fixture(scope="module")
def run(untrained: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model, its data and a log."""
    data = tmp_path_factory.mktemp("data") / "listops"
    law = {"max_depth": 2, "max_args": 30, "min_length": 8, "max_length": 24, "operator_probability": 1.0}
    listops.generate(data, listops.Parameters(train=20, val=30, test=20, **law), progress=False)  # type: ignore[arg-type]
    folder = untrained(tmp_path_factory.mktemp("runs") / "untrained", data, seed=3)
    names = [f"density_layer{layer}_head{head}" for layer in range(2) for head in range(2)]
    (folder / "train.csv").write_text(
        "\n".join([",".join(["step", *names]), "10,0.2,0.3,0.2,0.3", "20,0.1,0.3,0.2,0.4"])
    )
    return folder


@pytest.mark.slow
def test_report_has_figures_and_tables(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_rng_state()
    path = main(["graphs", "--run", str(run), "--examples", "12", "--structure", "1"])
    assert torch.equal(torch.get_rng_state(), before)
    assert path == run / "graphs.html"
    assert f"Wrote {path}" in capsys.readouterr().out
    page = path.read_text()
    pictures = re.findall(r'<img alt="([^"]+)" src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 3 + 2 * 4  # densities, training, inputs; a mask and its blocks for each layer and head
    for caption, code in pictures:
        assert len(caption) > 60
        assert matplotlib.image.imread(io.BytesIO(base64.b64decode(code))).shape[0] > 200
    for words in (
        "12 of 30 examples of val",
        "mean density",
        "spectral gap",
        "stack, sampled, self-loops added",
        "Universality of 2 patterns",
        "s finite",
    ):
        assert words in page
    assert "http" not in page  # it needs no other file
    assert not list(run.glob("*.partial"))


def test_the_report_on_graphs_of_blocks_counts_tokens(
    run: Path, tmp_path: Path, untrained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = untrained(tmp_path / "blocks", Path(str(Plan.read(run / "settings.json").data)), seed=3, block_size=4)
    seen: list[int] = []
    universality = analysis.universality

    def watched(*given: Any, **options: Any) -> analysis.Universality:
        report = universality(*given, **options)
        seen.append(report.num_tokens)
        return report

    monkeypatch.setattr(analysis, "universality", watched)
    page = main(["graphs", "--run", str(folder), "--examples", "12", "--structure", "1"]).read_text()
    assert "stack, expected" in page
    assert len({*seen}) == 1
    assert seen[0] >= 8  # no list is shorter, and none has more than six blocks
    _, module, splits = train.open_run(folder)
    train.draw_masks(folder, module, splits["test"])
    assert len([*folder.glob("mask-layer*.png")]) == 4


def test_graphs_are_those_of_the_trainer(run: Path) -> None:
    _, module, splits = train.open_run(run)
    done = graphs.evaluate(module, splits["test"], torch.arange(20).numpy())
    module.validation_step(splits["test"].__getitems__(list(range(20))), 0)
    row = module.finish_row()
    assert float(row["accuracy"]) == float((done.guesses == done.labels).mean())
    assert done.loss == pytest.approx(row["loss"], abs=1e-5)
    for layer in range(2):
        for head in range(2):
            assert float(done.density[layer, :, head].mean()) == pytest.approx(row[f"density_layer{layer}_head{head}"])


def test_places_are_those_of_the_directory_where_the_run_was_started(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    plan = Plan.read(run / "settings.json")
    data = Path(str(plan.data))
    dataclasses.replace(plan, data=data.name, directory=str(data.parent)).write(moved / "settings.json")
    monkeypatch.chdir(tmp_path)
    assert train.open_run(moved)[0].place("data") == data


def test_generated_data_are_those_of_the_directory_where_the_run_was_started(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, began = tmp_path / "moved", tmp_path / "began"
    shutil.copytree(run, moved)
    plan = Plan.read(run / "settings.json")
    shutil.copytree(str(plan.data), began / "data" / "listops-laptop")
    settings = dataclasses.replace(plan.settings, batch_size=8)
    dataclasses.replace(plan, data=None, directory=str(began), settings=settings).write(moved / "settings.json")
    state = read_checkpoint(moved / "best.ckpt")
    state["run"] = dataclasses.asdict(settings)
    write_checkpoint(moved / "best.ckpt", state)
    asked: list[Path] = []

    def generate(folder: Path, *rest: object, **options: object) -> bool:
        asked.append(folder)
        return False

    monkeypatch.setitem(TASKS, "listops", dataclasses.replace(TASKS["listops"], generate=generate))
    monkeypatch.chdir(tmp_path)
    train.open_run(moved)
    given = parse(["--output", str(moved), "--resume"])
    train.prepare(given)
    shutil.rmtree(began)  # as on another machine
    with pytest.raises(ValueError, match="Expected 'data/listops-laptop' to hold ListOps"):
        train.open_run(moved)
    assert asked == [began / "data" / "listops-laptop"] * 2 + [Path("data/listops-laptop")]


@pytest.mark.parametrize(("masked", "drawn"), [(None, ["plot_pixel_attention"]), (9, ["plot_inputs"])])
def test_pixels_are_drawn_where_they_are_unless_some_are_masked(
    masked: int | None, drawn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TASKS["pathfinder"]
    small: dict[str, Any] = {
        "layers": 1,
        "channels": 16,
        "head_channels": 8,
        "ffn_channels": 16,
        "num_clusters": 4,
        "initial_density": 0.01,
    }
    module = Classifier(task, dataclasses.replace(PRESETS[task.name]["laptop"].settings, **small)).eval()
    tokens = np.ones((2, 1024), np.int64)  # black
    tokens[0, :225] = tokens[1, :300] = 200  # of the first image, as many bright ones as a smaller square has
    split = Split(tokens.ravel(), np.array([0, 1024, 2048]), np.array([0, 1]), max_length=1024, masked=masked)
    density = torch.tensor([0.1, 0.2], dtype=torch.float64)[None, :, None].expand(1, 2, 2)
    done = graphs.Evaluated(np.arange(2), split.lengths, split.labels, split.labels, 1.0, density)
    called: list[str] = []

    def watch(name: str, original: Callable[..., Any]) -> None:
        def watched(*arguments: Any, **options: Any) -> Any:
            called.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(plots, name, watched)

    monkeypatch.setattr(graphs, "picture", lambda figure: "")
    for name in ("plot_mask", "plot_communities"):
        monkeypatch.setattr(plots, name, lambda *arguments, **options: None)
    for name in ("plot_pixel_attention", "plot_inputs"):
        watch(name, getattr(plots, name))
    [*graphs.inputs(task, module, split, done)]
    assert called == drawn


def test_errors(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "evaluate", None)  # all are told before
    full = tmp_path / "full"
    full.mkdir()
    plan = Plan.read(run / "settings.json")
    settings = dataclasses.replace(plan.settings, attention="full")
    dataclasses.replace(plan, settings=settings).write(full / "settings.json")
    (full / "best.ckpt").write_bytes((run / "best.ckpt").read_bytes())
    monkeypatch.setattr(train, "load_best", lambda *arguments: None)
    for options, words in (
        ([str(tmp_path)], "Expected 'run' to be a folder with settings.json and best.ckpt"),
        ([str(run), "--examples", "0"], "Expected 'examples' to be at least 1 (got 0). See --help."),
        ([str(full)], "Expected a run whose attention has graphs (got attention 'full')."),
    ):
        with pytest.raises(SystemExit):
            main(["graphs", "--run", *options])
        assert words in capsys.readouterr().err


def test_damaged_weights_and_other_data_are_refused(
    untrained: Callable[..., Path], run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = untrained(tmp_path / "other", Path(str(Plan.read(run / "settings.json").data)))
    splits = train.open_run(folder)[2]
    dataclasses.replace(Plan.read(folder / "settings.json"), fingerprint=splits_digest(splits)).write(
        folder / "settings.json"
    )
    train.open_run(folder)
    commands = (["graphs", "--run", str(folder)], ["cost", "--output", str(tmp_path / "out"), "--runs", str(folder)])
    for words in commands:
        with pytest.raises(SystemExit):
            main([*words, "--data", str(data)])
        assert (
            f"Expected 'data' to be what the run was started with (got other examples in {data})"
            in capsys.readouterr().err
        )
    content = bytearray((folder / "best.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "best.ckpt").write_bytes(content)
    for words in commands:
        with pytest.raises(SystemExit):
            main(words)
        assert "best.ckpt' to be as it was written (got other bytes than" in capsys.readouterr().err


def test_a_damaged_log_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("graphs.html"))  # of another test
    (folder / "train.csv").write_text("garbage\n")
    with pytest.raises(SystemExit):
        main(["graphs", "--run", str(folder), "--examples", "4", "--structure", "1"])
    assert "Expected 'log' with columns 'step'" in capsys.readouterr().err
    assert not (folder / "graphs.html").exists()
