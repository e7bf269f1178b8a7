"""The second half of the contract in Triton's interpreter: a file of its own, so that another worker takes it."""

from __future__ import annotations

from test_triton import interpret, needs_triton


@needs_triton
def test_graphs_keep_their_contract_in_the_interpreter() -> None:
    interpret("triton_graphs.py")
