"""Sparsefinder on a language model of your own: do learned graphs predict attention? ``python -m examples.sparsefinder --help``."""
