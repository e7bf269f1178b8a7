"""Pictures of the programs, drawn anew from the rows of docs/: they say what they show, in words."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from examples.common.tables import read
from examples.dcmm import report as dcmm
from examples.findings.__main__ import PICTURES
from examples.sparsefinder import report as sparsefinder

LEARNING = Path(dcmm.__file__).parents[2] / "docs" / "learning"
DRAWN: dict[str, tuple[ModuleType, int]] = {  # folder of rows: who draws them, and how many names at most
    "dcmm/digits": (dcmm, 10),
    "sparsefinder": (sparsefinder, 14),
}

pytestmark = pytest.mark.examples


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures by the name of the file that they would have gone to."""
    found: dict[str, Any] = {}
    for module in (dcmm, sparsefinder):
        monkeypatch.setattr(module, "save_figure", lambda path, figure, **_: found.update({path.name: figure}))
    return found


@pytest.mark.parametrize("folder", DRAWN)
def test_pictures_name_their_axes_and_methods(folder: str, drawn: dict[str, Any], tmp_path: Path) -> None:
    module, most = DRAWN[folder]
    paths = module.draw(read(LEARNING / folder / "rows.csv"), tmp_path)
    assert {*drawn} == {path.name for path in paths}
    for name, figure in drawn.items():
        for axes in figure.axes:
            if axes.has_data():
                assert axes.get_xlabel() or figure.get_supxlabel() or not axes.get_xticks().size, name
                assert axes.get_ylabel() or figure.get_supylabel(), name
        (legend,) = figure.legends
        names = [text.get_text() for text in legend.get_texts()]
        assert 2 <= len(names) <= most, (name, names)
        assert len({*names}) == len(names)
        words = [*names, *(text.get_text() for axes in figure.axes for text in axes.texts)]
        assert not [word for word in words if {*word} & {"=", "_"}], (name, words)


def test_tests_of_digits_are_drawn_over_ten_points_or_more(drawn: dict[str, Any], tmp_path: Path) -> None:
    dcmm.draw(read(LEARNING / "dcmm" / "digits" / "rows.csv"), tmp_path)
    low, high = drawn["digits.png"].axes[1].get_ylim()
    assert high - low > 10


def test_findings_are_ten_short_ones_with_a_picture() -> None:
    page = (LEARNING.parent / "learning.md").read_text()
    findings = [part.partition("\n## ")[0] for part in page.split("\n### ")[1:]]
    shown = [re.findall(r"\(learning/findings/finding-(\w+)\.png\)", finding) for finding in findings]
    assert shown == [[name] for name in PICTURES]
    assert len(findings) == 10
    assert all(finding.rstrip().count("\n") < 15 for finding in findings)


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_of_a_finding_is_small_and_in_words(name: str) -> None:
    figure = PICTURES[name]()
    texts = [label.get_text() for axes in figure.axes for label in (*axes.texts, *axes.get_yticklabels())]
    texts += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert all(axes.get_xlabel() for axes in figure.axes)
    assert not [text for text in texts if {*text} & {"=", "_"}]
    if name == "code":
        assert {"0.02", "0.04", "0.14", "0.45", "0.50"} < {*texts}
    assert 5_000 < (LEARNING / "findings" / f"finding-{name}.png").stat().st_size < 60_000
