"""The sweep over all model types of ``transformers``: accepted ones equal dense attention, others are refused as is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

import sweep_hugging_face as sweep  # noqa: E402


def results_of(output: Path, *types: str) -> dict[str, str]:
    return {name: result for name, (result, _) in sweep.main([*types, "--output", str(output)]).items()}


@pytest.mark.long
def test_every_model_type_equals_dense_attention_or_is_refused(tmp_path: Path) -> None:
    results = sweep.main(["--output", str(tmp_path / "sweep.jsonl")])
    faults = {name: remark for name, (result, remark) in results.items() if result == "fault"}
    assert not faults
    assert sum(result == "equal" for result, _ in results.values()) >= 280


def test_the_sweep_notices_attention_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert results_of(tmp_path / "one", "bert", "gemma2") == {"bert": "equal", "gemma2": "refused"}
    lines = [json.loads(line) for line in (tmp_path / "one").read_text().splitlines()]
    assert [line["type"] for line in lines] == ["bert", "gemma2"]
    replace: Any = sweep.replace_attention
    monkeypatch.setattr(sweep, "replace_attention", lambda model, **_: replace(model, source="window", size=1))
    assert results_of(tmp_path / "two", "bert") == {"bert": "fault"}
    monkeypatch.setattr(sweep, "replace_attention", lambda model, **_: model.config.update({"sbm": 1}) or 1 / 0)
    assert results_of(tmp_path / "three", "bert") == {"bert": "fault"}
