"""Tasks that only attention can do: find one token among many. ``python -m examples.recall --help``."""
