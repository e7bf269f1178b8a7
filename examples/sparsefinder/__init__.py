"""Sparsefinder on a language model of your own: do learned graphs foretell attention? ``python -m examples.sparsefinder --help``."""
