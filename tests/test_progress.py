"""Bars are drawn as ever where somebody watches, and rarely elsewhere; so is what kernels compile."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from numba.core import event

from sbm_pyg.ops.cpu import edges as cpu_edges
from sbm_pyg.ops.cpu import threads
from sbm_pyg.progress import LOG_SECONDS, tqdm

assert cpu_edges


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(file: io.StringIO, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> int:
    """How often a bar is drawn in a thousand steps of so many seconds, each of which has something to say."""
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    now = [1000.0]
    with tqdm(total=1000, file=file, **({"mininterval": 0} if isinstance(file, Terminal) else {})) as bar:
        bar._time = lambda: now[0]
        bar.start_t = bar.last_print_t = now[0]
        bar._drawn = now[0] if bar._drawn is not None else None
        for step in range(1000):
            now[0] += seconds
            bar.update()
            bar.set_postfix_str(f"loss {step}")
    return file.getvalue().count("\r")


def test_a_bar_is_drawn_rarely_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(Terminal(), monkeypatch) >= 1000
    assert drawn(io.StringIO(), monkeypatch) <= 3
    assert 8 <= drawn(io.StringIO(), monkeypatch, seconds=LOG_SECONDS / 100) <= 14


def test_a_bar_that_is_switched_off_draws_nothing() -> None:
    file = io.StringIO()
    with tqdm(total=3, file=file, disable=True) as bar:
        bar.update()
        bar.set_postfix_str("loss 1")
    assert file.getvalue() == ""


def test_compilation_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    kernels = sorted(threads._kernels, key=lambda kernel: kernel.__name__)[:2]
    monkeypatch.setattr(threads._announcer, "announced", False)
    with caplog.at_level(logging.WARNING, "sbm_pyg"):
        for kernel in kernels:
            with event.trigger_event("numba:compile", data={"dispatcher": kernel}):
                pass
        with event.trigger_event("numba:compile", data={"dispatcher": None}):
            pass
    assert len(kernels) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    folder = kernels[0]._cache.cache_path
    assert caplog.messages == [
        f"sbm_pyg compiles the CPU kernels that a call needs, some seconds each; once, into {folder}"
    ]
