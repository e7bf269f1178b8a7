"""Graph transformers on real graphs, with attention and without. ``python -m examples.graphs --help``."""
