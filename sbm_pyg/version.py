"""The version of the library, in the one place that packaging, saved models and ``python -m sbm_pyg.info`` read."""

__version__ = "0.1.0"
