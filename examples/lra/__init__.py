"""Trainer, tables, costs and reports for the Long Range Arena, on the public names of ``sbm_pyg`` alone.

In: a clone, from whose root ``python -m examples.lra train|prepare|table|cost|graphs`` is called. Out: folders of runs, data and tables;
docs/lra.md describes them. Not here: anything that ``sbm_pyg`` needs.
"""
