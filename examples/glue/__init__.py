"""Masked language models with sampled attention, and GLUE, by the trainer of transformers. ``python -m examples.glue --help``."""
