"""The second half of the contract in Triton's interpreter: a file of its own, so that another worker takes it."""

from __future__ import annotations

import pytest
from test_triton import EACH_PART, interpret, needs_triton


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("part", EACH_PART)
def test_graphs_keep_their_contract_in_the_interpreter(part: int) -> None:
    interpret("triton_graphs.py", part)
