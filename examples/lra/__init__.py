"""Trainer, tables, costs and reports for the Long Range Arena, on the public names of ``sbm_pyg``; docs/lra.md describes them."""
