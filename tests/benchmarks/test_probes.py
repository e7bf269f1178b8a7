"""The study of probes and block means: its estimator by enumeration of graphs and probes, and its table on the page."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.benchmarks import probes as study
from examples.common.tables import read
from examples.recall import spread
from sbm_pyg.ops.reference.effects import effect_weight

KEYS = 4
DOCS = Path(study.__file__).parents[2] / "docs"
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}

pytestmark = pytest.mark.usefixtures("one_thread")


def subsets(keys: int) -> Tensor:
    """All sets of keys, ``[2 ** M, M]``."""
    return torch.arange(2**keys)[:, None] & 2 ** torch.arange(keys) > 0


def law_of(chance: Tensor) -> Tensor:
    return torch.where(subsets(len(chance)), chance, 1 - chance).prod(-1)


@pytest.fixture
def query() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Probabilities, weights and values of one query, and a direction."""
    random = study.Random(3)
    return random.uniform(KEYS), random.normal(KEYS).exp(), random.normal(KEYS, 3), random.normal(3)


@pytest.mark.parametrize("probes", [0.5, 2, 3.5, 6])
@pytest.mark.parametrize("power", study.POWERS.values())
def test_chances_sum_to_the_number_of_probes(probes: float, power: float) -> None:
    share = study.Random(0).uniform(5, 6) ** (4 * power)
    chance = study.chances(share, probes)
    torch.testing.assert_close(chance.sum(-1), torch.full((5,), float(probes), dtype=torch.float64), **EXACT)
    assert float(chance.min()) >= study.FLOOR * probes / 6 - 1e-12
    assert float(chance.max()) <= 1
    free = chance < 1
    mixed = (1 - study.FLOOR) * share / share.sum(-1, keepdim=True) + study.FLOOR / 6
    ratio = torch.where(free, chance / mixed, torch.nan)
    rows = free.any(-1)
    torch.testing.assert_close(
        ratio[rows].nan_to_num(0).amax(-1), ratio[rows].nan_to_num(torch.inf).amin(-1), rtol=1e-9, atol=0
    )


def test_weights_are_those_of_the_library_where_chances_are_equal() -> None:
    p = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    chance = torch.full_like(p, 0.25)
    ones, yes = torch.ones_like(p), torch.ones(50, dtype=torch.bool)
    edges = study.estimate(ones, yes, yes, p, chance)
    probes = study.estimate(ones, ~yes, yes, p, chance)
    torch.testing.assert_close(edges, effect_weight(p, chance), **EXACT)
    torch.testing.assert_close(probes, effect_weight(p, chance, probing=True), **EXACT)
    assert not study.estimate(ones, ~yes, ~yes, p, chance).any()


def test_effects_are_differences_of_softmax_attention(query: tuple[Tensor, ...]) -> None:
    _, weight, value, slope = query

    def attend(present: Tensor) -> Tensor:
        kept = torch.where(present, weight, 0)
        return kept @ value / kept.sum(-1, keepdim=True).clamp(min=1e-300)

    every = subsets(KEYS)
    for loss in (lambda out: out @ slope, lambda out: torch.tanh(out) @ slope):
        found = study.effects(weight, value, every, loss)
        for key in range(KEYS):
            single = torch.arange(KEYS) == key
            with_, without = (attend(side).requires_grad_() for side in (every | single, every & ~single))
            torch.testing.assert_close(found[0][:, key], (loss(with_) - loss(without)).detach(), **EXACT)
            for side, got in zip((with_, without), found[1:], strict=True):
                grad = torch.autograd.grad(loss(side).sum(), side)[0]
                torch.testing.assert_close(got[:, key], ((with_ - without) * grad).sum(-1).detach(), **EXACT)


@pytest.mark.parametrize("power", study.POWERS.values())
@pytest.mark.parametrize("probes", [1, 3])
def test_any_chances_are_unbiased_where_the_loss_is_linear(
    query: tuple[Tensor, ...], power: float, probes: int
) -> None:
    """Over all 16 graphs times 16 sets of probes; a baseline changes nothing, and chances that are not in the weights do."""
    p, weight, value, slope = query
    chance = study.chances(p**power, probes)
    law = law_of(p)[:, None] * law_of(chance)  # [graphs, sets]
    every = subsets(KEYS)

    def mean(effect: Tensor, known: Tensor, base: Tensor | float = 0.0) -> Tensor:
        grad = base + study.estimate(effect[:, None] - base, every[:, None], every[None], p, known)
        return (law[..., None] * grad).sum((0, 1))

    true, effect, _ = study.effects(weight, value, every, lambda out: out @ slope)
    want = law_of(p) @ true
    torch.testing.assert_close(mean(effect, chance), want, **EXACT)
    torch.testing.assert_close(mean(effect, chance, base=torch.arange(KEYS) - 1.5), want, **EXACT)
    if power:
        assert float((mean(effect, study.chances(torch.ones(KEYS).double(), probes)) - want).abs().max()) > 1e-3

    _, there, missing = study.effects(weight, value, every, lambda out: torch.tanh(out) @ slope)
    grad = study.estimate(torch.where(every, there, missing)[:, None], every[:, None], every[None], p, chance)
    first, second = ((law[..., None] * grad**power).sum((0, 1)) for power in (1, 2))
    got = study.moments(p, chance, law_of(p), there, missing)
    torch.testing.assert_close(got, (first, second - first**2), **EXACT)


def test_block_means_are_the_same_to_all_that_blocks_share() -> None:
    """The gradient of the block matrix is left as it is; that which tells tokens of a block apart is lost."""
    member = torch.nn.functional.one_hot(torch.arange(12) % 3, 3).double()
    grad = study.Random(0).normal(12, 12)
    means = study.block_means(grad, member)
    torch.testing.assert_close(member.T @ means @ member, member.T @ grad @ member, **EXACT)
    assert float((means[0] - means[3]).abs().max()) < 1e-12
    assert float((grad[0] - grad[3]).abs().max()) > 0.1


def test_the_program_measures_once_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cases", "1", "--graphs", "64", "--csv", str(tmp_path / "probes.csv")]
    study.main(words)
    shown, saved = capsys.readouterr().out, (tmp_path / "probes.csv").read_text()
    rows = read(tmp_path / "probes.csv")
    equal = [row for row in rows if row["keys"] == row["probes"] == 64]
    assert len({row["deviation"] for row in equal if row["gradient to"] == "logits"}) == 2  # all are probes in any way
    study.main(words)
    assert capsys.readouterr().out == shown
    assert (tmp_path / "probes.csv").read_text() == saved
    with pytest.raises(SystemExit):
        study.main(["--graphs", "10"])
    assert "Expected 'graphs' to be at least 64 (got 10)" in capsys.readouterr().err


def test_the_page_has_the_tables() -> None:
    """Lines for 64 tokens stand on the page, as the tidy tables have them."""
    page = (DOCS / "learning_appendix.md").read_text().splitlines()
    lines = study.report(read(DOCS / "learning" / "probes.csv")).splitlines()
    shown = [line for line in lines if not line.startswith("| 8 |")]
    shown += spread.report_probes(read(DOCS / "learning" / "probes_trained.csv")).splitlines()
    assert len(shown) > 20
    assert [line for line in shown if line not in page] == []
