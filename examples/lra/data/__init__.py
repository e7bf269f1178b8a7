"""The data of the Long Range Arena: readers and generators of five tasks, prepared arrays, batches.

``tasks.py`` is the table that the other modules and the programs meet in. Not here: settings and presets (``examples/lra/settings.py``).
"""
