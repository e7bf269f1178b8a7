"""numba kernels for the CPU, in files named as those of plain torch (:mod:`sbm_pyg.ops.reference`).

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`, on the CPU. Each kernel is compiled by its first call.
"""
