"""The door to the trainer: ``python examples/lra.py ...`` is ``python -m examples.lra train ...``, from anywhere."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # of the clone, in place of the folder of this file

    from examples.lra.__main__ import main

    main(["train", *sys.argv[1:]])
