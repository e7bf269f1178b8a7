"""Vision transformers whose scores have the bias of a block model; see ``python -m examples.dcmm --help``."""
