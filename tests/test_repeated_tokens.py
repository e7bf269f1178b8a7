"""The repeated-token task, its study, and the guard over densities."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import learning_study as study
import lra_listops
import repeated_tokens as task
from density_guard import DensityGuard
from sbm_pyg import EncoderTrace, patterns

TINY = task.Settings(tokens=12, batch_size=4, steps=6, num_blocks=4, channels=8, evaluate_every=3)


def test_labels_say_which_numbers_occur_again() -> None:
    numbers, labels = task.make_batch(50, 20, 1)
    assert numbers.min() >= 0
    assert numbers.max() < 20
    for row, label in zip(numbers.tolist(), labels.tolist(), strict=True):
        assert label == [float(row.count(number) > 1) for number in row]
    assert torch.equal(task.make_batch(50, 20, 1)[0], numbers)
    assert not torch.equal(task.make_batch(50, 20, 2)[0], numbers)


ESTIMATORS = ["local", "mask", "paper", "relaxed", "concrete", "score-function", "none"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_trains_and_moves_the_model_unless_it_is_none(estimator: str, tmp_path: Path) -> None:
    settings = replace(TINY, estimator=estimator)
    before = task.make_model(settings).state_dict()["encoder.blocks.0.attention.sbm.clusters"].clone()
    rows = task.train(tmp_path, "sbm", settings, progress=False)
    assert [row["step"] for row in rows] == [3, 6]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    after = torch.load(tmp_path / "sbm.ckpt", weights_only=True)["model"]["encoder.blocks.0.attention.sbm.clusters"]
    assert torch.equal(before, after) == (estimator == "none")


def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(tmp_path: Path) -> None:
    settings = replace(TINY, **task.SPARSE)
    whole = task.train(tmp_path / "whole", "sbm", settings, progress=False)
    original, count = task.step_loss, 0

    def doomed(*arguments: object) -> object:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return original(*arguments)  # type: ignore[arg-type]

    task.step_loss = doomed  # type: ignore[assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            task.train(tmp_path / "cut", "sbm", settings, progress=False)
    finally:
        task.step_loss = original
    resumed = task.train(tmp_path / "cut", "sbm", settings, progress=False)
    assert [{**row, "seconds": 0} for row in resumed] == [{**row, "seconds": 0} for row in whole]
    states = [torch.load(tmp_path / name / "sbm.ckpt", weights_only=True)["model"] for name in ("whole", "cut")]
    assert all(torch.equal(one, two) for one, two in zip(states[0].values(), states[1].values(), strict=True))
    with pytest.raises(ValueError, match=r"Expected the settings of .*\(got other seed\)"):
        task.train(tmp_path / "cut", "sbm", replace(settings, seed=1), progress=False)


def test_the_command_line_writes_curves_and_results_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    sizes = ["--tokens", "12", "--batch-size", "4", "--steps", "4", "--num-blocks", "4", "--evaluate-every", "2", "--threads", "1"]
    task.main(["--quick", *sizes, "--output", str(folder)])
    results = json.loads((folder / "results.json").read_text())
    assert set(results) == {"full", "sbm"}
    assert results["full"]["density"] == 1
    assert (folder / "curves.png").stat().st_size > 1000
    table = (folder / "sbm.csv").read_text()
    task.main(["--output", str(folder), "--resume"])
    assert (folder / "sbm.csv").read_text() == table
    assert "accuracy" in capsys.readouterr().out


def test_the_sparse_settings_are_those_of_the_study() -> None:
    sparse = replace(task.QUICK, **task.SPARSE)
    assert sparse == replace(study.RUNS["local, long, assortative, 0.1"], seed=sparse.seed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "Expected 'steps' to be at least 1"),
        (["--threads", "0"], "Expected 'threads' to be at least 1"),
        (["--parameterization", "odd"], "Expected 'parameterization' to be one of"),
        (["--resume"], "Expected 'output' to be the folder of a run to resume"),
    ],
)
def test_errors_of_the_command_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        task.main(options)
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_study_runs_what_is_missing_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "RUNS", {"full": replace(TINY, attention="full"), "local": TINY})
    study.run(tmp_path, ["full", "local"], seeds=2)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.csv")}
    assert {path.name for path in made} == {"full_0.csv", "full_1.csv", "local_0.csv", "local_1.csv"}
    study.run(tmp_path, ["full", "local"], seeds=2)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.csv")} == made
    table = study.report(tmp_path)
    assert "| full | 2 |" in table
    assert (tmp_path / "estimators.png").exists()


def test_the_study_of_listops_runs_what_is_missing_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lra_listops.generate(tmp_path / "data", lra_listops.Parameters(train=60, val=20, test=20, max_depth=2, min_length=4, max_length=16))
    sizes = "--layers 1 --channels 16 --head-channels 8 --ffn-channels 16 --num-blocks 4 --batch-size 8 --steps 4 --validate-every 2"
    monkeypatch.setattr(study, "SHORT", (*study.SHORT, *sizes.split(), "--accelerator", "cpu"))
    for _ in range(2):
        study.listops(tmp_path, ["local, 0.1"], 1, tmp_path / "data", tmp_path / "work", threads=1)
    (row,) = study.read_results(tmp_path)
    assert (row["run"], row["seed"], row["examples"]) == ("local, 0.1", "0", "20")
    assert 0 < float(row["density"]) < 1
    assert (tmp_path / "listops_local_0.1_0.csv").read_text().count("\n") == 4  # a head, before the first step, two validations
    settings = json.loads((tmp_path / "work" / "local_0.1_0" / "settings.json").read_text())["settings"]
    assert settings["density_weight"] == 0.1
    for _ in range(2):
        study.average(tmp_path, study.LISTOPS, 1, tmp_path / "data", tmp_path / "work", graphs=3)
    (again,) = study.read_results(tmp_path, study.LISTOPS_GRAPHS)
    assert (again["run"], again["graphs"], again["one_graph"]) == ("local, 0.1", "3", row["accuracy"])
    assert 0 <= float(again["accuracy"]) <= 1
    shutil.rmtree(tmp_path / "work")
    study.listops(tmp_path, ["local, 0.1"], 1, tmp_path / "data", tmp_path / "work", threads=1)
    assert not (tmp_path / "work").exists()


def test_the_report_on_listops_pairs_seeds_with_full_attention(tmp_path: Path) -> None:
    lines = ["run,seed,accuracy,loss,examples,density,tokens_per_second,density_layer0_head0,density_layer0_head1"]
    for name, accuracies, density in (("full", (0.74, 0.76), 1.0), ("local", (0.75, 0.78, 0.1), 0.2)):
        lines += [f"{name},{seed},{accuracy},1,10,{density},100,{density},{density / 2}" for seed, accuracy in enumerate(accuracies)]
    (tmp_path / study.LISTOPS_RESULTS).write_text("\n".join(lines) + "\n")
    table = study.report_listops(tmp_path)
    # Differences of 1 and 2 points: mean 1.5, standard error 0.5, and 12.706 is the 97.5 % point of Student's t with one degree of freedom.
    assert "| local | 2 | 76.50 (75.00 to 78.00) | +1.50 ± 6.35 | 20.0 (20.0 to 20.0) | 20.0 (20.0 to 20.0) |" in table
    assert "| full | 2 |" in table
    rows = ["run,seed,graphs,one_graph,accuracy", "local,0,8,0.75,0.76", "local,1,8,0.78,0.79", "local,2,8,0.1,0.2"]
    (tmp_path / study.LISTOPS_GRAPHS).write_text("\n".join(rows) + "\n")
    assert "| local | 2 | 8 | 76.50 (75.00 to 78.00) | 77.50 (76.00 to 79.00) | +2.50 ± 6.35 |" in study.report_graphs(tmp_path)


def test_enumeration_finds_the_score_function_unbiased_and_eq_9_no_better_than_a_coin() -> None:
    found = study.gradient_errors(0.25, 1.0, chance=0.25, cases=40, keys=6)
    assert found["score function"]["bias"] < 1e-9
    assert found["score function"]["signs"] == pytest.approx(1)
    assert 0.35 < found["paper"]["signs"] < 0.65
    assert found["local"]["signs"] > 0.9
    assert found["local"]["bias"] < found["mask"]["bias"]
    assert found["local"]["deviation"] < found["local, non-edges over their chance"]["deviation"]


def test_the_guard_warns_once_per_head() -> None:
    empty = patterns.random(40, 1, seed=0).select(torch.zeros(40, dtype=torch.bool))
    loops = patterns.window(40, 0)
    half = loops.select(torch.arange(40) < 10)
    full = patterns.full(40)
    guard = DensityGuard()
    with pytest.warns(UserWarning, match="has collapsed to a density of 0.00%") as caught:
        guard.check(EncoderTrace((full, empty, None), (None, None, None), (1, 1)), 7)
    assert len(caught) == 1
    assert "Step 7: layer 1, head 0" in str(caught[0].message)
    assert "--density-weight" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert guard.check(EncoderTrace((full, empty, None), (None, None, None), (1, 1)), 8) == []
        assert guard.check(EncoderTrace((loops,), (None,), (1, 1)), 9) == []
    with pytest.warns(UserWarning, match="leaves 75% of its queries without any edge"):
        guard.check(EncoderTrace((half,), (None,), (1, 1)), 10)
    with pytest.raises(ValueError, match=r"Expected 'empty' in \[0, 1\]"):
        DensityGuard(empty=2)
