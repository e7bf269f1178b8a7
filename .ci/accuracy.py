"""Checks what the README's main job prints: ``python -m examples.recall > FILE; python .ci/accuracy.py FILE``.

It ends with status 1 unless the table is there, with full attention and sampled graphs, and both answer at least 99 %.
"""

import re
import sys
from pathlib import Path

METHODS, LEAST = ("full", "sbm"), 99.0
TABLE = re.compile(r"^\| method \|.*\n\|[-:|]+\|\n((?:\|.*\n?)+)", re.MULTILINE)


def accuracies(printed: str) -> dict[str, float]:
    """The mean accuracy of each run in percent, by method and density, the first and the third column of the table."""
    table = TABLE.search(printed)
    if table is None:
        raise ValueError(f"Expected a table of methods (got {printed[-200:]!r}). Look at the output above.")
    column = table[0].partition("\n")[0].split("|").index(" accuracy, % ")
    lines = [line.split("|") for line in table[1].splitlines()]
    return {f"{line[1].strip()} {line[3].strip()} %": float(line[column].split()[0]) for line in lines}


def check(printed: str) -> None:
    """Raises a ``ValueError`` unless every method is in the table, and every run answers enough."""
    reached = accuracies(printed)
    for method in METHODS:
        runs = {name: accuracy for name, accuracy in reached.items() if name.split()[0] == method}
        if not runs or not all(accuracy >= LEAST for accuracy in runs.values()):
            raise ValueError(f"Expected runs of {method!r} with accuracies of at least {LEAST:g} % (got {runs}).")


if __name__ == "__main__":
    try:
        check(Path(sys.argv[1]).read_text())
    except ValueError as error:
        sys.exit(str(error))
