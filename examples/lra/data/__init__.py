"""The data of the Long Range Arena: readers and generators of five tasks, prepared arrays, batches."""
