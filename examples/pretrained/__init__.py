"""A trained decoder of transformers, made sparse and compared. ``python -m examples.pretrained --help``."""
