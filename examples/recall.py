"""Associative recall: which value came with this key? Full attention next to a block model that attends to 5 % of the pairs.

    python -m examples.recall                                                   two minutes
    python -m examples.recall --tasks mqar-laptop --choosers sbm top-k --seeds 0 1

It is the arena with these methods and without frozen twins; `python -m examples.arena --help` has its tasks, methods and options.
"""

import sys
from collections.abc import Sequence

from examples.arena.__main__ import main as arena


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the arena; what ``arguments`` say comes before what recall would take."""
    words = sys.argv[1:] if arguments is None else arguments
    arena(["--choosers", "full", "sbm", "--no-twins", "--output", "runs/recall", *words])


if __name__ == "__main__":
    main()
